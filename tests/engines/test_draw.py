"""Drawing tokens: the generator against its published values, frequencies against softmax, and nothing impossible is ever drawn."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin import draw as draw_module
from groupwise.engines.builtin.draw import Draw, seed_key, uniforms

CPU = torch.device("cpu")
LAST_UNIFORM = 1.0 - 2.0**-53


def settings(**changes):
    return SamplingSettings(max_tokens=1, **changes)


def splitmix64(seed, count):
    """The generator as published: 64-bit unsigned arithmetic, its state stepped from draw to draw."""
    mask, state, out = 2**64 - 1, seed & (2**64 - 1), []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def logits_with(vocabulary, seed=0, scale=2.0):
    return scale * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))


def many(logits, count, chosen):
    """``count`` draws from one row of logits, each with its own key."""
    draw, tokens, logprobs = Draw(chosen, len(logits), CPU), [], []
    for start in range(0, count, 20_000):
        keys = torch.arange(start, min(start + 20_000, count))
        part = draw(logits.expand(len(keys), -1), keys, torch.zeros_like(keys))
        tokens.append(part[0])
        logprobs.append(part[1])
    return torch.cat(tokens), torch.cat(logprobs)


def test_the_reference_gives_the_published_values():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert splitmix64(1234567, 5) == published


@pytest.mark.parametrize("key", [0, 1, -1, 1234567, 2**63 - 1, -(2**63)])
def test_uniforms_are_splitmix64(key):
    found = uniforms(torch.full((50,), key), torch.arange(50))
    assert found.tolist() == [(value >> 11) * 2.0**-53 for value in splitmix64(key, 50)]


def test_uniforms_are_even_and_unrelated():
    """Along positions of one completion, along the real keys of samples, and along keys that only count up."""
    count = 40_000
    keys = torch.tensor([seed_key(0, "rollout/step=1", "p", sample) for sample in range(count)])
    along = {
        "positions": uniforms(torch.full((count,), int(keys[0])), torch.arange(count)),
        "samples": uniforms(keys, torch.zeros_like(keys)),
        "counting keys": uniforms(torch.arange(count), torch.zeros_like(keys)),
    }
    for name, values in along.items():
        ordered = values.sort().values
        distance = (ordered - torch.arange(1, count + 1) / count).abs().max()
        assert distance < 2.0 / math.sqrt(count), name  # Kolmogorov-Smirnov, p = 0.0007
        for lag in (1, 2, 7):
            pair = torch.stack([values[:-lag], values[lag:]])
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 4.0 / math.sqrt(count), (name, lag)
    across = torch.corrcoef(torch.stack([along["samples"], uniforms(keys, torch.ones_like(keys))]))
    assert abs(float(across[0, 1])) < 4.0 / math.sqrt(count)


def test_a_key_depends_on_each_of_its_parts():
    base = (7, "rollout/step=3", "gsm8k:12", 4)
    changed = [(8, *base[1:]), (7, "rollout/step=4", *base[2:]), (7, base[1], "gsm8k:13", 4), (*base[:3], 5)]
    shifted = [(7, "rollout/step=31", "2", 4), (7, "rollout/step=3", "gsm8k:1", 24), (77, "rollout/step=3", "gsm8k:12", 4)]
    again = [(*base, 1), (*base, 2), (*base[:3], 5, 1)]
    keys = [seed_key(*parts) for parts in (base, *changed, *shifted, *again)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == seed_key(*base) == seed_key(*base, 0) == 6988775070447176615, "runs of earlier versions are repeated"
    assert all(-(2**63) <= key < 2**63 for key in keys)


@pytest.mark.parametrize(("vocabulary", "count"), [(50, 200_000), (256, 100_000), (600, 100_000)])
def test_frequencies_are_those_of_softmax(vocabulary, count, chi_square):
    logits = logits_with(vocabulary)
    tokens, _ = many(logits, count, settings())
    assert chi_square(tokens.bincount(minlength=vocabulary), logits.double().softmax(0)) < 4
    assert chi_square(tokens.bincount(minlength=vocabulary), (logits.double() * 1.05).softmax(0)) > 4  # it can tell


@pytest.mark.parametrize("vocabulary", [50, 256, 600])
def test_each_draw_inverts_the_distribution_function(vocabulary):
    logits, count = logits_with(vocabulary, seed=1), 20_000
    tokens, _ = many(logits, count, settings())
    exact = logits.double().softmax(0).cumsum(0)
    numbers = uniforms(torch.arange(count), torch.zeros(count, dtype=torch.long))
    expected = torch.searchsorted(exact, numbers, right=True)
    assert (tokens != expected).sum() <= 2  # a number within fp32 rounding of a boundary may fall on its other side


@pytest.mark.parametrize(
    "chosen",
    [
        settings(),
        settings(temperature=0.5),
        settings(temperature=1.7, top_k=9),
        settings(top_p=0.8),
        settings(top_k=20, top_p=0.6),
    ],
    ids=["plain", "cold", "top-k", "top-p", "both"],
)
@pytest.mark.parametrize("vocabulary", [50, pytest.param(600, marks=pytest.mark.slow)])
def test_support_frequencies_and_log_probabilities(vocabulary, chosen, chi_square):
    logits = logits_with(vocabulary, seed=2)
    exact = (logits.double() / chosen.temperature).softmax(0)
    ordered = exact.sort(descending=True)
    kept = ordered.indices[: chosen.top_k or vocabulary]
    within = exact[kept] / exact[kept].sum()
    before = within.cumsum(0) - within
    support = kept[before < chosen.top_p]  # the fewest of the likeliest whose mass reaches top_p
    restricted = torch.zeros(vocabulary, dtype=torch.double)
    restricted[support] = exact[support] / exact[support].sum()

    tokens, logprobs = many(logits, 60_000, chosen)
    counts = tokens.bincount(minlength=vocabulary)
    assert counts[restricted == 0].sum() == 0
    assert bool((counts[restricted * 60_000 > 20] > 0).all())
    assert chi_square(counts, restricted) < 4
    torch.testing.assert_close(logprobs.double(), restricted.log()[tokens], rtol=1e-5, atol=1e-5)


def test_ties_at_the_kth_value_are_kept():
    tokens, logprobs = many(torch.tensor([1.0, 3.0, 1.0, 0.0, 1.0]), 3000, settings(top_k=2))
    assert set(tokens.tolist()) == {0, 1, 2, 4}
    weight = {1: math.e**3} | dict.fromkeys((0, 2, 4), math.e)
    expected = [math.log(weight[t] / sum(weight.values())) for t in tokens.tolist()]
    torch.testing.assert_close(logprobs, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_top_p_always_keeps_the_likeliest():
    tokens, logprobs = many(torch.tensor([0.0, 2.0, 1.0]), 100, settings(top_p=1e-9))
    assert set(tokens.tolist()) == {1}
    assert torch.equal(logprobs, torch.zeros(100))


def test_greedy_takes_the_likeliest_and_scores_it_under_the_plain_softmax():
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(4))
    keys = torch.arange(40)
    for chosen in (settings(greedy=True), settings(greedy=True, top_k=3, top_p=0.2)):
        tokens, logprobs = Draw(chosen, 300, CPU)(logits, keys, keys)
        assert torch.equal(tokens, logits.argmax(1))
        torch.testing.assert_close(logprobs, logits.log_softmax(1).amax(1), rtol=1e-5, atol=1e-5)


def test_the_first_and_the_last_number_draw_what_can_be_drawn(monkeypatch):
    """Whole blocks without any weight at the front, in the middle and at the end, and weights over many orders of magnitude."""
    generator = torch.Generator().manual_seed(6)
    vocabulary, rows = 1100, 64
    logits = 12 * torch.randn(rows, vocabulary, generator=generator)
    logits[torch.rand(rows, vocabulary, generator=generator) < 0.7] = float("-inf")
    logits[::4, :256] = logits[1::4, 512:768] = logits[2::4, 1024:] = float("-inf")
    logits[3::4] = float("-inf")
    logits[3::4, 700] = 0.0  # a single token
    keys = torch.arange(rows)
    for number in (0.0, 2.0**-53, 1e-9, 0.25, 0.5, 1 - 1e-9, 1 - 2.0**-52, LAST_UNIFORM):
        monkeypatch.setattr(draw_module, "fits", lambda *_: False)  # the kernels have uniforms of their own
        monkeypatch.setattr(draw_module, "uniforms", lambda k, p, u=number: torch.full(k.shape, u, dtype=torch.double))
        tokens, logprobs = Draw(settings(), vocabulary, CPU)(logits, keys, keys)
        assert logprobs.isfinite().all(), number
        assert logits.gather(1, tokens[:, None]).isfinite().all(), number
        assert (tokens[3::4] == 700).all()


def test_the_ends_of_the_unit_interval_are_the_first_and_the_last_token(monkeypatch):
    logits, key = torch.zeros(2, 600), torch.zeros(2, dtype=torch.long)
    logits[:, :3] = logits[:, 590:] = float("-inf")
    for number, token in ((0.0, 3), (LAST_UNIFORM, 589)):
        monkeypatch.setattr(draw_module, "fits", lambda *_: False)  # the kernels have uniforms of their own
        monkeypatch.setattr(draw_module, "uniforms", lambda k, p, u=number: torch.full(k.shape, u, dtype=torch.double))
        assert Draw(settings(), 600, CPU)(logits, key, key)[0].tolist() == [token, token]


def test_a_draw_does_not_depend_on_the_draws_before_or_beside_it():
    """Buffers are reused from step to step; rows come and go."""
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(8))
    keys = torch.arange(9) * 1_000_003
    for chosen in (settings(), settings(top_k=4, temperature=0.7)):
        alone = [Draw(chosen, 300, CPU)(logits[i : i + 1], keys[i : i + 1], keys[:1]) for i in range(9)]
        draw = Draw(chosen, 300, CPU)
        for rows in (9, 4, 7):
            tokens, logprobs = draw(logits[:rows], keys[:rows], keys[:1].expand(rows))
            assert tokens.tolist() == [int(t) for t, _ in alone[:rows]]
            assert logprobs.tolist() == [float(x) for _, x in alone[:rows]]


def test_the_logits_are_left_alone():
    logits = torch.randn(3, 40)
    before = logits.clone()
    Draw(settings(top_k=3, top_p=0.5, temperature=0.5), 40, CPU)(logits, torch.arange(3), torch.arange(3))
    assert torch.equal(logits, before)
