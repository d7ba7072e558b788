"""A few supervised steps on worked examples, for a model that does not know the answer format yet.

GRPO can only strengthen what the policy sometimes does. A small model that never uses the format asked for scores 0 in every
completion, no group varies, and nothing is learnt; a short warm start gives the groups something to differ in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from groupwise.batching import cut_batch
from groupwise.config.schema import Config, OptimizerConfig
from groupwise.data.answers import AnswerStyle
from groupwise.data.order import problems_for_step
from groupwise.data.prompts import worked_completion
from groupwise.distributed import World
from groupwise.models.scorer import Scorer
from groupwise.training.optimizer import learning_rate_at
from groupwise.training.sharding import Replicas, Sharding
from groupwise.types import Prompt

__all__ = ["warm_start", "worked_tokens"]

_ORDER_SEED = 0x5EED
"""Set apart from the seed of GRPO's problem order, so that the two visit problems in different orders."""


def worked_tokens(prompt: Prompt, style: AnswerStyle, tokenizer: Any) -> list[int]:
    """The worked answer as the tokens the policy should have sampled, its end token included."""
    text = worked_completion(prompt.problem, style)
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


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
) -> None:
    """Minimise -log p(worked answer), averaged over the tokens of a step, with an optimiser of its own; divided among ``world``.

    ``on_step(steps done, loss in nats per token)`` is called after each step. A gradient that is not finite is dropped:
    ``on_dropped(step from 0, how many in a row)`` hears of it, and may raise.
    """
    settings, world = config.warm_start, world or World()
    rates = OptimizerConfig(
        learning_rate=settings.learning_rate, schedule="linear", final_fraction=0.1, warmup_steps=min(3, settings.steps),
        precision=config.optimizer.precision, offload=config.optimizer.offload,
    )  # fmt: skip
    sharding = sharding or Replicas(scorer, world)
    optimizer = sharding.make_optimizer(rates)
    in_a_row = 0
    for step in range(settings.steps):
        indices = problems_for_step(len(prompts), settings.examples_per_step, step, config.training.seed ^ _ORDER_SEED)
        examples = [(prompts[i].token_ids, worked_tokens(prompts[i], style, tokenizer)) for i in indices]
        loss = _backward(scorer, examples, config.training.micro_batch_tokens, optimizer.loss_scale, world, sharding)
        sharding.sum_gradients(optimizer)
        _, made = optimizer.step(learning_rate_at(rates, step, settings.steps))
        in_a_row = 0 if made or optimizer.can_recover else in_a_row + 1
        if not made and on_dropped:
            on_dropped(step, in_a_row)
        if on_step:
            on_step(step + 1, loss)
    optimizer.close()


def _backward(
    scorer: Scorer,
    examples: Sequence[tuple[Sequence[int], Sequence[int]]],
    budget: int,
    scale: float,
    world: World,
    sharding: Sharding,
) -> float:
    """The loss of all ``examples``; this process's part of its gradient."""
    tokens = sum(len(target) for _, target in examples)
    examples = [examples[i] for i in world.mine([len(prompt) + len(target) for prompt, target in examples])]
    total = 0.0
    passes = list(cut_batch([(len(prompt), [len(target)]) for prompt, target in examples], budget))
    with sharding.evened(scorer, len(passes)):
        for parts in passes:
            batch = scorer.prepare([(examples[p.group][0], [examples[p.group][1]]) for p in parts])
            loss = -scorer.logprobs(batch).sum() / tokens
            sharding.backward(loss if scale == 1 else loss * scale)
            total += float(loss.detach())
    return sum(world.gather(total))
