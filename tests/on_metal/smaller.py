"""Smaller sizes for programs on the stand-in: its kernels run a thousand times slower than a GPU's.

A kernel's time goes with tokens x heads x head size squared. The doctor's classes have up to 32 heads of 128, for
which the host machine needs minutes each; these have two of 16. Values that are compiled into a kernel stay: dtypes,
masks, segments, gates per channel, grouped heads, windows, sinks, unequal sizes. Of the self-test each kind of gate, of
dtype, and packed rows stay; the thirty steps against transformers, the run from trained weights and the repetitions of
a measurement do not. `make on-metal` runs the real sizes and all.
"""

import dataclasses
from itertools import islice
from typing import Any

from deltatune.demo import flow
from deltatune.ops import operators
from deltatune.ops.attention import trial_case
from deltatune.ops.attention.trial_case import KernelShape
from deltatune.ops.gated_delta import trial_case as delta_case
from deltatune.ops.gated_delta.trial_case import ShapeClass
from deltatune.ops.operators import ATTENTION, GATED_DELTA
from deltatune.selftest import controls, replays, times, training

_FEW_HEADS, _HEAD_SIZE = 2, 16


def declare() -> None:
    """Give the doctor, the self-test's training and the demo smaller sizes in this process."""
    # The other classes are among the workloads below.
    delta_case.MODELS = tuple(_smaller(shape) for shape in delta_case.MODELS[1::2])
    trial_case.HEADS = tuple(_smaller_heads(shape) for shape in trial_case.HEADS[2:5])
    delta_case.SMALL = delta_case.SMALL[1:2]
    replays._QUICK = ()
    times._CALLS = 1
    controls._SHORT, controls._LONG = 4, 8
    gated_delta = dataclasses.replace(GATED_DELTA, workloads=lambda quick: GATED_DELTA.workloads(quick)[::3])
    attention = dataclasses.replace(ATTENTION, workloads=lambda quick: ATTENTION.workloads(quick)[1:3])
    operators.OPERATORS = (gated_delta, attention)
    training.STEPS = 2
    checks_of_training = training.checks
    training.checks = lambda quick: islice(checks_of_training(quick), 1, None)
    options_of_training, options_of_demo = training._options, flow.options
    training._options = lambda *given: options_of_training(*given) | {"batch_size": 1, "max_seq_length": 64}

    def options(*given: Any, **more: Any) -> Any:
        return dataclasses.replace(options_of_demo(*given, **more), batch_size=2, val_batches=1)

    flow.options = options


def _smaller(shape: ShapeClass) -> ShapeClass:
    repeats = shape.value_heads // shape.key_heads
    heads = {"key_heads": _FEW_HEADS, "value_heads": _FEW_HEADS * repeats}
    return dataclasses.replace(shape, **heads, key_size=_HEAD_SIZE, value_size=_HEAD_SIZE)


def _smaller_heads(shape: KernelShape) -> KernelShape:
    return dataclasses.replace(shape, size=shape.size // 4, value_size=shape.value_size // 4)
