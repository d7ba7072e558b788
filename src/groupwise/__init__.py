"""GRPO for language models.

>>> from groupwise import train
>>> result = train("quickstart", {"training.steps": 10})  # doctest: +SKIP

Importing this package is quick: torch and transformers are imported when something needs them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.algorithm.advantages import group_advantages
    from groupwise.algorithm.values import value_advantages
    from groupwise.api import diagnose, evaluate, generate, plan, prepare, train, write_report
    from groupwise.config import Config, load_config
    from groupwise.data.answers import extract_answer, extract_last_number, numeric_equal
    from groupwise.doctor import Finding
    from groupwise.errors import (
        AnswerError,
        CheckpointError,
        ConfigError,
        DataError,
        GroupwiseError,
        ModelError,
        RankError,
        RewardError,
        StoppedError,
        TrainingError,
    )
    from groupwise.evaluation import Evaluation, paired_comparison
    from groupwise.models.reward_model import RewardModel
    from groupwise.rewards.load import reward_scope
    from groupwise.rewards.scores import StepRewards
    from groupwise.tracking.metric_table import METRICS
    from groupwise.tracking.reading import RunRecord, read_run
    from groupwise.tracking.results import RunResult
    from groupwise.training.run import StepReport

_HOMES = {
    "groupwise.algorithm.advantages": ("group_advantages",),
    "groupwise.algorithm.values": ("value_advantages",),
    "groupwise.api": ("diagnose", "evaluate", "generate", "plan", "prepare", "train", "write_report"),
    "groupwise.config": ("Config", "load_config"),
    "groupwise.data.answers": ("extract_answer", "extract_last_number", "numeric_equal"),
    "groupwise.doctor": ("Finding",),
    "groupwise.errors": (
        "AnswerError", "CheckpointError", "ConfigError", "DataError", "GroupwiseError", "ModelError", "RankError", "RewardError",
        "StoppedError", "TrainingError",
    ),
    "groupwise.evaluation": ("Evaluation", "paired_comparison"),
    "groupwise.models.reward_model": ("RewardModel",),
    "groupwise.rewards.load": ("reward_scope",),
    "groupwise.rewards.scores": ("StepRewards",),
    "groupwise.tracking.metric_table": ("METRICS",),
    "groupwise.tracking.reading": ("RunRecord", "read_run"),
    "groupwise.tracking.results": ("RunResult",),
    "groupwise.training.run": ("StepReport",),
}  # fmt: skip
"""What the package offers, by the module that has it."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "METRICS", "AnswerError", "CheckpointError", "Config", "ConfigError", "DataError", "Evaluation", "Finding", "GroupwiseError",
    "ModelError", "RankError", "RewardError", "RewardModel", "RunRecord", "RunResult", "StepReport", "StepRewards", "StoppedError",
    "TrainingError", "__version__", "diagnose", "evaluate", "extract_answer", "extract_last_number", "generate", "group_advantages",
    "load_config", "numeric_equal", "paired_comparison", "plan", "prepare", "read_run", "reward_scope", "train", "value_advantages",
    "write_report",
]  # fmt: skip

try:
    __version__ = version("groupwise")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'groupwise' has no attribute {name!r}")
    home = _HOME_OF[name]
    if sys.platform == "win32" and home.split(".")[1] not in ("algorithm", "config", "data", "errors"):  # these need no POSIX
        from groupwise.errors import NO_WINDOWS, ConfigError

        raise ConfigError(NO_WINDOWS)
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
