"""One of the processes of ``experiments.sweep``: ``python -m experiments.sweep_worker SETTINGS.json``, started by its launcher.

It learns from the batch in ``batch.json`` once for every token budget, from the smallest to the largest, and writes ``RANK.json``: seconds
of an update, peak memory while it was made, passes, and how far gradient and loss are from those of the first setting.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.workload import even_tokens, prompts
from groupwise.config.schema import Config
from groupwise.distributed import open_world
from groupwise.engines import SamplingSettings, make_engine
from groupwise.memory import keep_freed_memory, peak_memory_bytes, release_freed_memory, reset_peak_memory
from groupwise.models.load import Policy, load_policy
from groupwise.models.module_scorer import ModuleScorer
from groupwise.models.scorer import Scorer, make_scorer
from groupwise.training.learner import Learner
from groupwise.training.optimizer import MasterAdamW
from groupwise.types import Completion, Group

__all__ = ["carry_out"]


def carry_out(settings: Mapping[str, Any]) -> None:
    folder = Path(settings["folder"])
    keep_freed_memory()
    config = Config.model_validate(
        {
            "model": {"name": settings["model"], "dtype": settings["dtype"], "device": "cpu"},
            "rollout": {"max_completion_tokens": settings["max_tokens"]},
            "algorithm": {"kl": None},
            "optimizer": {"learning_rate": 1e-12},  # so small that no weight becomes another number
        }
    )
    with open_world(True, 600.0) as world:
        policy = load_policy(config.model)
        scorer = make_scorer(policy, config.model) if settings["packed"] else ModuleScorer(policy.model)
        groups = _batch(folder / "batch.json", policy, config, scorer, settings)
        learner = Learner(scorer, config, world=world)
        points = [_point(learner, groups, budget, folder, settings) for budget in settings["budgets"]]
        (folder / f"{world.rank}.json").write_text(json.dumps(points), encoding="utf-8")


def _batch(path: Path, policy: Policy, config: Config, scorer: Scorer, settings: Mapping[str, Any]) -> list[Group]:
    """The batch that all settings learn from: the first process that asks samples it."""
    asked = prompts(policy.tokenizer, settings["groups"])
    if not path.exists():
        limits = SamplingSettings(max_tokens=settings["max_tokens"])
        engine = make_engine(policy, config.rollout, scorer)
        sampled = engine.sample(asked, settings["completions"], limits, seed=0, scope="sweep")
        path.write_text(json.dumps([[asdict(c) for c in completions] for completions in sampled]), encoding="utf-8")
    rows = json.loads(path.read_text(encoding="utf-8"))
    groups = []
    for prompt, row in zip(asked, rows, strict=True):
        completions = tuple(
            Completion(**{**one, "token_ids": tuple(one["token_ids"]), "logprobs": tuple(one["logprobs"])}) for one in row
        )
        groups.append(Group(prompt, completions, tuple(even_tokens([c.token_ids for c in completions]))))
    return groups


def _point(learner: Learner, groups: list[Group], budget: int, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One token budget: an update whose gradient is compared, then those that are timed."""
    learner.budget.tokens = budget
    found: dict[str, Any] = {"budget": budget, "passes": 0}
    optimizer: Any = learner.optimizer
    step = optimizer.step

    def compared(rate: float) -> Any:
        found["gradient_difference"] = _compare(_by_module_name(learner), folder / "reference.safetensors")
        return step(rate)

    optimizer.step = compared
    try:
        _, metrics = learner.learn(groups)
    finally:
        optimizer.step = step
    found |= {"loss": metrics["policy/loss"].value, "passes": len(learner.window(groups).micro_batches)}
    if not settings["repeats"]:
        return found
    release_freed_memory()
    reset_peak_memory()
    seconds = []
    for _ in range(settings["repeats"]):
        started = time.perf_counter()
        learner.learn(groups)
        seconds.append(time.perf_counter() - started)
    return found | {"seconds": statistics.median(seconds), "all_seconds": seconds, "peak_bytes": peak_memory_bytes()}


def _by_module_name(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """The gradient by the module's own parameter names: under packing several of them are views of one."""
    assert isinstance(learner.optimizer, MasterAdamW)
    gradients = dict(zip(learner.optimizer.names, learner.optimizer.gradients(), strict=True))
    owners = {p.untyped_storage().data_ptr(): name for name, p in learner.scorer.named_parameters()}
    for name, parameter in learner.scorer.module.named_parameters():
        gradient = gradients[owners[parameter.untyped_storage().data_ptr()]]
        if gradient is not None:
            first = parameter.storage_offset() // math.prod(parameter.shape[1:])
            yield name, gradient[first : first + len(parameter)].float()


def _compare(gradient: Iterator[tuple[str, Tensor]], reference: Path) -> float:
    """Norm of the difference from the reference, relative to the reference's norm; the first to ask becomes the reference."""
    if not reference.exists():
        save_file({name: tensor.contiguous().clone() for name, tensor in gradient}, reference)
        return 0.0
    difference = norm = 0.0
    with safe_open(reference, framework="pt") as kept:
        for name, tensor in gradient:
            wanted = kept.get_tensor(name)
            difference += float((tensor - wanted).double().square().sum())
            norm += float(wanted.double().square().sum())
    return math.sqrt(difference / norm)


def leave() -> None:
    """Threads of a process group that is not taken down can abort the interpreter at its end."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(given["threads"])
    carry_out(given)
    leave()
