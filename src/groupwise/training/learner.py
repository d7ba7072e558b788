"""The update: from scored groups to new weights. mu optimiser steps on one batch, each the sum of its micro-batches.

Axes: N completions and T tokens of a micro-batch, as in ``algorithm``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from groupwise.algorithm import (
    AdaptiveKL,
    AdvantageInputs,
    AdvantageOutputs,
    BatchCounts,
    Objective,
    policy_loss,
    sampler_correction,
)
from groupwise.batch import Batch, Member, tokens_of
from groupwise.config.algorithm import CorrectionConfig
from groupwise.config.schema import Config
from groupwise.distributed import World
from groupwise.metrics import Max, Mean, Metric, Sum, merge
from groupwise.models.logprobs import Scored
from groupwise.models.scorer import Scorer, as_in_learning
from groupwise.training.advantages import Advantages, advantage_inputs, by_group, teaching
from groupwise.training.critic import make_critic
from groupwise.training.microbatches import MicroBatch, PassBudget, cut, largest_divisible
from groupwise.training.optimizer import learning_rate_at
from groupwise.training.reference import Reference
from groupwise.training.seeds import seed_noise
from groupwise.training.sharding import Replicas, Sharding
from groupwise.training.window import Paused, Stateful, Window
from groupwise.types import Group

__all__ = ["Advantages", "Learner", "Learnt", "MicroBatch", "Paused", "Stateful", "Sweep"]

T = TypeVar("T")
HeldState = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""The state of a batch whose updates are not all made, as `Window.state` gives it."""

_BONUS = "policy/entropy_bonus"
_BY_UPDATE = ("policy/loss", "policy/ratio", "policy/clip_share", "policy/kl", "optimizer/grad_norm")
"""Shown of each update too, where a batch has several: the first is at ratio 1, and a mean over all hides what the last did."""
_DETAILS = ("clip_low", "clip_high", "clip_low_least", "clip_high_most", "kl_corrected")


class Learnt(NamedTuple):
    """What learning from a batch came to."""

    advantages: Advantages
    metrics: dict[str, Metric]


class Sweep(NamedTuple):
    """The passes over all completions of a window."""

    window: Window
    first: bool
    """Whether they are swept for the first time, so that the sampler's mismatch can be measured."""
    scale: float = 1.0
    """Multiplies their loss."""


class Learner:
    """Holds what learning needs beside the policy: optimiser, reference, critic, and the count of updates."""

    def __init__(
        self, scorer: Scorer, config: Config, optimizer: Any = None, world: World | None = None, sharding: Sharding | None = None,
        budget: PassBudget | None = None, objective: Objective | None = None,
    ) -> None:  # fmt: skip
        """``optimizer``: another one than AdamW with masters, with the same methods, over the scorer's parameters.

        ``world``: the processes that divide the passes among them; each makes the same updates. ``sharding``: what else they divide.
        ``budget``: one that passes before the first step may have halved. ``objective``: another one than the config's.
        """
        self.scorer, self.config, self.world = scorer, config, world or World()
        self.objective = objective or Objective.from_config(config.algorithm)
        self.sharding = sharding or Replicas(scorer, self.world)
        self.optimizer = self.sharding.make_optimizer(config.optimizer) if optimizer is None else optimizer
        kl = config.algorithm.kl
        self.moving_reference = (
            Reference(
                scorer,
                1.0 if kl is None else kl.reference_mixing,
                offload=config.training.offload_reference and scorer.device.type != "cpu",
                copied=self.sharding.make_reference,
            )
            if self.objective.needs_reference
            else None
        )
        self.critic = make_critic(scorer, config) if self.objective.needs_values else None
        self.kl_control = None if kl is None or kl.target is None else AdaptiveKL(self.objective.beta, kl.target, kl.gain)
        self.parts: dict[str, Stateful] = {}
        self.budget = budget or PassBudget(config.training.micro_batch_tokens, fixed=self.sharding.divides_weights)
        self.updates = 0
        """That were made."""
        self.place = 0
        """Index of the next update, counted as if every batch had something to teach: what the learning rate's schedule goes by."""
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

    def renew_reference(self, before_step: int | None = None) -> None:
        """The reference moves to the current policy (an outer iteration of arXiv 2402.03300, algorithm 1), or towards it.

        Once before each step (from 0), however often that is begun: one that was abandoned begins again.
        """
        if before_step is not None and before_step <= self.renewed_before:
            return
        if self.moving_reference is not None:
            self.moving_reference.renew()
        self.renewed_before = before_step or self.renewed_before

    # One batch: advantages, what must be known before the first update, and its updates.

    @overload
    def learn(self, groups: Sequence[Group], *, step: int | None = None, held: HeldState | None = None) -> Learnt: ...

    @overload
    def learn(
        self, groups: Sequence[Group], *, step: int | None = None, stop: Callable[[], bool], held: HeldState | None = None,
        within: bool = False,
    ) -> Learnt | Paused: ...  # fmt: skip

    def learn(
        self,
        groups: Sequence[Group],
        *,
        step: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        held: HeldState | None = None,
        within: bool = False,
    ) -> Learnt | Paused:
        """``updates_per_batch`` optimiser steps on ``groups``. Returns the advantages, by group, and metrics.

        Advantages and denominators are those of all ``groups``. Groups whose advantages are all 0 (under a group baseline: those
        without variance) then take no part in the passes, unless the config wants their KL or a value learns from them. A batch that
        has nothing to teach makes no optimiser step.

        ``step``: which of the run's it is, from 0; by itself the one after the last.

        ``stop`` is asked between two updates, and with ``within`` between the passes of one; where it says yes, ``Paused`` is returned
        with the rest to be done later, and the gradient of an update that was under way is dropped. ``held`` is the state of its window:
        the same ``groups`` are then resumed.
        """
        updates = self.config.algorithm.updates_per_batch
        step = self.place // updates if step is None else step
        self.place, self.token_advantages = (step + 1) * updates, {}
        halvings = self.budget.halvings
        inputs = advantage_inputs(groups, self.objective)
        early = None if self._advantages_need_passes else self.objective.advantages(inputs)
        learnt = self._taking_part(groups, inputs, early)
        if not learnt:
            nothing = [[0.0] * len(group.completions) for group in groups]
            return Learnt(nothing if early is None else by_group(inputs, early), {})
        self._seed_noise(step)
        window = self.window(groups, learnt, with_judged=held is None)
        if held is None:
            self._open(window, learnt, inputs, early)
        else:
            window.restore(*held)
        self.entropy_bonus = next((m[_BONUS].value for m in window.found if _BONUS in m), 0.0) or None
        while window.updates < updates:
            self.place = step * updates + window.updates
            if not self._update(window, stop if within else lambda: False):
                return Paused(window)
            self.place += 1
            if window.updates < updates and stop():
                return Paused(window)
        self._keep_token_advantages(window)
        metrics = merge(window.found) | {"optimizer/learning_rate": window.found[-1]["optimizer/learning_rate"]}
        metrics |= self.world.reduce({"memory/halvings": Sum(self.budget.halvings - halvings)})
        return Learnt(window.advantages, metrics | self._steer(metrics))

    def _taking_part(self, groups: Sequence[Group], inputs: AdvantageInputs, early: AdvantageOutputs | None) -> list[Member]:
        """The completions that the loss is about. ``early``: the advantages, where they are known before any pass."""
        taught = [True] * len(groups) if early is None or self._keeps_all(groups) else teaching(inputs, early)
        return [(g, m) for g, m in _everyone(groups) if taught[g] and self._counts(groups, (g, m))]

    def _open(self, window: Window, learnt: list[Member], inputs: AdvantageInputs, early: AdvantageOutputs | None) -> None:
        """Find out what must be known of a batch before its first update: reference, values, and with them the advantages."""
        groups, batch = window.groups, window.batch
        passes = self._attempt(
            lambda: merge([self._score_reference(window.micro_batches), self._look_ahead(window.micro_batches)]), [window]
        )
        window.found += [self.world.reduce(passes), self._mask_by_entropy(window, learnt), self._choose_bonus(window)]
        if early is None:
            part = [self._counts(groups, member) for member in _everyone(groups)]
            inputs = advantage_inputs(groups, self.objective, taking_part=part, batch=batch, beta=self.beta, world=self.world)
            early = self.objective.advantages(inputs)
        places = tokens_of(groups, batch.members)
        batch.advantages_T = early.per_token(inputs)[places].float().to(self.scorer.device)
        if early.returns_T is not None:
            batch.returns_T = early.returns_T[places].float().to(self.scorer.device)
        window.advantages = by_group(inputs, early)
        window.found.append(dict(early.metrics))
        if batch.learnt < len(batch):  # the others were only scored
            window.batch = batch.view(range(batch.learnt))
            window.micro_batches = self._cut(window.batch)

    def _update(self, window: Window, stop: Callable[[], bool]) -> bool:
        """One optimiser step; False, and no gradient, where ``stop`` said so between two passes."""
        passes = self.accumulate([Sweep(window, window.updates == 0)], stop)
        if passes is None:
            return False
        for name in ("policy/loss", "value/loss"):
            if name in passes:
                passes[name] = Mean(passes[name].value, 1)  # summed over micro-batches, averaged over updates
        made = {k: v for k, v in passes.items() if not k.startswith("detail/")} | self.step()
        window.updates += 1
        if self.config.algorithm.updates_per_batch > 1:
            made |= {f"updates/{k.partition('/')[2]}_{window.updates}": made[k] for k in _BY_UPDATE if k in made}
        window.found.append(made)
        return True

    @property
    def _advantages_need_passes(self) -> bool:
        """Whether the rewards have the KL in them, or a learned value is the baseline."""
        return self._kl_in_reward or self.critic is not None

    @property
    def _kl_in_reward(self) -> bool:
        """A completion's, or each token's."""
        return self.objective.kl_in_reward or self.objective.kl_in_token_reward

    def _keeps_all(self, groups: Sequence[Group]) -> bool:
        """Groups without variance still matter to an entropy bonus, to which of the batch's tokens have most entropy, and to a KL in the
        loss if the config says so."""
        kl, entropy = self.config.algorithm.kl, self.config.algorithm.entropy
        in_loss = self.objective.needs_reference and not (kl is None or kl.skip_zero_variance)
        return in_loss or (entropy is not None and entropy.top_share < 1) or self._bonus_may_act(groups)

    def _counts(self, groups: Sequence[Group], member: Member) -> bool:
        """Whether the loss is about a completion, as far as the config masks those that were cut."""
        group, index = member
        return groups[group].completions[index].stopped or not self.config.algorithm.mask_truncated

    def counts(self, groups: Sequence[Group]) -> BatchCounts:
        """Completions and sampled tokens of a whole batch, those that passes skip included, but not the tokens of masked completions."""
        everyone = _everyone(groups)
        tokens = sum(groups[g].completions[m].sampled_tokens for g, m in everyone if self._counts(groups, (g, m)))
        return BatchCounts(len(everyone), max(1, tokens), self.config.rollout.max_completion_tokens)

    def window(self, groups: Sequence[Group], learnt: list[Member] | None = None, with_judged: bool = False) -> Window:
        """This process's share of the batch, packed. ``with_judged``: also of completions that the loss leaves out, where their KL is part
        of the reward that the others are compared with."""
        learnt, judged = _everyone(groups) if learnt is None else learnt, []
        if with_judged and self._kl_in_reward and self.critic is None:
            judged = [member for member in _everyone(groups) if not self._counts(groups, member)]
        own = self._own(groups, [*learnt, *judged])
        batch = self._batch(groups, [m for m in learnt if m[0] in own], self.counts(groups), [m for m in judged if m[0] in own])
        if self.config.clips_against_the_sampler:
            batch.old_T = batch.sampler_logprobs_T
        return Window(groups, batch, self._cut(batch))

    def _own(self, groups: Sequence[Group], members: list[Member]) -> set[int]:
        """The groups whose passes fall to this process: they are dealt whole, by their tokens, which are known now."""
        tokens: dict[int, int] = {}
        for g, m in members:
            tokens[g] = tokens.get(g, len(groups[g].prompt.token_ids)) + len(groups[g].completions[m].token_ids)
        taking = list(tokens)
        return {taking[place] for place in self.world.assigned(list(tokens.values()))}

    def _batch(
        self, groups: Sequence[Group], learnt: list[Member], counts: BatchCounts, judged: list[Member] | None = None
    ) -> Batch:
        """The record of some completions, with their weights in the loss."""
        batch = Batch.of(groups, [*learnt, *(judged or [])], self.scorer.device, len(learnt))
        sequence_T = batch.sequence_T.cpu()
        batch.weights_T = self.objective.weights(batch.length_N, sequence_T, counts).to(self.scorer.device)
        if self.objective.needs_values:
            batch.value_weights_T = torch.full_like(batch.weights_T, 1 / counts.tokens)
        return batch

    def _cut(self, batch: Batch, rows: range | None = None) -> list[MicroBatch]:
        out = cut(batch, range(len(batch)) if rows is None else rows, self.scorer, self.budget.tokens)
        if self.critic:
            self.critic.pack(out, self.scorer)
        return out

    def _keep_token_advantages(self, window: Window) -> None:
        """For the record, where tokens of one completion differ."""
        assert window.batch.advantages_T is not None
        pieces = window.batch.by_member(window.batch.advantages_T)
        logged = {member: piece.tolist() for member, piece in pieces if member[0] < self.config.output.log_tokens}
        differing = {member: numbers for member, numbers in logged.items() if len(set(numbers)) > 1}
        self.token_advantages = {
            member: numbers for part in self.world.all_gather_object(differing) for member, numbers in part.items()
        }

    # Passes.

    def _attempt(self, passes: Callable[[], T], windows: Sequence[Window]) -> T:
        """``passes`` over the windows' micro-batches; where memory runs out, again over smaller ones."""

        def restart() -> None:
            self._clear()
            for window in windows:
                window.micro_batches[:] = self._cut(window.batch)

        return self.budget.attempt(passes, lambda: largest_divisible([m for w in windows for m in w.micro_batches]), restart)

    def window_of(
        self, groups: Sequence[Group], members: Sequence[Member], weights_N: Tensor, advantages_N: Tensor, *, off_policy: bool
    ) -> Window:
        """This process's share of ``members``, scored by the reference: for callers that order the optimiser steps themselves.

        ``weights_N``: of each token of a completion in the loss. ``off_policy``: the weights will have moved before the window's first
        sweep, so the policy's logprobs are taken down now, in one more pass; otherwise that sweep's ratio is 1 by definition. The KL
        must not be part of the reward.
        """
        assert self.objective.kl_in_loss, "a KL in the reward changes advantages: use learn"
        self._seed_noise(self.updates)
        own = self._own(groups, list(members))
        rows = [row for row, (group, _) in enumerate(members) if group in own]
        batch = Batch.of(groups, [members[row] for row in rows], self.scorer.device)
        sequence_T = batch.sequence_T
        batch.weights_T = weights_N[rows].to(sequence_T.device)[sequence_T]
        batch.advantages_T = advantages_N[rows].to(sequence_T.device)[sequence_T]
        window = Window(groups, batch, self._cut(batch))

        @torch.no_grad()
        def passes() -> None:
            self._score_reference(window.micro_batches)
            if not off_policy:
                return
            with as_in_learning(self.scorer), self.sharding.evened(self.scorer, len(window.micro_batches)):
                for micro_batch in window.micro_batches:
                    micro_batch.note(old_T=self.scorer.logprobs(micro_batch.packed, batch.temperature))

        self._attempt(passes, [window])
        return window

    def accumulate(self, sweeps: Sequence[Sweep], stop: Callable[[], bool] = lambda: False) -> dict[str, Metric] | None:
        """For all processes at once: add the gradients of ``sweeps`` to what the next ``step`` takes. Their losses are summed, not
        averaged.

        Without gradients switched on (``torch.no_grad``) only the numbers are computed. ``stop`` is asked before each pass; where it
        says yes, all gradients are dropped and None is returned. Names that begin with ``detail/`` are for callers, not for the records.
        """
        found = self._attempt(lambda: self._sweep_all(sweeps, stop), [sweep.window for sweep in sweeps])
        return None if found is None else self.world.reduce(found)

    def _sweep_all(self, sweeps: Sequence[Sweep], stop: Callable[[], bool]) -> dict[str, Metric] | None:
        started = time.perf_counter()
        parts: list[dict[str, Metric]] = []
        for window, first, scale in sweeps:
            with self.sharding.evened(self.scorer, len(window.micro_batches)):
                for micro_batch in window.micro_batches:
                    if stop():
                        self._clear()
                        return None
                    parts.append(self._backward(micro_batch, first, scale))
        for micro_batch in (m for sweep in sweeps for m in sweep.window.micro_batches):
            if micro_batch.pending:
                micro_batch.note(**micro_batch.pending)
                micro_batch.pending.clear()
        return merge(parts) | {"time/learn_s": Sum(time.perf_counter() - started)}

    def _backward(self, micro_batch: MicroBatch, first: bool, scale: float) -> dict[str, Metric]:
        """Add one micro-batch's gradient. The first update's ratio is exactly 1, and no old pass is needed: the samples are on-policy,
        or weighted as such; unless the config wants the ratio to the sampler."""
        view = micro_batch.view
        scored = self._score(micro_batch, entropy=self.entropy_bonus is not None or self.objective.needs_entropy)
        logprobs, tokens = scored.logprobs_T, len(scored.logprobs_T)
        metrics = self._note_first_sweep(micro_batch, view, logprobs.detach()) if first else {}
        view.correction_T = micro_batch.pending.get("correction_T", view.correction_T)
        loss, numbers = policy_loss(
            self.objective,
            logprobs_T=logprobs,
            sequence_T=micro_batch.packed.sequence_T,
            weights_T=view.weights_T * scale,
            old_logprobs_T=view.old_T,
            advantages_T=view.advantages_T,
            reference_logprobs_T=view.reference_T,
            sampler_logprobs_T=view.sampler_logprobs_T,
            entropy_T=scored.entropy_T,
            factor_T=view.factor_T,
            beta=self.beta,
            completions=len(view),
        )
        metrics |= {"policy/loss": numbers["loss"], "policy/ratio_deviation": numbers["ratio_deviation_max"]}
        metrics["policy/ratio"] = numbers["ratio"]
        metrics["policy/clip_share"] = Mean(numbers["clip_low"].total + numbers["clip_high"].total, tokens)  # type: ignore[union-attr]
        metrics |= {f"detail/{name}": numbers[name] for name in _DETAILS if name in numbers}
        metrics |= {name: number for name, number in numbers.items() if name.startswith("loss/")}
        if "kl" in numbers:
            metrics["policy/kl"] = numbers["kl"]
        if scored.entropy_T is not None and self.entropy_bonus is not None:
            weights_T = view.weights_T if view.entropy_weights_T is None else view.entropy_weights_T
            weighted = (weights_T * scored.entropy_T).sum()
            loss = loss - self.entropy_bonus * scale * weighted
            metrics["detail/entropy_bonus"] = Sum(self.entropy_bonus * scale * float(weighted.detach()))
            metrics["policy/full_entropy"] = Mean(float(scored.entropy_T.detach().sum()), tokens)
            if view.mask_T is not None:
                metrics["detail/entropy_kept"] = Mean(
                    float((view.mask_T * scored.entropy_T.detach()).sum()), float(view.mask_T.sum())
                )
        if self.critic and self._value_on_policy:
            value_part, of_value = self.critic.loss_of(micro_batch, scored)
            loss, metrics = loss + scale * value_part, metrics | of_value
        if torch.is_grad_enabled():
            loss_scale = self.optimizer.loss_scale
            self.sharding.backward(loss if loss_scale == 1 else loss * loss_scale)
        if self.critic and not self._value_on_policy:  # only now: the policy's activations are free again
            value_part, of_value = self.critic.loss_of(micro_batch, None)
            metrics |= of_value
            if torch.is_grad_enabled():
                (scale * self.critic.loss_scale * value_part).backward()
        return metrics

    def _note_first_sweep(self, micro_batch: MicroBatch, view: Batch, taken_T: Tensor) -> dict[str, Metric]:
        """Measure the sampler's mismatch, and keep for later updates what the policy said at the first (``taken_T``, in nats)."""
        tokens = len(taken_T)
        metrics: dict[str, Metric] = {
            "policy/sampler_mismatch": Mean(float((taken_T - view.sampler_logprobs_T).abs().sum()), tokens),
            "policy/entropy": Mean(-float(taken_T.sum()), tokens),
            "speed/learnt_tokens": Sum(tokens),
        }
        level, correction = self.config.correction_level, self.config.algorithm.correction or CorrectionConfig()
        if level != "none":
            micro_batch.pending["correction_T"], numbers = sampler_correction(
                taken_T if view.old_T is None else view.old_T, view.sampler_logprobs_T, micro_batch.packed.sequence_T, len(view),
                level=level, mode=correction.mode, high=correction.cap,
            )  # fmt: skip
            metrics |= {f"policy/{name}": number for name, number in numbers.items()}
        if self.config.algorithm.updates_per_batch > 1 and view.old_T is None:
            micro_batch.pending["old_T"] = taken_T
        return metrics

    def _score(self, micro_batch: MicroBatch, entropy: bool) -> Scored:
        return self.scorer.score(
            micro_batch.packed, micro_batch.batch.temperature, entropy=entropy, keep_hidden=self._value_on_policy
        )

    @torch.no_grad()
    def _score_reference(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Metric]:
        if self.moving_reference is None:
            return {}
        started = time.perf_counter()
        with self.moving_reference.present() as reference, self.sharding.evened(reference, len(micro_batches)):
            for micro_batch in micro_batches:
                micro_batch.note(reference_T=reference.logprobs(micro_batch.packed, micro_batch.batch.temperature))
        return {"time/reference_s": Sum(time.perf_counter() - started)}

    @torch.no_grad()
    def _look_ahead(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Metric]:
        """Note what must be known before the first gradient: values, entropies where tokens are chosen by them, and the policy's own
        logprobs where the sampler's are others and something asks for them."""
        chosen, own = self._chooses_tokens, self._asks_for_own
        if self.critic is None and not chosen and not own:
            return {}
        started = time.perf_counter()
        by_policy = self._value_on_policy or chosen or own
        with self.sharding.evened(self.scorer, len(micro_batches) if by_policy else 0):
            for micro_batch in micro_batches:
                in_loss = micro_batch.rows.start < micro_batch.batch.learnt  # the others are only scored
                scored = self._score(micro_batch, entropy=chosen and in_loss) if by_policy else None
                if self.critic:
                    micro_batch.note(values_T=self.critic.value_of(micro_batch, scored))
                if scored is not None and scored.entropy_T is not None:
                    micro_batch.note(entropy_T=scored.entropy_T)
                if scored is not None and own:
                    micro_batch.note(policy_T=scored.logprobs_T)
        return {"time/learn_s": Sum(time.perf_counter() - started)}

    @torch.no_grad()
    def entropies(self, window: Window) -> Tensor:
        """For all processes at once: the entropy of the current policy at each token of ``window``, ``[T]`` in nats."""
        with self.sharding.evened(self.scorer, len(window.micro_batches)):
            scored = [self._score(micro_batch, entropy=True) for micro_batch in window.micro_batches]
        found = [one.entropy_T for one in scored if one.entropy_T is not None]
        return torch.cat(found) if found else torch.zeros(0, device=self.scorer.device)

    # Entropy and KL.

    @property
    def _chooses_tokens(self) -> bool:
        entropy = self.config.algorithm.entropy
        return entropy is not None and entropy.top_share < 1

    @property
    def _asks_for_own(self) -> bool:
        """Whether a batch is opened with the policy's own logprobs: a KL or a floor wants them, and those of the sampler are others."""
        entropy = self.config.algorithm.entropy
        wanted = self._kl_in_reward or (entropy is not None and entropy.floor is not None)
        return wanted and not self.config.samples_are_the_policys

    def _mask_by_entropy(self, window: Window, learnt: list[Member]) -> dict[str, Metric]:
        """For all processes at once: leave all but the configured share of the step's tokens, those of most entropy, out of the loss."""
        entropy, batch = self.config.algorithm.entropy, window.batch
        if entropy is None or not self._chooses_tokens:
            return {}
        groups, tokens = window.groups, sum(c.sampled_tokens for group in window.groups for c in group.completions)
        own_T = torch.zeros(len(batch.weights_T)) if batch.entropy_T is None else batch.entropy_T
        everywhere = self.world.assemble(own_T, tokens_of(groups, batch.members), tokens)[tokens_of(groups, learnt)]
        ordered = everywhere.sort(descending=True).values
        threshold = float(ordered[max(1, math.ceil(entropy.top_share * len(ordered))) - 1])
        batch.mask_T, batch.entropy_T = (own_T >= threshold).float().to(self.scorer.device), None
        return {"policy/tokens_kept": Mean(float((everywhere >= threshold).sum()), len(everywhere))}

    def _bonus_may_act(self, groups: Sequence[Group]) -> bool:
        """As far as the samples say. Where their logprobs are not the policy's, the floor is looked at after a pass of its own."""
        entropy = self.config.algorithm.entropy
        if entropy is None or entropy.bonus == 0:
            return False
        if entropy.floor is None or not self.config.samples_are_the_policys:
            return True
        everything = [c for group in groups for c in group.completions]
        return (
            Mean(-math.fsum(x for c in everything for x in c.logprobs), sum(c.sampled_tokens for c in everything)).value
            < entropy.floor
        )

    def _choose_bonus(self, window: Window) -> dict[str, Metric]:
        """The entropy bonus of this batch, by the entropy that its tokens show: the same however the batch is cut."""
        entropy = self.config.algorithm.entropy
        if entropy is None or entropy.bonus == 0:
            return {}
        acts = self._bonus_may_act(window.groups)
        if acts and entropy.floor is not None and not self.config.samples_are_the_policys:
            own_T = window.batch.own_T[window.batch.tokens(range(window.batch.learnt))]
            acts = self.world.reduce({"own": Mean(-float(own_T.double().sum()), len(own_T))})["own"].value < entropy.floor
        return {_BONUS: Max(entropy.bonus if acts else 0.0)}

    def _steer(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        if self.kl_control is None:
            return {}
        used = self.kl_control.beta
        if "policy/kl" in metrics:
            self.kl_control = self.kl_control.update(metrics["policy/kl"].value)
        return {"policy/beta": Max(used)}

    # The optimiser step.

    def step(self, rate: float | None = None) -> dict[str, Metric]:
        """One optimiser step on the gradients that have added up; ``rate``: another learning rate than the config's schedule has."""
        started = time.perf_counter()
        if rate is None:
            rate = learning_rate_at(self.config.optimizer, self.place, self.config.optimizer_steps, self.updates)
        exchange = self._exchange_gradients()
        metrics = dict(exchange)
        if self.optimizer.loss_scale != 1:
            metrics["optimizer/loss_scale"] = Max(self.optimizer.loss_scale)
        norm, made = self.optimizer.step(rate)
        if self.critic:
            self.critic.step(made)
            if not self._value_on_policy:
                metrics["value/grad_norm"] = Max(self.critic.grad_norm)
        self.updates += made
        self.dropped_in_a_row = 0 if made or self.optimizer.can_recover else self.dropped_in_a_row + 1
        if made and self.optimizer.lost is not None:
            metrics["optimizer/updates_lost"] = self.optimizer.lost
        return metrics | {
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

    @property
    def _value_on_policy(self) -> bool:
        """Whether the value reads the policy's own states."""
        return self.critic is not None and self.critic.trunk is None


def _everyone(groups: Sequence[Group]) -> list[Member]:
    return [(g, m) for g, group in enumerate(groups) for m in range(len(group.completions))]
