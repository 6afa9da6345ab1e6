"""Hopper's kernels for the gated delta rule, run on the host machine and compared with float64."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from host_machine import defects, some_daily

from beside import load
from deltatune.machine import nvidia
from deltatune.ops.gated_delta import fused_hopper, gated_delta_naive
from deltatune.ops.gated_delta.fused_hopper import HopperTiling, choose_hopper_tiling
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_of
from deltatune.ops.gated_delta.fused_passes import no_initial_state
from deltatune.ops.gated_delta.tiling import PHASES, Tiling
from deltatune.ops.gated_delta.tolerances import OVERSHOOTING, REPEATED_KEY, fused_bf16_norm, fused_bound
from deltatune.ops.kernels.launch import Kernel, Launch, on

HOST = load(Path(__file__).with_name("host_machine.py"))


def texts_of(*scans: Kernel) -> list[str]:
    """The texts of the kernels that a call launches, each by itself."""
    return [HOST.cuda_text(kernel) for kernel in (fused_hopper.PREPARE, *scans, fused_hopper.GRADIENTS)]


FEW, MANY = "few heads", "many heads"
TEXTS = {
    FEW: texts_of(fused_hopper.SCAN, fused_hopper.REVERSE),
    MANY: texts_of(fused_hopper.WIDE_SCAN, fused_hopper.WIDE_REVERSE),
}


def as_it_is(x: Any) -> Any:
    return x


@pytest.fixture(scope="module")
def known():
    """The results of kernels with unchanged text: a defect changes one kernel of a call, or two."""
    return {}


def key_of(launch: Launch, seed: int) -> tuple:
    """Return all that the results of a launch depend on."""
    digest = hashlib.sha256()
    for name, array in launch.inputs.items():
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(HOST._bytes(array))
    values = tuple(launch.values.items())
    return launch.name, values, launch.source, launch.blocks, launch.groups, str(launch.outputs), seed, digest.digest()


@pytest.fixture
def run(host_folder, host_module, on_host, known, monkeypatch):
    """Return run(case, heads=FEW, seed=1, ...) -> (results, truth), with three blocks for the gradient kernel.

    `change` changes the text of each kernel; one that stays as it is was compiled for another test already. `beta`
    changes the kernels' beta, and `watch` sees each launch.
    """
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, 3))
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    machines = {}

    def machine_of(text: str) -> Any:
        if text not in machines:
            machines[text] = host_module.HostMachine(host_folder, text, bytes=nvidia.H200.block_bytes, cuda=True)
        return machines[text]

    def differentiate(
        case, heads: str = FEW, seed: int = 1, change: Any = as_it_is, beta: Any = as_it_is, watch: Any = as_it_is
    ) -> tuple:
        def tiling_of_call(*shape: Any, **options: bool) -> Tiling | None:
            return replace(tiling_of("cuda", *shape, **options), slice=64 if heads == MANY else 32)

        def execute(launch: Launch) -> list[mx.array]:
            text, launch = HOST.cuda_text(launch.kernel), watch(launch)
            # What a kernel writes into is known to other calls as it was.
            inputs = {name: x + 0 if name in launch.changes else x for name, x in launch.inputs.items()}
            launch = replace(launch, inputs=inputs)
            changed = change(text)
            if changed != text:
                return machine_of(changed).run(launch, seed=seed)
            key = key_of(launch, seed)
            if key not in known:
                known[key] = machine_of(text).run(launch, seed=seed)
            return known[key]

        fused = partial(gated_delta_fused, tiling_of_call=tiling_of_call)

        def by(*arrays: mx.array, **options: Any) -> tuple[mx.array, mx.array]:
            return fused(*arrays[:4], beta(arrays[4]), **options)

        with on(execute):
            return on_host(None, case, mx.bfloat16, by=by)

    return differentiate


SIZES = {"batch": 1, "length": 130, "repeats": 1, "key_size": 128, "value_size": 128}
OPEN = {"gates": "open"}
CASES = {
    "130 tokens": SIZES,
    "three tokens": SIZES | {"length": 3},
    "documents, masked middle": SIZES
    | {"batch": 2, "key_heads": 2, "repeats": 2, "value_size": 64, "mask": "middle", "segments": True}
    | {"gates": "mixed", "length": 90},
    "closed gates, three heads": SIZES | {"repeats": 3, "gates": "closed", "length": 70},
    "few closed gates, values of 64": SIZES | {"value_size": 64, "gates": "few closed"},
    "one key": SIZES | OPEN | {"keys": "one", "beta": 1.0, "bound": REPEATED_KEY},
    "near keys, beta 1.9": SIZES | OPEN | {"keys": "near", "beta": 1.9, "bound": OVERSHOOTING},
    "beta 2": SIZES | OPEN | {"beta": 2.0, "bound": OVERSHOOTING},
}


# Two of four kernels differ by the number of heads: each has every second case, and both the one with documents. Keys
# that are near show what one key does.
BOTH = "documents, masked middle"
RUNS = [(name, (FEW, MANY)[at % 2]) for at, name in enumerate(CASES) if name != "one key"] + [(BOTH, MANY)]
OTHERS = [(name, heads) for name in CASES for heads in TEXTS if (name, heads) not in RUNS]


@pytest.mark.parametrize(("name", "heads"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.weekly) for run in OTHERS)])
def test_beside_naive(name, heads, run, on_host, errors, norms, table):
    case = table.Case(name, **CASES[name])
    results = run(case, heads, seed=len(name))
    assert max(errors(*results).values()) <= fused_bound(case.bound, "bfloat16"), errors(*results)
    found, naive = norms(*results), norms(*on_host(None, case, mx.bfloat16, by=gated_delta_naive))
    bounds = {key: fused_bf16_norm(error) for key, error in naive.items()}
    assert not {key: (error, bounds[key]) for key, error in found.items() if not error <= bounds[key]}


def same_bits(results: dict, others: dict) -> bool:
    return all(mx.array_equal(others[name], result) for name, result in results.items())


def test_a_beta_of_bf16_is_read_and_its_gradient_written_as_it_is(run, table):
    case, read = table.Case("130 tokens", **SIZES), []

    def small(beta: mx.array) -> mx.array:
        return beta.astype(mx.bfloat16)

    def watched(launch: Launch) -> Launch:
        read.extend(array.dtype for name, array in launch.inputs.items() if name == "beta")
        read.extend(dtype for name, (_, dtype) in launch.outputs.items() if name == "d_beta")
        return launch

    found, _ = run(case, beta=small, watch=watched)
    assert read == [mx.bfloat16] * 2
    wanted, _ = run(case, beta=lambda beta: small(beta).astype(mx.float32), watch=watched)
    assert read == [mx.bfloat16] * 2 + [mx.float32] * 2
    wanted["beta"] = wanted["beta"].astype(mx.bfloat16).astype(mx.float32)
    assert same_bits(found, wanted)


# For many heads, the same of two other kernels is for the weekly run.
EITHER = [FEW, pytest.param(MANY, marks=pytest.mark.weekly)]


@pytest.mark.parametrize("heads", EITHER)
def test_kernels_for_racecheck_compute_the_same(heads, run, table):
    case = table.Case("130 tokens", **SIZES)
    results, _ = run(case, heads, seed=10)
    others, _ = run(case, heads, change=lambda text: f"#define DELTATUNE_RACECHECK\n{text}")
    assert same_bits(results, others)


PLANTED = {
    f"{name}, {heads}": (heads, *defect)
    for heads, texts in TEXTS.items()
    for name, defect in defects(f"gated delta on Hopper, {heads}", *texts).items()
}


def planted(heads: str, old: str, new: str) -> Callable[[str], str]:
    """Return a function that puts `new` in place of `old` in the text of each kernel that has it."""
    assert any(old in text for text in TEXTS[heads]), "the text has changed: plant this defect elsewhere"
    return lambda text: text.replace(old, new)


@pytest.mark.parametrize("name", some_daily(PLANTED))
def test_a_planted_defect_shows(name, run, norms, table, host_module):
    case = table.Case("planted", **SIZES | OPEN | {"length": 260, "beta": 1.9, "keys": "near"})
    bounds = {key: fused_bf16_norm(0.0) for key in ("y", "q", "k", "v", "log_g", "beta")} | {"state": 1e-3}
    change = planted(*PLANTED[name])

    def wrong() -> bool:
        # What was never written may be a signalling NaN, of which NumPy warns.
        with np.errstate(invalid="ignore"):
            found = norms(*run(case, PLANTED[name][0], change=change))
        return not all(found[key] <= bound for key, bound in bounds.items())

    assert host_module.shows(wrong)


ROUNDED = {
    FEW: ("c.before[own_side(i)] * (c.both[16 + i] + c.both[i])", "c.before[own_side(i)] * c.both[i]"),
    MANY: (
        "times_positions<DK>(x, low_rows, room.place + n % STAGES * Memory::stage + Memory::k, false);",
        "clear_floats(x);",
    ),
}


@pytest.mark.parametrize("heads", TEXTS)
def test_a_state_keeps_more_than_bf16(heads, run, norms, table):
    """With beta 2 and open gates no error fades, so keys must meet both parts of the state."""
    case = table.Case("beta 2", **SIZES | OPEN | {"beta": 2.0})
    rounded = planted(heads, *ROUNDED[heads])
    assert norms(*run(case, heads))["state"] <= 2.0**-13 < norms(*run(case, heads, change=rounded))["state"]


@pytest.mark.parametrize("heads", EITHER)
def test_other_orders_of_the_lanes_give_the_same_bits(heads, run, table):
    case = table.Case("130 tokens", **SIZES)
    first, second = (run(case, heads, seed=seed)[0] for seed in (10, 2))
    assert same_bits(first, second)


def test_which_calls_the_kernels_serve(monkeypatch):
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)

    def serve(machine="cuda", dtype=mx.bfloat16, key_size=128, value_size=128, per_channel=False):
        shape = (1, 100, 2, 4, key_size, value_size)
        tiling = tiling_of(machine, shape, dtype, masked=False, segmented=False, per_channel=per_channel)
        return isinstance(tiling, HopperTiling)

    assert serve()
    assert serve(value_size=64)
    others = [{"machine": "metal"}, {"dtype": mx.float16}, {"key_size": 64}, {"value_size": 96}, {"per_channel": True}]
    assert not any(serve(**other) for other in others)


@pytest.mark.parametrize(
    ("batch", "value_heads", "rows"), [(1, 32, 32), (2, 16, 32), (1, 48, 64), (2, 32, 64), (3, 32, 32), (8, 32, 64)]
)
def test_few_heads_are_divided_into_more_blocks(batch, value_heads, rows, monkeypatch):
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.H200)
    shape = (batch, 100, 16, value_heads, 128, 128)
    tiling = choose_hopper_tiling(shape, mx.bfloat16, masked=False, segmented=False)
    assert tiling is not None
    assert tiling.slice == rows


def bytes_of(shape: tuple[int, ...], **given: mx.array) -> dict[str, int]:
    """The bytes of the outputs of a call's launches by name, in bf16."""
    tiling = tiling_of("cuda", shape, mx.bfloat16, masked=False, segmented=False, per_channel=False, erases=bool(given))
    launches = [tiling.launch(phase, given | {"initial": no_initial_state()}) for phase in PHASES]
    outputs = [output for launch in launches for output in launch.outputs.items()]
    return {name: int(np.prod(shape)) * dtype.size for name, (shape, dtype) in outputs}


def test_bytes_that_a_chunk_saves(monkeypatch):
    """Beside y there are 130 KB a chunk and head: Z, P, two states with tails, u and R in twelve bits that count."""
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.H200)
    sizes = bytes_of((1, 256, 1, 2, 128, 128), beta=mx.zeros((1, 256, 2)))
    kilobytes = {"solve": 9.0, "scores": 9.0, "states": 32.0, "d_states": 32.0, "u": 24.0, "d_right": 24.0}
    assert {name: sizes[name] / (4 * 2) / 1024 for name in kilobytes} == kilobytes


@pytest.mark.parametrize(("rows", "length", "megabytes"), [(1, 8192, 411.0), (2, 2048, 211.8)])
def test_bytes_of_linear_attention(rows, length, megabytes, monkeypatch):
    """Beyond gradients, and with that of the last state: mamba-ssm's calls of these sizes hold 419 and 213 MB."""
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.H200)
    sizes = bytes_of((rows, length, 8, 64, 128, 64))
    others = sizes["last"] - sum(sizes[name] for name in ("dq", "dk", "dv", "d_log_g"))
    assert round((sum(sizes.values()) + others) / 1e6, 1) == megabytes
