"""What whoever asked for a plan may have meant: more devices, and another card's rates."""

from __future__ import annotations

import re
from pathlib import Path

from groupwise.config.schema import Config
from groupwise.planner.hardware import HARDWARE, Hardware

__all__ = ["hints"]

_USUAL_PROCESSES = 8
_CARDS = {24: "rtx-4090", 40: "a100-40gb", 48: "l40s", 80: "a100-80gb"}
"""An example of a card by its memory in GB."""


def hints(config: Config, source: Path, hardware: Hardware, asked_for: str | None, by_size: bool, world_size: int) -> list[str]:
    """A sentence for each.

    ``source``: the recipe's file. ``asked_for``: the hardware that was named. ``by_size``: whether ``hardware`` was found by its
    memory alone.
    """
    found = []
    if world_size == 1 and (hint := _more_devices(config, source, named=asked_for is not None or by_size)):
        found.append(hint)
    if by_size:
        found.append(_whose_rates(hardware))
    return found


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
    alike = [c for c in HARDWARE.values() if c.memory_bytes == hardware.memory_bytes and c.name not in (hardware.name, "cpu")]
    others = alike or [c for c in HARDWARE.values() if c.name not in (hardware.name, "cpu")]
    names = ", ".join(card.name for card in sorted(others, key=lambda card: -card.flops_per_s))
    return f"--gpu-memory names no card, so the times are those of {hardware.name}; --hardware takes another's rates: {names}"
