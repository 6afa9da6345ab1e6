"""The fused kernels of attention: Metal's text, and Hopper's, run on the host machine beside float64."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.attention.fused_op import attention_fused, segment_spans, uncovered
from deltatune.ops.attention.tolerances import NORMAL, half_norm
from deltatune.ops.kernels.launch import FOLDER, header

TEXT = header("metal", ("attention.h",))
HOPPER = (
    header("metal", ())
    + (Path(__file__).parent / "hopper_host.h").read_text()
    + (FOLDER / "attention.h").read_text()
    + (FOLDER / "attention_hopper.h").read_text()
)
HOPPER_BYTES = 227 * 1024
# Beside the definition's, half precision rounds the weights and their gradients before they are multiplied.
HALF = 2.0


@pytest.fixture(scope="module")
def oracle():
    import importlib.util

    path = Path(__file__).parents[1] / "attention" / "oracle.py"
    spec = importlib.util.spec_from_file_location("attention_oracle", path)
    module = sys.modules.setdefault("attention_oracle", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make(host_folder, host_module):
    """make(text, hopper=False, watch=False): a machine for that text."""

    def machine(text: str, hopper: bool = False, watch: bool = False):
        return host_module.HostMachine(host_folder, text, watch, HOPPER_BYTES if hopper else None, cuda=hopper)

    return machine


@pytest.fixture(scope="module")
def run(oracle, make):
    """run(case, dtype, machine=None, hopper=False, seed=1) -> the norms of errors by name."""
    machines = {False: make(TEXT)}

    def differentiate(case, dtype=mx.float32, machine=None, hopper=False, seed=1) -> dict[str, float]:
        if machine is None:
            if hopper not in machines:
                machines[hopper] = make(HOPPER, hopper=True)
            machine = machines[hopper]
        given = {name: mx.array(x) for name, x in case.arrays().items()}
        given = {name: x if name == "sinks" else x.astype(dtype) for name, x in given.items()}
        options = case.options()
        constants = {name: mx.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        inputs = [name for name in given if name != "dy"]
        execute = partial(machine.run, seed=seed)

        def call(*arrays: mx.array) -> list[mx.array]:
            q, k, v, *sinks = arrays
            more = {"sinks": sinks[0]} if sinks else {}
            whose = "hopper" if hopper else "metal"
            return [attention_fused(q, k, v, machine=whose, execute=execute, **more, **constants)]

        outputs, gradients = mx.vjp(call, [given[name] for name in inputs], [given["dy"]])
        exact = {name: np.array(x.astype(mx.float32), np.float64) for name, x in given.items()}
        truth = oracle.attention64(**{"sinks": None} | exact, **options)
        found = {}
        for (name, wanted), result in zip(truth.items(), [*outputs, *gradients], strict=True):
            error = np.linalg.norm(np.array(result.astype(mx.float32), np.float64) - wanted)
            found[name] = float(error / np.linalg.norm(wanted)) if np.isfinite(error) else np.inf
        return found

    return differentiate


METAL = {
    "one token": {"queries": 1, "batch": 2},
    "65 tokens, grouped": {"queries": 65, "heads": (4, 2), "size": 24},
    "not causal, wide": {"queries": 33, "size": 256, "causal": False},
    "other values": {"queries": 40, "size": 96, "value_size": 72},
    "fewer queries, a window": {"queries": 33, "keys": 80, "window": 20},
    "more queries": {"queries": 80, "keys": 33},
    "segments, a window, sinks": {"queries": 70, "segments": "single tokens", "window": 9, "sunk": True, "batch": 2},
    "segments, fewer queries": {"queries": 40, "keys": 70, "segments": "long", "heads": (2, 1), "batch": 2},
    "large logits": {"queries": 64, "logits": 20.0},
}


@pytest.mark.parametrize("name", METAL)
def test_metal(name, run, oracle):
    case = oracle.Case(name, **METAL[name])
    found = run(case)
    assert found.pop("dsinks", 0.0) <= 1e-5
    bound = NORMAL + 4 * 2.0**-24 * case.largest_score
    if name == "one token":
        # Its gradients of q and k cancel to 0, whatever they are measured by.
        found = {key: found[key] for key in ("y", "dv")}
    assert max(found.values()) <= bound, found


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "fp16"])
def test_metal_in_half_precision(dtype, run, oracle):
    found = run(oracle.Case("half", queries=70, heads=(2, 1), size=40), dtype)
    assert max(found.values()) <= HALF * half_norm(str(dtype).rpartition(".")[2]), found


def test_metal_under_watch(make, run, oracle):
    case = oracle.Case("watched", queries=40, keys=70, heads=(1, 1), size=24, window=40)
    assert max(run(case, machine=make(TEXT, watch=True)).values()) <= 2 * NORMAL


ON_HOPPER = {
    "narrow, all of it": {
        "queries": 170,
        "keys": 300,
        "size": 64,
        "heads": (2, 1),
        "segments": "long",
        "window": 90,
        "sunk": True,
        "batch": 2,
    },
    "wide": {"queries": 140, "size": 136, "value_size": 256, "heads": (1, 1)},
    "more queries, odd sizes": {"queries": 200, "keys": 70, "size": 72, "value_size": 40, "heads": (1, 1)},
}


@pytest.mark.parametrize("name", ON_HOPPER)
def test_hopper(name, run, oracle):
    dtype = mx.float16 if "odd" in name else mx.bfloat16
    found = run(oracle.Case(name, **ON_HOPPER[name]), dtype, hopper=True)
    assert found.pop("dsinks", 0.0) <= 2e-2
    assert max(found.values()) <= HALF * half_norm(str(dtype).rpartition(".")[2]), found


# Which text, what stands in its place; in Metal's text, then in Hopper's.
DEFECTS = {
    "a mask off by one": ("to = i + ahead() + 1;", "to = i + ahead();"),
    "results that are not scaled": (
        "results[piece * 2 + m].get(e) * factors[tile_side(e)]",
        "results[piece * 2 + m].get(e)",
    ),
    "a barrier left out": (
        "at.lane);\n    barrier();\n    if (at.index < 32) {\n      const float before",
        "at.lane);\n    if (at.index < 32) {\n      const float before",
    ),
    "deltas left out": ("weight * (products.get(e) - delta[i])", "weight * products.get(e)"),
    "rows past the end": ("if (row + i < rows && column < SIZE)", "if (column < SIZE)"),
    "one head too many": ("at.y * each + number", "at.y * each + number / 2"),
}
HOPPER_DEFECTS = {
    "a mask off by one": ("to = i + ahead() + 1;", "to = i + ahead();"),
    "one room for two weights": ("% 2 * 16384", "% 1 * 16384"),
    "a meeting left out": ("    meet<256>();\n    weigh_with", "    weigh_with"),
    "operands let go too early": ("products_wait<0>();\n    settle(results[b]);", "settle(results[b]);"),
    "results that are not scaled": ("results[i] *= factors[own_side(i)];", ""),
    "another swizzle": ("((c ^ r) & 7) * 8, from", "(c & 7) * 8, from"),
    "the other panel": ("panel = HEIGHT * 128, stages = Memory::stages;", "panel = 4096, stages = Memory::stages;"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_in_metals_text(name, run, make, oracle, host_module):
    old, new = DEFECTS[name]
    assert old in TEXT, "the text has changed: plant this defect elsewhere"
    machine = make(TEXT.replace(old, new))
    case = oracle.Case("planted", queries=70, heads=(2, 1), size=24)
    try:
        worst = max(max(run(case, machine=machine, seed=seed).values()) for seed in (1, 2, 3))
    except host_module.HostError as refusal:
        worst = np.inf
        print(refusal)
    assert not worst <= NORMAL


@pytest.mark.parametrize("name", HOPPER_DEFECTS)
def test_planted_in_hoppers_text(name, run, make, oracle, host_module):
    old, new = HOPPER_DEFECTS[name]
    assert old in HOPPER, "the text has changed: plant this defect elsewhere"
    machine = make(HOPPER.replace(old, new), hopper=True)
    case = oracle.Case("planted", queries=140, heads=(1, 1), size=72)
    try:
        worst = max(run(case, mx.bfloat16, machine=machine, hopper=True).values())
    except host_module.HostError as refusal:
        worst = np.inf
        print(refusal)
    assert not worst <= HALF * half_norm("bfloat16")


def test_spans_of_segments():
    starts, ends = segment_spans(mx.array([[3, 3, 4, 7, 7, 7], [0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]]))
    assert starts.tolist() == [[0, 0, 2, 3, 3, 3], [0] * 6, [0, 1, 2, 3, 4, 5]]
    assert ends.tolist() == [[2, 2, 3, 6, 6, 6], [6] * 6, [1, 2, 3, 4, 5, 6]]


def test_what_the_kernels_do_not_cover():
    q = mx.zeros((1, 1, 4, 264))
    assert "wider than 256" in uncovered(q, q, q, None)
    assert "one dtype" in uncovered(q[..., :8], q[..., :8].astype(mx.float16), q[..., :8], None)
    assert "a mask" in uncovered(q[..., :8], q[..., :8], q[..., :8], mx.ones((1, 1, 4, 4), mx.bool_))
    with pytest.raises(ValueError, match=r"attention: the fused kernels do not cover this call: heads of 264 x 264"):
        attention_fused(q, q, q, scale=1.0, machine="metal")


def test_vmap_and_second_derivatives_are_refused_by_name():
    q = mx.ones((1, 1, 4, 8))

    def blank(launch) -> list[mx.array]:
        return [mx.zeros(*kind) for kind in launch.outputs.values()]

    def loss(x: mx.array) -> mx.array:
        return attention_fused(x, q, q, scale=1.0, machine="metal", execute=blank).sum()

    with pytest.raises(ValueError, match=r"attention: mx\.vmap cannot map this implementation"):
        mx.vmap(loss)(mx.stack([q, q]))
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        mx.grad(lambda x: mx.grad(loss)(x).sum())(q)
