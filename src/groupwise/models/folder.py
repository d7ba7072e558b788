"""Model folders as files: what must be in one, and how one is written; and asking the Hub for a model. No torch here."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from groupwise.errors import ModelError

__all__ = [
    "adapter_in", "base_of", "check_adapter_files", "check_cache", "check_folder", "holds_model", "is_folder_name", "make_readable_by_4",
    "move_into_place", "only_from_cache", "refused_by_hub", "stored_quantisation",
]  # fmt: skip

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)")
_POINTER = b"version https://git-lfs"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def is_folder_name(name: str) -> bool:
    """Whether ``model.name`` means a folder: something of that name exists, or it cannot be a Hub name (``./x``, ``a/b/c``)."""
    return Path(name).expanduser().exists() or re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) is None


def check_folder(folder: Path, *, takes_adapters: bool = False) -> None:
    """Raise ModelError where ``folder`` lacks a config, weights, a shard that its index names, or a tokenizer, where an adapter lies beside
    its weights (unless who loads it ``takes_adapters`` too), or where a safetensors file is cut short. Reads headers only."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ModelError(f"the model folder {folder} {what}: name a folder with config.json and weights, or a Hub name")
    if not holds_model(folder) and any((folder / place / "adapter_config.json").is_file() for place in (".", "adapter")):
        raise ModelError(
            f"the model folder {folder} holds an adapter alone, without config.json and weights: make a whole model of it with "
            f"`groupwise merge {folder} NEW_FOLDER`"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {folder} has no config.json: name a folder with a whole Hugging Face model")
    _read_json(folder / "config.json")
    weights = _weight_files(folder)
    if not weights:
        raise ModelError(
            f"the model folder {folder} has no weights (model.safetensors or pytorch_model.bin, or an index of such files): "
            "copy or download them there"
        )
    if not takes_adapters and (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"the model folder {folder} holds an adapter (adapter_config.json) beside its weights, and would be used without it: move the "
            "adapter's files to a folder of their own and name that, or remove them where it is merged into the weights"
        )
    for file in weights:
        _check_weights(file)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"the model folder {folder} has no tokenizer (tokenizer.json): copy the model's tokenizer files there")


def check_adapter_files(folder: Path) -> None:
    """Raise ModelError where the adapter in ``folder`` lacks its weights, or they are cut short. Reads headers only."""
    files = [folder / name for name in ("adapter_model.safetensors", "adapter_model.bin") if (folder / name).is_file()]
    if not files:
        raise ModelError(f"the adapter in {folder} has no weights (adapter_model.safetensors): copy or download them there")
    _check_weights(files[0])


def holds_model(folder: Path) -> bool:
    """Whether there are a config.json and weights in ``folder``, all of them or some."""
    with suppress(ModelError):  # an index whose files are not all there
        return (folder / "config.json").is_file() and bool(_weight_files(folder))
    return True


def adapter_in(folder: Path) -> Path | None:
    """Where in ``folder`` an adapter lies that has no whole model around it: an adapter's own folder, a model's, or a checkpoint."""
    if holds_model(folder) or holds_model(folder / "model"):
        return None
    places = (folder / place for place in (".", "adapter", "model/adapter"))
    return next((place.resolve() for place in places if (place / "adapter_config.json").is_file()), None)


def base_of(adapter: Path) -> tuple[str, str | None]:
    """The model under the adapter in this folder, a name or a folder, and its revision on the Hub, if any. Raises ModelError where it does
    not say."""
    config = _read_json(adapter / "adapter_config.json")
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"the adapter in {adapter} does not say which model it belongs to: make a whole model of it with "
            f"`groupwise merge {adapter} NEW_FOLDER --base MODEL`"
        )
    return base, str(revision) if revision else None


def stored_quantisation(config: Mapping[str, Any]) -> str:
    """How a model's files hold its matrices, by its config.json: ``none``, ``4bit`` or ``8bit`` by bitsandbytes, or another method's
    name, such as ``fp8``."""
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    for bits in ("4bit", "8bit"):
        if settings.get(f"load_in_{bits}"):
            return bits
    return str(settings.get("quant_method") or "an unnamed method") if settings else "none"


def make_readable_by_4(folder: Path) -> None:
    """Rewrite the JSON files that transformers 5 saves so that 4.57 reads the same model and the same tokenizer from them.

    5 writes rotary settings only into ``rope_parameters``, which 4.57 ignores without a word, and tokenizers under a class name
    and with a list of extra special tokens that make 4.57 fail. On a folder saved by 4.57 this changes nothing of substance.
    """
    _rewrite(folder / "config.json", _rewrite_config)
    if (folder / "tokenizer_config.json").is_file():
        _rewrite(folder / "tokenizer_config.json", _rewrite_tokenizer_config)


def move_into_place(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``; into a ``target`` that exists, move file by file, weights first and config.json last."""
    if not target.exists():
        source.rename(target)
        return
    (target / "config.json").unlink(missing_ok=True)  # from here to the end the folder does not load, rather than load a mixture
    stale = {*_INDEXES, "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}
    if (source / "tokenizer_config.json").is_file():  # its chat template would be passed over for one in a file of its own
        stale.add("chat_template.jinja")
        shutil.rmtree(target / "additional_chat_templates", ignore_errors=True)
    for old in list(target.iterdir()):
        if _WEIGHTS.fullmatch(old.name) or old.name in stale:
            old.unlink()
    for file in sorted(source.iterdir(), key=lambda path: path.name == "config.json"):
        if file.is_dir():
            shutil.rmtree(target / file.name, ignore_errors=True)
        os.replace(file, target / file.name)
    shutil.rmtree(source)


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read, by its order of preference."""
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (folder / name).is_file() and name not in _INDEXES:
            return [folder / name]
        if (folder / name).is_file():
            shards = sorted(set(_read_json(folder / name).get("weight_map", {}).values()))
            if missing := [shard for shard in shards if not (folder / shard).is_file()]:
                raise ModelError(
                    f"the model folder {folder} lacks {len(missing)} of the {len(shards)} weight files that {name} names "
                    f"(such as {missing[0]}): copy or download them again"
                )
            return [folder / shard for shard in shards]
    return []


def _check_weights(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ModelError(
                f"the weights file {file} is a Git LFS pointer, without the weights: copy or download the file itself"
            )
    if file.suffix == ".safetensors":
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """A safetensors file says in its header how long it is: 8 bytes of header length, a JSON header, then the tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        try:
            header = json.loads(stream.read(header_bytes)) if header_bytes < size else None
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise ModelError(f"the weights file {file} is not a safetensors file: copy or download it again")
    expected = 8 + header_bytes + max(_ends(header.values()), default=0)
    if size < expected:
        raise ModelError(f"the weights file {file} has {size} bytes of {expected}: it was cut short; copy or download it again")


def _ends(entries: Iterable[dict[str, Any]]) -> list[int]:
    return [entry["data_offsets"][1] for entry in entries if "data_offsets" in entry]


def _rewrite_config(config: dict[str, Any]) -> None:
    if isinstance(text := config.get("text_config"), dict):  # of a model that sees images too
        _rewrite_config(text)
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]  # the name that other tools, and transformers before 4.56, read
    kind, rope = str(config.get("model_type")), config.get("rope_parameters")
    if isinstance(rope, dict) and "sliding_attention" in rope:  # one set of rotary settings for each kind of layer
        if kind == "modernbert-decoder":
            config["global_rope_theta"], config["local_rope_theta"] = (
                rope[of]["rope_theta"] for of in ("full_attention", "sliding_attention")
            )
        if not kind.startswith(("gemma3", "olmo3")):
            return  # 4.57 lacks the others, and 5 would take one rope_scaling in place of all sets
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if kind.startswith("gpt_neox"):  # with names of its own
            config["rotary_emb_base"], config["rotary_pct"] = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
            if kind in ("phi3", "phi4_multimodal") and not {"factor", "attention_factor"} & rope.keys():
                # 4.57 takes three fields and no more. Both read the others from beside them.
                config["rope_scaling"] = {
                    "type": rope["rope_type"],
                    **{key: rope[key] for key in ("short_factor", "long_factor")},
                }


def _rewrite_tokenizer_config(config: dict[str, Any]) -> None:
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config.setdefault("model_input_names", ["input_ids", "attention_mask"])
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}): copy or download the model's files again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object: copy or download the model's files again")
    return content


def _rewrite(path: Path, change: Any) -> None:
    content = _read_json(path)
    change(content)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_TIMEOUT_S = 10.0


@lru_cache(maxsize=32)
def only_from_cache(name: str, revision: str | None) -> bool:
    """False when the Hub answers for the model ``name``; True when it cannot be reached but the model is in the local cache.

    Without this, transformers tries each file of a cached model again and again on a machine without network, for minutes.
    Raises ModelError when the model is neither there nor here.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache  # slow to import, and a folder needs none of it

    try:
        HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S)
        return False
    except Exception as error:  # no network, offline mode, a Hub in trouble: httpx's or requests' errors, by the client's release
        if (refusal := refused_by_hub(name, revision, error)) is not None:
            raise refusal from error
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return True
        raise ModelError(
            f"model {name!r} is neither a folder here nor in the local Hub cache, and the Hub cannot be reached "
            f"({type(error).__name__}): check the network, or name a model folder or the embedded model"
        ) from error


def check_cache(name: str, revision: str | None) -> None:
    """Raise ModelError where the Hub cannot be reached, and its local cache has the model ``name`` without all of its weights, as a dry run
    leaves it. Reads no weights."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision) if only_from_cache(name, revision) else None
    if not isinstance(found, str):
        return
    with suppress(ModelError):  # an index whose files are not all there
        if _weight_files(Path(found).parent):
            return
    of_revision = "" if revision is None else f" --revision {revision}"
    raise ModelError(
        f"the weights of model {name!r} are not all in the local Hub cache, and the Hub cannot be reached: where there is a network, run "
        f"`hf download {name}{of_revision}`"
    )


def refused_by_hub(name: str, revision: str | None, error: BaseException) -> ModelError | None:
    """What to say of ``error``, which the Hub's client raised for the model ``name``, where the Hub answered that it does not give it."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelError(f"model {name!r} is gated on the Hub: accept its terms on its page, and log in with `hf auth login`")
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"model {name!r} has no revision {revision!r} on the Hub: check model.revision")
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"model {name!r} is neither a folder here nor a public model on the Hub: check the spelling, and log in with "
            "`hf auth login` if it is private"
        )
    return None
