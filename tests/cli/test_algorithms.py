"""``groupwise algorithms``: the table holds the presets' settings, and the JSON is what programs may rely on."""

import json
import subprocess
import sys

import pytest

from groupwise.config.algorithm import AlgorithmConfig
from groupwise.config.formula import formula
from groupwise.config.presets import PRESETS
from groupwise.config.section import shown as written

KEYS = ["name", "title", "paper", "url", "summary", "beyond", "settings", "choices", "formula"]
CHOICES = ["baseline", "scale", "ratio", "surrogate", "clip_range", "aggregation", "kl"]


def test_every_preset_is_listed_for_people_and_for_programs(groupwise):
    listed = json.loads(groupwise("algorithms", "--json").stdout)
    assert [row["name"] for row in listed] == list(PRESETS)
    for row in listed:
        assert list(row) == KEYS
        assert list(row["choices"]) == CHOICES
        assert row["settings"] == dict(PRESETS[row["name"]].values)
        assert row["url"] == f"https://arxiv.org/abs/{PRESETS[row['name']].paper}"
        assert AlgorithmConfig(**row["settings"]) == AlgorithmConfig(preset=row["name"]).model_copy(update={"preset": "grpo"})
    shown = groupwise("algorithms").stdout
    assert all(name in shown and preset.paper in shown for name, preset in PRESETS.items())


def test_the_json_of_one_preset_as_promised(groupwise):
    assert json.loads(groupwise("algorithms", "dapo", "--json").stdout) == {
        "name": "dapo",
        "title": "DAPO",
        "paper": "2503.14476",
        "url": "https://arxiv.org/abs/2503.14476",
        "summary": PRESETS["dapo"].summary,
        "beyond": PRESETS["dapo"].beyond,
        "settings": {
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {"type": "clip", "epsilon": 0.2, "epsilon_high": 0.28, "aggregation": "token_mean"},
            "kl": None,
        },
        "choices": {
            "baseline": "group mean",
            "scale": "group std",
            "ratio": "token",
            "surrogate": "clip",
            "clip_range": "0.2 down, 0.28 up",
            "aggregation": "token_mean",
            "kl": "none",
        },
        "formula": [
            "A_i   = (r_i - mean(rewards of the group)) / (std(rewards of the group) + 0.0001)",
            "w     = pi(o_it) / pi_old(o_it)",
            "L_it  = -min(w A, clip(w, 0.8, 1.28) A)",
            "loss  = sum_i sum_t L_it / sum_i |o_i|",
        ],
    }


@pytest.mark.parametrize("name", PRESETS)
def test_one_preset_shows_its_formula_and_its_settings(groupwise, name):
    shown = groupwise("algorithms", name).stdout
    assert all(f"  {line}\n" in shown for line in formula(AlgorithmConfig(preset=name)))
    assert all(f"  algorithm.{setting}={written(value)}\n" in shown for setting, value in PRESETS[name].settings.items())


def test_an_unknown_preset_is_refused_with_the_nearest(groupwise):
    refused = groupwise("algorithms", "dapoo")
    assert refused.exit_code == 2
    assert "dapoo is not a preset: did you mean dapo?" in refused.stderr
    assert "choose one of grpo, dr_grpo" in groupwise("algorithms", "xyz").stderr


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"preset": "rloo"}, "r_i   = reward_i - sum_t 0.03 k1_it"),
        ({"preset": "rloo"}, "k1_it = log pi_old(o_it) - log pi_ref(o_it)"),
        ({"preset": "rloo"}, "A_i   = r_i - mean(rewards of the others in the group)"),
        ({"preset": "reinforce++"}, "r_it  = reward_i - sum_(s >= t) 0.01 k1_is"),
        ({"preset": "gspo"}, "w     = (pi(o_i) / pi_old(o_i))^(1/|o_i|), one for the whole completion"),
        ({"preset": "cispo"}, "L_it  = -clip(w, 0, 5) A log pi(o_it), with no gradient through the weight"),
        ({"loss": {"dual_clip": 3}}, "L_it  = -min(w A, clip(w, 0.8, 1.2) A), and at most -3 A where A < 0"),
        ({"kl": {"importance_weighted": True}}, "L_it += 0.04 w k3_it"),
        ({"kl": {"importance_weighted": True}, "loss": {"type": "gmpo"}}, "L_it += 0.04 w k3_it"),
        ({"kl": {"importance_weighted": True}, "loss": {"type": "vespo"}}, "L_it += 0.04 u k3_it"),
        ({"kl": {"importance_weighted": True}, "loss": {"type": "vespo"}}, "u     = pi(o_it) / pi_old(o_it)"),
        ({"kl": {"importance_weighted": True}, "loss": {"type": "reinforce"}}, "u     = pi(o_it) / pi_old(o_it)"),
        (
            {"preset": "ppo", "advantage": {"gamma": 0.9}},
            "A_it  = sum_(s >= t) 0.855^(s-t) delta_is, whitened: (A - mean) / (std + 0.0001)",
        ),
        ({"preset": "ppo", "advantage": {"gamma": 0.9}}, "delta_it = r_it + 0.9 V_i,t+1 - V_it, V = 0 after the last token"),
        ({"preset": "ppo", "value": {"clip": None}}, "value = 0.1 x mean over tokens of (V - R)^2 / 2"),
        ({"loss": {"type": "sapo"}}, "L_it  = -4 / tau sigmoid(tau (w - 1)) A, tau = 1 where A > 0, else 1.05"),
        (
            {"loss": {"type": "vespo"}},
            "L_it  = -w^k exp(l (1 - w)) A log pi(o_it), with no gradient through the weight; k, l = 2, 3 where",
        ),
        ({"loss": {"type": "vespo"}}, "w     = pi(o_i) / pi_old(o_i), one for the whole completion"),
        ({"loss": {"type": "dppo"}}, "L_it  = -m w A, with m = 0 where w A would grow and tv(pi, pi_old) > 0.15, else 1"),
        ({"loss": {"type": "topr"}}, "w     = pi(o_i) / pi_old(o_i), one for the whole completion"),
        ({"loss": {"type": "gmpo"}}, "w     = pi(o_it) / pi_old(o_it)"),
        ({"loss": {"type": "sapo"}}, "w     = pi(o_it) / pi_old(o_it)"),
        ({"loss": {"type": "topr"}}, "L_it  = -c A log pi(o_it), with no gradient through c = 1 where A >= 0, else min(w, 1)"),
        (
            {"loss": {"type": "gmpo"}},
            "L_it  = -exp(1/|o_i| sum_t x_it) A, with x_it the smaller of log w and clip(log w, -0.4, 0.4)",
        ),
        ({"advantage": {"type": "maxrl"}}, "A_i   = (r_i - mean(rewards of the group)) / (mean(rewards of the group) + 0.0001)"),
        ({"advantage": {"type": "gdpo"}}, "A_i   = (S_i - mean(S of the batch)) / (std(S of the batch) + 0.0001)"),
        ({"advantage": {"baseline": "none", "scale": "none"}, "loss": {"aggregation": "sequence_sum"}}, "A_i   = r_i"),
    ],
)
def test_the_formula_follows_the_settings(settings, line):
    assert any(one.startswith(line) for one in formula(AlgorithmConfig(**settings)))


def test_the_table_needs_no_torch():
    code = (
        "import sys; from groupwise.cli import app; app(['algorithms'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
