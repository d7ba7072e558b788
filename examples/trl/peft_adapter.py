"""An adapter in place of all weights: ``peft_config`` as TRL takes it. The saved folder holds the adapter alone.

python examples/trl/peft_adapter.py --output_dir runs/adapter --max_steps 50 --learning_rate 1e-4 --beta 0.01

Needs the package peft: ``pip install --constraint constraints.txt --editable '.[peft]'``.
"""

from dataclasses import dataclass

from length_reward import posts, reward_len
from peft import LoraConfig
from transformers import HfArgumentParser

from groupwise.trl import GRPOConfig, GRPOTrainer


@dataclass
class Script:
    model: str = "smollm2-135m-instruct"
    rank: int = 8


if __name__ == "__main__":
    script, args = HfArgumentParser((Script, GRPOConfig)).parse_args_into_dataclasses()
    trainer = GRPOTrainer(
        model=script.model,
        reward_funcs=reward_len,
        args=args,
        train_dataset=posts(),
        peft_config=LoraConfig(r=script.rank, lora_alpha=2 * script.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
