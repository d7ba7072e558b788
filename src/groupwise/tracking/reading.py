"""A run's folder read back: for the report and the doctor, while the run goes on and after it.

Nothing here trusts the files: a line that is half written, no JSON, or of another shape is counted and left out, so that a run
that was killed, is still going, or was written by an older version can be looked at all the same.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import yaml

from groupwise.config import Config, build_known
from groupwise.config.dialect import plain_yaml
from groupwise.config.load import recipes, remember_style
from groupwise.data.answers import AnswerStyle, grade
from groupwise.data.prompts import resolve_system
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.tracking.run_folder import EARLIER_END, RunFolder
from groupwise.types import CallFailure, FinishReason, ToolCall, Turn

__all__ = ["CompletionRecord", "EvaluationRecords", "RunRecord", "answer_style", "names_run", "read_run", "stage_position"]

STAGE_ORDER = {"base": 0, "warm_start": 1, "final": 3}
"""Evaluations in mid-run, ``step-N``, stand between the warm start and the end."""
LARGEST = 2**31 - 1
"""Largest step, length and the like: the report keeps them in 32 bits."""
GRADED = 20_000
"""Completions of a run without recorded verdicts that are graded again on reading; more would take minutes."""


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """One line of ``completions.jsonl``."""

    step: int
    problem: str
    sample: int
    prompt: str
    text: str
    expected: str
    reward: float | None
    components: Mapping[str, float | None]
    advantage: float | None
    finish_reason: str
    tokens: int
    policy_version: int | None
    strict: bool | None
    """The answer is right in the place asked for; ``None`` where that is not known."""
    lenient: bool | None
    token_ids: Sequence[int] = ()
    """Empty where tokens were not recorded. Read as an array, like those below: a tuple takes three times the memory."""
    logprobs: Sequence[float] = ()
    """Log-probabilities of the sampled tokens, in nats; NaN for one that was no number; empty where tokens were not recorded."""
    token_advantages: Sequence[float] = ()
    """Only where tokens of one completion differ in theirs."""
    occurrence: int = 0
    """How many groups of the same problem stand before this one in the step."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode; empty where every token was sampled in one turn."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason != "stop"

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """All calls of tools, in order."""
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def said(self) -> str:
        """What the policy wrote, without what it was given."""
        return "\n".join(turn.text for turn in self.turns if turn.sampled) if self.turns else self.text

    @property
    def answer(self) -> str:
        """What is judged: the policy's last turn."""
        return next((turn.text for turn in reversed(self.turns) if turn.sampled), self.text)

    @property
    def transcript(self) -> str:
        """The text for a person to read: where there are several turns, each begins with who speaks."""
        return "\n".join(f"[{turn.role}] {turn.text}" for turn in self.turns) if len(self.turns) > 1 else self.text


@dataclass(frozen=True, slots=True)
class EvaluationRecords:
    """One file of ``evaluations/``: every problem as it was judged at one stage in one mode."""

    stage: str
    mode: str
    records: tuple[dict[str, Any], ...]

    @property
    def step(self) -> int | None:
        """The step after which a mid-run evaluation was taken."""
        match = re.fullmatch(r"step-(\d{1,9})", self.stage)
        return int(match[1]) if match else None

    def share(self, key: str) -> float:
        """Share of records in which ``key`` is true, of those in which it is known (not ``None``); NaN without any."""
        known = [record[key] for record in self.records if record[key] is not None]
        return sum(map(bool, known)) / len(known) if known else math.nan


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run has written so far."""

    name: str
    path: Path
    settings: Mapping[str, Any]
    """``config.yaml`` as it stands there."""
    config: Config | None
    """The same as settings of this version; ``None`` where they do not fit it."""
    environment: Mapping[str, Any]
    steps: tuple[Mapping[str, float | None], ...]
    """One mapping a step, ascending; ``None`` for a value that was not finite."""
    completions: tuple[CompletionRecord, ...]
    evaluations: tuple[EvaluationRecords, ...]
    summary: Mapping[str, Any] | None
    """``None`` while the run goes on, or where it was stopped."""
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """Lines or files that could not be used, counted by file."""

    @cached_property
    def style(self) -> AnswerStyle:
        return answer_style(self.config)

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"] or 0) if self.steps else 0

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever ``name`` was logged and finite."""
        points = ((row["step"], row.get(name)) for row in self.steps)
        return [(int(step), value) for step, value in points if step is not None and value is not None]

    def metric_names(self) -> list[str]:
        """Every logged name, in order of appearance."""
        return list(dict.fromkeys(name for row in self.steps for name in row if name not in ("step", "time_s")))


def read_run(path: Path | str) -> RunRecord:
    """Read a run's folder.

    Raises:
        ConfigError: it is no folder, or holds neither ``config.yaml`` nor ``metrics.jsonl``.
    """
    folder = RunFolder(Path(path).expanduser())
    if not folder.path.is_dir():
        raise ConfigError(f"{str(path)!r} is not a folder, but a run is one (runs/NAME): name a run's folder")
    if not folder.config.is_file() and not folder.metrics.is_file():
        raise ConfigError(
            f"{str(path)!r} holds neither config.yaml nor metrics.jsonl, so it is no run's folder: name one that `groupwise train` made"
        )
    bad: Counter[str] = Counter()
    settings = read_settings(folder.config, bad)
    config, environment = fitting_config(settings, bad), read_object(folder.environment, bad) or {}
    if config is not None:
        remember_style(config, environment)
    return RunRecord(
        name=folder.path.absolute().name,
        path=folder.path,
        settings=settings,
        config=config,
        environment=environment,
        steps=read_steps(folder.metrics, bad),
        completions=read_completions(folder.completions, answer_style(config), bad),
        evaluations=read_evaluations(folder.evaluations, bad),
        summary=read_object(folder.summary, bad),
        unreadable=dict(bad),
    )


def names_run(what: str | os.PathLike[str]) -> bool:
    """Whether ``what`` means a folder of a run. One that has a recipe's name hides that only where a run was begun in it."""
    folder = RunFolder(Path(what).expanduser())
    is_recipe = isinstance(what, str) and what in {recipe.name for recipe in recipes()}
    return folder.path.is_dir() and (not is_recipe or folder.config.is_file() or folder.metrics.is_file())


def answer_style(config: Config | None) -> AnswerStyle:
    """The style that the run's prompt asks for; ``xml`` where that cannot be told any more."""
    try:
        return resolve_system(config.prompt, config.data)[1] if config else "xml"
    except (GroupwiseError, OSError, RuntimeError):  # RuntimeError: a home folder that is not known here
        return "xml"


def read_settings(path: Path, bad: Counter[str]) -> Mapping[str, Any]:
    try:
        settings = plain_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        bad[path.name] += 1
        return {}
    return {str(key): value for key, value in settings.items()}


def fitting_config(settings: Mapping[str, Any], bad: Counter[str]) -> Config | None:
    if not settings:
        return None
    try:
        config, left_out = build_known(settings)
    except (GroupwiseError, ValueError, TypeError, AttributeError, RecursionError):
        config, left_out = None, []
    for path in left_out:
        bad[f"config.yaml: {text(path)}, which this version does not have so"] += 1
    if config is None:
        bad["config.yaml, as settings of this version"] += 1
    return config


def read_object(path: Path, bad: Counter[str]) -> Mapping[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        bad[path.name] += 1
        return None
    return content


def json_lines(path: Path, bad: Counter[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. A last line without its newline is still being written, and no mistake."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict):
                    yield row
                elif line.endswith(b"\n") and line.strip():
                    bad[path.name] += 1
    except FileNotFoundError:
        return
    except OSError:
        bad[path.name] += 1


def number(value: object) -> float | None:
    """A finite float, else ``None``; ``True`` is 1."""
    if not isinstance(value, (int, float)):
        return None
    try:
        made = float(value)
    except OverflowError:
        return None
    return made if math.isfinite(made) else None


def whole(value: object, default: int = 0) -> int:
    made = number(value)
    return default if made is None or abs(made) > LARGEST else int(made)


def truth(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def text(value: object) -> str:
    """A string that can be written as UTF-8: a lone surrogate becomes a replacement character."""
    return "" if value is None else str(value).encode("utf-8", errors="replace").decode("utf-8")


def read_steps(path: Path, bad: Counter[str]) -> tuple[Mapping[str, float | None], ...]:
    """Ascending; of a step that was written twice (before and after a resumption) the later line counts."""
    rows: dict[int, Mapping[str, float | None]] = {}
    for row in json_lines(path, bad):
        step = number(row.get("step"))
        if step is None or not 0 <= step <= LARGEST:
            bad[path.name] += 1
            continue
        values = {text(name): number(value) for name, value in row.items() if value is None or isinstance(value, (int, float))}
        rows[int(step)] = {**values, "step": float(int(step))}
    return tuple(rows[step] for step in sorted(rows))


def read_completions(path: Path, style: AnswerStyle, bad: Counter[str]) -> tuple[CompletionRecord, ...]:
    rows: dict[tuple[int, str, int, int], CompletionRecord] = {}
    kept: dict[str, str] = {}  # a prompt stands in G lines, and is held once
    for row in json_lines(path, bad):
        step = number(row.get("step"))
        if step is None or not 0 <= step <= LARGEST or not isinstance(row.get("completion"), str):
            bad[path.name] += 1
            continue
        record = completion_record(int(step), row, kept, style, may_grade=len(rows) < GRADED)
        rows[(record.step, record.problem, record.occurrence, record.sample)] = record
    return tuple(sorted(rows.values(), key=lambda r: r.step))


def completion_record(
    step: int, row: Mapping[str, Any], kept: dict[str, str], style: AnswerStyle, *, may_grade: bool
) -> CompletionRecord:
    components = row.get("components")
    ids, logprobs, advantages = (row.get(key) for key in ("token_ids", "logprobs", "token_advantages"))
    prompt, said, expected = (text(row.get(key)) for key in ("prompt", "completion", "expected"))
    strict, lenient = truth(row.get("strict")), truth(row.get("lenient"))
    if strict is None and may_grade and row.get("expected") is not None:
        accepted = row.get("accepted")
        own = next((turn.text for turn in reversed(turns(row.get("turns"))) if turn.sampled), said)
        verdict = grade(own, [text(one) for one in accepted] if isinstance(accepted, list) else expected, style)
        strict, lenient = verdict.strict, verdict.lenient
    return CompletionRecord(
        step=step,
        problem=text(row.get("problem")),
        occurrence=whole(row.get("occurrence")),
        sample=whole(row.get("sample")),
        prompt=kept.setdefault(prompt, prompt),
        text=said,
        expected=kept.setdefault(expected, expected),
        reward=number(row.get("reward")),
        components={text(k): number(v) for k, v in components.items()} if isinstance(components, dict) else {},
        advantage=number(row.get("advantage")),
        finish_reason=finish_reason(row),
        tokens=max(0, whole(row.get("tokens"))),
        policy_version=None if number(row.get("policy_version")) is None else whole(row.get("policy_version")),
        strict=strict,
        lenient=lenient,
        token_ids=array("i", [whole(i, -1) for i in ids]) if isinstance(ids, list) else (),
        logprobs=numbers(logprobs),
        token_advantages=numbers(advantages),
        turns=turns(row.get("turns")),
    )


def turns(values: object) -> tuple[Turn, ...]:
    """Those of an episode; of another shape than this version writes, none."""
    if not isinstance(values, list) or not all(
        isinstance(one, dict) and isinstance(one.get("calls", []), list) for one in values
    ):
        return ()
    return tuple(
        Turn(
            role=text(one.get("role")),
            text=text(one.get("text")),
            tokens=max(0, whole(one.get("tokens"))),
            calls=tuple(map(tool_call, filter(is_object, one.get("calls", [])))),
            reward=number(one.get("reward")),
            rewritten=one.get("rewritten") is True,
        )
        for one in values
    )


def is_object(value: object) -> bool:
    return isinstance(value, dict)


def tool_call(row: Mapping[str, Any]) -> ToolCall:
    arguments, failure = row.get("arguments"), row.get("failure")
    return ToolCall(
        name=text(row.get("name")),
        arguments=arguments if isinstance(arguments, dict) else {},
        result=text(row.get("result")),
        failure=failure if failure in get_args(CallFailure) else None,
    )


def finish_reason(row: Mapping[str, Any]) -> str:
    """``length`` for one that is not known."""
    return row["finish_reason"] if row.get("finish_reason") in get_args(FinishReason) else "length"


def numbers(values: object) -> Sequence[float]:
    """NaN for what is none, such as the null that stands for a NaN in JSON."""
    if not isinstance(values, list):
        return ()
    return array("d", [math.nan if value is None else value for value in map(number, values)])


def read_evaluations(folder: Path, bad: Counter[str]) -> tuple[EvaluationRecords, ...]:
    """Files named ``<stage>-<mode>.jsonl``, in the order in which stages happen, but for those of an end that the run was continued
    from."""
    evaluations = []
    kept: dict[str, str] = {}  # what is asked stands in the file of each stage, and is held once
    paths = sorted(p for p in folder.glob("*.jsonl") if not EARLIER_END.match(p.name)) if folder.is_dir() else []
    for path in paths:
        stage, _, mode = path.stem.rpartition("-")
        # An answer that nobody could check is neither right nor wrong; the evaluation left it out of its figures too.
        rows = (row for row in json_lines(path, bad) if not (row.get("strict") is None and "unchecked" in row))
        records = tuple(evaluation_record(row, kept) for row in rows)
        if stage and records:
            evaluations.append(EvaluationRecords(stage, mode, records))
    return tuple(sorted(evaluations, key=stage_position))


def stage_position(evaluation: EvaluationRecords) -> tuple[int, int, str, str]:
    rank = STAGE_ORDER.get(evaluation.stage, 2 if evaluation.step is not None else 4)
    return rank, evaluation.step or 0, evaluation.stage, evaluation.mode


def evaluation_record(row: Mapping[str, Any], kept: dict[str, str]) -> dict[str, Any]:
    extracted = row.get("extracted")
    return {
        **{key: kept.setdefault(same := text(row.get(key)), same) for key in ("problem", "question", "prompt", "expected")},
        "response": text(row.get("response")),
        **{key: row.get(key) is True for key in ("strict", "format")},
        # Where the place asked for is empty, what stands elsewhere may have gone unchecked.
        "lenient": None if "unchecked" in row and row.get("lenient") is None else row.get("lenient") is True,
        "extracted": None if extracted is None else text(extracted),
        "finish_reason": finish_reason(row),
        "tokens": max(0, whole(row.get("tokens"))),
        **({"turns": [asdict(turn) for turn in turns(row["turns"])]} if "turns" in row else {}),
        **({"reward": number(row["reward"]), "success": truth(row.get("success"))} if "reward" in row else {}),
    }
