"""``GRPOTrainer`` with TRL's arguments, over this project's engine, learner and objective: a script changes its import, nothing else."""

from __future__ import annotations

import functools
import inspect
import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput, speed_metrics
from transformers.utils import logging as transformers_logging

from groupwise.batch import Member
from groupwise.config.schema import ModelConfig
from groupwise.distributed import join_world
from groupwise.errors import ConfigError, TrainingError
from groupwise.metrics import Mean, Metric
from groupwise.models.adapters import is_adapted
from groupwise.models.load import Policy, load_policy
from groupwise.rollout import rollout_settings
from groupwise.streams import tolerate_broken_pipe
from groupwise.training.learner import BatchPass, Learner
from groupwise.training.optimizer import MasterAdamW
from groupwise.training.seeds import seed_generators
from groupwise.training.sharding import loading_device
from groupwise.training.sharding.divided import Divided
from groupwise.trl import checkpoint as checkpoints
from groupwise.trl.arguments import ARGUMENTS
from groupwise.trl.config import ArgumentError, GRPOConfig
from groupwise.trl.episodes import Factories, open_script, roll_out
from groupwise.trl.generation import Generation, PromptSet, generation_numbers, was_cut
from groupwise.trl.outputs import Callback, CompletionLog, Outputs, callback_handler, drain, for_all, logger, words_about
from groupwise.trl.parts import (
    GivenOptimizer,
    check_division,
    check_frozen,
    check_launch,
    correction,
    make_parts,
    make_policy,
    make_scheduler,
    objective,
    seed_everything,
    to_config,
)
from groupwise.trl.rewards import RewardFunction, RewardFunctions, check_functions
from groupwise.trl.steps import (
    EntropyControl,
    Part,
    Schedule,
    Stretch,
    epoch_order,
    micro_step_numbers,
    prompts_needed,
    split,
    unit_counts,
    whole_loss,
)
from groupwise.types import Prompt, number_occurrences

__all__ = ["GRPOTrainer"]

_INTERNALS = frozenset(
    """_calculate_rewards _compute_loss _generate _generate_and_score_completions _generate_single_turn _get_eval_sampler
    _get_per_token_logps_and_entropies _get_tool_suffix_ids _get_train_sampler _load_optimizer_and_scheduler _log_completion_extra
    _log_metric _prepare_inputs _save_checkpoint _set_signature_columns_if_needed _tokenize_prompts _tool_call_loop compute_loss
    get_eval_dataloader get_gamma_weights get_high_entropy_mask get_off_policy_mask get_train_dataloader prediction_step save_model
    training_step""".split()  # noqa: SIM905
)
"""Methods of TRL's own trainer that a subclass would override in vain, ``save_model`` for checkpoints; those of transformers' are asked
of it."""
_MOST_DROPPED = 5
_KEYWORDS = ("trainer_state", "log_extra", "log_metric")
"""What every reward function may ask for beside columns, prompts and completions."""
Optimizers = tuple[torch.optim.Optimizer | None, LRScheduler | None]


class GRPOTrainer(Outputs):
    """TRL's ``GRPOTrainer``, as far as ``docs/how-to/coming-from-trl.md`` says, in as many processes as the launcher started.

    Args are TRL's. Raises ``GroupwiseError`` (one sentence: value, rule, remedy) for whatever is not honoured.
    """

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        own = {
            name for part in cls.__mro__ if part not in GRPOTrainer.__mro__ for name in vars(part) if not name.startswith("__")
        }
        if vain := sorted(own & (_INTERNALS | {name for name in _of_transformers() if not hasattr(GRPOTrainer, name)})):
            raise ArgumentError(
                f"{cls.__name__} overrides {', '.join(vain)}, which groupwise.trl does not call: use a reward function, a callback or "
                "groupwise.train instead"
            )

    def __setattr__(self, name: str, value: object) -> None:
        if name in _INTERNALS:
            raise ArgumentError(
                f"trainer.{name} cannot be set, since groupwise.trl does not call it: use a reward function, a callback or "
                "groupwise.train"
            )
        super().__setattr__(name, value)

    def __init__(
        self,
        model: str | torch.nn.Module,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Callback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., object]] | None = None,
        rollout_func: Callable[..., Mapping[str, Any]] | None = None,
        environment_factory: Factories = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", "model"))
            args = GRPOConfig(f"{name.rstrip('/').split('/')[-1]}-GRPO")
        if not isinstance(args, GRPOConfig):
            raise ConfigError(
                f"args is a {type(args).__name__} of {type(args).__module__}: import GRPOConfig from groupwise.trl too"
            )
        GRPOConfig.check(args)
        _require_evaluation_set(args, eval_dataset)
        self._objective, self._correction = objective(args, bool(rollout_func)), correction(args, bool(rollout_func))
        train_dataset = _placeholders(args, environment_factory) if train_dataset is None else train_dataset
        self.args = args
        if args.should_save:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        if args.log_level != "passive":  # which leaves everything as it is
            transformers_logging.set_verbosity(transformers_logging.log_levels[args.log_level])
        self.world = join_world(args.device.type == "cpu", args.ddp_timeout)
        self.world.try_gpus()
        for word in words_about(args, model, quantization_config, bool(self._correction)) if self.world.is_first else ():
            logger.warning(word)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._given = (model, processing_class, peft_config, quantization_config, optimizers)
        self._actors = (tools, environment_factory)
        self.rollout_func: Any = rollout_func
        if rollout_func and args.rollout_quantization is not None:
            raise ArgumentError(
                f"rollout_quantization is {args.rollout_quantization!r}, but rollout_func samples, with weights of its own: leave it out"
            )
        if rollout_func and (tools or environment_factory or self.world.size > 1):
            raise ArgumentError(
                "rollout_func samples for one process and makes its own calls of tools: leave out tools and environment_factory, and start "
                "the script in one process; or leave it out, and make it an environment_factory"
            )
        if optimizers[1] is not None and "metrics" in inspect.signature(type(optimizers[1]).step).parameters:
            raise ArgumentError(
                f"the schedule in optimizers= is a {type(optimizers[1]).__name__}, whose steps need a metric, but an update has none: pass "
                "another schedule, or None for that of lr_scheduler_type"
            )
        self.callback_handler = callback_handler(args, callbacks)
        check_functions(reward_funcs, args, reward_processing_classes, environment_factory is not None)
        self._make()
        handler = self.callback_handler
        handler.model, handler.processing_class = self.model, self.processing_class
        handler.optimizer, handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.rewards = RewardFunctions(reward_funcs, args, reward_processing_classes, self.policy.device, self.episodes)
        self.reward_func_names = self.rewards.names
        self._generation: tuple[tuple[int, int], Generation] | None = None
        self._read: Any = None
        self._read_training_set()
        self._evaluated: dict[str, tuple[Any, PromptSet]] = {}
        self._check_evaluation()
        self._as_made = args.to_dict()
        self.entropy = EntropyControl(args)
        self.state = self._new_state()
        self.control = TrainerControl()
        self.completion_log = CompletionLog(args, self.world.is_first)
        self._numbers: dict[str, list[float]] = defaultdict(list)
        self.control = self._event("on_init_end")

    def _prompts(self, dataset: Any, which: str) -> PromptSet:
        """Those of a data set. One without the columns that reward functions need is refused before a generation is sampled."""
        room = self.policy.context_length - self.args.max_completion_length
        prompts = PromptSet(dataset, self.processing_class, self.args, which, room, self.episodes)
        if not prompts.is_stream and not self.rollout_func:  # which brings columns
            played = self.episodes is not None and self.episodes.environments is not None
            self.rewards.check_columns(prompts[0].problem, (*_KEYWORDS, "environments") if played else _KEYWORDS)
        return prompts

    def _read_training_set(self) -> None:
        """The training prompts and their schedule, as far as ``train_dataset`` is another one than before or ``max_steps`` takes other
        rows of a stream."""
        if self._read is not self.train_dataset:
            self.train_prompts = self._prompts(self.train_dataset, "training")
            self._read, self._generation = self.train_dataset, None
        self.train_prompts.follow(self.args)
        self.schedule = Schedule.of(self.args, len(self.train_prompts))

    def _check_evaluation(self) -> None:
        """Read the prompts of a run that evaluates now, so that a mistake in them does not end it at its first evaluation."""
        dataset = self.eval_dataset
        _require_evaluation_set(self.args, dataset)
        if self.args.eval_strategy == "no":
            return
        if not isinstance(dataset, dict):
            self._evaluated["eval"] = dataset, self._evaluation_prompts(dataset, "eval")
            return
        for name, one in dataset.items():
            self._evaluated[f"eval_{name}"] = one, self._evaluation_prompts(one, f"eval_{name}")
        wanted, starts = self.args.metric_for_best_model, [f"eval_{name}_" for name in dataset]
        if starts and wanted is not None and not _metric_of_evaluation(wanted).startswith(tuple(starts)):
            raise ArgumentError(
                f"metric_for_best_model is {wanted!r}, but eval_dataset is a dict, whose metrics begin with {', '.join(starts)}: name one "
                f"of them, such as '{starts[0]}reward'"
            )

    def _evaluation_prompts(self, dataset: Any, which: str) -> PromptSet:
        """Those that were read before, where it is that data set."""
        given, found = self._evaluated.get(which, (None, None))
        return self._prompts(dataset, which) if found is None or given is not dataset else found

    def _new_state(self) -> TrainerState:
        return TrainerState(is_local_process_zero=self.args.local_process_index == 0, is_world_process_zero=self.world.is_first)

    @for_all
    def _make(self, checkpoint: Path | None = None) -> None:
        """Policy, sampler and learner. ``checkpoint``: where a model that is divided is read from instead. Its adapter is restored
        later: here it would be taken for the reference."""
        args = self.args
        model, tokenizer, peft_config, quantization_config, (given, scheduler) = self._given
        seed_everything(args, self.world.rank)
        way = check_launch(args, self.world.size)
        if way != "none" and (not isinstance(model, str) or given is not None):
            raise ArgumentError(
                f"{way} divides a model as it is read: pass the model's name or folder to GRPOTrainer, and leave optimizers out"
            )
        if way != "none" and (quantization_config or (args.model_init_kwargs or {}).get("quantization_config")) is not None:
            raise ArgumentError(
                f"{way} divides a base in the numbers that it computes in: leave quantization_config out, or launch without {way}"
            )

        def load(config: ModelConfig) -> Policy:
            divided = check_division(args, config, peft_config, self.world.size)
            saved = {} if checkpoint is None or peft_config is not None else {"name": str(checkpoint), "revision": None}
            policy = load_policy(config.model_copy(update=saved), loading_device(divided, self.world))
            return replace(policy, name=config.name)

        self.policy, model_config = make_policy(model, args, tokenizer, peft_config, quantization_config, load)
        if not (isinstance(model, str) or is_adapted(self.policy.model)):
            check_frozen(model, given)
        vars(self).update(model=self.policy.model, processing_class=self.policy.tokenizer)  # which a script cannot
        self.config = to_config(args, model_config, self._correction)
        settings = rollout_settings(self.config.rollout)
        self._sampling = replace(settings, min_p=args.min_p or 0.0, repetition_penalty=args.repetition_penalty)
        self.episodes = open_script(*self._actors, self.processing_class, self.policy.end_token_ids, args)
        self._lr_scheduler: Any = scheduler  # None until train() knows how many steps there are
        scorer, sharding, self.engine = make_parts(
            self.policy, self.config, self.world, given is not None, self._objective.needs_reference, self.episodes,
            came_adapted=is_adapted(model),
        )  # fmt: skip
        own = None if given is None else GivenOptimizer(given, self.model.parameters(), self.config.optimizer)
        self.learner = Learner(scorer, self.config, own, self.world, sharding, objective=self._objective)
        sharding.check()

    # Training.

    @for_all
    @tolerate_broken_pipe()
    def train(self, resume_from_checkpoint: str | bool | None = None, trial: object = None, **others: object) -> TrainOutput:
        """Train as ``args`` say, and return transformers' ``TrainOutput``.

        A second call goes on where an interrupted one stopped, or as far as ``args.max_steps`` says now; after the last step it begins a
        run of its own with the weights that there are.

        ``resume_from_checkpoint``: a folder ``checkpoint-N``, or True for the newest one in ``output_dir``. Of a run that has made all
        its steps the results come back as they were.
        """
        if trial is not None or any(value is not None for value in others.values()):
            raise ArgumentError("train() takes resume_from_checkpoint only: hyper-parameter searches are not covered")
        self._check_late()
        self._read_training_set()
        updates = self.schedule.total_updates(self.args.max_steps, self.args.num_train_epochs)
        checkpoint = self.world.on_rank0(lambda: checkpoints.find(Path(self.args.output_dir), resume_from_checkpoint))
        self._begin(checkpoint, updates)
        self.callback_handler.train_dataloader = self.get_train_dataloader()
        if checkpoint is not None and self.state.global_step >= updates:
            return self._finished_before(checkpoint)
        started, done_before = time.time(), self.state.global_step
        self.control = self._event("on_train_begin")
        if isinstance(self.learner.optimizer, MasterAdamW) and not self.learner.sharding.divides_weights:
            self.learner.optimizer.take_up()
        self.learner.sharding.check()  # a script or a callback may have written in one process alone
        if self.args.eval_on_start:
            self.evaluate()
        epoch, first = divmod(self.state.global_step, self.schedule.updates)
        epochs = math.inf if self.train_prompts.is_stream else self.state.num_train_epochs
        while self.state.global_step < updates and epoch < epochs and not self.control.should_training_stop:
            self._epoch(epoch, first)
            epoch, first = epoch + 1, 0
        metrics = self._summary(started, self.state.global_step - done_before)
        metrics |= drain(self._numbers)  # of the steps since the last log
        self.log(metrics)
        self.completion_log.write(self.state.global_step)
        if self._saved == self.state.global_step and self.world.is_first:
            checkpoints.renew_state(Path(self.args.output_dir), self.state)
        self.control = self._event("on_train_end")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _check_late(self) -> None:
        """What was set on ``trainer.args`` since the trainer was made counts, or is an error."""
        GRPOConfig.check(self.args)
        for name, value in self.args.to_dict().items():
            row = ARGUMENTS.get(name)
            if row is not None and not row.late and row.fate != "harmless" and value != self._as_made[name]:
                raise ArgumentError(
                    f"{name} was changed from {self._as_made[name]!r} to {value!r} after the trainer was made: set it before"
                )
        self._check_evaluation()

    def _begin(self, checkpoint: Path | None, updates: int) -> None:
        if checkpoint is not None and self.learner.sharding.divides_weights:
            del self.learner, self.engine, self.policy, self.model
            self._make(checkpoint)
            self.callback_handler.model, self.callback_handler.optimizer = self.model, self.optimizer
        self.learner.optimizer.clear()  # a step that was interrupted left part of its gradient
        if checkpoint is None and self.state.global_step >= updates:
            self.state, self._generation = self._new_state(), None
        if self._given[-1][1] is None:  # made again, since how many steps there are may have changed
            done = self.lr_scheduler.last_epoch if self.state.global_step and self.lr_scheduler is not None else 0
            for group in () if isinstance(self.learner.optimizer, GivenOptimizer) else self.optimizer.param_groups:
                group["lr"] = self.args.learning_rate
                group.pop("initial_lr", None)
            self._lr_scheduler = self.callback_handler.lr_scheduler = make_scheduler(self.args, self.optimizer, updates)
            with warnings.catch_warnings(action="ignore"):  # torch expects the optimiser's step before its schedule's
                for _ in range(done):
                    self.lr_scheduler.step()
        self.learner.parts = {"entropy": self.entropy, "schedule": checkpoints.ScheduleState(self.lr_scheduler)}
        if checkpoint is not None:
            self.state = checkpoints.restore(checkpoint, self.policy, self.learner, self.is_local_process_zero())
            self._generation = None  # of the steps that this trainer made before
            self._numbers.clear()
            if self.state.global_step < updates:
                self.state.log_history = [row for row in self.state.log_history if "train_runtime" not in row]
        self.engine.refresh(self.learner.updates)
        self.state.max_steps = updates
        self.state.num_train_epochs = math.ceil(updates / self.schedule.updates)
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, updates)
        self._loss, self._total_loss, self._last_logged = 0.0, 0.0, self.state.global_step
        self._saved: int | None = None

    def _epoch(self, epoch: int, first: int) -> None:
        """The optimiser steps of one epoch from ``first`` on, until a callback ends it."""
        self.control = self._event("on_epoch_begin")
        for update in range(first, self.schedule.updates):
            self._step(epoch, update)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = self._event("on_epoch_end")
        self._log_evaluate_save()

    def _step(self, epoch: int, update: int) -> None:
        """One optimiser step: its micro-steps, each scaled by their number, then AdamW."""
        started = time.perf_counter()
        self.control = self._event("on_step_begin")
        stretches = self.schedule.step(update)
        micro_steps = sum(len(s.micro_steps) for s in stretches)
        parts = [(self._generation_of(epoch, s).parts[s.micro_steps], s.first_pass) for s in stretches]
        found = self._accumulate(parts, 1 / micro_steps)
        for _ in range(micro_steps - 1):
            self.control = self._event("on_substep_end")
        self.control = self._event("on_pre_optimizer_step")
        rate = float(self.lr_scheduler.get_last_lr()[0])
        self._fill_gradients("policy/loss" in found)
        # Where the schedule is of this optimiser, it and callbacks have left the rates in its groups.
        in_groups = getattr(self.lr_scheduler, "optimizer", None) is self.optimizer
        stepped = self.learner.step(None if in_groups else rate)
        if self.state.global_step == 0 and self.args.save_strategy != "no":
            self._check_optimizer()
        self.control = self._event("on_optimizer_step")
        dropped = bool(stepped["optimizer/dropped_updates"].value)
        self.engine.refresh(self.learner.updates)
        if self.learner.dropped_in_a_row >= _MOST_DROPPED:
            raise TrainingError(
                f"the gradient was not finite in {_MOST_DROPPED} updates in a row, none of which was made: lower learning_rate or look "
                "at the rewards"
            )
        loss = whole_loss(found)
        if math.isfinite(loss) and not dropped:
            self._loss += loss
        self.entropy.step(found)
        skipped = sum((part.skipped for part, _ in parts), Mean(0.0, 0))
        numbers = micro_step_numbers(found, skipped, self.args.loss_type) | self.entropy.numbers(found, micro_steps)
        for name, number in numbers.items():
            self._numbers[name].append(number)
        self._numbers["step_time"].append(time.perf_counter() - started)
        self._recent = {"grad_norm": stepped["optimizer/grad_norm"].value, "learning_rate": rate}
        if not (dropped and self.args.fp16):  # as transformers goes on, where the loss scale was too large
            self.lr_scheduler.step()
        self.state.global_step += 1  # with the schedule: what fails before has made no step
        self.state.epoch = epoch + self.schedule.share_done(update)
        if self.args.sync_ref_model and self.state.global_step % self.args.ref_model_sync_steps == 0:
            self.learner.renew_reference()
        every = self.args.torch_empty_cache_steps
        if every and self.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.control = self._event("on_step_end")
        self._log_evaluate_save()

    def _accumulate(self, parts: Sequence[tuple[Part, bool]], scale: float) -> dict[str, Metric]:
        """Forward and backward of ``parts``, each with whether its micro-steps are the first ones; numbers are of all processes."""
        for part, _ in parts:
            self.entropy.prepare(self.learner, part)
        found = self.learner.accumulate([BatchPass(part.window, first, scale) for part, first in parts])
        assert found is not None
        return found

    def _generation_of(self, epoch: int, stretch: Stretch) -> Generation:
        """The epoch's generation that ``stretch`` is of: sampled when it is first needed, kept until the next. A run that resumes inside
        it samples it again, as in TRL. Generators of random numbers are seeded for it, so that a resumed run draws the same."""
        index = stretch.generation
        if self._generation is None or self._generation[0] != (epoch, index):
            number = epoch * self.schedule.generations + index
            seed_generators(self.args.seed, number)  # rows that are drawn are the same in all processes
            size = self.schedule.prompts_per_generation
            order = epoch_order(len(self.train_prompts), self.args.seed, self.train_prompts.shuffles, epoch)
            prompts = [self.train_prompts[i] for i in order[index * size : (index + 1) * size]]
            scope, again = f"rollout/generation={number}", not stretch.begins_generation
            seed_generators(self.args.seed + self.world.rank, number)  # reward functions draw by process, as in TRL
            generation = self._generate(prompts, self.args.num_generations, scope, self._numbers, again)
            self._prepare(generation, index, number)
            self._generation = ((epoch, index), generation)
        return self._generation[1]

    def _generate(
        self, prompts: Sequence[Prompt], size: int, scope: str, numbers: dict[str, list[float]], again: bool = False
    ) -> Generation:
        """Sample ``size`` completions of each prompt and score them; what is to be logged of it goes into ``numbers``.

        Each process scores its share of the completions in one call, as in TRL the ones that follow those of the process before it; where
        there are environments, those that it has. ``again``: its tokens were counted before.
        """
        args, world = self.args, self.world
        training = numbers is self._numbers  # else judging, with the weights as they are
        sampling = replace(self._sampling, in_8_bits=self._sampling.in_8_bits and training)
        extra_columns, logged = defaultdict[str, list[object]](list), defaultdict[str, list[float]](list)
        keywords: dict[str, object] = {
            "trainer_state": self.state,
            "log_extra": lambda column, values: extra_columns[column].extend(values),
            "log_metric": lambda name, value: logged[name].append(float(value)),
        }
        if self.episodes is not None:
            self.episodes.take_back()
        if self.rollout_func:
            prompts, sampled, columns = roll_out(
                lambda asked: self.rollout_func(asked, self), prompts, size, self.policy, args.temperature, bool(self._correction)
            )
            keywords |= columns
        else:
            sampled = self.engine.sample(number_occurrences(prompts), size, sampling, seed=args.seed, scope=scope)
        whole = 1  # completions that one process must score together
        if self.episodes is not None and self.episodes.environments is not None:
            keywords["environments"], whole = self.episodes.played, size
        first, last = (len(prompts) * size // whole * rank // world.size * whole for rank in (world.rank, world.rank + 1))
        own = [  # a group may be of several processes
            (prompt, completions[max(0, first - i * size) : max(0, last - i * size)])
            for i, (prompt, completions) in enumerate(zip(prompts, sampled, strict=True))
        ]
        parts = world.all_gather_object(self.rewards.score([pair for pair in own if pair[1]], keywords))
        scores = [[score for part in parts for score in part[index]] for index in range(len(self.rewards.names))]
        generation = Generation.of(prompts, sampled, scores, self.rewards, self.learner.objective)
        for name, number in generation_numbers(generation, self.rewards.names, args, bool(self.tools)).items():
            numbers[name].append(number)
        for name, values in _joined(world.all_gather_object(dict(logged))).items():
            numbers[name].append(statistics.fmean(values))
        share = sum(len(completions) for _, completions in own)
        columns = {  # where two functions log one of the same name, the last counts
            name: values[-share:] if share and len(values) % share == 0 else values for name, values in extra_columns.items()
        }
        extra = _joined(world.all_gather_object(columns))
        if training:
            if not again:
                tokens = sum(len(g.prompt.token_ids) + c.sampled_tokens for g in generation.groups for c in g.completions)
                self.state.num_input_tokens_seen += tokens
            self.completion_log.keep(generation, self.rewards.keys, extra)
        numbers["num_tokens"] = [self.state.num_input_tokens_seen]
        return generation

    def _prepare(self, generation: Generation, index: int, number: int) -> None:
        """Pack every stretch of micro-steps in which the generation will be learnt from."""
        micro_steps, units = self.schedule.steps_per_generation, self.world.size
        divided = split(len(generation.sampled), micro_steps, self.args.seed, number, units)
        for chosen in self.schedule.micro_steps_of(index):
            own = [unit for micro_step in chosen for unit in divided[micro_step * units : (micro_step + 1) * units]]
            generation.parts[chosen] = self._part(generation, own, micro_steps, self.schedule.off_policy)

    def _part(self, generation: Generation, parts: list[list[int]], micro_steps: int, off_policy: bool) -> Part:
        """The window of some micro-steps, whose units ``parts`` has; the generation has ``micro_steps``. What has no advantage and
        no other effect is left out."""
        args, members, sampled, units = self.args, generation.members, generation.sampled, self.world.size
        lengths = [0 if args.mask_truncated_completions and was_cut(c) else c.sampled_tokens for c in sampled]
        all_count = args.beta > 0 or self.entropy.acts or self.learner.objective.loss_concerns_all
        taught = [bool(n) and (all_count or a != 0) for n, a in zip(lengths, generation.advantages, strict=True)]
        weights = torch.zeros(len(sampled), dtype=torch.float32)
        unit_of: dict[Member, int] = {}
        for index, unit in enumerate(parts):
            first = index // units * units
            whole = sum(map(len, parts[first : first + units]))
            counts = unit_counts(
                args.loss_type, unit=unit, micro_step=whole, lengths=lengths, micro_steps=micro_steps, units=units,
                max_tokens=args.max_completion_length,
            )  # fmt: skip
            tokens_N = torch.tensor([sampled[i].sampled_tokens for i in unit])
            weights[unit] = self.learner.objective.weights(tokens_N, torch.arange(len(unit)), counts)
            unit_of |= {members[i]: index for i in unit}
        chosen = sorted(i for unit in parts for i in unit if taught[i])
        window = self.learner.window_of(
            generation.groups, [members[i] for i in chosen], weights[chosen],
            torch.tensor(generation.advantages, dtype=torch.float32)[chosen], off_policy=off_policy,
        )  # fmt: skip
        unit_N = torch.tensor([unit_of[member] for member in window.batch.members], dtype=torch.long)
        left_out = [sampled[i] for unit in parts for i in unit if lengths[i] and not taught[i]]
        unknown = math.nan if self.rollout_func else 0.0  # its logprobs may be anything
        skipped = Mean.of(unknown - x for c in left_out for x, drawn in zip(c.logprobs, c.sampled, strict=True) if drawn)
        return Part(window, unit_N, len(parts), units, skipped)

    def _fill_gradients(self, passes_were_made: bool) -> None:
        """Give every weight a gradient: a step in which nothing had an advantage is made all the same, as in TRL."""
        optimizer, sharding = self.learner.optimizer, self.learner.sharding
        if isinstance(sharding, Divided) and not passes_were_made:  # DeepSpeed takes gradients of backward passes alone
            sharding.idle_pass(sharding.scorer)
        for master in getattr(optimizer, "masters", ()):
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    # Logs, evaluation, checkpoints.

    def _agree(self) -> None:
        """Take over what a callback asks for in any process."""
        names = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")
        asked = self.world.all_gather_object([getattr(self.control, name) for name in names])
        for name, values in zip(names, zip(*asked, strict=True), strict=True):
            setattr(self.control, name, any(values))

    def _log_evaluate_save(self) -> None:
        self._agree()
        if self.control.should_log and self.state.global_step > self._last_logged:
            steps = self.state.global_step - self._last_logged
            self._total_loss += self._loss
            logs = {"loss": self._loss / steps, **self._recent}
            self._loss, self._last_logged = 0.0, self.state.global_step
            self.log(logs | drain(self._numbers))
            self.completion_log.write(self.state.global_step)
        if self.control.should_evaluate:
            self._note_best(self.evaluate())
        if self.control.should_save:
            self._save_checkpoint()
            self.control = self._event("on_save")
        self._agree()

    def _note_best(self, metrics: Mapping[str, float | None]) -> None:
        """Keep the best value so far of ``metric_for_best_model``, which ``EarlyStoppingCallback`` goes by."""
        wanted = self.args.metric_for_best_model
        if wanted is None:
            return
        name = _metric_of_evaluation(wanted)
        if name not in metrics:
            raise ArgumentError(
                f"metric_for_best_model is {wanted!r}, but evaluation has {', '.join(sorted(metrics))}: name one of them"
            )
        value, best, sign = metrics[name], self.state.best_metric, 1 if self.args.greater_is_better else -1
        if value is not None and (best is None or sign * value > sign * best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def _summary(self, started: float, steps: int) -> dict[str, Any]:
        self._total_loss += self._loss
        args = self.args
        samples = steps * args.per_device_train_batch_size * self.world.size * args.gradient_accumulation_steps
        if args.max_steps <= 0:  # as transformers counts then: rows
            samples = len(self.train_prompts) * args.num_train_epochs * steps / max(1, self.state.max_steps)
        losses = {"total_flos": self.state.total_flos, "train_loss": self._total_loss / max(1, steps)}
        return {**speed_metrics("train", started, samples, steps), **losses}

    @for_all
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float | None]:
        """Sample and score the evaluation prompts; names as in training, each with ``eval_`` before it."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ArgumentError("evaluate() has no eval_dataset: pass one to it or to GRPOTrainer")
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if isinstance(dataset, dict):
            found: dict[str, float | None] = {}
            for name, one in dataset.items():
                found |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        started = time.time()
        prompts = self._evaluation_prompts(dataset, metric_key_prefix)
        size = self.args.num_generations_eval or self.args.num_generations
        per_batch = max(1, self.args.per_device_eval_batch_size * self.world.size // size)
        numbers: dict[str, list[float]] = defaultdict(list)
        self.callback_handler.eval_dataloader = self.get_eval_dataloader(dataset)
        for start in range(0, len(prompts), per_batch):
            part = [prompts[i] for i in range(start, min(start + per_batch, len(prompts)))]
            found_in_part: dict[str, list[float]] = defaultdict(list)
            generation = self._generate(part, size, f"{metric_key_prefix}/update={self.learner.updates}", found_in_part)
            found_in_part["loss"].append(self._loss_of(generation, found_in_part))
            for name, values in found_in_part.items():
                numbers[name] += values * len(part)  # the last batch may have fewer prompts, and counts for less
            self.control = self._event("on_prediction_step")
        metrics = drain(numbers, f"{metric_key_prefix}_")
        rows = len(prompts)  # which transformers counts, though each is answered several times
        batches = math.ceil(rows / (self.args.per_device_eval_batch_size * self.world.size))
        metrics |= speed_metrics(metric_key_prefix, started, rows, batches)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _loss_of(self, generation: Generation, numbers: dict[str, list[float]]) -> float:
        part = self._part(generation, split(len(generation.sampled), 1, 0, 0, self.world.size), 1, False)
        found = self._accumulate([(part, True)], 1.0)
        of_entropy = self.entropy.numbers(found, 1, evaluating=True)
        for name, number in (micro_step_numbers(found, part.skipped, self.args.loss_type) | of_entropy).items():
            numbers[name].append(number)
        return whole_loss(found)

    def _check_optimizer(self) -> None:
        if isinstance(self.learner.optimizer, GivenOptimizer) and not self.args.save_only_model:
            self.learner.optimizer.check_kept()

    def _save_checkpoint(self) -> None:
        self._check_optimizer()
        only_model, limit = self.args.save_only_model, self.args.save_total_limit
        checkpoints.save(Path(self.args.output_dir), self.policy, self.learner, self.state, only_model=only_model, limit=limit)
        self._saved = self.state.global_step


def _placeholders(args: GRPOConfig, environment_factory: Factories) -> list[dict[str, Any]]:
    """Rows without a prompt, as many as will be needed, for an environment that owns its data. Raises ArgumentError where none does."""
    if not environment_factory or isinstance(environment_factory, Mapping):
        why = (
            "environment_factory chooses by its column 'environment'"
            if environment_factory
            else "no environment brings the prompts"
        )
        raise ArgumentError(f"train_dataset is missing, but {why}: pass a data set")
    if args.max_steps <= 0:
        raise ArgumentError("the environments bring the prompts, so that there is no length of the data: set max_steps")
    return [{}] * prompts_needed(args)


def _require_evaluation_set(args: GRPOConfig, dataset: Any) -> None:
    if args.eval_strategy != "no" and dataset is None:
        raise ArgumentError(
            f"eval_strategy is {args.eval_strategy!r}, but there is no eval_dataset: pass one, or set eval_strategy='no'"
        )


def _metric_of_evaluation(name: str) -> str:
    return name if name.startswith("eval_") else f"eval_{name}"


def _joined(parts: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """Each process's lists, one after the other, by name."""
    return {name: [x for part in parts for x in part.get(name, ())] for name in sorted({n for part in parts for n in part})}


@functools.cache
def _of_transformers() -> frozenset[str]:
    """Methods of transformers' trainer; none where it cannot be imported, for lack of Accelerate."""
    try:
        from transformers import Trainer
    except ImportError:
        return frozenset()
    return frozenset(name for name, value in vars(Trainer).items() if callable(value) and not name.startswith("__"))
