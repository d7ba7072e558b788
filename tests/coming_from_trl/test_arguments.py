"""No argument is passed over in silence: honoured, harmless, or refused with a sentence that says what to do."""

import copy
import dataclasses
import logging
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SchedulerType

from groupwise.algorithm.advantages import ADVANTAGES, gae_advantage, maxrl_advantage
from groupwise.algorithm.losses import LOSSES, dppo_loss, gmpo_loss, reinforce_loss
from groupwise.config import build_config
from groupwise.config.section import REGISTERED
from groupwise.errors import ConfigError
from groupwise.trl import GRPOConfig
from groupwise.trl.arguments import ARGUMENTS, render_table
from groupwise.trl.parts import objective

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "coming-from-trl.md"
REFUSED = [row for row in ARGUMENTS.values() if row.fate == "refused"]


def another(row):
    """A value that is not the default."""
    if isinstance(row.default, bool):
        return not row.default
    if isinstance(row.default, int | float):
        return row.default + 0.5
    kinds = {
        "str?": "x",
        "dict?": {"x": 1},
        "names?": ["x"],
        "names": ["x"],
        "float?": 0.5,
        "int?": 7,
        "flag": "all",
        "bool?": True,
    }
    return kinds[row.kind]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_honoured_is_refused_with_its_remedy(row):
    with pytest.raises(ConfigError) as refusal:
        GRPOConfig("out", **{row.name: another(row)})
    assert row.name in str(refusal.value)
    assert row.text[1:] in str(refusal.value)
    GRPOConfig("out", **{row.name: row.default})


def test_every_harmless_argument_is_taken():
    harmless = {
        row.name: another(row) for row in ARGUMENTS.values() if row.fate == "harmless" and row.kind not in ("str", "number?")
    }
    harmless |= {name: 7 for name in harmless if ARGUMENTS[name].kind == "int"}
    config = GRPOConfig("out", **harmless)
    assert all(getattr(config, name) == value for name, value in harmless.items())


def test_defaults_are_trl_s():
    config = GRPOConfig()
    assert (config.beta, config.epsilon, config.loss_type, config.learning_rate) == (0.0, 0.2, "dapo", 1e-6)
    assert (config.generation_batch_size, config.steps_per_generation, config.bf16) == (8, 1, True)
    assert config.output_dir == "trainer_output"
    assert GRPOConfig(fp16=True).bf16 is False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_generation": 4}, "did you mean num_generations"),
        ({"evaluation_strategy": "steps"}, "did you mean eval_strategy"),
        ({"max_prompt_length": 512}, "filter the data set"),
        ({"loss_type": "ppo"}, "'dapo'"),
        ({"optim": "lion_8bit"}, "'adamw_torch'"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "'cosine'"),
        ({"num_generations": 1}, "2 or more"),
        ({"num_generations": 3}, "no multiple of num_generations"),
        ({"generation_batch_size": 12}, "no multiple of per_device_train_batch_size"),
        ({"generation_batch_size": 16, "steps_per_generation": 3}, "set only one"),
        ({"use_vllm": True, "vllm_mode": "server"}, "own engine samples"),
        ({"use_vllm": True, "vllm_structured_outputs_regex": "x"}, "reward what matches"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "leave it at 'token'"),
        ({"vllm_device": "cuda:1"}, "leave it out, there is one device"),
        ({"deepspeed": "ds.json"}, "leave it out"),
        ({"chat_template_kwargs": "x.json"}, "as JSON"),
        ({"logging_steps": 0}, "logging_strategy='no'"),
        ({"logging_steps": 2.5}, "logging_steps is 2.5, but above 1 it counts steps: give a whole number"),
        ({"save_steps": 1.5}, "save_steps is 1.5"),
        ({"generation_kwargs": {"num_beams": 2}}, "'num_beams'"),
        ({"generation_kwargs": {"do_sample": False}}, "teach nothing"),
        ({"generation_kwargs": {"temperature": 0.7}}, "temperature is 1.0: set temperature alone"),
        ({"learning_rate": "fast"}, "give it a number"),
        ({"per_device_train_batch_size": 2.5}, "no whole number"),
        ({"delta": 1.1}, "raise it"),
        ({"fp16": True, "bf16": True}, "leave out either"),
        ({"sync_ref_model": True}, "set beta"),
        (
            {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0},
            "lower ref_model_mixup_alpha",
        ),
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 6}, "num_generations_eval"),
        ({"model_init_kwargs": {"max_memory": {}}}, "load the model yourself"),
        ({"max_completion_length": None}, "give it a number"),
        ({"router_aux_loss_coef": 0.1}, "0.0"),
        ({"mask_truncated_completions": "maybe"}, "'maybe', which is neither true nor false"),
        ({"gradient_checkpointing": None}, "None, which is neither true nor false"),
        ({"bf16": 2}, "2, which is neither true nor false"),
        ({"ref_model_mixup_alpha": 0.0}, "above 0 and at most 1"),
    ],
)
def test_values_that_cannot_be_are_told_in_one_sentence(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("(", "\\(")):
        GRPOConfig("out", **arguments)


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_delta_may_be_anything_where_trl_does_not_read_it(loss_type):
    assert GRPOConfig("out", loss_type=loss_type, delta=1.1).delta == 1.1


@pytest.mark.parametrize(
    ("iterations", "micro_steps", "accumulation", "moves"),
    [(2, 1, 1, True), (1, 2, 1, True), (1, 3, 2, True), (1, 1, 1, False), (1, 2, 2, False), (2, 1, 4, False)],
)
def test_a_reference_of_the_last_step_needs_a_policy_that_moves_within_a_generation(iterations, micro_steps, accumulation, moves):
    from groupwise.trl.parts import model_config, to_config

    follows = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    follows |= {"num_iterations": iterations, "steps_per_generation": micro_steps, "gradient_accumulation_steps": accumulation}
    if moves:
        args = GRPOConfig("out", **follows)
        assert to_config(args, model_config(args, "quickstart")).algorithm.kl.reference_every == 1
    else:
        with pytest.raises(ConfigError, match="learnt from in one optimiser step"):
            GRPOConfig("out", **follows)


def test_batch_sizes_follow_from_each_other():
    config = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=6)
    assert (config.steps_per_generation, config.generation_batch_size) == (6, 24)
    config = GRPOConfig(per_device_train_batch_size=4, generation_batch_size=32)
    assert config.steps_per_generation == 8
    again = dataclasses.replace(config, beta=0.1)
    assert (again.beta, again.steps_per_generation) == (0.1, 8)


def test_enums_old_names_and_truths_are_taken_as_transformers_takes_them():
    config = GRPOConfig(
        lr_scheduler_type=SchedulerType.COSINE, logging_strategy=IntervalStrategy.EPOCH, warmup_ratio=0.1, scale_rewards=False,
        report_to="none", no_cuda=True, model_init_kwargs='{"dtype": "bfloat16"}',
    )  # fmt: skip
    assert (config.lr_scheduler_type, config.logging_strategy, config.scale_rewards) == ("cosine", "epoch", "none")
    assert config.get_warmup_steps(50) == 5
    assert (config.report_to, config.use_cpu, config.model_init_kwargs) == ([], True, {"dtype": "bfloat16"})


def test_the_command_line_is_parsed_into_it():
    (config,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        ["--output_dir", "out", "--beta", "0.04", "--num_generations", "4", "--reward_weights", "1.0", "0.5", "--bf16", "False"]
    )
    assert (config.beta, config.num_generations, config.reward_weights, config.bf16) == (0.04, 4, [1.0, 0.5], False)


def test_an_argument_without_a_text_here_has_that_of_transformers_or_is_referred_to_trl():
    texts = {field.name: field.metadata["help"] for field in dataclasses.fields(GRPOConfig)}
    theirs = {field.name: field.metadata.get("help") for field in dataclasses.fields(TrainingArguments)}
    assert all(texts.values())
    assert texts["weight_decay"] == theirs["weight_decay"]
    assert texts["epsilon"] == "As TRL's documentation says."
    assert texts["max_steps"] == ARGUMENTS["max_steps"].text != theirs["max_steps"]


def test_the_command_lists_every_argument():
    assert [name for name in ARGUMENTS if f"`{name}`" not in render_table()] == []


def test_the_page_of_architecture_counts_them():
    page = (PAGE.parents[1] / "explanation" / "architecture.md").read_text(encoding="utf-8")
    assert f"fate of {len(ARGUMENTS)} arguments" in page


@pytest.mark.slow
def test_the_command_says_nothing_beside_its_list():
    """Such as that of bitsandbytes, which transformers' trainer modules import where it is installed."""
    done = subprocess.run([sys.executable, "-m", "groupwise.trl"], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == render_table().strip()
    assert done.stderr == ""


def test_the_page_names_what_is_refused():
    page = PAGE.read_text(encoding="utf-8")
    assert [row.name for row in REFUSED if f"`{row.name}`" not in page] == []


@pytest.mark.slow
def test_trl_itself_is_not_needed():
    """The tests' own environment has no TRL; here peft and accelerate are away too, in a process that has imported nothing yet."""
    code = (
        "import sys; sys.modules['trl'] = sys.modules['peft'] = sys.modules['accelerate'] = None; import groupwise.trl as g; "
        "print(g.GRPOConfig('x').beta, g.GRPOTrainer.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0.0", "GRPOTrainer"], done.stderr


OLD = {  # as scripts of early 2025 have them
    "output_dir": "out", "use_vllm": True, "vllm_device": "cuda:1", "vllm_gpu_memory_utilization": 0.7, "max_prompt_length": 256,
    "evaluation_strategy": "no", "vllm_max_model_len": 2048, "deepspeed": "zero3.json", "num_generations": 8, "loss_type": "ppo",
}  # fmt: skip


def test_an_old_script_is_told_all_that_must_change_at_once():
    with pytest.raises(ConfigError) as refusal:
        GRPOConfig(**OLD)
    said = str(refusal.value).splitlines()
    assert said[0].startswith("6 arguments")
    for name in ("vllm_device", "max_prompt_length", "evaluation_strategy", "vllm_max_model_len", "deepspeed", "loss_type"):
        assert sum(name in line for line in said[1:]) == 1
    assert isinstance(refusal.value, ValueError)
    with pytest.raises(ConfigError, match="2 arguments"):
        GRPOConfig(bf16_full_eval=True, torch_compile=True)


def test_an_attribute_that_is_set_later_is_held_to_the_rules():
    config = GRPOConfig("out")
    for name, value in {
        "deepspeed": {"x": 1}, "optim": "lion_8bit", "generation_kwargs": {"num_beams": 2}, "bf16_full_eval": True, "temperature": 0,
        "model_init_kwargs": {"max_memory": {}}, "min_p": 2.0,
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            setattr(config, name, value)
    assert (config.temperature, config.bf16_full_eval) == (1.0, False)
    config.model_init_kwargs = {"dtype": "float32", "revision": None, "attn_implementation": None, "trust_remote_code": False}
    config.lr_scheduler_type, config.per_device_train_batch_size, config.scale_rewards = SchedulerType.COSINE, 16, False
    config.check()
    assert (config.lr_scheduler_type, config.generation_batch_size, config.scale_rewards) == ("cosine", 16, "none")
    config.num_generations = 5
    with pytest.raises(ConfigError, match="groups must be whole"):
        config.check()


@dataclasses.dataclass
class Recipe(GRPOConfig):
    """As open-r1's configs are written."""

    system_prompt: str | None = dataclasses.field(default=None, metadata={"help": "of the chat"})
    learning_rate: float = 1e-5

    def __post_init__(self):
        super().__post_init__()
        self.seen = self.generation_batch_size


class Plain(GRPOConfig):
    def __init__(self, mine=1, **named):
        self.mine = mine
        super().__init__(**named)


@pytest.mark.parametrize("kind", [Recipe, Plain])
def test_a_subclass_keeps_every_check(kind):
    config = kind(output_dir="out", per_device_train_batch_size=16)
    assert (config.generation_batch_size, config.steps_per_generation, config.report_to) == (16, 1, [])
    for arguments, sentence in [
        ({"deepspeed": {"x": 1}}, "deepspeed"),
        ({"num_generations": 3}, "no multiple of num_generations"),
        ({"num_generation": 3}, "did you mean num_generations"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            kind(output_dir="out", **arguments)
    with pytest.raises(ConfigError, match="bf16_full_eval"):
        config.bf16_full_eval = True


def test_a_subclass_that_is_a_dataclass_has_its_own_fields():
    (config,) = HfArgumentParser(Recipe).parse_args_into_dataclasses(["--output_dir", "out", "--system_prompt", "Think."])
    assert (config.system_prompt, config.learning_rate, config.seen) == ("Think.", 1e-5, 8)
    assert config.to_dict()["system_prompt"] == "Think."


def test_folders_of_the_home_are_found(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = GRPOConfig("~/runs/x", logging_dir="~/boards")
    assert (config.output_dir, config.logging_dir) == ("/home/me/runs/x", "/home/me/boards")


def test_what_scripts_ask_of_transformers_arguments():
    config = GRPOConfig("out", log_level="error")
    assert config.get_process_log_level() == logging.ERROR
    with config.main_process_first(desc="nothing to wait for"):
        pass
    assert copy.deepcopy(config) == config
    assert not hasattr(config, "n_gpus")
    with pytest.raises(AttributeError, match=r"GRPOConfig has no 'set_dataloader': dir\(args\) lists"):
        config.set_dataloader()


def test_scripts_may_go_by_do_eval():
    assert (GRPOConfig("out", eval_strategy="epoch").do_eval, GRPOConfig("out").do_eval) == (True, False)


def test_fp16_that_is_set_later_takes_the_place_of_a_bf16_that_nobody_set():
    config = GRPOConfig("out")
    config.fp16 = True
    config.check()
    assert config.bf16 is False
    config.bf16 = True
    with pytest.raises(ConfigError, match="leave out either"):
        config.check()


def test_a_warmup_ratio_that_is_set_later_counts():
    config = GRPOConfig("out", warmup_ratio=0.1)
    config.warmup_ratio = 0.5
    config.check()
    assert config.get_warmup_steps(10) == 5
    config.warmup_steps = 3
    config.check()
    assert config.get_warmup_steps(10) == 3


def test_numbers_are_what_their_kind_says():
    config = GRPOConfig("out", num_generations=8.0, max_completion_length=64.0, top_k=None, report_to="all")
    assert [type(one) for one in (config.num_generations, config.max_completion_length, config.generation_batch_size)] == [
        int
    ] * 3
    assert (config.top_k, "all" in config.report_to) == (0, False)


def test_truths_that_are_given_as_text_or_numbers_are_truths():
    config = GRPOConfig("out", mask_truncated_completions="False", bf16="TRUE", bf16_full_eval="false", tf32=None, use_cpu=0)
    found = (config.mask_truncated_completions, config.bf16, config.bf16_full_eval, config.tf32, config.use_cpu)
    assert found == (False, True, False, None, False)
    assert type(config.use_cpu) is bool
    config.log_completions = "true"
    assert config.log_completions is True


@pytest.mark.parametrize(
    "arguments",
    [
        {"top_k": -1}, {"top_k": None}, {"report_to": "all"},
        {"learning_rate": 0.0}, {"epsilon": 0.0}, {"report_to": ["none"]}, {"optim": "paged_adamw_8bit"},
        {"use_vllm": True}, {"use_liger_kernel": True}, {"cast_lm_head_to_fp32": True}, {"min_p": 0.1, "repetition_penalty": 1.1},
        {"loss_type": "cispo"}, {"loss_type": "sapo"}, {"loss_type": "vespo"}, {"off_policy_mask_threshold": 0.5},
        {"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}}, {"learning_rate": "1e-6"},
        {"generation_kwargs": {"do_sample": True, "top_k": 5, "temperature": 0.7}, "temperature": 0.7},
        {"metric_for_best_model": "reward"}, {"warmup_ratio": 0.1},
    ],
)  # fmt: skip
def test_what_trl_runs_is_translated(arguments):
    from groupwise.trl.parts import model_config, objective, to_config

    config = GRPOConfig("out", **arguments)
    to_config(config, model_config(config, "quickstart"))
    objective(config)
    if "generation_kwargs" in arguments:
        assert config.top_k == 5
    if "metric_for_best_model" in arguments:
        assert config.greater_is_better is True


def test_the_settings_that_the_page_calls_trl_s_are_its_defaults():
    from groupwise.trl.parts import model_config, to_config

    (block,) = re.findall(r"^```yaml\n(algorithm: .*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    said, arguments = build_config(yaml.safe_load(block)), GRPOConfig("out")
    trl_s = to_config(arguments, model_config(arguments, "quickstart"))
    assert said.rollout.model_dump() == trl_s.rollout.model_dump()
    assert said.algorithm.kl is trl_s.algorithm.kl is None
    assert said.algorithm.loss.aggregation == objective(arguments).aggregation
    assert said.model.gradient_checkpointing == trl_s.model.gradient_checkpointing
    assert (said.optimizer.schedule, said.optimizer.betas) == (arguments.lr_scheduler_type, trl_s.optimizer.betas)
    assert (said.training.epochs, said.training.seed) == (arguments.num_train_epochs, trl_s.training.seed)


def test_what_is_better_follows_a_metric_that_is_named_later():
    config = GRPOConfig("out", metric_for_best_model="reward")
    config.metric_for_best_model = "eval_loss"
    config.check()
    assert config.greater_is_better is False
    said = GRPOConfig("out", metric_for_best_model="reward", greater_is_better=True)
    said.metric_for_best_model = "eval_loss"
    said.check()
    assert said.greater_is_better is True


def test_cispo_counts_what_it_holds_down_as_trl_does():
    """Tokens with a positive advantage alone."""
    import torch

    from groupwise.algorithm import LossInputs
    from groupwise.trl.parts import objective

    found = objective(GRPOConfig("out", loss_type="cispo", epsilon_high=2.0))
    ratios, advantages = torch.tensor([3.0, 3.0, 1.0]), torch.tensor([1.0, -1.0, 1.0])
    inputs = LossInputs(ratios.log(), torch.zeros(3), advantages, torch.arange(3), 3)
    assert found.loss(inputs).clipped_T.tolist() == [True, False, False]


def test_what_delta_caps_is_not_counted_as_clipped():
    import torch

    from groupwise.algorithm import LossInputs
    from groupwise.trl.parts import objective

    found = objective(GRPOConfig("out", epsilon=0.2, delta=1.5))
    ratios, advantages = torch.tensor([3.0, 3.0, 0.5, 0.5]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    outputs = found.loss(LossInputs(ratios.log(), torch.zeros(4), advantages, torch.arange(4), 4))
    assert outputs.clipped_T.tolist() == [True, False, True, False]
    assert outputs.loss_T.tolist() == pytest.approx([-1.2, 1.5, 0.8, -0.5])


def test_drift_is_measured_from_what_sampled():
    """As in TRL with vLLM or a ``rollout_func``, and so with rounded weights; elsewhere the policy itself sampled.

    Unknown log-probabilities are the policy's.
    """
    import torch

    from groupwise.algorithm import policy_loss

    logprobs_T, sampler_T = torch.tensor([-3.0, -3.0]), torch.tensor([-1.0, math.nan])
    told = ({}, False, 2), ({"use_vllm": True}, False, 1), ({}, True, 1), ({"rollout_quantization": "8bit"}, False, 1)
    for arguments, own_rollout, kept in told:
        made = objective(GRPOConfig("out", off_policy_mask_threshold=0.5, **arguments), own_rollout)
        loss, _ = policy_loss(
            made, logprobs_T=logprobs_T, sequence_T=torch.arange(2), weights_T=torch.ones(2), advantages_N=-torch.ones(2),
            sampler_logprobs_T=sampler_T,
        )  # fmt: skip
        assert loss == kept


def test_gspo_token_has_gspo_s_gradient():
    """Where all tokens of a completion have one advantage the two forms are equal (arXiv 2507.18071, section 4.3)."""
    import torch

    from groupwise.algorithm import LossInputs
    from groupwise.trl.parts import objective

    gradients = []
    for level in ("sequence", "sequence_token"):
        found = objective(GRPOConfig("out", loss_type="grpo", importance_sampling_level=level))
        logprobs_T = torch.tensor([-0.5, -1.0, -2.0, -0.7], requires_grad=True)
        inputs = LossInputs(logprobs_T, torch.tensor([-0.6, -1.0, -1.9, -0.8]), torch.ones(4), torch.tensor([0, 0, 0, 1]), 2)
        (found.loss(inputs).loss_T * torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0])).sum().backward()
        gradients.append(logprobs_T.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().min() > 0.1


def test_a_loss_that_trl_lacks_goes_by_its_name(monkeypatch):
    monkeypatch.setitem(REGISTERED, "loss", {"mine": reinforce_loss})
    monkeypatch.setattr("groupwise.algorithm.registry.LOSSES", {**LOSSES, "mine": reinforce_loss})
    for name, function, aggregation in (
        ("gmpo", gmpo_loss, "sequence_mean"),
        ("dppo", dppo_loss, "token_mean"),
        ("mine", reinforce_loss, "token_mean"),
    ):
        made = objective(GRPOConfig(loss_type=name))
        assert (made.loss.func, made.aggregation) == (function, aggregation)
    with pytest.raises(ConfigError, match="no ratio for a second update"):
        GRPOConfig(loss_type="reinforce", num_iterations=2)
    with pytest.raises(ConfigError, match=r"loss_type='meins' is not honoured.*'gmpo', .*or your own, such as 'my_loss.py:loss'"):
        GRPOConfig(loss_type="meins")


def test_settings_of_losses_and_advantages_that_trl_lacks_reach_them():
    made = objective(
        GRPOConfig(
            loss_type="gmpo",
            loss_settings={"epsilon": 0.3},
            advantage_type="group",
            advantage_settings={"baseline": "leave_one_out"},
        )
    )
    assert (made.loss.keywords, made.aggregation) == ({"epsilon": 0.3}, "sequence_mean")
    assert made.advantage.keywords == {"baseline": "leave_one_out", "scale": "group_std", "epsilon": 1e-4, "discount": 1.0}
    assert objective(GRPOConfig(advantage_type="maxrl")).advantage.func is maxrl_advantage
    assert objective(GRPOConfig(loss_type="dppo")).loss.keywords == {"divergence": "tv", "threshold": None}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"loss_settings": {"epsilon": 0.3}}, "loss_type='dapo' are arguments, such as epsilon: leave loss_settings out"),
        ({"loss_type": "gmpo", "epsilon": 0.3}, "epsilon is 0.3, but it does nothing with loss_type='gmpo': leave it out, and set"),
        ({"loss_type": "gmpo", "importance_sampling_level": "sequence"}, "importance_sampling_level is 'sequence', but it does nothing"),
        ({"advantage_settings": {"epsilon": 0.3}}, "there is no advantage_type that takes them"),
        ({"advantage_type": "maxrl", "scale_rewards": False}, "scale_rewards is 'none', but it does nothing with advantage_type"),
        ({"advantage_type": "gdpo", "multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation is .* does nothing"),
        ({"rollout_quantization": "4bit"}, "rollout_quantization='4bit' is not honoured"),
        ({"rollout_quantization": "8bit", "repetition_penalty": 1.1}, "is '8bit', but with repetition_penalty=1.1 the model's own module"),
        ({"generation_kwargs": {"temperature": 0}}, "temperature is 0, but it must be"),
        ({"generation_kwargs": {"top_p": 3}}, "top_p is 3, but it must be"),
        ({"reward_weights": 1.0}, "reward_weights=1.0 is no list of finite numbers: give one for each function"),
        ({"reward_weights": ["a"]}, "is no list of finite numbers"),
        ({"reward_weights": [math.nan]}, "is no list of finite numbers"),
        ({"beta": None}, "beta is None, which is no number: give it a number"),
        ({"per_device_train_batch_size": None}, "per_device_train_batch_size is None, which is no whole number"),
        ({"report_to": 5}, "report_to=5 must be a name or a list of names"),
        ({"metric_for_best_model": 3}, "metric_for_best_model=3 must be a metric's name"),
        ({"advantage_type": "gae"}, "advantage_type='gae' is not honoured.*'maxrl', 'gdpo', or your own, such as 'my_advantage.py:adv"),
        ({"loss_type": "gmpo", "loss_settings": {"epsilon": -1}}, r"settings=\{'epsilon': -1\}: algorithm.loss.epsilon is -1, but must"),
        ({"loss_type": "gmpo", "loss_settings": {"epsilno": 1}}, "algorithm.loss.epsilno is not a setting: did you mean"),
        ({"loss_type": "gmpo", "loss_settings": {"aggregation": "fixed"}}, "aggregation follows from loss_type: leave it out"),
        ({"advantage_type": "group", "advantage_settings": {"scale": "std"}}, "algorithm.advantage.scale is 'std', but must be one of"),
        ({"loss_type": "no.py:loss"}, "loss_type='no.py:loss' cannot be used with .*: loss file 'no.py' does not exist"),
    ],
)  # fmt: skip
def test_settings_that_a_loss_or_advantage_does_not_take_are_refused(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        objective(GRPOConfig(**arguments))


def test_the_level_of_the_ratio_is_still_that_of_the_kl_beside_a_loss_that_trl_lacks():
    made = objective(GRPOConfig(loss_type="gmpo", importance_sampling_level="sequence", beta=0.1))
    assert made.kl.importance == "whole_sequence"


def test_an_advantage_that_needs_values_is_refused(monkeypatch):
    monkeypatch.setitem(REGISTERED, "advantage", {"judged": gae_advantage})
    monkeypatch.setattr("groupwise.algorithm.registry.ADVANTAGES", {**ADVANTAGES, "judged": gae_advantage})
    with pytest.raises(ConfigError, match=r"advantage_type='judged' needs values, but groupwise.trl learns none"):
        objective(GRPOConfig(advantage_type="judged"))
