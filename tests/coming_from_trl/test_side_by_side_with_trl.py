"""The same script through TRL and through here: equal prompts, losses, gradients' norms, logs and weights, optimiser step by step.

TRL samples with generators that nobody else can follow, so it is made to take the completions that were sampled here. All else is
its own. Skipped where TRL is not installed.
"""

import math

import pytest
import torch

from groupwise.trl import GRPOConfig, GRPOTrainer
from groupwise.trl.arguments import ARGUMENTS
from groupwise.trl.steps import Schedule, epoch_order, split

trl = pytest.importorskip("trl", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = {
    "defaults": {},
    "grpo with a KL": {"loss_type": "grpo", "beta": 0.2, "num_iterations": 2},
    "a KL that nothing corrects": {"loss_type": "dr_grpo", "beta": 0.2, "use_bias_correction_kl": False, "num_iterations": 2},
    "a generation over two steps": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "sweeps and steps that do not meet": {
        "steps_per_generation": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "num_train_epochs": 2,
        "max_steps": -1,
    },
    "an epoch that accumulation does not divide": {
        "steps_per_generation": 3, "gradient_accumulation_steps": 5, "per_device_train_batch_size": 4,
    },
    "several generations in a step": {"steps_per_generation": 1, "gradient_accumulation_steps": 3},
    "passes within a step": {"num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 4},
    "three passes, clip higher": {"num_iterations": 3, "epsilon": 0.02, "epsilon_high": 0.05},
    "two sides": {"num_iterations": 3, "epsilon": 0.02, "delta": 1.05, "loss_type": "grpo"},
    "bnpo, truncated masked": {
        "loss_type": "bnpo", "mask_truncated_completions": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
    },
    "dapo, truncated masked": {"mask_truncated_completions": True, "steps_per_generation": 2, "scale_rewards": "batch"},
    "dr_grpo unscaled": {"loss_type": "dr_grpo", "scale_rewards": False, "num_iterations": 2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2},
    "cispo that holds weights down": {"loss_type": "cispo", "epsilon_high": 1.0, "num_iterations": 3},
    "cispo without a bound of its own": {"loss_type": "cispo", "num_iterations": 2},
    "sapo": {"loss_type": "sapo", "num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.1},
    "vespo": {"loss_type": "vespo", "num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4, "beta": 0.1},
    "what has drifted is left out": {"off_policy_mask_threshold": 0.001, "num_iterations": 3},
    "restricted samples of vllm": {"use_vllm": True, "top_p": 0.9, "num_iterations": 2, "beta": 0.1, "loss_type": "grpo"},
    "restricted samples of vllm, by token": {
        "use_vllm": True, "top_k": 150, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": 1.0,
        "steps_per_generation": 3, "gradient_accumulation_steps": 2, "num_iterations": 2, "per_device_train_batch_size": 4,
    },
    "restricted samples of vllm, masked below a floor": {
        "use_vllm": True, "top_k": 150, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.9,
        "num_iterations": 2,
    },
    "restricted samples of vllm, raised to a floor": {
        "use_vllm": True, "top_k": 150, "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_min": 0.6,
    },
    "gspo of tokens of high entropy": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.4, "num_iterations": 2,
    },
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "num_iterations": 3, "beta": 0.1},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2, "learning_rate": 1e-3},
    "a reference that follows": {"beta": 0.3, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.4},
    "a reference that is the policy of the step before": {
        "beta": 0.3, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0, "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
    },
    "optimiser": {"weight_decay": 0.1, "adam_beta2": 0.9, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.1},
    "two rewards": {"reward_weights": [1.0, -0.5], "shuffle_dataset": False},
    "two rewards, normalised first": {"reward_weights": [1.0, 0.5], "multi_objective_aggregation": "normalize_then_sum"},
    "temperature": {"temperature": 0.7, "beta": 0.1},
    "tokens of high entropy": {"top_entropy_quantile": 0.3, "beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 2},
    "only the one of highest entropy": {"top_entropy_quantile": 0.0, "loss_type": "bnpo"},
    "entropy bonus": {"entropy_coef": 0.3, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "entropy bonus of high-entropy tokens": {
        "entropy_coef": 0.3, "top_entropy_quantile": 0.4, "loss_type": "grpo", "mask_truncated_completions": True,
    },
    "adaptive entropy": {
        "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.05, "entropy_coef_max": 0.17, "entropy_target": 5.0,
        "gradient_accumulation_steps": 2,
    },
    "adaptive entropy above its target": {
        "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.08, "entropy_target": 0.5,
    },
    "nothing to learn": {"reward_weights": [0.0, 0.0], "weight_decay": 0.1},
}  # fmt: skip
NOT_COMPARED = (
    "vespo/phi_seq_mean",
    "entropy",
    "step_time",
    "total_flos",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    *(f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")),
)
BY_SWEEP = (
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_max",
)


def letters(completions, **kwargs):
    return [sum(x.islower() and x.isascii() for x in text) / max(1, len(text)) + len(text) / 50 for text in completions]


def even(completion_ids, **kwargs):
    """It does not apply to completions whose first token is a multiple of three."""
    return [None if ids[0] % 3 == 0 else sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def rewards_of(case):
    return [letters, even] if "reward_weights" in case else letters


def ours(arguments, case, folder, prompts):
    trainer = GRPOTrainer(str(folder), rewards_of(case), GRPOConfig(**arguments), prompts)
    generations, generate = [], trainer._generate

    def recorded(*given):
        generations.append(generate(*given))
        return generations[-1]

    vars(trainer)["_generate"] = recorded
    trainer.train()
    return trainer, generations


def theirs(arguments, case, folder, prompts, generations, monkeypatch):
    from transformers import AutoTokenizer

    args = trl.GRPOConfig(**{**arguments, "use_vllm": False}, report_to="none")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = trl.GRPOTrainer(str(folder), rewards_of(case), args, prompts, processing_class=tokenizer)
    trainer.use_vllm = arguments.get("use_vllm", False)  # only now: it learns from such samples without the package
    waiting, number = list(generations), iter(range(len(generations)))

    def replay(prompt_ids, *_, **__):
        generation = waiting.pop(0)
        expected = [list(g.prompt.token_ids) for g in generation.groups for _ in g.completions]
        assert [list(map(int, ids)) for ids in prompt_ids] == expected, "the same prompts in the same order"
        logprobs = [list(c.logprobs) for c in generation.sampled] if trainer.use_vllm else None
        return [list(c.token_ids) for c in generation.sampled], logprobs

    def shuffle(batch):
        count = len(batch["advantages"])
        order = [i for sweep in split(count, args.steps_per_generation, args.seed, next(number)) for i in sweep]
        return {k: v[order] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in batch.items()}

    trainer._generate_single_turn = replay
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", shuffle)
    trainer.train()
    assert not waiting, "as many generations"
    return trainer


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_trl_s_run(name, tiny_folder, prompts, tmp_path, monkeypatch):
    arguments = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8,
        "max_steps": 5, "learning_rate": 2e-2, "logging_steps": 1, "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "save_strategy": "no", "gradient_checkpointing": False, "adam_epsilon": 1e-3, **CASES[name],
    }  # fmt: skip
    mine, generations = ours(arguments, CASES[name], tiny_folder, prompts)
    other = theirs(arguments, CASES[name], tiny_folder, prompts, generations, monkeypatch)
    assert len(mine.state.log_history) == len(other.state.log_history) > 2
    # TRL logs the mean of its sweeps' means and of their extremes, here it is one mean over the step.
    by_token = "importance_sampling_level" not in arguments  # else TRL counts clipped completions, and here it is their tokens
    by_sweep = arguments.get("gradient_accumulation_steps", 1) > 1 or not by_token
    not_compared = (*NOT_COMPARED, *BY_SWEEP) if by_sweep else NOT_COMPARED
    for row, expected in zip(mine.state.log_history, other.state.log_history, strict=True):
        names = {n for n in expected if n not in not_compared}
        assert names <= set(row), names - set(row)
        for key in sorted(n for n in names if expected[n] is not None):  # None: of nothing but masked tokens
            assert row[key] == pytest.approx(expected[key], rel=2e-3, abs=2e-5), (key, row["step"])
    if arguments.get("sync_ref_model"):
        assert mine.state.log_history[1]["kl"] > 0
    weights, start = dict(other.model.named_parameters()), None
    from transformers import AutoModelForCausalLM

    start = dict(AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).named_parameters())
    moved = math.sqrt(sum(float((weights[n] - p).square().sum()) for n, p in start.items()))
    apart = math.sqrt(sum(float((weights[n] - p).square().sum()) for n, p in mine.model.named_parameters()))
    assert moved > 0.05
    assert apart < 1e-3 * moved


def test_the_table_has_every_argument_with_trl_s_default():
    import dataclasses

    fields = {f.name: f for f in dataclasses.fields(trl.GRPOConfig)}
    current = {name for name, row in ARGUMENTS.items() if row.of_trl}
    assert current == set(fields)
    for name, field in fields.items():
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        assert ARGUMENTS[name].default == getattr(default, "value", default), name


@pytest.mark.parametrize("shuffle", [True, False])
def test_prompts_come_in_trl_s_order(shuffle):
    from trl.trainer.utils import RepeatSampler

    schedule = Schedule(prompts=23, prompts_per_generation=4, steps_per_generation=2, num_iterations=3, accumulation=4)
    sampler = RepeatSampler(range(23), 2, batch_size=4, repeat_count=6, shuffle=shuffle, seed=7)
    for epoch in range(3):
        order = epoch_order(23, 7, shuffle, epoch)
        mine = [i for g in range(schedule.generations) for _ in range(6) for i in order[g * 4 : g * 4 + 4] for _ in range(2)]
        assert mine == list(sampler)
