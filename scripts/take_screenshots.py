"""Pictures of a run for the documentation: the live view as SVG, drawn from its numbers, and the report in a headless Chromium.

python scripts/take_screenshots.py runs/quickstart-DATE-TIME docs/screenshots --ill RUN

``--ill`` names a run with a disease (``python -m tests.doctor.diseases --small --kept FOLDER`` makes some), for what the doctor finds.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from groupwise.report import write_report
from groupwise.tracking import ConsoleTracker
from groupwise.tracking.reading import RunRecord, read_run

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.report.browser import Browser  # noqa: E402

WIDTH = 96
SHOTS = (
    ("report-wide", 1200, 975, False, "header"),
    ("report-group-dark", 1200, 990, True, "#group"),
    ("report-narrow", 420, 840, False, "#before-after"),
)
ILL = (("report-doctor", 1200, 760, False, "#findings"),)
"""Name, width, height, dark, and what stands at the top."""


def live_view(run: RunRecord, out: Path, share: float = 0.6) -> None:
    """The terminal as it was at ``share`` of the run. Time left is reckoned from the steps' own times."""
    console = Console(width=WIDTH, force_terminal=True, file=io.StringIO(), record=True, color_system="truecolor")
    drawn = Console(width=WIDTH, force_terminal=True, file=io.StringIO(), record=True, color_system="truecolor")
    tracker = ConsoleTracker(console)
    steps = run.steps[: max(1, round(share * len(run.steps)))]
    with tracker.phase("GRPO", len(run.steps), "steps") as bar:
        bar.started_s = time.monotonic() - sum(row.get("time/step_s") or 0.0 for row in steps)
        for row in steps:
            known = {name: value for name, value in row.items() if value is not None and name not in ("step", "time_s")}
            tracker.step(int(row["step"] or 0), known)
            bar.advance(completions=run.config.completions_per_step if run.config else 0)
        drawn.print(tracker.display)
    drawing = drawn.export_svg(title="groupwise train", unique_id="live")
    out.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL), encoding="utf-8")  # nothing is fetched


def report(page: Path, out: Path, shots: Sequence[tuple[str, int, int, bool, str]] = SHOTS) -> None:
    browser = Browser(Path(tempfile.mkdtemp()))
    try:
        for name, width, height, dark, top in shots:
            browser.open(page, width=width, height=height, dark=dark)
            browser.until(
                "document.querySelectorAll('.row').length > 0 && document.querySelectorAll('#before-after pre').length > 0"
            )
            if top == "#group":
                open_group(browser)
            if top == "#findings":
                browser.run("document.querySelector('#findings details').open = true")
            browser.run(f"document.querySelector('{top}').scrollIntoView()")
            time.sleep(1)  # charts are drawn when they come near the window
            browser.picture(out / f"{name}.png")
        assert browser.problems == [], browser.problems
    finally:
        browser.close()


def open_group(browser: Browser) -> None:
    """A right completion that stood out in its group, of those whose tokens were recorded if there are any."""
    for label, value in (("Answer", "right"), ("Order", "-advantage")):
        browser.run(
            f"(() => {{ const e = document.querySelector(`#completions [aria-label='{label}']`); e.value = '{value}'; "
            "e.dispatchEvent(new Event('change')); })()"
        )
    time.sleep(1)
    for row in range(20):
        browser.run(f"document.querySelectorAll('.row')[{row}].click()")
        time.sleep(0.3)
        browser.until("document.getElementById('how')")
        if browser.run("Boolean(document.querySelector('#group .tokens'))"):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ill", type=Path, metavar="RUN")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    live_view(read_run(chosen.run), chosen.out / "live.svg")
    with tempfile.TemporaryDirectory() as folder:
        report(write_report([chosen.run], Path(folder) / "report.html").path, chosen.out)
        if chosen.ill:
            report(write_report([chosen.ill], Path(folder) / "ill.html").path, chosen.out, ILL)


if __name__ == "__main__":
    main()
