"""Reads shape, primitive and inputs of a lazy MLX array out of this process's memory.

MLX's Python interface does not lead from an array to its inputs: `mx.export_to_dot` gives names without shapes, and
`mx.export_function` refuses custom functions. The description itself (mlx/array.h, `ArrayDesc`) is in memory, so it is
read there; a wrong address raises an exception in place of a crash. Its offsets differ between MLX builds. They are
therefore measured on the loaded MLX with arrays of known contents, and LayoutError is raised where that fails.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx

# mlx/array.h: shape (SmallVector<int, 10>) and strides (SmallVector<int64_t, 10>) come first, then size and dtype.
_SHAPE = 8
_STRIDES = 80
_ITEM_SIZE = 196
_SEARCHED = 376
# mlx/primitives.h: a primitive starts with its vtable and its stream (20 bytes); members of its own class follow.
_STATE = 24
# The members start, end and step of Slice, and shape and strides of AsStrided, are SmallVectors of 72 bytes each.
_STEPS = _STATE + 144
_STRIDES_AS_GIVEN = _STATE + 72
# The size of a block in which memory that does not change is read.
_BLOCK = 1 << 16

Read = Callable[[int, int], bytes]
_WORD = struct.Struct("<Q").unpack_from
_PAIR = struct.Struct("<2Q").unpack_from


class LayoutError(Exception):
    """The loaded MLX stores its arrays in a way that deltatune does not know."""


class UnreadableError(LayoutError):
    """The address is not mapped, or this system has no way to read it safely."""


def reader() -> Read:
    """A function (address, size) -> bytes, which raises UnreadableError where nothing is mapped."""
    if sys.platform == "linux":
        return _linux()
    if sys.platform == "darwin":
        return _darwin()
    raise UnreadableError(f"no safe way to read memory is known on {sys.platform}")


def _linux() -> Read:
    try:
        file = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableError(f"/proc/self/mem cannot be opened: {error.strerror}") from error

    def read(address: int, size: int) -> bytes:
        try:
            content = os.pread(file, size, address)
        except (OSError, OverflowError) as error:
            raise UnreadableError(f"nothing at {address:#x}") from error
        if len(content) != size:
            raise UnreadableError(f"nothing at {address:#x}")
        return content

    weakref.finalize(read, os.close, file)
    return read


def _darwin() -> Read:
    # mach/mach_vm.h: kern_return_t mach_vm_read_overwrite(task, address, size, data, out size).
    system = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    task = ctypes.c_uint.in_dll(system, "mach_task_self_").value
    call = system.mach_vm_read_overwrite
    call.argtypes = [ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]

    def read(address: int, size: int) -> bytes:
        content = ctypes.create_string_buffer(size)
        done = ctypes.c_uint64(0)
        if call(task, address, size, ctypes.addressof(content), ctypes.addressof(done)) or done.value != size:
            raise UnreadableError(f"nothing at {address:#x}")
        return content.raw

    return read


def _in_blocks(read: Read) -> Read:
    """A function like `read` for memory that does not change: it reads whole blocks, and keeps them."""
    blocks: dict[int, bytes] = {}

    def read_in_blocks(address: int, size: int) -> bytes:
        start = address % _BLOCK
        block = blocks.get(address - start)
        if block is None:
            try:
                block = read(address - start, _BLOCK)
            except UnreadableError:
                block = b""
            blocks[address - start] = block
        part = block[start : start + size]
        return part if len(part) == size else read(address, size)

    return read_in_blocks


def words(data: bytes) -> tuple[int, ...]:
    """`data` as unsigned integers of 8 bytes."""
    return struct.unpack(f"<{len(data) // 8}Q", data)


class Description(NamedTuple):
    """MLX's description of one array.

    `primitive`, `inputs` and `siblings` are addresses. Siblings are the other outputs of the same primitive, and
    `position` is this array's index among all of them.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int
    primitive: int
    inputs: tuple[int, ...]
    siblings: tuple[int, ...]
    position: int


class ArrayLayout:
    """Reads descriptions of lazy arrays; `ArrayLayout.measured()` makes one for the loaded MLX."""

    def __init__(self, read: Read, primitive: int, inputs: int, siblings: int):
        self.read = read
        self._primitive = primitive
        self._inputs = inputs
        self._siblings = siblings
        self._length = max(primitive, inputs, siblings) + 32
        self._kinds: dict[int, str] = {}

    @classmethod
    def measured(cls) -> ArrayLayout:
        """Measure the layout of the MLX that is loaded; a LayoutError names the difference where it is another one."""
        read = reader()
        layout = cls(read, *_measure(read))
        _verify(layout)
        return layout

    def of_unchanged(self) -> ArrayLayout:
        """The layout for reading arrays of which none is made or changed meanwhile, several times as fast."""
        layout = ArrayLayout(_in_blocks(self.read), self._primitive, self._inputs, self._siblings)
        layout._kinds = self._kinds
        return layout

    def address(self, array: mx.array) -> int:
        """The address of the description of `array`; all Python objects of one lazy array share it."""
        return address(self.read, array)

    def describe(self, at: int) -> Description:
        """The description at the address `at`."""
        data = self.read(at, self._length)
        shape = _integers(self.read, data, at, _SHAPE, "i")
        strides = _integers(self.read, data, at, _STRIDES, "q")
        (primitive,) = _WORD(data, self._primitive)
        inputs, siblings = self._arrays(data, self._inputs), self._arrays(data, self._siblings)
        (position,) = struct.unpack_from("<I", data, self._siblings + 24)
        return Description(shape, strides, data[_ITEM_SIZE], primitive, inputs, siblings, position)

    def _arrays(self, data: bytes, offset: int) -> tuple[int, ...]:
        begin, end = _PAIR(data, offset)
        return words(self.read(begin, end - begin))[::2] if end > begin else ()

    def kind(self, primitive: int) -> str:
        """The name of the primitive's class in MLX, such as `Matmul`."""
        (table,) = _WORD(self.read(primitive, 8))
        if table not in self._kinds:
            self._kinds[table] = _class_name(self.read, table)
        return self._kinds[table]

    def arguments(self, primitive: int, kind: str) -> tuple[int, ...]:
        """The arguments on which the layout of a primitive's output depends; none of a kind without any.

        They are axes, the steps of a slice, the strides of a strided view, or whether columns count as contiguous.
        """
        if kind in ("ExpandDims", "Squeeze", "Transpose"):
            return self._vector(primitive + _STATE)
        if kind == "Slice":
            return self._vector(primitive + _STEPS + 8)
        if kind == "AsStrided":
            return self._vector(primitive + _STRIDES_AS_GIVEN + 8, "q")
        return tuple(self.read(primitive + 20, 1)) if kind == "Contiguous" else ()

    def _vector(self, at: int, item: str = "i") -> tuple[int, ...]:
        """The integers of a std::vector<int>, or of the part of a SmallVector behind its first 8 bytes.

        `item` is their struct format: "i" (32 bits) or "q" (64 bits).
        """
        begin, end = words(self.read(at, 16))
        size = struct.calcsize(item)
        return struct.unpack(f"<{(end - begin) // size}{item}", self.read(begin, end - begin)) if end > begin else ()


def address(read: Read, array: Any) -> int:
    """The address of the description of `array`, which nanobind stores in the Python object at an offset it names."""
    head = read(id(array), 24)
    (offset,) = struct.unpack_from("<i", head, 16)
    return words(read(id(array) + offset, 8))[0]


def _integers(read: Read, data: bytes, at: int, offset: int, item: str) -> tuple[int, ...]:
    begin, end = _PAIR(data, offset)
    if end <= begin:
        return ()
    count = (end - begin) // (4 if item == "i" else 8)
    if count > 1 << 10:
        raise LayoutError(f"an array seems to have {count} dimensions")
    inside = begin - at
    if 0 <= inside < len(data):
        return struct.unpack_from(f"<{count}{item}", data, inside)
    return struct.unpack(f"<{count}{item}", read(begin, end - begin))


def _class_name(read: Read, table: int) -> str:
    """The last part of the name of the class with this vtable: `Add` of `N3mlx4core3AddE`."""
    (information,) = words(read(table - 8, 8))
    (name,) = words(read(information + 8, 8))
    # Apple's ABI sets the topmost bit of the pointer where a name is not unique.
    mangled = read(name & ~(1 << 63), 64).split(b"\0")[0].decode("ascii", "replace").removeprefix("N")
    last = ""
    while match := re.match(r"\d{1,2}(?=[A-Za-z_])", mangled):
        end = match.end() + int(match[0])
        last = mangled[match.end() : end]
        mangled = mangled[end:]
    if not last:
        raise LayoutError(f"a primitive's class has the unreadable name {mangled!r}")
    return last


def _measure(read: Read) -> tuple[int, int, int]:
    """The offsets of primitive, inputs and siblings in a description.

    An offset counts where every one of several arrays has the expected pointers. One array is not enough, since unused
    bytes of a description may hold the pointers of an array that was there before.
    """
    first, second = mx.array([[1.0, 2.0, 3.0]] * 3), mx.array([[4.0, 5.0, 6.0]] * 3)
    mx.eval(first, second)
    addresses = (address(read, first), address(read, second))
    operations: dict[str, Any] = {
        "Add": mx.add,
        "Multiply": mx.multiply,
        "Matmul": mx.matmul,
        "Maximum": mx.maximum,
        "Less": mx.less,
    }
    made = {kind: operation(first, second) for kind, operation in operations.items()}
    pairs = [mx.divmod(first, second) for _ in made]
    at = {kind: address(read, array) for kind, array in made.items()}
    primitives = [_primitives(read, where, kind) for kind, where in at.items()]
    inputs = [_vectors(read, where, addresses) for where in at.values()]
    siblings = [_vectors(read, address(read, one), (address(read, other),)) for one, other in pairs]
    siblings += [_vectors(read, address(read, other), (address(read, one),)) for one, other in pairs]
    names = ("primitive", "inputs", "siblings")
    return tuple(  # type: ignore[return-value]
        _only(sets, name) for sets, name in zip((primitives, inputs, siblings), names, strict=True)
    )


def _only(candidates: list[set[int]], name: str) -> int:
    common = set.intersection(*candidates)
    if len(common) != 1:
        raise LayoutError(f"{len(common)} offsets fit an array's {name}, where one is expected")
    return common.pop()


def _primitives(read: Read, at: int, kind: str) -> set[int]:
    """The offsets in the description at `at` of pointers to a primitive of this kind."""
    offsets = set()
    for index, word in enumerate(words(read(at, _SEARCHED))):
        try:
            if _class_name(read, words(read(word, 8))[0]) == kind:
                offsets.add(8 * index)
        except LayoutError:
            continue
    return offsets


def _vectors(read: Read, at: int, expected: tuple[int, ...]) -> set[int]:
    """The offsets in the description at `at` of a std::vector that holds exactly the `expected` arrays."""
    content = words(read(at, _SEARCHED))
    offsets = set()
    for index, (begin, end) in enumerate(pairwise(content)):
        try:
            if end - begin == 16 * len(expected) and words(read(begin, end - begin))[::2] == expected:
                offsets.add(8 * index)
        except UnreadableError:
            continue
    return offsets


def _verify(layout: ArrayLayout) -> None:
    """Read everything that a plan reads from arrays of known contents; LayoutError where something differs."""
    base = mx.arange(24, dtype=mx.int16).reshape(2, 3, 4)
    mx.eval(base)
    checks: list[tuple[mx.array, str, tuple[int, ...], int]] = [
        (base, "", (2, 3, 4), 2),
        (base.transpose(2, 0, 1), "Transpose", (4, 2, 3), 2),
        (base[:, ::2, 1:].astype(mx.float32), "AsType", (2, 2, 3), 4),
        (mx.zeros((2,) * 12), "Full", (2,) * 12, 4),
    ]
    for array, kind, shape, item_size in checks:
        described = layout.describe(layout.address(array))
        seen = layout.kind(described.primitive) if described.primitive else ""
        if (seen, described.shape, described.item_size) not in (
            (kind, shape, item_size),
            ("Broadcast", shape, item_size),
        ):
            raise LayoutError(f"expected {kind or 'a value'} {shape}, found {seen or 'a value'} {described.shape}")
    transposed = base.transpose(2, 0, 1)
    sliced = base[1:, ::2, 1:]
    strided = mx.as_strided(base, (2, 2), (1, 3), 0)
    plain, axes, piece, windowed = (layout.describe(layout.address(x)) for x in (base, transposed, sliced, strided))
    quotient, remainder = mx.divmod(base, base)
    positions = [layout.describe(layout.address(array)).position for array in (quotient, remainder)]
    as_expected = plain.strides == (12, 4, 1) and positions == [0, 1]
    as_expected &= layout.arguments(axes.primitive, "Transpose") == (2, 0, 1)
    as_expected &= layout.arguments(piece.primitive, "Slice") == (1, 2, 1)
    as_expected &= layout.arguments(windowed.primitive, "AsStrided") == (1, 3)
    if not as_expected:
        raise LayoutError("axes, steps or strides of a primitive are not at the expected offsets")
