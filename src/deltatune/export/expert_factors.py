"""Converts low-rank factors of experts between MLX's layout and that of PEFT's `target_parameters`.

MLX has factors a [E, r, in] and b [E, out, r] for each of gate, up and down. PEFT has A [E*r, in], expert by expert,
and B [out, r*E], with the columns of all experts of one rank index side by side; gate and up are one parameter of 2*out
rows.
"""

from __future__ import annotations

import mlx.core as mx

from ..machine.host_memory import as_numpy

Factors = tuple[mx.array, mx.array]


def fused(parts: dict[str, Factors], halves: tuple[str, ...]) -> Factors:
    """Join the factors of several matrices into factors of the matrix that holds them one below the other.

    `parts` has (a [E, r, in], b [E, out, r]) by name, and `halves` the names in the order of the joint matrix, all of
    one number of rows; one that is missing has no adapter. Returns a [E, sum of r, in] and b [E, rows of all, sum of
    r], block-diagonal.
    """
    present = [name for name in halves if name in parts]
    experts, rows = parts[present[0]][1].shape[:2]
    ranks = {name: parts[name][1].shape[2] for name in present}
    a = mx.concatenate([parts[name][0] for name in present], axis=1)
    blocks = []
    for name in halves:
        row = [parts[name][1] if other == name else mx.zeros((experts, rows, ranks[other])) for other in present]
        blocks.append(mx.concatenate(row, axis=2))
    return a, mx.concatenate(blocks, axis=1)


def split(a: mx.array, b: mx.array, halves: tuple[str, ...]) -> dict[str, Factors]:
    """Take factors a [E, r, in] and b [E, rows of all parts, r] of a joint matrix apart: the inverse of `fused`.

    Every part keeps the whole rank, unless b is block-diagonal as `fused` makes it: then each keeps its own block. A
    part with b = 0, beside another with b != 0, has no adapter.
    """
    pieces = dict(zip(halves, mx.split(b, len(halves), axis=1), strict=True))
    used = {name: as_numpy(mx.any(piece != 0, axis=(0, 1))) for name, piece in pieces.items()}
    rank = b.shape[2]
    width = b.shape[2] // len(halves)
    spans = {name: slice(index * width, (index + 1) * width) for index, name in enumerate(halves)}
    diagonal = {name: used[name][spans[name]] for name in halves}
    if rank % len(halves) == 0 and all(
        diagonal[name].any() and diagonal[name].sum() == used[name].sum() for name in halves
    ):
        return {name: (a[:, spans[name]], pieces[name][:, :, spans[name]]) for name in halves}
    trained = [name for name in halves if used[name].any()] or list(halves)
    return {name: (a, pieces[name]) for name in trained}


def to_peft(a: mx.array, b: mx.array) -> Factors:
    """Turn a [E, r, in] and b [E, out, r] into PEFT's A [E*r, in] and B [out, r*E]."""
    return a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


def from_peft(a: mx.array, b: mx.array, experts: int) -> Factors:
    """Turn PEFT's A [E*r, in] and B [out, r*E] into a [E, r, in] and b [E, out, r]."""
    return a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts).transpose(2, 0, 1)


def from_early_peft(a: mx.array, b: mx.array, experts: int) -> Factors:
    """Turn A [E*r, out] and B [in, r*E] of PEFT before 0.20 into a [E, r, in] and b [E, out, r].

    Those versions take the axes of a parameter [E, out, in] for (E, in, out), so that A stands on the output's side.
    """
    side_of_output, side_of_input = from_peft(a, b, experts)
    return side_of_input.swapaxes(1, 2), side_of_output.swapaxes(1, 2)
