"""``groupwise report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.options import AsJson

__all__ = ["report"]


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs, going on or finished.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write; else RUN/report.html, or report.html for several."),
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts/--no-texts", help="With or without what the models wrote, and the problems.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about one run or several: curves, completions, evaluations, settings, and what the doctor finds.

    The page is a single file that opens from disk without a network.

    \b
    Examples:
      groupwise report runs/quickstart-1 runs/quickstart-2 --out both.html
      groupwise report runs/quickstart-1 --no-texts --out numbers-only.html
    """
    from groupwise.cli.show import console, print_json
    from groupwise.report import write_report
    from groupwise.tracking.text import harmless

    made = write_report(runs, out, completions=texts)
    if as_json:
        facts = {"path": str(made.path), "size_bytes": made.size_bytes, "text_bytes": made.text_bytes}
        print_json({**facts, "runs": list(made.runs), "completions": made.completions})
        return
    size, inside = made.size_bytes / 2**20, f"{len(made.runs)} {'run' if len(made.runs) == 1 else 'runs'}"
    console().print(
        harmless(f"{made.path}: {size:.1f} MiB, {inside}, {made.completions:,} completions; open it in a browser"), soft_wrap=True
    )
