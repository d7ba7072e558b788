"""What vLLM's workers say about weights that were loaded: against a module with fused and repacked parameters, as vLLM's models have."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm.backend import GroupwiseWorker, VllmBackend, _Adapters, _Call, _Load, _Sleep
from groupwise.engines.vllm.protocol import Broken, Job, Refused
from groupwise.engines.vllm.transfer import handles_to

FULL = {"compared": 2, "repacked": 0, "sharded": 0}


class Fused(nn.Module):
    """q, k and v in one parameter; a head that shares the embedding and computes from a packed copy, as on CPUs."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layer = nn.Module()
        self.layer.qkv_proj = nn.Linear(4, 8, bias=False)
        self.head = nn.Module()
        self.head.weight = self.embed.weight
        self.head.cpu_linear = self.head.weight.detach().clone()
        self.head.quant_method = self

    def process_weights_after_loading(self, layer):
        layer.cpu_linear = layer.weight.detach().clone()

    @torch.no_grad()
    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            if name == "embed.weight":
                self.embed.weight.copy_(tensor)
                loaded.add(name)
            else:
                start = {"q": 0, "k": 4, "v": 6}[name.split(".")[1][0]]
                self.layer.qkv_proj.weight[start : start + len(tensor)] = tensor
                loaded.add("layer.qkv_proj.weight")
        return loaded


class Worker(GroupwiseWorker):
    class parallel_config:
        world_size = 1

    device = torch.device("cpu")

    def __init__(self, model):
        self.model = model
        self.model_runner = self

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator):
        self.model.load_weights(weights_iterator)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (6, 4), "layer.q_proj.weight": (4, 4), "layer.k_proj.weight": (2, 4), "layer.v_proj.weight": (2, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def files_of(tensors, tmp_path):
    names = list(tensors)
    halves = [{n: tensors[n] for n in names[:2]}, {n: tensors[n] for n in names[2:]}]
    for i, half in enumerate(halves):
        save_file(half, tmp_path / f"{i}.safetensors")
    return [str(tmp_path / "0.safetensors"), str(tmp_path / "1.safetensors")]


def test_fused_parameters_are_compared_whole_and_a_tied_head_is_packed_again(tensors, tmp_path):
    model = Fused()
    assert Worker(model).groupwise_load(files_of(tensors, tmp_path)) == FULL
    assert torch.equal(model.head.cpu_linear, tensors["embed.weight"])
    assert "load_weights" not in vars(model)  # the model is left as it was


def test_the_memory_of_another_process_is_read_and_compared(tensors):
    """Handles are opened once, and what they lead to is read twice: to load it, and to compare."""
    script = "import sys\nfrom tests.engines.with_vllm.test_worker import Fused, Worker\n"
    script += "model = Fused()\nprint(Worker(model).groupwise_load(sys.stdin.buffer.read()), float(model.embed.weight.sum()))"
    handles, _kept = handles_to(tensors.items())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], input=handles, capture_output=True, env=environment, check=True)
    assert done.stdout.decode().strip() == f"{FULL} {float(tensors['embed.weight'].sum())}"


def test_the_trainer_s_own_tensors_are_made_twice(tensors):
    """To load them and to compare: each time an adapter is merged."""
    made = []

    def named():
        made.append(None)
        return iter(tensors.items())

    assert Worker(Fused()).groupwise_load(named) == FULL
    assert len(made) == 2


def test_a_part_of_a_fused_parameter_that_did_not_come_is_named(tensors, tmp_path):
    del tensors["layer.k_proj.weight"]
    with pytest.raises(ValueError, match=r"1 tensors .*the first layer\.k_proj\.weight"):
        Worker(Fused()).groupwise_load(files_of(tensors, tmp_path))


def test_a_parameter_that_holds_something_else_is_named(tensors, tmp_path):
    class Forgets(Fused):
        def load_weights(self, weights):
            loaded = super().load_weights(weights)
            with torch.no_grad():
                self.layer.qkv_proj.weight[5] = 0
            return loaded

    with pytest.raises(ValueError, match=r"layer\.qkv_proj\.weight does not hold what was sent"):
        Worker(Forgets()).groupwise_load(files_of(tensors, tmp_path))


def test_a_parameter_that_the_kernels_keep_elsewhere_is_counted_as_repacked(tensors, tmp_path):
    class Packs(Fused):
        def load_weights(self, weights):
            loaded = super().load_weights(weights)
            self.layer.qkv_proj.weight = nn.Parameter(torch.empty(0))
            return loaded

    assert Worker(Packs()).groupwise_load(files_of(tensors, tmp_path)) == {"compared": 1, "repacked": 1, "sharded": 0}


class Recorder:
    """vLLM's engine: what it is asked, in order."""

    def __init__(self, **answers):
        self.asked, self.answers = [], {"is_sleeping": False, "collective_rpc": [FULL], "reset_prefix_cache": True, **answers}

    def __getattr__(self, name):
        def call(*given, **named):
            self.asked.append((name, *given, *named.values()))
            if isinstance(self.answers.get(name), Exception):
                raise self.answers[name]
            return self.answers.get(name)

        return call


def test_vllm_that_slept_has_memory_for_weights_first_and_for_its_cache_last():
    load, engine = _Load(["a"], "run:1"), Recorder(is_sleeping=True)
    load.run(engine)
    rpc = ("collective_rpc", "groupwise_load", (["a"],))
    assert engine.asked == [
        ("is_sleeping",), ("wake_up", ["weights"]), rpc, ("wake_up", ["kv_cache"]), ("reset_prefix_cache",),
        ("set_weight_version", "run:1"),
    ]  # fmt: skip
    assert load.result.result() == FULL
    load, engine = _Load(["a"], "run:1"), Recorder()
    load.run(engine)
    assert [name for name, *_ in engine.asked] == ["is_sleeping", "collective_rpc", "reset_prefix_cache", "set_weight_version"]


def test_vllm_forgets_its_weights_and_keeps_no_copy_of_them():
    sleep, engine = _Sleep(), Recorder()
    sleep.run(engine)
    assert engine.asked == [("sleep", 2)]
    assert sleep.result.result() is None


@pytest.mark.parametrize("made", [lambda: _Load([], "run:1"), _Sleep])
def test_what_vllm_does_not_do_is_told_to_whoever_asked(made):
    failing = {"collective_rpc": AssertionError("no room"), "sleep": AssertionError("no room")}
    item = made()
    item.run(Recorder(**failing))
    with pytest.raises(ValueError, match="AssertionError: no room"):
        item.result.result()


@pytest.fixture
def backend_over(monkeypatch):
    """``backend_over(engine, arrivals)``: one whose thread has not begun. ``arrivals``: what comes before each step, if not what does."""
    monkeypatch.setattr("groupwise.engines.vllm.backend._parameters", lambda call, job: None)

    def make(engine, arrivals=None):
        backend = VllmBackend.__new__(VllmBackend)
        backend._inbox, backend.broken, backend._failed, backend._steps = queue.SimpleQueue(), threading.Event(), None, 0
        backend._adapter, backend.engine = _Adapters(), engine
        if arrivals is not None:
            backend._arrivals = lambda wait: next(arrivals)
        return backend

    return make


@pytest.mark.parametrize("when", ["before it is begun", "under way"])
def test_new_weights_do_not_wait_for_what_a_client_gave_up(when, backend_over):
    """The service lets them come once nobody waits for the completions; the engine's thread may not know of that yet."""
    call, load = _Call(SamplingSettings(max_tokens=8), [Job((3, 4), 1, 8)], (2,), False), _Load([], "run:1")

    def arrivals():
        if when == "under way":
            yield [call]
        call.given_up = True
        yield [load] if when == "under way" else [call, load]
        yield [None]

    backend = backend_over(Recorder(step=[]), arrivals())
    backend._inbox.put(None)
    backend._loop()
    assert backend._failed is None
    assert load.result.result(1) == FULL
    aborted = [asked[1] for asked in backend.engine.asked if asked[0] == "abort_request"]
    assert aborted == ([["groupwise-0"]] if when == "under way" else [])


def test_a_request_that_vllm_refuses_ends_its_call_alone(backend_over):
    class VLLMValidationError(Exception):
        """As in vLLM: no ValueError."""

    def add_request(name, prompt, parameters, lora_request):
        if not prompt["prompt_token_ids"]:
            raise VLLMValidationError("The decoder prompt cannot be empty")

    refused, served = (_Call(SamplingSettings(max_tokens=8), [Job(ids, 1, 8)], (2,), False) for ids in ((), (3, 4)))
    logprobs = SimpleNamespace(start_indices=[0], logprobs=[-0.5])
    one = SimpleNamespace(token_ids=[5], logprobs=logprobs, weight_versions=())
    output = SimpleNamespace(request_id="groupwise-1", outputs=[one], finished=True, num_cached_tokens=0)
    backend = backend_over(Recorder(step=[output]), iter([[refused], [served], [None]]))
    backend._inbox.put(None)
    backend.engine.add_request = add_request
    backend._loop()
    told = refused.rows.get(timeout=1)
    assert isinstance(told, Refused)
    assert "prompt cannot be empty" in str(told)
    assert served.rows.get(timeout=1)["tokens"] == [5]
    assert backend._failed is None


@pytest.mark.parametrize("dies", [True, False])
def test_who_waits_for_completions_is_told_that_none_will_come(dies, backend_over, monkeypatch):
    class EngineDeadError(Exception):
        pass

    monkeypatch.setattr("groupwise.engines.vllm.backend._BEAT_S", 0.05)
    engine, told = Recorder(step=[], **({"add_request": EngineDeadError("gone")} if dies else {})), queue.SimpleQueue()
    engine.model_config = SimpleNamespace(max_model_len=64)
    backend = backend_over(engine)
    backend._thread = threading.Thread(target=backend._loop, daemon=True)
    backend._thread.start()

    def wait(rows):
        try:
            list(rows)
        except Broken as broken:
            told.put(str(broken))

    def ask():
        return backend.sample(SamplingSettings(max_tokens=8), [Job((3, 4), 1, 8)], [2], False)

    rows = ask()
    if not dies:
        assert "beat" in next(rows), "it is under way"
        backend.close()
    for asked in (rows, ask()):  # before the end, and after it
        threading.Thread(target=wait, args=(asked,), daemon=True).start()
        assert told.get(timeout=60) == ("vLLM broke down (EngineDeadError: gone)" if dies else "vLLM was ended")
    backend.close()


def test_vllm_ends_once_nobody_steps_it():
    backend, ended = VllmBackend.__new__(VllmBackend), []
    backend._inbox = queue.SimpleQueue()
    backend._thread = threading.Thread(target=backend._inbox.get)
    backend._thread.start()
    core = SimpleNamespace(shutdown=lambda: ended.append(backend._thread.is_alive()))
    backend.engine = SimpleNamespace(engine_core=core)
    backend.close()
    assert ended == [False]
