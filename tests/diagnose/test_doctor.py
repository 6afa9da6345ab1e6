"""What the doctor prints, as text and as JSON, and when it exits with 1."""

from __future__ import annotations

import json

import deltatune  # noqa: F401

# isort: split
import mlx.core as mx
import pytest

from deltatune import cli
from deltatune.diagnose import examination, kernels, machine, probes
from deltatune.diagnose.probes import Fault


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(machine, "_SIDE", 64)


@pytest.fixture
def found(monkeypatch):
    """found(fault, ...): what the probes find."""
    return lambda *faults: monkeypatch.setattr(probes, "faults", lambda: list(faults))


def said(capsys):
    """What was printed, every run of blanks and line breaks as one blank."""
    return " ".join(capsys.readouterr().out.split())


def test_on_a_cpu(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for part in (
        "This machine chip ",
        " GFLOP/s on fp32 matrices of 64 x 64",
        f"mlx {mx.__version__}",
        "Gated delta: chunk (automatic on cpu)",
        "✓ chunk: float32, 1/2 heads of 8 x 8 ",
        "✓ NaN in products of one row (BLAS)",
        "✓ scatter-add with a batch stride",
        "✓ gated_delta_update mlx_lm ",
    ):
        assert part in text
    assert lines[-1].strip() == "Nothing here would train wrong."


def test_json_has_everything(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "versions", "machine", "gated_delta", "findings", "faults", "patches", "model", "wrong",
    }  # fmt: skip
    assert found["wrong"] is False
    assert found["model"] is None
    assert {"chip", "memory", "system", "device", "BLAS", "BLAS file", "BLAS speed", "fp32"} == set(found["machine"])
    assert found["faults"][0]["status"] == "absent"
    holders = next(each for each in found["patches"]["applied"] if each["name"] == "gated_delta_update")["holders"]
    assert "mlx_lm.models.qwen3_5" in holders


def test_a_fault_that_is_avoided_is_shown_and_harmless(found, capsys):
    found(Fault("a product", "avoided", "computed another way"))
    assert cli.main(["doctor"]) == 0
    assert "! a product avoided computed another way" in said(capsys)


def test_a_fault_that_is_present_would_train_wrong(found, capsys):
    found(Fault("a product", "present", "update mlx", error=float("inf")))
    assert cli.main(["doctor"]) == 1
    text = said(capsys)
    assert "✗ a product present update mlx" in text
    assert "Something here would train wrong" in text


def test_a_wrong_kernel_would_train_wrong(monkeypatch, wrong, capsys):
    monkeypatch.setattr(kernels, "gated_delta_chunk", wrong)
    assert cli.main(["doctor"]) == 1
    assert "✗ chunk: float32, 1/2 heads of 8 x 8 wrong chunk (" in said(capsys)


def test_not_a_number_is_valid_json(found, capsys):
    found(Fault("a product", "avoided", "", error=float("inf")))
    assert cli.main(["doctor", "--json"]) == 0
    faults = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["faults"]
    assert faults[0]["error"] == "inf"


def test_a_forced_implementation_that_is_refused(monkeypatch, on_a_gpu, wrong, capsys):
    on_a_gpu(wrong)
    monkeypatch.setattr("deltatune.backend.gated_delta_candidates", lambda: (("fused",), "forced"))
    assert cli.main(["doctor"]) == 1
    assert "! DELTATUNE_GATED_DELTA=fused: fused (" in said(capsys)


def test_a_model_and_who_holds_its_layers(tiny_checkpoint, capsys):
    path = tiny_checkpoint("qwen3_5_moe")
    assert cli.main(["doctor", "--model", str(path)]) == 0
    text = said(capsys)
    assert "4 layers: 1 attention, 3 delta; experts in 4" in text
    assert "✓ 3 of 3 delta layers train with deltatune's" in text


def test_layers_that_run_other_code_are_named(tiny_checkpoint, monkeypatch, capsys):
    path = tiny_checkpoint("qwen3_5")
    monkeypatch.setattr(examination, "reached", lambda model: {"layers.0.linear_attn": False, "layers.1.x": True})
    assert cli.main(["doctor", "--model", str(path)]) == 0
    text = said(capsys)
    assert "! 1 of 2 delta layers train with deltatune's" in text
    assert "layers.0.linear_attn runs other code" in text


def test_a_model_that_is_none_is_bad_input(tmp_path, capsys):
    assert cli.main(["doctor", "--model", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
