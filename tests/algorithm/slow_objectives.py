"""The published objectives as slow loops over numpy scalars, each written from its paper: the oracle for the product's tensors.

A batch is a list of groups; a group is a list of completions; a completion is its tokens' log-probabilities. Every function
returns the *loss*, the paper's objective with its sign turned. ``held`` stands for the policy inside a stop-gradient, so that a
finite difference in ``lp`` sees what autograd sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Ragged = list[list[np.ndarray]]


@dataclass
class Batch:
    rewards: list[list[float]]
    lp: Ragged
    old: Ragged
    ref: Ragged
    values: Ragged
    """What the critic said of each token's state when the batch was sampled."""
    second: list[list[float]]
    """Scores of a second reward function, of weight 0.5, which ``rewards`` does not hold."""
    max_tokens: int = 9


def random_batch(seed: int, drift: float, groups: int = 3) -> Batch:
    """Groups of 2 to 4 completions of 1 to 8 tokens; ``drift`` is the spread of log pi - log pi_old."""
    rng = np.random.default_rng(seed)
    rewards, lp, old, ref = [], [], [], []
    for _ in range(groups):
        lengths = rng.integers(1, 9, size=rng.integers(2, 5))
        rewards.append([float(x) for x in rng.choice([0.0, 0.4, 1.5, 2.8], size=len(lengths))])
        old.append([-rng.uniform(0.05, 4.0, size=n) for n in lengths])
        lp.append([o + drift * rng.standard_normal(len(o)) for o in old[-1]])
        ref.append([o + 0.3 * rng.standard_normal(len(o)) for o in old[-1]])
    rewards[0] = [0.0] * (len(rewards[0]) - 1) + [2.8]  # at least one group has something to say
    values = [[rng.standard_normal(len(o)) for o in group] for group in old]
    second = [[float(x) for x in rng.choice([0.0, 1.0, 5.0], size=len(group))] for group in rewards]
    return Batch(rewards, lp, old, ref, values, second)


def normalised(r: list[float], eps: float = 1e-4) -> list[float]:
    mean = sum(r) / len(r)
    std = (sum((x - mean) ** 2 for x in r) / (len(r) - 1)) ** 0.5
    return [(x - mean) / (std + eps) for x in r]


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def ppo_term(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def grpo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2402.03300 eq. 3 and 4, epsilon 0.2, beta 0.04, averaged over all completions of the batch."""
    total, n = 0.0, 0
    for g, r in enumerate(b.rewards):
        for i, a in enumerate(normalised(r)):
            inner = 0.0
            for t in range(len(lp[g][i])):
                ratio = np.exp(lp[g][i][t] - b.old[g][i][t])
                x = np.exp(b.ref[g][i][t]) / np.exp(lp[g][i][t])
                inner += ppo_term(ratio, a, 0.2, 0.2) - 0.04 * (x - np.log(x) - 1)
            total, n = total + inner / len(lp[g][i]), n + 1
    return -total / n


def _clipped_tokens(b: Batch, lp: Ragged, advantages: list, low: float, high: float, denominator: float) -> float:
    total = 0.0
    for g, group in enumerate(lp):
        for i, tokens in enumerate(group):
            for t in range(len(tokens)):
                a = advantages[g][i]
                a = a[t] if isinstance(a, list) else a
                total += ppo_term(np.exp(tokens[t] - b.old[g][i][t]), a, low, high)
    return -total / denominator


def _tokens(lp: Ragged) -> int:
    return sum(len(tokens) for group in lp for tokens in group)


def dr_grpo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2503.20783: no std, and the constant token budget in place of |o_i|."""
    advantages = [[x - sum(r) / len(r) for x in r] for r in b.rewards]
    return _clipped_tokens(b, lp, advantages, 0.2, 0.2, sum(map(len, b.rewards)) * b.max_tokens)


def dapo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2503.14476 eq. 8, the token mean over the whole batch."""
    return _clipped_tokens(b, lp, [normalised(r) for r in b.rewards], 0.2, 0.28, _tokens(lp))


def bnpo(b: Batch, lp: Ragged, held: Ragged) -> float:
    return _clipped_tokens(b, lp, [normalised(r) for r in b.rewards], 0.2, 0.2, _tokens(lp))


def gspo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2507.18071 eq. 5 to 7: differentiated as written, without any stop-gradient."""
    total, n = 0.0, 0
    for g, r in enumerate(b.rewards):
        for i, a in enumerate(normalised(r)):
            s = np.exp(sum(lp[g][i] - b.old[g][i]) / len(lp[g][i]))
            total, n = total + ppo_term(s, a, 3e-4, 4e-4), n + 1
    return -total / n


def cispo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2506.13585 eq. 4 and 5: no lower bound on the weight, an upper one of 5."""
    total = 0.0
    for g, r in enumerate(b.rewards):
        for i, a in enumerate(normalised(r)):
            for t in range(len(lp[g][i])):
                weight = min(np.exp(held[g][i][t] - b.old[g][i][t]), 5.0)
                total += weight * a * lp[g][i][t]
    return -total / _tokens(lp)


def sapo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2511.20347: a sigmoid gate on each token's ratio, temperature 1 for A > 0 and 1.05 otherwise, mean by completion."""
    total, n = 0.0, 0
    for g, r in enumerate(b.rewards):
        for i, a in enumerate(normalised(r)):
            tau = 1.0 if a > 0 else 1.05
            gates = [4 / tau / (1 + np.exp(-tau * (np.exp(x - o) - 1))) for x, o in zip(lp[g][i], b.old[g][i], strict=True)]
            total, n = total + a * sum(gates) / len(gates), n + 1
    return -total / n


def vespo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2602.10693: each completion weighs w^k exp(lambda (1 - w)), w its whole ratio; (2, 3) for good ones, (3, 2) for others."""
    total = 0.0
    for g, r in enumerate(b.rewards):
        for i, a in enumerate(normalised(r)):
            k, fade = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            w = np.exp(sum(held[g][i] - b.old[g][i]))
            total += w**k * np.exp(fade * (1 - w)) * a * sum(lp[g][i])
    return -total / _tokens(lp)


def gmpo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2507.20673 eq. 4: the |o|-th root of the product of a completion's token ratios, each clipped at exp(0.4) or exp(-0.4)."""
    total, n = 0.0, 0
    for g, r in enumerate(b.rewards):
        for i, a in enumerate(normalised(r)):
            product = 1.0
            for x, o in zip(lp[g][i], b.old[g][i], strict=True):
                ratio = np.exp(x - o)
                product *= min(ratio, np.exp(0.4)) if a > 0 else max(ratio, np.exp(-0.4))
            total, n = total + a * product ** (1 / len(lp[g][i])), n + 1
    return -total / n


def dppo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2602.04879 with binary total variation: r A, without the tokens whose probability has moved by more than 0.15 already and
    would move further."""
    return _within_trust(b, lp, held, lambda p, q: abs(q - p) > 0.15)


def dppo_kl(b: Batch, lp: Ragged, held: Ragged) -> float:
    """The same by KL(old || new) of "this token, or any other", at most 0.05. Infinite at 1, which random batches may pass."""
    return _within_trust(b, lp, held, lambda p, q: q >= 1 or p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)) > 0.05)


def _within_trust(b: Batch, lp: Ragged, held: Ragged, too_far: Callable[[float, float], bool]) -> float:
    total = 0.0
    for g, r in enumerate(b.rewards):
        for i, a in enumerate(normalised(r)):
            for x, now, o in zip(lp[g][i], held[g][i], b.old[g][i], strict=True):
                further = (now > o and a > 0) or (now < o and a < 0)
                if not (further and too_far(np.exp(o), np.exp(now))):
                    total += np.exp(x - o) * a
    return -total / _tokens(lp)


def maxrl(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2602.02710: the difference to the group's mean, divided by that mean; PPO's clip around it."""
    advantages = [[(x - sum(r) / len(r)) / (sum(r) / len(r) + 1e-4) for x in r] for r in b.rewards]
    return _clipped_tokens(b, lp, advantages, 0.2, 0.2, _tokens(lp))


def gdpo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2601.05242 eq. 4 to 6: each function normalised in its group, the weighted sum, and that normalised over the batch."""
    summed = [
        [x + 0.5 * y for x, y in zip(normalised(r), normalised(s), strict=True)] for r, s in zip(b.rewards, b.second, strict=True)
    ]
    flat = np.array([x for group in summed for x in group])
    advantages = [[(x - flat.mean()) / (flat.std(ddof=1) + 1e-4) for x in group] for group in summed]
    return _clipped_tokens(b, lp, advantages, 0.2, 0.2, _tokens(lp))


def topr(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2503.14286: log pi of the whole completion times its advantage; a bad one times its probability over the old, at most 1."""
    total, n = 0.0, 0
    for g, r in enumerate(b.rewards):
        for i in range(len(r)):
            a = r[i] - sum(r) / len(r)
            taper = 1.0 if a >= 0 else min(1.0, np.exp(sum(held[g][i]) - sum(b.old[g][i])))
            total, n = total + taper * a * sum(lp[g][i]), n + 1
    return -total / n


def lite_ppo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2508.08221: the difference to the group's mean over the standard deviation of all rewards; PPO's clip, token mean."""
    std = np.array([x for r in b.rewards for x in r]).std(ddof=1)
    advantages = [[(x - sum(r) / len(r)) / (std + 1e-4) for x in r] for r in b.rewards]
    return _clipped_tokens(b, lp, advantages, 0.2, 0.2, _tokens(lp))


def rloo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2402.14740 eq. 2 and the k-sample estimator: R = r - beta log(pi / ref) of the whole completion, beta 0.03."""
    total, n = 0.0, 0
    for g, r in enumerate(b.rewards):
        whole = [r[i] - 0.03 * sum(b.old[g][i] - b.ref[g][i]) for i in range(len(r))]
        for i in range(len(r)):
            others = [whole[j] for j in range(len(r)) if j != i]
            total += (whole[i] - sum(others) / len(others)) * sum(lp[g][i])
            n += 1
    return -total / n


def reinforce_pp(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2501.03262: A_t = r - beta sum_{i >= t} KL(i), normalised over all tokens of the batch, PPO's clip."""
    advantages = []
    for g, r in enumerate(b.rewards):
        kl = [b.old[g][i] - b.ref[g][i] for i in range(len(r))]
        advantages.append([[r[i] - 0.01 * sum(kl[i][t:]) for t in range(len(kl[i]))] for i in range(len(r))])
    flat = np.array([x for group in advantages for completion in group for x in completion])
    mean, std = flat.mean(), flat.std(ddof=1)
    advantages = [[[(x - mean) / (std + 1e-4) for x in c] for c in group] for group in advantages]
    return _clipped_tokens(b, lp, advantages, 0.2, 0.2, _tokens(lp))


def reinforce_pp_baseline(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 2501.03262, the variant with a baseline: A' = r - mean of the group, normalised by mean and std of A' over all responses of
    the batch; the KL is a loss of its own, k2, differentiated."""
    centred = [[x - sum(r) / len(r) for x in r] for r in b.rewards]
    flat = np.array([x for group in centred for x in group])
    advantages = [[(x - flat.mean()) / (flat.std(ddof=1) + 1e-4) for x in group] for group in centred]
    kl = sum(0.5 * ((b.ref[g][i] - lp[g][i]) ** 2).sum() for g in range(len(lp)) for i in range(len(lp[g])))
    return _clipped_tokens(b, lp, advantages, 0.2, 0.2, _tokens(lp)) + 0.01 * kl / _tokens(lp)


def gae_by_the_sum(reward: np.ndarray, value: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """arXiv 1506.02438 eq. 16 as the sum it is written as, not the recursion: A_t = sum_l (gamma lam)^l delta_{t+l}."""
    n = len(reward)
    after = [*value[1:], 0.0]
    delta = [reward[t] + gamma * after[t] - value[t] for t in range(n)]
    return np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)])


def ppo_token_rewards(b: Batch, beta: float = 0.02) -> Ragged:
    """arXiv 1909.08593 section 2.1: -beta log(pi_old / ref) for every token, and the score with the last one."""
    out = []
    for g, r in enumerate(b.rewards):
        out.append([-beta * (b.old[g][i] - b.ref[g][i]) for i in range(len(r))])
        for i, score in enumerate(r):
            out[-1][i][-1] += score
    return out


def ppo(b: Batch, lp: Ragged, held: Ragged) -> float:
    """arXiv 1707.06347 eq. 7 and 11 with gamma 1, lambda 0.95, advantages whitened over all tokens, clip 0.2, mean over tokens."""
    rewards = ppo_token_rewards(b)
    found = [
        [gae_by_the_sum(r, v, 1.0, 0.95) for r, v in zip(rg, vg, strict=True)] for rg, vg in zip(rewards, b.values, strict=True)
    ]
    flat = np.array([x for group in found for completion in group for x in completion])
    mean, std = flat.mean(), flat.std(ddof=1)
    advantages = [[[(x - mean) / (std + 1e-4) for x in c] for c in group] for group in found]
    return _clipped_tokens(b, lp, advantages, 0.2, 0.2, _tokens(lp))


def ppo_value(values: np.ndarray, old: np.ndarray, returns: np.ndarray, weights: np.ndarray, clip: float | None) -> float:
    """Half the weighted square; with a clip the larger of it and that of the value held near the old one (arXiv 2005.12729)."""
    total = 0.0
    for v, o, r, w in zip(values, old, returns, weights, strict=True):
        near = v if clip is None else o + max(-clip, min(clip, v - o))
        total += w * max((v - r) ** 2, (near - r) ** 2) / 2
    return total


SLOW = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": rloo,
    "reinforce++": reinforce_pp,
    "bnpo": bnpo,
    "ppo": ppo,
    "sapo": sapo,
    "vespo": vespo,
    "gmpo": gmpo,
    "dppo": dppo,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "lite_ppo": lite_ppo,
    "topr": topr,
}
VARIANTS = {
    "reinforce++ with baseline": (
        {
            "preset": "reinforce++",
            "advantage": {"baseline": "group_mean", "scale": "centred_std"},
            "kl": {"placement": "loss", "estimator": "k2"},
        },
        reinforce_pp_baseline,
    ),
    "dppo, KL": ({"preset": "dppo", "loss": {"divergence": "kl"}}, dppo_kl),
}
"""Published methods that are a preset with other settings: the settings, and the slow loop."""
DRIFT = {"gspo": 1e-3, "cispo": 1.5}
"""How far the policy has moved, so that some tokens are clipped and some are not; 0.3 where not named."""


def slow_loss(name: str) -> Callable[[Batch, Ragged, Ragged], float]:
    return SLOW[name] if name in SLOW else VARIANTS[name][1]


def gradient(method: str | Callable[[Batch, Ragged, Ragged], float], b: Batch, h: float = 1e-6) -> list[list[np.ndarray]]:
    """Central differences of the slow loss in each token's log-probability."""
    slow = slow_loss(method) if isinstance(method, str) else method
    out = [[np.zeros_like(tokens) for tokens in group] for group in b.lp]
    for g, group in enumerate(b.lp):
        for i, tokens in enumerate(group):
            for t in range(len(tokens)):
                sides = []
                for step in (h, -h):
                    moved = [[x.copy() for x in gr] for gr in b.lp]
                    moved[g][i][t] += step
                    sides.append(slow(b, moved, b.lp))
                out[g][i][t] = (sides[0] - sides[1]) / (2 * h)
    return out
