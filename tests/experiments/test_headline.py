"""The headline's table and figure from runs' folders and the records of an evaluation."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import yaml

pytest.importorskip("matplotlib")

from experiments import headline
from experiments.common import FIGURES, read_block, read_numbers
from experiments.comparison import newcombe_interval
from groupwise.config import dump_config, load_config
from groupwise.engines.base import SamplingSettings
from groupwise.evaluation import evaluate, write_records
from groupwise.types import Completion, Problem, Prompt

PROBLEMS = [Prompt(Problem(f"p{i}", f"{i} + 1?", str(i + 1)), f"{i} + 1?", (1, 2)) for i in range(20)]


class Knows:
    """Right on the first ``right`` problems; its wrong answers have the right number outside of the tags where ``lenient``."""

    def __init__(self, right, lenient=0):
        self.right, self.lenient = right, lenient

    def sample(self, prompts, samples_per_prompt, settings, *, seed, scope, on_progress=None):
        return [(Completion(self.answer(int(p.problem.id[1:])), (1, 2, 3), (-1.0,) * 3, "stop"),) for p in prompts]

    def answer(self, i):
        known = i + 1 if i < self.right else -7
        tail = f"\nThe answer is {i + 1}." if self.right <= i < self.right + self.lenient else ""
        return f"<reasoning>\nx\n</reasoning>\n<answer>\n{known}\n</answer>{tail}"


def judged(engine, problems=PROBLEMS, limit=9):
    return evaluate(
        engine, problems, stage="eval", mode="greedy", settings=SamplingSettings(max_tokens=limit, greedy=True), style="xml", seed=1,
        further=True, asked={"data": "sums", "available": 20, "prompt_format": "bare", "shots": 0},
    )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "seed-3"
    (folder / "evaluations").mkdir(parents=True)
    config = yaml.safe_load(dump_config(load_config("gsm8k-1.5b-cpu")))
    config["training"] |= {"seed": 3, "steps": 4}
    config["evaluation"]["max_completion_tokens"] = 9
    config["rollout"] |= {"prompts_per_step": 2, "completions_per_prompt": 8, "max_completion_tokens": 320}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(
        json.dumps({"code": {"revision": "abcdef1234567"}, "started": "2026-11-23T23:06:00+0000"})
    )
    rows = [
        {
            "step": i,
            "completions/tokens_mean": 10.0 * i,
            "time/step_s": 60.0,
            "accuracy/strict": i / 8,
            "memory/peak_gib": 9.0 + i,
        }
        for i in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for stage, right in (("base", 2), ("final", 9), ("step-1", 4)):
        lines = "".join(json.dumps(record) + "\n" for record in judged(Knows(right, 5)).records)
        (folder / "evaluations" / f"{stage}-greedy.jsonl").write_text(lines)
    return folder


def test_numbers_of_a_run_and_of_the_whole_split(run, tmp_path, capsys):
    records = tmp_path / "judged.jsonl"
    write_records(records, [("models/before", [judged(Knows(2, 6))]), ("runs/seed-3", [judged(Knows(12))])])
    headline.main([str(run), "--judged", str(records), "--out", str(tmp_path)])
    numbers = read_numbers("headline", tmp_path)
    (one,) = numbers["runs"]
    assert (one["seed"], one["steps"], one["of"], one["batch"], one["revision"], one["date"]) == (
        3,
        2,
        4,
        [2, 8, 320],
        "abcdef1",
        "2026-11-23",
    )
    assert one["sampled_tokens"] == 16 * (10 + 20)
    assert (one["step_seconds"], one["seconds"], one["peak_gib"]) == (120, None, 11)
    assert [(row["step"], row["strict"][0], row["lenient"][0]) for row in one["evaluations"]] == [
        (0, 0.1, 0.35),
        (1, 0.2, 0.45),
        (2, 0.45, 0.7),
    ]
    before, after = numbers["judged"]
    assert (before["strict"][0], before["lenient"][0]) == (0.1, 0.4)
    strict, lenient = (after["against_first"][key] for key in ("strict", "lenient"))
    assert (strict["difference"], strict["fixed"], strict["broken"]) == (0.5, 10, 0)
    assert strict["p_value"] == pytest.approx(2 * 0.5**10)
    assert (lenient["difference"], lenient["fixed"], lenient["broken"]) == (pytest.approx(0.2), 4, 0)

    table = headline.report(numbers)
    assert "| before | 10.0% (2.8% to 30.1%) | 40.0%" in table
    assert "10 fixed, 0 broken, p = 0.002" in table
    assert "in points: strict +35.0 (" in table
    assert "7 fixed, 0 broken, p = 0.02; lenient +35.0 (" in table
    assert "| 3 | 2 of 4 | 2 x 8 x 320 | 480 | 0.033 | - | 11.0 GiB | 0.00 kWh | abcdef1 |" in table
    assert "30 W for two cores" in table
    card = {"processor": "NVIDIA H200", "cores": 16, "torch": "2.11.0", "transformers": "5.17.0"}
    on_a_card = headline.report({**numbers, "runs": [{**one, "machine": card}]})
    assert "700 W for a card, its limit. NVIDIA H200, 16 cores" in on_a_card
    assert "| 0.033 | - | 11.0 GiB | 0.02 kWh |" in on_a_card
    on_both = headline.report({**numbers, "runs": [one, {**one, "machine": card}]})
    assert "not measured: 30 W for two cores and their share of the machine, 700 W for a card, its limit." in on_both
    assert (tmp_path / "headline.svg").read_bytes().count(b"seed 3") == 3
    drawn = (tmp_path / "headline.svg").read_bytes()
    headline.main(["--redraw", "--out", str(tmp_path)])
    assert (tmp_path / "headline.svg").read_bytes() == drawn

    headline.main([str(run), "--name", "headline-other", "--out", str(tmp_path)])
    assert read_numbers("headline-other", tmp_path)["judged"] == []
    assert (tmp_path / "headline-other.svg").exists()
    assert read_numbers("headline", tmp_path) == numbers
    assert "(figures/headline-other.svg)" in capsys.readouterr().out
    for name, why in (("learning", "begin it with headline-"), ("headline-new", "<!-- headline-new -->")):
        with pytest.raises(SystemExit):
            headline.main([str(run), "--name", name])
        assert why in capsys.readouterr().err


def test_a_run_that_was_not_judged_at_its_start_begins_where_the_untrained_model_was_judged(run, tmp_path):
    (run / "evaluations" / "base-greedy.jsonl").unlink()
    records = tmp_path / "judged.jsonl"

    def steps(*models):
        write_records(records, list(models))
        (one,) = headline.measure([run], records)["runs"]
        return [(row["step"], row["n"], row["strict"][0]) for row in one["evaluations"]], one["change"]["strict"]

    def both(problems, limit=9):
        return [("models/before", [judged(Knows(2, 6), problems, limit)]), ("runs/seed-3", [judged(Knows(12), problems, limit)])]

    found, change = steps(*both([*PROBLEMS, Prompt(Problem("p20", "20 + 1?", "21"), "20 + 1?", (1, 2))]))
    assert found == [(0, 20, 0.1), (1, 20, 0.2), (2, 20, 0.45)]
    assert (change["fixed"], change["broken"]) == (7, 0)
    otherwise_asked = [replace(prompt, text="Sum: " + prompt.text) for prompt in PROBLEMS]
    for models in (both(PROBLEMS)[1:], both(PROBLEMS[1:]), both(PROBLEMS, 18), both(otherwise_asked)):
        found, change = steps(*models)
        assert (found, change["fixed"]) == ([(1, 20, 0.2), (2, 20, 0.45)], 5)


def test_a_run_with_a_warm_start_begins_where_grpo_did(run):
    records = judged(Knows(6)).records
    (run / "evaluations" / "warm_start-greedy.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (one,) = headline.measure([run])["runs"]
    assert [(row["step"], row["strict"][0]) for row in one["evaluations"]] == [(0, 0.3), (1, 0.2), (2, 0.45)]
    assert one["change"]["strict"]["difference"] == pytest.approx(0.15), "from 6 of 20 to 9"


def test_a_run_with_sampled_evaluations_alone_is_refused(run):
    for file in [*(run / "evaluations").iterdir()]:
        file.rename(file.with_name(file.name.replace("greedy", "sampled")))
    with pytest.raises(SystemExit, match=r"seed-3 has no greedy evaluation: give 'evaluation\.modes=\[greedy\]'"):
        headline.measure([run])


def test_another_seed_stands_beside_those_of_the_file(run, tmp_path):
    records, out = tmp_path / "judged.jsonl", ["--out", str(tmp_path)]
    write_records(records, [("models/before", [judged(Knows(2, 6))]), ("runs/seed-3", [judged(Knows(12))])])
    headline.main([str(run), "--judged", str(records), *out])
    other, config = tmp_path / "seed-1", (run / "config.yaml").read_text()
    shutil.copytree(run, other)
    (other / "config.yaml").write_text(config.replace("seed: 3", "seed: 1"))
    write_records(records, [("models/before", [judged(Knows(3, 6))]), ("runs/seed-1", [judged(Knows(14))])])
    headline.main([str(other), "--judged", str(records), "--beside", *out])
    numbers = read_numbers("headline", tmp_path)
    assert [one["seed"] for one in numbers["runs"]] == [1, 3]
    assert [(row["model"], row["strict"][0]) for row in numbers["judged"]] == [("before", 0.15), ("seed-1", 0.7), ("seed-3", 0.6)]
    assert [row["against_first"]["strict"]["fixed"] for row in numbers["judged"][1:]] == [11, 10], (
        "each against its own evaluation"
    )
    write_records(records, [("models/before", [judged(Knows(2, 6))]), ("runs/again/seed-3", [judged(Knows(1))])])
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace("60.0", "61.0"))
    fresh = headline.measure([run], records)
    again = headline.beside(numbers, fresh)
    assert [(row["model"], row["strict"][0]) for row in again["judged"]][1:] == [("seed-1", 0.7), ("seed-3", 0.05)]
    ten = {**fresh["judged"][1], "model": "seed-10"}
    later = headline.beside(numbers, {**fresh, "judged": [fresh["judged"][0], ten]})
    assert [row["model"] for row in later["judged"]] == ["before", "seed-1", "seed-10"], (
        "what was judged of the old run 3 goes with it"
    )
    headline.main([str(other), "--beside", *out])
    assert len(read_numbers("headline", tmp_path)["judged"]) == 3, "without records the judged models stay"
    (run / "evaluations" / "base-greedy.jsonl").unlink()
    (ran_again,) = (one for one in headline.beside(numbers, headline.measure([run]))["runs"] if one["seed"] == 3)
    assert [row["step"] for row in ran_again["evaluations"]] == [1, 2], "another run does not begin where the old one did"


@pytest.mark.parametrize("at_start", [True, False])
def test_a_run_judged_before_the_model_before_training_is_compared_once_that_is_judged(run, tmp_path, at_start):
    if not at_start:
        (run / "evaluations" / "base-greedy.jsonl").unlink()
    alone, first, whole, out = (
        *(tmp_path / name for name in ("alone.jsonl", "first.jsonl", "whole.jsonl")),
        ["--out", str(tmp_path)],
    )
    before, after = ("models/before", [judged(Knows(2, 6))]), ("runs/seed-3", [judged(Knows(12))])
    backwards = ("models/before", [judged(Knows(2, 6), PROBLEMS[::-1])])
    for path, models in ((alone, [after]), (first, [backwards]), (whole, [before, after])):
        write_records(path, models)
    headline.main([str(run), "--judged", str(alone), *out])
    numbers = read_numbers("headline", tmp_path)
    assert [(row["model"], row["strict"][0], "against_first" in row) for row in numbers["judged"]] == [("seed-3", 0.6, False)]
    assert "| seed-3 | 60.0% (38.7% to 78.1%) |" in headline.report(numbers)
    assert "| - | - |" in headline.report(numbers)
    shares_alone = headline.measure([run], first)["judged"]
    del shares_alone[0]["right"]  # as files of earlier versions have it
    rows = headline.beside({**numbers, "judged": shares_alone}, numbers)["judged"]
    found = rows[1]["against_first"]["strict"]
    assert (found["difference"], found["difference_interval"]) == (
        pytest.approx(0.5),
        pytest.approx(newcombe_interval(12, 20, 2, 20)),
    )
    assert "| +50.0 (+20.7 to +69.5), not paired | +20.0 (-10.2 to +45.6), not paired |" in headline.report(
        {**numbers, "judged": rows}
    )
    (tmp_path / "headline.json").write_text(json.dumps({**numbers, "judged": rows}))
    headline.main([str(run), "--judged", str(first), "--beside", *out])
    assert read_numbers("headline", tmp_path)["judged"] == headline.measure([run], whole)["judged"]
    headline.main([str(run), "--judged", str(alone), "--beside", *out])
    numbers, at_once = read_numbers("headline", tmp_path), headline.measure([run], whole)
    assert (numbers["runs"], numbers["judged"]) == (at_once["runs"], at_once["judged"]), "step 0 stays"


def test_an_answer_that_could_not_be_checked_is_left_out_of_the_pairs(run, tmp_path, monkeypatch):
    records = tmp_path / "judged.jsonl"
    write_records(records, [("models/before", [judged(Knows(2, 6))]), ("runs/seed-3", [judged(Knows(12))])])
    unchecked = {"strict": None, "lenient": None, "unchecked": "it took too long"}
    monkeypatch.setattr(
        "groupwise.evaluation.models.judge_again",
        lambda record: record | (unchecked if (record["model"], record["problem"]) == ("runs/seed-3", "p4") else {}),
    )
    before, after = headline.measure([run], records)["judged"]
    assert (before["n"], after["n"], after["right"]["strict"].count("-")) == (20, 19, 1)
    strict = after["against_first"]["strict"]
    assert (strict["n"], strict["fixed"], strict["broken"]) == (19, 9, 0)
    numbers = {"runs": [], "environment": {}}
    assert headline.beside({**numbers, "judged": [before]}, {**numbers, "judged": [after]})["judged"] == [before, after]


def on_machine(run, to, seed, **place):
    """A copy of the run as another seed, of this place."""
    shutil.copytree(run, to)
    (to / "config.yaml").write_text((run / "config.yaml").read_text().replace("seed: 3", f"seed: {seed}"))
    known = json.loads((to / "environment.json").read_text())
    there = {"processor": "EPYC", "usable_cpus": 2, "accelerators": [], "torch": "2.13.0", "transformers": "5.17.0"}
    (to / "environment.json").write_text(json.dumps({**known, **there, **place}))
    return to


def test_the_table_names_the_machine_of_each_run(run, tmp_path):
    """And not the one on which the table was made, as long as the runs say theirs."""
    here = {"processor": "here", "cores": 9, "torch": "1", "transformers": "1"}
    folders = [on_machine(run, tmp_path / f"seed-{seed}0", seed) for seed in (0, 1)]
    numbers = {**headline.measure(folders), "environment": here}
    assert headline.report(numbers).endswith("machine. EPYC, 2 cores, torch 2.13.0, transformers 5.17.0.")
    other = headline.measure([on_machine(run, tmp_path / "seed-20", 2, accelerators=["H100"], usable_cpus=16)])
    both = headline.beside(numbers, {**other, "environment": {**here, "processor": "there"}})
    assert headline.report(both).endswith(
        "machine. Seed 0, seed 1: EPYC, 2 cores, torch 2.13.0, transformers 5.17.0; "
        "seed 2: H100, 16 cores, torch 2.13.0, transformers 5.17.0."
    )


def test_a_run_of_a_file_that_did_not_say_machines_keeps_its_file_s(run, tmp_path):
    here = {"processor": "here", "cores": 9, "torch": "1", "transformers": "1"}
    kept = {**headline.measure([run]), "environment": here}
    assert kept["runs"][0].pop("machine") is None, "its folder does not know"
    assert headline.report(kept).endswith("machine. here, 9 cores, torch 1, transformers 1.")
    found = headline.measure([on_machine(run, tmp_path / "seed-40", 4)]) | {"environment": {**here, "processor": "there"}}
    assert "Seed 3: here, 9 cores, torch 1, transformers 1; seed 4: EPYC, 2 cores" in headline.report(
        headline.beside(kept, found)
    )
    judged = [{"model": name, "n": 20, "data": "sums", "trained": name != "before"} for name in ("before", "seed-3")]
    again = headline.beside({**kept, "judged": judged}, {**headline.measure([run]), "environment": here})
    assert again["judged"] == judged, "the same run, whose machine is said now, has the same model"


def test_what_is_no_further_seed_does_not_stand_beside(run, tmp_path):
    records = tmp_path / "judged.jsonl"
    write_records(records, [("models/before", [judged(Knows(2, 6))]), ("runs/seed-3", [judged(Knows(12))])])
    kept = headline.measure([run], records)
    longer = {**kept["runs"][0], "seed": 4, "of": 100}
    wider = {**kept["runs"][0], "seed": 4, "batch": [4, 8, 320]}
    for other, why in ((longer, "training.steps is 100 here and was 4"), (wider, "batch is")):
        with pytest.raises(SystemExit, match=why):
            headline.beside(kept, {**kept, "runs": [other]})
    for change, why in (
        ({"model": "seed-4"}, "model before training is seed-4 here and was before"),
        ({"right": {"strict": "0110"}}, "number of problems judged is"),
        ({"data": "math500"}, "data judged is"),
    ):
        first = {**kept["judged"][0], **change}
        with pytest.raises(SystemExit, match=why):
            headline.beside(kept, {**kept, "judged": [first, *kept["judged"][1:]]})
    copy = {**kept["judged"][0], "data": f"{kept['judged'][0]['data']} (the copy data/gsm8k)"}
    assert headline.beside(kept, {**kept, "judged": [copy]})["judged"][0]["data"] == copy["data"]


def test_a_run_is_needed(capsys):
    with pytest.raises(SystemExit):
        headline.main([])
    assert "name the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(file.stem for file in FIGURES.glob("headline*.json")))
def test_a_page_shows_what_the_runs_came_to(name):
    page = headline.page_of(name)
    shown = read_block(page, name)
    assert shown == headline.report(read_numbers(name), name, page)
    assert (page.parent / re.search(r"^!\[.+\]\((.+)\)$", shown, re.MULTILINE)[1]).is_file()


def test_a_last_evaluation_of_fewer_problems_is_compared_on_those(run):
    final = run / "evaluations" / "final-greedy.jsonl"
    final.write_text("".join(final.read_text().splitlines(keepends=True)[:10]))
    numbers = {**headline.measure([run]), "environment": {"processor": "EPYC", "cores": 2, "torch": "2", "transformers": "5"}}
    (one,) = numbers["runs"]
    assert [row["n"] for row in one["evaluations"]] == [20, 20, 10]
    assert one["change"]["strict"]["difference"] == pytest.approx(0.7), "9 of 10 less 2 of 10"
    assert "problem by problem, of the 10 that both judged, in points: strict +70.0" in headline.report(numbers)
