"""Writes docs/reference/plans.md, what `groupwise plan` says of each recipe: `python scripts/write_plan_docs.py`.

A test says when that is due."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from groupwise.cli import app
from groupwise.cli.plan import plan_of
from groupwise.planner import KNOWN_SHAPES, Plan

__all__ = ["PAGE", "SETUPS", "SetUp", "made", "render"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "plans.md"


@dataclass(frozen=True, slots=True)
class SetUp:
    """A machine and a recipe for it."""

    title: str
    words: str
    """After ``groupwise plan``."""


SETUPS = (
    SetUp("Quickstart on two CPU cores", "quickstart --hardware cpu --prompt-tokens 70"),
    SetUp("The same with a calculator", "quickstart-tools --hardware cpu --prompt-tokens 95"),
    SetUp("The same with a game", "quickstart-game --hardware cpu --prompt-tokens 52"),
    SetUp("1.5B with an adapter on two CPU cores", "gsm8k-1.5b-cpu --hardware cpu --prompt-tokens 110 --completion-tokens 190"),
    SetUp("0.5B on a card of 16 GB", "gsm8k-0.5b --gpu-memory 16GiB"),
    SetUp("1.5B trained whole on a card of 24 GB", "gsm8k-1.5b-24gb --hardware rtx-4090"),
    SetUp(
        "The same with fp32 masters and 8-bit moments",
        "gsm8k-1.5b-24gb --hardware rtx-4090 optimizer.precision=masters-8bit training.offload_reference=true",
    ),
    SetUp(
        "The same with fp32 masters outside the GPU",
        "gsm8k-1.5b-24gb --hardware rtx-4090 optimizer.precision=masters optimizer.offload=true",
    ),
    SetUp("1.5B as a reproduction of a tutorial has it, on a card of 24 GB", "tutorial-1.5b --hardware rtx-3090"),
    SetUp("1.5B with an adapter and a calculator on a card of 24 GB", "tools-1.5b --hardware rtx-4090 --completion-tokens 256"),
    SetUp("0.5B and a length reward on two RTX 4090", "length-0.5b-2gpu --hardware rtx-4090 --world-size 2"),
    SetUp("1.5B on eight GPUs of 80 GB", "gsm8k-1.5b-8gpu --hardware a100-80gb --world-size 8"),
    SetUp("7B on eight GPUs of 80 GB", "gsm8k-7b-8gpu --hardware a100-80gb --world-size 8"),
    SetUp("3B on POLARIS-53K, trained whole on one GPU of 80 GB", "polaris-3b --hardware a100-80gb --completion-tokens 800"),
    SetUp("3B QLoRA on POLARIS-53K on a card of 24 GB", "polaris-3b-qlora --hardware rtx-4090 --completion-tokens 800"),
)
PUBLISHED = (
    (
        "FP16, batch=2",
        "500 | 106",
        "polaris-3b optimizer.precision=stochastic training.offload_reference=true rollout.max_concurrent_sequences=64",
    ),
    ("FP16 + DeepSpeed", "800 | 66", "polaris-3b optimizer.offload=true rollout.max_concurrent_sequences=64"),
    ("8-bit + DeepSpeed", "1,200 | 44", "polaris-3b-qlora model.quantization=8bit"),
    ("QLoRA + DeepSpeed", "2,000 | 26", "polaris-3b-qlora"),
)
"""A public guide's rows for Qwen2.5-3B on POLARIS-53K (name, examples an hour and hours an epoch), and what comes nearest here."""
_PROBLEMS_OF_POLARIS = 53_291
ONE_CARD = (13 * 3600, 1_868, ("0.5B", "1.5B", "3B"))
"""A public write-up of TRL on one RTX 4090: seconds, steps, and the models that its vocabulary of 151,936 leaves open."""
_LLAMA = "model.name=meta-llama/Llama-3.1-8B-Instruct model.gradient_checkpointing=true evaluation.max_completion_tokens=512"
_VERL = (
    "gsm8k-1.5b-24gb --hardware h100 --world-size 2 --prompt-tokens 103 --completion-tokens 219 model.lora.rank=32 "
    "rollout.prompts_per_step=64 rollout.completions_per_prompt=5 rollout.max_completion_tokens=1024"
)
_LONG = "./qwen3-0.6b-65k"
"""A folder with Qwen3-0.6B's config.json, of which the context alone is another: the published one is shorter than the setting below."""
_PRIME = (
    f"gsm8k-0.5b --hardware h100 --prompt-tokens 36 --completion-tokens 65500 model.name={_LONG} model.gradient_checkpointing=true "
    "evaluation.max_completion_tokens=512 algorithm.kl=null rollout.prompts_per_step=1 rollout.completions_per_prompt=2 "
    "rollout.max_completion_tokens=65500 training.micro_batch_tokens=65536"
)
_H200 = "gsm8k-1.5b-cpu --hardware h200 --prompt-tokens 110"
_32 = "rollout.prompts_per_step=32 training.micro_batch_tokens=16384"
OWN = (
    ("4 x 8 completions of 166 tokens in the mean (seed 1)", "step, s", 1.55, f"{_H200} --completion-tokens 166"),
    ("the same", "sampling, s", 1.03, f"{_H200} --completion-tokens 166"),
    ("the same", "memory, GB", 11.7, _H200),
    (
        "32 x 8 completions of 185 tokens, half of the groups without variance",
        "step, s",
        2.45,
        f"{_H200} --completion-tokens 185 {_32}",
    ),
    ("the same", "sampling, s", 1.54, f"{_H200} --completion-tokens 185 {_32}"),
    ("the same", "memory, GB", 37.7, f"{_H200} {_32}"),
)
"""Runs of this program on one H200 (docs/results.md), medians of their steps; of memory the allocator's peak, in GB."""
PEERS = (
    (
        "[NeMo RL 0.4](https://docs.nvidia.com/nemo/rl/latest/about/performance-summary.html), Llama 3.1 8B on 16 H100: 2,048 completions "
        "a step, 1,060 tokens each with the prompt",
        "step, s", 97.7,
        f"gsm8k-7b-8gpu --hardware h100 --world-size 16 --prompt-tokens 100 --completion-tokens 960 {_LLAMA} rollout.prompts_per_step=64 "
        "rollout.completions_per_prompt=32 rollout.max_completion_tokens=3996 rollout.max_concurrent_sequences=64",
    ),
    (
        "[Unsloth](https://unsloth.ai/blog/grpo), February 2025, 4-bit Llama 3.1 8B, 8 completions, 20 thousand positions: with TRL and "
        "flash attention 2",
        "memory, GB", 510.8,
        f"polaris-3b-qlora --hardware h200 {_LLAMA} rollout.completions_per_prompt=8 rollout.prompts_per_step=1 "
        "rollout.max_completion_tokens=19700 training.micro_batch_tokens=20000 --prompt-tokens 300",
    ),
    (
        "The same by Unsloth itself, which keeps activations in the machine's memory",
        "memory, GB", 54.3,
        f"polaris-3b-qlora --hardware h200 {_LLAMA} rollout.completions_per_prompt=8 rollout.prompts_per_step=1 "
        "rollout.max_completion_tokens=19700 training.micro_batch_tokens=20000 --prompt-tokens 300",
    ),
    (
        "[verl](https://github.com/eric-haibin-lin/verl-data/blob/experiments/gsm8k/Qwen2.5-1.5B-bsz64_2-prompt512-resp1024-lorarank32-"
        "score0.779.log), June 2025, Qwen2.5 1.5B, LoRA 32, 64 x 5 completions of 219 tokens, two GPUs of 80 GB that its MFU makes H100s "
        "or H800s, vLLM without graphs: a step without its test and checkpoint",
        "step, s", 48.9, _VERL,
    ),
    ("The same, learning with both passes before it", "learning, s", 10.1, _VERL),
    (
        "[prime-rl](https://github.com/PrimeIntellect-ai/prime-rl/tree/main/benchmarks/baselines), January 2026, Qwen3 0.6B trained whole "
        "on one H100, two micro-batches of 65,536 tokens, layers recomputed (here: a folder whose config.json is Qwen3 0.6B's with a "
        "`max_position_embeddings` of 65,536)",
        "learning, s", 12.2, _PRIME,
    ),
    ("The same", "memory in learning, GB", 21.0, _PRIME),
)  # fmt: skip
"""What other programs publish of themselves: the setting, what is given, its number, and what comes nearest here."""
_TOKENS = "--prompt-tokens 103 --completion-tokens 219 rollout.max_completion_tokens=1024"
TARGETS = (
    (
        "[verl](https://github.com/eric-haibin-lin/verl-data/blob/experiments/gsm8k/Qwen2.5-1.5B-bsz64_2-prompt512-resp1024-lorarank32-"
        "score0.779.log): 77.9% with LoRA 32 at 3e-5, an epoch of 64 x 5 (its own steps: 1.6 hours of two GPUs of 80 GB)",
        116, 0.4,
        f"gsm8k-1.5b-24gb --hardware rtx-4090 {_TOKENS} model.lora.rank=32 rollout.prompts_per_step=64 rollout.completions_per_prompt=5",
    ),
    (
        "[AReaL](https://github.com/inclusionAI/AReaL/blob/main/examples/math/README.md): 78.4% at best, 77.8% at the end, all weights at "
        "6e-6, ten epochs of 256 x 4",
        290, 0.4,
        f"gsm8k-1.5b-24gb --hardware rtx-4090 {_TOKENS} rollout.prompts_per_step=256 rollout.completions_per_prompt=4",
    ),
    (
        "The same on eight A100 (its example before, with bf16 weights at 1.7e-5, reported 79.6% in about 35 minutes of eight H800)",
        290, 1.5,
        f"gsm8k-1.5b-8gpu --hardware a100-80gb --world-size 8 {_TOKENS} rollout.prompts_per_step=256 rollout.completions_per_prompt=4",
    ),
    (
        "[SkyRL](https://github.com/NovaSky-AI/SkyRL/blob/main/examples/train/gsm8k/run_gsm8k.sh): 79.6% reported, all weights at 1e-6, 20 "
        "epochs of 1,024 x 5 on four H100",
        140, 3.0,
        f"gsm8k-1.5b-8gpu --hardware h100 --world-size 4 {_TOKENS} rollout.prompts_per_step=1024 rollout.completions_per_prompt=5",
    ),
    (
        "[verl](https://github.com/volcengine/verl/blob/main/docs/algo/baseline.md), Qwen2-7B-Instruct: 89 to 89.8%, 15 epochs of "
        "1,024 x 5, four updates each",
        420, 1.5,
        f"gsm8k-7b-8gpu --hardware a100-80gb --world-size 8 {_TOKENS}",
    ),
)  # fmt: skip
"""Published accuracies on GSM8K's test split: what was trained, steps of the command's batch that hold as many completions, an hour of one
GPU in dollars (our assumption), and the command."""
INTRODUCTION = """\
<!-- Written by scripts/write_plan_docs.py: change the recipes or the planner, then run it. -->

# Plans of the recipes

What `groupwise plan` says of each [recipe](recipes.md) on the machines that it is for ([planning](../how-to/planning.md)).
**Times and GPU memory are estimates from data sheets.** None of these runs has been made here on the GPU that its row names.
"""


def made(words: str) -> Plan:
    """The plan that ``groupwise plan WORDS`` shows."""
    command = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
    given = command.make_context("plan", shlex.split(words)).params
    return plan_of(**{name: value for name, value in given.items() if name not in ("formulas", "as_json")})


@contextmanager
def _long_model() -> Iterator[None]:
    """The folder ``_LONG`` in the working folder."""
    shape = KNOWN_SHAPES["Qwen/Qwen3-0.6B"]
    config = {
        "model_type": shape.architecture, "hidden_size": shape.width, "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width, "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 65_536,
    }  # fmt: skip
    with TemporaryDirectory() as place, chdir(place):
        Path(_LONG).mkdir()
        (Path(_LONG) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield


@_long_model()
def render() -> str:
    """The page as Markdown."""
    return "\n".join([INTRODUCTION, _overview(), _published(), _one_card(), _peers(), _own(), _targets()])


def _published() -> str:
    """Others' measurements beside our estimates."""
    rows = [
        "## POLARIS-53K on one A100 of 40 GB, beside published figures",
        "",
        "The first three columns are **others' figures**, approximate, from a public guide to GRPO for Qwen2.5-3B, which does not say how",
        "long completions are. The last columns are **our estimates**: four completions of 800 tokens for each problem, 2 or 8 problems a",
        "step.",
        "",
        "| published | examples an hour | hours | nearest here | fits | 2 a step: an hour | hours | 8 a step: an hour | hours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rate, words in PUBLISHED:
        two, eight = (made(f"{words} --hardware a100-40gb --completion-tokens 800 rollout.prompts_per_step={n}") for n in (2, 8))
        rates = [f"{plan.prompts_per_hour:,.0f} | {_PROBLEMS_OF_POLARIS / plan.prompts_per_hour:.0f}" for plan in (two, eight)]
        fits = f"{eight.peak.bytes / 2**30:.0f} of 40 GiB" if eight.fits else "**no**"
        rows.append(f"| {name} | {rate} | `{words}` | {fits} | {' | '.join(rates)} |")
    return "\n".join([*rows, ""])


def _one_card() -> str:
    """One more of others' measurements, whose setting is known in part."""
    seconds, steps, models = ONE_CARD
    words = "gsm8k-1.5b-24gb --hardware rtx-4090 rollout.prompts_per_step=4 rollout.completions_per_prompt=4"
    rows = [
        "## GSM8K on one RTX 4090, beside a published time",
        "",
        f"A public write-up of TRL (February 2025) gives **{seconds // 3600} hours for {steps:,} steps** of 4 problems x 4 completions,",
        f"{seconds / steps:.1f} s a step. It does not say the model (a vocabulary of 151,936 is that of Qwen2.5's smaller three), how long",
        "prompts and completions were, or the sampler, precision and recomputation. **Our estimates** are of groupwise, not TRL, with",
        "every completion at 256 tokens, TRL's default limit at that time (1.16: 512):",
        f"`{words} model.name=...`.",
        "Nothing was fitted. How much of the ratio is the program, the setting or an error of the plan cannot be told.",
        "",
        "| model | fits | a step, s | plan / published |",
        "|---|---|---|---|",
    ]
    for model in models:
        plan = made(f"{words} model.name=Qwen/Qwen2.5-{model}-Instruct")
        fits = f"{plan.peak.bytes / 2**30:.0f} of {plan.limit_bytes / 2**30:.0f} GiB" if plan.fits else "**no**"
        rows.append(f"| {model} | {fits} | {plan.cost.step_s:.1f} | {plan.cost.step_s * steps / seconds:.2f} |")
    return "\n".join([*rows, ""])


def _peers() -> str:
    """Other programs' figures of themselves."""
    rows = [
        "## Other programs' own figures",
        "",
        "**Theirs were measured, ours are estimates**, of this program in the nearest setting; nothing was fitted. A ratio below 1 means",
        "a faster program, or a plan that hopes too much.",
        "",
        "| published | of | theirs | plan | plan / theirs | `groupwise plan` |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *map(_against, PEERS), ""])


def _against(row: tuple[str, str, float, str]) -> str:
    """A row of what was measured beside what the plan says."""
    title, of, measured, words = row
    plan = made(words)
    learning = max(phase.bytes for phase in plan.phases if phase.name in ("learning", "output head"))
    of_plan = {
        "step, s": plan.cost.step_s, "sampling, s": plan.cost.sampling_s, "learning, s": plan.cost.learning_s,
        "memory, GB": plan.peak.bytes / 1e9, "memory in learning, GB": learning / 1e9,
    }  # fmt: skip
    planned = of_plan[of]
    fits = "" if plan.fits else " (**does not fit**)"
    return f"| {title} | {of} | {measured} | {planned:.1f}{fits} | {planned / measured:.2f} | `{words}` |"


def _own() -> str:
    """This program on the one card that it was run on."""
    rows = [
        "## This program's own on one H200",
        "",
        "[Two runs](../results.md#the-same-on-one-h200) of `gsm8k-1.5b-cpu` with Qwen2.5-Coder-1.5B. The plan's times are too short, the",
        "more so the smaller the batch: it does not count captures, steps that are launched, and looks at the tokens, and learning",
        "reached 23% of the peak arithmetic where it assumes 40%. It supposes that every group is learnt from, and that all rows end",
        "at the mean. Measured memory is that of tensors alone; the plan has the driver's context and the allocator's loss too.",
        "",
        "| run | of | measured | plan | plan / measured | `groupwise plan` |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *map(_against, OWN), ""])


def _targets() -> str:
    """Hours and dollars to accuracies that others have published."""
    shares = [made(words).cost.step_s / measured for _, of, measured, words in OWN if of == "step, s"]
    whole = next(made(words).cost.step_s / theirs for _, of, theirs, words in PEERS if (of, words) == ("step, s", _VERL))
    least, most = min(shares), max(shares)
    here = made("gsm8k-1.5b-cpu --hardware cpu --prompt-tokens 110 --completion-tokens 190").cost.step_s
    rows = [
        "## Hours to published accuracies",
        "",
        "**Predictions, until a card has run them.** They take the published run's completions (219 tokens, as verl's were) and assume",
        "that as many teach as much here. Three figures say how little is known. *By the plan* is the smallest, since it hopes too much",
        f"in the speeds of both tables above. *By our own steps* divides it by {most:.2f} and {least:.2f}, the shares of this program's",
        "steps on one H200 that the plan foresaw. The larger share is of the larger batch, and these batches are larger still.",
        f"Other cards, and several at once, were not tried. *By verl's step* divides the plan by {whole:.3f}, the share of another",
        f"program's whole step, which sampled without graphs. On CPUs the plan says {here:.0f} s for a step of `gsm8k-1.5b-cpu`; 173 and",
        "183 s were measured on cores that multiply bf16 at 0.4 TFLOP/s, and of shorter answers 102 s at 0.75 and 200 s at 0.29",
        "([results](../results.md)).",
        "Dollars, of the last two (supposed, no source): 0.40 for an hour of an RTX 4090, 1.50 of an A100, 3.00 of an H100.",
        "",
        "| published, of GSM8K's test split | completions | steps | hours, by the plan | by our own steps | by verl's step | dollars "
        "| `groupwise plan` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for title, steps, price, words in TARGETS:
        plan = made(words)
        hours, gpus, rollout = steps * plan.cost.step_s / 3600, plan.setup.world_size, plan.setup.config.rollout
        completions = steps * rollout.prompts_per_step * rollout.completions_per_prompt
        money = [f"{amount:,.{0 if amount >= 10 else 1}f}" for x in (most, least, whole) for amount in [hours / x * price * gpus]]
        rows.append(
            f"| {title} | {completions:,.0f} | {steps} | {hours:.1f} | {hours / most:.1f} to {hours / least:.1f} | {hours / whole:.0f} "
            f"| {money[0]} to {money[1]}; {money[2]}{'' if plan.fits else ' (**does not fit**)'} | `{words}` |"
        )
    return "\n".join([*rows, ""])


def _overview() -> str:
    rows = [
        "| set-up | `groupwise plan` | peak of, GiB | a step, s | an epoch, hours |",
        "|---|---|---|---|---|",
    ]
    for setup in SETUPS:
        plan = made(setup.words)
        epoch = "-" if plan.epoch_hours is None else f"{plan.epoch_hours:,.1f}"
        rows.append(
            f"| {setup.title} | `{setup.words}` | {plan.peak.bytes / 2**30:.1f} of {plan.limit_bytes / 2**30:.0f}"
            f"{'' if plan.fits else ' (**does not fit**)'} | {plan.cost.step_s:.1f} | {epoch} |"
        )
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
