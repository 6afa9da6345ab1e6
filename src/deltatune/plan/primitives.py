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
    """The interface of the simulation for a rule while its primitive runs."""

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


def run_primitive(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    """Run the primitive of `node` on its inputs; return its outputs in order."""
    view = VIEWS.get(node.kind)
    if view is not None:
        outputs = view(machine.layout, node, inputs)
        if outputs is not None:
            return outputs
        return [_copied(machine, node, inputs[0])]
    return RULES.get(node.kind, _plain)(machine, node, inputs)


def without_rule(nodes: Iterable[Node]) -> dict[str, int]:
    """How many of the nodes are of a kind that no rule here describes, by kind. Each counts as one new buffer."""
    return dict(Counter(node.kind for node in nodes if node.kind not in RULES and node.kind not in VIEWS))


def fresh(machine: Machine, node: Node) -> StoredArray:
    """A dense array for `node` in a new buffer."""
    return dense(machine.allocate(node.size * node.item_size, node.kind), node.shape, node.item_size)


def _new_like(machine: Machine, node: Node, source: StoredArray) -> StoredArray:
    """An array in a new buffer, with the layout of `source`; axes that are broadcast stay so."""
    buffer = machine.allocate(source.data_size * node.item_size, node.kind)
    return _with_layout(buffer, node, source)


def _with_layout(buffer: Buffer, node: Node, source: StoredArray) -> StoredArray:
    flags = (source.contiguous, source.row, source.column)
    return StoredArray(buffer, node.shape, source.strides, node.item_size, source.data_size, *flags)


def _may_reuse(machine: Machine, node: Node, index: int, source: StoredArray) -> bool:
    """Whether the first output may overwrite this input (is_donatable in MLX)."""
    return _may_reuse_for(machine, node, node, index, source)


def _may_reuse_for(machine: Machine, node: Node, output: Node, index: int, source: StoredArray) -> bool:
    fits = source.item_size == output.item_size and source.buffer.size <= output.size * output.item_size + _SPARE
    return fits and machine.is_donatable(node.inputs[index])


def _copied(machine: Machine, node: Node, source: StoredArray) -> StoredArray:
    machine.queue()
    return fresh(machine, node)


def _plain(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    return [fresh(machine, output) for output in node.outputs()]


def _unary(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    return [_elementwise(machine, node, inputs[0])]


def _elementwise(machine: Machine, node: Node, source: StoredArray) -> StoredArray:
    if not source.contiguous:
        return fresh(machine, node)
    if _may_reuse(machine, node, 0, source):
        return _with_layout(source.buffer, node, source)
    return _new_like(machine, node, source)


def _binary(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    return [_pairwise(machine, output, inputs[0], inputs[1]) for output in node.outputs()]


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


def _select(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    if all(source.data_size == 1 for source in inputs):
        second = inputs[1]
        flags = (second.contiguous, second.row, second.column)
        buffer = machine.allocate(node.item_size, node.kind)
        return [StoredArray(buffer, node.shape, second.strides, node.item_size, 1, *flags)]
    same_order = all(source.row for source in inputs) or all(source.column for source in inputs)
    for index, source in enumerate(inputs):
        if (same_order or source.row) and _may_reuse(machine, node, index, source):
            return [_with_layout(source.buffer, node, source)]
    return [_new_like(machine, node, inputs[1]) if same_order else fresh(machine, node)]


def _copy(machine: Machine, node: Node, source: StoredArray, vector: bool, same_kind: bool = True) -> StoredArray:
    """copy_cpu of MLX: a `vector` copy keeps the layout, and reuses the input's buffer where it may be overwritten."""
    if vector:
        if _may_reuse(machine, node, 0, source):
            if not same_kind:
                machine.queue()
            return _with_layout(source.buffer, node, source)
        machine.queue()
        return _new_like(machine, node, source)
    return _copied(machine, node, source)


def _cast(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    return [_copy(machine, node, inputs[0], inputs[0].contiguous, same_kind=False)]


def _full(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    return [_copy(machine, node, inputs[0], inputs[0].data_size != 1 and inputs[0].contiguous)]


def _contiguous(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    one = inputs[0]
    fits = one.buffer.size <= node.size * node.item_size + _SPARE
    if fits and (one.row or (one.column and machine.layout.flag(node.primitive))):
        return [_with_layout(one.buffer, node, one)]
    return [_copied(machine, node, one)]


def _update(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    """Scatter and similar primitives write into a copy of the first input, or into that input itself."""
    copied = _copy(machine, node, inputs[0], inputs[0].row)
    machine.queue()
    return [copied]


def _slice_update(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    one = inputs[0]
    vector = one.data_size != 1 and one.contiguous and one.size == one.data_size
    copied = _copy(machine, node, one, vector)
    machine.queue()
    return [copied]


def _sort(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    copied = _copy(machine, node, inputs[0], inputs[0].contiguous)
    machine.queue()
    return [copied]


def _pad(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue(2)
    return [fresh(machine, node)]


def _concatenate(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue(len(inputs))
    return [fresh(machine, node)]


def _unqueued(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    return [fresh(machine, node)]


def _temporary(machine: Machine, source: StoredArray) -> Buffer:
    machine.queue()
    buffer = machine.allocate(source.size * source.item_size, "temporary")
    machine.hold(buffer)
    return buffer


def _is_matrix(source: StoredArray) -> bool:
    """Whether BLAS can read the last two axes as they are or transposed, without a copy."""
    rows, columns = source.strides[-2:]
    return (rows == source.shape[-1] and columns == 1) or (rows == 1 and columns == source.shape[-2])


def _matmul(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    product_array = fresh(machine, node)
    for source in inputs[:2]:
        if not _is_matrix(source):
            _temporary(machine, source)
    machine.queue()
    return [product_array]


def _add_matmul(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    third = inputs[2]
    if third.data_size != 1 and third.row and _may_reuse(machine, node, 2, third):
        sums = _with_layout(third.buffer, node, third)
    elif third.data_size != 1 and third.row:
        machine.queue()
        sums = _new_like(machine, node, third)
    else:
        sums = _copied(machine, node, third)
    for source in inputs[:2]:
        if not _is_matrix(source):
            _temporary(machine, source)
    machine.queue()
    return [sums]


def _quantized_matmul(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    for source in inputs[: 3 if node.kind == "GatherQMM" else len(inputs)]:
        if not (_is_matrix(source) if node.kind == "GatherQMM" else source.row):
            _temporary(machine, source)
    machine.queue()
    return [fresh(machine, node)]


def _softmax(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    one = inputs[0]
    machine.queue()
    if not (one.contiguous and one.strides[-1] == 1):
        return [_copied(machine, node, one)]
    reused = machine.is_donatable(node.inputs[0])
    return [_with_layout(one.buffer, node, one) if reused else _new_like(machine, node, one)]


def _log_sum_exp(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    if not (inputs[0].contiguous and inputs[0].strides[-1] == 1):
        _temporary(machine, inputs[0])
    machine.queue()
    return [fresh(machine, node)]


def _scan(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    if not inputs[0].row:
        _temporary(machine, inputs[0])
    machine.queue()
    return [fresh(machine, node)]


def _convolution(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    """Allocates the output, the padded input and its windows; copies of the weights and the product where needed."""
    output = fresh(machine, node)
    data, weights = inputs[0], inputs[1]
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
    return [output]


def _fused(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    """A kernel that mx.compile made of elementwise operations: each output reuses the first input that it may."""
    machine.queue()
    free = list(enumerate(inputs))
    outputs = []
    for output in node.outputs():
        for index, source in free:
            if source.row and source.size == output.size and _may_reuse_for(machine, node, output, index, source):
                outputs.append(_with_layout(source.buffer, output, source))
                free.remove((index, source))
                break
        else:
            outputs.append(fresh(machine, output))
    return outputs


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
