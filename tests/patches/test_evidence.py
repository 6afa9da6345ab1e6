"""The evidence decides about replacements, for any version, and is asked once; its small cases run deltatune's code."""

import contextlib
import dataclasses
import importlib
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

import beside
from deltatune import patches
from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.patches import TRAINING, PatchWarning, evidence, patch, small_cases
from deltatune.patches.evidence import defined_function, expected_signature, signature_text
from deltatune.patches.patch_record import SETTLED, TRIED
from deltatune.patches.tables import delta_layers, pointwise

pytestmark = pytest.mark.any_blas

package = beside.load(Path(__file__).with_name("acme_package.py"))
FILES, RECORD = package.FILES, package.RECORD


def test_every_record_passes_with_the_installed_versions(tmp_path, monkeypatch):
    """Those of GPUs too: their small cases need no kernel."""
    monkeypatch.setattr(evidence, "_path", tmp_path.joinpath)
    evidence.forget()
    records = dict.fromkeys((*patches.PATCHES, *patches.ON_CUDA, *patches.ON_METAL, *patches.ON_CPU))
    for module in sorted({record.module for record in records}):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    for group in (patches.PATCHES, patches.ON_CUDA, patches.ON_METAL, patches.ON_CPU):
        try:
            report = patch.apply(group)
        finally:
            patch.revert()
        assert [str(left) for left in report.left_alone] == []
        assert report.applied


def test_another_version_is_applied_where_the_evidence_is_for_it_and_is_said(acme, monkeypatch):
    one = acme("acme.one")
    monkeypatch.setitem(TRIED, "acme", ">=1.0,<=1.1.5")
    report = patch.apply([RECORD])
    assert one.update(2) == ("ours", 2)
    assert report.complete
    assert report.untried == ["acme 1.2.3 has not been tried with this deltatune; 1 of 1 functions behave as in 1.1.5."]


def test_of_several_records_the_evidence_chooses_the_first_that_fits(acme):
    acme("acme.ops")
    other = dataclasses.replace(RECORD, signature="(x)")
    wrong = dataclasses.replace(RECORD, check=lambda upstream, ours: "it differs.")
    right = dataclasses.replace(RECORD, reason="another")
    assert patch.apply([other, wrong, right, RECORD]).applied[0].patch is right


def test_outcome_of_one_record_does_not_count_for_another(acme):
    acme("acme.ops")
    patch.apply([RECORD])
    patch.revert()
    wrong = dataclasses.replace(RECORD, reason="another", check=lambda upstream, ours: "it differs.")
    assert [left.why for left in patch.apply([wrong]).left_alone] == ["it differs."]


def test_a_block_leaves_earlier_patches_in_force(acme, monkeypatch):
    monkeypatch.setattr(patches, "_records", lambda: (RECORD,))
    one = acme("acme.one")
    for _ in range(2):
        with patches.patched():
            with patches.patched(), patches.patched():
                pass
            assert one.update(2) == ("ours", 2)
        assert one.update(2) == 2


@pytest.mark.parametrize("before", [False, True], ids=["first", "again"])
def test_a_refusal_leaves_earlier_patches_in_force(acme, monkeypatch, before):
    def refuse(*_):
        raise UserError("a layer is not served")

    monkeypatch.setattr(patches, "_records", lambda: (RECORD,))
    monkeypatch.setattr(patches, "refuse", refuse)
    one = acme("acme.one")
    with patches.patched() if before else contextlib.nullcontext():
        with pytest.raises(UserError, match="not served"), patches.patched(nn.Linear(2, 2)):
            raise AssertionError("not reached")
        assert one.update(2) == (("ours", 2) if before else 2)


def test_mended_upstream_is_silent(acme):
    one = acme("acme.one")
    report = patch.apply([dataclasses.replace(RECORD, check=lambda upstream, ours: SETTLED)])
    assert report.complete
    assert not report.applied
    assert one.update(1) == 1


def test_a_function_that_moved_within_its_package_is_replaced(acme, tmp_path):
    (tmp_path / "acme/ops.py").write_text("from .moved import update")
    (tmp_path / "acme/moved.py").write_text(FILES["acme/own.py"].replace("(x)", "(x, scale=1)"))
    one = acme("acme.one")
    assert patch.apply([RECORD]).complete
    assert one.update(5) == acme("acme.moved").update(5) == ("ours", "its own")


@pytest.mark.parametrize("first", ["acme", None])
def test_a_module_that_is_gone_is_said_where_results_depend_on_it(acme, tmp_path, first):
    (tmp_path / "acme/ops.py").unlink()
    said = []
    if first:
        acme(first)
    needed = dataclasses.replace(RECORD, needed_for=(TRAINING,))
    said.append(patch.apply([needed], said.append))
    if not first:
        with pytest.warns(PatchWarning, match="has no module"):
            acme("acme")
    assert [left.why for report in said for left in report.left_alone] == [
        "acme 1.2.3 has no module acme.ops any more."
    ]
    assert patch.apply([RECORD]).complete


def test_a_check_is_asked_once_and_again_when_upstreams_text_changes(acme, tmp_path):
    asked = []
    record = dataclasses.replace(RECORD, check=lambda upstream, ours: asked.append(upstream))

    def starts_anew():
        patch.revert()
        evidence.forget()
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        acme("acme.ops")
        return len(patch.apply([record]).applied)

    assert [starts_anew(), len(asked), starts_anew(), len(asked)] == [1, 1, 1, 1]
    (tmp_path / "acme/base.py").write_text("factor = 1\ndef helper():\n    pass")
    (tmp_path / "acme/ops.py").write_text("from .base import helper\n" + textwrap.dedent(FILES["acme/ops.py"]))
    assert [starts_anew(), len(asked), starts_anew(), len(asked)] == [1, 2, 1, 2]
    # The function's own module is as it was; one that it imports from is not.
    (tmp_path / "acme/base.py").write_text("factor = 22\ndef helper():\n    pass")
    assert [starts_anew(), len(asked)] == [1, 3]


def test_evidence_against_a_replacement_is_not_remembered(acme):
    found = ["it differs.", None]
    record = dataclasses.replace(RECORD, check=lambda upstream, ours: found.pop(0))
    acme("acme.ops")
    assert not patch.apply([record]).applied
    assert patch.apply([record]).applied


def test_a_check_draws_none_of_the_users_random_numbers(acme):
    acme("acme.ops")
    mx.random.seed(3)
    expected = mx.random.uniform()
    mx.random.seed(3)
    patch.apply([dataclasses.replace(RECORD, check=lambda upstream, ours: mx.random.uniform().item() * 0 or None)])
    assert mx.random.uniform() == expected


# nn.silu without a convolution before it is MLX's own.
TABLES = (
    pointwise.ACTIVATIONS,
    pointwise.ACTIVATIONS_OF_MLX_VLM,
    pointwise.PATCHES,
    pointwise.NORMS,
    delta_layers.PATCHES,
)
CHEAP = [pointwise.ATTENTION, *(record for table in TABLES for record in table)]
RECORDS = [
    pytest.param(device, record, id=f"{device}: {record.target}")
    for device, group in (("metal", patches.ON_METAL), ("cuda", patches.ON_CUDA))
    for record in group
    if record in CHEAP and record.check is not pointwise.IS_SILU
]


@pytest.fixture
def served(monkeypatch):
    """The names of the operators of deltatune that served, which grows."""
    names = []

    @contextmanager
    def noting():
        with recomputation.small_cases() as found:
            yield
        names.extend(found)

    monkeypatch.setattr(small_cases, "small_cases", noting)
    return names


@pytest.mark.parametrize(("device", "record"), RECORDS)
def test_ours_runs_in_the_case_of(device, record, served, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    try:
        importlib.import_module(record.module)
    except ImportError:
        pytest.skip(f"{record.module} is not installed")
    upstream = defined_function(record)
    if upstream is None or expected_signature(record, upstream) not in ("", signature_text(upstream)):
        pytest.skip("not of this version")
    ours = record.replacement(upstream)
    found = record.check(upstream, ours)
    assert found is None
    assert served
    served.clear()
    assert record.check(upstream, upstream) is None
    assert not served

    def off(*given, **options):
        results = ours(*given, **options)
        return tuple(1.01 * y for y in results) if isinstance(results, tuple) else 1.01 * results

    assert "differs" in record.check(upstream, off)
