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
from deltatune.ops.attention.long_launches import MOST
from metal_front_end import compiling, launches, registers, text
from metal_front_end.launches import RecordedCall

FRONT_END = Path(__file__).parent / "metal_front_end"
PAGE = Path(__file__).parent.parent / "docs" / "reference" / "metal.md"
TOKENS = 32_768
# What a lane has at most while a group's lanes are all there.
MOST_REGISTERS = 128
INTRODUCTION = f"""# Kernels on Apple GPUs

Not yet run on Apple hardware. Each table is a call with one row of {TOKENS:,} tokens, forward and backward; other
lengths change the number of blocks, or of steps, alone. A dispatch is one launch. Its blocks run side by side as far as
the GPU has room; the steps of a block (chunks of tokens, or tiles of keys or queries) follow one another, so that a
dispatch lasts at least as long as one block. macOS ends what runs for more than about 5 s: attention of long rows is
divided into launches of {MOST:.2g} multiplications at most, and the blocks are those of the last one.

Registers: the most fp32 values that are alive at one place of the kernel in LLVM's language, with everything inlined,
without addresses and counters. That is an estimate, as Apple's compiler orders instructions by itself; an Apple GPU has
{MOST_REGISTERS} a lane. Threadgroup memory is 32,768 bytes at most. `scripts/metal_kernels.py` writes this page.
"""


def calls() -> list[RecordedCall]:
    """The calls of the tables: heads of Qwen3.5, of Kimi Linear and of a full fine-tuning in fp32."""
    return [
        launches.of_gated_delta(mx.bfloat16, 128, (16, 32), tokens=TOKENS),
        launches.of_gated_delta(mx.float32, 128, (16, 32), tokens=TOKENS),
        launches.of_gated_delta(mx.bfloat16, 128, (32, 32), tokens=TOKENS, per_channel=True),
        launches.of_attention(mx.bfloat16, 256, (16, 4), tokens=TOKENS),
        launches.of_attention(mx.bfloat16, 128, (16, 4), tokens=TOKENS),
    ]


def table(call: RecordedCall) -> str:
    """A table of one call, a row for each kernel."""
    rows = ["| kernel | launches | blocks | lanes a block | steps a block | threadgroup bytes | fp32 registers |"]
    rows.append("|---|---|---|---|---|---|---|")
    counts = Counter(launch.name for launch in call.launches)
    for launch in {launch.name: launch for launch in call.launches}.values():
        x, y, z = launch.blocks
        floats = registers.live_floats(compiling.lowered(launch))
        words = f"**{floats}**" if floats > MOST_REGISTERS else str(floats)
        cells = [f"`{launch.name}`", counts[launch.name], f"{x * y * z:,}", launch.groups * 32, f"{_steps(launch):,}"]
        rows.append(f"| {' | '.join(map(str, [*cells, f'{launch.bytes:,}', words]))} |")
    return f"## {call.name}\n\n" + "\n".join(rows)


def _steps(launch: launches.Launch) -> int:
    """How many chunks or tiles the slowest block goes through, one after another."""
    if launch.name in ("attention_forward", "attention_queries", "attention_keys"):
        # A block of keys goes through the queries of all heads that read them.
        shared = launch.inputs["q"].shape[1] // launch.inputs["k"].shape[1] if launch.name == "attention_keys" else 1
        return TOKENS // TILE * shared
    if launch.name.endswith(("scan", "reverse")):
        return -(-TOKENS // int(launch.values["C"]))
    return 1


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
