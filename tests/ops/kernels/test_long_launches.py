"""Long rows of attention on Apple GPUs are computed in parts, with the bits of a single launch."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from beside import load
from deltatune.ops.attention import fused_op
from deltatune.ops.attention.fused import FILES, TILE
from deltatune.ops.attention.fused_op import attention_fused
from deltatune.ops.kernels.launch import header, on

oracle = load(Path(__file__).parents[1] / "attention" / "oracle.py")
LENGTH, HEADS, SIZE = 200, (2, 1), 16
CASES = {
    "packed": {"segments": "long"},
    "a window as long as a part": {"window": 100, "segments": "long"},
    "sinks": {"with_sinks": True},
    "a piece of a row": {"queries": 100, "keys": LENGTH},
    "all keys": {"causal": False},
    "packed, all keys": {"causal": False, "segments": "long"},
}


@pytest.fixture(scope="module")
def machine(host_folder, host_module):
    return host_module.HostMachine(host_folder, header("metal", FILES))


@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_bits_of_one_launch(name, machine, monkeypatch):
    case = oracle.Case(name, **{"batch": 2, "heads": HEADS, "queries": LENGTH, "size": SIZE} | CASES[name])

    def computed():
        return oracle.differentiate(partial(attention_fused, machine="metal"), case)[0]

    def differentiate(launches):
        def execute(launch):
            launches.append((launch.name, launch.blocks))
            return machine.run(launch)

        machine.foresee(computed)
        with on(execute):
            return computed()

    whole, divided = [], []
    expected = differentiate(whole)
    monkeypatch.setattr(fused_op, "MOST_MULTIPLICATIONS", 2 * 2 * 3 * SIZE * LENGTH * LENGTH / 8)
    found = differentiate(divided)
    for key, array in expected.items():
        assert mx.isfinite(array).all()
        assert mx.array_equal(found[key].view(mx.uint32), array.view(mx.uint32)), key
    assert len(whole) == 4
    if name == "packed, all keys":
        assert divided == whole
        return
    for kernel in ("attention_forward", "attention_queries", "attention_keys"):
        tiles = [blocks[0] for each, blocks in divided if each == kernel]
        assert len(tiles) > 1, kernel
        assert sum(tiles) == next(blocks[0] for each, blocks in whole if each == kernel)


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window"),
    [(8192, 8192, True, 0), (3000, 8192, True, 0), (8192, 8192, True, 1000), (4096, 4096, False, 0)],
)
def test_parts_are_whole_tiles_with_about_as_many_pairs(queries, keys, causal, window, of_keys):
    found = fused_op.divided(queries, keys, causal, window, 2.0e6, of_keys)
    assert found[0][0] == 0
    assert found[-1][1] == (keys if of_keys else queries)
    assert all(one[1] == other[0] and one[1] % TILE == 0 for one, other in pairwise(found))
    query, key = np.arange(queries)[:, None] + keys - queries, np.arange(0, keys, TILE)
    visible = (key <= query) if causal else np.ones((queries, len(key)), bool)
    if window:
        visible &= key > query - window
    for first, last in found:
        part = visible[:, first // TILE : -(-last // TILE)] if of_keys else visible[first:last]
        rows = TILE * max(visible.sum(axis=0)) if of_keys else TILE * visible.sum(axis=1).max()
        assert part.sum() * TILE <= 2.0e6 + rows * TILE


def test_a_row_of_32k_tokens_is_no_launch_of_four_seconds():
    """Heads of Qwen3.5-0.8B: 8 of 256. A usual row is one launch."""
    pairs = fused_op.MOST_MULTIPLICATIONS / (8 * 4 * 256)
    assert len(fused_op.divided(32768, 32768, True, 0, pairs, of_keys=True)) == 7
    assert len(fused_op.divided(8192, 8192, True, 0, pairs)) == 1
