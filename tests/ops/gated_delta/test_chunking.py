"""Cutting a sequence into groups of chunks, and putting it together again."""

from __future__ import annotations

import mlx.core as mx
import pytest

from deltatune.ops.gated_delta.chunking import Chunking, blank, chunked, cut, tokens, write


@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
@pytest.mark.parametrize("trailing", [(), (6,)])
def test_groups_cover_the_sequence_once_and_come_back(length, trailing):
    plan = Chunking(length, 16, 3)
    x = mx.random.normal((2, length, 4, *trailing))
    whole = blank(x, plan, 2) * mx.nan
    for span in plan.groups():
        part = chunked(x, span, plan.size, key_heads=2)
        assert part.shape[:5] == (span.chunks, 2, 2, 2, 16)
        write(whole, part, span, plan)
    assert mx.array_equal(tokens(whole, plan), x)


def test_value_head_reads_its_key_head():
    heads = mx.broadcast_to(mx.arange(6, dtype=mx.float32)[None, None, :, None], (1, 16, 6, 1))
    part = chunked(heads, Chunking(16, 16, 1).groups()[0], 16, key_heads=2)
    assert [[part[0, 0, key, value, 0, 0].item() for value in range(3)] for key in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_short_sequences_take_short_chunks():
    assert cut(1, 4, 128).size == 16
    assert cut(33, 4, 128).size == 64
    assert cut(500, 4, 64).size == 32
    assert cut(500, 4, 128).size == 64
    assert cut(500, 10_000, 128).group == 1
    assert cut(500, 4, 128).group < cut(500, 4, 64).group
