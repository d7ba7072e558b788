"""Both engines show tokens as they come, end a completion where they are told to, and go on with one as if it had never been cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.engines.base import SampleRequest, SamplingSettings
from groupwise.engines.builtin.draw import key_further, uniforms
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.transformers import TransformersEngine
from groupwise.models.decoder import Decoder

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


def test_a_key_further_on_has_the_numbers_of_the_positions_there():
    import torch

    for key in (0, 17, -(2**63), 2**63 - 1):
        keys = torch.tensor([key, key_further(key, 1000)])
        first, second = uniforms(keys, torch.tensor([1007, 7])).tolist()
        assert first == second
