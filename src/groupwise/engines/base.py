"""What every sampling engine offers. No torch here, so that evaluation and tests can name the interface cheaply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from groupwise.metrics import Metric
from groupwise.types import Completion, Prompt

__all__ = ["Engine", "SamplingSettings", "close_engine", "engine_metrics", "share_limit", "tell_of_limit"]


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


class Engine(Protocol):
    """Samples completions with the policy's present weights.

    One that has weights of its own, which learning does not touch until ``refresh``, says so by an attribute ``holds_weights``.
    """

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        settings: SamplingSettings,
        *,
        seed: int,
        scope: str,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[tuple[Completion, ...]]:
        """``samples_per_prompt`` completions for each prompt, in the order of ``prompts``.

        The randomness of a completion is a function of (``seed``, ``scope``, problem id, ``Prompt.occurrence``, sample index, token
        position) alone: batch composition, order and the number of processes do not matter. ``scope`` names the occasion, for example
        ``"rollout/step=12"``. ``on_progress(finished_completions, sampled_tokens)`` is called now and then.
        """
        ...

    def stream(self, prompt: Prompt, settings: SamplingSettings, *, seed: int, on_text: Callable[[str], None]) -> Completion:
        """One completion, with ``on_text`` called with each new piece of text: for a person who reads along."""
        ...

    def refresh(self, policy_version: int) -> None:
        """The policy's weights have changed in place; anything derived from them is renewed before the next sample."""
        ...


def engine_metrics(engine: Engine) -> dict[str, Metric]:
    """What an engine has to say of itself since it was asked last, beside its completions; most have nothing."""
    ask = getattr(engine, "metrics", None)
    return ask() if callable(ask) else {}


def tell_of_limit(engine: Engine, tell: Callable[[str], object]) -> None:
    """Have ``tell`` hear of it when the engine samples fewer sequences at once, since memory ran out; of engines that do so."""
    limit = getattr(engine, "limit", None)
    if limit is not None:
        limit.tell = tell


def share_limit(engine: Engine, other: Engine) -> None:
    """What one of them learns about how many sequences fit, the other one knows: on one device."""
    if hasattr(engine, "limit") and hasattr(other, "limit"):
        other.limit = engine.limit


def close_engine(engine: Engine) -> None:
    """Let go of what an engine holds outside of this process, if anything."""
    close = getattr(engine, "close", None)
    if callable(close):
        close()
