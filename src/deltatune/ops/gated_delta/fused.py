"""The launches of the fused kernels for one gate per head: prepare and scan forward, reverse and gradients backward.

The kernels are in ops/kernels/gated_delta, where each file explains its outputs; fused_op.py calls the functions here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import mlx.core as mx

from ..kernels.launch import ABSENT, Arrays, Launch, Outputs, Values
from .tiling import Tiling, padded

# The compile-time values that every kernel but prepare takes first, and those that prepare takes.
BASE_VALUES = ("In", "C", "DK", "DV", "SLICE", "HK", "HV", "GROUPS", "STAGES")
PREPARE_VALUES = ("In", "C", "DK", "HK", "HV", "GROUPS", "UNSTAGED", "MASKED", "SEGMENTED")
SCAN_MEMORY_VALUES = ("In", "C", "DK", "SLICE", "STAGES", "SPLIT", "UNSTAGED")
# The outputs of `prepare`.
PREPARED = ("solve", "scores", "factors")
# The kernel's argument after `initial`: whether it is a state, and not the array of `no_initial_state`.
_HAS_INITIAL_STATE = "initial_shape[3] == DK"


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


@lru_cache(maxsize=256)
def _values(tiling: Tiling, names: tuple[str, ...], groups: int, slice_rows: int, stages: int) -> Values:
    values: Values = {
        "In": tiling.dtype,
        "C": tiling.chunk,
        "DK": tiling.key_size,
        "DV": tiling.value_size,
        "SLICE": slice_rows,
        "HK": tiling.key_heads,
        "HV": tiling.value_heads,
        "GROUPS": groups,
        "STAGES": stages,
        "SPLIT": tiling.split,
        "OVERLAY": tiling.overlay,
        "UNSTAGED": tiling.unstaged,
        "MASKED": tiling.masked,
        "SEGMENTED": tiling.segmented,
    }
    return {name: value for name, value in values.items() if name in names}


@cache
def call_arguments(inputs: tuple[str, ...], present: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the text of a kernel's arguments: all its inputs, of which `present` are there, and its outputs."""
    texts = {name: (name if name in present else ABSENT) for name in inputs}
    if "initial" in texts:
        texts["initial"] += f", {_HAS_INITIAL_STATE}"
    return (*texts.values(), *outputs)


def make_launch(
    name: str,
    tiling: Tiling,
    input_names: tuple[str, ...],
    inputs: Arrays,
    outputs: Outputs,
    *,
    memory: tuple[str, tuple[str, ...], int],
    blocks: tuple[int, int, int],
    groups: int,
    values: tuple[str, ...],
    slice_rows: int | None = None,
    stages: int | None = None,
) -> Launch:
    """Return the launch of the kernel gated_delta_`name`.

    Args:
        name: The kernel's name after `gated_delta_`.
        tiling: How the call is divided.
        input_names: The kernel's inputs, in its order, those that this call leaves out among them.
        inputs: The arrays that this call has, by name.
        outputs: Shapes and dtypes by name, in the kernel's order.
        memory: The struct that lays out its shared memory, that struct's compile-time values, and the bytes.
        blocks: The grid, in blocks.
        groups: Groups of 32 lanes per block.
        values: The kernel's compile-time values, in its order.
        slice_rows: The value of SLICE; by default that of the scans.
        stages: The value of STAGES; by default that of the tiling.
    """
    struct, memory_order, size = memory
    return Launch(
        name=f"gated_delta_{name}",
        memory=struct,
        inputs=inputs,
        outputs=outputs,
        values=_values(tiling, values, groups, slice_rows or tiling.slice, stages or tiling.stages),
        order=values,
        memory_order=memory_order,
        blocks=blocks,
        bytes=size,
        groups=groups,
        arguments=call_arguments(input_names, tuple(inputs), tuple(outputs)),
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
    names = ("q", "k", "log_g", "beta", "mask", "segments")
    triangle = ((*chunks, tiling.triangle_elements), mx.float32)
    return make_launch(
        "prepare",
        tiling,
        names,
        x.named(*names),
        {"solve": triangle, "scores": triangle, "factors": ((*chunks, 3, tiling.chunk), mx.float32)},
        memory=("PrepareMemory", ("In", "C", "DK", "UNSTAGED"), tiling.prepare_bytes),
        blocks=(tiling.chunks, tiling.value_heads, tiling.batch),
        groups=4,
        values=PREPARE_VALUES,
    )


def _scan(name: str, tiling: Tiling, input_names: tuple[str, ...], inputs: Arrays, outputs: Outputs) -> Launch:
    return make_launch(
        name,
        tiling,
        input_names,
        inputs,
        outputs,
        memory=("ScanMemory", SCAN_MEMORY_VALUES, tiling.scan_bytes),
        blocks=tiling.scan_blocks,
        groups=tiling.scan_groups,
        values=(*BASE_VALUES, "SPLIT", "UNSTAGED", "MASKED"),
    )


def scan(tiling: Tiling, x: KernelInputs, prepared: Arrays) -> Launch:
    """Return the launch of the scan, with the outputs of `prepare`. It writes `scan_outputs`."""
    names = ("q", "k", "v", "mask", "initial")
    return _scan("scan", tiling, (*names, *prepared), x.named(*names) | prepared, scan_outputs(tiling, x))


def reverse(tiling: Tiling, x: KernelInputs, prepared: Arrays, cotangents: Arrays) -> Launch:
    """Return the launch of the reverse scan, with the outputs of `prepare`, and dy and d_last.

    It writes `reverse_outputs`.
    """
    names = ("q", "k", "dy", "mask", "d_last", *prepared)
    inputs = x.named("q", "k", "mask") | cotangents | prepared
    return _scan("reverse", tiling, names, inputs, reverse_outputs(tiling, x))


def gradient_outputs(tiling: Tiling, x: KernelInputs) -> Outputs:
    """Return the outputs of every gradient kernel: dq, dk, d_log_g in fp32, and d_beta in the dtype of beta."""
    return {
        "dq": (x.q.shape, tiling.dtype),
        "dk": (x.k.shape, tiling.dtype),
        "d_log_g": (x.log_g.shape, mx.float32),
        "d_beta": (x.beta.shape, x.beta.dtype),
    }


def gradients_of(
    name: str, tiling: Tiling, x: KernelInputs, scanned: Arrays, memory: str, values: tuple[str, ...]
) -> Launch:
    """Return the launch of either gradient kernel; `values` are compile-time values of one of them alone."""
    names = ("q", "k", "log_g", "mask", "segments")
    further = (*values, "UNSTAGED")
    return make_launch(
        name,
        tiling,
        (*names, *scanned),
        x.named(*names) | scanned,
        gradient_outputs(tiling, x),
        memory=(memory, ("In", "C", "DK", "SLICE", "STAGES", *further), tiling.gradient_bytes),
        blocks=(tiling.chunks, tiling.key_heads, tiling.batch),
        groups=tiling.gradient_groups,
        values=(*BASE_VALUES, *further, "MASKED", "SEGMENTED"),
        slice_rows=tiling.gradient_slice,
    )


def gradients(tiling: Tiling, x: KernelInputs, scanned: Arrays) -> Launch:
    """Return the launch of the gradient kernel, which writes dq, dk, and d_log_g and d_beta in fp32.

    `scanned` holds factors, states, d_states, u, d_right and dy.
    """
    return gradients_of("gradients", tiling, x, scanned, "GradientMemory", ("OVERLAY",))
