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
from deltatune.plan.simulate import PACES, Simulation
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
        {"family": "qwen3_5_moe", "depth": 2, "tokens": 256, "iterations": 3},
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
    """Sixty products, each summed at once: what is alive at a time is what waits in the queue."""
    x = mx.random.normal((512, 512))
    mx.eval(x)
    layout, held = ArrayLayout.measured(), x.nbytes

    def peaks(limit):
        total = sum(((x @ (x + number)).sum() for number in range(60)), mx.array(0.0))
        leaf = layout.address(x)
        machine, (out,) = Simulation(layout, PACES["cpu"], limit), read(layout, [total], {leaf})
        order = evaluation_order([out], 20)
        sources = {node.address: node for made in order for node in made.inputs if not node.kind}
        machine.add_leaves(list(sources.values()))
        machine.evaluate(order, [out])
        others = mx.get_active_memory() - held
        own = mx.set_memory_limit(0)
        mx.set_memory_limit(own if limit is None else others + limit)
        mx.reset_peak_memory()
        try:
            mx.eval(total)
        finally:
            mx.set_memory_limit(own)
        return machine.bytes.amount, mx.get_peak_memory() - others

    (free, counted), (braked, within) = peaks(None), peaks(10 * held + held // 2)
    assert counted <= free
    assert 10 * held < within <= braked
    assert braked < free / 2


@pytest.mark.parametrize(("least", "limit"), [(50, 70), (80, 88), (95, 100)])
def test_a_step_waits_from_where_it_needs_to(least, limit):
    assert Brake(most=100, free=70).limit(least) == limit


def test_a_plan_says_from_where_its_step_waits(tiny_model, monkeypatch):
    """On an NVIDIA GPU, whose queue holds what several layers have computed."""
    monkeypatch.setitem(PACES, "cpu", PACES["cuda"])
    model, config = tiny_model("qwen3_5", num_hidden_layers=12, full_attention_interval=3), TrainConfig(num_layers=-1)
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
