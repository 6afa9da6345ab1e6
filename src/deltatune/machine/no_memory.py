"""Tells MLX's errors of a device without memory left from others, also where MLX itself is missing."""

import re

# How MLX says it on each device.
_NO_MEMORY = re.compile(r"out of memory|OutOfMemory|Insufficient Memory|Unable to allocate|\[metal::malloc\]")


def lacks_memory(error: Exception) -> bool:
    """Whether an error of MLX says that the device has no memory left."""
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
