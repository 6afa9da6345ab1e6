"""Layers of Qwen3.5 and Qwen3-Next with the fused convolution equal mlx-lm's own; and when they keep upstream's."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from host_machine import HostMachine
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.cache import ArraysCache

from beside import load
from deltatune import patches
from deltatune.machine import backend
from deltatune.ops.kernels.launch import Launch, header
from deltatune.ops.pointwise import conv
from deltatune.ops.pointwise.passes import BODIES, Passes
from deltatune.ops.segments import segments
from deltatune.patches import patched
from deltatune.patches.tables import delta_layers

CALLS = load(Path(__file__).with_name("delta_calls.py"))
whole, masked, packed, in_pieces = CALLS.whole, CALLS.masked, CALLS.packed, CALLS.in_pieces

SIZES = {"hidden_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 24}
SIZES |= {"linear_key_head_dim": 16, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6}
# An error over the largest element: the layer has sums of up to 32 terms, and rounds a dozen times on the way.
BOUND = 2e-5


def layer_of(family: str) -> nn.Module:
    mx.random.seed(3)
    if family == "qwen3_5":
        layer = qwen3_5.GatedDeltaNet(qwen3_5.TextModelArgs(**SIZES, num_attention_heads=2))
    else:
        layer = qwen3_next.Qwen3NextGatedDeltaNet(type("Sizes", (), SIZES))
    # Small rows, among which eps decides.
    layer.conv1d.weight = layer.conv1d.weight * mx.array([1e-3, 1.0] * (layer.conv_dim // 2))[:, None, None]
    return layer.train()


@pytest.fixture
def fused(monkeypatch, host_folder):
    """From here on the layers compute on the host machine. The list names the passes that ran."""

    def start():
        machine, call, served = HostMachine(host_folder, header("metal", BODIES)), Passes.__call__, []

        def recorded(self, *arrays):
            served.append(self.name.partition(" (")[0])
            return call(self, *arrays)

        monkeypatch.setattr(Passes, "__call__", recorded)
        monkeypatch.setattr(Launch, "run", machine.run)
        monkeypatch.setattr(Passes, "passes_trial", lambda self, *kinds, others=(): True)
        monkeypatch.setattr(patches, "_of_device", lambda: delta_layers.PATCHES)
        monkeypatch.setattr(conv, "LEAST", 8)
        monkeypatch.setattr(backend, "device", lambda: "cuda")
        return served

    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
    return start


def results(layer, x, run):
    """The output, and the gradients of x and of every parameter, by name."""

    def loss(parameters, x):
        layer.update(parameters)
        y = run(layer, x)
        return (y * mx.random.normal(y.shape, key=mx.random.key(8))).sum(), y

    with patched():
        (_, y), (gradients, dx) = mx.value_and_grad(loss, argnums=(0, 1))(layer.parameters(), x)
    return {"y": y, "dx": dx, **dict(tree_flatten(gradients))}


@pytest.mark.skipif(backend.device() != "cpu", reason="the host machine needs a CPU")
@pytest.mark.parametrize("run", [whole, masked, packed, in_pieces], ids=lambda run: run.__name__)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_outputs_and_gradients_are_upstreams(family, run, fused):
    layer, x = layer_of(family), mx.random.normal((2, 21, 32), key=mx.random.key(1))
    wanted = results(layer, x, run)
    served = fused()
    found = results(layer, x, run)
    documents = " of documents" if run is packed else ""
    assert served == [f"conv, silu and norms{documents}"] * (3 if run is in_pieces else 1)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        error = mx.abs(found[name] - array).max() / mx.abs(array).max()
        assert error < BOUND, (name, error)


def test_other_calls_keep_upstreams(fused, monkeypatch):
    layer, x = layer_of("qwen3_5"), mx.random.normal((2, 6, 32), key=mx.random.key(1))
    wanted = results(layer, x, whole)["y"]
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
