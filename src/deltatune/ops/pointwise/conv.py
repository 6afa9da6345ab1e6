"""The short causal convolution of a gated-delta layer, with the silu and the norms of queries and keys that follow it.

One kernel computes them forward, and one backward: it computes the convolution again from its input. A third one does
so for the gradient of the weight, where that trains. Where a layer convolves queries, keys and values together, they
come out as arrays of their own, and so do their gradients come in; slices of one array would be copied before the next
kernel, and the gradients of slices be joined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx

from ..kernels.launch import ABSENT, Launch, Outputs
from ..operator.kernel_operator import KernelWorkload
from ..operator.measure import Kind
from .passes import LEAST, Arrays, Passes, by_lane, wide

# The filter lengths K that the kernels support, and the largest head that they norm.
TAPS, LARGEST_HEAD = (2, 3, 4), 256
# Lanes come in groups of so many, with eight channels each.
_GROUP, _LANE = 32, 8


@dataclass(frozen=True)
class Walk:
    """How a lane goes along the tokens: how many it computes, and how many rows it loads before it needs the first.

    So many blocks as `resident` must fit on a multiprocessor, which bounds a lane's registers.
    """

    rows: int
    ahead: int
    resident: int


FORWARD, BACKWARD, WEIGHT = Walk(16, 3, 4), Walk(16, 3, 3), Walk(32, 2, 3)


@dataclass(frozen=True)
class NormedHeads:
    """The first channels of a convolution: the queries of `count` heads of `size` channels, and then their keys.

    Queries become query_factor * x / sqrt(mean(x^2) + eps), and keys the same with theirs.
    """

    count: int
    size: int
    query_factor: float
    key_factor: float
    eps: float

    @property
    def channels(self) -> int:
        """The channels of the queries, which are as many as those of the keys."""
        return self.count * self.size


def conv_silu(x: mx.array, weight: mx.array, segments: mx.array | None = None) -> mx.array:
    """Return silu of the depthwise causal convolution [B, T, C], computed in fp32, with one kernel each way.

    x [B, K - 1 + T, C], C a multiple of 8, has the state of K - 1 inputs, oldest first, then the tokens; weight is [C,
    K], K from 2 to 4. With segments [B, T], integers that never decrease along T, an output depends on inputs of its
    own segment only; the state counts as part of the first. `serves` says whether arrays fit.
    """
    return _passes(_joined_form(x, weight, segments))(x, weight, *_fixed(segments))[0]


def conv_heads(
    x: mx.array, weight: mx.array, heads: NormedHeads, state: mx.array | None = None, segments: mx.array | None = None
) -> list[mx.array]:
    """Return queries, keys and values: silu of the depthwise causal convolution, and the norms of queries and keys.

    x [B, T, C] has the channels of the queries, the keys and then the values, each a multiple of 8; state [B, K - 1, C]
    the inputs before it, None for zeros; weight and segments are as for `conv_silu`. Queries and keys come as [B, T,
    count, size], values as [B, T, the other channels]. `serves_heads` says whether arrays fit.
    """
    form = _Form(weight.shape[1], x.shape[2], heads, False, state is not None, segments is not None)
    arrays = [x, *([] if state is None else [state]), weight, *_fixed(segments)]
    return _passes(form)(*arrays)


def _fits(x: mx.array, weight: mx.array) -> bool:
    """Whether the arrays are large floats x [B, T, C] and a weight [C, K] that the kernels know."""
    taps = x.ndim == 3 and weight.ndim == 2 and weight.shape[0] == x.shape[2] and weight.shape[1] in TAPS
    return taps and x.size >= LEAST and mx.issubdtype(x.dtype, mx.floating)


def serves(x: mx.array, weight: mx.array, segments: mx.array | None = None) -> bool:
    """Whether `conv_silu` is to be used: the kernels cover these arrays, are faster, and were found right here."""
    fits = _fits(x, weight) and x.shape[2] % _LANE == 0 and x.shape[1] >= weight.shape[1]
    return fits and _is_right(_joined_form(x, weight, segments), x, weight)


def serves_heads(
    x: mx.array,
    weight: mx.array,
    heads: NormedHeads,
    state: mx.array | None = None,
    segments: mx.array | None = None,
) -> bool:
    """Whether `conv_heads` is to be used: the kernels cover these arrays, are faster, and were found right here."""
    if not _fits(x, weight):
        return False
    values = x.shape[2] - 2 * heads.channels
    if heads.size % _LANE or heads.size > LARGEST_HEAD or values % _LANE or values <= 0:
        return False
    if state is not None and (state.dtype != x.dtype or state.shape != (x.shape[0], weight.shape[1] - 1, x.shape[2])):
        return False
    form = _Form(weight.shape[1], x.shape[2], heads, False, state is not None, segments is not None)
    return _is_right(form, x, weight)


@dataclass(frozen=True)
class _Form:
    """The parameters of the kernels' text: `joined` if the state is in x's first rows, `stateful` if it is apart."""

    taps: int
    channels: int
    heads: NormedHeads | None
    joined: bool
    stateful: bool
    segmented: bool

    @property
    def before(self) -> int:
        return self.taps - 1 if self.joined else 0

    @property
    def values(self) -> int:
        return self.channels - (2 * self.heads.channels if self.heads else 0)

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("x", *["state"] * self.stateful, "weight", *["segments"] * self.segmented)

    @property
    def names(self) -> tuple[str, ...]:
        return ("q", "k", "v") if self.heads else ("y",)

    def outputs(self, x: mx.array) -> Outputs:
        tokens, heads = (x.shape[0], x.shape[1] - self.before), self.heads
        shapes: list[tuple[int, ...]] = [(*tokens, heads.count, heads.size)] * 2 if heads else []
        shapes.append((*tokens, self.values))
        return {name: (shape, x.dtype) for name, shape in zip(self.names, shapes, strict=True)}

    def lanes_of_row(self) -> int:
        """How many lanes share out the channels of a row (see share_at)."""
        normed = 2 * self.heads.count * _lanes_of_head(self.heads.size) if self.heads else 0
        return _whole_groups(normed) + _whole_groups(self.values // _LANE)

    def launch(
        self, name: str, walk: Walk, rows: int, inputs: dict[str, mx.array], out: Outputs, more: tuple[str, ...]
    ) -> Launch:
        """Describe the launch of the body `name`: its lanes share out `rows` rows; its last arguments are `more`."""
        heads = self.heads
        norms = (heads.query_factor, heads.key_factor, heads.eps) if heads else (1.0, 1.0, 0.0)
        optional = [text if text in self.inputs else ABSENT for text in ("state", "segments")]
        arguments = (
            "(long)x_shape[0]",
            f"x_shape[1] - {self.before}",
            f"HeadNorms{{{', '.join(f'{number!r}f' for number in norms)}}}",
            *("x", optional[0], "weight", optional[1]),
            *more,
        )
        sizes = (heads.count, heads.size) if heads else (0, 0)
        constants = (self.taps, walk.rows, walk.ahead, self.before, *sizes, self.values)
        lanes = inputs["x"].shape[0] * -(-rows // walk.rows) * self.lanes_of_row()
        return by_lane(name, inputs, out, arguments, lanes, constants, walk.resident)


def _joined_form(x: mx.array, weight: mx.array, segments: mx.array | None) -> _Form:
    return _Form(weight.shape[1], x.shape[2], None, True, False, segments is not None)


def _fixed(segments: mx.array | None) -> list[mx.array]:
    return [] if segments is None else [mx.stop_gradient(segments).astype(mx.int32)]


def _lanes_of_head(size: int) -> int:
    return 1 << (size // _LANE - 1).bit_length()


def _whole_groups(lanes: int) -> int:
    return -(-lanes // _GROUP) * _GROUP


def _is_right(form: _Form, x: mx.array, weight: mx.array) -> bool:
    batch, length = 3, 2 * max(FORWARD.rows, BACKWARD.rows, WEIGHT.rows) + 5
    documents = mx.broadcast_to(mx.arange(length) // 7, (batch, length))
    kinds: list[Kind] = [((batch, form.before + length, form.channels), x.dtype)]
    if form.stateful:
        kinds.append(((batch, form.taps - 1, form.channels), x.dtype))
    kinds.append((weight.shape, weight.dtype))
    return _passes(form).passes_trial(*kinds, others=[documents] if form.segmented else [])


@cache
def _passes(form: _Form) -> Passes:
    count, history = len(form.inputs), form.taps - 1

    def of_outputs(x: mx.array, cotangents: Arrays) -> dict[str, mx.array]:
        return {f"d{name}": d.astype(x.dtype) for name, d in zip(form.names, cotangents, strict=True)}

    def forward(*arrays: mx.array) -> Launch:
        outputs, rows = form.outputs(arrays[0]), arrays[0].shape[1] - form.before
        named = dict(zip(form.inputs, arrays, strict=True))
        return form.launch("conv_silu_forward", FORWARD, rows, named, outputs, _three(tuple(outputs)))

    def backward(*arrays: mx.array) -> Launch:
        x = arrays[0]
        inputs = dict(zip(form.inputs, arrays[:count], strict=True))
        cotangents = of_outputs(x, arrays[count:])
        outputs: Outputs = {"dx": (x.shape, x.dtype)}
        if form.stateful:
            outputs["dstate"] = (arrays[1].shape, x.dtype)
        more = (*_three(tuple(cotangents)), "dx", "dstate" if form.stateful else ABSENT, str(form.stateful).lower())
        rows = x.shape[1] + history * form.stateful
        return form.launch("conv_silu_backward", BACKWARD, rows, inputs | cotangents, outputs, more)

    def plain(*arrays: mx.array) -> Arrays:
        return _with_mlx(form, dict(zip(form.inputs, arrays, strict=True)))

    def parameters(primals: Arrays, cotangents: Arrays) -> list[mx.array]:
        x, rows = primals[0], primals[0].shape[1] - form.before
        inputs = dict(zip(form.inputs, primals, strict=True))
        weight, d = inputs["weight"], of_outputs(x, cotangents)
        shape = (x.shape[0] * -(-rows // WEIGHT.rows), *weight.shape)
        outputs: Outputs = {"dweight": (shape, mx.float32)}
        more = (*_three(tuple(d)), "dweight")
        (parts,) = form.launch("conv_silu_taps", WEIGHT, rows, inputs | d, outputs, more)()
        return [parts.sum(axis=0).astype(weight.dtype)]

    return Passes(_name(form), forward, backward, plain, parameters, fixed=int(form.segmented))


def _three(names: tuple[str, ...]) -> tuple[str, ...]:
    """The kernels take three arrays; without queries and keys they use the last alone."""
    return names * (3 // len(names))


def _name(form: _Form) -> str:
    documents = " of documents" if form.segmented else ""
    sizes = f"{form.channels} channels, {form.taps} taps{', with a state' if form.stateful else ''}"
    heads = form.heads
    if heads is None:
        return f"conv and silu{documents} ({sizes})"
    numbers = f"{heads.query_factor}, {heads.key_factor}, {heads.eps}"
    return f"conv, silu and norms{documents} ({sizes}, {heads.count} heads of {heads.size}, {numbers})"


def _with_mlx(form: _Form, inputs: dict[str, mx.array]) -> Arrays:
    y = _convolved(form, inputs["x"], inputs["weight"], inputs.get("state"), inputs.get("segments"))
    y = y * mx.sigmoid(y)
    if form.heads is None:
        return [y]
    heads = form.heads
    *normed, values = mx.split(y, [heads.channels, 2 * heads.channels], axis=-1)
    unit_heads = []
    for rows, factor in zip(normed, (heads.query_factor, heads.key_factor), strict=True):
        rows = rows.reshape(*y.shape[:2], heads.count, heads.size)
        mean = mx.square(wide(rows)).mean(axis=-1, keepdims=True)
        unit_heads.append((factor * rows * mx.rsqrt(mean + heads.eps)).astype(y.dtype))
    return [*unit_heads, values]


def _convolved(
    form: _Form, x: mx.array, weight: mx.array, state: mx.array | None, segments: mx.array | None
) -> mx.array:
    """The convolution as a sum over taps, of which none reaches into another document."""
    history = form.taps - 1
    if not form.joined:
        state = mx.zeros((x.shape[0], history, x.shape[2]), x.dtype) if state is None else state
        x = mx.concatenate([state, x], axis=1)
    length, total = x.shape[1] - history, mx.zeros((), x.dtype)
    before = None if segments is None else mx.concatenate([*[segments[:, :1]] * history, segments], axis=1)
    for tap in range(form.taps):
        term = wide(x[:, tap : tap + length]) * wide(weight[:, tap])
        if before is not None:
            term = mx.where((before[:, tap : tap + length] == segments)[..., None], term, 0.0)
        total = total + term
    return total.astype(x.dtype)


def workloads(quick: bool) -> list[KernelWorkload]:
    """Return the workloads of the self-test: with and without documents, and with the norms of heads."""
    batch, length, channels, taps, width = (2, 19, 24, 4, 64) if quick else (2, 2048, 2048, 4, 128)
    documents = mx.broadcast_to(mx.arange(length) // (7 if quick else 300), (batch, length))
    shapes = [(batch, taps - 1 + length, channels), (channels, taps)]
    heads = NormedHeads(4, width, 1 / width, width**-0.5, 1e-6 / width)
    joined = 4 * heads.channels
    of_heads = [(batch, length, joined), (batch, taps - 1, joined), (joined, taps)]
    form = _Form(taps, channels, None, joined=True, stateful=False, segmented=False)
    normed = _Form(taps, joined, heads, joined=False, stateful=True, segmented=True)
    return [
        *_passes(form).workloads("convolution", shapes),
        *_passes(replace(form, segmented=True)).workloads("convolution of documents", shapes, documents),
        *_passes(normed).workloads("convolution and norms of heads", of_heads, documents),
    ]
