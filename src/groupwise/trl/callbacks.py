"""The callbacks of a run: transformers' own protocol and classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback

from groupwise.errors import ConfigError
from groupwise.trl.config import GRPOConfig

__all__ = ["callback_handler"]


def callback_handler(
    args: GRPOConfig, callbacks: Sequence[Any] | None, model: Any, tokenizer: Any, optimizer: Any, scheduler: Any
) -> CallbackHandler:
    """transformers' defaults, trackers that ``report_to`` names, the script's own, and a progress bar or printed logs."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        trackers = get_reporting_integration_callbacks(args.report_to)
    except ValueError as error:
        raise ConfigError(f"report_to={args.report_to!r}: {error}") from error
    display = PrinterCallback if args.disable_tqdm else ProgressCallback
    chosen = [DefaultFlowCallback, *trackers, *(callbacks or []), display]
    try:
        return CallbackHandler(chosen, model, tokenizer, optimizer, scheduler)
    except RuntimeError as error:  # a tracker whose package is not installed
        raise ConfigError(f"report_to={args.report_to!r}: {error}") from error
