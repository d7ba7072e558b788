"""A script's ``tools`` and ``environment_factory`` as episodes, by TRL's rules where those of ``groupwise.episodes`` are others.

A call that cannot be read is no call, and its turn the answer. Results are written as ``str`` writes them, whole. Calls are made one after
the other in the thread that trains, without a time limit, so that tools need not be safe for threads. Environments are made once and reset
often, a method ``step`` is a tool like others, and ``get_reward`` is a reward function.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.episodes import Episodes, with_observation
from groupwise.episodes.environments import Environments, Partner, Reply, ResetFailed, ToolUse
from groupwise.episodes.formats import FORMATS, Asked, CallFormat, Hermes, format_of_template
from groupwise.episodes.templates import TurnTemplate
from groupwise.episodes.tools import Tool, Toolbox, as_text, describe
from groupwise.errors import ConfigError, TrainingError
from groupwise.models.load import Policy
from groupwise.rewards.calling import own_copy
from groupwise.trl.config import ArgumentError, GRPOConfig
from groupwise.types import Completion, FinishReason, Problem, Prompt, Turn

__all__ = ["EMPTY_PROMPT", "Factories", "ScriptEpisodes", "conversation", "open_script", "roll_out"]

EMPTY_PROMPT = ({"role": "user", "content": ""},)
"""The prompt of a row that has none: it is what the environment says."""
_FORMATS: Mapping[str, CallFormat] = {"hermes": Hermes(closed=True), "llama3": FORMATS["llama3"]}
Factories = Callable[[], object] | Mapping[str, Callable[[], object]] | None
"""What makes a script's environments: one kind, or several by name."""
_THOUGHT = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Pool(Environments):
    """Instances in the order in which they were handed out, for the next generation to be handed out again."""

    idle: dict[str | None, list[object]] = field(default_factory=lambda: defaultdict(list))
    lent: list[tuple[str | None, object]] = field(default_factory=list)

    def name_of(self, problem: Problem) -> str | None:
        return None if None in self.factories else problem.columns.get("environment")

    def make(self, problem: Problem) -> object:
        """See ``Environments.make``."""
        name = self.name_of(problem)
        made = self.idle[name].pop(0) if self.idle[name] else super().make(problem)
        self.lent.append((name, made))
        return made

    def start(self, environment: Any, problem: Problem) -> str | None:
        """See ``Environments.start``. One that cannot be reset ends the training, as in TRL."""
        try:
            return super().start(environment, problem)
        except ResetFailed as failure:
            raise TrainingError(str(failure)) from failure

    def take_back(self) -> None:
        """All instances may be handed out again."""
        for name, one in self.lent:
            self.idle[name].append(one)
        self.lent.clear()

    def row(self, problem: Problem) -> dict[str, Any]:
        """The data set's row as it is; of several environments without the name of the chosen one."""
        row = {} if problem.question is EMPTY_PROMPT else {"prompt": problem.question}
        row |= problem.columns
        if None not in self.factories:
            row.pop("environment", None)
        return {name: own_copy(value) for name, value in row.items()}

    def tools_of(self, environment: Any) -> dict[str, Tool]:
        return self.methods_of(environment)

    def opening(self, problem: Problem) -> tuple[str | None, Sequence[Tool]]:
        """See ``Environments.opening``; it is asked between generations."""
        self.take_back()
        return super().opening(problem)

    def done_with(self, environment: Any) -> None:
        """The instance that was asked last is idle again."""
        name, probe = self.lent.pop()
        self.idle[name].insert(0, probe)


@dataclass(slots=True)
class Whole:
    """Calls as ``format`` reads them, where each of a turn's has a name."""

    format: CallFormat
    native: bool = True

    @property
    def openings(self) -> tuple[str, ...]:
        return self.format.openings

    def read(self, text: str) -> list[Asked]:
        asked = self.format.read(text)
        return asked if all(one.name for one in asked) else []

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self.format.write(name, arguments)

    def beside(self, text: str) -> str:
        return self.format.beside(text) if all(one.name for one in self.format.read(text)) else text


@dataclass
class Rounds(ToolUse):
    """Makes the calls of ``left`` turns; those of the turn after them are not made."""

    left: float = math.inf

    def reply(self, turn: Completion) -> Reply:
        if self.left <= 0 and self.format.read(turn.text):
            return Reply(ended="max_turns")
        self.left -= 1
        return super().reply(turn)

    def reward(self, unheard: Completion | None) -> None:
        """Nothing: a reward function asks the environment."""


@dataclass(frozen=True)
class ScriptEpisodes(Episodes):
    """Episodes with a script's tools and environments."""

    functions: tuple[Callable[..., object], ...] = ()
    """All tools, those of environments included: ``trainer.tools``."""
    rewards: Mapping[type, Callable[..., object]] = field(default_factory=dict)
    """A reward function for each class of environments that has ``get_reward``."""
    rounds: float = math.inf

    def partner(self, problem: Problem) -> tuple[Partner, str | None]:
        """See ``Episodes.partner``."""
        made, said, tools = None, None, dict(self.tools)
        if self.environments is not None:
            made = self.environments.make(problem)
            said = self.environments.start(made, problem)
            tools |= self.environments.tools_of(made)
        return Rounds(Toolbox(tools, None, longest=None, write=_as_trl_writes), self.format, made, left=self.rounds), said

    def opening(self, problem: Problem) -> tuple[Any, list[Tool]]:
        """The prompt of ``problem`` with what its environment says at the start, and the tools there."""
        if self.environments is None:
            return problem.question, list(self.tools.values())
        said, tools = self.environments.opening(problem)
        question = problem.question if said is None else with_observation(problem.question, said)
        return question, [*self.tools.values(), *tools]

    def let_go(self, partner: Partner) -> None:
        """Nothing: the next generation plays with the same environments."""

    def are_over(self, partners: Sequence[Partner]) -> None:
        """See ``Episodes.are_over``: they were lent in the order in which first turns ended."""
        if isinstance(self.environments, Pool):
            places = {id(partner.environment): i for i, partner in enumerate(partners) if isinstance(partner, Rounds)}
            self.environments.lent.sort(key=lambda pair: places.get(id(pair[1]), len(places)))

    @property
    def played(self) -> list[object]:
        """The environments of the last generation that this process played, in the order of its completions."""
        return [one for _, one in self.environments.lent] if isinstance(self.environments, Pool) else []

    def take_back(self) -> None:
        """All environments may be played again."""
        if isinstance(self.environments, Pool):
            self.environments.take_back()


def open_script(
    tools: Sequence[Callable[..., object]] | None, environment_factory: Factories, tokenizer: Any, ends: Sequence[int], args: GRPOConfig
) -> ScriptEpisodes | None:  # fmt: skip
    """The episodes of a script; None without ``tools`` and ``environment_factory``.

    Raises ConfigError for a chat template that does not know tools, and for what is no tool and no environment.
    """
    if not tools and not environment_factory:
        return None
    try:
        form = format_of_template(tokenizer.chat_template)
    except ConfigError:  # whose remedy is a setting of groupwise.train
        form = "tags"
    template = TurnTemplate(tokenizer, ends, args.chat_template_kwargs)
    if form == "tags" or template.role != "tool":
        raise ArgumentError(
            "the chat template does not support tool calling in a form that is read here, but there are tools or an "
            "environment_factory: take a model whose template has calls as JSON (Qwen 2.5, Qwen 3, Llama 3.1), or use "
            "groupwise.train with rollout.tools, which describes them in words"
        )
    pool, own, rewards = None, list(tools or ()), dict[type, Callable[..., object]]()
    described = {tool.name: tool for tool in (describe(one, getattr(one, "__name__", repr(one))) for one in own)}
    if environment_factory:
        named: dict[str | None, Callable[[], object]] = (
            dict(environment_factory.items()) if isinstance(environment_factory, Mapping) else {None: environment_factory}
        )
        pool = Pool(named, None)
        for name in pool.factories:
            probe = pool.make(Problem("probe", "", "", {"environment": name}))
            own += [tool.function for tool in pool.tools_of(probe).values() if tool.function not in own]
            if hasattr(type(probe), "get_reward"):
                rewards[type(probe)] = _judged_by(type(probe))
        pool.take_back()
    rounds = math.inf if args.max_tool_calling_iterations is None else args.max_tool_calling_iterations
    return ScriptEpisodes(
        described, pool, Whole(_FORMATS[form]), template, max_turns=10**9, timeout_s=None, concurrent=0,
        functions=tuple(own), rewards=rewards, rounds=rounds,
    )  # fmt: skip


def _as_trl_writes(result: object, name: str) -> str:
    """Results that are neither text nor lists are written by ``str``: ``True`` and ``None``, not ``true`` and ``null``; so are dates and
    numbers of any kind."""
    return as_text(result if isinstance(result, str | list) else str(result), name)


def _judged_by(kind: Any) -> Callable[..., object]:
    """The reward function that asks the environments of exactly this class, and does not apply to others."""

    def ask(environments: Sequence[Any], **_: object) -> list[Any]:
        return [one.get_reward() if type(one) is kind else None for one in environments]

    async def wait(environments: Sequence[Any], **_: object) -> list[object]:
        return [None if score is None else await score for score in ask(environments)]

    judge: Callable[..., object] = wait if inspect.iscoroutinefunction(kind.get_reward) else ask
    judge.__name__ = kind.__name__
    return judge


def conversation(completion: Completion, form: CallFormat) -> list[dict[str, Any]]:
    """A completion's turns as messages, in the form in which TRL gives them to reward functions."""
    messages: list[dict[str, Any]] = []
    for turn, after in zip(completion.turns, [*completion.turns[1:], None], strict=True):
        if not turn.sampled:
            continue
        asked, text = form.read(turn.text), form.beside(turn.text)
        messages.append({"role": "assistant", "content": text})
        if thought := _THOUGHT.match(text):
            messages[-1] |= {"reasoning_content": thought[1].strip(), "content": text[thought.end() :]}
        if asked:
            calls = [{"type": "function", "function": {"name": one.name, "arguments": dict(one.arguments)}} for one in asked]
            messages[-1]["tool_calls"] = calls
        if after is not None:
            messages += [{"role": "tool", "name": call.name, "content": call.result} for call in turn.calls]
    return messages


def roll_out(
    function: Callable[[list[Any]], Mapping[str, Any]], prompts: Sequence[Prompt], group_size: int, policy: Policy, temperature: float,
    weighted: bool = False,
) -> tuple[list[Prompt], list[tuple[Completion, ...]], dict[str, list[object]]]:  # fmt: skip
    """What a script's ``rollout_func`` sampled, each prompt ``group_size`` times: prompts with its token ids, completions, and further
    columns for reward functions. Tokens whose ``env_mask`` is 0 were given. Log-probabilities that are None are NaN. There may be
    None in place of all, unless completions are ``weighted`` by them.

    Raises ArgumentError where it returns something else, or gives the members of a group different prompts.
    """
    asked = [p.text if p.messages is None else [dict(m) for m in p.messages] for p in prompts for _ in range(group_size)]
    found = dict(function(asked))
    if missing := sorted({"prompt_ids", "completion_ids", "logprobs"} - found.keys()):
        raise ArgumentError(f"rollout_func must return keys {missing} too: it returned {', '.join(sorted(found))}")
    prompt_ids, completion_ids, logprobs, masks = (
        found.pop(n, None) for n in ("prompt_ids", "completion_ids", "logprobs", "env_mask")
    )
    if logprobs is None and weighted:
        raise ArgumentError(
            "rollout_func returned None as logprobs, but with use_vllm completions are weighted by them: return them, or set "
            "vllm_importance_sampling_correction=False"
        )
    if not len(prompt_ids) == len(completion_ids) == len(asked):
        raise ArgumentError(
            f"rollout_func returned {len(completion_ids)} completion_ids and {len(prompt_ids)} prompt_ids for {len(asked)} prompts: return "
            "one for each"
        )
    own, groups = [], []
    ended = {*policy.end_token_ids, policy.tokenizer.pad_token_id}  # as in TRL: a rollout may pad what has ended
    for index, prompt in enumerate(prompts):
        members = range(index * group_size, (index + 1) * group_size)
        ids = {tuple(map(int, prompt_ids[i])) for i in members}
        if len(ids) > 1:
            raise ArgumentError(
                "rollout_func gave members of a group different prompt_ids, but they are compared: give all the same"
            )
        own.append(replace(prompt, token_ids=ids.pop()))
        group = []
        for sample, i in enumerate(members):
            tokens = tuple(map(int, completion_ids[i]))
            mask = [1] * len(tokens) if masks is None else list(map(int, masks[i]))
            numbers = [math.nan] * len(tokens) if logprobs is None else list(logprobs[i])
            if not tokens or not len(tokens) == len(mask) == len(numbers):
                raise ArgumentError(
                    f"rollout_func returned {len(tokens)} completion_ids, {len(mask)} of env_mask and {len(numbers)} logprobs for prompt "
                    f"{i}: return as many of each, at least one"
                )
            turns = () if masks is None else _turns(tokens, mask, policy.tokenizer)
            reason: FinishReason = "stop" if tokens[-1] in ended else "length"
            text = policy.tokenizer.decode(list(tokens), skip_special_tokens=True)
            numbers = [
                (math.nan if x is None else float(x)) if sampled else 0.0 for x, sampled in zip(numbers, mask, strict=True)
            ]
            group.append(Completion(text, tokens, tuple(numbers), reason, sample, temperature=temperature, turns=turns))
        groups.append(tuple(group))
    return own, groups, {name: value if isinstance(value, list) else [value] * len(asked) for name, value in found.items()}


def _turns(tokens: Sequence[int], mask: Sequence[int], tokenizer: Any) -> tuple[Turn, ...]:
    turns, at = [], 0
    for sampled, run in itertools.groupby(mask):
        length = len(list(run))
        text = tokenizer.decode(list(tokens[at : at + length]), skip_special_tokens=True)
        turns.append(Turn("assistant" if sampled else "tool", text, length))
        at += length
    return tuple(turns)
