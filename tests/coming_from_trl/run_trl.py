"""One of several processes of TRL itself: ``python run_trl.py SPEC.json``. It takes the completions that groupwise sampled, each process
its own share of them; all else is TRL's. ``NAME-RANK.json`` has the logs, ``NAME.safetensors`` the weights.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file

from tests.coming_from_trl.run_script import PROMPTS

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import trl
    import trl.trainer.grpo_trainer as module
    from transformers import AutoTokenizer

    def letters(completions, **kwargs):
        return [sum(x.islower() and x.isascii() for x in text) / max(1, len(text)) + len(text) / 50 for text in completions]

    module.shuffle_sequence_dict = lambda batch: batch
    rank = int(os.environ["RANK"])
    for case in json.loads(Path(sys.argv[1]).read_text()):
        folder, name = Path(case["folder"]), case["name"]
        args = trl.GRPOConfig(output_dir=str(folder / f"{name}-trl"), report_to="none", **case["arguments"])
        tokenizer = AutoTokenizer.from_pretrained(case["model"])
        data = Dataset.from_dict(PROMPTS)
        trainer = trl.GRPOTrainer(case["model"], letters, args, data, processing_class=tokenizer)
        waiting = json.loads((folder / name / f"calls-{rank}.json").read_text())

        def replay(prompt_ids, *_, waiting=waiting, **__):
            own = waiting.pop(0)
            assert len(own) == len(prompt_ids)
            return own, None

        trainer._generate_single_turn = replay
        trainer.train()
        assert not waiting, "as many generations"
        (folder / f"{name}-{rank}.json").write_text(json.dumps(trainer.state.log_history))
        if rank == 0:
            weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
            save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / f"{name}.safetensors")
    torch.distributed.destroy_process_group()
