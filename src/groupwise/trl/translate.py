"""TRL's arguments as this project's own config: what the objective, the optimiser and the sampler are told."""

from __future__ import annotations

from typing import Any

from groupwise.config.schema import AlgorithmConfig, Config, ModelConfig, OptimizerConfig, RolloutConfig, TrainingConfig
from groupwise.errors import ConfigError
from groupwise.trl.config import GRPOConfig

__all__ = ["algorithm_config", "model_config", "to_config"]

_AGGREGATION = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "fixed",
    "luspo": "sequence_sum",
}
"""Loss type -> how token losses are summed; the counts that they are divided by are in ``schedule.py``."""
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
            top_k=args.top_k or None,
        ),
        algorithm=algorithm_config(args),
        optimizer=OptimizerConfig(
            learning_rate=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            epsilon=args.adam_epsilon,
            weight_decay=args.weight_decay,
            decay="matrices",
            max_grad_norm=args.max_grad_norm or None,
        ),
        training=TrainingConfig(seed=args.seed),
    )


def algorithm_config(args: GRPOConfig) -> AlgorithmConfig:
    """The objective. TRL's cispo bounds the weight itself, by ``epsilon_high``, and only from above."""
    clip: dict[str, Any] = {"surrogate": "clip", "epsilon": args.epsilon, "epsilon_high": args.epsilon_high, "delta": args.delta}
    if args.loss_type == "cispo":
        clip = {"surrogate": "cispo", "epsilon": 1.0, "epsilon_high": args.epsilon_high - 1}
    return AlgorithmConfig(
        preset="grpo",
        beta=args.beta,
        skip_zero_variance=False,
        updates_per_batch=args.num_iterations,
        ratio_level=args.importance_sampling_level,
        aggregation=_AGGREGATION[args.loss_type],  # type: ignore[arg-type]
        kl_estimator="k3",
        kl_placement="loss",
        kl_correction=args.use_bias_correction_kl,
        mask_truncated=args.mask_truncated_completions,
        reference_every=args.ref_model_sync_steps if args.sync_ref_model else None,
        reference_mixing=args.ref_model_mixup_alpha if args.sync_ref_model else 1.0,
        scale=_SCALE[str(args.scale_rewards)],  # type: ignore[arg-type]
        **clip,
    )


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
