"""Sampling where the weights are divided: they are whole while an engine reads them, and not while its samples are scored."""

from __future__ import annotations

from collections.abc import Callable

from groupwise.distributed.sharding import Sharding
from groupwise.engines import Engine, SamplingSettings
from groupwise.engines.base import Progress, SampleRequest
from groupwise.types import Completion, Prompt

__all__ = ["with_whole_weights"]


def with_whole_weights(engine: Engine, sharding: Sharding) -> Engine:
    """An engine that samples as ``engine`` does, which all processes must ask at once; itself where it has weights of its own."""
    return engine if engine.holds_weights else _Gathering(engine, sharding)


class _Gathering(Engine):
    """Over an engine that reads the policy's weights."""

    def __init__(self, engine: Engine, sharding: Sharding) -> None:
        self.engine, self.sharding = engine, sharding

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``. Whoever has no prompts takes part too."""
        with self.sharding.whole():
            return self.engine.serve(request, on_progress)

    def stream(self, prompt: Prompt, settings: SamplingSettings, *, seed: int, on_text: Callable[[str], None]) -> Completion:
        """See ``Engine.stream``."""
        with self.sharding.whole():
            return self.engine.stream(prompt, settings, seed=seed, on_text=on_text)

    def refresh(self, policy_version: int) -> None:
        self.engine.refresh(policy_version)
