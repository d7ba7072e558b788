"""The built-in reward functions, by the name that a config gives them."""

from __future__ import annotations

from collections.abc import Callable

from groupwise.rewards.functions.format import boxed_format, format, soft_xml, strict_xml, xml_count
from groupwise.rewards.functions.math import accuracy, correctness, correctness_and_format
from groupwise.rewards.functions.text import keyword, length, overlong, repetition_penalty, text_of

__all__ = ["builtin_rewards", "text_of"]


def builtin_rewards() -> dict[str, Callable[..., list[float]]]:
    """All built-in functions by name; the first sentence of each docstring says what it gives."""
    functions = (
        correctness,
        accuracy,
        format,
        correctness_and_format,
        strict_xml,
        soft_xml,
        xml_count,
        boxed_format,
        length,
        overlong,
        keyword,
        repetition_penalty,
    )
    return {function.__name__: function for function in functions}
