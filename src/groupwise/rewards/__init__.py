"""Scoring completions: built-in reward functions, your own, and their weighted sum."""

from groupwise.rewards.functions import builtin_rewards
from groupwise.rewards.load import load_reward, reward_scope
from groupwise.rewards.scores import StepRewards
from groupwise.rewards.suite import RewardDescription, RewardFailure, RewardSuite, Scoring

__all__ = [
    "RewardDescription",
    "RewardFailure",
    "RewardSuite",
    "Scoring",
    "StepRewards",
    "builtin_rewards",
    "load_reward",
    "reward_scope",
]
