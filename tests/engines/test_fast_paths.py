"""Fast paths against plain ones: what disagrees, fails or is slow is left out, what is kept, and where it is told."""

from __future__ import annotations

import errno
import json
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3TextConfig, GPT2Config, Qwen2Config
from typer.testing import CliRunner

from groupwise.cli import app
from groupwise.engines.builtin import decode, fast_paths, runner
from groupwise.engines.builtin.fast_paths import FastPath, check_fast_paths, choose
from groupwise.models import attention, layer, ops, varlen_attention
from groupwise.models.native import build, calls
from groupwise.tracking import RunFolder, Trackers
from groupwise.training import start
from tests.conftest import TINY
from tests.models.slow_flash import flash_on_cpus

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPE = Qwen2Config(**{**TINY, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True})
needs_kernels = pytest.mark.skipif(build.kernels().library is None, reason=f"no kernels: {build.kernels().description}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fast_paths, "_known", {})
    yield tmp_path / "cache" / "fast-paths"
    for path in fast_paths.fast_paths():
        path.switch(True)


@pytest.fixture
def decoder():
    return fast_paths._small(SHAPE, torch.float32, CPU)


def a_path(switch, **changes):
    return FastPath("a path", lambda d: True, switch, **{"operations": ("passes", "a decode step"), **changes})


@pytest.fixture
def norms(monkeypatch):
    """``norms(changed)``: a switch of a fast path whose norms are ``changed(norm, ...)``."""
    plain = ops.normalise
    monkeypatch.setattr(calls, "_allowed", False)  # their decode steps do not go by ``normalise``

    def make(changed):
        return lambda yes: monkeypatch.setattr(ops, "normalise", (lambda *a, **k: changed(plain(*a, **k))) if yes else plain)

    return make


def test_a_vocabulary_of_a_few_letters_leaves_nothing_out():
    tiny = Qwen2Config(**{**SHAPE.to_dict(), "vocab_size": 15})
    assert not [c.notice for c in check_fast_paths(tiny, torch.float32, CPU) if "failed" in (c.notice or "")]


def test_one_that_agrees_is_taken(decoder, norms):
    choice, lasting = choose(a_path(norms(lambda found: found), slack=100.0), decoder)
    assert choice.taken
    assert lasting
    assert choice.notice is None
    assert [m.operation for m in choice.operations] == ["passes", "a decode step"]
    assert all(m.difference == 0 and m.fast_ms > 0 and m.plain_ms > 0 for m in choice.operations)


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_one_that_disagrees_is_left_out_with_a_notice(decoder, norms, factor):
    choice, lasting = choose(a_path(norms(lambda found: (found[0] * factor, found[1])), slack=100.0), decoder)
    assert not choice.taken
    assert not choice.agrees
    assert lasting
    assert "apart, and 0.0001 is allowed" in choice.notice


def test_one_in_whose_gradients_alone_something_is_wrong_is_left_out(decoder, monkeypatch):
    right = ops.normalise_backward

    def wrong(*arguments, **named):
        back, weight = right(*arguments, **named)
        return back, weight * 1.01

    path = a_path(lambda yes: monkeypatch.setattr(layer, "normalise_backward", wrong if yes else right), slack=100.0)
    assert not choose(path, decoder)[0].agrees


def test_one_that_fails_is_left_out_and_the_plain_way_is_set(decoder, monkeypatch):
    states = []

    def switch(yes):
        states.append(yes)
        monkeypatch.setattr(fast_paths.decoding, "decode", _raising if yes else _decode)

    choice, lasting = choose(a_path(switch), decoder)
    assert not choice.taken
    assert lasting
    assert choice.why == "it failed (RuntimeError: no kernel image is available)"
    assert states[-1] is False


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_where_memory_or_the_disk_was_short_it_is_tried_another_time(decoder, monkeypatch, error):
    def short(*arguments):
        raise error

    path = a_path(lambda yes: monkeypatch.setattr(fast_paths.decoding, "decode", short if yes else _decode))
    choice, lasting = choose(path, decoder)
    assert not choice.taken
    assert not lasting


_decode = decode.decode


def _raising(*arguments):
    raise RuntimeError("no kernel image is available\nfor execution on the device")


@pytest.mark.parametrize(("late", "tried"), [(1, 2), (2, 3), (3, 3)])
def test_one_that_was_slow_for_a_moment_is_taken(decoder, monkeypatch, late, tried):
    """As where another program had a core: only what is slower each of three times is left out."""
    rounds = []

    def measure(path, operation, decoder):
        rounds.append(operation)
        return fast_paths.Measured(operation, 9.0 if len(rounds) <= late else 1.0, 5.0, 0.0)

    monkeypatch.setattr(fast_paths, "_measure", measure)
    choice, _ = choose(a_path(lambda yes: None, operations=("passes",)), decoder)
    assert (choice.taken, len(rounds)) == (late < 3, tried)
    assert choice.taken or choice.why == "it takes 9.00 ms, and the plain way 5.00"


def test_one_that_disagreed_once_is_not_tried_again(decoder, monkeypatch):
    found = iter([fast_paths.Measured("passes", 9.0, 5.0, 0.5), fast_paths.Measured("passes", 1.0, 5.0, 0.0)])
    monkeypatch.setattr(fast_paths, "_measure", lambda *_: next(found))
    assert not choose(a_path(lambda yes: None, operations=("passes",)), decoder)[0].agrees


def test_one_that_is_slower_beyond_doubt_is_left_out(decoder, norms):
    def late(found):
        until = time.process_time() + 0.002  # of the processor, as it is timed
        while time.process_time() < until:
            pass
        return found

    choice, _ = choose(a_path(norms(late)), decoder)
    assert not choice.taken
    assert choice.agrees
    assert "the plain way" in choice.why


@needs_kernels
def test_the_native_kernels_are_checked_through_every_operation_and_taken(own_cache, monkeypatch):
    """Slower they may be on tiny tensors; that they agree is what is asked here."""
    monkeypatch.setattr(FastPath.__init__, "__defaults__", (1e6, True))
    found = {choice.path: choice for choice in check_fast_paths(SHAPE, BF16, CPU)}
    assert found["native kernels"].taken
    assert [m.operation for m in found["native kernels"].operations] == ["passes", "a decode step", "a merged weight"]
    *layers, merged = found["native kernels"].operations
    assert all(0 < m.difference < 0.02 for m in layers), "the two ways round differently, so it is no self-comparison"
    assert merged.difference < 1e-3, "adding an adapter may come out bit for bit alike"
    assert calls.fits(torch.zeros(1, 64, dtype=BF16))


@needs_kernels
@pytest.mark.parametrize("kernel", ["gated", "merge"])
def test_a_kernel_that_computes_something_else_is_left_out_and_the_next_process_knows(own_cache, monkeypatch, kernel):
    right = {name: getattr(calls, name) for name in ("gated", "merge")}
    wrong = {
        "gated": lambda x, activation="silu": right["gated"](x, activation) * 1.1,
        "merge": lambda frozen, a, b, scaling, out: right["merge"](frozen, a, b, 2 * scaling, out),
    }
    monkeypatch.setattr(calls, kernel, wrong[kernel])
    (choice,) = [c for c in check_fast_paths(SHAPE, BF16, CPU) if c.path == "native kernels"]
    assert not choice.taken
    assert not calls.fits(torch.zeros(1, 64, dtype=BF16))
    calls.allow(True)
    fast_paths._known.clear()
    monkeypatch.setattr(fast_paths, "_check", lambda *a: pytest.fail("it was checked again"))
    assert [c for c in check_fast_paths(SHAPE, BF16, CPU) if c.path == "native kernels"] == [choice]
    assert not calls.fits(torch.zeros(1, 64, dtype=BF16))


@pytest.mark.skipif(not calls.multiplies(torch.empty(0, dtype=BF16)), reason="this processor has no matrix units")
@pytest.mark.parametrize("right", [True, False])
def test_matrix_units_are_checked_by_themselves(own_cache, monkeypatch, right):
    monkeypatch.setattr(FastPath.__init__, "__defaults__", (1e6, True))
    multiply, calls_of = calls.multiply, []

    def counted(*arguments):
        calls_of.append(1)
        return multiply(*arguments) if right else multiply(*arguments) * 1.1

    monkeypatch.setattr(calls, "multiply", counted)
    found = {choice.path: choice for choice in check_fast_paths(SHAPE, BF16, CPU)}
    assert calls_of
    assert found["matrix units"].agrees == right
    assert found["native kernels"].taken
    if not right:
        assert not calls.multiplies(torch.empty(0, dtype=BF16))


def test_where_there_is_nothing_to_choose_nothing_is_kept(own_cache, monkeypatch):
    assert check_fast_paths(SHAPE, torch.float16, CPU) == []
    assert not own_cache.exists()
    for again in ("_check", "_kept"):
        monkeypatch.setattr(fast_paths, again, lambda *a: pytest.fail("it was looked at again"))
    assert check_fast_paths(SHAPE, torch.float16, CPU) == []


@pytest.mark.parametrize("shape", [GPT2Config(n_layer=1), Gemma3Config()], ids=["another", "wrapped"])
def test_a_model_that_no_decoder_computes_has_nothing_to_choose(own_cache, shape):
    """Its module goes the same way in every process: the one that looked, those that are told, and the resumed run's."""

    def switches():
        return ops._by_library, ops._by_kernels, attention._by_flash, calls._allowed, calls._products_allowed

    for path in fast_paths.fast_paths():
        path.switch(True)
    looked = check_fast_paths(shape, torch.float32, CPU)
    assert looked == []
    here = switches()
    assert here == (False, False, False, True, True)
    told = fast_paths.facts(shape, torch.float32, CPU, looked)
    for again in (lambda: fast_paths.take(shape, torch.float32, CPU, looked),
                  lambda: check_fast_paths(shape, torch.float32, CPU, earlier=told)):  # fmt: skip
        fast_paths._known.clear()
        for path in fast_paths.fast_paths():
            path.switch(not path.unchecked)
        again()
        assert switches() == here


def test_each_kind_of_layer_is_compared():
    """The first five layers of six have a window in Gemma 3, so the two that were compared were of one kind."""
    gemma = Gemma3TextConfig(**{**TINY, "num_hidden_layers": 12, "head_dim": 16, "sliding_window": 8})
    decoder = fast_paths._small(gemma, torch.float32, CPU)
    assert (decoder.windows, decoder.kinds) == ([None, 8], [1, 0])
    windowed = Qwen2Config(**{**SHAPE.to_dict(), "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8,
                              "max_window_layers": 2, "layer_types": None})  # fmt: skip
    assert fast_paths._small(windowed, torch.float32, CPU).windows == [None, 8]
    assert len(fast_paths._small(SHAPE, torch.float32, CPU).layers) == 2, "of one kind there are as many"


@pytest.mark.parametrize("heads", [1, 2, 6, 8])
def test_long_rows_are_in_groups_with_few_queries_and_with_many(heads, monkeypatch):
    """The kernel for more than 16 queries a key head, and that for fewer, are two: models met one of them unchecked."""
    decoder = fast_paths._small(
        Qwen2Config(**{**SHAPE.to_dict(), "num_attention_heads": heads, "num_key_value_heads": 1}), torch.float32, CPU
    )
    once, queries = fast_paths._Logits._once, set()

    def noting(runner, step):
        queries.add(int(step.group_of_row.bincount().max()) * heads)
        once(runner, step)

    monkeypatch.setattr(fast_paths._Logits, "_once", noting)
    logits = fast_paths._OPERATIONS["a step of long rows"](decoder)()
    assert {found > 16 for found in queries} == {False, True}
    assert [len(found) for found in logits] == [8, 17, 1]
    assert all(found.isfinite().all() for found in logits)


def test_a_gpu_is_the_current_device_while_it_is_checked(monkeypatch):
    """Kernels were launched on the first GPU, and failed on numbers of another: what fits was left out, for good."""
    current, seen = [], []

    @contextmanager
    def device(which):
        current.append(which)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(fast_paths, "_key", lambda *_: "a key")
    monkeypatch.setattr(fast_paths, "_check", lambda *_: seen.append([*current]) or [])
    second = torch.device("cuda:1")
    for where in (second, CPU):
        check_fast_paths(SHAPE, BF16, where, again=True)
    assert seen == [[second], []]
    assert not current


def test_what_does_not_apply_is_as_where_nobody_looked(own_cache):
    check_fast_paths(SHAPE, torch.float32, CPU)
    assert not attention._by_flash
    assert not ops._by_kernels


def test_what_is_kept_belongs_to_one_shape_dtype_and_version(own_cache, monkeypatch):
    keys = {fast_paths._key(SHAPE, BF16, CPU), fast_paths._key(SHAPE, torch.float32, CPU)}
    keys.add(fast_paths._key(Qwen2Config(**{**SHAPE.to_dict(), "intermediate_size": 128}), BF16, CPU))
    monkeypatch.setattr(torch, "__version__", "2.99")
    keys.add(fast_paths._key(SHAPE, BF16, CPU))
    assert len(keys) == 4


def test_what_is_kept_for_a_gpu_belongs_to_one_version_of_triton(tmp_path, monkeypatch):
    card = SimpleNamespace(name="a card", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    keys = {fast_paths._key(SHAPE, BF16, torch.device("cuda"))}
    for version in ("0.1", "0.2"):
        about = tmp_path / version / f"triton-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / version)
        keys.add(fast_paths._key(SHAPE, BF16, torch.device("cuda")))
    assert len(keys) == 3


def test_where_a_model_lies_and_how_its_file_was_written_do_not_matter(tmp_path):
    """A run that goes on loads its checkpoint, and not the base that it began with."""
    configs = [SHAPE]
    for name, dtype in (("base", torch.float32), ("checkpoints", BF16)):
        AutoModelForCausalLM.from_config(SHAPE).to(dtype).save_pretrained(tmp_path / name)
        configs.append(AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").config)
    assert configs[1].to_dict()["_name_or_path"] != configs[2].to_dict()["_name_or_path"]
    assert len({fast_paths._key(config, BF16, CPU) for config in configs}) == 1


@needs_kernels
def test_what_is_kept_is_not_for_a_system_that_permits_less(own_cache, monkeypatch):
    """In a container without permission for matrix units other paths apply, on the same processor."""

    class Library:
        permitted = True

        def __getattr__(self, name):
            return lambda *_: int(self.permitted)

    library, keys = Library(), set()
    monkeypatch.setattr(calls, "kernels", lambda fp32: build.Kernels(library, "a compiler"))
    for library.permitted in (True, False):
        monkeypatch.setattr(calls, "_functions", {})
        keys.add(fast_paths._key(SHAPE, BF16, CPU))
    assert len(keys) == 2


def test_a_run_that_goes_on_keeps_the_choices_it_began_with(own_cache, tmp_path, monkeypatch):
    """Also where the machine has forgotten them, or its clock has said otherwise since; on another machine it takes that one's."""
    taken: list[bool] = []
    path = a_path(taken.append, operations=("a decode step",), slack=1e6)
    monkeypatch.setattr(fast_paths, "fast_paths", lambda: (path,))
    folder, where = RunFolder(tmp_path), (SHAPE, torch.float32, CPU)
    folder.environment.write_text('{"recipe": "a run"}')
    began = start._fast_paths(*where, folder, Trackers())
    assert [choice.taken for choice in began] == [True]
    assert folder.read_environment()["recipe"] == "a run"

    otherwise = [replace(began[0], taken=False, why="it takes 2 ms, and the plain way 1")]
    key = fast_paths._key(*where)
    fast_paths._known[key] = otherwise
    assert start._fast_paths(*where, folder, Trackers()) == began
    assert taken[-1]
    assert check_fast_paths(*where) == began, "what samples an adapter's model asks again, and goes the same way"

    fast_paths._known[key] = otherwise
    fast_paths.take(*where, began)  # as the run's other processes do
    assert taken[-1]
    assert check_fast_paths(*where) == began

    folder.add_to_environment(fast_paths_of="another machine's")
    fast_paths._known[key] = otherwise
    assert start._fast_paths(*where, folder, Trackers()) == otherwise
    assert not taken[-1]
    assert folder.read_environment()["fast_paths_of"] == key


@pytest.mark.parametrize(
    "content", ["", "[{}]", '{"a": 1}', '[{"path": "gone", "taken": true, "agrees": true, "why": "", "operations": []}]']
)
def test_what_was_kept_and_cannot_be_read_is_found_anew(own_cache, content):
    own_cache.mkdir(parents=True)
    file = own_cache / f"{fast_paths._key(SHAPE, BF16, CPU)}.json"
    file.write_text(content)
    assert {c.path for c in check_fast_paths(SHAPE, BF16, CPU)} <= {p.name for p in fast_paths.fast_paths()}
    assert json.loads(file.read_text()) != content


@pytest.mark.parametrize("place", ["file", "~nobody-of-that-name"])
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GROUPWISE_CACHE", place)
    assert {c.path for c in check_fast_paths(SHAPE, torch.float32, CPU)} <= {p.name for p in fast_paths.fast_paths()}


def test_random_numbers_go_on_as_before():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    check_fast_paths(SHAPE, BF16, CPU)
    assert torch.equal(torch.rand(3), expected)


def test_the_page_names_what_is_left_out_later_than_the_others():
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    later = " ".join(page.partition("Some are left out later.")[2].partition("\n\n")[0].lower().split())
    patient = [path.name for path in fast_paths.fast_paths() if path.slack > 1.25]
    assert [path.name for path in fast_paths.fast_paths() if path.name in later] == patient


def test_a_captured_graph_is_compared_with_launched_steps(monkeypatch):
    """By stand-ins for graphs: one that replays right is taken, one that replays nothing is not."""
    from benchmarks.first_light_one import _Stand

    decoder = fast_paths._small(SHAPE, torch.float32, CPU)
    path = next(p for p in fast_paths.fast_paths() if p.name == "captured graphs")
    path = replace(path, switch=lambda yes: setattr(runner, "GRAPHS", frozenset({"cpu"}) if yes else frozenset()), slack=100.0)
    monkeypatch.setattr(runner, "GRAPHS", frozenset())
    monkeypatch.setattr(runner.Runner, "_capture", lambda its, step: _Stand(its, step))
    assert choose(path, decoder)[0].taken
    monkeypatch.setattr(_Stand, "__init__", lambda self, runner, step: setattr(self, "replay", lambda: None))
    assert "apart" in choose(path, decoder)[0].why


def test_the_library_s_attention_is_compared_with_blocked_products(monkeypatch):
    from groupwise.models import attention

    decoder = fast_paths._small(SHAPE, torch.float32, CPU)
    monkeypatch.setattr(
        fast_paths.attention, "default_implementation", lambda device: "sdpa" if attention._by_library else "blocked"
    )
    path = next(p for p in fast_paths.fast_paths() if p.name == "the library's attention")
    path = replace(path, slack=100.0)
    found, _ = choose(path, decoder)
    assert found.taken
    assert 0 < found.operations[0].difference < 1e-4


def test_each_way_of_attention_is_timed_by_itself(monkeypatch):
    decoder, timed, seconds = fast_paths._small(SHAPE, torch.float32, CPU), [], fast_paths._seconds
    monkeypatch.setattr(
        fast_paths.attention, "default_implementation", lambda device: "sdpa" if attention._by_library else "blocked"
    )
    monkeypatch.setattr(
        fast_paths, "_seconds", lambda action, device: (seconds(action, device), timed.append(decoder.attention))[0]
    )
    path = next(p for p in fast_paths.fast_paths() if p.name == "the library's attention")
    choose(replace(path, slack=100.0), decoder)  # timed once, whatever the clock says
    assert timed == ["blocked", "sdpa"] * fast_paths._REPEATS


@pytest.mark.parametrize("louder", [1.0, 1.1])
def test_flash_attention_is_compared_with_rectangles(monkeypatch, louder):
    decoder = fast_paths._small(SHAPE, torch.float32, CPU)
    path = replace(next(p for p in fast_paths.fast_paths() if p.name == "flash attention"), slack=100.0)
    monkeypatch.setattr(
        fast_paths.attention, "default_implementation", lambda device: "varlen" if attention._by_flash else "sdpa"
    )
    real = varlen_attention._backward
    monkeypatch.setattr(varlen_attention, "_backward", lambda *given: tuple(louder * g for g in real(*given)))
    with flash_on_cpus():
        found, _ = choose(path, decoder)
    assert found.taken is (louder == 1)
    assert 0 < found.operations[0].difference < (1e-4 if louder == 1 else 0.2)


def test_the_doctor_shows_the_table(tiny_qwen2, tmp_path, monkeypatch):
    from tests.tiny import write_tiny_qwen2

    model = write_tiny_qwen2(tmp_path / "model")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"model: {{name: {model}, device: cpu, dtype: bfloat16}}\ndata: {{source: arithmetic}}\n")
    done = CliRunner().invoke(app, ["doctor", str(recipe), "--device", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["dtype"] == "bfloat16"
    if build.kernels().library is not None:
        assert "native kernels" in CliRunner().invoke(app, ["doctor", str(recipe), "--device"], env={"COLUMNS": "150"}).stdout
        gated = calls.gated
        monkeypatch.setattr(calls, "gated", lambda x, activation="silu": gated(x, activation) * 1.1)
        assert CliRunner().invoke(app, ["doctor", str(recipe), "--device"]).exit_code == 1
