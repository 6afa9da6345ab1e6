"""Attention with a gate agrees with upstream's, by the kernels for its rotary embedding and its norms."""

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from adapter_checks import value_and_gradients
from beside import load
from deltatune import patches
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.ops.pointwise import heads
from deltatune.ops.pointwise.passes import Passes
from deltatune.patches import patched
from deltatune.patches.tables import pointwise

pytestmark = pytest.mark.skipif(backend.device() != "cpu", reason="the host machine needs a CPU")
CALLS = load(Path(__file__).with_name("layer_calls.py"))
HEADS, GROUPS, WIDTH, ROTARY, LENGTH = 4, 2, 32, 16, 9
TURNED = {"turned heads and gates", "turned heads", "times gate"}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# The positions that the kernels turn by, and others.
TURNING = [{"type": "default", "mrope_section": [3, 3, 2]}, {"type": "mrope", "mrope_section": [3, 3, 2]}, None]
ROPES = [*((scaling, TURNED) for scaling in TURNING), ({"type": "linear", "factor": 2.0}, set()), (YARN, set())]


@pytest.fixture
def served(passes_on_host, monkeypatch):
    """Patches of an NVIDIA GPU, with its kernels on the host machine. The list names those that ran."""
    monkeypatch.setattr(recomputation, "LEAST", 8)
    monkeypatch.setattr(patches, "_of_device", lambda: (*pointwise.PATCHES, pointwise.ATTENTION))
    monkeypatch.setattr(pointwise, "PASSES", SimpleNamespace(is_for_here=True))
    return passes_on_host()


def kinds(served):
    return {name.split(" of ")[0] for name in served}


def attention(rope_scaling=None):
    mx.random.seed(3)
    sizes = {"hidden_size": 24, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": WIDTH}
    layer = CALLS.attention(**sizes, max_position_embeddings=64, rms_norm_eps=1e-5, rope_scaling=rope_scaling)
    for norm in (layer.q_norm, layer.k_norm):
        norm.weight = 1 + 0.2 * mx.random.normal((WIDTH,))
    return layer


def results(layer, mask="causal"):
    x, dy = (mx.random.normal((2, LENGTH, 24), key=mx.random.key(i)) for i in range(2))
    return value_and_gradients(layer, lambda x: layer(x, mask), x, dy)


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        # Two chains of fp32 operations differ by a few units of 2^-24 in sums of up to 128 terms.
        assert np.abs(np.array(found[name] - exact)).max() < 1e-5 * np.abs(np.array(exact)).max(), name


def check(served, kernels, layer, mask="causal"):
    """The layer agrees with upstream's, by these kernels."""
    wanted = results(layer, mask)
    with patched():
        found = results(layer, mask)
    assert kinds(served) == kernels
    assert_close(found, wanted)


@pytest.mark.parametrize(("scaling", "kernels"), ROPES)
def test_it_agrees_with_upstream(scaling, kernels, served):
    check(served, kernels, attention(scaling))


def test_positions_run_on_through_packed_documents(served):
    owner = mx.array([0] * 4 + [1] * (LENGTH - 4))
    check(served, TURNED, attention(), create_causal_mask(LENGTH) & (owner[:, None] == owner))


class _OtherNorm(nn.RMSNorm):
    """A norm of a class that the kernels do not know."""


def changed(layer, what):
    if what == "traditional pairs":
        layer.rope = initialize_rope(ROTARY, 1e4, traditional=True)
    elif what == "too few turn":
        layer.rope = initialize_rope(8, 1e4, traditional=False)
    elif what == "a norm of the keys":
        layer.k_norm = _OtherNorm(WIDTH)
    else:
        layer.q_norm = _OtherNorm(WIDTH)
    return layer


@pytest.mark.parametrize(
    ("what", "kernels"),
    [
        ("traditional pairs", set()),
        ("too few turn", set()),
        ("a norm of the keys", {"turned heads and gates", "times gate"}),
        ("a norm of the queries", set()),
    ],
)
def test_attention_beyond_the_kernels_stays_with_mlx(what, kernels, served):
    check(served, kernels, changed(attention(), what))


def test_kernels_that_are_refused_or_too_small_do_not_serve(served, monkeypatch):
    layer = attention()
    wanted = results(layer)
    monkeypatch.setattr(heads, "large_enough", lambda x: x.size >= 10**6)
    with patched():
        assert_close(results(layer), wanted)
    assert not served
    monkeypatch.setattr(Passes, "passes_trial", lambda *_, **__: False)
    monkeypatch.setattr(heads, "large_enough", recomputation.large_enough)
    with patched():
        found = results(layer)
    assert not served
    assert all(mx.array_equal(found[name], wanted[name]) for name in wanted)


def test_with_a_cache_it_is_upstreams(served):
    layer = attention()
    x = mx.random.normal((2, LENGTH, 24), key=mx.random.key(0))
    wanted = layer(x, "causal", KVCache())
    with patched():
        assert mx.array_equal(layer(x, "causal", KVCache()), wanted)
    assert not served
