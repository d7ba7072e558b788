"""Whole runs over a tiny model: what they leave, what they log, what repeats, and what stops them."""

import json
import mmap

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from groupwise.config import load_config
from groupwise.config.presets import PRESETS
from groupwise.config.schema import Config
from groupwise.doctor import diagnose_run
from groupwise.doctor.findings import groups_of
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.errors import ConfigError, RewardError, TrainingError
from groupwise.memory import peak_memory_bytes, reset_peak_memory
from groupwise.rewards import StepRewards
from groupwise.tracking import ConsoleTracker
from groupwise.tracking.jsonl import JsonlTracker
from groupwise.tracking.metric_table import METRICS, describe_metric
from groupwise.tracking.reading import read_run
from groupwise.training import ending
from groupwise.training import run as run_module
from groupwise.training import start as start_module
from groupwise.training.batches import Batches
from groupwise.training.checkpoint_folder import read_state
from groupwise.training.learner import Learner
from groupwise.training.loop import train
from groupwise.training.setup import _with_steps
from tests.tiny import final_weights, metrics_of, write_tiny_llama


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def repeatable(folder):
    """Metrics without clocks, and the final weights."""
    return metrics_of(folder), final_weights(folder)


def same(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.fixture
def go(small_config, letters, quiet, tmp_path):
    """``go("name", on_step=..., **sections)`` trains into ``tmp_path / name``."""

    def run(name="run", *, functions=letters, console=quiet, on_step=None, recipe="run", **sections):
        config = small_config(**sections)
        return train(config, recipe=recipe, rewards=functions, console=console, on_step=on_step, run_folder=tmp_path / name)

    return run


def test_a_seed_repeats_a_run_and_another_does_not(go):
    warm = {"warm_start": {"steps": 2, "examples_per_step": 2}}
    first = repeatable(go("first", **warm).folder)
    assert same(repeatable(go("again", **warm).folder), first)
    other = repeatable(go("other", training={"steps": 2, "seed": 1}, **warm).folder)
    assert other[0] != first[0]
    assert not all(torch.equal(other[1][name], first[1][name]) for name in first[1])


def test_the_seed_decides_the_order_of_problems_and_the_samples_and_each_step_draws_afresh(go, letters):
    """With equal rewards nothing is learnt, so that only the draws can differ. Three problems make every step the same three."""
    equal = {"letters": lambda completions, **columns: [1.0] * len(completions)}
    seen = {}
    for name, seed, limit in (("few", 0, 3), ("few, another seed", 1, 3), ("all", 0, None), ("all, another seed", 1, None)):
        steps = []
        go(name, functions=equal, on_step=steps.append, data={"limit": limit}, training={"seed": seed, "steps": 2})
        seen[name] = [{g.prompt.problem.id: [c.token_ids for c in g.completions] for g in report.groups} for report in steps]
    first, second = seen["few"]
    assert first.keys() == second.keys() == seen["few, another seed"][0].keys()
    assert all(first[problem] != second[problem] for problem in first), "each step draws afresh"
    assert all(first[problem] != seen["few, another seed"][0][problem] for problem in first), "the seed decides the samples"
    assert seen["all"][0].keys() != seen["all, another seed"][0].keys(), "and the order of problems"


def test_epochs_are_counted_in_steps_once_the_problems_are_read(go, quiet, small_config, letters, tmp_path):
    """18 problems in steps of 3: a third of an epoch is two steps, and the run's config.yaml says so."""
    run = go("epochs", training={"epochs": 1 / 3}, optimizer={"warmup_steps": 0.5})
    assert run.summary["steps"] == 2
    saved = load_config(run.folder / "config.yaml").training
    assert (saved.steps, saved.epochs) == (2, None)
    assert [row["optimizer/learning_rate"] for row in lines_of(run.folder / "metrics.jsonl")] == pytest.approx([1e-3, 1e-3])
    again = train(small_config(training={"epochs": 1 / 3}), run_folder=run.folder, rewards=letters, console=quiet, resume=True)
    assert again.summary["steps"] == 2, "it has finished: there is nothing to do"
    with pytest.raises(ConfigError, match="the run has only 2 optimiser steps"):
        go("too long", training={"epochs": 1 / 3}, optimizer={"warmup_steps": 3})


@pytest.mark.parametrize(("epochs", "steps"), [(1.1, 11), (1.11, 12), (0.01, 1), (1e-12, 1)])
def test_steps_of_epochs_are_rounded_up_and_rounding_makes_none(epochs, steps):
    """1.1 x 100 / 10 is a little above 11."""
    config = Config(training={"epochs": epochs}, rollout={"prompts_per_step": 10})
    assert _with_steps(config, 100).training.steps == steps


def test_a_deterministic_run_uses_deterministic_kernels_alone_and_sets_them_back(go):
    said = []
    try:
        run = go(
            "kernels",
            training={"deterministic": True},
            on_step=lambda _: said.append(torch.are_deterministic_algorithms_enabled()),
        )
        said.append(torch.are_deterministic_algorithms_enabled())
    finally:
        torch.use_deterministic_algorithms(False)
    assert said == [True, True, False]
    assert same(repeatable(run.folder), repeatable(go("plain").folder)), "on this CPU they are the same kernels"


def test_a_number_of_threads_is_the_run_s_alone(go, monkeypatch):
    before, said = torch.get_num_threads(), []

    def refuse(*words):
        raise ConfigError("refused")

    torch.set_num_threads(2)
    try:
        go("one", training={"threads": 1}, on_step=lambda _: said.append(torch.get_num_threads()))
        go("default", on_step=lambda _: said.append(torch.get_num_threads()))
        monkeypatch.setattr(start_module, "_load_parts", refuse)
        with pytest.raises(ConfigError, match="refused"):
            go("none", training={"threads": 1})
        assert [*said, torch.get_num_threads()] == [1, 1, 2, 2, 2]
    finally:
        torch.set_num_threads(before)


def test_the_peak_of_memory_is_the_run_s_and_not_that_of_the_process_before(go):
    if not reset_peak_memory():
        pytest.skip("this system does not count peaks anew")
    go("first")  # imports what a run needs
    size = 500 * 2**20
    with mmap.mmap(-1, size) as block:  # goes back to the system when it is closed
        for at in range(0, size, mmap.PAGESIZE):
            block[at] = 1
    before = peak_memory_bytes()
    run = go("second")
    peaks = [row["memory/peak_gib"] for row in lines_of(run.folder / "metrics.jsonl")]
    assert max(*peaks, run.summary["peak_memory_gib"]) * 2**30 < before - size / 2


def test_how_the_batch_is_cut_and_sampled_does_not_change_the_samples(go):
    """The first step's completions are those of the seed whatever the budget and the concurrency."""
    whole = go("whole")
    cut = go("cut", training={"steps": 2, "micro_batch_tokens": 40}, rollout={"max_concurrent_sequences": 3})
    told = [[row["completion"] for row in lines_of(r.folder / "completions.jsonl") if row["step"] == 1] for r in (whole, cut)]
    assert told[0] == told[1]
    losses = [lines_of(r.folder / "metrics.jsonl")[0]["optimizer/grad_norm"] for r in (whole, cut)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_folder_holds_the_whole_run(go, small_config, tiny_folder):
    evaluation = {"modes": ["sampled", "greedy"], "at_start": True, "every": 2}
    sections = {"training": {"steps": 3}, "evaluation": evaluation, "output": {"checkpoint_every": 2, "log_completions": 2}}
    result = go(recipe="mine", warm_start={"steps": 1, "examples_per_step": 2}, **sections)
    folder = result.folder
    stages = [f"{stage}-{mode}.jsonl" for stage in ("base", "warm_start", "step-2", "final") for mode in ("sampled", "greedy")]
    assert sorted(path.name for path in (folder / "evaluations").iterdir()) == sorted(stages)
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "environment.json", "metrics.jsonl", "completions.jsonl", "evaluations", "checkpoints", "final_model",
        "summary.json", ".lock",
    }  # fmt: skip
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-0", "step-2"]  # after the warm start
    assert (
        load_config(folder / "config.yaml").model_dump()
        == small_config(warm_start={"steps": 1, "examples_per_step": 2}, **sections).model_dump()
    )
    assert json.loads((folder / "environment.json").read_text(encoding="utf-8"))["seeds"]["training.seed"] == 0
    assert [row["step"] for row in lines_of(folder / "metrics.jsonl")] == [1, 2, 3]
    rows = lines_of(folder / "completions.jsonl")
    assert len(rows) == 3 * 2 * 4, "two groups a step"
    assert all(row["reward"] == row["components"]["letters"] for row in rows)
    assert [row["policy_version"] for row in rows[::8]] == [0, 1, 2]
    for first in range(0, len(rows), 4):
        assert sum(row["advantage"] for row in rows[first : first + 4]) == pytest.approx(0, abs=1e-9)


def test_the_summary_says_what_the_issue_asks_for(go, tiny_folder):
    result = go(
        recipe="mine",
        warm_start={"steps": 1, "examples_per_step": 2},
        evaluation={"modes": ["sampled", "greedy"], "at_start": True},
    )
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary == json.loads(json.dumps(result.summary))
    assert [row["stage"] for row in summary["evaluations"]] == ["base", "warm_start", "final"]
    for row in summary["evaluations"] + summary["greedy_evaluations"]:
        assert row["n"] == 4
        for name in ("strict_accuracy", "lenient_accuracy", "format_rate", "stop_rate"):
            assert 0 <= row[name] <= 1
    assert summary["seconds"] > 0
    assert summary["recipe"] == "mine"
    assert summary["model"] == str(tiny_folder)
    assert summary["comparison"]["before"] == "warm_start"
    assert summary["comparison"]["n"] == 4


def test_texts_of_evaluations_in_mid_run_are_on_the_disk_alone(go, monkeypatch):
    held, build, consoles = [], ending.build_summary, []

    def summarised(evaluations, *words, **named):
        held.extend(evaluations)
        return build(evaluations, *words, **named)

    monkeypatch.setattr(ending, "build_summary", summarised)
    monkeypatch.setattr(ConsoleTracker, "show_summary", lambda console, summary: consoles.append(console))
    summary = go(training={"steps": 3}, evaluation={"at_start": True, "every": 1}).summary
    kept = {evaluation.stage for evaluation in held if evaluation.records}
    assert kept == {"base", "final"}
    assert {stage for (stage, _), result in consoles[0].seen.items() if result} == kept
    assert [row["stage"] for row in summary["training_evaluations"]] == ["step-1", "step-2"]
    assert all(row["n"] == row["figures"]["n"] == 4 for row in summary["training_evaluations"])
    assert summary["comparison"]["n"] == 4


def test_the_final_model_is_a_folder_that_transformers_loads(go, tiny_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = go().folder / "final_model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, dict(base.named_parameters())[name])}
    assert moved == {name for name, _ in base.named_parameters()}, "every tensor was trained"
    said = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False, add_generation_prompt=True)
    assert said == "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
    assert not list(folder.glob("*.bin"))


def test_a_callback_sees_every_step_and_may_end_the_run(go):
    seen = []

    def watch(report):
        seen.append(report)
        return report.step < 2

    result = go(on_step=watch, training={"steps": 5}, output={"checkpoint_every": 1})
    assert [report.step for report in seen] == [1, 2]
    assert len(seen[0].groups) == len(seen[0].advantages) == 3
    assert [len(row) for row in seen[0].advantages] == [4, 4, 4]
    assert seen[0].metrics["reward/mean"] == lines_of(result.folder / "metrics.jsonl")[0]["reward/mean"]
    assert [row["stage"] for row in result.summary["evaluations"]] == ["final"]
    assert (result.folder / "final_model" / "model.safetensors").is_file()


def test_a_callback_that_returns_nothing_goes_on(go):
    seen = []
    go(on_step=seen.append, training={"steps": 3})
    assert len(seen) == 3


@pytest.mark.parametrize("no", [np.bool_(False), torch.tensor(False)], ids=["numpy", "torch"])
def test_a_false_of_numpy_or_torch_ends_the_run_too(go, no):
    assert go(on_step=lambda report: no, training={"steps": 3}).summary["steps"] == 1


def fussy(completions, answer, **columns):
    """Cannot score problems whose answer ends in 1 or 5, about two in five of the sums."""
    if answer[0][-1] in "15":
        raise ValueError("I do not like it")
    return [float(len(completion[-1]["content"])) for completion in completions]


def test_a_failing_reward_is_counted_and_shown_and_its_group_left_out(go, capsys):
    seen = []
    result = go(
        functions={"fussy": fussy},
        console=Console(width=200, force_terminal=False),
        on_step=seen.append,
        training={"steps": 4},
        rewards={"functions": [{"function": "fussy"}], "on_error": "skip"},
    )
    failed = [int(report.metrics["groups/failed"]) for report in seen]
    assert [len(report.groups) for report in seen] == [3 - count for count in failed]
    assert 0 < sum(failed) < 12
    shown = capsys.readouterr().out
    assert shown.count("I do not like it") == sum(failed)
    assert "its group is left out" in shown
    assert [row["groups/failed"] for row in lines_of(result.folder / "metrics.jsonl")] == failed


def test_a_step_without_any_group_is_survived(go):
    def never(completions, **columns):
        raise ValueError("no")

    sections = {"rewards": {"functions": [{"function": "never"}], "on_error": "skip"}, "algorithm": {"kl": {"beta": 0.1}}}
    result = go(functions={"never": never}, **sections)
    rows = lines_of(result.folder / "metrics.jsonl")
    assert [row["groups/failed"] for row in rows] == [3, 3]
    assert rows[0]["reward/mean"] is None
    assert rows[-1]["progress/policy_version"] == 0


def test_a_failing_reward_stops_the_run_by_default(go):
    with pytest.raises(RewardError, match=r"I do not like it.*rewards\.on_error=skip"):
        go(functions={"fussy": fussy}, training={"steps": 4}, rewards={"functions": [{"function": "fussy"}]})


def third_call(monkeypatch, owner, name, error, after=False, number=3):
    """The third call of a method, or that of another ``number``, raises ``error``; ``after`` it has done its work."""
    method, calls = getattr(owner, name), []

    def call(*args, **keywords):
        calls.append(name)
        if len(calls) == number and not after:
            raise error
        done = method(*args, **keywords)
        if len(calls) == number:
            raise error
        return done

    monkeypatch.setattr(owner, name, call)


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
TOLD = r"memory ran out \(.*\): .*; the last checkpoint is .*step-2$"


@pytest.mark.parametrize(
    ("owner", "name", "error", "message"),
    [
        (Batches, "collect", KeyError("odd"), "odd"),
        (Batches, "collect", NO_MEMORY, TOLD),
        (Learner, "accumulate", KeyError("odd"), "odd"),
        (Learner, "accumulate", MemoryError("no room"), TOLD),
        (Learner, "accumulate", TrainingError("odd"), "^odd; step 2 is saved in .*step-2$"),
    ],
)
def test_what_was_learnt_is_saved_whatever_ends_a_step(
    go, small_config, letters, quiet, tmp_path, monkeypatch, owner, name, error, message
):
    settings = {"rewards": {"functions": [{"function": "letters", "normalise": "std"}]}, "training": {"steps": 4}}
    with monkeypatch.context() as patch:
        third_call(patch, owner, name, error)
        with pytest.raises((KeyError, TrainingError), match=message) as raised:
            go("run", **settings)
    if isinstance(error, KeyError):
        assert raised.value is error
        assert "step 2 is saved in" in error.__notes__.pop()
    train(small_config(**settings), rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True)
    assert same(repeatable(tmp_path / "run"), repeatable(go("whole", **settings).folder))


@pytest.mark.parametrize(
    ("name", "number", "error", "message"),
    [
        ("refresh", 3, KeyError("odd"), "odd"),
        ("refresh", 3, NO_MEMORY, TOLD.replace("step-2", "step-3")),
        ("metrics", 6, KeyError("odd"), "odd"),  # asked before and after each step
    ],
)
def test_a_step_is_saved_whatever_the_engine_raises_after_it(
    go, small_config, letters, quiet, tmp_path, monkeypatch, name, number, error, message
):
    settings = {"training": {"steps": 4}}
    with monkeypatch.context() as patch:
        third_call(patch, BuiltinEngine, name, error, number=number)
        with pytest.raises((KeyError, TrainingError), match=message) as raised:
            go("run", **settings)
    if isinstance(error, KeyError):
        assert raised.value is error
        assert "step 3 is saved in" in error.__notes__.pop()
    train(small_config(**settings), rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True)
    run, whole = repeatable(tmp_path / "run"), repeatable(go("whole", **settings).folder)
    assert same(run, whole)


def test_a_warm_start_is_not_lost_where_the_first_step_fails(go, small_config, letters, quiet, tmp_path, monkeypatch):
    settings = {"warm_start": {"steps": 2, "examples_per_step": 2}}
    with monkeypatch.context() as patch:
        third_call(patch, Learner, "accumulate", TrainingError("odd"), number=1)
        with pytest.raises(TrainingError, match=r"^odd; step 0 is saved in .*step-0$"):
            go("run", **settings)
    train(small_config(**settings), rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True)
    assert same(repeatable(tmp_path / "run"), repeatable(go("whole", **settings).folder))


def test_a_whole_final_model_is_all_that_a_failing_judgement_leaves(go, monkeypatch, tmp_path):
    third_call(monkeypatch, run_module, "evaluate_stage", KeyError("odd"), number=1)
    with pytest.raises(KeyError, match="odd") as raised:
        go("run")
    assert not getattr(raised.value, "__notes__", [])
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert (tmp_path / "run" / "final_model" / "model.safetensors").exists()


def test_a_callback_that_fails_loses_no_step(go, small_config, letters, quiet, tmp_path):
    def fails(report):
        if report.step == 2:
            raise KeyError("odd")

    settings = {"training": {"steps": 3}}
    with pytest.raises(KeyError, match="odd") as raised:
        go("run", on_step=fails, **settings)
    assert raised.value.__notes__ == [f"step 2 is saved in {tmp_path / 'run' / 'checkpoints' / 'step-2'}"]
    train(small_config(**settings), rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True)
    assert same(repeatable(tmp_path / "run"), repeatable(go("whole", **settings).folder))


@pytest.mark.parametrize(
    ("owner", "name"), [(JsonlTracker, "close"), (BuiltinEngine, "close"), (run_module.Run, "_tell_of_checkpoints")]
)
def test_an_interrupt_while_a_run_is_closed_lets_its_folder_go(
    go, small_config, letters, quiet, tmp_path, monkeypatch, owner, name
):
    """A notebook goes on in the same process, where the lock would be held for ever. What ended the run stays to be seen."""
    closed = []

    def fails(report):
        third_call(patch, owner, name, KeyboardInterrupt(), number=1)
        raise KeyError("odd")

    settings = {"training": {"steps": 2}, "output": {"checkpoint_every": 1}}
    with monkeypatch.context() as patch:
        patch.setattr(ConsoleTracker, "close", lambda console: closed.append(console))
        with pytest.raises(KeyboardInterrupt) as raised:
            go("run", on_step=fails, **settings)
    assert isinstance(raised.value.__context__, KeyError)
    assert len(closed) == 1, "the other tracker"
    train(small_config(**settings), rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True)
    assert len(metrics_of(tmp_path / "run")) == 2


def test_an_interrupt_where_no_run_could_begin_lets_its_folder_go(go, monkeypatch):
    def fails(*_):
        raise TrainingError("odd")

    with monkeypatch.context() as patch:
        patch.setattr(start_module, "_load_parts", fails)
        third_call(patch, JsonlTracker, "close", KeyboardInterrupt(), number=1)
        with pytest.raises(KeyboardInterrupt):
            go("run")
    go("run")


def test_weights_between_two_steps_are_not_saved_as_those_of_the_first(go, monkeypatch, tmp_path):
    third_call(monkeypatch, Learner, "step", KeyError("odd"), after=True)
    with pytest.raises(KeyError, match="odd") as raised:
        go("run", training={"steps": 4})
    assert not getattr(raised.value, "__notes__", [])
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def poison(monkeypatch, bad):
    """Make the gradient of the updates whose number (from 0) is in ``bad`` not a number."""
    made, loss = [0], run_module.Learner._backward

    def backward(self, micro_batch, first, scale):
        found = loss(self, micro_batch, first, scale)
        if made[0] in bad:
            self.optimizer.parameters[0].grad.fill_(float("nan"))
        made[0] += 1
        return found

    monkeypatch.setattr(run_module.Learner, "_backward", backward)


def test_five_updates_in_a_row_that_are_not_finite_stop_the_run(go, monkeypatch, tmp_path):
    poison(monkeypatch, bad=range(2, 100))
    with pytest.raises(TrainingError, match="not finite in 5 updates in a row") as caught:
        go(training={"steps": 20})
    assert caught.value.exit_code == 1
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["optimizer/dropped_updates"] for row in rows] == [0, 0, 1, 1, 1, 1, 1], "the seventh ended it"
    assert {row["step"] for row in lines_of(tmp_path / "run" / "completions.jsonl")} == {*range(1, 8)}
    assert "not-finite" in {finding.rule for finding in diagnose_run(read_run(tmp_path / "run"))}


def test_four_in_a_row_do_not(go, monkeypatch):
    poison(monkeypatch, bad={0, 1, 2, 3, 5, 6, 7, 8})
    rows = lines_of(go(training={"steps": 10}).folder / "metrics.jsonl")
    assert [row["optimizer/dropped_updates"] for row in rows] == [1, 1, 1, 1, 0, 1, 1, 1, 1, 0]


def test_a_checkpoint_is_written_where_an_update_was_made_before_one_that_was_not(go, monkeypatch):
    """The second update of step 2 is dropped, and those of steps 5 and 6, after which there is nothing new."""
    poison(monkeypatch, bad={3, 8, 9, 10, 11})
    output = {"checkpoint_every": 2, "keep_checkpoints": 9}
    folder = go(training={"steps": 7}, algorithm={"updates_per_batch": 2}, output=output).folder
    kept = {p.name: read_state(p) for p in (folder / "checkpoints").iterdir()}
    assert {name: (state["updates"], state["dropped_in_a_row"]) for name, state in kept.items()} == {
        "step-2": (3, 1),
        "step-4": (7, 0),
    }


def test_every_number_logged_is_documented_and_every_documented_one_is_logged(go, letters, tmp_path):
    """Over runs that between them use everything: a reference, several updates a batch, several rewards, both answer styles."""
    logged = set()
    plain = go("plain", model={"dtype": "float16"}, rollout={"ahead": 1}).folder  # whose loss is scaled
    full = go(
        "full",
        algorithm={"kl": {"beta": 0.1}, "updates_per_batch": 2},
        rewards={
            "functions": [
                {"function": "correctness"}, {"function": "format", "isolate": True},
                {"function": "letters", "weight": 2.0, "normalise": "std", "clip": [-3, 3]}, {"function": "steps"},
            ],
            "on_error": "skip",
        },
        prompt={"system": "xml"},
        functions={**letters, "steps": lambda completions: [StepRewards([0.5], [1], "tokens") for _ in completions]},
        rollout={"max_completion_tokens": 4},
        data={"limit": 8},
    ).folder  # fmt: skip
    beyond = go(
        "beyond",
        algorithm={
            "preset": "ppo", "value": {"critic": "copy"}, "kl": {"beta": 0.1, "target": 0.1}, "updates_per_batch": 2,
            "entropy": {"bonus": 1e-3, "top_share": 0.5}, "correction": {"level": "token"},
        },
        rollout={"refill_rounds": 1},
    ).folder  # fmt: skip
    ahead = go("ahead", rollout={"ahead": 1}).folder
    tools = go(
        "tools",
        rollout={"tools": ["calculator"]},
        model={"name": str(write_tiny_llama(tmp_path / "roomy", max_position_embeddings=1024))},
    ).folder
    for folder in (plain, full, beyond, ahead, tools):
        for row in lines_of(folder / "metrics.jsonl"):
            logged |= row.keys() - {"step", "time_s"}
    assert [name for name in sorted(logged) if describe_metric(name) is None] == []
    names = ("correctness", "format", "letters", "steps")
    # Those of reward models and of own losses need one, and are held in tests of their own.
    elsewhere = ("reward_model/", "loss/")
    families = {name for name in METRICS if name.endswith("<component>") and not name.startswith(elsewhere)}
    components = {family.replace("<component>", name) for family in families for name in names}
    assert {family for family in families if not any(family.replace("<component>", name) in logged for name in names)} == set()
    assert {f"reward/{name}" for name in names} <= logged
    of_vllm = {"completions/prompt_cached", "policy/push_probe", "time/push_s"}  # test_vllm_run holds them
    by_update = {name: [name.replace("<k>", str(k)) for k in (1, 2)] for name in METRICS if name.endswith("<k>")}
    assert by_update
    plain_names = {name for name in METRICS if not name.endswith(">")}
    assert logged - components == plain_names.union(*by_update.values()) - of_vllm


def rarely(completions, **columns):
    """Varies within few groups: 1 for a completion of only ASCII characters that begins with a letter."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(text[:1].isascii() and text[:1].isalpha()) for text in texts]


def test_groups_without_variance_are_refilled_a_bounded_number_of_times(go, small_config):
    seen: dict[int, list] = {}
    for rounds in (0, 1, 3):
        seen[rounds] = []
        go(
            f"rounds-{rounds}",
            rewards={"functions": [{"function": "rarely"}]},
            functions={"rarely": rarely},
            rollout={"refill_rounds": rounds, "prompts_per_step": 5, "completions_per_prompt": 2},
            on_step=seen[rounds].append,
            training={"steps": 4},
        )
    informative = {rounds: sum(g.has_variance for r in reports for g in r.groups) for rounds, reports in seen.items()}
    assert informative[0] < informative[1] <= informative[3]
    assert all(len(r.groups) == 5 for reports in seen.values() for r in reports), "the batch keeps its size"
    assert "groups/sampled" not in seen[0][0].metrics
    for rounds in (1, 3):
        for report in seen[rounds]:
            sampled = report.metrics["groups/sampled"]
            lacking = sum(not g.has_variance for g in report.groups)
            assert 5 <= sampled <= 5 * (1 + rounds)
            assert lacking == 0 or sampled > 5
            assert report.metrics["groups/zero_variance"] >= lacking / 5 - 1e-9, "of all that were sampled"
    again = []
    go(
        "again", rewards={"functions": [{"function": "rarely"}]}, functions={"rarely": rarely}, on_step=again.append,
        rollout={"refill_rounds": 3, "prompts_per_step": 5, "completions_per_prompt": 2}, training={"steps": 4},
    )  # fmt: skip
    texts = [[[c.text for g in r.groups for c in g.completions] for r in reports] for reports in (again, seen[3])]
    assert texts[0] == texts[1]


def test_the_reported_numbers_are_those_of_the_groups(go):
    seen = []
    go(on_step=seen.append, rollout={"prompts_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 6})
    for report in seen:
        completions = [c for g in report.groups for c in g.completions]
        rewards = [r for g in report.groups for r in g.rewards]
        m = report.metrics
        assert m["reward/mean"] == pytest.approx(sum(rewards) / 12)
        stds = [torch.tensor(g.rewards, dtype=torch.float64).std().item() for g in report.groups]
        assert m["reward/std"] == pytest.approx(sum(stds) / 3)
        assert m["completions/tokens_mean"] == sum(len(c.token_ids) for c in completions) / 12
        assert m["completions/tokens_max"] == max(len(c.token_ids) for c in completions)
        assert m["completions/stop_rate"] + m["completions/truncated"] == 1
        assert m["completions/truncated"] == sum(c.finish_reason == "length" for c in completions) / 12
        assert m["policy/sampler_mismatch"] < 1e-5, "fp32: the sampler and the trainer are one"
        assert m["policy/ratio_deviation"] == 0
        logprobs = [x for c in completions for x in c.logprobs]
        assert m["policy/entropy"] == pytest.approx(-sum(logprobs) / len(logprobs), abs=1e-4)
    assert [r.metrics["progress/epoch"] for r in seen] == [3 / 18, 6 / 18]
    assert [r.metrics["progress/policy_version"] for r in seen] == [1, 2]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_runs(go, preset):
    rows = lines_of(go(algorithm={"preset": preset, "kl": PRESETS[preset].values["kl"]}).folder / "metrics.jsonl")
    assert rows[-1]["progress/policy_version"] == 2
    assert rows[-1]["optimizer/grad_norm"] > 0
    assert all(value is not None for row in rows for value in row.values())


@pytest.mark.parametrize("engine", ["builtin", "transformers"])
def test_either_engine_trains_and_they_agree_on_the_numbers(go, engine):
    rows = lines_of(
        go(rollout={"prompts_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 8, "engine": engine}).folder
        / "metrics.jsonl"
    )
    assert max(row["policy/sampler_mismatch"] for row in rows) < 1e-5
    assert rows[-1]["progress/policy_version"] == 2


def test_bf16_with_gradient_checkpointing_trains(go, small_config, tiny_folder):
    model = {"dtype": "bfloat16", "gradient_checkpointing": True}
    result = go(model={"name": str(tiny_folder), "device": "cpu", **model})
    rows = lines_of(result.folder / "metrics.jsonl")
    assert rows[-1]["progress/policy_version"] == 2
    assert rows[0]["policy/sampler_mismatch"] < 0.05, "rounding of bf16 and no more"
    assert load_file(result.folder / "final_model" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_zero_steps_judge_and_save_the_model_as_it_is(go, tiny_folder):
    result = go(training={"steps": 0})
    final, base = (load_file(f / "model.safetensors") for f in (result.folder / "final_model", tiny_folder))
    assert all(torch.equal(final[name], base[name]) for name in base)
    assert [row["stage"] for row in result.summary["evaluations"]] == ["final"]


@pytest.mark.parametrize("engine", ["builtin", "transformers"])
def test_a_problem_that_comes_up_twice_in_a_step_gets_other_completions(go, tmp_path, engine):
    """Two problems, three prompts a step: one comes twice, and every completion is of its own draw, and recorded."""
    data = tmp_path / "two.jsonl"
    data.write_text("".join(json.dumps({"question": f"{a} + 1 = ?", "answer": str(a + 1)}) + "\n" for a in range(2)))
    seen = []
    folder = go(
        data={"source": str(data), "holdout": 0}, rollout={"engine": engine}, training={"steps": 1}, on_step=seen.append
    ).folder
    groups = seen[0].groups
    ids = [group.prompt.problem.id for group in groups]
    assert sorted(map(ids.count, set(ids))) == [1, 2]
    drawn = [completion.token_ids for group in groups for completion in group.completions]
    assert len(set(drawn)) == len(drawn) == 12
    record = read_run(folder)
    assert len(record.completions) == 12
    assert [len(rows) for rows in groups_of(record.completions)] == [4, 4, 4]


def test_a_resumed_run_took_the_time_of_both_its_parts(small_config, letters, quiet, tmp_path):
    config, folder = small_config(training={"steps": 3}, output={"checkpoint_every": 1}), tmp_path / "run"

    def fail(report):
        if report.step == 2:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        train(config, rewards=letters, console=quiet, run_folder=folder, on_step=fail)
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) | {"time_s": 5000.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(config, rewards=letters, console=quiet, run_folder=folder, resume=True)
    assert json.loads((folder / "summary.json").read_text())["seconds"] > 5000
    times = [json.loads(line)["time_s"] for line in metrics.read_text().splitlines()]
    assert times == sorted(times)
