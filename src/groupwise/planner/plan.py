"""One answer from all parts: does it fit, what is the peak made of, what would fit, and how long does a step take."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.config.combinations import (
    prompt_limit,
    refuse_short_critic,
    refuse_undividable,
    refuse_untrainable,
    refuse_with_vllm,
)
from groupwise.config.schema import Config
from groupwise.data.named import canonical_name
from groupwise.errors import ConfigError
from groupwise.planner.cost import StepCost, link_bytes_per_s, step_cost
from groupwise.planner.hardware import GPUS_OF_A_MACHINE, HARDWARE, Hardware, alike, choose_hardware, measure, parse_bytes
from groupwise.planner.memory import Item, Phase, gathered_bytes, host_bytes, peak_phase, phases
from groupwise.planner.setup import Setup, unknown_judges
from groupwise.planner.shape import KNOWN_SHAPES, find_shape
from groupwise.planner.state import critic_of, divided, least_for_vllm
from groupwise.planner.suggest import Suggestion, suggest

__all__ = ["LEGEND", "Plan", "hints", "make_plan", "plan_run", "smaller_model", "too_close", "training_problems"]

LEGEND = {
    "P": "weights of the model", "A": "weights of the adapter", "s": "bytes of a weight (model.dtype)", "L": "layers", "D": "model width",
    "F": "feed-forward width", "H": "query heads", "K": "key-value heads", "E": "head width", "V": "vocabulary",
    "R": "packed inputs of the largest micro-batch: a prompt once for its group", "T": "its predicted tokens",
    "N": "its inputs where each completion carries its prompt", "n": "processes",
}  # fmt: skip
"""Symbols of the formulas."""


@dataclass(frozen=True)
class Plan:
    """What a run will need on each device."""

    setup: Setup
    hardware: Hardware
    limit_bytes: int
    phases: tuple[Phase, ...]
    cost: StepCost
    suggestions: tuple[Suggestion, ...]
    hints: tuple[str, ...] = ()
    """What may have been meant by whoever asked, a sentence each."""

    @property
    def peak(self) -> Phase:
        return peak_phase(self.phases)

    @property
    def fits(self) -> bool:
        return self.peak.bytes <= self.limit_bytes

    @property
    def prompts_per_hour(self) -> float:
        return self.setup.config.rollout.prompts_per_step * 3600 / self.cost.step_s

    @property
    def epoch_steps(self) -> int | None:
        """Steps in which every training problem is seen once; None where their number is not known beforehand."""
        problems = training_problems(self.setup.config)
        return None if problems is None else -(-problems // self.setup.config.rollout.prompts_per_step)

    @property
    def epoch_hours(self) -> float | None:
        """One epoch of the training problems, evaluations and checkpoints not counted; None where their number is not known beforehand."""
        problems = training_problems(self.setup.config)
        return None if problems is None else problems / self.prompts_per_hour

    @property
    def assumptions(self) -> list[str]:
        """What the figures rest on beside the settings."""
        setup = self.setup
        given = "given" if setup.prompt_tokens or setup.config.data.max_prompt_tokens else "a guess: --prompt-tokens"
        notes = [
            f"prompts of {setup.prompt} tokens ({given if setup.prompt == setup.asked_prompt else 'no longer one is trained on'})",
            f"memory: completions of up to {setup.completion} tokens, of the length that fills micro-batches most",
            f"time: completions of {setup.mean_completion} tokens, every group learnt from, {self.hardware.name} "
            f"({self.hardware.source}) at {self.hardware.arithmetic_share:.0%} of its arithmetic and "
            f"{self.hardware.bandwidth_share:.0%} of its bandwidth",
        ]
        if setup.config.rollout.has_episodes:
            again = f"its tokens are computed again in each of up to {setup.config.rollout.max_turns} turns, which the time does not count"
            notes.append(
                f"episodes: the {setup.completion} tokens are those of all turns, what tools or an environment give included; "
                f"{'keys and values are kept from turn to turn' if setup.by_builtin else again}; the prompt, with its tools, is computed "
                "once for a group; the time of tools and environments is not counted"
            )
        if any(entry.model for entry in setup.config.rewards.functions):
            unknown = unknown_judges(setup.config, setup.device)
            left_out = f", without {', '.join(unknown)}, whose config.json cannot be had or read" if unknown else ""
            notes.append(f"reward models: their weights alone{left_out}; neither their passes nor the time of scoring")
        if setup.world_size > 1:
            notes += _of_several(setup, self.hardware)
        if outside := host_bytes(setup):
            notes.append(
                f"what lies outside the GPU takes {outside / 2**30:.0f} GiB of the machine's own memory for each process"
            )
        if not setup.shape.counted:
            notes.append(
                f"weights and passes are a Llama-like decoder's: those of the type {setup.shape.architecture!r} were never counted, "
                "and the figures may be far off"
            )
        if setup.by_vllm and setup.config.rollout.vllm.url is not None:
            notes.append("vLLM's server has a device of the same kind for itself, and its memory is not counted here")
        if setup.ahead:
            notes.append(
                "time: sampling ahead hides the shorter of sampling and learning, if one device can do both at full rate"
            )
        if setup.device == "cuda":
            notes.append("the driver's context and the allocator's losses on a GPU are an allowance, not a measurement")
        return notes

    def to_json(self) -> dict[str, Any]:
        setup, peak = self.setup, self.peak
        return {
            "model": setup.config.model.name,
            "parameters": setup.shape.parameters,
            "trained_parameters": setup.trained,
            "device": setup.device,
            "world_size": setup.world_size,
            "limit_bytes": self.limit_bytes,
            "peak_bytes": peak.bytes,
            "peak_phase": peak.name,
            "peak_cause": peak.cause.name,
            "fits": self.fits,
            "phases": [{"name": p.name, "bytes": p.bytes, "items": [asdict(item) for item in p.items]} for p in self.phases],
            "suggestions": [one.to_json() for one in self.suggestions],
            "step": self.cost.to_json(),
            "prompts_per_hour": self.prompts_per_hour,
            "completions_per_hour": self.prompts_per_hour * setup.config.rollout.completions_per_prompt,
            "epoch_hours": self.epoch_hours,
            "epoch_steps": self.epoch_steps,
            "hardware": asdict(self.hardware),
            "assumptions": self.assumptions,
            "hints": list(self.hints),
        }

    def formulas(self) -> list[Item]:
        """Every item once, with its formula, as in the phase in which it is largest."""
        by_name: dict[str, Item] = {}
        for item in (i for phase in self.phases for i in phase.items):
            if item.name not in by_name or by_name[item.name].bytes < item.bytes:
                by_name[item.name] = item
        return list(by_name.values())


def _of_several(setup: Setup, hardware: Hardware) -> list[str]:
    """What a plan for several processes rests on."""
    base_alone = setup.adapted and setup.sharding != "none"
    hold = "each holds its share of the base, and the adapter with its optimiser" if base_alone else _HOLD[setup.sharding]
    notes = [f"{setup.world_size} processes share the prompts of a step; {hold}"]
    here = setup.processes_here
    if setup.device == "cpu" and here > 1:
        notes.append(f"the {here} processes of a machine share its memory: each has 1/{here} of it")
    if divided(setup, "weights") and setup.device == "cuda":
        each = setup.weight_bytes * setup.shape.parameters / 2**30
        notes.append(
            f"at the start each process reads the whole model into its machine's own memory: {here} x {each:.1f} GiB on one machine"
            if setup.adapted
            else f"at the start the first process reads the whole model into its machine's own memory, {each:.1f} GiB, and hands it out"
        )
    if setup.device == "cuda" and (gathered := gathered_bytes(setup)):
        of_model = "for vLLM and the final model" if setup.by_vllm else "for the final model"
        when = of_model if setup.adapted else "for a checkpoint, that of a run that is stopped too,"
        of_adapter = "the adapter alone" if setup.config.output.adapter_only and not setup.by_vllm else "the whole base"
        what = of_adapter if setup.adapted else "the whole state"
        notes.append(f"{when} the first process brings {what} together in its machine's own memory: {gathered / 2**30:.1f} GiB")
    if setup.world_size > setup.gpus_per_node:
        notes.append(
            f"machines of {setup.gpus_per_node} GPUs (--gpus-per-node), and {link_bytes_per_s(setup, hardware) / 1e9:.0f} GB/s between "
            "two of them for each GPU"
        )
    return notes


_HOLD = {
    "none": "each holds everything",
    "zero2": "each holds all weights, and its share of gradients, masters and moments",
    "zero3": "each holds its share of weights, gradients, masters and moments",
    "fsdp2": "each holds its share of weights, gradients, masters and moments",
}


_PROBLEMS = {"gsm8k": 7473, "svamp": 700, "polaris": 53291}
"""Problems in the training splits of data sets that have a name."""


def training_problems(config: Config) -> int | None:
    """How many there are to train on, before any is dropped; None for data that would have to be read first."""
    data = config.data
    most = data.limit or sys.maxsize
    if data.source == "arithmetic":
        return min(most, data.arithmetic.problems)  # held-out ones are generated beside them
    rows = _PROBLEMS.get(canonical_name(data.source) or "") if data.split == "train" else None
    if rows is None:
        return None
    kept = rows - (0 if data.eval_source or data.eval_split else data.holdout)
    return max(1, min(most, kept))


def make_plan(
    config: Config,
    hardware: Hardware,
    *,
    limit_bytes: int | None = None,
    world_size: int = 1,
    prompt_tokens: int = 0,
    mean_completion_tokens: int = 0,
    gpus_per_node: int = GPUS_OF_A_MACHINE,
) -> Plan:
    """Plan a run on ``world_size`` devices of this kind; ``limit_bytes``: another memory size than the table has. On CPUs it is a
    machine's, which its processes share.

    Raises ModelError where the model's config.json cannot be had, and ConfigError where the trainer cannot train, sample or
    divide the model as the settings ask, whatever is installed, or where prompt and completion do not fit its context or that of
    a critic of its own.
    """
    refuse_untrainable(config.model)
    shape = find_shape(config.model)
    refuse_untrainable(config.model, shape.stored)
    if shape.stored != "none":
        config = config.model_copy(update={"model": config.model.model_copy(update={"quantization": shape.stored})})
    refuse_with_vllm(config.rollout, world_size, config.model.quantization)
    own_context = shape.context
    if config.rollout.engine == "vllm" and config.rollout.vllm.url is None:
        shape = replace(shape, context=min(own_context, config.rollout.vllm.max_model_tokens or own_context))
    _refuse_too_long(config, shape.context, prompt_tokens, mean_completion_tokens, shape.context < own_context)
    limit = hardware.memory_bytes if limit_bytes is None else limit_bytes
    setup = Setup(
        config,
        shape,
        "cpu" if hardware.name == "cpu" else "cuda",
        world_size,
        prompt_tokens,
        mean_completion_tokens,
        limit,
        gpus_per_node,
    )
    if setup.device == "cpu":
        limit //= setup.processes_here
    _refuse_small_share(setup)
    refuse_undividable(config, setup.sharding, setup.shape.uncovered)
    why = None
    if setup.device != "cpu":
        why = "this plan is for GPUs"
    elif shape.uncovered:
        why = f"{config.model.name} is not covered ({shape.uncovered})"
    elif config.model.quantization == "8bit":
        why = "the base is in 8 bits already"
    if config.rollout.quantization != "none" and why is not None:
        raise ConfigError(
            f"rollout.quantization is {config.rollout.quantization}, with which the built-in engine samples on CPUs, but {why}: set it to "
            "none"
        )
    if (critic := critic_of(setup)) is not None:
        refuse_short_critic(config, shape.context, critic.shape.context)
    return Plan(setup, hardware, limit, tuple(phases(setup)), step_cost(setup, hardware), tuple(suggest(setup, hardware, limit)))


def _refuse_small_share(setup: Setup) -> None:
    """Raise ConfigError where vLLM would not start in its share of the GPU, and would in a larger one."""
    settings, needed = setup.config.rollout.vllm, least_for_vllm(setup)
    if not setup.by_vllm or settings.url is not None or settings.cache_gib is not None or setup.device == "cpu":
        return
    share, least = settings.gpu_memory_share, math.ceil(100 * needed / setup.device_bytes) / 100
    if share < least < 1:
        raise ConfigError(
            f"rollout.vllm.gpu_memory_share is {share:g}, {share * setup.device_bytes / 2**30:.1f} GiB, but vLLM's weights and "
            f"the cache of one sequence of {setup.shape.context} tokens take {needed / 2**30:.1f} GiB: set it to {least:g} at "
            "least, or lower rollout.vllm.max_model_tokens"
        )


def _refuse_too_long(config: Config, context: int, prompt_tokens: int, mean_completion_tokens: int, by_vllm: bool) -> None:
    """Raise ConfigError for lengths that the trainer refuses beside a context of so many tokens (``by_vllm``: which vLLM's settings
    say), or that cannot occur."""
    completion = config.rollout.max_completion_tokens
    judged = config.evaluation.max_completion_tokens or completion
    longest = prompt_limit(config, context, completion, "rollout.max_completion_tokens", by_vllm)
    prompt_limit(config, context, judged, "evaluation.max_completion_tokens", by_vllm)
    if mean_completion_tokens > completion:
        raise ConfigError(
            f"--completion-tokens is {mean_completion_tokens}, but completions have at most {completion} tokens: lower it, or "
            "raise rollout.max_completion_tokens"
        )
    if prompt_tokens > longest and config.data.on_long_prompt == "error":
        raise ConfigError(
            f"--prompt-tokens is {prompt_tokens}, but prompts may have at most {longest} tokens beside completions of {completion}, by "
            f"data.max_prompt_tokens or the context of {context}: raise data.max_prompt_tokens, lower rollout.max_completion_tokens, or "
            "set data.on_long_prompt to drop"
        )


def plan_run(
    config: Config,
    *,
    hardware: str | None = None,
    gpu_memory: str | None = None,
    measured: bool = False,
    world_size: int = 1,
    prompt_tokens: int = 0,
    mean_completion_tokens: int = 0,
    gpus_per_node: int = GPUS_OF_A_MACHINE,
) -> Plan:
    """Plan a run on the ``hardware`` named, on GPUs of ``gpu_memory`` (such as ``24GiB``), or on this machine; with ``measured`` at rates
    measured here. Imports torch for this machine's CPU, whose instructions decide what ``model.dtype: auto`` is, and for a GPU of
    which NVIDIA's driver says nothing.

    Raises what ``make_plan`` raises, and ConfigError for hardware or a size that is not known.
    """
    limit = parse_bytes(gpu_memory) if gpu_memory else None
    device = _measured(config, hardware) if measured else choose_hardware(config.model.device, hardware, limit)
    if device.name == "cpu" and (hardware is None or measured):  # this machine's
        from groupwise.models.devices import with_dtype

        dtype = with_dtype(config.model.model_copy(update={"device": "cpu"})).dtype
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    return make_plan(
        config,
        device,
        limit_bytes=limit,
        world_size=world_size,
        prompt_tokens=prompt_tokens,
        mean_completion_tokens=mean_completion_tokens,
        gpus_per_node=gpus_per_node,
    )


def _measured(config: Config, hardware: str | None) -> Hardware:
    if hardware not in (None, "cpu"):
        raise ConfigError(f"--measure looks at this machine and --hardware {hardware} at another: leave one of them out")
    shape = find_shape(config.model)
    return measure(hardware or config.model.device, shape.width, shape.feed_forward, config.training.threads)


_USUAL_PROCESSES = 8
_CLOSE = 0.1
"""By how much predicted and measured peaks may differ (`groupwise bench` shows both)."""
_CARDS = {24: "rtx-4090", 40: "a100-40gb", 48: "l40s", 80: "a100-80gb"}
"""An example of a card by its memory in GB."""


def hints(made: Plan, source: Path, asked_for: str | None, by_size: bool, size: str | None = None) -> list[str]:
    """What whoever asked for a plan may have meant (more devices, another card, a smaller model), and what not to rely on: a sentence each.

    ``source``: the recipe's file. ``asked_for``: the hardware that was named. ``by_size``: whether the plan's hardware was found by its
    memory alone. ``size``: that memory as it was written.
    """
    named = asked_for is not None or by_size
    possible = [
        _meant_binary(size),
        too_close(made),
        _more_devices(made.setup.config, source, named) if made.setup.world_size == 1 else None,
        smaller_model(made),
        _whose_rates(made.hardware) if by_size else None,
    ]
    return [hint for hint in possible if hint is not None]


def _meant_binary(size: str | None) -> str | None:
    """A hint where gigabytes were written and a card's GiB, of 2^30 bytes, are meant."""
    match = re.fullmatch(r"\s*(\d+)\s*[gG][bB]?\s*", size or "")
    if match is None or not any(abs(card.memory_bytes / 2**30 - int(match[1])) < 0.5 for card in HARDWARE.values()):
        return None
    binary = int(match[1]) * 10**9 / 2**30
    return f"{size} is {binary:.1f} GiB; most cards sold with {match[1]} GB have about {match[1]} GiB: say {match[1]}GiB"


def too_close(made: Plan) -> str | None:
    """A warning for a run that fits by less than a plan may be wrong by."""
    spare = 1 - made.peak.bytes / made.limit_bytes
    if not 0 <= spare < _CLOSE:
        return None
    ends = made.setup.sharding != "none" and made.peak.name in ("reference", "learning", "output head")
    return (
        f"{spare:.0%} to spare, and a real peak may be {_CLOSE:.0%} higher than the planned one: a smaller pass or cache is safer"
        + (", all the more since a pass that does not fit ends a run whose weights are divided" if ends else "")
    )


def smaller_model(made: Plan) -> str | None:
    """Where nothing near fits: the largest model of the same family that does, and with which settings."""
    config, setup = made.setup.config, made.setup
    match = re.fullmatch(r"(.*-)\d+(?:\.\d+)?B(.*)", config.model.name)
    if made.fits or any(one.fits for one in made.suggestions) or match is None:
        return None
    family = re.compile(re.escape(match[1]) + r"\d+(?:\.\d+)?B" + re.escape(match[2]))
    context = setup.prompt + max(setup.completion, config.evaluation.max_completion_tokens or 0)
    smaller = [
        name
        for name, shape in KNOWN_SHAPES.items()
        if family.fullmatch(name) and shape.parameters < setup.shape.parameters and shape.context >= context
    ]
    for name in sorted(smaller, key=lambda name: -KNOWN_SHAPES[name].parameters):
        try:
            other = make_plan(
                config.model_copy(update={"model": config.model.model_copy(update={"name": name})}), made.hardware,
                limit_bytes=setup.device_bytes, world_size=setup.world_size, prompt_tokens=setup.prompt_tokens,
                gpus_per_node=setup.gpus_per_node,
            )  # fmt: skip
        except ConfigError:  # with this one the settings contradict each other, as those of a separate critic may
            continue
        if other.fits or any(one.fits for one in other.suggestions):
            best = None if other.fits else other.suggestions[0]
            changes = f" with {best.words}" if best and best.words else ""
            if best and best.machines > 1:
                changes += f" on {best.effect.partition(':')[0]}"
            return f"a smaller model would fit: {name}{changes}"
    return None


def _more_devices(config: Config, source: Path, named: bool) -> str | None:
    """A hint for a run over several devices that was planned for one; ``named``: whether somebody said which kind of device."""
    text = source.read_text(encoding="utf-8")
    start = re.search(r"^#.*--num-processes[ =](\d+)", text, re.MULTILINE)
    way = config.training.sharding
    if way not in ("none", "auto"):
        reason = f"training.sharding is {way}, and one device divides nothing"
    elif start:
        reason = f"{source.stem} is made for {start[1]} devices"
    else:
        return None
    memory = re.search(r"^# Hardware:.*?(\d+) GB", text, re.MULTILINE)
    card = _CARDS.get(int(memory[1]) if memory else 80, "a100-80gb")
    options = f"--world-size {start[1] if start else _USUAL_PROCESSES}{'' if named else f' --hardware {card}'}"
    return f"this plan is for one device{'' if named else ' of this machine'}; {reason}: say {options}, or what you have"


def _whose_rates(hardware: Hardware) -> str:
    """Which card the rates belong to, where it was chosen by its memory."""
    others = [c for c in alike(hardware.memory_bytes) if c.name != hardware.name]
    others = others or [c for c in HARDWARE.values() if c.name not in (hardware.name, "cpu")]
    names = ", ".join(card.name for card in sorted(others, key=lambda card: -card.flops_per_s))
    return f"--gpu-memory names no card, so the times are those of {hardware.name}; --hardware takes another's rates: {names}"
