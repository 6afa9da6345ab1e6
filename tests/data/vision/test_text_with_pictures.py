"""Rows with images give the processor's own tokens and patches, and each bad row gives one message."""

import copy
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from deltatune.data import BatchOrder
from deltatune.data.datasets import first_image, load_datasets
from deltatune.data.prompts import Question, prompt_tokens
from deltatune.data.vision.media import PromptPictures, media_reader, picture_options
from deltatune.errors import UserError
from deltatune.models.vision.inputs import padded_frames, padded_patches
from deltatune.options.config import TrainConfig
from deltatune.train.setup import vision_processors

IMAGE = 5


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    for index, size in enumerate([(48, 32), (32, 64), (16, 16)]):
        Image.fromarray(draw.integers(0, 255, (*size, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
    return tmp_path


def chat(*images, user="what?", answer="an answer", **more):
    return (
        {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}
        | ({"images": list(images)} if images else {})
        | more
    )


def parts(*kinds):
    return [{"type": "image", "image": kind} if kind else {"type": "text", "text": "see"} for kind in kinds]


@pytest.mark.parametrize(
    ("row", "images"),
    [
        (chat("0.png", "1.png", user="a <image> and <image> b"), ["0.png", "1.png"]),
        (chat("0.png"), ["0.png"]),
        (chat(user=parts("1.png", None, "2.png")), ["1.png", "2.png"]),
        (chat("2.png", user=[{"type": "text", "text": "x"}, {"type": "image"}]), ["2.png"]),
        (chat(image="1.png"), ["1.png"]),
        ({"prompt": "<image>?", "completion": "yes", "image": "0.png"}, ["0.png"]),
        ({"image": "0.png", "caption": "a cat"}, ["0.png"]),
        (chat(), []),
    ],
)
def test_tokens_and_patches_are_the_processors_own(write, read, folder, loaded, row, images):
    write(row)
    (example,) = read().train
    marked = example.tokens.copy()
    # The processor expands the template's single image tokens itself.
    single = loaded.tokenizer.decode([t for i, t in enumerate(marked) if t != IMAGE or marked[i - 1] != IMAGE])
    opened = [Image.open(folder / name) for name in images]
    expected = loaded.processor(text=[single], images=opened or None)
    assert example.tokens.tolist() == np.asarray(expected["input_ids"])[0].tolist()
    assert not example.targets[example.tokens == IMAGE].any()
    assert example.targets.any()
    (whole,) = read(mask_prompt=False).train
    assert (whole.targets[1:] == (whole.tokens[1:] != IMAGE)).all()
    batch = next(BatchOrder([example], 1, 2048))
    if images:
        held = zip(batch.images.patches, example.pictures.grids, strict=True)
        patches = np.concatenate([patches[: np.prod(grid)] for patches, grid in held])
        np.testing.assert_array_equal(patches, np.asarray(expected["pixel_values"]))
    else:
        assert batch.images.patches.shape[0] == 0


def test_a_caption_is_the_answer_to_an_image_alone(write, read):
    write({"image": "0.png", "caption": "a cat"}, chat("0.png", user="", answer="a cat"))
    caption, row = read().train
    assert caption.tokens.tolist() == row.tokens.tolist()
    assert caption.targets.tolist() == row.targets.tolist()


@pytest.mark.parametrize("as_bytes", [True, False])
def test_images_of_a_data_set_are_read_as_they_come(folder, processors, as_bytes):
    from deltatune.data.vision.images import ImageReader

    reader = ImageReader(processors.processor, folder, {})
    image = Image.open(folder / "0.png")
    content = io.BytesIO()
    image.save(content, "PNG")
    value = {"bytes": content.getvalue(), "path": None} if as_bytes else image
    picture = reader.picture(value, "row 0")
    assert picture.grid == reader.picture("0.png", "row 0").grid
    np.testing.assert_array_equal(picture.patches, reader.picture("0.png", "row 0").patches)
    assert len(reader.digest(value, "row 0")) == 16


def test_parts_that_the_template_does_not_write_are_noted(write, read):
    row = chat("0.png", user="a <image> b", tools=[{"type": "function", "function": {"name": "find"}}])
    row["messages"][0]["name"] = "b"
    write(row, chat("1.png"))
    notes = read().notes
    for unwritten in ("1 message has a name, which", "1 row has 'tools', which"):
        assert any(f"{unwritten} the model's chat template" in note for note in notes), notes


def bad(name, content):
    def make(folder):
        (folder / name).write_bytes(content)
        return chat(name)

    return make


def truncated(folder):
    whole = (folder / "0.png").read_bytes()
    return bad("cut.png", whole[: len(whole) // 2])(folder)


def sixteen_bit(folder):
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(folder / "deep.png")
    return chat("deep.png")


def narrow(folder):
    Image.new("RGB", (2000, 4)).save(folder / "thin.png")
    return chat("thin.png")


BAD = {
    "truncated": (truncated, "cut.png: truncated or damaged"),
    "not an image": (bad("text.png", b"no image"), "text.png: not an image"),
    "mode": (sixteen_bit, "deep.png: of mode 'I;16'"),
    "shape": (narrow, "the model's image processor refuses it"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_one_message_with_file_and_line(folder, refusal, case):
    row, message = BAD[case]
    assert message in refusal(chat(), row(folder))


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": chat(user=parts("0.png", None))["messages"]},
        {"conversations": [{"from": "human", "value": parts("0.png", None)}, {"from": "gpt", "value": "an answer"}]},
        {"messages": json.dumps(chat(user=parts("0.png", None))["messages"])},
    ],
    ids=["conversations", "ShareGPT", "JSON in a string"],
)
def test_a_part_is_found_wherever_messages_are_read(write, read, folder, row):
    write(chat(user=parts("0.png", None)))
    (expected,) = read().train
    write(row)
    assert first_image(TrainConfig(data=str(folder))) == f"{folder / 'train.jsonl'}:1"
    (example,) = read().train
    assert example.tokens.tolist() == expected.tokens.tolist()
    assert example.pictures.digests == expected.pictures.digests


def test_packing_is_refused(write, read):
    write(chat("0.png"))
    with pytest.raises(UserError, match="rows with images are not packed"):
        read(pack=True)


def test_shapes_come_again(processors):
    assert [padded_frames(count) for count in (0, 1, 3, 4, 5, 9, 17, 100)] == [0, 1, 3, 4, 6, 12, 24, 128]
    sizes = {padded_patches(count, processors.spec) for count in range(1, 16384)}
    assert len(sizes) < 60
    assert all(padded_patches(count, processors.spec) >= count for count in range(1, 16384))
    assert all(padded_patches(count, processors.spec) <= 1.26 * count for count in range(512, 16384))


def test_each_row_of_a_conversation_that_takes_several_has_the_images_of_its_messages(write, read, loaded, monkeypatch):
    inner = loaded.tokenizer._tokenizer
    # The reasoning of an answer is dropped once another message follows.
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.role == 'assistant' and loop.last %}{{ message.reasoning_content }}{% endif %}"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
        "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    monkeypatch.setattr(inner, "chat_template", template)
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "so "}
    asked = [
        {"role": "user", "content": "<image> a?"},
        answer,
        {"role": "user", "content": "<image><image> b?"},
        answer,
    ]
    write({"messages": asked, "images": ["0.png", "1.png", "2.png"]})
    first, second = read().train
    assert [len(example.pictures.values) for example in (first, second)] == [1, 3]
    assert first.pictures.values == ("0.png",)
    for example in (first, second):
        assert inner.decode(example.tokens[example.targets]) == "so yes<|im_end|>\n"
        assert len(example.pictures.grids) == len(example.pictures.digests) == len(example.pictures.values)
        assert example.pictures.positions.shape == (3, len(example.tokens))


QUESTION = "what is it?"


@pytest.fixture(scope="module")
def tray(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        Image.fromarray(draw.integers(0, 255, (64, 64, 4), dtype=np.uint8)).save(path / name)
    row = {"prompt": QUESTION, "completion": "a tray", "images": ["a.png", "b.png"]}
    for name in ("train", "valid", "test"):
        (path / f"{name}.jsonl").write_text(json.dumps(row))
    return path


@pytest.mark.parametrize("limits", [{}, {"max_pixels": 1024}, {"min_pixels": 6000, "max_pixels": 9000}])
def test_a_prompt_has_the_tokens_and_patches_of_a_training_row(tray, loaded, limits):
    config = TrainConfig(data=str(tray), batch_size=1, **limits)
    (example,) = load_datasets(config, loaded.tokenizer, vision_processors(loaded)).train
    processors = vision_processors(loaded)
    reader = media_reader(processors, tray, picture_options(limits, None))
    pictures = PromptPictures.read(["a.png", "b.png"], "--image", reader, processors.spec, loaded.tokenizer)
    tokens = pictures.placed(prompt_tokens(loaded.tokenizer, Question(QUESTION, images=2)), "--prompt")
    assert tokens == example.tokens[: len(tokens)].tolist()
    assert not example.targets[: len(tokens)].any()
    assert example.targets[len(tokens)]
    batch = next(BatchOrder([example], 1, 2048)).images
    for held, picture in zip(batch.patches, pictures.images, strict=True):
        np.testing.assert_array_equal(held[: len(picture.patches)], picture.patches)


def test_the_limits_of_training_hold_for_an_evaluation(run, tiny_vision_checkpoint, tray, tmp_path):
    model = tiny_vision_checkpoint("qwen3_vl")
    flags = ["--model", model, "--data", tray, "--batch-size", 1]
    adapter = tmp_path / "adapter"
    trained = ["--iters", 1, "--max-pixels", 1024, "--learning-rate", 0.01]
    assert run("train", *flags, *trained, "--adapter-path", adapter)[0] == 0

    def loss(*more):
        code, out, err = run("eval", *flags, "--adapter-path", adapter, *more)
        assert code == 0, err
        return out.splitlines()[-1]

    assert loss() == loss("--max-pixels", 1024) != loss("--max-pixels", 4096)


@pytest.mark.bad_input("`generate` on an image that cannot be read")
def test_a_damaged_image_of_a_prompt_is_named(complaint, tiny_vision_checkpoint, tray, tmp_path):
    damaged = tmp_path / "cut.png"
    damaged.write_bytes((tray / "a.png").read_bytes()[:400])
    flags = ["--model", tiny_vision_checkpoint("qwen3_vl"), "--prompt", QUESTION, "--image", tray / "a.png", damaged]
    assert f"--image: image {damaged}: truncated or damaged" in complaint("generate", *flags)


@pytest.mark.bad_input("a processor that cuts other patches than the vision tower takes")
@pytest.mark.parametrize("name", ["patch_size", "temporal_patch_size", "merge_size"])
def test_a_processor_of_another_model_is_refused(loaded, tray, name):
    processors = vision_processors(loaded)
    other = copy.copy(processors.processor)
    setattr(other, name, 7)
    with pytest.raises(UserError, match=f"the model's processor has {name} 7, and its vision tower"):
        media_reader(replace(processors, processor=other), tray, {})
