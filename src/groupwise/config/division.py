"""What does not go with dividing a model among processes (``training.sharding``): for the trainer, and for a plan, which needs no torch."""

from __future__ import annotations

from groupwise.config.schema import Config
from groupwise.errors import ConfigError

__all__ = ["refuse_undividable"]


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
        (config.algorithm.needs_values and "algorithm.advantage.type=gae", "use training.sharding=fsdp2 or none"),
    ]  # fmt: skip
