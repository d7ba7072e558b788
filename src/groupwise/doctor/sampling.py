"""Rules about what the policy writes: how completions end, how long and how varied they are, and who sampled them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from groupwise.config import Config
from groupwise.data.answers import extract_answer
from groupwise.doctor.findings import (
    Evidence,
    Series,
    accuracy_of,
    completions_between,
    groups_of,
    has_answers,
    mean,
    series,
    three,
    worst_stretch,
)
from groupwise.tracking.reading import CompletionRecord, RunRecord

__all__ = [
    "collapsed_texts",
    "cut_short",
    "entropy_collapse",
    "format_without_answer",
    "goes_on",
    "length_creep",
    "never_stops",
    "sampler_mismatch",
    "stale_sampler",
    "stops_stopping",
    "talks_on",
]

TURN_MARKS = (
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>",
    "[INST]", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "\nUser:", "\nHuman:", "\nuser\n", "\nassistant\n",
)  # fmt: skip
"""What begins or ends a turn in the usual chat templates: in a completion it means that the end was not taken for one."""
ROUNDING = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.1, "auto": 0.1}
"""Largest mean |log-probability when sampled - when trained|, in nats, that different kernels explain. The quickstart in bfloat16
measures up to 0.02."""
LATE_ENOUGH = 10


def collapsed_texts(run: RunRecord) -> Evidence | None:
    """One text as the answer to many problems that have different answers."""
    reward = series(run, "reward/mean")
    late = completions_between(run, reward.late_steps) if len(reward) >= LATE_ENOUGH else []
    problems: dict[str, set[str]] = defaultdict(set)
    answers: dict[str, set[str]] = defaultdict(set)
    for group in groups_of(late):  # among four choices each is some sample of nearly every problem
        text, count = Counter(" ".join(record.said.split()) for record in group).most_common(1)[0]
        if 2 * count > len(group):
            problems[text].add(group[0].problem)
            answers[text].add(group[0].expected)
    asked = len({record.problem for record in late})
    key = max(problems, key=lambda k: len(problems[k]), default="")
    if asked < 4 or len(problems[key]) < max(4, 0.5 * asked) or len(answers[key]) < 3:
        return None
    return Evidence(
        f"in steps {reward.late_steps[0]} to {reward.late_steps[1]} most samples of {len(problems[key])} of {asked} problems are the same "
        f"text, and these have {len(answers[key])} different answers",
        reward.late_steps,
        {"problems": len(problems[key]), "asked": asked},
        three(late, where=lambda r: " ".join(r.said.split()) == key, remark=lambda r: f"expected {r.expected}"),
    )


def entropy_collapse(run: RunRecord) -> Evidence | None:
    """Entropy collapsed without a gain in accuracy. A policy that has learnt its task has low entropy too; that is healthy."""
    entropy, accuracy = series(run, "policy/entropy"), accuracy_of(run)
    if len(entropy) < LATE_ENOUGH or entropy.late > max(0.02, 0.15 * entropy.early):
        return None
    learnt = accuracy.late >= 0.6 or accuracy.rises(by=0.1) if len(accuracy) else series(run, "reward/mean").rises()
    if entropy.late >= 0.5 * entropy.early or learnt:
        return None
    gained = f", while accuracy went from {accuracy.early:.1%} to {accuracy.late:.1%}" if len(accuracy) else ""
    return Evidence(
        f"the entropy fell from {entropy.early:.3g} to {entropy.late:.3g} nats per token{gained}",
        (entropy.steps[0], entropy.steps[-1]),
        {"entropy_early": entropy.early, "entropy_late": entropy.late},
        three(completions_between(run, entropy.late_steps)),
    )


def never_stops(run: RunRecord) -> Evidence | None:
    stops, limit = series(run, "completions/stop_rate"), token_limit(run)
    if len(stops) < 3 or max(stops.values) > 0.01:
        return None
    turns = f" or {run.config.rollout.max_turns} turns" if run.config and run.config.rollout.has_episodes else ""
    return Evidence(
        f"hardly a completion of {len(stops)} steps ended by itself (at most {max(stops.values):.1%} of a step): all run to the "
        f"limit of {limit} tokens{turns}",
        (stops.steps[0], stops.steps[-1]),
        {"stop_rate": mean(stops.values)},
        three(run.completions, where=lambda r: r.truncated),
    )


def stops_stopping(run: RunRecord) -> Evidence | None:
    stops = series(run, "completions/stop_rate")
    if len(stops) < LATE_ENOUGH or not stops.changed_from_first(by=-0.3):
        return None
    late = completions_between(run, stops.late_steps)
    return Evidence(
        f"at the beginning {stops.first:.0%} of the completions ended by themselves, at the end {stops.late:.0%}",
        (stops.steps[0], stops.steps[-1]),
        {"stop_rate_early": stops.first, "stop_rate_late": stops.late},
        three(late, where=lambda r: r.truncated),
    )


def cut_short(run: RunRecord) -> Evidence | None:
    """A third and more is cut at the limit; those who never stop at all have a finding of their own."""
    cut = series(run, "completions/truncated")
    worst = worst_stretch(cut, LATE_ENOUGH) if len(cut) >= LATE_ENOUGH else None
    if worst is None or cut.late < 0.3 or never_stops(run):
        return None
    late = completions_between(run, cut.late_steps)
    right = [r.strict for r in late if r.truncated and r.strict is not None] if has_answers(run) else []
    paid = f"; of those recorded {mean([float(s) for s in right]):.0%} still had a right answer" if right else ""
    turns = f" or rollout.max_turns = {run.config.rollout.max_turns}" if run.config and run.config.rollout.has_episodes else ""
    return Evidence(
        f"at the end {cut.late:.0%} of the completions are cut at rollout.max_completion_tokens = {token_limit(run)}{turns}{paid}",
        cut.late_steps,
        {"truncated_late": cut.late, "truncated_worst": worst[0]},
        three(late, where=lambda r: r.truncated),
    )


def token_limit(run: RunRecord) -> str:
    return str(run.config.rollout.max_completion_tokens) if run.config else "(unknown)"


def talks_on(run: RunRecord) -> Evidence | None:
    """Completions that go past the end of their turn and begin another, at the end of the run too."""
    marked = [(record, mark) for record in run.completions if (mark := turn_mark(record))]
    reward = series(run, "reward/mean")
    late = completions_between(run, reward.late_steps) if len(reward) else []
    over = sum(turn_mark(record) is not None for record in late) < 0.05 * len(late)
    if over or len(run.completions) < 32 or len(marked) < 0.05 * len(run.completions):
        return None
    marks = Counter(mark for _, mark in marked)
    often, records = marks.most_common(1)[0][0], [record for record, _ in marked]
    return Evidence(
        f"{len(marked)} of {len(run.completions)} recorded completions contain {often.strip()!r} or another mark of a turn, and go on",
        (records[0].step, records[-1].step),
        {"share": len(marked) / len(run.completions)},
        three(records),
    )


def goes_on(run: RunRecord) -> Evidence | None:
    """Completions that have given their answer in the place asked for, and are cut at the limit all the same."""
    reward = series(run, "reward/mean")
    late = completions_between(run, reward.late_steps) if len(reward) else []
    cut = [r for r in late if r.finish_reason == "length"] if has_answers(run) else []
    answered = [r for r in cut if extract_answer(r.answer, run.style) is not None]
    if len(late) < 32 or len(answered) < max(0.1 * len(late), 0.3 * len(cut)):
        return None
    return Evidence(
        f"of {len(late)} recorded completions {len(cut)} were cut at the limit of {token_limit(run)} tokens, and {len(answered)} of these "
        "had given their answer long before, and went on",
        reward.late_steps,
        {"cut": len(cut) / len(late), "answered": len(answered) / len(cut)},
        three(answered),
    )


def turn_mark(record: CompletionRecord) -> str | None:
    return next((mark for mark in TURN_MARKS if mark in record.said), None)


def length_creep(run: RunRecord) -> Evidence | None:
    """Half as long again without being right more often."""
    length, accuracy = series(run, "completions/tokens_mean"), accuracy_of(run)
    better = accuracy.rises(by=0.05) or accuracy.changed_from_first(by=0.05)
    if not len(accuracy):
        better = series(run, "reward/mean").rises()
    if len(length) < 2 * LATE_ENOUGH or not length.changed_from_first(by=0.5 * length.first) or better:
        return None
    said = f"while accuracy went from {accuracy.first:.1%} to {accuracy.late:.1%}" if len(accuracy) else "accuracy is not known"
    return Evidence(
        f"the mean length went from {length.first:.0f} to {length.late:.0f} tokens, {said}",
        (length.steps[0], length.steps[-1]),
        {"tokens_early": length.first, "tokens_late": length.late},
        three(sorted(completions_between(run, length.late_steps), key=lambda r: -r.tokens)),
    )


def format_without_answer(run: RunRecord) -> Evidence | None:
    """The share in the right form, or what a format function pays, goes to its top and the accuracy does not follow."""
    accuracy = accuracy_of(run)
    if not len(accuracy) or accuracy.late >= 0.3 or accuracy.rises(by=0.05):
        return None
    learnt = next((what for what in forms(run) if is_learnt(what[1], top=what[2])), None)
    if learnt is None:
        return None
    name, form, top = learnt
    exact = series(run, "accuracy/format").late
    unlike = "" if name == EXACT else f"; in exactly the form asked for are {exact:.0%}: it pays for something else"
    return Evidence(
        f"{name} went from {form.early / top:.0%} to {form.late / top:.0%}, right answers from {accuracy.early:.1%} to "
        f"{accuracy.late:.1%}{unlike if exact < WELL_LEARNT else ''}",
        (form.steps[0], form.steps[-1]),
        {"format_late": form.late / top, "accuracy_late": accuracy.late},
        three(
            completions_between(run, form.late_steps),
            where=lambda r: r.strict is False,
            remark=lambda r: f"expected {r.expected}",
        ),
    )


EXACT, WELL_LEARNT = "completions in the right form", 0.8


def is_learnt(form: Series, top: float) -> bool:
    return len(form) >= 2 * LATE_ENOUGH and top > 0 and form.late >= WELL_LEARNT * top and form.rises(by=0.2 * top)


def forms(run: RunRecord) -> Iterator[tuple[str, Series, float]]:
    """Signs of form and the most that each can be: the share in the form asked for, and the scores of functions named for a format, of
    which the highest that was recorded counts as the most."""
    yield EXACT, series(run, "accuracy/format"), 1.0
    for metric in run.metric_names():
        name = metric.removeprefix("reward/")
        if name != metric and "format" in name:
            paid = [score for r in run.completions if (score := r.components.get(name)) is not None]
            yield f"what {name!r} pays, of the most it paid,", series(run, metric), max(paid, default=0.0)


def sampler_mismatch(run: RunRecord) -> Evidence | None:
    """Sampling and training disagree by more than rounding, from the start. Samples of older weights (``rollout.ahead``) do by right, and
    so do those of rounded ones (``rollout.quantization``) where they are weighted for it, and all where an adapter drops out."""
    by_right = run.config is not None and (run.config.rollout.ahead > 0 or _corrected(run.config) or _drops_out(run))
    mismatch, dtype = series(run, "policy/sampler_mismatch"), run.config.model.dtype if run.config else "bfloat16"
    worst = worst_stretch(mismatch, min(3, len(mismatch))) if len(mismatch) else None
    if worst is None or worst[0] <= ROUNDING[dtype] or stale_sampler(run) or by_right:
        return None
    return Evidence(
        f"sampling and training disagree by {worst[0]:.3g} nats per token in steps {worst[1][0]} to {worst[1][1]}; rounding in "
        f"{dtype} explains at most about {ROUNDING[dtype]:g}",
        worst[1],
        {"mismatch": worst[0]},
        three(completions_between(run, worst[1])),
    )


def _drops_out(run: RunRecord) -> bool:
    """Whether passes that learn leave out parts of an adapter, as sampling does not: the disagreement grows with the adapter then."""
    return run.config is not None and run.config.model.lora is not None and run.config.model.lora.dropout > 0


def _corrected(config: Config) -> bool:
    """Whether rounded weights sample, and something corrects for it."""
    return config.rollout.quantization != "none" and (config.correction_level != "none" or config.clips_against_the_sampler)


def stale_sampler(run: RunRecord) -> Evidence | None:
    """The sampler does not follow: its version stands still while updates are made, or the disagreement grows with them."""
    version = dict(run.series("progress/policy_version"))
    seen = {r.step: r.policy_version for r in run.completions if r.policy_version is not None and r.step in version}
    ahead = run.config.rollout.ahead if run.config else 0
    steps = sorted(seen)[ahead:]  # the first batches are all sampled by the first weights
    if len(steps) >= LATE_ENOUGH and len({seen[s] for s in steps}) == 1 and version[steps[-1]] - version[steps[0]] >= LATE_ENOUGH:
        return Evidence(
            f"from step {steps[0]} to {steps[-1]} the policy made {version[steps[-1]] - version[steps[0]]:g} updates, but all "
            f"completions were sampled by version {seen[steps[0]]}",
            (steps[0], steps[-1]),
            {"updates": version[steps[-1]] - version[steps[0]]},
            three(completions_between(run, (steps[-1], steps[-1]))),
        )
    mismatch, dtype = series(run, "policy/sampler_mismatch"), run.config.model.dtype if run.config else "bfloat16"
    grows = len(mismatch) >= LATE_ENOUGH and mismatch.late > 5 * mismatch.values[0] and mismatch.late > ROUNDING[dtype] / 4
    if ahead or _drops_out(run) or not grows or not mismatch.rises():
        return None
    return Evidence(
        f"the disagreement of sampling and training grows with the updates, from {mismatch.values[0]:.3g} to {mismatch.late:.3g} "
        "nats per token: what is trained does not reach the sampler",
        (mismatch.steps[0], mismatch.steps[-1]),
        {"mismatch_first": mismatch.values[0], "mismatch_late": mismatch.late},
        three(completions_between(run, mismatch.late_steps)),
    )
