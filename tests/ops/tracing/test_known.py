"""Facts about arrays: by the very array, for each kind of fact, for as long as the array lives."""

import gc
from typing import NamedTuple

import mlx.core as mx

from deltatune.ops.tracing.known import Known


class Made(NamedTuple):
    """A kind of fact."""

    by: str


class Read(NamedTuple):
    """Another kind of fact, equal to the first as a tuple."""

    by: str


def test_a_fact_is_of_one_array_and_of_one_kind():
    known, x = Known(), mx.zeros(3)
    assert known.of(x, Made) is None
    known.note(x, Made("one"))
    known.note(x, Read("two"))
    known.note(x, Made("three"))
    assert known.of(x, Made) == Made("three")
    assert known.of(x, Read) == Read("two")
    assert known.of(x + 0, Made) is None
    known.forget(Made)
    known.forget(Made)
    assert known.of(x, Made) is None
    assert known.of(x, Read) == Read("two")


def test_taken_fact_is_forgotten_with_its_kind():
    known, x, y = Known(), mx.zeros(3), mx.zeros(3)
    for array, fact in ((x, Made("one")), (y, Made("two")), (x, Read("three"))):
        known.note(array, fact)
    assert known.take(x, Made) == Made("one")
    assert known.take(x, Made) is None
    assert known.of(y, Made) is None
    assert known.of(x, Read) == Read("three")


def test_a_fact_ends_with_its_array():
    """Many arrays at the same few addresses: no fact is found for another array."""
    known = Known()
    for number in range(200):
        x = mx.array(number)
        assert known.of(x, Made) is None
        known.note(x, Made(str(number)))
        known.note(x, Made(str(number)))
        del x
    gc.collect()
    assert len(known) == 0


def test_a_fact_may_be_forgotten_before_its_array_ends():
    known, x = Known(), mx.zeros(3)
    known.note(x, Made("one"))
    known.forget(Made)
    known.note(x, Made("two"))
    y = mx.zeros(3)
    known.note(y, Made("three"))
    del x
    gc.collect()
    assert known.of(y, Made) == Made("three")
    assert len(known) == 1
