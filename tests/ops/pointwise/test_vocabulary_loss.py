"""The kernels of the vocabulary's cross-entropy against float64, on the host machine or a GPU; and when they serve."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from host_machine import HostMachine, plant
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from deltatune.machine import backend
from deltatune.ops.cross_entropy import linear_cross_entropy, linear_token_losses
from deltatune.ops.kernels.launch import Launch, header, on
from deltatune.ops.operator import kernel_operator
from deltatune.ops.operator.case import judged
from deltatune.ops.pointwise import vocabulary_loss
from deltatune.ops.pointwise.vocabulary_loss import FILES, exact_losses, split_at_targets, vocabulary_losses
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.graph import all_nodes, read
from pretended import pretended
from two_dtypes import in_two_dtypes

DTYPES = [mx.float32, mx.bfloat16, mx.float16]
# Half a last place of the dtype; and fp32's, twice, of exponents of 2 down to -126, which is as much of the result.
ROUNDING = {mx.float32: 0.0, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
FP32 = 2.0**-16
# One lane's batch of four pieces of eight takes rows of more than 12,288 logits; of single ones, more than 1,536.
SIZES = [1, 8, 12, 512, 1000, 1537, 4096, 12_304, 16_384, 50_257]


def draw(rows, vocabulary, dtype, spread=4.0):
    keys = mx.random.split(mx.random.key(vocabulary), 3)
    logits = (spread * mx.random.normal((rows, vocabulary), key=keys[0])).astype(dtype)
    cotangents = mx.random.normal((rows,), key=keys[1])
    return logits, mx.random.randint(0, vocabulary, (rows,), key=keys[2]), cotangents


def check(logits, targets, cotangents, execute):
    """Compare losses and gradients with float64: each within a few roundings of itself, where it is a normal number."""
    with on(execute):
        (losses,), (gradients,) = mx.vjp(lambda x: vocabulary_losses(x, targets), [logits], [cotangents])
    assert (losses.dtype, gradients.dtype) == (mx.float32, logits.dtype)
    expected, *exact = exact_losses(logits, targets, cotangents)
    np.testing.assert_allclose(np.array(losses), expected, rtol=FP32, atol=FP32)
    found = [np.array(part.astype(mx.float32)) for part in split_at_targets(gradients, targets)]
    smallest, relative = 2.0**-24 if logits.dtype == mx.float16 else 1e-36, FP32 + ROUNDING[logits.dtype]
    # A target's gradient is the difference of a probability from 1, and has the probability's error.
    np.testing.assert_allclose(found[0], exact[0], rtol=relative, atol=smallest + 2.0**-21)
    np.testing.assert_allclose(found[1], exact[1], rtol=relative, atol=smallest)
    return losses, gradients


@pytest.mark.parametrize(("vocabulary", "dtype"), in_two_dtypes(SIZES))
def test_losses_and_gradients_against_float64(dtype, vocabulary, execute):
    # Eight rows or more, so that no array is so small that Metal keeps it elsewhere.
    check(*draw(9, vocabulary, dtype), execute)


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows(rows, execute):
    check(*draw(rows, 40, mx.bfloat16), execute)


@pytest.mark.parametrize("vocabulary", [1000, 1001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hard_rows(dtype, vocabulary, execute):
    """Large logits, equal ones, and columns of -infinity: whole lanes, whole groups, and all but the target."""
    logits, targets, cotangents = (np.array(x) for x in draw(9, vocabulary, mx.float32))
    logits[0] = 1e4 + logits[0]
    logits[1] = -1e4 * np.abs(logits[1] / 4)
    logits[2] = 3.0
    logits[3] = 0.0
    logits[4, :900] = -np.inf
    logits[5] = -np.inf
    logits[6, ::2] = -np.inf
    logits[7] += 1e4 * (np.arange(vocabulary) == targets[7])
    targets[4], targets[6] = 950, 7
    logits[5, targets[5]] = 2.5
    losses, gradients = check(mx.array(logits).astype(dtype), mx.array(targets), mx.array(cotangents), execute)
    assert losses[5] == losses[7] == 0
    assert mx.array_equal(gradients[5], mx.zeros(vocabulary, dtype))


def test_a_target_of_minus_infinity_costs_infinitely_much(execute):
    logits = mx.array([[0.0, -mx.inf, 0.0, 0.0, -mx.inf, -mx.inf, -mx.inf, -mx.inf]] * 2)
    targets = mx.array([1, 2])
    (losses,), (gradients,) = mx.vjp(lambda x: vocabulary_losses(x, targets), [logits], [mx.array([1.0, 3.0])])
    assert losses.tolist() == [mx.inf, pytest.approx(np.log(3))]
    np.testing.assert_allclose(gradients[0], np.array([1, -3, 1, 1, 0, 0, 0, 0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradients[1], [1, 0, -2, 1, 0, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [1000, 1001])
@pytest.mark.parametrize("bad", [mx.nan, mx.inf])
def test_nan_and_infinity_make_their_own_row_nan(bad, vocabulary, execute):
    logits, targets, cotangents = draw(9, vocabulary, mx.float32)
    for row, column in ((0, 0), (1, vocabulary - 1), (2, int(targets[2])), (3, 513)):
        logits[row, column] = bad
    logits[4] = bad
    (losses,), (gradients,) = mx.vjp(lambda x: vocabulary_losses(x, targets), [logits], [cotangents])
    assert mx.isnan(losses).tolist() == [True] * 5 + [False] * 4
    assert mx.isnan(gradients).all(axis=1).tolist() == [True] * 5 + [False] * 4
    assert not mx.isnan(gradients[5:]).any()


def test_other_strides_and_the_order_of_lanes_change_no_bit(execute):
    logits, targets, _ = draw(9, 1000, mx.bfloat16)
    turned = mx.contiguous(logits.T).T
    spread = mx.broadcast_to(mx.array(0.5), (9,))
    found = []
    runs = [execute, *([] if execute is Launch.run else [partial(execute, seed=seed) for seed in (2, 3)])]
    for x, d in ((logits, mx.full((9,), 0.5)), (turned, spread)):
        for run in runs:
            with on(run):
                (losses,), (gradients,) = mx.vjp(lambda x: vocabulary_losses(x, targets), [x], [d])
            found.append((losses, gradients))
    for losses, gradients in found[1:]:
        assert mx.array_equal(losses, found[0][0])
        assert mx.array_equal(gradients, found[0][1])


@pytest.mark.skipif(backend.device() == "cuda", reason="a GPU does not watch its lanes")
def test_nothing_races_and_a_missing_barrier_is_seen(host_folder):
    text, last = header("metal", FILES), "  if (at.index != 0) return;"
    check(*draw(2, 600, mx.float32), HostMachine(host_folder, text, watch=True).run)
    machine = HostMachine(host_folder, plant(text, f"  barrier();\n{last}", last), watch=True)
    with pytest.raises(AssertionError, match="no barrier between them"):
        check(*draw(2, 600, mx.float32), machine.run)


@pytest.mark.parametrize("wrong", ["vocabulary_losses", "vocabulary_gradients"])
def test_the_trial_sees_small_gradients_in_bf16(wrong, execute):
    """Probabilities that are a tenth too large are refused, though a target's gradient of 1 is right."""

    def run(launch):
        results = execute(launch)
        if launch.name == wrong == "vocabulary_gradients":
            targets = launch.inputs["targets"][:, None]
            is_target = mx.arange(results[0].shape[1])[None] == targets
            return [mx.where(is_target, results[0], 1.1 * results[0])]
        return [*results[:2], results[2] / 1.1] if launch.name == wrong else results

    assert judged(vocabulary_loss.trial_case(mx.bfloat16), execute, "kernel").passed
    assert not judged(vocabulary_loss.trial_case(mx.bfloat16), run, "kernel").passed


@pytest.fixture
def launches(monkeypatch, pretend_gpu, execute):
    """The names of the launches, which the host machine runs while the device passes for an NVIDIA GPU."""
    is_right = kernel_operator.is_right
    monkeypatch.setattr(vocabulary_loss, "LEAST", 0)
    names = pretend_gpu(execute, lambda *kind, **_: is_right(*kind, run=execute))
    with on(None):
        yield names


D, V, TOKENS = 24, 103, 13
HEADS = {
    "frozen": lambda: nn.Linear(D, V).freeze(),
    "trained": lambda: nn.Linear(D, V),
    "lora": lambda: LoRALinear.from_base(nn.Linear(D, V).freeze(), r=3),
}


def loss_and_gradients(head, tokens, factor):
    """By name, the loss times `factor`, and its gradients for head, hidden and weights."""
    keys = mx.random.split(mx.random.key(5), 3)
    hidden, targets = mx.random.normal((tokens, D), key=keys[0]), mx.random.randint(0, V, (tokens,), key=keys[1])
    weights = mx.random.uniform(shape=(tokens,), key=keys[2]) * (mx.arange(tokens) % 3 > 0)

    def loss(parameters, hidden, weights):
        head.update(parameters)
        total, _ = linear_cross_entropy(head, hidden, targets, weights, chunk_tokens=5)
        return factor * total + (linear_token_losses(head, hidden, targets, chunk_tokens=5) ** 2).sum()

    parameters = head.trainable_parameters()
    value, gradients = mx.value_and_grad(loss, argnums=(0, 1, 2))(parameters, hidden, weights)
    head.update(parameters)
    flat = dict(tree_flatten([value, *gradients]))
    mx.eval(flat)
    return flat


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", HEADS)
def test_linear_cross_entropy_is_the_same_with_the_kernels(name, training, request):
    mx.random.seed(1)
    head = HEADS[name]().train(training)
    if name == "lora":
        head.lora_b = mx.random.normal(head.lora_b.shape) * 0.1
    # A factor, so that the cotangents are not 1.
    expected = loss_and_gradients(head, TOKENS, 0.7)
    launches = request.getfixturevalue("launches")
    found = loss_and_gradients(head, TOKENS, 0.7)
    assert {"vocabulary_losses", "vocabulary_gradients"} == set(launches)
    # Three chunks of each of the two losses.
    assert launches.count("vocabulary_gradients") == 6
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        largest = mx.abs(array).max()
        # Sums of 103 terms in fp32, and those over 13 tokens.
        assert mx.abs(found[path] - array).max() <= 2.0**-18 * largest, path


@pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
def test_a_plan_for_an_nvidia_gpu_has_no_fp32_logits():
    rows, vocabulary = 80, 1024
    head = nn.Linear(16, vocabulary).freeze()
    head.set_dtype(mx.bfloat16)
    hidden, layout = mx.zeros((rows, 16), mx.bfloat16), ArrayLayout.measured()

    def wide_logits():
        """The fp32 arrays of the logits' size in the graph of a loss and its gradient."""

        def loss(hidden):
            return linear_cross_entropy(head, hidden, mx.zeros((rows,), mx.int32), mx.ones((rows,)))[0]

        value, gradient = mx.value_and_grad(loss)(hidden)
        nodes = all_nodes(read(layout, [value, gradient], set()))
        return [node for node in nodes if node.shape == (rows, vocabulary) and node.item_size == 4]

    assert wide_logits()
    with pretended("cuda"):
        assert not wide_logits()
    kernel_operator.forget()
