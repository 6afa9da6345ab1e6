"""Every recipe is a file of known options: its model and data may be changed, and nothing else need be."""

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest
from PIL import Image

from console import called, deltatune
from deltatune import cli
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.options.values import build
from deltatune.options.yaml_files import read_yaml
from deltatune.recipes import shipped

FILES = Path(shipped.__file__).parent / "shipped"
RECIPES = {recipe.name: read_yaml(FILES / f"{recipe.name}.yaml") for recipe in shipped.recipes()}
FAMILY = {
    "Qwen3.5": "qwen3_5",
    "Qwen3.5-35B-A3B": "qwen3_5_moe",
    "Qwen3-Next": "qwen3_next",
    "Kimi-Linear": "kimi_linear",
    "Olmo-Hybrid": "olmo_hybrid",
}


def family(model: str) -> str:
    """The family of a repository's name; of two that fit, the longer name says more."""
    return FAMILY[max((name for name in FAMILY if f"/{name}" in model), key=len)]


def words_of(value: object) -> object:
    """An option without its numbers, in which the recipes of one family differ."""
    if isinstance(value, dict):
        return {key: words_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return [words_of(each) for each in value]
    return 0 if type(value) in (int, float) else value


def groups() -> list[list[str]]:
    """The recipes by the trained part and the kind of model; one of each is executed."""
    found: dict[str, list[str]] = {}
    for name, options in RECIPES.items():
        rest = {key: words_of(value) for key, value in options.items() if key != "model"}
        kind = (family(options["model"]), options["model"].endswith("4bit"), rest)
        found.setdefault(json.dumps(kind, sort_keys=True), []).append(name)
    return list(found.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_holds_known_options(name):
    config = build(TrainConfig, RECIPES[name], name)
    assert isinstance(config.lora_parameters, LoraConfig)
    assert (config.num_layers, config.data) == (-1, "my-data")
    assert config.batch_size * config.grad_accumulation_steps == 16


def test_every_file_is_listed_and_fits_a_terminal():
    assert sorted(shipped.ORDER) == sorted(file.stem for file in FILES.glob("*.yaml"))
    done = called("recipes")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[: len(RECIPES)]] == list(RECIPES)
    assert max(map(len, lines)) < 80


def test_the_comments_of_a_recipe_say_what_its_options_are():
    for name, options in RECIPES.items():
        text = (FILES / f"{name}.yaml").read_text(encoding="utf-8")
        (rows,) = re.findall(r"# (\d+) rows an update", text)
        assert int(rows) == options["batch_size"] * options["grad_accumulation_steps"], name
        assert f"deltatune plan -c {name}.yaml" in text
        assert ("4 bits" in text.splitlines()[0]) == options["model"].endswith("4bit")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    for name, row in (("text", {}), ("images", {"images": ["a.png"]})):
        (folder / name).mkdir()
        row |= {"prompt": "the quick brown fox", "completion": "jumps over"}
        for split in ("train", "valid"):
            (folder / name / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 16)
    Image.new("RGB", (32, 32), "red").save(folder / "images" / "a.png")
    return folder


QUICK = (groups()[0][0], "qwen3.5-35b-a3b", "qwen3.5-4b-images")
GROUPS = [pytest.param(names, marks=[pytest.mark.weekly] * (names[0] not in QUICK)) for names in groups()]


@pytest.mark.parametrize("names", GROUPS, ids=" ".join)
def test_a_recipe_trains_a_tiny_model_of_its_family(
    names, data, tiny_checkpoint, tiny_vision_checkpoint, tmp_path, monkeypatch
):
    name = names[0]
    options, images = RECIPES[name], "images" in name
    kind = family(options["model"])
    if images:
        model = tiny_vision_checkpoint(kind)
    else:
        model = tiny_checkpoint(kind, quantize={} if options["model"].endswith("4bit") else None)
    text = shipped.copy(name, tmp_path).read_text(encoding="utf-8")
    # As a reader does who has the model and the data elsewhere.
    text = text.replace("data: my-data ", f"data: {data / ('images' if images else 'text')} ")
    (tmp_path / "mine.yaml").write_text(text.replace(f"model: {options['model']}", f"model: {model}"))
    # The first update's rate is 0.
    shorter = ["--iters", "4", "--grad-accumulation-steps", "2", "--batch-size", "2", "--max-seq-length", "64"]
    words = ["train", "-c", "mine.yaml", *shorter]
    if names == groups()[0]:
        done = deltatune(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    else:
        # A process starts in the same way whatever the recipe says.
        monkeypatch.chdir(tmp_path)
        assert cli.main(words) == 0
    weights = mx.load(str(tmp_path / "adapters" / "adapters.safetensors"))
    assert all(mx.isfinite(array).all().item() for array in weights.values())
    layers = {key.partition(".layers.")[2].partition(".")[0] for key in weights}
    assert len(layers) == 4
    rank = build(TrainConfig, options, name).lora_parameters.rank
    assert {array.shape[-1] for key, array in weights.items() if key.endswith("lora_a") and array.ndim == 2} == {rank}
    assert any("switch_mlp" in key or "experts" in key for key in weights) == ("experts" in text.splitlines()[0])


def test_a_recipe_is_copied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = called("recipes", "copy", "Qwen3.5-9B")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Wrote qwen3.5-9b.yaml. ")
    assert (tmp_path / "qwen3.5-9b.yaml").read_bytes() == (FILES / "qwen3.5-9b.yaml").read_bytes()


@pytest.mark.bad_input("`recipes` with {words}")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["copy", "qwen3.5-9"],
            "recipes: no recipe 'qwen3.5-9' (did you mean 'qwen3.5-9b'?); there are qwen3.5-0.8b, ",
        ),
        (["copy", "qwen3.5-9b", "here.yaml"], "recipes: here.yaml exists; give another path, or remove it."),
        (["copy", "qwen3.5-9b", "folder"], "recipes: folder/qwen3.5-9b.yaml exists; give another path"),
    ],
)
def test_recipe_that_cannot_be_copied_is_refused(words, message, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for file in ("here.yaml", "folder/qwen3.5-9b.yaml"):
        (tmp_path / file).write_text("mine")
    monkeypatch.chdir(tmp_path)
    done = called("recipes", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"deltatune: {message}")
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "here.yaml").read_text() == "mine"
