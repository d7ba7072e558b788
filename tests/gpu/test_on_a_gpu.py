"""What only a card can show: `make test-gpu`. They passed on an H200 (2026-11-27)."""

from types import SimpleNamespace

import pytest
import torch

from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.models.decoder import Decoder
from groupwise.types import Problem, Prompt

pytestmark = pytest.mark.gpu
TOKENIZER = SimpleNamespace(decode=lambda ids, **rest: "")
PROMPTS = [Prompt(Problem(f"p{n}", "", ""), "", tuple(range(3, 3 + n))) for n in (5, 1, 17, 9)]


def sampled(model, device):
    engine = BuiltinEngine(Decoder(model.to(device)), TOKENIZER, (2, 11), max_rows=9)
    return engine.sample(PROMPTS, 4, SamplingSettings(max_tokens=40), seed=3, scope="s")


@pytest.mark.parametrize("family", ["tiny_qwen2", "tiny_qwen3", "tiny_llama"])
def test_tokens_and_logprobs_are_the_cpu_s(family, request):
    """By captured graphs, with rows that end within bursts; in fp32."""
    make = request.getfixturevalue(family)
    (here, there) = (sampled(make(), torch.device(name)) for name in ("cpu", "cuda"))
    assert [[c.token_ids for c in group] for group in there] == [[c.token_ids for c in group] for group in here]
    for ours, theirs in zip(here, there, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert list(other.logprobs) == pytest.approx(list(one.logprobs), abs=1e-3)


@pytest.mark.parametrize("family", ["tiny_qwen2", "tiny_qwen3", "tiny_llama"])
def test_gradients_are_the_cpu_s(family, request):
    make, groups = request.getfixturevalue(family), [(p.token_ids, [(7, 8, 9), (5,), tuple(range(4, 30))]) for p in PROMPTS]
    found = []
    for name in ("cpu", "cuda"):
        decoder = Decoder(make().to(name))
        decoder.logprobs(decoder.prepare(groups)).sum().backward()
        found.append({key: p.grad.cpu() for key, p in decoder.named_parameters()})
    for key, gradient in found[0].items():
        assert (found[1][key] - gradient).norm() <= 1e-4 * gradient.norm(), key
