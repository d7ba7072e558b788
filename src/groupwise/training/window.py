"""A batch between its optimiser steps: what a run needs to go on inside a window of mu updates.

The later updates of a window are measured by what the weights said before its first (old logprobs, values, which tokens count), so
those numbers are kept with the batch. They do not depend on how it is cut: a run may resume with another token budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from groupwise import metrics
from groupwise.batch import Batch
from groupwise.metrics import Mean, Metric, merge
from groupwise.training.advantages import Advantages
from groupwise.training.microbatches import MicroBatch
from groupwise.types import Group, Problem, Prompt, from_json

__all__ = ["HeldState", "HeldWindow", "Stateful", "Window"]

HeldState = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""The state of a batch whose updates are not all made, as `Window.state` gives it."""
_METRICS = {kind.__name__: kind for kind in (metrics.Mean, metrics.Sum, metrics.Max, metrics.Min)}
_RATE = "optimizer/learning_rate"
_BY_UPDATE = ("policy/loss", "policy/ratio", "policy/clip_share", "policy/kl", "optimizer/grad_norm")
"""Shown of each update too, where a batch has several: the first is at ratio 1, and a mean over all hides what the last did."""


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
    metrics: dict[str, Metric] = field(default_factory=dict)
    """What the passes measured so far, of all processes."""
    updates: int = 0

    def measure(self, *metrics: Mapping[str, Metric]) -> None:
        """Add numbers of all processes to ``metrics``, each by its own rule."""
        self.metrics = merge([self.metrics, *metrics])

    def count_update(self, made: Mapping[str, Metric], of: int) -> None:
        """One more update of the window's ``of`` is made, and came to ``made``. Names that begin with ``detail/`` are not kept."""
        self.updates += 1
        kept = {name: metric for name, metric in made.items() if not name.startswith("detail/")}
        for name in kept.keys() & {"policy/loss", "value/loss"}:
            kept[name] = Mean(kept[name].value, 1)  # summed over micro-batches, averaged over updates
        if of > 1:
            kept |= {f"updates/{name.partition('/')[2]}_{self.updates}": kept[name] for name in _BY_UPDATE if name in kept}
        self.measure(kept)
        self.metrics[_RATE] = kept[_RATE]  # the last one's

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Named tensors and JSON values. Prompts are not among them: they are rendered again from the problems' ids."""
        values = {
            "updates": self.updates,
            "advantages": self.advantages,
            "groups": [_group_values(group) for group in self.groups],
            "found": [_metric_values(self.metrics)],
        }
        return self.batch.computed(), values

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore into a window of the same groups. Raises KeyError or ValueError for those of another."""
        self.batch.restore(tensors)
        self.advantages = [list(group) for group in values["advantages"]]
        self.metrics, self.updates = merge(map(_metrics_of, values["found"])), int(values["updates"])


class HeldWindow:
    """The open window of a run, if any, as a checkpoint's part: on its way to the disk, or back from it."""

    def __init__(self) -> None:
        self.window: Window | None = None
        self.rollout_metrics: dict[str, Metric] = {}
        self._state: HeldState | None = None

    def checkpoint_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.window is None:
            return {}, {}
        tensors, values = self.window.state()
        return tensors, values | {"rollout": _metric_values(self.rollout_metrics)}

    def load_checkpoint_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self._state = (tensors, values) if values else None
        self.rollout_metrics = _metrics_of(values.get("rollout", {}))

    @property
    def has_window(self) -> bool:
        """Whether the checkpoint had an open window that is not taken yet."""
        return self._state is not None

    def groups(self, prompt_of: Callable[[str], Prompt]) -> list[Group]:
        """The batch; ``prompt_of`` renders the problem of an id. Raises KeyError for a problem that the data no longer has."""
        assert self._state is not None
        return [_group_of(row, prompt_of(row["problem"])) for row in self._state[1]["groups"]]

    def take(self) -> HeldState | None:
        """What `Window.restore` wants, once; None where there is no open window."""
        taken, self._state = self._state, None
        return taken


def _metric_values(numbers: Mapping[str, Metric]) -> dict[str, Any]:
    """Metrics as JSON values: the rule by which each is reduced, and what it keeps."""
    return {name: [type(metric).__name__, *asdict(metric).values()] for name, metric in numbers.items()}


def _metrics_of(values: Mapping[str, Any]) -> dict[str, Metric]:
    return {name: _METRICS[kind](*kept) for name, (kind, *kept) in values.items()}


def _group_values(group: Group) -> dict[str, Any]:
    """Its fields as JSON values, with the problem's id in place of the prompt."""
    bare = asdict(replace(group, prompt=Prompt(Problem("", "", ""), "", ())))
    return {name: value for name, value in bare.items() if name != "prompt"} | {"problem": group.prompt.problem.id}


def _group_of(values: Mapping[str, Any], prompt: Prompt) -> Group:
    return from_json(Group, {name: value for name, value in values.items() if name != "problem"} | {"prompt": prompt})
