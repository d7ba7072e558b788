"""A few supervised steps on worked examples, for a model that does not know the answer format yet.

GRPO can only strengthen what the policy sometimes does. A small model that never uses the format asked for scores 0 in every
completion, no group varies, and nothing is learnt; a short warm start gives the groups something to differ in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from groupwise.batching import cut_batch
from groupwise.config.schema import Config, OptimizerConfig
from groupwise.data.answers import AnswerStyle
from groupwise.data.order import problems_for_step
from groupwise.distributed import World
from groupwise.distributed.sharding import Optimizer
from groupwise.episodes import Episodes, worked_episode
from groupwise.episodes.driver import Played
from groupwise.errors import DataError
from groupwise.models.scorer import Scorer
from groupwise.training.microbatches import PassBudget
from groupwise.training.optimizer import learning_rate_at
from groupwise.training.seeds import seed_noise
from groupwise.training.sharding import Replicas, Sharding
from groupwise.types import Prompt

__all__ = ["check_worked_examples", "warm_start"]

_ORDER_SEED = 0x5EED
"""Set apart from the seed of GRPO's problem order, so that the two visit problems in different orders."""
_BEFORE_ALL = -1
"""Sets the noise of its steps apart from that of GRPO's updates, which count from 0."""


def check_worked_examples(
    config: Config, prompts: Sequence[Prompt], tokenizer: Any, style: AnswerStyle, context: int, episodes: Episodes | None = None
) -> None:
    """Raise DataError where an example of the warm start does not fit into a context of so many tokens."""
    for step in range(config.warm_start.steps):
        for prompt in (prompts[i] for i in _examples(config, len(prompts), step)):
            samples = worked_episode(prompt, style, tokenizer, episodes)
            asked, worked = max(((len(asked), len(ids)) for asked, ids, _ in samples), key=sum)
            if asked + worked > context:
                raise DataError(
                    f"the warm start would learn from problem {prompt.problem.id}, whose prompt of {asked} tokens and worked answer of "
                    f"{worked} tokens do not fit together: the context of {config.model.name} is {context} tokens; set "
                    f"data.max_prompt_tokens to {max(1, context - worked)} or less with data.on_long_prompt=drop, or "
                    "warm_start.steps to 0"
                )


def _examples(config: Config, problems: int, step: int) -> list[int]:
    """Places of the problems that a supervised step (from 0) learns from."""
    return problems_for_step(problems, config.warm_start.examples_per_step, step, config.training.seed ^ _ORDER_SEED)


def warm_start(
    scorer: Scorer,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    style: AnswerStyle,
    config: Config,
    on_step: Callable[[int, float], None] | None = None,
    on_dropped: Callable[[int, int], None] | None = None,
    world: World | None = None,
    sharding: Sharding | None = None,
    budget: PassBudget | None = None,
    episodes: Episodes | None = None,
) -> None:
    """Minimise -log p(worked answer), averaged over the tokens of a step, with an optimiser of its own; divided among ``world``.

    ``on_step(steps done, loss in nats per token)`` is called after each step. A gradient that is not finite is dropped:
    ``on_dropped(step from 0, how many in a row)`` hears of it, and may raise. ``budget``: of the run's passes.
    """
    settings, world = config.warm_start, world or World()
    rates = OptimizerConfig(
        learning_rate=settings.learning_rate, schedule="linear", final_fraction=0.1, warmup_steps=min(3, settings.steps),
        precision=config.optimizer.precision, offload=config.optimizer.offload,
    )  # fmt: skip
    sharding = sharding or Replicas(scorer, world)
    budget = budget or PassBudget(config.training.micro_batch_tokens, fixed=sharding.divides_weights)
    optimizer = sharding.make_optimizer(rates)
    in_a_row = 0
    for step in range(settings.steps):
        chosen = [prompts[i] for i in _examples(config, len(prompts), step)]
        examples = world.on_rank0(partial(_worked, chosen, style, tokenizer, episodes))  # tools may answer another otherwise
        passes = _Passes(scorer, examples, optimizer, world, sharding, budget, noise=(config.training.seed, _BEFORE_ALL, step))
        loss = sum(world.all_gather_object(budget.attempt(passes.backward, passes.largest_divisible, optimizer.clear)))
        sharding.sum_gradients(optimizer)
        _, made = optimizer.step(learning_rate_at(rates, step, settings.steps))
        in_a_row = 0 if made or optimizer.can_recover else in_a_row + 1
        if not made and on_dropped:
            on_dropped(step, in_a_row)
        if on_step:
            on_step(step + 1, loss)
    optimizer.close()


def _worked(prompts: Sequence[Prompt], style: AnswerStyle, tokenizer: Any, episodes: Episodes | None) -> list[Played]:
    return [sample for prompt in prompts for sample in worked_episode(prompt, style, tokenizer, episodes)]


class _Passes:
    """One step's passes that fall to this process."""

    def __init__(
        self, scorer: Scorer, examples: Sequence[Played], optimizer: Optimizer, world: World, sharding: Sharding, budget: PassBudget,
        noise: tuple[int, int, int],
    ) -> None:  # fmt: skip
        """``noise`` seeds an adapter's dropout."""
        self.scorer, self.optimizer, self.sharding, self.budget, self.noise = scorer, optimizer, sharding, budget, noise
        self.tokens = sum(sum(learnt) for _, _, learnt in examples)
        """Learnt ones, of all processes."""
        self.examples = [examples[i] for i in world.assigned([len(prompt) + len(target) for prompt, target, _ in examples])]

    def _cut(self) -> list[list[Played]]:
        sizes = [(len(prompt), [len(target)]) for prompt, target, _ in self.examples]
        return [[self.examples[part.group] for part in parts] for parts in cut_batch(sizes, self.budget.tokens)]

    def largest_divisible(self) -> int | None:
        """Tokens of the largest pass of several examples."""
        sizes = [sum(len(prompt) + len(target) for prompt, target, _ in chosen) for chosen in self._cut() if len(chosen) > 1]
        return max(sizes, default=None)

    def backward(self) -> float:
        """Add their gradient; returns their part of the loss."""
        seed_noise([self.scorer, self.optimizer], *self.noise)
        scale, total, passes = self.optimizer.loss_scale, 0.0, self._cut()
        with self.sharding.evened(self.scorer, len(passes)):
            for chosen in passes:
                batch = self.scorer.prepare([(prompt, [target]) for prompt, target, _ in chosen])
                learnt_T = torch.tensor([own for _, _, learnt in chosen for own in learnt], device=self.scorer.device)
                loss = -self.scorer.logprobs(batch)[learnt_T].sum() / self.tokens
                self.sharding.backward(loss if scale == 1 else loss * scale)
                total += float(loss.detach())
        return total
