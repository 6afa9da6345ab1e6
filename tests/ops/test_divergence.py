"""linear_divergence against the definition of each divergence in float64, and gradients against its differences."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from deltatune.ops.divergence import divergence, linear_divergence

TOKENS, D, E, V = 11, 16, 24, 96
CASES = [(0.0, 1.0), (0.0, 0.7), (1.0, 1.0), (1.0, 2.0), (0.5, 1.0), (0.1, 0.7), (0.9, 2.0)]


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def reference(logits, teacher_logits, beta, temperature):
    """Each token's divergence by its definition, in float64."""
    p, q = (np.exp(log_softmax(x / temperature)) for x in (logits, teacher_logits))
    if beta == 0:
        return (q * np.log(q / p)).sum(axis=-1)
    if beta == 1:
        return (p * np.log(p / q)).sum(axis=-1)
    m = beta * q + (1 - beta) * p
    return beta * (q * np.log(q / m)).sum(axis=-1) + (1 - beta) * (p * np.log(p / m)).sum(axis=-1)


@pytest.fixture
def arrays():
    drawn = np.random.default_rng(0)
    shapes = {"hidden": (TOKENS, D), "matrix": (V, D), "bias": (V,), "teacher": (TOKENS, E), "teacher_matrix": (V, E)}
    found = {name: drawn.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {"weights": (drawn.random(TOKENS) * (drawn.random(TOKENS) > 0.3)).astype(np.float32)}


def total(arrays, beta, temperature):
    """The weighted sum of the divergences, in float64."""
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    logits = arrays["hidden"] @ arrays["matrix"].T + arrays["bias"]
    losses = reference(logits, arrays["teacher"] @ arrays["teacher_matrix"].T, beta, temperature)
    return (losses * arrays["weights"]).sum()


def heads(arrays):
    head, teacher = nn.Linear(D, V), nn.Linear(E, V, bias=False)
    head.update({"weight": mx.array(arrays["matrix"]), "bias": mx.array(arrays["bias"])})
    teacher.update({"weight": mx.array(arrays["teacher_matrix"])})
    teacher.freeze()
    return head, teacher


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("beta", "temperature"), CASES)
def test_loss_and_gradients_are_those_of_the_definition(arrays, beta, temperature, training, frozen):
    head, teacher = heads(arrays)
    head.train(training)
    if frozen:
        head.freeze()

    def run(parameters, hidden, weights):
        head.update(parameters)
        side = teacher, mx.array(arrays["teacher"])[None]
        loss, weight = linear_divergence(
            head, hidden[None], side, weights[None], beta=beta, temperature=temperature, chunk_tokens=4
        )
        # A factor, since the forward pass computes the gradients before their cotangent is known.
        return 3.0 * loss, weight

    inputs = head.trainable_parameters(), mx.array(arrays["hidden"]), mx.array(arrays["weights"])
    (loss, weight), (d_head, d_hidden, d_weights) = mx.value_and_grad(run, (0, 1, 2))(*inputs)
    wanted = total(arrays, beta, temperature)
    assert loss.item() == pytest.approx(3 * wanted, rel=1e-5)
    assert weight.item() == pytest.approx(arrays["weights"].sum(), rel=1e-6)
    gradients = {"hidden": d_hidden, "weights": d_weights}
    gradients |= {} if frozen else {"matrix": d_head["weight"], "bias": d_head["bias"]}
    drawn = np.random.default_rng(1)
    for name, gradient in gradients.items():
        along = drawn.normal(size=gradient.shape)
        by_step = [
            total(
                {n: a.astype(np.float64) for n, a in arrays.items()} | {name: arrays[name] + e * along},
                beta,
                temperature,
            )
            for e in (1e-5, -1e-5)
        ]
        slope = 3 * (by_step[0] - by_step[1]) / 2e-5
        size = 3 * np.linalg.norm(np.array(gradient, np.float64)) * np.linalg.norm(along)
        assert (np.array(gradient, np.float64) * along).sum() == pytest.approx(slope, abs=1e-5 * size), name


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_far_logits_give_finite_losses_and_gradients(beta):
    logits = mx.array([[200.0, -200.0, 0.0]])
    teacher = mx.array([[-200.0, 200.0, 0.0]])
    loss, gradient = mx.value_and_grad(lambda x: divergence(x, teacher, beta, 0.5).sum())(logits)
    assert np.isfinite(np.array(gradient)).all()
    limits = {0.0: 800.0, 1.0: 800.0, 0.3: -0.3 * np.log(0.3) - 0.7 * np.log(0.7)}
    assert loss.item() == pytest.approx(limits[beta], rel=1e-6)


def test_the_logits_of_both_models_exist_a_chunk_at_a_time(arrays, monkeypatch):
    head, teacher = heads(arrays)
    rows = []
    plain = nn.Linear.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: rows.append(len(x)) or plain(self, x))
    side = teacher, mx.array(arrays["teacher"])
    linear_divergence(
        head, mx.array(arrays["hidden"]), side, mx.ones(TOKENS), beta=0.5, temperature=1.0, chunk_tokens=4
    )
    assert sorted(rows) == [3, 3, 4, 4, 4, 4]
