"""Asking the Hugging Face Hub for a model, once and briefly, so that a missing network costs a moment and one clear sentence."""

from __future__ import annotations

from functools import lru_cache

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from groupwise.errors import ModelError

__all__ = ["only_from_cache"]

_TIMEOUT_S = 10.0


@lru_cache(maxsize=32)
def only_from_cache(name: str, revision: str | None) -> bool:
    """False when the Hub answers for the model ``name``; True when it cannot be reached but the model is in the local cache.

    Without this, transformers tries each file of a cached model again and again on a machine without network, for minutes.
    Raises ModelError when the model is neither there nor here.
    """
    try:
        HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S)
        return False
    except GatedRepoError as error:
        raise ModelError(
            f"model {name!r} is gated on the Hub: accept its terms on its page, and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"model {name!r} has no revision {revision!r} on the Hub: check model.revision") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model {name!r} is neither a folder here nor a public model on the Hub: check the spelling, and log in with "
            "`hf auth login` if it is private"
        ) from error
    except Exception as error:  # no network, offline mode, a Hub in trouble: httpx's or requests' errors, by the client's release
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return True
        raise ModelError(
            f"model {name!r} is neither a folder here nor in the local Hub cache, and the Hub cannot be reached "
            f"({type(error).__name__}): check the network, or name a model folder or the built-in model"
        ) from error
