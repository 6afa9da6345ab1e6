"""Layers of Qwen3.5 and Qwen3-Next with the fused convolution equal mlx-lm's own; and when they keep upstream's."""

from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache

from adapter_checks import value_and_gradients
from beside import load
from deltatune import patches
from deltatune.machine import backend
from deltatune.ops.pointwise import conv
from deltatune.ops.segments import segments
from deltatune.patches import patched
from deltatune.patches.tables import delta_layers

CALLS = load(Path(__file__).with_name("layer_calls.py"))
# An error over the largest element: the layer has sums of up to 32 terms, and rounds a dozen times on the way.
BOUND = 2e-5


def layer_of(family: str) -> nn.Module:
    layer = CALLS.delta_layer(family)
    # Small rows, among which eps decides.
    layer.conv1d.weight = layer.conv1d.weight * mx.array([1e-3, 1.0] * (layer.conv_dim // 2))[:, None, None]
    return layer


@pytest.fixture
def fused(monkeypatch, passes_on_host):
    """From here on the layers compute on the host machine. The list names the passes that ran."""

    def start():
        served = passes_on_host()
        monkeypatch.setattr(patches, "_of_device", lambda: delta_layers.PATCHES)
        monkeypatch.setattr(conv, "LEAST", 8)
        monkeypatch.setattr(backend, "device", lambda: "cuda")
        return served

    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
    return start


def results(layer, x, run):
    dy = mx.random.normal(x.shape, key=mx.random.key(8))
    with patched():
        return value_and_gradients(layer, partial(run, layer), x, dy)


@pytest.mark.skipif(backend.device() != "cpu", reason="the host machine needs a CPU")
@pytest.mark.parametrize(
    ("family", "run"),
    [
        # The convolution is the same in both families.
        pytest.param(family, run, marks=() if family == "qwen3_5" or run is CALLS.packed else pytest.mark.weekly)
        for family in ("qwen3_5", "qwen3_next")
        for run in CALLS.RUNS
    ],
)
def test_outputs_and_gradients_are_upstreams(family, run, fused):
    layer, x = layer_of(family), mx.random.normal((2, 21, 32), key=mx.random.key(1))
    wanted = results(layer, x, run)
    served = fused()
    found = results(layer, x, run)
    name = "conv, silu and norms of documents" if run is CALLS.packed else "conv, silu and norms"
    assert [each.partition(" (")[0] for each in served] == [name] * (3 if run is CALLS.in_pieces else 1)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        error = mx.abs(found[name] - array).max() / mx.abs(array).max()
        assert error < BOUND, (name, error)


def test_other_calls_keep_upstreams(fused, monkeypatch):
    layer, x = layer_of("qwen3_5"), mx.random.normal((2, 6, 32), key=mx.random.key(1))
    wanted = results(layer, x, CALLS.whole)["y"]
    served = fused()
    biased = layer_of("qwen3_5")
    biased.conv1d = nn.Conv1d(layer.conv_dim, layer.conv_dim, 4, groups=layer.conv_dim)
    sharded = layer_of("qwen3_5")
    sharded.sharding_group = mx.distributed.init()
    with patched():
        layer.eval()
        assert mx.allclose(layer(x), wanted, atol=1e-5)
        layer.train()
        layer(x, cache=ArraysCache(size=2))
        biased(x)
        assert mx.allclose(sharded(x), wanted, atol=1e-5)
        monkeypatch.setattr(conv, "serves_heads", lambda *_: False)
        assert mx.allclose(layer(x), wanted, atol=1e-5)
        monkeypatch.setattr(backend, "device", lambda: "cpu")
        layer(x)
    assert not served


def test_segments_of_another_length_are_refused_as_upstream_does(fused):
    layer, x = layer_of("qwen3_5"), mx.random.normal((2, 6, 32), key=mx.random.key(1))
    fused()
    with patched(), segments(mx.zeros((2, 9), mx.int32)), pytest.raises(ValueError, match="keep packed documents"):
        layer(x)
