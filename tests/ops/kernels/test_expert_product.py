"""Products of rows sorted by expert, and their gradients: the Metal text on the host machine, against float64.

Outputs start as NaN.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from deltatune.machine import backend
from deltatune.ops.experts import grouped, trial_case
from deltatune.ops.experts.grouped_hopper import GroupedProduct
from deltatune.ops.experts.tolerances import GROUPED
from deltatune.ops.kernels.launch import Launch, header
from deltatune.ops.operator import first_use

# Tiles (rows, columns, depth, groups across): small ones, so that few rows make many, and those that a GPU uses.
SMALL, TALL = (32, 32, 16, 2), (64, 32, 32, 1)
USED = {"wide": (128, 128, 64, 2), "flat": (64, 128, 32, 2), "narrow": (64, 16, 128, 1)}
USED_GRADIENT = {"wide": (128, 128, 64, 2), "low": (16, 128, 64, 4), "narrow": (128, 16, 64, 1)}
COUNTS = {
    "ragged": [33, 1, 32, 7, 64, 15],
    "empty experts": [0, 40, 0, 0, 3, 0],
    "all rows on one": [0, 0, 70],
    "all rows on the first": [70, 0, 0, 0],
    "one row": [0, 1, 0],
    "more experts than lanes": [0] * 20 + [5] + [2] * 20 + [0, 1],
    "an even cut": [32, 64, 32],
}
SIZES = {"K=8": (8, 40), "N=8": (40, 8), "K=24, N=40": (24, 40), "K=72, N=72": (72, 72)}


@pytest.fixture(scope="module")
def make_machine(host_folder, host_module):
    """Return make_machine(text, **options) -> a host machine with the shared memory of a block on an NVIDIA GPU."""
    return lambda text, **options: host_module.HostMachine(host_folder, text, bytes=227 * 1024, **options)


@pytest.fixture(scope="module")
def gpu(make_machine):
    return make_machine(header("metal", grouped.FILES))


def _wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), dtype=np.float64)


class ExpertCase:
    """Rows and matrices of experts, and the true products and gradients of the matrices."""

    def __init__(self, counts, inputs: int, outputs: int, dtype: mx.Dtype = mx.bfloat16):
        draw = np.random.default_rng(len(counts) + inputs)
        ends = np.cumsum(counts)
        spans = list(zip(ends - counts, ends, strict=True))
        self.ends, self.scale = mx.array(ends.astype(np.int32)), 1.75
        self.rows, self.dy, self.weight = (
            mx.array(draw.normal(size=size).astype(np.float32)).astype(dtype)
            for size in ((ends[-1], inputs), (ends[-1], outputs), (len(counts), outputs, inputs))
        )
        rows, dy, weight = _wide(self.rows), _wide(self.dy), _wide(self.weight)
        self.truth = self.scale * np.concatenate([rows[a:b] @ w.T for (a, b), w in zip(spans, weight, strict=True)])
        self.total = mx.array(draw.normal(size=weight.shape).astype(np.float32))
        self.gradient_truth = _wide(self.total) + self.scale * np.stack([dy[a:b].T @ rows[a:b] for a, b in spans])

    def product(self, machine, cut, transpose=True, onto=None, seed=1) -> mx.array:
        weight = self.weight if transpose else mx.contiguous(self.weight.swapaxes(-1, -2))
        operands = GroupedProduct(self.rows, weight, self.ends, transpose, self.scale, onto)
        launch = grouped.product(operands, cut)
        return machine.run(launch, seed)[0]

    def gradient(self, machine, cut, seed=1) -> mx.array:
        return machine.run(grouped.gradient(self.total, self.dy, self.rows, self.ends, self.scale, cut), seed)[0]


def _error(result: mx.array, truth: np.ndarray) -> float:
    """Return the largest error relative to the largest true element; NaN counts as infinite."""
    assert result.shape == truth.shape
    error = np.abs(_wide(result) - truth).max() / np.abs(truth).max()
    return np.inf if np.isnan(error) else float(error)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("counts", COUNTS)
def test_product(counts, sizes, gpu):
    """Matrices are stored by inputs and by outputs in turn."""
    transpose = (list(SIZES).index(sizes) + list(COUNTS).index(counts)) % 2 == 0
    case = ExpertCase(COUNTS[counts], *SIZES[sizes])
    assert _error(case.product(gpu, SMALL, transpose), case.truth) <= GROUPED["bfloat16"]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("counts", COUNTS)
def test_gradient(counts, sizes, gpu):
    case = ExpertCase(COUNTS[counts], *SIZES[sizes])
    assert _error(case.gradient(gpu, SMALL), case.gradient_truth) <= GROUPED["gradient"]


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("cut", USED)
def test_the_tiles_of_a_gpu(cut, transpose, gpu):
    case = ExpertCase([90, 0, 131, 2], 8 if cut == "flat" else 136, 8 if cut == "narrow" else 136)
    assert _error(case.product(gpu, USED[cut], transpose), case.truth) <= GROUPED["bfloat16"]


def test_which_tile_serves_which_sizes():
    assert [grouped.product_tile(*sizes) for sizes in ((2048, 512), (8, 512), (2048, 8))] == list(USED.values())
    assert [grouped.gradient_tile(*sizes) for sizes in ((512, 2048), (8, 512), (2048, 8))] == list(
        USED_GRADIENT.values()
    )


@pytest.mark.parametrize("cut", USED_GRADIENT)
def test_the_tiles_of_a_gpu_for_gradients(cut, gpu):
    case = ExpertCase([70, 0, 131, 2], 8 if cut == "narrow" else 136, 8 if cut == "low" else 136)
    assert _error(case.gradient(gpu, USED_GRADIENT[cut]), case.gradient_truth) <= GROUPED["gradient"]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_other_types(dtype, gpu):
    case = ExpertCase(COUNTS["ragged"], 24, 40, dtype)
    name = str(dtype).split(".")[-1]
    assert _error(case.product(gpu, SMALL), case.truth) <= GROUPED[name]
    assert _error(case.gradient(gpu, SMALL), case.gradient_truth) <= GROUPED["gradient"]


@pytest.mark.parametrize("cut", [SMALL, USED["wide"], USED["flat"]])
def test_added_onto_another(cut, gpu):
    case = ExpertCase(COUNTS["ragged"], 24, 40)
    onto = case.dy[::-1]
    error = _error(case.product(gpu, cut, onto=mx.contiguous(onto)), case.truth + _wide(onto))
    assert error <= GROUPED["bfloat16"]


def test_a_gradient_without_another_to_add_it_to(gpu):
    case = ExpertCase(COUNTS["empty experts"], 24, 40)
    truth, case.total = case.gradient_truth - _wide(case.total), None
    assert _error(case.gradient(gpu, SMALL), truth) <= GROUPED["gradient"]


def test_rows_past_the_end_of_an_expert_are_not_read(gpu):
    """One expert's rows and matrix are NaN, and the results and gradients of the others are finite and right."""
    case = ExpertCase([33, 7, 40], 24, 40)
    bad = mx.array(np.repeat([0.0, np.nan, 0.0], [33, 7, 40]).astype(np.float32))[:, None].astype(mx.bfloat16)
    case.rows, case.dy = case.rows + bad, case.dy + bad
    case.weight = case.weight + mx.array([0.0, np.nan, 0.0])[:, None, None].astype(mx.bfloat16)
    good = np.repeat([True, False, True], [33, 7, 40])
    assert _error(case.product(gpu, SMALL)[mx.array(np.flatnonzero(good))], case.truth[good]) <= GROUPED["bfloat16"]
    gradient = case.gradient(gpu, SMALL)[mx.array([0, 2])]
    assert _error(gradient, case.gradient_truth[[0, 2]]) <= GROUPED["gradient"]


@pytest.mark.parametrize("cut", [SMALL, TALL])
def test_the_order_of_lanes_changes_no_bit_and_nothing_races(cut, make_machine):
    machine = make_machine(header("metal", grouped.FILES), watch=True)
    case = ExpertCase(COUNTS["ragged"], 40, 72)
    products = [case.product(machine, cut, transpose, case.dy, seed) for transpose in (True, False) for seed in (1, 2)]
    assert all(mx.array_equal(product, products[0]) for product in products)
    assert mx.array_equal(case.gradient(machine, cut, 1), case.gradient(machine, cut, 2))


# Each defect: the text, and what replaces it.
DEFECTS = {
    "an expert's last row left out": ("height = ends[expert] - first;", "height = ends[expert] - first - 1;"),
    "a row of the next expert": ("alive<false>(Nothing{}, 0, k, count)", "alive<false>(Nothing{}, 0, k, count + 1)"),
    "an expert's first tile left out": ("ends[e] / ROWS + e < tile", "ends[e] / ROWS + e <= tile"),
    "no barrier before a stage is filled again": ("step >> 1);\n      barrier();", "step >> 1);"),
    "no barrier before the results": ("  barrier();\n  const Exact<In> results", "  const Exact<In> results"),
    "a slice of the depth left out": ("const int end = WHOLE ? DEPTH : deep * 16;", "const int end = DEPTH - 16;"),
    "experts without rows left out": (
        "  const int row = at.y * ROWS, column",
        "  if (count == 0) return;\n  const int row = at.y * ROWS, column",
    ),
}


# Whether a defect changes the product, and whether it changes the gradient.
DEFECTS_OF = {"an expert's last row left out": (True, False), "experts without rows left out": (False, True)}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect(defect, make_machine, host_module):
    machine = make_machine(host_module.plant(header("metal", grouped.FILES), *DEFECTS[defect]), watch=True)
    case = ExpertCase([33, 0, 32, 7, 64, 15], 40, 72)
    errors, fault = [], None
    try:
        errors.append(_error(case.product(machine, SMALL), case.truth) / GROUPED["bfloat16"])
        errors.append(_error(case.gradient(machine, SMALL), case.gradient_truth) / GROUPED["gradient"])
    except host_module.HostError as error:
        fault = str(error)
    # The fault comes from the run and not from the compiler; without one, a result is wrong.
    assert fault.startswith("expert_") if fault else not max(errors) <= 1


@pytest.fixture
def tried(monkeypatch):
    """Return tried(machine) -> whether each of six kernels passes its check when `machine` runs it."""

    def forget() -> None:
        first_use.forget()

    def ask(machine) -> list[bool]:
        forget()
        monkeypatch.setattr(backend, "device", lambda: "cuda")
        monkeypatch.setattr(Launch, "run", lambda launch: machine.run(launch))
        rows, low = mx.zeros((5, 136), mx.bfloat16), mx.zeros((5, 8), mx.bfloat16)
        a, b = mx.zeros((3, 8, 136), mx.bfloat16), mx.zeros((3, 136, 8), mx.bfloat16)
        calls = [(rows, a, True, False), (low, a, False, True), (low, b, True, True), (rows, b, False, False)]
        products = [trial_case.product_tile(*call) is not None for call in calls]
        gradients = [trial_case.gradient_serves(*sides, True) for sides in ((low, rows), (rows, low))]
        return [*products, *gradients]

    yield ask
    forget()


def test_the_verdict_on_kernels_that_are_right(gpu, tried, caplog):
    assert tried(gpu) == [True] * 6
    assert not caplog.records


@pytest.mark.parametrize("defect", ["an expert's last row left out", "experts without rows left out"])
def test_the_verdict_on_kernels_that_are_wrong(defect, make_machine, host_module, tried, caplog):
    text = host_module.plant(header("metal", grouped.FILES), *DEFECTS[defect])
    passed = tried(make_machine(text))
    product, gradient = DEFECTS_OF[defect]
    assert passed == [not product] * 4 + [not gradient] * 2
    assert len(caplog.records) == 4 * product + 2 * gradient
    assert "MLX's own products serve instead" in caplog.text


def test_the_verdict_where_no_kernel_runs(tried, caplog):
    class Nowhere:
        def run(self, launch):
            raise RuntimeError("no such GPU")

    assert tried(Nowhere()) == [False] * 6
    assert "no such GPU" in caplog.text
