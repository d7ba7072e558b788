"""What a pass asks of a GPU: kernels in a decode step, and waits for an answer, which leave it idle."""

import pytest
import torch

from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.decode import DecodeStep, DecodeWeights
from groupwise.engines.builtin.draw import Draw
from groupwise.engines.builtin.engine import Runner
from groupwise.planner.cost import DECODE_OPERATIONS
from tests.gpu.counting import Dispatched


@pytest.fixture
def decode_step(fake_decoder, cuda):
    """``decode_step(**config)``: one step of eight rows in two groups, on a GPU that is not there; it ran once before."""

    def make(**config):
        decoder = fake_decoder(**config)
        decoder.reserve_positions(64)
        cache = Cache(
            layers=len(decoder.layers), kv_heads=decoder.kv_heads, head_width=decoder.head_width, groups=2, prompt_tokens=9, rows=8,
            completion_tokens=20, dtype=decoder.dtype, device=cuda,
        )  # fmt: skip
        step = DecodeStep.plan(
            cache, group_of_row=[0] * 4 + [1] * 4, prompt_lengths=[9, 7], own_lengths=[1] * 8, last_tokens=[3] * 8, keys=[1] * 8
        )
        runner = Runner(
            decoder, DecodeWeights(decoder, 8), cache, Draw(SamplingSettings(max_tokens=20), decoder.vocabulary, cuda)
        )
        with torch.no_grad():
            runner._once(step)
        return torch.no_grad()(lambda: runner._once(step))

    return make


def test_a_decode_step_launches_as_much_as_the_plan_counts(decode_step):
    found = []
    for layers in (1, 2):
        step = decode_step(num_hidden_layers=layers)
        with Dispatched() as seen:
            step()
        found.append(sum(seen.launches.values()))
        assert not seen.waits, "a graph that is captured may ask nothing"
    one, two = found
    assert (two - one, one - (two - one)) == DECODE_OPERATIONS
