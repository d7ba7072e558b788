"""A reward model, by its name or folder, as the only judge of conversations.

python examples/trl/reward_model.py --judge some/reward-model --output_dir runs/judged --max_steps 50

Without ``--judge`` a stand-in is made in ``--output_dir``: the policy's own weights under a new head, whose taste is arbitrary but steady.
"""

import os
from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from groupwise.models.embedded import EMBEDDED_NAME, ensure_embedded_model
from groupwise.trl import GRPOConfig, GRPOTrainer

TASKS = (
    "Greet a new colleague.",
    "Say no politely.",
    "Thank a friend for a gift.",
    "Ask for the time.",
    "Describe the sea.",
    "Cheer me up.",
)


@dataclass
class Script:
    model: str = EMBEDDED_NAME
    judge: str | None = None


def stand_in(model: str, folder: str) -> str:
    source = str(ensure_embedded_model()) if model == EMBEDDED_NAME else model
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    script, args = HfArgumentParser((Script, GRPOConfig)).parse_args_into_dataclasses()
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": task}]} for task in TASKS])
    judge = script.judge or stand_in(script.model, os.path.join(args.output_dir, "judge"))
    trainer = GRPOTrainer(model=script.model, reward_funcs=judge, args=args, train_dataset=dataset)
    trainer.train()
