"""Engines compute a run's micro-batches and updates, one after another or each before the last one's results."""
