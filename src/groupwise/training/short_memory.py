"""Memory that is short: said before the run where it can be foreseen, and in one sentence where it ran out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import clear_frames

import psutil
import torch

from groupwise.config.schema import Config
from groupwise.distributed.open import world_size
from groupwise.distributed.sharding import chosen_sharding
from groupwise.errors import ModelError, TrainingError
from groupwise.memory import available_memory_bytes, is_shortage, reclaim_memory
from groupwise.models.devices import with_dtype
from groupwise.models.load import resolve_device
from groupwise.models.saving import free_disk_bytes
from groupwise.planner import Setup, peak_phase, phases
from groupwise.planner.memory import Item, beside_state, disk_bytes, evaluation, gathered_bytes, host_bytes, passes
from groupwise.planner.shape import find_shape
from groupwise.planner.state import state
from groupwise.tracking import RunFolder
from groupwise.training.checkpoint_folder import latest_checkpoint
from groupwise.training.microbatches import LESS_MEMORY

__all__ = [
    "SHORT_OF_MEMORY", "SHORT_WHILE_JUDGING", "Shortage", "checkpoint_note", "disk_note", "explain_short_memory",
    "less_memory", "memory_shortage", "planned", "rows_that_fit", "short_of_memory", "tokens_that_fit",
]  # fmt: skip

_GIB = 2**30


def less_memory(setup: Setup | None) -> str:
    """Settings that are not on, and by which the run would take less memory; empty where there are none."""
    if setup is None:
        return LESS_MEMORY
    config, precision = setup.config, setup.config.optimizer.precision
    movable = setup.device == "cuda" and not setup.adapted and setup.sharding == "none"
    with_masters = movable and not setup.offloaded and precision.startswith("masters")
    helps = {
        "model.gradient_checkpointing=true": not config.model.gradient_checkpointing,
        "training.offload_reference=true": movable and setup.has_reference and not setup.parked,
        "optimizer.offload=true": with_masters,
        "optimizer.precision=masters-8bit": with_masters and precision == "masters" and not setup.in_fp32,
        "model.lora": not setup.adapted,
    }
    *others, last = [name for name, yes in helps.items() if yes] or [""]
    return f"{', '.join(others)} or {last}" if others else last


def short_of_memory(setup: Setup | None) -> str:
    """What to set where a run's memory is short."""
    settings = less_memory(setup)
    return (
        "lower training.micro_batch_tokens or rollout.max_concurrent_sequences"
        f"{f', set {settings}' if settings else ''}; `groupwise plan` says what takes how much"
    )


SHORT_OF_MEMORY = short_of_memory(None)
SHORT_WHILE_JUDGING = "lower rollout.max_concurrent_sequences or evaluation.max_completion_tokens, or set model.quantization"
_CONTEXT = 400 * 2**20
"""Of what a plan allows for a process on a GPU, the driver's context, which is there once one asks how much is free."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a run needs of a device or machine by its plan, and what is free there, in bytes."""

    needed: int
    free: int
    sentence: str
    remedy: str = SHORT_OF_MEMORY


def memory_shortage(
    config: Config, device: torch.device, prompt_tokens: int = 0, processes: int | None = None
) -> Shortage | None:
    """Where the planner's estimate is more than there is now; None where it fits, or nothing is known about the model.

    Args:
        prompt_tokens: the longest prompt; 0 takes a typical one.
        processes: how many the run would have, where they have not been started; by itself as many as the launcher started. Those
            of this machine share its memory, with GPUs for what lies outside them.
    """
    size = processes or world_size()
    setup = planned(config, device, prompt_tokens, size)
    if setup is None:
        return None
    if device.type == "cuda":
        reclaim_memory()  # what an earlier run of this process has freed, and PyTorch keeps, is not free to the driver
    peak, free = peak_phase(phases(setup)), available_memory_bytes()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", setup.processes_here if device.type == "cuda" else size))
    together = f", in {here} processes" if here > 1 else ""
    if device.type == "cuda":
        if (outside := here * host_bytes(setup)) > free:
            return Shortage(
                outside,
                free,
                f"this run will need about {outside / _GIB:.1f} GiB of the machine's own memory{together} for what lies outside "
                f"the GPU, and {free / _GIB:.1f} GiB are free there",
                "leave out optimizer.offload or training.offload_reference, train an adapter (model.lora), or take a machine "
                "with more",
            )
        needed, there, together = peak.bytes - _CONTEXT, torch.cuda.mem_get_info(device)[0], ""
    else:
        needed, there = here * (peak.bytes - psutil.Process().memory_info().rss), free
    if needed <= there:
        return None
    return Shortage(
        needed,
        there,
        f"this run will need about {needed / _GIB:.1f} GiB of memory{together} ({peak.name}: most for {peak.cause.name}), and "
        f"{there / _GIB:.1f} GiB are free",
        short_of_memory(setup),
    )


def planned(config: Config, device: torch.device, prompt_tokens: int = 0, processes: int | None = None) -> Setup | None:
    """The run as the planner sees it; None where nothing is known about the model. Arguments as for ``memory_shortage``."""
    size = processes or world_size()
    try:
        shape = find_shape(config.model)
    except ModelError:
        return None
    model = with_dtype(config.model.model_copy(update={"device": device.type}))
    config = config.model_copy(update={"model": model})
    there = device.type == "cuda" and torch.cuda.is_available()
    whole = torch.cuda.mem_get_info(device)[1] if there else 0  # of which vLLM takes its share
    return Setup(config, shape, "cuda" if device.type == "cuda" else "cpu", size, prompt_tokens, device_bytes=whole).changed(
        training__sharding=chosen_sharding(config.training.sharding, size)
    )


def rows_that_fit(
    setup: Setup | None, rows: int, items: Callable[[Setup, int], list[Item]] = evaluation, free: int | None = None
) -> int:
    """How many sequences may be sampled at once on a CPU, at most ``rows``: halved until they fit.

    ``items``: what the planner gives so many of them beside the run's state, in an evaluation or in a step. ``free``: see ``_free``.
    """
    if setup is None or setup.device != "cpu" or not setup.by_builtin:
        return rows
    free = _free(setup) if free is None else free
    while rows > 1 and beside_state(setup, items(setup, rows)) > free:
        rows //= 2
    return rows


def tokens_that_fit(setup: Setup | None, tokens: int, completion: int, free: int | None = None) -> int:
    """The most tokens of a pass on a CPU, at most ``tokens``: halved until the passes fit, or each has one completion.

    ``completion``: the longest there is, in tokens. ``free``: see ``_free``.
    """
    if setup is None or setup.device != "cpu":
        return tokens
    free = _free(setup) if free is None else free
    while _divisible(setup, tokens, completion) and beside_state(setup, passes(setup, tokens, completion)) > free:
        tokens //= 2
    return tokens


def _divisible(setup: Setup, tokens: int, completion: int) -> bool:
    made = setup.changed(training__micro_batch_tokens=tokens, rollout__max_completion_tokens=completion)
    return any(sum(count for _, count in batch.groups) > 1 for batch in made.micro_batches)


def _free(setup: Setup) -> int:
    """Bytes for what comes and goes at this moment: what is free, and what the process holds beyond the run's state, to use again."""
    kept = sum(item.bytes for item in state(setup))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", setup.world_size))  # they share what is free
    return available_memory_bytes() // here + max(0, psutil.Process().memory_info().rss - kept)


def disk_note(config: Config, folder: Path) -> str | None:
    """A sentence where the final model and the checkpoints that are kept are more than what is free on ``folder``'s disk.

    Raises TrainingError where the final model alone is, and ``folder`` holds none yet, as that of a run which is resumed to be judged;
    and where there is no room for one checkpoint beside it, and ``folder`` holds none yet.
    """
    folder, setup = folder.expanduser(), planned(config, resolve_device(config.model.device))
    if setup is None:
        return None
    checkpoint, model = disk_bytes(setup)
    output = config.output
    kept = min(_checkpoints(config), output.keep_checkpoints + 1 + output.keep_best)
    needed, free = model + kept * checkpoint, free_disk_bytes(folder)
    if needed <= free:
        return None
    remedy = "free space, name another disk with output.folder"
    if model > free and not RunFolder(folder).final_model.exists():
        smaller = ", or set output.adapter_only" if setup.adapted and not output.adapter_only else ""
        raise TrainingError(
            f"the final model will take {_size(model)}, and {_size(free)} are free at {folder}, so that the run would end "
            f"without it: {remedy}{smaller}"
        )
    begun = RunFolder(folder).final_model.exists() or latest_checkpoint(RunFolder(folder).checkpoints) is not None
    if kept and model + checkpoint > free and not begun:
        raise TrainingError(
            f"a checkpoint will take {_size(checkpoint)} beside the final model of {_size(model)}, and {_size(free)} are free at "
            f"{folder}, so that the run could not be resumed: {remedy}, or go without by output.checkpoint_every=0"
        )
    return (
        f"this run will write about {_size(needed)} (the final model {_size(model)}, and {kept} checkpoints of "
        f"{_size(checkpoint)}), and {_size(free)} are free at {folder}: {remedy}"
        + (", or lower output.keep_checkpoints" if kept > 1 else "")
    )


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.1f} MiB"


def _checkpoints(config: Config) -> int:
    """How many a run writes that nobody stops, the one after a warm start included."""
    every = config.output.checkpoint_every
    return config.training.steps // every + (config.warm_start.steps > 0) if every else 0


def checkpoint_note(config: Config, device: torch.device, processes: int | None = None) -> str | None:
    """A sentence where divided weights are on GPUs, and this machine, the first process's, has no memory to bring them together for a
    checkpoint, or beneath an adapter for the final model and vLLM. On CPUs that is one of the phases that ``memory_shortage`` goes
    by. Arguments as there."""
    setup = planned(config, device, processes=processes)
    if setup is None or setup.device == "cpu" or not (setup.adapted or _checkpoints(config)):
        return None
    needed, free = gathered_bytes(setup), available_memory_bytes()
    if needed <= free:
        return None
    what, remedy = "a checkpoint", "train an adapter (model.lora), or write none by output.checkpoint_every=0"
    if setup.adapted:
        what, remedy = "the final model", "or set output.adapter_only"
        if setup.by_vllm:  # which is sent the base, whatever is saved
            alone = "" if config.output.adapter_only else " and set output.adapter_only"
            what, remedy = "vLLM and the final model", f"or sample with rollout.engine=auto{alone}"
    return (
        f"for {what} the first process will bring {needed / _GIB:.1f} GiB together in the machine's own memory, and "
        f"{free / _GIB:.1f} GiB are free there: take a machine with more, {remedy}"
    )


@contextmanager
def explain_short_memory(saved: Callable[[], str] = str, remedy: str = SHORT_OF_MEMORY) -> Iterator[None]:
    """Turn a failed allocation in here into a TrainingError.

    ``saved``: what to say about checkpoints, if anything. ``remedy``: where the error brings none of its own. The kernel may also end
    the process without a word (SIGKILL, exit code 137): then ``--resume`` is all there is.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_shortage(error):
            raise
        remedy = next(iter(getattr(error, "__notes__", ())), remedy)  # where it was raised, more was known
        clear_frames(error.__traceback__)  # what the failed call held, so that there is memory to look for checkpoints
        try:
            left = saved()
        except (MemoryError, OSError):
            left = ""
        about = "; ".join(part for part in (remedy, left) if part)
        raise TrainingError(f"memory ran out ({_first_line(error)}): {about}") from error


def _first_line(error: BaseException) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 160 else line[:157] + "..."
