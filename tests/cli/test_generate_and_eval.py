"""Talking to a model, judging it, and looking at data, through the command line, on a tiny random model."""

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from groupwise.chat import Speaker, answer_lines, load_to_ask, note_on_seen, refuse_named_code, settings_for_model
from groupwise.cli.evaluate import _models_and_settings
from groupwise.cli.models import _settings, converse
from groupwise.config import build_config, dump_config, load_config
from groupwise.config.load import load_run_config
from groupwise.config.schema import DataConfig, LoraConfig, ModelConfig, PromptConfig
from groupwise.data.named import NAMED
from groupwise.data.sources import load_held_out, load_problems, save_prepared
from groupwise.durable import write_bytes
from groupwise.engines.base import SamplingSettings
from groupwise.errors import ConfigError, ModelError
from groupwise.evaluation.models import data_overrides
from groupwise.models.adapters import attach, peft_config_of
from groupwise.models.embedded import EMBEDDED_NAME, embedded_folder
from groupwise.models.load import load_policy, with_base
from groupwise.training.start import _load
from groupwise.types import Completion


@pytest.fixture
def run_folder(tiny_model, small, tmp_path):
    """What a run leaves behind, as far as these commands look at it."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_model, folder / "final_model")
    config = load_config("quickstart", [*small, "model.revision=abc", "prompt.system=boxed", "prompt.style=plain"])
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    return folder


def test_one_prompt_gets_one_answer_and_the_same_seed_the_same(groupwise, tiny_model):
    words = ["generate", tiny_model, "Hello?", "--max-tokens", "5"]
    first = groupwise(*words)
    assert first.exit_code == 0, first.output
    assert first.stdout.endswith("\n")
    assert groupwise(*words).stdout == first.stdout
    assert groupwise(*words, "--seed", "1").stdout != first.stdout


def test_greedy_does_not_depend_on_the_seed_and_is_temperature_0(groupwise, tiny_model):
    words = ["generate", tiny_model, "Hello?", "--max-tokens", "5"]
    answers = {groupwise(*words, "--greedy", "--seed", seed).stdout for seed in (1, 2, 3)}
    assert len(answers) == 1
    assert groupwise(*words, "--temperature", "0").stdout in answers


def test_lines_of_standard_input_are_answered_each_by_itself(groupwise, tiny_model):
    words = ["generate", tiny_model, "--max-tokens", "4", "--greedy"]
    both = groupwise(*words, input="one\n\ntwo\n").stdout
    assert both == groupwise(*words, input="one\n").stdout + groupwise(*words, input="two\n").stdout


def test_standard_input_that_is_not_utf_8_is_one_sentence(groupwise, tiny_model):
    result = groupwise("generate", tiny_model, "--max-tokens", "4", input=b"caf\xe9\n")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 text" in result.stderr


def test_a_question_longer_than_the_context_is_one_sentence(groupwise, tiny_model):
    result = groupwise("generate", tiny_model, "why " * 300)
    assert result.exit_code == 2
    assert "the context of" in result.stderr


@pytest.fixture
def no_room(monkeypatch):
    """No sequence finds room for its keys and values."""
    import torch

    from groupwise.engines.builtin.cache import Cache

    def fail(self, sequences, positions):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Cache, "_pair", fail)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["generate", "MODEL", "Hello?"], "lower --max-tokens"),
        (
            ["eval", "MODEL", "data.source=PROBLEMS", "data.holdout=4", "evaluation.problems=2"],
            "evaluation.max_completion_tokens",
        ),
    ],
)
def test_without_room_for_one_sequence_it_is_one_sentence(groupwise, tiny_model, problems, no_room, words, remedy):
    result = groupwise(*(word.replace("MODEL", str(tiny_model)).replace("PROBLEMS", str(problems)) for word in words))
    assert result.exit_code == 1
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("groupwise: ")]
    assert said.startswith("groupwise: memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB): ")
    assert remedy in said
    assert "Traceback" not in result.output


def test_an_unknown_model_is_one_sentence(groupwise, tmp_path):
    result = groupwise("generate", tmp_path / "nothing", "Hello?")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


class Parrot:
    """An engine that says what it was asked, in two pieces, and remembers prompt and settings."""

    def __init__(self):
        self.prompts, self.settings = [], []

    def stream(self, prompt, settings, *, seed, on_text):
        self.prompts.append(prompt.text)
        self.settings.append(settings)
        text = prompt.messages[-1]["content"].upper()
        on_text(text[:2])
        on_text(text[2:])
        return Completion(text, (1,), (0.0,), "stop")


@pytest.fixture
def speaker(tiny_model):
    from types import SimpleNamespace

    from transformers import AutoTokenizer

    policy = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(tiny_model), context_length=200, name="parrot")
    return Speaker(policy, Parrot(), PromptConfig(), "Be brief.", SamplingSettings(50), 0)


def test_a_conversation_remembers_until_it_is_told_to_forget(speaker, monkeypatch):
    typed = iter(["first", "second", "/new", "third", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    out = io.StringIO()
    converse(speaker, out)
    first, second, third = speaker.engine.prompts
    assert "Be brief." in first
    assert "first" in second
    assert "FIRST" in second
    assert "first" not in third
    assert out.getvalue().count("FIRST\n") == 1
    assert "SECOND" in out.getvalue()


def test_a_conversation_ends_with_the_input(speaker, monkeypatch):
    def end(_):
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    out = io.StringIO()
    converse(speaker, out)
    assert out.getvalue().startswith(speaker.policy.name)
    assert speaker.messages == []


def test_the_answer_is_limited_to_what_the_context_leaves(speaker):
    speaker.answer("x" * 120, io.StringIO())
    length = len(speaker.policy.tokenizer(speaker.engine.prompts[0])["input_ids"])
    assert speaker.engine.settings[0].max_tokens == 200 - length < 50


def test_a_full_conversation_is_forgotten_and_goes_on(speaker, monkeypatch):
    typed = iter(["x" * 120, "y" * 100, "z", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    out = io.StringIO()
    converse(speaker, out)
    assert "the conversation was forgotten" in out.getvalue()
    assert len(speaker.engine.prompts) == 2
    assert "x" not in speaker.engine.prompts[1]


def test_a_terminal_is_not_steered_by_what_a_model_says(speaker):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    answer_lines(speaker, ["ab\x1b[2J"], out)
    assert "\x1b" not in out.getvalue()
    raw = io.StringIO()
    answer_lines(speaker, ["ab\x1b[2J"], raw)
    assert "\x1b" in raw.getvalue()


@pytest.mark.parametrize("named", ["run", "run/final_model"])
def test_a_model_that_a_run_made_is_used_with_that_run_s_settings(run_folder, named):
    config, source = settings_for_model(str(run_folder.parent / named))
    assert source == run_folder / "config.yaml"
    assert config.model.name == str(run_folder / "final_model")
    assert (config.model.revision, config.prompt.system, config.prompt.style) == (None, "boxed", "plain")


def test_a_run_s_model_is_known_from_within_and_by_a_link(run_folder, tmp_path, monkeypatch):
    (tmp_path / "best").symlink_to(run_folder / "final_model")
    monkeypatch.chdir(run_folder / "final_model")
    for named in (".", "../final_model", str(tmp_path / "best")):
        config, source = settings_for_model(named)
        assert source is not None, named
        assert (source.samefile(run_folder / "config.yaml"), config.prompt.system) == (True, "boxed"), named

    elsewhere = (run_folder / "final_model").rename(tmp_path / "on-another-disk")
    (run_folder / "final_model").symlink_to(elsewhere)
    assert settings_for_model(str(run_folder / "final_model"))[1] == run_folder / "config.yaml"


def test_a_checkpoint_s_whole_model_is_used_with_its_run_s_settings(run_folder, tiny_model, tmp_path, monkeypatch):
    step = run_folder / "checkpoints" / "step-2"
    shutil.copytree(tiny_model, step / "model")
    (step / "manifest.json").write_text('{"files": {}}')
    (tmp_path / "latest").symlink_to(step)
    monkeypatch.chdir(step)
    for named in (str(step), str(step / "model"), str(tmp_path / "latest"), ".", "model"):
        config, source = settings_for_model(named)
        assert source is not None, named
        assert (source.samefile(run_folder / "config.yaml"), config.prompt.system) == (True, "boxed"), named
        assert Path(config.model.name).samefile(step / "model"), named

    alone = shutil.copytree(step, tmp_path / "alone")
    config, source = settings_for_model(str(alone))
    assert (config.model.name, source) == (str(alone / "model"), None), "outside its run it is a model like any"


def test_a_model_whose_run_was_sampled_with_rounded_weights_is_asked_and_judged_as_it_is(run_folder):
    """On machines too that cannot round them, and by other engines."""
    config_file = run_folder / "config.yaml"
    config_file.write_text(yaml.safe_dump(yaml.safe_load(config_file.read_text()) | {"rollout": {"quantization": "8bit"}}))
    for overrides in ([], ["rollout.engine=vllm"], ["rollout.engine=transformers"]):
        assert settings_for_model(str(run_folder), overrides)[0].rollout.quantization == "none"


def test_a_model_whose_run_was_sampled_by_vllm_needs_no_server(run_folder):
    config_file = run_folder / "config.yaml"
    settings = yaml.safe_load(config_file.read_text()) | {"rollout": {"engine": "vllm", "vllm": {"url": "http://a-node:8300"}}}
    config_file.write_text(yaml.safe_dump(settings))
    assert settings_for_model(str(run_folder))[0].rollout.engine == "auto"
    assert settings_for_model(str(run_folder), ["rollout.engine=vllm"])[0].rollout.engine == "vllm"


def plant(folder, ran):
    """A model folder with Python code of its own, which tells in ``ran`` that it ran, and loads nothing."""
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\n")


@pytest.fixture
def planted(run_folder, tmp_path, monkeypatch):
    """A run's folder whose settings claim that its code is trusted, and which names a reward file too."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    plant(run_folder / "final_model", tmp_path / "ran")
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = yaml.safe_load((run_folder / "config.yaml").read_text())
    settings["model"]["trust_remote_code"] = True
    settings["rewards"]["functions"] = [{"function": f"{tmp_path / 'theirs.py'}:score"}]
    (run_folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return run_folder


@pytest.mark.parametrize("command", ["generate", "eval", "report", "doctor"])
def test_a_run_s_folder_cannot_grant_its_own_code_the_right_to_run(groupwise, planted, command, problems, tmp_path):
    words = {"generate": ["Hello?"], "eval": ["--data", problems]}.get(command, [])
    result = groupwise(command, planted, *words)
    assert not (tmp_path / "ran").exists()
    if words:
        assert result.exit_code == 2
        assert "add model.trust_remote_code=true to the command (--trust-remote-code" in result.stderr


NAMED_CODE = {
    "rollout.tools": lambda place: [place], "rollout.environment": str, "rollout.engine": str, "data.source": str, "data.eval_source": str,
    "algorithm.loss": lambda place: {"type": place}, "algorithm.advantage": lambda place: {"type": place},
}  # fmt: skip


@pytest.mark.parametrize("setting", NAMED_CODE)
@pytest.mark.parametrize("command", ["generate", "eval", "report", "doctor"])
def test_python_that_a_run_s_settings_name_is_not_imported(groupwise, run_folder, command, setting, problems, tmp_path):
    theirs = tmp_path / "theirs.py"
    theirs.write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef rows():\n    return [{{'question': 'Why?', 'answer': '1'}}] * 9\n"
    )
    settings = yaml.safe_load((run_folder / "config.yaml").read_text())
    section, name = setting.split(".")
    settings[section][name] = NAMED_CODE[setting](f"{theirs}:rows")
    (run_folder / "config.yaml").write_text(yaml.safe_dump(settings))
    result = groupwise(command, run_folder, *(["Hello?"] if command == "generate" else []))
    assert not (tmp_path / "ran").exists()
    if (section == "data" and command == "eval") or (name in ("tools", "environment") and command in ("generate", "eval")):
        assert result.exit_code == 2
        assert f"sets {setting} to {theirs}:rows" in result.stderr
        if section == "data":
            groupwise(command, run_folder, "model.trust_remote_code=true")
            assert (tmp_path / "ran").exists()
        elif command == "eval":
            other = groupwise(command, run_folder, f"{setting}={NAMED_CODE[setting]('of_mine:it')}".replace("'", ""))
            assert "cannot grant" not in other.stderr


@pytest.mark.parametrize("place", ["groupwise.d/tools.py:search", "groupwise.py:search", "groupwise.d\\tools.py:search"])
def test_a_file_that_is_called_like_a_module_of_ours_is_not_ours(place, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"rollout": {"tools": [place]}}))
    with pytest.raises(ConfigError, match="a run's folder cannot grant that"):
        refuse_named_code(load_run_config(config, []), config, data=False)
    config.write_text(yaml.safe_dump({"rollout": {"tools": ["groupwise.episodes.tools:calculator"]}}))
    refuse_named_code(load_run_config(config, []), config, data=False)


def test_who_asks_for_it_on_the_command_line_runs_the_code(groupwise, planted, tmp_path):
    result = groupwise("generate", planted, "Hello?", "--trust-remote-code")
    assert (tmp_path / "ran").exists()
    assert "has no attribute 'Config'" in result.stderr


def test_a_base_that_an_adapter_s_run_trusted_is_not_trusted_by_merge(groupwise, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = shutil.copytree(tiny_model, tmp_path / "base")
    plant(base, tmp_path / "ran")
    adapter = tmp_path / "run" / "final_model" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"model": {"name": str(base), "trust_remote_code": True}}))
    result = groupwise("merge", tmp_path / "run", tmp_path / "merged")
    assert (result.exit_code, (tmp_path / "ran").exists()) == (2, False)
    assert "--trust-remote-code" in result.stderr
    groupwise("merge", tmp_path / "run", tmp_path / "merged", "--trust-remote-code")
    assert (tmp_path / "ran").exists()


def test_an_adapter_that_no_run_made_goes_into_the_base_that_it_names(tmp_path, monkeypatch):
    """A config.yaml in a folder above it may be of other models, or of another tool. It takes no cache."""
    monkeypatch.setenv("GROUPWISE_CACHE", "~nobody-of-that-name")
    adapter = tmp_path / "project" / "out" / "checkpoint-100"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Org/Base"}))
    for theirs in ("model: {name: Org/Other}", "learning: fast"):
        (tmp_path / "project" / "config.yaml").write_text(theirs)
        assert _settings(adapter, None).model.name == "Org/Base"


def test_an_adapter_of_the_embedded_model_is_merged_on_another_machine_too(tmp_path):
    """Its config has the folder in which the model lay on the first."""
    base = {"base_model_name_or_path": f"/elsewhere/{embedded_folder().name}", "revision": "v2"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base))
    model = _settings(tmp_path, None).model
    assert (model.name, model.revision) == (EMBEDDED_NAME, None)


def test_a_revision_stays_with_the_model_that_it_was_set_for(tiny_model, tmp_path):
    """A run that pinned one of the Hub's goes on from its own folders, and a base of another place has none."""
    pinned = {"name": "Org/Model", "revision": "v2", "dtype": "float32", "device": "cpu"}
    adapter = tmp_path / "run" / "final_model" / "adapter"
    adapter.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"model": pinned | {"lora": {"rank": 4}}}))
    for base, revision in ((None, "v2"), ("Org/Model", "v2"), (str(tiny_model), None), ("Org/Other", None)):
        assert _settings(adapter, base).model.revision == revision, base

    policy = _load(build_config({"model": pinned}), Path(tiny_model))
    assert (policy.name, policy.model.config.model_type) == ("Org/Model", "qwen2"), "its checkpoint is a folder"

    for base, revision in ((str(tiny_model), None), ("Org/Model", "v2")):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        (adapter / "adapter_model.safetensors").write_bytes(b"")
        found, its = with_base(ModelConfig(name=str(adapter), revision="v2"))
        assert (found.name, found.revision, its is not None) == (base, revision, True)


def test_the_revision_of_its_base_goes_with_an_adapter(tiny_model, tmp_path):
    pytest.importorskip("peft")
    policy = load_policy(ModelConfig(name=str(tiny_model), device="cpu"))
    attach(policy.model, peft_config_of(LoraConfig(rank=2)), revision="v2").save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    written = json.loads(path.read_text())
    assert written["revision"] == "v2"
    for base, revision in (("Org/Model", "v2"), (str(tiny_model), None)):
        path.write_text(json.dumps(written | {"base_model_name_or_path": base}))
        assert with_base(ModelConfig(name=str(tmp_path)))[0].revision == revision
        assert _settings(tmp_path, None).model.revision == revision
    assert _settings(tmp_path, "Org/Other").model.revision is None


def test_settings_that_trust_code_are_refused_by_train_before_anything_is_read(groupwise, planted, tmp_path):
    result = groupwise("train", planted / "config.yaml", "--dry-run")
    assert result.exit_code == 2
    assert "add model.trust_remote_code=true to the command" in result.stderr
    assert not (tmp_path / "ran").exists()


def test_another_model_is_used_with_the_defaults(tiny_model):
    config, source = settings_for_model(str(tiny_model), ["evaluation.problems=3"])
    assert source is None
    assert config == load_config(None, [f"model.name={tiny_model}", "evaluation.problems=3"])


def test_eval_prints_json_and_nothing_else_to_standard_output(groupwise, tiny_model, problems):
    words = [tiny_model, "--data", problems, "model.dtype=float32", "rollout.max_completion_tokens=6", "--json"]
    result = groupwise("eval", *words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"] == str(tiny_model)
    assert [(row["mode"], row["n"]) for row in found["evaluations"]] == [("sampled", 12), ("greedy", 12)], "the whole file"
    for row in found["evaluations"]:
        low, high = row["strict_interval"]
        assert -1e-9 <= low - 1e-9 <= row["strict_accuracy"] <= high + 1e-9 <= 1 + 1e-9


def test_eval_prints_a_table_and_uses_the_run_s_settings(groupwise, run_folder):
    result = groupwise("eval", run_folder, "evaluation.modes=[greedy]")
    assert result.exit_code == 0, result.output
    assert "strict" in result.stdout
    assert "greedy" in result.stdout
    assert "settings from" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("command", ["train", "eval"])
def test_an_engine_of_one_s_own_is_told_of_the_weights_before_it_samples(
    groupwise, command, tiny_model, small, problems, tmp_path
):
    """It may have to send them somewhere: what it samples before is another model's."""
    (tmp_path / "engine.py").write_text(
        "from groupwise.engines import Engine\n"
        "from groupwise.types import Completion\n"
        "class Told(Engine):\n"
        "    def __init__(self, policy, rollout):\n"
        "        self.told = []\n"
        "    def refresh(self, policy_version):\n"
        "        self.told.append(policy_version)\n"
        "    def serve(self, request, on_progress=None):\n"
        "        assert self.told, 'it knows no weights'\n"
        "        temperature = request.settings.temperature\n"
        "        say = lambda sample: Completion('a', (65,), (-5.5,), 'length', sample, self.told[-1], temperature)\n"
        "        return [tuple(map(say, range(request.samples_per_prompt))) for _ in request.prompts]\n",
        encoding="utf-8",
    )
    engine = f"rollout.engine={tmp_path / 'engine.py'}:Told"
    words = ["quickstart", *small, "training.steps=1", "evaluation.at_start=true", "--run-folder", tmp_path / "run"]
    if command == "eval":
        words = [tiny_model, "--data", problems, "model.dtype=float32", "rollout.max_completion_tokens=6"]
    result = groupwise(command, *words, engine, "--json")
    assert result.exit_code == 0, result.output


def test_words_that_are_not_utf_8_are_one_sentence_before_anything_is_loaded(groupwise, monkeypatch):
    """The system hands the shell's other bytes over as halves of characters, which no tokenizer takes."""
    monkeypatch.setattr("groupwise.chat.make_speaker", lambda *_: pytest.fail("the model was loaded"))
    for words, what in ((["caf\udce9"], "the prompt"), (["hello", "--system", "caf\udce9"], "the system prompt")):
        result = groupwise("generate", "smollm2-135m-instruct", *words)
        assert result.exit_code == 2
        assert f"{what} 'caf\\udce9' is not UTF-8 text: write it in UTF-8" in result.stderr


def test_a_line_and_a_turn_that_are_not_utf_8_are_told(speaker, monkeypatch):
    """In the C locale standard input gives halves of characters too. A conversation goes on."""
    with pytest.raises(ConfigError, match=r"the prompt .* is not UTF-8 text"):
        answer_lines(speaker, ["caf\udce9"], io.StringIO())
    told, out = iter(["one", "caf\udce9", "/exit"]), io.StringIO()
    monkeypatch.setattr("builtins.input", lambda _: next(told))
    converse(speaker, out)
    assert "is not UTF-8 text" in out.getvalue()
    assert "forgotten" not in out.getvalue()
    assert [message["content"] for message in speaker.messages[:1]] == ["one"]


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "smollm2-135m-instruct", "--data", "arithmetic", "--out", "NAME.jsonl"),
        ("data", "prepare", "arithmetic", "NAME", "data.arithmetic.problems=5", "data.holdout=2"),
        ("data", "inspect", "NAME.jsonl"),
        ("plan", "quickstart", "model.name=NAME"),
        ("train", "quickstart", "--dry-run", "output.folder=NAME"),
    ],
)
def test_a_name_that_is_too_long_for_a_file_is_one_sentence(groupwise, words):
    result = groupwise(*(word.replace("NAME", "n" * 300) for word in words))
    assert result.exit_code == 2
    assert re.fullmatch(r"groupwise: the name 'n{40}\.\.\.' of 3\d\d bytes is too long for a file: shorten it\n", result.stderr)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("folder", "is a folder, and records are written to a file: name another --out"),
        ("pipe", "is no regular file, and records are written to a file: name another --out"),
        ("to_pipe", "is no regular file, and records are written to a file: name another --out"),
        ("file/mine.jsonl", "cannot be written (Not a directory: "),
        ("/proc/sys/mine.jsonl", "cannot be written ("),
        ("astray", "cannot be written ("),
    ],
)
def test_records_that_cannot_be_written_are_refused_before_anything_is_loaded(groupwise, tmp_path, monkeypatch, out, message):
    monkeypatch.setattr("groupwise.cli.evaluate._judge", None)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "astray").symlink_to("/proc/sys/mine.jsonl")
    before = sorted(tmp_path.iterdir())
    result = groupwise("eval", "smollm2-135m-instruct", "--data", "arithmetic", "--out", tmp_path / out)
    assert result.exit_code == 2
    assert message in flat(result.stderr)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "pipe").is_fifo()


def test_where_no_trial_file_can_be_written_no_records_are_asked_for(groupwise, tmp_path, monkeypatch):
    def no_room(**place):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("groupwise.cli.evaluate._judge", None)
    monkeypatch.setattr("groupwise.durable.tempfile.TemporaryFile", no_room)
    result = groupwise("eval", "smollm2-135m-instruct", "--data", "arithmetic", "--out", tmp_path / "new" / "mine.jsonl")
    assert result.exit_code == 2
    assert f"cannot be written (No space left on device: {tmp_path}): records need a writable folder" in flat(result.stderr)


def test_a_place_for_records_that_may_not_be_looked_into_is_named(groupwise, tmp_path, monkeypatch, deny):
    monkeypatch.setattr("groupwise.cli.evaluate._judge", None)
    deny("exists")
    result = groupwise("eval", "smollm2-135m-instruct", "--data", "arithmetic", "--out", tmp_path / "closed" / "mine.jsonl")
    assert result.exit_code == 2
    assert "cannot be written (Permission denied: " in flat(result.stderr)


def test_a_tilde_in_out_is_the_home_folder(groupwise, tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.cli.evaluate._judge", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = groupwise("eval", "smollm2-135m-instruct", "--data", "arithmetic", "--out=~/")
    assert f"--out {str(tmp_path)!r} is a folder" in flat(result.stderr)


def test_what_a_stopped_evaluation_left_must_be_a_file(groupwise, tiny_model, problems, tmp_path):
    (tmp_path / "mine.jsonl.partial").mkdir()
    result = groupwise("eval", tiny_model, "--data", problems, "--out", tmp_path / "mine.jsonl")
    assert result.exit_code == 2
    assert "mine.jsonl.partial' cannot be read (" in flat(result.stderr)


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/target")
    for content in (b"first", b"second"):
        write_bytes(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "there" / "target").read_bytes() == content
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["target"]


def test_a_name_as_long_as_a_file_s_may_be_is_written(tmp_path):
    longest = tmp_path / f"{'é' * 120}{'x' * 9}.jsonl"
    assert len(longest.name.encode()) == 255
    write_bytes(longest, b"whole")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(longest.name, b"whole")]


@pytest.mark.parametrize(
    ("data", "source", "eval_source", "eval_split"),
    [
        ("gsm8k:test", "gsm8k", "gsm8k", "test"),
        ("arithmetic", "arithmetic", None, None),
        ("math500", "math500", "math500", None),
        ("aime24:train", "aime24", "aime24", "train"),
        ("owner/name", "owner/name", "owner/name", None),
        ("my_rows.py:rows", "my_rows.py:rows", "my_rows.py:rows", None),
    ],
)
def test_data_says_what_is_judged(data, source, eval_source, eval_split):
    chosen = load_config("gsm8k-0.5b", ["data.folder=/data", *data_overrides(data)]).data
    assert (chosen.source, chosen.eval_source, chosen.eval_split) == (source, eval_source, eval_split)
    assert chosen.folder == ("/data" if source in NAMED else None), "where data sets known by name are looked for"


def test_a_split_of_what_is_read_whole_is_refused(tmp_path):
    (tmp_path / "mine.jsonl").write_text("{}\n")
    for source, what in (tmp_path / "mine.jsonl", "one file"), ("my_rows.py:rows", "a function"):
        with pytest.raises(ConfigError, match=rf"split 'validation', but '.*' is {what}, which has none: leave :validation out"):
            data_overrides(f"{source}:validation")


def test_a_long_setting_is_a_setting():
    long = "prompt.system=" + "a" * 300
    assert _models_and_settings(["m", long]) == (["m"], [long])


TABLE = ["data.source=table.csv", "data.prompt_column=task", "data.answer_column=result"]
"""Data of a run's own."""


@pytest.fixture
def own_data(run_folder, tmp_path, monkeypatch):
    """Write the settings of a run with other data, in a folder with GSM8K and AIME as files, two tables and a prepared set."""
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1 + 1?", "answer": "1 + 1 = 2\\n#### 2"}\n')
    (tmp_path / "table.csv").write_text("task,result\n2 + 3?,#### 5\n3 + 3?,#### 6\n")
    shutil.copy(tmp_path / "table.csv", tmp_path / "other.csv")
    save_prepared(load_problems(DataConfig(source=str(tmp_path / "sums.jsonl"), holdout=3)), str(tmp_path / "prepared"))
    (tmp_path / "aime24.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GROUPWISE_DATA", str(tmp_path))

    def write(*settings):
        config = load_config("quickstart", ["data.holdout=1", *settings])
        (run_folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        return run_folder

    return write


@pytest.mark.parametrize(
    ("settings", "data", "answers"),
    [
        (TABLE, "gsm8k:test", ["2"]),
        ([*TABLE, "data.answer_format=plain"], "gsm8k:test", ["2"]),
        ([*TABLE, "data.answer_format=plain"], "other.csv", ["#### 5", "#### 6"]),
        (["data.source=openai/gsm8k", "data.subset=main", "data.split=test"], "sums.jsonl", [str(2 * a + 1) for a in range(12)]),
        (["data.source=owner/name", "data.subset=algebra"], "gsm8k:test", ["2"]),
        (["data.source=my_rows.py:rows", "data.answer_format=boxed"], "prepared", 3),
    ],
)
def test_other_data_are_not_read_by_what_a_run_says_of_its_own(own_data, settings, data, answers):
    """Its columns may be another file's too; a data set known by name has its own, and so has a prepared folder."""
    config, _ = settings_for_model(str(own_data(*settings)), data_overrides(data))
    found = [problem.answer for problem in load_held_out(config.data)]
    assert len(found) == answers if isinstance(answers, int) else sorted(found) == sorted(answers)


def test_what_a_run_says_of_its_data_holds_for_these_and_what_the_command_says_wins(own_data):
    run = str(own_data("data.source=owner/name", "data.subset=algebra"))
    assert settings_for_model(run, data_overrides("owner/name:test"))[0].data.subset == "algebra"
    assert settings_for_model(run, [*data_overrides("owner/other"), "data.subset=own"])[0].data.subset == "own"
    run = str(own_data(*TABLE))
    assert settings_for_model(run, [*data_overrides("gsm8k"), "data.answer_column=answer"])[0].data.answer_column == "answer"


def test_misspelt_arguments_of_the_template_are_told_before_weights_are_read(tiny_model, monkeypatch):
    monkeypatch.setattr("groupwise.chat.load_policy", lambda config: pytest.fail("weights were read"))
    config, _ = settings_for_model(str(tiny_model), ["prompt.template_arguments={enable_thinkng: false}"])
    with pytest.raises(ModelError, match="has enable_thinkng, which the model's chat template does not ask for"):
        load_to_ask(config)


def test_data_that_have_moved_are_the_run_s_own(own_data):
    run = str(own_data("data.source=rows", "data.split=hard", "data.prompt_column=task"))
    moved = settings_for_model(run, ["data.source=/elsewhere/rows"])[0].data
    assert (moved.split, moved.prompt_column) == ("hard", "task")


def test_eval_says_where_a_run_is_asked_in_another_form_than_it_was_trained_with(groupwise, own_data):
    words = ["model.dtype=float32", "model.device=cpu", "evaluation.modes=[greedy]", "rollout.max_completion_tokens=4"]
    run = own_data(*TABLE, "prompt.system=auto")
    told = "prompt.system is auto, which asks for boxed answers with aime24, and the run was trained with xml: prompt.system=xml asks"
    for more, says in (["aime24"], True), (["aime24", "prompt.system=xml"], False), (["gsm8k"], False):
        result = groupwise("eval", run, "--data", *more, *words)
        assert result.exit_code == 0, result.output
        assert (told in flat(result.stderr)) is says, more


@pytest.mark.parametrize(
    ("settings", "data", "seen"),
    [
        (TABLE, "./table.csv", True),
        (TABLE, "other.csv", False),
        (TABLE, None, False),
        (["data.source=gsm8k"], "gsm8k:train", True),
        (["data.source=gsm8k"], "gsm8k:test", False),
        (["data.source=prepared"], "prepared:train", True),
        (["data.source=prepared"], "prepared", False),
        ([], "arithmetic", False),
    ],
)
def test_problems_that_a_run_was_trained_on_are_known(own_data, settings, data, seen):
    run = own_data(*settings)
    asked = settings_for_model(str(run), data_overrides(data))[0].data
    assert (note_on_seen(str(run), asked, run / "config.yaml") is not None) is seen


def test_eval_says_where_it_judges_what_a_run_was_trained_on(groupwise, own_data):
    words = ["model.dtype=float32", "model.device=cpu", "evaluation.modes=[greedy]", "rollout.max_completion_tokens=4"]
    run = own_data(*TABLE)
    told = f"these problems include those that {run} was trained on: leave --data (in Python: data) out for its held-out ones"
    for more, says in (["--data", "table.csv"], True), ([], False):
        result = groupwise("eval", run, *more, *words)
        assert result.exit_code == 0, result.output
        assert (told in flat(result.stderr)) is says, more


def test_processes_do_not_lay_a_model_over_all_devices_each(groupwise, tiny_model, problems, monkeypatch):
    """Neither by the option nor by the setting of that name."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in (["--device-map", "auto"], ["model.device_map=auto"]):
        refused = groupwise("eval", tiny_model, "--data", problems, *words)
        assert refused.exit_code == 2
        assert "device_map is auto, which lays one model over all devices, but several processes take one each" in refused.stderr


def test_models_judged_on_other_problems_are_shown_and_written_all_the_same(groupwise, tiny_model, problems, tmp_path):
    words = ["--data", problems, "rollout.max_completion_tokens=4", "model.dtype=float32", "evaluation.modes=[greedy]"]
    before, both = tmp_path / "before.jsonl", tmp_path / "both.jsonl"
    assert groupwise("eval", tiny_model, *words, "--out", before).exit_code == 0
    result = groupwise("eval", before, tiny_model, *words, "evaluation.problems=3", "--out", both)
    assert result.exit_code == 2
    assert "cannot be compared (greedy)" in flat(result.stderr)
    assert len(both.read_text().splitlines()) == 12 + 3
    assert "strict" in result.stdout
    assert f"{tiny_model} ({before}) and {tiny_model} cannot be compared" in flat(result.stderr)
    again = groupwise("eval", both, "--json")
    assert [m["model"] for m in json.loads(again.stdout)["models"]] == [f"{tiny_model} ({before})", str(tiny_model)]


def test_samples_without_a_sampled_mode_are_said_to_do_nothing(groupwise, tiny_model, problems):
    words = ["--data", problems, "rollout.max_completion_tokens=4", "model.dtype=float32", "evaluation.modes=[greedy]"]
    told = "evaluation.samples=3 has no effect here: evaluation.modes has no sampled mode."
    for more in (["--samples", "3"], ["evaluation.samples=3"]):
        assert told in flat(groupwise("eval", tiny_model, *words, *more).stderr)


def test_records_of_other_models_are_not_replaced(groupwise, tiny_model, run_folder, problems, tmp_path):
    words = ["--data", problems, "rollout.max_completion_tokens=4", "model.dtype=float32", "evaluation.problems=2"]
    out, other = tmp_path / "mine.jsonl", tmp_path / "other.jsonl"
    greedy = [*words, "evaluation.modes=[greedy]", "--out", out]
    assert groupwise("eval", tiny_model, *greedy).exit_code == 0
    before = out.read_bytes()
    other.write_text(out.read_text().replace(json.dumps(str(tiny_model)), '"another"'))
    for asked in ([run_folder, *greedy], [tiny_model, *words, "evaluation.modes=[sampled]", "--out", out], [other, "--out", out]):
        refused = groupwise("eval", *asked)
        assert refused.exit_code == 2
        assert f"has greedy completions of {tiny_model}, which this command does not judge and would lose" in flat(refused.stderr)
        assert out.read_bytes() == before
    for asked in ([tiny_model, run_folder, *greedy], [out, "--out", out]):
        assert groupwise("eval", *asked).exit_code == 0
        assert len(out.read_bytes().splitlines()) == 2 * 2
    other.write_text("my notes\n")
    refused = groupwise("eval", tiny_model, *words, "--out", other)
    assert (refused.exit_code, other.read_text()) == (2, "my notes\n")
    assert "would be replaced, and has no records" in flat(refused.stderr)


def test_two_models_are_compared_and_their_records_judged_again(groupwise, tiny_model, run_folder, problems, tmp_path):
    out = tmp_path / "both.jsonl"
    words = ["--data", problems, "--samples", "3", "rollout.max_completion_tokens=4", "model.dtype=float32", "--out", out]
    result = groupwise("eval", tiny_model, run_folder, *words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    for model in (tiny_model, run_folder):
        assert f"{Path(model).name}, sampled: strict" in result.stderr, "whose figures and examples these are"
    assert [row["model"] for row in found["models"]] == [str(tiny_model), str(run_folder)]
    assert [(row["mode"], row["samples"]) for row in found["evaluations"]] == [("sampled", 3), ("greedy", 1)]
    asked = [row["conditions"] for model in found["models"] for row in model["evaluations"]]
    assert {(row["style"], row["prompt_format"]) for row in asked} == {
        ("boxed", 'User:/Assistant: with the system prompt "Reason step by step, then put the final answer in \\boxed{}."')
    }, "both are asked as the run's model was trained"
    assert [row["test"] for row in found["comparisons"]] == ["exact paired permutation test", "exact McNemar test"]
    assert all(row["p_value"] == 1.0 for row in found["comparisons"]), "the two are one model"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2 * 4 * (3 + 1), "the run judged itself on 4"
    again = json.loads(groupwise("eval", out, "--json").stdout)
    assert [m["model"] for m in again["models"]] == [str(tiny_model), str(run_folder)]
    for before, after in zip(found["models"], again["models"], strict=True):
        assert [e["figures"] for e in before["evaluations"]] == [e["figures"] for e in after["evaluations"]]


def test_the_report_says_how_models_were_asked(groupwise, tiny_model, problems):
    settings = ["model.dtype=float32", "rollout.max_completion_tokens=4", "evaluation.problems=5", "data.source=arithmetic"]
    result = groupwise("eval", tiny_model, "--data", problems, "--shots", "1", *settings, "prompt.style=plain")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "greedy (temperature 0), 1 sample of each of 5 of the 12 problems from" in shown
    assert "temperature 1, 1 sample of each" in shown
    assert "User:/Assistant: with the system prompt" in shown
    assert "1 shot; at most 4 tokens; seed 1234" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluation.problems=3"], "needs a model to judge"),
        (["some-model", "some-model"], "names a model twice"),
    ],
)
def test_what_to_judge_must_be_clear(groupwise, words, message):
    result = groupwise("eval", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_inspect_shows_rows_prompts_lengths_and_bad_answers(groupwise, tiny_model, problems):
    with problems.open("a", encoding="utf-8") as out:
        out.write('{"question": "and this?", "answer": ""}\n')
    found = json.loads(groupwise("data", "inspect", problems, "--model", tiny_model, "--rows", "2", "--json").stdout)
    assert (found["rows"], found["usable"], found["bad_rows"]["count"]) == (13, 12, 1)
    assert len(found["examples"]) == 2
    shown = groupwise("data", "inspect", problems, "--model", tiny_model, "--rows", "2").stdout
    assert "13 rows, 12 usable" in shown
    assert found["examples"][1]["prompt"] in shown
    assert "sums.jsonl line 13" in shown
    assert "1 rows cannot be used" in shown


def test_inspect_shows_no_system_prompt_that_the_rows_replace(groupwise, tiny_model, tmp_path):
    asked = [{"role": "system", "content": "Answer in \\boxed{}."}, {"role": "user", "content": "2 + 2?"}]
    rows = [{"prompt": asked, "answer": "4"}, {"prompt": asked[1:], "answer": "4"}]
    (tmp_path / "all.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    look = ("data", "inspect", "--model", tiny_model)
    every, some = (groupwise(*look, tmp_path / name).stdout for name in ("all.jsonl", "some.jsonl"))
    assert "in the xml style; system prompt: each row's own\n" in every
    assert "note: prompts ask for the answer by \\boxed, but it is looked for by <answer>" in every
    assert "and </answer>. (of 1 rows their own)\n" in some
    assert "note:" not in some


def test_inspect_refuses_a_source_that_is_not_there(groupwise, tiny_model):
    result = groupwise("data", "inspect", "nowhere.csv", "--model", tiny_model)
    assert result.exit_code == 2
    assert "nowhere.csv" in result.stderr
    misspelt = groupwise("data", "inspect", "quikstart", "--model", tiny_model)
    assert misspelt.exit_code == 2
    assert "did you mean arithmetic, the data of the recipe quickstart?" in " ".join(misspelt.stderr.split())


def test_prepare_writes_a_folder_that_train_takes(groupwise, small, problems, tmp_path):
    out = tmp_path / "prepared"
    counted = json.loads(groupwise("data", "prepare", problems, out, "data.holdout=3", "--json").stdout)
    assert (counted["train"], counted["held_out"]) == (9, 3)
    result = groupwise("train", "quickstart", *small, f"data.source={out}", "--dry-run")
    assert "9 training problems, 3 held out" in result.stdout
    found = json.loads(
        groupwise("eval", small[0].partition("=")[2], "--data", out, "rollout.max_completion_tokens=4", "--json").stdout
    )
    assert found["evaluations"][0]["n"] == 3


def test_a_line_knows_nothing_of_the_line_before(speaker):
    answer_lines(speaker, ["one", " ", "two"], io.StringIO())
    assert len(speaker.engine.prompts) == 2
    assert "one" not in speaker.engine.prompts[1].casefold()


def test_no_line_is_answered_once_nobody_reads_the_answers(speaker):
    class Cut(io.StringIO):
        """As a pipe whose reader has gone, after the first answer."""

        @property
        def lost(self):
            return self.getvalue().count("\n") == 1

    answer_lines(speaker, ["one", "two", "three"], Cut())
    assert len(speaker.engine.prompts) == 1


def test_an_evaluation_that_is_stopped_goes_on(groupwise, tiny_model, run_folder, problems, tmp_path, monkeypatch):
    from groupwise.engines.wrappers import DealtEngine

    out, calls, stops = tmp_path / "both.jsonl", [], [2, 5]
    partial = tmp_path / "both.jsonl.partial"
    words = ["--data", problems, "rollout.max_completion_tokens=4", "model.dtype=float32", "rollout.max_concurrent_sequences=5"]
    whole = tmp_path / "whole.jsonl"
    assert groupwise("eval", tiny_model, run_folder, *words, "--out", whole).exit_code == 0

    serve = DealtEngine.serve

    def stop(engine, request, on_progress=None):
        if len(calls) in stops:
            stops.remove(len(calls))
            raise KeyboardInterrupt
        calls.append(len(request.prompts))
        return serve(engine, request, on_progress)

    monkeypatch.setattr(DealtEngine, "serve", stop)
    assert groupwise("eval", tiny_model, run_folder, *words, "--out", out).exit_code != 0
    assert calls == [4, 4], "the first model's two modes"
    assert len(partial.read_text().splitlines()) == 8
    refused = groupwise("eval", tiny_model, run_folder, *words, "--out", out)
    assert refused.exit_code == 2
    assert "holds 8 completions that an evaluation judged before it was stopped: resume it with --resume" in flat(refused.stderr)
    result = groupwise("eval", tiny_model, run_folder, *words, "--out", out, "--resume", "--json")
    assert result.exit_code == 0, result.output
    assert calls[2:] == [4, 4]
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()
    again = groupwise("eval", tiny_model, run_folder, *words, "--out", out, "--resume", "--json")
    assert len(calls) == 4, "all of it is there"
    figures = [[e["figures"] for e in m["evaluations"]] for m in json.loads(result.stdout)["models"]]
    assert [[e["figures"] for e in m["evaluations"]] for m in json.loads(again.stdout)["models"]] == figures
    assert out.read_bytes() == whole.read_bytes()
    fewer = groupwise("eval", run_folder, *words, "--out", out, "--resume")
    assert fewer.exit_code == 2
    assert f"completions of {tiny_model}, which this command does not judge and would lose" in flat(fewer.stderr)
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()
    third = tmp_path / "third"
    shutil.copytree(tiny_model, third)
    assert groupwise("eval", tiny_model, run_folder, third, *words, "--out", out, "--resume").exit_code != 0
    assert len(partial.read_text().splitlines()) == 2 * 8 + 4
    added = groupwise("eval", tiny_model, run_folder, third, *words, "--out", out, "--resume", "--json")
    assert len(calls) == 6, "the third model alone"
    assert [m["model"] for m in json.loads(added.stdout)["models"]] == [str(tiny_model), str(run_folder), str(third)]
    assert out.read_bytes().startswith(whole.read_bytes())
    assert len(out.read_bytes().splitlines()) == 3 * 8


def test_resume_needs_a_file(groupwise, tiny_model, problems):
    result = groupwise("eval", tiny_model, "--data", problems, "--resume")
    assert result.exit_code == 2
    assert "name the same --out FILE.jsonl as before" in flat(result.stderr)


def flat(text):
    return " ".join(text.split())
