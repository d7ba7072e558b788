"""Episodes: completions of many turns between the policy and tools or an environment, exact to the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from groupwise.config.schema import Config, PromptConfig
from groupwise.data.answers import AnswerStyle
from groupwise.data.prompts import render, worked_completion, worked_expressions
from groupwise.engines import Engine
from groupwise.engines.turns import GRACE_S
from groupwise.episodes.driver import Agents, EpisodeEngine, Episodes, Played
from groupwise.episodes.environments import Environments, with_observation
from groupwise.episodes.formats import FORMATS, CallFormat, format_of_template
from groupwise.episodes.templates import TurnTemplate
from groupwise.episodes.tools import Tool, load_tools
from groupwise.errors import ConfigError, DataError
from groupwise.types import Message, Problem, Prompt

__all__ = [
    "EpisodeEngine", "Episodes", "describe_tools", "open_episodes", "playing", "render_episode", "with_observation", "worked_episode",
]  # fmt: skip


OpenAgents = Callable[[Config, TurnTemplate, CallFormat, Sequence[int]], Agents]
"""Makes what plays the agent's command of a config (``serving.agents``, which stands above this package)."""


def open_episodes(
    config: Config, tokenizer: Any, end_token_ids: Sequence[int], open_agents: OpenAgents | None = None
) -> Episodes | None:
    """How the run's episodes are played; None without tools and environment. ``open_agents``: None where no agent can be played.

    Raises:
        ConfigError: a tool or an environment cannot be found or described, prompts have no turns, the chat template rewrites history, or an
            agent cannot be played here.
        ModelError: the chat template cannot hold a conversation of several turns.
    """
    rollout = config.rollout
    if not rollout.has_episodes:
        return None
    if config.prompt.style != "chat":
        raise ConfigError(f"an episode needs turns, but prompt.style is {config.prompt.style}: use prompt.style=chat")
    tools = load_tools(rollout.tools, rollout.tool_timeout_s)
    named = (
        format_of_template(getattr(tokenizer, "chat_template", None)) if rollout.call_format == "auto" else rollout.call_format
    )
    template = TurnTemplate(tokenizer, end_token_ids, config.prompt.template_arguments, FORMATS[named].native)
    environments, agents = None, None
    if rollout.command is not None:
        if open_agents is None:
            raise ConfigError(
                "rollout.environment has an agent's command, which train and eval play: to talk to the model itself, set "
                "rollout.environment=null; to let the agent talk to it, start groupwise serve"
            )
        agents = open_agents(config, template, FORMATS[named], end_token_ids)
    elif rollout.environment is not None:
        environments = Environments.load(rollout.environment, rollout.tool_timeout_s)
    for role in (None, "user") if rollout.environment is not None else (None,):
        if rollout.rewritten_history == "refuse" and (how := template.rewrites(role)):
            if role == "user" and environments is not None and environments.with_step() is None:
                break  # results of tools alone stand between turns
            raise ConfigError(
                f"the chat template of {config.model.name} rewrites what was said before ({how}), so that a chat program would not show "
                "the policy the turns that it learnt with: set rollout.rewritten_history=append to keep them as they were sampled, or "
                "fork to go on from the history as the template writes it"
            )
    return Episodes(
        tools, environments, FORMATS[named], template, rollout.max_turns, rollout.tool_timeout_s, rollout.concurrent_tool_calls,
        grace_s=None if config.training.deterministic else GRACE_S,
        agents=agents, forks=rollout.rewritten_history == "fork",
    )  # fmt: skip


def playing(engine: Engine, episodes: Episodes | None) -> Engine:
    """``engine``, or around it the one that plays ``episodes``."""
    return engine if episodes is None else EpisodeEngine(engine, episodes)


def render_episode(
    problem: Problem, tokenizer: Any, prompt: PromptConfig, system: str | None, episodes: Episodes | None
) -> Prompt:
    """The prompt of ``problem``: as ``data.prompts.render`` has it, with what its environment says at the start, and with the tools."""
    if episodes is None:
        return render(problem, tokenizer, prompt, system)
    if episodes.agents is not None:
        messages, system, schemas = episodes.agents.opening(problem, system)
        return replace(render(replace(problem, question=messages), tokenizer, prompt, system, schemas), problem=problem)
    said, tools = None, list(episodes.tools.values())
    if episodes.environments is not None:
        said, more = episodes.environments.opening(problem)
        if both := [tool.name for tool in more if tool.name in episodes.tools]:
            raise ConfigError(f"rollout.tools and the environment both have a tool that is called {both[0]}: rename one of them")
        tools += more
    asked = problem if said is None else replace(problem, question=with_observation(problem.question, said))
    native = episodes.format.native
    if tools and not native:
        described, question = describe_tools(tools, episodes.format), asked.question
        if not isinstance(question, str) and question[0]["role"] == "system":  # which is shown in place of ``system``
            own: Message = {"role": "system", "content": f"{question[0]['content']}\n{described}"}
            asked = replace(asked, question=[own, *question[1:]])
        else:
            system = "\n".join(filter(None, (system, described)))
    rendered = render(asked, tokenizer, prompt, system, [tool.schema for tool in tools] if tools and native else None)
    return replace(rendered, problem=problem)


def describe_tools(tools: Sequence[Tool], form: CallFormat) -> str:
    """What the system prompt says of tools where the chat template cannot."""
    example = form.write(tools[0].name, dict.fromkeys(tools[0].parameters[:1], "..."))
    return f"To use a tool, write only {example} and wait for its result. Tools: {' '.join(tool.summary for tool in tools)}"


def worked_episode(prompt: Prompt, style: AnswerStyle, tokenizer: Any, episodes: Episodes | None) -> list[Played]:
    """What a policy should have done with ``prompt``, as tokens, and which of them it should have sampled, end tokens included; in several
    samples where the episode forks.

    In an episode: the turns in the row's column ``script``, which are really answered; or calls of the calculator, where it is there, of
    the row's ``worked_expressions``, and the worked answer. Otherwise that alone. Raises DataError for a script that is no list of texts.
    """
    turns = _worked_turns(prompt.problem, style, episodes)
    if episodes is not None:
        return episodes.play_script(prompt, turns, tokenizer.eos_token_id)
    ids = [*tokenizer(turns[0], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [(prompt.token_ids, ids, [True] * len(ids))]


def _worked_turns(problem: Problem, style: AnswerStyle, episodes: Episodes | None) -> list[str]:
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
    expressions = worked_expressions(problem) if "calculator" in episodes.tools else []
    return [*(episodes.format.write("calculator", {"expression": one}) for one in expressions), answer]
