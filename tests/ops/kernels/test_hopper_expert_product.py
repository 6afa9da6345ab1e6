"""Hopper's kernel for products of rows sorted by expert, run on the host machine and compared with float64.

Outputs start as NaN.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from beside import load
from deltatune.machine import backend, nvidia
from deltatune.ops.experts import grouped, grouped_hopper, trial_case
from deltatune.ops.experts.grouped_hopper import GroupedProduct, HopperTile, Packed
from deltatune.ops.experts.tolerances import GROUPED
from deltatune.ops.kernels.launch import Launch, header
from deltatune.ops.operator import first_use

HERE = Path(__file__).parent
HOPPER = load(HERE / "host_machine.py").cuda_text(grouped_hopper.PRODUCT)
of_any_machine = load(HERE / "test_expert_product.py")

# How many rows each expert has, the inputs and the outputs.
UNEVEN = ([70, 0, 3, 131, 64, 1], 192, 192)
CASES = {
    "uneven": UNEVEN,
    "empty experts, five stages": ([0, 0, 200, 0, 16, 0], 320, 320),
    "all rows on the first": ([193, 0], 128, 128),
    "more experts than lanes": ([0] * 20 + [5] + [2] * 20 + [0, 1], 128, 128),
    "one row": ([0, 1, 0], 128, 128),
}


@pytest.fixture
def run(host_folder, host_module, monkeypatch):
    """Return run(case, transpose, onto=None, text=HOPPER, seed=1, blocks=3, adapter=None, group=0) -> the product."""
    machines = {}
    # `blocks` is the number of all blocks.
    monkeypatch.setattr(grouped_hopper, "_BLOCKS_EACH", 1)

    def multiply(case, transpose, onto=None, text=HOPPER, seed=1, blocks=3, adapter=None, group=0) -> mx.array:
        monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, blocks))
        if text not in machines:
            machines[text] = host_module.HostMachine(host_folder, text, bytes=nvidia.H200.block_bytes, cuda=True)
        weight = _stored(case.weight, transpose)
        own = None if adapter is None else (adapter.rows, _stored(adapter.weight, transpose))
        tile = grouped_hopper.product_tile(case.weight.shape[1], case.weight.shape[0])
        matrices = Packed(*mx.quantize(weight, group, 4), group) if group else weight
        operands = GroupedProduct(case.rows, matrices, case.ends, transpose, case.scale, onto, own)
        launch = grouped.product(operands, tile)
        return machines[text].run(launch, seed)[0]

    return multiply


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_product(name, transpose, run):
    case = of_any_machine.ExpertCase(*CASES[name])
    assert of_any_machine._error(run(case, transpose), case.truth) <= GROUPED["bfloat16"]


def _stored(weight: mx.array, transpose: bool) -> mx.array:
    return weight if transpose else mx.contiguous(weight.swapaxes(-1, -2))


# Ranks that fill a step of 16 inputs and that do not, one that needs several, and the largest.
ADAPTED = [("uneven", True, 24), ("uneven", False, 8), ("empty experts, five stages", False, 64)]
ADAPTED += [("empty experts, five stages", True, 8), ("all rows on the first", False, 24)]
ADAPTED += [("all rows on the first", True, 16)]


@pytest.mark.parametrize(("name", "transpose", "rank"), ADAPTED)
def test_an_adapter_in_the_same_sum(name, transpose, rank, run):
    counts, inputs, outputs = CASES[name]
    case, adapter = of_any_machine.ExpertCase(counts, inputs, outputs), of_any_machine.ExpertCase(counts, rank, outputs)
    truth = case.truth + adapter.truth + of_any_machine._wide(case.dy)
    assert of_any_machine._error(run(case, transpose, case.dy, adapter=adapter), truth) <= GROUPED["bfloat16"]


@pytest.mark.parametrize("transpose", [True, False])
def test_added_onto_another(transpose, run):
    case = of_any_machine.ExpertCase(*UNEVEN)
    onto = mx.contiguous(case.dy[::-1])
    error = of_any_machine._error(run(case, transpose, onto), case.truth + of_any_machine._wide(onto))
    assert error <= GROUPED["bfloat16"]


def test_fp16(run):
    case = of_any_machine.ExpertCase([70, 0, 3], 128, 128, mx.float16)
    onto = case.dy
    error = of_any_machine._error(run(case, True, onto), case.truth + of_any_machine._wide(onto))
    assert error <= GROUPED["float16"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("transpose", "group"), [(True, 32), (False, 64)])
def test_packed_matrices_give_the_bits_of_unpacked_ones(name, transpose, group, run):
    counts, inputs, outputs = CASES[name]
    case, adapter = of_any_machine.ExpertCase(counts, inputs, outputs), of_any_machine.ExpertCase(counts, 8, outputs)
    packed = run(case, transpose, case.dy, adapter=adapter, group=group)
    case.weight = _quantised(case.weight, transpose, group)
    assert mx.array_equal(packed, run(case, transpose, case.dy, adapter=adapter))


# Each defect of unpacking: the text, and what replaces it.
DEFECTS_OF_UNPACKING = {
    "another group's scale": ("scales + from / GROUP / 2 * 2", "scales"),
    "another half of a pair": ("/ GROUP & 1;", "/ GROUP & 0;"),
    "words read before they are there": ("words_wait<Memory::slots - 1>();", "words_wait<Memory::slots>();"),
    "words overwritten before they are read": ("slot < Memory::slots; ++slot", "slot < Memory::slots + 1; ++slot"),
    "words of a tile that another block multiplies": ("read_number += BLOCKS;", "read_number += 1;"),
    "pieces out of place": ("^ row) & 7) * 16, pairs)", ") & 7) * 16, pairs)"),
    "a stage that its writers do not report": ("mbarrier_init(here(i), 2 * 128)", "mbarrier_init(here(i), 128)"),
}


@pytest.mark.parametrize("defect", DEFECTS_OF_UNPACKING)
def test_a_planted_defect_of_unpacking_shows(defect, run, host_module):
    case = of_any_machine.ExpertCase([70, 0, 200, 3], 384, 320)
    right = run(case, True, group=64)
    text, refusal = host_module.plant(HOPPER, *DEFECTS_OF_UNPACKING[defect]), "expert_"
    try:
        shows = not mx.array_equal(run(case, True, text=text, group=64), right)
    except host_module.HostError as error:
        shows, refusal = True, str(error)
    assert shows
    assert refusal.startswith("expert_")


def _quantised(weight: mx.array, transpose: bool, group: int) -> mx.array:
    """Return the numbers of a matrix that is stored in 4 bits: scale q + bias in fp32, rounded once."""
    words, *stored = mx.quantize(_stored(weight, transpose), group, 4)
    numbers = mx.dequantize(words, *(array.astype(mx.float32) for array in stored), group, 4).astype(weight.dtype)
    return _stored(numbers, transpose)


def test_rows_past_the_end_of_an_expert_are_not_read(run):
    """One expert's rows and matrix are NaN, and the products of the others are finite and right."""
    counts = [33, 70, 40]
    case = of_any_machine.ExpertCase(counts, 128, 128)
    bad = mx.array([0.0, np.nan, 0.0])
    case.rows = case.rows + bad[mx.array(np.repeat([0, 1, 2], counts))][:, None].astype(mx.bfloat16)
    case.weight = case.weight + bad[:, None, None].astype(mx.bfloat16)
    good = np.flatnonzero(np.repeat([True, False, True], counts))
    for transpose in (True, False):
        error = of_any_machine._error(run(case, transpose)[mx.array(good)], case.truth[good])
        assert error <= GROUPED["bfloat16"]


def test_neither_the_order_of_lanes_nor_the_number_of_blocks_changes_a_bit(run):
    case = of_any_machine.ExpertCase(*UNEVEN)
    first, *others = (run(case, True, seed=seed, blocks=blocks) for seed, blocks in ((1, 3), (2, 3), (1, 1), (1, 40)))
    assert all(mx.array_equal(first, other) for other in others)


def test_each_multiprocessor_gets_several_blocks(monkeypatch):
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, 3))
    case = of_any_machine.ExpertCase([70] * 10, 128, 192)
    operands = GroupedProduct(case.rows, case.weight, case.ends, True)
    launch = grouped.product(operands, grouped_hopper.product_tile(192, 10))
    assert launch.blocks == (12, 1, 1)
    assert launch.values["BLOCKS"] == 12


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("kind", ["plain", "packed", "with an adapter"])
def test_operands_that_start_anywhere(kind, transpose, run, host_module):
    """The host's buffers are all aligned, so the text says that they are not."""
    text = host_module.plant(HOPPER, "return (uintptr_t)p % 16 == 0;", "return false;")
    adapter = of_any_machine.ExpertCase(UNEVEN[0], 24, UNEVEN[2])
    options = {"plain": {}, "packed": {"group": 64}, "with an adapter": {"adapter": adapter}}[kind]
    case = of_any_machine.ExpertCase(*UNEVEN)
    assert mx.array_equal(run(case, transpose, text=text, **options), run(case, transpose, **options))


# Each defect: the text, and what replaces it.
DEFECTS = {
    "an expert's last row left out": ("ends[expert] - row,", "ends[expert] - row - 1,"),
    "a row of the next expert written": ("(row < height)\n        put_whole", "(row <= height)\n        put_whole"),
    "columns past the last written": ("if (part * 64 >= width) continue;", ""),
    "a tile of an expert left out": ("(rows + ROWS - 1) / ROWS, all", "rows / ROWS, all"),
    "tiles of experts of other groups of lanes left out": ("upto += totals[group];", ";"),
    "a stage overwritten before it is read": ("if (use > 0) mbarrier_wait(barriers.read(stage), use - 1);", ""),
    "a stage read before it has arrived": (
        "mbarrier_wait(barriers.here(stage), use);\n      const unsigned place",
        "const unsigned place",
    ),
    "a product that is not waited for": ("products_wait<0>();\n  register_fence(d);", ""),
    "results among rows that are on their way": (
        "if (step + 1 == inputs / 64) break;",
        "if (step + 1 == inputs / 64) { release(barriers.read(stage), at); break; }",
    ),
    "a matrix read before it is there": ("row < height);\n      group_barrier();", "row < height);"),
    "the first inputs left out": ("onto || k > 0);\n      else", "k > 0);\n      else"),
}
# Of the part of a tile that is an adapter's, whose factor is stored by inputs.
DEFECTS_OF_ADAPTERS = {
    "another expert's factor": ("factor + (long)expert * RANK * outputs", "factor"),
    "another tile's rows": ("low_rank + (long)tile.row * RANK", "low_rank"),
    "the first stage of an adapter": ("padded(RANK)>(sums, place", "padded(RANK)>(sums, room.place"),
}


@pytest.mark.parametrize("name", [*DEFECTS, *DEFECTS_OF_ADAPTERS])
def test_a_planted_defect_shows(name, run, host_module):
    # The experts of a second group of lanes have rows too.
    counts = [70, 0, 200, 3] + [0] * 30 + [64, 1]
    case, adapter = of_any_machine.ExpertCase(counts, 384, 192), None
    truth = case.truth + of_any_machine._wide(case.dy)
    if name in DEFECTS_OF_ADAPTERS:
        adapter = of_any_machine.ExpertCase(counts, 8, 192)
        truth = truth + adapter.truth
    text = host_module.plant(HOPPER, *(DEFECTS | DEFECTS_OF_ADAPTERS)[name])
    try:
        found = run(case, adapter is None, case.dy, text=text, adapter=adapter)
    except host_module.HostError as refusal:
        fault = str(refusal)
    else:
        worst = of_any_machine._error(found, truth)
        fault = "" if worst <= GROUPED["bfloat16"] else f"expert_hopper_product: {worst}"
    # The fault comes from the run and not from the compiler.
    assert fault.startswith("expert_")


# Each leaves what was in shared memory in the place of an operand's padding.
UNPADDED = {
    "factor": ("for (int row = first; row < depth; row += 16)", "for (int row = first; row < RANK; row += 16)"),
    "rows": ("row < ROWS && piece * 8 < depth", "row < ROWS && piece * 8 < RANK"),
}


@pytest.mark.parametrize("defect", [None, *UNPADDED])
def test_an_adapters_padding_is_zeros(defect, run, host_module):
    """The first expert's numbers are NaN and are in shared memory when the others' are multiplied."""
    counts = [128, 40, 70]
    case, adapter = of_any_machine.ExpertCase(counts, 128, 128), of_any_machine.ExpertCase(counts, 8, 128)
    bad = mx.array([np.nan, 0.0, 0.0])
    case.rows = case.rows + bad[mx.array(np.repeat([0, 1, 2], counts))][:, None].astype(mx.bfloat16)
    case.weight = case.weight + bad[:, None, None].astype(mx.bfloat16)
    text = HOPPER if defect is None else host_module.plant(HOPPER, *UNPADDED[defect])
    found = run(case, False, text=text, adapter=adapter, blocks=1)[128:]
    error = of_any_machine._error(found, (case.truth + adapter.truth)[128:])
    assert (error <= GROUPED["bfloat16"]) == (defect is None)


@pytest.fixture
def tried(host_folder, host_module, monkeypatch):
    """Return tried(text) -> the tile that serves a product of 256 x 256 when Hopper's kernel has this text."""
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, 3))
    first_use.forget()
    other = host_module.HostMachine(host_folder, header("metal", grouped.FILES), bytes=nvidia.H200.block_bytes)

    def ask(text: str):
        own = host_module.HostMachine(host_folder, text, bytes=nvidia.H200.block_bytes, cuda=True)
        machine = host_module.OneKernelReplaced("expert_hopper_product", own, other)
        monkeypatch.setattr(Launch, "run", lambda launch: machine.run(launch))
        return trial_case.product_tile(
            mx.zeros((5, 256), mx.bfloat16), mx.zeros((2, 256, 256), mx.bfloat16), True, True
        )

    yield ask
    first_use.forget()


def test_the_kernel_serves_where_it_is_right(tried, caplog):
    assert tried(HOPPER) == HopperTile(2, 256)
    assert not caplog.records


def test_another_kernel_serves_where_it_is_wrong(tried, host_module, caplog):
    assert tried(host_module.plant(HOPPER, *DEFECTS["an expert's last row left out"])) == of_any_machine.USED["wide"]
    assert "expert_hopper_product is off by" in caplog.text


def test_which_products_the_kernel_serves(monkeypatch):
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
