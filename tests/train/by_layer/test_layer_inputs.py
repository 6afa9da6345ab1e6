"""Tests that the inputs of layers may go to the disk: the same bits in less memory, and nothing is lost with them."""

import shutil
from types import SimpleNamespace

import mlx.core as mx
import pytest

from deltatune.train.by_layer import layer_inputs
from deltatune.train.by_layer.layer_inputs import DiskTime, InputsOnDisk, LostInputsError
from layer_runs import LENGTH, ROWS, assert_same_bits, batch, by_layers, loaded, options, whole


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_5", {"dropout": 0.2}),
        ("qwen3_5_moe", {"router_aux_loss_coef": 0.1}),
        ("qwen3_next", {"num_layers": 2}),
    ],
)
def test_a_step_has_the_bits_of_a_whole_step(tiny_checkpoint, tmp_path, family, changes):
    folder = tiny_checkpoint(family, dtype=mx.bfloat16)
    config, given = options(folder, **changes), batch()
    found, _, weights, _ = by_layers(folder, config, given, inputs=tmp_path / "inputs")
    assert_same_bits(whole(folder, config, given)[0], found)
    *_, without, _ = by_layers(folder, config, given)
    # Two steps, each of which reads what the layers that train were given.
    hidden = loaded(folder, config)[0].layers[0].input_layernorm.weight.size
    assert weights.disk.read - without.disk.read == 2 * changes.get("num_layers", 4) * ROWS * LENGTH * hidden * 2
    assert not (tmp_path / "inputs").exists()


def test_a_pass_that_was_left_leaves_nothing_to_the_next(tmp_path):
    inputs, arrays = InputsOnDisk(tmp_path / "inputs", DiskTime()), [mx.full((3,), value) for value in range(4)]
    for array in arrays[:2]:
        inputs.keep(array, [])
    assert mx.array_equal(inputs.take(), arrays[1])
    inputs.clear()
    for array in arrays[2:]:
        inputs.keep(array, [])
    assert [inputs.take().tolist() for _ in range(2)] == [[3] * 3, [2] * 3]
    assert list((tmp_path / "inputs").iterdir()) == []
    inputs.close()


def test_a_file_that_cannot_be_written_makes_room(tmp_path, monkeypatch):
    inputs = InputsOnDisk(tmp_path / "inputs", DiskTime())
    inputs.keep(mx.ones(3), [])
    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(LostInputsError, match=str(tmp_path)):
        inputs.keep(mx.ones(3), [])
    # The run's state needs it.
    assert not (tmp_path / "inputs").exists()


@pytest.mark.parametrize(("computes", "waited"), [(0.5, 0.0), (0.0, 3.0)])
def test_writing_is_waited_for_unless_a_layer_computes_for_longer(tmp_path, monkeypatch, computes, waited):
    """Writing takes 3 s of a clock that is not the machine's."""
    disk, computing, now, plain = DiskTime(), [mx.ones(3)], [0.0], mx.eval

    def written(*_):
        now[0] += 3.0

    def evaluated(*arrays):
        plain(*arrays)
        now[0] += computes if arrays[0] is computing else 0.0

    monkeypatch.setattr(layer_inputs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(mx, "save_safetensors", written)
    monkeypatch.setattr(mx, "eval", evaluated)
    InputsOnDisk(tmp_path / "inputs", disk).keep(mx.ones(3), computing)
    assert disk.waited == waited


def test_a_file_that_is_gone_is_said(tmp_path):
    inputs = InputsOnDisk(tmp_path / "inputs", DiskTime())
    inputs.keep(mx.ones(3), [])
    shutil.rmtree(tmp_path / "inputs")
    with pytest.raises(LostInputsError, match=str(tmp_path)):
        inputs.take()


def full(*_):
    raise RuntimeError("[write] Unable to write 12 bytes to file.")
