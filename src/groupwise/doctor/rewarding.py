"""Rules about rewards: what is paid, to whom, and whether anything is left to learn from it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from groupwise.config.objective import OwnAdvantage
from groupwise.doctor.findings import (
    Evidence,
    Example,
    Series,
    Severity,
    accuracy_of,
    completions_between,
    flat_in_batch,
    groups_of,
    has_answers,
    mean,
    series,
    show,
    three,
    worst_stretch,
)
from groupwise.tracking.reading import CompletionRecord, RunRecord

__all__ = [
    "against_the_answer",
    "constant",
    "disagreeing_verdicts",
    "exploding",
    "failing",
    "hacking",
    "judged_in_part",
    "lost_answers",
    "no_variance",
    "saturated",
]

STRETCH = 10
"""Steps in a row that an average is taken over."""
NEARLY_ALL = 0.9
MOVES = 1e-6
"""Advantage from which a completion teaches something."""
GOOD = 0.8
"""Accuracy from which groups without variance mean that the problems are solved."""


def exploding(run: RunRecord) -> Evidence | None:
    """Rewards ten times the size that they had at the beginning: some function has no upper bound."""
    reward = series(run, "reward/mean")
    if len(reward) < STRETCH:
        return None
    sizes = [abs(value) for value in reward.values]
    before = max(1.0, median(sizes[: reward.window]))
    after = mean(sizes[-reward.window :])
    if after <= 10 * before:
        return None
    first = next(step for step, value in reward.points if abs(value) > 10 * before)
    late = sorted(completions_between(run, reward.late_steps), key=lambda r: -abs(r.reward or 0.0))
    grown = {name: series(run, name) for name in run.metric_names() if name.startswith("reward/")}
    fastest = max((n for n in grown if n not in ("reward/mean", "reward/std")), key=lambda n: abs(grown[n].late), default="")
    blame = f"; the largest part is {fastest}" if fastest else ""
    return Evidence(
        f"the mean reward went from a size of {before:.3g} to {after:.3g} (more than tenfold from step {first} on){blame}",
        (first, reward.steps[-1]),
        {"early": before, "late": after},
        three(late),
    )


def saturated(run: RunRecord) -> Evidence | None:
    """Nearly every group has one score throughout, and it is the best one."""
    flat, stretch = series(run, "groups/zero_variance"), late_stretch(run)
    if stretch is None or mean(flat.values[-STRETCH:]) < 0.95 or not solved(run, stretch):
        return None
    share, accuracy = mean(flat.values[-STRETCH:]), over(accuracy_of(run), stretch)
    return Evidence(
        f"in steps {stretch[0]} to {stretch[1]} {share:.0%} of the groups had no variance{with_right(accuracy)}: "
        f"the problems are solved, and further steps change {'little' if flat_groups_teach(run) else 'nothing'}",
        stretch,
        known({"zero_variance": share, "accuracy": accuracy}),
        three(completions_between(run, stretch)),
    )


def no_variance(run: RunRecord) -> Evidence | None:
    """Nearly every group scored the same throughout although the problems are not solved."""
    flat = flat_in_batch(run)
    worst = worst_stretch(flat, min(STRETCH, len(flat))) if len(flat) >= 3 else None
    if worst is None or flat_groups_teach(run) or worst[0] < NEARLY_ALL or solved(run, worst[1]):
        return None
    if flat.late < NEARLY_ALL:  # some ten steps with few groups each are flat by chance, and what was so at first is over
        return None
    share, stretch = worst
    accuracy, reward = over(accuracy_of(run), stretch), over(series(run, "reward/mean"), stretch)
    updates = sum(1 for row in run.steps if stretch[0] <= (row["step"] or 0) <= stretch[1] and "optimizer/grad_norm" in row)
    return Evidence(
        f"in steps {stretch[0]} to {stretch[1]} {share:.0%} of the groups had no variance at a mean reward of {reward:.3g}"
        f"{with_right(accuracy)}; {updates} of these steps made an update",
        stretch,
        known({"zero_variance": share, "reward": reward, "accuracy": accuracy, "updates": updates}),
        three(completions_between(run, stretch)),
    )


def flat_groups_teach(run: RunRecord) -> bool:
    """Of an advantage of the user's own, which the settings know nothing about, the recorded numbers say it."""
    if run.config is None:
        return False
    algorithm = run.config.algorithm
    if not isinstance(algorithm.advantage, OwnAdvantage) or algorithm.flat_groups_teach:
        return algorithm.flat_groups_teach
    same = (group for group in groups_of(run.completions) if len({record.reward for record in group}) == 1)
    return any(abs(record.advantage or 0.0) > MOVES for group in same for record in group)


def known(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if not math.isnan(number)}


def with_right(accuracy: float) -> str:
    return "" if math.isnan(accuracy) else f", with {accuracy:.0%} of answers right"


def solved(run: RunRecord, stretch: tuple[int, int]) -> bool:
    accuracy, reward = accuracy_of(run), series(run, "reward/mean")
    if len(accuracy):  # a reward that is the same for all, and nothing or less, pays nobody for being right
        return over(accuracy, stretch) >= GOOD and over(reward, stretch) > min([0.0, *reward.values])
    return reward.rises() and over(reward, stretch) >= 0.98 * max(reward.values) > 0


def late_stretch(run: RunRecord) -> tuple[int, int] | None:
    flat = series(run, "groups/zero_variance")
    return (flat.steps[-STRETCH], flat.steps[-1]) if len(flat) >= 2 * STRETCH else None


def over(metric: Series, stretch: tuple[int, int]) -> float:
    return mean([value for step, value in metric.points if stretch[0] <= step <= stretch[1]])


def constant(run: RunRecord) -> Evidence | None:
    """A function that gave every completion the same score in the whole run; one that is logged only (weight 0) counts too."""
    scores: dict[str, set[float | None]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)
    for record in run.completions:
        for name, score in record.components.items():
            scores[name].add(score)
            counts[name] += 1
    same = [name for name, values in scores.items() if len(values) == 1 and counts[name] >= 64 and moved(run, name) is False]
    unearned = {name for name in penalties(run) if scores.get(name) == {0.0}}
    flat = [name for name in same if name not in unearned]
    if not flat:
        return None
    shown = "; ".join(f"{name!r} gave {next(iter(scores[name]))} to all {counts[name]} recorded completions" for name in flat)
    steps = (run.completions[0].step, run.completions[-1].step)
    severity: Severity | None = "critical" if len(same) == len(scores) else None
    return Evidence(shown, steps, {f"completions, {n}": counts[n] for n in flat}, three(run.completions), severity)


def penalties(run: RunRecord) -> set[str]:
    """Built-in functions, by the names of their scores, that only take away: 0 for everybody is what they are there for."""
    used: Counter[str] = Counter()
    names = set()
    for entry in run.config.rewards.functions if run.config else ():
        used[entry.called] += 1
        avoids = entry.function == "keyword" and not entry.arguments.get("words")
        if avoids or entry.function in ("overlong", "repetition_penalty"):
            names.add(entry.called if used[entry.called] == 1 else f"{entry.called}_{used[entry.called]}")
    return names


def moved(run: RunRecord, component: str) -> bool:
    """Whether the metric over *all* completions, of which only some are recorded, ever changed."""
    values = series(run, f"reward/{component}").values
    return bool(values) and max(values) - min(values) > 1e-9


def failing(run: RunRecord) -> Evidence | None:
    """Groups left out because a function, or the environment, raised, hung or returned nonsense."""
    failed = series(run, "groups/failed")
    hit = [step for step, value in failed.points if value > 0]
    if not hit:
        return None
    total = sum(failed.values)
    sampled, usual = dict(run.series("groups/sampled")), run.config.rollout.prompts_per_step if run.config else 0
    all_groups = sum(sampled.get(step, usual) for step in failed.steps)  # with those that refills sampled
    share = total / all_groups if all_groups else 0.0
    said = f" ({share:.1%} of all groups)" if all_groups else ""
    return Evidence(
        f"{total:g} groups could not be scored{said}, in {len(hit)} steps from step {hit[0]} on{by_the_environment(run)}",
        (hit[0], hit[-1]),
        {"groups": total, "share": share},
        three(completions_between(run, (hit[0], hit[-1]))),
        "critical" if share > 0.2 else None,
    )


def by_the_environment(run: RunRecord) -> str:
    """That it failed, where there is one and no function did."""
    calls = [series(run, name).values for name in run.metric_names() if name.startswith("calls/failed_")]
    if run.config is None or run.config.rollout.environment is None or not calls or any(map(any, calls)):
        return ""
    limit = run.config.rollout.tool_timeout_s
    return f": no reward function failed, but the environment, which raised or took longer than rollout.tool_timeout_s={limit:g}"


def judged_in_part(run: RunRecord) -> Evidence | None:
    """A reward model that judges texts whose beginning it never saw."""
    shares = {name: series(run, name) for name in run.metric_names() if name.startswith("reward_model/truncated_")}
    worst = max(shares, key=lambda name: shares[name].late, default="")
    if not worst or shares[worst].late < 0.01:
        return None
    judge, cut = worst.removeprefix("reward_model/truncated_"), shares[worst]
    return Evidence(
        f"at the end {cut.late:.1%} of the completions were, with their prompts, too long for the reward model {judge!r}, and were judged "
        f"without their beginning ({cut.early:.1%} at the beginning)",
        cut.late_steps,
        {"cut_early": cut.early, "cut_late": cut.late},
        three(sorted(completions_between(run, cut.late_steps), key=lambda r: -r.tokens)),
    )


def disagreeing_verdicts(run: RunRecord) -> Evidence | None:
    """Right answers that the strict reading does not count, as the run stands now (not at the base model)."""
    if not has_answers(run):
        return None
    reward = series(run, "reward/mean")
    late = completions_between(run, reward.late_steps) if len(reward) else list(run.completions)
    judged = [record for record in late if record.strict is not None]
    lost = [record for record in judged if record.lenient and not record.strict]
    share = len(lost) / len(judged) if len(judged) >= 32 else 0.0
    for evaluation in run.evaluations[-2:]:
        known = [record for record in evaluation.records if record["strict"] is not None and record["lenient"] is not None]
        if evaluation.stage not in ("base", "warm_start") and len(known) >= 20:
            share = max(share, sum(record["lenient"] and not record["strict"] for record in known) / len(known))
    if share < 0.1 or paid_as_right(run, lost):
        return None
    steps = (late[0].step, late[-1].step) if late else None
    return Evidence(
        f"{share:.0%} of the answers are right where anyone would look for them, but not where the strict reading does, and are "
        "paid as wrong",
        steps,
        {"lenient_only": share},
        three(lost, remark=lambda record: f"expected {record.expected}") or evaluation_examples(run),
        "critical" if share >= 0.4 else None,
    )


def paid_as_right(run: RunRecord, lost: Sequence[CompletionRecord]) -> bool:
    """Whether some reward function tells answers that only the lenient reading counts from wrong ones, by most of what it gives."""
    wrong = [record for record in run.completions if record.lenient is False]

    def scores(records: Sequence[CompletionRecord], name: str) -> list[float]:
        return [score for record in records if (score := record.components.get(name)) is not None]

    def rewards(records: Sequence[CompletionRecord]) -> list[float]:
        return [record.reward for record in records if record.reward is not None]

    if not lost or mean(rewards(lost)) <= mean(rewards(wrong)):  # a function of weight 0 pays nothing
        return False
    for name in {name for record in lost for name in record.components}:
        given, unpaid = scores(run.completions, name), scores(wrong, name)
        least = mean(unpaid) if unpaid else min(given, default=0.0)
        if mean(scores(lost, name)) - least >= 0.8 * (max(given, default=0.0) - min(given, default=0.0)) > 0:
            return True
    return False


def evaluation_examples(run: RunRecord) -> tuple[Example, ...]:
    return judged_examples([record for record in run.evaluations[-1].records if record["lenient"] and record["strict"] is False])


def judged_examples(records: Sequence[Mapping[str, Any]]) -> tuple[Example, ...]:
    return tuple(
        Example(f"problem {r['problem']}", r["response"], f"found {r['extracted']}, expected {r['expected']}")
        for r in records[:3]
    )


def against_the_answer(run: RunRecord) -> Evidence | None:
    """Groups in which some wrong completion earned more than some right one."""
    mixed, turned = 0, []
    for group in groups_of(run.completions):
        right = [r for r in group if r.strict and r.reward is not None]
        wrong = [r for r in group if r.strict is False and r.reward is not None]
        if right and wrong:
            mixed += 1
            best, worst = max(wrong, key=lambda r: r.reward or 0.0), min(right, key=lambda r: r.reward or 0.0)
            if (best.reward or 0.0) > (worst.reward or 0.0):
                turned.append((best, worst))
    if mixed < STRETCH or len(turned) < 0.3 * mixed:
        return None
    examples = [one for pair in turned[:2] for one in (show(pair[0]), show(pair[1], "of the same group"))]
    return Evidence(
        f"in {len(turned)} of {mixed} recorded groups with right and wrong answers a wrong one earned more than a right one",
        (turned[0][0].step, turned[-1][0].step),
        {"share": len(turned) / mixed},
        tuple(examples[:3]),
    )


def hacking(run: RunRecord) -> Evidence | None:
    """The reward rises and held-out accuracy falls, problem by problem; without evaluations, accuracy in training does."""
    reward = series(run, "reward/mean")
    if len(reward) < STRETCH or not reward.rises():
        return None
    evidence = fallen_evaluation(run) or fallen_accuracy(run)
    if evidence is None:
        return None
    what, before, after = evidence
    late = sorted(completions_between(run, reward.late_steps), key=lambda r: -(r.reward or 0.0))
    return Evidence(
        f"the mean reward rose from {reward.early:.3g} to {reward.late:.3g} while {what} fell from {before:.1%} to {after:.1%}",
        (reward.steps[0], reward.steps[-1]),
        {"reward_early": reward.early, "reward_late": reward.late, "accuracy_before": before, "accuracy_after": after},
        three(late, where=lambda r: r.strict is False, remark=lambda r: f"expected {r.expected}"),
    )


def fallen_evaluation(run: RunRecord) -> tuple[str, float, float] | None:
    from groupwise.evaluation.figures import first_samples, headline_verdict, mcnemar_p_value

    modes = list(dict.fromkeys(e.mode for e in run.evaluations))
    for mode in modes:
        stages = [e for e in run.evaluations if e.mode == mode and e.stage != "eval"]
        if len(stages) < 2:
            continue
        key = headline_verdict(*(e.records for e in stages))
        judged = [e for e in stages[:-1] if not math.isnan(e.share(key))]
        if not judged:
            continue
        best, last = max(judged, key=lambda e: e.share(key)), stages[-1]
        pairs = first_samples(best.records, last.records, key)
        broken, fixed = pairs.count((True, False)), pairs.count((False, True))
        # The best was chosen among all of them, in each mode: some would be that much better by chance (Bonferroni).
        if broken > fixed and mcnemar_p_value(broken, fixed) * len(judged) * len(modes) < 0.05:
            what = "success" if key == "success" else "accuracy"
            return f"held-out {what} ({mode}, {best.stage} to {last.stage})", best.share(key), last.share(key)
    return None


def lost_answers(run: RunRecord) -> Evidence | None:
    """Fewer held-out answers have the right number anywhere in them than before GRPO, by the first sample of each problem."""
    from groupwise.evaluation.figures import first_samples, mcnemar_p_value

    for mode in dict.fromkeys(e.mode for e in run.evaluations):
        stages = [e for e in run.evaluations if e.mode == mode and e.stage != "eval"]
        untrained = [e for e in stages if e.stage in ("base", "warm_start")]
        if not untrained or stages[-1] is untrained[-1]:
            continue
        first, last = untrained[-1], stages[-1]
        if any(record.get("success") is not None for record in last.records):  # an environment judges, and not the last answer
            continue
        pairs = first_samples(first.records, last.records, "lenient")
        broken, fixed = pairs.count((True, False)), pairs.count((False, True))
        if broken > fixed and mcnemar_p_value(broken, fixed) < 0.01:
            before, after = (sum(pair[i] for pair in pairs) / len(pairs) for i in (0, 1))
            strict = first_samples(first.records, last.records)
            form_before, form_after = (sum(pair[i] for pair in strict) / max(1, len(strict)) for i in (0, 1))
            by_problem = (
                {r["problem"]: r for r in reversed(e.records)} for e in (first, last)
            )  # the first samples, which were paired
            was, now = by_problem
            same = [(was[name], r) for name, r in now.items() if name in was and was[name]["expected"] == r["expected"]]
            lost = [r for earlier, r in same if earlier["lenient"] and r["lenient"] is False]
            return Evidence(
                f"held out ({mode}, {first.stage} to {last.stage}), right anywhere in the answer fell from {before:.1%} to "
                f"{after:.1%}, and right in the place asked for went from {form_before:.1%} to {form_after:.1%}",
                (1, last.step or run.last_step),
                {"lenient_before": before, "lenient_after": after},
                judged_examples(lost),
            )
    return None


def fallen_accuracy(run: RunRecord) -> tuple[str, float, float] | None:
    accuracy = accuracy_of(run)
    # Twice the noise is passed by chance in one of seven runs whose accuracy stays where it is: a run is looked at again and again.
    fell = len(accuracy) >= STRETCH and accuracy.falls(by=0.05, errors=3)
    return ("accuracy in training", accuracy.early, accuracy.late) if fell else None
