"""From examples to batches of few shapes, in an order that the seed decides."""
