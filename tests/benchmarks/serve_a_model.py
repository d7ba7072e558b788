"""``python -m tests.benchmarks.serve_a_model MODEL --port PORT``: stands in for vLLM's server. ``GAP`` in the environment is added to each
log-probability that it gives."""

import os
import sys
import threading

from transformers import AutoModelForCausalLM

from groupwise.engines.vllm.server import Server
from groupwise.engines.vllm.service import Service
from tests.engines.with_vllm.model_backend import ModelBackend

if __name__ == "__main__":
    gap = float(os.environ.get("GAP", "0"))

    class Backend(ModelBackend):
        @staticmethod
        def changed(row):
            return {**row, "logprobs": [x + gap for x in row["logprobs"]]}

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float()
    Server(Service(Backend(model, max_model_tokens=1024)), port=int(sys.argv[3]))
    threading.Event().wait()
