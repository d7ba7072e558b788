"""Scoring completions: built-in reward functions, your own, and their weighted sum."""

from groupwise.rewards.compose import RewardDescription, RewardFailure, RewardSuite
from groupwise.rewards.functions import builtin_rewards
from groupwise.rewards.load import load_reward

__all__ = ["RewardDescription", "RewardFailure", "RewardSuite", "builtin_rewards", "load_reward"]
