"""A prompt's pictures become the tokens and patches of the same pictures in a training row."""

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from console import called
from deltatune.data import BatchOrder
from deltatune.data.datasets import load_datasets
from deltatune.data.prompts import Question, prompt_tokens
from deltatune.data.vision.media import PromptPictures, media_reader, picture_options
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.setup import vision_processors

pytest.importorskip("mlx_vlm")

QUESTION = "what is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        Image.fromarray(draw.integers(0, 255, (64, 64, 4), dtype=np.uint8)).save(path / name)
    row = {"prompt": QUESTION, "completion": "a tray", "images": ["a.png", "b.png"]}
    for name in ("train", "valid", "test"):
        (path / f"{name}.jsonl").write_text(json.dumps(row))
    return path


@pytest.mark.parametrize("limits", [{}, {"max_pixels": 1024}, {"min_pixels": 6000, "max_pixels": 9000}])
def test_a_prompt_has_the_tokens_and_patches_of_a_training_row(folder, loaded, limits):
    config = TrainConfig(data=str(folder), batch_size=1, **limits)
    (example,) = load_datasets(config, loaded.tokenizer, vision_processors(loaded)).train
    processors = vision_processors(loaded)
    reader = media_reader(processors, folder, picture_options(limits, None))
    pictures = PromptPictures.read(["a.png", "b.png"], "--image", reader, processors.spec, loaded.tokenizer)
    tokens = pictures.placed(prompt_tokens(loaded.tokenizer, Question(QUESTION, images=2)), "--prompt")
    assert tokens == example.tokens[: len(tokens)].tolist()
    assert not example.targets[: len(tokens)].any()
    assert example.targets[len(tokens)]
    batch = next(BatchOrder([example], 1, 2048)).images
    for held, picture in zip(batch.patches, pictures.images, strict=True):
        np.testing.assert_array_equal(held[: len(picture.patches)], picture.patches)


def counted(printed):
    return int(re.search(r"\[(\d+) prompt tokens", printed)[1])


def test_the_limits_of_training_hold_for_generation_and_evaluation(run, tiny_vision_checkpoint, folder, tmp_path):
    model = tiny_vision_checkpoint("qwen3_vl")
    flags = ["--model", model, "--data", folder, "--batch-size", 1]
    adapter = tmp_path / "adapter"
    trained = ["--iters", 1, "--max-pixels", 1024, "--learning-rate", 0.01]
    assert run("train", *flags, *trained, "--adapter-path", adapter)[0] == 0
    asked = ["generate", "--model", model, "--prompt", QUESTION, "--image", folder / "a.png", "--max-tokens", 1]
    done = called(*asked, "--adapter-path", adapter)
    assert done.returncode == 0, done.stderr
    limited, whole = counted(run(*asked, "--max-pixels", 1024)[1]), counted(run(*asked)[1])
    assert counted(done.stdout) == limited == whole - 12

    def loss(*more):
        code, out, err = run("eval", *flags, "--adapter-path", adapter, *more)
        assert code == 0, err
        return out.splitlines()[-1]

    assert loss() == loss("--max-pixels", 1024) != loss("--max-pixels", 4096)


@pytest.mark.bad_input("`generate` on an image that cannot be read")
def test_a_damaged_image_of_a_prompt_is_named(run, tiny_vision_checkpoint, folder, tmp_path):
    damaged = tmp_path / "cut.png"
    damaged.write_bytes((folder / "a.png").read_bytes()[:400])
    flags = ["--model", tiny_vision_checkpoint("qwen3_vl"), "--prompt", QUESTION, "--image", folder / "a.png", damaged]
    code, _, error = run("generate", *flags)
    assert (code, error.count("\n")) == (2, 1)
    assert f"--image: image {damaged}: truncated or damaged" in error


@pytest.mark.bad_input("a processor that cuts other patches than the vision tower takes")
@pytest.mark.parametrize("name", ["patch_size", "temporal_patch_size", "merge_size"])
def test_a_processor_of_another_model_is_refused(loaded, folder, name):
    processors = vision_processors(loaded)
    other = copy.copy(processors.processor)
    setattr(other, name, 7)
    with pytest.raises(UserError, match=f"the model's processor has {name} 7, and its vision tower"):
        media_reader(replace(processors, processor=other), folder, {})
