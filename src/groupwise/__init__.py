"""GRPO for language models.

>>> from groupwise import Config, train
>>> result = train(Config())  # doctest: +SKIP

Importing this package is quick: torch and transformers are imported when training begins.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.config import Config, load_config
    from groupwise.models.reward_model import RewardModel
    from groupwise.training.loop import train

__all__ = ["Config", "RewardModel", "__version__", "load_config", "train"]

_HOMES = {
    "Config": "groupwise.config",
    "RewardModel": "groupwise.models.reward_model",
    "load_config": "groupwise.config",
    "train": "groupwise.training.loop",
}

try:
    __version__ = version("groupwise")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'groupwise' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
