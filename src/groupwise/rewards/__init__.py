"""Scoring completions: built-in reward functions, your own, and their weighted sum."""

from groupwise.rewards.compose import RewardDescription, RewardFailure, RewardSuite, Scoring
from groupwise.rewards.functions import builtin_rewards
from groupwise.rewards.load import load_reward, reward_scope
from groupwise.rewards.steps import StepRewards

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
