"""Where a run begins: everything checked, its folder made or found again, and the weights loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from groupwise.config.schema import Config, ModelConfig
from groupwise.distributed import World
from groupwise.distributed.sharding import chosen_sharding
from groupwise.engines import make_engine
from groupwise.memory import give_back_freed_memory, keep_freed_memory, release_freed_memory
from groupwise.models.adapters import load_adapter
from groupwise.models.load import Policy, load_policy, resolve_device
from groupwise.models.projections import with_dtype
from groupwise.models.scorer import make_scorer
from groupwise.rewards.load import Rewards
from groupwise.threads import fix_threads
from groupwise.tracking import RunFolder, Trackers, make_trackers
from groupwise.training.checkpoint import find_checkpoint
from groupwise.training.place import Place
from groupwise.training.resume import folder_of
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
    checkpoint = world.first_does(lambda: find_checkpoint(Path(resume_from), said.append)) if resume_from else None
    divided = chosen_sharding(config.training.sharding, world.size) != "none"
    give_back_freed_memory() if divided else keep_freed_memory()
    started = time.perf_counter()
    if config.training.threads or config.training.deterministic:
        fix_threads(config.training.threads)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its sums only with a workspace of fixed size
        torch.use_deterministic_algorithms(True)
    prepared = prepare(config, rewards, folder=run_folder)
    config = prepared.config
    world.gather(None)  # nobody writes before all have found everything in order
    wanted = folder_of(config, run_folder) if resume else None
    if check is not None and checkpoint is None and not (wanted and wanted.expanduser().is_dir()):
        try:
            said += world.first_does(lambda: list(check(prepared)))
        except BaseException:
            prepared.rewards.close()
            raise
    place = Place(config, prepared, recipe, run_folder, wanted, accept_changes, checkpoint, said)
    opened: list[RunFolder] = []
    beginning = world.first_does(lambda: place.take(opened))
    folder = opened[0] if opened else RunFolder(beginning.path)
    trackers = Trackers()
    try:
        if world.is_first:
            trackers = make_trackers(config, folder, console, beginning.done)
        for sentence in said:
            trackers.say(sentence, "yellow")
        for note in prepared.notes:
            if any(note.partition(": ")[0] in sentence for sentence in said):
                continue  # the check has said it
            trackers.say(f"Note: {note}", "dim")
        for sentence in prepared.rewards.load():
            trackers.say(sentence, "dim")
        with explain_short_memory(lambda: "nothing is lost: the run had not begun"):
            aside = loading_device(config, world)
            policy = replace(_load(config.model, beginning.model, aside), adapter_only=config.output.adapter_only)
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
        beginning.checkpoint,
        trained=beginning.trained,
        evaluations=beginning.evaluations,
        done=beginning.done,
        signals=StopSignals(at_once=world.size == 1),
    )


def _load(config: ModelConfig, earlier: Path | None, device: torch.device | None = None) -> Policy:
    """The policy as the run begins with it. An ``earlier`` one's adapter goes on the model that it was trained on."""
    if earlier is None or config.lora is not None:
        policy = load_policy(config, device)
        if earlier is not None:
            load_adapter(policy.model, earlier / "adapter")
        return policy
    return replace(load_policy(config.model_copy(update={"name": str(earlier)}), device), name=config.name)
