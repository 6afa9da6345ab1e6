"""The limit of MLX's cache of freed memory during a run."""

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.train.freed_memory import FreedMemory


class _Allocator:
    """Stands for the allocator of a GPU that holds 100 bytes."""

    def __init__(self, limit: int = 100) -> None:
        self.limit, self.peak, self.kept = limit, 0, 0

    def set_limit(self, limit: int) -> int:
        before, self.limit = self.limit, limit
        return before

    def clear(self) -> None:
        self.kept = 0


def put_in_place(allocator: _Allocator, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(mx, "set_memory_limit", allocator.set_limit)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: allocator.peak)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: allocator.kept)
    monkeypatch.setattr(mx, "clear_cache", allocator.clear)


@pytest.fixture
def allocator(monkeypatch):
    made = _Allocator()
    put_in_place(made, "cuda", monkeypatch)
    yield made
    assert made.limit == 100


def test_the_bound_follows_the_peak_and_nothing_is_given_back_between_iterations(allocator):
    with FreedMemory() as memory:
        assert allocator.limit == 100
        allocator.peak, allocator.kept = 50, 40
        memory.after_iteration()
        assert (allocator.limit, allocator.kept) == (65, 40)
        allocator.peak = 60
        memory.after_iteration()
        assert allocator.limit == 78
        allocator.peak = 95
        memory.after_iteration()
        assert allocator.limit == 100, "never more than MLX itself would hold"


def test_a_limit_holds_from_the_start_and_the_peak_lowers_it(allocator):
    with FreedMemory(limit=70) as memory:
        assert allocator.limit == 70
        allocator.peak = 50
        memory.after_iteration()
        assert allocator.limit == 65
        allocator.peak = 69
        memory.after_iteration()
        assert allocator.limit == 70
    with FreedMemory(limit=170):
        assert allocator.limit == 100, "never more than MLX itself would hold"


@pytest.mark.parametrize(("device", "left"), [("cuda", 0), ("metal", 30)])
def test_memory_that_the_host_has_read_serves_no_run_on_an_nvidia_gpu(allocator, monkeypatch, device, left):
    monkeypatch.setattr(backend, "device", lambda: device)
    allocator.kept = 30
    with FreedMemory():
        assert allocator.kept == left


def test_a_threshold_gives_all_back_after_an_iteration_that_leaves_more(allocator):
    with FreedMemory(threshold=30) as memory:
        allocator.peak, allocator.kept = 50, 30
        memory.after_iteration()
        assert (allocator.limit, allocator.kept) == (100, 30)
        allocator.kept = 31
        memory.after_iteration()
        assert (allocator.limit, allocator.kept) == (100, 0)


def test_a_cpu_keeps_its_limit(allocator, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    with FreedMemory() as memory:
        allocator.peak = 50
        memory.after_iteration()
        assert allocator.limit == 100


def test_an_error_restores_the_limit(allocator):
    allocator.peak = 50

    def fails_after_an_iteration() -> None:
        with FreedMemory() as memory:
            memory.after_iteration()
            assert allocator.limit == 65
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_after_an_iteration()


class _Metal(_Allocator):
    """MetalAllocator of mlx 0.32.4, as its macOS wheel has it, for a GPU of 100 bytes and 40 buffers."""

    WORKING_SET, BUFFERS = 100, 40

    def __init__(self) -> None:
        super().__init__(150)
        self.flushed, self.used, self.kept = 0, [], []

    def allocate(self, size: int) -> None:
        fits = [each for each in self.kept if size <= each < 2 * size]
        if fits:
            size = min(fits)
            self.kept.remove(size)
        else:
            most = min(int(0.95 * self.WORKING_SET), self.limit)
            excess = sum(self.used) + sum(self.kept) + size - most
            full = len(self.used) + len(self.kept) >= self.BUFFERS
            if full and excess < 0:
                self.flushed += 1
                self.kept.clear()
            while excess >= 0 and self.kept:
                excess -= self.kept.pop(0)
            assert len(self.used) + len(self.kept) < self.BUFFERS, "[metal::malloc] Resource limit exceeded."
        self.used.append(size)
        self.peak = max(self.peak, sum(self.used))

    def step(self, *sizes: int) -> int:
        """Allocate buffers, free all, and return the most that was held."""
        most = 0
        for size in sizes:
            self.allocate(size)
            most = max(most, sum(self.used) + sum(self.kept))
        self.kept += self.used
        self.used = []
        return most


@pytest.fixture
def metal(monkeypatch):
    made = _Metal()
    put_in_place(made, "metal", monkeypatch)
    return made


def test_on_metal_steps_of_many_shapes_stay_within_the_bound_and_ask_for_nothing_anew(metal):
    with FreedMemory() as memory:
        metal.step(20, 10, 10)
        memory.after_iteration()
        assert metal.limit == 44
        kept = list(metal.kept)
        assert metal.step(20, 10, 10) == 40
        assert metal.kept == kept, "the second step found all that it needed"
        # Another shape: what was kept longest goes before more than the bound is held.
        assert metal.step(9, 9, 9, 4) <= 44
        assert metal.step(44) <= 44
        memory.after_iteration()
        assert metal.limit == 48


def test_on_metal_cached_buffers_count_and_never_end_a_run(metal):
    with FreedMemory() as memory:
        metal.peak = 90
        memory.after_iteration()
        metal.step(*[1] * 30)
        assert not metal.flushed
        metal.step(*[2] * 12)
        assert metal.flushed == 1, "30 of one byte are kept, and the eleventh of two is the forty-first"
        with pytest.raises(AssertionError, match="Resource limit"):
            metal.step(*[2] * 41)
