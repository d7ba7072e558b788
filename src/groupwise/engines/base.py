"""What every sampling engine offers, and how it is asked. No torch here, so that evaluation and tests can name it cheaply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError, ModelError, TrainingError
from groupwise.metrics import Metric
from groupwise.types import Completion, Prompt

if TYPE_CHECKING:
    from groupwise.engines.wrappers import RowLimit

__all__ = ["COLDEST", "Engine", "Progress", "SampleRequest", "SamplingSettings", "Watch", "refuse_unknown", "text_of"]


COLDEST = 1e-6
"""The lowest temperature: logits divided by less leave fp32. Who is asked for a lower one in a chat takes the likeliest token."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The distribution that completions are drawn from. Nothing is ever inherited from a checkpoint's ``generation_config``."""

    max_tokens: int
    """Longest completion, stop token included."""
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    """Rule out tokens less likely than this share of the likeliest one, after the temperature (arXiv 2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that have occurred, in the prompt too, and multiplies the negative ones (arXiv 1909.05858).
    Only the engine over transformers modules knows it."""
    greedy: bool = False
    """Take the likeliest token; temperature, top_k, top_p and min_p then have no effect on the choice."""
    in_8_bits: bool = False
    """Decode with weights rounded to 8 bits, which is another policy by a little; prompts are computed by the weights as they are. For the
    built-in engine, where ``why_not_in_8_bits`` (``engines/builtin/decode.py``) has no objection."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a distribution that is none, or a length below 1."""
        rules = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", COLDEST <= self.temperature < inf, f"at least {COLDEST:g}; greedy=True takes the likeliest token"),
            ("top_k", self.top_k is None or self.top_k >= 1, "None, or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "above 0"),
        )
        for name, kept, rule in rules:
            if not kept:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but it must be {rule}")


Progress = Callable[[int, int], None]
"""``progress(finished_completions, sampled_tokens)``."""
Watch = Callable[[int, int, Sequence[int], Sequence[float]], bool]
"""``watch(prompt, sample, token_ids, logprobs)``: a completion so far, by the prompt's place in the request; False ends it there. Where
memory ran out it may begin again, with the same tokens."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What is to be sampled.

    The randomness of a completion is a function of (``seed``, ``scope``, problem id, ``Prompt.occurrence``, sample index, token position)
    alone: batch composition, order and the number of processes do not matter.
    """

    prompts: Sequence[Prompt]
    samples_per_prompt: int
    settings: SamplingSettings
    seed: int
    scope: str
    """Names the occasion, for example ``"rollout/step=12"``."""
    watch: Watch | None = None
    """Sees each completion after each of its tokens, in engines that show them (``Engine.shows_tokens``)."""
    drawn: Sequence[int] = ()
    """For each prompt how many tokens at its end were drawn for the same completion before: its randomness goes on behind them.
    Prompts that are alike but for these tokens are computed once, by engines that share prompts. Empty for none; known to engines that show
    tokens."""
    limits: Sequence[int] = ()
    """For each prompt the longest completion in tokens, where not all may have ``settings.max_tokens``. An engine that does not know them
    gives longer ones, which are cut."""

    def limit_of(self, index: int) -> int:
        """The longest completion of a prompt, by its place."""
        return self.limits[index] if self.limits else self.settings.max_tokens


def text_of(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of a completion's tokens: without special ones, and with spaces as they were sampled."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def refuse_unknown(prompts: Sequence[Prompt], rows: int) -> None:
    """Raise ModelError where a prompt has a token that an embedding of so many ``rows`` lacks: on a GPU that would be the process's end.
    So also where it has none, and its completion would follow another prompt."""
    for prompt in prompts:
        if not prompt.token_ids:
            raise ModelError(
                f"the prompt of problem {prompt.problem.id!r} has no tokens, but a completion must follow some: give the row a text, or "
                "the run a system prompt (prompt.system)"
            )
        if (largest := max(prompt.token_ids)) >= rows:
            raise ModelError(
                f"the prompt of problem {prompt.problem.id!r} has the token {largest}, but the model has rows for {rows} alone: it is a "
                "mark of models of another kind, such as the placeholder of an image; take it out of the text"
            )


class Engine(ABC):
    """Samples completions with the policy's present weights. Derive from it, and define ``serve`` and ``refresh``."""

    holds_weights: bool = False
    """Whether it has weights of its own, which learning does not touch until ``refresh``."""
    shows_tokens: bool = False
    """Whether it knows ``SampleRequest.watch`` and ``drawn``."""
    limit: RowLimit | None = None
    """How many sequences it samples at once, where the run may lower that as memory runs out."""
    heed: Callable[[], object] | None = None
    """Called while ``refresh`` waits for somebody who is away; what it raises ends that."""

    @abstractmethod
    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """``samples_per_prompt`` completions for each prompt, in the order of ``prompts``. ``on_progress`` is called now and then."""

    @abstractmethod
    def refresh(self, policy_version: int) -> None:
        """The policy's weights have changed in place; anything derived from them is renewed before the next sample. For an engine
        by import path the first ones count as changed."""

    def release_memory(self) -> None:  # noqa: B027 - most have none while they do not sample
        """Learning begins: memory of the device that is not needed before the next ``refresh`` may go. For all processes at once."""

    def serve_checked(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """``serve``. What is put around an engine asks it by this, so that an error names the engine that samples.

        Raises TrainingError where a group has another size than was asked for, or a completion has no tokens, another number of
        log-probabilities than tokens, or another temperature than was asked for: it would be scored at the wrong one.
        """
        sampled = self.serve(request, on_progress)
        name, settings, prompts = type(self).__name__, request.settings, len(request.prompts)
        sizes = [len(group) for group in sampled]
        if sizes != [request.samples_per_prompt] * prompts:
            raise TrainingError(
                f"{name} was asked for {request.samples_per_prompt} completions for each of {prompts} prompts and gave "
                f"{sizes!s:.60}: its serve must give a tuple of request.samples_per_prompt for each of request.prompts"
            )
        completions = [completion for group in sampled for completion in group]
        for c in completions:
            if not 1 <= len(c.token_ids) == len(c.logprobs):
                raise TrainingError(
                    f"{name} gave a completion of {len(c.token_ids)} tokens with {len(c.logprobs)} log-probabilities: its serve "
                    "must give at least one token, the end token included, and one log-probability for each"
                )
        others = {c.temperature for c in completions} - {settings.temperature}
        if others and not settings.greedy:
            raise TrainingError(
                f"{name} was asked for completions at temperature {settings.temperature:g} and gave some that say "
                f"{min(others):g}: its serve must make Completion(temperature=request.settings.temperature)"
            )
        return sampled

    def sample(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, settings: SamplingSettings, *, seed: int, scope: str,
        on_progress: Progress | None = None,
    ) -> list[tuple[Completion, ...]]:  # fmt: skip
        """``serve_checked`` for a request of these parts."""
        return self.serve_checked(SampleRequest(prompts, samples_per_prompt, settings, seed, scope), on_progress)

    def stream(self, prompt: Prompt, settings: SamplingSettings, *, seed: int, on_text: Callable[[str], None]) -> Completion:
        """One completion, with ``on_text`` called with each new piece of text, for a person who reads along; by itself with all of it."""
        ((completion,),) = self.sample([prompt], 1, settings, seed=seed, scope="stream")
        on_text(completion.text)
        return completion

    def metrics(self) -> dict[str, Metric]:
        """What it has to say of itself since it was asked last, beside its completions."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what it holds outside of this process, if anything."""
