"""math-verify behind a worker process: right on real cases, and never late, on any thread."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from groupwise.data import latex
from groupwise.data.latex import latex_equivalent, latex_failures

LONG_S = 120.0
"""More than any answer takes, however busy the machine is."""


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        (r"\frac{2}{4}", "0.5", True),
        ("x=5", "5", True),
        (r"\sqrt{25}", "5", True),
        ("6-5i", "-5i+6", True),
        (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\text{Evelyn}", "Evelyn", True),
        (r"$\frac12$", r"\dfrac{1}{2}", True),
        ("p - q", "q - p", False),
        ("1,2", "12", False),
        (r"\frac{1}{3}", "0.5", False),
        ("", "5", False),
        ("}{", "5", False),
        ("\x00", "5", False),
        ("a line\nbreak", "5", False),
    ],
)
def test_equivalence(answer: str, reference: str, equal: bool) -> None:
    assert latex_equivalent(answer, reference, timeout_s=LONG_S) is equal


def test_it_works_on_other_threads() -> None:
    verdicts: dict[int, bool] = {}

    def ask(number: int) -> None:
        verdicts[number] = latex_equivalent(rf"\sqrt{{{number**2}}} + 1", str(number + 1 + number % 2), timeout_s=LONG_S)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {n: n % 2 == 0 for n in range(2, 8)}


def test_an_endless_expression_is_cut_off_and_counted_and_the_next_is_answered() -> None:
    assert latex_equivalent(r"\sqrt{9}+0", "3", timeout_s=LONG_S)  # the worker is up
    before = latex_failures().get("timeout", 0)
    assert not latex_equivalent("9^{9^{9^{9}}}", "9^{9^{9^{8}}}", timeout_s=0.5)
    assert latex_failures()["timeout"] == before + 1
    assert not latex_equivalent("9^{9^{9^{9}}}", "9^{9^{9^{8}}}", timeout_s=0.5), "remembered"
    assert latex_failures()["timeout"] == before + 1
    assert latex_equivalent(r"\sqrt{16}+0", "4", timeout_s=LONG_S)


def test_a_worker_that_dies_is_counted_and_replaced() -> None:
    assert latex_equivalent(r"\sqrt{36}+0", "6", timeout_s=LONG_S)
    before = latex_failures().get("crash", 0)
    worker = latex._CHECKER._worker
    assert worker is not None
    worker.process.kill()
    worker.process.wait()
    assert not latex_equivalent(r"\sqrt{49}+0", "7", timeout_s=LONG_S)
    assert latex_failures()["crash"] == before + 1
    assert latex_equivalent(r"\sqrt{64}+0", "8", timeout_s=LONG_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_run_does_not_reach_the_worker(number: signal.Signals) -> None:
    """A terminal, and Slurm, signal all processes of a run: it finishes its step, and a right answer stays right."""
    assert latex_equivalent(r"\sqrt{81}+0", "9", timeout_s=LONG_S)
    before = latex_failures().get("crash", 0)
    worker = latex._CHECKER._worker
    assert worker is not None
    worker.process.send_signal(number)
    assert latex_equivalent(rf"\sqrt{{100}}+{int(number)}", f"{10 + number}", timeout_s=LONG_S)
    assert latex_failures().get("crash", 0) == before


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="needs POSIX alarms")
def test_a_worker_whose_parent_is_gone_ends_itself() -> None:
    script = Path(latex.__file__).with_name("latex_worker.py")
    question = json.dumps(["9^{9^{9^{9}}}", "9^{9^{9^{8}}}", -4.5, False])  # the worker allows five seconds more than it is told
    done = subprocess.run([sys.executable, "-P", str(script)], input=question + "\n", capture_output=True, text=True, timeout=280)
    assert done.returncode == -signal.SIGALRM


def test_prose_never_starts_the_worker_and_nothing_is_left_behind() -> None:
    code = (
        "from groupwise.data import latex; import os\n"
        "assert not latex.latex_equivalent('the answer is seventy', '70'); assert latex._CHECKER._worker is None\n"
        "assert latex.latex_equivalent(r'\\sqrt{4}', '2', timeout_s=120); print(latex._CHECKER._worker.process.pid)\n"
        "assert 'torch' not in __import__('sys').modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
