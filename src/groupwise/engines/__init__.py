"""Sampling engines: the built-in one over the trained weights, one over any transformers module, and vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from groupwise.config.schema import Config, RolloutConfig
from groupwise.engines.base import Engine, SampleRequest, SamplingSettings
from groupwise.errors import ConfigError
from groupwise.importing import import_member

if TYPE_CHECKING:
    from groupwise.distributed import World
    from groupwise.models.load import Policy
    from groupwise.models.scorer import Scorer

logger = logging.getLogger("groupwise")

__all__ = ["Engine", "SampleRequest", "SamplingSettings", "check_engine", "check_quantization", "make_engine"]


def check_engine(rollout: RolloutConfig) -> None:
    """Raise ConfigError for an engine by import path that is not there or is none."""
    if rollout.engine_is_yours:
        _your_engine(rollout.engine)


def check_quantization(config: Config, hf_config: Any) -> None:
    """Raise ConfigError where weights of 8 bits are asked for (``rollout.quantization``) and this machine cannot sample with them, or not
    such a model, of a transformers config ``hf_config``: before its weights are read."""
    if config.rollout.quantization == "none":
        return
    import torch

    from groupwise.models.devices import with_dtype
    from groupwise.models.families import why_uncovered
    from groupwise.models.load import resolve_device

    name = config.model.name
    reason = _SAME_STEPS if config.model.quantization == "8bit" else why_uncovered(hf_config)
    if reason is not None:
        raise _no_8_bits(name, reason)
    _check_products(name, resolve_device(config.model.device), getattr(torch, with_dtype(config.model).dtype))


def _your_engine(spec: str) -> type[Engine]:
    engine, place = import_member(spec, "engine", ConfigError)
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise ConfigError(
            f"rollout.engine names {spec}, which is no engine: derive a class from groupwise.engines.Engine and name that"
        )
    if missing := sorted(engine.__abstractmethods__):
        raise ConfigError(f"the engine {engine.__name__} of {place} does not define {' and '.join(missing)}: every engine must")
    return engine


def make_engine(
    policy: Policy,
    rollout: RolloutConfig,
    scorer: Scorer | None = None,
    world: World | None = None,
    collect: Callable[[Policy], Policy | None] = lambda policy: policy,
    frozen: bool = False,
) -> Engine:
    """The engine that ``rollout.engine`` names. ``scorer`` is the policy's, if it is being trained: the built-in engine then works
    on the very same tensors. ``world``: the processes that make their engines at once; ``collect``: where each holds a part of the
    weights, what gives the first of them the policy with all of its weights, when all call it. ``frozen``: nothing will change the
    weights, and many prompts are sampled at once: they may be stored in fewer bits where this changes no number, and pushed
    again by whichever thread samples.

    An engine by import path is made by ``Class(policy, rollout)``, and told of the weights by ``refresh(0)``.

    Raises ConfigError where the built-in engine is asked for and does not cover the architecture, weights of 8 bits are and cannot be
    computed with here, vLLM cannot be had, or an import path leads to no engine.
    """
    if rollout.engine_is_yours:
        yours = _your_engine(rollout.engine)(policy, rollout)  # type: ignore[call-arg]
        yours.refresh(0)
        return yours
    if rollout.engine == "vllm":
        from groupwise.engines.vllm.engine import open_vllm_engine

        return open_vllm_engine(policy, rollout, world, collect, frozen)
    import torch

    from groupwise.engines.builtin.decode import rearranging_helps
    from groupwise.engines.builtin.engine import BuiltinEngine
    from groupwise.engines.transformers import TransformersEngine
    from groupwise.models.adapters import base_module, is_adapted
    from groupwise.models.decoder import Decoder, MergedDecoder, why_not_lean, why_unsupported
    from groupwise.models.devices import has_device_map
    from groupwise.models.quantised import quantised_layers, store_layers_in_16_bits

    merges = is_adapted(policy.model) or bool(quantised_layers(policy.model))
    reason = None if isinstance(scorer, Decoder) else (why_not_lean if merges else why_unsupported)(policy.model)
    if has_device_map(policy.model):
        reason = "its weights lie on several devices"
    if rollout.engine == "builtin" and reason is not None:
        raise ConfigError(
            f"rollout.engine is builtin, which does not cover {policy.name} ({reason}): use rollout.engine=transformers or auto"
        )
    in_8_bits = rollout.quantization != "none"
    if in_8_bits and any(layer.weight.dtype == torch.int8 for layer in quantised_layers(policy.model)):
        reason = _SAME_STEPS
    if in_8_bits and reason is not None:
        raise _no_8_bits(policy.name, reason)
    if rollout.engine == "transformers" or reason is not None:
        module = base_module(policy.model)
        return TransformersEngine(module, policy.tokenizer, policy.end_token_ids, max_rows=rollout.max_concurrent_sequences)
    if not isinstance(scorer, Decoder):
        from groupwise.engines.builtin.fast_paths import check_fast_paths

        for choice in check_fast_paths(policy.model.config, policy.model.dtype, policy.model.device):
            if choice.notice:
                logger.warning(choice.notice)
        # Where weights are not rearranged it samples from these very ones, and 16 bits would only add copies.
        if frozen and not merges and rearranging_helps(policy.model.model.embed_tokens.weight):
            merges = store_layers_in_16_bits(policy.model)
        own = MergedDecoder(policy.model) if merges else Decoder(policy.model, trainable=False)
        if isinstance(own, MergedDecoder) and scorer is None:  # else the model's module learns
            own.store_in_16_bits()
        scorer = own
    if in_8_bits:
        _check_products(policy.name, scorer.device, scorer.dtype)
    return BuiltinEngine(scorer, policy.tokenizer, policy.end_token_ids, max_rows=rollout.max_concurrent_sequences)


_SAME_STEPS = "its base is in 8 bits already, and rounding to the same steps would take away what an adapter changes"


def _check_products(name: str, device: Any, dtype: Any) -> None:
    """Raise ConfigError where a model of ``dtype`` on ``device`` cannot be sampled with weights of 8 bits. On some processors it can
    in fp32 alone."""
    import torch

    from groupwise.engines.builtin.decode import why_not_in_8_bits

    if (reason := why_not_in_8_bits(device, dtype)) is None:
        return
    in_fp32 = why_not_in_8_bits(device, torch.float32) is None
    raise _no_8_bits(name, reason, "Set model.dtype=float32, or rollout.quantization to none" if in_fp32 else "Set it to none")


def _no_8_bits(name: str, reason: str, remedy: str = "Set it to none") -> ConfigError:
    return ConfigError(f"rollout.quantization is 8bit, but {name} cannot be sampled with weights of 8 bits: {reason}. {remedy}")
