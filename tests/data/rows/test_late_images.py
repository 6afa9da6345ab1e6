"""The first image of a data set is found wherever it stands, behind any number of rows of text, in every format."""

import csv
import io
import json

import datasets
import pytest
from PIL import Image

from console import called
from deltatune.data import load_datasets
from deltatune.data.datasets import first_image
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig

pytest.importorskip("mlx_vlm")

TEXTS = 101
ANSWER = {"role": "assistant", "content": "blue"}


def picture(shade=0):
    content = io.BytesIO()
    Image.new("RGB", (32, 32), (shade, 0, 200)).save(content, "PNG")
    return content.getvalue()


def asked(content="What colour?"):
    return [{"role": "user", "content": content}, ANSWER]


def part(value):
    return [{"type": "image", "image": value}, {"type": "text", "text": "What colour?"}]


TEXT = [{"type": "text", "text": "What colour?"}]
FILE = {"bytes": picture(), "path": None}
# For each shape of rows: one without an image, one with an image, and the library's types where it cannot guess them.
SHAPES = {
    "a column of images": (
        {"messages": asked(), "images": []},
        {"messages": asked("<image>What?"), "images": [FILE]},
        {"images": datasets.List(datasets.Image())},
    ),
    "a column of paths": ({"prompt": "a", "completion": "b", "image": None},
                          {"prompt": "a", "completion": "b", "image": "a.png"}, {}),
    "a part": ({"messages": asked(TEXT)[:1]}, {"messages": asked(part("a.png"))[:1]}, {}),
    "JSON in a text": ({"messages": json.dumps(asked())}, {"messages": json.dumps(asked(part("a.png")))}, {}),
    "JSON in a column of objects": (
        {"messages": asked()},
        {"messages": asked(part("a.png"))},
        {"messages": datasets.List(datasets.Json())},
    ),
    "a column of videos": ({"messages": asked(), "videos": []}, {"messages": asked(), "videos": ["a.mp4"]}, {}),
    "preferences": (
        {"prompt": "a", "chosen": json.dumps([ANSWER]), "rejected": "b"},
        {"prompt": json.dumps(asked(part("a.png"))[:1]), "chosen": json.dumps([ANSWER]), "rejected": "b"},
        {},
    ),
}  # fmt: skip
WRITERS = {
    "Parquet": lambda table, folder: table.to_parquet(str(folder / "train.parquet")),
    "save_to_disk": lambda table, folder: datasets.DatasetDict({"train": table}).save_to_disk(str(folder)),
    "several tables of Arrow": lambda table, folder: table.to_parquet(str(folder / "train.parquet"), batch_size=7),
}


@pytest.mark.parametrize(
    ("shape", "writer"),
    [
        pytest.param(shape, writer, marks=[pytest.mark.weekly] if writer != "Parquet" and shape != "a part" else [])
        for shape in SHAPES
        for writer in WRITERS
    ],
)
def test_an_image_behind_many_texts_is_found(shape, writer, tmp_path, monkeypatch):
    monkeypatch.setattr("deltatune.data.rows.sources._TABLE_ROWS", 50)
    plain, pictured, types = SHAPES[shape]
    rows = [plain] * TEXTS + [pictured] + [plain] * 3
    features = None
    if types:
        known = {"messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})}
        features = datasets.Features({**known, **types})
    WRITERS[writer](datasets.Dataset.from_list(rows, features=features), tmp_path)
    config = TrainConfig(data=str(tmp_path), loss="dpo" if shape == "preferences" else "sft")
    where = f"{tmp_path}/train.parquet row {TEXTS + 1}"
    if writer == "save_to_disk":
        where = f"{tmp_path} [train] row {TEXTS}"
    assert first_image(config) == (f"{where}, in a video" if "video" in shape else where)


def test_an_image_behind_many_texts_of_csv_is_found(tmp_path):
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion", "image"])
        writer.writerows([["a", "b", ""]] * TEXTS + [["a", "b", "a.png"]])
    assert first_image(TrainConfig(data=str(tmp_path))) == f"{tmp_path}/train.csv row {TEXTS + 1}"


@pytest.mark.parametrize("name", [r"\u0069mages", r"image\u0073"])
def test_an_image_under_an_escaped_key_is_found(name, tmp_path):
    (tmp_path / "train.jsonl").write_text(f'{{"prompt": "a", "completion": "b", "{name}": ["a.png"]}}\n')
    assert first_image(TrainConfig(data=str(tmp_path))) == f"{tmp_path / 'train.jsonl'}:1"


def test_text_alone_has_no_image(tmp_path):
    rows = [{"messages": asked('an "image" and images of "videos"'), "image": None}] * 3
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    assert first_image(TrainConfig(data=str(tmp_path))) is None


@pytest.mark.bad_input("rows with images for a model that was loaded without its vision tower")
def test_images_are_never_dropped(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": asked(), "images": ["a.png"]}))
    with pytest.raises(UserError, match=r"train.jsonl:1: this row has images, and the model was loaded without its"):
        load_datasets(TrainConfig(data=str(tmp_path), batch_size=1), tokenizer)


def test_images_behind_many_texts_are_in_the_batch(tmp_path, tiny_vision_checkpoint):
    features = datasets.Features(
        {
            "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
            "images": datasets.List(datasets.Image()),
        }
    )
    texts = [{"messages": asked(), "images": []}] * TEXTS
    images = [
        {"messages": asked("<image>What?"), "images": [{"bytes": picture(10 * shade), "path": None}]}
        for shade in range(3)
    ]
    folder = tmp_path / "data"
    folder.mkdir()
    datasets.Dataset.from_list(texts + images, features=features).to_parquet(str(folder / "train.parquet"))
    model = ["--model", tiny_vision_checkpoint("qwen3_vl"), "--batch-size", len(texts + images)]
    done = called("train", "--show-batch", *model, "--data", folder)
    assert done.returncode == 0, done.stderr
    assert sum("<|vision_start|>" in line for line in done.stdout.splitlines()) == len(images)
    assert "<image>" not in done.stdout
