"""How far bf16 moves log-probabilities and gradients: groupwise's decoder, and transformers under autocast, each against fp32.

One batch of the quickstart, sampled and rewarded once by the model in fp32. Of the same completions: the log-probability of each token, and
the gradient of GRPO's loss where the policy is the one that sampled, - mean_i A_i mean_t log p_it. Groups without variance are left out.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import Result, finish, parser, print_table
from benchmarks.learning import rows_of
from experiments.runs import settings_of
from groupwise.config import load_config
from groupwise.config.schema import ModelConfig
from groupwise.models.decoder import Decoder
from groupwise.models.load import load_policy
from groupwise.models.module_scorer import ModuleScorer
from groupwise.models.scorer import Scorer
from groupwise.rewards import functions

__all__ = ["backward", "compared", "in_layout", "main", "run"]

Group = tuple[list[int], list[list[int]], Tensor]
"""Prompt ids, completions' ids, and their advantages ``[G]``."""


def options() -> argparse.ArgumentParser:
    out = parser("rounding", __doc__)
    out.add_argument("--model", default="smollm2-135m-instruct", help="a folder, such as a warm start's")
    out.add_argument("--problems", type=int, default=16)
    out.add_argument("--completions", type=int, default=8)
    out.add_argument("--max-tokens", type=int, default=48)
    out.add_argument("--seed", type=int, default=0)
    return out


def run(args: argparse.Namespace) -> Result:
    """Sample, compute the three ways, print both tables. Its ratio is of the gradients' relative errors, theirs divided by ours."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    policy = load_policy(ModelConfig(name=args.model, dtype="bfloat16"))
    module = AutoModelForCausalLM.from_pretrained(str(policy.model.config.name_or_path), dtype=torch.float32).eval()
    groups = _sampled(module, policy, args)
    if not groups:
        raise SystemExit(f"no group of {args.problems} has variance: give more --problems, or the --model of a warm start")
    padded, logprobs, gradients = ModuleScorer(module), {}, {}
    logprobs["fp32"] = backward(padded, groups, nullcontext())
    gradients["fp32"] = in_layout(module)
    logprobs["transformers"] = backward(padded, groups, torch.autocast("cpu", dtype=torch.bfloat16))
    gradients["transformers"] = in_layout(module)
    del padded, module
    decoder = Decoder(policy.model)
    logprobs["groupwise"] = backward(decoder, groups, nullcontext())
    gradients["groupwise"] = {name: p.grad.double() for name, p in decoder.named_parameters() if p.grad is not None}
    found = {side: compared(side, logprobs, gradients) for side in ("groupwise", "transformers")}
    names = list(found["groupwise"])
    print_table("Against fp32", ("", *found), [[name, *(numbers[name] for numbers in found.values())] for name in names])
    details = {**found, "groups": len(groups), "tokens": len(logprobs["fp32"])}
    ours, theirs = (found[side]["gradient_error"] for side in ("groupwise", "transformers"))
    shown = {key: value for key, value in vars(args).items() if not isinstance(value, Path | None)}
    return Result("rounding", theirs / ours, ours, theirs, "of the gradient's norm", shown, details)


@torch.no_grad()
def _sampled(module: Any, policy: Any, args: argparse.Namespace) -> list[Group]:
    config = load_config("quickstart", [*settings_of("quickstart"), f"training.seed={args.seed}"])
    groups: list[Group] = []
    for row in rows_of(config)[: args.problems]:
        ids = policy.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        sampled = module.generate(
            torch.tensor([ids]), do_sample=True, top_k=0, top_p=1.0, max_new_tokens=args.max_tokens,
            num_return_sequences=args.completions, eos_token_id=list(policy.end_token_ids), pad_token_id=policy.end_token_ids[0],
        )[:, len(ids) :].tolist()  # fmt: skip
        completions = [_up_to_its_end(one, policy.end_token_ids) for one in sampled]
        decoded = policy.tokenizer.batch_decode(completions, skip_special_tokens=True)
        texts = [[{"role": "assistant", "content": text}] for text in decoded]
        answers = [row["answer"]] * len(texts)
        rewards = torch.tensor([
            [float(score) for score in getattr(functions, str(one.function))(completions=texts, answer=answers, **one.arguments)]
            for one in config.rewards.functions
        ]).sum(0)  # fmt: skip
        if float(rewards.std()) > 0:
            groups.append((ids, completions, (rewards - rewards.mean()) / (rewards.std() + 1e-4)))
    return groups


def _up_to_its_end(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    first = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: first + 1]


def backward(scorer: Scorer, groups: list[Group], context: AbstractContextManager[Any]) -> Tensor:
    """Leave the loss's gradient in the scorer's parameters; the log-probabilities ``[T]`` of all groups."""
    for _, parameter in scorer.named_parameters():
        parameter.grad = None
    found = []
    for prompt, completions, advantages_G in groups:
        with context:
            logprobs_T = scorer.logprobs(scorer.prepare([(prompt, completions)])).float()
        found.append(logprobs_T.detach())
        lengths_G = torch.tensor([len(ids) for ids in completions])
        weights_T = torch.repeat_interleave(advantages_G / lengths_G, lengths_G)
        (-(weights_T * logprobs_T).sum() / (len(groups) * len(completions))).backward()
    return torch.cat(found).double()


def in_layout(module: Any) -> dict[str, Tensor]:
    """A module's gradients under the decoder's names, which stack several projections."""
    holder = copy.deepcopy(module)
    for to, of in zip(holder.parameters(), module.parameters(), strict=True):
        to.data = of.grad.clone()
    return {name: parameter.detach().double() for name, parameter in Decoder(holder).named_parameters()}


def compared(side: str, logprobs: Mapping[str, Tensor], gradients: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
    names = list(gradients["groupwise"])
    one, true = (torch.cat([gradients[which][name].flatten() for name in names]) for which in (side, "fp32"))
    less_T = logprobs[side] - logprobs["fp32"]
    return {
        "gradient_error": float((one - true).norm() / true.norm()),
        "gradient_length": float(one.norm() / true.norm()),
        "cosine": float(one @ true / (one.norm() * true.norm())),
        "same_sign": float((one.sign() == true.sign()).double().mean()),
        "logprob_mean_difference": float(less_T.mean()),
        "logprob_rms_difference": float(less_T.square().mean().sqrt()),
        "kl_per_token": float((less_T.exp() - 1 - less_T).mean()),
    }


def main() -> None:
    args = options().parse_args()
    finish(lambda: run(args), args.output)


if __name__ == "__main__":
    main()
