"""No argument is passed over in silence: honoured, harmless, or refused with a sentence that says what to do."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import HfArgumentParser
from transformers.trainer_utils import IntervalStrategy, SchedulerType

from groupwise.errors import ConfigError
from groupwise.trl import GRPOConfig
from groupwise.trl.arguments import ARGUMENTS, render_table

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
    config = GRPOConfig("out", **harmless)
    assert all(getattr(config, name) == value for name, value in harmless.items())


def test_defaults_are_trl_s():
    config = GRPOConfig()
    assert (config.beta, config.epsilon, config.loss_type, config.learning_rate) == (0.0, 0.2, "dapo", 1e-6)
    assert (config.generation_batch_size, config.steps_per_generation, config.bf16) == (8, 1, True)
    assert config.output_dir == "trainer_output"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_generation": 4}, "did you mean num_generations"),
        ({"evaluation_strategy": "steps"}, "did you mean eval_strategy"),
        ({"max_prompt_length": 512}, "filter the data set"),
        ({"loss_type": "sapo"}, "'dapo'"),
        ({"optim": "adamw_8bit"}, "'adamw_torch'"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "'cosine'"),
        ({"num_generations": 1}, "2 or more"),
        ({"num_generations": 3}, "no multiple of num_generations"),
        ({"generation_batch_size": 12}, "no multiple of per_device_train_batch_size"),
        ({"generation_batch_size": 16, "steps_per_generation": 3}, "set only one"),
        ({"loss_type": "cispo"}, "epsilon_high=5.0"),
        ({"delta": 1.1}, "raise it"),
        ({"sync_ref_model": True}, "set beta"),
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 6}, "num_generations_eval"),
        ({"model_init_kwargs": {"quantization_config": {}}}, "load the model yourself"),
        ({"max_completion_length": None}, "give it a number"),
        ({"router_aux_loss_coef": 0.1}, "0.0"),
    ],
)
def test_values_that_cannot_be_are_told_in_one_sentence(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("(", "\\(")):
        GRPOConfig("out", **arguments)


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


def test_the_page_has_the_table():
    assert render_table().strip() in PAGE.read_text(encoding="utf-8"), "run: python scripts/write_trl_docs.py"


def test_trl_itself_is_not_needed():
    code = (
        "import sys; sys.modules['trl'] = sys.modules['peft'] = sys.modules['accelerate'] = None; import groupwise.trl as g; "
        "print(g.GRPOConfig('x').beta, g.GRPOTrainer.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0.0", "GRPOTrainer"], done.stderr
