"""A device without room for so many sequences at once: fewer are sampled, and they are the completions that there would have been."""

import inspect

import pytest
import torch

from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.transformers import TransformersEngine
from groupwise.models.decoder import Decoder

LENGTHS = [5, 1, 17, 9, 9, 3, 40]
SAMPLED = SamplingSettings(max_tokens=40)
ENDS = (2, 11)


def shortage():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def room_for(monkeypatch):
    """``room_for(places)``: tables of keys and values with more positions, over all their sequences, are not to be had."""
    make = Cache._pair

    def set_up(places):
        def scarce(self, sequences, positions):
            if sequences * positions > places:
                raise shortage()
            return make(self, sequences, positions)

        monkeypatch.setattr(Cache, "_pair", scarce)

    return set_up


@pytest.mark.parametrize("room", [28 * 32, pytest.param(300, marks=pytest.mark.slow)])
def test_the_built_in_engine_samples_the_same_with_fewer_rows(tiny_llama, tokenizer, make_prompts, ids_of, room_for, room):
    """At 28 rows of 32 places memory runs out late, when the table of completions grows; at 300 at once, for the prompts too."""
    prompts, told, progress = make_prompts(LENGTHS), [], []
    enough = BuiltinEngine(Decoder(tiny_llama()), tokenizer, ENDS).sample(prompts, 4, SAMPLED, seed=3, scope="s")
    engine = BuiltinEngine(Decoder(tiny_llama()), tokenizer, ENDS)
    engine.limit.tell = told.append
    room_for(room)
    found = engine.sample(prompts, 4, SAMPLED, seed=3, scope="s", on_progress=lambda *numbers: progress.append(numbers))
    assert ids_of(found) == ids_of(enough)
    assert [[c.sample for c in group] for group in found] == [[0, 1, 2, 3]] * len(prompts)
    assert len(told) == engine.limit.halvings == engine.metrics()["memory/sampling_halvings"].value >= 1
    assert f"max_concurrent_sequences is {engine.max_rows} from here on" in told[-1]
    assert progress[-1] == (28, sum(len(c.token_ids) for group in enough for c in group))
    halvings = engine.limit.halvings
    engine.sample(prompts, 4, SAMPLED, seed=3, scope="s")
    assert engine.limit.halvings == halvings, "the next step begins with what fits"


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
def test_positions_that_found_no_room_are_reserved_again(family, request, tokenizer, make_prompts, ids_of):
    """The last of a model's tables, so that others were made already."""
    model, prompts = request.getfixturevalue(family), make_prompts(LENGTHS)
    enough = BuiltinEngine(Decoder(model()), tokenizer, ENDS).sample(prompts, 2, SAMPLED, seed=3, scope="s")
    decoder = Decoder(model())
    rotary, asked = decoder._rotary[-1], []

    def scarce(*inputs):
        asked.append(1)
        if len(asked) == 1:
            raise shortage()
        return rotary(*inputs)

    decoder._rotary[-1] = scarce
    if hasattr(rotary, "layer_types"):
        scarce.layer_types = rotary.layer_types
    engine = BuiltinEngine(decoder, tokenizer, ENDS)
    assert ids_of(engine.sample(prompts, 2, SAMPLED, seed=3, scope="s")) == ids_of(enough)
    assert engine.limit.halvings == 1
    assert len(asked) >= 2


def test_what_was_finished_is_not_sampled_again(tiny_llama, tokenizer, make_prompts, room_for):
    engine, told = BuiltinEngine(Decoder(tiny_llama()), tokenizer, ENDS), []
    finish, prompts = engine.decode_text, make_prompts(LENGTHS)
    finished = []
    engine.decode_text = lambda tokens: finished.append(tuple(tokens)) or finish(tokens)
    engine.limit.tell = lambda sentence: told.append(len(finished))
    room_for(28 * 32)
    engine.sample(prompts, 4, SAMPLED, seed=3, scope="s")
    assert 0 < told[0] < 28, "some had ended before memory ran out"
    assert len(finished) == 28


def test_the_engine_for_any_architecture_too(tiny_llama, tokenizer, make_prompts, ids_of):
    prompts, model, told = make_prompts(LENGTHS), tiny_llama(), []
    enough = TransformersEngine(tiny_llama(), tokenizer, ENDS).sample(prompts, 4, SAMPLED, seed=3, scope="s")
    forward = model.forward

    def scarce(*args, **kwargs):
        if kwargs["attention_mask"].numel() > 400:
            raise shortage()
        return forward(*args, **kwargs)

    scarce.__signature__ = inspect.signature(forward)
    model.forward = scarce
    engine = TransformersEngine(model, tokenizer, ENDS)
    engine.limit.tell = told.append
    assert ids_of(engine.sample(prompts, 4, SAMPLED, seed=3, scope="s")) == ids_of(enough)
    assert len(told) == engine.metrics()["memory/sampling_halvings"].value >= 2
    assert 400 / (40 + 40) / 2 <= engine.max_rows <= 400 / 40


def test_no_room_for_one_sequence_is_an_error_that_says_what_to_do(tiny_llama, tokenizer, make_prompts, room_for):
    room_for(1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        BuiltinEngine(Decoder(tiny_llama()), tokenizer, ENDS).sample(make_prompts([4, 5]), 2, SAMPLED, seed=0, scope="s")
    assert "lower the limit on completions (rollout.max_completion_tokens" in caught.value.__notes__[0]
