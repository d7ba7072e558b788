"""What whoever asked for a plan may have meant: more devices, another card's rates, a smaller model; and what they should not rely on."""

from __future__ import annotations

import re
from pathlib import Path

from groupwise.config.schema import Config
from groupwise.planner.hardware import HARDWARE, Hardware, alike
from groupwise.planner.plan import Plan, make_plan
from groupwise.planner.shape import KNOWN_SHAPES

__all__ = ["hints", "smaller_model", "too_close"]

_USUAL_PROCESSES = 8
_CLOSE = 0.1
"""By how much predicted and measured peaks may differ (`groupwise bench` shows both)."""
_CARDS = {24: "rtx-4090", 40: "a100-40gb", 48: "l40s", 80: "a100-80gb"}
"""An example of a card by its memory in GB."""


def hints(made: Plan, source: Path, asked_for: str | None, by_size: bool, size: str | None = None) -> list[str]:
    """A sentence for each.

    ``source``: the recipe's file. ``asked_for``: the hardware that was named. ``by_size``: whether the plan's hardware was found by its
    memory alone. ``size``: that memory as it was written.
    """
    named = asked_for is not None or by_size
    found = [
        _meant_binary(size),
        too_close(made),
        _more_devices(made.setup.config, source, named) if made.setup.world_size == 1 else None,
        smaller_model(made),
        _whose_rates(made.hardware) if by_size else None,
    ]
    return [hint for hint in found if hint is not None]


def _meant_binary(size: str | None) -> str | None:
    """Of gigabytes where a card's are meant, which are of 2^30 bytes."""
    match = re.fullmatch(r"\s*(\d+)\s*[gG][bB]?\s*", size or "")
    if match is None or not any(abs(card.memory_bytes / 2**30 - int(match[1])) < 0.5 for card in HARDWARE.values()):
        return None
    binary = int(match[1]) * 10**9 / 2**30
    return f"{size} is {binary:.1f} GiB; most cards sold with {match[1]} GB have about {match[1]} GiB: say {match[1]}GiB"


def too_close(made: Plan) -> str | None:
    """Of a run that fits by less than what a plan may be wrong by."""
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
    smaller = [
        name for name, shape in KNOWN_SHAPES.items() if family.fullmatch(name) and shape.parameters < setup.shape.parameters
    ]
    for name in sorted(smaller, key=lambda name: -KNOWN_SHAPES[name].parameters):
        other = make_plan(
            config.model_copy(update={"model": config.model.model_copy(update={"name": name})}), made.hardware,
            limit_bytes=made.limit_bytes, world_size=setup.world_size, prompt_tokens=setup.prompt_tokens,
        )  # fmt: skip
        if other.fits or any(one.fits for one in other.suggestions):
            changes = "" if other.fits else f" with {other.suggestions[0].words}"
            return f"a smaller model would fit: {name}{changes}"
    return None


def _more_devices(config: Config, source: Path, named: bool) -> str | None:
    """For a run over several devices that was planned for one; ``named``: whether somebody said which kind of device."""
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
    """Of a card that was taken for its memory."""
    others = [c for c in alike(hardware.memory_bytes) if c.name != hardware.name]
    others = others or [c for c in HARDWARE.values() if c.name not in (hardware.name, "cpu")]
    names = ", ".join(card.name for card in sorted(others, key=lambda card: -card.flops_per_s))
    return f"--gpu-memory names no card, so the times are those of {hardware.name}; --hardware takes another's rates: {names}"
