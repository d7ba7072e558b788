"""The benchmarks' own arithmetic: counted work, forced lengths, fitted exponents, and workers that die."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import common, floor, gpu, learning, learning_worker, sampling, step
from benchmarks.flops import forward_flops, learning_flops
from benchmarks.generate_worker import generate_forced
from benchmarks.learning import difference, reached
from benchmarks.memory import beyond_bounds
from benchmarks.scaling import _growth, _learn_plainly
from benchmarks.shapes import llama_shape, random_groups, random_policy, random_prompts
from benchmarks.vllm_rollouts import measure as rollouts
from benchmarks.workers import REST_S, Worker, WorkerDied
from benchmarks.workload import even_tokens, problems, step_config
from experiments import runs
from experiments.common import read_block, read_numbers
from groupwise.config import load_config
from groupwise.config.schema import LoraConfig
from groupwise.models.adapters import attach, peft_config_of
from groupwise.models.decoder import Decoder, MergedDecoder
from groupwise.models.module_scorer import ModuleScorer


def test_work_of_one_sequence_is_what_pytorch_counts(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(attn_implementation="eager")
    config, prompt, completion = model.config, 7, 5
    rows = prompt + completion - 1  # the last token is predicted, never fed
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = model.model(torch.zeros(1, rows, dtype=torch.long)).last_hidden_state
        model.lm_head(hidden[:, -completion:])
    pair = 4 * config.num_hidden_layers * config.hidden_size  # eager attention computes the whole square
    angles = 2 * rows * config.hidden_size // config.num_attention_heads // 2  # positions times frequencies: not counted by us
    expected = counter.get_total_flops() - angles - pair * rows * rows + pair * rows * (rows + 1) / 2
    assert forward_flops(config, [(prompt, [completion])]) == expected


def test_a_group_pays_for_its_prompt_once(tiny_llama: Callable[..., Any]) -> None:
    config = tiny_llama().config
    alone = forward_flops(config, [(50, [1])])
    head = 2 * config.hidden_size * config.vocab_size
    assert forward_flops(config, [(50, [1, 1, 1])]) == alone + 2 * head
    assert learning_flops(config, [(50, [1])]) == 3 * alone


def test_the_floor_has_the_products_that_a_step_makes(tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a second: two products and three of a projection that learns, and one for the gradients of each adapter."""

    def one_second(call: Callable[[], object]) -> float:
        call()
        return 1.0

    def learning_s(decoder: Decoder) -> float:
        return floor.floor_seconds(decoder, [4, 5], [[2, 3], [1, 4]], common=2)["forward_backward"]

    monkeypatch.setattr(floor, "_time", one_second)
    model = tiny_llama()
    layers = model.config.num_hidden_layers
    adapted = attach(model, peft_config_of(LoraConfig(rank=4)))
    assert learning_s(MergedDecoder(adapted)) == layers * (4 * 2 + 7) + 2  # beside it the head is frozen too
    assert learning_s(Decoder(tiny_llama())) == layers * 4 * 3 + 3


def test_products_are_held_against_the_step_that_has_them() -> None:
    """Steps on natural lengths differ: the products of one step over another's seconds would say nothing."""

    class Products:
        def ask(self, prompt_lengths: list[int], lengths: list[list[int]]) -> dict[str, float]:
            return {"sampling": 0.5 * lengths[0][0]}

    steps = [
        {
            "total": float(tokens),
            "phases": {"sampling": 0.8 * tokens, "rest": 0.2 * tokens},
            "prompt_lengths": [3],
            "lengths": [[tokens]],
        }
        for tokens in (10, 100, 12)
    ]
    found = step._floor(cast(Worker, Products()), steps)
    assert (found["step_s"], found["share"], found["shares"]) == (6.0, 0.5, {"sampling": pytest.approx(0.625)})


def test_generate_stops_each_sequence_where_told(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(pad_token_id=2)
    ends = list(range(2, 60))  # half of what it would like to say would end it
    _, lengths = generate_forced(model, [[1, 3, 4], [1]], [[4, 1, 7], [2, 7, 3]], ends)
    assert lengths == [4, 1, 7, 2, 7, 3]


def test_growth_against_work() -> None:
    x = (1, 10, 100)
    found = _growth(x, [(2.0 * v**1.5, 3.0 * v) for v in x])
    assert found["time_exponent"] == pytest.approx(1.5)
    assert found["work_exponent"] == pytest.approx(1.0)
    assert found["work_over_time"] == pytest.approx(100 / 1000)


def test_a_worker_that_dies_says_why() -> None:
    with pytest.raises(WorkerDied, match=r"No module named benchmarks\.nothing"):
        Worker("benchmarks.nothing", {}, threads=1)


def test_a_result_names_the_code_that_was_there_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"rev-parse": "abc1234", "status": ""}
    monkeypatch.setattr(common, "git", lambda folder, command, *_: said[command])

    def measure() -> common.Result:
        said["rev-parse"] = "def5678"
        return common.Result("name", None, None, None, "s", {}, {})

    assert common.finish(measure, None).versions["commit"] == "abc1234"
    said["status"] = " M src/groupwise/rollout.py"
    assert common.finish(measure, None).versions["commit"] == "def5678-dirty"


def test_sequences_that_are_no_whole_groups_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_start", lambda *_: {})
    monkeypatch.setattr(sampling, "_measure", lambda *_: {"ours": 1.0})
    assert sampling.run(sampling.options().parse_args(["--model", "x", "--sequences", "3", "8", "32"])).ours == 1.0
    with pytest.raises(SystemExit, match="--sequences 12 is no whole number of groups of 8"):
        sampling.run(sampling.options().parse_args(["--model", "x", "--sequences", "8", "12"]))


def test_the_record_has_the_micro_batch_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class StandIn:
        def __init__(self, module: str, settings: dict[str, Any], **_: Any) -> None:
            pass

        __enter__ = __exit__ = lambda self, *_: self

        def ask(self) -> dict[str, Any]:
            return {"seconds": 2.0, "tokens": 4, "peak_memory": 0, "flops": 1e12, "forward_backward_s": 1.0}

    monkeypatch.setattr(gpu, "Worker", StandIn)
    found = gpu._measure(gpu.options().parse_args(["--micro-batch-tokens", "99"]), "tiny", "learning", None)
    assert (found["micro_batch_tokens"], found["precision"]) == (99, "masters")


def test_workload() -> None:
    eight = problems(8)
    assert len({p.question for p in eight}) == len({p.id for p in eight}) == 8
    assert even_tokens([[2, 4, 5, 7], [1]], prompts=[]) == [0.5, 0.0]
    config = step_config("")
    assert config.completions_per_step == 32
    assert (config.algorithm.beta, config.algorithm.updates_per_batch, config.rollout.max_completion_tokens) == (0.04, 1, 128)
    changed = step_config("", ours=["training.micro_batch_tokens=1024"])
    assert changed.training.micro_batch_tokens == 1024
    assert changed.completions_per_step == 32


def test_rollouts_are_taken_by_turns_with_a_rest_and_shorter_ones_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("benchmarks.vllm_rollouts.time.sleep", lambda seconds: calls.append(("rest", seconds)))

    class Sampler:
        def __init__(self, name: str, tokens: int) -> None:
            self.name, self.tokens = name, tokens

        def sample(self, prompts: Any, samples: int, settings: Any, *, seed: int, scope: str) -> Any:
            calls.append((self.name, seed))
            return [(SimpleNamespace(token_ids=range(self.tokens)),) * samples] * len(prompts)

        def refresh(self, version: int) -> None:
            calls.append((self.name, "push"))

    found = rollouts({"a": Sampler("a", 5), "b": Sampler("b", 5)}, [None, None], 5, 2)  # type: ignore[dict-item, list-item]
    turn = (("b", "push"), ("rest", REST_S))  # the last one's worker goes on polling after its answer
    assert calls == [call for seed in (0, 1, 2) for call in (("a", seed), ("b", seed), *turn)]
    assert {name: len(values) for name, values in found.items()} == {"a": 2, "b": 2, "push": 2}
    with pytest.raises(AssertionError, match="b sampled other lengths"):
        rollouts({"a": Sampler("a", 5), "b": Sampler("b", 4)}, [None], 5, 1)  # type: ignore[dict-item, list-item]


def test_a_soak_that_grows_and_a_plan_that_is_off_are_said() -> None:
    steady, growing = [100] * 60, [100] * 30 + [104] * 30
    fine = {"a": {"ratio": 1.07, "step_bytes": steady}, "b": {"ratio": 0.9, "step_bytes": [103, *steady]}}
    assert beyond_bounds(fine, soak=True) == []
    assert beyond_bounds({"a": {"ratio": 1.0, "step_bytes": growing}}, soak=False) == []
    (said,) = beyond_bounds({"a": {"ratio": 1.0, "step_bytes": growing}}, soak=True)
    assert "1.04 times" in said
    for ratio in (0.89, 1.11):
        (said,) = beyond_bounds({"a": {"ratio": ratio, "step_bytes": steady}}, soak=True)
        assert f"a: measured / planned is {ratio}" in said


def test_a_level_is_reached_on_the_line_between_two_judged_policies() -> None:
    rows = [
        {"seconds": 0.0, "sampled_tokens": 0.0, "accuracy": 0.5},
        {"seconds": 10.0, "sampled_tokens": 300.0, "accuracy": 0.7},
        {"seconds": 30.0, "sampled_tokens": 900.0, "accuracy": 0.6},
        {"seconds": 40.0, "sampled_tokens": 1200.0, "accuracy": 0.8},
    ]
    assert reached(rows, 0.6) == pytest.approx(5.0)
    assert reached(rows, 0.6, "sampled_tokens") == pytest.approx(150.0)
    assert reached(rows, 0.75) == pytest.approx(37.5)
    assert reached(rows, 0.4) == 0.0
    assert reached(rows, 0.9) is None


def test_the_difference_of_two_accuracies_is_over_all_problems_of_all_seeds() -> None:
    # 140 of 200 against 120 of 200, whose Wilson intervals are 0.6333 to 0.7592 and 0.5308 to 0.6653.
    mean, low, high = difference([0.8, 0.6], [0.5, 0.7], problems=100)
    assert mean == pytest.approx(0.1)
    assert low == pytest.approx(0.1 - math.hypot(0.7 - 0.6333, 0.6653 - 0.6), abs=2e-4)
    assert high == pytest.approx(0.1 + math.hypot(0.7592 - 0.7, 0.6 - 0.5308), abs=2e-4)


def test_the_table_of_learning_has_a_ratio_only_where_both_sides_reach_the_level() -> None:
    row = {"step": 0, "seconds": 0.0, "sampled_tokens": 0.0, "accuracy": 0.25, "stopped": 0.9}
    ends = {"groupwise": ((100.0, 0.75), (200.0, 0.75)), "trl": ((600.0, 0.75), (600.0, 0.65))}
    runs = {
        side: {
            str(seed): {
                "rows": [row, {**row, "seconds": seconds, "sampled_tokens": 5000.0, "accuracy": accuracy}],
                "peak_memory_gib": 3.0 + seed,
            }
            for seed, (seconds, accuracy) in enumerate(pairs)
        }
        for side, pairs in ends.items()
    }
    args = learning.options().parse_args(["--seeds", "0", "1", "--steps", "6", "--problems", "100"])
    result = learning._result(args, {side: {int(seed): one for seed, one in seeds.items()} for side, seeds in runs.items()})
    numbers = json.loads(json.dumps(asdict(result))) | {
        "versions": {"commit": "abc1234", "torch": "2", "transformers": "5", "trl": "1"},
        "machine": {"cpu": "a processor", "cores": 2},
        "date": "2026-11-23T00:00:00",
    }
    assert "work" not in numbers["settings"]  # a folder of one machine has no place on a page
    text = learning.report(learning.joined([numbers]))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[2] == "| 60% | 70, 140 | 420, 525 | 4.88 (3.75 to 6.00) | 3,500, 3,500 | 3,500, 4,375 | 1.12 (1.00 to 1.25) |"
    assert rows[4] == "| 75% | 100, 200 | 600, - | - | 5,000, 5,000 | 5,000, - | - |"
    assert "| groupwise | 75.0%, 75.0% | 90.0%, 90.0% | 100, 200 | 5,000, 5,000 | 4.0 |" in rows
    assert "(seeds 0, 1; before training 25.0%, 25.0%)" in text
    assert "| after the last step, over problems | +5.0 (-3.7 to +13.6) |" in rows  # 150 of 200 less 140
    assert "| after the last step, over seeds | +5.0 (-58.5 to +68.5) |" in rows  # 0 and 10 points, t of one degree of freedom
    assert "Seeds 0, 1: 2026-11-23, revision abc1234" in text

    for one in numbers["details"]["runs"]["trl"].values():  # weights in float32: as such they have a column
        one["rows"][-1]["float32"] = 0.5
    text = learning.report(learning.joined([numbers]))
    assert "| trl | 75.0%, 65.0% | 50.0%, 50.0% | 90.0%, 90.0% | 600, 600 | 5,000, 5,000 | 4.0 |" in text
    assert "| groupwise | 75.0%, 75.0% | -, - | 90.0%, 90.0% |" in text

    numbers["machine"]["gpu"] = "a card"
    assert "a processor, 2 cores, a card, torch 2" in learning.report(learning.joined([numbers]))


def test_both_libraries_get_rewards_with_their_arguments_under_their_names() -> None:
    right, bare = "<reasoning>2 + 2</reasoning>\n<answer>4</answer>", "<answer>4</answer>"
    for arguments, points in (({}, [1.0, 1.0]), ({"in_format": True}, [1.0, 0.0])):
        reward = learning_worker._reward("accuracy", arguments)
        assert reward([right, bare], answer=["4", "4"]) == points
        assert reward.__name__ == "accuracy"


PLACE = {
    "versions": {"commit": "abc1234", "torch": "2", "transformers": "5", "trl": "1"},
    "machine": {"cpu": "a processor", "cores": 2},
    "date": "2026-11-23T01:02:03",
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Any, bool]]:
    """What ``learning`` judges and trains, in stand-ins, from one warm start in ``tmp_path``, by what ``PLACE`` says."""
    asked: list[tuple[str, Any, bool]] = []

    def strict(policy: Path, config: Any) -> dict[str, float]:
        asked.append((policy.parent.name, config.model.dtype, False))
        return {"accuracy": 0.5, "stopped": 1.0}

    def ran(words: list[str], **_: Any) -> Any:
        settings = json.loads(Path(words[-1]).read_text(encoding="utf-8"))
        asked.append((settings["library"], settings["arguments"].get("rollout_quantization"), settings["arguments"]["bf16"]))
        row = {"step": 2, "seconds": 10.0, "sampled_tokens": 5.0}
        found = {"rows": [row], "peak_memory_gib": 1.0}
        (Path(settings["folder"]) / "found.json").write_text(json.dumps(found), encoding="utf-8")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(learning, "warm_starts", lambda seeds, *_: dict.fromkeys(seeds, tmp_path))
    monkeypatch.setattr(learning, "_strict", strict)
    monkeypatch.setattr(learning, "_in_float32", lambda policy: False)
    monkeypatch.setattr(learning.subprocess, "run", ran)
    monkeypatch.setattr(learning, "described", lambda: PLACE)
    return asked


def learn(tmp_path: Path, *given: str, settings: Sequence[str] = ()) -> common.Result:
    words = ["optimizer.schedule=constant", *settings, "--steps", "2", "--work", str(tmp_path / "work"), "--threads", "1", *given]
    return learning.run(learning.options().parse_args(words))


def test_finished_runs_are_made_again_only_where_start_or_judging_is_another(asked: Any, tmp_path: Path) -> None:
    once = ["groupwise.trl", "groupwise-0", "trl", "trl-0"]
    for given, settings, expected in (
        (["10"], [], [tmp_path.parent.name, *once]),
        (["10", "--levels", "0.5"], [], []),
        (["20"], [], once),
        (["20", "--trl", "evaluation.temperature=0.5"], [], once[2:]),
        (["20"], ["warm_start.steps=7"], once),
    ):
        asked.clear()
        learn(tmp_path, "--seeds", "0", "--problems", *given, settings=settings)
        assert [name for name, *_ in asked] == expected, (given, settings)


def test_even_seeds_begin_with_groupwise_and_odd_ones_with_trl_whatever_else_is_run(asked: Any, tmp_path: Path) -> None:
    learn(tmp_path, "--seeds", "1")
    assert [name for name, *_ in asked][1:] == ["trl", "trl-1", "groupwise.trl", "groupwise-1"]


def test_each_run_stands_on_the_page_with_what_it_was_made_with(
    asked: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    learn(tmp_path, "--seeds", "0", "--sides", "groupwise")
    later = {**PLACE, "versions": PLACE["versions"] | {"commit": "def5678"}, "date": "2026-11-25T00:00:00"}
    monkeypatch.setattr(learning, "described", lambda: later)
    result = json.loads(json.dumps(asdict(learn(tmp_path, "--seeds", "0", "1", "2"))))
    measured = learning.joined([result])["measured"]
    assert [(one["seeds"], one.get("side"), one["versions"]["commit"], one["date"]) for one in measured] == [
        ([0], "groupwise", "abc1234", "2026-11-23"),
        ([0], "trl", "def5678", "2026-11-25"),
        ([1, 2], None, "def5678", "2026-11-25"),
    ]
    text = learning.report(learning.joined([result]))
    assert "Seed 0, groupwise: 2026-11-23, revision abc1234, a processor, 2 cores" in text
    assert "Seeds 1, 2: 2026-11-25, revision def5678" in text


def test_a_warm_start_is_that_of_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[runs.Job] = []
    monkeypatch.setattr(runs, "carry_out_all", lambda waiting, jobs: seen.extend(waiting) or ["no"])
    task = ["data.source=arithmetic", "data.eval_split=null", "optimizer.warmup_steps=0", "warm_start.steps=2"]
    with pytest.raises(SystemExit, match="no failed"):
        learn(tmp_path, "--seeds", "0", "--recipe", "gsm8k-1.5b-cpu", settings=task)
    assert [job.recipe for job in seen] == ["gsm8k-1.5b-cpu"]


@pytest.mark.parametrize("recipe", ["quickstart-tools", "quickstart-game"])
def test_episodes_are_refused_since_trl_is_not_given_them(recipe: str) -> None:
    with pytest.raises(SystemExit, match="choose a recipe without"):
        learning._arguments("trl", load_config(recipe), 8, 0)


def test_settings_of_one_side_alone_reach_its_training_and_judging_and_stand_on_the_page(asked: Any, tmp_path: Path) -> None:
    given = ["--seeds", "0", "--steps", "2", "--problems", "10", "--work", str(tmp_path / "work"), "--trl", "model.dtype=float32"]
    given += ["--ours", "rollout.quantization=8bit"]
    args = learning.options().parse_args([*given, "--threads", "1", "model.dtype=bfloat16", "optimizer.schedule=constant"])
    result = learning.run(args)
    assert asked == [
        (tmp_path.parent.name, "bfloat16", False),  # the warm start, once for both
        ("groupwise.trl", "8bit", True), ("groupwise-0", "bfloat16", False), ("trl", None, False), ("trl-0", "float32", False),
    ]  # fmt: skip
    numbers = json.loads(json.dumps(asdict(result))) | {"measured": []}
    arguments = json.loads((tmp_path / "work" / "groupwise-0" / "settings.json").read_text(encoding="utf-8"))["arguments"]
    assert (arguments["vllm_importance_sampling_mode"], arguments["vllm_importance_sampling_clip_max"]) == ("token_truncate", 2.0)
    alone = learning._config(args, "rollout.quantization=8bit", "algorithm.correction=null")
    assert learning._arguments("groupwise", alone, 8, 0)["vllm_importance_sampling_correction"] is False
    assert "TRL alone was given `model.dtype=float32`." in learning.report(numbers)
    assert "Groupwise alone was given `rollout.quantization=8bit`." in learning.report(numbers)
    assert "alone was given" not in learning.report(read_numbers("learning"))
    with pytest.raises(SystemExit, match=r"give rollout\.quantization to --ours"):
        learning.run(
            learning.options().parse_args(
                [*given[:-4], "--threads", "1", "rollout.quantization=8bit", "optimizer.schedule=constant"]
            )
        )


def test_results_of_other_seeds_are_joined_and_others_are_refused() -> None:
    numbers = read_numbers("learning")
    seeds = numbers["settings"]["seeds"]

    def part(chosen: list[int]) -> dict[str, Any]:
        runs = {side: {str(seed): of[str(seed)] for seed in chosen} for side, of in numbers["details"]["runs"].items()}
        return {"settings": numbers["settings"] | {"seeds": chosen}, "details": {"runs": runs}, "date": str(chosen)}

    parts = [part(seeds[:1]), part(seeds[1:])]
    whole = learning.joined(parts)
    assert json.loads(json.dumps(whole["details"])) == numbers["details"]
    assert [one["seeds"] for one in whole["measured"]] == [seeds[:1], seeds[1:]]
    with pytest.raises(SystemExit, match=f"two files have seed {seeds[0]}"):
        learning.joined([parts[0], *parts])
    with pytest.raises(SystemExit, match="differ in their settings"):
        learning.joined([parts[0], parts[1] | {"settings": parts[1]["settings"] | {"steps": 1}}])
    with pytest.raises(SystemExit, match="one library alone"):
        learning.joined([{"settings": {"seeds": [0]}, "details": {"runs": {"trl": {}}}}])


def test_trls_runs_with_other_settings_stand_beside_those_of_groupwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def numbers(seconds: float, *settings: str, **other: Any) -> dict[str, Any]:
        rows = [{"accuracy": x, "seconds": s, "sampled_tokens": s, "stopped": 1.0} for x, s in ((0.5, 0.0), (0.7, seconds))]
        runs = {side: {"0": {"rows": rows, "peak_memory_gib": 1.0}} for side in ("groupwise", "trl")}
        known = {"recipe": "quickstart", "problems": 10, "seeds": [0], "steps": 3, "levels": [0.6, 0.8], "settings": [*settings]}
        return {"settings": known | other, "measured": [], "details": learning.details_of(runs, 10, [0.6, 0.8])}

    ours, theirs = numbers(40.0, "a=1"), numbers(200.0, "a=1", "model.dtype=float32", steps=5)
    text = learning.report(learning.against(ours, theirs))
    assert "against 5 steps of TRL with `model.dtype=float32` (before training 50.0%)" in text
    table = text.split("against 5 steps of TRL")[1]
    assert "| 60% | 20 | 100 | 5.00 |" in table
    assert "| 80% | - | - | - |" in table
    assert "against 5 steps" not in learning.report(ours)
    kept = json.loads(json.dumps(learning.against(learning.joined([ours]), theirs)))
    assert learning.report(learning.joined([kept])) == learning.report(kept), "a file made with --against is shown as it is"
    with pytest.raises(SystemExit, match=r"--against: seeds \[1\], but \[0\]"):
        learning.against(ours, theirs | {"settings": theirs["settings"] | {"seeds": [1]}})
    with pytest.raises(SystemExit, match="no setting that those of --show lack"):
        learning.against(ours, numbers(200.0, "a=1"))
    monkeypatch.setattr("sys.argv", ["learning", "--against", "float32.json"])
    with pytest.raises(SystemExit):
        learning.main()
    assert "give the files of both" in capsys.readouterr().err


def test_the_interval_over_seeds_is_students() -> None:
    # three differences with mean 2 and standard deviation 1: 4.303 / sqrt(3) = 2.484
    assert learning.over_seeds([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.0 - 2.4843, 2.0 + 2.4843), abs=1e-3)


def test_the_figure_of_learning_has_a_line_for_every_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"step": i, "seconds": 60.0 * i, "sampled_tokens": 1e3 * i, "accuracy": i / 4} for i in range(4)]
    runs = {side: {str(seed): {"rows": rows} for seed in range(3)} for side in ("groupwise", "trl")}
    learning.draw({"details": {"runs": runs}}, tmp_path / "found.svg")
    text = (tmp_path / "found.svg").read_text()
    assert all(word in text for word in ("groupwise, 3 seeds", "trl, 3 seeds", "minutes of training", "thousand sampled tokens"))


@pytest.mark.parametrize(
    "name",
    [
        "learning",
        "learning-each-its-best",
        "learning-amx",
        "learning-float32",
        "learning-avx2",
        "learning-avx2-8bit",
        "learning-gsm8k-1.5b-cpu",
    ],
)
def test_the_results_page_shows_what_was_measured_against_trl(name: str) -> None:
    numbers = read_numbers(name)
    assert read_block(learning.EXPERIMENT.page, name) == learning.report(numbers)
    assert numbers["details"]["runs"].keys() == {"groupwise", "trl"}


def test_the_plain_loop_beside_growth_has_the_gradient_that_it_says() -> None:
    """- mean_i A_i mean_t log p_it, A_i being 1 or -1, however many rows it takes at once."""
    model = random_policy(llama_shape(64, 2, 96), "cpu", torch.float32).model
    groups = random_groups(random_prompts(2, 5, 96), 3, 4, 4, 96)
    scorer, found = ModuleScorer(model), {}
    optimizer: Any = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    for rows in (6, 4, 1):
        model.zero_grad()
        _learn_plainly(model, optimizer, groups, tokens_at_once=9 * rows)
        found[rows] = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for group in groups:
        for one, reward in zip(group.completions, group.rewards, strict=True):
            logprobs_T = scorer.logprobs(scorer.prepare([(group.prompt.token_ids, [one.token_ids])]))
            (-(2 * reward - 1) * logprobs_T.mean() / 6).backward()
    for gradients in found.values():
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-7)
