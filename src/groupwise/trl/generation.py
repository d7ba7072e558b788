"""Prompts as TRL's data sets have them, and one generation: completions of several prompts, scored, with their advantages."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.algorithm import Objective
from groupwise.batch import Member
from groupwise.data.prompts import plain_ids, unknown_arguments
from groupwise.episodes.tools import Tool
from groupwise.errors import DataError
from groupwise.metrics import Metric
from groupwise.trl.config import GRPOConfig
from groupwise.trl.episodes import EMPTY_PROMPT, ScriptEpisodes
from groupwise.trl.rewards import RewardFunctions, Scores, combine
from groupwise.trl.steps import Part, prompts_needed
from groupwise.types import Completion, Group, Problem, Prompt

__all__ = ["Generation", "PromptSet", "generation_numbers", "was_cut"]

log = logging.getLogger(__name__)

_MARKS = 8
"""Tokens that a tokenizer may put around a text, at most."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
_IMAGES = ("image", "images")


class UnfitDataError(DataError, ValueError):
    """A ``DataError`` where TRL raises a ``ValueError``."""


class Stream:
    """The rows of an ``IterableDataset`` by their place in it, read as they are asked for; from its start again after its end, and where a
    place is asked for that was read before.

    ``rows``: how many will be needed, which may change. It is shuffled as TRL shuffles it, by its own buffer.
    """

    def __init__(self, dataset: Any, rows: int, seed: int | None) -> None:
        self.dataset = dataset if seed is None else dataset.shuffle(seed=seed)
        self.rows, self._read, self._iterator = rows, 0, self._endless()
        self._last: Mapping[str, Any] = {}

    def _endless(self) -> Iterator[Mapping[str, Any]]:
        for epoch in itertools.count():
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            before = self._read
            yield from self.dataset
            if self._read == before:
                raise UnfitDataError("the data set is a stream without rows: give one that has a column 'prompt'")

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index < self._read - 1:  # training begins again
            self._iterator, self._read = self._endless(), 0
        while self._read <= index:
            self._last = next(self._iterator)
            self._read += 1
        return self._last


class PromptSet:
    """The prompts of a data set, made into token ids when they are asked for; with what an environment says at the start, and with tools.

    Raises DataError for what is no data set of prompts.
    """

    def __init__(
        self, dataset: Any, tokenizer: Any, args: GRPOConfig, which: str, room: int, episodes: ScriptEpisodes | None = None
    ) -> None:
        self.tokenizer, self.which, self.room, self.episodes = tokenizer, which, room, episodes
        self.template_arguments: Mapping[str, Any] = args.chat_template_kwargs or {}
        self._told: set[str] = set()
        self._speaks = args.process_index == 0
        if self.template_arguments and which == "training":
            # apply_chat_template has arguments of its own, which no template asks for.
            own = inspect.signature(tokenizer.apply_chat_template).parameters
            if said := unknown_arguments(tokenizer, [n for n in self.template_arguments if n not in own], "chat_template_kwargs"):
                self._tell(said)
        self.keep_columns = not args.remove_unused_columns
        self.shuffles = bool(args.shuffle_dataset)
        form = getattr(dataset, "format", None)
        changes = isinstance(form, Mapping) and form.get("type") == "custom"  # a set_transform may give another row each time
        # So may what an environment says at the start.
        self._keeps = not changes and not (episodes and episodes.environments)
        self._kept: dict[int, Prompt] = {}
        self._marks: dict[tuple[str, ...], int] = {}
        self.dataset = dataset = self._rows(dataset, args)
        if self.is_stream:
            self.shuffles = False
            return
        environments = episodes and episodes.environments
        if not len(dataset) or ("prompt" not in dataset[0] and not environments):
            raise UnfitDataError(
                f"the {which} data set has no rows with a column 'prompt': rename the column that holds the prompts"
            )
        self._check_images(0, dataset[0])
        if environments and None not in environments.factories:
            self._check_environments(environments.factories)
        if episodes is not None:
            self[0]  # what is wrong with environments and templates shows at once
        if "prompt" not in dataset[0]:
            return
        for index, prompt in enumerate(
            # A set_transform may give it, where it is no column.
            dataset["prompt"] if "prompt" in getattr(dataset, "column_names", ()) else [row["prompt"] for row in dataset]
        ):
            if self._most_tokens(prompt) > room:
                self[index]

    def _rows(self, dataset: Any, args: GRPOConfig) -> Any:
        """Something with a length and rows."""
        if isinstance(dataset, Mapping):
            raise UnfitDataError(
                f"the {self.which} data set is a {type(dataset).__name__} of {', '.join(map(repr, dataset))}: pass one of them, such as "
                f"dataset[{next(iter(dataset), 'train')!r}]"
            )
        if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            return dataset
        if not hasattr(dataset, "__iter__"):
            raise UnfitDataError(f"the {self.which} data set is a {type(dataset).__name__}: pass a Dataset or IterableDataset")
        if self.which != "training":
            return list(dataset)
        args.dataloader_num_workers = 0  # as TRL sets it, for who looks
        return Stream(dataset, _rows_of_stream(args), args.seed if args.shuffle_dataset and hasattr(dataset, "shuffle") else None)

    def follow(self, args: GRPOConfig) -> None:
        """Of a stream, as many rows as the steps of ``args`` take now."""
        if self.is_stream:
            self.dataset.rows = _rows_of_stream(args)

    @property
    def is_stream(self) -> bool:
        """Whether rows are read when they are asked for, and in order alone."""
        return isinstance(self.dataset, Stream)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Prompt:
        if self.is_stream or not self._keeps:
            return self._render(index, self.dataset[index])
        if index not in self._kept:
            self._kept[index] = self._render(index, self.dataset[index])
        return self._kept[index]

    def _most_tokens(self, prompt: Any) -> float:
        """A bound on the prompt's tokens, without rendering it: a token is a byte at least. Infinite where something else may be wrong with
        it, which rendering says."""
        if isinstance(prompt, str):
            return len(prompt.encode()) + _MARKS if prompt.strip() else math.inf
        if prompt is None or any(not isinstance(m.get("content"), str) for m in prompt):
            return math.inf
        roles = tuple(str(m.get("role")) for m in prompt)
        if roles not in self._marks and len(self._marks) < 64:
            try:
                blank = self._chat_ids(0, [{"role": role, "content": "."} for role in roles])
                self._marks[roles] = len(blank) + len(roles) * _MARKS
            except Exception:  # a template that wants more than roles and contents
                return math.inf
        return self._marks.get(roles, math.inf) + sum(len(m["content"].encode()) for m in prompt)

    def _check_environments(self, factories: Iterable[object]) -> None:
        has_column = "environment" in getattr(self.dataset, "column_names", ())
        names = self.dataset["environment"] if has_column else [row.get("environment") for row in self.dataset]
        for index, name in enumerate(names):
            if name not in factories:
                raise UnfitDataError(
                    f"row {index} of the {self.which} data set has environment={name!r}, which is not among the environments of "
                    f"environment_factory: name one of {', '.join(map(repr, factories))} in the column 'environment'"
                )

    def _check_images(self, index: int, row: Mapping[str, Any]) -> None:
        for name in _IMAGES:
            if row.get(name) is not None:
                raise UnfitDataError(
                    f"row {index} of the {self.which} data set has something in its column {name!r}, but there is text only here: "
                    f"dataset.remove_columns({name!r}), or train with TRL"
                )

    def _render(self, index: int, row: Mapping[str, Any]) -> Prompt:
        self._check_images(index, row)
        prompt = row.get("prompt", EMPTY_PROMPT if self.episodes and self.episodes.environments else None)
        if prompt is None:
            raise UnfitDataError(
                f"row {index} of the {self.which} data set has no 'prompt': rename the column that holds the prompts"
            )
        columns = {k: v for k, v in row.items() if k not in _NOT_COLUMNS and self.keep_columns}
        problem = Problem(id=f"{self.which}:{index}", question=prompt, answer="", columns=columns)
        asked, tools = (prompt, []) if self.episodes is None else self.episodes.opening(problem)
        if isinstance(asked, str):
            if self.episodes is not None:
                raise UnfitDataError(
                    f"row {index} of the {self.which} data set is plain text, but calls of tools need turns: make the prompts conversations"
                )
            text, ids, messages = asked, self.tokenizer(text=asked)["input_ids"], None
            if tuple(ids) != plain_ids(self.tokenizer, asked):
                self._tell(
                    f"the tokenizer puts an end token behind plain prompts of the {self.which} data set, or a second start token before "
                    "them, and the policy goes on after that, as in TRL: set tokenizer.add_eos_token=False, or leave the start token out"
                )
        else:
            messages = tuple(dict(m) for m in asked)
            text, ids = "", self._chat_ids(index, messages, tools)
            if messages and messages[-1].get("role") == "assistant":
                self._tell(
                    f"the {self.which} data set has conversations that end with the assistant's turn: the policy begins another turn "
                    "after it, as in TRL 1.16, and does not go on with it, as in older versions"
                )
        if not 0 < len(ids) <= self.room:
            raise UnfitDataError(
                f"the prompt in row {index} of the {self.which} data set has {len(ids)} tokens, but the context leaves room for 1 "
                f"to {self.room} beside a completion: filter such rows out or lower max_completion_length"
            )
        return Prompt(problem, text, tuple(ids), messages)  # type: ignore[arg-type]

    def _tell(self, warning: str) -> None:
        """Once, in the first process."""
        if self._speaks and warning not in self._told:
            self._told.add(warning)
            log.warning(warning)

    def _chat_ids(self, index: int, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = ()) -> list[int]:
        # A turn that is a call alone has None, as in TRL.
        if any(not (isinstance(m.get("content"), str) or (m.get("content") is None and m.get("tool_calls"))) for m in messages):
            raise UnfitDataError(
                f"row {index} of the {self.which} data set has a message that is not text: there is text only here"
            )
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise UnfitDataError(
                f"row {index} of the {self.which} data set is a conversation, but the tokenizer has no chat template: take an "
                "instruct model, set tokenizer.chat_template, or make the prompts plain text"
            )
        found = self.tokenizer.apply_chat_template(
            list(messages), tools=[tool.schema for tool in tools] or None, add_generation_prompt=True, tokenize=True, return_dict=True,
            **self.template_arguments,
        )  # fmt: skip
        return list(found["input_ids"])


def _rows_of_stream(args: GRPOConfig) -> int:
    if args.max_steps <= 0:
        raise UnfitDataError("the training data set is a stream, which has no length: set max_steps")
    return prompts_needed(args)


@dataclass
class Generation:
    """Completions of one sampling, whole groups, in order; lists without a group index run over all completions of all processes."""

    groups: list[Group]
    prompts: list[str | list[dict[str, Any]]]
    completions: list[str | list[dict[str, Any]]]
    scores: list[Scores]
    """``[function][completion]``."""
    rewards: list[float]
    """Weighted sums; NaN where no function applies."""
    advantages: list[float]
    metrics: Mapping[str, Metric]
    """What the advantage measured."""
    parts: dict[tuple[int, ...], Part] = field(default_factory=dict)
    """By the micro-steps that they are made of."""

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], sampled: Sequence[Sequence[Completion]], scores: list[Scores], functions: RewardFunctions,
        objective: Objective,
    ) -> Generation:  # fmt: skip
        """Equally many completions of each prompt, with the ``scores`` of each function, as groups with their advantages."""
        flat = [(p, c) for p, completions in zip(prompts, sampled, strict=True) for c in completions]
        by_function, lengths = dict(zip(functions.keys, scores, strict=True)), [c.sampled_tokens for _, c in flat]
        size = len(sampled[0])
        rewards, advantages, metrics = combine(by_function, functions.weights.tolist(), lengths, size, objective)
        groups = [
            Group(prompt, tuple(completions), tuple(rewards[i * size : (i + 1) * size]))
            for i, (prompt, completions) in enumerate(zip(prompts, sampled, strict=True))
        ]
        questions = [[dict(m) for m in p.messages] if p.messages is not None else p.text for p, _ in flat]
        return cls(groups, questions, [functions.shown(*pair) for pair in flat], scores, rewards, advantages, metrics)

    @property
    def sampled(self) -> list[Completion]:
        return [c for group in self.groups for c in group.completions]

    @property
    def members(self) -> list[Member]:
        """Each completion's group and place in it."""
        return [(g, m) for g, group in enumerate(self.groups) for m in range(len(group.completions))]


def generation_numbers(
    generation: Generation, names: Sequence[str], args: GRPOConfig, with_tools: bool = False
) -> dict[str, float]:
    """Lengths, rewards and groups of one generation; NaN where a number does not exist."""
    lengths = [c.sampled_tokens for c in generation.sampled]
    ended = [c.sampled_tokens for c in generation.sampled if not was_cut(c)] or [0]
    found = {
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": statistics.fmean(map(was_cut, generation.sampled)),
        "completions/mean_terminated_length": statistics.fmean(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
    }
    by_name = defaultdict[str, list[float]](list)  # two functions may be called the same
    for name, scores in zip(names, generation.scores, strict=True):
        applicable = [s for s in scores if s is not None]
        by_name[f"rewards/{name}/mean"].append(_mean(applicable))
        by_name[f"rewards/{name}/std"].append(_std(applicable))
    found |= {name: _mean([x for x in numbers if not math.isnan(x)]) for name, numbers in by_name.items()}
    if with_tools:
        calls = [call.failure is not None for c in generation.sampled for call in c.calls]
        found["tools/call_frequency"] = len(calls) / len(lengths)
        found["tools/failure_frequency"] = statistics.fmean(calls) if calls else 0.0
    found |= {name: metric.value for name, metric in generation.metrics.items()}
    rewards = [r for r in generation.rewards if not math.isnan(r)]
    found |= {"reward": _mean(rewards), "reward_std": _std(rewards), "frac_reward_zero_std": _still(generation, args)}
    return {name: float(number) for name, number in found.items()}


def was_cut(completion: Completion) -> bool:
    """Whether it ends within a turn. TRL looks at the last token, so an episode that ends with a call that is not answered is whole."""
    return completion.finish_reason == "length"


def _still(generation: Generation, args: GRPOConfig) -> float:
    """Share of completions whose rewards' standard deviation is 0: of their group, or of the batch where that is the scale. So has a
    single reward, in TRL too."""
    if args.multi_objective_aggregation == "normalize_then_sum":
        # Their sums are normalised for each function, and advantages are those sums divided by their deviation + 1e-4.
        judged = zip(generation.advantages, generation.rewards, strict=True)
        return float(_flat([math.nan if math.isnan(reward) else advantage * 1e-4 for advantage, reward in judged]))
    if args.scale_rewards == "batch":
        return float(_flat(generation.rewards))
    return statistics.fmean(_flat(group.rewards) for group in generation.groups)


def _flat(rewards: Sequence[float]) -> bool:
    known = [r for r in rewards if not math.isnan(r)]
    return len(rewards) == 1 or (len(known) > 1 and max(known) - min(known) < 1e-8)


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers) if numbers else math.nan


def _std(numbers: Sequence[float]) -> float:
    return statistics.stdev(numbers) if len(numbers) > 1 else math.nan
