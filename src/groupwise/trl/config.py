"""``GRPOConfig`` with TRL's names and defaults. What this project does not do is refused when the config is made, with a remedy."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from typing import Any

from groupwise.errors import ConfigError
from groupwise.trl.arguments import ARGUMENTS, Argument

__all__ = ["GRPOConfig"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "optim": ("adamw_torch", "adamw_torch_fused"),
    "logging_strategy": ("no", "steps", "epoch"),
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none"),
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "luspo"),
    "lr_scheduler_type": (
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
    ),
    "router_aux_loss_coef": (None, 0.0),
}  # fmt: skip
_POSITIVE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_iterations",
    "max_completion_length", "temperature", "top_p", "ref_model_sync_steps",
)  # fmt: skip
_MODEL_INIT = ("dtype", "torch_dtype", "attn_implementation", "revision", "trust_remote_code", "use_cache", "device_map")


def _field(row: Argument) -> tuple[str, Any, Any]:
    text = row.text.replace("%", "%%")  # argparse formats help texts
    if isinstance(row.default, list):
        return row.name, row.type, dataclasses.field(default_factory=list, metadata={"help": text})
    return row.name, row.type, dataclasses.field(default=row.default, metadata={"help": text})


_Fields: Any = dataclasses.make_dataclass("_Fields", [_field(row) for row in ARGUMENTS.values()])


class GRPOConfig(_Fields):
    """TRL's ``GRPOConfig`` as far as it is honoured here: ``docs/how-to/coming-from-trl.md`` has every argument.

    Raises ConfigError for an argument that is not honoured (unless it is at TRL's default), for one that does not exist, and for
    batch sizes that do not divide.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        for name in named:
            if name not in ARGUMENTS:
                near = difflib.get_close_matches(name, ARGUMENTS, n=1, cutoff=0.6)
                hint = f"did you mean {near[0]}?" if near else "`python -m groupwise.trl` lists every argument"
                raise ConfigError(f"GRPOConfig has no argument {name!r}: {hint}")
        super().__init__(*arguments, **named)
        for name, row in ARGUMENTS.items():
            value = getattr(self, name)
            value = getattr(value, "value", value)  # transformers' enums are their values
            if isinstance(value, str) and row.kind == "dict?":
                value = json.loads(value)
            setattr(self, name, value)
            off = value in (None, "", [], {}) or (value is False and row.default in (None, "no"))
            if row.fate == "refused" and value != row.default and not off:
                raise ConfigError(f"{name}={value!r} is not honoured by groupwise.trl: {_lower_start(row.text)}")
        _follow_old_names(self)
        _check_values(self)
        _check_model_init(self)
        _derive_generation(self)
        _check_evaluation(self)

    # What callbacks written for transformers read of its TrainingArguments.

    world_size = n_gpu = 1
    process_index = local_process_index = 0
    should_save = should_log = True

    @property
    def train_batch_size(self) -> int:
        return int(self.per_device_train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        return int(self.per_device_eval_batch_size)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """``warmup_steps``, or the share of the run that it is below 1."""
        steps = self.warmup_steps
        return int(steps) if steps >= 1 else math.ceil(num_training_steps * steps)

    def to_dict(self) -> dict[str, Any]:
        """Every argument but the Hub's token."""
        return {name: getattr(self, name) for name in ARGUMENTS if name != "hub_token"}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Values as trackers take them: numbers, texts and truths; all else as text."""
        return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in self.to_dict().items()}


def _lower_start(text: str) -> str:
    return text[0].lower() + text[1:] if text.split(" ")[0][1:].islower() else text


def _follow_old_names(args: Any) -> None:
    args.output_dir = "trainer_output" if args.output_dir is None else str(args.output_dir)
    args.scale_rewards = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    args.bf16 = True if args.bf16 is None else bool(args.bf16)
    args.use_cpu = args.use_cpu or args.no_cuda
    if args.warmup_ratio and not args.warmup_steps:
        args.warmup_steps = args.warmup_ratio
    if isinstance(args.report_to, str) or args.report_to is None:
        args.report_to = [] if args.report_to in (None, "none") else [args.report_to]


def _check_values(args: Any) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(args, name)
        if value not in choices:
            shown = ", ".join(repr(choice) for choice in choices)
            raise ConfigError(f"{name}={value!r} is not honoured by groupwise.trl: use one of {shown}")
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is None or not value > 0:
            raise ConfigError(f"{name} is {value}, but it must be above 0: give it a number")
    if args.num_generations is None or args.num_generations < 2:
        raise ConfigError(
            f"num_generations is {args.num_generations}, but a completion is judged against the others of its prompt: "
            "set it to 2 or more"
        )
    if args.loss_type == "cispo" and (args.epsilon_high is None or args.epsilon_high <= 1):
        raise ConfigError(
            f"epsilon_high is {args.epsilon_high}, but with loss_type='cispo' it is the largest weight of a token and TRL "
            f"would scale everything down to it: set epsilon_high=5.0, as ScaleRL has it"
        )
    if not 0 <= args.top_entropy_quantile <= 1:
        raise ConfigError(
            f"top_entropy_quantile is {args.top_entropy_quantile}, but it is the share of tokens that are learnt from: give 0 to 1"
        )
    if args.sync_ref_model and not 0 < args.ref_model_mixup_alpha <= 1:
        raise ConfigError(
            f"ref_model_mixup_alpha is {args.ref_model_mixup_alpha}, but it is the policy's share in the new reference: give more than "
            "0 and at most 1, or leave sync_ref_model out"
        )
    if args.sync_ref_model and args.beta == 0:
        raise ConfigError("sync_ref_model=True, but beta is 0, so there is no reference: set beta or leave sync_ref_model out")
    if args.delta is not None and args.delta <= 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high):
        raise ConfigError(f"delta is {args.delta}, but it must be above the upper clip bound 1 + epsilon_high: raise it")


def _check_model_init(args: Any) -> None:
    for name in args.model_init_kwargs or {}:
        if name not in _MODEL_INIT:
            raise ConfigError(
                f"model_init_kwargs has {name!r}, which groupwise.trl does not hand on: load the model yourself and pass it "
                "to GRPOTrainer as an object"
            )


def _derive_generation(args: Any) -> None:
    """Of ``generation_batch_size`` and ``steps_per_generation`` one follows from the other; by default both follow from the
    accumulation of gradients."""
    sweep, size, steps = args.per_device_train_batch_size, args.generation_batch_size, args.steps_per_generation
    if size is not None and steps is not None and size != sweep * steps:
        raise ConfigError(
            f"generation_batch_size is {size} and steps_per_generation {steps}, but they say the same thing in two ways: "
            "set only one"
        )
    if size is None:
        args.steps_per_generation = steps = args.gradient_accumulation_steps if steps is None else steps
        args.generation_batch_size = size = sweep * steps
    elif size % sweep:
        raise ConfigError(
            f"generation_batch_size is {size}, which is no multiple of per_device_train_batch_size ({sweep}): change either"
        )
    args.steps_per_generation = size // sweep
    if size % args.num_generations:
        raise ConfigError(
            f"the generation batch has {size} completions (per_device_train_batch_size x steps_per_generation), which is no "
            f"multiple of num_generations ({args.num_generations}): groups must be whole, so change either"
        )


def _check_evaluation(args: Any) -> None:
    if args.eval_strategy == "no":
        return
    if not args.eval_steps:
        args.eval_steps = args.logging_steps
    generations = args.num_generations_eval or args.num_generations
    if args.per_device_eval_batch_size % generations:
        raise ConfigError(
            f"per_device_eval_batch_size is {args.per_device_eval_batch_size}, which is no multiple of the {generations} "
            "completions of a prompt in evaluation: set per_device_eval_batch_size or num_generations_eval"
        )
