"""What the doctor prints, as text and as JSON, and when it exits with 1."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from deltatune import backend, cli
from deltatune.diagnose import doctor
from deltatune.ops.gated_delta import choice, gated_delta_chunk, verdict
from deltatune.ops.gated_delta.choice import Candidate
from deltatune.ops.gated_delta.verdict import ShapeClass


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "_CHUNK", (ShapeClass(1, 2, 8, 8, "float32"),))
    monkeypatch.setattr(doctor, "_MODELS", (ShapeClass(1, 1, 8, 8, "float32"),))
    verdict.forget()
    yield
    verdict.forget()


def on_a_gpu(function, monkeypatch):
    """A device whose fused kernels are `function`."""
    monkeypatch.setattr(backend, "_GATED_DELTA", {"cpu": ("fused", "chunk")})
    found = choice.CANDIDATES | {"fused": lambda call: Candidate(function, call.shape_class(), function)}
    monkeypatch.setattr(choice, "CANDIDATES", found)


def wrong(*arrays, **options):
    y, state = gated_delta_chunk(*arrays, **options)
    return y * 1.01, state


def test_on_a_cpu(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    for part in (
        f"mlx {mx.__version__}",
        "BLAS: ",
        "Gated delta: chunk (automatic on cpu)",
        "Nothing here would train",
    ):
        assert part in said
    assert "[right] chunk (float32, 1/2 heads of 8 x 8) agrees with naive: " in said
    assert "Patch: gated_delta_update in " in said


def test_json_has_every_error(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (finding,) = found["findings"]
    assert set(finding["errors"]) == set(verdict.NAMES)
    assert 0 < max(finding["errors"].values()) <= finding["bound"] == 2e-6
    assert found["wrong"] is False
    assert found["machine"]["device"]


def test_a_refused_kernel_is_shown_and_trains_nothing_wrong(monkeypatch, capsys):
    on_a_gpu(wrong, monkeypatch)
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "[refused] fused (float32, 1/1 heads of 8 x 8) differs from chunk: " in said
    assert "by 1.0e-02 of the largest, 2.0e-06 allowed" in said


def test_a_refused_kernel_that_is_forced_would_train_wrong(monkeypatch, capsys):
    on_a_gpu(wrong, monkeypatch)
    monkeypatch.setattr(backend, "gated_delta_candidates", lambda: (("fused",), "forced"))
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "[wrong] fused" in said
    assert "Left alone: DELTATUNE_GATED_DELTA=fused: fused (" in said


def test_chunk_itself_wrong_is_the_worst(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gated_delta_chunk", lambda *arrays, **options: wrong(*arrays, **options))
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "[wrong] chunk (float32, 1/2 heads of 8 x 8) differs from naive" in said
    assert "Something here would train wrong" in said


def test_not_a_number_is_valid_json(monkeypatch, capsys):
    on_a_gpu(lambda *arrays, **options: (wrong(*arrays, **options)[0] * mx.nan, options["initial_state"]), monkeypatch)
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["findings"][-1]["status"] == "refused"
    assert found["findings"][-1]["errors"]["y"] == "inf"


def test_what_is_not_covered_says_why(monkeypatch, capsys):
    monkeypatch.setattr(backend, "_GATED_DELTA", {"cpu": ("fused", "chunk")})
    found = choice.CANDIDATES | {"fused": lambda call: "heads too odd"}
    monkeypatch.setattr(choice, "CANDIDATES", found)
    assert cli.main(["doctor"]) == 0
    assert "[not covered] fused (float32, 1/1 heads of 8 x 8): heads too odd" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "device", "code"), [(1.001, "cuda", 0), (1.01, "cuda", 1), (1.001, "cpu", 1)])
def test_products_in_tf32_are_named_not_called_wrong(factor, device, code, monkeypatch, capsys):
    def rounded(*arrays, **options):
        y, state = gated_delta_chunk(*arrays, **options)
        return y * factor, state

    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(backend, "_GATED_DELTA", dict.fromkeys(("cuda", "cpu"), ("chunk",)))
    monkeypatch.setattr(doctor, "_MODELS", ())
    monkeypatch.setattr(doctor, "gated_delta_chunk", rounded)
    assert cli.main(["doctor"]) == code
    said = capsys.readouterr().out
    assert ("[TF32] chunk" in said and "unless MLX_ENABLE_TF32=0 is set" in said) == (code == 0)
