"""From the MODEL that a command names to the settings it was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from groupwise.config import Config, load_config
from groupwise.config.load import load_run_config
from groupwise.models.folder import adapter_in

__all__ = ["fetch_model", "settings_for_model", "settings_to_ask"]

MODEL_FOLDER, CONFIG_FILE = "final_model", "config.yaml"
LONGEST_ANSWER = 512
"""Tokens, of a model that no run is known of."""
_MERGED = ("model.revision=null", "model.lora=null", "model.quantization=none")
"""How a run's model differs from the one it began with: of another place, its adapter merged into whole weights."""


_ALONE = ("model.lora=null",)
"""Of an adapter alone, which goes on the base that the run had."""


def settings_for_model(model: str, overrides: Sequence[str] = ()) -> tuple[Config, Path | None]:
    """The settings with which to use ``model``: those of the run that made it, or the defaults.

    ``model`` may be a run's folder, the model inside one, any model folder, or a name. Returns the config, with ``model.name``
    filled in, and the run's config file where there is one: the prompt a model was trained with is part of what it knows. The vLLM
    that sampled for the run may have stopped, or work for another: it is used where ``overrides`` say so. A folder may come from
    anybody: it cannot grant its own code the right to run (``trust_remote_code``), which ``overrides`` alone can.
    """
    path = Path(model).expanduser()
    if (path / MODEL_FOLDER).is_dir() and (path / CONFIG_FILE).is_file():
        path = path / MODEL_FOLDER
    run_config = path.absolute().parent / CONFIG_FILE
    made_by_run = path.is_dir() and path.name == MODEL_FOLDER and run_config.is_file()
    of_checkpoint = next(
        (p / CONFIG_FILE for p in path.absolute().parents if (p / "checkpoints" / CONFIG_FILE).parent.is_dir()), None
    )
    alone = adapter_in(path) is not None
    if alone and not made_by_run and of_checkpoint is not None and of_checkpoint.is_file():
        made_by_run, run_config = True, of_checkpoint
    if not made_by_run:
        return load_config(None, [f"model.name={model}", *overrides]), None
    settings = [f"model.name={path}", *(_ALONE if alone else _MERGED)]
    config = load_run_config(run_config, [*settings, *overrides])
    if config.rollout.engine == "vllm" and not any(setting.startswith("rollout.engine=") for setting in overrides):
        config = load_run_config(run_config, [*settings, "rollout.engine=auto", *overrides])
    return config, run_config


def settings_to_ask(
    model: str, overrides: Sequence[str] = (), *, system: str | None = None, max_tokens: int | None = None
) -> tuple[Config, int]:
    """The settings with which to put a question to ``model``, and the longest answer in tokens: as long as it was trained to give."""
    config, run_config = settings_for_model(model, overrides)
    if system is not None:
        config.prompt.system = system
    elif run_config is None:
        config.prompt.system = "none"
    return config, max_tokens or (LONGEST_ANSWER if run_config is None else config.rollout.max_completion_tokens)


def fetch_model(config: Config) -> None:
    """Fetch the embedded model if it is the one asked for and is not there yet, telling so on standard error."""
    from groupwise.models.embedded import EMBEDDED_NAME, ensure_embedded_model

    if config.model.name == EMBEDDED_NAME:
        ensure_embedded_model(lambda what: typer.echo(f"{EMBEDDED_NAME}: {what}", err=True))
