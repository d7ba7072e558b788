"""Rules about the update: KL, ratio, gradients, whether steps are of a size that the numbers can hold; and what stands around the
objective: a learned value, the adaptive KL, refills, the sampler's correction, shaped rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from groupwise.doctor.findings import (
    Evidence,
    accuracy_of,
    completions_between,
    flat_in_batch,
    mean,
    series,
    three,
    worst_stretch,
)
from groupwise.tracking.reading import RunRecord

__all__ = [
    "correction_cut",
    "first_loss_is_zero",
    "kl_above_band",
    "kl_below_band",
    "kl_target_missed",
    "loss_spikes",
    "negative_kl",
    "no_movement",
    "not_finite",
    "ratio_off",
    "refills_exhausted",
    "reward_clipped",
    "reward_processes_killed",
    "samples_too_old",
    "spikes",
    "updates_lost",
    "value_biased",
    "value_harmful",
]

KL_BAND = (0.05, 0.1)
"""Nats per token: what published GRPO runs with a KL term settle in."""
MANY = 10
SEARCHED = 5
"""Halvings of a loss scale in a row that are no longer the search for its place."""


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
    accuracy = accuracy_of(run)
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
    """On-policy the ratio is 1 by definition; off-policy a clip that drops the gradient of many tokens means that steps are too
    large."""
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
    drops = run.config is None or run.config.algorithm.loss.clip_drops_gradient
    worst = worst_stretch(clipped, min(MANY, len(clipped))) if updates != 1 and drops and len(clipped) >= 3 else None
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
    """A metric that was logged and is no number, or an update that was dropped for it, but in the search for a loss scale."""
    names = ("policy/loss", "optimizer/grad_norm", "reward/mean")
    steps, seen, in_a_row = set(), set(), 0
    for row in run.steps:
        bad = [name for name in names if name in row and row[name] is None]
        if "reward/mean" in bad and not row.get("completions/tokens_max"):
            bad.remove("reward/mean")  # a step whose groups were all left out has no mean
        if (row.get("optimizer/dropped_updates") or 0) > 0:
            bad.append("optimizer/dropped_updates")
        in_a_row = in_a_row + 1 if halves_the_scale(row) else 0
        if 0 < in_a_row < SEARCHED:
            bad = [name for name in bad if not name.startswith("optimizer/")]
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


def halves_the_scale(row: Mapping[str, float | None]) -> bool:
    """Whether the loss is finite, and its gradient overflowed times a loss scale that can still be lowered."""
    dropped, scale = row.get("optimizer/dropped_updates") or 0, row.get("optimizer/loss_scale") or 1
    return dropped > 0 and scale > 1 and row.get("policy/loss") is not None


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
    if run.config is not None and run.config.algorithm.kl is None:  # an earlier version's, from the policy itself
        return None
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
    config = run.config
    if config and config.optimizer.precision == "stochastic" and not config.model.lora and config.model.dtype != "float32":
        return None  # earlier versions measured it there, where nothing is lost on average
    lost = series(run, "optimizer/updates_lost")
    worst = worst_stretch(lost, min(MANY, len(lost))) if len(lost) >= 3 else None
    if worst is None or worst[0] <= 0.5:
        return None
    rate, precision = (config.optimizer.learning_rate, config.optimizer.precision) if config else (math.nan, "?")
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


STRETCH = 10


def value_harmful(run: RunRecord) -> Evidence | None:
    """Finds a learned value that after the first steps explains less of the returns than a constant would."""
    explained = series(run, "value/explained_variance")
    if len(explained) < 2 * STRETCH or explained.late >= -0.05:
        return None
    return Evidence(
        f"the learned value's explained variance is {explained.late:.3g} at the end ({explained.early:.3g} at the beginning): below 0 "
        "it is worse than no value at all",
        explained.late_steps,
        {"explained_variance_early": explained.early, "explained_variance_late": explained.late},
        three(completions_between(run, explained.late_steps)),
    )


def value_biased(run: RunRecord) -> Evidence | None:
    """The value is off the returns by more than rewards differ within a group, in one direction."""
    error, spread = series(run, "value/error"), series(run, "reward/std")
    if len(error) < 2 * STRETCH or not len(spread):
        return None
    size = abs(error.late)
    if size <= max(0.05, spread.late):
        return None
    return Evidence(
        f"the learned value is {'above' if error.late > 0 else 'below'} the returns by {size:.3g} on average at the end, more than "
        f"rewards differ within a group ({spread.late:.3g})",
        error.late_steps,
        {"value_error_late": error.late, "reward_std_late": spread.late},
        three(completions_between(run, error.late_steps)),
    )


def kl_target_missed(run: RunRecord) -> Evidence | None:
    """``algorithm.kl.target`` drives beta a hundredfold, and the KL is still not there."""
    beta, kl = series(run, "policy/beta"), series(run, "policy/kl")
    target = run.config.algorithm.kl.target if run.config and run.config.algorithm.kl else None
    if target is None or len(beta) < 2 * STRETCH or not len(kl) or min(beta.values) <= 0:
        return None
    change, off = beta.late / beta.values[0], kl.late / target
    driven_up, driven_down = change > 100 and off > 1.5, change < 0.01 and off < 1 / 1.5
    if not driven_up and not driven_down:
        return None
    return Evidence(
        f"beta was driven from {beta.values[0]:.3g} to {beta.late:.3g}, and the KL is {kl.late:.3g} where algorithm.kl.target is "
        f"{target:g}",
        (beta.steps[0], beta.steps[-1]),
        {"beta_first": beta.values[0], "beta_late": beta.late, "kl_late": kl.late, "kl_target": target},
        three(completions_between(run, beta.late_steps)),
    )


def refills_exhausted(run: RunRecord) -> Evidence | None:
    """All rounds of refilling are used up, and groups without variance are still in the batch."""
    flat, sampled = flat_in_batch(run), series(run, "groups/sampled")
    rounds = run.config.rollout.refill_rounds if run.config else 0
    worst = worst_stretch(flat, STRETCH) if len(flat) >= STRETCH else None
    if not rounds or not run.config or worst is None or worst[0] < 0.25 or not len(sampled):
        return None
    per_step = run.config.rollout.prompts_per_step
    taken = mean([value for step, value in sampled.points if worst[1][0] <= step <= worst[1][1]])
    return Evidence(
        f"in steps {worst[1][0]} to {worst[1][1]} {worst[0]:.0%} of the batch had no variance although {taken:.3g} groups were sampled "
        f"a step for {per_step} that are learnt from: rollout.refill_rounds = {rounds} is used up",
        worst[1],
        {"zero_variance": worst[0], "sampled": taken, "prompts_per_step": per_step},
        three(completions_between(run, worst[1])),
    )


def correction_cut(run: RunRecord) -> Evidence | None:
    """The correction for the sampler's mismatch works at its cap: the two differ by more than it can put right."""
    if steps_ahead(run):
        return None  # see samples_too_old
    cut, weight = series(run, "policy/correction_cut"), series(run, "policy/correction")
    worst = worst_stretch(cut, min(STRETCH, len(cut))) if len(cut) >= 3 else None
    if worst is None or worst[0] < 0.05:
        return None
    said = f", at a mean weight of {weight.late:.3g}" if len(weight) else ""
    return Evidence(
        f"in steps {worst[1][0]} to {worst[1][1]} the correction was beyond its cap for {worst[0]:.1%} of the tokens{said}",
        worst[1],
        {"correction_cut": worst[0], "correction_late": weight.late if len(weight) else 1.0},
        three(completions_between(run, worst[1])),
    )


def steps_ahead(run: RunRecord) -> int:
    """``rollout.ahead`` of the run, as far as is known."""
    return run.config.rollout.ahead if run.config else 0


def samples_too_old(run: RunRecord) -> Evidence | None:
    """Asynchronous rollouts: what corrects for the age of the samples acts on so many tokens that the gradient is another one."""
    steps = steps_ahead(run)
    name, most, what = "policy/correction_cut", 0.05, "the weight of a sample was beyond its cap"
    if run.config is not None and run.config.clips_against_the_sampler:
        if not run.config.algorithm.loss.clip_drops_gradient:
            return None
        name, most, what = "policy/clip_share", 0.3, "the clip cut off"
    shares = series(run, name)
    worst = worst_stretch(shares, min(STRETCH, len(shares))) if steps and len(shares) >= 3 else None
    if worst is None or worst[0] < most:
        return None
    age = series(run, "rollout/staleness")
    return Evidence(
        f"in steps {worst[1][0]} to {worst[1][1]} {what} for {worst[0]:.1%} of the tokens, with samples "
        f"{age.late if len(age) else steps:.3g} updates old (rollout.ahead={steps})",
        worst[1],
        {"share": worst[0], "ahead": steps},
        three(completions_between(run, worst[1])),
    )


def reward_clipped(run: RunRecord) -> Evidence | None:
    """A clip that changes most of a function's scores makes them all the same: a saturated reward."""
    shares = {name: series(run, name) for name in run.metric_names() if name.startswith("shaping/clipped_")}
    saturated = {name: one for name, one in shares.items() if len(one) >= STRETCH and one.late > 0.5}
    if not saturated:
        return None
    name = max(saturated, key=lambda one: saturated[one].late)
    worst = saturated[name]
    component = name.removeprefix("shaping/clipped_")
    return Evidence(
        f"at the end the clip changes {worst.late:.0%} of the scores of {component!r} ({worst.early:.0%} at the beginning): above it "
        "they are all the same",
        worst.late_steps,
        {"clipped_early": worst.early, "clipped_late": worst.late},
        three(completions_between(run, worst.late_steps)),
    )


def reward_processes_killed(run: RunRecord) -> Evidence | None:
    """Processes of isolated reward functions that died or had to be killed, again and again."""
    killed = {name: series(run, name) for name in run.metric_names() if name.startswith("calls/killed_")}
    counts = {name: (sum(one.values), [step for step, value in one.points if value > 0]) for name, one in killed.items()}
    name = max(counts, key=lambda one: counts[one][0], default="")
    if not name or counts[name][0] < 3:
        return None
    count, steps = counts[name]
    return Evidence(
        f"{count:g} processes of the isolated function {name.removeprefix('calls/killed_')!r} were killed or died, in {len(steps)} "
        f"steps from step {steps[0]} on",
        (steps[0], steps[-1]),
        {"killed": count, "steps": len(steps)},
        three(completions_between(run, (steps[0], steps[-1]))),
    )


def loss_spikes(run: RunRecord) -> Evidence | None:
    """A loss, the policy's or the value's, more than ten times the size that it had in the twenty steps before."""
    spikes = [spike for name in ("policy/loss", "value/loss") for spike in spikes_in(run, name)]
    if not spikes:
        return None
    name, step, value, usual = max(spikes, key=lambda one: one[2] / one[3])
    steps = [one[1] for one in spikes]
    return Evidence(
        f"{name} jumped {len(spikes)} times to more than ten times its usual size; at step {step} to {value:.3g} from a median of "
        f"{usual:.3g}",
        (min(steps), max(steps)),
        {"largest": value, "usual": usual, "jumps": len(spikes)},
        three(completions_between(run, (step, step))),
    )


def spikes_in(run: RunRecord, name: str) -> list[tuple[str, int, float, float]]:
    """Metric, step, size, and usual size of each jump. A loss below a thousandth is rounding around 0, and no usual size."""
    loss = series(run, name)
    sizes = [abs(value) for value in loss.values]
    usual = [max(1e-3, median(sizes[max(0, i - 20) : i])) if i >= STRETCH else 0.0 for i in range(len(sizes))]
    return [
        (name, loss.steps[i], sizes[i], usual[i])
        for i in range(STRETCH, len(sizes))
        if sizes[i] > 10 * usual[i] and sizes[i] > 0.05
    ]
