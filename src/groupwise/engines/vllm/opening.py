"""From settings to a vLLM that samples: found wanting before any weights are read, where that is possible."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise import __version__
from groupwise.config.schema import RolloutConfig, VllmConfig
from groupwise.distributed import World
from groupwise.engines.vllm.client import Client
from groupwise.engines.vllm.protocol import PROTOCOL, Link, NotTrusted, Refused, Starting, Unreachable, shape_of
from groupwise.engines.vllm.versions import check_versions
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.engines.vllm.engine import VllmEngine
    from groupwise.models.load import Policy

__all__ = ["check_server", "check_vllm", "open_vllm_engine"]


def check_vllm(rollout: RolloutConfig, hf_config: Any, model: str) -> int | None:
    """Most tokens of prompt and completion together that vLLM takes; None where another engine samples, or vLLM is not up yet.

    Raises ConfigError where no server answers, or one of other versions, with another model, or that works for another run, or where vLLM
    in this process would not do.
    """
    if rollout.engine != "vllm":
        return None
    if rollout.vllm.url is None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "rollout.engine is vllm in the trainer's own process, which is for one process, but several were started: start a server "
                "(python -m groupwise.engines.vllm MODEL) and let rollout.vllm.url name it"
            )
        check_versions()
        return None
    return _check_server(_client(rollout.vllm), hf_config, model)


def _check_server(client: Client, hf_config: Any, model: str) -> int:
    try:
        found = check_server(client, hf_config, model)
    except Starting as error:
        raise ConfigError(f"{error}: start the run when it says that it samples") from error
    except Unreachable as error:
        from groupwise.models.embedded import EMBEDDED_NAME, embedded_folder

        model = str(embedded_folder()) if model == EMBEDDED_NAME else model
        raise ConfigError(
            f"rollout.vllm.url is {client.where!r}, where nobody answers ({error}): start a server in vLLM's environment with "
            f"`python -m groupwise.engines.vllm {model}`, or sample here with rollout.engine=auto"
        ) from error
    except NotTrusted as stranger:
        raise ConfigError(str(stranger)) from stranger
    except Refused as refused:
        raise ConfigError(
            f"rollout.vllm.url is {client.where!r}, but {refused}: name a sampling server of groupwise"
        ) from refused
    if found["used_by"] and os.environ.get("RANK", "0") == "0":  # the others might see the first one, which was quicker
        raise ConfigError(
            f"the server at {client.where} works for {found['used_by']}, and a server samples for one run at a time: end that run, or "
            "start another server, with --port, and let rollout.vllm.url name it"
        )
    return int(found["max_model_tokens"])


def check_server(link: Link, hf_config: Any, model: str) -> dict[str, Any]:
    """What the server says of itself. Raises ConfigError where it speaks another protocol or has another model, and as `Link.hello`."""
    found = link.hello()
    if found.get("protocol") != PROTOCOL:
        raise ConfigError(
            f"the server at {link.where} is groupwise {found.get('groupwise')} and speaks protocol {found.get('protocol')}, but this is "
            f"groupwise {__version__} with protocol {PROTOCOL}: install the same groupwise on both sides"
        )
    ours, theirs = shape_of(hf_config), found["shape"]
    other = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    if other:
        told = ", ".join(f"{name} {theirs[name]}, not {ours[name]}" for name in other)
        raise ConfigError(
            f"the server at {link.where} has the model {found['model']!r} ({told}), but {model} is trained: start it with that model"
        )
    return found


def open_vllm_engine(
    policy: Policy,
    rollout: RolloutConfig,
    world: World | None = None,
    collect: Callable[[Policy], Policy | None] = lambda policy: policy,
) -> VllmEngine:
    """Find the server, or start vLLM in this process; push the weights, and see that they arrived. ``collect``: see `VllmEngine`.

    Raises ConfigError, ModelError or TrainingError where that cannot be.
    """
    from groupwise.engines.vllm.engine import VllmEngine
    from groupwise.engines.vllm.weights import check_pushable

    check_pushable(policy.model, policy.name)
    check_vllm(rollout, policy.model.config, policy.name)
    settings = rollout.vllm
    link = _client(settings) if settings.url is not None else _own(policy, rollout)
    return VllmEngine(
        policy, link, world, bucket_bytes=settings.bucket_mib * 2**20, patience_s=settings.patience_s, collect=collect
    )


def _client(settings: VllmConfig) -> Client:
    assert settings.url is not None
    shared = None if settings.shared_folder is None else Path(settings.shared_folder)
    return Client(settings.url, patience_s=settings.patience_s, shared=shared)


def _own(policy: Policy, rollout: RolloutConfig) -> Any:
    """vLLM in this process. It loads the same folder, whose weights are then replaced."""
    from groupwise.engines.vllm.backend import VllmBackend, VllmOptions
    from groupwise.engines.vllm.service import Service

    settings = rollout.vllm
    options = VllmOptions(
        model=str(policy.model.config._name_or_path), dtype=str(policy.model.dtype).removeprefix("torch."),
        max_model_tokens=policy.context_length, max_sequences=rollout.max_concurrent_sequences, memory_share=settings.gpu_memory_share,
        cache_gib=settings.cache_gib, eager=settings.eager,
    )  # fmt: skip
    return Service(VllmBackend(options, own_process=False))
