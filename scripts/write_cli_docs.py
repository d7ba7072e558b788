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

Every command prints its part of this page with `--help`. `scripts/write_cli_docs.py` writes this page.

Common to the commands, and left out below:

- `KEY=VALUE` changes a [setting](configuration.md), as in `rollout.temperature=0.8`.
- `--json` prints JSON; progress goes to standard error.
- `--num-processes N` starts N processes on this machine, one for each GPU.
- Exit code 0 means success, 2 a mistake in settings, data or options, 130 Ctrl-C; [a training run has more](../how-to/resuming.md).
- `GROUPWISE_DEBUG=1` in the environment shows the traceback of a mistake.
"""
WIDTH = 120
COMMON = ("-h, --help ", "--json ", "--num-processes ", "KEY=VALUE ")


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
        lines = [line.rstrip() for line in text.splitlines() if not line.strip().startswith(COMMON)]
        words = re.sub(r"\n\n(Options|Arguments):(?=\n\n|$)", "", "\n".join(lines).strip("\n"))
        parts.append(f"## {name}\n\n```text\n{words}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
