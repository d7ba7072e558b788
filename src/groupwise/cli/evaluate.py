"""``groupwise eval``."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.options import DeviceMap, NumProcesses, ProgressAside, check_device_map, start_processes

if TYPE_CHECKING:
    from rich.console import Console

    from groupwise.config import Config
    from groupwise.distributed import World
    from groupwise.evaluation import Evaluation
    from groupwise.evaluation.models import Judged
    from groupwise.evaluation.records import PartialRecords

__all__ = ["evaluate"]

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL [MODEL ...] [KEY=VALUE ...]",
        help="Model folders, run folders, Hub names or smollm2-135m-instruct; or a .jsonl that --out wrote. Then settings to change.",
    ),
]


def evaluate(
    words: Words,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="SOURCE[:SPLIT]",
            help="gsm8k:test, math500, aime24, aime25, amc23, svamp, arithmetic, a file ...; else what the run used.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Completions per problem when sampling.")] = None,
    shots: Annotated[int | None, typer.Option("--shots", min=0, help="Worked examples before each question.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.jsonl", help="Write every completion with its verdicts.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --out: keep what FILE.jsonl, or a stopped command, has, and judge the rest.")
    ] = False,
    device_map: DeviceMap = None,
    as_json: ProgressAside = False,
    num_processes: NumProcesses = 1,
) -> None:
    """Judge models on held-out problems, greedy and sampled, and compare each with the first.

    Settings come from the first model that a run made: from that run's config.yaml, unless you change them.

    \b
    Examples:
      groupwise eval smollm2-135m-instruct runs/quickstart-1 --out both.jsonl
      groupwise eval Qwen/Qwen2.5-0.5B-Instruct --data gsm8k:test evaluation.problems=null
      groupwise eval my-model --data aime24 --samples 16 'evaluation.modes=[sampled]'
      groupwise eval my-model --data gsm8k:test --shots 4 --num-processes 8
      groupwise eval my-model --data gsm8k:test --out mine.jsonl --resume
      groupwise eval Qwen/Qwen2.5-32B-Instruct --device-map auto 'model.max_memory={0: 20GiB, cpu: 100GiB}'
      groupwise eval both.jsonl
    """
    check_device_map(device_map, num_processes)
    out = out.expanduser() if out is not None else None  # of --out=~/x a shell leaves the tilde
    if out is not None and os.environ.get("RANK", "0") == "0":
        _check_out(out)
    from groupwise.config.load import read_overrides
    from groupwise.errors import ConfigError, DataError

    if resume and out is None:
        raise ConfigError(
            "--resume goes on with the records of an --out, and none is given: name the same --out FILE.jsonl as before"
        )
    models, overrides = _models_and_settings(words)
    read_overrides(overrides)  # for what is misspelt in them: told once, and before torch is imported
    start_processes(num_processes)
    from groupwise.cli.show import console, print_json
    from groupwise.distributed import is_first_process
    from groupwise.evaluation.models import data_overrides

    options = [f"evaluation.samples={samples}"] if samples else []
    options += [f"evaluation.shots={shots}"] if shots is not None else []
    options += [f"model.device_map={device_map}"] if device_map else []
    aside = console(stderr=True, quiet=not is_first_process())
    judged, source = _judge(models, [*data_overrides(data), *options, *overrides], aside, out, resume)
    from groupwise.evaluation.models import compare_models, partial_path, write_records
    from groupwise.tracking.text import harmless

    if not is_first_process():
        return
    if out is not None:
        count = write_records(out, judged)
        if source is not None:  # weights were asked: what they gave is in the file now
            partial_path(out).unlink(missing_ok=True)
        console(stderr=True).print(harmless(f"{count:,} completions with their verdicts in {out}"), soft_wrap=True)
    unpaired: list[DataError] = []  # what was judged is written and shown all the same
    comparisons = compare_models(judged, unpaired)
    if as_json:
        print_json(_as_json(judged, comparisons, data or source))
    else:
        _print(judged, comparisons, console())
    if unpaired:
        raise DataError("; ".join(map(str, unpaired)))


def _check_out(out: Path) -> None:
    """Raise ConfigError where records cannot be written to ``out``, or would take the place of what is no file; leave nothing."""
    from groupwise.durable import try_folder
    from groupwise.errors import ConfigError

    remedy = "name another --out FILE.jsonl"
    try:
        if out.exists() and not out.is_file():
            kind = "a folder" if out.is_dir() else "no regular file"
            raise ConfigError(f"--out {str(out)!r} is {kind}, and records are written to a file: {remedy}")
        # Stopped, they lie beside a link; at the end where it leads to.
        for path in (out.absolute(), Path(os.path.realpath(out))):
            try_folder(path.parent)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # the command says which name
            raise
        raise ConfigError(
            f"--out {str(out)!r} cannot be written ({error.strerror or error}: {error.filename}): records need a writable folder "
            f"with free space; {remedy}"
        ) from error


def _models_and_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A word with ``=`` is a setting, unless something of that name exists."""
    from groupwise.errors import ConfigError

    # Path.exists raises where a word is too long for a file.
    settings = [word for word in words if "=" in word and not os.path.exists(os.path.expanduser(word))]
    models = [word for word in words if word not in settings]
    if not models:
        raise ConfigError("groupwise eval needs a model to judge: name a folder, a Hub name or smollm2-135m-instruct")
    if len(set(models)) < len(models):
        raise ConfigError(f"{', '.join(models)} names a model twice: name each once")
    return models, settings


def _judge(
    models: Sequence[str], overrides: Sequence[str], aside: Console, out: Path | None, resume: bool
) -> tuple[list[Judged], str | None]:
    """Records files first, since they need no weights; the order is that of ``models``."""
    from groupwise.config.combinations import unsampled
    from groupwise.evaluation.models import check_replaced, partial_records, rescore, told_apart

    weights = [model for model in models if Path(model).suffix != ".jsonl"]
    records = told_apart({model: rescore(Path(model)) for model in models if model not in weights}, weights)
    others = {(model, one.mode) for group in records.values() for model, evaluations in group for one in evaluations}
    judged: dict[str, list[Judged]] = {**records}
    source = None
    if weights:
        config, names = _shared_settings(weights, overrides, aside)
        check_device_map(config.model.device_map, 1)  # which may be one of the settings
        source = config.data.eval_source or config.data.source
        given = {override.partition("=")[0] for override in overrides}
        for note in unsampled(config):
            name = note.partition("=")[0]
            if {name, name.rpartition(".")[2]} & given:  # a run's other settings are for its own evaluations
                aside.print(f"Note: {note}", style="yellow", soft_wrap=True)
        with _world(config) as world:
            partial = partial_records(out, resume, config, world, weights, others) if out else None
            for model, name in zip(weights, names, strict=True):
                own = partial.of(model) if partial else None
                judged[model] = [(model, _with_weights(name, config, aside, world, own, title=len(models) > 1))]
        return [one for model in models for one in judged[model]], source
    if overrides:
        aside.print("records are judged as they were asked for: the settings given have no effect", style="yellow")
    if out is not None:
        check_replaced(out, others)
    return [one for model in models for one in judged[model]], source


def _shared_settings(models: Sequence[str], overrides: Sequence[str], aside: Console) -> tuple[Config, list[str]]:
    """One config for all: that of the first model which a run made, or the defaults; and where each model's weights lie."""
    from groupwise.chat import note_on_form, note_on_seen, refuse_named_code, settings_for_model
    from groupwise.tracking.text import harmless

    settings = [settings_for_model(model, overrides) for model in models]
    chosen, run_config = next(((c, made_by) for c, made_by in settings if made_by is not None), settings[0])
    refuse_named_code(chosen, run_config, data=True)
    if run_config is not None:
        for_all = ", for all models" if len(models) > 1 else ""
        aside.print(harmless(f"settings from {run_config}{for_all}", "dim"), soft_wrap=True)
        if said := note_on_form(chosen, run_config):
            aside.print(harmless(said, "yellow"), soft_wrap=True)
    for model, (_, made_by) in zip(models, settings, strict=True):
        if made_by is not None and (said := note_on_seen(model, chosen.data, made_by)):
            aside.print(harmless(said, "yellow"), soft_wrap=True)
    return chosen, [config.model.name for config, _ in settings]


def _world(config: Config) -> AbstractContextManager[World]:
    """The processes that a launcher started: they divide the problems among them."""
    from groupwise.distributed import open_world
    from groupwise.models.load import resolve_device

    return open_world(resolve_device(config.model.device).type == "cpu", config.training.process_timeout_s)


def _with_weights(
    name: str, config: Config, aside: Console, world: World, partial: PartialRecords | None, title: bool
) -> list[Evaluation]:
    from groupwise.evaluation.models import evaluate_model
    from groupwise.models.embedded import fetch_model
    from groupwise.tracking import ConsoleTracker, Trackers, make_trackers
    from groupwise.tracking.tables import short_name
    from groupwise.tracking.text import harmless
    from groupwise.training.short_memory import SHORT_WHILE_JUDGING, explain_short_memory

    fetch_model(config.model.model_copy(update={"name": name}))
    if title:
        aside.print(harmless(name, "bold"), soft_wrap=True)
    terminal = ConsoleTracker(
        aside, show=config.evaluation.show, judged=" ".join(short_name(name).split("\n")) if title else None
    )
    trackers = make_trackers(config, None, terminal) if world.is_first else Trackers()
    try:
        with explain_short_memory(remedy=SHORT_WHILE_JUDGING):
            return evaluate_model(name, config, further=True, trackers=trackers, world=world, partial=partial)
    finally:
        trackers.close()


def _as_json(judged: Sequence[Judged], comparisons: list[dict[str, Any]], data: str | None) -> dict[str, object]:
    first, evaluations = judged[0]
    models = [{"model": model, "evaluations": [e.to_summary() for e in one_models]} for model, one_models in judged]
    return {
        "model": first,
        "data": data or evaluations[0].conditions.get("data"),
        "evaluations": [one.to_summary() for one in evaluations],
        "models": models,
        "comparisons": comparisons,
    }


def _print(judged: Sequence[Judged], comparisons: Sequence[dict[str, Any]], out: Console) -> None:
    from groupwise.tracking.tables import comparison_lines, condition_lines, judged_tables, legend
    from groupwise.tracking.text import harmless

    rows = [(model, e.to_summary()) for model, evaluations in judged for e in evaluations]
    for table in judged_tables(rows, harmless):
        out.print(table)
        out.print()
    for line in (*condition_lines(rows), *comparison_lines(comparisons), legend(rows)):
        out.print(harmless(line), soft_wrap=True)
