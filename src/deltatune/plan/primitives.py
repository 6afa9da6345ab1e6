"""Says for each MLX primitive which buffers it allocates, which it reuses from its inputs, and how often it is queued.

The rules describe the CPU backend. A GPU allocates in almost the same way: some of its kernels need no contiguous copy,
so that the rules count too much, and its scratch space is not counted.

Source: mlx/backend/cpu/*.cpp and mlx/backend/common/*.h of MLX 0.32; for views common.cpp, slicing.cpp and
broadcasting.cpp in mlx/backend/common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from .graph import Node
from .storage import Buffer, StoredArray, contiguity, dense, product, reshaped

# is_donatable in mlx/backend/common/utils.h: the reused buffer may be this many bytes larger than the output.
_SPARE = 16384


class Machine(Protocol):
    """The interface of the simulation for a rule while its primitive runs."""

    def allocate(self, size: int, kind: str) -> Buffer:
        """A new buffer of `size` bytes."""

    def is_donatable(self, node: Node) -> bool:
        """Whether nothing but the primitive that runs refers to this input or its buffer."""

    def queue(self, times: int = 1) -> None:
        """Count operations that are sent to the stream."""

    def hold(self, temporary: Buffer) -> None:
        """Hold a temporary buffer until the queued operations have run."""


# Returns the outputs in order, or None where MLX copies the first input.
Rule = Callable[[Machine, Node, Sequence[StoredArray]], "list[StoredArray] | None"]


def run_primitive(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    """Run the primitive of `node` on its inputs; return its outputs in order."""
    rule = VIEWS.get(node.kind) or RULES.get(node.kind) or _new()
    outputs = rule(machine, node, inputs)
    return [_copied(machine, node)] if outputs is None else outputs


def without_rule(nodes: Iterable[Node]) -> dict[str, int]:
    """How many of the nodes are of a kind that no rule here describes, by kind. Each counts as one new buffer."""
    return dict(Counter(node.kind for node in nodes if node.kind not in RULES and node.kind not in VIEWS))


def _fresh(machine: Machine, node: Node) -> StoredArray:
    """A dense array for `node` in a new buffer."""
    return dense(machine.allocate(node.size * node.item_size, node.kind), node.shape, node.item_size)


def _copied(machine: Machine, node: Node) -> StoredArray:
    machine.queue()
    return _fresh(machine, node)


def _new_like(machine: Machine, node: Node, source: StoredArray) -> StoredArray:
    """An array in a new buffer, with the layout of `source`; axes that are broadcast stay so."""
    return source.of(node, machine.allocate(source.data_size * node.item_size, node.kind))


def _may_reuse(machine: Machine, node: Node, index: int, source: StoredArray, output: Node | None = None) -> bool:
    """Whether an output, the first by default, may overwrite this input (is_donatable in MLX)."""
    output = output or node
    fits = source.item_size == output.item_size and source.buffer.size <= output.size * output.item_size + _SPARE
    return fits and machine.is_donatable(node.inputs[index])


def _new(queued: Callable[[int], int] = lambda inputs: 1) -> Rule:
    """Each output is a new dense array; `queued` is the number of operations, by that of inputs."""

    def rule(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
        machine.queue(queued(len(inputs)))
        return [_fresh(machine, output) for output in node.outputs()]

    return rule


def _unary(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    source = inputs[0]
    if not source.contiguous:
        return [_fresh(machine, node)]
    return [source.of(node) if _may_reuse(machine, node, 0, source) else _new_like(machine, node, source)]


def _binary(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    return [_pairwise(machine, output, inputs[0], inputs[1]) for output in node.outputs()]


def _pairwise(machine: Machine, node: Node, a: StoredArray, b: StoredArray) -> StoredArray:
    if a.data_size == 1 and b.data_size == 1:
        return _new_like(machine, node, a)
    if a.data_size == 1 and b.contiguous:
        return b.of(node) if _may_reuse(machine, node, 1, b) else _new_like(machine, node, b)
    if b.data_size == 1 and a.contiguous:
        return a.of(node) if _may_reuse(machine, node, 0, a) else _new_like(machine, node, a)
    same_order = (a.row and b.row) or (a.column and b.column)
    for index, one in enumerate((a, b)):
        if (same_order or (one.row and one.size == node.size)) and _may_reuse(machine, node, index, one):
            return one.of(node)
    return _new_like(machine, node, a) if same_order else _fresh(machine, node)


def _select(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    machine.queue()
    if all(source.data_size == 1 for source in inputs):
        return [_new_like(machine, node, inputs[1])]
    same_order = all(source.row for source in inputs) or all(source.column for source in inputs)
    for index, source in enumerate(inputs):
        if (same_order or source.row) and _may_reuse(machine, node, index, source):
            return [source.of(node)]
    return [_new_like(machine, node, inputs[1]) if same_order else _fresh(machine, node)]


def _copying(is_vector: Callable[[StoredArray], bool], writes: int = 1, *, same_kind: bool = True) -> Rule:
    """The first input is copied (copy_cpu of MLX), and so many operations write into the copy.

    A vector copy keeps the layout, and reuses the input's buffer where it may be overwritten.
    """

    def rule(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
        source = inputs[0]
        vector = is_vector(source)
        reused = vector and _may_reuse(machine, node, 0, source)
        machine.queue(int(not reused or not same_kind))
        if reused:
            copy = source.of(node)
        else:
            copy = _new_like(machine, node, source) if vector else _fresh(machine, node)
        machine.queue(writes)
        return [copy]

    return rule


def _contiguous(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray] | None:
    one = inputs[0]
    fits = one.buffer.size <= node.size * node.item_size + _SPARE
    return [one.of(node)] if fits and (one.row or (one.column and node.arguments[0])) else None


def _reading(is_read: Callable[[StoredArray], bool], count: int | None = None) -> Rule:
    """The output is new, and each of the first `count` inputs that cannot be read as it is gets a temporary copy."""

    def rule(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
        for source in inputs[:count]:
            if not is_read(source):
                _temporary(machine, source.size * source.item_size)
        return [_copied(machine, node)]

    return rule


def _temporary(machine: Machine, size: int) -> None:
    machine.queue()
    machine.hold(machine.allocate(size, "temporary"))


def _is_matrix(source: StoredArray) -> bool:
    """Whether BLAS can read the last two axes as they are or transposed, without a copy."""
    rows, columns = source.strides[-2:]
    return (rows == source.shape[-1] and columns == 1) or (rows == 1 and columns == source.shape[-2])


def _has_rows(source: StoredArray) -> bool:
    return source.contiguous and source.strides[-1] == 1


def _is_row(source: StoredArray) -> bool:
    return source.row


def _is_vector(source: StoredArray) -> bool:
    return source.contiguous


def _add_matmul(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    third = inputs[2]
    if third.data_size != 1 and third.row and _may_reuse(machine, node, 2, third):
        sums = third.of(node)
    else:
        machine.queue()
        sums = _new_like(machine, node, third) if third.data_size != 1 and third.row else _fresh(machine, node)
    for source in inputs[:2]:
        if not _is_matrix(source):
            _temporary(machine, source.size * source.item_size)
    machine.queue()
    return [sums]


def _softmax(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray] | None:
    one = inputs[0]
    machine.queue()
    if not _has_rows(one):
        return None
    return [one.of(node) if machine.is_donatable(node.inputs[0]) else _new_like(machine, node, one)]


def _convolution(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    """Allocates the output, the padded input and its windows; copies of the weights and the product where needed."""
    output = _fresh(machine, node)
    data, weights = inputs[0], inputs[1]
    windows = product(node.shape[:-1]) * product(weights.shape[1:-1]) * data.shape[-1] * data.item_size
    sizes = [data.size * data.item_size, windows]
    # The product is fp32, of weights in rows, and of each group by itself.
    if weights.item_size != 4 or not weights.row or weights.shape[-1] != data.shape[-1]:
        sizes.append(weights.size * weights.item_size)
    if node.item_size != 4:
        sizes.append(node.size * node.item_size)
    for size in sizes:
        _temporary(machine, size)
    machine.queue()
    return [output]


def _fused(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    """A kernel that mx.compile made of elementwise operations: each output reuses the first input that it may."""
    machine.queue()
    free = list(enumerate(inputs))
    outputs = []
    for output in node.outputs():
        for index, source in free:
            if source.row and source.size == output.size and _may_reuse(machine, node, index, source, output):
                outputs.append(source.of(output))
                free.remove((index, source))
                break
        else:
            outputs.append(_fresh(machine, output))
    return outputs


def _given(last: bool) -> Rule:
    """The outputs are the first inputs, or the last ones."""

    def rule(_machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
        outputs = node.outputs()
        same = inputs[-len(outputs) :] if last else inputs[: len(outputs)]
        return [one.of(output) for one, output in zip(same, outputs, strict=True)]

    return rule


def _broadcast(_machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    one = inputs[0]
    missing = len(node.shape) - len(one.shape)
    strides = tuple(0 if length == 1 else step for length, step in zip(one.shape, one.strides, strict=True))
    grows = node.size > one.size
    flags = (one.contiguous, one.row and not grows, one.column and not grows)
    return [one.of(node, strides=(0,) * missing + strides, flags=flags)]


def _expand(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    strides = list(inputs[0].strides)
    for axis in node.arguments:
        strides.insert(axis, 1)
    return [inputs[0].of(node, strides=tuple(strides))]


def _squeeze(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    steps = enumerate(inputs[0].strides)
    return [inputs[0].of(node, strides=tuple(step for at, step in steps if at not in node.arguments))]


def _transpose(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    one = inputs[0]
    strides = tuple(one.strides[axis] for axis in node.arguments)
    whole = one.contiguous and one.data_size == one.size
    return [one.of(node, strides=strides, flags=(True, *contiguity(node.shape, strides)[1:]) if whole else None)]


def _slice(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray] | None:
    if not node.size:
        return None
    strides = tuple(step * every for step, every in zip(inputs[0].strides, node.arguments, strict=True))
    data_size, spanned, row, column = _spanned(node, strides)
    return [inputs[0].of(node, strides=strides, data_size=data_size, flags=(spanned == data_size, row, column))]


def _as_strided(machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    strides = node.arguments
    data_size, spanned, row, column = _spanned(node, strides)
    contiguous = spanned == data_size and all(step >= 0 for step in strides)
    return [inputs[0].of(node, strides=strides, data_size=data_size, flags=(contiguous, row, column))]


def _spanned(node: Node, strides: tuple[int, ...]) -> tuple[int, int, bool, bool]:
    """The elements from the first to the last of an array with these strides, and the results of contiguity()."""
    data_size = 1 + sum(abs(step) * (length - 1) for step, length in zip(strides, node.shape, strict=True))
    return data_size, *contiguity(node.shape, strides)


def _split(_machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray]:
    one = inputs[0]
    pieces = []
    for output in node.outputs():
        data_size, row, column = contiguity(output.shape, one.strides)
        same = data_size == one.data_size or row or column
        flags = (data_size == 1 or (one.contiguous and same), row, column)
        pieces.append(one.of(output, data_size=data_size, flags=flags))
    return pieces


def _reshape(_machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray] | None:
    one = inputs[0]
    strides = reshaped(one, node.shape)
    if strides is None:
        return None
    in_rows = (one.contiguous, True, node.size <= 1 or node.size == max(node.shape)) if one.row else None
    return [one.of(node, strides=strides, flags=in_rows)]


def _view(_machine: Machine, node: Node, inputs: Sequence[StoredArray]) -> list[StoredArray] | None:
    one = inputs[0]
    before, after = one.item_size, node.item_size
    if not (before == after or (after < before and one.strides[-1] == 1) or one.row):
        return None
    strides = tuple(step * before // after for step in one.strides[:-1]) + one.strides[-1:]
    return [one.of(node, strides=strides, data_size=one.data_size * before // after)]


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
_NEW = [
    "AllGather", "AllReduce", "Arange", "ArgPartition", "ArgReduce", "ArgSort", "BlockMaskedMM", "Cholesky",
    "CrossEntropy", "CrossEntropyVJP", "CustomKernel", "DynamicSlice", "Eig", "Eigh", "FFT", "GatedDeltaUpdate",
    "GatedDeltaUpdateVJP", "Gather", "GatherAxis", "GatherQQMM", "Hadamard", "Inverse", "LUF", "LayerNorm",
    "LayerNormVJP", "Load", "QQMatmul", "QRF", "Quantize", "RMSNorm", "RMSNormVJP", "RandomBits", "Recv", "Reduce",
    "ReduceScatter", "RoPE", "SVD", "ScaledDotProductAttention", "ScaledDotProductAttentionVJP", "SearchSorted", "Send",
]  # fmt: skip
RULES: dict[str, Rule] = {
    **dict.fromkeys(_NEW, _new()),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(("Matmul", "GatherMM", "SegmentedMM"), _reading(_is_matrix, 2)),
    **dict.fromkeys(("Scatter", "ScatterAxis", "MaskedScatter"), _copying(_is_row)),
    **dict.fromkeys(
        ("SliceUpdate", "DynamicSliceUpdate"),
        _copying(lambda one: one.data_size != 1 and one.contiguous and one.size == one.data_size),
    ),
    **dict.fromkeys(("Sort", "Partition"), _copying(_is_vector)),
    "QuantizedMatmul": _reading(_is_row), "GatherQMM": _reading(_is_matrix, 3),
    "LogSumExp": _reading(_has_rows, 1), "Scan": _reading(_is_row, 1),
    "AsType": _copying(_is_vector, 0, same_kind=False),
    "Full": _copying(lambda one: one.data_size != 1 and one.contiguous, 0),
    "Pad": _new(lambda inputs: 2), "Concatenate": _new(lambda inputs: inputs),
    "NumberOfElements": _new(lambda inputs: 0), "Select": _select, "Contiguous": _contiguous, "AddMM": _add_matmul,
    "Softmax": _softmax, "Convolution": _convolution, "Compiled": _fused,
}  # fmt: skip
# The primitives with views of their inputs' buffers as outputs.
VIEWS: dict[str, Rule] = {
    **dict.fromkeys(("Copy", "StopGradient", "Depends"), _given(last=False)), "CustomTransforms": _given(last=True),
    **dict.fromkeys(("Broadcast", "BroadcastAxes"), _broadcast), "ExpandDims": _expand, "Squeeze": _squeeze,
    "Transpose": _transpose, "Slice": _slice, "Split": _split, "View": _view, "AsStrided": _as_strided,
    **dict.fromkeys(("Reshape", "Flatten", "Unflatten"), _reshape),
}  # fmt: skip
