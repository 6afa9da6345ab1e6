"""Tests runs on videos: they learn, answer and resume, and a model without a vision tower is refused."""

import json

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from deltatune import cli
from deltatune.data.datasets import load_datasets
from deltatune.options.config import TrainConfig
from deltatune.patches import patched
from deltatune.train import setup
from vision_runs import check_batch_weighs_as_its_rows, check_resumed_run_is_bit_equal, options

pytest.importorskip("mlx_vlm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows with no, one or two videos of frames that grow lighter or darker, some with an image."""
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


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_vl", marks=pytest.mark.weekly)])
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
    loaded = setup.load(path, str(tmp_path / "a"), image="a test")
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
    picture = example.pictures.reader.read(example.pictures.values[0], "a test")[0]
    more = {"pixel_values_videos": mx.array(picture.patches), "video_grid_thw": mx.array([picture.grid])}
    loaded.model.eval()
    with patched():
        best = mx.argmax(loaded.model(tokens, **more).logits[0, -1]).item()
    # An answer that ends at once is empty.
    assert said.startswith("\n[" if best in loaded.tokenizer.eos_token_ids else loaded.tokenizer.decode([best]))


@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.weekly), "qwen3_vl"])
def test_a_batch_weighs_as_its_rows_do(tiny_vision_checkpoint, folder, family):
    check_batch_weighs_as_its_rows(tiny_vision_checkpoint(family), folder)


# Frames are read as pictures are, with which test_vision.py stops a run.
@pytest.mark.weekly
def test_a_stopped_run_resumes_bit_for_bit(tiny_vision_checkpoint, folder, tmp_path):
    more = {"parts": "vision,projector", "iters": 4, "video-max-frames": 4}
    check_resumed_run_is_bit_equal(tiny_vision_checkpoint("qwen3_vl"), folder, tmp_path, 2, **more)


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
        (["--video", frame, str(folder / "text.mp4")], "--video: got images together with videos"),
        (["--video", str(folder / "text.mp4")], "no video, truncated"),
        (["--video", frame], "1 frame; a video needs 2 or more"),
        (["--video", frame, frame, "--fps", "0"], "fps: expected a number above 0"),
    ):
        assert cli.main([*asked, *given]) == 2
        assert message in capsys.readouterr().err
