"""Rules about settings, problems and what is tried out before a run: each fires on what it is for and is silent otherwise."""

import json
from dataclasses import replace

import pytest
from transformers import PretrainedConfig

from groupwise.config import load_config, recipes
from groupwise.config.combinations import notes
from groupwise.data.prompts import render, resolve_system
from groupwise.data.sources import ProblemSet, load_problems
from groupwise.doctor import RULES, check_before, diagnose_prepared, refuse
from groupwise.doctor.inputs import contradictions, duplicates, leakage
from groupwise.doctor.rehearsal import KINDS, Rehearsal
from groupwise.errors import RewardError
from groupwise.rewards import RewardSuite, StepRewards, reward_scope
from groupwise.training.setup import Prepared
from groupwise.training.short_memory import Shortage
from groupwise.types import Problem

QUESTION = (
    "Ann has {a} apples in her basket and on Monday morning buys {b} more of them at the market. How many apples has she now?"
)


def sum_problem(a, b, name="train", question=QUESTION, answer=None):
    return Problem(f"{name}:{a}+{b}", question.format(a=a, b=b), answer or str(a + b))


def problem_set(train, held_out=()):
    return ProblemSet(tuple(train), tuple(held_out), "xml")


@pytest.fixture
def prepared(qwen_tokenizer):
    """``prepared(overrides, rewards={}, tokenizer=...)``: a run that could start, with the real tokenizer and made-up sums."""

    def make(overrides=(), rewards=None, tokenizer=qwen_tokenizer):
        config = load_config("quickstart", list(overrides))
        system, style = resolve_system(config.prompt, config.data)
        problems = load_problems(config.data.model_copy(update={"limit": 50, "holdout": 20}))
        suite = RewardSuite.from_config(config.rewards, style, rewards)
        prompts = [render(problem, tokenizer, config.prompt, system) for problem in problems.train]
        hf_config = PretrainedConfig(eos_token_id=tokenizer.eos_token_id)
        return Prepared(config, problems, prompts, [], suite, tokenizer, style, system, hf_config, None, 1000)

    return make


def rules_of(found):
    return {finding.rule: finding for finding in found}


SETTINGS = {
    "rate-too-low": ["optimizer.precision=pure", "optimizer.learning_rate=1e-6"],
    "rate-too-high": ["optimizer.learning_rate=1e-3"],
    "reward-hacking-unseen": ["data.holdout=0"],
    "no-checkpoints": ["training.steps=101"],
    "evaluation-cut-shorter": ["evaluation.max_completion_tokens=20"],
    "too-cold": ["rollout.temperature=0.1"],
    "sampled-distribution-cut": ["rollout.top_p=0.9"],
}


def settings_findings(config):
    return {rule.name for rule in RULES if rule.subject == "settings" and rule.examine(config)}


@pytest.mark.parametrize("rule", SETTINGS)
def test_a_rule_about_settings_fires_on_them_alone(rule):
    assert settings_findings(load_config("quickstart", SETTINGS[rule])) == {rule}


def test_every_rule_about_settings_is_tried():
    assert {rule.name for rule in RULES if rule.subject == "settings"} == set(SETTINGS)


@pytest.mark.parametrize("recipe", [recipe.name for recipe in recipes()])
def test_shipped_recipes_have_no_ailing_settings(recipe):
    ailing = {rule.name for rule in RULES if rule.severity in ("critical", "warning")}
    told = {"tutorial-1.5b": {"rate-too-low", "sampled-distribution-cut"}}  # as the code that it follows
    assert settings_findings(load_config(recipe)) & ailing == told.get(recipe, set())


def test_an_adapter_is_float32_whatever_the_precision():
    assert "rate-too-low" not in settings_findings(load_config(None, [*SETTINGS["rate-too-low"], "model.lora.rank=8"]))


def test_a_bf16_weight_really_does_not_move_below_the_rate_that_the_rule_names():
    import torch

    from groupwise.doctor.inputs import rate_too_low

    smallest = rate_too_low(load_config(None, SETTINGS["rate-too-low"])).numbers["smallest"]
    weight = torch.tensor([0.02], dtype=torch.bfloat16)
    assert (weight - 0.9 * smallest).to(torch.bfloat16) == weight
    assert (weight - 2.2 * smallest).to(torch.bfloat16) != weight


def test_float32_weights_and_adapters_move_at_any_rate(prepared, monkeypatch):
    assert "rate-too-low" not in settings_findings(load_config("quickstart", [*SETTINGS["rate-too-low"], "model.lora={}"]))
    auto = [*SETTINGS["rate-too-low"], "model.dtype=auto", "model.device=cpu"]
    for bf16 in (True, False):
        monkeypatch.setattr("groupwise.models.devices.computes_bf16", lambda bf16=bf16: bf16)
        assert ("rate-too-low" in rules_of(diagnose_prepared(prepared(auto)))) is bf16


def test_long_runs_without_evaluation_are_noted_and_short_ones_are_not():
    saved = ["training.steps=1000", "checkpoint_every=100"]
    assert settings_findings(load_config("quickstart", saved)) == {"reward-hacking-unseen"}
    assert settings_findings(load_config("quickstart", [*saved, "evaluation.every=100"])) == set()


def test_many_tokens_count_as_many_steps_do_and_a_checkpoint_silences_it():
    large = ["training.steps=60", "rollout.max_completion_tokens=2000"]  # 60 x 64 x 2000 tokens
    assert settings_findings(load_config("quickstart", large)) == {"no-checkpoints"}
    assert settings_findings(load_config("quickstart", [*large, "checkpoint_every=20"])) == set()
    assert settings_findings(load_config("quickstart", ["training.steps=100"])) == set()
    (said,) = [note for note in notes(load_config("quickstart", large)) if "checkpoint_every" in note]
    assert said.startswith("output.checkpoint_every is 0 in a run of 60 steps, which may sample 7,680,000 tokens")


@pytest.mark.parametrize("recipe", [recipe.name for recipe in recipes()])
def test_shipped_recipes_save_themselves_where_they_are_long(recipe):
    assert "no-checkpoints" not in settings_findings(load_config(recipe))


def test_repeats_contradictions_and_leaks_are_told_apart():
    train = [sum_problem(a, 3) for a in range(60)]
    assert duplicates(problem_set(train)) is None
    assert contradictions(problem_set(train)) is None
    again = replace(train[5], id="again", question=train[5].question.upper().replace("?", " ?"))
    found = duplicates(problem_set([*train, again]))
    assert found.numbers["repeats"] == 1
    assert found.examples[0].where == "train:5+3 and again"
    assert contradictions(problem_set([*train, again])) is None
    other = replace(again, answer="9")
    assert contradictions(problem_set([*train, other])).numbers["questions"] == 1
    assert contradictions(problem_set([*train, replace(again, answer="8.0")])) is None, "8 and 8.0 are the same answer"


def test_a_held_out_question_in_other_punctuation_or_with_a_word_changed_is_a_leak():
    train = [sum_problem(a, 3) for a in range(60)]
    same = sum_problem(7, 3, "held", QUESTION.replace(". How", "; how"))
    changed = sum_problem(8, 3, "held", QUESTION.replace("Ann", "Zoe"))
    fresh = sum_problem(99, 3, "held")
    found = leakage(problem_set(train, [same, changed, fresh]))
    assert found.numbers["leaked"] == 2
    assert [example.where for example in found.examples] == ["held:7+3 and train:7+3", "held:8+3 and train:8+3"]
    assert found.severity == "critical"


def test_other_numbers_in_the_same_story_are_another_problem():
    train = [sum_problem(a, 3) for a in range(60)]
    assert leakage(problem_set(train, [sum_problem(a, 4, "held") for a in range(60)])) is None
    signs = [Problem("t", "3 + 2 = ?", "5")], [Problem("h", "3 - 2 = ?", "1")]
    assert leakage(problem_set(*signs)) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("(3 + 2) * 4 = ?", "3 + (2 * 4) = ?"),
        ("((3 + 2) * 4) - 1", "(3 + 2) * (4 - 1)"),
        ("What is 5!?", "What is 5?"),
        ("f'(2) = ?", "f(2) = ?"),
        ("What is the mean of 1.2, 3?", "What is the mean of 1, 2.3?"),
        ("What is .5 of it?", "What is 5 of it?"),
        ("Is x != y?", "Is x = y?"),
    ],
)
def test_brackets_points_primes_and_factorials_make_another_question(first, second):
    one, other = Problem("a", first, "1"), Problem("b", second, "2")
    assert contradictions(problem_set([one, other])) is None
    assert duplicates(problem_set([one, other])) is None
    assert leakage(problem_set([one], [other])) is None
    long = "Work this out step by step, and write the number that it comes to behind all that you have reasoned: {}"
    one, other = (replace(problem, question=long.format(problem.question)) for problem in (one, other))
    assert leakage(problem_set([one], [other])) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("How lucky! Ann’s hens (all 3) lay 12 eggs.", "How lucky, Ann's hens, all 3, lay 12 eggs"),
        ("What does it cost (in dollars)?", "What does it cost, in dollars?"),
        ("Choose: (A) 12 (B) 15", "Choose: A 12, B 15"),
        ("What is f(2), in students' words?", "What is f (2) in students’ words"),
        ("(3+2)*4=?", "( 3 + 2 ) * 4 = ?"),
    ],
)
def test_brackets_and_marks_of_prose_make_no_other_question(first, second):
    assert leakage(problem_set([Problem("a", first, "1")], [Problem("b", second, "1")])).numbers["leaked"] == 1


def test_gsm8k_as_published_has_no_leak(shared_data):
    folder = shared_data / "gsm8k"
    overrides = [f"data.source={folder / 'train.jsonl'}", f"data.eval_source={folder / 'test.jsonl'}"]
    problems = load_problems(load_config(None, overrides).data)
    assert len(problems.held_out) > 1300
    assert leakage(problems) is None
    assert duplicates(problems) is None


def test_the_quickstart_before_it_runs_has_no_findings(prepared):
    assert diagnose_prepared(prepared()) == []


def test_a_reward_that_sees_nothing_is_found_before_the_run(prepared):
    found = rules_of(diagnose_prepared(prepared(["rewards.functions=[boxed_format]"])))
    assert found["reward-blind"].severity == "critical"
    assert "16 of 16" in found["reward-blind"].summary
    upside_down = {"brief": lambda completions, **_: [-len(c[-1]["content"]) for c in completions]}
    found = rules_of(diagnose_prepared(prepared(["rewards.functions=[brief]"], upside_down)))
    assert found["reward-blind"].severity == "warning"
    assert len(found["reward-blind"].examples) == 3


@pytest.mark.parametrize(
    "functions", ["[environment, overlong]", "[environment_turns, {function: keyword, arguments: {words: [so]}}]"]
)
def test_what_an_environment_pays_is_not_known_before_the_run(prepared, functions):
    """Its functions are left out of the trial, so that the others alone, which pay no answer, say nothing of the sum."""
    played = ["rollout.environment=groupwise.episodes.games:HigherOrLower", f"rewards.functions={functions}"]
    found = rules_of(diagnose_prepared(prepared(played)))
    assert not {"reward-blind", "end-unpaid"} & found.keys()


def test_a_built_in_reward_is_blind_beside_an_environment_too(prepared):
    """It reads none of the columns that it is offered."""
    played = ["rollout.environment=groupwise.episodes.games:HigherOrLower", "rewards.functions=[boxed_format]"]
    assert rules_of(diagnose_prepared(prepared(played)))["reward-blind"].severity == "critical"


def twice(completions, environment_reward, **_):
    return [2 * score for score in environment_reward]


def twice_of_columns(completions, **columns):
    assert all(turns[-1]["role"] == "assistant" for turns in columns["turns"])
    return [2 * score for score in columns["environment_reward"]]


@pytest.mark.parametrize("function", [twice, twice_of_columns])
def test_a_reward_that_goes_by_what_an_environment_gave_is_not_refused_for_it(prepared, function):
    played = [
        "rollout.environment=groupwise.episodes.games:HigherOrLower",
        "rewards.functions=[twice, {function: keyword, arguments: {words: [so]}}]",
    ]
    assert not {"reward-fails", "reward-blind"} & rules_of(diagnose_prepared(prepared(played, {"twice": function}))).keys()


def test_a_column_solution_with_answers_alone_is_tried_in_the_whole_form(prepared, tmp_path):
    rows = [{"prompt": QUESTION.format(a=a, b=3), "solution": str(a + 3)} for a in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = rules_of(diagnose_prepared(prepared([f"data.source={tmp_path / 'sums.jsonl'}"])))
    assert "reward-blind" not in found


def test_a_built_in_reward_that_looks_for_no_answer_is_a_warning(prepared):
    found = rules_of(diagnose_prepared(prepared(["rewards.functions=[{function: keyword, arguments: {words: [zebra]}}]"])))
    assert found["reward-blind"].severity == "warning"


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_reward_that_raises_is_found_before_the_run(prepared, on_error):
    def fragile(completions, **_):
        return [1 / len(c[-1]["content"]) for c in completions]

    overrides = ["rewards.functions=[correctness, fragile]", f"rewards.on_error={on_error}"]
    found = rules_of(diagnose_prepared(prepared(overrides, {"fragile": fragile})))
    assert found["reward-fails"].severity == "critical"
    assert "division by zero" in found["reward-fails"].summary


def test_what_is_tried_ends_as_an_engine_ends_it(prepared, qwen_tokenizer):
    """With its end token, so that even an empty one has a token; one that is cut has none."""

    def by_token(completions, completion_ids, finish_reason, **_):
        for ids, why in zip(completion_ids, finish_reason, strict=True):
            assert (ids[-1] == qwen_tokenizer.eos_token_id) is (why == "stop")
        return [StepRewards([1 / len(ids)], [len(ids)], "tokens") for ids in completion_ids]

    ready = prepared(["rewards.functions=[by_token]"], {"by_token": by_token})
    assert "reward-fails" not in rules_of(diagnose_prepared(ready))
    assert "<|im_end|>" not in "".join(one.text for one in Rehearsal(ready).completions(0)), "texts have no special tokens"


@pytest.mark.parametrize("problems_seen", [16, 3])
def test_a_reward_that_compares_problems_is_tried_on_all_of_them_at_once(prepared, problems_seen):
    @reward_scope("batch")
    def by_rank(completions, group_index, **_):
        assert len(set(group_index)) == problems_seen
        return [-float(i % len(KINDS)) for i, _ in enumerate(completions)]

    found = rules_of(diagnose_prepared(prepared(["rewards.functions=[by_rank]"], {"by_rank": by_rank})))
    assert ("reward-fails" in found) is (problems_seen != 16)
    assert "reward-blind" not in found


@pytest.mark.parametrize(
    ("functions", "unpaid"),
    [
        ("correctness, format", True),
        ("correctness, format, strict_xml", False),
        ("correctness, overlong", False),
        ("correctness, {function: length, arguments: {target: 30, unit: tokens}}", False),
        ("boxed_format", False),  # which is blind, and that is the graver finding
    ],
)
def test_rewards_to_which_the_end_of_an_answer_is_nothing_are_found(prepared, functions, unpaid):
    found = rules_of(diagnose_prepared(prepared([f"rewards.functions=[{functions}]"])))
    assert ("end-unpaid" in found) is unpaid
    assert ("reward-blind" in found) is (functions == "boxed_format"), "what goes on is no wrong answer"
    if unpaid:
        assert found["end-unpaid"].severity == "note"
        assert "in all 16 problems" in found["end-unpaid"].summary
        assert [example.remark for example in found["end-unpaid"].examples] == [
            "right, then on to the limit: reward 2.8", "right: reward 2.8",
        ]  # fmt: skip
        assert "la la la" in found["end-unpaid"].examples[0].text


def test_worked_answers_that_do_not_fit_are_found(prepared):
    found = rules_of(diagnose_prepared(prepared(["rollout.max_completion_tokens=12"])))
    assert found["answer-does-not-fit"].numbers["longest"] > 12
    assert found["answer-does-not-fit"].remedy.startswith("Raise rollout.max_completion_tokens")


def test_prompts_without_answers_have_no_worked_answer(prepared, tmp_path):
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": QUESTION.format(a=a, b=3)}) + "\n" for a in range(60)))
    brief = {"brief": lambda completions, **_: [-len(c[-1]["content"]) for c in completions]}
    overrides = [f"data.source={tmp_path / 'asked.jsonl'}", "data.answer_column=prompt", "rollout.max_completion_tokens=12"]
    found = rules_of(diagnose_prepared(prepared([*overrides, "rewards.functions=[brief]"], brief)))
    assert not {"answer-does-not-fit", "reward-blind"} & found.keys()


def test_an_end_token_that_does_not_end_a_turn_is_found(prepared, shared_data):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(shared_data / "qwen2.5-tokenizer", eos_token="<|endoftext|>")
    found = rules_of(diagnose_prepared(prepared(tokenizer=other)))
    assert "'<|endoftext|>', but the chat template ends a turn with '<|im_end|>'" in found["end-token-untaught"].summary
    open_ended = AutoTokenizer.from_pretrained(shared_data / "qwen2.5-tokenizer")
    open_ended.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
    found = rules_of(diagnose_prepared(prepared(tokenizer=open_ended)))
    assert "puts none of the model's end tokens" in found["end-token-untaught"].summary


def test_a_constant_reward_of_one_s_own_is_a_warning_since_it_may_look_for_something_else(prepared):
    runs_code = {"runs": lambda completions, **_: [0.0 for _ in completions]}
    found = rules_of(diagnose_prepared(prepared(["rewards.functions=[runs]"], runs_code)))
    assert found["reward-blind"].severity == "warning"


@pytest.mark.parametrize(
    "overrides", [["optimizer.learning_rate=5"], ["optimizer.learning_rate=5", "model.lora={}"], ["warm_start.learning_rate=1"]]
)
def test_a_rate_as_large_as_the_weights_is_critical(overrides):
    (found,) = [rule.examine(load_config("quickstart", overrides)) for rule in RULES if rule.name == "rate-too-high"]
    assert found.severity == "critical"


def test_always_the_likeliest_token_is_critical():
    (found,) = [rule.examine(load_config("quickstart", ["rollout.top_k=1"])) for rule in RULES if rule.name == "too-cold"]
    assert found.severity == "critical"


def test_a_run_that_is_to_follow_tries_few_problems(prepared):
    calls = []

    def counted(completions, **_):
        calls.append(len(completions))
        return [float(len(c[-1]["content"])) for c in completions]

    check_before(prepared(["rewards.functions=[counted]"], {"counted": counted}))
    assert calls == [len(KINDS)] * 4, "four problems, each once"


@pytest.mark.parametrize(("needed", "severity"), [(10.5, "warning"), (12.0, "critical")])
def test_a_plan_beyond_what_is_free_is_told_and_far_beyond_it_critical(prepared, needed, severity):
    sentence = f"this run will need about {needed} GiB, and 10 are free"
    short = Shortage(int(needed * 2**30), 10 * 2**30, sentence, "set a smaller one")
    found = rules_of(check_before(replace(prepared(), short_of_memory=short)))
    assert found["memory-short"].severity == severity
    assert found["memory-short"].summary.endswith("10 are free")
    assert found["memory-short"].remedy == "Set a smaller one."


def test_only_what_is_critical_about_settings_and_rewards_is_refused(prepared):
    fails = {"fails": lambda completions, **_: 1 / 0}
    for on_error, refused in (("stop", True), ("skip", False)):
        ready = prepared(["rewards.functions=[fails]", f"rewards.on_error={on_error}"], fails)
        found = check_before(ready)
        assert "division by zero" in rules_of(found)["reward-fails"].summary
        if refused:
            with pytest.raises(RewardError, match=r"division by zero.*--no-check"):
                refuse(found, ready.config)
        else:
            refuse(found, ready.config)
    leaking = replace(rules_of(found)["reward-fails"], rule="leakage")
    refuse([leaking], ready.config)
