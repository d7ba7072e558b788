"""Feed anything at all to what reads other people's files: it is read, or refused in one sentence, and nothing in it runs.

    python -m tests.survival.fuzz                              # 10,000 cases of each kind: minutes
    python -m tests.survival.fuzz --targets report --cases 500 --seed 3
    python -m tests.survival.fuzz --write                      # and put the table into benchmarks/TRIALS.md

Cases are drawn by hypothesis, some of them near what is valid; one that fails is made small and printed.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from groupwise.config import build_config, dump_config, load_config
from groupwise.config.fields import field_paths
from groupwise.config.schema import Config, DataConfig
from groupwise.data.answers import answers_equal, extract_answer, extract_last_number, extract_reference, grade, numeric_value
from groupwise.data.sources import load_problems
from groupwise.doctor import diagnose_prepared
from groupwise.errors import AnswerError, ConfigError, DataError, GroupwiseError
from groupwise.planner import HARDWARE, make_plan
from groupwise.report import write_report
from groupwise.training.setup import prepare
from tests.survival.drawn_settings import keeping_the_rules
from tests.survival.page import stamp, write_section
from tests.tiny import write_sums, write_tiny_llama

__all__ = ["TARGETS", "fuzz", "main"]

Case = dict[str, Any]
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "]]>",
    "<!--",
    "\u2028",
    "\x00",
]
TEXT = st.one_of(st.text(max_size=30), st.sampled_from(HOSTILE))
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=True, allow_infinity=True))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=8,
)


def sentence(error: GroupwiseError) -> str:
    """The error's kind; its message is one line that says something."""
    told = str(error)
    assert told.strip(), "an empty message"
    assert "\n" not in told.strip(), f"more than a line: {told!r}"
    return type(error).__name__


# --- settings ---------------------------------------------------------------------------------------------------------

PATHS = sorted(path for path in field_paths() if "[]" not in path)
SETTINGS = st.dictionaries(st.one_of(st.sampled_from(PATHS), TEXT), JSON, max_size=5)


def nested(flat: Case) -> Case:
    out: Case = {}
    for path, value in flat.items():
        place, names = out, str(path).split(".")
        for name in names[:-1]:
            inner = place.setdefault(name, {})
            place = inner if isinstance(inner, dict) else place
        place[names[-1]] = value
    return out


CONFIGS = st.fixed_dictionaries(
    {
        "settings": st.one_of(SETTINGS.map(nested), keeping_the_rules(), keeping_the_rules(), keeping_the_rules()),
        "text": st.one_of([*[st.none()] * 6, st.text(max_size=80), st.binary(max_size=80)]),
        "overrides": st.one_of([*[st.just([])] * 3, st.lists(
            st.one_of(
                TEXT,
                st.builds(
                    lambda path, value: f"{path}={value}",
                    st.sampled_from(PATHS),
                    st.one_of(TEXT, NUMBERS, st.sampled_from(["null", "[", "{a: 1}"])),
                ),
            ),
            max_size=2,
        )]),
    }
)  # fmt: skip


def try_config(case: Case, place: Path) -> str:
    """Read, written out and read again, planned, and gone through by the doctor with data, prompts, rewards and tokenizer."""
    try:
        if case["text"] is None:
            config = build_config(placed(case["settings"], place), case["overrides"])
        else:
            path = place / "settings.yaml"
            text = case["text"]
            path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", errors="surrogatepass"))
            config = load_config(path, case["overrides"])
    except ConfigError as error:
        return sentence(error)
    assert isinstance(config, Config)
    assert build_config(yaml.safe_load(dump_config(config))) == config, "written out, it is another config"
    try:
        made = make_plan(config, HARDWARE["cpu"])
        assert made.peak.bytes > 0
        assert made.cost.step_s > 0
        json.dumps(made.to_json(), allow_nan=False)
        generated = (
            config.data.source == "arithmetic" and config.data.arithmetic.problems > 100
        )  # takes seconds, and is always the same
        for finding in [] if generated else diagnose_prepared(prepare(config)):
            assert finding.title.strip()
            assert finding.remedy.strip()
    except GroupwiseError as error:
        sentence(error)
        return "read, then refused"
    return "read"


def placed(settings: Any, place: Path) -> Any:
    """TINY and SUMS as a model and a file in ``place``."""
    if isinstance(settings, dict):
        return {key: placed(value, place) for key, value in settings.items()}
    if settings not in ("TINY", "SUMS"):
        return settings
    path = place / settings.lower() if settings == "TINY" else place / "sums.jsonl"
    if not path.exists():
        (write_tiny_llama if settings == "TINY" else write_sums)(path)
    return str(path)


# --- data files ---------------------------------------------------------------------------------------------------------

ROW = st.fixed_dictionaries(
    {}, optional={"question": st.one_of(TEXT, JSON), "answer": st.one_of(TEXT, JSON, NUMBERS), "level": JSON}
)
GOOD_ROW = st.builds(lambda a, q: {"question": f"{q} {a} + 1?", "answer": str(a)}, st.integers(-999, 999), TEXT)
WILD_DATA = st.fixed_dictionaries(
    {
        "suffix": st.sampled_from([".jsonl", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt"]),
        "content": st.one_of(
            st.binary(max_size=120),
            st.text(max_size=120),
            st.lists(st.one_of(ROW, GOOD_ROW), max_size=6),
            st.lists(GOOD_ROW, min_size=2, max_size=6),
        ),
        "format": st.sampled_from(["auto", "auto", "auto", "plain", "gsm8k", "boxed", "xml"]),
        "holdout": st.integers(0, 3),
        "bad": st.sampled_from(["error", "drop"]),
    }
)  # fmt: skip
FORMS = {
    "auto": "{}", "plain": "{}", "gsm8k": "so it is\n#### {}", "boxed": "it is \\boxed{{{}}}", "xml": "<answer>{}</answer>",
}  # fmt: skip
"""How a reference answer stands in its column, by ``data.answer_format``."""
GOOD_DATA = st.sampled_from([*FORMS]).flatmap(
    lambda form: st.fixed_dictionaries(
        {
            "suffix": st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".parquet"]),
            "content": st.lists(
                GOOD_ROW.map(lambda row: {**row, "answer": FORMS[form].format(row["answer"])}), min_size=4, max_size=9
            ),
            "format": st.just(form),
            "holdout": st.integers(0, 2),
            "bad": st.sampled_from(["error", "drop"]),
        }
    )
)
DATA = st.one_of(WILD_DATA, WILD_DATA, GOOD_DATA)


def file_bytes(content: Any, suffix: str) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, list) and suffix in (".csv", ".tsv"):
        out = io.StringIO()
        table = csv.writer(out, delimiter="," if suffix == ".csv" else "\t")
        table.writerows([["question", "answer"], *([str(value) for value in row.values()] for row in content)])
        content = out.getvalue()
    elif isinstance(content, list) and suffix == ".parquet" and all(type(v) is str for row in content for v in row.values()):
        return parquet_bytes(content)
    elif isinstance(content, list):
        content = json.dumps(content) if suffix == ".json" else "\n".join(json.dumps(row) for row in content)
    return content.encode("utf-8", errors="surrogatepass")


def parquet_bytes(rows: list[Case]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    kept = [{key: value.encode("utf-8", "replace").decode() for key, value in row.items()} for row in rows]
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(kept), out)
    return out.getvalue()


def try_data(case: Case, place: Path) -> str:
    path = place / f"rows{case['suffix']}"
    path.write_bytes(file_bytes(case["content"], case["suffix"]))
    config = DataConfig(source=str(path), answer_format=case["format"], holdout=case["holdout"], on_bad_answer=case["bad"])
    try:
        found = load_problems(config)
    except (DataError, ConfigError) as error:
        return sentence(error)
    ids = [problem.id for problem in (*found.train, *found.held_out)]
    assert found.train
    assert len(set(ids)) == len(ids), "two problems of one name"
    assert all(isinstance(problem.answer, str) and problem.answer.strip() for problem in found.train)
    return "read"


# --- answers ------------------------------------------------------------------------------------------------------------

MARKS = [
    "<answer>", "</answer>", "\\boxed{", "}", "{", "#### ", "\n", "$", "\\frac{1}{2}", "1,234", "-", "1e9", "½", "٣", ".", "%", "^",
    "/", "...",
]  # fmt: skip
PIECES = st.lists(
    st.one_of(st.sampled_from(MARKS), st.text(max_size=6), st.integers(-9999, 9999).map(str)), max_size=12
).map("".join)  # fmt: skip
ANSWERS = st.fixed_dictionaries(
    {
        "text": PIECES,
        "reference": st.one_of(PIECES, st.integers(-999, 999).map(str)),
        "format": st.sampled_from(["auto", "gsm8k", "boxed", "xml", "plain"]),
    }
)


def try_answers(case: Case, place: Path) -> str:
    text, reference = case["text"], case["reference"]
    for style in ("xml", "boxed", "plain"):
        answer = extract_answer(text, style)  # type: ignore[arg-type]
        assert answer is None or (answer.strip() == answer and answer in text)
        verdict = grade(text, reference, style)  # type: ignore[arg-type]
        assert verdict.lenient or not verdict.strict, "strictly right, and leniently wrong"
    last = extract_last_number(text)
    assert last is None or numeric_value(last) is not None or "/" in last, "a last number that is none"
    if reference.strip():
        assert answers_equal(reference, reference), "an answer that is not itself"
    try:
        found = extract_reference(text, case["format"])
    except AnswerError as error:
        return sentence(error)
    assert found.strip()
    return "read"


# --- the report's input -------------------------------------------------------------------------------------------------

STEP = st.fixed_dictionaries(
    {}, optional={"step": st.one_of(st.integers(-1, 9), JSON), "reward/mean": NUMBERS, "policy/kl": JSON}
)
LINE = st.fixed_dictionaries(
    {},
    optional={
        "step": st.one_of(st.integers(0, 9), JSON), "problem": TEXT, "sample": st.one_of(st.integers(0, 3), JSON), "prompt": TEXT,
        "completion": st.one_of(TEXT, JSON), "expected": st.one_of(TEXT, JSON), "reward": st.one_of(NUMBERS, JSON),
        "components": st.one_of(st.dictionaries(TEXT, NUMBERS, max_size=2), JSON), "advantage": JSON, "finish_reason": JSON,
        "tokens": JSON, "token_ids": JSON, "logprobs": st.one_of(st.lists(NUMBERS, max_size=3), JSON), "response": TEXT,
        "strict": JSON, "extracted": JSON, "question": TEXT,
    },
)  # fmt: skip
GOOD_LINE = st.fixed_dictionaries(
    {
        "step": st.integers(1, 3), "problem": TEXT, "sample": st.integers(0, 3), "prompt": TEXT, "completion": TEXT, "response": TEXT,
        "expected": TEXT, "reward": st.floats(-2, 2), "components": st.dictionaries(TEXT, st.floats(-2, 2), max_size=2),
        "advantage": st.floats(-2, 2), "finish_reason": st.sampled_from(["stop", "length"]), "tokens": st.integers(0, 9),
        "strict": st.booleans(), "lenient": st.booleans(), "extracted": TEXT, "question": TEXT,
    }
)  # fmt: skip
"""As a run writes them, with anything for a text."""
FILES = [
    "metrics.jsonl", "completions.jsonl", "evaluations/base-greedy.jsonl", "evaluations/final-greedy.jsonl", "summary.json",
    "environment.json",
]  # fmt: skip
RUN = st.fixed_dictionaries(
    {
        "config.yaml": st.one_of(SETTINGS.map(nested), st.text(max_size=60), st.binary(max_size=60), JSON),
        **{
            name: st.one_of(
                st.lists(st.one_of(STEP, LINE, GOOD_LINE), max_size=5), st.lists(GOOD_LINE, max_size=5), JSON, st.binary(max_size=80)
            )
            for name in FILES
        },
    }
)  # fmt: skip


class Elements(HTMLParser):
    """Counts the page's elements, and the attributes that would run something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found[tag] += tag not in ("template", "link", "title")
        assert not [name for name, _ in attributes if name.startswith("on")], attributes
        assert not [value for _, value in attributes if (value or "").strip().lower().startswith("javascript:")], attributes


def elements(page: str) -> Counter[str]:
    parser = Elements()
    parser.feed(page)
    return +parser.found


def try_report(case: Case, place: Path) -> str:
    folder = place / "run"
    (folder / "evaluations").mkdir(parents=True, exist_ok=True)
    for name, content in case.items():
        (folder / name).write_bytes(report_bytes(content, name))
    try:
        written = write_report([folder], place / "report.html")
    except GroupwiseError as error:
        return sentence(error)
    page = written.path.read_text(encoding="utf-8")
    found = elements(page)
    assert {tag: n for tag, n in found.items() if tag != "script"} == _plain(place), "other elements than those of an empty run"
    assert "Content-Security-Policy" in page
    for hostile in HOSTILE[:2]:
        assert hostile not in page, "model output stands in the page unescaped"
    return "read"


_EMPTY: dict[str, int] = {}


def _plain(place: Path) -> dict[str, int]:
    """The elements, scripts apart, of the page about a run without records."""
    if not _EMPTY:
        folder = place / "empty"
        folder.mkdir()
        (folder / "config.yaml").write_text("{}\n")
        page = write_report([folder], place / "empty.html").path.read_text(encoding="utf-8")
        _EMPTY.update({tag: n for tag, n in elements(page).items() if tag != "script"})
    return dict(_EMPTY)


def report_bytes(content: Any, name: str) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode("utf-8", errors="surrogatepass")
    if name.endswith(".yaml"):
        try:
            return yaml.safe_dump(content, allow_unicode=True).encode("utf-8", errors="surrogatepass")
        except yaml.YAMLError:
            return repr(content).encode("utf-8", errors="surrogatepass")
    if name.endswith(".jsonl") and isinstance(content, list):
        return "\n".join(json.dumps(row) for row in content).encode() + b"\n"
    return json.dumps(content).encode()


TARGETS: dict[str, tuple[st.SearchStrategy[Case], Callable[[Case, Path], str]]] = {
    "config": (CONFIGS, try_config),
    "data": (DATA, try_data),
    "answers": (ANSWERS, try_answers),
    "report": (RUN, try_report),
}


def fuzz(target: str, cases: int, number: int = 0) -> Counter[str]:
    """So many cases of one kind; how often each outcome came. Raises what a case raised that it must not, the case made small."""
    strategy, attempt = TARGETS[target]
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:

        @seed(number)
        @settings(
            max_examples=cases, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategy)
        def one(case: Case) -> None:
            outcomes[attempt(case, Path(place))] += 1

        one()
    return outcomes


def table(rows: dict[str, tuple[Counter[str], float]]) -> str:
    lines = [
        "| what was read | cases | read | read, and refused later | refused in a sentence | crashes |",
        "|---|---|---|---|---|---|",
    ]
    for name, (outcomes, _) in rows.items():
        total, read, later = sum(outcomes.values()), outcomes["read"], outcomes["read, then refused"]
        lines.append(f"| {name} | {total:,} | {read:,} | {later:,} | {total - read - later:,} | 0 |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survival.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS], default=[*TARGETS])
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/TRIALS.md")
    chosen = parser.parse_args(words)
    logging.disable(logging.CRITICAL)
    rows: dict[str, tuple[Counter[str], float]] = {}
    for target in chosen.targets:
        started = time.monotonic()
        try:
            rows[target] = (fuzz(target, chosen.cases, chosen.seed), time.monotonic() - started)
        except BaseException:
            print(f"{target}: FAILED\n{traceback.format_exc()[-6000:]}", flush=True)
            continue
        outcomes, took_s = rows[target]
        print(f"{target}: {sum(outcomes.values()):,} cases in {math.ceil(took_s)} s, {dict(outcomes)}", flush=True)
    print(table(rows))
    if chosen.write and len(rows) == len(TARGETS):
        write_section(
            "fuzzing", f"{stamp(f'python -m tests.survival.fuzz --cases {chosen.cases} --seed {chosen.seed}')}\n\n{table(rows)}"
        )
    return 0 if len(rows) == len(chosen.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
