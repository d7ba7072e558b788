"""The terminal shows a run, obeys nobody but us, and gets its screen back."""

import io
import re
import sys
import types

import pytest
from rich.console import Console
from rich.text import Text

from groupwise.config.schema import Config
from groupwise.evaluation import build_summary, evaluate_stage
from groupwise.tracking import ConsoleTracker, Phase, Trackers
from groupwise.tracking.numbers import averaged, clock, number, sparkline
from groupwise.tracking.tables import summary_table
from groupwise.tracking.text import harmless, visible
from groupwise.types import Completion, Problem, Prompt

HOSTILE = "[bold red]x[/bold red] [/nope] \x1b[2J\x1b]0;title\x07 a\rb \u202eevil \x9b31m [link=http://x]go[/link] \udc80"
ALLOWED = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and cursor movement, as rich writes them; no screen clearing, no titles."""

METRICS = {
    "reward/mean": 1.5,
    "reward/std": 0.25,
    "accuracy/strict": 0.5,
    "accuracy/format": 0.75,
    "policy/kl": 0.0125,
    "policy/clip_share": 0.01,
    "reward/correctness": 1.25,
    "reward/my_own_reward_with_a_long_name": 0.25,
    "policy/entropy": 0.4321,
    "completions/tokens_mean": 87.4,
    "completions/tokens_max": 128,
    "completions/stop_rate": 0.875,
    "completions/truncated": 0.125,
    "groups/zero_variance": 0.25,
    "optimizer/grad_norm": 0.773,
    "speed/sampled_tokens_per_s": 1234.5,
    "speed/learnt_tokens_per_s": 567.8,
    "time/step_s": 8.94,
    "time/sample_s": 2.75,
    "time/score_s": 0.04,
    "time/reference_s": 1.25,
    "time/learn_s": 4.5,
    "memory/peak_gib": 3.71,
}


class OneAnswer:
    """An engine that says the same to everything."""

    def __init__(self, text):
        self.text = text

    def sample(self, prompts, samples_per_prompt, settings, *, seed, scope, on_progress=None):
        if on_progress:
            on_progress(len(prompts), 7 * len(prompts))
        one = [Completion(self.text, (1, 2), (-0.5, -0.5), "stop", i) for i in range(samples_per_prompt)]
        return [tuple(one) for _ in prompts]


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """``now[0]``: the time in seconds, which stands still until a test moves it."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


def prompts(question="2 + 2?"):
    return [Prompt(Problem(f"id {i}", question, "4"), question, (1,)) for i in range(3)]


def terminal(width=80, live=True, encoding="utf-8"):
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding, write_through=True)
    color = "standard" if live else None
    console = Console(file=file, force_terminal=live, width=width, color_system=color, legacy_windows=False, _environ={})
    return console, lambda: buffer.getvalue().decode(encoding)


def whole_run(console, answers=("12", "<reasoning>r</reasoning><answer>4</answer>"), question="2 + 2?", samples=1, show=1):
    trackers = Trackers([ConsoleTracker(console, show=show)])
    config = Config(evaluation={"samples": samples})
    results = []
    for stage, answer in zip(("base", "final"), answers, strict=True):
        results += evaluate_stage(
            OneAnswer(answer), prompts(question), stage=stage, config=config, style="xml", trackers=trackers
        )
        with trackers.phase("GRPO", 2, "steps") as bar:
            for step in (1, 2):
                trackers.step(step, METRICS)
                bar.advance(1)
    summary = build_summary(results, 75.0, config, folder="runs/x", final_model="runs/x/final model")
    trackers.show_summary(summary)
    trackers.close()
    assert len(trackers.sinks) == 1, "the console failed"


def test_a_log_has_one_line_a_step_and_no_control_codes():
    console, written = terminal(live=False)
    whole_run(console)
    text = written()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert sum(line.startswith("step 1/2") for line in lines) == 2
    assert (
        "step 2/2  0:00 left  reward 1.500 ± 0.250  reward/correctness 1.25  reward/my_own_reward_with_a_long_name 0.25  "
        "accuracy 50.0%  format 75.0%  length 87.4 (max 128)  stopped 87.5%  truncated 12.5%  no variance 25.0%  KL 0.0125  "
        "entropy 0.432  clipped 1.0%  grad norm 0.773  sampled tokens/s 1,234  learnt tokens/s 568  step 8.9 s  peak memory 3.7 GiB"
        in lines
    )
    assert any(line.startswith("evaluation, base (sampled): done, 3/3 problems in 0:00, tokens 21") for line in lines)


@pytest.mark.parametrize(("steps", "shown"), [(2, False), (3, False), (4, True)])
def test_a_course_is_drawn_when_there_are_points_enough_to_be_one(steps, shown):
    console, written = terminal(width=120)
    tracker = ConsoleTracker(console)
    with tracker.phase("GRPO", steps, "steps") as bar:
        for step in range(steps):
            tracker.step(step + 1, {**METRICS, "reward/mean": 1.0 - step / steps})
            bar.advance(1)
        tracker.display.live.refresh()
    assert ("█" in written()) == shown


def test_the_summary_says_what_a_newcomer_asks():
    console, written = terminal(live=False)
    whole_run(console)
    lines = written().splitlines()
    row = next(line for line in reversed(lines) if line.startswith("after GRPO  "))
    assert re.split(r"\s{2,}", row.strip()) == ["after GRPO", "100.0% [43.9, 100.0]", "100.0% [43.9, 100.0]", "100.0%", "100.0%"]
    assert sum(line.startswith("  greedy ") for line in lines) == 2
    assert max(len(line) for line in lines[-22:] if not line.startswith("Talk")) <= 80
    text = " ".join(lines)
    assert "3 fixed, 0 broken" in text
    assert "p = 0.25" in text
    assert "The whole run took 1:15." in text
    assert "Everything lies in  runs/x" in lines
    assert any(re.fullmatch(r"A page about it:    \S*groupwise report runs/x", line) for line in lines)
    assert any(re.fullmatch(r"What looks wrong:   \S*groupwise doctor runs/x", line) for line in lines)
    assert re.fullmatch(r"Talk to the model:  \S*groupwise generate 'runs/x/final model'", lines[-1])


def test_several_samples_are_told_by_problem_to_the_end():
    """The comparison then has no fixed and broken, and the first records are all of one problem."""
    console, written = terminal(live=False)
    whole_run(console, samples=2, show=2)
    text = " ".join(written().split())
    assert "base -> after GRPO: 3 of 3 better, 0 worse" in text
    assert "Talk to the model" in text
    assert {found for found in ("id 0", "id 1", "id 2") if f"base: {found}" in text} == {"id 0", "id 1"}


@pytest.mark.parametrize("live", [True, False])
def test_a_run_that_is_carried_on_counts_from_where_it_was(live, now):
    console, written = terminal(live=live)
    trackers = Trackers([ConsoleTracker(console)])
    with trackers.phase("GRPO", 10, "steps", 6) as bar:
        (shown,) = trackers.sinks[0].phases
        assert (shown.count, shown.left_s) == ("6/10 steps", None)
        now[0] += 20
        bar.advance(1)
        trackers.step(7, METRICS)
        assert shown.left_s == 60, "three more at 20 s each"
        assert shown.count == "7/10 steps"
    assert "7/10" in written()


def test_a_terminal_gets_bars_while_it_lasts_and_its_cursor_back():
    console, written = terminal(width=100)
    tracker = ConsoleTracker(console)
    with tracker.phase("GRPO", 60, "steps") as bar:
        for step in range(1, 31):
            tracker.step(step, METRICS)
            bar.advance(1)
        with tracker.phase("evaluation", 200, "problems") as inner:
            inner.advance(50, tokens=3222)
            shown = console.render_str("").plain + "".join(s.text for s in console.render(tracker.display))
    assert "30/60 steps" in shown
    assert "50/200 problems" in shown
    assert "tokens 3,222" in shown
    assert "left" in shown
    assert written().count("\x1b[?25l") == written().count("\x1b[?25h") == 1  # cursor hidden once, shown once


EVERYTHING = (
    "reward 1.500 ± 0.250", "correctness 1.25", "accuracy 50.0%", "format 75.0%", "length 87.4 (max 128)", "stopped 87.5%",
    "truncated 12.5%", "no variance 25.0%", "KL 0.0125", "entropy 0.432", "clipped 1.0%", "grad norm 0.773", "sampled 1,234",
    "learnt 568", "step 8.9 s", "sampling 2.8 s", "scoring 0.0 s", "reference 1.2 s", "learning 4.5 s", "peak 3.7 GiB",
)  # fmt: skip


@pytest.mark.parametrize(("width", "most_lines"), [(80, 20), (160, 11)])
def test_the_live_view_shows_everything_whole_at(width, most_lines):
    console, _ = terminal(width=width)
    tracker = ConsoleTracker(console)
    with tracker.phase("GRPO", 2000, "steps") as bar:
        for step in range(1, 31):
            tracker.step(step, {**METRICS, "reward/mean": 1.5 + 0.01 * (step - 30)})
            bar.advance(1, completions=64)
        lines = "".join(s.text for s in console.render(tracker.display)).splitlines()
    shown = "\n".join(lines)
    assert [number for number in EVERYTHING if number not in shown] == []
    assert "30/2,000 steps" in shown
    assert " left" in shown
    assert "…" not in shown, "something was cut"
    assert "my_own_reward_with_a_long_name 0.25" in shown
    assert max(map(len, lines)) <= width
    assert len(lines) <= most_lines


def test_an_interrupted_phase_says_so_and_gives_the_terminal_back():
    console, written = terminal()
    tracker = ConsoleTracker(console)
    with pytest.raises(KeyboardInterrupt), tracker.phase("GRPO", 5):
        raise KeyboardInterrupt
    assert written().count("\x1b[?25h") == 1
    assert "stopped, 0/5" in written()
    assert tracker.display.live is None


@pytest.mark.parametrize("live", [True, False])
def test_hostile_text_is_shown_letter_by_letter(live):
    console, written = terminal(width=200, live=live)
    whole_run(console, answers=(HOSTILE, HOSTILE), question=HOSTILE)
    text = written()
    rest = ALLOWED.sub("", text)
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    assert not set("\x07\x1b\x9b\u202e\udc80") & set(rest)
    assert "[bold red]x[/bold red] [/nope] \\x1b[2J\\x1b]0;title\\x07 a\\rb \\u202eevil \\x9b31m [link=http://x]go" in rest


def test_a_terminal_without_unicode_is_no_reason_to_fail():
    console, written = terminal(live=False, encoding="ascii")
    whole_run(console, answers=("naïve 答え", "x"))
    assert "1.500 +- 0.250" in written()
    assert "na?ve ??" in written()


def test_a_long_answer_is_cut_and_the_cut_is_counted():
    console, written = terminal(live=False)
    whole_run(console, answers=("word " * 1000, "x"))
    assert "[... 3,800 more characters]" in written()


def test_plain_phases_report_now_and_then(now):
    console, written = terminal(live=False)
    tracker = ConsoleTracker(console, every_s=5.0)
    with tracker.phase("warm start", 20, "steps") as bar:
        for _ in range(20):
            now[0] += 1.0
            bar.advance(1, loss=0.5)
    assert written().splitlines() == [
        "warm start: 0/20 steps",
        "warm start: 5/20 steps, 0:15 left, loss 0.5",
        "warm start: 10/20 steps, 0:10 left, loss 0.5",
        "warm start: 15/20 steps, 0:05 left, loss 0.5",
        "warm start: 20/20 steps, 0:00 left, loss 0.5",
        "warm start: done, 20/20 steps in 0:20, loss 0.5",
    ]


def test_visible_keeps_words_and_newlines():
    assert visible("a\tb\nç 答 👩‍👩‍👧") == "a    b\nç 答 👩‍👩‍👧"
    assert visible("\x00\x7f\u200b\U000e0041\u2028") == "\\x00\\x7f\\u200b\\U000e0041\\u2028"


def test_short_forms():
    assert [number(x) for x in (999.4, 999.7, -999.7)] == ["999", "1,000", "-1,000"]
    assert [number(x) for x in (0.0, 3.0, 12345.6, 0.012345, float("nan"), 1e-6)] == [
        "0",
        "3",
        "12,346",
        "0.0123",
        "nan",
        "1e-06",
    ]
    assert [clock(s) for s in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([float("nan"), 0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
    assert averaged([float("inf"), 1.0, 2.0], 8) == [1.0, 2.0]
    assert averaged(range(100), 4) == [12.0, 37.0, 62.0, 87.0]


def test_the_trend_is_of_the_whole_run_so_far_not_of_its_last_steps():
    """A reward that rose long ago and then jumps up and down shows as a rise."""
    console, _ = terminal(live=True)
    tracker = ConsoleTracker(console)
    tracker.display.live = None
    for step in range(80):
        tracker.display.step({"reward/mean": step / 40 if step < 40 else 1.0 + 0.2 * (step % 2)})
    (shown,) = tracker.display.trend("rewards")
    width = 8 if tracker.display.narrow else 16
    assert len(shown.plain) == width
    assert shown.plain[0] == "▁"
    assert set(shown.plain[width // 2 :]) <= set("▇█")


def test_the_modes_of_one_evaluation_are_told_apart():
    console, written = terminal(live=False)
    results = evaluate_stage(OneAnswer("4"), prompts(), stage="eval", config=Config(), style="xml")
    console.print(summary_table({"evaluations": [result.to_summary() for result in results]}, harmless))
    rows = [re.split(r"\s{2,}", line.strip())[0] for line in written().splitlines()]
    assert rows[0] == "Held-out problems, temperature 1, with 95% intervals"
    assert rows[3:] == ["this model", "greedy"]


@pytest.mark.parametrize("begun_at", [0, 40])
def test_completions_that_are_sampled_together_are_not_foretold_from_the_first_that_end(now, begun_at):
    """200 completions of at most 320 tokens, five seconds for each token of all: the shortest ends after 10 of them."""
    trackers = Trackers([ConsoleTracker(terminal(live=True)[0])])
    lengths = [10, *range(62, 320)][: 200 - begun_at]
    with trackers.phase("evaluation", 200, "problems") as bar:
        bar.most_tokens = 320
        bar.begun_at = begun_at
        bar.advance(begun_at)
        (shown,) = trackers.sinks[0].phases
        for step in range(1, max(lengths) + 1):
            now[0] += 5
            ended = begun_at + sum(length <= step for length in lengths)
            bar.advance(ended - bar.done, tokens=sum(min(length, step) for length in lengths))
            if step == 10:
                assert shown.left_s == pytest.approx(5 * 310, rel=0.05), "not 199 times the ten tokens that are over"
            if 10 <= step < max(lengths):
                assert 0 < shown.left_s <= 5 * 310
        assert shown.left_s == 0


def test_within_a_long_step_the_time_left_only_falls(now):
    """The mean pace counts finished steps alone: the time that the step under way has taken so far makes nothing slower."""
    phase = Phase("GRPO", 10, "steps", lambda changed: None)
    for _ in range(2):
        now[0] += 60
        phase.advance(1)
    seen = []
    for _ in range(20):  # a third step of ten minutes
        now[0] += 30
        phase.advance(0, completions=1)
        seen.append(phase.left_s)
    assert seen[0] == 8 * 60 - 30
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 7 * 60, "what the seven steps after it take"
    phase.advance(1)
    assert phase.left_s == pytest.approx(7 * 720 / 3)


def test_a_log_has_one_line_a_step_and_one_a_minute_within_a_long_one(now):
    console, written = terminal(live=False)
    trackers = Trackers([ConsoleTracker(console)])
    with trackers.phase("GRPO", 7, "steps") as bar:
        for step in range(1, 8):
            for second in range(125 if step == 3 else 20):
                now[0] += 1
                bar.advance(0, completions=second)
            bar.advance(1)
            trackers.step(step, METRICS)
    lines = written().splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [f"step {i}/7" for i in range(1, 8)]
    between = [line for line in lines if not line.startswith("step ")]
    assert between == [
        "GRPO: 0/7 steps",
        "GRPO: 2/7 steps, 1:20 left, completions 59",
        "GRPO: 2/7 steps, 1:20 left, completions 119",
        "GRPO: done, 7/7 steps in 4:05, completions 19",
    ]


def test_a_step_that_has_a_line_of_its_own_gets_no_second_one(now):
    console, written = terminal(live=False)
    trackers = Trackers([ConsoleTracker(console)])
    with trackers.phase("GRPO", 3, "steps") as bar:
        for step in range(1, 4):
            now[0] += 90
            bar.advance(1)
            trackers.step(step, METRICS)
    first, *rest = [line.split("  ")[0] for line in written().splitlines()[1:-1]]
    assert first == "GRPO: 1/3 steps, 3:00 left", "that a line follows each step is known from the first one on"
    assert rest == ["step 1/3", "step 2/3", "step 3/3"]


@pytest.fixture
def notebook(monkeypatch):
    """IPython as a kernel has it: the outputs of a cell, each a list of the pages that it showed."""
    outputs = []

    class Output(list):
        update = list.append

    def display(page, *, display_id=False):
        outputs.append(Output([page]))
        return outputs[-1] if display_id else None

    module = types.ModuleType("IPython.display")
    module.HTML, module.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return outputs


def test_a_notebook_gets_one_output_that_is_written_anew(notebook, now):
    whole_run(Console(force_jupyter=True, width=110))
    (pages,) = notebook
    assert len(pages) > 10
    assert "0/2 steps" in "".join(pages[:-1]), "the bar, while it lasts"
    assert "0/2 steps" not in pages[-1]
    text = re.sub(r"<[^>]+>", "", pages[-1])
    for said in (
        "after GRPO",
        "3 fixed, 0 broken",
        "Everything lies in  runs/x",
        "evaluation, base (sampled): done, 3/3 problems",
    ):
        assert said in text
    assert "\x1b" not in pages[-1]


def test_what_a_model_wrote_is_text_in_a_notebook(notebook):
    whole_run(Console(force_jupyter=True, width=200), answers=("<script>alert(1)</script>", "<img src=x onerror=alert(1)>"))
    (pages,) = notebook
    assert not any("<script" in page or "<img" in page for page in pages)
    assert "&lt;script&gt;" in pages[-1]


def test_a_quiet_console_shows_nothing_in_a_notebook_either(notebook):
    whole_run(Console(force_jupyter=True, quiet=True))
    assert notebook == []


def test_a_notebook_is_not_written_anew_more_than_twice_a_second_by_progress(notebook, now):
    tracker = ConsoleTracker(Console(force_jupyter=True))
    with tracker.phase("evaluation", 10_000, "problems") as bar:
        for _ in range(10_000):
            now[0] += 0.001
            bar.advance(1)
    assert len(notebook[0]) <= 10 / 0.5 + 4


def test_a_width_of_0_is_not_taken_at_its_word(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    ConsoleTracker().print(Text("step 1"))
    assert capsys.readouterr().out == "step 1\n"
