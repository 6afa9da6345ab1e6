"""The cases of the tests of attention, how an implementation runs one, and its errors against float64."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from deltatune.ops.attention.trial_case import attention64
from poison import poison


@dataclass(frozen=True)
class Case:
    """The sizes and options of a call with random arrays."""

    name: str
    batch: int = 1
    heads: tuple[int, int] = (2, 2)
    queries: int = 70
    keys: int | None = None
    size: int = 16
    value_size: int | None = None
    causal: bool = True
    window: int | None = None
    segments: str | None = None
    with_sinks: bool = False
    mask: str | None = None
    logits: float = 1.0

    def arrays(self) -> dict[str, np.ndarray]:
        """Return q, k, v, dy and, for a case with sinks, the sinks, in fp32."""
        draw = np.random.default_rng(sum(map(ord, self.name)))
        (heads, key_heads), keys = self.heads, self.keys or self.queries
        values = self.value_size or self.size
        shapes = {
            "q": (heads, self.queries, self.size),
            "k": (key_heads, keys, self.size),
            "v": (key_heads, keys, values),
            "dy": (heads, self.queries, values),
        }
        found = {name: draw.normal(size=(self.batch, *shape)) for name, shape in shapes.items()}
        found["q"] *= self.logits
        if self.with_sinks:
            found["sinks"] = draw.normal(size=heads)
        return {name: x.astype(np.float32) for name, x in found.items()}

    def options(self) -> dict:
        """Return the other arguments; arrays among them are NumPy's."""
        draw = np.random.default_rng(len(self.name))
        keys = self.keys or self.queries
        found: dict = {"scale": self.size**-0.5, "causal": self.causal, "window": self.window}
        if self.segments is not None:
            changes = draw.uniform(size=(self.batch, keys)) < 0.1
            if self.segments == "single tokens":
                changes[:, keys // 2 : keys // 2 + 4] = True
            found["segments"] = np.cumsum(changes, axis=1).astype(np.int32)
        if self.mask is not None:
            seen = draw.uniform(size=(self.batch, 1, self.queries, keys)) < 0.5
            seen[:, :, self.queries // 2] = False
            wide = np.where(seen, draw.normal(size=seen.shape), -np.inf).astype(np.float32)
            found["mask"] = seen if self.mask == "bool" else wide
        return found

    @property
    def largest_score(self) -> float:
        arrays = self.arrays()
        each = self.heads[0] // self.heads[1]
        scores = arrays["q"] @ np.repeat(arrays["k"], each, axis=1).swapaxes(-1, -2)
        return float(np.abs(scores).max() * self.size**-0.5)


CASES = [
    Case("plain"),
    Case("one token", queries=1, batch=2),
    Case("63 tokens", queries=63),
    Case("64 tokens", queries=64),
    Case("65 tokens", queries=65, batch=2),
    Case("500 tokens", queries=500, heads=(1, 1), size=8),
    Case("not causal", causal=False),
    Case("large logits", logits=60.0),
    Case("grouped heads", heads=(6, 2), batch=2),
    Case("other values", size=24, value_size=16),
    Case("fewer queries", queries=33, keys=90),
    Case("more queries: rows that see nothing", queries=90, keys=33),
    Case("a window", window=7),
    Case("a window of one", window=1),
    Case("a window, fewer queries", window=20, queries=33, keys=90),
    Case("segments", segments="long", batch=2),
    Case("segments of one token", segments="single tokens", batch=2),
    Case("segments, fewer queries", segments="long", batch=2, queries=33, keys=90),
    Case("segments and a window", segments="long", window=5),
    Case("sinks", with_sinks=True, heads=(4, 2)),
    Case("sinks, and rows that see nothing", with_sinks=True, queries=60, keys=31),
    Case("a mask, with a hidden row", mask="bool"),
    Case("an added mask, with a hidden row", mask="floats", causal=False, batch=2),
    Case("all of it", mask="bool", with_sinks=True, window=30, segments="long", heads=(4, 2), value_size=40),
]


def differentiate(implementation: Callable, case: Case, dtype: mx.Dtype = mx.float32, **more) -> tuple[dict, dict]:
    """Return y and the gradients by name, of an implementation and in float64; `more` are arguments of its own."""
    given = {name: mx.array(x) for name, x in case.arrays().items()}
    given = {name: x if name == "sinks" else x.astype(dtype) for name, x in given.items()}
    options = case.options()
    constants = {name: mx.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    inputs = [name for name in given if name != "dy"]

    def call(*arrays: mx.array) -> list[mx.array]:
        named = dict(zip(inputs, arrays, strict=True))
        return [implementation(named.pop("q"), named.pop("k"), named.pop("v"), **named, **constants, **more)]

    poison()
    outputs, gradients = mx.vjp(call, [given[name] for name in inputs], [given["dy"]])
    mx.eval(outputs, gradients)
    exact = {name: np.array(x.astype(mx.float32), np.float64) for name, x in given.items()}
    truth = attention64(**{"sinks": None} | exact, **options)
    return dict(zip(truth, [*outputs, *gradients], strict=True)), truth


def norms(results: dict, truth: dict) -> dict[str, float]:
    """Return by name the norm of the error relative to that of the truth; NaN counts as infinite.

    Where the truth cancels to 0, the norm is relative to the largest one of all names.
    """
    found, largest = {}, max(np.linalg.norm(exact) for exact in truth.values())
    for name, exact in truth.items():
        result = np.array(results[name].astype(mx.float32), np.float64)
        assert result.shape == exact.shape, name
        error, size = np.linalg.norm(result - exact), np.linalg.norm(exact)
        found[name] = float(error / (size if size > 1e-6 * largest else largest))
        found[name] = np.inf if np.isnan(error) else found[name]
    return found
