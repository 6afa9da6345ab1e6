"""The reports of a run: on the screen, in metrics.jsonl, to services, in a browser, and in its report."""
