"""Where a run begins: everything checked, its folder made or found again, and the weights loaded."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from groupwise.config.schema import Config, ModelConfig
from groupwise.distributed import World
from groupwise.distributed.sharding import chosen_sharding
from groupwise.engines import make_engine
from groupwise.evaluation import Evaluation
from groupwise.memory import give_back_freed_memory, keep_freed_memory, release_freed_memory
from groupwise.models.adapters import load_adapter
from groupwise.models.load import Policy, load_policy, resolve_device
from groupwise.models.scorer import make_scorer
from groupwise.rewards.load import Rewards
from groupwise.tracking import RunFolder, Trackers, make_trackers
from groupwise.tracking.journal import cut_back
from groupwise.training.checkpoint import MODEL, find_checkpoint, read_state
from groupwise.training.resume import check_drift, continue_in, earlier_evaluations
from groupwise.training.run import Run
from groupwise.training.setup import Prepared, prepare
from groupwise.training.sharding import loading_device, make_sharding
from groupwise.training.short_memory import explain_short_memory
from groupwise.training.stopping import StopSignals

__all__ = ["start"]


def start(
    config: Config,
    world: World | None = None,
    *,
    recipe: str = "run",
    run_folder: Path | None = None,
    rewards: Rewards | None = None,
    console: Console | None = None,
    resume_from: Path | None = None,
    resume: bool = False,
    accept_changes: bool = False,
) -> Run:
    """Check everything, make the run's folder, then load the weights: what can be wrong comes to light first."""
    world = world or World()
    said: list[str] = []
    checkpoint = world.first_does(lambda: find_checkpoint(resume_from, said.append)) if resume_from else None
    divided = chosen_sharding(config.training.sharding, world.size) != "none"
    give_back_freed_memory() if divided else keep_freed_memory()
    started = time.perf_counter()
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    prepared = prepare(config, rewards)
    world.gather(None)  # nobody writes before all have found everything in order
    wanted = run_folder or (Path(config.output.folder) if config.output.folder else None)
    place = Place(config, prepared, recipe, run_folder, wanted if resume else None, accept_changes, checkpoint, said)
    opened: list[RunFolder] = []
    path, checkpoint, evaluations, done = world.first_does(lambda: place.take(opened))
    folder = opened[0] if opened else RunFolder(path)
    trackers = Trackers()
    try:
        if world.is_first:
            trackers = make_trackers(config, folder, console, done)
        for sentence in said:
            trackers.say(sentence, "yellow")
        for note in prepared.notes:
            trackers.say(f"Note: {note}", "dim")
        for sentence in prepared.rewards.load():
            trackers.say(sentence, "dim")
        with explain_short_memory(lambda: "nothing is lost: the run had not begun"):
            aside = loading_device(config, world)
            policy = replace(_load(config.model, checkpoint, aside), adapter_only=config.output.adapter_only)
            scorer = make_scorer(policy, config.model, resolve_device(config.model.device) if aside else None)
            sharding = make_sharding(config, world, scorer)
            engine = make_engine(policy, config.rollout, scorer, world, sharding.whole_policy)
        release_freed_memory()
    except BaseException:
        prepared.rewards.close()
        trackers.close()
        folder.release()
        raise
    return Run(
        config,
        world,
        recipe,
        prepared,
        folder,
        trackers,
        policy,
        scorer,
        sharding,
        engine,
        started,
        checkpoint,
        evaluations=evaluations,
        signals=StopSignals(at_once=world.size == 1),
    )


def _load(config: ModelConfig, checkpoint: Path | None, device: torch.device | None = None) -> Policy:
    """The policy as the run begins with it. A checkpoint's adapter goes on the model that it was trained on."""
    if checkpoint is None or config.lora is not None:
        policy = load_policy(config, device)
        if checkpoint is not None:
            load_adapter(policy.model, checkpoint / MODEL / "adapter")
        return policy
    return replace(load_policy(config.model_copy(update={"name": str(checkpoint / MODEL)}), device), name=config.name)


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

    def take(self, opened: list[RunFolder]) -> tuple[Path, Path | None, list[Evaluation], int]:
        """The folder's path, the checkpoint, the evaluations before it, and its step; the folder itself, locked, goes into ``opened``."""
        folder, checkpoint = None, self.checkpoint
        if self.carry_on:
            folder, checkpoint = continue_in(self.carry_on.expanduser(), self.said.append)
        carried_on = folder is not None
        folder = folder or RunFolder.create(self.config, self.run_folder, self.recipe)
        try:
            state = read_state(checkpoint) if checkpoint else {}
            check_drift(state, self.prepared, self.said.append, accept=self.accept_changes or not carried_on)
            if carried_on:
                cut_back(folder, int(state["step"]) if checkpoint else None)
            if not folder.environment.is_file():  # killed right after its settings were written
                folder.write_start(self.config, self.recipe, None)
        except BaseException:
            folder.release()
            raise
        if carried_on and not checkpoint:
            self.said.append(f"{folder.path} holds no checkpoint yet: the run starts from the beginning.")
        opened.append(folder)
        evaluations = earlier_evaluations(state, folder) if carried_on else []
        return folder.path, checkpoint, evaluations, int(state.get("step", 0))
