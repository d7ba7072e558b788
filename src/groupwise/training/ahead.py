"""Asynchronous rollouts: the batch of a later step is sampled while this one is learnt from.

With ``rollout.ahead: k`` the batch of step t is sampled with the weights as they were before step t - k (the first k + 1 batches with
the first weights). That is a fixed schedule, never "whatever is ready": a run can be repeated, and resumed, bit for bit. A batch is
scored when its step begins, in the main thread, so that rewards and their state keep their order.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from groupwise.config.schema import Config
from groupwise.distributed import World
from groupwise.engines import Engine, make_engine
from groupwise.engines.base import Progress, SampleRequest
from groupwise.engines.wrappers import QueuedRequest, SamplingThread, for_all
from groupwise.episodes import EpisodeEngine, playing
from groupwise.errors import CheckpointError
from groupwise.metrics import Mean, Metric, Sum
from groupwise.models.adapters import is_adapted
from groupwise.models.decoder import Decoder
from groupwise.models.layer import Layer
from groupwise.models.load import Policy
from groupwise.rollout import Sampled, assign_prompts, rollout_scope, rollout_settings
from groupwise.training.learner import Learner
from groupwise.training.sharding import Sharding
from groupwise.types import Completion, Group, Prompt, Turn, from_json

__all__ = ["Ahead", "PolicyCopy", "WholeCopy"]

Pairs = list[tuple[int, tuple[Completion, ...]]]
_LAST_BATCH_S = 5.0
"""How long a run that a signal ends waits for what cannot be sampled again from its checkpoint: schedulers give 30 s for all."""


@dataclass
class _Batch:
    """The batch of one step, on its way or waiting for its step."""

    step: int
    weights_of: int
    """The step before which the weights were taken."""
    version: int
    prompts: Sequence[Prompt]
    own: list[int]
    """Places of the prompts that this process samples."""
    order: QueuedRequest | None
    """None for one that came with a checkpoint."""
    pairs: Pairs = field(default_factory=list)
    """What came with the checkpoint, or was gathered for one: of all processes."""
    seconds: float = 0.0

    @property
    def is_sampled(self) -> bool:
        return self.order is None or (self.order.over.is_set() and self.order.error is None)

    def sampled(self) -> Sampled:
        if self.order is None:
            known = dict(self.pairs)
            return Sampled([(place, known[place]) for place in self.own], self.seconds)
        return Sampled(list(zip(self.own, self.order.completions, strict=True)), self.order.seconds)


@dataclass
class SamplerSlot:
    """An engine, and the weights that it samples with, which stay as they are meanwhile."""

    engine: Engine
    copy: PolicyCopy | WholeCopy | None
    """None where the engine has weights of its own anyway."""
    version: int | None = None
    """Of the policy's weights that it took last."""

    def take_weights(self, version: int, sharding: Sharding) -> None:
        """Sample with the policy's weights as they are now, of this ``version``. A collective call, which does nothing where it has them:
        to vLLM they would be pushed again."""
        if version == self.version:
            return
        if self.copy is not None:
            with sharding.whole():
                self.copy.follow()
        self.engine.refresh(version)
        self.version = version


class Ahead:
    """The batches that are sampled ahead, and the weights they are sampled with.

    One copy of the weights for each of the ``rollout.ahead`` steps; at 1, an engine that has its own copy needs no other.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        policy: Policy,
        engine: Engine,
        prompts_of: Callable[[int], list[Prompt]],
        learner: Learner,
    ) -> None:
        """``engine``: the run's, over ``policy``. ``prompts_of(step)`` renders a step's prompts. ``learner`` counts the updates."""
        self.config, self.world, self.steps = config, world, config.rollout.ahead
        self.engine, self.prompts_of, self.learner = engine, prompts_of, learner
        self.borrows = self.steps == 1 and engine.holds_weights
        """Whether the run's own engine does the sampling ahead."""
        self._slots = [SamplerSlot(engine, None)] if self.borrows else [self._own_slot(policy) for _ in range(self.steps)]
        self._thread = SamplingThread(policy.model.device)
        self._batches: dict[int, _Batch] = {}
        self._restored: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._waited_s = 0.0
        self._left_out: set[int] = set()
        """Steps whose batches the next checkpoint goes without."""
        self.free_engine: Engine = _WaitingEngine(self) if self.borrows else engine
        """The run's engine with the weights as they are now, for other things than the steps' batches."""

    def _own_slot(self, policy: Policy) -> SamplerSlot:
        scorer, sharding, rollout = self.learner.scorer, self.learner.sharding, self.config.rollout
        copied: PolicyCopy | WholeCopy
        if sharding.divides_weights:
            assert isinstance(scorer, Decoder)
            with sharding.whole():
                copied = WholeCopy(policy, scorer)
            engine = make_engine(copied.policy, rollout, copied.decoder)
        else:
            copied = PolicyCopy(policy)
            engine = make_engine(copied.policy, rollout)
        if self.engine.limit is not None:
            engine.limit = self.engine.limit  # what one learns about how many sequences fit, the other knows
        episodes = self.engine.episodes if isinstance(self.engine, EpisodeEngine) else None
        return SamplerSlot(playing(engine, episodes), copied)

    def take(self, step: int, on_progress: Callable[[int, int], None] | None = None) -> tuple[Sequence[Prompt], Sampled]:
        """The step's prompts and what was sampled of them, once it is there. The batch ``ahead`` steps later is begun, with the weights
        as they are now."""
        self._bring_back()
        for learnt in [s for s in self._batches if s < step]:
            del self._batches[learnt]
        if step not in self._batches:
            self._begin(step, step)
        started = time.perf_counter()
        batch = self._batches[step]
        if batch.order is not None:
            self._thread.wait(batch.order, for_all(on_progress, len(batch.prompts), len(batch.own)))
        self._waited_s = time.perf_counter() - started
        self._begin(step + 1, step)
        return batch.prompts, batch.sampled()

    def go_on(self, step: int) -> None:
        """Like ``take``, where the step's batch is in hand already: a run resumes inside its updates."""
        self._bring_back()
        self._waited_s = 0.0
        self._begin(step + 1, step)

    def learnt(self, step: int) -> None:
        """Forget the step's batch, which is learnt from now: no checkpoint needs it any more."""
        self._batches.pop(step, None)

    def metrics(self) -> dict[str, Metric]:
        """Seconds that the last ``take`` waited, on this process."""
        return {"time/wait_s": Sum(self._waited_s)}

    def staleness(self, groups: Sequence[Group]) -> dict[str, Metric]:
        """How many updates the policy has made since the weights that sampled ``groups``; those of refills are fresh."""
        now = self.learner.updates
        return {"rollout/staleness": Mean.of(now - c.policy_version for group in groups for c in group.completions)}

    def finish_for_checkpoint(self, stopping: bool = False) -> list[int]:
        """Wait for and gather what cannot be sampled again from a checkpoint. A collective call, before one is taken.

        ``stopping``: a signal ends the run, which then waits for a moment at most. What fails, or is not there by then, is left out,
        unless the checkpoint can have the weights that sample it. Returns the steps of those that a resumed run will sample with
        other weights.
        """
        self._left_out.clear()
        if self.world.size == 1 and not self.borrows:
            return []
        ends, late = time.monotonic() + _LAST_BATCH_S, list[int]()
        for step, batch in self._batches.items():
            if batch.order is None:
                continue
            again = not isinstance(self._slot(batch.weights_of).copy, WholeCopy | None)  # from weights in the checkpoint
            moved = batch.version != self.learner.updates  # else the resumed run has the same weights
            if not stopping:
                self._wait_for(batch.order)
            elif moved and not again:
                batch.order.over.wait(max(0.0, ends - time.monotonic()))
            parts = self.world.all_gather_object(batch.sampled().pairs if batch.is_sampled else None)
            pairs = [pair for part in parts for pair in part or ()]
            if None not in parts:
                batch.pairs, batch.seconds, batch.order = sorted(pairs, key=lambda p: p[0]), batch.order.seconds, None
            elif not again:
                self._left_out.add(step)
                late += [step] * moved
        return late

    def _wait_for(self, order: QueuedRequest) -> None:
        """What the engine raised is raised when the batch's step begins: what was learnt before is saved first."""
        try:
            self._thread.wait(order)
        except BaseException as error:
            if error is not order.error:
                raise

    def close(self) -> None:
        """Drop what is under way."""
        self._thread.close()
        self._batches.clear()

    def wait_for_all(self) -> None:
        """Wait until nothing is being sampled."""
        for batch in self._batches.values():
            if batch.order is not None:
                self._thread.wait(batch.order)

    def _begin(self, first: int, step: int) -> None:
        """Start those batches from ``first`` to ``ahead`` steps after ``step`` that are not there, with the weights before ``step``."""
        last = min(step + self.steps, self.config.training.steps - 1)
        missing = [s for s in range(first, last + 1) if s not in self._batches]
        if not missing:
            return
        slot = self._slot(step)
        version = self.learner.updates
        # Nobody samples with this slot: the last batch that did was that of ``step``, at the latest.
        slot.take_weights(version, self.learner.sharding)
        for later in missing:
            self._batches[later] = self._order(later, step, version)

    def _order(self, step: int, weights_of: int, version: int) -> _Batch:
        rollout, prompts = self.config.rollout, self.prompts_of(step)
        own = assign_prompts(prompts, rollout, self.world)
        request = SampleRequest(
            [prompts[i] for i in own],
            rollout.completions_per_prompt,
            rollout_settings(rollout),
            self.config.training.seed,
            rollout_scope(step),
        )
        order = QueuedRequest(self._slot(weights_of).engine, request)
        self._thread.put(order)
        return _Batch(step, weights_of, version, prompts, own, order)

    def _slot(self, step: int) -> SamplerSlot:
        """The one that samples with the weights before ``step``."""
        return self._slots[step % len(self._slots)]

    # What a checkpoint holds: finished batches as they are; of others, the weights from which they are sampled again.

    def checkpoint_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See ``Stateful``."""
        if self._restored is not None:  # stopped before a batch was taken: they are where they were
            return self._restored
        tensors: dict[str, Tensor] = {}
        rows: list[dict[str, Any]] = []
        for batch in self._batches.values():
            if batch.step in self._left_out:
                continue
            row: dict[str, Any] = {"step": batch.step, "weights_of": batch.weights_of, "version": batch.version}
            # What several processes have sampled was gathered: this one's share alone is no batch.
            if batch.order is None or (self.world.size == 1 and batch.is_sampled):
                pairs = batch.pairs if batch.order is None else batch.sampled().pairs
                row |= {
                    "problems": [p.problem.id for p in batch.prompts],
                    "seconds": batch.sampled().seconds,
                    "places": _texts(pairs),
                }
                tensors |= {f"batch.{batch.step}.{name}": tensor for name, tensor in _numbers(pairs).items()}
            else:
                copied = self._slot(batch.weights_of).copy
                assert isinstance(copied, PolicyCopy), "what cannot be sampled again from a checkpoint was not brought together"
                tensors |= {f"weights.{batch.weights_of}.{name}": tensor for name, tensor in copied.state().items()}
            rows.append(row)
        return tensors, {"ahead": self.steps, "batches": rows}

    def load_checkpoint_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """See ``Stateful``."""
        self._restored = (tensors, values) if values else None

    def sampled_again(self) -> list[int]:
        """Steps whose batches the checkpoint has as weights that no slot here takes, and that newer ones sample."""
        if self._restored is None or self._restored[1]["ahead"] != self.steps:  # another `rollout.ahead` is told as a change
            return []
        return [
            int(row["step"])
            for row in self._restored[1]["batches"]
            if "places" not in row and int(row["version"]) != self.learner.updates
            and not isinstance(self._slot(int(row["weights_of"])).copy, PolicyCopy)
        ]  # fmt: skip

    def _bring_back(self) -> None:
        """Restore what came with the checkpoint. Batches that another ``rollout.ahead`` had under way are sampled as new ones, and
        so are those of a run that did not divide its weights, where they are divided now."""
        if self._restored is None:
            return
        tensors, values = self._restored
        loaded: set[int] = set()
        for row in values["batches"]:
            step, weights_of = int(row["step"]), int(row["weights_of"])
            if "places" in row:
                self._batches[step] = self._sampled_before(row, tensors)
                continue
            slot = self._slot(weights_of)
            if values["ahead"] == self.steps and isinstance(slot.copy, PolicyCopy):
                if weights_of not in loaded:
                    prefix = f"weights.{weights_of}."
                    slot.copy.load_state({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
                    slot.engine.refresh(int(row["version"]))
                    loaded.add(weights_of)
                self._batches[step] = self._order(step, weights_of, int(row["version"]))
        self._restored = None  # last, so that a signal in between still saves them

    def _sampled_before(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Batch:
        step = int(row["step"])
        prompts = self.prompts_of(step)
        if [p.problem.id for p in prompts] != row["problems"]:
            raise CheckpointError(
                f"the checkpoint holds completions for step {step + 1} of other problems than the data now has for it: use the same "
                "data, or an earlier checkpoint"
            )
        pairs = _pairs(row["places"], tensors[f"batch.{step}.tokens"], tensors[f"batch.{step}.logprobs"])
        own = assign_prompts(prompts, self.config.rollout, self.world)
        return _Batch(step, int(row["weights_of"]), int(row["version"]), prompts, own, None, pairs, float(row["seconds"]))


class _WaitingEngine(Engine):
    """Wraps an engine that also samples ahead: waits until that is done, and brings the newest weights."""

    holds_weights = True

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``."""
        self.ahead.wait_for_all()
        (slot,) = self.ahead._slots
        slot.take_weights(self.ahead.learner.updates, self.ahead.learner.sharding)
        return slot.engine.serve_checked(request, on_progress)

    def refresh(self, policy_version: int) -> None:
        """Nothing: every sample does."""


def _texts(pairs: Pairs) -> list[list[Any]]:
    """All but the numbers, by place; and how many tokens each completion has."""
    return [
        [
            place,
            [
                [
                    c.text,
                    c.finish_reason,
                    c.sample,
                    c.policy_version,
                    c.temperature,
                    len(c.token_ids),
                    [asdict(turn) for turn in c.turns],
                    c.reward,
                ]
                for c in completions
            ],
        ]
        for place, completions in pairs
    ]


def _numbers(pairs: Pairs) -> dict[str, Tensor]:
    everything = [c for _, completions in pairs for c in completions]
    return {
        "tokens": torch.tensor([t for c in everything for t in c.token_ids], dtype=torch.int64),
        "logprobs": torch.tensor([x for c in everything for x in c.logprobs], dtype=torch.float64),
    }


def _pairs(places: Sequence[Sequence[Any]], tokens: Tensor, logprobs: Tensor) -> Pairs:
    flat_tokens, flat_logprobs = iter(tokens.tolist()), iter(logprobs.tolist())

    def completion(
        text: str, finish_reason: Any, sample: int, version: int, temperature: float, size: int, turns: Any = (),
        reward: float | None = None,
    ) -> Completion:  # fmt: skip
        ids = tuple(next(flat_tokens) for _ in range(size))
        logprobs = tuple(next(flat_logprobs) for _ in range(size))
        return Completion(
            text, ids, logprobs, finish_reason, sample, version, temperature, from_json(tuple[Turn, ...], turns), reward
        )

    return [(place, tuple(completion(*row) for row in rows)) for place, rows in places]


class PolicyCopy:
    """``policy`` once more, with weights and a tokenizer of its own; under an adapter the frozen weights are shared.

    An engine may rearrange the copy's weights, as long as the module's parameters stay views of what it samples from.
    """

    def __init__(self, policy: Policy) -> None:
        self.original = policy.model
        kept = {id(t): t for t in policy.model.parameters() if not t.requires_grad} if is_adapted(policy.model) else {}
        # Not the tokenizer in use: its Rust part refuses to be used by two threads at once.
        self.policy = replace(policy, model=copy.deepcopy(policy.model, kept), tokenizer=copy.deepcopy(policy.tokenizer))

    @torch.no_grad()
    def follow(self) -> None:
        """The original's weights of this moment."""
        for name, weight in self._own():
            weight.copy_(self.original.get_parameter(name))

    def state(self) -> dict[str, Tensor]:
        """Its weights by name, those that are shared with the original left out; in memory that is no other tensor's."""
        return {name: w.detach() if w.untyped_storage().nbytes() == w.nbytes else w.detach().clone() for name, w in self._own()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what ``state`` gave. KeyError or RuntimeError: that was another model's."""
        for name, weight in self._own():
            weight.copy_(tensors[name])

    def _own(self) -> list[tuple[str, Any]]:
        originals = dict(self.original.named_parameters())
        return [(name, weight) for name, weight in self.policy.model.named_parameters() if weight is not originals[name]]


class WholeCopy:
    """A decoder with the whole weights of one whose own are divided among processes; with an adapter, the merged ones."""

    def __init__(self, policy: Policy, decoder: Decoder) -> None:
        """Make one, and ``follow``, when the weights of ``decoder``, the policy's, are whole."""
        self.original = decoder
        self.policy = replace(policy, tokenizer=copy.deepcopy(policy.tokenizer))  # as above
        self.decoder = decoder.snapshot()

    @torch.no_grad()
    def follow(self) -> None:
        """The original's weights of this moment."""
        for mine, theirs in zip(_tensors(self.decoder), _tensors(self.original), strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)


def _tensors(decoder: Decoder) -> list[Tensor | None]:
    """All that a decoder computes with, as it is now."""
    head = [] if decoder.head is decoder.embedding else [decoder.head]
    layers = [getattr(layer, name) for layer in decoder.layers for name in Layer.__slots__]
    return [decoder.embedding, decoder.final_norm, *head, *layers]
