"""`deltatune plan`: what a training step will hold, before it runs. docs/plan.md says how, and how well it does."""
