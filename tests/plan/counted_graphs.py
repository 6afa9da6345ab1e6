"""Prints as JSON the peaks of small graphs, simulated and counted in MLX's own allocator; test_simulate.py runs it.

MLX's stream may free no buffer before the whole graph is queued, so that MLX's allocations do not depend on timing.
"""

import json
import sys
from pathlib import Path

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import mlx.core as mx

from counted_allocator import Counter
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.graph import all_nodes, evaluation_order, read
from deltatune.plan.simulate import PACES, Simulation

N = 64


def checkpointed(x, w):
    def layer(x):
        return mx.tanh(x @ w) * x

    return mx.grad(lambda x: mx.checkpoint(layer)(mx.checkpoint(layer)(x)).sum())(x)


def reduced_twice(x, w):
    total = (x * w).sum(axis=0, keepdims=True)
    return total + mx.exp(x - mx.max(x, axis=1, keepdims=True)), total


GRAPHS = {
    "chain": lambda x, w: mx.exp(mx.sin(x + w)) * 2,
    "the same twice": lambda x, w: mx.square(x + w) * mx.sin(x + w),
    "broadcast": lambda x, w: (x[:, None] + w[None]).sum(axis=1) + x[0],
    "broadcast operand": lambda x, w: mx.broadcast_to(mx.exp(x[0]), (N, N)) * w,
    "transposed product": lambda x, w: (x.T @ w).T @ mx.exp(x),
    "product of a slice": lambda x, w: (x[:, ::2] @ w[::2]) + w,
    "product with addend": lambda x, w: mx.addmm(mx.exp(x), x, w),
    "reshape that copies": lambda x, w: (x + w).T.reshape(-1) * 2,
    "reshape that does not": lambda x, w: (x + w).reshape(N // 4, 4, N).transpose(1, 0, 2).sum(axis=0),
    "casts": lambda x, w: (x.astype(mx.float16) + w.astype(mx.float16)).astype(mx.float32),
    "split and joined": lambda x, w: mx.concatenate(mx.split(x + w, 4, axis=1)[::-1], axis=1),
    "softmax": lambda x, w: mx.softmax((x @ w), axis=-1) + mx.softmax(x.T, axis=-1),
    "log sum": lambda x, w: mx.logsumexp(x @ w, axis=-1) - mx.logsumexp(x.T, axis=-1),
    "scan": lambda x, w: mx.cumsum((x + w).T, axis=1),
    "where": lambda x, w: mx.where(x > w, mx.exp(x), 0.0),
    "gather": lambda x, w: mx.take(x + w, mx.argsort(x[0]), axis=0),
    "scatter": lambda x, w: (x + w).at[mx.array([1, 2])].add(w[:2]),
    "slice update": lambda x, w: mx.slice_update(x + w, w[:2], mx.array([3, 0]), (0, 1)),
    "pad and sort": lambda x, w: mx.sort(mx.pad(x + w, 2), axis=0),
    "strided": lambda x, w: mx.as_strided(x + w, (N - 3, N, 4), (N, 1, N), 0).sum(axis=-1),
    "two outputs": lambda x, w: mx.divmod(x + w, w)[1],
    "depends": lambda x, w: mx.depends([mx.exp(x)], [mx.sin(w)])[0] + 1,
    "several kept": reduced_twice,
    "gradient": lambda x, w: mx.grad(lambda x: mx.tanh(x @ w).sum())(x),
    "checkpointed gradient": checkpointed,
    "gathered product": lambda x, w: mx.gather_mm(
        x[:, None], w.reshape(4, N // 4, N).swapaxes(1, 2).reshape(4, N, N // 4), None, mx.arange(N) % 4
    ),
    "quantised product": lambda x, w: mx.quantized_matmul(x.T, *mx.quantize(w)),
    "small upon large": lambda x, w: mx.exp((x + w)[:1]) + 1,
}


def settled(counter):
    """The counts when MLX's stream has nothing left to do."""
    # A stream drops what a task held only after it has told of the task's end.
    for _ in range(2):
        mx.synchronize()
    return counter.now()


def main():
    counter, layout = Counter(), ArrayLayout.measured()
    found = {}
    for name, build in GRAPHS.items():
        x, w = mx.random.normal((N, N)), mx.random.normal((N, N))
        mx.eval(x, w)
        made = build(x, w)
        outputs = list(made) if isinstance(made, tuple | list) else [made]
        nodes = read(layout, outputs, {layout.address(x), layout.address(w)})
        machine = Simulation(PACES["cpu"])
        machine.add_leaves([node for node in all_nodes(nodes) if not node.kind])
        before = (machine.live, machine.live_bytes)
        loose = [n.address for n in all_nodes(nodes) if not n.kind and n.address not in map(layout.address, (x, w))]
        machine.evaluate(evaluation_order(nodes, 20), nodes, loose)
        simulated = [machine.buffers - before[0], machine.bytes - before[1]]
        mx.clear_cache()
        start = settled(counter)
        with counter.stream_held():
            counter.reset()
            held = counter.now()
            mx.async_eval(outputs)
            peak = counter.now()
        counted = [peak.peak_buffers - held.buffers, peak.peak_bytes - held.bytes]
        left = [machine.live - before[0], settled(counter).buffers - start.buffers]
        found[name] = {"simulated": simulated, "counted": counted, "left": left}
        del outputs, made, nodes, machine
    print(json.dumps(found))


if __name__ == "__main__":
    main()
