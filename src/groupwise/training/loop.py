"""The training loop: GRPO on one screen.

collect G completions a prompt -> score -> group-relative advantages -> pack -> update -> record
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from groupwise.config.schema import Config
from groupwise.distributed import open_world
from groupwise.errors import ConfigError
from groupwise.models.load import resolve_device
from groupwise.rewards.load import Rewards
from groupwise.streams import tolerate_broken_pipe
from groupwise.tracking.console import own_width
from groupwise.tracking.results import RunResult
from groupwise.training.resume import folder_of
from groupwise.training.run import StepReport
from groupwise.training.setup import Prepared
from groupwise.training.short_memory import explain_short_memory
from groupwise.training.start import finished_run, start

__all__ = ["train"]


@tolerate_broken_pipe()
def train(
    config: Config,
    *,
    recipe: str = "run",
    run_folder: str | Path | None = None,
    on_step: Callable[[StepReport], Any] | None = None,
    rewards: Rewards | None = None,
    console: Console | None = None,
    resume_from: str | Path | None = None,
    resume: bool = False,
    accept_changes: bool = False,
    check: Callable[[Prepared], Iterable[str]] | None = None,
    interruptible: bool = False,
) -> RunResult:
    """Train a policy as ``config`` says. Arguments and errors are ``groupwise.train``'s, but for ``check``, which looks at a new
    run before its weights are loaded: what it returns is said, and what it raises ends it. ``interruptible``: a second Ctrl-C
    raises KeyboardInterrupt, and does not end the process."""
    run_folder = None if run_folder is None else Path(run_folder)
    if resume and folder_of(config, run_folder) is None:
        raise ConfigError("resume=True goes on in a run's own folder, and none is named: give run_folder, or set output.folder")
    on_cpu, console = resolve_device(config.model.device).type == "cpu", console or Console(width=own_width())
    with open_world(on_cpu, config.training.process_timeout_s) as world:
        if resume and (finished := world.on_rank0(lambda: finished_run(config, run_folder, console, rewards))):
            return RunResult(*finished)
        with closing(
            start(
                config, world, recipe=recipe, run_folder=run_folder, rewards=rewards, console=console,
                resume_from=resume_from, resume=resume, accept_changes=accept_changes, check=check,
            )
        ) as run, run.signals, explain_short_memory(run.saved, run.short_of_memory):  # fmt: skip
            run.signals.interruptible = interruptible
            if run.is_new:
                run.evaluate_at_start("base")
                run.warm_start()
            done = run.begin_learning()
            run.evaluate_where_it_begins()
            # A run that was ended early, and stopped while it was judged, has no steps to make.
            steps = done if run.trained else run.config.training.steps
            with run.trackers.phase("GRPO", max(done, steps), "steps", done) as bar:
                for step in range(done, steps):
                    run.renew_reference_if_due(step)
                    rollout = run.collect(step, bar)
                    advantages = run.learn(rollout)
                    bar.advance()
                    if not run.record(step, rollout, advantages, on_step):
                        break
                    run.checkpoint_if_due(step)  # first: what ends the run while it is judged takes no step with it
                    run.evaluate_if_due(step)
            summary = run.finish()
        return RunResult(run.folder.path, summary)
