"""Where a run begins: everything checked, its folder made or found again and locked, and the weights loaded."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from groupwise.config.schema import Config, TrainingConfig
from groupwise.distributed import World
from groupwise.distributed.sharding import chosen_sharding
from groupwise.engines import Engine, make_engine
from groupwise.engines.builtin.fast_paths import Choice, check_fast_paths, facts, take
from groupwise.episodes import playing
from groupwise.errors import CheckpointError
from groupwise.evaluation import Evaluation
from groupwise.memory import (
    give_back_freed_memory,
    keep_freed_memory,
    release_freed_memory,
    reset_peak_memory,
    use_expandable_segments,
)
from groupwise.models.adapters import load_adapter
from groupwise.models.decoder import MergedDecoder
from groupwise.models.devices import with_dtype
from groupwise.models.load import Policy, load_policy, resolve_device
from groupwise.models.scorer import Scorer, make_scorer
from groupwise.rewards.load import Rewards
from groupwise.threads import fix_threads
from groupwise.tracking import ConsoleTracker, RunFolder, Trackers, make_trackers
from groupwise.tracking.run_folder import check_new, cut_back, ending_of, set_ending_aside
from groupwise.training.checkpoint import MODEL
from groupwise.training.checkpoint_folder import find_checkpoint, latest_checkpoint, read_state
from groupwise.training.resume import (
    cannot_continue,
    check_drift,
    continue_in,
    earlier_evaluations,
    folder_of,
    has_other_settings,
    refuse_differing,
    refuse_inside_a_step,
    refuse_to_share,
    trained_in,
    unfinished_note,
)
from groupwise.training.run import Run
from groupwise.training.setup import Prepared, prepare
from groupwise.training.sharding import Sharding, loading_device, make_sharding
from groupwise.training.sharding.divided import tie_as_first
from groupwise.training.short_memory import explain_short_memory, planned, short_of_memory
from groupwise.training.stopping import StopSignals

__all__ = ["Beginning", "RunFolderResolver", "finished_run", "start"]


@dataclass(frozen=True)
class Beginning:
    """What a run begins from."""

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


def finished_run(
    config: Config, run_folder: Path | None, console: Console, rewards: Rewards | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """The folder and the summary of a run that came to its end, and of which no more steps are asked; that is said. Else None.

    Raises CheckpointError where more are asked, and it kept no checkpoint to make them from.
    """
    wanted = folder_of(config, run_folder)
    folder = RunFolder((wanted or Path()).expanduser())
    ending = None if wanted is None else ending_of(folder)
    if ending is None:
        return None
    if config.training.epochs is not None:  # its steps are counted from the problems
        prepared = prepare(config, rewards, folder=run_folder)
        prepared.rewards.close()
        config = prepared.config
    if config.training.steps > ending.asked:
        if latest_checkpoint(folder.checkpoints) is None:
            raise cannot_continue(folder, ending.steps, config)
        return None
    Trackers([ConsoleTracker(console)]).say(f"{folder.path} finished after step {ending.steps}: nothing to resume.", "green")
    return folder.path, ending.summary


@dataclass
class RunFolderResolver:
    """Makes a run's folder or finds it again, with what there is in it to resume from; for the first process alone."""

    config: Config
    prepared: Prepared
    recipe: str
    run_folder: Path | None
    resumed: Path | None
    """The folder that was asked to be resumed."""
    accept_changes: bool
    checkpoint: Path | None
    said: list[str]
    processes: int = 1
    state: dict[str, Any] | None = None
    """What a run goes on with that began before; known once that is resolved."""

    def resolve(self, opened: list[RunFolder]) -> Beginning:
        """Find out what the run begins from; the folder itself, locked, goes into ``opened``, also where this fails later."""
        folder, found, checkpoint = None, None, self.checkpoint
        if self.resumed:
            path = self.resumed.expanduser()
            try:
                folder, found = continue_in(path, self.said.append)
            except OSError as error:
                raise RunFolder.lost(path, error) from error
        elif folder_of(self.config, self.run_folder) is None and (note := unfinished_note(self.recipe)):
            self.said.append(note)
        reopened = folder is not None
        folder = folder or RunFolder.create(self.config, self.run_folder, self.recipe)
        opened.append(folder)
        try:
            trained = trained_in(folder, found, self.config) if reopened else None
            if reopened and (found is not None or trained is not None or ending_of(folder) is not None):
                checkpoint = found  # until it has one of its own, a run begins where it was told to
            state = trained or (read_state(checkpoint) if checkpoint else {})
            own = reopened and (trained is not None or found is not None)
            refuse_to_share(state, checkpoint, self.processes)
            refuse_inside_a_step(state, checkpoint, self.config)
            check_drift(state, self.prepared, self.said.append, accept=self.accept_changes or not own)
            if reopened:
                self.check_reopened(folder, state)
                self.state = state
            if not folder.environment.is_file():  # killed right after its settings were written
                folder.write_environment(self.config, self.recipe, None)
        except OSError as error:
            raise folder.lost(folder.path, error) from error
        evaluations = earlier_evaluations(state, folder, self.said.append) if own else []
        return Beginning(
            folder.path, None if trained else checkpoint, evaluations, int(state.get("step", 0)), trained is not None
        )

    def check_reopened(self, folder: RunFolder, state: dict[str, Any]) -> None:
        """Raise CheckpointError, or OSError, where the run cannot go on; it is still as it was."""
        ending = ending_of(folder)
        if ending is not None:
            if self.config.training.steps <= ending.asked:  # it came to its end since it was looked at first
                raise CheckpointError(f"the run in {str(folder.path)!r} has finished meanwhile: there is nothing to resume")
            if not state:
                raise cannot_continue(folder, ending.steps, self.config)
            self.said.append(f"It had finished after step {ending.steps}; that model stays until the next one is written.")
        check_room(folder)
        if not state:
            self.said.append(f"{folder.path} holds no checkpoint yet: the run starts from the beginning.")

    def take_back(self, folder: RunFolder) -> None:
        """Leave of a run that began before what it had written at the step that it goes on from. The last thing of a start: one that
        is refused or interrupted before leaves a finished run finished. Raises TrainingError on a full disk."""
        if self.state is None:
            return
        try:
            ending = ending_of(folder)
            if ending is not None:  # before `cut_back`, which takes the last evaluations of any other end away
                set_ending_aside(folder, ending.steps)
            if "steps_asked" not in self.state:
                folder.trained.unlink(missing_ok=True)
            step = int(self.state["step"]) if self.state else None
            cut_back(folder, step)
            # After `ending_of`, which of an early version's run reads the steps there.
            if has_other_settings(folder, self.config):
                folder.replace_settings(self.config, step or 0)
        except OSError as error:
            raise folder.lost(folder.path, error) from error


def check_room(folder: RunFolder) -> None:
    """Raise OSError where the disk has no room for what `cut_back` writes again: the folder is then still as it was."""
    longest = max((path.stat().st_size for path in (folder.metrics, folder.completions) if path.is_file()), default=0)
    with tempfile.TemporaryFile(dir=folder.path) as trial:
        trial.write(b"room")
        trial.flush()
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(trial.fileno(), 0, max(longest, 1))


def start(
    config: Config,
    world: World | None = None,
    *,
    recipe: str = "run",
    run_folder: Path | None = None,
    rewards: Rewards | None = None,
    console: Console | None = None,
    resume_from: str | Path | None = None,
    resume: bool = False,
    accept_changes: bool = False,
    check: Callable[[Prepared], Iterable[str]] | None = None,
) -> Run:
    """Check everything, make the run's folder, then load the weights: what can be wrong comes to light first.

    ``check`` looks at a new run before its folder is made: what it returns is said, and what it raises ends it.
    """
    world = world or World()
    config = config.model_copy(update={"model": with_dtype(config.model)})  # the run's config.yaml says which one it was
    said: list[str] = []
    own = folder_of(config, run_folder)
    if not resume:  # before data are read and rewards are tried
        world.on_rank0(partial(check_new, own and own.expanduser()))
    wanted = own if resume else None

    def named() -> Path | None:
        """The checkpoint to begin from, which need not be there any more once the run has one of its own."""
        there = None if wanted is None else RunFolder(wanted.expanduser())
        begun = there is not None and (latest_checkpoint(there.checkpoints) is not None or there.trained.exists())
        return None if begun or not resume_from else find_checkpoint(Path(resume_from).expanduser(), said.append)

    checkpoint = world.on_rank0(named) if resume_from else None
    started = time.perf_counter()
    _set_up_process(config, world)
    prepared = prepare(config, rewards, folder=run_folder)
    config, opened, trackers, undo = prepared.config, list[RunFolder](), Trackers(), ExitStack()

    def checked() -> list[str]:
        """Of a new run: whether it is one is found in the first process, since others may not see the folder, or not yet."""
        if check is None or (wanted is not None and wanted.expanduser().is_dir()):
            return []
        told = list(check(prepared))
        prepared.rewards.close(sandboxes_alone=True)  # the next is made when the run's folder is there, and hides it
        return told

    try:
        _make_repeatable(config.training, undo)
        refuse_differing(prepared, world)  # nobody writes before all have found everything in order
        world.try_gpus()
        release_freed_memory()  # of an earlier run of this process, whose peak is not this one's
        reset_peak_memory(resolve_device(config.model.device).type)
        if check is not None and checkpoint is None:
            said += world.on_rank0(checked)
        resolver = RunFolderResolver(config, prepared, recipe, run_folder, wanted, accept_changes, checkpoint, said, world.size)
        beginning = world.on_rank0(lambda: resolver.resolve(opened))
        folder = opened[0] if opened else RunFolder(beginning.path)
        if world.is_first:
            trackers = make_trackers(config, folder, console, beginning.done)
        _say(trackers, said, prepared.notes)
        for sentence in prepared.rewards.load() if world.is_first or not prepared.rewards.by_one else ():
            trackers.say(sentence, "dim")
        _refuse_unseen(beginning.model, world)
        remedy = short_of_memory(planned(config, resolve_device(config.model.device), processes=world.size))
        with explain_short_memory(lambda: "nothing is lost: the run had not begun", remedy):
            parts = _load_parts(config, world, beginning.model, prepared, folder, trackers)
        release_freed_memory()
        world.on_rank0(partial(resolver.take_back, folder))
        elapsed_s = folder.elapsed_s()
    except BaseException:
        with ExitStack() as begun:  # the last is closed first, and an interrupt of one ends no other
            for folder in opened:
                begun.callback(folder.release)
                begun.callback(folder.withdraw)
            begun.callback(trackers.close)
            begun.callback(prepared.rewards.close)
            begun.callback(undo.close)
            raise
    return Run(
        config, world, recipe, prepared, folder, trackers, *parts, started - elapsed_s, beginning.checkpoint, trained=beginning.trained,
        evaluations=beginning.evaluations, done=beginning.done, signals=StopSignals(at_once=world.size == 1), undo=undo,
    )  # fmt: skip


def _refuse_unseen(earlier: Path | None, world: World) -> None:
    """Raise CheckpointError in all processes where one does not see what they all are about to read. A collective call."""
    sees = world.all_gather_object(earlier is None or earlier.is_dir())
    if not all(sees):
        raise CheckpointError(
            f"process {sees.index(False)} of {world.size} does not see {earlier}: a run's folder must be on a disk that all machines "
            "share, and its name the same for all of them"
        )


def _load_parts(
    config: Config, world: World, earlier: Path | None, prepared: Prepared, folder: RunFolder, trackers: Trackers
) -> tuple[Policy, Scorer, Sharding, Engine]:
    """The policy, what computes it, how its weights are divided, and what samples. ``earlier``: a model that the run resumes with."""
    aside = loading_device(config, world)
    policy = replace(_load(config, earlier, aside), adapter_only=config.output.adapter_only)
    if aside is not None and config.model.lora is None:
        tie_as_first(policy.model, world)
    shape, dtype, device = policy.model.config, getattr(torch, config.model.dtype), resolve_device(config.model.device)
    # In the first process alone: they go by clocks too, so processes would find different ones. A run that goes on has its own.
    take(shape, dtype, device, world.on_rank0(lambda: _fast_paths(shape, dtype, device, folder, trackers)))
    scorer = make_scorer(policy, config.model, resolve_device(config.model.device) if aside else None)
    sharding = make_sharding(config, world, scorer)
    divided = chosen_sharding(config.training.sharding, world.size) != "none"
    if isinstance(scorer, MergedDecoder) and not divided and config.rollout.engine in ("auto", "builtin"):
        scorer.store_in_16_bits()
    engine = playing(make_engine(policy, config.rollout, scorer, world, sharding.whole_policy), prepared.episodes)
    return policy, scorer, sharding, engine


def _fast_paths(shape: Any, dtype: torch.dtype, device: torch.device, folder: RunFolder, trackers: Trackers) -> list[Choice]:
    """Those that the run began with, or what is found now; written into its environment, and what is left out is said."""
    choices = check_fast_paths(shape, dtype, device, earlier=folder.read_environment())
    folder.add_to_environment(**facts(shape, dtype, device, choices))
    for choice in choices:
        if choice.notice:
            trackers.say(choice.notice, "yellow")
    return choices


def _set_up_process(config: Config, world: World) -> None:
    """How this process keeps memory that was freed, as the settings want it."""
    divided = chosen_sharding(config.training.sharding, world.size) != "none"
    give_back_freed_memory() if divided else keep_freed_memory()
    use_expandable_segments(not config.rollout.engine_is_external)


def _make_repeatable(training: TrainingConfig, undo: ExitStack) -> None:
    """Threads and kernels of this process as the settings want them, until ``undo`` is closed: later runs have their own."""
    if training.threads or training.deterministic:
        undo.callback(fix_threads(training.threads))
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its sums only with a workspace of fixed size
        before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        undo.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
        torch.use_deterministic_algorithms(True)


def _say(trackers: Trackers, said: list[str], notes: list[str]) -> None:
    """Say what was found while the run was prepared; a note that the check has said is not said again."""
    for sentence in said:
        trackers.say(sentence, "yellow")
    for note in notes:
        if not any(note.partition(": ")[0] in sentence for sentence in said):
            trackers.say(f"Note: {note}", "dim")


def _load(config: Config, earlier: Path | None, device: torch.device | None = None) -> Policy:
    """The policy as the run begins with it. An ``earlier`` one's adapter goes on the model that it was trained on."""
    model = config.model
    if earlier is None or model.lora is not None:
        policy = load_policy(model, device, config.training.seed)
        if earlier is not None:
            load_adapter(policy.model, earlier / "adapter")
        return policy
    moved = model.model_copy(update={"name": str(earlier), "revision": None})  # a revision belongs to the model it was set for
    return replace(load_policy(moved, device), name=model.name)
