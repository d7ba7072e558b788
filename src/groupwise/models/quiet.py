"""Silence while a library loads something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import transformers

__all__ = ["quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers for as long as this lasts; a failure still raises."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
