"""Short memory: foreseen where the planner says so, and told where it ran out."""

import errno
import io
import json
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from groupwise.config import load_config
from groupwise.errors import TrainingError
from groupwise.memory import available_memory_bytes, total_memory_bytes
from groupwise.planner import peak_phase, phases
from groupwise.planner.memory import beside_state, disk_bytes, evaluation, passes
from groupwise.training import microbatches, short_memory
from groupwise.training import setup as preparation
from groupwise.training.loop import train
from groupwise.training.setup import prepare

CPU = torch.device("cpu")


def test_what_will_not_fit_is_said_before_the_run(small_config, letters, monkeypatch):
    config = small_config()
    assert short_memory.memory_shortage(config, CPU) is None
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: 2**20)
    monkeypatch.setattr(short_memory.psutil.Process, "memory_info", lambda process: type("Memory", (), {"rss": 0}))
    (note,) = [n for n in prepare(config, letters).notes if "GiB of memory" in n]
    needed, free = map(float, re.search(r"about ([\d.]+) GiB of memory .* and ([\d.]+) GiB are free", note).groups())
    assert needed > free == 0.0
    assert "groupwise plan" in note


def test_the_note_grows_with_the_run(small_config, monkeypatch):
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: 0)
    monkeypatch.setattr(short_memory.psutil.Process, "memory_info", lambda process: type("Memory", (), {"rss": 0}))

    def needed(**model):
        return float(re.search(r"about ([\d.]+)", short_memory.memory_shortage(small_config(model=model), CPU).sentence)[1])

    small, large = (
        needed(name="smollm2-135m-instruct", dtype="bfloat16"),
        needed(name="Qwen/Qwen2.5-0.5B-Instruct", dtype="bfloat16"),
    )
    assert 494 / 135 * 0.6 < large / small < 494 / 135 * 1.2


def test_what_vllm_takes_of_a_gpu_stands_beside_the_run(monkeypatch):
    gpu, gib = torch.device("cuda"), 2**30
    settings = ["model.name=Qwen/Qwen2.5-1.5B-Instruct", "rollout.engine=vllm", "rollout.vllm.gpu_memory_share=0.6"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    needed = []
    for whole in (80, 160):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, whole=whole: (gib, whole * gib))
        needed.append(short_memory.memory_shortage(load_config("gsm8k-0.5b", settings), gpu).needed)
    assert needed[1] - needed[0] == pytest.approx(0.6 * 80 * gib, rel=0.01)


def test_a_divided_run_is_judged_by_what_one_process_holds(monkeypatch):
    """7B over eight GPUs of 80 GB, as its recipe has it: one process holds 53 GiB, and one alone would need 160.5."""
    config = load_config("gsm8k-7b-8gpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * 2**30, 80 * 2**30))
    gpu = torch.device("cuda")
    assert short_memory.memory_shortage(config, gpu, processes=8) is None
    assert "156.3" in short_memory.memory_shortage(config, gpu, processes=1).sentence
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    assert short_memory.memory_shortage(config, gpu) is None, "as many as were started"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    by_launcher = load_config("gsm8k-7b-8gpu", ["training.sharding=auto"])
    assert short_memory.memory_shortage(by_launcher, gpu) is None, "or as the launcher divides it"


def test_what_lies_outside_the_gpu_is_held_against_the_machine_s_own_memory(monkeypatch):
    """1.5B: fp32 masters, moments and gradients, 16 bytes for each weight and more, since pinned blocks are rounded up."""
    gpu, gib = torch.device("cuda"), 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * gib, 80 * gib))
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: 16 * gib)
    settings = ["training.sharding=none", "optimizer.offload=true"]
    config = load_config("gsm8k-1.5b-8gpu", settings)
    short = short_memory.memory_shortage(config, gpu, processes=1)
    assert "GiB of the machine's own memory for what lies outside the GPU, and 16.0 GiB are free there" in short.sentence
    assert short.needed > 16 * 1.5e9
    assert "leave out optimizer.offload" in short.remedy
    assert "memory, in 8 processes for what" in short_memory.memory_shortage(config, gpu, processes=8).sentence
    assert short_memory.memory_shortage(config, gpu, processes=8).needed == 8 * short.needed
    assert short_memory.memory_shortage(load_config("gsm8k-1.5b-8gpu", settings[:1]), gpu, processes=1) is None
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: 64 * gib)
    assert short_memory.memory_shortage(config, gpu, processes=1) is None


def test_the_driver_s_context_is_there_when_one_asks_what_is_free(monkeypatch):
    config, gpu, free = load_config("gsm8k-1.5b-24gb"), torch.device("cuda"), 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 24 * 2**30))
    peak = peak_phase(phases(short_memory.planned(config, gpu, processes=1))).bytes
    free = peak - 400 * 2**20
    assert short_memory.memory_shortage(config, gpu, processes=1) is None
    free -= 1
    assert short_memory.memory_shortage(config, gpu, processes=1).free == free


def test_what_an_earlier_run_of_the_process_has_freed_is_free(monkeypatch):
    """PyTorch's allocator keeps it, and the driver counts it as taken: a second run on the same GPU was refused."""
    kept = 22 * 2**30

    def give_back():
        nonlocal kept
        kept = 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (23 * 2**30 - kept, 24 * 2**30))
    assert short_memory.memory_shortage(load_config("gsm8k-1.5b-24gb"), torch.device("cuda"), processes=1) is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([], "training.offload_reference=true, optimizer.offload=true, optimizer.precision=masters-8bit or model.lora"),
        (["algorithm.kl=null"], "optimizer.offload=true, optimizer.precision=masters-8bit or model.lora"),
        (["optimizer.offload=true", "training.offload_reference=true"], "model.lora"),
        (["optimizer.precision=stochastic", "training.offload_reference=true"], "model.lora"),
        (["model.gradient_checkpointing=false", "model.lora.rank=16"], "model.gradient_checkpointing=true"),
        (["model.lora.rank=16"], None),
    ],
)
def test_what_is_named_against_a_gpu_s_short_memory_is_not_on_already(settings, named, monkeypatch):
    """1.5B with checkpointing, fp32 masters and a reference: checkpointing was named, and nothing that leaves the GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 80 * 2**30))
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: 2**40)
    config, gpu = load_config("gsm8k-1.5b-8gpu", settings), torch.device("cuda")
    remedy = short_memory.memory_shortage(config, gpu, processes=1).remedy
    words = "lower training.micro_batch_tokens or rollout.max_concurrent_sequences"
    assert remedy.startswith(f"{words}, set {named}; " if named else f"{words}; ")
    less = short_memory.less_memory(short_memory.planned(config, gpu, processes=1))
    assert less == (named or "")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        microbatches.PassBudget(100, less_memory=less).attempt(out_of_memory, lambda: None, lambda: None)
    others = f"set {named}, or " if named else ""
    assert caught.value.__notes__[0].endswith(f"would help: {others}lower rollout.max_completion_tokens")


def out_of_memory():
    raise torch.OutOfMemoryError


def test_where_the_weights_are_divided_nothing_is_moved_out_of_the_gpu(monkeypatch):
    """Dividing them goes with none of it."""
    setup = short_memory.planned(load_config("gsm8k-7b-8gpu"), torch.device("cuda"), processes=8)
    assert setup.sharding != "none"
    assert "offload" not in short_memory.less_memory(setup)
    assert "precision" not in short_memory.less_memory(setup)
    assert short_memory.less_memory(replace(setup, device="cpu")) == "model.lora"


def test_a_machine_that_cannot_bring_a_checkpoint_together_is_named_before_the_run(monkeypatch):
    """16 bytes for each of 7.6 billion weights, in the first process."""
    gpu, free = torch.device("cuda"), 64 * 2**30

    def note(*overrides, processes=8):
        return short_memory.checkpoint_note(load_config("gsm8k-7b-8gpu", overrides), gpu, processes)

    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: free)
    assert "will bring 113.5 GiB together in the machine's own memory, and 64.0 GiB are free" in note()
    assert "output.checkpoint_every=0" in note()
    assert note("output.checkpoint_every=0") is None
    assert note("output.checkpoint_every=50", "training.steps=49") is None, "none is due"
    assert note("model.lora.rank=16") is None
    assert note(processes=1) is None, "nothing is divided"
    free = 128 * 2**30
    assert note() is None
    free = 8 * 2**30
    beneath = note("model.lora.rank=16", "output.checkpoint_every=0")
    assert beneath is not None
    assert beneath.startswith("for the final model the first process will bring 14.")
    assert beneath.endswith("or set output.adapter_only")
    assert note("model.lora.rank=16", "output.adapter_only=true") is None
    pushed = note("model.lora.rank=16", "output.adapter_only=true", "rollout.engine=vllm", "rollout.vllm.url=http://a:1")
    assert pushed is not None, "vLLM is sent the base all the same"
    assert pushed.endswith("or sample with rollout.engine=auto")
    whole = note("model.lora.rank=16", "rollout.engine=vllm", "rollout.vllm.url=http://a:1")
    assert whole is not None
    assert whole.endswith("or sample with rollout.engine=auto and set output.adapter_only")


@pytest.mark.parametrize(
    ("launched", "said"),
    [
        ({}, "3 are used: --num-processes 8 takes all of them."),
        ({"RANK": "0", "LOCAL_WORLD_SIZE": "8"}, None),
        ({"RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "one is used: torchrun's --nproc-per-node, "),
        ({"RANK": "0", "LOCAL_WORLD_SIZE": "3", "GROUPWISE_LAUNCHER": "1"}, "3 are used: --num-processes 8 "),
    ],
    ids=["a check", "two machines", "idle", "own launcher"],
)
def test_gpus_are_idle_that_no_process_of_their_machine_has(small_config, monkeypatch, launched, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(preparation, "resolve_device", torch.device)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    note = preparation._note_on_idle_gpus(small_config(model={"device": "cuda"}), 16 if "RANK" in launched else 3)
    assert note is None if said is None else said in note


def test_processes_of_one_machine_share_its_memory(small_config, monkeypatch):
    monkeypatch.setattr(short_memory.psutil.Process, "memory_info", lambda process: type("Memory", (), {"rss": 0}))
    config, free = small_config(), 0
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: free)

    def needed(processes):
        short = short_memory.memory_shortage(config, CPU, processes=processes)
        return None if short is None else short.needed

    one = needed(1)
    assert needed(4) == pytest.approx(4 * one, rel=0.3)
    free = int(1.5 * one)
    assert needed(1) is None
    assert needed(4) is not None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # each on a machine of its own
    assert needed(4) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "NCCL error: unhandled system error, NCCL version 2.27.5\nLast error:\nFailed to CUDA calloc async 608 bytes"
        ),
        RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    ],
)
def test_memory_that_ran_out_is_one_sentence(error):
    saved = "the last checkpoint is step-1"
    named = f"memory ran out .*micro_batch_tokens.*{saved}"
    with pytest.raises(TrainingError, match=named), short_memory.explain_short_memory(lambda: saved):
        raise error


def test_what_the_failed_call_held_is_free_before_checkpoints_are_looked_for():
    class Held:
        pass

    held = []

    def fails():
        large = Held()
        held.append(weakref.ref(large))
        raise MemoryError

    def saved():
        assert held[0]() is None
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with pytest.raises(TrainingError, match="memory ran out"), short_memory.explain_short_memory(saved):
        fails()


def test_a_run_out_of_memory_names_its_last_checkpoint(small_config, letters, quiet, tmp_path):
    def fail(report):
        if report.step == 2:
            raise MemoryError

    with pytest.raises(TrainingError, match=r"memory ran out .*micro_batch_tokens.*the last checkpoint is .*step-2"):
        train(
            small_config(output={"checkpoint_every": 1}),
            rewards=letters,
            console=quiet,
            run_folder=tmp_path / "run",
            on_step=fail,
        )


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shape"), short_memory.explain_short_memory(lambda: ""):
        raise RuntimeError("the shape is wrong")


def test_a_container_has_less_than_the_machine(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 2**20
    (tmp_path / "memory.max").write_text(f"{3 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**20}\n")
    assert available_memory_bytes(tmp_path) == 2 * 2**20
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**19}\nactive_file 7\n")
    assert available_memory_bytes(tmp_path) == 2 * 2**20 + 2**19, "files are given up"
    assert total_memory_bytes(tmp_path) == 3 * 2**20


@pytest.mark.parametrize(
    ("version", "limit", "used"),
    [(2, "memory.max", "memory.current"), (1, "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_a_job_has_less_than_the_machine_where_all_groups_are_seen(version, limit, used, tmp_path):
    """As of Slurm and systemd: its limit is that of a group above its own, and the tightest counts."""
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    rows = {2: "0::/slurm/job_7/step_0\n", 1: "12:cpu,cpuacct:/other\n5:memory:/slurm/job_7/step_0\n0::/\n"}
    own.write_text(rows[version])

    def write(group, bound, taken):
        for name, text in ((limit, bound), (used, taken)):
            path = groups / name
            path = path.parent / group / path.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    write("slurm/job_7/step_0", "max", 2**18)
    write("slurm/job_7", 3 * 2**20, 2**20)
    write("slurm", 4 * 2**20, 3 * 2**20)
    write("other", 2**10, 0)
    assert available_memory_bytes(groups, own) == 2**20, "of the group that has least left"
    assert total_memory_bytes(groups, own) == 3 * 2**20, "of the group that may take least"
    assert total_memory_bytes(groups, tmp_path / "none") > 2**22, "without a row of its own it is in the root, which has no limit"


@pytest.fixture
def rows_of_each_call(monkeypatch):
    """How many sequences the engine may sample at once, for each of its calls."""
    from groupwise.engines.builtin.engine import BuiltinEngine

    found, serve = [], BuiltinEngine.serve

    def watched(engine, *args, **kwargs):
        found.append(engine.limit.rows)
        return serve(engine, *args, **kwargs)

    monkeypatch.setattr(BuiltinEngine, "serve", watched)
    return found


def test_an_evaluation_that_will_not_fit_samples_fewer_at_once_and_the_steps_after_it_do_not(
    small_config, letters, tmp_path, monkeypatch, rows_of_each_call
):
    def judged(folder):
        config = small_config(evaluation={"at_start": True, "every": 1}, rollout={"max_concurrent_sequences": 12})
        said = io.StringIO()
        result = train(config, rewards=letters, console=Console(file=said, width=300), run_folder=tmp_path / folder)
        return said.getvalue(), result.summary["evaluations"]

    said, as_usual = judged("enough")
    assert "memory is short" not in said
    assert set(rows_of_each_call) == {12}
    rows_of_each_call.clear()
    fitting = "groupwise.training.run.rows_that_fit"
    monkeypatch.setattr(fitting, lambda setup, rows, items: 2 if items is evaluation else rows)
    said, short = judged("short")
    assert said.count("memory is short: at most 2 of 12 sequences are sampled at once in an evaluation") == 1
    assert rows_of_each_call == [2, 12, 2, 12, 2], "before the steps, two steps with one between them, and after them"
    assert [one["strict_accuracy"] for one in short] == [one["strict_accuracy"] for one in as_usual]
    assert [one["mean_tokens"] for one in short] == [one["mean_tokens"] for one in as_usual]


def test_a_run_that_will_not_fit_takes_fewer_sequences_and_smaller_passes_and_stays_the_same(
    small_config, letters, tmp_path, monkeypatch, rows_of_each_call
):
    """Token for token, and to rounding in what it learns, since fewer are added up at once."""
    made, cut = [], microbatches.cut

    def watched(*args):
        made.append(len(cut(*args)))
        return cut(*args)

    monkeypatch.setattr("groupwise.training.learner.cut", watched)

    def trained(folder):
        said = io.StringIO()
        config = small_config(rollout={"max_concurrent_sequences": 12}, training={"steps": 3})
        train(config, rewards=letters, console=Console(file=said, width=300), run_folder=tmp_path / folder)
        return said.getvalue(), [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]

    said, as_usual = trained("enough")
    assert "memory is short" not in said
    assert set(rows_of_each_call) == {12}
    assert set(made) == {1}
    rows_of_each_call.clear()
    made.clear()
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: 0)
    monkeypatch.setattr(short_memory.psutil.Process, "memory_info", lambda process: type("Memory", (), {"rss": 0}))
    said, short = trained("short")
    assert said.count("memory is short: at most 1 of 12 sequences are sampled at once in a step") == 1
    assert said.count("memory is short: a pass of a step has at most") == 1
    assert set(rows_of_each_call) == {1}
    assert set(made) == {12}, "a completion in each pass"
    texts = [(tmp_path / name / "completions.jsonl").read_text() for name in ("enough", "short")]
    assert texts[0] == texts[1]
    for name in ("policy/loss", "optimizer/grad_norm", "reward/mean"):
        assert [row[name] for row in short] == pytest.approx([row[name] for row in as_usual], rel=1e-4, abs=1e-7)


def test_passes_are_halved_until_they_fit_or_have_one_completion(small_config):
    setup = short_memory.planned(small_config(training={"micro_batch_tokens": 4096}), CPU, 20)
    need = [beside_state(setup, passes(setup, 4096 // 2**i, 8)) for i in range(10)]
    assert need == sorted(need, reverse=True)
    assert short_memory.tokens_that_fit(setup, 4096, 8, free=need[0]) == 4096
    fits = next(i for i in range(10) if need[i] < need[0])
    assert short_memory.tokens_that_fit(setup, 4096, 8, free=need[fits]) == 4096 // 2**fits
    least = short_memory.tokens_that_fit(setup, 4096, 8, free=0)
    assert 1 < least < 20 + 4 * 8
    assert short_memory.tokens_that_fit(None, 4096, 8, free=0) == 4096
    assert short_memory.tokens_that_fit(replace(setup, device="cuda"), 4096, 8, free=0) == 4096


def test_a_limit_that_was_halved_in_an_evaluation_stays_halved(
    small_config, letters, quiet, tmp_path, monkeypatch, rows_of_each_call
):
    from groupwise.engines.builtin.engine import BuiltinEngine

    serve = BuiltinEngine.serve

    def short(engine, *args, **kwargs):
        if not rows_of_each_call:
            engine.limit.rows = 3
        return serve(engine, *args, **kwargs)

    monkeypatch.setattr(BuiltinEngine, "serve", short)
    train(small_config(evaluation={"at_start": True}), rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert set(rows_of_each_call) == {3}


def test_a_final_model_that_the_disk_cannot_hold_is_refused_before_the_run(small_config, letters, quiet, tmp_path, monkeypatch):
    config, asked = small_config(), []

    def free(folder):
        asked.append(folder)
        return 1000

    monkeypatch.setattr(short_memory, "free_disk_bytes", free)
    with pytest.raises(
        TrainingError,
        match=r"^the final model will take 0\.\d MiB, and 0\.0 MiB are free at .*run, so that .*: free space, .*output\.folder$",
    ):
        train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert asked == [tmp_path / "run"]
    with monkeypatch.context() as other:
        other.setenv("RANK", "1")  # which writes nothing, and whose disk may be another
        prepare(config, letters, folder=tmp_path / "run").rewards.close()
    assert asked == [tmp_path / "run"]
    (tmp_path / "run" / "final_model").mkdir(parents=True)
    assert "MiB are free" in short_memory.disk_note(config, tmp_path / "run"), (
        "it is there already, and may only have to be judged"
    )


def test_a_disk_that_holds_the_final_model_and_no_checkpoint_is_refused_before_the_run(
    small_config, letters, quiet, tmp_path, monkeypatch
):
    """Of a tiny model: 4 bytes a weight for the model, 12 for a checkpoint. What is there already needs no room."""
    config = small_config(output={"checkpoint_every": 1})
    checkpoint, model = disk_bytes(short_memory.planned(config, CPU))
    assert checkpoint == 3 * model
    monkeypatch.setattr(short_memory, "free_disk_bytes", lambda folder: model + checkpoint - 1)
    with pytest.raises(
        TrainingError,
        match=r"^a checkpoint will take .* beside the final model .* at .*run, so that .*: free space, .*output\.checkpoint_every=0$",
    ):
        train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert short_memory.disk_note(small_config(output={"checkpoint_every": 0}), tmp_path / "run") is None
    assert short_memory.disk_note(small_config(output={"checkpoint_every": 3}), tmp_path / "run") is None
    monkeypatch.setattr(short_memory, "free_disk_bytes", lambda folder: model + checkpoint)
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    monkeypatch.setattr(short_memory, "free_disk_bytes", lambda folder: model)
    shutil.rmtree(tmp_path / "run" / "final_model")
    assert "MiB are free" in short_memory.disk_note(config, tmp_path / "run"), "a checkpoint is there, and the final model fits"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "MiB are free" in short_memory.disk_note(config, Path("~/run"))


def test_an_adapter_that_fits_where_its_merged_model_does_not_is_named(monkeypatch, tmp_path):
    config = load_config("quickstart", ["model.dtype=bfloat16", "model.lora={rank: 16, alpha: 32}"])
    monkeypatch.setattr(short_memory, "free_disk_bytes", lambda folder: 100 * 2**20)
    with pytest.raises(TrainingError, match=r"[\d.]+ MiB, and 100\.0 MiB are free .*, or set output\.adapter_only$"):
        short_memory.disk_note(config, tmp_path)
    adapter = load_config("quickstart", ["model.dtype=bfloat16", "model.lora={rank: 16, alpha: 32}", "output.adapter_only=true"])
    assert short_memory.disk_note(adapter, tmp_path) is None
