"""Episodes of several turns against single completions of the same tokens, and with slow tools against tools that answer at once.

    python -m benchmarks.episodes [--episodes 32] [--turns 4] [--latency 1.0] [--repeats 5]

The embedded model in bf16 samples turns of 16 to 48 tokens, the same on every side, and a tool answers each but the last. ``cost`` is the
time of the episodes over that of single completions with as many tokens, given ones included. ``throughput`` is the speed with tools that
take so many seconds, over that with tools that answer at once. ``by prefixes`` computes all of an episode anew in each turn.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import Result, finish, median, parser, print_table
from benchmarks.workload import prompts
from groupwise.config.schema import ModelConfig
from groupwise.engines import Engine, SampleRequest, SamplingSettings
from groupwise.engines.base import Progress
from groupwise.engines.builtin import engine as builtin
from groupwise.episodes import EpisodeEngine, Episodes
from groupwise.episodes.environments import Partner, Reply
from groupwise.episodes.formats import FORMATS
from groupwise.episodes.templates import TurnTemplate
from groupwise.memory import keep_freed_memory
from groupwise.models.decoder import Decoder
from groupwise.models.embedded import EMBEDDED_NAME
from groupwise.models.load import load_policy
from groupwise.types import Completion, Problem

__all__ = ["main", "run"]

_ANSWER = "The result is 1274."


def options() -> argparse.ArgumentParser:
    out = parser("episodes", __doc__)
    out.add_argument("--episodes", type=int, default=32, help="in groups of 8")
    out.add_argument("--rows", type=int, default=256, help="sequences at once")
    out.add_argument("--turns", type=int, default=4)
    out.add_argument("--latency", type=float, default=1.0, help="seconds that a slow tool takes")
    out.add_argument("--repeats", type=int, default=5, help="of each side, after one to warm up; sides take turns")
    out.add_argument("--model", default=EMBEDDED_NAME, help="the embedded model, or a folder")
    out.add_argument("--max-length", type=int, default=48, help="tokens of the longest turn; the shortest has a third")
    return out


class _Prefixes(Engine):
    """An engine that knows no turns."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        return self.engine.serve(request, on_progress)

    def refresh(self, policy_version: int) -> None:
        self.engine.refresh(policy_version)


class _Answers:
    """Answers every turn, after ``seconds``."""

    role: str | None = None

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reply(self, turn: Completion) -> Reply:
        time.sleep(self.seconds)
        return Reply((_ANSWER,))

    def reward(self, unheard: Completion | None) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class _Episodes(Episodes):
    """Whose turns are answered whatever they say."""

    seconds: float = 0.0

    def partner(self, problem: Problem) -> tuple[Partner, str | None]:
        return _Answers(self.seconds), None


class Sides:
    """What is compared: each is a function that samples all of it, and returns how many tokens were sampled."""

    def __init__(self, args: argparse.Namespace) -> None:
        policy = load_policy(ModelConfig(name=args.model, device="cpu"))
        self.engine = builtin.BuiltinEngine(Decoder(policy.model), policy.tokenizer, policy.end_token_ids, max_rows=args.rows)
        self.template = TurnTemplate(policy.tokenizer, policy.end_token_ids)
        self.ends = (policy.end_token_ids[0], next(t for t in range(99) if t not in policy.end_token_ids))
        self.turns, self.samples = args.turns, min(8, args.episodes)
        self.shortest, self.longest = args.max_length // 3, args.max_length
        self.prompts = prompts(policy.tokenizer, max(1, args.episodes // 8))
        self.given = len(self.template.given([_ANSWER]))
        self.seed = 0

    def length(self, problem_id: str, sample: int, turn: int) -> int:
        """Tokens of a turn: a function of its name."""
        return random.Random(f"{self.seed} {problem_id} {sample} {turn}").randint(self.shortest, self.longest)

    def sampled(self, problem_id: str, sample: int) -> int:
        return sum(self.length(problem_id, sample, turn) for turn in range(self.turns))

    @property
    def total(self) -> int:
        """Sampled tokens of all episodes."""
        return sum(self.sampled(p.problem.id, sample) for p in self.prompts for sample in range(self.samples))

    def single(self) -> None:
        """Completions of one turn, as long as the episodes."""
        given = (self.turns - 1) * self.given
        with self._forced(lambda name, sample, turn: given + self.sampled(name, sample)):
            self._sample(self.engine)

    def episodes(self, seconds: float, by_prefixes: bool) -> None:
        engine = _Prefixes(self.engine) if by_prefixes else self.engine
        at_once = len(self.prompts) * self.samples
        played = _Episodes({}, None, FORMATS["tags"], self.template, self.turns, 60.0, at_once, seconds=seconds)
        with self._forced(self.length):
            self._sample(EpisodeEngine(engine, played))

    def _sample(self, engine: Engine) -> None:
        settings = SamplingSettings(max_tokens=self.turns * (self.longest + self.given))
        groups = engine.sample(self.prompts, self.samples, settings, seed=self.seed, scope="benchmark")
        tokens = sum(len(c.token_ids) for group in groups for c in group)
        expected = self.total + len(self.prompts) * self.samples * (self.turns - 1) * self.given
        assert tokens == expected, f"{tokens} tokens, where {expected} were asked for"

    @contextmanager
    def _forced(self, length: Callable[[str, int, int], int]) -> Generator[None]:
        """Turns of the engine end after ``length(problem, sample, turn)`` tokens, and not before."""
        take, (end, other) = builtin._Batch._take, self.ends

        def forced(batch: Any, tokens: list[int], logprobs: list[float], rows: list[Any]) -> None:
            made = []
            for token, row in zip(tokens, rows, strict=True):
                name, _, rest = batch.call.request.prompts[row.index].problem.id.partition("\x1f")
                named = dict(part.split("=") for part in rest.split("\x1f")) if rest else {}
                wanted = length(name, int(named.get("sample", row.sample)), int(named.get("turn", row.turn)))
                going_on = other if token in self.engine.end_token_ids else token
                made.append(end if len(row.tokens) + 1 - row.start == wanted else going_on)
            take(batch, made, logprobs, rows)

        builtin._Batch._take = forced  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            builtin._Batch._take = take  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> Result:
    """Measure, print the table, and return the result (not yet finished)."""
    sides = Sides(args)
    slow = f"tools of {args.latency:g} s"
    ways: dict[str, Callable[[], None]] = {
        "one completion": sides.single,
        "episodes": lambda: sides.episodes(0.0, False),
        "episodes, by prefixes": lambda: sides.episodes(0.0, True),
        slow: lambda: sides.episodes(args.latency, False),
        f"{slow}, by prefixes": lambda: sides.episodes(args.latency, True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(-1, args.repeats):
        sides.seed = repeat + 1
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if repeat >= 0:
                times[name].append(time.perf_counter() - started)
                speeds[name].append(sides.total / times[name][-1])
    seconds = {name: median(values) for name, values in times.items()}
    cost = median([a / b for a, b in zip(times["episodes"], times["one completion"], strict=True)])
    throughput = median([a / b for a, b in zip(speeds[slow], speeds["episodes"], strict=True)])
    print_table(
        f"{args.episodes} episodes of {args.turns} turns, medians of {args.repeats}",
        ["", "s", "sampled tokens/s", "time to one completion's"],
        [[name, s, median(speeds[name]), s / seconds["one completion"]] for name, s in seconds.items()],
    )
    print(f"\ncost {cost:.3f} (at most 1.15); throughput with {slow} against none {throughput:.3f}")
    settings = {key: str(value) if key == "output" else value for key, value in vars(args).items()}
    details = {"cost": cost, "throughput": throughput, "seconds": seconds, "given_tokens_per_answer": sides.given}
    return Result("episodes", 1 / cost, seconds["episodes"], seconds["one completion"], "s", settings, details)


def main() -> None:
    args = options().parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    finish(lambda: run(args), args.output)


if __name__ == "__main__":
    main()
