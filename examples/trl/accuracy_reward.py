"""A conversation, a reference solution beside it, and a reward for the right answer, compared as mathematics.

python examples/trl/accuracy_reward.py --output_dir runs/accuracy --max_steps 50 --learning_rate 1e-5

With network access, ``load_dataset("trl-lib/DeepMath-103K", split="train")`` has the same two columns. Where TRL is installed, its
own ``trl.rewards.accuracy_reward`` can stand in the place of the one below.
"""

import random
from dataclasses import dataclass

from datasets import Dataset
from math_verify import parse, verify
from transformers import HfArgumentParser

from groupwise.trl import GRPOConfig, GRPOTrainer

SYSTEM = "Answer with a number in \\boxed{}, such as \\boxed{7}."


@dataclass
class Script:
    model: str = "smollm2-135m-instruct"


def sums(count: int = 200) -> Dataset:
    draw = random.Random(0)
    pairs = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(count)]
    rows = [
        {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {a} + {b}?"}],
            "solution": f"\\boxed{{{a + b}}}",
        }
        for a, b in pairs
    ]
    return Dataset.from_list(rows)


def accuracy_reward(completions, solution, **kwargs):
    """1 for the right answer, 0 for another; None where the reference itself cannot be read."""
    rewards = []
    for completion, reference in zip(completions, solution, strict=True):
        gold = parse(reference, parsing_timeout=None)
        answer = parse(completion[0]["content"], parsing_timeout=None)
        rewards.append(float(verify(gold, answer, timeout_seconds=None)) if gold else None)
    return rewards


def boxed_reward(completions, **kwargs):
    """A small model learns the form first."""
    return [0.5 if "\\boxed{" in completion[0]["content"] else 0.0 for completion in completions]


if __name__ == "__main__":
    script, args = HfArgumentParser((Script, GRPOConfig)).parse_args_into_dataclasses()
    dataset = sums()
    trainer = GRPOTrainer(
        model=script.model,
        reward_funcs=[accuracy_reward, boxed_reward],
        args=args,
        train_dataset=dataset.select(range(180)),
        eval_dataset=dataset.select(range(180, 200)),
    )
    trainer.train()
    print(trainer.evaluate())
