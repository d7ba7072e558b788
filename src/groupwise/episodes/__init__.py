"""Episodes: completions of many turns between the policy and tools, exact to the token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.config.schema import Config
from groupwise.data.answers import AnswerStyle
from groupwise.data.prompts import worked_completion
from groupwise.engines import Engine
from groupwise.episodes.driver import EpisodeEngine, Episodes
from groupwise.episodes.formats import FORMATS, format_of_template
from groupwise.episodes.templates import TurnTemplate
from groupwise.episodes.tools import Toolbox, load_tools
from groupwise.errors import ConfigError, DataError
from groupwise.types import Problem, Prompt

__all__ = ["EpisodeEngine", "Episodes", "open_episodes", "playing", "with_tools_described", "worked_episode"]


def open_episodes(config: Config, tokenizer: Any, end_token_ids: Sequence[int]) -> Episodes | None:
    """How the run's episodes are played; None without tools.

    Raises:
        ConfigError: a tool cannot be found or described, prompts have no turns, or the chat template rewrites history.
        ModelError: the chat template cannot hold a conversation with tools.
    """
    rollout = config.rollout
    if not rollout.tools:
        return None
    if config.prompt.style != "chat":
        raise ConfigError(f"rollout.tools needs turns, but prompt.style is {config.prompt.style}: use prompt.style=chat")
    tools = load_tools(rollout.tools)
    named = format_of_template(tokenizer.chat_template) if rollout.call_format == "auto" else rollout.call_format
    form = FORMATS[named]
    template = TurnTemplate(tokenizer, end_token_ids, [tool.schema for tool in tools.values()] if form.native else None)
    if rollout.rewritten_history == "refuse" and (how := template.rewrites()):
        raise ConfigError(
            f"the chat template of {config.model.name} rewrites what was said before ({how}), so that a chat program would not show the "
            "policy the turns that it learnt with: set rollout.rewritten_history=append to keep them as they were sampled"
        )
    toolbox = Toolbox(tools, rollout.tool_timeout_s)
    return Episodes(toolbox, form, template, rollout.max_turns, rollout.concurrent_tool_calls)


def playing(engine: Engine, episodes: Episodes | None) -> Engine:
    """``engine``, or around it the one that plays ``episodes``."""
    return engine if episodes is None else EpisodeEngine(engine, episodes)


def with_tools_described(system: str | None, episodes: Episodes | None) -> str | None:
    """The system prompt, with the tools in it where the chat template does not describe them."""
    if episodes is None or episodes.format.native:
        return system
    tools = list(episodes.toolbox.tools.values())
    example = episodes.format.write(tools[0].name, dict.fromkeys(tools[0].parameters[:1], "..."))
    described = f"To use a tool, write only {example} and wait for its result. Tools: {' '.join(tool.summary for tool in tools)}"
    return f"{system}\n{described}" if system else described


def worked_episode(prompt: Prompt, style: AnswerStyle, tokenizer: Any, episodes: Episodes | None) -> tuple[list[int], list[bool]]:
    """What a policy should have done with ``prompt``, as tokens, and which of them it should have sampled, end tokens included.

    With tools: the turns in the row's column ``script``, whose calls are really made; or a call of the calculator where the row has an
    ``expression``. Otherwise the worked answer. Raises DataError for a script that is no list of texts.
    """
    turns = worked_turns(prompt.problem, style, episodes)
    if episodes is not None:
        return episodes.play_script(turns, tokenizer.eos_token_id)
    ids = [*tokenizer(turns[0], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return ids, [True] * len(ids)


def worked_turns(problem: Problem, style: AnswerStyle, episodes: Episodes | None) -> list[str]:
    answer = worked_completion(problem, style)
    if episodes is None:
        return [answer]
    script = problem.columns.get("script")
    if script is not None:
        if not isinstance(script, list) or not script or not all(isinstance(turn, str) for turn in script):
            raise DataError(
                f"the column script of problem {problem.id} is {script!r:.80}, but it must be a list of texts, the policy's turns in order"
            )
        return script
    expression = problem.columns.get("expression")
    if expression is None or "calculator" not in episodes.toolbox.tools:
        return [answer]
    return [episodes.format.write("calculator", {"expression": str(expression)}), answer]
