"""The self-test's checks pass on this machine, and fail where the fault that they look for is planted."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from host_machine import HostMachine, cuda_text

from deltatune import cli
from deltatune.doctor.probes import Fault
from deltatune.machine import backend
from deltatune.ops import operators
from deltatune.ops.attention import attention_blocked, trial_case
from deltatune.ops.gated_delta import gated_delta_chunk, native
from deltatune.ops.gated_delta import trial_case as delta_case
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_on
from deltatune.ops.gated_delta.trial_case import SLOW_TOKENS, ShapeClass, by_gates
from deltatune.ops.kernels.launch import Launch, header
from deltatune.ops.operator import verdicts
from deltatune.ops.operator.case import Case
from deltatune.ops.operator.measure import relative_norm
from deltatune.ops.operator.operator import Candidate
from deltatune.ops.operators import ATTENTION, GATED_DELTA
from deltatune.ops.pointwise import vocabulary_loss, weighted_norms
from deltatune.ops.pointwise.passes import BODIES
from deltatune.ops.products import low_rank
from deltatune.plan.device_limits import DeviceLimits
from deltatune.selftest import controls, experts, hardware, implementations, replays, run, times, training
from deltatune.selftest.outcome import FAILED, NOT_RUN, PASSED, tried
from deltatune.selftest.parity import cases, ours

SMALL = [
    delta_case.Workload("small", ShapeClass(2, 4, 16, 16, "float32"), 70),
    delta_case.Workload(
        "half", ShapeClass(2, 2, 16, 16, "bfloat16", masked=True, segmented=True, per_channel=True), 70
    ),
]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Fewer steps, rows, calls and tokens than users wait for."""
    options = training._options
    smaller = {"batch_size": 2, "max_seq_length": 64}
    monkeypatch.setattr(training, "_options", lambda *given: options(*given) | smaller)
    monkeypatch.setattr(training, "STEPS", 2)
    monkeypatch.setattr(times, "_CALLS", 1)
    monkeypatch.setattr(controls, "_SHORT", 16)
    monkeypatch.setattr(controls, "_LONG", 32)


def judge(function, workload, fused=True):
    return tried(workload.case("fused" if fused else "chunk"), function)


@pytest.fixture
def fused(host_folder, monkeypatch):
    """Runs the fused kernels' Metal text on the host machine; `change` alters the arrays of every launch."""
    machine = HostMachine(host_folder)

    def made(change=lambda name, arrays: arrays):
        def execute(launch):
            return change(launch.name, machine.run(launch))

        monkeypatch.setattr(Launch, "run", execute)
        return partial(gated_delta_fused, tiling_of_call=tiling_on("metal"))

    return made


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_the_fused_kernels_are_right(fused, workload):
    assert judge(fused(), workload).status == PASSED


@pytest.mark.parametrize("planted", ["NaN in one row", "one head zero", "off by one part in a hundred"])
@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_a_kernel_that_is_wrong_shows(fused, workload, planted):
    def change(name, arrays):
        if not name.endswith("gradients"):
            return arrays
        dq, *others = arrays
        rows = mx.arange(dq.shape[1])[None, :, None, None]
        heads = mx.arange(dq.shape[2])[None, None, :, None]
        wrong = {
            "NaN in one row": mx.where(rows == 5, mx.array(float("nan"), dq.dtype), dq),
            "one head zero": mx.where(heads == dq.shape[2] - 1, mx.zeros_like(dq), dq),
            "off by one part in a hundred": (dq * 1.01).astype(dq.dtype),
        }
        return [wrong[planted], *others]

    outcome = judge(fused(change), workload)
    assert outcome.status == FAILED
    assert outcome.worst.startswith("dq")


@pytest.mark.parametrize("check", list(implementations.checks(ATTENTION, True)), ids=lambda check: check.name)
def test_attention_is_right(check):
    outcome = check.run()
    on_cpu = backend.device() == "cpu" and "blocked" not in check.name
    assert outcome.status == (NOT_RUN if on_cpu or "native" in check.name else PASSED)


@pytest.mark.parametrize("workload", trial_case.workloads(True), ids=lambda workload: workload.name)
def test_an_attention_that_is_wrong_shows(workload):
    def one_key_lost(q, k, v, **options):
        return attention_blocked(q, mx.where(mx.arange(k.shape[2])[:, None] == 3, 0.0, k), v, **options)

    assert tried(workload.case("blocked"), one_key_lost).status == FAILED


def test_one_head_that_is_no_number_shows():
    workload = delta_case.Workload("three heads", ShapeClass(3, 3, 16, 16, "float32"), 20)

    def middle_lost(*arrays, **options):
        y, state = gated_delta_chunk(*arrays, **options)
        return mx.where(mx.arange(3)[None, None, :, None] == 1, mx.array(float("nan")), y), state

    assert judge(middle_lost, workload).errors["y"] == float("inf")


@pytest.mark.skipif(not hasattr(mx.fast, "gated_delta_update"), reason="this MLX has no such operator")
def test_slow_gates_that_are_rounded_show():
    """MLX's own operator rounds gates to the dtype of q (mlx 0.32.4)."""
    workload = delta_case.Workload("slow", ShapeClass(1, 1, 16, 16, "bfloat16"), SLOW_TOKENS)

    def rounded(q, k, v, log_g, beta, *, initial_state, mask=None, segments=None):
        y, state = mx.fast.gated_delta_update(q, k, v, mx.exp(log_g), beta, initial_state)
        return y.astype(q.dtype), state

    assert judge(rounded, workload, False).status == FAILED
    assert judge(native.gated_delta_native, workload, False).status == PASSED


def test_an_error_in_one_row_is_not_hidden_by_the_large_results_of_another():
    found, truth = np.array([[1.0, 2.0], [1e6, 1e6], [1.0, 1.0]]), np.array([[1.0, 2.1], [1e6, 1e6], [1.0, 1.0]])
    assert relative_norm(found, truth) < 1e-6
    case = Case("rows", ["y"], lambda y: [y], lambda: [truth], 0.0, error=relative_norm, parts=by_gates)
    assert case.errors([mx.array(found)], [truth])["y"] > 0.01


def test_experts(monkeypatch):
    mixture = experts.Mixture("small", 40, 2, 4, 64, 32)
    assert experts.compare(mixture).status == PASSED
    block = experts.expert_block
    monkeypatch.setattr(experts, "expert_block", lambda *given: block(*given) * (1 + 1e-5))
    assert experts.compare(mixture).status == FAILED


COMPARED = {
    f"{each.name} {each.dtype}": (operator, each) for operator in operators.KERNELS for each in operator.workloads(True)
}
# Kernels that are compared in bf16 too, where a small defect is harder to see.
OTHERS_IN_FP32 = [name for name in COMPARED if name.replace("float32", "bfloat16") in {*COMPARED} - {name}]
WEEKLY = [pytest.param(*COMPARED[name], marks=pytest.mark.weekly, id=name) for name in OTHERS_IN_FP32]
DAILY = [pytest.param(*COMPARED[name], id=name) for name in COMPARED if name not in OTHERS_IN_FP32]


@pytest.mark.parametrize(("operator", "workload"), DAILY + WEEKLY)
def test_kernels(operator, workload, host_folder):
    if operator is low_rank.OPERATOR:
        text = cuda_text(low_rank.ROWS)
        machine = HostMachine(host_folder, text, False, 99 * 1024, cuda=True, optimised=True)
    else:
        machine = HostMachine(host_folder, header("metal", (*BODIES, *weighted_norms.FILES, *vocabulary_loss.FILES)))
    names: list[str] = []

    def altered(factors, launch):
        names.append(launch.name)
        return [array * factors.get(launch.name, 1) for array in machine.run(launch)]

    assert implementations.compare_kernels(operator, workload, partial(altered, {})).status == PASSED
    for name in set(names):
        outcome = implementations.compare_kernels(operator, workload, partial(altered, {name: 1.02}))
        assert outcome.status == FAILED
        of_gradients = "gradient" in outcome.worst or outcome.worst.startswith(("dx", "product"))
        assert of_gradients or not name.endswith(("backward", "gradients"))


def test_a_control_fails_where_the_patches_do_not_reach(monkeypatch):
    assert controls.control(True).status == PASSED
    monkeypatch.setattr(controls, "patched", lambda model: nullcontext())
    assert controls.control(True).status == FAILED


def test_a_control_fails_where_upstream_neither_loops_nor_refuses(monkeypatch):
    monkeypatch.setattr(controls, "growth", lambda model: 1.0)
    assert controls.control(True).status == FAILED


@pytest.mark.parametrize(("status", "expected"), [("present", FAILED), ("avoided", PASSED), ("not run", NOT_RUN)])
def test_a_fault_that_trains_wrong_fails(monkeypatch, status, expected):
    monkeypatch.setattr(run, "examination", lambda: SimpleNamespace(faults=[Fault("some", status, "why")]))
    assert run._fault("some").status == expected


def test_a_replay_shows_a_gradient_that_is_off(monkeypatch):
    case = cases.CASES["qwen3"]
    assert replays.compared("qwen3", case, ours.run).status == PASSED
    off = cases.ParityCase(cases.FAMILIES["qwen3"])
    monkeypatch.setattr(ours, "SCALE", 2.02)
    assert replays.compared("qwen3", off, ours.run).status == FAILED


def test_images_without_mlx_vlm_are_not_run(monkeypatch):
    monkeypatch.setattr(replays.importlib.util, "find_spec", lambda name: None)
    assert replays._vision("qwen3_5", None).status == NOT_RUN


def test_a_resumed_run_of_other_bits_fails(monkeypatch):
    runs = iter([([1.0], {"w": np.ones(2)}), ([1.0], {}), ([1.0], {"w": np.array([1.0, 1.0 + 1e-12])})])
    monkeypatch.setattr(training, "_trained", lambda *_, **__: next(runs))
    monkeypatch.setattr(training, "_losses", lambda folder: [1.0])
    assert training.stopped_and_resumed(True).status == FAILED


def test_full_fine_tuning_against_the_recurrence(monkeypatch):
    trained, kept, runs = training._trained, {}, []

    def right(folder, **options):
        kept[folder.name] = trained(folder, **options)
        return kept[folder.name]

    def faster(folder, **options):
        runs.append(folder.name)
        return trained(folder, **options, learning_rate=0.0202) if folder.name == "here" else kept["there"]

    monkeypatch.setattr(training, "_trained", right)
    assert training.full_fine_tuning().status == PASSED
    monkeypatch.setattr(training, "_trained", faster)
    assert training.full_fine_tuning().status == FAILED
    assert runs == ["here", "there"]


# tests/train/test_distributed.py trains two ranks in other ways.
@pytest.mark.weekly
def test_two_ranks_train_as_one():
    assert training.two_ranks().status == PASSED


def test_wrong_implementation_gets_no_time(monkeypatch):
    kept: list[times.Timing] = []
    double = lambda *given, **options: tuple(2 * x for x in gated_delta_chunk(*given, **options))  # noqa: E731
    assert times._checked(times.LOOP, double, True, kept).status == NOT_RUN
    assert times._checked(times.OURS, double, True, kept).status == FAILED
    assert [timing.milliseconds for timing in kept] == [None, None]


def test_a_call_that_would_take_too_long_or_too_much_is_left_out(monkeypatch):
    size = delta_case.Workload("long", ShapeClass(16, 32, 128, 128, "float32"), 2**20)
    assert times._too_much(times.OURS, size, 1e-9) is None
    for name in (times.LOOP, times.NATIVE):
        assert "would need about" in times._too_much(name, size, 0.0)
    monkeypatch.setattr(times.backend, "device", lambda: "metal")
    monkeypatch.setattr(times, "device_limits", lambda: DeviceLimits(None, 2**30, "", ""))
    assert times._too_much(times.NATIVE, size, 0.0) is None
    assert "would take about 105 s" in times._too_much(times.OURS, size, 1e-4)


# Each check passes in a test above; tests/on_metal runs the command, as a Mac would.
@pytest.mark.weekly
def test_the_quick_selftest_passes_here(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    # tests/oracle replays every family with these bounds.
    monkeypatch.setattr(replays, "_QUICK", replays._QUICK[:1])
    # tests/doctor examines all.
    monkeypatch.setattr(delta_case, "SMALL", delta_case.SMALL[:1])
    monkeypatch.setattr(trial_case, "HEADS", trial_case.HEADS[-1:])
    # Of the resumed runs the first; tests/on_metal has the second.
    resumed = list(training.checks(True))[:1]
    monkeypatch.setattr(training, "checks", lambda quick: resumed)
    assert cli.main(["selftest", "--quick"]) == 0
    shown = capsys.readouterr().out
    assert "Training is right here" in shown


@pytest.fixture
def candidate(monkeypatch, tmp_path):
    """candidate(name, function): a Mac with `function` as its implementation `name`, or a reason why there is none."""
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(backend, "device", lambda: "metal")

    def given(name, function):
        verdicts.forget()
        found = function if isinstance(function, str) else None
        made = lambda call: found or Candidate(function, call.shape_class(), function)  # noqa: E731
        monkeypatch.setitem(GATED_DELTA.candidates, name, made)

    yield given
    verdicts.forget()


def wrong(*arrays, **options):
    y, state = gated_delta_chunk(*arrays, **options)
    return 1.1 * y, state


def test_a_gpus_implementation_is_tried_and_then_compared(candidate):
    candidate("fused", gated_delta_chunk)
    assert implementations.compare(GATED_DELTA, "fused", SMALL[0]).status == PASSED
    candidate("fused", wrong)
    outcome = implementations.compare(GATED_DELTA, "fused", SMALL[0])
    assert (outcome.status, "differs from chunk" in outcome.detail) == (FAILED, True)
    # One of MLX's own that fails its trial is not used, so nothing trains wrong.
    candidate("native", wrong)
    assert implementations.compare(GATED_DELTA, "native", SMALL[0]).status == NOT_RUN
    candidate("native", "heads too odd")
    assert implementations.compare(GATED_DELTA, "native", SMALL[0]).detail == "it does not cover this: heads too odd"


def test_every_implementation_that_is_right_is_timed_at_each_length(candidate, fused, monkeypatch):
    assert hardware.implementations(ATTENTION, True).status == PASSED
    fused()
    candidate("native", wrong)
    monkeypatch.setattr(delta_case, "MODELS", (ShapeClass(1, 1, 8, 8, "float32"),))
    monkeypatch.setattr(hardware, "_LENGTHS", (5, 70))
    timed = hardware.implementations(GATED_DELTA, False).facts["milliseconds"]
    assert [(length, *sorted(by_name)) for length, by_name in timed.items()] == [(n, "chunk", "fused") for n in (5, 70)]
    assert all(ms > 0 for by_name in timed.values() for ms in by_name.values())


def test_packed_matrices_and_the_disk_are_measured(monkeypatch, tmp_path):
    assert (hardware.implementations(ATTENTION, True).status == NOT_RUN) == (backend.device() == "cpu")
    monkeypatch.chdir(tmp_path)
    (times,) = hardware.products(True).facts["milliseconds"].values()
    assert list(times) == ["dense", "4 bits", "unpacked first"]
    rates = hardware.disk(True).facts["bytes_per_second"]
    assert rates.keys() == {"uncached", "cached"}
    assert min(rates.values()) > 0
    assert not list(tmp_path.iterdir())
