"""Where a run is written: a folder made or found again, locked, and with whatever there is in it to resume from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from groupwise.config.schema import Config
from groupwise.errors import CheckpointError
from groupwise.evaluation import Evaluation
from groupwise.tracking import ConsoleTracker, RunFolder, Trackers
from groupwise.tracking.run_folder import cut_back, ending_of, set_ending_aside
from groupwise.training.checkpoint import MODEL, latest_checkpoint, read_state
from groupwise.training.resume import check_drift, continue_in, earlier_evaluations, folder_of, unfinished_note
from groupwise.training.setup import Prepared

__all__ = ["Beginning", "Place", "nothing_to_carry_on"]


@dataclass(frozen=True)
class Beginning:
    """From what a run begins."""

    path: Path
    """Its folder."""
    checkpoint: Path | None
    evaluations: list[Evaluation]
    """Those before."""
    done: int
    """Steps."""
    trained: bool
    """Whether its final model is there already, and only has to be judged."""

    @property
    def model(self) -> Path | None:
        """The folder of the policy; None at the very beginning."""
        if self.trained:
            return RunFolder(self.path).final_model
        return self.checkpoint / MODEL if self.checkpoint else None


def nothing_to_carry_on(config: Config, run_folder: Path | None, console: Console) -> tuple[Path, dict[str, Any]] | None:
    """The folder and the summary of a run that came to its end, and of which no more steps are asked; that is said. Else None.

    Raises CheckpointError where more are asked, and it kept no checkpoint to make them from.
    """
    wanted = folder_of(config, run_folder)
    folder = RunFolder((wanted or Path()).expanduser())
    ending = None if wanted is None else ending_of(folder)
    if ending is None:
        return None
    if config.training.epochs is None and config.training.steps > ending.asked:
        if latest_checkpoint(folder.checkpoints) is None:
            raise no_way_on(folder, ending.steps, config)
        return None
    Trackers([ConsoleTracker(console)]).say(f"{folder.path} finished after step {ending.steps}: nothing to resume.", "green")
    return folder.path, ending.summary


def no_way_on(folder: RunFolder, steps: int, config: Config) -> CheckpointError:
    return CheckpointError(
        f"the run in {str(folder.path)!r} made its {steps} steps and kept no checkpoint (output.checkpoint_every), so it cannot be "
        f"continued to step {config.training.steps}: begin a run of its own with model.name={folder.final_model}, or leave "
        "training.steps as it was"
    )


@dataclass
class Place:
    """What is needed to find, check or make it; ``take`` is for the first process alone."""

    config: Config
    prepared: Prepared
    recipe: str
    run_folder: Path | None
    carry_on: Path | None
    accept_changes: bool
    checkpoint: Path | None
    said: list[str]

    def take(self, opened: list[RunFolder]) -> Beginning:
        """From what the run begins; the folder itself, locked, goes into ``opened``."""
        folder, checkpoint = None, self.checkpoint
        if self.carry_on:
            folder, checkpoint = continue_in(self.carry_on.expanduser(), self.said.append)
        elif folder_of(self.config, self.run_folder) is None and (note := unfinished_note(self.recipe)):
            self.said.append(note)
        carried_on = folder is not None
        folder = folder or RunFolder.create(self.config, self.run_folder, self.recipe)
        try:
            trained = self.trained_in(folder, checkpoint) if carried_on else None
            state = trained or (read_state(checkpoint) if checkpoint else {})
            check_drift(state, self.prepared, self.said.append, accept=self.accept_changes or not carried_on)
            if carried_on:
                self.go_on_in(folder, state)
            if not folder.environment.is_file():  # killed right after its settings were written
                folder.write_start(self.config, self.recipe, None)
        except BaseException:
            folder.release()
            raise
        opened.append(folder)
        evaluations = earlier_evaluations(state, folder) if carried_on else []
        return Beginning(
            folder.path, None if trained else checkpoint, evaluations, int(state.get("step", 0)), trained is not None
        )

    def trained_in(self, folder: RunFolder, checkpoint: Path | None) -> dict[str, Any] | None:
        """What the run noted when its final model was whole, where it was ended before that had been judged."""
        try:
            state: dict[str, Any] = json.loads(folder.trained.read_bytes())
            step, asked = int(state["step"]), int(state["steps_asked"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if ending_of(folder) is not None or not folder.final_model.is_dir():
            return None
        if self.config.training.steps <= asked:
            return state
        if checkpoint is None:
            raise no_way_on(folder, step, self.config)
        return None

    def go_on_in(self, folder: RunFolder, state: dict[str, Any]) -> None:
        ending = ending_of(folder)
        if ending is not None:
            if self.config.training.steps <= ending.asked:  # it came to its end since it was looked at first
                raise CheckpointError(f"the run in {str(folder.path)!r} has finished meanwhile: there is nothing to resume")
            if not state:
                raise no_way_on(folder, ending.steps, self.config)
            set_ending_aside(folder, ending.steps)
            self.said.append(f"It had finished after step {ending.steps}; that model stays until the next one is written.")
        if "steps_asked" not in state:
            folder.trained.unlink(missing_ok=True)
        cut_back(folder, int(state["step"]) if state else None)
        if not state:
            self.said.append(f"{folder.path} holds no checkpoint yet: the run starts from the beginning.")
