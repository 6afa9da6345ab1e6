"""Which products the block asks of the kernels for sorted rows on CUDA, replaced by plain products here."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from deltatune.machine import backend
from deltatune.ops.checkpoint import checkpoint
from deltatune.ops.experts import block as block_module
from deltatune.ops.experts import grouped
from deltatune.ops.experts import projection as projection_module
from deltatune.ops.experts.tiles import Chunk, Sorted
from deltatune.ops.experts.tolerances import NARROW_NORM
from deltatune.ops.operator import first_use
from dense_experts import LEAVES, Case, block, errors, expected, value_and_gradients
from layouts import has_gaps


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of the kernels, with their shapes, on a CPU that passes for a GPU."""
    calls = []

    def spans(ends: mx.array) -> list[tuple[int, int]]:
        stops = [int(end) for end in ends]
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def scaled(values: mx.array, scale) -> mx.array:
        return values * (scale if isinstance(scale, float) else scale.astype(mx.float32))

    def product(operands, tile):
        rows, weight, ends, transpose, scale, onto, adapter = operands
        assert rows.ndim == 2
        assert ends.dtype == mx.int32
        assert ends.shape == weight.shape[:1]
        assert rows.dtype == weight.dtype == mx.bfloat16
        assert onto is None or onto.dtype == mx.bfloat16
        assert int(ends[-1]) == rows.shape[0]
        assert adapter is None
        calls.append(("product", rows.shape[1], weight.shape, transpose, onto is not None))
        wide = weight.astype(mx.float32)
        wide = wide.swapaxes(1, 2) if transpose else wide
        parts = [rows[a:b].astype(mx.float32) @ wide[e] for e, (a, b) in enumerate(spans(ends)) if b > a]
        y = scaled(mx.concatenate(parts), scale)
        return (y if onto is None else y + onto).astype(rows.dtype)

    def gradient(total, left, right, ends, scale=1.0):
        assert left.dtype == right.dtype == mx.bfloat16
        assert total is None or total.dtype == mx.float32
        shape = (ends.size, left.shape[1], right.shape[1])
        assert total is None or total.shape == shape
        calls.append(("gradient", shape))
        left, right = left.astype(mx.float32), right.astype(mx.float32)
        found = scaled(mx.stack([left[a:b].T @ right[a:b] for a, b in spans(ends)]), scale)
        return found if total is None else total + found

    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(block_module, "GPU_CHUNK_BYTES", 2**18)
    monkeypatch.setattr(block_module, "ROWS_PER_EXPERT", {"cuda": 4})
    monkeypatch.setattr(grouped, "product", lambda *of: lambda: [product(*of)])
    monkeypatch.setattr(grouped, "gradient", lambda *of: lambda: [gradient(*of)])
    monkeypatch.setattr(first_use, "is_right", lambda *_, **__: True)
    return calls


def test_every_product_of_a_block(calls):
    case = Case(tokens=300, rank=8, dtype=mx.bfloat16, routing="few")
    found = value_and_gradients(block, case, case.arrays)
    assert found["up.lora_a"].dtype == mx.float32
    norms = {name: norm for name, (norm, _) in errors(found, expected(case)).items()}
    assert max(norms.values()) < NARROW_NORM, norms
    chunks = Sorted(case.tokens, case.k, case.experts, max(1, 2**18 // (4 * (3 * 32 + 6 * 24)) // case.k)).chunks
    assert chunks > 1
    experts, outer, inner, rank = case.experts, 32, 24, 8
    wide, narrow = (experts, inner, outer), (experts, outer, inner)
    per_chunk = {call: calls.count(call) / chunks for call in set(calls)}
    # Three weights each way, and no product twice, for what up and gate computed is kept.
    assert per_chunk["product", outer, wide, True, False] == 2
    assert per_chunk["product", inner, narrow, True, False] == 1
    assert per_chunk["product", inner, wide, False, False] == per_chunk["product", inner, wide, False, True] == 1
    assert per_chunk["product", outer, narrow, False, False] == 1
    # A of up and gate in one product each way. B's products are added to the outputs, A's to the inputs' gradients.
    both = (experts, 2 * rank, outer)
    assert per_chunk["product", outer, both, True, False] == per_chunk["product", 2 * rank, both, False, True] == 1
    assert per_chunk["product", rank, (experts, inner, rank), True, True] == 2
    assert per_chunk["product", inner, (experts, rank, inner), True, False] == 1
    assert per_chunk["product", rank, (experts, rank, inner), False, True] == 1
    assert per_chunk["gradient", both] == 1
    assert per_chunk["gradient", (experts, inner, rank)] == 2
    assert per_chunk["gradient", (experts, rank, inner)] == per_chunk["gradient", (experts, outer, rank)] == 1
    assert per_chunk["gradient", wide] == 2
    assert per_chunk["gradient", narrow] == 1


def test_a_checkpointed_block_keeps_nothing(calls):
    """Up and gate are multiplied again in the backward pass, where down's product has no use."""
    case = Case(tokens=40, rank=8, dtype=mx.bfloat16)
    wide, narrow = (case.experts, 24, 32), (case.experts, 32, 24)
    mx.eval(mx.grad(lambda arrays: checkpoint(lambda arrays: block(case, arrays))(arrays).sum())(case.arrays))
    products = [call[1:4] for call in calls if call[0] == "product"]
    runs = Sorted(40, case.k, case.experts, max(1, 2**18 // (4 * (3 * 32 + 6 * 24)) // case.k)).chunks
    assert products.count((32, wide, True)) == 3 * 2 * runs
    assert products.count((24, narrow, True)) == 2 * runs


def test_dropout_keeps_the_dtype_of_the_rows(calls):
    case = Case(rank=8, dtype=mx.bfloat16)
    arrays = {leaf: case.arrays[f"up.{leaf}"] for leaf in LEAVES if leaf != "bias"}
    one = block_module.Projection(**arrays, dropout=0.5, key=mx.random.key(3), trains=("lora_a",))
    chunk = Sorted(50, 2, 8, 50).chunk([case.indices], 0, [])
    rows = case.arrays["x"][:, None][chunk.token]
    low_rank = one.low_rank(rows, chunk)
    y = one.forward(rows, low_rank, chunk, None)
    d_low_rank = one.d_low_rank(y, chunk)
    dx = one.backward(y, d_low_rank, chunk, None)
    assert {array.dtype for array in (y, low_rank, dx, d_low_rank)} == {mx.bfloat16}
    assert calls


@pytest.mark.parametrize("change", [{"dtype": mx.float32}, {"outer": 36}], ids=["fp32", "a size of 36"])
def test_products_that_stay_with_mlx(change, calls):
    case = Case(**{"rank": 8} | change)
    mx.eval(value_and_gradients(block, case, case.arrays))
    assert all(36 not in call for call in calls)
    assert bool(calls) == (case.dtype != mx.float32)


def test_ends_are_the_indices_after_each_experts_last_row():
    chunk = Sorted(4, 2, 6, 3).chunk([mx.array([[5, 1], [1, 4], [1, 5], [0, 0]])], 0, [])
    assert chunk.ends is not None
    assert chunk.ends.dtype == mx.int32
    assert np.array_equal(np.array(chunk.ends), [0, 3, 3, 3, 4, 6])


def test_matrices_with_gaps_between_them_are_copied_on_cuda(monkeypatch):
    """MLX's CUDA products expect each expert's matrix right after the one before."""
    gaps = []

    def gather_mm(a, b, **options):
        gaps.append(has_gaps(b))
        return mx.zeros((*a.shape[:-1], b.shape[-1]))

    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(projection_module, "mx", SimpleNamespace(**{**vars(mx), "gather_mm": gather_mm}))
    larger = mx.random.normal((3, 10, 8))
    mx.eval(larger)
    indices = mx.array([0, 1, 1, 2], mx.uint32)
    chunk = Chunk(0, indices, indices, indices, None, mx.array([1, 3, 4], mx.int32))
    projection_module.product(mx.ones((4, 1, 8)), larger[:, :5], chunk, True)
    projection_module.product(mx.ones((4, 1, 5)), larger[:, 5:], chunk, False)
    assert gaps == [False, False]
