"""A step's rollouts by a vLLM server, against the built-in engine; and the time of a push.

    python -m benchmarks.vllm_rollouts --vllm-python /path/to/vllm-environment/bin/python

The quickstart's model and prompts, groups of 8, every completion as long as the limit. The engines take turns, through the very calls that
a run makes: what is sent, checked and decoded is in the time. Each has all threads, and the other one is idle: a rest
follows each push, whose probe is a call of vLLM.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common import Result, finish, median, parser, print_table, quotient
from benchmarks.vllm_training import start_server
from benchmarks.workers import REST_S
from groupwise import load_config
from groupwise.engines import Engine, SamplingSettings, make_engine
from groupwise.engines.vllm.pushing import dtype_name
from groupwise.models.load import load_policy
from groupwise.training.setup import prepare
from groupwise.types import Prompt

__all__ = ["main", "measure", "run"]

_GROUP = 8


def options() -> argparse.ArgumentParser:
    out = parser("vllm_rollouts", __doc__)
    out.add_argument("--vllm-python", required=True, metavar="PATH", help="interpreter of an environment with vLLM")
    out.add_argument("--prompts", type=int, default=4, help="groups of 8 that are sampled at once")
    out.add_argument("--max-tokens", type=int, default=128, help="tokens of each completion")
    out.add_argument("--repeats", type=int, default=5, help="calls of each side, after one to warm up")
    out.add_argument("--vllm-eager", action="store_true", help="vLLM without compilation")
    out.add_argument(
        "--wait", action="store_true", help="read a line from standard input before timing, for a machine to be quiet"
    )
    return out


def run(args: argparse.Namespace) -> Result:
    """Start the server, measure, print the table, and return the result (not yet finished)."""
    torch.set_num_threads(args.threads)
    config = load_config("quickstart")
    prepared = prepare(config)
    policy = replace(load_policy(config.model), end_token_ids=())  # nothing ends a completion but the limit
    prompts = [prepared.train_prompts[i] for i in range(args.prompts)]
    options = ["--dtype", dtype_name(policy.model), "--max-model-tokens", "1024", "--cache-gib", "1"]
    options += ["--eager"] if args.vllm_eager else []
    model = str(policy.model.config._name_or_path)
    with tempfile.TemporaryDirectory() as folder:
        process, url = start_server(args.vllm_python, model, Path(folder) / "log", threads=args.threads, options=options)
        try:
            vllm = make_engine(
                policy,
                config.rollout.model_copy(update={"engine": "vllm", "vllm": config.rollout.vllm.model_copy(update={"url": url})}),
            )
            engines = {"built-in": make_engine(policy, config.rollout), "vLLM": vllm}
            server = vllm.link.hello()["backend"]  # type: ignore[attr-defined]
            found = measure(engines, prompts, args.max_tokens, args.repeats, wait=args.wait)
            vllm.close()  # type: ignore[attr-defined]
        finally:
            process.terminate()
            process.wait(timeout=60)
    rows = [[name, median(found[name]), *_ends(found[name])] for name in ("built-in", "vLLM")]
    print_table("Rollouts, tokens/s", ["", "median", "min", "max"], rows)
    print_table("A push, s", ["", "median", "min", "max"], [["push and probe", median(found["push"]), *_ends(found["push"])]])
    settings = {key: str(value) if key == "output" else value for key, value in vars(args).items() if key != "vllm_python"}
    details = {**found, "weights_mib": sum(p.nbytes for p in policy.model.parameters()) / 2**20}
    ours, theirs = median(found["built-in"]), median(found["vLLM"])
    return Result("vllm_rollouts", quotient(ours, theirs), ours, theirs, "tokens/s", settings, details, {"server": server})


def measure(
    engines: dict[str, Engine], prompts: Sequence[Prompt], max_tokens: int, repeats: int, *, wait: bool = False
) -> dict[str, list[float]]:
    """Tokens/s of each call of each engine by turns, and seconds of each ``push`` of the last one's weights between the turns."""
    found: dict[str, list[float]] = {name: [] for name in (*engines, "push")}
    for repeat in range(-1, repeats):
        if repeat == 0 and wait:
            input("ready: ")
        for name, engine in engines.items():
            started = time.perf_counter()
            groups = engine.sample(prompts, _GROUP, SamplingSettings(max_tokens), seed=repeat + 1, scope="benchmark")
            taken = time.perf_counter() - started
            tokens = sum(len(c.token_ids) for group in groups for c in group)
            assert tokens == len(prompts) * _GROUP * max_tokens, f"{name} sampled other lengths than it was told"
            if repeat >= 0:
                found[name].append(tokens / taken)
        started = time.perf_counter()
        engine.refresh(repeat + 2)
        if repeat >= 0:
            found["push"].append(time.perf_counter() - started)
        time.sleep(REST_S)
    return found


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def main() -> None:
    args = options().parse_args()
    finish(lambda: run(args), args.output)


if __name__ == "__main__":
    main()
