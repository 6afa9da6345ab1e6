"""Attention and its gradients in float64 by NumPy, written down from the definition; and the cases of the tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NAMES = ("y", "dq", "dk", "dv", "dsinks")


def attention64(
    q, k, v, dy, *, scale, causal=True, segments=None, window=None, sinks=None, mask=None
) -> dict[str, np.ndarray]:
    """y and the gradients, by NAMES; those of the sinks where there are any."""
    q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    batch, heads, queries, _ = q.shape
    keys, each = k.shape[2], heads // k.shape[1]
    wide_k, wide_v = (np.repeat(x, each, axis=1) for x in (k, v))
    scores = scale * (q @ wide_k.swapaxes(-1, -2))
    visible = np.ones(scores.shape, bool)
    for i in range(queries):
        for j in range(keys):
            place = i + keys - queries
            if causal and j > place:
                visible[:, :, i, j] = False
            if window is not None and j <= place - window:
                visible[:, :, i, j] = False
            if segments is not None:
                visible[:, :, i, j] &= (segments[:, i] == segments[:, j])[:, None]
    if mask is not None:
        mask = np.broadcast_to(mask, scores.shape)
        visible &= mask if mask.dtype == bool else mask > -1e30
        if mask.dtype != bool:
            scores = scores + np.where(visible, mask, 0.0)
    scores = np.where(visible, scores, -np.inf)
    most = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64).reshape(1, -1, 1, 1)
        most = np.maximum(most, sinks)
    most = np.where(np.isfinite(most), most, 0.0)
    weights = np.exp(scores - most)
    of_sink = 0.0 if sinks is None else np.exp(sinks - most)
    total = weights.sum(axis=-1, keepdims=True) + of_sink
    total = np.where(total == 0, 1.0, total)
    weights, of_sink = weights / total, of_sink / total
    y = weights @ wide_v
    dweights = dy @ wide_v.swapaxes(-1, -2)
    delta = (dy * y).sum(axis=-1, keepdims=True)
    dscores = weights * (dweights - delta)
    found = {"y": y, "dq": scale * dscores @ wide_k}
    of_heads = (batch, k.shape[1], each, keys, -1)
    found["dk"] = (scale * dscores.swapaxes(-1, -2) @ q).reshape(of_heads).sum(axis=2)
    found["dv"] = (weights.swapaxes(-1, -2) @ dy).reshape(of_heads).sum(axis=2)
    if sinks is not None:
        found["dsinks"] = -(of_sink * delta).sum(axis=(0, 2, 3))
    return found


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call; its arrays are drawn anew."""

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
    sunk: bool = False
    mask: str | None = None
    logits: float = 1.0

    def arrays(self) -> dict[str, np.ndarray]:
        """q, k, v, dy and, where there are any, the sinks: fp32."""
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
        if self.sunk:
            found["sinks"] = draw.normal(size=heads)
        return {name: x.astype(np.float32) for name, x in found.items()}

    def options(self) -> dict:
        """Everything else, arrays of NumPy among it."""
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
    Case("segments and a window", segments="long", window=5),
    Case("sinks", sunk=True, heads=(4, 2)),
    Case("sinks, and rows that see nothing", sunk=True, queries=60, keys=31),
    Case("a mask, with a hidden row", mask="bool"),
    Case("an added mask, with a hidden row", mask="floats", causal=False, batch=2),
    Case("all of it", mask="bool", sunk=True, window=30, segments="long", heads=(4, 2), value_size=40),
]
