"""One process reads the weights; the others have shapes until they are handed theirs."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.errors import RankError
from groupwise.models import load
from groupwise.models.decoder import Decoder
from groupwise.models.load import load_policy
from groupwise.training.sharding import loading_device
from groupwise.training.sharding.divided import materialize, read_by_one, tie_as_first
from tests.distributed.two_processes import launch_two
from tests.tiny import write_tiny_llama, write_tiny_qwen2

CPU = torch.device("cpu")


@pytest.fixture(params=["tied", "untied", "with biases"])
def config(request, small_config, tmp_path):
    if request.param == "with biases":
        folder = write_tiny_qwen2(tmp_path / "model")
    else:
        folder = write_tiny_llama(tmp_path / "model", tie_word_embeddings=request.param == "tied")
    return small_config(model={"name": str(folder), "dtype": "bfloat16"}).model


def without_reading(config, monkeypatch):
    """The model of a process that reads none, and its blocks."""
    with monkeypatch.context() as patched:
        patched.setattr(
            load.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the weights' files were opened")
        )
        policy = load_policy(config, "meta")
    decoder = Decoder(policy.model, device=CPU)
    return policy, decoder, decoder.to_modules()


def modules(blocks):
    return [*blocks.layers, blocks]


def test_a_process_that_reads_nothing_has_the_same_model_in_shape_and_takes_no_memory_for_it(config, monkeypatch):
    read = Decoder(load_policy(config).model)
    policy, decoder, blocks = without_reading(config, monkeypatch)
    assert all(p.is_meta for p in blocks.parameters())
    shapes = [(name, p.shape, p.dtype) for name, p in read.to_modules().named_parameters()]
    assert [(name, p.shape, p.dtype) for name, p in blocks.named_parameters()] == shapes
    assert policy.device == policy.model.device == CPU
    assert all(p.untyped_storage().nbytes() <= 4 for p in policy.model.parameters())
    for one in (read, decoder):
        one.reserve_positions(50)
    (ours,), (theirs,) = read.ropes(torch.arange(50)), decoder.ropes(torch.arange(50))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_each_gets_the_first_ones_weights_bit_for_bit(config, monkeypatch, in_threads):
    read, others = Decoder(load_policy(config).model).to_modules(), without_reading(config, monkeypatch)[2]
    expected = [p.detach().float() for p in read.parameters()]

    def hand_out(world):
        blocks = read if world.is_first else others
        assert read_by_one(blocks, world)
        for module in modules(blocks):
            materialize(module, CPU, torch.float32, world, True)
        return list(blocks.parameters())

    for parameters in in_threads(2, hand_out):
        assert [p.dtype for p in parameters] == [torch.float32] * len(expected)
        assert all(p.requires_grad for p in parameters)
        assert all(torch.equal(*pair) for pair in zip(parameters, expected, strict=True))


def test_a_head_that_the_file_has_beside_its_config_is_handed_out_too(small_config, tmp_path, in_threads):
    folder = write_tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = small_config(model={"name": str(folder)}).model
    models = [load_policy(config, device).model for device in ("cpu", "meta")]
    if models[0].lm_head.weight is models[0].model.embed_tokens.weight:
        pytest.skip("transformers 4 goes by the config")

    def hand_out(world):
        model = models[world.rank]
        tie_as_first(model, world)
        blocks = Decoder(model, device=CPU).to_modules()
        assert read_by_one(blocks, world)
        for module in modules(blocks):
            materialize(module, CPU, torch.float32, world, True)
        return blocks.head

    for head in in_threads(2, hand_out):
        assert torch.equal(head, weights["lm_head.weight"])
    assert [model.config.tie_word_embeddings for model in models] == [False, False]


def test_other_shapes_and_other_numbers_are_found(small_config, tmp_path, monkeypatch, in_threads):
    def blocks_of(folder):
        return Decoder(load_policy(small_config(model={"name": str(folder)}).model).model).to_modules()

    one = write_tiny_llama(tmp_path / "one")
    models = [blocks_of(one), blocks_of(one), blocks_of(write_tiny_llama(tmp_path / "wide", intermediate_size=56))]
    assert in_threads(2, lambda world: read_by_one(models[world.rank], world)) == [False, False]
    with pytest.raises(RankError, match="the model of process 1 has other tensors than that of process 0"):
        in_threads(2, lambda world: read_by_one(models[2 * world.rank], world))
    with torch.no_grad():
        models[1].final_norm[0] += 1
    with pytest.raises(RankError, match="the weights that were read of process 1"):
        in_threads(2, lambda world: read_by_one(models[world.rank], world))


def test_the_first_process_reads_for_all_but_where_there_is_an_adapter(small_config, in_threads):
    def devices(**sections):
        config = small_config(**sections)
        return [str(device) for device in in_threads(2, lambda world: loading_device(config, world))]

    assert devices(training={"sharding": "fsdp2"}) == ["cpu", "meta"]
    assert devices(training={"sharding": "fsdp2"}, model={"lora": {"rank": 4}}) == ["cpu", "cpu"]
    assert devices(training={"sharding": "zero3"}) == ["cpu", "meta"]
    assert devices(training={"sharding": "zero2"}) == ["None", "None"], "there each holds the weights whole"
    assert devices(training={"sharding": "none"}) == ["None", "None"]


@pytest.mark.soak
def test_only_the_first_of_two_real_processes_ever_holds_the_whole_model(small_config, tmp_path):
    """Weights of 200 MiB, nearly all of them in layers: the second process holds its half, and a layer while that is divided."""
    model = write_tiny_llama(
        tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=2_000, tie_word_embeddings=False,
    )  # fmt: skip
    whole = (model / "model.safetensors").stat().st_size
    config = small_config(model={"name": str(model)}, training={"sharding": "fsdp2"})
    script = Path(__file__).with_name("run_loading.py")
    assert launch_two(config, tmp_path, tmp_path, script=script, program=sys.executable) == 0
    first, second = (int((tmp_path / f"peak-{rank}").read_text()) / whole for rank in range(2))
    print(f"of the weights' size: the first process {first:.2f}, the second {second:.2f}")
    assert first < 1.3
    assert second < 1.0
