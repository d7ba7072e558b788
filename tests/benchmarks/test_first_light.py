"""First light in miniature: every check finds nothing wrong here, and finds what is broken on purpose; and what drives and feeds them."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.tags import sys_tags

from benchmarks import first_light, first_light_bundle, first_light_one, first_light_place, first_light_several
from benchmarks.first_light import ONE, SEVERAL, Check, Light, verdicts
from benchmarks.first_light_one import builtin
from benchmarks.first_light_place import Found, Place
from groupwise.engines.builtin import fast_paths
from groupwise.models import attention, layer, ops
from groupwise.planner.hardware import HARDWARE
from groupwise.training.optimizer import MasterAdamW
from tests.warm import python

CPU = torch.device("cpu")
QUICK = (
    "environment",
    "parity",
    "shapes",
    "graphs",
    "capture",
    "weights",
    "mismatch",
    "sampling",
    "profile",
    "learning",
    "memory",
)


@pytest.fixture
def check(tmp_path, monkeypatch):
    """``check("graphs")``: what it finds in miniature; ``judged``: speeds and memory too."""
    monkeypatch.delenv("FIRST_LIGHT_MODEL", raising=False)
    monkeypatch.setattr(first_light_one.sys, "executable", python())  # how long they import is not measured
    deterministic = torch.are_deterministic_algorithms_enabled()
    module = {
        **dict.fromkeys((c.name for c in ONE), first_light_one),
        **dict.fromkeys((c.name for c in SEVERAL), first_light_several),
    }

    def run(name, judged=False, **options) -> Found:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return getattr(module[name], name)(Place(CPU, folder, judged), **options)

    yield run
    torch.use_deterministic_algorithms(deterministic)


def test_every_check_is_a_function_and_each_has_its_limit():
    assert all(callable(getattr(first_light_one, check.name)) for check in ONE)
    assert all(callable(getattr(first_light_several, check.name)) for check in SEVERAL)
    assert sum(min(check.limit_s, 60) for check in ONE) < 1000, "most end long before their limits"


def test_the_page_says_what_is_looked_at():
    page = (first_light.ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert all(f"| `{check.name}` | {check.expected} |" in page for check in (*ONE, *SEVERAL))


@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_wrong_here(check, name):
    found = check(name)
    assert found.verdict == "as expected", found
    json.dumps(first_light_place._plain(found.numbers))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resume", "ahead", "quickstart", "nccl", "replicas", "fsdp2", "adapter"])
def test_nor_in_what_takes_whole_runs(check, name):
    found = check(name)
    assert found.verdict == "as expected", found


def no_card(self):
    return replace(HARDWARE["cpu"], flops_per_s=1e30)


def louder(*arguments):
    out, rotated = attention.attend_by_library(*arguments)
    return out * 1.05, rotated


@functools.cache
def _seen():
    return set()


def planned_anew(qkv, *rest):
    """As a library that makes a plan for each new shape."""
    if qkv.shape not in _seen():
        _seen().add(qkv.shape)
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
    return _attend(qkv, *rest)


_attend = attention.attend_by_library


BROKEN = {
    "environment": [(Place, "card", no_card)],
    "parity": [(layer, "attend_by_library", louder)],
    "shapes": [(attention, "attend_by_library", planned_anew)],
    "graphs": [(first_light_one, "_KEPT", ())],
    "capture": [(first_light_one._Stand, "__init__", lambda self, runner, step: setattr(self, "replay", lambda: None))],
    "weights": [],
    "mismatch": [],
    "sampling": [],
    "profile": [(first_light_one, "DECODE_OPERATIONS", (1, 1))],
    "learning": [],
    "memory": [],
    "resume": [(MasterAdamW, "load_state", lambda self, state: None)],
    "ahead": [],
    "quickstart": [(first_light_one, "write_tiny_model", lambda folder: folder.mkdir() or folder)],
}
JUDGED = ("environment", "sampling", "profile", "learning")


@pytest.mark.parametrize(
    "name", [pytest.param(c.name, marks=[pytest.mark.slow] * (c.name not in QUICK)) for c in ONE if c.name != "kernels"]
)
def test_each_finds_what_is_broken(check, name, monkeypatch):
    for place, attribute, value in BROKEN[name]:
        monkeypatch.setattr(place, attribute, value)
    if name == "mismatch":
        drawn = builtin.Draw.__call__
        monkeypatch.setattr(builtin.Draw, "__call__", lambda *a: (found := drawn(*a)) and (found[0], found[1] + 0.05))
    if name == "weights":
        kept, sample = [], builtin.BuiltinEngine.sample
        monkeypatch.setattr(
            builtin.BuiltinEngine, "sample", lambda *a, **k: kept[0] if kept else kept.append(sample(*a, **k)) or kept[0]
        )
    if name == "memory":
        seeds, groups = itertools.count(), first_light_one._groups
        monkeypatch.setattr(first_light_one, "_groups", lambda *sizes: groups(*sizes[:-1], next(seeds)))
    if name == "ahead":
        run, names = first_light_one._run, itertools.count(5)
        monkeypatch.setattr(
            first_light_one, "_run", lambda place, name, **k: run(place, name, **{**k, "training": {**k["training"], "seed": next(names)}})
        )  # fmt: skip
    found = check(name, judged=name in JUDGED)
    assert found.verdict in ("slower", "wrong"), found
    assert found.means != "nothing to do"


@pytest.fixture
def unswitched(tmp_path, monkeypatch):
    """Nothing is kept of what is found of fast paths, and all are allowed again afterwards."""
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fast_paths, "_known", {})
    paths = fast_paths.fast_paths()
    yield paths
    for path in paths:
        path.switch(True)


def test_fast_paths_are_looked_at_and_one_that_disagrees_is_found(check, monkeypatch, unswitched):
    """Slower they may be on tiny tensors."""
    patient = [replace(path, slack=1e6) for path in unswitched]
    monkeypatch.setattr(fast_paths, "fast_paths", lambda: patient)
    assert check("kernels").verdict == "as expected"
    norm = ops.normalise

    def louder_norms(yes):
        monkeypatch.setattr(ops, "normalise", (lambda *given: (1.1 * norm(*given)[0], norm(*given)[1])) if yes else norm)

    patient.append(fast_paths.FastPath("louder norms", lambda decoder: True, louder_norms, ("a decode step",), 1e6))
    found = check("kernels")
    assert found.verdict == "wrong"
    assert "louder norms: a decode step: " in found.seen


@pytest.mark.slow
def test_the_last_update_is_made_again_and_counted_by_itself(check, monkeypatch):
    flops = [5e12, 4e12, 3e12, 2e12, 1e12]
    left, groups, seeds = iter(flops), first_light_one._groups, []
    monkeypatch.setattr(first_light_one, "learning_flops", lambda shape, sizes: next(left))
    monkeypatch.setattr(first_light_one, "_groups", lambda *sizes: seeds.append(sizes[-1]) or groups(*sizes))
    numbers = check("learning").numbers
    assert seeds == [0, 1, 2, 3, 3]
    first, *rates, again = (f / seconds / 1e12 for f, seconds in zip(flops, numbers["seconds"], strict=True))
    assert (numbers["first_tflops"], numbers["tflops"], numbers["again_tflops"]) == pytest.approx(
        (first, sorted(rates)[1], again)
    )


def test_names_are_listed_by_the_time_that_all_their_events_take():
    spans = [("cudaLaunchKernel", 0, 300), ("cuLibraryLoadData", 100, 5100), ("cudaLaunchKernel", 400, 900)]
    events = [SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end)) for name, start, end in spans]
    assert list(first_light_one._longest(events).items()) == [("cuLibraryLoadData", 5.0), ("cudaLaunchKernel", 0.8)]
    assert len(first_light_one._longest([SimpleNamespace(name=str(i), time_range=events[0].time_range) for i in range(20)])) == 12


def test_processes_that_train_otherwise_are_found(check, monkeypatch):
    weights, calls = first_light_several._weights, itertools.count()
    monkeypatch.setattr(
        first_light_several, "_weights", lambda folder: {k: w + 1e-3 * (next(calls) > 40) for k, w in weights(folder).items()}
    )
    assert check("replicas").verdict == "wrong"


def test_processes_that_do_not_start_are_found(check, monkeypatch):
    monkeypatch.setattr(first_light_several.sys, "executable", "/bin/false")
    assert check("nccl").verdict == "wrong"


@pytest.mark.slow
@pytest.mark.parametrize(("gap", "verdict"), [("0", "as expected"), ("0.1", "wrong")])
def test_a_sampling_server_that_scores_otherwise_is_found(check, monkeypatch, gap, verdict):
    monkeypatch.setenv("GAP", gap)
    assert check("vllm", server=[python(), "-m", "tests.benchmarks.serve_a_model"]).verdict == verdict


@pytest.mark.slow
def test_a_server_beside_the_run_is_waited_for_and_its_start_that_fails_is_told(check, monkeypatch):
    monkeypatch.setenv("GAP", "0")
    assert check("colocated", server=[python(), "-m", "tests.benchmarks.serve_a_model"]).verdict == "as expected"
    with pytest.raises(RuntimeError, match="the server ended with code 1"):
        check("colocated", server=["/bin/false"])


def test_what_a_server_on_the_same_gpu_must_do_is_judged(monkeypatch, tmp_path):
    place = SimpleNamespace(on_gpu=True, device=torch.device("cuda"), folder=tmp_path)
    good = {"gaps": [0.01, 0.01], "pushes": [4.0, 0.3], "seconds": 9.0, "shared": True, "direct": True, "swing": 0.2}
    for change, verdict, means in (
        ({}, "as expected", "nothing to do"),
        ({"gaps": [0.01, 0.03]}, "wrong", "vLLM samples by other weights or another distribution"),
        ({"direct": False}, "slower", "CUDA IPC does not work here"),
        ({"shared": False}, "slower", "the two sides see another GPU"),
        ({"swing": 0.1}, "slower", "vLLM keeps its memory while the policy learns"),
        ({"pushes": [0.3, 2.0]}, "slower", "a push takes longer than 1 s"),
    ):
        done = first_light_several._Sampled(**{**good, **change})
        monkeypatch.setattr(first_light_several, "_by_server", lambda *_, done=done: done)
        found = first_light_several.colocated(place, server=["any"])
        assert (found.verdict, found.means) == (verdict, means)


def test_what_a_server_on_another_gpu_must_do_is_judged(monkeypatch, tmp_path):
    place = SimpleNamespace(on_gpu=True, device=torch.device("cuda"), folder=tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    good = {"gaps": [0.01, 0.01], "pushes": [4.0, 0.3], "seconds": 9.0, "shared": False, "direct": True, "swing": 0.0}
    for change, verdict, means in (
        ({}, "as expected", "nothing to do"),
        ({"gaps": [0.01, 0.03]}, "wrong", "vLLM samples by other weights or another distribution"),
        ({"direct": False}, "slower", "NCCL does not reach the server's GPU: the run's log says why"),
        ({"pushes": [0.3, 2.0]}, "slower", "a push takes longer than 1 s"),
    ):
        done = first_light_several._Sampled(**{**good, **change})
        monkeypatch.setattr(first_light_several, "_by_server", lambda *_, done=done: done)
        found = first_light_several.vllm(place, server=["any"])
        assert (found.verdict, found.means) == (verdict, means)


# The driver.

CHECKS = (Check("good", 60, "x"), Check("bad", 60, "x"), Check("dead", 60, "x"), Check("stuck", 4, "x"), Check("last", 60, "x"))


@pytest.fixture
def light(tmp_path):
    environment = {"PYTHONPATH": f"{first_light.ROOT / 'src'}:{first_light.ROOT}"}
    return Light(tmp_path / "out", "cpu", "tests.benchmarks.stand_in_checks", CHECKS, environment=environment, python=python())


def test_each_check_ends_in_a_line_whatever_becomes_of_it(light, tmp_path, capsys):
    lines = {line["check"]: line for line in light.run(5.0)}
    found = {name: line["verdict"] for name, line in lines.items()}
    assert found == {"good": "as expected", "bad": "failed", "dead": "failed", "stuck": "no end", "last": "as expected"}
    assert "ValueError: no such number" in lines["bad"]["seen"]
    assert "code 3" in lines["dead"]["seen"]
    assert "on my way" in lines["stuck"]["seen"]
    assert lines["stuck"]["seconds"] < 60
    assert all(line.keys() >= {"expected", "seen", "means", "numbers", "seconds"} for line in lines.values())
    told = verdicts(list(lines.values()))
    assert "expected: x" in told
    assert told.count("seen:") == 3, "of those that went as expected one line is enough"


def test_what_was_made_is_not_made_again(light):
    light.run(5.0, only=["good", "bad"])
    with light.results.open("a") as file:
        file.write('{"check": "last", "verd')  # as a machine leaves it that is taken away
    before = light.results.read_text()
    assert [line["check"] for line in light.run(5.0, only=["good", "bad"])] == ["good", "bad"]
    assert light.results.read_text() == before
    light.run(5.0, only=["good"], again=["good"])
    assert light.results.read_text().count('"check": "good"') == 2
    assert "last" not in light.lines()


def test_none_is_begun_when_the_time_is_over(light, capsys):
    assert light.run(0.0) == []
    assert "not begun" in capsys.readouterr().out
    assert not light.results.exists()


def test_one_that_the_end_of_the_time_stops_is_made_again_by_the_next_call(light, monkeypatch, capsys):
    limits = []
    monkeypatch.setattr(light, "checks", [Check("stuck", 60, "x")])
    line = {"check": "stuck", "verdict": "no end", "seconds": 0.0, "seen": "nothing"}
    monkeypatch.setattr(light, "make", lambda check, limit_s: limits.append(limit_s) or line)
    assert light.run(0.5) == []
    assert "stuck: stopped, the time is over" in capsys.readouterr().out
    assert not light.results.exists()
    assert [one["verdict"] for one in light.run(5.0)] == ["no end"], "it had its own limit"
    assert limits[0] < 31
    assert limits[1:] == [60]


def test_an_unknown_check_is_named(capsys):
    with pytest.raises(SystemExit):
        first_light.main(["--only", "grahps"])
    assert "grahps is no check: there are environment" in capsys.readouterr().err


# The bundle.


def test_parts_that_come_one_after_the_other_make_the_model(tmp_path):
    whole, bundle, kept = tmp_path / "m-1-py3-none-any.whl", tmp_path / "bundle", tmp_path / "kept"
    whole.write_bytes(bytes(range(256)) * 9 + b"end")
    bundle.mkdir()
    one, two = first_light_bundle.split_model(whole, bundle)
    second = two.read_bytes()
    two.unlink()
    assert first_light_bundle.put_model_together(bundle, kept) is None
    one.unlink()
    two.write_bytes(second)
    assert first_light_bundle.put_model_together(bundle, kept) == kept
    assert (kept / whole.name).read_bytes() == whole.read_bytes()


def test_a_damaged_part_is_refused(tmp_path):
    whole = tmp_path / "m-1-py3-none-any.whl"
    whole.write_bytes(b"abcdef")
    first_light_bundle.split_model(whole, tmp_path)[0].write_bytes(b"xyz")
    with pytest.raises(ValueError, match="are not what was cut"):
        first_light_bundle.put_model_together(tmp_path, tmp_path / "kept")


def test_every_package_has_its_version_and_those_that_are_here_are_not_installed(tmp_path, monkeypatch):
    """pip is given the wheels' files, each only once."""
    assert len(first_light_bundle._pinned(first_light_bundle.PACKAGES)) == len(first_light_bundle.PACKAGES)
    asked, (typer,) = [], first_light_bundle._pinned(["typer"])
    monkeypatch.setattr(first_light_bundle, "_is_there", lambda package: package != "typer")
    monkeypatch.setattr(first_light_bundle.subprocess, "run", lambda command, check: asked.append(command))
    wheel = tmp_path / f"{typer.replace('==', '-')}-py3-none-any.whl"
    wheel.touch()
    (tmp_path / "site").mkdir()
    first_light_bundle.install(tmp_path, tmp_path / "site")
    first_light_bundle.install(tmp_path, tmp_path / "site")
    (command,) = asked
    assert [word for word in command if word.endswith(".whl")] == [str(wheel)]
    assert "--no-index" in command


def test_of_several_wheels_the_one_for_this_python_is_taken(tmp_path):
    this = f"cp{sys.version_info.major}{sys.version_info.minor}"
    own = f"Some_Thing-1.0-{this}-{this}-{next(iter(sys_tags())).platform}.whl"
    for name in (
        own,
        "Some_Thing-1.0-py3-none-any.whl",
        "Some_Thing-1.0-cp27-cp27m-win32.whl",
        "Some_Thing-2.0-py3-none-any.whl",
    ):
        (tmp_path / name).touch()
    (tmp_path / "elsewhere-1.0-cp27-cp27m-win32.whl").touch()
    assert first_light_bundle.wheels_of(tmp_path, ["some.thing==1.0"]) == [tmp_path / own]
    with pytest.raises(SystemExit, match="has no wheel of elsewhere for this Python"):
        first_light_bundle.wheels_of(tmp_path, ["some-thing==1.0", "elsewhere==1.0"])


def test_it_starts_as_a_file_from_another_folder(tmp_path):
    import subprocess

    done = subprocess.run(
        [sys.executable, str(Path(first_light.__file__)), "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "--bundle" in done.stdout
