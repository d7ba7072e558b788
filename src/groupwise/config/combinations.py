"""Combinations of settings: notes on those with a surprising effect, or with none where a refusal would be in the way (``inert`` has the
others); and refusal of what cannot be trained, sampled by vLLM, divided among processes (``training.sharding``) or held by the
model's context, for the trainer and for a plan without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from groupwise.config.inert import chosen
from groupwise.config.objective import GroupAdvantage, OwnAdvantage
from groupwise.config.schema import Config, ModelConfig, RolloutConfig
from groupwise.config.section import shown
from groupwise.errors import ConfigError

__all__ = [
    "note_on_processes",
    "notes",
    "prompt_limit",
    "refuse_short_critic",
    "refuse_undividable",
    "refuse_untrainable",
    "refuse_with_vllm",
    "unsampled",
    "unsaved_work",
]

_LORA_RATE = 1e-5
"""Learning rate below which an adapter hardly learns."""
_MANY_STEPS = 100
_MANY_TOKENS = 5_000_000
"""Sampled in a run: an hour or more on a small GPU or a CPU."""


def unsaved_work(config: Config) -> str | None:
    """How much a run would lose to a kill or a crash, in words; None where it saves itself, or is over soon."""
    steps, rollout = config.training.steps, config.rollout
    tokens = steps * config.completions_per_step * rollout.max_completion_tokens
    if config.output.checkpoint_every or (steps <= _MANY_STEPS and tokens <= _MANY_TOKENS):
        return None
    return (
        f"output.checkpoint_every is 0 in a run of {steps} steps, which may sample {tokens:,} tokens: a kill, a crash "
        "or a power cut takes all of it"
    )


def notes(config: Config, *, prepared: bool = False) -> list[str]:
    """One sentence per setting that has no effect in this run, or a side effect its author may not expect.

    A setting left at its default is not reported as without effect: nobody asked for it. ``prepared``: whether ``data.source`` is a
    prepared folder, which only a look at the disk tells.
    """
    parts = (_algorithm, _sampling, partial(_data, prepared=prepared), _rewards, _optimizer, _evaluation, _output)
    return [note for part in parts for note in part(config)]


def note_on_processes(config: Config, processes: int) -> list[str]:
    """A sentence where some of the processes wait for others in every step, since prompts are assigned whole."""
    prompts = config.rollout.prompts_per_step
    most = -(-prompts // processes)
    waiting = 1 - prompts / (most * processes)
    if waiting == 0:
        return []
    return [
        f"rollout.prompts_per_step={prompts} does not divide among {processes} processes: the busiest has {most}, and {waiting:.0%} of "
        f"their time is waiting. A multiple of {processes} wastes nothing."
    ]


def _without_effect(path: str, value: object, reason: str) -> str:
    return f"{path}={shown(value)} has no effect here: {reason}."


def _algorithm(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.updates_per_batch == 1 and not config.clips_against_the_sampler:
        stale = config.rollout.ahead > 0
        once = "with algorithm.updates_per_batch 1 every batch is learnt from once, " + (
            "and the ratio is to the weights before that, so it is 1 and nothing is clipped: algorithm.stale_samples=behaviour makes it "
            "that to the sampler"
            if stale
            else "and the ratio is to the very weights that learn from it, so it is 1 and nothing is clipped"
        )
        # A note alone: a published recipe's clip is kept for runs with more updates.
        clipping = [name for name in _CLIPPING if name in type(algorithm.loss).model_fields]
        for name in chosen(algorithm.loss, *clipping):
            yield _without_effect(f"algorithm.loss.{name}", getattr(algorithm.loss, name), once)
        if stale and algorithm.loss.type in ("vespo", "topr", "dppo", "cispo"):
            yield (
                f"algorithm.loss.type={algorithm.loss.type} weights samples by their ratio, which is 1 here however old they are, since it "
                "is to the weights before a batch's first update: set algorithm.stale_samples=behaviour, or updates_per_batch above 1."
            )
    if algorithm.value is not None and algorithm.updates_per_batch == 1:
        unmoved = "with algorithm.updates_per_batch 1 the value has not moved yet when its loss is computed"
        if chosen(algorithm.value, "clip"):
            yield _without_effect("algorithm.value.clip", algorithm.value.clip, unmoved)
    value = algorithm.value
    if value is not None and value.critic == "shared" and not value.trains_trunk and chosen(value, "loss_weight"):
        divided_out = "without algorithm.value.trains_trunk the value's head alone learns from it, and AdamW divides it out"
        yield _without_effect("algorithm.value.loss_weight", value.loss_weight, divided_out)
    if algorithm.kl is not None and algorithm.kl.placement == "loss" and algorithm.kl.estimator == "k1":
        yield "algorithm.kl.estimator=k1 in the loss pulls nowhere: its gradient averages to 0, while k3 and k2 pull to the reference."
    divided = isinstance(algorithm.advantage, GroupAdvantage) and algorithm.advantage.scale == "group_std"
    if divided and algorithm.kl is not None and algorithm.kl.placement == "reward":
        yield (
            "algorithm.kl.placement=reward with algorithm.advantage.scale=group_std: where a group's completions all scored the "
            "same, the KL alone is divided by its own deviation, so that algorithm.kl.beta cancels out there: set "
            "algorithm.advantage.scale to batch_std or none."
        )
    if isinstance(algorithm.advantage, OwnAdvantage) and algorithm.kl is not None and algorithm.kl.placement == "token_reward":
        yield (
            f"algorithm.kl.placement=token_reward acts only if {algorithm.advantage.type} takes inputs.penalties_T off the "
            "tokens' rewards: an advantage of your own is handed beta times the KL of each."
        )
    if algorithm.kl is not None and config.model.lora is not None and config.warm_start.steps:
        yield (
            "algorithm.kl pulls towards the model without its adapter, and so away from what warm_start teaches the adapter: set "
            "algorithm.kl=null, or merge a warm-started adapter and train another on it."
        )
    kl, steps = algorithm.kl, config.training.steps
    if kl is not None and kl.reference_every and 0 < steps <= kl.reference_every:
        yield _without_effect("algorithm.kl.reference_every", kl.reference_every, f"the run has only {steps} steps")
    if config.training.steps == 0:
        yield "training.steps is 0: there is no GRPO step in this run, only evaluation and the warm start if it has steps."


_CLIPPING = ("epsilon", "epsilon_high", "dual_clip", "threshold")
"""Settings of a loss that act once the ratio has left 1."""


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    cut = [f"rollout.top_p={rollout.top_p}"] if rollout.top_p < 1 else []
    cut += [f"rollout.top_k={rollout.top_k}"] if rollout.top_k is not None else []
    if cut:
        yield (
            f"{' and '.join(cut)} cuts tokens out of the sampled distribution, while the loss scores the full one: "
            "the gradient is biased towards what was left in."
        )
    if rollout.refill_rounds and config.algorithm.flat_groups_teach:
        yield (
            f"rollout.refill_rounds={rollout.refill_rounds} replaces groups whose rewards are all the same, but with this algorithm they "
            "teach too: it compares more than the summed rewards within a group."
        )
    elif rollout.refill_rounds and isinstance(config.algorithm.advantage, OwnAdvantage):
        yield (
            f"rollout.refill_rounds={rollout.refill_rounds} replaces groups whose rewards are all the same, but they may teach "
            f"too, where {config.algorithm.advantage.type} compares more than the summed rewards within a group."
        )
    if rollout.command is not None and config.prompt.system == "auto":
        yield (
            "prompt.system=auto gives the agent's conversations a system prompt that asks for answers in the data's form, where they "
            "bring none of their own: set prompt.system=none to leave them as they are."
        )
    if "sampled" in config.evaluation.modes and rollout.temperature != config.evaluation.temperature:
        yield (
            f"rollout.temperature={rollout.temperature} differs from evaluation.temperature={config.evaluation.temperature}: "
            "the policy is trained at one temperature and judged at another."
        )


def _data(config: Config, prepared: bool) -> Iterator[str]:
    data = config.data
    # Notes alone: a script that makes any recipe's run small sets them whatever its source is.
    if data.source != "arithmetic" and data.eval_source != "arithmetic":
        for name in chosen(data.arithmetic, *type(data.arithmetic).model_fields):
            yield _without_effect(f"data.arithmetic.{name}", getattr(data.arithmetic, name), f"data.source is {data.source}")
    if prepared and data.eval_source is None:
        done = ("holdout", "split_seed", "on_bad_answer", "prompt_column", "answer_column", "answer_format", "subset")
        for name in chosen(data, *done):
            yield _without_effect(
                f"data.{name}", getattr(data, name), "data.source is a prepared folder, which is read and split already"
            )
    elif not data.holds_out:
        for name in chosen(data, "holdout"):
            named = "data.eval_source" if data.eval_source is not None else "data.eval_split"
            yield _without_effect(f"data.{name}", data.holdout, f"held-out problems come from {named}")
    elif data.holdout == 0:
        yield "data.holdout is 0, so no problems are held out: this run is not evaluated."
    elif config.evaluation.problems is not None and config.evaluation.problems > data.holdout:
        yield (
            f"evaluation.problems={config.evaluation.problems} is more than data.holdout={data.holdout}: "
            f"evaluation uses {data.holdout} problems."
        )


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if config.model.dtype == "float32" or config.model.lora is not None:
        whose = "float32 weights are" if config.model.lora is None else "an adapter's weights are float32, and"
        # A note alone: the dtype is the machine's to say, and the recipe's precision is for others.
        for name in chosen(optimizer, "precision"):
            if optimizer.precision != "masters-8bit":
                yield _without_effect(f"optimizer.{name}", optimizer.precision, f"{whose} their own master copy")
    elif optimizer.precision == "pure" and optimizer.learning_rate < 1e-5:
        yield (
            f"optimizer.precision=pure with bfloat16 weights and optimizer.learning_rate={optimizer.learning_rate:g}: "
            "most updates are smaller than bfloat16 can hold and are rounded away."
        )
    if optimizer.weight_decay == 0:  # a note alone: transformers divides parameters so whatever the decay is
        for name in chosen(optimizer, "decay"):
            yield _without_effect(f"optimizer.{name}", optimizer.decay, "optimizer.weight_decay is 0")
    if config.model.lora is not None and optimizer.learning_rate < _LORA_RATE:
        yield (
            f"optimizer.learning_rate={optimizer.learning_rate:g} is a rate for all weights: an adapter (model.lora) wants one about ten "
            "times higher, 1e-5 to 1e-4 for models of 0.5B and more."
        )
    if config.warm_start.steps == 0:  # a note alone: 0 is the switch of a warm start that is otherwise described
        for name in chosen(config.warm_start, "examples_per_step", "learning_rate"):
            yield _without_effect(f"warm_start.{name}", getattr(config.warm_start, name), "warm_start.steps is 0")


def unsampled(config: Config) -> Iterator[str]:
    """A note alone: modes are chosen for one evaluation, and a trial sets its temperature."""
    evaluation = config.evaluation
    if "sampled" not in evaluation.modes:
        for name in chosen(evaluation, "temperature", "seed", "samples"):
            yield _without_effect(f"evaluation.{name}", getattr(evaluation, name), "evaluation.modes has no sampled mode")


def _evaluation(config: Config) -> Iterator[str]:
    evaluation = config.evaluation
    yield from unsampled(config)
    # A note alone, as for checkpoints: the interval is the recipe's, and the run was cut short for a try.
    if evaluation.every > config.training.steps > 0:
        yield _without_effect("evaluation.every", evaluation.every, f"the run has only {config.training.steps} steps")


def _rewards(config: Config) -> Iterator[str]:
    advantage, kl = config.algorithm.advantage, config.algorithm.kl
    divided = isinstance(advantage, GroupAdvantage) and advantage.scale == "group_std"
    if divided and (kl is None or kl.placement == "loss") and config.rewards.clip is None:
        for name in chosen(config.rewards, "normalise"):  # a note alone: what is logged changes
            reason = "algorithm.advantage.scale is group_std, so the size of a whole reward cancels out anyway"
            yield _without_effect(f"rewards.{name}", config.rewards.normalise, reason)
    for i, entry in enumerate(config.rewards.functions):
        if entry.isolate and entry.timeout_s is None and config.rewards.timeout_s is None:
            yield f"rewards.functions[{i}] is isolated but has no time limit: one that hangs holds up the run for ever."


def _output(config: Config) -> Iterator[str]:
    output = config.output
    if output.log_tokens > output.log_completions:
        for name in chosen(output, "log_tokens"):  # a note alone: it acts as far as groups are recorded
            yield _without_effect(f"output.{name}", output.log_tokens, f"output.log_completions is {output.log_completions}")
    if unsaved := unsaved_work(config):
        yield f"{unsaved}. Set output.checkpoint_every."
    if output.checkpoint_every == 0:  # a note alone, for the same reason; and a stopped run writes one checkpoint all the same
        for name in chosen(output, "keep_checkpoints"):
            yield _without_effect(f"output.{name}", output.keep_checkpoints, "output.checkpoint_every is 0")
    elif output.checkpoint_every > config.training.steps:
        yield _without_effect(
            "output.checkpoint_every", output.checkpoint_every, f"the run has only {config.training.steps} steps"
        )


def refuse_untrainable(model: ModelConfig, stored: str = "none") -> None:
    """Raise ConfigError for weights that cannot be trained: quantised ones without an adapter or not by bitsandbytes, and a model in
    pieces. ``stored``: how the model's files are quantised (``stored_quantisation``)."""
    if model.device_map is not None:
        raise ConfigError(
            f"model.device_map is {model.device_map}, which lays one model over several devices for eval and generate, but training needs "
            "it whole on each: leave it out, and use model.quantization=4bit with model.lora, or several processes with training.sharding"
        )
    if model.quantization != "none" and model.lora is None:
        raise ConfigError(
            f"model.quantization is {model.quantization} and model.lora is null, but weights stored in so few bits cannot be trained "
            "themselves: add 'model.lora={rank: 16, alpha: 32}', or use model.quantization=none"
        )
    if stored == "none":
        return
    if stored not in ("4bit", "8bit"):
        raise ConfigError(
            f"the weights of {model.name!r} are quantised by {stored}, and of quantised weights only those of bitsandbytes go under an "
            "adapter: name the model that it was made of"
        )
    if model.quantization not in ("none", stored):
        raise ConfigError(
            f"model.quantization is {model.quantization}, but the weights of {model.name!r} are quantised already ({stored}): leave it out"
        )
    if model.lora is None:
        raise ConfigError(
            f"the weights of {model.name!r} are quantised ({stored}) and model.lora is null, but weights stored in so few bits cannot be "
            "trained themselves: add 'model.lora={rank: 16, alpha: 32}', or name the model that it was made of"
        )


def refuse_with_vllm(rollout: RolloutConfig, processes: int, quantization: str = "none") -> None:
    """Raise ConfigError for what vLLM cannot sample: a base of that ``quantization``, or several processes without a server."""
    if rollout.engine != "vllm":
        return
    if quantization != "none":
        raise ConfigError(
            f"rollout.engine is vllm, which is sent plain weights, but model.quantization is {quantization}: use "
            "rollout.engine=auto"
        )
    if rollout.vllm.url is None and processes > 1:
        raise ConfigError(
            f"rollout.engine is vllm in the trainer's own process, which is for one process, but there are {processes}: start a "
            "server (python -m groupwise.engines.vllm MODEL) and let rollout.vllm.url name it"
        )


def prompt_limit(config: Config, context: int, completion_tokens: int, setting: str, by_vllm: bool = False) -> int:
    """Longest prompt in tokens that leaves room for a completion, or that ``data.max_prompt_tokens`` allows. ``setting``: which one
    says ``completion_tokens``. ``by_vllm``: whether ``context`` is what vLLM takes, and not the model's own.

    Raises ConfigError where no prompt at all could stand beside the completion.
    """
    room = context - completion_tokens
    if room < 1 and by_vllm:
        own = "--max-model-tokens" if config.rollout.vllm.url else "rollout.vllm.max_model_tokens"
        raise ConfigError(
            f"{setting} is {completion_tokens}, but vLLM takes {context} tokens of prompt and completion ({own}): start it with more, "
            "or lower the limit"
        )
    if room < 1:
        raise ConfigError(
            f"{setting} is {completion_tokens}, but the context of {config.model.name} is {context} tokens, prompt included: "
            "lower it"
        )
    return min(room, config.data.max_prompt_tokens or room)


def refuse_short_critic(config: Config, context: int, own_context: int) -> None:
    """Raise ConfigError for a critic of another name whose context (``own_context``) is too short for what the policy (``context``) may
    read and write, both in tokens."""
    value, completion = config.algorithm.value, config.rollout.max_completion_tokens
    longest = min(context, (config.data.max_prompt_tokens or context) + completion)
    if value is not None and own_context < longest:
        room = own_context - completion
        remedy = (
            f"set data.max_prompt_tokens to {room} or less"
            if room > 0
            else f"lower rollout.max_completion_tokens below {own_context}"
        )
        raise ConfigError(
            f"algorithm.value.critic is {value.critic!r} with a context of {own_context} tokens, but prompt and completion may have "
            f"{longest}: {remedy}, or name another critic"
        )


def refuse_undividable(config: Config, way: str, uncovered: str | None) -> None:
    """Raise ConfigError for settings that the trainer cannot divide in this way, whatever is installed.

    ``way``: ``none``, which goes with everything, ``fsdp2``, ``zero2`` or ``zero3``. ``uncovered``: why the lean decoder does
    not compute the model (``models/families``), since its layers alone are divided; None where it does.
    """
    if way == "none":
        return
    whole = config.model.lora is None  # what learns; an adapter's states lie on each process as they do where nothing is divided
    own = _against_fsdp2(config) if way == "fsdp2" else _against_zero(config)
    for reason, remedy in (
        *_against_adapters(config, way),
        (uncovered is not None and f"this model ({uncovered})",
         "only models that the lean decoder computes are divided: use training.sharding=none"),
        (config.rollout.engine_is_yours and f"rollout.engine={config.rollout.engine}", "it reads the whole model: use auto or builtin"),
        (config.rollout.engine == "transformers" and "rollout.engine=transformers", "use auto or builtin"),
        (whole and config.optimizer.offload and "optimizer.offload", "use more processes, or training.sharding=none"),
        (config.training.offload_reference and "training.offload_reference", "leave it out: use more processes where memory is short"),
        *own,
    ):  # fmt: skip
        if reason:
            raise ConfigError(f"training.sharding is {way}, which does not go with {reason}: {remedy}")


def _against_adapters(config: Config, way: str) -> list[tuple[str | bool, str]]:
    """What does not go with dividing an adapter's base."""
    lora, quantisation = config.model.lora, config.model.quantization
    if lora is None:
        return []
    return [
        (way == "zero2" and "model.lora", "it would divide the adapter's states alone, which are small: use zero3 or fsdp2, which divide "
         "the base, or none"),
        (lora.dropout > 0 and f"model.lora.dropout={lora.dropout}", "set it to 0, or use training.sharding=none"),
        (quantisation != "none" and f"model.quantization={quantisation}",
         "a base is divided in model.dtype: leave the quantisation out, or use training.sharding=none"),
    ]  # fmt: skip


def _against_fsdp2(config: Config) -> list[tuple[str | bool, str]]:
    """What FSDP2 alone does not go with, or False where the settings have none of it; and a remedy."""
    value, precision = config.algorithm.value, config.optimizer.precision
    return [
        (config.model.lora is None and precision == "masters-8bit" and "optimizer.precision=masters-8bit",
         "use masters, which are divided, or training.sharding=none"),
        (value is not None and value.critic != "shared" and f"algorithm.value.critic={value.critic}",
         "use a shared one, or training.sharding=none"),
    ]  # fmt: skip


def _against_zero(config: Config) -> list[tuple[str | bool, str]]:
    """The same of DeepSpeed's stages."""
    precision = config.optimizer.precision
    return [
        (config.model.dtype == "float16" and "model.dtype=float16", "use bfloat16"),
        (config.model.lora is None and precision != "masters" and f"optimizer.precision={precision}",
         "DeepSpeed steps on fp32 masters, divided among the processes: use masters, or training.sharding=none"),
        (config.algorithm.needs_values and f"algorithm.advantage.type={config.algorithm.advantage.type}",
         "use training.sharding=fsdp2 or none"),
    ]  # fmt: skip
