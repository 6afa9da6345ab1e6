"""Vision models are asked during training as `generate` asks them, and a merge carries how pictures were prepared."""

import base64
import dataclasses
import io
import json
import re

import mlx.core as mx
import pytest
from PIL import Image

from console import called
from deltatune.commands.generate import GenerateOptions, generate
from deltatune.data.vision.media import media_reader
from deltatune.errors import UserError
from deltatune.models.checkpoint_writer import TrainedCheckpoint, merge_checkpoint
from deltatune.models.load import load
from deltatune.options.config import TrainConfig
from deltatune.train import setup
from deltatune.train.evaluation.samples import Samples
from vision_runs import options

pytest.importorskip("mlx_vlm")

# Of the 96 x 96 pixels of a picture, these leave 32 x 32.
LIMIT = 1024


@pytest.fixture(scope="module")
def model(tiny_vision_checkpoint):
    return tiny_vision_checkpoint("qwen3_vl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows with a picture, and prompts in a folder of their own, with pictures beside them."""
    path = tmp_path_factory.mktemp("pictures")
    (path / "asked").mkdir()
    rows = []
    for number, colour in enumerate(["red", "green", "blue"] * 2):
        Image.new("RGB", (96, 96), colour).save(path / f"{number}.png")
        turns = [{"role": "user", "content": "<image>which?"}, {"role": "assistant", "content": colour}]
        rows.append({"messages": turns, "images": [f"{number}.png"]})
    for split in ("train", "valid"):
        (path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Image.new("RGB", (96, 96), "green").save(path / "asked" / "own.png")
    asked = [{"messages": rows[1]["messages"], "image": "own.png"}, {"image": "own.png", "caption": "green"}]
    (path / "asked" / "prompts.jsonl").write_text("\n".join(map(json.dumps, asked)))
    return path


@pytest.fixture(scope="module")
def runs(model, folder, tmp_path_factory):
    """The folder of a run with samples, and that of one without."""
    target = tmp_path_factory.mktemp("runs")
    prompts = ["--sample-prompts", "why", str(folder / "asked" / "prompts.jsonl")]
    for name, asked in (("sampled", [*prompts, "--steps-per-eval", "1"]), ("plain", [])):
        flags = options(model, folder, target / name, iters=3, dropout=0.2, **{"max-pixels": LIMIT})
        done = called("train", *flags, *asked)
        assert done.returncode == 0, done.stderr
    return target / "sampled", target / "plain"


def test_samples_are_what_generate_answers_and_change_no_bit(model, folder, runs):
    sampled = runs[0]
    weights = [mx.load(str(run / "adapters.safetensors")) for run in runs]
    assert weights[0].keys() == weights[1].keys()
    assert all(mx.array_equal(value, weights[1][name]) for name, value in weights[0].items())
    records = [json.loads(line) for line in (sampled / "metrics.jsonl").read_text().splitlines()]
    samples = {record["iteration"]: record["samples"] for record in records if "samples" in record}
    assert sorted(samples) == [0, 1, 2, 3]
    base = {"max_tokens": 100, "adapter_path": str(sampled), "verbose": False}
    own = (str(folder / "asked" / "own.png"),)
    asked = [("why", ()), ("<image>which?", own), ("<image>", own)]
    for sample, (shown, images) in zip(samples[3], asked, strict=True):
        prompt = shown.removeprefix("<image>")
        # mlx-vlm leaves out bytes that are no text, and mlx-lm, which answers without pictures, has a mark for them.
        answer = generate(GenerateOptions(str(model), prompt, image=images, **base)).replace("\ufffd", "")
        expected = {"expected": "green"} if shown.startswith("<") else {}
        assert sample == {"prompt": shown, "answer": answer, **expected}
    picture, _ = re.findall('<img alt="" src="data:image/jpeg;base64,(.*?)">', (sampled / "report.html").read_text())
    pixel = Image.open(io.BytesIO(base64.b64decode(picture))).getpixel((5, 5))
    assert pixel == pytest.approx((0, 128, 0), abs=4)


def test_an_answer_to_pictures_ends_at_the_tokens_that_are_given(model, folder, runs):
    image = (str(folder / "asked" / "own.png"),)
    asked = GenerateOptions(str(model), "which?", image=image, adapter_path=str(runs[0]), max_tokens=6, verbose=False)
    loaded = load(model, image="a test")
    answer = generate(asked)
    first = loaded.tokenizer.encode(answer)[0]
    assert generate(dataclasses.replace(asked, extra_eos_token=(str(first),))) == ""
    # The tokenizer of another answer is as it was.
    assert generate(asked) == answer


def grids(path, folder, **limits):
    loaded = load(path, image="a test")
    reader = media_reader(setup.vision_processors(loaded), folder, limits)
    return reader.read("0.png", "a test")[1].grid


def test_merged_and_whole_models_prepare_pictures_as_in_training(model, folder, runs, tmp_path):
    expected = grids(model, folder, max_pixels=LIMIT)
    assert grids(model, folder) != expected
    done = called("merge", "--model", model, "--adapter-path", runs[0], "--save-path", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    assert f"The processor's files say how pictures were prepared in training: max_pixels {LIMIT}." in done.stdout
    assert grids(tmp_path / "merged", folder) == expected
    size = json.loads((tmp_path / "merged" / "preprocessor_config.json").read_text())["size"]
    assert size == {"shortest_edge": 256, "longest_edge": LIMIT}
    # Videos were read by the same file, whose limit is one of all frames together.
    videos = json.loads((tmp_path / "merged" / "video_preprocessor_config.json").read_text())
    assert videos["size"] == json.loads((model / "preprocessor_config.json").read_text())["size"]
    whole = TrainedCheckpoint(load(model, image="a test").model, model)
    whole.write(tmp_path / "whole", dataclasses.asdict(TrainConfig(min_pixels=900, max_pixels=LIMIT, fps=1.5)))
    assert grids(tmp_path / "whole", folder) == expected
    assert json.loads((tmp_path / "whole" / "video_preprocessor_config.json").read_text())["fps"] == 1.5
    # A run with the base's own limits leaves the files as they were.
    plain = json.loads((runs[1] / "adapter_config.json").read_text()) | {"max_pixels": None}
    (runs[1] / "adapter_config.json").write_text(json.dumps(plain))
    assert merge_checkpoint(model, runs[1], tmp_path / "own").pictures is None
    assert not (tmp_path / "own" / "video_preprocessor_config.json").exists()


@pytest.mark.parametrize("nested", [False, True])
def test_each_form_of_the_processors_files(tmp_path, nested):
    from deltatune.models.checkpoint_writer import write_picture_options

    old = {"patch_size": 8, "min_pixels": 5, "max_pixels": 900}
    if nested:
        content = {
            "image_processor": {"size": {"shortest_edge": 5, "longest_edge": 900}},
            "video_processor": {"fps": 2},
        }
        (tmp_path / "processor_config.json").write_text(json.dumps(content))
    else:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    said = write_picture_options(tmp_path, {"max_pixels": 64, "min_pixels": None, "video_max_frames": 8, "fps": 1.0})
    assert said.endswith("in training: max_pixels 64, fps 1.0, video_max_frames 8.")
    if nested:
        assert json.loads((tmp_path / "processor_config.json").read_text()) == {
            "image_processor": {"size": {"shortest_edge": 5, "longest_edge": 64}},
            "video_processor": {"fps": 1.0, "max_frames": 8},
        }
    else:
        assert json.loads((tmp_path / "preprocessor_config.json").read_text()) == old | {"max_pixels": 64}
        assert [path.name for path in tmp_path.iterdir()] == ["preprocessor_config.json"]


@pytest.mark.bad_input(
    "`sample_prompts`: pictures for a model without a vision tower, or a vision model's processor left out"
)
def test_pictures_need_a_vision_tower(model, folder, checkpoint):
    config = TrainConfig(sample_prompts=[str(folder / "asked" / "prompts.jsonl")])
    text = load(checkpoint)
    with pytest.raises(UserError, match=r"prompts.jsonl:1: images in a prompt, and none in the training data"):
        Samples(text, config)
    vision = load(model, image="a test")
    with pytest.raises(UserError, match=r"give the Trainer processor=loaded\.processor"):
        Samples(dataclasses.replace(vision, processor=None), config)
