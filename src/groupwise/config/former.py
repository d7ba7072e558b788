"""The settings of the objective before 0.2.0, all in ``algorithm`` itself: where each is now, and how those of a run's folder are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FORMER", "former_key", "in_sections"]

FORMER = {
    "epsilon": "algorithm.loss.epsilon",
    "epsilon_high": "algorithm.loss.epsilon_high",
    "dual_clip": "algorithm.loss.dual_clip",
    "delta": "algorithm.loss.dual_clip, which is the same cap",
    "ratio_level": "algorithm.loss.ratio",
    "surrogate": "algorithm.loss.type",
    "aggregation": "algorithm.loss.aggregation",
    "baseline": "algorithm.advantage.baseline, and for a learned value algorithm.advantage.type=gae",
    "scale": "algorithm.advantage.scale, and with a learned value algorithm.advantage.whiten",
    "advantage_epsilon": "algorithm.advantage.epsilon",
    "gamma": "algorithm.advantage.gamma, of type gae",
    "gae_lambda": "algorithm.advantage.lam, of type gae",
    "beta": "algorithm.kl.beta, and in place of 0 algorithm.kl=null",
    "kl_estimator": "algorithm.kl.estimator",
    "kl_placement": "algorithm.kl.placement",
    "kl_correction": "algorithm.kl.importance_weighted",
    "kl_target": "algorithm.kl.target",
    "kl_gain": "algorithm.kl.gain",
    "skip_zero_variance": "algorithm.kl.skip_zero_variance",
    "reference_updates": "algorithm.kl.reference_updates",
    "reference_every": "algorithm.kl.reference_every",
    "reference_mixing": "algorithm.kl.reference_mixing",
    "sampler_correction": "algorithm.correction.level, and in place of none algorithm.correction=null",
    "sampler_correction_mode": "algorithm.correction.mode",
    "sampler_correction_cap": "algorithm.correction.cap",
    "entropy_bonus": "algorithm.entropy.bonus, and in place of 0 algorithm.entropy=null",
    "entropy_floor": "algorithm.entropy.floor",
    "top_entropy_share": "algorithm.entropy.top_share",
    "critic": "algorithm.value.critic",
    "critic_learning_rate": "algorithm.value.critic_learning_rate",
    "value_learning_rate": "algorithm.value.learning_rate",
    "value_clip": "algorithm.value.clip",
    "value_loss_weight": "algorithm.value.loss_weight",
    "value_trains_trunk": "algorithm.value.trains_trunk",
}
"""Settings that stood in ``algorithm`` itself before 0.2.0, and where each is now."""


def former_key(name: str) -> str:
    """The sentence for a setting that stood in ``algorithm`` itself."""
    return f"algorithm.{name} has moved: write {FORMER[name]}"


def in_sections(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """``algorithm`` as an earlier version wrote it into a run's folder, in sections; what had no effect there is left out."""
    if not FORMER.keys() & algorithm.keys():
        return dict(algorithm)
    kept = {name: value for name, value in algorithm.items() if name not in FORMER}
    old = {name: value for name, value in algorithm.items() if name in FORMER}
    learned, kind = old.get("baseline") == "value", old.get("surrogate", "clip")
    cap = old.get("dual_clip") or old.get("delta")
    sections: dict[str, Any] = {
        "advantage": {"type": "gae", "whiten": old.get("scale") == "batch_std"} | _taken(old, gamma="gamma", gae_lambda="lam")
        if learned
        else {"type": "group"} | _taken(old, baseline="baseline", scale="scale"),
        "loss": {"type": kind} | _taken(old, aggregation="aggregation"),
        "kl": None,
        "correction": None,
        "entropy": None,
    }
    if old.get("scale") == "batch_std" if learned else old.get("scale") != "none":
        sections["advantage"] |= _taken(old, advantage_epsilon="epsilon")
    if kind != "reinforce":
        sections["loss"] |= _taken(old, ratio_level="ratio", epsilon="epsilon", epsilon_high="epsilon_high")
        sections["loss"] |= {"dual_clip": cap} if kind == "clip" else {}
    if old.get("beta", 0.04):
        sections["kl"] = _taken(
            old, beta="beta", kl_estimator="estimator", kl_placement="placement", kl_target="target",
            reference_every="reference_every", reference_mixing="reference_mixing",
        )  # fmt: skip
        in_loss = old.get("kl_placement", "loss") == "loss"
        sections["kl"] |= _taken(old, skip_zero_variance="skip_zero_variance") if in_loss else {}
        sections["kl"] |= _taken(old, reference_updates="reference_updates") if old.get("reference_every") != 1 else {}
        sections["kl"] |= _taken(old, kl_gain="gain") if old.get("kl_target") else {}
        sections["kl"] |= _taken(old, kl_correction="importance_weighted") if in_loss else {}
    if old.get("sampler_correction", "none") != "none":
        words = {"sampler_correction": "level", "sampler_correction_mode": "mode", "sampler_correction_cap": "cap"}
        sections["correction"] = _taken(old, **words)
    if old.get("entropy_bonus") or old.get("top_entropy_share", 1.0) != 1:
        sections["entropy"] = _taken(old, entropy_bonus="bonus", entropy_floor="floor", top_entropy_share="top_share")
    if learned:
        shared = old.get("critic", "shared") == "shared"
        one = {"value_trains_trunk": "trains_trunk"} if shared else {"critic_learning_rate": "critic_learning_rate"}
        words = {"value_learning_rate": "learning_rate", "value_clip": "clip", "value_loss_weight": "loss_weight"}
        sections["value"] = _taken(old, critic="critic", **words, **one)
    return sections | kept


def _taken(old: Mapping[str, Any], **places: str) -> dict[str, Any]:
    """The settings among ``places`` (former name=name in its section) that were written."""
    return {new: old[name] for name, new in places.items() if name in old}
