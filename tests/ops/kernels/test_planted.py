"""Defects planted into the kernels' text: each must make the comparison fail, or be refused by the host machine."""

import re

import mlx.core as mx
import pytest
from host_machine import defects, some_daily

from deltatune.ops.gated_delta.fused import FILES
from deltatune.ops.gated_delta.tolerances import FUSED_STATE_NORM, OVERSHOOTING, fused_bf16_norm, fused_bound
from deltatune.ops.kernels.launch import header

# Each kernel and the function with its body.
KERNELS = {
    "prepare": "gated_delta_prepare",
    "scan": "scan_chunks",
    "reverse": "reverse_chunks",
    "gradients": "gated_delta_gradients",
}
TEXT = header("metal", FILES)
# Each defect: the kernel, the text, and what replaces it.
DEFECTS = defects("gated delta", TEXT)
# Defects that no largest error shows: the text, and what replaces it.
TAILS = defects("gated delta, gradient of the gates", TEXT)


@pytest.fixture
def planted(machine, host_module, host_folder, on_host, errors, table):
    """Return planted(kernel, text) -> whether one of three orders of lanes shows errors, with that kernel in `text`."""
    case = table.Case("planted", batch=1, length=70, key_size=24, value_size=40)

    def run(kernel: str, text: str) -> bool:
        wrong = host_module.HostMachine(host_folder, text)
        mixed = host_module.OneKernelReplaced(f"gated_delta_{kernel}", wrong, machine)
        worst = (max(errors(*on_host(mixed, case, mx.bfloat16, lanes=lanes)).values()) for lanes in range(1, 4))
        return not all(error <= BOUND for error in worst)

    return run


BOUND = fused_bound(2e-6, "bfloat16")


def at_first_barrier(kernel: str, instead: str) -> str:
    """Return the text with another statement in place of the kernel's first barrier."""
    start = re.search(rf"\b{KERNELS[kernel]}\(Place", TEXT).end()
    return TEXT[:start] + re.sub(r"\bbarrier\(\);", instead, TEXT[start:], count=1)


def test_the_unchanged_text_passes(planted):
    assert not planted("scan", TEXT + "\n")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_removed_barrier(kernel, planted):
    assert planted(kernel, at_first_barrier(kernel, ";"))


@pytest.mark.parametrize("kernel", ["scan", "reverse"])
def test_a_removed_group_barrier(kernel, watching, host_module, host_folder, on_host, table):
    """Removes the last group barrier, before lanes write out results of others. Only the watch sees it."""
    start = re.search(rf"\b{KERNELS[kernel]}\(Place", TEXT).end()
    end = TEXT.index("store_state", start)
    place = TEXT.rindex("group_barrier();", start, end)
    wrong = host_module.HostMachine(host_folder, TEXT[:place] + TEXT[place + len("group_barrier();") :], watch=True)
    mixed = host_module.OneKernelReplaced(f"gated_delta_{kernel}", wrong, watching)
    case = table.Case("planted", batch=1, length=70, key_size=24, value_size=40, mask="middle", segments=True)
    with pytest.raises(host_module.HostError, match="no barrier between them"):
        on_host(mixed, case, mx.bfloat16)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_barrier_that_half_the_lanes_reach(kernel, planted, host_module):
    with pytest.raises(host_module.HostError, match="not all lanes reach"):
        planted(kernel, at_first_barrier(kernel, "if (at.lane < 16) barrier();"))


@pytest.mark.parametrize("name", some_daily(DEFECTS))
def test_fails_or_is_refused(name, planted, host_module):
    kernel, *defect = DEFECTS[name]
    text = host_module.plant(TEXT, *defect)
    assert host_module.shows(lambda: planted(kernel, text))


@pytest.mark.parametrize("name", some_daily(TAILS))
def test_defect_that_only_the_gradient_of_the_gates_shows(name, host_module, host_folder, on_host, norms, table):
    old, new = TAILS[name]
    wrong = host_module.HostMachine(host_folder, host_module.plant(TEXT, old, new))
    sizes = {"batch": 1, "length": 65, "repeats": 1, "key_size": 24, "value_size": 40}
    case = table.Case("planted", **sizes, keys="near", gates="open", beta=1.9, bound=OVERSHOOTING)
    assert not norms(*on_host(wrong, case, mx.bfloat16))["log_g"] <= fused_bf16_norm(0.0)


def test_a_state_in_fp32_that_is_rounded_at_every_product(host_module, host_folder, on_host, norms, table):
    old = "add_separately = !CHANNEL && sizeof(In) == 4"
    wrong = host_module.HostMachine(host_folder, host_module.plant(TEXT, old, "add_separately = false"))
    sizes = {"batch": 1, "length": 300, "repeats": 1, "key_size": 128, "value_size": 128}
    relative = norms(*on_host(wrong, table.Case("planted", **sizes, gates="open"), mx.float32))
    assert min(relative["state"], relative["initial_state"]) > FUSED_STATE_NORM


def test_blocks_too_large_for_a_mac(machine, on_host, host_module, table, monkeypatch):
    from deltatune.ops.gated_delta import tiling

    monkeypatch.setattr(tiling, "METAL_BYTES", 64 * 1024)
    case = table.Case("large", batch=1, length=20, repeats=1, key_size=256, value_size=32)
    with pytest.raises(host_module.HostError, match="over 32768 bytes of threadgroup memory"):
        on_host(machine, case, mx.float32)
