"""What the checks of first light have in common: where they run, what they find, and a model that is written in a moment."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from groupwise.memory import use_expandable_segments
from groupwise.planner.hardware import HARDWARE, Hardware, named_in

__all__ = ["Found", "Place", "answer", "judge", "write_tiny_model"]


@dataclass
class Place:
    """Where a check runs.

    Attributes:
        folder: for scratch files.
        judged: whether speeds and memory are held against what is expected; not in miniature.
    """

    device: torch.device
    folder: Path
    judged: bool = field(default=True)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: Any, small: Any) -> Any:
        return full if self.on_gpu else small

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object]) -> float:
        """On CPUs by the processor's time, which other programs do not lengthen."""
        clock = time.perf_counter if self.on_gpu else time.process_time
        self.wait()
        started = clock()
        action()
        self.wait()
        return clock() - started

    def card(self) -> Hardware | None:
        """What the data sheet says; None for a card that the table does not have."""
        return named_in(torch.cuda.get_device_name()) if self.on_gpu else HARDWARE["cpu"]

    def reserved_bytes(self) -> int:
        """What the process keeps of the device's memory."""
        return torch.cuda.memory_reserved() if self.on_gpu else 0


@dataclass(frozen=True)
class Found:
    """What came of a check. ``verdict``: ``as expected``, ``slower``, ``wrong`` or ``not here``."""

    verdict: str
    seen: str
    means: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


def judge(seen: str, numbers: Mapping[str, Any], *, wrong: str = "", slower: str = "") -> Found:
    """``wrong`` and ``slower``: what it means, where it is so."""
    if wrong:
        return Found("wrong", seen, wrong, numbers)
    return Found("slower", seen, slower, numbers) if slower else Found("as expected", seen, "nothing to do", numbers)


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}<e>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tiny_model(folder: Path, head_width: int = 32) -> Path:
    """A random two-layer Llama over bytes with a chat template, as a Hugging Face folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<e>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<e>", pad_token="<e>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=258, hidden_size=2 * head_width, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, initializer_range=0.1, bos_token_id=256, eos_token_id=257, pad_token_id=257,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def answer(check: Callable[[Place], Found], device: str, folder: Path, name: str) -> None:
    place = Place(torch.device(device), folder / "scratch" / name, judged=device != "cpu")
    shutil.rmtree(place.folder, ignore_errors=True)  # of an attempt before
    place.folder.mkdir(parents=True)
    if place.on_gpu:
        use_expandable_segments()  # as a run does
    try:
        found = check(place)
    except Exception as error:
        traceback.print_exc()
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        found = Found("failed", f"{type(error).__name__}: {first[:300]}", f"it broke: the whole story is in {name}.log")
    made = {"verdict": found.verdict, "seen": found.seen, "means": found.means, "numbers": _plain(found.numbers)}
    part = folder / f".{name}.json"
    part.write_text(json.dumps(made), encoding="utf-8")
    part.replace(folder / f"{name}.json")


def _plain(value: Any) -> Any:
    """As JSON has it; numbers to five figures."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
