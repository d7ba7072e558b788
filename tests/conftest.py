"""Fixtures for every test: shared data, the embedded model, and tiny random models of the architectures that are trained.

torch and transformers are imported where they are used: with pytest-xdist a process that runs no tests reads this file first, and all
workers wait for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Sampling servers of the tests and their trainers know each other by it, and nothing is written where the user's own is kept.
os.environ.setdefault("GROUPWISE_VLLM_SECRET", "0f1e2d3c4b5a69788796a5b4c3d2e1f0")

# Under nohup and in some build services a hangup is ignored, and every child inherits that; tests of signals mean a plain terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # wide, so that next-token distributions are far from uniform
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def pytest_configure(config: pytest.Config) -> None:
    # Numbers, files and settings are held against the CPU's. On a machine with a GPU, `auto` would be another device, here and in every
    # process that a test starts. So a session sees the GPU only where it asks for the tests that need one, and for no others.
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.stash[_CACHE] = _make_cache()
    if config.getoption("numprocesses", None) and not is_worker:
        return  # the tests run in other processes
    import torch
    from hypothesis import HealthCheck, settings
    from transformers import PretrainedConfig

    from groupwise.threads import fix_threads

    # The same cases each time, and none too slow: whether the suite passes must not depend on luck, nor on how busy the machine is.
    settings.register_profile("certain", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("certain")
    # transformers writes each configuration out for a log line that is not shown: a tenth of a tiny run's time.
    PretrainedConfig.__repr__ = object.__repr__
    fix_threads(min(2, torch.get_num_threads()))  # tiny tensors only lose time to more threads; and whatever else runs, as many


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE in config.stash:  # not what the environment names by now: that may be the user's
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


_CACHE = pytest.StashKey[Path]()


def _make_cache() -> Path:
    """A cache of this session, for its workers and all that they start. Of the user's it shows what does not come of tests."""
    cache = os.environ.get("GROUPWISE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "groupwise"
    user = Path(cache).expanduser()
    session = Path(tempfile.mkdtemp(prefix="groupwise-cache-"))
    (session / "user").symlink_to(user)
    for kept in user.glob("*"):
        if kept.name not in ("fast-paths", "user"):
            (session / kept.name).symlink_to(kept)
    os.environ["GROUPWISE_CACHE"] = str(session)
    return session


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU, and a session of its own: make test-gpu")


def tiny_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A random fp32 model in eval mode in which no parameter is neutral: biases are not 0 and norms are not 1, so that leaving
    one out shows."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder ``shared/data`` beside the repository, with GSM8K, Qwen2.5's tokenizer and more."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the data folder {SHARED_DATA.parent.name}/{SHARED_DATA.name} beside the repository")
    return SHARED_DATA


@pytest.fixture(scope="session")
def qwen_tokenizer(shared_data: Path) -> Any:
    """Qwen2.5-Instruct's real tokenizer. Shared by the whole session: do not change it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "qwen2.5-tokenizer")


@pytest.fixture(scope="session")
def embedded_model_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; fetched and converted on first use, then in the user's cache."""
    from groupwise.models.embedded import ensure_embedded_model

    session = Path(os.environ["GROUPWISE_CACHE"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUPWISE_CACHE", str((session / "user").readlink()))
        folder = ensure_embedded_model()
    with contextlib.suppress(FileExistsError):
        (session / folder.name).symlink_to(folder)
    return session / folder.name


@pytest.fixture
def deny(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``deny("exists")``: that method of ``Path`` has no permission in a folder named ``closed``, whoever runs the tests."""

    def make(method: str) -> None:
        asked = getattr(Path, method)

        def closed(path: Path, **how: Any) -> Any:
            if path.parent.name == "closed":
                raise PermissionError(13, "Permission denied", str(path))
            return asked(path, **how)

        monkeypatch.setattr(Path, method, closed)

    return make


@pytest.fixture
def tiny_llama() -> Callable[..., PreTrainedModel]:
    """``tiny_llama(seed=0, **config)``: a random Llama with untied embeddings; equal seeds give equal weights."""
    from transformers import LlamaConfig

    return lambda seed=0, **config: tiny_model(LlamaConfig(**{**TINY, "tie_word_embeddings": False, **config}), seed)


@pytest.fixture
def tiny_qwen2() -> Callable[..., PreTrainedModel]:
    """``tiny_qwen2(seed=0, **config)``: a random Qwen2 (biases on q, k, v) with tied embeddings."""
    from transformers import Qwen2Config

    return lambda seed=0, **config: tiny_model(Qwen2Config(**{**TINY, "tie_word_embeddings": True, **config}), seed)


@pytest.fixture
def tiny_qwen3() -> Callable[..., PreTrainedModel]:
    """``tiny_qwen3(seed=0, **config)``: a random Qwen3 (normed q and k; heads wider than their share of the width)."""
    from transformers import Qwen3Config

    return lambda seed=0, **config: tiny_model(
        Qwen3Config(**{**TINY, "head_dim": 32, "tie_word_embeddings": False, **config}), seed
    )


@pytest.fixture
def tiny_gemma3() -> Callable[..., PreTrainedModel]:
    """``tiny_gemma3(seed=0, **config)``: a random Gemma 3 in which every other layer, the first among them, sees 6 positions, fewer than
    prompts and completions here have. Its output head is its own, or it would mostly say the last token again."""
    from transformers import Gemma3TextConfig

    own = {"sliding_window": 6, "head_dim": 32, "query_pre_attn_scalar": 24, "tie_word_embeddings": False}

    def make(seed: int = 0, **config: Any) -> PreTrainedModel:
        settings = {**TINY, **own, **config}
        kinds = ["sliding_attention", "full_attention"] * settings["num_hidden_layers"]
        return tiny_model(Gemma3TextConfig(**{"layer_types": kinds[: settings["num_hidden_layers"]], **settings}), seed)

    return make


@pytest.fixture
def tiny_mistral() -> Callable[..., PreTrainedModel]:
    """``tiny_mistral(seed=0, **config)``: a random Mistral (no sliding window; heads narrower than their share of the width)."""
    from transformers import MistralConfig

    return lambda seed=0, **config: tiny_model(
        MistralConfig(**{**TINY, "head_dim": 8, "sliding_window": None, "tie_word_embeddings": False, **config}), seed
    )
