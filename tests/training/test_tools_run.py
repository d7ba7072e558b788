"""Runs with tools, from settings to the final model, over a tiny model whose turns are calls by chance."""

from __future__ import annotations

import copy
import io
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from slow_grpo import slow_logprobs

import groupwise
from groupwise.chat import answer_of, make_speaker, settings_to_ask
from groupwise.config import dump_config
from groupwise.engines.turns import GRACE_S
from groupwise.episodes import worked_episode
from groupwise.episodes.driver import EpisodeEngine
from groupwise.episodes.formats import FORMATS, Asked
from groupwise.errors import ConfigError, DataError, ModelError
from groupwise.evaluation.models import evaluate_model
from groupwise.models.load import load_policy
from groupwise.models.scorer import make_scorer
from groupwise.training.loop import train
from groupwise.training.setup import prepare
from groupwise.training.warm_start import check_worked_examples, warm_start
from tests.tiny import final_weights, forking, rows, tiny_config, write_tiny_llama

QUIET = Console(quiet=True)


class HalfOfThem:
    """A turn of an even number of characters is a call."""

    native = False

    def read(self, text: str) -> list[Asked]:
        return [Asked("calculator", {"expression": f"{len(text)} * 3"})] if len(text) % 2 == 0 else []

    def write(self, name: str, arguments: Any) -> str:
        return f"<call>{name}({next(iter(arguments.values()), '')})</call>"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny", tie_word_embeddings=False, stop_weight=12.0, max_position_embeddings=1024
    )


@pytest.fixture
def config_of(roomy, sums):
    def make(**sections):
        rollout = {"tools": ["calculator"], "max_completion_tokens": 150, "max_turns": 3, **sections.pop("rollout", {})}
        return tiny_config(
            roomy, sums, rollout=rollout, output={"log_completions": 3, "log_tokens": 3, **sections.pop("output", {})}, **sections
        )

    return make


@pytest.fixture
def by_chance(monkeypatch):
    monkeypatch.setitem(FORMATS, "tags", HalfOfThem())


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_with_tools_resumes_to_the_same_weights(config_of, by_chance, letters, tmp_path, ahead):
    config = config_of(rollout={"ahead": ahead}, training={"steps": 4}, output={"checkpoint_every": 1, "keep_checkpoints": 4})
    whole = train(config, rewards=letters, console=QUIET, run_folder=tmp_path / "whole").folder
    logged = rows(whole, "completions")
    several = [row for row in logged if len(row["turns"]) > 1]
    assert several, "the test needs episodes of several turns"
    for row in several:
        assert row["turns"][0]["calls"][0]["result"] == str(3 * len(row["turns"][0]["text"]))
        assert sum(turn["tokens"] for turn in row["turns"]) == row["tokens"] == len(row["token_ids"])
    metrics = rows(whole, "metrics")
    assert all(row["episodes/turns"] > 1 for row in metrics)
    assert all(row["policy/sampler_mismatch"] < 1e-4 for row in metrics[:1])
    again = train(
        config, rewards=letters, console=QUIET, run_folder=tmp_path / "again", resume_from=whole / "checkpoints" / "step-2"
    ).folder
    ours, theirs = final_weights(whole), final_weights(again)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [row["turns"] for row in rows(again, "completions")] == [row["turns"] for row in logged if row["step"] > 2]


def test_a_deterministic_run_awaits_every_answer(config_of, letters):
    waits = [prepare(config_of(training={"deterministic": chosen}), letters).episodes.grace_s for chosen in (True, False)]
    assert waits == [None, GRACE_S]


def test_rewards_see_the_conversation_and_the_calls(config_of, by_chance, tmp_path):
    seen = []

    def spy(completions, calls, finish_reason, **columns):
        seen.extend(zip(completions, calls, finish_reason, strict=True))
        return [float(len(one)) for one in calls]

    config = config_of(rewards={"functions": [{"function": "spy"}]}, training={"steps": 1})
    train(config, rewards={"spy": spy}, console=QUIET, run_folder=tmp_path / "run")
    called = [(messages, calls) for messages, calls, reason in seen if calls and reason == "stop"]
    assert called
    for messages, calls in called:
        assert [m["role"] for m in messages] == ["assistant", "tool"] * len(calls) + ["assistant"]
        assert [m["content"] for m in messages if m["role"] == "tool"] == [call["result"] for call in calls]
        assert all(call["name"] == "calculator" and call["failure"] is None for call in calls)


def test_evaluation_plays_episodes_and_judges_the_last_turn(config_of, by_chance, roomy):
    (result,) = evaluate_model(str(roomy), config_of())
    turns = [record["turns"] for record in result.records]
    assert any(len(one) > 1 for one in turns)
    assert all(
        record["response"] == [t for t in record["turns"] if t["role"] == "assistant"][-1]["text"] for record in result.records
    )


@pytest.fixture
def own_tools(roomy, sums, tmp_path):
    """What a run with a tool of its own leaves behind."""
    (tmp_path / "mine.py").write_text(
        'def calculator(expression: str) -> str:\n    """Computes.\n\n    Args:\n        expression: What to compute.\n    """\n'
        "    return 'from a tool'\n"
    )
    rollout = {"tools": [f"{tmp_path / 'mine.py'}:calculator"], "max_completion_tokens": 150, "max_turns": 3}
    shutil.copytree(roomy, tmp_path / "run" / "final_model")
    (tmp_path / "run" / "config.yaml").write_text(dump_config(tiny_config(roomy, sums, rollout=rollout)), encoding="utf-8")
    return tmp_path / "run"


ASKED = [f"{a} * 7 = ?" for a in range(6)]


def test_a_run_s_own_tools_are_allowed_from_python(own_tools, by_chance):
    with pytest.raises(ConfigError, match=r"in Python: overrides=\['model.trust_remote_code=true'\]"):
        groupwise.generate(own_tools, ASKED)
    assert len(groupwise.generate(own_tools, ASKED, ["model.trust_remote_code=true"])) == len(ASKED)


def test_an_answer_from_python_is_the_last_turn_and_a_reader_is_shown_all(own_tools, by_chance):
    speaker = make_speaker(*settings_to_ask(str(own_tools), ["model.trust_remote_code=true"]), 1.0, False, 0)
    shown = io.StringIO()
    for speaker.seed, asked in enumerate(ASKED):
        speaker.forget()
        assert speaker.answer(asked, shown) == answer_of(speaker, asked) == speaker.messages[-1]["content"]
    assert "from a tool" in shown.getvalue()


def scripted(folder, script):
    path = folder / "scripted.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{a} * 7 = ?", "answer": str(7 * a), "script": script(a)}) + "\n" for a in range(24))
    )
    return path


def test_the_warm_start_learns_what_the_policy_says_and_not_what_it_is_given(roomy, tmp_path):
    data = scripted(tmp_path, lambda a: [f"<call>calculator({a} * 7)</call>", f"It is {7 * a}."])
    config = tiny_config(
        roomy, data, rollout={"tools": ["calculator"]}, warm_start={"steps": 1, "examples_per_step": 4},
        rewards={"functions": [{"function": "correctness"}]},
    )  # fmt: skip
    prepared = prepare(config)
    policy = load_policy(config.model)
    ((_, ids, own),) = worked_episode(prepared.train_prompts[3], prepared.answer_style, policy.tokenizer, prepared.episodes)
    a = int(prepared.train_prompts[3].problem.question.split()[0])
    assert policy.tokenizer.decode(ids) == (
        f"<call>calculator({a} * 7)</call><|im_end|>\n<|im_start|>tool\n{7 * a}<|im_end|>\n<|im_start|>assistant\nIt is {7 * a}.<|im_end|>"
    )
    said = policy.tokenizer.decode([t for t, s in zip(ids, own, strict=True) if s])
    assert said == f"<call>calculator({a} * 7)</call><|im_end|>It is {7 * a}.<|im_end|>"
    assert len(learnt_by_a_warm_start(config, prepared, policy)) == 4


def test_a_warm_start_learns_all_samples_of_a_script_that_forks(roomy, tmp_path):
    """And the longest of them must fit the context: the second, which begins with the history."""
    model = forking(Path(shutil.copytree(roomy, tmp_path / "model")))
    data = scripted(tmp_path, lambda a: [f"So: <call>calculator({a} * 7)</call>", f"It is {7 * a}."])
    config = tiny_config(
        model, data, rollout={"tools": ["calculator"], "rewritten_history": "fork"}, warm_start={"steps": 1, "examples_per_step": 4},
        rewards={"functions": [{"function": "correctness"}]},
    )  # fmt: skip
    prepared = prepare(config)
    policy = load_policy(config.model)
    used = learnt_by_a_warm_start(config, prepared, policy)
    assert len(used) == 8
    longest = max(len(asked) + len(ids) for asked, ids, _ in used)
    check = partial(check_worked_examples, config, prepared.train_prompts, policy.tokenizer, prepared.answer_style)
    check(longest, prepared.episodes)
    with pytest.raises(DataError, match="the warm start would learn from problem"):
        check(longest - 1, prepared.episodes)


def learnt_by_a_warm_start(config, prepared, policy):
    """The samples of one step, whose loss is the mean over all tokens that the policy should say in them."""
    before, losses, used = copy.deepcopy(policy.model).double(), [], []

    def spied(*arguments):
        used.extend(played := worked_episode(*arguments))
        return played

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupwise.training.warm_start.worked_episode", spied)
        warm_start(
            make_scorer(policy, config.model), prepared.train_prompts, policy.tokenizer, prepared.answer_style, config,
            lambda step, loss: losses.append(loss), episodes=prepared.episodes,
        )  # fmt: skip
    with torch.no_grad():
        expected = torch.cat([slow_logprobs(before, asked, ids)[torch.tensor(own)] for asked, ids, own in used])
    assert losses == [pytest.approx(-expected.mean().item(), abs=1e-5)]
    return used


def test_the_generator_s_problems_are_worked_with_the_calculator(roomy):
    config = tiny_config(
        roomy, "arithmetic", data={"holdout": 5, "arithmetic": {"problems": 20, "operations": ["x"], "steps": 1,
        "largest_factor": 99, "largest_number": 999}},
        rollout={"tools": ["calculator"]}, rewards={"functions": [{"function": "correctness"}]},
    )  # fmt: skip
    prepared = prepare(config)
    for prompt in prepared.train_prompts[:10]:
        ((_, ids, _),) = worked_episode(prompt, prepared.answer_style, prepared.tokenizer, prepared.episodes)
        text = prepared.tokenizer.decode(ids)
        assert text.startswith(f"<call>calculator({prompt.problem.columns['expression']})</call>")
        assert f"tool\n{prompt.problem.answer}<|im_end|>" in text
        assert "Tools: calculator(expression): Computes an arithmetic expression." in prompt.text


def test_gsm8k_s_problems_are_worked_with_the_calculator_by_their_marks(roomy, tmp_path):
    """One call for each mark, each answered before the next; where there is no calculator, the solution alone."""
    solution = "48/2 = <<48/2=24>>24 in May.\nThat makes 48+24 = <<48+24=72>>72.\n#### 72"
    data = tmp_path / "gsm8k.jsonl"
    data.write_text("".join(json.dumps({"question": f"How many, {a}?", "answer": solution}) + "\n" for a in range(8)))
    answer = "<reasoning>\n48/2 = 24 in May.\nThat makes 48+24 = 72.\n</reasoning>\n<answer>\n72\n</answer>"
    other = tmp_path / "other.py"
    other.write_text(
        'def look_up(word: str) -> str:\n    """Looks up.\n\n    Args:\n        word: What.\n    """\n    return word\n'
    )
    for tool, calls in (("calculator", ["48/2", "48+24"]), (f"{other}:look_up", [])):
        config = tiny_config(roomy, data, rollout={"tools": [tool]}, rewards={"functions": [{"function": "correctness"}]})
        prepared = prepare(config)
        ((_, ids, own),) = worked_episode(prepared.train_prompts[0], "xml", prepared.tokenizer, prepared.episodes)
        said = prepared.tokenizer.decode([t for t, s in zip(ids, own, strict=True) if s])
        assert said == "".join(f"<call>calculator({one})</call><|im_end|>" for one in calls) + f"{answer}<|im_end|>"
        given = prepared.tokenizer.decode([t for t, s in zip(ids, own, strict=True) if not s])
        assert [word for word in given.split() if word.split("<")[0].isdecimal()] == ["24<|im_end|>", "72<|im_end|>"][
            : len(calls)
        ]


@pytest.mark.parametrize("script", [[], "one text", [1], {}])
def test_a_script_that_is_no_list_of_texts_is_refused(roomy, tmp_path, script):
    config = tiny_config(
        roomy, scripted(tmp_path, lambda a: script), rollout={"tools": ["calculator"]}, warm_start={"steps": 1},
        rewards={"functions": [{"function": "correctness"}]},
    )  # fmt: skip
    with pytest.raises(DataError, match="must be a list of texts, the policy's turns in order"):
        prepare(config)


@pytest.mark.parametrize(
    ("sections", "error", "why"),
    [
        ({"rollout": {"tools": ["calculater"]}}, ConfigError, "did you mean 'calculator'"),
        ({"rollout": {"tools": ["calculator"]}, "prompt": {"style": "plain"}}, ConfigError, "use prompt.style=chat"),
    ],
)
def test_what_tools_need_is_said_before_weights_are_loaded(roomy, sums, sections, error, why):
    with pytest.raises(error, match=why):
        prepare(tiny_config(roomy, sums, rewards={"functions": [{"function": "correctness"}]}, **sections))


def test_a_template_that_rewrites_history_is_refused_by_default_and_appended_to_by_choice(roomy, sums, tmp_path):
    import shutil

    from transformers import AutoTokenizer

    folder = shutil.copytree(roomy, tmp_path / "forgets")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
    tokenizer.save_pretrained(folder)

    def prepared(**rollout):
        return prepare(
            tiny_config(
                folder, sums, rollout={"tools": ["calculator"], **rollout}, rewards={"functions": [{"function": "correctness"}]}
            )
        )

    with pytest.raises(ConfigError, match=r"rewrites what was said before .*<think>.* set rollout.rewritten_history=append"):
        prepared()
    assert prepared(rewritten_history="append").episodes is not None
    assert prepared(rewritten_history="fork").episodes.forks


def test_settings_of_episodes_without_tools_are_refused(roomy, sums):
    for name, value in {"max_turns": 3, "call_format": "hermes", "tool_timeout_s": 1.0, "concurrent_tool_calls": 2}.items():
        with pytest.raises(ConfigError, match=f"{name} is {value}, but without tools and environment it would do nothing"):
            tiny_config(roomy, sums, rollout={name: value})


def test_a_model_without_a_chat_template_is_refused(roomy, sums, tmp_path):
    import shutil

    from transformers import AutoTokenizer

    folder = shutil.copytree(roomy, tmp_path / "bare")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    for left in folder.glob("chat_template*"):
        left.unlink()
    with pytest.raises(ModelError, match="an episode needs a chat template"):
        prepare(
            tiny_config(folder, sums, rollout={"tools": ["calculator"]}, rewards={"functions": [{"function": "correctness"}]})
        )


def test_an_engine_that_plays_is_as_good_as_the_one_inside(roomy, config_of):
    config = config_of()
    prepared = prepare(config, rewards={"letters": lambda completions: [0.0] * len(completions)})
    policy = load_policy(config.model)
    from groupwise.engines import make_engine
    from groupwise.episodes import playing

    inside = make_engine(policy, config.rollout)
    assert playing(inside, None) is inside
    around = playing(inside, prepared.episodes)
    assert isinstance(around, EpisodeEngine)
    around.refresh(7)
    assert inside.policy_version == 7
    assert around.limit is inside.limit
    assert around.metrics().keys() == inside.metrics().keys()
