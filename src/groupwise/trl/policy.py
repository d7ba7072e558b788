"""The model that a script hands over (a name, a folder, a loaded model, one with an adapter) as policy, learner and sampler."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, set_seed

from groupwise.config.schema import Config, ModelConfig
from groupwise.distributed import Sharding, World
from groupwise.distributed.sharding import chosen_sharding
from groupwise.engines import Engine, make_engine
from groupwise.engines.dealt import DealtEngine
from groupwise.errors import ConfigError, ModelError
from groupwise.models.adapters import KeepsAdapter, attach, base_module, is_adapted
from groupwise.models.decoder import Decoder
from groupwise.models.load import Policy, check_model, context_length, end_token_ids, load_policy, load_tokenizer, resolve_device
from groupwise.models.module_scorer import ModuleScorer
from groupwise.models.projections import with_dtype
from groupwise.models.quantised import quantised_layers, settle
from groupwise.models.scorer import Scorer, attention_note, make_scorer
from groupwise.training.sharding import Replicas, make_sharding, with_whole_weights
from groupwise.trl.config import ArgumentError, GRPOConfig
from groupwise.trl.translate import model_config

log = logging.getLogger(__name__)

__all__ = ["check_launch", "make_parts", "make_policy", "seed_everything"]


class ModelArgumentError(ModelError, ValueError):
    """A ``ModelError`` where TRL raises a ``ValueError``."""


def seed_everything(args: Any, rank: int) -> None:
    """Random numbers, each process's own as in TRL, and what else of ``args`` makes a run repeatable or not."""
    if args.full_determinism:
        from transformers import enable_full_determinism

        enable_full_determinism(args.seed + rank)
    else:
        set_seed(args.seed + rank)
    if args.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = args.tf32


def check_launch(args: GRPOConfig, processes: int) -> bool:
    """Whether the launcher's configuration asks for FSDP2. Raises ConfigError for what is not honoured of it."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "bf16" and args.bf16:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # what it asks for is done, and is not asked for again
    elif precision not in ("no", ""):
        raise ArgumentError(
            f"the configuration of accelerate launch sets mixed_precision to {precision}, and bf16 is {args.bf16}: set it to no, since "
            "bf16 of GRPOConfig says what is computed in"
        )
    chosen = chosen_sharding("auto", processes)
    if chosen not in ("none", "fsdp2"):
        raise ArgumentError(
            f"the configuration of accelerate launch asks for DeepSpeed's {chosen}, which groupwise.trl does not honour: use FSDP "
            "version 2 (launch/fsdp2-8gpu.yaml), which divides the same, or `groupwise train`, which has ZeRO"
        )
    return chosen == "fsdp2"


def make_policy(
    model: Any, args: GRPOConfig, tokenizer: Any, peft_config: Any, quantization_config: Any = None,
    load: Callable[[ModelConfig], Policy] = load_policy,
) -> tuple[Policy, ModelConfig]:  # fmt: skip
    """The policy, and the model's part of a config. ``tokenizer`` None takes the model's own. ``load`` reads a model by its name.

    ``quantization_config`` (or that of ``model_init_kwargs``) is of a model that is given by its name, with an adapter: QLoRA.

    Raises ModelError or ConfigError for a model that cannot be trained here.
    """
    within = (args.model_init_kwargs or {}).get("quantization_config")
    if isinstance(model, str) and quantization_config is not None and within is not None:
        raise ArgumentError("quantization_config is in model_init_kwargs too: set it in one place")
    if isinstance(model, str) and (quantization_config is not None or within is not None):
        config = model_config(args, model)
        loaded = _load_quantised(config, within if quantization_config is None else quantization_config)
        policy = _adopt(loaded, args, config, tokenizer, peft_config is not None)
    elif isinstance(model, str):
        config = model_config(args, model)
        try:
            policy = load(config)
        except ModelError as error:
            if "Python code of its own" not in str(error):
                raise
            raise ModelArgumentError(
                f"model {model!r} brings custom code, which trust_remote_code=True in GRPOConfig lets run: set it if you trust its source"
            ) from error
    else:
        if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
            raise ModelError(
                f"model is a {type(model).__name__}: pass a name, a folder or a causal language model of transformers"
            )
        config = model_config(args, str(getattr(model.config, "_name_or_path", "") or type(model).__name__))
        policy = _adopt(model, args, config, tokenizer, peft_config is not None)
    if tokenizer is not None:
        policy = _with_tokenizer(policy, tokenizer)
    _refuse_auxiliary_loss(policy.model, args)
    if peft_config is not None:
        policy = replace(policy, model=attach(policy.model, peft_config, args.seed).eval())
    if args.disable_dropout and is_adapted(policy.model):
        for name, module in policy.model.named_modules():
            if "lora_dropout" in name and isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return policy, config


def make_parts(
    policy: Policy, config: Config, world: World, own_optimizer: bool, aside: torch.device | None = None
) -> tuple[Scorer, Sharding, Engine]:
    """What learns, how its weights are divided, and what samples. A script's own optimiser holds the module's parameters, so the module is
    what learns; the sampler works on the same memory either way. ``aside``: where the weights of a model that is divided were read to."""
    if own_optimizer and not is_adapted(policy.model):
        engine = make_engine(policy, config.rollout)
        scorer: Scorer = ModuleScorer(policy.model)
        return scorer, Replicas(scorer, world), DealtEngine(engine, world)
    given = is_adapted(policy.model) and any(p.abs().sum() > 0 for n, p in policy.model.named_parameters() if "lora_B" in n)
    scorer = make_scorer(policy, config.model, resolve_device(config.model.device) if aside else None)
    if isinstance(scorer, Decoder) and (note := attention_note(config.model.attention, policy.model.config.model_type)):
        log.warning(note)
    if given and config.algorithm.needs_reference and isinstance(scorer, KeepsAdapter):
        scorer.keep_present_adapter()
    sharding = make_sharding(config, world, scorer)
    engine = make_engine(policy, config.rollout, scorer, world, sharding.whole_policy)
    return scorer, sharding, DealtEngine(with_whole_weights(engine, sharding), world)


def _load_quantised(config: ModelConfig, how: Any) -> Any:
    """By transformers, as ``how`` (a BitsAndBytesConfig) says."""
    check_model(config)
    config = with_dtype(config)
    try:
        return AutoModelForCausalLM.from_pretrained(
            config.name, revision=config.revision, trust_remote_code=config.trust_remote_code, quantization_config=how,
            dtype=getattr(torch, config.dtype), device_map={"": str(resolve_device(config.device))},
        )  # fmt: skip
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        raise ModelError(f"{config.name} cannot be loaded with this quantization_config: {error}") from error


def _adopt(model: Any, args: GRPOConfig, config: ModelConfig, tokenizer: Any, adapted: bool) -> Policy:
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(f"the model's weights are {model.dtype}: load it in float32 or bfloat16")
    quantised = getattr(base_module(model), "is_quantized", False)
    if quantised and not (quantised_layers(model) and (is_adapted(model) or adapted)):
        raise ModelError(
            "the model is quantised, and only an adapter on a base that bitsandbytes quantised can be trained: pass peft_config with such "
            "a model, or load it in bfloat16"
        )
    settle(model)
    if not quantised and model.device.type == "cpu" and not args.use_cpu:
        model.to(resolve_device("auto"))
    if args.gradient_checkpointing:
        base_module(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokenizer = tokenizer or load_tokenizer(config)
    ends = end_token_ids(tokenizer, model.config, getattr(model, "generation_config", None))
    adopted: Any = model.eval()
    return Policy(adopted, tokenizer, ends, context_length(model.config, tokenizer), config.name)


def _with_tokenizer(policy: Policy, tokenizer: Any) -> Policy:
    if not hasattr(tokenizer, "decode") or hasattr(tokenizer, "image_processor"):
        raise ArgumentError(f"processing_class is a {type(tokenizer).__name__}: pass a tokenizer, there is text only here")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends = end_token_ids(tokenizer, policy.model.config, getattr(policy.model, "generation_config", None))
    if not ends:
        raise ModelError("neither tokenizer nor model names an end-of-sequence token: set tokenizer.eos_token")
    return replace(policy, tokenizer=tokenizer, end_token_ids=ends)


def _refuse_auxiliary_loss(model: Any, args: GRPOConfig) -> None:
    text_config = model.config.get_text_config()
    adds_a_loss = bool(getattr(text_config, "router_aux_loss_coef", 0.0)) and hasattr(text_config, "output_router_logits")
    if adds_a_loss and args.router_aux_loss_coef is None:
        raise ConfigError(
            "the model is a mixture of experts, for which TRL adds an auxiliary loss that is not here: set "
            "router_aux_loss_coef=0.0 to train without it"
        )
