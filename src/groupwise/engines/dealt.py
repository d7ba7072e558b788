"""Sampling divided among the processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from groupwise.distributed import World
from groupwise.engines.base import Engine, Progress, SampleRequest, SamplingSettings
from groupwise.types import Completion, Prompt

__all__ = ["DealtEngine", "sampling_costs"]


def sampling_costs(prompts: Sequence[Prompt], samples_per_prompt: int, settings: SamplingSettings) -> list[float]:
    """Estimated tokens of each prompt's group: the prompt once, and completions of half the limit, since nobody knows them yet."""
    return [len(prompt.token_ids) + samples_per_prompt * settings.max_tokens / 2 for prompt in prompts]


class DealtEngine(Engine):
    """Over this process's ``engine``: prompts are dealt to the processes, and all know all completions.

    Every process must call it with the same arguments. The completions are those of one process: seeds have names.
    """

    def __init__(self, engine: Engine, world: World) -> None:
        self.engine, self.world = engine, world

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``; progress is this process's own."""
        own = self.world.mine(sampling_costs(request.prompts, request.samples_per_prompt, request.settings))
        sampled = self.engine.serve(replace(request, prompts=[request.prompts[i] for i in own]), on_progress)
        everywhere = self.world.gather(list(zip(own, sampled, strict=True)))
        return [completions for _, completions in sorted((pair for part in everywhere for pair in part), key=lambda p: p[0])]

    def stream(self, prompt: Prompt, settings: SamplingSettings, *, seed: int, on_text: Callable[[str], None]) -> Completion:
        """See ``Engine.stream``; one completion is not divided."""
        return self.engine.stream(prompt, settings, seed=seed, on_text=on_text)

    def refresh(self, policy_version: int) -> None:
        self.engine.refresh(policy_version)
