"""Prints as JSON the peaks of a graph that queues sixty products, planned and counted, with and without a memory limit.

Each product is summed at once, so the live arrays are those that wait in MLX's queue. test_simulate.py runs it.
"""

import json

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx

from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.graph import evaluation_order, read
from deltatune.plan.simulate import PACES, Simulation


def main():
    x = mx.random.normal((512, 512))
    mx.eval(x)
    layout = ArrayLayout.measured()
    planned, counted = peaks(x, layout, None)
    planned_within, counted_within = peaks(x, layout, 10 * x.nbytes + x.nbytes // 2)
    found = {"array": x.nbytes, "planned": planned, "counted": counted}
    print(json.dumps(found | {"planned within": planned_within, "counted within": counted_within}))


def peaks(x, layout, limit):
    """The planned and the counted peak in bytes; `limit` is the memory limit in bytes beside the memory in use."""
    total = sum(((x @ (x + number)).sum() for number in range(60)), mx.array(0.0))
    leaf = layout.address(x)
    machine, (out,) = Simulation(PACES["cpu"], limit), read(layout, [total], {leaf})
    order = evaluation_order([out], 20)
    sources = {node.address: node for made in order for node in made.inputs if not node.kind}
    machine.add_leaves(list(sources.values()))
    machine.evaluate(order, [out])
    others = mx.get_active_memory() - x.nbytes
    own = mx.set_memory_limit(0)
    mx.set_memory_limit(own if limit is None else others + limit)
    mx.reset_peak_memory()
    mx.eval(total)
    mx.set_memory_limit(own)
    return machine.bytes, mx.get_peak_memory() - others


main()
