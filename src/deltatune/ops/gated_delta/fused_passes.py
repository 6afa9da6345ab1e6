"""The forward and the backward pass of gated_delta by the fused kernels, as one differentiable function.

The launches are those of fused.py, fused_channel.py or fused_hopper.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx

from ..functional import not_differentiated_again, refuse_second_derivative
from ..kernels.launch import Arrays, Execute, Launch
from ..recomputation import Input
from . import fused, fused_channel, fused_hopper, long_scans
from .fused import KernelInputs
from .fused_hopper import HopperTiling
from .tiling import ChannelTiling, Shape, Tiling
from .transforms import NO_SECOND_DERIVATIVE

# (shape, dtype, masked=, segmented=, per_channel=) -> the tiling of a call, None where no kernel supports it.
TilingOfCall = Callable[..., Tiling | None]
Function = Callable[..., tuple[mx.array, ...]]

# q, k, v, log_g, beta; then the initial state, the mask and the segments, where they are given.
FLOATS = 5
# y and the final state.
RESULTS = 2


@dataclass(frozen=True)
class FusedPasses:
    """The passes of a kind of calls.

    Attributes:
        tiling_of_call: Chooses how a call is divided.
        execute: Runs a launch.
        stateful, masked, segmented: Whether a call has an initial state, a mask, and segments.
        per_channel: Whether it has a gate per key channel.
    """

    tiling_of_call: TilingOfCall
    execute: Execute
    stateful: bool
    masked: bool
    segmented: bool
    per_channel: bool

    @property
    def floats(self) -> int:
        """The number of arguments that have gradients."""
        return FLOATS + self.stateful

    @property
    def inputs(self) -> int:
        """The number of arguments."""
        return self.floats + self.masked + self.segmented

    def forward(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return y, the final state, and the saved tensors of the backward pass.

        The arguments are q, k, v, log_g, beta, then the initial state, the mask and the segments where they are given.
        """
        tiling, x = self._kernel_inputs(arrays)
        kernels = _kernels_of(tiling)
        prepared = self._launch(kernels.prepare, tiling, x)
        named = dict(zip(kernels.PREPARED, prepared, strict=True))
        y, states, u, last = long_scans.scan(partial(self._launch, kernels.scan), tiling, x, named)
        return y, last, states, u, *prepared

    def backward(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return the floats' gradients, from the inputs, dy, the final state's gradient, and the saved tensors."""
        tiling, x = self._kernel_inputs(arrays)
        kernels = _kernels_of(tiling)
        dy, d_last, states, u, *saved = arrays[self.inputs :]
        cotangents = {"dy": dy.astype(tiling.dtype), "d_last": d_last.astype(mx.float32)}
        prepared = dict(zip(kernels.PREPARED, saved, strict=True))
        run = partial(self._launch, kernels.reverse)
        d_states, d_right, dv, d_initial, *taken = long_scans.reverse(run, tiling, x, prepared, cotangents)
        scanned = {"factors": prepared["factors"], "states": states, "d_states": d_states, "u": u}
        scanned |= {"d_right": d_right, "dy": cotangents["dy"]}
        # Hopper's reverse scan alone writes it, for the gradient kernel.
        if taken:
            scanned["taken"] = taken[0]
        dq, dk, d_log_g, d_beta = self._launch(kernels.gradients, tiling, x, scanned)
        return (dq, dk, dv, d_log_g, d_beta, d_initial)[: self.floats]

    def _kernel_inputs(self, arrays: Sequence[mx.array]) -> tuple[Tiling, KernelInputs]:
        q, k, v, log_g, beta = arrays[:FLOATS]
        options = {"masked": self.masked, "segmented": self.segmented, "per_channel": self.per_channel}
        tiling = self.tiling_of_call(shape_of(k, v), q.dtype, **options)
        assert tiling is not None, "gated_delta_fused checks that the call is supported"
        initial = arrays[FLOATS] if self.stateful else fused.no_initial_state()
        mask = arrays[self.floats] if self.masked else None
        segments = arrays[self.inputs - 1] if self.segmented else None
        return tiling, KernelInputs(q, k, v, log_g, beta, initial, mask, segments)

    def _launch(
        self, describe: Callable[..., Launch], tiling: Tiling, x: KernelInputs, *more: Arrays
    ) -> list[mx.array]:
        """Run the launch that `describe` returns, which describes it once for all calls with this tiling."""
        key = describe, self.stateful, x.beta.dtype
        known_launch = tiling.launches.get(key)
        if known_launch is None:
            launch = describe(tiling, x, *more)
            tiling.launches[key] = launch.on({}), tuple(launch.inputs)
            return self.execute(launch)
        launch, names = known_launch
        arrays = vars(x)
        for group in more:
            arrays = arrays | group
        return self.execute(launch.on({name: arrays[name] for name in names}))


def shape_of(k: mx.array, v: mx.array) -> Shape:
    """Return (B, T, Hk, Hv, Dk, Dv)."""
    return k.shape[0], k.shape[1], k.shape[2], v.shape[2], k.shape[3], v.shape[3]


def _kernels_of(tiling: Tiling) -> Any:
    """Return the module with the launches that `tiling` is for."""
    kinds = {ChannelTiling: fused_channel, HopperTiling: fused_hopper}
    return kinds.get(type(tiling), fused)


@cache
def keeping(passes: FusedPasses) -> Function:
    """Return FusedPasses.forward with its gradient."""
    return _differentiable(passes, None)


def recomputing(passes: FusedPasses, source: Input) -> Function:
    """Return the function without saved tensors, which its backward pass recomputes.

    `source` gives q, k and v to that pass.
    """
    return _differentiable(passes, source)


def _differentiable(passes: FusedPasses, source: Input | None) -> Function:
    """Return the forward pass with its gradient; where there is a `source`, without saved tensors."""
    # The function gets no rule for mx.vmap: MLX would also map the custom kernels in the graph inside it, which have
    # none.
    forward = mx.custom_function(lambda *arrays: passes.forward(*arrays)[: RESULTS if source else None])
    refuse = refuse_second_derivative(NO_SECOND_DERIVATIVE)

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        backward, cotangents = not_differentiated_again(passes.backward, refuse), cotangents[:RESULTS]
        if source:
            # The second run waits for the cotangents, so that it neither starts early nor is merged with the first.
            primals = *source.again(primals[:3], cotangents), *mx.depends(list(primals[3:]), list(cotangents))
            outputs = passes.forward(*primals)
        gradients = backward(*primals, *cotangents, *outputs[RESULTS:])
        return *gradients, *map(mx.zeros_like, primals[passes.floats :])

    forward.vjp(vjp)
    return cast(Function, forward)
