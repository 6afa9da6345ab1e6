"""Random cases of the expert block, and a reference that runs every expert on every token under autodiff."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from deltatune.ops.experts import Projection, expert_block

NAMES = ("up", "down", "gate")
LEAVES = ("weight", "bias", "lora_a", "lora_b")
SCALE = 1.5


@dataclass
class Case:
    """The sizes of a block and random x, scores, dy and projections, each with a bias and an adapter."""

    tokens: int = 50
    k: int = 2
    experts: int = 8
    outer: int = 32
    inner: int = 24
    rank: int = 4
    seed: int = 0
    dtype: mx.Dtype = mx.float32
    routing: str = "random"
    arrays: dict[str, mx.array] = field(init=False)

    def __post_init__(self) -> None:
        mx.random.seed(self.seed)
        made = {"x": mx.random.normal((self.tokens, self.outer))}
        made["scores"] = mx.softmax(mx.random.normal((self.tokens, self.k)), axis=-1)
        for name in NAMES:
            ins, outs = (self.inner, self.outer) if name == "down" else (self.outer, self.inner)
            made[f"{name}.weight"] = mx.random.normal((self.experts, outs, ins)) * ins**-0.5
            made[f"{name}.bias"] = mx.random.normal((self.experts, outs)) * 0.1
            made[f"{name}.lora_a"] = mx.random.normal((self.experts, self.rank, ins)) * ins**-0.5
            made[f"{name}.lora_b"] = mx.random.normal((self.experts, outs, self.rank)) * 0.3
        self.arrays = {name: a if ".lora" in name else a.astype(self.dtype) for name, a in made.items()}
        self.dy = mx.random.normal((self.tokens, self.outer))
        self.indices = self._routed()
        mx.eval(self.arrays, self.dy, self.indices)

    def _routed(self) -> mx.array:
        shape = (self.tokens, self.k)
        if self.routing == "one expert":
            return mx.full(shape, self.experts // 2, mx.int32)
        if self.routing == "few":
            return mx.random.randint(0, 2, shape)
        if self.routing == "tied":  # argpartition of equal logits.
            return mx.argpartition(mx.zeros((self.tokens, self.experts)), kth=-self.k, axis=-1)[:, -self.k :]
        logits = mx.random.normal((self.tokens, self.experts))
        return mx.argpartition(logits, kth=-self.k, axis=-1)[:, -self.k :]


def block(case: Case, arrays: dict[str, mx.array], trains: tuple[str, ...] = LEAVES) -> mx.array:
    """Run expert_block on the case, with `arrays` in the place of the case's arrays."""
    up, down, gate = (
        Projection(**{leaf: arrays[f"{name}.{leaf}"] for leaf in LEAVES}, scale=SCALE, trains=trains) for name in NAMES
    )
    return expert_block(arrays["x"], case.indices, arrays["scores"], up, down, gate)


def dense(case: Case, arrays: dict[str, mx.array]) -> mx.array:
    """Compute the same in the arrays' own dtype, by running every expert on every token."""

    def linear(name: str, rows: mx.array) -> mx.array:
        weight, bias, a, b = (arrays[f"{name}.{leaf}"] for leaf in LEAVES)
        return rows @ (weight + SCALE * (b @ a)).swapaxes(-1, -2) + bias[:, None]

    x = arrays["x"]
    rows = mx.broadcast_to(x[None], (case.experts, *x.shape))
    gate = linear("gate", rows)
    y = linear("down", gate * mx.sigmoid(gate) * linear("up", rows))
    chosen = (case.indices[..., None] == mx.arange(case.experts)).astype(x.dtype)
    weights = (chosen * arrays["scores"][..., None]).sum(axis=1)
    return (y * weights.T[..., None]).sum(axis=0)


def value_and_gradients(function, case: Case, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the output, as "y", and the gradient of each array by its name, for the case's dy."""

    def loss(arrays: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        y = function(case, arrays)
        return (y * case.dy.astype(y.dtype)).sum(), y

    (_, y), gradients = mx.value_and_grad(loss)(arrays)
    return {"y": y, **gradients}


def expected(case: Case) -> dict[str, np.ndarray]:
    """The output and the gradients of the reference in float64."""
    with mx.stream(mx.cpu):
        wide = {name: array.astype(mx.float64) for name, array in case.arrays.items()}
        return {name: np.array(array) for name, array in value_and_gradients(dense, case, wide).items()}


def errors(found: dict[str, mx.array], expected: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """For each array, the error's norm over the norm, and the largest error over the largest element."""
    wide = {name: np.array(found[name].astype(mx.float32), np.float64) for name in expected}
    return {
        name: (
            float(np.linalg.norm(wide[name] - value) / np.linalg.norm(value)),
            float(np.abs(wide[name] - value).max() / np.abs(value).max()),
        )
        for name, value in expected.items()
    }


def largest_errors(found: dict[str, mx.array], expected: dict[str, np.ndarray]) -> tuple[float, float]:
    """The largest of both errors over all arrays; NaN counts as the largest."""
    norm, element = np.array(list(errors(found, expected).values())).max(axis=0)
    return float(norm), float(element)
