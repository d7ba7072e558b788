"""The folder of one run: everything that is needed to understand it, repeat it and resume from it.

A run that resumes is taken back to a step first (`cut_back`), so that nothing is written twice.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from groupwise.config.dialect import plain_yaml, yaml_text
from groupwise.config.schema import Config
from groupwise.data.prompts import default_style
from groupwise.durable import put_back, put_back_all, sync_folder, try_folder, write_bytes
from groupwise.errors import ConfigError, TrainingError
from groupwise.tracking.environment import describe_environment
from groupwise.tracking.files import write_json, write_json_lines, write_text
from groupwise.tracking.text import hide_secrets

__all__ = ["RUNS", "Ending", "RunFolder", "base_name", "cut_back", "ending_of", "set_ending_aside"]

RUNS = Path("runs")
"""Where runs are that named no folder."""
PROBES = 10
"""Tries to lock a folder before it counts as taken."""
LOCK_FILE = ".lock"
"""A file to lock: on NFS a folder's lock holds on one machine alone, or there is none."""
EARLIER_END = re.compile(r"end-\d+-")
"""What the name of an evaluation begins with that `set_ending_aside` put aside."""
LEFTOVER_FOLDER = re.compile(r"\.{1,2}(?:final_model|step-\d+)[\w.-]*\.partial")
LEFTOVER_FILE = re.compile(r"\.[\w.-]+\.(?:ya?ml|jsonl?|html)\.\w+\.part")

logger = logging.getLogger("groupwise")


class RunFolder:
    """Paths inside a run's folder, and the writing of its JSON files.

    config.yaml            every setting, defaults included
    environment.json       versions, machine, code revision, seeds, command, where answers stand in the data
    metrics.jsonl          one line a step
    completions.jsonl      a few groups a step, with their rewards, of the first ones token by token
    evaluations/           one file per stage and mode, one line per problem; end-N-*: of an end that it was continued from
    checkpoints/           to resume from
    tensorboard/, wandb/   where output.trackers asks for them
    final_model/           a Hugging Face folder
    trained.json           while the final model is judged: all that resuming needs, with the model, to come to the end
    summary.json           what the run came to
    summary-step-N.json    what it had come to before it was continued to more steps
    .lock                  empty; locked while the run is going on
    config-step-N.yaml     the settings of its steps up to N, where it was resumed with others then
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: list[int | None] = []
        self._is_new = False

    def lock(self) -> None:
        """Keep every other run out of this folder until ``release``, or until this process ends, however it ends.

        The locks are the system's: on a file in it, which stays, and on the folder itself, as runs of earlier versions have it.
        Where the file system has none for files, a warning says so.

        Raises:
            ConfigError: a run is going on in it.
        """
        for last in (*[False] * PROBES, True):  # somebody may just be looking whether a run is going on in it
            try:
                self._locks = flock(self.path, shared=False)
                if self._locks[-1] is None:
                    logger.warning(
                        "%r could not be locked (its file system has no locks, or takes no file), so that a second run in this folder "
                        "would go unnoticed: start one at a time",
                        str(self.path),
                    )
                return
            except BlockingIOError:
                if last:
                    raise self.in_use() from None
                time.sleep(0.02)

    def in_use(self) -> ConfigError:
        return ConfigError(
            f"another run is going on in {str(self.path)!r}, and a folder holds one run: wait for it or stop it, or name another with "
            "--run-folder PATH (the setting is output.folder)"
        )

    def is_in_use(self) -> bool:
        """Whether a run is going on in it, here or in another process; False where that cannot be known."""
        try:
            close_all(flock(self.path, shared=True))
        except BlockingIOError:
            return True
        return False

    def release(self) -> None:
        close_all(self._locks)
        self._locks = []

    def withdraw(self) -> None:
        """Take away what a new run wrote that is refused before its first step, so that it may begin here again. What an earlier
        run left stays."""
        if self._is_new:
            for path in (self.config, self.environment):
                with suppress(OSError):
                    path.unlink()
            for path in (self.evaluations, self.path / "tensorboard", self.path / "wandb"):
                shutil.rmtree(path, ignore_errors=True)

    def check_is_run(self) -> None:
        """Raises ConfigError where no run was begun in the folder."""
        if not self.config.is_file():
            raise ConfigError(
                f"{str(self.path)!r} is no run's folder (it has no config.yaml), and a run never writes over anything else: name a "
                "run's folder, or an empty one"
            )

    @classmethod
    def reopen(cls, path: Path) -> RunFolder | None:
        """The folder of a run that began before, locked; None where there is none yet.

        Raises:
            ConfigError: another run is going on in it, or it is not a run's folder.
            TrainingError: it cannot be written.
        """
        if not path.is_dir() or is_unused(path):
            return None
        folder = cls(path)
        folder.check_is_run()
        if not os.access(path, os.W_OK):
            raise folder.lost(path, PermissionError(13, "Permission denied"))
        folder.lock()
        try:
            put_back(folder.final_model)  # killed between two renames
            put_back_all(folder.checkpoints, "step-*")
            clear_leftovers(path)
            folder.evaluations.mkdir(exist_ok=True)
            if folder.environment.is_dir():  # told before the run goes on, which writes it
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder.environment))
        except OSError as error:
            folder.release()
            raise folder.lost(Path(error.filename or path), error) from error
        return folder

    @classmethod
    def create(
        cls, config: Config, path: Path | None = None, recipe_name: str = "run", *, command: Sequence[str] | None = None
    ) -> RunFolder:
        """Make the folder and write config and environment into it.

        ``path`` wins over ``config.output.folder``; without either it is ``runs/<recipe>-<date>-<time>``.

        Raises:
            ConfigError: the folder exists and holds something, or cannot be written.
        """
        wanted = path or (Path(config.output.folder) if config.output.folder else None)
        folder = None
        try:
            folder = cls(make_named(wanted.expanduser()) if wanted else make_default(recipe_name))
            folder.lock()
            clear_leftovers(folder.path)
            folder.evaluations.mkdir(exist_ok=True)
            folder.write_start(config, recipe_name, command)
        except OSError as error:
            if folder is not None:
                folder.release()  # for another try in this process
            raise ConfigError(
                f"the run's folder {str(wanted or Path('runs'))!r} cannot be written ({error.strerror or error}): a run needs a "
                "writable folder with free space; name another with --run-folder PATH (the setting is output.folder)"
            ) from error
        folder._is_new = True
        return folder

    def elapsed_s(self) -> float:
        """Seconds that the run had taken by the last step that is written; 0 for a new one."""
        lines = self.metrics.read_bytes().splitlines() if self.metrics.is_file() else []
        try:
            return float(json.loads(lines[-1])["time_s"]) if lines else 0.0
        except (ValueError, KeyError, TypeError):
            return 0.0

    def write_start(self, config: Config, recipe_name: str, command: Sequence[str] | None) -> None:
        self.write_settings(config)
        self.write_environment(config, recipe_name, command)

    def write_environment(self, config: Config, recipe_name: str, command: Sequence[str] | None) -> None:
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        about = {"recipe": recipe_name, "id": uuid.uuid4().hex[:12], "started": started}
        write_json(self.environment, {**about, **said_by(config), **describe_environment(command)})

    def write_settings(self, config: Config) -> None:
        write_text(self.config, yaml_text(hide_secrets(config.model_dump(mode="json"))))

    def replace_settings(self, config: Config, step: int) -> None:
        """Write those that a run is resumed with after ``step`` steps, and keep those that it made them with. Raises OSError."""
        earlier, begun = self.path / f"config-step-{step}.yaml", self.config.stat()
        if step and not earlier.exists():  # else this step was resumed from before, and what followed is cut back
            write_bytes(earlier, self.config.read_bytes())
        self.write_settings(config)
        os.utime(self.config, ns=(begun.st_atime_ns, begun.st_mtime_ns))  # `newest_run` goes by when a run began
        if self.environment.is_file():
            write_json(self.environment, {**self.read_environment(), **said_by(config)})

    def add_to_environment(self, **facts: object) -> None:
        """Add what was found out after the run had begun.

        Raises:
            TrainingError: the disk does not take it.
        """
        try:
            write_json(self.environment, {**self.read_environment(), **facts})
        except OSError as error:
            raise self.lost(self.environment, error) from error

    def read_environment(self) -> dict[str, Any]:
        """What ``write_start`` and ``add_to_environment`` wrote; nothing where the file is damaged: no run needs it to go on."""
        try:
            found = json.loads(self.environment.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def tracking_id(self) -> str:
        """The name by which a tracking service recognises this run when it is resumed."""
        environment = self.read_environment()
        instead = environment.get("started") or self.path.absolute()  # no two runs share a damaged file's
        return str(environment.get("id") or hashlib.sha256(os.fsencode(str(instead))).hexdigest()[:12])

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def completions(self) -> Path:
        return self.path / "completions.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final_model(self) -> Path:
        return self.path / "final_model"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def trained(self) -> Path:
        return self.path / "trained.json"

    def earlier_summary(self, steps: int) -> Path:
        return self.path / f"summary-step-{steps}.json"

    @property
    def new_model(self) -> Path:
        """Where a final model is written that takes the place of an earlier one; a leftover if the run is killed meanwhile."""
        return self.path / ".final_model.new.partial"

    def put_new_model(self) -> None:
        """The earlier final model goes when the new one is in its place. Raises OSError."""
        earlier = put_back(self.final_model)
        os.rename(self.final_model, earlier)
        os.rename(self.new_model, self.final_model)
        sync_folder(self.path)
        shutil.rmtree(earlier, ignore_errors=True)

    def evaluation_file(self, stage: str, mode: str) -> Path:
        return self.evaluations / f"{slug(stage)}-{slug(mode)}.jsonl"

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Raises:
        TrainingError: the disk does not take it.
        """
        try:
            write_json(self.summary, summary)
        except OSError as error:
            raise self.lost(self.summary, error) from error

    def write_records(self, stage: str, mode: str, records: Iterable[Mapping[str, object]]) -> Path:
        """Write one line per problem to ``evaluations/<stage>-<mode>.jsonl``; returns that path.

        Raises:
            TrainingError: the disk does not take it.
        """
        path = self.evaluation_file(stage, mode)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_lines(path, records)
        except OSError as error:
            raise self.lost(path, error) from error
        return path

    @staticmethod
    def lost(path: Path, error: OSError) -> TrainingError:
        return TrainingError(
            f"{str(path)!r} cannot be written ({error.strerror or error}): a run needs a writable folder with free space; free "
            "some, or name another with --run-folder PATH (the setting is output.folder)"
        )


def said_by(config: Config) -> dict[str, Any]:
    """What a run's environment.json has of its settings."""
    seeds = {
        "training.seed": config.training.seed,
        "data.split_seed": config.data.split_seed,
        "evaluation.seed": config.evaluation.seed,
    }
    return {"seeds": seeds, "answer_style": default_style(config.data)}  # for who asks the model where the data do not lie


def flock(path: Path, *, shared: bool) -> list[int | None]:
    """Open handles that hold the system's locks on the folder ``path`` and on the file in it; None for one that is not to be had.

    A shared lock makes no file. For the other kind NFS wants a handle that is open for writing.

    Raises:
        BlockingIOError: one is taken.
    """
    held: list[int | None] = []
    for place, flags in ((path, os.O_RDONLY), (path / LOCK_FILE, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT)):
        handle = None
        try:
            handle = os.open(place, flags, 0o666)
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            close_all([handle])
            if isinstance(error, BlockingIOError):
                close_all(held)
                raise
            handle = None
        held.append(handle)
    return held


def close_all(handles: Iterable[int | None]) -> None:
    for handle in handles:
        if handle is not None:
            os.close(handle)


def make_named(path: Path) -> Path:
    check_new(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def check_new(named: Path | None) -> None:
    """Raise ConfigError where a new run cannot have the folder ``named``, or, without one, make its own; leave nothing."""
    path = named or RUNS
    check_is_utf8(path)
    try:
        if named is not None:
            check_unused(path)
        try_folder(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # the command says which name
            raise
        raise ConfigError(
            f"the run's folder {str(path)!r} cannot be written ({error.strerror}: {error.filename}): a run needs a writable folder with "
            "free space; name another with --run-folder PATH (the setting is output.folder)"
        ) from error


def check_unused(path: Path) -> None:
    """Raise ConfigError where something is in the way of a new run, which writes over nothing; OSError where that may not be seen."""
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"the run's folder {str(path)!r} is a file: a run needs a folder; name another with --run-folder PATH "
            "(the setting is output.folder)"
        )
    checkpoints = sorted((path / "checkpoints").glob("step-*/state.json"))
    if checkpoints:
        raise ConfigError(
            f"the run's folder {str(path)!r} holds a run with a checkpoint, and a run never writes over another: continue it with "
            f"`groupwise train RECIPE --run-folder {path} --resume` (in Python: resume=True), or name another folder with "
            "--run-folder PATH (the setting is output.folder)"
        )
    if path.is_dir() and not is_unused(path):
        raise ConfigError(
            f"the run's folder {str(path)!r} is not empty: a run never writes over another; name another with --run-folder PATH "
            "(the setting is output.folder)"
        )


def check_is_utf8(path: Path) -> None:
    """Raise ConfigError where the tokenizer's library could not save to ``path``, which would show only when the run is over."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the run's folder {str(path.absolute())!r} is not UTF-8, and no model can be saved there: name another with "
            "--run-folder PATH (the setting is output.folder)"
        ) from None


def is_unused(path: Path) -> bool:
    """Whether the folder holds nothing, or only what a run leaves that is killed before its settings are written."""
    rest = [p for p in path.iterdir() if p.name != LOCK_FILE and not is_leftover(p)]
    return not rest or ([p.name for p in rest] == ["evaluations"] and rest[0].is_dir() and not any(rest[0].iterdir()))


def is_leftover(path: Path) -> bool:
    """A file or model folder that was being written aside when its process was killed; not what else is called ``.partial``."""
    return (LEFTOVER_FOLDER if path.is_dir() else LEFTOVER_FILE).fullmatch(path.name) is not None


def clear_leftovers(path: Path) -> None:
    """The folder is locked: nobody else is writing aside."""
    for leftover in [p for p in (*path.iterdir(), *path.glob("evaluations/*"), *path.glob("checkpoints/.*")) if is_leftover(p)]:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def make_default(recipe_name: str) -> Path:
    """``runs/<recipe>-<date>-<time>``; two runs that start within one second get ``-2``, ``-3`` and so on."""
    check_is_utf8(RUNS)
    base = f"{base_name(recipe_name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    attempt = 1
    while True:
        path = RUNS / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.exists():  # `runs` itself is a file
                raise
            attempt += 1


def base_name(recipe_name: str) -> str:
    """What the folders of a recipe's runs begin with."""
    return slug(re.sub(r"\.ya?ml$", "", Path(recipe_name).name))  # not .stem: gsm8k-1.5b-24gb has a dot of its own


def slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


@dataclass(frozen=True)
class Ending:
    """A run that came to its end."""

    steps: int
    """Steps that it made."""
    asked: int
    """Steps that it was asked for: more than ``steps`` where a callback ended it early."""
    summary: dict[str, Any]


def ending_of(folder: RunFolder) -> Ending | None:
    """What the run came to; None where it has not come to its end."""
    try:
        summary = json.loads(folder.summary.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(summary, dict):
        return None
    made = summary.get("steps")
    steps = made if isinstance(made, int) else last_step(folder.metrics)
    asked = summary.get("steps_asked")
    return Ending(steps, max(steps, asked if isinstance(asked, int) else steps_in_settings(folder.config)), summary)


def set_ending_aside(folder: RunFolder, steps: int) -> None:
    """Rename the summary and last evaluations of a run that ended after ``steps`` steps and is continued, by that number. Such an
    evaluation is none of the continued run, which may judge that step itself, as its settings are then.

    Its model stays in its place until the next one is whole.
    """
    for path in folder.evaluations.glob("final-*.jsonl"):
        os.replace(path, path.with_name(f"end-{steps}-{path.name.removeprefix('final-')}"))
    os.replace(folder.summary, folder.earlier_summary(steps))


def cut_back(folder: RunFolder, step: int | None) -> None:
    """Leave what the run had written when ``step`` steps were done; None where it begins again, from before its first evaluation.

    Lines of later steps go, as does a line that a kill left half, and evaluations of later stages. What belongs to an end that the
    run came to before stays (`set_ending_aside`), and so does every model.
    """
    done = step or 0
    for path in (folder.metrics, folder.completions):
        if path.is_file():
            cut_lines(path, done)
    for path in folder.evaluations.glob("*.jsonl"):
        if EARLIER_END.match(path.name):
            continue
        match = re.match(r"step-(\d+)-", path.name)
        if path.name.startswith("final-") or (match and int(match[1]) > done) or step is None:
            path.unlink()
    later = {int(path.stem.rpartition("-")[2]): path for path in folder.path.glob("config-step-*.yaml")}
    later = {until: path for until, path in later.items() if until > done}
    if later and folder.config.is_file():  # what is left was made with the settings of the first of them
        begun = folder.config.stat()
        os.replace(later.pop(min(later)), folder.config)
        os.utime(folder.config, ns=(begun.st_atime_ns, begun.st_mtime_ns))
        for path in later.values():
            path.unlink()


def cut_lines(path: Path, step: int) -> None:
    with path.open("rb") as file:
        write_bytes(path, (line for line in file if line.endswith(b"\n") and step_of(line) <= step))


def step_of(line: bytes) -> float:
    """The step of a record; infinity for what is no record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


def last_step(metrics: Path) -> int:
    """The step of the newest whole line; 0 without one."""
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    return int(max((step for line in lines if (step := step_of(line)) < float("inf")), default=0))


def steps_in_settings(config: Path) -> int:
    """The steps that were asked for when the run began; 0 where that cannot be read."""
    try:
        return int(plain_yaml(config.read_text(encoding="utf-8"))["training"]["steps"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return 0
