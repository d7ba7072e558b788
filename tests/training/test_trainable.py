"""What cannot be trained is refused before anything is read, and a rate meant for something else is told."""

import pytest

from groupwise.config.combinations import notes
from groupwise.config.schema import Config
from groupwise.errors import ConfigError
from groupwise.training.setup import prepare


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_a_quantised_base_without_an_adapter_is_refused_in_training(kind):
    with pytest.raises(ConfigError, match=rf"model.quantization is {kind} and model.lora is null.*add model.lora="):
        prepare(Config(model={"name": "no/such-model", "quantization": kind}))


def test_a_rate_for_all_weights_is_told_where_an_adapter_is_trained():
    def told(**optimizer):
        config = Config(model={"lora": {"rank": 4}}, optimizer=optimizer)
        return [note for note in notes(config) if "rate for all weights" in note]

    assert told(), "the default rate is one for all weights"
    assert told(learning_rate=2e-6)
    assert not told(learning_rate=5e-5)
