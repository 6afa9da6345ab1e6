"""The simulation agrees with MLX's own allocator to the buffer."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from counted_programs import LINUX, output_of
from deltatune.options.config import TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.device_limits import Brake
from deltatune.plan.forecast import forecast_step
from deltatune.plan.graph import evaluation_order, read
from deltatune.plan.simulate import PACES, Pace, Simulation
from deltatune.plan.traced_step import BatchShape
from deltatune.train.setup import prepare

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def graphs():
    return output_of(FOLDER / "counted_graphs.py")


@LINUX
def test_every_buffer_and_byte_of_small_graphs_is_foreseen(graphs):
    assert len(graphs) > 25
    wrong = {name: found for name, found in graphs.items() if found["simulated"] != found["counted"]}
    assert not wrong
    assert all(simulated == counted for simulated, counted in (found["left"] for found in graphs.values()))


@LINUX
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"family": "qwen3_5_moe", "depth": 2, "tokens": 256, "iterations": 3}, marks=pytest.mark.weekly),
        {"depth": 2, "tokens": 64, "rows": 2, "accumulate": 2, "checkpoint": True, "iterations": 2},
    ],
    ids=["experts", "accumulated, checkpointed"],
)
def test_training_is_foreseen_within_five_and_ten_percent(options):
    benchmark = Path(__file__).parents[2] / "benchmarks" / "plan.py"
    found = output_of(benchmark, "--worker", json.dumps(options | {"waiting": True}))
    assert found["planned"] == pytest.approx(found["counted"], rel=0.05)
    assert found["planned_bytes"] == pytest.approx(found["counted_bytes"], rel=0.10)


@LINUX
def test_mlx_waits_for_queued_work_above_its_memory_limit_as_foreseen():
    """In a process of its own: work that other tests have queued shifts where a task of MLX's begins."""
    found = output_of(FOLDER / "counted_queue.py")
    one = found["array"]
    assert found["counted"] <= found["planned"]
    assert 10 * one < found["counted within"] <= found["planned within"]
    assert found["planned within"] < found["planned"] / 2


@pytest.mark.parametrize(("once", "tasks"), [(False, 6), (True, 4)])
def test_metal_counts_an_array_that_several_operations_read_once_a_task(once, tasks, monkeypatch):
    """Twelve products read 2^20 elements twice each, and a task ends after 4 x 2^20."""
    ended, plain = [], Simulation._end_task
    monkeypatch.setattr(Simulation, "_end_task", lambda machine: ended.append(machine) or plain(machine))
    x = mx.zeros((1024, 1024))
    others = [mx.zeros((1024, 1024)) for _ in range(12)]
    layout = ArrayLayout.measured()
    products = [x @ other for other in others]
    outputs = read(layout, products, {layout.address(one) for one in (x, *others)})
    machine = Simulation(Pace(10**9, 4 << 20, reads_once=once))
    order = evaluation_order(outputs, 20)
    machine.add_leaves([outputs[0].inputs[0], *(output.inputs[1] for output in outputs)])
    machine.evaluate(order, outputs)
    assert len(ended) == tasks


@pytest.mark.parametrize(("least", "limit"), [(50, 70), (80, 88), (95, 100)])
def test_a_step_waits_from_where_it_needs_to(least, limit):
    assert Brake(most=100, free=70).limit(least) == limit


def test_a_plan_says_from_where_its_step_waits(tiny_model, monkeypatch):
    """On an NVIDIA GPU, where the queue holds the results of several layers."""
    monkeypatch.setitem(PACES, "cpu", PACES["cuda"])
    model, config = tiny_model("qwen3_5", num_hidden_layers=12, full_attention_interval=3), TrainConfig()
    prepare(model, config)

    def planned(brake):
        return forecast_step(model, config, BatchShape(1, 128), ArrayLayout.measured(), brake=brake)

    ahead, waiting = planned(None), planned(Brake(0, 0))
    least = waiting.bytes.amount
    assert least < 0.9 * ahead.bytes.amount
    assert (ahead.memory_limit, waiting.memory_limit) == (None, 0)
    free = planned(Brake(10**12, 10**12))
    assert (free.memory_limit, free.bytes) == (10**12, ahead.bytes)
    between = planned(Brake(10**12, 0))
    assert between.memory_limit == int(1.1 * least)
    assert least <= between.bytes.amount < ahead.bytes.amount
