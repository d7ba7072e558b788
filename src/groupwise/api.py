"""groupwise from Python and notebooks: what the commands do, as functions. ``import groupwise`` gives them all.

A run's settings may be given as a recipe's name, the path of a YAML file, a dict in the shape of the YAML, or a `Config`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from groupwise.config import Config, build_config, load_config
from groupwise.config.algorithm import written
from groupwise.config.load import Overrides, find_source, read_overrides
from groupwise.errors import ConfigError, GroupwiseError, RewardError

if TYPE_CHECKING:
    from rich.console import Console

    from groupwise.doctor import Finding
    from groupwise.evaluation import Evaluation
    from groupwise.planner import Plan
    from groupwise.report import ReportFile
    from groupwise.rewards.load import Rewards
    from groupwise.tracking.results import RunResult
    from groupwise.training.run import StepReport
    from groupwise.training.setup import Prepared

__all__ = ["Settings", "diagnose", "evaluate", "generate", "plan", "prepare", "train", "write_report"]

Settings = Config | Mapping[str, Any] | str | Path
"""A config, a dict in the shape of the YAML, a recipe's name, or the path of a YAML file."""
Place = str | os.PathLike[str]
"""A folder; a `RunResult` stands for its own."""


def train(
    settings: Settings,
    overrides: Overrides = (),
    *,
    recipe: str | None = None,
    run_folder: str | Path | None = None,
    on_step: Callable[[StepReport], Any] | None = None,
    rewards: Rewards | None = None,
    console: Console | None = None,
    resume_from: str | Path | None = None,
    resume: bool = False,
    accept_changes: bool = False,
    check: bool = True,
) -> RunResult:
    """Train a policy: ``train("quickstart", {"training.steps": 10})``.

    Args:
        settings: a recipe's name, the path of a YAML file, a dict in the shape of the YAML, or a `Config`.
        overrides: settings on top, as `load_config` takes them.
        recipe: a name for the run's folder; by itself that of the recipe or file, or ``run``.
        run_folder: where to write; by default ``runs/<recipe>-<date>-<time>``.
        on_step: called after each step with a ``StepReport``; returning False ends training early, with evaluation and saving.
        rewards: your own reward functions and `RewardModel`s, beside those of the config: by name, in a list, or one alone.
        console: where progress is shown; by default standard output, or one output of the notebook's cell. ``Console(quiet=True)``
            shows nothing.
        resume_from: a checkpoint, or another run's folder, to start a new run from its newest one; with the same config the result is
            the one that the run would have had. Settings that have changed are said, and taken.
        resume: go on in ``run_folder`` (or `output.folder`; one of them is needed) itself, from its newest sound checkpoint; where there
            is none yet, from ``resume_from`` or the beginning. A run that is finished is left as it is, and what it came to is returned.
        accept_changes: go on although settings or data that change the result are no longer those of the checkpoint.
        check: look at settings and rewards first, and refuse what cannot learn.

    Where a launcher started several processes (``accelerate launch``, ``torchrun``), all of them call this, and train as one: the
    first one writes, shows and calls ``on_step``, and what it returns is everybody's.

    A new run is looked at first: its settings, and its rewards on a few made-up completions. Raises ``GroupwiseError`` for what is
    wrong with config, data, model or rewards, before any weights are loaded where possible, and ``StoppedError`` when SIGTERM, SIGHUP
    or Ctrl-C ended it, after saving. A second Ctrl-C raises KeyboardInterrupt, as soon as a checkpoint that is being written is whole.
    """
    from groupwise.doctor import Watch
    from groupwise.models.embedded import fetch_model
    from groupwise.rewards.calling import is_async
    from groupwise.training.loop import train as run_training

    if on_step is not None and not callable(on_step):
        raise ConfigError(f"on_step is a {type(on_step).__name__}, but must be a function: give one that takes a StepReport")
    if on_step is not None and is_async(on_step):
        raise ConfigError("on_step is async, but nothing awaits what it gives: make it a plain def")
    config = _config(settings, overrides)
    fetch_model(config.model)
    named = isinstance(settings, str | Path)
    watch = Watch(lambda sentence, severity: None)
    try:
        return run_training(
            config, recipe=recipe or (find_source(settings).stem if named else "run"), run_folder=run_folder, on_step=on_step,  # type: ignore[arg-type]
            rewards=rewards, console=console, resume_from=resume_from, resume=resume, accept_changes=accept_changes,
            check=watch.before if check else None, interruptible=True,
        )  # fmt: skip
    except RewardError:  # its author looks for the variables
        raise
    except (GroupwiseError, KeyboardInterrupt) as error:
        _forget_frames(error)
        raise


def prepare(
    settings: Settings, overrides: Overrides = (), *, rewards: Rewards | None = None, processes: int | None = None
) -> Prepared:
    """Everything that a run needs but the weights, checked and loaded: ``problems``, ``train_prompts``, ``rewards``, ``notes``.

    ``rewards`` are as for `train`; ``processes``: how many the run would have. Raises ``GroupwiseError`` for what makes a run
    impossible.
    """
    from groupwise.models.embedded import fetch_model
    from groupwise.training.setup import prepare as prepare_run

    config = _config(settings, overrides)
    fetch_model(config.model)
    return prepare_run(config, rewards, processes)


def diagnose(what: Settings | Place, overrides: Overrides = (), *, rewards: Rewards | None = None) -> list[Finding]:
    """What is wrong with a run (its folder, or a `RunResult`), or with the settings of a run to come; the gravest first.

    For settings everything but the weights is loaded, and ``rewards`` are tried with those of the config. Raises ``GroupwiseError`` for
    what makes a run impossible, and for overrides or rewards beside a run.
    """
    from groupwise.doctor import diagnose_prepared, diagnose_run
    from groupwise.tracking.reading import names_run, read_run

    if isinstance(what, str | os.PathLike) and names_run(what):
        if overrides or rewards is not None:
            given = "overrides" if overrides else "rewards"
            raise ConfigError(
                f"{given} change nothing about {os.fspath(what)!r}, a run whose settings are what they were: leave them out"
            )
        return diagnose_run(read_run(Path(what)))
    prepared = prepare(what, overrides, rewards=rewards)  # type: ignore[arg-type]
    try:
        return diagnose_prepared(prepared)
    finally:
        prepared.rewards.close()


def evaluate(
    model: Place, data: Place | None = None, overrides: Overrides = (), *, console: Console | None = None
) -> list[Evaluation]:
    """Judge a model (its folder, a run's, a `RunResult`, or a name) on held-out problems; an `Evaluation` for each of
    ``evaluation.modes`` (``sampled``, ``greedy``).

    ``data``: such as ``gsm8k:test``, or a file; by default what the run held out. A model that a run made is asked as it was trained;
    with `prompt.system: auto` the form of the answer is that of ``data``. ``console``: as for `train`. Raises ConfigError,
    DataError or ModelError for settings, data or a model that cannot be used, and TrainingError where memory runs out.
    """
    from rich.console import Console

    from groupwise.chat import note_on_form, note_on_seen, refuse_named_code, settings_for_model
    from groupwise.distributed import is_first_process
    from groupwise.evaluation import evaluate_model
    from groupwise.evaluation.models import data_overrides
    from groupwise.models.embedded import fetch_model
    from groupwise.tracking import make_trackers
    from groupwise.tracking.console import own_width
    from groupwise.training.short_memory import SHORT_WHILE_JUDGING, explain_short_memory

    place, named = _place_of_model(model), None if data is None else _place(data, "data", "write its rows to a JSONL file")
    given = {**read_overrides(data_overrides(named)), **read_overrides(overrides or ())}
    config, run_config = settings_for_model(place, given)
    refuse_named_code(config, run_config, data=True)
    fetch_model(config.model)
    trackers = make_trackers(config, None, console or Console(width=own_width(), quiet=not is_first_process()))
    try:
        if run_config is not None:
            for said in (note_on_form(config, run_config), note_on_seen(place, config.data, run_config)):
                if said:
                    trackers.say(said, "yellow")
        with explain_short_memory(remedy=SHORT_WHILE_JUDGING):
            return evaluate_model(config.model.name, config, further=True, trackers=trackers)
    finally:
        trackers.close()


def generate(
    model: Place,
    prompt: str | Sequence[str],
    overrides: Overrides = (),
    *,
    system: str | None = None,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    seed: int = 0,
    greedy: bool = False,
) -> Any:
    """A model's answer to ``prompt``, or to each of several: a text, or a list of them. With tools or an environment its last turn.

    ``model``: its folder, a run's, a `RunResult`, or a name. ``overrides``: settings on top, as `load_config` takes them, but for
    ``rollout.temperature``, which is ``temperature`` here; a run's own tools and environment need ``model.trust_remote_code=true``.
    ``system``: a system prompt, ``xml``, ``boxed`` or ``none``; by default the one it was trained with. ``max_tokens``: by default what
    it was trained with, else 512. ``seed``: the same gives the same answer; the second of equal prompts is answered with ``seed + 1``, and
    so on. Raises ConfigError or ModelError, also for a prompt longer than the model's context, and TrainingError where memory runs
    out.
    """
    from groupwise.chat import answer_of, check_text, make_speaker, settings_to_ask
    from groupwise.models.embedded import fetch_model
    from groupwise.training.short_memory import explain_short_memory

    several = isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes | Mapping)
    prompts: list[Any] = list(prompt) if several else [prompt]
    for one in prompts:  # all of them before the first answer
        if not isinstance(one, str):
            raise ConfigError(f"a prompt is a {type(one).__name__}, but must be a text: give the question alone")
        check_text(one, "the prompt")
    config, longest = settings_to_ask(_place_of_model(model), overrides, system=system, max_tokens=max_tokens)
    fetch_model(config.model)
    answers, asked = [], Counter[str]()
    with explain_short_memory(remedy="lower max_tokens, ask a shorter question, or take a smaller model"):
        speaker = make_speaker(config, longest, temperature, greedy, seed)
        try:
            for one in prompts:
                speaker.seed = seed + asked[one]
                asked[one] += 1
                answers.append(answer_of(speaker, one))
        finally:
            speaker.engine.close()
    return answers if several else answers[0]


def plan(
    settings: Settings,
    overrides: Overrides = (),
    *,
    hardware: str | None = None,
    gpu_memory: str | None = None,
    world_size: int = 1,
) -> Plan:
    """Whether a run fits and how long a step takes; ``fits``, ``peak``, ``suggestions`` and ``to_json()`` say it. No weights are loaded.

    ``hardware``: a device of the table, such as ``a100-80gb``; ``gpu_memory``: such as ``24GiB``; by default this machine's. Raises
    ConfigError for what cannot be trained or is not in the table, ModelError where the model's config.json cannot be had or planned.
    """
    from groupwise.planner import plan_run

    return plan_run(_config(settings, overrides), hardware=hardware, gpu_memory=gpu_memory, world_size=world_size)


def write_report(runs: Place | Sequence[Place], out: str | Path | None = None, *, completions: bool = True) -> ReportFile:
    """Write one HTML page about a run or several; ``path`` of what is returned says where. ``completions=False`` leaves out what models
    and data sets wrote. Raises ConfigError for a folder that is no run's, and where `out` is no report."""
    from groupwise.report import write_report as write

    listed = [runs] if isinstance(runs, str | os.PathLike) else runs
    return write([Path(run) for run in listed], None if out is None else Path(out), completions=completions)


def _place_of_model(model: Any) -> str:
    return _place(model, "model", "save it with its tokenizer by save_pretrained")


def _place(given: Any, what: str, remedy: str) -> str:
    """``given`` as a path or name. Raises ConfigError for an object that is neither, such as a loaded model or a DataFrame."""
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    raise ConfigError(f"{what} is a {type(given).__name__}, but must be a name or a path: {remedy}, and give its path")


def _forget_frames(error: BaseException | None) -> None:
    """Drop the local variables behind ``error``: a notebook keeps its last error, and a run's model and optimiser with it."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # where several processes train, an error is its own cause
        seen.add(id(error))
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _config(settings: Settings, overrides: Overrides) -> Config:
    if isinstance(settings, Config):  # checked again: assignments look at one section, and changes inside of lists at none
        made = build_config(written(settings), overrides)
        if made.data.source == settings.data.source:
            made.data._found_style = settings.data._found_style  # a run's, whose data may have changed
        return made
    if isinstance(settings, Mapping):
        return build_config(settings, overrides)
    if isinstance(settings, str | Path):
        return load_config(settings, overrides)
    raise ConfigError(
        f"settings are a {type(settings).__name__}, but must be a recipe's name, a path, a dict or a groupwise.Config"
    )
