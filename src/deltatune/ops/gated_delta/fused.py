"""The fused kernels for one gate per head and for a gate per key channel: prepare and scan, reverse and gradients.

The first two run forward, the others backward. They are in ops/kernels/gated_delta, where each file explains its
outputs. tiling.py plans their launches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..kernels.launch import Kernel

# The compile-time values that every kernel but prepare takes first, and those that prepare takes.
BASE_VALUES = ("In", "C", "DK", "DV", "SLICE", "HK", "HV", "GROUPS", "STAGES")
PREPARE_VALUES = ("In", "C", "DK", "HK", "HV", "GROUPS", "UNSTAGED", "MASKED", "SEGMENTED", "ERASES")
PREPARE_INPUTS = ("q", "k", "log_g", "beta", "mask", "segments")
SCAN_VALUES = (*BASE_VALUES, "SPLIT", "UNSTAGED", "MASKED", "ERASES")
GRADIENT_VALUES = (*BASE_VALUES, "UNSTAGED", "MASKED", "SEGMENTED", "ERASES")
# The outputs of `prepare`.
PREPARED = ("solve", "scores", "factors")
# The outputs of a scan and of a reverse scan, and the arrays of the gradient kernel.
SCANNED = ("y", "states", "u", "last")
REVERSED = ("d_states", "d_right", "dv", "d_initial")
GRADIENT_INPUTS = ("q", "k", "log_g", "mask", "segments", "factors", "states", "d_states", "u", "d_right", "dy")
# Those that the body takes: v where nothing is erased.
GRADIENT_ARRAYS = (*GRADIENT_INPUTS[:-1], "v", "dy")
GRADIENTS_OUT = ("dq", "dk", "d_log_g", "d_beta")
# The arrays that an erase alone needs. In calls without one the body gets another of the same type, which it leaves.
_INSTEAD = {"beta": "log_g", "solve": "factors", "keys": "queries", "d_beta": "d_log_g"}


def of_shape(name: str, values: tuple[str, ...], *, channel: bool = False) -> str:
    """Return the text of a type with these compile-time values, for a gate per head or per key channel."""
    return f"{name}<{', '.join(values)}, {str(channel).lower()}>"


class Kernels(NamedTuple):
    """The kernels of a kind of tilings, by phase, and the outputs of `prepare`."""

    prepare: Kernel
    scan: Kernel
    reverse: Kernel
    gradients: Kernel
    prepared: tuple[str, ...] = PREPARED


def bodies(*names: str) -> tuple[str, ...]:
    """Return the files of these names among the bodies of the gated delta rule."""
    return tuple(f"gated_delta/{name}.h" for name in names)


PREPARE = Kernel(
    name="gated_delta_prepare",
    files=bodies("chunk", "prepare"),
    values=PREPARE_VALUES,
    sizes=("q_shape[1]",),
    inputs=PREPARE_INPUTS,
    arrays=(*PREPARE_INPUTS, *PREPARED),
    memory="PrepareMemory",
    memory_values=("In", "C", "DK", "UNSTAGED", "ERASES"),
)
SCAN = Kernel(
    name="gated_delta_scan",
    body="scan_chunks",
    files=bodies("chunk", "strips", "scan_memory", "scan"),
    values=SCAN_VALUES,
    template=of_shape("ScanShape", SCAN_VALUES),
    sizes=("q_shape[1]",),
    inputs=("q", "k", "v", "mask", "initial", *PREPARED),
    arrays=("q", "k", "ends", "v", "mask", "initial", *PREPARED, *SCANNED),
    memory="ScanMemory",
)
REVERSE = replace(
    SCAN,
    name="gated_delta_reverse",
    body="reverse_chunks",
    files=bodies("chunk", "strips", "scan_memory", "reverse"),
    inputs=("q", "k", "mask", "dy", "d_last", *PREPARED),
    arrays=("q", "k", "ends", "dy", "mask", "d_last", *PREPARED, *REVERSED),
)
GRADIENTS = Kernel(
    name="gated_delta_gradients",
    files=bodies("chunk", "gradient_slices", "gradient_gates", "gradients"),
    values=GRADIENT_VALUES,
    template=of_shape("GradientShape", GRADIENT_VALUES),
    sizes=("q_shape[1]",),
    inputs=GRADIENT_INPUTS,
    arrays=(*GRADIENT_ARRAYS, *GRADIENTS_OUT),
    memory="GradientMemory",
)
KERNELS = Kernels(PREPARE, SCAN, REVERSE, GRADIENTS)


def without_erase(kernels: Kernels) -> Kernels:
    """Return the same kernels for calls of linear_attention, where u is v, and R the gradient of v."""

    def without(kernel: Kernel, *values: str, **others: str) -> Kernel:
        instead = _INSTEAD | others
        return replace(
            kernel,
            name=kernel.name.replace("gated_delta", "linear_attention"),
            body=kernel.body or kernel.name,
            inputs=(*(name for name in kernel.inputs if name not in {"beta", *others}), *values),
            arrays=tuple(instead.get(name, name) for name in kernel.arrays),
        )

    return Kernels(
        prepare=without(kernels.prepare),
        scan=without(kernels.scan, u="last"),
        reverse=without(kernels.reverse, d_right="factors"),
        gradients=without(kernels.gradients, "v", u="factors", d_right="factors"),
        prepared=tuple(name for name in kernels.prepared if name not in _INSTEAD),
    )


LINEAR_KERNELS = without_erase(KERNELS)


# The further outputs of `prepare`: q, k and k at the chunk's end, decayed.
_SCALED = ("queries", "keys", "ends")
# The blocks of the prepare kernel that fit on a multiprocessor in bf16: each mostly waits, so that more are faster.
_CHANNEL_PREPARE_RESIDENT = 3
# channel.h calls functions in the files of kernels with one gate per head.
_OF_SCANS = ("chunk", "prepare", "strips", "scan_memory", "scan", "reverse")
_OF_GRADIENTS = ("gradient_slices", "gradient_gates", "gradients")
FILES = bodies(*_OF_SCANS, *_OF_GRADIENTS, "channel", "channel_positions", "channel_gradients")

CHANNEL_PREPARE = replace(
    PREPARE,
    name="gated_delta_channel_prepare",
    files=FILES,
    arrays=(*PREPARE_INPUTS, *PREPARED, *_SCALED),
    memory="ChannelPrepareMemory",
    bounded=True,
    resident=_CHANNEL_PREPARE_RESIDENT,
)
CHANNEL_SCAN = replace(
    SCAN,
    name="gated_delta_channel_scan",
    files=FILES,
    sizes=("v_shape[1]",),
    inputs=("v", "mask", "initial", *_SCALED, *PREPARED),
    arrays=(*_SCALED, "v", "mask", "initial", *PREPARED, *SCANNED),
    template=of_shape("ScanShape", SCAN_VALUES, channel=True),
)
CHANNEL_REVERSE = replace(
    CHANNEL_SCAN,
    name="gated_delta_channel_reverse",
    body="reverse_chunks",
    sizes=("dy_shape[1]",),
    inputs=("mask", "dy", "d_last", *_SCALED, *PREPARED),
    arrays=(*_SCALED, "dy", "mask", "d_last", *PREPARED, *REVERSED),
)
CHANNEL_GRADIENTS = replace(
    GRADIENTS,
    name="gated_delta_channel_gradients",
    files=FILES,
    template=of_shape("GradientShape", GRADIENT_VALUES, channel=True),
    memory="ChannelGradientMemory",
)
CHANNEL_KERNELS = Kernels(CHANNEL_PREPARE, CHANNEL_SCAN, CHANNEL_REVERSE, CHANNEL_GRADIENTS, (*PREPARED, *_SCALED))
LINEAR_CHANNEL_KERNELS = without_erase(CHANNEL_KERNELS)
