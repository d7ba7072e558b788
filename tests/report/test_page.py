"""The page's file: what is in it, that nothing in it can break out, and that what was packed comes out again."""

import base64
import hashlib
import json
import math
import os
import re
import zlib
from array import array
from html.parser import HTMLParser
from pathlib import Path

import pytest
from doctor.miniature_runs import GROUPS, G, Story, Written, write_run

from groupwise.errors import ConfigError
from groupwise.evaluation.figures import paired_comparison
from groupwise.report import write_report
from groupwise.report.curves import bands, quantile, taken, thin
from groupwise.report.page import SCRIPTS, content_policy, pack_columns, script, script_json, style
from groupwise.report.payload import differences, flat
from groupwise.report.transcripts import COLUMNS, TokenPieces, around_questions, as_turn, local_folder
from groupwise.tracking.reading import read_run
from groupwise.types import ToolCall, Turn

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>\u2028\u2029\x00\ufeff",
    "<img src=x onerror=alert(1)>",
    "\ud800 lone \udfff",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)} `",
    "&lt;script&gt; &#x3c;",
)


class Blocks(HTMLParser):
    """Every script block with its attributes, as a browser would cut the file."""

    def __init__(self, page):
        super().__init__()
        self.scripts, self.tags, self.meta, self.inside = [], [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = tag == "script"
        if tag == "script":
            self.scripts.append([dict(attributes), ""])
        if tag == "meta":
            self.meta.append(dict(attributes))

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1][1] += data


def parts(path):
    """The page's data, its packed blocks unpacked, and everything else about it."""
    page = path.read_text(encoding="utf-8")
    blocks = Blocks(page)
    data = next(json.loads(text) for attributes, text in blocks.scripts if attributes.get("id") == "data")
    packed = {a["id"]: json.loads(unpacked(text)) for a, text in blocks.scripts if a.get("type") == "text/plain"}
    return data, packed, blocks


def unpacked(text):
    return zlib.decompress(base64.b64decode(text, validate=True))


def columns_of(table):
    raw, count, at, found = unpacked(table["columns"]), table["count"], 0, {}
    for name in COLUMNS:
        kind = "B" if name == "flags" else "f" if name in ("reward", "advantage") else "i"
        column = array(kind)
        size = column.itemsize * count
        column.frombytes(raw[at : at + size])
        found[name], at = column, at + size
    assert at == len(raw)
    return found


def texts_of(table, packed, run=0):
    """Every completion's text, found the way the page finds it: by group, portion and place in the group."""
    portions = [packed[f"c-{run}-{i}"] for i in range(len(table["starts"]))]
    groups = [group for portion in portions for group in portion]
    assert [sum(map(len, portions[:i])) for i in range(len(portions))] == table["starts"]
    return [row["t"] for group in groups for row in group["rows"]]


def test_every_completion_is_in_the_page_with_its_numbers(tmp_path):
    made = write_report([write_run(tmp_path / "run")])
    assert made.path == tmp_path / "run" / "report.html"
    assert made.size_bytes == made.path.stat().st_size
    data, packed, _ = parts(made.path)
    table = data["runs"][0]["transcripts"]
    records = read_run(tmp_path / "run").completions
    assert made.completions == table["count"] == len(records) == 60 * GROUPS * G
    columns = columns_of(table)
    assert texts_of(table, packed) == [record.text for record in records]
    assert list(columns["step"]) == [record.step for record in records]
    assert columns["advantage"][17] == pytest.approx(records[17].advantage, rel=1e-6)
    assert [bool(f & 1) for f in columns["flags"]] == [record.strict for record in records]


def test_scores_say_how_they_were_taken(tmp_path):
    data, _, _ = parts(write_report([write_run(tmp_path / "run")]).path)
    (sampled,) = (line for line in data["runs"][0]["asked"] if "temperature 1," in line)
    assert "1 sample of each of 40 problems from arithmetic" in sampled
    assert "the model's chat template with the system prompt" in sampled
    assert "0 shots; at most 48 tokens; seed 1234" in sampled
    told = {"data": "sums \ud800", "available": 60, "prompt_format": "bare text", "style": "boxed", "shots": 2, "seed": 7}
    rows = [{"mode": "sampled", "conditions": {}}, {"mode": "greedy", "conditions": 5}, {"mode": "sampled", "conditions": told}]
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"evaluations": rows, "greedy_evaluations": {"mode": 1}}))
    greedy, sampled = sorted(parts(write_report([tmp_path / "run"]).path)[0]["runs"][0]["asked"])
    assert "of each of 40 of the 60 problems from sums ?; bare text, answer in \\boxed{}, 2 shots; " in sampled, (
        "as the run had it"
    )
    assert "of each of 40 problems from arithmetic" in greedy
    (tmp_path / "run" / "config.yaml").unlink()
    data, _, _ = parts(write_report([tmp_path / "run"]).path)
    assert data["runs"][0]["asked"] == []


@pytest.mark.parametrize("place", ["closed/mine", "~nobody-of-that-name/mine"])
def test_another_users_model_and_data_leave_a_page_without_pieces_and_conditions(tmp_path, deny, place):
    mine = place.replace("closed", str(tmp_path / "closed"))
    story = Story(steps=3, overrides=[f"model.name={mine}", f"data.eval_source={mine}.jsonl"], finished=False)
    folder = write_run(tmp_path / "run", story)
    deny("exists")
    deny("is_file")
    run = parts(write_report([folder]).path)[0]["runs"][0]
    assert (run["asked"], run["transcripts"]["count"]) == ([], 3 * GROUPS * G)
    assert TokenPieces(read_run(folder)).tokenizer is None


def test_where_no_home_is_known_a_page_is_written_without_the_embedded_model(monkeypatch):
    monkeypatch.setenv("GROUPWISE_CACHE", "~nobody-of-that-name")
    assert local_folder("smollm2-135m-instruct", None) is None


def test_held_out_problems_are_there_with_every_stage(tmp_path):
    data, packed, _ = parts(write_report([write_run(tmp_path / "run")]).path)
    sampled = next(one for one in data["runs"][0]["held_out"] if one["mode"] == "sampled")
    assert sampled["stages"] == ["base", "warm_start", "final"]
    assert [v.count("r") for v in sampled["verdicts"]] == [0, 12, 34]
    first = packed[f"e-0-{sampled['first_portion']}"][0]
    assert first["question"] == "0 - 1 = ?"
    assert [said[1] for said in first["said"]] == ["77", "-1", "-1"]
    (compared,) = [c for c in data["runs"][0]["comparisons"] if c["mode"] == "sampled" and c["after"] == "final"]
    assert (compared["fixed"], compared["broken"], compared["n"]) == (22, 0, 40)
    assert compared["p_value"] == pytest.approx(2 / 2**22)


def test_held_out_texts_lie_in_portions_that_are_quickly_unpacked(tmp_path):
    """However many stages there are: they open with the page."""
    stages = [(f"step-{i + 1}", 0.5) for i in range(100)]
    story = Story(steps=3, held_out=10, evaluations=stages, extra={"response": "it is 77. " * 500})
    data, packed, blocks = parts(write_report([write_run(tmp_path / "run", story)]).path)
    texts = {a["id"]: len(unpacked(text)) for a, text in blocks.scripts if a.get("type") == "text/plain"}
    assert max(size for name, size in texts.items() if name.startswith("e-")) < 1_000_000
    for mode in data["runs"][0]["held_out"]:
        sizes = [len(packed[f"e-0-{mode['first_portion'] + i}"]) for i in range(len(mode["starts"]))]
        assert [sum(sizes[:i]) for i in range(len(sizes))] == mode["starts"]
        assert sum(sizes) == len(mode["problems"]) == 10


def judged_again(folder, change):
    """The held-out records of a run, with what ``change`` makes of each stage's."""
    for file in (folder / "evaluations").glob("*.jsonl"):
        stage = file.stem.rpartition("-")[0]
        rows = change(stage, [json.loads(line) for line in file.read_text().splitlines()])
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_several_samples_of_a_problem_are_compared_as_the_summary_does(tmp_path):
    """One of two samples is right at both stages, the first before and the second after."""
    folder = write_run(tmp_path / "run", Story(evaluations=[("base", 0.5), ("final", 0.5)]))

    def twice(stage, rows):
        order = (True, False) if stage == "base" else (False, True)
        return [{**row, "strict": right, "response": str(right)} for row in rows for right in order]

    judged_again(folder, twice)
    data, packed, _ = parts(write_report([folder]).path)
    compared = data["runs"][0]["comparisons"][0]
    assert (compared["samples"], compared["fixed"], compared["broken"], compared["p_value"]) == (2, 0, 0, 1.0)
    shown = data["runs"][0]["held_out"][0]
    assert shown["several"]
    assert [set(stage) <= kept for stage, kept in zip(shown["verdicts"], ({"r"}, {"w", "l"}), strict=True)] == [True, True]
    assert [said[0] for said in packed[f"e-0-{shown['first_portion']}"][0]["said"]] == ["True", "False"], "the first of each"

    def one_unchecked(stage, rows):
        return [{**row, "strict": None, "unchecked": "late"} if i == 5 and stage == "base" else row for i, row in enumerate(rows)]

    judged_again(folder, one_unchecked)
    files = [(folder / "evaluations" / f"{stage}-sampled.jsonl").read_text().splitlines() for stage in ("base", "final")]
    paired = paired_comparison(*([json.loads(line) for line in lines] for lines in files))
    told = next(c for c in parts(write_report([folder]).path)[0]["runs"][0]["comparisons"] if c["mode"] == "sampled")
    same = ("n", "samples", "p_value")
    assert [told[name] for name in same] == [paired[name] for name in same] == [39, 2, 1.0]


def test_stages_with_other_reference_answers_are_not_compared(tmp_path):
    folder = write_run(
        tmp_path / "run", Story(metrics=lambda step, p: {"reward/mean": 1.0 + 2 * p}, evaluations=[("base", 0.9), ("final", 0.1)])
    )
    before = parts(write_report([folder]).path)[0]["runs"][0]
    assert [c["broken"] for c in before["comparisons"]] == [32, 32]
    assert {"reward-hacking", "answers-lost"} <= {finding["rule"] for finding in before["findings"]}
    judged_again(folder, lambda stage, rows: [{**row, "expected": stage} for row in rows])
    after = parts(write_report([folder]).path)[0]["runs"][0]
    assert after["comparisons"] == []
    assert not {"reward-hacking", "answers-lost"} & {finding["rule"] for finding in after["findings"]}


def test_what_an_environment_says_is_the_verdict_everywhere(tmp_path):
    folder = write_run(tmp_path / "run", Story(evaluations=[("base", 0.5), ("final", 0.5)]))

    def played(stage, rows):
        return [{**row, "reward": 1.0, "success": stage == "final" or i < 4} for i, row in enumerate(rows)]

    judged_again(folder, played)
    run = parts(write_report([folder]).path)[0]["runs"][0]
    assert [(c["key"], c["fixed"], c["broken"]) for c in run["comparisons"]] == [("success", 36, 0)] * 2
    assert [stage.count("r") for stage in run["held_out"][0]["verdicts"]] == [4, 40]
    assert run["curves"]["evaluation/sampled_success"]["values"] == [0.1, 1.0]
    assert "evaluation/sampled_strict" not in run["curves"]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_that_a_run_says_becomes_markup(tmp_path, hostile):
    story = Story(
        steps=4,
        write=lambda step, p, group, sample, answer: Written(hostile),
        reward=lambda step, p, text, right: {hostile: 1.0 * right, "x": 0.5},
        metrics=lambda step, p: {hostile: 1.0, "policy/ratio_deviation": 0.5},
        prompts=lambda step, group: hostile,
        extra={"response": hostile, "question": hostile, "extracted": hostile},
    )
    folder = tmp_path / "run"
    write_run(folder, story)
    for name, key in (("environment.json", "recipe"), ("summary.json", "note")):
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**found, key: hostile, hostile: [hostile]}))
    plain = write_report([write_run(tmp_path / "plain", Story(steps=4))]).path
    data, packed, blocks = parts(write_report([folder]).path)
    page = plain.read_text(encoding="utf-8")
    expected = Blocks(page)
    assert set(blocks.tags) == set(expected.tags)
    assert [b[1] for b in blocks.scripts if "type" not in b[0]] == [b[1] for b in expected.scripts if "type" not in b[0]]
    wanted = hostile.encode("utf-8", errors="replace").decode("utf-8")
    assert set(texts_of(data["runs"][0]["transcripts"], packed)) == {wanted}


def test_the_policy_allows_this_script_and_style_and_nothing_else(tmp_path):
    page = write_report([write_run(tmp_path / "run")]).path
    _, _, blocks = parts(page)
    policy = next(m["content"] for m in blocks.meta if m.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    (code,) = [text for attributes, text in blocks.scripts if "type" not in attributes]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in policy
    assert not set(blocks.tags) & {"link", "img", "iframe", "base", "form", "object"}
    assert not re.search(r"\.on[a-z]+\s*=|javascript:|https?://(?!www\.w3\.org/2000/svg)", code)
    assert content_policy("a", "b") != content_policy("a", "c")


def test_the_script_puts_text_into_text_nodes_only():
    found = re.findall(r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", script())
    assert not found
    assert len(SCRIPTS) == len(set(SCRIPTS))
    assert "</" not in script() + style(), "it would end its own block"


def test_json_in_a_script_block_cannot_end_it_and_reads_back():
    value = {"a": list(HOSTILE[:4]), "b": math.inf, "c": -0.5}
    text = script_json(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == {**value, "b": None}


def test_columns_are_little_endian_one_after_the_other():
    packed = pack_columns([array("i", [1, -2]), array("f", [0.5]), array("B", [7])])
    assert unpacked(packed) == b"\x01\0\0\0\xfe\xff\xff\xff\0\0\0\x3f\x07"


def test_thinned_curves_keep_mean_extremes_and_ends():
    points = [(step, math.sin(step)) for step in range(1, 2001)]
    curve = thin(points, 100)
    assert len(curve["steps"]) == 100
    assert curve["steps"][-1] == 2000
    assert min(curve["low"]) == pytest.approx(min(v for _, v in points), rel=1e-5)
    assert sum(curve["values"]) / 100 == pytest.approx(sum(v for _, v in points) / 2000, abs=1e-5)
    assert thin(points[:50], 100) == {"steps": list(range(1, 51)), "values": pytest.approx([v for _, v in points[:50]], rel=1e-5)}


def test_seconds_and_tokens_add_up_over_a_resumed_run(tmp_path):
    folder = write_run(tmp_path / "run", Story(steps=4, metrics=lambda step, p: {"completions/tokens_mean": 10.0 * step}))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row, seconds in zip(rows, (5.0, 9.0, 2.0, 3.5), strict=True):
        row["time_s"] = seconds
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = taken(read_run(folder))
    assert found == {"steps": [0, 1, 2, 3, 4], "time": [0, 5, 9, 11, 12.5], "tokens": [0, 640, 64 * 30, 64 * 60, 64 * 100]}
    assert taken(read_run(folder), most=2)["steps"] == [0, 3, 4], "the end stays"
    (folder / "metrics.jsonl").write_text("")
    assert taken(read_run(folder)) == {"steps": [0], "time": None, "tokens": None}


def test_quantiles_are_numpys():
    numpy = pytest.importorskip("numpy")
    values = sorted(numpy.random.default_rng(0).normal(size=37).tolist())
    for share in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0):
        assert quantile(values, share) == pytest.approx(numpy.quantile(values, share))


def test_distributions_cover_all_steps_in_order(tmp_path):
    run = read_run(write_run(tmp_path / "run", Story(steps=140)))
    band = bands(run)["tokens"]
    assert len(band["steps"]) == 120
    assert band["steps"] == sorted(band["steps"])
    assert band["steps"][-1] == 140
    assert all(low <= high for low, high in zip(band["quantiles"][0], band["quantiles"][-1], strict=True))


def test_settings_that_differ_are_found_and_equal_ones_are_not(tmp_path):
    folders = [
        write_run(tmp_path / f"run-{beta}", Story(steps=3, overrides=[f"algorithm.kl.beta={beta}"])) for beta in (0.05, 0.1)
    ]
    data, _, _ = parts(write_report(folders, tmp_path / "both.html").path)
    rows = {row["path"]: row["values"] for row in data["settings_differences"]}
    assert rows == {"algorithm.kl.beta": ["0.05", "0.1"]}
    assert differences([{"a": "1"}, {}]) == [{"path": "a", "values": ["1", None]}]
    assert flat({"a": {"b": {"c": 1}}, "l": [1, {"x": 2}]}) == {"a.b.c": "1", "l": '[1, {"x": 2}]'}


def test_the_question_is_what_differs_between_prompts_whatever_the_template(tmp_path):
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    before, after = around_questions([chat.format(q) for q in ("How many are 2 😀?", "How many are 3?", "How old?")])
    assert chat.format("How many are 9?")[len(before) : -len(after)] == "How many are 9?"
    assert around_questions(["Q: 1 + 1 =", "Q: 2 + 2 ="]) == ("", ""), "no mark tells where the template ends"
    assert around_questions(["the same", "the same"]) == around_questions([]) == ("", "")
    run = parts(
        write_report([write_run(tmp_path / "run", Story(prompts=lambda step, group: chat.format(f"😀 {step} + {group}?")))]).path
    )[0]
    assert run["runs"][0]["transcripts"]["around"] == [len(before), len(after)]


def test_settings_that_are_not_the_defaults_are_named(tmp_path):
    overrides = ["algorithm.loss.epsilon=0.3", "training.threads=1"]
    run = parts(write_report([write_run(tmp_path / "run", Story(steps=3, overrides=overrides))]).path)[0]["runs"][0]
    assert {"algorithm.loss.epsilon", "training.threads", "training.steps"} <= set(run["chosen"])
    assert set(run["chosen"]) < set(run["settings"])
    assert "algorithm.advantage.scale" not in run["chosen"], "it is what every run has"
    overrides = ["algorithm.preset=dr_grpo", "algorithm.loss.aggregation=sequence_mean"]
    run = parts(write_report([write_run(tmp_path / "another", Story(steps=3, overrides=overrides))]).path)[0]["runs"][0]
    objective = {path for path in run["chosen"] if path.startswith("algorithm")}
    assert objective == {"algorithm.preset", "algorithm.loss.aggregation"}, (
        "the one is not the preset's, though it is plain GRPO's"
    )


def test_half_a_character_in_a_call_can_be_written():
    turn = Turn("assistant", "x", 1, (ToolCall("f", {"x": "\ud83d é"}, "1", None),))
    ((name, arguments, *_),) = as_turn(turn)[3]
    assert (name, arguments.encode().decode()) == ("f", '{"x": "\\ud83d é"}')


def test_weights_and_the_rule_of_advantages_are_those_of_the_settings(tmp_path):
    overrides = ["rewards.functions.0.weight=3", "algorithm.advantage.scale=none"]
    run = parts(write_report([write_run(tmp_path / "run", Story(steps=3, overrides=overrides))]).path)[0]["runs"][0]
    assert run["weights"] == {"correctness": 3.0, "format": 1.0}
    assert (run["advantage"]["baseline"], run["advantage"]["scale"], run["advantage"]["completions"]) == (
        "group_mean",
        "none",
        64,
    )
    assert (run["advantage"]["masks"], run["advantage"]["top_share"]) == (False, 1)


def test_the_rule_says_what_is_left_out_of_the_loss(tmp_path):
    overrides = ["algorithm.mask_truncated=true", "algorithm.entropy={top_share: 0.2}"]
    run = parts(write_report([write_run(tmp_path / "run", Story(steps=3, overrides=overrides))]).path)[0]["runs"][0]
    assert (run["advantage"]["masks"], run["advantage"]["top_share"]) == (True, 0.2)


def test_completions_of_groups_that_were_left_out_are_told_by_step(tmp_path):
    def left_out(name, *overrides):
        story = Story(steps=3, overrides=overrides, metrics=lambda step, p: {"groups/failed": float(step == 2)})
        return parts(write_report([write_run(tmp_path / name, story)]).path)[0]["runs"][0]["advantage"]["left_out"]

    assert left_out("run") == {"2": 8}
    assert left_out("refilled", "rollout.refill_rounds=1") == {}


def test_a_report_without_texts_has_none(tmp_path):
    story = Story(
        write=lambda step, p, group, sample, answer: Written("the secret answer"), extra={"response": "the secret answer"}
    )
    full = write_report([write_run(tmp_path / "run", story)])
    bare = write_report([tmp_path / "run"], tmp_path / "bare.html", completions=False)
    assert bare.completions == bare.text_bytes == 0
    assert bare.size_bytes < full.size_bytes
    data, packed, _ = parts(bare.path)
    assert packed == {}
    assert "secret" not in json.dumps(data)


def test_a_report_without_texts_quotes_no_tool(tmp_path):
    call = ToolCall("search", {"query": "x"}, "error: the secret password", "raised")
    story = Story(
        overrides=["rollout.tools=[calculator]", "rollout.max_completion_tokens=128"],
        metrics=lambda step, p: {"episodes/calls": 1.0, "episodes/failed_calls": 0.9},
        write=lambda step, p, group, sample, answer: Written(f"{sample} {step}", calls=(call,)),
    )
    full = write_report([write_run(tmp_path / "run", story)])
    bare = write_report([tmp_path / "run"], tmp_path / "bare.html", completions=False)
    (found,) = (one for one in parts(full.path)[0]["runs"][0]["findings"] if one["rule"] == "tool-errors")
    assert "told 'error: the secret password'" in found["examples"][0]["remark"]
    assert "secret" not in json.dumps(parts(bare.path)[0])


def test_only_a_report_is_written_over(tmp_path):
    folder = write_run(tmp_path / "run", Story(steps=3))
    write_report([folder])
    write_report([folder])
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    with pytest.raises(ConfigError, match="is no report of ours"):
        write_report([folder], notes)
    assert notes.read_text() == "mine"
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([folder], tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe' is a pipe or a device"):
        write_report([folder], tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([folder], tmp_path / "nowhere" / "report.html")


def test_a_place_that_may_not_be_looked_into_is_named(tmp_path, deny):
    folder = write_run(tmp_path / "run", Story(steps=3))
    deny("is_dir")
    with pytest.raises(ConfigError, match=r"closed/r\.html' cannot be written \(Permission denied\): name another place"):
        write_report([folder], tmp_path / "closed" / "r.html")


def test_runs_in_folders_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name / "run", Story(steps=3)) for name in ("a", "b", "a/runs", "b/runs")]
    assert write_report(folders[:2], tmp_path / "r.html").runs == ("a/run", "b/run")
    assert write_report(folders[1:], tmp_path / "r.html").runs == ("b/run", "a/runs/run", "b/runs/run")
    assert write_report([folders[0], *folders[:2]], tmp_path / "r.html").runs == ("a/run (1)", "a/run (2)", "b/run")


def test_a_tilde_in_the_page_s_place_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert write_report([write_run(tmp_path / "run", Story(steps=3))], Path("~/r.html")).path == tmp_path / "r.html"


@pytest.mark.parametrize(
    ("story", "verdict"),
    [
        (Story(steps=0, evaluations=[], finished=False), "Nothing to judge yet: 0 steps"),
        (Story(steps=1, evaluations=[]), "Too early to judge: 1 step, and it takes 5"),
        (Story(steps=2, finished=False), "Too early to judge: 2 steps, and it takes 5"),
    ],
)
def test_a_run_that_has_hardly_begun_has_a_page_too(tmp_path, story, verdict):
    data, _, _ = parts(write_report([write_run(tmp_path / "run", story)]).path)
    assert (data["runs"][0]["steps"], data["runs"][0]["verdict"]) == (story.steps, verdict), "as `groupwise doctor` says it"
