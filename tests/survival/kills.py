"""Kill miniature runs with SIGKILL at random moments, carry each on, and hold its end against that of a run which was left alone.

    python -m tests.survival.kills                            # 10 kills of every kind: minutes
    python -m tests.survival.kills --kinds lora ppo --kills 30 --seed 7
    python -m tests.survival.kills --write                    # and put the table into benchmarks/TRIALS.md

The same means: weights, masters and moments bit for bit, every number of ``metrics.jsonl`` but times and memory, every line of
``completions.jsonl``, and the evaluations. Runs are forked from a process that has everything imported, so that a kill costs a
second. Every third stop is a SIGTERM instead, which the run may answer; it is counted by itself. Of a run of two processes the
SIGKILL meets one of them, whichever, or both. Kinds with episodes are killed in the middle of one: the environment ends its own process
at some turn, drawn by lot.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from groupwise.config.schema import Config
from tests.survival.forked import begin
from tests.survival.game import LAST
from tests.survival.page import stamp, write_section
from tests.tiny import forking, tiny_config, write_sums, write_tiny_llama

__all__ = ["KINDS", "Tally", "differences", "kill_and_compare", "main"]

STEPS = 8
MU = {"updates_per_batch": 3, "loss": {"epsilon": 0.01}}
PLAYED = {"environment": "tests.survival.game:Talk", "max_turns": 4, "max_completion_tokens": 140}
FORKS = {**PLAYED, "rewritten_history": "fork", "max_completion_tokens": 400}
EARNED = {"functions": [{"function": "environment"}, {"function": "letters"}]}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "no checkpoint but when stopped": {"algorithm": MU, "output": {"checkpoint_every": 0}},
    "bf16 weights, fp32 masters": {"model": {"dtype": "bfloat16"}},
    "mu 3": {"algorithm": MU},
    "mu 3, micro-batches": {"algorithm": MU, "training": {"micro_batch_tokens": 60}},
    "renewed reference": {"algorithm": {"kl": {"beta": 0.1, "reference_updates": 3}}},
    "moving-average reference": {
        "algorithm": {"kl": {"beta": 0.1, "reference_every": 2, "reference_mixing": 0.3}},
        "output": {"checkpoint_every": 3},
    },
    "adaptive KL, mu 2": {"algorithm": {"kl": {"beta": 0.1, "target": 0.01}, "updates_per_batch": 2}},
    "lora": {"model": {"lora": {"rank": 2, "alpha": 4}}, "algorithm": {"kl": {"beta": 0.1}, **MU}},
    "lora with dropout": {"model": {"lora": {"rank": 2, "alpha": 4, "dropout": 0.1}}},
    "ppo, mu 3": {"algorithm": {"preset": "ppo", "kl": {"beta": 0.05}, **MU}},
    "dynamic sampling": {"rollout": {"refill_rounds": 2, "completions_per_prompt": 2, "max_completion_tokens": 2}},
    "a step ahead": {"rollout": {"ahead": 1}},
    "two steps ahead, mu 2, running statistics": {
        "rollout": {"ahead": 2},
        "algorithm": {"updates_per_batch": 2},
        "rewards": {"normalise": "mean_std"},
    },
    "a step ahead, dynamic sampling": {
        "rollout": {"ahead": 1, "refill_rounds": 2, "completions_per_prompt": 2, "max_completion_tokens": 2}
    },
    "a step ahead, lora": {"rollout": {"ahead": 1}, "model": {"lora": {"rank": 2, "alpha": 4}}},
    "epoch boundaries": {"data": {"limit": 11, "holdout": 4}, "optimizer": {"schedule": "cosine", "warmup_steps": 3}},
    "rewards normalised by running statistics": {"rewards": {"normalise": "mean_std"}},
    "rollouts ahead": {"rollout": {"ahead": 1}},
    "rollouts ahead, mu 3": {"rollout": {"ahead": 2}, "algorithm": MU},
    "two processes": {},
    "two processes, weights divided (fsdp2)": {"training": {"sharding": "fsdp2"}},
    "two processes, mu 3, micro-batches": {"algorithm": {"kl": {"beta": 0.1}, **MU}, "training": {"micro_batch_tokens": 60}},
    "two processes, lora with dropout": {
        "model": {"lora": {"rank": 2, "alpha": 4, "dropout": 0.1}},
        "algorithm": {"kl": {"beta": 0.1}},
    },
    "two processes, renewed reference, epochs": {
        "data": {"limit": 11, "holdout": 4},
        "algorithm": {"kl": {"beta": 0.1, "reference_updates": 3}},
    },
    "episodes": {"rollout": PLAYED, "rewards": EARNED},
    "episodes, a step ahead, mu 3": {"rollout": {**PLAYED, "ahead": 1}, "rewards": EARNED, "algorithm": MU},
    "episodes, dynamic sampling": {"rollout": {**PLAYED, "refill_rounds": 2, "completions_per_prompt": 2}, "rewards": EARNED},
    "episodes that fork": {"rollout": FORKS, "rewards": EARNED},
    "episodes that fork, a step ahead, mu 3": {"rollout": {**FORKS, "ahead": 1}, "rewards": EARNED, "algorithm": MU},
    "two processes, episodes": {"rollout": PLAYED, "rewards": EARNED},
    "warm start, evaluations": {
        "warm_start": {"steps": 3, "examples_per_step": 4},
        "algorithm": {"kl": {"beta": 0.1}},
        "evaluation": {"at_start": True, "every": 3},
        "output": {"checkpoint_every": 3},
    },
}
"""What of a run's state each kind has in it; all else is that of ``tests.tiny``."""


TALKATIVE = {"tie_word_embeddings": False, "stop_weight": 60.0, "max_position_embeddings": 512}
"""A model that ends its turns."""


@dataclass
class Tally:
    """What came of one kind of run."""

    kind: str
    killed: int = 0
    terminated: int = 0
    completed: int = 0
    losses: list[str] = field(default_factory=list)


def config_of(kind: str, model: Path, data: Path) -> Config:
    sections = {name: dict(values) for name, values in KINDS[kind].items()}
    sections["training"] = {"steps": STEPS, **sections.get("training", {})}
    sections["output"] = {"checkpoint_every": 1, **sections.get("output", {})}
    return tiny_config(model, data, **sections)


def processes_of(kind: str) -> int:
    return 2 if kind.startswith("two processes") else 1


def differences(one: Path, other: Path) -> list[str]:
    """What differs between the ends of two runs, a sentence each; nothing where no bit does."""
    out = []
    saved = sorted((one / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name[5:]))
    states = [path.relative_to(one) for folder in saved[-1:] for path in sorted(folder.glob("*.safetensors"))]
    for name in (Path("final_model/model.safetensors"), *states):
        if not (other / name).exists():
            out.append(f"{name} is missing")
            continue
        first, second = load_file(one / name), load_file(other / name)
        same = first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
        out += [] if same else [f"{name} differs"]
    if numbers_of(one) != numbers_of(other):
        out.append("metrics.jsonl differs")
    files = sorted(path.relative_to(one).as_posix() for path in [one / "completions.jsonl", *(one / "evaluations").iterdir()])
    out += [f"{name} differs" for name in files if content(one / name) != content(other / name)]
    return out


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "speed", "memory"))} for row in rows]


def kill_and_compare(kind: str, kills: int, seed: int, place: Path) -> Tally:
    """Kill runs of one kind ``kills`` times, resume them until they come through, and compare each."""
    model = write_tiny_llama(place / "model", **(TALKATIVE if "episodes" in kind else {}))
    if "fork" in kind:
        forking(model)
    data = write_sums(place / "sums.jsonl")
    config, tally, chance = config_of(kind, model, data), Tally(kind), random.Random(f"{kind}/{seed}")
    whole = place / "whole"
    started = time.monotonic()
    LAST["turn"] = None
    going = begin(config, whole, processes_of(kind))
    code = going.end(60)
    longest = time.monotonic() - started
    if code != 0 or going.hung:
        tally.losses.append(f"the run that was left alone ended with {code}: {told(whole)}")
        return tally
    if "fork" in kind and '"rewritten": true' not in (whole / "completions.jsonl").read_text(encoding="utf-8"):
        tally.losses.append("no episode of the run that was left alone has forked")
    while tally.killed < kills and not tally.losses:
        folder = place / f"killed-{tally.completed + len(tally.losses)}"
        carry_through(config, folder, tally, chance, longest, kills)
        found = [] if tally.losses else differences(whole, folder)
        tally.losses += [f"{folder.name}: {difference}" for difference in found]
        if tally.losses:
            break
        tally.completed += 1
    return tally


def carry_through(config: Config, folder: Path, tally: Tally, chance: random.Random, longest_s: float, kills: int) -> None:
    """One run from its beginning to its end, with stops on the way until its kind has had ``kills``; some so soon that the folder
    is not made yet."""
    for attempt in range(200):
        stops = attempt < 12 and tally.killed < kills
        number = signal.SIGTERM if (tally.killed + tally.terminated) % 3 == 2 else signal.SIGKILL
        delay_s = chance.uniform(0, longest_s) if stops else 10 * longest_s
        LAST["turn"] = None
        if "episodes" in tally.kind and number is signal.SIGKILL and stops:
            LAST["turn"], delay_s = chance.randint(1, turns_of(folder.parent / "whole")), 10 * longest_s
        going = begin(config, folder, processes_of(tally.kind))
        code = going.stop_after(delay_s, number, chance)
        if going.hung:
            tally.losses.append(f"{folder.name} neither ended nor answered {number.name}: {told(folder)}")
            return
        if code == 0:
            return
        if code == -signal.SIGKILL:
            tally.killed += 1
        elif code in (128 + signal.SIGTERM, -signal.SIGTERM):
            tally.terminated += 1
        else:
            tally.losses.append(f"{folder.name} ended with {code}: {told(folder)}")
            return
    tally.losses.append(f"{folder.name} never came to its end")


def turns_of(whole: Path) -> int:
    """Turns of the policy that a run recorded: nearly all that it played."""
    rows = [json.loads(line) for line in (whole / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
    return sum(turn["role"] == "assistant" for row in rows for turn in row["turns"])


def told(folder: Path) -> str:
    said = [path.read_text(errors="replace").strip().splitlines() for path in sorted(folder.parent.glob(f"{folder.name}.*.log"))]
    return " / ".join(lines[-1] for lines in said if lines) or "nothing was said"


def table(tallies: Sequence[Tally]) -> str:
    """One sentence of sums and one of kinds; a kind that lost something stands out."""
    sums = [sum(column) for column in zip(*((t.killed, t.terminated, t.completed, len(t.losses)) for t in tallies), strict=True)]
    kinds = [
        f"{t.kind} ({t.killed}, {t.terminated}, {t.completed})" + (f" **{len(t.losses)} losses**" if t.losses else "")
        for t in tallies
    ]
    return (
        f"Together: {sums[0]} SIGKILL, {sums[1]} SIGTERM, {sums[2]} runs that came to their end, {sums[3]} losses.\n"
        f"By kind (SIGKILL, SIGTERM, ends): {'; '.join(kinds)}."
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survival.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/TRIALS.md")
    chosen = parser.parse_args(words)
    torch.set_num_threads(1)
    tallies = []
    for kind in chosen.kinds:
        with tempfile.TemporaryDirectory() as place:
            tallies.append(kill_and_compare(kind, chosen.kills, chosen.seed, Path(place)))
        print(tallies[-1], flush=True)
    print(table(tallies))
    if chosen.write:
        command = f"python -m tests.survival.kills --kills {chosen.kills} --seed {chosen.seed}"
        write_section("kills", f"{stamp(command)}\n\n{table(tallies)}")
    return 1 if any(tally.losses for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
