"""The policy sampled by vLLM, elsewhere or in this process: weights go there after every update, completions come back.

What comes back is checked, since another program computed it: each completion names the weights that it was sampled from, and after
every push a few tokens are sampled there and scored here.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from groupwise.config.combinations import refuse_with_vllm
from groupwise.config.schema import RolloutConfig, VllmConfig
from groupwise.distributed import World
from groupwise.engines.base import Engine, Progress, SampleRequest, SamplingSettings, refuse_unknown, text_of
from groupwise.engines.builtin.draw import seed_key
from groupwise.engines.vllm.client import Client
from groupwise.engines.vllm.protocol import (
    Job,
    Link,
    NotTrusted,
    Refused,
    StaleWeights,
    Starting,
    Unreachable,
    check_server,
    check_versions,
    owner_of,
)
from groupwise.engines.vllm.pushing import RetryLimit, Way, check_pushable, dtype_name, push, shares_device
from groupwise.errors import ConfigError, TrainingError
from groupwise.limits import VLLM_COLDEST, VLLM_HOTTEST
from groupwise.memory import reclaim_memory
from groupwise.metrics import Max, Mean, Metric, Sum
from groupwise.models.adapters import base_module
from groupwise.types import Completion, Prompt

if TYPE_CHECKING:
    from groupwise.models.load import Policy

__all__ = ["VllmEngine", "check_vllm", "open_vllm_engine", "request_seed"]

logger = logging.getLogger("groupwise")

PROBE_NATS = 0.3
"""Mean difference of log-probabilities, sampled there and scored here, beyond which the two models are not the same. Between bf16 kernels
it is 0.01 to 0.06; the wrong weights of a layer make it 0.5 and more."""
_PROBE_TOKENS = 32


def request_seed(seed: int, scope: str, problem_id: str, sample: int, occurrence: int = 0) -> int:
    """A completion's seed in vLLM, by its name as everywhere, in 62 bits. vLLM draws other numbers from it than the built-in engine."""
    return seed_key(seed, scope, problem_id, sample, occurrence) & (2**62 - 1)


class VllmEngine(Engine):
    """Samples by a ``protocol.Link``.

    The weights are pushed at construction and at each ``refresh``, by the first process of the ``world``; every process then samples its
    own prompts. A server that was restarted is found by its holding no weights: they are pushed again and sampling goes on.
    """

    holds_weights = True

    def __init__(
        self,
        policy: Policy,
        link: Link,
        world: World | None = None,
        *,
        bucket_bytes: int = 2**28,
        patience_s: float = 300.0,
        collect: Callable[[Policy], Policy | None] = lambda policy: policy,
        frozen: bool = False,
    ) -> None:
        """``collect``: for all processes at once, the policy with its whole weights, for the first process at least; where each holds
        only a part of them. ``frozen``: nothing changes them, so that any thread may push them again.

        Raises ConfigError where the weights cannot be pushed, TrainingError where the server does not take them.
        """
        check_pushable(policy.model, policy.name)
        # What is sent is whole, whatever is saved.
        self.policy, self.link, self.world = replace(policy, adapter_only=False), link, world or World()
        self.bucket_bytes, self.patience_s, self.collect, self.frozen = bucket_bytes, patience_s, collect, frozen
        # vLLM refuses those that the model cannot sample.
        self.end_token_ids = frozenset(token for token in policy.end_token_ids if token < self._vocabulary)
        self.policy_version = 0
        self._owner = self.world.on_rank0(lambda: uuid.uuid4().hex[:12])
        self.divided = False
        self._way = Way()
        self._sleeps = self._slept = False
        self._pushes = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._push_s = self._probed = 0.0
        self._pusher = threading.get_ident()
        self._let_go: Callable[[], None] = lambda: None
        try:
            self._refuse_several_servers()
            self.refresh(0)
            self._sleeps = self.world.on_rank0(self._may_sleep)
        except BaseException:
            self.close()  # nobody else will: the server would stay this process's
            raise

    def _refuse_several_servers(self) -> None:
        """Raise ConfigError in all processes where they have not one server. A collective call."""
        if self.world.size == 1:
            return
        start = None
        with suppress(Unreachable, Refused):  # the push waits for it, or says why
            start = self.link.hello().get("start")
        if len({other for other in self.world.all_gather_object(start) if other is not None}) > 1:
            raise ConfigError(
                "rollout.vllm.url leads the processes to different servers, but a run samples from one: name the same for all"
            )

    @property
    def weights(self) -> str:
        """The id of the weights that the policy has now."""
        return f"{self._owner}:{self._pushes}"

    def refresh(self, policy_version: int) -> None:
        """Push the weights, and let the server show that it computes with them. A collective call."""
        started = time.perf_counter()
        self.world.all_gather_object(None)  # from here on no process samples from the weights before
        self._pusher = threading.get_ident()  # only this thread knows when the weights stand still
        self.policy_version = policy_version
        self._pushes += 1
        whole = self.collect(self.policy)
        self.divided = whole is not self.policy
        if self._slept:
            reclaim_memory()  # what this process has freed, and keeps, vLLM needs now
        self._slept = False
        self.world.on_rank0(lambda: self._push(whole))
        self._probed = max(self._probed, self.world.on_rank0(lambda: self._probe(whole)))
        self._push_s += time.perf_counter() - started

    def release_memory(self) -> None:
        """See ``Engine.release_memory``: vLLM on the policy's own GPU forgets its weights, which the next push brings, and its cache."""
        self.world.all_gather_object(None)  # from here on no process samples
        self._slept = self._sleeps
        self.world.on_rank0(self._release)

    def _release(self) -> None:
        if not self._sleeps:
            return
        try:
            self.link.release_memory(self.weights)
        except Refused as refused:
            logger.warning(f"{refused}; it keeps its memory from here on")
            self._sleeps = False
        except Unreachable:
            pass  # the next push waits for it

    def metrics(self) -> dict[str, Metric]:
        """What pushing and sampling came to since this was asked last; names as in ``tracking.metric_table``."""
        metrics: dict[str, Metric] = {}
        if self._push_s:
            metrics |= {"time/push_s": Sum(self._push_s), "policy/push_probe": Max(self._probed)}
        if self._prompt_tokens:
            metrics["completions/prompt_cached"] = Mean(float(self._cached_tokens), float(self._prompt_tokens))
        self._push_s = self._probed = 0.0
        self._prompt_tokens = self._cached_tokens = 0
        return metrics

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``. The completions of one request are the same each time only as far as vLLM's kernels give a row the same
        numbers in any batch.

        Raises TrainingError where the server is down for longer than ``patience_s``, or answers with something else than was asked.
        """
        prompts, samples_per_prompt = request.prompts, request.samples_per_prompt
        refuse_unknown(prompts, self._vocabulary)
        places = [(i, sample) for i in range(len(prompts)) for sample in range(samples_per_prompt)]
        jobs = [
            Job(p.token_ids, request_seed(request.seed, request.scope, p.problem.id, sample, p.occurrence), request.limit_of(i))
            for i, sample, p in ((i, sample, prompts[i]) for i, sample in places)
        ]
        done: dict[int, Completion] = {}
        tokens, version = 0, self.policy_version
        for place, row in self._rows(jobs, request.settings):
            done[place] = self._completion(row, places[place][1], version, request.settings)
            tokens += len(row["tokens"])
            self._prompt_tokens += len(jobs[place].prompt)
            self._cached_tokens += row["cached"]
            if on_progress:
                on_progress(len(done), tokens)
        in_order = [done[place] for place in range(len(jobs))]
        return [tuple(in_order[i * samples_per_prompt : (i + 1) * samples_per_prompt]) for i in range(len(prompts))]

    def stream(self, prompt: Prompt, settings: SamplingSettings, *, seed: int, on_text: Callable[[str], None]) -> Completion:
        """See ``Engine.stream``."""
        refuse_unknown([prompt], self._vocabulary)
        job = Job(prompt.token_ids, request_seed(seed, "stream", prompt.problem.id, 0), settings.max_tokens)
        shown, tokens = "", list[int]()

        def show(piece: Sequence[int]) -> None:
            nonlocal shown
            tokens.extend(piece)
            text = text_of(self.policy.tokenizer, tokens)
            if text.startswith(shown) and not text.endswith("\ufffd"):
                on_text(text[len(shown) :])
                shown = text

        ((_, row),) = self._rows([job], settings, show)
        completion = self._completion(row, 0, self.policy_version, settings)
        on_text(completion.text[len(shown) :])
        return completion

    def close(self) -> None:
        """Let other runs have the server."""
        self._let_go()
        self._let_go = lambda: None
        self._way.close()
        self.link.close()

    def _rows(
        self,
        jobs: Sequence[Job],
        settings: SamplingSettings,
        on_piece: Callable[[Sequence[int]], None] | None = None,
        repair: bool = True,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each job's place and row, once, in the order in which they end, whatever happens to the server in between. ``repair``: whether
        a server that lacks the weights is sent them; else StaleWeights is raised.

        Raises ConfigError for a temperature that vLLM replaces or refuses.
        """
        if not (VLLM_COLDEST <= settings.temperature <= VLLM_HOTTEST or settings.greedy):
            raise ConfigError(
                f"temperature is {settings.temperature:g}, but vLLM samples at {VLLM_COLDEST:g} in place of lower ones, and "
                f"takes none above {VLLM_HOTTEST:g}: ask for one between them, or for the likeliest token (greedy)"
            )
        weights, left = self.weights, list(range(len(jobs)))
        retries = RetryLimit(self.patience_s)
        while left:
            asked, ended, held = list(left), set[int](), None
            try:
                stop = sorted(self.end_token_ids)
                for row in self.link.sample(weights, settings, [jobs[i] for i in asked], stop=stop, stream=on_piece is not None):
                    held = row.get("held", held)
                    if "piece" in row and on_piece and not retries.lost:
                        on_piece(row["piece"])
                    if "job" in row:
                        ended.add(asked[row["job"]])
                        self._check(row, weights, jobs[asked[row["job"]]].max_tokens)
                        yield asked[row["job"]], row
                        retries.renew()
                if len(ended) < len(asked):
                    raise Unreachable(f"{self.link.where} ended with {len(asked) - len(ended)} completions missing")
                self._check_end(held, weights)
            except StaleWeights as stale:
                if not repair:
                    raise
                self._put_right_or_wait(stale, weights, retries)
            except Unreachable as error:
                retries.wait(error, "vLLM cannot be reached")
            except Refused as refused:
                raise TrainingError(f"vLLM at {self.link.where} does not sample: {refused}") from refused
            left = [i for i in left if i not in ended]

    def _put_right_or_wait(self, stale: StaleWeights, wanted: str, retries: RetryLimit) -> None:
        """One that loses the weights each time it gets them is waited for like one that is away."""
        if retries.lost:
            retries.wait(stale, f"vLLM at {self.link.where} does not keep the weights")
        retries.lost = True
        with suppress(StaleWeights):  # lost again: the next request will be told so
            self._put_right(stale, wanted)

    def _check_end(self, held: Any, weights: str) -> None:
        """Raises TrainingError where the weights after sampling are not those before it."""
        if held != weights:
            raise TrainingError(
                f"{self.link.where} held the weights {held} when it had sampled, not {weights}, which it was asked for: look at the "
                "server's version, and continue with --resume"
            )

    def _check(self, row: dict[str, Any], weights: str, most: int) -> None:
        """Raises TrainingError for a completion that is not what was asked for."""
        tokens, logprobs = row["tokens"], row["logprobs"]
        wrong = None
        if row["weights"] != [weights]:
            wrong = f"was sampled from the weights {row['weights']}, not {weights}"
        elif not 1 <= len(tokens) <= most or len(logprobs) != len(tokens):
            wrong = f"has {len(tokens)} tokens and {len(logprobs)} log-probabilities, where at most {most} were asked for"
        elif not all(0 <= token < self._vocabulary for token in tokens):
            wrong = f"has the token {max(tokens)}, beyond the vocabulary of {self._vocabulary}"
        elif len(tokens) < most and tokens[-1] not in self.end_token_ids:
            wrong = f"ended with the token {tokens[-1]} after {len(tokens)}, which is neither an end token nor the limit"
        if wrong:
            raise TrainingError(f"a completion from {self.link.where} {wrong}: look at the server's version and its model")

    def _completion(self, row: dict[str, Any], sample: int, version: int, settings: SamplingSettings) -> Completion:
        tokens = row["tokens"]
        return Completion(
            text=text_of(self.policy.tokenizer, tokens), token_ids=tuple(tokens), logprobs=tuple(row["logprobs"]), sample=sample,
            finish_reason="stop" if tokens[-1] in self.end_token_ids else "length", policy_version=version,
            temperature=settings.temperature,
        )  # fmt: skip

    @property
    def _vocabulary(self) -> int:
        config = self.policy.model.config
        return int(config.get_text_config().vocab_size)

    def _push(self, policy: Policy | None) -> None:
        """Push the weights, in the first process and in one that finds the weights lost."""
        assert policy is not None, "the first process was not given the whole weights"
        push(
            self.link, policy, self.weights, self.policy_version,
            take_hold=self._take_hold, bucket_bytes=self.bucket_bytes, patience_s=self.patience_s, way=self._way,
            heed=self.heed,
        )  # fmt: skip

    def _may_sleep(self) -> bool:
        found = self.link.hello()
        return bool(found.get("sleeps")) and (self.link.in_process or shares_device(found, self.policy.model.device))

    def _take_hold(self) -> None:
        """Reserve the server for this run. Raises what `Link.hold` does."""
        before = self._let_go
        self._let_go = self.link.hold(self._owner, f"process {os.getpid()} on {socket.gethostname()}")
        before()

    def _put_right(self, stale: StaleWeights, wanted: str) -> None:
        """The server lacks the weights that a request wants: push them again where that is right. Raises TrainingError where it is not."""
        lost = f"vLLM at {self.link.where} was restarted and has lost the weights {wanted}"
        if stale.held is not None and owner_of(stale.held) != self._owner:
            raise TrainingError(
                f"another run has pushed its weights to {self.link.where} meanwhile: a server samples for one run at a time; start one "
                "for each, and continue with --resume"
            ) from stale
        if wanted != self.weights:
            raise TrainingError(f"vLLM at {self.link.where} has newer weights than {wanted}, which nobody may replace") from stale
        if not self.frozen and threading.get_ident() != self._pusher:
            raise TrainingError(
                f"{lost}, which learning has changed since (rollout.ahead samples beside it): continue with --resume, which samples the "
                "same batch from the same weights"
            ) from stale
        if self.divided:
            raise TrainingError(f"{lost}, which no single process has as a whole: continue with --resume") from stale
        self._push(self.policy)
        self._probed = max(self._probed, self._probe(self.policy, repair=False))

    def _probe(self, policy: Policy | None, repair: bool = True) -> float:
        """Sample a few tokens there, score them here; the mean difference in nats. ``repair``: see ``_rows``.

        Raises TrainingError where it shows that the server computes something else than this model.
        """
        assert policy is not None, "the first process was not given the whole weights"
        room = self._way.room
        prompt = tuple((13 + 7919 * k) % self._vocabulary for k in range(min(16, room // 2)))
        most = min(_PROBE_TOKENS, room - len(prompt))
        row = dict(self._rows([Job(prompt, 1, most)], SamplingSettings(max_tokens=most), repair=repair))[0]
        ids = torch.tensor([[*prompt, *row["tokens"]]], device=policy.model.device)
        policy.model.eval()  # an adapter's dropout may still be on; whoever learns sets it again
        with torch.no_grad():
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        scored_T = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        apart = float((scored_T - torch.tensor(row["logprobs"])).abs().mean())
        if not apart <= PROBE_NATS:
            raise TrainingError(
                f"after the weights were pushed, {self.link.where} gives its own tokens log-probabilities {apart:.2f} nats away from the "
                "model's here: it computes something else; start it with the model that is trained, unquantised"
            )
        return apart


def check_vllm(rollout: RolloutConfig, hf_config: Any, model: str, device: str = "auto", dtype: str | None = None) -> int | None:
    """Most tokens of prompt and completion together that vLLM takes; None where another engine samples, or vLLM in this process takes the
    model's context. ``device`` and ``dtype``: the policy's.

    Raises ConfigError where no server answers, or one of other versions, with another model, or that works for another run, or where vLLM
    in this process would not do.
    """
    if rollout.engine != "vllm":
        return None
    refuse_with_vllm(rollout, int(os.environ.get("WORLD_SIZE", "1")))
    if rollout.vllm.url is None:
        if (index := device.partition(":")[2]) not in ("", "0"):
            seen = dict(enumerate(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
            gpu = seen.get(int(index), "").strip() or index  # among those that the variable leaves
            raise ConfigError(
                f"model.device is {device}, but vLLM in the trainer's own process computes on the first GPU that it sees: set "
                f"CUDA_VISIBLE_DEVICES={gpu} in the environment and model.device=cuda, or let rollout.vllm.url name a server"
            )
        check_versions()
        return rollout.vllm.max_model_tokens
    return _check_server(_client(rollout.vllm), hf_config, model, dtype)


def _check_server(client: Client, hf_config: Any, model: str, dtype: str | None) -> int:
    try:
        hello = check_server(client, hf_config, model, dtype)
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
    if hello["used_by"] and os.environ.get("RANK", "0") == "0":  # the others might see the first one, which was quicker
        raise ConfigError(
            f"the server at {client.where} works for {hello['used_by']}, and a server samples for one run at a time: end that run, or "
            "start another server, with --port, and let rollout.vllm.url name it"
        )
    return int(hello["max_model_tokens"])


def open_vllm_engine(
    policy: Policy,
    rollout: RolloutConfig,
    world: World | None = None,
    collect: Callable[[Policy], Policy | None] = lambda policy: policy,
    frozen: bool = False,
) -> VllmEngine:
    """Find the server, or start vLLM in this process; push the weights, and see that they arrived. For ``collect`` and ``frozen``
    see `VllmEngine`.

    Raises ConfigError, ModelError or TrainingError where that cannot be.
    """
    check_pushable(policy.model, policy.name)
    check_vllm(rollout, policy.model.config, policy.name, str(policy.model.device), dtype_name(policy.model))
    settings = rollout.vllm
    link = _client(settings) if settings.url is not None else _own(policy, rollout)
    return VllmEngine(
        policy, link, world, bucket_bytes=settings.bucket_mib * 2**20, patience_s=settings.patience_s, collect=collect,
        frozen=frozen,
    )  # fmt: skip


def _client(settings: VllmConfig) -> Client:
    assert settings.url is not None
    shared = None if settings.shared_folder is None else Path(settings.shared_folder)
    return Client(settings.url, patience_s=settings.patience_s, shared=shared)


def _own(policy: Policy, rollout: RolloutConfig) -> Any:
    """vLLM in this process. It loads the same folder, or the same revision of a model on the Hub; the weights are then replaced.
    The model's own code runs there only where it runs here."""
    from groupwise.engines.vllm.backend import VllmBackend, VllmOptions
    from groupwise.engines.vllm.service import Service

    settings, context, config = rollout.vllm, policy.context_length, policy.model.config
    brings_code = any(type(part).__module__.startswith("transformers_modules.") for part in (config, base_module(policy.model)))
    options = VllmOptions(
        model=str(config._name_or_path), revision=getattr(config, "_commit_hash", None), trust_remote_code=brings_code,
        dtype=dtype_name(policy.model),
        max_model_tokens=min(settings.max_model_tokens or context, context), max_sequences=rollout.max_concurrent_sequences,
        memory_share=settings.gpu_memory_share, cache_gib=settings.cache_gib, eager=settings.eager,
        sleeps=settings.sleep_mode and not rollout.ahead,
    )  # fmt: skip
    return Service(VllmBackend(options, own_process=False))
