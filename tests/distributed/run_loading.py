"""One of several processes: ``python run_loading.py CONFIG.yaml FOLDER`` loads the policy and divides it.

``peak-RANK`` has the bytes by which the process's peak memory grew on the way.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama  # noqa: F401  # what is imported now does not count

from groupwise import load_config
from groupwise.distributed import open_world
from groupwise.memory import give_back_freed_memory
from groupwise.models.load import load_policy, resolve_device
from groupwise.models.scorer import make_scorer
from groupwise.training.sharding import loading_device, make_sharding


def peak_bytes():
    """Of this program: what getrusage says begins with the peak of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    give_back_freed_memory()
    config, folder = load_config(Path(sys.argv[1])), Path(sys.argv[2])
    with open_world(True, 600) as world:
        before = peak_bytes()
        policy = load_policy(config.model, loading_device(config, world))
        make_sharding(config, world, make_scorer(policy, config.model, resolve_device(config.model.device)))
        (folder / f"peak-{os.environ['RANK']}").write_text(str(peak_bytes() - before))
