"""``groupwise algorithms``: the published methods as choices, and one with its formula."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import typer

from groupwise.cli.options import AsJson
from groupwise.config.algorithm import AlgorithmConfig
from groupwise.config.formula import formula, in_words
from groupwise.config.presets import PRESETS
from groupwise.config.problems import shown as shown_value
from groupwise.errors import ConfigError

__all__ = ["algorithms"]


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

    shown, out = _record(name), console()
    out.print(harmless(f"{shown['title']}, arXiv {shown['paper']}", "bold"))
    out.print(harmless(shown["summary"]), soft_wrap=False)
    out.print()
    for line in shown["formula"]:
        out.print(harmless(f"  {line}"), soft_wrap=True)
    out.print()
    for setting, value in PRESETS[name].settings.items():
        out.print(harmless(f"  algorithm.{setting}={shown_value(value)}", "cyan"))
    if shown["beyond"]:
        out.print()
        out.print(harmless(shown["beyond"]), soft_wrap=False)
