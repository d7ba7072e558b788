"""The YAML of settings: what is a number in it and what is not, a limit to its size, and text that reads back as it was."""

from __future__ import annotations

import re
from typing import Any

import yaml

from groupwise.errors import ConfigError

__all__ = ["SettingsLoader", "plain_yaml", "where", "yaml_text"]

MOST_VALUES = 100_000
"""Most values in one YAML file, with its aliases written out: a settings file has hundreds."""
_TEXT = "tag:yaml.org,2002:str"


class _Dumper(yaml.SafeDumper):
    """Reads back as it was: PyYAML writes U+0085 and its like as line breaks, and reads blanks."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    breaks = any(c in text for c in "\x85\u2028\u2029")
    return dumper.represent_scalar(_TEXT, text, style='"' if breaks else None)


_Dumper.add_representer(str, _text_node)


def yaml_text(value: object) -> str:
    """Plain values as YAML, in their order; ``yaml.safe_load`` reads them back to equal ones."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class SettingsLoader(yaml.SafeLoader):
    """YAML as its authors expect it: 1e-5 is a number (YAML 1.1 wants 1.0e-5), 010 is no 8 and 1:30 no 90, and a key given twice is an
    error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Looks for doubled keys before merges (``<<``) are written out: a mapping's own keys may repeat merged ones, and replace them."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TEXT:
                continue
            if key.value in seen:
                again = f"{key.value} is set twice (again on line {key.start_mark.line + 1})"
                raise ConfigError(f"{again}, but a setting is set once: remove one of them")
            seen.add(key.value)
        return node


_INT = "tag:yaml.org,2002:int"
SettingsLoader.yaml_implicit_resolvers = {
    sign: [one for one in known if one[0] != _INT] for sign, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
SettingsLoader.add_implicit_resolver(_INT, re.compile(r"^(?:0x[0-9a-fA-F_]+|[-+]?(?:0|[1-9][0-9_]*))$"), list("-+0123456789"))
SettingsLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def plain_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """What ``text`` says in YAML. Raises yaml.YAMLError for whatever is no YAML, and for what would grow by its aliases."""
    try:
        reader = loader(text)
    except yaml.reader.ReaderError as error:  # which does not say where
        lines = (text[: error.position] + "x").splitlines()
        mark = yaml.Mark("", error.position, len(lines) - 1, len(lines[-1]) - 1, None, 0)
        raise yaml.MarkedYAMLError(problem=f"the character U+{error.character:04X} is not allowed", problem_mark=mark) from None
    try:
        root = reader.get_single_node()
        if root is None:
            return None
        _count_values(root, {})
        return reader.construct_document(root)
    except RecursionError:
        raise yaml.constructor.ConstructorError(None, None, "it is nested too deeply") from None
    except ValueError as error:  # int() and date() refuse what the patterns of YAML take for a number or a date
        raise yaml.constructor.ConstructorError(None, None, str(error)) from None
    finally:
        reader.dispose()


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """How many values ``node`` stands for once every alias in it is written out. ``counts``: those of nodes done; 0 of one under way."""
    if id(node) in counts:
        if not counts[id(node)]:
            raise yaml.constructor.ConstructorError(None, None, "a value contains itself", node.start_mark)
        return counts[id(node)]
    counts[id(node)] = 0
    inner = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    count = 1 + sum(_count_values(part, counts) for part in inner)
    if count > MOST_VALUES:
        raise yaml.constructor.ConstructorError(
            None, None, f"its aliases would grow to more than {MOST_VALUES:,} values", node.start_mark
        )
    counts[id(node)] = count
    return count


def where(error: yaml.YAMLError) -> str:
    """The place and the nature of a mistake, as the end of a sentence."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return place + (f" ({problem})" if problem else "")
