"""Checkpoints in the places where transformers' trainer has them: ``output_dir/checkpoint-N`` is a model folder with the state of
learning beside the weights. Safetensors and JSON; nothing is pickled."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.trainer_callback import TrainerState

from groupwise.errors import CheckpointError
from groupwise.models.adapters import is_adapted, load_adapter
from groupwise.models.load import Policy, save_model
from groupwise.models.saving import sync
from groupwise.training.checkpoint import (
    damage,
    put_back,
    put_in_place,
    read_state,
    restore_state,
    seal,
    take_snapshot,
    write_state,
)
from groupwise.training.learner import Learner
from groupwise.trl.steps import EntropyControl

__all__ = ["find", "renew_state", "restore", "save", "save_policy"]

_ENTROPY, _OPTIMIZER, _SCHEDULER, _STATE = (
    "entropy_ctrl_state.json",
    "optimizer.safetensors",
    "scheduler.json",
    "trainer_state.json",
)
logger = logging.getLogger("groupwise")


def save_policy(policy: Policy, folder: Path) -> None:
    """A model folder; of a model with an adapter the adapter alone, as peft writes it, with the tokenizer."""
    if not is_adapted(policy.model):
        save_model(policy, folder)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = policy.model
        model.save_pretrained(folder, selected_adapters=[model.active_adapter])
        policy.tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written ({error}): free space or make it writable") from error


def save(
    output: Path,
    policy: Policy,
    learner: Learner,
    scheduler: Any,
    state: TrainerState,
    *,
    only_model: bool,
    limit: int | None,
    entropy: EntropyControl,
) -> None:
    """For all processes at once: write ``checkpoint-N`` aside, rename it when it is whole and on the disk, and remove the oldest beyond
    ``limit``. One of this step, of an earlier run, goes when the new one is in its place.

    Raises CheckpointError where the disk does not take it; the checkpoints before it are untouched.
    """
    learner.sharding.check()
    snapshot = take_snapshot(state.global_step, policy, learner)

    def write(aside: Path) -> None:
        save_policy(snapshot.policy, aside)
        if not only_model:
            write_state(aside, snapshot)
            (aside / _SCHEDULER).write_text(json.dumps(_plain(scheduler.state_dict())))
            (aside / _ENTROPY).write_text(json.dumps(entropy.state_dict()))
        state.save_to_json(str(aside / _STATE))
        seal(aside, _STATE)  # it is replaced at the end of a run, as a whole

    target = output / f"checkpoint-{state.global_step}"
    learner.world.on_rank0(lambda: put_in_place(target, write, snapshot.size_bytes()))
    # By time, since an earlier run may have come further.
    others = sorted((c for c in _all(output) if c != target), key=lambda c: (c / _STATE).stat().st_mtime_ns)
    for old in others[: 1 - limit or None] if limit and learner.world.is_first else []:
        shutil.rmtree(old, ignore_errors=True)


def renew_state(output: Path, state: TrainerState) -> None:
    """Put what was logged since into the checkpoint of this step."""
    target, aside = (output / f"checkpoint-{state.global_step}" / name for name in (_STATE, f".{_STATE}.partial"))
    try:
        state.save_to_json(str(aside))
        sync(aside)
        aside.replace(target)
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error}): free space or make it writable") from error


def find(output: Path, wanted: str | bool | None) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` means: none, the newest whole one in ``output``, or the one named.

    Raises CheckpointError where there is none, or the one named is damaged.
    """
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        found = _all(output)
        if not found:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but there is no checkpoint in {output}: leave it out to start again"
            )
        for checkpoint in reversed(found):
            found_damage = _damage(checkpoint)
            if found_damage is None:
                return checkpoint
            logger.warning("%s is damaged (%s): the one before it is taken", checkpoint, found_damage)
        raise CheckpointError(f"every checkpoint in {output} is damaged: start again, with another output_dir")
    if not (Path(wanted) / _STATE).is_file():
        raise CheckpointError(f"{wanted} is no checkpoint of groupwise.trl: name a folder checkpoint-N in output_dir")
    if (found_damage := _damage(Path(wanted))) is not None:
        raise CheckpointError(f"the checkpoint {wanted} is damaged ({found_damage}): use another")
    return Path(wanted)


def restore(
    checkpoint: Path, policy: Policy, learner: Learner, scheduler: Any, entropy: EntropyControl, local_first: bool
) -> TrainerState:
    """Weights, optimiser, schedule and reference as they were; returns the trainer's state."""
    if not (checkpoint / _OPTIMIZER).is_file():
        by_another = any(
            (checkpoint / name).exists() for name in ("optimizer.pt", "optimizer.bin", "scheduler.pt", "global_step0")
        )
        raise CheckpointError(
            f"{checkpoint} was written by TRL, whose pickled optimiser is not read here: pass the folder as model= and start from it"
            if by_another
            else f"{checkpoint} has no {_OPTIMIZER}: it was saved with save_only_model, so pass the folder as model= and start from it"
        )
    try:
        if is_adapted(policy.model):
            load_adapter(policy.model, checkpoint)
        elif not learner.sharding.divides_weights:  # else it was read from here before it was divided
            _load_weights(policy.model, checkpoint)
        state = TrainerState.load_from_json(str(checkpoint / _STATE))
        first_version = {"step": state.global_step, "updates": state.global_step}  # which wrote no state.json
        restore_state(checkpoint, learner, read_state(checkpoint) if (checkpoint / "state.json").is_file() else first_version)
        if (checkpoint / _ENTROPY).is_file():
            entropy.load_state_dict(json.loads((checkpoint / _ENTROPY).read_text()))
        scheduler.load_state_dict(json.loads((checkpoint / _SCHEDULER).read_text()))
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint} cannot be resumed ({error}): it is damaged or of another model; use another"
        ) from error
    state.is_local_process_zero, state.is_world_process_zero = local_first, learner.world.is_first
    return state


def _load_weights(model: Any, checkpoint: Path) -> None:
    """Into the tensors that are there: learner and sampler hold the same memory."""
    saved: dict[str, Any] = {}
    for file in sorted(checkpoint.glob("model*.safetensors")):
        saved |= load_file(file)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(saved[name])


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """What of a scheduler's state JSON can hold: all of it, but for functions, which the config makes again."""
    return {k: v for k, v in state.items() if k != "lr_lambdas"} | (
        {"lr_lambdas": [None] * len(state["lr_lambdas"])} if "lr_lambdas" in state else {}
    )


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with its files; None where nothing is, or it has no manifest. Others may lie beside them."""
    return damage(checkpoint, others=True) if (checkpoint / "manifest.json").is_file() else None


def _all(output: Path) -> list[Path]:
    for earlier in output.glob(".checkpoint-*.earlier.partial"):
        put_back(earlier.with_name(earlier.name.removeprefix(".").removesuffix(".earlier.partial")))
    found = [p for p in output.glob("checkpoint-*") if (p / _STATE).is_file() and p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")))
