"""Resuming a run: in which folder, from which checkpoint, and whether it is still the same run."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from groupwise.config.load import build_known
from groupwise.config.schema import Config
from groupwise.distributed import World
from groupwise.errors import CheckpointError, ConfigError, DataError
from groupwise.evaluation import Evaluation
from groupwise.evaluation.figures import figures
from groupwise.tracking import RunFolder
from groupwise.tracking.reading import fitting_config, read_settings
from groupwise.tracking.run_folder import RUNS, base_name, check_new, ending_of, is_unused
from groupwise.tracking.text import hide_secrets
from groupwise.training.checkpoint_folder import latest_checkpoint, newest_sound_checkpoint, read_state, set_damaged_aside
from groupwise.training.setup import Prepared

__all__ = [
    "about_run",
    "cannot_continue",
    "check_drift",
    "continue_in",
    "drift",
    "earlier_evaluations",
    "folder_of",
    "has_other_settings",
    "newest_run",
    "refuse_differing",
    "refuse_inside_a_step",
    "refuse_to_share",
    "trained_in",
    "unfinished_note",
    "would_resume",
]

_HARMLESS = (
    "data.folder",  # another copy of the same problems, by their fingerprint
    "output.",
    "evaluation.",
    "rewards.on_error",
    "rewards.timeout_s",
    "rewards.processes",
    "rewards.concurrent_calls",
    "training.sharding",
    "training.threads",
    "training.process_timeout_s",
    "training.micro_batch_tokens",
    "training.offload_reference",
    "optimizer.offload",
    "rollout.max_concurrent_sequences",
    "rollout.concurrent_tool_calls",
    "rollout.vllm.url",
    "rollout.vllm.shared_folder",
    "rollout.vllm.bucket_mib",
    "rollout.vllm.patience_s",
    "rollout.vllm.gpu_memory_share",
    "rollout.vllm.cache_gib",
    "rollout.vllm.eager",
    "rollout.vllm.sleep_mode",  # not max_model_tokens, which says what prompts are too long
    "model.gradient_checkpointing",
    "model.trust_remote_code",
)
"""Settings that leave what is learnt as it is, rounding apart."""
_OF_ONE_MACHINE = (
    "data.folder",
    "data.source",
    "data.eval_source",  # what is in them is compared by fingerprints
    "output.folder",
    "rollout.vllm.url",
    "rollout.vllm.shared_folder",
    "training.threads",
)
"""Settings that each of several processes may have its own of."""
_NAMED = 3
"""Other runs that are named in one sentence."""


def about_run(prepared: Prepared, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """What a checkpoint says about its run: the settings, the data's fingerprints, the rewards from Python, the evaluations so
    far, and the score of each step that was judged in training, its own and those before it: one may have been judged after it was
    saved, by a run that went on from it. Beside it stands how it was taken, which a resumed run may have changed."""
    mode = prepared.config.evaluation.modes[0]
    judged = [e for e in evaluations if e.mode == mode and e.stage.startswith("step-")]
    return {
        "config": hide_secrets(prepared.config.model_dump(mode="json")),
        "data": prepared.problems.fingerprint,
        "data_columns": prepared.problems.columns_fingerprint,
        "python_rewards": _from_python(prepared),
        "evaluations": hide_secrets([e.to_summary() for e in evaluations]),
        "scores": {e.stage: e.figures.get("success", [e.strict_accuracy])[0] for e in judged},
        "scored_by": hide_secrets({e.stage: _taken_by(e) for e in judged}),
    }


def _taken_by(evaluation: Evaluation) -> dict[str, Any]:
    """What a score depends on beside the policy."""
    names = ("mode", "samples", "temperature", "max_tokens")
    # A problem whose only answer could not be checked is not among the n, but was asked.
    unchecked = evaluation.figures.get("unchecked", 0) if evaluation.samples == 1 else 0
    about: dict[str, Any] = {"problems": evaluation.n + unchecked, "conditions": dict(evaluation.conditions)}
    return {name: getattr(evaluation, name) for name in names} | about


def _from_python(prepared: Prepared) -> list[str]:
    """Reward functions that the settings do not hold: handed over from Python."""
    return sorted(reward.name for reward in prepared.rewards.rewards if reward.source == "python")


def folder_of(config: Config, run_folder: Path | None) -> Path | None:
    """The run's folder where one was named, by the caller or by the settings."""
    return run_folder or (Path(config.output.folder) if config.output.folder else None)


@dataclass(frozen=True)
class EarlierRun:
    """A folder in which a run of some recipe was begun."""

    path: Path
    finished: bool
    living: bool
    """Whether it is going on at this moment."""
    saved: Path | None
    """What there is to resume from."""

    def in_words(self) -> str:
        what = "going on" if self.living else f"saved up to {self.saved.name}" if self.saved else "nothing saved"
        return f"{self.path} ({what})"


def runs_of(recipe: str, root: Path) -> list[EarlierRun]:
    """The runs of ``recipe`` below ``root`` in folders that were not named, newest first."""
    named = re.compile(re.escape(base_name(recipe)) + r"-\d{8}-\d{6}(-\d+)?")
    folders = [p.parent for p in root.glob("*/config.yaml") if named.fullmatch(p.parent.name)]
    folders.sort(key=lambda path: (path / "config.yaml").stat().st_mtime, reverse=True)
    return [_look(RunFolder(path)) for path in folders]


def _look(folder: RunFolder) -> EarlierRun:
    finished = folder.summary.exists()
    saved = None if finished else folder.final_model if folder.trained.exists() else latest_checkpoint(folder.checkpoints)
    return EarlierRun(folder.path, finished, not finished and folder.is_in_use(), saved)


def newest_run(recipe: str, say: Callable[[str], None], root: Path = RUNS) -> Path:
    """The folder that ``--resume`` means: the newest run of ``recipe`` below ``root`` that is not finished, nor going on, and has
    something to resume from; else the newest of all. ``say`` is told of other unfinished ones.

    Raises CheckpointError where there is none.
    """
    runs = runs_of(recipe, root)
    if not runs:
        raise CheckpointError(
            f"no run of {recipe} was found in {str(root)!r}: name its folder with --run-folder, or start without --resume"
        )
    chosen = next((run for run in runs if run.saved and not run.living), None)
    chosen = chosen or next((run for run in runs if not run.living), runs[0])
    others = [run.in_words() for run in runs if run is not chosen and not run.finished]
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        say(f"{chosen.path} is resumed; unfinished too: {', '.join(others[:_NAMED])}{more}. Choose with --run-folder.")
    return chosen.path


def unfinished_note(recipe: str, root: Path = RUNS) -> str | None:
    """What to say before a run of ``recipe`` starts again while an earlier one could be resumed."""
    run = next((run for run in runs_of(recipe, root) if run.saved and not run.living), None)
    if run is None or run.saved is None:
        return None
    match = re.fullmatch(r"step-(\d+)(?:-update-\d+)?", run.saved.name)
    when = f"after step {match[1]}" if match else "before its last evaluation"
    python = f"in Python: resume=True, run_folder={str(run.path)!r}"
    return f"{run.path} stopped {when}; --resume ({python}) continues it. This is a new run."


def continue_in(path: Path, say: Callable[[str], None]) -> tuple[RunFolder | None, Path | None]:
    """The run's folder, locked, and its newest sound checkpoint; None for what is not there yet.

    Raises CheckpointError when the folder has checkpoints and every one is damaged, or where they lay is no folder: starting over is not
    what was asked for.
    """
    folder = RunFolder.reopen(path)
    if folder is None:
        return None, None
    try:
        newest = _newest_of(folder, say)
        if newest is not None:
            set_damaged_aside(folder.checkpoints, newest)
    except (CheckpointError, OSError):
        folder.release()
        raise
    return folder, newest


def _newest_of(folder: RunFolder, say: Callable[[str], None]) -> Path | None:
    if os.path.lexists(folder.checkpoints) and not folder.checkpoints.is_dir():  # a link to a disk that is not there, too
        raise CheckpointError(
            f"{folder.checkpoints} is no folder, and a run keeps its checkpoints in one: put it back, or remove what has its name to "
            "start from the beginning"
        )
    newest = newest_sound_checkpoint(folder.checkpoints, say)
    if newest is None and any(folder.checkpoints.glob("step-*")):
        raise CheckpointError(
            f"every checkpoint in {folder.checkpoints} is damaged, and none is left to resume from: start again in another folder"
        )
    return newest


def cannot_continue(folder: RunFolder, steps: int, config: Config) -> CheckpointError:
    return CheckpointError(
        f"the run in {str(folder.path)!r} made its {steps} steps and kept no checkpoint (output.checkpoint_every), so it cannot be "
        f"continued to step {config.training.steps}: begin a run of its own with model.name={folder.final_model}, or leave "
        "training.steps as it was"
    )


def trained_in(folder: RunFolder, checkpoint: Path | None, config: Config) -> dict[str, Any] | None:
    """What the run noted when its final model was whole, where it was ended before that had been judged.

    Raises CheckpointError where ``config`` asks for more steps, and there is no checkpoint to make them from.
    """
    try:
        state: dict[str, Any] = json.loads(folder.trained.read_bytes())
        step, asked = int(state["step"]), int(state["steps_asked"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if ending_of(folder) is not None or not folder.final_model.is_dir():
        return None
    if config.training.steps <= asked:
        return state
    if checkpoint is None:
        raise cannot_continue(folder, step, config)
    return None


def would_resume(path: Path, prepared: Prepared, accept: bool, processes: int = 1) -> tuple[list[str], bool]:
    """What resuming the run in ``path`` would do, a sentence each, and whether any step would be made; nothing is locked or written.

    Raises:
        CheckpointError: as the resumed run of so many ``processes`` would: settings have changed (unless ``accept``), every checkpoint is
            damaged, several would share the updates of a batch, it would end inside a step, or there is none to make more steps
            from.
        ConfigError: the run is still going on, or ``path`` is a file or has something else in it.
    """
    said: list[str] = []
    config, folder = prepared.config, RunFolder(path)
    if not path.is_dir() or is_unused(path):
        check_new(path)
        return [f"There is no run in {path} yet: it would begin with the first step."], True
    folder.check_is_run()
    if folder.is_in_use():
        raise folder.in_use()
    ending = ending_of(folder)
    if ending is not None and config.training.steps <= ending.asked:
        return [f"{path} finished after step {ending.steps}: there is nothing to resume."], False
    newest = _newest_of(folder, said.append)
    trained = trained_in(folder, newest, config)
    if trained is not None:
        check_drift(trained, prepared, said.append, accept)
        return [*said, f"{path} made its {trained['step']} steps: only its final model would be judged."], False
    if newest is None and ending is not None:
        raise cannot_continue(folder, ending.steps, config)
    if newest is None:
        return [*said, f"{path} holds no checkpoint yet: the run would start from the beginning."], True
    refuse_to_share(state := read_state(newest), newest, processes)
    refuse_inside_a_step(state, newest, config)
    check_drift(state, prepared, said.append, accept)
    return [*said, f"It would resume from {newest}."], True


def drift(state: Mapping[str, Any], prepared: Prepared) -> tuple[list[str], list[str]]:
    """What differs from the run that wrote ``state``: what changes the result, and what does not, a line each."""
    before, now = _settings_before(state.get("config", {})), _flat(hide_secrets(prepared.config.model_dump(mode="json")))
    harmful: list[str] = []
    harmless: list[str] = []
    unused = ("algorithm.correction",) if prepared.config.clips_against_the_sampler else ()  # earlier versions wrote one
    for key in sorted(before.keys() | now.keys()) if before else []:
        if not key.startswith(unused) and before.get(key) != now.get(key):
            line = f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
            moved = _moved_by_steps(prepared.config) if key == "training.steps" else None
            same = key.startswith(_HARMLESS) or (key == "training.steps" and moved is None)
            (harmless if same else harmful).append(line if moved is None else f"{line}, which changes {moved}")
    if state.get("data", prepared.problems.fingerprint) != prepared.problems.fingerprint:
        harmful.append(f"the data itself: fingerprint {state['data']} -> {prepared.problems.fingerprint}")
    if "data_columns" in state and (now_columns := prepared.problems.columns_fingerprint) != state["data_columns"]:
        harmful.append(f"other columns of the data: fingerprint {state['data_columns']} -> {now_columns}")
    if "python_rewards" in state and (given := _from_python(prepared)) != state["python_rewards"]:
        harmful.append(f"rewards from Python: {', '.join(state['python_rewards']) or 'none'} -> {', '.join(given) or 'none'}")
    return harmful, harmless


def has_other_settings(folder: RunFolder, config: Config) -> bool:
    """Whether the folder's config.yaml says anything else than ``config``, or cannot be read."""
    written = read_settings(folder.config, Counter())
    known = fitting_config(written, Counter())
    before = _flat(known.model_dump(mode="json")) | _flat(dict(written)) if known else {}
    return before != _flat(hide_secrets(config.model_dump(mode="json")))


def check_drift(state: Mapping[str, Any], prepared: Prepared, say: Callable[[str], None], accept: bool) -> None:
    """Say what changed since the checkpoint. Raises CheckpointError where that changes the result, unless ``accept``."""
    harmful, harmless = drift(state, prepared)
    if harmful and not accept:
        raise CheckpointError(
            f"this is not the run that wrote the checkpoint, since what follows has changed ({'; '.join(harmful)}): change it back, "
            "or accept a run that is neither the one nor the other with --accept-changes (in Python: accept_changes=True)"
        )
    for line in [*harmful, *harmless]:
        say(f"Changed since the checkpoint: {line}")


def refuse_differing(prepared: Prepared, world: World) -> None:
    """Raise ConfigError in all processes where one has other settings or data than the first. A collective call."""
    if world.size == 1:
        return
    facts = _flat(hide_secrets(prepared.config.model_dump(mode="json")))
    facts = {key: value for key, value in facts.items() if key not in _OF_ONE_MACHINE}
    if Path(prepared.config.model.name).expanduser().is_dir():  # each machine may have its own copy
        facts["model.name"] = None
    facts["fingerprint of the data"] = prepared.problems.fingerprint
    facts["fingerprint of the data's other columns"] = prepared.problems.columns_fingerprint
    first, *others = world.all_gather_object(facts)
    for rank, other in enumerate(others, 1):
        differing = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
        if differing:  # the key alone: a value may be secret
            raise ConfigError(
                f"process {rank} of {world.size} has another {differing[0]} than process 0: start all by one command, with the "
                "same settings and data"
            )


def refuse_to_share(state: Mapping[str, Any], checkpoint: Path | None, processes: int) -> None:
    """Raise CheckpointError where several processes would resume between two updates of a batch, which one process has cut into
    micro-batches.

    Before the first update (``rollout.ahead`` keeps such a batch) they cut it again.
    """
    if processes > 1 and state.get("parts", {}).get("window", {}).get("updates"):
        raise CheckpointError(
            f"the checkpoint {checkpoint} was written between two updates of a batch, by one process, and {processes} were started: "
            "resume with one, or start from an earlier checkpoint by train(resume_from=...) of Python"
        )


def refuse_inside_a_step(state: Mapping[str, Any], checkpoint: Path | None, config: Config) -> None:
    """Raise CheckpointError where the run would end with some of a step's updates: its model would be that of no step."""
    if config.training.steps <= (done := int(state.get("step", 0))) and state.get("parts", {}).get("window", {}).get("updates"):
        raise CheckpointError(
            f"{checkpoint} is inside step {done + 1}: set training.steps to at least {done + 1}, or resume from an earlier "
            "checkpoint"
        )


def earlier_evaluations(state: Mapping[str, Any], folder: RunFolder, say: Callable[[str], None]) -> list[Evaluation]:
    """The evaluations before the checkpoint, with their records from the run's folder; one without sound records is left out, which
    ``say`` is told."""
    rows = state.get("evaluations", [])
    out = []
    for row in rows if isinstance(rows, list) else [rows]:
        try:
            out.append(_earlier_evaluation(row, folder))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, DataError):
            named = isinstance(row, dict) and {"stage", "mode"} <= row.keys()
            what = f"{row['stage']} ({row['mode']})" if named else "without a name"
            say(f"LEFT OUT: the evaluation {what} is not whole in {folder.evaluations} any more, so the summary goes without it")
    return out


def _earlier_evaluation(row: Any, folder: RunFolder) -> Evaluation:
    """Raises, among others, KeyError and TypeError where ``row`` or the records of it have another shape, and ValueError where records
    are missing."""
    path = folder.evaluation_file(row["stage"], row["mode"])
    records = tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    counted = figures(records)  # reads whatever a summary needs of a record
    if (counted["n"], counted["samples"]) != (row["n"], row.get("samples", 1)):
        raise ValueError(f"{path} has records of {counted['n']} problems, and {row['n']} were judged")
    names = {f.name for f in fields(Evaluation)} - {"records"}
    values: dict[str, Any] = {name: tuple(row[name]) if name.endswith("_interval") else row[name] for name in names & row.keys()}
    return Evaluation(**values, records=records).kept()


def _moved_by_steps(config: Config) -> str | None:
    """What of a run would be another with another number of steps; None where that leaves the steps before as they were. Sampling ahead
    ends with the last step: no batch behind the former end was sampled before it."""
    optimizer, kl = config.optimizer, config.algorithm.kl
    reasons = (
        (optimizer.schedule != "constant", f"the rate of each step (optimizer.schedule is {optimizer.schedule})"),
        (0 < optimizer.warmup_steps < 1, "the rate of the first steps (optimizer.warmup_steps is a share of the run)"),
        (kl is not None and kl.reference_updates > 1, "when the reference is renewed (algorithm.kl.reference_updates)"),
        (config.rollout.ahead > 0, "which weights sample what follows (rollout.ahead)"),
    )
    return next((what for applies, what in reasons if applies), None)


def _settings_before(written: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's run was made of. One that an earlier version wrote lacks the settings that came since: it had their defaults."""
    known, _ = build_known(written) if written else (None, [])
    return (_flat(known.model_dump(mode="json")) if known else {}) | _flat(written)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}" if path else str(key)).items()}
