"""Phases beside the steps: evaluations, checkpoints and the final model; and what a run needs on the disk."""

import json

import pytest
import torch

from groupwise.algorithm.registry import find_loss
from groupwise.config import load_config
from groupwise.config.section import REGISTERED
from groupwise.errors import TrainingError
from groupwise.planner import HARDWARE, make_plan
from groupwise.planner.memory import beside_state, disk_bytes, evaluation, gathered_bytes, phases, sampling
from groupwise.planner.setup import Setup
from groupwise.planner.shape import find_shape
from groupwise.planner.state import critic_of
from groupwise.training import short_memory

LORA = "model.lora={rank: 16, alpha: 32}"


def setup(*overrides, device="cpu", processes=1):
    config = load_config("quickstart", ["model.dtype=bfloat16", *overrides])
    return Setup(config, find_shape(config.model), device, processes, 100)


def sizes(made):
    return {phase.name: phase.bytes for phase in phases(made)}


def test_a_checkpoint_beside_the_run_takes_what_sampling_takes():
    """It is written from where the weights are."""
    found = sizes(setup("output.checkpoint_every=5"))
    assert found["checkpoint"] == found["sampling"]
    assert "checkpoint" not in sizes(setup("output.checkpoint_every=0"))
    in_turn = sizes(setup("output.checkpoint_every=5", "output.checkpoint_in_background=false"))
    assert in_turn["checkpoint"] < in_turn["sampling"]


def test_divided_weights_are_brought_together_for_a_checkpoint():
    made = setup("output.checkpoint_every=5", "training.sharding=fsdp2", processes=2)
    whole = {p.name: i.bytes for p in phases(made) for i in p.items if i.name == "whole weights and state"}
    assert whole == {"checkpoint": (2 + 12) * made.shape.parameters}, "learning waits for it"


def test_problems_are_judged_beside_a_checkpoint_that_was_brought_together():
    """A run writes it first, and judges the step then."""
    words = ["output.checkpoint_every=5", "training.sharding=fsdp2", "evaluation.max_completion_tokens=512"]
    never, often = (sizes(setup(*words, f"evaluation.every={every}", processes=2)) for every in (0, 5))
    assert never["evaluation"] == often["evaluation"] > often["sampling"]
    assert often["checkpoint"] - never["checkpoint"] == pytest.approx(often["evaluation"] - often["sampling"], abs=2)


@pytest.mark.parametrize("adapter", [[], [LORA]], ids=["whole", "adapter"])
@pytest.mark.parametrize("refills", [0, 1])
def test_a_batch_that_is_sampled_ahead_is_counted_where_it_is_there(adapter, refills):
    """One thread samples ahead, a batch at a time. Problems are judged, and groups replaced, by the run's own engine meanwhile."""
    words = ["output.checkpoint_every=5", "evaluation.every=5", f"rollout.refill_rounds={refills}", *adapter]
    in_turn, ahead = setup(*words), setup(*words, "rollout.ahead=1")
    copies = 4 * ahead.trained if adapter else 2 * ahead.shape.parameters
    once = beside_state(ahead, sampling(ahead))
    grown = {name: size - sizes(in_turn)[name] - copies for name, size in sizes(ahead).items() if name in sizes(in_turn)}
    for name in ("evaluation", "learning", "optimiser step"):
        assert grown[name] == pytest.approx(once, abs=2), name
    for name in ("sampling", "checkpoint"):
        assert grown[name] == pytest.approx(once if refills else 0, abs=2), name
    for phase in phases(ahead):
        assert len({item.name for item in phase.items}) == len(phase.items), "the table has a row for each name"


@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_copies_to_sample_ahead_are_of_the_adapter_alone(engine):
    for steps in (1, 2):
        made = setup(LORA, f"rollout.engine={engine}", f"rollout.ahead={steps}")
        (copies,) = [i.bytes for p in phases(made) if p.name == "learning" for i in p.items if i.name == "samplers' weights"]
        assert copies == steps * 4 * made.trained


@pytest.mark.parametrize("sharding", ["zero2", "zero3", "fsdp2"])
def test_the_first_machine_s_memory_holds_a_whole_checkpoint_of_a_divided_run(sharding):
    """Masters and both moments in fp32, the weights and a reference in bf16: 16 bytes a weight, which a GPU's plan does not count."""
    words = [f"training.sharding={sharding}", "beta=0.04", "output.checkpoint_every=5"]
    made = setup(*words, device="cuda", processes=2)
    assert gathered_bytes(made) == (4 + 8 + 2 + 2) * made.shape.parameters
    assert gathered_bytes(setup(words[1], device="cuda", processes=2)) == 0, "replicas bring nothing together"
    pushed = gathered_bytes(setup(*words, "rollout.engine=vllm", "rollout.vllm.url=http://a:1", device="cuda", processes=2))
    assert pushed - gathered_bytes(made) == 2 * made.shape.parameters, "while it is written, the weights are collected for vLLM"
    noted = make_plan(made.config, HARDWARE["a100-80gb"], world_size=2).assumptions
    assert [f"{gathered_bytes(made) / 2**30:.1f} GiB" in note for note in noted if "for a checkpoint" in note] == [True]
    on_cpu = next(phase for phase in phases(setup(*words, processes=2)) if phase.name == "checkpoint")
    assert gathered_bytes(made) in {item.bytes for item in on_cpu.items}


def test_the_base_beneath_an_adapter_is_brought_together_for_the_final_model_alone():
    made = setup(LORA, "training.sharding=fsdp2", device="cuda", processes=2)
    assert gathered_bytes(made) == 2 * made.shape.parameters + 4 * made.trained
    alone = setup(LORA, "training.sharding=fsdp2", "output.adapter_only=true", device="cuda", processes=2)
    assert gathered_bytes(alone) == 4 * made.trained
    for one, what in ((made, "the whole base"), (alone, "the adapter alone")):
        noted = make_plan(one.config, HARDWARE["a100-80gb"], world_size=2).assumptions
        assert [what in note for note in noted if "for the final model" in note] == [True]
    by_vllm = [LORA, "training.sharding=fsdp2", "output.adapter_only=true", "rollout.engine=vllm", "rollout.vllm.url=http://a:1"]
    for background in ("true", "false"):
        pushed = setup(*by_vllm, f"output.checkpoint_in_background={background}", device="cuda", processes=2)
        assert gathered_bytes(pushed) == pushed.weights + 4 * pushed.trained, "vLLM is sent the base"
    noted = make_plan(pushed.config, HARDWARE["a100-80gb"], world_size=2).assumptions
    assert ["the whole base" in note for note in noted if "for vLLM and the final model" in note] == [True]


def test_loading_takes_the_weights_and_one_layer_or_the_embedding_twice():
    """The optimiser and the reference come later. SmolLM2's embedding is larger than one of its layers."""
    made = setup("model.dtype=float32", "beta=0.04")
    loading = next(phase for phase in phases(made) if phase.name == "loading")
    sizes_of = {item.name: item.bytes for item in loading.items}
    process = sizes_of.pop("process")
    assert process > 400 * 2**20
    assert sizes_of == {"weights": 4 * made.shape.parameters, "one layer or the embedding fused": 4 * 49152 * 576}
    assert loading.bytes < min(phase.bytes for phase in phases(made) if phase.name != "loading")


def test_a_base_is_stored_in_16_bits_after_it_was_read_in_fp32():
    made = setup(LORA, "model.dtype=float32")
    loading = {item.name: item.bytes for phase in phases(made) if phase.name == "loading" for item in phase.items}
    assert loading["weights"] + loading["matrices in fp32"] == 4 * made.shape.parameters
    assert loading["matrices in fp32"] == 2 * made.shape.layers * made.shape.layer_matrices
    assert "matrices in fp32" not in {item.name for phase in phases(setup(LORA)) for item in phase.items}


@pytest.mark.parametrize(("critic", "bytes_of_a_matrix_weight"), [("copy", 2), ("smollm2-135m-instruct", 4)])
def test_a_critic_s_base_is_stored_as_the_policy_s_where_it_is_a_copy(critic, bytes_of_a_matrix_weight):
    made = critic_of(setup(LORA, "model.dtype=float32", "algorithm.preset=ppo", f"algorithm.value.critic={critic}"))
    matrices = made.shape.layers * made.shape.layer_matrices
    assert made.weights == bytes_of_a_matrix_weight * matrices + 4 * (made.shape.parameters - matrices)


def test_an_adapter_is_merged_a_matrix_at_a_time_for_the_final_model():
    made = setup(LORA)
    shape = made.shape
    (merged,) = (i.bytes for p in phases(made) if p.name == "final model" for i in p.items if i.name == "one matrix merged")
    assert merged == (2 + 8) * shape.width * shape.feed_forward


def test_a_model_that_is_merged_at_once_is_merged_in_the_machine_s_memory(tmp_path):
    """From a GPU too, which has no room for all of its weights beside a base in 4 bits. Gemma 3 of 4B and more is wrapped."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 99}
    text = {"model_type": "gemma3_text", **sizes}
    for config in ({"model_type": "phi3", **sizes}, {"model_type": "gemma3", "text_config": text}, text):
        (tmp_path / "config.json").write_text(json.dumps(config))
        made = [
            setup(LORA, f"model.name={tmp_path}", "rollout.max_completion_tokens=8", device=device) for device in ("cpu", "cuda")
        ]
        found = [[i.name for p in phases(one) if p.name == "final model" for i in p.items] for one in made]
        assert ["merged copy" in names for names in found] == [config is not text, False]


def test_an_evaluation_is_planned_with_its_own_limit_and_samples():
    short, long = (sum(i.bytes for i in evaluation(setup(f"evaluation.max_completion_tokens={n}"))) for n in (48, 480))
    assert long > 2 * short
    one, four = (sum(i.bytes for i in evaluation(setup("evaluation.problems=8", f"evaluation.samples={n}"))) for n in (1, 4))
    assert four > one


@pytest.mark.parametrize("problems", ["200", "null"])
def test_an_evaluation_has_no_more_problems_than_are_held_out(problems):
    of_20 = evaluation(setup("evaluation.problems=20"))
    assert evaluation(setup("data.holdout=20", f"evaluation.problems={problems}")) == of_20
    elsewhere = setup("data.source=gsm8k", "data.eval_split=test", "data.holdout=20", f"evaluation.problems={problems}")
    assert evaluation(elsewhere) != of_20, "holdout does nothing where held-out problems are a split of their own"


def test_a_prepared_folder_s_held_out_problems_are_its_own(tmp_path):
    (tmp_path / "metadata.json").write_text('{"format": "groupwise-problems"}')
    found = evaluation(setup(f"data.source={tmp_path}", "data.holdout=20", "evaluation.problems=50"))
    assert found == evaluation(setup("data.holdout=50", "evaluation.problems=50"))
    assert "evaluation" in {phase.name for phase in phases(setup(f"data.source={tmp_path}", "data.holdout=0"))}


def test_a_prompt_is_computed_whole_however_long_it_is():
    """Others are computed 4,096 tokens at a time."""

    def prefill(prompt):
        made = Setup(load_config("quickstart", ["model.dtype=bfloat16"]), setup().shape, "cpu", 1, prompt)
        return next(item.bytes for item in sampling(made) if item.name == "prefill")

    assert prefill(2048) == prefill(4096) < prefill(8192)


def test_a_checkpoint_and_the_model_on_the_disk():
    made = setup()
    count = made.shape.parameters
    assert disk_bytes(made) == (14 * count, 2 * count), "bf16 weights; fp32 masters and two moments"
    made = setup(LORA)
    assert disk_bytes(made) == (12 * made.trained, 4 * made.trained + 2 * count)
    made = setup(LORA, "output.adapter_only=true")
    assert disk_bytes(made) == (12 * made.trained, 4 * made.trained)


def test_an_evaluation_that_does_not_fit_samples_fewer_at_once():
    made = setup()
    fit = beside_state(made, evaluation(made, 64))
    assert fit > sum(i.bytes for i in evaluation(made, 64)), "the allocator loses some of it"
    assert short_memory.rows_that_fit(made, 256, free=fit) == 64
    assert short_memory.rows_that_fit(made, 256, free=2**50) == 256
    assert short_memory.rows_that_fit(made, 256, free=0) == 1
    assert short_memory.rows_that_fit(None, 256, free=0) == 256


@pytest.mark.parametrize(("free", "told"), [(2**40, False), (3 * 2**30, True)])
def test_a_disk_that_is_too_small_is_said_before_the_run(tmp_path, monkeypatch, free, told):
    """3 GiB hold the model and a checkpoint, but not all that are kept."""
    config = load_config("quickstart", ["model.dtype=bfloat16", "output.checkpoint_every=10", "training.steps=60"])
    monkeypatch.setattr(short_memory, "free_disk_bytes", lambda folder: free)
    note = short_memory.disk_note(config, tmp_path)
    assert (note is not None) is told
    if note:
        assert "output.keep_checkpoints" in note
        assert str(tmp_path) in note


def test_the_checkpoint_after_a_warm_start_needs_room_too(tmp_path, monkeypatch):
    def note(every, free):
        words = [f"output.checkpoint_every={every}", "training.steps=20", "warm_start.steps=2", "output.keep_checkpoints=1"]
        config = load_config("quickstart", ["model.dtype=bfloat16", *words])
        checkpoint, model = disk_bytes(short_memory.planned(config, torch.device("cpu")))
        monkeypatch.setattr(short_memory, "free_disk_bytes", lambda folder: model + free * checkpoint)
        return short_memory.disk_note(config, tmp_path)

    with pytest.raises(TrainingError, match="a checkpoint will take"):
        note(every=30, free=0)
    assert "and 2 checkpoints of" in note(every=20, free=1)
    assert note(every=30, free=1) is None


def test_the_warm_start_has_its_examples_and_neither_reference_nor_critic():
    """Each example is a prompt of 100 tokens and one completion of at most 300; two groups of four share their prompts."""
    few = ("rollout.prompts_per_step=2", "rollout.completions_per_prompt=4", "beta=0.04", "rollout.max_completion_tokens=300")
    found = {p.name: {i.name: i.bytes for i in p.items if i.bytes} for p in phases(setup("warm_start.steps=6", *few))}
    warm, learning = found["warm start"], found["learning"]
    assert warm["activations"] / learning["activations"] == pytest.approx(16 * (100 + 299) / (2 * (100 + 4 * 299)), rel=0.05)
    assert learning.keys() - warm.keys() == {"reference"}
    assert "warm start" not in sizes(setup("warm_start.steps=0", *few))


OWN_LOSS = """
from groupwise.algorithm import LossOutputs, needs

@needs("reference")
def near(inputs):
    return LossOutputs((inputs.logprobs_T - inputs.reference_logprobs_T) ** 2)

def far(inputs):
    return LossOutputs(-inputs.advantages_T * inputs.logprobs_T)
"""


def test_a_reference_that_only_a_loss_of_ones_own_reads_is_planned(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN_LOSS)

    def planned(loss):
        overrides = ["algorithm.kl=null", f"algorithm.loss={{type: {loss}}}", "model.dtype=bfloat16"]
        return make_plan(load_config("quickstart", overrides), HARDWARE["rtx-4090"], limit_bytes=2**30)

    without, near, far = (planned(name) for name in ("reinforce", f"{tmp_path}/mine.py:near", f"{tmp_path}/mine.py:far"))
    assert near.setup.weights in [i.bytes for p in near.phases for i in p.items if i.name == "reference"]
    assert near.cost.learning_flops == without.cost.learning_flops + without.cost.sampling_flops
    assert far.cost.learning_flops == without.cost.learning_flops
    assert [p.bytes for p in far.phases] == [p.bytes for p in without.phases]
    assert near.suggestions
    assert not any("algorithm.kl" in one.settings for one in near.suggestions), "there is none that could go"
    monkeypatch.setitem(REGISTERED, "loss", {"near": find_loss(f"{tmp_path}/mine.py:near", {}).func})
    assert planned("near").phases == near.phases


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_cpu_samples_from_rearranged_weights_of_either_kind(dtype, size):
    planned = setup(f"model.dtype={dtype}")
    (found,) = [one for one in sampling(planned) if one.name == "rearranged weights"]
    assert found.bytes == size * (planned.shape.layers * planned.shape.layer_matrices + planned.shape.head)
    (rounded,) = [one for one in sampling(setup(f"model.dtype={dtype}", "rollout.quantization=8bit")) if one.name == found.name]
    assert (rounded.bytes, rounded.formula) == (found.bytes // size, "(L matrices + V D), while sampling")
    assert evaluation(setup("rollout.quantization=8bit")) == evaluation(setup()), "what is judged is the policy"
