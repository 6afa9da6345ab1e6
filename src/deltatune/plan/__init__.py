"""`deltatune plan`: what a training step will hold, before it runs. docs/how/memory.md says how."""
