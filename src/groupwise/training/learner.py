"""The update: from scored groups to new weights. mu optimiser steps on one batch, each the sum of its micro-batches.

Axes: N completions and T tokens of a micro-batch, as in ``algorithm``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from groupwise.algorithm import AdaptiveKL, BatchCounts, Objective, policy_loss
from groupwise.config.schema import Config, EntropyConfig, KLConfig
from groupwise.distributed import World
from groupwise.metrics import Max, Mean, Metric, Sum, merge
from groupwise.models.logprobs import Scored
from groupwise.models.scorer import Scorer, as_in_learning
from groupwise.training.budget import PassBudget, largest_divisible
from groupwise.training.credit import Advantages, advantages_by_token, assign_advantages, step_advantages, steps_teach, teaches
from groupwise.training.critic import make_critic
from groupwise.training.microbatches import MicroBatch, Share, cut, keep_most_entropic, members_of, note_first_sweep
from groupwise.training.optimizer import learning_rate_at
from groupwise.training.reference import Reference
from groupwise.training.seeds import seed_noise
from groupwise.training.sharding import Replicas, Sharding
from groupwise.training.window import Stateful, Window, WindowOpenError
from groupwise.types import Group

__all__ = ["Advantages", "Learner", "MicroBatch", "Share", "Stateful"]

T = TypeVar("T")
HeldState = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""Of a batch whose updates are not all made, as `Window.state` gives it."""

_FIRST_SWEEP = ("old_T", "correction_T")
"""What a micro-batch's first sweep notes about it."""
_BONUS = "policy/entropy_bonus"
_BY_UPDATE = ("policy/loss", "policy/ratio", "policy/clip_share", "policy/kl", "optimizer/grad_norm")
"""Shown of each update too, where a batch has several: the first is at ratio 1, and a mean over all hides what the last did."""
_DETAILS = ("clip_low", "clip_high", "clip_low_least", "clip_high_most", "kl_corrected")


class Learner:
    """Holds what learning needs beside the policy: optimiser, reference, critic, and the count of updates."""

    def __init__(
        self, scorer: Scorer, config: Config, optimizer: Any = None, world: World | None = None, sharding: Sharding | None = None,
        budget: PassBudget | None = None,
    ) -> None:  # fmt: skip
        """``optimizer``: another one than AdamW with masters, with the same methods, over the scorer's parameters.

        ``world``: the processes that divide the passes among them; each makes the same updates. ``sharding``: what else they divide.
        ``budget``: one that passes before the first step may have halved.
        """
        self.scorer, self.config, self.world = scorer, config, world or World()
        self.kl, self.entropy = config.algorithm.kl or KLConfig(), config.algorithm.entropy or EntropyConfig()
        self.objective = Objective.from_config(config.algorithm)
        self.sharding = sharding or Replicas(scorer, self.world)
        self.optimizer = self.sharding.make_optimizer(config.optimizer) if optimizer is None else optimizer
        self.moving_reference = (
            Reference(
                scorer,
                self.kl.reference_mixing,
                offload=config.training.offload_reference and scorer.device.type != "cpu",
                copied=self.sharding.make_reference,
            )
            if self.objective.needs_reference
            else None
        )
        self.critic = make_critic(scorer, config) if self.objective.needs_values else None
        target = self.kl.target
        self.kl_control = None if target is None else AdaptiveKL(self.objective.beta, target, self.kl.gain)
        self.parts: dict[str, Stateful] = {}
        self.budget = budget or PassBudget(config.training.micro_batch_tokens, fixed=self.sharding.divides_weights)
        self.updates = 0
        """That were made."""
        self.place = 0
        """Of the next update in a run whose every batch has something to teach: what the learning rate's schedule goes by."""
        self.dropped_in_a_row = 0
        self.renewed_before = 0
        """The step before which the reference was renewed last."""
        self.token_advantages: dict[tuple[int, int], list[float]] = {}
        """Of the last batch's first groups (``output.log_tokens``), where tokens of one completion differ in their advantages."""
        self.entropy_bonus: float | None = None
        """Weight of the entropy that the next passes take off the loss; at None they do not compute it."""

    @property
    def reference(self) -> Scorer | None:
        return None if self.moving_reference is None else self.moving_reference.scorer

    @property
    def beta(self) -> float:
        """The KL's coefficient as it is now."""
        return self.objective.beta if self.kl_control is None else self.kl_control.beta

    def renew_reference(self, before_step: int | None = None) -> None:
        """The reference moves to the current policy (an outer iteration of arXiv 2402.03300, algorithm 1), or towards it.

        Once before each step (from 0), however often that is begun: one that was abandoned begins again.
        """
        if before_step is not None and before_step <= self.renewed_before:
            return
        if self.moving_reference is not None:
            self.moving_reference.renew()
        self.renewed_before = before_step or self.renewed_before

    def learn(
        self,
        groups: Sequence[Group],
        *,
        step: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        held: HeldState | None = None,
        within: bool = False,
    ) -> tuple[Advantages, dict[str, Metric]]:
        """``updates_per_batch`` optimiser steps on ``groups``. Returns the advantages, by group, and metrics.

        Advantages and denominators are those of all ``groups``. Groups whose advantages are all 0 (under a group baseline: those
        without variance) then take no part in the passes, unless the config wants their KL or a value learns from them. A batch that
        has nothing to teach makes no optimiser step.

        ``step``: which of the run's it is, from 0; by itself the one after the last.

        ``stop`` is asked between two updates, and with ``within`` between the passes of one; where it says yes, the rest is left to be
        done later by raising WindowOpenError, and the gradient of an update that was under way is dropped. ``held`` is the state of the
        window that it carries: the same ``groups`` are then resumed.
        """
        updates = self.config.algorithm.updates_per_batch
        step = self.place // updates if step is None else step
        self.place = (step + 1) * updates
        members = self._taking_part(groups)
        self.token_advantages = {}
        if not members:
            rewards = [list(group.outcomes) for group in groups]
            return [[0.0] * len(group) for group in rewards] if self.critic else self.objective.advantages(rewards), {}
        self._seed_noise(step)
        micro_batches = self._cut(groups)
        window, halvings = Window(groups, [], micro_batches), self.budget.halvings
        if held is None:
            self._open(window)
        else:
            window.restore(*held)
        self.entropy_bonus = next((m[_BONUS].value for m in window.found if _BONUS in m), 0.0) or None
        while window.updates < updates:
            self.place = step * updates + window.updates
            passes = self.world.reduce(self._sweep(window, stop if within else lambda: False))
            for name in ("policy/loss", "value/loss"):
                if name in passes:
                    passes[name] = Mean(passes[name].value, 1)  # summed over micro-batches, averaged over updates
            window.found += [{k: v for k, v in passes.items() if not k.startswith("detail/")}, self.step()]
            window.updates += 1
            if updates > 1:
                made = window.found[-2] | window.found[-1]
                shown = {f"updates/{k.partition('/')[2]}_{window.updates}": made[k] for k in _BY_UPDATE if k in made}
                window.found[-1] = window.found[-1] | shown
            self.place += 1
            if window.updates < updates and stop():
                raise WindowOpenError(window)
        of_tokens = self.world.gather(advantages_by_token(micro_batches, self.config.output.log_tokens))
        self.token_advantages = {member: numbers for part in of_tokens for member, numbers in part.items()}
        metrics = merge(window.found) | {"optimizer/learning_rate": window.found[-1]["optimizer/learning_rate"]}
        metrics |= self.world.reduce({"memory/halvings": Sum(self.budget.halvings - halvings)})
        return window.advantages, metrics | self._steer(metrics)

    def _seed_noise(self, batch: int) -> None:
        """The dropout of an adapter is the same in all passes of a batch: a ratio of two masks would be noise."""
        seed_noise([self.scorer, self.optimizer], self.config.training.seed, batch)
        if self.critic is not None:
            seed_noise([self.critic.trunk, self.critic.optimizer], self.config.training.seed, batch, 1)

    def _sweep(self, window: Window, stop: Callable[[], bool] = lambda: False) -> dict[str, Metric]:
        """The gradient of one update. Where memory runs out it is swept again from the start, in smaller passes."""
        first = window.updates == 0

        def stopping() -> None:
            if stop():
                self._clear()
                raise WindowOpenError(window)

        def sweep() -> dict[str, Metric]:
            return self.accumulate(window.micro_batches, first=first, before_each=stopping)

        return self._attempt(sweep, window, lambda: window.notes(without=_FIRST_SWEEP if first else ()))

    def _attempt(self, passes: Callable[[], T], window: Window, notes: Callable[[], dict[str, Tensor]]) -> T:
        """``passes`` over the window's micro-batches; where memory runs out, again over smaller ones, with ``notes`` about the old."""

        def largest() -> int | None:
            return largest_divisible([*window.micro_batches, *window.judged])

        def restart() -> None:
            self._clear()
            window.cut_anew(self._cut(window.groups), notes())
            window.judged = self._packed(window.groups, self._judged_only(window.groups)) if window.judged else []

        return self.budget.attempt(passes, largest, restart)

    def _packed(self, groups: Sequence[Group], members: list[tuple[int, int]]) -> list[MicroBatch]:
        """What falls to this process of ``members``; perhaps nothing."""
        own = self._own(groups, members)
        return cut(groups, Share(own, self.counts(groups)), self.scorer, self.objective, self.budget.tokens) if own else []

    def _clear(self) -> None:
        """Drop what has added up of an update's gradient."""
        self.optimizer.clear()
        if self.critic:
            self.critic.clear()

    def _cut(self, groups: Sequence[Group]) -> list[MicroBatch]:
        """What falls to this process of the completions that take part, packed; perhaps nothing."""
        out = self._packed(groups, self._taking_part(groups))
        for micro_batch in out if self.config.clips_against_the_sampler else ():
            micro_batch.old_T = micro_batch.sampled_T
        if self.critic:
            self.critic.pack(groups, out, self.scorer)
        return out

    def _taking_part(self, groups: Sequence[Group]) -> list[tuple[int, int]]:
        """The completions that the passes are about, by (group, completion)."""
        taught = list(range(len(groups)))
        if not self._keeps_all(groups):
            advantages = self.objective.advantages([list(group.outcomes) for group in groups])
            of_steps = step_advantages(groups, self.objective)
            taught = [i for i in taught if teaches(advantages[i]) or steps_teach(of_steps, i)]
        return [(i, m) for i in taught for m, c in enumerate(groups[i].completions) if self._counts(c.stopped)]

    def _judged_only(self, groups: Sequence[Group]) -> list[tuple[int, int]]:
        """Completions that the loss leaves out, where their KL is part of the reward that the others are compared with."""
        if self.critic is not None or not self._kl_in_reward:
            return []
        return [(g, m) for g, group in enumerate(groups) for m, c in enumerate(group.completions) if not self._counts(c.stopped)]

    @property
    def _kl_in_reward(self) -> bool:
        """A completion's, or each token's."""
        return self.objective.kl_in_reward or self.objective.kl_in_token_reward

    def _open(self, window: Window) -> None:
        """What must be known of a batch before its first update."""
        window.judged = self._packed(window.groups, self._judged_only(window.groups))

        def passes() -> tuple[dict[str, Metric], list[Tensor]]:
            of_reference = self._score_reference([*window.micro_batches, *window.judged])
            of_policy, entropies = self._look_ahead(window.micro_batches, window.judged)
            return merge([of_reference, of_policy]), entropies

        before, entropies = self._attempt(passes, window, dict)
        before |= keep_most_entropic(window.micro_batches, entropies, self.entropy.top_share, self.world)
        window.found += [self.world.reduce(before), self._choose_bonus(window)]
        batch = (window.micro_batches, window.groups)
        window.advantages, of_value = assign_advantages(*batch, self.objective, self.beta, self.world, window.judged)
        window.judged = []
        window.found.append(of_value)

    def _own(self, groups: Sequence[Group], members: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of ``members`` whose passes fall to this process: whole groups, dealt by their tokens, which are known now."""
        tokens: dict[int, int] = {}
        for group, member in members:
            size = len(groups[group].completions[member].token_ids)
            tokens[group] = tokens.get(group, len(groups[group].prompt.token_ids)) + size
        taking = list(tokens)
        own = {taking[place] for place in self.world.mine(list(tokens.values()))}
        return [(group, member) for group, member in members if group in own]

    def counts(self, groups: Sequence[Group]) -> BatchCounts:
        """Of a whole batch, completions that the passes skip included, but not the tokens of those that the config masks."""
        everything = [c for group in groups for c in group.completions]
        return BatchCounts(
            completions=len(everything),
            tokens=max(1, sum(len(c.token_ids) for c in everything if self._counts(c.stopped))),
            max_tokens=self.config.rollout.max_completion_tokens,
        )

    def prepare(
        self, groups: Sequence[Group], shares: Sequence[Share], advantages: Advantages, *, off_policy: bool
    ) -> list[list[MicroBatch]]:
        """Each share's micro-batches, with advantages and the reference's logprobs: for callers that order the steps themselves.

        ``off_policy``: the weights will have moved before some share's turn, so the policy's logprobs are taken down now, in one
        more pass; otherwise the ratio of a share's first sweep is 1 by definition. The KL must not be part of the reward.
        """
        assert self.objective.kl_in_loss, "a KL in the reward changes advantages: use learn"
        budget = self.budget.tokens
        self._seed_noise(self.updates)
        out = [cut(groups, share, self.scorer, self.objective, budget) if share.members else [] for share in shares]
        for micro_batch in (m for micro_batches in out for m in micro_batches):
            chosen = [advantages[g][m] for g, m in members_of(micro_batch)]
            micro_batch.advantages_N = torch.tensor(chosen, device=self.scorer.device)
            if off_policy:
                with torch.no_grad(), as_in_learning(self.scorer):
                    micro_batch.old_T = self.scorer.logprobs(micro_batch.packed, self.config.rollout.temperature)
            self._score_reference([micro_batch])
        everything = [m for micro_batches in out for m in micro_batches]
        keep_most_entropic(everything, self._look_ahead(everything)[1], self.entropy.top_share, self.world)
        return out

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        first: bool,
        scale: float = 1.0,
        before_each: Callable[[], None] = lambda: None,
    ) -> dict[str, Metric]:
        """Add the gradient of some micro-batches, times ``scale``, to what the next ``step`` takes. Their loss is summed, not averaged.

        ``first``: they are swept for the first time, so that the sampler's mismatch can be measured. Without gradients switched on
        (``torch.no_grad``) only the numbers are computed. ``before_each`` is called before each pass, and may raise. Names that
        begin with ``detail/`` are for callers, not for the records.
        """
        started = time.perf_counter()
        with self.sharding.evened(self.scorer, len(micro_batches)):
            parts = []
            for micro_batch in micro_batches:
                before_each()
                parts.append(self._backward(micro_batch, first, scale))
            found = merge(parts)
        return found | {"time/learn_s": Sum(time.perf_counter() - started)}

    def step(self, rate: float | None = None) -> dict[str, Metric]:
        """One optimiser step on the gradients that have added up; ``rate``: another learning rate than the config's schedule has."""
        started = time.perf_counter()
        if rate is None:
            rate = learning_rate_at(self.config.optimizer, self.place, self.config.optimizer_steps, self.updates)
        exchange = self._exchange_gradients()
        found = dict(exchange)
        if self.optimizer.loss_scale != 1:
            found["optimizer/loss_scale"] = Max(self.optimizer.loss_scale)
        norm, made = self.optimizer.step(rate)
        if self.critic:
            self.critic.step(made)
            if not self._value_on_policy:
                found["value/grad_norm"] = Max(self.critic.grad_norm)
        self.updates += made
        self.dropped_in_a_row = 0 if made or self.optimizer.can_recover else self.dropped_in_a_row + 1
        if made and self.optimizer.lost is not None:
            found["optimizer/updates_lost"] = self.optimizer.lost
        return found | {
            "optimizer/grad_norm": Max(norm),
            "optimizer/learning_rate": Max(rate),
            "optimizer/dropped_updates": Sum(not made),
            "time/optimizer_s": Sum(time.perf_counter() - started - sum(x.value for x in exchange.values())),
        }

    def _exchange_gradients(self) -> dict[str, Metric]:
        started = time.perf_counter()
        self.sharding.sum_gradients(self.optimizer)
        if self.critic:
            self.world.sum_gradients(self.critic.gradients(), self.critic.zero_gradient)
        return {"time/exchange_s": Sum(time.perf_counter() - started)}

    def _keeps_all(self, groups: Sequence[Group]) -> bool:
        """Groups without variance still matter to a value, to an entropy bonus, to which of the batch's tokens have most entropy, and
        to a KL: always where it is part of the reward, in the loss if the config says so."""
        leash = self.objective.needs_reference and not (self.objective.kl_in_loss and self.kl.skip_zero_variance)
        return self.critic is not None or leash or self.entropy.top_share < 1 or self._bonus_may_act(groups)

    def _counts(self, stopped: bool) -> bool:
        return stopped or not self.config.algorithm.mask_truncated

    @torch.no_grad()
    def _score_reference(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Metric]:
        if self.moving_reference is None:
            return {}
        started = time.perf_counter()
        with self.moving_reference.present() as reference, self.sharding.evened(reference, len(micro_batches)):
            for micro_batch in micro_batches:
                micro_batch.reference_T = reference.logprobs(micro_batch.packed, self.config.rollout.temperature)
        return {"time/reference_s": Sum(time.perf_counter() - started)}

    @torch.no_grad()
    def _look_ahead(
        self, micro_batches: Sequence[MicroBatch], judged: Sequence[MicroBatch] = ()
    ) -> tuple[dict[str, Metric], list[Tensor]]:
        """What must be known before the first gradient: values, and the policy's own logprobs where the sampler's are others and
        something asks for them, which are noted; and the tokens' entropies where they matter. Of ``judged``, the logprobs alone."""
        share, own = self.entropy.top_share, self._asks_for_own
        if self.critic is None and share == 1.0 and not own:
            return {}, []
        started = time.perf_counter()
        entropies: list[Tensor] = []
        by_policy = self._value_on_policy or share < 1.0 or own
        judged = judged if own else ()
        with self.sharding.evened(self.scorer, len(micro_batches) + len(judged) if by_policy else 0):
            for micro_batch in micro_batches:
                scored = self._score(micro_batch, entropy=share < 1.0) if by_policy else None
                if self.critic:
                    micro_batch.values_T = self.critic.value_of(micro_batch, scored)
                if scored is not None and scored.entropy_T is not None:
                    entropies.append(scored.entropy_T)
                if scored is not None and own:
                    micro_batch.policy_T = scored.logprobs_T
            for micro_batch in judged:
                micro_batch.policy_T = self._score(micro_batch, entropy=False).logprobs_T
        return {"time/learn_s": Sum(time.perf_counter() - started)}, entropies

    @property
    def _asks_for_own(self) -> bool:
        """Whether a batch is opened with the policy's own logprobs: a KL or a floor wants them, and those of the sampler are others."""
        wanted = self._kl_in_reward or self.entropy.floor is not None
        return wanted and not self.config.samples_are_the_policys

    @torch.no_grad()
    def entropies(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Of each micro-batch's tokens ``[T]``, in nats: of the whole distribution that the policy as it is now gives in their place."""
        scored = [self._score(micro_batch, entropy=True) for micro_batch in micro_batches]
        return [one.entropy_T for one in scored if one.entropy_T is not None]

    def _bonus_may_act(self, groups: Sequence[Group]) -> bool:
        """As far as the samples say. Where their logprobs are not the policy's, the floor is looked at after a pass of its own."""
        weight, floor = self.entropy.bonus, self.entropy.floor
        if weight == 0 or floor is None or not self.config.samples_are_the_policys:
            return weight > 0
        return Mean.of(-x for group in groups for c in group.completions for x in c.logprobs).value < floor

    def _choose_bonus(self, window: Window) -> dict[str, Metric]:
        """The entropy bonus of this batch, by the entropy that its tokens show: the same however the batch is cut."""
        weight, floor = self.entropy.bonus, self.entropy.floor
        if weight == 0:
            return {}
        acts = self._bonus_may_act(window.groups)
        if acts and floor is not None and not self.config.samples_are_the_policys:
            own = Mean(-sum(float(m.own_T.sum()) for m in window.micro_batches), sum(len(m.own_T) for m in window.micro_batches))
            acts = self.world.reduce({"own": own})["own"].value < floor
        return {_BONUS: Max(weight if acts else 0.0)}

    def _steer(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        if self.kl_control is None:
            return {}
        used = self.kl_control.beta
        if "policy/kl" in metrics:
            self.kl_control = self.kl_control.update(metrics["policy/kl"].value)
        return {"policy/beta": Max(used)}

    def _score(self, micro_batch: MicroBatch, entropy: bool) -> Scored:
        return self.scorer.score(
            micro_batch.packed, self.config.rollout.temperature, entropy=entropy, keep_hidden=self._value_on_policy
        )

    @property
    def _value_on_policy(self) -> bool:
        """Whether the value reads the policy's own states."""
        return self.critic is not None and self.critic.trunk is None

    def _backward(self, micro_batch: MicroBatch, first: bool, scale: float) -> dict[str, Metric]:
        """Add one micro-batch's gradient. The first update's ratio is exactly 1, and no old pass is needed: the samples are on-policy,
        or weighted as such; unless the config wants the ratio to the sampler."""
        scored = self._score(micro_batch, entropy=self.entropy_bonus is not None)
        logprobs, tokens = scored.logprobs_T, len(scored.logprobs_T)
        old_T = micro_batch.old_T  # before the first sweep notes it: there the ratio is 1 by definition
        found = (
            note_first_sweep(micro_batch, logprobs.detach(), self.config.algorithm, self.config.correction_level) if first else {}
        )
        loss, numbers = policy_loss(
            self.objective,
            logprobs_T=logprobs,
            sequence_T=micro_batch.packed.sequence_T,
            weights_T=micro_batch.weights_T * scale,
            old_logprobs_T=old_T,
            advantages_N=micro_batch.advantages_N,
            advantages_T=micro_batch.advantages_T,
            reference_logprobs_T=micro_batch.reference_T,
            factor_T=micro_batch.factor_T(),
            beta=self.beta,
        )
        found |= {"policy/loss": numbers["loss"], "policy/ratio_deviation": numbers["ratio_deviation_max"]}
        found["policy/ratio"] = numbers["ratio"]
        found["policy/clip_share"] = Mean(numbers["clip_low"].total + numbers["clip_high"].total, tokens)  # type: ignore[union-attr]
        found |= {f"detail/{name}": numbers[name] for name in _DETAILS if name in numbers}
        if "kl" in numbers:
            found["policy/kl"] = numbers["kl"]
        if scored.entropy_T is not None and self.entropy_bonus is not None:
            weights_T = micro_batch.weights_T if micro_batch.entropy_weights_T is None else micro_batch.entropy_weights_T
            weighted = (weights_T * scored.entropy_T).sum()
            loss = loss - self.entropy_bonus * scale * weighted
            found["detail/weighted_entropy"] = Sum(float(weighted.detach()))
            found["policy/full_entropy"] = Mean(float(scored.entropy_T.detach().sum()), tokens)
        if self.critic and self._value_on_policy:
            value_part, of_value = self.critic.loss_of(micro_batch, scored)
            loss, found = loss + scale * value_part, found | of_value
        if torch.is_grad_enabled():
            loss_scale = self.optimizer.loss_scale
            self.sharding.backward(loss if loss_scale == 1 else loss * loss_scale)
        if self.critic and not self._value_on_policy:  # only now: the policy's activations are free again
            value_part, of_value = self.critic.loss_of(micro_batch, None)
            found |= of_value
            if torch.is_grad_enabled():
                (scale * self.critic.loss_scale * value_part).backward()
        return found
