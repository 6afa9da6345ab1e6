"""Adapters for one token of each row: the factors that a GPU casts are kept, and never used where they are others."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear as UpstreamLoRALinear

from deltatune.lora import LoRALinear, linear
from deltatune.machine import backend
from deltatune.ops.tracing import trace
from deltatune.patches import patched
from deltatune.patches.whole_rows import whole_rows

INPUTS, OUTPUTS, RANK, SCALE = 48, 40, 4, 1.5
# A few roundings of bf16 against the same in fp32.
BOUND = 2.0**-6


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Adapters cast their factors as on a GPU; bf16 is computed by the CPU."""
    monkeypatch.setattr(backend, "device", lambda: "cuda")


@pytest.fixture
def casts(monkeypatch):
    """A list that grows by the lora_a of each adapter with factors that are cast and kept."""
    made: list[mx.array] = []
    cast = linear._cast

    def counted(a, *others):
        made.append(a)
        return cast(a, *others)

    monkeypatch.setattr(linear, "_cast", counted)
    return made


def adapted(dtype: mx.Dtype = mx.bfloat16, dropout: float = 0.0) -> LoRALinear:
    mx.random.seed(0)
    base = nn.Linear(INPUTS, OUTPUTS, bias=True)
    base.update(tree_map(lambda x: x.astype(dtype), base.parameters()))
    layer = LoRALinear.from_base(base, rank=RANK, scale=SCALE, dropout=dropout)
    layer.lora_b = mx.random.normal((RANK, OUTPUTS))
    return layer.eval()


def tokens(seed: int = 0, dtype: mx.Dtype = mx.bfloat16, length: int = 1) -> mx.array:
    return mx.random.normal((3, length, INPUTS), key=mx.random.key(seed)).astype(dtype)


def wanted(layer: LoRALinear, x: mx.array) -> mx.array:
    x, weight, bias = (array.astype(mx.float32) for array in (x, layer.linear.weight, layer.linear.bias))
    return x @ weight.T + bias + SCALE * (x @ layer.lora_a) @ layer.lora_b


def assert_right(layer: LoRALinear, x: mx.array) -> None:
    expected = wanted(layer, x)
    assert mx.abs(layer(x).astype(mx.float32) - expected).max() <= BOUND * mx.abs(expected).max()


def test_factors_are_cast_once_for_many_tokens(on_a_gpu, casts):
    layer, other = adapted(), adapted()
    for seed in range(4):
        assert_right(layer, tokens(seed))
        assert_right(other, tokens(seed))
    assert [id(a) for a in casts] == [id(layer.lora_a), id(other.lora_a)]


@pytest.mark.parametrize("name", ["lora_a", "lora_b"])
def test_another_array_is_cast_anew(on_a_gpu, name):
    layer = adapted()
    layer(tokens())
    layer[name] = mx.random.normal(layer[name].shape)
    assert_right(layer, tokens())


def test_another_dtype_is_cast_anew(on_a_gpu):
    layer = adapted()
    layer(tokens())
    layer.linear = adapted(mx.float16).linear
    y = layer(tokens(dtype=mx.float16))
    assert y.dtype == mx.float16
    assert_right(layer, tokens(dtype=mx.float16))


def test_numbers_that_changed_in_place_count_from_the_next_prompt_on(on_a_gpu):
    layer = adapted()
    layer(tokens())
    layer.lora_b *= -2.0
    assert_right(layer, tokens(length=5))
    assert_right(layer, tokens())


def test_cast_factors_go_with_the_adapter(on_a_gpu):
    layer = adapted()
    with trace.having(piece=None):
        known = trace.current().known
        layer(tokens())
        assert len(known) == 1
        layer.update({"lora_a": layer.lora_a + 1.0})
        assert len(known) == 0


def loss(layer: LoRALinear, x: mx.array) -> mx.array:
    return (layer(x).astype(mx.float32) ** 2).sum()


def gradients(layer: LoRALinear, x: mx.array) -> dict[str, mx.array]:
    layer.unfreeze_adapter()
    return nn.value_and_grad(layer, loss)(layer, x)[1]


@pytest.mark.parametrize("answered_before", [False, True])
def test_a_gradient_is_taken_of_one_token_without_patches(on_a_gpu, answered_before):
    """Nothing says then that a gradient is taken."""
    layer, x = adapted(), tokens()
    if answered_before:
        layer(x)
    with trace.having(piece=None):
        found = gradients(layer, x)
        assert len(trace.current().known) == 0
    with whole_rows():
        expected = gradients(adapted(), x)
    for name in ("lora_a", "lora_b"):
        assert mx.abs(expected[name]).max() > 0
        assert mx.allclose(found[name], expected[name], rtol=2e-2, atol=2e-2 * mx.abs(expected[name]).max())
    assert_right(layer, x)


def test_factors_that_a_compiled_function_is_given_are_not_kept(on_a_gpu):
    layer, x = adapted(), tokens()
    compiled = mx.compile(lambda x: layer(x), inputs=[layer.state])
    compiled(x)
    layer.update({"lora_b": layer.lora_b * 3.0})
    expected = wanted(layer, x)
    assert mx.abs(compiled(x).astype(mx.float32) - expected).max() <= BOUND * mx.abs(expected).max()
    assert_right(layer, x)


def test_factors_that_a_compiled_function_holds_serve_outside_it_too(on_a_gpu):
    layer, x = adapted(), tokens()
    compiled = mx.compile(lambda x: layer(x))
    assert mx.array_equal(compiled(x), layer(x))
    assert_right(layer, x)


def test_dropout_in_training_is_drawn(on_a_gpu):
    layer, x = adapted(dropout=0.5), tokens()
    kept = layer(x)
    layer.train()
    assert not mx.array_equal(layer(x), kept)
    layer.eval()
    assert mx.array_equal(layer(x), kept)


def test_whole_rows_of_one_token_keep_nothing(on_a_gpu, casts):
    with whole_rows():
        assert_right(adapted(), tokens())
    assert not casts


def test_a_cpu_multiplies_16_bits_in_fp32(casts):
    assert_right(adapted(), tokens())
    assert not casts


def test_fp32_needs_no_cast(on_a_gpu, casts):
    layer, x = adapted(mx.float32), tokens(dtype=mx.float32)
    assert mx.allclose(layer(x), wanted(layer, x), atol=1e-5)
    assert not casts


def answer(model: nn.Module, prompt: mx.array) -> list[list[int]]:
    cache, y, found = make_prompt_cache(model), prompt, []
    for _ in range(8):
        y = model(y, cache=cache)[:, -1:].argmax(axis=-1)
        found.append(y.tolist())
    return found


def with_adapters_of(kind: type[nn.Module], model: nn.Module) -> nn.Module:
    """The model with adapters of drawn numbers on all linear layers but the head."""
    layers = []
    for seed, (path, module) in enumerate(model.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in path:
            layer = kind.from_base(module, RANK, scale=SCALE)
            layer.lora_a = 0.2 * mx.random.normal(layer.lora_a.shape, key=mx.random.key(2 * seed))
            layer.lora_b = 0.2 * mx.random.normal(layer.lora_b.shape, key=mx.random.key(2 * seed + 1))
            layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))
    return model.eval()


@pytest.mark.parametrize("kind", [LoRALinear, UpstreamLoRALinear])
def test_an_answer_under_the_patches_is_mlx_lms(tiny_model, kind):
    prompt = mx.random.randint(0, 300, (3, 9), key=mx.random.key(0))
    expected = answer(with_adapters_of(UpstreamLoRALinear, tiny_model("qwen3_5")), prompt)
    model = with_adapters_of(kind, tiny_model("qwen3_5"))
    with patched():
        assert answer(model, prompt) == expected
    assert len(set(map(str, expected))) > 1
