"""Each objective that TRL also has, against TRL's own loss: its trainer's ``_compute_loss`` on the same tensors, loss and gradient.

Skipped where TRL is not installed (``pip install -e ".[bench]"``). Written against TRL 1.16.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.algorithm import BatchCounts, Objective, group_advantages, policy_loss, sampler_correction
from groupwise.config.schema import AlgorithmConfig
from groupwise.models.module_scorer import ModuleScorer
from groupwise.trl import GRPOConfig
from groupwise.trl.parts import objective as groupwise_objective

trl = pytest.importorskip("trl", minversion="1.16")
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

G, GROUPS, LONGEST = 3, 2, 9
N = G * GROUPS
REWARDS = [[1.0, 0.0, 0.4], [2.8, 1.5, 1.5]]
PROMPTS = [[5, 6, 7, 8], [9, 10]]


@dataclass
class Given:
    """One batch: a tensor per quantity, ``[N, LONGEST]``, padded on the right, and ``mask`` of what was sampled."""

    ids: Tensor
    mask: Tensor
    logprobs: Tensor
    old: Tensor
    reference: Tensor
    sampled: Tensor
    advantages: Tensor

    def flat(self, padded: Tensor) -> Tensor:
        return padded[self.mask.bool()]

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    @property
    def sequence(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.mask)), self.lengths)

    def rows(self, part: slice) -> Given:
        return Given(**{name: value[part] for name, value in vars(self).items()})


def given(seed: int = 0, drift: float = 0.3) -> Given:
    """Ragged completions; ``drift`` is how far the policy has moved from the one that sampled, in nats per token."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (N,), generator=random)
    lengths[0] = LONGEST
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    noise = torch.randn(3, N, LONGEST, generator=random, dtype=torch.float64)
    old = -3 * torch.rand(N, LONGEST, generator=random, dtype=torch.float64) - 0.05
    advantages = group_advantages(REWARDS)
    return Given(
        ids=torch.randint(5, 60, (N, LONGEST), generator=random),
        mask=mask,
        logprobs=old + drift * noise[0],
        old=old,
        reference=old + 0.3 * noise[1],
        sampled=old + 0.4 * noise[2],
        advantages=torch.tensor([a for group in advantages for a in group], dtype=torch.float64),
    )


@pytest.fixture(scope="module")
def make(shared_data, tmp_path_factory):
    """A real trainer of TRL's on a tiny random Qwen2 model; ``settings`` are those of its config."""
    folder = str(tmp_path_factory.mktemp("trl"))
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "qwen2.5-tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.15,
            tie_word_embeddings=False,
        )
        Qwen2ForCausalLM(small).save_pretrained(folder)

    def made(kind: str = "GRPO", rewards: list[float] | None = None, **settings: Any) -> Any:
        source = importlib.import_module("trl.experimental.gmpo") if kind == "GMPO" else trl
        arguments = getattr(source, f"{kind}Config")(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=N,
            num_generations=G,
            max_completion_length=LONGEST,
            # the KL times the ratio is TRL's default, and ours is DeepSeekMath's KL: both are compared
            **(({"use_bias_correction_kl": False} if kind == "GRPO" else {}) | settings),
        )
        trainer = getattr(source, f"{kind}Trainer")(
            model=Qwen2ForCausalLM.from_pretrained(folder),
            reward_funcs=lambda completions, **columns: (rewards or [0.0] * N)[: len(completions)],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["one", "two"] * 4}),
            processing_class=tokenizer,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
        return trainer

    return made


def inputs_for(g: Given, **more: Tensor) -> dict[str, Tensor]:
    """What TRL's trainer hands to its own loss; prompts are padded on the left."""
    widest = max(map(len, PROMPTS))
    prompts = [PROMPTS[n // G] for n in range(len(g.ids))]
    return {
        "prompt_ids": torch.tensor([[0] * (widest - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": g.ids,
        "completion_mask": g.mask,
        "advantages": g.advantages,
        "old_per_token_logps": g.old,
        "ref_per_token_logps": g.reference,
        "num_items_in_batch": g.mask.sum(),
        **more,
    }


def theirs(
    trainer: Any, g: Given, monkeypatch: pytest.MonkeyPatch, entropies: Tensor | None = None, **more: Tensor
) -> tuple[float, Tensor]:
    """TRL's loss with ``g.logprobs`` in the place of its model's, in float64, and its gradient in them (sampled tokens only)."""
    leaf = g.logprobs.clone().requires_grad_()
    monkeypatch.setattr(
        trainer,
        "_get_per_token_logps_and_entropies",
        lambda *a, **k: (leaf, torch.zeros_like(leaf) if entropies is None else entropies, None),
        raising=True,
    )
    loss = trainer._compute_loss(trainer.model, inputs_for(g, **more))
    loss.backward()
    return loss.item(), g.flat(leaf.grad)


def ours(
    settings: dict[str, Any] | Objective, g: Given, counts: BatchCounts | None = None, **more: Tensor
) -> tuple[float, Tensor]:
    objective = settings if isinstance(settings, Objective) else Objective.from_config(AlgorithmConfig(**settings))
    counts = counts or BatchCounts(completions=len(g.ids), tokens=int(g.mask.sum()), max_tokens=LONGEST)
    leaf = g.flat(g.logprobs).clone().requires_grad_()
    loss, _ = policy_loss(
        objective,
        logprobs_T=leaf,
        old_logprobs_T=g.flat(g.old),
        reference_logprobs_T=g.flat(g.reference),
        advantages_N=g.advantages,
        sequence_T=g.sequence,
        weights_T=objective.weights(g.lengths, g.sequence, counts, torch.float64),
        **more,
    )
    loss.backward()
    return loss.item(), leaf.grad


SAME = {
    "grpo": ({"loss_type": "grpo", "beta": 0.04}, {"preset": "grpo"}),
    "grpo without KL": ({"loss_type": "grpo", "beta": 0.0}, {"preset": "grpo", "kl": None}),
    "grpo, corrected KL": (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True},
        {"preset": "grpo", "kl": {"importance_weighted": True}},
    ),
    "bnpo": ({"loss_type": "bnpo"}, {"preset": "bnpo"}),
    "bnpo with KL": ({"loss_type": "bnpo", "beta": 0.1}, {"preset": "bnpo", "kl": {"beta": 0.1}}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"preset": "dr_grpo"}),
    "dr_grpo with KL": ({"loss_type": "dr_grpo", "beta": 0.1}, {"preset": "dr_grpo", "kl": {"beta": 0.1}}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"preset": "dapo"}),
    "dapo with KL": ({"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1}, {"preset": "dapo", "kl": {"beta": 0.1}}),
    # TRL's epsilon_high is the largest weight itself here, ours is how far it is above 1, as everywhere else
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, {"preset": "cispo"}),
    "cispo with KL": (
        {"loss_type": "cispo", "epsilon_high": 2.0, "beta": 0.1},
        {"preset": "cispo", "loss": {"epsilon_high": 1.0}, "kl": {"beta": 0.1}},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"preset": "gspo"},
    ),
    "gspo with KL": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.1},
        {"preset": "gspo", "kl": {"beta": 0.1}},
    ),
    "gspo, corrected KL": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
            "beta": 0.1,
            "use_bias_correction_kl": True,
        },
        {"preset": "gspo", "kl": {"beta": 0.1, "importance_weighted": True}},
    ),
    "luspo": (  # LUSPO is a point of the grid: a ratio per completion, its tokens added up
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss": {"ratio": "sequence", "aggregation": "sequence_sum"}, "kl": None},
    ),
    "sequence ratio, fixed denominator": (
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
        {"preset": "dr_grpo", "loss": {"ratio": "sequence"}},
    ),
    "two-sided delta": ({"loss_type": "grpo", "delta": 1.5, "beta": 0.04}, {"preset": "grpo", "loss": {"dual_clip": 1.5}}),
    "two-sided delta, token mean": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.3},
        {"preset": "dapo", "loss": {"dual_clip": 1.3}},
    ),
    # TRL rounds its temperatures to fp32, which 1 survives
    "sapo": ({"loss_type": "sapo", "sapo_temperature_neg": 1.0}, {"preset": "sapo", "loss": {"tau_negative": 1.0}}),
    "vespo": ({"loss_type": "vespo"}, {"preset": "vespo"}),
    "two-sided delta is the dual clip": ({"loss_type": "grpo", "delta": 1.5}, {"loss": {"dual_clip": 1.5}, "kl": None}),
}
DRIFT = {"gspo": 1e-3, "gspo with KL": 1e-3, "gspo, corrected KL": 1e-3, "cispo": 1.5}


@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradient_are_trls(name, make, monkeypatch):
    trainer = make(**SAME[name][0])
    for seed in range(3):
        g = given(seed, DRIFT.get(name, 0.3))
        loss, gradient = ours(SAME[name][1], g)
        expected, expected_gradient = theirs(trainer, g, monkeypatch)
        assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
        assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gmpo_is_trls(beta, make, monkeypatch):
    trainer = make("GMPO", beta=beta)
    for seed in range(3):
        g = given(seed)
        loss, gradient = ours({"preset": "gmpo", "kl": {"beta": beta} if beta else None}, g)
        expected, expected_gradient = theirs(trainer, g, monkeypatch)
        assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
        assert gradient.abs().max() > 1e-3


BY_ARGUMENTS = {
    "sapo": {"loss_type": "sapo"},
    "sapo of completions, corrected KL": {
        "loss_type": "sapo", "importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True,
        "sapo_temperature_pos": 2.0,
    },
    "vespo": {"loss_type": "vespo"},
    "vespo, corrected KL": {"loss_type": "vespo", "beta": 0.1, "use_bias_correction_kl": True, "vespo_k_neg": 1.0, "vespo_lambda_pos": 0.5},
    "cispo without a bound of its own": {"loss_type": "cispo"},
    "a clip range of 0": {"loss_type": "grpo", "epsilon": 0.0},
    "what has drifted is left out": {"loss_type": "grpo", "off_policy_mask_threshold": 0.05, "beta": 0.1},
    "the same for dapo": {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    "a sequence ratio": {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon": 0.01},
    "gspo of tokens of high entropy": {"loss_type": "grpo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.4},
    "tokens of high entropy": {"loss_type": "sapo", "top_entropy_quantile": 0.4, "beta": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", BY_ARGUMENTS)
def test_what_groupwise_trl_makes_of_arguments_is_trls_loss(name, make, monkeypatch):
    """Also where some tokens are left out of a sequence-level ratio: its gradient runs into all of the completion's tokens."""
    arguments = {"use_bias_correction_kl": False, **BY_ARGUMENTS[name]}
    trainer = make(**arguments)
    objective = groupwise_objective(GRPOConfig("out", **arguments))
    for seed in range(3):
        g = given(seed)
        entropies = torch.rand(N, LONGEST, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        kept = arguments.get("top_entropy_quantile", 1.0)
        mask = entropies >= torch.quantile(g.flat(entropies).float(), 1 - kept) if kept < 1 else torch.ones_like(entropies)
        expected, expected_gradient = theirs(trainer, g, monkeypatch, entropies=entropies)
        loss, gradient = ours(objective, g, factor_T=g.flat(mask.double()))
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-9)  # TRL's temperatures and powers are rounded to fp32
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-9)
        assert gradient.abs().max() > 1e-4


def test_on_policy_too(make, monkeypatch):
    """Without old logprobs TRL takes its own, detached; so do we."""
    g = given(1)
    trainer = make(loss_type="grpo", beta=0.04)
    expected, expected_gradient = theirs(trainer, g, monkeypatch, old_per_token_logps=None)
    g.old = g.logprobs
    loss, gradient = ours({}, g)
    assert loss == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


def test_the_correction_for_another_sampler_is_trls(make, monkeypatch):
    """TRL computes pi_old / mu where it asks vLLM for samples; its loss takes the factor ready-made, as ours does."""
    g = given(2)
    trainer = make(loss_type="dapo", beta=0.1, epsilon_high=0.28)
    monkeypatch.setattr(trainer, "use_vllm", True)
    monkeypatch.setattr(trainer, "vllm_importance_sampling_correction", True)
    for level in ("token", "sequence"):
        factor_T, _ = sampler_correction(g.flat(g.old), g.flat(g.sampled), g.sequence, N, level=level, mode="mask", high=1.3)
        padded = torch.zeros_like(g.old)
        padded[g.mask.bool()] = factor_T
        expected, expected_gradient = theirs(trainer, g, monkeypatch, importance_sampling_ratio=padded)
        loss, gradient = ours({"preset": "dapo", "kl": {"beta": 0.1}}, g, factor_T=factor_T)
        assert loss == pytest.approx(expected, rel=1e-10)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_the_gradient_of_the_weights_is_trls(name, make):
    """No stand-in: TRL's trainer runs its own forward pass, we score the same completions with ours; fp32 on both sides."""
    trainer = make(**SAME[name][0])
    ours_model = copy.deepcopy(trainer.model)
    ours_model.__dict__.pop("forward", None)  # TRL replaces it on the instance
    scorer = ModuleScorer(ours_model)
    g = given(4)
    packed = scorer.prepare(
        [(PROMPTS[p], [g.ids[p * G + i, : g.lengths[p * G + i]].tolist() for i in range(G)]) for p in range(GROUPS)]
    )
    logprobs_T = scorer.logprobs(packed, 1.0)
    drift = {"gspo": 1e-3}.get(name, 0.3)
    noise_T = torch.randn(2, len(logprobs_T), generator=torch.Generator().manual_seed(9))
    old_logprobs_T, reference_logprobs_T = logprobs_T.detach() + drift * noise_T[0], logprobs_T.detach() + 0.3 * noise_T[1]
    for padded, flat in ((g.old, old_logprobs_T), (g.reference, reference_logprobs_T)):
        padded[g.mask.bool()] = flat.double()
    objective = Objective.from_config(AlgorithmConfig(**SAME[name][1]))
    counts = BatchCounts(completions=N, tokens=int(g.mask.sum()), max_tokens=LONGEST)
    loss, _ = policy_loss(
        objective,
        logprobs_T=logprobs_T,
        old_logprobs_T=old_logprobs_T,
        reference_logprobs_T=reference_logprobs_T,
        advantages_N=g.advantages,
        sequence_T=packed.sequence_T,
        weights_T=objective.weights(packed.lengths_N, packed.sequence_T, counts),
    )
    loss.backward()
    g.old, g.reference, g.advantages = g.old.float(), g.reference.float(), g.advantages.float()
    expected = trainer._compute_loss(trainer.model, inputs_for(g))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    largest = max(p.grad.abs().max().item() for p in trainer.model.parameters())
    assert largest > 1e-3
    for (n, mine), other in zip(ours_model.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5 * largest, msg=lambda m, n=n: f"{n}: {m}")


# Where we differ on purpose


def test_bnpo_depends_on_how_trl_cuts_the_batch_and_ours_does_not(make, monkeypatch):
    """TRL divides each micro-batch by its own tokens and averages: a token weighs more in a micro-batch of short completions.
    Our denominator is that of the whole batch, so two halves add up to the whole."""
    g = given(0)
    counts = BatchCounts(completions=N, tokens=int(g.mask.sum()), max_tokens=LONGEST)
    halves = [g.rows(slice(0, 3)), g.rows(slice(3, 6))]
    assert halves[0].mask.sum() != halves[1].mask.sum()
    whole, _ = theirs(make(loss_type="bnpo"), g, monkeypatch)
    trainer = make(loss_type="bnpo", gradient_accumulation_steps=2)
    cut = sum(theirs(trainer, half, monkeypatch)[0] for half in halves)
    assert abs(cut - whole) > 1e-3
    assert sum(ours({"preset": "bnpo"}, half, counts)[0] for half in halves) == pytest.approx(whole, rel=1e-10)
    # dapo is the one of TRL's that does the same as we do: its denominator is known before the batch is cut
    trainer = make(loss_type="dapo", epsilon_high=0.28, gradient_accumulation_steps=2)
    total = {"num_items_in_batch": g.mask.sum()}
    cut = sum(theirs(trainer, half, monkeypatch, **total)[0] for half in halves)
    assert cut == pytest.approx(ours({"preset": "dapo"}, g)[0], rel=1e-10)


def test_cispo_here_also_has_a_lower_bound(make, monkeypatch):
    """TRL never bounds the weight from below; here epsilon does, and the preset's epsilon of 1 is no bound, as in the paper."""
    g = given(3, drift=1.5)
    expected, _ = theirs(make(loss_type="cispo", epsilon=0.2, epsilon_high=5.0), g, monkeypatch)
    assert ours({"preset": "cispo"}, g)[0] == pytest.approx(expected, rel=1e-10)
    assert abs(ours({"preset": "cispo", "loss": {"epsilon": 0.2}}, g)[0] - expected) > 1e-3


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_that_overflows_there_is_finite_here(level, make, monkeypatch):
    """exp of a large log-ratio: beyond e^20 we cut it, TRL's becomes infinite (fp32 beyond e^88) and its loss with it."""
    g = given(0)
    g.logprobs = (g.old + torch.where(g.advantages[:, None] < 0, 100.0, 0.0)).float()
    g.old, g.reference, g.advantages = g.old.float(), g.reference.float(), g.advantages.float()
    expected, _ = theirs(make(loss_type="grpo", importance_sampling_level=level), g, monkeypatch)
    assert not torch.tensor(expected).isfinite()
    loss, gradient = ours({"kl": None, "loss": {"ratio": level}}, g)
    assert torch.tensor(loss).isfinite()
    assert gradient.isfinite().all()


def test_rloo_has_the_same_gradient_on_policy_and_another_loss_value(make, monkeypatch):
    """TRL's RLOO clips the ratio of the whole completion (the product over its tokens), ours is the paper's REINFORCE, without any
    ratio. On-policy, where RLOO is derived, ratio and log-probability have one gradient; the loss values are different numbers."""
    g = given(5)
    g.old = g.logprobs
    leaf = g.logprobs.clone().requires_grad_()
    trainer = make("RLOO", beta=0.0)
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *a, **k: (leaf, torch.zeros_like(leaf), None))
    old_N = (g.old * g.mask).sum(1)
    loss = trainer._compute_loss(trainer.model, inputs_for(g, old_logps=old_N))
    loss.backward()
    value, gradient = ours({"preset": "rloo", "kl": None}, g)
    torch.testing.assert_close(gradient, g.flat(leaf.grad), rtol=1e-9, atol=1e-12)
    assert abs(value - loss.item()) > 1e-2


@pytest.mark.parametrize(("trls", "scale"), [("group", "group_std"), ("batch", "batch_std"), ("none", "none")])
def test_advantages_are_trls(trls, scale, make):
    """From its own sampling and scoring, with rewards that we choose; its tensors are fp32."""
    trainer = make(scale_rewards=trls, rewards=[r for group in REWARDS for r in group])
    batch = trainer._generate_and_score_completions([{"prompt": p} for p in ("one", "two") for _ in range(G)])
    expected = group_advantages(REWARDS, scale=scale)
    assert batch["advantages"].tolist() == pytest.approx([a for group in expected for a in group], rel=1e-5, abs=1e-6)


def test_advantages_of_rloo_are_trls(make):
    trainer = make("RLOO", beta=0.0, normalize_advantages=False, rewards=[r for group in REWARDS for r in group])
    batch = trainer._generate_and_score_completions([{"prompt": p} for p in ("one", "two") for _ in range(G)])
    expected = group_advantages(REWARDS, "leave_one_out", "none")
    assert batch["advantages"].tolist() == pytest.approx([a for group in expected for a in group], rel=1e-5, abs=1e-6)


def test_every_loss_of_trls_is_compared():
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    named = {
        n for list_ in re.findall(r"self\.loss_type (?:==|in) (\[[^\]]*\]|\"\w+\")", source) for n in re.findall(r"\w+", list_)
    }
    assert named == {settings["loss_type"] for settings in [*(s for s, _ in SAME.values()), *BY_ARGUMENTS.values()]}
