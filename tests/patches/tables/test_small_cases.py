"""The small cases of cheap operators run deltatune's code, not upstream's behind it, and find what it does wrong."""

from __future__ import annotations

import importlib
from contextlib import contextmanager

import pytest

from deltatune.ops import recomputation
from deltatune.patches import small_cases
from deltatune.patches.evidence import signature_text
from deltatune.patches.holders import defined_function
from deltatune.patches.tables import delta_layers, kept_inputs, pointwise, residual_norms

pytestmark = pytest.mark.any_blas

# nn.silu without a convolution before it is MLX's own.
RECORDS = [
    (f"{table.__name__.rpartition('.')[2]}: {record.target} {record.tried}", record)
    for table in (kept_inputs, pointwise, residual_norms, delta_layers)
    for record in table.PATCHES
    if record.check is not pointwise.IS_SILU
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


@pytest.mark.parametrize("record", [record for _, record in RECORDS], ids=[name for name, _ in RECORDS])
def test_ours_runs_in_the_case_of(record, served):
    try:
        importlib.import_module(record.module)
    except ImportError:
        pytest.skip(f"{record.module} is not installed")
    upstream = defined_function(record)
    if upstream is None or (record.signature and signature_text(upstream) != record.signature):
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
