"""Long rows of attention on Apple GPUs are computed in parts, with the bits of a single launch."""

from functools import partial
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.attention import fused_op
from deltatune.ops.attention.fused import FILES, TILE
from deltatune.ops.attention.fused_op import attention_fused
from deltatune.ops.kernels.launch import header, on

CASES = {
    "causal": {},
    "packed": {"segments": True},
    "a window": {"window": 50},
    "a window as long as a part": {"window": 100, "segments": True},
    "sinks": {"with_sinks": True},
    "a piece of a row": {"queries": 100},
    "all keys": {"causal": False},
    "packed, all keys": {"causal": False, "segments": True},
}
LENGTH, KEY_HEADS, HEADS, SIZE = 200, 1, 2, 16


@pytest.fixture(scope="module")
def machine(host_folder, host_module):
    return host_module.HostMachine(host_folder, header("metal", FILES))


def differentiate(machine, launches: list, queries=LENGTH, segments=False, with_sinks=False, **options):
    """Return y and all gradients as NumPy arrays; the names and grids of the launches go to `launches`."""
    draw = np.random.default_rng(3)
    shapes = [(2, HEADS, queries, SIZE), *[(2, KEY_HEADS, LENGTH, SIZE)] * 2, (2, HEADS, queries, SIZE)]
    q, k, v, dy = (mx.array(draw.normal(size=shape).astype(np.float32)) for shape in shapes)
    sinks = [mx.array(draw.normal(size=HEADS).astype(np.float32))] if with_sinks else []
    if segments:
        options["segments"] = mx.array(np.cumsum(draw.uniform(size=(2, LENGTH)) < 0.02, axis=1).astype(np.int32))

    def execute(launch):
        launches.append((launch.name, launch.blocks))
        return machine.run(launch, seed=1)

    def call(*given):
        run = partial(attention_fused, machine="metal", scale=0.25, **options)
        return [run(*given[:3], sinks=given[3] if with_sinks else None)]

    with on(execute):
        outputs, gradients = mx.vjp(call, [q, k, v, *sinks], [dy])
    return [np.array(x) for x in (*outputs, *gradients)]


@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_bits_of_one_launch(name, machine, monkeypatch):
    whole, divided = [], []
    expected = differentiate(machine, whole, **CASES[name])
    monkeypatch.setattr(fused_op, "MOST_MULTIPLICATIONS", 2 * HEADS * 3 * SIZE * LENGTH * LENGTH / 8)
    found = differentiate(machine, divided, **CASES[name])
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(one).all()
        assert one.tobytes() == other.tobytes()
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
