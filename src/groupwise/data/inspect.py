"""A look at a data source before a run is spent on it: for ``groupwise data inspect``. Bad rows are reported, not raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from groupwise.config.schema import DataConfig, PromptConfig
from groupwise.data.answers import AnswerStyle
from groupwise.data.arithmetic import generate
from groupwise.data.named import is_prepared, load_prepared, named_folder
from groupwise.data.prompts import note_on_options, note_on_place, note_on_places, render, resolve_system, worked_completion
from groupwise.data.readers import read_table
from groupwise.data.sources import find_columns, has_answers, refuse_inert, to_problem
from groupwise.errors import DataError, ModelError
from groupwise.types import Problem, Prompt

__all__ = ["inspect_source"]

BAD_ROWS_SHOWN = 10
MEASURED = 2_000
"""Prompts that are tokenised for the distribution of lengths, evenly spaced over the source."""


Render = Callable[[Problem, str | None], Prompt]
"""Makes the prompt of a problem under a system prompt."""


def inspect_source(
    data: DataConfig, prompt: PromptConfig, tokenizer: Any | None, rows: int = 3, render_as: Render | None = None
) -> dict[str, Any]:
    """What a run would make of ``data``, as plain values that JSON can hold.

    ``render_as``: how prompts are made where there is more in them than the row and the system prompt, such as tools.

    Keys: ``source``, ``split``, ``rows`` (how many), ``usable``, ``columns`` (``all``, ``prompt``, ``answer``),
    ``answer_style``, ``system``, ``own_system`` (usable rows that begin with a system turn of their own, in place of ``system``), ``notes``
    (sentences), ``bad_rows`` (``count``; ``refused``, how many of them the chat template refuses, of those that were rendered; and
    ``first``, each with ``row`` and ``reason``), ``examples`` (the first ``rows``: ``id``, ``question``, ``answer``, ``also``, ``worked``,
    and with a tokenizer ``prompt`` and ``prompt_tokens``) and ``prompt_tokens`` (``measured``, ``min``, ``median``, ``p95``, ``max``;
    ``None`` without a tokenizer). Raises DataError only where no row can be read at all, or a setting does nothing with the source, and
    ModelError where no prompt can be rendered.
    """
    problems, bad, columns, total = _collect(data)
    system, style = resolve_system(prompt, data)
    make = render_as or (None if tokenizer is None else partial(_render, prompt, tokenizer))
    measured = _spread(problems)
    prompts: dict[str, Prompt] = {}
    refused: list[dict[str, str]] = []
    if make is not None:
        prompts, refused = _rendered([*problems[:rows], *measured], make, system)
    bad += refused
    without = {one["row"] for one in refused}
    usable = [problem for problem in problems if problem.id not in without]
    first = [prompts[problem.id] for problem in problems[:rows] if problem.id in prompts]
    notes = [note_on_place(first, style), note_on_places(prompt), *map(note_on_options, first[:1])] if has_answers(data) else []
    return {
        "source": data.source,
        "split": data.split,
        "rows": total,
        "usable": len(usable),
        "columns": columns,
        "answer_style": style,
        "system": system,
        "own_system": sum(not isinstance(p.question, str) and p.question[0]["role"] == "system" for p in usable),
        "notes": [note for note in notes if note],
        "bad_rows": {"count": len(bad), "refused": len(refused), "first": bad[:BAD_ROWS_SHOWN]},
        "examples": [_example(problem, prompts.get(problem.id), style) for problem in problems[:rows]],
        "prompt_tokens": _lengths([len(prompts[problem.id].token_ids) for problem in measured if problem.id in prompts]),
    }


def _collect(data: DataConfig) -> tuple[list[Problem], list[dict[str, str]], dict[str, object], int]:
    if data.source == "arithmetic":
        most = data.arithmetic.problems
        problems = generate(data.arithmetic, min(data.limit or most, most), data.split_seed, "train")
        return problems, [], {"all": [], "prompt": None, "answer": None}, len(problems)
    refuse_inert(data)
    if is_prepared(data.source):
        problems = load_prepared(data.source, "train" if data.split == "train" else "held_out")[: data.limit]
        names = ["id", "question", "answer", "columns"]
        return problems, [], {"all": names, "prompt": "question", "answer": "answer"}, len(problems)
    table = read_table(data.source, data.split, data.subset, named_folder(data.folder))
    mapping = find_columns(table, data)
    problems, bad = [], []
    for index, row in enumerate(table.rows[: data.limit]):
        try:
            problems.append(to_problem(row, mapping, data.answer_format, f"{table.label}:{table.split}:{index}"))
        except DataError as error:
            bad.append({"row": row.name, "reason": str(error)})
    columns: dict[str, object] = {"all": list(table.columns), "prompt": " + ".join(mapping.prompt), "answer": mapping.answer}
    return problems, bad, columns, len(problems) + len(bad)


def _render(prompt: PromptConfig, tokenizer: Any, problem: Problem, system: str | None) -> Prompt:
    return render(problem, tokenizer, prompt, system)


def _rendered(problems: Sequence[Problem], make: Render, system: str | None) -> tuple[dict[str, Prompt], list[dict[str, str]]]:
    """Prompts by their problems' ids, and the problems whose conversation the chat template refuses. Raises ModelError where those are
    all."""
    prompts: dict[str, Prompt] = {}
    refused: dict[str, ModelError] = {}
    for problem in {problem.id: problem for problem in problems}.values():
        try:
            prompts[problem.id] = make(problem, system)
        except ModelError as error:
            refused[problem.id] = error
    if refused and not prompts:
        raise next(iter(refused.values()))
    return prompts, [{"row": name, "reason": str(error)} for name, error in refused.items()]


def _example(problem: Problem, prompt: Prompt | None, style: AnswerStyle) -> dict[str, object]:
    question = problem.question if isinstance(problem.question, str) else [dict(m) for m in problem.question]
    shown: dict[str, object] = {
        "id": problem.id,
        "question": question,
        "answer": problem.answer,
        "also": list(problem.also),
        "worked": worked_completion(problem, style),
    }
    return shown if prompt is None else {**shown, "prompt": prompt.text, "prompt_tokens": len(prompt.token_ids)}


def _spread(problems: Sequence[Problem]) -> list[Problem]:
    count = min(len(problems), MEASURED)
    return [problems[i * len(problems) // count] for i in range(count)]


def _lengths(tokens: Sequence[int]) -> dict[str, int] | None:
    if not tokens:
        return None
    count, lengths = len(tokens), sorted(tokens)
    return {
        "measured": count,
        "min": lengths[0],
        "median": lengths[count // 2],
        "p95": lengths[min(count - 1, count * 95 // 100)],
        "max": lengths[-1],
    }
