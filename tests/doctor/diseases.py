"""Make runs ill with what each rule of the doctor is about, and write what it said as a table.

    python -m tests.doctor.diseases                          # those of tiny models, a few minutes of one core
    python -m tests.doctor.diseases --only length stop       # those whose name has one of the words
    python -m tests.doctor.diseases --small                  # those of the quickstart's model of 135M, about half an hour
    python -m tests.doctor.diseases --kept FOLDER --write    # runs there are not made again; the table goes into benchmarks/TRIALS.md

Each is a real run (or settings before a run) with the disease caused in it; a defect of the program itself is put in, and the table
says so. No run is made up. Rules fire on what was meant to have them and are silent on the healthy runs, or the command fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from groupwise.doctor import Finding, diagnose_prepared, diagnose_run
from groupwise.threads import fix_threads
from groupwise.tracking.reading import read_run
from groupwise.training.loop import train
from groupwise.training.setup import prepare
from tests.doctor.ill_runs import DISEASES, HEALTHY, Disease, settings_of
from tests.doctor.patients import REWARDS, Clinic
from tests.survival.page import slug, stamp, write_section

__all__ = ["ailing", "find", "main", "table"]

Found = Mapping[str, Finding]


def find(disease: Disease, clinic: Clinic, kept: Path) -> Found:
    """What the doctor says of the run (made in ``kept``, unless it is there already), by rule."""
    config = settings_of(disease, clinic)
    given = {entry.function: REWARDS[entry.function]() for entry in config.rewards.functions if entry.function in REWARDS}
    if disease.before:
        return {finding.rule: finding for finding in diagnose_prepared(prepare(config, given))}
    folder = kept / slug(disease.name)
    if not (folder / "done").exists():
        with (disease.defect or nullcontext)():
            train(config, rewards=given, console=Console(quiet=True), run_folder=folder, resume=folder.exists())
        (folder / "done").touch()
    return {finding.rule: finding for finding in diagnose_run(read_run(folder))}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every rule fired on the run that was meant to have its disease, and none on a healthy one."""
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        kept = options.kept or Path(scratch)
        clinic = Clinic(kept / "models")
        chosen = [d for d in (*HEALTHY, *DISEASES) if d.small == options.small and wanted(d, options.only)]
        found = {disease: told(disease, clinic, kept) for disease in chosen}
    text = table(found, "python -m tests.doctor.diseases" + " --small" * options.small)
    print(text)
    if options.write:
        write_section("diseases of 135M" if options.small else "diseases", text)
    missed = [f"{disease.name}: {rule}" for disease, one in found.items() for rule in disease.rules - set(one)]
    false = [f"{disease.name}: {rule}" for disease, one in found.items() if not disease.rules for rule in ailing(one)]
    for line in [*(f"MISSED  {one}" for one in missed), *(f"FALSE ALARM  {one}" for one in false)]:
        print(line, file=sys.stderr)
    return 1 if missed or false else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.doctor.diseases")
    made.add_argument("--only", nargs="+", default=[], metavar="WORD", help="runs whose name has one of the words")
    made.add_argument("--small", action="store_true", help="those of the quickstart's model of 135M instead")
    made.add_argument("--kept", type=Path, metavar="FOLDER", help="where runs are kept, and not made again")
    made.add_argument("--write", action="store_true", help="put the table into benchmarks/TRIALS.md")
    return made


def wanted(disease: Disease, words: Sequence[str]) -> bool:
    return not words or any(word in disease.name for word in words)


def told(disease: Disease, clinic: Clinic, kept: Path) -> Found:
    begun = time.perf_counter()
    found = find(disease, clinic, kept)
    print(f"{time.perf_counter() - begun:6.1f} s  {disease.name}: {', '.join(found) or '-'}", file=sys.stderr, flush=True)
    for rule in sorted(disease.rules & set(found)):
        print(f"          {rule}: {found[rule].summary}", file=sys.stderr, flush=True)
    return found


def ailing(found: Found) -> list[str]:
    return [rule for rule, finding in found.items() if finding.severity in ("critical", "warning")]


def table(found: Mapping[Disease, Found], command: str) -> str:
    """How many rules fired on the runs that were meant for them, and on which not; whether the healthy runs are silent; and what else
    was found in each run. What each rule said is printed by ``told``."""
    meant = {rule for disease in found for rule in disease.rules}
    healthy = {disease.name: one for disease, one in found.items() if not disease.rules}
    missed = [f"{rule} ({cause(disease)})" for disease, one in found.items() for rule in sorted(disease.rules - set(one))]
    false = [f"{rule} ({name})" for name, one in healthy.items() for rule in one if rule in meant]
    lines = [
        f"{len(meant)} rules, {len(found) - len(healthy)} runs. Not found: {', '.join(missed) or 'none'}. "
        f"Found on the healthy runs ({', '.join(healthy)}): {', '.join(false) or 'none'}."
    ]
    return "\n".join([*lines, "", *also(found), stamp(command)])


def also(found: Mapping[Disease, Found]) -> list[str]:
    """What a disease of the larger model brought along: such a run has rarely one thing wrong with it."""
    more = {d: [rule for rule in ailing(one) if rule not in d.rules] for d, one in found.items() if d.small and d.rules}
    lines = [f"- {disease.name}: {', '.join(f'`{rule}`' for rule in rules)}" for disease, rules in more.items() if rules]
    return ["Also found, critical findings and warnings:", "", *lines, ""] if lines else []


def cause(disease: Disease) -> str:
    model = " (SmolLM2-135M)" if disease.small else ""
    return f"{disease.name}{model}{', put in' if disease.defect else ''}{', before the run' if disease.before else ''}"


if __name__ == "__main__":
    fix_threads(1)  # float32 is rounded otherwise with another number, and a taught patient is then another one
    sys.exit(main())
