"""Tests the reads of weights, their order, and the end of a run where they fail."""

import errno
import os
import shutil
import tempfile

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from deltatune.layers import describe
from deltatune.machine import backend, host_memory
from deltatune.machine.disk import PageCache, disk_rate
from deltatune.models.load import load
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.train.by_layer import store
from deltatune.train.by_layer.layer_inputs import DiskTime
from deltatune.train.by_layer.store import Store, UnreadableWeightsError
from deltatune.train.saved.state import weights_digest
from deltatune.train.setup import prepare
from deltatune.train.tree import array_places, leaves

CONFIG = TrainConfig(lora_parameters=LoraConfig(rank=2))


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    return shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "model")


def with_arrays(folder, config=CONFIG):
    """A model that is set up, the store of its weights, its layers, and the arrays that each holds."""
    model = load(folder, lazy=True).model
    stored = Store(folder, model)
    prepare(model, config)
    stored.find(model)
    layers = [layer.module for layer in describe(model)]
    return model, stored, layers, [[place.array for _, place in array_places(layer)] for layer in layers]


def weights_of(folder, streamed, config=CONFIG):
    model, stored, layers, _ = with_arrays(folder, config)
    stored.place(model, layers, streamed)
    return model, stored


def assert_handed_out(stored, given):
    for found, expected in zip(stored.along(range(4)), given, strict=True):
        assert all(map(mx.array_equal, found, expected))


def test_recurrent_states_are_computed_with_their_layer(folder):
    """Its inputs, those of a convolution over a whole prompt, would be held until the last layer."""
    model, weights = weights_of(folder, range(4))
    computed, layout = [], ArrayLayout.measured()

    def compute(y, kept):
        mx.eval(y, kept)
        computed.append([layout.describe(layout.address(array)).primitive for array in kept])

    cache = make_prompt_cache(model)
    with weights.calls(compute).watched():
        model(mx.zeros((1, 8), mx.int32), cache=cache)
    weights.close()
    # Three recurrent layers keep a state and the inputs of a convolution each; an attention's keys are in its output.
    assert computed == [[0, 0], [0, 0], [0, 0], []]


def test_arrays_that_were_read_once_are_handed_out_without_the_file(folder):
    model, weights, layers, given = with_arrays(folder)
    weights.place(model, layers, range(4), on_host=True)
    sizes = [
        sum(place.array.nbytes for path, place in array_places(layer, "") if "lora" not in path) for layer in layers
    ]
    assert weights.on_host == sum(sizes)
    os.remove(folder / "model.safetensors")
    for _ in range(2):
        assert_handed_out(weights, given)
    weights.close()


@pytest.mark.parametrize(("free", "drops"), [(None, True), (10**12, False), (1000, True)])
def test_weights_that_fit_stay_in_the_page_cache(folder, monkeypatch, free, drops):
    dropped = []
    monkeypatch.setattr(host_memory, "free", lambda: free)
    monkeypatch.setattr(PageCache, "drop", lambda self: dropped.append(self))
    _, weights = weights_of(folder, range(4))
    list(weights.along(range(4)))
    assert bool(dropped) == drops
    weights.close()


def test_a_file_system_that_refuses_advice_is_read_all_the_same(folder, monkeypatch):
    """Some refuse it, and one in memory (/dev/shm) has no disk behind it; files may be links to several folders."""
    advised = []

    def refuse(*given):
        advised.append(given)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    monkeypatch.setattr(host_memory, "free", lambda: None)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as memory:
        linked = folder / "model.safetensors"
        linked.symlink_to(shutil.move(linked, memory))
        model, weights, layers, given = with_arrays(folder)
        weights.place(model, layers, range(4))
        assert_handed_out(weights, given)
        weights.close()
        assert len(advised) == 4
        assert disk_rate(linked, 0.01) > 0


def started(weights, monkeypatch):
    """The layers whose reading is started, in order."""
    found = []
    plain = weights._start

    def start(index):
        if index is not None and weights._ahead is None:
            found.append(index)
        plain(index)

    monkeypatch.setattr(weights, "_start", start)
    return found


def test_a_layer_is_read_while_the_one_before_is_in_use(folder, monkeypatch):
    _, weights = weights_of(folder, [0, 2, 3])
    order, read = [0, 1, 2, 3, 3, 2, 1, 0], started(weights, monkeypatch)
    ahead = []
    for _ in weights.along(order):
        ahead.append(None if weights._ahead is None else weights._ahead[0])
    assert ahead == [2, 2, 3, 2, 2, 0, 0, None]
    assert read == [0, 2, 3, 2, 0]
    # The next pass begins with the layer at which this one ended.
    next(weights.along(order))
    assert read == [0, 2, 3, 2, 0, 2]
    weights.close()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_digest_of_a_model_is_the_same_from_the_disk(folder, kind):
    config = TrainConfig(fine_tune_type=kind, lora_parameters=LoraConfig(rank=2))
    model = load(folder).model
    prepare(model, config)
    streamed, weights = weights_of(folder, [0, 1, 3], config)
    assert weights_digest(model, config) == weights_digest(streamed, config, weights)
    weights.close()


def test_a_digest_leaves_the_weights_in_the_gpus_memory(folder, monkeypatch):
    """MLX moves an array whose numbers the host reads out of an NVIDIA GPU's memory, for good."""
    config = TrainConfig(lora_parameters=LoraConfig(rank=2))
    model = load(folder).model
    prepare(model, config)
    expected = weights_digest(model, config)
    kept = {
        host_memory.as_numpy(array.reshape(-1).view(mx.uint8)).ctypes.data for _, array in leaves(model.parameters())
    }
    plain, read = mx.array.__array__, []

    def noting(array, *arguments):
        read.append(plain(array, *arguments))
        return read[-1]

    monkeypatch.setattr(mx.array, "__array__", noting)
    monkeypatch.setattr(host_memory, "PIECE_NUMBERS", 100)
    monkeypatch.setattr(backend, "has_own_memory", lambda: True)
    assert weights_digest(model, config) == expected
    assert read
    assert kept.isdisjoint(numbers.ctypes.data for numbers in read)


def test_an_array_that_a_layer_holds_in_two_places_is_read_once(folder):
    _, stored, _, _ = with_arrays(folder)
    name = next(iter(stored.names.values()))
    one, other = stored.lazily([name, name])
    assert one is other
    stored.close()


def rewritten(file):
    os.utime(file, ns=(1, 1))


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("change", "moment"),
    [(rewritten, "before the next pass"), (cut, "within a pass"), (os.remove, "before the next pass")],
)
def test_files_that_change_end_the_reading(folder, change, moment):
    _, weights = weights_of(folder, range(4))
    passes = weights.along([*range(4), *range(4)])
    for _ in range(4 if moment == "before the next pass" else 1):
        next(passes)
    change(folder / "model.safetensors")
    with pytest.raises(UnreadableWeightsError, match=str(folder)):
        list(passes)
    weights.close()


def test_a_read_that_fails_is_no_zero(folder, monkeypatch):
    """The disk that fails shows the file as it was."""
    _, weights = weights_of(folder, range(4))
    monkeypatch.setattr(Store, "_check", lambda self: None)
    passes = weights.along(range(4))
    next(passes)
    cut(folder / "model.safetensors")
    with pytest.raises(UnreadableWeightsError, match="cannot be read any more"):
        list(passes)


def test_a_run_that_waits_is_told_how_to_wait_less():
    assert DiskTime(0.5, 3_000_000_000).said(100.0) == "Waited 0.5 s for the disk (0%), which gave 3.00 GB."
    assert "--batch-size" in DiskTime(50.0, 1).said(100.0)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_no_model_is_built_to_read_weights_again(folder, monkeypatch, rebuilt):
    """Unless loading does more to the files' tensors than the model itself."""
    built, build = [], Store._built_again
    monkeypatch.setattr(Store, "_built_again", lambda self: built.append(self) or build(self))
    if rebuilt:
        monkeypatch.setattr(store, "stored_parameters", lambda model, path: {})
    model, weights, layers, given = with_arrays(folder)
    weights.place(model, layers, range(4))
    for _ in range(2):
        assert_handed_out(weights, given)
    assert bool(built) == rebuilt
    weights.close()
