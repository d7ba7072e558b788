"""The end of a run: its model, written before it is judged, and what it came to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from groupwise.errors import ModelError, TrainingError
from groupwise.evaluation import build_summary
from groupwise.memory import release_freed_memory
from groupwise.models.load import Policy, save_model
from groupwise.tracking.files import write_json
from groupwise.training.resume import about_run

if TYPE_CHECKING:
    from groupwise.training.run import Run

__all__ = ["save_final_model", "write_summary"]


def save_final_model(run: Run) -> None:
    """Save the final model, a collective call. Raises TrainingError when the disk does not take it; an earlier end's model is then still
    there."""
    release_freed_memory()  # steps need none of it any more
    policy = run.sharding.whole_policy(run.policy)
    run.world.on_rank0(lambda: write_model(run, policy))


def write_model(run: Run, policy: Policy | None) -> None:
    """The model, in place of an earlier end's, and what else a run needs that resumes with nothing but its judgement."""
    assert policy is not None, "the first process has the whole weights"
    folder = run.folder
    about = {"step": run.done, "steps_asked": run.config.training.steps, **about_run(run.prepared, run.evaluations)}
    try:
        if folder.final_model.exists():
            save_model(policy, folder.new_model)
            folder.put_new_model()
        else:
            save_model(policy, folder.final_model)
        run.writer.finish()  # a run that resumes with the judgement alone writes no checkpoint any more
        write_json(folder.trained, about)
    except OSError as error:
        raise TrainingError(f"{folder.lost(folder.final_model, error)}; {run.saved()}") from error
    except ModelError as error:
        raise TrainingError(f"{error}; {run.saved()}") from error


def write_summary(run: Run, peak_bytes: float) -> dict[str, Any]:
    """What the run came to, written and shown. With it the run is finished."""
    summary = build_summary(
        run.evaluations, time.perf_counter() - run.started, run.config, recipe=run.recipe, style=run.style,
        folder=run.folder.path, final_model=run.folder.final_model,
        extra={
            "steps": run.done, "steps_asked": run.config.training.steps,
            "peak_memory_gib": round(peak_bytes / 2**30, 3), "processes": run.world.size, "sharding": run.sharding.name,
        },
    )  # fmt: skip
    run.folder.write_summary(summary)
    run.folder.trained.unlink(missing_ok=True)
    run.trackers.show_summary(summary)
    return summary
