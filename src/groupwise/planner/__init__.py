"""What a run will need, before any weights are loaded: memory by phase, arithmetic, time, and the nearest settings that fit.

Everything follows from the model's config.json and the settings; nothing here imports torch (``measure`` and the look for this
machine's GPU do, when called).
"""

from groupwise.planner.hardware import HARDWARE, Hardware, parse_bytes
from groupwise.planner.memory import Item, Phase, peak_phase, phases
from groupwise.planner.plan import Plan, make_plan, plan_run
from groupwise.planner.setup import Setup
from groupwise.planner.shape import KNOWN_SHAPES, ModelShape, find_shape

__all__ = [
    "HARDWARE", "KNOWN_SHAPES", "Hardware", "Item", "ModelShape", "Phase", "Plan", "Setup", "find_shape", "make_plan",
    "parse_bytes", "peak_phase", "phases", "plan_run",
]  # fmt: skip
