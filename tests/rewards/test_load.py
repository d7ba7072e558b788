"""Reward functions are found by name, file or import path, and every way of getting it wrong has its sentence."""

from __future__ import annotations

import functools
import sys

import pytest

from groupwise.config.schema import RewardFunctionConfig
from groupwise.errors import ConfigError, RewardError
from groupwise.importing import import_member
from groupwise.rewards import builtin_rewards, load_reward


def load(function, extra=None, **arguments):
    return load_reward(RewardFunctionConfig(function=function, arguments=arguments), extra)


GOOD = """
import neighbour_of_mine

def short(completions, answer, limit=3):
    return [neighbour_of_mine.ONE for _ in completions]
"""


def test_a_function_from_a_file_with_a_neighbour(reward_file, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    reward_file("ONE = 1.0\n", "neighbour_of_mine.py")
    path = reward_file(GOOD)
    loaded = load(f"{path}:short", limit=4)
    assert (loaded.name, loaded.source, loaded.weight) == ("short", str(path), 1.0)
    assert loaded.function(["x", "y"], ["1", "2"]) == [1.0, 1.0]
    assert loaded.required == ("completions", "answer")
    assert loaded.select({"prompts": [], "completions": ["x"], "answer": ["1"]}) == {
        "completions": ["x"],
        "answer": ["1"],
        "limit": 4,
    }


def test_an_edited_file_is_read_again_and_two_functions_share_one_module(reward_file):
    path = reward_file("def f(completions): return [1.0]\ndef g(completions): return [1.0]\n")
    first, second = load(f"{path}:f"), load(f"{path}:g")
    assert first.function.__globals__ is second.function.__globals__
    path.write_text("def f(completions): return [2.0]  # edited\n")
    assert load(f"{path}:f").function(["x"]) == [2.0]


def test_a_tool_and_a_reward_of_one_file_share_one_module(reward_file):
    path = reward_file("WORLD = []\ndef look(name): return WORLD\ndef grounded(completions): return [1.0]\n")
    tool, _ = import_member(f"{path}:look", "tool", ConfigError)
    assert tool.__globals__ is load(f"{path}:grounded").function.__globals__


def test_a_file_whose_import_is_interrupted_is_imported_whole_the_next_time(reward_file, tmp_path):
    path = reward_file(
        f"from pathlib import Path\nonce = Path({str(tmp_path / 'once')!r})\n"
        "if not once.exists():\n    once.touch()\n    raise KeyboardInterrupt\n"
        "def short(completions):\n    return [1.0 for _ in completions]\n"
    )
    with pytest.raises(KeyboardInterrupt):
        load(f"{path}:short")
    assert load(f"{path}:short").function(["a"]) == [1.0]


def test_a_function_from_a_module_in_the_working_folder(reward_file, monkeypatch):
    path = reward_file("def f(completions, **columns): return [0.0]\n", "module_of_rewards.py")
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = load("module_of_rewards:f")
    assert (loaded.source, loaded.accepted) == ("module_of_rewards", None)


def test_names_from_python_go_before_builtins():
    assert load("format", {"format": lambda completions: [9.0]}).function(["x"]) == [9.0]
    assert load("format").function is builtin_rewards()["format"]


def test_partials_and_callable_objects():
    class Judge:
        def __call__(self, completions, strictness=1):
            return [strictness for _ in completions]

    def base(completions, strictness):
        return [strictness for _ in completions]

    assert load("judge", {"judge": Judge()}, strictness=2).arguments == {"strictness": 2}
    assert load("p", {"p": functools.partial(base, strictness=3)}).required == ("completions",)


def test_columns_do_not_replace_what_a_partial_has_set():
    def judge(completions, level, **columns):
        return [level for _ in completions]

    third = functools.partial(judge, level=3)

    @functools.wraps(third)
    def decorated(**keywords):
        return third(**keywords)

    given = {"completions": ["x"], "level": ["Level 5"], "topic": ["sums"]}
    for function in (third, functools.partial(third), decorated):
        loaded = load("judge", {"judge": function})
        assert loaded.select(given) == {"completions": ["x"], "topic": ["sums"]}
        assert loaded.function(**loaded.select(given)) == [3]
    strict = functools.partial(lambda completions, level: [level], level=3)
    assert load("strict", {"strict": strict}).select(given) == {"completions": ["x"]}
    assert load("third", {"third": third}, level=4).select(given)["level"] == 4, "a config's argument wins over both"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("corectness", r"no reward function 'corectness' \(did you mean 'correctness'\?\): known are accuracy"),
        ("xyzzy", r"no reward function 'xyzzy': known are accuracy, boxed_format"),
        ("absent.py:f", r"'absent.py' does not exist \(looked in .*\); give a path"),
        ("rewards.py", r"names a file but no function in it: write rewards.py:function_name"),
        ("no_such_package.rewards:f", r"could not be imported: ModuleNotFoundError: .*; install it"),
        ("math:isqr", r"no function 'isqr' in math"),
        ("math:pi", r"'math:pi' is a float, not a function"),
        ("collections:Counter", r"is a class, not a function"),
    ],
)
def test_what_cannot_be_found(function, sentence):
    with pytest.raises(RewardError, match=sentence):
        load(function)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def shorter(completions): ...", r"no function 'short' in .*mine.py \(did you mean 'shorter'\?\): it has shorter"),
        ("import no_such_package_at_all", r"mine.py' could not be imported: ModuleNotFoundError: .*; fix the file"),
        ("def short(:", r"could not be imported: SyntaxError"),
        ("raise SystemExit(1)", r"could not be imported: SystemExit: 1"),
        ("def short(text, label): ...", r"has no parameter 'completions', but reward functions are called by keyword"),
        ("def short(completions, /): ...", r"takes 'completions' by position only"),
        ("short = 3", r"is a int, not a function"),
    ],
)
def test_what_is_wrong_with_a_file(reward_file, code, sentence):
    path = reward_file(code + "\n")
    with pytest.raises(RewardError, match=sentence) as caught:
        load(f"{path}:short")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "arguments", "sentence"),
    [
        (
            "length",
            {"targt": 3},
            r"'length' takes no argument 'targt' \(did you mean 'target'\?\): it takes bounded, penalise_longer, target, unit",
        ),
        ("format", {"size": 3}, r"'format' takes no argument 'size': it takes once"),
        ("correctness", {"size": 3}, r"'correctness' takes no argument 'size': it takes none"),
        ("length", {"target": 0}, r"target is 0, but it must be at least 1"),
        ("length", {"target": "far"}, r"cannot work with the arguments \{'target': 'far'\}"),
        ("length", {"unit": "lines"}, r"unit is 'lines', but it must be 'characters', 'words' or 'tokens'"),
        ("keyword", {}, r"keyword needs words"),
        ("keyword", {"words": [True, False]}, r"keyword's words have True, which is no text: put quotes around it"),
        ("keyword", {"words": ["a"], "avoid": ["b", 42]}, r"keyword's words have 42, which is no text"),
        ("keyword", {"words": 42}, r"cannot work with the arguments \{'words': 42\}"),
        ("format", {"completions": []}, r"an argument 'completions', which every call already supplies"),
    ],
)
def test_bad_arguments_are_refused_before_the_run(function, arguments, sentence):
    with pytest.raises(RewardError, match=sentence):
        load(function, **arguments)
