"""A sampling server's backend without vLLM: a transformers model that takes weights and samples, under the same rules."""

from __future__ import annotations

import torch

from groupwise.engines.transformers import TransformersEngine, _Sequence
from groupwise.engines.vllm.protocol import Refused, shape_of
from groupwise.engines.vllm.transfer import Adapter, read
from groupwise.engines.vllm.wire import opened
from groupwise.types import Problem, Prompt


class ModelBackend:
    """Implements ``service.Backend``. ``before_row`` is called before each completion is handed out, for faults to come from."""

    def __init__(
        self, model, *, max_model_tokens=256, before_row=lambda count: None, devices=("",), sleeps=False, adapter_rank=0
    ):
        self.model, self.max_model_tokens, self.before_row = model.eval(), max_model_tokens, before_row
        with torch.no_grad():  # not the trainer's weights: what is sampled without a push shows
            for parameter in self.model.parameters():
                parameter.zero_()
        self.label, self.handed_out, self.loads, self.files, self.asked = None, 0, 0, 0, []
        self.takes = True
        self.devices, self.sleeps, self.asleep = list(devices), sleeps, False
        self.adapter_rank, self.adapters, self.added = adapter_rank, 0, {}

    def about(self):
        return {
            "backend": "transformers", "model": "some/model", "shape": shape_of(self.model.config), "dtype": "float32",
            "max_model_tokens": self.max_model_tokens, "devices": self.devices, "sleeps": self.sleeps,
            "adapter_rank": self.adapter_rank,
        }  # fmt: skip

    def release_memory(self):
        self.asleep = True
        for parameter in self.model.parameters():
            parameter.data.zero_()

    def load(self, source, label):
        if isinstance(source, Adapter):
            return self.add(source, label)
        tensors, self.added = {}, {}
        with opened(source, 0, torch.device("cpu")) as named:
            for name, tensor in read(named):
                assert name not in tensors, "a tensor came twice"
                tensors[name] = tensor
            again = dict(read(named))
        if any(not torch.equal(tensor, again[name]) for name, tensor in tensors.items()):
            raise ValueError("other tensors came the second time")
        wanted = {name for name, _ in self.model.named_parameters()}  # tied ones once
        if set(tensors) != wanted:
            raise ValueError(f"the tensors are not the model's: {sorted(set(tensors) ^ wanted)[:3]}")
        if self.takes:
            self.model.load_state_dict(tensors, strict=False)
        self.asleep = False
        self.label, self.loads, self.files = label, self.loads + 1, len(source) if isinstance(source, list) else 0
        return {"compared": len(tensors), "repacked": 0, "sharded": 0}

    @torch.no_grad()
    def add(self, adapter, label):
        """The factors' products on top of the weights, in place of those of the adapter before."""
        parameters = dict(self.model.named_parameters())
        for name, before in self.added.items():
            parameters[name].copy_(before)
        factors, self.added = dict(read(adapter.files)), {}
        for name, first in factors.items():
            module, found, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
            if found and module.rpartition(".")[2] in adapter.config["target_modules"]:
                weight, second = parameters[f"{module}.weight"], factors[name.replace("lora_A", "lora_B")]
                self.added[f"{module}.weight"] = weight.clone()
                weight += adapter.config["lora_alpha"] / adapter.config["r"] * second @ first
        if 2 * len(self.added) != len(factors):
            raise ValueError("some factors have no place")
        self.label, self.adapters = label, self.adapters + 1
        return {"compared": 0, "repacked": 0, "sharded": 0}

    def sample(self, settings, jobs, stop, stream):
        if any(len(job.prompt) + job.max_tokens > self.max_model_tokens for job in jobs):
            raise Refused("too long")
        engine = TransformersEngine(self.model, None, stop)
        self.asked.append(len(jobs))
        for place, job in enumerate(jobs):
            sequence = _Sequence(Prompt(Problem("", "", ""), "", job.prompt), 0, job.seed, job.max_tokens)
            with torch.no_grad():
                for _ in engine._decode([sequence], settings):
                    if stream:
                        yield {"piece": sequence.tokens[-1:]}
            self.before_row(self.handed_out)
            self.handed_out += 1
            row = {"job": place, "tokens": sequence.tokens, "logprobs": sequence.logprobs, "cached": 0, "weights": [self.label]}
            yield self.changed(row)

    @staticmethod
    def changed(row):
        return row

    def close(self):
        pass
