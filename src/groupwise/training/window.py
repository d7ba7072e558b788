"""A batch between its optimiser steps: what a run needs to go on inside a window of mu updates.

The later updates of a window are measured by what the weights said before its first (old logprobs, values, which tokens count), so
those numbers are kept with the batch. They do not depend on how it is cut: a run may resume with another token budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from groupwise import metrics
from groupwise.batch import Batch
from groupwise.errors import CheckpointError
from groupwise.metrics import Metric
from groupwise.training.advantages import Advantages
from groupwise.training.microbatches import MicroBatch
from groupwise.types import Completion, Group, Prompt, StepScores, ToolCall, Turn

__all__ = ["HeldWindow", "Paused", "Stateful", "Window", "turns_of"]

_METRICS = {kind.__name__: kind for kind in (metrics.Mean, metrics.Sum, metrics.Max, metrics.Min)}


class Stateful(Protocol):
    """Something with a state that a resumed run needs: put it into ``Learner.parts`` under a name, and checkpoints hold it."""

    def checkpoint_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Named tensors, and JSON values."""

    def load_checkpoint_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore exactly what ``checkpoint_state`` gave. KeyError or ValueError: it belongs to another run."""


@dataclass
class Window:
    """One batch with everything that was noted about it, and how many of its updates are made."""

    groups: Sequence[Group]
    batch: Batch
    """This process's completions."""
    micro_batches: list[MicroBatch]
    advantages: Advantages = field(default_factory=list)
    found: list[dict[str, Metric]] = field(default_factory=list)
    """What each pass measured so far."""
    updates: int = 0

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Named tensors and JSON values. Prompts are not among them: they are rendered again from the problems' ids."""
        values = {
            "updates": self.updates,
            "advantages": self.advantages,
            "groups": [_group_values(group) for group in self.groups],
            "found": [metric_values(numbers) for numbers in self.found],
        }
        return self.batch.notes(), values

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Into a window of the same groups. Raises KeyError or ValueError for those of another."""
        self.batch.restore(tensors)
        self.advantages = [list(group) for group in values["advantages"]]
        self.found = [metrics_of(numbers) for numbers in values["found"]]
        self.updates = int(values["updates"])


@dataclass(frozen=True)
class Paused:
    """Learning was asked to stop, and did before all updates of the batch were made."""

    window: Window


class HeldWindow:
    """The open window of a run, if any, as a checkpoint's part: on its way to the disk, or back from it."""

    def __init__(self) -> None:
        self.window: Window | None = None
        self.rollout_metrics: dict[str, Metric] = {}
        self._tensors: dict[str, Tensor] = {}
        self._values: dict[str, Any] = {}

    def checkpoint_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.window is None:
            return {}, {}
        tensors, values = self.window.state()
        return tensors, values | {"rollout": metric_values(self.rollout_metrics)}

    def load_checkpoint_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self._tensors, self._values = tensors, values
        self.rollout_metrics = metrics_of(values.get("rollout", {}))

    @property
    def found(self) -> bool:
        """Whether the checkpoint had an open window that is not taken yet."""
        return bool(self._values)

    def refuse_to_be_shared(self, processes: int, checkpoint: Path | None) -> None:
        """Raise CheckpointError where several processes would resume inside it."""
        if processes > 1:
            raise CheckpointError(
                f"the checkpoint {checkpoint} was written between two updates of a batch, by one process, and {processes} "
                "were started: resume with one, or from an earlier checkpoint"
            )

    def groups(self, prompt_of: Callable[[str], Prompt]) -> list[Group]:
        """The batch; ``prompt_of`` renders the problem of an id. Raises KeyError for a problem that the data no longer has."""
        return [_group_of(row, prompt_of(row["problem"])) for row in self._values["groups"]]

    def take(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What `Window.restore` wants, once; None where there is no open window."""
        taken = (self._tensors, self._values) if self._values else None
        self._tensors, self._values = {}, {}
        return taken


def metric_values(numbers: Mapping[str, Metric]) -> dict[str, Any]:
    """Metrics as JSON values: the rule by which each is reduced, and what it keeps."""
    return {name: [type(metric).__name__, *asdict(metric).values()] for name, metric in numbers.items()}


def metrics_of(values: Mapping[str, Any]) -> dict[str, Metric]:
    return {name: _METRICS[kind](*kept) for name, (kind, *kept) in values.items()}


def turns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """What ``dataclasses.asdict`` made of turns, read back from JSON."""
    return tuple(Turn(**{**row, "calls": tuple(ToolCall(**call) for call in row["calls"])}) for row in rows)


def _group_values(group: Group) -> dict[str, Any]:
    return {
        "problem": group.prompt.problem.id,
        "completions": [asdict(completion) for completion in group.completions],
        "rewards": group.rewards,
        "components": {name: list(scores) for name, scores in group.components.items()},
        "process": {name: asdict(scores) for name, scores in group.process.items()},
        "outcome_rewards": group.outcome_rewards,
        "weights": dict(group.weights),
    }


def _group_of(values: Mapping[str, Any], prompt: Prompt) -> Group:
    completions = tuple(
        Completion(
            **{
                **row,
                "token_ids": tuple(row["token_ids"]),
                "logprobs": tuple(row["logprobs"]),
                "turns": turns_of(row.get("turns", ())),
            }
        )
        for row in values["completions"]
    )
    components = {name: tuple(scores) for name, scores in values["components"].items()}
    process = {
        name: StepScores(row["weight"], tuple(tuple((end, r) for end, r in steps) for steps in row["steps"]))
        for name, row in values.get("process", {}).items()
    }
    outcomes = values.get("outcome_rewards")
    outcomes = None if outcomes is None else tuple(outcomes)
    return Group(prompt, completions, tuple(values["rewards"]), components, process, outcomes, values.get("weights", {}))
