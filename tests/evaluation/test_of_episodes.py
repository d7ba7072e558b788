"""What an evaluation says of episodes, in closed form from records written by hand."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from groupwise.evaluation.figures import figures, headline_verdict
from groupwise.evaluation.judging import evaluation_of, training_effect
from groupwise.evaluation.models import compare_models
from groupwise.evaluation.records import make_record
from groupwise.tracking.console import ConsoleTracker
from groupwise.tracking.metric_table import describe_metric
from groupwise.tracking.numbers import evaluation_numbers
from groupwise.tracking.results import RunResult
from groupwise.tracking.tables import answer_text, comparison_lines, judged_tables, legend, summary_lines
from groupwise.types import Completion, Problem, Prompt, ToolCall, Turn

ASKED = {"temperature": 1.0, "max_tokens": 60, "style": "xml", "seed": 0}


def episode(*, calls=(), last="<answer>7</answer>", reward=None, reason="stop"):
    """A turn of 10 tokens for each call, whose result takes 5, and a last one of 4."""
    turns = []
    for call in calls:
        turns += [Turn("assistant", "<call>", 10, (call,)), Turn("tool", call.result, 5)]
    turns.append(Turn("assistant", last, 4))
    length = sum(turn.tokens for turn in turns)
    return Completion(last, tuple(range(length)), (-0.1,) * length, reason, turns=tuple(turns), reward=reward)


def records(*episodes):
    return [make_record(Prompt(Problem(f"p{i}", "?", "7"), "?", (1,)), one, "xml") for i, one in enumerate(episodes)]


FINE = ToolCall("search", {"query": "sea"}, "blue")
UNKNOWN = ToolCall("serach", {}, "error: there is none", "invalid")
RAISED = ToolCall("search", {}, "error: KeyError", "raised")
SLOW = ToolCall("search", {}, "error: no answer", "timed_out")
PLAYED = (
    episode(),
    episode(calls=(FINE,)),
    episode(calls=(FINE, UNKNOWN, RAISED)),
    episode(calls=(SLOW,), last="no", reason="length"),
)


def test_turns_calls_and_what_they_cost():
    counted = figures(records(*PLAYED))
    assert counted["episodes"] == {
        "turns": (1 + 2 + 4 + 2) / 4,
        "calls": 5 / 4,
        "invalid_calls": 1 / 5,
        "failed_calls": 2 / 5,
        "sampled_tokens": (4 + 14 + 34 + 14) / 4,
        "given_tokens": (0 + 5 + 15 + 5) / 4,
    }
    assert counted["mean_tokens"] == counted["episodes"]["sampled_tokens"] + counted["episodes"]["given_tokens"]
    assert "success" not in counted


def test_mean_turns_have_an_interval_whose_unit_is_the_problem():
    """Turns 1, 2, 4 and 2 of four problems: 2.25 +- 1.96 s / 2 with s^2 = (1.5625 + 2 x 0.0625 + 3.0625) / 3."""
    half = 1.959963984540054 * (4.75 / 3) ** 0.5 / 2
    once = records(*PLAYED)
    assert figures(once)["turns_interval"] == pytest.approx([2.25 - half, 2.25 + half])
    again = [{**record, "sample": 1} for record in once]
    assert figures(once + again)["turns_interval"] == pytest.approx([2.25 - half, 2.25 + half]), (
        "a second sample alike says nothing new"
    )
    assert "turns_interval" not in figures(records(episode()))


def test_without_a_call_no_share_of_calls_is_made_up():
    counted = figures(records(episode(), episode()))["episodes"]
    assert counted["calls"] == 0
    assert not {"invalid_calls", "failed_calls"} & counted.keys()


def test_completions_of_one_turn_without_tools_are_no_episodes():
    assert "episodes" not in figures(records(replace(episode(), turns=())))


def test_success_is_what_the_environment_gave_and_its_failures_are_none():
    """A right answer in text is no success, and an environment that failed judged nothing."""
    won, lost = episode(reward=0.5), episode(reward=-0.1)
    broken, nothing = episode(reason="environment_error"), episode(reward=0.0)
    counted = figures(records(won, lost, nothing, broken))
    assert counted["strict"][0] == 1.0
    assert counted["success"][0] == pytest.approx(1 / 3)
    assert counted["episodes"]["environment_failed"] == 1 / 4
    assert counted["episodes"]["reward"] == pytest.approx(0.4 / 3)
    only_broken = figures(records(broken, broken))
    assert "success" not in only_broken
    assert "reward" not in only_broken["episodes"]
    assert only_broken["episodes"]["environment_failed"] == 1.0


def test_what_a_failed_environment_leaves_is_no_call_of_the_policy():
    broken = episode(calls=(FINE,), reason="environment_error")
    died = replace(broken.turns[-1], calls=(ToolCall("step", {}, "error: gone", "raised"),))
    counted = figures(records(replace(broken, turns=(*broken.turns[:-1], died)), episode(calls=(RAISED,))))["episodes"]
    assert (counted["calls"], counted["failed_calls"]) == (1, 1 / 2)


def test_of_an_environment_that_gives_no_reward_one_failure_of_three_is_a_third():
    counted = figures(records(episode(), episode(), episode(reason="environment_error")))["episodes"]
    assert counted["environment_failed"] == pytest.approx(1 / 3)
    assert "reward" not in counted


def test_a_run_s_figures_are_there_where_no_answer_out_of_its_place_could_be_compared():
    asked = [{**record, "strict": False, "lenient": None, "unchecked": "x"} for record in records(episode(), episode())]
    found = evaluation_of(asked, stage="final", mode="greedy", conditions=ASKED)
    assert found.lenient_accuracy == found.strict_accuracy == 0.0


def test_models_are_compared_by_success_where_an_environment_judges():
    before = evaluation_of(records(*[episode(reward=0.0)] * 6), stage="eval", mode="greedy", conditions=ASKED)
    after = evaluation_of(records(*[episode(reward=1.0)] * 6), stage="eval", mode="greedy", conditions=ASKED)
    (row,) = compare_models([("a", [before]), ("b", [after])])
    assert (row["verdict"], row["fixed"], row["difference"]) == ("success", 6, 1.0)
    assert "] success; 6 problems fixed" in next(iter(comparison_lines([row])))
    effect = training_effect({"base": replace(before, stage="base"), "final": replace(after, stage="final")})
    (told,) = summary_lines({"comparison": effect})
    assert told.startswith("Problem by problem, by success, base -> after GRPO: 6 fixed, 0 broken")
    assert headline_verdict(records(episode()), records(episode(reward=1.0))) == "strict"


def test_an_environment_that_was_down_all_along_judges_no_comparison():
    """At the end of a run its models are compared: by what is known of a problem in both evaluations."""
    down = records(*[episode(reason="environment_error", last="no")] * 3)
    known = records(*[episode(reward=1.0)] * 3)
    assert headline_verdict(known, known) == "success"
    assert headline_verdict(known, down) == headline_verdict(down, down) == "strict"
    half = [*down[:1], *known[1:]], [*known[:1], *down[1:]]  # each problem is known in one of the two
    assert headline_verdict(*half) == "strict"
    base, final = (evaluation_of(one, stage=s, mode="greedy", conditions=ASKED) for one, s in ((known, "base"), (down, "final")))
    assert training_effect({"base": base, "final": final})["verdict"] == "strict"


def test_trackers_get_numbers_that_the_table_explains():
    row = evaluation_of(records(*PLAYED, episode(reward=1.0)), stage="final", mode="greedy", conditions=ASKED).to_summary()
    numbers = evaluation_numbers(row)
    assert numbers["evaluation/greedy_turns"] == 2.0
    assert numbers["evaluation/greedy_invalid_calls"] == 1 / 5
    assert [name for name in numbers if describe_metric(name) is None] == []


def test_the_data_frame_of_a_run_has_them(tmp_path):
    row = evaluation_of(records(*PLAYED, episode(reward=1.0)), stage="final", mode="greedy", conditions=ASKED).to_summary()
    frame = RunResult(tmp_path, {"evaluations": [row]}).evaluations
    assert frame["turns"].tolist() == [2.0]
    assert frame["given_tokens"].tolist() == [5.0]
    assert "success" not in frame, "it is not that of all episodes"
    all_judged = evaluation_of(records(episode(reward=1.0)), stage="final", mode="greedy", conditions=ASKED).to_summary()
    assert RunResult(tmp_path, {"evaluations": [all_judged]}).evaluations["success"].tolist() == [1.0]


def printed(show):
    out = io.StringIO()
    show(Console(file=out, width=80, force_terminal=False))
    return out.getvalue()


def test_the_table_and_the_terminal_say_it_in_80_columns():
    result = evaluation_of(records(*PLAYED, episode(calls=(FINE,), reward=1.0)), stage="eval", mode="greedy", conditions=ASKED)
    rows = [("one-model", result.to_summary()), ("without", evaluation_of(
        [{**r, "turns": []} | {} for r in records(replace(episode(), turns=()))], stage="eval", mode="greedy", conditions=ASKED,
    ).to_summary())]  # fmt: skip
    del rows[1][1]["figures"]["episodes"]
    text = printed(lambda console: [console.print(table) for table in judged_tables(rows, Text)])
    lines = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    assert lines["calls"] == ["1.2", "-"]
    assert lines["invalid calls"] == ["16.7%", "-"]
    assert max(map(len, text.splitlines())) <= 80
    assert "invalid and failed calls" in legend(rows)
    said = printed(lambda console: ConsoleTracker(console, show=0).evaluation(result))
    assert "turns 2.2 [1.24, 3.16], calls 1.2, invalid calls 16.7%, failed calls 33.3%" in " ".join(said.split())


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"success": True, "reward": 0.4, "finish_reason": "stop"}, "success (the environment's reward 0.4)"),
        ({"success": False, "reward": -1.0, "finish_reason": "length"}, "no success (the environment's reward -1, cut at the token limit)"),
        ({"success": None, "reward": None, "finish_reason": "timeout"}, "not judged (the environment took too long)"),
        ({"finish_reason": "length"}, "right, but not in the place asked for (found nothing, cut at the token limit)"),
    ],
)  # fmt: skip
def test_what_people_read_of_an_episode_is_the_environment_s_judgement(said, shown):
    record = {"strict": False, "lenient": True, "extracted": None, "response": "10", **said}
    assert str(answer_text(record, Text)) == f"10\n{shown}"
