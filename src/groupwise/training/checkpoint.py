"""What a checkpoint holds: the policy as a model folder, and the state of learning as safetensors and JSON. Nothing is pickled.

Problem order and sampling need no state: they are functions of seed and step. A run that is stopped between two updates of one batch
leaves ``step-N-update-K``, with the batch in it. How the files lie on the disk is ``checkpoint_folder``'s.

A thread writes the state while the next batch is sampled. Sampling changes neither weights nor optimiser, so on a CPU they are written
from where they are, and learning waits for it (``finish``), as it does for a copy of divided weights, whose memory it needs. On a GPU a
copy in the machine's memory is written, while the run goes on to the next checkpoint.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from groupwise.errors import CheckpointError
from groupwise.memory import available_memory_bytes, blocks_of_their_own, release_freed_memory
from groupwise.models.adapters import is_adapted
from groupwise.models.load import Policy, copy_to_cpu, save_model
from groupwise.models.saving import size_bytes, write_tensors
from groupwise.training.checkpoint_folder import (
    STATE,
    damage,
    is_sound,
    put_in_place,
    read_state,
    remove_old,
    seal,
    unreadable,
)
from groupwise.training.learner import Learner

__all__ = [
    "MODEL", "CheckpointWriter", "Snapshot", "load_checkpoint", "restore_state", "take_snapshot", "write_snapshot", "write_state",
]  # fmt: skip

MODEL = "model"
"""The policy's folder inside a checkpoint."""
_OPTIMIZER, _REFERENCE, _CRITIC, _PART = "optimizer.safetensors", "reference.safetensors", "critic.safetensors", "part-"


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint will hold."""

    name: str
    """``step-N``, or ``step-N-update-K`` between two updates of one batch."""
    policy: Policy
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By file; as long as nothing was copied, those that learning changes."""
    state: str
    """The text of ``state.json``."""
    is_copy: bool = False
    """Whether learning does not touch any of it, so that it need not be copied."""

    @property
    def _whole_copy(self) -> bool:
        """Whether a copy must be one of everything: on a GPU, where nobody may read while another thread captures a graph."""
        return not self.is_copy and self.policy.device.type != "cpu"

    def copied_bytes(self) -> int:
        """How much memory ``copied`` takes."""
        return sum(t.numel() * t.element_size() for t in self._to_copy())

    def size_bytes(self) -> int:
        """Bytes on the disk of the model (of one with an adapter the adapter), and of all files."""
        model = self.policy.model
        of_model = (p for p in model.parameters() if p.requires_grad) if is_adapted(model) else model.parameters()
        return sum(p.numel() * p.element_size() for p in of_model) + sum(size_bytes(of_file) for of_file in self.tensors.values())

    def _to_copy(self) -> list[Tensor]:
        files = [of_file for file, of_file in self.tensors.items() if self._whole_copy or self._is_part(file)]
        tensors = [] if self.is_copy else [tensor for of_file in files for tensor in of_file.values()]
        if self._whole_copy:
            model = self.policy.model
            tensors += [*(p for p in model.parameters() if p.requires_grad or not is_adapted(model)), *model.buffers()]
        return tensors

    @staticmethod
    def _is_part(file: str) -> bool:
        return file.startswith(_PART)

    def copied(self, tokenizer: Any) -> Snapshot:
        """What may be written while the next batch is sampled; ``tokenizer`` takes the place of the one in use.

        On a CPU weights and optimiser are those of the run, which must wait until it is written before it changes them. All else is copied,
        on the CPU.
        """
        if self.is_copy:
            return replace(self, policy=replace(self.policy, tokenizer=tokenizer))
        whole = self._whole_copy
        with blocks_of_their_own():
            tensors = {file: _copies(own) if whole or self._is_part(file) else own for file, own in self.tensors.items()}
            model = copy_to_cpu(self.policy.model) if whole else self.policy.model
        return replace(self, policy=replace(self.policy, model=model, tokenizer=tokenizer), tensors=tensors, is_copy=whole)


def take_snapshot(
    step: int, policy: Policy, learner: Learner, *, about: Mapping[str, Any] | None = None, updates: int = 0
) -> Snapshot:
    """The state after ``step`` steps, as ``step-N``; with ``updates`` of the next one's made too, as ``step-N-update-K``.

    ``about``: what else ``state.json`` says, as JSON values; ``keep_best`` goes by ``scores`` in it, by the names of checkpoints,
    as far as ``scored_by`` says of them the same.

    Where processes divide the weights, for all of them at once: the first one's is whole, a copy, and no other can be written.
    """
    sharding = learner.sharding
    copied = sharding.divides_weights  # with whole weights, which are brought together in new memory, goes a copy of the rest
    tensors: dict[str, Mapping[str, Tensor]] = {_OPTIMIZER: sharding.whole_state(learner.optimizer.state())}
    if learner.moving_reference is not None:
        tensors[_REFERENCE] = sharding.whole_state(learner.moving_reference.state())
    if learner.critic is not None:
        tensors[_CRITIC] = _copies(learner.critic.state()) if copied else learner.critic.state()
    parts = {}
    for name, part in learner.parts.items():
        of_part, parts[name] = part.checkpoint_state()
        if of_part:
            tensors[f"{_PART}{name}.safetensors"] = _copies(of_part) if copied else of_part
    state = {
        "step": step, "updates": learner.updates, "dropped_in_a_row": learner.dropped_in_a_row,
        "renewed_before": learner.renewed_before, "parts": parts,
        "kl_control": None if learner.kl_control is None else {"beta": learner.kl_control.beta}, **(about or {}),
    }  # fmt: skip
    name = f"step-{step}-update-{updates}" if updates else f"step-{step}"
    policy = replace(policy, adapter_only=True)  # of a base that does not learn no checkpoint has a copy
    return Snapshot(name, sharding.whole_policy(policy) or policy, tensors, json.dumps(state), is_copy=copied)


def write_snapshot(folder: Path, snapshot: Snapshot, keep: int, *, keep_best: bool = False) -> Path:
    """Write ``folder/step-N`` and remove the oldest beyond ``keep``. ``keep_best``: the one with the highest score is kept whatever its
    age, the earlier of two equals.

    Raises CheckpointError when the disk does not take it; the checkpoints before it are untouched.
    """
    target = folder / snapshot.name
    # A step of a run has one state. Another run, which began from this one with settings or data that were changed, writes its own.
    # What was judged since then is worth another copy, where the disk takes it.
    is_whole = False
    if target.exists() and is_sound(target):
        before, now = read_state(target), json.loads(snapshot.state)
        is_whole = all(before.get(key) == now.get(key) for key in ("config", "data", "data_columns", "python_rewards"))
        if is_whole and before.get("evaluations") == now.get("evaluations"):
            return target
    try:
        put_in_place(target, lambda aside: _write(aside, snapshot), snapshot.size_bytes())
    except CheckpointError:
        if is_whole:
            return target
        raise
    remove_old(folder, keep, keep_best)
    return target


def _write(aside: Path, snapshot: Snapshot) -> None:
    save_model(snapshot.policy, aside / MODEL)
    write_state(aside, snapshot)
    seal(aside)


def write_state(folder: Path, snapshot: Snapshot) -> None:
    """Everything in ``snapshot`` but the model."""
    for file, tensors in snapshot.tensors.items():
        write_tensors(folder / file, tensors)
    (folder / STATE).write_text(snapshot.state, encoding="utf-8")


def load_checkpoint(checkpoint: Path, learner: Learner) -> int:
    """Restore masters, moments, reference, parts and counters, exactly, into a learner whose policy was loaded from the
    checkpoint's ``MODEL`` folder. Returns the number of steps that are done.

    Its files were found sound when it was chosen, by the first process alone (``checkpoint_folder``): they are not read once more for that.
    Raises CheckpointError when they are missing, or belong to another model.
    """
    return restore_state(checkpoint, learner, read_state(checkpoint))


def restore_state(checkpoint: Path, learner: Learner, state: Mapping[str, Any]) -> int:
    """The same of a checkpoint whose ``state.json`` was read."""
    try:
        learner.optimizer.load_state(learner.sharding.read_state(checkpoint / _OPTIMIZER))
        if learner.moving_reference is not None:
            learner.moving_reference.load_state(learner.sharding.read_state(checkpoint / _REFERENCE))
        if learner.critic is not None:
            learner.critic.load_state(load_file(checkpoint / _CRITIC))
        if learner.kl_control is not None and state.get("kl_control"):
            learner.kl_control = replace(learner.kl_control, beta=float(state["kl_control"]["beta"]))
        for name, part in learner.parts.items():
            tensors = checkpoint / f"{_PART}{name}.safetensors"
            part.load_checkpoint_state(load_file(tensors) if tensors.is_file() else {}, state.get("parts", {}).get(name, {}))
    except (FileNotFoundError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, FileNotFoundError) and (fault := damage(checkpoint, others=True)) is not None:  # since it was chosen
            raise unreadable(checkpoint, fault) from error
        raise CheckpointError(
            f"the checkpoint {checkpoint} is whole, but does not hold what these settings need ({error}): take back what was changed "
            "(algorithm.kl, algorithm.value, optimizer.precision, the model), or start a new run"
        ) from error
    except (OSError, SafetensorError) as error:
        raise unreadable(checkpoint, error) from error
    learner.updates, learner.dropped_in_a_row = int(state["updates"]), int(state.get("dropped_in_a_row", 0))
    learner.renewed_before = int(state.get("renewed_before", 0))
    return int(state["step"])


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


_SPARE = 1.25
"""Memory that must be there for each byte of a copy: writing needs some of its own."""


class CheckpointWriter:
    """One checkpoint at a time: the next waits for the one before. What went wrong is told by ``news``, and ends nothing.

    A thread writes it even where it is waited for: another process's failure is raised in the main thread, and would end the
    writing there.
    """

    def __init__(self, folder: Path, keep: int, keep_best: bool, in_background: bool, beside_learning: bool = True) -> None:
        """``beside_learning``: whether a copy does not lie in the memory that learning takes, which then need not wait for it."""
        self.folder, self.keep, self.keep_best, self.in_background = folder, keep, keep_best, in_background
        self.beside_learning = beside_learning
        self._thread: threading.Thread | None = None
        self._beside = False
        """Whether what is being written is nothing that learning need wait for."""
        self._tokenizer: Any = None
        self._told_of_memory = False
        self.failed = False
        """Whether the disk did not take the last one that was begun; known when it is finished."""
        self._news: list[str] = []

    def write(self, snapshot: Snapshot) -> Path:
        """Write it, and wait for it. Raises CheckpointError when the disk does not take it."""
        self.finish()
        failed: list[Exception] = []
        self._start(snapshot, failed.append)
        self.finish()
        for error in failed:
            raise error
        return self.folder / snapshot.name

    def begin(self, snapshot: Snapshot) -> None:
        """Begin and go on; without memory for what is copied, or with ``in_background`` off, wait for the disk."""
        self.finish()
        self.failed = False
        if not self.in_background or self._is_short(snapshot):
            self._start(snapshot, partial(self._note, snapshot.name))
            self.finish()
            return
        if self._tokenizer is None:  # not the one in use: its Rust part refuses to be used by two threads at once
            self._tokenizer = copy.deepcopy(snapshot.policy.tokenizer)
        copied = snapshot.copied(self._tokenizer)
        self._beside = copied.is_copy and self.beside_learning
        self._start(copied, partial(self._note, snapshot.name))

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk; any thread may ask."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def finish(self, *, copies: bool = True) -> None:
        """Wait until nothing is being written; without ``copies``, until nothing is that learning must wait for."""
        if self._thread is not None and (copies or not self._beside):
            self._thread.join()
            self._thread = None
            release_freed_memory()  # a thread's own heap is of no use to the next one

    def news(self) -> list[str]:
        """Failures since the last call, one sentence each."""
        told, self._news = self._news, []
        return told

    def _start(self, snapshot: Snapshot, heard: Callable[[Exception], None]) -> None:
        self._thread = threading.Thread(target=self._try, args=(snapshot, heard), name="checkpoint")
        self._thread.start()

    def _try(self, snapshot: Snapshot, heard: Callable[[Exception], None]) -> None:
        try:
            write_snapshot(self.folder, snapshot, self.keep, keep_best=self.keep_best)
        except Exception as error:  # it must be heard of, and a thread has nobody to raise to
            heard(error)

    def _note(self, name: str, error: Exception) -> None:
        what = str(error) if isinstance(error, CheckpointError) else f"{name} ({type(error).__name__}: {error})"
        self._news.append(f"NOT SAVED: {what}")
        self.failed = True

    def _is_short(self, snapshot: Snapshot) -> bool:
        needed, there = snapshot.copied_bytes() * _SPARE, available_memory_bytes()
        if needed > there and not self._told_of_memory:
            self._told_of_memory = True
            self._news.append(
                f"Checkpoints are not written in the background: a copy needs {needed / 2**30:.1f} GiB of memory, and "
                f"{there / 2**30:.1f} are free."
            )
        return needed > there
