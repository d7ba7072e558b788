"""Prompts, a tokenizer that needs no files, and the probabilities that sampled frequencies are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config

from groupwise.types import Problem, Prompt


class NumberTokenizer:
    """Decodes token 7 to ``"7 "``: text that any list of tokens has, and that grows by whole pieces. Token 2 is special."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(f"{token} " for token in ids if not (skip_special_tokens and token == 2))


@pytest.fixture
def tokenizer() -> NumberTokenizer:
    return NumberTokenizer()


@pytest.fixture
def make_prompts() -> Callable[..., list[Prompt]]:
    """``make_prompts(lengths, vocabulary=128)``: prompts of random tokens; problem ids are p0, p1 ..."""

    def make(lengths: Sequence[int], vocabulary: int = 128) -> list[Prompt]:
        generator = torch.Generator().manual_seed(len(lengths))
        ids = [tuple(torch.randint(3, vocabulary, (n,), generator=generator).tolist()) for n in lengths]
        return [Prompt(Problem(f"p{i}", "", ""), "", tokens) for i, tokens in enumerate(ids)]

    return make


@pytest.fixture
def chi_square() -> Callable[[Tensor, Tensor], float]:
    """How many standard deviations Pearson's statistic lies above its mean, for counts and the probabilities they came from.

    Cells that expect fewer than 5 are put together. The seeds of these tests are fixed, so a bound of 4 never fails by chance.
    """

    def statistic(counts: Tensor, probabilities: Tensor) -> float:
        expected = probabilities.double() * counts.sum()
        rare = expected < 5
        seen = torch.cat([counts[~rare].double(), counts[rare].sum().double()[None]])
        wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
        seen, wanted = seen[wanted > 0], wanted[wanted > 0]
        freedom = len(wanted) - 1
        assert freedom > 0
        return float((((seen - wanted) ** 2 / wanted).sum() - freedom) / (2 * freedom) ** 0.5)

    return statistic


@pytest.fixture
def ids_of() -> Callable[[Any], list[list[tuple[int, ...]]]]:
    """The token ids of what ``sample`` returned."""
    return lambda groups: [[completion.token_ids for completion in group] for group in groups]


def _random_model(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture
def tiny_gpt2() -> Callable[[], Any]:
    """Learnt positions, dropout on while training, and no part that the lean decoder knows."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 128, "initializer_range": 0.2}
    return lambda: _random_model(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


@pytest.fixture
def tiny_nemotron_h() -> Callable[[], Any]:
    """A layer with a recurrent state beside one of attention."""
    NemotronHConfig = pytest.importorskip("transformers.models.nemotron_h").NemotronHConfig  # not in transformers 4

    sizes = {"vocab_size": 128, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 16, "n_groups": 1, "use_mamba_kernels": False}
    return lambda: _random_model(
        NemotronHConfig(layers_block_type=["mamba", "attention"], **sizes, **mamba, initializer_range=0.3, pad_token_id=None)
    )


@pytest.fixture
def tiny_falcon_h1() -> Callable[[], Any]:
    """Layers that have attention and a recurrent state both."""
    if transformers.__version__.startswith("4."):
        pytest.skip("it gives no cache there unless it gets one")
    FalconH1Config = pytest.importorskip("transformers.models.falcon_h1").FalconH1Config

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
    return lambda: _random_model(FalconH1Config(**sizes, **heads, **mamba, initializer_range=0.3, pad_token_id=None))


@pytest.fixture
def tiny_gemma2() -> Callable[[], Any]:
    """Caps its logits, and looks back 8 tokens in every other layer: shorter than prompts and completions here."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "attn_implementation": "eager"}
    return lambda: _random_model(
        Gemma2Config(**sizes, **heads, initializer_range=0.3, final_logit_softcapping=3.0, pad_token_id=None)
    )
