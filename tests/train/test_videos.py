"""Tests runs on videos: they learn, answer and resume, and a model without a vision tower is refused."""

from __future__ import annotations

import json

import deltatune  # noqa: F401

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from deltatune import cli
from deltatune.config import TrainConfig
from deltatune.data import BatchOrder
from deltatune.data.datasets import load_datasets
from deltatune.models.load import load
from deltatune.patches import patched
from deltatune.train import setup
from deltatune.train.step import arrays, loss_of

pytest.importorskip("mlx_vlm", minversion="0.7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows with no, one or two videos whose frames grow lighter or darker, some with an image."""
    path = tmp_path_factory.mktemp("videos")
    rows = []
    for index in range(12):
        videos, answers = [], []
        for place in range(index % 3):
            rising = (index + place) % 2 == 0
            count = 4 + 2 * (index % 2)
            shades = np.linspace(20, 230, count).astype(int)[:: 1 if rising else -1]
            frames = [f"{index}_{place}_{number}.png" for number in range(count)]
            for name, shade in zip(frames, shades, strict=True):
                Image.new("RGB", (32, 32), (int(shade),) * 3).save(path / name)
            videos.append(frames)
            answers.append("lighter" if rising else "darker")
        user = "<video>" * len(videos) + "which?"
        answer = " ".join(answers) or "none"
        row = {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}
        rows.append(row | {"videos": videos, "fps": 1})
        if videos and index % 2:
            rows[-1]["images"] = [videos[0][0]]
            rows[-1]["messages"][0]["content"] = "<image>" + user
    for split, count in (("train", 12), ("valid", 4)):
        (path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows[:count])))
    return path


def options(model, folder, target, **more):
    flags = {"model": model, "data": folder, "adapter-path": target, "iters": 6, "batch-size": 4, "num-layers": -1}
    flags |= {"learning-rate": 2e-3, "steps-per-report": 2, "steps-per-eval": 6} | more
    return [part for key, value in flags.items() for part in (f"--{key}", str(value))]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_a_run_learns_and_answers(tiny_vision_checkpoint, folder, tmp_path, family, capsys):
    path = tiny_vision_checkpoint(family)
    assert cli.main(["train", *options(path, folder, tmp_path / "a")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["val_loss"] for line in lines if "val_loss" in line]
    assert measured[-1] < 0.9 * measured[0]
    capsys.readouterr()
    (folder / "test.jsonl").write_text((folder / "valid.jsonl").read_text())
    assert cli.main(["eval", "--model", str(path), "--data", str(folder), "--video-max-frames", "4"]) == 0
    capsys.readouterr()
    asked = ["generate", "--model", str(path), "--adapter-path", str(tmp_path / "a"), "--prompt", "which?"]
    frames = [str(folder / f"1_0_{number}.png") for number in range(6)]
    assert cli.main([*asked, "--max-tokens", "4", "--fps", "1", "--video", *frames]) == 0
    said = capsys.readouterr().out

    # The same prompt is given to the forward pass of training, whose most likely token must begin the answer.
    loaded = setup.load_with_adapter(path, str(tmp_path / "a"), image="a test")
    row = {"messages": [{"role": "user", "content": "which?"}, {"role": "assistant", "content": "x"}]}
    row |= {"video": frames, "fps": 1}
    target = tmp_path / "data"
    target.mkdir()
    (target / "train.jsonl").write_text(json.dumps(row))
    config = TrainConfig(data=str(target), batch_size=1)
    (example,) = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train
    first = int(np.argmax(example.targets))
    tokens = mx.array(example.tokens[None, :first])
    assert f"[{first} prompt tokens" in said
    picture = example.pictures.reader.picture(example.pictures.values[0], "a test")
    more = {"pixel_values_videos": mx.array(picture.patches), "video_grid_thw": mx.array([picture.grid])}
    loaded.model.eval()
    with patched():
        best = mx.argmax(loaded.model(tokens, **more).logits[0, -1]).item()
    assert said.startswith(loaded.tokenizer.decode([best]))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_a_batch_weighs_as_its_rows_do(tiny_vision_checkpoint, folder, family):
    """Videos and images in differing number within a batch: the loss of four rows is that of the four alone."""
    loaded = load(tiny_vision_checkpoint(family), image="a test")
    config = TrainConfig(data=str(folder), batch_size=4)
    examples = load_datasets(config, loaded.tokenizer, setup.vision_processors(loaded)).train[:4]
    with patched(loaded.model):
        loss, _ = setup.choose_loss(loaded.model)
        together = loss_of(loss, arrays(next(BatchOrder(examples, 4, 2048))))
        alone = [loss_of(loss, arrays(next(BatchOrder([example], 1, 2048)))) for example in examples]
    assert together[1].item() == sum(weight.item() for _, weight in alone)
    assert together[0].item() == pytest.approx(sum(total.item() for total, _ in alone), rel=1e-4)


def test_a_killed_run_goes_on_bit_for_bit(tiny_vision_checkpoint, folder, tmp_path):
    path = tiny_vision_checkpoint("qwen3_vl")
    more = {"parts": "vision,projector", "iters": 4, "video-max-frames": 4}
    assert cli.main(["train", *options(path, folder, tmp_path / "whole", **more)]) == 0
    assert cli.main(["train", *options(path, folder, tmp_path / "again", **more | {"iters": 2})]) == 0
    assert cli.main(["train", *options(path, folder, tmp_path / "again", **more), "--resume"]) == 0
    whole, again = (mx.load(str(tmp_path / name / "adapters.safetensors")) for name in ("whole", "again"))
    assert all(mx.array_equal(value, again[name]) for name, value in whole.items())


def test_a_text_model_given_videos_is_one_message(tiny_checkpoint, folder, tmp_path, capsys):
    assert cli.main(["train", *options(tiny_checkpoint("qwen3"), folder, tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "train.jsonl:2: has an image" in error or "train.jsonl:2, in a video: has an image" in error
    assert "Traceback" not in error


def test_generate_names_what_it_cannot_watch(tiny_vision_checkpoint, folder, capsys):
    asked = ["generate", "--model", str(tiny_vision_checkpoint("qwen3_vl")), "--prompt", "which?"]
    frame = str(folder / "1_0_0.png")
    (folder / "text.mp4").write_text("no video")
    for given, message in (
        (["--video", "none.mp4"], "--video none.mp4: no such file"),
        (["--video", frame, "--image", frame], "--image and --video: give one of them"),
        (["--video", frame, str(folder / "text.mp4")], "--video: images beside videos"),
        (["--video", str(folder / "text.mp4")], "no video, truncated"),
        (["--video", frame], "1 frame; a video needs 2 or more"),
        (["--video", frame, frame, "--fps", "0"], "fps: expected a number above 0"),
    ):
        assert cli.main([*asked, *given]) == 2
        assert message in capsys.readouterr().err
