"""The choice of implementation: which calls are supported, which checks pass, and the messages."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from deltatune.errors import UserError
from deltatune.machine import backend, nvidia
from deltatune.ops.gated_delta import choice, gated_delta, gated_delta_chunk, trial_case
from deltatune.ops.gated_delta.choice import OPERATOR, Call
from deltatune.ops.gated_delta.native import gated_delta_native
from deltatune.ops.gated_delta.trial_case import Arguments, ShapeClass
from deltatune.ops.linear_attention.choice import OPERATOR as LINEAR_ATTENTION
from deltatune.ops.operator import candidates, verdicts
from deltatune.ops.operator.candidates import ImplementationWarning
from deltatune.ops.operator.case import judged
from deltatune.ops.operator.operator import Candidate

choose = partial(candidates.choose, OPERATOR)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Set a GPU's order of preference, an empty cache folder, and no verdicts or messages from earlier tests."""
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    for device in ("cpu", "metal"):
        monkeypatch.setitem(choice.OPERATOR.orders, device, ("fused", "chunk"))
    monkeypatch.setattr(backend, "too_old", lambda: None)
    monkeypatch.setattr(candidates, "_announced", set())
    verdicts.forget()
    yield
    verdicts.forget()


def call(dtype=mx.float32, per_channel=False, masked=False) -> Call:
    q, v = mx.zeros((1, 3, 2, 8), dtype), mx.zeros((1, 3, 4, 6), dtype)
    return Call(q, q, v, mx.zeros((1, 3, 4, 8) if per_channel else (1, 3, 4)), masked, False)


class Wrong:
    """chunk with one output or gradient multiplied by a factor. It counts its calls."""

    def __init__(self, name: str | None = None, factor: float = 1.0):
        self.name, self.factor, self.calls = name, factor, 0

    def __call__(self, *arrays, initial_state, mask=None, segments=None):
        self.calls += 1
        identities = [mx.custom_function(lambda x: mx.contiguous(x)) for _ in range(6)]
        for name, function in zip(trial_case.NAMES[2:], identities, strict=True):
            factor = self.factor if name == self.name else 1.0
            function.vjp(lambda primals, cotangent, output, factor=factor: cotangent * factor)
        *arrays, initial_state = (f(x) for f, x in zip(identities, (*arrays, initial_state), strict=True))
        y, state = gated_delta_chunk(*arrays, initial_state=initial_state, mask=mask, segments=segments)
        excess = {name: self.factor - 1 if name == self.name else 0.0 for name in ("y", "state")}
        return y + mx.stop_gradient(y * excess["y"]), state + mx.stop_gradient(state * excess["state"])


def use_as_fused(function, monkeypatch):
    """Use `function` in place of the fused kernels."""
    fused = lambda call: Candidate(function, call.shape_class(), function)  # noqa: E731
    monkeypatch.setitem(choice.OPERATOR.candidates, "fused", fused)


@pytest.mark.parametrize("name", trial_case.NAMES)
def test_one_wrong_result_is_enough_for_a_refusal(name, monkeypatch):
    use_as_fused(Wrong(name, 1.00002), monkeypatch)
    with pytest.warns(
        ImplementationWarning, match=rf"differs from chunk: {name} by 2.0e-05 .*2.0e-06 allowed.*goes on"
    ):
        assert choose(call()) == ("chunk", gated_delta_chunk)


def verdict_with_many_heads(change):
    """Return the verdict on chunk with `change` applied to y, for more heads than the reference computes."""

    def function(*arrays, initial_state, mask=None, segments=None):
        y, state = gated_delta_chunk(*arrays, initial_state=initial_state, mask=mask, segments=segments)
        return y + mx.stop_gradient(change(y + 0) - y), state

    return judged(trial_case.trial_case(ShapeClass(8, 16, 16, 16, "float32", masked=True)), function, "fused")


def test_heads_beyond_those_of_the_reference_are_compared_too():
    def last(y):
        y[-1, -1, -1, -1] += 1.0
        return y

    assert verdict_with_many_heads(lambda y: y).passed
    for change in (last, lambda y: mx.roll(y, 2, axis=2), lambda y: y[:, :, ::-1], lambda y: y[::-1]):
        outcome = verdict_with_many_heads(change)
        assert not outcome.passed
        assert max(outcome.errors["y"], outcome.errors["y of slow gates"]) > 0.01


def test_training_goes_on_after_one_warning(monkeypatch):
    wrong = Wrong("dv", 1.5)
    use_as_fused(wrong, monkeypatch)
    draw = np.random.default_rng(0)
    q = mx.array(draw.normal(size=(1, 9, 2, 8)).astype(np.float32))
    v = mx.array(draw.normal(size=(1, 9, 2, 6)).astype(np.float32))
    log_g, beta = -mx.ones((1, 9, 2)), mx.full((1, 9, 2), 0.5)

    def loss(implementation):
        return lambda v: (implementation(q, q, v, log_g, beta)[0] ** 2).sum()

    with pytest.warns(ImplementationWarning) as warned:
        gradients = [mx.grad(loss(gated_delta))(v) for _ in range(2)]
    assert len(warned) == 1
    assert wrong.calls == 1
    for gradient in gradients:
        assert mx.array_equal(gradient, mx.grad(loss(gated_delta_chunk))(v))


def test_a_kernel_that_does_not_compile_is_not_used(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise RuntimeError("[metal::Device] Unable to build metal library: 'foo' is no type")

    use_as_fused(broken, monkeypatch)
    with pytest.warns(ImplementationWarning, match="does not run: RuntimeError.*'foo' is no type"):
        assert choose(call())[0] == "chunk"
    assert not list(tmp_path.rglob("*.json"))


def test_refusal_of_metals_compiler_is_one_line_and_cached(monkeypatch, tmp_path):
    said = "program_source:12:3: warning: unused\nprogram_source:40:7: error: no 'simdgroup_bfloat8x8'\n  more\n"
    tried = []

    def refused(*_, **__):
        tried.append(1)
        raise RuntimeError(f"[metal::Device] Unable to build metal library from source\n{said}")

    use_as_fused(refused, monkeypatch)
    for _ in range(2):
        with pytest.warns(ImplementationWarning, match="compiler refuses it: program_source:40:7: error: no") as warned:
            assert choose(call())[0] == "chunk"
        (message,) = (str(each.message) for each in warned)
        assert "\n" not in message
        (log,) = tmp_path.rglob("*.log")
        assert f"(all that it says is in {log})" in message
        assert said in log.read_text()
        # The next process.
        verdicts.forget()
        monkeypatch.setattr(candidates, "_announced", set())
    assert len(tried) == 1


def test_a_verdict_is_stored_for_the_next_process(monkeypatch, tmp_path):
    wrong = Wrong("dbeta", 2.0)
    use_as_fused(wrong, monkeypatch)
    with pytest.warns(ImplementationWarning, match="dbeta by 1.0e\\+00"):
        choose(call())
    (file,) = tmp_path.rglob("*.json")
    stored = json.loads(file.read_text())
    assert stored["verdict"]["errors"]["dbeta"] == pytest.approx(1.0)
    assert all(stored["machine"][what] for what in ("mlx", "text", "device"))

    verdicts.forget()
    monkeypatch.setattr(candidates, "_announced", set())
    with pytest.warns(ImplementationWarning, match="dbeta by 1.0e\\+00"):
        assert choose(call())[0] == "chunk"
    assert wrong.calls == 1
    # On another machine, or with other kernels, the check runs again.
    verdicts.forget()
    changed = verdicts.machine() | {"text": "another"}
    monkeypatch.setattr(verdicts, "machine", lambda: changed)
    use_as_fused(Wrong(), monkeypatch)
    assert choose(call())[0] == "fused"


@pytest.mark.parametrize("file", ["kernels/gated_delta/scan.h", "kernels/cuda.h", "attention/fused.py"])
def test_a_verdict_is_of_one_text_of_the_kernels(file, tmp_path):
    operators = tmp_path / "operators"
    shutil.copytree(Path(verdicts.__file__).parents[1], operators)
    before = verdicts.digest_of_text(operators)
    assert before == verdicts.machine()["text"]
    changed = operators / file
    changed.write_text(changed.read_text() + "\n")
    assert verdicts.digest_of_text(operators) != before


@pytest.mark.parametrize("text", [b"", b"{", b'{"verdict": {"colour": 1}}', b"[]", b"\xff\xfe"])
def test_a_damaged_verdict_is_measured_again(text, monkeypatch, tmp_path):
    right = Wrong()
    use_as_fused(right, monkeypatch)
    choose(call())
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(text)
    verdicts.forget()
    assert choose(call())[0] == "fused"
    assert right.calls == 2
    assert json.loads(file.read_text())["verdict"]["implementation"] == "fused"


def test_a_cache_that_cannot_be_written_is_reported(monkeypatch, tmp_path, caplog):
    (tmp_path / "verdicts").write_text("in the way")
    use_as_fused(Wrong(), monkeypatch)
    assert choose(call())[0] == "fused"
    assert "a verdict cannot be stored" in caplog.text


def test_each_class_of_shapes_has_its_own_verdict(monkeypatch):
    right = Wrong()
    use_as_fused(right, monkeypatch)
    for each in (call(), call(), call(mx.bfloat16), call(masked=True), call(per_channel=True)):
        choose(each)
    assert right.calls == 4


def in_compile(loss, x):
    return mx.compile(loss)(x)


def in_compiled_grad(loss, x):
    return mx.compile(mx.value_and_grad(loss))(x)[0]


def in_vmap(loss, x):
    return mx.vmap(loss)(mx.stack([x, x]))[1]


def in_checkpoint(loss, x):
    return mx.value_and_grad(mx.checkpoint(loss))(x)[0]


@pytest.mark.parametrize("trace", [in_compile, in_compiled_grad, in_vmap, in_checkpoint])
def test_checks_while_something_else_is_traced(trace, monkeypatch):
    q, k, v = (mx.random.normal((1, 9, 2, size)) * 0.3 for size in (8, 8, 6))
    log_g, beta = -mx.ones((1, 9, 2)), mx.full((1, 9, 2), 0.5)
    state = mx.random.state[0] + 0

    def loss(q):
        return (gated_delta(q, k, v, log_g, beta)[0] ** 2).sum()

    wrong = Wrong("dq", 1.1)
    use_as_fused(wrong, monkeypatch)
    with pytest.warns(ImplementationWarning, match="dq by 1.0e-01"):
        value = trace(loss, q)
    assert wrong.calls == 1
    assert mx.array_equal(mx.random.state[0], state)
    expected = (gated_delta_chunk(q, k, v, log_g, beta)[0] ** 2).sum()
    assert mx.allclose(value, expected, rtol=1e-5)


def two_dtypes() -> Call:
    return replace(call(), v=mx.zeros((1, 3, 4, 6), mx.bfloat16))


def test_chunk_serves_calls_beyond_the_kernels(monkeypatch, caplog):
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    with caplog.at_level("INFO", logger=candidates.__name__):
        assert choose(two_dtypes())[0] == "chunk"
    assert (
        "fused does not support this call: q, k and v are mlx.core.float32, mlx.core.float32 and mlx.core.bfl"
        in caplog.text
    )


def test_forced_and_unsupported_is_an_error(monkeypatch):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "fused")
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    with pytest.raises(UserError, match="=fused cannot serve this call: q, k and v are"):
        choose(two_dtypes())


def test_forced_and_wrong_is_an_error(monkeypatch):
    use_as_fused(Wrong("dk", 1.2), monkeypatch)
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "fused")
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    with pytest.raises(UserError, match=r"=fused: fused .* differs from chunk: dk by 2.0e-01.*Unset it"):
        choose(call())


def test_kernels_that_read_beta_in_bf16_have_a_verdict_of_their_own(monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    q, gates = mx.zeros((1, 70, 2, 128), mx.bfloat16), mx.zeros((1, 70, 2))
    calls = [Call(q, q, q, gates, False, False, dtype) for dtype in (mx.float32, mx.bfloat16, mx.float16)]
    wide, small, other = (choice.OPERATOR.candidates["fused"](call).shape for call in calls)
    assert wide == other != small
    assert (wide.beta, small.beta) == ("float32", "bfloat16")
    assert str(small) == f"{wide}, beta in bfloat16"
    assert [Arguments.drawn(shape).primals[4].dtype for shape in (wide, small)] == [mx.float32, mx.bfloat16]


def test_a_verdict_is_of_the_default_device(monkeypatch):
    """A Mac's CPU and its GPU have one name."""
    found = []
    for device in ("cpu", "metal"):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        found.append(verdicts.path_of("native", call().shape_class()))
    assert found[0] != found[1]


def with_gates_rounded_to(dtype):
    """Return chunk with gates that are rounded, as MLX's own operator rounds them to the dtype of q."""

    def function(q, k, v, log_g, *arrays, **options):
        rounded = mx.exp(log_g).astype(dtype).astype(mx.float32)
        exact = mx.log(mx.maximum(rounded, 1e-30))
        return gated_delta_chunk(
            q, k, v, log_g + mx.stop_gradient(exact - mx.maximum(log_g, -69.0)), *arrays, **options
        )

    return function


@pytest.mark.parametrize(
    ("size", "dtype", "options"),
    [
        (16, "bfloat16", {}),
        (128, "bfloat16", {"segmented": True, "masked": True}),
        (128, "float16", {}),
        (16, "float16", {"per_channel": True}),
    ],
)
def test_slow_gates_that_are_rounded_are_refused(size, dtype, options):
    shape = ShapeClass(1, 1, size, size, dtype, **options)
    assert not judged(trial_case.trial_case(shape), with_gates_rounded_to(getattr(mx, dtype)), "native").passed
    assert judged(trial_case.trial_case(shape), with_gates_rounded_to(mx.float32), "native").passed


@pytest.mark.parametrize("options", [{}, {"segmented": True, "masked": True}, {"beta": ""}], ids=str)
def test_products_in_bf16_serve_bf16_where_no_kernel_does(options, monkeypatch):
    for orders in (OPERATOR.orders, LINEAR_ATTENTION.orders):
        monkeypatch.setitem(orders, backend.device(), ("chunk_bf16", "chunk"))
    shape = ShapeClass(1, 2, 32, 16, "bfloat16", **options)
    operator = OPERATOR if shape.erases else LINEAR_ATTENTION
    name, function = candidates.choose(operator, Call.of_class(shape))
    assert name == "chunk_bf16"
    results, wide = (
        candidate(*(mx.zeros_like(x) + 0.5 for x in Arguments.drawn(shape).primals[:-1]))[0]
        for candidate in (function, operator.candidates["chunk"](Call.of_class(shape)).function)
    )
    assert not mx.array_equal(results, wide)
    for other in (replace(shape, dtype="float32"), replace(shape, per_channel=True)):
        assert candidates.choose(operator, Call.of_class(other))[0] == "chunk"


def test_products_in_bf16_with_rounded_gates_are_refused(monkeypatch):
    """Their bounds are wider: three roundings for each of twelve products."""
    shape = ShapeClass(1, 1, 32, 32, "bfloat16", tiling=trial_case.IN_BF16)
    assert not judged(trial_case.trial_case(shape), with_gates_rounded_to(mx.bfloat16), "chunk_bf16").passed
    verdict = judged(trial_case.trial_case(shape), OPERATOR.candidates["chunk_bf16"](Call.of_class(shape)).function, "")
    assert verdict.passed
    assert max(verdict.errors.values()) > 2.0**-8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mlx_own_operator_has_gates_in_fp32(dtype):
    shape = ShapeClass(1, 2, 32, 32, dtype, segmented=True)
    assert judged(trial_case.trial_case(shape), gated_delta_native, "native").passed


def test_the_trial_draws_gates_of_every_kind():
    for shape in (
        ShapeClass(1, 1, 8, 8, "float32"),
        ShapeClass(1, 1, 8, 8, "float32", True, True),
    ):
        case = Arguments.drawn(shape)
        log_g, segments = np.array(case.primals[3]), case.constants["segments"]
        kept = 0 if segments is None else int((np.array(segments)[-1] == segments[-1, -1].item()).argmax())
        slow = log_g[-1, kept:]
        assert len(slow) >= 512
        assert set(np.unique(slow)) == {np.float32(-1e-3), np.float32(-1e-5)}
        for value in (-np.inf, np.float32(np.log(1e-12)), 0.0):
            assert (log_g[0] == value).sum() > 5


@pytest.mark.parametrize(
    ("rows", "tokens", "words", "timed"),
    [
        (3, 2048, "", (2, 518)),
        (1, 100, ", one row", (1, 518)),
        (1, 2049, ", more than 2,048 tokens, one row", (1, 4096)),
        (2, 9000, ", more than 8,192 tokens", (1, 8192)),
    ],
)
def test_lengths_and_single_rows_have_times_of_their_own(rows, tokens, words, timed, monkeypatch):
    q = mx.zeros((rows, tokens, 1, 8))
    long = Call(q, q, q, mx.zeros((rows, tokens, 1)), False, False)
    assert long.words == f"float32, 1/1 heads of 8 x 8{words}"
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    assert str(long.shape_class()) == "float32, 1/1 heads of 8 x 8"
    monkeypatch.setattr(backend, "device", lambda: "metal")
    y, *_ = OPERATOR.timed_case_of(long.shape_class()).like
    assert y.shape[:2] == timed
