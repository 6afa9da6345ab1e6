"""Cutting a sequence into groups of chunks, and putting it together again."""

import mlx.core as mx
import pytest

from deltatune.ops.gated_delta.chunking import (
    Chunking,
    choose_chunking,
    empty_chunks,
    group_of,
    sequence_of,
    write_group,
)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
@pytest.mark.parametrize("trailing", [(), (6,)])
def test_groups_cover_the_sequence_once_and_come_back(length, trailing):
    chunking = Chunking(length, 16, 3)
    x = mx.random.normal((2, length, 4, *trailing))
    chunks = empty_chunks(x, chunking, 2) * mx.nan
    for span in chunking.groups():
        group = group_of(x, span, chunking.size, key_heads=2)
        assert group.shape[:5] == (span.chunks, 2, 2, 2, 16)
        write_group(chunks, group, span, chunking)
    assert mx.array_equal(sequence_of(chunks, chunking), x)


def test_value_head_reads_its_key_head():
    heads = mx.broadcast_to(mx.arange(6, dtype=mx.float32)[None, None, :, None], (1, 16, 6, 1))
    group = group_of(heads, Chunking(16, 16, 1).groups()[0], 16, key_heads=2)
    assert [[group[0, 0, key, value, 0, 0].item() for value in range(3)] for key in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_short_sequences_take_short_chunks():
    assert choose_chunking(1, 4, 128).size == 16
    assert choose_chunking(33, 4, 128).size == 64
    assert choose_chunking(500, 4, 64).size == 32
    assert choose_chunking(500, 4, 128).size == 64
    assert choose_chunking(500, 10_000, 128).group == 1
    assert choose_chunking(500, 4, 128).group < choose_chunking(500, 4, 64).group
