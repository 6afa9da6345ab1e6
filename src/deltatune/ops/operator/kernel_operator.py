"""An operator that kernels compute where they are faster and right, and MLX's operations everywhere else.

Kernels are tried before their first use in a process: a warning says which one is wrong here and is not used. A kernel
that Metal's compiler refuses is not given to it by later processes either, until a version changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ...machine import backend
from ..kernels.launch import Device, Launch, forced
from ..recomputation import is_small_case
from . import foresight, verdicts
from .case import Case, judged
from .measure import relative_norm
from .verdicts import Verdict

logger = logging.getLogger(__name__)
# Bounds of the self-test on relative norms. A rounding to bf16 costs 1.7e-3. Gradients of parameters pass up to nine
# such roundings in MLX's operations, and independent roundings add up to the square root of their number.
NORM_BOUNDS = {mx.float32: 1e-6, mx.bfloat16: 3 * 1.7e-3}


class KernelWorkload(NamedTuple):
    """A call with the sizes of a model for the self-test; `trial` draws its arrays."""

    name: str
    dtype: mx.Dtype
    trial: Callable[[], Case[Any]]

    def case(self) -> Case[Any]:
        """Return the case, with norms over norms as its errors."""
        case = self.trial()
        return replace(case, bound=min(case.bound, NORM_BOUNDS[self.dtype]), error=relative_norm)


def in_each_dtype(name: str, trial: Callable[..., Case[Any]], *sizes: Any) -> list[KernelWorkload]:
    """Return a workload for each dtype of NORM_BOUNDS, with the case trial(dtype, *sizes)."""
    return [KernelWorkload(name, dtype, partial(trial, dtype, *sizes)) for dtype in NORM_BOUNDS]


@dataclass(frozen=True)
class KernelOperator:
    """An operator that kernels and MLX's operations compute.

    Attributes:
        name: Its name, for people.
        case_of: Returns the case of a kind of calls, on which the kernels are tried before their first use.
        devices: Where the kernels are faster than MLX's operations.
        instead: The fallback of kernels that are wrong, for the warning.
        workloads: Returns the workloads of the self-test; small ones if its argument is true.
    """

    name: str
    case_of: Callable[..., Case[Any]]
    devices: tuple[str, ...] = ("cuda",)
    instead: str = "MLX's operations"
    workloads: Callable[[bool], Iterable[KernelWorkload]] = lambda quick: ()

    @property
    def is_for_here(self) -> bool:
        """Whether the kernels are for MLX's device."""
        return backend.device() in self.devices

    def serves(self, *kind: Hashable, arrays: Sequence[mx.array] = (), device: Device | None = None) -> bool:
        """Whether the kernels are for this device and right on this machine; arguments are those of is_right.

        A small case needs no trial, nor does a call within `launch.on`, which chooses the device of the kernels.
        """
        if device is None and (forced() or is_small_case() or not self.is_for_here):
            return forced() or self.is_for_here
        run = device or Launch.run
        return is_right(self.case_of, *kind, run=run, instead=self.instead, arrays=arrays)


@dataclass(frozen=True)
class _Kind:
    """The parameters of a kernel's text, as text."""

    kind: str


# By the function that makes the case, its arguments, and the function that runs the kernel: whether it was right.
_right: dict[Hashable, bool] = {}


def is_right(
    case_of: Callable[..., Case[Any]],
    *kind: Hashable,
    run: Callable[..., list[mx.array]],
    instead: str = "MLX's operations",
    arrays: Sequence[mx.array] = (),
) -> bool:
    """Whether a kernel is right on this machine, which is tried once in a process for each kind of call.

    `kind` has the parameters of the kernel's text; the case is made from these and `arrays`, of which only the number
    makes a difference. `run` runs the kernel's launch; `instead` is the fallback of a wrong kernel, for the warning.
    """
    key: tuple[Any, ...] = (case_of, kind, len(arrays), run)
    if key not in _right and foresight.looks_ahead():
        foresight.build(key, lambda: case_of(*kind, *arrays).call(run))
        return True
    if key not in _right:
        name, shape = case_of.__module__.rpartition(".")[2], _Kind(repr((case_of.__qualname__, kind, len(arrays))))
        verdict = verdicts.remembered(name, shape)
        if verdict is None:
            verdict = verdicts.of_refused(judged(case_of(*kind, *arrays), run, "kernel"), name, shape)
        _right[key] = _said(verdict, instead)
    return _right[key]


def _said(verdict: Verdict, instead: str) -> bool:
    """Whether a verdict says that a kernel is right; if not, a warning says why."""
    if verdict.passed:
        return True
    if verdict.problem is not None:
        reason = verdict.problem.splitlines()[0][:400]
        logger.warning("%s does not run on this machine, so %s serve instead: %s", verdict.shape, instead, reason)
        return False
    worst = verdict.worst
    message = "%s is off by %.1e of the largest element on this machine (%.1e allowed), so %s serve instead."
    logger.warning(message, verdict.shape, verdict.errors[worst], verdict.bound_of(worst), instead)
    return False


def forget() -> None:
    """Forget the verdicts of this process."""
    _right.clear()
