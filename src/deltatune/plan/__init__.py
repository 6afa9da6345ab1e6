"""`deltatune plan` forecasts the memory of a training step before it runs; docs/how/memory.md explains the method."""
