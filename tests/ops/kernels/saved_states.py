"""What the scans save, as the Metal text writes it on the host machine, turned into what the CUDA text writes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

_LANES, _TILES = np.arange(32)[:, None, None], np.arange(8)[None, :, None]
_ELEMENTS = np.arange(8)[None, None, :]


def as_cuda(u: mx.array, value_size: int, chunk: int) -> mx.array:
    """Return u or R [B, HV, chunks, rows, chunk + 8] as two planes of bf16, with the tails of heads of 128 in place."""
    shape = u.shape
    rows, stride = shape[3], chunk + 8
    metal = np.array(u).reshape(-1, rows, stride)
    high = _bf16(metal[..., :chunk])
    low = _bf16(metal[..., :chunk] - _fp32(high))
    planes = np.zeros((len(metal), 2, rows, stride), np.uint16)
    planes[:, 0, :, :chunk], planes[:, 1, :, :chunk] = high, low
    tails = _tails(metal[..., chunk:].view(np.uint8).reshape(len(metal), rows, 32))
    planes[:, :, :, chunk:] = tails.view(np.uint16).transpose(0, 2, 1, 3)
    return mx.array(planes.reshape(-1).view(np.float32).reshape(shape))


def _tails(metal: np.ndarray) -> np.ndarray:
    """Return the tails [block, rows, plane, 16 bytes] as the CUDA text stores them, from rows of 32 bytes."""
    blocks, rows, _ = metal.shape
    # By strip and lane, two bytes for each tile of 16 columns, two bits for each element.
    lanes = metal.reshape(blocks, rows // 16, 16, 2, 16).transpose(0, 1, 3, 2, 4).reshape(blocks, -1, 32, 8, 2)
    words = lanes[..., 0].astype(np.uint32) | lanes[..., 1].astype(np.uint32) << 8
    found = words[..., None] >> (2 * np.arange(8, dtype=np.uint32)) & 3
    columns = _TILES * 16 + (_ELEMENTS >> 1 & 1) * 8 + (_LANES >> 2 & 2) * 2 + (_LANES & 1) * 2 + (_ELEMENTS & 1)
    by_place = np.zeros((blocks, rows // 16, 16, 128), np.uint8)
    by_place[:, :, (_ELEMENTS >> 2) * 8 + (_LANES >> 2 & 4) + (_LANES >> 1 & 3), columns] = found
    columns = _TILES * 16 + (_LANES & 3) * 2 + (_ELEMENTS & 1) + (_ELEMENTS >> 2) * 8
    places = (6 - _ELEMENTS // 2 * 2).astype(np.uint8)
    cuda = by_place[:, :, (_LANES >> 2) + (_ELEMENTS >> 1 & 1) * 8, columns] << places
    bytes_ = np.stack([np.bitwise_or.reduce(cuda[..., odd::2], axis=-1) for odd in (0, 1)], axis=-1)
    return bytes_.reshape(blocks, -1, 2, 16, 16).transpose(0, 1, 3, 2, 4).reshape(blocks, rows, 2, 16)


def _bf16(x: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bf16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
