"""Counts MLX's live buffers on a Linux CPU, through a small C library that it puts around MLX's allocator.

`Counter()` replaces the allocator object's vtable (mlx/allocator.h: malloc, free and size are virtual) with one whose
functions count and then call the originals. The library is built with the machine's C compiler or ziglang's. Buffers
that exist before are not counted.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SOURCE = r"""
#include <pthread.h>
#include <stddef.h>
#include <string.h>

typedef void *(*allocate_t)(void *, size_t);
typedef void (*free_t)(void *, void *);
static void *table[16];
static allocate_t allocate;
static free_t release;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
long counted[4];  /* live buffers, live bytes, and the most of either since the last reset */
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static pthread_t holder;
static int held;
int waiting;  /* threads that wait before they free a buffer */

static void *counting_allocate(void *self, size_t size) {
  void *buffer = allocate(self, size);
  pthread_mutex_lock(&lock);
  counted[0] += 1;
  counted[1] += buffer ? *(size_t *)buffer : 0;
  if (counted[0] > counted[2]) counted[2] = counted[0];
  if (counted[1] > counted[3]) counted[3] = counted[1];
  pthread_mutex_unlock(&lock);
  return buffer;
}

static void counting_release(void *self, void *buffer) {
  size_t size = buffer ? *(size_t *)buffer : 0;
  pthread_mutex_lock(&lock);
  waiting += 1;
  while (held && !pthread_equal(pthread_self(), holder)) pthread_cond_wait(&opened, &lock);
  waiting -= 1;
  counted[0] -= 1;
  counted[1] -= size;
  pthread_mutex_unlock(&lock);
  release(self, buffer);
}

void install(void **object) {
  void **old = *(void ***)object;
  memcpy(table, old - 2, sizeof table);
  allocate = (allocate_t)old[0];
  release = (free_t)old[1];
  table[2] = (void *)counting_allocate;
  table[3] = (void *)counting_release;
  *object = table + 2;
}

void hold(void) {
  pthread_mutex_lock(&lock);
  holder = pthread_self();
  held = 1;
  pthread_mutex_unlock(&lock);
}

void let_go(void) {
  pthread_mutex_lock(&lock);
  held = 0;
  pthread_cond_broadcast(&opened);
  pthread_mutex_unlock(&lock);
}

void reset(void) {
  pthread_mutex_lock(&lock);
  counted[2] = counted[0];
  counted[3] = counted[1];
  pthread_mutex_unlock(&lock);
}
"""
_ALLOCATOR = "_ZN3mlx4core9allocator9allocatorEv"


@dataclass(frozen=True)
class Counted:
    """Live buffers and bytes, and their peaks since the last reset."""

    buffers: int
    bytes: int
    peak_buffers: int
    peak_bytes: int


class Counter:
    """Counts buffers and bytes from its creation on; a process may have one."""

    def __init__(self) -> None:
        import mlx.core as mx

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "counter.so"
            source = Path(folder) / "counter.c"
            source.write_text(_SOURCE)
            compiler = [shutil.which("cc")] if shutil.which("cc") else [sys.executable, "-m", "ziglang", "cc"]
            command = [*map(str, compiler), "-O2", "-shared", "-fPIC", "-pthread", "-o", str(path), str(source)]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(path))
        mlx = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / "libmlx.so"))
        allocator = mlx[_ALLOCATOR]
        allocator.restype = ctypes.c_void_p
        self._library.install(ctypes.c_void_p(allocator()))
        self._counted = (ctypes.c_long * 4).in_dll(self._library, "counted")
        self._waiting = ctypes.c_int.in_dll(self._library, "waiting")

    def reset(self) -> None:
        """Set the peaks to the live amounts."""
        self._library.reset()

    def now(self) -> Counted:
        """The counts at this moment."""
        return Counted(*self._counted)

    @contextmanager
    def stream_held(self) -> Iterator[None]:
        """Inside the block, MLX's stream waits before it frees a buffer, and does nothing else meanwhile."""
        import mlx.core as mx

        self._library.hold()
        try:
            while not self._waiting.value:
                # The stream frees the sum, unless it has computed the product before this thread lets go of the sum.
                one = mx.ones((256, 256))
                mx.async_eval((one + one) @ one)
                time.sleep(0.02)
            yield
        finally:
            self._library.let_go()


class ByteCounter:
    """The same interface with MLX's own count, which exists on every device and has bytes only."""

    def reset(self) -> None:
        """Set the peak to zero."""
        import mlx.core as mx

        mx.reset_peak_memory()

    def now(self) -> Counted:
        """The counts at this moment, with zero buffers."""
        import mlx.core as mx

        return Counted(0, mx.get_active_memory(), 0, mx.get_peak_memory())
