"""Which products the block asks of the kernels for sorted rows on CUDA, which plain products stand for here."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from checkpointing import checkpoint
from deltatune.machine import backend, nvidia
from deltatune.ops.experts import Projection, expert_block, grouped
from deltatune.ops.experts import block as block_module
from deltatune.ops.experts import projection as projection_module
from deltatune.ops.experts.grouped_hopper import GroupedProduct, Packed
from deltatune.ops.experts.tiles import Chunk, Sorted
from deltatune.ops.experts.trial_case import NARROW_NORM
from deltatune.ops.operator import kernel_operator
from deltatune.ops.pointwise import unpacking
from dense_experts import LEAVES, NAMES, Case, block, errors, expected, value_and_gradients
from layouts import has_gaps


@pytest.fixture
def calls(monkeypatch):
    """The calls of the kernels, on a CPU that passes for a GPU: shapes of gradients, and products.

    Of a product: the rows' width, the matrices' shape, whether they are stored by outputs, whether it is added onto
    rows, the rank of an adapter of which the product is added, and whether the matrices are packed.
    """
    calls = []

    def spans(ends: mx.array) -> list[tuple[int, int]]:
        stops = [int(end) for end in ends]
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def times(rows: mx.array, weight: mx.array, ends: mx.array, transpose: bool) -> mx.array:
        wide = weight.astype(mx.float32)
        wide = wide.swapaxes(1, 2) if transpose else wide
        return mx.concatenate([rows[a:b].astype(mx.float32) @ wide[e] for e, (a, b) in enumerate(spans(ends)) if b > a])

    def product(operands: GroupedProduct, tile: object) -> mx.array:
        rows, weight, ends, transpose, scale, onto, adapter = operands
        assert rows.ndim == 2
        assert ends.dtype == mx.int32
        assert ends.shape == weight.shape[:1]
        assert rows.dtype == weight.dtype == mx.bfloat16
        assert onto is None or onto.dtype == mx.bfloat16
        assert int(ends[-1]) == rows.shape[0]
        packed = isinstance(weight, Packed)
        rank = 0 if adapter is None else adapter[0].shape[1]
        calls.append((rows.shape[1], tuple(weight.shape), transpose, onto is not None, rank, packed))
        y = scale * times(rows, weight.unpacked() if packed else weight, ends, transpose)
        y = y if adapter is None else y + scale * times(*adapter, ends, transpose)
        return (y if onto is None else y + onto).astype(rows.dtype)

    def gradient(total: mx.array | None, left: mx.array, right: mx.array, ends: mx.array, scale=1.0) -> mx.array:
        assert left.dtype == right.dtype == mx.bfloat16
        assert total is None or total.dtype == mx.float32
        shape = (ends.size, left.shape[1], right.shape[1])
        assert total is None or total.shape == shape
        calls.append(shape)
        left, right = left.astype(mx.float32), right.astype(mx.float32)
        found = scale * mx.stack([left[a:b].T @ right[a:b] for a, b in spans(ends)])
        return found if total is None else total + found

    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(grouped, "product", lambda *of: lambda: [product(*of)])
    monkeypatch.setattr(grouped, "gradient", lambda *of: lambda: [gradient(*of)])
    monkeypatch.setattr(kernel_operator, "is_right", lambda *_, **__: True)
    return calls


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(block_module, "GPU_CHUNK_BYTES", 2**18)
    monkeypatch.setattr(block_module, "ROWS_PER_EXPERT", {"cuda": 4})


@pytest.mark.usefixtures("small_chunks")
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
    # Three weights each way, and no product twice, for what up and gate computed is kept. B's products are added to the
    # outputs, A's to the inputs' gradients.
    reader = (experts, rank, outer)
    assert per_chunk == {
        (outer, wide, True, False, 0, False): 2,
        (inner, narrow, True, False, 0, False): 1,
        (inner, wide, False, False, 0, False): 1,
        (inner, wide, False, True, 0, False): 1,
        (outer, narrow, False, False, 0, False): 1,
        (outer, reader, True, False, 0, False): 2,
        (rank, reader, False, True, 0, False): 2,
        (rank, (experts, inner, rank), True, True, 0, False): 2,
        (rank, (experts, outer, rank), True, True, 0, False): 1,
        (inner, (experts, rank, inner), True, False, 0, False): 1,
        (inner, (experts, inner, rank), False, False, 0, False): 2,
        (outer, (experts, outer, rank), False, False, 0, False): 1,
        (rank, (experts, rank, inner), False, True, 0, False): 1,
        reader: 2,
        (experts, inner, rank): 2,
        (experts, rank, inner): 1,
        (experts, outer, rank): 1,
        wide: 2,
        narrow: 1,
    }


@pytest.mark.usefixtures("small_chunks")
def test_a_checkpointed_block_keeps_nothing(calls):
    """Up and gate are multiplied again in the backward pass, where down's product has no use."""
    case = Case(tokens=40, rank=8, dtype=mx.bfloat16)
    wide, narrow = (case.experts, 24, 32), (case.experts, 32, 24)
    mx.eval(mx.grad(lambda arrays: checkpoint(lambda arrays: block(case, arrays))(arrays).sum())(case.arrays))
    products = [call[:3] for call in calls if isinstance(call[1], tuple)]
    runs = Sorted(40, case.k, case.experts, max(1, 2**18 // (4 * (3 * 32 + 6 * 24)) // case.k)).chunks
    assert products.count((32, wide, True)) == 3 * 2 * runs
    assert products.count((24, narrow, True)) == 2 * runs


@pytest.mark.usefixtures("small_chunks")
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
    assert "36" not in str(calls)
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


@pytest.fixture
def of_experts(calls, monkeypatch):
    """Return of_experts(): of the products with matrices of the size of experts, all but sizes; the GPU is Hopper's."""
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    monkeypatch.setattr(unpacking, "serves", lambda *_, **__: False)
    return lambda: [call[2:] for call in calls if isinstance(call[1], tuple) and min(call[1][1:]) > 64]


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
def test_no_matrix_is_unpacked_before_its_products(group_size, rank, calls, of_experts, monkeypatch):
    """An adapter's product that the kernel cannot add is a product of its own."""
    found = _gradients(rank, group_size=group_size, bits=4)
    own = rank if rank == 8 else 0
    # Whether matrices are stored by outputs, whether a product is added onto rows, its adapter's rank; all are packed.
    forward, onto = (True, False, own, True), (False, True, own, True)
    backward = [(False, False, own, True), (False, False, own, True), onto]
    assert sorted(of_experts()) == sorted([forward] * 3 + backward)
    calls.clear()
    monkeypatch.setattr(Projection, "_packed", lambda *_: None)
    reference = _gradients(rank, group_size=group_size, bits=4)
    assert not any(call[3] for call in of_experts())
    assert all(mx.array_equal(found[name], reference[name]) for name in reference)


@pytest.mark.parametrize("packing", [{"bits": 8}, {"group_size": 128}, {"mode": "mxfp4", "group_size": 32}])
def test_other_packings_are_unpacked_as_a_whole(packing, of_experts):
    _gradients(8, **{"bits": 4, "group_size": 64} | packing)
    assert of_experts()
    assert not any(call[3] for call in of_experts())


def test_a_kernel_that_is_wrong_leaves_the_matrices_to_be_unpacked(of_experts, monkeypatch):
    """The group size is the last part of a product's kind."""
    monkeypatch.setattr(kernel_operator, "is_right", lambda _, *kind, **__: kind[-1] not in (32, 64))
    _gradients(8, group_size=64, bits=4)
    assert of_experts()
    assert not any(call[3] for call in of_experts())


def test_a_product_that_the_kernel_cannot_compute_is_unpacked_alone(of_experts, monkeypatch):
    """Products of packed matrices onto others are wrong here, so that the last of the backward pass unpacks first."""
    monkeypatch.setattr(kernel_operator, "is_right", lambda _, *kind, **__: kind[2:3] != (True,) or kind[-1] == 0)
    _gradients(8, group_size=64, bits=4)
    assert [call for call in of_experts() if not call[3]] == [(False, True, 0, False)]
