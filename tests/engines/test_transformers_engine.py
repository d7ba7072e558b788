"""The transformers engine: the built-in engine's samples on the same weights, and any other architecture's own distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, MambaConfig

from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.transformers import TransformersEngine
from groupwise.errors import ModelError
from groupwise.models.decoder import Decoder
from groupwise.models.module_scorer import ModuleScorer

LENGTHS = [5, 1, 17, 9, 9, 3, 40]
SAMPLED = SamplingSettings(max_tokens=24)
ENDS = (2, 11, 60, 90)


@pytest.fixture
def family(request, tiny_llama, tiny_qwen2, tiny_qwen3):
    return {"llama": tiny_llama, "qwen2": tiny_qwen2, "qwen3": tiny_qwen3}[request.param]


@pytest.fixture
def foreign(request):
    """A maker of a model that the built-in engine does not cover."""
    return request.getfixturevalue(f"tiny_{request.param}")


def scored(model, prompts, groups):
    scorer = ModuleScorer(model)
    with torch.no_grad():
        return scorer.logprobs(
            scorer.prepare([(p.token_ids, [c.token_ids for c in group]) for p, group in zip(prompts, groups, strict=True)])
        )


def recorded(groups):
    return torch.tensor([x for group in groups for completion in group for x in completion.logprobs])


@pytest.mark.parametrize(
    "settings",
    [
        SAMPLED,
        SamplingSettings(max_tokens=24, greedy=True),
        SamplingSettings(max_tokens=12, temperature=0.7, top_k=20, top_p=0.9),
    ],
    ids=["sampled", "greedy", "restricted"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"], indirect=True)
def test_both_engines_draw_the_same_completions(family, settings, tokenizer, make_prompts):
    prompts = make_prompts(LENGTHS)
    builtin = BuiltinEngine(Decoder(family()), tokenizer, ENDS)
    theirs = builtin.sample(prompts, 4, settings, seed=3, scope="s")
    for max_rows in (64, 5):
        ours = TransformersEngine(family(), tokenizer, ENDS, max_rows=max_rows).sample(prompts, 4, settings, seed=3, scope="s")
        for mine, other in zip((c for group in ours for c in group), (c for group in theirs for c in group), strict=True):
            assert (mine.token_ids, mine.finish_reason, mine.sample, mine.text) == (
                other.token_ids, other.finish_reason, other.sample, other.text,
            )  # fmt: skip
        torch.testing.assert_close(recorded(ours), recorded(theirs), rtol=1e-4, atol=1e-4)
    assert {c.finish_reason for group in ours for c in group} == {"stop", "length"}


@pytest.mark.parametrize("foreign", ["gpt2", pytest.param("gemma2", marks=pytest.mark.slow)], indirect=True)
def test_other_architectures(foreign, tokenizer, make_prompts, ids_of):
    prompts = make_prompts(LENGTHS)
    many, few = (
        TransformersEngine(foreign(), tokenizer, ENDS, max_rows=rows).sample(prompts, 4, SAMPLED, seed=3, scope="s")
        for rows in (64, 3)
    )
    assert ids_of(many) == ids_of(few)
    torch.testing.assert_close(recorded(many), scored(foreign(), prompts, many), rtol=1e-4, atol=1e-4)
    greedy = TransformersEngine(foreign(), tokenizer, ENDS).sample(
        prompts, 1, SamplingSettings(max_tokens=20, greedy=True), seed=0, scope="g"
    )
    model = foreign()
    for prompt, (completion,) in zip(prompts, greedy, strict=True):
        ids = torch.tensor([prompt.token_ids])
        config = GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=list(ENDS), pad_token_id=0)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, ids.shape[1] :]
        assert completion.token_ids == tuple(expected.tolist())


@pytest.mark.parametrize("family", ["tiny_nemotron_h", "tiny_falcon_h1"])
def test_finished_sequences_stay_where_a_layer_has_a_recurrent_state(family, request, tokenizer, make_prompts, ids_of):
    """Its cache cannot lose rows. Token by token its state differs from the whole sequence's by more rounding than attention's."""
    prompts, make = make_prompts(LENGTHS), request.getfixturevalue(family)
    many, few = (
        TransformersEngine(make(), tokenizer, ENDS, max_rows=rows).sample(prompts, 4, SAMPLED, seed=3, scope="s")
        for rows in (64, 3)
    )
    assert ids_of(many) == ids_of(few)
    assert len({len(completion.token_ids) for group in many for completion in group}) > 3
    torch.testing.assert_close(recorded(many), scored(make(), prompts, many), rtol=1e-3, atol=5e-3)


def test_a_model_without_a_cache_of_keys_and_values_is_refused_in_a_sentence(tokenizer, make_prompts):
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    engine = TransformersEngine(AutoModelForCausalLM.from_config(MambaConfig(**sizes)), tokenizer, ENDS)
    with pytest.raises(ModelError, match="a MambaForCausalLM gives no KV cache to go on from"):
        engine.sample(make_prompts([3]), 2, SAMPLED, seed=0, scope="s")


def test_the_cache_works_under_gradient_checkpointing(tiny_llama, tokenizer, make_prompts, ids_of):
    model, widths = tiny_llama(), []
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    prompts = make_prompts(LENGTHS)
    groups = TransformersEngine(model, tokenizer, ENDS).sample(prompts, 2, SAMPLED, seed=3, scope="s")
    assert widths == [40] + [1] * (len(widths) - 1)  # prompts once, then a token at a time
    assert model.training
    plain = TransformersEngine(tiny_llama(), tokenizer, ENDS).sample(prompts, 2, SAMPLED, seed=3, scope="s")
    assert ids_of(groups) == ids_of(plain)


def test_logits_are_computed_for_last_tokens_alone(tiny_llama, tokenizer, make_prompts):
    model, widths = tiny_llama(), set()
    model.lm_head.register_forward_pre_hook(lambda _, inputs: widths.add(inputs[0].shape[1]))
    TransformersEngine(model, tokenizer, ENDS).sample(make_prompts(LENGTHS), 2, SAMPLED, seed=3, scope="s")
    assert widths == {1}


def test_dropout_is_off_while_sampling(tiny_gpt2, tokenizer, make_prompts, ids_of):
    prompts = make_prompts(LENGTHS)
    groups = [
        TransformersEngine(m, tokenizer, ENDS).sample(prompts, 2, SAMPLED, seed=3, scope="s")
        for m in (tiny_gpt2(), tiny_gpt2().train())
    ]
    assert ids_of(groups[0]) == ids_of(groups[1])


def test_finished_sequences_leave_the_batch(tiny_llama, tokenizer, make_prompts):
    model, rows = tiny_llama(), []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[0]))
    groups = TransformersEngine(model, tokenizer, range(0, 128, 8)).sample(make_prompts([4, 9]), 16, SAMPLED, seed=3, scope="s")
    lengths = [len(c.token_ids) for group in groups for c in group]
    unfinished = [sum(length > step for length in lengths) for step in range(len(rows))]
    assert rows[0] == 32
    assert unfinished[-1] < 4
    assert all(left <= fed < 2 * left for fed, left in zip(rows[1:], unfinished[1:], strict=True))


def test_a_stream_is_the_sample_of_its_scope(tiny_llama, tokenizer, make_prompts):
    engine, (prompt,), pieces = TransformersEngine(tiny_llama(), tokenizer, ENDS), make_prompts([6]), []
    prompt = replace(prompt, occurrence=1)
    completion = engine.stream(prompt, SAMPLED, seed=8, on_text=pieces.append)
    assert completion == engine.sample([prompt], 1, SAMPLED, seed=8, scope="stream")[0][0]
    assert "".join(pieces) == completion.text


def test_versions_progress_and_nothing_to_do(tiny_llama, tokenizer, make_prompts):
    engine, seen = TransformersEngine(tiny_llama(), tokenizer, ENDS, max_rows=3), []
    assert engine.sample([], 4, SAMPLED, seed=0, scope="s") == []
    engine.refresh(5)
    groups = engine.sample(make_prompts([4, 9]), 4, SAMPLED, seed=0, scope="s", on_progress=lambda *numbers: seen.append(numbers))
    completions = [c for group in groups for c in group]
    assert {c.policy_version for c in completions} == {5}
    assert seen == sorted(seen)
    assert seen[-1] == (8, sum(len(c.token_ids) for c in completions))


def test_a_checkpoints_generation_config_is_not_inherited(tiny_llama, tokenizer, make_prompts, ids_of):
    model, prompts = tiny_llama(), make_prompts(LENGTHS)
    model.generation_config = GenerationConfig(do_sample=True, top_p=0.8, top_k=20, repetition_penalty=1.5, temperature=0.3)
    both = [TransformersEngine(m, tokenizer, ENDS).sample(prompts, 4, SAMPLED, seed=0, scope="s") for m in (model, tiny_llama())]
    assert ids_of(both[0]) == ids_of(both[1])
