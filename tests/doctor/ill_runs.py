"""Which run has which disease: what is different about it, and the rules that are to say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from groupwise.config import Config, build_config, load_config
from tests.doctor.patients import Clinic, another_temperature, asks, no_end_token, stranded_adapter, wrong_sign
from tests.tiny import tiny_config

__all__ = ["DISEASES", "HEALTHY", "Disease", "settings_of"]

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Disease:
    """A run, and what the doctor is to find; ``rules`` is empty for a healthy one."""

    name: str
    """What was done, in a few words."""
    rules: frozenset[str]
    change: Callable[[Clinic], Sections]
    """Sections of settings over those of ``tests.tiny.tiny_config``, or of the quickstart."""
    model: str = "stranger"
    """Which of the clinic's models; ``smollm2``: the quickstart's."""
    data: str = "sums"
    defect: Callable[[], AbstractContextManager[None]] | None = None
    """What is put into the program."""
    before: bool = False
    """Told before the run, which is not made."""
    quick: bool = False
    """Part of the fast suite, with all that is looked at."""
    long: bool = False
    """Left to `make soak`: that its rules fire, made-up runs show (test_run_rules.py)."""

    @property
    def small(self) -> bool:
        """Of the quickstart's model of 135M, on the quickstart's problems; the others are tiny."""
        return self.model.startswith(("smollm2", "schooled"))


def settings_of(disease: Disease, clinic: Clinic) -> Config:
    sections = {name: dict(section) for name, section in disease.change(clinic).items()}
    if disease.small:
        model = [f"model.name={getattr(clinic, disease.model)}"] if disease.model != "smollm2" else []
        base = load_config("quickstart", [*SMALL, *model]).model_dump(mode="json")
        return build_config({name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})
    return tiny_config(getattr(clinic, disease.model), getattr(clinic, disease.data), **sections)


SMALL = (
    "training.steps=20", "rollout.prompts_per_step=4", "evaluation.problems=80", "evaluation.modes=[sampled]", "evaluation.show=0",
    "algorithm.kl.beta=0.01", "training.threads=1", "warm_start.steps=0", "evaluation.at_start=true",
)  # fmt: skip


def functions(*names: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"functions": [{"function": name} if isinstance(name, str) else dict(name) for name in names]}


def steps(count: int, **more: Any) -> dict[str, Any]:
    return {"steps": count, **more}


def ill(name: str, rules: str, /, **given: Any) -> Disease:
    """``ill(name, "rule rule", section={...}, model="pupil")``: ``model`` and ``data`` are of the clinic, ``model_`` and ``data_``
    sections of settings. Sections with what only the clinic knows are given as ``change`` instead."""
    own = {key: given.pop(key) for key in ("model", "data", "defect", "before", "quick", "long", "change") if key in given}
    sections = {key.removesuffix("_"): value for key, value in given.items()}
    return Disease(name, frozenset(rules.split()), **{"change": lambda clinic: sections, **own})


FORM = {"max_completion_tokens": 60, "prompts_per_step": 4, "completions_per_prompt": 6}
"""For those who know the form, which is 46 letters long."""
GENTLE = {"learning_rate": 1e-4}
PURE = {"precision": "pure"}

HEALTHY = (
    ill(
        "random, learns small letters", "", model="chatty", training=steps(24), algorithm={"kl": {"beta": 0.01}},
        optimizer={"learning_rate": 1e-5}, rollout={"max_completion_tokens": 48}, quick=True,
    ),
    ill(
        "taught, stays right", "", model="pupil", data="sevens", training=steps(24), rollout=FORM, optimizer=GENTLE,
        rewards=functions("correctness", "format"), algorithm={"kl": {"beta": 0.04}},
        evaluation={"problems": 40, "every": 8, "at_start": True}, warm_start={"steps": 45, "learning_rate": 5e-3}, quick=True,
    ),
    ill("calls by chance", "", model="caller", training=steps(12), optimizer={"learning_rate": 1e-5}, defect=asks("{} * 3", often=2),
        rollout={"tools": ["calculator"], "max_completion_tokens": 300, "max_turns": 6}, quick=True),
    ill("quickstart, shortened", "", model="schooled"),
)  # fmt: skip


def leaking(clinic: Clinic) -> Sections:
    return {
        "data": {"eval_source": str(clinic.sums_again)},
        "evaluation": {"at_start": True, "problems": 20},
        "training": steps(12),
    }


REWARDS = (
    ill("a reward without an upper bound", "reward-exploding", rewards=functions("without_bound"), training=steps(30),
        rollout={"max_completion_tokens": 24}, optimizer={"learning_rate": 1e-2}),
    ill("problems that are solved already", "reward-saturated", model="pupil", data="sevens", training=steps(22),
        warm_start={"steps": 60, "learning_rate": 5e-3}, rollout={**FORM, "temperature": 0.5}, rewards=functions("correctness"),
        optimizer=GENTLE, long=True),
    ill("a clip below all scores", "reward-clipped", rewards=functions({"function": "many", "clip": [0, 1]}), training=steps(12)),
    ill("a reward that is never earned", "no-variance", rewards=functions("correctness"), training=steps(12), quick=True),
    ill("a reward function that says 0", "reward-constant", rewards=functions("letters", "zero"), training=steps(12), quick=True),
    ill("a reward function that raises", "reward-failing", training=steps(12), quick=True,
        rewards={**functions("letters", "refuses"), "on_error": "skip"}),
    ill("a reward function whose processes die", "reward-processes-die", change=lambda clinic: {
        "rewards": {**functions({"function": f"{clinic.deadly}:deadly", "isolate": True}), "on_error": "skip", "timeout_s": 20},
        "training": steps(8)}),
    ill("a reward model that reads 12 tokens", "judged-in-part", change=lambda clinic: {"training": steps(6), "rewards": {
        "functions": [{"model": {"name": str(clinic.judge), "device": "cpu", "max_input_tokens": 12}}]}}),
    ill("answers asked for after ####, written in tags", "strict-misses-right-answers", model="tutored", data="sevens", rollout=FORM,
        prompt={"system": "Answer after ####."}, training=steps(8), rewards=functions("correctness"), optimizer={"learning_rate": 1e-5}),
    ill("length paid above being right", "reward-against-the-answer", model="beginner", data="sevens", rollout=FORM, training=steps(12),
        rewards=functions({"function": "correctness", "weight": 0.1}, {"function": "long", "weight": 3}),
        optimizer={"learning_rate": 1e-5}),
    ill("a reward that pays for a letter", "reward-hacking answers-lost", model="pupil", data="sevens", rollout=FORM, training=steps(30),
        rewards=functions("sibilants"), optimizer={"learning_rate": 1e-3}, data_={"holdout": 20}, long=True,
        evaluation={"problems": 20, "every": 10, "at_start": True}),
    ill("digits are paid for", "reward-hacking", model="schooled", rewards=functions("figures"), training=steps(24),
        optimizer={"learning_rate": 4e-5}),
    ill("problems far too hard", "format-without-answer no-variance", model="schooled_a_little", training=steps(30),
        optimizer={"learning_rate": 3e-5}, data_={"arithmetic": {"operations": ["x"], "steps": 2, "largest_number": 99}},
        rollout={"max_completion_tokens": 64}),
)  # fmt: skip

WRITING = (
    ill("steps far too large", "mode-collapse kl-above-band rate-too-high", algorithm={"kl": {"beta": 0.01}}, training=steps(24),
        optimizer={"learning_rate": 3e-2}, quick=True),
    ill("steps too large, nothing to gain", "entropy-collapse", rewards=functions("one_letter"), training=steps(40),
        optimizer={"learning_rate": 1e-2}),
    ill("a tokenizer that names the wrong end", "goes-on", model="endless", data="sevens", training=steps(6),
        rollout={**FORM, "max_completion_tokens": 80}, rewards=functions("correctness", "format"), quick=True),
    ill("worked examples without their end (pad = eos masked)", "goes-on", model="smollm2", defect=no_end_token,
        warm_start={"steps": 12}, training=steps(12), rollout={"max_completion_tokens": 64}),
    ill("the same, tiny", "goes-on never-stops", data="sevens", defect=no_end_token, training=steps(12), optimizer=GENTLE,
        warm_start={"steps": 120, "learning_rate": 1e-2}, model="start", rewards=functions("correctness", "format"), long=True,
        rollout={**FORM, "max_completion_tokens": 80, "temperature": 0.5}),  # at 1 some processors draw an end now and then
    ill("a tokenizer that names the wrong end, once more", "talks-on", model="schooled_endless", training=steps(6),
        rollout={"max_completion_tokens": 64}),
    ill("length is paid, once more", "length-creep", model="schooled", training=steps(24), rollout={"max_completion_tokens": 96},
        rewards=functions("wordy"), optimizer={"learning_rate": 4e-5}),
    ill("a limit too short for what is written", "truncated", model="chatty", rollout={"max_completion_tokens": 5}, training=steps(12),
        rewards=functions("letters"), optimizer={"learning_rate": 1e-5}),
    ill("length is paid", "length-creep stops-stopping", model="chatty", rollout={"max_completion_tokens": 32}, training=steps(40),
        rewards=functions("long"), optimizer={"learning_rate": 1e-3}, long=True),
    ill("judged by problems that are trained on", "leakage-seen", change=leaking),
)  # fmt: skip

UPDATES = (
    ill("a KL penalty far too strong", "kl-below-band", algorithm={"kl": {"beta": 50.0}}, training=steps(32),
        optimizer={"learning_rate": 1e-5}),
    ill("a KL of the wrong sign", "kl-negative", algorithm={"kl": {"beta": 1e-4}}, training=steps(6), defect=wrong_sign),
    ill("four updates a batch at a rate of 0.03", "ratio-off", algorithm={"updates_per_batch": 4}, training=steps(12),
        optimizer={"learning_rate": 3e-2}, quick=True),
    ill("bfloat16 weights and nothing else, at 1e-6", "rate-too-low updates-lost", model="pupil", data="sevens", rollout=FORM,
        training=steps(8), rewards=functions("correctness", "format"), optimizer=PURE | {"learning_rate": 1e-6},
        model_={"dtype": "bfloat16"}),
    ill("the same at 1e-14", "no-movement rate-too-low updates-lost", algorithm={"kl": {"beta": 0.04}}, training=steps(12), quick=True,
        optimizer=PURE | {"learning_rate": 1e-14}, model_={"dtype": "bfloat16"}),
    ill("a rate of 1e18", "not-finite", optimizer={"learning_rate": 1e18, "max_grad_norm": None}, training=steps(5), quick=True),
    ill("one batch with a reward a thousandfold", "gradient-spikes", rewards=functions("spiking"), training=steps(20),
        algorithm={"preset": "dr_grpo"}),
    ill("the same, with a learned value", "loss-spikes", rewards=functions("spiking"), training=steps(20),
        algorithm={"preset": "ppo"}),
    ill("a value that learns too slowly", "value-biased", rewards=functions("rich"), training=steps(24),
        algorithm={"preset": "ppo", "value": {"learning_rate": 1e-7}}),
    ill("a value that learns far too fast", "value-harmful", training=steps(24),
        algorithm={"preset": "ppo", "value": {"learning_rate": 3.0}}),
    ill("a KL target that cannot be held", "kl-target-missed", training=steps(30), optimizer={"learning_rate": 1e-2},
        algorithm={"kl": {"beta": 0.01, "target": 1e-6, "gain": 3.0}}),
    ill("refilling among problems that are too hard", "refills-exhausted no-variance", rewards=functions("correctness"),
        training=steps(12), rollout={"refill_rounds": 2}),
    ill("the engine samples at another temperature", "sampler-mismatch", model="pupil", data="sevens", rollout=FORM, training=steps(6),
        rewards=functions("sibilants"), defect=another_temperature),
    ill("the same, with a correction", "correction-at-its-cap", model="pupil", data="sevens", rollout=FORM, training=steps(6),
        rewards=functions("sibilants"), algorithm={"correction": {"level": "token", "cap": 1.05}},
        defect=another_temperature),
    ill("samples four steps old at a high rate", "samples-too-old", training=steps(16), rollout={"ahead": 4},
        optimizer={"learning_rate": 2e-2}),
    ill("an adapter that never reaches the sampler", "sampler-stale", training=steps(24), optimizer={"learning_rate": 1e-2},
        rollout={"engine": "builtin"}, model_={"lora": {"rank": 4, "alpha": 8}}, defect=stranded_adapter, quick=True),
)  # fmt: skip

CALLS = {"tools": ["calculator"], "max_completion_tokens": 200, "max_turns": 4}
STILL = {"learning_rate": 1e-6}
EPISODES = (
    ill("tools that a random model does not know", "never-calls", model="caller", rollout=CALLS, training=steps(8), optimizer=STILL),
    ill("one call whatever was answered", "calls-in-a-loop", model="caller", rollout=CALLS, training=steps(8), optimizer=STILL,
        defect=asks("1 + 1")),
    ill("calls of a tool that is not there", "invalid-calls", model="caller", rollout=CALLS, training=steps(8), optimizer=STILL,
        defect=asks("{} * 3", name="calculater", often=2)),
    ill("questions that the tool raises at", "tool-errors", model="caller", rollout=CALLS, training=steps(8), optimizer=STILL,
        defect=asks("number {}", often=2)),
    ill("a reward for not calling", "reward-without-tool", model="caller", rollout=CALLS, training=steps(12), optimizer=STILL,
        rewards=functions("silence"), defect=asks("{} * 3", often=2)),
)  # fmt: skip

BEFORE = (
    ill("repeats, a contradiction and a leak", "duplicates contradictions leakage", data="muddled", before=True,
        change=lambda clinic: {"data": {"eval_source": str(clinic.sums_again)}, "rewards": functions("correctness")}),
    ill("a reward function that raises", "reward-fails", before=True, rewards=functions("fragile")),
    ill("a format reward for another format", "reward-blind", before=True, rewards=functions("boxed_format")),
    ill("rewards that ignore what follows the answer", "end-unpaid", before=True, model="smollm2",
        rewards=functions("correctness", "format")),
    ill("a limit of 12 tokens", "answer-does-not-fit", before=True, rewards=functions("correctness"), model="pupil", data="sevens",
        rollout={"max_completion_tokens": 12}),
    ill("a reward model that reads 12 tokens", "judge-reads-too-little", before=True, change=lambda clinic: {"rewards": {
        "functions": [{"model": {"name": str(clinic.judge), "device": "cpu", "max_input_tokens": 12}}]}}),
    ill("a tokenizer that names the wrong end", "end-token-untaught", before=True, model="endless", data="sevens",
        rewards=functions("correctness"), warm_start={"steps": 10}),
    ill("a batch of 800,000 completions in one pass", "memory-short", before=True, rewards=functions("correctness"),
        rollout={"prompts_per_step": 100_000, "completions_per_prompt": 8, "max_completion_tokens": 128},
        training={"micro_batch_tokens": 10**9}),
    ill("no problems held out", "reward-hacking-unseen", before=True, change=lambda clinic: {"data": {"holdout": 0}, "rewards":
        functions("correctness")}),
    ill("200 steps and no checkpoint", "no-checkpoints", before=True, rewards=functions("correctness"), training={"steps": 200}),
    ill("judged at 4 tokens", "evaluation-cut-shorter", before=True, rewards=functions("correctness"),
        evaluation={"max_completion_tokens": 4}),
    ill("a temperature of 0.1", "too-cold", before=True, rewards=functions("correctness"), rollout={"temperature": 0.1}),
    ill("top-p of 0.9", "sampled-distribution-cut", before=True, rewards=functions("correctness"), rollout={"top_p": 0.9}),
)  # fmt: skip

DISEASES = (*REWARDS, *WRITING, *UPDATES, *EPISODES, *BEFORE)
