"""Factors of experts mean the same update in MLX's layout and in PEFT's."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.export.expert_factors import from_peft, fused, split, to_peft

EXPERTS, INPUTS, ROWS = 5, 7, 4


def factors(rank):
    return mx.random.normal((EXPERTS, rank, INPUTS)), mx.random.normal((EXPERTS, ROWS, rank))


def test_pefts_layout_is_that_of_its_definition():
    """PEFT: reshape A to (experts, r, in) and B to (out, r, experts), then "o r e, e r i -> e o i"."""
    a, b = factors(3)
    theirs_a, theirs_b = to_peft(a, b)
    assert theirs_a.shape == (EXPERTS * 3, INPUTS)
    assert theirs_b.shape == (ROWS, 3 * EXPERTS)
    shaped = np.array(theirs_b).reshape(ROWS, -1, EXPERTS), np.array(theirs_a).reshape(EXPERTS, -1, INPUTS)
    np.testing.assert_allclose(np.einsum("ore,eri->eoi", *shaped), np.array(b @ a), atol=1e-5)
    for ours, back in zip((a, b), from_peft(theirs_a, theirs_b, EXPERTS), strict=True):
        assert mx.array_equal(ours, back)


@pytest.mark.parametrize("names", [("gate", "up"), ("gate",), ("up",)])
def test_gate_and_up_become_one_matrix_and_come_back(names):
    parts = {name: factors(2 + index) for index, name in enumerate(names)}
    a, b = fused(parts, ("gate", "up"))
    zero = mx.zeros((EXPERTS, ROWS, INPUTS))
    rows = [parts[name][1] @ parts[name][0] if name in parts else zero for name in ("gate", "up")]
    assert mx.allclose(b @ a, mx.concatenate(rows, axis=1), atol=1e-5)
    back = split(a, b, ("gate", "up"))
    assert set(back) == set(names)
    for name, (part_a, part_b) in back.items():
        assert mx.allclose(part_b @ part_a, parts[name][1] @ parts[name][0], atol=1e-5)


def test_equal_ranks_come_back_as_they_were_and_a_full_matrix_keeps_its_rank():
    parts = {"gate": factors(3), "up": factors(3)}
    back = split(*fused(parts, ("gate", "up")), ("gate", "up"))
    for name, given in parts.items():
        assert all(mx.array_equal(one, other) for one, other in zip(given, back[name], strict=True))
    a, b = mx.random.normal((EXPERTS, 4, INPUTS)), mx.random.normal((EXPERTS, 2 * ROWS, 4))
    assert {name: part[1].shape[2] for name, part in split(a, b, ("gate", "up")).items()} == {"gate": 4, "up": 4}
    assert set(split(a, mx.zeros_like(b), ("gate", "up"))) == {"gate", "up"}
