"""Every setting by its dotted path, read from the schema itself: the source for documentation, overrides and "did you mean"."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from groupwise.config.schema import Config

__all__ = [
    "ITEM", "REMARKS", "FieldDoc", "explain", "field_paths", "find_field", "kinds_of", "schema_path", "sections", "suggest", "without_tags",
]  # fmt: skip

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
    "num_iterations": (
        "algorithm.updates_per_batch",
        "algorithm.kl.reference_updates",
    ),  # TRL's mu, and the outer loop of the paper
    "ppo_epochs": "algorithm.updates_per_batch",
    "gradient_accumulation_steps": "training.micro_batch_tokens",
    "sync_ref_model": "algorithm.kl.reference_updates",
    "ref_model_sync_steps": "algorithm.kl.reference_every",
    "ref_model_mixup_alpha": "algorithm.kl.reference_mixing",
    "clip_range": "algorithm.loss.epsilon",
    "cliprange": "algorithm.loss.epsilon",
    "clip_ratio": "algorithm.loss.epsilon",
    "loss_type": ("algorithm.loss.type", "algorithm.preset"),
    "importance_sampling_level": "algorithm.loss.ratio",
    "sapo_temperature_pos": "algorithm.loss.tau_positive",
    "sapo_temperature_neg": "algorithm.loss.tau_negative",
    "vespo_k_pos": "algorithm.loss.k_positive",
    "vespo_lambda_pos": "algorithm.loss.lambda_positive",
    "vespo_k_neg": "algorithm.loss.k_negative",
    "vespo_lambda_neg": "algorithm.loss.lambda_negative",
    "scale_rewards": "algorithm.advantage.scale",
    "adv_estimator": "algorithm.advantage.type",
    "lambda": "algorithm.advantage.lam",
    "kl_coef": "algorithm.kl.beta",
    "kl_coeff": "algorithm.kl.beta",
    "kl_penalty": ("algorithm.kl.beta", "algorithm.kl.estimator"),
    "use_bias_correction_kl": "algorithm.kl.importance_weighted",
    "entropy_coef": "algorithm.entropy.bonus",
    "entropy_coeff": "algorithm.entropy.bonus",
    "top_entropy_quantile": "algorithm.entropy.top_share",
    "vf_coef": "algorithm.value.loss_weight",
    "cliprange_value": "algorithm.value.clip",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "grad_clip": "optimizer.max_grad_norm",
    "master_weights": "optimizer.precision",
    "max_steps": "training.steps",
    "num_steps": "training.steps",
    "num_epochs": "training.epochs",
    "use_deterministic_algorithms": "training.deterministic",
    "full_determinism": "training.deterministic",
    "num_train_epochs": "training.epochs",
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
    "warmup_ratio": "below 1 it is a share of the run's steps",
    "report_to": "a list, such as [jsonl, wandb]",
    "load_in_4bit": "4bit, with model.lora",
    "load_in_8bit": "8bit, with model.lora",
}
"""What there is to say of another trainer's setting beside the name of ours, or because we have none."""


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One setting as it is documented."""

    path: str
    """Dotted, such as ``rollout.completions_per_prompt``."""
    type: str
    """What may stand there, in words a YAML author knows: ``whole number >= 2``."""
    default: object
    """Plain YAML-like value; for a setting inside a list entry that must be given, the text ``(required)``."""
    description: str
    """The docstring under the field, on one line."""
    of: tuple[str, ...] = ()
    """In a section that comes in several types: those that have the setting as it is described here. Empty: all."""

    @property
    def leaf(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def name(self) -> str:
        """The last part of the path, and where it matters the types of its section: ``epsilon (clip)``."""
        return f"{self.leaf} ({', '.join(self.of)})" if self.of else self.leaf


def explain() -> list[FieldDoc]:
    """Every setting of a run, in the order of the schema."""
    return list(_catalogue())


def field_paths() -> list[str]:
    """Every path once, also where several types of a section have it."""
    return list(dict.fromkeys(doc.path for doc in _catalogue()))


def schema_path(path: str) -> str:
    """The path under which the schema knows a place in a config: ``rewards.functions[0].weight`` (or ``.0.``) ->
    ``rewards.functions[].weight``, ``evaluation.modes[1]`` -> ``evaluation.modes``.
    """
    parts: list[str] = []
    for part in path.split("."):
        name, bracket, _ = part.partition("[")
        if name.isdigit() and parts:
            parts[-1] += ITEM
        else:
            parts.append(name + (ITEM if bracket else ""))
    parts[-1] = parts[-1].removesuffix(ITEM)
    return ".".join(parts)


@cache
def sections() -> dict[str, tuple[type[BaseModel], ...]]:
    """Dotted path of every section, the nested ones too, and its class; the classes of all types where it comes in several."""
    by_path: dict[str, tuple[type[BaseModel], ...]] = {}

    def walk(models: tuple[type[BaseModel], ...], prefix: str) -> None:
        for model in models:
            for name, info in model.model_fields.items():
                if inner := _section_classes(info.annotation):
                    by_path[prefix + name] = inner
                    walk(inner, f"{prefix}{name}.")

    walk((Config,), "")
    return by_path


def without_tags(location: Sequence[int | str]) -> tuple[int | str, ...]:
    """pydantic's location of an error without the types that it names inside sections which come in several."""
    kept: list[int | str] = []
    tag = False
    for part in location:
        if tag:
            tag = False
            continue
        kept.append(part)
        tag = len(sections().get(".".join(map(str, kept)), ())) > 1
    return tuple(kept)


def find_field(path: str, kind: str | None = None) -> FieldInfo | None:
    """The schema's entry for a full dotted path (list entries written ``name[]``), or None.

    ``kind``: which type of its section is meant, where it comes in several; by default the first that has the setting.
    """
    models: tuple[type[BaseModel], ...] = (Config,)
    *parents, leaf = path.split(".")
    for name in parents:
        infos = [model.model_fields[name.removesuffix(ITEM)] for model in models if name.removesuffix(ITEM) in model.model_fields]
        inside = _item_classes if name.endswith(ITEM) else _section_classes
        models = next((inner for info in infos if (inner := inside(info.annotation))), ())
    having = [model for model in models if leaf in model.model_fields]
    exact = [model for model in having if kind is not None and kind in kinds_of(model)]
    return next((model.model_fields[leaf] for model in (*exact, *having)), None)


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """The ``type`` that a section's class stands for; empty for one that comes in one type only, or that is a function of one's own."""
    info = model.model_fields.get("type")
    return get_args(info.annotation) if info is not None and get_origin(info.annotation) is Literal else ()


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
    return tuple(_walk((Config,), ""))


def _walk(models: tuple[type[BaseModel], ...], prefix: str) -> Iterator[FieldDoc]:
    """``models``: the classes of one section, several where it comes in several types."""
    for name in dict.fromkeys(name for model in models for name in model.model_fields):
        path = prefix + name
        infos = {model: model.model_fields[name] for model in models if name in model.model_fields}
        info = next(iter(infos.values()))
        inner = _section_classes(info.annotation)
        if not inner or type(None) in get_args(info.annotation):
            yield from _docs(path, infos, len(models))
        yield from _walk(inner or _item_classes(info.annotation), f"{path}." if inner else f"{path}{ITEM}.")


def _docs(path: str, infos: Mapping[type[BaseModel], FieldInfo], types: int) -> Iterator[FieldDoc]:
    """One entry where all types of a section have the same setting, else one for each that is described differently."""
    if types > 1 and path.endswith(".type"):
        own = "FILE.py:FUNCTION"
        kinds = [kind for model in infos for kind in kinds_of(model)]
        parent = find_field(path.removesuffix(".type"))
        words = " ".join(((parent.description if parent else "") or "").split())
        yield FieldDoc(path, " | ".join([*kinds, own]), kinds[0], words)
        return
    described: dict[tuple[str, str, str], list[type[BaseModel]]] = {}
    for model, info in infos.items():
        words = " ".join((info.description or "").split())
        described.setdefault((_type_words(info), repr(_plain_default(info)), words), []).append(model)
    for (kind, _, words), models in described.items():
        of = [one for model in models for one in kinds_of(model) or (("your own",) if types > 1 else ())]
        yield FieldDoc(path, kind, _plain_default(infos[models[0]]), words, () if len(models) == types else tuple(of))


def _is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _section_classes(annotation: object) -> tuple[type[BaseModel], ...]:
    """The classes of a section that stands at a place: one, ``X`` or ``X | None``; several where it comes in several types; none for a
    value."""
    if _is_section(annotation):
        return (annotation,)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _section_classes(arguments[0])
    if origin not in (Union, types.UnionType):
        return ()
    inner = [_section_classes(argument) for argument in arguments if argument is not type(None)]
    return tuple(model for models in inner for model in models) if all(inner) else ()


def _item_classes(annotation: object) -> tuple[type[BaseModel], ...]:
    """The classes of a list's entries, where they are sections."""
    return _section_classes(get_args(annotation)[0]) if get_origin(annotation) is list else ()


def _plain_default(info: FieldInfo) -> object:
    default = info.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "(required)"
    return _plain(default)


def _plain(value: object) -> object:
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
    if _section_classes(annotation):
        return "settings"
    return _NAMES.get(annotation, str(annotation))
