"""The refusals of the host machine, shown by defects planted into a right kernel of a few lines."""

import platform
import re
import subprocess
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from host_machine import defects

from deltatune.ops.kernels.launch import FOLDER, Kernel, Launch

VOCABULARY = (FOLDER / "metal.h").read_text()
ROOM = "template <int N> struct Room { static constexpr constant int bytes = N; };\n"
# Each lane passes its value to the lane at the other end of the block.
REVERSE = """
template <int N>
void reverse(Place at, threadgroup char* memory, LENGTH const device float* q, const constant float* few,
             device float* y) {
  threadgroup float* shared = reinterpret_cast<threadgroup float*>(memory);
  shared[at.index] = q[at.index] + few[0];
  barrier();
  y[at.index] = shared[N - 1 - at.index];
}
"""
PLACE = "struct Place {\n  int x, y, z, index, group, lane;\n};\n"
COUNT = 64
KERNEL = Kernel(
    name="reverse",
    files=(),
    values=("N",),
    sizes=("q_shape[1]",),
    arrays=("q", "few", "y"),
    memory="Room",
    memory_values=("N * 4",),
)


def launch(**changes) -> Launch:
    q = mx.arange(COUNT).astype(mx.float32).reshape(1, COUNT)
    reverse = Launch(
        kernel=KERNEL,
        inputs={"q": q, "few": mx.array([0.5])},
        outputs={"y": ((COUNT,), mx.float32)},
        values={"N": COUNT},
        blocks=(1, 1, 1),
        bytes=COUNT * 4,
        groups=COUNT // 32,
    )
    return replace(reverse, **changes)


@pytest.fixture
def run(host_module, host_folder):
    """Return run(old, new, watch, **changes of the launch) -> y of the changed kernel, for six orders of lanes."""

    def attempt(old: str = "", new: str = "", watch: bool = False, **changes) -> list[np.ndarray]:
        changed = launch(**changes)
        length = "int," if "q_shape" in changed.source else ""
        body = REVERSE.replace("LENGTH", length)
        assert old in body
        machine = host_module.HostMachine(host_folder, VOCABULARY + PLACE + ROOM + body.replace(old, new), watch)
        return [np.array(machine.run(changed, seed=seed)[0]) for seed in range(1, 7)]

    return attempt


def test_a_right_kernel_runs(run):
    for y in run():
        assert np.array_equal(y, np.arange(COUNT)[::-1] + 0.5)


def test_bf16_is_rounded_as_mlx_rounds_it(run):
    halves = [1.0 + step * 2.0**-8 for step in range(4)] + [-1.0 - 2.0**-8, 3.0e38, 3.4e38, 1e-40, -0.0]
    drawn = np.random.default_rng(3).normal(size=COUNT - len(halves) - 3)
    values = np.array([*halves, np.nan, np.inf, -np.inf, *drawn], np.float32)
    q = mx.array(values).reshape(1, COUNT)
    expected = np.array(mx.array(values).astype(mx.bfloat16).astype(mx.float32))[::-1]
    inputs = {"q": q, "few": mx.array([0.0])}
    for y in run("y[at.index] = ", "y[at.index] = (float)(bfloat16_t)", inputs=inputs):
        assert np.array_equal(y, expected, equal_nan=True)


TO_BF16 = "void convert(const float* x, __bf16* y) { for (int i = 0; i < 8; ++i) y[i] = (__bf16)x[i]; }"
# A CPU of each kind that rounds to bf16 by an instruction, with its name; and the plainest CPUs, as LLVM names them.
ROUNDING = {
    "x86_64": ("cooperlake", "vcvtneps2bf16"),
    "aarch64": ("neoverse_v1", "bfcvt"),
    "arm64": ("apple_m2", "bfcvt"),
}
PLAINEST = {"x86-64", "generic", "apple-m1"}


def compiled(host_module, folder, command, *flags):
    """Return the text of TO_BF16, compiled to assembly or to LLVM's language by the host machine's flags."""
    source, result = folder / "to_bf16.cpp", folder / "compiled"
    source.write_text(TO_BF16)
    subprocess.run([*command, *host_module.FLAGS, *flags, "-S", source, "-o", result], check=True, capture_output=True)
    return result.read_text()


def test_kernels_are_compiled_for_the_plainest_cpu(host_module, tmp_path):
    """No kernel is compiled with instructions that other CPUs lack, so that results are the same on every CPU."""
    text = compiled(host_module, tmp_path, host_module.compiler(), "-emit-llvm")
    (cpu,) = set(re.findall(r'"target-cpu"="([^"]*)"', text))
    assert cpu in PLAINEST


def test_no_instruction_rounds_to_bf16(host_module, tmp_path):
    cpu, instruction = ROUNDING[platform.machine()]
    command = host_module.compiler()
    assert instruction not in compiled(host_module, tmp_path, command)
    zig = command[1:2] == ["c++"]
    there = f"-mcpu={cpu}" if zig or cpu != "cooperlake" else f"-march={cpu}"
    plain = [word for word in command if not word.startswith("-mcpu")]
    text = compiled(host_module, tmp_path, plain, there if zig else there.replace("_", "-"))
    assert instruction in text, "the instruction is seen where a CPU has it"


def test_a_missing_barrier_shows(run):
    assert any(not np.array_equal(y, np.arange(COUNT)[::-1] + 0.5) for y in run("barrier();", ""))


def test_an_unwritten_output_shows(run):
    assert all(np.isnan(y[0]) for y in run("y[at.index] =", "if (at.index) y[at.index] ="))


RACES = {
    "no barrier": ("barrier();", ";"),
    "a group's barrier for two groups": ("barrier();", "group_barrier();"),
    "a sum in place of a barrier": ("barrier();", "lane_sum(0.0f);"),
    "a place read, then written": ("y[at.index] =", "shared[at.index] = 0.0f; y[at.index] ="),
    "a place written by two": ("shared[at.index] =", "shared[0] = 0.0f; shared[at.index] ="),
}


@pytest.mark.parametrize("name", RACES)
def test_the_watch_sees_a_race(name, run, host_module):
    with pytest.raises(host_module.HostError, match="no barrier between them"):
        run(*RACES[name], watch=True)


def test_the_watch_lets_barriers_pass(run):
    swap = (
        "barrier(); const float other = shared[COUNT - 1 - at.index]; barrier(); shared[at.index] = other; barrier();"
    )
    for y in run("barrier();", swap.replace("COUNT", str(COUNT)), watch=True):
        assert np.array_equal(y, np.arange(COUNT) + 0.5)


def test_a_groups_barrier_is_enough_within_a_group(run):
    within = "shared[at.index ^ 1]"
    for y in run(
        "barrier();\n  y[at.index] = shared[N - 1 - at.index]", f"group_barrier(); y[at.index] = {within}", True
    ):
        assert np.array_equal(y, (np.arange(COUNT) ^ 1) + 0.5)


REFUSED = defects("host machine")


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name, run, host_module):
    old, new, message = REFUSED[name]
    with pytest.raises(host_module.HostError, match=message):
        run(old, new)


def test_refuses_33_kilobytes_of_threadgroup_memory(run, host_module):
    size = 33 * 1024
    with pytest.raises(host_module.HostError, match="over 32768 bytes"):
        run(bytes=size, kernel=replace(KERNEL, memory_values=(f"{size}",)))


def test_refuses_more_than_31_buffers(run, host_module):
    inputs = {f"input_{index}": mx.zeros((8,)) for index in range(30)} | {"q": mx.zeros((1, 8))}
    with pytest.raises(host_module.HostError, match="Metal has 31"):
        run(inputs=inputs)


def test_a_scalar_is_a_reference(host_module):
    entry, text = host_module.specialise(launch(inputs={"q": mx.zeros((1, 8)), "few": mx.array(1.0)}))
    assert "const device float* q" in text
    assert "const constant float& few" in text
    assert entry in text
