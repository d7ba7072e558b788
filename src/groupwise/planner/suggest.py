"""The nearest settings that fit, ranked: first those that leave every number as it is, then those that change what is learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from pydantic_core import PydanticSerializationError

from groupwise.config.load import build_config, changed_settings
from groupwise.config.schema import Config, LoraConfig, VllmConfig
from groupwise.errors import ConfigError
from groupwise.planner.cost import step_cost
from groupwise.planner.hardware import Hardware
from groupwise.planner.memory import host_bytes, peak_bytes, phases
from groupwise.planner.setup import Setup
from groupwise.planner.state import refused

__all__ = ["Suggestion", "suggest"]

_MORE_DEVICES = 3
_MARGIN = 0.05
"""Share of the memory that a suggestion leaves free where one can: half of what planned and measured peaks differ by at most."""
_FAR_SLOWER = 5
_WAYS_TO_DIVIDE = {
    "zero2": "gradients and optimiser are divided (needs deepspeed)",
    "fsdp2": "weights and optimiser are divided, and gathered for each pass",
}
"""Values of ``training.sharding``, the nearest to whole replicas first. ``zero3`` holds what fsdp2 holds, and weights beside masters."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Settings to change together, and what comes of it."""

    settings: dict[str, Any]
    """By dotted name, as ``groupwise train RECIPE name=value`` takes them."""
    peak_bytes: int
    fits: bool
    step_s: float
    effect: str
    """What changes beside memory."""
    rank: int
    """0: same numbers, only speed; 1: rounding; 2: another objective, or fewer weights that learn; 3: same numbers on more devices."""
    world_size: int = 1
    """Processes that it takes."""
    machines: int = 1
    """Machines that they are on; on several a launcher starts them."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def words(self) -> str:
        """The settings as one types them after ``groupwise train RECIPE``."""
        more = f" --num-processes {self.world_size}" if self.rank == _MORE_DEVICES and self.machines == 1 else ""
        return " ".join(f"{name}={_typed(value)}" for name, value in self.settings.items()) + more


def _typed(value: Any) -> str:
    if isinstance(value, dict):
        return "'{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}'"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def suggest(setup: Setup, hardware: Hardware, limit: int, most: int = 6) -> list[Suggestion]:
    """Up to ``most`` changes that bring the peak to ``limit`` bytes, nearest first: by rank, by how many settings they touch, by time.

    They leave a margin where anything does. Where nothing fits, the one with the lowest peak is given, with ``fits`` false. For a run that
    fits already: nothing.
    """
    if peak_bytes(setup) <= limit:
        return []
    tried: list[Suggestion] = []
    accepted = _accepting(setup.config)
    for aim in (int(limit * (1 - _MARGIN)), limit):
        tried = [
            _outcome(setup, changes, rank, effect, hardware, aim)
            for changes, rank, effect in _candidates(setup, aim)
            if not refused(setup.changed(**changes))
        ]
        tried += _on_more_devices(setup, hardware, aim, [t.settings for t in tried if t.fits and t.rank == 0])
        fitting = sorted((t for t in tried if t.fits and accepted(t.settings)), key=lambda t: (t.rank, len(t.settings), t.step_s))
        if fitting:
            return _without_supersets(_worth_their_time(fitting))[:most]
    least = sorted(tried, key=lambda t: (t.peak_bytes, len(t.settings)))
    return [*islice((t for t in least if accepted(t.settings)), 1)]


def _accepting(config: Config) -> Callable[[Mapping[str, Any]], bool]:
    """Whether ``config`` can be written with some settings changed; always, where it cannot be written as it is."""

    def written(changes: Mapping[str, Any]) -> Config | None:
        try:
            return build_config(own, [f"{name}={json.dumps(value)}" for name, value in changes.items()])
        except ConfigError:
            return None

    try:
        own = changed_settings(config.model_dump(mode="json"))
    except PydanticSerializationError:  # of a config made in Python
        return lambda changes: True
    if written({}) != config:
        return lambda changes: True
    return lambda changes: written(changes) is not None


def _worth_their_time(suggestions: list[Suggestion]) -> list[Suggestion]:
    """The suggestions without those that are far slower than another; but what leaves every number as it is has no substitute."""
    soonest = min(one.step_s for one in suggestions)
    return [one for one in suggestions if one.rank == 0 or one.step_s <= _FAR_SLOWER * soonest]


def _without_supersets(suggestions: list[Suggestion]) -> list[Suggestion]:
    """Drop what changes everything that an earlier one changes, to the same values, and more."""
    kept: list[Suggestion] = []
    for one in suggestions:
        if not any(earlier.settings.items() <= one.settings.items() for earlier in kept):
            kept.append(one)
    return kept


def _outcome(setup: Setup, changes: dict[str, Any], rank: int, effect: str, hardware: Hardware, limit: int) -> Suggestion:
    changed = setup.changed(**changes)
    peak, outside = peak_bytes(changed), host_bytes(changed)
    if outside:
        effect += f"; {outside / 2**30:.0f} GiB of the machine's memory for each process"
    shown = {name.replace("__", "."): _plain(value) for name, value in changes.items()}
    machines = -(-setup.world_size // setup.gpus_per_node)
    return Suggestion(shown, peak, peak <= limit, step_cost(changed, hardware).step_s, effect, rank, setup.world_size, machines)


def _plain(value: Any) -> Any:
    return {"rank": value.rank, "alpha": value.alpha} if isinstance(value, LoraConfig) else value


def _on_more_devices(setup: Setup, hardware: Hardware, limit: int, enough: list[dict[str, Any]]) -> list[Suggestion]:
    """The smallest number of processes, a power of two, over which the run fits with the same numbers, and how it does soonest; each has
    at least one prompt. ``enough``: settings that need no more processes. More on a CPU would only share its memory."""
    processes = 2
    while setup.device == "cuda" and processes <= setup.config.rollout.prompts_per_step:
        if processes > setup.world_size:
            wider, devices = replace(setup, world_size=processes), f"{processes} devices"
            if processes > setup.gpus_per_node:
                devices += f" in machines of {setup.gpus_per_node} (torchrun or Slurm)"
            suggestions = [
                _outcome(wider, changes, _MORE_DEVICES, f"{devices}: {effect}" if effect else devices, hardware, limit)
                for changes, effect in _same_numbers(wider, limit)
                if "optimizer__offload" not in changes and not refused(wider.changed(**changes))
            ]
            new = [f for f in suggestions if f.fits and not any(settings.items() <= f.settings.items() for settings in enough)]
            fitting = sorted(new, key=lambda f: (len(f.settings), f.step_s))
            if fitting:
                return fitting[:1]
        processes *= 2
    return []


def _divisions(setup: Setup) -> Iterator[tuple[dict[str, Any], str]]:
    """Ways to divide what each process holds alone so far."""
    if setup.device == "cuda" and setup.world_size > 1 and setup.sharding == "none":
        for way, effect in _WAYS_TO_DIVIDE.items():
            base_alone = "the base is divided, and gathered for each pass"
            yield {"training__sharding": way}, base_alone if setup.adapted else effect


Change = tuple[dict[str, Any], int, str]


def _candidates(setup: Setup, limit: int) -> Iterator[Change]:
    """Every combination of one change of what is learned (or none) with changes of speed alone; the budgets that just fit."""
    for learned, rank, effect in _changes_of_result(setup):
        for changes, slower in _same_numbers(setup.changed(**learned), limit):
            if learned or changes:
                yield {**learned, **changes}, rank, "; ".join(w for w in (effect, slower) if w)


def _same_numbers(setup: Setup, limit: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Nothing, and every combination of changes of speed alone; budgets and sequences at once are the most that fit."""
    for slow, slower in _slower(setup):
        for fewer in _concurrency(setup.changed(**slow), limit):
            changes = {**slow, **fewer}
            words = [slower, "more rounds of sampling" if fewer else ""]
            yield changes, "; ".join(w for w in words if w)
            budget = _budget(setup.changed(**changes), limit)
            if budget:
                words.append("smaller passes")
                yield {**changes, "training__micro_batch_tokens": budget}, "; ".join(w for w in words if w)


def _slower(setup: Setup) -> Iterator[tuple[dict[str, Any], str]]:
    """Combinations of what costs time alone."""
    config, on_gpu = setup.config, setup.device == "cuda"
    recompute: list[tuple[dict[str, Any], str]] = [({}, "")]
    if not config.model.gradient_checkpointing:
        recompute.append(({"model__gradient_checkpointing": True}, "activations are computed twice"))
    away: list[tuple[dict[str, Any], str]] = [({}, "")]
    reference = on_gpu and setup.has_reference and not config.training.offload_reference
    if reference:
        away.append(({"training__offload_reference": True}, "the reference is brought for its pass"))
    if on_gpu and not setup.adapted and not config.optimizer.offload and config.optimizer.precision.startswith("masters"):
        away.append(({"optimizer__offload": True}, "each update waits for the bus and the CPU"))
        if reference:
            away.append(({**away[1][0], **away[2][0]}, f"{away[1][1]}; {away[2][1]}"))
    away.extend(_divisions(setup))
    for one, words in recompute:
        for other, more in away:
            yield {**one, **other}, "; ".join(w for w in (words, more) if w)


def _changes_of_result(setup: Setup) -> Iterator[Change]:
    """One at a time, and without a reference also with other precisions; nearest first."""
    yield {}, 0, ""
    rounding = list(_other_rounding(setup))
    yield from rounding
    if setup.config.rollout.ahead:
        stale = {} if setup.config.algorithm.stale_samples == "decoupled" else {"algorithm__stale_samples": "decoupled"}
        yield {"rollout__ahead": 0, **stale}, 2, "no sampling ahead: nothing is stale, and a step waits for its batch"
    value = setup.config.algorithm.value
    if value is not None and value.critic != "shared":
        rate = type(value).model_fields["critic_learning_rate"].default  # of a critic of its own alone
        shared = {"algorithm__value__critic": "shared", "algorithm__value__critic_learning_rate": rate}
        yield shared if value.critic_learning_rate != rate else {"algorithm__value__critic": "shared"}, 2, _HEAD
    if setup.has_reference and setup.config.algorithm.kl is not None:
        without = "no reference and no KL: another objective"
        none = {"algorithm__kl": None, **_no_parked_reference(setup)}
        yield none, 2, without
        for changes, _, effect in rounding:
            yield {**none, **changes}, 2, f"{without}; {effect}"
    yield from _adapters(setup)


def _other_rounding(setup: Setup) -> Iterator[Change]:
    config = setup.config
    if not setup.in_fp32 and config.optimizer.precision in ("masters", "masters-8bit"):
        if config.optimizer.precision == "masters":
            yield {"optimizer__precision": "masters-8bit"}, 1, "moments of 8 bits (needs bitsandbytes)"
        yield {"optimizer__precision": "stochastic"}, 1, "no fp32 copies: updates are rounded stochastically"
    if setup.by_vllm and config.rollout.vllm == VllmConfig():  # what is set of it would do nothing
        yield {"rollout__engine": "auto"}, 1, "sampled by the built-in engine, whose memory is there only while it samples"


_HEAD = "the critic is a head on the policy"
_FEW_BITS = "a base of {} bits (needs bitsandbytes)"
_MODULE = "sampled through the base as it is stored, by the model's own module: slow"


def _adapters(setup: Setup) -> Iterator[Change]:
    """A low-rank adapter, a base of fewer bits, and a base that is not merged for sampling."""
    few: list[tuple[dict[str, Any], str]] = [
        ({"model__quantization": f"{bits}bit"}, _FEW_BITS.format(bits))
        for bits in (8, 4)
        if setup.shape.stored == "none" and _bits(setup) > bits  # quantised files are loaded as they are
    ]
    by_module: dict[str, Any] = {"rollout__engine": "transformers"}
    whole: dict[str, Any] = {} if setup.sharding == "none" else {"training__sharding": "none"}
    if setup.adapted:
        for changes, effect in few:
            yield {**whole, **changes}, 2, effect
        if setup.by_builtin:
            yield {**whole, **by_module}, 1, _MODULE
            for changes, effect in few:
                yield {**whole, **changes, **by_module}, 2, f"{effect}; {_MODULE}"
        return
    lora: dict[str, Any] = {"model__lora": LoraConfig(rank=16, alpha=32), **_no_parked_reference(setup)}
    effect = "a low-rank adapter learns: raise the learning rate about tenfold"
    if whole:
        yield lora, 2, effect
    adapter = {**whole, **lora}
    yield adapter, 2, effect
    for changes, bits in few:
        yield {**adapter, **changes}, 2, f"{effect}; {bits}"
        if setup.by_builtin:
            yield {**adapter, **changes, **by_module}, 2, f"{effect}; {bits}; {_MODULE}"


def _no_parked_reference(setup: Setup) -> dict[str, Any]:
    """Where no weights of a reference are left, nothing is there to lie outside the GPU."""
    return {"training__offload_reference": False} if setup.config.training.offload_reference else {}


def _bits(setup: Setup) -> int:
    """Bits of a weight of the base's matrices."""
    return {"none": 16, "8bit": 8, "4bit": 4}[setup.quantised]


def _budget(setup: Setup, limit: int) -> int | None:
    """The largest smaller micro-batch budget that fits, a power of two, or the smallest that holds one completion."""
    smallest = setup.prompt + setup.completion
    budget = 1 << (min(setup.config.training.micro_batch_tokens, setup.prompts * smallest * 64).bit_length() - 1)
    while budget >= 128:
        if budget < setup.config.training.micro_batch_tokens:
            if peak_bytes(setup.changed(training__micro_batch_tokens=budget)) <= limit:
                return budget
            if budget <= smallest:
                return budget  # nothing smaller changes anything: shown as what does not fit
        budget //= 2
    return None


def _concurrency(setup: Setup, limit: int) -> Iterator[dict[str, int]]:
    """Nothing; and, where sampling is what does not fit, fewer sequences at once: so few that it does, and where it is ahead
    also so few that the passes beside it do."""
    yield {}
    beside = [{"reference", "learning", "output head", "optimiser step", "checkpoint"}] if setup.ahead else []
    most = setup.config.rollout.max_concurrent_sequences
    for names in ({"sampling", "evaluation"}, *beside):
        rows, made = most, setup.changed(rollout__max_concurrent_sequences=most)
        while rows and any(p.bytes > limit for p in phases(made) if p.name in names):
            rows = 1 << (rows - 1).bit_length() - 1 if rows > 1 else 0
            made = setup.changed(rollout__max_concurrent_sequences=rows)
        if 0 < rows < most:
            yield {"rollout__max_concurrent_sequences": rows}
            most = rows
