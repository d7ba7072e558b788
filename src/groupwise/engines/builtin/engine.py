"""The built-in sampling engine: continuous batching over the very weights that are trained.

Completions that end leave the batch and waiting ones enter at once. A prompt is computed once for its group and its keys and values
are shared. Where the prompts of a request begin alike (a system prompt, worked examples), that beginning is computed once for those that
start together, if that saves a tenth (``split_prompts``). Where it does although each row then computes the rest for itself, as with one
sample of each prompt, it is all that rows share. The log-probability of each token comes with the token, at no extra pass.

A row may have several turns (``engines/turns.py``). Its keys and values stay where they are while its answer is awaited. A row whose answer
is late leaves the batch and keeps them, at the far end of the same table: those that are away take a place of ``max_rows`` each, and no
further memory. Where others could take that place they give it up, and what they had is computed again when they come back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from groupwise.engines.base import Engine, Progress, SampleRequest, SamplingSettings, refuse_unknown, text_of
from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.chunked_prefill import MissingTokens, PrefillChunk
from groupwise.engines.builtin.decode import DecodeStep, DecodeWeights
from groupwise.engines.builtin.draw import Draw, key_further, seed_key
from groupwise.engines.builtin.runner import Runner, burst_length
from groupwise.engines.turns import Answer, Patience, Turns, turn_name
from groupwise.engines.wrappers import RowLimit
from groupwise.limits import PREFILL_TOKENS
from groupwise.memory import blocks_of_their_own
from groupwise.metrics import Metric
from groupwise.models.decoder import Decoder, MergedDecoder
from groupwise.models.native.calls import LANES, fits
from groupwise.models.ops import rms_norm
from groupwise.models.packing import common_tokens, pack_prompts
from groupwise.threads import adapt_threads
from groupwise.types import Completion, Prompt

__all__ = ["BuiltinEngine", "takes_native"]


@dataclass
class _Pending:
    """A prompt and how far it has come: samples still to start, and rows in flight. Prompts that are alike are one."""

    token_ids: Sequence[int]
    to_start: deque[tuple[int, int]] = field(default_factory=deque)
    """By the prompt's place in the request, and sample."""
    in_flight: int = 0
    slot: int = -1
    last_hidden: Tensor | None = None


@dataclass(eq=False)
class _Row:
    """One completion that has begun."""

    owner: _Pending
    index: int
    """Of its prompt in the request."""
    sample: int
    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Those of the present turn."""
    done: bool = False
    """Its turn has ended, and it is carried along until it leaves or goes on."""
    answer: Answer | None = None
    """To the turn that has ended."""
    turn: int = 0
    start: int = 0
    """Where the present turn begins in ``tokens``."""
    brought: int = 0
    """Of its tokens those that came with the request: of its prompt, or drawn before."""
    behind: int = 0
    """Tokens that the cache lacks, before the last one."""

    @property
    def cached(self) -> int:
        """Own positions in the cache."""
        return max(0, len(self.tokens) - 1 - self.behind)

    def forget(self) -> None:
        """Its keys and values are given up."""
        self.behind = max(0, len(self.tokens) - 1)


_ENDED: Answer = Future()
_ENDED.set_result(None)


@dataclass
class _Call:
    """What has come of a request: what goes on where memory ran out, and a new batch begins."""

    request: SampleRequest
    turns: Turns
    look: Callable[[int, int], None]
    """Told of rows that have ended, and of tokens, also while nothing can be computed."""
    ended: set[tuple[int, int]] = field(default_factory=set)
    """Rows by prompt and sample."""
    begun: dict[tuple[int, int], _Row] = field(default_factory=dict)
    """Rows of which a turn has ended: it is not sampled again."""
    tokens: int = 0
    """Sampled in turns that have ended."""
    shared: int | None = field(init=False)
    """Tokens that all prompts begin with, where every row has the rest of its prompt for itself."""
    common: int = field(init=False)
    """Tokens that all prompts begin with, where these are computed once for several prompts: of the whole request, so that where a prompt
    is cut does not depend on which others start beside it."""

    def __post_init__(self) -> None:
        drawn = self.request.drawn or [0] * len(self.request.prompts)
        ids = [prompt.token_ids[: len(prompt.token_ids) - n] for prompt, n in zip(self.request.prompts, drawn, strict=True)]
        # In 8 bits rows would compute their rests by rounded weights, and whether they did would depend on the other prompts.
        in_8_bits = self.request.settings.in_8_bits
        self.shared = None if in_8_bits else split_prompts(ids, self.request.samples_per_prompt)
        beginning = None if self.shared is not None else split_prompts([*set(ids)], 1)
        self.common = min(beginning, min(map(len, ids)) - 1) if beginning else 0  # each prompt has a last token of its own

    @property
    def missing(self) -> int:
        """Rows that have not ended."""
        return len(self.request.prompts) * self.request.samples_per_prompt - len(self.ended)

    def key(self, prompt: Prompt, sample: int, turn: int) -> int:
        """The seed key of a turn."""
        name, index = turn_name(prompt.problem.id, sample, turn)
        return seed_key(self.request.seed, self.request.scope, name, index, prompt.occurrence)

    def take_answer(self, row: _Row) -> bool:
        """Take in the answer to a row; whether it goes on."""
        assert row.answer is not None
        given, row.answer = row.answer.result(), None
        if given is None:
            place = (row.index, row.sample)
            del self.begun[place]
            self.ended.add(place)
            return False
        assert 0 < len(given) < self.room(row), "what a row is given leaves room for a token"
        row.tokens += given
        row.behind += len(given)
        row.turn, row.start, row.logprobs, row.done = row.turn + 1, len(row.tokens), [], False
        row.key = self.key(self.request.prompts[row.index], row.sample, row.turn)
        return True

    def room(self, row: _Row) -> int:
        """Tokens that it may still have."""
        return self.request.limit_of(row.index) - len(row.tokens) + row.brought

    def drawn(self, index: int) -> int:
        """The tokens at a prompt's end that belong to its completion."""
        return self.request.drawn[index] if self.request.drawn else 0

    def cut(self, index: int) -> int:
        """Where a prompt ends that is shared: behind it are the row's own tokens."""
        whole = len(self.request.prompts[index].token_ids) - self.drawn(index)
        return whole if self.shared is None else self.shared

    @property
    def longest_own(self) -> int:
        """The most tokens that a row has of its own before it samples."""
        return max(len(prompt.token_ids) - self.cut(index) for index, prompt in enumerate(self.request.prompts))

    def owners(self) -> list[_Pending]:
        """Of each prompt; equal ones are computed once."""
        pending: dict[tuple[int, ...], _Pending] = {}
        owners = []
        for index, prompt in enumerate(self.request.prompts):
            ids = prompt.token_ids[: self.cut(index)]
            owner = pending.setdefault(tuple(ids), _Pending(ids))
            places = [(index, sample) for sample in range(self.request.samples_per_prompt)]
            owner.to_start += [place for place in places if place not in self.ended and place not in self.begun]
            owners.append(owner)
        return owners

    def rewind(self, owners: Sequence[_Pending]) -> list[_Row]:
        """The rows that have begun, at the end of a turn, or with what they were given before the next."""
        for (index, _), row in self.begun.items():
            row.owner = owners[index]
            if row.answer is None:
                del row.tokens[row.start :]
                row.logprobs, row.done = [], False
            row.forget()
        return list(self.begun.values())


WORTH_SPLITTING = 0.9
"""Share of the prompts' tokens that may be left to compute where their common beginning is computed once: below it that is done."""


def split_prompts(prompts: Sequence[tuple[int, ...]], samples: int) -> int | None:
    """How many tokens all ``prompts`` begin with, if that beginning should be what is shared; None if each prompt should be.

    Each of a prompt's ``samples`` rows then computes the rest of it for itself, so it pays where rests are short or samples few.

    >>> split_prompts([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 7)], 1)
    4
    >>> split_prompts([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 7)], 8) is None
    True
    """
    if not prompts:
        return None
    common = common_tokens(prompts)
    apart = sum(map(len, set(prompts)))
    split = common + samples * sum(len(prompt) - common for prompt in prompts)
    return common if common > 0 and split < WORTH_SPLITTING * apart else None


class BuiltinEngine(Engine):
    """Samples with a lean ``Decoder``.

    Args:
        max_rows: completions decoded at once; the samples do not depend on it. Halved where the accelerator's memory runs out.
    """

    shows_tokens = True

    def __init__(self, decoder: Decoder, tokenizer: Any, end_token_ids: Sequence[int], *, max_rows: int = 256) -> None:
        self.decoder, self.tokenizer = decoder, tokenizer
        self.limit: RowLimit = RowLimit(max_rows)
        self.end_token_ids = frozenset(end_token_ids)
        self.policy_version = 0

    @property
    def max_rows(self) -> int:
        return self.limit.rows

    def refresh(self, policy_version: int) -> None:
        """The weights are the trained ones, so only the version is noted."""
        self.policy_version = policy_version

    def metrics(self) -> dict[str, Metric]:
        """See ``Engine.metrics``."""
        return self.limit.metrics()

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``."""
        done: list[dict[int, Completion]] = [{} for _ in request.prompts]

        def take(index: int, completion: Completion) -> Answer:
            done[index][completion.sample] = completion
            return _ENDED

        self.serve_turns(request, Turns(take), on_progress)
        return [tuple(completions[k] for k in sorted(completions)) for completions in done]

    @torch.no_grad()
    def serve_turns(self, request: SampleRequest, turns: Turns, on_progress: Progress | None = None) -> None:
        """See ``TurnEngine.serve_turns``."""
        refuse_unknown(request.prompts, self.decoder.vocabulary)
        call = _Call(request, turns, on_progress or (lambda ended, tokens: None))

        def attempt() -> None:
            batch = _Batch(self, call) if call.missing else None
            while batch is not None and batch.advance():
                call.look(len(call.ended), batch.sampled_tokens)

        self.limit.attempt(attempt, lambda: call.missing)

    @torch.no_grad()
    def stream(self, prompt: Prompt, settings: SamplingSettings, *, seed: int, on_text: Callable[[str], None]) -> Completion:
        """See ``Engine.stream``."""
        done: list[Completion] = []

        def take(_: int, completion: Completion) -> Answer:
            done.append(completion)
            return _ENDED

        refuse_unknown([prompt], self.decoder.vocabulary)
        request = SampleRequest([prompt], 1, settings, seed, "stream")
        batch = _Batch(self, _Call(request, Turns(take), lambda ended, tokens: None))
        shown = ""
        while batch.advance():
            tokens = batch.rows[0].tokens if batch.rows else done[0].token_ids
            text = self.decode_text(tokens)
            if text.startswith(shown) and not text.endswith("\ufffd"):  # a character may need several tokens
                on_text(text[len(shown) :])
                shown = text
        on_text(done[0].text[len(shown) :])
        return done[0]

    def decode_text(self, tokens: Sequence[int]) -> str:
        return text_of(self.tokenizer, tokens)


def takes_native(decoder: Decoder) -> bool:
    """Whether decode steps of this model go through the native kernels."""
    widths = decoder.embedding.shape[1], decoder.module.config.intermediate_size
    return decoder.shape.head_width / 2 % LANES == 0 and fits(decoder.embedding, *widths)


class _Batch:
    """One call of ``sample``: the waiting line, the rows in flight, and those that are away."""

    def __init__(self, engine: BuiltinEngine, call: _Call) -> None:
        settings = call.request.settings
        assert settings.repetition_penalty == 1.0, (
            "rows here do not know their own tokens: use the engine over the model's module"
        )
        self.engine, self.decoder, self.settings, self.call = engine, engine.decoder, settings, call
        owners = call.owners()
        self.away = call.rewind(owners)
        """Rows out of the batch that keep nothing: they are answered, or will be."""
        self.kept: list[_Row] = []
        """Rows out of the batch whose keys and values are at the end of the table, the first at its very end."""
        self.waiting = deque(owner for owner in {id(owner): owner for owner in owners}.values() if owner.to_start)
        wanted = {id(owner): owner for owner in (*self.waiting, *(row.owner for row in self.away))}.values()
        self.max_rows = min(engine.max_rows, call.missing)
        self.max_groups = min(len(wanted), self.max_rows)
        self.groups: list[_Pending] = []
        self.rows: list[_Row] = []
        self.sampled_tokens = call.tokens
        # That kind copies a beginning for each of its sequences: more memory than is planned for.
        self.common = 0 if self.decoder.attention == "sdpa" else call.common
        alive = weakref.ref(self)  # a circle would keep the cache until Python looks for circles, through all of learning

        def look() -> None:
            batch = alive()
            call.look(len(call.ended), batch.sampled_tokens if batch else call.tokens)

        self.patience = Patience(call.turns.grace_s, look)
        longest, own = max(len(owner.token_ids) for owner in wanted), settings.max_tokens + call.longest_own
        self.decoder.reserve_positions(longest + own)
        self.draw = Draw(settings, self.decoder.vocabulary, self.decoder.device)
        # The cache and the rearranged weights live as long as this call: learning has their memory in between.
        self.cache = Cache(
            layers=len(self.decoder.layers), kv_heads=self.decoder.shape.kv_heads, head_width=self.decoder.shape.head_width,
            groups=self.max_groups, prompt_tokens=longest, rows=self.max_rows, completion_tokens=own - 1,
            dtype=self.decoder.dtype, device=self.decoder.device, native=takes_native(self.decoder),
        )  # fmt: skip
        # Merging takes large blocks in passing, between the copies that stay: in the heap they would leave gaps as large as all of them.
        with blocks_of_their_own() if isinstance(self.decoder, MergedDecoder) else nullcontext():
            self.weights = DecodeWeights(self.decoder, self.max_rows, settings.in_8_bits)
        limit = engine.limit  # which outlives the call
        self.runner = Runner(self.decoder, self.weights, self.cache, self.draw, limit.give_up_graphs, limit.launches)
        self.burst = burst_length(self.decoder.device)
        self.step: DecodeStep | None = None
        self.changed = self.padded = False
        """Whether rows came or went since the step was planned, and whether steps are padded, so that graphs outlive such changes."""

    def advance(self) -> bool:
        """Admit what fits, then sample one token for every row. False when nothing is left."""
        before = len(self.call.ended)
        adapt_threads()
        self._settle()
        self._admit()
        if not self.rows:
            absent = [row.answer for row in (*self.kept, *self.away) if row.answer is not None]
            self.patience.first(absent)
            # All that was admitted may have ended with its first token, while others are still waiting.
            return bool(absent) or len(self.call.ended) > before
        count = min(self.burst, max(self.call.room(row) for row in self.rows if not row.done))
        step = self._planned(count)
        for tokens, logprobs in zip(*self.runner.run(step, count, self._chunks()), strict=True):
            self._take(tokens[: len(self.rows)], logprobs[: len(self.rows)], self.rows)
        self._settle()
        return True

    def _planned(self, count: int) -> DecodeStep:
        """Where every row stands, with room in the cache for ``count`` tokens more."""
        running = [len(row.tokens) for row in self.rows if not row.done]
        keeping = self.max_rows if self.kept else len(self.rows)
        # One more than the burst fills: a row whose turn ends with its last token may stay in the batch, and writes there.
        if self.cache.reserve(min(max(running) + count, self.cache.limit), keeping):
            self.step = None
        if self.step is None or self.changed:
            self.padded = self.padded or (self.burst > 1 and self.changed and self.step is not None)
            planned = DecodeStep.plan(
                self.cache,
                group_of_row=[row.owner.slot for row in self.rows],
                prompt_lengths=[len(g.token_ids) for g in self.groups],
                own_lengths=[min(len(row.tokens) - 1, self.cache.fillable - 1) for row in self.rows],
                last_tokens=[row.tokens[-1] for row in self.rows],
                keys=[row.key for row in self.rows],
                turn_starts=[row.start for row in self.rows],
                spare_up_to=self.max_rows - len(self.kept) if self.padded else 0,
                like=self.step,
            )
            if self.step is None or not self.step.take(planned):
                self.step = planned
            self.changed = False
        return self.step

    def _chunks(self) -> list[PrefillChunk]:
        """What rows were given since they last sampled, or lost while they were away; it is in the cache after the step."""
        behind = []
        for place, row in enumerate(self.rows):
            if row.behind:
                lost = row.tokens[row.cached : len(row.tokens) - 1]
                behind.append(MissingTokens(place, row.owner.slot, len(row.owner.token_ids), row.cached, lost))
                row.behind = 0
        return PrefillChunk.plan(behind, self.decoder.windows, self.decoder.device)

    def _admit(self) -> None:
        """Start waiting samples on free rows, after those that come back; compute the prompts of groups that start."""
        for row in [row for row in self.away if row.answer is None or row.answer.done()]:
            if row.answer is not None and not self.call.take_answer(row):
                self.away.remove(row)
            elif self._make_room(row.owner):
                self.away.remove(row)
                self._enter(row)
        starting: list[_Row] = []
        while (group := self._next()) is not None and self._make_room(group):
            index, sample = group.to_start.popleft()
            prompt = self.call.request.prompts[index]
            own, key = [*prompt.token_ids[self.call.cut(index) :]], self.call.key(prompt, sample, 0)
            row = _Row(
                group, index, sample, key_further(key, self.call.drawn(index)), own, start=len(own), brought=len(own),
                behind=max(0, len(own) - 1),
            )  # fmt: skip
            self._enter(row)
            if not own:
                starting.append(row)
        self._prefill([g for g in self.groups if g.last_hidden is None])
        if not starting:
            return
        hidden = torch.stack([row.owner.last_hidden for row in starting])  # type: ignore[misc]
        keys = torch.tensor([row.key for row in starting], device=hidden.device)
        tokens, logprobs = self.draw(self._logits(hidden), keys, torch.zeros_like(keys))
        self._take(tokens.tolist(), logprobs.tolist(), starting)
        self._settle()

    def _next(self) -> _Pending | None:
        """The group of the next sample to start."""
        while self.waiting and not self.waiting[0].to_start:
            self.waiting.popleft()
        return next((g for g in self.groups if g.to_start), self.waiting[0] if self.waiting else None)

    def _make_room(self, group: _Pending) -> bool:
        """Make room for one more row of ``group``, if there is any. Rows that are away give up theirs, the last to leave first."""
        while not (free := self._has_room(group)) and self.kept:
            row = self.kept.pop()
            row.forget()
            self.away.append(row)
            self._let_go(row.owner)
        if free:
            if group.slot < 0:
                group.slot = len(self.groups)
                self.groups.append(group)
            group.in_flight += 1
        return free

    def _has_room(self, group: _Pending) -> bool:
        return len(self.rows) + len(self.kept) < self.max_rows and (group.slot >= 0 or len(self.groups) < self.max_groups)

    def _enter(self, row: _Row) -> None:
        self.rows.append(row)
        self.changed = True

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.weights.head(rms_norm(hidden, self.decoder.final_norm, *self.decoder.shape.norm))

    def _prefill(self, groups: list[_Pending]) -> None:
        """Compute prompts, a budget of tokens at a time, and keep their keys, values and last outputs."""
        part: list[_Pending] = []
        for group in groups:
            tokens = self.common + sum(len(g.token_ids) - self.common for g in (*part, group))
            if part and tokens > PREFILL_TOKENS:
                self._prefill_part(part)
                part = []
            part.append(group)
        if part:
            self._prefill_part(part)

    def _prefill_part(self, groups: list[_Pending]) -> None:
        lengths, slots = [len(g.token_ids) for g in groups], [g.slot for g in groups]
        packed = pack_prompts([g.token_ids for g in groups], self.common).to(self.decoder.device)
        hidden = self.decoder.hidden(packed, lambda layer, kv: self.cache.store_prompts(layer, kv, lengths, slots, self.common))
        for group, last in zip(groups, hidden.index_select(0, packed.last_rows), strict=True):
            group.last_hidden = last

    def _take(self, tokens: list[int], logprobs: list[float], rows: list[_Row]) -> None:
        """Append sampled tokens to the ``rows`` that are not done, and ask for the answers to those whose turn ended with them."""
        watch = self.call.request.watch
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if row.done:
                continue
            self.sampled_tokens += 1
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.done = token in self.engine.end_token_ids or self.call.room(row) <= 0
            if watch is not None and not watch(row.index, row.sample, row.tokens[row.start :], row.logprobs):
                row.done = True
            if row.done:
                self._ask(row)

    def _ask(self, row: _Row) -> None:
        tokens = row.tokens[row.start :]
        turn = Completion(
            text=self.engine.decode_text(tokens),
            token_ids=tuple(tokens),
            logprobs=tuple(row.logprobs),
            finish_reason="stop" if tokens[-1] in self.engine.end_token_ids else "length",
            sample=row.sample,
            policy_version=self.engine.policy_version,
            temperature=self.settings.temperature,
        )
        self.call.tokens += len(tokens)
        self.call.begun[row.index, row.sample] = row
        row.answer = self.call.turns.answer(row.index, turn)

    def _settle(self) -> None:
        """Let rows whose turn has ended go on, leave or end, and those that are away and answered come back: at once where a burst is one
        step, else when they are an eighth, since that plans again."""
        done = [row for row in self.rows if row.done]
        back = [row for row in self.kept if row.answer is not None and row.answer.done()]
        if not (done or back) or (self.burst > 1 and len(done) + len(back) < len(self.rows) / 8):
            return
        self.patience.grace([row.answer for row in done if row.answer is not None])
        for row in done:
            assert row.answer is not None
            if not row.answer.done():
                self._leave(row, keep=True)
            elif not self.call.take_answer(row):
                self._leave(row)
                self._let_go(row.owner)
        for row in back:
            place = self._fetch(row)
            if not self.call.take_answer(row):
                self._let_go(row.owner)
                continue
            if place != len(self.rows):
                self.cache.move_row(place, len(self.rows), row.cached)
            self._enter(row)
        self.changed = True

    def _leave(self, row: _Row, keep: bool = False) -> None:
        """Take a row out of the batch. The last one takes its place. ``keep`` its keys and values among those of rows that are away."""
        place, last = self.rows.index(row), len(self.rows) - 1
        moved = self.rows.pop()
        if moved is not row:
            self.rows[place] = moved
            if keep:
                self.cache.swap_rows(place, last, max(row.cached, moved.cached))
            else:
                self.cache.move_row(last, place, moved.cached)
        if keep:
            self.kept.append(row)
            if (end := self.max_rows - len(self.kept)) != last:
                self.cache.move_row(last, end, row.cached)

    def _fetch(self, row: _Row) -> int:
        """Take a row out of those that are away. Returns its place in the table, which is free from now on."""
        index, moved = self.kept.index(row), self.kept.pop()
        place, end = self.max_rows - 1 - index, self.max_rows - 1 - len(self.kept)
        if moved is not row:
            self.kept[index] = moved
            self.cache.swap_rows(place, end, max(row.cached, moved.cached))
        return end

    def _let_go(self, group: _Pending) -> None:
        """One row of ``group`` less."""
        group.in_flight -= 1
        if not group.in_flight and not group.to_start:
            self._release(group)

    def _release(self, group: _Pending) -> None:
        moved = self.groups.pop()
        if moved is not group:
            self.cache.move_group(moved.slot, group.slot)
            moved.slot = group.slot
            self.groups[group.slot] = moved
        group.slot, group.last_hidden, self.changed = -1, None, True
