"""Tests that NCCL's communicator is found in memory, and that its sums are ended."""

import ctypes
import sys
import threading

import mlx.core as mx
import pytest

from deltatune.machine import nccl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NCCL runs on Linux alone")


class Words(ctypes.Structure):
    """A place in memory of eight words."""

    _fields_ = [("words", ctypes.c_uint64 * 8)]

    def __init__(self, **words):
        super().__init__()
        for place, word in words.items():
            self.words[int(place[1:])] = word

    @property
    def address(self):
        return ctypes.addressof(self)


class Group(Words):
    """A group of three ranks, of which this is the second, as MLX's bindings hold it: an address among other words."""

    def rank(self):
        return 1

    def size(self):
        return 3


@pytest.fixture
def at_words(monkeypatch):
    """The address of a group is that of its words, which a Python object has elsewhere."""
    monkeypatch.setattr(nccl, "id", lambda group: group.address, raising=False)


def chain(magic=0x0280028002800280, ranks=1 | 3 << 32):
    """Return a group, from which pointers lead to a communicator, and all that must live while it is looked for."""
    communicator = Words(w0=magic)
    held = Words(w0=communicator.address, w1=ranks)
    # A shared pointer stands behind numbers, words that are no addresses, and addresses where nothing is.
    inner = Words(w0=7, w1=2**47 - 8, w2=2**63, w3=held.address)
    return Group(w1=2**20, w2=inner.address), [communicator, held, inner]


def test_a_communicator_is_found_behind_pointers(at_words):
    group, (communicator, *_) = chain()
    assert nccl.communicator(group) == communicator.address


@pytest.mark.parametrize("wrong", [{"magic": 0x0280028002800281}, {"ranks": 3 | 1 << 32}, {"ranks": 1 | 2 << 32}])
def test_what_only_resembles_one_is_not(at_words, wrong):
    group, living = chain(**wrong)
    assert nccl.communicator(group) is None
    assert living


def test_a_group_of_mlx_without_nccl_has_none():
    assert nccl.communicator(mx.distributed.init()) is None


class Library:
    """NCCL, which notes its calls with their threads, and whose last call may not return."""

    def __init__(self, returns=True):
        self.calls, self.returns = [], returns

    def ncclGroupStart(self):  # noqa: N802
        self.calls.append(("start", threading.get_ident()))

    def ncclCommAbort(self, communicator):  # noqa: N802
        self.calls.append((communicator.value, threading.get_ident()))
        assert self.returns or threading.Event().wait()


@pytest.mark.parametrize("returns", [True, False])
def test_its_sums_are_ended_within_a_group_that_stays_open(at_words, monkeypatch, returns):
    group, (communicator, *_) = chain()
    library = Library(returns)
    monkeypatch.setattr(nccl, "_library", lambda: library)
    monkeypatch.setattr(nccl, "_PATIENCE", 10.0 if returns else 0.1)
    assert nccl.abort(group)
    (first, thread), (second, same) = library.calls
    assert (first, second) == ("start", communicator.address)
    assert thread == same != threading.get_ident()


def test_nothing_is_ended_without_a_communicator_or_nccl(at_words, monkeypatch):
    group, _living = chain()
    assert not nccl.abort(group)
    monkeypatch.setattr(nccl, "communicator", lambda group: None)
    monkeypatch.setattr(nccl, "_library", Library)
    assert not nccl.abort(group)
