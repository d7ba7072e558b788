"""Checkpoints: the policy as a model folder, and the state of learning as safetensors and JSON. Nothing is pickled.

A checkpoint is written aside and renamed when it is complete, so a folder ``step-N`` is always whole. Problem order and sampling need
no state: they are functions of seed and step.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.algorithm import AdaptiveKL
from groupwise.errors import CheckpointError
from groupwise.models.load import Policy, save_model
from groupwise.training.learner import Learner

__all__ = ["MODEL", "find_checkpoint", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

MODEL = "model"
"""The policy's folder inside a checkpoint."""
_STATE, _OPTIMIZER, _REFERENCE = "state.json", "optimizer.safetensors", "reference.safetensors"
_CRITIC = "critic.safetensors"


def save_checkpoint(folder: Path, step: int, policy: Policy, learner: Learner, keep: int) -> Path:
    """Write ``folder/step-N`` and remove the oldest beyond ``keep``."""
    target, aside = folder / f"step-{step}", folder / f".step-{step}.partial"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_model(policy, aside / MODEL)
        save_file(_own(learner.optimizer.state()), aside / _OPTIMIZER)
        if learner.moving_reference is not None:
            save_file(_own(learner.moving_reference.state()), aside / _REFERENCE)
        if learner.critic is not None:
            save_file(_own(learner.critic.state()), aside / _CRITIC)
        control = None if learner.kl_control is None else learner.kl_control.state_dict()
        (aside / _STATE).write_text(json.dumps({"step": step, "updates": learner.updates, "kl_control": control}))
        for path in aside.iterdir():
            if path.is_file():
                _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {target} cannot be written ({error.strerror or error}): free space or make the folder writable; "
            "the checkpoints before it are whole"
        ) from error
    for old in sorted(_complete(folder), key=_step_of)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in ``folder``, or None."""
    return max(_complete(folder), key=_step_of, default=None)


def find_checkpoint(path: Path) -> Path:
    """``path`` if it is a checkpoint, else the newest whole one in it or in the ``checkpoints`` of the run's folder that it is.

    Raises CheckpointError where there is none.
    """
    found = path if (path / _STATE).is_file() else latest_checkpoint(path) or latest_checkpoint(path / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{path} holds no whole checkpoint: name a run's folder or its checkpoints/step-N, written with output.checkpoint_every"
        )
    return found


def load_checkpoint(checkpoint: Path, learner: Learner) -> int:
    """Restore masters, moments, reference and counters, exactly, into a learner whose policy was loaded from the checkpoint's
    ``MODEL`` folder. Returns the number of steps that are done.

    Raises CheckpointError when files are missing, damaged, or belong to another model.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
        step, updates = int(state["step"]), int(state["updates"])
        learner.optimizer.load_state(load_file(checkpoint / _OPTIMIZER))
        if learner.moving_reference is not None:
            learner.moving_reference.load_state(load_file(checkpoint / _REFERENCE))
        if learner.critic is not None:
            learner.critic.load_state(load_file(checkpoint / _CRITIC))
        if learner.kl_control is not None and state.get("kl_control"):
            learner.kl_control = AdaptiveKL.from_state_dict(state["kl_control"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint} cannot be read ({error}): it is damaged or belongs to another model; use an earlier one"
        ) from error
    learner.updates = updates
    return step


def _own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _complete(folder: Path) -> list[Path]:
    return [p for p in folder.glob("step-*") if (p / _STATE).is_file() and p.name.removeprefix("step-").isdigit()]


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
