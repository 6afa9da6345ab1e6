"""Preferences: which of two answers to a prompt is better, or whether one answer is good."""
