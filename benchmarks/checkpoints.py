"""How long a step waits for a checkpoint of the embedded model: written here and now, and by a thread beside the run.

    python -m benchmarks.checkpoints [--repeats 5] [--folder DIR]

Weights in bf16, masters and both moments in fp32, as after a first update. ``beside`` is the time until the run goes on; ``together``
the time until the checkpoint is whole, with nothing else going on. The minimum of the repeats counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from groupwise.config.schema import ModelConfig, OptimizerConfig
from groupwise.memory import keep_freed_memory
from groupwise.models.load import load_policy
from groupwise.models.scorer import make_scorer
from groupwise.training.checkpoint import CheckpointWriter, take_snapshot
from groupwise.training.optimizer import MasterAdamW

__all__ = ["main", "measure"]


def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Seconds, and ``gib`` of the state."""
    policy = load_policy(ModelConfig(dtype="bfloat16", device="cpu"))
    optimizer = MasterAdamW(make_scorer(policy, ModelConfig()).named_parameters(), OptimizerConfig())
    for master in optimizer.masters:
        master.grad = torch.ones_like(master)
    optimizer.step(1e-6)
    learner: Any = SimpleNamespace(
        optimizer=optimizer, moving_reference=None, critic=None, kl_control=None, parts={}, updates=1, dropped_in_a_row=0,
        renewed_before=0,
    )  # fmt: skip
    writer = CheckpointWriter(folder, 1, False, in_background=True)
    here, beside, together = [], [], []
    for repeat in range(repeats + 1):
        snapshot = take_snapshot(2 * repeat, policy, learner)
        started = time.perf_counter()
        writer.write(snapshot)
        here.append(time.perf_counter() - started)
        snapshot = take_snapshot(2 * repeat + 1, policy, learner)
        started = time.perf_counter()
        writer.begin(snapshot)
        beside.append(time.perf_counter() - started)
        writer.finish()
        together.append(time.perf_counter() - started)
    size = snapshot.size_bytes() / 2**30
    return {"gib": size, "here_s": min(here[1:]), "beside_s": min(beside[1:]), "together_s": min(together[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk in question; a temporary folder by itself")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        print({name: round(value, 3) for name, value in measure(Path(place), chosen.repeats).items()})


if __name__ == "__main__":
    main()
