"""Memory of a run by phase: which tensors live at the same time, how large each is, and why.

Every figure is an ``Item`` with its formula; a phase is the items that live together at its fullest moment. What a forward pass keeps
for its backward pass follows the code of ``models``, operation by operation: change them together.

Bytes on one device. Symbols as in ``ModelShape``; s bytes of a number, R packed rows, T predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.data.named import is_prepared
from groupwise.limits import (
    ATTENTION_SCORES,
    CACHE_ROOM,
    KEPT_LOGITS,
    LOGIT_COLUMNS,
    LOGIT_ROWS,
    PREFILL_TOKENS,
    QUERY_BLOCK,
    logit_columns,
)
from groupwise.models.families import FAMILIES
from groupwise.planner.setup import MicroBatchSize, Setup
from groupwise.planner.shape import ModelShape
from groupwise.planner.state import (
    Item,
    Phase,
    critic_of,
    divided,
    exchange_buffers,
    flat_gradient,
    gathered_for_passes,
    gathered_for_sampling,
    gradients,
    scattered,
    state,
)

__all__ = [
    "Item", "Phase", "beside_state", "disk_bytes", "evaluation", "gathered_bytes", "host_bytes", "kept_bytes", "kept_formula", "logits",
    "passes", "passing_bytes", "peak_bytes", "peak_phase", "phases", "prefill_bytes", "sampling", "warm_start",
]  # fmt: skip

_MANY = 10**6
"""Held-out problems of a source of their own, which the plan does not read: more than are sampled at once."""


def kept_formula(setup: Setup) -> str:
    if setup.config.model.gradient_checkpointing:
        return "L R D s + one layer computed again"
    if not setup.packed:
        adapted = " + 4 (5D + HE + F) fp32 copies for the adapter" if setup.adapted else ""
        scores = " + 4 to 8 H for each position of the longest" if _scores(setup, 1) else ""
        return f"L N (8D + s (2HE + 2KE + 3F){adapted}{scores}), N padded tokens"
    if setup.device == "cpu":
        return "L R (s (2D + (H+2K)E + HE + 2F) + H (s + 4))"
    return "L R s (4D + (H+2K)E + HE + 3F)"


def kept_bytes(setup: Setup, batch: MicroBatchSize) -> int:
    """Held from a micro-batch's forward pass until its backward pass has come by."""
    shape, s = setup.shape, setup.weight_bytes
    one = _layer_kept(setup, batch)
    if not setup.config.model.gradient_checkpointing:
        return shape.layers * one
    rows = batch.rows if setup.packed else batch.padded
    return shape.layers * rows * shape.width * s + one


def _layer_kept(setup: Setup, batch: MicroBatchSize) -> int:
    if not setup.packed:
        return batch.padded * (_module_row(setup) + _scores(setup, batch.longest))
    shape, s = setup.shape, setup.weight_bytes
    raw = (shape.qkv if shape.head_norm else 0) + (shape.layer_norms - 2) * shape.width
    if setup.device == "cpu":  # models/layer.py, Kept and the input
        row = s * (2 * shape.width + shape.qkv + shape.attended + 2 * shape.feed_forward + raw) + shape.heads * (s + 4)
        return batch.rows * row
    # models/layer.py, _by_library: input, middle, both normed; rotated queries, keys and values; the attention's output; gate, up and their
    # product
    return batch.rows * (s * (4 * shape.width + shape.qkv + shape.attended + 3 * shape.feed_forward + raw) + 8)


def _library_block(setup: Setup, batch: MicroBatchSize) -> int:
    """The largest rectangle of attention on its way back: keys and values once, for each query head, and their gradients."""
    most = 0
    for prompt, count in set(batch.groups):
        for length, prefix, sequences in ((prompt, 0, 1), (batch.completion - 1, prompt, count)):
            shared = range(0, min(length, ATTENTION_SCORES // QUERY_BLOCK), QUERY_BLOCK)
            last = max(0, length - 1) // QUERY_BLOCK * QUERY_BLOCK  # the widest of those that hold one sequence each
            for offset in (*shared, *range(last, length, QUERY_BLOCK)):
                end = min(length, offset + QUERY_BLOCK)
                width = prefix + end
                most = max(most, min(sequences, max(1, ATTENTION_SCORES // ((end - offset) * width))) * width)
    return 6 * setup.weight_bytes * setup.shape.attended * most


def _scores(setup: Setup, length: int) -> int:
    """One padded token's scores in one layer, where all of them are in memory: capped, by softmax in fp32, and as the weights are."""
    capped, s, asked = setup.shape.capped_attention, setup.weight_bytes, setup.config.model.attention
    if asked != "eager" and not (capped and asked == "auto"):
        return 0
    return setup.shape.heads * length * (4 + (s if s < 4 else 0) + (s if capped else 0))


def _module_row(setup: Setup) -> int:
    """One padded token in one layer of transformers' module: norms in fp32, queries, keys, values, output, gate, act(gate), up; and
    what the projections' weights or the adapters need of their inputs."""
    shape, s = setup.shape, setup.weight_bytes
    kv = shape.kv_heads * shape.head_width
    row = 8 * shape.width + s * (2 * shape.attended + 2 * kv + 3 * shape.feed_forward) + 4 * shape.heads
    if not setup.adapted:
        return row + s * (4 * shape.width + shape.feed_forward)  # the attention's output is o's input
    lora = setup.config.model.lora
    assert lora is not None
    copies = 5 * shape.width + shape.attended + shape.feed_forward  # q, k, v, gate, up; o; down: each casts its input
    shared = 2 * shape.width + shape.feed_forward  # nothing to cast, and the attention's output is there
    return row + 4 * (shared if s == 4 else copies) + 7 * 4 * lora.rank


def passing_bytes(setup: Setup, batch: MicroBatchSize) -> int:
    """Needed for a moment by one layer's backward pass, and free again."""
    shape, s = setup.shape, setup.weight_bytes
    if not setup.packed:
        return batch.padded * (4 * 2 * shape.feed_forward + s * 4 * shape.feed_forward)
    # swiglu's output and its gradient, the gradient of gate and up, two products; then the layer's own weight gradients
    block = _library_block(setup, batch) if setup.device == "cuda" else 0
    return block + batch.rows * s * (shape.width + 6 * shape.feed_forward) + s * 2 * shape.feed_forward * shape.width


def logits(setup: Setup, batch: MicroBatchSize, *, learnt: bool) -> Item:
    """The output head: its input before and after the norm, a tile of fp32 logits, their gradient, and the input's gradient.

    ``learnt``: in a pass with gradients. On CPUs a frozen head then takes some rows' logits over the whole vocabulary. One that learns, or
    whose entropies do, keeps some logits, and their gradients take their place.
    """
    shape, s, tokens = setup.shape, setup.weight_bytes, batch.tokens
    if not setup.packed and not shape.plain_head:  # models/module_scorer.py, _score_by_logits
        whole = shape.vocabulary * (3 * s * batch.padded + (s + 16) * tokens)
        return Item("logits", whole, "V (3 s N + (s + 16) T), N padded tokens: the head caps or scales them")
    if learnt and setup.device == "cpu" and setup.adapted and not setup.learns_entropy:
        rows = min(tokens, LOGIT_ROWS[setup.device])
        kept = s * (rows * shape.vocabulary + 3 * tokens * shape.width) + 4 * tokens * shape.width
        return Item("logits tiles", kept, "s (tile V + 3 T D) + 4 T D")
    width = logit_columns(tokens, setup.device)
    rows = min(tokens, LOGIT_ROWS[setup.device])
    tile = 4 * rows * LOGIT_COLUMNS + s * rows * width  # fp32, and the product it is copied from
    hidden, slices = tokens * shape.width * (2 * s + 4), s * tokens * width
    if learnt and setup.device == "cpu":
        slices = max(slices, min(KEPT_LOGITS, s * tokens * shape.vocabulary))
        most = f"{KEPT_LOGITS // _MIB} MiB"
        return Item("logits tiles", tile + hidden + slices, f"4 tile x 4096 + T D (2s + 4) + min(s T V, {most}) or s T slice")
    return Item("logits tiles", tile + hidden + slices, "4 tile x 4096 + T (s slice + D (2s + 4))")


def prefill_bytes(setup: Setup, rows: int) -> int:
    """One layer over prompts, nothing kept: norms in fp32, queries, keys, values before and after rotation, gate and up."""
    shape, s = setup.shape, setup.weight_bytes
    return rows * (s * (3 * shape.width + 3 * shape.qkv + shape.attended + 3 * shape.feed_forward) + 4 * shape.width)


_MIB = 2**20
_FRAGMENTATION_NAME = "allocator fragmentation"
_FRAGMENTATION, _OF_FIXED_BLOCKS = {"cpu": 0.25, "cuda": 0.1}, 0.2
"""What an allocator loses, as a share of what comes and goes: on CPU the fragmentation of the C library's heap (measured: a sixth to a
third). On a GPU where its blocks may grow 5% were measured, on one H200. Beside vLLM or an engine of one's own they may not
(``memory.use_expandable_segments``): there it keeps far more, and gives it back where memory ends."""


def phases(setup: Setup) -> list[Phase]:
    """Loading, the warm start, sampling, evaluation, reference, learning, the optimiser's step, a checkpoint (which is written
    while problems are judged or the next batch is sampled) and the final model, in the steady state (the moments exist).
    ``learning`` is the fullest moment of a pass; the output head's is given beside it where it is another one."""
    sampled, data, output = sampling(setup), setup.config.data, setup.config.output
    beside = _beside(setup, sampled) if setup.ahead else []
    meanwhile = [] if setup.by_vllm else beside  # its one engine is waited for
    judges = setup.config.evaluation.every > 0
    passing = {"sampling": [*sampled, *(meanwhile if setup.config.rollout.refill_rounds else ())]}
    if data.holdout or not data.holds_out or is_prepared(data.source):
        passing["evaluation"] = [*evaluation(setup), *(meanwhile if judges else ())]
    if setup.parked and setup.has_reference:
        passing["reference"] = [*_reference_pass(setup), *beside]
    moments = [[*items, *beside] for items in _learning(setup)]
    fullest = max(moments, key=lambda items: sum(item.bytes for item in items))
    if fullest is not moments[0]:
        passing["output head"] = moments[0]
    passing |= {
        "learning": fullest,
        "optimiser step": [*_all_gradients(setup), *exchange_buffers(setup), *flat_gradient(setup), *beside],
    }
    if output.checkpoint_every:
        gathered, samplers = _checkpoint(setup), [passing["sampling"]]
        if gathered and judges and "evaluation" in passing:
            samplers.append(passing["evaluation"])
        alive = [beside, *(samplers if output.checkpoint_in_background else ())]
        passing["checkpoint"] = [*gathered, *max(alive, key=lambda items: sum(item.bytes for item in items))]
    passing["final model"] = _final_model(setup)
    during = [
        _phase(name, [*state(setup, name in _LEARNING), *items, _fragmentation(setup, items)]) for name, items in passing.items()
    ]
    during = [_with_aligned_blocks(setup, p) if p.name in ("learning", "output head") else p for p in during]
    before = [_phase("loading", _loading(setup))]
    if setup.config.warm_start.steps:
        before.append(_warm_start(setup))
    return [*before, *during]


_LEARNING = {"reference", "learning", "output head", "optimiser step"}
_LOADED = {"process", "weights", "adapter", "reward models", "vLLM"}
"""What of a run's state is there before it learns."""


def _loading(setup: Setup) -> list[Item]:
    """The weights come from their file a tensor at a time, and are fused a layer at a time. What is read of the file is not counted: its
    pages, though they show in the process's size, are the kernel's to drop."""
    shape, s = setup.shape, setup.weight_bytes
    fused = s * max(shape.head, shape.layer_matrices)
    items = [item for item in state(setup) if item.name in _LOADED]
    items.append(Item("one layer or the embedding fused", fused, "s x the larger of V D and a layer's matrices"))
    if setup.base_in_16_bits:
        wider = (s - 2) * shape.layers * shape.layer_matrices
        items.append(Item("matrices in fp32", wider, "(s - 2) L matrices, until they are stored in 16 bits"))
    if setup.device == "cpu" and divided(setup, "weights"):
        items.append(Item("whole weights", s * shape.parameters, "s P, where they are read"))
    return items


def _warm_start(setup: Setup) -> Phase:
    """Supervised passes, before there is a reference or a critic: an example is a group of one, as long as a completion may be."""
    examples = warm_start(setup)
    fullest = max(_learning(examples), key=lambda items: sum(item.bytes for item in items))
    phase = _phase("warm start", [*state(examples, learns=True), *fullest, _fragmentation(examples, fullest)])
    return _with_aligned_blocks(examples, phase)


def warm_start(setup: Setup) -> Setup:
    """The warm start as a run of its own."""
    return setup.changed(
        rollout__prompts_per_step=setup.config.warm_start.examples_per_step, rollout__completions_per_prompt=1, rollout__ahead=0,
        algorithm__kl=None, algorithm__value=None,
    )  # fmt: skip


def beside_state(setup: Setup, items: Sequence[Item]) -> int:
    """Bytes of what comes and goes beside the run's state, with what the allocator loses of it."""
    return sum(item.bytes for item in (*items, _fragmentation(setup, items)))


def sampling(setup: Setup, rows: int | None = None) -> list[Item]:
    """What sampling a step takes beside the run's state; with at most ``rows`` sequences at once, by default as many as it may."""
    made = setup if rows is None else setup.changed(rollout__max_concurrent_sequences=rows)
    return _sampling(made, made.prompts, made.config.rollout.completions_per_prompt)


def passes(setup: Setup, tokens: int, completion: int) -> list[Item]:
    """What the passes take beside the run's state at their fullest. ``tokens``: of a micro-batch; ``completion``: of each completion."""
    made = setup.changed(training__micro_batch_tokens=tokens, rollout__max_completion_tokens=completion)
    return max(_learning(made), key=lambda items: sum(item.bytes for item in items))


def evaluation(setup: Setup, rows: int | None = None) -> list[Item]:
    """What an evaluation takes beside the run's state; with at most ``rows`` sequences at once, by default as many as the run samples."""
    settings, rollout, data = setup.config.evaluation, setup.config.rollout, setup.config.data
    there_are = data.holdout if data.holds_out and not is_prepared(data.source) else _MANY
    limit = rollout.max_concurrent_sequences if rows is None else rows
    judged = setup.changed(
        rollout__max_completion_tokens=settings.max_completion_tokens or rollout.max_completion_tokens,
        rollout__max_concurrent_sequences=limit,
        rollout__quantization="none",  # what is judged is the policy
    )
    return _sampling(judged, -(-min(settings.problems or _MANY, there_are) // setup.world_size), settings.samples)


def _checkpoint(setup: Setup) -> list[Item]:
    """Beside the run's state, in which it is written from where things are: what is brought together, on CPUs."""
    if setup.device != "cpu" or not (divided(setup, "weights") or divided(setup, "optimiser")):
        return []
    formula = f"{'4 A' if setup.adapted else 's P'} + masters, moments and reference, in the first process"
    return [Item("whole weights and state", disk_bytes(setup)[0], formula)]


def _final_model(setup: Setup) -> list[Item]:
    """Beside the run's state, in which a model is written a weight at a time."""
    shape, s = setup.shape, setup.weight_bytes
    whole = s * shape.parameters
    if divided(setup, "weights") and not (setup.adapted and setup.config.output.adapter_only):
        return [Item("whole weights", whole, "s P, in the first process")]
    if not setup.adapted and setup.quantised == "none":
        return []
    at_once = shape.wrapped or shape.architecture not in FAMILIES
    if at_once and setup.device == "cpu" and not setup.config.output.adapter_only:  # from a GPU it goes into the machine's memory
        return [Item("merged copy", whole, "s P")]
    return [Item("one matrix merged", (s + 8) * shape.width * shape.feed_forward, "(s + 8) F D")]


def disk_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes of a checkpoint, and of the final model, on the disk."""
    adapter = 4 * setup.trained if setup.adapted else 0
    near = setup.changed(optimizer__offload=False, training__offload_reference=False, training__sharding="none")
    kept = {"master weights", "moments", "reference average", "critic's weights", "critic's optimiser"}
    kept |= {"reference"} if "reference average" not in {item.name for item in state(near)} else set()
    whole = setup.weight_bytes * setup.shape.parameters
    checkpoint = (adapter or whole) + sum(item.bytes for item in state(near) if item.name in kept)
    return checkpoint, adapter + (0 if setup.adapted and setup.config.output.adapter_only else whole)


def gathered_bytes(setup: Setup) -> int:
    """Bytes of the machine's own memory in which the first process brings a divided run together: what a checkpoint holds, or the base
    beneath an adapter, which the final model alone does. On GPUs also the weights that are collected for vLLM, while a checkpoint
    is being written or where the base is brought together for nothing else."""
    if not (divided(setup, "weights") or divided(setup, "optimiser")):
        return 0
    output = setup.config.output
    counted = setup.device == "cuda" and (output.checkpoint_in_background or output.adapter_only)
    pushed = setup.weights if setup.by_vllm and counted else 0
    checkpoint, model = disk_bytes(setup)
    return (model if setup.adapted else checkpoint) + pushed


def _beside(setup: Setup, sampling: list[Item]) -> list[Item]:
    """The part of sampling that is held while the passes run, since the next batch is sampled ahead. Divided weights are gathered for
    the copies that it samples with, and not for longer."""
    gathered = {"gathered weights", "merged weights"} if divided(setup, "weights") else set()
    return [item for item in sampling if item.name not in gathered]


def peak_phase(candidates: Sequence[Phase]) -> Phase:
    return max(candidates, key=lambda phase: phase.bytes)


def peak_bytes(setup: Setup) -> int:
    return peak_phase(phases(setup)).bytes


def host_bytes(setup: Setup) -> int:
    """Bytes of the machine's own memory for one process: masters, moments and gradients of the optimiser there, and a parked reference."""
    if not (setup.offloaded or setup.parked):
        return 0
    kept = {"master weights", "moments", "gradients", "critic's optimiser", "critic's gradients"} if setup.offloaded else set()
    kept |= {"reference", "reference average"} if setup.parked else set()
    near = setup.changed(optimizer__offload=False, training__offload_reference=False)
    parts = next(phase for phase in phases(near) if phase.name == "optimiser step").items
    found = {i.name: i.bytes for i in parts if i.name in kept}
    if setup.offloaded and setup.in_fp32:  # on the GPU the weights are their own masters
        found["master weights"] = 4 * setup.trained
        found["critic's masters"] = 0 if (critic := critic_of(setup)) is None else 4 * critic.trained
    if setup.device == "cuda" and not setup.adapted:
        for name, size in (("master weights", 4), ("reference", setup.weight_bytes)):
            found[name] = int(found.get(name, 0) * _pinned_share(setup.shape, size))
    return sum(found.values())


def _pinned_share(shape: ModelShape, size: int) -> float:
    """By how much more than its weights' bytes a pinned copy of a model takes, ``size`` bytes a number: PyTorch (2.13) rounds each pinned
    block up to a power of two."""
    layer = [
        shape.width * shape.qkv,
        shape.attended * shape.width,
        2 * shape.width * shape.feed_forward,
        shape.feed_forward * shape.width,
    ]
    tensors = [*layer * shape.layers, *[shape.head] * (1 if shape.tied else 2)]
    return sum(1 << (size * n - 1).bit_length() for n in tensors) / (size * sum(tensors))


def _phase(name: str, items: list[Item]) -> Phase:
    """With the parts of one name added up: those of two samplings, where one is ahead."""
    parts: dict[str, Item] = {}
    for item in items:
        other = parts.get(item.name, Item(item.name, 0, item.formula))
        formula = item.formula
        if other.bytes and item.bytes:
            formula = f"{formula}, of both" if formula == other.formula else f"{other.formula} + {formula}"
        parts[item.name] = Item(item.name, other.bytes + item.bytes, formula)
    return Phase(name, tuple(sorted((i for i in parts.values() if i.bytes), key=lambda item: -item.bytes)))


def _with_aligned_blocks(setup: Setup, learning: Phase) -> Phase:
    """The phase with what glibc loses of an adapter's forward pass on a CPU, instead of a share: freed fp32 blocks (a layer's two widest,
    and norms) that an aligned request of the same size does not fit into, which PyTorch's all are. Measured with glibc 2.36."""
    if setup.device != "cpu" or not setup.adapted or setup.packed or setup.weight_bytes == 4:
        return learning
    shape, rows = setup.shape, setup.largest.padded
    lost = shape.layers * rows * (8 * shape.feed_forward + 2 * shape.width)
    if setup.config.model.gradient_checkpointing:
        lost += lost * 2 // 5  # once more, less, where the backward pass computes layers again
    items = [i for i in learning.items if i.name != _FRAGMENTATION_NAME]
    return _phase(learning.name, [*items, Item(_FRAGMENTATION_NAME, lost, "L N (8F + 2D): glibc's aligned blocks")])


def _fragmentation(setup: Setup, items: Sequence[Item]) -> Item:
    fixed = setup.device == "cuda" and setup.config.rollout.engine_is_external
    share = _OF_FIXED_BLOCKS if fixed else _FRAGMENTATION[setup.device]
    return Item(_FRAGMENTATION_NAME, int(share * sum(i.bytes for i in items)), f"{share:.0%} of what comes and goes")


def _reference_pass(setup: Setup) -> list[Item]:
    """The pass of a reference that is on the device for it alone: its weights, one layer, and the head."""
    batch = setup.largest
    rows, scores = (batch.rows, 0) if setup.packed else (batch.padded, batch.padded * _scores(setup, batch.longest))
    return [
        Item("reference", setup.weights, "s P, while it is used"),
        Item("a layer's forward pass", prefill_bytes(setup, rows) + scores, "R s (3D + 3(H+2K)E + HE + 3F) + 4 R D"),
        logits(setup, batch, learnt=False),
    ]


def _all_gradients(setup: Setup) -> list[Item]:
    critic = critic_of(setup)
    return [
        gradients(setup),
        *([] if critic is None else [Item("critic's gradients", gradients(critic).bytes, "as the policy's")]),
    ]


def _sampling(setup: Setup, prompts: int, samples: int) -> list[Item]:
    if setup.by_vllm:
        on_cpu = setup.device == "cpu"  # else it is not the GPU's memory that this takes
        collected = setup.weights if on_cpu and divided(setup, "weights") else 0
        sent = 2 * setup.config.rollout.vllm.bucket_mib * _MIB if on_cpu else 0
        return [
            Item("collected weights", collected, "s P, in the first process, while they are pushed"),
            Item("weights on their way", sent, "2 x rollout.vllm.bucket_mib"),
        ]
    shape, s = setup.shape, setup.weight_bytes
    rows = min(setup.config.rollout.max_concurrent_sequences, prompts * samples)
    if not setup.by_builtin:
        return _by_module(setup, rows)
    groups = min(prompts, rows)
    prefilled = max(setup.prompt, min(PREFILL_TOKENS, groups * setup.prompt))
    per_position = shape.cached(s)
    room = _grown_room(setup)
    own = rows * room * per_position
    growing = 2 * own // (2 * shape.layers) if room > CACHE_ROOM[setup.device] else 0
    items = [
        *gathered_for_sampling(setup),
        Item("KV cache", groups * setup.prompt * per_position + own + growing, "2 L K E s (groups x prompt + rows x completion)"),
        _logits(setup, rows),
        Item("prefill", prefill_bytes(setup, prefilled), "one layer over 4,096 prompt tokens, or one longer prompt"),
    ]
    merged = Item("merged weights", setup.merged_bytes, "s L matrices, of base and adapter, while sampling")
    if setup.device == "cpu":  # they are made of the merged ones, which stay only where the base is divided
        in_8_bits = setup.config.rollout.quantization == "8bit"
        copied = (1 if in_8_bits else s) * (shape.layers * shape.layer_matrices + shape.head)
        rearranged = Item("rearranged weights", copied, f"{'' if in_8_bits else 's '}(L matrices + V D), while sampling")
        return [*items, rearranged, merged] if divided(setup, "weights") else [*items, rearranged]
    return [*items, merged]


def _logits(setup: Setup, rows: int) -> Item:
    """Of the next tokens. With top-p they are sorted, by values and places, and summed up."""
    if setup.config.rollout.top_p == 1:
        return Item("logits", rows * setup.shape.vocabulary * (setup.weight_bytes + 4), "rows V (s + 4)")
    return Item("logits", rows * setup.shape.vocabulary * (setup.weight_bytes + 32), "rows V (s + 32), sorted for top-p")


def _by_module(setup: Setup, rows: int) -> list[Item]:
    """The model's own module and the library's cache: a prompt for each sequence, and one layer's keys and values twice while they grow."""
    shape, s = setup.shape, setup.weight_bytes
    cache = rows * (setup.prompt + setup.completion) * shape.cached(s)
    dense = (s + 4) * shape.width * shape.feed_forward if setup.quantised != "none" else 0
    prefill = prefill_bytes(setup, rows * setup.prompt) + rows * setup.prompt * _scores(setup, setup.prompt)
    return [
        *gathered_for_sampling(setup),
        Item("KV cache", cache + cache // shape.layers, "2 (L + 1) K E s rows (prompt + completion)"),
        _logits(setup, rows),
        Item("prefill", prefill, "one layer over the prompts of all rows"),
        Item("one matrix dequantised", dense, "(s + 4) F D"),
    ]


def _grown_room(setup: Setup) -> int:
    """Completion positions in the cache at the end: it grows by blocks up to the limit."""
    block, limit = CACHE_ROOM[setup.device], max(1, setup.completion - 1)
    room = min(block, limit)
    while room < limit:
        room = min(limit, room + max(block, room // 8 // block * block))
    return room


def _learning(setup: Setup) -> list[list[Item]]:
    """The moments of a pass that may be the fullest: the output head's backward pass, when all layers' activations are there; the
    last layer's; and the end, when all gradients are. From the second micro-batch on the fp32 gradients are there from the beginning.
    A critic of its own has its pass after the policy's, when the policy's gradients are there."""
    shape, s, batch = setup.shape, setup.weight_bytes, setup.largest
    head = 0 if setup.adapted else s * shape.head
    critic = critic_of(setup)
    of_critic = _all_gradients(setup)[1:]
    there = [gradients(setup), *of_critic] if len(setup.micro_batches) > 1 else []
    activations = Item("activations", kept_bytes(setup, batch), kept_formula(setup))
    layer = Item("a layer's backward pass", passing_bytes(setup, batch), "R s (D + 6F) + 2 s F D")
    gradient = Item("head's gradient", head, "s V D")
    whole = gathered_for_passes(setup)
    moments = [
        [*there, *whole, activations, logits(setup, batch, learnt=True), gradient],
        [*there, *whole, activations, layer, gradient, *_merged_layer(setup), *scattered(setup, at_the_end=False)],
        [gradients(setup), *of_critic, *whole, *scattered(setup, at_the_end=True), Item(
            "head's gradient", 3 * head if shape.tied else head, "3 s V D (head, embedding, their sum)"
        )],
    ]  # fmt: skip
    if critic is not None:
        moments.append([gradients(setup), *(of_critic if there else ()), *_critics_pass(critic)])
    return moments


def _merged_layer(setup: Setup) -> list[Item]:
    """Base and adapter of one layer, made into weights when it is computed: what is merged, and of its widest matrix the base's weight,
    the exact one, and the thresholds by which that is rounded."""
    if not (setup.adapted and setup.packed):
        return []
    shape, s = setup.shape, setup.weight_bytes
    scratch = (s + 8) * shape.width * shape.feed_forward
    return [Item("one layer merged", s * shape.layer_matrices + scratch, "s matrices + (s + 8) F D")]


def _critics_pass(critic: Setup) -> list[Item]:
    batch = critic.largest
    return [
        Item("critic's activations", kept_bytes(critic, batch), kept_formula(critic)),
        Item("a layer's backward pass", passing_bytes(critic, batch), "R s (D + 6F) + 2 s F D"),
    ]
