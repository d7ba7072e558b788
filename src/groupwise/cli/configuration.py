"""``groupwise recipes``, ``groupwise config`` and ``groupwise algorithms``: what can be run, and what can be set."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from typing import Annotated, Any

import typer

from groupwise.cli.options import AsJson
from groupwise.config import FieldDoc, explain
from groupwise.config import recipes as shipped_recipes
from groupwise.config.algorithm import AlgorithmConfig
from groupwise.config.fields import ITEM, schema_path
from groupwise.config.formula import formula, in_words
from groupwise.config.presets import PRESETS
from groupwise.config.problems import unknown_key
from groupwise.config.section import shown
from groupwise.errors import ConfigError

__all__ = ["algorithms", "config", "recipes"]


def recipes(as_json: AsJson = False) -> None:
    """List the recipes that come with groupwise.

    A recipe is a YAML file of settings; read one at the path that --json shows, copy it and change it.

    \b
    Examples:
      groupwise recipes
      groupwise train gsm8k-0.5b --dry-run
    """
    from groupwise.cli.show import console, print_json, table

    listed = shipped_recipes()
    if as_json:
        print_json([{"name": recipe.name, "summary": recipe.summary, "path": str(recipe.path)} for recipe in listed])
        return
    console().print(table(["recipe", "what it does"], [(recipe.name, recipe.summary) for recipe in listed]))


def config(
    field: Annotated[
        str | None,
        typer.Argument(metavar="FIELD", help="A section, a setting, or the last part of its name; all of them without it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the settings of a run: what each does, what it may be, and its default.

    \b
    Examples:
      groupwise config                        all of them
      groupwise config rollout                one section
      groupwise config completions_per_prompt one setting
    """
    from groupwise.cli.show import console, print_json

    chosen = _matching(field)
    if as_json:
        print_json([asdict(doc) for doc in chosen])
        return
    from groupwise.tracking.text import harmless

    out, section = console(), None
    for doc in chosen:
        if (parent := doc.path.rpartition(".")[0]) != section:
            out.print(harmless(f"\n{parent}", "bold") if section is not None else harmless(parent, "bold"))
            section = parent
        out.print(harmless(f"  {doc.name}", "cyan") + harmless(f"  {doc.type}, default {_default(doc.default)}", "dim"))
        out.print(harmless(f"    {doc.description}"), soft_wrap=False)


def _default(value: object) -> str:
    return "(required)" if value == "(required)" else shown(value)


def _matching(field: str | None) -> list[FieldDoc]:
    docs = explain()
    if field is None:
        return docs
    wanted = schema_path(field.strip("."))  # an entry of a list, functions[0], is any of its entries
    for test in (
        lambda doc: doc.path == wanted or doc.path.startswith((f"{wanted}.", f"{wanted}{ITEM}.")),
        lambda doc: doc.leaf == wanted or f".{doc.path}".endswith("." + wanted) or f".{wanted}." in f".{doc.path}.",
    ):
        matching = [doc for doc in docs if test(doc)]
        if matching:
            return matching
    raise ConfigError(unknown_key(wanted))


def algorithms(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A preset; all of them without it.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the published methods (algorithm.preset), or show one with its formula.

    A preset is a row of choices; any of them can be set by itself, as in algorithm.advantage.scale=none.

    \b
    Examples:
      groupwise algorithms
      groupwise algorithms dapo
      groupwise train quickstart algorithm.preset=dapo algorithm.updates_per_batch=2
    """
    from groupwise.cli.show import console, print_json, table

    if name is not None and name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(PRESETS)}"
        raise ConfigError(f"{name} is not a preset: {remedy}")
    if as_json:
        print_json(_record(name) if name is not None else [_record(one) for one in PRESETS])
        return
    if name is not None:
        _show(name)
        return
    made = table(["preset", "arXiv", "baseline, scale", "ratio, loss, clip range", "aggregation", "KL"], map(_row, PRESETS))
    for column in (made.columns[0], made.columns[1], made.columns[4]):
        column.no_wrap = True  # these are for copying
    console().print(made)


def _row(name: str) -> tuple[str, ...]:
    words = in_words(AlgorithmConfig.model_validate({"preset": name}))
    update = ", ".join(part for part in (words["ratio"], words["surrogate"], words["clip_range"]) if part != "-")
    return name, PRESETS[name].paper, f"{words['baseline']}, {words['scale']}", update, words["aggregation"], words["kl"]


def _record(name: str) -> dict[str, Any]:
    """The keys and their order are promised: programs read them."""
    preset, algorithm = PRESETS[name], AlgorithmConfig.model_validate({"preset": name})
    return {
        "name": name,
        "title": preset.title,
        "paper": preset.paper,
        "url": f"https://arxiv.org/abs/{preset.paper}",
        "summary": preset.summary,
        "beyond": preset.beyond or None,
        "settings": dict(preset.values),
        "choices": in_words(algorithm),
        "formula": formula(algorithm),
    }


def _show(name: str) -> None:
    from groupwise.cli.show import console
    from groupwise.tracking.text import harmless

    record, out = _record(name), console()
    out.print(harmless(f"{record['title']}, arXiv {record['paper']}", "bold"))
    out.print(harmless(record["summary"]), soft_wrap=False)
    out.print()
    for line in record["formula"]:
        out.print(harmless(f"  {line}"), soft_wrap=True)
    out.print()
    for setting, value in PRESETS[name].settings.items():
        out.print(harmless(f"  algorithm.{setting}={shown(value)}", "cyan"))
    if record["beyond"]:
        out.print()
        out.print(harmless(record["beyond"]), soft_wrap=False)
