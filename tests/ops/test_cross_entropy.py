"""linear_cross_entropy against the loss of all logits at once, for every kind of head that a family has."""

from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

from deltatune.ops.cross_entropy import _chunks, _default_chunk, linear_cross_entropy, linear_token_losses

D, V = 64, 96


def adapted(adapter, base, **options):
    base.freeze()
    head = adapter.from_base(base, r=3, scale=2.0, **options)
    head.lora_b = mx.random.normal(head.lora_b.shape) * 0.1
    return head


def embedded(embedding):
    """An embedding and the name of the method that makes it a head."""
    return embedding, "as_linear"


HEADS = {
    "linear": lambda: (nn.Linear(D, V, bias=False), None),
    "bias": lambda: (nn.Linear(D, V), None),
    "frozen": lambda: (nn.Linear(D, V).freeze(), None),
    "tied": lambda: embedded(nn.Embedding(V, D)),
    "quantized": lambda: (nn.QuantizedLinear(D, V, bias=False, group_size=32, bits=4), None),
    "quantized tied": lambda: embedded(nn.QuantizedEmbedding(V, D, group_size=32, bits=4)),
    "lora": lambda: (adapted(LoRALinear, nn.Linear(D, V)), None),
    "qlora": lambda: (adapted(LoRALinear, nn.QuantizedLinear(D, V, group_size=32, bits=4)), None),
    "dora": lambda: (adapted(DoRALinear, nn.Linear(D, V)), None),
    "lora tied": lambda: embedded(adapted(LoRAEmbedding, nn.Embedding(V, D))),
    "dora tied": lambda: embedded(adapted(DoRAEmbedding, nn.Embedding(V, D))),
    "two layers": lambda: (nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D), nn.Linear(D, V)), None),
}


def batch(tokens=(2, 11), seed=0, dtype=mx.float32):
    mx.random.seed(seed)
    hidden = mx.random.normal((*tokens, D)).astype(dtype)
    targets = mx.random.randint(0, V, tokens)
    weights = mx.random.uniform(shape=tokens) * (mx.random.uniform(shape=tokens) > 0.3)
    return hidden, targets, weights


def reference_loss(head, hidden, targets, weights):
    logits = head(hidden).astype(mx.float32)
    return (nn.losses.cross_entropy(logits, targets) * weights).sum()


def gradients(loss, module, hidden, weights, transform=lambda f: f):
    """Loss and gradients for the trainable parameters, hidden and weights."""

    def run(parameters, hidden, weights):
        original = module.trainable_parameters()
        module.update(parameters)
        value = loss(hidden, weights)
        module.update(original)
        return value

    function = transform(mx.value_and_grad(run, argnums=(0, 1, 2)))
    value, grads = function(module.trainable_parameters(), hidden, weights)
    return dict(tree_flatten({"loss": value, "parameters": grads[0], "hidden": grads[1], "weights": grads[2]}))


def assert_agree(got, expected, tolerance=2e-6):
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        assert got[name].dtype == wanted.dtype, name
        scale = max(mx.abs(wanted).max().item(), 1e-6)
        assert mx.abs(got[name] - wanted).max().item() <= tolerance * scale, name


@pytest.fixture(params=[True, False], ids=["training", "evaluation"])
def module_and_head(request, name):
    mx.random.seed(5)
    module, method = HEADS[name]()
    return module.train(request.param), getattr(module, method) if method else module


@pytest.mark.parametrize("name", HEADS)
def test_every_head_has_the_loss_and_gradients_of_the_reference(name, module_and_head):
    (module, head), (hidden, targets, weights) = module_and_head, batch()
    expected = gradients(lambda h, w: reference_loss(head, h, targets, w), module, hidden, weights)
    if name not in ("frozen", "quantized", "quantized tied"):
        assert any(mx.abs(grad).max().item() > 1e-3 for path, grad in expected.items() if path.startswith("parameters"))
    for chunk, transform in ((4, lambda f: f), (None, lambda f: f), (9, mx.compile)):

        def ours(h, w, chunk=chunk):
            return linear_cross_entropy(head, h, targets, w, chunk_tokens=chunk)[0]

        assert_agree(gradients(ours, module, hidden, weights, transform), expected)
        # The value by itself, without a gradient.
        assert_agree({"loss": ours(hidden, weights)}, {"loss": expected["loss"]})


@pytest.mark.parametrize("name", HEADS)
def test_a_function_of_every_token_loss_has_the_gradients_of_the_reference(module_and_head):
    """The function is not linear, so the cotangents are known only after all losses are."""
    (module, head), (hidden, targets, weights) = module_and_head, batch()

    def curved(losses, w):
        return nn.log_sigmoid((losses * w).sum(axis=-1)).sum()

    def reference(h, w):
        return curved(nn.losses.cross_entropy(head(h).astype(mx.float32), targets), w)

    expected = gradients(reference, module, hidden, weights)
    for chunk, transform in ((4, lambda f: f), (9, mx.compile)):

        def ours(h, w, chunk=chunk):
            return curved(linear_token_losses(head, h, targets, chunk_tokens=chunk), w)

        assert_agree(gradients(ours, module, hidden, weights, transform), expected, 5e-6)


def test_the_second_run_of_a_head_that_trains_draws_the_same_dropout():
    mx.random.seed(3)
    head = adapted(LoRALinear, nn.Linear(D, V), dropout=0.5)
    hidden, targets, _ = batch()
    expected = None
    for function in (
        lambda h, w: (linear_token_losses(head, h, targets, chunk_tokens=22) ** 2).sum(),
        lambda h, w: (nn.losses.cross_entropy(head(h.reshape(-1, D)), targets.reshape(-1)) ** 2).sum(),
    ):
        mx.random.seed(8)
        # The chunk's size is given, so that neither function draws anything before the head runs.
        found = gradients(function, head, hidden, mx.zeros(1))
        expected, previous = found, expected
    assert_agree(previous, expected, 5e-6)


def test_matches_float64():
    hidden, targets, weights = batch((40,))
    head = nn.Linear(D, V)
    got = gradients(lambda h, w: linear_cross_entropy(head, h, targets, w, chunk_tokens=7)[0], head, hidden, weights)
    h, W, b, w = (np.array(array).astype(np.float64) for array in (hidden, head.weight, head.bias, weights))
    t = np.array(targets)
    logits = h @ W.T + b
    largest = logits.max(-1, keepdims=True)
    lse = (largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True)))[:, 0]
    losses = lse - logits[np.arange(40), t]
    d_logits = (np.exp(logits - lse[:, None]) - np.eye(V)[t]) * w[:, None]
    expected = {
        "loss": (losses * w).sum(),
        "parameters.weight": d_logits.T @ h,
        "parameters.bias": d_logits.sum(0),
        "hidden": d_logits @ W,
        "weights": losses,
    }
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        assert np.abs(np.array(got[name]) - wanted).max() <= 1e-6 * np.abs(wanted).max(), name


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.mix = nn.Linear(D, D)

    def __call__(self, tokens):
        return nn.tanh(self.mix(self.embed(tokens)))


@pytest.mark.parametrize("transform", [lambda f: f, mx.compile, mx.checkpoint], ids=["eager", "compiled", "checkpoint"])
def test_a_tied_embedding_gets_both_contributions_under_value_and_grad(transform):
    mx.random.seed(2)
    model = Tied()
    tokens = mx.random.randint(0, V, (2, 9))
    weights = mx.ones((2, 9))

    def loss():
        return linear_cross_entropy(model.embed.as_linear, model(tokens), tokens, weights, chunk_tokens=5)[0]

    def reference():
        return reference_loss(model.embed.as_linear, model(tokens), tokens, weights)

    value, expected = nn.value_and_grad(model, reference)()
    if transform is mx.checkpoint:
        step = nn.value_and_grad(model, nn.utils.checkpoint(model, loss))
    elif transform is mx.compile:
        step = mx.compile(nn.value_and_grad(model, loss), inputs=model.state, outputs=model.state)
    else:
        step = nn.value_and_grad(model, loss)
    got, grads = step()
    assert_agree({"": got}, {"": value})
    assert_agree(dict(tree_flatten(grads)), dict(tree_flatten(expected)))
    head_only = nn.value_and_grad(
        model, lambda: reference_loss(model.embed.as_linear, mx.stop_gradient(model(tokens)), tokens, weights)
    )()[1]
    assert mx.abs(head_only["embed"]["weight"] - expected["embed"]["weight"]).max().item() > 1e-3


@pytest.mark.parametrize("training", [True, False])
def test_no_weight_gives_zeros_and_ignored_targets_may_be_negative(training):
    head = nn.Linear(D, V)
    head.train(training)
    hidden, targets, weights = batch((13,))

    def run(targets, weights):
        return gradients(
            lambda h, w: linear_cross_entropy(head, h, targets, w, chunk_tokens=4)[0], head, hidden, weights
        )

    nothing = run(targets, mx.zeros((13,)))
    for name in ("loss", "hidden", "parameters.weight", "parameters.bias"):
        assert mx.array_equal(nothing[name], mx.zeros_like(nothing[name])), name
    assert linear_cross_entropy(head, hidden, targets, mx.zeros((13,)))[1].item() == 0.0
    counted = weights > 0
    assert 0 < counted.sum().item() < 13
    ignored = run(mx.where(counted, targets, -100), weights)
    assert_agree(
        {k: v for k, v in ignored.items() if k != "weights"},
        {k: v for k, v in run(targets, weights).items() if k != "weights"},
        0.0,
    )


class Counting(nn.Linear):
    calls = 0

    def __call__(self, x):
        type(self).calls += 1
        return super().__call__(x)


def test_the_head_runs_once_a_chunk_and_an_evaluation_does_no_gradient_work():
    head = Counting(D, V)
    hidden, targets, weights = batch((20,))
    loss = lambda h: linear_cross_entropy(head, h, targets, weights, chunk_tokens=5)[0]  # noqa: E731
    for training, differentiate, calls in ((True, True, 4), (False, False, 4), (False, True, 8)):
        head.train(training)
        Counting.calls = 0
        mx.eval(mx.grad(loss)(hidden) if differentiate else loss(hidden))
        assert Counting.calls == calls


@pytest.mark.any_blas
def test_memory_is_one_chunk_and_a_frozen_head_gets_no_gradient(peak_bytes):
    vocabulary, tokens, width, chunk = 8192, 512, 32, 32
    one = chunk * vocabulary * 4
    head = adapted(LoRALinear, nn.Linear(width, vocabulary, bias=False))
    hidden = mx.random.normal((tokens, width))
    targets = mx.random.randint(0, vocabulary, (tokens,))
    mx.eval(head.parameters(), hidden, targets)

    def peak(step):
        return peak_bytes(lambda: step(hidden)) / one

    def loss(h):
        return linear_cross_entropy(head, h, targets, mx.ones((tokens,)), chunk_tokens=chunk)[0]

    # One chunk is alive at a time, as each waits for the one before. A value needs the logits of base and adapter; a
    # gradient needs the probabilities, their gradient and a mask of the targets (a quarter) as well.
    value, gradient = 2.5, 4.5
    assert peak(nn.value_and_grad(head, loss)) < gradient
    assert peak(mx.compile(nn.value_and_grad(head, loss))) < gradient
    head.eval()
    assert peak(loss) < value
    assert peak(mx.grad(loss)) < gradient
    # Neither waits for the other here, since a gradient by itself would have to wait for a value that it does not need.
    assert peak(nn.value_and_grad(head, loss)) < value + gradient
    assert peak(lambda h: reference_loss(head, h, targets, mx.ones((tokens,)))) > 16


def test_dropout_in_the_head_is_the_same_for_loss_and_gradient():
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(D, V))
    hidden, targets, weights = batch((12,))
    mx.random.seed(9)
    expected = gradients(lambda h, w: reference_loss(head, h, targets, w), head, hidden, weights)
    mx.random.seed(9)
    ours = lambda h, w: linear_cross_entropy(head, h, targets, w, chunk_tokens=12)[0]  # noqa: E731
    assert_agree(gradients(ours, head, hidden, weights), expected)
    dropped = mx.abs(expected["hidden"]).max(axis=0)
    assert (expected["hidden"] == 0).any().item()
    assert dropped.min().item() > 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_keeps_the_log_sum_exp_in_fp32(dtype):
    head = nn.Linear(D, V)
    head.set_dtype(dtype)
    hidden, targets, weights = batch((50,), dtype=dtype)
    logits = np.array(head(hidden).astype(mx.float32)).astype(np.float64)
    expected = (np.log(np.exp(logits).sum(-1)) - logits[np.arange(50), np.array(targets)]) @ np.array(weights)
    for training in (True, False):
        head.train(training)
        got = gradients(lambda h, w: linear_cross_entropy(head, h, targets, w)[0], head, hidden, weights)
        assert got["loss"].item() == pytest.approx(expected, rel=1e-6)
        assert got["hidden"].dtype == got["parameters.weight"].dtype == dtype


@pytest.mark.parametrize("training", [True, False])
def test_a_second_derivative_is_refused(training):
    head = nn.Linear(D, V)
    head.train(training)
    hidden, targets, weights = batch((6,))
    slope = mx.grad(lambda h: linear_cross_entropy(head, h, targets, weights)[0])
    with pytest.raises(ValueError, match="second derivative"):
        mx.grad(lambda h: (slope(h) ** 2).sum())(hidden)


def test_chunks_are_even_and_bounded():
    for tokens, size, ends in ((1000, 300, [250, 500, 750, 1000]), (7, 3, [3, 6, 7]), (5, 100, [5])):
        chunks = _chunks(mx.zeros((tokens, 1)), size)
        assert [(chunk.start, chunk.stop) for chunk in chunks] == list(pairwise([0, *ends]))
    assert _default_chunk(nn.Embedding(1 << 21, 1).as_linear, mx.zeros((1, 1))) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((lambda h: h, mx.zeros((3, D)), mx.zeros((3,), mx.int32), mx.ones((3,))), "must be a module"),
        ((nn.Linear(D, V), mx.zeros((3, D)), mx.zeros((4,), mx.int32), mx.ones((3,))), "targets must be"),
        ((nn.Linear(D, V), mx.zeros((3, D)), mx.zeros((3,)), mx.ones((3,))), "must be integers"),
        ((nn.Linear(D, V), mx.zeros((3, D)), mx.zeros((3,), mx.int32), mx.ones((3, 1))), "weights must be"),
        ((nn.Linear(D, V), mx.zeros((0, D)), mx.zeros((0,), mx.int32), mx.ones((0,))), "with a token in it"),
    ],
)
def test_misuse_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*arguments)
