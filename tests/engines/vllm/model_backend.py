"""A sampling server's backend without vLLM: a transformers model that takes weights and samples, under the same rules."""

from __future__ import annotations

import torch

from groupwise.engines.transformers import TransformersEngine, _Sequence
from groupwise.engines.vllm.protocol import Refused, shape_of
from groupwise.engines.vllm.transfer import opened, read
from groupwise.types import Problem, Prompt


class ModelBackend:
    """Implements ``service.Backend``. ``before_row`` is called before each completion is handed out, for faults to come from."""

    def __init__(self, model, *, max_model_tokens=256, before_row=lambda count: None, devices=("",), sleeps=False):
        self.model, self.max_model_tokens, self.before_row = model.eval(), max_model_tokens, before_row
        with torch.no_grad():  # not the trainer's weights: what is sampled without a push shows
            for parameter in self.model.parameters():
                parameter.zero_()
        self.label, self.handed_out, self.loads, self.files, self.asked = None, 0, 0, 0, []
        self.takes = True
        self.devices, self.sleeps, self.asleep = list(devices), sleeps, False

    def about(self):
        return {
            "backend": "transformers", "model": "some/model", "shape": shape_of(self.model.config), "dtype": "float32",
            "max_model_tokens": self.max_model_tokens, "devices": self.devices, "sleeps": self.sleeps,
        }  # fmt: skip

    def release_memory(self):
        self.asleep = True
        for parameter in self.model.parameters():
            parameter.data.zero_()

    def load(self, source, label):
        tensors = {}
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

    def sample(self, settings, jobs, stop, stream):
        if any(len(job.prompt) + settings.max_tokens > self.max_model_tokens for job in jobs):
            raise Refused("too long")
        engine = TransformersEngine(self.model, None, stop)
        self.asked.append(len(jobs))
        for place, job in enumerate(jobs):
            sequence = _Sequence(Prompt(Problem("", "", ""), "", job.prompt), 0, job.seed)
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
