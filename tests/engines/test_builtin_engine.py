"""The built-in engine: what it samples is the model's own distribution, and depends on nothing but names, weights and settings."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from benchmarks.first_light_one import _Stand
from groupwise.config.schema import ModelConfig
from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin import cache as cache_module
from groupwise.engines.builtin import decode as decode_module
from groupwise.engines.builtin import engine as engine_module
from groupwise.engines.builtin import runner as runner_module
from groupwise.engines.builtin.decode import why_not_in_8_bits
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.models.decoder import Decoder
from groupwise.models.embedded import EMBEDDED_NAME
from groupwise.models.load import load_policy
from groupwise.types import Problem, Prompt

LENGTHS = [5, 1, 17, 9, 9, 3, 40]
SAMPLED = SamplingSettings(max_tokens=24)
ENDS = (2, 11, 60, 90)


@pytest.fixture
def family(request):
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture
def make_engine(tokenizer, tiny_llama):
    """``make_engine(model=..., ends=..., **options)``: an engine over a tiny Llama with several end tokens."""
    return lambda model=None, ends=ENDS, **options: BuiltinEngine(Decoder(model or tiny_llama()), tokenizer, ends, **options)


def recorded(groups):
    return torch.tensor([x for group in groups for completion in group for x in completion.logprobs])


def scored(decoder, prompts, groups, temperature=1.0):
    batch = decoder.prepare([(p.token_ids, [c.token_ids for c in group]) for p, group in zip(prompts, groups, strict=True)])
    with torch.no_grad():
        return decoder.logprobs(batch, temperature)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"], indirect=True)
def test_greedy_equals_the_librarys_generate(family, make_engine, make_prompts):
    model, prompts = family(), make_prompts(LENGTHS)
    groups = make_engine(family()).sample(prompts, 1, SamplingSettings(max_tokens=30, greedy=True), seed=0, scope="greedy")
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt.token_ids])
        config = GenerationConfig(do_sample=False, max_new_tokens=30, eos_token_id=list(ENDS), pad_token_id=0)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, ids.shape[1] :]
        assert completion.token_ids == tuple(expected.tolist())
    assert {completion.finish_reason for (completion,) in groups} == {"stop", "length"}  # both happened


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"], indirect=True)
@pytest.mark.parametrize("max_rows", [1, pytest.param(3, marks=pytest.mark.slow), 13])
def test_samples_do_not_depend_on_the_rows_in_flight(family, max_rows, make_engine, make_prompts, ids_of):
    prompts = make_prompts(LENGTHS)
    many, few = (make_engine(family(), max_rows=rows).sample(prompts, 4, SAMPLED, seed=3, scope="s") for rows in (64, max_rows))
    assert ids_of(few) == ids_of(many)
    torch.testing.assert_close(recorded(few), recorded(many), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"], indirect=True)
def test_a_policy_in_8_bits_is_the_rounded_one(family, make_prompts, tokenizer):
    """Its log-probabilities are nearer to those of a model whose weights were rounded before than to the policy's own. Keys and values of
    a prompt's token are computed by the weights as they are, so they are not the same."""
    model, prompts = family(hidden_size=128, intermediate_size=96, head_dim=32), make_prompts([1] * 7)
    if (why := why_not_in_8_bits(torch.device("cpu"), torch.float32)) is not None:
        pytest.skip(why)
    decoder, settings = Decoder(model), SamplingSettings(max_tokens=40, in_8_bits=True)
    engine = BuiltinEngine(decoder, tokenizer, ENDS)
    groups = engine.sample(prompts, 8, settings, seed=3, scope="s")
    plain = BuiltinEngine(decoder, tokenizer, ENDS).sample(prompts, 8, replace(settings, in_8_bits=False), seed=3, scope="s")
    own = scored(decoder, prompts, groups)
    torch.testing.assert_close(recorded(plain), scored(decoder, prompts, plain), rtol=1e-4, atol=1e-4)  # as if nothing had been
    model.config.tie_word_embeddings = False  # what is embedded is not rounded
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            scale = (parameter.data.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
            parameter.data = (parameter.data / scale).round() * scale
    rounded = scored(Decoder(model), prompts, groups)
    from_own, from_rounded = ((recorded(groups) - x).abs().mean() for x in (own, rounded))
    assert 0 < from_rounded < 0.8 * from_own
    assert from_own < 0.1


def test_samples_do_not_depend_on_order_or_company(make_engine, make_prompts, ids_of):
    prompts, engine = make_prompts(LENGTHS), make_engine(max_rows=10)
    all_of_them = ids_of(engine.sample(prompts, 4, SAMPLED, seed=3, scope="s"))
    assert len({ids for group in all_of_them for ids in group}) > 20  # they differ from one another
    assert ids_of(engine.sample(prompts[::-1], 4, SAMPLED, seed=3, scope="s")) == all_of_them[::-1]
    assert ids_of(engine.sample(prompts[2:4], 4, SAMPLED, seed=3, scope="s")) == all_of_them[2:4]
    fewer = ids_of(engine.sample(prompts, 2, SAMPLED, seed=3, scope="s"))
    assert fewer == [group[:2] for group in all_of_them]


def test_samples_depend_on_seed_scope_problem_and_sample(make_engine, make_prompts, ids_of):
    engine, (prompt,) = make_engine(), make_prompts([6])
    other = Prompt(Problem("another", "", ""), "", prompt.token_ids)
    base = ids_of(engine.sample([prompt], 3, SAMPLED, seed=3, scope="s"))[0]
    changed = [
        engine.sample([prompt], 3, SAMPLED, seed=4, scope="s"),
        engine.sample([prompt], 3, SAMPLED, seed=3, scope="t"),
        engine.sample([other], 3, SAMPLED, seed=3, scope="s"),
    ]
    assert ids_of(engine.sample([prompt], 3, SAMPLED, seed=3, scope="s"))[0] == base
    assert len({*base, *(ids for groups in changed for ids in ids_of(groups)[0])}) == 12


def test_memory_of_earlier_calls_leaves_no_trace(make_engine, make_prompts, ids_of):
    engine = make_engine(max_rows=6)
    engine.sample(make_prompts([60, 33]), 5, SamplingSettings(max_tokens=50), seed=9, scope="before")
    again = engine.sample(make_prompts(LENGTHS), 4, SAMPLED, seed=3, scope="s")
    fresh = make_engine(max_rows=6).sample(make_prompts(LENGTHS), 4, SAMPLED, seed=3, scope="s")
    assert ids_of(again) == ids_of(fresh)
    assert recorded(again).tolist() == recorded(fresh).tolist()


@pytest.mark.parametrize("room", [1, 7, 64])
def test_samples_do_not_depend_on_how_the_cache_grows(room, make_engine, make_prompts, ids_of, monkeypatch):
    whole = make_engine(max_rows=6).sample(make_prompts(LENGTHS), 4, SAMPLED, seed=3, scope="s")
    monkeypatch.setitem(cache_module.CACHE_ROOM, "cpu", room)
    grown = make_engine(max_rows=6).sample(make_prompts(LENGTHS), 4, SAMPLED, seed=3, scope="s")
    assert ids_of(grown) == ids_of(whole)


@pytest.mark.parametrize("rows", [3, pytest.param(6, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("burst", [2, 5, 100])
def test_samples_do_not_depend_on_how_many_steps_run_between_two_looks(
    burst, rows, make_engine, make_prompts, ids_of, monkeypatch
):
    """What GPUs do: ended rows are carried along, and leave when they are many."""
    prompts = make_prompts(LENGTHS)
    single = make_engine(max_rows=rows).sample(prompts, 4, SAMPLED, seed=3, scope="s")
    monkeypatch.setitem(runner_module.BURSTS, "cpu", burst)
    progress = []
    engine = make_engine(max_rows=rows)
    bursts = engine.sample(prompts, 4, SAMPLED, seed=3, scope="s", on_progress=lambda *now: progress.append(now))
    assert ids_of(bursts) == ids_of(single)
    assert recorded(bursts).tolist() == pytest.approx(recorded(single).tolist(), abs=1e-5)
    assert progress[-1] == (4 * len(LENGTHS), sum(len(ids) for group in ids_of(single) for ids in group))
    assert len({c.finish_reason for group in bursts for c in group}) == 2  # some ended before others


@pytest.mark.parametrize("rows", [9, 20])
def test_graphs_outlive_rows_that_come_and_go(rows, make_engine, make_prompts, ids_of, monkeypatch):
    """A capture takes as long as some steps, and rows end at nearly every look. Stand-ins compute what a graph would."""
    captured, planned = [], []
    plan = engine_module.DecodeStep.plan
    engine = make_engine(max_rows=rows)
    prompts = make_prompts([5, 1, 17, 9, 3, 8, 2, 4])
    single = engine.sample(prompts, 6, SAMPLED, seed=3, scope="s")
    monkeypatch.setitem(runner_module.BURSTS, "cpu", 2)
    monkeypatch.setattr(runner_module, "GRAPHS", {"cpu"})
    monkeypatch.setattr(runner_module.Runner, "_capture", lambda runner, step: captured.append(step) or _Stand(runner, step))
    monkeypatch.setattr(engine_module.DecodeStep, "plan", lambda *a, **k: planned.append(k["spare_up_to"]) or plan(*a, **k))
    assert ids_of(engine.sample(prompts, 6, SAMPLED, seed=3, scope="s")) == ids_of(single)
    assert len(captured) <= 0.7 * len(planned), f"{len(captured)} of {len(planned)}: most graphs are good for more than one plan"
    assert planned[0] == 0, "as long as nobody has come or gone, nothing is padded"
    assert any(planned)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_step_becomes_another_only_where_a_graph_could_not_tell(make_engine, monkeypatch, kernels):
    """GPU kernels look at lengths: for them no tables are made of what each row may see."""
    monkeypatch.setattr(decode_module, "decoding_kernels_fit", lambda device: kernels)
    decoder = make_engine().decoder
    cache = cache_module.Cache(
        layers=1, kv_heads=decoder.shape.kv_heads, head_width=decoder.shape.head_width,
        groups=4, prompt_tokens=9, rows=16, completion_tokens=20,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip

    def step(*sizes, like=None):
        rows = sum(sizes)
        return engine_module.DecodeStep.plan(
            cache, group_of_row=[group for group, size in enumerate(sizes) for _ in range(size)], prompt_lengths=[9] * len(sizes),
            own_lengths=[3] * rows, last_tokens=list(range(rows)), keys=list(range(rows)), 
            turn_starts=[0] * rows, spare_up_to=16, like=like,
        )  # fmt: skip

    held = step(10, 1, 2, 2)
    assert (held.lanes.mask is None) is (held.lanes.places is None) is kernels
    tensors = held._tensors()
    assert len(held.keys) == 16, "one row is nobody's"
    assert held.take(step(10, 2, 2, 2))
    assert held.keys.tolist() == list(range(16))
    assert [x.data_ptr() for x in held._tensors()] == [x.data_ptr() for x in tensors], "in the same memory"
    assert not held.take(step(6, 2, 2, 2)), "another number of rows"
    assert not held.take(step(10, 5)), "fewer groups"
    assert held.take(step(10, 5, like=held)), "but room for four is enough"
    assert held.prompt_lengths.tolist() == [9, 9, 1, 1]
    assert not held.take(step(15, like=held)), "and places for ten are too few for fifteen"


def test_a_table_of_whole_blocks_is_filled_no_further_than_positions_are_reserved():
    cache = cache_module.Cache(
        layers=1, kv_heads=1, head_width=32, groups=1, prompt_tokens=9, rows=2, completion_tokens=40, dtype=torch.float32,
        device=torch.device("cpu"), native=True,
    )  # fmt: skip
    assert (cache.room, cache.fillable) == (32, 32)
    assert cache.reserve(40, 2)
    assert (cache.room, cache.fillable) == (64, 40)


def test_few_rows_are_padded_so_that_the_last_of_a_call_ask_for_no_graphs_of_their_own(make_engine):
    decoder = make_engine().decoder
    cache = cache_module.Cache(
        layers=1, kv_heads=decoder.shape.kv_heads, head_width=decoder.shape.head_width,
        groups=4, prompt_tokens=9, rows=64, completion_tokens=20,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip

    def rows(count, most):
        step = engine_module.DecodeStep.plan(
            cache, group_of_row=[0] * count, prompt_lengths=[9], own_lengths=[3] * count, last_tokens=[1] * count, keys=[1] * count,
            turn_starts=[0] * count, spare_up_to=most,
        )  # fmt: skip
        return len(step.keys)

    assert [rows(count, 64) for count in (1, 5, 31, 32)] == [32] * 4
    assert [rows(count, 64) for count in (33, 49, 64)] == [48, 64, 64]
    assert rows(5, 12) == 12, "the table has no more"
    assert rows(5, 0) == 5, "on CPUs nothing is padded"


@pytest.mark.parametrize("most", [1, 7, 256])
def test_buckets_hold_what_they_are_for_and_little_more(most):
    found = [decode_module.in_bucket(count, most) for count in range(1, most + 1)]
    assert all(count <= bucket <= min(most, 1.5 * count) for count, bucket in enumerate(found, 1))
    assert len(set(found)) <= 2 * most.bit_length()


def test_prompts_computed_in_parts_give_the_same(make_engine, make_prompts, ids_of, monkeypatch):
    whole = make_engine().sample(make_prompts(LENGTHS), 2, SAMPLED, seed=3, scope="s")
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 12)
    assert ids_of(make_engine().sample(make_prompts(LENGTHS), 2, SAMPLED, seed=3, scope="s")) == ids_of(whole)


@pytest.fixture
def alike():
    """``alike(shared, rests)``: prompts of ``shared`` tokens that are the same, and of others behind them."""

    def make(shared, rests):
        tokens = iter(torch.randint(3, 128, (shared + sum(rests),), generator=torch.Generator().manual_seed(1)).tolist())
        start = tuple(next(tokens) for _ in range(shared))
        ends = [(3 + i, *(next(tokens) for _ in range(n - 1))) for i, n in enumerate(rests)]  # they differ at once
        return [Prompt(Problem(f"p{i}", "", ""), "", start + end) for i, end in enumerate(ends)]

    return make


@pytest.fixture
def computed(monkeypatch):
    """The lengths of the prompts that were computed by themselves."""
    lengths, pack = [], engine_module.pack_prompts
    monkeypatch.setattr(
        engine_module, "pack_prompts", lambda prompts, common: lengths.extend(map(len, prompts)) or pack(prompts, common)
    )
    return lengths


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"], indirect=True)
@pytest.mark.parametrize("max_rows", [2, 64])
@pytest.mark.parametrize("greedy", [False, True])
def test_what_prompts_begin_with_is_computed_once_and_changes_nothing(
    family, max_rows, greedy, make_engine, alike, computed, ids_of
):
    prompts, asked = alike(20, [1, 2, 7, 40, 3]), SamplingSettings(max_tokens=24, greedy=greedy)
    engine = make_engine(family(), max_rows=max_rows)
    together = engine.sample(prompts, 1, asked, seed=3, scope="s")
    assert computed == [20]
    alone = [engine.sample([prompt], 1, asked, seed=3, scope="s")[0] for prompt in prompts]
    assert computed[1:] == [21, 22, 27, 60, 23]
    assert ids_of(together) == ids_of(alone)
    torch.testing.assert_close(recorded(together), recorded(alone), rtol=1e-5, atol=1e-4)
    if not greedy:
        torch.testing.assert_close(recorded(together), scored(engine.decoder, prompts, together), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("samples", "shared", "own", "lengths"),
    [
        (1, 20, 5, [20]),
        (4, 20, 5, [25, 25, 25]),  # 20 + 12 x 5 tokens in place of 75: each row would compute its rest again
        (4, 40, 2, [40]),
        (1, 1, 20, [21, 21, 21]),
    ],
)
def test_the_beginning_is_shared_where_that_saves_a_tenth(samples, shared, own, lengths, make_engine, alike, computed, ids_of):
    prompts, engine = alike(shared, [own] * 3), make_engine()
    together = engine.sample(prompts, samples, SAMPLED, seed=3, scope="s")
    assert computed == lengths
    assert ids_of(together) == ids_of([engine.sample([prompt], samples, SAMPLED, seed=3, scope="s")[0] for prompt in prompts])


def test_a_prompt_with_which_all_others_begin_has_no_tokens_of_its_own(make_engine, alike, computed, ids_of):
    longer = alike(20, [4, 9])
    prompts = [Prompt(Problem("short", "", ""), "", longer[0].token_ids[:20]), *longer]
    engine = make_engine()
    together = engine.sample(prompts, 1, SAMPLED, seed=3, scope="s")
    assert computed == [20]
    assert ids_of(together) == ids_of([engine.sample([prompt], 1, SAMPLED, seed=3, scope="s")[0] for prompt in prompts])


@pytest.fixture
def rows_computed(monkeypatch):
    """Rows of each pass over prompts, by the sequences that they are computed as: the beginning, and each rest."""
    rows, pack = [], engine_module.pack_prompts

    def counted(*arguments):
        packed = pack(*arguments)
        rows.append([span.length for span in packed.spans])
        return packed

    monkeypatch.setattr(engine_module, "pack_prompts", counted)
    return rows


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"], indirect=True)
@pytest.mark.parametrize(
    ("max_rows", "rows"),
    [(64, [[20, 5, 6, 2, 9]]), (8, [[20, 5, 6], [20, 2, 9]]), (4, [[20, 5], [20, 6], [20, 2], [20, 9]])],
)
def test_groups_that_start_together_compute_the_beginning_of_their_prompts_once(
    family, max_rows, rows, make_engine, alike, rows_computed, ids_of
):
    prompts, engine = alike(20, [5, 6, 2, 9]), make_engine(family(), ends=(), max_rows=max_rows)
    together = engine.sample(prompts, 4, SamplingSettings(max_tokens=3), seed=3, scope="s")
    assert rows_computed == rows
    alone = [engine.sample([prompt], 4, SamplingSettings(max_tokens=3), seed=3, scope="s")[0] for prompt in prompts]
    assert ids_of(together) == ids_of(alone)
    torch.testing.assert_close(recorded(together), scored(engine.decoder, prompts, together), rtol=1e-4, atol=1e-4)


def test_groups_share_all_but_the_last_token_of_the_shortest_prompt(make_engine, alike, rows_computed, ids_of):
    longer = alike(20, [4, 9])
    prompts = [Prompt(Problem("short", "", ""), "", longer[0].token_ids[:20]), *longer]
    engine = make_engine()
    together = engine.sample(prompts, 8, SAMPLED, seed=3, scope="s")
    assert rows_computed == [[19, 1, 5, 10]]
    assert ids_of(together) == ids_of([engine.sample([prompt], 8, SAMPLED, seed=3, scope="s")[0] for prompt in prompts])


@pytest.mark.parametrize("samples", [4, 1])
def test_prompts_with_little_in_common_are_computed_whole(samples, make_engine, alike, rows_computed):
    make_engine().sample(alike(2, [30, 20, 25]), samples, SAMPLED, seed=3, scope="s")
    assert rows_computed == [[32, 22, 27]]


def test_a_beginning_counts_once_in_what_a_pass_may_compute(make_engine, alike, rows_computed, ids_of, monkeypatch):
    prompts, engine = alike(20, [5, 6, 2, 9]), make_engine()
    whole = engine.sample(prompts, 4, SAMPLED, seed=3, scope="s")
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 31)
    assert ids_of(engine.sample(prompts, 4, SAMPLED, seed=3, scope="s")) == ids_of(whole)
    assert rows_computed[1:] == [[20, 5, 6], [20, 2, 9]]


def test_the_beginning_is_that_of_all_prompts_of_a_request(make_engine, alike, rows_computed):
    first, second, third = alike(20, [8, 8, 8])
    second = Prompt(second.problem, "", (*first.token_ids[:25], *second.token_ids[20:24]))
    make_engine(ends=(), max_rows=8).sample([first, second, third], 4, SAMPLED, seed=3, scope="s")
    assert rows_computed == [[20, 8, 9], [20, 8]]


def test_equal_prompts_count_once_where_a_beginning_may_save(make_engine, alike, rows_computed):
    one, other = alike(12, [8, 8])
    again = [Prompt(Problem(f"again {n}", "", ""), "", one.token_ids) for n in range(3)]
    make_engine().sample([one, *again, other], 4, SAMPLED, seed=3, scope="s")
    assert rows_computed == [[12, 8, 8]]


def test_attention_that_copies_what_comes_before_computes_prompts_whole(make_engine, alike, rows_computed, ids_of):
    prompts, engine = alike(20, [5, 6, 2, 9]), make_engine()
    shared = engine.sample(prompts, 4, SAMPLED, seed=3, scope="s")
    engine.decoder.attention = "sdpa"
    assert ids_of(engine.sample(prompts, 4, SAMPLED, seed=3, scope="s")) == ids_of(shared)
    assert rows_computed[1:] == [[25, 26, 22, 29]]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"], indirect=True)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_log_probabilities_are_those_the_trainer_computes(family, temperature, make_engine, make_prompts):
    engine, prompts = make_engine(family(), max_rows=9), make_prompts(LENGTHS)
    chosen = SamplingSettings(max_tokens=24, temperature=temperature)
    groups = engine.sample(prompts, 4, chosen, seed=1, scope="s")
    torch.testing.assert_close(recorded(groups), scored(engine.decoder, prompts, groups, temperature), rtol=1e-4, atol=1e-4)


def test_first_two_tokens_have_the_models_joint_distribution(tiny_qwen3, tokenizer, make_prompts, chi_square):
    model, (prompt,), count = tiny_qwen3(vocab_size=12), make_prompts([4], vocabulary=12), 6000
    engine = BuiltinEngine(Decoder(tiny_qwen3(vocab_size=12)), tokenizer, (2,), max_rows=1000)
    for temperature in (1.0, 0.5):
        chosen = SamplingSettings(max_tokens=2, temperature=temperature)
        (group,) = engine.sample([prompt], count, chosen, seed=0, scope="counts")
        with torch.no_grad():
            texts = torch.tensor([[*prompt.token_ids, token] for token in range(12)])
            logits = model(texts).logits.double() / temperature
        joint = logits[0, -2].softmax(0)[:, None] * logits[:, -1].softmax(-1)
        joint[2] = torch.nn.functional.one_hot(torch.tensor(0), 12) * logits[0, -2].softmax(0)[2]  # an end token ends
        counts = torch.zeros(12, 12)
        for completion in group:
            counts[completion.token_ids[0], completion.token_ids[1] if len(completion.token_ids) > 1 else 0] += 1
        assert chi_square(counts.flatten(), joint.flatten()) < 4


def test_every_end_token_stops_and_is_kept(make_engine, make_prompts):
    prompts, engine = make_prompts(LENGTHS), make_engine()
    groups = engine.sample(prompts, 12, SAMPLED, seed=5, scope="s")
    completions = [completion for group in groups for completion in group]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in stopped} == set(ENDS)
    for completion in completions:
        assert len(completion.token_ids) == len(completion.logprobs) <= SAMPLED.max_tokens
        assert not set(completion.token_ids[:-1]) & set(ENDS)
        assert (completion.token_ids[-1] in ENDS) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == SAMPLED.max_tokens
        assert completion.text == "".join(f"{t} " for t in completion.token_ids if t != 2)
    assert any(c.finish_reason == "length" for c in completions)
    assert [[c.sample for c in group] for group in groups] == [list(range(12))] * len(prompts)


def test_an_end_token_at_the_limit_is_a_stop(make_engine, make_prompts):
    groups = make_engine(ends=tuple(range(128))).sample(
        make_prompts([3, 4]), 2, SamplingSettings(max_tokens=1), seed=0, scope="s"
    )
    assert [(c.finish_reason, len(c.token_ids)) for group in groups for c in group] == [("stop", 1)] * 4


@pytest.mark.parametrize("max_rows", [1, 2, 64])
def test_nothing_is_lost_when_all_rows_end_with_their_first_token(max_rows, make_engine, make_prompts, ids_of):
    prompts, seen = make_prompts(LENGTHS), []
    engine = make_engine(max_rows=max_rows)
    groups = engine.sample(
        prompts, 3, SamplingSettings(max_tokens=1), seed=0, scope="s", on_progress=lambda *numbers: seen.append(numbers)
    )
    assert [len(group) for group in groups] == [3] * len(prompts)
    assert seen[-1] == (21, 21)
    longer = engine.sample(prompts, 3, SamplingSettings(max_tokens=2), seed=0, scope="s")
    assert ids_of(groups) == [[ids[:1] for ids in group] for group in ids_of(longer)]


def test_no_prompts_no_completions(make_engine):
    assert make_engine().sample([], 4, SAMPLED, seed=0, scope="s") == []


def test_a_call_leaves_no_circle_that_would_keep_its_cache_while_learning(make_engine, make_prompts, monkeypatch):
    made = []

    class Noted(cache_module.Cache):
        def __init__(self, **shape):
            super().__init__(**shape)
            made.append(weakref.ref(self))

    monkeypatch.setattr(engine_module, "Cache", Noted)
    engine, prompts = make_engine(), make_prompts([6, 9])
    gc.disable()
    try:
        engine.sample(prompts, 2, SAMPLED, seed=3, scope="s")
        assert [cache() for cache in made] == [None]
    finally:
        gc.enable()


def test_progress_counts_completions_and_tokens(make_engine, make_prompts):
    seen = []
    groups = make_engine(max_rows=5).sample(
        make_prompts([4, 9]), 8, SAMPLED, seed=0, scope="s", on_progress=lambda *numbers: seen.append(numbers)
    )
    assert seen == sorted(seen)
    assert seen[-1] == (16, sum(len(c.token_ids) for group in groups for c in group))
    assert len(seen) > 24  # 16 completions do not fit into 5 rows at once


def test_a_stream_is_the_sample_of_its_scope(make_engine, make_prompts):
    (prompt,), pieces = make_prompts([6]), []
    for settings in (SAMPLED, SamplingSettings(max_tokens=1), SamplingSettings(max_tokens=9, greedy=True)):
        pieces.clear()
        engine = make_engine()
        completion = engine.stream(prompt, settings, seed=8, on_text=pieces.append)
        assert completion == engine.sample([prompt], 1, settings, seed=8, scope="stream")[0][0]
        assert "".join(pieces) == completion.text
        assert all(piece.count(" ") <= 2 for piece in pieces)  # a token at a time, and the first two together


def test_updates_in_place_are_sampled_from_at_once(make_engine, make_prompts, ids_of):
    engine, prompts = make_engine(), make_prompts(LENGTHS)
    before = engine.sample(prompts, 2, SAMPLED, seed=0, scope="s")
    with torch.no_grad():
        for _, parameter in engine.decoder.named_parameters():
            parameter.mul_(1.3)
    engine.refresh(7)
    after = engine.sample(prompts, 2, SAMPLED, seed=0, scope="s")
    assert ids_of(after) != ids_of(before)
    torch.testing.assert_close(recorded(after), scored(engine.decoder, prompts, after), rtol=1e-4, atol=1e-4)
    assert {c.policy_version for group in before for c in group} == {0}
    assert {c.policy_version for group in after for c in group} == {7}


def test_a_checkpoints_generation_config_is_not_inherited(make_engine, make_prompts, tiny_llama, ids_of):
    model = tiny_llama()
    model.generation_config = GenerationConfig(do_sample=True, top_p=0.8, top_k=20, repetition_penalty=1.5, temperature=0.3)
    prompts = make_prompts(LENGTHS)
    opinionated, plain = (make_engine(m).sample(prompts, 4, SAMPLED, seed=0, scope="s") for m in (model, tiny_llama()))
    assert ids_of(opinionated) == ids_of(plain)


def test_restricted_sampling_reaches_the_engine(make_engine, make_prompts, tiny_llama):
    prompts, model = make_prompts(LENGTHS), tiny_llama()
    groups = make_engine().sample(prompts, 4, SamplingSettings(max_tokens=10, top_k=3), seed=0, scope="s")
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt.token_ids, *completion.token_ids]])).logits[
                    0, len(prompt.token_ids) - 1 : -1
                ]
            best = logits.topk(3).indices
            assert (best == torch.tensor(completion.token_ids)[:, None]).any(1).all()


@pytest.mark.parametrize("restricted", [{}, {"top_k": 3}], ids=["plain", "top-k"])
def test_log_probabilities_do_not_depend_on_the_default_dtype(restricted, make_engine, make_prompts, ids_of):
    """Which the program around sets, or transformers for the moment in which another thread builds a model."""
    settings = SamplingSettings(max_tokens=10, **restricted)
    engine, prompts = make_engine(), make_prompts(LENGTHS)
    expected = engine.sample(prompts, 2, settings, seed=0, scope="s")
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = engine.sample(prompts, 2, settings, seed=0, scope="s")
    finally:
        torch.set_default_dtype(torch.float32)
    assert ids_of(found) == ids_of(expected)
    assert recorded(found).tolist() == recorded(expected).tolist()


@pytest.mark.slow
def test_the_embedded_model_answers_and_ends_its_turn(embedded_model_folder):
    """Real weights, their tokenizer and template. In fp32: the two likeliest first tokens are 0.1 nats apart, which bf16 may turn round."""
    policy = load_policy(ModelConfig(name=EMBEDDED_NAME, dtype="float32", device="cpu"))
    engine = BuiltinEngine(Decoder(policy.model), policy.tokenizer, policy.end_token_ids)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = Prompt(Problem("france", chat[0]["content"], "Paris"), text, tuple(policy.tokenizer(text)["input_ids"]))
    ((answer,),) = engine.sample([prompt], 1, SamplingSettings(max_tokens=20, greedy=True), seed=0, scope="s")
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


@pytest.mark.slow
def test_log_probabilities_of_the_embedded_model_in_bf16(embedded_model_folder):
    """bf16 rounds differently in batches of different shapes; the engine is no further from fp32 than the trainer is."""
    narrow, wide = (load_policy(ModelConfig(name=EMBEDDED_NAME, dtype=dtype, device="cpu")) for dtype in ("bfloat16", "float32"))
    engine, prompts = BuiltinEngine(Decoder(narrow.model), narrow.tokenizer, narrow.end_token_ids), []
    for question in ("What is 2 + 3?", "Name three colours.", "Tom has 17 marbles and buys 25 more. How many has he now?"):
        chat = [{"role": "user", "content": question}]
        text = narrow.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append(Prompt(Problem(question, question, ""), text, tuple(narrow.tokenizer(text)["input_ids"])))
    groups = engine.sample(prompts, 4, SamplingSettings(max_tokens=12), seed=0, scope="s")
    sampled, trained = recorded(groups), scored(engine.decoder, prompts, groups)
    exact = scored(Decoder(wide.model), prompts, groups)
    assert (sampled - exact).abs().mean() < 1.3 * (trained - exact).abs().mean() < 0.06
    assert abs((sampled - trained).mean()) < 0.01
