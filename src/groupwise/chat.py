"""Use a trained model by its name: the settings it was trained with, and its answers to questions, alone or in a conversation."""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from groupwise.config.load import Overrides, load_config, load_run_config, read_overrides
from groupwise.config.schema import Config, DataConfig, PromptConfig
from groupwise.data.named import canonical_name, is_prepared
from groupwise.data.prompts import resolve_system, unknown_arguments
from groupwise.data.readers import is_missing, names_function, read_whole
from groupwise.data.sources import default_eval_split
from groupwise.distributed import World
from groupwise.engines import make_engine
from groupwise.engines.base import COLDEST, Engine, SamplingSettings
from groupwise.episodes import Episodes, open_episodes, playing, render_episode
from groupwise.episodes.environments import Environments
from groupwise.errors import ConfigError, ModelError
from groupwise.importing import looks_like_file
from groupwise.models.folder import adapter_in
from groupwise.models.load import Policy, load_policy, load_tokenizer, with_base
from groupwise.tracking.text import visible
from groupwise.types import Completion, Message, Problem

__all__ = [
    "Speaker",
    "answer_lines",
    "answer_lines_together",
    "answer_of",
    "check_text",
    "load_to_ask",
    "make_speaker",
    "note_on_form",
    "note_on_seen",
    "refuse_named_code",
    "run_of",
    "settings_for_model",
    "settings_to_ask",
]

logger = logging.getLogger("groupwise")

MODEL_FOLDER, CONFIG_FILE, CHECKPOINTS, MANIFEST = "final_model", "config.yaml", "checkpoints", "manifest.json"
LONGEST_ANSWER = 512
"""Tokens of the longest answer of a model that no run is known of."""
_EXACT = {"rollout.quantization": "none"}
"""What is asked and judged are the weights that were learnt, on machines too that cannot round them."""
_MERGED = {"model.revision": None, "model.lora": None, "model.quantization": "none", **_EXACT}
"""How a run's model differs from the one it began with: of another place, its adapter merged into whole weights."""
_ALONE = {"model.lora": None, **_EXACT}
"""How an adapter alone differs, which goes on the base that the run had."""
_OF_THE_SOURCE: dict[str, Any] = {"data.subset": None, "data.split": "train"}
_OF_THE_COLUMNS: dict[str, Any] = {"data.prompt_column": None, "data.answer_column": None, "data.answer_format": "auto"}
"""How the data that a run's model is asked differ from the run's own."""


def settings_for_model(model: str, overrides: Overrides = ()) -> tuple[Config, Path | None]:
    """The settings with which to use ``model``: those of the run that made it, or the defaults.

    ``model`` may be a run's folder, the model inside one, a checkpoint, any model folder, or a name. Returns the config, with
    ``model.name`` filled in, and the run's config file where there is one: the prompt a model was trained with is part of what it knows.
    The vLLM that sampled for the run may have stopped, or work for another: it is used where ``overrides`` say so, and so is an engine of
    the user's. A folder may come from anybody: it cannot grant its own code the right to run (``trust_remote_code``), which ``overrides``
    alone can. Other Python that it names is for ``refuse_named_code``.
    """
    path = Path(model).expanduser()
    if (path / MODEL_FOLDER).is_dir() and (path / CONFIG_FILE).is_file():
        path = path / MODEL_FOLDER
    elif (path / MANIFEST).is_file() and (path / "model" / "config.json").is_file():  # a checkpoint
        path, model = path / "model", str(path / "model")
    alone = adapter_in(path) is not None
    run_config = run_of(path, alone)
    given = read_overrides(overrides)
    if run_config is None:
        return load_config(None, {"model.name": model, **given}), None
    settings = {"model.name": str(path), **(_ALONE if alone else _MERGED)}
    config = load_run_config(run_config, {**settings, **given})
    if given and (left := _of_other_data(load_run_config(run_config).data, config.data)):
        settings |= left
        config = load_run_config(run_config, {**settings, **given})
    if config.rollout.engine_is_external and "rollout.engine" not in given:
        config = load_run_config(run_config, {**settings, "rollout.engine": "auto", **given})
    return config, run_config


def _of_other_data(own: DataConfig, asked: DataConfig) -> dict[str, Any]:
    """What of a run's ``own`` data does not hold for the data that are ``asked``. Its columns may be those of another file too, but not
    those of a data set known by name, or of a prepared folder. A source whose path alone is another has moved."""
    name, prepared = canonical_name(asked.source), is_prepared(asked.source)
    if asked.source == own.source or (name is not None and name == canonical_name(own.source)):
        return {}
    if asked.eval_source == own.eval_source and not (prepared or asked.source == "arithmetic"):
        return {}
    return _OF_THE_SOURCE | (_OF_THE_COLUMNS if name is not None or prepared else {})


def note_on_form(config: Config, run_config: Path) -> str | None:
    """A sentence where ``prompt.system: auto`` asks a run's model for answers in another form than it was trained with; else None."""
    own = load_run_config(run_config)
    if not own.prompt.system == config.prompt.system == "auto" or (own.data._found_style is None and is_missing(own.data.source)):
        return None  # in what form a run was trained whose data are not here is a guess
    trained, asked = resolve_system(own.prompt, own.data)[1], resolve_system(config.prompt, config.data)[1]
    if trained == asked:
        return None
    return (
        f"prompt.system is auto, which asks for {asked} answers with {config.data.source}, and the run was trained with {trained}: "
        f"prompt.system={trained} asks as it was trained"
    )


def note_on_seen(model: str, asked: DataConfig, run_config: Path) -> str | None:
    """A sentence where the held-out problems ``asked`` are the rows that the run of ``model`` was trained on; else None."""
    own = load_run_config(run_config).data
    if asked.eval_source is None or asked.generates_held_out or _place(asked.eval_source) != _place(own.source):
        return None
    split = asked.eval_split or default_eval_split(asked.eval_source)
    if not read_whole(asked.eval_source) and (split, asked.subset) != (own.split, own.subset):
        return None
    return f"these problems include those that {model} was trained on: leave --data (in Python: data) out for its held-out ones"


def _place(source: str) -> str:
    return canonical_name(source) or os.path.realpath(os.path.expanduser(source))


def run_of(path: Path, alone: bool) -> Path | None:
    """The settings of the run that made the model, or the adapter ``alone``, in ``path``: its final one or a checkpoint's; None where no
    run did."""
    if not path.is_dir():
        return None
    for place in (path.absolute(), path.resolve()):  # a run's model may itself be a link; ``.`` and a link to it have other names
        model = place.parent if alone and place.name == "adapter" else place
        runs = [model.parent] if model.name == MODEL_FOLDER else []
        if alone:
            runs += [parent for parent in place.parents if (parent / CHECKPOINTS).is_dir()][:1]
        elif place.name == "model" and (place.parent / MANIFEST).is_file() and place.parent.parent.name == CHECKPOINTS:
            runs.append(place.parents[2])
        for run in runs:
            if (run / CONFIG_FILE).is_file():
                return run / CONFIG_FILE
    return None


def refuse_named_code(config: Config, run_config: Path | None, *, data: bool) -> None:
    """Raise ConfigError where ``run_config``, a run's settings, names code that judging its model would run, such as tools.

    ``data``: whether its problems are read. ``trust_remote_code``, which no file can set, allows it. What the command names
    itself and what groupwise brings are allowed.
    """
    if run_config is None or config.model.trust_remote_code:
        return
    theirs = _named_code(load_run_config(run_config, []))
    for setting, place in _named_code(config):
        if (setting, place) in theirs and (data or not setting.startswith("data.")):
            raise ConfigError(
                f"{run_config} sets {setting} to {place}, code that would be run, and a run's folder cannot grant that: if you "
                "trust it, add model.trust_remote_code=true to the command (generate: --trust-remote-code; in Python: "
                "overrides=['model.trust_remote_code=true'])"
            )


def _named_code(config: Config) -> list[tuple[str, str]]:
    """Settings with the places of Python that is not groupwise's own."""
    environment, data = config.rollout.environment or {}, config.data
    places = [environment] if isinstance(environment, str) else list(environment.values())
    if config.rollout.command is not None:  # which is nobody's but the user's, whatever its name begins with
        places = [f"the command {' '.join(config.rollout.command)}"]
    named = [("rollout.tools", tool) for tool in config.rollout.tools if ":" in tool]
    named += [("rollout.environment", place) for place in places]
    sources = {"data.source": data.source, "data.eval_source": data.eval_source or ""}
    named += [(setting, source) for setting, source in sources.items() if names_function(source)]
    # A file is nobody's module, though its folder may be called groupwise.something.
    return [
        (setting, place)
        for setting, place in named
        if not place.startswith("groupwise.") or looks_like_file(place.rpartition(":")[0])
    ]


def check_text(text: str, what: str) -> None:
    """Raise ConfigError where ``text``, which ``what`` names, holds half a character, as bytes do that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} {text[:200]!r} is not UTF-8 text: write it in UTF-8") from None


def settings_to_ask(
    model: str, overrides: Overrides = (), *, system: str | None = None, max_tokens: int | None = None, plays: bool = True
) -> tuple[Config, int]:
    """The settings with which to put a question to ``model``, and the longest answer in tokens: as long as it was trained to give.

    ``plays``: whether the run's own tools and environment take part, and are imported. An agent's command never does.

    Raises ConfigError for a ``system`` that is not UTF-8 text or ``max_tokens`` below 1, and what ``settings_for_model`` and
    `refuse_named_code` raise.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}, but an answer has 1 or more: raise it, or leave it out")
    check_text(system or "", "the system prompt")
    given = read_overrides(overrides)
    config, run_config = settings_for_model(model, overrides)
    if run_config is not None and config.rollout.command is not None:  # the agent asks, not who talks to the model
        config = _without_environment(config)
    if plays:
        refuse_named_code(config, run_config, data=False)
    if system is not None:
        config.prompt.system = system
    elif run_config is None and "prompt.system" not in given:
        config.prompt.system = "none"
    limited = run_config is not None or "rollout.max_completion_tokens" in given
    return config, max_tokens or (config.rollout.max_completion_tokens if limited else LONGEST_ANSWER)


def _without_environment(config: Config) -> Config:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"environment": None})})


@dataclass
class Speaker:
    """A policy with its engine, and the conversation so far."""

    policy: Policy
    engine: Engine
    prompt: PromptConfig
    system: str | None
    settings: SamplingSettings
    seed: int
    episodes: Episodes | None = None
    """How answers of several turns are played."""
    messages: list[Message] = field(default_factory=list)

    def answer(self, question: str, out: TextIO) -> str:
        """Stream the answer to ``question``, of all turns that it takes, into ``out``; returns the last that the policy said.

        Raises ConfigError when the conversation leaves no room in the context, or ``question`` is not UTF-8 text.
        """
        check_text(question, "the prompt")
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        # Text where nothing was said before, as in training: an environment's reset is given it.
        problem = Problem(f"chat:{len(self.messages) // 2}", asked if self.messages else question, "")
        prompt = render_episode(problem, self.policy.tokenizer, self.prompt, self.system, self.episodes)
        room = self.policy.context_length - len(prompt.token_ids)
        if room < 1:
            raise ConfigError(
                f"the conversation is {len(prompt.token_ids)} tokens long, but at most {self.policy.context_length} are taken (the "
                f"context of {self.policy.name}, or what vLLM was started with): start a new one, or ask a shorter question"
            )
        settings = replace(self.settings, max_tokens=min(self.settings.max_tokens, room))
        # A model's text could steer a terminal; a file gets it as it is.
        clean: Callable[[str], str] = visible if out.isatty() else str

        def show(piece: str) -> None:
            out.write(clean(piece))
            out.flush()

        completion = self.engine.stream(prompt, settings, seed=self.seed, on_text=show)
        out.write("\n")
        out.flush()
        self.messages = [*asked, *map(self._as_shown, _as_given(completion))]
        return completion.answer

    def _as_shown(self, message: Message) -> Message:
        """What the policy was given, as it was: special tokens in it had lost their meaning."""
        if self.episodes is None or message["role"] == "assistant":
            return message
        return {"role": message["role"], "content": self.episodes.template.harmless(message["content"])}

    def forget(self) -> None:
        self.messages = []


def _as_given(completion: Completion) -> list[Message]:
    """``completion.messages`` as the policy was given them: one message for each result of a tool."""
    messages, turns = completion.messages, completion.turns
    for place in reversed(range(1, len(turns))):
        if turns[place].role == "tool" and turns[place - 1].calls:
            messages[place : place + 1] = [{"role": "tool", "content": call.result} for call in turns[place - 1].calls]
    return messages


def load_to_ask(config: Config) -> Policy:
    """The policy of ``config``, on its base where it is an adapter. Raises ModelError for arguments that its chat template does not ask
    for."""
    from groupwise.engines.vllm.engine import check_vllm

    model, adapter = with_base(config.model)
    arguments = config.prompt.template_arguments
    if arguments and (said := unknown_arguments(load_tokenizer(model, adapter), arguments)):
        raise ModelError(said)
    policy = load_policy(model, adapter=adapter)
    room = check_vllm(config.rollout, policy.model.config, policy.name) or policy.context_length
    return replace(policy, context_length=min(room, policy.context_length))


def _without_what_needs_a_row(config: Config) -> Config:
    """The settings without an environment that a question alone does not begin: one that a column names, or a game that is told more."""
    named = config.rollout.environment
    if named is None or config.rollout.command is not None:
        return config
    if isinstance(named, str) and not Environments.load(named, config.rollout.tool_timeout_s).needs_a_row():
        return config
    logger.warning("the model answers without its environment, which needs more than a question to begin")
    return _without_environment(config)


def make_speaker(config: Config, max_tokens: int, temperature: float, greedy: bool, seed: int) -> Speaker:
    """Load the policy of ``config``; its prompt settings say how questions are put. Raises ConfigError for a temperature below 0."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature is {temperature}, but it must be 0, for the likeliest tokens, or more")
    config = _without_what_needs_a_row(config)
    policy = load_to_ask(config)
    episodes = open_episodes(config, policy.tokenizer, policy.end_token_ids)
    system, _ = resolve_system(config.prompt, config.data)
    greedy = greedy or temperature < COLDEST
    settings = SamplingSettings(max_tokens, temperature=1.0 if greedy else temperature, greedy=greedy)
    engine = playing(make_engine(policy, config.rollout), episodes)
    return Speaker(policy, engine, config.prompt, system, settings, seed, episodes)


def answer_of(speaker: Speaker, question: str) -> str:
    """The answer to a question by itself."""
    speaker.forget()
    return speaker.answer(question, io.StringIO())


def answer_lines(speaker: Speaker, lines: Iterable[str], out: TextIO) -> None:
    """Each line that is not blank is a question by itself. Ends where nobody reads the answers any more."""
    for line in lines:
        if line.strip():
            speaker.forget()
            speaker.answer(line.strip(), out)
        if getattr(out, "lost", False):  # as `groupwise.streams` says of a pipe
            return


def answer_lines_together(speaker: Speaker, lines: Sequence[str], out: TextIO, world: World) -> None:
    """Answer lines as ``answer_lines`` does, divided among the processes of ``world``: the first writes all answers, in order."""
    answers: dict[int, str] = {}
    for index in world.assigned([len(line) for line in lines]):
        answer = io.StringIO()
        answer_lines(speaker, [lines[index]], answer)
        answers[index] = answer.getvalue()
    everywhere = {index: answer for part in world.all_gather_object(answers) for index, answer in part.items()}
    if world.is_first:
        clean: Callable[[str], str] = visible if out.isatty() else str
        out.write("".join(clean(everywhere[index]) for index in range(len(lines))))
        out.flush()
