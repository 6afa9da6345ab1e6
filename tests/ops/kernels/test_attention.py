"""The fused kernels of attention: Metal's text and Hopper's run on the host machine, and are compared with float64."""

from functools import partial
from itertools import product
from pathlib import Path

import mlx.core as mx
import pytest
from host_machine import defects, plant, some_daily

from beside import load
from deltatune.ops.attention import hopper
from deltatune.ops.attention.fused import FILES
from deltatune.ops.attention.fused_op import attention_fused, segment_spans, unsupported
from deltatune.ops.attention.trial_case import NORMAL, KernelShape, half_norm, trial_case
from deltatune.ops.kernels.launch import header, on
from deltatune.ops.operator.case import judged

TEXT = header("metal", FILES)
HOPPER = load(Path(__file__).with_name("host_machine.py")).cuda_text(hopper.FORWARD)
HOPPER_BYTES = 227 * 1024
# In half precision, the kernels also round the weights and their gradients before they are multiplied.
HALF = 2.0


@pytest.fixture(scope="module")
def oracle():
    return load(Path(__file__).parents[1] / "attention" / "oracle.py")


@pytest.fixture(scope="module")
def make(host_folder, host_module):
    """Return make(text, hopper=False, watch=False) -> a host machine that runs this text."""

    def machine(text: str, hopper: bool = False, watch: bool = False):
        return host_module.HostMachine(host_folder, text, watch, HOPPER_BYTES if hopper else None, cuda=hopper)

    return machine


@pytest.fixture(scope="module")
def run(oracle, make):
    """Return run(case, dtype, machine=None, hopper=False, seed=1) -> the relative norms of the errors, by name."""
    machines = {False: make(TEXT)}

    def differentiate(case, dtype=mx.float32, machine=None, hopper=False, seed=1) -> dict[str, float]:
        if machine is None:
            if hopper not in machines:
                machines[hopper] = make(HOPPER, hopper=True)
            machine = machines[hopper]
        differentiated = partial(
            oracle.differentiate, attention_fused, case, dtype, machine="hopper" if hopper else "metal"
        )
        machine.foresee(lambda: differentiated()[0])
        with on(partial(machine.run, seed=seed)):
            return oracle.norms(*differentiated())

    return differentiate


METAL = {
    "one token": {"queries": 1, "batch": 2},
    "65 tokens, grouped": {"queries": 65, "heads": (4, 2), "size": 24},
    "not causal, wide": {"queries": 33, "size": 256, "causal": False},
    "other values": {"queries": 40, "size": 96, "value_size": 72},
    "fewer queries, a window": {"queries": 33, "keys": 80, "window": 20},
    "more queries": {"queries": 80, "keys": 33},
    "segments, a window, sinks": {
        "queries": 70,
        "segments": "single tokens",
        "window": 9,
        "with_sinks": True,
        "batch": 2,
    },
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
        # The gradients of q and k cancel to 0, so their errors have no scale.
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
        "batch": 2,
        "size": 64,
        "heads": (2, 1),
        "segments": "long",
        "window": 90,
        "with_sinks": True,
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


@pytest.mark.parametrize("size", [32, pytest.param(80, marks=pytest.mark.weekly)])
def test_towers_in_fp32_pass_their_trial_with_exponentials_as_rough_as_metal_allows(size, make, host_module):
    """The narrowest and the widest of the doctor's, whose errors beside their results are the largest."""
    rough = make(host_module.with_rough_exponentials(TEXT, "exp2"))
    case = trial_case(KernelShape("metal", size, size, "float32", causal=False))
    with on(rough.run):
        verdict = judged(case, partial(attention_fused, machine="metal"), "fused")
    assert verdict.passed, verdict


# Defects by name: a part of the kernels' text, and what replaces it. These are for Metal's text.
DEFECTS = defects("attention", TEXT)
# These are for Hopper's text.
HOPPER_DEFECTS = defects("attention on Hopper", HOPPER)
PLANTED = [*product([False], DEFECTS), *product([True], HOPPER_DEFECTS)]


@pytest.mark.parametrize(("hopper", "name"), some_daily(PLANTED))
def test_a_planted_defect_shows(hopper, name, run, make, oracle, host_module):
    text = plant(HOPPER, *HOPPER_DEFECTS[name]) if hopper else plant(TEXT, *DEFECTS[name])
    machine = make(text, hopper=hopper)
    sizes = {"queries": 140, "heads": (1, 1), "size": 72} if hopper else {"queries": 70, "heads": (2, 1), "size": 24}
    dtype, bound = (mx.bfloat16, HALF * half_norm("bfloat16")) if hopper else (mx.float32, NORMAL)
    case = oracle.Case("planted", **sizes)
    errors = (max(run(case, dtype, machine, hopper, seed).values()) for seed in ([1] if hopper else [1, 2, 3]))
    assert host_module.shows(lambda: not all(error <= bound for error in errors))


def test_spans_of_segments():
    starts, ends = segment_spans(mx.array([[3, 3, 4, 7, 7, 7], [0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]]))
    assert starts.tolist() == [[0, 0, 2, 3, 3, 3], [0] * 6, [0, 1, 2, 3, 4, 5]]
    assert ends.tolist() == [[2, 2, 3, 6, 6, 6], [6] * 6, [1, 2, 3, 4, 5, 6]]


def test_calls_that_the_kernels_do_not_support():
    q = mx.zeros((1, 1, 4, 264))
    assert "wider than 256" in unsupported(q, q, q, None)
    assert "one dtype" in unsupported(q[..., :8], q[..., :8].astype(mx.float16), q[..., :8], None)
    assert "a mask" in unsupported(q[..., :8], q[..., :8], q[..., :8], mx.ones((1, 1, 4, 4), mx.bool_))
    with pytest.raises(ValueError, match=r"attention: the fused kernels do not support this call: heads of 264 x 264"):
        attention_fused(q, q, q, scale=1.0, machine="metal")


def test_vmap_and_second_derivatives_are_refused_by_name():
    q = mx.ones((1, 1, 4, 8))

    def blank(launch) -> list[mx.array]:
        return [mx.zeros(*kind) for kind in launch.outputs.values()]

    def loss(x: mx.array) -> mx.array:
        return attention_fused(x, q, q, scale=1.0, machine="metal").sum()

    with on(blank), pytest.raises(ValueError, match=r"attention: mx\.vmap cannot map this implementation"):
        mx.vmap(loss)(mx.stack([q, q]))
    with on(blank), pytest.raises(NotImplementedError, match="attention has no second derivative"):
        mx.grad(lambda x: mx.grad(loss)(x).sum())(q)
