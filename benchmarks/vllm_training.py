"""The quickstart with its completions sampled by a real vLLM, started from an environment of its own.

    python -m benchmarks.vllm_training --vllm-python /path/to/vllm-environment/bin/python

It starts the server, trains, stops the server, and prints accuracy before and after, what the sampler's mismatch was, and what pushing the
weights took. With ``--beside`` the same run is made with the built-in engine, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise import load_config, train
from groupwise.config.schema import Config
from groupwise.engines.vllm.client import Client
from groupwise.engines.vllm.protocol import Unreachable
from groupwise.models.devices import with_dtype
from groupwise.models.embedded import EMBEDDED_NAME, ensure_embedded_model

__all__ = ["main", "report", "start_server"]

_START_S = 600.0


def start_server(
    python: str, model: str, log: Path, *, threads: int, options: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], str]:
    """The server's process and address, once it answers. Raises RuntimeError, with the end of its log, where it does not come up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = str(Path(__file__).resolve().parents[1] / "src")
    cores = "0" if threads == 1 else f"0-{threads - 1}"
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "WARNING"}
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    command = [python, "-m", "groupwise.engines.vllm", model, "--port", str(port), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    client, until = Client(f"http://127.0.0.1:{port}"), time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            client.hello()
            return process, client.where
        except Unreachable:
            time.sleep(1)
    process.kill()
    process.wait()
    raise RuntimeError(f"the server did not come up:\n{log.read_text()[-2000:]}")


def report(folder: Path) -> dict[str, Any]:
    """What a run came to, out of its folder: accuracies by stage, and means over its steps."""
    summary = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [row.get("metrics", row) for row in steps]
    means = {
        name: statistics.fmean(row[name] for row in numbers if name in row)
        for name in sorted(set().union(*numbers))
        if name.startswith(("policy/sampler", "policy/correction", "policy/push", "time/", "speed/", "completions/prompt"))
        and any(name in row for row in numbers)
    }
    return {"summary": summary, "means": means}


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    config = load_config("quickstart", [f"training.steps={args.steps}", f"training.threads={args.threads}", *args.settings])
    model = str(ensure_embedded_model(print)) if config.model.name == EMBEDDED_NAME else config.model.name
    options = ["--dtype", with_dtype(config.model).dtype, "--max-model-tokens", "1024", "--cache-gib", "1"]
    options += ["--eager"] if args.eager else []
    started = time.perf_counter()
    process, url = start_server(args.vllm_python, model, args.out / "server.log", threads=args.threads, options=options)
    print(f"the server was up after {time.perf_counter() - started:.0f} s")
    try:
        _run("vllm", config.model_copy(update={"rollout": _sampled_by_vllm(config, url)}), args.out)
    finally:
        process.terminate()
        process.wait(timeout=60)
    if args.beside:
        _run("builtin", config, args.out)


def _sampled_by_vllm(config: Config, url: str) -> Any:
    return config.rollout.model_copy(update={"engine": "vllm", "vllm": config.rollout.vllm.model_copy(update={"url": url})})


def _run(name: str, config: Config, out: Path) -> None:
    config = Config.model_validate(config.model_dump(exclude_unset=True))  # so that what follows the engine does
    result = train(config, recipe=name, run_folder=out / name)
    found = report(result.folder)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1))
    print(f"{name}:", json.dumps(found["means"], indent=1))


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.vllm_training", description=(__doc__ or "").replace("``", "`"))
    out.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the quickstart to change")
    out.add_argument("--vllm-python", required=True, metavar="PATH", help="interpreter of an environment with vLLM")
    out.add_argument("--steps", type=int, default=60)
    out.add_argument("--threads", type=int, default=2, help="for each side; they take turns")
    out.add_argument("--eager", action="store_true", help="vLLM without compilation")
    out.add_argument("--beside", action="store_true", help="the same run with the built-in engine, afterwards")
    out.add_argument("--out", type=Path, default=Path("runs/vllm-training"))
    return out


if __name__ == "__main__":
    main()
