"""TRL's first example: summaries of about twenty characters. Only the import of GRPOConfig and GRPOTrainer is another.

python examples/trl/length_reward.py --output_dir runs/length --max_steps 50 --per_device_train_batch_size 16

With network access, ``load_dataset("trl-lib/tldr", split="train")`` has real posts for the column ``prompt``.
"""

from dataclasses import dataclass

from datasets import Dataset
from transformers import HfArgumentParser

from groupwise.trl import GRPOConfig, GRPOTrainer

TOPICS = ("bike", "flat", "boss", "cat", "exam", "sister", "car", "diet", "phone", "neighbour")
TROUBLES = ("it broke again", "I cannot afford it", "we stopped talking", "I forgot it twice", "it keeps me awake at night")


@dataclass
class Script:
    model: str = "smollm2-135m-instruct"


def posts() -> Dataset:
    """Posts in the form of TL;DR's, small enough for a small model."""
    form = "SUBREDDIT: r/advice\n\nTITLE: My {0}\n\nPOST: This is about my {0}. {1}, and I do not know what to do.\n\nTL;DR:"
    return Dataset.from_dict({"prompt": [form.format(topic, trouble) for topic in TOPICS for trouble in TROUBLES]})


def reward_len(completions, **kwargs):
    """The closer to twenty characters, the better."""
    return [-abs(20 - len(completion)) for completion in completions]


if __name__ == "__main__":
    script, args = HfArgumentParser((Script, GRPOConfig)).parse_args_into_dataclasses()
    trainer = GRPOTrainer(model=script.model, reward_funcs=reward_len, args=args, train_dataset=posts())
    trainer.train()
    trainer.save_model()
