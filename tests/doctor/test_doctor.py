"""The doctor's output, as text and as JSON, and its exit code."""

import importlib
import json
import re
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from deltatune import cli, upstream
from deltatune.doctor import examination, implementations, inventory, probes, screen
from deltatune.doctor.custom_kernels import sweep
from deltatune.doctor.probes import Fault
from deltatune.errors import UserError
from deltatune.machine import backend, blas_fault
from deltatune.models import load
from deltatune.ops.attention import trial_case
from deltatune.ops.operator.operator import Operator
from deltatune.patches import evidence
from deltatune.patches.patch_report import Serving
from deltatune.plan.array_layout import LayoutError
from new_tokens import with_new_tokens

# What is measured of a machine, which no model changes.
MEASURED = ((implementations, "findings"), (implementations, "times"))
MEASURED += ((probes, "faults"),)


@pytest.fixture(scope="module")
def measured():
    """The measurements that are made once for all tests that do not change them, by name."""
    return {}


@pytest.fixture(autouse=True)
def quick(request, monkeypatch, measured):
    """Trace no model, and measure once for the tests that do not ask for `anew`."""
    monkeypatch.setattr(inventory, "_SIDE", 64)
    monkeypatch.setattr(examination, "sweep", lambda model: [])

    def once(name, measure):
        return lambda: measured[name] if name in measured else measured.setdefault(name, measure())

    for module, name in MEASURED if "anew" not in request.fixturenames else ():
        monkeypatch.setattr(module, name, once(name, getattr(module, name)))


@pytest.fixture
def anew():
    """For a test with a defect that shows in the measurements."""


@pytest.fixture
def swept(monkeypatch):
    """Traces the models' forwards instead of skipping them; each takes seconds."""
    monkeypatch.setattr(examination, "sweep", sweep)


@pytest.fixture
def found(monkeypatch):
    """found(fault, ...): makes the probes find these faults."""
    return lambda *faults: monkeypatch.setattr(probes, "faults", lambda: list(faults))


@pytest.fixture
def doctor(capsys):
    """doctor(*flags, code=0) runs it, and returns its output, with every run of white space as one blank."""

    def run(*flags, code=0):
        assert cli.main(["doctor", *map(str, flags)]) == code
        return " ".join(capsys.readouterr().out.split())

    return run


@pytest.mark.skipif(backend.device() != "cpu", reason="a CPU's words")
def test_on_a_cpu(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]
    text, names = " ".join(" ".join(lines).split()), len(upstream.NAMES) + 1
    for part in (
        "This machine chip ",
        " GFLOP/s on fp32 matrices of 64 x 64",
        f"mlx {mx.__version__}",
        "Gated delta: chunk (automatic on cpu)",
        "✓ chunk: float32, 1/2 heads of 8 x 8 ",
        "✓ NaN in products of one row (BLAS)",
        "✓ blocked: cpu, bfloat16, heads of 192 x 128, causal, segmented"
        if backend.device() == "cpu"
        else "Attention:",
        " functions replaced: ",
        f"✓ {names} of {names} are as deltatune knows them",
        "--json names each",
    ):
        assert part in text
    assert re.search(r"1/2 heads of 8 x 8 error \d+e-\d\d, \de-\d\d allowed ", text)
    assert lines[-1].strip() == "Nothing here would train wrong."


def test_json_has_everything(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "versions", "machine", "operators", "faults", "patches",
        "private_names", "times", "model", "wrong",
    }  # fmt: skip
    assert found["wrong"] is False
    assert found["model"] is None
    names = {"chip", "memory", "system", "device", "BLAS", "BLAS file", "BLAS speed", "fp32"}
    assert names | ({"bf16"} if backend.device() == "cpu" else set()) == set(found["machine"])
    assert found["machine"]["BLAS file"] == (blas_fault.probe().library or "not found")
    # On some Macs, Accelerate has the first fault.
    assert found["faults"][0]["status"] in ("absent", "avoided")
    holders = next(each for each in found["patches"]["applied"] if each["name"] == "gated_delta_update")["holders"]
    assert "mlx_lm.models.qwen3_5" in holders


def test_a_missing_private_name_is_named_with_its_fallback(monkeypatch, doctor):
    gone = upstream.NAMES[0]._replace(present=lambda: False)
    monkeypatch.setattr(upstream, "NAMES", (gone, *upstream.NAMES[1:]))
    monkeypatch.setattr(examination.ArrayLayout, "measured", unreadable)
    text = doctor()
    assert f"{len(upstream.NAMES) - 1} of {len(upstream.NAMES) + 1} are as deltatune knows them" in text
    assert "! mlx::core::set_compile_mode is gone. mx.compile builds kernels of its own" in text
    assert "an mlx.core.array in memory is gone. Runs are not planned: two offsets fit." in text


def unreadable():
    raise LayoutError("two offsets fit")


def test_a_fault_that_is_avoided_is_shown_and_harmless(found, doctor):
    found(Fault("a product", "avoided", "computed another way"))
    assert "! a product avoided computed another way" in doctor()


def test_a_fault_that_is_present_would_train_wrong(found, doctor):
    found(Fault("a product", "present", "update mlx", error=float("inf")))
    text = doctor(code=1)
    assert "✗ a product present update mlx" in text
    assert "Something here would train wrong" in text


@pytest.mark.usefixtures("anew")
def test_a_wrong_attention_would_train_wrong(monkeypatch, doctor):
    blocked = trial_case.attention_blocked
    monkeypatch.setattr(trial_case, "attention_blocked", lambda *a, **options: 1.02 * blocked(*a, **options))
    assert "heads of 256 x 256, grouped, causal wrong blocked (" in doctor(code=1)


def test_not_a_number_is_valid_json(found, capsys):
    found(Fault("a product", "avoided", "", error=float("inf")))
    assert cli.main(["doctor", "--json"]) == 0
    faults = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["faults"]
    assert faults[0]["error"] == "inf"


@pytest.mark.usefixtures("anew")
def test_a_forced_implementation_that_is_refused(monkeypatch, on_a_gpu, wrong, doctor, tmp_path):
    on_a_gpu(wrong)
    # What an earlier process found is not asked again.
    monkeypatch.setattr(evidence, "_path", tmp_path.joinpath)
    evidence.forget()
    order = Operator.order
    forced = lambda operator: (("fused",), "forced") if operator.name == "gated_delta" else order(operator)  # noqa: E731
    monkeypatch.setattr(Operator, "order", forced)
    assert "! DELTATUNE_GATED_DELTA=fused: fused (" in doctor(code=1)


def test_a_model_and_who_holds_its_layers(tiny_checkpoint, doctor):
    path = tiny_checkpoint("qwen3_5_moe")
    text = doctor("--model", path)
    assert "4 layers: 1 attention, 3 delta; experts in 4" in text
    assert "✓ 3 of 3 layers with gated delta train with deltatune's: chunk in 3 on text" in text
    assert "✓ 1 of 1 layers with attention train with deltatune's: " in text
    assert "✓ 4 of 4 layers with experts train with deltatune's: grouped in 4 on text" in text


def test_layers_that_run_other_code_are_named(tiny_checkpoint, monkeypatch, doctor):
    path = tiny_checkpoint("qwen3_5")
    told = Serving({"layers.0.linear_attn": "", "layers.1.x": "fused"}, {"layers.2": ""})
    monkeypatch.setattr(examination, "serving", lambda model: told)
    text = doctor("--model", path)
    assert "! 1 of 2 layers with gated delta train with deltatune's: fused in 1 on text" in text
    assert "✓ 0 of 1 layers with attention train with deltatune's on text" in text
    assert "layers.0.linear_attn runs other code" in text


def test_a_model_that_is_none_is_bad_input(tmp_path, complaint):
    assert "no such directory" in complaint("doctor", "--model", str(tmp_path / "nowhere"))


@pytest.fixture
def planted(monkeypatch, swept, tiny_model):
    """Gives the doctor a model with a first layer that runs a kernel without a gradient."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    module = importlib.import_module("planted_kernel")
    model = module.Model(tiny_model("qwen3", num_hidden_layers=1).args)
    monkeypatch.setattr(load, "load_for_data", lambda path: ({"text": model}, []))


def test_a_kernel_without_a_gradient_stops_training(planted, monkeypatch, tmp_path, doctor, capsys):
    found = examination.examine(str(tmp_path))
    monkeypatch.setattr(screen, "examine", lambda model: found)
    text = doctor("--model", tmp_path, code=1)
    assert "✗ this layer cannot be trained: planted_kernel.Sparse.__call__ runs the kernel sparse_attention" in text
    assert "This model cannot be trained on an Apple GPU: 1 kernels without a gradient" in text
    assert cli.main(["doctor", "--json", "--model", str(tmp_path)]) == 1
    said_as_json = json.loads(capsys.readouterr().out)
    (forward,) = said_as_json["model"]["forwards"]
    assert forward["kernels"] == [
        {"name": "sparse_attention", "caller": "planted_kernel.Sparse.__call__", "calls": 1, "differentiable": False}
    ]
    assert len(forward["untrainable"]) == 1
    assert said_as_json["wrong"] is True


def test_a_model_with_a_vision_tower_is_swept_with_and_without_them(swept, tiny_vision_checkpoint, capsys):
    assert cli.main(["doctor", "--json", "--model", str(tiny_vision_checkpoint("qwen3_5"))]) == 0
    forwards = {each["data"]: each for each in json.loads(capsys.readouterr().out)["model"]["forwards"]}
    # As on an Apple GPU.
    (kernel,) = forwards["images"]["kernels"]
    assert kernel["name"].startswith("mrope_apply")
    assert (kernel["calls"], kernel["differentiable"]) == (2, True)
    assert forwards["images"]["package"] == "mlx-vlm"
    assert forwards["text"]["kernels"] == []
    assert forwards["text"]["unreached"] == forwards["images"]["unreached"] == []


def test_without_mlx_vlm_text_alone_is_looked_at(tiny_vision_checkpoint, monkeypatch, doctor):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = doctor("--model", tiny_vision_checkpoint("qwen3_5"))
    assert "✓ 3 of 3 layers with gated delta train with deltatune's: chunk in 3 on text, through mlx-lm" in text
    assert "– its config.json has a vision tower, which needs mlx-vlm, and mlx-vlm is not installed" in text


def test_a_package_that_is_not_installed_takes_one_line(monkeypatch, capsys):
    for module in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    assert cli.main(["doctor"]) == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines() if "mlx" in line and "not installed" in line]
    assert said == ["–  mlx-vlm is not installed"]


def test_a_forward_that_cannot_be_traced_is_said(tiny_checkpoint, monkeypatch, doctor):
    def refuses(model):
        raise UserError("sweep: it keeps no config")

    monkeypatch.setattr(examination, "sweep", refuses)
    assert "! custom kernels: not known on text, through mlx-lm sweep: it keeps no config" in doctor(
        "--model", tiny_checkpoint("qwen3")
    )


@pytest.mark.bad_input("`doctor` on a tokenizer with tokens that the embedding has no row for")
def test_a_tokenizer_with_more_tokens_than_rows(tiny_checkpoint, tmp_path, doctor):
    path = with_new_tokens(tiny_checkpoint("qwen3"), tmp_path / "model")
    text = doctor("--model", path, code=1)
    assert (
        "✗ the embedding has 320 rows, and 2 tokens of the tokenizer have ids beyond them, the first '<call>'" in text
    )
    assert "This model and its tokenizer do not fit" in text
    assert cli.main(["doctor", "--model", str(tiny_checkpoint("qwen3"))]) == 0
