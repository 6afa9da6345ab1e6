"""A model that was trained as a whole is written as its base is: all its tensors, its names, its other files."""

import gc
import json

import mlx.core as mx
import pytest

from deltatune.errors import UserError
from deltatune.layers import logits_of
from deltatune.lora import convert_to_lora
from deltatune.lora.tensor_files import read_header
from deltatune.models.adapted_base import load as load_with_adapter
from deltatune.models.checkpoint_files import is_trained_checkpoint
from deltatune.models.checkpoint_writer import TrainedCheckpoint, merge_checkpoint
from deltatune.models.load import Loaded, load, load_model, load_vision_tower
from deltatune.models.vocabulary import resize_embeddings
from deltatune.options.config import LoraConfig
from new_tokens import with_new_tokens
from saved_adapters import moved
from transformers_saves import write_as_transformers

TOKENS = mx.array([[5, 6, 7, 8, 9]])


def difference(model, other):
    return mx.abs(logits_of(model, TOKENS) - logits_of(other, TOKENS)).max().item()


def trained(model, parts=("language",)):
    """Make the model train as a whole, and change its parameters."""
    convert_to_lora(model, LoraConfig(), fine_tune_type="full", num_layers=2, parts=parts)
    return moved(model)


def contents(folder):
    """{tensor: (type, shape, bytes)} of a checkpoint in one file."""
    content = (folder / "model.safetensors").read_bytes()
    tensors = read_header(folder / "model.safetensors").tensors.items()
    return {name: (t.dtype, t.shape, content[t.start : t.start + t.size]) for name, t in tensors}


@pytest.fixture(scope="module")
def base(tiny_vision_checkpoint, tmp_path_factory):
    """A Qwen3.5-MoE as transformers saves it: a tensor for each expert, a vision tower, an MTP layer."""
    return write_as_transformers(tiny_vision_checkpoint("qwen3_5_moe"), tmp_path_factory.mktemp("saved") / "base")


@pytest.mark.parametrize("single_experts", [True, False])
def test_the_base_keeps_its_layout_and_all_its_tensors(tiny_vision_checkpoint, tmp_path, single_experts):
    original = tiny_vision_checkpoint("qwen3_5_moe")
    base = write_as_transformers(original, tmp_path / "base", single_experts=single_experts)
    (base / "metrics.jsonl").write_text("of an earlier run")
    model = trained(load_model(base)[0])
    checkpoint, out = TrainedCheckpoint(model, base), tmp_path / "out"
    assert checkpoint.note is None
    # The second save has other values, and nothing of the first.
    checkpoint.write(out, {"seed": 0})
    moved(model)
    checkpoint.write(out, {"seed": 1})
    before, after = contents(base), contents(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert len(changed) > 20
    assert all(
        name.startswith(("model.language_model.layers.2.", "model.language_model.layers.3.")) for name in changed
    )
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert not (out / "metrics.jsonl").exists()
    assert difference(load_model(out)[0], model) < 1e-5
    assert difference(load_vision_tower(out), model) < 1e-4
    assert difference(load_model(base)[0], model) > 0.1


def test_on_images_the_tower_is_written_as_the_base_has_it(base, tmp_path):
    model = trained(load_vision_tower(base), parts=["language", "vision", "projector"])
    model.vision_tower.patch_embed.unfreeze()
    moved(model)
    TrainedCheckpoint(model, base).write(tmp_path / "out", {})
    before, after = contents(base), contents(tmp_path / "out")
    assert {name: content[:2] for name, content in before.items()} == {n: content[:2] for n, content in after.items()}
    assert before["model.visual.patch_embed.proj.weight"] != after["model.visual.patch_embed.proj.weight"]
    assert load(tmp_path / "out", image="a test").processor is not None
    patches = load_vision_tower(tmp_path / "out").vision_tower.patch_embed.proj.weight
    assert mx.abs(patches - model.vision_tower.patch_embed.proj.weight).max() < 1e-6


def test_merge_and_readers_take_the_folder_as_they_take_an_adapter(base, tmp_path, run):
    model = trained(load_model(base)[0])
    out = tmp_path / "out"
    TrainedCheckpoint(model, base).write(out, {"fine_tune_type": "full"})
    assert is_trained_checkpoint(out)
    assert not is_trained_checkpoint(base)
    done = merge_checkpoint(base, out, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(out)
    assert {name for name in contents(base) if contents(base)[name] != contents(out)[name]} == set(done.changed)
    assert difference(load_with_adapter(base, str(out)).model, model) < 1e-5
    for target in ("peft", "mlx"):
        flags = ["--model", base, "--adapter-path", out, "--save-path", tmp_path / target]
        code, _, error = run("export", "--to", target, *flags)
        assert code == 2
        assert "it holds a whole model, not an adapter" in error
    with pytest.raises(UserError, match=r"holds a whole model: mlx_lm\.convert"):
        merge_checkpoint(base, out, tmp_path / "dense", dequantize=True)


@pytest.mark.bad_input("--model that is not the base of a model that was trained as a whole")
def test_another_base_is_refused(base, tiny_checkpoint, tmp_path):
    TrainedCheckpoint(trained(load_model(base)[0]), base).write(tmp_path / "out", {})
    with pytest.raises(UserError, match=r"has not the tensors of .*, such as"):
        merge_checkpoint(tiny_checkpoint("qwen3"), tmp_path / "out", tmp_path / "merged")


def test_a_quantised_base_stays_quantised(tiny_checkpoint, tmp_path):
    base = tiny_checkpoint("qwen3_5", quantize={})
    model = trained(load_model(base)[0])
    TrainedCheckpoint(model, base).write(tmp_path / "out", {})
    before, after = contents(base), contents(tmp_path / "out")
    assert {name: content[:2] for name, content in before.items()} == {n: content[:2] for n, content in after.items()}
    assert difference(load_model(tmp_path / "out")[0], model) == 0


def test_new_rows_are_part_of_the_tables(tiny_checkpoint, tmp_path):
    path = with_new_tokens(tiny_checkpoint("qwen3"), tmp_path / "base")
    loaded = load(path)
    resize_embeddings(loaded)
    TrainedCheckpoint(trained(loaded.model), path).write(tmp_path / "out", {})
    again, config = load_model(tmp_path / "out")
    assert config["vocab_size"] == 322
    assert difference(again, loaded.model) < 1e-5


def test_irreversible_sanitize_is_noted_before_training(tiny_checkpoint, tmp_path, monkeypatch):
    base = tiny_checkpoint("qwen3_5")
    model = trained(load_model(base)[0])
    sanitize, name = type(model).sanitize, "language_model.model.layers.3.mlp.up_proj.weight"
    monkeypatch.setattr(
        type(model), "sanitize", lambda self, w: (s := sanitize(self, w)) | {name: s[name] * mx.abs(s[name])}
    )
    checkpoint = TrainedCheckpoint(model, base)
    assert "MLX's names" in checkpoint.note
    assert name in checkpoint.note
    monkeypatch.undo()
    checkpoint.write(tmp_path / "out", {})
    assert difference(load_model(tmp_path / "out")[0], model) == 0


def test_a_text_model_from_scratch_has_no_vision_config(tiny_vision_checkpoint, tmp_path):
    base = tiny_vision_checkpoint("qwen3_5")
    loaded: Loaded = load(base, from_scratch=True)
    TrainedCheckpoint(loaded.model, base, loaded.config).write(tmp_path / "out", {})
    assert "vision_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert difference(load_model(tmp_path / "out")[0], loaded.model) == 0


def test_a_save_keeps_no_second_copy_of_the_weights(base, tmp_path):
    model = trained(load_model(base)[0])
    checkpoint = TrainedCheckpoint(model, base)
    checkpoint.write(tmp_path / "out", {})
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    checkpoint.write(tmp_path / "out", {})
    largest = max(size for *_, content in contents(tmp_path / "out").values() for size in [len(content)])
    assert mx.get_active_memory() <= before
    # What one tensor passes through on its way to the file.
    assert mx.get_peak_memory() - before <= 8 * 4 * largest
