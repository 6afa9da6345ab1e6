"""Defects planted into the kernels' own text: each must turn the comparison red, or be refused."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta.tolerances import FUSED_STATE_NORM, OVERSHOOTING, fused_bf16_norm, fused_bound
from deltatune.ops.kernels.launch import header

# Kernel: where its body begins.
KERNELS = {
    "prepare": "gated_delta_prepare",
    "scan": "scan_chunks",
    "reverse": "reverse_chunks",
    "gradients": "gated_delta_gradients",
}
# kernel: text, what stands in its place.
DEFECTS = {
    "a global index off by one": (
        "scan",
        "from[(long)row * row_stride + column]",
        "from[row * row_stride + column + 1]",
    ),
    "a shared index off by one": ("gradients", "s.put(row * stride + column", "s.put(row * stride + column + 1"),
    "a write one row too far": (
        "reverse",
        "to[(long)row * row_stride + column]",
        "to[(row + 1) * row_stride + column]",
    ),
    "an unwritten gradient": ("gradients", "d_beta[to] =", "if (t) d_beta[to] ="),
    "an unwritten state": ("scan", "if (row < DV && column < DK) to[", "if (row < DV && column < DK && row) to["),
    "a wrong address space": ("prepare", "threadgroup char* memory", "device char* memory"),
    "no address space": ("prepare", "threadgroup const float* rate", "const float* rate"),
    "double": ("prepare", "float sum = ", "double sum = "),
}


@pytest.fixture
def planted(machine, host_module, host_folder, on_host, errors, table):
    """planted(kernel, text) -> the largest error when that kernel is made from `text`, over several orders of lanes."""
    case = table.Case("planted", batch=1, length=70, key_size=24, value_size=40)

    class Mixed:
        def __init__(self, kernel: str, text: str):
            self.kernel, self.wrong = f"gated_delta_{kernel}", host_module.HostMachine(host_folder, text)

        def run(self, launch, seed: int):
            return (self.wrong if launch.name == self.kernel else machine).run(launch, seed)

    def run(kernel: str, text: str) -> float:
        mixed = Mixed(kernel, text)
        found = [max(errors(*on_host(mixed, case, mx.bfloat16, lanes=lanes)).values()) for lanes in range(1, 4)]
        return max(found)

    return run


BOUND = fused_bound(2e-6, "bfloat16")


def at_first_barrier(kernel: str, instead: str) -> str:
    """The text with another statement in place of the kernel's first barrier."""
    text = header("metal")
    start = re.search(rf"\b{KERNELS[kernel]}\(Place", text).end()
    return text[:start] + re.sub(r"\bbarrier\(\);", instead, text[start:], count=1)


def test_as_it_stands(planted):
    assert planted("scan", header("metal") + "\n") <= BOUND


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_removed_barrier(kernel, planted):
    worst = planted(kernel, at_first_barrier(kernel, ";"))
    assert not worst <= BOUND


@pytest.mark.parametrize("kernel", ["scan", "reverse"])
def test_a_removed_group_barrier(kernel, watching, host_module, host_folder, on_host, table):
    """The last one of the kernel, between its products and what other lanes write out. Only the watch sees it."""
    text = header("metal")
    start = re.search(rf"\b{KERNELS[kernel]}\(Place", text).end()
    end = text.index("store_state", start)
    place = text.rindex("group_barrier();", start, end)
    wrong = host_module.HostMachine(host_folder, text[:place] + text[place + len("group_barrier();") :], watch=True)

    class Mixed:
        def run(self, launch, seed: int):
            return (wrong if launch.name == f"gated_delta_{kernel}" else watching).run(launch, seed)

    case = table.Case("planted", batch=1, length=70, key_size=24, value_size=40, mask="middle", segments=True)
    with pytest.raises(host_module.HostError, match="no barrier between them"):
        on_host(Mixed(), case, mx.bfloat16)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_barrier_that_half_the_lanes_reach(kernel, planted, host_module):
    with pytest.raises(host_module.HostError, match="not all lanes reach"):
        planted(kernel, at_first_barrier(kernel, "if (at.lane < 16) barrier();"))


@pytest.mark.parametrize("name", DEFECTS)
def test_red_or_refused(name, planted, host_module):
    kernel, old, new = DEFECTS[name]
    text = header("metal")
    assert old in text, "the text has changed: plant this defect elsewhere"
    try:
        worst = planted(kernel, text.replace(old, new))
    except host_module.HostError as refusal:
        worst = np.inf
        print(refusal)
    assert not worst <= BOUND


# What no largest error shows: text, what stands in its place.
TAILS = {
    "the tail of another tile": ("lane)[m * Bits + i] <<", "lane)[(m ^ 1) * Bits + i] <<"),
    "a tail without its sign": ("^ (1 << Bits >> 1)", "^ 0"),
    "pairs less the diagonal": ("if (r >= i % 16) pairs", "if (r > i % 16) pairs"),
    "pairs of one tile alone": ("pairs += column_sums", "pairs += 0.0f * column_sums"),
}


@pytest.mark.parametrize("name", TAILS)
def test_what_the_gates_gradient_alone_shows(name, host_module, host_folder, on_host, norms, table):
    old, new = TAILS[name]
    text = header("metal")
    assert old in text, "the text has changed: plant this defect elsewhere"
    wrong = host_module.HostMachine(host_folder, text.replace(old, new))
    sizes = {"batch": 1, "length": 65, "repeats": 1, "key_size": 24, "value_size": 40}
    case = table.Case("planted", **sizes, keys="near", gates="open", beta=1.9, bound=OVERSHOOTING)
    found = norms(*on_host(wrong, case, mx.bfloat16))
    assert not found["log_g"] <= fused_bf16_norm(0.0)


def test_a_state_in_fp32_that_is_rounded_at_every_product(host_module, host_folder, on_host, norms, table):
    old = "add_separately = !CHANNEL && sizeof(In) == 4"
    text = header("metal")
    assert old in text, "the text has changed: plant this defect elsewhere"
    wrong = host_module.HostMachine(host_folder, text.replace(old, "add_separately = false"))
    sizes = {"batch": 1, "length": 300, "repeats": 1, "key_size": 128, "value_size": 128}
    found = norms(*on_host(wrong, table.Case("planted", **sizes, gates="open"), mx.float32))
    assert min(found["state"], found["initial_state"]) > FUSED_STATE_NORM


def test_blocks_too_large_for_a_mac(machine, on_host, host_module, table, monkeypatch):
    from deltatune.ops.gated_delta import tiling

    monkeypatch.setattr(tiling, "METAL_BYTES", 64 * 1024)
    case = table.Case("large", batch=1, length=20, repeats=1, key_size=256, value_size=32)
    with pytest.raises(host_module.HostError, match="over 32768 bytes of threadgroup memory"):
        on_host(machine, case, mx.float32)
