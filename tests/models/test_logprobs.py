"""The tiled output head against log_softmax and gather, forward and backward, and what it keeps in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise import limits
from groupwise.models import logprobs
from groupwise.models.logprobs import score_tokens
from groupwise.models.native import build, calls

VOCABULARY, WIDTH, ROWS, SLICE = 53, 12, 5, 11
"""A vocabulary, a model width, and the rows and columns of one tile."""


needs_kernels = pytest.mark.skipif(build.kernels().library is None, reason=f"no kernels: {build.kernels().description}")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.LOGIT_ROWS, "cpu", ROWS)
    for module in (limits, logprobs):
        monkeypatch.setattr(module, "LOGIT_COLUMNS", SLICE)
    monkeypatch.setattr(limits, "MIN_LOGIT_COLUMNS", 3)
    monkeypatch.setattr(limits, "LOGIT_GRADIENT_ELEMENTS", 10 * SLICE)


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden ``[T, D]``, weight ``[V, D]``, targets ``[T]`` and the gradient that reaches the logprobs ``[T]``."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(tokens, generator=generator)


def token_logprobs(*given: Any) -> Tensor:
    return score_tokens(*given).logprobs_T


def token_logprobs_and_entropy(*given: Any) -> tuple[Tensor, Tensor]:
    scored = score_tokens(*given, entropy=True)
    assert scored.entropy_T is not None
    return scored.logprobs_T, scored.entropy_T


def plain_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    scores = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, dim=-1)
    return scores.gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tokens", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
def test_tiles_equal_the_whole(tokens: int, temperature: float) -> None:
    hidden, weight, targets, grad = inputs(tokens)
    ours, expected = token_logprobs(hidden, weight, targets, temperature), plain_logprobs(hidden, weight, targets, temperature)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(token_logprobs(hidden, weight, targets, temperature), ours)
    wanted = torch.autograd.grad(expected, (hidden, weight), grad.double())
    for gradient, want in zip(torch.autograd.grad(ours, (hidden, weight), grad), wanted, strict=True):
        assert (gradient - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tokens", [1, ROWS, 3 * ROWS + 2])
def test_entropy_and_its_gradient_equal_the_whole(tokens: int, temperature: float) -> None:
    hidden, weight, targets, grad = inputs(tokens)
    grad_entropy = torch.randn(tokens, generator=torch.Generator().manual_seed(9))
    ours, entropy = token_logprobs_and_entropy(hidden, weight, targets, temperature)
    scores = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, dim=-1)
    expected, wanted = scores.gather(1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(1)
    assert torch.equal(ours, token_logprobs(hidden, weight, targets, temperature))
    torch.testing.assert_close(entropy.double(), wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(token_logprobs_and_entropy(hidden, weight, targets, temperature)[1], entropy)
    got = torch.autograd.grad((ours * grad + entropy * grad_entropy).sum(), (hidden, weight))
    want = torch.autograd.grad((expected * grad + wanted * grad_entropy).sum(), (hidden, weight))
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_entropy_alone_may_be_what_is_learnt() -> None:
    hidden, weight, targets, _ = inputs(7)
    (got,) = torch.autograd.grad(token_logprobs_and_entropy(hidden, weight, targets)[1].sum(), (hidden,))
    scores = torch.log_softmax(hidden.double() @ weight.double().t(), dim=-1)
    (want,) = torch.autograd.grad(-(scores.exp() * scores).sum(), (hidden,))
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("needed", ["hidden", "weight"])
def test_only_the_gradient_that_is_asked_for(needed: str) -> None:
    hidden, weight, targets, grad = inputs(3 * ROWS + 2)
    both = torch.autograd.grad(token_logprobs(hidden, weight, targets), (hidden, weight), grad)
    (weight if needed == "hidden" else hidden).requires_grad_(False)
    token_logprobs(hidden, weight, targets).backward(grad)
    assert (weight.grad if needed == "hidden" else hidden.grad) is None
    one, wanted = (hidden.grad, both[0]) if needed == "hidden" else (weight.grad, both[1])
    assert one is not None
    torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tokens", [0, 1, ROWS, 3 * ROWS + 2])
def test_a_frozen_head_says_what_the_pass_without_gradients_says(tokens: int, temperature: float) -> None:
    hidden, weight, targets, grad = inputs(tokens)
    narrow, head = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16()
    ours = token_logprobs(narrow, head, targets, temperature)
    with torch.no_grad():
        assert torch.equal(token_logprobs(narrow, head, targets, temperature), ours), "to the last bit: a KL of 0 is 0"
    exact = narrow.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(plain_logprobs(exact, head, targets, temperature), exact, grad.double())
    (got,) = torch.autograd.grad(ours, narrow, grad)
    assert (got - want).norm() <= 0.02 * want.norm()


@needs_kernels
@pytest.mark.parametrize(
    ("frozen", "kept", "products"),
    [(True, 0, 2), (False, VOCABULARY, 3), (False, 0, 4), (False, VOCABULARY // 2, 4 - 3 * 7 / VOCABULARY)],
    ids=["frozen", "all kept", "nothing kept", "three slices of 7 kept"],
)
def test_how_often_a_head_is_multiplied(frozen: bool, kept: int, products: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 3 * ROWS
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", 2 * tokens * kept)
    monkeypatch.setattr(calls, "_products_allowed", False)  # those on matrix units are not PyTorch's, and cannot be counted
    hidden, weight, targets, grad = inputs(tokens)
    narrow, head = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_(not frozen)
    with Products() as seen:
        token_logprobs(narrow, head, targets).backward(grad)
    assert seen.multiplied == pytest.approx(products * tokens * VOCABULARY * WIDTH)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [1, VOCABULARY // 2, VOCABULARY])
def test_kept_logits_give_the_same_gradients_to_the_last_bit(
    kept: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 3 * ROWS + 2
    hidden, weight, targets, grad = inputs(tokens)
    narrow, head = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))

    def gradients(kept: int) -> list[Tensor]:
        monkeypatch.setattr(logprobs, "KEPT_LOGITS", dtype.itemsize * tokens * kept)
        ours, entropy = token_logprobs_and_entropy(narrow, head, targets, 0.7)
        learnt = (ours * grad + 0.1 * entropy).sum()
        first = torch.autograd.grad(learnt, (narrow, head), retain_graph=True)
        return [*first, *torch.autograd.grad(learnt, (narrow, head)), *torch.autograd.grad(
            token_logprobs(narrow, head, targets), (narrow, head), grad
        )]  # fmt: skip

    for found, wanted in zip(gradients(kept), gradients(0), strict=True):
        assert torch.equal(found, wanted)


@needs_kernels
@pytest.mark.parametrize("room", [0, 1000, 1500, 2**20])
def test_no_more_logits_are_kept_than_there_is_room_for_and_none_after_the_way_back(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, width = 3 * ROWS, 7
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", room)
    hidden, weight, targets, grad = inputs(tokens)
    ours = token_logprobs(hidden, weight, targets)
    held = sum(tensor.nbytes for tensor in ours.grad_fn.kept)  # type: ignore[union-attr]
    assert held <= room
    assert held == 4 * tokens * VOCABULARY or held + 4 * tokens * width > room, "as many slices as fit"
    ours.backward(grad, retain_graph=True)
    assert ours.grad_fn.kept == []  # type: ignore[union-attr]


@needs_kernels
@pytest.mark.parametrize("certain", [0.0, 12.0])
def test_a_frozen_narrow_head_is_as_exact_as_a_trained_one(certain: float) -> None:
    """``certain`` is added to the target's logit: where p is near 1, its gradient must not be what bf16 leaves of 1 - p."""
    hidden, weight, targets, grad = inputs(3 * ROWS + 2)
    wide, towards = weight.detach(), weight.detach()[targets]
    narrow = (hidden.detach() + certain * towards / towards.square().sum(1, keepdim=True)).bfloat16().requires_grad_()
    exact = narrow.detach().double().requires_grad_()
    head = wide.bfloat16()
    (want,) = torch.autograd.grad(plain_logprobs(exact, head, targets, 1.0), exact, grad.double())
    (trained,) = torch.autograd.grad(token_logprobs(narrow, head.clone().requires_grad_(), targets), narrow, grad)
    (frozen,) = torch.autograd.grad(token_logprobs(narrow, head, targets), narrow, grad)
    assert frozen.dtype == torch.bfloat16
    assert (frozen - want).norm() <= 1.5 * (trained - want).norm() + 0.004 * want.norm()
    assert (frozen - want).norm() <= 0.03 * want.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("logit", [20.0, 19.7])
@pytest.mark.parametrize("temperature", [0.7, 0.01, 1e-4, 1e-6])
def test_a_certain_token_has_a_log_probability_of_0(temperature: float, logit: float, dtype: torch.dtype) -> None:
    """The other logits are 0: all their probabilities together are too small to be added to 1 in fp32."""
    targets = torch.arange(0, VOCABULARY, 4)
    weight = torch.eye(VOCABULARY, dtype=dtype)
    hidden = (logit * weight[targets]).requires_grad_()
    for head in (weight, weight.clone().requires_grad_()):
        assert token_logprobs(hidden, head, targets, temperature).tolist() == [0.0] * len(targets)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets, grad = inputs(2 * ROWS)
    ours, expected = token_logprobs(hidden * 100, weight, targets), plain_logprobs(hidden * 100, weight, targets, 1.0)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-3)
    assert torch.autograd.grad(ours, weight, grad)[0].isfinite().all()


def test_narrow_weights_give_wide_logprobs_and_narrow_gradients() -> None:
    hidden, weight, targets, grad = inputs(3 * ROWS + 2)
    narrow = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in narrow]
    ours, expected = token_logprobs(*narrow, targets), plain_logprobs(*exact, targets, 1.0)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-2, atol=3e-2)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for gradient, want in zip(torch.autograd.grad(ours, narrow, grad), wanted, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient - want).norm() <= 0.02 * want.norm()


def test_no_tokens_no_gradient() -> None:
    hidden, weight, targets, _ = inputs(0)
    ours = token_logprobs(hidden, weight, targets)
    assert ours.shape == (0,)
    assert torch.equal(torch.autograd.grad(ours.sum(), weight)[0], torch.zeros_like(weight))


class Products(TorchDispatchMode):
    """Counts the multiplications of all matrix products."""

    multiplied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.multiplied += args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_nothing_of_tokens_times_vocabulary_is_made_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", 0)
    tokens = 20 * ROWS
    hidden, weight, targets, grad = inputs(tokens)
    with Largest() as seen:
        token_logprobs(hidden, weight, targets, 0.9).backward(grad)
    assert seen.elements >= VOCABULARY * WIDTH  # the backward pass was watched too: it makes the weight's gradient
    assert seen.elements <= max(ROWS * VOCABULARY, VOCABULARY * WIDTH, tokens * WIDTH)
    with Largest() as frozen:
        token_logprobs(hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16(), targets, 0.9).backward(grad)
    assert frozen.elements <= max(ROWS * VOCABULARY, VOCABULARY * WIDTH, tokens * WIDTH)
    with Largest() as whole:
        plain_logprobs(hidden, weight, targets, 0.9)
    assert whole.elements >= tokens * VOCABULARY
