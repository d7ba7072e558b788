"""What a script hands over (arguments, a model, an optimiser) as the config, the policy, the sampler and the optimiser of the core."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoModelForCausalLM, set_seed

from groupwise.algorithm import KL, Advantage, LossInputs, LossOutputs, Objective
from groupwise.algorithm.advantages import gdpo_advantage, group_advantage
from groupwise.algorithm.losses import Loss, cispo_loss, clip_loss, sapo_loss, vespo_loss
from groupwise.algorithm.registry import find_advantage, find_loss, needs_of
from groupwise.config.objective import ADVANTAGE_TYPES, LOSS_TYPES
from groupwise.config.schema import Config, LoraConfig, ModelConfig, OptimizerConfig
from groupwise.config.section import Section
from groupwise.distributed import Sharding, World, world_size
from groupwise.distributed.sharding import chosen_sharding
from groupwise.engines import Engine, check_quantization, make_engine
from groupwise.engines.builtin.fast_paths import check_fast_paths, take
from groupwise.engines.wrappers import DealtEngine
from groupwise.episodes import playing
from groupwise.errors import ConfigError, ModelError
from groupwise.models.adapters import NOT_TRAINABLE, KeepsAdapter, attach, base_module, has_injected_adapter, is_adapted
from groupwise.models.decoder import Decoder
from groupwise.models.devices import has_device_map, with_dtype
from groupwise.models.folder import stored_quantisation
from groupwise.models.load import (
    Policy,
    attention_for,
    check_model,
    context_length,
    end_token_ids,
    generation_config,
    load_model_config,
    load_policy,
    load_tokenizer,
    resolve_device,
)
from groupwise.models.module_scorer import ModuleScorer, of_text
from groupwise.models.quantised import multiply_dequantised, quantised_layers
from groupwise.models.scorer import Scorer, attention_note, make_scorer
from groupwise.training.optimizer import MasterAdamW
from groupwise.training.sharding import Replicas, check_sharding, loading_device, make_sharding, with_whole_weights
from groupwise.training.sharding.divided import tie_as_first
from groupwise.trl.config import MORE_LOSSES, ArgumentError, GRPOConfig
from groupwise.trl.episodes import ScriptEpisodes

__all__ = [
    "GivenOptimizer", "check_division", "check_frozen", "check_launch", "correction", "make_parts", "make_policy", "make_scheduler",
    "model_config", "objective", "seed_everything", "to_config",
]  # fmt: skip

T = TypeVar("T")
log = logging.getLogger(__name__)


def to_config(args: GRPOConfig, model: ModelConfig, correction: Mapping[str, Any] | None = None) -> Config:
    """The config of the learner and the engine. Data, rewards and evaluation are the trainer's own, as in TRL; so is ``objective``."""
    kl = {"beta": args.beta, "skip_zero_variance": False}
    if args.sync_ref_model:
        kl |= {"reference_every": args.ref_model_sync_steps, "reference_mixing": args.ref_model_mixup_alpha}
    rollout = {
        "prompts_per_step": args.generation_batch_size // args.num_generations,
        "completions_per_prompt": args.num_generations,
        "max_completion_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k if args.top_k > 0 else None,
        "engine": "auto" if args.repetition_penalty == 1 else "transformers",
        "quantization": args.rollout_quantization or "none",
    }
    optimizer = {
        "learning_rate": args.learning_rate or 1e-6,  # the schedule has the rate that counts, 0 included
        "betas": (args.adam_beta1, args.adam_beta2),
        "epsilon": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "decay": "matrices",
        "max_grad_norm": args.max_grad_norm or None,
        "precision": "masters-8bit" if "8bit" in args.optim else "masters",
    }
    updates = max(args.num_iterations, 1 + args.moves_within_generation)
    algorithm = {"updates_per_batch": updates, "kl": kl if args.beta else None, "correction": correction}
    sections = {"rollout": rollout, "algorithm": algorithm, "optimizer": optimizer, "training": {"seed": args.seed}}
    return Config.model_validate({"model": model, **sections})


def correction(args: GRPOConfig, own_rollout: bool = False) -> dict[str, Any] | None:
    """What TRL corrects with vLLM, as ``algorithm.correction``, where what samples differs from what is trained: restricted, or by a
    ``rollout_func`` (``own_rollout``); and where its weights are rounded. None elsewhere, where the factor is 1.

    Raises ArgumentError for bounds that are not honoured.
    """
    rounded = args.rollout_quantization is not None
    differs = rounded or (args.use_vllm and (args.restricts_sampling or own_rollout))
    if not (differs and args.vllm_importance_sampling_correction):
        return None
    former, cap = args.vllm_importance_sampling_cap, args.vllm_importance_sampling_clip_max
    cap, least = cap if former is None else former, args.vllm_importance_sampling_clip_min
    named = {"clip_max": cap, "clip_min": least, "mode": args.vllm_importance_sampling_mode}
    for name, bad, remedy in (
        ("clip_max", cap is None or cap < 1, "set it to 1 or more"),
        ("clip_min", least is not None and cap is not None and least >= cap, "set it below clip_max"),
        ("mode", args.loss_type == "vespo", "take another loss_type than 'vespo'"),
    ):
        if bad:
            raise ArgumentError(
                f"vllm_importance_sampling_{name}={named[name]!r} is not honoured by groupwise.trl where sampling is restricted, a "
                f"rollout_func samples, or weights are rounded: {remedy}, or set vllm_importance_sampling_correction=False"
            )
    level, mode = args.vllm_importance_sampling_mode.split("_")
    return {"level": level, "mode": mode, "cap": cap}


def objective(args: GRPOConfig, own_rollout: bool = False) -> Objective:
    """What the arguments ask to be optimised. A loss of the user's is averaged over tokens, as ``dapo`` is; counts are in ``steps.py``.
    ``own_rollout``: a ``rollout_func`` samples.

    Raises ArgumentError for a function that cannot be loaded, and for settings that it does not take.

    A sequence-level ratio has its true gradient, which runs into all tokens of a completion, those outside of
    ``top_entropy_quantile`` included. TRL's cispo bounds the weight itself, by ``epsilon_high``, and only from above.
    """
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    ratio = {"token": "token", "sequence": "whole_sequence", "sequence_token": "sequence"}[args.importance_sampling_level]
    clip = partial(_clip, epsilon=args.epsilon, epsilon_high=high, dual_clip=args.delta, ratio=ratio)
    sapo = partial(sapo_loss, tau_positive=args.sapo_temperature_pos, tau_negative=args.sapo_temperature_neg, ratio=ratio)
    vespo = partial(
        vespo_loss, k_positive=args.vespo_k_pos, lambda_positive=args.vespo_lambda_pos, k_negative=args.vespo_k_neg,
        lambda_negative=args.vespo_lambda_neg,
    )  # fmt: skip
    losses: dict[str, tuple[str, Loss]] = {
        "grpo": ("sequence_mean", clip),
        "bnpo": ("token_mean", clip),
        "dapo": ("token_mean", clip),
        "dr_grpo": ("fixed", clip),
        "luspo": ("sequence_sum", clip),
        "cispo": ("token_mean", partial(_cispo, high=high - 1, ratio=ratio)),
        "sapo": ("sequence_mean", sapo),
        "vespo": ("token_mean", vespo),
    }
    aggregation, loss = losses.get(args.loss_type) or (
        MORE_LOSSES.get(args.loss_type, "token_mean"),
        _found("loss", args.loss_type, args.loss_settings, LOSS_TYPES, find_loss),
    )
    scale = {"group": "group_std", "batch": "batch_std", "none": "none"}[str(args.scale_rewards)]
    by_function = args.multi_objective_aggregation == "normalize_then_sum"
    advantage: Advantage = gdpo_advantage if by_function else partial(group_advantage, scale=scale)
    if args.advantage_type is not None:
        advantage = _found("advantage", args.advantage_type, args.advantage_settings, ADVANTAGE_TYPES, find_advantage)
        if "values" in needs_of(advantage):
            raise ArgumentError(
                f"advantage_type={args.advantage_type!r} needs values, but groupwise.trl learns none: use one that goes by rewards alone, "
                "or groupwise.train with algorithm.value"
            )
    kl = KL(args.beta, importance=ratio if args.use_bias_correction_kl else None) if args.beta else None
    others = args.use_vllm or own_rollout or args.rollout_quantization is not None  # sample, not the policy itself
    floor = args.vllm_importance_sampling_clip_min
    return Objective(advantage, loss, aggregation, kl, args.off_policy_mask_threshold, others, floor)


def _found(
    what: str, name: str, given: Mapping[str, Any] | None, types: Mapping[str, type[Section]], find: Callable[[str, dict[str, Any]], T]
) -> T:  # fmt: skip
    """The loss or advantage of this name or place, its settings held to what a config holds them to."""
    settings = dict(given or {})
    try:
        if reserved := sorted(settings.keys() & {"type", "aggregation"}):
            raise ConfigError(f"{', '.join(reserved)} follows from {what}_type: leave it out")
        if name in types:
            settings = types[name](**settings).model_dump(exclude={"type", "aggregation"})
        return find(name, settings)
    except ConfigError as error:
        raise ArgumentError(f"{what}_type={name!r} cannot be used with {what}_settings={given}: {error}") from error


def _clip(inputs: LossInputs, **settings: Any) -> LossOutputs:
    """``clip_loss``, whose clipped tokens are counted as TRL does: without those that ``delta`` caps."""
    found = clip_loss(inputs, **settings)
    assert found.clipped_T is not None
    assert found.ratio_T is not None
    return replace(found, clipped_T=found.clipped_T & ((inputs.advantages_T > 0) | (found.ratio_T < 1)))


def _cispo(inputs: LossInputs, *, high: float, ratio: str) -> LossOutputs:
    """``cispo_loss``, whose clipped tokens are counted as TRL does: those with a positive advantage alone."""
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
        dtype="bfloat16" if wanted == "bfloat16" else "float16" if args.fp16 else "auto" if args.bf16 else wanted,  # type: ignore[arg-type]
        attention=given.get("attn_implementation") or "auto",
        gradient_checkpointing=args.gradient_checkpointing,
        device="cpu" if args.use_cpu else "auto",
        trust_remote_code=bool(given.get("trust_remote_code", args.trust_remote_code)),
    )


def _as_stored(config: ModelConfig, args: GRPOConfig) -> ModelConfig:
    """``dtype="auto"`` without ``bf16`` is bfloat16 where the model's file is, else float32, not what is best on this device."""
    if config.dtype != "auto" or args.bf16:
        return config
    stored = getattr(load_model_config(config), "dtype", None)
    return config.model_copy(update={"dtype": "bfloat16" if stored in (torch.bfloat16, "bfloat16") else "float32"})


class GivenOptimizer(MasterAdamW):
    """A script's own optimiser, over the model's own parameters. Gradients are clipped as elsewhere; its schedule sets its rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: Iterable[Tensor], config: OptimizerConfig) -> None:
        """``model``: all its parameters. Those that the optimiser does not hold are frozen."""
        self._given = optimizer
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        known = set()
        for parameter in model:
            known.add(id(parameter))
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in held)
        if not held.keys() & known:
            raise ConfigError("the optimiser in optimizers= holds none of the model's parameters: make it of model.parameters()")
        # Whether and how to scale a loss is the script's choice.
        super().__init__([("", p) for p in held.values()], config.model_copy(update={"precision": "pure"}), half=False)

    def _make_adamw(self) -> torch.optim.Optimizer:
        return self._given

    def _update(self, gradients: dict[Tensor, Tensor], learning_rate: float | None) -> None:
        self.adamw.step()

    def state(self) -> dict[str, Tensor]:
        """What the optimiser keeps, ``index.key`` -> tensor. Its groups may keep what changes too, such as a step size that it finds:
        ``group.index.key``. The name of what is a number, and no tensor, begins with ``number.``; what is neither is left out."""
        whole, found = self.adamw.state_dict(), dict[str, Tensor]()
        for kind, kept in (("", whole["state"].items()), ("group.", enumerate(whole["param_groups"]))):
            for index, values in kept:
                for key, value in values.items():
                    if isinstance(value, Tensor):
                        found[f"{kind}{index}.{key}"] = value.clone()
                    elif isinstance(value, int | float):
                        exact = torch.float64 if isinstance(value, float) else None
                        found[f"number.{kind}{index}.{key}"] = torch.tensor(value, dtype=exact)
        return found

    def check_kept(self) -> None:
        """Raise ConfigError where the optimiser keeps what a checkpoint does not hold. Most keep nothing before their first step."""
        for values in self.adamw.state_dict()["state"].values():
            for key, value in values.items():
                if not isinstance(value, Tensor | int | float | None):
                    raise ConfigError(
                        f"the {type(self.adamw).__name__} in optimizers= keeps {key!r}, a {type(value).__name__}, but a checkpoint holds "
                        "tensors and numbers: set save_only_model=True or save_strategy='no', or take another optimiser"
                    )

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave; learning rates are the scheduler's to set."""
        groups = self.adamw.state_dict()["param_groups"]
        of_group, of_parameter = dict(enumerate(groups)), defaultdict[int, dict[str, Any]](dict)
        for name, tensor in state.items():
            value = tensor.item() if name.startswith("number.") else tensor
            place = name.removeprefix("number.")
            index, _, key = place.removeprefix("group.").partition(".")
            (of_group if place.startswith("group.") else of_parameter)[int(index)][key] = value
        self.adamw.load_state_dict({"state": dict(of_parameter), "param_groups": groups})


def make_scheduler(args: GRPOConfig, optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
    """transformers' schedule of the name in ``lr_scheduler_type``."""
    from transformers import get_scheduler

    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(updates),
            num_training_steps=updates,
            scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_type={args.lr_scheduler_type!r} with these arguments cannot be made: {error}") from error


class ModelArgumentError(ModelError, ValueError):
    """A ``ModelError`` where TRL raises a ``ValueError``."""


def seed_everything(args: GRPOConfig, rank: int) -> None:
    """Seed random numbers, each process's own as in TRL, and set what else of ``args`` makes a run repeatable or not."""
    if args.full_determinism:
        from transformers import enable_full_determinism

        enable_full_determinism(args.seed + rank)
    else:
        set_seed(args.seed + rank)
    if args.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = args.tf32


def check_launch(args: GRPOConfig, processes: int) -> str:
    """How the launcher's configuration divides the weights: ``none``, ``fsdp2``, ``zero2`` or ``zero3``.

    Raises ConfigError for what is not honoured of it.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in ("bf16", "fp16") and getattr(args, precision):
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # what it asks for is done, and is not asked for again
    elif precision not in ("no", ""):
        raise ArgumentError(
            f"the configuration of accelerate launch sets mixed_precision to {precision}, and bf16 is {args.bf16}: set it to no, since "
            "bf16 and fp16 of GRPOConfig say what is computed in"
        )
    return chosen_sharding("auto", processes)


def check_division(args: GRPOConfig, model: ModelConfig, peft_config: Any, processes: int) -> Config:
    """The run's config, for what reads the weights. Raises ConfigError where the processes cannot divide the model as the launcher asks."""
    if peft_config is not None:
        model = model.model_copy(update={"lora": LoraConfig(dropout=getattr(peft_config, "lora_dropout", 0.0))})
    hf_config = load_model_config(model)
    model = model.model_copy(update={"quantization": stored_quantisation(hf_config.to_dict())})
    config = to_config(args, model)
    with _in_trl_s_words():
        check_sharding(config, hf_config, processes)
    return config


_WORDS = (
    ("rollout.quantization is 8bit", "rollout_quantization is '8bit'"),
    ("Set it to none", "Leave it out"),
    ("Set model.dtype=float32, or rollout.quantization to none", "Load the model in float32 (bf16=False), or leave it out"),
    ("training.sharding is ", "the launcher's configuration is "),
    ("rollout.engine=transformers: use auto or builtin", "repetition_penalty: leave it out"),
    ("optimizer.precision=masters-8bit", "the 8-bit moments of optim"),
    ("DeepSpeed steps on fp32 masters, divided among the processes: use masters", "use optim='adamw_torch'"),
    ("use masters, which are divided", "use optim='adamw_torch'"),
    ("model.lora.dropout", "peft_config's lora_dropout"),
    ("model.lora:", "peft_config:"),
    ("model.quantization=", "weights stored in "),
    ("model.dtype: leave the quantisation out", "the numbers that it computes in: name the model that is not quantised"),
    ("model.dtype=float16: use bfloat16", "fp16=True: use bf16=True"),
    ("training.sharding=none", "a launch that divides no weights"),
    ("training.sharding=", ""),
)
"""What the core's sentences call settings, and what they are here."""


@contextmanager
def _in_trl_s_words() -> Iterator[None]:
    """What cannot be sampled with rounded weights, or divided, is told by the names that arguments have here."""
    try:
        yield
    except ConfigError as error:
        said = str(error)
        for own, theirs in _WORDS:
            said = said.replace(own, theirs)
        raise ArgumentError(said) from error


def make_policy(
    model: Any, args: GRPOConfig, tokenizer: Any, peft_config: Any, quantization_config: Any = None,
    load: Callable[[ModelConfig], Policy] = load_policy,
) -> tuple[Policy, ModelConfig]:  # fmt: skip
    """The policy, and the model's part of a config. ``tokenizer`` None takes the model's own. ``load`` reads a model by its name.

    ``quantization_config`` (or that of ``model_init_kwargs``) is of a model that is given by its name, with an adapter: QLoRA.

    Raises ModelError or ConfigError for a model that cannot be trained here.
    """
    if args.sync_ref_model and (peft_config is not None or is_adapted(model)):
        raise ArgumentError(
            "sync_ref_model=True, but with an adapter the reference is the model without it, or the adapter as it came, which "
            "cannot follow: leave sync_ref_model out, or train all weights"
        )
    within = (args.model_init_kwargs or {}).get("quantization_config")
    how = within if quantization_config is None else quantization_config
    if not isinstance(model, str):
        if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
            raise ModelError(
                f"model is a {type(model).__name__}: pass a name, a folder or a causal language model of transformers"
            )
        config = model_config(args, str(getattr(model.config, "_name_or_path", "") or type(model).__name__))
        policy = _adopt(model, args, config, tokenizer, peft_config is not None)
    elif how is not None:
        if quantization_config is not None and within is not None:
            raise ArgumentError("quantization_config is in model_init_kwargs too: set it in one place")
        config = _as_stored(model_config(args, model), args)
        policy = _adopt(_load_quantised(config, how), args, config, tokenizer, peft_config is not None)
    else:
        config = model_config(args, model)
        try:
            config = _as_stored(config, args)
            with _in_trl_s_words():  # before the weights are read
                check_quantization(to_config(args, config), load_model_config(config))
            policy = load(config)
            _is_quantised(policy.model, peft_config is not None)
        except ModelError as error:
            if "Python code of its own" not in str(error):
                raise
            raise ModelArgumentError(
                f"model {model!r} brings custom code, which trust_remote_code=True in GRPOConfig lets run: set it if you trust its source"
            ) from error
        _put_back_sampling(policy, config)
    if tokenizer is not None:
        policy = _with_tokenizer(policy, tokenizer)
    _refuse_auxiliary_loss(policy.model, args)
    if peft_config is not None:
        revision = config.revision if isinstance(model, str) else None
        policy = replace(policy, model=attach(policy.model, peft_config, args.seed, revision).eval())
    if args.disable_dropout and is_adapted(policy.model):
        for name, module in policy.model.named_modules():
            if "lora_dropout" in name and isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return policy, config


def check_frozen(model: Any, given: torch.optim.Optimizer | None) -> None:
    """Raise ArgumentError where a script has frozen part of what would be trained of its ``model``: what text is computed with, and its own
    optimiser ``given`` holds, if there is one.

    A trainer before this one, which took over all weights, has frozen all of them. Some classes freeze parameters of their own.
    """
    held = of_text(model)
    if given is not None:
        held &= {p for group in given.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p in held}
    frozen = [name for name, p in trained.items() if not p.requires_grad]
    if not frozen or len(frozen) == len(trained):
        return
    with torch.device("meta"):
        of_class = {name for name, p in type(model)(model.config).named_parameters() if not p.requires_grad}
    if frozen := [name for name in frozen if name not in of_class]:
        raise ArgumentError(
            f"{len(frozen)} of the parameters that would be trained are frozen (requires_grad=False), such as {frozen[0]}: pass "
            "optimizers=(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate), None), or call "
            "model.requires_grad_(True) to train all"
        )


def make_parts(
    policy: Policy, config: Config, world: World, own_optimizer: bool, needs_reference: bool, episodes: ScriptEpisodes | None,
    came_adapted: bool = False,
) -> tuple[Scorer, Sharding, Engine]:  # fmt: skip
    """What learns, how its weights are divided, and what samples. A script's own optimiser holds the module's parameters, so the module is
    what learns; the sampler works on the same memory either way. ``came_adapted``: the script's model had its adapter already."""
    aside = loading_device(config, world)
    where = (policy.model.config, policy.model.dtype, resolve_device(config.model.device) if aside else policy.model.device)
    choices = world.on_rank0(lambda: check_fast_paths(*where))
    take(*where, choices)
    in_order = episodes is not None and episodes.environments is not None  # each process scores what its environments played
    if own_optimizer and not is_adapted(policy.model):
        with _in_trl_s_words():
            engine = playing(make_engine(policy, config.rollout), episodes)
        scorer: Scorer = ModuleScorer(policy.model)
        return scorer, Replicas(scorer, world), DealtEngine(engine, world, in_order)
    for notice in filter(None, (choice.notice for choice in choices)) if world.is_first else ():
        log.warning(notice)
    # Low-rank factors show whether they were trained. Another kind may have been.
    trained = [bool(p.abs().sum() > 0) for n, p in policy.model.named_parameters() if "lora_B" in n]
    given = any(trained) if trained else came_adapted
    if aside is not None and not is_adapted(policy.model):
        tie_as_first(policy.model, world)
    scorer = make_scorer(policy, config.model, resolve_device(config.model.device) if aside else None)
    if is_adapted(policy.model) and not scorer.named_parameters():
        raise ModelError(NOT_TRAINABLE)
    if isinstance(scorer, Decoder) and (note := attention_note(config.model.attention, policy.model.config.model_type)):
        log.warning(note)
    if given and needs_reference and isinstance(scorer, KeepsAdapter):
        scorer.keep_present_adapter()
    sharding = make_sharding(config, world, scorer)
    with _in_trl_s_words():
        engine = playing(make_engine(policy, config.rollout, scorer, world, sharding.whole_policy), episodes)
    return scorer, sharding, DealtEngine(with_whole_weights(engine, sharding), world, in_order)


def _load_quantised(config: ModelConfig, how: Any) -> Any:
    """Load the model by transformers, as ``how`` (a BitsAndBytesConfig) says."""
    check_model(config)
    config = with_dtype(config)
    try:
        return AutoModelForCausalLM.from_pretrained(
            config.name, revision=config.revision, trust_remote_code=config.trust_remote_code, quantization_config=how,
            dtype=getattr(torch, config.dtype), device_map={"": str(device := resolve_device(config.device))},
            attn_implementation=attention_for(config, device, load_model_config(config)),
        )  # fmt: skip
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        raise ModelError(f"{config.name} cannot be loaded with this quantization_config: {error}") from error


def _put_back_sampling(policy: Policy, config: ModelConfig) -> None:
    """The settings with which the model's folder has it sampled, for whoever uses it after training; the engine never reads them."""
    original, present = generation_config(config), getattr(policy.model, "generation_config", None)
    if original is None or present is None:
        return
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(original, name, getattr(present, name))
    try:
        original.validate(strict=True)
    except ValueError:  # such settings could not be saved
        return
    policy.model.generation_config = original


def _adopt(model: Any, args: GRPOConfig, config: ModelConfig, tokenizer: Any, adapted: bool) -> Policy:
    if has_device_map(base_module(model)):
        raise ModelError(
            "the model lies on several devices (device_map), where it cannot learn: load it without device_map, or pass its name and "
            "start the script by accelerate launch --config_file launch/fsdp2-8gpu.yaml"
        )
    if has_injected_adapter(model):
        raise ModelError(
            "the model has an adapter that transformers put into it (add_adapter, or adapter_config.json beside its files), and would be "
            "trained without it: load it without one and pass peft_config, or pass a peft.PeftModel"
        )
    if model.dtype not in (torch.float32, torch.bfloat16, *([torch.float16] if args.fp16 else [])):
        raise ModelError(f"the model's weights are {model.dtype}: load it in float32 or bfloat16, or in float16 with fp16=True")
    quantised = _is_quantised(model, adapted)
    wanted = getattr(torch, with_dtype(config).dtype)
    if quantised and wanted != torch.float32 and getattr(base_module(model).config, "dtype", None) != torch.float32:
        _narrow(model, wanted)
    if args.bf16 and model.dtype == torch.float32 and wanted == torch.bfloat16:
        whole = "weights outside of the quantised layers" if quantised else "weights"
        log.warning(
            f"the model's {whole} are float32, so it computes in float32: bf16=True is for a model that is given by its name. Give its "
            "name, or load it in bfloat16, to compute in bfloat16 with float32 masters"
        )
    multiply_dequantised(model)
    if not quantised and model.device.type == "cpu" and not args.use_cpu:
        model.to(resolve_device("auto"))
    if model.device.type == "cuda" and world_size() == 1:
        torch.cuda.set_device(model.device)  # as where a model is loaded
    if args.gradient_checkpointing:
        base_module(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokenizer = tokenizer or load_tokenizer(config)
    ends = end_token_ids(tokenizer, model.config, getattr(model, "generation_config", None))
    adopted: Any = model.eval()
    return Policy(adopted, tokenizer, ends, context_length(model.config, tokenizer), config.name)


def _is_quantised(model: Any, adapted: bool) -> bool:
    """Whether the model is quantised. ``adapted``: an adapter will go on it. Raises ModelError where it could not be trained."""
    quantised = bool(getattr(base_module(model), "is_quantized", False))
    if quantised and not (quantised_layers(model) and (is_adapted(model) or adapted)):
        raise ModelError(
            "the model is quantised, and only an adapter on a base that bitsandbytes quantised can be trained: pass peft_config with such "
            "a model, or load it in bfloat16"
        )
    return quantised


def _narrow(model: Any, dtype: torch.dtype) -> None:
    """Put the frozen fp32 weights of a quantised base into ``dtype``, in which it computes. peft's prepare_model_for_kbit_training makes
    them fp32 for autocast, which is not used here, and all layers would be dequantised in the embedding's dtype. Where more than low-rank
    factors is trained beside them they stay as they are, since a product takes one dtype."""
    parameters = list(model.named_parameters())
    if any(p.requires_grad and "lora_" not in name for name, p in parameters):
        return
    for name, parameter in parameters:
        if parameter.dtype == torch.float32 and "lora_" not in name:
            parameter.data = parameter.data.to(dtype)


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
