"""A training step that computes one layer after another, and so needs the frozen weights of one layer at a time."""
