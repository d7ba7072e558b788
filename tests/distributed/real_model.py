"""SmolLM2-135M in one process and in two, whole and divided: the same completions, losses, gradients and weights?

    python -m tests.distributed.real_model [--lora] FOLDER [one ddp fsdp2 ...]

trains five steps each way into FOLDER (what is there already is taken as it is), and prints how far each is from one process, and what
memory its processes took at their peak. Takes about a minute for each way, and 3 GiB for each process. With --lora an adapter learns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from tests.tiny import lower_case_share, tiny_config, write_sums

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
WAYS = {
    "one": [sys.executable],
    "ddp": ["accelerate", "launch", "--config_file", str(ROOT / "launch/ddp-cpu.yaml")],
    "fsdp2": ["accelerate", "launch", "--config_file", str(ROOT / "launch/fsdp2-cpu.yaml")],
    "zero2": ["accelerate", "launch", "--config_file", str(ROOT / "launch/zero2-cpu.yaml")],
    "zero3": ["accelerate", "launch", "--config_file", str(ROOT / "launch/zero3-cpu.yaml")],
}
SECTIONS = {
    "model": {"name": "smollm2-135m-instruct", "dtype": "float32", "device": "cpu"},
    "training": {"steps": 5, "threads": 1},
    "rollout": {"prompts_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 12},
    "optimizer": {"learning_rate": 1e-6},
    "algorithm": {"kl": {"beta": 0.04}},
    "evaluation": {"problems": 2},
    "output": {"log_completions": 100},
}
ADAPTER = {"model": {**SECTIONS["model"], "lora": {"rank": 16, "alpha": 32}}, "optimizer": {"learning_rate": 1e-4}}


def run(config_file: Path, folder: Path) -> None:
    """One process of a way: trains, and leaves its first gradient in ``gradient-RANK.safetensors``."""
    from rich.console import Console

    from groupwise import load_config
    from groupwise.training.loop import train
    from groupwise.training.optimizer import MasterAdamW

    torch.set_num_threads(1)
    gradient_file, step = folder / f"gradient-{os.environ.get('RANK', '0')}.safetensors", MasterAdamW.step

    def noting(self: MasterAdamW, rate: float) -> tuple[float, bool]:
        if not gradient_file.exists():
            pairs = zip(self.names, self.gradients(), strict=True)
            save_file({name: gradient for name, gradient in pairs if gradient is not None}, gradient_file)
        return step(self, rate)

    MasterAdamW.step = noting  # type: ignore[method-assign]
    note_gradient_of_zero(folder / "gradient-0.safetensors")
    quiet = Console(quiet=True)
    train(load_config(config_file), rewards={"letters": lower_case_share}, run_folder=folder / "run", console=quiet)


def note_gradient_of_zero(file: Path) -> None:
    """DeepSpeed's first gradient, from the first moment that it left, which is a tenth of it, clipped."""
    from groupwise.training.sharding.zero import ZeroAdamW

    step = ZeroAdamW.step

    def noting(self: ZeroAdamW, rate: float) -> tuple[float, bool]:
        norm, made = step(self, rate)
        if self.engine.global_steps == 1:
            limit = self.config.max_grad_norm or norm
            factor = max(1.0, norm / limit) / (1 - self.config.betas[0])
            moments = {name: tensor for name, tensor in self.state().items() if name.startswith("exp_avg.")}
            if moments:
                save_file({name.removeprefix("exp_avg."): tensor * factor for name, tensor in moments.items()}, file)
        return norm, made

    ZeroAdamW.step = noting  # type: ignore[method-assign]


def go(way: str, folder: Path, lora: bool) -> None:
    """Train that way into ``folder/way``, unless it is there."""
    target = folder / way
    if (target / "run" / "summary.json").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    config = tiny_config(Path("unused"), write_sums(folder / "sums.jsonl"), **(SECTIONS | (ADAPTER if lora else {})))
    (target / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [*WAYS[way], "-m", "tests.distributed.real_model", "--run", str(target / "config.yaml"), str(target)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def largest_difference(one: list[Path], other: list[Path]) -> tuple[float, float]:
    """Of the tensors in files whose rows stand one after the other, and the largest number in the first."""
    worst = largest = 0.0
    first, second = ([safe_open(file, framework="pt") for file in files] for files in (one, other))
    for name in first[0].keys():  # noqa: SIM118  # it is no dict
        a, b = (torch.cat([file.get_tensor(name) for file in files]) for files in (first, second))
        worst, largest = max(worst, float((a - b).abs().max())), max(largest, float(a.abs().max()))
    return worst, largest


def compare(folder: Path, way: str, lora: bool) -> dict:
    one, other = folder / "one", folder / way
    said = [[[row[k] for k in ("problem", "sample", "completion", "tokens")] for row in rows(f / "run/completions.jsonl")]
            for f in (one, other)]  # fmt: skip
    metrics = [rows(f / "run/metrics.jsonl") for f in (one, other)]
    names = ("policy/loss", "policy/kl", "optimizer/grad_norm")
    off = {n: max(abs(a[n] - b[n]) for a, b in zip(*metrics, strict=True)) for n in names}
    gradients = sorted(other.glob("gradient-*.safetensors"))
    gradients = gradients[:1] if lora or way == "ddp" else gradients  # all have the whole of it
    weights = [[f / "run/final_model/model.safetensors"] for f in (one, other)]
    summary = json.loads((other / "run/summary.json").read_text(encoding="utf-8"))
    return {
        "way": way,
        "completions": f"{sum(a == b for a, b in zip(*said, strict=True))} of {len(said[0])} the same",
        "largest differences": {k: float(f"{v:.2g}") for k, v in off.items()},
        "first gradient (difference, largest)": largest_difference([one / "gradient-0.safetensors"], gradients),
        "final weights (difference, largest)": largest_difference(*weights),
        "peak of a process, GiB": summary["peak_memory_gib"],
    }


def main(arguments: list[str]) -> None:
    if arguments[0] == "--run":
        run(Path(arguments[1]), Path(arguments[2]))
        return
    lora = arguments[0] == "--lora"
    first, *ways = arguments[1:] if lora else arguments
    folder, ways = Path(first).absolute(), ways or list(WAYS)
    for way in ["one", *ways]:
        go(way, folder, lora)
    for way in ways:
        print(json.dumps(compare(folder, way, lora), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
