"""Recomputed cheap operators: the same gradients to the bit, in less memory, and only where asked for."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from deltatune.lora.linear import LoRALinear
from deltatune.machine import backend
from deltatune.ops.functional import recomputed
from deltatune.ops.recomputation import Input, cheap_recomputed, input_of, recomputes, remember, remembered

ROWS, WIDTH, LAYERS = 512, 256, 6


def doubled(x: mx.array) -> list[mx.array]:
    return [2 * x]


def test_outside_the_context_arrays_are_kept():
    x = mx.ones(4)
    (y,) = remembered(doubled, x)
    assert input_of(y) == Input(None)
    assert not recomputes()


def test_only_the_arrays_that_were_remembered_last_are_computed_again():
    x, cotangent = mx.arange(4.0), mx.ones(4)
    with cheap_recomputed():
        assert recomputes()
        (y,) = remembered(doubled, x)
        assert input_of(x) == Input(None)
        # It was forgotten when another array was read.
        assert input_of(y) == Input(None)
        (y,) = remembered(doubled, x)
        (again,) = input_of(y).again([y], [cotangent])
        assert again is not y
        assert mx.array_equal(again, y)
        # Another operator that reads it gets what was computed for the first one.
        assert input_of(y).again([y], [2 * cotangent])[0] is again
        assert input_of(x) == Input(None)
        assert input_of(y) == Input(None)
        remember([x, y], lambda x: [x, 2 * x], x)
        assert input_of(y, x) == Input(None)
        remember([x, y], lambda x: [x, 2 * x], x)
        assert input_of(x, y).compute is not None


def test_a_layer_that_is_computed_again_as_a_whole_keeps_its_arrays():
    with cheap_recomputed(), recomputed():
        (y,) = remembered(doubled, mx.ones(4))
        assert not recomputes()
        assert input_of(y) == Input(None)


def activated(gate: mx.array, x: mx.array) -> list[mx.array]:
    return [gate * mx.sigmoid(gate) * x]


def adapters() -> list[LoRALinear]:
    mx.random.seed(2)
    layers = [LoRALinear.from_base(nn.Linear(WIDTH, WIDTH, bias=False), rank=4) for _ in range(LAYERS)]
    for layer in layers:
        layer.freeze()
        layer.unfreeze(keys=["lora_a", "lora_b"])
        layer.lora_b = mx.random.normal(layer.lora_b.shape)
    mx.eval([layer.parameters() for layer in layers])
    return layers


def gradients(layers: list[LoRALinear], x: mx.array) -> list[mx.array]:
    """The gradients of a loss of adapters, each of which reads an activation of the adapter before it."""
    factors = [layer[name] for layer in layers for name in ("lora_a", "lora_b")]

    def loss(*factors: mx.array) -> mx.array:
        y = x
        for at, layer in enumerate(layers):
            layer.lora_a, layer.lora_b = factors[2 * at : 2 * at + 2]
            (h,) = remembered(activated, y, x)
            y = y + layer(h)
        # As the end of a model does, this reads something else than the last activation.
        input_of(y)
        return (y * y).sum()

    found = mx.grad(loss, argnums=list(range(len(factors))))(*factors)
    for at, layer in enumerate(layers):
        layer.lora_a, layer.lora_b = factors[2 * at : 2 * at + 2]
    return list(found)


@pytest.mark.skipif(backend.device() != "cpu", reason="other devices hold arrays for as long as their queue is")
def test_adapters_have_the_same_gradients_in_less_memory(peak_bytes):
    layers, x = adapters(), mx.random.normal((ROWS, WIDTH), key=mx.random.key(1))
    mx.eval(x, gradients(layers, x))
    found = {}

    def computed(way: str) -> list[mx.array]:
        found[way] = gradients(layers, x)
        return found[way]

    most = peak_bytes(lambda: computed("kept"))
    with cheap_recomputed():
        least = peak_bytes(lambda: computed("recomputed"))
    assert all(map(mx.array_equal, found["recomputed"], found["kept"]))
    # Each layer keeps an array less, but for the one whose gradients are computed.
    assert most - least >= (LAYERS - 2) * ROWS * WIDTH * 4


def test_cotangents_wait_for_gradients_that_recompute_an_array():
    def memory_with(given: Input) -> int:
        """Bytes that are alive once only what goes on was evaluated."""
        before = mx.get_active_memory()
        gradient = mx.arange(2.0**20) * 2
        mx.eval(given.before(mx.ones(4) * 3, [gradient]))
        return mx.get_active_memory() - before

    assert memory_with(Input(None)) < 2**20
    assert memory_with(Input(lambda cotangents: [])) >= 4 * 2**20
