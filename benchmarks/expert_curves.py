"""Draws peak memory and live buffers of the expert block, forward and backward, by rank and by number of experts.

usage: DELTATUNE_THREADS=1 python benchmarks/expert_curves.py docs/experts.svg [more.png]

It compares deltatune's block with mlx-lm's layers and LoRA, on 512 tokens of width 256 in fp32, with inner width 96,
8 experts a token, and 64 experts and rank 8 where they do not vary. Buffers are counted in MLX's allocator
(counted_allocator.py, Linux CPUs only) beyond the inputs. A figure is the largest of several calls, since a CPU that
keeps up with the queue frees buffers earlier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

BASE = {"tokens": 512, "experts": 64, "k": 8, "outer": 256, "inner": 96, "rank": 8}
SWEEPS = {"rank": (1, 2, 4, 8, 16, 32, 64), "experts": (8, 16, 32, 64, 128, 256, 512)}
TOKENS = (128, 2048)
CALLS = 5
Point = dict[str, float]


def measure(make: Callable[..., Any], change: dict[str, int], counter: Any) -> Point:
    """The peak of a gradient computation beyond its inputs in MB and buffers, and MB of gradients and of adapters."""
    import mlx.core as mx

    from experts import FACTORS, arrays, flat, gradient

    given = arrays(BASE | change, "float32")
    function, arguments = gradient(make(given), given)
    buffers = size = own = 0
    for _ in range(CALLS):
        mx.synchronize()
        counter.reset()
        before = counter.now()
        result = function(*arguments)
        mx.eval(result)
        now = counter.now()
        buffers = max(buffers, now.peak_buffers - before.buffers)
        size = max(size, now.peak_bytes - before.bytes)
        own = sum(leaf.nbytes for leaf in flat(result))
        del result
    adapters = sum(given[name][factor].nbytes for name in FACTORS for factor in ("lora_a", "lora_b"))
    return {"buffers": buffers, "peak": size / 1e6, "gradients": own / 1e6, "adapters": adapters / 1e6}


def draw(found: dict[tuple[str, str, int], Point], heading: str, path: Path) -> None:
    """Draw four panels: memory above, buffers below; ranks on the left, numbers of experts on the right."""
    import matplotlib.pyplot as plt

    from plot import COLOURS, axes

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "deltatune"})
    figure, panels = plt.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex="col", sharey="row")
    for column, (name, values) in enumerate(SWEEPS.items()):
        ours, theirs = ([found[who, name, value] for value in values] for who in ("deltatune", "mlx-lm"))
        lines = {
            "mlx-lm": ([p["peak"] for p in theirs], "o-", COLOURS[1]),
            "deltatune": ([p["peak"] for p in ours], "o-", COLOURS[0]),
            "gradients alone, part of both": ([p["gradients"] for p in ours], "--", COLOURS[5]),
        }
        for label, (heights, style, colour) in lines.items():
            panels[0][column].plot(values, heights, style, label=label, color=colour, markersize=3, linewidth=1.4)
        for points, colour in ((theirs, COLOURS[1]), (ours, COLOURS[0])):
            heights = [p["buffers"] for p in points]
            panels[1][column].plot(values, heights, "o-", color=colour, markersize=3, linewidth=1.4)
        for row, label in enumerate(("MB beyond the inputs", "live buffers beyond the inputs")):
            axes(panels[row][column], label if column == 0 else "", name if row == 1 else "", logarithmic=False)
            panels[row][column].set_xticks(values)
    for row, name in enumerate(("peak", "buffers")):
        panels[row][0].set_ylim(0, 1.1 * max(point[name] for (_, by, _), point in found.items() if by in SWEEPS))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(heading, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    plt.close(figure)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

    # isort: split
    from counted_allocator import Counter
    from experts import ours, theirs
    from machine import heading

    counter, found = Counter(), {}
    print(f"{heading()}; {BASE}\n")
    print("| | | live buffers | MB beyond the inputs | of which gradients | MB of adapters |\n" + "|---" * 6 + "|")
    for name, values in {**SWEEPS, "tokens": TOKENS}.items():
        for value in values:
            for who, make in (("deltatune", ours), ("mlx-lm", theirs)):
                point = found[who, name, value] = measure(make, {name: value}, counter)
                numbers = f"{point['peak']:.1f} | {point['gradients']:.1f} | {point['adapters']:.1f}"
                print(f"| {name} {value:,} | {who} | {point['buffers']} | {numbers} |", flush=True)
    heading = "Routed experts, forward and backward, 512 tokens of 256, inner size 96, 8 experts a token, fp32, CPU"
    for path in sys.argv[1:]:
        draw(found, f"{heading}; {date.today()}", Path(path))


if __name__ == "__main__":
    main()
