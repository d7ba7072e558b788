"""The plan against the code that it describes: weights counted by transformers, saved tensors counted by autograd, the cache itself."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from groupwise.config import build_config, load_config, recipes
from groupwise.config.schema import ModelConfig
from groupwise.engines.builtin.cache import Cache
from groupwise.errors import ConfigError
from groupwise.limits import ATTENTION_SCORES, QUERY_BLOCK, logit_columns
from groupwise.models import attention, logprobs
from groupwise.models.adapters import AdapterScorer, attach, peft_config_of
from groupwise.models.load import Policy
from groupwise.models.scorer import make_scorer
from groupwise.planner import HARDWARE, KNOWN_SHAPES, Setup, make_plan, memory, parse_bytes, phases
from groupwise.planner.cost import step_cost
from groupwise.planner.hardware import find_hardware
from groupwise.planner.memory import _library_block, kept_bytes, peak_phase
from groupwise.planner.setup import MicroBatchSize
from groupwise.planner.shape import shape_of_config
from groupwise.training.optimizer import MasterAdamW

GIB = 2**30


def shape_of(model):
    return shape_of_config(model.config.to_dict(), "tiny")


def setup_of(shape, device="cpu", prompt=5, **settings):
    return Setup(build_config(settings), shape, device, prompt_tokens=prompt)


def item(found, phase, name):
    return next((i.bytes for p in found if p.name == phase for i in p.items if i.name == name), 0)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768), ("Qwen/Qwen2.5-1.5B", 1_543_714_304), ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920), ("Qwen/Qwen3-1.7B", 1_720_574_976), ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360), ("meta-llama/Llama-3.1-8B", 8_030_261_248),
    ],
)  # fmt: skip
def test_known_models_have_the_weights_that_their_publishers_count(name, weights):
    assert KNOWN_SHAPES[name].parameters == weights


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def test_weights_and_adapters_of_tiny_models(request, family):
    model = request.getfixturevalue(family)()
    shape = shape_of(model)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    lora = load_config(None, ["model.lora={rank: 3}"]).model.lora
    adapted = attach(model, peft_config_of(lora))
    assert shape.adapter(3, "all-linear") == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def saved_bytes(scorer, batch):
    """Bytes of the storages that autograd holds on to, weights not counted."""
    owned = {p.untyped_storage().data_ptr() for p in scorer.module.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = scorer.logprobs(batch)
    return sum(seen.values()), logprobs  # held to the end, so that no storage is used again


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("family", "adapted"),
    [("tiny_llama", False), ("tiny_llama", True), ("tiny_qwen2", False), ("tiny_qwen3", False), ("tiny_gemma3", False)],
)
def test_what_a_pass_keeps_on_cpu_is_what_autograd_saves(request, family, adapted, recompute, dtype):
    model = request.getfixturevalue(family)(num_hidden_layers=6).to(getattr(torch, dtype))
    settings = {"dtype": dtype, "gradient_checkpointing": recompute, **({"lora": {"rank": 4}} if adapted else {})}
    setup = setup_of(
        shape_of(model),
        prompt=40,
        model=settings,
        rollout={"prompts_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 50},
    )
    (batch,) = setup.micro_batches
    if adapted:
        model = attach(model, peft_config_of(setup.config.model.lora))
    scorer = make_scorer(Policy(model, None, (), 256, "tiny"), setup.config.model)
    packed = scorer.prepare([(range(first, first + 40), [range(3, 53)] * 4) for first in (1, 2)])  # plans suppose nothing alike
    assert batch.rows == len(packed.token_ids_R)
    assert batch.tokens == len(packed.targets_T)
    found, _ = saved_bytes(scorer, packed)
    of_the_head = batch.tokens * (2 * setup.shape.width * setup.weight_bytes + 24) + 8 * batch.rows  # sums and places beside rows
    one_layer = (
        kept_bytes(setup, batch) - setup.shape.layers * batch.rows * setup.shape.width * setup.weight_bytes if recompute else 0
    )
    assert found - of_the_head == pytest.approx(kept_bytes(setup, batch) - one_layer, rel=0.03)


@pytest.mark.parametrize("kept", [0, 5000, 10**9])
def test_the_output_head_keeps_no_more_logits_than_the_plan_says(tiny_llama, monkeypatch, kept):
    for module in (memory, logprobs):
        monkeypatch.setattr(module, "KEPT_LOGITS", kept)
    shape = shape_of(tiny_llama())
    limits = {"prompts_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 50}
    setup = setup_of(shape, model={"dtype": "float32"}, rollout=limits)
    (batch,) = setup.micro_batches
    room = sum(
        t.nbytes for t in logprobs._room(torch.empty(batch.tokens, shape.width), torch.empty(shape.vocabulary, shape.width))
    )
    one_slice = 4 * batch.tokens * logit_columns(batch.tokens, "cpu")
    planned = memory.logits(setup, batch, learnt=True).bytes - memory.logits(setup, batch, learnt=False).bytes
    assert planned == max(0, min(kept, 4 * batch.tokens * shape.vocabulary) - one_slice)
    assert room <= planned + one_slice
    bonus = {"lora": {"rank": 4}, "dtype": "float32"}, {"entropy": {"bonus": 0.01}}
    adapted = setup_of(shape, model=bonus[0], rollout=limits), setup_of(shape, model=bonus[0], rollout=limits, algorithm=bonus[1])
    assert [one.learns_entropy for one in adapted] == [False, True]
    assert memory.logits(adapted[1], batch, learnt=True) == memory.logits(setup, batch, learnt=True)
    assert memory.logits(adapted[0], batch, learnt=True).formula != memory.logits(adapted[1], batch, learnt=True).formula


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("adapted", [True, False])
def test_what_the_model_s_own_module_keeps(tiny_llama, adapted, dtype):
    settings = {"dtype": dtype, **({"lora": {"rank": 4}} if adapted else {})}
    model = tiny_llama(num_hidden_layers=6).to(getattr(torch, dtype))
    setup = setup_of(
        dataclasses.replace(shape_of(model), architecture="another", uncovered="another"),
        prompt=40,
        model=settings,
        rollout={"prompts_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 50},
    )
    (batch,) = setup.micro_batches
    if adapted:
        scorer = AdapterScorer(attach(model, peft_config_of(setup.config.model.lora)))
    else:
        from groupwise.models.module_scorer import ModuleScorer

        scorer = ModuleScorer(model)
    packed = scorer.prepare([(list(range(1, 41)), [list(range(3, 53))] * 4)] * 2)
    assert batch.padded == packed.token_ids.numel()
    found, _ = saved_bytes(scorer, packed)
    of_the_head = batch.tokens * (setup.shape.width * setup.weight_bytes + 4)
    assert found - of_the_head == pytest.approx(kept_bytes(setup, batch), rel=0.06)


def test_what_a_pass_keeps_with_the_library_s_attention(tiny_qwen2):
    model = tiny_qwen2(num_hidden_layers=6)
    setup = setup_of(
        shape_of(model), device="cuda", prompt=40, model={"dtype": "float32", "attention": "sdpa"},
        rollout={"prompts_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 50},
    )  # fmt: skip
    (batch,) = setup.micro_batches
    scorer = make_scorer(Policy(model, None, (), 256, "tiny"), setup.config.model)
    found, _ = saved_bytes(scorer, scorer.prepare([(range(1, 41), [range(3, 53)] * 4)] * 2))
    of_the_head = batch.tokens * (2 * setup.shape.width * setup.weight_bytes + 4)
    assert found - of_the_head == pytest.approx(kept_bytes(setup, batch), rel=0.06)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_the_library_s_attention_keeps_grows_with_the_length_and_not_with_its_square(tiny_qwen2, monkeypatch, recompute):
    """Blocks had copies of all keys before them, and autograd kept them: 119 GiB for 16 thousand tokens of 1.5B."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    model = tiny_qwen2(num_hidden_layers=2)
    scorer = make_scorer(Policy(model, None, (), 256, "tiny"), ModelConfig(attention="sdpa", gradient_checkpointing=recompute))
    short, long = (saved_bytes(scorer, scorer.prepare([([1], [list(range(3, 3 + n))])]))[0] for n in (41, 81))
    assert long < 2.05 * short


def test_the_cache_is_as_large_as_planned():
    shape = KNOWN_SHAPES["smollm2-135m-instruct"]
    setup = setup_of(shape, prompt=30, rollout={"prompts_per_step": 2, "completions_per_prompt": 3, "max_completion_tokens": 100})
    cache = Cache(
        layers=30, kv_heads=3, head_width=64, groups=2, prompt_tokens=30, rows=6, completion_tokens=99, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    while cache.room < 99:
        cache.reserve(cache.room + 1, 6)
    real = sum(t.nbytes for pair in (*cache.prompt, *cache.own) for t in pair)
    planned = item(phases(setup), "sampling", "KV cache")
    assert planned == real + sum(t.nbytes for t in cache.own[0])  # one layer's old and new tables live side by side


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("precision", ["masters", "stochastic", "pure"])
def test_the_optimiser_is_as_large_as_planned(tiny_qwen2, dtype, precision):
    model = tiny_qwen2().to(getattr(torch, dtype))
    setup = setup_of(shape_of(model), model={"dtype": dtype}, optimizer={"precision": precision})
    scorer = make_scorer(Policy(model, None, (), 256, "tiny"), setup.config.model)
    optimizer = MasterAdamW(scorer.named_parameters(), setup.config.optimizer)
    sizes = {kind: sum(v.nbytes for k, v in optimizer.state().items() if k.startswith(kind)) for kind in ("master", "exp_avg")}
    found = phases(setup)
    assert item(found, "optimiser step", "master weights") == sizes["master"]
    assert item(found, "optimiser step", "moments") == sizes["exp_avg"]
    scorer.logprobs(scorer.prepare([([1, 2], [[3, 4], [5]])])).sum().backward()
    assert item(found, "optimiser step", "gradients") == sum(optimizer.gradient(m).nbytes for m in optimizer.masters)


def test_processes_share_a_step_s_prompts():
    config = load_config("gsm8k-7b-8gpu")
    one, eight = (make_plan(config, HARDWARE["h200"], world_size=n) for n in (1, 8))
    assert (one.setup.prompts, eight.setup.prompts) == (256, 32)
    assert eight.cost.learning_flops == pytest.approx(one.cost.learning_flops / 8)
    assert eight.cost.communication_s > one.cost.communication_s == 0


def test_sizes_are_read_and_mistakes_told():
    assert [parse_bytes(t) for t in ("24GiB", "80GB", "512 MiB", "1.5gb", "24000000000")] == [
        24 * GIB, 80 * 10**9, 2**29, 1_500_000_000, 24 * 10**9,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="is 24 bytes as it stands: write 24GiB"):
        parse_bytes("24")
    for wrong in ("", "much", "24 iB", "-3GB", "0GB"):
        with pytest.raises(ConfigError, match="24GiB"):
            parse_bytes(wrong)
    with pytest.raises(ConfigError, match="rtx-4090"):
        find_hardware("abacus")


def test_weights_of_8_bits_are_refused_where_nothing_samples_with_them():
    config = load_config("gsm8k-0.5b", ["rollout.quantization=8bit"])
    with pytest.raises(ConfigError, match=r"rollout\.quantization is 8bit, .* but this plan is for GPUs: set it to none"):
        make_plan(config, HARDWARE["rtx-4090"])
    assert make_plan(config, HARDWARE["cpu"]).setup.config.rollout.quantization == "8bit"
    adapter = ["rollout.quantization=8bit", "model.quantization=8bit", "model.lora={rank: 16, alpha: 32}"]
    with pytest.raises(ConfigError, match="but the base is in 8 bits already: set it to none"):
        make_plan(load_config("gsm8k-0.5b", adapter), HARDWARE["cpu"])


def test_sampling_by_the_module_has_a_prompt_for_each_sequence():
    config = load_config(
        "gsm8k-0.5b", ["rollout.engine=transformers", "rollout.prompts_per_step=2", "rollout.completions_per_prompt=4"]
    )
    setup = make_plan(config, HARDWARE["rtx-4090"], prompt_tokens=100).setup
    cache = item(phases(setup), "sampling", "KV cache")
    assert cache == pytest.approx(8 * (100 + setup.completion) * setup.shape.cached(2) * (1 + 1 / setup.shape.layers), rel=1e-6)
    assert item(phases(setup.changed(rollout__engine="auto")), "sampling", "KV cache") < cache


def test_processes_on_cpus_share_the_memory_and_readers_of_weights_too():
    one, eight = (make_plan(load_config("quickstart"), HARDWARE["cpu"], world_size=n) for n in (1, 8))
    assert one.fits
    assert eight.limit_bytes == one.limit_bytes // 8
    assert not eight.fits
    assert "each has 1/8 of it" in " ".join(eight.assumptions)
    divided = make_plan(load_config("gsm8k-7b-8gpu"), HARDWARE["a100-80gb"], world_size=8)
    assert "memory, 14.2 GiB, and hands it out" in " ".join(divided.assumptions)
    adapted = load_config("gsm8k-7b-8gpu", ["model.lora={rank: 16, alpha: 32}"])
    said = make_plan(adapted, HARDWARE["a100-80gb"], world_size=8).assumptions
    assert "8 x 14.2 GiB on one machine" in " ".join(said)


def plan_command(*words):
    code = "import sys; from groupwise.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules, 'torch was imported'"
    return subprocess.run([sys.executable, "-c", code, "plan", *words], capture_output=True, text=True, check=False, timeout=120)


def test_the_command_answers_in_json_without_torch():
    done = plan_command("gsm8k-1.5b-8gpu", "--gpu-memory", "24GiB", "--world-size", "8", "--json", "--formulas")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["peak_bytes"] == max(phase["bytes"] for phase in found["phases"])
    assert found["fits"] is False
    assert found["limit_bytes"] == 24 * GIB
    assert {"sampling", "learning"} <= {phase["name"] for phase in found["phases"]}
    assert found["suggestions"][0]["fits"]
    assert found["step"]["step_s"] > 0
    named = {i["name"] for phase in found["phases"] for i in phase["items"]}
    assert named == found["formulas"].keys()
    assert {"one forward pass", "a decode step", "learning", "optimiser", "communication"} <= found["time_formulas"].keys()
    assert found["time_formulas"]["learning"]["value"] == f"{found['step']['learning_s']:,.2f} s"
    assert plan_command("quickstart", "--hardware", "cpu").returncode == 0


@pytest.mark.parametrize("recipe", [recipe.name for recipe in recipes()])
def test_every_recipe_can_be_planned_without_a_network(recipe):
    made = make_plan(load_config(recipe), HARDWARE["a100-80gb"])
    assert made.peak.bytes > made.setup.shape.parameters * made.setup.weight_bytes


def test_reward_models_take_their_weights_beside_the_policy(tmp_path):
    from transformers import LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_labels=1,
        architectures=["LlamaForSequenceClassification"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "judge")
    with torch.device("meta"):
        weights = sum(p.numel() for p in LlamaForSequenceClassification(config).parameters())
    judge = {"name": str(tmp_path / "judge")}

    def planned(*entries):
        rewards = {"functions": ["length", *({"model": {**judge, **entry}} for entry in entries)]}
        made = make_plan(build_config({"model": {"name": "smollm2-135m-instruct"}, "rewards": rewards}), HARDWARE["rtx-4090"])
        return item(made.phases, "sampling", "reward models"), " ".join(made.assumptions)

    assert planned()[0] == 0
    assert planned({}) == (2 * weights, planned({})[1])
    assert planned({"dtype": "float32"}, {})[0] == 6 * weights
    assert planned({"device": "cuda:1"})[0] == 0
    for name in ("cuda", "cuda:0"):
        assert planned({"device": name})[0] == 2 * weights, "the device that auto takes, by its name"
    assert "reward models: their weights alone; neither" in planned({})[1]
    assert "reward models" not in planned()[1]
    taken, said = planned({"name": str(tmp_path / "nowhere")})
    assert taken == 0
    assert "nowhere, whose config.json cannot be had or read" in said


def test_what_is_offloaded_is_off_the_gpu_and_comes_back_for_its_pass():
    config = load_config("gsm8k-1.5b-8gpu")
    away = load_config("gsm8k-1.5b-8gpu", ["optimizer.offload=true", "training.offload_reference=true"])
    near, far = (make_plan(c, HARDWARE["a100-80gb"], prompt_tokens=200) for c in (config, away))
    weights = near.setup.shape.parameters
    steps = [next(p for p in made.phases if p.name == "optimiser step") for made in (near, far)]
    fragmentation = [item([p], "optimiser step", "allocator fragmentation") for p in steps]
    assert (steps[0].bytes - fragmentation[0]) - (steps[1].bytes - fragmentation[1]) == (4 + 8 + 4 + 2) * weights
    assert item(far.phases, "reference", "reference") == 2 * weights
    assert item(near.phases, "sampling", "reference") == 2 * weights
    assert item(far.phases, "sampling", "reference") == 0
    assert far.cost.optimizer_s > near.cost.optimizer_s
    on_cpu = make_plan(away, HARDWARE["cpu"], prompt_tokens=200)
    assert item(on_cpu.phases, "learning", "master weights") == 4 * weights, "no effect there"


def test_gradients_are_exchanged_in_runs_of_the_size_that_the_world_makes():
    from groupwise.distributed.world import _buckets

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(
                vocab_size=151936, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
                tie_word_embeddings=True,
            )
        )  # fmt: skip
        sizes = [torch.empty(p.shape) for p in model.parameters()]
    largest = max(sum(g.numel() for g in bucket) for bucket in _buckets(sizes))
    made = make_plan(load_config("gsm8k-1.5b-8gpu"), HARDWARE["a100-80gb"], world_size=8)
    assert item(made.phases, "optimiser step", "communication buffers") == 4 * made.setup.shape.head
    tiny = dataclasses.replace(made.setup, shape=shape_of(model))
    assert item(phases(tiny), "optimiser step", "communication buffers") == pytest.approx(4 * largest, rel=0.01)
    assert item(phases(dataclasses.replace(tiny, world_size=1)), "optimiser step", "communication buffers") == 0


def test_a_critic_of_its_own_counts_as_the_model_that_it_is():
    settings = ["algorithm.preset=ppo", "algorithm.kl=null", "model.name=Qwen/Qwen2.5-7B", "data.max_prompt_tokens=512"]

    def found(critic):
        made = make_plan(load_config(None, [*settings, f"algorithm.value.critic={critic}"]), HARDWARE["h200"])
        names = ("critic's weights", "critic's optimiser", "critic's gradients")
        return [item(made.phases, "optimiser step", name) for name in names], made

    assert found("shared")[0] == [0, 0, 0]
    seven, small = KNOWN_SHAPES["Qwen/Qwen2.5-7B"], KNOWN_SHAPES["Qwen/Qwen2.5-0.5B"]
    learning = seven.parameters - seven.head  # its output head gives no value, and learns nothing
    assert found("copy")[0] == [2 * seven.parameters, 12 * learning, 4 * learning]
    assert found("Qwen/Qwen2.5-0.5B")[0] == [2 * small.parameters, 12 * small.parameters, 4 * small.parameters]
    sampling = next(p for p in found("copy")[1].phases if p.name == "sampling")
    assert "critic's gradients" not in {i.name for i in sampling.items}


def test_a_critic_that_cannot_read_what_the_policy_may_write_is_refused():
    settings = ["algorithm.preset=ppo", "algorithm.kl=null", "model.name=Qwen/Qwen2.5-7B", "rollout.max_completion_tokens=1024"]
    settings.append("algorithm.value.critic=Qwen/Qwen2.5-0.5B")
    with pytest.raises(
        ConfigError, match=r"32768 tokens, but prompt and completion may have 131072: set data.max_prompt_tokens to 31744"
    ):
        make_plan(load_config(None, settings), HARDWARE["h200"])
    assert make_plan(load_config(None, [*settings, "data.max_prompt_tokens=31744"]), HARDWARE["h200"])
    with pytest.raises(ConfigError, match=r"lower rollout\.max_completion_tokens below 32768"):
        make_plan(load_config(None, [*settings, "rollout.max_completion_tokens=40000"]), HARDWARE["h200"])


def test_what_is_sampled_ahead_lives_beside_the_passes():
    """Of the settings that the planner knows before the trainer has them, by hand."""
    setup = make_plan(load_config("gsm8k-1.5b-8gpu"), HARDWARE["a100-80gb"]).setup
    ahead = setup.changed(rollout__ahead=1)
    learning, sampling = (next(p for p in phases(setup) if p.name == name) for name in ("learning", "sampling"))
    found = next(p for p in phases(ahead) if p.name == "learning")
    both = learning.bytes + sampling.bytes - sum(i.bytes for i in sampling.items if i.name in {j.name for j in learning.items})
    assert item([found], "learning", "samplers' weights") == 2 * setup.shape.parameters
    assert found.bytes == pytest.approx(both + 2 * setup.shape.parameters, rel=0.01)
    cost = step_cost(ahead, HARDWARE["a100-80gb"])
    assert cost.step_s == pytest.approx(max(cost.sampling_s, cost.learning_s + cost.optimizer_s))


@pytest.mark.parametrize(("bits", "size"), [("4bit", 0.5158691), ("8bit", 1.0)])
def test_a_quantised_base_has_few_bits_in_its_matrices_alone(bits, size):
    setup = setup_of(KNOWN_SHAPES["Qwen/Qwen2.5-3B"], device="cuda", model={"lora": {"rank": 16}})
    shape, few = setup.shape, setup.changed(model__quantization=bits)
    matrices = shape.layers * shape.layer_matrices
    assert setup.weights == 2 * shape.parameters
    assert few.weights - 2 * (shape.parameters - matrices) == pytest.approx(size * matrices, rel=0.003)


def test_files_that_are_quantised_already_are_planned_as_such(tmp_path):
    def weights(folder, *settings):
        made = make_plan(load_config(None, [f"model.name={folder}", "model.lora={rank: 16}", *settings]), HARDWARE["rtx-4090"])
        return item(made.phases, "learning", "weights")

    LlamaConfig().save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "few").mkdir()
    few = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "few" / "config.json").write_text(json.dumps(config | few))
    assert weights(tmp_path / "few") == weights(tmp_path / "plain", "model.quantization=4bit") < weights(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"quantised .* model\.lora is null"):
        weights(tmp_path / "few", "model.lora=null")


@pytest.mark.parametrize("mode", ["zero2", "zero3", "fsdp2"])
def test_what_is_divided_is_divided_and_comes_together_for_sampling(mode):
    config = load_config("gsm8k-7b-8gpu", ["training.sharding=none"])
    whole = make_plan(config, HARDWARE["a100-80gb"], world_size=8).setup
    few = whole.changed(training__sharding=mode)
    parameters = whole.shape.parameters

    def of(setup, phase, name):
        return item(phases(setup), phase, name)

    for name, size in (("master weights", 4), ("moments", 8), ("gradients", 4)):
        assert of(whole, "optimiser step", name) == size * parameters
        assert of(few, "optimiser step", name) == -(-size * parameters // 8)
    weights = {"zero2": 2 * parameters, "zero3": 2 * parameters // 8, "fsdp2": 0}  # fsdp2's are the masters
    assert of(few, "learning", "weights") == weights[mode]
    assert of(few, "learning", "reference") == (2 * parameters if mode == "zero2" else 2 * parameters // 8)
    assert of(few, "sampling", "gathered weights") == (0 if mode == "zero2" else 2 * parameters)
    alone = dataclasses.replace(few, world_size=1)
    assert phases(alone) == phases(dataclasses.replace(whole, world_size=1)), "with one process there is nothing to divide"


@pytest.mark.parametrize("mode", ["zero3", "fsdp2"])
def test_of_an_adapter_the_base_is_divided_alone_and_merged_for_sampling(mode):
    config = load_config("gsm8k-7b-8gpu", ["training.sharding=none", "model.lora={rank: 16}"])
    whole = make_plan(config, HARDWARE["rtx-4090"], world_size=4).setup
    few, shape = whole.changed(training__sharding=mode), whole.shape

    def of(setup, phase, name):
        return item(phases(setup), phase, name)

    assert of(few, "learning", "weights") == -(-2 * shape.parameters // 4)
    for name in ("adapter", "moments", "gradients"):
        assert of(few, "optimiser step", name) == of(whole, "optimiser step", name) > 0
    assert of(few, "optimiser step", "flat gradient") == 0
    assert (
        of(few, "sampling", "merged weights")
        == of(whole, "sampling", "merged weights")
        == 2 * shape.layers * shape.layer_matrices
    )
    ends = 2 * (2 * shape.head + shape.width)  # embedding, an output head of its own, and the final norm
    assert of(few, "sampling", "gathered weights") == ends
    assert peak_phase(phases(few)).bytes < peak_phase(phases(whole)).bytes
    ahead = few.changed(rollout__ahead=1)
    assert of(ahead, "learning", "samplers' weights") == 2 * shape.parameters
    assert of(ahead, "learning", "KV cache") == of(few, "sampling", "KV cache")
    assert of(ahead, "learning", "merged weights") == 0


def test_vllm_takes_its_share_of_the_gpu_or_nothing_of_it():
    def found(*settings):
        return make_plan(load_config("gsm8k-0.5b", ["rollout.engine=vllm", *settings]), HARDWARE["rtx-4090"]).phases

    weights = 2 * KNOWN_SHAPES["Qwen/Qwen2.5-0.5B"].parameters
    assert item(found(), "sampling", "vLLM") == int(0.3 * HARDWARE["rtx-4090"].memory_bytes)
    assert item(found("rollout.vllm.cache_gib=2"), "sampling", "vLLM") == weights + 2 * GIB
    elsewhere = found("rollout.vllm.url=http://127.0.0.1:8300")
    assert {i.name for phase in elsewhere for i in phase.items}.isdisjoint({"vLLM", "KV cache", "prefill", "samplers' weights"})
    divided = make_plan(
        load_config("gsm8k-0.5b", ["rollout.engine=vllm", "rollout.vllm.url=http://a:1", "training.sharding=fsdp2"]),
        HARDWARE["rtx-4090"],
        world_size=4,
    ).phases
    assert item(divided, "sampling", "gathered weights") == 0, "the server reads none of them"
    assert item(divided, "learning", "gathered weights") > 0
    for kept in ("rollout.vllm.sleep_mode=false", "rollout.ahead=1"):
        phases = found("rollout.vllm.cache_gib=4", kept)
        assert all(item(phases, p.name, "vLLM") == weights + 4 * GIB for p in phases), kept
    for phase in (slept := found("rollout.vllm.cache_gib=4")):
        learns = phase.name in ("learning", "output head", "optimiser step", "warm start")
        assert item(slept, phase.name, "vLLM") == (2 * GIB if learns else weights + 4 * GIB), phase.name
    beside = found("rollout.ahead=1")
    assert item(beside, "learning", "samplers' weights") == 0, "its weights are the copy"


def test_a_plan_says_what_it_counts_of_episodes():
    """A tool's description makes a guessed prompt longer, and one that was given is what it is."""
    tools, module = ["rollout.tools=[calculator]"], ["rollout.engine=transformers"]
    alone, played, by_module = (
        make_plan(load_config("quickstart", more), HARDWARE["rtx-4090"]) for more in ([], tools, [*tools, *module])
    )
    assert played.setup.prompt > alone.setup.prompt
    assert item(played.phases, "sampling", "KV cache") > item(alone.phases, "sampling", "KV cache")
    assert make_plan(load_config("quickstart", tools), HARDWARE["rtx-4090"], prompt_tokens=90).setup.prompt == 90
    assert "keys and values are kept from turn to turn" in " ".join(played.assumptions)
    assert "computed again in each of up to 4 turns" in " ".join(by_module.assumptions)
    assert "episodes" not in " ".join(alone.assumptions)


def test_the_page_of_rates_is_the_table_of_cards():
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8").partition("## Rates of cards")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE)
    said = {name: (float(flops.replace(",", "")) * 1e12, float(rate.replace(",", "")) * 1e9) for name, flops, rate in rows}
    assert said == {c.name: (c.flops_per_s, c.bytes_per_s) for c in HARDWARE.values() if c.name != "cpu"}


def test_micro_batches_are_planned_as_full_as_completions_of_some_length_make_them():
    """Of 16 groups of 8 at the limit of 512 three fit into 16,384 tokens, 13 thousand; of shorter ones the trainer puts in more."""
    words = ["rollout.prompts_per_step=16", "rollout.completions_per_prompt=8", "rollout.max_completion_tokens=512"]
    setup = make_plan(
        load_config("gsm8k-1.5b-cpu", [*words, "training.micro_batch_tokens=16384"]), HARDWARE["h200"], prompt_tokens=256
    ).setup
    assert max(batch.rows for batch in setup.micro_batches) < 13_100
    assert 15_000 < setup.largest.rows <= 16_384
    once = make_plan(
        load_config("gsm8k-1.5b-cpu", [*words, "training.micro_batch_tokens=131072"]), HARDWARE["h200"], prompt_tokens=256
    ).setup
    assert once.largest.completion == 512, "where all fits into one, the limit is the most"


@pytest.mark.parametrize(
    ("engine", "card", "share"), [("builtin", "h200", "10%"), ("my_engine.py:MyEngine", "h200", "20%"), ("builtin", "cpu", "25%")]
)
def test_what_the_allocator_loses_goes_by_whether_its_blocks_may_grow(engine, card, share):
    made = make_plan(load_config("gsm8k-1.5b-cpu", [f"rollout.engine={engine}"]), HARDWARE[card], prompt_tokens=200)
    (learning,) = (p for p in made.phases if p.name == "learning")
    (lost,) = (i.formula for i in learning.items if i.name == "allocator fragmentation")
    assert lost == f"{share} of what comes and goes"


@pytest.mark.timeout(10)
def test_the_largest_rectangle_of_attention_is_found_at_once_in_a_long_sequence():
    """Its widths are tried one by one only where several sequences share one."""
    shape = KNOWN_SHAPES["Qwen/Qwen2.5-1.5B"]

    def tried(prompt, completion, count):
        most = 0
        for length, prefix, sequences in ((prompt, 0, 1), (completion - 1, prompt, count)):
            for begin in range(0, length, QUERY_BLOCK):
                end = min(length, begin + QUERY_BLOCK)
                at_once = max(1, ATTENTION_SCORES // ((end - begin) * (prefix + end)))
                most = max(most, min(sequences, at_once) * (prefix + end))
        return most

    for case in (
        (3, 1, 4),
        (7, 12, 3),
        (300, 5000, 64),
        (100, 40_000, 64),
        (1, 70_000, 8),
        (90_000, 70_000, 2),
        (65_537, 9, 5),
    ):
        batch = MicroBatchSize((case[::2],), case[1])  # tokens of the prompt and of a completion, completions
        assert _library_block(setup_of(shape, device="cuda"), batch) == 12 * shape.attended * tried(*case), case
    batch = MicroBatchSize(((5, 1),), 10**12)
    assert _library_block(setup_of(shape, device="cuda"), batch) == 12 * shape.attended * (10**12 + 4)


def test_a_sequence_of_32_thousand_tokens_of_1_5b_fits_on_80_gigabytes():
    """With recomputation; without it the activations alone are 67 GB. Sampled eight at a time, as one group."""

    def peak(recompute):
        setup = setup_of(
            KNOWN_SHAPES["Qwen/Qwen2.5-1.5B"], device="cuda", prompt=512,
            model={"dtype": "bfloat16", "gradient_checkpointing": recompute}, training={"micro_batch_tokens": 32_768},
            rollout={"prompts_per_step": 1, "completions_per_prompt": 8, "max_completion_tokens": 32_256, "engine": "builtin",
                     "max_concurrent_sequences": 8},
        )  # fmt: skip
        assert max(batch.rows for batch in setup.micro_batches) >= 32_000
        return peak_phase(phases(setup)).bytes

    assert peak(True) < 60e9
    assert peak(False) > 110e9


def test_what_lies_outside_the_gpu_counts_a_critic_an_average_and_masters_of_fp32_weights():
    shape = KNOWN_SHAPES["Qwen/Qwen2.5-0.5B"]

    def outside(**settings):
        return memory.host_bytes(setup_of(shape, "cuda", **settings))

    own = {"preset": "ppo", "kl": None, "value": {"critic": "copy"}}
    shared = {"preset": "ppo", "kl": None, "value": {"critic": "shared"}}
    offload = {"optimizer": {"offload": True}}
    assert outside(algorithm=own, **offload) - outside(algorithm=shared, **offload) == 16 * shape.parameters
    parked = {"training": {"offload_reference": True}}
    mixed = {"kl": {"beta": 0.04, "reference_every": 10, "reference_mixing": 0.5}}
    plain = {"kl": {"beta": 0.04, "reference_every": 10}}
    assert outside(algorithm=mixed, **parked) - outside(algorithm=plain, **parked) == 4 * shape.parameters
    fp32 = setup_of(shape, "cuda", model={"dtype": "float32"}, algorithm={"kl": None}, **offload)
    assert memory.host_bytes(fp32) >= 16 * shape.parameters
    inside = fp32.changed(optimizer__offload=False)
    assert memory.disk_bytes(fp32) == memory.disk_bytes(inside)
    two = [setup_of(shape, "cuda", model={"dtype": "float32"}, algorithm=one, **offload) for one in (own, shared)]
    assert memory.host_bytes(two[0]) - memory.host_bytes(two[1]) == 16 * shape.parameters


def test_logits_that_a_head_caps_are_planned_whole():
    """The model's module gives them for every padded token; the tiles are of heads that are a product and no more."""
    sizes = {
        "model_type": "gemma2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 5000,
    }  # fmt: skip
    capped, plain = (shape_of_config({**sizes, "final_logit_softcapping": cap}, "m") for cap in (30.0, None))
    found = [memory.logits(made, made.largest, learnt=True).bytes for made in (setup_of(capped), setup_of(plain))]
    batch = setup_of(capped).largest
    assert found[0] >= capped.vocabulary * (2 * batch.padded + 16 * batch.tokens)
    assert found[1] < found[0] / 4
    made = setup_of(plain, model={"attention": "eager"})
    assert found[1] == memory.logits(made, made.largest, learnt=True).bytes
    scores = plain.layers * batch.padded * plain.heads * batch.longest
    softcapped = shape_of_config({**sizes, "attn_logit_softcapping": 50.0}, "m")
    for dtype, one, more in (("float32", 4, 4), ("bfloat16", 4 + 2, 2)):  # softmax, its cast where there is one; the cap's own

        def kept(shape, attention, dtype=dtype):
            return kept_bytes(setup_of(shape, model={"attention": attention, "dtype": dtype}), batch)

        assert kept(plain, "eager") - kept(plain, "auto") == scores * one
        assert kept(softcapped, "auto") - kept(plain, "eager") == scores * more
        assert kept(softcapped, "flash_attention_2") == kept(plain, "auto")
    assert not shape_of_config({**sizes, "model_type": "cohere", "logit_scale": 0.0625}, "m").plain_head
    assert shape_of_config({**sizes, "model_type": "granite", "logits_scaling": 1.0}, "m").plain_head
