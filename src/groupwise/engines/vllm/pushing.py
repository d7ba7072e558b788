"""Weights on their way to the server: sent, counted, sealed, and from the beginning again where something came in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from groupwise.engines.vllm.opening import check_server
from groupwise.engines.vllm.protocol import BeginAgain, Link, Refused, StaleWeights, Unreachable, digest_of
from groupwise.engines.vllm.weights import packed_buckets
from groupwise.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from groupwise.models.load import Policy

__all__ = ["Patience", "push"]


def push(
    link: Link,
    policy: Policy,
    weights: str,
    version: int,
    *,
    take_hold: Callable[[], None],
    bucket_bytes: int,
    patience_s: float,
) -> None:
    """Have the policy's weights held there under the id ``weights``. The policy must stand still meanwhile: what is interrupted is sent
    again from its beginning, and what is held in the end is compared, by its digest, with what was sent last. ``take_hold`` of the server
    comes first each time, since one that was restarted does not know whose it is.

    Raises TrainingError where the server is away for longer than ``patience_s``, does not take them, or is not the one it was.
    """
    patience = Patience(patience_s)
    while True:
        try:
            check_server(link, policy.model.config, policy.name)  # it may have been restarted, with something else
            take_hold()
            held, sent = link.begin(weights), list[str]()
            for index, (data, sha256) in enumerate(packed_buckets(policy.model, bucket_bytes)):
                sent.append(sha256)
                if held is None:
                    link.bucket(weights, index, data, sha256)
            told = {"weights": weights, "digest": held} if held is not None else link.commit(weights, version, sent)
        except (Unreachable, BeginAgain) as error:
            patience.wait(error, "the weights cannot be pushed")
            continue
        except (Refused, StaleWeights, ConfigError) as refused:
            raise TrainingError(f"vLLM at {link.where} does not take the weights: {refused}") from refused
        if (told.get("weights"), told.get("digest")) != (weights, digest_of(sent)):
            raise TrainingError(
                f"vLLM at {link.where} says that it holds the weights {told.get('weights')} of digest {str(told.get('digest'))[:12]}, but "
                f"{weights} of {digest_of(sent)[:12]} were pushed: restart it, and continue with --resume"
            )
        return


class Patience:
    """How long a server may be away before a run gives up."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.since = seconds, time.monotonic()
        self.lost = False

    def renew(self) -> None:
        self.since = time.monotonic()

    def wait(self, error: Exception, what: str) -> None:
        """A moment; raises TrainingError when it has been long enough."""
        self.lost = True
        if time.monotonic() - self.since >= self.seconds:
            raise TrainingError(
                f"{what}: {error}, for {self.seconds:.0f} s (rollout.vllm.patience_s); start the server again and continue with --resume"
            ) from error
        time.sleep(min(1.0, self.seconds / 10))
