"""groupwise from Python: what it exports, what it accepts, and what it gives back."""

import ast
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import groupwise
from groupwise.config import build_config, recipes
from groupwise.config.objective import CispoLoss
from groupwise.errors import ConfigError, RewardError, StoppedError, TrainingError
from tests.tiny import lower_case_share, tiny_config, write_sums, write_tiny_llama

ROOT = Path(__file__).resolve().parents[1]


def test_everything_that_is_exported_is_there_and_declared_for_type_checkers():
    for name in groupwise.__all__:
        assert getattr(groupwise, name) is not None
    assert set(groupwise.__all__) - {"__version__"} == set(groupwise._HOME_OF)
    tree = ast.parse(Path(groupwise.__file__).read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {(node.module, alias.name) for node in typed.body for alias in node.names}
    assert declared == {(home, name) for home, names in groupwise._HOMES.items() for name in names}
    assert set(groupwise.__all__) <= set(dir(groupwise))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        groupwise.trian  # noqa: B018


def test_on_windows_python_says_what_the_command_says(monkeypatch):
    for name in ("plan", "RewardModel", "load_config"):
        monkeypatch.delitem(vars(groupwise), name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        for name in ("plan", "RewardModel"):
            with pytest.raises(ConfigError, match=r"^Windows is not supported: run it in WSL"):
                getattr(groupwise, name)
        assert groupwise.load_config("quickstart").training.steps


def test_importing_groupwise_and_its_settings_imports_no_torch():
    code = (
        "import sys, groupwise; assert 'pydantic' not in sys.modules; groupwise.load_config('quickstart'); groupwise.RunResult; "
        "groupwise.ConfigError; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pandas', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_import_from_groupwise_alone(path):
    cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    nodes = [node for cell in cells for node in ast.walk(ast.parse("".join(cell["source"])))]
    ours = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module.partition(".")[0] == "groupwise"]
    assert {n.module for n in ours} == {"groupwise"}
    assert all(alias.name in groupwise.__all__ for n in ours if n.module == "groupwise" for alias in n.names)
    assert all(hasattr(importlib.import_module(n.module), alias.name) for n in ours for alias in n.names)


@pytest.mark.parametrize(
    "overrides", [["training.steps=2"], "training.steps=2", {"training.steps": 2}, {"training": {"steps": 2}}], ids=repr
)
def test_overrides_may_be_texts_one_text_or_a_dict(overrides):
    config = groupwise.load_config("quickstart", overrides)
    assert config == groupwise.load_config("quickstart", ["training.steps=2"])
    assert config.data.arithmetic.largest_number == 10, "the recipe's"


def test_values_of_a_dict_are_taken_as_they_are():
    config = groupwise.load_config(
        None, {"prompt.system": "null", "model.lora": None, "max_grad_norm": None, "rewards.functions": ["format"]}
    )
    assert config.prompt.system == "null"
    assert config.optimizer.max_grad_norm is None
    assert [entry.function for entry in config.rewards.functions] == ["format"]


def wrong_steps(config):
    config.training.steps = "many"


def wrong_name(config):
    config.training.step = 3


async def awaited(report):
    pass


def with_tracker(name):
    config = groupwise.Config()
    config.output.trackers.append(name)
    return config


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda: groupwise.Config(training={"step": 3}), "training.step is not a setting: did you mean training.steps?"),
        (lambda: groupwise.Config(trainign={}), "trainign is not a setting: did you mean training?"),
        (lambda: groupwise.Config(training={"steps": "many"}), "training.steps is 'many', but must be a whole number"),
        (
            lambda: groupwise.load_config(None, {"training.step": 3}),
            "training.step is not a setting: did you mean training.steps?",
        ),
        (lambda: groupwise.load_config(None, [3]), "3 is not an override"),
        (lambda: wrong_name(groupwise.Config()), "training.step is not a setting: did you mean training.steps?"),
        (lambda: wrong_steps(groupwise.Config()), "training.steps is 'many', but must be a whole number"),
        (lambda: groupwise.train("quickstrat"), "did you mean quickstart?"),
        (lambda: groupwise.train(3), "settings are a int"),
        (lambda: groupwise.train({"training": {"step": 3}}), "did you mean training.steps?"),
        (lambda: groupwise.prepare("quickstrat"), "did you mean quickstart?"),
        (lambda: groupwise.train(with_tracker("wanbd")), "output.trackers[1] is 'wanbd', but must be one of"),
        (lambda: groupwise.diagnose(ROOT, {"training.steps": 3}), "overrides change nothing about"),
        (lambda: groupwise.diagnose(ROOT, rewards=lower_case_share), "rewards change nothing about"),
        (lambda: groupwise.evaluate("a-model", ROOT / "README.md:test"), "names the split 'test'"),
        (lambda: groupwise.generate("a-model", [{"role": "user", "content": "?"}]), "a prompt is a dict, but must be a text"),
        (lambda: groupwise.generate("a-model", {"role": "user", "content": "?"}), "a prompt is a dict, but must be a text"),
        (lambda: groupwise.generate("a-model", ["?", None]), "a prompt is a NoneType, but must be a text"),
        (lambda: groupwise.train("absent", on_step=3), "on_step is a int, but must be a function"),
        (lambda: groupwise.train("absent", on_step=awaited), "on_step is async, but nothing awaits what it gives"),
        (lambda: groupwise.train("absent", on_step=partial(awaited)), "on_step is async, but nothing awaits what it gives"),
        (lambda: groupwise.evaluate("a-model", [{}]), "data is a list, but must be a name or a path: write its rows to"),
        (lambda: groupwise.evaluate(wrong_name, "gsm8k:test"), "model is a function, but must be a name or a path: save it"),
        (lambda: groupwise.generate(wrong_name, "?"), "model is a function, but must be a name or a path: save it"),
    ],
)
def test_a_mistake_is_one_sentence_of_ours(attempt, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        attempt()
    assert "pydantic" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_by_name():
    made = groupwise.plan("gsm8k-0.5b", {"rollout.prompts_per_step": 4}, hardware="rtx-4090")
    assert made.setup.config.rollout.prompts_per_step == 4
    assert isinstance(made.fits, bool)


def test_a_plan_for_this_machine_has_the_dtype_that_a_run_would_have(monkeypatch):
    monkeypatch.setattr("groupwise.planner.hardware.present_gpu", lambda index: None)
    for computes, dtype in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr("groupwise.models.devices.computes_bf16", lambda computes=computes: computes)
        assert groupwise.plan("quickstart", {"model.dtype": "auto", "model.device": "cpu"}).setup.config.model.dtype == dtype


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A run that was asked for with a dict, and paths as texts."""
    folder = tmp_path_factory.mktemp("api")
    settings = tiny_config(write_tiny_llama(folder / "model"), write_sums(folder / "sums.jsonl")).model_dump(exclude_unset=True)
    return groupwise.train(
        settings, {"training.steps": 3, "evaluation.at_start": True}, run_folder=str(folder / "a <b> run"),
        rewards={"letters": lower_case_share}, console=Console(quiet=True),
    )  # fmt: skip


def test_a_run_s_results_are_data_frames(result):
    steps = [1, 2, 3]
    assert list(result.metrics.index) == steps
    assert list(result.metrics["reward/mean"]) == [value for _, value in groupwise.read_run(result).series("reward/mean")]
    assert all(kind == "float64" for kind in result.metrics.dtypes)
    completions = result.completions
    assert sorted(completions["step"].unique()) == steps
    assert completions["reward/letters"].equals(completions["reward"])
    evaluations = result.evaluations
    assert [*zip(evaluations["stage"], evaluations["mode"], strict=True)] == [("base", "sampled"), ("final", "sampled")]
    assert ((evaluations["strict_low"] <= evaluations["strict"]) & (evaluations["strict"] <= evaluations["strict_high"])).all()


def test_a_result_has_a_chart_and_a_short_view(result, tmp_path, monkeypatch):
    chart = result.plot("reward/mean", "reward/letters")
    assert chart.svg().count("<polyline") == 2
    assert len(re.search('points="([^"]+)"', chart.svg())[1].split()) == 3
    assert chart.save(tmp_path / "chart.svg").read_text(encoding="utf-8").startswith("<svg ")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert chart.save("~/at-home.svg") == tmp_path / "at-home.svg"
    with pytest.raises(ConfigError, match="'reward' is no metric of this run"):
        result.plot("reward")
    assert groupwise.RunResult.of(result.folder).evaluations.equals(result.evaluations)
    view = result._repr_html_()
    forged = groupwise.RunResult(result.folder, {**result.summary, "steps": "<img src=x>"})
    assert "<img" not in forged._repr_html_()
    assert "a &lt;b&gt; run" in view
    assert "<b> run" not in view
    assert "after GRPO" in view
    assert len(view) < 6000


def test_what_is_assigned_in_python_is_what_runs():
    from groupwise.api import _config
    from groupwise.training.setup import _with_steps

    config = groupwise.load_config(None, ["training.epochs=1"])
    config.rollout.temperature, config.data.limit, config.algorithm.updates_per_batch = 0.7, 10, 4
    for made in (_with_steps(config, 100), _config(config, {"training.seed": 5}), _config(config, ())):
        assert (made.rollout.temperature, made.data.limit, made.algorithm.updates_per_batch) == (0.7, 10, 4)
    config.rollout.engine = "vllm"
    assert _config(config, ()).correction_level == "token"
    config = groupwise.load_config(None)
    config.training.steps, config.optimizer.warmup_steps = 5, 50
    with pytest.raises(ConfigError, match="warmup_steps"):
        _config(config, ())


def test_a_result_stands_for_its_folder(result, tmp_path):
    page = groupwise.write_report(result, tmp_path / "page.html")
    assert page.path.is_file()
    assert isinstance(groupwise.diagnose(result), list)
    answer = groupwise.generate(result, "1 + 1 = ?", greedy=True)
    assert groupwise.generate(result, ["1 + 1 = ?", "2 + 2 = ?"], greedy=True)[0] == answer
    assert 0 < len(answer.encode()) <= 8 * 4, "as long as it was trained to answer: 8 tokens"
    one, two, other = groupwise.generate(result, ["1 + 1 = ?", "1 + 1 = ?", "2 + 2 = ?"])
    assert one != two
    assert two == groupwise.generate(result, "1 + 1 = ?", seed=1)
    assert other == groupwise.generate(result, "2 + 2 = ?")
    for wrong, said in (({"temperature": -1}, "temperature is -1"), ({"max_tokens": 0}, "max_tokens is 0")):
        with pytest.raises(ConfigError, match=said):
            groupwise.generate(result, "1 + 1 = ?", **wrong)
    (judged,) = groupwise.evaluate(result, overrides={"evaluation.problems": 4}, console=Console(quiet=True))
    assert judged.n == 4


def test_an_evaluation_shows_its_progress_and_takes_a_path(result, capsys):
    sums = result.folder.parent / "sums.jsonl"
    (judged,) = groupwise.evaluate(result, sums, {"evaluation.problems": 3})
    assert judged.n == 3
    shown = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert "sampled" in shown
    assert "was trained on" in shown  # the run's own file
    groupwise.evaluate(result, sums, {"evaluation.problems": 3}, console=Console(quiet=True))
    assert capsys.readouterr().out == ""


def test_an_evaluation_notes_another_form_of_answers(result, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("groupwise.chat.note_on_form", lambda config, run_config: f"asked otherwise than {run_config.name}")
    groupwise.evaluate(result, overrides={"evaluation.problems": 1})
    assert "asked otherwise than config.yaml" in capsys.readouterr().out


def test_memory_that_runs_out_is_one_sentence(result, monkeypatch):
    def short(*words, **named):
        raise MemoryError

    monkeypatch.setattr("groupwise.evaluation.evaluate_model", short)
    monkeypatch.setattr("groupwise.chat.make_speaker", short)
    with pytest.raises(TrainingError, match=r"memory ran out .*evaluation\.max_completion_tokens"):
        groupwise.evaluate(result, console=Console(quiet=True))
    with pytest.raises(TrainingError, match=r"memory ran out .*lower max_tokens"):
        groupwise.generate(result, "?")


ENGINE = """
from pathlib import Path
from groupwise.engines import Engine
from groupwise.types import Completion

class Mine(Engine):
    def __init__(self, policy, rollout):
        pass

    def refresh(self, policy_version):
        pass

    def serve(self, request, on_progress=None):
        return [(Completion("a", (65,), (-5.5,), "length", temperature=request.settings.temperature),) for _ in request.prompts]

    def close(self):
        with Path(__file__).with_name("closed").open("a") as told:
            told.write("closed ")
"""


def test_what_answers_is_closed_also_after_an_error(result, tmp_path):
    (tmp_path / "mine.py").write_text(ENGINE)
    engine = {"rollout.engine": f"{tmp_path / 'mine.py'}:Mine"}
    assert groupwise.generate(result, ["?", "!"], engine) == ["a", "a"]
    assert (tmp_path / "closed").read_text() == "closed "
    with pytest.raises(ConfigError, match="the conversation is"):
        groupwise.generate(result, ["?", "far too long" * 100], engine)
    assert (tmp_path / "closed").read_text() == "closed closed "


@pytest.fixture
def again(result, tmp_path):
    """``again(rewards, ...)``: the settings of `result` in a new run."""

    def run(rewards, **named):
        settings = groupwise.load_config(result.folder / "config.yaml", {"evaluation.at_start": False})
        return groupwise.train(settings, rewards=rewards, run_folder=tmp_path / "run", console=Console(quiet=True), **named)

    return run


def test_a_second_interrupt_is_an_error_and_not_the_end_of_the_process(again, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def interrupt(report):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        again({"letters": lower_case_share}, on_step=interrupt)
    assert ended == []


def test_a_stopped_run_s_model_is_gone_although_its_error_is_kept(again, monkeypatch):
    """A notebook keeps the last error, and resumes the run beside it."""
    from groupwise.training import start

    models, load = [], start.load_policy

    def loading(*words, **named):
        policy = load(*words, **named)
        models.append(weakref.ref(policy.model))
        return policy

    def letters(completions, **columns):
        os.kill(os.getpid(), signal.SIGTERM)
        return lower_case_share(completions)

    monkeypatch.setattr(start, "load_policy", loading)
    with pytest.raises(StoppedError, match="which is saved") as kept:
        again({"letters": letters}, check=False)
    gc.collect()
    assert kept.value.__traceback__ is not None
    assert [model() for model in models] == [None]


def test_an_error_that_is_its_own_cause_is_raised(again, monkeypatch):
    """As every one is where several processes train."""

    def fails(*_, **__):
        error = StoppedError("stopped", 143)
        raise error from error

    monkeypatch.setattr("groupwise.training.loop.train", fails)
    with pytest.raises(StoppedError, match="stopped"):
        again({}, check=False)


def test_an_evaluation_by_vllm_has_the_server_of_the_run(result, tmp_path, monkeypatch):
    folder, asked = Path(shutil.copytree(result.folder, tmp_path / "run")), []
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["rollout"] = {"engine": "vllm", "vllm": {"url": "http://a-node:8300"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr("groupwise.evaluation.evaluate_model", lambda model, config, **_: asked.append(config.rollout) or [])
    for overrides in ({}, {"rollout.engine": "vllm"}, ["engine=vllm"]):
        groupwise.evaluate(folder, overrides=overrides, console=Console(quiet=True))
    assert [rollout.engine for rollout in asked] == ["auto", "vllm", "vllm"]
    assert [rollout.vllm.url for rollout in asked[1:]] == ["http://a-node:8300"] * 2


def test_a_run_that_cannot_learn_is_refused_from_python_too_and_can_be_run_knowingly(result, tmp_path):
    settings = groupwise.load_config(result.folder / "config.yaml", {"training.steps": 0, "evaluation.at_start": False})

    def broken(completions, **columns):
        raise KeyError("solution")

    run = {
        "rewards": {"letters": lower_case_share, "broken": broken},
        "console": Console(quiet=True),
        "run_folder": tmp_path / "run",
    }
    with pytest.raises(RewardError, match=r"solution.*check=False"):
        groupwise.train(settings, **run)
    assert not (tmp_path / "run").exists()
    assert groupwise.train(settings, **run, check=False).folder == tmp_path / "run"
    assert groupwise.diagnose(settings, rewards=run["rewards"])[0].rule == "reward-fails"


def test_a_chart_of_a_single_step_and_of_a_flat_line_is_drawn():
    from groupwise.tracking.results import Chart

    assert "<circle" in Chart({"reward/mean": [(1, 0.5)]}).svg()
    assert "nan" not in Chart({"reward/mean": [(1, 0.5), (2, 0.5)], "empty": []}).svg()


def test_a_config_with_overrides_keeps_what_was_set():
    from groupwise.api import _config

    given = build_config({"optimizer": {"learning_rate": 1e-5}})
    assert _config(given, {"training.steps": 3}) == build_config({"optimizer": {"learning_rate": 1e-5}, "training": {"steps": 3}})
    assert _config(given, ()) == given


@pytest.mark.parametrize("overrides", [(), {"training.seed": 5}], ids=["alone", "overrides"])
def test_what_is_changed_inside_of_lists_and_mappings_is_what_runs(overrides):
    from groupwise.api import _config

    config = groupwise.Config(algorithm={"loss": {"type": "mine.py:loss"}})
    config.prompt.template_arguments["enable_thinking"] = False
    config.rewards.functions[1].weight = 0.1
    config.rewards.functions.extend(["length", {"function": "format", "arguments": {"once": False}}])
    config.output.trackers.append("tensorboard")
    config.algorithm.loss.settings["epsilon"] = 0.3
    config.algorithm.updates_per_batch = 2
    made = _config(config, overrides)
    assert made.prompt.template_arguments == {"enable_thinking": False}
    assert [(one.function, one.weight) for one in made.rewards.functions] == [
        ("correctness", 1), ("format", 0.1), ("length", 1), ("format", 1),
    ]  # fmt: skip
    assert made.rewards.functions[3].arguments == {"once": False}
    assert made.output.trackers == ["jsonl", "tensorboard"]
    assert (made.algorithm.loss.settings, made.algorithm.updates_per_batch) == ({"epsilon": 0.3}, 2)


def test_overrides_reach_into_the_lists_of_a_config():
    from groupwise.api import _config

    override = {"rewards.functions[0].weight": 2}
    assert _config(groupwise.load_config("quickstart"), override) == groupwise.load_config("quickstart", override)


@pytest.mark.parametrize("recipe", [recipe.name for recipe in recipes()])
def test_every_recipe_s_config_is_taken_as_it_is(recipe):
    from groupwise.api import _config

    config = groupwise.load_config(recipe)
    made = _config(config, ())
    assert made == config
    assert made.algorithm.model_fields_set == config.algorithm.model_fields_set


def test_a_section_that_was_put_in_as_an_object_keeps_its_type():
    from groupwise.api import _config

    algorithm = groupwise.Config().algorithm.model_copy(update={"loss": CispoLoss(epsilon=0.5), "kl": None})
    config = groupwise.Config().model_copy(update={"algorithm": algorithm})
    assert _config(config, ()).algorithm.loss == CispoLoss(epsilon=0.5)


def test_settings_are_prepared_as_they_are_trained(result):
    prepared = groupwise.prepare(str(result.folder / "config.yaml"), {"training.seed": 5}, rewards={"letters": lower_case_share})
    prepared.rewards.close()
    assert prepared.config.training.seed == 5
    assert prepared.train_prompts[0].token_ids
