"""Experts' matrices have no gaps between them after loading on CUDA."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from deltatune import patches
from deltatune.machine import backend
from deltatune.patches import patched
from deltatune.patches.tables import loading
from layouts import has_gaps

pytestmark = pytest.mark.any_blas


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (SwitchLinear(8, 5, 3, bias=False) for _ in range(2))
        self.norm = nn.RMSNorm(8)


@pytest.fixture
def halves():
    """Weights with gate and up as slices of one array, as mlx-lm's sanitize makes them."""
    both = mx.random.normal((3, 10, 8))
    mx.eval(both)
    return [("gate.weight", both[:, :5]), ("up.weight", both[:, 5:]), ("norm.weight", mx.ones(8))]


@pytest.mark.parametrize(("device", "expected"), [("cpu", [True, True]), ("cuda", [False, False])])
def test_slices_are_copied_on_cuda(device, expected, halves, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(patches, "ON_CUDA", loading.PATCHES)
    model = Model()
    with patched() as report:
        model.load_weights(halves)
    assert report.complete
    assert [has_gaps(model.gate.weight), has_gaps(model.up.weight)] == expected
    assert mx.array_equal(model.gate.weight, halves[0][1])
    assert mx.array_equal(model.up.weight, halves[1][1])


def test_files_and_strictness_are_upstreams(halves, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(patches, "ON_CUDA", loading.PATCHES)
    mx.save_safetensors(str(tmp_path / "w.safetensors"), dict(halves))
    with patched():
        assert mx.array_equal(Model().load_weights(str(tmp_path / "w.safetensors")).up.weight, halves[1][1])
        with pytest.raises(ValueError, match="Missing 1 parameters"):
            Model().load_weights(halves[:2])
        Model().load_weights(halves[:2], strict=False)
