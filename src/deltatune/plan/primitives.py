"""Says for each MLX primitive which buffers it allocates, which it reuses from its inputs, and how often it is queued.

The rules describe the CPU backend. A GPU allocates in almost the same way: some of its kernels need no contiguous copy,
so that the rules count too much, and its scratch space is not counted.

Source: mlx/backend/cpu/*.cpp and mlx/backend/common/*.h of MLX 0.32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from .array_layout import ArrayLayout
from .graph import Node
from .storage import Buffer, StoredArray, dense, product
from .views import VIEWS

# is_donatable in mlx/backend/common/utils.h: the reused buffer may be this many bytes larger than the output.
_SPARE = 16384


class Machine(Protocol):
    """What a rule may ask of the simulation while a primitive runs."""

    layout: ArrayLayout

    def allocate(self, size: int, kind: str) -> Buffer:
        """A new buffer of `size` bytes."""

    def is_donatable(self, node: Node) -> bool:
        """Whether nothing but the primitive that runs refers to this input or its buffer."""

    def queue(self, times: int = 1) -> None:
        """Count operations that are sent to the stream."""

    def hold(self, temporary: Buffer) -> None:
        """Hold a temporary buffer until the queued operations have run."""


Rule = Callable[[Machine, Node, Sequence[StoredArray]], "list[StoredArray]"]


def run(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    """Run the primitive of `node` on the inputs `given`; returns its outputs in order."""
    view = VIEWS.get(node.kind)
    if view is not None:
        found = view(machine.layout, node, given)
        if found is not None:
            return found
        return [_copied(machine, node, given[0])]
    return RULES.get(node.kind, _plain)(machine, node, given)


def without_rule(nodes: Iterable[Node]) -> dict[str, int]:
    """How many of the nodes are of a kind that no rule here describes, by kind. Each counts as one new buffer."""
    return dict(Counter(node.kind for node in nodes if node.kind not in RULES and node.kind not in VIEWS))


def fresh(machine: Machine, node: Node) -> StoredArray:
    """A dense array for `node` in a new buffer."""
    return dense(machine.allocate(node.size * node.item_size, node.kind), node.shape, node.item_size)


def _new_like(machine: Machine, node: Node, given: StoredArray) -> StoredArray:
    """An array in a new buffer, with the layout of `given`; axes that are broadcast stay so."""
    buffer = machine.allocate(given.data_size * node.item_size, node.kind)
    return _with_layout(buffer, node, given)


def _with_layout(buffer: Buffer, node: Node, given: StoredArray) -> StoredArray:
    flags = (given.contiguous, given.row, given.column)
    return StoredArray(buffer, node.shape, given.strides, node.item_size, given.data_size, *flags)


def _may_reuse(machine: Machine, node: Node, index: int, given: StoredArray) -> bool:
    """Whether the first output may overwrite this input (is_donatable in MLX)."""
    return _may_reuse_for(machine, node, node, index, given)


def _may_reuse_for(machine: Machine, node: Node, output: Node, index: int, given: StoredArray) -> bool:
    fits = given.item_size == output.item_size and given.buffer.size <= output.size * output.item_size + _SPARE
    return fits and machine.is_donatable(node.inputs[index])


def _copied(machine: Machine, node: Node, given: StoredArray) -> StoredArray:
    machine.queue()
    return fresh(machine, node)


def _plain(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    return [fresh(machine, output) for output in node.outputs()]


def _unary(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    return [_elementwise(machine, node, given[0])]


def _elementwise(machine: Machine, node: Node, given: StoredArray) -> StoredArray:
    if not given.contiguous:
        return fresh(machine, node)
    if _may_reuse(machine, node, 0, given):
        return _with_layout(given.buffer, node, given)
    return _new_like(machine, node, given)


def _binary(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    return [_pairwise(machine, output, given[0], given[1]) for output in node.outputs()]


def _pairwise(machine: Machine, node: Node, a: StoredArray, b: StoredArray) -> StoredArray:
    if a.data_size == 1 and b.data_size == 1:
        return StoredArray(
            machine.allocate(node.item_size, node.kind),
            node.shape, a.strides, node.item_size, 1, a.contiguous, a.row, a.column,
        )  # fmt: skip
    if a.data_size == 1 and b.contiguous:
        return _with_layout(b.buffer, node, b) if _may_reuse(machine, node, 1, b) else _new_like(machine, node, b)
    if b.data_size == 1 and a.contiguous:
        return _with_layout(a.buffer, node, a) if _may_reuse(machine, node, 0, a) else _new_like(machine, node, a)
    same_order = (a.row and b.row) or (a.column and b.column)
    for index, one in enumerate((a, b)):
        if (same_order or (one.row and one.size == node.size)) and _may_reuse(machine, node, index, one):
            return _with_layout(one.buffer, node, one)
    return _new_like(machine, node, a) if same_order else fresh(machine, node)


def _select(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    if all(each.data_size == 1 for each in given):
        second = given[1]
        flags = (second.contiguous, second.row, second.column)
        buffer = machine.allocate(node.item_size, node.kind)
        return [StoredArray(buffer, node.shape, second.strides, node.item_size, 1, *flags)]
    same_order = all(each.row for each in given) or all(each.column for each in given)
    for index, each in enumerate(given):
        if (same_order or each.row) and _may_reuse(machine, node, index, each):
            return [_with_layout(each.buffer, node, each)]
    return [_new_like(machine, node, given[1]) if same_order else fresh(machine, node)]


def _copy(machine: Machine, node: Node, given: StoredArray, vector: bool, same_kind: bool = True) -> StoredArray:
    """copy_cpu of MLX: a `vector` copy keeps the layout, and reuses the input's buffer where it may be overwritten."""
    if vector:
        if _may_reuse(machine, node, 0, given):
            if not same_kind:
                machine.queue()
            return _with_layout(given.buffer, node, given)
        machine.queue()
        return _new_like(machine, node, given)
    return _copied(machine, node, given)


def _cast(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    return [_copy(machine, node, given[0], given[0].contiguous, same_kind=False)]


def _full(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    return [_copy(machine, node, given[0], given[0].data_size != 1 and given[0].contiguous)]


def _contiguous(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    one = given[0]
    fits = one.buffer.size <= node.size * node.item_size + _SPARE
    if fits and (one.row or (one.column and machine.layout.flag(node.primitive))):
        return [_with_layout(one.buffer, node, one)]
    return [_copied(machine, node, one)]


def _update(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    """Scatter and similar primitives write into a copy of the first input, or into that input itself."""
    found = _copy(machine, node, given[0], given[0].row)
    machine.queue()
    return [found]


def _slice_update(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    one = given[0]
    vector = one.data_size != 1 and one.contiguous and one.size == one.data_size
    found = _copy(machine, node, one, vector)
    machine.queue()
    return [found]


def _sort(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    found = _copy(machine, node, given[0], given[0].contiguous)
    machine.queue()
    return [found]


def _pad(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue(2)
    return [fresh(machine, node)]


def _concatenate(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue(len(given))
    return [fresh(machine, node)]


def _unqueued(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    return [fresh(machine, node)]


def _temporary(machine: Machine, given: StoredArray) -> Buffer:
    machine.queue()
    buffer = machine.allocate(given.size * given.item_size, "temporary")
    machine.hold(buffer)
    return buffer


def _is_matrix(given: StoredArray) -> bool:
    """Whether BLAS can read the last two axes as they are or transposed, without a copy."""
    rows, columns = given.strides[-2:]
    return (rows == given.shape[-1] and columns == 1) or (rows == 1 and columns == given.shape[-2])


def _matmul(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    found = fresh(machine, node)
    for each in given[:2]:
        if not _is_matrix(each):
            _temporary(machine, each)
    machine.queue()
    return [found]


def _add_matmul(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    third = given[2]
    if third.data_size != 1 and third.row and _may_reuse(machine, node, 2, third):
        found = _with_layout(third.buffer, node, third)
    elif third.data_size != 1 and third.row:
        machine.queue()
        found = _new_like(machine, node, third)
    else:
        found = _copied(machine, node, third)
    for each in given[:2]:
        if not _is_matrix(each):
            _temporary(machine, each)
    machine.queue()
    return [found]


def _quantized_matmul(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    for each in given[: 3 if node.kind == "GatherQMM" else len(given)]:
        if not (_is_matrix(each) if node.kind == "GatherQMM" else each.row):
            _temporary(machine, each)
    machine.queue()
    return [fresh(machine, node)]


def _softmax(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    one = given[0]
    machine.queue()
    if not (one.contiguous and one.strides[-1] == 1):
        return [_copied(machine, node, one)]
    reused = machine.is_donatable(node.inputs[0])
    return [_with_layout(one.buffer, node, one) if reused else _new_like(machine, node, one)]


def _log_sum_exp(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    if not (given[0].contiguous and given[0].strides[-1] == 1):
        _temporary(machine, given[0])
    machine.queue()
    return [fresh(machine, node)]


def _scan(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    if not given[0].row:
        _temporary(machine, given[0])
    machine.queue()
    return [fresh(machine, node)]


def _convolution(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    """Allocates the output, the padded input and its windows; copies of the weights and the product where needed."""
    found = fresh(machine, node)
    data, weights = given[0], given[1]
    windows = product(node.shape[:-1]) * product(weights.shape[1:-1]) * data.shape[-1] * data.item_size
    sizes = [data.size * data.item_size, windows]
    # The product is fp32, of weights in rows, and of each group by itself.
    if weights.item_size != 4 or not weights.row or weights.shape[-1] != data.shape[-1]:
        sizes.append(weights.size * weights.item_size)
    if node.item_size != 4:
        sizes.append(node.size * node.item_size)
    for size in sizes:
        machine.queue()
        machine.hold(machine.allocate(size, "temporary"))
    machine.queue()
    return [found]


def _fused(machine: Machine, node: Node, given: Sequence[StoredArray]) -> list[StoredArray]:
    """A kernel that mx.compile made of elementwise operations: each output reuses the first input that it may."""
    machine.queue()
    free = list(enumerate(given))
    found = []
    for output in node.outputs():
        for index, each in free:
            if each.row and each.size == output.size and _may_reuse_for(machine, node, output, index, each):
                found.append(_with_layout(each.buffer, output, each))
                free.remove((index, each))
                break
        else:
            found.append(fresh(machine, output))
    return found


_UNARY = [
    "Abs", "ArcCos", "ArcCosh", "ArcSin", "ArcSinh", "ArcTan", "ArcTanh", "BitwiseInvert", "Ceil", "Conjugate",
    "ConvertFP8", "Cos", "Cosh", "Erf", "ErfInv", "Exp", "Expm1", "Floor", "Imag", "Log", "Log1p", "LogicalNot",
    "Negative", "Real", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Square", "Tan", "Tanh",
]  # fmt: skip
_BINARY = [
    "Add", "ArcTan2", "BitwiseBinary", "Divide", "DivMod", "Equal", "FloorDivide", "Greater", "GreaterEqual", "Less",
    "LessEqual", "LogAddExp", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Multiply", "NotEqual", "Power",
    "Remainder", "Subtract",
]  # fmt: skip
# Each output is a new dense array.
_PLAIN = [
    "AllGather", "AllReduce", "Arange", "ArgPartition", "ArgReduce", "ArgSort", "BlockMaskedMM", "Cholesky",
    "CrossEntropy", "CrossEntropyVJP", "CustomKernel", "DynamicSlice", "Eig", "Eigh", "FFT", "GatedDeltaUpdate",
    "GatedDeltaUpdateVJP", "Gather", "GatherAxis", "GatherQQMM", "Hadamard", "Inverse", "LUF", "LayerNorm",
    "LayerNormVJP", "Load", "QQMatmul", "QRF", "Quantize", "RMSNorm", "RMSNormVJP", "RandomBits", "Recv", "Reduce",
    "ReduceScatter", "RoPE", "SVD", "ScaledDotProductAttention", "ScaledDotProductAttentionVJP", "SearchSorted", "Send",
]  # fmt: skip
RULES: dict[str, Rule] = {
    **dict.fromkeys(_PLAIN, _plain),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(("Matmul", "GatherMM", "SegmentedMM"), _matmul),
    **dict.fromkeys(("Scatter", "ScatterAxis", "MaskedScatter"), _update),
    **dict.fromkeys(("SliceUpdate", "DynamicSliceUpdate"), _slice_update),
    **dict.fromkeys(("QuantizedMatmul", "GatherQMM"), _quantized_matmul),
    **dict.fromkeys(("Sort", "Partition"), _sort),
    "Select": _select, "AsType": _cast, "Full": _full, "Contiguous": _contiguous, "Pad": _pad,
    "Concatenate": _concatenate, "NumberOfElements": _unqueued, "AddMM": _add_matmul, "Softmax": _softmax,
    "LogSumExp": _log_sum_exp, "Scan": _scan, "Convolution": _convolution, "Compiled": _fused,
}  # fmt: skip
