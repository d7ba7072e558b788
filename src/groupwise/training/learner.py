"""The update: from scored groups to new weights. mu optimiser steps on one batch, each the sum of its micro-batches.

The methods follow each other as the algorithm does: score, advantage, passes, step; below them, what they share.
Axes: N completions and T tokens of a micro-batch, as in ``algorithm``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from groupwise.algorithm import AdaptiveKL, BatchCounts, Objective, policy_loss, sampler_correction
from groupwise.batch import Batch, Member, everyone
from groupwise.config.algorithm import CorrectionConfig
from groupwise.config.schema import Config
from groupwise.distributed import World
from groupwise.distributed.sharding import Optimizer
from groupwise.metrics import Max, Mean, Metric, Sum, merge
from groupwise.models.devices import wait_for
from groupwise.models.logprobs import Scored
from groupwise.models.scorer import Scorer, as_in_learning
from groupwise.training.advantages import Advantages, StepAdvantages
from groupwise.training.critic import make_critic
from groupwise.training.entropy import BONUS, EntropyTerms, entropy_bonus
from groupwise.training.microbatches import MicroBatch, PassBudget, cut
from groupwise.training.optimizer import learning_rate_at
from groupwise.training.reference import Reference
from groupwise.training.seeds import seed_noise
from groupwise.training.sharding import Replicas, Sharding
from groupwise.training.window import HeldState, Stateful, Window
from groupwise.types import Group

__all__ = ["BatchPass", "Learner", "Learnt"]

T = TypeVar("T")
Stop = Callable[[], bool] | None
Columns = dict[str, Tensor]
"""Numbers of each token of a micro-batch, by the names of the batch's columns."""
_NAMES = {
    "loss": "policy/loss", "ratio": "policy/ratio", "ratio_deviation_max": "policy/ratio_deviation", "kl": "policy/kl",
    **{name: f"detail/{name}" for name in ("clip_low", "clip_high", "clip_low_min", "clip_high_max", "kl_corrected", "entropy")},
}  # fmt: skip
"""What is kept of ``policy_loss``'s metrics, beside those of the loss function itself, and its name in the records."""


class Learnt(NamedTuple):
    """What learning from a batch came to."""

    advantages: Advantages
    metrics: dict[str, Metric]


class BatchPass(NamedTuple):
    """The passes over all completions of a window."""

    window: Window
    first: bool
    """Whether these are the first passes over them, so that the sampler's mismatch can be measured."""
    scale: float = 1.0
    """Multiplies their loss."""


class Learner:
    """Holds what learning needs beside the policy: optimiser, reference, critic, and the count of updates."""

    def __init__(
        self, scorer: Scorer, config: Config, optimizer: Optimizer | None = None, world: World | None = None,
        sharding: Sharding | None = None, budget: PassBudget | None = None, objective: Objective | None = None,
    ) -> None:  # fmt: skip
        """``optimizer``: another one than AdamW with masters, over the scorer's parameters.

        ``world``: the processes that divide the passes among them; each makes the same updates. ``sharding``: what else they divide.
        ``budget``: one that passes before the first step may have halved. ``objective``: another one than the config's.
        """
        self.scorer, self.config, self.world = scorer, config, world or World()
        self.objective = objective or Objective.from_config(config.algorithm)
        self.sharding = sharding or Replicas(scorer, self.world)
        self.optimizer: Optimizer = self.sharding.make_optimizer(config.optimizer) if optimizer is None else optimizer
        kl, self.moving_reference, self.kl_control = config.algorithm.kl, None, None
        if self.objective.needs_reference:
            offload = config.training.offload_reference and scorer.device.type != "cpu"
            mixing = 1.0 if kl is None else kl.reference_mixing
            self.moving_reference = Reference(scorer, mixing, offload=offload, copied=self.sharding.make_reference)
        if kl is not None and kl.target is not None:
            self.kl_control = AdaptiveKL(self.objective.beta, kl.target, kl.gain)
        self.critic = make_critic(scorer, config) if self.objective.needs_values else None
        self.entropy = EntropyTerms(config, self.world)
        self.parts: dict[str, Stateful] = {}
        self.budget = budget or PassBudget(config.training.micro_batch_tokens, fixed=self.sharding.divides_weights)
        self.updates = 0
        """Optimiser steps made so far."""
        self.next_step = 0
        """Which step of the run ``learn`` takes its batch for where nobody says."""
        self.paused: Window | None = None
        """The batch that was learnt from last, where ``stop`` ended that before all its updates."""
        self.stepped = False
        """Whether an update of the batch that is learnt from was begun, so that the weights are no longer those after the step before."""
        self.dropped_in_a_row = 0
        self.renewed_before = 0
        """The step before which the reference was renewed last."""
        self.token_advantages: dict[Member, list[float]] = {}
        """Advantages of each token of the last batch's first groups (``output.log_tokens``), where those of one completion differ."""
        self.entropy_bonus: float | None = None
        """Weight of the entropy that the next passes take off the loss; at None they do not compute it."""

    @property
    def reference(self) -> Scorer | None:
        return None if self.moving_reference is None else self.moving_reference.scorer

    @property
    def beta(self) -> float:
        """The KL's coefficient as it is now."""
        return self.objective.beta if self.kl_control is None else self.kl_control.beta

    def learn(
        self, groups: Sequence[Group], *, step: int | None = None, held: HeldState | None = None, stop: Stop = None,
        within: bool = False,
    ) -> Learnt:  # fmt: skip
        """``updates_per_batch`` optimiser steps on ``groups``. Returns the advantages, by group, and metrics.

        Advantages and denominators are those of all ``groups``. Groups whose advantages are all 0 (under a group baseline: those
        without variance) then take no part in the passes, unless the config wants their KL, a value learns from them, or the loss
        may have terms without an advantage. A batch that has nothing to teach makes no optimiser step.

        ``step``: which of the run's it is, from 0; by itself the one after the last. The learning rate's schedule goes by it.

        ``stop`` is asked between two updates, and with ``within`` between the passes of one; where it says yes, the window is left in
        ``paused`` with the rest to be done later, and the gradient of an update that was under way is dropped. ``held`` is the state of
        such a window: the same ``groups`` are then resumed.
        """
        step = self.next_step if step is None else step
        updates, halvings = self.config.algorithm.updates_per_batch, self.budget.halvings
        self.next_step, self.paused, self.stepped, self.token_advantages = step + 1, None, False, {}
        # With a KL in the reward or a learned value, advantages are known after the passes that score.
        advantages = None if self.objective.advantages_need_passes else self._advantages(groups)
        learnt, scored_only = self._taking_part(groups, advantages)
        if not learnt:
            nothing = [[0.0] * len(group.completions) for group in groups]
            return Learnt(nothing if advantages is None else advantages.by_group, {})
        self._seed_noise(step)
        window = self.window(groups, learnt, scored_only if held is None else ())
        if held is None:
            self._score(window)
            self._set_advantages(window, advantages or self._advantages(groups, window.batch))
        else:
            window.restore(*held)
        bonus = window.metrics.get(BONUS)
        self.entropy_bonus = (bonus.value or None) if bonus else None
        while window.updates < updates:
            metrics = self.accumulate([BatchPass(window, window.updates == 0)], stop if within else None)
            if metrics is not None:
                update = step * updates + window.updates
                rate = learning_rate_at(self.config.optimizer, update, self.config.optimizer_steps, self.updates)
                window.count_update(metrics | self.step(rate), updates)
            if window.updates < updates and stop and stop():
                self.paused = window
                return Learnt(window.advantages, window.metrics)
        self._keep_token_advantages(window.batch)
        window.measure(self.world.reduce({"memory/halvings": Sum(self.budget.halvings - halvings)}), self._steer_beta(window))
        return Learnt(window.advantages, window.metrics)

    # Score: passes without gradients, before the first update.

    def _score(self, window: Window) -> None:
        """By the reference, and by policy and critic as far as advantages or loss ask."""
        scored = self._attempt(lambda: self._score_by_reference(window) | self._score_by_policy(window), [window])
        window.measure(self.world.reduce(scored), self.entropy.choose_tokens(window.batch))
        window.measure(self.entropy.choose_bonus(window.groups, window.batch))

    def _score_by_reference(self, window: Window) -> dict[str, Metric]:
        if self.moving_reference is None:
            return {}
        started = time.perf_counter()
        with self.moving_reference.present() as reference:
            self._fill_columns(reference, window, lambda m: {"reference_logprobs_T": _logprobs(reference, m)})
        return {"time/reference_s": Sum(self._now() - started)}

    def _score_by_policy(self, window: Window) -> dict[str, Metric]:
        """Values, entropies where tokens are chosen by them, and the policy's own logprobs where the sampler's are others and a KL or a
        floor asks for them."""
        in_reward = self.objective.kl_in_reward or self.objective.kl_in_token_reward
        own = self.entropy.floor_needs_a_pass or (in_reward and not self.config.samples_are_the_policys)
        by_policy = own or self.entropy.chooses_tokens or (self.critic is not None and self.critic.reads_policy)
        if self.critic is None and not by_policy:
            return {}

        def compute(micro_batch: MicroBatch) -> Columns:
            scored = self._pass(micro_batch, entropy=self.entropy.chooses_tokens) if by_policy else None
            columns = {"values_T": self.critic.value_of(micro_batch, scored)} if self.critic else {}
            if scored is not None and scored.entropy_T is not None:
                columns["entropy_T"] = scored.entropy_T
            return columns | {"policy_T": scored.logprobs_T} if scored is not None and own else columns

        started = time.perf_counter()
        self._fill_columns(self.scorer, window, compute)
        return {"time/learn_s": Sum(self._now() - started)}

    @torch.no_grad()
    def _fill_columns(self, scorer: Scorer, window: Window, compute: Callable[[MicroBatch], Columns]) -> None:
        """Write the columns that ``compute`` gets for each micro-batch from a pass of ``scorer``."""
        with self.sharding.evened(scorer, len(window.micro_batches)):
            for micro_batch in window.micro_batches:
                micro_batch.write(**compute(micro_batch))

    # Advantage.

    def _advantages(self, groups: Sequence[Group], batch: Batch | None = None) -> StepAdvantages:
        """``batch``: this process's completions, for advantages that go by what the passes found."""
        return StepAdvantages.of(groups, self.objective, self._counted(groups), batch=batch, beta=self.beta, world=self.world)

    def _set_advantages(self, window: Window, known: StepAdvantages) -> None:
        """Into the window's columns. What was only scored leaves the window."""
        batch = window.batch
        batch.advantages_T = known.per_token[batch.place_T].float().to(self.scorer.device)
        if known.outputs.returns_T is not None:
            batch.returns_T = known.outputs.returns_T[batch.place_T].float().to(self.scorer.device)
        window.advantages = known.by_group
        window.measure(known.outputs.metrics)
        if batch.learnt < len(batch):
            window.batch = batch.view(range(batch.learnt))
            window.micro_batches = self._cut(window.batch)

    def _keep_token_advantages(self, batch: Batch) -> None:
        """For the record, where tokens of one completion differ."""
        assert batch.advantages_T is not None
        logged = self.config.output.log_tokens
        pieces = [(member, piece.tolist()) for member, piece in batch.by_member(batch.advantages_T) if member[0] < logged]
        differing = {member: numbers for member, numbers in pieces if len(set(numbers)) > 1}
        for of_process in self.world.all_gather_object(differing):
            self.token_advantages |= of_process

    # Passes with gradients.

    def accumulate(self, passes: Sequence[BatchPass], stop: Stop = None) -> dict[str, Metric] | None:
        """Add the gradients of ``passes`` to what the next ``step`` takes, a collective call. Their losses are summed, not
        averaged.

        Without gradients switched on (``torch.no_grad``) only the numbers are computed. ``stop`` is asked before each pass; where it
        says yes, all gradients are dropped and None is returned. Names that begin with ``detail/`` are for callers, not for the records.
        """
        metrics = self._attempt(lambda: self._make_passes(passes, stop), [one.window for one in passes])
        return None if metrics is None else self.world.reduce(metrics)

    def _make_passes(self, passes: Sequence[BatchPass], stop: Stop) -> dict[str, Metric] | None:
        started = time.perf_counter()
        parts: list[dict[str, Metric]] = []
        written: list[tuple[MicroBatch, Columns]] = []
        for window, first, scale in passes:
            with self.sharding.evened(self.scorer, len(window.micro_batches)):
                for micro_batch in window.micro_batches:
                    if stop and stop():
                        self._clear()
                        return None
                    metrics, columns = self._backward(micro_batch, first, scale)
                    parts.append(metrics)
                    written.append((micro_batch, columns))
        for micro_batch, columns in written:  # only now: passes in which memory ran out begin again
            micro_batch.write(**columns)
        return merge(parts) | {"time/learn_s": Sum(self._now() - started)}

    def _backward(self, micro_batch: MicroBatch, first: bool, scale: float) -> tuple[dict[str, Metric], Columns]:
        """Add one micro-batch's gradient; returns metrics, and the columns to be written into the batch.

        The first update's ratio is exactly 1, and no old pass is needed: the samples are on-policy, or weighted as such; unless the
        config wants the ratio to the sampler.
        """
        view = micro_batch.view
        scored = self._pass(micro_batch, entropy=self.entropy_bonus is not None or self.objective.needs_entropy)
        metrics, columns = self._in_first_pass(view, scored.logprobs_T.detach()) if first else ({}, {})
        # In a later pass where a caller has cut its windows otherwise than in the first.
        if self.config.correction_level != "none" and (first or view.correction_T is None):
            view.correction_T, of_correction = self._correction(view, scored.logprobs_T.detach())
            columns, metrics = columns | {"correction_T": view.correction_T}, metrics | of_correction
        loss, numbers = policy_loss(
            self.objective,
            logprobs_T=scored.logprobs_T,
            sequence_T=micro_batch.packed.sequence_T,
            weights_T=view.weights_T * scale,
            old_logprobs_T=view.old_logprobs_T,  # None in the first update: the ratio is 1
            advantages_T=view.advantages_T,
            reference_logprobs_T=view.reference_logprobs_T,
            sampler_logprobs_T=view.sampler_logprobs_T,
            entropy_T=scored.entropy_T,
            factor_T=view.factor_T,
            beta=self.beta,
            completions=len(view),
        )
        metrics |= {_NAMES.get(name, name): x for name, x in numbers.items() if name in _NAMES or name.startswith("loss/")}
        clipped = numbers["clip_low"].total + numbers["clip_high"].total  # type: ignore[union-attr]
        metrics["policy/clip_share"] = Mean(clipped, len(scored.logprobs_T))
        if scored.entropy_T is not None and self.entropy_bonus is not None:
            bonus, of_entropy = entropy_bonus(view, scored.entropy_T, self.entropy_bonus * scale)
            loss, metrics = loss - bonus, metrics | of_entropy
        if self.critic and self.critic.reads_policy:
            value_part, of_value = self.critic.loss_of(micro_batch, scored)
            loss, metrics = loss + scale * value_part, metrics | of_value
        if torch.is_grad_enabled():
            self.sharding.backward(loss * self.optimizer.loss_scale)
        if self.critic and not self.critic.reads_policy:  # only now: the policy's activations are free again
            metrics |= self.critic.backward(micro_batch, scale)
        return metrics, columns

    def _in_first_pass(self, view: Batch, taken_T: Tensor) -> tuple[dict[str, Metric], Columns]:
        """The sampler's mismatch, and what later updates go by: what the policy said at the first (``taken_T``, in nats)."""
        tokens = len(taken_T)
        apart, total = torch.stack(
            [(taken_T - view.sampler_logprobs_T).abs().sum(), taken_T.sum()]
        ).tolist()  # one wait for a GPU
        metrics: dict[str, Metric] = {
            "policy/sampler_mismatch": Mean(apart, tokens),
            "policy/entropy": Mean(-total, tokens),
            "speed/learnt_tokens": Sum(tokens),
        }
        old = self.config.algorithm.updates_per_batch > 1 and view.old_logprobs_T is None
        return metrics, {"old_logprobs_T": taken_T} if old else {}

    def _correction(self, view: Batch, taken_T: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """What the sampler's tokens are weighted by, and its metrics; by 1 where its log-probability is unknown (NaN)."""
        correction = self.config.algorithm.correction or CorrectionConfig()
        old_T, sampler_T = taken_T if view.old_logprobs_T is None else view.old_logprobs_T, view.sampler_logprobs_T
        factor_T, numbers = sampler_correction(
            old_T, torch.where(sampler_T.isnan(), old_T.to(sampler_T.dtype), sampler_T), view.sequence_T, len(view),
            level=self.config.correction_level, mode=correction.mode, high=correction.cap, low=self.objective.correction_floor,
        )  # fmt: skip
        return factor_T, {f"policy/{name}": number for name, number in numbers.items()}

    # Step.

    def step(self, rate: float | None) -> dict[str, Metric]:
        """One optimiser step, at the learning rate ``rate`` (None: at the optimiser's own), on the gradients that have added up in all
        processes. A collective call."""
        started, self.stepped = time.perf_counter(), True
        self.sharding.sum_gradients(self.optimizer)
        if self.critic:
            self.critic.sum_gradients(self.world)
        exchanged, loss_scale = self._now(), self.optimizer.loss_scale
        norm, made = self.optimizer.step(rate)
        metrics: dict[str, Metric] = {
            "optimizer/grad_norm": Max(norm),
            "optimizer/dropped_updates": Sum(not made),
        }
        if rate is not None:
            metrics["optimizer/learning_rate"] = Max(rate)
        if loss_scale != 1:
            metrics["optimizer/loss_scale"] = Max(loss_scale)
        if self.critic:
            metrics |= self.critic.step(made)
        self.updates += made
        self.dropped_in_a_row = 0 if made or self.optimizer.can_recover else self.dropped_in_a_row + 1
        if made and self.optimizer.lost is not None:
            metrics["optimizer/updates_lost"] = self.optimizer.lost
        times = {"time/exchange_s": Sum(exchanged - started), "time/optimizer_s": Sum(self._now() - exchanged)}
        return metrics | self.world.reduce(times)

    def _steer_beta(self, window: Window) -> dict[str, Metric]:
        """Move beta towards the KL that the config wants, for the next batch; what it was in this one."""
        if self.kl_control is None:
            return {}
        was = self.kl_control.beta
        if "policy/kl" in window.metrics:
            self.kl_control = self.kl_control.update(window.metrics["policy/kl"].value)
        return {"policy/beta": Max(was)}

    def renew_reference(self, before_step: int | None = None) -> None:
        """The reference moves to the current policy (an outer iteration of arXiv 2402.03300, algorithm 1), or towards it.

        Once before each step (from 0), however often that is begun: one that was abandoned begins again.
        """
        if before_step is not None and before_step <= self.renewed_before:
            return
        if self.moving_reference is not None:
            self.moving_reference.renew()
        self.renewed_before = before_step or self.renewed_before

    # What they share: which completions take part, this process's share of them, and its passes.

    def _counted(self, groups: Sequence[Group]) -> list[Member]:
        """All completions, but those that were cut where the config masks them."""
        masks = self.config.algorithm.mask_truncated
        return [(g, m) for g, m in everyone(groups) if groups[g].completions[m].stopped or not masks]

    def _taking_part(self, groups: Sequence[Group], known: StepAdvantages | None) -> tuple[list[Member], list[Member]]:
        """The completions that the loss is about, and those that are only scored, since their KL or values belong to what the
        others are compared with. ``known``: the advantages, where they are known before any pass.

        Groups without variance still matter to some uses of entropy, to a loss of the user's with such terms, and to a KL in the
        loss if the config says so."""
        kl, counted = self.config.algorithm.kl, self._counted(groups)
        if known is None:
            # A completion's own tokens are all that ``gae`` looks at; other functions compare completions.
            alone = self.config.algorithm.advantage.type == "gae"
            return counted, [] if alone else sorted(set(everyone(groups)).difference(counted))
        kl_on_all = self.objective.needs_reference and not (kl is None or kl.skip_zero_variance)
        if kl_on_all or self.objective.loss_concerns_all or self.entropy.concerns_all(groups):
            return counted, []
        teaching = known.teaching
        return [(g, m) for g, m in counted if g in teaching], []

    def counts(self, groups: Sequence[Group]) -> BatchCounts:
        """Completions and sampled tokens of a whole batch, those that passes skip included, but not the tokens of masked completions."""
        tokens = sum(groups[g].completions[m].sampled_tokens for g, m in self._counted(groups))
        return BatchCounts(len(everyone(groups)), max(1, tokens), self.config.rollout.max_completion_tokens)

    def window(
        self, groups: Sequence[Group], learnt: Sequence[Member] | None = None, scored_only: Sequence[Member] = ()
    ) -> Window:
        """This process's share of the batch, packed, with its weights in the loss. ``learnt``: completions that the loss is about, by
        default all; ``scored_only``: others."""
        learnt, counts = everyone(groups) if learnt is None else learnt, self.counts(groups)
        members = [*learnt, *scored_only]
        own = self._share(groups, members)
        batch = Batch.of(groups, [members[n] for n in own], self.scorer.device, sum(n < len(learnt) for n in own))
        batch.weights_T = self.objective.weights(batch.lengths_N, batch.sequence_T.cpu(), counts).to(self.scorer.device)
        if self.objective.needs_values:
            batch.value_weights_T = torch.full_like(batch.weights_T, 1 / counts.tokens)
        if self.config.clips_against_the_sampler:
            batch.old_logprobs_T = batch.sampler_logprobs_T
        return Window(groups, batch, self._cut(batch))

    def window_of(
        self, groups: Sequence[Group], members: Sequence[Member], weights_N: Tensor, advantages_N: Tensor, *, off_policy: bool
    ) -> Window:
        """This process's share of ``members``, scored by the reference: for callers that order the optimiser steps themselves.

        ``weights_N``: of each token of a completion in the loss. ``off_policy``: the weights will have moved before the window's first
        pass, so the policy's logprobs are taken down now, in one more pass; otherwise the ratio of that pass is 1 by definition. The KL
        must not be part of the reward.
        """
        assert self.objective.kl_in_loss, "a KL in the reward changes advantages: use learn"
        self._seed_noise(self.updates)
        own = self._share(groups, members)
        batch = Batch.of(groups, [members[n] for n in own], self.scorer.device)
        batch.weights_T, batch.advantages_T = batch.per_token(weights_N[own]), batch.per_token(advantages_N[own])
        window = Window(groups, batch, self._cut(batch))

        def passes() -> None:
            self._score_by_reference(window)
            if off_policy:
                with as_in_learning(self.scorer):
                    self._fill_columns(self.scorer, window, lambda m: {"old_logprobs_T": _logprobs(self.scorer, m)})

        self._attempt(passes, [window])
        return window

    def _share(self, groups: Sequence[Group], members: Sequence[Member]) -> list[int]:
        """Indices of the ``members`` that fall to this process: groups are assigned whole, by their tokens, which are known now."""
        tokens: dict[int, int] = {}
        for g, m in members:
            tokens[g] = tokens.get(g, len(groups[g].prompt.token_ids)) + len(groups[g].completions[m].token_ids)
        assigned = {list(tokens)[index] for index in self.world.assigned(list(tokens.values()))}
        return [n for n, (g, _) in enumerate(members) if g in assigned]

    def _cut(self, batch: Batch) -> list[MicroBatch]:
        return cut(batch, self.scorer, self.budget.tokens)

    def _attempt(self, passes: Callable[[], T], windows: Sequence[Window]) -> T:
        """``passes`` over the windows' micro-batches; where memory runs out, again over smaller ones."""

        def largest() -> int | None:
            several = [m.tokens for window in windows for m in window.micro_batches if len(m.rows) > 1]
            return max(several, default=None)

        def restart() -> None:
            self._clear()
            for window in windows:
                window.micro_batches[:] = self._cut(window.batch)

        return self.budget.attempt(passes, largest, restart)

    def _pass(self, micro_batch: MicroBatch, entropy: bool) -> Scored:
        keep_hidden = self.critic is not None and self.critic.reads_policy
        return self.scorer.score(micro_batch.packed, micro_batch.batch.temperature, entropy=entropy, keep_hidden=keep_hidden)

    @torch.no_grad()
    def entropies(self, window: Window) -> Tensor:
        """Entropy of the current policy at each token of ``window``, ``[T]`` in nats. A collective call."""
        with self.sharding.evened(self.scorer, len(window.micro_batches)):
            parts = [self._pass(micro_batch, entropy=True).entropy_T for micro_batch in window.micro_batches]
        return torch.cat([torch.zeros(0, device=self.scorer.device), *(part_T for part_T in parts if part_T is not None)])

    def _seed_noise(self, batch: int) -> None:
        """The dropout of an adapter is the same in all passes of a batch: a ratio of two masks would be noise."""
        seed_noise([self.scorer, self.optimizer], self.config.training.seed, batch)
        if self.critic is not None:
            seed_noise([self.critic.trunk, self.critic.optimizer], self.config.training.seed, batch, 1)

    def _clear(self) -> None:
        """Drop what has added up of an update's gradient."""
        self.optimizer.clear()
        if self.critic:
            self.critic.clear()

    def _now(self) -> float:
        """The clock, once what was launched is done: a GPU computes behind the launches."""
        wait_for(self.scorer.device)
        return time.perf_counter()


def _logprobs(scorer: Scorer, micro_batch: MicroBatch) -> Tensor:
    return scorer.logprobs(micro_batch.packed, micro_batch.batch.temperature)
