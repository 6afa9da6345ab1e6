"""What MLX may keep of freed memory during a run."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.train.freed_memory import FreedMemory


class _Allocator:
    """Stands for the allocator of a GPU that holds 100 bytes."""

    def __init__(self) -> None:
        self.limit, self.peak, self.kept = 100, 0, 0

    def set_limit(self, limit: int) -> int:
        before, self.limit = self.limit, limit
        return before

    def clear(self) -> None:
        self.kept = 0


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Allocator]:
    found = _Allocator()
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(mx, "set_memory_limit", found.set_limit)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: found.peak)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: found.kept)
    monkeypatch.setattr(mx, "clear_cache", found.clear)
    yield found
    assert found.limit == 100


def test_the_bound_follows_the_peak_and_nothing_is_given_back_between_iterations(allocator):
    with FreedMemory() as memory:
        assert allocator.limit == 100
        allocator.peak, allocator.kept = 50, 40
        memory.after_iteration()
        assert (allocator.limit, allocator.kept) == (55, 40)
        allocator.peak = 60
        memory.after_iteration()
        assert allocator.limit == 66
        allocator.peak = 95
        memory.after_iteration()
        assert allocator.limit == 100, "never more than MLX itself would hold"


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
            assert allocator.limit == 55
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_after_an_iteration()
