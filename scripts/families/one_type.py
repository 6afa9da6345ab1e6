"""Trains a tiny model of each type given in every way of the matrix, and prints a line of JSON on each.

usage: python scripts/families/one_type.py TYPE ...

A result is a number, the largest relative error of gradients or logits, or True; or a sentence that says why not.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  Before mlx: it binds MLX to a fast BLAS.

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from packages import Package, logits_of, package_of
from pictures import PicturedRows, spec_of, with_picture
from table import NO_RUN

from deltatune.data.example import Example, Splits
from deltatune.errors import UserError
from deltatune.layers import describe
from deltatune.models.checkpoint_writer import merge_checkpoint
from deltatune.models.document_isolation import check_packing
from deltatune.models.layer_caches import carries
from deltatune.ops import layer_cut
from deltatune.ops.checkpoint import checkpointed
from deltatune.ops.segments import segments
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import patched
from deltatune.train import Trainer
from deltatune.train.reports.screen import Screen
from deltatune.train.setup import prepare

# Rows of so many tokens, longer than every window of sizes.py, and the documents of a packed row.
LENGTH, DOCUMENTS = 40, (16, 24)
# What two ways to compute the same gradient in fp32 may differ by, of the largest tensor of the model.
BOUND = 1e-4
# Seconds for a type, after which the process ends; each takes five on one core.
LIMIT = 600

Gradients = dict[str, mx.array]


def main(kind: str) -> dict[str, Any]:
    """Return the results of a type, by the name of the column."""
    package, results = package_of(kind), dict[str, Any]()
    try:
        config = package.config_of(kind)
        model = make(package, config)
    except Exception as error:  # noqa: BLE001  (a row of the matrix says what came)
        return {"made": _sentence(error)}
    results["kinds"] = sorted({layer.kind for layer in describe(model)})
    columns: dict[str, Callable[[], Any]] = {
        **_of_gradients(model),
        "packed fp32": lambda: _packed(package, config, mx.float32),
        "packed bf16": lambda: _packed(package, config, mx.bfloat16),
        "4 bits": lambda: _quantised(package, config),
    }
    if spec_of(model) is not None:
        columns["images"] = lambda: _images(model)
    for name, column in columns.items():
        results[name] = _tried(column)
    with tempfile.TemporaryDirectory() as folder:
        results |= _runs(Path(folder), package, config)
    return results


def _tried(column: Callable[[], Any]) -> Any:
    try:
        return column()
    except UserError as error:
        return f"refused: {' '.join(str(error).split())[:200]}"
    except Exception as error:  # noqa: BLE001  (a row of the matrix says what came)
        return _sentence(error)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _without_gradient(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    return lambda *arguments, **options: mx.stop_gradient(function(*arguments, **options))


def make(package: Package, config: dict[str, Any]) -> nn.Module:
    """Make a model with random weights, and noise on those that start constant, so that no gradient hides."""
    model = package.new(config)

    def vary(path: str, array: mx.array) -> mx.array:
        # Rotations of Hadamard's kind have signs, which must stay 1 or -1.
        if (
            path.endswith(".signs")
            or not mx.issubdtype(array.dtype, mx.floating)
            or (array.size > 1 and (array.max() != array.min()).item())
        ):
            return array
        return array + 0.1 * mx.random.normal(array.shape).astype(array.dtype)

    model.update(tree_map_with_path(vary, model.parameters()))
    model.set_dtype(mx.float32)
    vars(model).setdefault("_no_grad", set())
    mx.eval(model.parameters())
    return model


def _rows(seed: int = 0, length: int = LENGTH) -> mx.array:
    return mx.random.randint(3, 300, (2, length + 1), key=mx.random.key(seed))


def _loss(model: nn.Module, rows: mx.array) -> mx.array:
    logits = logits_of(model, rows[:, :-1])
    return nn.losses.cross_entropy(logits.astype(mx.float32), rows[:, 1:]).sum()


def gradients(model: nn.Module, rows: mx.array) -> Gradients:
    """Return the gradients of all trainable parameters by plain autodiff, or by deltatune's under its patches."""
    _, tree = nn.value_and_grad(model, _loss)(model, rows)
    mx.eval(tree)
    return dict(tree_flatten(tree))


def error_of(found: Gradients, expected: Gradients) -> float | str:
    """Return the largest difference of a tensor, relative to the largest tensor; a sentence where it is too large."""
    largest = max(_norm(array) for array in expected.values())
    errors = {name: _norm(found[name] - array) / largest for name, array in expected.items()}
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] < BOUND:
        return f"wrong: the gradient of {worst} is off by {errors[worst]:.1e} of the largest"
    return errors[worst]


def _norm(array: mx.array) -> float:
    return mx.linalg.norm(array.astype(mx.float32).reshape(-1)).item()


def _of_gradients(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Return the columns that compare the gradients of the whole model with plain autodiff's."""
    model.train()
    rows, plain = _rows(), {}

    def expected() -> Gradients:
        if not plain:
            plain.update(gradients(model, rows))
        return plain

    def full() -> float | str:
        with patched(model):
            found = gradients(model, rows)
        return error_of(found, expected())

    def with_checkpoints() -> float | str:
        with patched(model):
            layers = describe(model)
            with checkpointed([layer.module for layer in layers], carries(model, layers)):
                found = gradients(model, rows)
        return error_of(found, expected())

    def long_rows() -> float | str:
        # Pieces of ten tokens.
        before, layer_cut.PIECE_BYTES = layer_cut.PIECE_BYTES, dict.fromkeys(layer_cut.PIECE_BYTES, 10 * 2 * 64 * 4)
        try:
            return with_checkpoints()
        finally:
            layer_cut.PIECE_BYTES = before

    return {"full": full, "checkpoints": with_checkpoints, "long rows": long_rows}


def _images(model: nn.Module) -> float | str:
    """Compare the gradients of rows with pictures, the tower's among them, with plain autodiff's."""
    model.train()
    rows = PicturedRows(spec_of(model), 16)

    def of(logits: Callable[[nn.Module], mx.array]) -> Gradients:
        def loss(model: nn.Module) -> mx.array:
            found = logits(model).astype(mx.float32)[:, :-1]
            return nn.losses.cross_entropy(found, rows.tokens[:, 1:]).sum()

        _, tree = nn.value_and_grad(model, loss)(model)
        mx.eval(tree)
        return dict(tree_flatten(tree))

    plain = of(rows.upstream)
    with patched(model):
        return error_of(of(rows.ours), plain)


def _packed(package: Package, config: dict[str, Any], dtype: mx.Dtype) -> float | bool | str:
    """Compare the gradients of packed rows with those of their documents alone, where packing is admitted."""
    model = make(package, config)
    model.set_dtype(dtype)
    with patched(model):
        check_packing(model, 2048)
        model.train()
        first, second = (_rows(seed, length) for seed, length in enumerate(DOCUMENTS))
        # The first token of a document is predicted from nothing, so each document has one token less.
        owners = mx.array([[0] * (first.shape[1] - 1) + [1] * (second.shape[1] - 1)] * 2, mx.int32)
        layers = describe(model)

        def loss(model: nn.Module) -> mx.array:
            logits = logits_of(model, mx.concatenate([first[:, :-1], second[:, :-1]], axis=1))
            targets = mx.concatenate([first[:, 1:], second[:, 1:]], axis=1)
            return nn.losses.cross_entropy(logits.astype(mx.float32), targets).sum()

        with segments(owners), checkpointed([layer.module for layer in layers], carries(model, layers)):
            _, tree = nn.value_and_grad(model, loss)(model)
            mx.eval(tree)
        found = dict(tree_flatten(tree))
        if dtype != mx.float32:
            return all(mx.isfinite(array).all().item() for array in found.values())
        alone = [gradients(model, rows) for rows in (first, second)]
    return error_of(found, {name: alone[0][name] + alone[1][name] for name in found})


def _quantised(package: Package, config: dict[str, Any]) -> float | str:
    """Compare the gradients of LoRA on weights of 4 bits with plain autodiff's."""
    model = make(package, config)
    nn.quantize(model, 32, 4, class_predicate=lambda path, module: _quantizable(model, path, module))
    prepare(model, _options("model", "lora"))
    model.update(tree_map(lambda a: a + 0.02 * mx.random.normal(a.shape).astype(a.dtype), model.trainable_parameters()))
    model.train()
    rows = _rows()
    with patched(model):
        found = gradients(model, rows)
    return error_of(found, gradients(model, rows))


def _quantizable(model: nn.Module, path: str, module: nn.Module) -> bool:
    """Whether mlx_lm.convert would quantise a module in groups of 32."""
    asked = getattr(model, "quant_predicate", None) or (lambda *_: True)
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0 and bool(asked(path, module))


def _options(folder: str | Path, name: str, **more: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": str(folder),
        "data": "rows",
        "adapter_path": f"{folder}/{name}",
        "batch_size": 2,
        "iters": 2,
        "learning_rate": 1e-2,
        "lr_schedule": "constant",
        "warmup": 0.0,
        "max_seq_length": 64,
        "val_batches": 0,
        "lora_parameters": LoraConfig(rank=2, scale=4.0, dropout=0.0),
    }
    return TrainConfig(**values | more)


def _runs(folder: Path, package: Package, config: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of whole runs: LoRA, one that continues, and the merge of its adapter."""
    model = make(package, config)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    examples = _examples(model)

    def train(name: str, **more: Any) -> nn.Module:
        options = _options(folder, name, **more)
        model, read = package.load(folder)
        prepare(model, options)
        Trainer(model, None, options, Splits(examples), model_config=read, screen=Screen(shown=False)).run()
        return model

    trained: list[nn.Module] = []

    def whole() -> bool | str:
        trained.append(train("lora"))
        updates = [array for name, array in tree_flatten(trained[0].trainable_parameters()) if name.endswith("lora_b")]
        return True if any(mx.abs(array).max().item() > 0 for array in updates) else "wrong: no adapter trained"

    def resumed() -> bool | str:
        train("halves", iters=1)
        again = train("halves", resume=True)
        pairs = zip(tree_flatten(again.parameters()), tree_flatten(trained[0].parameters()), strict=True)
        other = [name for (name, array), (_, expected) in pairs if not mx.array_equal(array, expected)]
        return True if not other else f"wrong: {other[0]} differs from the run in one go"

    def merged() -> float | str:
        merge_checkpoint(folder, folder / "lora", folder / "merged")
        model, _ = package.load(folder / "merged")
        return error_of({"logits": _logits(model)}, {"logits": _logits(trained[0])})

    results = {"lora": _tried(whole)}
    for name, column in {"resumed": resumed, "merged": merged}.items():
        results[name] = _tried(column) if results["lora"] is True else NO_RUN
    return results


def _examples(model: nn.Module) -> list[Example]:
    """Return eight rows, each with a picture where the model has a tower that deltatune trains."""
    drawn, spec, examples = np.random.default_rng(0), spec_of(model), []
    for number in range(8):
        tokens, pictures = drawn.integers(10, 300, 30).astype(np.int32), None
        if spec is not None:
            tokens, pictures = with_picture(tokens, spec, drawn)
        examples.append(Example(tokens, np.arange(len(tokens)) > 0, f"row {number}", pictures))
    return examples


def _logits(model: nn.Module) -> mx.array:
    model.eval()
    logits = logits_of(model, _rows()[:, :-1])
    # Some models close tokens that their tokenizer does not have by -inf.
    return mx.where(mx.isinf(logits), 0, logits)


def with_fixed_choices(replace: Callable[[str, Callable[..., mx.array]], None]) -> None:
    """Replace MLX's functions that choose experts: MLX refuses a gradient of indices, and the choice has none."""
    for name in ("argpartition", "argsort", "argmax"):
        replace(name, _without_gradient(getattr(mx, name)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with_fixed_choices(partial(setattr, mx))
    for asked in sys.argv[1:]:
        signal.alarm(LIMIT)
        print(json.dumps({"type": asked} | main(asked)), flush=True)
