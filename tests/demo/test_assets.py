"""The bundled base model is a small real checkpoint with gated-delta layers and experts."""

import json

import mlx.core as mx
import mlx_lm
from safetensors import safe_open

from deltatune.demo.assets import MODEL
from deltatune.layers import describe
from deltatune.models.load import load


def test_all_shipped_data_is_under_6_mb():
    sizes = {path.name: path.stat().st_size for path in MODEL.parent.rglob("*") if path.is_file()}
    shipped = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert shipped <= sizes.keys()
    assert sum(sizes.values()) < 6_000_000


def test_the_weights_say_their_format():
    with safe_open(MODEL / "model.safetensors", "numpy") as file:
        assert file.metadata()["format"] == "mlx"
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118


def test_mlx_lm_and_deltatune_load_the_same_hybrid_model_with_experts():
    loaded = load(MODEL)
    theirs, tokenizer = mlx_lm.load(str(MODEL))[:2]
    layers = describe(loaded.model)
    assert [layer.kind for layer in layers] == ["delta", "delta", "delta", "attention"]
    assert all(layer.experts for layer in layers)
    tokens = mx.array([tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}])])
    assert mx.array_equal(loaded.model(tokens), theirs(tokens))


def test_the_tokenizer_fills_the_vocabulary_and_gives_texts_back():
    tokenizer = load(MODEL).tokenizer
    config = json.loads((MODEL / "config.json").read_text())
    assert len(tokenizer) == config["text_config"]["vocab_size"]
    text = 'Zoë\'s order: {"a":[1,2]} — 你好\n\ttwo  spaces'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
