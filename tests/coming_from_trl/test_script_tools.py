"""Scripts with ``tools=`` and ``environment_factory=``: TRL's rules, and beside TRL itself the same episodes token for token.

The policy says what a script says, on both sides: a random model would call nothing.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import math
from collections import deque
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from groupwise.engines.base import Engine
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.trl import GRPOConfig, GRPOTrainer
from groupwise.trl.episodes import EMPTY_PROMPT, Pool, Rounds, Whole, conversation, open_script
from groupwise.types import Completion, Problem
from tests.tiny import write_tiny_llama

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}A call is JSON in <tool_call>.<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


async def waits(word: str) -> bool:
    """Waits a moment.

    Args:
        word: Any.
    """
    await asyncio.sleep(0.001)
    return word == "x"


def tells(words: int) -> str:
    """Tells something long.

    Args:
        words: How many words.
    """
    return "word " * words


class Counter:
    """Counts up; what it came to is its reward."""

    made = 0

    def __init__(self) -> None:
        Counter.made += 1

    def reset(self, start: int = 0, **row: Any) -> str:
        self.count, self.row = start, row
        return f" It stands at {start}."

    def step(self, by: int) -> int:
        """Counts up.

        Args:
            by: By how much.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


class Echo:
    """Has no reward of its own."""

    def reset(self, **row: Any) -> None:
        self.said: list[str] = []

    def shout(self, text: str) -> str:
        """Repeats.

        Args:
            text: What.
        """
        self.said.append(text)
        return text.upper()


TURNS: dict[str, list[list[str]]] = {
    # what the members of each group say, turn by turn
    "tools": [
        [f"Let me see.\n{call('multiply', a=3, b=4)}", "It is 12."],
        [call("multiply", a=1, b=2) + "\n" + call("waits", word="x"), call("waits", word="y"), "Done, ünï 漢字 🙂."],
        ["I know: 12."],
        [call("tells", words=300), "never said"],
    ],
    "counter": [
        [call("step", by=2), call("step", by=3), "Five."],
        [call("step", by=1), "One."],
        ["None."],
        [call("step", by=7), call("step", by=1), call("step", by=1), "Nine."],
    ],
    "echo": [[call("shout", text="hi"), "HI"], ["no"], [call("shout", text="a") + call("shout", text="b"), "ok"], ["nothing."]],
}


@dataclass
class Scripted(Engine):
    """One token a byte. The script is that of the environment that a problem names, or of tools."""

    tokenizer: Any
    turns: Any
    asked: list[Any] = field(default_factory=list)

    def refresh(self, policy_version: int) -> None:
        """Nothing."""

    def serve(self, request: Any, on_progress: Any = None) -> list[tuple[Completion, ...]]:
        self.asked.append(request)
        return [
            tuple(self.say(prompt.problem, sample, request.settings.max_tokens) for sample in range(request.samples_per_prompt))
            for prompt in request.prompts
        ]

    def say(self, problem: Any, sample: int, room: int) -> Completion:
        _, *rest = problem.id.split("\x1f")
        named = dict(part.split("=") for part in rest)
        turns = self.turns[problem.columns.get("environment", "tools")]
        text = turns[int(named.get("sample", sample)) % len(turns)][int(named.get("turn", 0))]
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id][:room]
        whole = ids[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(text, tuple(ids), (-0.5,) * len(ids), "stop" if whole else "length", sample)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    shape = {
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "pad_token_id": None,
    }  # its embedding is not trained in TRL
    folder = write_tiny_llama(tmp_path_factory.mktemp("tools"), **shape)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(folder: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def data() -> Any:
    from datasets import Dataset

    rows = {"prompt": [[{"role": "user", "content": f"{a} * 4?"}] for a in range(6)], "answer": [4 * a for a in range(6)]}
    return Dataset.from_dict(rows)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Scripted:
    """Samples in place of the engine, in every trainer that is made in the test."""
    engine = Scripted(tokenizer, TURNS)
    monkeypatch.setattr("groupwise.trl.parts.make_engine", lambda *_, **__: engine)
    return engine


@pytest.fixture
def arguments(tmp_path: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 400,
        "max_steps": 2, "learning_rate": 1e-3, "logging_steps": 1, "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "save_strategy": "no", "gradient_checkpointing": False, "adam_epsilon": 1e-3, "shuffle_dataset": False,
    }  # fmt: skip


def length(completions: Any, **_: Any) -> list[float]:
    """Of all that the assistant says, and a little for each call."""
    return [
        sum(len(m["content"]) + 3 * len(m.get("tool_calls", ())) for m in one if m["role"] == "assistant") / 50
        for one in completions
    ]


def sampled_in(trainer: Any) -> list[Completion]:
    return trainer._generation[1].sampled  # type: ignore[no-any-return]


def test_calls_are_made_and_told_as_in_trl(folder, data, arguments, scripted):
    seen: list[Any] = []

    def reward(completions, completion_ids, prompts, answer, **_):
        seen.append((completions, completion_ids, prompts, answer))
        return length(completions)

    trainer = GRPOTrainer(str(folder), reward, GRPOConfig(**arguments | {"max_steps": 1}), data, tools=[multiply, waits, tells])
    trainer.train()
    completions, ids, prompts, answer = seen[0]
    assert completions[0] == [
        {
            "role": "assistant", "content": "Let me see.",
            "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}}],
        },
        {"role": "tool", "name": "multiply", "content": "12"},
        {"role": "assistant", "content": "It is 12."},
    ]  # fmt: skip
    assert [(m["role"], m["content"]) for m in completions[1]] == [
        ("assistant", ""), ("tool", "2"), ("tool", "True"), ("assistant", ""), ("tool", "False"), ("assistant", "Done, ünï 漢字 🙂."),
    ]  # fmt: skip
    assert completions[2] == [{"role": "assistant", "content": "I know: 12."}]
    assert [m["role"] for m in completions[3]] == ["assistant"], "1,500 letters do not fit: they are not there"
    assert prompts[0] == [{"role": "user", "content": "0 * 4?"}]
    assert answer == [0] * 4 + [4] * 4
    assert [list(c.token_ids) for c in sampled_in(trainer)] == ids
    assert b"multiply" in bytes(trainer.processing_class.decode(trainer._generation[1].groups[0].prompt.token_ids), "utf-8")
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] == pytest.approx((1 + 3 + 0 + 1) / 4)
    assert log["tools/failure_frequency"] == 0
    assert log["completions/mean_length"] == pytest.approx(sum(c.sampled_tokens for c in sampled_in(trainer)) / 8)
    assert log["completions/clipped_ratio"] == 0


def test_a_call_that_fails_is_told_and_counted(folder, data, arguments, scripted):
    def breaks(word: str) -> str:
        """Breaks.

        Args:
            word: Any.
        """
        raise KeyError(word)

    bad = '<tool_call>\n{"arguments": {a: 3}}\n</tool_call>'
    scripted.turns = {"tools": [
        [call("breaks", word="w"), "ok"], [call("nothing", a=1), "ok"], [call("multiply", a=3, b=1, c=4), "ok"], [bad, "never said"],
    ]}  # fmt: skip
    seen: list[Any] = []

    def reward(completions, **_):
        seen.extend(completions)
        return length(completions)

    trainer = GRPOTrainer(str(folder), reward, GRPOConfig(**arguments | {"max_steps": 1}), data, tools=[multiply, breaks])
    trainer.train()
    assert seen[0][1]["content"] == "error: KeyError: 'w'"
    assert "no tool 'nothing'" in seen[1][1]["content"]
    assert "unexpected keyword argument 'c'" in seen[2][1]["content"]
    assert seen[3] == [{"role": "assistant", "content": bad}], "what cannot be read is an answer"
    assert trainer.state.log_history[0]["tools/call_frequency"] == pytest.approx(3 / 4)
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 1


def test_a_result_of_any_kind_is_written_by_str(folder, data, arguments, scripted):
    results = [Decimal("0.10"), np.int64(3), datetime.date(2026, 1, 2), {1}, Echo]

    def gives(which: int) -> Any:
        """Gives something.

        Args:
            which: Its number.
        """
        return results[which]

    scripted.turns = {"tools": [["".join(call("gives", which=i) for i in range(len(results))), "ok"]]}
    trainer = GRPOTrainer(str(folder), length, GRPOConfig(**arguments | {"max_steps": 1}), data, tools=[gives])
    trainer.train()
    assert [made.result for made in sampled_in(trainer)[0].calls] == [str(result) for result in results]


@pytest.mark.parametrize(("rounds", "counts"), [(0, [0, 0, 0, 0]), (1, [2, 1, 0, 7]), (2, [5, 1, 0, 8]), (None, [5, 1, 0, 9])])
def test_rounds_of_calls_have_a_limit(folder, data, arguments, scripted, rounds, counts):
    """The calls beyond it are not made: the counter does not move."""
    scripted.turns = {"tools": TURNS["counter"]}
    args = GRPOConfig(**arguments | {"max_steps": 1, "max_tool_calling_iterations": rounds})
    trainer = GRPOTrainer(str(folder), None, args, data, environment_factory=Counter)
    trainer.train()
    assert [one.count for one in trainer.environments] == counts * 2
    assert trainer.state.log_history[0]["rewards/Counter/mean"] == pytest.approx(sum(counts) / 4)
    told = [c.turns[-1].role for c in sampled_in(trainer)]
    assert set(told) == {"assistant"}


def test_environments_are_made_once_and_reset_often(folder, arguments, scripted):
    from datasets import Dataset

    rows = Dataset.from_dict({"environment": ["counter", "echo"] * 2, "start": [0, 0, 5, 0]})
    seen: list[Any] = []

    def reward(completions, environments, environment, **_):
        seen.append((environments, environment))
        return length(completions)

    Counter.made = 0
    args = GRPOConfig(**arguments, reward_weights=[0.5])
    trainer = GRPOTrainer(str(folder), reward, args, rows, environment_factory={"counter": Counter, "echo": Echo})
    assert (trainer.reward_func_names, trainer.reward_weights.tolist()) == (["reward", "Counter"], [0.5, 1.0])
    assert [tool.__name__ for tool in trainer.tools] == ["step", "shout"]
    trainer.train()
    (environments, names), (again, _) = seen
    assert [type(one).__name__ for one in environments] == ["Counter"] * 4 + ["Echo"] * 4
    assert names == ["counter"] * 4 + ["echo"] * 4
    assert all(one is other for one, other in zip(environments, again, strict=True))
    assert Counter.made == 4
    assert [one.count for one in again[:4]] == [10, 6, 5, 14], "the second row starts at 5"
    assert [one.said for one in again[4:]] == [["hi"], [], ["a", "b"], []]
    assert again[0].row == {}, "the name of the environment is not told, and there is no prompt"
    assert trainer.train_prompts[0].messages[-1]["content"] == " It stands at 0."
    of_counter = trainer.processing_class.decode(trainer.train_prompts[0].token_ids)
    assert "Counts up" in of_counter
    assert "Repeats" not in of_counter
    log = trainer.state.log_history[0]
    assert log["rewards/Counter/mean"] == pytest.approx((5 + 1 + 0 + 9) / 4), "it does not apply to Echo"


def test_a_row_s_list_is_each_environment_s_own():
    class UsesUp:
        def reset(self, cards: list[int], **row: Any) -> str:
            return f"{cards.pop()}"

    pool, problem = Pool({None: UsesUp}, None), Problem("p", EMPTY_PROMPT, "", {"cards": [1, 2, 3]})
    assert [pool.opening(problem)[0] for _ in range(2)] == ["3", "3"]
    assert problem.columns == {"cards": [1, 2, 3]}


def test_environments_may_bring_the_prompts(folder, arguments, scripted):
    class Owner(Counter):
        def reset(self, seed: int, **row: Any) -> str:
            super().reset()
            return f"Task {seed}."

        async def get_reward(self) -> float:
            return 1.0 + self.count

    scripted.turns = {"tools": TURNS["counter"]}
    with pytest.raises(ConfigError, match="set max_steps"):
        GRPOTrainer(str(folder), None, GRPOConfig(**arguments | {"max_steps": -1}), environment_factory=Owner)
    trainer = GRPOTrainer(str(folder), None, GRPOConfig(**arguments), environment_factory=Owner)
    trainer.train()
    asked = {prompt.messages[-1]["content"] for request in scripted.asked for prompt in request.prompts if prompt.messages}
    assert len(asked) == 4, "every prompt is a new one: 2 steps of 2"
    assert trainer.state.log_history[0]["reward"] == pytest.approx(1 + 15 / 4)


def test_what_an_environment_says_at_the_start_may_change_in_the_run(folder, data, arguments, scripted):
    class Lessons(Counter):
        level = 1

        def reset(self, **row: Any) -> str:
            super().reset()
            return f" Level {self.level}."

    class Harder(TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            Lessons.level += 1

    scripted.turns = {"tools": TURNS["counter"]}
    args = GRPOConfig(**arguments | {"max_steps": -1, "num_train_epochs": 2})
    GRPOTrainer(str(folder), None, args, data, environment_factory=Lessons, callbacks=[Harder()]).train()
    asked = {prompt.messages[-1]["content"] for request in scripted.asked for prompt in request.prompts if prompt.messages}
    assert asked == {f"{a} * 4? Level {level}." for a in range(6) for level in (1, 2)}


def test_each_completion_has_its_own_environment_whenever_it_ends(tiny_folder, chats, settings, monkeypatch):
    """The real engine, whose completions begin together and end at different times."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template += "{# calls are JSON in <tool_call> #}"
    heard: list[bool] = []

    class Hears(Echo):
        def reset(self, **row: Any) -> None:
            self.heard: str | None = None

    reply = Rounds.reply

    def hearing(self, turn):
        self.environment.heard = turn.text
        return reply(self, turn)

    def reward(completions, environments, **_):
        for one, (message,) in zip(environments, completions, strict=True):
            assert one.heard in (None, message["content"])
            heard.append(one.heard is not None)
        return [float(len(one[0]["content"])) for one in completions]

    monkeypatch.setattr(Rounds, "reply", hearing)
    monkeypatch.setattr(Whole, "beside", lambda self, text: text)
    args = settings(max_steps=3, max_completion_length=24)
    GRPOTrainer(str(tiny_folder), reward, args, chats, processing_class=tokenizer, environment_factory=Hears).train()
    assert len(heard) == 24
    assert 4 < sum(heard) < 24, "the test needs completions that end by themselves"


def test_an_environment_that_fails_stops_the_run(folder, data, arguments, scripted):
    class Broken(Counter):
        def get_reward(self) -> float:
            raise RuntimeError("no score today")

    class Unruly(Counter):
        def reset(self, **row: Any) -> str:
            super().reset()
            return f"{id(self)}"

    scripted.turns = {"tools": TURNS["counter"]}
    for factory, words in ((Broken, "no score today"), (Unruly, "members of a group must start alike")):
        trainer = GRPOTrainer(str(folder), length, GRPOConfig(**arguments), data, environment_factory=factory)
        with pytest.raises(GroupwiseError, match=words):
            trainer.train()


def test_tools_run_one_after_the_other_in_the_training_thread(folder, data, arguments, scripted):
    import threading

    threads = []

    def where(word: str) -> str:
        """Says where it runs.

        Args:
            word: Any.
        """
        threads.append(threading.current_thread())
        return word

    scripted.turns = {"tools": [[call("where", word="a"), "ok"]] * 4}
    GRPOTrainer(str(folder), length, GRPOConfig(**arguments), data, tools=[where]).train()
    assert len(threads) == 16
    assert set(threads) == {threading.main_thread()}


def test_what_cannot_be_is_refused_in_one_sentence(folder, data, arguments, tiny_folder):
    from datasets import Dataset
    from transformers import AutoTokenizer

    def undescribed(a):
        return a

    class Endless:
        """No reset."""

    unread = AutoTokenizer.from_pretrained(folder)
    unread.chat_template = TEMPLATE.replace("<tool_call>", "<function=")
    plain = Dataset.from_dict({"prompt": ["1 + 1 ="] * 4})
    named = data.add_column("environment", ["counter", "clock"] * 3)
    refusals = [
        ({"model": str(tiny_folder), "tools": [multiply]}, "does not support tool calling"),
        ({"tools": [multiply], "processing_class": unread}, "support tool calling in a form that is read here"),
        ({"tools": [undescribed]}, "undescribed cannot be described"),
        ({"tools": [3]}, "is no function"),
        ({"tools": [multiply], "train_dataset": plain}, "make the prompts conversations"),
        ({"environment_factory": Endless}, "has no reset"),
        (
            {"environment_factory": {"counter": Counter}, "train_dataset": named},
            "row 1 .*environment='clock'.*not among the environments",
        ),
        ({"environment_factory": {"counter": Counter}, "train_dataset": None}, "pass a data set"),
        ({"environment_factory": Echo, "reward_funcs": None}, "reward_funcs is empty"),
        ({"rollout_func": print, "tools": [multiply]}, "make it an environment_factory"),
    ]
    for given, words in refusals:
        whole = {"model": str(folder), "reward_funcs": length, "args": GRPOConfig(**arguments), "train_dataset": data, **given}
        with pytest.raises(GroupwiseError, match=words):
            GRPOTrainer(**whole)


@pytest.mark.parametrize(
    ("given", "weights", "words"),
    [
        ({"reward_funcs": None}, {}, "reward_funcs is empty"),
        (
            {"reward_funcs": [length] * 2, "reward_processing_classes": [None]},
            {},
            "2 reward_funcs but 1 reward_processing_classes",
        ),
        ({"reward_funcs": [length] * 2}, {"reward_weights": [1.0]}, "reward_weights has 1 entries for 2 reward_funcs"),
    ],
)
def test_functions_are_counted_before_a_model_is_loaded(given, weights, words, folder, data, arguments, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_make", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(GroupwiseError, match=words):
        GRPOTrainer(str(folder), args=GRPOConfig(**arguments, **weights), train_dataset=data, **given)


def scripted_rollout(prompts, trainer):
    """Two turns of the policy with something given between them, and a column of its own."""
    tokenizer = trainer.processing_class
    asked = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=True)["input_ids"] for p in prompts]
    said = [[f"turn {i % 4}<|im_end|>", " given ", "x" * (i % 4) + "<|im_end|>"] for i in range(len(prompts))]
    parts = [[tokenizer(text, add_special_tokens=False)["input_ids"] for text in one] for one in said]
    return {
        "prompt_ids": asked,
        "completion_ids": [[i for part in one for i in part] for one in parts],
        "logprobs": [[-0.5 for part in one for _ in part] for one in parts],
        "env_mask": [[int(n != 1) for n, part in enumerate(one) for _ in part] for one in parts],
        "earned": [float(i % 4) for i in range(len(prompts))],
    }


def padded_rollout(prompts, trainer):
    """The same, and half of the completions are padded after their end."""
    found = scripted_rollout(prompts, trainer)
    for i in range(0, len(prompts), 2):
        found["completion_ids"][i].append(trainer.processing_class.pad_token_id)
        found["logprobs"][i].append(0.0)
        found["env_mask"][i].append(0)
    return found


def earned_and_more(completions, earned, **_):
    return [e + len(c[0]["content"]) / 100 for e, c in zip(earned, completions, strict=True)]


def test_a_rollout_of_the_script_s_own_is_learnt_from(folder, data, arguments, scripted):
    trainer = GRPOTrainer(str(folder), earned_and_more, GRPOConfig(**arguments), data, rollout_func=scripted_rollout)
    trainer.train()
    assert not scripted.asked, "the engine samples nothing"
    (first, *_) = sampled_in(trainer)
    assert [(t.role, t.text) for t in first.turns] == [("assistant", "turn 0"), ("tool", " given "), ("assistant", "")]
    assert trainer.state.log_history[0]["reward"] == pytest.approx(1.5 + (6 + 7 + 1.5) / 100)
    broken = [
        (lambda out: out.pop("logprobs"), r"must return keys \['logprobs'\]"),
        (lambda out: out["completion_ids"].pop(), "7 completion_ids and 8 prompt_ids for 8 prompts"),
        (lambda out: out["env_mask"][3].pop(), "for prompt 3"),
        (lambda out: out["prompt_ids"][2].append(1), "different prompt_ids"),
    ]
    for breaks, words in broken:

        def rollout(prompts, trainer, breaks=breaks):
            out = scripted_rollout(prompts, trainer)
            breaks(out)
            return out

        with pytest.raises(ConfigError, match=words):
            GRPOTrainer(str(folder), earned_and_more, GRPOConfig(**arguments), data, rollout_func=rollout).train()


def test_a_rollout_s_logprobs_may_be_unknown_but_not_where_they_weigh(folder, data, arguments, scripted):
    """Entropy is the policy's of what is learnt from: placeholders do not count in it."""

    def rollout(prompts, trainer):
        return scripted_rollout(prompts, trainer) | {"logprobs": None}

    def half_of_them(earned, **_):
        return [e if i >= 4 else 0.0 for i, e in enumerate(earned)]

    entropies = []
    for function, threshold in ((rollout, 0.1), (scripted_rollout, 9.0)):
        args = GRPOConfig(**arguments, off_policy_mask_threshold=threshold)
        trainer = GRPOTrainer(str(folder), half_of_them, args, data, rollout_func=function)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        assert all(math.isfinite(row["loss"]) for row in rows)
        entropies.append(rows[0]["entropy"])
    assert entropies[0] == pytest.approx(entropies[1])
    assert entropies[0] > 3, "of random weights"
    args = GRPOConfig(**arguments, use_vllm=True)
    with pytest.raises(ConfigError, match="None as logprobs, but with use_vllm completions are weighted by them"):
        GRPOTrainer(str(folder), earned_and_more, args, data, rollout_func=rollout).train()


@pytest.mark.parametrize("unknown", [math.nan, None])
def test_a_token_of_a_rollout_without_a_known_logprob_is_weighted_by_1(folder, data, arguments, scripted, unknown):
    def rollout(prompts, trainer):
        found = scripted_rollout(prompts, trainer)
        for one in found["logprobs"]:
            one[0] = unknown
        return found

    args = GRPOConfig(**arguments | {"max_steps": 1}, use_vllm=True, vllm_importance_sampling_mode="token_truncate")
    trainer = GRPOTrainer(str(folder), earned_and_more, args, data, rollout_func=rollout)
    trainer.train()
    (part,) = trainer._generation[1].parts.values()
    unknown_T = part.window.batch.sampler_logprobs_T.isnan()
    assert unknown_T.any()
    assert (part.window.batch.correction_T[unknown_T] == 1).all()
    assert (part.window.batch.correction_T[~unknown_T] < 1).all(), "less likely than said"
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_logged_completions_hold_calls_of_any_arguments(folder, data, arguments, scripted, capsys):
    from pyarrow import parquet

    args = GRPOConfig(**arguments | {"log_completions": True, "max_steps": 1})
    GRPOTrainer(str(folder), length, args, data, tools=[multiply, waits, tells]).train()
    (file,) = (p for p in Path(args.output_dir, "completions").iterdir())
    (first, second, *_) = parquet.read_table(file)["completion"].to_pylist()
    assert json.loads(first[0]["tool_calls"])[0]["function"]["arguments"] == {"a": 3, "b": 4}
    assert [m["content"] for m in second if m["role"] == "tool"] == ["2", "True", "False"]
    assert '"multiply"' in capsys.readouterr().out


# --- beside TRL ----------------------------------------------------------------------------------------------------------------


CASES: dict[str, dict[str, Any]] = {
    "tools": {"tools": [multiply, waits, tells]},
    "tools, grpo": {"tools": [multiply, waits, tells], "loss_type": "grpo", "beta": 0.1, "num_iterations": 2},
    "tools, bnpo, truncated masked": {
        "tools": [multiply, waits, tells], "loss_type": "bnpo", "mask_truncated_completions": True, "max_completion_length": 130,
    },
    "one round": {"tools": [multiply, waits, tells], "max_tool_calling_iterations": 1},
    "an environment": {"environment_factory": Counter, "script": {"tools": TURNS["counter"]}, "max_tool_calling_iterations": 2},
    "two environments": {"environment_factory": {"counter": Counter, "echo": Echo}, "reward_weights": [0.3]},
    "sequences": {
        "tools": [multiply, waits, tells], "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2,
    },
}  # fmt: skip
NOT_COMPARED = {"entropy", "step_time", "total_flos", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
BY_SWEEP = {
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_max",
    "kl",
}


def recorded(name: str, seen: list[Any]) -> Any:
    def reward(completions, completion_ids, prompts, **_):
        seen.append((prompts, completions, completion_ids))
        return length(completions)

    reward.__name__ = name
    return reward


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_same_episodes_teach_what_they_teach_in_trl(name, folder, data, arguments, scripted, monkeypatch):
    trl = pytest.importorskip("trl", exc_type=ImportError)
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_template

    case = dict(CASES[name])
    scripted.turns = case.pop("script", TURNS)
    actors = {key: case.pop(key) for key in ("tools", "environment_factory") if key in case}
    if "environment_factory" in actors and isinstance(actors["environment_factory"], dict):
        data = data.add_column("environment", ["counter", "echo"] * 3).add_column("start", range(6))
    arguments |= case
    mine: list[Any] = []
    trainer = GRPOTrainer(str(folder), recorded("reward", mine), GRPOConfig(**arguments), data, **actors)
    generations, generate = [], trainer._generate

    def generated(*given):
        generations.append(generate(*given))
        return generations[-1]

    vars(trainer)["_generate"] = generated
    trainer.train()

    theirs: list[Any] = []
    processing = AutoTokenizer.from_pretrained(folder)
    processing.response_template = qwen3_template
    other = trl.GRPOTrainer(
        str(folder),
        recorded("reward", theirs),
        trl.GRPOConfig(**arguments, report_to="none"),
        data,
        processing_class=processing,
        **actors,
    )
    turns: dict[tuple[int, ...], deque[list[int]]] = {}
    masks = [list(c.sampled) for generation in generations for c in generation.sampled]
    for generation in generations:
        for group in generation.groups:
            for completion in group.completions:
                at = 0
                for turn in completion.turns:
                    before = (*group.prompt.token_ids, *completion.token_ids[:at])
                    if turn.sampled:
                        turns.setdefault(before, deque()).append(list(completion.token_ids[at : at + turn.tokens]))
                    at += turn.tokens

    def replay(prompt_ids, *_, **__):
        return [turns[tuple(map(int, ids))].popleft() for ids in prompt_ids], None

    found_masks: list[list[bool]] = []
    loop = other._tool_call_loop

    def looped(*given):
        out = loop(*given)
        found_masks.extend([bool(x) for x in mask] for mask in out[0])
        return out

    other._generate_single_turn, other._tool_call_loop = replay, looped
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)
    other.train()
    assert not any(turns.values()), "every turn that was sampled here was asked for by TRL, after the same tokens"
    assert masks == found_masks
    assert any(not all(mask) for mask in masks), "the test needs tokens that were given"
    assert mine == theirs, "reward functions are given the same"

    assert_same_run(trainer, other, folder, BY_SWEEP if "importance_sampling_level" in arguments else set())


def assert_same_run(trainer, other, folder, skipped):
    """Logs, and weights to 1e-5."""
    from transformers import AutoModelForCausalLM

    assert len(trainer.state.log_history) == len(other.state.log_history) > 2
    for row, expected in zip(trainer.state.log_history, other.state.log_history, strict=True):
        names = {n for n in expected if n not in NOT_COMPARED | skipped}
        assert names <= set(row), names - set(row)
        for key in sorted(n for n in names if expected[n] is not None):
            assert row[key] == pytest.approx(expected[key], rel=2e-3, abs=2e-5), (key, row["step"])
    start = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    weights = dict(other.model.named_parameters())
    moved = max(float((weights[n] - p).abs().max()) for n, p in start.items())
    apart = max(float((weights[n] - p).abs().max()) for n, p in trainer.model.named_parameters())
    assert moved > 1e-4
    assert apart < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("rollout", "changes"),
    [
        (scripted_rollout, {}),
        (scripted_rollout, {"loss_type": "grpo", "num_iterations": 2, "mask_truncated_completions": True}),
        (scripted_rollout, {"off_policy_mask_threshold": 0.1}),
        (padded_rollout, {"mask_truncated_completions": True}),
    ],
)
def test_a_rollout_of_the_script_s_own_teaches_what_it_teaches_in_trl(rollout, changes, folder, data, arguments, monkeypatch):
    trl = pytest.importorskip("trl", exc_type=ImportError)
    from transformers import AutoTokenizer

    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)
    arguments |= changes
    own, theirs = (AutoTokenizer.from_pretrained(folder, pad_token="<|im_start|>") for _ in range(2))
    args = GRPOConfig(**arguments)
    trainer = GRPOTrainer(str(folder), earned_and_more, args, data, processing_class=own, rollout_func=rollout)
    trainer.train()
    args = trl.GRPOConfig(**arguments, report_to="none")
    other = trl.GRPOTrainer(str(folder), earned_and_more, args, data, processing_class=theirs, rollout_func=rollout)
    other.train()
    assert_same_run(trainer, other, folder, set())


def test_turns_are_read_as_trl_reads_them(tokenizer, arguments):
    pytest.importorskip("trl", exc_type=ImportError)
    from trl.chat_template_utils import parse_response, qwen3_template

    from groupwise.types import Turn

    episodes = open_script([multiply], None, tokenizer, [tokenizer.eos_token_id], GRPOConfig(**arguments))
    tokenizer.response_template = qwen3_template
    one = '<tool_call>{"name": "f", "arguments": {"a": 3}}</tool_call>'
    two, thought = f'{one}\n<tool_call>{{"name": "g"}}</tool_call> bye', "<think>\nhm\n</think>\n\n"
    odd = ("oops", "[1]", '{"arguments": {}}')
    texts = [
        "Done!",
        "",
        " spaced \n",
        f"I call.\n{one}",
        two,
        f"{one}<tool_call>x</tool_call>",
        one[:-12],
        thought + one,
        f"{thought}Done.",
        f"<think>\nAs {one}?\n</think>\n\n{one}",
        f"<think>\nAs {one}?\n</think>\n\nDone.",
    ]
    texts += [f"<tool_call>{text}</tool_call>" for text in odd]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prefix = tokenizer("<|im_start|>assistant\n")["input_ids"]
        theirs = parse_response(tokenizer, [*ids, tokenizer.eos_token_id], prefix=prefix, tools=[multiply])
        completion = Completion(text, tuple(ids), (0.0,) * len(ids), "stop", turns=(Turn("assistant", text, len(ids)),))
        (ours,) = conversation(completion, episodes.format)
        assert ours == theirs, text
