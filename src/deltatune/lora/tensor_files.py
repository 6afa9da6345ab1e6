"""Reads and writes safetensors files (https://huggingface.co/docs/safetensors).

MLX's own reader and writer do not notice a truncated file or a full disk, and cannot hold types that MLX lacks (8-bit
floats). Here headers are checked, and tensors of other files are copied byte for byte, so that untrained tensors of a
checkpoint survive a merge unchanged.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from ..errors import UserError
from ..machine import atomic_files, checksum
from ..machine.host_memory import bytes_of

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
# The format's letters for the kinds of MLX's types, of which the bits follow.
_LETTERS = {"float": "F", "bfloat": "BF", "int": "I", "uint": "U", "complex": "C"}
_LARGEST_HEADER = 100_000_000
_COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file: its type by the format's name, its shape, and the place of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    # The offset of the first byte from the start of the file, and the number of bytes.
    start: int
    size: int
    path: Path

    def equals(self, other: StoredTensor) -> bool:
        """Whether another tensor has the same type, shape and bytes."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        with self.path.open("rb") as mine, other.path.open("rb") as theirs:
            mine.seek(self.start)
            theirs.seek(other.start)
            pieces = (min(_COPY_BYTES, self.size - at) for at in range(0, self.size, _COPY_BYTES))
            return all(mine.read(count) == theirs.read(count) for count in pieces)

    def write(self, out: BinaryIO) -> None:
        """Copy the tensor's bytes to `out`."""
        with self.path.open("rb") as source:
            source.seek(self.start)
            remaining = self.size
            while remaining:
                piece = source.read(min(remaining, _COPY_BYTES))
                if not piece:
                    raise UserError(f"{self.path}: ends early; it changed while it was read: run the command again.")
                out.write(piece)
                remaining -= len(piece)


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file."""

    # Free text that the writer of the file stored.
    metadata: dict[str, str]
    # The tensors by name, in the file's order.
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file; UserError for one that is truncated, corrupt or unreadable."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if prefix == b"version ":
                raise UserError(f"{path}: a pointer of Git LFS in the file's place; run `git lfs pull` in its folder.")
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise UserError(f"{path}: not a safetensors file, or cut short ({size:,} bytes); download it again.")
            header = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    try:
        content = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: corrupt safetensors header ({error}); download it again.") from error
    metadata = (content.pop("__metadata__", None) or {}) if isinstance(content, dict) else None
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: corrupt safetensors header (a table of tensors was expected); download it again.")
    entries = [(name, _stored_tensor(path, name, entry, 8 + length)) for name, entry in content.items()]
    entries.sort(key=lambda item: item[1].start)
    _check_extents(path, entries, 8 + length, size)
    return Header(metadata, dict(entries))


def _stored_tensor(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    try:
        dtype = entry["dtype"]
        shape = tuple(entry["shape"])
        start, end = entry["data_offsets"]
        bits = _BITS[dtype] * math.prod(shape)
        sound = all(isinstance(n, int) and n >= 0 for n in (start, end, *shape)) and (end - start) * 8 == bits
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: tensor {name!r} has a corrupt entry ({error!r}); download the file again.") from error
    if not sound:
        raise UserError(
            f"{path}: tensor {name!r} of type {dtype} and shape {shape} cannot fill the bytes {start} to {end}; "
            "download the file again."
        )
    return StoredTensor(dtype, shape, base + start, end - start, path)


def _check_extents(path: Path, entries: list[tuple[str, StoredTensor]], begin: int, size: int) -> None:
    """Check that the tensors' bytes follow one another from `begin` to the end of the file, at `size`."""
    expected = begin
    for name, stored in entries:
        if stored.start != expected:
            raise UserError(f"{path}: tensor {name!r} overlaps another or leaves a gap; download the file again.")
        expected = stored.start + stored.size
    if expected != size:
        fault = "is cut short" if size < expected else "has bytes that belong to no tensor"
        raise UserError(f"{path}: {fault}: {expected:,} bytes expected, {size:,} found; download it again.")


def _described(tensor: mx.array | StoredTensor) -> tuple[str, tuple[int, ...], int]:
    """Return the type of a tensor by the format's name, its shape, and its bytes."""
    if isinstance(tensor, StoredTensor):
        return tensor.dtype, tensor.shape, tensor.size
    kind = str(tensor.dtype).removeprefix("mlx.core.").rstrip("0123456789")
    name = "BOOL" if tensor.dtype == mx.bool_ else f"{_LETTERS[kind]}{8 * tensor.dtype.size}"
    return name, tensor.shape, tensor.nbytes


def write_tensors(path: Path, tensors: Mapping[str, mx.array | StoredTensor], metadata: Mapping[str, str]) -> None:
    """Write arrays, or tensors of other files, as a safetensors file, and wait until it is on the disk.

    `metadata` is stored in the header; if it holds checksum.BLANK, the file's checksum is put there.
    """
    entries = dict(tensors)
    # Unless the caller keeps the tensors too, a lazy array is freed as soon as it is written.
    del tensors
    described = {name: _described(tensor) for name, tensor in entries.items()}
    # The widest types come first, as in the reference writer, so that every tensor is aligned.
    order = sorted(entries, key=lambda name: -_BITS[described[name][0]])
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        dtype, shape, size = described[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        summed = checksum.SummedFile(out) if metadata.get(checksum.KEY) == checksum.BLANK else None
        file: Any = summed or out
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name in order:
            _write(entries.pop(name), file)
        if summed is not None:
            summed.seal()
        out.flush()
        atomic_files.flush(out.fileno())


def _write(tensor: mx.array | StoredTensor, out: BinaryIO) -> None:
    if isinstance(tensor, StoredTensor):
        tensor.write(out)
    else:
        for piece in bytes_of(tensor):
            out.write(piece.data)
