"""An operator that kernels compute where they are faster and right, and MLX's operations everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ...machine import backend
from ..kernels.launch import Device, Launch, forced
from ..recomputation import is_small_case
from . import first_use
from .case import Case
from .measure import relative_norm

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

    def serves(
        self,
        *kind: Hashable,
        arrays: Sequence[mx.array] = (),
        device: Device | None = None,
    ) -> bool:
        """Whether the kernels are for this device and right on this machine; arguments are those of first_use.is_right.

        A small case needs no trial, nor does a call within `launch.on`, which chooses the device of the kernels.
        """
        if device is None and (forced() or is_small_case() or not self.is_for_here):
            return forced() or self.is_for_here
        run = device or Launch.run
        return first_use.is_right(self.case_of, *kind, run=run, instead=self.instead, arrays=arrays)
