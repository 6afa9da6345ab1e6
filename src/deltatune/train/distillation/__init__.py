"""Distillation: a model learns the distributions of a teacher, which is another checkpoint with the same vocabulary."""
