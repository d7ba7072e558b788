"""Fast paths check themselves: none is trusted on hardware that it has not met.

Before a model is used, each fast path that applies is compared with the plain one on a few tokens, through two layers of the model's shape
(random weights, a shorter vocabulary), and timed against it. One that fails, disagrees or is slower is left out, with a notice. What was
found is kept by device, driver, versions and shape, so that it takes a second once; and in a run's folder, so that the run goes on as it
began.

Which way is taken decides how numbers are rounded, and clocks are noisy. So a path is left out for its time only where it is slower beyond
doubt (``slack``) each of three times, the two ways are timed by turns, on CPUs by the processor's time, which other programs lengthen only
where threads wait for each other, and every run on one machine takes the same.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from groupwise.durable import write_bytes
from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin import decode as decoding
from groupwise.engines.builtin import runner as running
from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.chunked_prefill import PrefillChunk
from groupwise.engines.builtin.decode import DecodeStep, DecodeWeights
from groupwise.engines.builtin.draw import Draw
from groupwise.engines.builtin.engine import takes_native
from groupwise.errors import ModelError
from groupwise.memory import is_shortage, reclaim_memory
from groupwise.models import attention, logprobs, merging, ops, varlen_attention
from groupwise.models.decoder import Decoder, why_unsupported
from groupwise.models.devices import product_gives_fp32, wait_for
from groupwise.models.embedded import cache_folder
from groupwise.models.families import why_uncovered
from groupwise.models.native import build, calls
from groupwise.models.packing import pack_prompts

__all__ = ["TOLERANCE", "Choice", "FastPath", "Measured", "check_fast_paths", "choose", "facts", "fast_paths", "take"]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""How far two ways of computing may be apart, as a share of the norm of what the plain one gives."""
_VOCABULARY, _LAYERS, _REPEATS, _ATTEMPTS = 4096, 2, 5, 3
_SOURCES = (build.SOURCE, *(path for x in (__file__, attention.__file__, build.__file__) for path in Path(x).parent.glob("*.py")))


@dataclass(frozen=True, slots=True)
class Measured:
    """One operation, computed both ways."""

    operation: str
    fast_ms: float
    plain_ms: float
    difference: float
    """The largest over its results, relative to their norms."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What became of a fast path."""

    path: str
    taken: bool
    agrees: bool
    """With the plain way; where it does not, or failed, no speed makes up for it."""
    why: str
    operations: tuple[Measured, ...]

    @property
    def notice(self) -> str | None:
        """What to say of one that is left out."""
        return None if self.taken else f"{self.path}: left out on this machine, since {self.why}; the plain way computes the same"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Action = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class FastPath:
    """A faster way of computing, which can be left out.

    Attributes:
        applies: whether a decoder would take it.
        switch: takes it, or leaves it out, from now on; for the process.
        operations: names of ``_OPERATIONS`` that go through it.
        slack: it is left out where it takes so many times as long as the plain way.
        unchecked: whether it is taken where nothing was compared, since no decoder computes the model, or it would not apply.
    """

    name: str
    applies: Callable[[Decoder], bool]
    switch: Callable[[bool], None]
    operations: tuple[str, ...]
    slack: float = 1.25
    unchecked: bool = True


def fast_paths() -> tuple[FastPath, ...]:
    """All there are. Each is checked with the ones before it as they were chosen."""
    return (
        FastPath(
            "native kernels",
            lambda d: calls.fits(d.embedding, d.embedding.shape[1]),
            calls.allow,
            ("passes", "a decode step", "a merged weight"),
        ),
        # A decode step's products on these are part of the next one.
        FastPath("matrix units", lambda d: calls.multiplies(d.embedding), calls.allow_products, ("passes",), 2.0),
        # Not for speed alone: a row is rounded in the same way whatever rows are beside it, and exact resume of episodes lives by that.
        FastPath(
            "rearranged weights",
            lambda d: decoding.rearranging_helps(d.embedding),
            _allowing("rearranged"),
            ("a decode step",),
            4.0,
        ),
        FastPath("the library's attention", lambda d: d.device.type != "cpu", attention.allow_library, ("passes",)),
        FastPath(
            "norms in one kernel",
            lambda d: ops.norms_by_library(d.device, d.shape.norm_offset),
            ops.allow_library_norms,
            ("passes", "a decode step"),
            unchecked=False,
        ),
        # The check's few rows are launches, of which the kernels save few; a micro-batch's are bytes, of which they move a third.
        FastPath(
            "kernels for learning",
            lambda d: ops.kernels_fit(d.device),
            ops.allow_kernels,
            ("passes", "passes with entropies"),
            2.0,
            unchecked=False,
        ),
        FastPath("flash attention", _takes_flash, attention.allow_flash, ("passes",), unchecked=False),
        # Not for speed: sampler and learner agree better.
        FastPath(
            "scores in fp32",
            lambda d: product_gives_fp32(torch.bmm, d.device, d.dtype),
            _allowing("fp32"),
            ("a decode step",),
            2.0,
        ),
        FastPath("logits in fp32", lambda d: product_gives_fp32(torch.mm, d.device, d.dtype), _allow_fp32_logits, ("passes",)),
        FastPath("captured graphs", lambda d: d.device.type in running.GRAPHS, _allow_graphs, ("a burst of decode steps",)),
        FastPath(
            "kernels for decoding",
            lambda d: decoding.decoding_kernels_fit(d.device),
            _allowing("kernels"),
            ("a step of long rows",),
        ),
    )


def _takes_flash(decoder: Decoder) -> bool:
    return attention.default_implementation(decoder.device) == "varlen" and varlen_attention.fits(
        decoder.device, decoder.dtype, decoder.shape.head_width
    )


def _allow_fp32_logits(yes: bool) -> None:
    logprobs.allowed_fp32 = yes


def _allowing(name: str) -> Callable[[bool], None]:
    """The switch of a way of decoding."""
    return partial(decoding.ALLOWED.__setitem__, name)


def _allow_graphs(yes: bool) -> None:
    running.GRAPHS = frozenset({"cuda"}) if yes else frozenset()


def check_fast_paths(
    config: Any, dtype: torch.dtype, device: torch.device, *, again: bool = False, earlier: Mapping[str, Any] | None = None
) -> list[Choice]:
    """Choose for models of this ``config`` (a transformers one), and set the choices for this process.

    Nothing is checked where the lean decoder does not cover the architecture.

    Args:
        again: do not look into what was kept.
        earlier: the ``facts`` of a run that goes on. Where all that the answer depends on is what it was, the run keeps its choices,
            whatever a clock has said since.
    """
    key = _key(config, dtype, device)
    kept = None if again else _of_a_run(key, earlier or {})
    if kept is None and not again:
        kept = _known[key] if key in _known else _kept(key)
    if kept is None:
        # Triton and captured graphs take the current device, wherever tensors are.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kept = _check(config, dtype, device, key)
    _take(key, kept)
    return kept


def facts(config: Any, dtype: torch.dtype, device: torch.device, choices: Sequence[Choice]) -> dict[str, Any]:
    """What a run's folder says of ``choices``: as JSON, with a digest of all that they may depend on."""
    return {"fast_paths": [choice.to_json() for choice in choices], "fast_paths_of": _key(config, dtype, device)}


def _of_a_run(key: str, earlier: Mapping[str, Any]) -> list[Choice] | None:
    return _read(earlier.get("fast_paths")) if earlier.get("fast_paths_of") == key else None


def take(config: Any, dtype: torch.dtype, device: torch.device, choices: list[Choice]) -> None:
    """Set ``choices`` for this process, such as those of a run's first one: whoever checks here later hears of them."""
    _take(_key(config, dtype, device), choices)


def _take(key: str, choices: list[Choice]) -> None:
    _known[key] = choices
    taken = {choice.path: choice.taken for choice in choices}
    for path in fast_paths():  # the others too: what this process checked, another one is only told
        path.switch(taken.get(path.name, path.unchecked))


_known: dict[str, list[Choice]] = {}
"""What this process has found, read or been told."""


def _check(config: Any, dtype: torch.dtype, device: torch.device, key: str) -> list[Choice]:
    if why_uncovered(config) is not None:
        return []
    for path in fast_paths():
        path.switch(True)
    outline = _small(config, dtype, device, layers=0, vocabulary=8)  # the random numbers of a large shape take seconds
    if outline is None or not any(path.applies(outline) for path in fast_paths()):
        return []
    decoder, choices, keep = _small(config, dtype, device), [], True
    assert decoder is not None
    for path in fast_paths():
        path.switch(False)  # until its turn
    for path in fast_paths():
        path.switch(True)
        if path.applies(decoder):
            choice, lasting = choose(path, decoder)
            path.switch(choice.taken)
            choices.append(choice)
            keep = keep and lasting
    if keep:
        _keep(key, choices)
    return choices


def choose(path: FastPath, decoder: Decoder) -> tuple[Choice, bool]:
    """Compare ``path`` with the plain way on ``decoder``. Returns the choice, and whether it would be the same another time: memory or
    the disk may be short just now."""
    measured: list[Measured] = []
    tolerance = TOLERANCE[decoder.dtype]
    try:
        for _ in range(_ATTEMPTS):
            measured.clear()
            for operation in path.operations:
                measured.append(_measure(path, operation, decoder))
            worst = max(measured, key=lambda m: m.difference if m.difference == m.difference else float("inf"))
            fast, plain = (sum(getattr(m, way) for m in measured) for way in ("fast_ms", "plain_ms"))
            if fast <= path.slack * plain or not worst.difference <= tolerance:
                break
    except Exception as error:  # whatever a kernel does on hardware that it has not met
        path.switch(False)
        passing = is_shortage(error) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))
        why = f"it failed ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]})"
        choice, lasting = Choice(path.name, False, False, why, tuple(measured)), not passing
        if passing:
            reclaim_memory()
    else:
        lasting = True
        if not worst.difference <= tolerance:
            why = f"{worst.operation}: {worst.difference:.2g} apart, and {tolerance:g} is allowed"
            choice = Choice(path.name, False, False, why, tuple(measured))
        elif fast > path.slack * plain:
            choice = Choice(path.name, False, True, f"it takes {fast:.2f} ms, and the plain way {plain:.2f}", tuple(measured))
        else:
            choice = Choice(path.name, True, True, "it agrees", tuple(measured))
    return choice, lasting


def _measure(path: FastPath, operation: str, decoder: Decoder) -> Measured:
    results: list[list[Tensor]] = []
    actions: list[Action] = []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for fast in (False, True):
        with _switched(path, fast):
            actions.append(_OPERATIONS[operation](decoder))
            results.append([result.float() for result in actions[-1]()])
    for _ in range(_REPEATS):
        for fast in (False, True):
            with _switched(path, fast):
                seconds[fast].append(_seconds(actions[fast], decoder.device))
    apart = [_apart(one, other) for one, other in zip(results[1], results[0], strict=True)]
    difference = float("nan") if any(a != a for a in apart) else max(apart)
    return Measured(operation, 1e3 * min(seconds[True]), 1e3 * min(seconds[False]), difference)


@contextmanager
def _switched(path: FastPath, fast: bool) -> Iterator[None]:
    path.switch(fast)
    try:
        yield
    finally:
        path.switch(True)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def _seconds(action: Action, device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait_for(device)
    started = clock()
    action()
    wait_for(device)
    return clock() - started


# What is computed.

_PROMPTS = ([2 + i for i in range(37)], [3 + 2 * i for i in range(21)])
_COMPLETIONS = ([5, 7, 11, 13] * 8, [17, 19, 23] * 5)


def _passes(decoder: Decoder, entropy: bool = False) -> Action:
    """A forward and a backward pass: log-probabilities, and the gradients of the layers' tensors. With ``entropy`` at another
    temperature than 1, and of entropies too."""
    decoder.attention = implementation = attention.default_implementation(decoder.device)
    packed = decoder.prepare([(prompt, _COMPLETIONS) for prompt in _PROMPTS])

    def action() -> Sequence[Tensor]:
        decoder.attention = implementation  # the other way's action has set its own
        tensors = [tensor for layer in decoder.layers for tensor in layer.tensors() if tensor is not None]
        with torch.enable_grad():
            if not entropy:
                logprobs = decoder.logprobs(packed)
                return [logprobs.detach(), *torch.autograd.grad(logprobs.sum(), tensors)]
            scored = decoder.score(packed, 0.7, entropy=True)
            assert scored.entropy_T is not None
            gradients = torch.autograd.grad(scored.logprobs_T.sum() + scored.entropy_T.sum(), tensors)
            return [scored.logprobs_T.detach(), scored.entropy_T.detach(), *gradients]

    return action


def _cache(decoder: Decoder, prompt_tokens: int, tokens: int, groups: int = 2, rows: int = 8) -> Cache:
    decoder.reserve_positions(prompt_tokens + tokens + 1)
    return Cache(
        layers=len(decoder.layers), kv_heads=decoder.shape.kv_heads, head_width=decoder.shape.head_width,
        groups=groups, prompt_tokens=prompt_tokens, rows=rows,
        completion_tokens=tokens, dtype=decoder.dtype, device=decoder.device, native=takes_native(decoder),
    )  # fmt: skip


def _planned(cache: Cache, prompt_lengths: list[int], own_lengths: list[int]) -> DecodeStep:
    """All groups have the same number of rows."""
    groups, rows = len(prompt_lengths), len(own_lengths)
    return DecodeStep.plan(
        cache, group_of_row=[row * groups // rows for row in range(rows)], prompt_lengths=prompt_lengths, own_lengths=own_lengths,
        last_tokens=list(range(5, 5 + rows)), keys=[1] * rows, turn_starts=[0] * rows,
    )  # fmt: skip


def _step(decoder: Decoder, tokens: int) -> tuple[Cache, DecodeStep, DecodeWeights]:
    """Eight rows in two groups, their prompts computed, and one token sampled."""
    lengths = [len(prompt) for prompt in _PROMPTS]
    cache, packed = _cache(decoder, max(lengths), tokens), pack_prompts(_PROMPTS).to(decoder.device)
    decoder.hidden(packed, lambda layer, kv: cache.store_prompts(layer, kv, lengths, [0, 1]))
    return cache, _planned(cache, lengths, [0] * 8), DecodeWeights(decoder, 8)


def _decode_step(decoder: Decoder) -> Action:
    """Next-token logits."""
    with torch.no_grad():
        cache, step, weights = _step(decoder, 4)
    return torch.no_grad()(lambda: [decoding.decode(decoder, weights, cache, step)])  # type: ignore[no-any-return]


_LONG = (([300, 70], [0, 63, 64, 255, 256, 257, 600, 700]), ([300], [0, 255] * 8 + [256]), ([300], [257]))
"""Of prompts, and of what rows have of their own, in three steps. The kernel for groups with many queries is not the one for few:
groups of 4 rows, of 17 and of 1 take both, whatever heads a model has."""


class _Logits(running.Runner):
    """A runner whose step is no more than its logits."""

    logits: Tensor

    def _once(self, step: DecodeStep, *chunks: PrefillChunk) -> None:
        self.logits = decoding.decode(self.decoder, self.weights, self.cache, step)


def _long_step(decoder: Decoder) -> Action:
    """Next-token logits of rows that have much behind them: random keys so large that a row looks at few positions, and one that is left
    out shows. Where steps are replayed these are too, since how long their launches take is not what counts there."""
    generator, weights = torch.Generator().manual_seed(1), DecodeWeights(decoder, max(len(own) for _, own in _LONG))
    draw = Draw(SamplingSettings(max_tokens=1, greedy=True), decoder.vocabulary, decoder.device)
    steps: list[tuple[_Logits, Callable[[], None]]] = []
    for prompts, own in _LONG:
        cache = _cache(decoder, max(prompts), max(own) + 1, len(prompts), len(own))
        cache.reserve(max(own) + 1, len(own))
        for keys, values in (*cache.prompt, *cache.own):
            keys.copy_(2 * torch.randn(keys.shape, generator=generator))
            values.copy_(torch.randn(values.shape, generator=generator))
        runner, step = _Logits(decoder, weights, cache, draw), _planned(cache, prompts, own)
        runner._once(step)
        replayed = decoder.device.type in running.GRAPHS
        steps.append((runner, runner._capture(step).replay if replayed else partial(runner._once, step)))

    def action() -> Sequence[Tensor]:
        for _, compute in steps:
            compute()
        return [runner.logits for runner, _ in steps]

    return torch.no_grad()(action)  # type: ignore[no-any-return]


def _burst(decoder: Decoder) -> Action:
    """Log-probabilities of four steps by a runner, greedily."""
    with torch.no_grad():
        cache, step, weights = _step(decoder, 64)
        draw = Draw(SamplingSettings(max_tokens=64, greedy=True), decoder.vocabulary, decoder.device)

        def fail(sentence: str) -> None:
            raise RuntimeError(sentence)

        runner = running.Runner(decoder, weights, cache, draw, fail)
    return torch.no_grad()(lambda: [torch.tensor(runner.run(step, 4)[1], dtype=torch.float32)])  # type: ignore[no-any-return]


def _merged(decoder: Decoder) -> Action:
    """A projection's weight with an adapter of rank 4 added, which changes about every number."""
    frozen, generator = decoder.layers[0].gate_up.detach(), torch.Generator().manual_seed(2)
    rows, width = frozen.shape
    a = (torch.randn(4, width, generator=generator) * width**-0.5).to(frozen.device)
    b = torch.randn(rows, 4, generator=generator).to(frozen.device)
    return lambda: [merging.added_up(frozen, [(a, b, 0.5)])]


_OPERATIONS: dict[str, Callable[[Decoder], Action]] = {
    "passes": _passes, "passes with entropies": partial(_passes, entropy=True), "a decode step": _decode_step,
    "a step of long rows": torch.no_grad()(_long_step), "a burst of decode steps": _burst, "a merged weight": _merged,
}  # fmt: skip


def _small(
    config: Any, dtype: torch.dtype, device: torch.device, layers: int = _LAYERS, vocabulary: int = _VOCABULARY
) -> Decoder | None:
    """So many layers of the shape, one of each kind before others, with random weights at which every part of a layer adds about as
    much as the others: a mistake in any shows. PyTorch's generators of random numbers stay as they were."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    config.vocab_size = min(vocabulary, max(config.vocab_size, 64))  # the passes below have tokens up to 43
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    if getattr(config, "layer_types", None):
        kinds = dict.fromkeys(config.layer_types)
        config.layer_types = [*kinds, *config.layer_types][: config.num_hidden_layers]
    state = torch.get_rng_state()
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_rng_state(state)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            matrix = parameter.dim() > 1
            noise = torch.randn(parameter.shape, generator=generator) * (parameter.shape[-1] ** -0.5 if matrix else 0.2)
            parameter.copy_(noise if matrix else parameter + noise)
    return None if why_unsupported(model) is not None else Decoder(model.to(device))


# What is kept.

_NO_SHAPE = ("dtype", "torch_dtype", "transformers_version")
"""Of a config, with what begins with an underscore, such as the model's path: a run's checkpoint has others than its base. The
dtype that is computed in, and the versions, are in the key by themselves."""


def _key(config: Any, dtype: torch.dtype, device: torch.device) -> str:
    """A digest of all that the answer may depend on."""
    named = {name: value for name, value in config.to_dict().items() if not name.startswith("_") and name not in _NO_SHAPE}
    shape = {name: value for name, value in named.items() if isinstance(value, (int, float, str, bool))}
    where = [device.type, build.processor()]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "")()
        triton = next((found.version for found in metadata.distributions(name="triton")), None)
        where = [
            device.type, properties.name, f"{properties.major}.{properties.minor}", str(driver), str(torch.version.cuda), str(triton)
        ]  # fmt: skip
    parts = [
        where, [torch.__version__, transformers.__version__, build.kernels().description], str(dtype), shape,
        calls.offered(dtype),  # a container may forbid matrix units that the processor has
        [hashlib.sha256(source.read_bytes()).hexdigest() for source in sorted(_SOURCES)],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _file(key: str) -> Path:
    return cache_folder() / "fast-paths" / f"{key}.json"


def _kept(key: str) -> list[Choice] | None:
    """None where nothing is kept, or what is kept cannot be read."""
    try:
        return _read(json.loads(_file(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, ModelError):  # the last: no home folder is known
        return None


def _read(rows: Any) -> list[Choice] | None:
    try:
        choices = [Choice(**{**row, "operations": tuple(Measured(**m) for m in row["operations"])}) for row in rows]
    except (TypeError, KeyError, AttributeError):
        return None
    return choices if {choice.path for choice in choices} <= {path.name for path in fast_paths()} else None


def _keep(key: str, choices: Sequence[Choice]) -> None:
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(_file(key), json.dumps([choice.to_json() for choice in choices], indent=1).encode())
    except (OSError, ModelError):
        pass  # it is checked again another time
