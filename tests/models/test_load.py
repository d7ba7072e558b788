"""Loading: what is refused before weights are read, what stops a model, and folders that survive a round trip."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    Gemma2Config,
    GenerationConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import ModelError
from groupwise.models import load
from groupwise.models.devices import computes_bf16
from groupwise.models.embedded import EMBEDDED_NAME
from groupwise.models.folder import check_cache, make_readable_by_4, only_from_cache
from groupwise.models.load import (
    Policy,
    check_adapter,
    check_model,
    context_length,
    embeds_all,
    end_token_ids,
    leaves_experts,
    load_model_config,
    load_policy,
    load_tokenizer,
    resolve_device,
    save_model,
    with_base,
)
from groupwise.models.quiet import quiet
from tests.tiny import write_tiny_mixture

QWEN_ROWS = 151_936  # embedding rows of the real Qwen2.5 models
IM_END, ENDOFTEXT = 151_645, 151_643
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture(scope="session")
def qwen_folder_source(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """A very small Qwen2 with the real tokenizer and the real, opinionated generation config."""
    folder = tmp_path_factory.mktemp("qwen")
    source = shared_data / "qwen2.5-tokenizer"
    config = AutoConfig.from_pretrained(source)
    config.update({"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2})
    config.update({"num_key_value_heads": 1, "layer_types": ["full_attention"] * 2})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    return folder


@pytest.fixture
def qwen_folder(qwen_folder_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(qwen_folder_source, tmp_path / "qwen"))


def model_config(name: str | Path, **settings: Any) -> ModelConfig:
    return ModelConfig(name=str(name), device="cpu", **{"dtype": "float32", **settings})


def logits(policy: Policy, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize(("device", "copied"), [("cpu", 1), ("cuda", 0)])
def test_only_weights_that_stay_in_the_machines_memory_are_copied_out_of_their_file(
    qwen_folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, copied: int
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("groupwise.models.load.own_memory", calls.append)
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: model)  # there may be no GPU here
    load_policy(model_config(qwen_folder), device)
    assert len(calls) == copied


# --- checks before weights -------------------------------------------------------------------------------------------------


def test_a_whole_folder_and_the_embedded_name_pass(qwen_folder: Path) -> None:
    check_model(model_config(qwen_folder))
    check_model(ModelConfig(name=EMBEDDED_NAME))


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def as_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER)


def as_lfs_pointer_of_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text(POINTER)


def with_half_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "an adapter alone"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (cut_short, "was cut short"),
        (as_lfs_pointer, "Git LFS pointer"),
        (as_lfs_pointer_of_pickled_weights, r"pytorch_model\.bin is a Git LFS pointer"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter .* beside its weights"),
        (lambda folder: (folder / "tokenizer.json").write_text(POINTER), "the tokenizer of model .* cannot be loaded"),
        (lambda folder: change_config(folder, layer_types=["nonsense"] * 2), "the config of model .* cannot be loaded"),
        (with_half_an_index, r"lacks 1 of the 2 weight files .*model-00002-of-00002"),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "has no tokenizer"),
        (lambda folder: change_config(folder, model_type="t5"), "no causal language model"),
        (lambda folder: change_config(folder, model_type="nonesuch"), "cannot be loaded"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(
    qwen_folder: Path, damage: Callable[[Path], object], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(qwen_folder)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=complaint) as caught:
        load_policy(model_config(qwen_folder))
    assert "\n" not in str(caught.value)
    assert ": " in str(caught.value)  # a remedy follows


def test_a_damaged_adapter_is_refused_before_its_base_is_read(
    qwen_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_model.bin", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).write_text(POINTER)
        with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer"):
            load_policy(model_config(qwen_folder), adapter=tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes((qwen_folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match="was cut short"):
        load_policy(model_config(qwen_folder), adapter=tmp_path / "adapter")
    with pytest.raises(ModelError, match="has no weights"):
        load_policy(model_config(qwen_folder), adapter=tmp_path)


def test_an_adapter_beside_a_config_without_weights_is_an_adapter(qwen_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(qwen_folder)}))
    shutil.copyfile(qwen_folder / "config.json", tmp_path / "config.json")
    found, adapter = with_base(model_config(tmp_path))
    assert (found.name, adapter) == (str(qwen_folder), tmp_path.resolve())
    with pytest.raises(ModelError, match="holds an adapter alone"):
        check_model(model_config(tmp_path))
    with_half_an_index(Path(shutil.copytree(qwen_folder, tmp_path, dirs_exist_ok=True)))
    assert with_base(model_config(tmp_path))[1] is None, "part of a model's weights are a model's weights"


def test_a_file_is_not_a_folder(qwen_folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file, not a folder"):
        check_model(model_config(qwen_folder / "config.json"))


def test_a_revision_of_what_has_none_is_refused(qwen_folder: Path) -> None:
    """Else a run would name a commit that its weights are not of. TRL's scripts say "main" of every model."""
    for name, what in ((EMBEDDED_NAME, "built in"), (str(qwen_folder), "a folder")):
        with pytest.raises(
            ModelError, match=rf"model\.revision is 'v2', but model '.*' is {what}, which has no revisions: remove it"
        ):
            check_model(ModelConfig(name=name, revision="v2"))
        check_model(model_config(name).model_copy(update={"revision": "main"}))


@pytest.mark.parametrize("settings", [{"device": "cuda:99"}, {"device": "nonsense"}])
def test_a_device_that_is_not_there_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ModelError, match=r"model\.device is"):
        check_model(ModelConfig(**settings))
    assert resolve_device("cpu") == torch.device("cpu")


def test_flash_attention_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(ModelError, match=r"flash-attn 2\.3\.3 or newer is not installed"):
        check_model(ModelConfig(attention="flash_attention_2"))


def test_flash_attention_is_asked_for_where_the_architecture_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "is_flash_attn_2_available", lambda: True)
    asked = lambda hf_config: load.attention_for(ModelConfig(dtype="bfloat16"), torch.device("cuda"), hf_config)  # noqa: E731
    assert asked(LlamaConfig()) == "flash_attention_2"
    assert asked(BloomConfig()) is None  # its class has none
    assert asked(LlamaConfig(head_dim=512)) is None


def test_flash_attention_4_is_not_taken_for_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are the package ``flash_attn``; transformers knows by which distribution it came."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert load.attention_for(ModelConfig(dtype="bfloat16"), torch.device("cuda"), LlamaConfig()) is None
    with pytest.raises(ModelError, match="flash-attn"):
        check_model(ModelConfig(attention="flash_attention_2"))


def test_a_hub_name_without_network_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    only_from_cache.cache_clear()
    with pytest.raises(ModelError, match=r"'nobody/nothing' is neither .* nor in the local Hub cache.*cannot be reached"):
        check_model(model_config("nobody/nothing"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "somewhere/config.json")
    assert only_from_cache("nobody/nothing", None) is True


def test_a_gated_model_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub tells everybody about the model; only its files are refused, which transformers puts into words of its own."""
    answer: Any = type("Response", (), {"headers": {}, "request": None, "status_code": 403})()

    def gated(*_: object, **__: object) -> None:
        raise OSError("You are trying to access a gated repo.") from huggingface_hub.errors.GatedRepoError("no", response=answer)

    monkeypatch.setattr(load, "only_from_cache", lambda *_: False)
    monkeypatch.setattr(AutoConfig, "from_pretrained", gated)
    with pytest.raises(ModelError, match=r"'nobody/nothing' is gated on the Hub: accept its terms .* `hf auth login`"):
        load_model_config(model_config("nobody/nothing"))


def test_a_cached_model_without_its_weights_is_refused_where_the_hub_is_away(
    qwen_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.models.folder.only_from_cache", lambda *_: True)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(qwen_folder / "config.json"))
    check_cache("some/model", None)
    (qwen_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"weights of model 'some/model' are not all .* `hf download some/model --revision v2`"):
        check_model(ModelConfig(name="some/model", revision="v2"))
    (qwen_folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(ModelError, match="hf download some/model`"):
        check_cache("some/model", None)
    monkeypatch.setattr("groupwise.models.folder.only_from_cache", lambda *_: False)
    check_cache("some/model", None)


def test_weights_that_do_not_cover_the_architecture_are_refused(qwen_folder: Path) -> None:
    change_config(qwen_folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match=r"lack 12 tensors of its architecture \(such as model\.layers\.2\."):
        load_policy(model_config(qwen_folder))


def test_a_tokenizer_too_large_for_the_model_is_refused(qwen_folder: Path, tiny_qwen2: Callable[..., Any]) -> None:
    tiny_qwen2().save_pretrained(qwen_folder)
    with pytest.raises(ModelError, match=r"knows 151665 tokens, but the model embeds only 128"):
        load_policy(model_config(qwen_folder))


def test_a_placeholder_for_images_needs_no_row_of_a_text_model(qwen_folder: Path, tiny_qwen2: Callable[..., Any]) -> None:
    """Gemma 3's tokenizer has one such token above the embedding of its text models."""
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    assert embeds_all(tokenizer, rows)
    template, ends = tokenizer.chat_template, tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}<image_soft_token>{{ m['content'] }}{% endfor %}"
    assert not embeds_all(tokenizer, rows), "the template would put it into every prompt"
    tokenizer.chat_template, tokenizer.eos_token = template, "<image_soft_token>"
    assert not embeds_all(tokenizer, rows), "no answer could end"
    tokenizer.eos_token = ends
    tokenizer.add_tokens(["grundlos"])
    assert not embeds_all(tokenizer, rows), "an ordinary word's token may come from any text"


# --- what is loaded --------------------------------------------------------------------------------------------------------


def test_policy_of_a_folder(qwen_folder: Path) -> None:
    policy = load_policy(model_config(qwen_folder, dtype="bfloat16", gradient_checkpointing=True))
    assert policy.end_token_ids == (ENDOFTEXT, IM_END)
    assert policy.context_length == 32_768
    assert policy.name == str(qwen_folder)
    assert policy.device == torch.device("cpu")
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
    assert policy.model.is_gradient_checkpointing
    assert not policy.model.training
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
    assert policy.model.config._attn_implementation == "sdpa"


def test_sampling_settings_of_the_checkpoint_are_dropped(qwen_folder: Path, tmp_path: Path) -> None:
    theirs = GenerationConfig.from_pretrained(qwen_folder)
    assert (theirs.top_k, theirs.repetition_penalty) == (20, 1.1)
    policy = load_policy(model_config(qwen_folder))
    saved = json.loads((save_model(policy, tmp_path / "saved") / "generation_config.json").read_text())
    for ours in (policy.model.generation_config.to_diff_dict(), saved):
        assert not {"temperature", "top_k", "top_p", "repetition_penalty", "do_sample"} & set(ours)
        assert sorted(ours["eos_token_id"]) == [ENDOFTEXT, IM_END]


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(qwen_folder: Path) -> None:
    path = qwen_folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": None}))
    tokenizer = load_tokenizer(model_config(qwen_folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == IM_END


class TestEndTokens:
    def test_union_of_all_that_name_one(self) -> None:
        tokenizer = SimpleNamespace(eos_token_id=5, chat_template=None)
        config = LlamaConfig(eos_token_id=[7, 5])
        assert end_token_ids(tokenizer, config, SimpleNamespace(eos_token_id=[2, 9])) == (2, 5, 7, 9)
        assert end_token_ids(tokenizer, config, SimpleNamespace(eos_token_id=0)) == (0, 5, 7)

    def test_none_at_all(self) -> None:
        tokenizer = SimpleNamespace(eos_token_id=None, chat_template=None)
        assert end_token_ids(tokenizer, LlamaConfig(eos_token_id=None), None) == ()

    def test_the_templates_turn_end_counts_although_nothing_declares_it(self, qwen_folder: Path) -> None:
        path = qwen_folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": "<|endoftext|>"}))
        tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
        assert tokenizer.eos_token_id == ENDOFTEXT
        assert end_token_ids(tokenizer, LlamaConfig(eos_token_id=ENDOFTEXT)) == (ENDOFTEXT, IM_END)

    @pytest.mark.parametrize(
        "template",
        [
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
            "{{ raise_exception('only one turn') }}",
            "{% for m in messages %}{{ m['content'] }} and <|im_end|>{% endfor %}",
        ],
    )
    def test_a_template_that_ends_turns_with_ordinary_text_adds_none(self, qwen_folder: Path, template: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(qwen_folder, eos_token="<|endoftext|>")
        tokenizer.chat_template = template
        assert end_token_ids(tokenizer, LlamaConfig(eos_token_id=None)) == (ENDOFTEXT,)

    @pytest.mark.slow
    def test_of_the_embedded_model(self, embedded_model_folder: Path) -> None:
        policy = load_policy(ModelConfig(device="cpu"))
        assert policy.end_token_ids == (2,)
        assert policy.context_length == 8192
        assert policy.model.dtype == (torch.bfloat16 if computes_bf16() else torch.float32)


def test_context_length_falls_back_to_the_tokenizers_limit() -> None:
    bounded, unbounded = SimpleNamespace(model_max_length=700), SimpleNamespace(model_max_length=10**30)
    none = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    assert context_length(LlamaConfig(max_position_embeddings=300), bounded) == 300
    assert context_length(none, bounded) == 700
    assert context_length(none, unbounded) > 10**6


def test_of_longrope_no_more_positions_are_taken_than_the_short_factors_are_for() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096, **factors}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 131072, "pad_token_id": 0}
    assert context_length(Phi3Config(**sizes, original_max_position_embeddings=4096, rope_parameters=rope)) == 4096
    assert context_length(Phi3Config(**sizes)) == 131072


def test_the_cap_on_attention_of_gemma_2_is_computed(tmp_path: Path, qwen_folder: Path) -> None:
    """transformers' sdpa leaves it out."""
    config = Gemma2Config(
        vocab_size=151665, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, attn_logit_softcapping=0.5, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(qwen_folder).save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(name=str(tmp_path), device="cpu", dtype="float32"))
    ids = torch.arange(5, 17)[None]
    slow = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(policy.model(ids).logits, slow(ids).logits)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert (other(ids).logits - slow(ids).logits).abs().max() > 1e-3, "the test can tell"
    with pytest.raises(ModelError, match=r"model\.attention is sdpa, which leaves out the cap"):
        check_model(ModelConfig(name=str(tmp_path), device="cpu", dtype="float32", attention="sdpa"))


# --- saving ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_saved_policy_loads_to_the_same_logits_and_the_same_tokens(qwen_folder: Path, tmp_path: Path, dtype: str) -> None:
    policy = load_policy(model_config(qwen_folder, dtype=dtype))
    again = load_policy(model_config(save_model(policy, tmp_path / "deep" / "saved"), dtype=dtype))
    ids = policy.tokenizer("Janet has 1,234 apples.")["input_ids"]
    assert again.tokenizer("Janet has 1,234 apples.")["input_ids"] == ids
    torch.testing.assert_close(logits(again, ids), logits(policy, ids), rtol=0, atol=0)
    turns = [{"role": "user", "content": "2 + 2?"}]
    rendered = [p.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for p in (policy, again)]
    assert rendered[0] == rendered[1]
    assert again.end_token_ids == policy.end_token_ids
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["saved"]  # nothing left aside


def test_saving_replaces_a_model_and_spares_other_files(qwen_folder: Path, tmp_path: Path) -> None:
    policy, target = load_policy(model_config(qwen_folder)), tmp_path / "saved"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    (target / "model-00001-of-00002.safetensors").write_text("of an older save")
    (target / "model.safetensors.index.json").write_text("{}")
    (target / "chat_template.jinja").write_text("of an older save")
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "tools.jinja").write_text("of an older save")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (target / name).write_text("{}")
    save_model(policy, target)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(2)
    save_model(policy, target)
    assert (target / "notes.txt").read_text() == "mine"
    assert not [*target.glob("*-of-*"), *target.glob("*.index.json"), *target.glob("adapter_*")]
    again = load_policy(model_config(target))
    assert again.tokenizer.chat_template == policy.tokenizer.chat_template
    torch.testing.assert_close(logits(again, [1, 2, 3]), logits(policy, [1, 2, 3]), rtol=0, atol=0)


def test_saving_where_nothing_can_be_written(qwen_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        save_model(load_policy(model_config(qwen_folder)), tmp_path / "file" / "saved")


def test_saved_json_is_readable_by_transformers_4_and_5(qwen_folder: Path, tmp_path: Path) -> None:
    folder = save_model(load_policy(model_config(qwen_folder)), tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 1_000_000
    assert config["torch_dtype"] == "float32"
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] not in ("TokenizersBackend", "TokenizersBackendFast")
    assert not isinstance(tokenizer.get("extra_special_tokens"), list)
    assert "im_start" in tokenizer["chat_template"]
    read = load_model_config(model_config(folder))
    assert getattr(read, "rope_theta", None) == 1_000_000 or read.rope_parameters["rope_theta"] == 1_000_000


def test_scaled_rotary_embeddings_are_written_both_ways(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "rope_parameters": {"rope_theta": 500_000.0, **llama3}, "dtype": "bfloat16"})
    )
    make_readable_by_4(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 500_000
    assert written["rope_scaling"] == llama3


def test_rotary_embeddings_of_a_text_model_within_another_are_written_both_ways(tmp_path: Path) -> None:
    """Gemma 3 of 4B and more: 4.57 rotated by the defaults, without a word."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    }
    text = {"model_type": "gemma3_text", "rope_parameters": rope, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "dtype": "bfloat16"}))
    make_readable_by_4(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["torch_dtype"] == written["text_config"]["torch_dtype"] == "bfloat16"
    assert written["text_config"]["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert written["text_config"]["rope_theta"] == 2_000_000
    assert written["text_config"]["rope_local_base_freq"] == 20_000
    assert written["text_config"]["rope_parameters"] == rope


def test_longrope_is_written_as_4_wants_it_and_5_reads_it_as_it_was(tmp_path: Path) -> None:
    """4.57 refuses more than three fields, and 5 takes them in place of ``rope_parameters``."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 20_000.0, "partial_rotary_factor": 0.75, **factors}
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
    }
    text = {"model_type": "phi3", "rope_parameters": {**rope, "original_max_position_embeddings": 4096}, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(text))
    make_readable_by_4(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_scaling"] == {"type": "longrope", **factors}
    assert (written["rope_theta"], written["partial_rotary_factor"]) == (20_000, 0.75)
    read = AutoConfig.from_pretrained(tmp_path)
    if hasattr(LlamaConfig(), "rope_parameters"):
        assert {key: read.rope_parameters[key] for key in text["rope_parameters"]} == text["rope_parameters"]


def test_rotary_settings_are_written_under_the_names_that_4_has_for_them(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 20_000.0, "partial_rotary_factor": 1.0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "rope_parameters": rope}))
    make_readable_by_4(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["rotary_pct"], written["rotary_emb_base"]) == (1.0, 20_000)
    read = AutoConfig.from_pretrained(tmp_path)
    if hasattr(LlamaConfig(), "rope_parameters"):
        assert read.rope_parameters == rope
    else:
        assert (read.rope_theta, read.partial_rotary_factor) == (20_000, 1.0)
    kinds = {"full_attention": {"rope_theta": 160_000.0}, "sliding_attention": {"rope_theta": 10_000.0}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "modernbert-decoder", "rope_parameters": kinds}))
    make_readable_by_4(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["global_rope_theta"], written["local_rope_theta"]) == (160_000, 10_000)


@pytest.mark.slow
def test_what_is_written_for_4_changes_rotary_settings_of_no_type_in_5(tmp_path: Path) -> None:
    """Types that are newer than 4.57 have settings of another form, which a ``rope_scaling`` beside them would replace."""
    compared = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            AutoConfig.for_model(kind).save_pretrained(tmp_path)
            before = getattr(AutoConfig.from_pretrained(tmp_path).get_text_config(), "rope_parameters", None)
        except Exception:  # without settings it cannot be made, or not be read
            continue
        make_readable_by_4(tmp_path)
        after = getattr(AutoConfig.from_pretrained(tmp_path).get_text_config(), "rope_parameters", None)
        compared += before is not None
        assert before == after, kind
    assert compared > 50 or not hasattr(LlamaConfig(), "rope_parameters")


def test_libraries_stay_quiet_until_the_last_of_several_threads_is_done() -> None:
    """As where a checkpoint is still written when the final model is."""
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    first, second = quiet(), quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.ERROR, False)
    second.__exit__(None, None, None)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("targets", [["q_proj", "v_porj"], ["porj"], r"model\.layers\.\d+\.mlp\.up"])
def test_an_adapter_in_layers_that_the_model_lacks_is_refused_without_its_weights(targets, tiny_llama, tmp_path):
    tiny_llama().config.save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path), lora=LoraConfig(target_modules=targets))
    with pytest.raises(ModelError, match=r"model.lora.target_modules has .* but no layer .* use all-linear, or some of .*v_proj"):
        check_adapter(config)
    for fine in ("all-linear", ["q_proj", "mlp.up_proj"], r"model\.layers\.0\.mlp\..*_proj"):
        check_adapter(config.model_copy(update={"lora": LoraConfig(target_modules=fine)}))


def test_an_adapter_without_the_package_peft_is_refused_without_its_weights(tiny_llama, tmp_path, monkeypatch):
    tiny_llama().config.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    check_adapter(ModelConfig(name=str(tmp_path)))
    with pytest.raises(ModelError, match=r"needs the package peft, .* pip install 'groupwise\[peft\]'"):
        check_adapter(ModelConfig(name=str(tmp_path), lora=LoraConfig()))


def test_experts_that_few_bits_would_not_reach_are_refused(tiny_llama, tmp_path):
    pytest.importorskip("transformers", minversion="5", reason="before, experts are linear layers")
    pytest.importorskip("peft")
    tiny_llama().config.save_pretrained(tmp_path / "dense")
    mixture, dense = (
        ModelConfig(name=str(folder), lora=LoraConfig())
        for folder in (write_tiny_mixture(tmp_path / "mixture"), tmp_path / "dense")
    )
    assert [leaves_experts(config) for config in (mixture, dense)] == [True, False]
    check_adapter(mixture)
    check_adapter(dense.model_copy(update={"quantization": "4bit"}))
    with pytest.raises(ModelError, match=r"model.quantization is 4bit, but the experts of .*: leave it out"):
        check_adapter(mixture.model_copy(update={"quantization": "4bit"}))
