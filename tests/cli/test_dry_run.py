"""A dry run finds every mistake that can be found without weights, and says it in one sentence with exit code 2."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import pytest
import yaml

from groupwise.config import build_config, load_config
from groupwise.config.schema import DataConfig
from groupwise.data.sources import load_problems, save_prepared
from groupwise.errors import DataError
from groupwise.tracking import RunFolder
from groupwise.training.setup import prepare


@pytest.fixture
def no_weights(monkeypatch):
    """Loading weights is an error."""
    import transformers

    import groupwise.training.start  # noqa: F401  # takes load_policy's name as it is first imported, which must be the real one

    def forbidden(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", forbidden)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", forbidden)
    monkeypatch.setattr("groupwise.models.load.load_policy", forbidden)


def refusal(groupwise, *words):
    result = groupwise("train", "quickstart", "--dry-run", *words)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("groupwise: ")
    assert "Traceback" not in result.stderr
    message = result.stderr.removeprefix("groupwise: ").rstrip("\n")
    assert "\n" not in message
    return message


def test_a_dry_run_shows_settings_rewards_and_the_first_prompt_without_weights(groupwise, small, no_weights):
    result = groupwise("train", "quickstart", *small, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "completions_per_prompt: 2" in result.stdout
    assert "accuracy" in result.stdout
    assert "<|im_start|>user\n" in result.stdout
    assert "8 training problems, 4 held out; 4 completions a step for 2 steps. No weights were loaded." in result.stdout


def test_a_dry_run_shows_what_differs_from_the_defaults_and_all_on_request(groupwise, small, no_weights):
    short, whole = (groupwise("train", "quickstart", *small, "--dry-run", *more).stdout for more in ((), ("--all",)))
    assert "max_grad_norm" not in short
    assert "max_grad_norm: 1.0" in whole
    settings = yaml.safe_load(short.partition("\n")[2].partition("\n\n")[0])
    assert build_config(settings) == load_config("quickstart", small)
    assert len(short.splitlines()) < 80 < len(whole.splitlines())
    assert "<|im_start|>user\n" in "\n".join(short.splitlines()[-30:]), "the prompt is there to be read"


def test_a_dry_run_refuses_the_folders_that_the_run_would(groupwise, small, no_weights, tmp_path):
    used, file = tmp_path / "used", tmp_path / "file"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    file.write_text("mine")
    elsewhere = [(file / "run", "cannot be written"), ("/proc/run", "cannot be written")]
    for folder, why in [(used, "is not empty"), (file, "is a file"), *elsewhere]:
        for words in (["--run-folder", folder], [f"output.folder={folder}"]):
            assert why in refusal(groupwise, *small, *words)
    result = groupwise("train", "quickstart", *small, "--dry-run", "--run-folder", tmp_path / "new" / "run")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob("**/.groupwise-*"))


BROKEN = {
    "a number": "return 1.0",
    "too few": "return [1.0]",
    "words": "return ['good' for _ in completions]",
    "nan": "return [float('nan') for _ in completions]",
    "raises": "raise KeyError('solution')",
    "one that dislikes empty texts": "return [1 / len(str(c[-1]['content'])) for c in completions]",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
def test_a_reward_that_fails_is_refused_before_any_weights(groupwise, small, no_weights, tmp_path, body, dry):
    code = tmp_path / "mine.py"
    code.write_text(f"def score(completions, **columns):\n    {body}\n", encoding="utf-8")
    words = [*small, f"rewards.functions=['{code}:score']", "--run-folder", tmp_path / "run", *dry]
    result = groupwise("train", "quickstart", *words)
    assert result.exit_code == 2, result.output
    assert "score" in result.stderr
    assert "--no-check" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Everything checks out" not in result.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
def test_a_learning_rate_of_5_is_refused_before_any_weights(groupwise, small, no_weights, tmp_path, dry):
    result = groupwise("train", "quickstart", *small, "optimizer.learning_rate=5", "--run-folder", tmp_path / "run", *dry)
    assert result.exit_code == 2
    assert "optimizer.learning_rate is 5" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.fixture
def little_memory(monkeypatch):
    """A megabyte is free."""
    from groupwise.training import short_memory

    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: 2**20)
    monkeypatch.setattr(short_memory.psutil.Process, "memory_info", lambda process: SimpleNamespace(rss=0))


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
def test_far_too_little_memory_is_refused_before_any_weights(groupwise, small, no_weights, little_memory, tmp_path, dry):
    began = time.monotonic()
    result = groupwise("train", "quickstart", *small, "--run-folder", tmp_path / "run", *dry)
    assert time.monotonic() - began < 20, "it takes well below a second, and is not to be a matter of minutes anywhere"
    assert result.exit_code == 2
    assert re.search(r"this run will need about \d\.\d GiB of memory .* and 0\.0 GiB are free", result.stderr)
    assert "training.micro_batch_tokens" in result.stderr
    assert "--no-check" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_with_too_little_memory_can_be_begun_knowingly(groupwise, small, little_memory, tmp_path):
    result = groupwise("train", "quickstart", *small, "--no-check", "--run-folder", tmp_path / "run")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "this run will need about" in said
    assert said.count("memory is short: a pass of a step has at most") == 1


def test_what_is_critical_can_be_run_knowingly(groupwise, small, tmp_path):
    words = [*small, "optimizer.learning_rate=5", "training.steps=0", "--no-check", "--run-folder", tmp_path / "run"]
    assert "Everything checks out" not in groupwise("train", "quickstart", *words, "--dry-run").stdout
    result = groupwise("train", "quickstart", *words)
    assert result.exit_code == 0, result.output


def test_warnings_are_told_before_the_run_and_not_again(groupwise, small, tmp_path):
    words = [*small, "optimizer.learning_rate=1e-3", "training.steps=11", "--run-folder", tmp_path / "run"]
    result = groupwise("train", "quickstart", *words)
    assert result.exit_code == 0, result.output
    assert "doctor, before the run: warning: Learning rate far above" in " ".join(result.stdout.split())
    assert result.stdout.count("Learning rate far above") == 1


def test_a_dry_run_has_its_findings_in_json(groupwise, small, no_weights):
    found = json.loads(groupwise("train", "quickstart", *small, "optimizer.learning_rate=1e-3", "--dry-run", "--json").stdout)
    assert "rate-too-high" in [finding["rule"] for finding in found["findings"]]


def test_a_dry_run_as_json_is_json_and_its_config_reads_back(groupwise, small, no_weights, tmp_path):
    found = json.loads(groupwise("train", "quickstart", *small, "--dry-run", "--json").stdout)
    assert (found["training_problems"], found["held_out_problems"], found["context_length"]) == (8, 4, 512)
    assert [row["name"] for row in found["rewards"]] == ["accuracy"]
    first = found["first_prompt"]
    assert first["text"].endswith("<|im_start|>assistant\n")
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(found["config"]), encoding="utf-8")  # JSON is YAML
    assert load_config(again) == load_config("quickstart", small)


@pytest.mark.parametrize("words", [["train", "--dry-run"], ["doctor"]], ids=["dry run", "doctor"])
def test_settings_without_effect_are_told_before_a_run(groupwise, small, no_weights, words):
    words = [*words, "quickstart", *small, "top_p=0.9"]
    assert "note: rollout.top_p=0.9 cuts tokens" in groupwise(*words).stdout
    told = json.loads(groupwise(*words, "--json").stdout)["notes"]
    assert any(note.startswith("rollout.top_p=0.9 cuts tokens") for note in told)


def test_kernels_that_the_lean_decoder_never_calls_are_told(groupwise, small, no_weights):
    told = groupwise("train", "quickstart", *small, "model.attention=eager", "--dry-run").stdout
    assert "model.attention=eager has no effect here: a qwen2 model is computed by" in " ".join(told.split())
    assert "model.attention" not in "".join(prepare(load_config("quickstart", [*small, "model.attention=sdpa"])).notes)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.completions_per_prompt=1", "must be at least 2"),
        ("algorithm.loss.epsilon=0", "must be greater than 0"),
        ("algorithm.loss.epsilon=-1", "must be greater than 0"),
        ("rollout.completion_per_prompt=8", "did you mean rollout.completions_per_prompt?"),
        ("training.steps=ten", "must be a whole number"),
        ("data.source=nowhere.jsonl", "nowhere.jsonl"),
        ("data.prompt_column=task", "task"),
        ("data.holdout=50", "data.holdout is 50"),
        ("rewards.functions=[corectness]", "corectness"),
        ("rewards.functions=['nowhere.py:score']", "nowhere.py"),
        ("rewards.functions=['json:no_such_function']", "no_such_function"),
        ("model.name=./no-such-model", "no-such-model"),
        ("model.device=cuda:99", "cuda:99"),
        ("rollout.max_completion_tokens=512", "the context of"),
        ("rollout.max_completion_tokens=480", "tokens"),
        ("data.max_prompt_tokens=20", "data.max_prompt_tokens"),
        ("evaluation.max_completion_tokens=600", "evaluation.max_completion_tokens is 600"),
    ],
)
def test_a_mistake_gets_one_sentence_before_any_weights(groupwise, small, no_weights, override, said):
    assert said in refusal(groupwise, *small, override)


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_an_empty_data_set_is_refused(groupwise, small, no_weights, tmp_path, content):
    path = tmp_path / ("empty.json" if content == "[]" else "empty.jsonl")
    path.write_text(content, encoding="utf-8")
    assert "no rows" in refusal(groupwise, *small, f"data.source={path}")


def test_a_file_without_a_known_column_is_refused(groupwise, small, no_weights, tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text('{"a": 1, "b": 2}\n' * 20, encoding="utf-8")
    assert "column" in refusal(groupwise, *small, f"data.source={path}")


def test_an_answer_that_cannot_be_read_names_its_row(groupwise, small, no_weights, problems):
    with problems.open("a", encoding="utf-8") as out:
        out.write('{"question": "and this?", "answer": ""}\n')
    assert "sums.jsonl line 13" in refusal(groupwise, *small)
    assert groupwise("train", "quickstart", *small, "on_bad_answer=drop", "--dry-run").exit_code == 0


def test_a_model_folder_without_weights_is_refused(groupwise, small, no_weights, tiny_model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert "weights" in refusal(groupwise, *small, f"model.name={bare}")


def test_a_prompt_longer_than_the_context_is_named_or_dropped(groupwise, small, no_weights, problems):
    with problems.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"question": "why " * 200, "answer": "1"}) + "\n")
    words = [*small, "data.holdout=4"]
    assert "sums:train:12" in refusal(groupwise, *words)
    result = groupwise("train", "quickstart", *words, "on_long_prompt=drop", "--dry-run")
    assert result.exit_code == 0
    assert "1 of 9 training prompts" in result.stdout or "1 of 4 held-out prompts" in result.stdout


def test_a_reward_that_needs_a_column_the_data_lacks_is_refused(groupwise, small, no_weights, tmp_path):
    code = tmp_path / "mine.py"
    code.write_text("def score(prompts, completions, difficulty):\n    return [0.0] * len(completions)\n", encoding="utf-8")
    assert "difficulty" in refusal(groupwise, *small, f"rewards.functions=['{code}:score']")


def test_training_prompts_are_rendered_when_used_and_are_those_of_their_problems(small, monkeypatch):
    import groupwise.training.setup as setup

    rendered = []
    original = setup.render_episode
    monkeypatch.setattr(setup, "render_episode", lambda problem, *rest: rendered.append(problem.id) or original(problem, *rest))
    prepared = prepare(load_config("quickstart", small))
    assert len(rendered) <= 2 + 4, "two training prompts, the first and the one with most words, and the held-out ones"
    for problem, prompt in zip(prepared.problems.train, prepared.train_prompts, strict=True):
        assert prompt.problem is problem
        assert problem.question in prompt.text
    before = len(rendered)
    assert prepared.train_prompts[-1] is prepared.train_prompts[len(prepared.train_prompts) - 1]
    assert prepared.train_prompts[1:3] == [prepared.train_prompts[1], prepared.train_prompts[2]]
    assert len(rendered) == before
    with pytest.raises(IndexError):
        _ = prepared.train_prompts[len(prepared.train_prompts)]


@pytest.mark.parametrize("question", ["x" * 150, "é" * 75, "€" * 50, "naïve " * 25])
def test_the_quick_length_test_never_lets_a_long_prompt_through(small, tmp_path, question):
    """At the exact limit it passes, one token below it is refused: for ASCII, where bytes bound the tokens, and for the rest.

    Without a chat template this tokenizer makes exactly one token of each byte, so that the bound has no room for error.
    """
    path = tmp_path / "one.jsonl"
    rows = [{"question": "1 + 1?", "answer": "2"}] * 2 + [{"question": question, "answer": "2"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [*small, f"data.source={path}", "data.eval_source=arithmetic", "data.holdout=1", "evaluation.problems=1"]
    words += ["data.arithmetic.steps=1", "prompt.style=concat"]
    prepared = prepare(load_config("quickstart", words))
    longest = max(len(prompt.token_ids) for prompt in [*prepared.train_prompts, *prepared.held_out_prompts])
    assert prepare(load_config("quickstart", [*words, f"max_prompt_tokens={longest}"])).notes == prepared.notes
    with pytest.raises(DataError, match=f"{longest - 1}"):
        prepare(load_config("quickstart", [*words, f"max_prompt_tokens={longest - 1}"]))


ADAPTER = "model.lora={rank: 8}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["training.sharding=zero2", ADAPTER], "training.sharding is zero2, which does not go with model.lora"),
        (["training.sharding=fsdp2", "optimizer.offload=true"], "which does not go with optimizer.offload"),
        (
            ["training.sharding=fsdp2", "training.offload_reference=true", "algorithm.kl={beta: 0.1}"],
            "which does not go with training.offload_reference",
        ),
    ],
)
def test_what_cannot_be_divided_among_the_processes_asked_for_is_refused(groupwise, small, no_weights, overrides, said):
    """Though a dry run is one process itself."""
    assert said in refusal(groupwise, *small, *overrides, "--num-processes", "2")
    alone = groupwise("train", "quickstart", *small, *overrides, "--dry-run")
    assert alone.exit_code == 0, "one process divides nothing"


@pytest.mark.parametrize("reward", ["environment", "environment_turns"])
def test_a_reward_of_an_environment_that_is_not_there_is_refused(groupwise, small, reward):
    said = refusal(groupwise, *small, f"rewards.functions=[correctness, {reward}]")
    assert f"reward '{reward}' is what an environment gave, but rollout.environment is null: name one" in said


def test_where_no_folder_can_be_made_a_run_that_named_none_is_refused_before_its_data_are_read(
    groupwise, small, no_weights, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert groupwise("train", "quickstart", *small, "--dry-run").exit_code == 0
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").write_text("mine", encoding="utf-8")
    for module in ("setup", "start"):
        monkeypatch.setattr(f"groupwise.training.{module}.prepare", None)
    said = "the run's folder 'runs' cannot be written (Not a directory: runs): a run needs a writable folder"
    assert said in refusal(groupwise, *small)
    assert said in groupwise("train", "quickstart", *small).stderr


def test_epochs_beyond_counting_are_refused(groupwise, small):
    assert "training.epochs is 1e+308, which is more steps than can be counted" in refusal(
        groupwise, *(one for one in small if not one.startswith("training.steps")), "training.epochs=1e308"
    )


def test_a_dry_run_for_several_processes_asks_for_deepspeed(groupwise, small, no_weights, monkeypatch):
    monkeypatch.setattr("groupwise.distributed.sharding.find_spec", lambda name: None)
    assert "groupwise[deepspeed]" in refusal(groupwise, *small, "training.sharding=zero2", "--num-processes", "2")


def test_the_number_of_processes_may_follow_the_gpus(groupwise, small, monkeypatch):
    from groupwise.cli.options import _count_processes

    refused = groupwise("train", "quickstart", *small, "--num-processes", "0")
    assert refused.exit_code == 2
    assert "'0' is neither auto nor a number of processes" in " ".join(refused.stderr.replace("│", " ").split())
    for gpus, processes in ((0, 1), (8, 8)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert _count_processes("auto") == processes


KEYED = "def score(completions, api_key=None, db=None, **columns):\n    return [0.0] * len(completions)\n"


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_dry_run_shows_no_secret_and_obeys_no_text(groupwise, small, no_weights, tmp_path, as_json, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "from-the-environment-1")
    (tmp_path / "mine.py").write_text(KEYED)
    arguments = "arguments: {api_key: topsecret, db: 'x://me:pw1234@h/?token=topsecret from-the-environment-1'}"
    functions = f"rewards.functions=[{{function: '{tmp_path / 'mine.py'}:score', {arguments}}}]"
    hostile = f"prompt.system=be \x9b31m \x1b]0;title\x07 \u202e hf_{'a1' * 10}"
    result = groupwise("train", "quickstart", *small, functions, hostile, "--dry-run", *as_json)
    assert result.exit_code == 0, result.output
    for leaked in ("topsecret", "pw1234", "from-the-environment-1", "hf_a1a1", "\x1b", "\x9b", "\x07", "\u202e"):
        assert leaked not in result.output, leaked
    if as_json:
        assert "\x9b31m \x1b]0;title\x07 \u202e" in json.loads(result.stdout)["config"]["prompt"]["system"], (
            "JSON is escaped, and whole"
        )


def test_an_error_shows_no_secret_and_obeys_no_text(groupwise, small, tmp_path):
    result = groupwise("train", f"no\x1b]0;title\x07such\x9b31m-hf_{'a1' * 10}.yaml")
    assert result.exit_code == 2
    assert "no\\x1b]0;title\\x07such\\x9b31m" in result.stderr
    assert not {"\x1b", "\x07", "\x9b"} & set(result.stderr)
    said = groupwise("train", "quickstart", "rewards.functions=[{function: a, arguments: {api_key: topsecret}}, 7]").stderr
    said += groupwise("train", "quickstart", "rewards={'api_key': 'topsecret'}", "model={api_key: topsecret}").stderr
    said += groupwise("train", "quickstart", "rewards.functions[0].arguments.password=[topsecret").stderr
    said += groupwise("train", "quickstart", "rewards.functions[0].arguments=[{'api_key': 'topsecret'}]").stderr
    assert "topsecret" not in said
    assert "hf_a1a1" not in result.stderr


def test_help_in_an_error_stays_readable(groupwise):
    assert "written key=value, such as training.steps=10" in groupwise("train", "quickstart", "x").stderr


def test_a_dry_run_says_what_resuming_would_do(groupwise, small, tmp_path):
    folder = tmp_path / "run"
    words = ("train", "quickstart", *small, "output.checkpoint_every=1", "--run-folder", folder)
    look = (*words, "--dry-run", "--resume")
    before = groupwise(*look)
    assert before.exit_code == 0, before.output
    assert f"There is no run in {folder} yet: it would begin with the first step." in before.stdout
    assert not folder.exists()

    assert groupwise(*words).exit_code == 0
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert f"{folder} finished after step 2: there is nothing to resume." in groupwise(*look).stdout
    longer = json.loads(groupwise(*look, "training.steps=3", "--json").stdout)
    assert longer["resume"][-1] == f"It would resume from {folder / 'checkpoints' / 'step-2'}."
    assert any("training.steps: 2 -> 3" in sentence for sentence in longer["resume"])

    changed = groupwise(*look, "training.steps=3", "rollout.temperature=0.5")
    assert changed.exit_code == 2
    assert "rollout.temperature: 1.0 -> 0.5" in changed.stderr
    accepted = groupwise(*look, "training.steps=3", "rollout.temperature=0.5", "--accept-changes")
    assert "It would resume from" in accepted.stdout
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}, "it looks and writes nothing"

    finished = groupwise(*look, "optimizer.learning_rate=5")
    assert finished.exit_code == 0, "nothing is left that a setting could spoil"
    assert "Everything checks out" not in finished.stdout
    assert "It would run" not in finished.stdout

    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "state.json").write_text("{}", encoding="utf-8")
    assert "every checkpoint in" in groupwise(*look, "training.steps=3").stderr


def test_a_dry_run_of_resuming_says_what_the_run_itself_would(groupwise, small, tmp_path):
    """Without checkpoints: more steps, a final model that is not judged, a run that goes on, and a file."""
    folder, file = tmp_path / "run", tmp_path / "file"
    words = ("train", "quickstart", *small, "output.checkpoint_every=0")
    look = (*words, "--run-folder", folder, "--dry-run", "--resume")
    assert groupwise(*words, "--run-folder", folder).exit_code == 0
    real, dry = (groupwise(*one, "training.steps=3") for one in ((*words, "--run-folder", folder, "--resume"), look))
    assert (real.exit_code, dry.exit_code) == (2, 2)
    assert real.stderr == dry.stderr
    assert "kept no checkpoint" in dry.stderr

    run = RunFolder(folder)
    state = {"step": 2, "steps_asked": 2, "config": yaml.safe_load(run.config.read_text()), "evaluations": []}
    run.trained.write_text(json.dumps(state), encoding="utf-8")
    run.summary.rename(tmp_path / "summary.json")
    judges = groupwise(*look)
    assert f"{folder} made its 2 steps: only its final model would be judged." in judges.stdout, judges.output
    assert groupwise(*look, "rollout.temperature=0.5").exit_code == 2

    run.lock()
    assert "another run is going on" in groupwise(*look).stderr
    run.release()
    file.write_text("mine", encoding="utf-8")
    assert "is a file" in groupwise(*words, "--run-folder", file, "--dry-run", "--resume").stderr


def test_a_prepared_folder_has_its_own_held_out_problems(groupwise, small, no_weights, problems, tmp_path):
    save_prepared(load_problems(DataConfig(source=str(problems), holdout=4)), str(tmp_path / "p"))
    words = ["train", "quickstart", "--dry-run", "--json", *small, f"data.source={tmp_path / 'p'}", "data.holdout=0"]
    result = groupwise(*words)
    found = json.loads(result.stdout)
    assert found["held_out_problems"] == 4
    why = "data.source is a prepared folder, which is read and split already"
    assert [note for note in found["notes"] if "holdout" in note] == [f"data.holdout=0 has no effect here: {why}."]
    assert "held out: whether" not in result.stdout
