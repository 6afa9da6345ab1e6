"""Times the expert block on a CPU, forward and backward, beside mlx-lm's own layers with its LoRA.

usage: DELTATUNE_THREADS=2 python benchmarks/experts.py [--rounds 3] [--only NAME ...] [--tokens 2048]

The block has 64 experts, 8 a token, width 1024 and inner width 384, with LoRA r=8 on gate, up and down; gradients are
taken of x, scores and all factors. Each implementation has a process of its own; rounds are interleaved, and medians
are printed. An implementation whose gradients on the first tokens differ from a dense float64 computation gets no time.
Peaks are MLX's own count beyond the inputs, gradients included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import processes
from machine import heading

AGREES = 1e-4  # largest error over the largest element, fp32; half precision is compared at its own rounding
FACTORS = ("gate_proj", "up_proj", "down_proj")
NAMES = ("deltatune", "deltatune, counts read", "mlx-lm")
Shape = dict[str, int]


def arrays(shape: Shape, dtype: str) -> dict[str, Any]:
    """Draw everything that a block reads: x, indices, scores, dy, weights and LoRA factors."""
    import mlx.core as mx

    draw = np.random.default_rng(0)
    tokens, experts, k, outer, inner, rank = (shape[n] for n in ("tokens", "experts", "k", "outer", "inner", "rank"))
    kind = getattr(mx, dtype)

    def normal(*size: int, scale: float = 1.0) -> mx.array:
        return mx.array(draw.standard_normal(size, dtype=np.float32) * np.float32(scale))

    logits = draw.normal(size=(tokens, experts))
    made: dict[str, Any] = {
        "x": normal(tokens, outer).astype(kind),
        "indices": mx.array(np.argsort(-logits, axis=1)[:, :k].astype(np.uint32)),
        "scores": mx.array(draw.dirichlet(np.ones(k), size=tokens).astype(np.float32)),
        "dy": normal(tokens, outer).astype(kind),
    }
    for name, (ins, outs) in zip(FACTORS, ((outer, inner), (outer, inner), (inner, outer)), strict=True):
        made[name] = {
            "weight": normal(experts, outs, ins, scale=ins**-0.5).astype(kind),
            "lora_a": normal(experts, rank, ins, scale=ins**-0.5),
            "lora_b": normal(experts, outs, rank, scale=0.1),
        }
    mx.eval(made)
    return made


def ours(given: dict[str, Any]) -> Callable[..., Any]:
    from deltatune.ops.experts import Projection, expert_block

    def run(x: Any, scores: Any, factors: dict[str, Any]) -> Any:
        made = {
            n: Projection(given[n]["weight"], **factors[n], scale=2.0, trains=("lora_a", "lora_b")) for n in FACTORS
        }
        return expert_block(
            x, given["indices"], scores.astype(x.dtype), made["up_proj"], made["down_proj"], made["gate_proj"]
        )

    return run


def theirs(given: dict[str, Any]) -> Callable[..., Any]:
    import mlx.core as mx
    from mlx_lm.models.switch_layers import SwitchGLU
    from mlx_lm.tuner.lora import LoRASwitchLinear

    layer = SwitchGLU(8, 8, 1)
    for name in FACTORS:
        base = layer[name]
        base.weight = given[name]["weight"]
        layer[name] = LoRASwitchLinear.from_base(base, r=1, scale=2.0)
    layer.train()

    def run(x: Any, scores: Any, factors: dict[str, Any]) -> Any:
        layer.update(factors)
        y = layer(x, mx.stop_gradient(given["indices"]))
        return (y * scores[..., None].astype(y.dtype)).sum(axis=-2)

    return run


def counts_read(given: dict[str, Any]) -> Callable[..., Any]:
    """A loop over experts with autodiff, which reads the counts of rows first and so cannot be compiled."""
    import mlx.core as mx

    flat = np.array(given["indices"]).reshape(-1)
    order = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=given["up_proj"]["weight"].shape[0]))
    k = given["indices"].shape[1]

    def run(x: Any, scores: Any, factors: dict[str, Any]) -> Any:
        total, start = mx.zeros(x.shape), 0
        for e, end in enumerate(ends):
            pairs = mx.array(order[start:end])
            start = end
            if not pairs.size:
                continue

            def part(x: Any, scores: Any, factors: Any, e: int = e, pairs: Any = pairs) -> Any:
                def linear(name: str, rows: Any) -> Any:
                    weight = mx.stop_gradient(given[name]["weight"])[e : e + 1].squeeze(0)
                    a, b = (factors[name][f][e : e + 1].squeeze(0) for f in ("lora_a", "lora_b"))
                    return rows @ weight.T + 2.0 * ((rows @ a.T) @ b.T)

                rows = x[pairs // k]
                gate = linear("gate_proj", rows)
                hidden = gate * mx.sigmoid(gate) * linear("up_proj", rows)
                return linear("down_proj", hidden) * scores.reshape(-1)[pairs][:, None]

            total = total.at[pairs // k].add(part(x, scores, factors))
        return total

    return run


IMPLEMENTATIONS: dict[str, Callable[[dict[str, Any]], Callable[..., Any]]] = dict(
    zip(NAMES, (ours, counts_read, theirs), strict=True)
)


def gradient(run: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The function that returns loss and gradients, and the arguments to differentiate, with which it is called."""
    import mlx.core as mx

    def loss(x: Any, scores: Any, factors: Any) -> Any:
        return (run(x, scores, factors).astype(mx.float32) * given["dy"].astype(mx.float32)).sum()

    factors = {n: {f: given[n][f] for f in ("lora_a", "lora_b")} for n in FACTORS}
    return mx.value_and_grad(loss, argnums=(0, 1, 2)), [given["x"], given["scores"], factors]


def dense(given: dict[str, Any]) -> Callable[..., Any]:
    """The block as every expert on every token, weighted by the chosen experts' scores; the float64 reference."""
    import mlx.core as mx

    def run(x: Any, scores: Any, factors: dict[str, Any]) -> Any:
        def linear(name: str, rows: Any) -> Any:
            update = factors[name]["lora_b"] @ factors[name]["lora_a"]
            return rows @ (given[name]["weight"].astype(x.dtype) + 2.0 * update).swapaxes(-1, -2)

        experts = given["up_proj"]["weight"].shape[0]
        chosen = (given["indices"][..., None] == mx.arange(experts)).astype(x.dtype)
        rows = mx.broadcast_to(x[None], (experts, *x.shape))
        gate = linear("gate_proj", rows)
        y = linear("down_proj", gate * mx.sigmoid(gate) * linear("up_proj", rows))
        return mx.einsum("end,nke,nk->nd", y, chosen, scores)

    return run


def flat(tree: Any) -> list[Any]:
    from mlx.utils import tree_flatten

    return [leaf for _, leaf in tree_flatten(tree)]


def worst(name: str, shape: Shape, dtype: str) -> float:
    """The largest error of any gradient on 48 tokens, relative to the gradient's largest element."""
    import mlx.core as mx
    from mlx.utils import tree_map

    given = arrays(shape | {"tokens": 48}, dtype)
    function, arguments = gradient(IMPLEMENTATIONS[name](given), given)
    found = flat(function(*arguments)[1])
    with mx.stream(mx.cpu):
        wide = tree_map(lambda a: a.astype(mx.float64), arguments)
        function, _ = gradient(dense(given), given)
        expected = flat(function(*wide)[1])
        mx.eval(found, expected)
    pairs = [(np.array(f.astype(mx.float32)), np.array(e)) for f, e in zip(found, expected, strict=True)]
    return max(float(np.abs(f - e).max() / np.abs(e).max()) for f, e in pairs)


def work(name: str, shape: Shape, dtype: str) -> None:
    """The process of one implementation, which answers each request on stdin with a line of JSON."""
    import deltatune  # noqa: F401, I001  (binds a fast BLAS, so before mlx)
    import mlx.core as mx

    try:
        error = worst(name, shape, dtype)
        given = arrays(shape, dtype)
        function, arguments = gradient(IMPLEMENTATIONS[name](given), given)
    except (RuntimeError, ValueError) as problem:
        print(json.dumps({"failed": str(problem)[:90]}), flush=True)
        return
    print(json.dumps({"error": error}), flush=True)
    held = mx.get_active_memory()
    for _ in sys.stdin:
        mx.clear_cache()
        mx.reset_peak_memory()
        started, cpu = time.perf_counter(), time.process_time()
        result = function(*arguments)
        # A training step evaluates the loss first. Here no gradient depends on it, so MLX would mix the two passes.
        mx.eval(result[0])
        mx.eval(result)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        del result
        print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": mx.get_peak_memory() - held}), flush=True)


def compare(names: list[str], rounds: int, shape: Shape, dtype: str) -> None:
    """Run interleaved rounds, and print a table of medians."""
    here = [__file__, "--work", json.dumps([shape, dtype])]
    workers = {name: processes.LineProcess(name, [*here, name]) for name in names}
    answers: dict[str, list[dict[str, float]]] = {}
    bound = AGREES if dtype == "float32" else 2e-2
    for name, worker in workers.items():
        first = worker.first
        if "failed" in first or not first["error"] < bound:
            print(f"| {name} | {first.get('failed', 'gradients off by ' + str(first.get('error')))} | | |")
        else:
            print(f"{name}: worst gradient {first['error']:.1e} from float64")
            answers[name] = []
    for _ in range(rounds + 1):
        for name, found in answers.items():
            found.append(workers[name].ask())
    for worker in workers.values():
        worker.process.kill()
    print(f"\n{shape} {dtype}\n\n| | s | CPU s | MB at the peak |\n|---|---|---|---|")
    for name, found in answers.items():
        seconds, cpu, peak = (statistics.median(a[key] for a in found[1:]) for key in ("seconds", "cpu", "peak"))
        print(f"| {name} | {seconds:.2f} | {cpu:.2f} | {peak / 1e6:.1f} |")


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        shape, dtype = json.loads(options.work[0])
        work(options.work[1], shape, dtype)
        return
    print(heading())
    shape = {"tokens": options.tokens, "experts": 64, "k": 8, "outer": 1024, "inner": 384, "rank": 8}
    compare(options.only, options.rounds, shape, options.dtype)


if __name__ == "__main__":
    main()
