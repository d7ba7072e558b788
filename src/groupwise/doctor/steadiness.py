"""Rules about the update: KL, ratio, gradients, and whether steps are of a size that the numbers can hold."""

from __future__ import annotations

import math

from groupwise.doctor.examples import completions_between, three
from groupwise.doctor.findings import Evidence
from groupwise.doctor.windows import mean, median, series, worst_stretch
from groupwise.tracking.reading import RunRecord

__all__ = [
    "first_loss_is_zero",
    "kl_above_band",
    "kl_below_band",
    "negative_kl",
    "no_movement",
    "not_finite",
    "ratio_off",
    "spikes",
    "updates_lost",
]

KL_BAND = (0.05, 0.1)
"""Nats per token: what published GRPO runs with a KL term settle in."""
MANY = 10


def kl_above_band(run: RunRecord) -> Evidence | None:
    kl = series(run, "policy/kl")
    if len(kl) < 5 or kl.late <= KL_BAND[1]:
        return None
    first = next(step for step, value in kl.points if value > KL_BAND[1])
    return Evidence(
        f"the KL from the reference is {kl.late:.3g} nats per token at the end, above the band of {KL_BAND[0]} to {KL_BAND[1]}; it "
        f"first passed {KL_BAND[1]} at step {first}",
        (first, kl.steps[-1]),
        {"kl_late": kl.late, "kl_max": max(kl.values)},
        three(completions_between(run, kl.late_steps)),
        "critical" if kl.late > 10 * KL_BAND[1] else None,
    )


def kl_below_band(run: RunRecord) -> Evidence | None:
    """Below the band is where every run begins, and no matter while the reward rises; held there the KL penalty is too strong."""
    kl, reward = series(run, "policy/kl"), series(run, "reward/mean")
    if len(kl) < 30 or not 1e-7 < kl.late < KL_BAND[0] or reward.rises() or already_good(run):
        return None
    return Evidence(
        f"after {len(kl)} steps the KL from the reference is {kl.late:.3g} nats per token, below the band of {KL_BAND[0]} to "
        f"{KL_BAND[1]}, and the reward does not rise ({reward.early:.3g} to {reward.late:.3g})",
        kl.late_steps,
        {"kl_late": kl.late, "reward_early": reward.early, "reward_late": reward.late},
        three(completions_between(run, kl.late_steps)),
    )


def already_good(run: RunRecord) -> bool:
    accuracy = series(run, "accuracy/strict")
    return bool(len(accuracy)) and accuracy.late >= 0.8


def negative_kl(run: RunRecord) -> Evidence | None:
    kl = series(run, "policy/kl")
    below = [(step, value) for step, value in kl.points if value < -1e-6]
    if not below:
        return None
    return Evidence(
        f"the KL from the reference was negative in {len(below)} of {len(kl)} steps, {min(v for _, v in below):.3g} at the lowest; "
        "the k3 estimate that is logged cannot be",
        (below[0][0], below[-1][0]),
        {"kl_min": min(v for _, v in below)},
        three(completions_between(run, (below[0][0], below[0][0]))),
    )


def ratio_off(run: RunRecord) -> Evidence | None:
    """On-policy the ratio is 1 by definition; off-policy a clip that acts on many tokens means that steps are too large."""
    deviation, clipped = series(run, "policy/ratio_deviation"), series(run, "policy/clip_share")
    updates = run.config.algorithm.updates_per_batch if run.config and not run.config.clips_against_the_sampler else None
    off = [(step, value) for step, value in deviation.points if value > 1e-3]
    if updates == 1 and off:
        return Evidence(
            f"the ratio differed from 1 by up to {max(v for _, v in off):.3g} in {len(off)} steps, although every batch is learnt "
            "from once, by the weights that sampled it",
            (off[0][0], off[-1][0]),
            {"deviation_max": max(v for _, v in off)},
            three(completions_between(run, (off[0][0], off[-1][0]))),
            severity="critical",
        )
    worst = worst_stretch(clipped, min(MANY, len(clipped))) if updates != 1 and len(clipped) >= 3 else None
    if worst is None or worst[0] <= 0.3:
        return None
    return Evidence(
        f"in steps {worst[1][0]} to {worst[1][1]} the clip cut off {worst[0]:.0%} of the tokens, and the ratio was off 1 by up to "
        f"{max(deviation.values, default=0.0):.3g}",
        worst[1],
        {"clip_share": worst[0], "deviation_max": max(deviation.values, default=0.0)},
        three(completions_between(run, worst[1])),
    )


def not_finite(run: RunRecord) -> Evidence | None:
    """A metric that was logged and is no number, or an update that was dropped for it."""
    names = ("policy/loss", "optimizer/grad_norm", "reward/mean")
    steps, seen = set(), set()
    for row in run.steps:
        bad = [name for name in names if name in row and row[name] is None]
        if "reward/mean" in bad and not row.get("completions/tokens_max"):
            bad.remove("reward/mean")  # a step whose groups were all left out has no mean
        if (row.get("optimizer/dropped_updates") or 0) > 0:
            bad.append("optimizer/dropped_updates")
        if bad:
            steps.add(int(row["step"] or 0))
            seen.update(bad)
    broken = {r.step for r in run.completions if any(map(math.isnan, r.logprobs))}
    if broken:
        steps |= broken
        seen.add("the sampled tokens' log-probabilities")
    if not steps:
        return None
    first, last = min(steps), max(steps)
    return Evidence(
        f"{', '.join(sorted(seen))} show values that are not finite in {len(steps)} steps, first at step {first}; such updates are "
        "not made",
        (first, last),
        {"steps": len(steps)},
        three(completions_between(run, (first, first))),
        None if len(steps) > 1 else "warning",
    )


def spikes(run: RunRecord) -> Evidence | None:
    """A gradient norm more than ten times the median of the twenty before it."""
    norm = series(run, "optimizer/grad_norm")
    high = []
    for i in range(MANY, len(norm)):
        usual = median(norm.values[max(0, i - 20) : i])
        if norm.values[i] > 10 * usual and norm.values[i] > 1e-6:
            high.append((norm.steps[i], norm.values[i], usual))
    if not high:
        return None
    step, value, usual = max(high, key=lambda one: one[1] / (one[2] or 1e-9))
    return Evidence(
        f"the gradient norm jumped {len(high)} times to more than ten times its usual size; at step {step} to {value:.3g} from a "
        f"median of {usual:.3g}",
        (high[0][0], high[-1][0]),
        {"largest": value, "usual": usual},
        three(completions_between(run, (step, step))),
    )


def no_movement(run: RunRecord) -> Evidence | None:
    """Updates are made, the gradient is not 0, and yet the policy stays the reference to the last bit."""
    kl, norm = series(run, "policy/kl"), series(run, "optimizer/grad_norm")
    pushed = sum(1 for value in norm.values if value > 1e-9)
    if len(kl) < MANY or pushed < MANY or max(abs(v) for v in kl.values[2:]) > 1e-9:
        return None
    return Evidence(
        f"after {pushed} updates with a mean gradient norm of {mean(norm.values):.3g} the KL from the reference is still 0: the "
        "weights have not changed",
        (kl.steps[0], kl.steps[-1]),
        {"updates": pushed, "kl_max": max(abs(v) for v in kl.values)},
        three(completions_between(run, (kl.steps[0], kl.steps[-1]))),
    )


def updates_lost(run: RunRecord) -> Evidence | None:
    """Measured, and not reckoned from the settings: most weights are the same number after an update that was to change them."""
    lost = series(run, "optimizer/updates_lost")
    worst = worst_stretch(lost, min(MANY, len(lost))) if len(lost) >= 3 else None
    if worst is None or worst[0] <= 0.5:
        return None
    rate, precision = (run.config.optimizer.learning_rate, run.config.optimizer.precision) if run.config else (math.nan, "?")
    return Evidence(
        f"in steps {worst[1][0]} to {worst[1][1]} {worst[0]:.1%} of the weights that had a gradient were the same number after the "
        f"update (learning rate {rate:g}, optimizer.precision {precision})",
        worst[1],
        {"updates_lost": worst[0], "learning_rate": rate},
        three(completions_between(run, worst[1])),
    )


def first_loss_is_zero(run: RunRecord) -> Evidence | None:
    loss = series(run, "policy/loss")
    mu = run.config.algorithm.updates_per_batch if run.config else 1
    if not len(loss) or abs(loss.values[0]) > 1e-4:
        return None
    rest = "" if mu == 1 else "; with several updates a batch it moves once the ratio leaves 1"
    return Evidence(
        f"the loss is {loss.values[0]:.2g} at step {loss.steps[0]} and stays within {max(map(abs, loss.values)):.2g}{rest}",
        (loss.steps[0], loss.steps[-1]),
        {"loss": loss.values[0]},
        three(completions_between(run, (loss.steps[0], loss.steps[0]))),
    )
