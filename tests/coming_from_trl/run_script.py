"""One of several processes: ``python run_script.py SPEC.json`` runs each case of it as a script of TRL's would.

A case is ``{"name", "model", "folder", "arguments"}`` and may have ``resume`` (a checkpoint), ``adapter``, ``evaluate``, ``failing`` and
``environment``.
In its folder it leaves the logs, what each process's reward function was called with, and the last weights.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from groupwise.errors import GroupwiseError
from groupwise.trl import GRPOConfig, GRPOTrainer

__all__ = ["PROMPTS", "rewards_of", "run_case"]

PROMPTS = {"prompt": [f"{a} + {a} =" for a in range(12)], "answer": [2 * a for a in range(12)]}
RANK = int(os.environ.get("RANK", "0"))


def rewards_of(calls, fails=False):
    """The share of lower-case letters and a little for length; each call's token ids are added to ``calls``."""

    def letters(completions, completion_ids, answer, log_metric, log_extra, environments=None, **kwargs):
        assert len(completions) == len(answer)
        assert environments is None or [one.answer for one in environments] == answer, "each its own"
        completions = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        if fails and len(calls) == 1 and RANK == 1:
            raise ValueError("out of luck")
        calls.append(completion_ids)
        log_metric("process", RANK)
        log_extra("doubled", [2 * a for a in answer])
        return [sum(x.islower() and x.isascii() for x in text) / max(1, len(text)) + len(text) / 50 for text in completions]

    return letters


class Kept:
    """An environment that keeps what it is told."""

    def reset(self, answer, **row):
        self.answer = answer
        return " Go."

    def get_reward(self):
        return self.answer / 10


def run_case(name, model, folder, arguments, resume=None, adapter=False, evaluate=False, failing=False, environment=False):
    """The trainer after ``train()``."""
    out, calls, more = Path(folder) / name, [], {}
    out.mkdir(parents=True, exist_ok=True)
    if adapter:
        from peft import LoraConfig

        more = {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")}
    data = Dataset.from_dict(PROMPTS)
    if environment:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template += "{# calls are JSON in <tool_call> #}"
        more = {"processing_class": tokenizer, "environment_factory": Kept}
        data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    if RANK == 0:  # of an earlier run; the other process waits for this one
        (out / "prepared").unlink(missing_ok=True)
    args = GRPOConfig(output_dir=str(out), **arguments)
    with args.main_process_first(desc="the data"):
        assert RANK == 0 or (out / "prepared").exists()
        (out / "prepared").touch()
    trainer = GRPOTrainer(model, rewards_of(calls, failing), args, data, eval_dataset=data.select(range(5)), **more)
    trainer.train(resume_from_checkpoint=resume)
    found = {"log": trainer.state.log_history, "first": trainer.is_world_process_zero(), "eval": evaluate and trainer.evaluate()}
    (out / f"calls-{RANK}.json").write_text(json.dumps(calls))
    (out / f"found-{RANK}.json").write_text(json.dumps(found))
    trainer.save_model(str(out / "model"))
    trainer.save_state()
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in json.loads(Path(sys.argv[1]).read_text()):
        try:
            run_case(**case)
        except GroupwiseError as error:
            (Path(case["folder"]) / case["name"] / f"error-{RANK}.txt").write_text(f"{type(error).__name__}: {error}")
            sys.exit(error.exit_code)
