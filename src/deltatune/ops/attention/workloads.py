"""Calls of attention at the sizes of released models, with their results in float64, for the self-test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..trial.case import Case
from ..trial.measure import as_float64, relative_norm
from .call import AttentionCall
from .float64 import NAMES, attention64
from .tolerances import NORMAL, half_norm
from .trial_case import Implementation, differentiated


@dataclass(frozen=True)
class AttentionWorkload:
    """The sizes and options of a call of attention with one row.

    Args:
        name: The workload's name.
        length: Tokens.
        heads: Heads of q, and heads of k and v.
        size: The size of a head of q and k.
        value_size: The size of a head of v; that of q and k by default.
        dtype: The dtype of q, k and v.
        causal: Whether a query sees no later key.
        documents: Whether the row is packed.
        window: How many keys a query sees at most.
        with_sinks: Whether there are sinks.
    """

    name: str
    length: int
    heads: tuple[int, int]
    size: int
    value_size: int | None = None
    dtype: str = "float32"
    causal: bool = True
    documents: bool = False
    window: int | None = None
    with_sinks: bool = False

    def arrays(self) -> dict[str, mx.array]:
        """Draw q, k, v, the cotangent dy and, where there are any, the sinks."""
        draw = np.random.default_rng(0)
        (heads, key_heads), values = self.heads, self.value_size or self.size
        sizes = {"q": (heads, self.size), "k": (key_heads, self.size), "v": (key_heads, values), "dy": (heads, values)}
        arrays = {
            name: mx.array(draw.normal(size=(1, count, self.length, size)).astype(np.float32)).astype(
                getattr(mx, self.dtype)
            )
            for name, (count, size) in sizes.items()
        }
        if self.with_sinks:
            arrays["sinks"] = mx.array(draw.normal(size=heads).astype(np.float32))
        return arrays

    def options(self) -> dict[str, Any]:
        """The other arguments; segments are an array of NumPy."""
        options: dict[str, Any] = {"scale": self.size**-0.5, "causal": self.causal, "window": self.window}
        if self.documents:
            starts = np.random.default_rng(1).uniform(size=(1, self.length)) < 0.02
            options["segments"] = np.cumsum(starts, axis=1).astype(np.int32)
        return options

    @property
    def bound(self) -> float:
        """The largest relative norm of an error (tolerances.py)."""
        return NORMAL if self.dtype == "float32" else half_norm(self.dtype)

    def call(self) -> AttentionCall:
        """The call, for the choice of an implementation."""
        arrays = self.arrays()
        options = self.options()
        segments = None if "segments" not in options else mx.array(options["segments"])
        q, k, v = (arrays[name] for name in "qkv")
        return AttentionCall(q, k, v, self.causal, segments, self.window, arrays.get("sinks"), None, options["scale"])

    def case(self, implementation: str) -> Case[Implementation]:
        """The case, with the bounds that hold for every implementation."""
        return case_of(self)


@lru_cache(maxsize=1)
def truth_of(workload: AttentionWorkload) -> list[np.ndarray]:
    """The exact results, which the workload's implementations share."""
    arrays = {name: as_float64(x) for name, x in workload.arrays().items()}
    q, k, v, dy = (arrays[name] for name in ("q", "k", "v", "dy"))
    return list(attention64(q, k, v, dy, sinks=arrays.get("sinks"), **workload.options()).values())


def case_of(workload: AttentionWorkload) -> Case[Implementation]:
    """The case of a workload."""
    arrays, options = workload.arrays(), workload.options()
    if "segments" in options:
        options["segments"] = mx.array(options["segments"])
    dy = arrays.pop("dy")
    return Case(
        name=workload.name,
        results=NAMES[: 1 + len(arrays)],
        call=lambda function: differentiated(function, list(arrays.values()), dy, options),
        truth=lambda: truth_of(workload),
        bound=workload.bound,
        error=relative_norm,
    )


def workloads(quick: bool) -> list[AttentionWorkload]:
    """The workloads, with the heads of released models; `quick` makes them few and small."""
    length, part = (70, 4) if quick else (300, 1)
    bf16: dict[str, Any] = {"dtype": "bfloat16"}
    return [
        AttentionWorkload("grouped heads, bf16", length, (8, 2), 256 // part, **bf16),
        AttentionWorkload("packed, fp32", length, (8, 2), 256 // part, documents=True),
        AttentionWorkload("latent, bf16", length, (4, 4), 192 // part, 128 // part, **bf16, documents=True),
        AttentionWorkload("windows and sinks, fp32", length, (8, 8), 64, window=50, with_sinks=True),
        AttentionWorkload("an image, bf16", length, (4, 4), 72, **bf16, causal=False, documents=True),
    ]
