"""PiSSA: a linear layer's adapter that starts at the principal part of the weight, Meng et al., arXiv 2404.02948.

The base is left as it is, dense or quantised: instead of a residual of the weight, the layer computes
base(x) - scale * x A0 B0 + scale * dropout(x) A B, where A0 and B0 are the initial values of A and B. The file holds
the difference, a LoRA of twice the rank: [A, A0] and [B, -B0], as PEFT's conversion of PiSSA to LoRA has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .linear import LoRALinear, with_update
from .weights import dense_weight

# The rounds of subspace iteration, and the columns beyond the rank that make it accurate; 16 rounds are PEFT's choice.
_ROUNDS = 16
_MORE = 16


class PiSSALinear(LoRALinear):
    """A LoRALinear with factors that start at the largest singular values and vectors of the base's weight.

    `_start` holds A0 and B0 in fp32; the underscore keeps them out of the parameters.
    """

    @classmethod
    def from_base(
        cls,
        base: nn.Module,
        rank: int = 16,
        scale: float = 2.0,
        dropout: float = 0.0,
        after: Sequence[mx.array] = (),
    ) -> PiSSALinear:
        """Return an adapter around `base` with the outputs of `base`; its start is computed `after` arrays."""
        made = cls(base, rank, scale, dropout)
        weight = dense_weight(base)
        made.start_at(*principal_factors(mx.depends([weight], list(after))[0] if after else weight, rank, scale))
        return made

    def start_at(self, a: mx.array, b: mx.array) -> None:
        """Take A [in, r] and B [r, out] as the factors and as their start."""
        self.lora_a = a
        self.lora_b = b
        self._start = [a, b]

    def __call__(self, x: mx.array) -> mx.array:
        return self._with_update(self._without_start, x)

    def _without_start(self, x: mx.array) -> mx.array:
        a, b = self._start
        return with_update(self.linear, x, x, a, b, -self.scale)

    def stored(self) -> dict[str, mx.array]:
        a, b = self._start
        return {
            "lora_a": mx.concatenate([self.lora_a, a], axis=1),
            "lora_b": mx.concatenate([self.lora_b, -b], axis=0),
        }

    def adapted_weight(self) -> mx.array:
        a, b = self.stored().values()
        return dense_weight(self.linear).astype(mx.float32) + (self.scale * b.T) @ a.T


def principal_factors(weight: mx.array, rank: int, scale: float) -> tuple[mx.array, mx.array]:
    """Return A [in, r] and B [r, out] in fp32: scale * A B is the best approximation of a weight [out, in] by rank r.

    Subspace iteration finds them, Halko et al., arXiv 0909.4061, since a whole decomposition of every large matrix of a
    model would take hours. It runs on the CPU, where MLX has the decompositions. The rank is at most the smaller size.
    """
    with mx.stream(mx.cpu):
        weight = weight.astype(mx.float32)
        columns = min(rank + _MORE, *weight.shape)
        basis = mx.linalg.qr(weight @ mx.random.normal((weight.shape[1], columns)))[0]
        for _ in range(_ROUNDS):
            basis = mx.linalg.qr(weight @ mx.linalg.qr(weight.T @ basis)[0])[0]
        inputs, triangle = mx.linalg.qr(weight.T @ basis)
        u, s, vt = mx.linalg.svd(triangle.T)
        roots = mx.sqrt(s[:rank] / scale)
        return (inputs @ vt[:rank].T) * roots, roots[:, None] * (basis @ u[:, :rank]).T


def can_start(adapter: Any) -> bool:
    """Return whether PiSSA has a start for an adapter: a LoRALinear with a rank that its weight can have."""
    return type(adapter) is LoRALinear and adapter.rank <= min(dense_weight(adapter.linear).shape)


def with_pissa(made: dict[str, Any], dropout: float) -> tuple[dict[str, Any], list[str]]:
    """Return the adapters of `made` with a PiSSALinear for each LoRALinear that is large enough, and notes on the rest.

    Starts are computed when they are needed, one after another, since each needs a copy of its weight in fp32.
    """
    chosen = dict(made)
    others = []
    last: list[mx.array] = []
    for path, adapter in made.items():
        if not can_start(adapter):
            others.append(path)
            continue
        chosen[path] = PiSSALinear.from_base(adapter.linear, adapter.rank, adapter.scale, dropout, last)
        last = chosen[path]._start
    if not others:
        return chosen, []
    return chosen, [f"PiSSA starts linear layers alone; {len(others)} adapters start at zero, such as {others[0]}."]


def starts(model: nn.Module) -> dict[str, list[mx.array]]:
    """Return A0 and B0 of every PiSSALinear of the model, by path."""
    return {path: module._start for path, module in model.named_modules() if isinstance(module, PiSSALinear)}


def start_at(model: nn.Module, factors: dict[str, list[mx.array]]) -> None:
    """Give every PiSSALinear of the model the start that starts() returned, and its factors the same values."""
    modules: Any = dict(model.named_modules())
    for path, (a, b) in factors.items():
        modules[path].start_at(a, b)
