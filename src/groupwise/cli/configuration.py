"""``groupwise recipes`` and ``groupwise config``: what can be run, and what can be set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from groupwise.cli.options import AsJson
from groupwise.config import FieldDoc, explain
from groupwise.config import recipes as shipped_recipes
from groupwise.config.problems import shown, unknown_key
from groupwise.errors import ConfigError

__all__ = ["config", "recipes"]


def recipes(as_json: AsJson = False) -> None:
    """List the recipes that come with groupwise.

    A recipe is a YAML file of settings; read one at the path that --json shows, copy it and change it.

    \b
    Examples:
      groupwise recipes
      groupwise train gsm8k-0.5b --dry-run
    """
    from groupwise.cli.show import console, print_json, table

    found = shipped_recipes()
    if as_json:
        print_json([{"name": recipe.name, "summary": recipe.summary, "path": str(recipe.path)} for recipe in found])
        return
    console().print(table(["recipe", "what it does"], [(recipe.name, recipe.summary) for recipe in found]))


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


def _default(value: Any) -> str:
    return value if value == "(required)" else shown(value)


def _matching(field: str | None) -> list[FieldDoc]:
    docs = explain()
    if field is None:
        return docs
    wanted = field.strip(".")
    for test in (
        lambda doc: doc.path == wanted or doc.path.startswith(wanted + "."),
        lambda doc: doc.leaf == wanted or f".{doc.path}".endswith("." + wanted) or f".{wanted}." in f".{doc.path}.",
    ):
        found = [doc for doc in docs if test(doc)]
        if found:
            return found
    raise ConfigError(unknown_key(wanted))
