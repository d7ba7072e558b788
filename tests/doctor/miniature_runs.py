"""Runs made up in a second, written by the real tracking code: a healthy one, and what a test changes about it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.algorithm.advantages import group_advantages
from groupwise.config import load_config
from groupwise.data.answers import grade
from groupwise.tracking import JsonlTracker, RunFolder
from groupwise.types import Completion, Group, Problem, Prompt, ToolCall, Turn

G, GROUPS = 8, 2

graded = functools.cache(grade)
"""The same completions stand in many runs: each is graded once."""


@dataclass(frozen=True)
class Written:
    """One completion as a test wants it: its text and how it ended."""

    text: str
    finish_reason: str = "stop"
    tokens: int = 30
    calls: tuple[ToolCall, ...] | None = None
    """Made one after the other before the text; None where there are no tools."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """A call and its result take 3 tokens and 2; the text has the rest."""
        if self.calls is None:
            return ()
        before = [turn for call in self.calls for turn in (Turn("assistant", "<call>", 3, (call,)), Turn("tool", call.result, 2))]
        return (*before, Turn("assistant", self.text, self.tokens - 5 * len(self.calls)))

    @property
    def whole(self) -> str:
        """All turns as one text, with what a chat template leaves between them."""
        between = [f"<call>\ntool\n{call.result}\nassistant\n" for call in self.calls or ()]
        return "".join([*between, self.text])


@dataclass(frozen=True)
class Judged:
    """Stands in for ``groupwise.evaluation.Evaluation`` where only the records are written."""

    stage: str
    mode: str
    records: tuple[dict[str, Any], ...]


@dataclass
class Story:
    """What happens in a run. ``progress`` goes from 0 at the first step to 1 at the last.

    The functions get (step, progress) and, for completions, the problem's number, the sample's and the right answer.
    """

    steps: int = 60
    overrides: Sequence[str] = ()
    accuracy: Callable[[float], float] = lambda p: 0.25 + 0.6 * p
    metrics: Callable[[int, float], Mapping[str, float | None]] = lambda step, p: {}
    without: Sequence[str] = ()
    """Metrics that are not logged."""
    write: Callable[[int, float, int, int, str], Written] | None = None
    reward: Callable[[int, float, str, bool], dict[str, float | None]] | None = None
    version: Callable[[int], int] = lambda step: step - 1
    evaluations: Sequence[tuple[str, float] | tuple[str, float, float]] = (("base", 0.0), ("warm_start", 0.3), ("final", 0.85))
    """Stage and share of right answers among ``held_out`` problems; then the share that is right anywhere, where it is larger."""
    held_out: int = 40
    finished: bool = True
    prompts: Callable[[int, int], str] = lambda step, group: f"<user> {step} + {group} = ?"
    held_out_prompts: Callable[[int], str] = lambda i: f"<user> {i} - {i + 1} = ?"
    loss: Callable[[int], float] = lambda step: 1e-8 * math.sin(step)
    extra: dict[str, Any] = field(default_factory=dict)
    advantages: Callable[[list[list[float]]], list[list[float]]] = group_advantages


def answered(answer: str) -> str:
    return f"<reasoning>\nit is {answer}.\n</reasoning>\n<answer>\n{answer}\n</answer>"


def healthy_text(accuracy: float, step: int, group: int, sample: int, answer: str) -> Written:
    """Right in ``accuracy`` of the cases, spread evenly by a fixed rule; no two wrong answers of a step alike."""
    place = (0.6180339887 * (step * 37 + group * 11 + sample + 1)) % 1
    return Written(answered(answer if place < accuracy else str(1000 + 50 * group + sample + step)))


def usual_metrics(story: Story, step: int, progress: float) -> dict[str, float | None]:
    """As the quickstart logs them: entropy and mismatch fall as the policy becomes sure, groups without variance grow in number."""
    accuracy, wobble = story.accuracy(progress), math.sin(1.7 * step)
    return {
        "reward/mean": 0.6 + 2 * accuracy + 0.1 * wobble,
        "reward/std": 1.0 - 0.8 * progress,
        "reward/correctness": 2 * accuracy + 0.1 * wobble,
        "reward/format": 0.6 + 0.2 * progress,
        "groups/zero_variance": 0.8 * progress,
        "groups/failed": 0.0,
        "accuracy/strict": accuracy + 0.03 * wobble,
        "accuracy/format": 0.6 + 0.4 * progress,
        "completions/tokens_mean": 32.0 + wobble,
        "completions/tokens_max": 48.0,
        "completions/truncated": 0.14 * (1 - progress),
        "completions/stop_rate": 1 - 0.14 * (1 - progress),
        "policy/loss": story.loss(step),
        "policy/ratio_deviation": 0.0,
        "policy/clip_share": 0.0,
        "policy/entropy": 0.5 - 0.45 * progress,
        "policy/sampler_mismatch": 0.016 - 0.012 * progress,
        "optimizer/grad_norm": 1.2 + 0.3 * wobble,
        "optimizer/learning_rate": 2e-5,
        "optimizer/dropped_updates": 0.0,
        "progress/policy_version": float(step),
    }


def write_run(folder: Path, story: Story | None = None) -> Path:
    """Write the run that ``story`` tells into ``folder``."""
    story = story or Story()
    config = load_config("quickstart", [f"training.steps={story.steps}", *story.overrides])
    run_folder = RunFolder.create(config, folder, "miniature", command=["groupwise", "train", "miniature"])
    tracker = JsonlTracker(run_folder, GROUPS)
    for step in range(1, story.steps + 1):
        progress = (step - 1) / max(1, story.steps - 1)
        logged = {**usual_metrics(story, step, progress), **story.metrics(step, progress)}
        tracker.step(step, {name: value for name, value in logged.items() if name not in story.without})
        groups = [make_group(story, step, progress, number) for number in range(GROUPS)]
        tracker.completions(step, groups, story.advantages([list(group.rewards) for group in groups]))
    for stage, *shares in story.evaluations:
        for mode in ("sampled", "greedy"):
            tracker.evaluation(make_evaluation(story, stage, mode, shares[0], shares[-1]))
    tracker.close()
    if story.finished:
        run_folder.write_summary({"seconds": 60.0})
    return folder


def make_group(story: Story, step: int, progress: float, number: int) -> Group:
    answer = str(step * 3 + number)
    problem = Problem(f"mini:train:{step}-{number}", f"{step} + {number} = ?", answer)
    written = [make_written(story, step, progress, number, sample, answer) for sample in range(G)]
    completions = tuple(
        Completion(
            one.whole,
            tuple(range(one.tokens)),
            tuple(-0.1 for _ in range(one.tokens)),
            one.finish_reason,
            sample,
            story.version(step),
            turns=one.turns,
        )  # type: ignore[arg-type]
        for sample, one in enumerate(written)
    )
    scores = [make_scores(story, step, progress, one.text, answer) for one in written]
    rewards = tuple(sum(value for value in one.values() if value is not None) for one in scores)
    return Group(
        Prompt(problem, story.prompts(step, number), (1, 2)),
        completions,
        rewards,
        {n: tuple(s[n] for s in scores) for n in scores[0]},
    )


def make_written(story: Story, step: int, progress: float, number: int, sample: int, answer: str) -> Written:
    if story.write:
        return story.write(step, progress, number, sample, answer)
    return healthy_text(story.accuracy(progress), step, number, sample, answer)


def make_scores(story: Story, step: int, progress: float, text: str, answer: str) -> dict[str, float | None]:
    right = graded(text, answer, "xml").strict
    if story.reward:
        return story.reward(step, progress, text, right)
    tags = sum(text.count(tag) == 1 for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"))
    slips = 0.2 if len(text) % 7 == 0 else 0.0  # a format score that always is the same would be a disease
    return {"correctness": 2.0 if right else 0.0, "format": 0.2 * tags - slips}


def make_evaluation(story: Story, stage: str, mode: str, strict: float, lenient: float) -> Any:
    records = []
    for i in range(story.held_out):
        right, anywhere = i < round(strict * story.held_out), i < round(lenient * story.held_out)
        text = answered("-1" if right else "77")
        judged = {"strict": right, "lenient": anywhere, "format": True, "extracted": "-1" if right else "77", "response": text}
        asked = {"problem": f"mini:held_out:{i}", "question": f"{i} - {i + 1} = ?", "prompt": story.held_out_prompts(i)}
        records.append({**asked, "expected": "-1", **judged, "finish_reason": "stop", "tokens": 30, **story.extra})
    return Judged(stage, mode, tuple(records))
