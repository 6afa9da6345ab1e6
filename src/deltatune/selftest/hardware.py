"""Measures the times that decide which code is fast on this machine: implementations, packed matrices, the disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import mlx.core as mx

from ..doctor.implementations import right_here
from ..machine import backend
from ..machine.disk import disk_rate
from ..ops import operators
from ..ops.operator import timing
from ..ops.operator.operator import Operator
from ..ops.products.quantized_product import Quantization, packed_product
from .outcome import PASSED, Check, Outcome, not_run

_LENGTHS = (512, 2048, 8192)
_FEW = (64,)
_GROUP = 64
_BITS = 4


def _measured(times: Mapping[int, Mapping[str, timing.TrialTime]], unit: str) -> Outcome:
    """The outcome of measurements, by tokens or rows and by name."""
    facts = {size: {name: 1e3 * one.seconds for name, one in of_size.items()} for size, of_size in times.items()}
    parts = [
        f"{size:,} {unit}: {', '.join(f'{name} {ms:.1f} ms' for name, ms in of_size.items())}"
        for size, of_size in facts.items()
    ]
    return Outcome(PASSED, "; ".join(parts), facts={"milliseconds": facts})


def implementations(operator: Operator, quick: bool) -> Outcome:
    """Time a forward and a backward pass of each implementation of an operator that is right here, at each length."""
    if not operator.tries:
        return not_run("on a CPU MLX's operations alone serve")
    right = right_here(operator, operator.examples()[0])
    times = {}
    for length in _FEW if quick else _LENGTHS:
        case = operator.timed_case_of(next(iter(right.values())).shape, length=length)
        mx.eval(case.like)
        runs = {name: partial(case.call, checked) for name, one in right.items() if (checked := one.checked)}
        times[length] = timing.side_by_side(runs)
    return _measured(times, "tokens")


def products(quick: bool) -> Outcome:
    """Time products of rows with a dense matrix, with the same in 4 bits, and with that unpacked before."""
    narrow = not backend.computes_in_fp32()
    # A CPU's product with a packed matrix takes seconds.
    size = 4096 if narrow and not quick else 512
    weight = mx.random.normal((size, size), key=mx.random.key(0)).astype(mx.bfloat16 if narrow else mx.float32)
    packed = mx.quantize(weight, _GROUP, _BITS)
    how = Quantization(True, _GROUP, _BITS, "affine")
    times = {}
    for rows in _FEW if quick else _LENGTHS:
        x = mx.random.normal((rows, size), key=mx.random.key(1)).astype(weight.dtype)
        mx.eval(x, weight, packed)
        runs = {
            "dense": lambda x=x: [x @ weight.T],
            "4 bits": lambda x=x: [mx.quantized_matmul(x, *packed, group_size=_GROUP, bits=_BITS)],
            "unpacked first": lambda x=x: [packed_product(x, *packed, how)],
        }
        times[rows] = timing.side_by_side(runs)
    return _measured(times, "rows")


def disk(quick: bool) -> Outcome:
    """Measure how fast a file in the current folder is read, past the page cache and through it."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        file = Path(folder) / "random"
        file.write_bytes(os.urandom(2**20) * (4 if quick else 512))
        seconds = 0.1 if quick else 2.0
        rates = {name: disk_rate(file, seconds, cached=name == "cached") for name in ("uncached", "cached")}
    detail = ", ".join(f"{rate / 1e9:.2f} GB/s {name}" for name, rate in rates.items())
    return Outcome(PASSED, detail, facts={"bytes_per_second": rates})


def checks(quick: bool) -> Iterator[Check]:
    """The measurements, none of which can fail; `quick` makes them short."""
    for operator in operators.OPERATORS:
        yield Check(f"times of implementations: {operator.title}", partial(implementations, operator, quick))
    yield Check("times of products with packed matrices", partial(products, quick))
    yield Check("reading from the disk", partial(disk, quick))
