"""Samples for clients that come and go: what waits is sampled together, by whatever engine, in one thread.

A batch is one request to the engine. Who comes meanwhile joins at a break, once the batch has sampled for as long as its start took, since
its prompts are computed again then. Who does not fit beside it takes turns with it. So nobody waits for the longest answer of others, and
breaks cost at most half of the time. An answer depends neither on breaks nor on company: its randomness has the name of its request, and
goes on behind what was drawn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from groupwise.engines.base import Engine, SampleRequest, SamplingSettings, text_of
from groupwise.importing import in_one_line
from groupwise.memory import is_shortage
from groupwise.types import Problem, Prompt

__all__ = ["Choice", "FullError", "Sampler", "pieces_of"]

logger = logging.getLogger("groupwise")

MOST_CHOICES = 512
"""Waiting and being sampled, of all clients."""
BATCH_TOKENS = 2**16
"""Most positions in one batch: sequences times the longest of them. Bounds the memory of keys and values; a single one is always taken."""
_LAST_TOKEN_S = 20.0
_MOST_FAILED = 3
"""So many prompts in a row that fail without a token say that no other will do: the GPU has an error that stays, perhaps. The same prompt
counts once, since the fault may be its own, and clients try again."""


class FullError(Exception):
    """There is no room for more."""


class _Break(Exception):
    """Ends a batch, so that others can join or nobody waits for nothing."""


class _Text:
    """Tokens as text, piece by piece: a character may need several tokens, and a token's text may depend on the one before."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = self._read = 0

    def add(self, token: int) -> str:
        """The text that has become certain."""
        self._ids.append(token)
        piece = self.rest()
        if piece.endswith("\ufffd"):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return piece

    def rest(self) -> str:
        """What the last tokens stand for, if no more came."""
        before = text_of(self._tokenizer, self._ids[self._from : self._read])
        return text_of(self._tokenizer, self._ids[self._from :])[len(before) :]


def pieces_of(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text that comes with each token."""
    text = _Text(tokenizer)
    pieces = [text.add(token) for token in token_ids]
    return [*pieces[:-1], pieces[-1] or text.rest()] if pieces else []


@dataclass(eq=False)
class Choice:
    """One completion that a client wants, as far as it has come. Written by the sampling thread alone, except for ``wanted``."""

    name: str
    """Names its randomness."""
    prompt_ids: tuple[int, ...]
    settings: SamplingSettings
    stop: tuple[str, ...]
    """Texts that end it, and do not belong to it."""
    follow: bool
    """Whether its text is needed as it comes."""
    on_news: Callable[[], object]
    """Called, in the sampling thread, when there is more of it."""
    lead: str = ""
    """What its text begins with, and its prompt ends with: given, not sampled."""
    wanted: bool = True
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    pieces: list[str] = field(default_factory=list)
    """What came with each token: behind ``lead`` together ``text``, and the beginning of a stop where that was several tokens."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``error``; None while it is sampled."""
    error: str | None = None

    def __post_init__(self) -> None:
        self.text = self.lead

    @property
    def room(self) -> int:
        return self.settings.max_tokens - len(self.token_ids)


class Sampler:
    """Samples choices from construction until ``close``."""

    def __init__(self, engine: Engine, tokenizer: Any, end_token_ids: Sequence[int], device: torch.device | None = None) -> None:
        """``device``: the engine's; None for the CPU."""
        self.engine, self.tokenizer, self.end_token_ids, self._device = engine, tokenizer, frozenset(end_token_ids), device
        self._open: list[Choice] = []
        """Not finished; whoever was sampled last stands behind those that wait."""
        self._changed = threading.Condition()
        self._closed = False
        self._texts: dict[Choice, _Text] = {}
        self._thread = threading.Thread(target=self._run, name="groupwise-sampling", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def put(self, choices: Sequence[Choice]) -> None:
        """Have them sampled. Raises FullError."""
        with self._changed:
            self._forget()
            if self._closed or len(self._open) + len(choices) > MOST_CHOICES:
                raise FullError
            self._open += choices
            self._changed.notify()

    def close(self) -> None:
        """Ends what is still sampled as an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_LAST_TOKEN_S)
        for choice in self._open:
            self._fail(choice, "the server ends")

    def _forget(self) -> None:
        """Those that nobody waits for any more."""
        self._open = [choice for choice in self._open if choice.wanted and choice.finish_reason is None]

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has a current device of its own
        failed: set[tuple[int, ...]] = set()
        while True:
            with self._changed:
                self._forget()
                self._changed.wait_for(lambda: self._open or self._closed)
                if self._closed:
                    return
                batch = self._together(self._open)
                self._open = [choice for choice in self._open if choice not in batch] + batch
            self._texts = {choice: text for choice, text in self._texts.items() if choice in self._open}
            before = _tokens(batch)
            try:
                self._sample(batch)
            except _Break:
                pass
            except Exception as error:  # of one batch; the next may be a smaller one
                logger.warning("sampling failed: %s", in_one_line(error))
                for choice in batch:
                    self._fail(choice, f"sampling failed ({in_one_line(error)}): ask for fewer or shorter answers")
                if not is_shortage(error):  # a smaller batch may fit
                    failed.add(batch[0].prompt_ids)
            if _tokens(batch) > before:
                failed.clear()
            if len(failed) >= _MOST_FAILED:
                logger.error("sampling failed for %d prompts in a row: the server ends", len(failed))
                self._give_up()
                return

    def _give_up(self) -> None:
        """No other choice is taken, and those that wait have failed."""
        with self._changed:
            self._closed = True
        for choice in self._open:
            self._fail(choice, "the server ends")

    def _together(self, waiting: Sequence[Choice]) -> list[Choice]:
        """The first of those that wait, and as many like it as fit."""
        batch: list[Choice] = []
        for choice in waiting:
            if not batch or (_kind(choice) == _kind(batch[0]) and _positions([*batch, choice]) <= BATCH_TOKENS):
                batch.append(choice)
        return batch

    def _sample(self, batch: Sequence[Choice]) -> None:
        """Until all of ``batch`` are finished. Raises _Break before that, where others should join."""
        before = [len(choice.token_ids) for choice in batch]
        began, first = time.perf_counter(), None

        def watch(index: int, sample: int, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
            choice = batch[index]
            known = len(choice.token_ids) - before[index]  # fewer are shown where memory ran out and the engine begins again
            self._take(choice, tokens[known:], logprobs[known:])
            return choice.wanted and choice.finish_reason is None

        def breathe(finished: int, tokens: int) -> None:
            nonlocal first
            now = time.perf_counter()
            first = first or now
            if self._closed or not any(choice.wanted and choice.finish_reason is None for choice in batch):
                raise _Break
            if self.engine.shows_tokens and now - first >= first - began and self._should_break(batch):
                raise _Break

        prompts = [Prompt(Problem(choice.name, "", ""), "", (*choice.prompt_ids, *choice.token_ids)) for choice in batch]
        limits = [choice.room for choice in batch]
        settings = replace(batch[0].settings, max_tokens=max(limits))
        groups = self.engine.serve(SampleRequest(prompts, 1, settings, 0, "serve", watch, before, limits), breathe)
        for choice, held, (completion,) in zip(batch, before, groups, strict=True):
            known = len(choice.token_ids) - held
            self._take(choice, completion.token_ids[known:], completion.logprobs[known:])

    def _should_break(self, batch: Sequence[Choice]) -> bool:
        """Whether another request than those of ``batch`` waits, to take turns with it, or a choice that could join what is left."""
        with self._changed:
            waiting = [choice for choice in self._open if choice not in batch]
        left = [choice for choice in batch if choice.wanted and choice.finish_reason is None]
        served = {choice.on_news for choice in left}  # choices of one request wait for each other anyway
        return any(one.on_news not in served or _positions([*left, one]) <= BATCH_TOKENS for one in waiting if one.wanted)

    def _take(self, choice: Choice, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append what was sampled, as far as the choice goes."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if choice.finish_reason is not None or not choice.wanted:
                return
            choice.token_ids.append(token)
            choice.logprobs.append(float(logprob))
            ended = "stop" if token in self.end_token_ids else "length" if not choice.room else None
            if choice.follow or ended:
                ended = self._read(choice, ended)
            choice.finish_reason = ended
            if choice.follow or ended:
                choice.on_news()

    def _read(self, choice: Choice, ended: str | None) -> str | None:
        """Turn tokens into text, up to a stop; why the choice has ended then, if it has."""
        decoder = self._texts.setdefault(choice, _Text(self.tokenizer))
        for place in range(len(choice.pieces), len(choice.token_ids)):
            piece = decoder.add(choice.token_ids[place])
            if ended and place == len(choice.token_ids) - 1:
                piece = piece or decoder.rest()
            text = choice.text + piece
            before = max(len(choice.lead), len(choice.text) - max(map(len, choice.stop), default=0))
            found = min((at for stop in choice.stop if (at := text.find(stop, before)) >= 0), default=None)
            if found is not None:
                choice.pieces.append(text[len(choice.text) : found])
                choice.text = text[:found]
                return "stop"
            choice.pieces.append(piece)
            choice.text = text
        return ended

    def _fail(self, choice: Choice, why: str) -> None:
        if choice.finish_reason is None:
            choice.error, choice.finish_reason = why, "error"
            choice.on_news()


def _kind(choice: Choice) -> SamplingSettings:
    """Choices of one kind can be sampled together."""
    return replace(choice.settings, max_tokens=1)


def _positions(choices: Sequence[Choice]) -> int:
    return len(choices) * max(len(choice.prompt_ids) + choice.settings.max_tokens for choice in choices)


def _tokens(choices: Sequence[Choice]) -> int:
    return sum(len(choice.token_ids) for choice in choices)
