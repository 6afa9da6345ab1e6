"""LoRA's products by kernels: their text runs on the host machine, against float64. Outputs start as NaN."""

from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from host_machine import defects, some_daily

from beside import load
from deltatune.lora.linear import with_low_rank
from deltatune.machine import backend, nvidia
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator.case import judged
from deltatune.ops.operator.measure import as_float64
from deltatune.ops.products import low_rank
from deltatune.ops.products.low_rank import (
    BOTH,
    COLUMNS,
    ROWS,
    WIDE,
    LowRankProduct,
    add_product,
    add_products,
    both_products,
    columns_product,
    columns_products,
    rows_product,
    rows_products,
)

TEXT = load(Path(__file__).with_name("host_machine.py")).cuda_text(ROWS)
SCALE = 1.75
ROUNDING = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
# Rows, width and rank: no whole block, no whole fragment, and several rounds of every loop.
SIZES = [
    (1, 64, 1),
    (17, 136, 3),
    (65, 1096, 16),
    (600, 72, 64),
    *(pytest.param(sizes, marks=pytest.mark.weekly) for sizes in ((63, 64, 8), (64, 1024, 8), (2100, 16, 7))),
]


@pytest.fixture(scope="module")
def make_machine(host_folder, host_module):
    """Return make_machine(text, watch=False) -> a host machine with the least memory of a block on NVIDIA GPUs."""

    def machine(text: str = TEXT, watch: bool = False):
        return host_module.HostMachine(host_folder, text, watch, 99 * 1024, cuda=True, optimised=watch)

    return machine


@pytest.fixture(scope="module")
def gpu(make_machine):
    return make_machine()


@pytest.fixture
def divide(monkeypatch):
    """Return divide(side, each, lines=32): the numbers of stripes and of rows that the blocks of all kernels take."""

    def set_division(side: int, each: int, lines: int = 32) -> None:
        monkeypatch.setattr(low_rank, "division", lambda _rows, _columns, _rank, along: (side if along else 1, each))
        monkeypatch.setattr(low_rank, "rows_lines", lambda *_: lines)

    return set_division


def _drawn(*shapes: tuple[int, ...], dtype: mx.Dtype = mx.bfloat16) -> list[mx.array]:
    draw = np.random.default_rng(sum(shapes[0]))
    return [mx.array(draw.normal(size=shape).astype(np.float32)).astype(dtype) for shape in shapes]


def _worst(found: mx.array, exact: np.ndarray, size: np.ndarray, terms: int) -> float:
    """The largest error as a share of each element's bound: one rounding, and one in fp32 for each term of a sum.

    `size` is what the terms' magnitudes add up to.
    """
    assert found.shape == exact.shape
    bound = ROUNDING[found.dtype] * np.abs(exact) + terms * 2.0**-23 * size + 2.0**-24
    worst = (np.abs(as_float64(found) - exact) / bound).max()
    return float("inf") if np.isnan(worst) else float(worst)


def _on(device, function, *arguments, **options):
    with on(device):
        return function(*arguments, **options)


# Of x [rows, width], and of each adapter a [width, rank], its transpose b, and h [rows, rank]: our products along rows,
# over rows, of both at once, and those that are added to x; their definitions; and which axis each result sums over.
PRODUCTS = {
    "rows": (lambda x, a, b, h: rows_products(x, a, SCALE), lambda x, a, b, h: [SCALE * x @ one for one in a], [1]),
    "rows, b": (
        lambda x, a, b, h: [rows_product(x, b[0], SCALE, transpose=True)],
        lambda x, a, b, h: [SCALE * x @ b[0].T],
        [1],
    ),
    "both": (
        lambda x, a, b, h: [*both_products(x, h[0], b[0], SCALE)],
        lambda x, a, b, h: [SCALE * x @ b[0].T, SCALE * h[0].T @ x],
        [1, 0],
    ),
    "columns": (
        lambda x, a, b, h: columns_products(x, h, SCALE),
        lambda x, a, b, h: [SCALE * x.T @ one for one in h],
        [0],
    ),
    "across": (lambda x, a, b, h: [columns_product(h[0], x, SCALE)], lambda x, a, b, h: [SCALE * h[0].T @ x], [0]),
    "wide": (lambda x, a, b, h: [add_product(x, h[0], b[0], SCALE)], lambda x, a, b, h: [x + SCALE * h[0] @ b[0]], [2]),
    "wide, a": (
        lambda x, a, b, h: [add_products(x, h, a, SCALE)],
        lambda x, a, b, h: [x + SCALE * sum(one @ w.T for one, w in zip(h, a, strict=True))],
        [2],
    ),
}
# Those of several adapters.
OF_SEVERAL = ("rows", "columns", "wide, a")


def _operands(dtype: mx.Dtype, rows: int, width: int, rank: int, count: int = 1) -> list:
    x, *more = _drawn((rows, width), *[(width, rank)] * count, *[(rows, rank)] * count, dtype=dtype)
    return [x, more[:count], [mx.contiguous(a.T) for a in more[:count]], more[count:]]


def _converted(change, operands: list) -> list:
    return [change(each) if isinstance(each, mx.array) else list(map(change, each)) for each in operands]


def _errors(
    machine, dtype: mx.Dtype, rows: int, width: int, rank: int, products=tuple(PRODUCTS), count: int = 1
) -> list[float]:
    """The errors of these products, of so many adapters."""
    operands, terms = _operands(dtype, rows, width, rank, count), (rows + 1, width + 1, count * rank + 1)
    wide = _converted(as_float64, operands)
    sizes = [np.abs(wide[0]), *([*map(np.abs, each)] for each in wide[1:])]
    machine.foresee(lambda: [PRODUCTS[name][0](*operands) for name in products])
    errors = []
    for name in products:
        ours, theirs, axes = PRODUCTS[name]
        each = zip(_on(machine.run, ours, *operands), theirs(*wide), theirs(*sizes), axes * count, strict=False)
        errors += [_worst(*results, terms[axis]) for *results, axis in each]
    return errors


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_against_float64(sizes, gpu):
    assert max(_errors(gpu, mx.bfloat16, *sizes)) <= 1


def test_products_in_fp16(gpu):
    assert max(_errors(gpu, mx.float16, 70, 136, 5)) <= 1


@pytest.mark.parametrize(("rank", "lines"), [(8, 64), (32, 64), (64, 16), (64, 32)])
def test_every_number_of_rows_that_a_block_takes(rank, lines, gpu, divide):
    divide(1, 256, lines)
    assert max(_errors(gpu, mx.bfloat16, 70, 136, rank)) <= 1


# Ten and more parts of the rows, and of the columns: a block loads the shares of eight at once.
@pytest.mark.parametrize(
    ("side", "width", "rank"),
    [(1, 648, 8), (2, 200, 7), pytest.param(8, 1096, 16, marks=pytest.mark.weekly), (4, 40, 64)],
)
def test_sums_of_several_blocks(side, width, rank, gpu, divide):
    each = low_rank.round_rows(rank, side)
    divide(side, each)
    assert max(_errors(gpu, mx.bfloat16, 9 * each + 5, width, rank)) <= 1


@pytest.mark.parametrize(("count", "rank"), [(2, 8), (3, 16), (4, 16)])
def test_products_of_several_adapters_against_float64(count, rank, gpu, divide):
    divide(1, 256)
    for rows, width in ((70, 136), (600, 200)):
        assert max(_errors(gpu, mx.bfloat16, rows, width, rank, OF_SEVERAL, count)) <= 1


def test_arrays_that_are_not_aligned(make_machine, host_module, divide):
    """The text takes the way of unaligned arrays for all of them."""
    machine = make_machine(host_module.plant(TEXT, "if (starts_at_multiple<16>", "if (!starts_at_multiple<16>"))
    divide(2, 128)
    for rank in (3, 8):
        assert max(_errors(machine, mx.bfloat16, 270, 136, rank)) <= 1


def test_leading_axes_and_the_shapes_of_results(gpu):
    x, b, h = _drawn((2, 9, 40), (4, 40), (2, 9, 4))
    with on(gpu.run):
        y = rows_product(x, b, SCALE, transpose=True)
        assert columns_product(h, x).shape == (4, 40)
        assert columns_product(x, h).shape == (40, 4)
        assert [y.shape for y in both_products(x, h, b)] == [(2, 9, 4), (4, 40)]
        assert add_product(x, h, b).shape == (2, 9, 40)
    assert y.shape == (2, 9, 4)
    x, b = as_float64(x), as_float64(b).T
    assert _worst(y, SCALE * x @ b, SCALE * np.abs(x) @ np.abs(b), 41) <= 1


@pytest.mark.parametrize(("products", "count"), [(("rows, b", "columns", "both", "wide"), 1), (OF_SEVERAL, 3)])
def test_the_order_of_lanes_and_blocks_changes_no_bit_and_nothing_races(products, count, make_machine, divide):
    machine = make_machine(watch=True)
    operands = _operands(mx.bfloat16, 270, 136, 8, count)
    divide(1, 256 if count == 1 else 128)
    for name in products:
        runs = [_on(partial(machine.run, seed=seed), PRODUCTS[name][0], *operands) for seed in (1, 2)]
        assert all(map(mx.array_equal, *runs))


@pytest.mark.parametrize("shape", [(600, 264), (600, 64), (200, 264)], ids=str)
def test_no_mark_stays_in_memory(shape, gpu, divide):
    """A later launch may get the memory of the marks, and would take those that are set for its own."""
    marks = []

    def run(launch: Launch) -> list[mx.array]:
        outputs = gpu.run(launch)
        marks.append(outputs[list(launch.outputs).index("handed")])
        return outputs

    divide(1, 256)
    x, b, h = _drawn(shape, (8, shape[1]), (shape[0], 8))
    with on(run):
        both_products(x, h, b)
        columns_product(h, x)
    set_once = np.array([0x7FE5FFC6, 0x7FD3FFA9], np.uint32)
    for found in marks:
        assert not (np.array(found).view(np.uint32).reshape(-1, 2) == set_once).all(axis=1).any()


# Each defect, after a product that shows it: the text, and what replaces it. The others are of several adapters.
DEFECTS = defects("low rank", TEXT)
OF_ADAPTERS = defects("adapted products", TEXT)


@pytest.mark.parametrize("defect", [*some_daily(DEFECTS), *OF_ADAPTERS])
def test_a_planted_defect(defect, make_machine, host_module, divide):
    """A fault comes from the run and not from the compiler."""
    machine = make_machine(host_module.plant(TEXT, *(DEFECTS | OF_ADAPTERS)[defect]), watch=True)
    if defect in OF_ADAPTERS:
        errors = partial(_errors, machine, mx.bfloat16, 70, 136, 8, OF_SEVERAL, 3)
    else:
        divide(4, 128)
        # More inputs than all groups load at once.
        width = 1032 if "inputs" in defect else 520
        errors = partial(_errors, machine, mx.bfloat16, 530, width, 5, [defect.split(":")[0]])
    assert host_module.shows(lambda: not max(errors()) <= 1, "low_rank_")


KERNELS = [
    LowRankProduct(ROWS, mx.bfloat16, 8, False, block_rows=16),
    LowRankProduct(ROWS, mx.bfloat16, 8, True, block_rows=16),
    LowRankProduct(COLUMNS, mx.bfloat16, 8, False, block_rows=256),
    LowRankProduct(COLUMNS, mx.bfloat16, 8, True, block_rows=256),
    LowRankProduct(BOTH, mx.bfloat16, 8, block_rows=128, side=2),
    LowRankProduct(WIDE, mx.bfloat16, 8, False),
    LowRankProduct(WIDE, mx.bfloat16, 8, True),
    # Of several adapters.
    LowRankProduct(ROWS, mx.bfloat16, 24, False, 3, 16),
    LowRankProduct(COLUMNS, mx.bfloat16, 32, False, 2, 256),
    LowRankProduct(WIDE, mx.bfloat16, 16, True, 2),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_kernel_that_is_wrong_is_not_used(kernel, gpu):
    case = low_rank.trial_case(kernel)
    assert judged(case, gpu.run, "kernel").passed
    assert not judged(case, lambda launch: [array * 1.05 for array in gpu.run(launch)], "kernel").passed


def test_when_the_kernels_are_used(monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cuda")

    def covered(shape=(2048, 32), dtype=mx.bfloat16, rank=8, other=mx.bfloat16) -> bool:
        return low_rank.covered(rank, mx.zeros(shape, dtype), mx.zeros((shape[1], rank), other))

    assert covered()
    assert covered(dtype=mx.float16, other=mx.float16)
    assert covered(rank=64)
    assert not covered(shape=(2047, 32))
    assert not covered(shape=(4096, 36))
    assert not covered(rank=65)
    assert not covered(dtype=mx.float32, other=mx.float32)
    assert not covered(other=mx.float16)
    for device in ("cpu", "metal"):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert not covered()


def test_how_the_work_is_divided(monkeypatch):
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.H200)
    rows = [low_rank.rows_lines(total, 8) for total in (1, 1024, 2048, 3584, 4096, 16384)]
    assert rows == [16, 16, 16, 32, 32, 64]
    assert low_rank.rows_lines(16384, 64) == 32
    low_rank.division.cache_clear()
    for columns in (16, 512, 1024, 2048, 3584, 4096, 6144):
        for along in (False, True):
            side, each = low_rank.division(4096, columns, 8, along)
            assert each % low_rank.round_rows(8, side) == 0
            blocks = -(-columns // (64 * side)) * -(-4096 // each)
            assert blocks >= (16 if columns == 16 else 128)
    low_rank.division.cache_clear()


@pytest.fixture
def on_gpu(gpu, pretend_gpu, monkeypatch):
    """Pretend that MLX runs on an NVIDIA GPU, on which every product is large; returns the kernels' names, as used."""
    monkeypatch.setattr(low_rank, "LEAST", 1)
    return pretend_gpu(gpu.run)


def test_a_layer_of_lora_takes_its_narrow_products_from_the_kernels(on_gpu):
    x, a, b, weight, dy = arrays = _drawn((2, 9, 64), (64, 4), (4, 40), (64, 40), (2, 9, 40))

    def update(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return with_low_rank(lambda x: x @ weight, x, a, b, SCALE)

    (y,), gradients = mx.vjp(update, [x, a, b], [dy])
    mx.eval(y, gradients)
    forward, backward = ["low_rank_rows", "low_rank_wide"], ["low_rank_both", "low_rank_wide", "low_rank_columns"]
    assert on_gpu == forward + backward
    x, a, b, weight, dy = (as_float64(array) for array in arrays)
    exact = [x @ weight + SCALE * x @ a @ b, dy @ weight.T + SCALE * dy @ b.T @ a.T]
    exact += [SCALE * np.einsum("ijk,ijr->kr", x, dy @ b.T), SCALE * np.einsum("ijr,ijn->rn", x @ a, dy)]
    for found, expected in zip((y, *gradients), exact, strict=True):
        # Two results are rounded to bf16 one after another.
        assert np.abs(as_float64(found) - expected).max() <= 2.0**-6 * np.abs(expected).max()


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_second_derivative_is_that_of_the_products(name, on_gpu):
    """The gradient of a gradient of LoRA is one of the kernels' own results."""
    x, a, b, h = _operands(mx.bfloat16, 9, 64, 4)
    ours, theirs, _ = PRODUCTS[name]

    def gradients(function, arrays: list, d: list) -> list[mx.array]:
        return mx.vjp(lambda x, a, b, h: function(x, [a], [b], [h]), arrays, d)[1]

    arrays = [x, *a, *b, *h]
    d = [mx.ones_like(y) for y in ours(x, a, b, h)]
    exact, wide = ([array.astype(mx.float32) for array in group] for group in (arrays, d))
    for one, true in zip(gradients(ours, arrays, d), gradients(theirs, exact, wide), strict=True):
        assert np.abs(as_float64(one) - as_float64(true)).max() <= 2.0**-6 * np.abs(as_float64(true)).max()
    assert on_gpu
