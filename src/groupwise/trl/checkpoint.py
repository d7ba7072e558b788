"""Checkpoints in the places where transformers' trainer has them: ``output_dir/checkpoint-N`` is a model folder with the state of
learning beside the weights. Safetensors and JSON; nothing is pickled."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerState

from groupwise.durable import put_back_all, sync
from groupwise.errors import CheckpointError
from groupwise.models.adapters import is_adapted, load_adapter
from groupwise.models.folder import holds_model
from groupwise.models.load import Policy, save_model
from groupwise.models.quiet import quiet
from groupwise.training.checkpoint import restore_state, take_snapshot, write_state
from groupwise.training.checkpoint_folder import damage, put_in_place, read_state, seal
from groupwise.training.learner import Learner

__all__ = ["ScheduleState", "find", "renew_state", "restore", "save", "save_policy"]

_OPTIMIZER, _STATE = "optimizer.safetensors", "trainer_state.json"
logger = logging.getLogger("groupwise")


class ScheduleState:
    """A learning-rate schedule as a part of the learner's state."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def checkpoint_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """No tensors; what JSON can hold: all but functions, which the config makes again."""
        state = self.scheduler.state_dict()
        return {}, state | ({"lr_lambdas": [None] * len(state["lr_lambdas"])} if "lr_lambdas" in state else {})

    def load_checkpoint_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore it, and the optimiser's rates with it."""
        self.scheduler.load_state_dict(_with_milestones(values))
        for group, rate in zip(self.scheduler.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def _with_milestones(values: dict[str, Any]) -> dict[str, Any]:
    """A schedule's state after JSON, whose keys are texts: ``MultiStepLR`` counts its milestones by whole numbers. So do the schedules
    that another is made of."""
    restored = dict(values)
    if isinstance(milestones := values.get("milestones"), dict):
        restored["milestones"] = Counter({int(step): times for step, times in milestones.items()})
    if "_schedulers" in values:
        restored["_schedulers"] = [_with_milestones(one) for one in values["_schedulers"]]
    return restored


def save_policy(policy: Policy, folder: Path) -> None:
    """A model folder; of a model with an adapter the adapter alone, as peft writes it, with the tokenizer: in a folder with a whole model
    in ``adapter/``, since transformers would put it on that model, whatever its base is."""
    if not is_adapted(policy.model):
        save_model(policy, folder)
        return
    if holds_model(folder):
        folder = folder / "adapter"
        logger.warning("%s holds a whole model: the adapter is written to %s", folder.parent, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = policy.model
        model.save_pretrained(folder, selected_adapters=[model.active_adapter])
        policy.tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written ({error}): free space or make it writable") from error


def save(output: Path, policy: Policy, learner: Learner, state: TrainerState, *, only_model: bool, limit: int | None) -> None:
    """Write ``checkpoint-N`` aside, rename it when it is whole and on the disk, and remove the oldest beyond ``limit``. A collective call.
    One of this step, of an earlier run, goes when the new one is in its place. The state says where the best one lies.

    Raises CheckpointError where the disk does not take it; the checkpoints before it are untouched.
    """
    learner.sharding.check()
    snapshot = take_snapshot(state.global_step, policy, learner)

    def write(aside: Path) -> None:
        save_policy(snapshot.policy, aside)
        if not only_model:
            write_state(aside, snapshot)
        state.save_to_json(str(aside / _STATE))
        seal(aside, _STATE)  # it is replaced at the end of a run, as a whole

    target = output / f"checkpoint-{state.global_step}"
    best = output / f"checkpoint-{state.best_global_step}"
    if state.best_global_step and (best == target or (best / _STATE).is_file()):
        state.best_model_checkpoint = str(best)

    def put() -> None:
        put_in_place(target, write, snapshot.size_bytes())
        _remove_oldest(output, target, state.best_model_checkpoint, limit)

    learner.world.on_rank0(put)


def _remove_oldest(output: Path, newest: Path, best: str | None, limit: int | None) -> None:
    """Leave ``limit`` checkpoints; the newest and the best stay, as in transformers, where below 1 is no limit."""
    if limit is None or limit < 1:
        return
    kept = {newest} | ({Path(best)} if best else set())
    found = _all(output)
    # By time, since an earlier run may have come further.
    others = sorted((c for c in found if c not in kept), key=lambda c: (c / _STATE).stat().st_mtime_ns)
    for old in others[: max(0, len(found) - max(limit, len(kept)))]:
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


def restore(checkpoint: Path, policy: Policy, learner: Learner, local_first: bool) -> TrainerState:
    """Weights, optimiser, reference and the learner's parts as they were; returns the trainer's state."""
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
        restore_state(checkpoint, learner, _state_of_learning(checkpoint, state.global_step))
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint} cannot be resumed ({error}): it is damaged or of another model; use another"
        ) from error
    state.is_local_process_zero, state.is_world_process_zero = local_first, learner.world.is_first
    return state


def _load_weights(model: PreTrainedModel, checkpoint: Path) -> None:
    """Copy the weights into the tensors that are there: learner and sampler hold the same memory.

    Some architectures have other names in files than in memory, and experts one by one: these transformers reads, on the CPU.
    """
    saved: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("model*.safetensors")):
        saved |= load_file(file)
    present = dict(model.named_parameters())
    if not present.keys() <= saved.keys():
        with quiet():
            loaded: Any = type(model).from_pretrained(checkpoint, dtype=model.dtype, output_loading_info=True)
        whole, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise KeyError(missing[0])
        saved = dict(whole.named_parameters())
    for name, parameter in present.items():
        parameter.data.copy_(saved[name])


def _state_of_learning(checkpoint: Path, step: int) -> dict[str, Any]:
    """``state.json``, or what version 0.1 wrote in its place."""
    if (checkpoint / "state.json").is_file():
        return read_state(checkpoint)
    files = {"schedule": "scheduler.json", "entropy": "entropy_ctrl_state.json"}
    parts = {name: json.loads((checkpoint / file).read_text()) for name, file in files.items()}
    return {"step": step, "updates": step, "parts": parts}


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with its files; None where nothing is, or it has no manifest. Others may lie beside them."""
    return damage(checkpoint, others=True) if (checkpoint / "manifest.json").is_file() else None


def _all(output: Path) -> list[Path]:
    put_back_all(output, "checkpoint-*")
    found = [p for p in output.glob("checkpoint-*") if (p / _STATE).is_file() and p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")))
