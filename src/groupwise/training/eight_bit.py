"""AdamW with 8-bit moments, by the library bitsandbytes (Dettmers et al., arXiv 2110.02861), which is imported only when asked for."""

from __future__ import annotations

from typing import Any

from groupwise.errors import ConfigError
from groupwise.models.quiet import quieten_bitsandbytes

__all__ = ["eight_bit_adamw"]


def eight_bit_adamw(groups: list[dict[str, Any]], **settings: Any) -> Any:
    """bitsandbytes' AdamW over fp32 masters, its moments there from the beginning. Tensors of fewer than 4,096 numbers keep fp32 moments.

    Raises ConfigError where the package is missing or too old for this device.
    """
    quieten_bitsandbytes()
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "optimizer.precision is masters-8bit, which needs the package bitsandbytes, and it is not installed: "
            "pip install 'groupwise[bitsandbytes]', or use optimizer.precision=masters"
        ) from error
    adamw = AdamW8bit(groups, **settings)
    adamw.check_overrides()
    for group_place, group in enumerate(adamw.param_groups):
        for place, parameter in enumerate(group["params"]):
            adamw.init_state(group, parameter, group_place, place)
    return adamw
