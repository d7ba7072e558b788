"""TRL's arguments as this project's own config: what the objective, the optimiser and the sampler are told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from groupwise.algorithm import LossInputs, LossOutputs, Objective
from groupwise.algorithm.losses import cispo_loss, clip_loss
from groupwise.config.advantage import GroupAdvantage
from groupwise.config.loss import ClipLoss, LossSection, OwnLoss, SapoLoss, VespoLoss
from groupwise.config.schema import AlgorithmConfig, Config, KLConfig, ModelConfig, OptimizerConfig, RolloutConfig, TrainingConfig
from groupwise.errors import ConfigError
from groupwise.trl.config import EIGHT_BIT, GRPOConfig

__all__ = ["algorithm_config", "model_config", "objective", "to_config"]

_AGGREGATION = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "fixed",
    "luspo": "sequence_sum",
    "sapo": "sequence_mean",
    "vespo": "token_mean",
}
"""Loss type -> how token losses are summed; the counts that they are divided by are in ``schedule.py``. A loss of the user's is averaged
over tokens, as ``dapo`` is."""
_SCALE = {"group": "group_std", "batch": "batch_std", "none": "none"}


def to_config(args: GRPOConfig, model: ModelConfig) -> Config:
    """The config of the learner and the engine. Data, rewards and evaluation are the trainer's own, as in TRL."""
    return Config(
        model=model,
        rollout=RolloutConfig(
            prompts_per_step=args.generation_batch_size // args.num_generations,
            completions_per_prompt=args.num_generations,
            max_completion_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k if args.top_k > 0 else None,
            engine="auto" if args.repetition_penalty == 1 else "transformers",
        ),
        algorithm=algorithm_config(args),
        optimizer=OptimizerConfig(
            learning_rate=args.learning_rate or 1e-6,  # the schedule has the rate that counts, 0 included
            betas=(args.adam_beta1, args.adam_beta2),
            epsilon=args.adam_epsilon,
            weight_decay=args.weight_decay,
            decay="matrices",
            max_grad_norm=args.max_grad_norm or None,
            precision="masters-8bit" if args.optim in EIGHT_BIT else "masters",
        ),
        training=TrainingConfig(seed=args.seed),
    )


def algorithm_config(args: GRPOConfig) -> AlgorithmConfig:
    """The objective, but for what ``objective`` adds to it."""
    kl = KLConfig(
        beta=args.beta,
        skip_zero_variance=False,
        importance_weighted=args.use_bias_correction_kl,
        reference_every=args.ref_model_sync_steps if args.sync_ref_model else None,
        reference_mixing=args.ref_model_mixup_alpha if args.sync_ref_model else 1.0,
    ) if args.beta else None  # fmt: skip
    return AlgorithmConfig(
        updates_per_batch=args.num_iterations,
        mask_truncated=args.mask_truncated_completions,
        advantage=GroupAdvantage(scale=_SCALE[str(args.scale_rewards)]),  # type: ignore[arg-type]
        loss=_loss(args, _AGGREGATION.get(args.loss_type, "token_mean")),
        kl=kl,
    )


def _loss(args: GRPOConfig, aggregation: Any) -> LossSection:
    """The loss, but for a clip range of 0, the off-policy mask, and how TRL bounds CISPO's weight: those are ``objective``'s."""
    if args.loss_type == "sapo":
        tau = {"tau_positive": args.sapo_temperature_pos, "tau_negative": args.sapo_temperature_neg}
        return SapoLoss(aggregation=aggregation, **tau)
    if args.loss_type == "vespo":
        positive = {"k_positive": args.vespo_k_pos, "lambda_positive": args.vespo_lambda_pos}
        negative = {"k_negative": args.vespo_k_neg, "lambda_negative": args.vespo_lambda_neg}
        return VespoLoss(aggregation=aggregation, **positive, **negative)
    if ":" in args.loss_type:
        return OwnLoss(type=args.loss_type, aggregation=aggregation)
    return ClipLoss(aggregation=aggregation)


def objective(args: GRPOConfig) -> Objective:
    """With what TRL takes and a config of this project does not: a clip range of 0, the off-policy mask.

    A sequence-level ratio has its true gradient, which runs into all tokens of a completion, those outside of
    ``top_entropy_quantile`` included. TRL's cispo bounds the weight itself, by ``epsilon_high``, and only from above.
    """
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    ratio = "whole_sequence" if args.importance_sampling_level == "sequence" else "token"
    made = Objective.from_config(algorithm_config(args))
    loss = made.loss
    if args.loss_type == "cispo":
        loss = partial(_cispo, high=high - 1, ratio=ratio)
    elif args.loss_type == "sapo":
        loss = partial(made.loss, ratio=ratio)
    elif args.loss_type in _AGGREGATION and args.loss_type != "vespo":
        loss = partial(clip_loss, epsilon=args.epsilon, epsilon_high=high, dual_clip=args.delta, ratio=ratio)
    kl = made.kl and replace(made.kl, importance=made.kl.importance and ratio)
    return replace(made, loss=loss, kl=kl, off_policy_limit=args.off_policy_mask_threshold)


def _cispo(inputs: LossInputs, *, high: float, ratio: str) -> LossOutputs:
    """As everywhere, but TRL's ``cispo_clip_ratio`` counts tokens with a positive advantage alone."""
    found = cispo_loss(inputs, epsilon=1.0, epsilon_high=high, ratio=ratio)
    assert found.clipped_T is not None
    return replace(found, clipped_T=found.clipped_T & (inputs.advantages_T > 0))


def model_config(args: GRPOConfig, name: str) -> ModelConfig:
    """How a model that is given by its name is loaded.

    TRL's default is float32 weights that compute in bfloat16 where ``bf16`` is on; here that is bfloat16 weights with float32
    masters in the optimiser, or float32 on a CPU that does not compute in bfloat16.
    """
    given = args.model_init_kwargs or {}
    if given.get("device_map") not in (None, "auto"):
        raise ConfigError(
            f"model_init_kwargs device_map={given['device_map']!r} is not honoured: leave it out, there is one device"
        )
    wanted = str(given.get("dtype", given.get("torch_dtype")) or "float32").removeprefix("torch.")
    if wanted not in ("float32", "bfloat16", "auto"):
        raise ConfigError(f"model_init_kwargs dtype={wanted!r} is not honoured by groupwise.trl: use float32 or bfloat16")
    return ModelConfig(
        name=name,
        revision=given.get("revision"),
        dtype="bfloat16" if wanted == "bfloat16" else "auto" if args.bf16 else wanted,  # type: ignore[arg-type]
        attention=given.get("attn_implementation") or "auto",
        gradient_checkpointing=args.gradient_checkpointing,
        device="cpu" if args.use_cpu else "auto",
        trust_remote_code=bool(given.get("trust_remote_code", args.trust_remote_code)),
    )
