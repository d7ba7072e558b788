"""Settings that would do nothing beside the others: a config that has one is refused, so that nobody waits for an effect that cannot come.

Within ``algorithm`` the sections' types say it already; these rules look at several sections. What a program may well set for any recipe
(a smaller held-out set, no warm start, an interval longer than a short run) gets a note instead: ``combinations``.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from pydantic import BaseModel

from groupwise.config.objective import OwnLoss
from groupwise.config.section import shown

if TYPE_CHECKING:
    from groupwise.config.schema import Config

__all__ = ["INERT", "chosen", "without_effect"]

INERT = "inert"
"""pydantic's type of error for them."""


def chosen(section: BaseModel, *names: str) -> list[str]:
    """The names among ``names`` that were set to something other than their default."""
    fields = type(section).model_fields
    return [
        name
        for name in names
        if name in section.model_fields_set and getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]


def without_effect(config: Config) -> dict[str, str]:
    """The settings that were written and do nothing in this run, each with a sentence that says so."""
    out = {}
    for place, names, reason, remedy in _rules(config):
        section: BaseModel = attrgetter(place)(config)
        for name in chosen(section, *names):
            value = getattr(section, name)
            told = "set" if isinstance(value, BaseModel) else shown(value)
            out[f"{place}.{name}"] = f"{place}.{name} is {told}, but {reason}: leave it out, or {remedy}"
    return out


def _rules(config: Config) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """A section, settings of it that do nothing in this run, why, and what would make them act."""
    data, algorithm, output = config.data, config.algorithm, config.output
    if data.source == "arithmetic" and data.eval_source in (None, "arithmetic"):
        columns = ("folder", "subset", "split", "prompt_column", "answer_column", "answer_format")
        yield "data", columns, "data.source is arithmetic, whose generator has no such thing", "name another source"
    if data.generates_held_out:
        yield "data", ("eval_split",), "the generator makes the held-out problems", "name another source of them"
    if not any(entry.isolate for entry in config.rewards.functions):
        yield "rewards", ("processes",), "no reward function has isolate", "set isolate in an entry of rewards.functions"
    if config.prompt.style != "chat":
        without = f"prompt.style is {config.prompt.style}, which asks no chat template"
        yield "prompt", ("template_arguments",), without, "set style to chat"
    if config.rollout.engine != "vllm":
        yield "rollout", ("vllm",), f"rollout.engine is {config.rollout.engine}", "set engine to vllm"
    elif config.rollout.vllm.url is None:
        yield "rollout.vllm", ("shared_folder",), "rollout.vllm.url is null, so the weights stay in this process", "set url"
    else:
        server = "rollout.vllm.url names a server, which goes by options of its own"
        options = ("gpu_memory_share", "cache_gib", "max_model_tokens", "eager", "sleep_mode")
        yield "rollout.vllm", options, server, "start the server with the option of that name (such as --gpu-memory-share)"
    if output.keep_best and not (output.checkpoint_every and config.evaluation.every):
        judged = "no checkpoint is judged (output.checkpoint_every, evaluation.every)"
        yield "output", ("keep_best",), judged, "set both"
    if config.rollout.ahead == 0:
        newest = "rollout.ahead is 0, so every batch is sampled by the newest weights"
        yield "algorithm", ("stale_samples",), newest, "set rollout.ahead"
    if config.weighs_nothing:
        does = "has the sampler in its ratio already" if config.clips_against_the_sampler else "weighs no sample"
        stale = f"algorithm.stale_samples is {algorithm.stale_samples}, which {does}"
        yield "algorithm", ("correction",), stale, "set stale_samples to decoupled"
    if config.optimizer.schedule == "constant":
        yield "optimizer", ("final_fraction",), "optimizer.schedule is constant", "set schedule to linear or cosine"
    own = isinstance(algorithm.loss, OwnLoss)  # which may need a reference without algorithm.kl
    if (algorithm.kl is None and not own) or config.model.lora is not None:
        none = "this run keeps no copy of the policy as its reference"
        yield "training", ("offload_reference",), none, "train all weights with algorithm.kl"
    if config.training.epochs is not None:
        counted = f"training.epochs is {config.training.epochs:g}, from which the steps are counted"
        yield "training", ("steps",), counted, "set training.epochs to null"
    if algorithm.advantage.type == "gdpo":
        by_function = "algorithm.advantage.type is gdpo, which never adds the functions' scores up as they are"
        yield "rewards", ("clip", "normalise"), by_function, "set it in an entry of rewards.functions"
    for name, users in (("project", ("wandb", "trackio")), ("offline", ("wandb",))):
        if not set(users) & set(output.trackers):
            services = " or ".join(users)
            yield "output", (name,), f"output.trackers does not name {services}", "add it there"
    if config.model.lora is None:
        yield "output", ("adapter_only",), "model.lora is null, so there is no adapter", "set model.lora"
    if config.model.device_map is None:
        yield "model", ("max_memory",), "model.device_map is null, so the model lies on one device", "set device_map"
    elif config.model.device != "cpu":  # which still decides the numbers of `dtype: auto` and the attention
        spread = f"model.device_map is {config.model.device_map}, which takes every device there is"
        yield "model", ("device",), spread, "limit what each is given with max_memory"
