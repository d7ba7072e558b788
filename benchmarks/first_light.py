"""First light: what reading the code could not say about a GPU, looked at in one command, each check with a time limit of its own.

    python benchmarks/first_light.py [--bundle FOLDER] [--several]

It runs from a bare checkout, where torch with CUDA and transformers are installed, and needs no network: what else is missing is in the
bundle that ``python -m benchmarks.first_light_bundle`` prepares. Each check is a process, which is ended at its limit, and adds a JSON
line to ``results.jsonl``; those that have a line are not made again. ``--again`` forgets the lines of the checks that are named.
Without CUDA all runs in miniature on the CPU, which shows that the checks work and nothing more.

``--several``: the checks for two GPUs and more instead.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # as a file, too
    sys.path[:] = [str(ROOT), str(ROOT / "src"), *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks")]

__all__ = ["ONE", "SEVERAL", "Check", "Light", "main", "verdicts"]


@dataclass(frozen=True)
class Check:
    """What is looked at: a function of this name in the checks' module."""

    name: str
    limit_s: int
    expected: str


ONE = (
    Check("environment", 60, "bf16 products at 65% of the data sheet's rate and copies at 75% of it, or more"),
    Check("parity", 60, "logprobs and gradients are the CPU's: in fp32 to 1e-3, in bf16 as near to fp32 as the CPU's bf16 (factor 2)"),
    Check("kernels", 60, "every fast path agrees with the plain one; the fastest is taken"),
    Check("shapes", 60, "attention over new shapes takes at most twice as long as over known ones"),
    Check("graphs", 75, "bursts of 1 and of 16 steps give the same tokens in fp32 (an eighth of the completions may differ by rounding)"),
    Check("capture", 45, "after a capture that failed the tokens are the same, and random numbers are still drawn"),
    Check("weights", 60, "three calls with weights changed between: the graph follows them, and reserved memory stays flat (5%)"),
    Check("mismatch", 60, "sampler and learner differ by at most twice what bf16 rounds off in learning, a token in the mean"),
    Check("sampling", 90, "a decode step within 1.5 times the plan; graphs faster than launches; a capture below 60 ms"),
    Check("profile", 60, "as many kernels in a decode step as are counted (30%); the GPU idle for less than half of a pass"),
    Check("learning", 75, "20% of the peak arithmetic or more; peak memory within the plan, and not below half of it"),
    Check("memory", 75, "short memory halves passes and rows; gradient norm and tokens stay the same"),
    Check("resume", 90, "a resumed run has the very weights of one that went through, in every precision"),
    Check("ahead", 60, "sampling ahead in a thread: the same completions as one after the other"),
    Check("quickstart", 180, "the quickstart runs to its end and learns"),
)  # fmt: skip
"""On one GPU, in this order: what later checks rest on comes first."""

SEVERAL = (
    Check("nccl", 60, "sums over all GPUs are right, at 40% of the link's rate or more"),
    Check(
        "replicas",
        90,
        "replicas make the update of one process: weights to 1% of what they moved by, completions of step 1 the same",
    ),
    Check("fsdp2", 90, "divided weights make the update of one process, to the same bound"),
    Check("adapter", 90, "an adapter on a divided base makes the update of one process, merged at the end, to the same bound"),
    Check("zero3", 90, "DeepSpeed's ZeRO-3 makes the update of one process, to the same bound"),
    Check(
        "vllm", 180, "vLLM on the last GPU has the weights by NCCL within 1 s, and samples with them: mismatch below 0.02 nats"
    ),
    Check(
        "colocated",
        180,
        "vLLM on the GPU that learns reads the weights there within 1 s, and gives 15% of the card back meanwhile",
    ),
)
MODULES = {"one": "benchmarks.first_light_one", "several": "benchmarks.first_light_several"}


class Light:
    """Makes checks, and keeps what they came to.

    Args:
        folder: where results, logs and scratch files go.
        device: ``cuda`` or ``cpu``.
        python: the command of the interpreter.
    """

    def __init__(
        self, folder: Path, device: str, module: str, checks: Sequence[Check], *, environment: dict[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:  # fmt: skip
        self.folder, self.device, self.module, self.checks, self.python = folder, device, module, checks, python
        self.environment = {**os.environ, **(environment or {})}
        self.results = folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def lines(self) -> dict[str, dict[str, Any]]:
        """What is known, by check; the last line of each counts, and one that is cut short does not."""
        found = {}
        for line in self.results.read_text(encoding="utf-8").splitlines() if self.results.exists() else ():
            try:
                read = json.loads(line)
                found[read["check"]] = read
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def run(self, minutes: float, only: Sequence[str] = (), again: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Make what has no line yet, within ``minutes``. A check that their end stops gets none: the next call makes it again.
        Returns the lines of all checks that have one."""
        ends, known = time.monotonic() + 60 * minutes, self.lines()
        for check in self.checks:
            if (only and check.name not in only) or (check.name in known and check.name not in again):
                continue
            left = ends - time.monotonic()
            if left < min(check.limit_s, 20):
                print(f"{check.name}: not begun, the time is over; the same command goes on here", flush=True)
                continue
            line = self.make(check, min(check.limit_s, left))
            if line["verdict"] == "no end" and left < check.limit_s:
                print(f"{check.name}: stopped, the time is over; the same command goes on here", flush=True)
                continue
            known[check.name] = line
            with self.results.open("a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps(line)}\n")  # the last line may have been cut short
            print(f"{check.name}: {line['verdict']} ({line['seconds']:.0f} s): {line['seen']}", flush=True)
        return [known[check.name] for check in self.checks if check.name in known]

    def make(self, check: Check, limit_s: float) -> dict[str, Any]:
        """One check in a process group of its own, all of which is ended at the limit."""
        answer, log = self.folder / f"{check.name}.json", self.folder / f"{check.name}.log"
        answer.unlink(missing_ok=True)
        command = [self.python, "-m", self.module, check.name, self.device, str(self.folder)]
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        line = {
            "check": check.name,
            "expected": check.expected,
            "seconds": round(time.monotonic() - started, 1),
            "device": self.device,
        }
        if code is None:
            seen = f"no end after {limit_s:.0f} s; the last it printed: {_tail(log)}"
            return {**line, "verdict": "no end", "seen": seen, "means": "it hangs, or is far slower than planned", "numbers": {}}
        try:
            return {**line, **json.loads(answer.read_text(encoding="utf-8"))}
        except (OSError, ValueError):
            seen = f"the process ended with code {code}; the last it printed: {_tail(log)}"
            return {
                **line,
                "verdict": "failed",
                "seen": seen,
                "means": f"it broke: the whole story is in {log.name}",
                "numbers": {},
            }


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


def verdicts(lines: Sequence[dict[str, Any]]) -> str:
    """What a person reads first: a line for each verdict, and what was seen where it was not the expected."""
    out = []
    for line in lines:
        out.append(f"{line['check']:12} {line['verdict']}")
        if line["verdict"] != "as expected":
            out += [f"    {key}: {line[key]}" for key in ("expected", "seen", "means")]
    return "\n".join(out)


def _with_bundle(bundle: Path, folder: Path) -> dict[str, str]:
    """Unpack the wheels that this Python lacks, and the embedded model's parts, into ``folder``. Returns an environment with both."""
    from benchmarks.first_light_bundle import install, put_model_together

    site = install(bundle, folder / "site")
    cache = put_model_together(bundle, folder / "cache")
    found = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(site), os.environ.get("PYTHONPATH", "")])}
    if cache is not None:
        found |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(cache), "FIRST_LIGHT_MODEL": "embedded"}
    return found


def _has_cuda(environment: dict[str, str]) -> bool:
    """Asked in another process: this one shall hold nothing of the GPU."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    asked = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    return asked.stdout.strip() not in ("", "0")


def main(words: Sequence[str] | None = None) -> int:
    """Returns how many checks did not go as expected."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--output", type=Path, default=ROOT / "build" / "first-light", help="folder of results, logs and scratch files"
    )
    options.add_argument("--device", choices=("cuda", "cpu"), help="by default CUDA where there is one")
    options.add_argument("--bundle", type=Path, help="folder of wheels, and of the embedded model's parts")
    options.add_argument("--minutes", type=float, default=10.0, help="for all checks together; the next command goes on")
    options.add_argument("--only", nargs="+", default=[], metavar="CHECK")
    options.add_argument("--again", nargs="+", default=[], metavar="CHECK", help="make them anew")
    options.add_argument("--several", action="store_true", help="the checks for two GPUs and more")
    args = options.parse_args(words)
    kind, checks = ("several", SEVERAL) if args.several else ("one", ONE)
    if unknown := sorted({*args.only, *args.again} - {check.name for check in checks}):
        options.error(f"{unknown[0]} is no check: there are {', '.join(check.name for check in checks)}")
    args.output = args.output.resolve()
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if args.bundle:
        environment |= _with_bundle(args.bundle.resolve(), args.output)
    elif missing := [
        name for name in ("pydantic", "typer", "gguf", "psutil", "math_verify") if importlib.util.find_spec(name) is None
    ]:
        options.error(f"{', '.join(missing)} are not installed: name the folder that first_light_bundle made with --bundle")
    device = args.device or ("cuda" if _has_cuda(environment) else "cpu")
    if device == "cpu":
        print("In miniature on the CPU: this shows that the checks work, and nothing about a GPU.", flush=True)
    light = Light(args.output, device, MODULES[kind], checks, environment=environment)
    lines = light.run(args.minutes, args.only, args.again)
    print("\n" + verdicts(lines) + f"\n\n{light.results}")
    return sum(line["verdict"] not in ("as expected", "not here") for line in lines)


if __name__ == "__main__":
    sys.exit(min(main(), 125))
