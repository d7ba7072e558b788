"""Every kind of source, the splits, and the sentences that bad input gets."""

from __future__ import annotations

import csv
import datetime
import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from groupwise.config.combinations import notes
from groupwise.config.schema import ArithmeticConfig, Config, DataConfig, PromptConfig
from groupwise.data.inspect import inspect_source
from groupwise.data.prompts import worked_completion
from groupwise.data.readers import names_function
from groupwise.data.sources import ProblemSet, load_held_out, load_problems, question_key, save_prepared
from groupwise.errors import AnswerError, DataError, ModelError
from groupwise.types import Problem

ROWS = [
    {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n:,}", "level": n % 3} for n in range(600, 640)
]


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": write_jsonl,
    "a.json": lambda path: path.write_text(json.dumps(ROWS), encoding="utf-8"),
    "wrapped.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS}), encoding="utf-8"),
    "columns.json": lambda path: path.write_text(
        json.dumps({name: [row[name] for row in ROWS] for name in ROWS[0]}), encoding="utf-8"
    ),
    "lines.json": write_jsonl,
    "bom.jsonl": lambda path: path.write_text("\ufeff" + "\n\n".join(map(json.dumps, ROWS)), encoding="utf-8"),
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path),
}


def config(source: Path | str, **settings: Any) -> DataConfig:
    return DataConfig(**{"source": str(source), "holdout": 5, **settings})


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_format_gives_the_same_problems(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    found = load_problems(config(tmp_path / name, holdout=0)).train
    assert [(p.question, p.answer) for p in found] == [(r["question"], str(2 * n)) for n, r in enumerate(ROWS, start=600)]
    assert [str(p.columns["level"]) for p in found] == [str(r["level"]) for r in ROWS]
    assert found[0].columns["solution"] == ROWS[0]["answer"]
    assert found[3].id == f"{Path(name).stem}:train:3"


@pytest.mark.filterwarnings("ignore")
def test_a_long_field_of_a_csv_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"question,answer,solution\nWhat is 1 + 1?,2,{'x' * 200_000}\n", encoding="utf-8")
    (problem,) = load_problems(config(tmp_path / "a.csv", holdout=0)).train
    assert len(str(problem.columns["solution"])) == 200_000


def test_save_to_disk_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one.select(range(30)), "test": one.select(range(30, 40))}).save_to_disk(str(tmp_path / "two"))
    assert len(load_problems(config(tmp_path / "one")).train) == 35
    both = load_problems(config(tmp_path / "two", eval_split="test"))
    assert (len(both.train), len(both.held_out)) == (30, 10)
    with pytest.raises(DataError, match=r"no split 'dev', only train, test"):
        load_problems(config(tmp_path / "two", split="dev"))


def function_file(tmp_path: Path, body: str) -> str:
    (tmp_path / "made.py").write_text(f"def rows():\n    {body}\n")
    return f"{tmp_path / 'made.py'}:rows"


def test_numbers_of_few_bits_are_read_as_they_were_written(tmp_path: Path) -> None:
    """As doubles they have digits that nobody wrote: 3.140000104904175."""
    datasets = pytest.importorskip("datasets")
    for kind, written in ((pyarrow.float32(), 3.14), (pyarrow.float16(), 3.14), (pyarrow.float64(), 0.1 + 0.2)):
        columns = {"question": ["pi?", "e?"], "answer": pyarrow.array([written, 2.0], pyarrow.float64()).cast(kind)}
        nested = {
            "levels": pyarrow.array([[0.7, None], None], pyarrow.list_(kind)),
            "record": pyarrow.array([{"level": 0.7}, {"level": None}], pyarrow.struct([("level", kind)])),
        }
        table = pyarrow.table({**columns, "level": pyarrow.array([None, 0.7], kind), **nested})
        path = tmp_path / f"{kind}.parquet"
        pyarrow.parquet.write_table(table, path)
        datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(str(tmp_path / str(kind)))
        of_function = function_file(tmp_path, f"import datasets; return datasets.load_from_disk({str(tmp_path / str(kind))!r})")
        for source in (path, tmp_path / str(kind), of_function):
            found = load_problems(config(source, holdout=0)).train
            assert [p.answer for p in found] == [str(written), "2"]
            assert [p.columns["level"] for p in found] == [None, 0.7]
            assert [p.columns["levels"] for p in found] == [[0.7, None], None]
            assert [p.columns["record"] for p in found] == [{"level": 0.7}, {"level": None}]


def test_decimals_are_read_digit_by_digit(tmp_path: Path) -> None:
    """As text a zero with eight places is 0E-8, which no answer equals."""
    answers = pyarrow.array([Decimal(0), Decimal("0.00000015")], pyarrow.decimal128(18, 8))
    path = tmp_path / "decimals.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["none?", "some?"], "answer": answers}), path)
    assert [p.answer for p in load_problems(config(path, holdout=0)).train] == ["0.00000000", "0.00000015"]


def test_folders_with_a_file_per_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", ROWS[:10])
    (tmp_path / "data").mkdir()
    for shard, rows in enumerate((ROWS[10:25], ROWS[25:])):
        write_jsonl(tmp_path / "data" / f"train-{shard:05}-of-00002.jsonl", rows)
    found = load_problems(config(tmp_path, eval_split="test"))
    assert [p.question for p in found.train] == [r["question"] for r in ROWS[10:]]
    assert {p.question for p in found.held_out} == {r["question"] for r in ROWS[:10]}
    with pytest.raises(DataError, match=r"no file for split 'dev' \(it has data/train-00000-of-00002.jsonl, .*test.jsonl\)"):
        load_problems(config(tmp_path, split="dev"))


def test_subsets_in_folders_of_their_own_are_not_read_as_one(tmp_path: Path) -> None:
    """As in a clone of openai/gsm8k, whose other subset asks the same questions again."""
    for subset, rows in (("main", ROWS[:10]), ("socratic", ROWS[10:20])):
        (tmp_path / "gsm8k" / subset).mkdir(parents=True)
        write_jsonl(tmp_path / "gsm8k" / subset / "train-00000-of-00001.jsonl", rows)
    named = load_problems(DataConfig(source="gsm8k", folder=str(tmp_path), holdout=0)).train
    assert [p.question for p in named] == [r["question"] for r in ROWS[:10]]
    chosen = load_problems(config(tmp_path / "gsm8k", subset="socratic", holdout=0)).train
    assert [p.question for p in chosen] == [r["question"] for r in ROWS[10:20]]
    with pytest.raises(DataError, match=r"split 'train' in main and in socratic.*set data.subset"):
        load_problems(config(tmp_path / "gsm8k"))
    write_jsonl(tmp_path / "gsm8k" / "train.jsonl", ROWS[20:30])
    nearest = load_problems(config(tmp_path / "gsm8k", holdout=0)).train
    assert [p.question for p in nearest] == [r["question"] for r in ROWS[20:30]]


def test_the_split_is_reproducible_disjoint_and_does_not_depend_on_order_or_limit(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    write_jsonl(tmp_path / "b.jsonl", ROWS[::-1])
    first = load_problems(config(tmp_path / "a.jsonl"))
    assert first == load_problems(config(tmp_path / "a.jsonl"))
    held_out = [p.question for p in first.held_out]
    assert held_out == [p.question for p in load_problems(config(tmp_path / "b.jsonl", limit=3)).held_out]
    assert held_out != [p.question for p in load_problems(config(tmp_path / "a.jsonl", split_seed=1)).held_out]
    assert held_out == [p.question for p in load_problems(config(tmp_path / "a.jsonl", holdout=9)).held_out][:5]
    assert len(held_out) == 5
    assert {p.question for p in first.train} == {r["question"] for r in ROWS} - set(held_out)
    assert len(load_problems(config(tmp_path / "a.jsonl", limit=3)).train) == 3


def test_the_same_question_never_stands_on_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    twice = [{**row, "question": row["question"].upper() + " "} for row in ROWS]
    write_jsonl(tmp_path / "a.jsonl", ROWS + twice)
    with caplog.at_level(logging.WARNING):
        found = load_problems(config(tmp_path / "a.jsonl"))
    assert not {question_key(p) for p in found.train} & {question_key(p) for p in found.held_out}
    assert (len(found.train), len(found.held_out)) == (70, 5)
    assert found.dropped == {"same question as a held-out one": 5}
    assert "5 rows" in caplog.text
    write_jsonl(tmp_path / "eval.jsonl", ROWS[:4])
    named = load_problems(config(tmp_path / "a.jsonl", eval_source=str(tmp_path / "eval.jsonl")))
    assert (len(named.train), len(named.held_out), named.dropped) == (72, 4, {"same question as a held-out one": 8})


def test_the_same_rows_on_both_sides_are_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    both = config(tmp_path / "a.jsonl", eval_source=str(tmp_path / "a.jsonl"))
    with pytest.raises(
        DataError, match=r"every question of .*a\.jsonl' is also among the 40 held-out ones of .*: name other rows"
    ):
        load_problems(both)


def test_a_question_as_text_and_as_the_users_only_turn_is_the_same(tmp_path: Path) -> None:
    turns = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in ROWS]
    write_jsonl(tmp_path / "turns.jsonl", turns)
    write_jsonl(tmp_path / "eval.jsonl", ROWS[:4])
    found = load_problems(config(tmp_path / "turns.jsonl", eval_source=str(tmp_path / "eval.jsonl")))
    assert (len(found.train), found.dropped) == (len(ROWS) - 4, {"same question as a held-out one": 4})
    split = load_problems(config(tmp_path / "turns.jsonl"))
    assert split.fingerprint == "d637d3c90abd21ff", "the split of such a file is that of earlier versions"


def test_ids_are_unique_where_two_sources_bear_the_same_name(tmp_path: Path) -> None:
    for folder, rows in (("x", ROWS[:20]), ("y", ROWS[20:])):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "a.jsonl", rows)
    found = load_problems(config(tmp_path / "x/a.jsonl", eval_source=str(tmp_path / "y/a.jsonl"), eval_split="train"))
    assert len({p.id for p in found.train + found.held_out}) == 40


def test_gsm8k_by_path(shared_data: Path) -> None:
    found = load_problems(config(shared_data / "gsm8k", eval_split="test"))
    assert (len(found.train), len(found.held_out), found.dropped, found.answer_style) == (7473, 1319, {}, "xml")
    assert found.train[17].id == "gsm8k:train:17"
    assert all(p.id.startswith("gsm8k:test:") for p in found.held_out)


def test_competition_maths_by_path_and_its_four_empty_answers(shared_data: Path) -> None:
    path = shared_data / "competition-math" / "train_math.json"
    with pytest.raises(AnswerError, match=r"train_math.json entry 887, column 'answer': the answer is missing"):
        load_problems(config(path))
    found = load_problems(config(path, on_bad_answer="drop"))
    assert (len(found.train), found.dropped, found.answer_style) == (7465, {"bad answer": 4}, "boxed")
    tests = load_problems(config(shared_data / "competition-math" / "math500_test.jsonl"))
    assert len(tests.train) == 495
    assert "\\boxed" in tests.train[0].columns["solution"]


def test_svamp_and_aime_by_path(shared_data: Path) -> None:
    svamp = {p.id: p for p in load_problems(config(shared_data / "svamp" / "svamp.jsonl", holdout=0)).train}
    assert len(svamp) == 1000
    assert svamp["svamp:train:0"].answer == "145"
    assert str(svamp["svamp:train:0"].question).endswith("organized into 93 groups. How big is each group of bananas?")
    for name, count, answer in (("aime24", 30, "204"), ("aime25", 30, "70"), ("amc23", 83, "142")):
        found = load_problems(config(shared_data / "math-benchmarks" / f"{name}.parquet", holdout=0)).train
        assert (len(found), found[0].answer) == (count, answer)
        assert found[0].question[0]["role"] == "user"  # type: ignore[index]


def test_columns_have_a_fingerprint_that_every_process_finds() -> None:
    """The text of an object holds its address, and that of a set has any order."""

    def of(**columns: object) -> str:
        return ProblemSet((Problem("a:0", "1 + 1?", "2", columns),), (), "plain").columns_fingerprint

    assert of(level=1, made=object(), names={"a", "b"}) == of(names={"b", "a"}, made=object(), level=1)
    texts = [of(), of(level=1), of(level="1"), of(level=Decimal(1)), of(made=date(2026, 1, 1)), of(made=date(2026, 1, 2))]
    assert len({*texts}) == len(texts) - 1, "a decimal is its text"


def test_arithmetic() -> None:
    data = DataConfig(arithmetic=ArithmeticConfig(problems=50), holdout=20)
    found = load_problems(data)
    assert (len(found.train), len(found.held_out)) == (50, 20)
    assert found == load_problems(data)
    assert found.fingerprint != load_problems(DataConfig(arithmetic=ArithmeticConfig(problems=50), split_seed=1)).fingerprint


@pytest.mark.parametrize(
    ("row", "settings", "question", "answer"),
    [
        ({"instruction": "q", "output": 3.0}, {}, "q", "3"),
        ({"Problem": "q", "Solution": "so \\boxed{5}"}, {}, "q", "5"),
        ({"prompt": "q", "completion": "<answer>5</answer>"}, {}, "q", "5"),
        ({"problem": "q", "solution": "worked", "answer": "5"}, {}, "q", "5"),
        ({"question": "q", "prompt": "r", "answer": "5"}, {"prompt_column": "prompt"}, "r", "5"),
        ({"q": "q", "meta": {"gold": 0.125}}, {"prompt_column": "q", "answer_column": "meta.gold"}, "q", "0.125"),
        ({"question": "q", "answer": ["5"]}, {}, "q", "5"),
        ({"question": "q", "answer": "1 #### 5"}, {"answer_format": "plain"}, "q", "1 #### 5"),
    ],
)
def test_columns_are_found_or_mapped(tmp_path: Path, row: Any, settings: Any, question: str, answer: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [row])
    found = load_problems(config(tmp_path / "a.jsonl", holdout=0, **settings)).train[0]
    assert (found.question, found.answer) == (question, answer)


def test_every_answer_of_a_list_counts_in_verls_layout_and_any_other(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "data_source": "x",
            "reward_model": {"style": "rule", "ground_truth": given},
        }
        for i, given in enumerate((["2/3", "0.667"], ["5"], "7", ["1,000", "1000", "1,000"]))
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    found = load_problems(config(tmp_path / "a.jsonl", holdout=0))
    accepted = {p.question[0]["content"]: p.accepted for p in found.train}  # type: ignore[index]
    assert accepted == {"q0": ("2/3", "0.667"), "q1": ("5",), "q2": ("7",), "q3": ("1,000", "1000")}
    write_jsonl(tmp_path / "b.jsonl", [{"question": "q", "answer": ["so \\boxed{5}", "\\boxed{6}"]}])
    (problem,) = load_problems(config(tmp_path / "b.jsonl", holdout=0)).train
    assert problem.accepted == ("5", "6")
    assert problem.expected == "5 or 6"
    save_prepared(found, str(tmp_path / "saved"))
    again = load_problems(config(tmp_path / "saved"))
    assert again.train == found.train
    assert again.fingerprint == found.fingerprint
    report = inspect_source(config(tmp_path / "a.jsonl"), PromptConfig(), None, rows=4)
    assert report["bad_rows"]["count"] == 0
    assert next((one["answer"], one["also"]) for one in report["examples"]) == ("2/3", ["0.667"])


def test_conversations(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": turns, "answer": 42}])
    assert load_problems(config(tmp_path / "a.jsonl", holdout=0)).train[0].question == tuple(turns)
    (tmp_path / "one.json").write_text(json.dumps({"prompt": turns, "answer": 42}), encoding="utf-8")
    assert load_problems(config(tmp_path / "one.json", holdout=0)).train[0].question == tuple(turns)
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": [*turns, {"role": "assistant", "content": "42"}], "answer": 42}])
    with pytest.raises(DataError, match=r"line 1, column 'prompt' is a conversation whose last turn is 'assistant'"):
        load_problems(config(tmp_path / "a.jsonl", holdout=0))


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"text": "q", "answer": "5"}, {}, "no prompt column was found in a among 'text', 'answer': set data.prompt_column"),
        ({"question": "q", "label": "5"}, {}, "no answer column was found in a among 'label': set data.answer_column"),
        (
            {"instruction": "q", "input": "r", "output": "5"},
            {},
            "'input' and 'instruction' could each be the prompt column of a: set",
        ),
        (
            {"question": "q", "output": "5", "response": "5"},
            {},
            "'output' and 'response' could each be the answer column of a: set",
        ),
        (
            {"question": "q", "answer": "5"},
            {"answer_column": "gold"},
            "data.answer_column is 'gold', but the columns are 'question', ",
        ),
        ({"question": "q", "answer": None}, {}, "line 1, column 'answer': the answer is missing"),
        ({"question": "q", "answer": []}, {}, "line 1, column 'answer': the answer is an empty list"),
        ({"question": "q", "answer": ["5", None]}, {}, "line 1, column 'answer': the answer is missing"),
        ({"question": "q", "answer": {"x": 1}}, {}, "the answer is a dict"),
        ({"question": " ", "answer": "5"}, {}, "line 1, column 'question' is empty"),
        ({"question": 5, "answer": "5"}, {}, "column 'question' holds a int"),
        ({"question": "q", "answer": "5"}, {"answer_format": "boxed"}, "line 1, column 'answer': no .boxed.* in '5'"),
        ({"question": "q", "answer": "5"}, {"holdout": 1}, "data.holdout is 1, but .* has only 1 different questions"),
        ({"question": "q", "answer": "5"}, {"eval_split": "test"}, "data.eval_split is 'test', but .* is one file"),
        (
            {"question": "q", "answer": "5"},
            {"subset": "main", "eval_source": "gsm8k"},
            "data.subset is 'main', but .* is one file",
        ),
        ({"question": "a\ud800b", "answer": "5"}, {}, "line 1 holds half a character"),
        ({"question": "q", "answer": "\ud800"}, {}, "line 1 holds half a character"),
        ({"question": "q", "answer": ""}, {"on_bad_answer": "drop"}, "all 1 rows of .* were dropped"),
        ({"question": "q", "answer": "5"}, {"eval_split": "train"}, "data.eval_split and data.split are both 'train'"),
    ],
)
def test_bad_columns_get_a_sentence(tmp_path: Path, row: Any, settings: Any, message: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=message):
        load_problems(config(tmp_path / "a.jsonl", **{"holdout": 0, **settings}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "has no rows"),
        ("a.csv", "question,answer\n", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.jsonl", '{"question": "q", "answer": "5"}\n{oops}\n', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl line 1 holds a list, not an object"),
        ("a.json", "{oops", "is not JSON"),
        ("a.csv", "question,answer\na,b,c\n", "a.csv line 2 does not have the header's 2 fields"),
        ("a.csv", "question,answer\na\n", "a.csv line 2 does not have the header's 2 fields"),
        ("a.csv", "\nquestion,answer\na,b\n", "a.csv line 1 is empty: it must name the columns"),
        ("a.csv", "question,answer,answer\na,b,c\n", "a.csv has several columns 'answer'"),
        ("a.csv", 'question,answer\na,1\nb,"2\nc,3\nd,4\n', "a.csv line 3 is not CSV"),
        ("a.tsv", 'question\tanswer\na\t1\n"Wow, how many?\t5\nNext?\t6\n"Another\t7\n', "a.tsv line 3 is not CSV"),
        (
            "a.json",
            '{"train": [{"question": "q", "answer": "5"}], "test": [{"question": "r", "answer": "6"}]}',
            r"\(train, test\)",
        ),
        ("a.parquet", "no parquet", "is not a Parquet file"),
        ("a.jsonl", b"\n" * 20_480 + b"\xe4", r"is not UTF-8 text \(line 20481, byte 20480\)"),
        ("a.json", b'[{"question": "\xe4"}]', r"is not UTF-8 text \(line 1, byte 15\)"),
        ("a.txt", "x", "'.txt', which is not a data format"),
    ],
)
def test_bad_files_get_a_sentence(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message) as raised:
        load_problems(config(tmp_path / name))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("source", ["./nowhere.jsonl", "nowhere.parquet", "/no/such/folder", "~/no-such-folder-here"])
def test_a_missing_file_is_not_looked_for_on_the_hub(source: str) -> None:
    with pytest.raises(DataError, match="does not exist: check the path"):
        load_problems(config(source))


def test_hub_names_reach_the_hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments: Any, **settings: Any) -> Any:
        asked.append((*arguments, settings["split"]))
        if arguments[0] == "someone/missing":
            raise ConnectionError("no network\nand more")
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("groupwise.data.readers._hub_answers", lambda source, name: True)
    assert load_problems(config("gsm8k")).train[0].id.startswith("gsm8k:train:")
    load_problems(config("polaris"))
    load_problems(config("someone/else", subset="hard", split="test"))
    polaris = "POLARIS-Project/Polaris-Dataset-53K"
    assert asked == [("openai/gsm8k", "main", "train"), (polaris, None, "train"), ("someone/else", "hard", "test")]
    with pytest.raises(
        DataError, match=r"'someone/missing' is no local file.*ConnectionError: no network and more\): check the name"
    ):
        load_problems(config("someone/missing"))


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("gsmk", "gsm8k"),
        ("math50", "math500"),
        ("aime26", "aime25"),
        ("arithmatic", "arithmetic"),
        ("quikstart", "arithmetic, the data of the recipe quickstart"),
        ("tools-1.5", "gsm8k, the data of the recipe tools-1.5b"),
        ("quickstart", "arithmetic, the data of the recipe quickstart"),
    ],
)
def test_a_misspelt_name_or_a_recipe_s_is_told_at_once_and_the_hub_is_not_asked(
    source: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.data.readers._hub_answers", lambda source, name: pytest.fail("the Hub was asked"))
    with pytest.raises(DataError, match=rf"{source!r} is neither a file nor .*: did you mean {re.escape(meant)}\?"):
        load_problems(config(source))
    with pytest.raises(DataError, match=f"did you mean {meant}"):
        load_problems(config("arithmetic", eval_source=source, limit=20))


def test_the_hub_is_asked_once_before_its_client_tries_each_file_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError

    asked, answer = [], ConnectionError("no network")

    def dataset_info(self: Any, name: str, **settings: Any) -> None:
        asked.append(name)
        raise answer

    def load_dataset(*arguments: Any, **settings: Any) -> Any:
        assert datasets.config.HF_HUB_OFFLINE
        assert constants.HF_HUB_OFFLINE
        return ROWS

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    before = constants.HF_HUB_OFFLINE
    assert load_problems(config("someone/cached")).train, "what was loaded before"
    assert constants.HF_HUB_OFFLINE is before
    answer = RepositoryNotFoundError("404", response=type("Response", (), {"headers": {}, "request": None, "status_code": 404})())
    with pytest.raises(DataError, match=r"'someone/nothing' is neither a file here nor a public data set on the Hub"):
        load_problems(config("someone/nothing"))
    assert asked == ["someone/cached", "someone/nothing"]


def test_a_prepared_folder_gives_back_what_was_saved(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "6 x 7?\u2028"}]
    write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"question": turns, "answer": "42"}])
    original = load_problems(config(tmp_path / "a.jsonl"))
    folder = tmp_path / "deep" / "prepared"
    save_prepared(original, str(folder))
    loaded = load_problems(config(folder))
    assert (loaded.train, loaded.held_out) == (original.train, original.held_out)
    assert (loaded.fingerprint, loaded.answer_style) == (original.fingerprint, original.answer_style)
    assert len(load_problems(config(folder, limit=2)).train) == 2
    save_prepared(load_problems(config(tmp_path / "a.jsonl", holdout=3)), str(folder))
    assert len(load_problems(config(folder)).held_out) == 3
    assert sorted(p.name for p in folder.parent.iterdir()) == ["prepared"]


def test_half_a_character_in_a_column_is_kept_by_a_prepared_folder(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{**row, "source": "an emoji cut in two: \ud83d"} for row in ROWS])
    original = load_problems(config(tmp_path / "a.jsonl"))
    save_prepared(original, str(tmp_path / "p"))
    assert load_problems(config(tmp_path / "p")).train == original.train


def test_a_write_that_fails_leaves_the_older_set_whole(tmp_path: Path) -> None:
    class Unprintable:
        def tolist(self) -> list[Any]:
            raise OSError("disk full")

    write_jsonl(tmp_path / "a.jsonl")
    original = load_problems(config(tmp_path / "a.jsonl"))
    save_prepared(original, str(tmp_path / "p"))
    broken = replace(original.train[-1], columns={"x": Unprintable()})
    with pytest.raises(DataError, match="cannot be written"):
        save_prepared(replace(original, train=(*original.train[:-1], broken)), str(tmp_path / "p"))
    assert load_problems(config(tmp_path / "p")).train == original.train
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "p"]


def test_what_json_does_not_know_is_a_list_or_text_in_a_prepared_folder_or_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    original = load_problems(config(tmp_path / "a.jsonl"))

    def saved(**columns: Any) -> Any:
        last = replace(original.train[-1], columns=columns)
        save_prepared(replace(original, train=(*original.train[:-1], last)), str(tmp_path / "p"))
        return load_problems(config(tmp_path / "p")).train[-1].columns

    known = {"x": np.arange(2000), "n": [np.float32(0.5)], "day": datetime.date(2026, 1, 2), "price": Decimal("1.50")}
    assert saved(**known) == {"x": list(range(2000)), "n": [0.5], "day": "2026-01-02", "price": "1.50"}
    for value, what in ([b"raw"], "it holds bytes"), ({(1, 2): 3}, "keys must be str, .* not tuple"):
        with pytest.raises(DataError, match=rf"problem '.*', column 'y' cannot be written as JSON \({what}\): give a file"):
            saved(x=1, y=value)


def test_a_damaged_prepared_folder_and_a_foreign_one_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    original = load_problems(config(tmp_path / "a.jsonl"))
    save_prepared(original, str(tmp_path / "p"))
    lines = (tmp_path / "p" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "p" / "train.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(DataError, match="has 34 problems, but its metadata says 35"):
        load_problems(config(tmp_path / "p"))
    (tmp_path / "p" / "train.jsonl").write_text("".join(lines)[:-20], encoding="utf-8")
    with pytest.raises(DataError, match=r"is damaged .* prepare the set again"):
        load_problems(config(tmp_path / "p"))
    with pytest.raises(DataError, match="exists and is not a prepared problem set"):
        save_prepared(original, str(tmp_path))
    assert (tmp_path / "a.jsonl").exists()


def test_inspection_reports_bad_rows_and_lengths(tmp_path: Path, qwen_tokenizer: Any) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*ROWS[:3], {"question": "q", "answer": "#### ?"}, *ROWS[3:]])
    seen = inspect_source(config(tmp_path / "a.jsonl"), PromptConfig(), qwen_tokenizer, rows=2)
    assert (seen["rows"], seen["usable"], seen["bad_rows"]["count"]) == (41, 40, 1)
    assert seen["bad_rows"]["first"][0]["row"] == "a.jsonl line 4"
    assert seen["columns"] == {"all": ["question", "answer", "level"], "prompt": "question", "answer": "answer"}
    assert len(seen["examples"]) == 2
    assert seen["examples"][0]["prompt"].endswith("<|im_start|>assistant\n")
    lengths = seen["prompt_tokens"]
    assert lengths["min"] <= lengths["median"] <= lengths["p95"] <= lengths["max"]
    assert lengths["measured"] == 40
    assert json.loads(json.dumps(seen)) == seen


def test_inspection_goes_on_after_a_conversation_that_the_template_refuses(
    tmp_path: Path, qwen_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m['content'] }}"
        "{% endfor %}"
    )
    asked = [{"role": "user", "content": "6 x 7?"}]
    refused = [{"role": "user", "content": "1"}, {"role": "tool", "content": "2"}, *asked]
    monkeypatch.setattr(qwen_tokenizer, "chat_template", template)
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": refused if n == 1 else asked, "answer": 42} for n in range(5)])
    seen = inspect_source(config(tmp_path / "a.jsonl"), PromptConfig(system="none"), qwen_tokenizer)
    assert (seen["rows"], seen["usable"], seen["prompt_tokens"]["measured"]) == (5, 4, 4)
    assert (seen["bad_rows"]["count"], seen["bad_rows"]["refused"]) == (1, 1)
    assert "no tools" in seen["bad_rows"]["first"][0]["reason"]
    assert ["prompt" in example for example in seen["examples"]] == [True, False, True]
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": refused, "answer": 42}])
    with pytest.raises(ModelError, match="no tools"):
        inspect_source(config(tmp_path / "a.jsonl"), PromptConfig(), qwen_tokenizer)


def test_inspection_tells_system_turns_of_the_rows_own(tmp_path: Path, qwen_tokenizer: Any) -> None:
    talk = [{"role": "system", "content": "Put the final answer in \\boxed{}."}, {"role": "user", "content": "6 x 7?"}]
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": talk, "answer": 42}])
    seen = inspect_source(config(tmp_path / "a.jsonl"), PromptConfig(), qwen_tokenizer)
    assert (seen["answer_style"], seen["own_system"]) == ("xml", 1)
    assert [note.split(", so")[0] for note in seen["notes"]] == [
        "prompts ask for the answer by \\boxed, but it is looked for by <answer>"
    ]
    assert inspect_source(config(tmp_path / "a.jsonl"), PromptConfig(system="boxed"), qwen_tokenizer)["notes"] == []


def test_inspection_without_a_tokenizer_and_of_other_sources(tmp_path: Path) -> None:
    generated = inspect_source(DataConfig(), PromptConfig(), None)
    assert (generated["rows"], generated["prompt_tokens"]) == (20_000, None), "as many as a run has"
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": ""}])
    assert inspect_source(config(tmp_path / "a.jsonl"), PromptConfig(), None)["usable"] == 0
    save_prepared(load_problems(DataConfig(arithmetic=ArithmeticConfig(problems=5), holdout=2)), str(tmp_path / "p"))
    assert inspect_source(config(tmp_path / "p"), PromptConfig(), None)["rows"] == 5


def test_a_function_gives_the_rows_that_a_file_would(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "made.jsonl")
    of_file = load_problems(config(tmp_path / "made.jsonl"))
    of_function = load_problems(config(function_file(tmp_path, f"yield from {ROWS!r}")))
    assert [(p.question, p.answer) for p in of_function.train] == [(p.question, p.answer) for p in of_file.train]
    assert [p.question for p in of_function.held_out] == [p.question for p in of_file.held_out]
    assert of_function.train[0].id.startswith("rows:train:")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('price')", "KeyError: 'price'; it must return a list of rows, each a dict"),
        ("return None", "TypeError: 'NoneType' object is not iterable; it must return a list of rows"),
        ("return []", "returned no rows"),
        ("return [1]", "row 0 of .*made.py:rows holds a int, not an object with named columns"),
        ("return [{'question': 'Why?', 'answer': '1'}, {'question': 'Who?'}]", "row 1 of"),
    ],
)
def test_a_function_that_returns_no_rows_is_one_sentence(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_problems(config(function_file(tmp_path, body), holdout=0))


@pytest.mark.parametrize("source", ["gsm8k:test", "data.jsonl:train", "./a.b/c.csv:x", "owner/name", "C:\\data.csv", "a:b:c d"])
def test_what_is_no_place_of_a_function(source: str) -> None:
    assert not names_function(source)


def test_a_folder_of_splits_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_function("data.v2:test")
    (tmp_path / "data.v2").mkdir()
    assert not names_function("data.v2:test")


def test_a_generator_makes_no_more_problems_than_it_is_told(tmp_path: Path) -> None:
    for limit, count in ((50, 20), (5, 5)):
        data = DataConfig(limit=limit, arithmetic=ArithmeticConfig(problems=20), holdout=2)
        assert len(load_problems(data).train) == count
        assert inspect_source(data, PromptConfig(), None)["rows"] == count


def test_what_has_no_splits_is_read_whole_and_says_so(tmp_path: Path) -> None:
    """A recipe's ``eval_split: test`` is among these settings, so the sentence names the value that leaves it out."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    for source, what in (
        (function_file(tmp_path, f"return {ROWS!r}"), "a function"),
        (tmp_path / "saved", "one saved Dataset"),
    ):
        assert len(load_problems(config(source)).train) == 35
        for setting, value, default in (
            ("split", "validation", "train"),
            ("subset", "main", "null"),
            ("eval_split", "test", "null"),
        ):
            refused = rf"data\.{setting} is {value!r}, but .* is {what}, which has no such thing: .*data\.{setting}={default}\)"
            with pytest.raises(DataError, match=refused):
                load_problems(config(source, **{setting: value}))
            with pytest.raises(DataError, match=refused):
                inspect_source(config(source, **{setting: value}), PromptConfig(), None)


def test_a_subset_that_is_not_there_is_not_read_as_another(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    write_jsonl(tmp_path / "gsm8k" / "train.jsonl")
    for source in ({"source": "gsm8k", "folder": str(tmp_path)}, {"source": str(tmp_path / "gsm8k")}):
        with pytest.raises(DataError, match=r"data\.subset is 'socratic', but '.*gsm8k' has no folder of that name: correct it"):
            load_problems(DataConfig(**source, subset="socratic", holdout=5))
    main = DataConfig(source="gsm8k", folder=str(tmp_path), subset="main", holdout=5)
    assert len(load_problems(main).train) == 35, "what the name stands for, as it lies there"


def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``lost+found`` of a disk, and folders of others."""
    (tmp_path / "lost+found").mkdir()
    write_jsonl(tmp_path / "train.jsonl")
    write_jsonl(tmp_path / "svamp.jsonl")
    listed, closed = Path.iterdir, {"lost+found"}

    def iterdir(path: Path) -> Any:
        if path.name in closed:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    named = DataConfig(source="svamp", folder=str(tmp_path), holdout=5)
    assert len(load_problems(config(tmp_path)).train) == len(load_problems(named).train) == 35
    closed.add(tmp_path.name)
    for data in (config(tmp_path), named):
        with pytest.raises(DataError, match=r"folder '.*' cannot be listed \(Permission denied\): check its permissions"):
            load_problems(data)


def test_dropped_rows_are_counted_by_their_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*ROWS[:9], {"question": "q", "answer": ""}])
    write_jsonl(tmp_path / "b.jsonl", [*ROWS[9:12], *[{"question": f"q{i}", "answer": ""} for i in range(2)]])
    found = load_problems(config(tmp_path / "a.jsonl", eval_source=str(tmp_path / "b.jsonl"), on_bad_answer="drop"))
    assert found.dropped == {"bad answer": 3}
    assert [record.getMessage() for record in caplog.records] == [
        f"1 rows of {tmp_path / 'a.jsonl'} were dropped: bad answer",
        f"2 rows of {tmp_path / 'b.jsonl'} were dropped: bad answer",
    ]


def test_the_answer_column_stays_for_reward_functions_that_ask_for_it(tmp_path: Path) -> None:
    """As TRL's do, for ``ground_truth`` and ``solution``. Of ``solution`` every row has it, also one with the bare answer."""

    def columns(*rows: dict[str, Any]) -> list[dict[str, Any]]:
        write_jsonl(tmp_path / "a.jsonl", list(rows))
        return [dict(p.columns) for p in load_problems(config(tmp_path / "a.jsonl", holdout=0)).train]

    assert columns({"prompt": "q", "ground_truth": 5, "level": 1}) == [{"ground_truth": 5, "level": 1}]
    assert columns({"prompt": "q", "answer": "2 + 3 #### 5"}) == [{"solution": "2 + 3 #### 5"}]
    assert columns({"prompt": "q", "solution": "so \\boxed{5}"}, {"prompt": "r", "solution": "6"}) == [
        {"solution": "so \\boxed{5}"},
        {"solution": "6"},
    ]
    worked = {"Solution": "worked", "Answer": "5"}
    assert columns({"Problem": "q", **worked}) == [{**worked, "solution": "worked"}]
    assert columns({"Problem": "q", "Solution": "6"}) == [{"Solution": "6", "solution": "6"}]
    assert worked_completion(Problem("", "r", "6", {"solution": "6"}), "xml") == "<answer>\n6\n</answer>", (
        "which works nothing out"
    )


def test_prompts_without_answers(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Put 6 x 7 in \\boxed{}."}]
    for prompt, answer in (("Write #### before it.", "Write #### before it."), (turns, "Put 6 x 7 in \\boxed{}.")):
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "topic": "sums"}])
        (found,) = load_problems(config(tmp_path / "a.jsonl", holdout=0, answer_column="prompt")).train
        assert (found.answer, found.columns) == (answer, {"topic": "sums"})


def test_settings_that_a_prepared_folder_has_behind_it_change_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    save_prepared(load_problems(config(tmp_path / "a.jsonl")), str(tmp_path / "p"))
    behind = {"prompt_column": "task", "answer_column": "result", "answer_format": "plain", "subset": "main"}
    assert load_problems(config(tmp_path / "p", **behind)).train == load_problems(config(tmp_path / "p")).train
    said = notes(Config(data={"source": str(tmp_path / "p"), **behind}), prepared=True)
    assert sum("data.source is a prepared folder, which is read and split already" in note for note in said) == 4
    other = config(tmp_path / "p", eval_source=str(tmp_path / "a.jsonl"), answer_format="gsm8k")
    assert len(load_held_out(other)) == 40, "whose answers they describe"


def test_a_subset_may_be_of_the_held_out_source_alone(tmp_path: Path) -> None:
    """A Hub set that is not known by name has no other place for its configuration."""
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "held" / "hard").mkdir(parents=True)
    write_jsonl(tmp_path / "held" / "hard" / "test.jsonl")
    data = config(tmp_path / "a.jsonl", eval_source=str(tmp_path / "held"), eval_split="test", subset="hard")
    assert len(load_held_out(data)) == 40


def test_a_prepared_folder_is_replaced_from_within_and_nothing_else_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    folder = tmp_path / "p"
    first, second = (load_problems(config(tmp_path / "a.jsonl", holdout=count)) for count in (5, 3))
    save_prepared(first, str(folder))
    monkeypatch.chdir(folder)
    save_prepared(second, ".")
    monkeypatch.chdir(tmp_path)
    assert len(load_problems(config(folder)).held_out) == 3

    def refuses(source: Any, target: Any, renames: list[Any] = []) -> None:  # noqa: B006
        renames.append(source)
        if len(renames) == 2:
            raise OSError("disk full")
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr("groupwise.data.named.os.replace", refuses)
    with pytest.raises(DataError, match="cannot be written"):
        save_prepared(first, str(folder))
    assert len(load_problems(config(folder)).held_out) == 3, "the older set is in its place again"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "p"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"holds 'notes.txt' beside a prepared set, and would be replaced whole: move it"):
        save_prepared(first, str(folder))
    assert (folder / "notes.txt").read_text() == "mine"
