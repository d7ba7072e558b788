"""What the trainer gives out beside training: logs, files, callbacks, words of warning, and a clear no for what it does not have."""

from __future__ import annotations

import functools
import json
import logging
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_pt_utils import log_metrics, save_metrics, save_state
from transformers.trainer_utils import TrainOutput

from groupwise.distributed import World, together
from groupwise.errors import ConfigError
from groupwise.models.adapters import KeepsAdapter
from groupwise.models.load import Policy
from groupwise.tracking.console import own_width
from groupwise.training.learner import Learner
from groupwise.trl import checkpoint as checkpoints
from groupwise.trl.arguments import ARGUMENTS
from groupwise.trl.config import ArgumentError, GRPOConfig
from groupwise.trl.episodes import ScriptEpisodes
from groupwise.trl.generation import Generation
from groupwise.trl.rewards import RewardFunctions
from groupwise.trl.steps import EntropyControl, epoch_order

__all__ = ["Callback", "CompletionLog", "Outputs", "callback_handler", "drain", "for_all", "summary_in", "words_about"]

P = ParamSpec("P")
T = TypeVar("T")
Callback = TrainerCallback | type[TrainerCallback]
logger = logging.getLogger("groupwise")


def callback_handler(args: GRPOConfig, callbacks: Sequence[Callback] | None) -> CallbackHandler:
    """transformers' defaults, trackers that ``report_to`` names, the script's own, and a progress bar or printed logs. The model and
    its optimiser are put in when they are there."""
    from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

    display = PrinterCallback if args.disable_tqdm else ProgressCallback
    try:
        trackers = get_reporting_integration_callbacks(args.report_to)
        chosen = [DefaultFlowCallback, *trackers, *(callbacks or []), display]
        handler = CallbackHandler(chosen, None, None, None, None)
    except (ValueError, RuntimeError) as error:  # an unknown tracker, or one whose package is not installed
        raise ArgumentError(f"report_to={args.report_to!r}: {error}") from error
    for callback in handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and getattr(callback, "logging_dir", "") is None:
            callback.logging_dir = args.logging_dir  # transformers 4 asks args
    _refuse_uploads(handler)
    return handler


def _refuse_uploads(handler: CallbackHandler) -> None:
    """Raise ArgumentError for a tracker that would end a run by an AttributeError: it makes transformers' own trainer to save the model."""
    from transformers.integrations import DVCLiveCallback, WandbCallback

    for callback in handler.callbacks:
        wanted = getattr(callback, "_log_model", None) if isinstance(callback, DVCLiveCallback | WandbCallback) else None
        if getattr(wanted, "is_enabled", wanted is True):
            raise ArgumentError(
                f"{type(callback).__name__} is to log the model, for which it makes transformers' own trainer: unset WANDB_LOG_MODEL and "
                "HF_DVCLIVE_LOG_MODEL, leave out log_model=True, and log the folder of save_model() after train()"
            )


def words_about(
    args: GRPOConfig, model: str | torch.nn.Module, quantization_config: object, corrected: bool = False
) -> Iterator[str]:
    """What a script should know of how its arguments are taken. ``corrected``: whether sampled completions are weighted."""
    for row in ARGUMENTS.values():
        if row.warns and getattr(args, row.name) != row.default:
            yield f"{row.name}={getattr(args, row.name)!r}: {row.text}"
    if args.optim.startswith("paged"):
        yield f"optim={args.optim!r}: the optimiser's state is not paged; its numbers are the same"
    mode = args.vllm_importance_sampling_mode
    if args.restricts_sampling:
        weighted = (
            f"{'with use_vllm ' if args.use_vllm else ''}each one's loss is multiplied by the ratio of the two "
            f"(vllm_importance_sampling_mode={mode!r})"
            f"{', which is near 0 for long completions' if mode.startswith('sequence') else ''}"
        )
        yield (
            "repetition_penalty, min_p, top_p and top_k change what is sampled and not the log-probabilities that are trained, as in "
            "TRL: " + (weighted if corrected else "the policy is taught by samples of another distribution than its own")
        )
    if args.rollout_quantization is not None and corrected and mode.startswith("sequence"):
        yield (
            f"rollout_quantization={args.rollout_quantization!r} with vllm_importance_sampling_mode={mode!r}: a completion's weight is the "
            "product of its tokens', which is far from 1 for long ones: 'token_truncate' weighs each token by itself"
        )
    if args.loss_type == "cispo" and (args.epsilon if args.epsilon_high is None else args.epsilon_high) <= 1:
        yield (
            "loss_type='cispo' holds every token's weight at or below epsilon_high (by default epsilon), here at 1 or below, where it "
            "only scales the loss: 5.0 is usual"
        )
    if args.importance_sampling_level != "token" and args.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
        yield (
            f"importance_sampling_level={args.importance_sampling_level!r} with loss_type={args.loss_type!r}, which adds up tokens: it "
            "weights each sequence by its completion length, where GSPO weighs all alike: loss_type='grpo' is GSPO's"
        )
    if args.loss_type == "luspo" and args.importance_sampling_level == "token":
        yield "loss_type='luspo' is meant for importance_sampling_level='sequence'"
    if not isinstance(model, str) and (args.model_init_kwargs or quantization_config is not None):
        yield "model_init_kwargs and quantization_config are for models that are given by their names: the policy is loaded already"


_WITHOUT: Mapping[str, Callable[[GRPOConfig], Any]] = {
    "chat_template_kwargs": lambda args: {},
    "epsilon_high": lambda args: args.epsilon,
    "max_tool_calling_iterations": lambda args: sys.maxsize,
    "num_generations_eval": lambda args: args.num_generations,
}
"""What an attribute of TRL's trainer is where its argument is not given."""


class CompletionLog:
    """Keeps training's latest generation until a log is due. Does nothing unless ``log_completions`` is on, and acts in the first process
    alone."""

    def __init__(self, args: GRPOConfig, is_first: bool) -> None:
        self.on, self.limit = bool(args.log_completions) and is_first, args.num_completions_to_print
        self.args = args
        self.columns: dict[str, Sequence[object]] = {}
        self._warned: set[str] = set()

    def keep(self, generation: Generation, names: Sequence[str], extra: Mapping[str, Sequence[object]]) -> None:
        if not self.on:
            return
        count = len(generation.sampled)
        self.columns = {"prompt": list(map(_plain, generation.prompts)), "completion": list(map(_plain, generation.completions))}
        self.columns |= dict(zip(names, generation.scores, strict=True))
        for name, values in extra.items():
            if len(values) == count:
                self.columns[name] = list(values)
            elif name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "log_extra(%r, ...) was given %d values for %d completions, so the column is left out: give one for each", name,
                    len(values), count,
                )  # fmt: skip
        self.columns["advantage"] = generation.advantages

    def write(self, step: int) -> None:
        """Print, and write ``completions_NNNNN.parquet``."""
        if not self.on or not self.columns:
            return
        import pyarrow
        from pyarrow import parquet

        folder = Path(self.args.output_dir) / "completions"  # which may have been set since the trainer was made
        folder.mkdir(parents=True, exist_ok=True)
        rows = {"step": [step] * len(self.columns["prompt"]), **self.columns}
        parquet.write_table(pyarrow.table(rows), folder / f"completions_{step:05d}.parquet")
        self._print(step)

    def _print(self, step: int) -> None:
        """As many as ``num_completions_to_print`` says, at random as in TRL, by a generator that nothing else shares."""
        rows = list(zip(*self.columns.values(), strict=True))
        if self.limit is not None and self.limit < len(rows):
            if self.limit <= 0:
                return
            rows = random.Random(step).sample(rows, self.limit)
        table = Table(title=f"Step {step}", show_lines=True)
        for name in self.columns:
            table.add_column(name)
        for row in rows:
            table.add_row(*(Text(_shown(value)) for value in row))
        Console(width=own_width()).print(table)


def _plain(text: Any) -> Any:
    """A text or a chat, its calls of tools as JSON: a table's column cannot hold arguments of several types."""
    if isinstance(text, str):
        return text
    return [m | {"tool_calls": json.dumps(m["tool_calls"], default=repr)} if m.get("tool_calls") is not None else m for m in text]


def _shown(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return "\n".join(f"{m['role']}: {' '.join(str(m[k]) for k in ('content', 'tool_calls') if m.get(k))}" for m in value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def for_all(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that all processes call at once: where one fails, all end with its error. Inside another it adds nothing."""

    @functools.wraps(method)
    def inside(*given: P.args, **named: P.kwargs) -> T:
        trainer: Any = given[0]
        if trainer._inside:
            return method(*given, **named)
        trainer._inside = True
        try:
            with together(trainer.world):
                return method(*given, **named)
        finally:
            trainer._inside = False

    return inside


@dataclass(frozen=True)
class _Repeated(Sampler[int]):
    """The rows of each of ``parts``, ``times`` times each, all of it ``passes`` times over. A list of them would be long."""

    parts: Sequence[Sequence[int]]
    passes: int
    times: int

    def __iter__(self) -> Iterator[int]:
        return (i for part in self.parts for _ in range(self.passes) for i in part for _ in range(self.times))

    def __len__(self) -> int:
        return sum(map(len, self.parts)) * self.passes * self.times


class Outputs:
    """The part of ``GRPOTrainer`` that trains nothing."""

    args: GRPOConfig
    policy: Policy
    episodes: ScriptEpisodes | None
    learner: Learner
    rewards: RewardFunctions
    train_dataset: Any
    eval_dataset: Any
    model: Any
    processing_class: Any
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    entropy: EntropyControl
    world: World
    _lr_scheduler: Any
    _inside = False
    """A method that all processes call at once."""
    save_state, save_metrics, log_metrics = save_state, save_metrics, log_metrics

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add a row to ``state.log_history`` and show it to callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(
            self.args, self.state, self.control, dict(logs)
        )  # some take out what they do not show

    def _finished_before(self, checkpoint: Path) -> TrainOutput:
        """What a run came to that has nothing left to do; nothing is logged that it has not logged itself."""
        logger.warning("%s is of a run that made all its steps: nothing is left to do", checkpoint)
        self.control = self._event("on_train_begin")
        metrics = summary_in(self.state.log_history)
        self.control = self._event("on_train_end")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _event(self, name: str) -> TrainerControl:
        event: Callable[..., TrainerControl] = getattr(self.callback_handler, name)
        return event(self.args, self.state, self.control)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (with an adapter, the adapter alone) and the tokenizer to ``output_dir``, by default the run's.

        The first process does; the others must call it too where the weights are divided.
        """
        folder = Path(output_dir or self.args.output_dir)
        if self.learner.sharding.divides_weights:
            self._save_divided(folder)
        elif self.world.is_first:
            checkpoints.save_policy(self.policy, folder)

    @for_all
    def _save_divided(self, folder: Path) -> None:
        policy = self.learner.sharding.whole_policy(self.policy) or self.policy  # the first process, which writes, has it whole
        self.world.on_rank0(lambda: checkpoints.save_policy(policy, folder))

    def push_to_hub(self, *_: object, **__: object) -> None:
        """Refused: uploading is left to the Hub's own command."""
        raise ConfigError(f"push_to_hub() is not there: save_model() and then `hf upload NAME {self.args.output_dir}`")

    def create_model_card(self, *_: object, **__: object) -> None:
        """Refused, like ``push_to_hub``."""
        raise ConfigError("create_model_card() is not there: write README.md into the folder of save_model() yourself")

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that writes."""
        return self.world.is_first

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return bool(self.args.local_process_index == 0)

    def add_callback(self, callback: Callback) -> None:
        self.callback_handler.add_callback(callback)
        _refuse_uploads(self.callback_handler)

    def remove_callback(self, callback: Callback) -> None:
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: Callback) -> TrainerCallback | None:
        return self.callback_handler.pop_callback(callback)

    # What scripts read of the trainer.

    aux_loss_enabled = False

    @property
    def tools(self) -> list[Callable[..., object]]:
        """All functions that a policy may call, methods of environments included."""
        return [] if self.episodes is None else list(self.episodes.functions)

    @property
    def environments(self) -> list[object] | None:
        """Those of the last generation, in the order of this process's completions."""
        return None if self.episodes is None else self.episodes.played or None

    @property
    def is_fsdp_enabled(self) -> bool:
        return self.learner.sharding.name == "fsdp2"

    @property
    def is_deepspeed_enabled(self) -> bool:
        return self.learner.sharding.name.startswith("zero")

    @functools.cached_property
    def accelerator(self) -> Any:
        """Accelerate's own: for scripts that print, ask which process they are, or unwrap the model by it."""
        try:
            from accelerate import Accelerator
        except ImportError as error:
            raise ConfigError("trainer.accelerator needs the package accelerate: pip install accelerate") from error
        return Accelerator(cpu=self.policy.device.type == "cpu")

    @property
    def model_wrapped(self) -> torch.nn.Module:
        """The model itself: nothing is wrapped around it."""
        return self.policy.model

    @property
    def ref_model(self) -> torch.nn.Module | None:
        """The reference, where it is a model of its own: with ``beta`` and without an adapter."""
        reference = self.learner.reference
        return None if reference is None or isinstance(self.learner.scorer, KeepsAdapter) else reference.module

    @property
    def optimizer(self) -> Any:
        return self.learner.optimizer.adamw

    @property
    def lr_scheduler(self) -> Any:
        """None until ``train()`` makes one, unless the script gave its own."""
        return self._lr_scheduler

    @property
    def reward_funcs(self) -> tuple[Callable[..., object], ...]:
        """Functions, and models as the modules that they are. A tuple, since nothing can be added."""
        return tuple(getattr(f, "model", f) for f in self.rewards.functions)

    @property
    def reward_processing_classes(self) -> tuple[object, ...]:
        """The tokenizers of reward models; None for functions."""
        return tuple(getattr(f, "tokenizer", None) for f in self.rewards.functions)

    @property
    def reward_weights(self) -> torch.Tensor:
        """Those that are used: a number that is changed in it counts."""
        return self.rewards.weights

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus as it is now."""
        return float(self.entropy.coef)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The first epoch's rows in TRL's order, each ``num_generations`` times, for callbacks and to look at. Training reads the
        prompts itself."""
        args, size = self.args, self.args.generation_batch_size // self.args.num_generations
        sampler = None
        if hasattr(self.train_dataset, "__len__"):
            order = epoch_order(len(self.train_dataset), args.seed, args.shuffle_dataset, 0)
            parts = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
            sampler = _Repeated(parts, args.num_iterations * args.steps_per_generation, args.num_generations)
        return self._loader(self.train_dataset, sampler, args.generation_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The rows of evaluation, each as often as it is answered, for callbacks and to look at. Batches are of all processes."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        times = self.args.num_generations_eval or self.args.num_generations
        sampler = _Repeated([range(len(dataset))], 1, times) if hasattr(dataset, "__len__") else None
        return self._loader(dataset, sampler, self.args.per_device_eval_batch_size * self.args.world_size)

    def _loader(self, dataset: Any, sampler: _Repeated | None, batch_size: int) -> DataLoader[Any]:
        workers = self.args.dataloader_num_workers if sampler is not None else 0  # several would take turns at a stream
        return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=list, num_workers=workers)

    def __getattr__(self, name: str) -> Any:
        if name in ARGUMENTS:  # TRL's trainer has most of its arguments as attributes too
            given = getattr(self.args, name)
            return given if given is not None or name not in _WITHOUT else _WITHOUT[name](self.args)
        raise AttributeError(f"groupwise.trl's GRPOTrainer has no {name!r}: dir(trainer) lists what it has")

    def __setattr__(self, name: str, value: object) -> None:
        if name in ARGUMENTS:
            raise ArgumentError(f"trainer.{name} cannot be set: set {name} in GRPOConfig, before the trainer is made")
        if name in ("model", "processing_class") and vars(self).get(name, value) is not value:
            raise ArgumentError(f"trainer.{name} cannot be set after the trainer was made: make another GRPOTrainer with it")
        if name in ("optimizer", "lr_scheduler"):
            if value is None or value is getattr(self, name):
                return
            raise ArgumentError(
                f"trainer.{name} cannot be set to a {type(value).__name__} after the trainer was made: give GRPOTrainer "
                "optimizers=(optimizer, scheduler)"
            )
        super().__setattr__(name, value)


def drain(numbers: dict[str, list[float]], prefix: str = "") -> dict[str, float | None]:
    """Means of what was gathered since the last log, without NaN; None where nothing else is left."""
    out: dict[str, float | None] = {}
    for name, gathered in numbers.items():
        known = [x for x in gathered if not math.isnan(x)]
        out[prefix + name] = statistics.fmean(known) if known else None
    numbers.clear()
    return out


def summary_in(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a run logged at its end. Where it did not come to that, the mean loss of the steps whose loss it logged (NaN: of none)."""
    for row in reversed(history):
        if "train_runtime" in row:
            return {name: value for name, value in row.items() if name != "step"}
    total, last = 0.0, 0
    for row in history:
        if "loss" in row:
            total, last = total + row["loss"] * (row["step"] - last), row["step"]
    return {"train_loss": total / last if last else math.nan}
