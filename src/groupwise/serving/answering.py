"""Completions as OpenAI's chat completions have them: whole, or in pieces as they come."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from groupwise.episodes.formats import CallFormat, after_thoughts
from groupwise.episodes.tools import Tool, arguments_by_name
from groupwise.serving.asking import fits
from groupwise.serving.sampler import Choice

__all__ = ["Answer", "calls_in"]

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


def calls_in(text: str, form: CallFormat, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The calls in a turn's text; none where one of them cannot be read, or does not fit the schema of a strict tool: the text is the
    answer then, for the client to see."""
    offered = {tool.name: tool for tool in tools}
    calls = []
    for asked in form.read(text):
        tool = offered.get(asked.name)
        try:
            arguments = dict(asked.arguments) if tool is None else arguments_by_name(tool, asked)
        except ValueError:
            return []
        if asked.problem is not None or (tool is None and (asked.positions or asked.text)):
            return []
        if tool is not None and tool.schema.get("strict") and not fits(arguments, tool.schema["function"]["parameters"]):
            return []
        function = {"name": asked.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return calls


@dataclass(frozen=True, slots=True)
class _Said:
    """What a finished choice comes to."""

    content: str | None
    calls: list[dict[str, Any]]
    finish_reason: str


class Answer:
    """The bodies of one answer to a client, over choices as they come.

    Args:
        form: how the model writes calls; None where it was offered no tools.
        decode: a token's own text.
    """

    def __init__(
        self, model: str, choices: Sequence[Choice], end_token_ids: frozenset[int], tools: Sequence[Tool], form: CallFormat | None,
        *, logprobs: bool, decode: Callable[[int], str],
    ) -> None:  # fmt: skip
        self.choices, self.ends, self.tools, self.form = choices, end_token_ids, tools, form
        self.logprobs, self.decode = logprobs, decode
        self.about = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._sent = [0] * len(choices)
        """Characters of each choice's text that were sent as content,"""
        self._told = [0] * len(choices)
        """tokens whose log-probabilities were,"""
        self._begun = [False] * len(choices)
        self._ended = [False] * len(choices)

    @property
    def usage(self) -> dict[str, int]:
        """The prompt counts once; end tokens count."""
        prompt, sampled = len(self.choices[0].prompt_ids), sum(len(choice.token_ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def whole(self) -> dict[str, Any]:
        """The body once all choices are finished."""
        told = []
        for index, choice in enumerate(self.choices):
            said = self._said(choice)
            message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
            if said.calls:
                message["tool_calls"] = said.calls
            logprobs = self._logprobs(choice, 0, self._shown(choice)) if self.logprobs else None
            told.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": said.finish_reason})
        return {**self.about, "object": "chat.completion", "choices": told, "usage": self.usage}

    def pieces(self) -> Iterator[dict[str, Any]]:
        """What is new since this was asked last; a choice that failed has no end."""
        for index, choice in enumerate(self.choices):
            if self._ended[index]:
                continue
            finished = choice.finish_reason not in (None, "error")  # before the text is looked at: it is written last
            if not self._begun[index] and choice.token_ids:
                self._begun[index] = True
                yield self._piece(index, {"role": "assistant", "content": ""})
            if finished:
                self._ended[index] = True
                yield from self._last(index, choice)
                continue
            certain = self._certain(choice.text)
            if certain > self._sent[index]:
                upto = _tokens_within(certain, choice) if self.logprobs else 0
                yield self._content(index, choice, certain, upto)

    def usage_piece(self) -> dict[str, Any]:
        return {**self.about, "object": "chat.completion.chunk", "choices": [], "usage": self.usage}

    def _last(self, index: int, choice: Choice) -> Iterator[dict[str, Any]]:
        said, shown = self._said(choice), self._shown(choice)
        rest = (said.content or "")[self._sent[index] :]
        if rest or (self.logprobs and shown > self._told[index]):
            yield self._content(index, choice, self._sent[index] + len(rest), shown, rest)
        if said.calls:
            yield self._piece(index, {"tool_calls": [{"index": place, **call} for place, call in enumerate(said.calls)]})
        yield self._piece(index, {}, finish_reason=said.finish_reason)

    def _content(self, index: int, choice: Choice, sent: int, told: int, text: str | None = None) -> dict[str, Any]:
        text = choice.text[self._sent[index] : sent] if text is None else text
        logprobs = self._logprobs(choice, self._told[index], told) if self.logprobs else None
        self._sent[index], self._told[index] = sent, max(told, self._told[index])
        return self._piece(index, {"content": text}, logprobs=logprobs)

    def _piece(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        one = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**self.about, "object": "chat.completion.chunk", "choices": [one]}

    def _said(self, choice: Choice) -> _Said:
        assert choice.finish_reason is not None
        calls = calls_in(choice.text, self.form, self.tools) if self.form is not None else []
        if not calls or self.form is None:
            return _Said(choice.text, [], choice.finish_reason)
        before = self._before_calls(choice.text, self.form)
        return _Said(before or None, calls, "tool_calls" if choice.finish_reason == "stop" else choice.finish_reason)

    def _before_calls(self, text: str, form: CallFormat) -> str:
        """Up to where a call may begin."""
        begin = len(text) - len(after_thoughts(text, form.openings[0]))
        return text[: min((at for one in form.openings if (at := text.find(one, begin)) >= 0), default=len(text))].rstrip()

    def _certain(self, text: str) -> int:
        """How many characters are content whatever follows: what may be the beginning of a stop or of a call is not."""
        marks = list(self.choices[0].stop)
        if self.form is not None:
            text = self._before_calls(text, self.form)
            marks += self.form.openings
        held = max((n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])), default=0)
        return len(text[: len(text) - held].rstrip()) if self.form is not None else len(text) - held

    def _shown(self, choice: Choice) -> int:
        """How many tokens have a part in the text."""
        starts = list(accumulate(map(len, choice.pieces), initial=len(choice.lead)))
        within = sum(start < len(choice.text) for start in starts[: len(choice.pieces)])
        return within - (within == len(choice.token_ids) and choice.token_ids[-1] in self.ends)

    def _logprobs(self, choice: Choice, first: int, last: int) -> dict[str, Any]:
        content = []
        for place in range(first, last):
            piece = choice.pieces[place] or self.decode(choice.token_ids[place])
            whole = "\ufffd" not in piece
            logprob = max(_LOWEST_LOGPROB, choice.logprobs[place])
            content.append(
                {"token": piece, "logprob": logprob, "bytes": list(piece.encode()) if whole else None, "top_logprobs": []}
            )
        return {"content": content, "refusal": None}


def _tokens_within(characters: int, choice: Choice) -> int:
    """How many tokens end within so many characters of the text. A last one without text is left out: it may be an end token, of which
    nobody has been told yet that it ended the choice."""
    ends = enumerate(accumulate(map(len, pieces := list(choice.pieces)), initial=len(choice.lead)))
    return max((count for count, end in ends if count and pieces[count - 1] and end <= characters), default=0)
