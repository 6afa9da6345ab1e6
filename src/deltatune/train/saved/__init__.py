"""What a run leaves in its folder: weights, and the state from which it continues bit for bit."""
