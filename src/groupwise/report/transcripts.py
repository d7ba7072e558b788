"""Recorded completions: a small table of numbers to filter by, and the texts in portions that are unpacked when looked at, cut into tokens
by the tokenizer that the run left behind or that this machine has of its model.
"""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from groupwise.errors import ModelError
from groupwise.report.curves import short
from groupwise.report.page import pack_columns, pack_json
from groupwise.tracking.files import finite
from groupwise.tracking.reading import CompletionRecord, RunRecord
from groupwise.types import ToolCall, Turn

__all__ = ["COLUMNS", "Portions", "TokenPieces", "around_questions", "fill_portions", "transcripts"]

PORTION = 150_000
"""Characters of text after which a portion is closed: small enough to unpack in a few milliseconds."""
COLUMNS = ("step", "problem", "sample", "tokens", "group", "reward", "advantage", "flags")
"""int32 up to ``group``, then two float32 (NaN: not known), then a byte of flags."""
RIGHT, WRONG, LENIENT, TRUNCATED, CALLS, INVALID, FAILED = 1, 2, 4, 8, 16, 32, 64

Portions = list[str]


def transcripts(run: RunRecord) -> tuple[dict[str, object], Portions]:
    """The table (as JSON, columns packed) and the packed portions of text.

    A portion is a list of groups; a group is ``{prompt, expected, problem, step, rows}`` with one row ``{t, c}`` per completion:
    its text and its components' scores in the order of ``components``. Where tokens were recorded there are also ``x`` (what special
    tokens at the end add to the text), ``n`` (the length of each token's text, in UTF-16 units), ``lp`` (log-probabilities in bytes,
    see ``logprob_byte``), and ``ta`` (their own advantages, where tokens of one completion differ in them). An episode has ``u``, its turns
    as ``[role, text, tokens, [[name, arguments, result, failure] ...], reward]``, and ``w`` in place of ``x``: the text with all special
    tokens.
    """
    names = list(dict.fromkeys(name for record in run.completions for name in record.components))
    groups = [list(rows) for _, rows in groupby(run.completions, key=lambda r: (r.step, r.problem, r.occurrence))]
    problems = {name: i for i, name in enumerate(dict.fromkeys(record.problem for record in run.completions))}
    columns = fill_columns(groups, problems)
    pieces = TokenPieces(run)
    sizes = (sum(len(r.text) for r in group) + len(group[0].prompt) for group in groups)
    starts, portions = fill_portions(zip((as_group(group, names, pieces) for group in groups), sizes, strict=True))
    table = {
        "count": len(run.completions),
        "problems": list(problems),
        "components": names,
        "episodes": any(record.turns for record in run.completions),
        "columns": pack_columns(columns),
        "starts": starts,
        "around": [utf16_length(part) for part in around_questions([group[0].prompt for group in groups])],
    }
    return table, portions


def around_questions(prompts: Sequence[str]) -> tuple[str, str]:
    """What all prompts begin and end with: the template, the system prompt, worked examples. Between them stands the question,
    whatever the template. Cut at the ends of lines and at marks, so that words which questions share stay with them.

    >>> around_questions(["<user>\\nWhat is 1 + 1?</user>", "<user>\\nWhat is 2 + 2?</user>"])
    ('<user>\\n', '</user>')
    """
    different = set(prompts)
    if len(different) < 2:
        return "", ""
    before = common_beginning(different)
    after = common_beginning({prompt[::-1] for prompt in different})[::-1]
    before = before[: before.rfind("\n") + 1]
    starts = [at for mark in "<[\n" if (at := after.find(mark)) >= 0]
    return before, after[min(starts) :] if starts else ""


def common_beginning(texts: Collection[str]) -> str:
    """The beginning that all texts share: what the first and the last in order share."""
    first, last = min(texts), max(texts)
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))]


def fill_columns(groups: Sequence[Sequence[CompletionRecord]], problems: dict[str, int]) -> list[array[Any]]:
    whole: list[array[int]] = [array("i") for _ in range(5)]
    parts: list[array[float]] = [array("f") for _ in range(2)]
    flags: array[int] = array("B")
    for number, group in enumerate(groups):
        for r in group:
            for column, value in zip(whole, (r.step, problems[r.problem], r.sample, r.tokens, number), strict=True):
                column.append(value)
            for part, known in zip(parts, (r.reward, r.advantage), strict=True):
                part.append(as_float32(known))
            flags.append(flags_of(r))
    return [*whole, *parts, flags]


def as_float32(value: float | None) -> float:
    """NaN for what is not known; larger than a float32 holds becomes the largest that it does."""
    return float("nan") if value is None else max(-3.4e38, min(3.4e38, value))


def flags_of(record: CompletionRecord) -> int:
    return (
        (RIGHT if record.strict else 0)
        | (WRONG if record.strict is False else 0)
        | (LENIENT if record.lenient else 0)
        | (TRUNCATED if record.truncated else 0)
        | (CALLS if record.calls else 0)
        | (INVALID if any(call.failure == "invalid" for call in record.calls) else 0)
        | (FAILED if any(call.failure in ("raised", "timed_out") for call in record.calls) else 0)
    )


def fill_portions(entries: Iterable[tuple[dict[str, Any], int]]) -> tuple[list[int], Portions]:
    """Of entries with their characters: the number of each portion's first one, and the portions."""
    starts: list[int] = []
    portions: Portions = []
    waiting: list[dict[str, Any]] = []
    size = 0
    for number, (entry, characters) in enumerate(entries):
        if not waiting:
            starts.append(number)
        waiting.append(entry)
        size += characters
        if size >= PORTION:
            portions.append(pack_json(waiting))
            waiting, size = [], 0
    if waiting:
        portions.append(pack_json(waiting))
    return starts, portions


def as_group(group: Sequence[CompletionRecord], names: Sequence[str], pieces: TokenPieces) -> dict[str, object]:
    first = group[0]
    return {
        "prompt": first.prompt,
        "expected": first.expected,
        "problem": first.problem,
        "step": first.step,
        "rows": [as_row(record, names, pieces) for record in group],
    }


def as_row(record: CompletionRecord, names: Sequence[str], pieces: TokenPieces) -> dict[str, object]:
    row: dict[str, object] = {"t": record.text, "c": [rounded(record.components.get(name)) for name in names]}
    if record.turns:
        row["u"] = [as_turn(turn) for turn in record.turns]
    texts = pieces.of(record)
    whole = "".join(texts)
    if texts and (record.turns or whole.startswith(record.text)):
        row |= {"w": whole} if record.turns else {"x": whole[len(record.text) :]}
        row["n"] = [utf16_length(text) for text in texts]
        row["lp"] = base64.b64encode(bytes(map(logprob_byte, record.logprobs))).decode("ascii")
        if record.token_advantages:
            row["ta"] = [0.0 if math.isnan(x) else short(x) for x in record.token_advantages]
    return row


def as_turn(turn: Turn) -> list[object]:
    def arguments(call: ToolCall) -> str:  # half a character, which no page can hold, as its escape
        return json.dumps(finite(call.arguments), ensure_ascii=False).encode("utf-8", "backslashreplace").decode()

    calls = [[call.name, arguments(call), call.result, call.failure] for call in turn.calls]
    return [turn.role, turn.text, turn.tokens, calls, turn.reward, *([True] if turn.rewritten else [])]


def utf16_length(text: str) -> int:
    """Length of ``text`` as JavaScript counts characters."""
    return len(text.encode("utf-16-le")) // 2


def logprob_byte(logprob: float) -> int:
    """A log-probability in one byte, exact to 0.03 nats at -1 and to 0.0001 near 0: ``-16 (byte / 255)^2``. NaN is the smallest."""
    return 255 if math.isnan(logprob) else round(255 * math.sqrt(min(max(-logprob, 0.0), 16.0) / 16))


def rounded(value: float | None) -> float | None:
    return None if value is None else short(value)


CONTEXT = 8
"""Tokens that are decoded together, so that spaces and characters across tokens come out as in the whole text."""


class TokenPieces:
    """Cuts completions into their tokens. Without a tokenizer to be found, there are no pieces and no complaint."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.known: dict[int, str] = {}

    def of(self, record: CompletionRecord) -> list[str]:
        """One text per token id; their concatenation is the completion with its special tokens. Empty where tokens were not
        recorded, or no tokenizer is at hand."""
        if not record.token_ids or len(record.logprobs) != len(record.token_ids) or self.tokenizer is None:
            return []
        ids = list(record.token_ids)
        try:
            return self.one_by_one(ids) or self.in_context(ids)
        except (OverflowError, TypeError, ValueError):
            return []

    def one_by_one(self, ids: list[int]) -> list[str]:
        """The texts of single tokens, where these make up the whole: nearly always, and a hundred times as fast."""
        pieces = [self.single(token) for token in ids]
        return pieces if "".join(pieces) == self.decode(ids) else []

    def single(self, token: int) -> str:
        if token not in self.known:
            anchored = self.decode([self.anchor, token])
            self.known[token] = anchored[len(self.decode([self.anchor])) :]
        return self.known[token]

    def in_context(self, ids: list[int]) -> list[str]:
        """Each token's text as it comes out after those before it."""
        pieces: list[str] = []
        before = ""
        for end in range(1, len(ids) + 1):
            start = max(0, end - CONTEXT)
            if start:
                before = self.decode(ids[start : end - 1])
            now = self.decode(ids[start:end])
            # A character of several bytes may be spread over tokens: it belongs to the one that completes it.
            done = now[:-1] if now.endswith("\ufffd") else now
            pieces.append(done[len(before) :] if done.startswith(before) else done)
            before = done if done.startswith(before) else now
        return pieces

    def decode(self, ids: list[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    @cached_property
    def anchor(self) -> int:
        """A token to stand before another, since some tokenizers take the space off what comes first."""
        assert self.tokenizer is not None
        return int(self.tokenizer.encode("a", add_special_tokens=False).ids[-1])

    @cached_property
    def tokenizer(self) -> Any | None:
        from tokenizers import Tokenizer

        for folder in self.folders():
            path = folder / "tokenizer.json"
            try:
                if path.is_file():
                    return Tokenizer.from_file(str(path))
            except Exception:  # a folder that may not be looked into; the library raises bare exceptions for a damaged file
                continue
        return None

    def folders(self) -> list[Path]:
        """Where the run's tokenizer may be: its model, its checkpoints, and what is here of the model that it started from."""
        checkpoints = sorted(self.run.path.glob("checkpoints/*/*/tokenizer.json"))
        started_from = local_folder(self.run.config.model.name, self.run.config.model.revision) if self.run.config else None
        return [
            self.run.path / "final_model",
            *(path.parent for path in checkpoints[-1:]),
            *([started_from] if started_from else []),
        ]


def local_folder(name: str, revision: str | None) -> Path | None:
    """Where this machine has a model's files, if it does; nobody is asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from groupwise.models.embedded import EMBEDDED_NAME, embedded_folder
    from groupwise.models.folder import is_folder_name

    with suppress(OSError, RuntimeError, ModelError):  # it may not be looked for there, or no such home folder is known
        if name == EMBEDDED_NAME:
            return embedded_folder()
        if is_folder_name(name):
            return Path(name).expanduser()
    try:
        cached = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None
