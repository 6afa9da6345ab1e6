"""The order in which files of tests are handed to the processes that share them: the slowest first.

A slow file that comes last keeps one process working alone. Files that are not named here come after those that are,
the ones with most tests first, as pytest-xdist orders all of them by itself.
"""

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Files that take 10 s of a core and more, as measured in November 2026, and two that wait for as long.
SLOWEST = (
    "on_metal/test_programs.py",
    "ops/kernels/test_hopper_gated_delta.py",
    "train/by_layer/test_bounded_runs.py",
    "docs/test_as_typed.py",
    "selftest/test_checks.py",
    "ops/kernels/test_low_rank.py",
    "ops/kernels/test_kernels_compile.py",
    "plan/test_layers_planned.py",
    "train/by_layer/test_bounded_commands.py",
    "train/ending/test_peers.py",
    "demo/test_run.py",
    "plan/test_advice.py",
    "train/test_distributed.py",
    "ops/kernels/test_host.py",
    "train/by_layer/test_layer_pictures.py",
    "examples/test_examples.py",
    "patches/tables/test_attention.py",
    "train/test_resized.py",
    "train/saved/test_kills.py",
    "train/ending/test_interrupt.py",
    "on_metal/test_macos.py",
    "plan/test_few_layers.py",
    "plan/test_layer_inputs_planned.py",
    "train/ending/test_overflowing_ranks.py",
    "train/saved/test_resume.py",
    "test_cli.py",
    "patches/tables/test_one_row_products.py",
    "ops/gated_delta/test_chunk.py",
    "plan/test_long_rows.py",
    "train/reports/test_samples.py",
    "commands/test_surroundings.py",
    "data/chats/test_rendering.py",
    "patches/test_changed_upstream.py",
    "recipes/test_shipped.py",
    "plan/test_images.py",
    "patches/tables/test_pointwise_models.py",
    "docs/test_help.py",
    "train/test_vision.py",
)


def slowest_first(items: list[pytest.Item]) -> None:
    """Sort tests by file; those of a file stay together, in their order. A named file that is missing is an error."""
    missing = [name for name in SLOWEST if not (TESTS / name).is_file()]
    if missing:
        raise pytest.UsageError(f"tests/slowest_first.py names files that are not there: {', '.join(missing)}")
    ranks = {TESTS / name: rank for rank, name in enumerate(SLOWEST)}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -sizes[item.path], str(item.path)))
