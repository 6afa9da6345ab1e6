"""The inverse of a unit lower-triangular matrix, by forward substitution in blocks.

Repeated squaring of the strict part would take fewer steps, but its powers explode when keys repeat, as they do in real
text. So it is not used.
"""

from __future__ import annotations

import mlx.core as mx

from ...machine import backend

BLOCK = 16


def unit_lower_inverse(strict: mx.array) -> mx.array:
    """Return (I + strict)^-1, for strictly lower triangular matrices [..., C, C] in fp32; C is 16 times a power of two.

    On a CPU, LAPACK's strtri computes it, which is itself a blocked substitution; elsewhere `blocked_inverse` does.
    Source: Golub and Van Loan, Matrix Computations, 3.1.
    """
    size = strict.shape[-1]
    identity = mx.eye(size)
    if backend.uses_blas():
        return mx.linalg.tri_inv(strict + identity)
    return blocked_inverse(strict)


def blocked_inverse(strict: mx.array) -> mx.array:
    """Return the same as `unit_lower_inverse` from array operations alone, for devices without LAPACK.

    Diagonal blocks of 16 are inverted by substitution. Then two neighbouring blocks L and M, with the block A below L
    and left of M, merge into one with the inverse [[L^-1, 0], [-M^-1 A L^-1, M^-1]], until one block is left.
    """
    inverse = _substitute(_diagonal_blocks(strict, BLOCK))
    width = BLOCK
    while width < strict.shape[-1]:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _diagonal_blocks(strict, 2 * width)[..., width:, :width]
        corner = -(lower @ (below @ upper))
        top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([corner, lower], axis=-1)], axis=-2)
        width *= 2
    return inverse.squeeze(-3)


def _diagonal_blocks(matrix: mx.array, width: int) -> mx.array:
    """Return the diagonal blocks [..., C / width, width, width] of a matrix [..., C, C]."""
    size = matrix.shape[-1]
    blocks = [matrix[..., start : start + width, start : start + width] for start in range(0, size, width)]
    return mx.stack(blocks, axis=-3)


def _substitute(strict: mx.array) -> mx.array:
    """Invert blocks by substitution: once row j of the inverse is known, it is eliminated from every row below."""
    size = strict.shape[-1]
    inverse = mx.broadcast_to(mx.eye(size), strict.shape)
    for j in range(size - 1):
        inverse = inverse - strict[..., :, j : j + 1] * inverse[..., j : j + 1, :]
    return inverse
