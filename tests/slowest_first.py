"""The order in which files of tests are handed to the processes that share them: the slowest first.

A slow file that comes last keeps one process working alone. Files that are not named here come after those that are,
the ones with most tests first, as pytest-xdist orders all of them by itself.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Files of some twenty seconds of a core and more, and slow ones of so few tests that they would come last.
SLOWEST = (
    "on_metal/test_programs.py",
    "ops/kernels/test_kernels_compile.py",
    "selftest/test_checks.py",
    "ops/kernels/test_hopper_gated_delta.py",
    "train/by_layer/test_bounded_runs.py",
    "train/saved/test_kills.py",
    "train/ending/test_peers.py",
    "train/test_distributed.py",
    "ops/kernels/test_low_rank.py",
    "patches/test_changed_upstream.py",
    "ops/kernels/test_host.py",
    "train/ending/test_interrupt.py",
    "examples/test_examples.py",
    "ops/kernels/test_hopper_expert_product.py",
    "train/test_resized.py",
    "oracle/test_replay.py",
    "oracle/test_vision_replay.py",
    "ops/kernels/test_attention.py",
    "fuzz/test_fuzz.py",
    "patches/tables/test_attention_memory.py",
    "train/by_layer/test_layer_passes.py",
    "doctor/test_doctor.py",
    "train/test_micro_batches.py",
    "commands/test_data_formats.py",
    "commands/test_chat.py",
    "commands/test_screens.py",
    "commands/test_run.py",
    "ops/kernels/test_adapted_products.py",
    "ops/kernels/test_planted.py",
    "ops/kernels/test_hopper_prepare.py",
    "demo/vision/test_run.py",
    "demo/test_run.py",
    "docs/test_as_typed.py",
    "docs/test_help.py",
    "docs/test_blocks.py",
    "ops/kernels/test_expert_product.py",
    "benchmarks/test_long_run.py",
    "machine/test_startup.py",
    "test_upstream.py",
    "train/saved/test_folder.py",
    "train/test_vision.py",
    "train/saved/test_outputs.py",
    "data/chats/test_rendering.py",
    "recipes/test_shipped.py",
    "commands/test_thinking.py",
    "commands/test_whole_models.py",
    "train/reports/test_live.py",
    "train/test_buffers.py",
    "commands/test_answer_ends.py",
)


def slowest_first(items: list[pytest.Item]) -> None:
    """Sort tests by file; those of a file stay together and in their order.

    Raises:
        pytest.UsageError: A file that is named above is not there.
    """
    missing = [name for name in SLOWEST if not (TESTS / name).is_file()]
    if missing:
        raise pytest.UsageError(f"tests/slowest_first.py names files that are not there: {', '.join(missing)}")
    ranks = {TESTS / name: rank for rank, name in enumerate(SLOWEST)}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -sizes[item.path], str(item.path)))
