"""Losses that learn from preferences, and the reference log-probabilities that some of them need."""
