"""An operator with several implementations: their names, the calls that each supports, and their trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import UserError
from ...machine import backend, environment
from .case import Case
from .verdicts import Verdict


def title_of(name: str) -> str:
    """Return the name of an operator in Python, for people."""
    return name.replace("_", " ")


@dataclass(frozen=True)
class Candidate:
    """An implementation that supports a call.

    Attributes:
        function: Serves the call.
        shape: The class of calls with the verdict on this one; None where it has neither a check nor a time.
        checked: The function that the check calls, which runs the same kernels on a small batch.
        trusted: Whether it needs no check, because it is made of MLX's operations.
        atomics: Whether it sums by atomic operations, so that bits which agree in a few runs do so by chance.
    """

    function: Callable[..., Any]
    shape: Any = None
    checked: Callable[..., Any] | None = None
    trusted: bool = False
    atomics: bool = False


class OperatorWorkload(Protocol):
    """A call with the sizes of a released model, and the float64 results that the self-test compares with."""

    @property
    def name(self) -> str: ...

    def call(self) -> Any:
        """Return the call, for the choice of an implementation."""

    def case(self, implementation: str) -> Case[Callable[..., Any]]:
        """Return the case, with the bounds that hold for an implementation."""


@dataclass(frozen=True)
class Operator:
    """An operator that several implementations compute.

    Attributes:
        name: Its name in Python.
        implementations: The names that its environment variable may force.
        orders: By device, the implementations that run there in order of preference; the last supports every call.
        candidates: By implementation, the candidate for a call, or why the implementation does not support the call. A
            call has `words`, which name its class alike on every machine.
        case_of: Returns the case of a class of calls, on which its candidates are tried.
        timed_case_of: Returns the case on which they are timed; `length` asks for another number of tokens.
        examples: Returns calls with the sizes of released models, on which `doctor` tries every implementation.
        compare_last: Compares the last implementation with the definition, on small sizes.
        workloads: Returns the calls that the self-test compares with float64; few and small ones if its argument is
            true.
    """

    name: str
    implementations: tuple[str, ...]
    orders: dict[str, tuple[str, ...]]
    candidates: dict[str, Callable[[Any], Candidate | str]]
    case_of: Callable[[Any], Case[Callable[..., Any]]]
    timed_case_of: Callable[..., Case[Callable[..., Any]]]
    examples: Callable[[], Sequence[Any]]
    compare_last: Callable[[], list[Verdict]]
    workloads: Callable[[bool], Sequence[OperatorWorkload]]

    @property
    def title(self) -> str:
        """The name, for people."""
        return title_of(self.name)

    @property
    def variable(self) -> str:
        """The environment variable that forces an implementation."""
        return environment.variable(self.name)

    @property
    def last(self) -> str:
        """The implementation that supports every call on every device."""
        return self.orders["cpu"][-1]

    @property
    def fast(self) -> list[str]:
        """The other implementations that may serve on some device."""
        names = dict.fromkeys(name for order in self.orders.values() for name in order)
        return [name for name in names if name != self.last]

    @property
    def tries(self) -> bool:
        """Whether there is anything to try: not on a CPU, where only MLX's operations serve."""
        return backend.device() != "cpu"

    def order(self) -> tuple[tuple[str, ...], str]:
        """Return the implementations that this device can run, in order of preference, and the reason.

        If the environment variable forces one, it is the only one; UserError where this device cannot run it.
        """
        problem = backend.too_old()
        forced = self.forced()
        if forced == "fused" and problem:
            raise UserError(f"{self.variable}=fused: {problem}; unset it for the automatic choice.")
        if forced == "fused" and not self.tries:
            raise UserError(
                f"{self.variable}=fused asks for GPU kernels, and MLX's default device is the CPU: unset it for the "
                "automatic choice."
            )
        if forced is not None:
            return (forced,), f"forced by {self.variable}"
        if problem:
            return (self.last,), f"automatic on cuda: {problem}"
        return backend.here(self.orders), f"automatic on {backend.device()}"

    def forced(self) -> str | None:
        """Return the implementation that the environment variable forces, or None for the automatic choice."""
        return environment.implementation(self.name, self.implementations)
