"""How the arrays and operations of a graph are counted, and the lines of a bounded run on them."""

import dataclasses

import mlx.core as mx
import pytest

from deltatune.machine import backend, host_memory
from deltatune.plan import array_layout, graph, placement
from deltatune.plan.array_layout import ArrayLayout, LayoutError
from deltatune.plan.forecast import Products, products, speed
from deltatune.plan.graph import evaluation_order, read
from deltatune.plan.placement import Placement, fits_on_host


def test_products_of_every_kind_are_counted():
    layout = ArrayLayout.measured()
    x, w, stack = mx.zeros((2, 8, 64)), mx.zeros((32, 64)), mx.zeros((4, 64, 16))
    packed = mx.quantize(w, group_size=32, bits=4)
    mx.eval(x, w, stack, packed)
    outputs = [
        x @ w.T,
        mx.addmm(mx.zeros(32), x, w.T),
        mx.quantized_matmul(x, *packed, group_size=32, bits=4),
        mx.gather_mm(x[:, :, None], stack, rhs_indices=mx.zeros((2, 8), mx.int32)),
        mx.exp(x),
    ]
    given = {layout.address(array) for array in (x, w, stack, *packed)}
    found = products(evaluation_order(read(layout, outputs, given), 20))
    assert found.operations == 2 * 16 * 64 * (3 * 32 + 16)
    assert found.largest == (16, 64, 32)


def test_the_tokens_that_hide_the_disk(tmp_path, monkeypatch):
    """1,000 bytes a second and 100 operations a second: 4 s of reading, 2 s of computing for 24 tokens."""
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    monkeypatch.setattr(placement, "disk_rate", lambda file: 1000.0)
    monkeypatch.setattr(host_memory, "free", lambda: 19)
    monkeypatch.setattr(placement, "speed", lambda shape, dtype: 100.0)
    placed = Placement(9, 9, (2, 12), (1000,) * 3, 0, (0, 1, 2), tmp_path, Products(200, (1, 1, 1)))
    assert placed.read == 4000
    assert str(placed.said()[1]).endswith(
        "4.0 s at the 0.0 MB a second measured now; its matrix products take about 2.0 s, so that the disk is hidden "
        "from about 48 tokens an iteration on."
    )


def test_layers_that_fit_the_page_cache_are_read_once(tmp_path, monkeypatch):
    """The system caches files of half of the free memory; a GPU copies such layers from the host's memory."""
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    monkeypatch.setattr(placement, "disk_rate", lambda file: 1000.0)
    monkeypatch.setattr(host_memory, "free", lambda: 20)
    placed = Placement(9, 9, (2, 12), (1000,) * 3, 0, (0, 1, 2), tmp_path)
    assert "so that the disk gives it once, in 3.0 s" in str(placed.said()[1])
    (said,) = dataclasses.replace(placed, on_host=True).said()
    assert "3 of 3 layers, 0.0 MB, stay in the host's memory, from which the GPU copies" in str(said)
    kept = dataclasses.replace(placed, on_host=True, inputs=10**9)
    assert str(kept.said()[0]).endswith("for each iteration; layer inputs, 1.00 GB, go to the disk.")
    (said,) = dataclasses.replace(kept, inputs_on_host=True).said()
    assert str(said).endswith("; layer inputs, 1.00 GB, go to the host's memory as well.")
    for device, size, fits in (("cpu", 10, False), ("cuda", 10, True), ("cuda", 11, False)):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert fits_on_host(size) == fits


def test_a_speed_is_measured():
    assert speed((4, 8, 16), mx.float32, 0.01) > 0


def test_the_speed_of_a_product_with_a_vocabulary_is_measured_on_a_part_of_it(monkeypatch):
    """Its matrix takes gigabytes, as its gradient's does, whose sums are as long as the vocabulary."""
    drawn = []

    def normal(shape, **_):
        drawn.append(shape)
        return mx.zeros((1, 1))

    monkeypatch.setattr(mx.random, "normal", normal)
    for inner, columns in ((1024, 248_320), (248_320, 1024)):
        speed((4096, inner, columns), mx.float32, 0.0)
    assert drawn == [(1024, 1024), (8192, 1024), (1024, 8192), (1024, 8192)]


@pytest.mark.parametrize(("count", "said"), [(3.2, 4), (47.0, 47), (3012.0, 3100), (123_456.0, 130_000)])
def test_tokens_are_rounded_up_to_two_digits(count, said, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    monkeypatch.setattr(placement, "disk_rate", lambda file: 1.0)
    monkeypatch.setattr(host_memory, "free", lambda: None)
    monkeypatch.setattr(placement, "speed", lambda shape, dtype: 1.0)
    monkeypatch.setattr(Placement, "read", property(lambda self: 2 * count))
    placed = Placement(9, 9, (1, 1), (1, 1), 2, (0, 1), tmp_path, Products(2, (1, 1, 1)))
    assert f"about {said:,} tokens" in str(placed.said()[1])


@pytest.fixture(scope="module")
def measured():
    return ArrayLayout.measured()


def test_an_address_that_is_not_mapped_is_an_error_and_no_crash():
    read = array_layout.reader()
    for address in (8, 1 << 46, (1 << 64) - 16):
        with pytest.raises(array_layout.UnreadableError):
            read(address, 8)


def test_stale_bytes_do_not_mislead_the_layout(measured):
    """Unused bytes of a description may hold old pointers, also to primitives of the kinds that are looked for."""
    kept = []
    for size in range(1, 300):
        kept.append(mx.zeros(size) + mx.ones(size))
        kept = kept[-20:] if size % 7 else kept[::2]
        assert vars(ArrayLayout.measured()).keys() == vars(measured).keys()


@pytest.mark.parametrize("shift", [8, 24])
def test_another_layout_is_noticed(monkeypatch, shift):
    """A further member at the start of descriptions shifts every offset."""
    real = array_layout.reader()
    monkeypatch.setattr(
        array_layout, "reader", lambda: lambda address, size: real(address + shift * (size > 100), size)
    )
    with pytest.raises(LayoutError):
        ArrayLayout.measured()


def test_a_graph_is_read_as_it_was_made(measured):
    x, y = mx.ones((3, 4)), mx.ones((4, 5), mx.float16)
    mx.eval(x, y)
    product = (x.astype(mx.float16) @ y).T
    (node,) = graph.read(measured, [product], ())
    assert (node.kind, node.shape, node.item_size) == ("Transpose", (5, 3), 2)
    (product_node,) = node.inputs
    assert product_node.kind == "Matmul"
    cast, right = product_node.inputs
    assert (cast.kind, right.kind, right.shape) == ("AsType", "", (4, 5))
    assert cast.inputs[0].shape == (3, 4)
    assert cast.inputs[0].item_size == 4


def test_reading_evaluates_nothing(measured):
    before = mx.get_active_memory()
    huge = mx.zeros((1 << 20, 1 << 20)) + 1
    (node,) = graph.read(measured, [huge @ huge], ())
    order = graph.evaluation_order([node], 20)
    assert order[-1].kind == "Matmul"
    assert mx.get_active_memory() - before < 1 << 10


def test_outputs_of_one_primitive_are_evaluated_once(measured):
    x = mx.ones((4, 6))
    first, second = mx.split(x * 2, 2, axis=1)
    (node,) = graph.read(measured, [first + second], ())
    assert [each.kind for each in graph.evaluation_order([node], 20)].count("Split") == 1


def test_leaves_end_the_graph(measured):
    x = mx.ones((2, 2)) * 3
    y = mx.exp(mx.sin(x))
    (node,) = graph.read(measured, [y], {measured.address(x)})
    assert [each.kind for each in graph.evaluation_order([node], 20)] == ["Sin", "Exp"]
