"""Looks at a machine, a model or a run, and says what it finds."""
