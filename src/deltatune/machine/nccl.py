"""Ends sums over ranks that wait for a rank which has died.

A sum over NCCL is a kernel that waits for every rank. If one has died, it waits forever, and so does most of what the
GPU is asked for then: what is queued behind the sum, a kernel that is loaded, memory that is given back. NCCL's
ncclCommAbort() ends its kernels. It needs the communicator, which MLX hands out to nobody: it is looked for in memory,
where a few pointers lead to it from MLX's group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import mlx.core as mx

# The number with which NCCL begins every communicator.
_MAGIC = 0x0280028002800280
# How many words are looked at behind a pointer, and how many pointers lead from the group to the communicator at most.
_WORDS, _DEPTH = 64, 3
# Seconds to wait for NCCL's call, which only sets flags.
_PATIENCE = 2.0


def abort(group: mx.distributed.Group) -> bool:
    """End the sums of `group` on this rank, whose results are then meaningless; no further sum may be used.

    The GPU goes on with what is queued within milliseconds.

    Returns:
        Whether the communicator and NCCL were found; nothing is ended otherwise.
    """
    address = communicator(group)
    library = None if address is None else _library()
    if library is None:
        return False

    def ended() -> None:
        # In a group that never ends, the communicator is not freed, which sums that are queued still read.
        library.ncclGroupStart()
        library.ncclCommAbort(ctypes.c_void_p(address))

    thread = Thread(target=ended, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return True


def communicator(group: mx.distributed.Group) -> int | None:
    """Return the address of the NCCL communicator to which pointers lead from `group`; None if there is none.

    MLX keeps the communicator's address in front of this rank and the number of ranks, as two numbers of four bytes.
    """
    ranks = group.rank() | group.size() << 32
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        seen, level = {id(group)}, [id(group)]
        for _ in range(_DEPTH):
            below = []
            for pointer in _pointers(memory, level):
                if pointer not in seen:
                    seen.add(pointer)
                    below.append(pointer)
                    words = _words(memory, pointer, 2)
                    if words[1:] == (ranks,) and _words(memory, words[0], 1) == (_MAGIC,):
                        return words[0]
            level = below
    finally:
        os.close(memory)
    return None


def _pointers(memory: int, places: list[int]) -> Iterator[int]:
    """Yield what may be addresses in the words at `places`."""
    for place in places:
        for word in _words(memory, place, _WORDS):
            if word % 8 == 0 and 2**16 < word < 2**47:
                yield word


def _words(memory: int, address: int, count: int) -> tuple[int, ...]:
    """Return up to `count` words of eight bytes; none if nothing is at `address`."""
    data = b""
    # An address where nothing is gives an error, not a crash.
    with contextlib.suppress(OSError, OverflowError):
        data = os.pread(memory, 8 * count, address)
    return struct.unpack(f"={len(data) // 8}Q", data[: len(data) // 8 * 8])


def _library() -> ctypes.CDLL | None:
    """Return the NCCL library that this process has loaded; None if it has none."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.split(maxsplit=5)[5] for line in lines if "/libnccl" in line]
    return ctypes.CDLL(paths[0]) if paths else None
