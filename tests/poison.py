"""Fills memory with NaN, so that an element of a result which is never written shows."""

import mlx.core as mx


def poison() -> None:
    """Fill the buffers that MLX will allocate next with NaN."""
    mx.clear_cache()
    mx.eval([mx.full((2**power,), mx.nan) for power in range(4, 21) for _ in range(2)])
