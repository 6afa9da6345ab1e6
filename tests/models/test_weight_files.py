"""Of several builds of a model in one folder, every command takes the one that transformers takes."""

import json

import mlx.core as mx
import mlx_lm.utils
import pytest

from checkpoint_copies import copied, rewritten
from console import called
from deltatune.errors import UserError
from deltatune.models import stored_names
from deltatune.models.checkpoint_files import INDEX, index_counts, weight_files, weight_headers
from deltatune.models.checkpoint_writer import write_weights
from deltatune.models.load import load, load_model, load_vision_tower
from new_tokens import write_data
from saved_adapters import adapted
from weight_builds import CASES, arrange, shards

TOKENS = mx.array([[5, 6, 7, 8, 9]])


@pytest.fixture
def builds(tiny_checkpoint):
    """Two builds of one model, with other weights."""
    return tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=1)


@pytest.mark.parametrize("case", CASES)
def test_the_build_that_transformers_takes_is_loaded(builds, tmp_path, case):
    folder = arrange(case, *builds, tmp_path / "model")
    expected = mlx_lm.utils.load_model(builds[0])[0](TOKENS)
    model, _ = load_model(folder)
    assert mx.array_equal(model(TOKENS), expected)
    # The lazy reader of layers, merges and exports read the same files.
    stored = stored_names.stored_parameters(model, folder)
    assert mx.array_equal(stored["model.norm.weight"], model.model.norm.weight)
    headers = weight_headers(folder)
    assert sorted(headers) == [file.name for file in weight_files(folder)]


@pytest.mark.parametrize("case", ["older shards", "index of another build"])
def test_eval_and_merge_take_that_build(builds, tmp_path, case):
    folder = arrange(case, *builds, tmp_path / "model")
    data = write_data(tmp_path / "data", new=False)
    right, mixed = (called("eval", "--model", path, "--data", data) for path in (builds[0], folder))
    assert right.stdout.splitlines()[-1] == mixed.stdout.splitlines()[-1], mixed.stderr
    adapted(folder, tmp_path / "a")
    (folder / "consolidated.safetensors").write_bytes(b"in another layout")
    merged = called("merge", "--model", folder, "--adapter-path", tmp_path / "a", "--save-path", tmp_path / "merged")
    assert merged.returncode == 0, merged.stderr
    assert [file.name for file in (tmp_path / "merged").glob("*.safetensors*")] == ["model.safetensors"]


def test_images_take_that_build(tiny_vision_checkpoint, tmp_path):
    builds = [tiny_vision_checkpoint("qwen3_5", seed=seed) for seed in (0, 1)]
    folder = arrange("older shards and their index", *builds, tmp_path / "model")
    expected, found = (load_vision_tower(path).language_model.model.norm.weight for path in (builds[0], folder))
    patches = [load_vision_tower(path).vision_tower.patch_embed.proj.weight for path in (builds[0], folder)]
    assert mx.array_equal(expected, found)
    assert mx.array_equal(*patches)


def test_an_index_that_names_the_whole_file_among_others_counts(builds, tmp_path):
    folder = copied(builds[0], tmp_path / "model")
    with rewritten(folder / "model.safetensors") as tensors:
        norm = {"model.norm.weight": tensors.pop("model.norm.weight")}
    mx.save_safetensors(str(folder / "model-norm.safetensors"), norm)
    weight_map = dict.fromkeys(tensors, "model.safetensors") | dict.fromkeys(norm, "model-norm.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert index_counts(folder)
    assert mx.array_equal(load_model(folder)[0](TOKENS), load_model(builds[0])[0](TOKENS))


def test_a_tensor_that_stands_in_two_shards_alike_is_written_once(builds, tmp_path):
    folder = copied(builds[0], tmp_path / "model")
    shards(folder, folder, 2, repeated="model.norm.weight")
    (folder / "model.safetensors").unlink()
    (folder / INDEX).unlink()
    (tmp_path / "new").mkdir()
    new = mx.full((64,), 2.0)
    write_weights(folder, tmp_path / "new", weight_headers(folder), {"model.norm.weight": new})
    holders = [header.tensors for header in weight_headers(tmp_path / "new").values()]
    assert sum("model.norm.weight" in tensors for tensors in holders) == 1
    assert mx.array_equal(stored_names._lazy_tensors(tmp_path / "new")["model.norm.weight"], new)


@pytest.mark.bad_input("shards of two builds in one folder, without an index")
def test_shards_of_two_builds_without_an_index(builds, tmp_path):
    folder = copied(builds[0], tmp_path / "model")
    shards(builds[0], folder, 2)
    shards(builds[1], folder, 3)
    (folder / INDEX).unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"hold different values of .*leave one build"):
        load(folder)


@pytest.mark.bad_input("a config.json that names another file of weights (transformers_weights)")
def test_transformers_weights_of_another_name(builds, tmp_path):
    folder = copied(builds[0], tmp_path / "model", transformers_weights="other.safetensors")
    with pytest.raises(UserError, match=r"transformers_weights names 'other\.safetensors'"):
        load(folder)
