"""The learned value of PPO: a linear head on the state in which each token is chosen, the policy's own or that of a second model.

Axes: T tokens, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithm import value_loss
from groupwise.config.algorithm import AlgorithmConfig
from groupwise.config.combinations import refuse_short_critic, refuse_untrainable
from groupwise.config.schema import Config, ModelConfig
from groupwise.distributed import World
from groupwise.errors import ConfigError
from groupwise.metrics import Max, Metric
from groupwise.models.folder import stored_quantisation
from groupwise.models.load import check_model, context_length, load_model_config, load_policy, load_tokenizer
from groupwise.models.logprobs import Scored
from groupwise.models.module_scorer import ModuleScorer
from groupwise.models.packing import PackedTokens
from groupwise.models.scorer import Scorer, Trunk, copy_trunk, freeze_output_head, make_scorer
from groupwise.training.microbatches import MicroBatch, sampled_alone
from groupwise.training.optimizer import MasterAdamW

__all__ = ["Critic", "check_critic", "make_critic"]

_HEAD, _OPTIMIZER, _WEIGHTS = ("weight", "bias"), "trunk.optimizer.", "trunk.weights."


class Critic:
    """``V(state) = w . hidden + b`` in fp32, with an optimiser of its own. It starts at 0, where advantages are the returns.

    Without a ``trunk`` the hidden state is the policy's own, after the final norm: no second network is kept, and
    ``trains_trunk`` says whether the value's error also reaches the policy's layers. A ``trunk`` is a second model that learns
    nothing but the value, with masters and moments of its own; policy and value then share no weights.
    """

    def __init__(
        self, width: int, config: AlgorithmConfig, device: torch.device, trunk: Trunk | None = None,
        optimizer: MasterAdamW | None = None, policy: Scorer | None = None,
    ) -> None:  # fmt: skip
        """``optimizer`` steps the ``trunk``. ``policy``: whose packing of micro-batches a trunk of the same kind takes as it is."""
        assert (trunk is None) is (optimizer is None)
        assert config.value is not None
        self.config, self.trunk, self.optimizer, self.policy = config.value, trunk, optimizer, policy
        self.weight = torch.nn.Parameter(torch.zeros(width, dtype=torch.float32, device=device))
        self.bias = torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.parameters = [self.weight, self.bias]
        """The head's, which ``adamw`` steps."""
        self.adamw = torch.optim.AdamW(self.parameters, lr=self.config.learning_rate, weight_decay=0.0)

    @property
    def reads_policy(self) -> bool:
        """Whether the value reads the policy's own states, which the policy's passes then keep."""
        return self.trunk is None

    def values(self, hidden_T: Tensor) -> Tensor:
        """``[T]`` in fp32, in units of reward, from ``hidden_T`` ``[T, D]``."""
        if self.reads_policy and not self.config.trains_trunk:
            hidden_T = hidden_T.detach()
        return hidden_T.float() @ self.weight + self.bias

    def value_of(self, micro_batch: MicroBatch, scored: Scored | None) -> Tensor:
        """``[T]`` of a micro-batch, by the trunk, or from the states that the policy's pass ``scored`` has kept."""
        if self.trunk is not None:
            return self.values(self.trunk.states(self._packed(micro_batch, self.trunk)))
        assert scored is not None
        assert scored.hidden_T is not None
        return self.values(scored.hidden_T)

    def _packed(self, micro_batch: MicroBatch, trunk: Trunk) -> PackedTokens:
        """The input as the trunk wants it: packed rows, or padded ones. An id beyond what it embeds is read as its last one: models of one
        family differ in rows that stand for no token."""
        policy, embedded = self.policy, _embedded(trunk)
        if policy and isinstance(policy, ModuleScorer) is isinstance(trunk, ModuleScorer) and _embedded(policy) == embedded:
            return micro_batch.packed

        def known(token_ids: Sequence[int]) -> list[int]:
            return [min(token, embedded - 1) for token in token_ids]

        view = micro_batch.view
        packed = trunk.prepare([(known(prompt), [known(ids) for ids in own]) for prompt, own in view.packing()])
        return sampled_alone(packed, view)

    def loss_of(self, micro_batch: MicroBatch, scored: Scored | None) -> tuple[Tensor, dict[str, Metric]]:
        """The value's loss, times its weight, with the metrics of it."""
        view = micro_batch.view
        old_values_T, returns_T, weights_T = view.values_T, view.returns_T, view.value_weights_T
        assert old_values_T is not None
        assert returns_T is not None
        assert weights_T is not None
        loss, numbers = value_loss(
            values_T=self.value_of(micro_batch, scored), old_values_T=old_values_T, returns_T=returns_T, weights_T=weights_T,
            clip=self.config.clip,
        )  # fmt: skip
        names = {"value/loss": "value_loss", "value/error": "value_error", "value/clip_share": "value_clipped"}
        return self.config.loss_weight * loss, {name: numbers[theirs] for name, theirs in names.items()}

    def backward(self, micro_batch: MicroBatch, scale: float) -> dict[str, Metric]:
        """Add the gradient of a critic that has a trunk, of ``scale`` times its loss."""
        loss, metrics = self.loss_of(micro_batch, None)
        if torch.is_grad_enabled():
            (scale * loss).backward()  # type: ignore[no-untyped-call]
        return metrics

    def sum_gradients(self, world: World) -> None:
        """Over the processes, of which one without a share of the batch has no gradient of its own. A collective call."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            world.all_reduce(parameter.grad)
        if self.optimizer is not None:
            world.sum_gradients(self.optimizer.gradients(), self.optimizer.zero_gradient)

    def step(self, made: bool) -> dict[str, Metric]:
        """Take the step if the policy's was made; a gradient that is not finite is dropped either way, head and trunk together. Returns
        the norm of the trunk's gradient before clipping, where that was looked at."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        sound = made and math.isfinite(float(sum(g.abs().sum() for g in gradients)))
        metrics: dict[str, Metric] = {}
        if sound and self.optimizer is not None:
            norm, sound = self.optimizer.step(self.config.critic_learning_rate)
            metrics["value/grad_norm"] = Max(norm)
        if sound:
            self.adamw.step()
        self.clear()
        return metrics

    def clear(self) -> None:
        """Forget gradients."""
        self.adamw.zero_grad()
        if self.optimizer is not None:
            self.optimizer.clear()

    def state(self) -> dict[str, Tensor]:
        """Weights and moments by name, for a checkpoint."""
        out: dict[str, Tensor] = {}
        for name, parameter in zip(_HEAD, self.parameters, strict=True):
            out |= {name: parameter.data} | {f"{key}.{name}": value for key, value in self.adamw.state[parameter].items()}
        if self.optimizer is not None:
            out |= {_OPTIMIZER + name: tensor for name, tensor in self.optimizer.state().items()}
        return out | {_WEIGHTS + name: p.data for name, p in self._own_masters()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` gave. Raises KeyError or ValueError for the state of something else."""
        of_trunk = {key.removeprefix(_OPTIMIZER): tensor for key, tensor in state.items() if key.startswith(_OPTIMIZER)}
        if state["weight"].shape != self.weight.shape:
            raise ValueError(f"the value head has {len(state['weight'])} inputs, but this model's states have {len(self.weight)}")
        if (self.trunk is not None) is not bool(of_trunk):
            raise ValueError("one of them has a critic of its own and the other the policy's states")
        for name, parameter in zip(_HEAD, self.parameters, strict=True):
            parameter.copy_(state[name])
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in state:
                    # AdamW counts its steps on the CPU, and has moments beside the parameter.
                    device = "cpu" if key == "step" else parameter.device
                    self.adamw.state[parameter][key] = state[f"{key}.{name}"].to(device, copy=True)
        for name, parameter in self._own_masters():
            earlier = of_trunk.get(f"master.{name}")  # what earlier versions wrote of offloaded fp32 weights
            parameter.copy_(state[_WEIGHTS + name] if earlier is None else earlier)
        if self.optimizer is not None:
            self.optimizer.load_state(of_trunk)

    def _own_masters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The trunk's trained weights that the optimiser keeps no masters of: from masters they can be made again."""
        if self.trunk is None or self.optimizer is None:
            return []
        kept = self.optimizer.state()
        return [(name, p) for name, p in self.trunk.named_parameters() if p.requires_grad and f"master.{name}" not in kept]


def make_critic(scorer: Scorer, config: Config) -> Critic:
    """The critic that ``algorithm.value.critic`` names, beside the policy as it is now. Raises ModelError for one that cannot be loaded."""
    assert config.algorithm.value is not None
    named = config.algorithm.value.critic
    if named == "shared":
        return Critic(_width(scorer), config.algorithm, scorer.device)
    trunk = (
        copy_trunk(scorer)
        if named == "copy"
        else make_scorer(load_policy(_own_model(config, named), scorer.device), config.model)
    )
    freeze_output_head(trunk)
    own = config.optimizer.model_copy(update={"learning_rate": config.algorithm.value.critic_learning_rate})
    return Critic(_width(trunk), config.algorithm, trunk.device, trunk, MasterAdamW(trunk.named_parameters(), own), scorer)


def check_critic(config: Config, tokenizer: Any, context: int) -> None:
    """Check a critic of another name without its weights; ``tokenizer`` and ``context`` are the policy's.

    Raises:
        ModelError: it cannot be loaded.
        ConfigError: it reads other tokens than the policy writes, or too few of them, or its weights cannot be trained.
    """
    if config.algorithm.value is None or (named := config.algorithm.value.critic) in ("shared", "copy"):
        return
    model = _own_model(config, named)
    check_model(model)
    refuse_untrainable(model, stored_quantisation(load_model_config(model).to_dict()))
    own = load_tokenizer(model)
    known = own.get_vocab()
    if any(known.get(token) != number for token, number in tokenizer.get_vocab().items()):
        raise ConfigError(
            f"algorithm.value.critic is {named!r}, whose tokenizer is not that of {config.model.name}, but a critic reads the very tokens "
            "that the policy wrote: name a model of the same family, or 'copy'"
        )
    refuse_short_critic(config, context, context_length(load_model_config(model), own))


def _own_model(config: Config, name: str) -> ModelConfig:
    return config.model.model_copy(update={"name": name, "revision": None})


def _width(scorer: Scorer) -> int:
    return int(scorer.module.get_output_embeddings().weight.shape[1])


def _embedded(scorer: Scorer) -> int:
    embedding: Any = scorer.module.get_input_embeddings()
    return len(embedding.weight)
