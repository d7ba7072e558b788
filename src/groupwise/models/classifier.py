"""Sequence classifiers: what can be told about one without its weights, and its weights.

A checkpoint is fit to give rewards where its score head was trained: a language model's folder would be loaded with a random one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from groupwise.config.rewards import RewardModelConfig
from groupwise.config.schema import ModelConfig
from groupwise.errors import ModelError
from groupwise.memory import own_memory
from groupwise.models.folder import check_folder, is_folder_name
from groupwise.models.hub import only_from_cache
from groupwise.models.load import load_model_config, load_tokenizer, resolve_device
from groupwise.models.quiet import quiet

__all__ = ["check_classifier", "label_index", "load_classifier", "load_classifier_tokenizer"]


def check_classifier(config: RewardModelConfig) -> Any:
    """The classifier's Hugging Face config, after everything that can be checked without weights. Raises ModelError."""
    with _as_reward_model(config):
        resolve_device(config.device)
        if is_folder_name(config.name):
            check_folder(Path(config.name).expanduser())
        hf_config = load_model_config(_as_model(config))
    remote_code = "AutoModelForSequenceClassification" in (getattr(hf_config, "auto_map", None) or {})
    built_as = getattr(hf_config, "architectures", None) or []
    if not remote_code and built_as and not any("ForSequenceClassification" in name for name in built_as):
        raise ModelError(
            f"the reward model {config.name!r} is a {built_as[0]}, which has no trained score head: name a sequence classifier "
            "(…ForSequenceClassification), or make this one a reward function of your own"
        )
    if not remote_code and hf_config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise ModelError(
            f"the reward model {config.name!r} is of the type {hf_config.model_type!r}, of which transformers has no sequence "
            "classifier: name a model that AutoModelForSequenceClassification loads"
        )
    return hf_config


def label_index(hf_config: Any, label: str | int | None, name: str) -> int:
    """Which output is the score. Raises ModelError where there are several and ``label`` names none of them."""
    count = int(hf_config.num_labels)
    if label is None and count == 1:
        return 0
    names = {int(index): str(word) for index, word in (hf_config.id2label or {}).items()}
    listed = ", ".join(names.get(index, str(index)) for index in range(min(count, 12))) + (", ..." if count > 12 else "")
    if label is None:
        raise ModelError(
            f"the reward model {name!r} has {count} labels ({listed}), but a reward is one number: set its label to the one to score, "
            "or name a model with one output"
        )
    if isinstance(label, str):
        found = [index for index, word in names.items() if word.lower() == label.strip().lower()]
        if not found and label.strip().isdigit():
            found = [int(label)]
    else:
        found = [label]
    if not found or not 0 <= found[0] < count:
        raise ModelError(f"the reward model {name!r} has no label {label!r}: its labels are {listed}")
    return found[0]


def load_classifier_tokenizer(config: RewardModelConfig) -> Any:
    """The classifier's own tokenizer. Raises ModelError."""
    with _as_reward_model(config):
        return load_tokenizer(_as_model(config))


def load_classifier(config: RewardModelConfig) -> PreTrainedModel:
    """The weights, in eval mode and without gradients, on their device. Raises ModelError, also for a head that was never trained."""
    with _as_reward_model(config):
        try:
            with quiet():
                loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                    _source(config),
                    dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
                    output_loading_info=True,
                    **_origin(config),
                )
        except (ImportError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(
                f"model {config.name!r} cannot be loaded ({type(error).__name__}: {reason}): check its files"
            ) from error
        model, info = loaded
        own_memory([*model.parameters(), *model.buffers()])
        if missing := sorted(info["missing_keys"]):
            raise ModelError(
                f"the weights of {config.name!r} lack {len(missing)} tensors of its architecture (such as {missing[0]}), which would "
                "be random numbers: name a model whose score head was trained"
            )
        model.to(resolve_device(config.device))
    model.requires_grad_(False).eval()
    _score_in_float32(model)
    return model  # type: ignore[no-any-return]


def _score_in_float32(model: nn.Module) -> None:
    """Compute a linear head in float32, when the model itself is coarser.

    A bfloat16 has 8 significant bits: scores near 10 would be 1/16 apart, and completions of one group would tie.
    """
    head = getattr(model, "score", None) or getattr(model, "classifier", None)
    if not isinstance(head, nn.Linear) or head.weight.dtype == torch.float32:
        return

    def widen(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(argument.float() for argument in arguments)

    head.float().register_forward_pre_hook(widen)


def _as_model(config: RewardModelConfig) -> ModelConfig:
    """The settings that any model has, in the form that the loading functions read."""
    return ModelConfig(name=config.name, revision=config.revision, trust_remote_code=config.trust_remote_code)


def _source(config: RewardModelConfig) -> str:
    return str(Path(config.name).expanduser()) if is_folder_name(config.name) else config.name


def _origin(config: RewardModelConfig) -> dict[str, Any]:
    origin: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if not is_folder_name(config.name):
        origin |= {"revision": config.revision, "local_files_only": only_from_cache(config.name, config.revision)}
    return origin


@contextmanager
def _as_reward_model(config: RewardModelConfig) -> Iterator[None]:
    """Sentences about a model, said of this one: settings are named where they stand for a reward model."""
    try:
        yield
    except ModelError as error:
        said = str(error).replace(" (--trust-remote-code of generate and merge)", ", with the reward's number for N")
        said = said.replace("add model.trust", "add rewards.functions[N].model.trust")
        for setting in ("device", "revision"):
            said = said.replace(f"model.{setting}", f"its {setting}")
        raise ModelError(f"the reward model {config.name!r} is no use: {said}") from error
