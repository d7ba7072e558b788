"""Every benchmark from its command line, on a tiny model: both sides run, and the last line is the JSON that was promised."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import episodes, gpu, gpu_worker, learning, rounding, sampling, scaling, step, trl_gpu_worker
from benchmarks.gpu_worker import ROLES, prepare
from benchmarks.workers import Worker, WorkerDied
from groupwise import threads
from groupwise.config.schema import ModelConfig
from groupwise.engines.builtin.decode import why_not_in_8_bits
from groupwise.models.decoder import Decoder
from groupwise.models.devices import computes_bf16
from groupwise.models.load import load_policy
from groupwise.models.module_scorer import ModuleScorer
from tests.warm import python

KEYS = {"name", "ratio", "ours", "theirs", "unit", "versions"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """``run(module, arguments ...)``: its JSON line, which the output file must repeat."""

    monkeypatch.setitem(Worker.__init__.__kwdefaults__, "python", python())  # how long they import is not measured

    def call(module: Any, *arguments: str) -> dict[str, Any]:
        output = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--threads", "1", "--output", str(output)])
        module.main()
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result == json.loads(output.read_text())
        assert result.keys() >= KEYS
        assert result["versions"].keys() >= {"groupwise", "torch", "transformers"}
        return result

    return call


@pytest.mark.slow
def test_step(run: Any, tiny_folder: Path) -> None:
    with_trl = importlib.util.find_spec("trl") is not None
    size = ["--groups", "2", "--completions", "2", "--max-tokens", "6", "--pairs", "2"]
    result = run(step, "--model", str(tiny_folder), *size)
    forced = result["details"]["forced"]
    assert len(forced["ours"]["all_s"]) == 2
    phases = forced["ours"]["phases_s"]
    assert all(phases[phase] > 0 for phase in ("sampling", "reference", "forward_backward", "optimiser"))
    assert sum(phases.values()) == pytest.approx(forced["ours"]["step_s"], rel=0.3)
    assert (result["ratio"] is not None) == with_trl
    if with_trl:
        theirs = forced["trl"]
        assert theirs["mean_completion_tokens"] == forced["ours"]["mean_completion_tokens"]
        assert all(theirs["phases_s"][phase] > 0 for phase in ("sampling", "reference", "forward_backward", "optimiser"))
        assert result["ratio"] == pytest.approx(theirs["step_s"] / forced["ours"]["step_s"], rel=1e-3)


def test_rounding_is_none_in_float32_and_some_in_bfloat16(tiny_folder: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    groups = [([5, 6, 7], [[8, 9, 10], [11, 2]], torch.tensor([1.0, -1.0])), ([5, 4], [[3, 3], [9]], torch.tensor([-0.5, 0.5]))]
    logprobs, gradients = (
        {"fp32": rounding.backward(ModuleScorer(module), groups, nullcontext())},
        {"fp32": rounding.in_layout(module)},
    )
    for side, dtype in (("groupwise", torch.float32), ("rounded", torch.bfloat16)):
        decoder = Decoder(AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=dtype))
        logprobs[side] = rounding.backward(decoder, groups, nullcontext())
        gradients[side] = {name: p.grad.double() for name, p in decoder.named_parameters() if p.grad is not None}
    same, rounded = (rounding.compared(side, logprobs, gradients) for side in ("groupwise", "rounded"))
    assert same["gradient_error"] < 1e-5
    assert abs(same["logprob_mean_difference"]) < 1e-5
    assert same["cosine"] == pytest.approx(1)
    assert 1e-3 < rounded["gradient_error"] < 0.3
    assert rounded["kl_per_token"] > same["kl_per_token"]


def test_rounding_rewards_as_the_other_runs_do_and_with_arguments(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def reward(name: str) -> Any:
        return lambda completions, answer, **more: asked.append((name, more)) or range(len(completions))

    names = ("correctness", "format", "accuracy")
    monkeypatch.setattr(rounding, "functions", SimpleNamespace(**{name: reward(name) for name in names}))
    args = rounding.options().parse_args(["--problems", "1", "--completions", "2", "--max-tokens", "2"])
    policy = load_policy(ModelConfig(name=str(tiny_folder)))
    rounding._sampled(policy.model, policy, args)
    assert asked == [("correctness", {}), ("format", {})]
    monkeypatch.setattr(rounding, "settings_of", lambda recipe: ())
    rounding._sampled(policy.model, policy, args)
    assert asked[2:] == [("accuracy", {"in_format": True})]


ADAPTER = [
    "data.source=arithmetic", "data.eval_split=null", "optimizer.schedule=constant", "optimizer.warmup_steps=0",
    "evaluation.modes=[greedy]", "rollout.prompts_per_step=8", "rewards.functions=[{function: accuracy, arguments: {in_format: true}}]",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"), [("quickstart", []), ("gsm8k-1.5b-cpu", ["--save-steps", "3", "--rows", "4"])], ids=["whole", "adapter"]
)
def test_learning(
    run: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, more: list[str]
) -> None:
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setattr(learning, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # this process keeps those that it has
    sides = ["groupwise", "trl"] if importlib.util.find_spec("trl") is not None else ["groupwise"]
    size = [
        "--seeds",
        "0",
        "--steps",
        "4",
        "--every",
        "2",
        "--problems",
        "8",
        "--work",
        str(tmp_path / "work"),
        "--recipe",
        recipe,
        *more,
    ]
    task = ["rollout.max_completion_tokens=8", "data.arithmetic.problems=300", "data.holdout=8"]
    task += ADAPTER if recipe != "quickstart" else ["optimizer.schedule=constant"]
    given = [f"model.name={tiny_folder}", *task, "--sides", *sides]
    result = run(learning, *given, *size)
    for side in sides:
        rows = result["details"]["runs"][side]["0"]["rows"]
        assert [row["step"] for row in rows] == [0, 2, 4]
        assert 0 == rows[0]["seconds"] < rows[1]["seconds"] < rows[2]["seconds"]
        assert 2 * 64 <= rows[1]["sampled_tokens"] <= 2 * 64 * 8
        assert all(0 <= row["accuracy"] <= 1 for row in rows)
        # TRL saves all of a model's weights in float32: where it computes in bfloat16 they are judged in that, and so.
        assert all(("float32" in row) == (side == "trl" and not more and computes_bf16()) for row in rows[1:])
    began = result["details"]["runs"]
    assert run(learning, *given, *size)["details"]["runs"] == began  # what is finished is kept
    assert not any(str(tiny_folder) in one for one in result["settings"]["settings"])
    asked = json.loads((tmp_path / "work" / "groupwise-0" / "settings.json").read_text())
    assert asked["rewards"] == ([["accuracy", {"in_format": True}]] if more else [["correctness", {}], ["format", {}]])
    if more:  # a run that was stopped goes on from its newest checkpoint, here the last one
        for side in sides:
            (tmp_path / "work" / f"{side}-0" / "found.json").unlink()
            shutil.rmtree(tmp_path / "work" / f"{side}-0" / "step-4", ignore_errors=True)
        again = run(learning, *given, *size)["details"]["runs"]
        assert all(again[side]["0"]["rows"] == began[side]["0"]["rows"] for side in sides)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "more"), [("8", []), ("1", []), ("8", ["--in-8-bits"])])
def test_sampling(run: Any, tiny_folder: Path, group: str, more: list[str]) -> None:
    size = ["--sequences", "1", "3", "--group", group, "--max-tokens", "6"]
    if more and (why := why_not_in_8_bits(torch.device("cpu"), torch.bfloat16 if computes_bf16() else torch.float32)):
        pytest.skip(why)
    result = run(sampling, "--model", str(tiny_folder), *size, "--repeats", "1", *more)
    speeds = result["details"]["tokens_per_s"]
    assert all(sides.get("8 bits", 0) > 0 for sides in speeds.values()) == bool(more)
    assert speeds.keys() == {"1", "3"}
    assert all(side > 0 for sides in speeds.values() for side in (sides["ours"], sides["transformers"]))
    assert result["ratio"] == pytest.approx(speeds["3"]["ours"] / speeds["3"]["transformers"], rel=1e-3)
    for count, own in result["details"]["ratios"].items():
        assert own.keys() == ({"ours", "8 bits"} if more else {"ours"})
        for side, ratios in own.items():
            assert ratios == {"transformers": pytest.approx(speeds[count][side] / speeds[count]["transformers"], rel=1e-3)}


@pytest.mark.slow
def test_episodes(run: Any, tiny_folder: Path) -> None:
    size = ["--episodes", "3", "--turns", "3", "--max-length", "6", "--latency", "0.01"]
    result = run(episodes, "--model", str(tiny_folder), *size, "--repeats", "1")
    assert result["ratio"] == pytest.approx(1 / result["details"]["cost"], rel=1e-3)
    assert result["details"]["throughput"] > 0
    assert len(result["details"]["seconds"]) == 5


def test_scaling(run: Any) -> None:
    result = run(scaling, "--tiny", "--repeats", "1", "--axes", "group size", "model width")
    growth = result["details"]["group size"]["growth"]
    assert growth.keys() == {"sampling", "learning"}
    assert 1 < growth["learning"]["work"] < 2  # twice the completions, but the prompt once
    assert result["ratio"] == min(g["work_over_time"] for a in result["details"].values() for g in a["growth"].values())
    sides = {"sampling", "learning", "plain sampling", "plain learning"}
    assert all(axis["seconds"].keys() == sides and len(axis["calls"]) == 2 for axis in result["details"].values())


def test_both_sides_of_growth_compute_with_the_threads_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """... though other programs are busy."""
    monkeypatch.setattr(threads, "_fixed", False)
    monkeypatch.setattr(threads, "_watch", None)
    monkeypatch.setattr(threads.Watch, "look", lambda watch, now: 1)
    seen: list[int] = []
    generate = scaling.generate_forced

    def plainly(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return generate(*args)

    monkeypatch.setattr(scaling, "generate_forced", plainly)
    scaling.run(scaling.options().parse_args(["--tiny", "--repeats", "1", "--axes", "group size", "--threads", "2"]))
    assert set(seen) == {2}


@pytest.mark.slow
def test_gpu_in_miniature(run: Any) -> None:
    result = run(gpu, "--device", "cpu", "--roles", "ours", "learning", "--repeats", "1")
    assert result["details"].keys() == {"tiny"}
    assert result["ratio"] is None  # nothing to compare with
    assert result["ours"] == result["details"]["tiny"]["ours"]["tokens_per_s"] > 0
    assert result["details"]["tiny"]["learning"]["tflops"] > 0


@pytest.mark.parametrize("role", sorted(ROLES))
def test_gpu_sides_do_the_work_asked_for(role: str) -> None:
    settings = {
        "role": role, "shape": "tiny", "device": "cpu", "sequences": 4, "samples": 2, "prompt_tokens": 6, "completion_tokens": 5,
        "gradient_checkpointing": False, "micro_batch_tokens": 64, "precision": "masters",
    }  # fmt: skip
    action = prepare(settings)
    found = [action() for _ in range(6)]
    assert all(one["seconds"] > 0 for one in found)
    assert all(4 <= one["tokens"] <= 20 for one in found)
    assert len({one["tokens"] for one in found}) > 1, "lengths are new in every step: a GPU keeps plans and graphs by shape"
    if role == "learning":
        assert all(one["flops"] > 0 for one in found)


def test_gpu_steps_of_trl_are_medians_and_it_is_said_where_it_cannot_be_had(monkeypatch: Any, capsys: Any) -> None:
    """The first step warms up and does not count; peak memory is the highest."""
    answers = iter([(9.0, 10, 9), (2.0, 10, 7), (4.0, 10, 8), (3.0, 12, 6)])

    class StandIn:
        hello: ClassVar = {"trl": "1.16.0", "vllm": "0.32.0"}

        def __init__(self, module: str, settings: dict[str, Any], **_: Any) -> None:
            if settings["shape"] != "tiny":
                raise WorkerDied("it ended\nNo module named 'trl'")
            assert (Path(settings["model"]) / "tokenizer.json").is_file()
            assert settings["rows"] == 8
            assert len(trl_gpu_worker.rows_of(settings)) == 4 * 8 // 4
            assert all(4 <= len(row["prompt"]) <= 8 for row in trl_gpu_worker.rows_of(settings))

        __enter__ = __exit__ = lambda self, *_: self

        def ask(self) -> dict[str, Any]:
            seconds, tokens, gib = next(answers)
            return {"seconds": seconds, "tokens": tokens, "peak_memory": gib * 2**30}

    monkeypatch.setattr(gpu, "Worker", StandIn)
    words = ["--device", "cpu", "--sequences", "8", "--samples", "4", "--prompt-tokens", "8", "--completion-tokens", "8"]
    args = gpu.options().parse_args(words)
    found = gpu._by_trl(args, "tiny")
    versions = {"trl": "1.16.0", "vllm": "0.32.0"}
    assert found == {"seconds": 3.0, "tokens_per_s": 4.0, "peak_memory_gib": 8.0, "rows": 8, **versions}
    assert gpu._by_trl(args, "0.5b") == {"failed": "No module named 'trl'"}
    assert "0.5b, TRL: not measured" in capsys.readouterr().out
    gpu._print({"tiny": {"step": {"seconds": 1.0}, "trl": found}, "7b": {"step": {"seconds": 1.0}}})
    printed = capsys.readouterr().out
    assert "all weights are bf16, and so is TRL's AdamW" in printed
    tiny, large = printed.splitlines()[-2:]
    assert tiny.split()[-6:] == ["8", "fp32", "masters", "and", "moments", "8"]
    assert large.split()[-2:] == ["bf16", "-"]


@pytest.mark.parametrize(
    ("shape", "words", "rows"),
    [
        ("1.5b", [], 16),  # 16,384 tokens are 21 rows of 256 and 512, and 256 are no multiple of 21
        ("1.5b", ["--micro-batch-tokens", "4096"], 4),
        ("7b", ["--micro-batch-tokens", "512"], 1),
        ("tiny", ["--sequences", "12", "--samples", "4", "--prompt-tokens", "8", "--completion-tokens", "24"], 6),
    ],
)
def test_trl_learns_as_many_rows_at_a_time_as_a_micro_batch_has_tokens(shape: str, words: list[str], rows: int) -> None:
    assert gpu._rows(gpu.options().parse_args(words), shape) == rows


def test_gpu_prompts_are_new_in_every_step() -> None:
    settings = {"sequences": 8, "samples": 2, "prompt_tokens": 64, "shape": "tiny"}
    first, second = (gpu_worker.prompts_of(settings, step) for step in (0, 1))
    assert not {p.problem.id for p in first} & {p.problem.id for p in second}
    assert len({len(p.token_ids) for p in first}) > 1
    assert [len(p.token_ids) for p in first] != [len(p.token_ids) for p in second]


@pytest.mark.slow
def test_step_against_a_checkout(run: Any, tiny_folder: Path) -> None:
    size = ["--groups", "2", "--completions", "2", "--max-tokens", "6", "--pairs", "2"]
    result = run(step, "--model", str(tiny_folder), "--against", str(Path(__file__).resolve().parents[2]), *size)
    this, other = (result["details"]["steps"][side] for side in ("this", "other"))
    assert len(this) == len(other) == 2
    assert [s["lengths"] for s in this] == [s["lengths"] for s in other]  # the same seeds, the same weights
    assert result["ratio"] > 0
