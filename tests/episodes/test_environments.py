"""Environments: TRL's protocol and that of games, what they are told and give, and what becomes of those that fail."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from test_driver import PLENTY, Scripted, episodes_of, prompt_of

from groupwise.chat import Speaker, answer_of, make_speaker
from groupwise.config.schema import Config, PromptConfig, RolloutConfig
from groupwise.doctor import diagnose_prepared
from groupwise.engines.base import SamplingSettings
from groupwise.episodes import open_episodes, render_episode
from groupwise.episodes.driver import EpisodeEngine
from groupwise.episodes.environments import Environments
from groupwise.errors import ConfigError, DataError, TrainingError
from groupwise.rewards.functions import environment as environment_reward
from groupwise.rewards.suite import _unplayed
from groupwise.training.loop import train
from groupwise.training.setup import _note_on_tools, prepare
from groupwise.types import Problem, Prompt
from tests.tiny import tiny_config, write_sums, write_tiny_llama
from tests.waiting import LONG_S, comes


class Guess:
    """A game: higher or lower, one guess a turn."""

    def reset(self, seed: int, largest: int = 64, **row: Any) -> str:
        self.secret = random.Random(seed).randint(1, largest)
        return f" It is between 1 and {largest}."

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        guess = int(text)
        if guess == self.secret:
            return "Right.", 1.0, True, {}
        return ("higher" if guess < self.secret else "lower"), -0.1, False, {}


class Counter:
    """TRL's protocol: methods are tools, and the reward is its own."""

    def __init__(self) -> None:
        self.count = -1

    def reset(self, start: int = 0, **row: Any) -> None:
        self.count = start

    def add(self, number: int) -> int:
        """Adds to the count.

        Args:
            number: How much.
        """
        self.count += number
        return self.count

    def _private(self) -> None:
        raise AssertionError

    def get_reward(self) -> float:
        return float(self.count)


class Sure(Guess):
    """The number is 2."""

    def reset(self, **row: Any) -> None:  # type: ignore[override]
        self.secret = 2


def played(tokenizer, script, *factories, samples=1, prompts=None, timeout_s=LONG_S, max_turns=10, **named):
    environments = Environments(named or {None: factories[0]}, timeout_s)
    episodes = episodes_of(tokenizer, environments=environments, max_turns=max_turns, timeout_s=timeout_s)
    engine = Scripted(tokenizer, script)
    return (
        EpisodeEngine(engine, episodes).sample(prompts or [prompt_of()], samples, PLENTY, seed=3, scope="test"),
        engine,
        episodes,
    )


def test_a_game_answers_every_turn_and_says_when_it_is_over(tokenizer):
    game = Guess()
    Environments({None: Guess}, LONG_S).start(game, prompt_of().problem)
    secret = game.secret
    guesses = [1, 64, secret] if secret not in (1, 64) else [2, 3, secret]
    ((completion,),), _, _ = played(tokenizer, lambda n, s, turn: str(guesses[turn]), Guess)
    assert completion.finish_reason == "stop"
    assert [turn.role for turn in completion.turns] == ["assistant", "user", "assistant", "user", "assistant"]
    assert completion.turns[1].text == ("higher" if guesses[0] < secret else "lower")
    assert [turn.reward for turn in completion.turns if turn.sampled] == [-0.1, -0.1, 1.0]
    assert completion.reward == pytest.approx(0.8)
    assert f"<|im_start|>user\n{completion.turns[1].text}<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(
        completion.token_ids
    )


def test_an_observation_of_none_is_an_empty_turn(tokenizer):
    class Silent(Guess):
        def step(self, text: str) -> Any:
            return None, None, text == "2", {}

    ((completion,),), _, _ = played(tokenizer, lambda n, s, turn: str(turn + 1), Silent)
    assert [turn.text for turn in completion.turns] == ["1", "", "2"]
    assert completion.finish_reason == "stop"


def test_an_observation_is_whole(tokenizer):
    """Its length is the game's, as that of what reset says: the limits of an episode bound it."""

    class Long(Guess):
        def step(self, text: str) -> Any:
            return "x" * 5000, 0.0, False, {}

    episodes = episodes_of(tokenizer, environments=Environments({None: Long}, LONG_S), max_turns=2)
    engine = EpisodeEngine(Scripted(tokenizer, lambda *_: "1"), episodes)
    ((completion,),) = engine.sample([prompt_of()], 1, SamplingSettings(max_tokens=6000), seed=3, scope="test")
    assert completion.turns[1].text == "x" * 5000


def test_a_group_starts_alike_and_each_member_plays_its_own(tokenizer):
    prompts = [Prompt(Problem("p", "?", "1", {"largest": 8}), "?", (5, 6))]
    ((*group,),), _, _ = played(
        tokenizer, lambda n, sample, turn: str(1 + (sample + turn) % 8), Guess, samples=8, prompts=prompts
    )
    assert all(completion.finish_reason == "stop" for completion in group)
    assert len({completion.turns[-1].text for completion in group}) == 1, "all found the same number"
    assert len({len(completion.turns) for completion in group}) == 8


def test_methods_are_tools_and_state_is_the_episode_s_own(tokenizer):
    prompts = [Prompt(Problem("p", "?", "1", {"start": 10}), "?", (5, 6))]
    ((*group,),), _, _ = played(
        tokenizer,
        lambda n, sample, turn: f"<call>add({sample + 1})</call>" if turn < 3 else "done",
        Counter,
        samples=4,
        prompts=prompts,
    )
    assert [completion.reward for completion in group] == [13.0, 16.0, 19.0, 22.0]
    assert [call.result for call in group[1].calls] == ["12", "14", "16"]
    ((wrong,),), _, _ = played(tokenizer, lambda n, s, turn: "ok" if turn else "<call>_private()</call>", Counter)
    assert wrong.calls[0].failure == "invalid"


def test_the_prompt_has_what_the_environment_says_and_its_tools(tokenizer):
    _, _, episodes = played(tokenizer, lambda *_: "1", Guess)
    problem = Problem("p", "Guess my number.", "1")
    prompt = render_episode(problem, tokenizer, PromptConfig(), None, episodes)
    assert "user\nGuess my number. It is between 1 and 64.<|im_end|>" in prompt.text
    assert prompt.problem is problem
    _, _, episodes = played(tokenizer, lambda *_: "done", Counter)
    prompt = render_episode(problem, tokenizer, PromptConfig(), "Be brief.", episodes)
    assert prompt.text.startswith("<|im_start|>system\nBe brief.\nTo use a tool, write only <call>")
    assert "add(number): Adds to the count." in prompt.text


def test_a_method_of_a_tool_s_name_is_refused(tokenizer):
    class Calculates(Counter):
        def calculator(self, expression: str) -> str:
            """Computes.

            Args:
                expression: What.
            """
            return expression

    episodes = episodes_of(tokenizer, environments=Environments({None: Calculates}, LONG_S))
    with pytest.raises(ConfigError, match=r"rollout.tools and the environment both have a tool that is called calculator"):
        render_episode(Problem("p", "?", "1"), tokenizer, PromptConfig(), None, episodes)


def test_tools_are_described_in_the_system_turn_of_a_conversation_that_has_one(tokenizer):
    own = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"})
    text = render_episode(Problem("p", own, "42"), tokenizer, PromptConfig(), "Not shown.", episodes_of(tokenizer)).text
    assert text.startswith("<|im_start|>system\nBe brief.\nTo use a tool, write only <call>calculator(...)</call>")
    assert "user\nWhat is 6 * 7?<|im_end|>" in text
    assert "Not shown." not in text


def test_tools_beside_an_environment_with_step_are_noted(tokenizer, tmp_path):
    """They are described in the prompt, and their calls read by nobody. Beside methods as tools they are called."""
    (tmp_path / "two.py").write_text(
        "class Game:\n    def reset(self, **row): ...\n    def step(self, text): ...\n"
        "class Shop:\n    def reset(self, **row): ...\n    def open(self) -> str:\n        'Opens.'\n",
        encoding="utf-8",
    )
    game, shop = (f"{tmp_path / 'two.py'}:{name}" for name in ("Game", "Shop"))
    config = RolloutConfig(tools=["calculator"], environment=shop)
    opened = open_episodes(Config(rollout=config), tokenizer, [tokenizer.eos_token_id])
    assert opened is not None
    prompt = render_episode(Problem("p", "?", "1"), tokenizer, PromptConfig(), None, opened)
    assert "calculator(expression)" in prompt.text
    assert "open()" in prompt.text
    assert opened.environments is not None
    assert opened.environments.note_on_tools() is None
    for named in (game, {"shop": shop, "game": game}):
        config = RolloutConfig(tools=["calculator"], environment=named)
        unread = open_episodes(Config(rollout=config), tokenizer, [tokenizer.eos_token_id])
        (note,) = _note_on_tools(unread)
        assert re.search(r"the environment Game answers each turn by its step, .*: leave rollout.tools out", note)
    assert _note_on_tools(opened) == _note_on_tools(None) == []


def test_problems_choose_their_environment_by_name(tokenizer):
    rows = [{"environment": "game"}, {"environment": "count", "start": 5}]
    prompts = [Prompt(Problem(f"p{i}", "?", "1", row), "?", (5,)) for i, row in enumerate(rows)]
    groups, _, episodes = played(
        tokenizer, lambda n, s, turn: "1" if n == "p0" else "done", prompts=prompts, game=Guess, count=Counter
    )
    assert groups[0][0].turns[1].text == "higher" or groups[0][0].reward == 1.0
    assert groups[1][0].reward == 5.0
    with pytest.raises(ConfigError, match=r"has the environment None, but .* has game, count"):
        episodes.partner(Problem("p", "?", "1"))


class Alike(Guess):
    def reset(self, **row: Any) -> str:  # type: ignore[override]
        self.secret = 1
        return f" Today is {random.random()}."


def test_members_that_would_start_otherwise_than_the_prompt_says_are_refused(tokenizer):
    other = episodes_of(tokenizer, environments=Environments({None: Alike}, LONG_S))
    prompt = render_episode(Problem("p", "Guess.", "1"), tokenizer, PromptConfig(), None, other)
    with pytest.raises(TrainingError, match="all members of a group must start alike: give it an argument seed to draw from"):
        EpisodeEngine(Scripted(tokenizer, lambda *_: "1"), other).sample([prompt], 2, PLENTY, seed=0, scope="x")


@pytest.mark.parametrize(("first", "then"), [(" Hard mode.", None), ("12", "2"), (None, "?"), ("?", "")])
def test_members_are_compared_by_all_that_they_say(tokenizer, first, then):
    """Also where one says nothing, or the end of what another says; and a worked example is compared, too."""
    says = itertools.chain([first], itertools.repeat(then))

    class Fickle(Sure):
        def reset(self, **row: Any) -> Any:
            super().reset(**row)
            return next(says)

    episodes = episodes_of(tokenizer, environments=Environments({None: Fickle}, LONG_S))
    prompt = render_episode(Problem("p", "Guess?", "1"), tokenizer, PromptConfig(), None, episodes)
    for play in (
        lambda: EpisodeEngine(Scripted(tokenizer, lambda *_: "1"), episodes).sample([prompt], 1, PLENTY, seed=0, scope="x"),
        lambda: episodes.play_script(prompt, ["1", "2"], tokenizer.eos_token_id),
    ):
        with pytest.raises(TrainingError, match="all members of a group must start alike"):
            play()


def failing(kind: str) -> type:
    class Failing(Guess):
        def step(self, text: str) -> Any:
            if kind == "raises":
                raise RuntimeError("lost connection")
            if kind == "hangs":
                time.sleep(600)
            return {
                "pair": ("a", 1.0), "bytes": (b"x", 0.0, False, {}), "word": ("a", "much", False, {}),
                "huge": ("a", 10**400, False, {}), "infinite": ("a", -math.inf, False, {}),
                "tensor": ("a", torch.zeros(2), False, {}), "over": ("a", 0.0, torch.zeros(2), {}),
                "unshown": ("a", 10**5000, False, {}),
            }[kind]  # fmt: skip

    return Failing


@pytest.mark.parametrize(
    ("kind", "reason", "why"),
    [
        ("raises", "environment_error", "error: RuntimeError: lost connection"),
        ("hangs", "timeout", "error: step did not answer within 1 seconds"),
        ("pair", "environment_error", "error: step returned ('a', 1.0), but it must return (observation, reward, done, info)"),
        ("bytes", "environment_error", "error: step returned (b'x', 0.0, False, {}), but"),
        ("word", "environment_error", "error: step returned ('a', 'much', False, {}), but"),
        ("huge", "environment_error", "error: step returned ('a', 1000"),
        ("infinite", "environment_error", "error: step returned ('a', -inf, False, {}), but it must return"),
        ("tensor", "environment_error", "error: step returned ('a', tensor([0., 0.]), False, {}), but it must return"),
        ("over", "environment_error", "error: step returned ('a', 0.0, tensor([0., 0.]), {}), but it must return"),
        ("unshown", "environment_error", "error: step returned <tuple, whose repr raises ValueError>, but it must return"),
    ],
)
def test_an_environment_that_fails_ends_its_episode_without_a_reward(tokenizer, kind, reason, why):
    """A false 0 would teach the policy that it had done wrong."""
    ((completion,),), _, _ = played(tokenizer, lambda *_: "1", failing(kind), timeout_s=1.0 if kind == "hangs" else LONG_S)
    assert completion.finish_reason == reason
    assert completion.reward is None
    assert not completion.stopped
    assert completion.calls[0].result.startswith(why)
    assert environment_reward(["x"], environment_reward=[completion.reward]) == [None]


@pytest.mark.parametrize(
    "reward",
    [
        ZeroDivisionError(),
        "much",
        pytest.param(10**400, id="huge"),
        math.nan,
        -math.inf,
        pytest.param(torch.zeros(2), id="tensor"),
    ],
)
def test_a_reward_that_fails_is_none(tokenizer, reward):
    class Unfair(Counter):
        def get_reward(self) -> float:
            if isinstance(reward, Exception):
                raise reward
            return reward  # type: ignore[no-any-return]

    ((completion,),), _, _ = played(tokenizer, lambda n, s, turn: "done" if turn else "<call>add(1)</call>", Unfair)
    assert (completion.finish_reason, completion.reward) == ("environment_error", None)
    assert [(call.name, call.failure) for call in completion.calls] == [("add", None), ("get_reward", "raised")]
    unplayed = _unplayed(prompt_of(), [completion])
    assert unplayed is not None
    assert unplayed.message.endswith(f"(environment_error): {completion.calls[-1].result}")


def test_rewards_that_have_no_sum_are_none(tokenizer):
    class Generous(Guess):
        def step(self, text: str) -> Any:
            return "More.", 1e308, False, {}

    ((completion,),), _, _ = played(tokenizer, lambda *_: "1", Generous, max_turns=3)
    assert (completion.finish_reason, completion.reward) == ("environment_error", None)


def test_what_is_no_environment_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="which is no class and no function"):
        Environments.load("math:pi", 1.0)
    problem = prompt_of().problem
    with pytest.raises(ConfigError, match=r"could not be made .*Toolbox"):
        Environments.load("groupwise.episodes.tools:Toolbox", 1.0).make(problem)
    with pytest.raises(ConfigError, match=r"has no reset: define reset\(self, \*\*row\)"):
        Environments({None: dict}, LONG_S).make(problem)

    class Broken(Guess):
        def reset(self, **row: Any) -> str:  # type: ignore[override]
            raise KeyError("level")

    with pytest.raises(TrainingError, match="reset of the environment Broken failed on problem p: KeyError: 'level'"):
        Environments({None: Broken}, LONG_S).start(Broken(), problem)

    for returned, named in ((np.zeros(2), "ndarray"), (np.int64(3), "int64"), ((), "tuple"), (({1}, {}), "set")):

        class Odd(Guess):
            def reset(self, returned: Any = returned, **row: Any) -> Any:
                return returned

        with pytest.raises(TrainingError, match=rf"environment Odd returned a {named} on problem p, but it must return text"):
            Environments({None: Odd}, LONG_S).start(Odd(), problem)


def test_reset_is_given_the_row_and_a_seed_of_the_problem():
    class Spy(Guess):
        def reset(self, **row: Any) -> None:  # type: ignore[override]
            self.row = row

    class Seeded(Spy):
        def reset(self, answer: str, seed: int) -> None:  # type: ignore[override]
            self.row = {"answer": answer, "seed": seed}

    environments = Environments({None: Spy}, LONG_S)
    problem = Problem("p", "?", "42", {"level": 3, "environment": "x"})
    one, seeded, again, other = Spy(), Seeded(), Seeded(), Seeded()
    environments.start(one, problem)
    assert one.row == {"level": 3, "answer": "42", "prompt": "?"}
    for instance, asked in ((seeded, problem), (again, problem), (other, Problem("q", "?", "42"))):
        environments.start(instance, asked)
    assert seeded.row == again.row
    assert seeded.row["seed"] != other.row["seed"]


def test_a_row_s_list_is_each_environment_s_own():
    class UsesUp(Guess):
        def reset(self, cards: list[int], prompt: Any, **row: Any) -> str:  # type: ignore[override]
            prompt[0]["content"] = ""
            return f"{cards.pop()}"

    environments = Environments({None: UsesUp}, LONG_S)
    problem = Problem("p", ({"role": "user", "content": "?"},), "42", {"cards": [1, 2, 3]})
    assert [environments.start(UsesUp(), problem) for _ in range(2)] == ["3", "3"]
    assert (problem.columns, problem.question[0]["content"]) == ({"cards": [1, 2, 3]}, "?")


GAME = '''
class Letters:
    """Says how many letters each turn had, three times; the reward is the share of lower-case ones."""

    def reset(self, seed, **row):
        self.turns = 0
        return f" ({seed % 7})"

    def step(self, text):
        self.turns += 1
        return f"{len(text)} letters", sum(c.islower() for c in text) / max(1, len(text)), self.turns == 3, {}
'''


def test_a_run_with_an_environment_learns_from_its_rewards_and_resumes(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    model = write_tiny_llama(tmp_path / "model", tie_word_embeddings=False, stop_weight=12.0, max_position_embeddings=512)
    config = tiny_config(
        model, write_sums(tmp_path / "sums.jsonl"),
        rollout={"environment": f"{tmp_path / 'game.py'}:Letters", "max_completion_tokens": 300, "max_turns": 5},
        rewards={"functions": [{"function": "environment"}]}, training={"steps": 3}, output={"checkpoint_every": 1, "keep_checkpoints": 4},
    )  # fmt: skip
    reports: list[Any] = []
    whole = train(config, console=Console(quiet=True), run_folder=tmp_path / "whole", on_step=reports.append).folder
    finished = [c for r in reports for g in r.groups for c in g.completions if c.finish_reason == "stop"]
    assert finished
    for completion in finished:
        own = [turn for turn in completion.turns if turn.sampled]
        assert len(own) == 3
        assert completion.reward == pytest.approx(sum(sum(c.islower() for c in t.text) / max(1, len(t.text)) for t in own))
    for report in reports:
        for group in report.groups:
            assert list(group.rewards) == [c.reward for c in group.completions]
    again: list[Any] = []
    train(
        config,
        console=Console(quiet=True),
        run_folder=tmp_path / "again",
        resume_from=whole / "checkpoints" / "step-2",
        on_step=again.append,
    )
    assert [g.completions for g in again[-1].groups] == [g.completions for g in reports[-1].groups]


@pytest.mark.parametrize("function", ["environment", "environment_turns", "groupwise.episodes.games:guesses_lost"])
def test_the_check_before_a_run_does_not_judge_an_environment_by_texts(function, tmp_path):
    """What was not played has no turns and no reward of an environment: that is no failure of a function, and no sign of a blind one."""
    (tmp_path / "game.py").write_text(GAME)
    model = write_tiny_llama(tmp_path / "model", max_position_embeddings=512)
    config = tiny_config(
        model, write_sums(tmp_path / "sums.jsonl"), rollout={"environment": f"{tmp_path / 'game.py'}:Letters"},
        rewards={"functions": [{"function": function}]},
    )  # fmt: skip
    prepared = prepare(config)
    assert prepared.rewards.without_weights() is None
    findings = diagnose_prepared(prepared)
    assert not [finding for finding in findings if finding.severity == "critical"]
    assert "?" in prepared.train_prompts[0].text
    assert " (" in prepared.train_prompts[0].text, "what reset says is in the prompt"


COUNTS = '''
import os


class Counts:
    """The eleventh reset says more than fits."""

    def reset(self, **row):
        with open({path!r}, "a") as resets:
            resets.write(".")
        return " x" * (300 if os.path.getsize({path!r}) == 11 else 1)

    def step(self, text):
        return None, 1.0, True, {{}}
'''


@pytest.mark.parametrize("on_long_prompt", ["error", "drop"])
def test_a_row_is_reset_when_a_step_needs_it_unless_long_ones_are_dropped(on_long_prompt, tmp_path):
    (tmp_path / "counts.py").write_text(COUNTS.format(path=str(tmp_path / "resets")))
    rows = [{"question": f"{i} + 1 = ?", "answer": str(i + 1)} for i in range(50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(tiny_config(
        write_tiny_llama(tmp_path / "model"), tmp_path / "rows.jsonl",
        data={"holdout": 0, "on_long_prompt": on_long_prompt},
        rollout={"environment": f"{tmp_path / 'counts.py'}:Counts", "prompts_per_step": 2},
        rewards={"functions": [{"function": "environment"}]},
    ))  # fmt: skip
    resets = (tmp_path / "resets").stat().st_size
    if on_long_prompt == "drop":
        assert resets >= 50
        assert len(prepared.train_prompts) == 49
    else:
        assert resets <= 2, "the first prompt, and the one whose question is the longest"
        with pytest.raises(DataError, match="tokens, more than the 248 allowed"):
            list(prepared.train_prompts)


def test_an_environment_is_closed_when_its_episode_is_over(tokenizer):
    """However it ends; and so is the one that is asked what the prompt is."""
    open_now: list[Any] = []

    class Session(Guess):
        def reset(self, seed: int, **row: Any) -> str:
            open_now.append(self)
            return super().reset(seed, **row)

        def close(self) -> None:
            open_now.remove(self)
            raise OSError("the server is gone")

    class Shop(Counter):
        def reset(self, start: int = 0, **row: Any) -> None:
            open_now.append(self)

        def close(self) -> None:
            open_now.remove(self)

        def get_reward(self) -> float:
            assert self in open_now
            raise ValueError("no reward")

    for factory in (Session, Shop):
        _, tools = Environments({None: factory}, 5.0).opening(Problem("p", "?", ""))
        assert "close" not in [tool.name for tool in tools]
        (group,), _, _ = played(tokenizer, lambda n, sample, turn: ["1", "no number"][sample], factory, samples=2, max_turns=2)
        assert {c.finish_reason for c in group} <= {"max_turns", "environment_error", "stop"}
        assert not open_now
        script = ["0" if factory is Session else "<call>add(1)</call>", "2"]
        episodes_of(tokenizer, environments=Environments({None: factory}, 5.0)).play_script(prompt_of(), script, 5)
        assert not open_now, "a worked example's is closed too"


@pytest.mark.parametrize(
    ("factory", "script", "error", "why"),
    [
        (Counter, ["<call>add(1)</call>", "Hm.", "2"], DataError, "makes no call, which would begin with '<call>'"),
        (Sure, ["1", "2", "3"], DataError, "what answers it is over then"),
        (Sure, ["1", "x", "3"], TrainingError, "is not answered: error: ValueError: invalid literal"),
    ],
)  # fmt: skip
def test_a_script_that_ends_before_its_last_turn_is_refused(tokenizer, factory, script, error, why):
    """Cut there, it would teach the policy to end so."""
    episodes = episodes_of(tokenizer, environments=Environments({None: factory}, LONG_S))
    with pytest.raises(error, match=f"the worked example of problem p has 3 turns, but turn 2 .*{why}"):
        episodes.play_script(prompt_of(), script, tokenizer.eos_token_id)


@pytest.mark.parametrize("named", ["groupwise.episodes.games:HigherOrLower", {"game": "groupwise.episodes.games:HigherOrLower"}])
def test_a_talk_with_a_model_that_learnt_a_game_is_with_the_model_itself(named, tmp_path, caplog):
    """A question alone begins no game that is told its answer, and none that a column names."""
    folder = write_tiny_llama(tmp_path / "model", tie_word_embeddings=False, max_position_embeddings=512)
    config = tiny_config(folder, write_sums(tmp_path / "sums.jsonl"), rollout={"environment": named})
    speaker = make_speaker(config, 5, 1.0, False, 0)
    assert speaker.episodes is None
    assert answer_of(speaker, "Hello?") == speaker.messages[-1]["content"]
    assert "the model answers without its environment" in caplog.text


def test_a_question_by_itself_is_text_for_the_environment_as_in_training(tmp_path):
    (tmp_path / "upper.py").write_text(
        "class Upper:\n    def reset(self, prompt):\n        return f' Say {prompt.upper()}'\n"
        "    def step(self, text):\n        return '', 1.0, True, {}\n",
        encoding="utf-8",
    )
    folder = write_tiny_llama(tmp_path / "model", tie_word_embeddings=False, max_position_embeddings=512)
    rollout = {"environment": f"{tmp_path / 'upper.py'}:Upper"}
    speaker = make_speaker(tiny_config(folder, write_sums(tmp_path / "sums.jsonl"), rollout=rollout), 5, 1.0, False, 0)
    answer_of(speaker, "sea")
    assert speaker.messages[0] == {"role": "user", "content": "sea"}


def test_what_a_tool_returned_ends_no_turn_in_the_next_question_either(tokenizer):
    def ends() -> str:
        """Returns what would end a turn."""
        return "<|im_end|>"

    episodes = episodes_of(tokenizer, ends)
    scripted = Scripted(tokenizer, lambda n, sample, turn: "So." if turn else "<call>ends()</call>")
    policy: Any = SimpleNamespace(tokenizer=tokenizer, context_length=2000, name="tiny")
    speaker = Speaker(policy, EpisodeEngine(scripted, episodes), PromptConfig(), None, PLENTY, 0, episodes)
    for question in ("One?", "Two?"):
        speaker.answer(question, io.StringIO())
    second = scripted.asked[2].prompts[0]
    assert second.token_ids.count(tokenizer.eos_token_id) == 6, "system, question, call, result, answer, question"


def test_the_next_question_follows_the_tokens_that_several_calls_of_a_turn_were_answered_with(tokenizer):
    episodes = episodes_of(tokenizer)
    calls = "<call>calculator(1 + 1)</call><call>calculator(2 + 2)</call>"
    scripted = Scripted(tokenizer, lambda n, sample, turn: "So." if turn else calls)
    policy: Any = SimpleNamespace(tokenizer=tokenizer, context_length=2000, name="tiny")
    speaker = Speaker(policy, EpisodeEngine(scripted, episodes), PromptConfig(), None, PLENTY, 0, episodes)
    for question in ("One?", "Two?"):
        speaker.answer(question, io.StringIO())
    answered, second = (request.prompts[0].token_ids for request in scripted.asked[1:3])
    said = tokenizer("So.", add_special_tokens=False)["input_ids"]
    before = (*answered, *said, tokenizer.eos_token_id)
    assert second[: len(before)] == before


def test_what_begins_with_a_question_needs_no_row():
    assert not Environments({None: Guess}, LONG_S).needs_a_row(), "its reset takes a seed and whatever a row has"
    assert not Environments({None: Counter}, LONG_S).needs_a_row(), "its start has a default"


def test_an_environment_that_cannot_begin_is_closed(tokenizer):
    closed = []

    class Down:
        def reset(self, **row: Any) -> None:
            raise OSError("no server")

        def close(self) -> None:
            closed.append(self)

    with pytest.raises(TrainingError, match="no server"):
        Environments({None: Down}, LONG_S).opening(Problem("p", "?", ""))
    assert len(closed) == 2, "it was tried twice"
    ((completion,),), _, _ = played(tokenizer, lambda n, sample, turn: "1", Down)
    assert completion.finish_reason == "environment_error"
    assert len(closed) == 3
    with pytest.raises(TrainingError, match="no server"):  # half a worked example would teach to stop there
        episodes_of(tokenizer, environments=Environments({None: Down}, LONG_S)).play_script(prompt_of(), ["1", "2"], 5)
    assert len(closed) == 4


def test_the_prompt_survives_one_reset_that_fails():
    tried = []

    class Once(Guess):
        def reset(self, **row: Any) -> str:  # type: ignore[override]
            tried.append(self)
            if len(tried) == 1:
                raise OSError("no session")
            return " Begin."

    said, _ = Environments({None: Once}, LONG_S).opening(Problem("p", "?", ""))
    assert said == " Begin."
    assert tried[0] is not tried[1]


@pytest.mark.parametrize(
    ("kind", "reason", "failure"), [("raises", "environment_error", "raised"), ("hangs", "timeout", "timed_out")]
)
def test_a_reset_that_fails_ends_its_episode_without_a_reward(tokenizer, kind, reason, failure):
    class Failing(Guess):
        def reset(self, **row: Any) -> str:  # type: ignore[override]
            if kind == "hangs":
                time.sleep(600)
            raise OSError("no session")

    timeout_s = 1.0 if kind == "hangs" else LONG_S
    ((completion,),), engine, episodes = played(tokenizer, lambda *_: "1", Failing, timeout_s=timeout_s)
    assert (completion.finish_reason, completion.reward, len(completion.turns)) == (reason, None, 1)
    (call,) = completion.calls
    assert (call.name, call.failure) == ("reset", failure)
    assert call.result.startswith("error: reset of the environment Failing failed on problem p: ")
    cut = SamplingSettings(max_tokens=1)  # a first turn that is not answered
    ((completion,),) = EpisodeEngine(engine, episodes).sample([prompt_of()], 1, cut, seed=3, scope="test")
    assert (completion.finish_reason, completion.reward, len(completion.token_ids)) == (reason, None, 1)


FLAKY = '''
from collections import Counter

asked, failed = Counter(), []


class Flaky:
    """Once in a run the fourth instance of a problem cannot begin: its first one renders the prompt."""

    def reset(self, prompt, **row):
        asked[prompt] += 1
        if asked[prompt] >= 4 and not failed:
            failed.append(prompt)
            raise OSError("no session")

    def step(self, text):
        return None, float(len(text)), True, {}
'''


def test_one_reset_that_fails_leaves_its_group_out_and_the_run_goes_on(tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY, encoding="utf-8")
    model = write_tiny_llama(tmp_path / "model", tie_word_embeddings=False, stop_weight=12.0, max_position_embeddings=512)
    config = tiny_config(
        model, write_sums(tmp_path / "sums.jsonl"),
        rollout={"environment": f"{tmp_path / 'flaky.py'}:Flaky", "max_completion_tokens": 60},
        rewards={"functions": [{"function": "environment"}], "on_error": "skip"},
    )  # fmt: skip
    reports: list[Any] = []
    train(config, console=Console(quiet=True), run_folder=tmp_path / "run", on_step=reports.append)
    assert [report.metrics["groups/failed"] for report in reports] == [1, 0]
    assert [len(report.groups) for report in reports] == [2, 3]


def test_environments_of_episodes_that_are_abandoned_are_closed_once(tokenizer, monkeypatch):
    """One waits for its next turn, one is being answered, and one is still being made."""
    monkeypatch.setattr("groupwise.episodes.driver._CLOSE_S", 1.0)
    begun, closed = itertools.count(), []
    waits, held, in_step = threading.Event(), threading.Event(), threading.Event()

    class Session:
        def reset(self, **row: Any) -> None:
            self.number = next(begun)
            if self.number == 2:
                held.wait(LONG_S)

        def step(self, text: str) -> Any:
            if self.number == 1:
                in_step.set()
                held.wait(LONG_S)
            assert self not in closed
            waits.set()
            return "Go on.", 0.0, False, {}

        def close(self) -> None:
            closed.append(self)

    def stop(finished: int, tokens: int) -> None:
        if waits.is_set() and in_step.is_set():
            raise KeyboardInterrupt

    episodes = episodes_of(tokenizer, environments=Environments({None: Session}, LONG_S), max_turns=1000)
    engine = EpisodeEngine(Scripted(tokenizer, lambda *_: "1"), episodes)
    with pytest.raises(KeyboardInterrupt):
        engine.sample([prompt_of()], 3, PLENTY, seed=0, scope="x", on_progress=stop)
    assert [one.number for one in closed] == [0]
    held.set()
    assert comes(lambda: len(closed) == 3)
    assert {one.number for one in closed} == {0, 1, 2}
