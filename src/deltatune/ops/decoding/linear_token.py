"""A linear layer for one token of each row, fused with the operations around it: a norm, a SwiGLU, a residual sum.

With few rows a product takes as long as its weight is read, and a step of a batch has some hundred of them. So a step
takes as long as its launches, and each product takes the operations around it along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..kernels.launch import Arrays, Device, Kernel, Plan
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator
from ..operator.measure import random_arrays
from ..recomputation import is_small_case, note

# The most rows with products that are faster this way than MLX's. A block can compute them all.
MOST_ROWS = 64
# About how many blocks an NVIDIA GPU computes at once.
BLOCKS = 112
KERNEL = Kernel(
    name="linear_token",
    files=("fragments.h", "decoding/linear_token.h"),
    values=("GROUPS", "TILES", "LINES", "PARTS"),
    arrays=("eps", "x", "weight", "second", "norm", "a", "b", "second_b", "residual", "counters", "h", "y"),
    memory="LinearTokenMemory",
    memory_values=("GROUPS", "TILES", "LINES"),
    bounded=True,
    in_order=True,
)
# The largest error that a trial allows over the largest element: a few roundings of the dtype.
BOUNDS = {mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6}


class RowNorm(NamedTuple):
    """An RMS norm, with weights [in], of the rows that a linear layer reads."""

    weight: mx.array
    eps: float


class LowRank(NamedTuple):
    """The low-rank update that adapters add to the products.

    `a` [r, in] multiplies the rows first, then b [out, r], times the adapter's scale; `second_b` is that of a second
    weight.
    """

    a: mx.array
    b: mx.array
    second_b: mx.array | None = None


@dataclass(frozen=True)
class LinearToken:
    """A call of a linear layer on one token of each row, with its prologue and epilogue.

    Attributes:
        x: [..., in], before its norm, if there is one.
        weight: [out, in].
        norm: The norm of the rows before the product, or None.
        second: None or another weight [out, in]; its product is multiplied by the silu of the first one.
        low_rank: The adapters' update, or None.
        residual: None or an array [..., out] that is added to the result.
    """

    x: mx.array
    weight: mx.array
    norm: RowNorm | None = None
    second: mx.array | None = None
    low_rank: LowRank | None = None
    residual: mx.array | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.x.size // self.x.shape[-1]

    @property
    def rank(self) -> int:
        """The rank of the adapters together, 0 for none."""
        return 0 if self.low_rank is None else self.low_rank.a.shape[0]

    @property
    def arrays(self) -> Arrays:
        """All arrays that there are, by their names in the kernel's text."""
        every = {
            "x": self.x,
            "weight": self.weight,
            "second": self.second,
            "norm": self.norm and self.norm.weight,
            **(self.low_rank._asdict() if self.low_rank else {}),
            "residual": self.residual,
        }
        return {name: array for name, array in every.items() if array is not None}


class TokenBlock(NamedTuple):
    """The share of a block: 16 `tiles` outputs, of both weights together, of 8 `lines` rows, in groups of 32 lanes."""

    tiles: int
    lines: int
    groups: int


def linear_token(call: LinearToken, *, block: TokenBlock | None = None) -> mx.array:
    """Apply a linear layer, with the operations around it, to one token of each row; return [..., out].

    The share of a `block` depends on the number of rows by default. `serves` says whether arrays fit. Source: the
    layers around nn.Linear in mlx_lm/models/qwen3_5.py, for one token.
    """
    if is_small_case():
        note("linear token")
        return linear_token_naive(call)
    arrays = call.arrays
    eps = 0.0 if call.norm is None else call.norm.eps
    block = block or _block_of(call)
    if call.low_rank is not None:
        arrays["counters"] = _counters(call.rows, block)
    sizes = tuple(arrays), call.x.shape, call.weight.shape[0], call.rank
    return KERNEL(arrays, _plan(*sizes, call.x.dtype, block, eps))[-1]


def linear_token_naive(call: LinearToken) -> mx.array:
    """Compute the same by MLX's operations."""
    x = call.x if call.norm is None else mx.fast.rms_norm(call.x, *call.norm)

    def product(weight: mx.array, b: mx.array | None) -> mx.array:
        y = x @ weight.T
        return y if call.low_rank is None or b is None else y + (x @ call.low_rank.a.T) @ b.T

    y = product(call.weight, call.low_rank and call.low_rank.b)
    if call.second is not None:
        y = y * mx.sigmoid(y) * product(call.second, call.low_rank and call.low_rank.second_b)
    return y if call.residual is None else call.residual + y


def covers(call: LinearToken) -> bool:
    """Whether the kernel can compute with arrays of these shapes and dtypes."""
    if len({array.dtype for array in call.arrays.values()}) > 1 or call.x.dtype not in BOUNDS:
        return False
    return _fits(call) and call.x.shape[-1] % 8 == call.rank % 8 == 0


def _fits(call: LinearToken) -> bool:
    if call.x.ndim < 2 or call.weight.ndim != 2 or not call.x.size or not call.weight.size:
        return False
    *rows, inputs = call.x.shape
    outputs = call.weight.shape[0]
    adapters = call.low_rank
    shapes = {
        "x": (*rows, inputs),
        "weight": (outputs, inputs),
        "second": (outputs, inputs),
        "norm": (inputs,),
        "a": (call.rank, inputs),
        "b": (outputs, call.rank),
        "second_b": (outputs, call.rank),
        "residual": (*rows, outputs),
    }
    both = adapters is None or (adapters.second_b is None) == (call.second is None)
    return both and all(array.shape == shapes[name] for name, array in call.arrays.items())


def serves(call: LinearToken) -> bool:
    """Whether the kernel is to be used: it covers the arrays, is faster, and was found right on this machine."""
    if is_small_case():
        return _fits(call)
    if call.rows > MOST_ROWS or not covers(call):
        return False
    parts = tuple(name in call.arrays for name in ("norm", "second", "a", "residual"))
    return OPERATOR.serves(parts, call.x.dtype, _block_of(call))


def _block_of(call: LinearToken) -> TokenBlock:
    """Return the largest share that leaves a block for most multiprocessors, since each block reads its rows anew."""
    return _largest_block(call.rows, call.weight.shape[0], 1 if call.second is None else 2)


@lru_cache(maxsize=1024)
def _largest_block(rows: int, outputs: int, parts: int) -> TokenBlock:
    lines = 1 << (-(-rows // 8) - 1).bit_length()
    shares = [(4, 4), (2, 4), (2, 2), (1, 2)] if lines > 2 else [(2, lines), (1, lines)]
    counts = {
        share: math.prod(_grid(rows, parts * outputs, TokenBlock(*share, 1))) for share in shares if share[0] >= parts
    }
    tiles, lines = next((share for share, count in counts.items() if count >= BLOCKS), list(counts)[-1])
    # Two blocks of few groups share a multiprocessor; a block by itself needs many to keep loads on their way.
    few = tiles * lines > 4 or counts[tiles, lines] >= 2 * BLOCKS
    return TokenBlock(tiles, lines, 4 if few else 16)


def _grid(rows: int, outputs: int, block: TokenBlock) -> tuple[int, int]:
    """The numbers of blocks that share out the outputs, of both weights together, and the rows."""
    return -(-outputs // (16 * block.tiles)), -(-rows // (8 * block.lines))


def _counters(rows: int, block: TokenBlock) -> mx.array:
    """Return the counters of a launch, which leaves them as zeros: no launch at the same time may have the same ones.

    They are computed now, so that a compiled step has them as a constant.
    """
    counters = mx.zeros(max(8, 2 * -(-rows // (8 * block.lines))), mx.int32)
    mx.eval(counters)
    return counters


@lru_cache(maxsize=1024)
def _plan(
    names: tuple[str, ...], x: tuple[int, ...], outputs: int, rank: int, dtype: mx.Dtype, block: TokenBlock, eps: float
) -> Plan:
    """Return the plan of a call with arrays of these names, x of this shape and adapters of this rank, 0 for none."""
    rows = x[:-1]
    parts = 2 if "second" in names else 1
    last = len(x) - 1
    across, down = _grid(math.prod(rows), parts * outputs, block)
    # The first blocks of each row of blocks compute the product with the narrow factor.
    narrow, _ = _grid(0, parts * rank, block)
    between = {"h": ((*rows, rank), dtype)} if rank else {}
    return Plan(
        outputs={**between, "y": ((*rows, outputs), dtype)},
        values={"GROUPS": block.groups, "TILES": block.tiles, "LINES": block.lines, "PARTS": parts},
        blocks=(narrow + across, down, 1),
        groups=block.groups,
        sizes=(
            " * ".join(f"x_shape[{i}]" for i in range(last)),
            f"x_shape[{last}]",
            "weight_shape[0]",
            "a_shape[0]" if rank else "0",
        ),
        written={"eps": f"{eps!r}f"} | ({"counters": "const_cast<GLOBAL int*>(counters)"} if rank else {}),
        changes=("counters",) if rank else (),
    )


def trial_case(parts: tuple[bool, bool, bool, bool], dtype: mx.Dtype, block: TokenBlock) -> Case[Device]:
    """Return the case of more rows and outputs than a block takes, and inputs that the groups share unequally.

    `parts` says whether there are a norm, a second weight, adapters, and a residual.
    """
    rows = 8 * block.lines + 3
    inputs = 96 * block.groups + 40
    outputs = 16 * block.tiles + 8
    rank = 40
    names = ("x", "weight", "second", "norm", "a", "b", "second_b", "residual")
    matrices = [(rows, inputs), (outputs, inputs), (outputs, inputs)]
    shapes = [*matrices, (inputs,), (rank, inputs), (outputs, rank), (outputs, rank), (rows, outputs)]
    arrays = dict(zip(names, random_arrays([(shape, dtype) for shape in shapes]), strict=True))
    for name in ("weight", "second", "a", "b", "second_b"):
        # Products of many inputs would else be far from where silu bends.
        arrays[name] = arrays[name] * (4 * arrays[name].shape[1]) ** -0.5
    call = _with_parts(parts, arrays)
    wide = _with_parts(parts, {name: array.astype(mx.float32) for name, array in arrays.items()})
    around = [name for name, there in zip(("norm", "SwiGLU", "adapters", "residual"), parts, strict=True) if there]
    return Case(
        name=", ".join(["a token of a linear layer", *around]) + f" ({dtype})",
        results=("y",),
        call=by_kernels(lambda: [linear_token(call, block=block)]),
        truth=lambda: [linear_token_naive(wide)],
        bound=BOUNDS[dtype],
        like=list(arrays.values()),
    )


def _with_parts(parts: tuple[bool, bool, bool, bool], arrays: Arrays) -> LinearToken:
    norm, second, adapters, residual = parts
    low_rank = LowRank(arrays["a"], arrays["b"], arrays["second_b"] if second else None)
    return LinearToken(
        arrays["x"],
        arrays["weight"],
        RowNorm(arrays["norm"], 1e-6) if norm else None,
        arrays["second"] if second else None,
        low_rank if adapters else None,
        arrays["residual"] if residual else None,
    )


OPERATOR = KernelOperator("a token of a linear layer", trial_case)
