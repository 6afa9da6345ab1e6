"""Classes of calls, and the case on which an implementation is tried before its first use for a class.

Workloads are calls at the sizes of released models, with their results in float64, for doctor and self-test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

from ...machine import backend
from ..operator.case import Case, judged
from ..operator.measure import ROUNDING, as_float64, relative_norm
from ..operator.timing import length_class
from ..operator.verdicts import Verdict
from .chunk import gated_delta_chunk
from .float64 import recurrence
from .naive import gated_delta_naive
from .tolerances import BF16_NORM, EASY, FUSED_NORM, PRODUCTS_IN_BF16, SLOW, fused_bf16_norm, fused_bound

NAMES = ("y", "state", "dq", "dk", "dv", "dlog_g", "dbeta", "dinitial_state")
# A case has a row with this many slow gates, one after another, so that their errors add up: in bf16 a gate of 0.999
# becomes 1, which is 0.1 % off after one token and 67 % after 512.
SLOW_TOKENS = 512
# The logarithms of slow gates.
SLOW_GATES = (-1e-3, -1e-5)
# The case has two batch rows over more than two chunks of any implementation, the last of which lacks tokens.
BATCH, LENGTH = 2, SLOW_TOKENS + 6
# Timed rows of so many tokens are one, for their memory.
_LONGEST_TIMED = 8192
# The reference computes two key heads. The implementation gets as many as the class has, each a copy of one of the two,
# chosen at random, so that a head which reads or writes the place of another gives a wrong result.
_REFERENCE_HEADS = 2
# The tiling of calls with products in bf16, which have bounds of their own.
IN_BF16 = "products in bf16"
# The heads of each argument and cotangent: k for key heads on axis 2, v for value heads on axis 2, s for value heads on
# axis 1 (a state's).
_HEADS = {"q": "k", "k": "k", "v": "v", "log_g": "v", "beta": "v", "initial_state": "s"}
_COTANGENTS = "vs"
Implementation = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class ShapeClass:
    """A class of calls that run the same kernels, whatever their batch and length. They share a verdict.

    `tiling` says how the implementation divides the work, where it has a choice, and `beta` in which dtype it reads
    beta; it is empty in calls of linear attention, which have none. Where implementations are timed, the calls have
    more tokens than `longer_than`, one of timing.LENGTHS, and one row or several.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    dtype: str
    masked: bool = False
    segmented: bool = False
    per_channel: bool = False
    tiling: str = ""
    beta: str = "float32"
    longer_than: int = 0
    one_row: bool = False

    @property
    def erases(self) -> bool:
        """Whether the calls are those of gated_delta."""
        return bool(self.beta)

    @property
    def floats(self) -> tuple[str, ...]:
        """The names of the arguments that have gradients."""
        return tuple(name for name in _HEADS if self.erases or name != "beta")

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results that are compared: y, the final state, and the gradients."""
        return tuple(name for name in NAMES if self.erases or name != "dbeta")

    def __str__(self) -> str:
        heads = f"{self.key_heads}/{self.value_heads} heads of {self.key_size} x {self.value_size}"
        options = [name for name in ("masked", "segmented", "per_channel") if getattr(self, name)]
        beta = [] if self.beta in ("float32", "") else [f"beta in {self.beta}"]
        times = [f"more than {self.longer_than:,} tokens"] * (self.longer_than > 0) + ["one row"] * self.one_row
        return ", ".join([self.dtype, heads, *(option.replace("_", "-") for option in options), *beta, *times])


@dataclass(frozen=True)
class Call:
    """The arguments of a call that decide which implementation can serve it; without beta, of linear attention."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    masked: bool
    segmented: bool
    beta_dtype: mx.Dtype | None = mx.float32

    @property
    def erases(self) -> bool:
        """Whether the call is one of gated_delta."""
        return self.beta_dtype is not None

    def shape_class(self, tiling: str = "", beta: mx.Dtype = mx.float32, *, timed: bool | None = None) -> ShapeClass:
        """Return the class of calls that share a verdict; `tiling` and `beta` tell kernels of equal shapes apart.

        Where implementations are `timed`, by default on MLX's device, calls of other lengths and of one row are apart.
        """
        heads = (self.k.shape[2], self.v.shape[2], self.k.shape[3], self.v.shape[3])
        dtype = str(self.v.dtype).removeprefix("mlx.core.")
        options = self.masked, self.segmented, self.log_g.ndim == 4
        rates = str(beta).removeprefix("mlx.core.") if self.erases else ""
        rows, tokens = self.k.shape[:2]
        timed = backend.compares_times() if timed is None else timed
        of_times = (length_class(tokens), rows == 1) if timed else ()
        return ShapeClass(*heads, dtype, *options, tiling, rates, *of_times)

    @staticmethod
    def of_class(shape: ShapeClass) -> Call:
        """Return a call of a class, with one token in each row."""
        dtype = getattr(mx, shape.dtype)
        q = mx.zeros((BATCH, 1, shape.key_heads, shape.key_size), dtype)
        v = mx.zeros((BATCH, 1, shape.value_heads, shape.value_size), dtype)
        gates = (*v.shape[:3], shape.key_size) if shape.per_channel else v.shape[:3]
        beta = mx.float32 if shape.erases else None
        return Call(q, q, v, mx.zeros(gates), shape.masked, shape.segmented, beta)

    @property
    def words(self) -> str:
        """The class of the call, in words that are the same on every machine."""
        return str(self.shape_class(timed=True))


def trial_case(
    shape: ShapeClass, *, by_recurrence: bool = False, length: int = LENGTH, rows: int = BATCH
) -> Case[Implementation]:
    """Return the case of a class of calls, forward and backward, with gates of every kind, slow ones in the last row.

    The truth comes from chunk or, `by_recurrence`, from naive; either computes it in fp32 on the CPU.
    """
    drawn = Arguments.drawn(shape, length, rows)
    reference = implementation_of(shape, gated_delta_naive if by_recurrence else gated_delta_chunk)

    def truth() -> list[np.ndarray]:
        # On the CPU, because a GPU may multiply fp32 matrices in TF32.
        with mx.stream(mx.cpu):
            few = differentiated(reference, drawn.reference_primals, drawn.constants, drawn.reference_cotangents)
            mx.eval(few)
        return drawn.with_all_heads([as_float64(x) for x in few])

    if shape.tiling == IN_BF16:
        rounding = PRODUCTS_IN_BF16 * ROUNDING["bfloat16"]
    else:
        rounding = ROUNDING[shape.dtype] if by_recurrence else fused_bound(0.0, shape.dtype)
    return Case(
        name=str(shape),
        results=shape.results,
        call=lambda function: differentiated(function, drawn.primals, drawn.constants, drawn.cotangents),
        truth=truth,
        bound=EASY + rounding,
        bounds={slow_name(name): SLOW + rounding for name in shape.results},
        reference="naive" if by_recurrence else "chunk",
        like=[*drawn.cotangents, *drawn.primals],
        parts=by_gates,
    )


def timed_case(shape: ShapeClass, *, length: int | None = None) -> Case[Implementation]:
    """Return the case on which implementations are timed, on rows of another length where one is given."""
    length = length or min(2 * shape.longer_than, _LONGEST_TIMED) or LENGTH
    return trial_case(shape, length=length, rows=1 if shape.one_row or length >= _LONGEST_TIMED else BATCH)


def implementation_of(shape: ShapeClass, function: Implementation) -> Implementation:
    """Return the function of the operator with these calls: linear_attention's have no beta to pass on."""
    return function if shape.erases else partial(function, beta=None)


def differentiated(
    function: Implementation, primals: Sequence[mx.array], constants: dict[str, Any], cotangents: Sequence[mx.array]
) -> list[mx.array]:
    """Return y, the final state and the gradients of `primals`, not computed yet.

    The last of the primals is the initial state; `constants` are mask and segments, and `cotangents` the gradients of y
    and of the final state. `function` is called as `gated_delta` is, or as `linear_attention`.
    """

    def call(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return function(*arrays[:-1], initial_state=arrays[-1], **constants)

    outputs, gradients = mx.vjp(call, list(primals), list(cotangents))
    return [*outputs, *gradients]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a case, for the implementation, in its dtype, and for the reference, a few heads in fp32.

    `constants` are mask and segments, `names` those of the primals; `key_heads` and `value_heads` say which of the
    reference's heads each of the implementation's copies.
    """

    primals: list[mx.array]
    cotangents: list[mx.array]
    reference_primals: list[mx.array]
    reference_cotangents: list[mx.array]
    constants: dict[str, mx.array | None]
    names: tuple[str, ...]
    key_heads: np.ndarray
    value_heads: np.ndarray

    @property
    def heads(self) -> str:
        """The kind of heads of each primal."""
        return "".join(_HEADS[name] for name in self.names)

    def with_all_heads(self, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the results of the reference's heads, as ShapeClass.results, with those of the implementation's."""
        return _copy_heads(results, _COTANGENTS + self.heads, self)

    @staticmethod
    def drawn(shape: ShapeClass, length: int = LENGTH, rows: int = BATCH) -> Arguments:
        """Draw the arguments with NumPy, because MLX's random state belongs to the training."""
        draw = np.random.default_rng(0)
        heads, repeats = min(_REFERENCE_HEADS, shape.key_heads), shape.value_heads // shape.key_heads
        key_heads = np.concatenate([np.arange(heads), draw.integers(heads, size=shape.key_heads - heads)])
        floats = draw_floats(draw, replace(shape, key_heads=heads, value_heads=heads * repeats), rows, length)
        dtype = getattr(mx, shape.dtype)
        few = [mx.array(x.astype(np.float32)) for x in floats]
        for index in (0, 1, 2, 6):
            few[index] = few[index].astype(dtype)
        few[4:5] = [few[4].astype(getattr(mx, shape.beta))] if shape.erases else []
        mask = np.ones((rows, length), bool)
        mask[0, length // 3 : length // 2] = False
        mask[-1, :3] = False
        segments = draw_segments(draw, rows, length)
        constants = {
            "mask": mx.array(mask) if shape.masked else None,
            "segments": mx.array(segments) if shape.segmented else None,
        }
        value_heads = (key_heads[:, None] * repeats + np.arange(repeats)).reshape(-1)
        wide = [x.astype(mx.float32) for x in few]
        last = len(shape.floats)
        arguments = Arguments([], [], wide[:last], wide[last:], constants, shape.floats, key_heads, value_heads)
        copies = _copy_heads([np.array(x) for x in wide], arguments.heads + _COTANGENTS, arguments)
        arrays = [mx.array(x).astype(small.dtype) for x, small in zip(copies, few, strict=True)]
        return replace(arguments, primals=arrays[:last], cotangents=arrays[last:])


def draw_floats(draw: np.random.Generator, shape: ShapeClass, batch: int, length: int) -> list[np.ndarray]:
    """Return q, k, v, log_g, beta and the initial state, then the gradients of y and of the final state."""
    keys = (batch, length, shape.key_heads, shape.key_size)
    values = (batch, length, shape.value_heads, shape.value_size)
    k = draw.normal(size=keys)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = (*values[:3], shape.key_size) if shape.per_channel else values[:3]
    state = (batch, shape.value_heads, shape.value_size, shape.key_size)
    floats = [draw.normal(size=keys) * shape.key_size**-0.5, k, draw.normal(size=values)]
    floats += [draw_log_gates(draw, gates), draw.uniform(0.05, 0.95, size=values[:3]), draw.normal(size=state)]
    return [*floats, draw.normal(size=values), draw.normal(size=state)]


def _copy_heads(arrays: Sequence[np.ndarray], kinds: str, arguments: Arguments) -> list[np.ndarray]:
    """Return arrays of the reference's heads with all heads of the class. The gradient of a copy is a copy, too."""
    heads = {"k": (arguments.key_heads, 2), "v": (arguments.value_heads, 2), "s": (arguments.value_heads, 1)}
    return [np.take(x, *heads[kind]) for x, kind in zip(arrays, kinds, strict=True)]


def draw_log_gates(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw the logarithms of gates, [B, T, Hv] or [B, T, Hv, Dk].

    The gates of the last row are slow. Of the others 2 % are 0, 3 % nearly 0 and 25 % 1, and the others are usual.
    """
    kind = draw.uniform(size=shape)
    usual = -np.exp(1.5 * draw.normal(size=shape) - 2.0)
    log_g = np.select([kind < 0.02, kind < 0.05, kind < 0.3], [-np.inf, np.log(1e-12), 0.0], usual)
    log_g[-1] = np.where(kind[-1] < 0.5, *SLOW_GATES)
    return log_g


def draw_segments(draw: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Draw segments, [B, T] int32: many in all rows but the last, which has two, the second of SLOW_TOKENS tokens."""
    starts = draw.uniform(size=(batch, length)) < 0.03
    starts[-1] = np.arange(length) == length - SLOW_TOKENS
    return np.cumsum(starts, axis=1).astype(np.int32)


def by_gates(name: str, result: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Return the rows of usual gates under a result's name, and the last one, of slow gates, under slow_name.

    Each row is compared by itself: the large results of slow gates would hide errors of the others.
    """
    *usual, slow = result
    return {name: usual, slow_name(name): [slow]}


def slow_name(name: str) -> str:
    """Return the name of a result in the row of slow gates."""
    return f"{name} of slow gates"


@dataclass(frozen=True)
class Workload:
    """A class of calls, of two rows of `length` tokens, of which the last has slow gates."""

    name: str
    shape: ShapeClass
    length: int = LENGTH

    def call(self) -> Call:
        """The call, for the choice of an implementation."""
        return Call.of_class(self.shape)

    def case(self, implementation: str) -> Case[Implementation]:
        """The case, with the bounds that hold for an implementation."""
        return self.case_within(self.bounds(implementation))

    def case_within(self, bounds: dict[str, float]) -> Case[Implementation]:
        """The case, of which each result may be off by its bound."""
        case = trial_case(self.shape, length=self.length)
        exact = Arguments.drawn(self.shape, self.length).with_all_heads(truth_of(self).exact)
        return replace(case, name=self.name, truth=lambda: exact, bound=0.0, bounds=bounds, error=relative_norm)

    def bounds(self, implementation: str) -> dict[str, float]:
        """The largest error allowed for each result of an implementation, from tolerances.py."""
        peers = truth_of(self).peers
        if implementation == "chunk_bf16":
            return dict.fromkeys(peers, PRODUCTS_IN_BF16 * BF16_NORM)
        if self.shape.dtype != "float32":
            return {name: fused_bf16_norm(peer) for name, peer in peers.items()}
        names = self.shape.results
        allowed = {name: max(FUSED_NORM, peers[name]) if implementation == "fused" else EASY for name in names}
        return allowed | {slow_name(name): SLOW for name in names}


@dataclass(frozen=True)
class Truth:
    """The exact results of the reference's heads, and the errors there of a peer on the CPU."""

    exact: list[np.ndarray]
    peers: dict[str, float]


@lru_cache(maxsize=1)
def truth_of(workload: Workload) -> Truth:
    """The truth of a workload, which its implementations share; the peer is `chunk`, and `naive` in bf16."""
    shape = workload.shape
    drawn = Arguments.drawn(shape, workload.length)
    floats = dict(zip(shape.floats, map(np.array, drawn.reference_primals), strict=True))
    constants = {name: None if x is None else np.array(x) for name, x in drawn.constants.items()}
    results = recurrence(floats | constants, *map(np.array, drawn.reference_cotangents))
    exact = [results[name] for name in ("y", "state", *shape.floats)]
    peer = implementation_of(shape, gated_delta_chunk if shape.dtype == "float32" else gated_delta_naive)
    both = (drawn.reference_primals, drawn.primals), (drawn.reference_cotangents, drawn.cotangents)
    primals, cotangents = ([few.astype(x.dtype) for few, x in zip(*pair, strict=True)] for pair in both)
    with mx.stream(mx.cpu):
        case = replace(trial_case(shape, length=workload.length), error=relative_norm)
        peers = case.errors(differentiated(peer, primals, drawn.constants, cotangents), exact)
    return Truth(exact, peers)


def workloads(quick: bool) -> list[Workload]:
    """The workloads, with the heads of released models; `quick` makes them few and small."""
    few, size = (2, 16) if quick else (16, 128)
    documents = ShapeClass(few, few, size, size, "float32", masked=True, segmented=True)
    return [
        Workload("scalar gates, bf16", ShapeClass(few, 2 * few, size, size, "bfloat16")),
        Workload("scalar gates, fp32, masked documents", documents),
        Workload("gates per channel, bf16", ShapeClass(2 * few, 2 * few, size, size, "bfloat16", per_channel=True)),
        Workload("gates per channel, fp32, masked documents", replace(documents, per_channel=True)),
    ]


# Small sizes, on which the recurrence takes little time.
SMALL = (
    ShapeClass(2, 4, 64, 64, "float32"),
    ShapeClass(2, 4, 64, 64, "bfloat16", masked=True, segmented=True),
    ShapeClass(2, 2, 32, 32, "float32", per_channel=True),
)
# Sizes of released models; in fp32 the heads are half as wide, for which an NVIDIA GPU's kernels compile in a tenth of
# the time.
MODELS = (
    ShapeClass(16, 16, 128, 128, "bfloat16"),
    ShapeClass(16, 32, 128, 128, "bfloat16", segmented=True),
    ShapeClass(16, 16, 64, 64, "float32", masked=True),
    ShapeClass(32, 32, 128, 128, "bfloat16", per_channel=True),
)


def calls(shapes: Sequence[ShapeClass] = ()) -> list[Call]:
    """Return a call of each class of MODELS, or of other classes, with one token."""
    return [Call.of_class(shape) for shape in shapes or MODELS]


def compare_chunk(shapes: Sequence[ShapeClass] = ()) -> list[Verdict]:
    """Compare `chunk` with the recurrence, on SMALL or other classes."""

    def verdict(shape: ShapeClass) -> Verdict:
        case = trial_case(shape, by_recurrence=True)
        return judged(case, implementation_of(shape, gated_delta_chunk), "chunk")

    return [verdict(shape) for shape in shapes or SMALL]
