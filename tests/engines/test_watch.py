"""Both engines show tokens as they come, end a completion where they are told to, and go on with one as if it had never been cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from groupwise.engines.base import SampleRequest, SamplingSettings
from groupwise.engines.builtin import engine as builtin
from groupwise.engines.builtin.draw import key_further, uniforms
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.transformers import TransformersEngine
from groupwise.models.decoder import Decoder
from groupwise.models.packing import pack_prompts

SETTINGS = SamplingSettings(max_tokens=12)


@pytest.fixture(params=["builtin", "transformers"])
def engine(request, tiny_llama, tokenizer):
    if request.param == "builtin":
        return BuiltinEngine(Decoder(tiny_llama()), tokenizer, (), max_rows=3)
    return TransformersEngine(tiny_llama(), tokenizer, (), max_rows=3)


@pytest.fixture
def asked(make_prompts):
    return SampleRequest(make_prompts([5, 1, 17, 9]), 2, SETTINGS, seed=4, scope="s")


def test_every_completion_is_shown_after_each_of_its_tokens(engine, asked):
    shown = {}

    def watch(prompt, sample, tokens, logprobs):
        shown.setdefault((prompt, sample), []).append((tuple(tokens), tuple(logprobs)))
        return True

    plain = engine.serve(asked)
    watched = engine.serve(replace(asked, watch=watch))
    assert watched == plain
    assert engine.shows_tokens
    for prompt, group in enumerate(plain):
        for c in group:
            n = len(c.token_ids)
            assert shown[prompt, c.sample] == [(c.token_ids[:i], c.logprobs[:i]) for i in range(1, n + 1)]


def test_a_completion_ends_where_it_is_told_to_and_the_others_do_not(engine, asked):
    plain = engine.serve(asked)
    cut = engine.serve(replace(asked, watch=lambda prompt, sample, tokens, logprobs: prompt != 2 or len(tokens) < 3))
    others = [[[c.token_ids for c in group] for i, group in enumerate(groups) if i != 2] for groups in (cut, plain)]
    assert others[0] == others[1]
    for mine, whole in zip(cut[2], plain[2], strict=True):
        assert (mine.token_ids, mine.finish_reason) == (whole.token_ids[:3], "length")


def test_each_prompt_s_completions_end_at_its_own_limit(engine, asked):
    limits = (3, 12, 1, 7)
    cut = engine.serve(replace(asked, limits=limits))
    for limit, mine, whole in zip(limits, cut, engine.serve(asked), strict=True):
        assert [c.token_ids for c in mine] == [c.token_ids[:limit] for c in whole]
        assert {c.finish_reason for c in mine} == {"length"}


@pytest.mark.parametrize("at", [1, 5])
def test_what_was_cut_goes_on_as_if_it_had_not_been(engine, make_prompts, at):
    prompts = make_prompts([5, 1, 17, 9])
    whole = engine.serve(SampleRequest(prompts, 1, SETTINGS, seed=4, scope="s"))
    begun = [group[0].token_ids[:at] for group in whole]
    further = [replace(p, token_ids=p.token_ids + ids) for p, ids in zip(prompts, begun, strict=True)]
    rest = engine.serve(
        SampleRequest(further, 1, replace(SETTINGS, max_tokens=12 - at), seed=4, scope="s", drawn=[at] * len(prompts))
    )
    assert [ids + c.token_ids for ids, (c,) in zip(begun, rest, strict=True)] == [c.token_ids for (c,) in whole]


@pytest.mark.parametrize("memory_runs_out", [False, True])
def test_choices_of_one_prompt_share_it_wherever_they_have_been_cut(
    tiny_llama, tokenizer, make_prompts, monkeypatch, memory_runs_out
):
    """Four completions of one prompt, by names of their own, cut behind 0, 1, 4 and 7 tokens: the prompt is computed once, and they go on
    as if they had never been cut."""
    engine = BuiltinEngine(Decoder(tiny_llama()), tokenizer, (), max_rows=4)
    one, other = make_prompts([17, 9])
    asked = [replace(one, problem=replace(one.problem, id=f"choice {n}")) for n in range(4)] + [other]
    whole = engine.serve(SampleRequest(asked, 1, SETTINGS, seed=4, scope="s"))
    assert len({c.token_ids for (c,) in whole}) == 5, "their randomness is their own"
    computed = []
    monkeypatch.setattr(
        builtin, "pack_prompts", lambda prompts, common: computed.extend(map(len, prompts)) or pack_prompts(prompts, common)
    )
    cuts = (0, 1, 4, 7, 2)
    further = [replace(p, token_ids=p.token_ids + c.token_ids[:at]) for p, (c,), at in zip(asked, whole, cuts, strict=True)]
    left = []

    def watch(index, sample, tokens, logprobs):
        left.append(len(tokens))
        if memory_runs_out and len(left) == 15:
            raise torch.OutOfMemoryError
        return len(tokens) < 12 - cuts[index]

    rest = engine.serve(SampleRequest(further, 1, SETTINGS, seed=4, scope="s", watch=watch, drawn=cuts))
    for at, (c,), (w,) in zip(cuts, rest, whole, strict=True):
        assert c.token_ids == w.token_ids[at:]
        assert c.logprobs == pytest.approx(w.logprobs[at:], abs=1e-5)
    assert computed == ([17, 17, 9] if memory_runs_out else [17, 9]), "a batch of two rows begins again where memory ran out"


@pytest.mark.parametrize("memory_runs_out", [False, True])
def test_prompts_that_begin_alike_share_that_wherever_they_have_been_cut(
    tiny_llama, tokenizer, make_prompts, monkeypatch, memory_runs_out
):
    engine = BuiltinEngine(Decoder(tiny_llama()), tokenizer, (), max_rows=4)
    start, *ends = make_prompts([30, 3, 1, 8, 5])
    asked = [replace(end, token_ids=(*start.token_ids, 3 + i, *end.token_ids)) for i, end in enumerate(ends)]
    whole = [engine.serve(SampleRequest([one], 1, SETTINGS, seed=4, scope="s"))[0] for one in asked]
    computed = []
    monkeypatch.setattr(
        builtin, "pack_prompts", lambda prompts, common: computed.extend(map(len, prompts)) or pack_prompts(prompts, common)
    )
    cuts, limits = (0, 1, 4, 7), (12, 11, 8, 5)
    further = [replace(p, token_ids=p.token_ids + c.token_ids[:at]) for p, (c,), at in zip(asked, whole, cuts, strict=True)]
    shown = []

    def watch(index, sample, tokens, logprobs):
        shown.append((index, tuple(tokens)))
        if memory_runs_out and len(shown) == 15:
            raise torch.OutOfMemoryError
        return True

    rest = engine.serve(SampleRequest(further, 1, SETTINGS, seed=4, scope="s", watch=watch, drawn=cuts, limits=limits))
    for index, (at, (c,), (w,)) in enumerate(zip(cuts, rest, whole, strict=True)):
        assert c.token_ids == w.token_ids[at:]
        assert c.logprobs == pytest.approx(w.logprobs[at:], abs=1e-5)
        assert {tokens for i, tokens in shown if i == index} == {c.token_ids[:n] for n in range(1, len(c.token_ids) + 1)}
    assert computed == ([30, 30] if memory_runs_out else [30])


def test_a_key_further_on_has_the_numbers_of_the_positions_there():
    for key in (0, 17, -(2**63), 2**63 - 1):
        keys = torch.tensor([key, key_further(key, 1000)])
        first, second = uniforms(keys, torch.tensor([1007, 7])).tolist()
        assert first == second
