"""LoRA's products by kernels: their text runs on the host machine, against float64. Outputs start as NaN."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from deltatune.lora.linear import with_low_rank
from deltatune.machine import backend, nvidia
from deltatune.ops import low_rank
from deltatune.ops.kernels.launch import FOLDER, Launch, header
from deltatune.ops.low_rank import LowRankKernel, columns_product, rows_product

TEXT = (
    header("metal", ()) + (Path(__file__).parent / "fragments_host.h").read_text() + (FOLDER / "low_rank.h").read_text()
)
SCALE = 1.75
ROUNDING = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
# Rows, width and rank: no whole block, no whole fragment, and several rounds of every loop.
SIZES = [
    (1, 64, 1),
    (17, 136, 3),
    (63, 64, 8),
    (64, 1024, 8),
    (65, 1096, 16),
    (600, 72, 64),
    (2100, 16, 12),
]


@pytest.fixture(scope="module")
def make_machine(host_folder, host_module):
    """Return make_machine(text, watch=False) -> a host machine with the least memory of a block on NVIDIA GPUs."""

    def machine(text: str = TEXT, watch: bool = False):
        return host_module.HostMachine(host_folder, text, watch, 99 * 1024, cuda=True)

    return machine


@pytest.fixture(scope="module")
def gpu(make_machine):
    return make_machine()


def _wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), dtype=np.float64)


def _drawn(dtype: mx.Dtype, *shapes: tuple[int, ...]) -> list[mx.array]:
    draw = np.random.default_rng(sum(shapes[0]))
    return [mx.array(draw.normal(size=shape).astype(np.float32)).astype(dtype) for shape in shapes]


def _worst(found: mx.array, left: np.ndarray, right: np.ndarray) -> float:
    """The largest error of SCALE * left right, as a share of what rounding and fp32 sums allow for that element."""
    exact = SCALE * left @ right
    assert found.shape == exact.shape
    sums = left.shape[1] * 2.0**-23 * SCALE * np.abs(left) @ np.abs(right)
    worst = (np.abs(_wide(found) - exact) / (ROUNDING[found.dtype] * np.abs(exact) + sums + 2.0**-24)).max()
    return float("inf") if np.isnan(worst) else float(worst)


def _all_four(machine, dtype: mx.Dtype, rows: int, width: int, rank: int, seed: int = 1) -> list[float]:
    """The errors of both products along rows, and of both over rows."""
    x, a, d = _drawn(dtype, (rows, width), (width, rank), (rows, rank))
    execute, b = partial(machine.run, seed=seed), mx.contiguous(a.T)
    found = [rows_product(x, a, SCALE, execute=execute), rows_product(x, b, SCALE, transpose=True, execute=execute)]
    errors = [_worst(y, _wide(x), _wide(a)) for y in found]
    errors.append(_worst(columns_product(x, d, SCALE, execute=execute), _wide(x).T, _wide(d)))
    return [*errors, _worst(columns_product(d, x, SCALE, execute=execute), _wide(d).T, _wide(x))]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_against_float64(sizes, gpu):
    assert max(_all_four(gpu, mx.bfloat16, *sizes)) <= 1


def test_products_in_fp16(gpu):
    assert max(_all_four(gpu, mx.float16, 70, 136, 5)) <= 1


@pytest.mark.parametrize(("rank", "lines"), [(8, 32), (8, 64), (32, 64), (64, 16), (64, 32)])
def test_every_number_of_lines(rank, lines, gpu, monkeypatch):
    monkeypatch.setattr(low_rank, "_lines", lambda *_: lines)
    assert max(_all_four(gpu, mx.bfloat16, 70, 136, rank)) <= 1


def test_arrays_that_are_not_aligned(make_machine, host_module):
    """The text takes the way of unaligned arrays for all of them."""
    machine = make_machine(host_module.plant(TEXT, "if (starts_at_multiple<16>", "if (!starts_at_multiple<16>"))
    assert max(_all_four(machine, mx.bfloat16, 70, 136, 3)) <= 1
    assert max(_all_four(machine, mx.bfloat16, 70, 136, 8)) <= 1


def test_leading_axes_and_the_shapes_of_results(gpu):
    x, b, h = _drawn(mx.bfloat16, (2, 9, 40), (4, 40), (2, 9, 4))
    y = rows_product(x, b, SCALE, transpose=True, execute=gpu.run)
    assert y.shape == (2, 9, 4)
    assert _worst(y.reshape(18, 4), _wide(x).reshape(18, 40), _wide(b).T) <= 1
    assert columns_product(h, x, execute=gpu.run).shape == (4, 40)
    assert columns_product(x, h, execute=gpu.run).shape == (40, 4)


def test_the_order_of_lanes_changes_no_bit_and_nothing_races(make_machine):
    machine = make_machine(watch=True)
    x, a, d = _drawn(mx.bfloat16, (70, 136), (136, 8), (70, 8))
    for product, other in ((rows_product, a), (columns_product, d)):
        one, two = (product(x, other, SCALE, execute=partial(machine.run, seed=seed)) for seed in (1, 2))
        assert mx.array_equal(one, two)


# Each defect: the text, and what replaces it.
DEFECTS = {
    "other inputs of the weight": ("(g >> 1) * 8 + i * 2 + (g & 1)", "(g >> 1) * 8 + (i ^ 1) * 2 + (g & 1)"),
    "rows in another order": ("t * 2 + (i & 1) + (i >> 1) * 8", "t * 4 + i"),
    "rows past the end": ("row < rows && k < inputs ? 8 : 0", "k < inputs ? 8 : 0"),
    "inputs past the end": ("row < rows && k < inputs ? 8 : 0", "row < rows ? 8 : 0"),
    "columns past the end": ("row < rows && column < columns ?", "row < rows ?"),
    "ranks past the end": ("column < RANK && k < inputs ? 8 : 0", "k < inputs ? 8 : 0"),
    "a result past the end": ("if (from + line >= lines) continue;", ""),
    "no transposed fragments": ("if (!TRANSPOSED) b = across_lanes(b)", "if (TRANSPOSED) b = across_lanes(b)"),
    "lines that are not neighbours": ("place + 2 * m + 1, n", "place + 2 * m, n"),
    "no barrier before the sums": ("  barrier();\n", ""),
    "a group left out": ("group < GROUPS; ++group) sum", "group < GROUPS - 1; ++group) sum"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect(defect, make_machine, host_module):
    machine, fault = make_machine(host_module.plant(TEXT, *DEFECTS[defect]), watch=True), None
    try:
        worst = max(_all_four(machine, mx.bfloat16, 2060 if "group" in defect else 41, 1032, 5))
    except host_module.HostError as error:
        fault = str(error)
    # The fault comes from the run and not from the compiler; without one, a result is wrong.
    assert fault.startswith("low_rank_") if fault else not worst <= 1


KERNELS = [LowRankKernel(name, mx.bfloat16, 8, 16, turned) for name in ("rows", "columns") for turned in (False, True)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.name}-{kernel.turned}")
def test_a_kernel_that_is_wrong_or_fails_is_not_used(kernel, gpu, caplog):
    def wrong(launch: Launch) -> list[mx.array]:
        return [array * 1.05 for array in gpu.run(launch)]

    def fails(_: Launch) -> list[mx.array]:
        raise RuntimeError("no compiler")

    for execute, warning in ((gpu.run, ""), (wrong, "off by"), (fails, "no compiler")):
        caplog.clear()
        assert low_rank._passes_trial(kernel, execute) is (not warning)
        assert warning in caplog.text
        assert bool(caplog.records) is bool(warning)


def test_when_the_kernels_are_used(monkeypatch):
    monkeypatch.setattr(low_rank, "_passes_trial", lambda *_: True)
    monkeypatch.setattr(backend, "device", lambda: "cuda")

    def served(shape=(2048, 32), dtype=mx.bfloat16, rank=8, other=mx.bfloat16) -> bool:
        return low_rank.serves("rows", mx.zeros(shape, dtype), mx.zeros((shape[1], rank), other), rank, False)

    assert served()
    assert served(dtype=mx.float16, other=mx.float16)
    assert served(rank=64)
    assert not served(shape=(2047, 32))
    assert not served(shape=(4096, 36))
    assert not served(rank=65)
    assert not served(dtype=mx.float32, other=mx.float32)
    assert not served(other=mx.float16)
    for device in ("cpu", "metal"):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert not served()


def test_how_many_lines_a_block_takes(monkeypatch):
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.H200)
    assert [low_rank._lines(total, 8) for total in (1, 1024, 2048, 3584, 4096, 16384)] == [16, 16, 16, 32, 32, 64]
    assert low_rank._lines(16384, 64) == 32


@pytest.fixture
def on_gpu(gpu, monkeypatch) -> list[str]:
    """Pretend that MLX runs on an NVIDIA GPU, on which every product is large; returns the kernels' names, as used."""
    names = []

    def run(launch: Launch) -> list[mx.array]:
        names.append(launch.name)
        return gpu.run(launch)

    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(low_rank, "LEAST", 1)
    monkeypatch.setattr(low_rank, "_passes_trial", lambda *_: True)
    monkeypatch.setattr(Launch, "run", run)
    return names


def test_a_layer_of_lora_takes_its_narrow_products_from_the_kernels(on_gpu):
    arrays = _drawn(mx.bfloat16, (2, 9, 64), (64, 4), (4, 40), (64, 40), (2, 9, 40))
    x, a, b, weight, dy = arrays

    def update(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return with_low_rank(lambda x: x @ weight, x, a, b, SCALE)

    (y,), gradients = mx.vjp(update, [x, a, b], [dy])
    mx.eval(y, gradients)
    assert on_gpu == ["low_rank_rows", "low_rank_rows", "low_rank_columns", "low_rank_columns"]
    x, a, b, weight, dy = (_wide(array) for array in arrays)
    exact = [x @ weight + SCALE * x @ a @ b, dy @ weight.T + SCALE * dy @ b.T @ a.T]
    exact += [SCALE * np.einsum("ijk,ijr->kr", x, dy @ b.T), SCALE * np.einsum("ijr,ijn->rn", x @ a, dy)]
    for found, expected in zip((y, *gradients), exact, strict=True):
        # Two results are rounded to bf16 one after another.
        assert np.abs(_wide(found) - expected).max() <= 2.0**-6 * np.abs(expected).max()


def test_a_second_derivative_is_that_of_the_products(on_gpu):
    """The gradient of a gradient of LoRA is one of the kernels' own results."""
    x, a, b = _drawn(mx.bfloat16, (9, 64), (64, 4), (4, 64))
    by_kernel = [lambda x, a: rows_product(x, a, SCALE), lambda x, b: rows_product(x, b, SCALE, transpose=True)]
    by_kernel += [lambda x, h: columns_product(x, h, SCALE), lambda x, h: columns_product(h, x, SCALE)]
    plain = [lambda x, a: SCALE * x @ a, lambda x, b: SCALE * x @ b.T]
    plain += [lambda x, h: SCALE * x.T @ h, lambda x, h: SCALE * h.T @ x]
    h = x @ a
    for ours, theirs, other in zip(by_kernel, plain, (a, b, h, h), strict=True):
        arrays = [x, other]
        dy = mx.ones_like(ours(*arrays))
        found = mx.vjp(lambda *given, ours=ours: [ours(*given)], arrays, [dy])[1]
        exact = [array.astype(mx.float32) for array in arrays]
        expected = mx.vjp(lambda *given, theirs=theirs: [theirs(*given)], exact, [dy.astype(mx.float32)])[1]
        for one, true in zip(found, expected, strict=True):
            assert np.abs(_wide(one) - _wide(true)).max() <= 2.0**-6 * np.abs(_wide(true)).max()
    assert on_gpu
