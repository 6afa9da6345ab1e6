"""Many prompts are continued at once as mlx-lm continues each, whatever their lengths, in however few rows."""

import gc
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from deltatune.lora import convert_to_lora
from deltatune.models import batch_decoder
from deltatune.models.batch_decoder import BatchDecoder, chooser_of, is_covered
from deltatune.ops.decoding import attention_token, delta_token
from deltatune.options.config import LoraConfig
from deltatune.patches import patched
from deltatune.patches.tables import delta_layers
from families import VOCABULARY, weekly_but
from saved_adapters import moved

# One token; many more than the others; and the same twice.
LENGTHS = (3, 1, 40, 17, 5, 1)
TOKENS = 5


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(0)
    return [random.integers(1, VOCABULARY, length).tolist() for length in LENGTHS]


def small(tiny_model):
    return tiny_model("qwen3_5", num_hidden_layers=2, full_attention_interval=2)


def by_mlx_lm(model, prompt, tokens=TOKENS):
    cache, following, found = make_prompt_cache(model), mx.array([prompt]), []
    for _ in range(tokens):
        found.append(model(following, cache=cache)[0, -1].argmax().item())
        following = mx.array([found[-1:]])
    return found


def check_alike(model, prompts, rows=3):
    model.eval()
    expected = [by_mlx_lm(model, prompt) for prompt in prompts]
    with patched():
        assert BatchDecoder(model, rows, (), TOKENS).run(prompts) == expected
    return expected


@pytest.mark.parametrize("family", weekly_but(["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"], "olmo_hybrid"))
def test_tokens_are_those_of_mlx_lm(family, tiny_model, prompts):
    """Of these, olmo_hybrid's convolutions would keep the padding behind a prompt."""
    model = tiny_model(family)
    assert is_covered(model)
    check_alike(model, prompts)


def test_adapters_and_packed_weights_count(tiny_model, prompts):
    model = small(tiny_model)
    nn.quantize(model, 32, 4, class_predicate=lambda _, module: hasattr(module, "to_quantized"))
    convert_to_lora(model, LoraConfig(rank=2, scale=10.0), num_layers=-1)
    check_alike(moved(model, 0.5), prompts[:4])


def test_an_answer_ends_at_its_end_token_or_where_it_is_stopped(tiny_model, prompts):
    """The end token is no part of it, and the token at which it is stopped is; its row is free for the next prompt."""
    model = small(tiny_model).eval()
    expected = [by_mlx_lm(model, prompt, 8) for prompt in prompts]
    last = {tokens[3] for tokens in expected}
    ends = [next((at for at, token in enumerate(tokens) if token in last), 8) for tokens in expected]
    assert len(set(ends)) > 1
    with patched():
        ended = BatchDecoder(model, 2, last, 8).run(prompts)
        answers = BatchDecoder(model, 2, (), 8).answers(
            prompts, chooser_of(None), stops=lambda tokens: tokens[-1] in last
        )
    assert ended == [tokens[:end] for tokens, end in zip(expected, ends, strict=True)]
    assert [answer.tokens for answer in answers] == [t[: end + 1] for t, end in zip(expected, ends, strict=True)]
    assert [answer.ended for answer in answers] == [answer.tokens[-1] in last for answer in answers]


def test_an_answer_has_a_token_at_least(tiny_model):
    """As mlx-lm's answers do, where none is asked for."""
    with patched():
        assert [len(tokens) for tokens in BatchDecoder(small(tiny_model).eval(), 1, (), 0).run([[5]])] == [1]


def test_the_room_grows_with_the_longest_row(tiny_model, monkeypatch):
    monkeypatch.setattr(batch_decoder, "LEAST_ROOM", 4)
    model = small(tiny_model).eval()
    prompts = [[5, 6, 7], [8]]
    with patched():
        found = BatchDecoder(model, 2, (), 20).run(prompts)
    assert found == [by_mlx_lm(model, prompt, 20) for prompt in prompts]


def test_long_prompts_are_read_piece_by_piece(tiny_model, prompts, monkeypatch):
    monkeypatch.setattr(batch_decoder, "PROMPT_TOKENS", dict.fromkeys(("cpu", "cuda", "metal"), 16))
    check_alike(small(tiny_model), prompts)


def test_a_sampler_chooses_by_probabilities(tiny_model, prompts):
    seen = []

    def least(logprobs):
        seen.append(np.exp(np.array(logprobs)).sum(axis=-1))
        return logprobs.argmin(axis=-1)

    model = small(tiny_model).eval()
    with patched():
        (found,) = BatchDecoder(model, 1, (), 1).run(prompts[:1], least)
    assert found == [model(mx.array(prompts[:1]))[0, -1].argmin().item()]
    assert np.abs(np.concatenate(seen) - 1).max() < 1e-4


def test_kernels_serve_each_layer_of_the_step(tiny_model, prompts, monkeypatch):
    """Where a GPU would run kernels, their definitions run here."""
    calls = []

    def recurrent(layer, arrays):
        calls.append("delta")
        return delta_token.delta_token_naive(layer, arrays)

    def attended(q, keys, values, lengths, scale):
        calls.append("attention")
        return attention_token.attention_token_naive(q, keys, values, lengths, scale)

    monkeypatch.setattr("deltatune.patches.ON_CPU", delta_layers.PATCHES)
    monkeypatch.setattr(delta_token, "serves", lambda layer, arrays: True)
    monkeypatch.setattr(delta_token, "delta_token", recurrent)
    monkeypatch.setattr(attention_token, "serves", lambda *arrays: True)
    monkeypatch.setattr(attention_token, "attention_token", attended)
    model = small(tiny_model)
    check_alike(model, prompts)
    layers = ["delta" if layer.is_linear else "attention" for layer in model.layers]
    # The step is traced once, and calls them once a layer.
    assert calls == layers


def test_caches_are_freed_with_the_decoder(tiny_model, prompts):
    """At once, not when Python next looks for cycles: it may be gigabytes."""
    model = small(tiny_model).eval()
    with patched():
        decoder = BatchDecoder(model, 2, (), 2)
        decoder.run(prompts[:2])
    gone = weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        assert gone() is None
    finally:
        gc.enable()
