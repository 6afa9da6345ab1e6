"""The files of a run's folder: weights, and the state from which it continues bit for bit."""
