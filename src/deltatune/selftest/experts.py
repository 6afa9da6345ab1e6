"""Compares the expert block with float64 products, expert by expert, at the sizes of released models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..machine import backend
from ..ops.experts import Projection, expert_block, grouped, trial_case
from ..ops.experts.trial_case import EXACT, NARROW_NORM
from ..ops.operator.case import Case
from ..ops.operator.measure import ROUNDING, relative_norm
from .outcome import FAILED, PASSED, Check, Outcome, not_run, tried

PROJECTIONS, FACTORS = ("up", "down", "gate"), ("lora_a", "lora_b")
_SCALE, _GROUP, _BITS = 1.5, 64, 4
_Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Mixture:
    """The sizes of an expert block with LoRA on every projection; `quantised` matrices have 4 bits."""

    name: str
    tokens: int
    top_k: int
    experts: int
    outer: int
    inner: int
    rank: int = 8
    dtype: str = "float32"
    quantised: bool = False

    def drawn(self) -> tuple[_Arrays, mx.array, mx.array]:
        """Draw x, scores and parameters by name, the experts of each token, and the cotangent of y."""
        draw = np.random.default_rng(0)
        kind = getattr(mx, self.dtype)

        def normal(*shape: int, deviation: float = 1.0) -> mx.array:
            return mx.array((draw.standard_normal(shape, np.float32)) * np.float32(deviation))

        arrays = {"x": normal(self.tokens, self.outer).astype(kind)}
        arrays["scores"] = mx.softmax(normal(self.tokens, self.top_k), axis=-1).astype(kind)
        for name in PROJECTIONS:
            ins, outs = (self.inner, self.outer) if name == "down" else (self.outer, self.inner)
            arrays[f"{name}.weight"] = normal(self.experts, outs, ins, deviation=ins**-0.5).astype(kind)
            arrays[f"{name}.lora_a"] = normal(self.experts, self.rank, ins, deviation=ins**-0.5)
            arrays[f"{name}.lora_b"] = normal(self.experts, outs, self.rank, deviation=0.3)
        chosen = np.argsort(draw.random((self.tokens, self.experts)), axis=1)[:, : self.top_k]
        return arrays, mx.array(chosen.astype(np.int32)), normal(self.tokens, self.outer).astype(kind)


def case_of(mixture: Mixture) -> Case[Callable[..., mx.array]]:
    """The case of a block with these sizes: y and every gradient of expert_block."""
    arrays, indices, dy = mixture.drawn()
    stored = {name: _stored(arrays[f"{name}.weight"], mixture.quantised) for name in PROJECTIONS}
    trained = {name: array for name, array in arrays.items() if not name.endswith("weight")}
    names = list(trained)

    def call(block: Callable[..., mx.array]) -> list[mx.array]:
        def of_trained(*trained: mx.array) -> mx.array:
            named = dict(zip(names, trained, strict=True))
            factors: list[dict[str, Any]] = [
                {leaf: named[f"{name}.{leaf}"] for leaf in FACTORS} for name in PROJECTIONS
            ]
            options = [stored[name][0] | {"scale": _SCALE, "trains": FACTORS} for name in PROJECTIONS]
            projections = (Projection(**of_one, **pair) for of_one, pair in zip(options, factors, strict=True))
            return block(named["x"], indices, named["scores"], *projections)

        outputs, gradients = mx.vjp(of_trained, list(trained.values()), [dy])
        return [*outputs, *gradients]

    def truth() -> list[np.ndarray]:
        exact = _truth(trained | {f"{name}.weight": stored[name][1] for name in PROJECTIONS}, indices, dy, names)
        return list(exact.values())

    return Case(mixture.name, ("y", *names), call, truth, _bound(mixture), error=relative_norm)


def compare(mixture: Mixture) -> Outcome:
    """Compare y and every gradient of the block with float64, and measure its peak memory."""
    case = case_of(mixture)
    outcome = tried(case, expert_block)
    held_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    case.computed(expert_block)
    return replace(outcome, facts={"peak_bytes": mx.get_peak_memory() - held_bytes})


def _bound(mixture: Mixture) -> float:
    """The largest relative error allowed: a sum of K products in fp32 is off by about sqrt(K) roundings.

    K is the larger side of the matrices.
    """
    if mixture.dtype != "float32" and not backend.computes_in_fp32():
        return NARROW_NORM
    sums = max(mixture.outer, mixture.inner) ** 0.5 * 2.0**-24
    return EXACT + sums + ROUNDING[mixture.dtype]


def _stored(weight: mx.array, quantised: bool) -> tuple[dict[str, Any], mx.array]:
    """The arguments with which a projection gets its matrices, and the values that these stand for."""
    if not quantised:
        return {"weight": weight}, weight
    small, scales, biases = mx.quantize(weight, _GROUP, _BITS)
    with mx.stream(mx.cpu):
        values = mx.dequantize(small, scales.astype(mx.float32), biases.astype(mx.float32), _GROUP, _BITS)
        mx.eval(values)
    return {"weight": small, "scales": scales, "biases": biases, "group_size": _GROUP, "bits": _BITS}, values


def _truth(arrays: _Arrays, indices: mx.array, dy: mx.array, names: list[str]) -> dict[str, np.ndarray]:
    """y and the gradients for `names` in float64 on the CPU, by autodiff of each expert on its own tokens."""
    chosen = np.array(indices)
    with mx.stream(mx.cpu):
        exact = {name: array.astype(mx.float64) for name, array in arrays.items()}
        fixed = {name: array for name, array in exact.items() if name not in names}

        def block(*trained: mx.array) -> mx.array:
            named = fixed | dict(zip(names, trained, strict=True))
            y = mx.zeros(named["x"].shape, mx.float64)
            for expert in range(named["up.weight"].shape[0]):
                tokens, slots = (mx.array(places.astype(np.int32)) for places in np.nonzero(chosen == expert))
                if tokens.size:
                    part = _expert(named, expert, named["x"][tokens])
                    y = y.at[tokens].add(named["scores"][tokens, slots][:, None] * part)
            return y

        outputs, gradients = mx.vjp(block, [exact[name] for name in names], [dy.astype(mx.float64)])
        mx.eval(outputs, gradients)
        return {name: np.array(x) for name, x in zip(("y", *names), [*outputs, *gradients], strict=True)}


def _expert(arrays: _Arrays, expert: int, rows: mx.array) -> mx.array:
    def linear(name: str, rows: mx.array) -> mx.array:
        weight, a, b = (arrays[f"{name}.{leaf}"][expert] for leaf in ("weight", *FACTORS))
        return rows @ weight.T + _SCALE * (rows @ a.T) @ b.T

    gate = linear("gate", rows)
    return linear("down", gate * mx.sigmoid(gate) * linear("up", rows))


def grouped_kernels() -> Outcome:
    """Try the kernels for rows sorted by expert on the shapes that LoRA has."""
    if not grouped.supports(mx.bfloat16, 8):
        return not_run("they are for NVIDIA GPUs, Hopper or newer; MLX's own products serve here")
    refused = []
    for inputs, outputs in ((2048, 512), (2048, 8), (8, 512)):
        rows, weight = mx.zeros((64, inputs), mx.bfloat16), mx.zeros((4, outputs, inputs), mx.bfloat16)
        if None in [trial_case.product_tile(rows, weight, True, added) for added in (False, True)]:
            refused.append(f"product of {inputs} by {outputs}")
    for left, right in ((8, 2048), (512, 8)):
        one, other = mx.zeros((64, left), mx.bfloat16), mx.zeros((64, right), mx.bfloat16)
        if not all(trial_case.gradient_serves(one, other, added) for added in (False, True)):
            refused.append(f"gradient of {left} by {right}")
    if refused:
        return Outcome(FAILED, f"their trial against float64 refuses: {', '.join(refused)}")
    return Outcome(PASSED, "their trial against float64 passes for five shapes")


def checks(quick: bool) -> Iterator[Check]:
    """The block in fp32, in bf16 and with quantised matrices, then the kernels that some GPUs use."""
    sizes = (40, 2, 4, 128, 64) if quick else (512, 2, 8, 2048, 512)
    for name, dtype, small in (("fp32", "float32", False), ("bf16", "bfloat16", False), ("4 bits", "float32", True)):
        yield Check(f"experts: {name}", partial(compare, Mixture(name, *sizes, dtype=dtype, quantised=small)))
    yield Check("experts: kernels for sorted rows", grouped_kernels)
