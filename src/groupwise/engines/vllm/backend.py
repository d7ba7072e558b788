"""vLLM as the ``Backend`` of a sampling service, and what runs inside its workers. vLLM itself is imported only where it is started.

One thread owns the engine and steps it; calls from other threads hand it their requests, so that completions for several trainer
processes are decoded in one batch. vLLM mixes `GroupwiseWorker` into its own worker class (``worker_extension_cls``).
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm.protocol import Broken, Job, Refused, check_versions, found_vllm, shape_of
from groupwise.engines.vllm.transfer import Adapter, Named, Source, device_id, read
from groupwise.engines.vllm.wire import nccl_version, opened
from groupwise.errors import ModelError

__all__ = ["EXTENSION", "GroupwiseWorker", "VllmBackend", "VllmOptions"]

EXTENSION = "groupwise.engines.vllm.backend.GroupwiseWorker"


class GroupwiseWorker:
    """Methods that ``collective_rpc`` finds on every worker."""

    def groupwise_device(self) -> str:
        """Which GPU this worker computes on; empty on a CPU."""
        return device_id(torch.device(self.device))  # type: ignore[attr-defined]

    def groupwise_load(self, source: Source) -> dict[str, int]:
        """Replace the model's weights by those of ``source`` (names as in a checkpoint), and compare afterwards.

        vLLM's own reloading does the work: it fuses (q, k and v; gate and up), shards, and repacks for its kernels, into the memory
        that compiled graphs know. Returns how many of the model's parameters were ``compared`` with the files, bit for bit, and how
        many could not be (``repacked``, ``sharded``). Raises ValueError, naming it, for a parameter that no tensor filled, or that
        holds something else.
        """
        with opened(source, getattr(self, "rank", 0), torch.device(self.device)) as named:  # type: ignore[attr-defined]
            return self._load_and_compare(named)

    def _load_and_compare(self, source: Sequence[str] | Named) -> dict[str, int]:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        loaded: set[str] = set()
        original, sent = model.load_weights, set[str]()

        def named() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in read(source):
                sent.add(name)
                yield name, tensor

        def noting(weights: Iterator[tuple[str, Tensor]]) -> set[str]:
            loaded.update(original(weights) or ())
            return loaded

        model.load_weights = noting
        try:
            self.reload_weights(weights_iterator=named())  # type: ignore[attr-defined]
        finally:
            del model.load_weights
        missing = _missing(model, loaded, sent)
        if missing:
            raise ValueError(f"{len(missing)} tensors of vLLM's model were not among those sent, the first {missing[0]}")
        _pack_again(model)
        if self.parallel_config.world_size > 1:  # type: ignore[attr-defined]
            return {"compared": 0, "repacked": 0, "sharded": len(loaded)}
        return _compare(model, source)


def _missing(model: nn.Module, loaded: set[str], sent: set[str]) -> list[str]:
    """Parameters that no tensor went into; of those fused from several, the parts that did not come."""
    missing = {_plain_name(name) for name, _ in model.named_parameters()} - {_plain_name(name) for name in loaded}
    for name in loaded:
        head, _, suffix = name.rpartition(".")
        parent, _, whole = head.rpartition(".")
        parts = {f"{parent}.{part}.{suffix}" for part in _fusions(model).get(whole, ())}
        if parts & sent:
            missing |= parts - sent
    return sorted(missing)


def _plain_name(name: str) -> str:
    """As without the places that vLLM keeps for adapters."""
    return name.replace(".base_layer.", ".")


def _pack_again(model: nn.Module) -> None:
    """Pack the output head again. On CPUs vLLM 0.32 computes from packed copies of weights. The copy of an output head that shares its
    weight with the embedding is not renewed by reloading, which passes by layers without a tensor of their own: the old head would go on
    answering."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]


@torch.no_grad()
def _compare(model: nn.Module, source: Sequence[str] | Named) -> dict[str, int]:
    """Every parameter that is still in a checkpoint's form against what the source says of it."""
    parameters = {_plain_name(name): parameter for name, parameter in model.named_parameters()}
    fused = {part: (whole, place) for whole, parts in _fusions(model).items() for place, part in enumerate(parts)}
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, tensor in read(source):
        part = next((p for p in name.split(".") if p in fused), None)
        whole, place = fused[part] if part else ("", 0)
        target = name if part is None or name in parameters else name.replace(f".{part}.", f".{whole}.")
        if target in parameters and parameters[target].numel():
            pieces.setdefault(target, {})[place] = tensor
    compared = 0
    for name, by_place in pieces.items():
        expected, parameter = torch.cat([piece for _, piece in sorted(by_place.items())]), parameters[name]
        if parameter.dtype not in _PLAIN or expected.shape[1:] != parameter.shape[1:] or len(expected) > len(parameter):
            continue  # quantised or transposed
        if not torch.equal(expected.to(parameter.device, parameter.dtype), parameter[: len(expected)]):  # below it is padding
            raise ValueError(f"after loading, vLLM's parameter {name} does not hold what was sent")
        compared += 1
    return {"compared": compared, "repacked": len(parameters) - compared, "sharded": 0}


_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def _fusions(model: nn.Module) -> Mapping[str, Sequence[str]]:
    """vLLM's fused modules and the checkpoint's modules that they consist of, in order."""
    fused: Any = getattr(model, "packed_modules_mapping", {})
    return fused


_BEAT_S = 5.0


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM is started."""

    model: str
    revision: str | None = None
    """Of a model on the Hub."""
    trust_remote_code: bool = False
    dtype: str = "bfloat16"
    max_model_tokens: int | None = None
    """Prompt and completion together; by default the model's context."""
    max_sequences: int = 256
    memory_share: float = 0.3
    """Share of the GPU's memory, weights included (vLLM's ``gpu_memory_utilization``)."""
    cache_gib: float | None = None
    """Memory for keys and values, whatever the share."""
    tensor_parallel: int = 1
    eager: bool = False
    """Without compilation and CUDA graphs: up at once, and slower."""
    block_tokens: int | None = None
    """Tokens that a block of the prefix cache has; only whole blocks of a prompt are shared by its group."""
    adapter_rank: int | None = None
    """Largest rank of adapters that are sent alone; without it they are merged by the trainer."""
    sleeps: bool = False
    """On a GPU: memory is handed back on request, until the next weights come (vLLM's sleep mode)."""
    seed: int = 0


class VllmBackend:
    """Implements ``service.Backend`` over ``vllm.LLMEngine``."""

    def __init__(self, options: VllmOptions, *, own_process: bool) -> None:
        """``own_process``: let vLLM compute in a process of its own, as it does by default; else in this one.

        Raises ConfigError where the versions do not fit, ModelError where vLLM cannot start with this model.
        """
        check_versions()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if own_process else "0"
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        block = options.block_tokens or (
            32 if current_platform.is_cpu() else None
        )  # on CPUs vLLM takes 128: few prompts have that
        # vLLM 0.32 breaks down on CPUs where a prompt is cut for a step and its request has a seed ("CPU Generator does not use offset")
        more: dict[str, Any] = {"enable_chunked_prefill": False} if current_platform.is_cpu() else {}
        if options.sleeps and current_platform.is_sleep_mode_available():
            more["enable_sleep_mode"] = True
        self.sleeps = bool(more.get("enable_sleep_mode"))
        if options.adapter_rank is not None:
            more |= {"enable_lora": True, "max_lora_rank": options.adapter_rank, "max_loras": 1, "max_cpu_loras": 1}
        cache = None if options.cache_gib is None else int(options.cache_gib * 2**30)
        arguments = EngineArgs(
            model=options.model, revision=options.revision, trust_remote_code=options.trust_remote_code,
            dtype=options.dtype, max_model_len=options.max_model_tokens, max_num_seqs=options.max_sequences,
            gpu_memory_utilization=options.memory_share, kv_cache_memory_bytes=cache, enforce_eager=options.eager,
            tensor_parallel_size=options.tensor_parallel, block_size=block, seed=options.seed, enable_prefix_caching=True,
            logprobs_mode="processed_logprobs", generation_config="vllm", skip_tokenizer_init=True, disable_log_stats=True,
            worker_extension_cls=EXTENSION, **more,
        )  # fmt: skip
        try:
            self.engine = LLMEngine.from_engine_args(arguments)
        except Exception as error:  # whatever vLLM raises: it has no common base
            raise ModelError(f"vLLM cannot start with {options.model!r} ({_brief(error)}): see its own lines above") from error
        self.options = options
        self.devices: list[str] = self.engine.collective_rpc("groupwise_device")
        self._inbox: queue.SimpleQueue[_Call | _Load | _Sleep | None] = queue.SimpleQueue()
        self.broken = threading.Event()
        self._failed: BaseException | None = None
        self._steps = 0
        self._adapter = _Adapters()
        self._thread = threading.Thread(target=self._loop, name="groupwise-vllm", daemon=True)
        self._thread.start()

    @property
    def end(self) -> str:
        """How vLLM came to its end, as far as is known."""
        return "vLLM was ended" if self._failed is None else f"vLLM broke down ({_brief(self._failed)})"

    def about(self) -> dict[str, Any]:
        if self._failed is not None:
            raise Broken(self.end)
        config = self.engine.model_config
        return {
            "backend": " ".join(found_vllm() or ("vllm", "?")), "model": self.options.model, "shape": shape_of(config.hf_config),
            "dtype": str(config.dtype).removeprefix("torch."), "max_model_tokens": config.max_model_len,
            "devices": self.devices, "sleeps": self.sleeps, "nccl": nccl_version(),
            "adapter_rank": self.options.adapter_rank or 0,
        }  # fmt: skip

    def load(self, source: Source, label: str) -> dict[str, Any]:
        """See ``Backend.load``."""
        load = _Load(source, label, self._adapter)
        self._inbox.put(load)
        return load.result.result()

    def release_memory(self) -> None:
        """See ``Backend.release_memory``."""
        if self.sleeps:
            sleep = _Sleep()
            self._inbox.put(sleep)
            sleep.result.result()

    def sample(
        self, settings: SamplingSettings, jobs: Sequence[Job], stop: Sequence[int], stream: bool
    ) -> Iterator[dict[str, Any]]:
        """See ``Backend.sample``. Raises Refused for a prompt that leaves no room."""
        room = self.engine.model_config.max_model_len
        for job in jobs:
            if len(job.prompt) + job.max_tokens > room:
                raise Refused(
                    f"a prompt of {len(job.prompt)} tokens and a completion of {job.max_tokens} are more than vLLM's "
                    f"max_model_tokens, {room}: start it with more"
                )
        call = _Call(settings, jobs, tuple(stop), stream)
        self._inbox.put(call)
        try:
            steps = -1
            while True:
                try:
                    row = call.rows.get(timeout=_BEAT_S)
                except queue.Empty:
                    if self._failed is not None or not self._thread.is_alive():
                        raise Broken(self.end) from None
                    if self._steps != steps:  # a sign of life only where there is life
                        steps = self._steps
                        yield {"beat": steps}
                    continue
                if row is None:
                    return
                if isinstance(row, BaseException):
                    raise row
                yield row
        finally:
            call.given_up = True

    def close(self) -> None:
        """vLLM ends and hands back its memory, so that another may start in this process."""
        self._inbox.put(None)
        self._thread.join(timeout=30)
        if not self._thread.is_alive():
            with suppress(Exception):  # one that broke down may not end in good order either
                self.engine.engine_core.shutdown()

    def _loop(self) -> None:
        """Take what came in, step, hand out; sleep while there is nothing to do."""
        calls: dict[str, tuple[_Call, int]] = {}
        numbers = itertools.count()
        try:
            while True:
                for item in self._arrivals(wait=not calls):
                    if item is None:
                        return
                    if isinstance(item, _Load | _Sleep):
                        self._abort_given_up(calls)  # which nobody waits for any more
                        assert not calls, "weights may change, or go, only while nothing is being sampled"
                        item.run(self.engine)
                    else:
                        calls |= self._add(item, numbers)
                self._steps += 1
                for output in self.engine.step() if calls else ():
                    self._hand_out(output, calls)
                self._abort_given_up(calls)
        except BaseException as error:
            self._failed = error
            self.broken.set()
            for call in {id(call): call for call, _ in calls.values()}.values():
                call.rows.put(Broken(self.end))
            self._refuse_the_rest()

    def _arrivals(self, wait: bool) -> list[Any]:
        items = [self._inbox.get()] if wait else []
        while not self._inbox.empty():
            items.append(self._inbox.get())
        return items

    def _refuse_the_rest(self) -> None:
        while True:
            item, refusal = self._inbox.get(), Broken(self.end)
            if item is None:
                return
            if isinstance(item, _Load | _Sleep):
                item.result.set_exception(refusal)
            else:
                item.rows.put(refusal)

    def _add(self, call: _Call, numbers: Iterator[int]) -> dict[str, tuple[_Call, int]]:
        """Hand a call's jobs to the engine; which request is whose. What the engine refuses ends the call alone."""
        added: dict[str, tuple[_Call, int]] = {}
        if call.given_up:
            return added
        try:
            for place, job in enumerate(call.jobs):
                name = f"groupwise-{next(numbers)}"
                self.engine.add_request(
                    name, {"prompt_token_ids": list(job.prompt)}, _parameters(call, job), lora_request=self._adapter.request
                )
                added[name] = (call, place)
        except Exception as error:  # vLLM's refusals are no ValueErrors, and have no base that all its versions know
            if type(error).__name__ == "EngineDeadError":
                raise
            self.engine.abort_request(list(added))
            call.rows.put(Refused(_brief(error)))
            return {}
        if not added:
            call.rows.put(None)
        return added

    def _hand_out(self, output: Any, calls: dict[str, tuple[_Call, int]]) -> None:
        """A finished completion, a piece of one, or a sign of life."""
        if output.request_id not in calls:
            return
        call, place = calls[output.request_id]
        one = output.outputs[0]
        if call.stream:
            call.pieces.extend(_pairs(one))
            call.rows.put({"piece": list(one.token_ids)})
        if not output.finished:
            return
        del calls[output.request_id]
        pairs = call.pieces if call.stream else _pairs(one)
        call.left -= 1
        call.rows.put({
            "job": place, "tokens": [token for token, _ in pairs], "logprobs": [logprob for _, logprob in pairs],
            "cached": output.num_cached_tokens or 0,
            "weights": sorted({span.version for span in one.weight_versions or ()}),
        })  # fmt: skip
        if not call.left:
            call.rows.put(None)

    def _abort_given_up(self, calls: dict[str, tuple[_Call, int]]) -> None:
        gone = [name for name, (call, _) in calls.items() if call.given_up]
        if gone:
            self.engine.abort_request(gone)
            for name in gone:
                del calls[name]


@dataclass
class _Call:
    """One request of a trainer, and what is known of it."""

    settings: SamplingSettings
    jobs: Sequence[Job]
    stop: tuple[int, ...]
    stream: bool
    rows: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    pieces: list[tuple[int, float]] = field(default_factory=list)
    left: int = -1
    given_up: bool = False

    def __post_init__(self) -> None:
        self.left = len(self.jobs)


@dataclass
class _Adapters:
    """The adapter that requests are answered with, if any. Each has a number of its own: nothing cached under one serves another."""

    request: Any = None
    count: int = 0

    def replace(self, engine: Any, adapter: Adapter | None) -> None:
        """Raises ValueError where vLLM does not take it."""
        before, self.request = self.request, None
        if before is not None:
            engine.remove_lora(before.lora_int_id)
        if adapter is None:
            return
        from vllm.lora.request import LoRARequest

        self.count += 1
        with tempfile.TemporaryDirectory(prefix="groupwise-adapter-") as folder:
            (Path(folder) / "adapter_config.json").write_text(json.dumps(adapter.config), encoding="utf-8")
            (file,) = adapter.files
            shutil.copyfile(file, Path(folder) / "adapter_model.safetensors")
            made = LoRARequest(f"groupwise-{self.count}", self.count, folder)
            if not engine.add_lora(made):
                raise ValueError("vLLM did not take the adapter")
        self.request = made


@dataclass
class _Load:
    """New weights, and what became of them."""

    source: Source
    label: str
    adapters: _Adapters = field(default_factory=_Adapters)
    result: Future[dict[str, Any]] = field(default_factory=Future)

    def run(self, engine: Any) -> None:
        """Where vLLM slept, memory for weights comes before they are read, and that of keys and values once the source is let go."""
        try:
            slept = engine.is_sleeping()
            if slept:
                engine.wake_up(["weights"])
            if isinstance(self.source, Adapter):
                self.adapters.replace(engine, self.source)
                reports = [{"compared": 0, "repacked": 0, "sharded": 0}]
            else:
                self.adapters.replace(engine, None)
                reports = engine.collective_rpc("groupwise_load", args=(self.source,))
            if slept:
                engine.wake_up(["kv_cache"])
            if not engine.reset_prefix_cache():
                raise ValueError("vLLM did not forget the prefixes that it computed under the old weights")
            engine.set_weight_version(self.label)
            self.result.set_result(reports[0])
        except Exception as error:  # a worker's ValueError comes back as another type from another process
            _tell(self.result, error)


@dataclass
class _Sleep:
    """Weights, keys and values are forgotten, and their memory handed back. What is captured and compiled stays, at its addresses."""

    result: Future[None] = field(default_factory=Future)

    def run(self, engine: Any) -> None:
        try:
            engine.sleep(level=2)
            self.result.set_result(None)
        except Exception as error:
            _tell(self.result, error)


def _tell(result: Future[Any], error: Exception) -> None:
    """What went wrong; raised again where vLLM's process went while nothing was asked of it."""
    if type(error).__name__ == "EngineDeadError":
        result.set_exception(Broken(f"vLLM broke down ({_brief(error)})"))
        raise error
    result.set_exception(ValueError(_brief(error)))


def _parameters(call: _Call, job: Job) -> Any:
    """vLLM's sampling parameters: everything said, nothing inherited. End tokens come from the trainer, and are kept."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = call.settings
    return SamplingParams(
        temperature=0.0 if settings.greedy else settings.temperature, top_k=settings.top_k or 0, top_p=settings.top_p,
        min_p=settings.min_p, repetition_penalty=settings.repetition_penalty,
        max_tokens=job.max_tokens, seed=job.seed, logprobs=0, flat_logprobs=True, stop_token_ids=list(call.stop),
        ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA if call.stream else RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def _pairs(output: Any) -> list[tuple[int, float]]:
    """Tokens and their log-probabilities. With ``logprobs=0`` the sampled token is the first, and only, one of each position."""
    flat = output.logprobs
    places = flat.start_indices[-len(output.token_ids) :] if output.token_ids else []
    return [(token, flat.logprobs[place]) for token, place in zip(output.token_ids, places, strict=True)]


def _brief(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[-400:]}" if words else type(error).__name__
