"""`groupwise train FILE`, --dry-run and doctor with a reward model in the file."""

import json
import shutil

import pytest

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def file(judge, tmp_path):
    """``file("max_input_tokens: 20")``: a YAML file of a run with the judge and half a format reward."""

    def write(*settings, system="auto"):
        lines = ["rewards:", "  functions:", "    - model:", f"        name: {judge}", "        device: cpu"]
        lines += [*(f"        {line}" for line in settings), "      weight: 0.5", "    - format"]
        path = tmp_path / "judged.yaml"
        path.write_text("\n".join([*lines, f"prompt: {{system: {system}}}"]) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def no_weights(monkeypatch):
    import transformers

    def forbidden(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", forbidden)
    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", forbidden)


def test_a_run_from_a_file(groupwise, small, file, tmp_path):
    result = groupwise("train", file(), *small, "--run-folder", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "million weights in float32 on cpu." in " ".join((result.stdout + result.stderr).split())
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"reward/judge", "reward/format", "reward_model/truncated_judge", "reward_model/tokens_mean_judge"} <= set(steps[0])
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert all(set(row["components"]) == {"judge", "format"} for row in rows)


def test_a_dry_run_shows_it_without_its_weights(groupwise, small, file, judge, no_weights):
    found = json.loads(groupwise("train", file("max_input_tokens: 300"), *small, "--dry-run", "--json").stdout)
    assert [(row["name"], row["weight"], row["source"]) for row in found["rewards"]] == [
        ("judge", 0.5, "reward model"),
        ("format", 1.0, "built-in"),
    ]
    assert found["rewards"][0]["summary"] == f"The logit of {judge} on a conversation of at most 300 tokens."
    assert "judge" in groupwise("train", file(), *small, "--dry-run").stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["label: best"], "has no label 'best': its labels are LABEL_0"),
        (
            ["form: dialogue"],
            "rewards.functions[0].model.form is 'dialogue', but must be one of auto, conversation, text, pair or as_",
        ),
        (["dvice: cpu"], "rewards.functions[0].model.dvice is not a setting: did you mean rewards.functions[].model.device?"),
    ],
)
def test_mistakes_come_to_light_in_a_dry_run(groupwise, small, file, no_weights, settings, said):
    result = groupwise("train", file(*settings), *small, "--dry-run")
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_template_that_refuses_the_system_prompt_is_found_in_a_dry_run(groupwise, small, file, judge, no_weights, tmp_path):
    from transformers import AutoTokenizer

    strict = shutil.copytree(judge, tmp_path / "strict")
    tokenizer = AutoTokenizer.from_pretrained(strict)
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    tokenizer.save_pretrained(strict)
    words = ["train", file(system="xml"), *small, f"rewards.functions[0].model.name={strict}", "--dry-run"]
    result = groupwise(*words)
    assert result.exit_code == 2
    assert "no system): set its show_system_prompt: false, or form: text" in result.stderr
    assert groupwise(*words, "rewards.functions[0].model.show_system_prompt=false").exit_code == 0


def test_a_policy_is_no_reward_model(groupwise, small, tiny_model, no_weights):
    result = groupwise("train", "quickstart", *small, f"rewards.functions=[{{model: {tiny_model}}}]", "--dry-run")
    assert result.exit_code == 2
    assert "is a Qwen2ForCausalLM, which has no trained score head" in result.stderr


def findings(groupwise, *words):
    result = groupwise("doctor", *words, "--json")
    return {finding["rule"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_the_doctor_tells_when_completions_will_not_fit_it(groupwise, small, file, no_weights):
    assert "judge-reads-too-little" not in findings(groupwise, file(), *small)
    found = findings(groupwise, file("max_input_tokens: 60"), *small)["judge-reads-too-little"]
    assert found["severity"] == "warning"
    assert "'judge' reads at most 60 tokens" in found["summary"]
    assert "8 of 8 worked answers are cut already" in found["summary"]


def test_the_doctor_tries_the_functions_beside_it(groupwise, small, file, no_weights, tmp_path):
    assert "reward-blind" not in findings(groupwise, file(), *small), "what the judge would say is not known"
    (tmp_path / "mine.py").write_text("def fragile(completions):\n    return [1 / 0 for _ in completions]\n")
    written = file()
    written.write_text(written.read_text().replace("- format", f"- {tmp_path / 'mine.py'}:fragile"))
    assert "division by zero" in findings(groupwise, written, *small)["reward-fails"]["summary"]
