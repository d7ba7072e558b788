"""From a recipe's name or a YAML file, and overrides, to a checked `Config`; and back to YAML.

Every mistake is a ConfigError of one sentence. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from groupwise.config.algorithm import COMMON, AlgorithmConfig, kind_in
from groupwise.config.dialect import SettingsLoader, plain_yaml, where, yaml_text
from groupwise.config.fields import ITEM, field_paths, find_field, schema_path, sections, without_tags
from groupwise.config.former import in_sections
from groupwise.config.inert import INERT
from groupwise.config.problems import UNKNOWN, unknown_key
from groupwise.config.rewards import RewardFunctionConfig
from groupwise.config.schema import Config
from groupwise.config.section import shown
from groupwise.errors import ConfigError, printable

__all__ = [
    "HIDDEN", "Recipe", "build_config", "build_known", "changed_settings", "dump_config", "find_source", "load_config", "load_run_config",
    "read_overrides", "recipes", "remember_style",
]  # fmt: skip

log = logging.getLogger(__name__)

RECIPE_FOLDER = Path(__file__).resolve().parent.parent / "recipes"
_OWN_SETTINGS = ("algorithm.advantage.settings.", "algorithm.loss.settings.")
"""Whatever stands below is a function's own."""
HIDDEN = "<hidden>"
"""What stands in a run's files where a secret was."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A run shipped with groupwise."""

    name: str
    path: Path
    summary: str
    """The first comment line of its file."""


class _Granted:
    """Stands where a file sets ``trust_remote_code``, until an override takes its place."""


Overrides = Sequence[str] | Mapping[str, Any] | str
"""``["training.steps=10"]``, ``{"training.steps": 10}``, ``{"training": {"steps": 10}}``, or one text."""


def load_config(source: str | Path | None, overrides: Overrides = ()) -> Config:
    """The config of a shipped recipe or a YAML file (None: the defaults), with overrides on top.

    A file cannot grant ``trust_remote_code``, since files are passed on: an override can.

    Args:
        source: a recipe's name (`recipes` lists them) or the path of a YAML file.
        overrides: texts ``section.key=value``. The value is read as YAML, except that a setting which holds text takes it as it
            stands. A last part alone (``completions_per_prompt=16``) will do where only one setting is called so. Or a mapping from
            such keys (or sections) to values, which are taken as they are. A section given with a ``type`` replaces the file's; where the
            type changes in another way (``loss.type=cispo``, ``preset=rloo``), the file's settings of the former type are left out,
            with a warning. So is, without one, what the file sets and would do nothing beside them, by the rules of
            ``config.inert``; what another rule says is refused.

    Raises:
        ConfigError: the source cannot be read, or a key is unknown, or a value breaks its rule.
    """
    with _in_one_line():
        settings = {} if source is None else _read(find_source(source))
        return _build(_replace_trust(settings, _Granted()), overrides, str(source))


def load_run_config(path: Path, overrides: Overrides = ()) -> Config:
    """The same of the ``config.yaml`` of a run, which may be somebody else's, or an earlier version's: what it says of
    ``trust_remote_code`` is left out, and settings that have moved are read. The style of answers in the data is the one that the run
    found, whose data may have moved, unless ``overrides`` name other data."""
    with _in_one_line():
        settings = _of_a_run(_read(path))
        config = _build(settings, overrides, of_a_run=True)
    if config.data.source == (settings.get("data") or {}).get("source"):
        with suppress(OSError, ValueError, RecursionError):  # the model may be a copy without it
            remember_style(config, json.loads((path.parent / "environment.json").read_bytes()))
    return config


def remember_style(config: Config, environment: object) -> None:
    """Let ``config.data`` have the style that a run's environment.json says."""
    style = environment.get("answer_style") if isinstance(environment, Mapping) else None
    if style in ("xml", "boxed"):
        config.data._found_style = style


def build_config(settings: Mapping[str, Any], overrides: Overrides = ()) -> Config:
    """The same from a mapping in the shape of the YAML: ``build_config({"training": {"steps": 10}})``."""
    with _in_one_line():
        return _build(settings, overrides)


def build_known(settings: Mapping[str, Any]) -> tuple[Config | None, list[str]]:
    """The config of a run that another version wrote, and the settings that this version cannot read, which keep their defaults.

    ``None`` where even what is left does not fit together. Trust in a model's own code is not among what is read.
    """
    merged = _merge({}, _of_a_run(settings))
    left_out: list[str] = []
    _spell_out_rewards(merged)
    while True:
        try:
            return Config.model_validate(merged), left_out
        except ConfigError as error:
            failure = error.__cause__
            assert isinstance(failure, ValidationError)
            paths = [
                _remove(merged, place, error["type"] in UNKNOWN)
                for error in failure.errors()
                for place in _inert_in(error) or [without_tags(error["loc"])]
            ]
        known = [path for path in dict.fromkeys(paths) if path]
        if not known:
            return None, left_out
        left_out += known


def _remove(settings: Any, loc: Sequence[str | int], unknown: bool) -> str:
    """Take what stands at ``loc`` out of ``settings`` and return its path; empty where nothing stands there any more, or a whole section
    that is known and comes in one type. What pydantic adds to a location, such as a branch of a union, is not followed."""
    here: Any = settings
    path: list[str] = []
    for i, part in enumerate(loc):
        inside = part in here if isinstance(here, dict) else isinstance(here, list) and isinstance(part, int) and part < len(here)
        if not inside:
            return ""
        path.append(str(part))
        below = here[part]
        next_part = loc[i + 1] if i + 1 < len(loc) else None
        deeper = next_part is not None and (next_part in below if isinstance(below, dict) else isinstance(below, list))
        if not deeper:
            if isinstance(below, dict) and not unknown and len(sections().get(".".join(path), ())) < 2:
                return ""
            del here[part]
            return ".".join(path)
        here = below
    return ""


@contextmanager
def _in_one_line() -> Iterator[None]:
    """A key may hold anything, line breaks and a terminal's own commands too: the sentence shows them escaped."""
    try:
        yield
    except RecursionError:
        raise ConfigError("the settings are nested too deeply, or contain themselves: a setting is a few levels deep") from None
    except ConfigError as error:
        told = str(error)
        if told.isprintable():
            raise
        raise ConfigError(printable(told)) from None


def _build(settings: Mapping[str, Any], overrides: Overrides, source: str = "", *, of_a_run: bool = False) -> Config:
    """``of_a_run``: the settings are a run's, and what does nothing in them is left out without a word: an earlier version let it be."""
    merged = _merge({}, settings)
    written: dict[str, Any] = {}
    asked: set[str] = set()
    for path, value in _pairs(overrides):
        _set(merged, path, value)
        asked |= set(_paths(path, value))
        if path.split(".")[0] == "algorithm":
            _set(written, path, value)
    _leave_former_types(merged.get("algorithm"), settings.get("algorithm") or {}, written.get("algorithm") or {})
    _spell_out_rewards(merged)
    _check_values(merged, "", source, hidden=of_a_run)
    try:
        return Config.model_validate(merged)
    except ConfigError as error:
        left = _leave_inert(merged, asked, error.__cause__) if overrides or of_a_run else []
        if not left:
            raise
    config = Config.model_validate(merged)
    if not of_a_run:
        log.info("%s left out: the file sets it, and beside the overrides it would do nothing", ", ".join(left))
    return config


def _paths(path: str, value: Any) -> Iterator[str]:
    """``path``, the sections above it, and what ``value`` sets below it."""
    parts = path.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    for name, below in value.items() if isinstance(value, Mapping) else ():
        yield from _paths(f"{path}.{name}", below)


def _leave_inert(merged: dict[str, Any], asked: set[str], failure: object) -> list[str]:
    """Take out of ``merged`` the settings that do nothing, and return their paths; none where an override (``asked``) sets one itself, or
    where anything else is wrong."""
    errors = failure.errors() if isinstance(failure, ValidationError) else []
    places = [place for error in errors for place in _inert_in(error)]
    if not places or any(error["type"] != INERT for error in errors) or asked & {".".join(map(str, place)) for place in places}:
        return []
    return [_remove(merged, place, True) for place in places]


def _inert_in(error: ErrorDetails) -> list[Sequence[str | int]]:
    """Where the settings stand that an error says to do nothing."""
    return [path.split(".") for path in error["ctx"]["paths"]] if error["type"] == INERT else []


def _leave_former_types(merged: Any, file: Any, written: Any) -> None:
    """Take out of ``merged`` the file's settings of a type that overrides have replaced. ``written``: what the overrides alone say."""
    if not all(isinstance(one, dict) for one in (merged, file, written)):
        return
    for section, common in COMMON.items():
        before, now = kind_in(file, section), kind_in(merged, section)
        own, new = merged.get(section, {}), written.get(section) or {}
        if before == now or not isinstance(own, dict):
            continue
        left = [f"algorithm.{section}.{name}" for name in own if name not in common and name != "type" and name not in new]
        if own:
            merged[section] = {name: new.get(name, value) for name, value in own.items() if name in (*common, "type", *new)}
        if section == "advantage" and before == "gae" and "value" in file and "value" not in written:
            del merged["value"]
            left.append("algorithm.value")
        if left:
            log.warning(
                "%s left out: the file sets it for type %s, and algorithm.%s.type is %s now",
                ", ".join(left),
                before,
                section,
                now,
            )


def _pairs(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """Path and value of each."""
    if isinstance(overrides, Mapping):
        yield from ((_resolve(_dotted(str(key))), _merge({}, {"value": value})["value"]) for key, value in overrides.items())
    else:
        yield from map(_parse_override, [overrides] if isinstance(overrides, str) else overrides)


def read_overrides(overrides: Overrides) -> dict[str, Any]:
    """Path and value of each, as overrides that others can be put before and behind."""
    with _in_one_line():
        return dict(_pairs(overrides))


def dump_config(config: Config) -> str:
    """The resolved config as YAML, every setting written out; `load_config` reads it back to an equal config, but for trust in code."""
    return yaml_text(config.model_dump(mode="json"))


def changed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config that differ from the defaults, as plain values in the shape of the YAML. They may be a file's, unchecked."""
    different = _difference(settings, Config().model_dump(mode="json"))
    algorithm = settings.get("algorithm")
    own = _changed_objective(algorithm) if isinstance(algorithm, Mapping) else None
    if own:
        different["algorithm"] = own
    elif own is not None:
        different.pop("algorithm", None)
    rewards = different.get("rewards")
    if isinstance(rewards, dict) and isinstance(functions := rewards.get("functions"), list):
        plain = RewardFunctionConfig.model_construct().model_dump(mode="json")
        rewards["functions"] = [_difference(one, plain) if isinstance(one, Mapping) else one for one in functions]
    return different


def _changed_objective(algorithm: Mapping[str, Any]) -> dict[str, Any] | None:
    """What differs from the objective that its preset and types alone make; None for one of another version."""
    sections = {name: section for name in ("advantage", "loss") if isinstance(section := algorithm.get(name), Mapping)}
    named = {"preset": algorithm.get("preset", AlgorithmConfig().preset)}
    typed = named | {name: {"type": section["type"]} for name, section in sections.items() if "type" in section}
    try:
        alone, by_preset = (AlgorithmConfig.model_validate(one).model_dump(mode="json") for one in (typed, named))
    except (ValidationError, ConfigError):
        return None
    different = _difference(algorithm, alone)
    if named["preset"] != AlgorithmConfig().preset:
        different = named | different
    for name, section in sections.items():
        if section.get("type") != by_preset[name]["type"]:
            different[name] = {"type": section.get("type"), **different.get(name, {})}
    return {name: different[name] for name in algorithm if name in different}


def _difference(these: Mapping[str, Any], those: Mapping[str, Any]) -> dict[str, Any]:
    different: dict[str, Any] = {}
    for name, value in these.items():
        default = those.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and value and default:
            if inner := _difference(value, default):
                different[name] = inner
        elif value != default:
            different[name] = value
    return different


def recipes() -> list[Recipe]:
    """The shipped recipes, by name."""
    listed = []
    for path in sorted(RECIPE_FOLDER.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        listed.append(Recipe(path.stem, path, first.lstrip("# ").strip()))
    return listed


def find_source(source: str | Path) -> Path:
    """The file behind a recipe's name or a path. A bare name is a recipe first, so that a folder of that name cannot hide it."""
    shipped = {recipe.name: recipe.path for recipe in recipes()}
    if isinstance(source, str) and source in shipped:
        return shipped[source]
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "config.yaml").is_file():
            raise ConfigError(
                f"{source} is a run's folder: to resume it name the recipe or file that it began with, and --run-folder {source} --resume"
            )
        raise ConfigError(f"{source} is a folder, but a config is one file: name the YAML file in it")
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise ConfigError(f"the config file {source} does not exist: check the path, or name a recipe ({', '.join(shipped)})")
    near = difflib.get_close_matches(str(source), list(shipped), n=1, cutoff=0.4)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"{source} is neither a recipe nor a file: {meant}The recipes are {', '.join(shipped)}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = plain_yaml(path.read_text(encoding="utf-8"), SettingsLoader)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file, but a config is YAML in UTF-8: name another file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check its permissions") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML{where(error)}: correct it") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds {shown(content)}, but a config is a mapping of sections (model:, data:, ...): see `groupwise config`"
        )
    return content


def _parse_override(override: str) -> tuple[str, Any]:
    if not isinstance(override, str):
        raise ConfigError(f"{override!r} is not an override, which is a text, such as 'training.steps=10', or an entry of a dict")
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{override!r} is not an override, which is written key=value, such as training.steps=10")
    path = _resolve(_dotted(key.strip()))
    return path, _parse_value(path, text.strip())


def _dotted(key: str) -> str:
    """``functions[0]`` as ``functions.0``."""
    return re.sub(r"\[(\d+)\]", r".\1", key)


def _resolve(key: str) -> str:
    """The full dotted path of an override's key, which may be its end alone where that is unique."""
    schema_key = schema_path(key)
    known = [*field_paths(), *sections()]
    if schema_key in known or schema_key.startswith(_OWN_SETTINGS):
        return key
    settable = [path for path in known if ITEM not in path]
    candidates = list(dict.fromkeys(path for path in settable if path.endswith("." + key)))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ConfigError(
            f"{key} is ambiguous, but must name one setting: write {', '.join(candidates[:-1])} or {candidates[-1]}"
        )
    raise ConfigError(unknown_key(schema_key))


def _parse_value(path: str, text: str) -> Any:
    """The value that ``text`` means for the setting at ``path``: YAML, or the text itself where the setting holds text."""
    if _holds_text(path):
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        if text in ("null", "~"):
            return None
        if not quoted:
            return text
    try:
        return plain_yaml(text, SettingsLoader)
    except yaml.YAMLError as error:
        given = text if len(text) <= 60 else text[:57] + "..."
        raise ConfigError(f"{path}={given} is not valid YAML{where(error)}: quote it, or correct the brackets") from None


def _holds_text(path: str) -> bool:
    info = find_field(schema_path(path))
    if info is None:
        return False
    members = get_args(info.annotation) if get_origin(info.annotation) in (Union, type(int | None)) else (info.annotation,)
    return str in members and set(members) <= {str, type(None)}


def _merge(base: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of ``base`` with ``new`` laid over it, section by section; lists, and sections that ``new`` gives a type, are replaced
    whole."""
    merged = dict(base)
    for key, value in new.items():
        if isinstance(value, Mapping):
            merged[key] = _merge(_below(merged.get(key), value), value)
        else:
            merged[key] = (
                [_merge({}, item) if isinstance(item, Mapping) else item for item in value] if isinstance(value, list) else value
            )
    return merged


def _below(old: Any, new: Mapping[str, Any]) -> dict[str, Any]:
    """What stays of the section ``old`` under ``new``."""
    return old if isinstance(old, dict) and "type" not in new else {}


def _set(settings: dict[str, Any], path: str, value: Any) -> None:
    """Put ``value`` at ``path``, making the sections on the way; a number in the path is an index into a list."""
    *parents, leaf = path.split(".")
    place: Any = settings
    for depth, name in enumerate(parents):
        here = ".".join(parents[: depth + 1])
        if name.isdigit():
            place = place[_index(place, name, path)]
        else:
            if not isinstance(place.get(name), dict | list):
                place[name] = _default_list(here)
            if here == "rewards.functions":
                _spell_out_rewards(settings)
            place = place[name]
        if not isinstance(place, dict | list):
            raise ConfigError(f"{here} is {shown(place)}, so {path} cannot be set in it: make it a section of settings")
    if isinstance(place, list):
        place[_index(place, leaf, path)] = value
    elif path in sections() and isinstance(value, Mapping):
        place[leaf] = _merge(_below(place.get(leaf), value), value)
    else:
        place[leaf] = value


def _default_list(path: str) -> dict[str, Any] | list[Any]:
    """What stands at ``path`` before anything was set there: the default list, or an empty section."""
    info = find_field(schema_path(path))
    default = None if path in sections() or info is None else info.get_default(call_default_factory=True)
    if not isinstance(default, list):
        return dict(default) if isinstance(default, Mapping) else {}
    return [item.model_dump() if hasattr(item, "model_dump") else item for item in default]


def _index(place: Any, name: str, path: str) -> int:
    if not isinstance(place, list) or not name.isdigit() or int(name) >= len(place):
        size = len(place) if isinstance(place, list) else 0
        raise ConfigError(f"{path} points past the end of a list of {size}: set the whole list instead")
    return int(name)


def _spell_out_rewards(settings: dict[str, Any]) -> None:
    """Let ``functions: [correctness, {model: judge}]`` stand for the mappings ``{function: ...}`` and ``{model: {name: ...}}`` that the
    schema asks for."""
    section = settings.get("rewards")
    if isinstance(section, dict) and isinstance(section.get("functions"), list):
        section["functions"] = [{"function": item} if isinstance(item, str) else item for item in section["functions"]]
        for entry in section["functions"]:
            if isinstance(entry, dict) and isinstance(entry.get("model"), str):
                entry["model"] = {"name": entry["model"]}


def _check_values(value: object, path: str, source: str, hidden: bool) -> None:
    """Refuse nan and infinity everywhere: they pass most comparisons and would surface much later as a broken run; trust that the file
    ``source`` grants itself; and, unless ``hidden`` allows them, secrets that are not there."""
    if value == HIDDEN and not hidden:
        raise ConfigError(f"{path} is {HIDDEN}, which a run's files have in place of a secret: give the value itself")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} is {value}, but must be a finite number: give one")
    if isinstance(value, _Granted):
        raise ConfigError(
            f"{source} sets {path}, but no file can grant a model's own code the right to run: take it out of the file and, if you trust "
            f"that code, add {path}=true to the command (in Python: to the overrides of load_config)"
        )
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not path and not isinstance(key, str):  # pydantic says so of what stands deeper
                raise ConfigError(f"the settings have a section {key!r}, but its name must be text: give it one or take it out")
            _check_values(inner, f"{path}.{key}" if path else str(key), source, hidden)
    if isinstance(value, list):
        for position, inner in enumerate(value):
            _check_values(inner, f"{path}[{position}]", source, hidden)


def _of_a_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's folder says, without trust in code, and in this version's sections."""
    kept: dict[str, Any] = _replace_trust(settings, False)
    algorithm = kept.get("algorithm")
    if not isinstance(algorithm, Mapping):
        return kept
    algorithm = in_sections(algorithm)
    kl = algorithm.get("kl")
    if not isinstance(kl, Mapping):
        return {**kept, "algorithm": algorithm}
    renewed = kl.get("reference_every") == kl.get("reference_mixing", 1) == 1
    if renewed and (algorithm.get("updates_per_batch", 1) == 1 or kl.get("placement", "loss") != "loss"):
        algorithm = {**algorithm, "kl": None}  # from the policy itself, always 0: refused since
    return {**kept, "algorithm": algorithm}


def _replace_trust(value: Any, granted: Any) -> Any:
    """``value`` with ``granted`` in place of every ``trust_remote_code`` that is not plainly off."""
    if isinstance(value, Mapping):
        return {
            key: granted if key == "trust_remote_code" and inner not in (False, None) else _replace_trust(inner, granted)
            for key, inner in value.items()
        }
    return [_replace_trust(inner, granted) for inner in value] if isinstance(value, list) else value
