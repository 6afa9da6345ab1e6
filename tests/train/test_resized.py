"""Runs with --resize-embeddings: rows for new tokens train, are saved, resumed, merged and generated with."""

import json

import mlx.core as mx
import mlx_lm.utils
import pytest

from deltatune.lora.new_rows import grown_tables
from deltatune.models.adapted_base import load as load_with_adapter
from deltatune.models.load import load, load_model
from deltatune.options.config import TrainConfig
from deltatune.plan import fit
from deltatune.plan.search import Largest
from last_place import assert_same, largest_move
from new_tokens import TOKENS, with_new_tokens, write_data

# The ids of TOKENS are 320 and 321.
PROMPT = mx.array([[5, 320, 9, 321, 7]])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("new") / "data")


@pytest.fixture
def train(run, data, tmp_path):
    """train(model, name, *flags, iters=4) -> the folder of a run that succeeded."""

    def call(model, name, *flags, iters=4):
        options = ["--model", model, "--data", data, "--batch-size", 2, "--iters", iters, "--max-seq-length", 64]
        options += ["--learning-rate", 1e-2, "--lr-schedule", "constant", "--warmup", 0, "--resize-embeddings"]
        code, out, error = run("train", *options, "--adapter-path", tmp_path / name, *flags)
        assert code == 0, error
        call.said = out
        return tmp_path / name

    return call


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        pytest.param("qwen3_5", None, marks=pytest.mark.any_blas),
        pytest.param("kimi_linear", {}, marks=pytest.mark.weekly),
        ("olmo_hybrid", {}),
    ],
)
def test_a_run_from_start_to_merge(run, train, data, tiny_checkpoint, tmp_path, family, quantize):
    path = with_new_tokens(tiny_checkpoint(family, quantize=quantize), tmp_path / "model")
    folder = train(path, "out")
    saved = mx.load(str(folder / "adapters.safetensors"))
    rows = {name: value for name, value in saved.items() if "new_rows" in name}
    tables = ["embed_tokens", "lm_head"] if family != "qwen3_5" else ["embed_tokens"]
    assert sorted(name.split(".")[-3] for name in rows) == tables
    # Both rows start at one mean, and each has moved away from it in its own direction.
    assert all(mx.abs(value[0] - value[1]).max() > 1e-3 for value in rows.values())
    assert "New rows: 2 in " in train.said

    ours = load_with_adapter(path, str(folder)).model
    old = dict(load_model(path)[0].named_modules())
    assert all(mx.array_equal(table.base.weight, old[name].weight) for name, table in grown_tables(ours).items())
    flags = ["--model", path, "--adapter-path", folder]
    code, _, error = run("eval", "--data", data, "--batch-size", 2, *flags)
    assert code == 0, error
    assert run("generate", "--prompt", f"a {TOKENS[0]} b", "--max-tokens", 2, *flags)[0] == 0

    for options in ([], ["--dequantize"]):
        merged = tmp_path / f"merged{len(options)}"
        assert run("merge", *flags, "--save-path", merged, *options)[0] == 0
        theirs, config = mlx_lm.utils.load_model(merged)
        assert config.get("text_config", config)["vocab_size"] == 322
        logits = theirs(PROMPT)
        assert logits.shape[-1] == 322
        if quantize is None or options:
            # A merged weight is rounded once more, which alone moves a mixture's logits by 5e-4.
            most = 1e-5 + 2 * largest_move(theirs, lambda theirs=theirs: theirs(PROMPT))
            assert_same(ours(PROMPT), theirs, lambda theirs=theirs: theirs(PROMPT), most)
        assert run("generate", "--model", merged, "--prompt", TOKENS[0], "--max-tokens", 2)[0] == 0
    # Without the merge mlx-lm would read beyond the table, so it must stop at loading.
    with pytest.raises(ValueError, match="new_rows: not an adapter parameter"):
        mlx_lm.utils.load(str(path), adapter_path=str(folder))


@pytest.mark.parametrize("kind", ["lora", pytest.param("from-scratch", marks=pytest.mark.weekly)])
def test_a_resumed_run_ends_with_the_same_bits(train, tiny_checkpoint, tmp_path, kind):
    path = with_new_tokens(tiny_checkpoint("olmo_hybrid"), tmp_path / "model")
    flags = ["--from-scratch"] if kind == "from-scratch" else ["--fine-tune-type", kind]
    straight, parted = train(path, "straight", *flags), train(path, "parted", *flags, iters=2)
    train(path, "parted", *flags, "--resume")
    name = "adapters.safetensors" if kind == "lora" else "model.safetensors"
    first, second = (mx.load(str(folder / name)) for folder in (straight, parted))
    assert first.keys() == second.keys()
    assert all(mx.array_equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(
    ("family", "flags"), [("qwen3_5", ["--fine-tune-type", "full"]), ("olmo_hybrid", ["--from-scratch"])]
)
def test_a_whole_checkpoint_has_one_table(train, tiny_checkpoint, tmp_path, family, flags):
    base = tiny_checkpoint(family)
    path = with_new_tokens(base, tmp_path / "model")
    folder = train(path, "out", *flags)
    model, config = mlx_lm.utils.load_model(folder)
    assert config.get("text_config", config)["vocab_size"] == 322
    assert model(PROMPT).shape[-1] == 322
    stored, before = (mx.load(str(place / "model.safetensors")) for place in (folder, base))
    assert stored.keys() == before.keys()
    name = next(name for name in stored if "embed_tokens" in name)
    assert mx.array_equal(stored[name][:320], before[name]) == (flags != ["--from-scratch"])
    assert mx.abs(stored[name][320] - stored[name][321]).max() > 1e-3
    assert load(folder).tokenizer.convert_tokens_to_ids(TOKENS) == [320, 321]


def test_without_new_tokens_it_says_that_nothing_was_added(run, tiny_checkpoint, tmp_path):
    data = write_data(tmp_path / "data", new=False)
    options = ["--model", tiny_checkpoint("qwen3"), "--data", data, "--batch-size", 2, "--iters", 1]
    code, out, _ = run("train", *options, "--adapter-path", tmp_path / "out", "--resize-embeddings")
    assert code == 0
    assert "resize_embeddings: the embedding has a trained row for every token" in " ".join(out.split())


def test_the_plan_counts_the_new_rows(tiny_checkpoint, tmp_path, data, monkeypatch):
    monkeypatch.setattr(fit, "largest", lambda *_, **__: Largest(0, False))
    path = with_new_tokens(tiny_checkpoint("olmo_hybrid"), tmp_path / "model")

    def planned(**more):
        options = {"model": str(path), "batch_size": 2, "max_seq_length": 64, "num_layers": 1}
        return fit.examine(TrainConfig(**options | more)).forecast

    plain = planned(data=str(write_data(tmp_path / "plain", new=False)))
    grown = planned(data=str(data), resize_embeddings=True)
    # Two tables get two rows of 64 fp32 numbers each, and Adam keeps two moments of every number.
    rows = 2 * 2 * 64 * 4
    for name, times in (("parameters", 1), ("gradients", 1), ("moments", 2)):
        assert grown.sizes[name] - plain.sizes[name] == times * rows


def test_images(run, tiny_vision_checkpoint, tmp_path):
    """A vision model's rows train on images, and its merge is loaded by mlx-vlm with the new tokens in it."""
    from mlx_vlm.utils import load_model as load_upstream
    from PIL import Image

    path = with_new_tokens(tiny_vision_checkpoint("qwen3_5"), tmp_path / "model")
    (tmp_path / "data").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "data" / "a.png")
    turns = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "<call> b </call>"}]
    for split in ("train", "valid", "test"):
        line = json.dumps({"messages": turns, "images": ["a.png"]}) + "\n"
        (tmp_path / "data" / f"{split}.jsonl").write_text(2 * line)
    flags = ["--model", path, "--data", tmp_path / "data", "--batch-size", 2]
    more = ["--iters", 2, "--resize-embeddings", "--learning-rate", 1e-2, "--steps-per-eval", 2]
    code, _, error = run("train", *flags, *more, "--adapter-path", tmp_path / "out")
    assert code == 0, error
    adapter = ["--adapter-path", tmp_path / "out"]
    assert run("eval", *flags, *adapter)[0] == 0
    pictured = ["--prompt", "a <call>", "--image", tmp_path / "data" / "a.png", "--max-tokens", 2]
    assert run("generate", "--model", path, *adapter, *pictured)[0] == 0
    code, _, error = run("merge", "--model", path, *adapter, "--save-path", tmp_path / "merged")
    assert code == 0, error
    rows = load_upstream(tmp_path / "merged").language_model.model.embed_tokens.weight.shape[0]
    assert rows == load_upstream(path).language_model.model.embed_tokens.weight.shape[0] + 2
    assert run("eval", "--model", tmp_path / "merged", *flags[2:])[0] == 0
