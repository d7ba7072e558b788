"""The page in a real headless Chromium: it draws itself, its controls do what they say, and nothing that a model wrote runs."""

import csv
import json
import math
import re
import time
from xml.etree import ElementTree

import pytest
from doctor.miniature_runs import GROUPS, G, Story, Written, healthy_text, write_run

from groupwise.report import write_report
from groupwise.tracking.metric_table import METRICS
from groupwise.tracking.reading import read_run

from .browser import Browser, find_chromium
from .long_run import long_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_chromium() is None, reason="needs a Chromium (Debian: chromium)")]
ATTACK = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script><style>body{display:none}</style>'


ATTEMPTS = (
    "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s);",
    "const p = document.createElement('p'); p.setAttribute('onclick', 'window.hacked = 1'); document.body.append(p); p.click();",
    "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 1\">');",
    "const a = document.createElement('a'); a.href = 'javascript:window.hacked = 1'; document.body.append(a); a.click();",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(browser, tmp_path):
    """``page(story, other story ...)``: the report of these runs, opened."""

    def show(*stories, **window):
        folders = [write_run(tmp_path / f"run-{i}", story) for i, story in enumerate(stories)]
        browser.problems.clear()
        browser.open(write_report(folders, tmp_path / "report.html").path, **window)
        return browser

    return show


def texts(browser, selector):
    return browser.run(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")


def ready(browser):
    browser.until("document.querySelectorAll('.row').length > 0 && document.querySelectorAll('#before-after pre').length > 0")


def set_control(browser, label, value, section="#completions"):
    browser.run(
        f"(() => {{ const e = document.querySelector(`{section} [aria-label='{label}']`); e.value = {value!r}; "
        "e.dispatchEvent(new Event('change')); })()"
    )


def draw_all(browser):
    """Charts draw themselves when they come near the window."""
    browser.run("document.querySelectorAll('#curves details').forEach((d) => d.open = true)")
    undrawn = "document.querySelector('#curves .place:empty')"
    browser.until(f"!{undrawn} || ({undrawn}.scrollIntoView(), false)")  # it gives a promise in newer browsers


def count(browser, expected):
    browser.until(f"document.getElementById('count')?.textContent === '{expected:,} completions'")


def test_all_sections_are_drawn_and_nothing_is_complained_of(page):
    browser = page(Story(), Story(overrides=["algorithm.kl.beta=0.04"], metrics=lambda step, p: {"policy/kl": 0.3 * p}))
    ready(browser)
    titles = texts(browser, "h2")
    assert titles == [
        "Overview", "What the doctor finds", "Curves", "Distributions", "Evaluation", "Before and after", "Completions",
        "Settings and environment",
    ]  # fmt: skip
    browser.run("document.querySelectorAll('details').forEach((d) => d.open = true)")
    for section in ("curves", "distributions"):
        browser.run(f"document.getElementById('{section}').scrollIntoView()")
        browser.until(f"document.querySelectorAll('#{section} figure.chart .line').length > 3")
    assert "The policy is far from the reference" in " ".join(texts(browser, ".finding h4"))
    path, without, with_kl = texts(browser, "#settings > .scroll tbody tr:first-child > *")
    assert (path, without, with_kl.split(",")[0]) == ("algorithm.kl", "null", "beta: 0.04")
    assert browser.problems == []


def test_a_shorter_run_is_told_with_the_step_that_its_value_is_of(page):
    browser = page(Story(), Story(steps=24))
    browser.until("document.querySelector('figure.chart .readout')")
    told = texts(browser, "figure.chart .readout span")[:3]
    assert told[0] == "step 60"
    assert "at step" not in told[1]
    assert told[2].endswith(" at step 24")


def test_the_overview_tells_one_run_in_a_few_numbers(page):
    browser = page(Story())
    values = dict(zip(texts(browser, ".tile dt"), texts(browser, ".tile b"), strict=True))
    assert re.fullmatch(r"\d+\.\d% → \d+\.\d%", values["Held-out accuracy"])
    first, last = map(float, values["Reward"].split(" → "))
    assert first < last
    assert values["Accuracy in training"].count("%") == 2
    assert values["Steps"] == "60 of 60"
    assert values["The doctor says"] == "No problem found"
    assert "No problem found." in texts(browser, "#findings p")


def test_the_overview_of_several_runs_is_a_table(page):
    browser = page(Story(), Story(steps=1, evaluations=[]))
    assert texts(browser, ".tile") == []
    cells = texts(browser, "#overview tbody tr:nth-child(2) > *")
    assert (cells[1], cells[-1]) == ("1 of 1", "Too early to judge")


def test_a_run_of_three_steps_is_not_called_healthy(page):
    browser = page(Story(steps=3, finished=False, evaluations=[]))
    assert texts(browser, ".tile:last-child > *") == ["The doctor says", "Too early to judge3 steps, and it takes 5"]
    assert "Too early to judge: 3 steps, and it takes 5." in texts(browser, "#findings p")


def test_the_overview_goes_by_the_headline_mode(page):
    browser = page(Story(overrides=["evaluation.modes=[greedy, sampled]"]))
    assert texts(browser, ".tile small")[0].startswith("strict, greedy, base → after GRPO")


def test_the_run_of_the_distributions_is_not_that_of_the_completions(page):
    browser = page(Story(), Story(steps=24))
    ready(browser)
    browser.run("document.getElementById('distributions').scrollIntoView()")
    set_control(browser, "Run", "1", "#distributions")
    browser.until("document.querySelector('#distributions .run1')")
    browser.run("[...document.querySelectorAll('#pager button')].find((b) => b.textContent === 'next').click()")
    browser.until("document.getElementById('pager').textContent.includes('page 2 of')")
    assert texts(browser, "#count") == [f"{60 * GROUPS * G:,} completions"]


def test_shares_are_percentages_and_what_never_moves_is_said_in_a_line(page):
    browser = page(Story(metrics=lambda step, p: {"optimizer/learning_rate": 2e-5, "groups/zero_variance": 0.25}))
    draw_all(browser)
    titles = texts(browser, "#curves figcaption")
    assert not any(title.startswith(("optimizer/learning_rate", "groups/zero_variance")) for title in titles)
    said = " ".join(texts(browser, "#curves .still"))
    assert "groups/zero_variance 25%" in said
    assert "optimizer/learning_rate 2e-5" in said
    strict = "[...document.querySelectorAll('#curves figure')].find((f) => f.textContent.startsWith('accuracy/strict'))"
    assert browser.run(f"[...{strict}.querySelectorAll('.tick')].filter((t) => t.textContent !== 'step').length") > 3
    ticks = browser.run(f"[...{strict}.querySelectorAll('.tick[text-anchor=end]')].map((t) => t.textContent)")
    assert all(tick.endswith("%") for tick in ticks), ticks
    assert browser.run(f"{strict}.querySelector('.about').textContent") == METRICS["accuracy/strict"][1]


def test_a_chosen_completion_stays_marked_in_the_list(page):
    browser = page(Story())
    ready(browser)
    for row in (2, 5):
        browser.run(f"document.querySelectorAll('.row')[{row}].click()")
        assert browser.run("[...document.querySelectorAll('.row')].findIndex((r) => r.hasAttribute('aria-current'))") == row
    assert len(texts(browser, ".row[aria-current]")) == 1


def test_held_out_accuracy_is_a_curve_beside_the_others_with_all_runs_in_it(page):
    """A reward that rises while the held-out accuracy falls shows in one view."""
    hacked = Story(evaluations=[("base", 0.5), ("step-20", 0.4), ("step-40", 0.2), ("final", 0.1)])
    browser = page(Story(), hacked)
    chart = "[...document.querySelectorAll('#curves figure')].find((f) => f.textContent.startsWith('evaluation/sampled_strict'))"
    draw_all(browser)
    assert browser.run(f"{chart}.querySelectorAll('.band').length") == 2
    assert browser.run(f"{chart}.querySelectorAll('.run1 .dot').length") == 4
    assert browser.run(f"{chart}.querySelectorAll('.raw').length") == 0, "an interval is no noise to be smoothed away"
    assert re.search(r"run-1 10% \[\d+\.\d, \d+\.\d\]", browser.run(f"{chart}.textContent"))
    steps = browser.run(
        "[...document.querySelectorAll('#curves figure')].map((f) => "
        "[...f.querySelectorAll('.tick[text-anchor=middle]')].map((t) => t.textContent).join())"
    )
    assert set(steps) == {"0,20,40,60"}, "all charts have the same steps beneath them"


def test_every_axis_has_three_numbers_or_more(page):
    browser = page(Story(metrics=lambda step, p: {"optimizer/grad_norm": 1.01 + 0.97 * p, "policy/loss": 1e-9 * step}))
    draw_all(browser)
    ticks = browser.run(
        "[...document.querySelectorAll('#curves figure')].map((f) => f.querySelectorAll('.tick[text-anchor=end]').length)"
    )
    assert min(ticks) >= 3


def test_where_nothing_matches_the_filters_can_be_cleared_and_no_old_group_stays(page):
    browser = page(Story())
    ready(browser)
    browser.run("document.querySelectorAll('.row')[2].click()")
    browser.until("document.querySelector('#group h4')")
    set_control(browser, "Words", "not there")
    set_control(browser, "Answer", "right")
    browser.until("document.getElementById('nothing')")
    assert texts(browser, "#group > *") == []
    browser.run("document.querySelector('#nothing button').click()")
    count(browser, 60 * GROUPS * G)
    assert browser.run("document.querySelector('#completions [aria-label=Words]').value") == ""


def test_by_keyboard_one_goes_on_at_the_group_that_was_opened(page):
    browser = page(Story())
    ready(browser)
    browser.run("document.querySelectorAll('.row')[0].focus()")
    for kind in ("keyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    browser.until("document.activeElement.closest('#group') !== null")
    assert browser.run("document.activeElement.tagName") == "H3"
    assert browser.run("document.querySelector('#group details').open"), "a short prompt is there to be read"


def test_rows_and_group_say_what_was_asked(page):
    browser = page(Story(prompts=lambda step, group: f"<|user|>\nAnn has {step} and {group}. How many?<|end|>\n<|assistant|>\n"))
    ready(browser)
    asked = [f"Ann has {step} and {group}. How many?" for step in (1, 2) for group in range(GROUPS)]
    assert texts(browser, ".row .asked") == asked[:3], "once for each group of a page"
    browser.run("document.querySelectorAll('.row')[0].click()")
    browser.until("document.querySelector('#group .question')")
    assert texts(browser, "#group .question") == ["Ann has 1 and 0. How many?"]


def test_before_and_after_opens_on_a_problem_of_which_something_became(page):
    browser = page(Story())
    ready(browser)
    assert texts(browser, "#before-after h4 .verdict") == ["wrong", "right"]
    assert texts(browser, "#before-after del") != []


def test_sentences_leave_names_of_settings_as_they_are(page):
    browser = page(Story(overrides=["optimizer.precision=pure", "optimizer.learning_rate=1e-6"]))
    told = " ".join(texts(browser, ".finding p"))
    assert "optimizer.learning_rate is 1e-06" in told
    assert "Optimizer.learning_rate" not in told


def test_excerpts_cut_no_character_in_half_and_run_in_their_own_direction(page):
    family = "👩‍👩‍👧"
    browser = page(Story(steps=2, write=lambda step, p, group, sample, answer: Written("א" + family * 300)))
    ready(browser)
    shown = texts(browser, ".excerpt")[0]
    assert shown == "א" + family * 139 + " … " + family * 70
    assert browser.run("getComputedStyle(document.querySelector('.excerpt')).direction") == "rtl"


def test_names_of_settings_are_not_broken_where_there_is_room(page):
    browser = page(Story(), Story(overrides=["algorithm.correction.cap=3", "rewards.functions.0.weight=0.5"]))
    rows = texts(browser, "#settings > .scroll tbody th")
    assert rows == ["rewards.functions.0.weight", "algorithm.correction"]
    heights = browser.run("[...document.querySelectorAll('#settings > .scroll tbody th')].map((t) => t.offsetHeight)")
    assert max(heights) < 40


def test_what_a_model_wrote_is_shown_and_never_run(page):
    story = Story(
        write=lambda step, p, group, sample, answer: Written(ATTACK + str(sample)),
        prompts=lambda step, group: ATTACK,
        extra={"response": ATTACK, "question": ATTACK},
        metrics=lambda step, p: {"reward/" + ATTACK: p, "policy/ratio_deviation": 0.5},
    )
    browser = page(story)
    ready(browser)
    browser.run("document.querySelectorAll('.row')[0].click()")
    browser.until("document.querySelector('#group h4')")
    assert ATTACK + "0" in texts(browser, "#group pre")
    assert ATTACK in texts(browser, ".question")
    assert any("window.hacked" in text for text in texts(browser, ".asked"))
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelectorAll('img, #page script, #page style').length") == 0
    assert browser.problems == []


def test_the_policy_stops_a_script_that_got_in_all_the_same(page):
    browser = page(Story(steps=3))
    ready(browser)
    for attempt in ATTEMPTS:
        browser.run(f"(() => {{ try {{ {attempt} }} catch (refused) {{}} }})()")
    assert browser.run("window.hacked") is None
    assert any("Content Security Policy" in problem or "Trusted" in problem for problem in browser.problems), browser.problems
    assert browser.run("fetch('data:text/plain,x').then(() => 'sent', () => 'stopped')") == "stopped"


def test_filters_leave_what_they_say(page):
    def write(step, p, group, sample, answer):
        return Written("cut here", "length", 48) if sample == 0 else healthy_text(0.5, step, group, sample, answer)

    browser = page(Story(write=write))
    ready(browser)
    total = 60 * GROUPS * G
    count(browser, total)
    set_control(browser, "End", "cut")
    count(browser, total // G)
    set_control(browser, "Words", "CUT HERE")
    count(browser, total // G)
    set_control(browser, "Step from", "31")
    count(browser, total // G // 2)
    set_control(browser, "to", "31")
    count(browser, GROUPS)
    set_control(browser, "Problem", "31-1")
    count(browser, 1)
    assert "step 31 · mini:train:31-1 #0" in texts(browser, ".row")[0]
    set_control(browser, "Words", "not there")
    count(browser, 0)
    assert browser.problems == []


def test_order_and_reward_bounds(page):
    browser = page(Story())
    ready(browser)
    set_control(browser, "Order", "+reward")
    set_control(browser, "Reward from", "2.5")
    browser.until("document.querySelector('.row .facts').textContent.includes('reward 2.')")
    assert all("right" in text for text in texts(browser, ".row .verdict"))
    set_control(browser, "Reward from", "")
    set_control(browser, "Answer", "wrong")
    browser.until("[...document.querySelectorAll('.row .verdict')].every((v) => v.textContent === 'wrong')")


def test_words_are_looked_for_once_in_each_portion_of_texts_whatever_the_order(page):
    browser = page(
        Story(
            write=lambda step, p, group, sample, answer: Written(f"{sample} " + "a long text " * 400 + "needle" * (sample == 5)),
            reward=lambda step, p, text, right: {"first": float(text[0])},
        )
    )
    ready(browser)
    set_control(browser, "Order", "+reward")
    browser.until("document.querySelector('.row .facts')?.textContent.includes('#0')")
    browser.run(
        "(() => { const own = DecompressionStream; window.unpacked = 0; "
        "window.DecompressionStream = class extends own { constructor(way) { super(way); window.unpacked += 1; } }; })()"
    )
    portions = browser.run("document.querySelectorAll('script[id^=c-0-]').length")
    assert portions > 24, "the test needs more than the page keeps"
    set_control(browser, "Words", "needle")
    count(browser, 60 * GROUPS)
    assert browser.run("window.unpacked") < 2 * portions
    set_control(browser, "Order", "-step")
    browser.until("document.querySelector('.row .facts')?.textContent.startsWith('step 60 ')")


def test_texts_that_come_late_do_not_replace_what_was_asked_for_since(page):
    browser = page(Story(write=lambda step, p, group, sample, answer: Written("a long text " * 400)))
    ready(browser)
    browser.run(
        "(() => { const own = Response.prototype.arrayBuffer; Response.prototype.arrayBuffer = function () { "
        "Response.prototype.arrayBuffer = own; const made = own.call(this); "
        "return new Promise((resolve) => { window.release = () => resolve(made); }); }; })()"
    )
    set_control(browser, "Step from", "31")
    browser.until("window.release")
    set_control(browser, "Step from", "")
    count(browser, 60 * GROUPS * G)
    browser.run("(window.release(), new Promise((resolve) => setTimeout(resolve, 300)))")
    count(browser, 60 * GROUPS * G)
    assert texts(browser, ".row .facts")[0].startswith("step 1 ")


def test_a_group_explains_its_advantages(page):
    browser = page(Story(metrics=lambda step, p: {"groups/failed": float(step == 1)}))
    ready(browser)
    browser.run("document.querySelectorAll('.row')[2].click()")
    browser.until("document.getElementById('how')")
    how = texts(browser, "#how")[0]
    assert "less the group’s mean" in how
    assert "(tokens × 56 completions of the step)" in how, "one group of 8 was left out"
    assert "Every token of a completion has its advantage" in how
    assert how.endswith("Counted again here: the same.")
    assert browser.run("document.querySelectorAll('#group tbody tr').length") == G
    browser.run("document.querySelectorAll('#group tbody button')[5].click()")
    browser.until("[...document.querySelectorAll('#group h4')].some((h) => h.textContent === 'Sample 5')")


@pytest.fixture
def page_with_tokens(browser, tmp_path):
    browser.problems.clear()
    browser.open(write_report([long_run(tmp_path / "long", 4, 80)]).path)
    ready(browser)
    browser.run("document.querySelectorAll('.row')[2].click()")
    browser.until("document.querySelector('#group .tokens')")
    return browser, [r for r in read_run(tmp_path / "long").completions if r.step == 1][2]


def test_a_completion_is_shown_token_by_token_with_what_each_is_worth(page_with_tokens):
    browser, record = page_with_tokens
    shown = texts(browser, "#group .token")
    assert len(shown) == len(record.token_ids)
    assert "".join(shown) == record.text + "<|im_end|>"
    assert browser.run("document.querySelectorAll('#group .token.above').length") == (len(shown) if record.advantage > 0 else 0)
    browser.run(
        "[...document.querySelectorAll('#group details')].find((d) => d.textContent.includes('Token by token')).open = true"
    )
    browser.run("document.querySelector('#group .tokens').scrollIntoView()")
    browser.until("document.querySelectorAll('#group details tbody tr').length >= 20")
    row = texts(browser, "#group details tbody tr:nth-child(3) > *")
    assert row[1] == json.dumps(shown[2])
    assert float(row[3].replace("−", "-").replace("–", "nan")) == pytest.approx(record.logprobs[2], abs=0.06)
    assert float(row[4]) == pytest.approx(record.advantage, rel=1e-3)
    assert float(row[5]) == pytest.approx(1 / (len(shown) * 80), rel=1e-2), "sequence_mean over the step's 8 x 10 completions"
    assert browser.problems == []


def episode_row(folder, tokenizer, reward):
    """A line of completions.jsonl: a call of 18 tokens, its result and the answer, in the tokens of ``tokenizer``."""
    parts = [
        ("assistant", '<call>search("sea")</call>', "<|im_end|>"),
        ("tool", "blue", "\n<|im_start|>tool\nblue<|im_end|>\n<|im_start|>assistant\n"),
        ("assistant", "It is <b>blue</b>.", "<|im_end|>"),
    ]
    ids, turns, text = [], [], ""
    for role, said, more in parts:
        own = tokenizer.encode(said + more if role == "assistant" else more, add_special_tokens=False).ids
        calls = [{"name": "search", "arguments": {"query": "sea"}, "result": "blue", "failure": None}] if not turns else []
        turns.append({"role": role, "text": said, "tokens": len(own), "calls": calls, "reward": None})
        text += said if role == "assistant" else "\ntool\nblue\nassistant\n"
        ids += own
    logprobs = [-0.7 if turn["role"] == "assistant" else 0.0 for turn in turns for _ in range(turn["tokens"])]
    return {
        "step": 1, "problem": "p", "prompt": "Which colour?", "completion": text, "expected": "blue", "reward": reward, "strict": True,
        "lenient": True, "components": {"correctness": reward}, "advantage": 0.5, "turns": turns, "finish_reason": "stop",
        "tokens": len(ids), "policy_version": 0, "token_ids": ids, "logprobs": logprobs,
    }  # fmt: skip


@pytest.fixture
def page_with_episodes(browser, tmp_path, embedded_model_folder):
    """One group of three: an episode with a call, one whose call fitted no tool, and one without."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedded_model_folder / "tokenizer.json"))
    folder = write_run(tmp_path / "episodes", Story(steps=1, evaluations=[]))
    good, bad = (episode_row(folder, tokenizer, reward) for reward in (1.0, 0.5))
    bad["turns"][0]["calls"][0] |= {"failure": "invalid", "result": "error: there is no tool"}
    alone = {**good, "turns": good["turns"][2:], "tokens": good["turns"][2]["tokens"], "completion": "It is <b>blue</b>."}
    alone = {key: value for key, value in alone.items() if key not in ("token_ids", "logprobs")}
    rows = [{**row, "sample": i} for i, row in enumerate((good, bad, alone))]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = {"problem": "h", "question": "?", "prompt": "?", "expected": "blue", "response": "blue", "strict": False, "lenient": True,
              "format": True, "extracted": "blue", "finish_reason": "stop", "tokens": good["tokens"], "turns": good["turns"],
              "reward": 1.0, "success": True}  # fmt: skip
    (folder / "evaluations").mkdir(exist_ok=True)
    (folder / "evaluations" / "final-greedy.jsonl").write_text(json.dumps(judged) + "\n")
    browser.problems.clear()
    browser.open(write_report([folder], tmp_path / "report.html").path)
    browser.until("document.querySelectorAll('.row').length === 3")
    return browser, good


def test_an_episode_is_shown_turn_by_turn_with_what_learns(page_with_episodes):
    browser, row = page_with_episodes
    assert [re.search(r"(\d) turns, (\d) calls", facts).groups() for facts in texts(browser, ".row .facts")] == [
        ("2", "1"), ("2", "1"), ("1", "0")
    ]  # fmt: skip
    browser.run("document.querySelectorAll('.row')[0].click()")
    browser.until("document.querySelectorAll('#group .turn').length === 3")
    counts = [turn["tokens"] for turn in row["turns"]]
    assert texts(browser, "#group .turn h5") == [
        f"assistant, {counts[0]} tokens: sampled, learns", f"tool, {counts[1]} tokens: given, does not learn",
        f"assistant, {counts[2]} tokens: sampled, learns",
    ]  # fmt: skip
    blocks = texts(browser, "#group .turn pre")
    assert blocks == [
        '<call>search("sea")</call><|im_end|>', "\n<|im_start|>tool\nblue<|im_end|>\n<|im_start|>assistant\n",
        "It is <b>blue</b>.<|im_end|>",
    ]  # fmt: skip
    assert browser.run("document.querySelectorAll('#group .turn.given .token.given').length") == counts[1]
    assert browser.run("document.querySelectorAll('#group .turn.own .token.above').length") == counts[0] + counts[2]
    assert browser.run("document.querySelectorAll('#group .token.above').length") == counts[0] + counts[2]
    assert texts(browser, "#group .call") == ['called search({"query": "sea"}) and was told blue']
    browser.run(
        "[...document.querySelectorAll('#group details')].find((d) => d.textContent.includes('Token by token')).open = true"
    )
    browser.run("document.querySelector('#group .turns').scrollIntoView({block: 'end'})")
    browser.until("document.querySelectorAll('#group details tbody tr').length >= 20")
    cells = browser.run(
        "[...document.querySelectorAll('#group .turns tbody tr')].map((r) => [...r.children].map((c) => c.textContent))"
    )
    assert [cell[2] == "given" for cell in cells] == [
        not own for turn in row["turns"] for own in [turn["role"] == "assistant"] * turn["tokens"]
    ]
    assert float(cells[0][5]) == pytest.approx(1 / ((counts[0] + counts[2]) * 64), rel=1e-2), "given tokens divide nothing"
    assert browser.problems == []


def per_token(browser):
    """That column of the opened group's scores."""
    cells = browser.run("[...document.querySelector('#group table').rows].map((r) => [...r.cells].map((c) => c.textContent))")
    return [row[cells[0].index("per token")] for row in cells[1:]]


def test_what_was_cut_is_shown_as_left_out_where_the_config_masks_it(browser, tmp_path, embedded_model_folder):
    from tokenizers import Tokenizer

    folder = write_run(tmp_path / "run", Story(steps=1, evaluations=[], overrides=["algorithm.mask_truncated=true"]))
    good = episode_row(folder, Tokenizer.from_file(str(embedded_model_folder / "tokenizer.json")), 1.0)
    last = good["turns"][2]
    alone = {key: value for key, value in good.items() if key != "turns"} | {
        "completion": last["text"], "tokens": last["tokens"], "token_ids": good["token_ids"][-last["tokens"] :],
        "logprobs": good["logprobs"][-last["tokens"] :], "advantage": -0.5, "finish_reason": "length",
    }  # fmt: skip
    rows = [{**good, "sample": 0}, {**good, "sample": 1, "finish_reason": "max_turns"}, {**alone, "sample": 2}]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    browser.problems.clear()
    browser.open(write_report([folder], tmp_path / "report.html").path)
    browser.until("document.querySelectorAll('.row').length === 3")
    browser.run("document.querySelectorAll('.row')[0].click()")
    browser.until("document.querySelectorAll('#group .turn').length === 3")
    assert browser.run("document.querySelectorAll('#group .token.above').length") > 0
    weights = per_token(browser)
    assert float(weights[0]) > 0
    assert weights[1:] == ["0", "0"]
    assert "left out of the loss (algorithm.mask_truncated)" in texts(browser, "#how")[0]
    for sample in (1, 2):
        browser.run(f"document.querySelectorAll('#group tbody button')[{sample}].click()")
        browser.until(f"[...document.querySelectorAll('#group h4')].some((h) => h.textContent === 'Sample {sample}')")
        assert browser.run("document.querySelectorAll('#group .token.given').length") == len(rows[sample]["token_ids"])
        assert browser.run("document.querySelectorAll('#group .token.above, #group .token.below').length") == 0
        assert browser.run("document.querySelector('#group .token').title") == "sampled, left out of the loss"
        heads = texts(browser, "#group .turn.own h5")
        assert len(heads) == (2 if sample == 1 else 0)
        assert all(head.endswith(": sampled, left out of the loss") for head in heads)
    assert browser.problems == []


def test_where_only_the_tokens_of_most_entropy_learn_no_weight_is_told(page):
    browser = page(Story(overrides=["algorithm.entropy={top_share: 0.2}"]))
    ready(browser)
    browser.run("document.querySelectorAll('.row')[2].click()")
    browser.until("document.getElementById('how')")
    assert per_token(browser) == ["–"] * G
    assert "Only 20% of the step’s tokens" in texts(browser, "#how")[0]
    assert browser.problems == []


@pytest.mark.parametrize(
    ("overrides", "metrics", "in_them"),
    [
        (["algorithm.preset=ppo"], {}, ""),
        (["algorithm.preset=reinforce++", "algorithm.kl.placement=token_reward"], {}, ", with the KL still to come in them"),
        ([], {"steps/tests": 2.0}, ", with what the steps still to come earned in them"),
    ],
)
def test_where_tokens_have_advantages_of_their_own_the_table_has_their_mean(page, overrides, metrics, in_them):
    browser = page(Story(steps=2, overrides=overrides, metrics=lambda step, p: metrics))
    ready(browser)
    browser.run("document.querySelectorAll('.row')[2].click()")
    browser.until("document.getElementById('how')")
    how = texts(browser, "#how")[0]
    assert f"The tokens of a completion have advantages of their own{in_them}; the table has their mean; in the loss" in how
    assert "Every token of a completion" not in how
    assert "Counted again here" not in how
    assert browser.problems == []


def test_completions_are_chosen_by_their_calls(page_with_episodes):
    browser, _ = page_with_episodes
    for choice, expected in (("some", 2), ("none", 1), ("invalid", 1), ("failed", 0), ("all", 3)):
        set_control(browser, "Calls", choice)
        count(browser, expected)
    set_control(browser, "Calls", "invalid")
    count(browser, 1)
    browser.run("document.querySelectorAll('.row')[0].click()")
    browser.until("document.querySelectorAll('#group .call.error').length === 1")
    assert texts(browser, "#group .call") == ['called search({"query": "sea"}), which could not be made: error: there is no tool']


def test_what_evaluations_say_of_episodes_is_a_table_and_success_is_the_tile(page_with_episodes):
    browser, row = page_with_episodes
    cells = browser.run(
        "[...document.querySelectorAll('#evaluation table')].find((t) => t.textContent.startsWith('episodes'))"
        ".querySelector('tbody tr').innerText.split('\\t')"
    )
    given = row["turns"][1]["tokens"]
    assert cells[1].startswith("100.0%")
    assert cells[2:] == ["1", "2", "1", "0.0%", "0.0%", str(row["tokens"] - given), str(given)]
    assert dict(zip(texts(browser, ".tile dt"), texts(browser, ".tile b"), strict=True))["Held-out success"] == "100.0%"


def test_a_run_without_tools_has_no_word_of_them(page):
    browser = page(Story(steps=2))
    ready(browser)
    assert browser.run("document.querySelector(`[aria-label='Calls']`)") is None
    assert "turns" not in texts(browser, ".row .facts")[0]


def test_before_and_after_marks_what_changed(page):
    browser = page(Story())
    ready(browser)
    set_control(browser, "Show", "fixed", "#before-after")
    browser.until("document.querySelector('#before-after .controls + div')?.textContent.includes('1 of 22')")
    assert texts(browser, "#before-after del") == ["77", "77"]
    assert texts(browser, "#before-after ins") == ["-1", "-1"]


def test_the_cursor_tells_the_numbers_by_key_and_by_pointer(page):
    browser = page(Story())
    browser.until("document.querySelector('figure.chart svg')")
    browser.run("document.querySelector('figure.chart svg').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft", windowsVirtualKeyCode=37)
    browser.until("document.querySelector('.readout .step').textContent === 'step 60'")
    for kind in ("keyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft", windowsVirtualKeyCode=37)
    browser.until("document.querySelector('.readout .step').textContent === 'step 59'")
    browser.run("document.querySelector('figure.chart svg').scrollIntoView({block: 'center'})")
    x, y = browser.run(
        "(() => { const b = document.querySelector('figure.chart svg').getBoundingClientRect(); "
        "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.until("Number(document.querySelector('.readout .step').textContent.slice(5)) < 40")


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_it_fits_the_window_and_follows_the_scheme(page, width, dark):
    browser = page(Story(), width=width, dark=dark)
    ready(browser)
    browser.run("document.querySelectorAll('.row')[0].click()")
    browser.until("document.getElementById('how')")
    assert browser.run("document.documentElement.scrollWidth") <= width
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 23, 27)") is dark
    browser.run("document.getElementById('theme').click()")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != ground


@pytest.mark.parametrize(
    "story", [Story(steps=0, evaluations=[], finished=False), Story(steps=1, evaluations=[]), Story(steps=2, finished=False)]
)
def test_hardly_begun_runs_are_drawn_without_complaint(page, story):
    browser = page(story)
    assert browser.problems == []


def chart(name):
    return f"document.getElementById('curve-{name}')"


def ticks_below(browser, name):
    return browser.run(f"[...{chart(name)}.querySelectorAll('.tick[text-anchor=middle]')].map((t) => t.textContent)")


def drag(browser, name, left, right):
    """Press, move and let go over a chart's drawing, at shares of its width."""
    browser.run(f"{chart(name)}.scrollIntoView({{block: 'center'}})")
    browser.until(f"{chart(name)}.querySelector('svg')")
    box = browser.run(
        f"(() => {{ const b = {chart(name)}.querySelector('svg').getBoundingClientRect(); "
        "return [b.left, b.top + b.height / 2, b.width]; })()"
    )
    for kind, share in (("mousePressed", left), ("mouseMoved", right), ("mouseReleased", right)):
        browser.ask(
            "Input.dispatchMouseEvent", type=kind, x=box[0] + share * box[2], y=box[1], button="left", buttons=1, clickCount=1
        )


def test_on_paper_every_chart_is_drawn(page):
    browser = page(Story())
    assert browser.run("document.querySelectorAll('#curves .place:empty').length") > 0
    browser.ask("Page.printToPDF")
    assert browser.run("document.querySelectorAll('#curves .place:empty, #distributions .place:empty').length") == 0
    assert browser.run("[...document.querySelectorAll('#curves details')].every((d) => d.open)")
    assert browser.problems == []


def test_dragging_zooms_all_charts_and_a_double_click_shows_the_whole(page):
    browser = page(Story())
    drag(browser, "policy-entropy", 0.4, 0.6)
    browser.until("document.getElementById('zoom-from').value !== ''")
    draw_all(browser)
    for name in ("policy-entropy", "reward-mean"):
        found = [float(tick) for tick in ticks_below(browser, name)]
        assert found
        assert 15 < min(found) < max(found) < 45
    told = browser.run(f"{chart('policy-entropy')}.querySelector('.readout .step').textContent")
    assert 30 < float(told.removeprefix("step ")) < 45, "the readout tells the last step in view"
    browser.run(f"{chart('policy-entropy')}.querySelector('svg').dispatchEvent(new MouseEvent('dblclick'))")
    assert ticks_below(browser, "policy-entropy") == ["0", "20", "40", "60"]
    browser.run("document.getElementById('zoom-to').value = '20'")
    browser.run("document.getElementById('zoom-to').dispatchEvent(new Event('change'))")
    assert ticks_below(browser, "reward-mean")[-1] == "20"
    browser.run("document.getElementById('zoom-out').click()")
    assert ticks_below(browser, "reward-mean")[-1] == "60"
    assert browser.problems == []


def test_charts_run_along_time_and_tokens_too(page):
    browser = page(Story(metrics=lambda step, p: {"completions/tokens_mean": 1000.0}))
    draw_all(browser)
    set_control(browser, "Along", "tokens", "#curves")
    assert ticks_below(browser, "reward-mean") == ["0M", "1M", "2M", "3M"], "60 steps of 64 completions of 1,000 tokens"
    assert browser.run(f"{chart('reward-mean')}.querySelector('.readout .step').textContent") == "step 60, 3.84M tokens"
    set_control(browser, "Along", "time", "#curves")
    assert ticks_below(browser, "reward-mean")[-1].endswith(" s")
    set_control(browser, "Along", "step", "#curves")
    assert ticks_below(browser, "reward-mean") == ["0", "20", "40", "60"]
    assert browser.problems == []


def test_a_run_without_steps_stands_at_the_beginning_of_every_axis(page):
    browser = page(
        Story(metrics=lambda step, p: {"completions/tokens_mean": 1000.0}),
        Story(steps=0, evaluations=[("base", 0.3)], finished=False),
    )
    draw_all(browser)
    for axis in ("time", "tokens"):
        set_control(browser, "Along", axis, "#curves")
        dots = f"[...{chart('evaluation-sampled_strict')}.querySelectorAll('.run1 .dot')].map((dot) => dot.getAttribute('cx'))"
        assert browser.run(dots) == ["52"]
        assert ticks_below(browser, "reward-mean")[-1] != "60"
    assert browser.problems == []


def test_one_spike_flattens_no_chart_and_can_be_seen(page):
    browser = page(Story(loss=lambda step: 5000.0 if step == 31 else 0.01 * math.sin(step)))
    draw_all(browser)
    heights = f"[...{chart('policy-loss')}.querySelectorAll('.tick[text-anchor=end]')].map((t) => t.textContent)"
    assert all(abs(float(tick)) < 0.03 for tick in browser.run(heights))
    assert browser.run(f"{chart('policy-loss')}.querySelectorAll('.beyond').length") == 1
    line = browser.run(f"{chart('policy-loss')}.querySelector('.line').getAttribute('d')")
    places = [float(y) for y in re.findall(r"[ML][-\d.]+ ([-\d.]+)", line)]
    assert len(places) == 60
    assert all(0 <= y <= 170 for y in places), "nor does the smoothed curve leave the chart"
    assert "1 value lies outside (5,000)" in browser.run(f"{chart('policy-loss')}.textContent")
    browser.run(f"{chart('policy-loss')}.querySelector('[data-part=all]').click()")
    assert max(float(tick.replace(",", "")) for tick in browser.run(heights)) >= 4000
    assert browser.run(f"{chart('policy-loss')}.querySelectorAll('.beyond').length") == 0
    assert browser.problems == []
    assert browser.run(f"{chart('reward-mean')}.querySelectorAll('.beyond').length") == 0


def test_a_chart_is_saved_as_numbers_and_as_a_drawing(page, tmp_path):
    browser = page(Story(steps=30))
    draw_all(browser)
    browser.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
    saved = {}
    for part in ("csv", "svg"):
        path = tmp_path / "saved" / f"curve-reward-mean.{part}"
        browser.run(f"{chart('reward-mean')}.querySelector('[data-part={part}]').click()")
        give_up = time.monotonic() + 60
        while not path.exists() or not path.stat().st_size:  # the browser makes the file before it writes
            assert time.monotonic() < give_up
            browser.run("1")
        saved[part] = path.read_text(encoding="utf-8")
    rows = list(csv.DictReader(saved["csv"].splitlines()))
    run = read_run(tmp_path / "run-0")
    expected = dict(run.series("reward/mean"))
    assert {int(row["step"]): float(row["value"]) for row in rows} == pytest.approx(expected, rel=1e-5)
    assert float(rows[-1]["tokens"]) == pytest.approx(64 * sum(v for _, v in run.series("completions/tokens_mean")), rel=1e-5)
    drawing = ElementTree.fromstring(saved["svg"])
    (line,) = [one for one in drawing.iter("{http://www.w3.org/2000/svg}path") if one.get("stroke-width") == "1.8px"]
    assert line.get("stroke", "").startswith("rgb(")
    assert any(one.text == "reward/mean" for one in drawing.iter())
    assert browser.problems == []


def test_an_address_opens_where_it_points(page, tmp_path):
    browser = page(Story())
    ready(browser)
    browser.run("document.querySelectorAll('.row')[2].click()")
    browser.until("document.querySelector('#group h4')")
    kept = browser.run("location.hash")
    assert kept == "#completion/0/1/mini%3Atrain%3A1-0/2"
    at_top = "(() => {{ const t = document.querySelector('{}')?.getBoundingClientRect().top; return t >= 0 && t < 450; }})()"
    for link, selector in (
        (kept, "#group h3"),
        ("#curve-progress-policy_version", "#curve-progress-policy_version svg"),
        ("#held-out/0/sampled/mini%3Aheld_out%3A3", "#before-after .question"),
        ("#settings", "#settings"),
    ):
        browser.ask("Page.navigate", url="about:blank")
        browser.ask("Page.navigate", url=(tmp_path / "report.html").as_uri() + link)
        browser.until(at_top.format(selector))
    for nonsense in ("#%", "#completion/7/x", "#held-out/9", "#nowhere"):
        browser.run(f"location.hash = {nonsense!r}")
    assert browser.problems == []


def test_one_problem_is_followed_over_the_steps(page, tmp_path):
    folder = write_run(tmp_path / "again", Story(steps=12))
    records = folder / "completions.jsonl"
    records.write_text(re.sub(r"mini:train:\d+-", "mini:train:", records.read_text()))
    browser = page(Story(steps=1))
    browser.open(write_report([folder], tmp_path / "again.html").path)
    ready(browser)
    browser.until("document.querySelector(`[aria-label='Follow a problem']`)")
    set_control(browser, "Follow a problem", "1")
    browser.until("document.getElementById('over-steps')")
    assert texts(browser, "#over-steps tbody th") == [str(step) for step in range(1, 13)]
    right = [int(text.split(" of ")[0]) for text in texts(browser, "#over-steps tbody td:nth-child(2)")]
    records = [r for r in read_run(folder).completions if r.problem == "mini:train:1"]
    assert right == [sum(bool(r.strict) for r in records if r.step == step) for step in range(1, 13)]
    assert texts(browser, "#group h3")[0].startswith("Step 12")
    browser.run("document.querySelectorAll('#over-steps tbody th button')[3].click()")
    browser.until("document.querySelector('#group h3').textContent.startsWith('Step 4')")
    assert browser.problems == []


@pytest.mark.parametrize(("width", "told"), [(420, True), (1400, False)])
def test_a_table_wider_than_the_window_says_that_it_goes_on(page, width, told):
    hint = "getComputedStyle(document.querySelector('#group .scroll'), '::before').content"
    browser = page(Story(), width=width)
    ready(browser)
    browser.run("document.querySelectorAll('.row')[0].click()")
    browser.until("document.getElementById('how')")
    browser.until(f"{hint}.includes('scroll sideways') === {str(told).lower()}")
    assert browser.run("document.querySelector('#group .scroll').tabIndex") == (0 if told else -1)
