"""Reward functions as TRL calls them: once for all completions of a generation, by keyword, with the data set's columns beside."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from groupwise.algorithm import AdvantageInputs, FunctionScores, Objective
from groupwise.config.rewards import RewardFunctionConfig
from groupwise.episodes.formats import CallFormat
from groupwise.errors import ConfigError, ModelError, RewardError
from groupwise.metrics import Metric
from groupwise.models.reward_model import RewardModel, unwrapped
from groupwise.rewards.calling import Batch, Call, RewardArguments, RewardCaller, own_copy, plan_calls, require_columns
from groupwise.rewards.load import load_reward
from groupwise.rewards.processes import ProcessPool
from groupwise.rewards.scores import BadResult
from groupwise.trl.config import GRPOConfig
from groupwise.trl.episodes import ScriptEpisodes, conversation
from groupwise.types import Completion, Problem, Prompt

__all__ = ["Judge", "RewardFunction", "RewardFunctions", "combine"]

RewardFunction = str | PreTrainedModel | Callable[..., object]
"""A reward model by its name, or as it is loaded, or a function."""
Scores = list[float | None]
logger = logging.getLogger("groupwise")
_WORDS = (
    (
        "add rewards.functions[N].model.trust_remote_code=true to the command, with the reward's number for N",
        "set trust_remote_code=True in GRPOConfig",
    ),
    ("set its label to the one to score, or name", "name"),
    ("give it as RewardModel(model, tokenizer)", "pass it in reward_processing_classes"),
    ("set rewards.on_error to skip, or take", "take"),
    (
        "set its show_system_prompt: false, or form: text",
        "pass in reward_processing_classes a tokenizer whose chat_template takes them, or leave such turns out",
    ),
)
"""What the core's sentences about reward models advise, and what can be done here."""


@contextmanager
def _in_trl_s_words() -> Iterator[None]:
    try:
        yield
    except (ModelError, RewardError) as error:
        said = str(error)
        for own, theirs in _WORDS:
            said = said.replace(own, theirs)
        error.args = (said,)
        raise


class Judge(RewardModel):
    """A reward model as TRL asks it: prompt and completion as one text, or by its chat template where the prompt is a conversation, with
    no special tokens but the template's; the score is read off the last token that is not the tokenizer's padding."""

    def __init__(self, model: Any, tokenizer: Any, args: GRPOConfig, device: torch.device) -> None:
        given = (args.model_init_kwargs or {}) if isinstance(model, str) else {}
        for name in ("attn_implementation", "quantization_config"):
            if given.get(name) is not None and args.process_index == 0:
                logger.warning(
                    "model_init_kwargs %s is not handed on to the reward model %s: load it yourself and pass it as an object",
                    name, model,
                )  # fmt: skip
        settings = {
            "form": "as_prompt", "special_tokens": False, "template_arguments": args.chat_template_kwargs or {},
            "device": str(device), "dtype": str(given.get("dtype", given.get("torch_dtype")) or "auto").removeprefix("torch."),
            "revision": given.get("revision"),
            "trust_remote_code": bool(given.get("trust_remote_code", args.trust_remote_code)),
        }  # fmt: skip
        self._told_of_long = False
        with _in_trl_s_words():
            super().__init__(model, tokenizer, **settings)
            loaded: Any = self.model
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        loaded.to(device).eval()
        loaded.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: object) -> list[float]:
        """One score for each pair."""
        with _in_trl_s_words():
            scores = super().__call__(prompts, completions)
        if self._long.total and not self._told_of_long:
            self._told_of_long = True
            logger.warning(
                "%d of %d texts lost their beginning, since the reward model %s takes %d tokens, and TRL gives it whole texts: "
                "lower max_completion_length, shorten the prompts, or take another reward model; later ones are not told",
                self._long.total, self._long.count, self.settings.name, self.max_input_tokens,
            )  # fmt: skip
        self.take_metrics()  # what TRL logs is the scores alone
        return scores


class RewardArgumentError(RewardError, ValueError):
    """A ``RewardError`` where TRL raises a ``ValueError``."""


@dataclass
class _Arguments(RewardArguments):
    """The data's columns as they are, and what TRL offers beside them."""

    extras: Mapping[str, object] = field(default_factory=dict)
    form: CallFormat | None = None
    """How calls of tools are written, where there are any."""

    def shown(self, prompt: Prompt, completion: Completion) -> str | list[dict[str, Any]]:
        """A completion as reward functions get it: text, or messages that follow the prompt's."""
        if self.form is not None:
            return conversation(completion, self.form)
        return completion.text if prompt.messages is None else [{"role": "assistant", "content": completion.text}]

    def _keywords(self, chosen: Sequence[tuple[int, Prompt, Completion]], columns: Sequence[str]) -> dict[str, object]:
        ours = super()._keywords(chosen, ())
        offered = {name: [own_copy(p.problem.columns.get(name)) for _, p, _ in chosen] for name in columns}
        completions = [self.shown(prompt, completion) for _, prompt, completion in chosen]
        given = {"prompts": ours["prompts"], "completions": completions, "completion_ids": ours["completion_ids"]}
        return {**offered, **self.extras, **given}


class _Caller(RewardCaller):
    def _invoke(self, call: Call, keywords: Mapping[str, object], seed: int | None) -> object:
        """The call's result, with None for NaN, which TRL takes for the same."""
        result = super()._invoke(call, keywords, seed)
        listed = result.tolist() if hasattr(result, "tolist") else result
        return [None if _is_nan(score) else score for score in listed] if isinstance(listed, list | tuple) else listed


def check_functions(
    functions: RewardFunction | Sequence[RewardFunction] | None, args: GRPOConfig, tokenizers: Any, environments: bool
) -> tuple[list[Any], list[Any], list[float]]:
    """A script's functions with a tokenizer and a weight for each. ``environments``: whether there may be others beside them.

    Raises RewardArgumentError where there is none, or the numbers do not match.
    """
    listed: list[Any] = list(functions) if isinstance(functions, list | tuple) else [functions]
    if functions is None and environments:
        listed = []
    if None in listed or not (listed or environments):
        raise RewardArgumentError(
            "reward_funcs is empty, but there must be something to learn from: pass a function or a model's name, or an "
            "environment_factory whose environments have get_reward"
        )
    given = (
        list(tokenizers)
        if isinstance(tokenizers, list | tuple)
        else [tokenizers] * (1 if tokenizers is not None else len(listed))
    )
    if len(given) != len(listed):
        raise RewardArgumentError(
            f"there are {len(listed)} reward_funcs but {len(given)} reward_processing_classes, and the numbers must match: pass one "
            "for each, or None"
        )
    weights = [1.0] * len(listed) if args.reward_weights is None else [float(w) for w in args.reward_weights]
    if len(weights) != len(listed):
        raise RewardArgumentError(f"reward_weights has {len(weights)} entries for {len(listed)} reward_funcs: give one for each")
    return listed, given, weights


class RewardFunctions:
    """The trainer's reward functions with their names and weights; after a script's own those of environments, with a weight of 1."""

    def __init__(
        self, functions: RewardFunction | Sequence[RewardFunction] | None, args: GRPOConfig, tokenizers: Any, device: torch.device,
        episodes: ScriptEpisodes | None = None,
    ) -> None:  # fmt: skip
        of_environments = [] if episodes is None else list(episodes.rewards.values())
        listed, given, weights = check_functions(functions, args, tokenizers, bool(of_environments))
        self.functions: list[Callable[..., object]] = [
            Judge(f, t, args, device) if isinstance(unwrapped(f), str | PreTrainedModel) else f
            for f, t in zip(listed, given, strict=True)
        ]
        self.functions += of_environments
        self.weights = torch.tensor([*weights, *[1.0] * len(of_environments)], dtype=torch.float64)
        self.names = [_name(function) for function in self.functions]
        self.keys = [name if self.names.count(name) == 1 else f"{name}.{i}" for i, name in enumerate(self.names)]
        """Names of which no two are the same, as two lambdas' are."""
        self._loaded = [  # with TRL a column goes before what a partial has set
            replace(load_reward(RewardFunctionConfig(function=name, scope="batch"), {name: function}), bound=frozenset())
            for name, function in zip(self.names, self.functions, strict=True)
        ]
        self._arguments = _Arguments("plain", form=None if episodes is None else episodes.format)
        self.shown = self._arguments.shown
        self._caller = _Caller(self._arguments, None, len(listed), ProcessPool({}, 1, set()))

    def check_columns(self, problem: Problem, extras: Iterable[str]) -> None:
        """Raise RewardError for a function that needs what neither ``problem`` nor ``extras``, keywords beside its columns, has."""
        for reward in self._loaded:
            require_columns(reward, [*self._arguments.names(problem), *extras])

    def score(self, batch: Batch, extras: Mapping[str, object]) -> list[Scores]:
        """``[function][completion]``; None where a function says that it does not apply. ``async`` ones run side by side.

        ``extras``: keywords beside the columns. Raises RewardError for a function that raises or returns something else.
        """
        self._arguments.extras = extras
        calls = list(plan_calls(self._loaded, batch))
        with self._caller.begin(calls, batch, None) as (ask, _):
            scores = [
                [_number(call, batch, group, answer) for answer, (group, _) in zip(ask(i), call.targets, strict=True)]
                for i, call in enumerate(calls)
            ]
        prompts = [prompt for prompt, completions in batch for _ in completions]
        silent = [i for i, row in enumerate(zip(*scores, strict=True)) if all(score is None for score in row)]
        if silent:
            logger.warning(
                "All reward functions returned None for %d of %d completions, the first to the prompt %.200r: these teach nothing; let at "
                "least one function give a number", len(silent), len(prompts), prompts[silent[0]].problem.question,
            )  # fmt: skip
        return scores or [[] for _ in self.functions]  # a process may have no share of a small evaluation


def combine(
    scores: Mapping[str, Scores], weights: Sequence[float], lengths: Sequence[int], group_size: int, objective: Objective
) -> tuple[list[float], list[float], Mapping[str, Metric]]:
    """Rewards and advantages of each completion, and the advantage's metrics, from the scores of each function and completions' tokens.

    A completion to which no function applies has the reward NaN: it is no part of its group's baseline, and its advantage is 0. Raises
    ConfigError for advantages of single tokens.
    """
    scores_FN = torch.tensor([[math.nan if s is None else s for s in column] for column in scores.values()], dtype=torch.float64)
    rewards = [
        math.fsum(applicable) if (applicable := [w * s for w, s in zip(weights, row, strict=True) if s is not None]) else math.nan
        for row in zip(*scores.values(), strict=True)
    ]
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    known_N = ~rewards_N.isnan()
    of_N = torch.arange(len(rewards))[known_N] // group_size
    group_N = torch.unique(of_N, return_inverse=True)[1]  # a group that no function judges is not there
    inputs = AdvantageInputs(
        rewards_N[known_N],
        group_N,
        torch.tensor(lengths)[known_N],
        {name: FunctionScores(w, scores_N[known_N]) for name, w, scores_N in zip(scores, weights, scores_FN, strict=True)},
    )
    found = objective.advantages(inputs)
    if found.advantages_N is None:
        raise ConfigError(
            "the function that advantage_type names returned advantages of tokens, but in groupwise.trl a completion has one: return "
            "advantages_N, or use groupwise.train"
        )
    advantages_N = torch.zeros_like(rewards_N)
    advantages_N[known_N] = found.advantages_N.double()
    return rewards, advantages_N.tolist(), found.metrics


def _number(call: Call, batch: Batch, group: int, answer: object) -> float | None:
    if isinstance(answer, tuple):
        answer = BadResult("not_a_number", "returned rewards of steps instead of a number or None")
    if isinstance(answer, BadResult):
        alone = f"reward {call.reward.name!r} on the prompt {batch[group][0].problem.id!r}"
        where = alone if answer.kind == "not_a_number" else call.where(batch)
        raise RewardError(f"{where} {answer}; correct the function: it must return one number or None for each") from answer.cause
    assert answer is None or isinstance(answer, float), "the core's caller returns floats"
    return answer


def _is_nan(score: object) -> bool:
    try:
        return math.isnan(score)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def _name(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
