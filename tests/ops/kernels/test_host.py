"""The Metal text, compiled and run on the host machine, against the recurrence in float64.

It also shows that the order of lanes changes no bit, and that no two lanes race.
"""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta import gated_delta_chunk, gated_delta_naive
from deltatune.ops.gated_delta.tolerances import (
    FUSED_CUTS,
    FUSED_NORM,
    FUSED_STATE_NORM,
    OVERSHOOTING,
    REPEATED_KEY,
    fused_bf16_norm,
)
from deltatune.ops.kernels.launch import header

# Cases of one shape share their compiled kernels: sizes, mask and segments are compile-time values.
PLAIN = {"batch": 1, "length": 65, "repeats": 1, "key_size": 24, "value_size": 40}
WORST = {"keys": "near", "gates": "open"}
CASES = {
    "one token": PLAIN | {"length": 1},
    "15 tokens": PLAIN | {"length": 15},
    "17 tokens": PLAIN | {"length": 17},
    "33 tokens": PLAIN | {"length": 33},
    "65 tokens": PLAIN,
    "open gates": PLAIN | {"gates": "open"},
    "tiny gates": PLAIN | {"gates": "tiny"},
    "closed gates": PLAIN | {"gates": "closed"},
    "mixed gates": PLAIN | {"gates": "mixed"},
    "one key": PLAIN | {"keys": "one", "gates": "open", "beta": 1.0, "bound": REPEATED_KEY},
    "near keys, beta 0.95": PLAIN | WORST | {"beta": 0.95, "bound": REPEATED_KEY},
    "near keys, beta 1.9": PLAIN | WORST | {"beta": 1.9, "bound": OVERSHOOTING},
    "beta 2": PLAIN | {"gates": "open", "beta": 2.0, "bound": OVERSHOOTING},
    "documents, masked middle": {"mask": "middle", "segments": True, "gates": "mixed", "length": 65, "key_heads": 2},
    "left padding": {"mask": "left", "length": 50, "repeats": 3, "key_size": 40, "value_size": 16},
    "documents, odd sizes": {"segments": True, "batch": 1, "length": 50, "repeats": 3, "key_size": 7, "value_size": 5},
    "heads of 128": {"batch": 1, "length": 40, "repeats": 1, "key_size": 128, "value_size": 128},
}
LONG = CASES["heads of 128"] | {"length": 130}
CASES |= {
    "heads of 128, one key": CASES["one key"] | LONG,
    "heads of 128, near keys": CASES["near keys, beta 1.9"] | LONG,
    # The rows of u and R have more padding where keys are wider than 128, for the states' tails.
    "wide keys": CASES["near keys, beta 1.9"] | {"key_size": 160, "value_size": 24, "length": 130},
}
SUMS = ("heads of 128, one key", "heads of 128, near keys", "wide keys")
# fp16 differs from fp32 only in loads and stores, so a few cases are enough.
IN_FP16 = ("65 tokens", "mixed gates", "near keys, beta 1.9", "documents, masked middle")
RUNS = [
    (name, dtype)
    for dtype in ("float32", "bfloat16", "float16")
    for name in CASES
    if (dtype != "float16" or name in IN_FP16) and (dtype == "bfloat16" or name not in SUMS)
]
# Sizes whose kernels have the other type in `make test`.
WEEKLY = [("one token", "bfloat16"), ("15 tokens", "float32"), ("left padding", "bfloat16")]
WEEKLY += [("documents, odd sizes", "float32"), ("heads of 128", "float32"), ("documents, masked middle", "float16")]


# Cases with norms no worse than those of MLX's operations in the same dtype. The host machine rounds every product
# before it adds it; chunk's matrix products and a GPU's do not.
HARD = ("open gates", "mixed gates", "one key", "near keys, beta 0.95", "near keys, beta 1.9", "beta 2")
TIMES_CHUNK = {"near keys, beta 1.9": 4.0}


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*run, marks=[pytest.mark.weekly] * (run in WEEKLY)) for run in RUNS]
)
def test_forward_and_backward(name, dtype, machine, check, on_host, norms, table):
    """In fp32 no worse than chunk, in bf16 beside naive: d(log_g), a sum over a state, is what the tails are for."""
    case = table.Case(name, **CASES[name])
    fused = norms(*check(machine, case, dtype, lanes=len(name)))
    if dtype == "float16" or name not in ("65 tokens", *HARD, *SUMS):
        return
    by = gated_delta_chunk if dtype == "float32" else gated_delta_naive
    others = norms(*on_host(None, case, getattr(mx, dtype), by=by))
    bounds = {key: fused_bf16_norm(error) for key, error in others.items()}
    if dtype == "float32":
        bounds = {key: max(FUSED_NORM, TIMES_CHUNK.get(name, 1.0) * error) for key, error in others.items()}
    assert not {key: (error, bounds[key]) for key, error in fused.items() if not error <= bounds[key]}


class OfEachKernel:
    """Runs each kernel with the text that a Mac compiles for it, which has no other kernels' files."""

    def __init__(self, host_module, folder):
        self.machine_of = lambda kernel: host_module.HostMachine(folder, header("metal", kernel.files))
        self.names = set()

    def run(self, launch, seed):
        self.names.add(launch.name)
        return self.machine_of(launch.kernel).run(launch, seed)


def test_each_kernel_needs_no_file_but_its_own(host_module, host_folder, check, table):
    machine = OfEachKernel(host_module, host_folder)
    check(machine, table.Case("65 tokens", **CASES["65 tokens"]), "bfloat16")
    assert machine.names == {f"gated_delta_{phase}" for phase in ("prepare", "scan", "reverse", "gradients")}


PER_CHANNEL = [
    "one token",
    "17 tokens",
    "65 tokens",
    "closed gates",
    "mixed gates",
    "one key",
    "near keys, beta 1.9",
    "documents, masked middle",
    "documents, odd sizes",
]


PER_CHANNEL_WEEKLY = [("one token", "bfloat16"), ("documents, odd sizes", "float32")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.weekly] * ((name, dtype) in PER_CHANNEL_WEEKLY))
        for name in PER_CHANNEL
        for dtype in ("float32", "bfloat16")
    ],
)
def test_a_gate_per_channel(name, dtype, machine, check, table):
    check(machine, table.Case(name, **CASES[name]), dtype, lanes=len(name), per_channel=True)


def test_a_state_in_fp32_is_rounded_once_a_chunk(machine, on_host, norms, table):
    case = table.Case("long", **CASES["heads of 128"] | {"length": 300, "gates": "open"})
    relative = norms(*on_host(machine, case, mx.float32))
    assert max(relative["state"], relative["initial_state"]) <= FUSED_STATE_NORM, relative


def test_slices_of_one_strip(machine, check, table):
    check(machine, table.Case("one strip", **PLAIN), "bfloat16", slice=16)


# Two groups per strip of the state, as for few heads on an NVIDIA GPU, with chunks of two tiles and of four.
TWO_GROUPS = {"split": 2, "slice": 16, "chunk": 32, "gradient_groups": 8}
FOUR_TILES = {"split": 2, "slice": 32, "chunk": 64, "gradient_groups": 8, "stages": 2}


# Two of the twelve combinations, since clang takes a quarter of a minute for each.
@pytest.mark.parametrize(
    ("tiling", "dtype", "name"),
    [(TWO_GROUPS, "bfloat16", "65 tokens"), (FOUR_TILES, "float32", "documents, masked middle")],
    ids=["two tiles", "four tiles, fp32"],
)
def test_two_groups_per_strip(tiling, name, dtype, nvidia_sized, check, norms, table):
    case = table.Case(name, **CASES[name] | {"key_size": 24})
    results = check(nvidia_sized[False], case, dtype, lanes=len(name), **tiling)
    assert dtype != "bfloat16" or norms(*results)["log_g"] <= fused_bf16_norm(0.0)


# With gates of 1, and with three tokens, something of the first state is left at the end, so its tail shows.
TAILS = {"open gates": {"length": 65, "gates": "open", "keys": "near", "beta": 1.9}, "three tokens": {"length": 3}}


@pytest.mark.parametrize("name", TAILS)
def test_two_groups_store_the_tails_that_one_stores(name, nvidia_sized, on_host, norms, table):
    sizes = {"batch": 1, "repeats": 1, "key_size": 128, "value_size": 32}
    case = table.Case("tails", **sizes, **TAILS[name])
    two, _ = on_host(nvidia_sized[False], case, mx.bfloat16, **FOUR_TILES)
    one, _ = on_host(nvidia_sized[False], case, mx.bfloat16, **FOUR_TILES | {"split": 1})
    assert norms(two, {"log_g": np.array(one["log_g"], dtype=np.float64)})["log_g"] <= FUSED_CUTS


LOADER = {"slice": 16, "loaders": 1, "stages": 2, "chunk": 32, "gradient_slice": 48}
WATCHED = {"batch": 1, "length": 70, "key_size": 24, "value_size": 40, "mask": "middle", "segments": True}


@pytest.mark.parametrize(
    ("tiling", "erases"),
    [(FOUR_TILES, True), (LOADER, False)],
    ids=["four tiles", "a group that loads, linear attention"],
)
def test_two_groups_per_strip_do_not_race(tiling, erases, nvidia_sized, check, table):
    check(nvidia_sized[True], table.Case("watched", **WATCHED), "bfloat16", erases=erases, **tiling)


# Either dtype and either kind of gates; the other two pairs are for the weekly run.
PAIRS = [("float32", False), ("bfloat16", True)]
PAIRS += [pytest.param(*pair, marks=pytest.mark.weekly) for pair in (("bfloat16", False), ("float32", True))]


@pytest.mark.parametrize(("dtype", "per_channel"), PAIRS)
def test_the_order_of_lanes_changes_no_bit(dtype, per_channel, machine, on_host, table):
    case = table.Case("order", **CASES["documents, masked middle"])
    first, _ = on_host(machine, case, getattr(mx, dtype), lanes=1, per_channel=per_channel)
    for lanes in (2, 3):
        again, _ = on_host(machine, case, getattr(mx, dtype), lanes=lanes, per_channel=per_channel)
        for key, value in first.items():
            bits = mx.uint16 if value.dtype.size == 2 else mx.uint32
            assert np.array_equal(np.array(value.view(bits)), np.array(again[key].view(bits))), (key, lanes)


@pytest.mark.parametrize(("dtype", "per_channel"), PAIRS)
def test_no_two_lanes_race(dtype, per_channel, watching, check, table):
    check(watching, table.Case("watched", **WATCHED), dtype, per_channel=per_channel)


# Linear attention's kernels are the same text with another word: of each kind of gate, dtype and division a case.
LINEAR = [
    ("one token", "bfloat16", False),
    ("65 tokens", "float32", False),
    ("65 tokens", "bfloat16", True),
    ("mixed gates", "bfloat16", False),
    ("closed gates", "float32", True),
    ("documents, masked middle", "bfloat16", False),
    ("documents, masked middle", "float32", True),
    ("left padding", "float16", False),
    ("documents, odd sizes", "bfloat16", False),
]


@pytest.mark.parametrize(("name", "dtype", "per_channel"), LINEAR)
def test_linear_attention(name, dtype, per_channel, machine, check, table):
    check(machine, table.Case(name, **CASES[name]), dtype, lanes=len(name), per_channel=per_channel, erases=False)


AHEAD = {"stages": 2, "gradient_slice": 64}
# States of 128 and 256, of which nothing is forgotten, so that the gradients of gates show the states' tails.
STATES = {"batch": 1, "length": 130, "repeats": 3, "value_size": 64, "gates": "open", "keys": "near"}


@pytest.mark.parametrize(
    ("key_size", "tiling"),
    [(128, {}), pytest.param(256, {}, marks=pytest.mark.weekly), (256, FOUR_TILES), (128, FOUR_TILES | AHEAD)],
    ids=["a group", "a wide group", "two groups", "the next head's loads"],
)
def test_linear_attention_beside_naive(key_size, tiling, nvidia_sized, on_host, norms, table):
    case = table.Case("states", **STATES, key_size=key_size)
    fused = norms(*on_host(nvidia_sized[False], case, mx.bfloat16, erases=False, **tiling))
    naive = norms(*on_host(None, case, mx.bfloat16, by=gated_delta_naive, erases=False))
    bounds = {key: fused_bf16_norm(error) for key, error in naive.items()}
    assert not {key: (error, bounds[key]) for key, error in fused.items() if not error <= bounds[key]}
