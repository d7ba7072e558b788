"""The checks of first light on two GPUs and more (see ``benchmarks.first_light --several``); in miniature by two processes on the CPU.

What several processes train is held against what one trains, in fp32, where rounding is far below what an update moves.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from benchmarks.first_light_place import Found, Place, answer, judge, write_tiny_model
from groupwise.planner.hardware import named_in

__all__ = ["fsdp2", "main", "nccl", "replicas", "vllm", "zero3"]

_REWARD = """
def letters(completions, **columns):
    return [sum(map(ord, str(completion))) % 97 / 97 for completion in completions]
"""
_BOUND = 1e-2


def _processes(place: Place) -> int:
    return torch.cuda.device_count() if place.on_gpu else 2


def _alone(place: Place) -> Found | None:
    if place.on_gpu and torch.cuda.device_count() < 2:
        return Found("not here", f"there are {torch.cuda.device_count()} GPUs", "it takes two")
    return None


# What a process of `nccl` does.


def _worker(device: str, out: str) -> None:
    """Sum a tensor over all processes, and write whether the sum is right and what it took."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    numbers = torch.full((2**28 if where.type == "cuda" else 2**16,), float(rank + 1), device=where)
    dist.all_reduce(numbers)
    right = bool((numbers == size * (size + 1) / 2).all())
    taken = []
    for _ in range(5):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(numbers)
        float(numbers[0])
        taken.append(time.perf_counter() - started)
    if rank == 0:
        Path(out).write_text(json.dumps({"right": right, "seconds": min(taken), "bytes": numbers.nbytes}), encoding="utf-8")
    dist.destroy_process_group()


def nccl(place: Place) -> Found:
    """An all-reduce over all GPUs: the sum, and bytes over each link, 2 (n - 1) / n of the tensor."""
    if (refused := _alone(place)) is not None:
        return refused
    from groupwise.distributed.launch import launch

    count, out = _processes(place), place.folder / "nccl.json"
    code = launch([sys.executable, "-m", __name__ if __name__ != "__main__" else "benchmarks.first_light_several",
                   "--worker", place.device.type, str(out)], count)  # fmt: skip
    if code:
        return Found(
            "wrong", f"a process ended with code {code}", "processes do not reach each other: see the log", {"code": code}
        )
    found = json.loads(out.read_text(encoding="utf-8"))
    rate = 2 * (count - 1) / count * found["bytes"] / found["seconds"]
    card = named_in(torch.cuda.get_device_name()) if place.on_gpu else None
    numbers = {**found, "processes": count, "gb_per_s": rate / 1e9, "gb_per_s_by_table": card and card.link_bytes_per_s / 1e9}
    seen = f"{count} processes, the sum is {'right' if found['right'] else 'wrong'}, {rate / 1e9:,.1f} GB/s over each link"
    slow = place.judged and card is not None and rate < 0.4 * card.link_bytes_per_s
    return judge(
        seen, numbers, wrong="" if found["right"] else "sums over processes are wrong",
        slower="the link is not the one of the table, or NCCL goes through the host" if slow else "",
    )  # fmt: skip


def _trained(place: Place, name: str, processes: int, **sections: dict[str, Any]) -> Path:
    """Train the tiny model by the command, in so many processes; the run's folder."""
    model, reward = place.folder / "tiny-model", place.folder / "letters.py"
    if not model.exists():
        write_tiny_model(model)
        reward.write_text(_REWARD, encoding="utf-8")
    folder, recipe = place.folder / name, place.folder / f"{name}.yaml"
    base: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "dtype": "float32", "device": "cuda" if place.on_gpu else "cpu"},
        "data": {"source": "arithmetic", "holdout": 4},
        "rewards": {"functions": [{"function": f"{reward}:letters"}]},
        "rollout": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_completion_tokens": 12},
        "algorithm": {"kl": None},
        "optimizer": {"learning_rate": 1e-3, "epsilon": 1e-3},
        "training": {"steps": 1},
        "evaluation": {"problems": 2, "at_start": False},
        "output": {"folder": str(folder), "checkpoint_every": 0, "log_completions": 99},
    }
    written = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    recipe.write_text(yaml.safe_dump(written), encoding="utf-8")
    words = [sys.executable, "-m", "groupwise", "train", str(recipe), "--num-processes", str(processes)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        print(done.stdout, done.stderr)
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1])
    return folder


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def _texts(folder: Path) -> list[str]:
    lines = (folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(json.loads(line)["completion"] for line in lines)


def _as_one(place: Place, sharding: str) -> Found:
    if (refused := _alone(place)) is not None:
        return refused
    one = _trained(place, "one", 1)
    several = _trained(place, f"several-{sharding}", _processes(place), training={"steps": 1, "sharding": sharding})
    start, expected, found = (_weights(f) for f in (place.folder / "tiny-model", one / "final_model", several / "final_model"))
    moved = sum(float((expected[key] - start[key]).square().sum()) for key in expected) ** 0.5
    apart = sum(float((found[key] - expected[key]).square().sum()) for key in expected) ** 0.5
    same = _texts(one) == _texts(several)
    numbers = {"processes": _processes(place), "moved": moved, "apart": apart, "same_completions": same}
    seen = f"weights moved by {moved:.2e} and are {apart:.1e} apart; completions {'are the same' if same else 'differ'}"
    wrong = "several processes make another update than one" if not (moved and apart <= _BOUND * moved and same) else ""
    return judge(seen, numbers, wrong=wrong)


def replicas(place: Place) -> Found:
    """Whole weights in every process, gradients summed."""
    return _as_one(place, "none")


def fsdp2(place: Place) -> Found:
    """Weights divided by FSDP2."""
    return _as_one(place, "fsdp2")


def zero3(place: Place) -> Found:
    """Weights divided by DeepSpeed."""
    if find_spec("deepspeed") is None:
        return Found("not here", "deepspeed is not installed", "nothing is said about ZeRO")
    return _as_one(place, "zero3")


def vllm(place: Place, server: Sequence[str] | None = None) -> Found:
    """A server on the last GPU; the run on the first. ``server``: another command that serves MODEL at ``--port``.

    vLLM is taken from this Python, or from that of ``VLLM_PYTHON``.
    """
    python = os.environ.get("VLLM_PYTHON") or (sys.executable if find_spec("vllm") else "")
    if server is None and not (place.on_gpu and python):
        return Found("not here", "there is no vLLM (VLLM_PYTHON names its Python), or no GPU", "nothing is said about vLLM")
    if server is None and (refused := _alone(place)) is not None:
        return refused
    model = place.folder / "tiny-model"
    if not model.exists():
        write_tiny_model(model, head_width=64)  # vLLM's kernels know no narrower heads
        (place.folder / "letters.py").write_text(_REWARD, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    last = str(torch.cuda.device_count() - 1) if place.on_gpu else ""
    command = [*(server or [python, "-m", "groupwise.engines.vllm"]), str(model), "--port", str(port)]
    environment = {**os.environ, "GROUPWISE_VLLM_SECRET": os.environ.get("GROUPWISE_VLLM_SECRET", os.urandom(16).hex())}
    os.environ["GROUPWISE_VLLM_SECRET"] = environment["GROUPWISE_VLLM_SECRET"]
    serving = subprocess.Popen(command, env={**environment, "CUDA_VISIBLE_DEVICES": last}, stdin=subprocess.DEVNULL)
    try:
        started = time.perf_counter()
        rollout = {"engine": "vllm", "vllm": {"url": f"http://127.0.0.1:{port}", "patience_s": 150}}
        folder = _trained(place, "by-vllm", 1, rollout={**rollout, "prompts_per_step": 4, "completions_per_prompt": 4,
                          "max_completion_tokens": 12}, training={"steps": 3})  # fmt: skip
        seconds = time.perf_counter() - started
    finally:
        serving.terminate()
        try:
            serving.wait(20)
        except subprocess.TimeoutExpired:
            serving.kill()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    gaps = [row["policy/sampler_mismatch"] for row in rows]
    pushes = [row.get("time/push_s") for row in rows]
    numbers = {"mismatch": gaps, "push_s": pushes, "seconds": seconds}
    seen = f"{len(rows)} steps in {seconds:.0f} s with the start; mismatch {', '.join(f'{gap:.4f}' for gap in gaps)} nats"
    wrong = "vLLM samples by other weights or another distribution" if not max(gaps) < 0.02 else ""
    return judge(seen, numbers, wrong=wrong)


def main(words: Sequence[str] | None = None) -> None:
    """``NAME DEVICE FOLDER``: make one check and write what it found."""
    name, device, folder = words or sys.argv[1:]
    if name == "--worker":
        _worker(device, folder)
        return
    answer(globals()[name], device, Path(folder), name)


if __name__ == "__main__":
    main()
