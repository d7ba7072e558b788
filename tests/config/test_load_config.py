"""A config is right, or one sentence says what is wrong with it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from groupwise.config import Config, build_config, build_known, dump_config, load_config, recipes
from groupwise.config.dialect import SettingsLoader, plain_yaml
from groupwise.config.load import changed_settings, load_run_config
from groupwise.errors import ConfigError

RECIPES = [
    "gsm8k-0.5b", "gsm8k-1.5b-24gb", "gsm8k-1.5b-8gpu", "gsm8k-1.5b-cpu", "gsm8k-7b-8gpu", "length-0.5b-2gpu",
    "polaris-3b-qlora", "polaris-3b", "quickstart-game", "quickstart-tools", "quickstart", "tools-1.5b", "tutorial-1.5b",
]  # fmt: skip


def refusal(*overrides: str, source: str | Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_recipes_are_these():
    assert [recipe.name for recipe in recipes()] == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_parses_says_what_it_is_and_survives_a_round_trip(name, tmp_path):
    recipe = next(recipe for recipe in recipes() if recipe.name == name)
    header = recipe.path.read_text(encoding="utf-8")
    assert 20 < len(recipe.summary) < 130
    assert "# Hardware:" in header
    assert "# Settings:" in header
    run_here = ("quickstart", "quickstart-game", "quickstart-tools", "gsm8k-1.5b-cpu")
    assert name in run_here or "Not run to the end here" in header
    config = load_config(name)
    assert load_config(written(tmp_path, dump_config(config))) == config


def test_the_24_gb_recipe_is_the_write_up_s():
    config = load_config("gsm8k-1.5b-24gb")
    assert (config.rollout.prompts_per_step, config.rollout.completions_per_prompt) == (2, 8)
    assert (config.rollout.max_completion_tokens, config.algorithm.beta) == (256, 0.04)
    assert (config.optimizer.learning_rate, config.algorithm.loss.epsilon, config.optimizer.max_grad_norm) == (5e-6, 0.1, 0.1)


def test_the_8_gpu_recipe_is_the_write_up_s():
    config = load_config("gsm8k-1.5b-8gpu")
    assert (config.rollout.prompts_per_step, config.rollout.completions_per_prompt) == (7, 12)
    assert (config.rollout.max_completion_tokens, config.training.steps) == (400, 500)


def test_no_source_means_the_defaults():
    assert load_config(None) == Config()


def test_a_device_is_a_number_again_after_writing():
    config = build_config({"model": {"device_map": "auto", "max_memory": {0: "20GiB", "cpu": "60GiB"}}})
    assert build_config(yaml.safe_load(dump_config(config))).model.max_memory == {0: "20GiB", "cpu": "60GiB"}


def test_what_a_device_may_hold_is_a_size():
    for size in ("20GiB", "1.5 GB", "800MB", "0KiB"):
        limits = {"cpu": size, "disk": size}
        assert build_config({"model": {"device_map": "auto", "max_memory": limits}}).model.max_memory == limits


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, "no device is named, so nothing would be limited: leave it out"),
        ({"cpu": "lots"}, "'lots' for cpu is no size: write one such as 20GiB"),
        ({0: "20"}, "'20' for 0 is no size"),
        ({0: "800mb"}, "'800mb' for 0 is no size"),
        ({0: "-1GiB"}, "'-1GiB' for 0 is no size"),
        ({"cuda:0": "20GiB"}, "'cuda:0' is no device: write a GPU's number, cpu or disk"),
    ],
)
def test_a_limit_that_no_device_could_keep_is_refused(limits, said):
    """Accelerate finds it where the weights are loaded, and an empty one never."""
    with pytest.raises(ConfigError, match=rf"^model\.max_memory is .*: {re.escape(said)}"):
        build_config({"model": {"device_map": "auto", "max_memory": limits}})


@pytest.mark.parametrize("text", ["\x85", "a\x85 b", "\u2028", " x ", "a\nb: c", "null", "1e3", "\ufeff", "\x7f'\"", "- \u2029"])
def test_any_text_reads_back_as_it_was(text):
    config = build_config({"prompt": {"system": text}})
    assert build_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("command", "lost"),
    [
        (r"\boxed", r"'\x08oxed'"),
        (r"\frac", r"'\x0crac'"),
        (r"\rightarrow", r"'\rightarrow'"),
        (r"\eta", r"'\x1bta'"),
    ],
)
def test_a_command_of_latex_that_double_quotes_took_away_is_refused(tmp_path, command, lost):
    def system(quote):
        text = f"prompt: {{system: {quote}Put the answer in {command}{{}}.{quote}}}\n"
        return load_config(written(tmp_path, text)).prompt.system

    with pytest.raises(ConfigError) as error:
        system('"')
    said = f"{lost} is what {command} becomes in double quotes: put the text in single quotes, in Python in r'...'"
    assert str(error.value).startswith("prompt.system is ")
    assert said in str(error.value)
    assert system("'") == f"Put the answer in {command}{{}}."
    windows = {"prompt": {"system": "Be brief.\r\nThen answer."}}
    assert build_config(windows).prompt.system == windows["prompt"]["system"], "no command"


def test_a_dump_names_every_setting():
    dumped = yaml.safe_load(dump_config(Config()))
    assert list(dumped) == list(Config.model_fields)
    assert dumped["rollout"]["completions_per_prompt"] == 8
    assert dumped["data"]["arithmetic"]["steps"] == 2


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path):
    path = written(tmp_path, "training: {steps: 5, seed: 3}\n")
    config = load_config(path, ["training.steps=6", "training.steps=7"])
    assert (config.training.steps, config.training.seed) == (7, 3)


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("on_bad_answer=drop", "data", "on_bad_answer", "drop"),
        ("optimizer.learning_rate=1e-5", "optimizer", "learning_rate", 1e-5),
        ("max_grad_norm=null", "optimizer", "max_grad_norm", None),
        ("optimizer.betas=[0.8, 0.95]", "optimizer", "betas", (0.8, 0.95)),
        ("evaluation.modes=[greedy]", "evaluation", "modes", ["greedy"]),
        ("prompt.system=Answer: yes or no [brief]", "prompt", "system", "Answer: yes or no [brief]"),
        ('prompt.system="none of these"', "prompt", "system", "none of these"),
        ("model.revision=0123456", "model", "revision", "0123456"),
        ("model.revision=1e10", "model", "revision", "1e10"),
        ("model.revision=null", "model", "revision", None),
        ("model.name=a=b", "model", "name", "a=b"),
        ("schedule=linear", "optimizer", "schedule", "linear"),
    ],
)
def test_an_override_means_what_it_looks_like(override, section, name, value):
    assert getattr(getattr(load_config(None, [override]), section), name) == value


def test_an_override_may_set_a_nested_section_or_its_setting():
    assert load_config(None, ["arithmetic.steps=3"]).data.arithmetic.steps == 3
    both = load_config(None, ["data.arithmetic={steps: 1}", "data.arithmetic.largest_number=9"]).data.arithmetic
    assert (both.steps, both.largest_number) == (1, 9)


def test_reward_functions_may_be_names_mappings_or_changed_in_place():
    config = load_config(None, ["rewards.functions=[correctness, {function: 'mine.py:short', weight: 0.5}]"])
    assert [(entry.function, entry.weight) for entry in config.rewards.functions] == [
        ("correctness", 1.0),
        ("mine.py:short", 0.5),
    ]
    config = load_config(None, ["rewards.functions[1].weight=3"])
    assert [(entry.function, entry.weight) for entry in config.rewards.functions] == [("correctness", 1.0), ("format", 3.0)]
    config = load_config(None, ["rewards.functions=[correctness]", "rewards.functions.0.arguments={exact: 1.0}"])
    assert config.rewards.functions[0].arguments == {"exact": 1.0}


def test_loading_never_changes_what_was_passed_in_or_the_schema_s_defaults():
    settings = {"rewards": {"functions": ["correctness"]}, "training": {"steps": 3}}
    build_config(settings, ["training.steps=4", "rewards.functions[0].weight=9", "rewards.functions[0].arguments={a: 1}"])
    assert settings == {"rewards": {"functions": ["correctness"]}, "training": {"steps": 3}}
    load_config(None, ["rewards.functions[0].weight=9"])
    assert Config().rewards.functions[0].weight == 1.0


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.completions_per_prompt=1", "rollout.completions_per_prompt is 1, but must be at least 2: "),
        ("algorithm.loss.epsilon=0", "algorithm.loss.epsilon is 0, but must be greater than 0: "),
        ("algorithm.loss.epsilon=-0.2", "algorithm.loss.epsilon is -0.2, but must be greater than 0: "),
        ("rollout.top_p=1.5", "rollout.top_p is 1.5, but must be at most 1: "),
        ("training.steps=many", "training.steps is 'many', but must be a whole number: "),
        ("training.steps=1.5", "training.steps is 1.5, but must be a whole number: "),
        ("algorithm.kl.beta=high", "algorithm.kl.beta is 'high', but must be a number: "),
        ("data.shuffle=perhaps", "data.shuffle is 'perhaps', but must be true or false: "),
        ("optimizer.schedule=cosin", "must be one of constant, linear or cosine (did you mean cosine?)"),
        ("evaluation.modes=[sampled, greddy]", "evaluation.modes[1] is 'greddy', but must be one of sampled or greedy"),
        ("evaluation.modes=greedy", "evaluation.modes is 'greedy', but must be a list"),
        ("rewards.functions=[]", "rewards.functions is [], but must have at least 1 entry"),
        (
            "rewards.functions=[{weight: 2}]",
            "an entry of rewards.functions names neither a function nor a model, but it must name one",
        ),
        ("rewards.functions=[{function: length, model: judge}]", "names both a function and a model, but it must name one"),
        ("rewards.functions=[{model: judge, arguments: {target: 3}}]", "gives arguments to the model 'judge'"),
        ("rewards.functions=[{model: judge, isolate: true}]", "isolates the model 'judge', but only functions run"),
        ("rewards.functions=[{model: {name: judge, batch_tokens: 0}}]", "is 0, but must be at least 1"),
        ("rewards.functions=[{model: {revision: main}}]", "name is missing, but must be given"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas is [0.9, 1.0]: must be two numbers of 0 and more and below 1"),
        ("model.lora={target_modules: '('}", "must be all-linear, names, or a regular expression (missing ), unterminated"),
        ("model.lora={target_modules: []}", "names no projection"),
        ("training=5", "training is 5, but must be a section of settings"),
        ("training=fast", "training is 'fast', but must be a section of settings"),
        ("algorithm.kl.beta=.nan", "algorithm.kl.beta is nan, but must be a finite number"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate is inf, but must be a finite number"),
        ("optimizer.warmup_steps=1000", "the peak rate would never be reached"),
        ("training.steps", "'training.steps' is not an override, which is written key=value"),
        ("=3", "is not an override"),
        ("rewards.functions=[a", "is not valid YAML"),
        ("rewards.functions[7].weight=1", "points past the end of a list of 2"),
    ],
)
def test_a_bad_value_gets_one_sentence_with_value_rule_and_remedy(override, said):
    assert said in refusal(override)


def test_the_sentence_ends_with_what_the_schema_says_about_the_setting():
    assert refusal("rollout.completions_per_prompt=1").endswith(
        "G, the size of a group; at least 2, since a completion is judged against the others of its group"
    )


def test_several_mistakes_are_counted_and_unknown_keys_come_first(tmp_path):
    path = written(tmp_path, "training: {steps: x, seeed: 1}\nrollout: {completions_per_prompt: 1}\n")
    assert refusal(source=path) == "training.seeed is not a setting: did you mean training.seed? (2 more settings are wrong too)"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("rollout.completion_per_prompt=4", "rollout.completions_per_prompt"),
        ("rollout.beta=0.1", "algorithm.kl.beta"),
        ("completions_per_promt=4", "rollout.completions_per_prompt"),
        ("optimiser.learning_rate=1", "optimizer.learning_rate"),
        ("num_generations=4", "rollout.completions_per_prompt"),
        ("lr=1e-6", "optimizer.learning_rate"),
        ("data.arithmetic.step=2", "data.arithmetic.steps"),
        ("rewards.functions=[{function: format, wieght: 1}]", "rewards.functions[].weight"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(override, meant):
    message = refusal(override)
    assert "is not a setting: did you mean " in message
    assert meant in message


def test_an_unknown_key_in_a_file_is_named_with_its_full_path(tmp_path):
    path = written(tmp_path, "rollout:\n  temprature: 0.5\n")
    assert refusal(source=path) == "rollout.temprature is not a setting: did you mean rollout.temperature?"


def test_a_key_without_a_section_is_told_its_sections(tmp_path):
    assert "data.arithmetic.steps, warm_start.steps or training.steps" in refusal(source=written(tmp_path, "steps: 3\n"))


def test_a_key_like_nothing_known_lists_what_the_section_has():
    assert "training has steps, epochs, seed" in refusal("training.zzz=1").replace("the section ", "")


def test_a_leaf_that_several_sections_have_lists_the_candidates():
    message = refusal("steps=10")
    assert (
        message
        == "steps is ambiguous, but must name one setting: write data.arithmetic.steps, warm_start.steps or training.steps"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training: [unclosed\n", "is not valid YAML at line 2"),
        ("- a\n- b\n", "but a config is a mapping of sections"),
        ("training: {steps: 1}\ntraining: {seed: 1}\n", "training is set twice (again on line 2)"),
        ("training: {<<: {seed: 1}, steps: 1, steps: 2}\n", "steps is set twice (again on line 1)"),
        ("training:\n  seed: 1\x07\n", "is not valid YAML at line 2, column 10 (the character U+0007 is not allowed): correct"),
        ("training: 5\n", "training is 5, but must be a section of settings"),
    ],
)
def test_a_broken_file_gets_one_sentence(text, said, tmp_path):
    assert said in refusal(source=written(tmp_path, text))


def test_a_mapping_may_be_merged_into_others(tmp_path):
    config = load_config(written(tmp_path, "training: &own {seed: 3}\nevaluation: {<<: *own, problems: 5}\n"))
    assert (config.training.seed, config.evaluation.seed, config.evaluation.problems) == (3, 3, 5)


def test_a_mapping_s_own_keys_go_before_merged_ones_wherever_it_is_merged_itself():
    text = "a: &a {x: 1, y: 1}\nb: {c: &c {<<: *a, x: 2}}\nd: {<<: *c, y: 3}\n"
    assert plain_yaml(text, SettingsLoader) == {"a": {"x": 1, "y": 1}, "b": {"c": {"x": 2, "y": 1}}, "d": {"x": 2, "y": 3}}


def test_an_empty_file_is_the_defaults(tmp_path):
    assert load_config(written(tmp_path, "# nothing yet\n")) == Config()


def test_numbers_in_a_file_may_be_written_without_a_point(tmp_path):
    config = load_config(written(tmp_path, "optimizer: {learning_rate: 3e-6}\nprompt: {system: 1e5}\n".replace("1e5", "'1e5'")))
    assert (config.optimizer.learning_rate, config.prompt.system) == (3e-6, "1e5")


def test_a_source_that_is_not_there_is_told_apart(tmp_path):
    assert "does not exist" in refusal(source=str(tmp_path / "no.yaml"))
    assert "did you mean quickstart?" in refusal(source="quikstart")
    assert "is a folder" in refusal(source=tmp_path)
    binary = tmp_path / "model.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert "not a text file" in refusal(source=binary)


def test_a_folder_of_the_same_name_does_not_hide_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert load_config("quickstart").data.source == "arithmetic"


def test_importing_the_config_or_the_package_does_not_import_torch():
    code = (
        "import sys, groupwise, groupwise.config, groupwise.cli; groupwise.config.load_config('quickstart'); groupwise.Config; "
        "heavy = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules); sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_rewards_exist_and_fit_the_answers_it_asks_for(name):
    from groupwise.data.prompts import resolve_system
    from groupwise.rewards.suite import RewardSuite

    config = load_config(name)
    _, style = resolve_system(config.prompt, config.data)
    assert style == ("boxed" if name.startswith("polaris") else "xml")
    assert RewardSuite.from_config(config.rewards, style).notes() == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": {"lora": {"rank": 0}}}, "model.lora.rank is 0, but must be at least 1: rank of the two factors"),
        ({"model": {"lora": {"ranck": 8}}}, "model.lora.ranck is not a setting: did you mean model.lora"),
        ({"model": {"lora": 8}}, "model.lora is 8, but must be a section of settings"),
        (
            {"rewards": {"functions": [{"model": {"name": "judge", "lable": "good"}}]}},
            "rewards.functions[0].model.lable is not a setting: did you mean rewards.functions[].model.label?",
        ),
    ],
)
def test_settings_inside_a_section_that_may_be_null_are_named_whole(settings, said):
    with pytest.raises(ConfigError) as refused:
        build_config(settings)
    assert said in str(refused.value)


def test_settings_inside_a_section_that_may_be_null_can_be_set_one_by_one():
    assert load_config(None, ["model.lora.rank=4", "model.lora.alpha=8"]).model.lora.rank == 4
    judged = build_config(
        {"rewards": {"functions": ["length", {"model": "judge", "weight": 2.0}]}}, ["rewards.functions[1].weight=0.5"]
    )
    assert judged.rewards.functions[1].model.name == "judge"
    assert judged.rewards.functions[1].weight == 0.5
    changed = ["rewards.functions.1.model.name=./other", "rewards.functions[1].model.batch_tokens=64"]
    entries = [{"model": "judge"}, {"model": "judge"}]
    functions = build_config({"rewards": {"functions": entries}}, changed).rewards.functions
    assert [(one.model.name, one.model.batch_tokens) for one in functions] == [("judge", 16384), ("./other", 64)]
    with pytest.raises(ConfigError, match="ranck is not a setting"):
        load_config(None, ["model.lora.ranck=4"])


def test_a_key_with_line_breaks_stays_in_one_line():
    with pytest.raises(ConfigError) as caught:
        build_config({"a\nb\x1b[31m": 1})
    assert str(caught.value).startswith("a\\nb\\x1b[31m is not a setting")


@pytest.mark.parametrize(
    ("written", "meant"), [("010", 10), ("008", 8), ("0100", 100), ("0x10", 16), ("1_000", 1000), ("-3", -3), ("0", 0)]
)
def test_whole_numbers_are_what_they_look_like(written, meant, tmp_path):
    """YAML 1.1 has octal numbers, and 1:30 for 90."""
    assert load_config(None, [f"training.seed={written}"]).training.seed == meant
    (tmp_path / "run.yaml").write_text(f"training: {{seed: {written}}}")
    assert load_config(tmp_path / "run.yaml").training.seed == meant
    assert "training.steps is '1:30', but must be a whole number" in refusal("training.steps=1:30")


def test_what_was_hidden_is_no_value(tmp_path):
    functions = [{"function": "a.py:f", "arguments": {"api_key": "<hidden>"}}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"rewards": {"functions": functions}}))
    said = refusal(source=tmp_path / "config.yaml")
    assert said.startswith("rewards.functions[0].arguments.api_key is <hidden>, which a run's files have in place of a secret")
    assert load_run_config(tmp_path / "config.yaml").rewards.functions[0].arguments == {"api_key": "<hidden>"}


def test_blanks_around_an_override_and_brackets_in_a_dict_of_them_are_read():
    assert load_config(None, ["model.name = X"]).model.name == "X"
    weighed = load_config(None, {"rewards.functions": ["correctness", "format"], "rewards.functions[1].weight": 2})
    assert [one.weight for one in weighed.rewards.functions] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ([], {}),
        (["algorithm.preset=dr_grpo"], {"preset": "dr_grpo"}),
        (
            ["algorithm.preset=dr_grpo", "algorithm.loss.aggregation=sequence_mean"],
            {"preset": "dr_grpo", "loss": {"aggregation": "sequence_mean"}},
        ),
        (["algorithm.loss={type: cispo, epsilon: 0.2}"], {"loss": {"type": "cispo", "epsilon": 0.2}}),
        (["algorithm.loss={type: cispo}"], {"loss": {"type": "cispo"}}),
    ],
)  # fmt: skip
def test_the_settings_that_are_shown_make_the_same_objective(overrides, shown):
    config = load_config(None, overrides)
    found = changed_settings(config.model_dump(mode="json")).get("algorithm", {})
    assert found == shown
    assert build_config({"algorithm": found}).algorithm == config.algorithm


def test_settings_of_another_version_keep_what_this_one_knows():
    settings = load_config("quickstart", ["optimizer.learning_rate=3e-6", "algorithm.advantage.scale=none"]).model_dump(
        mode="json"
    )
    settings["optimizer"]["master_weights"] = True
    settings["algorithm"]["loss"]["aggregation"] = "as_it_was"
    settings["algorithm"]["bata"] = 0.1
    settings["rewards"]["functions"][0]["shade"] = "blue"
    settings["gone"] = {"everything": 1}
    config, left_out = build_known(settings)
    assert sorted(left_out) == [
        "algorithm.bata",
        "algorithm.loss.aggregation",
        "gone",
        "optimizer.master_weights",
        "rewards.functions.0.shade",
    ]
    assert (config.optimizer.learning_rate, config.algorithm.advantage.scale) == (3e-6, "none")
    assert len(config.rewards.functions) == len(settings["rewards"]["functions"])


def test_settings_that_do_not_fit_together_in_any_way_are_no_config():
    assert build_known({"rewards": {"functions": []}, "training": 7, "optimizer": {"warmup_steps": 10**6}})[0] is None


@pytest.mark.parametrize(
    ("text", "path", "allowed"),
    [
        ("model: {trust_remote_code: true}\n", "model.trust_remote_code", "model.trust_remote_code=true"),
        ("model: {trust_remote_code: 'yes'}\n", "model.trust_remote_code", "model.trust_remote_code=false"),
        (
            "rewards: {functions: [{model: {name: judge, trust_remote_code: on}}]}\n",
            "rewards.functions[0].model.trust_remote_code",
            "rewards.functions[0].model.trust_remote_code=true",
        ),
    ],
)
def test_a_file_cannot_grant_trust_in_code_and_the_command_line_can(text, path, allowed, tmp_path):
    source = written(tmp_path, text)
    said = refusal(source=source)
    assert f"sets {path}" in said
    assert f"{path}=true" in said
    assert path in refusal("training.steps=3", source=source)
    load_config(source, [allowed])


def test_settings_of_a_run_are_read_without_the_trust_that_they_claim(tmp_path):
    judge = {"model": {"name": "judge", "trust_remote_code": True}}
    path = written(tmp_path, yaml.safe_dump({"model": {"trust_remote_code": True}, "rewards": {"functions": [judge]}}))
    config = load_run_config(path, ["training.steps=3"])
    assert not config.model.trust_remote_code
    assert config.rewards.functions[0].model is not None
    assert not config.rewards.functions[0].model.trust_remote_code
    assert load_run_config(path, ["model.trust_remote_code=true"]).model.trust_remote_code
    known, left_out = build_known(yaml.safe_load(path.read_text()))
    assert known is not None
    assert not known.model.trust_remote_code
    assert left_out == []


BOMB = "a0: &a0 [0, 0]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))
MERGING_BOMB = "a0: &a0 {k: 0}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30))
NONSENSE = {
    "a bomb of aliases": (BOMB, "would grow"),
    "a bomb of merged mappings": (MERGING_BOMB, "would grow"),
    "a list that contains itself": ("model: &m [*m]\n", "contains itself"),
    "a section without a name": ("? ", "a section None, but its name must be text"),
    "a section with a number for a name": ("1: 2", "a section 1, but its name must be text"),
    "brackets without end": ("model: " + "[" * 600 + "]" * 600, "nested too deeply"),
    "blocks without end": ("\n".join(" " * i + "a:" for i in range(3000)), "nested too deeply"),
    "a number of 5,000 digits": (f"training: {{steps: {'9' * 5000}}}\n", "is not valid YAML"),
    "a month that no year has": ("training: {steps: 2026-13-45}\n", "is not valid YAML"),
}


@pytest.mark.parametrize(("text", "said"), NONSENSE.values(), ids=NONSENSE)
def test_yaml_that_grows_or_never_ends_gets_one_sentence(text, said, tmp_path):
    assert said in refusal(source=written(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.steps=" + "9" * 5000, "is not valid YAML"),
        ("training.steps=" + "[" * 600, "nested too deeply"),
        ("rewards.functions=&a [*a]", "contains itself"),
        ("rewards.functions=[&a [0, 0], " + ", ".join(f"&a{i} [*a, *a]" for i in range(3)) + "]", "must be"),
    ],
)
def test_the_same_in_an_override_is_cut_short(override, said):
    message = refusal(override)
    assert said in message
    assert len(message) < 500


def test_a_value_used_twice_by_an_alias_is_no_bomb(tmp_path):
    text = "rewards: {functions: [{function: correctness, arguments: &a {exact: 1.0}}, {function: format, arguments: *a}]}\n"
    first, second = load_config(written(tmp_path, text)).rewards.functions
    assert first.arguments == second.arguments == {"exact": 1.0}


def test_settings_from_python_that_contain_themselves_get_one_sentence():
    endless: dict[str, object] = {}
    endless["a"] = endless
    with pytest.raises(ConfigError, match="nested too deeply"):
        build_config({"rewards": {"functions": [{"function": "correctness", "arguments": endless}]}})


@pytest.mark.parametrize(
    ("unknown", "said"),
    [
        ("algorithm.num_iterations", "algorithm.updates_per_batch or algorithm.kl.reference_updates?"),
        ("algorithm.kl_penalty", "algorithm.kl.beta or algorithm.kl.estimator?"),
        ("training.logging_steps", "is not a setting: every step is logged"),
        ("model.lora.bias", "is not a setting: an adapter here (model.lora) trains no biases"),
        ("training.gradient_accumulation_steps", "training.micro_batch_tokens? (a step's batch is"),
        ("training.num_train_epochs", "training.epochs?"),
        ("model.load_in_8bit", "model.quantization? (8bit, with model.lora)"),
        ("rollout.max_length", "rollout.max_completion_tokens or data.max_prompt_tokens?"),
        ("training.report_to", "output.trackers? (a list"),
        ("optimizer.warmup_ratio", "optimizer.warmup_steps? (below 1 it is a share of the run's steps)"),
    ],
)
def test_other_trainers_words_lead_to_ours(unknown, said):
    section, _, name = unknown.rpartition(".")
    settings = {"model": {"lora": {name: 1}}} if section == "model.lora" else {section: {name: 1}}
    for attempt in (lambda: build_config(settings), lambda: load_config(None, [f"{unknown}=1"])):
        with pytest.raises(ConfigError, match=re.escape(said)):
            attempt()


def test_a_warmup_is_steps_or_a_share_of_the_run():
    assert load_config(None, ["optimizer.warmup_steps=12"]).optimizer.warmup_steps == 12
    assert load_config(None, ["optimizer.warmup_steps=0.1"]).optimizer.warmup_steps == 0.1
    with pytest.raises(ConfigError, match="below 1 a share of the run's"):
        load_config(None, ["optimizer.warmup_steps=1.5"])


@pytest.mark.parametrize("rewards", [1, None, {"functions": 1}, {"functions": ["correctness", None]}, {"functions": {"a": 1}}])
def test_what_differs_from_the_defaults_is_told_of_a_file_that_is_no_config_too(rewards):
    assert changed_settings({"rewards": rewards}) == {"rewards": rewards}
