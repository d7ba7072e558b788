"""Loading and saving policies: a model, its tokenizer, and what stops it, from a folder, the Hub, or the embedded default.

``check_model`` finds what is wrong with a model in milliseconds, before any weights are read. ``save_model`` writes a folder
that transformers 4.57 and 5 both load to the same numbers.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_flash_attn_2_available

from groupwise.config.schema import ModelConfig
from groupwise.durable import sync, sync_tree
from groupwise.errors import ModelError
from groupwise.importing import in_one_line
from groupwise.memory import blocks_of_their_own, own_memory
from groupwise.models.adapters import (
    attach,
    base_module,
    has_injected_adapter,
    is_adapted,
    load_trained,
    merged,
    merged_state,
    peft_config_of,
    require_peft,
    why_not_mergeable,
)
from groupwise.models.devices import check_device_map, device_map_arguments, input_device, remove_with, with_dtype
from groupwise.models.embedded import EMBEDDED_FOLDER, EMBEDDED_NAME, ensure_embedded_model
from groupwise.models.families import FAMILIES, experts_of, longrope_positions
from groupwise.models.folder import (
    adapter_in,
    base_of,
    check_adapter_files,
    check_cache,
    check_folder,
    is_folder_name,
    make_readable_by_4,
    move_into_place,
    only_from_cache,
    refused_by_hub,
    stored_quantisation,
)
from groupwise.models.quantised import multiply_dequantised, quantisation_settings, quantised_layers
from groupwise.models.quiet import quiet
from groupwise.models.saving import Made, write_tensors

__all__ = [
    "Policy",
    "attention_for",
    "base_under",
    "caps_attention",
    "check_adapter",
    "check_model",
    "context_length",
    "copy_to_cpu",
    "embedding_rows",
    "embeds_all",
    "end_token_ids",
    "generation_config",
    "leaves_experts",
    "load_model_config",
    "load_policy",
    "load_tokenizer",
    "origin_of",
    "resolve_device",
    "save_model",
    "source_of",
    "with_base",
]


@dataclass(frozen=True, slots=True)
class Policy:
    """A causal language model ready to sample and to learn, with its tokenizer.

    The model is in eval mode with all parameters trainable. Put it into ``train()`` mode for updates where gradient checkpointing
    is on (it only acts there), and back for sampling, where the KV cache is needed.
    """

    model: PreTrainedModel
    tokenizer: Any
    """A ``PreTrainedTokenizerBase``; its pad token is always set, and may be the same as an end token."""
    end_token_ids: tuple[int, ...]
    """Every token that ends the model's turn, ascending; never empty."""
    context_length: int
    """Positions the model was made for: prompt and completion together, in tokens."""
    name: str
    """The name it was asked for by."""
    adapter_only: bool = False
    """Whether ``save_model`` writes its adapter alone."""

    @property
    def device(self) -> torch.device:
        return input_device(self.model)

    @property
    def rows(self) -> int:
        """Tokens that the embedding has a row for."""
        return embedding_rows(self.model)


def check_model(config: ModelConfig, reads_weights: bool = True) -> None:
    """Raise ModelError for a model that cannot be loaded. Reads no weights, and asks the Hub for config.json at most.

    ``reads_weights``: whether this process will; one that is given its share by another needs none on its machine.
    """
    resolve_device(config.device)
    config = with_dtype(config)
    _check_attention(config)
    quantisation_settings(config)
    check_device_map(config)
    local = "built in" if config.name == EMBEDDED_NAME else "a folder" if is_folder_name(config.name) else ""
    if local and config.revision not in (None, "main"):  # "main" is what TRL's scripts say of every model
        raise ModelError(
            f"model.revision is {config.revision!r}, but model {config.name!r} is {local}, which has no revisions: remove it, or name a "
            "model of the Hub"
        )
    if config.name == EMBEDDED_NAME:
        return
    if is_folder_name(config.name):
        check_folder(Path(config.name).expanduser())
    elif reads_weights:
        check_cache(config.name, config.revision)
    hf_config = load_model_config(config)
    remote_code = "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})
    if not remote_code and hf_config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"model {config.name!r} is of the type {hf_config.model_type!r}, which is no causal language model: "
            "name a model that continues text, such as one of the Qwen or Llama family"
        )
    attention_for(config, resolve_device(config.device), hf_config)


def check_adapter(config: ModelConfig) -> None:
    """Raise ModelError where ``model.lora`` names a layer that the model lacks: peft leaves such names out without a word, unless no name
    is left. And where ``model.quantization`` would leave out nearly all weights. Reads no weights."""
    if config.lora is None:
        return
    require_peft()
    if config.quantization != "none" and leaves_experts(config):
        raise ModelError(
            f"model.quantization is {config.quantization}, but the experts of {config.name}, which are nearly all of its weights, are no "
            "linear layers and would stay as they are: leave it out, or name a dense model"
        )
    targets = config.lora.target_modules
    if targets == "all-linear":
        return
    modules = [(n, m) for n, m in _without_weights(with_dtype(config), None).named_modules() if hasattr(m, "weight")]
    for target in [targets] if isinstance(targets, str) else targets:
        whole = isinstance(targets, str)  # an expression over full names
        if not any(re.fullmatch(target, name) if whole else f".{name}".endswith(f".{target}") for name, _ in modules):
            known = sorted({name.rpartition(".")[2] for name, module in modules if hasattr(module, "in_features")})
            raise ModelError(
                f"model.lora.target_modules has {target!r}, but no layer of {config.name} is called so: use all-linear, or some of "
                f"{', '.join(known)}"
            )


def leaves_experts(config: ModelConfig) -> bool:
    """Whether the model is a mixture whose experts are one tensor in each layer, as transformers 5 holds most: neither bitsandbytes nor
    ``all-linear`` looks into it. Reads no weights."""
    if experts_of(load_model_config(config).to_dict()) < 2:
        return False
    model = _without_weights(with_dtype(config), None)
    return any("expert" in name and parameter.dim() == 3 for name, parameter in model.named_parameters())


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The model's Hugging Face config, without its weights."""
    with _explained(config, "config"):
        return AutoConfig.from_pretrained(source_of(config), **origin_of(config))


def load_tokenizer(config: ModelConfig, adapter: Path | None = None) -> Any:
    """The model's tokenizer, or that beside its ``adapter``, which may have another chat template. Without a pad token of its own it pads
    with an end token: masks never look at pad ids."""
    source, origin = source_of(config), origin_of(config)
    if _has_tokenizer(adapter):  # without a config.json, by which transformers knows the tokenizer's class
        source, origin = str(adapter), {"trust_remote_code": config.trust_remote_code, "config": load_model_config(config)}
    with _explained(config, "tokenizer"), quiet():
        tokenizer = AutoTokenizer.from_pretrained(source, **origin)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    config: ModelConfig, device: str | torch.device | None = None, seed: int = 0, adapter: Path | None = None
) -> Policy:
    """Load weights and tokenizer. ``device`` overrides ``config.device``; on ``meta`` no weights are read, and there are only shapes.
    ``seed``: a new adapter's weights are drawn from it. ``adapter``: the folder of a trained one, which goes on the model, with the
    tokenizer beside it, if any.

    Sampling settings of the checkpoint's generation_config (temperature, top-p, repetition penalty ...) are dropped: what is
    sampled must be the distribution that is scored.
    """
    target = torch.device(device) if device is not None else resolve_device(config.device)
    if target.type == "cuda" and target.index is not None:
        torch.cuda.set_device(target)  # Triton, graphs and figures of memory take the current device
    config = with_dtype(config)
    check_model(config, reads_weights=target.type != "meta")
    if adapter is not None:
        check_adapter_files(adapter)
    hf_config, tokenizer = load_model_config(config), load_tokenizer(config, adapter)
    end_ids = end_token_ids(tokenizer, hf_config, generation_config(config))
    if not end_ids:
        raise ModelError(
            f"model {config.name!r} names no end-of-sequence token in its tokenizer, config or generation config, so that no "
            "completion could ever stop: add eos_token to its tokenizer_config.json"
        )
    stored = stored_quantisation(hf_config.to_dict())
    if stored in ("4bit", "8bit"):
        config = config.model_copy(update={"quantization": stored})
    with blocks_of_their_own():  # what quantising needs in passing goes back at once
        model = multiply_dequantised(_load_weights(config, attention_for(config, target, hf_config), target, stored))
    if config.device_map is None and target.type == "cpu":  # what a map leaves on the disk stays there; a GPU's copy is read once
        own_memory([*model.parameters(), *model.buffers()])
    if config.quantization == "none" and config.device_map is None and target.type != "meta":  # else it is where it belongs
        model.to(target)  # type: ignore[arg-type]  # transformers' annotation of this method hides its argument
    _check_vocabulary(str(adapter) if _has_tokenizer(adapter) else config.name, tokenizer, model)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=list(end_ids), pad_token_id=tokenizer.pad_token_id
    )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.lora is not None:
        model = attach(model, peft_config_of(config.lora), seed, config.revision)
    policy = Policy(model.eval(), tokenizer, end_ids, context_length(hf_config, tokenizer), config.name)
    return policy if adapter is None else load_trained(policy, adapter)


def with_base(config: ModelConfig) -> tuple[ModelConfig, Path | None]:
    """The base model of an adapter alone, such as a checkpoint's, and the adapter's folder for ``load_policy``.
    Any other as it is, and None."""
    if config.name == EMBEDDED_NAME or (adapter := adapter_in(Path(config.name).expanduser())) is None:
        return config, None
    base, revision = base_under(adapter, config.revision)
    return config.model_copy(update={"name": base, "revision": revision, "lora": None}), adapter


def base_under(adapter: Path, revision: str | None = None) -> tuple[str, str | None]:
    """``model.name`` of what the adapter in this folder belongs to, and its revision on the Hub, if any: ``revision`` goes before its
    own."""
    base, own = base_of(adapter)
    if Path(base).name == EMBEDDED_FOLDER and not Path(base).is_dir():  # made on another machine
        base = EMBEDDED_NAME
    return base, None if base == EMBEDDED_NAME or is_folder_name(base) else revision or own


def end_token_ids(tokenizer: Any, hf_config: PretrainedConfig, generation_config: Any = None) -> tuple[int, ...]:
    """Every token that ends the model's turn: what the tokenizer, the config and the generation config call eos (a number or a
    list each), and the special token that the chat template puts right after the assistant's words. Ascending, without repeats.

    Checkpoints disagree with themselves: base models trained further, for example, keep ``<|endoftext|>`` as the config's eos
    while their template ends a turn with ``<|im_end|>``.
    """
    holders = (tokenizer, hf_config, hf_config.get_text_config(), generation_config)
    ids: set[int] = set()
    for eos in (getattr(holder, "eos_token_id", None) for holder in holders):
        ids.update([eos] if isinstance(eos, int) else eos or ())
    turn_end = _turn_end_id(tokenizer)
    return tuple(sorted(ids if turn_end is None else ids | {turn_end}))


def context_length(hf_config: PretrainedConfig, tokenizer: Any = None) -> int:
    """How many positions the model was made for; the tokenizer's limit where the config names none (state-space models).

    Of LongRoPE no more than its short factors are for (``longrope_positions``).
    """
    text_config = hf_config.get_text_config()
    if (short := longrope_positions(vars(text_config))) is not None:
        return short
    for holder, name in ((text_config, "max_position_embeddings"), (tokenizer, "model_max_length")):
        length = getattr(holder, name, None)
        if isinstance(length, int) and 0 < length < 10**9:  # tokenizers say 10**30 for "no limit known"
            return length
    return 2**20


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA if there is one. Raises ModelError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"model.device is {name!r}, which is no device: use auto, cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ModelError(f"model.device is {name!r}, but PyTorch sees {count} CUDA devices: use auto or cpu, or a lower number")
    return device


def copy_to_cpu(model: Any) -> Any:
    """The model once more, with weights of its own in the CPU's memory; tensors that are one stay one.

    Under an adapter the frozen weights are shared, wherever they lie: nothing changes them.
    """
    kept: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad} if is_adapted(model) else {}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) in kept:
            continue
        copied = tensor.detach().to("cpu", copy=True)
        kept[id(tensor)] = torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied
    return copy.deepcopy(model, kept)


def save_model(policy: Policy, folder: str | Path) -> Path:
    """Write the policy as a normal Hugging Face folder (safetensors, config, tokenizer with chat template) and return it.

    The files are written aside and then moved, config.json last: a folder that is complete enough to load is complete, and it is on the
    disk when this returns. Weights are made and written one at a time (other architectures than the lean decoder's: at once). In a
    folder that exists already, the model's own files are replaced and others are left alone. A model with an adapter is written
    merged, and the adapter beside it in ``adapter/``, or the adapter alone (``policy.adapter_only``). Raises ModelError when
    the folder cannot be written.
    """
    target = Path(folder).expanduser().absolute()
    aside = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)  # what a save that was killed may have left
        with quiet():
            model: Any = policy.model
            if is_adapted(model):
                model.save_pretrained(aside / "adapter", selected_adapters=[model.active_adapter])
            if not (is_adapted(model) and policy.adapter_only):
                _write_whole(model, aside)
                policy.tokenizer.save_pretrained(aside, save_jinja_files=False)
                make_readable_by_4(aside)
        sync_tree(aside)
        move_into_place(aside, target)
        sync(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise ModelError(f"the model cannot be written to {target} ({error}): check free space and permissions") from error
    return target


def _write_whole(model: Any, folder: Path) -> None:
    """``model``, its adapter merged, its quantised weights dequantised, as transformers writes it."""
    adapted = is_adapted(model)
    if base_module(model).config.model_type not in FAMILIES or (adapted and why_not_mergeable(model) is not None):
        plain = merged(model) if adapted or quantised_layers(model) else model
        plain.save_pretrained(folder, safe_serialization=True)  # it knows how this architecture's weights are named in files
        return
    state: dict[str, torch.Tensor | Made]
    if adapted or quantised_layers(model):
        model, state = merged_state(model)
    else:
        state = dict(model.state_dict())
    model.save_pretrained(folder, state_dict={})
    write_tensors(folder / "model.safetensors", {name: state[name] for name in _untied(model)}, {"format": "pt"})


def _untied(model: Any) -> list[str]:
    """Names of the model's weights; of those that are one tensor, the first."""
    names: dict[Any, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = id(tensor) if tensor.is_meta else (tensor.device, tensor.data_ptr(), tensor.shape)
        names.setdefault(key, name)
    return list(names.values())


def source_of(config: ModelConfig) -> str:
    """What transformers is to load the model from: a folder, or a name on the Hub."""
    if config.name == EMBEDDED_NAME:
        return str(ensure_embedded_model())
    return str(Path(config.name).expanduser()) if is_folder_name(config.name) else config.name


def _has_tokenizer(adapter: Path | None) -> bool:
    return adapter is not None and all((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def origin_of(config: ModelConfig) -> dict[str, Any]:
    """Which revision of it, and whether its own code may run: arguments beside ``source_of``."""
    origin: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.name != EMBEDDED_NAME and not is_folder_name(config.name):
        origin |= {"revision": config.revision, "local_files_only": only_from_cache(config.name, config.revision)}
    return origin


def generation_config(config: ModelConfig) -> GenerationConfig | None:
    try:
        with quiet():
            origin = {key: value for key, value in origin_of(config).items() if key != "trust_remote_code"}
            return GenerationConfig.from_pretrained(source_of(config), **origin)
    except (OSError, ValueError):  # many models have none
        return None


def _without_weights(config: ModelConfig, attention: str | None) -> PreTrainedModel:
    """The model's modules with parameters on the meta device, and buffers, which no file has, as they are in the loaded model."""
    from accelerate import init_empty_weights

    with _explained(config, "model"), quiet(), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            load_model_config(config),
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
        )
    return model


def _load_weights(config: ModelConfig, attention: str | None, device: torch.device, stored: str) -> PreTrainedModel:
    """``stored``: how the files are quantised."""
    if device.type == "meta":
        return _without_weights(config, attention)
    how: dict[str, Any] = {}
    if config.quantization != "none":
        how = {"device_map": {"": device}}
        if stored != config.quantization:
            how["quantization_config"] = quantisation_settings(config)
    if config.device_map is not None:
        how |= device_map_arguments(config)
    with _explained(config, "model"), quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source_of(config),
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention,
            output_loading_info=True,
            **how,
            **origin_of(config),
        )
    model, info = loaded
    if has_injected_adapter(model):
        raise ModelError(
            f"model {config.name!r} brings an adapter (adapter_config.json) beside its config.json, and would be used without it: merge it "
            "into a model folder, or name its base"
        )
    if "offload_folder" in how:
        remove_with(model, how["offload_folder"])
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"the weights of {config.name!r} lack {len(missing)} tensors of its architecture (such as {missing[0]}), which would "
            "be random numbers: get the model's files again, or name a model whose config.json fits its weights"
        )
    return model


def embedding_rows(model: Any) -> int:
    """Tokens that the model's embedding has a row for."""
    rows: int = model.get_input_embeddings().weight.shape[0]
    return rows


def embeds_all(tokenizer: Any, rows: int) -> bool:
    """Whether an embedding of so many rows has one for every token that prompts and answers are made of. A special one above it that
    neither begins nor ends anything, nor stands in the chat template, belongs to models of another kind: Gemma 3's placeholder for an
    image. Where a prompt has it all the same, engines refuse that."""
    if len(tokenizer) <= rows:
        return True
    template, needed = str(tokenizer.chat_template or ""), {tokenizer.bos_token_id, tokenizer.eos_token_id}
    spare = {
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in needed and token.content not in template
    }
    return all(index < rows or index in spare for index in tokenizer.get_vocab().values())


def _check_vocabulary(name: str, tokenizer: Any, model: PreTrainedModel) -> None:
    rows = embedding_rows(model)
    if not embeds_all(tokenizer, rows):
        raise ModelError(
            f"the tokenizer of {name!r} knows {len(tokenizer)} tokens, but the model embeds only {rows}: "
            "use the tokenizer that belongs to this model"
        )


def _check_attention(config: ModelConfig) -> None:
    if config.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise ModelError(
            "model.attention is 'flash_attention_2', but flash-attn 2.3.3 or newer is not installed here beside a GPU: install it or use "
            "auto"
        )


_WIDEST_FLASH_HEAD = 256
"""flash-attn 2 takes no wider heads."""


def attention_for(config: ModelConfig, device: torch.device, hf_config: PretrainedConfig) -> str | None:
    """What to ask transformers for; None is its own choice: sdpa wherever the architecture has it, else eager. Its sdpa leaves out the cap
    that Gemma 2 puts on attention's scores, without a word.

    Raises ModelError where that is asked for.
    """
    capped = caps_attention(hf_config)
    if config.attention == "sdpa" and capped:
        raise ModelError(
            f"model.attention is sdpa, which leaves out the cap on the attention scores of {config.name!r}: use auto, which takes eager"
        )
    if config.attention != "auto":
        return config.attention
    flash = device.type == "cuda" and config.dtype != "float32" and is_flash_attn_2_available()  # flash-attn 4 has the same name
    return "flash_attention_2" if flash and _has_flash(hf_config) else "eager" if capped else None


def _has_flash(hf_config: PretrainedConfig) -> bool:
    """Whether flash-attn 2 computes the architecture: its class says so, and no head is wider than flash-attn takes."""
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    text = hf_config.get_text_config()
    listed = getattr(made, "_compatible_flash_implementations", None)
    widest = max(getattr(text, name, None) or 0 for name in ("head_dim", "global_head_dim"))
    if made is not None and not (made._supports_flash_attn and (listed is None or "flash_attention_2" in listed)):
        return False  # None has code of its own, which says for itself
    return widest <= _WIDEST_FLASH_HEAD


def caps_attention(hf_config: PretrainedConfig) -> bool:
    """Whether attention's scores go through a cap, as in Gemma 2."""
    return getattr(hf_config.get_text_config(), "attn_logit_softcapping", None) is not None


def _turn_end_id(tokenizer: Any) -> int | None:
    """The special token that the chat template puts right after the assistant's words, if there is one."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    words = "an answer of the assistant"
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": words}]
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template is a program of the checkpoint's: whatever it raises, it names no end token
        return None
    _, found, rest = rendered.rpartition(words)
    ids = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"] if found else []
    added = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return ids[0] if added is not None and added.special else None


@contextmanager
def _explained(config: ModelConfig, what: str) -> Iterator[None]:
    """Turn whatever transformers and the Hub client raise while loading into one sentence."""
    try:
        yield
    except (ModelError, MemoryError):  # the second is explained where memory is
        raise
    except Exception as error:  # damaged files: errors of several packages, some of no class but this one
        refused = refused_by_hub(config.name, config.revision, error.__cause__ or error)
        raise refused or ModelError(_explanation(config, what, error)) from error


def _explanation(config: ModelConfig, what: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            f"model {config.name!r} brings Python code of its own: if you trust its source, add model.trust_remote_code=true to the "
            "command (--trust-remote-code of generate and merge)"
        )
    return f"the {what} of model {config.name!r} cannot be loaded ({in_one_line(error)}): check its files"
