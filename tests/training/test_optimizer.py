"""AdamW with fp32 masters: equal to PyTorch's where that is exact, and able to take the small steps of RL where bf16 is not."""

import math

import pytest
import torch
from torch import nn

from groupwise.config.schema import OptimizerConfig
from groupwise.models.merging import dithered
from groupwise.training.optimizer import MasterAdamW, learning_rate_at


def parameters_of(dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 5), "b": (11,), "frozen": (3,)}
    made = [(n, nn.Parameter((scale * torch.randn(s, generator=generator)).to(dtype))) for n, s in shapes.items()]
    made[-1][1].requires_grad_(False)
    return made


def give_gradient(parameters, seed, scale=1.0):
    """Through a backward pass, so that hooks act."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum(
        (p * (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)).sum() for _, p in parameters if p.requires_grad
    )
    loss.backward()


def config_of(**values):
    return OptimizerConfig(**{"learning_rate": 1e-2, "max_grad_norm": None, **values})


def test_fp32_is_torch_s_adamw_step_for_step():
    config = config_of(weight_decay=0.1, betas=(0.8, 0.95), epsilon=1e-6)
    ours, theirs = parameters_of(), parameters_of()
    mine = MasterAdamW(ours, config)
    reference = torch.optim.AdamW(
        [p for _, p in theirs if p.requires_grad], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1
    )
    for step in range(20):
        rate = 1e-2 / (step + 1)
        for parameters in (ours, theirs):
            give_gradient(parameters, step)
        mine.step(rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        reference.zero_grad()
        for (name, a), (_, b) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(ours[2][1], parameters_of()[2][1]), "a frozen parameter stays"


def test_bf16_weights_are_the_dithered_masters_of_an_fp32_run():
    """bf16 weights with masters walk the path of an fp32 run that is given the same (bf16) gradients."""
    narrow = parameters_of(torch.bfloat16)
    wide = [(n, nn.Parameter(p.detach().float(), requires_grad=p.requires_grad)) for n, p in narrow]
    ours, fp32 = MasterAdamW(narrow, config_of()), MasterAdamW(wide, config_of())
    for step in range(10):
        give_gradient(narrow, step)
        for (_, w), master in zip(wide, ours.masters, strict=False):
            w.grad = master.grad.clone()
        ours.step(1e-3)
        fp32.step(1e-3)
    for (_, a), (_, b), master in zip(narrow[:2], wide[:2], ours.masters, strict=True):
        torch.testing.assert_close(master, b.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(a, dithered(master.clone().view(-1, master.shape[-1]), torch.bfloat16).view_as(a))


def test_updates_far_below_half_a_step_of_bf16_reach_the_weights_on_average():
    """Weights of 0.125 to 0.25 are 2**-10 apart in bf16. Twenty steps of 1e-5 are 0.2 of that: rounded to the nearest, not one weight
    would move; dithered, one in five does, and a product with many of them changes by what the masters changed."""
    start = torch.linspace(0.125, 0.24, 64 * 256).view(64, 256).to(torch.bfloat16)
    weight = nn.Parameter(start.clone())
    optimizer = MasterAdamW([("w", weight)], config_of())
    for _ in range(20):
        weight.sum().backward()
        optimizer.step(1e-5)
    master = optimizer.masters[0]
    torch.testing.assert_close(master, start.float() - 2e-4, rtol=0, atol=1e-7)
    assert torch.equal(master.to(torch.bfloat16), start), "what rounding to the nearest would give"
    moved = (weight.detach() != start).float().mean()
    assert abs(float(moved) - 2e-4 * 2**10) < 0.01
    rows = (weight.detach().float() - start.float()).sum(1)
    torch.testing.assert_close(rows, torch.full_like(rows, 256 * -2e-4), rtol=0.05, atol=0)


@pytest.mark.parametrize(("precision", "low", "high"), [("masters", 0.95, 1.05), ("stochastic", 0.9, 1.1), ("pure", 0.0, 0.01)])
def test_a_thousand_steps_at_1e_6_move_bf16_weights_unless_they_are_rounded_away(precision, low, high):
    """AdamW under a constant gradient moves a weight by the rate each step: by 1e-3 in all. Weights of about 0.05, as in a real
    model, have bf16 neighbours some 1e-4 away, so a step of 1e-6 is rounded away: without masters 0.4% of the movement is
    left (in weights that happen to be tiny), with them all of it but the final rounding."""
    start = (0.05 * torch.randn(4000, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    weight = nn.Parameter(start.clone())
    optimizer = MasterAdamW([("w", weight)], config_of(precision=precision))
    for _ in range(1000):
        weight.sum().backward()
        optimizer.step(1e-6)
    moved = (start.float() - weight.detach().float()).mean().item() / 1e-3
    assert low <= moved <= high


def test_micro_batches_add_up_in_fp32():
    """One gradient of 1 and 64 of 1/256: in bf16 each small one would vanish beside the sum (1 + 1/256 rounds to 1)."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", weight)], config_of())
    for size in [1.0, *[2.0**-8] * 64]:
        (weight * size).sum().backward()
        assert weight.grad is None, "freed as soon as it was added"
    assert optimizer.masters[0].grad.item() == 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_clipped_to_the_global_norm(dtype):
    parameters = [("a", nn.Parameter(torch.zeros(3, dtype=dtype))), ("b", nn.Parameter(torch.zeros(1, dtype=dtype)))]
    optimizer = MasterAdamW(parameters, config_of(max_grad_norm=0.5))
    clipped, step = [], optimizer.adamw.step
    optimizer.adamw.step = lambda: (clipped.extend(m.grad.clone() for m in optimizer.masters), step())
    loss = parameters[0][1] @ torch.tensor([2.0, 3.0, 6.0], dtype=dtype) + 24 * parameters[1][1].sum()
    loss.backward()
    norm, made = optimizer.step(1e-3)
    assert made
    assert norm == pytest.approx(25.0), "sqrt(4 + 9 + 36 + 576)"
    torch.testing.assert_close(torch.cat(clipped), torch.tensor([2.0, 3.0, 6.0, 24.0]) * 0.5 / 25, rtol=1e-5, atol=0)


def test_gradients_below_the_norm_are_left_alone():
    parameters = [("a", nn.Parameter(torch.zeros(2)))]
    optimizer = MasterAdamW(parameters, config_of(max_grad_norm=5.0001))
    clipped, step = [], optimizer.adamw.step
    optimizer.adamw.step = lambda: (clipped.extend(m.grad.clone() for m in optimizer.masters), step())
    (parameters[0][1] @ torch.tensor([3.0, 4.0])).backward()
    assert optimizer.step(1e-3)[0] == 5.0
    assert torch.equal(clipped[0], torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_dropped_whole(dtype, bad):
    parameters = parameters_of(dtype)
    optimizer = MasterAdamW(parameters, config_of())
    give_gradient(parameters, 0)
    optimizer.step(1e-2)
    before = [p.detach().clone() for _, p in parameters]
    state = {k: v.clone() for k, v in optimizer.state().items()}
    (parameters[0][1].sum() + parameters[1][1][0] * bad).backward()
    norm, made = optimizer.step(1e-2)
    assert not made
    assert not math.isfinite(norm)
    assert all(torch.equal(a, p) for a, (_, p) in zip(before, parameters, strict=True))
    assert all(torch.equal(state[k], v) for k, v in optimizer.state().items()), "moments too"
    give_gradient(parameters, 1)
    norm, made = optimizer.step(1e-2)
    assert made, "nothing bad is left behind"
    assert math.isfinite(norm)


def test_decay_of_matrices_spares_vectors_but_dora_s_magnitudes():
    names = ("q.weight", "norm.weight", "q.lora_magnitude_vector.default.weight")
    parameters = [(n, nn.Parameter(torch.ones(s))) for n, s in zip(names, ((2, 2), (2,), (2,)), strict=True)]
    optimizer = MasterAdamW(parameters, config_of(weight_decay=0.5, decay="matrices"))
    for _, parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1e-2)
    assert [float(p.detach().mean()) for _, p in parameters] == pytest.approx([0.995, 1.0, 0.995])


def test_schedules_in_closed_form():
    peak = 8e-4
    constant = config_of(learning_rate=peak)
    assert [learning_rate_at(constant, u, 10) for u in (0, 5, 9)] == [peak] * 3
    warm = config_of(learning_rate=peak, warmup_steps=4)
    assert [learning_rate_at(warm, u, 10) for u in range(6)] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 8e-4, 8e-4])
    share = config_of(learning_rate=peak, warmup_steps=0.4)
    assert [learning_rate_at(share, u, 10) for u in range(6)] == [learning_rate_at(warm, u, 10) for u in range(6)]
    linear = config_of(learning_rate=peak, warmup_steps=2, schedule="linear", final_fraction=0.5)
    assert [learning_rate_at(linear, u, 6) for u in range(6)] == pytest.approx([4e-4, 8e-4, 8e-4, 7e-4, 6e-4, 5e-4])
    cosine = config_of(learning_rate=peak, schedule="cosine", final_fraction=0.25)
    expected = [peak * (0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * u / 8))) for u in range(8)]
    assert [learning_rate_at(cosine, u, 8) for u in range(8)] == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["masters", "stochastic", "pure"])
def test_state_goes_round_exactly(dtype, precision):
    config = config_of(precision=precision)
    parameters = parameters_of(dtype)
    optimizer = MasterAdamW(parameters, config)
    for step in range(3):
        give_gradient(parameters, step)
        optimizer.step(1e-2)
    saved = {k: v.clone() for k, v in optimizer.state().items()}
    again = [(n, nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)) for n, p in parameters]
    restored = MasterAdamW(again, config)
    restored.load_state(saved)
    for step in range(3, 6):
        for owner, chosen in ((optimizer, parameters), (restored, again)):
            give_gradient(chosen, step)
            owner.step(1e-2)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(parameters, again, strict=True))
    assert optimizer.state().keys() == restored.state().keys()
    assert all(torch.equal(v, restored.state()[k]) for k, v in optimizer.state().items())


def test_the_state_of_another_model_is_refused_before_anything_changes():
    optimizer = MasterAdamW(parameters_of(torch.bfloat16), config_of())
    good = {k: v.clone() for k, v in optimizer.state().items()}
    for bad in ({**good, "master.c": torch.zeros(2)}, {"master.a": good["master.a"]}, {**good, "master.b": torch.zeros(4)}):
        with pytest.raises(ValueError, match=r"master\.[bc]"):
            optimizer.load_state(bad)
    assert all(torch.equal(v, good[k]) for k, v in optimizer.state().items())


def test_a_closed_optimizer_lets_go_of_gradients():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    first = MasterAdamW([("w", weight)], config_of())
    first.close()
    weight.sum().backward()
    assert weight.grad is not None
    assert first.masters[0].grad is None
