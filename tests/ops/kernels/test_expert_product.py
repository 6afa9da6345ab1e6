"""Products of rows sorted by expert, and their gradients, on the host machine against float64. Outputs start as NaN.

Every GPU runs the portable text, which is Metal's here. Hopper has a kernel of its own for most products.
"""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from host_machine import HostMachine, OneKernelReplaced, cuda_text, defects, plant, shows, some_daily

from deltatune.machine import backend, nvidia
from deltatune.ops.experts import grouped, grouped_hopper, trial_case
from deltatune.ops.experts.grouped_hopper import GroupedProduct, HopperTile, Packed
from deltatune.ops.experts.trial_case import GROUPED
from deltatune.ops.kernels.launch import Launch, header
from deltatune.ops.operator import kernel_operator
from deltatune.ops.operator.measure import as_float64, relative_error

PORTABLE, HOPPER = header("metal", grouped.FILES), cuda_text(grouped_hopper.PRODUCT)
# Tiles (rows, columns, depth, groups across): small ones, so that few rows make many, and those that a GPU uses.
SMALL, TALL = (32, 32, 16, 2), (64, 32, 32, 1)
USED = {"wide": (128, 128, 64, 2), "flat": (64, 128, 32, 2), "narrow": (64, 16, 128, 1)}
USED_GRADIENT = {"wide": (128, 128, 64, 2), "low": (16, 128, 64, 4), "narrow": (128, 16, 64, 1)}
MANY_EXPERTS = [0] * 20 + [5] + [2] * 20 + [0, 1]
COUNTS = {
    "ragged": [33, 1, 32, 7, 64, 15],
    "empty experts": [0, 40, 0, 0, 3, 0],
    "all rows on one": [0, 0, 70],
    "all rows on the first": [70, 0, 0, 0],
    "one row": [0, 1, 0],
    "more experts than lanes": MANY_EXPERTS,
    "an even cut": [32, 64, 32],
}
SIZES = {"K=8": (8, 40), "N=8": (40, 8), "K=24, N=40": (24, 40), "K=72, N=72": (72, 72)}
# For Hopper's kernel: how many rows each expert has, the inputs and the outputs.
UNEVEN = ([70, 0, 3, 131, 64, 1], 192, 192)
ON_HOPPER = {
    "uneven": UNEVEN,
    "empty experts, five stages": ([0, 0, 200, 0, 16, 0], 320, 320),
    "all rows on the first": ([193, 0], 128, 128),
    "more experts than lanes": (MANY_EXPERTS, 128, 128),
    "one row": ([0, 1, 0], 128, 128),
}


def stored(weight: mx.array, transpose: bool) -> mx.array:
    return weight if transpose else mx.contiguous(weight.swapaxes(-1, -2))


class ExpertCase:
    """Rows and matrices of experts, and the true products and gradients of the matrices."""

    def __init__(self, counts, inputs: int, outputs: int, dtype: mx.Dtype = mx.bfloat16):
        draw = np.random.default_rng(len(counts) + inputs)
        ends = np.cumsum(counts)
        spans = list(zip(ends - counts, ends, strict=True))
        self.counts, self.ends, self.scale = counts, mx.array(ends.astype(np.int32)), 1.75
        self.rows, self.dy, self.weight = (
            mx.array(draw.normal(size=size).astype(np.float32)).astype(dtype)
            for size in ((ends[-1], inputs), (ends[-1], outputs), (len(counts), outputs, inputs))
        )
        rows, dy, weight = map(as_float64, (self.rows, self.dy, self.weight))
        self.truth = self.scale * np.concatenate([rows[a:b] @ w.T for (a, b), w in zip(spans, weight, strict=True)])
        self.total = mx.array(draw.normal(size=weight.shape).astype(np.float32))
        self.gradient_truth = as_float64(self.total) + self.scale * np.stack([dy[a:b].T @ rows[a:b] for a, b in spans])

    def product(self, tile, transpose=True, onto=None, adapter=None, group=0) -> Launch:
        """Return the launch of the product; `group` is the size of groups of matrices that are packed."""
        weight = stored(self.weight, transpose)
        matrices = Packed(*mx.quantize(weight, group, 4), group) if group else weight
        factors = None if adapter is None else (adapter.rows, stored(adapter.weight, transpose))
        operands = GroupedProduct(self.rows, matrices, self.ends, transpose, self.scale, onto, factors)
        return grouped.product(operands, tile)

    def gradient(self, tile) -> Launch:
        return grouped.gradient(self.total, self.dy, self.rows, self.ends, self.scale, tile)

    def spoilt(self, expert: int) -> np.ndarray:
        """Make one expert's rows, gradients and matrix NaN; return the numbers of the other rows."""
        bad = mx.array(np.where(np.arange(len(self.counts)) == expert, np.nan, 0.0).astype(np.float32))
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        bad_rows = bad[mx.array(owner)][:, None].astype(mx.bfloat16)
        self.rows, self.dy = self.rows + bad_rows, self.dy + bad_rows
        self.weight = self.weight + bad[:, None, None].astype(mx.bfloat16)
        return np.flatnonzero(owner != expert)


def within(result: mx.array, truth: np.ndarray, dtype: str = "bfloat16") -> bool:
    return relative_error(result, truth) <= GROUPED[dtype]


@pytest.fixture(scope="module")
def machine(host_folder):
    """Return machine(text=PORTABLE, watch=False) -> a host machine with the shared memory of an NVIDIA GPU's block."""
    made = {}

    def of(text: str = PORTABLE, watch: bool = False) -> HostMachine:
        if (text, watch) not in made:
            cuda = "hopper" in text
            made[text, watch] = HostMachine(host_folder, text, watch, nvidia.H200.block_bytes, cuda=cuda)
        return made[text, watch]

    return of


@pytest.fixture
def run(machine):
    """Return run(launch, seed=1, ...) -> the output of the portable kernel."""
    return lambda launch, seed=1, **options: machine(**options).run(launch, seed)[0]


@pytest.fixture
def on_hopper(machine, monkeypatch):
    """Return on_hopper(case, transpose, text=HOPPER, seed=1, blocks=3, ...) -> the product, by so many blocks."""
    monkeypatch.setattr(grouped_hopper, "_BLOCKS_EACH", 1)

    def multiply(case, transpose, text=HOPPER, seed=1, blocks=3, **options) -> mx.array:
        monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, blocks))
        tile = grouped_hopper.product_tile(case.weight.shape[1], case.weight.shape[0])
        return machine(text).run(case.product(tile, transpose, **options), seed)[0]

    return multiply


# Each count with two sizes daily, and each of four sizes with three counts or more.
COUNTED = [
    pytest.param(counts, sizes, marks=[pytest.mark.weekly] * ((at - i) % 4 > 1))
    for i, counts in enumerate(COUNTS)
    for at, sizes in enumerate(SIZES)
]


@pytest.mark.parametrize(("counts", "sizes"), COUNTED)
def test_product_and_gradient(counts, sizes, run):
    """Matrices are stored by inputs and by outputs in turn."""
    transpose = (list(SIZES).index(sizes) + list(COUNTS).index(counts)) % 2 == 0
    case = ExpertCase(COUNTS[counts], *SIZES[sizes])
    assert within(run(case.product(SMALL, transpose)), case.truth)
    assert within(run(case.gradient(SMALL)), case.gradient_truth, "gradient")


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("cut", USED)
def test_the_tiles_of_a_gpu(cut, transpose, run):
    case = ExpertCase([90, 0, 131, 2], 8 if cut == "flat" else 136, 8 if cut == "narrow" else 136)
    assert within(run(case.product(USED[cut], transpose)), case.truth)


@pytest.mark.parametrize("cut", USED_GRADIENT)
def test_the_tiles_of_a_gpu_for_gradients(cut, run):
    case = ExpertCase([70, 0, 131, 2], 8 if cut == "narrow" else 136, 8 if cut == "low" else 136)
    assert within(run(case.gradient(USED_GRADIENT[cut])), case.gradient_truth, "gradient")


def test_which_tile_serves_which_sizes():
    sizes = (2048, 512), (8, 512), (2048, 8)
    assert [grouped.product_tile(*size) for size in sizes] == list(USED.values())
    sizes = (512, 2048), (8, 512), (2048, 8)
    assert [grouped.gradient_tile(*size) for size in sizes] == list(USED_GRADIENT.values())


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_other_types(dtype, run):
    case = ExpertCase(COUNTS["ragged"], 24, 40, dtype)
    assert within(run(case.product(SMALL)), case.truth, str(dtype).split(".")[-1])
    assert within(run(case.gradient(SMALL)), case.gradient_truth, "gradient")


@pytest.mark.parametrize("cut", [SMALL, USED["wide"], USED["flat"]])
def test_added_onto_another(cut, run):
    case = ExpertCase(COUNTS["ragged"], 24, 40)
    onto = mx.contiguous(case.dy[::-1])
    assert within(run(case.product(cut, onto=onto)), case.truth + as_float64(onto))


def test_a_gradient_without_another_to_add_it_to(run):
    case = ExpertCase(COUNTS["empty experts"], 24, 40)
    truth, case.total = case.gradient_truth - as_float64(case.total), None
    assert within(run(case.gradient(SMALL)), truth, "gradient")


def test_rows_past_the_end_of_an_expert_are_not_read(run):
    """One expert's rows and matrix are NaN, and the results and gradients of the others are finite and right."""
    case = ExpertCase([33, 7, 40], 24, 40)
    good = case.spoilt(1)
    assert within(run(case.product(SMALL))[mx.array(good)], case.truth[good])
    assert within(run(case.gradient(SMALL))[mx.array([0, 2])], case.gradient_truth[[0, 2]], "gradient")


@pytest.mark.parametrize("cut", [SMALL, TALL])
def test_the_order_of_lanes_changes_no_bit_and_nothing_races(cut, run):
    run, case = partial(run, watch=True), ExpertCase(COUNTS["ragged"], 40, 72)
    products = [run(case.product(cut, by, case.dy), seed) for by in (True, False) for seed in (1, 2)]
    assert all(mx.array_equal(product, products[0]) for product in products)
    assert mx.array_equal(run(case.gradient(cut), 1), run(case.gradient(cut), 2))


# Kernels and layouts in turn; the other layout is for the weekly run.
IN_TURN = [
    pytest.param(name, transpose, marks=[pytest.mark.weekly] * (transpose == bool(at % 2)))
    for at, name in enumerate(ON_HOPPER)
    for transpose in (True, False)
]


@pytest.mark.parametrize(("name", "transpose"), IN_TURN)
def test_hopper_product(name, transpose, on_hopper):
    case = ExpertCase(*ON_HOPPER[name])
    assert within(on_hopper(case, transpose), case.truth)


# Ranks that fill a step of 16 inputs and that do not, one that needs several, and the largest.
ADAPTED = [("uneven", True, 24), ("uneven", False, 8), ("empty experts, five stages", False, 64)]
ADAPTED += [("empty experts, five stages", True, 8), ("all rows on the first", False, 24)]
ADAPTED += [("all rows on the first", True, 16)]


@pytest.mark.parametrize(("name", "transpose", "rank"), ADAPTED)
def test_an_adapter_in_the_same_sum(name, transpose, rank, on_hopper):
    counts, inputs, outputs = ON_HOPPER[name]
    case, adapter = ExpertCase(counts, inputs, outputs), ExpertCase(counts, rank, outputs)
    found = on_hopper(case, transpose, onto=case.dy, adapter=adapter)
    assert within(found, case.truth + adapter.truth + as_float64(case.dy))


@pytest.mark.parametrize(("transpose", "dtype"), [(True, mx.bfloat16), (False, mx.bfloat16), (True, mx.float16)])
def test_hopper_product_added_onto_another(transpose, dtype, on_hopper):
    case = ExpertCase(*(UNEVEN if dtype == mx.bfloat16 else ([70, 0, 3], 128, 128)), dtype)
    onto = mx.contiguous(case.dy[::-1])
    found = on_hopper(case, transpose, onto=onto)
    assert within(found, case.truth + as_float64(onto), str(dtype).split(".")[-1])


@pytest.mark.parametrize(("name", "transpose"), IN_TURN)
def test_packed_matrices_give_the_bits_of_unpacked_ones(name, transpose, on_hopper):
    counts, inputs, outputs = ON_HOPPER[name]
    case, group = ExpertCase(counts, inputs, outputs), 32 if transpose else 64
    more = {"onto": case.dy, "adapter": ExpertCase(counts, 8, outputs)}
    packed = on_hopper(case, transpose, group=group, **more)
    # A number in 4 bits is scale q + bias in fp32, rounded once.
    words, *scales = mx.quantize(stored(case.weight, transpose), group, 4)
    numbers = mx.dequantize(words, *(array.astype(mx.float32) for array in scales), group, 4)
    case.weight = stored(numbers.astype(mx.bfloat16), transpose)
    assert mx.array_equal(packed, on_hopper(case, transpose, **more))


def test_hopper_reads_no_rows_past_the_end_of_an_expert(on_hopper):
    case = ExpertCase([33, 70, 40], 128, 128)
    good = case.spoilt(1)
    for transpose in (True, False):
        assert within(on_hopper(case, transpose)[mx.array(good)], case.truth[good])


def test_neither_the_order_of_lanes_nor_the_number_of_blocks_changes_a_bit(on_hopper):
    case, runs = ExpertCase(*UNEVEN), ((1, 3), (2, 3), (1, 1), (1, 40))
    first, *others = (on_hopper(case, True, seed=seed, blocks=blocks) for seed, blocks in runs)
    assert all(mx.array_equal(first, other) for other in others)


def test_each_multiprocessor_gets_several_blocks(monkeypatch):
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, 3))
    launch = ExpertCase([70] * 10, 128, 192).product(grouped_hopper.product_tile(192, 10))
    assert launch.blocks == (12, 1, 1)
    assert launch.values["BLOCKS"] == 12


@pytest.mark.parametrize(
    ("kind", "transpose"), [("plain", True), ("packed", True), ("packed", False), ("with an adapter", False)]
)
def test_operands_that_start_anywhere(kind, transpose, on_hopper):
    """The host's buffers are all aligned, so the text says that they are not."""
    text = plant(HOPPER, "return (uintptr_t)p % 16 == 0;", "return false;")
    adapter = ExpertCase(UNEVEN[0], 24, UNEVEN[2])
    options = {"plain": {}, "packed": {"group": 64}, "with an adapter": {"adapter": adapter}}[kind]
    case = ExpertCase(*UNEVEN)
    assert mx.array_equal(on_hopper(case, transpose, text, **options), on_hopper(case, transpose, **options))


# Each defect: the text, and what replaces it. These are for the portable text.
DEFECTS = defects("expert product", PORTABLE)
# Hopper's: of every product, which is added onto another here, with experts of a second group of lanes.
OF_HOPPER = defects("expert product on Hopper", HOPPER)
# Of the part of a tile that is an adapter's, whose factor is stored by inputs.
OF_ADAPTERS = defects("expert product on Hopper, adapters", HOPPER)
# Of unpacking.
OF_PACKED = defects("expert product on Hopper, packed", HOPPER)
PLANTED = [
    *((kind, name) for kind, names in (("any", DEFECTS), ("hopper", OF_HOPPER)) for name in names),
    *((kind, name) for kind, names in (("adapter", OF_ADAPTERS), ("packed", OF_PACKED)) for name in names),
]


def planted(kind: str, name: str) -> str:
    """Return a text with a defect."""
    if kind == "any":
        return plant(PORTABLE, *DEFECTS[name])
    return plant(HOPPER, *(OF_PACKED if kind == "packed" else OF_HOPPER | OF_ADAPTERS)[name])


def wrongly(kind: str, text: str, run, on_hopper) -> bool:
    """Whether the results with a planted defect are wrong."""
    if kind == "any":
        case = ExpertCase([33, 0, 32, 7, 64, 15], 40, 72)
        run = partial(run, text=text, watch=True)
        right = within(run(case.product(SMALL)), case.truth)
        return not (right and within(run(case.gradient(SMALL)), case.gradient_truth, "gradient"))
    if kind == "packed":
        case = ExpertCase([70, 0, 200, 3], 384, 320)
        return not mx.array_equal(on_hopper(case, True, text, group=64), on_hopper(case, True, group=64))
    counts = [70, 0, 200, 3] + [0] * 30 + [64, 1]
    case, adapter = ExpertCase(counts, 384, 192), ExpertCase(counts, 8, 192) if kind == "adapter" else None
    truth = case.truth + as_float64(case.dy) + (0.0 if adapter is None else adapter.truth)
    return not within(on_hopper(case, adapter is None, text, onto=case.dy, adapter=adapter), truth)


@pytest.mark.parametrize(("kind", "name"), some_daily(PLANTED))
def test_a_planted_defect_shows(kind, name, run, on_hopper):
    """A fault comes from the run and not from the compiler."""
    text = planted(kind, name)
    assert shows(lambda: wrongly(kind, text, run, on_hopper), "expert_")


# Each leaves what was in shared memory in the place of an operand's padding.
UNPADDED = defects("expert product on Hopper, padding", HOPPER)


@pytest.mark.parametrize("defect", [None, *UNPADDED])
def test_an_adapters_padding_is_zeros(defect, on_hopper):
    """The first expert's numbers are NaN and are in shared memory when the others' are multiplied."""
    counts = [128, 40, 70]
    case, adapter = ExpertCase(counts, 128, 128), ExpertCase(counts, 8, 128)
    case.spoilt(0)
    text = HOPPER if defect is None else plant(HOPPER, *UNPADDED[defect])
    found = on_hopper(case, False, text, adapter=adapter, blocks=1)[128:]
    assert within(found, (case.truth + adapter.truth)[128:]) == (defect is None)


@pytest.fixture
def gpu(monkeypatch):
    """Return gpu(machine): MLX passes for running on an NVIDIA GPU that this machine stands for; nothing is tried."""

    def use(machine) -> None:
        kernel_operator.forget()
        monkeypatch.setattr(backend, "device", lambda: "cuda")
        monkeypatch.setattr(Launch, "run", lambda launch: machine.run(launch))

    yield use
    kernel_operator.forget()


def tried() -> list[bool]:
    """Whether each of six kernels passes its check."""
    rows, low = mx.zeros((5, 136), mx.bfloat16), mx.zeros((5, 8), mx.bfloat16)
    a, b = mx.zeros((3, 8, 136), mx.bfloat16), mx.zeros((3, 136, 8), mx.bfloat16)
    calls = [(rows, a, True, False), (low, a, False, True), (low, b, True, True), (rows, b, False, False)]
    products = [trial_case.product_tile(*call) is not None for call in calls]
    return [*products, *(trial_case.gradient_serves(*sides, True) for sides in ((low, rows), (rows, low)))]


# Whether a defect changes the product, and whether it changes the gradient.
JUDGED = [(None, False, False), ("an expert's last row left out", True, False)]
JUDGED += [("experts without rows left out", False, True)]


@pytest.mark.parametrize(("defect", "product", "gradient"), JUDGED)
def test_the_verdicts_on_kernels(defect, product, gradient, machine, gpu, caplog):
    gpu(machine(PORTABLE if defect is None else plant(PORTABLE, *DEFECTS[defect])))
    assert tried() == [not product] * 4 + [not gradient] * 2
    assert len(caplog.records) == 4 * product + 2 * gradient
    assert ("MLX's own products serve instead" in caplog.text) == (defect is not None)


@pytest.mark.parametrize(
    ("defect", "tile"), [(None, HopperTile(2, 256)), ("an expert's last row left out", USED["wide"])]
)
def test_another_kernel_serves_where_hoppers_is_wrong(defect, tile, machine, gpu, monkeypatch, caplog):
    text = HOPPER if defect is None else plant(HOPPER, *OF_HOPPER[defect])
    gpu(OneKernelReplaced("expert_hopper_product", machine(text), machine()))
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, 3))
    arrays = mx.zeros((5, 256), mx.bfloat16), mx.zeros((2, 256, 256), mx.bfloat16)
    assert trial_case.product_tile(*arrays, True, True) == tile
    assert ("expert_hopper_product is off by" in caplog.text) == bool(caplog.records) == (defect is not None)


def test_which_products_hoppers_kernel_serves(monkeypatch):
    def serves(device="cuda", generation=90, dtype=mx.bfloat16, rows=5, experts=3, outputs=128, inputs=192):
        monkeypatch.setattr(backend, "device", lambda: device)
        monkeypatch.setattr(nvidia, "generation", lambda: generation)
        arrays = [mx.zeros(shape, dtype) for shape in ((rows, inputs), (experts, outputs, inputs))]
        return grouped_hopper.supports(*arrays)

    assert serves()
    assert serves(dtype=mx.float16)
    others = [{"device": "metal"}, {"generation": 100}, {"dtype": mx.float32}, {"experts": 513}, {"rows": 2**22}]
    others += [{"outputs": 136}, {"outputs": 64}, {"inputs": 64}, {"inputs": 72}]
    assert not any(serves(**other) for other in others)


def test_which_packed_products_the_kernel_serves(monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)

    def serves(group=64, experts=3, rows=mx.bfloat16, stored=mx.bfloat16, outputs=128, number=5):
        parts = mx.zeros((experts, outputs, 192 // group), stored)
        packed = Packed(mx.zeros((experts, outputs, 24), mx.uint32), parts, parts, group)
        return grouped_hopper.supports(mx.zeros((number, 192), rows), packed)

    assert serves()
    assert serves(group=32)
    others = [{"group": 16}, {"experts": 385}, {"rows": mx.float16, "stored": mx.float16}, {"stored": mx.float16}]
    others += [{"number": 3 * 256 + 1}, {"rows": mx.float32}, {"outputs": 136}, {"experts": 384, "outputs": 2**16}]
    assert not any(serves(**other) for other in others)
