"""Several steps of the real small model, however the passes are cut, packed and divided: one curve.

    python -m experiments.curve             # measure; writes docs/figures/curve.json and curve.svg, and the block of RESULTS.md
    python -m experiments.curve --redraw

SmolLM2-135M-Instruct in fp32 trains on arithmetic, paid by the share of lower-case letters: one whole run a setting, from sampling to the
update. Beside the curves every completion and the final weights are held against the first setting's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common import ROOT, Experiment, describe, main
from groupwise.distributed.launch import launch

__all__ = ["EXPERIMENT", "SETTINGS", "carry_out", "draw", "measure", "report"]

SETTINGS: dict[str, dict[str, Any]] = {
    "1 process, packed, 8,192 tokens a pass": {"processes": 1, "budget": 8192, "packed": True},
    "1 process, packed, 128 tokens a pass": {"processes": 1, "budget": 128, "packed": True},
    "1 process, padded rows, 512 tokens a pass": {"processes": 1, "budget": 512, "packed": False},
    "2 processes, packed, 256 tokens a pass": {"processes": 2, "budget": 256, "packed": True},
}
RUN = (
    "model.dtype=float32", "model.device=cpu", "warm_start.steps=0", "training.threads=1", "training.steps=8", "rollout.prompts_per_step=2",
    "rollout.completions_per_prompt=4", "rollout.max_completion_tokens=12", "optimizer.learning_rate=3e-6",
    "algorithm.updates_per_batch=2",  # on-policy the loss of a first update is 0 to rounding: nothing to draw
    "rewards.functions=[{function: letters}]", "evaluation.problems=1", "evaluation.modes=[greedy]", "evaluation.at_start=false",
    "evaluation.show=0", "evaluation.max_completion_tokens=1", "output.log_completions=100", "output.keep_best=false",
)  # fmt: skip
CURVES = {"reward/mean": "reward", "policy/loss": "loss", "optimizer/grad_norm": "gradient norm"}
WORK = ROOT / "runs" / "curve"


def measure(settings: Sequence[str] = (), work: Path = WORK) -> dict[str, Any]:
    """Every setting in processes of its own, one after the other; what is done is kept in ``work`` until all are there.

    ``settings`` win over those of the runs.
    """
    found = {name: line(name, settings, work) for name in SETTINGS}
    shutil.rmtree(work)
    return {"lines": found, "settings": [*RUN, *settings]}


def line(name: str, settings: Sequence[str] = (), work: Path = WORK) -> dict[str, Any]:
    """One setting's curves, completions, and how far its final weights are from the first setting's."""
    folder = work.resolve() / hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    kept, given = folder / "line.json", {**SETTINGS[name], "settings": [*RUN, *settings], "folder": str(folder)}
    if kept.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        if before["given"] == given:
            return before["line"]  # type: ignore[no-any-return]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _run(given)
    run, first = folder / "run", work.resolve() / "first.safetensors"
    metrics = [json.loads(row) for row in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [json.loads(row) for row in (run / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
    weights = run / "final_model" / "model.safetensors"
    if name == next(iter(SETTINGS)):
        weights.replace(first)
        weights = first
    found = {
        "curves": {key: [row[key] for row in metrics] for key in CURVES},
        "completions": [_digest([row[k] for k in ("step", "problem", "sample", "completion", "tokens")]) for row in rows],
        "weights": _largest_difference(weights, first),
    }
    shutil.rmtree(run)
    kept.write_text(json.dumps({"given": given, "line": found}), encoding="utf-8")
    print(f"{name}: done", flush=True)
    return found


def _run(given: Mapping[str, Any]) -> None:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    surroundings = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    surroundings |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "experiments.curve", "--carry-out", json.dumps(dict(given))]
    if code := launch(command, given["processes"], surroundings):
        raise SystemExit(code)


def carry_out(given: Mapping[str, Any]) -> None:
    """What one of a setting's processes does."""
    from rich.console import Console

    from groupwise import load_config, train
    from groupwise.models.module_scorer import ModuleScorer
    from groupwise.training import start

    settings = [*given["settings"], f"training.micro_batch_tokens={given['budget']}"]
    if not given["packed"]:  # as with architectures that the lean decoder does not cover: padded rows of the model's own module
        start.make_scorer = lambda policy, config, device=None: ModuleScorer(policy.model)  # type: ignore[assignment]
        settings.append("rollout.engine=transformers")
    config = load_config("quickstart", settings)
    train(config, rewards={"letters": letters}, run_folder=Path(given["folder"]) / "run", console=Console(quiet=True))


def letters(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The share of lower-case letters: it varies from the first step on, without a warm start."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(x.islower() for x in text) / max(1, len(text)) for text in texts]


def _digest(values: Sequence[Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=4).hexdigest()


def _largest_difference(one: Path, other: Path) -> float:
    from safetensors import safe_open

    with safe_open(one, framework="pt") as mine, safe_open(other, framework="pt") as others:
        return max(float((mine.get_tensor(n) - others.get_tensor(n)).abs().max()) for n in mine.keys())  # noqa: SIM118  # no dict


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    """The curves over each other, the first one widest."""
    from experiments.style import COLOURS, figure

    with figure(path, list(CURVES.values()), height=3.0) as axes:
        for place, ((name, found), colour) in enumerate(zip(numbers["lines"].items(), COLOURS, strict=False)):
            width, style = (7.0, 4.0, 2.0, 1.4)[place], ("-", "-", "-", ":")[place]
            for axis, key in zip(axes, CURVES, strict=True):
                curve = found["curves"][key]
                axis.plot(range(1, len(curve) + 1), curve, style, linewidth=width, color=colour, label=name)
        for axis in axes:
            axis.set_xlabel("step")
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)


def differences(numbers: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Of each setting but the first, the largest difference from it in each curve."""
    (_, first), *others = numbers["lines"].items()
    return {
        name: {key: max(abs(a - b) for a, b in zip(found["curves"][key], first["curves"][key], strict=True)) for key in CURVES}
        for name, found in others
    }


def report(numbers: Mapping[str, Any]) -> str:
    """Figure, and the largest differences from the first setting."""
    lines, found = numbers["lines"], differences(numbers)
    first = next(iter(lines.values()))
    same = [
        sum(a == b for a, b in zip(lines[name]["completions"], first["completions"], strict=True)) / len(first["completions"])
        for name in found
    ]
    largest = ", ".join(f"{title} {max(found[name][key] for name in found):.1e}" for key, title in CURVES.items())
    spans = "; ".join(
        f"{title} {min(first['curves'][key]):.2g} to {max(first['curves'][key]):.2g}" for key, title in CURVES.items()
    )
    given = dict(word.split("=", 1) for word in numbers["settings"])
    return "\n\n".join(
        [
            "![Reward, loss and gradient norm of eight steps at four settings, over each other](../docs/figures/curve.svg)",
            f"Settings: {'; '.join(lines)}. {min(same):.0%} of the completions are those of the first. Largest differences over all steps: "
            f"{largest}, final weights {max(lines[name]['weights'] for name in found):.1e}. Its own numbers: {spans}.",
            f"{given['training.steps']} steps of {given['rollout.prompts_per_step']} prompts x "
            f"{given['rollout.completions_per_prompt']} completions of up to {given['rollout.max_completion_tokens']} tokens in "
            f"{given['model.dtype']}, {given['algorithm.updates_per_batch']} updates of each batch, "
            f"learning rate {given['optimizer.learning_rate']}, reward the share of lower-case letters. {describe(numbers)}",
        ]
    )


EXPERIMENT = Experiment("curve", measure, draw, report)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--carry-out"]:
        carry_out(json.loads(sys.argv[2]))
    else:
        main(EXPERIMENT)
