#!/usr/bin/env python3
"""Write docs/reference/metal.md: what each kernel asks of an Apple GPU.

usage: scripts/metal_kernels.py [--print]

Launches are those of calls with the heads of released models. Registers are estimated from LLVM's language
(scripts/metal_front_end/registers.py). Nothing is run.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from pathlib import Path

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx

from deltatune.ops.attention.fused import TILE
from deltatune.ops.gated_delta.fused_passes import MOST_STEPS
from deltatune.ops.kernels.launch import MOST_MULTIPLICATIONS
from metal_front_end import compiling, launches, registers, text
from metal_front_end.launches import RecordedCall

FRONT_END = Path(__file__).parent / "metal_front_end"
PAGE = Path(__file__).parent.parent / "docs" / "reference" / "metal.md"
TOKENS = 32_768
# The products of a pair of a query and a key, as multiples of the sizes of a key head and of a value head.
OF_KEYS = {"attention_keys": (2, 2), "attention_keys_alone": (2, 1), "attention_values_alone": (1, 1)}
PRODUCTS = {"attention_forward": (1, 1), "attention_queries": (2, 1)} | OF_KEYS
# What a lane has at most while a group's lanes are all there.
MOST_REGISTERS = 128
INTRODUCTION = f"""# Kernels on Apple GPUs

Not yet run on Apple hardware. Each table is a call with one row of {TOKENS:,} tokens, forward and backward; other
lengths change the number of blocks, or of steps, alone. A dispatch is one launch. Its blocks run side by side as far as
the GPU has room; the steps of a block (chunks of tokens, or tiles of keys or queries) follow one another. Seconds are
the multiplications of the longest launch at {MOST_MULTIPLICATIONS:.2g} a second, half of what an M1 can do. macOS ends
what runs for more than about 5 s, so that attention, and scans over more than {MOST_STEPS:,} chunks, are divided into
launches of one second; blocks are those of the last one.

Registers: the most fp32 values that are alive at one place of the kernel in LLVM's language, with everything inlined,
without addresses and counters. That is an estimate, as Apple's compiler orders instructions by itself; an Apple GPU has
{MOST_REGISTERS} a lane. Heads wider than 128 in the gated delta rule, which no released model has, need up to 172.
Threadgroup memory is 32,768 bytes at most. `scripts/metal_kernels.py` writes this page.
"""


def calls() -> list[RecordedCall]:
    """The calls of the tables: heads of Qwen3.5, Olmo Hybrid and Kimi Linear, and of a full fine-tuning in fp32."""
    return [
        launches.of_gated_delta(mx.bfloat16, 128, (16, 32), tokens=TOKENS),
        launches.of_gated_delta(mx.float32, 128, (16, 32), tokens=TOKENS),
        launches.of_gated_delta(mx.bfloat16, 96, (30, 30), tokens=TOKENS),
        launches.of_gated_delta(mx.bfloat16, 128, (32, 32), tokens=TOKENS, per_channel=True),
        launches.of_attention(mx.bfloat16, 256, (16, 4), tokens=TOKENS),
        launches.of_attention(mx.bfloat16, 128, (16, 4), tokens=TOKENS),
    ]


def table(call: RecordedCall) -> str:
    """A table of one call, a row for each kernel."""
    heads = ("kernel", "launches", "blocks", "lanes a block", "steps a block", "seconds", "threadgroup bytes")
    rows = [f"| {' | '.join((*heads, 'fp32 registers'))} |", "|---" * 8 + "|"]
    counts = Counter(launch.name for launch in call.launches)
    for launch in {launch.name: launch for launch in call.launches}.values():
        x, y, z = launch.blocks
        floats = registers.live_floats(compiling.lowered(launch))
        words = f"**{floats}**" if floats > MOST_REGISTERS else str(floats)
        cells = [f"`{launch.name}`", counts[launch.name], f"{x * y * z:,}", launch.groups * 32, f"{_steps(launch):,}"]
        longest = max(_multiplications(each) for each in call.launches if each.name == launch.name)
        cells += [f"{longest / MOST_MULTIPLICATIONS:.2g}", f"{launch.bytes:,}", words]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return f"## {call.name}\n\n" + "\n".join(rows)


def _steps(launch: launches.Launch) -> int:
    """How many chunks or tiles the slowest block goes through, one after another."""
    if launch.name in PRODUCTS:
        # A block of keys goes through the queries of all heads that read them.
        shared = launch.inputs["q"].shape[1] // launch.inputs["k"].shape[1] if launch.name in OF_KEYS else 1
        return TOKENS // TILE * shared
    if launch.name.endswith(("scan", "reverse")):
        return -(-TOKENS // int(launch.values["C"]))
    return 1


def _multiplications(launch: launches.Launch) -> float:
    """About how many multiplications of two numbers a launch does."""
    x, y, z = launch.blocks
    if launch.name in PRODUCTS:
        of_keys, of_values = PRODUCTS[launch.name]
        queries, keys = launch.inputs["q"].shape[2], launch.inputs["k"].shape[2]
        rows, others = (min(x * TILE, keys), queries) if launch.name in OF_KEYS else (queries, keys)
        # Of its rows, the last sees all others, or the first is seen by all.
        pairs = rows * (others - (rows - 1) / 2)
        heads = launch.inputs["q"].shape[0] * launch.inputs["q"].shape[1]
        return heads * pairs * (of_keys * launch.values["D"] + of_values * launch.values["DV"])
    if launch.name == "attention_delta":
        return float(launch.inputs["y"].size)
    chunk, size = int(launch.values["C"]), int(launch.values["DK"])
    if launch.name.endswith("prepare"):
        return x * y * z * chunk * chunk * (size + chunk)
    if launch.name.endswith(("scan", "reverse")):
        return x * y * z * _steps(launch) * int(launch.values["SLICE"]) * chunk * 4 * (size + chunk)
    repeats = int(launch.values["HV"]) // int(launch.values["HK"])
    return x * y * z * repeats * chunk * (3 * size * int(launch.values["DV"]) + 8 * chunk * size)


def made_from() -> str:
    """A digest of everything in this repository that the page depends on."""
    texts = [
        file.read_text(encoding="utf-8") for file in (Path(__file__), *sorted(FRONT_END.iterdir())) if file.is_file()
    ]
    for call in calls():
        texts += [f"{launch.blocks} {launch.bytes}\n{text.kernel(launch)}" for launch in call.launches]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def page() -> str:
    """The whole page."""
    return "\n\n".join([INTRODUCTION.rstrip(), *map(table, calls()), f"<!-- made from {made_from()} -->"]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the page in place of writing it")
    if parser.parse_args().print:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")
