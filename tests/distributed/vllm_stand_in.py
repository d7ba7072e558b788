"""``vllm_stand_in.py -m groupwise.engines.vllm MODEL --host .. --port ..``: a sampling server with a transformers model in vLLM's place."""

import argparse
import signal

import torch
from transformers import AutoModelForCausalLM

from groupwise.engines.vllm.server import Server
from groupwise.engines.vllm.service import Service
from tests.engines.with_vllm.model_backend import ModelBackend

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tensor-parallel")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    server = Server(Service(ModelBackend(AutoModelForCausalLM.from_pretrained(chosen.model))), chosen.host, chosen.port)
    signal.sigwait([signal.SIGTERM])
    server.close()
