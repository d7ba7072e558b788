"""One decode step: the next-token logits of every row in flight.

Between the matrix products, models on CPUs are computed by fused loops (``models/native``) where these could be compiled, models on GPUs
by Triton kernels (``gpu_kernels.py``), and everything else by PyTorch's operations. Their attention has two parts with one softmax.
Against the prompt, all rows of a group are the queries of one matrix product with the group's single copy of keys and values; against its
own tokens, each row has its own.

The matrix products themselves are callables, so that they can run on weights laid out for few rows. On CPUs the library's kernels for
bf16 spend a large part of a step rearranging the weight: with 32 rows a step of SmolLM2-135M took 17.8 ms on plain weights and 13.6 ms
on rearranged ones (2 cores, AVX-512 bf16). The package's own kernels take packed weights, and all layers of a step in one call: with few
rows, the calls one by one from Python took a fifth of its time. Where they are not there, the library's blocked kernels do the same.
Rearranging all weights takes about as long as two decode steps, so it is done again for each call of the sampler, which also is what
makes it follow the policy. Where a run asks for it the copies are rounded to 8 bits: half of the bytes, or a quarter, are read for each
step, and processors multiply more pairs of bytes at once.

What a row is given between its turns is computed beside a step (``chunked_prefill.py``).

Axes: B rows, S groups, W rows per group (widest), K key-value heads, U query heads per key head, E head width, P prompt positions, C own
positions there is room for, V vocabulary; T given tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.chunked_prefill import PrefillChunk
from groupwise.models.decoder import Decoder
from groupwise.models.devices import computes_bf16, product_gives_fp32
from groupwise.models.layer import Layer
from groupwise.models.native import calls as native
from groupwise.models.native.build import kernels
from groupwise.models.ops import gated, head_norm, rms_norm, rope_rotate, rotate_heads

__all__ = [
    "ALLOWED", "DecodeStep", "DecodeWeights", "Lanes", "Product", "attend", "decode", "decoding_kernels_fit", "in_bucket",
    "rearranged_product", "rearranging_helps", "why_not_in_8_bits",
]  # fmt: skip


@dataclass
class Lanes:
    """Where rows stand beside each other in the products with their prompts, and what each row may see."""

    groups: int
    width: int
    row_index: Tensor
    """``[B]``, counting."""
    lane_of_row: Tensor | None
    """``[B]`` place of each row in the ``[S * W]`` lanes of the prompt product; None where row i is lane i."""
    row_of_lane: Tensor
    """``[S * W]``; empty lanes repeat row 0, and nobody reads them."""
    prompt_positions: int
    """P."""
    mask: Tensor | None
    """``[B, P + C]`` additive: a row sees its prompt and its own positions so far. None for GPU kernels, which read lengths."""
    places: Tensor | None
    """``[B, P + C]``: of each place in the cache, the position in the row's sequence. None where ``mask`` is."""

    @classmethod
    def plan(
        cls, cache: Cache, group_of_row: list[int], prompt_lengths: list[int], own_lengths: list[int], spare_rows: int = 0,
        width_of: Callable[[int], int] = int,
    ) -> Lanes:  # fmt: skip
        """``spare_rows``: of the last rows so many are nobody's. ``width_of``: gives more places to a group than its rows need."""
        table = cache.own[0][0]
        filled = [0] * len(prompt_lengths)
        ranks = []
        for group in group_of_row[: len(group_of_row) - spare_rows]:
            ranks.append(filled[group])
            filled[group] += 1
        width = width_of(max(filled))
        ranks += [0] * spare_rows  # what they read is not read
        lanes = [g * width + r for g, r in zip(group_of_row, ranks, strict=True)]
        row_of_lane = torch.zeros(len(prompt_lengths) * width, dtype=torch.long)
        own = len(lanes) - spare_rows
        row_of_lane[torch.tensor(lanes[:own])] = torch.arange(own)
        prompt_of_row = torch.tensor(prompt_lengths)[torch.tensor(group_of_row)]
        mask = places = None
        if not decoding_kernels_fit(table.device):
            seen = torch.cat(
                [
                    torch.arange(cache.prompt_room) < prompt_of_row[:, None],
                    torch.arange(cache.room) < torch.tensor(own_lengths)[:, None],
                ],
                dim=1,
            )
            mask = torch.zeros(seen.shape, dtype=table.dtype).masked_fill_(~seen, float("-inf")).to(table.device)
            places = torch.cat(
                [torch.arange(cache.prompt_room).expand(len(lanes), -1), prompt_of_row[:, None] + torch.arange(cache.room)], dim=1
            ).to(table.device)
        in_order = lanes == list(range(len(row_of_lane)))
        return cls(
            groups=len(prompt_lengths), width=width, row_index=torch.arange(len(lanes), device=table.device),
            lane_of_row=None if in_order else torch.tensor(lanes, device=table.device),
            row_of_lane=row_of_lane.to(table.device), prompt_positions=cache.prompt_room, mask=mask, places=places,
        )  # fmt: skip

    def mask_of(self, window: int | None, positions: Tensor) -> Tensor:
        """``mask`` for layers in which the tokens at ``positions`` ``[B]`` see so many positions, themselves included."""
        assert self.mask is not None
        assert self.places is not None
        return self.mask if window is None else self.mask.masked_fill(self.places <= positions[:, None] - window, float("-inf"))

    def to_lanes(self, rows: Tensor) -> Tensor:
        """``[B, K, U, x]`` to ``[S * K, W * U, x]``: rows of one group beside each other."""
        lanes = rows if self.lane_of_row is None else rows.index_select(0, self.row_of_lane)
        k, u, x = rows.shape[1:]
        return lanes.view(self.groups, self.width, k, u, x).transpose(1, 2).reshape(self.groups * k, self.width * u, x)

    def to_rows(self, lanes: Tensor, k: int, u: int) -> Tensor:
        """The inverse of ``to_lanes``."""
        x = lanes.shape[-1]
        rows = lanes.view(self.groups, k, self.width, u, x).transpose(1, 2).reshape(self.groups * self.width, k, u, x)
        return rows if self.lane_of_row is None else rows.index_select(0, self.lane_of_row)


ALLOWED = {"fp32": True, "rearranged": True, "kernels": True}
"""What ``fast_paths`` leaves out is False."""

_KERNELS_ON = frozenset({"cuda"})


def decoding_kernels_fit(device: torch.device) -> bool:
    """Whether there are GPU kernels for models on ``device``."""
    return ALLOWED["kernels"] and device.type in _KERNELS_ON and find_spec("triton") is not None


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """``[x, W, E]`` against ``[x, P, E]``: on a GPU in fp32, as learning has them, so that sampler and policy agree."""
    wide = ALLOWED["fp32"] and product_gives_fp32(torch.bmm, query.device, query.dtype)
    how: dict[str, Any] = {"out_dtype": torch.float32} if wide else {}
    return torch.bmm(query, key.transpose(1, 2), **how)


def attend(query: Tensor, cache: Cache, layer: int, lanes: Lanes, mask: Tensor) -> Tensor:
    """``query`` ``[B, K, U, E]``, already scaled, to attention output of the same shape; ``mask``: as ``lanes.mask``."""
    b, k, u, e = query.shape
    own_key, own_value = (table[:b].view(b * k, cache.room, e) for table in cache.own[layer])
    prompt_key, prompt_value = (table[: lanes.groups].flatten(0, 1) for table in cache.prompt[layer])  # [S * K, P, E]
    p = prompt_key.shape[1]
    to_prompt = lanes.to_rows(_scores(lanes.to_lanes(query), prompt_key), k, u)
    to_own = _scores(query.view(b * k, u, e), own_key).view(b, k, u, -1)
    scores = torch.cat([to_prompt, to_own], dim=-1).add_(mask[:, None, None])
    weights = torch.softmax(scores, dim=-1).to(query.dtype)  # in fp32 within, whatever the dtype
    from_own = torch.bmm(weights[..., p:].reshape(b * k, u, -1), own_value).view(b, k, u, e)
    return from_own.add_(lanes.to_rows(torch.bmm(lanes.to_lanes(weights[..., :p]), prompt_value), k, u))


Product = Callable[[Tensor], Tensor]
"""``[B, in]`` to ``[B, out]``."""


def rearranging_helps(weight: Tensor) -> bool:
    """Whether ``rearranged_product`` is there for this weight: bf16 or fp32 on a CPU for which there are kernels, the package's own or the
    library's blocked ones."""
    if not ALLOWED["rearranged"] or weight.device.type != "cpu":
        return False
    if native.packs(weight):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    operations = torch.ops.mkldnn
    if not (hasattr(operations, "_linear_pointwise") and hasattr(operations, "_reorder_linear_weight")):
        return False
    return (weight.dtype == torch.bfloat16 and computes_bf16()) or (weight.dtype == torch.float32 and _rows_are_alone())


def why_not_in_8_bits(device: torch.device, dtype: torch.dtype) -> str | None:
    """``None`` if products with weights of ``dtype`` on ``device`` can be made in 8 bits here, else the reason. They are compared with
    others once: no kernel is trusted on a processor that it has not met."""
    if device.type != "cpu":
        return f"the model is on {device.type}, and they are for CPUs"
    like = torch.empty(0, dtype=dtype)
    if not native.fits(like):
        built = kernels(dtype == torch.float32)
        return (
            f"the package's kernels are {built.description}"
            if built.library is None
            else f"there are no kernels for {dtype}, or they were left out on this machine"
        )
    if not ALLOWED["rearranged"] or not native.packs(like):
        return f"the package's own products of {dtype} are not for this processor, or were left out on it"
    apart = _apart_in_8_bits(dtype)
    return None if apart <= _MOST_APART[dtype] else f"on this processor they are {apart:.2g} apart from what they should be"


_MOST_APART = {torch.float32: 2e-4, torch.bfloat16: 4e-3}


@cache
def _apart_in_8_bits(dtype: torch.dtype) -> float:
    """How far products are from those of the same rounded weights, as a share of their norm; infinite for what is no number."""
    weight, x = (torch.linspace(-1, 1, n * 650).mul_(37).sin_().view(n, 650).to(dtype) for n in (70, 21))
    largest = weight.float().abs().amax(1, keepdim=True)
    rounded = (weight.float() * (torch.full_like(largest, 127) / largest)).round().mul(largest / 127)
    product, found = rearranged_product(weight, in_8_bits=True), []
    for rows in (*range(1, 13), len(x)):  # kernels differ by their number
        expected = x[:rows].float() @ rounded.t()
        found.append(float((product(x[:rows]).float() - expected).norm() / expected.norm()))
    return max(apart if apart == apart else float("inf") for apart in found)


@cache
def _rows_are_alone() -> bool:
    """Whether a row's product with rearranged fp32 weights is the same to the last bit whatever rows are beside it.

    Runs whose rows come and go by the clock, such as episodes, can be resumed exactly where it is. Processors differ, so it is tried.
    """
    for out, width in ((96, 64), (960, 576)):
        weight, x = (torch.linspace(-1, 1, n * width, dtype=torch.float32).mul_(37).sin_().view(n, width) for n in (out, 130))
        whole = rearranged_product(weight)(x)
        for hint in (1, 64, 256):
            product = rearranged_product(weight, rows=hint)
            if any(not torch.equal(product(x[:rows]), whole[:rows]) for rows in (*range(1, 18), 31, 32, 33, 64, 130)):
                return False
    return True


_FEWEST_FP32 = 8
"""Rows that fp32 weights are rearranged for at least."""


def rearranged_product(weight: Tensor, bias: Tensor | None = None, rows: int = 32, in_8_bits: bool = False) -> Product:
    """``x @ weight.T + bias``, on a rearranged copy of ``weight`` as it is now. ``rows`` is a hint of the batch's size. ``in_8_bits``: the
    copy is rounded (``native.pack_8bit``), where ``native.packs`` the weight.

    A row's product does not depend on the rows beside it, as it does with plain fp32 weights. The library would round the sums of fp32
    weights rearranged for a single row in another way, so none are.
    """
    bias = None if bias is None else bias.to(weight.dtype).contiguous()
    if in_8_bits:
        packed, scales = native.pack_8bit(weight.detach())
        return _Packed(packed, len(weight), bias, weight.dtype, scales)
    if native.packs(weight):
        return _Packed(native.pack(weight.detach()), len(weight), bias, weight.dtype)
    rows = rows if weight.dtype == torch.bfloat16 else max(rows, _FEWEST_FP32)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        return multiply(x, blocked, bias, "none", [], "")

    return product


@dataclass(frozen=True, slots=True)
class _Packed:
    """``Product`` by the package's own kernel."""

    weight: Tensor
    columns: int
    bias: Tensor | None
    dtype: torch.dtype
    """That the weight had, whose kernels read it."""
    scales: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == self.dtype, f"weights of {self.dtype} were packed for inputs of that dtype, and these are of {x.dtype}"
        return native.multiply_packed(x, self.weight, self.columns, self.bias, self.scales)


@dataclass(frozen=True, slots=True)
class _LayerProducts:
    qkv: Product
    output: Product
    gate_up: Product
    down: Product


class DecodeWeights:
    """A decoder's matrix products for few rows: on weights rearranged for them where that helps, for one call of the sampler.

    ``rows`` is how many rows a step will have at most. The copies hold the weights as they are now; ``in_8_bits``: rounded, where
    ``why_not_in_8_bits`` has no objection.
    """

    def __init__(self, decoder: Decoder, rows: int, in_8_bits: bool = False) -> None:
        def product(weight: Tensor, bias: Tensor | None = None) -> Product:
            if not rearranged:
                return partial(linear, weight=weight, bias=bias)
            return rearranged_product(weight, bias, rows, in_8_bits)

        rearranged = in_8_bits or rearranging_helps(decoder.embedding)
        self.layers = [
            _LayerProducts(
                product(layer.qkv, layer.qkv_bias),
                product(layer.output, layer.output_bias),
                product(layer.gate_up),
                product(layer.down),
            )
            for layer in decoder.layers
        ]
        self.head = product(decoder.head)
        pairs = zip(decoder.layers, self.layers, strict=True)
        self.tensors = [self._of_layer(layer, products, decoder.dtype) for layer, products in pairs]
        """Of each layer, in the order of ``Layer``, then the products' scales: what ``table`` points to, kept for as long as it does."""
        self.table = native.table(self.tensors) if all(self.tensors) else None
        """For ``native.decode_layers``; None where a product of a layer is not by the package's own kernel."""

    @staticmethod
    def _of_layer(layer: Any, products: _LayerProducts, dtype: torch.dtype) -> list[Tensor | None]:
        """Nothing where one kernel for all layers does not take them."""
        packed = {name: getattr(products, name) for name in products.__slots__}
        if not all(isinstance(product, _Packed) for product in packed.values()):
            return []
        tensors = [packed[name].weight if name in packed else getattr(layer, name) for name in Layer.__slots__]
        there = [x for x in tensors if x is not None]
        kinds = {product.dtype for product in packed.values()} | {x.dtype for x in there if x.dtype != torch.int8}
        if kinds != {dtype} or not all(x.is_contiguous() for x in there):
            return []
        return [*tensors, *(product.scales for product in packed.values())]


def in_bucket(count: int, most: int) -> int:
    """``count``, or up to a half more, and never more than ``most``: a power of two, or half way to the next. Rows to spare cost less than
    graphs: a decode step's time is mostly its launches."""
    step = 1 << max(0, (count - 1).bit_length() - 2)
    return min(most, -(-count // step) * step)


_FEWEST = 32
"""Rows of a padded step at least: reading the weights takes a GPU longer than to compute so few."""


@dataclass
class DecodeStep:
    """Where every row stands. Planned again when rows come or go or the cache has grown, and advanced in place between.

    In place to the letter: a captured CUDA graph reads and writes these very tensors.
    """

    keys: Tensor
    """``[B]`` seeds."""
    last_tokens: Tensor
    """``[B]`` the token each row feeds in."""
    last_logprobs: Tensor
    """``[B]`` its log-probability; nothing before the first step."""
    own_lengths: Tensor
    """``[B]`` own positions filled so far: where this step's key and value go."""
    turn_starts: Tensor
    """``[B]`` own position of the first token of each row's turn."""
    positions: Tensor
    """``[B]`` position of the fed token in its sequence."""
    group_of_row: Tensor
    """``[B]``."""
    prompt_lengths: Tensor
    """``[S]``."""
    room: int
    """Own positions that may be filled."""
    lanes: Lanes | None
    """For attention by PyTorch's products; None where the native kernels attend."""

    @classmethod
    def plan(
        cls, cache: Cache, *, group_of_row: list[int], prompt_lengths: list[int], own_lengths: list[int], last_tokens: list[int],
        keys: list[int], turn_starts: list[int], spare_up_to: int = 0, like: DecodeStep | None = None,
    ) -> DecodeStep:  # fmt: skip
        """``spare_up_to``: pad to at most so many rows, and groups and places too, so that steps over somewhat fewer have the same shapes
        (see ``take``): those of ``like``, where they hold what is needed in as many rows. Spare rows write into the table's next ones."""
        device = cache.own[0][0].device
        rows = max(in_bucket(len(keys), spare_up_to), min(_FEWEST, spare_up_to)) if spare_up_to else len(keys)
        spare, before = rows - len(keys), None if like is None or len(like.keys) != rows else like.lanes

        def width(needed: int) -> int:
            if not spare_up_to:
                return needed
            return before.width if before is not None and before.width >= needed else in_bucket(needed, cache.rows)

        if spare_up_to:
            count, held = len(prompt_lengths), 0 if before is None else before.groups
            enough = held if held >= count else in_bucket(count, len(cache.prompt[0][0]))
            prompt_lengths = [*prompt_lengths, *[1] * (enough - count)]
            group_of_row, own_lengths, last_tokens, keys, turn_starts = (
                [*numbers, *[0] * spare] for numbers in (group_of_row, own_lengths, last_tokens, keys, turn_starts)
            )
        own, groups, prompts = torch.tensor(own_lengths), torch.tensor(group_of_row), torch.tensor(prompt_lengths)
        return cls(
            keys=torch.tensor(keys, device=device), last_tokens=torch.tensor(last_tokens, device=device),
            last_logprobs=torch.zeros(len(keys), dtype=torch.float32, device=device), own_lengths=own.to(device),
            turn_starts=torch.tensor(turn_starts, device=device), positions=(prompts[groups] + own).to(device),
            group_of_row=groups.to(device), prompt_lengths=prompts.to(device),
            room=cache.fillable, lanes=None if cache.native else Lanes.plan(
                cache, group_of_row, prompt_lengths, own_lengths, spare, width
            ),
        )  # fmt: skip

    def take(self, other: DecodeStep) -> bool:
        """Become ``other``, in the same tensors, where all shapes are the same: a graph that reads them stays good. Returns whether."""
        mine, its = self._tensors(), other._tensors()
        if self.room != other.room or [x.shape for x in mine] != [x.shape for x in its]:
            return False
        for tensor, new in zip(mine, its, strict=True):
            tensor.copy_(new)
        return True

    def _tensors(self) -> list[Tensor]:
        """The tensors, in shapes that also say how lanes are laid out."""
        own = [getattr(self, one.name) for one in fields(self) if one.name not in ("room", "lanes")]
        if self.lanes is None:
            return own
        lanes = self.lanes
        by_group = lanes.row_of_lane.view(lanes.groups, lanes.width)
        there = [x for x in (lanes.mask, lanes.places, lanes.lane_of_row) if x is not None]
        return [*own, lanes.row_index, by_group, *there]

    def advance(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Rows that are done may be carried along for a while: they stay at the last place there is."""
        self.last_tokens.copy_(tokens)
        self.last_logprobs.copy_(logprobs)
        self.positions.add_((self.own_lengths < self.room - 1).long())
        self.own_lengths.add_(1).clamp_(max=self.room - 1)


def decode(decoder: Decoder, weights: DecodeWeights, cache: Cache, step: DecodeStep, chunk: PrefillChunk | None = None) -> Tensor:
    """Feed every row's last token, write its key and value, and return next-token logits ``[B, V]``. ``chunk``: is computed beside it."""
    by = _by_kernels if step.lanes is None or step.lanes.mask is None else _by_operations
    return by(decoder, weights, cache, step, chunk)


def _entering(decoder: Decoder, step: DecodeStep, chunk: PrefillChunk | None) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """``[B + T, D]``, and the rotary factors of each kind of layer."""
    tokens, positions = step.last_tokens, step.positions
    if chunk is not None:
        tokens, positions = torch.cat([tokens, chunk.token_ids]), torch.cat([positions, chunk.positions])
    return decoder.embed(tokens), decoder.ropes(positions)


def _by_kernels(decoder: Decoder, weights: DecodeWeights, cache: Cache, step: DecodeStep, chunk: PrefillChunk | None) -> Tensor:
    shape, norm = decoder.shape, decoder.shape.norm
    heads, kv_heads = shape.heads, shape.kv_heads
    kernels, attend_to = (native, _attend_natively) if step.lanes is None else (_gpu_kernels(), _attend_on_gpu)
    (x, ropes), added = _entering(decoder, step, chunk), None
    rows, turned = len(step.last_tokens), heads + kv_heads
    if step.lanes is None and chunk is None and weights.table is not None:
        added = _in_one_call(decoder, weights, cache, step, x, ropes)
        return weights.head(native.add_norm(x, added, decoder.final_norm, *norm))
    for index, (layer, product, kind) in enumerate(zip(decoder.layers, weights.layers, decoder.kinds, strict=True)):
        qkv = product.qkv(kernels.add_norm(x, added, layer.input_norm, *norm)).view(len(x), turned + kv_heads, -1)
        cos, sin = ropes[kind]
        beside: list[Tensor] = []
        if chunk is not None:  # first, since the step's rows may look at what is kept here
            new = _normed(qkv[rows:], layer, decoder)
            rotated = torch.empty_like(new)
            rotate_heads(new, cos[rows:], sin[rows:], rotated, turned)
            beside = [chunk.attend(rotated[:, :turned], rotated[:, turned:], cache, index, kind, shape.query_scale)]
        attended = attend_to(qkv[:rows], cos[:rows], sin[:rows], cache, index, step, decoder, layer)
        added = product.output(torch.cat([attended.view(rows, -1), *beside]) if beside else attended.view(rows, -1))
        if layer.attention_norm is not None:
            added = kernels.add_norm(added, None, layer.attention_norm, *norm)
        added = product.down(kernels.gated(product.gate_up(kernels.add_norm(x, added, layer.post_norm, *norm)), shape.activation))
        if layer.feed_forward_norm is not None:
            added = kernels.add_norm(added, None, layer.feed_forward_norm, *norm)
    assert added is not None
    return weights.head(kernels.add_norm(x[:rows], added[:rows], decoder.final_norm, *norm))


def _in_one_call(
    decoder: Decoder, weights: DecodeWeights, cache: Cache, step: DecodeStep, x: Tensor, ropes: list[tuple[Tensor, Tensor]]
) -> Tensor:
    shape, gate_up = decoder.shape, weights.layers[0].gate_up
    assert weights.table is not None
    assert isinstance(gate_up, _Packed)
    caches = native.table(
        [*own, *prompt, *ropes[kind], decoder.windows[kind] or 0]
        for own, prompt, kind in zip(cache.own, cache.prompt, decoder.kinds, strict=True)
    )
    return native.decode_layers(
        weights.table, caches, x, step.own_lengths, step.group_of_row, step.prompt_lengths, heads=shape.heads, kv_heads=shape.kv_heads,
        width=shape.head_width, inner=gate_up.columns // 2, own_room=cache.room, prompt_room=cache.prompt_room,
        scale=_scale(decoder), epsilon=shape.epsilon, offset=shape.norm_offset, activation=shape.activation,
    )  # fmt: skip


def _gpu_kernels() -> Any:
    from groupwise.engines.builtin import gpu_kernels  # only here: Triton takes a while to import, and is not everywhere

    return gpu_kernels


def _normed(qkv: Tensor, layer: Layer, decoder: Decoder) -> Tensor:
    """``qkv``, which may be changed, with its query and key heads normed, in families that do so."""
    if layer.q_norm is None or layer.k_norm is None:
        return qkv
    alike = qkv.dtype == layer.q_norm.dtype == layer.k_norm.dtype
    fits = native.fits(qkv, qkv.shape[2]) and alike and qkv.is_contiguous()
    by = native.norm_heads if fits else head_norm
    return by(qkv, layer.q_norm, layer.k_norm, decoder.shape.heads, decoder.shape.kv_heads, *decoder.shape.norm)


def _attend_natively(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: Cache, index: int, step: DecodeStep, decoder: Decoder, layer: Layer
) -> Tensor:
    return native.decode_attention(
        _normed(qkv, layer, decoder), cos, sin, cache.own[index], cache.prompt[index], step.own_lengths,
        step.group_of_row, step.prompt_lengths, decoder.shape.heads, decoder.shape.query_scale, decoder.windows[decoder.kinds[index]],
    )  # fmt: skip


def _attend_on_gpu(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: Cache, index: int, step: DecodeStep, decoder: Decoder, layer: Layer
) -> Tensor:
    lanes, kernels = step.lanes, _gpu_kernels()
    assert lanes is not None
    norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
    query = kernels.rotate_and_store(
        qkv, cos, sin, cache.own[index], step.own_lengths, decoder.shape.heads, norms, *decoder.shape.norm
    )
    return kernels.attend(  # type: ignore[no-any-return]
        query, cache.own[index], cache.prompt[index], row_of_lane=lanes.row_of_lane,
        lane_of_row=lanes.row_index if lanes.lane_of_row is None else lanes.lane_of_row, group_of_row=step.group_of_row,
        prompt_lengths=step.prompt_lengths, own_lengths=step.own_lengths, positions=step.positions, scale=_scale(decoder),
        window=decoder.windows[decoder.kinds[index]],
    )  # fmt: skip


def _scale(decoder: Decoder) -> float:
    """Of scores."""
    shape = decoder.shape
    return shape.head_width**-0.5 if shape.query_scale is None else shape.query_scale


def _by_operations(
    decoder: Decoder, weights: DecodeWeights, cache: Cache, step: DecodeStep, chunk: PrefillChunk | None
) -> Tensor:
    shape, norm, lanes = decoder.shape, decoder.shape.norm, step.lanes
    heads, kv_heads = shape.heads, shape.kv_heads
    assert lanes is not None
    assert lanes.mask is not None
    scale = _scale(decoder)
    lanes.mask.scatter_(1, (step.own_lengths + lanes.prompt_positions)[:, None], 0.0)
    masks = [lanes.mask_of(window, step.positions) for window in decoder.windows]
    x, ropes = _entering(decoder, step, chunk)
    rows, turned = len(step.last_tokens), heads + kv_heads
    rotated = torch.empty(len(x), turned, shape.head_width, dtype=x.dtype, device=x.device)
    query = rotated[:rows, :heads]
    for index, (layer, product, kind) in enumerate(zip(decoder.layers, weights.layers, decoder.kinds, strict=True)):
        qkv = product.qkv(rms_norm(x, layer.input_norm, *norm)).view(len(x), turned + kv_heads, -1)
        qkv = _normed(qkv, layer, decoder)
        rope_rotate(qkv[:, :turned], *ropes[kind], rotated)
        keys, values = cache.own[index]
        keys[lanes.row_index, :, step.own_lengths] = rotated[:rows, heads:]
        values[lanes.row_index, :, step.own_lengths] = qkv[:rows, turned:]
        beside: list[Tensor] = []
        if chunk is not None:  # first, since the step's rows may look at what is kept here
            beside = [chunk.attend(rotated[rows:], qkv[rows:, turned:], cache, index, kind, scale)]
        attended = attend(query.mul(scale).view(rows, kv_heads, heads // kv_heads, -1), cache, index, lanes, masks[kind])
        added = product.output(torch.cat([attended.view(rows, -1), *beside]) if beside else attended.view(rows, -1))
        x = x + (added if layer.attention_norm is None else rms_norm(added, layer.attention_norm, *norm))
        added = product.down(gated(product.gate_up(rms_norm(x, layer.post_norm, *norm)), shape.activation))
        x = x + (added if layer.feed_forward_norm is None else rms_norm(added, layer.feed_forward_norm, *norm))
    return weights.head(rms_norm(x[:rows], decoder.final_norm, *norm))
