"""Rewards of completions: functions of the user and built-in ones, run in processes of their own."""

from .rewards import RewardError, Rewards

__all__ = ["RewardError", "Rewards"]
