"""A long run, made up: as many steps and completions as wanted, with texts that compress about as well as a small model's.

python -m tests.report.long_run FOLDER --steps 2000 --completions 100000
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from groupwise.config import load_config
from groupwise.models.embedded import ensure_embedded_model
from groupwise.tracking import JsonlTracker, RunFolder
from groupwise.tracking.files import json_line

G = 10
END = 2
"""``<|im_end|>`` of the embedded model."""
NAMES = ("Ann", "Bob", "Carla", "Dmitri", "Elif", "Farid", "Grace", "Hiro", "Ines", "Jonas")
THINGS = ("apples", "books", "coins", "stickers", "marbles", "tickets", "shells", "pencils")
VERBS = ("buys", "finds", "gives away", "loses", "sells", "gets", "breaks", "borrows")
FILLERS = ("so", "then", "that means", "we know that", "let me think:", "now", "in total", "therefore", "which gives", "wait,")


def long_run(folder: Path, steps: int, completions: int, *, seed: int = 0) -> Path:
    """Write a run of ``steps`` steps with about ``completions`` recorded completions, the first group of each step with the tokens of
    the embedded model."""
    tokenizer = Tokenizer.from_file(str(ensure_embedded_model() / "tokenizer.json"))
    groups = max(1, round(completions / steps / G))
    config = load_config("quickstart", [f"training.steps={steps}", "rollout.completions_per_prompt=10"])
    run_folder = RunFolder.create(config, folder, "long", command=["groupwise", "train", "long"])
    tracker, draw = JsonlTracker(run_folder), random.Random(seed)
    with run_folder.completions.open("wb") as file:
        for step in range(1, steps + 1):
            progress = step / steps
            tracker.step(step, numbers(step, progress, draw))
            for number in range(groups):
                file.writelines(map(json_line, group(step, number, progress, draw, tokenizer)))
    for stage, share in (("base", 0.1), ("step-1000", 0.5), ("final", 0.8)):
        run_folder.write_records(stage, "sampled", [held_out(i, share, draw) for i in range(1000)])
    tracker.close()
    run_folder.write_summary({"seconds": 9.0 * steps})
    return folder


def numbers(step: int, progress: float, draw: random.Random) -> dict[str, float]:
    noise = draw.gauss(0, 0.05)
    names = ("time/score_s", "time/optimizer_s", "policy/full_entropy", "policy/sampler_mismatch", "value/loss", "value/error")
    return {
        "reward/mean": 0.5 + 1.5 * progress + noise, "reward/std": 1 - 0.5 * progress + noise, "reward/correctness": 2 * progress + noise,
        "reward/format": 0.8 + noise, "accuracy/strict": 0.1 + 0.7 * progress + noise, "accuracy/format": 0.9 + noise,
        "groups/zero_variance": 0.3 + noise, "completions/tokens_mean": 80 + 40 * progress + 20 * noise, "completions/tokens_max": 200.0,
        "completions/truncated": 0.02, "completions/stop_rate": 0.98, "policy/entropy": 0.6 - 0.4 * progress + noise,
        "optimizer/grad_norm": abs(1 + noise), "optimizer/learning_rate": 1e-6, "time/step_s": 9 + noise, "time/sample_s": 4 + noise,
        "time/learn_s": 5 + noise, "speed/sampled_tokens_per_s": 3000 + 300 * noise, "memory/peak_gib": 20.0,
        "progress/epoch": progress, "progress/policy_version": float(step), "policy/ratio_deviation": 0.0, "policy/loss": noise / 1e6,
        **{name: abs(noise) / 10 for name in names},
    }  # fmt: skip


def group(step: int, number: int, progress: float, draw: random.Random, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One problem and G completions. A problem comes again every 400 steps."""
    problem = f"long:train:{step % 400}-{number}"
    a, b = draw.randrange(2, 90), draw.randrange(2, 90)
    question = f"{draw.choice(NAMES)} has {a} {draw.choice(THINGS)} and {draw.choice(VERBS)} {b}. How many are there now?"
    prompt = (
        f"<|im_start|>system\nReason, then answer.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    made = [completion(a, b, draw.random() < 0.1 + 0.8 * progress, draw) for _ in range(G)]
    rewards = [2.0 * right + 0.2 * draw.randrange(5) for _, right in made]
    mean = sum(rewards) / G
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (G - 1)) + 1e-4
    rows = []
    for sample, ((text, right), reward) in enumerate(zip(made, rewards, strict=True)):
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, END] if number == 0 else []
        tokens = len(ids) or len(text) // 4
        row = {
            "step": step, "problem": problem, "sample": sample, "prompt": prompt, "completion": text, "expected": str(a + b),
            "reward": reward, "components": {"correctness": 2.0 * right, "format": reward - 2.0 * right},
            "advantage": (reward - mean) / spread, "strict": right, "lenient": right,
            "finish_reason": "length" if draw.random() < 0.03 else "stop", "tokens": tokens, "policy_version": step - 1,
        }  # fmt: skip
        if number == 0:
            row |= {"token_ids": ids, "logprobs": [-round(min(12, draw.expovariate(1) ** 4 / 4), 3) for _ in ids]}
        rows.append(row)
    return rows


def completion(a: int, b: int, right: bool, draw: random.Random) -> tuple[str, bool]:
    lines = []
    for _ in range(draw.randrange(2, 8)):
        c, d = draw.randrange(2, 200), draw.randrange(2, 90)
        lines.append(
            f"{draw.choice(FILLERS)} {draw.choice(NAMES)} {draw.choice(VERBS)} {c} {draw.choice(THINGS)}, {c} + {d} = {c + d}."
        )
    answer = a + b if right else a + b + draw.randrange(1, 30)
    return "<reasoning>\n" + "\n".join(lines) + f"\n</reasoning>\n<answer>\n{answer}\n</answer>", right


def held_out(i: int, share: float, draw: random.Random) -> dict[str, Any]:
    a, b, right = i % 90 + 2, i % 77 + 2, draw.random() < share
    text, _ = completion(a, b, right, draw)
    return {
        "problem": f"long:held_out:{i}", "question": f"What are {a} and {b} {draw.choice(THINGS)}?", "prompt": f"{a} and {b}?",
        "expected": str(a + b), "response": text, "extracted": str(a + b if right else 0), "strict": right, "lenient": right,
        "format": True, "finish_reason": "stop", "tokens": len(text.split()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--completions", type=int, default=100_000)
    chosen = parser.parse_args()
    print(long_run(chosen.folder, chosen.steps, chosen.completions))


if __name__ == "__main__":
    main()
