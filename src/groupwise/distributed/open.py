"""Joining the world that a launcher started: ``accelerate launch``, ``torchrun``, Slurm, or ``--num-processes``.

All of them say it in the environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Accelerate's ``PartialState`` reads
it, chooses the backend and this process's device, and makes the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import operator
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from groupwise.distributed.failures import Board, Seal
from groupwise.distributed.launch import LAUNCHER, SECRET, on_this_machine
from groupwise.distributed.secret import handed_out, received, refuse_without_secret
from groupwise.distributed.world import World
from groupwise.errors import ConfigError, GroupwiseError

if TYPE_CHECKING:
    import torch

__all__ = ["is_first_process", "join_world", "open_world", "together", "told_once", "world_size"]


def world_size() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process is the one that shows and writes; also before there is a world."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def told_once() -> Iterator[None]:
    """Around what fails alike in all processes of ``--num-processes``, before they have a world: the first one tells it."""
    try:
        yield
    except GroupwiseError as error:
        error.told = LAUNCHER in os.environ and not is_first_process()
        raise


@contextmanager
def open_world(on_cpu: bool, timeout_s: float) -> Iterator[World]:
    """The world of this process while it lasts; a world of one without a launcher, or inside another one.

    ``timeout_s``: how long a process waits for another before it gives up.
    """
    world = join_world(on_cpu, timeout_s)
    with together(world):
        yield world


def join_world(on_cpu: bool, timeout_s: float) -> World:
    """The same, for what lasts as long as the process: what its processes do together then stands in ``together``."""
    _refuse_half_a_launch()
    if world_size() == 1:
        return World()
    if _joined is None:
        refuse_without_secret()
        with told_once():
            _check(on_cpu)
        _join(on_cpu, timeout_s)
    return _next_world(timeout_s)


@contextmanager
def together(world: World) -> Iterator[None]:
    """Around what all processes of ``world`` do: when one fails, all end with its error, and nobody leaves before all are done."""
    if world.size == 1:
        yield
        return
    if _joined is not None:
        _joined.done = False
    with world.watching():
        yield
        world.all_gather_object(None)
    if _joined is not None:
        _joined.done = True


@dataclass
class _Joined:
    """The process group of this process. It is made once: runs that follow each other share it, each with a control group of its own."""

    rank: int
    size: int
    device: torch.device
    secret: str
    runs: int = 0
    done: bool = False
    """Whether its last run came to its end, so that no other process waits for this one."""


_joined: _Joined | None = None


def _join(on_cpu: bool, timeout_s: float) -> None:
    global _joined
    import torch.distributed as dist
    from accelerate import PartialState

    if dist.is_initialized():
        raise ConfigError(
            "this process is part of a process group already: let groupwise make it, or destroy the other one first"
        )
    # Under FSDP's configuration it makes transformers load random weights in all processes but the first, for the trainer to fill.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")
        secret, store = _meet(timeout_s)
        own: dict[str, Any] = {"store": store, "rank": int(os.environ["RANK"]), "world_size": world_size()}
        # Where this says so Accelerate has DeepSpeed make the process group, which takes no store.
        deepspeed = os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        try:
            state = PartialState(cpu=on_cpu, timeout=timedelta(seconds=timeout_s), **({} if store is None else own))
        except NotImplementedError as error:
            raise ConfigError(
                "cards of the RTX 40 series with a driver older than 550 cannot talk to each other as NCCL would have them: "
                "export NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 before the processes are started, or install a newer driver"
            ) from error
        finally:
            if deepspeed is not None:
                os.environ["ACCELERATE_USE_DEEPSPEED"] = deepspeed
    _joined = _Joined(state.process_index, state.num_processes, state.device, secret)
    atexit.register(_leave)


def _meet(timeout_s: float) -> tuple[str, Any]:
    """This run's secret, and a store that listens to this machine alone; None in place of the store where the user set the secret.

    Torch's own store listens to the network, whatever MASTER_ADDR is, and does what anybody there says.
    """
    import torch.distributed as dist

    def store(port: int, door: socket.socket | None = None) -> Any:
        """The first process's is made once all others are there."""
        handle = None if door is None else door.detach()
        return dist.TCPStore(
            "127.0.0.1", port, world_size(), door is not None, timedelta(seconds=timeout_s), master_listen_fd=handle
        )

    given, first = os.environ.get(SECRET, ""), is_first_process()
    if LAUNCHER in os.environ:
        port = int(os.environ["MASTER_PORT"])
        return given, store(port, _listening(port) if first else None)
    if given:
        return given, None
    os.environ.update(on_this_machine())
    if not first:
        secret, port = received(timeout_s)
        return secret, store(port)
    door = _listening(0)
    port = int(door.getsockname()[1])
    with handed_out(port) as secret:
        return secret, store(port, door)


def _listening(port: int) -> socket.socket:
    """A socket that this machine alone reaches; 0: at a free port."""
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.bind(("127.0.0.1", port))
    door.listen(128)
    return door


def _leave() -> None:
    """Take the process groups down before the interpreter: gloo's threads, where they outlive it, abort a process that was done.

    They end with the last reference to their group, and what is left of a run has some, in circles.
    """
    import torch.distributed as dist

    if _joined is not None and _joined.done and dist.is_initialized():
        dist.destroy_process_group()
        _forget_operations()
        gc.collect()


def _forget_operations() -> None:
    """Make torch forget operations on divided tensors, which hold their groups too. How that is done is its own affair, which changes
    with its version: what cannot be made to forget keeps a group, as it did before."""
    package = "torch.distributed.tensor"
    if package not in sys.modules:
        return
    for module, forget in (
        ("debug", "_clear_sharding_prop_cache"),
        ("_redistribute", "clear_redistribute_planner_cache"),
        ("_redistribute", "_gen_transform_infos.cache_clear"),
        ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    ):
        with contextlib.suppress(ImportError, AttributeError):
            operator.attrgetter(forget)(importlib.import_module(f"{package}.{module}"))()


def _next_world(timeout_s: float) -> World:
    import torch.distributed as dist

    assert _joined is not None
    _joined.runs += 1
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    store = dist.PrefixStore(f"groupwise/{_joined.runs}", dist.distributed_c10d._get_default_store())
    seal = Seal(_joined.secret, f"run {_joined.runs}")
    board = Board(store, _joined.rank, _joined.size, seal)
    return World(_joined.rank, _joined.size, control=control, board=board, device=_joined.device, seal=seal)


def _check(on_cpu: bool) -> None:
    if find_spec("accelerate") is None:
        raise ConfigError(
            f"{world_size()} processes were started, which needs the package accelerate: install it with "
            "`pip install groupwise[distributed]`"
        )
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not on_cpu and here > torch.cuda.device_count():
        raise ConfigError(
            f"{here} processes were started on this machine, which has {torch.cuda.device_count()} CUDA devices, and each needs one: "
            "start fewer, or let each see all of them (Slurm: srun --gpu-bind=none)"
        )


def _refuse_half_a_launch() -> None:
    """``accelerate launch --num_processes N`` without GPUs starts one process, and would train alone without a word."""
    if "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ and "RANK" not in os.environ:
        raise ConfigError(
            "accelerate launch was asked for several processes, but without GPUs it starts only one: add --multi_gpu (which, "
            "despite its name, also starts processes on CPUs), or use `groupwise train ... --num-processes N`"
        )
