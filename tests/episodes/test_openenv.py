"""Environments on OpenEnv servers: against a stand-in for the client, and against a real server where the package is installed."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from test_driver import PLENTY, Scripted, episodes_of

from groupwise.episodes.driver import EpisodeEngine
from groupwise.episodes.environments import Environments
from groupwise.episodes.openenv import OpenEnv
from groupwise.errors import TrainingError
from groupwise.types import Problem, Prompt
from tests.waiting import comes, free_port


class Adder(OpenEnv):
    """Adds up what it is told; done at 10."""

    url = "http://127.0.0.1:1"
    columns = ("start",)

    def action(self, text: str) -> dict[str, Any]:
        return {"number": int(text)}

    def observed(self, observation: Any) -> str:
        return f" sum {observation['total']}"


def played(tokenizer: Any, factory: Any, script: Any, samples: int = 2) -> Any:
    environments = Environments({None: factory}, 20.0)
    episodes = episodes_of(tokenizer, environments=environments, max_turns=5, timeout_s=20.0)
    problem = Problem("p", "?", "", {"start": 3})
    said, _ = environments.opening(problem)
    prompt = Prompt(problem, "?", (5, 6), ({"role": "user", "content": f"?{said}"},))
    return EpisodeEngine(Scripted(tokenizer, script), episodes).sample([prompt], samples, PLENTY, seed=0, scope="x")


def script(name: str, sample: int, turn: int) -> str:
    return [["4", "3"], ["1", "x"]][sample][turn]


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the package: sessions that keep what they were asked, and say whether they are closed."""
    made: list[Any] = []

    class Session:
        def __init__(self, base_url: str) -> None:
            self.url, self.closed, self.told = base_url, False, {}
            made.append(self)

        def sync(self) -> Any:
            return self

        def reset(self, **told: Any) -> Any:
            self.told, self.total = told, told["start"]
            return self._result(None)

        def step(self, action: dict[str, Any]) -> Any:
            assert not self.closed
            self.total += action["number"]
            return self._result(1.0 if self.total == 10 else -0.5)

        def _result(self, reward: float | None) -> Any:
            return types.SimpleNamespace(observation={"total": self.total}, reward=reward, done=self.total >= 10)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setitem(sys.modules, "openenv", types.SimpleNamespace(GenericEnvClient=Session))
    return made


def test_a_session_is_an_episode(tokenizer, sessions):
    ((won, broken),) = played(tokenizer, Adder, script)
    assert [(t.role, t.text) for t in won.turns] == [("assistant", "4"), ("user", " sum 7"), ("assistant", "3")]
    assert (won.finish_reason, won.reward) == ("stop", 0.5)
    assert (broken.finish_reason, broken.reward) == ("environment_error", None), "x is no number"
    assert len(sessions) == 3, "one of them plays nothing"
    assert {session.url for session in sessions} == {"http://127.0.0.1:1"}
    assert len({session.told["seed"] for session in sessions}) == 1
    gc.collect()
    assert all(session.closed for session in sessions), "the server has room again"


def test_a_row_without_one_of_its_columns_is_told_and_a_question_alone_begins_no_such_episode(sessions):
    environments = Environments({None: Adder}, 20.0)
    assert environments.needs_a_row()
    assert not Environments({None: type("Free", (Adder,), {"columns": ()})}, 20.0).needs_a_row()
    with pytest.raises(TrainingError, match=r"the row has no column 'start', which Adder.columns names"):
        environments.opening(Problem("p", "?", ""))
    assert not sessions


def test_without_the_package_the_run_does_not_begin(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(TrainingError, match=r"pip install 'groupwise\[openenv\]'"):
        played(tokenizer, Adder, script)


SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Add(Action):
    number: int

class Sum(Observation):
    total: int

class AdderServer(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, start=0, **more):
        self.total = start
        return Sum(total=self.total)

    def step(self, action, timeout_s=None, **more):
        self.total += action.number
        return Sum(total=self.total, reward=1.0 if self.total == 10 else -0.5, done=self.total >= 10)

    @property
    def state(self):
        return State()

uvicorn.run(create_app(AdderServer, Add, Sum, env_name="adder", max_concurrent_envs=3), host="127.0.0.1", port=int(sys.argv[1]))
"""


@pytest.mark.filterwarnings("ignore")
def test_a_real_server_plays_it_too(tokenizer, tmp_path: Path):
    """More episodes one after the other than it has room for at a time."""
    pytest.importorskip("openenv", exc_type=ImportError)
    port = free_port()
    (tmp_path / "server.py").write_text(SERVER)
    server = subprocess.Popen(
        [sys.executable, str(tmp_path / "server.py"), str(port)], env={**os.environ, "ENABLE_WEB_INTERFACE": "false"}
    )

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        assert comes(answers)
        factory = type("Adder", (Adder,), {"url": f"http://127.0.0.1:{port}"})
        for _ in range(4):
            ((won, broken),) = played(tokenizer, factory, script)
            assert (won.finish_reason, won.reward, won.turns[1].text) == ("stop", 0.5, " sum 7")
            assert broken.finish_reason == "environment_error"
            del won, broken
            gc.collect()
    finally:
        server.kill()
        server.wait()
