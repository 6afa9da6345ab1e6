"""Facts about arrays, and the trace: contexts nest and end, a thread begins outside them."""

import gc
import re
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest

import deltatune
from checkpointing import checkpoint
from deltatune.ops.tracing import dispatch, trace
from deltatune.ops.tracing.known import Known

SOURCE = Path(deltatune.__file__).parent
TRACING = SOURCE / "ops/tracing"


def test_contexts_nest_and_restore():
    outside = trace.current()
    with trace.having(piece=(0, 2)):
        inner = trace.current()
        with trace.having(piece=(2, 4), segments=mx.zeros((1, 4), mx.int32)):
            assert trace.current().piece == (2, 4)
            assert trace.current().segments.shape == (1, 4)
        assert trace.current() is inner
        assert inner == replace(outside, piece=(0, 2), known=inner.known)
    assert trace.current() is outside
    assert outside.piece is None


def test_a_context_restores_after_an_error():
    def fail() -> None:
        with trace.having(piece=(0, 2)):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fail()
    assert trace.current().piece is None


def test_an_unknown_attribute_is_refused():
    with pytest.raises(TypeError, match=r"a Trace has no peice, segment\."):
        trace.having(segment=None, peice=None, piece=None)


def test_the_outermost_context_begins_with_nothing_known():
    outside = trace.current().known
    with trace.having(piece=(0, 2)):
        known = trace.current().known
        assert known is not outside
        with trace.having(piece=None):
            assert trace.current().known is known


def test_a_thread_begins_outside_all_contexts():
    """Else the work of another thread, such as building a kernel, would depend on the step that started it."""
    seen = []
    with trace.having(piece=(0, 2)):
        thread = threading.Thread(target=lambda: seen.append(trace.current()))
        thread.start()
        thread.join()
    assert seen[0].piece is None
    assert seen[0] is trace.current()


RECORDS = (trace.Trace, dispatch.Dispatch)


def test_every_attribute_is_described():
    assert all(f"        {each.name}: " in record.__doc__ for record in RECORDS for each in fields(record))


def test_dispatch_and_trace_know_nothing_of_each_other():
    outside = trace.current()
    with dispatch.having(trials=False):
        assert trace.current() is outside
        with trace.having(piece=(0, 2)):
            assert not dispatch.current().trials
    assert dispatch.current().trials
    for record, name in ((dispatch, "piece"), (trace, "trials")):
        with pytest.raises(TypeError, match=rf"has no {name}\."):
            record.having(**{name: None})


@pytest.mark.any_blas
def test_the_page_says_who_sets_and_who_reads():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", (TRACING / "README.md").read_text(encoding="utf-8"), re.M)
    stated = {name: tuple(re.findall(r"`([^`]+)`", cell) for cell in cells) for name, *cells in rows}
    texts = {
        path.relative_to(SOURCE).as_posix(): text
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name not in ("trace.py", "dispatch.py")
        and re.search(r"having\(|told\.|current\(", text := path.read_text("utf-8"))
    }
    found = {
        each.name: (
            [file for file, text in texts.items() if re.search(rf"\bhaving\((?:[^()]|\(\))*\b{each.name}=", text)],
            [file for file, text in texts.items() if re.search(rf"\b(?:told|current\(\))\.{each.name}\b", text)],
        )
        for record in RECORDS
        for each in fields(record)
    }
    assert stated == found


def test_a_compiled_function_keeps_the_trace_of_its_tracing():
    """So arrays that change from batch to batch must be arguments of it."""
    seen = []

    @mx.compile
    def scaled(x):
        piece = trace.current().piece
        seen.append(piece)
        return x * piece[1]

    with trace.having(piece=(0, 2)):
        assert scaled(mx.ones(3)).tolist() == [2, 2, 2]
    with trace.having(piece=(0, 4)):
        assert scaled(mx.ones(3)).tolist() == [2, 2, 2]
        assert scaled(mx.ones(4)).tolist() == [4, 4, 4, 4]
    assert seen == [(0, 2), (0, 4)]


def test_two_threads_do_not_see_each_others_trace():
    """Both are in their contexts at once, and one's facts about a shared array are its own."""
    shared, both, found = mx.zeros(3), threading.Barrier(2, timeout=60), {}

    def run(number):
        with trace.having(piece=(number, number)):
            trace.current().known.note(shared, str(number))
            both.wait()
            found[number] = trace.current().piece, trace.current().known.of(shared, str)
            both.wait()

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: ((1, 1), "1"), 2: ((2, 2), "2")}


def test_recomputation_of_a_layer_has_the_trace_of_its_first_run():
    """It happens when the contexts around the layer have ended; those around the gradient's whole call are open."""
    told = []

    class Layer(nn.Module):
        def __call__(self, x):
            now = trace.current()
            told.append((now.segments.tolist(), now.recomputed, now.whole_rows, now.once))
            return x * 2

    layer, documents = Layer(), mx.zeros((1, 4), mx.int32)

    def loss(x):
        with trace.having(segments=documents):
            return checkpoint(layer)(x).sum()

    with trace.having(whole_rows=True, once=True):
        mx.eval(mx.grad(loss)(mx.ones((1, 4))))
    assert told == [([[0, 0, 0, 0]], True, True, True)] * 2


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
