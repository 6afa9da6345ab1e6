"""The forward and the backward pass of an operator by the fused kernels, as one differentiable function.

macOS ends work that keeps an Apple GPU for about five seconds, so the scans of very long rows are divided there. A part
goes through some of a row's chunks. It starts from the state in fp32 with which the part before it ended, so that the
bits are those of one launch. The other kernels have a block for each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ..functional import not_differentiated_again, refuse_second_derivative, with_gradient
from ..kernels.launch import MOST_MULTIPLICATIONS, Arrays
from ..recomputation import Input
from .tiling import Shape, Tiling
from .transforms import no_second_derivative

# (shape, dtype, masked=, segmented=, per_channel=, erases=) -> the tiling of a call, None where no kernel supports it.
TilingOfCall = Callable[..., Tiling | None]
Function = Callable[..., tuple[mx.array, ...]]

# y and the final state.
RESULTS = 2


@dataclass(frozen=True)
class FusedPasses:
    """The passes of a kind of calls, with or without initial state, mask, segments, gates per channel, and beta."""

    tiling_of_call: TilingOfCall
    stateful: bool
    masked: bool
    segmented: bool
    per_channel: bool
    erases: bool = True

    @property
    def tokens(self) -> int:
        """The number of arguments that have gradients and a row for each token: q, k, v, log_g and beta."""
        return 4 + self.erases

    @property
    def floats(self) -> int:
        """The number of arguments that have gradients."""
        return self.tokens + self.stateful

    @property
    def inputs(self) -> int:
        """The number of arguments."""
        return self.floats + self.masked + self.segmented

    def forward(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return y, the final state, and the saved tensors of the backward pass.

        The arguments are q, k, v, log_g, then beta, the initial state, the mask and the segments where they are given.
        """
        tiling, x = self._call(arrays)
        prepared = tiling.run("prepare", x)
        scanned = run_scan(tiling, "scan", x | prepared)
        return scanned["y"], scanned["last"], *(scanned[name] for name in tiling.saved), *prepared.values()

    def backward(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return the floats' gradients, from the inputs, dy, the final state's gradient, and the saved tensors."""
        tiling, x = self._call(arrays)
        dy, d_last, *saved = arrays[self.inputs :]
        x |= dict(zip((*tiling.saved, *tiling.kernels.prepared), saved, strict=True))
        x |= {"dy": dy.astype(tiling.dtype), "d_last": d_last.astype(mx.float32)}
        x |= run_scan(tiling, "reverse", x)
        x |= tiling.run("gradients", x)
        names = ("dq", "dk", "dv", "d_log_g", *(["d_beta"] if self.erases else []), "d_initial")
        return tuple(x[name] for name in names[: self.floats])

    def _call(self, arrays: Sequence[mx.array]) -> tuple[Tiling, Arrays]:
        """Return the tiling of a call, and its arguments by name."""
        x = dict(zip(("q", "k", "v", "log_g", "beta"), arrays[: self.tokens], strict=False))
        options = {"masked": self.masked, "segmented": self.segmented, "per_channel": self.per_channel}
        tiling = self.tiling_of_call(shape_of(x["k"], x["v"]), x["q"].dtype, **options, erases=self.erases)
        assert tiling is not None, "gated_delta_fused checks that the call is supported"
        x["initial"] = arrays[self.tokens] if self.stateful else no_initial_state()
        if self.masked:
            x["mask"] = arrays[self.floats]
        if self.segmented:
            x["segments"] = arrays[self.inputs - 1]
        return tiling, x


@cache
def no_initial_state() -> mx.array:
    """Return an array that tells a scan to start from zeros: heads of size 1 are in no state.

    It has eight elements, because MLX passes smaller arrays to Metal in another address space.
    """
    return mx.array([[[[0.0]]]] * 8, dtype=mx.float32)


def shape_of(k: mx.array, v: mx.array) -> Shape:
    """Return (B, T, Hk, Hv, Dk, Dv)."""
    return k.shape[0], k.shape[1], k.shape[2], v.shape[2], k.shape[3], v.shape[3]


@cache
def keeping(passes: FusedPasses) -> Function:
    """Return FusedPasses.forward with its gradient."""
    return differentiable(passes, passes.forward, passes.backward)


def recomputing(passes: FusedPasses, source: Input) -> Function:
    """Return the function without saved tensors, which its backward pass recomputes.

    `source` gives q, k and v to that pass.
    """

    def backward(*arrays: mx.array) -> tuple[mx.array, ...]:
        return passes.backward(*arrays, *passes.forward(*arrays[: passes.inputs])[RESULTS:])

    return differentiable(passes, lambda *arrays: passes.forward(*arrays)[:RESULTS], backward, source)


def differentiable(
    passes: FusedPasses,
    forward: Callable[..., tuple[mx.array, ...]],
    backward: Callable[..., tuple[mx.array, ...]],
    source: Input | None = None,
) -> Function:
    """Return `forward` with its gradient by `backward`, which gets the inputs, the cotangents of RESULTS and the rest.

    Where there is a `source`, the backward pass gets q, k and v from it.
    """
    # There is no rule for mx.vmap: MLX would also map the custom kernels in the graph inside, which have none.
    refuse = refuse_second_derivative(no_second_derivative(passes.erases))

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        cotangents = cotangents[:RESULTS]
        if source:
            # What runs again waits for the cotangents, so that it neither starts early nor is merged with the first.
            primals = *source.again(primals[:3], cotangents), *mx.depends(list(primals[3:]), list(cotangents))
        gradients = not_differentiated_again(backward, refuse)(*primals, *cotangents, *outputs[RESULTS:])
        return *gradients, *map(mx.zeros_like, primals[passes.floats :])

    return with_gradient(forward, vjp)


#: The chunks that a block goes through in one launch. A step has some 2e5 multiplications for heads of 128, which the
#: half of an M1's core that a block keeps busy does in 5 us; with ten times that for barriers and loads, a second.
MOST_STEPS = 16_384

# The arrays that have a row for each token. The others have one for each chunk.
_BY_TOKEN = ("q", "k", "v", "mask", "dy", "y", "dv")
# The states that a scan, or a reverse scan, takes and leaves.
_STATES = {"scan": ("initial", "last"), "reverse": ("d_last", "d_initial")}


def run_scan(tiling: Tiling, phase: str, arrays: Arrays) -> Arrays:
    """Launch either scan, the phase `scan` or `reverse`, on the arrays that its kernel takes, and beta if there is one.

    The outputs by name are those of one launch for the whole row.
    """
    parts = _parts(tiling)
    if len(parts) == 1:
        return tiling.run(phase, arrays)
    taken, left = _STATES[phase]
    names = [name for name in getattr(tiling.kernels, phase).inputs if name in arrays and name != taken]
    state = arrays[taken]
    outputs = []
    for first, last in parts if phase == "scan" else reversed(parts):
        start = first * tiling.chunk
        end = min(last * tiling.chunk, tiling.length)
        of_part = {
            name: arrays[name][:, start:end] if name in _BY_TOKEN else arrays[name][:, :, first:last] for name in names
        }
        part = replace(tiling, length=end - start)
        more = {"initial": state, taken: state} | ({"beta": arrays["beta"]} if tiling.erases else {})
        results = part.run(phase, of_part | more)
        state = results.pop(left)
        outputs.append(results)
    ordered = outputs if phase == "scan" else outputs[::-1]
    joined = {name: [results[name] for results in ordered] for name in ordered[0]}
    whole = {name: mx.concatenate(rows, axis=1 if name in _BY_TOKEN else 2) for name, rows in joined.items()}
    return whole | {left: state}


def _parts(tiling: Tiling) -> list[tuple[int, int]]:
    """Return the first chunk of each part, and the one after its last: all of them in one part but on Metal."""
    steps = tiling.chunks
    if tiling.machine == "metal":
        x, y, z = tiling.scan_blocks
        chunk = tiling.chunk
        slices = x * y * z * tiling.slice
        # A reverse scan multiplies the state, or its gradient, four times, and triangles of a chunk four times.
        multiplications = slices * chunk * 4 * (tiling.key_size + chunk)
        steps = max(1, min(MOST_STEPS, int(MOST_MULTIPLICATIONS / multiplications)))
    return list(pairwise([*range(0, tiling.chunks, steps), tiling.chunks]))
