"""Sampling engines: the built-in one over the trained weights, and one over any transformers module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupwise.config.schema import RolloutConfig
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.models.load import Policy
    from groupwise.models.scorer import Scorer

__all__ = ["Engine", "SamplingSettings", "make_engine"]


def make_engine(policy: Policy, rollout: RolloutConfig, scorer: Scorer | None = None) -> Engine:
    """The engine that ``rollout.engine`` names. ``scorer`` is the policy's, if it is being trained: the built-in engine then works
    on the very same tensors.

    Raises ConfigError where the built-in engine is asked for and does not cover the architecture.
    """
    from groupwise.engines.builtin.engine import BuiltinEngine
    from groupwise.engines.transformers import TransformersEngine
    from groupwise.models.adapters import is_adapted
    from groupwise.models.decoder import Decoder, why_unsupported

    if is_adapted(policy.model):
        return _over_adapter(policy, rollout)
    reason = None if isinstance(scorer, Decoder) else why_unsupported(policy.model)
    if rollout.engine == "builtin" and reason is not None:
        raise ConfigError(
            f"rollout.engine is builtin, which does not cover {policy.name} ({reason}): use rollout.engine=transformers or auto"
        )
    if rollout.engine == "transformers" or reason is not None:
        return TransformersEngine(policy.model, policy.tokenizer, policy.end_token_ids, max_rows=rollout.max_concurrent_sequences)
    decoder = scorer if isinstance(scorer, Decoder) else Decoder(policy.model, trainable=False)
    return BuiltinEngine(decoder, policy.tokenizer, policy.end_token_ids, max_rows=rollout.max_concurrent_sequences)


def _over_adapter(policy: Policy, rollout: RolloutConfig) -> Engine:
    """Over merged weights where that is exact and was not ruled out, else the adapted module itself."""
    from groupwise.engines.merged import MergedEngine
    from groupwise.engines.transformers import TransformersEngine
    from groupwise.models.adapters import base_module, copy_merged, why_not_mergeable
    from groupwise.models.decoder import why_unsupported

    settings = {"max_rows": rollout.max_concurrent_sequences}
    plain = None if rollout.engine == "transformers" else copy_merged(policy.model)
    if plain is not None:
        return MergedEngine(policy.model, plain, policy.tokenizer, policy.end_token_ids, **settings)
    if rollout.engine == "builtin":
        reason = why_not_mergeable(policy.model) or why_unsupported(base_module(policy.model))
        raise ConfigError(
            f"rollout.engine is builtin, which does not cover {policy.name} ({reason}): use rollout.engine=transformers or auto"
        )
    return TransformersEngine(base_module(policy.model), policy.tokenizer, policy.end_token_ids, **settings)
