"""Sampling through the wire gives the policy's own distribution, and every update reaches it."""

from __future__ import annotations

import pytest
import torch

from groupwise.config.schema import Config, CorrectionConfig, LoraConfig
from groupwise.distributed import World
from groupwise.engines.base import SampleRequest, SamplingSettings
from groupwise.engines.vllm.engine import request_seed
from groupwise.errors import ConfigError, ModelError
from groupwise.models.adapters import attach, peft_config_of
from groupwise.types import Problem, Prompt
from tests.waiting import comes

SAMPLED = SamplingSettings(max_tokens=12)
LENGTHS = [3, 17, 9]
ENDS = {2, *range(5, 20)}


def same(model, prompts, groups, scored):
    """Largest difference between what the server said of its tokens and what the module says."""
    return max(
        float((scored(model, prompt, c) - torch.tensor(c.logprobs)).abs().max())
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    )


def test_completions_come_from_the_policy_with_its_log_probabilities(serve, engine_over, tiny_llama, make_prompts, scored):
    model, prompts = tiny_llama(), make_prompts(LENGTHS)
    server = serve(tiny_llama())
    engine, seen = engine_over(server, model), []
    groups = engine.sample(prompts, 4, SAMPLED, seed=3, scope="s", on_progress=lambda done, tokens: seen.append((done, tokens)))
    assert [len(group) for group in groups] == [4, 4, 4]
    assert [[c.sample for c in group] for group in groups] == [[0, 1, 2, 3]] * 3
    assert same(model, prompts, groups, scored) < 1e-4
    flat = [c for group in groups for c in group]
    assert seen[-1] == (12, sum(len(c.token_ids) for c in flat))
    assert {c.finish_reason for c in flat} == {"stop", "length"}
    for c in flat:
        assert c.stopped == (c.token_ids[-1] in ENDS)
        assert c.stopped or len(c.token_ids) == 12
        assert not set(c.token_ids[:-1]) & ENDS
    assert flat[0].text == "".join(f"{token} " for token in flat[0].token_ids if token != 2)


@pytest.mark.parametrize(
    ("ids", "said"), [((5, 128), "has the token 128, but the model has rows for 128 alone"), ((), "has no tokens")]
)
def test_a_prompt_that_the_model_cannot_read_is_refused(ids, said, serve, engine_over, tiny_llama):
    engine, prompt = engine_over(serve(tiny_llama()), tiny_llama()), Prompt(Problem("p", "?", "1"), "?", ids)
    for ask in (
        lambda: engine.sample([prompt], 2, SAMPLED, seed=3, scope="s"),
        lambda: engine.stream(prompt, SAMPLED, seed=3, on_text=print),
    ):
        with pytest.raises(ModelError, match=f"problem 'p' {said}"):
            ask()


def test_end_tokens_that_the_model_cannot_sample_are_left_out(serve, engine_over, tiny_llama, make_prompts):
    """vLLM refuses them."""
    engine = engine_over(serve(tiny_llama()), tiny_llama(), ends=(2, 127, 128, 500))
    assert engine.end_token_ids == {2, 127}


@pytest.mark.parametrize("room", [2, 40])
def test_the_probe_fits_a_short_context(room, serve, engine_over, tiny_llama):
    server = serve(tiny_llama(), max_model_tokens=room)
    engine_over(server, tiny_llama())
    assert server.backend.asked == [1]


def test_a_temperature_that_vllm_would_replace_or_refuse_is_refused(serve, engine_over, tiny_llama, make_prompts):
    """It samples at 0.01 in place of lower ones, and the log-probabilities would be those of another distribution."""
    engine, prompts = engine_over(serve(tiny_llama()), tiny_llama()), make_prompts([3])
    with pytest.raises(ConfigError, match=r"temperature is 0\.005, but vLLM samples at 0\.01"):
        engine.sample(prompts, 1, SamplingSettings(max_tokens=2, temperature=0.005), seed=3, scope="s")
    with pytest.raises(ConfigError, match=r"temperature is 2\.5, but vLLM .* takes none above 2: ask for one between"):
        engine.sample(prompts, 1, SamplingSettings(max_tokens=2, temperature=2.5), seed=3, scope="s")
    for settings in ({"temperature": 0.01}, {"temperature": 2.0}, {"temperature": 0.005, "greedy": True}):
        assert len(engine.sample(prompts, 1, SamplingSettings(max_tokens=2, **settings), seed=3, scope="s")) == 1
    with pytest.raises(ConfigError, match=r"rollout\.temperature is 0\.005, but vLLM samples at 0\.01"):
        Config(rollout={"engine": "vllm", "temperature": 0.005})
    with pytest.raises(ConfigError, match=r"rollout\.temperature is 2\.5, but vLLM .* takes none above 2 \(rollout.engine\)"):
        Config(rollout={"engine": "vllm", "temperature": 2.5})
    with pytest.raises(ConfigError, match=r"evaluation\.temperature is 0\.005"):
        Config(rollout={"engine": "vllm"}, evaluation={"temperature": 0.005})
    Config(rollout={"engine": "vllm"}, evaluation={"temperature": 0.005, "modes": ["greedy"]})


def test_each_prompt_s_completions_end_at_its_own_limit(serve, engine_over, tiny_llama, make_prompts, ids_of):
    """A server whose context has no room for the longest limit behind the longest prompt takes the request."""
    prompts, limits, settings = make_prompts(LENGTHS), (40, 2, 7), SamplingSettings(max_tokens=48)
    whole = engine_over(serve(tiny_llama()), tiny_llama()).serve(SampleRequest(prompts, 3, settings, 3, "s"))
    engine = engine_over(serve(tiny_llama(), max_model_tokens=48), tiny_llama())
    cut = engine.serve(SampleRequest(prompts, 3, settings, 3, "s", limits=limits))
    assert ids_of(cut) == [[ids[:limit] for ids in group] for limit, group in zip(limits, ids_of(whole), strict=True)]


def test_a_completion_s_name_alone_decides_its_seed(serve, engine_over, tiny_llama, make_prompts, ids_of):
    prompts, engine = make_prompts(LENGTHS), None
    engine = engine_over(serve(tiny_llama()), tiny_llama())
    first = ids_of(engine.sample(prompts, 3, SAMPLED, seed=3, scope="s"))
    assert ids_of(engine.sample(prompts[::-1], 3, SAMPLED, seed=3, scope="s"))[::-1] == first
    assert ids_of(engine.sample(prompts[1:2], 3, SAMPLED, seed=3, scope="s")) == first[1:2]
    for other in ({"seed": 4, "scope": "s"}, {"seed": 3, "scope": "t"}):
        assert ids_of(engine.sample(prompts, 3, SAMPLED, **other)) != first
    seeds = {
        request_seed(seed, scope, problem, sample) for seed in (0, 1) for scope in "ab" for problem in "pq" for sample in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**62 for seed in seeds)


@pytest.mark.parametrize("kind", ["tied", "untied", "adapter"])
@pytest.mark.parametrize(
    "bucket_bytes", [pytest.param(1, marks=pytest.mark.slow), 40_000, pytest.param(2**28, marks=pytest.mark.slow)]
)
def test_every_update_reaches_the_sampler(
    kind, bucket_bytes, serve, engine_over, tiny_llama, tiny_qwen2, make_prompts, scored, shifted
):
    pytest.importorskip("peft")
    make = {"tied": lambda: tiny_llama(tie_word_embeddings=True), "untied": tiny_llama, "adapter": tiny_qwen2}[kind]
    model, prompts = make(), make_prompts(LENGTHS)
    if kind == "adapter":
        model = attach(model, peft_config_of(LoraConfig(rank=4)))
    server = serve(make())
    engine = engine_over(server, model, bucket_bytes=bucket_bytes)
    assert server.backend.files == {1: len(list(make().parameters())), 40_000: server.backend.files, 2**28: 1}[bucket_bytes]
    for version in (1, 2):
        before = engine.sample(prompts, 2, SAMPLED, seed=1, scope=str(version))
        shifted(model)
        assert same(model, prompts, before, scored) > 0.05  # the change is one that would show
        engine.refresh(version)
        after = engine.sample(prompts, 2, SAMPLED, seed=1, scope=str(version))
        assert same(model, prompts, after, scored) < 1e-4
        assert {c.policy_version for group in after for c in group} == {version}


def test_an_update_under_the_same_version_is_pushed_too(serve, engine_over, tiny_llama, make_prompts, scored, shifted):
    """After the warm start the version is still 0."""
    model, prompts = tiny_llama(), make_prompts([5])
    engine = engine_over(serve(tiny_llama()), model)
    shifted(model)
    engine.refresh(0)
    assert same(model, prompts, engine.sample(prompts, 2, SAMPLED, seed=1, scope="s"), scored) < 1e-4


@pytest.mark.parametrize("settings", [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"greedy": True}])
def test_every_setting_arrives(settings, serve, engine_over, tiny_llama, make_prompts, scored):
    model, prompts = tiny_llama(), make_prompts([7])
    engine = engine_over(serve(tiny_llama()), model)
    ((one, two),) = engine.sample(prompts, 2, SamplingSettings(max_tokens=6, **settings), seed=1, scope="s")
    own = [scored(model, prompts[0], c) for c in (one, two)]
    if "greedy" in settings:
        assert one.token_ids == two.token_ids
        assert (own[0] - torch.tensor(one.logprobs)).abs().max() < 1e-4
    else:  # under the distribution that was sampled, which is not the plain one
        assert all((o - torch.tensor(c.logprobs)).abs().max() > 0.01 for o, c in zip(own, (one, two), strict=True))


def test_reading_along_gives_the_same_text_piece_by_piece(serve, engine_over, tiny_llama, make_prompts):
    engine, pieces = engine_over(serve(tiny_llama()), tiny_llama()), []
    completion = engine.stream(make_prompts([5])[0], SAMPLED, seed=2, on_text=pieces.append)
    assert "".join(pieces) == completion.text
    assert len(pieces) > 2


def test_weights_may_go_through_a_folder_that_both_see(serve, engine_over, tiny_llama, make_prompts, scored, tmp_path):
    shared = tmp_path / "both"
    shared.mkdir()
    model, prompts = tiny_llama(), make_prompts(LENGTHS)
    engine = engine_over(serve(tiny_llama(), shared=shared), model, shared=shared, bucket_bytes=40_000)
    assert same(model, prompts, engine.sample(prompts, 2, SAMPLED, seed=1, scope="s"), scored) < 1e-4
    assert list(shared.iterdir()) == []  # nothing is left lying


def test_processes_sample_their_own_share_and_only_one_pushes(serve, tiny_llama, tokenizer, make_prompts, ids_of, in_threads):
    from groupwise.engines.vllm.client import Client
    from groupwise.engines.vllm.engine import VllmEngine
    from groupwise.engines.wrappers import DealtEngine
    from groupwise.models.load import Policy

    prompts, server = make_prompts(LENGTHS), serve(tiny_llama())
    replicas = [tiny_llama(), tiny_llama()]

    def work(world):
        policy = Policy(replicas[world.rank], tokenizer, (2, 5), context_length=256, name="some/model")
        engine = VllmEngine(policy, Client(server.url), world)
        engine.refresh(1)
        try:
            return ids_of(DealtEngine(engine, world).sample(prompts, 2, SAMPLED, seed=3, scope="s"))
        finally:
            engine.close()

    alone = work(World())
    assert comes(lambda: server.service.hello()["used_by"] is None), "it is free once it has seen the connection's end"
    loads = server.backend.loads
    assert in_threads(2, work) == [alone, alone]
    assert server.backend.loads == loads + 2


def test_processes_that_name_different_servers_are_told(serve, tiny_llama, tokenizer, in_threads):
    from groupwise.engines.vllm.client import Client
    from groupwise.engines.vllm.engine import VllmEngine
    from groupwise.models.load import Policy

    servers, replicas = [serve(tiny_llama()), serve(tiny_llama())], [tiny_llama(), tiny_llama()]

    def work(world):
        policy = Policy(replicas[world.rank], tokenizer, (2, 5), context_length=256, name="some/model")
        VllmEngine(policy, Client(servers[world.rank].url), world)

    with pytest.raises(ConfigError, match="leads the processes to different servers"):
        in_threads(2, work)
    assert [server.backend.loads for server in servers] == [0, 0]


def test_the_mismatch_is_corrected_for_unless_something_else_is_said():
    assert Config(rollout={"engine": "vllm"}).algorithm.correction == CorrectionConfig()
    assert Config(rollout={"engine": "vllm"}, algorithm={"correction": None}).algorithm.correction is None
    assert Config(rollout={"engine": "vllm"}, algorithm={"preset": "dapo"}).algorithm.correction == CorrectionConfig()
    assert Config(rollout={"engine": "builtin"}).algorithm.correction is None
    assert Config().algorithm.correction is None  # and the shared default is not touched
