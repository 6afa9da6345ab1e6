"""How gradients become new parameters: optimizers and schedules, bundles of small parameters."""
