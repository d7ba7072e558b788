"""Everything a run needs short of weights: data, prompts, rewards, tokenizer. Most mistakes come to light here, in seconds.

Training starts from it, and ``groupwise train --dry-run`` is it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from transformers import PretrainedConfig

from groupwise.algorithm import Objective
from groupwise.config.combinations import note_on_processes, notes, prompt_limit, refuse_untrainable, refuse_with_vllm
from groupwise.config.schema import Config
from groupwise.data.answers import AnswerStyle
from groupwise.data.named import is_prepared
from groupwise.data.prompts import (
    drop_long_prompts,
    note_on_date,
    note_on_options,
    note_on_place,
    note_on_places,
    resolve_system,
    unknown_arguments,
)
from groupwise.data.sources import ProblemSet, has_answers, load_problems
from groupwise.distributed import is_first_process, world_size
from groupwise.distributed.launch import LAUNCHER
from groupwise.engines import check_engine, check_quantization
from groupwise.engines.base import text_of
from groupwise.engines.vllm.engine import check_vllm
from groupwise.episodes import Episodes, open_episodes, render_episode
from groupwise.errors import ConfigError, ModelError
from groupwise.evaluation.judging import with_shots
from groupwise.models.devices import with_dtype
from groupwise.models.embedded import EMBEDDED_NAME
from groupwise.models.families import why_uncovered
from groupwise.models.folder import stored_quantisation
from groupwise.models.load import (
    check_adapter,
    check_model,
    context_length,
    end_token_ids,
    generation_config,
    leaves_experts,
    load_model_config,
    load_tokenizer,
    resolve_device,
)
from groupwise.models.native.build import kernels
from groupwise.models.quantised import quantisation_settings
from groupwise.models.reward_model import RewardModel
from groupwise.models.scorer import attention_note
from groupwise.planner.hardware import present_gpu
from groupwise.rewards.load import Rewards, named_rewards
from groupwise.rewards.suite import RewardSuite
from groupwise.serving.agents import open_agents
from groupwise.tracking.run_folder import RUNS
from groupwise.tracking.services import check_trackers
from groupwise.training.critic import check_critic
from groupwise.training.sharding import check_sharding
from groupwise.training.short_memory import Shortage, checkpoint_note, disk_note, memory_shortage
from groupwise.training.warm_start import check_worked_examples
from groupwise.types import Problem, Prompt

__all__ = ["LazyPrompts", "Prepared", "prepare"]

Render = Callable[[Problem], Prompt]
StartTogether = Callable[[Sequence[Problem]], None]


class LazyPrompts(Sequence[Prompt]):
    """Prompts rendered when they are asked for, and kept: a run of 100 steps uses a few hundred of 20,000 problems."""

    def __init__(self, problems: Sequence[Problem], render_one: Render, start_together: StartTogether | None = None) -> None:
        """``start_together``: told of several before they are rendered one after the other."""
        self.problems = problems
        self._render, self._start_together = render_one, start_together
        self._kept: dict[int, Prompt] = {}

    def __len__(self) -> int:
        return len(self.problems)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        position = range(len(self))[index]
        if position not in self._kept:
            self._kept[position] = self._render(self.problems[position])
        return self._kept[position]

    def take(self, indices: Sequence[int]) -> list[Prompt]:
        """Those prompts."""
        if self._start_together is not None:
            self._start_together([self.problems[i] for i in indices if i not in self._kept])
        return [self[i] for i in indices]

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked and could start."""

    config: Config
    """With ``training.steps`` in place of ``training.epochs``."""
    problems: ProblemSet
    train_prompts: LazyPrompts
    """Rendered on demand; each leaves room for a completion. With an environment that is checked when one is rendered."""
    held_out_prompts: list[Prompt]
    """At most ``evaluation.problems`` of them."""
    rewards: RewardSuite
    tokenizer: Any
    answer_style: str
    system: str | None
    """The system prompt that was resolved, or None."""
    hf_config: PretrainedConfig
    episodes: Episodes | None
    """How completions of several turns are played; None without tools."""
    context_length: int
    """Positions of the model: prompt and completion together, in tokens."""
    notes: list[str] = field(default_factory=list)
    """Settings without effect, and what was dropped on the way, a sentence each."""
    short_of_memory: Shortage | None = None


def prepare(config: Config, rewards: Rewards | None = None, processes: int | None = None, folder: Path | None = None) -> Prepared:
    """Check and load everything but the weights, what is quick first.

    ``rewards`` are functions from Python, by name or in a list, as for `RewardSuite.from_config`.
    ``processes``: how many a run that is only checked would have; by itself as many as were started.
    ``folder``: the run's, where ``config`` does not name it.

    Raises:
        ModelError: the model cannot be loaded (a folder without weights, an unknown name).
        RewardError: a reward function cannot be loaded, or needs a column that the data lacks.
        DataError, AnswerError: the data is missing, empty or unreadable, or a prompt does not fit the context.
        ConfigError: no prompt at all could fit beside the completion, a tracker's package is not installed, a loss or an advantage of
            the user's cannot be found or does not take its settings, vLLM cannot sample the model, or the processes cannot
            divide it as they are asked to.
        TrainingError: the disk has no room for the final model.
    """
    refuse_untrainable(config.model)
    check_model(config.model, reads_weights=is_first_process())
    check_adapter(config.model)  # of what was asked for
    config = _with_stored_bits(config)
    refuse_with_vllm(config.rollout, processes or world_size(), config.model.quantization)
    check_engine(config.rollout)
    check_trackers(config)
    Objective.from_config(config.algorithm)  # finds a loss or an advantage of the user's
    system, answer_style = resolve_system(config.prompt, config.data)
    suite = RewardSuite.from_config(
        config.rewards, answer_style, named_rewards(rewards), max_completion_tokens=config.rollout.max_completion_tokens,
        open_model=RewardModel.from_config,
    )  # fmt: skip
    suite.require_environment(config.rollout.environment)
    problems = load_problems(config.data)
    for problem in problems.train:
        suite.require_columns(problem)
    tokenizer, hf_config = load_tokenizer(config.model), load_model_config(config.model)
    check_quantization(config, hf_config)
    if said := unknown_arguments(tokenizer, config.prompt.template_arguments):
        raise ModelError(said)
    suite.decode = partial(text_of, tokenizer)
    episodes = open_episodes(config, tokenizer, end_token_ids(tokenizer, hf_config, generation_config(config.model)), open_agents)
    check_sharding(config, hf_config, processes)
    own_context = context_length(hf_config, tokenizer)
    model = with_dtype(config.model)
    room = check_vllm(config.rollout, hf_config, model.name, model.device, model.dtype)
    context = min(own_context, room or own_context)
    by_vllm = context < own_context
    check_critic(config, tokenizer, context)

    def render_one(problem: Problem) -> Prompt:
        return render_episode(problem, tokenizer, config.prompt, system, episodes)

    dropped: list[str] = []
    completion_limit = config.rollout.max_completion_tokens
    limit = prompt_limit(config, context, completion_limit, "rollout.max_completion_tokens", by_vllm)
    start_together = None if episodes is None else episodes.start_together
    train = _fitting(problems.train, render_one, limit, config, "training", dropped, start_together)
    config = _with_steps(config, len(train))
    suite.check_prompt(train[0])
    check_worked_examples(config, train, tokenizer, answer_style, own_context, episodes)  # vLLM has no part in them
    chosen = with_shots(problems.held_out[: config.evaluation.problems], config, answer_style)
    completion_limit = config.evaluation.max_completion_tokens or completion_limit
    limit = prompt_limit(config, context, completion_limit, "evaluation.max_completion_tokens", by_vllm)
    held_out = _fitting(chosen, render_one, limit, config, "held-out", dropped, start_together)[:]
    wordiest = max(range(len(train)), key=lambda i: len(str(train.problems[i].question)))  # thousands would take long to render
    longest = max(len(one.token_ids) for one in (train[wordiest], *held_out))
    short = memory_shortage(config, resolve_device(config.model.device), longest, processes)
    return Prepared(
        config=config,
        problems=problems,
        train_prompts=train,
        held_out_prompts=held_out,
        rewards=suite,
        tokenizer=tokenizer,
        answer_style=answer_style,
        system=system,
        hf_config=hf_config,
        episodes=episodes,
        context_length=context,
        notes=[
            *_notes_on_prompts(config, [train[0], train[wordiest]], answer_style),  # which are rendered already
            *_note_on_tools(episodes),
            *_notes(config, suite, hf_config, tokenizer, processes or world_size(), dropped, short, folder),
        ],
        short_of_memory=short,
    )


def _notes_on_prompts(config: Config, prompts: Sequence[Prompt], style: AnswerStyle) -> list[str]:
    """What some of the training prompts show too little of."""
    if not has_answers(config.data):
        return []
    notes = (note_on_place(prompts, style), note_on_places(config.prompt), note_on_options(prompts[0]))
    return [note for note in notes if note]


def _note_on_tools(episodes: Episodes | None) -> list[str]:
    if episodes is None or not episodes.tools or episodes.environments is None:
        return []
    note = episodes.environments.note_on_tools()
    return [] if note is None else [note]


def _notes(
    config: Config, suite: RewardSuite, hf_config: PretrainedConfig, tokenizer: Any, processes: int, dropped: list[str],
    short: Shortage | None, folder: Path | None,
) -> list[str]:  # fmt: skip
    """What a user should know before the run, a sentence each. Raises TrainingError for a disk without room for the final model."""
    lean = why_uncovered(hf_config) is None and not (config.model.lora and config.model.lora.dropout)
    conditional = [
        attention_note(config.model.attention, hf_config.model_type) if lean else None,
        _note_on_experts(config),
        _note_on_idle_gpus(config, processes),
        _note_on_unusable_gpu(config),
        _note_on_emulated_bf16(config),
        _note_on_missing_kernels(config),
        note_on_date(tokenizer, config.prompt),
        f"{short.sentence}: {short.remedy}" if short is not None else None,
        checkpoint_note(config, resolve_device(config.model.device), processes),
        # The first process alone writes.
        disk_note(config, folder or Path(config.output.folder or RUNS)) if is_first_process() else None,
    ]
    of_settings = notes(config, prepared=is_prepared(config.data.source))
    said = [*of_settings, *suite.notes(), *note_on_processes(config, processes), *dropped]
    return said + [note for note in conditional if note]


def _with_stored_bits(config: Config) -> Config:
    """``config`` with the ``model.quantization`` that the model's files are in, which need not be asked for."""
    if config.model.name == EMBEDDED_NAME:  # whole, and perhaps not fetched yet
        return config
    stored = stored_quantisation(load_model_config(config.model).to_dict())
    refuse_untrainable(config.model, stored)
    if stored == "none":
        return config
    model = config.model.model_copy(update={"quantization": stored})
    quantisation_settings(with_dtype(model))  # is bitsandbytes here?
    return config.model_copy(update={"model": model})


def _with_steps(config: Config, problems: int) -> Config:
    """``config`` with the steps that ``training.epochs`` comes to, where that is set."""
    if config.training.epochs is None:
        return config
    passes = config.training.epochs * problems / config.rollout.prompts_per_step
    if passes > sys.maxsize:
        raise ConfigError(f"training.epochs is {config.training.epochs:g}, which is more steps than can be counted: lower it")
    steps = max(1, math.ceil(round(passes, 9)))  # 1.1 x 100 / 10 is a little above 11
    training = config.training.model_copy(update={"steps": steps, "epochs": None})
    return Config(**{name: getattr(config, name) for name in type(config).model_fields} | {"training": training})


def _note_on_experts(config: Config) -> str | None:
    if config.model.lora is None or config.model.lora.target_modules != "all-linear" or not leaves_experts(config.model):
        return None
    return (
        f"model.lora.target_modules=all-linear leaves the experts of {config.model.name} as they are, which are no linear layers: the "
        "adapter goes on the layers that all tokens pass through."
    )


def _note_on_idle_gpus(config: Config, processes: int) -> str | None:
    gpus = torch.cuda.device_count() if resolve_device(config.model.device).type == "cuda" else 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if gpus <= here or config.rollout.engine == "vllm" or config.model.device.startswith("cuda:"):
        return None
    using = "one is" if here == 1 else f"{here} are"
    takes = f"--num-processes {gpus} takes all of them."
    if "RANK" in os.environ and LAUNCHER not in os.environ:
        takes = "torchrun's --nproc-per-node, --num_processes of accelerate launch or Slurm's --ntasks-per-node takes more."
    return f"this machine has {gpus} GPUs, and {using} used: {takes}"


def _note_on_unusable_gpu(config: Config) -> str | None:
    """Of a GPU that ``model.device: auto`` passes over: PyTorch's build is for CPUs, or for a newer driver."""
    if config.model.device != "auto" or torch.cuda.is_available() or not is_first_process() or (gpu := present_gpu()) is None:
        return None
    return (
        f"this machine has a GPU ({gpu[0]}), but this PyTorch ({torch.__version__}) cannot use it, and the run takes the CPU: install "
        "a build of PyTorch for CUDA that the GPU's driver is new enough for."
    )


def _note_on_emulated_bf16(config: Config) -> str | None:
    if resolve_device(config.model.device).type != "cuda" or with_dtype(config.model).dtype != "bfloat16":
        return None
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    return "this GPU has no bfloat16, which PyTorch emulates on it: model.dtype=float16 is for such GPUs."


def _note_on_missing_kernels(config: Config) -> str | None:
    if resolve_device(config.model.device).type != "cpu" or not is_first_process() or not (native := kernels()).failed:
        return None
    said = (
        f"native kernels: {native.description}. PyTorch's operations take their place, with which sampling and learning on a CPU take "
        "longer"
    )
    missing = native.description.startswith("no C compiler")
    return said + (": a C compiler makes the kernels (Debian and Ubuntu: apt install gcc)." if missing else ".")


def _fitting(
    problems: Sequence[Problem], render_one: Render, limit: int, config: Config, which: str, dropped: list[str],
    start_together: StartTogether | None,
) -> LazyPrompts:  # fmt: skip
    """The problems whose prompts have at most ``limit`` tokens, as lazy prompts.

    Raises DataError for one that is longer (or, with ``data.on_long_prompt`` drop, where none is left). A prompt with an
    environment needs a reset of it, or a run of the agent's program: each is only measured when it is rendered, unless long ones
    are to be dropped.
    """

    def render_short(problem: Problem) -> Prompt:
        ((prompt,), _) = drop_long_prompts([render_one(problem)], limit, "error")
        return prompt

    if not problems:
        return LazyPrompts(problems, render_one)
    if config.rollout.environment is not None and config.data.on_long_prompt == "error":
        return LazyPrompts(problems, render_short, start_together)
    everything = LazyPrompts(problems, render_one, start_together)
    # What an environment says at the start may be of any length.
    surely_fits = _length_bound(everything, limit) if config.rollout.environment is None else lambda problem: False
    suspects = [index for index, problem in enumerate(problems) if not surely_fits(problem)]
    long = {index for index, prompt in zip(suspects, everything.take(suspects), strict=True) if len(prompt.token_ids) > limit}
    if not long:
        return everything
    if config.data.on_long_prompt == "error" or len(long) == len(problems):
        drop_long_prompts(everything.take(suspects), limit, config.data.on_long_prompt)
    dropped.append(
        f"{len(long):,} of {len(problems):,} {which} prompts are longer than {limit} tokens and were dropped "
        "(data.on_long_prompt=drop)."
    )
    return LazyPrompts([problem for index, problem in enumerate(problems) if index not in long], render_one, start_together)


def _length_bound(prompts: LazyPrompts, limit: int) -> Callable[[Problem], bool]:
    """A test that is quick and never wrong when it says yes: this problem's prompt has at most ``limit`` tokens.

    A token stands for at least one byte, so a prompt has no more tokens than bytes; and an ASCII question adds only its own
    length to what the template adds to the first one. A no means only that one has to render and count.
    """
    first = prompts.problems[0]
    if not isinstance(first.question, str):
        return lambda problem: False
    overhead = len(prompts[0].text.encode()) - len(first.question.strip().encode()) + 16

    def surely_fits(problem: Problem) -> bool:
        question = problem.question
        return isinstance(question, str) and question.isascii() and len(question) + overhead <= limit

    return surely_fits
