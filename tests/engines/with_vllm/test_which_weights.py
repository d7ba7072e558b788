"""Whatever happens to a server, nothing is sampled from other weights than those asked for: restarts, broken pushes, wrong answers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm.protocol import BeginAgain, StaleWeights
from groupwise.engines.vllm.pushing import named_weights, packed_buckets
from groupwise.engines.vllm.service import Service
from groupwise.errors import TrainingError
from tests.engines.with_vllm.model_backend import ModelBackend

SAMPLED = SamplingSettings(max_tokens=8)


def start_anew(server):
    """What a restart leaves of a server: another one that holds nothing, at the same address."""
    server.service.close()
    server.service = Service(server.backend, spool=server.service._spool)
    server._http.RequestHandlerClass.service = server.service
    with torch.no_grad():
        for parameter in server.backend.model.parameters():
            parameter.zero_()


def elsewhere(work):
    """``work()`` in another thread, as sampling ahead is."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def test_weights_that_learning_has_changed_since_are_not_pushed_in_place_of_those_lost(
    serve, engine_over, tiny_llama, make_prompts, shifted
):
    """Sampling ahead finds the server started anew. What it could send are half-updated weights, under the old name."""
    model, prompts = tiny_llama(), make_prompts([4])
    server = serve(tiny_llama())
    engine = engine_over(server, model)
    start_anew(server)
    shifted(model)  # learning, beside it
    with pytest.raises(TrainingError, match=r"was restarted .*which learning has changed since .*--resume"):
        elsewhere(lambda: engine.sample(prompts, 2, SAMPLED, seed=1, scope="s"))
    assert server.backend.loads == 1
    assert server.service.weights is None
    engine.refresh(1)  # the thread that learns may
    assert server.backend.loads == 2
    assert len(elsewhere(lambda: engine.sample(prompts, 2, SAMPLED, seed=1, scope="s"))[0]) == 2


def test_weights_that_nothing_changes_are_pushed_again_by_whoever_samples(serve, engine_over, tiny_llama, make_prompts, ids_of):
    """As the thread of a served model."""
    server, prompts = serve(tiny_llama()), make_prompts([4])
    engine = engine_over(server, tiny_llama(), frozen=True)
    first = ids_of(engine.sample(prompts, 2, SAMPLED, seed=1, scope="s"))
    start_anew(server)
    assert ids_of(elsewhere(lambda: engine.sample(prompts, 2, SAMPLED, seed=1, scope="s"))) == first


def test_a_connection_that_breaks_while_sampling_ahead_is_no_reason_to_stop(serve, engine_over, tiny_llama, make_prompts, ids_of):
    prompts, server = make_prompts([4, 6]), serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    first = ids_of(engine.sample(prompts, 2, SAMPLED, seed=1, scope="s"))
    start = server.backend.handed_out

    def cut(count):
        if count == start + 2:
            server.backend.handed_out += 1
            raise ConnectionResetError

    server.backend.before_row = cut
    assert ids_of(elsewhere(lambda: engine.sample(prompts, 2, SAMPLED, seed=1, scope="s"))) == first


def test_older_weights_do_not_come_back(serve, engine_over, tiny_llama, make_prompts):
    """A request that outlived its weights: they were replaced, and stay so."""
    server = serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    rows = engine._rows([], SAMPLED)
    assert list(rows) == []
    engine.refresh(1)
    wanted = f"{engine._owner}:1"
    with pytest.raises(TrainingError, match=rf"has newer weights than {wanted}"):
        engine._put_right(StaleWeights(wanted, engine.weights), wanted)
    assert server.service.weights == engine.weights


@pytest.mark.parametrize("part", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_push_that_a_restart_interrupts_is_sent_from_its_beginning(part, serve, engine_over, tiny_llama, shifted):
    model, server = tiny_llama(), serve(tiny_llama())
    engine = engine_over(server, model, bucket_bytes=40_000)
    shifted(model)
    arrived, before = server.service.bucket, server.service

    def bucket(weights, index, data, sha256):
        arrived(weights, index, data, sha256)
        if index == part:
            start_anew(server)

    server.service.bucket = bucket
    engine.refresh(1)
    assert server.service is not before
    assert server.service.weights == engine.weights
    assert server.service._lease.owner == engine._owner
    held = dict(server.backend.model.named_parameters())
    assert all(torch.equal(parameter, held[name]) for name, parameter in model.named_parameters())


def test_parts_of_two_pushes_are_never_loaded_together(tiny_llama, shifted, tmp_path):
    """The same id twice, with other numbers: only what the commit seals counts."""
    service, model = Service(ModelBackend(tiny_llama()), spool=tmp_path), tiny_llama()
    service.hold("run", "a test")
    first = list(packed_buckets(named_weights(model), 40_000))
    shifted(model)
    second = list(packed_buckets(named_weights(model), 40_000))
    shas = [sha256 for _, sha256 in second]
    assert service.begin("run:1") is None
    for index, part in enumerate([*first[:2], *second[2:]]):
        service.bucket("run:1", index, *part)
    with pytest.raises(BeginAgain, match=r"parts \[0, 1\] .* nothing was changed"):
        service.commit("run:1", 1, shas)
    assert service.weights is None
    assert service.backend.loads == 0
    assert service.begin("run:1") is None
    for index, part in enumerate(second):
        service.bucket("run:1", index, *part)
    with pytest.raises(BeginAgain, match="others did"):
        service.commit("run:1", 1, shas[:-1])
    assert list(tmp_path.iterdir()) == []


def test_what_is_being_loaded_is_out_of_everybody_s_reach(tiny_llama, tmp_path):
    """A trainer that gave up waiting sends again, into the very files that are being read, or another run begins."""
    release, loading, seen = threading.Event(), threading.Event(), []

    class Slow(ModelBackend):
        def load(self, files, label):
            loading.set()
            assert release.wait(60)
            seen.append((label, len(files)))
            return super().load(files, label)

    service = Service(Slow(tiny_llama()), spool=tmp_path)
    parts = list(packed_buckets(named_weights(tiny_llama()), 40_000))
    shas = [sha256 for _, sha256 in parts]
    service.hold("run", "a test")
    service.begin("run:1")
    for index, part in enumerate(parts):
        service.bucket("run:1", index, *part)
    with ThreadPoolExecutor(2) as pool:
        committed = pool.submit(service.commit, "run:1", 1, shas)
        assert loading.wait(60)
        with pytest.raises(BeginAgain, match="no update to the weights run:1"):
            service.bucket("run:1", 0, *parts[0])
        with pytest.raises(BeginAgain, match="no update to the weights run:1"):
            pool.submit(service._of, "run:1").result(60)
        began = pool.submit(service.begin, "run:1")  # waits for what becomes of it
        release.set()
        told = committed.result(60)
        assert told["weights"] == "run:1"
        assert began.result(60) == told["digest"]
    assert seen == [("run:1", len(parts))]
    assert service.commit("run:1", 1, shas)["digest"] == told["digest"]  # said twice, done once
    assert service.backend.loads == 1


@pytest.mark.slow
def test_a_push_that_takes_too_long_ends_the_run_and_leaves_nothing_half_done(serve, engine_over, tiny_llama, make_prompts):
    release, done = threading.Event(), threading.Event()
    model, server = tiny_llama(), serve(tiny_llama())
    engine, load = engine_over(server, model), server.backend.load

    def slow(files, label):
        assert release.wait(60)
        try:
            return load(files, label)
        finally:
            done.set()

    server.backend.load = slow
    engine.patience_s = engine.link.patience_s = 2
    with pytest.raises(TrainingError, match=r"the weights cannot be pushed: .* for 2 s \(rollout.vllm.patience_s\).*--resume"):
        engine.refresh(1)
    assert server.service.weights is None  # neither the old ones nor the new ones can be sampled from meanwhile
    release.set()
    assert done.wait(60)
    engine.patience_s = engine.link.patience_s = 60
    engine.refresh(1)
    assert len(engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")[0]) == 2


def test_a_server_that_holds_something_else_than_was_sent_is_told(serve, engine_over, tiny_llama):
    server = serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    commit = server.service.commit
    for lie in ({"digest": "0" * 64}, {"weights": "somebody:1"}, {"weights": None}):
        server.service.commit = lambda *given, lie=lie: commit(*given) | lie
        with pytest.raises(TrainingError, match=r"says that it holds the weights .* were pushed: restart it"):
            engine.refresh(1)


def test_weights_that_change_while_completions_are_sampled_are_told(serve, engine_over, tiny_llama, make_prompts):
    server = serve(tiny_llama())
    engine = engine_over(server, tiny_llama())
    sample = server.service.sample

    def another_end(*given, **named):
        for row in sample(*given, **named):
            yield {"held": "somebody:1"} if "held" in row else row

    server.service.sample = another_end
    with pytest.raises(TrainingError, match=r"held the weights somebody:1 when it had sampled, not"):
        engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")
    server.service.sample = lambda *given, **named: (row for row in sample(*given, **named) if "held" not in row)
    with pytest.raises(TrainingError, match=r"held the weights None when it had sampled"):
        engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")


def test_a_service_whose_weights_go_while_it_samples_says_so(tiny_llama, tmp_path):
    from groupwise.engines.vllm.protocol import Job

    service = Service(ModelBackend(tiny_llama()), spool=tmp_path)
    service.hold("run", "a test")
    service.begin("run:1")
    ((data, sha256),) = packed_buckets(named_weights(tiny_llama()), 2**28)
    service.bucket("run:1", 0, data, sha256)
    service.commit("run:1", 1, [sha256])
    jobs = [Job((3, 4), 1, 8), Job((3, 5), 2, 8)]
    assert list(service.sample("run:1", SAMPLED, jobs, stop=[2]))[-1] == {"held": "run:1"}
    rows = service.sample("run:1", SAMPLED, jobs, stop=[2])
    next(rows)
    service.weights = None
    with pytest.raises(StaleWeights):
        list(rows)


def test_a_server_that_comes_back_with_another_model_is_refused(serve, engine_over, tiny_llama, make_prompts):
    """The same shapes, so that the weights would fit; another function of them."""
    model, server = tiny_llama(), serve(tiny_llama())
    engine = engine_over(server, model)
    server.close()
    serve(tiny_llama(rope_theta=123.0), port=server.port)
    with pytest.raises(TrainingError, match=r"has the model 'some/model' \(rope_theta 123.0, not 10000.0\)"):
        engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")


def test_what_a_server_computes_after_it_came_back_is_looked_at_again(serve, engine_over, tiny_llama, make_prompts, shifted):
    model, server = tiny_llama(), serve(tiny_llama())
    for _ in range(4):
        shifted(model)
    engine = engine_over(server, model)
    start_anew(server)
    server.backend.takes = False  # it says that it loads what it gets
    with pytest.raises(TrainingError, match="computes something else"):
        engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")


@pytest.mark.slow
def test_a_server_that_loses_the_weights_each_time_is_not_asked_for_ever(serve, engine_over, tiny_llama, make_prompts):
    server = serve(tiny_llama())
    engine = engine_over(server, tiny_llama())

    def lose(*given, **named):
        raise StaleWeights(given[0], None)
        yield

    server.service.sample = lose
    engine.patience_s = 0.3
    with pytest.raises(TrainingError, match=r"does not keep the weights: .* --resume"):
        engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")
