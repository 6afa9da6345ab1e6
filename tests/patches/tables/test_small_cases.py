"""The small cases of cheap operators run deltatune's code, not upstream's behind it, and find its errors."""

import importlib
from contextlib import contextmanager

import pytest

from deltatune import patches
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.patches import small_cases
from deltatune.patches.evidence import defined_function, expected_signature, signature_text
from deltatune.patches.tables import delta_layers, pointwise

pytestmark = pytest.mark.any_blas

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
