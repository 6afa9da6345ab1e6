"""Measures what a step by layers costs beside a step as a whole, in CPU seconds, on a machine that others may share.

usage: python benchmarks/layers_cpu.py [--tokens 512 2048 8192] [--times 3] [--width 512] [--layers 6]

A model of Qwen3.5's form with random fp32 weights trains one row with LoRA r=8 on every linear. Its steps are taken by
turns: as a whole with every layer checkpointed, by layers with all weights in memory, by layers with all of them in the
file, which is as likely as not in the system's page cache, and with the inputs of layers in files too. Printed are the
CPU seconds of a step, the least of so many, MLX's peak above what the kinds hold together, and how long those that read
files waited for them.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

import processes
from deltatune.models.load import load
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train.batch_loss import arrays, mean_loss_and_gradients
from deltatune.train.by_layer.layer_inputs import InputsOnDisk
from deltatune.train.by_layer.layer_passes import LayerPasses
from deltatune.train.by_layer.store import Store
from deltatune.train.compiled import Compiled
from deltatune.train.setup import prepare, training
from machine import heading
from recipe import write_tokenizer
from trainers import Shape, batch_of, mlx_model


def write_model(folder: Path, shape: Shape) -> None:
    """Write a checkpoint of random weights."""
    folder.mkdir()
    model = mlx_model(shape)
    weights = {name.removeprefix("language_model."): value for name, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(shape.config()))
    write_tokenizer(folder)


def step_of(folder: Path, kind: str, stack: ExitStack) -> tuple[Callable[[Shape], float], Store | None]:
    """A step of one kind, which returns its loss; and what its layers' weights are read from."""
    config = TrainConfig(grad_checkpoint=True, lora_parameters=LoraConfig(rank=8))
    model = load(folder, lazy=True).model
    stored = Store(folder, model)
    prepare(model, config)
    stored.find(model)
    trained = stack.enter_context(training(model, config, compare=False))
    model.train()
    layers = [layer.module for layer in trained.layers]
    key = mx.random.key(0)
    if kind == "as a whole":
        mx.eval(model.parameters())
        whole = Compiled(lambda batch, used: mean_loss_and_gradients(model, trained.loss, batch, used), [model.state])

        def step(shape: Shape) -> float:
            found = whole(arrays(batch_of(shape.rows())), model.trainable_parameters())
            mx.eval(found)
            return float(found[0])

        return step, None
    weights = stored
    weights.place(model, layers, range(len(layers)) if "file" in kind else ())
    if "inputs" in kind:
        weights.inputs = InputsOnDisk(folder / "inputs", weights.disk)
    passes = LayerPasses(model, trained.loss, weights)
    stack.enter_context(passes.served())
    return lambda shape: float(
        passes.gradients(arrays(batch_of(shape.rows())), model.trainable_parameters(), key)[0]
    ), weights


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    width = options.width
    heads = width // 64
    print(f"{heading()}\n", flush=True)
    kinds = ("as a whole", "by layers", "by layers, from the file", "by layers, from the file, and inputs in files")
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        shape = Shape("small", width, 3 * width, options.layers, (heads, heads // 2, 64), (heads, heads, 64), 2048, 1,
                      512, "float32", interval=3)  # fmt: skip
        write_model(Path(temporary, "model"), shape)
        steps = {kind: step_of(Path(temporary, "model"), kind, stack) for kind in kinds}
        for tokens in options.tokens:
            row = Shape(**{**vars(shape), "tokens": tokens})
            losses = {kind: step(row) for kind, (step, _) in steps.items()}
            assert len(set(losses.values())) == 1, losses
            seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
            waited: dict[str, list[float]] = {kind: [] for kind in kinds if "file" in kind}
            peaks: dict[str, int] = {}
            for _ in range(options.times):
                for kind, (step, weights) in steps.items():
                    started, before = time.process_time(), 0.0 if weights is None else weights.disk.waited
                    held = mx.get_active_memory()
                    mx.reset_peak_memory()
                    step(row)
                    peaks[kind] = mx.get_peak_memory() - held
                    seconds[kind].append(time.process_time() - started)
                    if "file" in kind and weights is not None:
                        waited[kind].append(weights.disk.waited - before)
            least = {kind: min(each) for kind, each in seconds.items()}
            for kind, each in least.items():
                ratio, wait = (
                    each / least["as a whole"],
                    f"; waited {min(waited[kind]):.2f} s" if kind in waited else "",
                )
                print(
                    f"{tokens:,} tokens, {kind}: {each:.2f} CPU s ({ratio:.2f}), {peaks[kind] / 1e6:,.0f} MB{wait}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
