"""What every section of the settings has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from groupwise.errors import ConfigError

__all__ = ["Section"]


class Section(BaseModel):
    """Common rules: unknown keys are refused, field docstrings are descriptions, values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_assignment=True)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises ConfigError for a setting that does not exist, or a value that it cannot have."""
        from groupwise.config.problems import explain_failure, unknown_key

        if name not in type(self).model_fields:
            raise ConfigError(unknown_key(f"{_place(type(self))}.{name}".lstrip(".")))
        try:
            super().__setattr__(name, value)
        except ValidationError as failure:
            raise ConfigError(explain_failure(failure, _place(type(self)))) from failure


def _place(section: type[Section]) -> str:
    """Where a section stands in a config, such as ``training``; empty for the whole, and for one that stands in several places."""
    from groupwise.config.fields import sections

    found = [path for path, kind in sections().items() if kind is section]
    return found[0] if len(found) == 1 else ""
