"""Reward functions as TRL calls them: once for all completions of a generation, by keyword, with the data set's columns beside."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from groupwise.algorithm.advantages import group_advantages
from groupwise.errors import ModelError, RewardError
from groupwise.rewards.calls import CallRaised, call_with_limit
from groupwise.trl.config import GRPOConfig

__all__ = ["RewardFunctions", "RewardModel", "combine"]

Scores = list[float | None]


class RewardModel:
    """A sequence classifier with one output, read as a score of prompt and completion together."""

    def __init__(self, model: Any, tokenizer: Any, batch: int, template_arguments: Mapping[str, Any]) -> None:
        self.model, self.tokenizer, self.batch = model.eval(), tokenizer, batch
        self.template_arguments = template_arguments
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The classifier reads its score off the last token that is not padding.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    @property
    def __name__(self) -> str:
        return str(self.model.config._name_or_path).rstrip("/").split("/")[-1]

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """One score for each pair."""
        texts = [self._text(p, c) for p, c in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), self.batch):
            part = texts[start : start + self.batch]
            inputs = self.tokenizer(text=part, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
            scores += self.model(**inputs.to(self.model.device)).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        return str(self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **self.template_arguments))


class RewardFunctions:
    """The trainer's reward functions with their names and weights."""

    def __init__(self, functions: Any, args: GRPOConfig, tokenizers: Any, device: torch.device) -> None:
        listed = list(functions) if isinstance(functions, list | tuple) else [functions]
        if not listed or None in listed:
            raise RewardError(
                "reward_funcs is empty, but there must be something to learn from: pass a function or a model's name"
            )
        given = (
            tokenizers if isinstance(tokenizers, list | tuple) else [tokenizers] * (1 if tokenizers is not None else len(listed))
        )
        if len(given) != len(listed):
            raise RewardError(
                f"there are {len(listed)} reward_funcs but {len(given)} reward_processing_classes: pass one for each, or None"
            )
        self.functions: list[Callable[..., Any]] = [
            self._function(f, t, args, device) for f, t in zip(listed, given, strict=True)
        ]
        self.names = [_name(function) for function in self.functions]
        self.weights = [1.0] * len(listed) if args.reward_weights is None else [float(w) for w in args.reward_weights]
        if len(self.weights) != len(listed):
            raise RewardError(f"reward_weights has {len(self.weights)} entries for {len(listed)} reward_funcs: give one for each")

    @staticmethod
    def _function(function: Any, tokenizer: Any, args: GRPOConfig, device: torch.device) -> Callable[..., Any]:
        if isinstance(function, str):
            function, tokenizer = _load_classifier(function, tokenizer, args)
        if isinstance(function, torch.nn.Module):
            from transformers import AutoTokenizer

            name = function.config._name_or_path  # type: ignore[union-attr]
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
            model = function.to(device)
            return RewardModel(model, tokenizer, int(args.per_device_train_batch_size), args.chat_template_kwargs or {})
        if not callable(function):
            raise RewardError(f"reward_funcs has a {type(function).__name__}: pass functions, model names or models")
        return function  # type: ignore[no-any-return]

    def score(self, prompts: list[Any], completions: list[Any], ids: list[list[int]], columns: Mapping[str, Any]) -> list[Scores]:
        """``[function][completion]``; None where a function says that it does not apply. ``async`` ones run side by side.

        Raises RewardError for a function that raises or returns something else.
        """
        offered = {**columns, "prompts": prompts, "completions": completions, "completion_ids": ids}
        with ThreadPoolExecutor(max_workers=max(1, len(self.functions))) as pool:
            waiting = {i: pool.submit(self._call, i, offered) for i, f in enumerate(self.functions) if _is_async(f)}
            results = [None if i in waiting else self._call(i, offered) for i in range(len(self.functions))]
            for i, future in waiting.items():
                results[i] = future.result()
        return [_checked(name, result, len(prompts)) for name, result in zip(self.names, results, strict=True)]

    def _call(self, index: int, offered: Mapping[str, Any]) -> Any:
        function = self.functions[index]
        try:
            return call_with_limit(_plain(function), _accepted(function, offered), None)
        except CallRaised as raised:
            raise RewardError(f"reward function {self.names[index]!r} raised {raised}: mend it") from raised.__cause__


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
    inner = _innermost(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


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


def _load_classifier(name: str, tokenizer: Any, args: GRPOConfig) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    given = {k: v for k, v in (args.model_init_kwargs or {}).items() if k in ("revision", "attn_implementation")}
    given["trust_remote_code"] = args.trust_remote_code
    try:
        model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, **given)
        given.pop("attn_implementation", None)
        return model, tokenizer or AutoTokenizer.from_pretrained(name, **given)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"the reward model {name!r} cannot be loaded ({reason}): name a sequence classifier or its folder"
        ) from error
