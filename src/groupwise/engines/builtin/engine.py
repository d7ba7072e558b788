"""The built-in sampling engine: continuous batching over the very weights that are trained.

Completions that end leave the batch and waiting ones enter at once. A prompt is computed once for its group and its keys and values
are shared. The log-probability of each token comes with the token, at no extra pass.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from groupwise.engines.base import Engine, Progress, SampleRequest, SamplingSettings
from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.decode import DecodeStep, DecodeWeights, decode
from groupwise.engines.builtin.draw import Draw, seed_key
from groupwise.engines.wrappers import RowLimit
from groupwise.limits import PREFILL_TOKENS
from groupwise.memory import DEVICE_WIDE, blocks_of_their_own
from groupwise.metrics import Metric
from groupwise.models.decoder import Decoder, MergedDecoder
from groupwise.models.native.calls import LANES, fits
from groupwise.models.ops import rms_norm
from groupwise.models.packing import pack_prompts
from groupwise.threads import adapt_threads
from groupwise.types import Completion, Prompt

__all__ = ["BuiltinEngine", "Runner", "burst_length"]

logger = logging.getLogger("groupwise")


@dataclass
class _Pending:
    """A prompt and how far it has come: samples still to start, and rows in flight."""

    index: int
    prompt: Prompt
    to_start: deque[int]
    in_flight: int = 0
    slot: int = -1
    last_hidden: Tensor | None = None


@dataclass
class _Row:
    """One completion in flight."""

    owner: _Pending
    sample: int
    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    done: bool = False
    """It has ended, and is carried along until it leaves."""


class BuiltinEngine(Engine):
    """Samples with a lean ``Decoder``.

    Args:
        max_rows: completions decoded at once; the samples do not depend on it. Halved where the accelerator's memory runs out.
    """

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

    @torch.no_grad()
    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``."""
        prompts, samples_per_prompt, settings = request.prompts, request.samples_per_prompt, request.settings
        if not prompts:
            return []
        done: list[dict[int, Completion]] = [{} for _ in prompts]
        missing = len(prompts) * samples_per_prompt

        def attempt() -> None:
            nonlocal missing
            missing = len(prompts) * samples_per_prompt - sum(map(len, done))
            batch = _Batch(self, prompts, samples_per_prompt, settings, request.seed, request.scope, done) if missing else None
            while batch is not None and batch.advance():
                if on_progress:
                    on_progress(batch.finished, batch.sampled_tokens)

        self.limit.attempt(attempt, lambda: missing)
        return [tuple(completions[k] for k in sorted(completions)) for completions in done]

    @torch.no_grad()
    def stream(self, prompt: Prompt, settings: SamplingSettings, *, seed: int, on_text: Callable[[str], None]) -> Completion:
        """See ``Engine.stream``."""
        batch = _Batch(self, [prompt], 1, settings, seed, "stream", [{}])
        shown = ""
        while batch.advance():
            tokens = batch.rows[0].tokens if batch.rows else batch.done[0][0].token_ids
            text = self.decode_text(tokens)
            if text.startswith(shown) and not text.endswith("\ufffd"):  # a character may need several tokens
                on_text(text[len(shown) :])
                shown = text
        on_text(batch.done[0][0].text[len(shown) :])
        return batch.done[0][0]

    def decode_text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _native(decoder: Decoder) -> bool:
    """Whether decode steps of this model go through the native kernels."""
    layer, half_head = decoder.layers[0], decoder.head_width / 2
    return half_head % LANES == 0 and fits(decoder.embedding, decoder.embedding.shape[1], layer.down.shape[1])


class _Batch:
    """One call of ``sample``: the waiting line, the rows in flight, and what is done."""

    def __init__(
        self, engine: BuiltinEngine, prompts: Sequence[Prompt], samples: int, settings: SamplingSettings, seed: int, scope: str,
        done: list[dict[int, Completion]],
    ) -> None:  # fmt: skip
        """``done``: by prompt and sample, what is finished already; what will be is put there."""
        assert settings.repetition_penalty == 1.0, (
            "rows here do not know their own tokens: use the engine over the model's module"
        )
        self.engine, self.decoder, self.settings = engine, engine.decoder, settings
        self.seed, self.scope = seed, scope
        missing = [deque(sample for sample in range(samples) if sample not in found) for found in done]
        self.waiting = deque(_Pending(i, p, missing[i]) for i, p in enumerate(prompts) if missing[i])
        self.max_rows = min(engine.max_rows, sum(map(len, missing)))
        self.max_groups = min(len(self.waiting), self.max_rows)
        self.groups: list[_Pending] = []
        self.rows: list[_Row] = []
        self.done = done
        self.finished = sum(map(len, done))
        self.sampled_tokens = sum(len(c.token_ids) for found in done for c in found.values())
        longest = max(len(pending.prompt.token_ids) for pending in self.waiting)
        self.decoder.reserve_positions(longest + settings.max_tokens)
        self.draw = Draw(settings, self.decoder.vocabulary, self.decoder.device)
        # The cache and the rearranged weights live as long as this call: learning has their memory in between.
        self.cache = Cache(
            layers=len(self.decoder.layers), kv_heads=self.decoder.kv_heads, head_width=self.decoder.head_width,
            groups=self.max_groups, prompt_tokens=longest, rows=self.max_rows, completion_tokens=settings.max_tokens - 1,
            dtype=self.decoder.dtype, device=self.decoder.device, native=_native(self.decoder),
        )  # fmt: skip
        # Merging takes large blocks in passing, between the copies that stay: in the heap they would leave holes as large as all of them.
        with blocks_of_their_own() if isinstance(self.decoder, MergedDecoder) else nullcontext():
            self.weights = DecodeWeights(self.decoder, self.max_rows)
        self.runner = Runner(self.decoder, self.weights, self.cache, self.draw, engine.limit.tell)
        self.burst = burst_length(self.decoder.device)
        self.step: DecodeStep | None = None

    def advance(self) -> bool:
        """Admit what fits, then sample one token for every row. False when nothing is left."""
        before = self.finished
        adapt_threads()
        self._admit()
        if not self.rows:
            return self.finished > before  # all that was admitted ended with its first token; others may still be waiting
        running = [len(row.tokens) for row in self.rows if not row.done]
        count = min(self.burst, self.settings.max_tokens - min(running))
        if self.cache.reserve(min(max(running) - 1 + count, self.cache.limit), len(self.rows)):
            self.step = None
        if self.step is None:
            self.step = DecodeStep.plan(
                self.cache,
                group_of_row=[row.owner.slot for row in self.rows],
                prompt_lengths=[len(g.prompt.token_ids) for g in self.groups],
                own_lengths=[min(len(row.tokens) - 1, self.cache.fillable - 1) for row in self.rows],
                last_tokens=[row.tokens[-1] for row in self.rows],
                keys=[row.key for row in self.rows],
            )
        for tokens, logprobs in zip(*self.runner.run(self.step, count), strict=True):
            self._take(tokens, logprobs, self.rows)
        self._leave()
        return True

    def _admit(self) -> None:
        """Start waiting samples on free rows; compute the prompts of groups that start."""
        starting: list[_Row] = []
        while len(self.rows) + len(starting) < self.max_rows:
            group = next((g for g in self.groups if g.to_start), None)
            if group is None:
                if not self.waiting or len(self.groups) == self.max_groups:
                    break
                group = self.waiting.popleft()
                group.slot = len(self.groups)
                self.groups.append(group)
            sample = group.to_start.popleft()
            group.in_flight += 1
            prompt = group.prompt
            key = seed_key(self.seed, self.scope, prompt.problem.id, sample, prompt.occurrence)
            starting.append(_Row(group, sample, key))
        if not starting:
            return
        self._prefill([g for g in self.groups if g.last_hidden is None])
        hidden = torch.stack([row.owner.last_hidden for row in starting])  # type: ignore[misc]
        keys = torch.tensor([row.key for row in starting], device=hidden.device)
        tokens, logprobs = self.draw(self._logits(hidden), keys, torch.zeros_like(keys))
        self.rows.extend(starting)
        self.step = None
        self._take(tokens.tolist(), logprobs.tolist(), starting)
        self._leave()

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.weights.head(rms_norm(hidden, self.decoder.final_norm, *self.decoder.norm))

    def _prefill(self, groups: list[_Pending]) -> None:
        """Compute prompts, a budget of tokens at a time, and keep their keys, values and last outputs."""
        part: list[_Pending] = []
        for group in groups:
            tokens = sum(len(g.prompt.token_ids) for g in part)
            if part and tokens + len(group.prompt.token_ids) > PREFILL_TOKENS:
                self._prefill_part(part)
                part = []
            part.append(group)
        if part:
            self._prefill_part(part)

    def _prefill_part(self, groups: list[_Pending]) -> None:
        packed = pack_prompts([g.prompt.token_ids for g in groups]).to(self.decoder.device)
        lengths = [len(g.prompt.token_ids) for g in groups]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        slots = [g.slot for g in groups]
        hidden = self.decoder.hidden(packed, lambda layer, kv: self.cache.store_prompts(layer, kv, starts, lengths, slots))
        for group, last in zip(groups, hidden.index_select(0, packed.last_rows), strict=True):
            group.last_hidden = last

    def _take(self, tokens: list[int], logprobs: list[float], rows: list[_Row]) -> None:
        """Append sampled tokens to the ``rows`` that are not done, and note which ended with them."""
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if row.done:
                continue
            self.sampled_tokens += 1
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.done = token in self.engine.end_token_ids or len(row.tokens) == self.settings.max_tokens

    def _leave(self) -> None:
        """Let go of rows that are done: at once where a burst is one step, else when they are an eighth, since that plans again."""
        done = [row for row in self.rows if row.done]
        if not done or (self.burst > 1 and len(done) < len(self.rows) / 8):
            return
        for row in done:
            self._finish(row)
        self.step = None

    def _finish(self, row: _Row) -> None:
        stopped = row.tokens[-1] in self.engine.end_token_ids
        self.done[row.owner.index][row.sample] = Completion(
            text=self.engine.decode_text(row.tokens),
            token_ids=tuple(row.tokens),
            logprobs=tuple(row.logprobs),
            finish_reason="stop" if stopped else "length",
            sample=row.sample,
            policy_version=self.engine.policy_version,
            temperature=self.settings.temperature,
        )
        self.finished += 1
        place, last = self.rows.index(row), len(self.rows) - 1
        moved = self.rows.pop()
        if place != last:
            self.rows[place] = moved
            self.cache.move_row(last, place, max(0, len(moved.tokens) - 1))
        row.owner.in_flight -= 1
        if not row.owner.in_flight and not row.owner.to_start:
            self._release(row.owner)

    def _release(self, group: _Pending) -> None:
        moved = self.groups.pop()
        if moved is not group:
            self.cache.move_group(moved.slot, group.slot)
            moved.slot = group.slot
            self.groups[group.slot] = moved
        group.last_hidden = None


BURSTS = {"cpu": 1, "cuda": 16}
"""Steps between two looks at the tokens, by device. Longer ones carry ended rows further; shorter ones wait more often."""


def burst_length(device: torch.device) -> int:
    return BURSTS.get(device.type, 1)


class Runner:
    """Runs bursts over one cache: several decode steps in a row without asking the device what came out.

    On a GPU, a step of a small model is over sooner than Python can launch its kernels, and every look at the sampled tokens waits for all
    that was launched. So there a burst of steps runs between two looks, and all but the first are replays of one captured graph. Rows that
    end within a burst are carried to its end, and what they sampled after their end is dropped. Since randomness has names, completions do
    not depend on the length of a burst. On CPUs a burst is one step: nothing is launched ahead there, and ended rows leave at once.

    The graph of a ``DecodeStep`` is captured when it first is asked for more than one step. Where that fails (a graph takes memory of its
    own, and the driver may refuse), there are no more graphs: every step is launched, which is slower and gives the same tokens.
    """

    def __init__(
        self, decoder: Decoder, weights: DecodeWeights, cache: Cache, draw: Draw, tell: Callable[[str], object] = logger.warning
    ) -> None:
        """``tell``: hears of a graph that could not be captured."""
        self.decoder, self.weights, self.cache, self.draw, self.tell = decoder, weights, cache, draw, tell
        self._launches = False
        """Whether graphs are given up."""
        self._graph: Any = None
        self._captured: DecodeStep | None = None

    def run(self, step: DecodeStep, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """``count`` tokens for every row, and their log-probabilities, by step: one wait for the device in all."""
        tokens = torch.empty(count, len(step.last_tokens), dtype=torch.long, device=step.last_tokens.device)
        logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
        for index in range(count):
            if index and tokens.device.type == "cuda" and not self._launches:
                self._replay(step)
            else:
                self._once(step)
            tokens[index], logprobs[index] = step.last_tokens, step.last_logprobs
        return tokens.tolist(), logprobs.tolist()

    def _once(self, step: DecodeStep) -> None:
        logits = decode(self.decoder, self.weights, self.cache, step)
        step.advance(*self.draw(logits, step.keys, step.own_lengths + 1))

    def _replay(self, step: DecodeStep) -> None:
        """One step by the captured graph. Capturing needs kernels that have run before: the first step of a burst is not captured."""
        if self._captured is not step:
            self._graph = None  # its memory goes with it: torch 2.11 refuses a pool whose only graph was destroyed
            try:
                self._graph, self._captured = self._capture(step), step
            except RuntimeError as error:
                self._launches = True
                self.tell(
                    f"a CUDA graph could not be captured ({str(error).splitlines()[0]}): steps are launched one by one instead"
                )
                self._once(step)
                return
        self._graph.replay()

    def _capture(self, step: DecodeStep) -> Any:
        """Record one step; nothing is computed yet. Another thread that learns meanwhile may take memory; it may not capture as well."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # Where the end of a capture fails, torch leaves its stream the current one, and (until 2.12) its allocator capturing.
            here, capture = torch.cuda.current_stream(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
            with DEVICE_WIDE, torch.cuda.stream(here), capture:
                self._once(step)
        except RuntimeError:
            with suppress(RuntimeError):  # it has ended
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise
        return graph
