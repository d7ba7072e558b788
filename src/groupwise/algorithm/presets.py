"""The table of published methods, for those who look for it beside the arithmetic.

The rows live in ``groupwise.config.presets``, because the config reads them and may not import this room.
"""

from __future__ import annotations

from groupwise.config.presets import PRESETS, Preset

__all__ = ["PRESETS", "Preset"]
