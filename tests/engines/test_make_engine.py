"""Which engine a run gets, and on whose tensors it works."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from groupwise.config import load_config
from groupwise.config.schema import RolloutConfig
from groupwise.distributed import World
from groupwise.engines import SamplingSettings, check_engine, check_quantization, make_engine
from groupwise.engines.base import COLDEST, Engine, SampleRequest
from groupwise.engines.builtin import decode
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.transformers import TransformersEngine
from groupwise.engines.turns import Turns, serve_by_prefixes
from groupwise.engines.wrappers import DealtEngine, QueuedRequest, SamplingThread
from groupwise.errors import ConfigError, ModelError, TrainingError
from groupwise.models.decoder import Decoder
from groupwise.models.load import Policy
from groupwise.training.setup import prepare
from groupwise.types import Completion, Problem, Prompt


def policy_of(model):
    return Policy(model, tokenizer=None, end_token_ids=(2, 5), context_length=256, name="some/model")


@pytest.mark.parametrize("name", ["builtin", "transformers"])
def test_a_token_without_a_row_is_refused_before_it_is_looked_up(name, tiny_llama):
    """On a GPU it would end the process."""
    engine = make_engine(policy_of(tiny_llama()), RolloutConfig(engine=name))
    prompts = [Prompt(Problem("p", "?", "1"), "?", ids) for ids in ((5, 127), (5, 128))]
    for ask in (
        lambda: engine.sample(prompts, 2, SamplingSettings(max_tokens=4), seed=0, scope="s"),
        lambda: engine.stream(prompts[1], SamplingSettings(max_tokens=4), seed=0, on_text=print),
    ):
        with pytest.raises(ModelError, match="problem 'p' has the token 128, but the model has rows for 128 alone"):
            ask()


@pytest.mark.parametrize("name", ["builtin", "transformers"])
def test_a_prompt_without_tokens_is_refused(name, tiny_llama):
    """It would go on from another one's."""
    engine = make_engine(policy_of(tiny_llama()), RolloutConfig(engine=name))
    prompts = [Prompt(Problem(which, "?", "1"), "?", ids) for which, ids in (("full", (5, 6)), ("bare", ()))]
    with pytest.raises(ModelError, match="problem 'bare' has no tokens"):
        engine.sample(prompts, 2, SamplingSettings(max_tokens=4), seed=0, scope="s")
    with pytest.raises(ModelError, match="problem 'bare' has no tokens"):
        engine.stream(prompts[1], SamplingSettings(max_tokens=4), seed=0, on_text=print)


@pytest.mark.parametrize(
    ("name", "expected"), [("auto", BuiltinEngine), ("builtin", BuiltinEngine), ("transformers", TransformersEngine)]
)
def test_a_covered_architecture(name, expected, tiny_llama):
    engine = make_engine(policy_of(tiny_llama()), RolloutConfig(engine=name, max_concurrent_sequences=7))
    assert type(engine) is expected
    assert (engine.max_rows, engine.end_token_ids) == (7, {2, 5})


def test_the_builtin_engine_works_on_the_trained_tensors(tiny_llama):
    policy = policy_of(tiny_llama())
    scorer = Decoder(policy.model)
    assert make_engine(policy, RolloutConfig(), scorer).decoder is scorer
    assert make_engine(policy, RolloutConfig(engine="transformers"), scorer).model is policy.model


def test_another_architecture_falls_back_or_is_refused(tiny_gpt2):
    assert isinstance(make_engine(policy_of(tiny_gpt2()), RolloutConfig()), TransformersEngine)
    with pytest.raises(ConfigError, match=r"some/model.*gpt2.*rollout.engine=transformers"):
        make_engine(policy_of(tiny_gpt2()), RolloutConfig(engine="builtin"))


class Forgetful(Engine):
    """Says nothing of the temperature that it samples at."""

    def serve(self, request, on_progress=None):
        return [(Completion("a", (1,), (-0.5,), "stop"),) for _ in request.prompts]

    def refresh(self, policy_version):
        pass


def test_samples_of_another_temperature_are_refused(make_prompts):
    """They would be scored at another temperature than they were drawn at, and only the sampler's mismatch would show it."""
    prompts = make_prompts([3])
    with pytest.raises(TrainingError, match=r"Forgetful was asked .* temperature 0\.7 .* say 1: .*temperature=request"):
        Forgetful().sample(prompts, 1, SamplingSettings(max_tokens=4, temperature=0.7), seed=0, scope="s")
    for settings in (SamplingSettings(max_tokens=4), SamplingSettings(max_tokens=4, temperature=0.7, greedy=True)):
        assert len(Forgetful().sample(prompts, 1, settings, seed=0, scope="s")) == 1


def sampled_ahead(engine, request):
    thread, queued = SamplingThread(torch.device("cpu")), QueuedRequest(engine, request)
    thread.put(queued)
    try:
        return thread.wait(queued)
    finally:
        thread.close()


@pytest.mark.parametrize(
    "ask",
    [
        sampled_ahead,
        lambda engine, request: DealtEngine(engine, World()).serve_checked(request),
        lambda engine, request: serve_by_prefixes(engine, request, Turns(None)),
    ],
    ids=["ahead", "divided", "episodes"],
)
def test_samples_of_another_temperature_are_refused_whatever_is_around_the_engine_that_is_named(ask, make_prompts):
    with pytest.raises(TrainingError, match=r"^Forgetful was asked for completions at temperature 0\.7 and gave some that say 1"):
        ask(Forgetful(), SampleRequest(make_prompts([3]), 1, SamplingSettings(max_tokens=4, temperature=0.7), 0, "s"))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(
    ("ids", "logprobs", "samples", "said"),
    [
        ((5, 2), (-0.5,), 2, "gave a completion of 2 tokens with 1 log-probabilities: its serve must give at least one token"),
        ((), (), 2, "gave a completion of 0 tokens with 0 log-probabilities"),
        ((5,), (-0.5,), 1, r"was asked for 2 completions for each of 2 prompts and gave \[2, 1\]: its serve must give a tuple"),
        ((5,), (-0.5,), 0, r"was asked for 2 completions for each of 2 prompts and gave \[2\]"),
    ],
    ids=["a log-probability too few", "no tokens", "a sample too few", "a prompt too few"],
)
def test_what_cannot_be_learnt_from_is_refused_where_it_was_sampled(ids, logprobs, samples, said, greedy, make_prompts):
    """A log-probability too few would move all that follow to other tokens."""

    class Careless(Forgetful):
        def serve(self, request, on_progress=None):
            whole, other = Completion("a", (5, 2), (-0.5, -0.5), "stop"), Completion("a", ids, logprobs, "stop")
            return [(whole, whole), (other,) * samples][: 1 + bool(samples)]

    with pytest.raises(TrainingError, match=f"^Careless {said}"):
        Careless().sample(make_prompts([3, 4]), 2, SamplingSettings(max_tokens=4, greedy=greedy), seed=0, scope="s")


def test_what_goes_by_the_places_of_all_prompts_is_not_divided(make_prompts):
    request = SampleRequest(make_prompts([3]), 1, SamplingSettings(max_tokens=4), 0, "s", limits=[2])
    with pytest.raises(AssertionError, match="by the places of all prompts"):
        DealtEngine(Forgetful(), World()).serve(request)


PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/own-engine.md"


@pytest.fixture
def my_engine(tmp_path):
    """The file of the how-to page."""
    (text,) = (
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S) if "my_engine.py" in code
    )
    path = tmp_path / "my_engine.py"
    path.write_text(text)
    return path


def test_an_engine_of_ones_own_is_made_of_its_file(my_engine, tiny_llama, tokenizer, make_prompts):
    """What it samples is what the trainer scores, and greedily what the built-in engine samples."""
    rollout, prompts = RolloutConfig(engine=f"{my_engine}:OneAtATime"), make_prompts([5, 1, 9])
    tokenizer.decode = lambda ids, skip_special_tokens, **_: " ".join(map(str, ids))
    engine = make_engine(Policy(tiny_llama(), tokenizer, (2, 11, 60), 256, "some/model"), rollout)
    engine.refresh(3)
    groups = engine.sample(prompts, 2, SamplingSettings(max_tokens=9, temperature=0.8), seed=1, scope="s")
    assert [len(group) for group in groups] == [2, 2, 2]
    assert {completion.policy_version for group in groups for completion in group} == {3}
    assert {completion.temperature for group in groups for completion in group} == {0.8}
    decoder = Decoder(tiny_llama())
    batch = decoder.prepare([(p.token_ids, [c.token_ids for c in group]) for p, group in zip(prompts, groups, strict=True)])
    recorded = torch.tensor([x for group in groups for c in group for x in c.logprobs])
    torch.testing.assert_close(decoder.logprobs(batch, 0.8).detach(), recorded, rtol=1e-5, atol=1e-5)
    greedy = SamplingSettings(max_tokens=9, greedy=True)
    expected = BuiltinEngine(decoder, tokenizer, (2, 11, 60)).sample(prompts, 1, greedy, seed=1, scope="s")
    found = engine.sample(prompts, 1, greedy, seed=1, scope="s")
    assert [[c.token_ids for c in group] for group in found] == [[c.token_ids for c in group] for group in expected]
    told = []
    assert engine.stream(prompts[0], greedy, seed=1, on_text=told.append).text == "".join(told)
    assert (engine.holds_weights, engine.limit, engine.metrics()) == (False, None, {})
    with pytest.raises(ConfigError, match="OneAtATime draws from all tokens"):
        make_engine(engine.policy, rollout.model_copy(update={"top_p": 0.5}))


def test_a_run_asks_for_weights_of_8_bits_before_it_reads_any(monkeypatch):
    monkeypatch.setattr(decode.native, "fits", lambda weight: False)
    with pytest.raises(ConfigError, match="cannot be sampled with weights of 8 bits"):
        prepare(load_config("quickstart", ["rollout.quantization=8bit"]))
    prepare(load_config("quickstart"))


def test_weights_of_8_bits_need_kernels_and_a_model_that_is_covered(tiny_llama, tokenizer, monkeypatch):
    policy, rollout = Policy(tiny_llama(), tokenizer, (2,), 256, "some/model"), RolloutConfig(quantization="8bit")
    config = load_config(None, ["rollout.quantization=8bit", "model.dtype=float32", "model.device=cpu"])
    if decode.why_not_in_8_bits(torch.device("cpu"), torch.float32) is None:
        assert isinstance(make_engine(policy, rollout), BuiltinEngine)
        check_quantization(config, policy.model.config)
        monkeypatch.setattr(decode, "_apart_in_8_bits", lambda dtype: 0.3)
        with pytest.raises(
            ConfigError, match=r"rollout\.quantization is 8bit, but some/model cannot be sampled .* 0\.3 apart from"
        ):
            make_engine(policy, rollout)
        with pytest.raises(ConfigError, match=r"smollm2-135m-instruct cannot be sampled .* 0\.3 apart from"):
            check_quantization(config, policy.model.config)
    monkeypatch.setattr(decode.native, "packs", lambda weight: False)
    with pytest.raises(ConfigError, match=r"(left out on it|kernels are .*)\. Set it to none"):
        make_engine(policy, rollout)
    monkeypatch.setattr(decode.native, "fits", lambda weight: False)
    with pytest.raises(
        ConfigError,
        match=r"(no kernels for torch\.float32, or they were left out on this machine|kernels are .*)\. Set it to none",
    ):
        make_engine(policy, rollout)
    assert decode.why_not_in_8_bits(torch.device("cuda"), torch.float32) == "the model is on cuda, and they are for CPUs"
    with pytest.raises(ConfigError, match="smollm2-135m-instruct cannot be sampled with weights of 8 bits: "):
        check_quantization(config, AutoConfig.for_model("gpt2"))
    monkeypatch.setattr("groupwise.models.decoder.why_unsupported", lambda model: "it is unheard of")
    with pytest.raises(ConfigError, match=r"cannot be sampled with weights of 8 bits: it is unheard of\. Set it to none"):
        make_engine(policy, rollout)


def test_where_products_of_bf16_alone_are_missing_the_remedy_is_float32(tiny_llama, tokenizer, monkeypatch):
    """As on processors with AVX-512 and without AVX512-BF16, where `dtype: auto` is bfloat16."""
    if (why := decode.why_not_in_8_bits(torch.device("cpu"), torch.float32)) is not None:
        pytest.skip(why)
    packs = decode.native.packs
    monkeypatch.setattr("groupwise.engines.builtin.fast_paths.check_fast_paths", lambda *_: [])  # a clock might leave them out
    monkeypatch.setattr(decode.native, "packs", lambda like: like.dtype == torch.float32 and packs(like))
    policy = Policy(tiny_llama().bfloat16(), tokenizer, (2,), 256, "some/model")
    said = r"not for this processor, or were left out on it\. Set model\.dtype=float32, or rollout\.quantization to none"
    with pytest.raises(ConfigError, match=said):
        make_engine(policy, RolloutConfig(quantization="8bit"))
    for dtype in ("bfloat16", "float32"):
        config = load_config(None, ["rollout.quantization=8bit", f"model.dtype={dtype}", "model.device=cpu"])
        with nullcontext() if dtype == "float32" else pytest.raises(ConfigError, match=said):
            check_quantization(config, policy.model.config)


def test_a_base_of_8_bits_is_not_rounded_to_8_bits_once_more(tiny_llama):
    """Its steps are those of the sampler's rounding: an adapter's changes, which are smaller, would be gone."""
    changed = ["rollout.quantization=8bit", "model.quantization=8bit", "model.lora={rank: 4}", "model.device=cpu"]
    with pytest.raises(ConfigError, match=r"its base is in 8 bits already, .*\. Set it to none"):
        check_quantization(load_config(None, changed), tiny_llama().config)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("class MyEngine:\n    pass", "MyEngine", "which is no engine: derive a class from groupwise.engines.Engine"),
        ("def MyEngine(policy, rollout):\n    pass", "MyEngine", "which is no engine"),
        ("from groupwise.engines import Engine\nclass MyEngine(Engine):\n    def serve(self, request, on_progress=None):\n        pass",
         "MyEngine", r"MyEngine of .*my_engine.py does not define refresh"),
        ("x = 1", "MyEngine", "no function 'MyEngine'"),
        ("import nothing_of_this_name", "MyEngine", "could not be imported: ModuleNotFoundError"),
        (None, "MyEngine", "engine file .* does not exist"),
    ],
    ids=["no engine", "a function", "half of one", "not there", "broken", "no file"],
)  # fmt: skip
def test_what_is_no_engine_is_told(tmp_path, text, name, said):
    if text is not None:
        (tmp_path / "my_engine.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        check_engine(RolloutConfig(engine=f"{tmp_path / 'my_engine.py'}:{name}"))


@pytest.mark.parametrize(
    ("name", "said"), [("vlm", "did you mean 'vllm'"), ("my_engine.py", "MyEngine"), (":MyEngine", "no engine")]
)
def test_a_name_that_no_engine_has_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, [f"rollout.engine={name}"])


def test_another_s_log_probabilities_are_corrected_for():
    def correction(engine):
        return load_config(None, [f"rollout.engine={engine}"]).algorithm.correction

    assert [correction(e) for e in ("auto", "builtin", "transformers")] == [None] * 3
    assert [correction(e).level for e in ("vllm", "my_engine.py:E")] == ["token"] * 2


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, but it must be at least 1"),
        ({"temperature": 1e-7}, "temperature is 1e-07, but it must be at least 1e-06; greedy=True takes the likeliest token"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0, but it must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ],
)
def test_settings_that_are_no_distribution_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=re.escape(rule)):
        SamplingSettings(**{"max_tokens": 4, **settings})


def test_a_run_may_not_sample_colder_than_fp32_can():
    with pytest.raises(ConfigError, match=r"rollout\.temperature is 5e-07, but must be at least 1e-06"):
        RolloutConfig(temperature=COLDEST / 2)
    assert RolloutConfig(temperature=COLDEST).temperature == COLDEST
