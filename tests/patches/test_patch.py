"""Patches on a small package made for the tests: every holder is reached, and every original restored."""

import dataclasses
import functools
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import pytest

import beside
from deltatune.machine import backend, compiling
from deltatune.patches import PatchWarning, evidence, patch

pytestmark = pytest.mark.any_blas

RECORD = beside.load(Path(__file__).with_name("acme_package.py")).RECORD


def apply_and_warn(records):
    report = patch.apply(records)
    patch.warn(report)
    return report


def test_checks_build_no_kernels(acme):
    """On CUDA, kernels for a few numbers would take half a minute to build, in every process."""
    found = []

    def check(upstream, ours):
        found.append(compiling.compiles())

    acme("acme.ops")
    with compiling.without_kernels() as mode:
        patch.apply([dataclasses.replace(RECORD, check=check)])
        evidence.forget()
        patch.revert()
        patch.apply([dataclasses.replace(RECORD, reason="another", check=check)])
        assert found == [False, False]
        assert compiling.compiles() == mode.startswith("compiled")


@pytest.mark.parametrize(("device", "streams"), [("cuda", [mx.cpu]), ("metal", []), ("cpu", [])])
def test_checks_run_on_the_cpu_where_an_nvidia_gpu_would_build_kernels(acme, monkeypatch, device, streams):
    entered, stream = [], mx.stream
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(mx, "stream", lambda on: entered.append(on) or stream(on))
    acme("acme.ops")
    patch.apply([dataclasses.replace(RECORD, check=lambda upstream, ours: None)])
    assert entered == streams


def test_every_holder_is_reached_and_given_back(acme):
    ops, one, two, own, bystander = map(acme, ("acme.ops", "acme.one", "acme.two", "acme.own", "bystander"))
    upstream, theirs = ops.update, own.update
    report = patch.apply([RECORD])
    assert one.update(2, scale=3) == two.renamed(2, 3) == bystander.update(2, 3) == ("ours", 6)
    assert report.applied[0].holders == ("acme.one", "acme.ops", "acme.two", "bystander")
    assert report.complete
    assert own.update is theirs
    assert acme("bystander").update.__wrapped__ is upstream
    patch.revert()
    assert [ops.update, one.update, two.renamed, bystander.update] == [upstream] * 4


def test_applied_twice_reaches_new_holders_and_reverts_once(acme):
    ops = acme("acme.ops")
    upstream = ops.update
    patch.apply([RECORD])
    latecomer = ModuleType("latecomer")
    latecomer.update = upstream
    sys.modules["latecomer"] = latecomer
    patch.apply([RECORD])
    assert latecomer.update(1) == ops.update(1) == ("ours", 1)
    patch.revert()
    assert latecomer.update is ops.update is upstream
    patch.revert()


def test_applied_twice_looks_through_the_modules_once_each_time(acme, monkeypatch):
    """Samples and answers apply the patches within a run, in which they are in force: a pass takes some 10 ms."""
    acme("acme.one")
    passes, read = [], evidence.LoadedModules._read
    monkeypatch.setattr(evidence.LoadedModules, "_read", lambda self: passes.append(read(self)))
    for applied in (1, 2, 3):
        patch.apply([RECORD])
        assert len(passes) == applied
    patch.revert()
    assert len(passes) == 4


def test_a_target_imported_later_is_patched_before_anybody_reads_it(acme):
    announced = []
    report = patch.apply([RECORD], announced.append)
    assert report.waiting == ["acme.ops"]
    assert not report.applied
    one = acme("acme.one")
    assert one.update(5) == ("ours", 5)
    assert announced[0].applied[0].version == "1.2.3"
    assert acme("acme.ops").__spec__.loader is acme("acme.ops").__loader__
    assert acme("acme.ops").__loader__.get_source("acme.ops").strip().startswith("def update")
    patch.revert()
    assert one.update(5) == 5


def test_all_targets_of_a_module_imported_later_are_patched(acme):
    def call(upstream):
        return lambda self, x: ("ours", upstream(self, x))

    layer = dataclasses.replace(RECORD, name="Layer.__call__", signature="(self, x)", replacement=call)
    announced = []
    assert patch.apply([RECORD, layer], announced.append).waiting == ["acme.ops"]
    patch.apply([layer, RECORD])
    ops = acme("acme.ops")
    assert (ops.update(5), ops.Layer()(5)) == (("ours", 5), ("ours", 6))
    assert [each.patch.name for each in announced[0].applied] == ["update", "Layer.__call__"]
    patch.revert()
    assert (ops.update(5), ops.Layer()(5)) == (5, 6)


LATE = """
import contextlib, importlib, sys
import deltatune
from deltatune import patches
from deltatune.patches import evidence
# The checks are tried elsewhere; those of a GPU build kernels.
evidence._measured, evidence._read, evidence._write = lambda *_: None, lambda key: None, lambda *_: None
of_devices = (*patches.ON_CPU, *patches.ON_CUDA, *patches.ON_METAL)
patches._of_device = lambda: of_devices
said = []
assert not any(name.startswith("mlx_lm") for name in sys.modules)
targets = {each.target: each for each in (*of_devices, *patches.PATCHES) if each.package == "mlx_lm"}
with patches.patched(announce=said.append):
    for target, each in list(targets.items()):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(each.module)
        if each.module not in sys.modules:
            del targets[target]
applied = {each.patch.target for report in said for each in report.applied}
print(len(targets), *sorted(set(targets) - applied))
"""


def test_every_target_of_mlx_lm_follows_a_late_import():
    """`deltatune run` applies the patches before its program imports mlx-lm: here those of every device."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    count, *missing = done.stdout.split()
    assert int(count) > 8
    assert not missing
    assert not done.stderr


def test_a_module_that_is_loaded_no_more_is_reverted_too_and_so_are_all_others(acme):
    ops, own = acme("acme.ops"), acme("acme.own")
    upstreams = ops.update, own.update
    patch.apply([RECORD, dataclasses.replace(RECORD, module="acme.own", signature="(x)")])
    assert (ops.update, own.update) != upstreams
    del sys.modules["acme.ops"]
    patch.revert()
    assert (ops.update, own.update) == upstreams


def test_revert_stops_waiting(acme):
    patch.apply([RECORD])
    patch.revert()
    assert acme("acme.one").update(5) == 5
    assert not any(type(finder).__name__ == "ImportWatch" for finder in sys.meta_path)


def test_an_import_that_fails_once_is_still_watched(acme, tmp_path):
    patch.apply([RECORD])
    good = (tmp_path / "acme/ops.py").read_text()
    (tmp_path / "acme/ops.py").write_text("raise RuntimeError('not yet')")
    with pytest.raises(RuntimeError, match="not yet"):
        acme("acme.ops")
    (tmp_path / "acme/ops.py").write_text(good + "\n# mended")
    importlib.invalidate_caches()
    assert acme("acme.one").update(5) == ("ours", 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": "(x)"}, r"its signature is \(x, scale=1\) in acme 1.2.3, and \(x\) was expected"),
        ({"replacement": lambda _: lambda x: x}, r"its signature is \(x, scale=1\) .* and \(x\) was expected"),
        ({"name": "gone"}, "acme 1.2.3 has no such function any more"),
        ({"name": "Gone.__call__"}, "acme 1.2.3 has no such function any more"),
        ({"check": lambda upstream, ours: upstream.weight}, "a small case of it ends in AttributeError"),
        ({"check": lambda upstream, ours: "on a small case it differs."}, "on a small case it differs"),
    ],
    ids=["signature", "replacement", "function", "class", "attribute", "check"],
)
def test_unexpected_target_stays_with_a_warning(acme, change, message):
    one = acme("acme.one")
    upstream = one.update
    with pytest.warns(PatchWarning, match=message + ".*Training goes slowly"):
        report = apply_and_warn([dataclasses.replace(RECORD, **change)])
    assert one.update is acme("acme.ops").update is upstream
    assert not report.applied
    assert not report.complete


def test_somebody_elses_function_in_a_holder_stays_with_a_warning(acme):
    ops, one = acme("acme.ops"), acme("acme.one")
    theirs = functools.wraps(ops.update)(lambda x, scale=1: "theirs")
    one.update = theirs
    with pytest.warns(
        PatchWarning, match=r"acme.one.update is .* neither acme's nor deltatune's.*slowly.*let deltatune replace it"
    ):
        report = apply_and_warn([RECORD])
    assert one.update is theirs
    assert ops.update(1) == ("ours", 1)
    assert not report.complete
    patch.revert()
    assert one.update is theirs


def test_somebody_elses_function_in_the_defining_module(acme):
    ops, one = acme("acme.ops"), acme("acme.one")
    upstream = ops.update
    ops.update = theirs = acme("foreign").update
    with pytest.warns(PatchWarning, match="acme.ops.update is"):
        apply_and_warn([RECORD])
    assert one.update(1) == ("ours", 1)
    assert ops.update is theirs
    patch.revert()
    assert one.update is upstream


def test_upstreams_function_gone_everywhere(acme):
    ops = acme("acme.ops")
    ops.update = acme("foreign").update
    with pytest.warns(PatchWarning, match="no loaded module holds acme.s own function"):
        report = apply_and_warn([RECORD])
    assert ops.update(1) == "theirs"
    assert not report.applied


def test_foreign_patch_survives_revert(acme):
    ops, one = acme("acme.ops"), acme("acme.one")
    upstream = ops.update
    patch.apply([RECORD])
    ours = one.update
    one.update = lambda x, scale=1: ("wrapped", ours(x, scale))
    patch.revert()
    assert ops.update is upstream
    assert one.update(2) == ("wrapped", ("ours", 2))
