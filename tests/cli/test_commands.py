"""The command line teaches, prints JSON that is JSON, and exits with codes that mean something."""

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer

from groupwise import streams
from groupwise.cli import main
from groupwise.cli.models import generate
from groupwise.cli.options import check_device_map, start_processes
from groupwise.config import explain, load_config, recipes
from groupwise.distributed import launch
from groupwise.errors import ConfigError

COMMANDS = [
    ["train"],
    ["eval"],
    ["generate"],
    ["serve"],
    ["data", "inspect"],
    ["data", "prepare"],
    ["recipes"],
    ["algorithms"],
    ["config"],
]
COMMANDS += [["report"], ["doctor"], ["plan"], ["bench"]]


@pytest.mark.parametrize(("spec", "own"), [(None, ["-P"]), ("started by -m", [])])
def test_several_processes_import_from_where_the_command_does(monkeypatch, spec, own):
    """``groupwise`` finds no package in the working directory, and ``python -m groupwise`` does."""
    started = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "launch", lambda command, count: started.append(command) or 0)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    with pytest.raises(typer.Exit):
        start_processes(2)
    assert started == [[sys.executable, *own, "-m", "groupwise", *sys.argv[1:]]]


def test_one_of_several_processes_starts_no_others(monkeypatch):
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("started"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    start_processes(2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"--num-processes is 2, but .* started 1: .*unset RANK WORLD_SIZE"):
        start_processes(2)
    check_device_map("auto", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["any", "--resume"], "--resume goes on with the records of an --out"),
        (["evaluation.problems=3"], "groupwise eval needs a model to judge"),
        (["any", "evaluation.problms=3"], "evaluation.problms is not a setting"),
    ],
)
def test_what_eval_cannot_do_is_told_before_several_processes_are_started(groupwise, monkeypatch, words, said):
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("started"))
    result = groupwise("eval", *words, "--num-processes", "2")
    assert result.exit_code == 2
    assert said in result.stderr


def test_what_generate_cannot_do_is_told_before_several_processes_are_started(groupwise, monkeypatch):
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("started"))
    result = groupwise("generate", "any", "--system", "half a \udcff", "--num-processes", "2", input="Why?\n")
    assert result.exit_code == 2
    assert "is not UTF-8 text" in result.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_questions_from_a_closed_standard_input_are_refused(monkeypatch, processes):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input is closed"):
        generate("any", num_processes=processes)


@pytest.mark.parametrize("command", [[], ["data"]])
def test_help_without_a_command_lists_the_commands(groupwise, command):
    shown = groupwise(*command, "--help").stdout
    listed = [
        "train",
        "eval",
        "generate",
        "serve",
        "merge",
        "report",
        "doctor",
        "plan",
        "bench",
        "data",
        "recipes",
        "algorithms",
        "config",
    ]
    expected = ["inspect", "prepare"] if command else listed
    assert re.findall(r"^  (\w+)  +[A-Z]", shown.partition("Commands:")[2], flags=re.MULTILINE) == sorted(
        expected, key=lambda name: shown.index(f"\n  {name} ")
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples_that_keep_their_lines_and_brackets(groupwise, command):
    shown = groupwise(*command, "-h").stdout
    examples = re.findall(r"^    (groupwise .*)$", shown, flags=re.MULTILINE)
    assert any(example.split()[1 : 1 + len(command)] == command for example in examples)


def test_data_inspect_renders_the_first_turn_of_an_episode(groupwise, tiny_model, tmp_path):
    table = tmp_path / "sums.jsonl"
    table.write_text("".join(json.dumps({"question": f"{a} + 1?", "answer": str(a + 1)}) + "\n" for a in range(5)))
    look = ["data", "inspect", str(table), "--json", "--model", str(tiny_model), "prompt.system=none"]
    plain, tools, game = (
        json.loads(groupwise(*look, *more).stdout)
        for more in ([], ["rollout.tools=[calculator]"], ["rollout.environment=tests.survival.game:Talk"])
    )
    said = "Tools: calculator(expression): Computes an arithmetic expression."
    assert said in tools["examples"][0]["prompt"]
    assert said not in plain["examples"][0]["prompt"]
    assert re.search(r"0 \+ 1\? Say something about \d\.", game["examples"][0]["prompt"])
    assert tools["prompt_tokens"]["min"] > plain["prompt_tokens"]["max"]
    assert groupwise(*look[:3], *look[4:], "rollout.tools=[calculator]").stdout.count(said) == 3


def test_the_overrides_in_the_examples_are_real(groupwise):
    shown = groupwise("train", "--help").stdout
    assert "rewards.functions=[correctness, my_rewards.py:short]" in shown
    for example in re.findall(r"^    groupwise train (.*)$", shown, flags=re.MULTILINE):
        source, *words = [word for word in shlex.split(example) if word != "--dry-run"]
        overrides = [word for word in words if "=" in word]
        load_config(None if source == "mine.yaml" else source, overrides)


def test_recipes_are_listed_for_people_and_for_programs(groupwise):
    listed = json.loads(groupwise("recipes", "--json").stdout)
    assert [row["name"] for row in listed] == [recipe.name for recipe in recipes()]
    shown = groupwise("recipes").stdout
    assert all(recipe.name in shown for recipe in recipes())
    assert "\\boxed{}" in shown


def test_a_width_of_0_is_not_taken_at_its_word(groupwise, monkeypatch):
    for columns in ("0", "00"):
        monkeypatch.setenv("COLUMNS", columns)
        shown = groupwise("recipes").stdout
        assert all(recipe.name in shown for recipe in recipes())


def test_config_explains_every_setting(groupwise):
    assert [row["path"] for row in json.loads(groupwise("config", "--json").stdout)] == [doc.path for doc in explain()]
    shown = groupwise("config").stdout
    assert all(doc.leaf in shown for doc in explain())


def test_config_explains_a_section_a_setting_or_all_of_one_name(groupwise):
    section = json.loads(groupwise("config", "data.arithmetic", "--json").stdout)
    assert {row["path"] for row in section} == {
        f"data.arithmetic.{name}" for name in ("largest_number", "largest_factor", "operations", "steps", "problems")
    }
    one = json.loads(groupwise("config", "rollout.temperature", "--json").stdout)
    assert [row["path"] for row in one] == ["rollout.temperature"]
    entry = json.loads(groupwise("config", "rewards.functions[0].weight", "--json").stdout)
    assert [row["path"] for row in entry] == ["rewards.functions[].weight"]
    assert "rewards.functions[].weight" in groupwise("config", "rewards.functions[0]", "--json").stdout
    both = json.loads(groupwise("config", "temperature", "--json").stdout)
    assert [row["path"] for row in both] == ["rollout.temperature", "evaluation.temperature"]


def test_config_names_the_nearest_setting(groupwise):
    result = groupwise("config", "temprature")
    assert result.exit_code == 2
    assert "did you mean" in result.stderr


def test_the_version_is_the_package_s(groupwise):
    import groupwise as package

    assert groupwise("--version").stdout == f"groupwise {package.__version__}\n"


def python_m_groupwise(*words, encoding=None, **environment):
    import os

    command = [sys.executable, "-m", "groupwise", *map(str, words)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, encoding=encoding, check=False, env=environment)


def test_python_m_groupwise_prints_a_mistake_as_one_line_and_exits_with_2():
    done = python_m_groupwise("train", "quickstart", "rollout.completions_per_prompt=1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("groupwise: rollout.completions_per_prompt is 1, but must be at least 2: ")
    assert done.stderr.count("\n") == 1


def test_what_is_piped_is_utf8_in_any_locale(tiny_model, tmp_path, monkeypatch):
    import io

    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": f"答é {i}?", "answer": i}) + "\n" for i in range(4)))
    words = ["data", "inspect", data, "--model", tiny_model, "--json"]
    done = python_m_groupwise(*words, PYTHONIOENCODING="latin-1", encoding="utf-8")
    assert json.loads(done.stdout)["examples"][0]["question"] == "答é 0?", done.stderr
    piped = io.TextIOWrapper(io.BytesIO("答é".encode()), encoding="latin-1")
    for name, stream in (("stdin", piped), ("stdout", io.StringIO()), ("stderr", io.StringIO())):
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", ["groupwise", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert piped.read() == "答é"


LOUD = """
import atexit, os, sys
from groupwise.cli import configuration, main

def loud(listed=configuration.shipped_recipes):
    print("printed")
    atexit.register(print, "at the end")
    os.system("echo from a child")
    return listed()

configuration.shipped_recipes = loud
sys.argv = ["groupwise", "recipes", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("words", [["--json"], []], ids=["json", "text"])
def test_json_has_standard_output_for_itself(words):
    """A reward function that prints, and a library or a program of its own that does, are read on standard error."""
    done = subprocess.run([sys.executable, "-c", LOUD, *words], capture_output=True, text=True, check=True)
    if words:
        assert "quickstart" in [recipe["name"] for recipe in json.loads(done.stdout)]
    where = done.stderr if words else done.stdout
    assert {"printed", "from a child", "at the end"} <= set(where.splitlines())


def test_json_without_standard_output_or_error():
    def run(closed):
        command = f"{sys.executable} -c '{LOUD}' --json {closed}"
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)

    assert run(">&-").returncode == 0, "nobody wants it"
    assert "quickstart" in [recipe["name"] for recipe in json.loads(run("2>&-").stdout)]


def test_standard_output_is_given_back_after_a_wrong_option(groupwise):
    assert groupwise("plan", "quickstart", "--json", "--world-size", "many").exit_code == 2
    assert streams._kept is None


@pytest.mark.slow
def test_the_debug_variable_shows_the_traceback():
    done = python_m_groupwise("train", "quickstart", "rollout.completions_per_prompt=1", GROUPWISE_DEBUG="1")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_ctrl_c_exits_with_130(groupwise, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("groupwise.config.load_config", interrupted)
    result = groupwise("train", "quickstart")
    assert result.exit_code == 130
    assert "stopped" in result.stderr


@pytest.mark.parametrize("command", [["doctor"], ["report"], ["data", "inspect"], ["train", "quickstart", "--run-folder"]])
def test_the_home_of_nobody_is_named(groupwise, command):
    result = groupwise(*command, "~nobody-of-that-name/x")
    said = (
        "'~nobody-of-that-name/x' cannot be found, since no home folder of '~nobody-of-that-name' is known: write the whole path"
    )
    assert (result.exit_code, result.stderr) == (2, f"groupwise: {said}\n")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="pathlib does not say there why it finds nothing")
@pytest.mark.parametrize("words", [["train"], ["doctor"], ["report"], ["generate", "--greedy"]], ids=lambda words: words[0])
def test_a_path_that_may_not_be_looked_at_is_named(groupwise, deny, words):
    deny("stat")
    result = groupwise(*words, "closed/mine")
    said = "groupwise: 'closed/mine' cannot be looked at (Permission denied): name one that you may read\n"
    assert (result.exit_code, result.stderr) == (2, said)


def test_a_permission_that_a_run_lacks_is_not_taken_for_a_path_s(groupwise, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "port")

    monkeypatch.setattr("groupwise.config.load_config", refused)
    with pytest.raises(PermissionError):
        groupwise("train", "quickstart")


def test_a_mistake_of_our_own_is_not_taken_for_a_missing_home(groupwise, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("groupwise.config.load_config", broken)
    with pytest.raises(RuntimeError, match="home directory"):
        groupwise("train", "quickstart")


def test_a_training_error_exits_with_its_own_code(groupwise, monkeypatch):
    from groupwise.errors import TrainingError

    def diverged(*_, **__):
        raise TrainingError("the loss is not finite")

    monkeypatch.setattr("groupwise.config.load_config", diverged)
    result = groupwise("train", "quickstart")
    assert (result.exit_code, result.stderr) == (1, "groupwise: the loss is not finite\n")


def test_help_imports_no_heavy_library():
    code = (
        "import sys\nfrom groupwise.cli import main\nsys.argv = ['groupwise', 'train', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.exit(', '.join({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MISSPELT = """
import sys
from groupwise.cli import main

sys.argv = ["groupwise", *sys.argv[1:], "training.stepz=1"]
try:
    main()
except SystemExit as end:
    sys.exit("torch was imported" if "torch" in sys.modules else end.code)
"""


@pytest.mark.parametrize(
    "words",
    [
        "train quickstart",
        "plan quickstart",
        "bench quickstart",
        "doctor quickstart",
        "doctor quickstart --device",
        "data inspect arithmetic",
        "eval any",
    ],
)
def test_a_misspelt_setting_is_told_before_torch_is_imported(words):
    done = subprocess.run([sys.executable, "-c", MISSPELT, *words.split()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "training.stepz" in done.stderr


def test_windows_is_refused_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert re.fullmatch("groupwise: Windows is not supported: .*WSL.*\n", capsys.readouterr().err)


def test_the_package_offers_what_it_says_and_nothing_is_missing():
    import groupwise as package

    assert set(package.__all__) <= set(dir(package))
    assert package.Config is package.load_config(None).__class__
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = package.trian


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "quickstart", "--steps", "3"], "--steps is no option: settings are written training.steps=3"),
        (["train", "quickstart", "--training.steps", "3"], "training.steps=3"),
        (["train", "quickstart", "--learning-rate=1e-5"], "optimizer.learning_rate=1e-5"),
        (["train", "quickstart", "--max_new_tokens", "9", "--dry-run"], "rollout.max_completion_tokens=9"),
        (["plan", "quickstart", "--temperature", "0.5"], "rollout.temperature=0.5"),
        (["eval", "some-model", "--problems", "20"], "evaluation.problems=20"),
        (["doctor", "quickstart", "--beta"], "algorithm.kl.beta=VALUE"),
    ],
)
def test_a_setting_spelled_as_an_option_is_told_how_it_is_written(groupwise, monkeypatch, words, said):
    monkeypatch.setattr("sys.argv", ["groupwise", *words])
    result = groupwise(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_misspelt_option_is_told_as_before(groupwise):
    result = groupwise("train", "quickstart", "--resum")
    assert result.exit_code == 2
    assert "--resume" in result.stderr
    assert "settings are written" not in result.stderr
    assert "settings are written" not in groupwise("recipes", "--steps", "3").stderr
