"""The checks of first light on two GPUs and more (see ``benchmarks.first_light --several``); in miniature by two processes on the CPU.

What several processes train is held against what one trains, in fp32, where rounding is far below what an update moves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from benchmarks.first_light_place import Found, Place, answer, judge, write_tiny_model
from groupwise.distributed.launch import held_port
from groupwise.planner.hardware import named_in

__all__ = ["adapter", "colocated", "fsdp2", "main", "nccl", "replicas", "vllm", "zero3"]

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
    folder.with_suffix(".log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        print(done.stdout, done.stderr)
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1])
    return folder


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def _texts(folder: Path) -> list[str]:
    lines = (folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(json.loads(line)["completion"] for line in lines)


def _as_one(place: Place, sharding: str, kind: str = "", **sections: dict[str, Any]) -> Found:
    if (refused := _alone(place)) is not None:
        return refused
    training = {"steps": 1, "sharding": sharding}
    one = _trained(place, f"one{kind}", 1, **sections)
    several = _trained(place, f"several{kind}-{sharding}", _processes(place), training=training, **sections)
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


def adapter(place: Place) -> Found:
    """An adapter on a base that FSDP2 divides; the final model is merged from the gathered base."""
    return _as_one(place, "fsdp2", "-adapted", model={"lora": {"rank": 4, "alpha": 8}})


def zero3(place: Place) -> Found:
    """Weights divided by DeepSpeed."""
    if find_spec("deepspeed") is None:
        return Found("not here", "deepspeed is not installed", "nothing is said about ZeRO")
    return _as_one(place, "zero3")


def vllm(place: Place, server: Sequence[str] | None = None) -> Found:
    """A server on the last GPU; the run on the first. ``server``: another command that serves MODEL at ``--port``.

    vLLM is taken from this Python, or from that of ``VLLM_PYTHON``.
    """
    if server is None and (refused := _no_vllm(place) or _alone(place)) is not None:
        return refused
    done = _by_server(place, server, torch.cuda.device_count() - 1, [])
    found = done.found()
    if found.verdict != "as expected" or not place.on_gpu:
        return found
    seen = f"{found.seen}; weights {'broadcast' if done.direct else 'sent as files'}, a push takes {min(done.pushes[1:]):.2f} s"
    slower = "" if done.direct else "NCCL does not reach the server's GPU: the run's log says why"
    return judge(seen, found.numbers, slower=slower or ("a push takes longer than 1 s" if min(done.pushes[1:]) > 1 else ""))


def colocated(place: Place, server: Sequence[str] | None = None) -> Found:
    """A server on the GPU that the run learns on: it reads the weights there, and gives its memory back meanwhile. One GPU is enough."""
    if server is None and (refused := _no_vllm(place)) is not None:
        return refused
    done = _by_server(place, server, 0, ["--gpu-memory-share", "0.3", "--sleep-mode"])
    found = done.found()
    if found.verdict != "as expected" or not place.on_gpu:
        return found
    numbers = {**found.numbers, "shared": done.shared, "in_place": done.shared and done.direct, "given_back": done.swing}
    seen = f"{found.seen}; weights {'read in place' if done.shared and done.direct else 'sent'}, {done.swing:.0%} of the card given back"
    slower = (
        "" if done.shared and done.direct else "CUDA IPC does not work here" if done.shared else "the two sides see another GPU"
    )
    slower = slower or ("vLLM keeps its memory while the policy learns" if done.swing < 0.15 else "")
    return judge(seen, numbers, slower=slower or ("a push takes longer than 1 s" if min(done.pushes[1:]) > 1 else ""))


def _no_vllm(place: Place) -> Found | None:
    if place.on_gpu and _vllm_python():
        return None
    return Found("not here", "there is no vLLM (VLLM_PYTHON names its Python), or no GPU", "nothing is said about vLLM")


def _vllm_python() -> str:
    return os.environ.get("VLLM_PYTHON") or (sys.executable if find_spec("vllm") else "")


@dataclass
class _Sampled:
    """What a run that a server sampled for came to."""

    gaps: list[float]
    pushes: list[float]
    seconds: float
    shared: bool
    """Whether server and run are on one GPU, as the program finds out itself."""
    direct: bool
    """Whether weights went from GPU to GPU, or were read where they are, and no files were sent."""
    swing: float
    """Share of the GPU that was in use at one moment and free at another."""

    def found(self) -> Found:
        numbers = {"mismatch": self.gaps, "push_s": self.pushes, "seconds": self.seconds}
        seen = f"{len(self.gaps)} steps in {self.seconds:.0f} s; mismatch {', '.join(f'{gap:.4f}' for gap in self.gaps)} nats"
        return judge(
            seen, numbers, wrong="" if max(self.gaps) < 0.02 else "vLLM samples by other weights or another distribution"
        )


def _by_server(place: Place, server: Sequence[str] | None, gpu: int, options: list[str]) -> _Sampled:
    model = place.folder / "tiny-model"
    if not model.exists():
        write_tiny_model(model, head_width=64)  # vLLM's kernels know no narrower heads
        (place.folder / "letters.py").write_text(_REWARD, encoding="utf-8")
    os.environ.setdefault("GROUPWISE_VLLM_SECRET", os.urandom(16).hex())
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu) if place.on_gpu else ""}
    with held_port() as port:
        url, program = f"http://127.0.0.1:{port}", server or [_vllm_python(), "-m", "groupwise.engines.vllm"]
        command = [*program, str(model), "--port", str(port), "--dtype", "float32", *options]  # the run's
        serving = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        try:
            shared = _wait_for(url, serving, place)
            started = time.perf_counter()
            rollout = {"engine": "vllm", "vllm": {"url": url, "patience_s": 30}, "prompts_per_step": 4, "completions_per_prompt": 4,
                       "max_completion_tokens": 12}  # fmt: skip
            with _MemoryWatch(place) as watch:
                folder = _trained(place, "by-vllm" + "-beside" * bool(options), 1, rollout=rollout, training={"steps": 3})
            seconds = time.perf_counter() - started
        finally:
            serving.terminate()
            try:
                serving.wait(20)
            except subprocess.TimeoutExpired:
                serving.kill()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    said = folder.with_suffix(".log").read_text(encoding="utf-8")
    return _Sampled(
        [row["policy/sampler_mismatch"] for row in rows], [row["time/push_s"] for row in rows], seconds, shared,
        not any(words in said for words in ("does not read the weights in place", "is sent the weights as files")), watch.swing,
    )  # fmt: skip


def _wait_for(url: str, serving: subprocess.Popen[bytes], place: Place) -> bool:
    """Until the server samples; whether it is on the run's GPU. A run looks for its server at once, and vLLM takes a minute to start."""
    from groupwise.engines.vllm.client import Client
    from groupwise.engines.vllm.protocol import Unreachable
    from groupwise.engines.vllm.pushing import shares_device

    while True:
        try:
            return shares_device(Client(url).hello(), torch.device("cuda", 0) if place.on_gpu else place.device)
        except Unreachable as error:
            if serving.poll() is not None:
                raise RuntimeError(f"the server ended with code {serving.returncode}: see the log") from error
            time.sleep(0.5)  # the check's own time limit ends this


class _MemoryWatch:
    """How much of the first GPU's memory comes and goes, whoever takes it."""

    def __init__(self, place: Place) -> None:
        self.on_gpu, self._free, self._over = place.on_gpu, list[float](), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def swing(self) -> float:
        return max(self._free) - min(self._free) if self._free else 0.0

    def _look(self) -> None:
        while not self._over.wait(0.05):
            free, total = torch.cuda.mem_get_info(0)
            self._free.append(free / total)

    def __enter__(self) -> _MemoryWatch:
        if self.on_gpu:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.on_gpu:
            self._thread.join()


def main(words: Sequence[str] | None = None) -> None:
    """``NAME DEVICE FOLDER``: make one check and write what it found."""
    name, device, folder = words or sys.argv[1:]
    if name == "--worker":
        _worker(device, folder)
        return
    answer(globals()[name], device, Path(folder), name)


if __name__ == "__main__":
    main()
