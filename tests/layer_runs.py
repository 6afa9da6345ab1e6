"""Helpers for tests of a step by layers: the same step as a whole and by layers, and a comparison of their bits."""

import contextlib
import dataclasses
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path

from deltatune.data import Batch
from deltatune.machine.host_memory import as_numpy
from deltatune.models.load import load
from deltatune.models.vision.split import frozen_tower
from deltatune.ops.random_state import drawing_with
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train.batch_loss import arrays, mean_loss_and_gradients
from deltatune.train.by_layer.layer_inputs import InputsOnDisk
from deltatune.train.by_layer.layer_passes import LayerPasses
from deltatune.train.by_layer.store import Store
from deltatune.train.compiled import Compiled
from deltatune.train.distributed import World
from deltatune.train.evaluation.evaluate import Evaluation
from deltatune.train.setup import prepare, training
from deltatune.train.tree import leaves
from deltatune.train.updates.routers import real_lengths, router_loss

ROWS, LENGTH = 2, 24


def batch(packed=False, seed=0):
    """Two rows: three documents in each, or one that fills its row and one that does not."""
    tokens = np.random.default_rng(seed).integers(3, 300, (ROWS, LENGTH + 1)).astype(np.int32)
    weights = np.ones((ROWS, LENGTH), np.float32)
    if packed:
        segments = np.repeat(np.arange(3, dtype=np.int32), 8)[None].repeat(ROWS, 0)
        return Batch(tokens[:, :-1], tokens[:, 1:], weights, segments, (("x",),) * ROWS, ((8, 8, 8),) * ROWS)
    weights[1, 17:] = 0
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, None, (("x",),) * ROWS, ((LENGTH,), (17,)))


def loaded(folder, config, image=None):
    """A model with adapters that change something, and the store of its arrays in files."""
    model = load(folder, lazy=True, image=image).model
    stored = Store(folder, model)
    prepare(model, config)
    stored.find(model)

    def drawn(path, array):
        key = mx.random.key(sum(path.encode()))
        return array + 0.05 * mx.random.normal(array.shape, key=key) if path.endswith("lora_b") else array

    model.update(tree_map_with_path(drawn, model.trainable_parameters()))
    return model, stored


def whole(folder, config, given, image=None):
    """Loss, weight, gradients and figures of a compiled step with checkpoints, and the loss of an evaluation."""
    model, stored = loaded(folder, config, image)
    stored.close()
    with training(model, config, compare=False) as trained:
        model.train()
        routers, key = router_loss(model, config, World()), [mx.random.key(7)]
        lengths = real_lengths(given) if routers else None

        def step(batch, parameters, lengths):
            with drawing_with(key):
                return mean_loss_and_gradients(model, trained.loss, batch, parameters, routers, lengths)

        given_arrays = arrays(given, frozen_tower(model))
        found = Compiled(step, [model.state, key], [key])(given_arrays, model.trainable_parameters(), lengths)
        mx.eval(found)
        return found, evaluated(model, Evaluation(model, trained, World()), given)


@contextlib.contextmanager
def served(model, stored, config, loss=None, streamed=None, inputs=None):
    """Within the context, the model trains by layers; yields the set-up and the passes.

    Layers' inputs stay in memory, or go to the folder `inputs`, or to the store that `inputs` makes for a DiskTime.
    """
    with training(model, config, compare=False) as trained:
        model.train()
        layers = [layer.module for layer in trained.layers]
        stored.place(model, layers, range(len(layers)) if streamed is None else streamed)
        if inputs is not None:
            on_disk = isinstance(inputs, Path)
            stored.inputs = InputsOnDisk(inputs, stored.disk) if on_disk else inputs(stored.disk)
        passes = LayerPasses(model, loss or trained.loss, stored)
        with passes.served():
            yield trained, passes
        stored.close()


def by_layers(folder, config, given, streamed=None, image=None, inputs=None):
    """The same by layers, computed twice, and the store's counts of reads; `inputs` as served() takes it."""
    model, stored = loaded(folder, config, image)
    with served(model, stored, config, streamed=streamed, inputs=inputs) as (trained, passes):
        routers = router_loss(model, config, World())
        lengths = real_lengths(given) if routers else None
        passes.check(packed=config.pack)
        for _ in range(2):
            found = passes.gradients(
                arrays(given, frozen_tower(model)), model.trainable_parameters(), mx.random.key(7), routers, lengths
            )
            loss = evaluated(model, Evaluation(model, dataclasses.replace(trained, passes=passes), World()), given)
    return found, loss, stored, passes


def evaluated(model, evaluation, given):
    class Order:
        batches_per_epoch = 1

        def epoch(self):
            yield given

    return evaluation(Order())


def options(folder, **changes):
    config = TrainConfig(model=str(folder), grad_checkpoint=True, lora_parameters=LoraConfig(rank=4, scale=2.0))
    lora = {name: changes.pop(name) for name in ("dropout", "keys", "rank_pattern") if name in changes}
    return dataclasses.replace(config, lora_parameters=dataclasses.replace(config.lora_parameters, **lora), **changes)


def assert_same_bits(one, other):
    names, others = dict(leaves(one[2])), dict(leaves(other[2]))
    assert names.keys() == others.keys()
    assert [name for name in names if not mx.array_equal(names[name], others[name])] == []
    for array, same in zip([*one[:2], *one[3:]], [*other[:2], *other[3:]], strict=True):
        assert mx.array_equal(array, same)
    assert all(bool(mx.abs(gradient).max() > 0) for gradient in names.values())


class PlainRoom:
    """Stands in for page-locked memory for one array of `size` bytes."""

    def __init__(self, size):
        self.size = size
        self._bytes = np.empty(size, np.uint8)
        self._kind = (), mx.float32

    def write(self, x):
        self._kind = x.shape, x.dtype
        self._bytes[: x.nbytes] = as_numpy(x.reshape(-1).view(mx.uint8))
        return mx.array(0)

    def read(self):
        shape, dtype = self._kind
        size = int(np.prod(shape)) * dtype.size
        return mx.array(self._bytes[:size]).view(dtype).reshape(shape)

    def free(self):
        self._bytes = np.empty(0, np.uint8)
