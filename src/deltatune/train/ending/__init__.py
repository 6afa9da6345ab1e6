"""How a run ends before its last iteration, with its state saved: signals, errors, lost ranks, broken numbers."""
