"""Every rule about runs fires on a run that has the disease, names it with evidence, and no other run-of-the-mill run is ill."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from groupwise.algorithm import group_advantages
from groupwise.cli import app
from groupwise.doctor import RULES, diagnose_run
from groupwise.doctor.rewarding import disagreeing_verdicts, fallen_accuracy
from groupwise.tracking.reading import EvaluationRecords, read_run
from groupwise.types import ToolCall

from .miniature_runs import Story, Written, answered, healthy_text, write_run


def findings_of(folder, story=None):
    return {finding.rule: finding for finding in diagnose_run(read_run(write_run(folder, story)))}


@pytest.fixture(scope="module")
def ill(tmp_path_factory):
    """Findings of the runs of `DISEASES`, each written when it is first asked for."""

    class Found(dict):
        def __missing__(self, rule):
            return self.setdefault(rule, findings_of(tmp_path_factory.mktemp("ill") / "run", DISEASES[rule]))

    return Found()


def flat(value):
    return lambda step, p: value


def one_answer_late(step, p, group, sample, answer):
    return Written(answered("42")) if p > 0.5 else healthy_text(0.3, step, group, sample, answer)


def held_still(step, p):
    return {"policy/kl": 0.002 * p, "reward/mean": 1.0 + 0.1 * math.sin(step)}


def into_the_next_turn(step, p, group, sample, answer):
    return Written(f"{answered(answer)}<|im_end|>\n<|im_start|>user\nand {sample}?")


def every_other_cut(step, p, group, sample, answer):
    return Written(f"first {answer} and then", "length", 48) if sample % 2 else healthy_text(0.5, step, group, sample, answer)


def without_tags(step, p, group, sample, answer):
    return Written(f"The answer is {answer if sample % 2 else 9999}.")


def soon_solved(step, p):
    return {"groups/zero_variance": 1.0 if p > 0.5 else 0.3, "accuracy/strict": 0.3 + 0.7 * min(1, 2 * p)}


def one_bad_step(step, p):
    bad = {"optimizer/grad_norm": math.nan, "policy/loss": math.nan, "optimizer/dropped_updates": True}
    return bad if step == 33 else {}


def searching(steps, lowest=2.0**14):
    """Those steps' gradients overflow, by which the loss scale falls from 2^16 to ``lowest``."""

    def metrics(step, p):
        scale = {"optimizer/loss_scale": max(lowest, 2.0 ** (16 - sum(dropped < step for dropped in steps)))}
        overflow = {"optimizer/grad_norm": None, "optimizer/dropped_updates": 1.0}
        return scale | overflow if step in steps else scale

    return metrics


def hacked_reward(step, p, text, right):
    return {"correctness": 2.0 if right else 0.0, "length": len(text) / 100}


def words(step, p, group, sample, answer):
    """Wrong in the one half, and there at greater length."""
    wrong = "it is certainly and beyond any doubt " * (1 + round(8 * p)) + answered(str(5000 + sample))
    return Written(wrong if sample % 2 else answered(answer))


ASKED = ToolCall("search", {"query": "sea"}, "blue")
UNKNOWN = ToolCall("serach", {}, "error: there is no tool 'serach'", "invalid")
BROKEN = ToolCall("search", {"query": "sea"}, "error: KeyError: 'sea'", "raised")
TOOLS = ["rollout.tools=[calculator]", "rollout.max_turns=4", "rollout.max_completion_tokens=128"]
PLAYED = {"episodes/turns": 1.8, "episodes/calls": 0.8, "episodes/invalid_calls": 0.02, "episodes/failed_calls": 0.01}


def with_calls(*calls, share=1.0):
    """The healthy run's texts after ``calls``, in ``share`` of the completions; the others call nothing."""

    def write(step, p, group, sample, answer):
        healthy = healthy_text(0.25 + 0.6 * p, step, group, sample, answer)
        return replace(healthy, calls=calls if sample % 8 < 8 * share else ())

    return write


def played(metrics=lambda p: {}, write=None, **story):
    """A run with tools, in which all is well but for what is said."""
    return Story(
        overrides=TOOLS, metrics=lambda step, p: PLAYED | metrics(p), write=write or with_calls(ASKED, share=0.75), **story
    )


def right_without(step, p, group, sample, answer):
    """Those who do not call are right."""
    calls = () if sample % 2 else (ASKED,)
    return Written(answered(answer if sample % 2 else str(9000 + sample + step)), calls=calls)


CRITIC = {"value/loss": 0.2, "value/explained_variance": 0.4, "value/error": 0.02, "value/clip_share": 0.01}

DISEASES = {
    "reward-exploding": Story(metrics=lambda step, p: {"reward/mean": 1.0 if p < 0.5 else 500 * p, "reward/length": 500 * p}),
    "reward-saturated": Story(metrics=soon_solved),
    "no-variance": Story(
        metrics=lambda step, p: {"groups/zero_variance": 1.0, "accuracy/strict": 0.0, "reward/mean": 0.8},
        without=["optimizer/grad_norm", "policy/loss"], accuracy=lambda p: 0.0,
    ),
    "mode-collapse": Story(write=one_answer_late),
    "kl-above-band": Story(overrides=["algorithm.kl.beta=0.04"], metrics=lambda step, p: {"policy/kl": 0.4 * p}),
    "kl-below-band": Story(overrides=["algorithm.kl.beta=0.04"], accuracy=lambda p: 0.3, metrics=held_still),
    "kl-negative": Story(overrides=["algorithm.kl.beta=0.04"], metrics=lambda step, p: {"policy/kl": -0.02 if step == 30 else 0.07}),
    "ratio-off": Story(metrics=lambda step, p: {"policy/ratio_deviation": 0.2}),
    "entropy-collapse": Story(accuracy=lambda p: 0.3, metrics=lambda step, p: {"policy/entropy": 0.5 * math.exp(-8 * p)}),
    "never-stops": Story(
        metrics=lambda step, p: {"completions/stop_rate": 0.0, "completions/truncated": 1.0},
        write=lambda step, p, group, sample, answer: Written(f"{answer}, or {sample}, or", "length", 48),
    ),
    "stops-stopping": Story(
        metrics=lambda step, p: {"completions/stop_rate": 1 - 0.8 * p, "completions/truncated": 0.8 * p}, write=every_other_cut
    ),
    "truncated": Story(metrics=lambda step, p: {"completions/stop_rate": 0.5, "completions/truncated": 0.5}, write=every_other_cut),
    "talks-on": Story(write=into_the_next_turn),
    "reward-constant": Story(
        metrics=lambda step, p: {"reward/politeness": 0.0},
        reward=lambda step, p, text, right: {"correctness": 2.0 * right, "politeness": 0.0},
    ),
    "reward-failing": Story(metrics=lambda step, p: {"groups/failed": 1.0 if step % 10 == 0 else 0.0}),
    "judged-in-part": Story(metrics=lambda step, p: {"reward_model/truncated_judge": 0.1 * p, "reward_model/truncated_other": 0.0}),
    "strict-misses-right-answers": Story(write=without_tags),
    "reward-against-the-answer": Story(reward=hacked_reward, write=words),
    "reward-hacking": Story(
        accuracy=lambda p: 0.6 - 0.3 * p, metrics=lambda step, p: {"reward/mean": 1.0 + 2 * p},
        evaluations=[("base", 0.5), ("step-20", 0.6), ("step-40", 0.4), ("final", 0.1)],
    ),
    "format-without-answer": Story(accuracy=lambda p: 0.05, metrics=lambda step, p: {"accuracy/format": 0.1 + 0.9 * p}),
    "answers-lost": Story(evaluations=[("base", 0.1, 0.45), ("step-20", 0.2)]),
    "goes-on": Story(
        metrics=lambda step, p: {"completions/truncated": 0.6, "completions/stop_rate": 0.4},
        write=lambda step, p, group, sample, answer: Written(f"{answered(answer)}\nand so {sample}", "length" if sample else "stop", 48),
    ),
    "updates-lost": Story(metrics=lambda step, p: {"optimizer/updates_lost": 0.97}),
    "length-creep": Story(accuracy=lambda p: 0.4, metrics=lambda step, p: {"completions/tokens_mean": 30 + 30 * p}),
    "not-finite": Story(metrics=one_bad_step),
    "gradient-spikes": Story(metrics=lambda step, p: {"optimizer/grad_norm": 60.0} if step == 41 else {}),
    "no-movement": Story(overrides=["algorithm.kl.beta=0.04"], metrics=lambda step, p: {"policy/kl": 0.0}),
    "sampler-mismatch": Story(metrics=lambda step, p: {"policy/sampler_mismatch": 0.4}),
    "sampler-stale": Story(version=lambda step: 0),
    "leakage-seen": Story(held_out_prompts=lambda i: f"<user>  {i + 1} + 1 = ?"),
    "loss-zero-at-start": Story(),
    "loss-spikes": Story(metrics=lambda step, p: {"policy/loss": 3.0} if step == 41 else {}),
    "correction-at-its-cap": Story(
        overrides=["algorithm.correction.level=token"],
        metrics=lambda step, p: {"policy/correction_cut": 0.2 if 20 < step < 35 else 0.0, "policy/correction": 0.9},
    ),
    "samples-too-old": Story(
        overrides=["rollout.ahead=2"],
        metrics=lambda step, p: {"policy/correction_cut": 0.2 * p, "policy/correction": 0.9, "rollout/staleness": 2.0},
    ),
    "value-harmful": Story(metrics=lambda step, p: {**CRITIC, "value/explained_variance": 0.3 - p}),
    "value-biased": Story(metrics=lambda step, p: {**CRITIC, "value/error": 1.5}),
    "kl-target-missed": Story(
        overrides=["algorithm.kl.beta=0.04", "algorithm.kl.target=0.03"],
        metrics=lambda step, p: {"policy/kl": 0.09, "policy/beta": 0.04 * 1.15**step},
    ),
    "refills-exhausted": Story(
        overrides=["rollout.refill_rounds=2"], metrics=lambda step, p: {"groups/zero_variance": 0.8, "groups/sampled": 24.0}
    ),
    "reward-clipped": Story(metrics=lambda step, p: {"shaping/clipped_correctness": 0.9 * p}),
    "reward-processes-die": Story(metrics=lambda step, p: {"calls/killed_correctness": 1.0 if step % 20 == 7 else 0.0}),
    "never-calls": played(lambda p: {"episodes/calls": 0.5 * (1 - p) ** 8, "episodes/turns": 1.0}, with_calls()),
    "calls-in-a-loop": played(write=with_calls(ASKED, ASKED, ASKED, share=0.5)),
    "invalid-calls": played(lambda p: {"episodes/invalid_calls": 0.05 + 0.4 * p}, with_calls(UNKNOWN, share=0.5)),
    "tool-errors": played(lambda p: {"episodes/failed_calls": 0.4}, with_calls(BROKEN, share=0.5)),
    "reward-without-tool": played(write=right_without),
    "rate-too-low": Story(overrides=["optimizer.precision=pure", "optimizer.learning_rate=1e-6"]),
}  # fmt: skip


def test_every_rule_about_runs_has_a_run_with_its_disease():
    assert {rule.name for rule in RULES if rule.subject == "run"} <= set(DISEASES)


@pytest.mark.parametrize("rule", DISEASES)
def test_the_rule_fires_and_says_where(rule, ill):
    found = ill[rule]
    assert rule in found, list(found)
    finding = found[rule]
    assert any(letter.isdigit() for letter in finding.summary), "no number in the evidence"
    assert finding.numbers
    if rule != "rate-too-low":  # the one that is about settings
        assert finding.steps is not None
        assert 1 <= finding.steps[0] <= finding.steps[1] <= 60
        assert len(finding.examples) == 3
        assert all(example.text for example in finding.examples)
    assert json.loads(json.dumps(finding.to_json()))["remedy"]


@pytest.fixture(scope="module")
def of_the_healthy(tmp_path_factory):
    return findings_of(tmp_path_factory.mktemp("healthy") / "run")


@pytest.mark.parametrize("rule", sorted(set(DISEASES) - {"loss-zero-at-start"}))
def test_no_rule_fires_on_a_healthy_run(rule, of_the_healthy):
    assert rule not in of_the_healthy


HEALTHY = {
    "as the quickstart": Story(),
    "with a reference, in the band": Story(overrides=["algorithm.kl.beta=0.04"], metrics=lambda step, p: {"policy/kl": 0.08 * p}),
    "with several updates": Story(
        overrides=["algorithm.updates_per_batch=4"], metrics=lambda step, p: {"policy/ratio_deviation": 0.3, "policy/clip_share": 0.05}
    ),
    "with a learned value": Story(
        metrics=lambda step, p: {**CRITIC, "value/explained_variance": -0.5 + 1.2 * min(1, 3 * p), "value/loss": 0.5 - 0.3 * p}
    ),
    "with an adaptive KL": Story(
        overrides=["algorithm.kl.beta=0.04", "algorithm.kl.target=0.06"],
        metrics=lambda step, p: {"policy/kl": 0.07 * min(1, 3 * p), "policy/beta": 0.04 * (1 + p)},
    ),
    "with refills": Story(
        overrides=["rollout.refill_rounds=3"], metrics=lambda step, p: {"groups/zero_variance": 0.4, "groups/sampled": 14.0}
    ),
    "with a correction for the sampler": Story(
        overrides=["algorithm.correction.level=token"],
        metrics=lambda step, p: {"policy/correction_cut": 0.001, "policy/correction": 0.999},
    ),
    "with shaped rewards": Story(
        metrics=lambda step, p: {"shaping/clipped_correctness": 0.1, "calls/killed_correctness": 1.0 if step == 9 else 0.0}
    ),
    "with tools": played(),
    "with tools, all call": played(write=with_calls(ASKED)),
    "with tools, that are asked twice": played(write=with_calls(ASKED, replace(ASKED, arguments={"query": "land"}, result="green"))),
    "with an environment that is never called, since it takes steps": Story(
        overrides=["rollout.environment=game.py:Guess"], metrics=lambda step, p: {**PLAYED, "episodes/calls": 0.0}, write=with_calls()
    ),
    "just begun": Story(steps=3, finished=False, evaluations=[("base", 0.0)]),
    "not one step yet": Story(steps=0, finished=False, evaluations=[("base", 0.0)]),
    "answers grow longer and better": Story(metrics=lambda step, p: {"completions/tokens_mean": 30 + 60 * p}),
    "in bfloat16, rounded stochastically": Story(
        overrides=["optimizer.precision=stochastic", "model.dtype=bfloat16"],
        metrics=lambda step, p: {"optimizer/updates_lost": 0.95},
    ),
    "in fp16, whose loss scale finds its place": Story(overrides=["model.dtype=float16"], metrics=searching({1, 2, 40})),
    "with penalties that nobody has earned": Story(
        overrides=["rewards.functions=[correctness, overlong, {function: keyword, arguments: {avoid: [sorry]}}]"],
        metrics=lambda step, p: {"reward/overlong": 0.0, "reward/keyword": 0.0},
        reward=lambda step, p, text, right: {"correctness": 2.0 * right, "overlong": 0.0, "keyword": 0.0},
    ),
    "sure of itself": Story(metrics=lambda step, p: {"policy/entropy": 0.5 * math.exp(-6 * p)}),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_have_no_findings_but_what_is_normal(name, of_the_healthy, tmp_path):
    found = findings_of(tmp_path / "run", HEALTHY[name]) if HEALTHY[name] != Story() else of_the_healthy
    assert [f for f in found.values() if f.severity != "normal"] == []


def test_answers_that_are_lost_and_those_that_come_back(tmp_path):
    """As a real run of 1.5B did: 10.0% and 45.0% before, 28.0% and 28.5% after 8 steps, 64.0% and 64.0% in the end."""
    base, low, high = ("base", 0.1, 0.45), ("step-8", 0.28, 0.285), ("final", 0.64)
    story = Story(held_out=200, evaluations=[base, low])
    found = findings_of(tmp_path / "low", story)["answers-lost"]
    assert (
        "right anywhere in the answer fell from 45.0% to 28.5%, and right in the place asked for went from 10.0%" in found.summary
    )
    assert found.steps == (1, 8)
    back = findings_of(tmp_path / "back", replace(story, evaluations=[base, low, high]))
    few = findings_of(tmp_path / "few", replace(story, held_out=10))
    warm = replace(story, evaluations=[("base", 0.1, 0.7), ("warm_start", 0.1, 0.45), low])
    found = findings_of(tmp_path / "warm", warm)["answers-lost"]
    assert "warm_start to step-8" in found.summary, "what a warm start loses is not GRPO's"
    assert found.numbers["lenient_before"] == pytest.approx(0.45)
    unknown = findings_of(tmp_path / "unknown", replace(story, evaluations=[("step-2", 0.1, 0.45), low]))
    assert not any("answers-lost" in one for one in (back, few, unknown))


def paid_leniently(step, p, text, right):
    return {"accuracy": 1.0 if right or text == str(step * 3) or text == str(step * 3 + 1) else 0.0}


def one_letter(step, p, group, sample, answer):
    """Of four choices the right one in most samples, and each of the others in some."""
    letter = "ABCD"[(step + group + (0 if sample < 5 else sample)) % 4]
    return Written(answered(letter))


def test_what_is_paid_leniently_is_not_said_to_be_paid_as_wrong(tmp_path):
    """Nor is the format's pay taken for it."""

    def written(step, p, group, sample, answer):
        return Written(answer if sample % 2 else str(7000 + sample + step))

    found = findings_of(tmp_path / "strict", Story(write=written))
    assert found["strict-misses-right-answers"].severity == "critical"
    assert "strict-misses-right-answers" not in findings_of(tmp_path / "run", Story(write=written, reward=paid_leniently))


def test_one_of_four_letters_stands_for_many_problems_by_right(tmp_path):
    assert "mode-collapse" not in findings_of(tmp_path / "run", Story(write=one_letter))
    same = Story(write=lambda step, p, group, sample, answer: Written(answered("A" if sample < 5 else answer)))
    assert "most samples of 24 of 24 problems" in findings_of(tmp_path / "same", same)["mode-collapse"].summary


def test_a_keyword_that_nobody_uses_is_told_and_words_that_nobody_says_are_not(tmp_path):
    keywords = "{function: keyword, arguments: {avoid: [sorry]}}, {function: keyword, arguments: {words: [therefore]}}"
    story = Story(
        overrides=[f"rewards.functions=[{keywords}]"], reward=lambda step, p, text, right: {"keyword": 0.0, "keyword_2": 0.0}
    )
    found = findings_of(tmp_path / "run", story)["reward-constant"]
    assert found.severity == "critical", "nothing is left to learn from"
    assert [name for name in found.numbers if name.startswith("completions, ")] == ["completions, keyword_2"]


def test_failed_groups_are_a_share_of_all_that_were_sampled(tmp_path):
    refilled = Story(
        overrides=["rollout.refill_rounds=3"], metrics=lambda step, p: {"groups/sampled": 32.0, "groups/failed": 3.0}
    )  # of 8 that are learnt from
    found = findings_of(tmp_path / "run", refilled)["reward-failing"]
    assert (found.severity, found.numbers["share"]) == ("warning", pytest.approx(3 / 32))
    assert "180 groups could not be scored (9.4% of all groups)" in found.summary


@pytest.mark.parametrize(
    ("environment", "of_functions", "blamed"), [(True, 0.0, True), (True, 1.0, False), (False, 0.0, False), (True, None, False)]
)
def test_an_environment_that_fails_is_no_reward_function(tmp_path, environment, of_functions, blamed):
    calls = {} if of_functions is None else {"calls/failed_correctness": of_functions}
    story = Story(
        overrides=["rollout.environment=game.py:Guess"] * environment,
        metrics=lambda step, p: {**PLAYED, "groups/failed": float(step == 30)} | (calls if step == 30 else {}),
    )
    found = findings_of(tmp_path / "run", story)["reward-failing"]
    assert ("no reward function failed, but the environment, which raised or took longer than" in found.summary) is blamed


def test_a_bad_beginning_is_over_where_groups_differ_now(tmp_path):
    def flat(until):
        return Story(
            metrics=lambda step, p: {"groups/zero_variance": 1.0 if step <= until else 0.3}, accuracy=lambda p: 0.2 + 0.2 * p
        )

    assert "no-variance" not in findings_of(tmp_path / "over", flat(20))
    assert "no-variance" in findings_of(tmp_path / "still", flat(60))
    first = replace(flat(20), steps=20, finished=False)
    assert "no-variance" in findings_of(tmp_path / "first", first), "it is said while it lasts"


@pytest.mark.parametrize(
    ("overrides", "teach"),
    [
        (["algorithm.preset=grpo"], False),
        (["algorithm.preset=dr_grpo"], False),
        (["algorithm.preset=ppo"], True),
        (["algorithm.preset=reinforce++"], True),
        (["algorithm.preset=gdpo"], True),
        (["algorithm.advantage.baseline=none", "algorithm.advantage.scale=none"], True),
        (["algorithm.kl.beta=0.03", "algorithm.kl.placement=reward"], True),
    ],
)
def test_groups_without_variance_are_no_fault_where_they_teach(tmp_path, overrides, teach):
    """As two completions of each prompt, of which one in twenty is right: most pairs are wrong twice."""
    hard = {"groups/zero_variance": 0.95, "accuracy/strict": 0.05, "reward/mean": 0.1}
    found = findings_of(tmp_path / "hard", Story(overrides=overrides, accuracy=lambda p: 0.05, metrics=lambda step, p: hard))
    assert ("no-variance" in found) is not teach
    found = findings_of(tmp_path / "solved", Story(overrides=overrides, metrics=soon_solved))
    assert ("further steps change " + ("little" if teach else "nothing")) in found["reward-saturated"].summary


@pytest.mark.parametrize(("baseline", "teach"), [("batch_mean", True), ("group_mean", False)])
def test_whether_groups_without_variance_teach_under_an_advantage_of_ones_own_is_in_the_records(tmp_path, baseline, teach):
    """All are wrong in one group of each step and right in the other."""
    hard = {"groups/zero_variance": 1.0, "accuracy/strict": 0.5, "reward/mean": 1.0}
    story = Story(
        overrides=["algorithm.advantage.type=mine.py:mine"], metrics=lambda step, p: hard,
        write=lambda step, p, group, sample, answer: Written(answered(answer if group else "-1")),
        advantages=lambda rewards: group_advantages(rewards, baseline, "none"),
    )  # fmt: skip
    assert ("no-variance" in findings_of(tmp_path / "hard", story)) is not teach
    story.metrics = soon_solved
    found = findings_of(tmp_path / "solved", story)
    assert ("further steps change " + ("little" if teach else "nothing")) in found["reward-saturated"].summary


@pytest.mark.parametrize(("reward", "solved"), [(0.0, False), (-1.0, False), (1.0, True)])
def test_right_answers_that_nobody_is_paid_for_are_not_solved_problems(tmp_path, reward, solved):
    """As where the reward wants a form that no answer has."""
    same = {"groups/zero_variance": 1.0, "accuracy/strict": 0.9, "reward/mean": reward}
    found = findings_of(tmp_path / "run", Story(accuracy=lambda p: 0.9, metrics=lambda step, p: same))
    assert ("reward-saturated" in found, "no-variance" in found) == (solved, not solved)


def test_the_best_of_many_evaluations_is_better_by_chance(tmp_path):
    """Of 40 problems the best middle evaluation has 6 that are wrong at the end: p = 0.03 for a pair that nobody chose."""
    rising = {"metrics": lambda step, p: {"reward/mean": 1.0 + 2 * p}, "accuracy": lambda p: 0.6}
    stages = [(f"step-{step}", 0.6 if step == 20 else 0.45) for step in range(10, 60, 10)]
    chosen = Story(evaluations=[*stages, ("final", 0.45)], **rising)
    assert "reward-hacking" not in findings_of(tmp_path / "chosen", chosen)
    fallen = Story(evaluations=[*stages, ("final", 0.2)], **rising)
    assert "reward-hacking" in findings_of(tmp_path / "fallen", fallen)


def test_an_environment_s_runs_are_judged_by_what_it_gives(tmp_path):
    """The answer of the last turn, which nobody asked for, is wrong throughout."""
    solved = Story(
        overrides=["rollout.environment=game.py:Guess", "rewards.functions=[environment]"], accuracy=lambda p: 0.0,
        metrics=lambda step, p: {
            **PLAYED, "reward/mean": min(1.0, 0.3 + p), "groups/zero_variance": 1.0 if p > 0.7 else 0.2,
            "completions/tokens_mean": 30 + 30 * p, "policy/entropy": 0.5 * math.exp(-8 * p), "accuracy/format": 0.1 + 0.9 * p,
        },
        write=lambda step, p, group, sample, answer: Written(f"{sample} {step}"),
        evaluations=[("base", 0.5), ("final", 0.1)], extra={"reward": 1.0, "success": True},
    )  # fmt: skip
    found = findings_of(tmp_path / "run", solved)
    assert {name for name, one in found.items() if one.severity in ("critical", "warning")} == set()


def test_an_environment_that_gives_the_same_throughout_is_not_solved(tmp_path):
    def stuck(reward):
        return Story(
            overrides=["rollout.environment=game.py:Guess", "rewards.functions=[environment]"],
            metrics=lambda step, p: {**PLAYED, "reward/mean": reward, "groups/zero_variance": 1.0},
        )

    for reward in (0.0, 0.1):
        found = findings_of(tmp_path / str(reward), stuck(reward))["no-variance"]
        assert f"at a mean reward of {reward:.3g}; " in found.summary
        assert "nan" not in json.dumps(found.to_json()).lower()


def test_answers_that_nobody_could_compare_are_no_right_ones_out_of_place(tmp_path):
    """math-verify gave no verdict on what stands outside the place asked for: that is known of neither."""
    run = read_run(write_run(tmp_path / "run", Story()))
    kinds = [(True, True)] * 10 + [(False, None)] * 15 + [(False, False)] * 15
    records = tuple({"problem": str(i), "strict": strict, "lenient": lenient} for i, (strict, lenient) in enumerate(kinds))
    run = replace(run, completions=(), evaluations=(EvaluationRecords("final", "greedy", records),))
    assert disagreeing_verdicts(run) is None


def test_a_game_that_is_cut_by_its_turns_is_no_answer_that_goes_on(tmp_path):
    """Each move stands where an answer would."""
    cut = Story(
        overrides=["rollout.environment=game.py:Guess", "rewards.functions=[environment]"],
        metrics=lambda step, p: {**PLAYED, "completions/truncated": 0.5, "completions/stop_rate": 0.5},
        write=lambda step, p, group, sample, answer: Written(answered(answer), "max_turns" if sample % 2 else "stop"),
    )
    assert "goes-on" not in findings_of(tmp_path / "run", cut)


def test_answers_of_an_agent_are_judged_where_rewards_are_for_answers(tmp_path):
    story = Story(
        overrides=["rollout.environment={command: python agent.py}", "rewards.functions=[correctness, format]"],
        accuracy=lambda p: 0.6 - 0.3 * p, metrics=lambda step, p: {"reward/mean": 1.0 + 2 * p}, evaluations=[],
    )  # fmt: skip
    assert "reward-hacking" in findings_of(tmp_path / "run", story)


@pytest.mark.parametrize(
    "columns", [["data.answer_column=Question"], ["data.prompt_column=ask", "data.answer_column=ask"]], ids=len
)
def test_prompts_without_answers_are_judged_by_the_reward_alone(columns, tmp_path):
    """No answer is right throughout, since none is known; the reward rises to its top."""
    longer = {
        "accuracy": lambda p: 0.0, "write": lambda step, p, group, sample, answer: Written(f"dear {sample} {step}"), "evaluations": [],
        "metrics": lambda step, p: {
            "reward/mean": min(1.0, 0.3 + p), "groups/zero_variance": 1.0 if p > 0.7 else 0.2, "accuracy/format": 0.1 + 0.9 * p,
            "completions/tokens_mean": 30 + 30 * p, "policy/entropy": 0.5 * math.exp(-8 * p),
        },
        "reward": lambda step, p, text, right: {"kind": float(len(text) % 5)},
    }  # fmt: skip
    with_answers = findings_of(tmp_path / "with", Story(**longer))
    assert {"length-creep", "entropy-collapse", "no-variance"} <= with_answers.keys()
    (tmp_path / "asked.jsonl").write_text('{"Question": "1 + 1?", "ask": "2 + 2?"}\n')
    columns = [f"data.source={tmp_path / 'asked.jsonl'}", *columns]
    found = findings_of(tmp_path / "without", Story(overrides=columns, **longer))
    assert {name for name, one in found.items() if one.severity in ("critical", "warning")} == set()


def test_the_loss_is_not_called_normal_where_it_is_not_0(tmp_path):
    assert "loss-zero-at-start" not in findings_of(tmp_path / "run", Story(loss=lambda step: 0.3))


def test_evidence_names_the_steps_the_numbers_and_three_completions(ill):
    finding = ill["truncated"]["truncated"]
    assert finding.numbers["truncated_late"] == pytest.approx(0.5)
    assert finding.steps == (49, 60)
    spike = ill["gradient-spikes"]["gradient-spikes"]
    assert spike.steps == (41, 41)
    assert "60" in spike.summary
    assert len(spike.examples) == 3
    assert all(example.where.startswith("step 41, problem mini:train:41-") for example in spike.examples)


def test_a_growing_disagreement_is_a_sampler_left_behind_and_a_steady_one_is_not(ill, tmp_path):
    growing = findings_of(tmp_path / "a", Story(metrics=lambda step, p: {"policy/sampler_mismatch": 0.005 + 0.5 * p}))
    assert "sampler-stale" in growing
    assert "sampler-mismatch" not in growing
    assert "sampler-stale" not in ill["sampler-mismatch"]


def test_a_disagreement_that_grows_with_an_adapter_that_drops_out_is_no_fault(tmp_path):
    story = Story(overrides=["model.lora.dropout=0.05"], metrics=lambda step, p: {"policy/sampler_mismatch": 0.005 + 0.5 * p})
    assert not {"sampler-stale", "sampler-mismatch"} & findings_of(tmp_path / "dropout", story).keys()
    story.overrides = ["model.lora.rank=16"]
    assert "sampler-stale" in findings_of(tmp_path / "none", story)


def test_groups_that_failed_are_not_groups_without_variance(tmp_path):
    failing = {"groups/zero_variance": 0.0, "groups/sampled": 24.0, "groups/failed": 22.0}
    story = Story(overrides=["rollout.refill_rounds=2"], metrics=lambda step, p: failing)
    assert not {"no-variance", "refills-exhausted"} & findings_of(tmp_path / "run", story).keys()


def test_samples_of_rounded_weights_are_no_fault_of_the_sampler(tmp_path):
    apart = {"policy/sampler_mismatch": 0.4}
    story = Story(overrides=["rollout.quantization=8bit"], metrics=lambda step, p: apart)
    assert "sampler-mismatch" not in findings_of(tmp_path / "run", story)
    assert "sampler-mismatch" in findings_of(tmp_path / "exact", Story(metrics=lambda step, p: apart))
    story.overrides += ["algorithm.correction=null"]
    assert "sampler-mismatch" in findings_of(tmp_path / "as they are", story)


def test_samples_of_older_weights_are_no_fault_of_the_sampler(tmp_path):
    """With rollout.ahead they disagree with the trainer by right, and a ratio to the sampler is not 1."""
    old = {"policy/sampler_mismatch": 0.4, "policy/ratio_deviation": 0.2, "policy/clip_share": 0.02}
    story = Story(
        overrides=["rollout.ahead=4", "algorithm.stale_samples=behaviour"], metrics=lambda step, p: old,
        version=lambda step: max(0, step - 5),
    )  # fmt: skip
    found = findings_of(tmp_path / "run", story)
    assert not {"sampler-mismatch", "sampler-stale", "ratio-off", "samples-too-old"} & found.keys()
    story.metrics = lambda step, p: {**old, "policy/clip_share": 0.5 * p}
    assert "the clip cut off" in findings_of(tmp_path / "clipped", story)["samples-too-old"].summary


def test_a_cut_distribution_is_no_cause_of_a_correction_at_its_cap(ill):
    """Without the tokens that it cuts out the others are likelier to the sampler than to the trainer: weights are below 1."""
    assert "top_p" not in ill["correction-at-its-cap"]["correction-at-its-cap"].remedy


@pytest.mark.parametrize(
    ("loss", "drops"),
    [("clip", True), ("gmpo", True), ("dppo", True), ("mine.py:loss", True), ("cispo", False), ("topr", False)],
)
def test_a_clip_that_keeps_the_gradient_is_no_fault(tmp_path, loss, drops):
    """CISPO and TOPR hold a token's weight, and the token still teaches."""
    clipped = {"policy/ratio_deviation": 0.3, "policy/clip_share": 0.5}
    several = ["algorithm.updates_per_batch=4", f"algorithm.loss.type={loss}"]
    found = findings_of(tmp_path / "several", Story(overrides=several, metrics=lambda step, p: clipped))
    assert ("ratio-off" in found) is drops
    ahead = ["rollout.ahead=4", "algorithm.stale_samples=behaviour", f"algorithm.loss.type={loss}"]
    found = findings_of(tmp_path / "ahead", Story(overrides=ahead, metrics=lambda step, p: clipped))
    assert ("samples-too-old" in found) is drops
    assert ("ratio-off" in found) is drops


def test_reward_hacking_shows_without_evaluations_too(tmp_path):
    story = Story(accuracy=lambda p: 0.6 - 0.3 * p, metrics=lambda step, p: {"reward/mean": 1.0 + 2 * p}, evaluations=[])
    assert "accuracy in training" in findings_of(tmp_path / "run", story)["reward-hacking"].summary


def test_an_accuracy_that_stays_where_it_is_is_seldom_said_to_fall():
    """It is looked at again and again, as `Watch` does; a step's accuracy is of 8 problems of unlike difficulty, 8 completions each."""
    told = 0
    for seed in range(300):
        draws = random.Random(seed)
        problems = ((draws.betavariate(2, 2) for _ in range(8)) for _ in range(109))
        points = [
            (step, sum(draws.random() < p for p in of_step for _ in range(8)) / 64) for step, of_step in enumerate(problems, 1)
        ]
        looks = [points[:n] for n in (10, 15, 22, 33, 49, 73, 109)]
        told += any(fallen_accuracy(SimpleNamespace(config=None, series=lambda _, seen=seen: seen)) for seen in looks)
    assert told < 0.05 * 300


def test_a_format_reward_that_is_earned_without_the_form_is_told(tmp_path):
    """As a real run of 135M did: it recited the tags of the system prompt, which earns them, and is not in the form."""
    story = Story(accuracy=lambda p: 0.0, metrics=lambda step, p: {"accuracy/format": 0.0, "reward/format": 0.8 * min(1.0, 0.1 + p)},
                  reward=lambda step, p, text, right: {"correctness": 0.0, "format": 0.8})  # fmt: skip
    summary = findings_of(tmp_path / "run", story)["format-without-answer"].summary
    assert "what 'format' pays" in summary
    assert "in exactly the form asked for are 0%" in summary
    story.accuracy = lambda p: 0.5 * p
    assert "format-without-answer" not in findings_of(tmp_path / "right", story)


def test_what_a_tool_returned_is_not_taken_for_the_policy_s_words(tmp_path):
    """The marks of turns and an answer in a result are not the policy's; the same in its own turn are."""
    told = ToolCall("search", {}, f"\nassistant\n{answered('7')}")
    found = findings_of(tmp_path / "given", played(write=with_calls(told)))
    assert not {"talks-on", "goes-on", "mode-collapse"} & found.keys()
    own = played(write=lambda step, p, g, s, answer: Written(f"{answered(answer)}\nassistant\nand {s}?", calls=(ASKED,)))
    assert "talks-on" in findings_of(tmp_path / "own", own)


def test_turns_that_began_in_the_first_steps_alone_are_over(tmp_path):
    def write(step, p, group, sample, answer):
        begun = into_the_next_turn(step, p, group, sample, answer)
        return begun if step <= 20 else healthy_text(0.5, step, group, sample, answer)

    assert "talks-on" not in findings_of(tmp_path / "run", Story(write=write))


def test_a_die_that_is_rolled_again_is_no_loop(tmp_path):
    rolls = tuple(ToolCall("roll", {}, str(face)) for face in (3, 5, 1))
    assert "calls-in-a-loop" not in findings_of(tmp_path / "run", played(write=with_calls(*rolls)))


def test_a_run_of_episodes_without_a_reward_in_its_metrics_is_read_all_the_same(tmp_path):
    looping = with_calls(ASKED, ASKED, ASKED, share=0.5)
    found = findings_of(tmp_path / "run", played(write=looping, without=["reward/mean"]))
    assert "calls-in-a-loop" in found


@pytest.mark.parametrize(("begin", "mark"), [("<tool_call>", "<tool_call>"), ('{\n  "name": "search"', '{"name":')])
def test_calls_in_another_format_are_pointed_at(tmp_path, begin, mark):
    def other(step, p, group, sample, answer):
        return Written(f"{begin} {step + sample}", calls=())

    finding = findings_of(tmp_path / "run", played(lambda p: {"episodes/calls": 0.0}, other))["never-calls"]
    assert f"completions contain {mark!r}, which is no call by rollout.call_format=" in finding.summary
    assert finding.examples[0].text.startswith(begin)


def test_a_reward_without_the_tool_is_a_warning_once_calls_fall(tmp_path):
    steady = findings_of(tmp_path / "steady", played(write=right_without))["reward-without-tool"]
    falling = findings_of(tmp_path / "falling", played(lambda p: {"episodes/calls": 0.8 - 0.6 * p}, right_without))
    assert (steady.severity, falling["reward-without-tool"].severity) == ("note", "warning")
    assert steady.numbers["gain"] == pytest.approx(2.0, abs=0.1)


def test_examples_of_episodes_say_who_speaks_and_how_they_ended(tmp_path):
    cut = played(
        lambda p: {"completions/stop_rate": 0.5, "completions/truncated": 0.5},
        lambda step, p, g, s, answer: replace(
            with_calls(ASKED)(step, p, g, s, answer), finish_reason="max_turns" if s % 2 else "stop"
        ),
    )
    finding = findings_of(tmp_path / "run", cut)["truncated"]
    assert "rollout.max_completion_tokens = 128 or rollout.max_turns = 4" in finding.summary
    assert "cut at the limit of turns" in finding.examples[0].remark
    assert finding.examples[0].text.startswith("[assistant] <call>\n[tool] blue\n[assistant] <reasoning>")


def test_the_gravest_comes_first(tmp_path):
    story = Story(
        metrics=lambda step, p: {
            "completions/stop_rate": 0.0,
            "completions/truncated": 1.0,
            "reward/mean": 1.0 if p < 0.5 else 500 * p,
        }
    )
    severities = [f.severity for f in diagnose_run(read_run(write_run(tmp_path / "run", story)))]
    assert severities == sorted(severities, key=["critical", "warning", "note", "normal"].index)
    assert severities[0] == "critical"


def severities(folder, story):
    return {
        rule: finding.severity
        for rule, finding in findings_of(folder, story).items()
        if finding.severity in ("critical", "warning")
    }


@pytest.mark.parametrize("rule", ["strict-misses-right-answers", "never-stops", "no-variance", "talks-on", "reward-constant"])
def test_a_warning_takes_five_steps_and_a_critical_finding_ten(rule, ill, tmp_path):
    """What one step shows may be gone after the next four: a run of 24 steps was called critical at its first."""
    for steps in (1, 4):
        assert severities(tmp_path / str(steps), replace(DISEASES[rule], steps=steps, evaluations=())) == {}
    early = severities(tmp_path / "early", replace(DISEASES[rule], steps=6, evaluations=()))
    assert set(early.values()) <= {"warning"}
    late = severities(tmp_path / "late", replace(DISEASES[rule], steps=20, evaluations=()))
    assert late[rule] == ill[rule][rule].severity


def test_what_one_step_shows_for_certain_is_told_at_once(tmp_path):
    story = Story(steps=2, evaluations=(), metrics=lambda step, p: {"policy/ratio_deviation": 0.2})
    assert severities(tmp_path / "ratio", story) == {"ratio-off": "warning"}
    story = Story(steps=2, evaluations=(), metrics=lambda step, p: {"policy/loss": None if step == 2 else 0.0})
    assert severities(tmp_path / "nan", story) == {"not-finite": "warning"}


def test_one_number_that_is_not_finite_is_a_warning_and_several_are_critical(tmp_path):
    for bad, severity in (({30}, "warning"), ({30, 31}, "critical")):
        story = Story(metrics=lambda step, p, bad=bad: {"policy/loss": None} if step in bad else {})
        assert findings_of(tmp_path / str(len(bad)), story)["not-finite"].severity == severity


def test_a_loss_scale_that_never_finds_its_place_is_told(tmp_path):
    """Four overflows in a row are its search. Six are not, nor is one at a scale of 1 (which is not logged) or of the loss."""
    story = Story(overrides=["model.dtype=float16"], metrics=searching(set(range(20, 24)), 1.0))
    assert "not-finite" not in findings_of(tmp_path / "four", story)
    found = findings_of(tmp_path / "six", replace(story, metrics=searching(set(range(20, 26)), 1.0)))["not-finite"]
    assert (found.severity, found.steps) == ("critical", (24, 25))
    at_one = replace(story, metrics=searching({20, 40}), without=["optimizer/loss_scale"])
    assert findings_of(tmp_path / "one", at_one)["not-finite"].severity == "critical"
    of_the_loss = replace(story, metrics=lambda step, p: searching({20})(step, p) | ({"policy/loss": None} if step == 20 else {}))
    assert findings_of(tmp_path / "loss", of_the_loss)["not-finite"].steps == (20, 20)


def test_a_run_of_three_steps_is_not_called_healthy(tmp_path):
    result = CliRunner().invoke(app, ["doctor", str(write_run(tmp_path / "run", Story(steps=3, finished=False, evaluations=())))])
    assert "Too early to judge: 3 steps, and it takes 5." in result.stdout
    assert "No problem found" not in result.stdout
