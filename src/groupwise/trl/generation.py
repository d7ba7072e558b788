"""Prompts as TRL's data sets have them, and one generation: completions of several prompts, scored, with their advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.engines import Engine
from groupwise.errors import DataError
from groupwise.rollout import rollout_settings
from groupwise.trl.config import GRPOConfig
from groupwise.trl.rewards import RewardFunctions, Scores, combine
from groupwise.types import Completion, Group, Problem, Prompt

__all__ = ["Generation", "PromptSet", "generate"]

_TEMPLATE_BYTES = 256
"""What a chat template may add to a prompt, roughly."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class PromptSet:
    """The prompts of a data set, made into token ids when they are asked for.

    Raises DataError for what is no data set of prompts.
    """

    def __init__(self, dataset: Any, tokenizer: Any, args: GRPOConfig, which: str, room: int) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"the {which} data set is a {type(dataset).__name__}, which has no length: take what is needed of it, "
                "datasets.Dataset.from_list(list(stream.take(1000)))"
            )
        if not len(dataset) or "prompt" not in dataset[0]:
            raise DataError(f"the {which} data set has no rows with a column 'prompt': rename the column that holds the prompts")
        self.dataset, self.tokenizer, self.which, self.room = dataset, tokenizer, which, room
        self.template_arguments: Mapping[str, Any] = args.chat_template_kwargs or {}
        self.keep_columns = not args.remove_unused_columns
        self._kept: dict[int, Prompt] = {}
        for index, prompt in enumerate(
            dataset["prompt"] if hasattr(dataset, "column_names") else [row["prompt"] for row in dataset]
        ):
            if _bytes(prompt) > room - _TEMPLATE_BYTES:  # a token is a byte at least, so that all others are sure to fit
                self[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Prompt:
        if index not in self._kept:
            self._kept[index] = self._render(index, self.dataset[index])
        return self._kept[index]

    def _render(self, index: int, row: Mapping[str, Any]) -> Prompt:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            text, ids, messages = prompt, self.tokenizer(text=prompt)["input_ids"], None
        else:
            messages = tuple(dict(m) for m in prompt)
            text, ids = "", self._chat_ids(index, messages)
        if not 0 < len(ids) <= self.room:
            raise DataError(
                f"the prompt in row {index} of the {self.which} data set has {len(ids)} tokens, but the context leaves room for 1 "
                f"to {self.room} beside a completion: filter such rows out or lower max_completion_length"
            )
        columns = {k: v for k, v in row.items() if k not in _NOT_COLUMNS and self.keep_columns}
        problem = Problem(id=f"{self.which}:{index}", question=prompt, answer="", columns=columns)
        return Prompt(problem, text, tuple(ids), messages)  # type: ignore[arg-type]

    def _chat_ids(self, index: int, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if any(not isinstance(m.get("content"), str) for m in messages):
            raise DataError(f"row {index} of the {self.which} data set has a message that is not text: there is text only here")
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise DataError(
                f"row {index} of the {self.which} data set is a conversation, but the tokenizer has no chat template: take an "
                "instruct model, set tokenizer.chat_template, or make the prompts plain text"
            )
        found = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True, **self.template_arguments
        )
        return list(found["input_ids"])


def _bytes(prompt: Any) -> int:
    return len(prompt.encode()) if isinstance(prompt, str) else sum(len(str(m.get("content")).encode()) + 16 for m in prompt)


@dataclass
class Generation:
    """Completions of one sampling, whole groups, in order; lists without a group index run over all completions."""

    groups: list[Group]
    prompts: list[Any]
    completions: list[Any]
    scores: list[Scores]
    """``[function][completion]``."""
    rewards: list[float]
    """Weighted sums; NaN where no function applies."""
    advantages: list[float]
    prepared: dict[Any, Any] = field(default_factory=dict)
    """Micro-batches by the sweeps that they belong to."""

    @property
    def sampled(self) -> list[Completion]:
        return [c for group in self.groups for c in group.completions]

    def by_group(self, values: Sequence[float]) -> list[list[float]]:
        rest = iter(values)
        return [[next(rest) for _ in group.completions] for group in self.groups]


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    functions: RewardFunctions,
    args: GRPOConfig,
    rollout: Any,
    *,
    group_size: int,
    scope: str,
    extras: Mapping[str, Any],
) -> Generation:
    """Sample ``group_size`` completions of each prompt and score them all at once. ``extras``: keywords beside the columns."""
    sampled = engine.sample(prompts, group_size, rollout_settings(rollout), seed=args.seed, scope=scope)
    flat = [(p, c) for p, completions in zip(prompts, sampled, strict=True) for c in completions]
    questions = [[dict(m) for m in p.messages] if p.messages is not None else p.text for p, _ in flat]
    answers = [c.text if p.messages is None else [{"role": "assistant", "content": c.text}] for p, c in flat]
    columns = {name: [p.problem.columns.get(name) for p, _ in flat] for name in flat[0][0].problem.columns}
    scores = functions.score(questions, answers, [list(c.token_ids) for _, c in flat], {**columns, **extras})
    rewards, advantages = combine(
        scores,
        functions.weights,
        group_size,
        scale={"group": "group_std", "batch": "batch_std", "none": "none"}[str(args.scale_rewards)],
        normalise_first=args.multi_objective_aggregation == "normalize_then_sum",
    )
    groups = [
        Group(prompt, tuple(completions), tuple(rewards[i * group_size : (i + 1) * group_size]))
        for i, (prompt, completions) in enumerate(zip(prompts, sampled, strict=True))
    ]
    return Generation(groups, questions, answers, scores, rewards, advantages)
