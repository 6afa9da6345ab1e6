import mlx.core as mx
import pytest

from deltatune.plan import array_layout, graph
from deltatune.plan.array_layout import ArrayLayout, LayoutError


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
