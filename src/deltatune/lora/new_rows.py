"""Rows for new tokens in an embedding and an output head, which train beside the frozen old rows.

MLX trains arrays and not parts of arrays, so the new rows are an array of their own, in fp32 as adapters are. The old
rows keep their array, dense or quantised, until `plain` joins the two. A table that its owner reads directly cannot get
rows, or an adapter: `directly_read` finds such modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import UserError
from ..layers import without_pictures
from ..ops.functional import arrays_of, undisturbed
from ..ops.random_state import drawing_from
from .adapter import Adapter
from .weights import OUTPUT_SCALES, dense_rows, is_quantized, with_weight

# The arrays of a module that its owner may read directly.
_ARRAY_NAMES = ("weight", "scales", "biases", "bias")
# The mean of the old rows is summed over blocks of this many, so that no fp32 copy of the table is made.
_BLOCK = 8192
# Names of the new rows in adapter files. By these names mlx-lm refuses such a file; it would read beyond the table.
_STORED = {"new_rows": "weight.new_rows", "new_bias": "bias.new_rows"}


class GrownTable(nn.Module):
    """A frozen table of old rows and an array of `count` new ones: the base class of GrownEmbedding and GrownLinear.

    New rows start at the mean of the old ones. `first` is the id of the first; None for the one behind the base's last.
    Rows of the base that nobody trained may stand there and behind it; those with the ids of new rows are not used.
    """

    base_kinds: ClassVar[tuple[type[nn.Module], ...]]
    # The dense class that stands for a quantised base where `plain` dequantises it.
    dense_class: ClassVar[type[nn.Module]]

    def __init__(self, base: nn.Module, count: int, first: int | None = None):
        super().__init__()
        self.base = base
        self.first = base["weight"].shape[0] if first is None else first
        mean = _mean_row(base, self.first)
        self.new_rows = mx.broadcast_to(mean, (count, *mean.shape)) + 0
        if "bias" in base:
            self.new_bias = mx.broadcast_to(base["bias"].astype(mx.float32).mean(), (count,)) + 0

    @property
    def rows(self) -> int:
        """The number of rows of the whole table."""
        return max(self.base["weight"].shape[0], self.end)

    @property
    def end(self) -> int:
        """The id behind the last new row."""
        return self.first + self.new_rows.shape[0]

    def joined(self, old: mx.array, new: mx.array) -> mx.array:
        """Return the logits of all rows, from those of the base's rows and of the new ones."""
        return mx.concatenate([old[..., : self.first], new.astype(old.dtype), old[..., self.end :]], axis=-1)

    def plain(self, dequantize: bool = False) -> nn.Module:
        """Return a module of the base's class that holds all rows.

        The old rows keep their bits. The new ones get the dtype of the old, or are quantised as they are, unless
        `dequantize` asks for a dense module.
        """
        new_rows = self.new_rows.astype(dense_rows(self.base, 0, 1).dtype)
        added = with_weight(self.base, new_rows, self.dense_class, dequantize)
        if "bias" in self.base:
            added.bias = self["new_bias"].astype(self.base["bias"].dtype)
        dense = dequantize and is_quantized(self.base)
        old = with_weight(self.base, dense_rows(self.base), self.dense_class, True) if dense else self.base
        arrays: Any = {
            name: mx.concatenate([old[name][: self.first], array, old[name][self.end :]])
            for name, array in added.parameters().items()
        }
        return added.update(arrays)


class GrownEmbedding(GrownTable):
    """An embedding with new rows that train, also where it serves as the output head."""

    base_kinds = (nn.Embedding, nn.QuantizedEmbedding)
    dense_class = nn.Embedding

    def __call__(self, ids: mx.array) -> mx.array:
        is_new = (ids >= self.first) & (ids < self.end)
        old = self.base(mx.where(is_new, 0, ids))
        new: Any = _take_rows(self.new_rows, mx.where(is_new, ids, self.first) - self.first)
        return mx.where(is_new[..., None], new.astype(old.dtype), old)

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits [..., rows] of x [..., dims], for a head that is tied to the embedding."""
        return self.joined(self.base.as_linear(x), x @ self.new_rows.T)


class GrownLinear(GrownTable):
    """An output head with new rows that train."""

    base_kinds = (nn.Linear, nn.QuantizedLinear)
    dense_class = nn.Linear

    def __call__(self, x: mx.array) -> mx.array:
        new = x @ self.new_rows.T
        return self.joined(self.base(x), new + self.new_bias if "new_bias" in self else new)


@mx.custom_function
def _take_rows(rows: mx.array, index: mx.array) -> mx.array:
    return rows[index]


@_take_rows.vjp
def _add_to_rows(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, mx.array]:
    # MLX's own gradient of rows[index] adds in the order in which a GPU's threads arrive; a product has one order.
    rows, index = primals
    chosen = mx.arange(rows.shape[0])[:, None] == index.reshape(1, -1)
    return chosen.astype(rows.dtype) @ cotangent.reshape(-1, rows.shape[1]), mx.zeros_like(index)


def _mean_row(module: nn.Module, count: int) -> mx.array:
    """Return the mean of the first `count` rows."""
    starts = range(0, count, _BLOCK)
    blocks = (dense_rows(module, at, min(at + _BLOCK, count)).astype(mx.float32) for at in starts)
    return sum((block.sum(axis=0) for block in blocks), mx.array(0.0)) / count


def table_kind(module: nn.Module) -> type[GrownTable] | None:
    """Return the class that adds rows to a module, or None where the module is no table of tokens."""
    kinds: tuple[type[GrownTable], ...] = (GrownEmbedding, GrownLinear)
    calls = {kind: [base.__call__ for base in kind.base_kinds] for kind in kinds}
    return next((kind for kind in kinds if type(module).__call__ in calls[kind]), None)


def row_count(module: nn.Module) -> int:
    """Return the number of rows of an embedding or a linear module, whatever was added to it."""
    if isinstance(module, GrownTable):
        return module.rows
    return row_count(module.base) if isinstance(module, Adapter) else module["weight"].shape[0]


def grown_tables(model: nn.Module) -> dict[str, GrownTable]:
    """Return the modules of `model` that have new rows, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, GrownTable)}


def add_rows(model: nn.Module, counts: Mapping[str, int], first: int | None = None) -> None:
    """Add rows to modules of `model`, in place: the numbers of new rows by path, and the id of the first, as in
    GrownTable.

    UserError for a module with an adapter, of another kind, or with a weight that the model reads directly.
    """
    if not counts:
        return
    modules = dict(model.named_modules())
    tables = {path: modules[path] for path in counts}
    for path, module in tables.items():
        if isinstance(module, Adapter):
            raise UserError(f"{path}: it has an adapter already; add rows before adapters.")
        if table_kind(module) is None or any(name in module for name in ("global_scale", *OUTPUT_SCALES)):
            raise UserError(f"{path}: rows for new tokens cannot be added to this {type(module).__name__}.")
    for path, array in directly_read(model, tables).items():
        raise UserError(f"{path}: rows for new tokens cannot be added, since the model reads its {array} directly.")
    grown: list[tuple[str, nn.Module]] = []
    for path, module in tables.items():
        kind: Any = table_kind(module)
        grown.append((path, kind(module, counts[path], first).train(module.training)))
    model.update_modules(tree_unflatten(grown))


def unfreeze_new_rows(model: nn.Module) -> None:
    """Make the new rows of all tables trainable; their old rows stay as they are."""
    for table in grown_tables(model).values():
        table.unfreeze(recurse=False)


def plain_parameters(model: nn.Module) -> dict[str, mx.array]:
    """Return the parameters of `model` by path, with each grown table as the one table that a checkpoint holds."""
    tables = grown_tables(model)
    inside = tuple(f"{path}." for path in tables)
    flat = arrays_of(model.parameters())
    parameters = {name: array for name, array in flat.items() if not name.startswith(inside)}
    for path, table in tables.items():
        parameters |= {f"{path}.{name}": array for name, array in arrays_of(table.plain().parameters()).items()}
    return parameters


def stored_rows(model: nn.Module) -> dict[str, mx.array]:
    """Return the new rows of `model` by the names that adapter files give them."""
    tables = grown_tables(model).items()
    return {f"{path}.{_STORED[name]}": table[name] for path, table in tables for name in _STORED if name in table}


def parameter_name(stored: str) -> str | None:
    """Return the name that a tensor of an adapter file has in a grown model, or None if it holds no new rows."""
    for name, ending in _STORED.items():
        if stored.endswith(f".{ending}"):
            return stored.removesuffix(ending) + name
    return None


def directly_read(model: nn.Module, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the name of an array that other code than its module's methods reads in a forward pass, by the module's
    path.

    An adapter or new rows change the output of a call of a module, which such an owner would bypass. MLX is lazy, so
    that the passes only build graphs. They are one in training mode over two tokens, and two in inference
    mode over two tokens and one, since models branch on both. The stand-ins are of another class than the candidates,
    as adapters are: an owner that reads the arrays of nn.Linear alone (after a test of the class) would call an
    adapter. Afterwards the model, its layers' caches and the random state are as before.
    """
    read: dict[str, list[str]] = {path: [] for path in candidates}
    stand_ins = [(path, _StandIn(module, read[path])) for path, module in candidates.items()]
    with drawing_from(mx.random.key(0)), undisturbed(model):
        model.update_modules(tree_unflatten(stand_ins))
        try:
            for training, length in ((True, 2), (False, 2), (False, 1)):
                model.train(training)
                model(mx.zeros((1, length), dtype=mx.int32), **without_pictures(model))
        finally:
            # Of a list of modules, undisturbed() keeps the list itself.
            model.update_modules(tree_unflatten(list(candidates.items())))
    return {path: names[0] for path, names in read.items() if names}


class _StandIn(nn.Module):
    """Passes calls on to a module, as an adapter would, and adds the names of the module's arrays that are read."""

    def __init__(self, module: nn.Module, read: list[str]) -> None:
        super().__init__()
        # object.__setattr__ keeps nn.Module from registering the module as a child.
        object.__setattr__(self, "_module_and_read", (module, read))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module_and_read[0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        module, read = self._module_and_read
        if name in _ARRAY_NAMES and name in module:
            read.append(name)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARRAY_NAMES:
            setattr(self._module_and_read[0], name, value)
        else:
            super().__setattr__(name, value)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self._module_and_read[0] else default
