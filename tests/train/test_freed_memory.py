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


@pytest.fixture
def allocator(monkeypatch):
    made = _Allocator()
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(mx, "set_memory_limit", made.set_limit)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: made.peak)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: made.kept)
    monkeypatch.setattr(mx, "clear_cache", made.clear)
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


@pytest.mark.parametrize(("device", "kept", "left"), [("cuda", 21, 0), ("cuda", 20, 20), ("metal", 21, 21)])
def test_a_phase_begins_with_much_memory_given_back(allocator, monkeypatch, device, kept, left):
    """More than a quarter of the limit of 80 bytes is much; memory stays where the phase is the same."""
    monkeypatch.setattr(backend, "device", lambda: device)
    with FreedMemory(limit=80) as memory:
        for phase in ("sampling", "training", "sampling"):
            allocator.kept = kept
            memory.begin(phase)
            assert allocator.kept == left
        allocator.kept = kept
        memory.begin("sampling")
        assert allocator.kept == kept


@pytest.mark.parametrize(("device", "limit"), [("cpu", 100), ("metal", 55)])
def test_other_devices_have_their_own_room(allocator, monkeypatch, device, limit):
    monkeypatch.setattr(backend, "device", lambda: device)
    with FreedMemory() as memory:
        allocator.peak = 50
        memory.after_iteration()
        assert allocator.limit == limit


def test_an_error_restores_the_limit(allocator):
    allocator.peak = 50

    def fails_after_an_iteration() -> None:
        with FreedMemory() as memory:
            memory.after_iteration()
            assert allocator.limit == 65
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_after_an_iteration()
