"""Every setting by its dotted path, read from the schema itself: the source for documentation, overrides and "did you mean"."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from groupwise.config.schema import Config

__all__ = ["ITEM", "REMARKS", "FieldDoc", "explain", "field_paths", "find_field", "schema_path", "sections", "suggest"]

ITEM = "[]"
"""Stands for "any entry" in the path of a setting inside a list: ``rewards.functions[].weight``."""

OTHER_WORDS: dict[str, str | tuple[str, ...]] = {
    "G": "rollout.completions_per_prompt",
    "num_generations": "rollout.completions_per_prompt",
    "group_size": "rollout.completions_per_prompt",
    "num_samples": "rollout.completions_per_prompt",
    "batch_size": "rollout.prompts_per_step",
    "per_device_train_batch_size": "rollout.prompts_per_step",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_new_tokens": "rollout.max_completion_tokens",
    "max_tokens": "rollout.max_completion_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_length": ("rollout.max_completion_tokens", "data.max_prompt_tokens"),
    "mu": "algorithm.updates_per_batch",
    "num_iterations": ("algorithm.updates_per_batch", "algorithm.reference_updates"),  # TRL's mu, and the outer loop of the paper
    "ppo_epochs": "algorithm.updates_per_batch",
    "gradient_accumulation_steps": "training.micro_batch_tokens",
    "sync_ref_model": "algorithm.reference_updates",
    "clip_range": "algorithm.epsilon",
    "cliprange": "algorithm.epsilon",
    "kl_coef": "algorithm.beta",
    "kl_coeff": "algorithm.beta",
    "kl_penalty": ("algorithm.beta", "algorithm.kl_estimator"),
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "grad_clip": "optimizer.max_grad_norm",
    "master_weights": "optimizer.precision",
    "max_steps": "training.steps",
    "num_steps": "training.steps",
    "epochs": "training.steps",
    "num_epochs": "training.steps",
    "num_train_epochs": "training.steps",
    "warmup_ratio": "optimizer.warmup_steps",
    "load_in_4bit": "model.quantization",
    "load_in_8bit": "model.quantization",
    "report_to": "output.trackers",
    "eval_steps": "evaluation.every",
    "save_steps": "output.checkpoint_every",
    "output_dir": "output.folder",
    "model_name_or_path": "model.name",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "system_prompt": "prompt.system",
    "reward_funcs": "rewards.functions",
}
"""What other trainers and the papers call a setting of ours; used for suggestions only, never accepted as a key."""

REMARKS = {
    "logging_steps": "every step is logged, to metrics.jsonl and output.trackers",
    "bias": "an adapter here (model.lora) trains no biases",
    "gradient_accumulation_steps": "a step's batch is rollout.prompts_per_step x rollout.completions_per_prompt, however it is cut",
    "epochs": "an epoch is the training problems / rollout.prompts_per_step, and `groupwise plan` counts its steps",
    "warmup_ratio": "it is counted in steps",
    "report_to": "a list, such as [jsonl, wandb]",
    "load_in_4bit": "4bit, with model.lora",
    "load_in_8bit": "8bit, with model.lora",
}
"""What there is to say of another trainer's setting beside the name of ours, or because we have none."""
REMARKS |= dict.fromkeys(("num_epochs", "num_train_epochs"), REMARKS["epochs"])


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One setting as it is documented."""

    path: str
    """Dotted, such as ``rollout.completions_per_prompt``."""
    type: str
    """What may stand there, in words a YAML author knows: ``whole number >= 2``."""
    default: Any
    """Plain YAML-like value; for a setting inside a list entry that must be given, the text ``(required)``."""
    description: str
    """The docstring under the field, on one line."""

    @property
    def leaf(self) -> str:
        return self.path.rsplit(".", 1)[-1]


def explain() -> list[FieldDoc]:
    """Every setting of a run, in the order of the schema."""
    return list(_catalogue())


def field_paths() -> list[str]:
    return [doc.path for doc in _catalogue()]


def schema_path(path: str) -> str:
    """The path under which the schema knows a place in a config: ``rewards.functions[0].weight`` (or ``.0.``) ->
    ``rewards.functions[].weight``, ``evaluation.modes[1]`` -> ``evaluation.modes``, ``model.lora.rank`` -> ``model.lora[].rank``.
    """
    parts: list[str] = []
    for part in path.split("."):
        name, bracket, _ = part.partition("[")
        if name.isdigit() and parts:
            parts[-1] += ITEM
        else:
            parts.append(name + (ITEM if bracket else ""))
    parts[-1] = parts[-1].removesuffix(ITEM)
    known, found = set(field_paths()), parts[0]
    for part in parts[1:]:
        inside = f"{found}{ITEM}.{part}"  # a section that may be null has the form of a list's entry
        found = inside if inside in known else f"{found}.{part}"
    return found


@cache
def sections() -> dict[str, type[BaseModel]]:
    """Dotted path of every section, the nested ones too, and its class."""
    found: dict[str, type[BaseModel]] = {}

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, info in model.model_fields.items():
            if _is_section(info.annotation):
                found[prefix + name] = info.annotation  # type: ignore[assignment]
                walk(info.annotation, prefix + name + ".")  # type: ignore[arg-type]

    walk(Config, "")
    return found


def find_field(path: str) -> FieldInfo | None:
    """The schema's entry for a full dotted path (list entries written ``name[]``), or None."""
    model: type[BaseModel] = Config
    *parents, leaf = path.split(".")
    for name in parents:
        info = model.model_fields.get(name.removesuffix(ITEM))
        inner = None if info is None else _inner_section(info.annotation)
        if inner is None:
            return None
        model = inner
    return model.model_fields.get(leaf)


def suggest(unknown: str) -> list[str]:
    """Known paths that the unknown dotted path most likely meant, best first; empty when nothing is near.

    In order: another trainer's word for one of ours, the same last name in another section, a near miss in the same
    section, a near miss anywhere.
    """
    leaf = unknown.rsplit(".", 1)[-1]
    if leaf in OTHER_WORDS:
        meant = OTHER_WORDS[leaf]
        return [meant] if isinstance(meant, str) else list(meant)
    if leaf in REMARKS:
        return []
    known = [path for path in (*field_paths(), *sections()) if path != unknown.rpartition(".")[0] or path not in sections()]
    same_leaf = [path for path in known if path.rsplit(".", 1)[-1] == leaf]
    if same_leaf:
        return same_leaf
    near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.75)
    if near:
        return near
    by_leaf: dict[str, list[str]] = {}
    for path in known:
        by_leaf.setdefault(path.rsplit(".", 1)[-1], []).append(path)
    near = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.6)
    return by_leaf[near[0]] if near else []


@cache
def _catalogue() -> tuple[FieldDoc, ...]:
    return tuple(_walk(Config, ""))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[FieldDoc]:
    for name, info in model.model_fields.items():
        path = prefix + name
        if _is_section(info.annotation):
            yield from _walk(info.annotation, path + ".")  # type: ignore[arg-type]
            continue
        yield FieldDoc(path, _type_words(info), _plain_default(info), " ".join((info.description or "").split()))
        inner = _inner_section(info.annotation)
        if inner is not None:
            yield from _walk(inner, f"{path}{ITEM}.")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _inner_section(annotation: Any) -> type[BaseModel] | None:
    """The section class that ``annotation`` is or holds: ``X``, ``list[X]``, ``X | None``."""
    if _is_section(annotation):
        return annotation  # type: ignore[no-any-return]
    if get_origin(annotation) is Literal:
        return None
    for argument in get_args(annotation):
        inner = _inner_section(argument)
        if inner is not None:
            return inner
    return None


def _plain_default(info: FieldInfo) -> Any:
    default = info.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "(required)"
    return _plain(default)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


_NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "mapping",
    type(None): "null",
    Any: "anything",
}


def _type_words(info: FieldInfo) -> str:
    bounds = []
    for rule in info.metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            bound = getattr(rule, attribute, None)
            if bound is not None:
                bounds.append(f"{sign} {bound}")
    words, limits = _annotation_words(info.annotation), " and ".join(bounds)
    if not limits:
        return words
    return f"{words} ({limits})" if " or " in words else f"{words} {limits}"


def _annotation_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_annotation_words(argument) for argument in arguments)
    if origin is list:
        return f"list of {_annotation_words(arguments[0])}"
    if origin is tuple:
        return "list of " + ", ".join(_annotation_words(argument) for argument in arguments)
    if origin is dict:
        return "mapping"
    if _is_section(annotation):
        return "settings"
    return _NAMES.get(annotation, str(annotation))
