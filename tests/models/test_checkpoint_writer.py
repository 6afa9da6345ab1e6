"""A merge, and a model trained as a whole, agree with the trained model, and are the base in everything else."""

import gc
import json
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest

from checkpoint_copies import copied, rewrite, rewritten
from deltatune.errors import UserError
from deltatune.layers import logits_of
from deltatune.lora import convert_to_lora
from deltatune.lora.tensor_files import StoredTensor, read_header, write_tensors
from deltatune.models import checkpoint_writer as merge_module
from deltatune.models.adapted_base import load as load_with_adapter
from deltatune.models.checkpoint_files import is_trained_checkpoint
from deltatune.models.checkpoint_writer import TrainedCheckpoint, merge_checkpoint
from deltatune.models.load import Loaded, load, load_model, load_vision_tower
from deltatune.models.vocabulary import resize_embeddings
from deltatune.options.config import LoraConfig
from families import FAMILIES, weekly_but
from last_place import assert_same
from new_tokens import with_new_tokens
from saved_adapters import adapted as adapt
from saved_adapters import moved
from transformers_saves import recorded_save, write_as_transformers
from weight_builds import INDEX, shards

TOKENS = mx.array([[5, 6, 7, 8, 9]])


def stored_bytes(folder: Path) -> dict[str, tuple]:
    """{tensor: (dtype, shape, bytes)} of every weight file."""
    found = {}
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        for name, stored in read_header(file).tensors.items():
            found[name] = (stored.dtype, stored.shape, content[stored.start : stored.start + stored.size])
    return found


def difference(a: mx.array, b: mx.array) -> float:
    return mx.abs(a - b).max().item()


KINDS = ("lora", "dora", "full")


# A family says where its tensors are, and a kind what is added to one: each family has one kind, and each kind a third.
# test_transformers_configs.py merges into the names of further families.
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, KINDS[at % 3], marks=() if at < 3 or family == "kimi_k3" else pytest.mark.weekly)
        for at, family in enumerate(FAMILIES)
    ],
)
def test_a_merged_model_equals_the_adapted_one(tiny_checkpoint, tmp_path, family, kind):
    base = tiny_checkpoint(family)
    adapted = adapt(base, tmp_path / "adapter", kind)(TOKENS)
    done = merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged")
    merged, _ = mlx_lm.utils.load_model(tmp_path / "merged")
    assert_same(adapted, merged, lambda: merged(TOKENS))
    assert done.rounding is None
    assert difference(load_model(base)[0](TOKENS), adapted) > 0.1
    before, after = stored_bytes(base), stored_bytes(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == set(done.changed)


@pytest.mark.parametrize("family", weekly_but(["qwen3_5_moe", "kimi_linear"], "qwen3_5_moe"))
def test_quantised_base_dequantised(tiny_checkpoint, tmp_path, family):
    base = tiny_checkpoint(family, quantize={})
    adapted = adapt(base, tmp_path / "adapter")(TOKENS)
    done = merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged", dequantize=True)
    merged, config = load_model(tmp_path / "merged")
    assert "quantization" not in config
    assert "quantization_config" not in config
    assert_same(adapted, merged, lambda: merged(TOKENS))
    assert done.removed
    assert not any(name.endswith((".scales", ".biases")) for name in stored_bytes(tmp_path / "merged"))


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 3},
        pytest.param({"bits": 6}, marks=pytest.mark.weekly),
        pytest.param({"mode": "mxfp4"}, marks=pytest.mark.weekly),
        {"mode": "nvfp4", "group_size": 16},
    ],
)
def test_quantised_base_stays_as_it_was_packed(tiny_checkpoint, tmp_path, settings):
    base = tiny_checkpoint("qwen3_5", quantize=settings)
    adapt(base, tmp_path / "adapter")
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged")
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "plain", dequantize=True)
    assert load_model(tmp_path / "merged")[1] == load_model(base)[1]
    packed, plain = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("merged", "plain"))
    settings = {"group_size": 32, "bits": 4, "mode": "affine"} | settings
    layers = [name for name in plain if name.endswith("_proj.weight")]
    assert len(layers) == 19
    for name in layers:
        weight, scales, *_ = mx.quantize(plain[name], **settings)
        assert mx.array_equal(packed[name], weight)
        assert mx.array_equal(packed[name.replace(".weight", ".scales")], scales)


@pytest.mark.parametrize("kind", weekly_but(KINDS, "lora", "full"))
def test_hugging_face_checkpoint_keeps_its_format_and_unloaded_tensors(tiny_checkpoint, tmp_path, kind):
    original = tiny_checkpoint("qwen3_5_moe")
    base = write_as_transformers(original, tmp_path / "base", single_experts=False)
    with rewritten(base / "model.safetensors") as tensors:
        tensors["model.visual.blocks.0.attn.qkv.weight"] = mx.random.normal((24, 8)).astype(mx.bfloat16)
    # In several files with an index, as large checkpoints have them.
    shards(base, base, 3)
    rewrite(base / INDEX, metadata={"total_size": sum(tensor.nbytes for tensor in tensors.values())})
    (base / "model.safetensors").unlink()
    assert difference(load_model(base)[0](TOKENS), load_model(original)[0](TOKENS)) < 1e-5
    options = {} if kind == "full" else {"keys": ["mlp.switch_mlp.up_proj", "linear_attn.out_proj"]}
    if kind == "dora":
        options = {"keys": ["linear_attn.*"]}
    adapted = adapt(base, tmp_path / "adapter", kind, **options)(TOKENS)
    done = merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged")
    merged, _ = load_model(tmp_path / "merged")
    assert_same(adapted, merged, lambda: merged(TOKENS))
    before, after = stored_bytes(base), stored_bytes(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == set(done.changed)
    assert not any(name.startswith(("mtp", "model.visual")) for name in done.changed)
    # Only up_proj was trained, so the half of the tensor that holds gate_proj keeps its bits.
    if kind == "lora":
        name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
        assert name in done.changed
        old, new = (
            mx.load(str(next(f for f in d.glob("*.safetensors") if name in read_header(f).tensors)))[name]
            for d in (base, tmp_path / "merged")
        )
        assert mx.array_equal(old[:, :64], new[:, :64])
        assert not mx.array_equal(old[:, 64:], new[:, 64:])
    assert json.loads((tmp_path / "merged" / INDEX).read_text()) == json.loads((base / INDEX).read_text())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()


def test_eight_bit_floats_are_carried_bit_for_bit(tiny_checkpoint, tmp_path):
    base = copied(tiny_checkpoint("qwen3_5"), tmp_path / "base")
    raw = tmp_path / "raw"
    raw.write_bytes(bytes(range(64)))
    header = read_header(base / "model.safetensors")
    extra = {"model.visual.scale": StoredTensor("F8_E4M3", (8, 8), 0, 64, raw)}
    write_tensors(tmp_path / "new", {**header.tensors, **extra}, {"format": "mlx"})
    (tmp_path / "new").replace(base / "model.safetensors")
    adapt(base, tmp_path / "adapter")
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged")
    assert stored_bytes(tmp_path / "merged")["model.visual.scale"] == ("F8_E4M3", (8, 8), bytes(range(64)))


@pytest.mark.parametrize("change", [lambda w: w * mx.abs(w), lambda w: mx.concatenate([w[:64], w[:64]])])
def test_derivation_that_cannot_be_undone_is_refused(tiny_checkpoint, tmp_path, monkeypatch, change):
    base = tiny_checkpoint("qwen3_5")
    adapt(base, tmp_path / "adapter")
    model_class = type(load_model(base)[0])
    sanitize = model_class.sanitize

    def derived(self, weights):
        found = sanitize(self, weights)
        name = "language_model.model.layers.0.mlp.up_proj.weight"
        return found | {name: change(found[name])}

    monkeypatch.setattr(model_class, "sanitize", derived)
    with pytest.raises(UserError, match=r"up_proj.weight is derived .* cannot be undone"):
        merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_existing_folder_is_not_overwritten(tiny_checkpoint, tmp_path):
    base = tiny_checkpoint("qwen3")
    adapt(base, tmp_path / "adapter")
    with pytest.raises(UserError, match="exists already"):
        merge_checkpoint(base, tmp_path / "adapter", base)
    (tmp_path / "empty").mkdir()
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_leaves_no_files_behind(tiny_checkpoint, tmp_path, monkeypatch, fault):
    base = tiny_checkpoint("qwen3")
    adapt(base, tmp_path / "adapter")

    def failing(source, target, config, ends):
        (target / "config.json").write_text("half")
        raise fault

    monkeypatch.setattr(merge_module, "write_rest", failing)
    expected = UserError if isinstance(fault, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if isinstance(fault, OSError) else None):
        merge_checkpoint(base, tmp_path / "adapter", tmp_path / "out" / "merged")
    assert not list((tmp_path / "out").iterdir())


def test_full_disk(full_disk):
    with pytest.raises(OSError, match="No space left"):
        write_tensors(full_disk, {"a": mx.zeros((4,))}, {})


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3", {"bits": 8}), pytest.param("qwen3_5_moe", {"mode": "mxfp4"}, marks=pytest.mark.weekly)],
)
def test_quantising_again_is_measured(tiny_checkpoint, tmp_path, run, family, settings):
    base = tiny_checkpoint(family, quantize=settings)
    adapt(base, tmp_path / "adapter")
    done = merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged")
    # tests/lora/test_rounding.py compares the figures with float64.
    assert done.rounding.errors.keys() == {name.rpartition(".")[0] for name in done.changed}
    flags = ["--model", base, "--adapter-path", tmp_path / "adapter"]
    assert str(done.rounding) in run("merge", *flags, "--save-path", tmp_path / "again")[1]
    assert len(run("merge", *flags, "--save-path", tmp_path / "plain", "--dequantize")[1].splitlines()) == 1


# In gemma3, mlx-lm's sanitize takes a tied head out of the model, and fails where the model has none any more; in
# falcon_h1 it multiplies matrices by numbers of the config, in place.
SANITIZED = {
    "gemma3": {},
    "falcon_h1": {
        "ssm_out_multiplier": 0.3,
        "mlp_multipliers": [0.7, 0.6],
        "ssm_multipliers": [0.5, 0.7, 1.2, 1.5, 0.8],
    },
}


@pytest.mark.parametrize(("family", "kind"), [("gemma3", "lora"), ("falcon_h1", "lora"), ("falcon_h1", "full")])
def test_a_model_that_sanitize_changes(family, kind, tmp_path):
    base = recorded_save(family, tmp_path / "base", **SANITIZED[family])
    adapted = adapt(base, tmp_path / "adapter", kind)(TOKENS)
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged")
    merged, _ = load_model(tmp_path / "merged")
    assert_same(adapted, merged, lambda: merged(TOKENS))


def apart(model, other):
    return mx.abs(logits_of(model, TOKENS) - logits_of(other, TOKENS)).max().item()


def trained(model, parts=("language",)):
    """Make the model train as a whole, and change its parameters."""
    convert_to_lora(model, LoraConfig(), fine_tune_type="full", num_layers=2, parts=parts)
    return moved(model)


@pytest.fixture(scope="module")
def base(tiny_vision_checkpoint, tmp_path_factory):
    """A Qwen3.5-MoE as transformers saves it: a tensor for each expert, a vision tower, an MTP layer."""
    return write_as_transformers(tiny_vision_checkpoint("qwen3_5_moe"), tmp_path_factory.mktemp("saved") / "base")


@pytest.mark.parametrize("single_experts", weekly_but([True, False], True))
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
    before, after = stored_bytes(base), stored_bytes(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert len(changed) > 20
    assert all(
        name.startswith(("model.language_model.layers.2.", "model.language_model.layers.3.")) for name in changed
    )
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert not (out / "metrics.jsonl").exists()
    assert apart(load_model(out)[0], model) < 1e-5
    assert apart(load_vision_tower(out), model) < 1e-4
    assert apart(load_model(base)[0], model) > 0.1


def test_on_images_the_tower_is_written_as_the_base_has_it(base, tmp_path):
    model = trained(load_vision_tower(base), parts=["language", "vision", "projector"])
    model.vision_tower.patch_embed.unfreeze()
    moved(model)
    TrainedCheckpoint(model, base).write(tmp_path / "out", {})
    before, after = stored_bytes(base), stored_bytes(tmp_path / "out")
    assert {name: content[:2] for name, content in before.items()} == {n: content[:2] for n, content in after.items()}
    assert before["model.visual.patch_embed.proj.weight"] != after["model.visual.patch_embed.proj.weight"]
    assert load(tmp_path / "out", image="a test").processor is not None
    patches = load_vision_tower(tmp_path / "out").vision_tower.patch_embed.proj.weight
    assert mx.abs(patches - model.vision_tower.patch_embed.proj.weight).max() < 1e-6


def test_merge_and_readers_take_the_folder_as_they_take_an_adapter(base, tmp_path, complaint):
    model = trained(load_model(base)[0])
    out = tmp_path / "out"
    TrainedCheckpoint(model, base).write(out, {"fine_tune_type": "full"})
    assert is_trained_checkpoint(out)
    assert not is_trained_checkpoint(base)
    done = merge_checkpoint(base, out, tmp_path / "merged")
    assert stored_bytes(tmp_path / "merged") == stored_bytes(out)
    before, after = stored_bytes(base), stored_bytes(out)
    assert {name for name in before if before[name] != after[name]} == set(done.changed)
    assert apart(load_with_adapter(base, str(out)).model, model) < 1e-5
    for target in ("peft", "mlx"):
        flags = ["--model", base, "--adapter-path", out, "--save-path", tmp_path / target]
        assert "it holds a whole model, not an adapter" in complaint("export", "--to", target, *flags)
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
    before, after = stored_bytes(base), stored_bytes(tmp_path / "out")
    assert {name: content[:2] for name, content in before.items()} == {n: content[:2] for n, content in after.items()}
    assert apart(load_model(tmp_path / "out")[0], model) == 0


def test_new_rows_are_part_of_the_tables(tiny_checkpoint, tmp_path):
    path = with_new_tokens(tiny_checkpoint("qwen3"), tmp_path / "base")
    loaded = load(path)
    resize_embeddings(loaded)
    TrainedCheckpoint(trained(loaded.model), path).write(tmp_path / "out", {})
    again, config = load_model(tmp_path / "out")
    assert config["vocab_size"] == 322
    assert apart(again, loaded.model) < 1e-5


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
    assert apart(load_model(tmp_path / "out")[0], model) == 0


def test_a_text_model_from_scratch_has_no_vision_config(tiny_vision_checkpoint, tmp_path):
    base = tiny_vision_checkpoint("qwen3_5")
    loaded: Loaded = load(base, from_scratch=True)
    TrainedCheckpoint(loaded.model, base, loaded.config).write(tmp_path / "out", {})
    assert "vision_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert apart(load_model(tmp_path / "out")[0], loaded.model) == 0


def test_a_save_keeps_no_second_copy_of_the_weights(base, tmp_path):
    model = trained(load_model(base)[0])
    checkpoint = TrainedCheckpoint(model, base)
    checkpoint.write(tmp_path / "out", {})
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    checkpoint.write(tmp_path / "out", {})
    largest = max(size for *_, content in stored_bytes(tmp_path / "out").values() for size in [len(content)])
    assert mx.get_active_memory() <= before
    # What one tensor passes through on its way to the file.
    assert mx.get_peak_memory() - before <= 8 * 4 * largest
