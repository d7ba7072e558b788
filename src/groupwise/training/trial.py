"""A few steps of a run, to see what they take on this machine; nothing is warmed up, judged or kept.

Completions are made to reach the limit, as a plan assumes: at a high temperature a model writes noise, which hardly ever ends by itself.
Such completions earn no reward worth the name, so a reward that is as good as drawn is added, and every group has something to learn from.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from groupwise.config.schema import Config
from groupwise.distributed import open_world
from groupwise.memory import peak_memory_bytes
from groupwise.models.load import resolve_device
from groupwise.training.run import StepReport
from groupwise.training.short_memory import explain_short_memory
from groupwise.training.start import start

__all__ = ["Trial", "run_trial", "trial_settings"]

_NOISE = 3.0
"""A temperature at which an end token is hardly likelier than any other."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What each step took: medians over the steps after the first, which finds nothing warm, unless it is the only one."""

    steps: int
    processes: int
    peak_bytes: int
    """Of the process, or of its GPU; of several processes the fullest one's."""
    sampling_s: float
    scoring_s: float
    learning_s: float
    """Passes of the policy and of the reference."""
    optimizer_s: float
    exchange_s: float
    """Adding up gradients over processes, waiting for the slowest included."""
    step_s: float
    sampled_tokens_per_s: float
    learnt_tokens_per_s: float
    prompt_tokens: int
    """The longest prompt."""
    completion_tokens: float
    """Mean length of the completions."""
    halvings: int
    """How often a pass ran out of memory and ``training.micro_batch_tokens`` was halved."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def trial_settings(steps: int, as_written: bool = False) -> list[str]:
    """Settings that make a trial of a recipe, to be put after its own.

    Args:
        steps: of learning.
        as_written: leave the recipe's temperature, so that completions end where the model ends them.
    """
    return [
        f"training.steps={steps}",
        "optimizer.warmup_steps=0",
        "algorithm.reference_updates=1",
        "output.folder=null",
        "output.checkpoint_every=0",
        "output.keep_best=false",
        "output.log_completions=0",
        "output.trackers=[jsonl]",
        *(
            []
            if as_written
            else [f"rollout.temperature={_NOISE}", f"evaluation.temperature={_NOISE}", "rollout.top_k=null", "rollout.top_p=1.0"]
        ),
    ]


def by_hash(completions: Sequence[Any], **_: Any) -> list[float]:
    """0 or 1, as good as drawn."""
    return [float(hashlib.md5(str(completion).encode()).digest()[0] % 2) for completion in completions]


def run_trial(config: Config, console: Console | None = None) -> Trial:
    """Train ``training.steps`` steps in a folder that is thrown away, and say what they took.

    Where a launcher started several processes all of them call this. Raises what ``train`` raises.
    """
    reports: list[StepReport] = []
    on_cpu = resolve_device(config.model.device).type == "cpu"
    with (
        tempfile.TemporaryDirectory(prefix="groupwise-trial-") as folder,
        open_world(on_cpu, config.training.process_timeout_s) as world,
        explain_short_memory(lambda: "nothing is lost: this was a trial"),
        closing(
            start(config, world, recipe="trial", run_folder=Path(folder) / "run", rewards={"by_hash": by_hash}, console=console)
        ) as run,
    ):
        run.begin_learning()
        with run.trackers.phase("trial", config.training.steps, "steps") as bar:
            for step in range(config.training.steps):
                rollout = run.collect(step, bar)
                advantages = run.learn(rollout)
                bar.advance()
                run.record(step, rollout, advantages, reports.append)
        peak = max(world.gather(peak_memory_bytes(run.scorer.device.type)))
        return world.first_does(lambda: _summed_up(reports, int(peak), world.size))


def _summed_up(reports: Sequence[StepReport], peak_bytes: int, processes: int) -> Trial:
    warm: list[Mapping[str, float]] = [report.metrics for report in reports[1:] or reports]
    groups = [group for report in reports for group in report.groups]
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]

    def median(*names: str) -> float:
        return statistics.median(sum(metrics.get(name, 0.0) for name in names) for metrics in warm)

    return Trial(
        steps=len(reports),
        processes=processes,
        peak_bytes=peak_bytes,
        sampling_s=median("time/sample_s"),
        scoring_s=median("time/score_s"),
        learning_s=median("time/learn_s", "time/reference_s"),
        optimizer_s=median("time/optimizer_s"),
        exchange_s=median("time/exchange_s"),
        step_s=median("time/step_s"),
        sampled_tokens_per_s=median("speed/sampled_tokens_per_s"),
        learnt_tokens_per_s=median("speed/learnt_tokens_per_s"),
        prompt_tokens=max((len(group.prompt.token_ids) for group in groups), default=0),
        completion_tokens=statistics.fmean(lengths) if lengths else 0.0,
        halvings=int(sum(report.metrics.get("memory/halvings", 0.0) for report in reports)),
    )
