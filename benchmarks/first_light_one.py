"""The checks of first light on one GPU (see ``benchmarks.first_light``), and in miniature on the CPU.

Each is a function of a ``Place`` and returns what it found. Where the miniature cannot show something, such as a speed, it says so.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from benchmarks.first_light_place import Found, Place, answer, judge, write_tiny_model
from benchmarks.flops import learning_flops
from benchmarks.shapes import SHAPES, random_groups, random_policy, random_prompts
from groupwise.config.schema import Config
from groupwise.engines import SamplingSettings, make_engine
from groupwise.engines.builtin import engine as builtin
from groupwise.engines.builtin import runner as running
from groupwise.engines.builtin.decode import decoding_kernels_fit
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.builtin.fast_paths import check_fast_paths
from groupwise.engines.builtin.runner import Runner
from groupwise.engines.wrappers import SamplingThread
from groupwise.memory import peak_memory_bytes, reset_peak_memory
from groupwise.models import attention
from groupwise.models.decoder import Decoder
from groupwise.models.packing import pack
from groupwise.models.scorer import make_scorer
from groupwise.planner import Setup, find_shape, phases
from groupwise.planner.cost import DECODE_LAUNCHES, DECODE_OPERATIONS, decode_step_s
from groupwise.planner.hardware import HARDWARE
from groupwise.training.learner import Learner
from groupwise.training.loop import train
from groupwise.types import Completion, Prompt

__all__ = ["main"]


# What checks have in common.


def _config(**sections: Any) -> Config:
    return Config.model_validate({"algorithm": {"kl": None}, **sections})


def _engine(place: Place, shape: str, dtype: torch.dtype, rows: int, mean_tokens: int | None) -> BuiltinEngine:
    """Over random weights; by chance a row ends with one token in ``mean_tokens``, or never."""
    policy = random_policy(SHAPES[shape], str(place.device), dtype)
    ends = () if mean_tokens is None else tuple(range(1, SHAPES[shape].vocab_size, mean_tokens))
    made = make_engine(replace(policy, end_token_ids=ends), _config(rollout={"max_concurrent_sequences": rows}).rollout)
    assert isinstance(made, BuiltinEngine)
    return made


def _prompts(count: int, longest: int, shape: str, seed: int) -> list[Prompt]:
    lengths = random.Random(seed)
    return [
        random_prompts(1, lengths.randint(max(1, longest // 2), longest), SHAPES[shape].vocab_size, f"{seed}-{place}")[0]
        for place in range(count)
    ]


@contextmanager
def _bursts(steps: int) -> Iterator[None]:
    """Decode steps between two looks at the tokens."""
    with mock.patch.dict(running.BURSTS, {"cpu": steps, "cuda": steps}):
        yield


@contextmanager
def _launched() -> Iterator[None]:
    """Every step is launched; no graphs."""
    with mock.patch.object(Runner, "_replay", Runner._once):
        yield


Sampled = list[tuple[Completion, ...]]


def _tokens(sampled: Sampled) -> list[tuple[int, ...]]:
    return [c.token_ids for group in sampled for c in group]


def _differing(one: Sampled, other: Sampled) -> int:
    """Completions whose tokens differ."""
    return sum(a != b for a, b in zip(_tokens(one), _tokens(other), strict=True))


def _few(completions: int) -> int:
    """So many may differ by rounding: products over fewer rows add up in another order, and random weights give 150 thousand tokens about
    the same probability, so that of the draws of 256 tokens one in some 3,000 falls on another token (H200, fp32: 5 of 64 completions).
    What is wrong changes most of them."""
    return completions // 8


def _letters(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward that always varies."""
    return [sum(map(ord, str(completion))) % 97 / 97 for completion in completions]


def _run(place: Place, name: str, *, resume_from: Path | None = None, on_step: Any = None, **sections: Any) -> Path:
    """Train the tiny model on generated problems, in a folder of that name, which is returned."""
    model = place.folder / "tiny-model"
    if not model.exists():
        write_tiny_model(model)
    base: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "dtype": "bfloat16", "device": str(place.device)},
        "data": {"source": "arithmetic", "holdout": 4},
        "rewards": {"functions": [{"function": "letters"}]},
        "rollout": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_completion_tokens": place.pick(64, 12)},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 4, "deterministic": True},
        "evaluation": {"problems": 2, "at_start": False},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return train(
        _config(**merged), rewards={"letters": _letters}, console=Console(quiet=True), run_folder=place.folder / name,
        resume_from=resume_from, on_step=on_step,
    ).folder  # fmt: skip


# The checks.


def environment(place: Place) -> Found:
    """Versions, the card, and its rates beside the data sheet's."""
    size, count = place.pick(8192, 256), place.pick(2**30, 2**22)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=place.device) for _ in range(2))
    source = torch.ones(count, dtype=torch.float32, device=place.device)
    target = torch.empty_like(source)
    (a @ b, target.copy_(source))
    product = min(place.seconds(lambda: a @ b) for _ in range(5))
    copy = min(place.seconds(lambda: target.copy_(source)) for _ in range(5))
    tflops, gigabytes = 2.0 * size**3 / product / 1e12, 2.0 * source.nbytes / copy / 1e9
    card = place.card()
    from groupwise.tracking.environment import describe_environment

    described = describe_environment(["first light"])
    numbers: dict[str, Any] = {"tflops": tflops, "copy_gb_per_s": gigabytes, "environment": described, "cuda": torch.version.cuda}
    if place.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        numbers |= {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
        }
        numbers["memory_by_table"] = card and card.memory_bytes
    seen = f"{numbers.get('card', 'the CPU')}, torch {torch.__version__}: {tflops:,.1f} TFLOP/s in bf16, copies at {gigabytes:,.0f} GB/s"
    if card is None:
        return judge(seen + "; the table of cards does not have it", numbers)
    numbers |= {"tflops_by_table": card.flops_per_s / 1e12, "gb_per_s_by_table": card.bytes_per_s / 1e9}
    low = place.judged and (tflops < 0.65e-12 * card.flops_per_s or gigabytes < 0.75e-9 * card.bytes_per_s)
    slower = "the card is shared, throttled, or not the one in the table: read every speed below beside these rates"
    return judge(seen, numbers, slower=slower if low else "")


FAMILIES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
_GROUPS = [(list(range(3, 12)), [list(range(3, 3 + n)) for n in (4, 9, 1, 70)]), ([5], [[6, 7], [8]])]


def _numbers_of(model: Any, device: torch.device, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs and gradients, in fp32 on the CPU."""
    decoder = Decoder(model.to(device), attention=implementation)
    logprobs = decoder.logprobs(decoder.prepare(_GROUPS))
    logprobs.sum().backward()
    return logprobs.detach().cpu(), {name: p.grad.float().cpu() for name, p in decoder.named_parameters() if p.grad is not None}


def _distance(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> tuple[float, float]:
    """Largest difference of logprobs, and of gradients relative to their norm, the largest over tensors."""
    gradients = (float((one[1][name] - g).norm() / g.norm().clamp_min(1e-12)) for name, g in other[1].items())
    return float((one[0] - other[0]).abs().max()), max(gradients)


def parity(place: Place) -> Found:
    """The GPU's ways of computing (the library's attention, with masks and by flash kernels) against the CPU's (blocked), fp32 and bf16."""
    numbers: dict[str, Any] = {}
    wrong = []
    for name, kind in FAMILIES.items():
        shape = kind(
            vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, initializer_range=0.15, tie_word_embeddings=name == "qwen2", pad_token_id=2,
        )  # fmt: skip

        def model(dtype: torch.dtype, shape: Any = shape) -> Any:
            torch.manual_seed(1)
            return AutoModelForCausalLM.from_config(shape, dtype=torch.float32).to(dtype)

        cpu = torch.device("cpu")
        truth = _numbers_of(model(torch.float32), cpu, "blocked")
        in_fp32 = _distance(_numbers_of(model(torch.float32), place.device, "sdpa"), truth)
        in_bf16 = _distance(_numbers_of(model(torch.bfloat16), place.device, "sdpa"), truth)
        by_flash = _distance(_numbers_of(model(torch.bfloat16), place.device, "varlen"), truth)
        of_cpu = _distance(_numbers_of(model(torch.bfloat16), cpu, "blocked"), truth)
        numbers[name] = {"fp32": in_fp32, "bf16": in_bf16, "bf16_by_flash": by_flash, "bf16_of_the_cpu": of_cpu}
        if not max(in_fp32) <= 1e-3:
            wrong.append(f"{name} in fp32 (logprobs {in_fp32[0]:.1e}, gradients {in_fp32[1]:.1e})")
        for way, found in (("in bf16", in_bf16), ("in bf16 by flash attention", by_flash)):
            if not all(here <= 2 * there for here, there in zip(found, of_cpu, strict=True)):
                wrong.append(f"{name} {way} (logprobs {found[0]:.1e}, the CPU's {of_cpu[0]:.1e})")
    worst = max(max(found["fp32"]) for found in numbers.values())
    seen = f"largest distance in fp32 {worst:.1e}" + (f"; off: {', '.join(wrong)}" if wrong else "")
    return judge(
        seen, numbers, wrong="the decoder computes something else here: trust no training before this is found" if wrong else ""
    )


def kernels(place: Place) -> Found:
    """Fast paths against plain ones, as at the beginning of every run (``engines/builtin/fast_paths.py``)."""
    choices = check_fast_paths(SHAPES[place.pick("1.5b", "tiny")], torch.bfloat16, place.device, again=True)
    numbers = {choice.path: choice.to_json() for choice in choices}
    said = [f"{choice.path}: {'taken' if choice.taken else choice.why}" for choice in choices]
    seen = "; ".join(said) or "there are none"
    wrong = "a fast path gives other numbers or fails: it is left out, and something is to be mended"
    slower = "a fast path is slower than the plain one: it is left out"
    return judge(
        seen, numbers, wrong="" if all(choice.agrees for choice in choices) else wrong,
        slower="" if all(choice.taken for choice in choices) else slower,
    )  # fmt: skip


def shapes(place: Place) -> Found:
    """New attention shapes against known ones, forward and backward, with kernels and context warm."""
    heads, kv_heads, width = place.pick((12, 2, 128), (4, 2, 16))
    source = random.Random(0)

    def once(lengths: Sequence[tuple[int, list[int]]]) -> tuple[Callable[[], None], float]:
        packed = pack([([1] * prompt, [[1] * n for n in completions]) for prompt, completions in lengths])
        rows = len(packed.token_ids_R)
        started = time.perf_counter()
        plan = attention.plan_rectangles(packed.spans, None, place.device)
        planning = time.perf_counter() - started
        qkv = torch.randn(rows, heads + 2 * kv_heads, width, device=place.device, dtype=torch.bfloat16, requires_grad=True)
        cos = torch.ones(rows, 1, width // 2, device=place.device, dtype=torch.bfloat16)
        return lambda: attention.attend_by_library(qkv, cos, 0 * cos, plan, heads, kv_heads)[0].sum().backward(), planning

    longest = place.pick(512, 24)
    made = [
        [(source.randint(longest // 4, longest), [source.randint(1, longest) for _ in range(8)]) for _ in range(place.pick(4, 1))]
        for _ in range(place.pick(12, 4))
    ]
    torch.backends.cuda.enable_cudnn_sdp(False)
    once(made[0])[0]()
    first, second, plans = [], [], []
    for lengths in made[1:]:
        action, planning = once(lengths)
        first.append(place.seconds(action))
        second.append(min(place.seconds(action) for _ in range(3)))
        plans.append(planning)
    new, known = median(first), median(second)
    numbers = {"new_s": new, "known_s": known, "planning_s": median(plans), "worst_new_s": max(first)}
    seen = f"{1e3 * new:.1f} ms for new shapes, {1e3 * known:.1f} ms for known ones, {1e3 * median(plans):.1f} ms to plan them"
    slow = new > 2 * known + place.pick(1e-3, 20e-3)
    return judge(
        seen, numbers, slower="kernels are planned for each new shape: find which by the profile of `shapes`" if slow else ""
    )


def graphs(place: Place) -> Found:
    """Bursts of 1 and of 16 steps, with rows that end by chance within bursts; fp32."""
    shape, tokens = place.pick("0.5b", "tiny"), place.pick(300, 40)
    made = _engine(place, shape, torch.float32, 64, tokens // 2)
    asked = _prompts(8, place.pick(128, 9), shape, 0)

    def sample() -> Sampled:
        return made.sample(asked, 8, SamplingSettings(max_tokens=tokens), seed=1, scope="light")

    with _graphs(place), _bursts(16):
        started = time.perf_counter()
        together = sample()
        seconds = time.perf_counter() - started
    with _bursts(1):
        single = sample()
    different, count = _differing(together, single), len(_tokens(single))
    lengths = [len(ids) for ids in _tokens(single)]
    numbers = {
        "different": different,
        "completions": count,
        "tokens": sum(lengths),
        "ended_early": sum(n < tokens for n in lengths),
    }
    seen = f"{different} of {count} completions differ; {numbers['ended_early']} ended before the limit; {seconds:.1f} s"
    if not numbers["ended_early"]:
        return Found("wrong", seen, "no row ended by chance, so this says little: lower the mean length", numbers)
    return judge(
        seen, numbers, wrong="replayed steps compute something else than launched ones" if different > _few(count) else ""
    )


def capture(place: Place) -> Found:
    """A capture that fails at its end, as one does for want of memory: the rest is launched, and nothing is left capturing."""
    shape, tokens = place.pick("0.5b", "tiny"), place.pick(60, 12)
    made = _engine(place, shape, torch.float32, 16, None)
    asked = _prompts(4, place.pick(64, 9), shape, 0)
    told: list[str] = []
    made.limit.tell = told.append
    sample = lambda: made.sample(asked, 4, SamplingSettings(max_tokens=tokens), seed=1, scope="light")  # noqa: E731
    with _graphs(place), _bursts(16):
        good = sample()
        with _failing_captures(place):
            bad = sample()
        torch.rand(4, device=place.device)
        again = sample()
    different = max(_differing(good, bad), _differing(good, again))
    numbers = {"different": different, "told": told}
    seen = f"{different} of {len(_tokens(good))} completions differ; said: {told[0] if told else 'nothing'}"
    wrong = "a failed capture changes what is sampled" if different > _few(len(_tokens(good))) else ""
    if not told:
        wrong = "the failure was not noticed"
    return judge(seen, numbers, wrong=wrong)


@contextmanager
def _failing_captures(place: Place) -> Iterator[None]:
    """Within a capture, after its kernels, an operation that none allows: a wait for the device."""
    once, capturing = Runner._once, torch.cuda.is_current_stream_capturing if place.on_gpu else lambda: _Stand.capturing

    def failing(runner: Runner, step: Any) -> None:
        once(runner, step)
        if capturing():
            step.last_tokens.tolist()
            raise RuntimeError("operation not permitted when stream is capturing")  # where the wait was none

    with mock.patch.object(Runner, "_once", failing):
        yield


class _Stand:
    """Stands in for a captured graph in miniature: what is captured is not computed, and replaying computes it."""

    capturing = False

    def __init__(self, runner: Runner, step: Any) -> None:
        self.replay = lambda: Runner._once(runner, step)
        with mock.patch.object(_Stand, "capturing", True):
            before = [getattr(step, name).clone() for name in _KEPT]
            try:
                runner._once(step)
            finally:
                for name, old in zip(_KEPT, before, strict=True):
                    getattr(step, name).copy_(old)


_KEPT = ("last_tokens", "last_logprobs", "own_lengths", "positions")


@contextmanager
def _graphs(place: Place) -> Iterator[None]:
    """In miniature, stand-ins for graphs."""
    if place.on_gpu:
        yield
        return
    with (
        mock.patch.object(running, "GRAPHS", {"cpu"}),
        mock.patch.object(Runner, "_capture", lambda runner, step: _Stand(runner, step)),
    ):
        yield


def weights(place: Place) -> Found:
    """Three calls, with other weights each time: by graphs, and the last one launched too."""
    shape, tokens = place.pick("0.5b", "tiny"), place.pick(128, 12)
    made = _engine(place, shape, torch.float32, 64, place.pick(200, None))
    asked, reserved, seen_tokens = _prompts(8, place.pick(128, 9), shape, 0), [], []
    with _graphs(place), _bursts(16):
        for call in range(3):
            seen_tokens.append(made.sample(asked, 8, SamplingSettings(max_tokens=tokens), seed=1, scope="light"))
            reserved.append(place.reserved_bytes())
            if call < 2:
                torch.manual_seed(call)
                with torch.no_grad():
                    for _, parameter in made.decoder.named_parameters():
                        parameter.add_(0.02 * torch.randn_like(parameter))
        with _launched():
            launched = made.sample(asked, 8, SamplingSettings(max_tokens=tokens), seed=1, scope="light")
    stale, different = _differing(seen_tokens[0], seen_tokens[2]), _differing(seen_tokens[2], launched)
    growth = reserved[2] / reserved[1] - 1 if reserved[1] else 0.0
    numbers = {"reserved_bytes": reserved, "changed": stale, "different": different, "growth": growth}
    count = len(_tokens(launched))
    seen = f"{stale} of {count} completions changed with the weights, {different} differ from launched steps; reserved grew by {growth:.1%}"
    wrong = "graphs read old weights" if not stale or different > _few(count) else ""
    return judge(seen, numbers, wrong=wrong or ("captures leak memory" if growth > 0.05 else ""))


def mismatch(place: Place) -> Found:
    """Log-probabilities of the sampler against learning's, of the same weights: random ones of the real shape, and the embedded model's.
    How far bf16 puts either from the truth depends on the weights, so the distance is held against that of learning from fp32."""
    shape, tokens = place.pick("1.5b", "tiny"), place.pick(128, 12)
    policy = random_policy(SHAPES[shape], str(place.device))
    with torch.no_grad():
        policy.model.get_parameter("model.embed_tokens.weight").mul_(3)  # the output head too: far from uniform
    numbers = {"random": _gap(policy, _prompts(4, place.pick(256, 9), shape, 0), tokens)}
    if place.on_gpu and _has_embedded_model():
        from groupwise.models.load import load_policy

        trained = load_policy(Config().model, place.device)
        ids = tuple(trained.tokenizer("What is 7 + 8? Think step by step, and give the answer at the end.")["input_ids"])
        asked = [replace(prompt, token_ids=ids) for prompt in _prompts(4, 9, "tiny", 0)]
        numbers["trained"] = _gap(trained, asked, tokens)
    seen = "; ".join(
        f"{name} weights: {n['mean']:.4f} nats in the mean, {n['largest']:.3f} at most; learning from fp32 {n['rounding']:.4f}"
        for name, n in numbers.items()
    )
    apart = any(not n["mean"] <= 2 * n["rounding"] for n in numbers.values())
    wrong = "sampler and learner compute something else: ratios at the first update are noise" if apart else ""
    return judge(seen, numbers, wrong=wrong)


def _gap(policy: Any, asked: list[Prompt], tokens: int) -> dict[str, float]:
    scorer = make_scorer(policy, _config().model)
    engine = make_engine(policy, _config(rollout={"max_concurrent_sequences": 32}).rollout, scorer)
    done = engine.sample(asked, 8, SamplingSettings(max_tokens=tokens), seed=1, scope="light")
    packed = scorer.prepare([(p.token_ids, [c.token_ids for c in group]) for p, group in zip(asked, done, strict=True)])
    with torch.no_grad():
        learnt = scorer.logprobs(packed).cpu()
        exact = make_scorer(replace(policy, model=copy.deepcopy(policy.model).float()), _config().model)
        truth = exact.logprobs(packed).cpu()
    sampled = torch.tensor([x for group in done for c in group for x in c.logprobs])
    gap = (learnt - sampled).abs()
    return {
        "mean": float(gap.mean()), "largest": float(gap.max()), "rounding": float((learnt - truth).abs().mean()),
        "rounding_of_sampler": float((sampled - truth).abs().mean()), "mean_logprob": float(sampled.mean()), "tokens": len(gap),
    }  # fmt: skip


def _has_embedded_model() -> bool:
    from groupwise.models.embedded import embedded_folder

    return os.environ.get("FIRST_LIGHT_MODEL") == "embedded" or embedded_folder().is_dir()


def sampling(place: Place) -> Found:
    """Sampling at full lengths and ragged ones: by graphs, by launches, and what captures take."""
    shape, rows, tokens = place.pick(("1.5b", 256, 512), ("tiny", 8, 10))
    captures: list[float] = []
    capturing = Runner._capture

    def timed(runner: Runner, step: Any) -> Any:
        started = time.perf_counter()
        made = capturing(runner, step)
        captures.append(time.perf_counter() - started)
        return made

    numbers: dict[str, Any] = {}
    with mock.patch.object(Runner, "_capture", timed):
        for name, mean in (("full", None), ("ragged", int(0.6 * tokens))):
            engine = _engine(place, shape, torch.bfloat16, rows, mean)
            for way, steps in (("graph", 16), ("launched", 16)):
                limits = SamplingSettings(max_tokens=tokens if way == "graph" else max(8, tokens // 8))
                with _bursts(steps), ExitStack() as opened:
                    if way == "launched":
                        opened.enter_context(_launched())
                    if way == "graph":
                        engine.sample(_prompts(1, 8, shape, 9), 1, SamplingSettings(max_tokens=4), seed=0, scope="warm")
                    place.wait()
                    started = time.perf_counter()
                    done = engine.sample(_prompts(rows // 8, place.pick(256, 9), shape, 3), 8, limits, seed=3, scope="light")
                    place.wait()
                    taken = time.perf_counter() - started
                lengths = [len(ids) for ids in _tokens(done)]
                numbers[f"{name}_{way}"] = {
                    "tokens_per_s": sum(lengths) / taken, "ms_per_step": 1e3 * taken / max(lengths), "tokens": sum(lengths)
                }  # fmt: skip
            del engine
            gc.collect()
    numbers["captures"], numbers["capture_ms"] = len(captures), 1e3 * median(captures) if captures else 0.0
    planned = 1e3 * _planned_step_s(place, shape, rows, tokens)
    numbers["planned_ms"] = planned
    graph, launched = (numbers[f"full_{way}"]["ms_per_step"] for way in ("graph", "launched"))
    seen = (
        f"a step takes {graph:.2f} ms by graphs, {launched:.2f} launched, {planned:.2f} by the plan; "
        f"{numbers['full_graph']['tokens_per_s']:,.0f} tokens/s at full lengths, {numbers['ragged_graph']['tokens_per_s']:,.0f} ragged; "
        f"{len(captures)} captures of {numbers['capture_ms']:.0f} ms"
    )
    slower = ""
    if place.judged:
        slower = "decoding is slower than planned: look at `profile`" if graph > 1.5 * planned else slower
        slower = "captures cost more than a burst gains" if numbers["capture_ms"] > 60 else slower
        slower = "graphs do not help: they are not replayed, or the card is the limit" if graph >= launched else slower
    return judge(seen, numbers, slower=slower)


def _setup(place: Place, shape: str, config: Config, prompt_tokens: int) -> Setup:
    folder = place.folder / f"shape-{shape}"
    SHAPES[shape].save_pretrained(folder)
    model = config.model.model_copy(update={"name": str(folder), "dtype": "bfloat16"})
    return Setup(config.model_copy(update={"model": model}), find_shape(model), place.pick("cuda", "cpu"), 1, prompt_tokens)


def _planned_step_s(place: Place, shape: str, rows: int, tokens: int) -> float:
    config = _config(rollout={"completions_per_prompt": 8, "max_completion_tokens": tokens})
    card = place.card() or HARDWARE["h100"]
    return decode_step_s(_setup(place, shape, config, place.pick(256, 9)), card, rows, tokens / 2)


def profile(place: Place) -> Found:
    """Kernels of one decode step that is launched, of one micro-batch that was computed before, and of one update over new lengths; how
    much of the time the device works, and which calls of the driver the host waits in. Then, unrecorded, an update over other new
    lengths, and the recorded one once more."""
    shape, rows = place.pick(("1.5b", 256), ("tiny", 8))
    engine = _engine(place, shape, torch.bfloat16, rows, None)
    steps: list[Callable[[], None]] = []
    once = Runner._once

    def keep(runner: Runner, step: Any) -> None:
        once(runner, step)
        steps[:] = [lambda: once(runner, step)]

    with mock.patch.object(Runner, "_once", keep), _bursts(1):
        engine.sample(_prompts(rows // 8, place.pick(256, 9), shape, 0), 8, SamplingSettings(max_tokens=6), seed=0, scope="light")
    with torch.no_grad():
        step = _profiled(place, steps[0])
    steps.clear()
    policy = random_policy(SHAPES[shape], str(place.device))
    scorer = make_scorer(policy, _config().model)
    groups = _groups(shape, place.pick(4, 1), place.pick(256, 9), place.pick(512, 9), 0)
    packed = scorer.prepare([(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups])
    learning = _profiled(place, lambda: scorer.logprobs(packed).sum().backward())
    sizes = (shape, place.pick(16, 2), place.pick(256, 9), place.pick(512, 9))
    learner = Learner(scorer, _config(optimizer={"learning_rate": 1e-6}, training={"micro_batch_tokens": place.pick(16384, 128)}))
    learner.learn(_groups(*sizes, 1))
    update = _profiled(place, lambda: learner.learn(_groups(*sizes, 2)), before=False)
    update["unrecorded_s"] = [place.seconds(partial(learner.learn, _groups(*sizes, seed))) for seed in (3, 2)]
    each, once_for_all = DECODE_LAUNCHES if decoding_kernels_fit(place.device) else DECODE_OPERATIONS
    planned = each * SHAPES[shape].num_hidden_layers + once_for_all
    numbers = {"decode_step": step, "micro_batch": learning, "update": update, "planned_kernels": planned}
    seen = (
        f"a decode step has {step['kernels']} kernels, {planned} by the count, and the device works {step['busy']:.0%} of it; "
        f"a micro-batch {learning['kernels']}, and {learning['busy']:.0%}; an update over new lengths {update['kernels']}, and "
        f"{update['busy']:.0%}; most time: {', '.join(list(learning['top'])[:3])}"
    )
    slower = ""
    if place.judged:
        off = not 0.7 <= step["kernels"] / planned <= 1.3
        slower = "other kernels run than were counted: count again" if off else slower
        slower = (
            "in learning the device waits for Python: fuse, or make micro-batches larger" if learning["busy"] < 0.5 else slower
        )
    return judge(seen, numbers, slower=slower)


def _profiled(place: Place, action: Callable[[], object], before: bool = True) -> dict[str, Any]:
    """``before``: the action was made before, with the same shapes."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    if before:
        action()
    place.wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    with recording(activities=activities) as recorded:
        seconds = place.seconds(action)
    kind = DeviceType.CUDA if place.on_gpu else DeviceType.CPU
    events = [e for e in recorded.events() or () if e.device_type == kind and (place.on_gpu or e.cpu_parent is None)]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, reached = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = max(1e-9, (reached - spans[0][0]) / 1e6) if spans else seconds
    calls = [e for e in recorded.events() or () if e.device_type == DeviceType.CPU and e.name.startswith("cu")]
    return {
        "kernels": len(events), "busy": min(1.0, busy / 1e6 / whole), "seconds": seconds, "top": _longest(events),
        "driver": _longest(calls),
    }  # fmt: skip


def _longest(events: Iterable[Any]) -> dict[str, float]:
    """Milliseconds of the twelve names that took most."""
    by_name: dict[str, float] = {}
    for event in events:
        by_name[event.name] = by_name.get(event.name, 0.0) + (event.time_range.end - event.time_range.start) / 1e3
    return dict(sorted(by_name.items(), key=lambda item: -item[1])[:12])


def _groups(shape: str, prompts: int, prompt_tokens: int, tokens: int, seed: int) -> Any:
    asked = _prompts(prompts, prompt_tokens, shape, seed)
    return random_groups(asked, 8, max(1, tokens // 4), tokens, SHAPES[shape].vocab_size, seed=1 + seed)


def learning(place: Place) -> Found:
    """Four updates over batches of new lengths, then the last once more: model FLOPs utilisation, and memory beside the plan's."""
    shape, prompts, tokens, budget = place.pick(("1.5b", 16, 512, 16384), ("tiny", 2, 12, 128))
    config = _config(
        optimizer={"learning_rate": 1e-6}, training={"micro_batch_tokens": budget},
        rollout={"prompts_per_step": prompts, "completions_per_prompt": 8, "max_completion_tokens": tokens, "engine": "builtin"},
    )  # fmt: skip
    policy = random_policy(SHAPES[shape], str(place.device))
    learner = Learner(make_scorer(policy, config.model), config)
    rates, seconds = [], []
    reset_peak_memory(place.device.type)
    for step in (0, 1, 2, 3, 3):  # the last with lengths, and so kernels, that were there before
        groups = _groups(shape, prompts, place.pick(256, 9), tokens, step)
        sizes = [(len(g.prompt.token_ids), [len(c.token_ids) for c in g.completions]) for g in groups]
        _, metrics = learner.learn(groups)
        taken, flops = metrics["time/learn_s"].value, learning_flops(SHAPES[shape], sizes)
        seconds.append(taken)
        rates.append(flops / taken)
    card = place.card()
    again, rate = rates.pop(), median(rates[1:])
    share = rate / card.flops_per_s if card else float("nan")
    setup = _setup(place, shape, config, place.pick(256, 9))
    planned = next(phase.bytes for phase in phases(setup) if phase.name == "learning")
    peak, reserved = peak_memory_bytes(place.device.type), place.reserved_bytes()
    numbers = {
        "tflops": rate / 1e12, "first_tflops": rates[0] / 1e12, "again_tflops": again / 1e12, "utilisation": share, "seconds": seconds,
        "peak_bytes": peak, "reserved_bytes": reserved, "planned_bytes": planned, "fragmentation": reserved / peak - 1 if peak else 0.0,
    }  # fmt: skip
    seen = (
        f"{numbers['tflops']:,.1f} TFLOP/s, {share:.0%} of the peak (40% by the plan, 27% by the count), the last batch again "
        f"{numbers['again_tflops']:,.1f}; peak {peak / 2**30:.1f} GiB, reserved {reserved / 2**30:.1f}, planned {planned / 2**30:.1f}"
    )
    wrong = slower = ""
    if place.judged:
        wrong = (
            "the plan's memory is not what is taken: correct it before it is trusted"
            if not 0.5 * planned <= peak <= planned
            else ""
        )
        slower = "learning is slower than expected: look at `profile`" if share < 0.2 else ""
    return judge(seen, numbers, wrong=wrong, slower=slower)


def memory(place: Place) -> Found:
    """Memory made short: by a limit on the process on a GPU, by errors like the allocator's on the CPU."""
    shape, prompts, tokens, budget = place.pick(("0.5b", 8, 256, 16384), ("tiny", 2, 12, 512))

    def learnt(limit: Callable[[Learner], Any]) -> tuple[float, int, int, int]:
        config = _config(optimizer={"learning_rate": 1e-6, "max_grad_norm": None}, training={"micro_batch_tokens": budget})
        policy = random_policy(SHAPES[shape], str(place.device), torch.float32 if not place.on_gpu else torch.bfloat16)
        learner = Learner(make_scorer(policy, config.model), config)
        gc.collect()
        before = torch.cuda.memory_allocated() if place.on_gpu else 0
        reset_peak_memory(place.device.type)
        with limit(learner):
            _, metrics = learner.learn(_groups(shape, prompts, place.pick(128, 9), tokens, 0))
        return metrics["optimizer/grad_norm"].value, learner.budget.halvings, before, peak_memory_bytes(place.device.type)

    norm, _, before, peak = learnt(lambda learner: ExitStack())
    _give_back(place)
    short_norm, halvings, _, _ = learnt(lambda learner: _short_for_learning(place, learner, before + 0.6 * (peak - before)))
    _give_back(place)
    engine = _engine(place, shape, torch.float32, 64, None)
    asked = _prompts(8, place.pick(128, 9), shape, 0)
    engine.limit.tell = lambda sentence: None
    before = torch.cuda.memory_allocated() if place.on_gpu else 0
    reset_peak_memory(place.device.type)
    plenty = engine.sample(asked, 8, SamplingSettings(max_tokens=tokens), seed=1, scope="light")
    peak = peak_memory_bytes(place.device.type)
    _give_back(place)
    with _short_for_sampling(place, before + 0.6 * (peak - before)):
        short = engine.sample(asked, 8, SamplingSettings(max_tokens=tokens), seed=1, scope="light")
    different = _differing(plenty, short)
    numbers = {
        "grad_norm": norm, "grad_norm_short": short_norm, "pass_halvings": halvings, "row_halvings": engine.limit.halvings,
        "different": different,
    }  # fmt: skip
    seen = (
        f"gradient norm {norm:.6g} and {short_norm:.6g} after {halvings} halvings of passes; {different} of {len(_tokens(short))} "
        f"completions differ after {engine.limit.halvings} halvings of rows"
    )
    wrong = ""
    if not (halvings and engine.limit.halvings):
        wrong = "memory was not made short, or its end was not noticed"
    elif abs(short_norm - norm) > 2e-2 * abs(norm) or different > _few(len(_tokens(short))):
        wrong = "what is done again in smaller parts has other numbers"
    return judge(seen, numbers, wrong=wrong)


def _give_back(place: Place) -> None:
    gc.collect()
    if place.on_gpu:
        torch.cuda.empty_cache()


@contextmanager
def _at_most(total: float) -> Iterator[None]:
    """The process may take so many bytes of the GPU."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, total / torch.cuda.get_device_properties(0).total_memory))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _short_for_learning(place: Place, learner: Learner, total: float) -> Iterator[None]:
    if place.on_gpu:
        with _at_most(total):
            yield
        return
    score, most = learner.scorer.score, place.pick(0, 100)

    def failing(packed: Any, *arguments: Any, **options: Any) -> Any:
        if len(packed.token_ids_R) > most:
            raise torch.OutOfMemoryError("CUDA out of memory, as if")
        return score(packed, *arguments, **options)

    with mock.patch.object(learner.scorer, "score", failing):
        yield


@contextmanager
def _short_for_sampling(place: Place, total: float) -> Iterator[None]:
    if place.on_gpu:
        with _at_most(total):
            yield
        return
    batch = builtin._Batch.advance

    def failing(self: Any) -> bool:
        if self.max_rows > 32:
            raise torch.OutOfMemoryError("CUDA out of memory, as if")
        return batch(self)

    with mock.patch.object(builtin._Batch, "advance", failing):
        yield


def resume(place: Place) -> Found:
    """Four steps at once, and two and two, in every precision of the optimiser, and with it offloaded."""
    from importlib.util import find_spec

    from safetensors.torch import load_file

    ways: dict[str, dict[str, Any]] = {
        name: {"precision": name} for name in place.pick(("masters", "stochastic", "pure"), ("masters",))
    }
    left_out = [] if find_spec("bitsandbytes") else ["masters-8bit (no bitsandbytes)"]
    if place.on_gpu:
        ways |= {"offload": {"offload": True}} | ({} if left_out else {"masters-8bit": {"precision": "masters-8bit"}})
    numbers: dict[str, Any] = {}
    for name, optimizer in ways.items():
        sections: dict[str, Any] = {
            "optimizer": {"learning_rate": 1e-3, **optimizer},
            "output": {"checkpoint_every": 2, "keep_checkpoints": 9},
        }
        through = _run(place, f"through-{name}", **sections)
        again = _run(place, f"resumed-{name}", resume_from=through / "checkpoints" / "step-2", **sections)
        one, other = (load_file(folder / "final_model" / "model.safetensors") for folder in (through, again))
        numbers[name] = max(float((one[key].float() - other[key].float()).abs().max()) for key in one)
    off = [name for name, gap in numbers.items() if gap != 0]
    seen = f"the same weights in {len(numbers) - len(off)} of {len(numbers)} ways" + (f"; off: {', '.join(off)}" if off else "")
    seen += f"; left out: {left_out[0]}" if left_out else ""
    return judge(
        seen,
        numbers,
        wrong="a resumed run is another run: something is not in the checkpoint, or sums are not repeated" if off else "",
    )


def ahead(place: Place) -> Found:
    """Sampling in a thread while the last batch is learnt, with captures on one side; against the same with the thread waited for."""
    put = SamplingThread.put

    def waited_for(thread: SamplingThread, order: Any) -> None:
        put(thread, order)
        thread.wait(order)

    def sampled(name: str) -> list[Any]:
        seen: list[Any] = []
        sections: dict[str, Any] = {"rollout": {"ahead": 1}, "training": {"steps": 4}}
        _run(
            place,
            name,
            on_step=lambda report: seen.append([[c.token_ids for c in g.completions] for g in report.groups]),
            **sections,
        )
        return seen

    with _bursts(place.pick(16, 4)):
        threaded = sampled("ahead")
        with mock.patch.object(SamplingThread, "put", waited_for):
            one_by_one = sampled("one-by-one")
    same = [a == b for a, b in zip(threaded, one_by_one, strict=True)]
    numbers = {"steps": len(same), "same": sum(same)}
    seen = f"the completions of {sum(same)} of {len(same)} steps are the same"
    return judge(
        seen, numbers, wrong="threads disturb each other: weights are read while they are written" if not all(same) else ""
    )


def quickstart(place: Place) -> Found:
    """The quickstart by its own command: on the embedded model where it is at hand, else, and in miniature, on the tiny one."""
    folder, whole = place.folder / "quickstart", place.on_gpu and _has_embedded_model()
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, "-m", "groupwise", "train", "quickstart", f"output.folder={folder}", f"model.device={place.device}"]
    if not whole:
        words += [f"model.name={write_tiny_model(place.folder / 'quickstart-model')}", "warm_start.steps=2", "training.steps=2"]
        words += ["evaluation.problems=4", "data.holdout=8", "rollout.max_completion_tokens=12"]
    started = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        return Found(
            "wrong", f"it ended with code {done.returncode}: {last}", "see what it says", {"output": done.stdout[-4000:]}
        )
    judged = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["evaluations"]
    accuracies = [round(one["strict_accuracy"], 3) for one in judged]
    numbers = {"seconds": seconds, "embedded": whole, "evaluations": [[one["stage"], one["strict_accuracy"]] for one in judged]}
    seen = f"{'the embedded model' if whole else 'a tiny model'} in {seconds:.0f} s; accuracy {accuracies}"
    learns = not whole or accuracies[-1] > accuracies[0]
    return judge(seen, numbers, wrong="" if learns else "it runs and does not learn: compare its metrics with the CPU's")


def main(words: Sequence[str] | None = None) -> None:
    """``NAME DEVICE FOLDER``: make one check and write what it found."""
    name, device, folder = words or sys.argv[1:]
    answer(globals()[name], device, Path(folder), name)


if __name__ == "__main__":
    main()
