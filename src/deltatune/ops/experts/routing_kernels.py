"""Has MLX compile, on an NVIDIA GPU, its kernels for choosing experts and sorting tokens by them: one in a process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from ...machine import nvidia
from ...machine.mlx_builds import MlxBuild
from .tiles import Sorted

# Each process takes half a gigabyte of the GPU's memory, most of it CUDA's own.
_ROOM = 8e9
_LAYOUT = Sorted(tokens=2, top_k=2, experts=4, tokens_per_chunk=2)


def _chosen(scores: mx.array, indices: mx.array) -> list[mx.array]:
    """As routers take the scores of the experts that they have chosen."""
    return [mx.take_along_axis(scores, indices, axis=-1)]


def _gradients(scores: mx.array, indices: mx.array) -> list[mx.array]:
    return mx.vjp(lambda x: _chosen(x, indices), [scores], [mx.zeros(indices.shape, scores.dtype)])[1]


def _sorted(indices: mx.array) -> Any:
    return _LAYOUT.chunk(_LAYOUT.sort(indices.astype(mx.uint32)), 0, [])


# What each process computes of scores [2, 4] and indices [2, 2]; nobody looks at it. Each needs one kernel.
CASES: dict[str, Callable[[mx.array, mx.array], Any]] = {
    "chosen": _chosen,
    "gradients": _gradients,
    "experts": lambda _, indices: _sorted(indices).experts,
    "rows": lambda _, indices: _sorted(indices).row_of_pair,
    # As tiles.py takes the scores of sorted rows, and sorted rows for pairs.
    "scores": lambda scores, indices: scores.reshape(-1)[indices.astype(mx.uint32)],
    "sums": lambda _, indices: mx.zeros((4, 1))[indices.astype(mx.uint32)],
}


def builds(scores: mx.Dtype, indices: mx.Dtype) -> Iterator[MlxBuild]:
    """Start a process for each kernel that experts need whose router has scores and indices of these dtypes.

    None is started on a GPU without room for them, where they could take what the run's own trials need.
    """
    if (nvidia.free_memory() or 0) < _ROOM:
        return
    dtypes = [str(dtype).rpartition(".")[2] for dtype in (scores, indices)]
    for case in CASES:
        yield MlxBuild(__name__, case, *dtypes)


def computed(case: str, scores: mx.Dtype, indices: mx.Dtype) -> Any:
    """Return what a process computes, not computed yet."""
    return CASES[case](mx.zeros((2, 4), scores), mx.array([[0, 1], [1, 2]]).astype(indices))


if __name__ == "__main__":
    name, *dtypes = sys.argv[1:]
    mx.eval(computed(name, *(getattr(mx, dtype) for dtype in dtypes)))
