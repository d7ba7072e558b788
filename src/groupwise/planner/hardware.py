"""What machines can do: memory, arithmetic and bandwidth, from vendors' data sheets or measured here."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from groupwise.errors import ConfigError
from groupwise.memory import total_memory_bytes

__all__ = [
    "GPUS_OF_A_MACHINE", "HARDWARE", "NETWORK_BYTES_PER_S", "Hardware", "alike", "choose_hardware", "find_hardware", "measure",
    "named_in", "parse_bytes", "present_gpu",
]  # fmt: skip

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_GIB, _MIB = 2**30, 2**20
GPUS_OF_A_MACHINE = 8
NETWORK_BYTES_PER_S = 50e9
"""Bandwidth from one GPU to GPUs of other machines, in one direction: 400 Gbit/s for each, as machines of eight have."""
_ALIKE = 0.1
"""Cards sold with one size of memory differ by so much in what their drivers report: error correction takes some."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device."""

    name: str
    memory_bytes: int
    flops_per_s: float
    """Peak of dense bf16 matrix products that add up in fp32."""
    bytes_per_s: float
    """Peak of its own memory."""
    link_bytes_per_s: float
    """To a neighbour on the same machine, in one direction."""
    arithmetic_share: float = 0.4
    """Share of the peak that learning reaches: 0.3 to 0.5 is usual. 1 for rates that were measured on real shapes."""
    bandwidth_share: float = 0.6
    """Share of the peak bandwidth that decoding reaches."""
    source: str = "data sheet"
    fp32_flops_per_s: float | None = None
    """Rate of fp32 products, where it was measured."""


# docs/gpu.md has the table of these figures, with the source of each and where it was found again; a test holds the two equal.
_AMPERE, _ADA, _BLACKWELL = (f"NVIDIA's white paper on {chips}" for chips in ("GA102", "the Ada architecture", "RTX Blackwell"))

HARDWARE: dict[str, Hardware] = {
    card.name: card
    for card in (
        Hardware("rtx-3090", 24576 * _MIB, 71e12, 936e9, 12e9, source=_AMPERE),
        Hardware("rtx-4090", 24564 * _MIB, 165e12, 1008e9, 12e9, source=_ADA),
        Hardware("rtx-5090", 32607 * _MIB, 209e12, 1792e9, 25e9, source=_BLACKWELL),
        Hardware("l4", 23034 * _MIB, 121e12, 300e9, 12e9),
        Hardware("a10", 23028 * _MIB, 125e12, 600e9, 12e9),
        Hardware("a10g", 23028 * _MIB, 70e12, 600e9, 12e9),
        Hardware("l40", 46068 * _MIB, 181e12, 864e9, 25e9),
        Hardware("l40s", 46068 * _MIB, 362e12, 864e9, 25e9),
        Hardware("rtx-a6000", 49140 * _MIB, 155e12, 768e9, 25e9, source=_AMPERE),
        Hardware("rtx-6000-ada", 49140 * _MIB, 364e12, 960e9, 25e9),
        Hardware("a100-40gb", 40960 * _MIB, 312e12, 1555e9, 300e9),
        Hardware("a100-80gb", 81920 * _MIB, 312e12, 2039e9, 300e9),
        Hardware("h100", 81559 * _MIB, 989e12, 3350e9, 450e9),
        Hardware("h100-pcie", 81559 * _MIB, 756e12, 2000e9, 300e9),
        Hardware("h100-nvl", 95830 * _MIB, 835e12, 3900e9, 300e9),
        Hardware("h200", 139 * _GIB, 989e12, 4800e9, 450e9),
        Hardware("h200-nvl", 139 * _GIB, 835e12, 4800e9, 450e9),
        Hardware("b200", 178 * _GIB, 2250e12, 8000e9, 900e9),
        Hardware("cpu", 16 * _GIB, 0.95e12, 60e9, 10e9, 0.5, 0.9, "two cores of an AMD EPYC (Zen 5), benchmarks/RESULTS.md"),
    )
}
"""By name. Rates are the vendors' peaks of dense bf16 products with fp32 sums, half of what data sheets give with sparsity. GeForce cards
make fp16 products with fp16 sums twice as fast; that rate is not meant here. Memory is what drivers report."""


def find_hardware(name: str) -> Hardware:
    """Raises ConfigError for a name that the table does not have."""
    found = HARDWARE.get(name.lower().replace(" ", "-").replace("_", "-"))
    if found is None:
        raise ConfigError(f"the hardware {name!r} is not in the table: use one of {', '.join(HARDWARE)}, or --gpu-memory alone")
    return found


def parse_bytes(text: str) -> int:
    """``24GiB``, ``24GB``, ``24576MiB``, or plain bytes; ``24G`` means gigabytes of 10^9.

    Raises ConfigError for what is no size, and for a number that can hardly be meant in bytes.

    >>> parse_bytes("24GiB"), parse_bytes("1.5 GB"), parse_bytes("25769803776")
    (25769803776, 1500000000, 25769803776)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] == "i" or float(match[1]) == 0:
        raise ConfigError(f"the memory size {text!r} is not understood: write a number with a unit, such as 24GiB or 80GB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if not match[2] and size < _MIB:
        raise ConfigError(f"the memory size {text!r} is {size} bytes as it stands: write {match[1]}GiB if that is what is meant")
    return size


def alike(memory_bytes: int) -> list[Hardware]:
    """Cards of the table with about as much memory."""
    return [c for c in HARDWARE.values() if c.name != "cpu" and abs(c.memory_bytes / memory_bytes - 1) <= _ALIKE]


def present_gpu(index: int = 0) -> tuple[str, int] | None:
    """Name and memory of the GPU that a process here knows as ``cuda:index`` (``CUDA_VISIBLE_DEVICES``), as NVIDIA's driver says,
    or as PyTorch says where the driver does not; None without one."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = str(index) if listed is None else ",".join(listed.split(",")[index : index + 1]).strip()
    if chosen in ("", "-1"):
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    numbered = chosen.isdecimal()
    try:
        listing = subprocess.run(
            query if numbered else [*query, f"--id={chosen}"], capture_output=True, text=True, check=True, timeout=20
        )
        cards = listing.stdout.splitlines()
        # nvidia-smi counts cards by their place on the bus; CUDA counts the fastest first, unless it is told otherwise.
        apart = numbered and len(set(cards)) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        if apart and (known := _known_to_torch(index)) is not None:
            return known
        name, _, mebibytes = cards[int(chosen) if numbered else 0].rpartition(",")
        shared = mebibytes.strip() == "[N/A]"  # with the processor, as that of GB10
        return name.strip(), total_memory_bytes() if shared else int(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return _known_to_torch(index)


def _known_to_torch(index: int) -> tuple[str, int] | None:
    """As ``present_gpu``. nvidia-smi may be missing, and knows no memory of a slice of a card (MIG)."""
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory


def measure(device: str = "auto", width: int = 1024, feed_forward: int = 4096, threads: int | None = None) -> Hardware:
    """This machine's own rates: the widest product of a layer over 1,024 rows (8,192 on a GPU) in bf16 and fp32, and a copy.

    The fastest of what a second holds counts, so that a moment in which the machine was busy does not. ``device``: ``cpu``, ``cuda``,
    ``cuda:1`` or ``auto``; ``width`` and ``feed_forward``: the model's. On CPU the memory is the machine's, or its container's.

    Imports torch. Raises ConfigError where a GPU is to be measured and there is none.
    """
    import torch

    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--measure is asked for on a GPU ({device}), but there is none here: leave it out, or name --hardware cpu"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    where = torch.device(("cuda" if device == "auto" else device) if on_gpu else "cpu")
    rows = 8192 if on_gpu else 1024
    inputs = torch.randn(rows, width, dtype=torch.bfloat16, device=where)
    weight = torch.randn(2 * feed_forward, width, dtype=torch.bfloat16, device=where)
    source = torch.empty(2**28 if on_gpu else 2**25, dtype=torch.float32, device=where).fill_(1.0)
    target = torch.empty_like(source)
    wait: Callable[[], object] = partial(torch.cuda.synchronize, where) if on_gpu else lambda: None
    product = _fastest(lambda: torch.mm(inputs, weight.t()), wait)
    inputs, weight = inputs.float(), weight.float()
    in_fp32 = _fastest(lambda: torch.mm(inputs, weight.t()), wait)
    operations = 2.0 * rows * width * 2 * feed_forward
    copy = _fastest(lambda: target.copy_(source), wait)
    name = torch.cuda.get_device_name(where) if on_gpu else "cpu"
    memory = torch.cuda.get_device_properties(where).total_memory if on_gpu else total_memory_bytes()
    return Hardware(
        name, memory, operations / product, 2.0 * source.nbytes / copy,
        link_of(name), 0.6, 0.8,
        "measured here" if on_gpu else f"measured here, threads: {torch.get_num_threads()}", operations / in_fp32,
    )  # fmt: skip  # attention, norms and launches are not products: what learning reaches of the measured rate


def _fastest(action: Callable[[], object], wait: Callable[[], object], seconds: float = 1.0) -> float:
    """Seconds of the fastest of several calls."""
    action()
    wait()
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        started = time.perf_counter()
        action()
        wait()
        best = min(best, time.perf_counter() - started)
    return best


def named_in(label: str) -> Hardware | None:
    """The card of the table that a driver's ``label`` means: of those whose words are all among the label's, the one with the most.

    Whole words: "L40S" is no L4, and "A100" no A10. A mobile card shares only its name with the one on a board.

    >>> named_in("NVIDIA A100-SXM4-80GB").name, named_in("NVIDIA H100 80GB HBM3").name, named_in("NVIDIA L40S").name
    ('a100-80gb', 'h100', 'l40s')
    """
    words = set(re.findall(r"[a-z0-9]+", label.lower()))
    fitting = [card for key, card in HARDWARE.items() if words.issuperset(key.split("-"))]
    return None if "laptop" in words else max(fitting, key=lambda card: card.name.count("-"), default=None)


def link_of(name: str) -> float:
    """Bandwidth to a neighbour, which nobody measures: the table's, or what most cards have, PCIe's."""
    known = named_in(name)
    return 12e9 if known is None else known.link_bytes_per_s


def choose_hardware(device: str, name: str | None, gpu_bytes: int | None) -> Hardware:
    """What a plan is for: the device named, a GPU of the size given, or what this machine has (``device`` is ``model.device``).

    Of a GPU that is known by its size alone, rates are those of the card of the table with about as much memory that is slowest in
    arithmetic, or of the smallest with more. The memory is always the GPU's own.

    Raises ConfigError for a name that the table does not have, and where ``device`` is a GPU that is not here.
    """
    if name is not None:
        return find_hardware(name)
    card = None
    if gpu_bytes is None:
        index = device.partition(":")[2]
        gpu = None if device == "cpu" else present_gpu(int(index) if index.isdecimal() else 0)
        if gpu is None and device.startswith("cuda"):
            raise ConfigError(
                f"model.device is {device}, and no such GPU can be asked here: name --hardware or --gpu-memory (in "
                "Python: hardware or gpu_memory)"
            )
        if gpu is None:
            return replace(HARDWARE["cpu"], memory_bytes=total_memory_bytes())
        card, gpu_bytes = named_in(gpu[0]), gpu[1]
    if card is None and (same := alike(gpu_bytes)):
        card = min(same, key=lambda card: card.flops_per_s)
    if card is None:
        cards = sorted((c for c in HARDWARE.values() if c.name != "cpu"), key=lambda c: (c.memory_bytes, c.flops_per_s))
        card = next((card for card in cards if card.memory_bytes >= gpu_bytes), cards[-1])
    return replace(card, memory_bytes=gpu_bytes)
