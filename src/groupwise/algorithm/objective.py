"""The objective of one run, put together: advantage x loss x aggregation x KL, and the loss of one micro-batch by it.

Axes: N completions in the micro-batch (whole ones), T their sampled tokens, flattened and ragged: there is no padding.
``sequence_T`` (long, not decreasing) gives the completion 0..N-1 of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from groupwise.algorithm.advantages import Advantage, AdvantageInputs, AdvantageOutputs, StepRewards, group_advantage
from groupwise.algorithm.aggregate import BatchCounts, at_least_fp32, segment_mean, token_weights
from groupwise.algorithm.correction import off_policy_mask
from groupwise.algorithm.kl import kl_per_token
from groupwise.algorithm.losses import Loss, LossInputs, LossOutputs, clip_loss, sequence_importance, token_ratio
from groupwise.algorithm.registry import find_advantage, find_loss, needs_of
from groupwise.config.schema import AlgorithmConfig
from groupwise.errors import ConfigError, TrainingError
from groupwise.metrics import Max, Mean, Metric, Min, Sum

__all__ = ["KL", "Objective", "policy_loss"]

_IMPORTANCE = {"token": token_ratio, "sequence": sequence_importance, "whole_sequence": sequence_importance}


@dataclass(frozen=True, slots=True)
class KL:
    """The KL to the reference: its weight, estimate and place."""

    beta: float = 0.04
    estimator: str = "k3"
    placement: Literal["loss", "reward", "token_reward"] = "loss"
    importance: str | None = None
    """In the loss: the level of the ratio that it is multiplied by, "token", "sequence" or "whole_sequence"; None: by none."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One method of the GRPO family as functions; see ``AlgorithmConfig`` for the settings they come from. The default is GRPO's."""

    advantage: Advantage = group_advantage
    """An ``Advantage``, its settings bound: called with ``AdvantageInputs`` alone."""
    loss: Loss = clip_loss
    """A ``Loss``, its settings bound: called with ``LossInputs`` alone."""
    aggregation: str = "sequence_mean"
    kl: KL | None = field(default_factory=KL)
    off_policy_limit: float | None = None
    """See ``correction.off_policy_mask``; None: nothing is left out."""
    off_policy_from_sampler: bool = False
    """Whether that goes by the sampler's log-probabilities, where they are known (no NaN), in place of the policy's before the first
    update."""
    correction_floor: float | None = None
    """``low`` of ``correction.sampler_correction``, where there is one."""

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> Objective:
        """Raises ConfigError for a function of the user's that cannot be loaded, or whose needs the config does not meet."""
        kl, loss, advantage = config.kl, config.loss, config.advantage
        importance = getattr(loss, "ratio", "token")
        made = cls(
            advantage=find_advantage(advantage.type, _keywords(advantage)),
            loss=find_loss(loss.type, _keywords(loss)),
            aggregation=loss.aggregation,
            kl=None if kl is None else KL(kl.beta, kl.estimator, kl.placement, importance if kl.importance_weighted else None),
        )
        if made.needs_values and config.value is None:
            raise ConfigError(
                f"algorithm.advantage.type is {advantage.type!r}, which needs values, but algorithm.value is null, so no value is learned: "
                "write algorithm.value={} for the defaults"
            )
        if config.value is not None and not made.needs_values:
            raise ConfigError(
                f"algorithm.value is set, but {advantage.type!r} does not ask for values: leave algorithm.value out, or declare "
                "@groupwise.algorithm.needs('values') over the function"
            )
        return made

    @property
    def beta(self) -> float:
        return 0.0 if self.kl is None else self.kl.beta

    @property
    def needs_reference(self) -> bool:
        """False without a KL, unless the loss reads the reference by itself: no reference model is loaded or run."""
        return self.beta > 0 or "reference" in needs_of(self.loss)

    @property
    def needs_values(self) -> bool:
        """True where a learned value is the baseline."""
        return "values" in needs_of(self.advantage)

    @property
    def needs_entropy(self) -> bool:
        return "entropy" in needs_of(self.loss)

    @property
    def loss_concerns_all(self) -> bool:
        """Whether the loss may have terms without an advantage, which completions with an advantage of 0 have too."""
        return bool(needs_of(self.loss) & {"entropy", "reference"})

    @property
    def kl_in_loss(self) -> bool:
        return self.kl is None or self.kl.placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """The trainer takes the KL of each completion off its reward before the advantages."""
        return self.beta > 0 and self.kl is not None and self.kl.placement == "reward"

    @property
    def kl_in_token_reward(self) -> bool:
        """The trainer passes ``kl.kl_penalty`` of each token to the advantages."""
        return self.beta > 0 and self.kl is not None and self.kl.placement == "token_reward"

    @property
    def advantages_need_passes(self) -> bool:
        """Whether rewards have the KL in them, or a learned value is the baseline: then advantages are known only after a pass."""
        return self.needs_values or self.kl_in_reward or self.kl_in_token_reward

    def advantages(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Advantages of all groups of the batch, before anything is left out. Raises TrainingError for what a user's function may not
        return."""
        steps = _Watched(inputs.steps)
        outputs = self.advantage(replace(inputs, steps=steps))
        rewarding = [name for name, given in inputs.steps.items() if len(given.rewards_K)]
        if rewarding and not steps.read:
            raise TrainingError(
                f"the advantage did not read inputs.steps, but {', '.join(rewarding)} rewarded steps, which would teach "
                "nothing: read them in the function, or give that reward a weight of 0"
            )
        _check_type(outputs, AdvantageOutputs, "advantage", "AdvantageOutputs(advantages_N=...)")
        _check_metrics(outputs.metrics, "advantage")
        completions, tokens = len(inputs.rewards_N), len(inputs.sequence_T)
        for name, count, each in (
            ("advantages_N", completions, "completions"), ("advantages_T", tokens, "tokens"), ("returns_T", tokens, "tokens"),
        ):  # fmt: skip
            _check_numbers(getattr(outputs, name), "advantage", name, count, each)
            _check_finite(getattr(outputs, name), name, inputs)
        if outputs.advantages_N is None and outputs.advantages_T is None:
            raise TrainingError(
                "the advantage returned neither advantages_N nor advantages_T, but there must be one: give a number for each completion, "
                "or for each token"
            )
        if self.needs_values and outputs.returns_T is None:
            raise TrainingError("the advantage needs values, but returned no returns_T, from which they are learned: return them")
        return outputs

    def weights(self, lengths_N: Tensor, sequence_T: Tensor, counts: BatchCounts, dtype: torch.dtype = torch.float32) -> Tensor:
        """``token_weights`` with this objective's aggregation."""
        return token_weights(lengths_N, sequence_T, self.aggregation, counts, dtype)


class _Watched(Mapping[str, StepRewards]):
    """Rewards of steps that know whether anybody looked at them."""

    def __init__(self, steps: Mapping[str, StepRewards]) -> None:
        self._steps, self.read = steps, False

    def __getitem__(self, name: str) -> StepRewards:
        self.read = True
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        self.read = True
        return iter(self._steps)

    def __len__(self) -> int:
        self.read = True
        return len(self._steps)


def _keywords(section: Any) -> dict[str, Any]:
    """A settings section's fields as keywords of the function that its ``type`` names."""
    fixed = {
        name: getattr(section, name) for name in type(section).model_fields if name not in ("type", "aggregation", "settings")
    }
    return fixed | dict(getattr(section, "settings", None) or {})


def policy_loss(
    objective: Objective,
    *,
    logprobs_T: Tensor,
    sequence_T: Tensor,
    weights_T: Tensor,
    old_logprobs_T: Tensor | None = None,
    advantages_N: Tensor | None = None,
    advantages_T: Tensor | None = None,
    reference_logprobs_T: Tensor | None = None,
    sampler_logprobs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    factor_T: Tensor | None = None,
    beta: float | None = None,
    completions: int | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """sum_t w_t (loss_t + beta KL_t) over a micro-batch, ready for ``backward``, and its metrics.

    The sum of this over all micro-batches is the batch's loss; with weights from ``token_weights`` nothing is divided again.
    With the default objective it is GRPO's, arXiv 2402.03300 eq. 3 and 4, with the sign turned.

    ``old_logprobs_T``: the ratio's denominator, as in ``LossInputs``; ``None`` means that the batch is on-policy (the ratio is then
    exactly 1). Exactly one of ``advantages_N`` (one per completion) and ``advantages_T`` (one per token) is given.
    ``reference_logprobs_T`` is needed only where the KL is in the loss and ``beta`` (by default the objective's) is above 0; given
    anyway, it is logged. ``factor_T`` multiplies the loss of the tokens, not the KL: ``correction.sampler_correction``, or a mask of
    tokens. ``completions`` is N, by default counted from the others. Half-precision logprobs are computed in fp32. The gradient flows
    into ``logprobs_T``, and into ``entropy_T`` where the loss reads it.

    The metrics: ``loss`` and its two parts ``loss_policy`` and ``loss_kl``, ``ratio`` and ``ratio_deviation_max``, ``entropy`` (nats a
    token, estimated from the sampled ones as the mean of -w log pi with their ratio w: also off-policy), ``clip_low`` and
    ``clip_high`` (shares of tokens clipped at ratios below 1 and from 1 on; ``clip_low_min`` and ``clip_high_max`` of completions), ``kl``
    (k3, nats a token) with a reference, ``kl_corrected`` where the KL is weighted, and the loss's own as ``loss/NAME``.

    Raises ``ValueError`` for a missing reference, ``TrainingError``
    for a loss that does not return one number per token.
    """
    beta = objective.beta if beta is None else beta
    kl_weight = beta if objective.kl_in_loss else 0.0
    if kl_weight and reference_logprobs_T is None:
        raise ValueError(
            f"beta is {beta} and the KL is in the loss, but there are no reference logprobs; pass them, or set algorithm.kl to null"
        )
    assert (advantages_N is None) != (advantages_T is None), "pass advantages_N or advantages_T"
    if completions is None:
        completions = len(advantages_N) if advantages_N is not None else int(sequence_T[-1]) + 1 if len(sequence_T) else 0
    logprobs_T = at_least_fp32(logprobs_T)
    old_logprobs_T = (logprobs_T if old_logprobs_T is None else old_logprobs_T).detach().to(logprobs_T.dtype)
    given_T = advantages_T if advantages_T is not None else advantages_N[sequence_T]  # type: ignore[index]
    advantages_T, weights_T = (x.detach().to(logprobs_T.dtype) for x in (given_T, weights_T))
    assert logprobs_T.shape == old_logprobs_T.shape == advantages_T.shape == weights_T.shape == sequence_T.shape, (
        "one value per token"
    )

    inputs = LossInputs(
        logprobs_T, old_logprobs_T, advantages_T, sequence_T, completions, sampler_logprobs_T, reference_logprobs_T, entropy_T
    )
    loss_T, ratio_T, clipped_T, more = _surrogate(objective, inputs, factor_T)
    loss = policy = (weights_T * loss_T).sum()
    corrected_T: Tensor | None = None
    if kl_weight:
        assert reference_logprobs_T is not None
        kl = objective.kl or KL(beta)
        kl_T = kl_per_token(logprobs_T, reference_logprobs_T, kl.estimator)
        if kl.importance is not None:
            kl_T = corrected_T = kl_T * _IMPORTANCE[kl.importance](logprobs_T, old_logprobs_T, sequence_T, completions)
        loss = policy + kl_weight * (weights_T * kl_T).sum()
    return loss, _metrics(loss, policy, inputs, ratio_T, clipped_T, corrected_T) | more


def _surrogate(
    objective: Objective, inputs: LossInputs, factor_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Metric]]:
    """The objective's loss of each token, times ``factor_T`` and without what is too far off-policy; the ratio; which tokens the loss
    clipped, all ``[T]``; and the loss function's own metrics."""
    outputs, about = objective.loss(inputs), (inputs.sequence_T, inputs.completions)
    _check_type(outputs, LossOutputs, "loss", "LossOutputs(loss_T)")
    _check_metrics(outputs.metrics, "loss")
    remedy = "leave sums and means to algorithm.loss.aggregation"
    for name in ("loss_T", "ratio_T", "clipped_T"):
        _check_numbers(getattr(outputs, name), "loss", name, len(inputs.logprobs_T), "tokens", remedy)
    ratio_T = token_ratio(inputs.logprobs_T, inputs.old_logprobs_T, *about) if outputs.ratio_T is None else outputs.ratio_T
    clipped_T = torch.zeros_like(inputs.logprobs_T, dtype=torch.bool) if outputs.clipped_T is None else outputs.clipped_T.bool()
    loss_T = outputs.loss_T
    if objective.off_policy_limit is not None:
        sampler_T, old_T = inputs.sampler_logprobs_T, inputs.old_logprobs_T
        if objective.off_policy_from_sampler and sampler_T is not None:
            old_T = torch.where(sampler_T.isnan(), old_T, sampler_T.to(old_T.dtype))
        kept_T = off_policy_mask(inputs.logprobs_T, old_T, inputs.advantages_T, *about, objective.off_policy_limit)
        loss_T = loss_T * kept_T.to(loss_T.dtype)
    if factor_T is not None:
        loss_T = loss_T * factor_T.detach().to(loss_T.dtype)
    return loss_T, ratio_T, clipped_T, {f"loss/{name}": number for name, number in outputs.metrics.items()}


def _check_type(outputs: object, wanted: type, what: str, remedy: str) -> None:
    if not isinstance(outputs, wanted):
        raise TrainingError(
            f"the {what} returned a {type(outputs).__name__}, but it must return {wanted.__name__}: return {remedy}"
        )


def _check_numbers(
    numbers: object, what: str, name: str, count: int, each: str, remedy: str = "return them in the order of the inputs"
) -> None:
    """Refuse what is not one number for each of ``count``; None is right for all but ``loss_T``: left out."""
    if (numbers is not None or name == "loss_T") and (not isinstance(numbers, Tensor) or numbers.shape != (count,)):
        got = f"a tensor of shape {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else f"a {type(numbers).__name__}"
        raise TrainingError(
            f"the {what} returned {got} as {name}, but it must return one number for each of the {count} {each}: {remedy}"
        )


def _check_finite(numbers: Tensor | None, name: str, inputs: AdvantageInputs) -> None:
    """Refuse what is not finite, unless what the advantage was given is not finite either: then a policy or a critic ran away,
    which ends in an update that is dropped."""
    given = (inputs.rewards_N, inputs.penalties_T, inputs.values_T)
    if numbers is None or numbers.isfinite().all() or not all(x is None or bool(x.isfinite().all()) for x in given):
        return
    at = int((~numbers.isfinite()).nonzero()[0])
    completion = at if name == "advantages_N" else int(inputs.sequence_T[at])
    raise TrainingError(
        f"the advantage returned {float(numbers[at])} in {name} for completion {completion} of the step, whose reward is "
        f"{float(inputs.rewards_N[completion]):g}, but all numbers must be finite: look for a division by 0, or a score of NaN"
    )


def _check_metrics(metrics: Mapping[str, object], what: str) -> None:
    for name, number in metrics.items():
        if not isinstance(number, Metric):
            raise TrainingError(
                f"the {what} returned a {type(number).__name__} as metric {name!r}, but a metric must know how it is reduced: "
                "wrap it, as in groupwise.metrics.Mean.of([...])"
            )


@torch.no_grad()
def _metrics(
    loss: Tensor, policy: Tensor, inputs: LossInputs, ratio_T: Tensor, clipped_T: Tensor, corrected_T: Tensor | None
) -> dict[str, Metric]:
    """Everything is stacked and read back at once, so that a GPU is waited for once. ``corrected_T``: the KL, where it is
    weighted."""
    logprobs_T, sequence_T, completions = inputs.logprobs_T, inputs.sequence_T, inputs.completions
    tokens, reference_logprobs_T = logprobs_T.numel(), inputs.reference_logprobs_T
    of_tokens_T = token_ratio(logprobs_T, inputs.old_logprobs_T, sequence_T, completions)
    low_T, high_T = (clipped_T & side_T for side_T in (ratio_T < 1, ratio_T >= 1))

    def mean(total: float) -> Mean:
        return Mean(total, tokens)

    numbers: dict[str, tuple[Callable[[float], Metric], Tensor]] = {
        "loss": (Sum, loss),
        "loss_policy": (Sum, policy),
        "ratio": (mean, ratio_T.sum()),
        "ratio_deviation_max": (Max, (ratio_T - 1).abs().max() if tokens else ratio_T.new_zeros(())),
        "entropy": (mean, -(of_tokens_T * logprobs_T).sum()),
        "clip_low": (mean, low_T.sum()),
        "clip_high": (mean, high_T.sum()),
    }
    if completions:
        low_N, high_N = (segment_mean(x_T.to(logprobs_T.dtype), sequence_T, completions) for x_T in (low_T, high_T))
        numbers |= {"clip_low_min": (Min, low_N.min()), "clip_high_max": (Max, high_N.max())}
    if reference_logprobs_T is not None:
        numbers["kl"] = mean, kl_per_token(logprobs_T, reference_logprobs_T, "k3").sum()
    if corrected_T is not None:
        numbers["kl_corrected"] = mean, corrected_T.sum()
    read = torch.stack([x.to(logprobs_T.dtype) for _, x in numbers.values()]).tolist()
    metrics = {name: kind(x) for (name, (kind, _)), x in zip(numbers.items(), read, strict=True)}
    return metrics | {"loss_kl": Sum(read[0] - read[1])}
