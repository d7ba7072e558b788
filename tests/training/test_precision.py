"""The named precisions: what is rounded is unbiased or counted, what overflows is left out and comes back, and 8 bits are near 32."""

import math
import sys

import pytest
import torch
from slow_grpo import config_of, learner_of, make_groups
from torch import nn

from groupwise.config import build_config
from groupwise.config.schema import OptimizerConfig
from groupwise.distributed import World
from groupwise.errors import ConfigError
from groupwise.training import optimizer as optimizers
from groupwise.training.loop import train
from groupwise.training.optimizer import LossScale, MasterAdamW, round_stochastically_
from groupwise.training.seeds import seed_noise
from groupwise.training.sharding.fsdp2 import ShardedAdamW


def optimizer_over(weight, **settings):
    return MasterAdamW([("w", weight)], OptimizerConfig(**{"learning_rate": 1e-2, "max_grad_norm": None, **settings}))


def backward(weight, gradient):
    (weight * gradient.to(weight.dtype)).sum().backward()


def test_stochastic_rounding_is_unbiased_and_takes_a_neighbour():
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([1.0 + 2**-10, -3.3, 0.1, 1e-30, 12345.678, 0.0, 1.5])
    draws = 20_000
    rounded = torch.empty(draws, len(values), dtype=torch.bfloat16)
    round_stochastically_(rounded, values.expand(draws, -1).contiguous(), generator)
    low = (values.view(torch.int32) & -(2**16)).view(torch.float32)  # towards 0
    high = ((values.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    found = rounded.float()
    assert bool(((found == low) | (found == high)).all())
    gap = (high - low).abs().double()
    error = (found.double().mean(0) - values.double()).abs()
    assert bool((error <= 4 * 0.5 * gap / math.sqrt(draws)).all()), "within four standard errors"
    assert bool((found[:, 5:] == values[5:]).all()), "what bf16 can hold is kept"


def test_updates_lost_by_pure_bf16_are_those_of_a_hand_count():
    generator = torch.Generator().manual_seed(1)
    start = (0.05 * torch.randn(3000, generator=generator)).bfloat16()
    gradient = torch.randn(3000, generator=generator)
    gradient[::3] = 0.0
    weight = nn.Parameter(start.clone())
    optimizer = optimizer_over(weight, precision="pure")
    backward(weight, gradient)
    optimizer.step(1e-4)
    by_hand = sum(
        1 for old, new, g in zip(start.tolist(), weight.tolist(), gradient.tolist(), strict=True) if g != 0 and old == new
    )
    assert optimizer.lost is not None
    assert (optimizer.lost.total, optimizer.lost.count) == (by_hand, 2000)
    assert 0.1 < optimizer.lost.value < 0.9, "a rate at which both happen"
    stochastic = optimizer_over(nn.Parameter(start.clone()), precision="stochastic")
    backward(stochastic.parameters[0], gradient)
    stochastic.step(1e-4)
    assert stochastic.lost is None, "on average nothing is"


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "masters"), ("float32", "masters")])
def test_fp32_loses_nothing_at_1e_6(dtype, precision):
    weight = nn.Parameter(0.05 * torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)))
    optimizer = optimizer_over(weight, precision=precision)
    backward(weight, torch.ones(5000))
    optimizer.step(1e-6)
    assert optimizer.lost is not None
    assert optimizer.lost.value == 0


def test_a_stochastic_run_follows_an_fp32_one_on_average():
    """200 steps of 1e-5 under gradients that vary: the mean over 20,000 weights lands where fp32 does, and pure bf16 does not."""
    generator = torch.Generator().manual_seed(3)
    start = (0.5 + 0.1 * torch.rand(20_000, generator=generator)).bfloat16()
    weights = {
        "fp32": nn.Parameter(start.float()), "stochastic": nn.Parameter(start.clone()), "pure": nn.Parameter(start.clone())
    }  # fmt: skip
    optimizers = {n: optimizer_over(w, precision="masters" if n == "fp32" else n, weight_decay=0.1) for n, w in weights.items()}
    for _ in range(200):
        gradient = 1 + 0.3 * torch.randn(20_000, generator=generator)
        for name, weight in weights.items():
            backward(weight, gradient.bfloat16())
            optimizers[name].step(1e-5)
    moved = {name: float((weight.detach().float() - start.float()).mean()) for name, weight in weights.items()}
    assert moved["stochastic"] == pytest.approx(moved["fp32"], rel=0.05)
    assert abs(moved["pure"]) < 0.1 * abs(moved["fp32"])


def test_fp16_leaves_an_overflow_out_and_recovers():
    """Until the scale has come down, neither weights nor moments move; then the step is the one without any scale."""
    weight, plain = (nn.Parameter(torch.full((4,), 0.5, dtype=torch.float16)) for _ in range(2))
    optimizer = optimizer_over(weight)
    gradient = torch.tensor([1.0, 2.0, 4.0, 6.0])
    assert optimizer.loss_scale == 2.0**16
    attempts = []
    while not attempts or not attempts[-1]:
        (optimizer.loss_scale * (weight * gradient.half()).sum()).backward()
        before = {k: v.clone() for k, v in optimizer.state().items() if k != "loss_scale"}
        norm, made = optimizer.step(1e-2)
        attempts.append(made)
        if not made:
            assert optimizer.can_recover
            assert bool((weight == 0.5).all())
            assert all(torch.equal(v, optimizer.state()[k]) for k, v in before.items())
    assert norm == pytest.approx(math.sqrt(57)), "of the gradient itself"
    assert attempts == [False, False, False, True], "6 x 65,536, 6 x 32,768 and 6 x 16,384 are above 65,504"
    unscaled = MasterAdamW([("w", plain)], OptimizerConfig(learning_rate=1e-2, max_grad_norm=None))
    unscaled._scale = None
    backward(plain, gradient)
    unscaled.step(1e-2)
    assert torch.equal(weight, plain)
    assert torch.equal(optimizer.masters[0], unscaled.masters[0]), "powers of two leave no trace"


def test_the_loss_is_scaled_where_fp16_lies_beneath_fp32_parameters():
    """As an adapter's are: their gradient comes through the base, and keeps what fp16 alone would lose."""
    torch.manual_seed(0)
    base, start = torch.randn(8, 8).half(), torch.randn(8, 8)

    def learnt(half):
        weight = nn.Parameter(start.clone())
        optimizer = MasterAdamW([("w", weight)], OptimizerConfig(learning_rate=1e-2, max_grad_norm=None), half=half)
        (optimizer.loss_scale * 1e-9 * (base @ weight.half()).float().sum()).backward()
        return optimizer.loss_scale, optimizer.step(1e-2)[0], optimizer

    scale, norm, optimizer = learnt(True)
    assert scale == 2.0**16
    assert norm == pytest.approx(1e-9 * float(base.float().sum(0).norm()) * math.sqrt(8), rel=1e-2)
    scale, norm, unscaled = learnt(None)
    assert (scale, norm) == (1.0, 0.0), "1e-9 is nothing in fp16"
    optimizer.load_state(unscaled.state())  # of a version that did not scale it


def test_the_scale_comes_back_up_and_never_below_1():
    scale = LossScale(patience=3)
    for _ in range(40):
        scale.update(finite=False)
    assert scale.value == 1
    assert not scale.can_recover
    for _ in range(6):
        scale.update(finite=True)
    assert scale.value == 4


def test_the_scale_is_part_of_the_state():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, restored = optimizer_over(weight), optimizer_over(nn.Parameter(weight.detach().clone()))
    backward(weight, torch.tensor([math.inf, 1.0]))
    assert optimizer.step(1e-3)[1] is False
    restored.load_state({k: v.clone() for k, v in optimizer.state().items()})
    assert restored.loss_scale == optimizer.loss_scale == 2.0**15


@pytest.mark.parametrize(
    ("dtype", "precision", "lora"),
    [
        ("float16", "masters", None), ("bfloat16", "stochastic", None), ("bfloat16", "pure", None), ("bfloat16", "masters", None),
        ("float16", "masters", {"rank": 2, "alpha": 4}),
    ],
)  # fmt: skip
def test_tiny_runs_in_every_precision(small_config, letters, quiet, tmp_path, dtype, precision, lora):
    """The first step, before any update, has the numbers of fp32 up to rounding."""

    def steps(name, **sections):
        found = []
        train(
            small_config(**sections), run_folder=tmp_path / name, rewards=letters, console=quiet,
            on_step=lambda report: found.append(report.metrics),
        )  # fmt: skip
        return found

    model = small_config().model.model_dump() | {"dtype": dtype, "lora": lora}
    found = steps("narrow", model=model, optimizer={"precision": precision, "learning_rate": 1e-4})
    assert found[0]["policy/entropy"] == pytest.approx(steps("wide")[0]["policy/entropy"], rel=0.02)
    assert ("optimizer/loss_scale" in found[0]) == (dtype == "float16")
    made = [step for step in found if not step["optimizer/dropped_updates"]]
    if precision == "stochastic":
        assert not any("optimizer/updates_lost" in step for step in made)
    else:
        assert all(0 <= step["optimizer/updates_lost"] <= 1 for step in made)
    assert made or dtype == "float16"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": {"dtype": "float16"}, "optimizer": {"precision": "pure"}}, "precision=masters"),
        ({"model": {"dtype": "float16"}, "optimizer": {"precision": "stochastic"}}, "precision=masters"),
        ({"model": {"dtype": "float16"}, "algorithm": {"preset": "ppo"}}, "use bfloat16"),
        ({"optimizer": {"master_weights": False}}, r"optimizer\.precision"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        build_config(settings)


def test_eight_bits_without_the_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"pip install 'groupwise\[bitsandbytes\]'"):
        optimizer_over(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), precision="masters-8bit")


@pytest.mark.filterwarnings("ignore")
def test_eight_bit_moments_follow_full_ones():
    pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    start = (0.05 * torch.randn(64, 128, generator=generator)).bfloat16()
    weights = [nn.Parameter(start.clone()) for _ in range(3)]
    full, small = optimizer_over(weights[0]), optimizer_over(weights[1], precision="masters-8bit")
    assert small.adamw.state[small.masters[0]]["state1"].dtype == torch.uint8
    for _ in range(20):
        gradient = torch.randn(64, 128, generator=generator) + 0.5
        for weight, optimizer in ((weights[0], full), (weights[1], small)):
            backward(weight, gradient)
            optimizer.step(1e-3)
    moved = [m - start.float() for m in (full.masters[0], small.masters[0])]
    assert float((moved[0] - moved[1]).norm() / moved[0].norm()) < 0.05
    saved = {k: v.clone() for k, v in small.state().items()}
    restored = optimizer_over(weights[2], precision="masters-8bit")
    restored.load_state(saved)
    for weight, optimizer in ((weights[1], small), (weights[2], restored)):
        backward(weight, gradient)
        optimizer.step(1e-3)
    assert torch.equal(small.masters[0], restored.masters[0])
    assert torch.equal(weights[1], weights[2])


@pytest.mark.filterwarnings("ignore")
def test_eight_bit_moments_in_pieces_are_those_of_one_call(monkeypatch):
    """A tensor of several pieces, the last one neither whole nor a multiple of the blocks that share a scale."""
    optim = pytest.importorskip("bitsandbytes.optim")
    monkeypatch.setattr(optimizers, "PIECE", 4096)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(91, 101, generator=generator)
    whole, cut = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    at_once, in_pieces = optim.AdamW8bit([whole], **settings), optimizers.eight_bit_adamw([{"params": [cut]}], **settings)
    for _ in range(3):
        gradient = torch.randn(91, 101, generator=generator)
        whole.grad, cut.grad = gradient.clone(), gradient.clone()
        at_once.step()
        in_pieces.step()
        assert torch.equal(whole, cut)
    assert list(in_pieces.state) == [cut]
    for name, wanted in at_once.state[whole].items():
        found = in_pieces.state[cut][name]
        assert torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted, name


@pytest.mark.filterwarnings("ignore")
def test_eight_bit_moments_are_updated_without_copies_of_the_tensor(monkeypatch):
    """On CPUs: no more than a piece goes to bitsandbytes' update, which makes five fp32 copies of what it is given."""
    functional = pytest.importorskip("bitsandbytes.functional")
    seen, update = [], functional.optimizer_update_8bit_blockwise
    monkeypatch.setattr(
        functional, "optimizer_update_8bit_blockwise", lambda *a, **k: (seen.append(a[1].numel()), update(*a, **k))
    )
    weight = nn.Parameter(torch.zeros(3, optimizers.PIECE // 2, dtype=torch.bfloat16))
    optimizer = optimizer_over(weight, precision="masters-8bit")
    backward(weight, torch.ones(3, optimizers.PIECE // 2))
    optimizer.step(1e-3)
    assert seen == [optimizers.PIECE, optimizers.PIECE // 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimiser_with_a_home_of_its_own_walks_the_same_path(dtype):
    """Masters, moments and gradients apart from the weights, as on a GPU with ``offload``: here the other place is the CPU as well, so
    what is held is that they are apart and that nothing is lost on the way, not the transfer itself."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, 8, generator=generator).to(dtype)
    near, far = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    optimizers = [(near, MasterAdamW([("w", near)], config)), (far, MasterAdamW([("w", far)], config, home=torch.device("cpu")))]
    apart = optimizers[1][1]
    assert apart.masters[0] is not far
    assert apart.masters[0].data_ptr() != far.data_ptr()
    for _ in range(5):
        gradients = [torch.randn(40, 8, generator=generator) for _ in range(2)]
        for weight, optimizer in optimizers:
            for gradient in gradients:
                backward(weight, gradient)
            optimizer.step(1e-2)
            assert weight.grad is None
        assert torch.equal(near, far)
    assert ("master.w" in apart.state()) == (dtype == torch.bfloat16)
    for gradient in apart.gradients():
        assert gradient is None
    apart.zero_gradient(0).add_(1.0)  # what other processes have for one with nothing to learn
    assert apart.step(1e-2) == (pytest.approx(math.sqrt(320)), True)
    assert far.grad is None
    with pytest.raises(ConfigError, match="precision=masters"):
        build_config({"optimizer": {"offload": True, "precision": "stochastic"}})


@pytest.mark.parametrize("written_by", ["this version", "an earlier one"])
@pytest.mark.parametrize("homes", [(None, "cpu"), ("cpu", None)], ids=["then offloaded", "offloaded before"])
def test_fp32_weights_resume_with_another_home_for_their_optimiser(homes, written_by):
    start, config = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), OptimizerConfig(learning_rate=1e-2)

    def made(home, start):
        weight = nn.Parameter(start.detach().clone())
        return weight, MasterAdamW([("w", weight)], config, home=home and torch.device(home))

    def step(weight, optimizer):
        backward(weight, torch.ones(40, 8))
        optimizer.step(1e-2)

    weight, optimizer = made(homes[0], start)
    step(weight, optimizer)
    before = {"master.w": weight.detach()} if written_by == "an earlier one" else {}
    resumed, restored = made(homes[1], weight)
    restored.load_state(optimizer.state() | before)
    step(weight, optimizer)
    step(resumed, restored)
    assert torch.equal(resumed, weight)
    assert not torch.equal(weight, start)


def test_the_run_s_seed_names_the_bits_of_stochastic_rounding():
    """And two optimisers of one run (a critic's beside the policy's) do not round alike."""
    found = {}
    for name, *seed in (("one", 0, 5), ("again", 0, 5), ("other", 1, 5), ("later", 0, 6), ("critic", 0, 5, 1)):
        parameter = nn.Parameter(torch.linspace(-1, 1, 400, dtype=torch.bfloat16))
        optimizer = MasterAdamW([("weight", parameter)], OptimizerConfig(learning_rate=1e-4, precision="stochastic"))
        seed_noise([optimizer], *seed)
        parameter.sum().backward()
        optimizer.step(1e-4)
        found[name] = parameter.detach().clone()
    assert torch.equal(found["one"], found["again"])
    assert all(not torch.equal(found["one"], found[name]) for name in ("other", "later", "critic"))


def test_each_process_rounds_its_rows_by_bits_of_its_own():
    """Where FSDP2 divides a tensor; the first one's are those of a single process."""
    settings = OptimizerConfig(learning_rate=1e-4, precision="stochastic", max_grad_norm=None)
    start = torch.linspace(-1, 1, 400, dtype=torch.bfloat16)
    alone, *divided = rows = [nn.Parameter(start.clone()) for _ in range(3)]
    optimizers = [MasterAdamW([("weight", alone)], settings)]
    optimizers += [ShardedAdamW([("weight", p)], settings, torch.bfloat16, World(rank)) for rank, p in enumerate(divided)]
    seed_noise(optimizers, 0, 5)
    for parameter, optimizer in zip(rows, optimizers, strict=True):
        parameter.sum().backward()
        if isinstance(optimizer, ShardedAdamW):
            optimizer.collect()
        optimizer.step(1e-4)
    assert not torch.equal(alone, start)
    assert torch.equal(divided[0], alone)
    assert not torch.equal(divided[1], alone)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_is_learnt_with_the_bits_of_the_run_s_seed(tiny_qwen2):
    """Which its advantages and passes do not depend on: the same batch, by learners of two runs."""
    moved = {}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        optimizer = {"precision": "stochastic", "learning_rate": 1e-4}
        learner, before = learner_of(tiny_qwen2().bfloat16(), config_of(training={"seed": seed}, optimizer=optimizer))
        learner.learn(make_groups(before, [[1.0, 0.0, 0.5, 0.0]]))
        moved[name] = [parameter.detach().clone() for _, parameter in learner.scorer.named_parameters()]
    assert all(map(torch.equal, moved["one"], moved["again"]))
    assert not all(map(torch.equal, moved["one"], moved["other"]))
