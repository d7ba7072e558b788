"""``groupwise merge``: an adapter and its base as one model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.cli.options import TrustRemoteCode

__all__ = ["merge"]


def merge(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="A run's folder, a checkpoint, or a folder with adapter_config.json.")
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model is written; it must not exist yet.")],
    base: Annotated[
        str | None, typer.Option("--base", help="The model under the adapter; else the one it was trained on.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Merge a LoRA adapter into its base, and write a normal model folder.

    A quantised base is dequantised; the result has the run's dtype and needs neither peft nor bitsandbytes.

    \b
    Examples:
      groupwise merge runs/qlora-1/checkpoints/step-40 step-40-merged
      groupwise merge somebodys-adapter merged --base Qwen/Qwen2.5-1.5B-Instruct
    """
    from groupwise.errors import ModelError
    from groupwise.models.adapters import load_trained
    from groupwise.models.embedded import fetch_model
    from groupwise.models.load import load_policy, save_model

    if out.exists():
        raise ModelError(f"{out} exists already: name a folder that does not")
    folder = _adapter_in(adapter.expanduser())
    config = _settings(folder, base)
    config.model.trust_remote_code = trust_remote_code
    fetch_model(config.model)
    policy = load_policy(config.model)
    save_model(load_trained(policy, folder), out)
    typer.echo(f"{config.model.name} with the adapter of {folder} is in {out}")


def _adapter_in(path: Path) -> Path:
    """The folder with the adapter's own files."""
    from groupwise.errors import ModelError

    for place in (".", "adapter", "final_model/adapter", "model/adapter"):
        if (path / place / "adapter_config.json").is_file():
            return (path / place).resolve()
    raise ModelError(
        f"{path} holds no adapter (adapter_config.json): name a run with model.lora, a checkpoint of one, or an adapter's folder"
    )


def _settings(folder: Path, base: str | None) -> Any:
    """How the base is loaded: as the run did that made the adapter, else by the name that the adapter gives."""
    from groupwise.config import load_config
    from groupwise.config.load import load_run_config
    from groupwise.errors import ModelError

    run = next((parent / "config.yaml" for parent in folder.parents if (parent / "config.yaml").is_file()), None)
    named = [f"model.name={base}"] if base else []
    if run is not None:
        return load_run_config(run, ["model.lora=null", *named])
    try:
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{folder / 'adapter_config.json'} cannot be read ({error}): take a whole copy of the adapter"
        ) from error
    if not named and not found:
        raise ModelError(f"the adapter in {folder} does not say which model it belongs to: name it with --base")
    return load_config(None, named or [f"model.name={found}"])
