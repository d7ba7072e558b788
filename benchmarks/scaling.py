"""How time grows with completion length, group size, prompt length and model width, against how the arithmetic grows.

Along each axis one number changes and everything else stays. Growth is the last measurement over the first. Time should grow no
faster than the work: `work / time` below 1 means that something else grows. Exponents are slopes of a straight line in logarithms.

Beside each point a plain loop over transformers does the same, by turns in one process with a fixed number of threads, and with weights of
the same dtype: `generate`, then a forward and a backward pass of padded rows, each with its prompt, at most 4096 tokens at once, and AdamW
on those weights. Ours also clips, measures what a step records, and keeps fp32 masters of weights of 16 bits.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common import Result, finish, median, parser, print_table, seconds
from benchmarks.flops import forward_flops, learning_flops
from benchmarks.generate_worker import generate_forced
from benchmarks.shapes import llama_shape, random_groups, random_policy, random_prompts
from groupwise.config.schema import Config, ModelConfig
from groupwise.engines import SamplingSettings, make_engine
from groupwise.memory import keep_freed_memory
from groupwise.models.devices import wait_for, with_dtype
from groupwise.models.scorer import make_scorer
from groupwise.threads import fix_threads
from groupwise.training.learner import Learner
from groupwise.types import Group

__all__ = ["AXES", "main", "run"]


@dataclass(frozen=True)
class Point:
    """One measurement's sizes, in tokens where not said otherwise."""

    prompt: int = 128
    completion: int = 128
    samples: int = 8
    prompts: int = 2
    width: int = 576
    layers: int = 30


AXES: dict[str, tuple[str, tuple[int, ...], Point]] = {
    "completion length": ("completion", (64, 128, 256, 512, 1024), Point(prompts=1)),
    "group size": ("samples", (4, 8, 16, 32, 64), Point(prompts=1)),
    "prompt length": ("prompt", (100, 200, 400, 700, 1000), Point(completion=32)),
    "model width": ("width", (192, 384, 576, 768, 960), Point(completion=64)),
}
"""Axis -> field of ``Point``, its values, and the sizes that stay. At 576 the model has SmolLM2-135M's shape."""
TINY: dict[str, tuple[str, tuple[int, ...], Point]] = {
    name: (field, values, replace(point, prompt=8, completion=8, samples=2, width=64, layers=2))
    for (name, (field, _, point)), values in zip(AXES.items(), ((8, 16), (2, 4), (8, 16), (64, 128)), strict=True)
}


def options() -> argparse.ArgumentParser:
    out = parser("scaling", __doc__)
    out.add_argument("--axes", nargs="+", choices=tuple(AXES), default=list(AXES))
    out.add_argument("--repeats", type=int, default=3, help="measurements of each point, after one to warm up")
    out.add_argument("--device", default="cpu")
    out.add_argument("--ours-only", action="store_true", help="without the plain loop over transformers")
    out.add_argument("--tiny", action="store_true", help="a few tokens and a tiny model, to see that it runs")
    return out


def run(args: argparse.Namespace) -> Result:
    """Measure, print a table for each axis, and return the result (not yet finished)."""
    keep_freed_memory()
    axes = TINY if args.tiny else AXES
    vocabulary = 512 if args.tiny else 49152
    undo = fix_threads(args.threads)  # else ours gives way to other programs, and the plain loop keeps what it is left with
    try:
        details = {name: _axis(name, *axes[name], vocabulary, args) for name in args.axes}
    finally:
        undo()
    worst = min(
        ((name, what, found["work_over_time"]) for name, axis in details.items() for what, found in axis["growth"].items()),
        key=lambda entry: entry[2],
    )
    growth = details[worst[0]]["growth"][worst[1]]
    print(f"\nTime grows fastest against the work in {worst[1]} along {worst[0]}: work grew {growth['work']:.3g} times, "
          f"time {growth['time']:.3g} times.")  # fmt: skip
    settings = {key: str(value) if key == "output" else value for key, value in vars(args).items()}
    unit = f"growth of time in {worst[1]} along {worst[0]}, against the growth of the work"
    return Result("scaling", worst[2], growth["time"], growth["work"], unit, settings, details)


def _axis(
    name: str, field: str, values: tuple[int, ...], point: Point, vocabulary: int, args: argparse.Namespace
) -> dict[str, Any]:
    measured = []
    for value in values:
        measured.append(_measure(replace(point, **{field: value}), vocabulary, args))
        said = (f"{what} {each:.3g}" for what, each in measured[-1].seconds.items())
        print(f"{name} {value}, seconds: {', '.join(said)}", flush=True)
    growth = {what: _growth(values, [(m.seconds[what], m.flops[what]) for m in measured]) for what in ("sampling", "learning")}
    rows = [[str(value), *(cell for what in growth for cell in m.row(what))] for value, m in zip(values, measured, strict=True)]
    rows.append(["exponent", *(cell for what in growth for cell in (growth[what]["time_exponent"], None, None))])
    rows.append(["of the work", *(cell for what in growth for cell in (growth[what]["work_exponent"], None, None))])
    columns = (field, *(cell for what in growth for cell in (f"{what}, s", "GFLOP/s", "plain / ours")))
    print_table(f"Along {name}", columns, rows)
    taken = {what: [m.seconds[what] for m in measured] for what in measured[0].seconds}
    return {"values": list(values), "seconds": taken, "growth": growth, "calls": [m.calls for m in measured]}


@dataclass(frozen=True)
class Measured:
    """One point: seconds of sampling and of one update without a reference, the plain loop's as ``plain sampling`` and ``plain
    learning``, in each call and by the median, and the arithmetic of either."""

    calls: list[dict[str, float]]
    flops: dict[str, float]

    @property
    def seconds(self) -> dict[str, float]:
        return {what: median([call[what] for call in self.calls]) for what in self.calls[0]}

    def row(self, what: str) -> list[float | None]:
        ours, plain = self.seconds[what], self.seconds.get(f"plain {what}")
        return [ours, self.flops[what] / 1e9 / ours, plain and plain / ours]


def _measure(point: Point, vocabulary: int, args: argparse.Namespace) -> Measured:
    shape = llama_shape(point.width, point.layers, vocabulary)
    dtype = getattr(torch, str(with_dtype(ModelConfig(device=args.device)).dtype))
    policy = random_policy(shape, args.device, dtype)
    config = Config.model_validate({"algorithm": {"kl": None}, "optimizer": {"learning_rate": 1e-12}})
    scorer = make_scorer(policy, config.model)
    engine = make_engine(policy, config.rollout, scorer)
    learner = Learner(scorer, config)
    asked = random_prompts(point.prompts, point.prompt, vocabulary)
    limits = SamplingSettings(max_tokens=point.completion)
    groups = random_groups(asked, point.samples, point.completion, point.completion, vocabulary)
    actions: dict[str, Callable[[], Any]] = {
        "sampling": lambda: engine.sample(asked, point.samples, limits, seed=0, scope="scaling"),
        "learning": lambda: learner.learn(groups),
    }
    if not args.ours_only:
        model = random_policy(shape, args.device, dtype).model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-12)
        prompts, lengths = [list(one.token_ids) for one in asked], [[point.completion] * point.samples] * point.prompts
        actions["plain sampling"] = lambda: generate_forced(model, prompts, lengths, [1])
        actions["plain learning"] = lambda: _learn_plainly(model, optimizer, groups)
    for action in actions.values():
        action()
    calls = [{what: seconds(action) for what, action in actions.items()} for _ in range(args.repeats)]
    sizes = [(point.prompt, [point.completion] * point.samples)] * point.prompts
    return Measured(calls, {"sampling": forward_flops(shape, sizes), "learning": learning_flops(shape, sizes)})


def _learn_plainly(model: Any, optimizer: torch.optim.Optimizer, groups: Sequence[Group], tokens_at_once: int = 4096) -> None:
    """The gradient of - mean_i A_i mean_t log p_it, A_i being 1 or -1, and a step. All prompts have one length, and all completions."""
    rows = [
        (group.prompt.token_ids + one.token_ids, 2 * reward - 1)
        for group in groups
        for one, reward in zip(group.completions, group.rewards, strict=True)
    ]
    start, length = len(groups[0].prompt.token_ids), len(rows[0][0])
    at_once = max(1, tokens_at_once // length)
    for first in range(0, len(rows), at_once):
        ids, advantages = zip(*rows[first : first + at_once], strict=True)
        ids_BL = torch.tensor(ids, device=model.device)
        logits = model(ids_BL[:, :-1], use_cache=False, logits_to_keep=length - start).logits.float()
        logprobs_BL = torch.log_softmax(logits, -1).gather(-1, ids_BL[:, start:, None])[..., 0]
        weights_B = torch.tensor(advantages, device=model.device) / len(rows)
        (-(weights_B * logprobs_BL.mean(1)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    wait_for(model.device)


def _growth(values: tuple[int, ...], measured: list[tuple[float, float]]) -> dict[str, float]:
    times, works = [t for t, _ in measured], [w for _, w in measured]
    time, work = times[-1] / times[0], works[-1] / works[0]
    return {
        "time": time,
        "work": work,
        "work_over_time": work / time,
        "time_exponent": _slope(values, times),
        "work_exponent": _slope(values, works),
    }


def _slope(x: tuple[int, ...], y: list[float]) -> float:
    """Least squares in logarithms."""
    u, v = [math.log(a) for a in x], [math.log(b) for b in y]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / sum((a - mean_u) ** 2 for a in u)


def main() -> None:
    args = options().parse_args()
    finish(lambda: run(args), args.output)


if __name__ == "__main__":
    main()
