"""Log-probabilities of given tokens, and entropies, in memory that does not grow with tokens times vocabulary.

The output head is the largest matrix of a small model and its logits would be the largest tensor of the whole step. Both directions
therefore go over the vocabulary in slices. Forward keeps a running maximum and sum for each row; backward computes a slice's logits
again, turns them into the gradient of the logits, and with it makes that slice of the head's gradient at once: a product over all
rows, which is fast, and which needs no adding up. On CPUs the first slices' logits are kept, as far as there is room for them
(``limits.KEPT_LOGITS``), and not computed again.

A head that takes no gradient, as beside an adapter, needs no second look at the logits: a log-probability's gradient by its row's hidden
state is known as soon as the row's logits are, and backward only scales it (``_FrozenHead``). Axes: T tokens, D model width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from groupwise.limits import KEPT_LOGITS, LOGIT_COLUMNS, LOGIT_ROWS, logit_columns
from groupwise.models.devices import product_gives_fp32
from groupwise.models.native import calls as native
from groupwise.models.ops import kernels_fit, product, triton_kernels

__all__ = ["Scored", "score_tokens"]


@dataclass(frozen=True, slots=True)
class Scored:
    """What a policy says about given tokens. Differentiable; what was not asked for is None."""

    logprobs_T: Tensor
    """``[T]`` in fp32 and nats."""
    entropy_T: Tensor | None = None
    """``[T]`` in fp32 and nats: of the whole distribution that the token was drawn from."""
    hidden_T: Tensor | None = None
    """``[T, D]``: what the output head read, that is the state in which the token was chosen."""


def _row_tiles(hidden: Tensor) -> Iterator[slice]:
    rows = LOGIT_ROWS["cpu" if hidden.device.type == "cpu" else "cuda"]
    for start in range(0, len(hidden), rows):
        yield slice(start, min(start + rows, len(hidden)))


def _slices(vocabulary: int, rows: int, device: torch.device) -> Iterator[slice]:
    width = logit_columns(rows, "cpu" if device.type == "cpu" else "cuda")
    for start in range(0, vocabulary, width):
        yield slice(start, min(start + width, vocabulary))


allowed_fp32 = True
"""Whether products that give fp32 are taken where there are some; the engine's ``fast_paths`` leaves them out where they are no good."""


class _Tile:
    """fp32 logits of some rows and one slice of the vocabulary, in a buffer that is used again."""

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: float) -> None:
        self.hidden, self.weight, self.temperature = hidden, weight, temperature
        rows = max((r.stop - r.start for r in _row_tiles(hidden)), default=0)
        self.wide = allowed_fp32 and product_gives_fp32(torch.mm, hidden.device, hidden.dtype)
        copied = not self.wide and not kernels_fit(hidden.device)
        self.buffer = torch.empty(
            rows * min(LOGIT_COLUMNS, len(weight)) if copied else 0, dtype=torch.float32, device=hidden.device
        )

    def product(self, rows: slice, columns: slice) -> Tensor:
        """Logits before the temperature, in fp32 where there are such products."""
        hidden, weight = self.hidden[rows], self.weight[columns].t()
        return torch.mm(hidden, weight, out_dtype=torch.float32) if self.wide else hidden @ weight

    def logits(self, rows: slice, columns: slice) -> Tensor:
        out = self.product(rows, columns)
        if not self.wide:
            out = self.buffer[: out.numel()].view(out.shape).copy_(out)
        return out if self.temperature == 1.0 else out.div_(self.temperature)


def _place(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Whether each row's target lies in this slice, and where in it, as ``[rows, 1]``; anywhere where it does not.

    To pick these rows out one would have to know how many they are: on a GPU a wait for every slice.
    """
    inside = (targets >= columns.start) & (targets < columns.stop)
    return inside, (targets - columns.start).clamp_(0, columns.stop - columns.start - 1)[:, None]


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool, kept: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities, log-sum-exps, and entropies if asked for; ``[T]`` in fp32 each. ``kept``: takes the first slices' logits, before
    the temperature, where the kernels fit."""
    chosen = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    top = torch.full_like(chosen, float("-inf"))
    total, weighted = torch.zeros_like(chosen), torch.zeros_like(chosen)  # sums of exp(s - top), and of exp(s - top) (s - top)
    if native.fits(hidden):
        _take_by_kernels(hidden, weight, targets, temperature, chosen, top, total, weighted if entropy else None, kept)
    else:
        _take(hidden, weight, targets, temperature, chosen, top, total, weighted if entropy else None)
    log_total = total.log()
    normaliser = top + log_total
    return chosen - normaliser, normaliser, log_total - weighted / total if entropy else None


def _take_by_kernels(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chosen: Tensor, top: Tensor, total: Tensor,
    weighted: Tensor | None, kept: Sequence[Tensor],
) -> None:  # fmt: skip
    """Like ``_take``, on logits in the weights' own dtype."""
    for rows in _row_tiles(hidden):
        for index, columns in enumerate(_slices(len(weight), len(targets), hidden.device)):
            out = kept[index][rows] if index < len(kept) else None
            _take_slice(hidden, weight, targets, temperature, chosen, top, total, weighted, rows, columns, out)


def _take_slice(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chosen: Tensor, top: Tensor, total: Tensor,
    weighted: Tensor | None, rows: slice, columns: slice, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of some rows and one slice of the vocabulary; returns their logits, before the temperature, in ``out`` if there is one."""
    logits = product(hidden[rows], weight[columns].t(), out=out)
    inside, place = _place(targets[rows], columns)
    factor = 1 / torch.tensor(temperature, dtype=torch.float32)  # rounded as the kernel rounds it, or a certain token's is not 0
    chosen[rows] = torch.where(inside, logits.gather(1, place)[:, 0].float() * factor, chosen[rows])
    native.take_logits(logits, top[rows], total[rows], None if weighted is None else weighted[rows], temperature)
    return logits


def _take(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chosen: Tensor, top: Tensor, total: Tensor,
    weighted: Tensor | None,
) -> None:  # fmt: skip
    """Go over all logits: the targets' own, and each row's maximum and sums relative to it."""
    tile = _Tile(hidden, weight, temperature)
    for rows in _row_tiles(hidden):
        for columns in _slices(len(weight), len(targets), hidden.device):
            if kernels_fit(hidden.device):
                sums = (chosen[rows], top[rows], total[rows], None if weighted is None else weighted[rows])
                triton_kernels().take_logits(tile.product(rows, columns), targets[rows], *sums, columns.start, temperature)
                continue
            logits = tile.logits(rows, columns)
            inside, place = _place(targets[rows], columns)
            chosen[rows] = torch.where(inside, logits.gather(1, place)[:, 0], chosen[rows])
            highest = torch.maximum(top[rows], logits.amax(1))
            shrink, moved = (top[rows] - highest).exp_(), top[rows] - highest
            if weighted is not None:
                moved.nan_to_num_(neginf=0.0)  # nothing was summed yet
                weighted[rows] = (weighted[rows] + total[rows] * moved) * shrink
                shifted = logits.sub_(highest[:, None])
                weights = shifted.exp()
                weighted[rows] += (weights * shifted).sum(1)
            else:
                weights = logits.sub_(highest[:, None]).exp_()
            total[rows] = total[rows] * shrink + weights.sum(1)
            top[rows] = highest


def _room(hidden: Tensor, weight: Tensor) -> list[Tensor]:
    """Buffers ``[T, columns]`` for the logits of the first slices, of at most ``KEPT_LOGITS`` bytes together."""
    if not native.fits(hidden):
        return []
    most = KEPT_LOGITS // max(1, len(hidden) * hidden.element_size())
    kept = takewhile(lambda columns: columns.stop <= most, _slices(len(weight), len(hidden), hidden.device))
    return [hidden.new_empty(len(hidden), columns.stop - columns.start) for columns in kept]


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.kept = _room(hidden, weight)
        logprobs, normaliser, entropies = _forward(hidden, weight, targets, temperature, entropy, ctx.kept)
        ctx.save_for_backward(hidden, weight, targets, normaliser, *(() if entropies is None else (entropies,)))
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser, *rest = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad = torch.zeros_like(normaliser) if grad is None else grad.float() / ctx.temperature
        of_entropy = (grad_entropy.float() / ctx.temperature, rest[0]) if rest and grad_entropy is not None else None
        by_kernels = native.fits(hidden)
        tile = None if by_kernels else _Tile(hidden, weight, ctx.temperature)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        kept, ctx.kept = ctx.kept, []  # gradients take their place, so another backward pass makes them all again
        for columns in _slices(len(weight), len(targets), hidden.device):
            there = kept.pop(0) if kept else None
            narrow = hidden.new_empty(len(targets), columns.stop - columns.start) if there is None else there
            for rows in _row_tiles(hidden):
                entropies = None if of_entropy is None else (of_entropy[0][rows], of_entropy[1][rows])
                if tile is None:
                    if there is None:
                        product(hidden[rows], weight[columns].t(), out=narrow[rows])
                    place = targets[rows] - columns.start
                    native.logit_gradients(narrow[rows], normaliser[rows], grad[rows], entropies, place, ctx.temperature)
                    continue
                if kernels_fit(hidden.device):
                    triton_kernels().logit_gradients(
                        tile.product(rows, columns), narrow[rows], targets[rows], normaliser[rows], grad[rows], entropies,
                        columns.start, ctx.temperature,
                    )  # fmt: skip
                    continue
                grad_logits = _logit_gradient(tile.logits(rows, columns), rows, normaliser, grad, of_entropy)
                inside, place = _place(targets[rows], columns)
                # In fp32: where p is near 1, little is left of onehot - p.
                grad_logits.scatter_add_(1, place, torch.where(inside, grad[rows], 0.0)[:, None])
                narrow[rows] = grad_logits
            if grad_hidden is not None:
                grad_hidden += product(narrow, weight[columns])
            if grad_weight is not None:
                product(narrow.t(), hidden, out=grad_weight[columns])
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _logit_gradient(
    logits: Tensor, rows: slice, normaliser: Tensor, grad: Tensor, of_entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """-grad p, and for the entropy H -grad_H p (log p + H), in place of the logits; the caller adds the target's own share."""
    log_p = logits.sub_(normaliser[rows, None])
    if of_entropy is None:
        return log_p.exp_().mul_(-grad[rows, None])
    grad_entropy, entropy = of_entropy
    factor = (log_p + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(grad[rows, None])
    return log_p.exp_().mul_(factor).neg_()


class _FrozenHead(Function):
    """Log-probabilities by a head that takes no gradient: two products in place of three. Only where the kernels fit.

    d log p(target) / d hidden = (weight[target] - sum over v of p(v) weight[v]) / temperature. It is kept, as large as ``hidden``. The
    log-probabilities are those of ``_forward`` to the last bit, so that a reference that is the same model has a KL of exactly 0.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        chosen = torch.empty(len(targets), dtype=torch.float32)
        top, total = torch.full_like(chosen, float("-inf")), torch.zeros_like(chosen)
        slopes = torch.empty(hidden.shape, dtype=torch.float32)
        columns = list(_slices(len(weight), len(targets), hidden.device))
        for rows in _row_tiles(hidden):
            logits: list[Tensor] = []
            for part in columns:
                logits.append(_take_slice(hidden, weight, targets, temperature, chosen, top, total, None, rows, part))
            normaliser, one = top[rows] + total[rows].log(), torch.full_like(total[rows], 1 / temperature)
            slopes[rows] = 0
            for part, tile in zip(columns, logits, strict=True):
                native.logit_gradients(tile, normaliser, one, None, targets[rows] - part.start, temperature)
                slopes[rows] += product(tile, weight[part])
        ctx.save_for_backward(slopes.to(hidden.dtype))
        return chosen - (top + total.log())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grad[:, None]).to(slopes.dtype), None, None, None


def score_tokens(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy: bool = False, keep_hidden: bool = False
) -> Scored:
    """``log softmax(hidden @ weight.T / temperature)[target]`` for each row; with the entropies of whole distributions and the
    hidden states themselves if asked for.

    Args:
        hidden: ``[T, D]``, outputs of the final norm at the rows that predict.
        weight: ``[V, D]``, the output head.
        targets: ``[T]`` token ids.
    """
    entropies: Tensor | None = None
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        logprobs, _, entropies = _forward(hidden, weight, targets, temperature, entropy)
    elif entropy or weight.requires_grad or not native.fits(hidden):
        logprobs, entropies = _TokenLogprobs.apply(hidden, weight, targets, temperature, entropy)
    else:
        logprobs = _FrozenHead.apply(hidden, weight, targets, temperature)
    return Scored(logprobs, entropies, hidden if keep_hidden else None)
