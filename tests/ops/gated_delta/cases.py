"""The hard cases of the gated delta rule, and the error that each may show against float64 (tolerances.py)."""

from dataclasses import dataclass

import numpy as np

from deltatune.ops.gated_delta.tolerances import EASY, OVERSHOOTING, REPEATED_KEY
from deltatune.ops.operator.measure import ROUNDING

__all__ = ["CASES", "EASY", "OVERSHOOTING", "REPEATED_KEY", "ROUNDING", "Case"]


@dataclass(frozen=True)
class Case:
    """The sizes of one test, its kinds of keys, gates, betas, mask and segments, and the bound on its errors."""

    name: str
    batch: int = 2
    length: int = 70
    key_heads: int = 1
    repeats: int = 2
    key_size: int = 16
    value_size: int = 24
    keys: str = "random"
    gates: str = "random"
    beta: float | None = None
    mask: str | None = None
    segments: bool = False
    bound: float = EASY

    def inputs(self, per_channel: bool, seed: int, erases: bool = True) -> dict[str, np.ndarray | None]:
        """Return fp32 arguments by name, without beta if nothing is erased; a missing mask, or segments, are None."""
        draw = np.random.default_rng(seed)
        batch, length, heads = self.batch, self.length, self.key_heads * self.repeats
        q = draw.normal(size=(batch, length, self.key_heads, self.key_size)) * self.key_size**-0.5
        log_g = self._log_gates(draw, (batch, length, heads) + ((self.key_size,) if per_channel else ()))
        beta = draw.uniform(0.05, 0.95, size=(batch, length, heads))
        if self.beta is not None:
            beta[:] = self.beta
        mask = None
        if self.mask is not None:
            mask = np.ones((batch, length), bool)
            mask[:, length // 3 : length // 3 + 20] = self.mask != "middle"
            mask[-1, : length // 4] = self.mask != "left"
        segments = np.cumsum(draw.uniform(size=(batch, length)) < 0.08, axis=1) if self.segments else None
        if self.mask and segments is not None:
            segments[:, length // 3 + 5 :] += 1  # a document that starts on a masked step
        floats = {
            "q": q,
            "k": self._keys(draw),
            "v": draw.normal(size=(batch, length, heads, self.value_size)),
            "log_g": log_g,
            "beta": beta,
            "initial_state": draw.normal(size=(batch, heads, self.value_size, self.key_size)) * 0.3,
        }
        arrays = {name: array.astype(np.float32) for name, array in floats.items() if erases or name != "beta"}
        return arrays | {"mask": mask, "segments": None if segments is None else segments.astype(np.int32)}

    def _keys(self, draw: np.random.Generator) -> np.ndarray:
        shape = (self.batch, self.length, self.key_heads, self.key_size)
        keys = draw.normal(size=shape)
        if self.keys != "random":
            keys = keys * (0.0 if self.keys == "one" else 0.02) + draw.normal(size=(self.batch, 1, *shape[2:]))
        return keys / np.linalg.norm(keys, axis=-1, keepdims=True)

    def _log_gates(self, draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        usual = -np.exp(draw.normal(size=shape) * 1.5 - 2.0)
        kind = draw.uniform(size=shape)
        tiny, closed = np.log(1e-12), -np.inf
        return {
            "random": usual,
            "open": np.zeros(shape),
            "tiny": np.full(shape, tiny),
            "closed": np.full(shape, closed),
            "few tiny": np.where(kind < 0.1, tiny, usual),
            "few closed": np.where(kind < 0.1, closed, usual),
            "mixed": np.select([kind < 0.1, kind < 0.2, kind < 0.5], [closed, tiny, 0.0], usual),
        }[self.gates]


CASES = [
    Case("one token", batch=1, length=1),
    Case("64 tokens, batch 3", batch=3, length=64, repeats=3, value_size=8),
    Case("65 tokens, odd sizes", length=65, key_heads=3, key_size=7, value_size=5),
    Case("65 tokens, chunks of 64", length=65, key_size=72, value_size=40),
    Case("500 tokens", batch=1, length=500),
    Case("500 tokens, chunks of 64", batch=1, length=500, key_heads=2, repeats=1, key_size=128, value_size=64),
    Case("left padding", mask="left", batch=3, length=65, key_size=72),
    Case("documents", segments=True, length=130),
    Case("documents, masked middle", mask="middle", segments=True, batch=3, length=130, repeats=3),
    Case("open gates", gates="open", length=130),
    Case("tiny gates", gates="tiny"),
    Case("closed gates", gates="closed"),
    Case("few closed gates", gates="few closed", length=130),
    Case("mixed gates, documents", gates="mixed", segments=True, length=130, key_size=72),
    Case("no writing", beta=0.0),
    Case("one key, beta 1, open gates", keys="one", gates="open", beta=1.0, length=200, bound=REPEATED_KEY),
    Case("one key, chunks of 64", keys="one", beta=1.0, gates="open", length=200, key_size=72, bound=REPEATED_KEY),
    Case("near keys, beta 1.9", keys="near", gates="open", beta=1.9, length=200, bound=OVERSHOOTING),
    Case("near keys, beta 1.9, chunks of 64", keys="near", gates="open", beta=1.9, key_size=72, bound=OVERSHOOTING),
    Case("beta 2, open gates", gates="open", beta=2.0, length=130, bound=OVERSHOOTING),
]
