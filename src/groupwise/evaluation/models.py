"""What ``groupwise eval`` does: judge models by name, one after the other, and compare them."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config.schema import Config
from groupwise.data.latex import renew_budget
from groupwise.data.named import canonical_name, is_prepared
from groupwise.data.readers import names_function, read_whole
from groupwise.distributed import World
from groupwise.durable import write_bytes
from groupwise.errors import ConfigError, DataError
from groupwise.evaluation.figures import headline_verdict, holm, paired_comparison
from groupwise.evaluation.judging import Evaluation, evaluate_stage, evaluation_of, held_out_prompts, with_shots
from groupwise.evaluation.records import CONDITIONS, PartialRecords, judge_again, read_records, refuse_to_lose, told_if_lost
from groupwise.tracking import Trackers
from groupwise.tracking.files import json_line

__all__ = [
    "Judged",
    "check_replaced",
    "compare_models",
    "data_overrides",
    "evaluate_model",
    "partial_path",
    "partial_records",
    "rescore",
    "told_apart",
    "write_records",
]

logger = logging.getLogger("groupwise")

Judged = tuple[str, list[Evaluation]]
"""A model as it was named, and its evaluations, one a mode."""


def evaluate_model(
    model: str,
    config: Config,
    *,
    further: bool = False,
    trackers: Trackers | None = None,
    world: World | None = None,
    partial: PartialRecords | None = None,
) -> list[Evaluation]:
    """Load ``model`` (a folder, also an adapter's, or a name) and judge it in every mode of the config.

    Data, prompt, token limit and seed are the config's, as are the model's dtype and device. Model folder, problems and prompts
    are checked before weights are read. Records go to ``trackers``. ``further`` adds the verdicts ``latex`` and the field's. The
    processes of ``world`` divide the problems, and all get the same evaluations. ``partial`` has what was judged before, and gets the
    rest.

    Raises:
        ModelError, DataError: what the model or the data lack.
        ConfigError: no vLLM samples for the config.
    """
    from groupwise.data.prompts import resolve_system, unknown_arguments
    from groupwise.data.sources import load_held_out
    from groupwise.engines import make_engine
    from groupwise.engines.vllm.engine import check_vllm
    from groupwise.engines.wrappers import DealtEngine
    from groupwise.episodes import open_episodes, playing
    from groupwise.models.devices import with_dtype
    from groupwise.models.load import (
        check_model,
        context_length,
        end_token_ids,
        generation_config,
        load_model_config,
        load_policy,
        load_tokenizer,
        with_base,
    )
    from groupwise.serving.agents import open_agents

    revision = config.model.revision if model == config.model.name else None  # a revision belongs to the model it was set for
    model_config, adapter = with_base(config.model.model_copy(update={"name": model, "revision": revision}))
    check_model(model_config)
    system, style = resolve_system(config.prompt, config.data)
    held_out = load_held_out(config.data)
    problems = with_shots(held_out[: config.evaluation.problems], config, style)
    tokenizer = load_tokenizer(model_config, adapter)
    # A note alone: the settings are for all models that are judged.
    if said := unknown_arguments(tokenizer, config.prompt.template_arguments):
        logger.warning("%s: %s", model, said)
    hf_config = load_model_config(model_config)
    context = context_length(hf_config, tokenizer)
    dtype = with_dtype(model_config).dtype
    room = min(context, check_vllm(config.rollout, hf_config, model, config.model.device, dtype) or context)
    episodes = open_episodes(config, tokenizer, end_token_ids(tokenizer, hf_config, generation_config(model_config)), open_agents)
    prompts = held_out_prompts(problems, tokenizer, config, system, room, episodes, by_vllm=room < context)
    world = world or World()
    policy = load_policy(model_config, adapter=adapter)
    engine = playing(make_engine(policy, config.rollout, world=world, frozen=True), episodes)
    try:
        results = evaluate_stage(
            DealtEngine(engine, world),
            prompts,
            stage="eval",
            config=config,
            style=style,
            system=system,
            further=further,
            available=len(held_out),
            trackers=trackers,
            partial=partial,
        )
    finally:
        engine.close()
    del engine, policy
    gc.collect()  # the next model needs the memory
    return results


def rescore(path: Path) -> list[Judged]:
    """Records that ``eval --out`` wrote, judged again by today's rules, for each model and mode in the file.

    Raises:
        DataError: the file holds something else, or a sample of a problem twice.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    problem, seen = None, set[tuple[str, str, str, int]]()
    for record in read_records(path):
        if isinstance(sample := record.get("sample"), int):  # files of the first version have none
            one = (record["model"], record["mode"], record["problem"], sample)
            if one in seen:
                raise DataError(
                    f"the records {str(path)!r} have sample {sample} of problem {one[2]} twice for {one[0]} ({one[1]}), as where two "
                    "evaluations were put into one file: give each a file of its own"
                )
            seen.add(one)
        if record["problem"] != problem:
            renew_budget()  # as in judging: what some answers cost must not leave the other problems' unchecked
            problem = record["problem"]
        groups.setdefault((record["model"], record["mode"]), []).append(judge_again(record))
    judged: dict[str, list[Evaluation]] = {}
    for (model, mode), records in groups.items():
        asked = {"temperature": None, "max_tokens": None, **{key: records[0][key] for key in CONDITIONS if key in records[0]}}
        evaluation = evaluation_of(records, stage="eval", mode=mode, conditions=asked)
        judged.setdefault(model, []).append(evaluation)
    return list(judged.items())


def told_apart(records: Mapping[str, Sequence[Judged]], weights: Collection[str]) -> dict[str, list[Judged]]:
    """The models of each file of records. One that stands in another file too, or is among the ``weights`` that are judged now, is named
    with its file: ``runs/NAME (yesterday.jsonl)``."""
    times = Counter([*weights, *(model for judged in records.values() for model, _ in judged)])
    return {
        file: [(f"{model} ({file})" if times[model] > 1 else model, found) for model, found in judged]
        for file, judged in records.items()
    }


def compare_models(judged: Sequence[Judged], unpaired: list[DataError] | None = None) -> list[dict[str, Any]]:
    """Each model against the first, mode by mode, by ``headline_verdict``. ``p_adjusted`` is Holm's, over the comparisons of a mode.

    Raises:
        DataError: two of them were not judged on the same problems, or not asked as often. Where there is a list ``unpaired`` it gets
            that, and the others are compared.
    """
    compared: list[dict[str, Any]] = []
    first, baseline = judged[0]
    for reference in baseline:
        rows = []
        for model, evaluations in judged[1:]:
            other = next((e for e in evaluations if e.mode == reference.mode), None)
            if other is None:
                continue
            verdict = headline_verdict(reference.records, other.records)
            try:
                paired = paired_comparison(reference.records, other.records, key=verdict)
            except DataError as error:
                told = DataError(f"{first} and {model} cannot be compared ({reference.mode}): {error}")
                if unpaired is None:
                    raise told from error
                unpaired.append(told)
                continue
            rows.append({"mode": reference.mode, "before": first, "after": model, "verdict": verdict, **paired})
        for row, adjusted in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
            row["p_adjusted"] = adjusted
        compared += rows
    return compared


def partial_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def partial_records(
    out: Path, resume: bool, config: Config, world: World, models: Sequence[str], others: Collection[tuple[str, str]] = ()
) -> PartialRecords:
    """Where an evaluation of ``models`` that writes to ``out`` keeps what it has judged so far. With ``resume`` it begins with what a
    stopped one left there, or else with ``out`` itself. ``others``: models and modes that the command has records of.

    Raises:
        ConfigError: there is such a file, and ``resume`` is false.
        DataError: it or ``out`` cannot be read, or holds something else, or what this command would lose.
        TrainingError: it cannot be written.
    """
    path = partial_path(out)
    found = world.on_rank0(lambda: PartialRecords.read(path if path.exists() or not resume else out))
    if found and not resume:
        raise ConfigError(
            f"{str(path)!r} holds {len(found):,} completions that an evaluation judged before it was stopped: resume it with --resume, or "
            "delete the file to start from the first problem"
        )
    partial = PartialRecords(path, found, config.rollout.max_concurrent_sequences, world.size, writes=world.is_first)
    asked = {*others, *((model, mode) for model in models for mode in config.evaluation.modes)}
    refuse_to_lose(out, found, asked)
    world.on_rank0(lambda: check_replaced(out, asked))
    return partial


def check_replaced(out: Path, asked: Collection[tuple[str, str]]) -> None:
    """Raise DataError where ``out`` has records of a model or mode that is not among ``asked`` (model, mode), or something else: it will be
    replaced."""
    try:
        lines = PartialRecords.read(out)
    except DataError as error:
        raise DataError(
            f"--out {str(out)!r} would be replaced, and has no records ({error}): name another, or delete it"
        ) from error
    refuse_to_lose(out, lines, asked)


def write_records(path: Path, judged: Sequence[Judged]) -> int:
    """Write one line per completion with all that is needed to judge it again; returns how many. A file of that name is replaced.

    Raises TrainingError where the disk does not take them.
    """
    path, partial = Path(os.path.realpath(path)), partial_path(path)
    lines = [  # a record that was read has its former name, and `told_apart` may have given it another
        json_line({"model": model, "mode": evaluation.mode, **evaluation.conditions, **record} | {"model": model})
        for model, evaluations in judged
        for evaluation in evaluations
        for record in evaluation.records
    ]
    if os.path.exists(partial):  # Path.exists raises where the name is too long with what is added
        remedy = f"then go on with --resume, since what was judged is in {str(partial)!r}"
    else:
        remedy = "then write them again"
    with told_if_lost(path, remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, b"".join(lines))
    return len(lines)


def data_overrides(data: str | None) -> list[str]:
    """The settings with which ``data`` is judged: of ``gsm8k:test`` that split, of a file all of it, of the generator or a prepared folder
    its held-out problems. A run's ``data.folder`` counts for data sets known by name alone.

    Raises ConfigError for a split of what has none.
    """
    if data is None:
        return []
    source, colon, split = data.rpartition(":")
    if not colon or names_function(data) or Path(data).exists():
        source, split = data, ""
    if split and (whole := read_whole(source)):
        raise ConfigError(f"{data!r} names the split {split!r}, but {source!r} is {whole}, which has none: leave :{split} out")
    chosen = [f"data.source={source}", *([] if canonical_name(source) else ["data.folder=null"])]
    if not split and (source == "arithmetic" or is_prepared(source)):
        return [*chosen, "data.eval_source=null", "data.eval_split=null"]
    return [*chosen, f"data.eval_source={source}", f"data.eval_split={split or 'null'}"]
