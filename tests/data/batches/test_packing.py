import numpy as np
import pytest

from deltatune.data import pack


def test_every_document_once_and_no_row_too_long():
    random = np.random.default_rng(0)
    sizes = (random.lognormal(4, 1, 500).astype(int) % 256 + 1).tolist()
    rows = pack(sizes, 256)
    assert sorted(number for row in rows for number in row) == list(range(500))
    assert max(sum(sizes[number] for number in row) for row in rows) <= 256
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // 256) + 4


def test_the_best_fitting_row_is_taken():
    # The rows of 6 and 7 have room for 4 and 3; the 3 goes to the 7, which it fills, though it would fit the 6 too.
    assert pack([6, 7, 3], 10) == [(1, 2), (0,)]
    assert pack([5, 5, 5, 5], 10) == [(0, 1), (2, 3)]


def test_the_same_every_time_and_without_documents_nothing():
    sizes = [3, 9, 1, 4, 4, 8, 2]
    assert pack(sizes, 10) == pack(list(sizes), 10)
    assert pack([], 10) == []


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="document 1 has 11 positions"):
        pack([3, 11], 10)
