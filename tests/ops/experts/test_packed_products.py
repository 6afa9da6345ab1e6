"""Which products of packed experts a kernel is asked to compute that unpacks them; plain ones stand for it here."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import pytest

from deltatune.machine import backend, nvidia
from deltatune.ops.experts import Projection, expert_block, grouped
from deltatune.ops.experts.grouped_hopper import Packed
from deltatune.ops.operator import first_use
from deltatune.ops.pointwise import unpacking
from dense_experts import LEAVES, NAMES, Case, value_and_gradients


class Asked(NamedTuple):
    """A product that was asked of the kernels."""

    packed: bool
    transpose: bool
    rank: int
    added: bool


@pytest.fixture
def calls(monkeypatch):
    """Records the products with matrices of the size of experts, on a CPU that passes for a Hopper GPU."""
    calls = []

    def product(operands, tile):
        rows, weight, ends, transpose, scale, onto, adapter = operands
        if isinstance(weight, Packed) or min(weight.shape[1:]) > 64:
            rank = 0 if adapter is None else adapter[0].shape[1]
            calls.append(Asked(isinstance(weight, Packed), transpose, rank, onto is not None))
        y = scale * _rows_times(rows, weight.unpacked() if isinstance(weight, Packed) else weight, ends, transpose)
        y = y if adapter is None else y + scale * _rows_times(*adapter, ends, transpose)
        return (y if onto is None else y + onto).astype(rows.dtype)

    def gradient(total, left, right, ends, scale=1.0):
        left, right = left.astype(mx.float32), right.astype(mx.float32)
        found = scale * mx.stack([left[a:b].T @ right[a:b] for a, b in _spans(ends)])
        return found if total is None else total + found

    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    monkeypatch.setattr(unpacking, "serves", lambda *_, **__: False)
    monkeypatch.setattr(grouped, "product", lambda *of: lambda: [product(*of)])
    monkeypatch.setattr(grouped, "gradient", lambda *of: lambda: [gradient(*of)])
    monkeypatch.setattr(first_use, "is_right", lambda *_, **__: True)
    return calls


def _spans(ends: mx.array) -> list[tuple[int, int]]:
    stops = [int(end) for end in ends]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _rows_times(rows: mx.array, weight: mx.array, ends: mx.array, transpose: bool) -> mx.array:
    wide = weight.astype(mx.float32)
    wide = wide.swapaxes(1, 2) if transpose else wide
    return mx.concatenate([rows[a:b].astype(mx.float32) @ wide[e] for e, (a, b) in enumerate(_spans(ends)) if b > a])


def _gradients(rank: int, **packing) -> dict[str, mx.array]:
    """Return the gradients of a block with packed matrices."""
    case = Case(outer=256, inner=128, experts=4, tokens=30, rank=rank, dtype=mx.bfloat16)
    packed = {}
    for name in NAMES:
        words, scales, *biases = mx.quantize(case.arrays[f"{name}.weight"], **packing)
        packed[name] = {"weight": words, "scales": scales, "biases": biases[0] if biases else None, **packing}

    def run(case, given):
        up, down, gate = (
            Projection(**packed[name], **{leaf: given[f"{name}.{leaf}"] for leaf in LEAVES[1:]}, trains=LEAVES[2:])
            for name in NAMES
        )
        return expert_block(given["x"], case.indices, given["scores"], up, down, gate)

    return value_and_gradients(run, case, {n: a for n, a in case.arrays.items() if not n.endswith("weight")})


@pytest.mark.parametrize("rank", [8, 4])
@pytest.mark.parametrize("group_size", [32, 64])
def test_no_matrix_is_unpacked_before_its_products(group_size, rank, calls, monkeypatch):
    """An adapter's product that the kernel cannot add is a product of its own."""
    found = _gradients(rank, group_size=group_size, bits=4)
    own, joined = (rank, 2 * rank) if rank == 8 else (0, 0)
    forward, onto = Asked(True, True, own, False), Asked(True, False, joined, True)
    assert sorted(calls) == sorted([forward] * 3 + [Asked(True, False, own, False), Asked(True, False, 0, False), onto])
    calls.clear()
    monkeypatch.setattr(Projection, "_packed", lambda *_: None)
    reference = _gradients(rank, group_size=group_size, bits=4)
    assert not any(call.packed for call in calls)
    assert all(mx.array_equal(found[name], reference[name]) for name in reference)


@pytest.mark.parametrize("packing", [{"bits": 8}, {"group_size": 128}, {"mode": "mxfp4", "group_size": 32}])
def test_other_packings_are_unpacked_as_a_whole(packing, calls):
    _gradients(8, **{"bits": 4, "group_size": 64} | packing)
    assert calls
    assert not any(call.packed for call in calls)


def test_a_kernel_that_is_wrong_leaves_the_matrices_to_be_unpacked(calls, monkeypatch):
    """The group size is the last part of a product's kind."""
    monkeypatch.setattr(first_use, "is_right", lambda _, *kind, **__: kind[-1] not in (32, 64))
    _gradients(8, group_size=64, bits=4)
    assert calls
    assert not any(call.packed for call in calls)


def test_a_product_that_the_kernel_cannot_compute_is_unpacked_alone(calls, monkeypatch):
    """Products of packed matrices onto others are wrong here, so that the last of the backward pass unpacks first."""
    monkeypatch.setattr(first_use, "is_right", lambda _, *kind, **__: kind[2:3] != (True,) or kind[-1] == 0)
    _gradients(8, group_size=64, bits=4)
    assert [call for call in calls if not call.packed] == [Asked(False, False, 0, True)]
