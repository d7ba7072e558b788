"""Which engine a run gets, and on whose tensors it works."""

from __future__ import annotations

import pytest

from groupwise.config.schema import RolloutConfig
from groupwise.engines import make_engine
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.transformers import TransformersEngine
from groupwise.errors import ConfigError
from groupwise.models.decoder import Decoder
from groupwise.models.load import Policy


def policy_of(model):
    return Policy(model, tokenizer=None, end_token_ids=(2, 5), context_length=256, name="some/model")


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
