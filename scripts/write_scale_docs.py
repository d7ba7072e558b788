"""Writes the tables of docs/explanation/scale.md from the planner: `python scripts/write_scale_docs.py`; a test says when that is due."""

from __future__ import annotations

from pathlib import Path

from groupwise.config import build_config
from groupwise.planner import HARDWARE, KNOWN_SHAPES, Setup, peak_phase, phases
from groupwise.planner.scale import Work, scaled

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "scale.md"
SIZES = ("7B", "32B", "72B")
GPUS = (8, 64, 512)
CARD = HARDWARE["h100"]
GIB = 2**30


def render(page: str) -> str:
    """The page with its tables written again, each between its marks."""
    for name, table in (("steps", _steps), ("one-machine", _one_machine)):
        before, _, rest = page.partition(f"<!-- {name} -->")
        _, _, after = rest.partition(f"<!-- /{name} -->")
        page = f"{before}<!-- {name} -->\n\n{table()}\n\n<!-- /{name} -->{after}"
    return page


def _steps() -> str:
    rows = [
        "| model | GPUs | state, GiB a GPU | t | sampling, all | sampling, longest | learning | traffic | a step, in turn | ahead | "
        "what it waits for |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        for gpus in GPUS:
            found = scaled(KNOWN_SHAPES[f"Qwen/Qwen2.5-{size}"], gpus, CARD, Work())
            held = f"{found.state_bytes / GIB:.3g}"
            if found.copy_gpus is None:
                rows.append(f"| {size} | {gpus} | {held} | - | | | {_s(found.learning_s)} | {_s(found.traffic_s)} | | | memory |")
                continue
            times = (found.sampling_s, found.longest_s, found.learning_s, found.traffic_s, found.step_s, found.ahead_s)
            rows.append(f"| {size} | {gpus} | {held} | {found.copy_gpus} | {' | '.join(map(_s, times))} | {found.bottleneck} |")
    return "\n".join(rows)


def _s(seconds: float) -> str:
    return f"{seconds:.0f}"


WAYS = {
    "everything on each": {},
    "`optimizer.precision: stochastic`": {"optimizer": {"precision": "stochastic"}},
    "`optimizer.offload: true`": {"optimizer": {"offload": True}, "training": {"offload_reference": True}},
    "`training.sharding: fsdp2`": {"training": {"sharding": "fsdp2"}},
    "`model.lora`": {"model": {"lora": {"rank": 32}}},
    "and `model.quantization: 4bit`": {"model": {"lora": {"rank": 32}, "quantization": "4bit"}},
}


def _one_machine() -> str:
    rows = [f"| | {' | '.join(SIZES)} |", f"|---|{'---|' * len(SIZES)}"]
    for name, settings in WAYS.items():
        peaks = [peak_phase(phases(_setup(size, settings))).bytes for size in SIZES]
        rows.append(f"| {name} | {' | '.join(f'{peak / GIB:.0f}{_fits(peak)}' for peak in peaks)} |")
    return "\n".join(rows)


def _fits(peak: int) -> str:
    return " fits" if peak <= CARD.memory_bytes else ""


def _setup(size: str, settings: dict[str, dict[str, object]]) -> Setup:
    work = Work()
    base: dict[str, dict[str, object]] = {
        "model": {"gradient_checkpointing": True},
        "rollout": {
            "prompts_per_step": 64,
            "completions_per_prompt": 8,
            "max_completion_tokens": 1024,
            "max_concurrent_sequences": 64,
        },
        "algorithm": {"kl": {"beta": 0.001}},
        "training": {"micro_batch_tokens": 8192},
        "data": {"holdout": 0},
    }
    merged = {name: {**base.get(name, {}), **settings.get(name, {})} for name in {**base, **settings}}
    return Setup(build_config(merged), KNOWN_SHAPES[f"Qwen/Qwen2.5-{size}"], "cuda", 8, work.prompt_tokens)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
