"""The ways of dividing weights and the optimiser's state among processes; ``distributed.sharding`` says what each has to offer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from groupwise.config.schema import Config
from groupwise.distributed import World
from groupwise.distributed.open import world_size
from groupwise.distributed.sharding import Sharding, chosen_sharding
from groupwise.errors import ConfigError
from groupwise.models.decoder import MergedDecoder
from groupwise.models.load import resolve_device
from groupwise.models.scorer import Scorer
from groupwise.training.sharding.divided import AdapterOnDivided
from groupwise.training.sharding.replicas import Replicas, with_whole_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from groupwise.training.sharding.fsdp2 import FSDP2
    from groupwise.training.sharding.zero import Zero

__all__ = ["Replicas", "Sharding", "check_sharding", "loading_device", "make_sharding", "with_whole_weights"]


def check_sharding(config: Config, hf_config: PretrainedConfig, processes: int | None = None) -> None:
    """Raise ConfigError for a run that cannot be divided as it is asked to be; before any weights are read.

    ``processes``: how many the run would have, where they have not been started; by itself as many as the launcher started.
    """
    count = processes or world_size()
    if count > 1 and config.model.device.startswith("cuda:"):
        raise ConfigError(
            f"model.device is {config.model.device!r}, but each of the {count} processes needs a GPU of its own: use auto, and choose GPUs "
            "by CUDA_VISIBLE_DEVICES"
        )
    chosen = chosen_sharding(config.training.sharding, count)
    if chosen == "fsdp2":
        from groupwise.training.sharding.fsdp2 import check_fsdp2

        check_fsdp2(config, hf_config)
    elif chosen != "none":
        from groupwise.training.sharding.zero import check_zero

        check_zero(config, hf_config, chosen)


def loading_device(config: Config, world: World) -> torch.device | None:
    """Where the weights are read to: not the GPU, where each process shall only hold a part. None: where they are used.

    Where they are divided the first process alone reads them, and hands each its parts; the others have the meta device. An adapter
    begins with random numbers, which all make alike, on its base's device: there all read.
    """
    if chosen_sharding(config.training.sharding, world.size) not in ("fsdp2", "zero3"):
        return None
    return torch.device("cpu" if world.is_first or config.model.lora is not None else "meta")


def make_sharding(config: Config, world: World, scorer: Scorer) -> Sharding:
    """The way that the settings, or the launcher's configuration, ask for; the policy's weights are divided by it here and now.

    For all processes at once.
    """
    chosen = chosen_sharding(config.training.sharding, world.size)
    if chosen == "none":
        return Replicas(scorer, world)
    divided: FSDP2 | Zero
    if chosen == "fsdp2":
        from groupwise.training.sharding.fsdp2 import FSDP2

        divided = FSDP2(scorer, world, config, resolve_device(config.model.device).type)
    else:
        from groupwise.training.sharding.zero import Zero

        divided = Zero(scorer, world, config, chosen, resolve_device(config.model.device))
    return AdapterOnDivided(scorer, world, divided) if isinstance(scorer, MergedDecoder) else divided
