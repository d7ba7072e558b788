"""The policy that the KL is measured from: frozen, renewed now and then, or a moving average of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from groupwise.models.scorer import Scorer, make_reference
from groupwise.training.sharding.divided import local, round_local_

__all__ = ["Reference"]


class Reference:
    """A copy of the policy as it was when this was made, and what has been mixed into it since.

    With ``mixing`` a below 1, each renewal makes it (1 - a) reference + a policy (TR-DPO, arXiv 2404.09656). The average is kept in
    fp32: a bf16 copy would round most of a small share away. With ``offload`` its weights lie in the machine's memory except while it
    is ``present``.
    """

    def __init__(
        self, scorer: Scorer, mixing: float = 1.0, *, offload: bool = False, copied: Callable[[Scorer], Scorer] = make_reference
    ) -> None:
        """``copied`` makes the frozen copy; where processes hold parts of the policy, each has the same parts of it."""
        self.policy, self.mixing, self.offload = scorer, mixing, offload
        self.scorer = copied(scorer)
        if offload:
            self._park()
        self._average: dict[str, Tensor] = {}
        if mixing < 1:
            self._average = {name: local(p).float().clone() for name, p in self.scorer.named_parameters()}

    def _park(self) -> None:
        """Move the weights into the machine's memory. The module's own parameters, views of the decoder's, would hold on to the old place:
        they go."""
        own = {id(parameter) for _, parameter in self.scorer.named_parameters()}
        for _, parameter in self.scorer.named_parameters():
            weights = parameter.data.cpu()
            # Pinned, copies to a GPU are several times as fast, and run beside what is launched meanwhile.
            parameter.data = weights.pin_memory() if self.scorer.device.type == "cuda" else weights
        if own:
            for view in self.scorer.module.parameters():
                if id(view) not in own:
                    view.data = view.data.new_empty(0)

    @contextmanager
    def present(self) -> Iterator[Scorer]:
        """The reference, its weights where its passes are computed."""
        parked = [(p, p.data) for _, p in self.scorer.named_parameters()] if self.offload else []
        try:
            for parameter, weights in parked:
                parameter.data = weights.to(self.scorer.device, copy=True, non_blocking=True)
            yield self.scorer
        finally:
            for parameter, weights in parked:
                parameter.data = weights

    @torch.no_grad()
    def renew(self) -> None:
        """Move to the policy as it is now, or the share ``mixing`` of the way."""
        policy = {name: local(p) for name, p in self.policy.named_parameters()}
        for name, parameter in self.scorer.named_parameters():
            round_local_(parameter, policy[name])  # FSDP2 keeps masters: what is mixed in is the weights that compute
            if self._average:
                average = self._average[name]
                average.lerp_(local(parameter).to(average.device, torch.float32), self.mixing)
                round_local_(parameter, average)

    def state(self) -> dict[str, Tensor]:
        """Weights by name, in fp32 where they are averages; for a checkpoint."""
        return self._average or {name: local(p) for name, p in self.scorer.named_parameters()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self.scorer.named_parameters():
            if self._average:
                self._average[name].copy_(state[name])
            round_local_(parameter, state[name])
