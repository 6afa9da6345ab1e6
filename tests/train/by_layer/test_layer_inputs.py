"""Tests that the inputs of layers may go to the disk or the host: the same bits, and nothing is lost with them."""

import ctypes
import shutil
from types import SimpleNamespace

import mlx.core as mx
import pytest

from deltatune.machine import nvidia
from deltatune.ops.kernels import pinned_copies
from deltatune.train.by_layer import layer_inputs
from deltatune.train.by_layer.layer_inputs import DiskTime, InputsOnDisk, InputsOnHost, LostInputsError
from layer_runs import LENGTH, ROWS, PlainRoom, assert_same_bits, batch, by_layers, loaded, options, whole


@pytest.fixture
def kept(tmp_path):
    """kept(where) -> a store of inputs on the disk, or on the host."""

    def made(where, disk=None):
        disk = disk or DiskTime()
        return InputsOnDisk(tmp_path / "inputs", disk) if where == "disk" else InputsOnHost(disk, PlainRoom)

    return made


@pytest.mark.parametrize(
    ("family", "changes", "where"),
    [
        ("qwen3_5", {"dropout": 0.2, "num_layers": 2}, "disk"),
        ("qwen3_5_moe", {"router_aux_loss_coef": 0.1}, "host"),
        pytest.param("qwen3_5_moe", {"router_aux_loss_coef": 0.1}, "disk", marks=pytest.mark.weekly),
        pytest.param("qwen3_next", {"num_layers": 2}, "host", marks=pytest.mark.weekly),
    ],
)
def test_a_step_has_the_bits_of_a_whole_step(tiny_checkpoint, tmp_path, kept, family, changes, where):
    folder = tiny_checkpoint(family, dtype=mx.bfloat16)
    config, given, made = options(folder, **changes), batch(), []

    def inputs(disk):
        made.append(kept(where, disk))
        return made[0]

    found, loss, weights, _ = by_layers(folder, config, given, inputs=inputs)
    expected, of_whole = whole(folder, config, given)
    assert_same_bits(expected, found)
    assert loss == of_whole
    if where == "host":
        assert made[0]._rooms == []
        return
    assert not (tmp_path / "inputs").exists()
    *_, without, _ = by_layers(folder, config, given)
    # Two steps, each of which reads what the layers that train were given.
    hidden = loaded(folder, config)[0].layers[0].input_layernorm.weight.size
    assert weights.disk.read - without.disk.read == 2 * changes.get("num_layers", 4) * ROWS * LENGTH * hidden * 2


@pytest.mark.parametrize("where", ["disk", "host"])
def test_a_pass_that_was_left_leaves_nothing_to_the_next(kept, tmp_path, where):
    inputs, arrays = kept(where), [mx.full((3,), value) for value in range(5)]
    for array in arrays[:3]:
        inputs.keep(array, [])
    assert mx.array_equal(inputs.take(), arrays[2])
    inputs.clear()
    for array in arrays[3:]:
        inputs.keep(array, [])
    assert [inputs.take().tolist() for _ in range(2)] == [[4] * 3, [3] * 3]
    assert list(tmp_path.glob("inputs/*")) == []
    inputs.close()


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


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_arrays_come_back_last_first_from_rooms_that_are_used_again(dtype):
    """The second pass is longer, the third shorter, and its arrays are transposed."""
    rooms, disk = [], DiskTime()

    def room(size):
        rooms.append(PlainRoom(size))
        return rooms[-1]

    inputs = InputsOnHost(disk, room)
    for length, transposed in ((4, False), (7, False), (3, True)):
        arrays = [mx.random.normal((2, length, 5)).astype(dtype) for _ in range(3)]
        arrays = [array.transpose(0, 2, 1) if transposed else array for array in arrays]
        for array in arrays:
            inputs.keep(array, array + 1)
        for array in reversed(arrays):
            found = inputs.take()
            assert (found.dtype, found.shape) == (dtype, array.shape)
            assert mx.array_equal(found, array)
    assert len(rooms) == 6
    assert disk.read == 3 * 2 * (4 + 7 + 3) * 5 * dtype.size
    assert disk.waited > 0
    inputs.close()
    assert all(room._bytes.size == 0 for room in rooms)


def test_memory_that_is_not_there_is_said_and_given_back():
    freed = []

    class Counted(PlainRoom):
        def free(self):
            freed.append(self.size)

    def room(size):
        if size > 12:
            raise MemoryError("no 16 bytes")
        return Counted(size)

    inputs = InputsOnHost(DiskTime(), room)
    inputs.keep(mx.ones(3), [])
    with pytest.raises(LostInputsError, match=r"host's memory has no room for inputs of layers \(no 16 bytes\)"):
        inputs.keep(mx.ones(4), [])
    assert freed == [12]


def test_an_nvidia_gpu_copies_between_addresses(monkeypatch):
    """The kernels are stood in for by Python, with the arguments that a GPU would be given."""
    memory = ctypes.create_string_buffer(64)
    address, freed = ctypes.addressof(memory), []

    def launched(kernel, inputs, shape, dtype):
        x, place = inputs[0], inputs[1].tolist()
        at, size = place[0] | place[1] << 32, place[2] | place[3] << 32
        if kernel is pinned_copies._TO_HOST:
            ctypes.memmove(at, bytes(memoryview(x)), size)
            return mx.ones(shape, dtype)
        assert x.tolist() == [1]
        return mx.array(list(ctypes.string_at(at, size)), mx.uint8).view(dtype).reshape(shape)

    monkeypatch.setattr(pinned_copies, "_launched", launched)
    monkeypatch.setattr(nvidia, "pinned", lambda size: address if size <= 64 else None)
    monkeypatch.setattr(nvidia, "free_pinned", freed.append)
    inputs, x = InputsOnHost(DiskTime(), pinned_copies.PinnedRoom), mx.random.normal((2, 3))
    inputs.keep(x, [])
    assert mx.array_equal(inputs.take(), x)
    with pytest.raises(LostInputsError, match="no 68 bytes of page-locked memory"):
        inputs.keep(mx.ones(17), [])
    assert freed == [address]
