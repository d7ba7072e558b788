"""Write docs/reference/cli.md from the commands' own help: ``python scripts/write_cli_docs.py``. A test checks that it is current."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from groupwise.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# The command line

A command's `--help` prints its part of this page, with examples. `scripts/write_cli_docs.py` writes it.

Common to the commands, and left out below:

- `RECIPE|FILE` is a recipe's name, or a YAML file; `SOURCE` any [source of data](../how-to/data.md#sources).
- `KEY=VALUE` changes a [setting](configuration.md), as in `rollout.temperature=0.8`.
- `--json` prints JSON; progress goes to standard error.
- `--num-processes N` starts N processes on this machine, one for each GPU; `auto` as many as it has GPUs.
- `--device-map auto` lays a large model over all GPUs, the machine's memory and the disk (`eval`, `generate`, `serve`).
- `--trust-remote-code` runs Python code that comes with the model (`generate`, `serve`, `merge`).
- Exit code 0 means success, 2 a mistake in settings, data or options, 130 Ctrl-C; [a training run has more](../how-to/resuming.md).
- `GROUPWISE_DEBUG=1` in the environment shows the traceback of a mistake.
"""
WIDTH = 120
COMMON = (
    "-h, --help ",
    "--json ",
    "--num-processes ",
    "KEY=VALUE ",
    "--device-map ",
    "--trust-remote-code",
    "RECIPE|FILE <",
    "SOURCE <",
)
KIND = re.compile(r"<(int|float|str|path|list)[a-z \[\]]*>(?= |$)")
LIMITS = re.compile(r"  \[(required|x>=[\d.]+)\]|; [\d.<=]*x[<>=]+[\d.]+(?=\])")


def commands(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    """Each command that does something, by its full name, with its help."""
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent, **settings)
    if hasattr(command, "commands"):
        for word, below in command.commands.items():
            yield from commands(below, f"{name} {word}", context)
    else:
        yield name, command.get_help(context)


def render() -> str:
    parts = [HEAD]
    for name, text in commands(typer.main.get_command(app), "groupwise"):
        lines = [_plain(line).rstrip() for line in _own(text.removeprefix("Usage: ").splitlines())]
        text = re.sub(r"\n\n  Examples:\n(    .*\n?)+", "\n", "\n".join(lines).strip("\n"))
        words = re.sub(r"\n\n(Options|Arguments):(?=\n\n|$)", "", text)
        parts.append(f"## {name}\n\n```text\n{words}\n```\n")
    return "\n".join(parts)


def _own(lines: list[str]) -> Iterator[str]:
    """Without the common arguments and options, nor the further lines of their descriptions."""
    left_out = False
    for line in lines:
        left_out = line.strip().startswith(COMMON) or (left_out and line.startswith(" " * 12))
        if not left_out:
            yield line


def _plain(line: str) -> str:
    """Without types, but for the value of an option, and without limits, which the errors tell. Columns stay."""
    value = {"int": "N", "float": "X", "str": "TEXT"} if line.strip().startswith("--") else {}
    return LIMITS.sub("", KIND.sub(lambda found: value.get(found[1], "").ljust(len(found[0])), line))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
