"""Folders that hold weights of two builds of one model; transformers loads the first build from each."""

import json
import shutil
from pathlib import Path

import mlx.core as mx

INDEX = "model.safetensors.index.json"


def shards(source: Path, folder: Path, count: int, repeated: str | None = None) -> None:
    """Write the weights of `source` into `folder` as shards with an index; each shard holds the `repeated` tensor."""
    tensors = mx.load(str(source / "model.safetensors"))
    names = sorted(tensors)
    weight_map = {}
    for at in range(count):
        file = f"model-{at + 1:05d}-of-{count:05d}.safetensors"
        part = [name for name in names if name == repeated or names.index(name) % count == at]
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in part}, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _older_shards(first: Path, second: Path, folder: Path) -> None:
    shards(second, folder, 2)
    (folder / INDEX).unlink()


def _older_shards_and_index(first: Path, second: Path, folder: Path) -> None:
    shards(second, folder, 2)


def _index_of_another_build(first: Path, second: Path, folder: Path) -> None:
    shards(second, folder, 2)
    for file in folder.glob("model-*.safetensors"):
        file.unlink()


def _index_of_other_tensors(first: Path, second: Path, folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.scales": "model.safetensors"}}))


def _variant(first: Path, second: Path, folder: Path) -> None:
    shutil.copyfile(second / "model.safetensors", folder / "model.fp16.safetensors")


def _shards_beside_index(first: Path, second: Path, folder: Path) -> None:
    shards(second, folder, 3)
    shards(first, folder, 2)
    (folder / "model.safetensors").unlink()


def _other_layout(first: Path, second: Path, folder: Path) -> None:
    shutil.copyfile(second / "model.safetensors", folder / "consolidated.safetensors")


_MAKERS = {
    "older shards": _older_shards,
    "older shards and their index": _older_shards_and_index,
    "index of another build": _index_of_another_build,
    "index of other tensors": _index_of_other_tensors,
    "variant": _variant,
    "shards outside the index": _shards_beside_index,
    "another layout": _other_layout,
}
CASES = tuple(_MAKERS)


def arrange(case: str, first: Path, second: Path, folder: Path) -> Path:
    """Make `folder`: the first build, with files of the second beside it."""
    shutil.copytree(first, folder)
    _MAKERS[case](first, second, folder)
    return folder
