"""``GRPOConfig`` with TRL's names and defaults. What this project does not do is refused with a remedy, wherever it is set."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import TrainingArguments

from groupwise.config.problems import lower_start
from groupwise.config.section import REGISTERED
from groupwise.distributed.open import join_world, world_size
from groupwise.errors import ConfigError
from groupwise.trl.arguments import ARGUMENTS, REMOVED, RULES, Argument

__all__ = ["MORE_LOSSES", "ArgumentError", "GRPOConfig"]

MORE_LOSSES = {"gmpo": "sequence_mean", "dppo": "token_mean", "reinforce": "token_mean"}
"""groupwise's own losses that TRL lacks, and how each is averaged: as in its paper; reinforce as the user's own are."""
_MORE = {"loss_type": ("loss", MORE_LOSSES), "advantage_type": ("advantage", ())}
"""Arguments that may name a function: what it is, and names that TRL lacks."""
_OF_CLIPS = ("epsilon", "epsilon_high", "delta")

_MODEL_INIT = (
    "dtype", "torch_dtype", "attn_implementation", "revision", "trust_remote_code", "use_cache", "device_map", "quantization_config",
)  # fmt: skip
_OF_GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_FOLLOW = ("generation_batch_size", "steps_per_generation")
"""Each follows from the other where it is not given."""


class ArgumentError(ConfigError, ValueError):
    """A ``ConfigError`` where TRL raises a ``ValueError``: scripts that catch the one catch the other."""


_HELP = {field.name: field.metadata.get("help", "") for field in dataclasses.fields(TrainingArguments)}


def _field(row: Argument) -> tuple[str, Any, Any]:
    text = row.text.replace("%", "%%") or _HELP.get(row.name, "As TRL's documentation says.")  # argparse formats help texts
    if isinstance(row.default, list):
        return row.name, row.type, dataclasses.field(default_factory=list, metadata={"help": text})
    return row.name, row.type, dataclasses.field(default=row.default, metadata={"help": text})


# With __post_init__, so that the __init__ of a subclass that is a dataclass too calls it.
_Fields: Any = dataclasses.make_dataclass(
    "_Fields", [_field(row) for row in ARGUMENTS.values()], namespace={"__post_init__": lambda self: None}
)


class GRPOConfig(_Fields):
    """TRL's ``GRPOConfig`` as far as it is honoured here: ``python -m groupwise.trl`` lists every argument.

    Raises ConfigError for an argument that is not honoured (unless it is at TRL's default), for one that does not exist, and for
    batch sizes that do not divide; for all of them at once. An attribute that is set later is held to the same rules: by itself at
    once, together with the others when the trainer is made. Subclasses may be dataclasses.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> GRPOConfig:
        taken = inspect.signature(cls.__init__).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in taken):
            _check_names(named, {p.name for p in taken})
        return super().__new__(cls)  # type: ignore[no-any-return]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        _check_names(named, {field.name for field in dataclasses.fields(self)})
        super().__init__(*arguments, **named)

    def __post_init__(self) -> None:
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ARGUMENTS:
            value = _plain(ARGUMENTS[name], value)
            if name in (*_FOLLOW, "bf16", "greater_is_better"):
                self.__dict__.setdefault("_given", {})[name] = value
            if self.__dict__.get("_checked") and (problem := _problem_of(name, value)):
                raise _told([problem])
        super().__setattr__(name, value)

    def check(self) -> None:
        """Hold all arguments, together, to the rules; what follows from others is made to follow again."""
        self.__dict__["_checked"] = False
        given = {name: getattr(self, name) for name in ARGUMENTS}
        for name in _FOLLOW:
            given[name] = self.__dict__.get("_given", {}).get(name)
        problems = [problem for name, value in given.items() if (problem := _problem_of(name, value))]
        if problems:
            raise _told(problems)
        for name in ARGUMENTS:  # a subclass may have defaults that no __setattr__ saw
            self.__dict__[name] = _plain(ARGUMENTS[name], getattr(self, name))
        _follow_old_names(self)
        derived = list(_derive_generation(self, given))  # before what goes by it
        if problems := [*_contradictions(self), *derived]:
            raise _told(problems)
        self.__dict__["_checked"] = True

    # What callbacks written for transformers read of its TrainingArguments.

    n_gpu = 1

    @property
    def world_size(self) -> int:
        """Processes that the launcher started."""
        return world_size()

    @property
    def process_index(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def should_save(self) -> bool:
        return self.process_index == 0

    should_log = should_save

    @property
    def device(self) -> Any:
        """Where the trainer puts a model that it loads."""
        from groupwise.models.load import resolve_device

        return resolve_device("cpu" if self.use_cpu else "auto")

    @property
    def train_batch_size(self) -> int:
        return int(self.per_device_train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        return int(self.per_device_eval_batch_size)

    @property
    def restricts_sampling(self) -> bool:
        """Whether completions are drawn from another distribution than the one that is trained."""
        return self.repetition_penalty != 1 or bool(self.min_p) or self.top_p < 1 or self.top_k > 0

    @property
    def moves_within_generation(self) -> bool:
        """Whether a generation is learnt from in more than one optimiser step."""
        return bool(self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations))

    get_process_log_level, main_process_first = TrainingArguments.get_process_log_level, TrainingArguments.main_process_first

    @property
    def distributed_state(self) -> Any:
        """Accelerate's, by which ``main_process_first`` waits: of the processes that the trainer will have."""
        from accelerate import PartialState
        from torch.distributed import is_initialized

        if self.world_size > 1 and not is_initialized():
            join_world(self.device.type == "cpu", self.ddp_timeout)
        return PartialState(cpu=self.device.type == "cpu")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"groupwise.trl's GRPOConfig has no {name!r}: dir(args) lists what it has")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """``warmup_steps``, or the share of the run that it is below 1; without it ``warmup_ratio``."""
        steps = self.warmup_steps or self.warmup_ratio
        return int(steps) if steps >= 1 else math.ceil(num_training_steps * steps)

    def to_dict(self) -> dict[str, Any]:
        """Every argument but the Hub's token."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "hub_token"}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Values as trackers take them: numbers, texts and truths; all else as text."""
        return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in self.to_dict().items()}


def _told(problems: list[str]) -> ArgumentError:
    """One problem is its own sentence; several come together, so that a script is put right once."""
    if len(problems) == 1:
        return ArgumentError(problems[0])
    listed = "".join(f"\n- {problem}" for problem in problems)
    return ArgumentError(f"{len(problems)} arguments of GRPOConfig must change to run with groupwise.trl:{listed}")


def _check_names(named: Mapping[str, Any], known: set[str]) -> None:
    unknown = [name for name in named if name not in known]
    if not unknown:
        return
    others = [(name, _plain(ARGUMENTS[name], value)) for name, value in named.items() if name in ARGUMENTS]
    raise _told([*(_unknown(name) for name in unknown), *(p for name, value in others if (p := _problem_of(name, value)))])


def _unknown(name: str) -> str:
    if name in REMOVED:
        return f"{name} is no argument of GRPOConfig any more, in TRL neither: leave it out, {REMOVED[name]}"
    near = difflib.get_close_matches(name, ARGUMENTS, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "`python -m groupwise.trl` lists every argument"
    return f"GRPOConfig has no argument {name!r}: {hint}"


def _plain(row: Argument, value: Any) -> Any:
    """Enums as their values, JSON as what it says, numbers and truths that a YAML file left as text and whole ones as such."""
    value = getattr(value, "value", value)
    if value is None and row is ARGUMENTS["top_k"]:
        return 0
    if row.kind.startswith("bool"):
        return _TRUTHS.get(str(value).lower(), value)
    if row.kind.startswith("int") and isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        if isinstance(value, str) and row.kind == "dict?":
            return json.loads(value)
        if isinstance(value, str) and row.kind in ("float", "float?"):
            return float(value)
    except ValueError:
        pass  # what it is instead is told by the check
    return value


def _problem_of(name: str, value: Any) -> str | None:
    """What is wrong with one argument by itself."""
    row = ARGUMENTS[name]
    off = value in (None, "", [], {}) or (value is False and row.default in (None, "no"))
    if row.fate == "refused":
        honoured = off or value == row.default
        return None if honoured else f"{name}={value!r} is not honoured by groupwise.trl: {lower_start(row.text)}"
    what, more = _MORE.get(name, ("", ()))
    if what and isinstance(value, str) and (":" in value or value in (*more, *REGISTERED[what])):
        return None
    if row.values:
        if not isinstance(value, list | dict) and value in row.values:
            return None
        shown = ", ".join(map(repr, (*row.values, *more))) + (f", or your own, such as 'my_{what}.py:{what}'" if what else "")
        return f"{name}={value!r} is not honoured by groupwise.trl: use one of {shown}"
    if row.kind in ("int", "float", "int?", "float?"):
        return _wrong_number(name, value, row)
    may_be_none = row.kind == "bool?" or row.fate == "harmless"
    if row.kind.startswith("bool") and not isinstance(value, bool) and not (value is None and may_be_none):
        return f"{name} is {value!r}, which is neither true nor false: give it True or False"
    if row.kind == "dict?" and not off and not isinstance(value, dict):
        return f"{name}={value!r} is no mapping: write it as a dict, or as JSON"
    if name == "model_init_kwargs":
        return _wrong_keys(name, value, _MODEL_INIT, "load the model yourself and pass it to GRPOTrainer as an object")
    if name == "generation_kwargs":
        if not (value or {}).get("do_sample", True):
            return "generation_kwargs has do_sample=False, but completions that are all the same teach nothing: leave it out"
        wrong = _wrong_keys(name, value, ("do_sample", *_OF_GENERATION), "leave it out")
        return wrong or next(
            (p for key, one in (value or {}).items() if key in _OF_GENERATION and (p := _problem_of(key, one))), None
        )
    if row.kind == "floats?" and not off and not (isinstance(value, list | tuple) and all(map(_is_number, value))):
        return f"{name}={value!r} is no list of finite numbers: give one for each function"
    if row.kind == "names?" and not off and not all(isinstance(one, str) for one in _listed(value)):
        return f"{name}={value!r} must be a name or a list of names"
    if name == "metric_for_best_model" and not off and not isinstance(value, str):
        return f"{name}={value!r} must be a metric's name, such as 'eval_reward'"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _wrong_number(name: str, value: Any, row: Argument) -> str | None:
    optional = row.kind.endswith("?") and name not in ("max_completion_length", "num_generations")
    if value is None and (optional or row.fate == "harmless"):
        return None
    if not isinstance(value, int | float) or (row.kind.startswith("int") and isinstance(value, float) and value % 1):
        return f"{name} is {value!r}, which is no {'whole ' if row.kind.startswith('int') else ''}number: give it a number"
    why = ", since a completion is judged against the others of its prompt" if name == "num_generations" else ""
    return None if RULES[row.rule](value) else f"{name} is {value}, but it must be {row.rule}{why}: give it a number that is"


def _wrong_keys(name: str, value: Mapping[str, Any] | None, known: tuple[str, ...], remedy: str) -> str | None:
    for key in value or {}:
        if key not in known:
            return f"{name} has {key!r}, which groupwise.trl does not hand on: {remedy}"
    return None


def _follow_old_names(args: GRPOConfig) -> None:
    own = args.__dict__
    own["output_dir"] = "trainer_output" if args.output_dir is None else os.path.expanduser(args.output_dir)
    own["logging_dir"] = None if args.logging_dir is None else os.path.expanduser(args.logging_dir)
    own["scale_rewards"] = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    said = own.get("_given", {})  # by the script: what these follow may have been set since they were derived
    own["bf16"] = not args.fp16 if said.get("bf16") is None else bool(said["bf16"])
    own["use_cpu"] = args.use_cpu or args.no_cuda
    trackers = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    if "all" in trackers:
        from transformers.integrations import get_available_reporting_integrations

        trackers = get_available_reporting_integrations()
    own["report_to"] = [name for name in trackers if name != "none"]
    own |= {k: v for k, v in (args.generation_kwargs or {}).items() if k in _OF_GENERATION and k != "temperature"}
    if args.metric_for_best_model and said.get("greater_is_better") is None:
        own["greater_is_better"] = not args.metric_for_best_model.endswith("loss")
    if args.eval_strategy != "no":
        own |= {"do_eval": True, "eval_steps": args.eval_steps or args.logging_steps}


def _contradictions(args: GRPOConfig) -> Iterator[str]:
    """What is wrong with arguments beside each other."""
    for name in ("logging", "save", "eval"):
        steps = getattr(args, f"{name}_steps")
        if getattr(args, f"{name}_strategy") == "steps" and not steps > 0:
            yield f"{name}_steps is {steps} with {name}_strategy='steps', but it must be above 0: raise it or set {name}_strategy='no'"
        elif getattr(args, f"{name}_strategy") == "steps" and steps > 1 and steps % 1:
            yield f"{name}_steps is {steps}, but above 1 it counts steps: give a whole number, or a share of the run below 1"
    if (hotter := (args.generation_kwargs or {}).get("temperature", args.temperature)) != args.temperature:
        yield (
            f"generation_kwargs has temperature={hotter}, at which TRL samples but does not score, and temperature is {args.temperature}: "
            "set temperature alone"
        )
    if args.fp16 and args.bf16:
        yield "fp16 and bf16 are both True, but a model computes in one of the two: leave out either"
    if args.use_vllm and args.vllm_mode == "server":
        yield (
            "vllm_mode='server' is not honoured by groupwise.trl: leave it and use_vllm out, groupwise's own engine samples from the "
            "weights that are trained"
        )
    if args.rollout_quantization is not None and args.repetition_penalty != 1:
        yield (
            f"rollout_quantization is {args.rollout_quantization!r}, but with repetition_penalty={args.repetition_penalty} the model's own "
            "module samples, whose weights are as they are: leave out either"
        )
    if args.use_vllm and args.vllm_structured_outputs_regex:
        yield "vllm_structured_outputs_regex is not honoured by groupwise.trl: leave it out, and reward what matches the pattern"
    if args.loss_type == "vespo" and args.importance_sampling_level != "token":
        yield "importance_sampling_level is for ratios, and loss_type='vespo' weighs whole completions by itself: leave it at 'token'"
    if args.loss_type == "reinforce" and args.num_iterations > 1:
        yield f"num_iterations is {args.num_iterations}, but loss_type='reinforce' has no ratio for a second update: set it to 1"
    yield from _inert_beside_own(args)
    if args.sync_ref_model and args.beta == 0:
        yield "sync_ref_model=True, but beta is 0, so there is no reference: set beta or leave sync_ref_model out"
    always_policy = args.sync_ref_model and args.ref_model_sync_steps == args.ref_model_mixup_alpha == 1
    # steps_per_generation is None where batch sizes do not fit, which is told beside this.
    if always_policy and args.steps_per_generation and not args.moves_within_generation:
        yield (
            "ref_model_sync_steps is 1 with ref_model_mixup_alpha 1, and a generation is learnt from in one optimiser step, so "
            "the reference is the policy itself and the KL is always 0: lower ref_model_mixup_alpha, or leave sync_ref_model out"
        )
    delta = args.delta if args.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo") else None  # others do not read it
    if delta is not None and delta <= 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high):
        yield f"delta is {args.delta}, but it must be above the upper clip bound 1 + epsilon_high: raise it"
    generations = args.num_generations_eval or args.num_generations
    if args.eval_strategy != "no" and args.per_device_eval_batch_size * args.world_size % generations:
        yield (
            f"per_device_eval_batch_size{_times_processes(args)} is {args.per_device_eval_batch_size * args.world_size}, which is no "
            f"multiple of the {generations} completions of a prompt in evaluation: set per_device_eval_batch_size or num_generations_eval"
        )


def _inert_beside_own(args: GRPOConfig) -> Iterator[str]:
    """Settings of TRL's losses and advantages beside those that TRL lacks, which would do nothing; and the other way round."""
    own_loss = args.loss_type not in ARGUMENTS["loss_type"].values
    if args.loss_settings and not own_loss:
        yield (
            f"loss_settings is {args.loss_settings}, but the settings of loss_type={args.loss_type!r} are arguments, such as epsilon: "
            "leave loss_settings out"
        )
    if args.advantage_settings and args.advantage_type is None:
        yield f"advantage_settings is {args.advantage_settings}, but there is no advantage_type that takes them: set it"
    in_kl = args.beta > 0 and args.use_bias_correction_kl  # then the KL's ratio is of this level
    of_losses = _OF_CLIPS if in_kl else (*_OF_CLIPS, "importance_sampling_level")
    of_advantages = ("scale_rewards", "multi_objective_aggregation")
    for what, names in (("loss", of_losses if own_loss else ()), ("advantage", of_advantages if args.advantage_type else ())):
        for name in names:
            if getattr(args, name) != ARGUMENTS[name].default:
                yield (
                    f"{name} is {getattr(args, name)!r}, but it does nothing with {what}_type={getattr(args, what + '_type')!r}: leave it "
                    f"out, and set what the {what} takes in {what}_settings"
                )


def _derive_generation(args: GRPOConfig, given: Mapping[str, Any]) -> Iterator[str]:
    """Derive ``generation_batch_size`` from ``steps_per_generation`` or the other way round; by default both follow from the
    accumulation of gradients. Both count over all processes, as in TRL."""
    micro_step, size, steps = args.per_device_train_batch_size * args.world_size, *(given[name] for name in _FOLLOW)
    if size is not None and steps is not None and size != micro_step * steps:
        yield (
            f"generation_batch_size is {size} and steps_per_generation {steps}, but they say the same thing in two ways: set only one"
        )
    elif size is not None and size % micro_step:
        yield (
            f"generation_batch_size is {size}, which is no multiple of per_device_train_batch_size{_times_processes(args)} ({micro_step}): "
            "change either"
        )
    else:
        size = micro_step * (args.gradient_accumulation_steps if steps is None else steps) if size is None else size
        args.__dict__ |= {"generation_batch_size": size, "steps_per_generation": size // micro_step}
        if size % args.num_generations:
            yield (
                f"the generation batch has {size} completions (per_device_train_batch_size{_times_processes(args)} x "
                f"steps_per_generation), which is no multiple of num_generations ({args.num_generations}): groups must be whole, so "
                "change either"
            )


def _times_processes(args: GRPOConfig) -> str:
    return "" if args.world_size == 1 else f" x {args.world_size} processes"
