"""Foreseen calls: kernels are built for calls and trials to come, and nothing is launched, tried or remembered."""

import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from beside import load
from deltatune.machine import backend, environment
from deltatune.ops.attention import choice
from deltatune.ops.attention.trial_case import AttentionCall
from deltatune.ops.kernels import cubin, nvrtc
from deltatune.ops.operator import candidates, kernel_operator, verdicts
from deltatune.ops.operator.foresight import foreseen
from deltatune.ops.operator.operator import Candidate
from deltatune.ops.pointwise import silu, squares

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is installed on Linux alone")
gpu = load(Path(__file__).parents[1] / "kernels" / "pretended_gpu.py").gpu


@pytest.fixture
def cuda(gpu, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(environment, "cores", lambda: 8)
    for module in (kernel_operator, verdicts):
        module.forget()
    yield gpu
    for module in (kernel_operator, verdicts):
        module.forget()


def swiglu_is_right() -> bool:
    return silu._PASSES.passes_trial(*[((2, 48, 8), mx.float32)] * 2)


def test_kernels_of_trials_in_a_row_are_built_side_by_side(cuda, monkeypatch):
    """Each of four kernels is finished when all are being built. Here a launch returns zeros, so the trials fail."""
    all_of_them, built_alone, right = threading.Barrier(4), nvrtc.compiled, []

    def together(*arguments: Any) -> bytes:
        all_of_them.wait(60)
        return built_alone(*arguments)

    def calls() -> None:
        right.append(swiglu_is_right())
        right.append(squares.OPERATOR.serves(mx.float32))

    monkeypatch.setattr(nvrtc, "compiled", together)
    monkeypatch.setattr(squares, "_MOST", 32)
    with foreseen(calls):
        assert right == [True, True]
        assert not cuda.launches
        calls()
    assert right == [True, True, False, False]
    assert sorted(cuda.compiled) == ["squares_added"] * 2 + ["swiglu_backward", "swiglu_forward"]
    assert cuda.launches


def test_builds_that_no_thread_has_begun_are_dropped_at_the_end(cuda, monkeypatch):
    def builders() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("deltatune-builder")}

    started, may_end, built_alone, others = threading.Event(), threading.Event(), nvrtc.compiled, builders()

    def slow(*arguments: Any) -> bytes:
        started.set()
        assert may_end.wait(60)
        return built_alone(*arguments)

    monkeypatch.setattr(nvrtc, "compiled", slow)
    monkeypatch.setattr(environment, "cores", lambda: 1)

    def interrupted() -> None:
        with foreseen(swiglu_is_right):
            assert started.wait(60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (builder,) = builders() - others
    may_end.set()
    builder.join(60)
    assert cuda.compiled == ["swiglu_forward"]


def test_an_error_is_left_to_the_calls_themselves(cuda):
    called: list[bool] = []

    def calls() -> None:
        called.append(cubin.building())
        raise ValueError("two rows")

    with pytest.raises(ValueError, match="two rows"), foreseen(calls):
        calls()
    assert called == [True, False]


def test_a_compiled_function_remembers_no_foreseen_calls(cuda, monkeypatch):
    def launched(**given: Any) -> list[mx.array]:
        return [mx.ones(*kind) for kind in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launched)
    call, x = mx.compile(lambda x: silu.swiglu(x, x)), mx.ones((2, 16))
    found: list[mx.array] = []
    with foreseen(lambda: found.append(call(x))):
        assert mx.array_equal(found[0], mx.zeros((2, 16)))
        assert mx.array_equal(call(x), mx.ones((2, 16)))


@pytest.mark.parametrize("device", ["cpu", "metal"])
def test_nothing_is_foreseen_where_nvidia_has_nothing_to_build(cuda, monkeypatch, device):
    monkeypatch.setattr(backend, "device", lambda: device)
    with foreseen(lambda: pytest.fail("it was traced")):
        assert not cubin.building()


def test_of_implementations_the_one_that_may_serve_is_foreseen(cuda, monkeypatch):
    """The first is known to be wrong; the trial of the second builds its kernels, and its verdict stays open."""
    called: list[tuple[str, bool]] = []

    def candidate(name: str, call: AttentionCall) -> Candidate:
        def function(q: mx.array, *_: Any, **__: Any) -> mx.array:
            called.append((name, cubin.building()))
            return mx.zeros_like(q)

        return Candidate(function, call.shape_class(name), function)

    for name in ("fused", "native", "blocked"):
        monkeypatch.setitem(choice.OPERATOR.candidates, name, lambda call, name=name: candidate(name, call))
    monkeypatch.setitem(choice.OPERATOR.orders, "cuda", ("fused", "native", "blocked"))
    monkeypatch.setattr(backend, "too_old", lambda: None)
    monkeypatch.setattr(candidates, "_announced", set())
    arrays = {"q": mx.zeros((1, 2, 5, 8)), "k": mx.zeros((1, 1, 5, 8)), "v": mx.zeros((1, 1, 5, 8))}
    options = {"causal": True, "segments": None, "window": None, "sinks": None, "mask": None, "scale": 0.3}
    call = AttentionCall(**arrays, **options)
    wrong = call.shape_class("fused")
    verdicts.again("attention-fused", wrong, lambda: verdicts.Verdict("fused", "", 1e-3, {"y": 1.0}))
    names = []
    with foreseen(
        lambda: (
            names.append(candidates.choose(choice.OPERATOR, call)[0])
            or names.append(candidates.choose(choice.OPERATOR, call)[0])
        )
    ):
        pass
    assert names == ["native", "native"]
    assert called == [("native", True)]
    assert verdicts.remembered("attention-native", call.shape_class("native")) is None
    assert not candidates._announced
