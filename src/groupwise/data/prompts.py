"""From a problem to the exact token ids that the policy is conditioned on, and to the supervised target of the warm start."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from groupwise.config.schema import DataConfig, PromptConfig
from groupwise.data.answers import AnswerStyle, exact_match, extract_answer, numeric_equal, without_places
from groupwise.data.named import NAMED, canonical_name, prepared_style
from groupwise.data.readers import is_missing, names_function, peek_columns
from groupwise.errors import DataError, ModelError
from groupwise.types import Message, Problem, Prompt

__all__ = [
    "SYSTEM_PROMPTS", "default_style", "drop_long_prompts", "note_on_date", "note_on_options", "note_on_place", "note_on_places",
    "plain_ids", "render", "resolve_system", "unknown_arguments", "worked_completion", "worked_expressions",
]  # fmt: skip

log = logging.getLogger(__name__)

SYSTEM_PROMPTS: dict[str, str] = {
    "xml": "First write your reasoning between <reasoning> and </reasoning>. Then write only the final answer between <answer> and "
    "</answer>.",
    "boxed": "Reason step by step, then put the final answer in \\boxed{}.",
}
"""``xml`` is the wording of ``experiments.prompts`` that an untrained model of 1.5B gets right in its form most often."""

BOXED_COLUMNS = ({"problem", "answer", "difficulty"}, {"prompt", "reward_model"})
"""Columns of POLARIS, and of the layout that it keeps its benchmarks in: their answers are LaTeX."""
MARKS: dict[AnswerStyle, str] = {"boxed": "\\boxed", "xml": "<answer>", "plain": "####"}
"""What a prompt mentions that asks for the answer in a style's place."""
CALCULATOR_MARK = re.compile(r"<<([^<>=;A-Za-z\n]+)=[^<>=;A-Za-z\n]*>>")
"""Numbers and signs around one ``=``, as in all of GSM8K's; ``1 << 3; y = 16 >> 2`` is none."""


def default_style(data: DataConfig) -> AnswerStyle:
    """The style of a data set known by name; a prepared folder's own; ``boxed`` for POLARIS by its name or columns; ``xml`` for
    all else. Of a run that is asked the one that it found."""
    if data._found_style is not None:
        return data._found_style
    name = canonical_name(data.source)
    if name is not None:
        return NAMED[name].style
    prepared_for = prepared_style(data.source)
    if prepared_for is not None:
        return prepared_for
    local = is_missing(data.source) or names_function(data.source) or Path(data.source).expanduser().exists()
    if "polaris" in (Path(data.source).name if local else data.source).lower():  # folders above may be called anything
        return "boxed"
    if is_missing(data.source):
        _say_missing(data.source)
    columns = set(peek_columns(data.source, data.split))
    return "boxed" if any(known <= columns for known in BOXED_COLUMNS) else "xml"


@cache
def _say_missing(source: str) -> None:
    """Once: a run's settings are looked at several times."""
    log.warning(
        "data source %r is not here, and the place of answers goes by it: <answer> tags are taken; set prompt.system to boxed "
        "where the model was trained with that",
        source,
    )


def resolve_system(prompt: PromptConfig, data: DataConfig) -> tuple[str | None, AnswerStyle]:
    """The system prompt's text (``None`` for none) and the place where the model's answer is then looked for.

    A text of the user's own decides the place by what it mentions: ``\\boxed``, ``<answer>`` or ``####``, the first in this
    order; otherwise, and without a system prompt, the data set's usual place counts.
    """
    if prompt.system == "xml":
        return SYSTEM_PROMPTS["xml"], "xml"
    if prompt.system == "boxed":
        return SYSTEM_PROMPTS["boxed"], "boxed"
    if prompt.system == "auto":
        style = default_style(data)
        return SYSTEM_PROMPTS[style], style
    if prompt.system == "none":
        return None, default_style(data)
    mentioned = [style for style, mark in MARKS.items() if mark in prompt.system]
    return prompt.system, mentioned[0] if mentioned else default_style(data)


def render(
    problem: Problem, tokenizer: Any, prompt: PromptConfig, system: str | None, tools: Sequence[Mapping[str, Any]] | None = None
) -> Prompt:
    """The prompt of ``problem`` for the model whose tokenizer this is. ``tools``: schemas that the chat template describes.

    ``chat``: the ids are the tokenizer's own ``apply_chat_template`` ids with the generation prompt. A conversation keeps its own
    system turn. Raises ModelError where the tokenizer has no chat template or the template refuses the conversation.
    """
    messages = _conversation(problem.question, system)
    if prompt.style == "chat":
        more = (
            prompt.template_arguments if tools is None else {**prompt.template_arguments, "tools": [dict(tool) for tool in tools]}
        )
        return _render_chat(problem, tokenizer, messages, more)
    text = _plain_text(messages) if prompt.style == "plain" else "\n".join(m["content"].strip() for m in messages)
    return Prompt(problem, text, plain_ids(tokenizer, text))


def plain_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The ids of a prompt that is plain text: without the end token that some tokenizers put behind every text, after which the policy
    would have to go on, and with one start token where the text begins with it already."""
    start, end = tokenizer.bos_token, tokenizer.eos_token
    ids = list(tokenizer(text, add_special_tokens=not (start and text.startswith(start)))["input_ids"])
    while ids and ids[-1] == tokenizer.eos_token_id and not text.rstrip().endswith(end):
        ids.pop()
    return tuple(ids)


def unknown_arguments(tokenizer: Any, arguments: Iterable[str], setting: str = "prompt.template_arguments") -> str | None:
    """A sentence where the model's chat template does not ask for some of ``arguments``, the names in ``setting``, which Jinja takes
    in silence."""
    template = str(getattr(tokenizer, "chat_template", None))
    unknown = [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", template)]
    if not unknown:
        return None
    return (
        f"{setting} has {', '.join(unknown)}, which the model's chat template does not ask for: correct the name, or leave it out"
    )


def note_on_date(tokenizer: Any, prompt: PromptConfig) -> str | None:
    """A sentence for a chat template that writes the day's date (Llama 3.2's does), by which prompts differ from day to day; else None."""
    template = str(getattr(tokenizer, "chat_template", None))
    if prompt.style != "chat" or "strftime_now" not in template:
        return None
    taken = "date_string" in template
    remedy = "begin it with {%- set date_string = '26 Jul 2024' -%}" if taken else "write a date in place of strftime_now"
    return (
        "the chat template writes today's date into prompts, so a run that is resumed or evaluated on another day has others: to keep "
        f"them, take a copy of the model's folder, and change its chat template: {remedy}."
    )


def note_on_place(prompts: Sequence[Prompt], style: AnswerStyle) -> str | None:
    """A sentence where ``prompts`` ask for the answer in another place than that of ``style``, where it is looked for; else None.

    A row's own turns may ask for another, and its own system turn takes the place of ``prompt.system``.
    """
    if not prompts or any(MARKS[style] in one.text for one in prompts):
        return None
    for asked, mark in MARKS.items():
        if all(mark in one.text for one in prompts):
            named = "a prompt.system that mentions ####" if asked == "plain" else f"prompt.system={asked}"
            return (
                f"prompts ask for the answer by {mark}, but it is looked for by {MARKS[style]}, so a right one counts as wrong: "
                f"set {named}."
            )
    return None


def note_on_places(prompt: PromptConfig) -> str | None:
    """A sentence where a system prompt of the user's own mentions several places for the answer; else None."""
    mentioned = [mark for mark in MARKS.values() if mark in prompt.system]
    if len(mentioned) < 2:
        return None
    return f"prompt.system mentions {' and '.join(mentioned)}: answers are looked for by {mentioned[0]}."


def note_on_options(prompt: Prompt) -> str | None:
    """A sentence where the row has options to choose from, as those of MMLU have, and the prompt does not show them; else None."""
    for name in ("choices", "options"):
        options, shown = prompt.problem.columns.get(name), "".join(prompt.text.split())
        texts = ["".join(one.split()) for one in options if isinstance(one, str)] if isinstance(options, (list, tuple)) else []
        if texts and not any(text in shown for text in texts):
            return (
                f"rows have options in the column {name!r}, which prompts do not show, and the first answer is "
                f"{prompt.problem.answer!r}: write the options into the question."
            )
    return None


def _conversation(question: str | Sequence[Message], system: str | None) -> list[Message]:
    turns: list[Message] = [{"role": "user", "content": question}] if isinstance(question, str) else [dict(m) for m in question]  # type: ignore[misc]
    if system and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    return turns


def _plain_text(messages: Sequence[Message]) -> str:
    lines = [m["content"] + "\n" if m["role"] == "system" else f"{m['role'].capitalize()}: {m['content']}" for m in messages]
    return "\n".join([*lines, "Assistant: "])


def _render_chat(problem: Problem, tokenizer: Any, messages: list[Message], more: Mapping[str, Any]) -> Prompt:
    """``more``: what the template is given beside the messages."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError("the tokenizer has no chat template: set prompt.style to plain or concat, or take an instruct model")
    try:
        text = _template(tokenizer, messages, more, tokenize=False)
        # Some templates leave a system turn out without a word; the model would never see its instructions.
        whole = messages[0]["role"] != "system" or messages[0]["content"].strip() in text
    except Exception as error:
        if messages[0]["role"] != "system":
            raise ModelError(_refused(problem, error)) from error
        whole = False
    if not whole:
        messages = _merge_system(messages)
        try:
            text = _template(tokenizer, messages, more, tokenize=False)
        except Exception as error:
            raise ModelError(_refused(problem, error)) from error
    return Prompt(problem, text, tuple(_template(tokenizer, messages, more, tokenize=True)), tuple(messages))


def _refused(problem: Problem, error: Exception) -> str:
    return (
        f"the tokenizer's chat template refuses the conversation of problem {problem.id} ({error}): its turns must alternate "
        "between user and assistant and end with the user; correct the row or set prompt.style to plain"
    )


def _template(tokenizer: Any, messages: Sequence[Message], more: Mapping[str, Any], *, tokenize: bool) -> Any:
    rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=tokenize, **more)
    # transformers 5 returns a BatchEncoding where 4 returned the list of ids.
    return rendered["input_ids"] if tokenize and hasattr(rendered, "keys") else rendered


def _merge_system(messages: Sequence[Message]) -> list[Message]:
    """The system turn's text at the head of the user's first turn, for templates that know no system role."""
    system, rest = messages[0]["content"], list(messages[1:])
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": system}, *rest]
    return [{"role": "user", "content": f"{system}\n\n{rest[0]['content']}"}, *rest[1:]]


def worked_completion(problem: Problem, style: AnswerStyle) -> str:
    """A supervised target: the row's worked solution, then the answer, in the format that ``style`` asks for.

    The solution is ``problem.columns["solution"]`` without GSM8K's ``<<48/2=24>>`` marks, the answer's ``####`` line at its end,
    and tags and boxes that it has already; where a row has none, the target is the answer alone.
    """
    solution = CALCULATOR_MARK.sub("", str(problem.columns.get("solution") or "")).strip()
    text, mark, last = solution.rpartition("####")
    # What else follows #### is a heading of Markdown.
    if mark and "\n" not in last.strip() and any(exact_match(last, one) or numeric_equal(last, one) for one in problem.accepted):
        solution = text.strip()
    if style == "boxed" and solution.count("\\boxed") == 1 and extract_answer(solution, "boxed") == problem.answer:
        return solution
    solution = without_places(solution)
    if solution == problem.answer:  # a column of that name with answers alone
        solution = ""
    if style == "xml":
        reasoning = f"<reasoning>\n{solution}\n</reasoning>\n" if solution else ""
        return f"{reasoning}<answer>\n{problem.answer}\n</answer>"
    if style == "plain":  # where #### is for the answer alone
        solution = re.sub(r"#{4,} ?", "", solution)
    last = f"\\boxed{{{problem.answer}}}" if style == "boxed" else f"#### {problem.answer}"
    return f"{solution}\n{last}" if solution else last


def worked_expressions(problem: Problem) -> list[str]:
    """What a calculator computes on the way to the answer, in order: the column ``expression``, or GSM8K's ``<<48/2=24>>`` marks in the
    column ``solution``."""
    expression = problem.columns.get("expression")
    return CALCULATOR_MARK.findall(str(problem.columns.get("solution") or "")) if expression is None else [str(expression)]


def drop_long_prompts(
    prompts: Sequence[Prompt], limit: int, on_long_prompt: Literal["error", "drop"] = "error"
) -> tuple[list[Prompt], int]:
    """Prompts of at most ``limit`` tokens, in order, and how many were longer.

    Raises DataError naming the first that is longer (``error``), or where none is left (``drop``).
    """
    kept = [p for p in prompts if len(p.token_ids) <= limit]
    if len(kept) == len(prompts):
        return kept, 0
    longest = max(prompts, key=lambda p: len(p.token_ids))
    if on_long_prompt == "error":
        first = next(p for p in prompts if len(p.token_ids) > limit)
        raise DataError(
            f"the prompt of problem {first.problem.id} has {len(first.token_ids)} tokens, more than the {limit} allowed "
            f"({len(prompts) - len(kept)} such prompts, the longest {len(longest.token_ids)}): raise data.max_prompt_tokens, "
            "lower rollout.max_completion_tokens, or set data.on_long_prompt to drop"
        )
    if not kept:
        raise DataError(
            f"every prompt is longer than the {limit} tokens allowed (the longest has {len(longest.token_ids)}): raise "
            "data.max_prompt_tokens or lower rollout.max_completion_tokens"
        )
    return kept, len(prompts) - len(kept)
