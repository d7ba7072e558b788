"""A few steps of a run, or a short run from loading to the final model, to see what it takes on this machine; nothing is kept.

Completions are made to reach the limit, as a plan assumes: at a high temperature a model writes noise, which hardly ever ends by itself.
Such completions earn no reward worth the name, so a reward that is as good as drawn is added, and every group has something to learn from.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from groupwise.config.schema import Config
from groupwise.distributed import open_world
from groupwise.limits import VLLM_HOTTEST
from groupwise.memory import PeakByPhase
from groupwise.models.load import resolve_device
from groupwise.planner import Phase
from groupwise.training.ending import save_final_model
from groupwise.training.run import StepReport
from groupwise.training.short_memory import explain_short_memory
from groupwise.training.start import start

__all__ = ["Trial", "planned_peaks", "run_trial", "trial_settings"]

_NOISE = 3.0
"""A temperature at which an end token is hardly likelier than any other."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What each step took: medians over the steps after the first, which finds nothing warm, unless it is the only one."""

    steps: int
    processes: int
    peak_bytes: int
    """Peak memory of the process, or of its GPU; the highest of several processes."""
    phase_bytes: dict[str, int]
    """The same of each phase, where the system lets peaks be counted again."""
    step_bytes: list[int]
    """The same of each step, with the evaluation and the checkpoint after it."""
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


def trial_settings(
    steps: int, as_written: bool = False, whole: bool = False, reference: bool = False, by_vllm: bool = False
) -> list[str]:
    """Settings that make a trial of a recipe, to be put after its own.

    Args:
        steps: of learning.
        as_written: leave the recipe's temperature, so that completions end where the model ends them.
        whole: write a checkpoint after each step, and judge before the last one.
        reference: whether the recipe keeps one, which the trial does not renew.
        by_vllm: whether vLLM samples, which takes no temperature above 2.
    """
    noise = min(_NOISE, VLLM_HOTTEST) if by_vllm else _NOISE
    return [
        f"training.steps={steps}",
        "training.epochs=null",
        "optimizer.warmup_steps=0",
        *(["algorithm.kl.reference_updates=1"] if reference else []),
        f"evaluation.every={max(1, steps - 1) if whole else 0}",
        "evaluation.at_start=false",
        "output.folder=null",
        f"output.checkpoint_every={int(whole)}",
        "output.keep_checkpoints=1",
        "output.keep_best=false",
        "output.log_completions=0",
        "output.trackers=[jsonl]",
        *(
            []
            if as_written
            else [f"rollout.temperature={noise}", f"evaluation.temperature={noise}", "rollout.top_k=null", "rollout.top_p=1.0"]
        ),
    ]


def by_hash(completions: Sequence[Any], **_: Any) -> list[float]:
    """0 or 1, as good as drawn."""
    return [float(hashlib.md5(str(completion).encode()).digest()[0] % 2) for completion in completions]


def run_trial(config: Config, console: Console | None = None, *, whole: bool = False) -> Trial:
    """Train ``training.steps`` steps in a folder that is thrown away, and say what they took.

    ``whole``: warm up, judge and write checkpoints as ``config`` says, and at the end write and judge the final model, as ``train`` does.
    Where a launcher started several processes all of them call this. Raises what ``train`` raises.
    """
    reports: list[StepReport] = []
    by_step: list[int] = []
    device = resolve_device(config.model.device).type
    peaks = PeakByPhase(device)
    with (
        tempfile.TemporaryDirectory(prefix="groupwise-trial-") as folder,
        open_world(device == "cpu", config.training.process_timeout_s) as world,
        explain_short_memory(lambda: "nothing is lost: this was a trial"),
        ExitStack() as opened,
    ):
        with peaks.phase("loading"):
            run = start(
                config, world, recipe="trial", run_folder=Path(folder) / "run", rewards={"by_hash": by_hash}, console=console
            )
        opened.enter_context(closing(run))
        if whole:
            with peaks.phase("warm start"):
                run.warm_start()
        run.begin_learning()
        with run.trackers.phase("trial", config.training.steps, "steps") as bar:
            for step in range(config.training.steps):
                before = len(peaks.measured)
                with peaks.phase("checkpoint" if run.writer.is_writing else "sampling"):
                    rollout = run.collect(step, bar)
                with peaks.phase("learning"):
                    advantages = run.learn(rollout)
                bar.advance()
                run.record(step, rollout, advantages, reports.append)
                if whole:  # the other way round in a run: here each is measured without the other
                    with peaks.phase("evaluation"):
                        run.evaluate_if_due(step)
                    with peaks.phase("checkpoint"):
                        run.checkpoint_if_due(step)
                by_step.append(max((peak for _, peak in peaks.measured[before:]), default=peaks.note()))
        if whole:
            with peaks.phase("final model"):
                save_final_model(run)
            with peaks.phase("evaluation"):
                run.evaluate("final")
        peaks.note()
        of_ranks = world.all_gather_object((peaks.highest, peaks.by_name(), by_step))
        return world.on_rank0(lambda: _summed_up(reports, of_ranks))


def planned_peaks(phases: Iterable[Phase]) -> dict[str, int]:
    """A plan's phases under the names that a trial measures them by."""
    peaks: dict[str, int] = {}
    for phase in phases:
        name = _WITHIN.get(phase.name, phase.name)
        peaks[name] = max(peaks.get(name, 0), phase.bytes)
    return peaks


_WITHIN = {"reference": "learning", "output head": "learning", "optimiser step": "learning"}
"""What ``Run.learn`` consists of."""


def _summed_up(reports: Sequence[StepReport], peaks: Sequence[tuple[int, dict[str, int], list[int]]]) -> Trial:
    """``peaks``: of each process the highest, those of the phases, and those of the steps."""
    warm: list[Mapping[str, float]] = [report.metrics for report in reports[1:] or reports]
    groups = [group for report in reports for group in report.groups]
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]

    def median(*names: str) -> float:
        return statistics.median(sum(metrics.get(name, 0.0) for name in names) for metrics in warm)

    return Trial(
        steps=len(reports),
        processes=len(peaks),
        peak_bytes=max(highest for highest, _, _ in peaks),
        phase_bytes={name: max(phases[name] for _, phases, _ in peaks) for name in peaks[0][1]},
        step_bytes=[max(of_step) for of_step in zip(*(steps for _, _, steps in peaks), strict=True)],
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
