"""Moments in 8 bits: the codes, the step, the saved state, and a plan's count."""

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten

from deltatune.ops.pointwise.stored_moments import BLOCK, dequantized, quantized, values
from deltatune.options.config import TrainConfig
from deltatune.train.updates import optimizer
from deltatune.train.updates.optimizer import OPTIMIZERS, Adam8bit, AdamW8bit, apply, build_optimizer

KINDS = {"adam8bit": mlx.optimizers.Adam, "adamw8bit": mlx.optimizers.AdamW}


def defined(signed):
    """The values as the paper describes them: per decade, the middles of equal intervals, and 0 and 1 besides."""
    found = {0.0, 1.0}
    for zeros in range(7):
        count = 2 ** (6 - zeros + (not signed))
        middles = 0.1 + 0.9 * (np.arange(count) + 0.5) / count
        found |= {sign * middle * 10.0**-zeros for middle in middles for sign in ((1, -1) if signed else (1,))}
    return np.sort(np.array(list(found)))


@pytest.mark.parametrize("signed", [True, False])
def test_the_values_are_those_of_dynamic_quantisation(signed):
    np.testing.assert_allclose(np.sort(np.array(values(signed))), defined(signed), rtol=1e-6)
    assert mx.array_equal(quantized(values(signed), signed)[0], mx.arange(256))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(1,), (7, 255), (3, 4, 128)])
def test_every_number_is_within_half_an_interval_of_its_value(signed, shape):
    draw = np.random.default_rng(0)
    x = (draw.standard_normal(shape) * 10.0 ** draw.uniform(-9, 3, shape)).astype(np.float32)
    x = x if signed else np.abs(x)
    codes, scales = quantized(mx.array(x), signed)
    got = np.array(dequantized(codes, scales, signed), np.float64)
    assert (codes.dtype, codes.shape, scales.shape) == (mx.uint8, shape, (-(-x.size // BLOCK),))
    for start in range(0, x.size, BLOCK):
        block, stored = x.reshape(-1)[start : start + BLOCK].astype(np.float64), got.reshape(-1)[start : start + BLOCK]
        share, error = np.abs(block) / np.abs(block).max(), np.abs(stored - block) / np.abs(block).max()
        decade = np.clip(np.ceil(-np.log10(share)), 1, 7)
        half = 0.45 * 10.0 ** (1 - decade) / 2.0 ** (7 - decade + (0 if signed else 1))
        # Below a tenth of a decade's end, the interval of the decade above may be used; the smallest decade ends at 0.
        allowed = np.where(share > 1e-6, half * 1.02, 1e-6)
        assert (error <= allowed + 1e-7).all(), (error / allowed).max()
    if not signed:
        assert (got[x > 0] > 0).all()
    assert not np.array(dequantized(*quantized(mx.zeros(300), signed), signed)).any()


def parameters(dtype=mx.float32, seed=0):
    draw = np.random.default_rng(seed)
    made = {"small": mx.array(draw.standard_normal(40)), "large": mx.array(draw.standard_normal((70, 90)))}
    return {name: array.astype(dtype) for name, array in made.items()}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("piece", [None, 4 * BLOCK])
def test_a_step_is_mlxs_on_the_stored_moments(name, piece, monkeypatch):
    """Each step takes the moments that the codes stand for, and stores the results of MLX's step."""
    if piece:
        monkeypatch.setattr(optimizer, "PIECE", piece)
    ours, theirs = OPTIMIZERS[name](0.05, bias_correction=True), KINDS[name](0.05, bias_correction=True)
    moving = parameters()
    ours.init(moving)
    theirs.init(moving)
    assert [ours.state["large"][key].dtype for key in ("m", "v")] == [mx.uint8] * 2
    assert ours.state["small"].keys() == theirs.state["small"].keys()
    for step in range(3):
        gradients = parameters(seed=step + 1)
        state = ours.state["large"]
        theirs.state["large"] = {key: dequantized(state[key], state[f"{key}_scale"], key == "m") for key in ("m", "v")}
        expected = theirs.apply_gradients(gradients, moving)
        moving, _ = apply(ours, moving, gradients, mx.array(True), None)
        for key, value in expected.items():
            np.testing.assert_allclose(moving[key], value, rtol=0, atol=1e-6, err_msg=key)
        for key in ("m", "v"):
            codes, scales = quantized(theirs.state["large"][key], key == "m")
            assert mx.array_equal(ours.state["large"][key], codes)
            assert mx.array_equal(ours.state["large"][f"{key}_scale"], scales)
    before = {path: np.array(leaf) for path, leaf in tree_flatten([moving, ours.state])}
    after, _ = apply(ours, moving, gradients, mx.array(False), None)
    for path, leaf in tree_flatten([after, ours.state]):
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


def test_half_precision_keeps_its_dtype_and_computes_in_fp32():
    optimizer, moving = AdamW8bit(0.05), parameters(mx.bfloat16)
    optimizer.init(moving)
    updated, _ = apply(optimizer, moving, parameters(mx.bfloat16, 1), mx.array(True), None)
    assert {leaf.dtype for leaf in updated.values()} == {mx.bfloat16}
    assert optimizer.state["large"]["m_scale"].dtype == mx.float32


def test_it_learns_as_adam_does():
    """A least-squares problem: after 60 steps the losses of 8 and 32 bits are within a twentieth of the start's."""
    draw = np.random.default_rng(3)
    x, target = mx.array(draw.standard_normal((128, 80))), mx.array(draw.standard_normal((80, 64)))
    x, target = x.astype(mx.float32), target.astype(mx.float32)

    def loss(w):
        return ((x @ (w - target)) ** 2).mean()

    ends = []
    for kind in (mlx.optimizers.Adam, Adam8bit):
        optimizer, w = kind(0.05), {"w": mx.zeros((80, 64))}
        for _ in range(60):
            w = optimizer.apply_gradients({"w": mx.grad(loss)(w["w"])}, w)
            mx.eval(w, optimizer.state)
        ends.append(loss(w["w"]).item())
    start = loss(mx.zeros((80, 64))).item()
    assert abs(ends[1] - ends[0]) < 0.05 * start
    assert ends[1] < 0.3 * start


def test_settings_are_those_of_mlx():
    built = build_optimizer(
        TrainConfig(optimizer="adamw8bit", optimizer_config={"adamw8bit": {"weight_decay": 0.5, "betas": [0.8, 0.9]}})
    )
    assert (type(built), built.weight_decay, built.betas) == (AdamW8bit, 0.5, [0.8, 0.9])


def test_a_run_resumes_with_the_same_bits(make_trainer, tmp_path):
    options = {"optimizer": "adamw8bit", "optimizer_config": {}, "fine_tune_type": "full", "val_batches": 0}
    make_trainer(adapter_path=str(tmp_path / "straight"), iters=4, **options).run()
    make_trainer(iters=3, **options).run()
    trainer = make_trainer(iters=4, resume=True, **options)
    trainer.run()
    ends = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "straight")]
    assert ends[0] == ends[1]
    codes = [leaf for _, leaf in tree_flatten(trainer._optimizer.state) if leaf.dtype == mx.uint8]
    assert sum(leaf.size for leaf in codes) > 30_000
