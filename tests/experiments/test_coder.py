"""The model of 1.5B from a GGUF file: the same weights, the output's for both ends, and a chat's ends."""

import json

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from transformers import AutoTokenizer

from experiments import coder

WIDTH, INNER, VOCABULARY = 8, 16, ["a", "b", "ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "aba"]
SHAPES = {
    "token_embd.weight": (7, WIDTH), "output.weight": (7, WIDTH), "output_norm.weight": (WIDTH,), "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.ffn_norm.weight": (WIDTH,), "blk.0.attn_q.weight": (WIDTH, WIDTH), "blk.0.attn_q.bias": (WIDTH,),
    "blk.0.attn_k.weight": (4, WIDTH), "blk.0.attn_k.bias": (4,), "blk.0.attn_v.weight": (4, WIDTH), "blk.0.attn_v.bias": (4,),
    "blk.0.attn_output.weight": (WIDTH, WIDTH), "blk.0.ffn_gate.weight": (INNER, WIDTH), "blk.0.ffn_up.weight": (INNER, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, INNER),
}  # fmt: skip


def write(file):
    weights = {
        name: np.random.default_rng(place).normal(size=shape).astype(np.float32)
        for place, (name, shape) in enumerate(SHAPES.items())
    }
    out = GGUFWriter(str(file), "qwen2")
    out.add_block_count(1)
    out.add_context_length(64)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(INNER)
    out.add_head_count(2)
    out.add_head_count_kv(1)
    out.add_rope_freq_base(1e6)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(VOCABULARY)
    out.add_token_types([1, 1, 1, 3, 3, 3, 1])
    out.add_token_merges(["a b", "ab a"])  # transformers reads a list of one as its element
    out.add_eos_token_id(5)
    for name, weight in weights.items():
        out.add_tensor(name, weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return weights


def test_a_folder_has_the_file_s_weights_tied_and_ends_with_the_chat_s_tokens(tmp_path):
    weights = write(tmp_path / "tiny.gguf")
    out = tmp_path / "model"
    coder.convert(tmp_path / "tiny.gguf", out)
    found = load_file(out / "model.safetensors")
    assert len(found) == len(weights) - 1
    for name, theirs in (
        ("model.embed_tokens", "output"), ("model.norm", "output_norm"), ("model.layers.0.self_attn.k_proj", "blk.0.attn_k"),
        ("model.layers.0.mlp.down_proj", "blk.0.ffn_down"),
    ):  # fmt: skip
        assert torch.equal(found[f"{name}.weight"], torch.from_numpy(weights[f"{theirs}.weight"]).to(torch.bfloat16))
    config = json.loads((out / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["num_key_value_heads"], config["vocab_size"]) == (True, 1, 7)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [5, 3]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer("ab")["input_ids"], tokenizer.eos_token) == ([2], "<|im_end|>")
