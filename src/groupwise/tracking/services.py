"""The sinks that other packages provide: which there are, whether they are installed, and starting them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

from groupwise.config.schema import Config
from groupwise.errors import ConfigError
from groupwise.tracking.aside import Aside
from groupwise.tracking.base import Tracker
from groupwise.tracking.run_folder import RunFolder

__all__ = ["check_trackers", "start_services"]

logger = logging.getLogger("groupwise")


def tensorboard(config: Config, folder: RunFolder, done: int) -> Tracker:
    from groupwise.tracking.tensorboard import TensorBoardTracker

    return TensorBoardTracker(config, folder, done)


def wandb(config: Config, folder: RunFolder, done: int) -> Tracker:
    from groupwise.tracking.wandb import WandbTracker

    return Aside(WandbTracker(config, folder, done), "wandb")


def trackio(config: Config, folder: RunFolder, done: int) -> Tracker:
    from groupwise.tracking.trackio import TrackioTracker

    return Aside(TrackioTracker(config, folder, done), "trackio")


SERVICES: dict[str, Callable[[Config, RunFolder, int], Tracker]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "trackio": trackio,
}
"""By the name that ``output.trackers``, the package and the extra have in common."""


def check_trackers(config: Config) -> None:
    """Raises:
    ConfigError: a package that ``output.trackers`` needs is not installed.
    """
    for name in config.output.trackers:
        if name in SERVICES and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"output.trackers names {name}, but the package {name} is not installed: pip install 'groupwise[{name}]', or leave it out"
            )


def start_services(config: Config, folder: RunFolder, done: int = 0) -> list[Tracker]:
    """The sinks beside the run's own files, after ``done`` steps. One that cannot start is named in a warning and done without.

    Raises:
        ConfigError: its package is not installed, or nobody is logged in.
    """
    check_trackers(config)
    started: list[Tracker] = []
    for name in dict.fromkeys(config.output.trackers):
        if name not in SERVICES:
            continue
        try:
            started.append(SERVICES[name](config, folder, done))
        except ConfigError:
            raise
        except Exception as error:
            logger.warning(
                "%s cannot be started (%s: %s): the run goes on without it; %s has every number", name, type(error).__name__, error,
                folder.metrics,
            )  # fmt: skip
    return started
