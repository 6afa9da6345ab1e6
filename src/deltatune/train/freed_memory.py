"""Bounds MLX's cache of freed arrays during a run, so that no step waits for memory.

MLX keeps the memory of a freed array for the next one of its size. A step that finds none has to ask the driver, which
takes a third of a step's time where everything is asked for again (docs/decisions/nvidia-step.md). A step of another
shape needs other sizes, so the kept memory grows with every shape, up to the whole GPU, unless it is bounded.

On Metal MLX itself never holds more than 95 % of the working set, and counts freed buffers that it keeps among the
499,000 that may exist: it gives all of them back before it would exceed that number, so that only those in use, which a
plan counts, can end a run (read in MetalAllocator::malloc of mlx 0.32.4's wheel for macOS; not run on a Mac).
"""

from __future__ import annotations

import mlx.core as mx

from ..machine import backend

#: MLX's memory, in use and cached, may be this many times the most that was in use at once. On an NVIDIA GPU, steps
#: that are launched ahead need more: they come to the same allocations in another order each time
#: (docs/decisions/nvidia-step.md).
ROOM = {"metal": 1.1, "cuda": 1.3}
#: Freed memory of more than this share of what MLX may hold is given back between the phases of a run. Asking for it
#: again takes less time than a driver's pool full of holes (docs/decisions/memory.md).
MUCH = 0.25


class FreedMemory:
    """Bounds MLX's memory on a GPU while a `with` block runs; MLX's own limit is restored afterwards.

    MLX gives back the buffers cached longest before it would hold more than ROOM times the peak of memory in use. Above
    the bytes of `limit`, or of its own limit, MLX gives back its cache and waits for its queued work.
    """

    def __init__(self, limit: int | None = None):
        self._limit = limit
        self._phase = ""
        self._peak = 0
        # MLX's own limit, and the most that it may be while the block runs.
        self._own_limit = self._most = 0

    def __enter__(self) -> FreedMemory:
        # MLX tells its limit only while another one is set.
        self._own_limit = self._most = mx.set_memory_limit(0)
        if self._limit is not None:
            self._most = min(self._own_limit, self._limit)
        mx.set_memory_limit(self._most)
        if backend.has_own_memory():
            # The run would be given what the host has read before it, in trials and digests: the driver moves such
            # memory out of a full GPU.
            backend.give_back()
        return self

    def __exit__(self, *_: object) -> None:
        mx.set_memory_limit(self._own_limit)

    def begin(self, phase: str) -> None:
        """Begin the phase of a run that has this name, which may be the present one.

        Its arrays have other sizes than those before, and an NVIDIA GPU's driver cannot join what lies between them. So
        much freed memory is given back.
        """
        changes = backend.has_own_memory() and phase != self._phase
        if changes and mx.get_cache_memory() > MUCH * self._most:
            backend.give_back()
        self._phase = phase

    def after_iteration(self) -> None:
        """Let the bound follow the peak."""
        peak = mx.get_peak_memory()
        room = backend.here(ROOM, 0.0)
        if room and peak > self._peak:
            self._peak = peak
            mx.set_memory_limit(min(self._most, int(room * peak)))
