"""Probes for known faults of MLX and BLAS, which run a small case here instead of comparing versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ..errors import first_line
from ..machine import backend, blas_fault, environment
from ..ops.experts.tiles import needs_whole_matrices
from ..ops.operator.measure import relative_error
from ..patches.tables.one_row_products import in_force

ABSENT, AVOIDED, PRESENT, NOT_RUN = "absent", "avoided", "present", "not run"

ONE_ROW = "NaN in products of one row (BLAS)"
FORWARD = "sorted gather from [T, 1, K]"
VIEWS = "sorted gather from halves of matrices"
# Errors of fp32 products, relative to the largest element; the second where the user allows products in TF32.
_BOUND, _TF32_BOUND = 1e-5, 2.0**-8
_EXPERTS, _INNER, _OUT = 4, 64, 128


@dataclass(frozen=True)
class Fault:
    """A known fault, and whether this machine has it, with the finding in words.

    Its status is `absent`; `avoided`, where deltatune computes another way; `present`, where training would be wrong;
    or `not run`. The error is relative to the largest element, and infinite where a result was not finite.
    """

    name: str
    status: str
    detail: str
    error: float | None = None

    @property
    def wrong(self) -> bool:
        return self.status == PRESENT


def find_one_row() -> Fault:
    """Look for a BLAS with products of one row that keep a NaN from their output's memory (mlx issue 3200).

    The CPU's BLAS is probed, whatever device MLX computes on; the fault is avoided where its patch is in force.
    """
    probed = blas_fault.probe()
    if probed.library is None:
        return Fault(ONE_ROW, NOT_RUN, str(probed))
    if not probed.wrong:
        return Fault(ONE_ROW, ABSENT, str(probed))
    if not probed.two_rows_work:
        return Fault(ONE_ROW, PRESENT, f"{probed}; computing one row as two does not help")
    if not backend.uses_blas():
        return Fault(ONE_ROW, AVOIDED, f"{probed}; MLX computes on the GPU here")
    if not in_force():
        return Fault(ONE_ROW, PRESENT, f"{probed}; MLX's functions could not be replaced, see the patches")
    return Fault(ONE_ROW, AVOIDED, f"{probed}; deltatune computes them as two rows")


def find_forward() -> Fault:
    """Probe rows with an axis from expand_dims, which broadcasts make as well.

    CUDA reads wrong rows, as Metal did before mlx 0.32.1 (mlx pull request 3960).
    """
    x = mx.random.normal((8, _INNER), key=mx.random.key(0))
    weights = mx.random.normal((_EXPERTS, _INNER, _OUT), key=mx.random.key(1))
    indices = mx.array([0, 0, 1, 1, 1, 3, 3, 3], mx.uint32)
    computed = mx.gather_mm(mx.expand_dims(x, -2), weights, rhs_indices=indices, sorted_indices=True)[:, 0]
    # On an NVIDIA GPU, MLX would build a kernel for these indices.
    with mx.stream(mx.cpu):
        expected = (x[:, :, None] * weights[indices]).sum(axis=1)
    around = "deltatune lays rows out anew, its own and, by a patch, those of mlx-lm's layers"
    return _fault_by_error(
        FORWARD, relative_error(computed, expected), "mx.gather_mm reads wrong rows", around, not backend.uses_blas()
    )


def find_views() -> Fault:
    """Probe matrices with gaps between them, as where mlx-lm cuts gate and up from one array (CUDA, mlx 0.32.4)."""
    x = mx.random.normal((8, 1, _INNER), key=mx.random.key(0))
    larger = mx.random.normal((_EXPERTS, 2 * _OUT, _INNER), key=mx.random.key(1))
    mx.eval(x, larger)
    indices = mx.array([0, 0, 1, 1, 1, 3, 3, 3], mx.uint32)
    half = larger[:, _OUT:]
    computed, expected = (
        mx.gather_mm(x, matrices.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=True)
        for matrices in (half, mx.contiguous(half))
    )
    what = "mx.gather_mm multiplies with other experts' matrices"
    around = "deltatune lays them out anew, when it loads and when it trains"
    return _fault_by_error(VIEWS, relative_error(computed, expected), what, around, needs_whole_matrices())


def _is_small(error: float) -> bool:
    return error <= (_TF32_BOUND if environment.tf32() else _BOUND)


def _fault_by_error(name: str, error: float, what: str, around: str, avoided: bool) -> Fault:
    """Return the fault that an error shows; `around` says how deltatune avoids it, where it does."""
    if _is_small(error):
        return Fault(name, ABSENT, "each row is multiplied with its own expert", error)
    if avoided:
        return Fault(name, AVOIDED, f"{what}; {around}", error)
    return Fault(name, PRESENT, f"{what}, and expert layers go wrong: update mlx", error)


# In the order in which a training run would meet them.
PROBES: tuple[tuple[str, Callable[[], Fault]], ...] = (
    (ONE_ROW, find_one_row),
    (FORWARD, find_forward),
    (VIEWS, find_views),
)


def faults() -> list[Fault]:
    """Run every probe. A fault counts as present where MLX cannot run the probe at all; it then has MLX's words."""
    results = []
    for name, find in PROBES:
        try:
            results.append(find())
        except RuntimeError as error:
            results.append(Fault(name, PRESENT, f"MLX cannot compute it here: {first_line(error)[:200]}"))
    return results
