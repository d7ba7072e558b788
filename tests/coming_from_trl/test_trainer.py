"""What scripts written for TRL do with the trainer: rewards of every kind, callbacks, evaluation, checkpoints, adapters, errors."""

import asyncio
import errno
import gc
import itertools
import json
import math
import os
import random
import shutil
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors import SafetensorError
from safetensors.torch import load, save
from tokenizers import processors
from torch.optim import lr_scheduler
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from transformers.integrations import DVCLiveCallback, TensorBoardCallback, WandbCallback
from transformers.integrations.integration_utils import WandbLogModel

from groupwise.algorithm import Objective
from groupwise.algorithm.advantages import maxrl_advantage
from groupwise.config.schema import OptimizerConfig
from groupwise.distributed import World
from groupwise.engines.builtin import decode, fast_paths
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.errors import CheckpointError, ConfigError, DataError, ModelError, RewardError, TrainingError
from groupwise.trl import GRPOConfig, GRPOTrainer, checkpoint, parts
from groupwise.trl.outputs import CompletionLog, summary_in
from groupwise.trl.parts import GivenOptimizer, check_frozen
from groupwise.trl.rewards import Judge, combine
from groupwise.trl.steps import EntropyControl
from tests.tiny import write_tiny_mixture

NAMES = {
    "loss", "grad_norm", "learning_rate", "num_tokens", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/clipped_ratio", "completions/mean_terminated_length", "completions/min_terminated_length",
    "completions/max_terminated_length", "rewards/letters/mean", "rewards/letters/std", "reward", "reward_std",
    "frac_reward_zero_std", "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean",
    "clip_ratio/high_max", "clip_ratio/region_mean", "step_time", "epoch", "step",
}  # fmt: skip


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_logs_what_trl_logs_and_its_model_loads_anywhere(tiny_folder, chats, letters, settings, tmp_path):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(beta=0.1), chats)
    before = weights(trainer)
    output = trainer.train()
    assert output.global_step == trainer.state.global_step == 2
    first, second, summary = trainer.state.log_history
    assert set(first) == set(second) == NAMES
    assert (first["step"], second["step"], second["epoch"]) == (1, 2, pytest.approx(2 / 6))
    assert {"train_runtime", "train_loss"} <= set(summary)
    assert not same(before, weights(trainer))
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(torch.equal(p, weights(trainer)[name]) for name, p in again.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template


@pytest.mark.parametrize("more", [{}, {"entropy_coef": 0.1}])
def test_what_is_learnt_does_not_depend_on_the_default_dtype(tiny_folder, prompts, letters, settings, more):
    learnt = []
    for dtype in (torch.float32, torch.bfloat16):
        trainer = GRPOTrainer(str(tiny_folder), letters, settings(**more), prompts)
        torch.set_default_dtype(dtype)
        try:
            trainer.train()
        finally:
            torch.set_default_dtype(torch.float32)
        learnt.append(weights(trainer))
    assert same(*learnt)


@pytest.mark.parametrize("more", [{}, {"do_sample": False}])
def test_a_saved_model_samples_as_the_one_it_came_from(tiny_folder, prompts, letters, settings, tmp_path, more):
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 17, "repetition_penalty": 1.05, **more}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, **sampling}))
    trainer = GRPOTrainer(str(folder), letters, settings(max_steps=1), prompts)
    trainer.save_model(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {3, trainer.processing_class.eos_token_id} <= set(saved["eos_token_id"])
    assert (sampling.items() <= saved.items()) == (not more), "settings that contradict each other cannot be saved"


def test_fast_paths_are_compared_before_a_script_s_model_learns(tiny_folder, prompts, letters, settings, caplog, monkeypatch):
    monkeypatch.setattr(fast_paths, "_known", {})
    found = [fast_paths.Choice("a path", False, False, "it failed", ())]
    monkeypatch.setattr(fast_paths, "_check", lambda *_: found)
    monkeypatch.setattr(fast_paths, "_kept", lambda key: None)
    GRPOTrainer(str(tiny_folder), letters, settings(), prompts)
    assert [*fast_paths._known.values()] == [found]
    assert "a path: left out on this machine, since it failed" in caplog.text


def test_a_model_on_another_gpu_is_computed_there(load_tiny, tiny_folder, settings, monkeypatch):
    """Kernels were launched on the first GPU. With a stand-in for where the model is."""

    class Reached(Exception):
        pass

    def check(config, dtype, device):
        checked.append(device)
        raise Reached

    checked, current, second, model = [], [], torch.device("cuda:1"), load_tiny()
    monkeypatch.setattr(LlamaForCausalLM, "device", second)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(parts, "check_fast_paths", check)
    policy, config = parts.make_policy(model, settings(), AutoTokenizer.from_pretrained(tiny_folder), None, None)
    assert current == [second]
    with pytest.raises(Reached):
        parts.make_parts(policy, parts.to_config(settings(), config), World(), False, False, None)
    assert checked == [second]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_a_float32_model_that_bf16_does_not_reach_is_told(
    tiny_folder, prompts, letters, settings, caplog, monkeypatch, dtype, bf16
):
    monkeypatch.setattr("groupwise.models.devices.computes_bf16", lambda: True)
    named = dtype is None
    model = str(tiny_folder) if named else AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=dtype)
    trainer = GRPOTrainer(model, letters, settings(bf16=bf16), prompts)
    warned = any("so it computes in float32" in record.getMessage() for record in caplog.records)
    assert warned == (dtype == torch.float32 and bf16)
    assert trainer.model.dtype == ((torch.bfloat16 if bf16 else torch.float32) if named else dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtype_auto_without_bf16_is_that_of_the_file(
    load_tiny, tiny_folder, prompts, letters, settings, monkeypatch, tmp_path, stored
):
    monkeypatch.setattr("groupwise.models.devices.computes_bf16", lambda: True)
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "stored"))
    load_tiny().to(stored).save_pretrained(folder)
    args = settings(model_init_kwargs={"dtype": "auto"})
    assert GRPOTrainer(str(folder), letters, args, prompts).model.dtype == stored


def test_rates_count_rows_as_transformers_does(tiny_folder, prompts, letters, settings, monkeypatch):
    counted = []
    monkeypatch.setattr("groupwise.trl.trainer.speed_metrics", lambda *given: counted.append((given[0], *given[2:])) or {})
    for changes in ({"max_steps": -1, "num_train_epochs": 2}, {}):
        trainer = GRPOTrainer(str(tiny_folder), letters, settings(**changes), prompts)
        trainer.train()
    trainer.evaluate(prompts)
    assert counted == [("train", 24, 12), ("train", 16, 2), ("eval", 12, 2)]


def test_rewards_get_what_trl_gives_them(tiny_folder, chats, settings):
    calls = []

    def plain(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **kwargs):
        calls.append((prompts, completions, completion_ids, answer, trainer_state.global_step, kwargs))
        log_metric("mine", 3.0)
        return [float(len(ids)) for ids in completion_ids]

    trainer = GRPOTrainer(str(tiny_folder), plain, settings(), chats)
    trainer.train()
    prompts, completions, ids, answer, step, kwargs = calls[1]
    assert len(calls) == 2, "one call for a generation, with all of its completions"
    assert len(prompts) == len(completions) == len(ids) == len(answer) == 8
    assert prompts[0] == prompts[3] != prompts[4]
    assert prompts[0] == [{"role": "user", "content": f"{answer[0]} + {answer[0]}?"}]
    assert completions[0][0]["role"] == "assistant"
    assert (step, kwargs) == (1, {})
    assert trainer.state.log_history[0]["mine"] == 3.0


def test_a_row_s_list_is_each_completion_s_own(tiny_folder, settings):
    taken = []

    def popping(completions, words, **kwargs):
        taken.extend(own.pop() for own in words)
        return [float(i) for i in range(len(completions))]

    data = Dataset.from_dict({"prompt": ["a", "b"], "words": [["x", "y"]] * 2})
    GRPOTrainer(str(tiny_folder), popping, settings(max_steps=-1, num_train_epochs=2), data).train()
    assert taken == ["y"] * 16


def test_unused_columns_are_kept_back_where_that_is_asked_for(tiny_folder, prompts, settings):
    def reward(completions, **kwargs):
        assert "answer" not in kwargs
        return [float(len(c)) for c in completions]

    GRPOTrainer(str(tiny_folder), reward, settings(remove_unused_columns=True, max_steps=1), prompts).train()


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_a_score_of_nan_is_none_as_in_trl(tiny_folder, prompts, settings, kind):
    """TRL leaves such a score out of the sum and of the group's mean; elsewhere in groupwise it is an error of the reward function."""

    def reward(completions, **kwargs):
        return kind([math.nan, *(float(i) for i in range(1, len(completions)))])

    trainer = GRPOTrainer(str(tiny_folder), reward, settings(max_steps=1), prompts)
    trainer.train()
    _, generation = trainer._generation
    assert math.isnan(generation.rewards[0])
    assert list(generation.rewards[1:4]) == [1.0, 2.0, 3.0]
    assert generation.advantages[0] == 0
    assert all(math.isfinite(a) for a in generation.advantages)
    assert trainer.state.log_history[0]["rewards/reward/mean"] == pytest.approx(4.0)


def test_async_rewards_run_side_by_side_and_none_is_left_out(tiny_folder, prompts, settings):
    meeting = []

    async def one(completions, **kwargs):
        meeting.append("one")
        while len(meeting) < 2:
            await asyncio.sleep(0.001)
        return [1.0 if i % 2 else None for i in range(len(completions))]

    async def two(completions, **kwargs):
        meeting.append("two")
        while len(meeting) < 2:
            await asyncio.sleep(0.001)
        return [None] * 3 + [float(i) for i in range(3, len(completions))]

    trainer = GRPOTrainer(str(tiny_folder), [one, two], settings(max_steps=1, reward_weights=[1.0, 2.0]), prompts)
    trainer.train()
    _, generation = trainer._generation
    assert [r if not math.isnan(r) else None for r in generation.rewards] == [None, 1, None, 7, 8, 11, 12, 15]
    assert generation.advantages[0] == generation.advantages[2] == 0
    assert generation.advantages[1] == pytest.approx(-generation.advantages[3])
    row = trainer.state.log_history[0]
    assert (row["rewards/one/mean"], row["rewards/two/mean"], row["reward"]) == pytest.approx((1.0, 5.0, 9.0))


def write_judge(tiny_folder, folder, **shape):
    """A reward model of random weights with the tiny model's tokenizer, which is returned."""
    config = LlamaConfig.from_pretrained(tiny_folder, num_labels=1, initializer_range=0.5, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("given", ["name", "object", "adapter"])
def test_a_model_as_reward(tiny_folder, chats, letters, settings, tmp_path, given):
    folder = tmp_path / "judge"
    tokenizer = write_judge(tiny_folder, folder)
    judge = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    reward = str(folder) if given == "name" else judge
    if given == "adapter":  # its layers are put into the model itself
        peft = pytest.importorskip("peft")
        reward = peft.get_peft_model(judge, peft.LoraConfig(r=2, task_type="SEQ_CLS", init_lora_weights=False))
    trainer = GRPOTrainer(str(tiny_folder), [reward, letters], settings(max_steps=1), chats)
    trainer.train()
    assert trainer.reward_func_names == ["judge", "letters"]
    _, generation = trainer._generation
    for i in (0, 5):
        text = tokenizer.apply_chat_template([*generation.prompts[i], *generation.completions[i]], tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        judge.config.pad_token_id = tokenizer.pad_token_id
        with torch.no_grad():
            hidden = judge.model(input_ids=ids).last_hidden_state
            last = int((ids[0] != tokenizer.pad_token_id).nonzero().max())  # where transformers reads the score
            expected = float(judge.score(hidden[0, last])[0])
        assert generation.scores[0][i] == pytest.approx(expected, abs=1e-4)


def test_texts_that_a_reward_model_does_not_hold_are_told_once(tiny_folder, chats, settings, tmp_path, caplog):
    write_judge(tiny_folder, tmp_path / "judge", max_position_embeddings=16)
    GRPOTrainer(str(tiny_folder), str(tmp_path / "judge"), settings(), chats).train()
    (said,) = [words for record in caplog.records if "lost their beginning" in (words := record.getMessage())]
    assert said.startswith("8 of 8 texts lost their beginning")
    assert "takes 16 tokens" in said


def test_a_reward_model_s_name_is_loaded_as_model_init_kwargs_say(tiny_folder, chats, settings, tmp_path, caplog):
    write_judge(tiny_folder, tmp_path / "judge")
    given = {"dtype": "bfloat16", "trust_remote_code": True, "attn_implementation": "sdpa", "quantization_config": {}}
    args = settings(model_init_kwargs=given)
    judge = Judge(str(tmp_path / "judge"), None, args, torch.device("cpu"))
    assert (judge.model.dtype, judge.settings.trust_remote_code) == (torch.bfloat16, True)
    for name in ("attn_implementation", "quantization_config"):
        assert f"model_init_kwargs {name} is not handed on to the reward model" in caplog.text


def test_what_is_wrong_with_a_reward_model_is_told_in_trl_s_words(tiny_folder, settings, tmp_path):
    folder, args = tmp_path / "judge", (settings(), torch.device("cpu"))
    tokenizer = write_judge(tiny_folder, folder)
    few = LlamaForSequenceClassification(LlamaConfig.from_pretrained(folder, vocab_size=100, pad_token_id=None))
    with pytest.raises(RewardError, match="models of another kind: take another reward model"):
        Judge(few, tokenizer, *args)(["a b"], ["c"])
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    turns = [{"role": role, "content": "?"} for role in ("system", "user", "assistant")]
    with pytest.raises(RewardError, match="pass in reward_processing_classes a tokenizer whose chat_template takes them"):
        Judge(AutoModelForSequenceClassification.from_pretrained(folder), tokenizer, *args)([turns[:2]], [turns[2:]])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = {"model_type": "remote", "auto_map": {"AutoConfig": "c.Config", "AutoModelForSequenceClassification": "m.Model"}}
    (folder / "config.json").write_text(json.dumps(config | own), encoding="utf-8")
    for name in ("c", "m"):
        (folder / f"{name}.py").write_text("raise SystemExit('it ran')\n", encoding="utf-8")
    with pytest.raises(ModelError, match="set trust_remote_code=True in GRPOConfig"):
        Judge(str(folder), None, *args)


def test_callbacks_get_loaders_and_hear_of_each_batch_of_an_evaluation(tiny_folder, prompts, letters, settings):
    heard = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            heard.append(len(train_dataloader))

        def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
            heard.append(len(eval_dataloader))

    args = settings(eval_strategy="steps", eval_steps=2)
    few = prompts.select(range(5))
    GRPOTrainer(str(tiny_folder), letters, args, prompts, eval_dataset=few, callbacks=[Watch]).train()
    assert heard == [6, 3, 3, 3], "batches of 2 prompts"


def test_callbacks_see_the_run_and_can_end_it(tiny_folder, prompts, letters, settings):
    events = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            events.append(("begin", state.max_steps, model is not None))

        def on_step_end(self, args, state, control, **kwargs):
            events.append(("step", state.global_step))
            control.should_training_stop = state.global_step == 2

        def on_log(self, args, state, control, logs=None, **kwargs):
            events.append(("log", "reward" in logs))

        def on_train_end(self, args, state, control, **kwargs):
            events.append(("end", state.global_step))

    GRPOTrainer(str(tiny_folder), letters, settings(max_steps=9), prompts, callbacks=[Watch()]).train()
    assert events == [("begin", 9, True), ("step", 1), ("log", True), ("step", 2), ("log", True), ("log", False), ("end", 2)]


@pytest.mark.parametrize("variable", [None, "theirs"])
def test_tensorboard_writes_where_logging_dir_says(tiny_folder, prompts, letters, settings, monkeypatch, variable):
    class Board(TensorBoardCallback):
        def __init__(self):  # what transformers 5 does; the package need not be there
            self.logging_dir = os.getenv("TENSORBOARD_LOGGING_DIR")

    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    if variable is not None:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", variable)
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(logging_dir="mine"), prompts, callbacks=[Board])
    assert trainer.pop_callback(Board).logging_dir == (variable or "mine")


def test_a_tracker_that_would_save_the_model_by_another_trainer_is_refused_at_once(prompts, letters, settings):
    class Board(WandbCallback):
        def __init__(self):  # the package need not be there
            self._log_model = WandbLogModel("end")

    class Live(DVCLiveCallback):
        def __init__(self):
            self._log_model = True

    for callback in (Board, Live()):
        with pytest.raises(ConfigError, match="unset WANDB_LOG_MODEL and HF_DVCLIVE_LOG_MODEL"):
            GRPOTrainer("no-such-model", letters, settings(), prompts, callbacks=[callback])


def test_evaluation_in_a_run_and_by_itself(tiny_folder, prompts, letters, settings):
    args = settings(eval_strategy="steps", eval_steps=1, num_generations_eval=2, beta=0.1)
    trainer = GRPOTrainer(str(tiny_folder), letters, args, prompts, eval_dataset=prompts.select(range(5)))
    trainer.train()
    found = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert [row["step"] for row in found] == [1, 2]
    before = weights(trainer)
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_reward", "eval_kl", "eval_rewards/letters/mean", "eval_runtime"} <= set(metrics)
    assert metrics["eval_reward"] == pytest.approx(found[-1]["eval_reward"]), "the same weights and seeds, the same samples"
    assert same(before, weights(trainer))
    both = trainer.evaluate({"a": prompts.select(range(2)), "b": prompts.select(range(2, 4))})
    assert {"eval_a_reward", "eval_b_reward"} <= set(both)


def test_weights_that_a_script_writes_before_training_are_trained(load_tiny, prompts, letters, settings, monkeypatch):
    """Masters were made with the trainer; where nothing was written they keep what 16 bits do not hold. Processes compare them then."""

    class Write(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            torch.nn.init.constant_(model.lm_head.weight[0], 0.25)

    trainer = GRPOTrainer(load_tiny().to(torch.bfloat16), letters, settings(max_steps=1), prompts, callbacks=[Write])
    compared = []
    monkeypatch.setattr(
        trainer.learner.sharding, "check", lambda: compared.append(bool((trainer.model.lm_head.weight[0] == 0.25).all()))
    )
    trainer.train()
    assert compared == [True]
    kept = [master.clone() for master in trainer.learner.optimizer.masters]
    trainer.learner.optimizer.take_up()
    assert all(map(torch.equal, kept, trainer.learner.optimizer.masters))
    tuned = {name: p * 0.5 for name, p in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(tuned)
    trainer.args.learning_rate = 0.0
    trainer.train()
    assert (trainer.model.lm_head.weight[0] == 0.25).all()
    del tuned["lm_head.weight"]
    assert same(tuned, {name: p for name, p in weights(trainer).items() if name in tuned})


@pytest.mark.parametrize(
    "kind", ["float32", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bfloat16", "adapter", "own optimiser"))]
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(tiny_folder, load_tiny, prompts, letters, settings, kind):
    def make(name):
        model, more = load_tiny(), {}
        if kind == "adapter":
            from peft import LoraConfig

            more = {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")}
        if kind == "bfloat16":
            model = model.to(torch.bfloat16)
        if kind == "own optimiser":
            more = {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), None)}
        args = settings(
            output_dir=f"{settings().output_dir}-{name}", max_steps=4, save_strategy="steps", save_steps=1, beta=0.1, num_iterations=2,
            learning_rate=1e-2, save_total_limit=3, lr_scheduler_type="cosine",
        )  # fmt: skip
        return GRPOTrainer(model, letters, args, prompts, **more)

    whole = make("whole")
    whole.train()
    folder = Path(whole.args.output_dir)
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    resumed = make("resumed")
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert same(weights(whole), weights(resumed))
    keys = ("reward", "loss", "kl", "learning_rate", "epoch", "num_tokens")
    rows = [[[row.get(k) for k in keys] for row in t.state.log_history if "loss" in row] for t in (whole, resumed)]
    assert rows[0] == rows[1]


def test_a_generation_that_is_sampled_again_is_counted_once(load_tiny, prompts, letters, settings, tmp_path):
    """Its checkpoint, in the middle of it, holds no completions, but has counted them."""
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    whole = GRPOTrainer(load_tiny(), letters, settings(**args), prompts)
    whole.train()
    resumed = GRPOTrainer(load_tiny(), letters, settings(**args, output_dir=str(tmp_path / "resumed")), prompts)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-3"))
    assert resumed.state.global_step == 4
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen > 0


def test_a_trainer_that_resumes_forgets_the_steps_that_it_made_itself(load_tiny, prompts, letters, settings):
    args = settings(max_steps=3, save_strategy="steps", save_steps=1)
    trainer = GRPOTrainer(load_tiny(), letters, args, prompts)
    trainer.train()
    *_, last, _ = trainer.state.log_history
    trainer.train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-2"))
    *_, again, _ = trainer.state.log_history
    assert last["step"] == 3
    assert again | {"step_time": 0} == last | {"step_time": 0}


def test_what_reward_functions_draw_is_drawn_again_by_a_resumed_run(load_tiny, prompts, settings, tmp_path):
    def drawn(completions, **kwargs):
        return [random.random() + np.random.rand() + float(torch.rand(())) for _ in completions]

    def rewards(name, checkpoint=None):
        args = settings(output_dir=str(tmp_path / name), max_steps=4, save_strategy="steps", save_steps=2)
        trainer = GRPOTrainer(load_tiny(), drawn, args, prompts)
        trainer.train(resume_from_checkpoint=checkpoint)
        return [row["reward"] for row in trainer.state.log_history if "loss" in row]

    whole = rewards("whole")
    assert len(set(whole)) == 4
    assert rewards("resumed", str(tmp_path / "whole" / "checkpoint-2")) == whole


@pytest.mark.parametrize(
    ("adaptive", "last", "coefficient"), [(False, math.inf, 0.3), (False, 1.5, 0.3), (True, math.inf, 0.3), (True, 1.5, 0.1)]
)
def test_the_entropy_s_coefficient_goes_on_where_both_runs_adapt_it(settings, adaptive, last, coefficient):
    control = EntropyControl(settings(entropy_coef=0.3, use_adaptive_entropy=adaptive))
    control.load_checkpoint_state({}, {"entropy_coef": 0.1, "last_world_entropy": last})
    assert control.coef == coefficient


def test_the_newest_checkpoint_is_found_and_none_is_said(tiny_folder, prompts, letters, settings):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(save_strategy="steps", save_steps=1), prompts)
    with pytest.raises(CheckpointError, match="leave it out"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    again = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=3), prompts)
    again.train(resume_from_checkpoint=True)
    assert [row["step"] for row in again.state.log_history if "loss" in row] == [1, 2, 3]
    assert same(weights(trainer), weights(trainer))


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kept", [pytest.param(None, marks=pytest.mark.slow), 1])
def test_a_finished_run_that_is_resumed_keeps_its_results(tiny_folder, prompts, letters, settings, kept):
    """By a script as people write them, started a second time."""

    def script(**changes):
        args = settings(save_strategy="steps", save_steps=1, save_total_limit=kept, **changes)
        was_there = Path(args.output_dir).exists()
        trainer = GRPOTrainer(str(tiny_folder), letters, args, prompts)
        result = trainer.train(resume_from_checkpoint=was_there or None)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        trainer.save_model()
        return trainer, result, contents(Path(args.output_dir))

    first, result, before = script()
    again, same_result, after = script()
    assert after == before
    assert same_result == result
    assert same_result.training_loss != 0
    assert same(weights(first), weights(again))
    longer, _, _ = script(max_steps=3)
    assert [row["step"] for row in longer.state.log_history if "loss" in row] == [1, 2, 3]
    assert [row["step"] for row in longer.state.log_history if "train_runtime" in row] == [3]


def test_a_run_that_was_killed_before_its_summary_has_the_loss_that_it_logged():
    rows = [{"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 9.0}, {"step": 3, "loss": 4.0}]
    assert summary_in(rows) == {"train_loss": pytest.approx((2 * 1.0 + 4.0) / 3)}
    assert math.isnan(summary_in([])["train_loss"])


@pytest.fixture
def saved(tiny_folder, prompts, letters, settings):
    """A run of two steps, each of which was saved, and what saves its last step again."""
    args = settings(save_strategy="steps", save_steps=1)
    trainer = GRPOTrainer(str(tiny_folder), letters, args, prompts)
    trainer.train()
    return Path(args.output_dir), trainer._save_checkpoint


@pytest.mark.parametrize("place", ["write_state", "save_model", "seal", "rename"])
def test_a_full_disk_is_told_and_the_checkpoint_of_this_step_stays(saved, monkeypatch, place):
    output, save_again = saved
    before = contents(output)

    def full(*_, **__):
        raise {
            "write_state": SafetensorError("I/O error: No space left on device"),
            "save_model": ModelError("the model cannot be written to x (No space left on device): check free space"),
        }.get(place, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(*((Path, "rename") if place == "rename" else (checkpoint, place)), full)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 cannot be written \(.*No space left.*free space"):
        save_again()
    assert contents(output) == before


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_the_earlier_one_goes_last(saved, monkeypatch):
    output, save_again = saved
    calls = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def noted(call, name, real):
        return lambda *a, **k: (calls.append((call, name(*a))), real(*a, **k))[1]

    monkeypatch.setattr(os, "fsync", noted("sync", lambda handle: Path(os.readlink(f"/proc/self/fd/{handle}")).name, fsync))
    monkeypatch.setattr(Path, "rename", noted("rename", lambda old, new: f"{old.name} {Path(new).name}", rename))
    monkeypatch.setattr(shutil, "rmtree", noted("remove", lambda path, **_: Path(path).name, rmtree))
    save_again()
    aside, earlier = ".checkpoint-2.partial", ".checkpoint-2.earlier.partial"
    last = calls.index(("rename", f"{aside} checkpoint-2"))
    assert calls[last - 1 :] == [
        ("rename", f"checkpoint-2 {earlier}"), ("rename", f"{aside} checkpoint-2"), ("sync", output.name), ("remove", earlier),
    ]  # fmt: skip
    names = {path.name for path in (output / "checkpoint-2").iterdir()}
    assert names | {aside} <= {name for call, name in calls[:last] if call == "sync"}


def test_a_kill_between_the_two_renames_loses_no_checkpoint(saved):
    output, _ = saved
    (output / "checkpoint-2").rename(output / ".checkpoint-2.earlier.partial")
    assert checkpoint.find(output, True) == output / "checkpoint-2"


@pytest.mark.parametrize("harm", ["short", "missing", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_name(saved, caplog, harm):
    output, _ = saved
    path = output / "checkpoint-2" / ("manifest.json" if harm == "manifest" else "optimizer.safetensors")
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-10])
    assert checkpoint.find(output, True) == output / "checkpoint-1"
    assert "checkpoint-2 is damaged" in caplog.text
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.find(output, str(output / "checkpoint-2"))


def test_files_of_others_in_a_checkpoint_and_one_without_a_manifest_are_taken(saved):
    output, _ = saved
    (output / "checkpoint-2" / "notes.txt").write_text("mine")
    assert checkpoint.find(output, True) == output / "checkpoint-2"
    (output / "checkpoint-2" / "manifest.json").unlink()
    assert checkpoint.find(output, True) == output / "checkpoint-2"


def test_files_of_a_checkpoint_have_the_rights_that_the_umask_leaves(saved):
    output, save_again = saved
    old = os.umask(0o027)
    try:
        save_again()
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in (output / "checkpoint-2").iterdir()} == {0o640}


def test_the_checkpoint_just_written_is_kept_where_an_earlier_run_came_further(tiny_folder, prompts, letters, settings):
    for steps, left in ((3, ["checkpoint-3"]), (2, ["checkpoint-2"])):
        args = settings(save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=steps)
        GRPOTrainer(str(tiny_folder), letters, args, prompts).train()
        assert sorted(path.name for path in Path(args.output_dir).iterdir()) == left


def test_a_limit_below_1_keeps_all_checkpoints_as_in_transformers(tiny_folder, prompts, letters, settings):
    args = settings(save_strategy="steps", save_steps=1, save_total_limit=-1, max_steps=3)
    GRPOTrainer(str(tiny_folder), letters, args, prompts).train()
    assert sorted(path.name for path in Path(args.output_dir).iterdir()) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_the_best_checkpoint_stays_beside_the_newest_as_in_transformers(tiny_folder, prompts, settings):
    def falling(completions, trainer_state, **kwargs):
        return [-float(trainer_state.global_step)] * len(completions)

    for steps, resume in ((3, None), (4, True)):
        args = settings(
            save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=steps, eval_strategy="steps", eval_steps=1,
            metric_for_best_model="reward", per_device_eval_batch_size=4,
        )  # fmt: skip
        trainer = GRPOTrainer(str(tiny_folder), falling, args, prompts, eval_dataset=prompts.select(range(1)))
        trainer.train(resume_from_checkpoint=resume)
        best, newest = (Path(args.output_dir) / f"checkpoint-{step}" for step in (1, steps))
        assert sorted(Path(args.output_dir).iterdir()) == [best, newest]
        assert trainer.state.best_model_checkpoint == str(best)
        assert json.loads((newest / "trainer_state.json").read_text())["best_model_checkpoint"] == str(best)


def test_processes_beside_the_first_do_not_look_for_what_it_removes(saved, monkeypatch):
    output, save_again = saved
    monkeypatch.setattr(save_again.__self__.learner, "world", SimpleNamespace(on_rank0=lambda action: None))
    monkeypatch.setattr(checkpoint, "_all", lambda output: [output / "checkpoint-0"])  # as it was a moment ago
    before = contents(output)
    save_again()
    assert contents(output) == before


@pytest.mark.parametrize("within", [False, True])
def test_a_schedule_of_milestones_goes_on_after_json(within):
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        steps = lr_scheduler.MultiStepLR(optimizer, [3, 6])
        whole = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), steps], [1]) if within else steps
        return optimizer, whole

    def rates(optimizer, schedule, count):
        found = []
        for _ in range(count):
            optimizer.step()
            schedule.step()
            found += schedule.get_last_lr()
        return found

    straight, resumed = make(), make()
    rates(*straight, 2)
    state = json.loads(json.dumps(checkpoint.ScheduleState(straight[1]).checkpoint_state()[1]))
    checkpoint.ScheduleState(resumed[1]).load_checkpoint_state({}, state)
    assert (expected := rates(*straight, 6)) == rates(*resumed, 6)
    assert len(set(expected)) > 1


def test_an_optimiser_and_schedule_of_the_script_s_own(load_tiny, prompts, letters, settings):
    """Plain AdamW over the module's parameters goes where the built-in one goes; sampling follows either."""
    built_in = GRPOTrainer(load_tiny(), letters, settings(max_steps=3, adam_epsilon=1e-3, lr_scheduler_type="constant"), prompts)
    built_in.train()
    model = load_tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    own = GRPOTrainer(model, letters, settings(max_steps=3), prompts, optimizers=(optimizer, schedule))
    own.train()
    assert own.model is model
    for name, parameter in weights(built_in).items():
        torch.testing.assert_close(weights(own)[name], parameter, atol=2e-5, rtol=1e-3)
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        GRPOTrainer(load_tiny(), letters, settings(), prompts, optimizers=(optimizer, None))


def test_a_rate_that_a_callback_sets_acts_in_its_step(tiny_folder, prompts, letters, settings):
    class Freeze(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            if state.global_step == 1:
                for group in optimizer.param_groups:
                    group["lr"] = 0.0

        def on_step_end(self, args, state, control, **kwargs):
            seen.append(weights(trainer))

    seen = []
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=3), prompts, callbacks=[Freeze])
    trainer.train()
    assert [same(one, other) for one, other in itertools.pairwise(seen)] == [True, False]


@pytest.mark.parametrize("own_schedule", [True, False])
def test_an_optimiser_of_the_script_s_own_keeps_the_rates_of_its_groups(load_tiny, prompts, letters, settings, own_schedule):
    model = load_tiny()
    head = list(model.lm_head.parameters())
    others = [p for name, p in model.named_parameters() if "lm_head" not in name]
    optimizer = torch.optim.SGD([{"params": head, "lr": 0.0}, {"params": others}], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) if own_schedule else None
    trainer = GRPOTrainer(model, letters, settings(max_steps=1), prompts, optimizers=(optimizer, schedule))
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


class Growing(torch.optim.SGD):
    """Its steps grow by a count in its group, as those of Prodigy and of schedule-free optimisers do, and by one beside each weight."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["scale"] = group.get("scale", 0.0) + 1 / 3
            for parameter in group["params"]:
                own = self.state[parameter]
                own["times"] = own.get("times", 0.0) + 0.1
                own["mean"] = own.get("mean", 0) + parameter.grad
                parameter.data -= group["lr"] * group["count"] * group["scale"] * own["times"] * own["mean"]


def test_numbers_that_an_optimiser_of_the_script_s_own_keeps_are_resumed():
    def steps(weight, optimizer, count):
        for _ in range(count):
            weight.grad = weight.detach().clone()
            optimizer.step(0.1)

    def make(start):
        weight = torch.nn.Parameter(start.clone())
        return weight, GivenOptimizer(Growing([weight], lr=0.1), [weight], OptimizerConfig())

    whole = make(torch.linspace(0, 1, 5))
    steps(*whole, 2)
    state, halfway = load(save(whole[1].state())), whole[0].detach().clone()
    steps(*whole, 2)
    resumed = make(halfway)
    resumed[1].load_state(state)
    steps(*resumed, 2)
    assert torch.equal(whole[0], resumed[0])
    group = resumed[1].adamw.param_groups[0]
    assert (group["count"], type(group["scale"]), type(resumed[1].adamw.state[resumed[0]]["times"])) == (4, float, float)


def test_what_an_optimiser_keeps_and_no_checkpoint_holds_is_said_after_the_first_step(load_tiny, prompts, letters, settings):
    class Listing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["factors"] = [torch.ones(1)]

    def train(**changes):
        model = load_tiny()
        own = (Listing(model.parameters(), lr=0.1), None)
        GRPOTrainer(model, letters, settings(max_steps=2, **changes), prompts, optimizers=own).train()

    with pytest.raises(ConfigError, match=r"the Listing in optimizers= keeps 'factors', a list, .* set save_only_model=True"):
        train(save_strategy="steps", save_steps=500)
    train()
    train(save_strategy="steps", save_steps=1, save_only_model=True)


def test_a_schedule_that_steps_by_a_metric_is_refused(load_tiny, prompts, letters, settings):
    model = load_tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="is a ReduceLROnPlateau, whose steps need a metric"):
        GRPOTrainer(model, letters, settings(), prompts, optimizers=(optimizer, lr_scheduler.ReduceLROnPlateau(optimizer)))


def test_what_a_script_has_frozen_is_not_trained(load_tiny, prompts, letters, settings):
    model = load_tiny()
    model.model.embed_tokens.requires_grad_(False)
    for optimizer in (None, torch.optim.SGD(model.parameters(), lr=0.5)):
        with pytest.raises(ConfigError, match=r"1 of the parameters .* such as model\.embed_tokens\.weight: pass optimizers="):
            GRPOTrainer(model, letters, settings(), prompts, optimizers=(optimizer, None))
    others = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    trainer = GRPOTrainer(model, letters, settings(max_steps=1), prompts, optimizers=(others, None))
    before = weights(trainer)
    trainer.train()
    changed = [name for name, p in weights(trainer).items() if not torch.equal(p, before[name])]
    assert "lm_head.weight" in changed
    assert "model.embed_tokens.weight" not in changed


def test_what_a_class_or_a_trainer_before_has_frozen_is_no_choice_of_the_script(load_tiny, prompts, letters, settings):
    class Scaled(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    check_frozen(GRPOTrainer(load_tiny(), letters, settings(), prompts).model, None)
    model = Scaled(load_tiny().config)
    check_frozen(model, None)
    model.lm_head.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"1 of the parameters .* such as lm_head\.weight"):
        check_frozen(model, None)


def test_a_model_on_several_devices_is_refused(load_tiny, prompts, letters, settings):
    model = load_tiny()
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ModelError, match="lies on several devices"):
        GRPOTrainer(model, letters, settings(), prompts)


def test_an_adapter_learns_alone_and_is_saved_alone(tiny_folder, load_tiny, prompts, letters, settings, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(beta=0.1, learning_rate=1e-2), prompts, peft_config=config)
    trainer.train()
    base = dict(load_tiny().named_parameters())
    for name, parameter in trainer.model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert "lora_" in name or torch.equal(parameter, base[plain])
    assert trainer.state.log_history[1]["kl"] > 0
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(load_tiny(), tmp_path / "adapter", is_trainable=True)
    more = GRPOTrainer(again, letters, settings(beta=0.1, learning_rate=1e-2, disable_dropout=True), prompts)
    more.train()
    assert more.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6), "an adapter that comes trained is its own reference"
    (tmp_path / "far.py").write_text(
        "from groupwise.algorithm import LossOutputs\n"
        "from groupwise.algorithm.registry import needs\n"
        "from groupwise.metrics import Max\n"
        "@needs('reference')\n"
        "def loss(inputs):\n"
        "    far = float((inputs.logprobs_T.detach() - inputs.reference_logprobs_T).abs().max())\n"
        "    return LossOutputs(-inputs.advantages_T * inputs.logprobs_T, metrics={'far': Max(far)})\n"
    )
    again = peft.PeftModel.from_pretrained(load_tiny(), tmp_path / "adapter", is_trainable=True)
    own = settings(loss_type=f"{tmp_path}/far.py:loss", learning_rate=1e-2, disable_dropout=True)
    more = GRPOTrainer(again, letters, own, prompts)
    more.train()
    assert more.state.log_history[0]["loss/far"] == pytest.approx(0, abs=1e-5), (
        "also of a loss that reads the reference by itself"
    )


def test_an_adapter_is_not_saved_beside_the_weights_of_a_whole_model(tiny_folder, prompts, letters, settings, tmp_path, caplog):
    """transformers would put it on that model, whatever its base is."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(), prompts, peft_config=config)
    whole = Path(shutil.copytree(tiny_folder, tmp_path / "whole"))
    before = contents(whole)
    trainer.save_model(str(whole))
    assert f"{whole} holds a whole model: the adapter is written to {whole}/adapter" in caplog.text
    assert (whole / "adapter" / "adapter_model.safetensors").is_file()
    shutil.rmtree(whole / "adapter")
    assert contents(whole) == before


def test_an_adapter_that_add_adapter_put_into_the_model_is_refused(load_tiny, prompts, letters, settings):
    peft = pytest.importorskip("peft")
    model = load_tiny()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ModelError, match="an adapter that transformers put into it"):
        GRPOTrainer(model, letters, settings(), prompts)


@pytest.fixture
def trained_adapter(load_tiny):
    """A model with an adapter called "policy" that has been trained."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(load_tiny(), config, adapter_name="policy")


def test_each_trainer_of_a_trained_adapter_has_it_as_its_reference_as_it_is_then(trained_adapter, prompts, letters, settings):
    for _ in range(2):  # as when a cell of a notebook is run again
        trainer = GRPOTrainer(trained_adapter, letters, settings(beta=0.1, learning_rate=1e-2), prompts)
        trainer.train()
        first, second = (row["kl"] for row in trainer.state.log_history if "loss" in row)
        assert abs(first) < 1e-6 < second


def test_an_adapter_of_another_kind_that_comes_trained_is_its_own_reference(load_tiny, prompts, letters, settings):
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(load_tiny(), config)
    trainer = GRPOTrainer(model, letters, settings(beta=0.1, learning_rate=1e-2), prompts)
    trainer.train()
    first, second = (row["kl"] for row in trainer.state.log_history if "loss" in row)
    assert abs(first) < 1e-6 < second


def test_an_adapter_of_the_script_s_own_is_not_overwritten_by_the_reference(trained_adapter, prompts, letters, settings):
    trained_adapter.add_adapter("ref", trained_adapter.peft_config["policy"])
    kept = {name: p.detach().clone() for name, p in trained_adapter.named_parameters()}
    for active in ("policy", "ref"):
        trained_adapter.set_adapter(active)
        with pytest.raises(ModelError, match="an adapter of its own named 'ref'"):
            GRPOTrainer(trained_adapter, letters, settings(beta=0.1), prompts)
    assert same(kept, {name: p.detach() for name, p in trained_adapter.named_parameters()})


@pytest.mark.parametrize("given", ["name", "object", "adapted"])
def test_a_reference_that_follows_is_refused_beside_an_adapter(trained_adapter, load_tiny, prompts, letters, settings, given):
    peft = pytest.importorskip("peft")
    more = {} if given == "adapted" else {"peft_config": peft.LoraConfig(r=4, task_type="CAUSAL_LM")}
    model = {"name": "no-such-model", "object": load_tiny(), "adapted": trained_adapter}[given]
    with pytest.raises(ConfigError, match="leave sync_ref_model out, or train all weights"):
        GRPOTrainer(model, letters, settings(beta=0.1, sync_ref_model=True), prompts, **more)


def test_an_adapter_that_cannot_learn_is_told(trained_adapter, prompts, letters, settings):
    trained_adapter.requires_grad_(False)  # as PeftModel.from_pretrained loads it
    with pytest.raises(ModelError, match="load it with is_trainable=True"):
        GRPOTrainer(trained_adapter, letters, settings(), prompts)


def test_a_run_of_an_adapter_with_a_name_of_its_own_is_resumed(load_tiny, prompts, letters, settings, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(load_tiny(), config).save_pretrained(tmp_path / "adapter")

    def make(name):
        model = peft.PeftModel.from_pretrained(load_tiny(), tmp_path / "adapter", adapter_name="policy", is_trainable=True)
        args = settings(output_dir=str(tmp_path / name), save_strategy="steps", save_steps=1, learning_rate=1e-2)
        return GRPOTrainer(model, letters, args, prompts)

    whole, resumed = make("whole"), make("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert same(weights(whole), weights(resumed))


def test_a_run_of_a_model_whose_files_have_other_names_than_its_weights_is_resumed(prompts, letters, settings, tmp_path):
    folder = write_tiny_mixture(tmp_path / "model")

    def make(name):
        saving = {"output_dir": str(tmp_path / name), "save_strategy": "steps", "save_steps": 1}
        args = settings(learning_rate=1e-2, router_aux_loss_coef=0.0, **saving)
        return GRPOTrainer(str(folder), letters, args, prompts)

    whole, resumed = make("whole"), make("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert same(weights(whole), weights(resumed))


@pytest.mark.parametrize("kind", ["4bit", pytest.param("8bit", marks=pytest.mark.slow)])
def test_a_quantised_model_takes_an_adapter_and_nothing_else(tiny_folder, prompts, letters, settings, tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def load():
        how = BitsAndBytesConfig(load_in_4bit=kind == "4bit", load_in_8bit=kind == "8bit", bnb_4bit_quant_type="nf4")
        return AutoModelForCausalLM.from_pretrained(
            tiny_folder, dtype=torch.float32, quantization_config=how, device_map={"": "cpu"}
        )

    with pytest.raises(ModelError, match="pass peft_config"):
        GRPOTrainer(load(), letters, settings(), prompts)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(load(), letters, settings(beta=0.1, learning_rate=1e-2), prompts, peft_config=config)
    trainer.train()
    assert trainer.state.log_history[1]["kl"] > 1e-4, "it learns"
    trainer.save_model(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter", is_trainable=True)
    more = GRPOTrainer(again, letters, settings(beta=0.1, learning_rate=1e-2), prompts)
    more.train()
    assert more.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6), "an adapter that comes trained is its own reference"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_quantised_base_that_peft_widened_computes_in_the_dtype_it_was_loaded_in(
    tiny_folder, prompts, letters, settings, caplog, monkeypatch, dtype, early
):
    """TRL computes it in bf16 by autocast, which is not used here."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    monkeypatch.setattr("groupwise.models.devices.computes_bf16", lambda: True)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=dtype, quantization_config=how, device_map={"": "cpu"})
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert model.dtype == torch.float32
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    given = {"model": peft.get_peft_model(model, config)} if early else {"model": model, "peft_config": config}
    trainer = GRPOTrainer(reward_funcs=letters, args=settings(bf16=True, max_steps=1), train_dataset=prompts, **given)
    dtypes = {n: p.dtype for n, p in trainer.model.named_parameters() if p.is_floating_point()}
    assert {d for n, d in dtypes.items() if "lora_" not in n} == {dtype}
    assert {d for n, d in dtypes.items() if "lora_" in n} == {torch.float32}
    told = "weights outside of the quantised layers are float32" in caplog.text
    assert told == (dtype == torch.float32)
    trainer.train()


def test_completions_are_written_where_that_is_asked_for(tiny_folder, chats, letters, settings, capsys):
    from pyarrow import parquet

    args = settings(log_completions=True, num_completions_to_print=1, max_steps=1)
    GRPOTrainer(str(tiny_folder), letters, args, chats).train()
    rows = parquet.read_table(Path(args.output_dir) / "completions" / "completions_00001.parquet").to_pylist()
    assert len(rows) == 8
    assert set(rows[0]) == {"step", "prompt", "completion", "letters", "advantage"}
    assert "Step 1" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "count"), [(None, 8), (9, 8), (3, 3), (0, 0), (-1, 0)])
def test_as_many_completions_are_printed_as_in_trl_drawn_at_random(settings, capsys, limit, count):
    log, printed = CompletionLog(settings(log_completions=True, num_completions_to_print=limit), True), []
    log.columns = {"prompt": [f"row {i}" for i in range(8)]}
    for step in range(3):
        log.write(step)
        out = capsys.readouterr().out
        printed.append(tuple(i for i in range(8) if f"row {i}" in out))
    assert [len(rows) for rows in printed] == [count] * 3
    assert len(set(printed)) == (3 if count == 3 else 1)


def test_completions_go_where_output_dir_says_when_they_are_written(tiny_folder, prompts, letters, settings, tmp_path):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(log_completions=True, max_steps=1), prompts)
    for name in ("one", "two"):
        trainer.args.output_dir = str(tmp_path / name)
        trainer.train()
    assert all((tmp_path / name / "completions" / "completions_00001.parquet").is_file() for name in ("one", "two"))


def test_two_functions_of_one_name_are_logged_by_their_mean(tiny_folder, prompts, letters, settings):
    from pyarrow import parquet

    def length(completions, times, **kwargs):
        return [times * len(text) for text in completions]

    args = settings(max_steps=1, log_completions=True)
    trainer = GRPOTrainer(str(tiny_folder), [partial(length, times=1), partial(length, times=3)], args, prompts)
    trainer.train()
    row, (name, _) = trainer.state.log_history[0], trainer.reward_func_names
    assert row["reward"] > 0
    assert row[f"rewards/{name}/mean"] == pytest.approx(row["reward"] / 2)
    table = parquet.read_table(Path(args.output_dir) / "completions" / "completions_00001.parquet")
    assert {f"{name}.0", f"{name}.1"} <= set(table.column_names)


def test_a_column_goes_before_what_a_partial_has_set(tiny_folder, prompts, settings):
    """TRL calls functions with every column."""
    seen = []

    def judge(completions, answer, **kwargs):
        seen.extend(answer)
        return [0.0] * len(completions)

    GRPOTrainer(str(tiny_folder), partial(judge, answer="bound"), settings(max_steps=1), prompts).train()
    assert seen
    assert set(seen) <= set(prompts["answer"])


def test_completions_are_written_beside_lists_of_words_and_prompts_with_calls(tiny_folder, chats, letters, settings, capsys):
    def logs(completions, log_extra, **kwargs):
        log_extra("words", [["a", "b"] for _ in completions])
        return [0.0] * len(completions)

    log = CompletionLog(settings(log_completions=True), is_first=True)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    prompt = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    log.keep(SimpleNamespace(sampled=[0], prompts=[prompt], completions=["2"], scores=[], advantages=[0.5]), [], {})
    log.write(1)
    assert '"name": "add"' in capsys.readouterr().out.replace("\n", "")
    GRPOTrainer(str(tiny_folder), [letters, logs], settings(log_completions=True, max_steps=1), chats).train()
    assert "['a', 'b']" in capsys.readouterr().out


def test_logged_completions_are_training_s_and_columns_of_two_functions_are_the_last_one_s(
    tiny_folder, prompts, letters, settings, caplog
):
    from pyarrow import parquet

    def one(completions, log_extra, **kwargs):
        log_extra("note", ["one"] * len(completions))
        log_extra("short", ["one"])
        return letters(completions)

    def two(completions, log_extra, **kwargs):
        log_extra("note", ["two"] * len(completions))
        return letters(completions)

    args = settings(log_completions=True, max_steps=1, eval_strategy="steps", per_device_eval_batch_size=4)
    GRPOTrainer(str(tiny_folder), [one, two], args, prompts, Dataset.from_dict({"prompt": ["evaluation"]})).train()
    rows = parquet.read_table(Path(args.output_dir) / "completions" / "completions_00001.parquet").to_pylist()
    assert len(rows) == 8
    assert "evaluation" not in {row["prompt"] for row in rows}
    assert [row["note"] for row in rows] == ["two"] * 8
    assert "short" not in rows[0]
    assert caplog.text.count("'short', ...) was given 1 values for 8 completions") == 1


def test_the_share_of_rewards_that_are_all_the_same_is_counted_as_in_trl(tiny_folder, prompts, settings):
    def by_prompt(prompts, **kwargs):
        return [float(len(prompt)) for prompt in prompts]

    rows = Dataset.from_dict({"prompt": ["a", "bb"]})
    for way, expected in (({"scale_rewards": "batch"}, 0.0), ({"multi_objective_aggregation": "normalize_then_sum"}, 1.0)):
        trainer = GRPOTrainer(str(tiny_folder), by_prompt, settings(max_steps=1, num_generations_eval=1, **way), rows)
        trainer.train()
        assert trainer.state.log_history[0]["frac_reward_zero_std"] == expected
    trainer = GRPOTrainer(str(tiny_folder), by_prompt, settings(num_generations_eval=1), prompts)
    assert trainer.evaluate(rows)["eval_frac_reward_zero_std"] == 1.0
    rows = Dataset.from_dict({"prompt": ["a", "bb", "cccc"]})
    trainer = GRPOTrainer(str(tiny_folder), by_prompt, settings(num_generations_eval=1, per_device_eval_batch_size=2), prompts)
    assert trainer.evaluate(rows)["eval_reward"] == pytest.approx(7 / 3), "a last batch of one prompt counts half"


def test_an_argument_that_the_chat_template_does_not_ask_for_is_told(tiny_folder, chats, letters, settings, caplog):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    told = "chat_template_kwargs has thinking, which the model's chat template does not ask for"
    for arguments, times in (({"enable_thinking": False, "padding": False}, 0), ({"thinking": False}, 1)):
        GRPOTrainer(str(tiny_folder), letters, settings(chat_template_kwargs=arguments), chats, chats, processing_class=tokenizer)
        assert caplog.text.count("does not ask for") == caplog.text.count(told) == times


def test_a_turn_of_the_assistant_at_the_end_of_prompts_is_told_once(tiny_folder, chats, letters, settings, caplog):
    prefilled = chats.map(lambda row: {"prompt": [*row["prompt"], {"role": "assistant", "content": "It is"}]})
    told = "the training data set has conversations that end with the assistant's turn"
    for rows, times in ((chats, 0), (prefilled, 1)):
        GRPOTrainer(str(tiny_folder), letters, settings(), rows).train()
        assert caplog.text.count("end with the assistant's turn") == caplog.text.count(told) == times


@pytest.mark.parametrize("single", ["$A <|im_end|>", "<|im_start|> $A"])
def test_an_end_token_behind_plain_prompts_and_a_second_start_are_told_once(tiny_folder, letters, settings, caplog, single):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    names = ("<|im_start|>", "<|im_end|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names if name in single]
    )
    rows = Dataset.from_dict({"prompt": [f"<|im_start|>{a} + {a} =" for a in range(12)]})
    GRPOTrainer(str(tiny_folder), letters, settings(), rows, processing_class=tokenizer).train()
    assert caplog.text.count("an end token behind plain prompts of the training data set, or a second start token before") == 1


def test_an_epoch_ends_at_a_whole_number(tiny_folder, prompts, letters, settings):
    """Twelve micro-steps, five to an optimiser step: TRL counts micro-steps."""
    more = {"per_device_train_batch_size": 4, "steps_per_generation": 3, "gradient_accumulation_steps": 5, "max_steps": 4}
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(**more), prompts)
    trainer.train()
    epochs = [row["epoch"] for row in trainer.state.log_history if "loss" in row]
    assert epochs == pytest.approx([5 / 12, 10 / 12, 1.0, 1 + 5 / 12])


def test_epochs_that_a_callback_ends_are_not_made_up_for(tiny_folder, prompts, letters, settings):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 2 == 0

    args = settings(max_steps=-1, num_train_epochs=2)
    trainer = GRPOTrainer(str(tiny_folder), letters, args, prompts, callbacks=[Stop])
    trainer.train()
    assert [row["epoch"] for row in trainer.state.log_history] == pytest.approx([1 / 6, 2 / 6, 1 + 1 / 6, 1 + 2 / 6, 1 + 2 / 6])


@pytest.mark.slow
def test_a_real_tokenizer(qwen_tokenizer, chats, letters, settings):
    import copy

    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(qwen_tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=151645,
    )  # fmt: skip
    trainer = GRPOTrainer(Qwen2ForCausalLM(config), letters, settings(), chats, processing_class=copy.deepcopy(qwen_tokenizer))
    trainer.train()
    prompt = trainer.train_prompts[3]
    assert qwen_tokenizer.decode(prompt.token_ids).endswith("3 + 3?<|im_end|>\n<|im_start|>assistant\n")
    assert trainer.state.log_history[0]["reward_std"] > 0


def broken(completions, **kwargs):
    raise ValueError("no")


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"tools": [print]}, ConfigError, "does not support tool calling"),
        ({"rollout_func": print, "tools": [print]}, ConfigError, "make it an environment_factory"),
        ({"train_dataset": None}, ConfigError, "train_dataset is missing"),
        ({"train_dataset": Dataset.from_dict({"question": ["?"]})}, DataError, "rename the column"),
        ({"train_dataset": Dataset.from_dict({"prompt": ["?"]})}, DataError, "one generation takes 2"),
        ({"train_dataset": DatasetDict(train=Dataset.from_dict({"prompt": ["?"] * 9}))}, DataError, "dataset\\['train'\\]"),
        ({"train_dataset": Dataset.from_dict({"prompt": ["?"] * 9, "image": ["x"] * 9})}, DataError, "text only"),
        ({"train_dataset": Dataset.from_dict({"prompt": ["?" * 500] * 9})}, DataError, "filter such rows"),
        (
            {"train_dataset": Dataset.from_dict({"prompt": ["?"] * 8 + [None]})},
            DataError,
            "row 8 of the training data set has no 'prompt'",
        ),
        ({"reward_funcs": None}, RewardError, "pass a function"),
        ({"reward_funcs": lambda completions, **kwargs: [1.0]}, RewardError, "1 scores for 8 completions"),
        ({"reward_funcs": lambda completions, **kwargs: ["x"] * 8}, RewardError, "a number or None"),
        ({"reward_funcs": broken}, RewardError, "raised ValueError: no"),
        ({"model": 3}, ModelError, "pass a name"),
        ({"peft_config": {"r": 4}}, ModelError, "peft.LoraConfig"),
        ({"args": object()}, ConfigError, "import GRPOConfig from groupwise.trl"),
        ({"processing_class": 3}, ConfigError, "pass a tokenizer"),
    ],
)
def test_mistakes_are_one_sentence(tiny_folder, prompts, letters, settings, changes, error, sentence):
    given = {"model": str(tiny_folder), "reward_funcs": letters, "args": settings(), "train_dataset": prompts, **changes}
    with pytest.raises(error, match=sentence):
        GRPOTrainer(**given).train()


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"prompt": "a"}, {"prompt": " "}, {"prompt": ""}], "row 2 of the training data set has 0 tokens"),
        ([{"prompt": [{"role": "user", "content": text}]} for text in ("a", "b", None)], "row 2 .* that is not text"),
    ],
)
def test_a_late_row_that_is_blank_is_said_before_training(tiny_folder, letters, settings, rows, sentence):
    with pytest.raises(DataError, match=sentence):
        GRPOTrainer(str(tiny_folder), letters, settings(), Dataset.from_list(rows))


@pytest.mark.parametrize(
    ("evaluation", "wanted", "error", "sentence"),
    [
        (Dataset.from_dict({"question": ["?"]}), None, DataError, "the eval data set .* rename the column"),
        ({"a": Dataset.from_dict({"prompt": ["ok", "?" * 500]})}, None, DataError, "row 1 of the eval_a data set has 5"),
        (
            {"a": Dataset.from_dict({"prompt": ["ok"]})},
            "reward",
            ConfigError,
            "begin with eval_a_: name one of them, such as 'eval_a_rew",
        ),
    ],
)
def test_an_unfit_evaluation_is_said_before_training(
    tiny_folder, prompts, letters, settings, evaluation, wanted, error, sentence
):
    args = settings(eval_strategy="steps", metric_for_best_model=wanted)
    with pytest.raises(error, match=sentence):
        GRPOTrainer(str(tiny_folder), letters, args, prompts, evaluation)
    GRPOTrainer(str(tiny_folder), letters, settings(), prompts, evaluation)  # which is not evaluated by itself


def test_a_column_that_a_reward_function_lacks_is_said_before_anything_is_sampled(tiny_folder, prompts, settings):
    def needs(completions, answer, trainer_state, log_extra, log_metric):
        raise AssertionError("it was called")

    def make(**changes):
        args = settings(eval_strategy="steps" if "eval_dataset" in changes else "no")
        return GRPOTrainer(str(tiny_folder), needs, args, **{"train_dataset": prompts, **changes})

    bare = prompts.remove_columns("answer")
    for attempt in (
        lambda: make(train_dataset=bare),
        lambda: make(eval_dataset=bare),
        lambda: make().evaluate(bare),
    ):
        with pytest.raises(RewardError, match="'needs' needs 'answer', but the data has no such column"):
            attempt()


def test_what_a_set_transform_gives_is_asked_for_each_time(tiny_folder, letters, settings):
    asked, count = [], itertools.count()

    def noted(prompts, completions, **kwargs):
        asked.extend(prompts[::4])
        return letters(completions)

    data = Dataset.from_dict({"prompt": ["a", "b"]})
    data.set_transform(lambda rows: {"prompt": [f"{text} {next(count)}" for text in rows["prompt"]]})
    GRPOTrainer(str(tiny_folder), noted, settings(), data).train()
    assert len(set(asked)) == 4


def test_a_set_transform_may_make_the_prompts(tiny_folder, letters, settings):
    data = Dataset.from_dict({"question": ["a", "b"]})
    data.set_transform(lambda rows: {"prompt": [f"{text}?" for text in rows["question"]]})
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=1), data)
    trainer.train()
    assert trainer.train_prompts[1].text == "b?"


def test_a_prompt_may_hold_an_earlier_call(tiny_folder, letters, settings):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    calls = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content or '' }}" + calls + "{% endfor %}"
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    asked, answered = {"role": "user", "content": "?"}, {"role": "tool", "content": "4"}
    chat = [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, answered]
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=1), [{"prompt": chat}] * 2, processing_class=tokenizer)
    trainer.train()
    assert tokenizer.decode(trainer.train_prompts[0].token_ids) == "?<look>4"


def test_what_is_not_there_says_so(tiny_folder, prompts, letters, settings, monkeypatch):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(), prompts)
    with pytest.raises(ConfigError, match="hf upload"):
        trainer.push_to_hub()
    with pytest.raises(AttributeError, match=r"dir\(trainer\)"):
        trainer.predict(prompts)
    with pytest.raises(ConfigError, match="compute_loss"):
        type("Mine", (GRPOTrainer,), {"compute_loss": lambda self: 0})
    with pytest.raises(ConfigError, match="pass one"):
        trainer.evaluate()


def test_without_arguments_the_folder_has_the_model_s_name(tiny_folder, prompts, letters, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "wide"))  # whose context has room for TRL's 512 tokens of completion
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}), encoding="utf-8")
    trainer = GRPOTrainer(str(folder), letters, train_dataset=prompts)
    assert isinstance(trainer.args, GRPOConfig)
    assert trainer.args.output_dir == "wide-GRPO"


def test_what_reference_scripts_read_of_the_trainer(tiny_folder, prompts, letters, settings, tmp_path, capsys):
    """The end of TRL's own script: it prints by the accelerator, then saves."""
    pytest.importorskip("accelerate")
    args = settings(beta=0.1, hub_model_id="me/mine", dataloader_num_workers=2, shuffle_dataset=False)
    trainer = GRPOTrainer(str(tiny_folder), [letters], args, prompts, eval_dataset=prompts)
    trainer.accelerator.print("done")
    assert capsys.readouterr().out == "done\n"
    assert trainer.accelerator.is_main_process
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.model
    assert (trainer.is_fsdp_enabled, trainer.aux_loss_enabled, trainer.hub_model_id, args.device.type) == (
        False,
        False,
        "me/mine",
        "cpu",
    )
    assert (trainer.reward_funcs, trainer.reward_processing_classes, trainer.reward_weights.tolist()) == (
        (letters,),
        (None,),
        [1.0],
    )
    assert trainer.beta == 0.1
    assert (trainer.epsilon_high, trainer.num_generations_eval, trainer.chat_template_kwargs) == (0.2, 4, {})
    assert trainer.max_tool_calling_iterations == sys.maxsize
    assert trainer.model_wrapped is trainer.model
    reference = dict(trainer.ref_model.named_parameters())
    assert same(weights(trainer), {name: p.detach() for name, p in reference.items()})
    loader = trainer.get_train_dataloader()
    loader.num_workers = 0
    first = next(iter(loader))
    assert [row["answer"] for row in first] == [0] * 4 + [2] * 4
    assert len(trainer.get_eval_dataloader().sampler) == 48
    with pytest.raises(ConfigError, match="before the trainer is made"):
        trainer.temperature = 0.5


def test_what_is_set_after_the_trainer_was_made_counts_or_is_an_error(tiny_folder, prompts, letters, settings):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(lr_scheduler_type="constant"), prompts)
    trainer.args.max_steps, trainer.args.learning_rate = 1, 0.0
    before = weights(trainer)
    trainer.train()
    assert [row["learning_rate"] for row in trainer.state.log_history if "loss" in row] == [0.0]
    assert same(before, weights(trainer)), "a rate of 0 trains nothing"
    trainer.args.beta = 0.5
    with pytest.raises(ConfigError, match=r"beta was changed from 0.0 to 0.5"):
        trainer.train()
    trainer.args.fp16, trainer.args.bf16 = True, None  # from which bf16=False follows
    trainer.args.beta = 0.0
    with pytest.raises(ConfigError, match=r"fp16 was changed from False to True"):
        trainer.train()


def test_an_evaluation_that_is_set_late_is_checked_before_training(tiny_folder, prompts, letters, settings):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(), prompts)
    trainer.args.eval_strategy = "steps"
    for dataset, error, sentence in (
        (None, ConfigError, "there is no eval_dataset"),
        (Dataset.from_dict({"question": ["?"]}), DataError, "the eval data set .* rename the column"),
    ):
        trainer.eval_dataset = dataset
        with pytest.raises(error, match=sentence):
            trainer.train()
        assert trainer.state.global_step == 0
    trainer.eval_dataset = prompts.select(range(2))
    trainer.args.eval_steps = 1
    trainer.train()
    assert "eval_reward" in trainer.state.log_history[1]


def test_no_epoch_at_all_is_a_run_of_no_steps(tiny_folder, prompts, letters, settings):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=-1, num_train_epochs=0), prompts)
    assert trainer.train().global_step == 0


def test_another_train_dataset_is_trained_on(tiny_folder, prompts, letters, settings):
    asked = []

    def noted(prompts, completions, **kwargs):
        asked.append(set(prompts))
        return letters(completions)

    trainer = GRPOTrainer(str(tiny_folder), noted, settings(max_steps=1), prompts)
    trainer.train()
    trainer.train_dataset = Dataset.from_dict({"prompt": ["second stage"] * 4})
    trainer.args.max_steps = 2  # goes on
    trainer.train()
    assert asked[1] == {"second stage"}
    assert trainer.state.epoch == 1, "4 prompts are two steps"
    trainer.train_dataset = prompts.select(range(1))
    with pytest.raises(DataError, match="one generation takes 2"):
        trainer.train()


def test_what_the_trainer_is_made_of_is_changed_with_effect_or_not_at_all(tiny_folder, prompts, letters, settings):
    def one(completions, **kwargs):
        return [1.0] * len(completions)

    trainer = GRPOTrainer(str(tiny_folder), [letters, one], settings(max_steps=1, reward_weights=[1.0, 0.0]), prompts)
    trainer.reward_weights[1] = 5.0
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["reward"] == pytest.approx(row["rewards/letters/mean"] + 5)
    assert isinstance(trainer.reward_funcs, tuple)
    trainer.optimizer, trainer.lr_scheduler = trainer.optimizer, None  # nothing is asked for
    other = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    with pytest.raises(ConfigError, match=r"trainer.optimizer cannot be set to a SGD .* optimizers=\(optimizer, scheduler\)"):
        trainer.optimizer = other
    with pytest.raises(ConfigError, match=r"trainer.lr_scheduler cannot be set"):
        trainer.lr_scheduler = lr_scheduler.ConstantLR(other)
    trainer.model = trainer.model
    for name, value in (("model", torch.nn.Linear(1, 1)), ("processing_class", None)):
        with pytest.raises(ConfigError, match=f"trainer.{name} cannot be set after the trainer was made"):
            setattr(trainer, name, value)
    with pytest.raises(ConfigError, match=r"trainer.compute_loss cannot be set, since groupwise.trl does not call it"):
        trainer.compute_loss = lambda *_: 0


def test_a_second_call_of_train_goes_on_or_begins_a_run_of_its_own(tiny_folder, prompts, letters, settings):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=2, learning_rate=1e-3), prompts)

    def rates():
        return [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]

    trainer.train()
    assert rates() == pytest.approx([1e-3, 5e-4])
    trainer.args.max_steps = 4
    for master in trainer.learner.optimizer.masters:  # as a cell leaves them that was stopped in a backward pass
        master.grad = torch.full_like(master, 1e6)
    trainer.train()
    assert trainer.state.global_step == 4
    assert rates() == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4]), "a schedule of four steps, from its third on"
    assert all(row["grad_norm"] < 1e5 for row in trainer.state.log_history if "loss" in row)
    before = weights(trainer)
    assert trainer.train().training_loss != 0
    assert trainer.state.global_step == 4
    assert rates() == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert not same(before, weights(trainer))


def test_the_steps_after_the_last_log_are_in_the_summary(tiny_folder, prompts, letters, settings):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=3, logging_steps=2), prompts)
    result = trainer.train()
    logged, summary = trainer.state.log_history
    assert logged["step"] == 2
    assert {"reward", "completions/mean_length", "train_loss"} <= set(summary)
    assert result.metrics["reward"] == summary["reward"] != logged["reward"]


def test_a_stream_is_read_as_far_as_it_is_needed_and_begins_again(tiny_folder, prompts, letters, settings):
    rows = []

    def read():
        for row in prompts:
            rows.append(row["answer"])
            yield row

    from datasets import IterableDataset

    stream = IterableDataset.from_generator(read)
    with pytest.raises(DataError, match="set max_steps"):
        GRPOTrainer(str(tiny_folder), letters, settings(max_steps=-1), stream)
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(shuffle_dataset=False, dataloader_num_workers=3), stream)
    rows.clear()
    trainer.train()
    assert rows[:4] == [0, 2, 4, 6]
    assert len(rows) < 12
    rows.clear()
    trainer.train()
    assert rows[:4] == [0, 2, 4, 6], "training again begins again"
    again = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=7), prompts.to_iterable_dataset(), eval_dataset=stream)
    again.train()
    assert again.state.global_step == 7, "14 prompts of 12"
    assert again.evaluate()["eval_reward"] > 0


def test_a_stream_goes_on_where_max_steps_is_raised(tiny_folder, prompts, letters, settings):
    asked = []

    def noted(prompts, completions, **kwargs):
        asked.extend(prompts[::4])
        return letters(completions)

    trainer = GRPOTrainer(str(tiny_folder), noted, settings(max_steps=1, shuffle_dataset=False), prompts.to_iterable_dataset())
    for steps in (2, 3):  # before the first call, and before a second
        trainer.args.max_steps = steps
        trainer.train()
    assert asked == prompts["prompt"][:6]
    assert trainer.state.epoch == 1
    trainer.args.max_steps = -1
    with pytest.raises(DataError, match="set max_steps"):
        trainer.train()


def test_settings_of_sampling_shape_what_is_sampled(tiny_folder, prompts, settings, caplog):
    """``min_p`` near 1 leaves the likeliest token; a huge penalty leaves none that has occurred, the prompt's included."""

    def reward(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def sampled(**changes):
        trainer = GRPOTrainer(str(tiny_folder), reward, settings(max_steps=1, max_completion_length=12, **changes), prompts)
        trainer.train()
        return trainer._generation[1]

    greedy = sampled(min_p=0.999).groups
    assert all(len({c.token_ids for c in group.completions}) == 1 for group in greedy)
    assert any("another distribution" in record.getMessage() for record in caplog.records)
    for group in sampled(repetition_penalty=1e6).groups:
        for completion in group.completions:
            assert len(set(completion.token_ids) | set(group.prompt.token_ids)) == len(completion.token_ids) + len(
                set(group.prompt.token_ids)
            )


def test_restricted_samples_are_weighted_as_trl_weighs_vllm_s(tiny_folder, prompts, letters, settings, caplog):
    def train(**changes):
        args = settings(use_vllm=True, max_steps=2, num_iterations=2, **changes)
        trainer = GRPOTrainer(str(tiny_folder), letters, args, prompts)
        trainer.train()
        (part,) = trainer._generation[1].parts.values()
        return part.window.batch

    assert train().correction_T is None, "what samples is what is trained"
    assert train(top_p=0.8, vllm_importance_sampling_correction=False).correction_T is None
    assert "near 0 for long completions" not in caplog.text
    batch = train(top_p=0.8)
    assert "near 0 for long completions" in caplog.text
    apart_T = batch.old_logprobs_T - batch.sampler_logprobs_T
    assert apart_T.max() < 0, "log-probabilities of what is left of the distribution, as vLLM's processed ones"
    whole_N = torch.zeros(len(batch)).index_add_(0, batch.sequence_T, apart_T).exp()
    torch.testing.assert_close(batch.correction_T, whole_N[batch.sequence_T])
    caplog.clear()
    batch = train(top_k=20, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.0)
    assert "ratio of the two (vllm_importance_sampling_mode='token_truncate')" in caplog.text
    assert "near 0" not in caplog.text
    torch.testing.assert_close(batch.correction_T, (batch.old_logprobs_T - batch.sampler_logprobs_T).exp().clamp(max=1.0))
    batch = train(top_k=20, vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_min=0.5)
    ratio_T = (batch.old_logprobs_T - batch.sampler_logprobs_T).exp()
    torch.testing.assert_close(batch.correction_T, torch.where(ratio_T < 0.5, 0, ratio_T))
    assert 0 < (batch.correction_T == 0).sum() < len(ratio_T)


def test_weights_of_8_bits_sample_for_training_alone_and_are_weighted_for_it(
    tiny_folder, prompts, letters, settings, monkeypatch, caplog
):
    if why := decode.why_not_in_8_bits(torch.device("cpu"), torch.float32):
        pytest.skip(why)
    sampled, serve = [], BuiltinEngine.serve

    def watched(engine, request, *others):
        sampled.append((request.scope.partition("/")[0], request.settings.in_8_bits))
        return serve(engine, request, *others)

    monkeypatch.setattr(BuiltinEngine, "serve", watched)

    def train(**changes):
        args = settings(rollout_quantization="8bit", num_iterations=2, **changes)
        trainer = GRPOTrainer(str(tiny_folder), letters, args, prompts, eval_dataset=prompts.select(range(2)))
        trainer.train()
        (part,) = trainer._generation[1].parts.values()
        return trainer, part.window.batch

    caplog.clear()
    trainer, batch = train(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.5)
    assert "rollout_quantization" not in caplog.text
    apart_T = batch.old_logprobs_T - batch.sampler_logprobs_T
    assert 1e-5 < apart_T.abs().mean() < 0.1, "rounded weights are others, and not far from these"
    torch.testing.assert_close(batch.correction_T, apart_T.exp().clamp(max=1.5))
    assert train(vllm_importance_sampling_correction=False)[1].correction_T is None
    assert "rollout_quantization" not in caplog.text
    batch = train()[1]
    whole_N = torch.zeros(len(batch)).index_add_(0, batch.sequence_T, batch.old_logprobs_T - batch.sampler_logprobs_T).exp()
    torch.testing.assert_close(batch.correction_T, whole_N[batch.sequence_T], msg="TRL's default, by whole completions")
    assert "'token_truncate' weighs each token by itself" in caplog.text
    assert set(sampled) == {("rollout", True)}
    trainer.evaluate()
    assert sampled[-1] == ("eval", False)


def test_weights_of_8_bits_are_refused_before_a_model_is_read(tiny_folder, prompts, letters, settings, load_tiny, monkeypatch):
    monkeypatch.setattr(decode, "why_not_in_8_bits", lambda device, dtype: f"nothing multiplies {dtype}")
    for model in (load_tiny(), load_tiny().bfloat16(), str(tiny_folder)):
        dtype = "float32" if isinstance(model, str) else str(model.dtype).removeprefix("torch.")
        sentence = (
            rf"rollout_quantization is '8bit', but .* cannot be sampled with .*: nothing multiplies torch\.{dtype}\. Leave it out"
        )
        with pytest.raises(ConfigError, match=sentence):
            GRPOTrainer(model, letters, settings(rollout_quantization="8bit"), prompts)
        monkeypatch.setattr("groupwise.trl.trainer.load_policy", lambda *_: pytest.fail("its weights are read"))
    monkeypatch.setattr(decode, "why_not_in_8_bits", lambda device, dtype: None if dtype == torch.float32 else "not in bf16")
    with pytest.raises(ConfigError, match=r"not in bf16\. Load the model in float32 \(bf16=False\), or leave it out"):
        GRPOTrainer(load_tiny().bfloat16(), letters, settings(rollout_quantization="8bit"), prompts)
    with pytest.raises(ConfigError, match="but rollout_func samples, with weights of its own: leave it out"):
        GRPOTrainer("no-such-model", letters, settings(rollout_quantization="8bit"), prompts, rollout_func=lambda *_: {})
    bounded = settings(rollout_quantization="8bit", vllm_importance_sampling_clip_min=3.5)
    with pytest.raises(ConfigError, match=r"_clip_min=3\.5 is not honoured .* or weights are rounded: set it below clip_max"):
        GRPOTrainer("no-such-model", letters, bounded, prompts)


def test_weights_of_8_bits_are_refused_on_a_base_of_8_bits(tiny_folder, prompts, letters, settings):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import BitsAndBytesConfig

    args, how = settings(rollout_quantization="8bit"), BitsAndBytesConfig(load_in_8bit=True)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match=r"rollout_quantization is '8bit', but .* in 8 bits already, .*\. Leave it out"):
        GRPOTrainer(str(tiny_folder), letters, args, prompts, peft_config=config, quantization_config=how)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vllm_importance_sampling_clip_min": 3.0}, "vllm_importance_sampling_clip_min=3.0 .* set it below clip_max"),
        ({"vllm_importance_sampling_clip_max": None}, "vllm_importance_sampling_clip_max=None .* set it to 1 or more"),
        ({"vllm_importance_sampling_cap": 0.5}, "vllm_importance_sampling_clip_max=0.5"),
        ({"loss_type": "vespo"}, "another loss_type than 'vespo', or set vllm_importance_sampling_correction=False"),
    ],
)
def test_a_correction_that_cannot_be_had_is_said_before_a_model_is_read(prompts, letters, settings, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        GRPOTrainer("no-such-model", letters, settings(use_vllm=True, min_p=0.1, **changes), prompts)
    with pytest.raises(ModelError, match="no-such-model"):
        GRPOTrainer("no-such-model", letters, settings(use_vllm=True, **changes), prompts)


@pytest.mark.parametrize("loss_type", ["cispo", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sapo", "vespo"))])
def test_loss_types_learn(tiny_folder, prompts, letters, settings, loss_type):
    args = settings(loss_type=loss_type, num_iterations=2, max_steps=4, off_policy_mask_threshold=0.5)
    trainer = GRPOTrainer(str(tiny_folder), letters, args, prompts)
    before = weights(trainer)
    trainer.train()
    assert not same(before, weights(trainer))
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


@pytest.mark.parametrize("as_object", [False, True])
def test_float16_learns_with_a_scaled_loss(tiny_folder, load_tiny, prompts, letters, settings, as_object):
    args = settings(fp16=True, bf16=None, max_steps=3, beta=0.1)
    trainer = GRPOTrainer(load_tiny().half() if as_object else str(tiny_folder), letters, args, prompts)
    before = weights(trainer)
    trainer.train()
    assert trainer.model.dtype == torch.float16
    assert trainer.learner.optimizer.loss_scale > 1
    assert not same(before, weights(trainer))
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


@pytest.mark.parametrize("fp16", [True, False])
def test_an_update_that_overflowed_takes_no_place_in_the_schedule_of_fp16(tiny_folder, prompts, letters, settings, fp16):
    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 1:
                next(g for g in trainer.learner.optimizer.gradients() if g is not None).fill_(math.inf)

    args = settings(fp16=fp16, bf16=None if fp16 else False, max_steps=4)
    trainer = GRPOTrainer(str(tiny_folder), letters, args, prompts, callbacks=[Overflow])
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert [rate * 4000 for rate in rates] == pytest.approx([4, 3, 3, 2] if fp16 else [4, 3, 2, 1])
    trainer.args.max_steps = 5
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if row.get("step") == 5 and "loss" in row]
    assert row["learning_rate"] == pytest.approx(1e-3 * (2 if fp16 else 1) / 5)


def test_a_step_that_an_error_ends_takes_no_place_in_the_schedule(tiny_folder, prompts, letters, settings, monkeypatch):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=4), prompts)

    def refresh(version):
        if version == 2:
            raise TrainingError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.engine, "refresh", refresh)
        with pytest.raises(TrainingError, match="nobody answers"):
            trainer.train()
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert [rate * 4000 for rate in rates] == pytest.approx([4, 3, 2, 1])


def test_eight_bit_moments_and_a_base_in_four_bits(tiny_folder, prompts, letters, settings):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import BitsAndBytesConfig

    trainer = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=1, optim="adamw_8bit"), prompts)
    trainer.train()
    assert type(trainer.optimizer).__module__.startswith(("bitsandbytes", "groupwise"))
    assert not isinstance(trainer.optimizer, torch.optim.AdamW)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match="pass peft_config"):
        GRPOTrainer(str(tiny_folder), letters, settings(), prompts, quantization_config=how)
    args = settings(max_steps=1)
    args.model_init_kwargs = {"quantization_config": how, "dtype": "float32"}
    late = GRPOTrainer(str(tiny_folder), letters, args, prompts, peft_config=adapter)
    assert late.model.is_quantized
    late.train()
    with pytest.raises(ConfigError, match="in one place"):
        GRPOTrainer(str(tiny_folder), letters, args, prompts, peft_config=adapter, quantization_config=how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_trainers_are_freed_and_a_model_can_be_trained_again(load_tiny, prompts, letters, settings, dtype):
    model, gone = load_tiny().to(dtype), []
    for _ in range(2):  # the second while the model lives on, as when a cell of a notebook is run again
        trainer = GRPOTrainer(model, letters, settings(max_steps=1, learning_rate=0.1), prompts)
        before = weights(trainer)
        trainer.train()
        assert not same(before, weights(trainer))
        gone += [weakref.ref(trainer), weakref.ref(trainer.learner.optimizer), weakref.ref(trainer.learner.optimizer.masters[0])]
        del trainer
        gc.collect()
    gone.append(weakref.ref(model))
    del model
    gc.collect()
    assert [one() is None for one in gone[:2]] == [True, True]
    assert gone[3]() is gone[4]() is gone[-1]() is None


def test_entropy_is_in_every_row(tiny_folder, prompts, letters, settings):
    """Of second passes as of first ones, of steps without an advantage, of evaluations; about the mean entropy of the distributions."""
    args = settings(num_iterations=2, max_steps=4, learning_rate=1e-6, eval_strategy="steps", eval_steps=1, entropy_coef=1e-9)
    trainer = GRPOTrainer(str(tiny_folder), letters, args, prompts, eval_dataset=prompts.select(range(2)))
    exact = []
    accumulate = trainer.learner.accumulate

    def measured(passes):
        exact.append(float(torch.cat([trainer.learner.entropies(one.window) for one in passes]).mean()))
        return accumulate(passes)

    trainer.learner.accumulate = measured
    trainer.train()
    logged = [
        row["entropy" if "entropy" in row else "eval_entropy"] for row in trainer.state.log_history if "train_loss" not in row
    ]
    assert len(logged) == len(exact) == 8
    assert logged == pytest.approx(exact, rel=0.2)
    trainer = GRPOTrainer(str(tiny_folder), lambda completions, **_: [1.0] * len(completions), settings(), prompts)
    trainer.train()
    assert [row["entropy"] for row in trainer.state.log_history[:2]] == pytest.approx([logged[0]] * 2, rel=0.2)


def test_early_stopping_stops(tiny_folder, prompts, settings):
    from transformers import EarlyStoppingCallback

    def flat(completions, **kwargs):
        return [1.0] * len(completions)

    args = settings(
        max_steps=9, eval_strategy="steps", eval_steps=1, metric_for_best_model="reward", per_device_eval_batch_size=4
    )
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = GRPOTrainer(str(tiny_folder), flat, args, prompts, eval_dataset=prompts.select(range(1)), callbacks=[stop])
    trainer.train()
    assert (trainer.state.global_step, trainer.state.best_metric, trainer.state.best_global_step) == (3, 1.0, 1)
    trainer.args.metric_for_best_model = "accuracy"
    with pytest.raises(ConfigError, match="eval_reward"):
        trainer._note_best({"eval_reward": 1.0})


def test_words_of_warning(tiny_folder, prompts, settings, caplog):
    def silent(completions, **kwargs):
        return [None] * len(completions)

    args = settings(
        importance_sampling_level="sequence",
        loss_type="dapo",
        use_vllm=True,
        vllm_max_model_length=64,
        use_liger_kernel=True,
        log_level="warning",
        max_steps=1,
    )
    GRPOTrainer(str(tiny_folder), silent, args, prompts).train()
    said = " ".join(record.getMessage() for record in caplog.records)
    told = ("own engine samples", "model's whole context", "Liger's kernels are not used", "completion length", "returned None")
    for words in told:
        assert words in said


def test_a_checkpoint_of_trl_s_own_is_called_that(tiny_folder, prompts, letters, settings):
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(save_strategy="steps", save_steps=1, max_steps=1), prompts)
    trainer.train()
    folder = Path(trainer.args.output_dir) / "checkpoint-1"
    (folder / "optimizer.safetensors").rename(folder / "optimizer.pt")
    (folder / "manifest.json").unlink()  # TRL writes none
    again = GRPOTrainer(str(tiny_folder), letters, settings(max_steps=2), prompts)
    with pytest.raises(CheckpointError, match=r"written by TRL.*pass the folder as model="):
        again.train(resume_from_checkpoint=str(folder))


def test_a_checkpoint_of_version_0_1_is_resumed(tiny_folder, prompts, letters, settings):
    """It had files in place of ``state.json`` and no manifest. A rise of the schedule and of the entropy's coefficient go on."""
    more = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "warmup_steps": 3, "beta": 0.1, "entropy_target": 9.0}
    args = settings(**more, use_adaptive_entropy=True, entropy_coef=0.1)
    whole = GRPOTrainer(str(tiny_folder), letters, args, prompts)
    whole.train()
    folder = Path(args.output_dir) / "checkpoint-2"
    parts = json.loads((folder / "state.json").read_text())["parts"]
    (folder / "scheduler.json").write_text(json.dumps(parts["schedule"]))
    (folder / "entropy_ctrl_state.json").write_text(json.dumps(parts["entropy"]))
    for name in ("state.json", "manifest.json"):
        (folder / name).unlink()
    resumed = GRPOTrainer(str(tiny_folder), letters, args, prompts)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.learner.updates == 4
    assert same(weights(whole), weights(resumed))
    rows = [[[row[k] for k in ("learning_rate", "entropy_coef", "loss")] for row in t.state.log_history if "loss" in row]
            for t in (whole, resumed)]  # fmt: skip
    assert rows[0] == rows[1]


def test_long_templates_do_not_escape_the_early_check(tiny_folder, letters, settings):
    """What a template adds is measured, not guessed: the last row is too long by it alone."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = "{{ 'x' * 200 }}{% for m in messages %}{{ m.content }}{% endfor %}"
    room = 256 - 8
    chats = [[{"role": "user", "content": "?" * n}] for n in (8, 8, 40, room - 190)]
    data = Dataset.from_dict({"prompt": chats})
    context = AutoModelForCausalLM.from_pretrained(tiny_folder).config.max_position_embeddings
    assert context == 256
    with pytest.raises(DataError, match="row 3"):
        GRPOTrainer(str(tiny_folder), letters, settings(), data, processing_class=tokenizer)


def test_code_that_comes_with_a_model_is_asked_for_in_trl_s_words(tiny_folder, prompts, letters, settings, tmp_path):
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "remote"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = {"model_type": "remote", "auto_map": {"AutoConfig": "c.Config", "AutoModelForCausalLM": "m.Model"}}
    (folder / "config.json").write_text(json.dumps(config | own), encoding="utf-8")
    for name in ("c", "m"):
        (folder / f"{name}.py").write_text("raise SystemExit('it ran')\n", encoding="utf-8")
    with pytest.raises(ModelError, match="trust_remote_code=True in GRPOConfig") as refusal:
        GRPOTrainer(str(folder), letters, settings(), prompts)
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize(
    "name", ["compute_loss", "_generate", "_save_checkpoint", "save_model", "create_optimizer", "evaluation_loop"]
)
def test_a_method_that_would_be_overridden_in_vain_is_an_error(name):
    mixin = type("Mixin", (), {name: lambda self: None})
    for bases in ((GRPOTrainer,), (mixin, GRPOTrainer)):
        with pytest.raises(ConfigError, match=name):
            type("Mine", bases, {name: lambda self: None} if len(bases) == 1 else {})
    type("Fine", (GRPOTrainer,), {"log": GRPOTrainer.log, "my_own": lambda self: None})


def test_a_loss_of_the_script_s_own_by_its_place(tiny_folder, prompts, letters, settings, tmp_path):
    """REINFORCE written by hand is what the built-in loss is at ratio 1; and what it measures is logged."""
    (tmp_path / "my_loss.py").write_text(
        "from groupwise.algorithm import LossOutputs\n"
        "from groupwise.metrics import Mean\n"
        "def loss(inputs):\n"
        "    of_tokens = -inputs.advantages_T * inputs.logprobs_T\n"
        "    return LossOutputs(of_tokens, metrics={'size': Mean.of(of_tokens.tolist())})\n"
    )
    made = []
    for loss_type in (f"{tmp_path}/my_loss.py:loss", "dapo"):
        trainer = GRPOTrainer(str(tiny_folder), letters, settings(loss_type=loss_type), prompts)
        trainer.train()
        made.append(trainer)
    for name, parameter in weights(made[1]).items():
        torch.testing.assert_close(weights(made[0])[name], parameter, atol=1e-5, rtol=1e-4)
    assert "loss/size" in made[0].state.log_history[0]
    with pytest.raises(ConfigError, match="nowhere"):
        GRPOTrainer(str(tiny_folder), letters, settings(loss_type=f"{tmp_path}/my_loss.py:nowhere"), prompts)


def test_a_term_of_one_s_own_loss_needs_no_advantage(tiny_folder, prompts, settings, tmp_path):
    (tmp_path / "my_loss.py").write_text(
        "from groupwise.algorithm import LossOutputs, needs\n"
        "@needs('entropy')\n"
        "def loss(inputs):\n"
        "    return LossOutputs(-inputs.advantages_T * inputs.logprobs_T - inputs.entropy_T)\n"
    )

    def alike(completions, **_):
        return [1.0] * len(completions)

    trainer = GRPOTrainer(str(tiny_folder), alike, settings(loss_type=f"{tmp_path}/my_loss.py:loss"), prompts)
    before = weights(trainer)
    trainer.train()
    assert not same(before, weights(trainer))


def test_an_advantage_of_the_script_s_own_with_its_settings(tiny_folder, prompts, letters, settings, tmp_path):
    """Written by hand it is TRL's; it is told each function's scores and completions' lengths, and what it measures is logged."""
    (tmp_path / "my_advantage.py").write_text(
        "import torch\n"
        "from groupwise.algorithm import AdvantageOutputs\n"
        "from groupwise.metrics import Mean\n"
        "SEEN = []\n"
        "def centred(inputs, *, epsilon: float):\n"
        "    SEEN.append((sorted(inputs.functions), inputs.lengths_N.tolist()))\n"
        "    found = [(g - g.mean()) / (g.std() + epsilon) for g in map(torch.tensor, inputs.by_group(inputs.rewards_N))]\n"
        "    return AdvantageOutputs(torch.cat(found), metrics={'mine/size': Mean.of([3.0])})\n"
        "def of_tokens(inputs):\n"
        "    return AdvantageOutputs(advantages_T=inputs.rewards_N[inputs.sequence_T])\n"
    )
    own = {"advantage_type": f"{tmp_path}/my_advantage.py:centred", "advantage_settings": {"epsilon": 1e-4}}
    lengths, made = [], []

    def noted(completion_ids, **_):
        lengths.append([len(ids) for ids in completion_ids])
        return [0.0] * len(completion_ids)

    for arguments in (own, {}):
        trainer = GRPOTrainer(str(tiny_folder), [letters, noted], settings(**arguments), prompts)
        trainer.train()
        made.append(trainer)
    for name, parameter in weights(made[1]).items():
        torch.testing.assert_close(weights(made[0])[name], parameter, atol=1e-5, rtol=1e-4)
    seen = sys.modules[made[0]._objective.advantage.func.__module__].SEEN
    assert seen == [(["letters", "noted"], each) for each in lengths[:2]]
    assert len({*lengths[0], *lengths[1]}) > 1
    assert made[0].state.log_history[0]["mine/size"] == 3.0
    trainer = GRPOTrainer(str(tiny_folder), letters, settings(advantage_type=f"{tmp_path}/my_advantage.py:of_tokens"), prompts)
    with pytest.raises(ConfigError, match=r"returned advantages of tokens, but in groupwise.trl a completion has one"):
        trainer.train()


def test_a_group_that_no_function_judges_is_no_empty_group_to_an_advantage():
    """maxrl takes the smallest reward of a group, which an empty one has not."""
    rewards, advantages, _ = combine(
        {"one": [1.0, 0.0, None, None, 1.0, 1.0]}, [1.0], [3] * 6, 2, Objective(advantage=maxrl_advantage)
    )
    assert [math.isnan(r) for r in rewards] == [False, False, True, True, False, False]
    assert advantages == pytest.approx([1.0, -1.0, 0.0, 0.0, 0.0, 0.0], abs=1e-3)


def test_a_bad_objective_is_said_before_a_model_is_read(prompts, letters, settings):
    with pytest.raises(ConfigError, match=r"nowhere.py' does not exist"):
        GRPOTrainer("no-such-model", letters, settings(loss_type="nowhere.py:loss"), prompts)
