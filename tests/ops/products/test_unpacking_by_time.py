"""On Metal, whether a quantised matrix is unpacked for many rows goes by time; the times are made here."""

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.ops.operator import candidates, rankings, timing, verdicts
from deltatune.ops.operator.case import judged
from deltatune.ops.operator.timing import TrialTime
from deltatune.ops.products import choice, quantized_product
from deltatune.ops.products.choice import PackedProduct, unpacking_is_faster
from deltatune.ops.products.quantized_product import Quantization
from deltatune.patches import patched
from deltatune.patches.tables import products as patch

QUANTIZATION = Quantization(True, 32, 4, "affine")


@pytest.fixture
def milliseconds(monkeypatch, tmp_path):
    """The time of each product on a pretended Mac, for which 64 rows are many; and how often each was timed."""
    made, timed = {"packed": 3.0, "unpacked": 2.0}, []

    def side_by_side(runs):
        for name, run in runs.items():
            mx.eval(run())
            timed.append(name)
        return {name: TrialTime(made[name] / 1e3, same_bits=True) for name in runs}

    monkeypatch.delenv("DELTATUNE_QUANTIZED_PRODUCT", raising=False)
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(backend, "device", lambda: "metal")
    monkeypatch.setattr(timing, "side_by_side", side_by_side)
    monkeypatch.setattr(choice, "_FEWEST", 64)
    monkeypatch.setattr(choice, "_MOST", 64)
    monkeypatch.setattr(candidates, "_announced", set())
    verdicts.forget()
    yield made, timed
    verdicts.forget()


def matrix(outputs: int = 80, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    return list(mx.quantize(mx.random.normal((outputs, 96), key=mx.random.key(1)).astype(dtype), 32, 4))


def rows(number: int) -> mx.array:
    return mx.random.normal((number, 96), key=mx.random.key(2))


def test_the_faster_product_serves_and_a_run_keeps_it(milliseconds):
    made, timed = milliseconds
    w = matrix()[0]
    with rankings.of_run() as run:
        assert unpacking_is_faster(rows(70), w, QUANTIZATION)
        key = "quantized_product, float32, 64 rows or more, 64 x 64 in 4 bits (affine)"
        assert run.names == {key: ["unpacked", "packed"]}
        assert run.reasons[key] == "automatic on metal; packed 3.0 ms, unpacked 2.0 ms"
    assert sorted(timed) == ["packed", "unpacked"]
    # A gain under a tenth is not worth the memory of the unpacked matrix.
    made["unpacked"] = 2.9
    verdicts.forget()
    assert unpacking_is_faster(rows(70), w, QUANTIZATION)  # The shortest time of both starts.
    assert not unpacking_is_faster(rows(70), w, QUANTIZATION._replace(bits=8, group_size=64))
    with rankings.of_run() as run:
        run.continue_with({key: ["packed", "unpacked"]})
        assert not unpacking_is_faster(rows(70), w, QUANTIZATION)


def test_few_rows_and_matrices_over_a_slab_are_mlx_own(milliseconds, monkeypatch):
    _, timed = milliseconds
    w = matrix()[0]
    assert not unpacking_is_faster(rows(63), w, QUANTIZATION)
    assert not unpacking_is_faster(rows(70), matrix(48)[0], QUANTIZATION)
    assert not unpacking_is_faster(rows(70), w, QUANTIZATION._replace(transpose=False))
    assert not unpacking_is_faster(rows(70).astype(mx.int32), w, QUANTIZATION)
    monkeypatch.setitem(quantized_product.SLAB_BYTES, "metal", 4 * 80 * 96 - 1)
    assert not unpacking_is_faster(rows(70), w, QUANTIZATION)
    assert not timed


@pytest.mark.parametrize("faster", ["packed", "unpacked"])
def test_a_product_of_many_rows_is_unpacked_where_that_is_faster(milliseconds, faster, monkeypatch):
    made, _ = milliseconds
    made[faster] = 1.0
    x, arrays, calls = rows(70), matrix(), []

    def counted(*given):
        calls.append(given[0].shape)
        return quantized_product.packed_product(*given)

    expected = mx.quantized_matmul(x, *arrays, group_size=32, bits=4)
    monkeypatch.setattr(patch, "packed_product", counted)
    with patched():
        calls.clear()
        found = mx.quantized_matmul(x, *arrays, group_size=32, bits=4)
    assert mx.allclose(found, expected, rtol=1e-5, atol=1e-4)
    assert calls == ([(70, 96)] if faster == "unpacked" else [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", [QUANTIZATION, Quantization(True, 32, 4, "mxfp4")], ids=lambda mode: mode.mode)
def test_unpacking_passes_its_trial_and_a_wrong_product_does_not(milliseconds, dtype, mode):
    shape = PackedProduct(64, 64, 64, dtype, mode)
    function = choice.OPERATOR.candidates["unpacked"](shape).function
    assert judged(choice.trial_case(shape), function, "unpacked").passed
    assert not judged(choice.trial_case(shape), lambda *given: function(*given) * 1.01, "unpacked").passed
