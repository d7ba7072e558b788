"""Data sets known by name: the Hub's repositories, and copies in a folder that take their place."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.config.schema import DataConfig, PromptConfig
from groupwise.data.inspect import inspect_source
from groupwise.data.named import NAMED, canonical_name, local_copy
from groupwise.data.prompts import resolve_system
from groupwise.data.sources import held_out_from, load_held_out, load_problems
from groupwise.errors import DataError

LOCAL = {"gsm8k": 1319, "svamp": 1000, "math500": 500, "aime24": 30, "aime25": 30, "amc23": 83}
"""Problems of each in the development data, by the name alone. SVAMP lies there whole, and not as its test split of 300."""


@pytest.fixture
def collected(shared_data: Path, tmp_path: Path) -> Path:
    """A folder as a user would keep one: subfolders and files of different layouts."""
    for part in ("gsm8k", "competition-math", "math-benchmarks", "svamp"):
        (tmp_path / part).symlink_to(shared_data / part)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "name"),
    [("MATH-500", "math500"), ("math_500", "math500"), ("AIME24", "aime24"), ("aime-2025", "aime25"), ("gsm8k", "gsm8k")],
)
def test_a_name_may_be_written_in_several_ways(written: str, name: str) -> None:
    assert canonical_name(written) == name


@pytest.mark.parametrize("other", ["./gsm8k", "openai/gsm8k", "gsm8k.jsonl", "arithmetic", "", "math"])
def test_paths_and_hub_names_are_no_short_names(other: str) -> None:
    assert canonical_name(other) is None


@pytest.mark.parametrize("name", LOCAL)
def test_named_benchmarks_are_found_in_a_folder_and_read_whole(collected: Path, name: str) -> None:
    data = DataConfig(source=name, eval_source=name, folder=str(collected))
    problems = load_held_out(data)
    assert len(problems) == LOCAL[name]
    assert len({p.id for p in problems}) == len(problems)
    assert all(p.id.startswith(f"{name}:") and p.answer for p in problems)
    assert resolve_system(PromptConfig(), data)[1] == NAMED[name].style
    assert held_out_from(data).startswith(f"{name}:{NAMED[name].eval_split} (the copy ")
    assert "Hub" not in held_out_from(data)
    if name in ("aime24", "aime25", "amc23"):
        assert sum(p.answer.isdigit() for p in problems) >= len(problems) - 2, "142.0 is read as 142"


def test_the_training_split_is_taken_from_the_same_copy(collected: Path) -> None:
    found = load_problems(DataConfig(source="gsm8k", eval_split="test", folder=str(collected)))
    assert (len(found.train), len(found.held_out)) == (7473, 1319)


def test_the_environment_names_the_folder_too(collected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPWISE_DATA", str(collected))
    assert len(load_held_out(DataConfig(source="aime24", eval_source="aime24"))) == 30


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n", encoding="utf-8")
    return path


def test_a_folder_that_nothing_is_read_from_is_refused(collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named data sets alone are looked for there; the environment's folder is for every run."""
    file = collected / "gsm8k" / "train.jsonl"
    reads: tuple[Callable[[DataConfig], Any], ...] = (
        load_problems, load_held_out, lambda data: inspect_source(data, PromptConfig(), None),
    )  # fmt: skip
    for source, read in product((str(file), str(collected / "gsm8k"), "owner/name"), reads):
        with pytest.raises(
            DataError, match=rf"data\.folder is '.*', but {source!r} is not a data set known by name .*: leave it out"
        ):
            read(DataConfig(source=source, folder=str(collected), holdout=0))
    for data in (DataConfig(source=str(file), eval_source="svamp"), DataConfig(source="svamp", eval_source=str(file))):
        load_problems(data.model_copy(update={"folder": str(collected)}))
    with pytest.raises(DataError, match=r"data\.folder is '.*nowhere', which is no folder: correct it, or leave it out"):
        load_problems(DataConfig(source="gsm8k", folder=str(tmp_path / "nowhere")))
    monkeypatch.setenv("GROUPWISE_DATA", str(collected))
    assert load_problems(DataConfig(source=str(file), holdout=0)).train


def test_which_file_of_a_folder_stands_for_a_name(tmp_path: Path) -> None:
    assert local_copy("svamp", "test", tmp_path) is None
    assert local_copy("svamp", "test", None) is None
    assert local_copy("svamp", "test", tmp_path / "missing") is None
    whole = write(tmp_path / "sets" / "SVAMP.jsonl")
    write(tmp_path / "svampy.jsonl")
    assert local_copy("svamp", "test", tmp_path) == whole
    train = write(tmp_path / "svamp_train.jsonl")
    assert local_copy("svamp", "test", tmp_path) == whole, "a file with another split's name is not taken"
    assert local_copy("svamp", "train", tmp_path) == train
    write(tmp_path / "gsm8k" / "test.jsonl")
    assert local_copy("gsm8k", "train", tmp_path) == tmp_path / "gsm8k"
    write(tmp_path / "sets" / "aime24" / "train.jsonl")
    assert local_copy("aime24", "train", tmp_path) == tmp_path / "sets" / "aime24", "a folder one level below"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A Hub that remembers what it was asked for, and has one row of everything."""
    asked: list[Any] = []
    row = {"problem": "1 + 1?", "question": "1 + 1?", "answer": "2"}

    def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, subset, split))
        column = "question" if name == "openai/gsm8k" else "problem"
        return [{column: row[column], "answer": row["answer"]}]

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("groupwise.data.readers._hub_answers", lambda source, name: True)
    return asked


@pytest.mark.parametrize("name", NAMED)
def test_without_a_copy_the_hub_is_asked_for_the_right_split(name: str, hub: list[Any], tmp_path: Path) -> None:
    data = DataConfig(source=name, eval_source=name, folder=str(tmp_path))
    assert [p.id for p in load_held_out(data)] == [f"{name}:{NAMED[name].eval_split}:0"]
    assert hub == [(NAMED[name].hub, NAMED[name].subset, NAMED[name].eval_split)]
    assert held_out_from(data) == f"{name}:{NAMED[name].eval_split} (the Hub's {NAMED[name].hub})"


def test_a_hub_that_cannot_be_reached_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: Any, **options: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=refuse))
    monkeypatch.setattr("groupwise.data.readers._hub_answers", lambda source, name: False)
    with pytest.raises(DataError, match=r"HuggingFaceH4/aime_2024.*a folder that has a copy in data\.folder"):
        load_held_out(DataConfig(source="aime24", eval_source="aime24"))


def test_columns_of_the_training_source_are_not_those_of_another_set_known_by_name(tmp_path: Path) -> None:
    write(tmp_path / "math500.jsonl")
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"task": "2 + 3?", "result": "#### 5"}), encoding="utf-8")
    own = {"prompt_column": "task", "answer_column": "result", "answer_format": "gsm8k", "subset": None, "folder": str(tmp_path)}
    found = load_problems(DataConfig(source=str(mine), eval_source="math500", **own))  # type: ignore[arg-type]
    assert (found.train[0].answer, found.held_out[0].answer) == ("5", "2")
    other = DataConfig(source="arithmetic", eval_source="math500", prompt_column="task", folder=str(tmp_path))
    with pytest.raises(DataError, match=r"data\.prompt_column is 'task'"):  # then it is that of the only source with columns
        load_problems(other)


def test_where_other_held_out_problems_come_from(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl")
    said: Callable[..., str] = lambda **settings: held_out_from(DataConfig(**settings))  # noqa: E731
    assert said(source="arithmetic") == "arithmetic (generated, held out)"
    assert said(source=str(file)) == f"{file}, held out"
    assert said(source=str(file), eval_source=str(file)) == str(file)
    assert said(source="owner/name", eval_split="validation") == "owner/name:validation"


def test_a_copy_that_is_more_than_the_split_is_told_apart(tmp_path):
    """SVAMP as one file has the training problems too: its figure is not that of the test split."""
    (tmp_path / "svamp.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    data = DataConfig(source="svamp", eval_source="svamp", folder=str(tmp_path))
    assert "svamp.jsonl, which has 1,000 problems where the original has 300)" in held_out_from(data, 1000)
    assert held_out_from(data, 300).endswith("svamp.jsonl)")
