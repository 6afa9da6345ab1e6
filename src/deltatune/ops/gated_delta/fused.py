"""The launches of the fused kernels for one gate per head: prepare and scan forward, reverse and gradients backward.

The kernels are in ops/kernels/gated_delta, where each file explains its outputs; fused_op.py calls the functions here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx

from ..kernels.launch import Arrays, Blocks, Kernel, Launch, Outputs, Values
from .tiling import Tiling, padded

# The compile-time values that every kernel but prepare takes first, and those that prepare takes.
BASE_VALUES = ("In", "C", "DK", "DV", "SLICE", "HK", "HV", "GROUPS", "STAGES")
PREPARE_VALUES = ("In", "C", "DK", "HK", "HV", "GROUPS", "UNSTAGED", "MASKED", "SEGMENTED")
PREPARE_ARRAYS = ("q", "k", "log_g", "beta", "mask", "segments")
SCAN_VALUES = (*BASE_VALUES, "SPLIT", "UNSTAGED", "MASKED")
SCAN_MEMORY_VALUES = ("In", "C", "DK", "SLICE", "STAGES", "SPLIT", "UNSTAGED")
# The outputs of `prepare`.
PREPARED = ("solve", "scores", "factors")
# The outputs of a scan and of a reverse scan, and the arrays of the gradient kernel.
SCANNED = ("y", "states", "u", "last")
REVERSED = ("d_states", "d_right", "dv", "d_initial")
GRADIENT_ARRAYS = (
    *("q", "k", "log_g", "mask", "segments"),
    *("factors", "states", "d_states", "u", "d_right", "dy"),
    *("dq", "dk", "d_log_g", "d_beta"),
)
# How `initial` is written: with whether it is a state, and not the array of `no_initial_state`.
_INITIAL = {"initial": "initial, initial_shape[3] == DK"}


@dataclass(frozen=True)
class KernelInputs:
    """The arguments of `gated_delta` as the kernels take them. `initial` may be `no_initial_state()`."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    beta: mx.array
    initial: mx.array
    mask: mx.array | None
    segments: mx.array | None

    def named(self, *names: str) -> Arrays:
        """Return those of the named inputs that the call has."""
        return {name: array for name in names if (array := getattr(self, name)) is not None}


@cache
def no_initial_state() -> mx.array:
    """Return an array that tells a scan to start from zeros: heads of size 1 are in no state.

    It has eight elements, because MLX passes smaller arrays to Metal in another address space.
    """
    return mx.array([[[[0.0]]]] * 8, dtype=mx.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaKernel(Kernel):
    """A kernel of the gated delta rule; its launches follow from a call's tiling.

    Attributes:
        bytes: The shared memory of a block, for a tiling.
        blocks: The grid, for a tiling.
        groups: Groups of 32 lanes per block, for a tiling.
        own_values: For a tiling, the compile-time values that other kernels do not have or have otherwise.
    """

    sizes: tuple[str, ...] = ("q_shape[1]",)
    bytes: Callable[[Any], int]
    blocks: Callable[[Any], Blocks]
    groups: Callable[[Any], int] = lambda tiling: 4
    own_values: Callable[[Any], Values] = lambda tiling: {}

    def launch(self, tiling: Tiling, inputs: Arrays, outputs: Outputs) -> Launch:
        """Return the launch on the arrays that a call has, which writes outputs of these shapes and dtypes."""
        groups = self.groups(tiling)
        known = _shared_values(tiling) | {"GROUPS": groups} | self.own_values(tiling)
        return Launch(
            kernel=self,
            inputs=inputs,
            outputs=outputs,
            values={name: known[name] for name in self.values},
            blocks=self.blocks(tiling),
            bytes=self.bytes(tiling),
            groups=groups,
            written=_INITIAL if "initial" in inputs else {},
        )


def _shared_values(tiling: Tiling) -> Values:
    return {
        "In": tiling.dtype,
        "C": tiling.chunk,
        "DK": tiling.key_size,
        "DV": tiling.value_size,
        "SLICE": tiling.slice,
        "HK": tiling.key_heads,
        "HV": tiling.value_heads,
        "STAGES": tiling.stages,
        "SPLIT": tiling.split,
        "OVERLAY": tiling.overlay,
        "UNSTAGED": tiling.unstaged,
        "MASKED": tiling.masked,
        "SEGMENTED": tiling.segmented,
    }


def bodies(*names: str) -> tuple[str, ...]:
    """Return the files of these names among the bodies of the gated delta rule."""
    return tuple(f"gated_delta/{name}.h" for name in names)


def blocks_of_chunks(tiling: Tiling) -> Blocks:
    """Return a grid with a block for each chunk of each value head."""
    return tiling.chunks, tiling.value_heads, tiling.batch


def blocks_of_key_heads(tiling: Tiling) -> Blocks:
    """Return a grid with a block for each chunk of each key head."""
    return tiling.chunks, tiling.key_heads, tiling.batch


def gradient_slice(tiling: Tiling) -> Values:
    """Return the rows of a state that a gradient kernel reads at a time."""
    return {"SLICE": tiling.gradient_slice}


PREPARE = DeltaKernel(
    name="gated_delta_prepare",
    files=bodies("chunk", "prepare"),
    values=PREPARE_VALUES,
    arrays=(*PREPARE_ARRAYS, *PREPARED),
    memory="PrepareMemory",
    memory_values=("In", "C", "DK", "UNSTAGED"),
    bytes=lambda tiling: tiling.prepare_bytes,
    blocks=blocks_of_chunks,
)
SCAN = DeltaKernel(
    name="gated_delta_scan",
    files=bodies("chunk", "strips", "scan_memory", "scan"),
    values=SCAN_VALUES,
    arrays=("q", "k", "v", "mask", "initial", *PREPARED, *SCANNED),
    memory="ScanMemory",
    memory_values=SCAN_MEMORY_VALUES,
    bytes=lambda tiling: tiling.scan_bytes,
    blocks=lambda tiling: tiling.scan_blocks,
    groups=lambda tiling: tiling.scan_groups,
)
REVERSE = replace(
    SCAN,
    name="gated_delta_reverse",
    files=bodies("chunk", "strips", "scan_memory", "reverse"),
    arrays=("q", "k", "dy", "mask", "d_last", *PREPARED, *REVERSED),
)
GRADIENTS = DeltaKernel(
    name="gated_delta_gradients",
    files=bodies("chunk", "gradient_slices", "gradient_gates", "gradients"),
    values=(*BASE_VALUES, "OVERLAY", "UNSTAGED", "MASKED", "SEGMENTED"),
    arrays=GRADIENT_ARRAYS,
    memory="GradientMemory",
    memory_values=("In", "C", "DK", "SLICE", "GROUPS", "STAGES", "OVERLAY", "UNSTAGED"),
    bytes=lambda tiling: tiling.gradient_bytes,
    blocks=blocks_of_key_heads,
    groups=lambda tiling: tiling.gradient_groups,
    own_values=gradient_slice,
)


def scan_outputs(tiling: Tiling, x: KernelInputs) -> Outputs:
    """Return the outputs of either scan: y, for each chunk the state before it and u, and the last state."""
    heads, rows = (tiling.batch, tiling.value_heads), padded(tiling.value_size)
    return {
        "y": (x.v.shape, tiling.dtype),
        "states": ((*heads, tiling.chunks, rows, tiling.key_stride), tiling.saved_dtype),
        "u": ((*heads, tiling.chunks, rows, tiling.saved_stride), mx.float32),
        "last": ((*heads, tiling.value_size, tiling.key_size), mx.float32),
    }


def reverse_outputs(tiling: Tiling, x: KernelInputs) -> Outputs:
    """Return the outputs of either reverse scan: for each chunk d_states and d_right, dv [B,T,Hv,Dv], and d_initial."""
    heads, rows = (tiling.batch, tiling.value_heads), padded(tiling.value_size)
    return {
        "d_states": ((*heads, tiling.chunks, rows, tiling.key_stride), tiling.saved_dtype),
        "d_right": ((*heads, tiling.chunks, rows, tiling.saved_stride), mx.float32),
        "dv": (x.v.shape, tiling.dtype),
        "d_initial": ((*heads, tiling.value_size, tiling.key_size), mx.float32),
    }


def prepare(tiling: Tiling, x: KernelInputs) -> Launch:
    """Return the launch of the prepare kernel.

    For each chunk it writes the packed triangles solve and scores, and factors [3, C].
    """
    chunks = (tiling.batch, tiling.value_heads, tiling.chunks)
    triangle = ((*chunks, tiling.triangle_elements), mx.float32)
    outputs: Outputs = {"solve": triangle, "scores": triangle, "factors": ((*chunks, 3, tiling.chunk), mx.float32)}
    return PREPARE.launch(tiling, x.named(*PREPARE_ARRAYS), outputs)


def scan(tiling: Tiling, x: KernelInputs, prepared: Arrays) -> Launch:
    """Return the launch of the scan, with the outputs of `prepare`. It writes `scan_outputs`."""
    return SCAN.launch(tiling, x.named("q", "k", "v", "mask", "initial") | prepared, scan_outputs(tiling, x))


def reverse(tiling: Tiling, x: KernelInputs, prepared: Arrays, cotangents: Arrays) -> Launch:
    """Return the launch of the reverse scan, with the outputs of `prepare`, and dy and d_last.

    It writes `reverse_outputs`.
    """
    inputs = x.named("q", "k", "mask") | cotangents | prepared
    return REVERSE.launch(tiling, inputs, reverse_outputs(tiling, x))


def gradient_inputs(x: KernelInputs, scanned: Arrays) -> Arrays:
    """Return the inputs of every gradient kernel; `scanned` are those that the scans and `prepare` wrote, and dy."""
    return x.named("q", "k", "log_g", "mask", "segments") | scanned


def gradient_outputs(tiling: Tiling, x: KernelInputs) -> Outputs:
    """Return the outputs of every gradient kernel: dq, dk, d_log_g in fp32, and d_beta in the dtype of beta."""
    return {
        "dq": (x.q.shape, tiling.dtype),
        "dk": (x.k.shape, tiling.dtype),
        "d_log_g": (x.log_g.shape, mx.float32),
        "d_beta": (x.beta.shape, x.beta.dtype),
    }


def gradients(tiling: Tiling, x: KernelInputs, scanned: Arrays) -> Launch:
    """Return the launch of the gradient kernel, which writes dq, dk, and d_log_g and d_beta in fp32.

    `scanned` holds factors, states, d_states, u, d_right and dy.
    """
    return GRADIENTS.launch(tiling, gradient_inputs(x, scanned), gradient_outputs(tiling, x))
