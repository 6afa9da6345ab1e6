"""Folders with damaged weights, or with several builds of a model."""

import json
import shutil

import mlx.core as mx
import mlx_lm.utils
import pytest

from checkpoint_copies import copied, rewritten
from console import called
from deltatune import cli
from deltatune.errors import UserError
from deltatune.models import stored_names
from deltatune.models.checkpoint_files import INDEX, index_counts, weight_files, weight_headers
from deltatune.models.checkpoint_writer import write_weights
from deltatune.models.load import load, load_model, load_vision_tower
from families import weekly_but
from new_tokens import write_data
from saved_adapters import adapted
from weight_builds import CASES, arrange, shards


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("damaged") / "data", new=False)


@pytest.fixture(scope="module")
def adapter(checkpoint, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged") / "adapter"
    assert cli.main([str(word) for word in [*train(checkpoint, data, folder), "--iters", 1]]) == 0
    return folder


def train(model, data, folder):
    return ["train", "--model", model, "--data", data, "--batch-size", 2, "--adapter-path", folder]


def words(command, model, data, folder, adapter=None):
    """The command line of `command`; its output goes to `out` or `merged` in `folder`."""
    added = [] if adapter is None else ["--adapter-path", adapter]
    return {
        "train": train(model, data, folder / "out"),
        "eval": ["eval", "--model", model, "--data", data, "--batch-size", 2, *added],
        "generate": ["generate", "--model", model, "--prompt", "a", *added],
        "merge": ["merge", "--model", model, *added, "--save-path", folder / "merged"],
    }[command]


def spoil(file, value, kind=None):
    """Put `value` into one number of a tensor in the middle of a file, and return the tensor's name."""
    with rewritten(file) as tensors:
        names = sorted(name for name in tensors if kind is None or kind in name)
        name = names[len(tensors) // 2 if kind is None else 0]
        tensors[name][(slice(0, 1),) * tensors[name].ndim] = value
    return name


@pytest.mark.bad_input("`{command}` with an adapter that holds {value}")
@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("merge", float("nan")),
        ("merge --dequantize", float("inf")),
        ("eval", float("-inf")),
        ("generate", float("nan")),
        ("train", float("inf")),
    ],
)
def test_an_adapter_that_is_not_finite(complaint, checkpoint, data, adapter, tmp_path, command, value):
    broken = shutil.copytree(adapter, tmp_path / "broken")
    name = spoil(broken / "adapters.safetensors", value)
    command, *flags = command.split()
    if command == "train":
        flags = ["--resume-adapter-file", broken / "adapters.safetensors"]
    error = complaint(*words(command, checkpoint, data, tmp_path, broken), *flags)
    assert f"tensors hold NaN or infinity: {name}. Take an earlier save" in error
    assert not (tmp_path / "merged").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.bad_input("`{command}` on a model with a weight that is NaN")
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        pytest.param("train", [], marks=pytest.mark.weekly),
        ("train later", ["--val-batches", 0]),
        ("train full", ["--val-batches", 0, "--fine-tune-type", "full"]),
        pytest.param("eval", [], marks=pytest.mark.weekly),
        ("generate", []),
    ],
)
def test_a_base_weight_that_is_not_finite(complaint, checkpoint, data, tmp_path, command, flags):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    name = spoil(broken / "model.safetensors", float("nan"), kind="1.mlp.up_proj.weight")
    error = complaint(*words(command.split()[0], broken, data, tmp_path), *flags)
    # Adapters are kept whatever happened to the base; weights that are not finite replace no earlier save.
    assert (tmp_path / "out" / "state" / "state.safetensors").exists() == (command == "train later")
    assert f"tensors hold NaN or infinity, the first {name}: its checkpoint is damaged. Download" in error
    assert "learning-rate" not in error


@pytest.mark.bad_input("`merge` where the result is not finite ({fault})")
@pytest.mark.parametrize(("quantize", "fault"), [(None, "overflow"), ({}, "base")])
def test_a_merge_that_is_not_finite(complaint, tiny_checkpoint, tmp_path, quantize, fault):
    base = tiny_checkpoint("qwen3", quantize=quantize, dtype=mx.float16)
    adapted(base, tmp_path / "adapter", keys=["self_attn.q_proj"])
    if fault == "overflow":
        with rewritten(tmp_path / "adapter" / "adapters.safetensors") as tensors:
            tensors.update({name: mx.full(tensor.shape, 1e3) for name, tensor in tensors.items()})
    else:
        base = shutil.copytree(base, tmp_path / "base")
        spoil(base / "model.safetensors", float("nan"), kind="q_proj.scales" if quantize == {} else "q_proj.weight")
    flags = ["--model", base, "--adapter-path", tmp_path / "adapter", "--save-path", tmp_path / "merged"]
    assert "self_attn.q_proj: its weight would hold NaN or infinity after the merge." in complaint("merge", *flags)
    assert not (tmp_path / "merged").exists()


@pytest.mark.bad_input("`{command}` on a model with a weight of {dtype}")
@pytest.mark.parametrize(
    ("command", "dtype"), [("train", mx.int8), ("eval", mx.int32), ("generate", mx.uint32), ("merge", mx.int8)]
)
def test_integer_weights(complaint, checkpoint, data, adapter, tmp_path, command, dtype):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    with rewritten(broken / "model.safetensors") as tensors:
        name = next(name for name in tensors if "q_proj.weight" in name)
        tensors[name] = (100 * tensors[name]).astype(dtype)
    error = complaint(*words(command, broken, data, tmp_path, adapter if command == "merge" else None))
    kind = str(dtype).removeprefix("mlx.core.")
    assert f"1 not of a floating-point type ({name} has type {kind}). Another tool quantised the weights" in error


@pytest.mark.bad_input("`--from-scratch` with the config of a quantised model")
@pytest.mark.parametrize("nested", [False, True])
def test_from_scratch_with_a_quantised_config(complaint, tiny_checkpoint, data, tmp_path, nested):
    base = shutil.copytree(tiny_checkpoint("qwen3_5", quantize={}), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    if nested:
        config["text_config"]["quantization"] = config.pop("quantization")
        config.pop("quantization_config", None)
        (base / "config.json").write_text(json.dumps(config))
    error = complaint(*train(base, data, tmp_path / "out"), "--from-scratch")
    assert "config.json has 'quantization', and quantised weights cannot be trained" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.bad_input("`from_scratch` with `fine_tune_type: {kind}`, in {place}")
@pytest.mark.parametrize(("kind", "place"), [("lora", "flags"), ("dora", "file")])
def test_from_scratch_with_a_type(run, checkpoint, data, tmp_path, kind, place):
    options = {"from_scratch": True, "fine_tune_type": kind}
    (tmp_path / "run.yaml").write_text(json.dumps(options if place == "file" else {}))
    flags = ["--from-scratch", "--fine-tune-type", kind] if place == "flags" else []
    code, out, error = run(*train(checkpoint, data, tmp_path / "out"), "-c", tmp_path / "run.yaml", *flags)
    assert code == 2
    assert f"fine_tune_type {kind} asks for adapters; leave one of them out" in error
    assert "Loading" not in out


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


@pytest.mark.parametrize("case", weekly_but(["older shards", "index of another build"], "older shards"))
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
