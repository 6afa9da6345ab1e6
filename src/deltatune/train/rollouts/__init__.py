"""Reinforcement learning: batches of answers that the model samples, with their rewards and advantages."""
