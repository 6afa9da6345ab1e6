"""Layers that run on pieces of a row give the loss and the gradients of whole rows, within float rounding."""

from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from deltatune.machine import backend
from deltatune.ops import checkpoint, layer_cut, pieces
from deltatune.ops.attention import attention
from deltatune.ops.layer_cut import ROWS, TOKENS, LayerCut
from deltatune.ops.pieces import Carry
from deltatune.ops.segments import MaskRule, remember
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import whole_rows
from deltatune.train.batch_loss import Arrays, mean_loss_and_gradients
from deltatune.train.setup import prepare, training
from model_gradients import relative_errors, rounding_bound

B, T = 2, 136
# Pieces within a chunk of gated delta, of whole chunks, of one token, and of whole rows.
CUTS = [LayerCut(TOKENS, bounds) for bounds in ((0, 100, T), (0, 64, 128, T), (0, 1, 70, T - 1, T))]
CUTS.append(LayerCut(ROWS, (0, 1, B)))


@contextmanager
def cut(how, monkeypatch):
    """Batches of T tokens run in the pieces of `how`; yields a list that grows with each layer's call."""
    calls = []
    run = pieces.in_pieces

    def counted(*arguments, **options):
        calls.append(arguments[4])
        return run(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "layer_cut", lambda x: how if x.shape[1] == T else None)
        patch.setattr(pieces, "in_pieces", counted)
        yield calls


def made(tiny_model, family, tune="lora", bits=0, dropout=0.0, pack=False, **options):
    model = tiny_model(family, **options)
    if bits:
        nn.quantize(model, 32, bits)
    lora = LoraConfig(rank=4, scale=2.0, dropout=dropout)
    config = TrainConfig(grad_checkpoint=True, lora_parameters=lora, fine_tune_type=tune, pack=pack)
    prepare(model, config)
    # Adapters start with B = 0, so that A would have no gradient.
    drawn = tree_map_with_path(
        lambda path, x: mx.random.normal(x.shape) * 0.1 if path.endswith("lora_b") else x, model.trainable_parameters()
    )
    model.update(drawn)
    mx.eval(model.parameters())
    return model, config


def batch(packed=False):
    rows = mx.array(np.random.default_rng(0).integers(0, 300, (B, T + 1)).astype(np.int32))
    owners = None
    if packed:
        # Documents begin where pieces begin, within pieces, and have one token.
        lengths = ([64, 50, 22], [10, 90, 1, 35])
        owners = mx.array(np.stack([np.repeat(np.arange(len(n)), n) for n in lengths]).astype(np.int32))
    return Arrays(rows[:, :-1], rows[:, 1:], mx.ones((B, T)), owners)


def found(model, config, arrays, how, monkeypatch):
    with cut(how, monkeypatch) as calls, training(model, config, compare=False) as trained:
        model.train()
        mx.random.seed(3)
        loss, _, gradients = mean_loss_and_gradients(model, trained.loss, arrays)
        mx.eval(loss, gradients)
    return loss.item(), dict(tree_flatten(gradients)), calls


def bound_of(model, config, arrays, expected, monkeypatch):
    """How far gradients in pieces may be from those of whole rows."""
    return rounding_bound(model, lambda: found(model, config, arrays, None, monkeypatch)[1], expected)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5", {}),
        ("qwen3_5", {"tune": "dora"}),
        # The bound of these is not nearer with another BLAS's kernels than that of the others.
        pytest.param("qwen3_5", {"bits": 4}, marks=pytest.mark.any_blas),
        pytest.param("qwen3_next", {"tune": "full"}, marks=pytest.mark.any_blas),
        # What qwen3_next shows of gated delta layers, experts and all weights, these show one by one.
        pytest.param("qwen3_5", {"tune": "full"}, marks=[pytest.mark.any_blas, pytest.mark.weekly]),
        pytest.param("qwen3_5_moe", {}, marks=[pytest.mark.any_blas, pytest.mark.weekly]),
        ("kimi_linear", {}),
        ("olmo_hybrid", {}),
        ("bailing", {}),
    ],
)
def test_gradients_are_those_of_whole_rows(family, options, tiny_model, monkeypatch):
    model, config = made(tiny_model, family, **options)
    loss, expected, calls = found(model, config, batch(), None, monkeypatch)
    assert not calls
    bound = bound_of(model, config, batch(), expected, monkeypatch)
    # What a family's layers carry shows at pieces of one token, and where one family's rows are cut shows in any.
    for how in CUTS if (family, options) == ("qwen3_5", {}) else CUTS[2:3]:
        value, gradients, calls = found(model, config, batch(), how, monkeypatch)
        assert value == pytest.approx(loss, rel=bound)
        assert calls
        assert relative_errors(expected, gradients)[0] < bound, how


def test_packed_documents_start_anew_in_pieces(tiny_model, monkeypatch):
    model, config = made(tiny_model, "qwen3_5", pack=True)
    loss, expected, _ = found(model, config, batch(packed=True), None, monkeypatch)
    bound = bound_of(model, config, batch(packed=True), expected, monkeypatch)
    for how in CUTS:
        value, gradients, calls = found(model, config, batch(packed=True), how, monkeypatch)
        assert len(calls) == 4
        assert value == pytest.approx(loss, rel=bound)
        assert relative_errors(expected, gradients)[0] < bound, how
    # The bound tells documents that start anew from documents that do not.
    for module, name, defect in (
        (pieces, "_restarted", lambda states, *_: list(states)),
        (whole_rows, "attention", lambda *arrays, segments=None, **options: attention(*arrays, **options)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, defect)
            _, gradients, _ = found(model, config, batch(packed=True), CUTS[1], monkeypatch)
        assert relative_errors(expected, gradients)[0] > 10 * bound, name


def test_dropout_draws_the_same_numbers_in_both_passes(tiny_model, monkeypatch):
    """The directional derivative of the loss is that of the gradients, for the masks of one seed."""
    model, config = made(tiny_model, "qwen3_5", dropout=0.3)
    names = [name for name, _ in tree_flatten(model.trainable_parameters()) if name.endswith("lora_b")]
    _, gradients, _ = found(model, config, batch(), CUTS[1], monkeypatch)
    start = dict(tree_flatten(model.trainable_parameters()))
    direction = {name: gradients[name] / mx.linalg.norm(gradients[name]) for name in names}
    slope = sum((gradients[name] * direction[name]).sum().item() for name in names)
    losses = []
    for step in (1e-4, -1e-4):
        model.load_weights([(name, start[name] + step * direction[name]) for name in names], strict=False)
        losses.append(found(model, config, batch(), CUTS[1], monkeypatch)[0] / (B * T))
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(slope, rel=2e-2)
    whole = found(model, config, batch(), None, monkeypatch)[0] / (B * T)
    assert abs(whole - losses[1]) > 1e-4, "dropout of 0.3 drops something, and whole rows draw other numbers"


def test_an_nvidia_gpu_with_more_memory_has_larger_pieces(monkeypatch):
    for device, smallest in layer_cut.PIECE_BYTES.items():
        largest = 10_000 * smallest // 2048 if device == "cuda" else smallest
        for memory, size in ((0, smallest), (smallest, smallest), (10_000 * smallest, largest)):
            monkeypatch.setattr(backend, "device", lambda device=device: device)
            monkeypatch.setattr(backend, "gpu_memory", lambda memory=memory: memory)
            assert layer_cut.piece_bytes() == size
            tokens = size // (4 * 64)
            assert len(layer_cut.layer_cut(mx.zeros((1, 3 * tokens, 64))).spans()) == 3


def test_long_rows_are_cut_across_the_batch():
    tokens = layer_cut.piece_bytes() // (4 * 64)
    for length in (1, tokens, 2 * tokens - 1):
        assert layer_cut.layer_cut(mx.zeros((1, length, 64))) is None
    for batch in (1, 3):
        found = layer_cut.layer_cut(mx.zeros((batch, 2 * tokens + 5, 64)))
        assert found.axis == TOKENS
        assert found.bounds[0] == 0
        assert found.bounds[-1] == 2 * tokens + 5
        assert all(0 < b - a <= tokens + 128 for a, b, _ in found.spans())
        assert all(a % 128 == 0 for a, _, _ in found.spans())
    assert len(layer_cut.layer_cut(mx.zeros((4, 100 * tokens, 64))).spans()) == layer_cut.MOST_PIECES


@pytest.mark.parametrize(
    ("rows", "pieces_in_row", "bounds"),
    [
        (8, 0.124, None),
        (1, 1.99, None),
        (2, 0.99, None),
        (2, 1, (0, 1, 2)),
        (3, 1.9, (0, 1, 2, 3)),
        (32, 0.1024, (0, 11, 22, 32)),
        (100, 1, (*range(0, 100, 4), 100)),
    ],
)
def test_short_rows_are_cut_between_them(rows, pieces_in_row, bounds, monkeypatch):
    tokens = int(pieces_in_row * layer_cut.piece_bytes()) // (4 * 64)
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    assert layer_cut.layer_cut(mx.zeros((rows, tokens, 64))) == (bounds and LayerCut(ROWS, bounds))


def test_pieces_of_rows_are_larger_on_an_nvidia_gpu(monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(backend, "gpu_memory", lambda: 0)
    row = mx.zeros((1, layer_cut.piece_bytes() // (4 * 64), 64))
    rows = [mx.broadcast_to(row, (count, *row.shape[1:])) for count in (3, 4, 7)]
    assert [layer_cut.layer_cut(x) for x in rows] == [None, LayerCut(ROWS, (0, 2, 4)), LayerCut(ROWS, (0, 3, 6, 7))]


def ruled(window):
    """A mask of a packed batch."""
    return remember(mx.ones((1, 1, 4, 4), mx.bool_), MaskRule(window, mx.zeros((1, 4), mx.int32)))


@pytest.mark.parametrize(
    ("carry", "options", "fits"),
    [
        (Carry(2), {}, True),
        (Carry(2), {"mask": mx.ones((1, 4))}, False),
        (Carry(2), {"mask": "causal"}, False),
        (Carry(1), {"offset": 0}, True),
        (Carry(1), {"offset": 3}, False),
        (Carry(2, attends=True), {"cache": (None, None), "attn_mask": "causal", "mamba_mask": None}, True),
        (Carry(attends=True), {"mask": "causal", "cache": None}, True),
        (Carry(attends=True), {}, False),
        (Carry(attends=True), {"mask": mx.ones((4, 4))}, False),
        (Carry(attends=True), {"mask": "causal", "positions": mx.arange(4)}, False),
        (None, {}, False),
        (Carry(attends=True), {"mask": ruled(None)}, True),
        (Carry(attends=True), {"mask": ruled(3)}, False),
        (Carry(attends=True, packed=False), {"mask": ruled(None)}, False),
    ],
)
def test_only_calls_that_a_piece_can_be_given_are_divided(carry, options, fits):
    x = mx.zeros((1, 4, 8))
    assert (pieces.divisible(carry, [("x", x), *options.items()])[0] is x) == fits


def test_a_layer_that_keeps_nothing_is_refused():
    layer = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="Linear cannot run on pieces of a row"):
        pieces.in_pieces(lambda x, cache: layer(x), layer, Carry(2), mx.zeros((1, 4, 8)), LayerCut(TOKENS, (0, 2, 4)))


def test_a_trainable_layer_can_be_compiled_in_pieces(tiny_model, monkeypatch):
    model, config = made(tiny_model, "qwen3_5")
    _, expected, _ = found(model, config, batch(), CUTS[0], monkeypatch)
    bound = bound_of(model, config, batch(), expected, monkeypatch)
    with cut(CUTS[0], monkeypatch), training(model, config, compare=False) as trained:
        model.train()

        def step(tokens, targets):
            arrays = Arrays(tokens, targets, mx.ones((B, T)))
            return mean_loss_and_gradients(model, trained.loss, arrays)[2]

        arrays = batch()[:2]
        compiled = mx.compile(step, inputs=[model.state])
        once, twice = (dict(tree_flatten(compiled(*arrays))) for _ in range(2))
    assert all(mx.array_equal(once[name], twice[name]) for name in once)
    assert relative_errors(expected, once)[0] < bound


def test_a_state_is_handed_on_without_the_rows_that_it_is_cut_from():
    before, x = mx.get_active_memory(), mx.ones((1, 4096, 16))
    handed = pieces.States([x[:, -3:]]).handed
    mx.eval(handed)
    del x
    assert mx.get_active_memory() - before < 1024
