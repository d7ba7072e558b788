"""The modules of groupwise as a whole: who imports whom, and what the architecture page says of them."""

from __future__ import annotations

import re
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "groupwise"
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count; those under ``TYPE_CHECKING``, which never run, do not."""
    graph = grimp.build_graph("groupwise", exclude_type_checking_imports=True, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_the_page_names_every_module_and_no_other() -> None:
    rows = re.findall(r"^\| `([\w/]+)/` \| .* \| (.*) \|$", section("Modules"), re.MULTILINE)
    named = {("." if package == "groupwise" else package): set(modules.split(" · ")) for package, modules in rows}
    there: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        if not path.stem.startswith("__"):
            there.setdefault(path.parent.relative_to(SOURCES).as_posix(), set()).add(path.stem)
    assert named == there


def test_names_of_the_page_are_where_it_says() -> None:
    rows = re.findall(r"^\| .* \| `(src/groupwise/[\w/]+\.py)` \| `(\w+)` \|$", section("Where to look"), re.MULTILINE)
    assert len(rows) > 10
    for file, name in rows:
        assert re.search(rf"^ *(?:def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, name)


def test_the_packages_without_torch_are_in_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (held,) = [set(one["source_modules"]) for one in contracts if one["id"] == "no-torch-below"]
    (named,) = re.findall(r"^(.*) import neither torch nor transformers", section("Modules"), re.MULTILINE)
    packages = {f"groupwise.{path.name}" for path in SOURCES.iterdir() if path.is_dir()}
    assert {f"groupwise.{package}" for package in re.findall(r"`(\w+)`", named)} == held & packages


def test_the_path_of_a_step_is_that_of_the_code() -> None:
    lines = [
        line.lstrip("│├└─ ")
        for line in section("What flows").splitlines()
        if ".py " in f"{line} " and not line.startswith("What")
    ]
    for line in lines:
        names, files = line.partition("  ")[0].split(", "), re.findall(r"[\w/]+\.py", line)
        texts = [(SOURCES / file).read_text(encoding="utf-8") for file in files]
        for name in names:
            parts = name.split(".")
            assert any(all(re.search(rf"(?:def|class) {part}\b", text) for part in parts) for text in texts), line
    assert len(lines) > 10
