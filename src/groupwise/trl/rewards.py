"""Reward functions as TRL calls them: once for all completions of a generation, by keyword, with the data set's columns beside."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel

from groupwise.algorithm.advantages import group_advantages
from groupwise.errors import RewardError
from groupwise.models.reward_model import RewardModel
from groupwise.rewards.calling import CallRaised, call_with_limit, is_async
from groupwise.trl.config import GRPOConfig

__all__ = ["Judge", "RewardFunctions", "combine"]

Scores = list[float | None]
logger = logging.getLogger("groupwise")


class Judge(RewardModel):
    """A reward model as TRL asks it: prompt and completion as one text, or by its chat template where the prompt is a conversation, with
    no special tokens but the template's; the score is read off the last token that is not the tokenizer's padding."""

    def __init__(self, model: Any, tokenizer: Any, args: GRPOConfig, device: torch.device) -> None:
        settings = {"form": "as_prompt", "template_arguments": args.chat_template_kwargs or {}, "device": str(device),
                    "trust_remote_code": args.trust_remote_code}  # fmt: skip
        if isinstance(model, str):
            settings["revision"] = (args.model_init_kwargs or {}).get("revision")
        super().__init__(model, tokenizer, **settings)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        loaded: Any = self.model
        loaded.to(device).eval()
        loaded.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """One score for each pair."""
        scores = super().__call__(prompts, completions)
        self.take_metrics()  # what TRL logs is the scores alone
        return scores

    def _tokenised(self, prompt: Any, completion: Any, **options: Any) -> Any:
        return self.tokenizer(self.text(prompt, completion), add_special_tokens=False, **options)


class RewardArgumentError(RewardError, ValueError):
    """A ``RewardError`` where TRL raises a ``ValueError``."""


class RewardFunctions:
    """The trainer's reward functions with their names and weights."""

    def __init__(self, functions: Any, args: GRPOConfig, tokenizers: Any, device: torch.device) -> None:
        listed = list(functions) if isinstance(functions, list | tuple) else [functions]
        if not listed or None in listed:
            raise RewardArgumentError(
                "reward_funcs is empty, but there must be something to learn from: pass a function or a model's name"
            )
        given = (
            tokenizers if isinstance(tokenizers, list | tuple) else [tokenizers] * (1 if tokenizers is not None else len(listed))
        )
        if len(given) != len(listed):
            raise RewardArgumentError(
                f"there are {len(listed)} reward_funcs but {len(given)} reward_processing_classes, and the numbers must match: pass one "
                "for each, or None"
            )
        self.functions: list[Callable[..., Any]] = [
            self._function(f, t, args, device) for f, t in zip(listed, given, strict=True)
        ]
        self.names = [_name(function) for function in self.functions]
        self.weights = [1.0] * len(listed) if args.reward_weights is None else [float(w) for w in args.reward_weights]
        if len(self.weights) != len(listed):
            raise RewardArgumentError(
                f"reward_weights has {len(self.weights)} entries for {len(listed)} reward_funcs: give one for each"
            )

    @staticmethod
    def _function(function: Any, tokenizer: Any, args: GRPOConfig, device: torch.device) -> Callable[..., Any]:
        if isinstance(function, str | PreTrainedModel):
            return Judge(function, tokenizer, args, device)
        if not callable(function):
            raise RewardError(f"reward_funcs has a {type(function).__name__}: pass functions, model names or models")
        return function  # type: ignore[no-any-return]

    def score(self, prompts: list[Any], completions: list[Any], ids: list[list[int]], columns: Mapping[str, Any]) -> list[Scores]:
        """``[function][completion]``; None where a function says that it does not apply. ``async`` ones run side by side.

        Raises RewardError for a function that raises or returns something else.
        """
        if not prompts:  # a process may have no share of a small evaluation
            return [[] for _ in self.functions]
        offered = {**columns, "prompts": prompts, "completions": completions, "completion_ids": ids}
        with ThreadPoolExecutor(max_workers=max(1, len(self.functions))) as pool:
            waiting = {i: pool.submit(self._call, i, offered) for i, f in enumerate(self.functions) if _is_async(f)}
            results = [None if i in waiting else self._call(i, offered) for i in range(len(self.functions))]
            for i, future in waiting.items():
                results[i] = future.result()
        scores = [_checked(name, result, len(prompts)) for name, result in zip(self.names, results, strict=True)]
        silent = [i for i, row in enumerate(zip(*scores, strict=True)) if all(score is None for score in row)]
        if silent:
            logger.warning(
                "All reward functions returned None for %d of %d completions, the first to the prompt %.200r: these teach nothing; let at "
                "least one function give a number", len(silent), len(prompts), prompts[silent[0]],
            )  # fmt: skip
        return scores

    def _call(self, index: int, offered: Mapping[str, Any]) -> Any:
        function = self.functions[index]
        try:
            return call_with_limit(_plain(function), _accepted(function, offered), None)
        except CallRaised as raised:
            raise RewardError(f"reward function {self.names[index]!r} raised {raised}: correct it") from raised.__cause__


def combine(
    scores: Sequence[Scores], weights: Sequence[float], group_size: int, *, scale: str, normalise_first: bool
) -> tuple[list[float], list[float]]:
    """Rewards and advantages of each completion, from ``scores[function][completion]``.

    A completion to which no function applies has the reward NaN: it is no part of its group's baseline, and its advantage is 0.
    ``normalise_first`` is TRL's ``normalize_then_sum`` (GDPO, arXiv 2601.05242): each function's scores are normalised within the
    group, then added up by weight, then normalised over the batch.
    """
    rewards = [_weighted(row, weights) for row in zip(*scores, strict=True)]
    if not normalise_first:
        return rewards, _advantages(rewards, group_size, "group_mean", scale)
    parts = [
        _advantages([math.nan if s is None else s for s in column], group_size, "group_mean", "group_std") for column in scores
    ]
    sums = [
        math.nan if math.isnan(reward) else math.fsum(w * p for w, p in zip(weights, row, strict=True))
        for reward, row in zip(rewards, zip(*parts, strict=True), strict=True)
    ]
    return rewards, _advantages(sums, group_size, "batch_mean", "batch_std")


def _weighted(row: Sequence[float | None], weights: Sequence[float]) -> float:
    applicable = [w * s for w, s in zip(weights, row, strict=True) if s is not None]
    return math.fsum(applicable) if applicable else math.nan


def _advantages(rewards: Sequence[float], size: int, baseline: str, scale: str) -> list[float]:
    """``group_advantages`` of the completions that have a reward; 0 for the others."""
    groups = [list(rewards[i : i + size]) for i in range(0, len(rewards), size)]
    found = group_advantages([[r for r in group if not math.isnan(r)] for group in groups], baseline, scale, 1e-4)
    out: list[float] = []
    for group, advantages in zip(groups, found, strict=True):
        rest = iter(advantages)
        out += [0.0 if math.isnan(r) else next(rest) for r in group]
    return out


def _checked(name: str, result: Any, expected: int) -> Scores:
    if isinstance(result, torch.Tensor):
        result = result.tolist()
    if result is None or isinstance(result, str | bytes | Mapping) or not hasattr(result, "__iter__"):
        raise RewardError(f"reward function {name!r} returned {type(result).__name__}: it must return one number per completion")
    scores = list(result)
    if len(scores) != expected:
        raise RewardError(
            f"reward function {name!r} returned {len(scores)} rewards for {expected} completions: it must return one each"
        )
    return [_number(name, score) for score in scores]


def _number(name: str, score: Any) -> float | None:
    try:
        number = None if score is None else float(score)
    except (TypeError, ValueError):
        raise RewardError(f"reward function {name!r} returned {score!r:.80} for a completion: return a number or None") from None
    if number is None or math.isnan(number):
        return None  # TRL writes None as NaN
    if math.isinf(number):
        raise RewardError(f"reward function {name!r} returned {number} for a completion: return a finite number or None")
    return number


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name(function: Any) -> str:
    return str(getattr(_innermost(function), "__name__", type(_innermost(function)).__name__))


def _is_async(function: Any) -> bool:
    return is_async(_innermost(function))


def _plain(function: Any) -> Callable[..., Any]:
    """A partial of an async function is not seen to be one: wrapped, it is."""
    if not isinstance(function, functools.partial) or not _is_async(function):
        return function  # type: ignore[no-any-return]

    async def wrapped(**keywords: Any) -> Any:
        return await function(**keywords)

    return wrapped


def _accepted(function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """What the function takes of ``offered``; all of it where it has ``**kwargs``, as TRL wants of every function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return dict(offered)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    return {p.name: offered[p.name] for p in parameters if p.name in offered}
