"""Checkpoints in the places where transformers' trainer has them: ``output_dir/checkpoint-N`` is a model folder with the state of
learning beside the weights. Safetensors and JSON; nothing is pickled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.trainer_callback import TrainerState

from groupwise.errors import CheckpointError
from groupwise.models.adapters import is_adapted, load_adapter
from groupwise.models.load import Policy, save_model
from groupwise.training.learner import Learner
from groupwise.trl.entropy import EntropyControl

__all__ = ["find", "renew_state", "restore", "save", "save_policy"]

_ENTROPY = "entropy_ctrl_state.json"
_OPTIMIZER, _REFERENCE, _SCHEDULER, _STATE = (
    "optimizer.safetensors",
    "reference.safetensors",
    "scheduler.json",
    "trainer_state.json",
)


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
    except OSError as error:
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
) -> Path:
    """Write ``checkpoint-N`` aside, rename it when it is whole, and remove the oldest beyond ``limit``."""
    target, aside = output / f"checkpoint-{state.global_step}", output / f".checkpoint-{state.global_step}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    save_policy(policy, aside)
    try:
        if not only_model:
            save_file({n: t.detach().contiguous() for n, t in learner.optimizer.state().items()}, aside / _OPTIMIZER)
            if learner.moving_reference is not None:
                reference = {n: t.detach().contiguous() for n, t in learner.moving_reference.state().items()}
                save_file(reference, aside / _REFERENCE)
            (aside / _SCHEDULER).write_text(json.dumps(_plain(scheduler.state_dict())))
            (aside / _ENTROPY).write_text(json.dumps(entropy.state_dict()))
        state.save_to_json(str(aside / _STATE))
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {target} cannot be written ({error}): free space or make it writable") from error
    # By time, since an earlier run may have come further.
    others = sorted((c for c in _all(output) if c != target), key=lambda c: (c / _STATE).stat().st_mtime_ns)
    for old in others[: 1 - limit or None] if limit else []:
        shutil.rmtree(old, ignore_errors=True)
    return target


def renew_state(output: Path, state: TrainerState) -> None:
    """Put what was logged since into the checkpoint of this step."""
    target, aside = (output / f"checkpoint-{state.global_step}" / name for name in (_STATE, f".{_STATE}.partial"))
    try:
        state.save_to_json(str(aside))
        aside.replace(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error}): free space or make it writable") from error


def find(output: Path, wanted: str | bool | None) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` means: none, the newest in ``output``, or the one named."""
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        found = _all(output)
        if not found:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but there is no checkpoint in {output}: leave it out to start anew"
            )
        return found[-1]
    if not (Path(wanted) / _STATE).is_file():
        raise CheckpointError(f"{wanted} is no checkpoint of groupwise.trl: name a folder checkpoint-N in output_dir")
    return Path(wanted)


def restore(checkpoint: Path, policy: Policy, learner: Learner, scheduler: Any, entropy: EntropyControl) -> TrainerState:
    """Weights, optimiser, schedule and reference as they were; returns the trainer's state."""
    try:
        if is_adapted(policy.model):
            load_adapter(policy.model, checkpoint)
        else:
            _load_weights(policy.model, checkpoint)
        learner.optimizer.load_state(load_file(checkpoint / _OPTIMIZER))
        if learner.moving_reference is not None:
            learner.moving_reference.load_state(load_file(checkpoint / _REFERENCE))
        if (checkpoint / _ENTROPY).is_file():
            entropy.load_state_dict(json.loads((checkpoint / _ENTROPY).read_text()))
        scheduler.load_state_dict(json.loads((checkpoint / _SCHEDULER).read_text()))
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        state = TrainerState.load_from_json(str(checkpoint / _STATE))
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint} cannot be resumed ({error}): it is damaged, of another model, or was saved with "
            "save_only_model; use another"
        ) from error
    learner.updates = state.global_step
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


def _all(output: Path) -> list[Path]:
    found = [p for p in output.glob("checkpoint-*") if (p / _STATE).is_file() and p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")))
