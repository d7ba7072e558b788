"""Sampling through a model's own module and the library's KV cache: for any causal LM of transformers.

Prompts are padded on the left and decoded together; sequences that end leave the batch once half of it has ended. Seeds, stopping
and log-probabilities are as in the built-in engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.engines.base import Engine, Progress, SampleRequest, SamplingSettings, refuse_unknown, text_of
from groupwise.engines.builtin.draw import Draw, key_further, seed_key
from groupwise.engines.wrappers import RowLimit
from groupwise.errors import ModelError
from groupwise.memory import blocks_of_their_own
from groupwise.metrics import Metric
from groupwise.models.devices import has_device_map, input_device
from groupwise.models.load import embedding_rows
from groupwise.types import Completion, Prompt

__all__ = ["TransformersEngine"]


class TransformersEngine(Engine):
    """Samples by ``model(...)`` with ``past_key_values``.

    Args:
        max_rows: completions decoded at once; the samples do not depend on it. Halved where the accelerator's memory runs out.
    """

    shows_tokens = True

    def __init__(self, model: Any, tokenizer: Any, end_token_ids: Sequence[int], *, max_rows: int = 64) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.limit: RowLimit = RowLimit(max_rows)
        self.end_token_ids = frozenset(end_token_ids)
        self.policy_version = 0

    @property
    def max_rows(self) -> int:
        return self.limit.rows

    def metrics(self) -> dict[str, Metric]:
        """See ``Engine.metrics``."""
        return self.limit.metrics()

    def refresh(self, policy_version: int) -> None:
        """The module's weights are the trained ones, so only the version is noted."""
        self.policy_version = policy_version

    @torch.no_grad()
    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``."""
        prompts, samples_per_prompt, settings = request.prompts, request.samples_per_prompt, request.settings
        jobs = [(i, sample) for i in range(len(prompts)) for sample in range(samples_per_prompt)]
        jobs.sort(key=lambda job: -len(prompts[job[0]].token_ids))  # alike lengths together: less padding
        done: list[dict[int, Completion]] = [{} for _ in prompts]
        start = tokens = 0

        def decode_next() -> list[_Sequence]:
            sequences = []
            for i, sample in jobs[start : start + self.max_rows]:
                prompt, drawn = prompts[i], request.drawn[i] if request.drawn else 0
                key = seed_key(request.seed, request.scope, prompt.problem.id, sample, prompt.occurrence)
                watch = None if request.watch is None else partial(request.watch, i, sample)
                sequences.append(_Sequence(prompt, sample, key_further(key, drawn), request.limit_of(i), watch))
            with blocks_of_their_own():
                for _ in self._decode(sequences, settings):
                    if on_progress:
                        on_progress(start + sum(s.ended for s in sequences), tokens + sum(len(s.tokens) for s in sequences))
            return sequences

        def missing() -> int:
            return len(jobs) - start

        while missing():
            sequences = self.limit.attempt(decode_next, missing)
            for (index, sample), sequence in zip(jobs[start:], sequences, strict=False):
                done[index][sample] = self._completion(sequence, settings)
            start += len(sequences)
            tokens += sum(len(s.tokens) for s in sequences)
        return [tuple(group[k] for k in sorted(group)) for group in done]

    @torch.no_grad()
    def stream(self, prompt: Prompt, settings: SamplingSettings, *, seed: int, on_text: Callable[[str], None]) -> Completion:
        """See ``Engine.stream``."""
        sequence = _Sequence(prompt, 0, seed_key(seed, "stream", prompt.problem.id, 0, prompt.occurrence), settings.max_tokens)
        shown = ""
        for _ in self._decode([sequence], settings):
            text = text_of(self.tokenizer, sequence.tokens)
            if text.startswith(shown) and not text.endswith("\ufffd"):
                on_text(text[len(shown) :])
                shown = text
        completion = self._completion(sequence, settings)
        on_text(completion.text[len(shown) :])
        return completion

    def _completion(self, sequence: _Sequence, settings: SamplingSettings) -> Completion:
        return Completion(
            text=text_of(self.tokenizer, sequence.tokens),
            token_ids=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs),
            finish_reason="stop" if sequence.tokens[-1] in self.end_token_ids else "length",
            sample=sequence.sample,
            policy_version=self.policy_version,
            temperature=settings.temperature,
        )

    def _decode(self, sequences: list[_Sequence], settings: SamplingSettings) -> Iterator[None]:
        """Sample until every sequence has ended, yielding after each token."""
        device = input_device(self.model)
        refuse_unknown([s.prompt for s in sequences], embedding_rows(self.model))
        training = self.model.training
        self.model.eval()  # gradient checkpointing, which takes the cache away, acts in training mode alone
        try:
            # Logits of a whole prompt times the vocabulary would be by far the largest tensor, and only the last row is used.
            last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
            alive = list(sequences)
            inputs, mask = _left_padded([s.prompt.token_ids for s in alive], device)
            keys = torch.tensor([s.key for s in alive], device=device)
            draw: Draw | None = None
            seen: Tensor | None = None
            cache: Any = None
            position = 0
            while alive:
                out = self.model(
                    input_ids=inputs,
                    attention_mask=mask,
                    position_ids=(mask.cumsum(1) - 1).clamp_(min=0)[:, -inputs.shape[1] :],
                    past_key_values=cache,
                    use_cache=True,
                    **last_only,
                )
                logits, cache = out.logits[:, -1], getattr(out, "past_key_values", None)
                if cache is None:
                    raise ModelError(
                        f"a {type(self.model).__name__} gives no KV cache to go on from, as state-space models do not, so that it cannot "
                        "be sampled by its own module: use rollout.engine=vllm, or another model"
                    )
                draw = draw or Draw(settings, logits.shape[1], device)
                if settings.repetition_penalty != 1.0:
                    seen = _note(seen, inputs, mask, logits)
                    logits = torch.where(seen, _penalised(logits.float(), settings.repetition_penalty), logits.float())
                tokens, logprobs = draw(logits, keys, torch.full_like(keys, position))
                position += 1
                for sequence, token, logprob in zip(alive, tokens.tolist(), logprobs.tolist(), strict=True):
                    sequence.take(token, logprob, token in self.end_token_ids or position == sequence.limit)
                yield
                keep = [i for i, s in enumerate(alive) if not s.ended]
                inputs, mask = tokens[:, None], torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
                if not keep:
                    break
                if len(keep) <= len(alive) // 2 and _loses_rows(cache):
                    index = torch.tensor(keep, device=device)
                    cache.batch_select_indices(index.cpu() if has_device_map(self.model) else index)
                    alive, inputs, mask, keys = [alive[i] for i in keep], inputs[index], mask[index], keys[index]
                    seen = None if seen is None else seen[index]
        finally:
            self.model.train(training)


def _note(seen: Tensor | None, inputs: Tensor, mask: Tensor, logits: Tensor) -> Tensor:
    """``[B, V]``: which tokens have occurred in each row, with those that are fed in now."""
    seen = torch.zeros_like(logits, dtype=torch.bool) if seen is None else seen
    rows, places = mask[:, -inputs.shape[1] :].nonzero(as_tuple=True)
    seen[rows, inputs[rows, places]] = True
    return seen


def _penalised(logits: Tensor, penalty: float) -> Tensor:
    return torch.where(logits < 0, logits * penalty, logits / penalty)


class _Sequence:
    """One completion on its way."""

    def __init__(
        self,
        prompt: Prompt,
        sample: int,
        key: int,
        limit: int,
        watch: Callable[[Sequence[int], Sequence[float]], bool] | None = None,
    ) -> None:
        """``limit``: most tokens. ``watch``: called with tokens and log-probabilities so far after each token; False ends the sequence."""
        self.prompt, self.sample, self.key, self.limit, self.watch = prompt, sample, key, limit, watch
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.ended = False

    def take(self, token: int, logprob: float, ends: bool) -> None:
        """Append a token, unless the sequence has ended and only waits in the batch."""
        if not self.ended:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.ended = ends
            if self.watch is not None and not self.watch(self.tokens, self.logprobs):
                self.ended = True


def _loses_rows(cache: Any) -> bool:
    """Whether finished sequences can be taken out of the cache: not out of layers with a recurrent state."""
    parts = (cache, *getattr(cache, "layers", ()))
    # Layers that keep more than keys and values (Falcon-H1, DeepSeek-V4) select rows of those alone.
    more = ("recurrent_states", "compressed_kv")
    return all(hasattr(part, "batch_select_indices") and not any(hasattr(part, name) for name in more) for part in parts)


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
