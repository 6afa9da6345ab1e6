"""Layers that keep the inputs of cheap operators alone, as on Apple GPUs: upstream's bits in less memory."""

import gc
import importlib.util
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import activations, qwen3_next

from beside import load
from deltatune import patches
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.ops.functional import recomputed
from deltatune.ops.recomputation import cheap_recomputed
from deltatune.patches import patched
from deltatune.patches.tables import delta_layers, pointwise

CALLS = load(Path(__file__).with_name("layer_calls.py"))
whole = CALLS.whole

pytestmark = pytest.mark.skipif(backend.device() == "cuda", reason="kernels keep the inputs alone there")


@pytest.fixture(autouse=True)
def patches_of_apple_gpus(monkeypatch):
    monkeypatch.setattr(recomputation, "LEAST", 1)
    others = (*pointwise.ACTIVATIONS, *pointwise.ACTIVATIONS_OF_MLX_VLM, pointwise.NORM, pointwise.ATTENTION)
    monkeypatch.setattr(patches, "_of_device", lambda: (*delta_layers.PATCHES, *others))


def results(module, run, *inputs):
    """The output, and the gradients of the inputs and of every parameter, by name."""

    def loss(parameters, *inputs):
        module.update(parameters)
        y = run(module, *inputs)
        return (y * mx.random.normal(y.shape, key=mx.random.key(8))).sum(), y

    arguments = tuple(range(1 + len(inputs)))
    (_, y), (parameters, *gradients) = mx.value_and_grad(loss, argnums=arguments)(module.parameters(), *inputs)
    return {"y": y, **dict(tree_flatten(parameters)), **{f"d{i}": d for i, d in enumerate(gradients)}}


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert mx.array_equal(found[name], array), name
        assert mx.abs(array).max() > 0, name


def draw(*shapes):
    keys = mx.random.split(mx.random.key(5), len(shapes))
    return [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]


class Activation(nn.Module):
    def __init__(self, holder):
        super().__init__()
        self._holder = holder

    def __call__(self, gate, x):
        return self._holder.swiglu(gate, x)


class Convolution(nn.Module):
    """A layer's own convolution, as the families with one for each of queries, keys and values have it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 4, groups=8, bias=False)

    def __call__(self, x):
        return nn.silu(self.conv(mx.pad(x, [(0, 0), (3, 0), (0, 0)])))


def cases():
    x, gate, rows = draw((2, 21, 32), (2, 21, 4, 24), (2, 21, 4, 24))
    mx.random.seed(4)
    attention = CALLS.attention()
    for family in ("qwen3_5", "qwen3_next"):
        for run in CALLS.RUNS:
            yield f"{family}, {run.__name__}", CALLS.delta_layer(family), run, (x,)
    yield "attention", attention, lambda layer, x: layer(x, "causal"), (x,)
    yield "gated norm", qwen3_next.Qwen3NextRMSNormGated(24), lambda layer, *given: layer(*given), (rows, gate)
    yield "norm", nn.RMSNorm(32), whole, (x,)
    yield "swiglu", Activation(activations), lambda layer, *given: layer(*given), (rows, gate)
    if importlib.util.find_spec("mlx_vlm"):
        from mlx_vlm.models.qwen3_5 import language

        norm = language.Qwen3_5RMSNormGated(24)
        yield "mlx-vlm's gated norm", norm, lambda layer, *given: layer(*given), (rows, gate)
        yield "mlx-vlm's swiglu", Activation(language), lambda layer, *given: layer(*given), (rows, gate)
    yield "convolution", Convolution(), whole, draw((2, 21, 8))


@pytest.mark.parametrize(("name", "module", "run", "inputs"), [pytest.param(*case, id=case[0]) for case in cases()])
def test_outputs_and_gradients_have_upstreams_bits(name, module, run, inputs, monkeypatch):
    with patched():
        wanted = results(module, run, *inputs)
        used = []
        from_inputs = recomputation.mx.custom_function
        monkeypatch.setattr(mx, "custom_function", lambda function: used.append(function) or from_inputs(function))
        with cheap_recomputed():
            found = results(module, run, *inputs)
    assert_same_bits(found, wanted)
    assert name == "norm" or any("from_inputs" in function.__qualname__ for function in used)


@pytest.fixture
def waiting_queue():
    """MLX waits for each operation before the next; else timing decides how far it runs ahead."""
    limit = mx.set_memory_limit(1)
    yield
    mx.set_memory_limit(limit)


def kept(module, run, *inputs) -> int:
    """The bytes that the gradient of the first input keeps after the forward pass, beyond inputs and output."""
    mx.eval(module.parameters(), *inputs)
    outputs = []

    def loss(x):
        outputs.append(run(module, x, *inputs[1:]))
        return outputs[0].sum()

    gc.collect()
    before = mx.get_active_memory()
    gradient = mx.grad(loss)(inputs[0])
    mx.eval(outputs)
    found = mx.get_active_memory() - before - outputs[0].nbytes
    mx.eval(gradient)
    return found


# How many arrays of the first input's size upstream's gradient keeps more, at least.
KEPT = {"swiglu": 1, "qwen3_5, whole": 6}


@pytest.mark.skipif(backend.device() != "cpu", reason="other devices hold arrays for as long as their queue is")
@pytest.mark.usefixtures("waiting_queue")
@pytest.mark.parametrize("name", KEPT)
def test_the_gradient_keeps_fewer_arrays(name):
    (module, run, inputs) = next(case[1:] for case in cases() if case[0] == name)
    inputs = [mx.concatenate([array] * 16, axis=1) for array in inputs]
    with patched():
        kept(module, run, *inputs)
        most = kept(module, run, *inputs)
        with cheap_recomputed():
            least = kept(module, run, *inputs)
    assert most - least >= KEPT[name] * inputs[0].nbytes


def rules_of_swiglu(monkeypatch) -> int:
    used, function = [], mx.custom_function
    with monkeypatch.context() as patch:
        patch.setattr(mx, "custom_function", lambda given: used.append(given) or function(given))
        activations.swiglu(*draw((4, 8), (4, 8)))
    return len(used)


def test_always_on_apple_gpus_but_in_checkpointed_layers(monkeypatch):
    with patched():
        if backend.device() == "cpu":
            assert rules_of_swiglu(monkeypatch) == 0
            monkeypatch.setattr(backend, "device", lambda: "metal")
        assert rules_of_swiglu(monkeypatch) == 1
        with recomputed():
            assert rules_of_swiglu(monkeypatch) == 0
        # A token alone is no training step.
        monkeypatch.setattr(recomputation, "LEAST", 4 * 8 + 1)
        assert rules_of_swiglu(monkeypatch) == 0
