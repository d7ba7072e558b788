"""Environments on OpenEnv servers (https://github.com/meta-pytorch/OpenEnv) as games: one session of a server for each episode."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from groupwise.errors import ConfigError

__all__ = ["OpenEnv"]


class OpenEnv(ABC):
    """An episode on the server at ``url``. Derive from it, and say what action a turn of the policy is.

    A server must let as many sessions be open as a step has completions, or an evaluation (``evaluation.problems`` x ``samples``)
    if that is more, and one more for each process.
    """

    url: ClassVar[str]
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of a row that the server's ``reset`` is handed; beside them it gets a seed."""

    _client: Any = None

    @abstractmethod
    def action(self, text: str) -> Mapping[str, Any]:
        """What the server's ``step`` is given for the text of a turn."""

    def observed(self, observation: Mapping[str, Any]) -> str | None:
        """What the policy is told of an observation: by default all that it holds, as JSON."""
        held = {name: value for name, value in observation.items() if value not in (None, "", {}, [])}
        return json.dumps(held, ensure_ascii=False) if held else None

    def reset(self, seed: int, **row: Any) -> str | None:
        """Begins an episode, in a session of its own. Raises ConfigError for a row that lacks one of ``columns``, and where the
        package openenv is not installed."""
        self.close()
        if missing := [name for name in self.columns if name not in row]:
            raise ConfigError(
                f"the row has no column {missing[0]!r}, which {type(self).__name__}.columns names: add it, or take it out there"
            )
        self._client = _open(self.url)
        return self.observed(self._client.reset(seed=seed, **{name: row[name] for name in self.columns}).observation)

    def step(self, text: str) -> tuple[str, float | None, bool, dict[str, Any]]:
        """Returns (observation, reward, done, info). The session ends with the episode."""
        result = self._client.step(dict(self.action(text)))
        if result.done:
            self.close()
        return self.observed(result.observation) or "", result.reward, result.done, {}

    def close(self) -> None:
        """End the session, so that the server has room for another."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # a server that is gone has no session either
                client.close()

    def __del__(self) -> None:
        self.close()


def _open(url: str) -> Any:
    try:
        from openenv import GenericEnvClient
    except ImportError as error:
        raise ConfigError("environments on OpenEnv servers need the package openenv: pip install 'groupwise[openenv]'") from error
    return GenericEnvClient(base_url=url).sync()
