"""What a run says of itself: on the screen, in metrics.jsonl, to services, in a browser, and in its report."""
