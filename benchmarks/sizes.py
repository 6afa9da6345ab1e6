"""Lists the sizes of calls that are measured, and draws arguments of these sizes."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

FLOATS = ("q", "k", "v", "log_g", "beta")
# At most this many rows and tokens are drawn; larger arguments repeat them.
DRAWN_ROWS, DRAWN_TOKENS = 2, 2048


@dataclass(frozen=True)
class Size:
    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    head_size: int = 128
    dtype: str = "bfloat16"
    per_channel: bool = False

    def __str__(self) -> str:
        heads = f"H{self.key_heads}/{self.value_heads}"
        text = f"B{self.batch} T{self.tokens} {heads} D{self.head_size} {self.dtype}"
        return text + (", gates per channel" if self.per_channel else "")

    @property
    def work(self) -> int:
        """The number to which time and memory are proportional."""
        return self.batch * self.tokens * self.value_heads * self.head_size

    def of_length(self, tokens: int) -> Size:
        return replace(self, tokens=min(tokens, self.tokens))

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"name": str(self)}

    @staticmethod
    def of_record(record: dict[str, Any]) -> Size:
        return Size(**{key: value for key, value in record.items() if key != "name"})

    @staticmethod
    def written(text: str) -> Size:
        """The size written as rows x tokens x key heads / value heads: 1x8192x16/32, 1x8192x16/32/channel.

        Raises:
            ValueError: If the text is written in another way.
        """
        found = WRITTEN.fullmatch(text)
        if found is None:
            raise ValueError(f"expected a size such as 1x8192x16/32 or 1x8192x16/32/channel, got {text}")
        *numbers, channel = found.groups()
        size = Size(*map(int, numbers), per_channel=channel is not None)
        if size.value_heads % size.key_heads:
            raise ValueError(f"expected a multiple of {size.key_heads} value heads, got {text}")
        return size


WRITTEN = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)/([1-9]\d*)(/channel)?")
CPU = Size(1, 2048, 4, 4, dtype="float32")
SCALAR = [
    Size(2, 2048, 16, 16),
    Size(2, 2048, 16, 32),
    Size(1, 8192, 16, 32),
    Size(1, 8192, 16, 48),
    Size(1, 8192, 16, 64),
    Size(8, 4096, 32, 32),
    Size(1, 65536, 16, 32),
    Size(8, 8192, 16, 32),
]
GPU = [*SCALAR, *(replace(size, per_channel=True) for size in SCALAR)]
# The plot shows one sequence at increasing lengths.
LENGTHS = [2**power for power in range(10, 17)]
SWEEP = [Size(1, tokens, 16, 32) for tokens in LENGTHS]
# Sizes with which the programs can be tried on a machine without a GPU.
TINY = [
    Size(1, 96, 2, 4, head_size=16, dtype="float32"),
    Size(2, 160, 2, 2, head_size=16, dtype="float32"),
    Size(1, 96, 2, 2, head_size=16, dtype="float32", per_channel=True),
]
TINY_SWEEP = [Size(1, tokens, 2, 4, head_size=16, dtype="float32") for tokens in (64, 96, 128)]


@dataclass(frozen=True)
class Inputs:
    """Arguments in fp32 with keys of unit norm and usual gates and betas, and dy, the cotangent of y.

    `times` says how often to repeat them along rows and tokens. The device repeats them, since gigabytes would take
    long to draw and to copy.
    """

    arrays: dict[str, np.ndarray]
    dy: np.ndarray
    times: tuple[int, int] = (1, 1)


def inputs(size: Size) -> Inputs:
    """Draw arguments of this size.

    For bf16, all but the gates are rounded to bf16 here, so that every implementation and the float64 recurrence get
    the same numbers.

    Raises:
        ValueError: If the size is larger than what is drawn, and is no multiple of it.
    """
    rows, tokens = min(size.batch, DRAWN_ROWS), min(size.tokens, DRAWN_TOKENS)
    if size.batch % rows or size.tokens % tokens:
        raise ValueError(f"{size}: expected a multiple of {rows} rows and {tokens} tokens, which are drawn")
    arrays = dict(_drawn(replace(size, batch=rows, tokens=tokens)))
    return Inputs(arrays, arrays.pop("dy"), (size.batch // rows, size.tokens // tokens))


@lru_cache(maxsize=2)
def _drawn(size: Size) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    keys = (size.batch, size.tokens, size.key_heads, size.head_size)
    values = (size.batch, size.tokens, size.value_heads, size.head_size)
    q, k, v, dy = (draw.normal(size=shape) for shape in (keys, keys, values, values))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_g = -np.exp(draw.normal(size=values if size.per_channel else values[:3]) - 3)
    beta = draw.uniform(0.05, 0.95, size=values[:3])
    arrays = {"q": q * size.head_size**-0.5, "k": k, "v": v, "log_g": log_g, "beta": beta, "dy": dy}
    for name, x in arrays.items():
        exact = size.dtype == "float32" or name == "log_g"
        arrays[name] = x.astype(np.float32) if exact else as_bfloat16(x)
    return arrays


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round fp32 values to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)
