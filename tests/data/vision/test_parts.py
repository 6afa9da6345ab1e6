"""Parts of messages and columns with images: every common way to write one, and keys that are not read."""

import base64
import csv
import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from deltatune.data import BatchOrder
from deltatune.data.datasets import load_datasets
from deltatune.data.rows.row_formats import Features, RowFormats, join_text_parts
from deltatune.data.vision.images import image_file, resized
from deltatune.data.vision.messages import place_media
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig

IMAGE = 5
ANSWER = {"role": "assistant", "content": "an answer"}


def encoded(seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 56, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


CONTENT = encoded(0)
TEXT = base64.b64encode(CONTENT).decode()
URL = f"data:image/png;base64,{TEXT}"


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "the data"
    place.mkdir()
    (place / "a.png").write_bytes(CONTENT)
    (place / "b.png").write_bytes(encoded(1))
    return place


def chat(content, **more):
    return {"messages": [{"role": "user", "content": content}, ANSWER], **more}


def parts(**keys):
    return chat([{"type": "image", **keys}, {"type": "text", "text": "what?"}])


# Each stands for a.png before "what?". FOLDER is the data's folder, and QUOTED the same as in a URL.
WAYS = {
    "a file's URL": parts(image="file://FOLDER/a.png"),
    "a file's URL with %20": parts(image="file://QUOTED/a.png"),
    "a file's URL of this host": parts(url="file://localhostQUOTED/a.png"),
    "base64 behind data:": parts(image=URL),
    "Qwen's base64": parts(image=f"data:image;base64,{TEXT}"),
    "a part's url": parts(url="a.png"),
    "a part's path": parts(path="a.png", url=None),
    "a part's base64": parts(base64=TEXT),
    "bare base64": parts(image=TEXT),
    "OpenAI's": chat(
        [{"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}, {"type": "text", "text": "what?"}]
    ),
    "empty keys": parts(image="a.png", text="", min_pixels=None, detail=[]),
    "a column of base64": chat("what?", images=[URL]),
    "a column of objects": chat("what?", images=[{"bytes": TEXT, "path": None}]),
    "a column of URLs": chat("what?", image={"url": "file://FOLDER/a.png"}),
    "a list in the singular": chat("what?", image=["a.png"]),
}


def test_an_image_is_read_however_it_is_written(write, read, folder):
    path = str(folder)
    ways = json.loads(json.dumps(WAYS).replace("FOLDER", path).replace("QUOTED", path.replace(" ", "%20")))
    write(parts(image="a.png"), *ways.values())
    expected, *examples = read().train
    for way, example in zip(ways, examples, strict=True):
        assert example.tokens.tolist() == expected.tokens.tolist(), way
        assert example.pictures.digests == expected.pictures.digests, way


def test_several_images_in_the_singular_are_several(write, read):
    write(chat("<image>and<image>", images=["a.png", "b.png"]), chat("<image>and<image>", image=["a.png", "b.png"]))
    first, second = read().train
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.pictures.digests == second.pictures.digests
    assert len(first.pictures.values) == 2


@pytest.mark.parametrize("several", [False, True])
def test_binary_columns_are_read(several, tmp_path, loaded, processors):
    value = [CONTENT, CONTENT] if several else CONTENT
    rows = {"prompt": ["a"], "completion": ["b"], "images" if several else "image": [value]}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "train.parquet"))
    (example,) = load_datasets(TrainConfig(data=str(tmp_path), batch_size=1), loaded.tokenizer, processors).train
    assert len(example.pictures.values) == 1 + several


def test_a_list_in_a_cell_of_csv_is_read(tmp_path, folder, loaded, processors):
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion", "images"], ["a", "b", '["a.png", "b.png"]']])
    (example,) = load_datasets(TrainConfig(data=str(folder), batch_size=1), loaded.tokenizer, processors).train
    assert len(example.pictures.values) == 2


NOT_READ = {
    "Anthropic's source": (parts(source={"type": "base64", "data": TEXT}), "unknown key 'source'"),
    "damaged base64": (parts(base64=TEXT[:60] + "!" + TEXT[61:]), "expected bytes in base64"),
    "base64 of no image": (parts(image=base64.b64encode(b"no image " * 9).decode()), "no such file"),
    "a video in base64": (chat([{"type": "video", "video": f"data:video/mp4;base64,{TEXT}"}]), "reads no videos"),
}  # fmt: skip


@pytest.mark.bad_input("a part or column with an image: {case}")
@pytest.mark.parametrize("case", NOT_READ)
def test_unread_message_part_is_refused_by_name(case, refusal):
    row, message = NOT_READ[case]
    text = refusal(parts(image="a.png"), row)
    assert message in text
    assert TEXT[:80] not in text
    assert len(text) < 600


@pytest.mark.bad_input("an unknown key in a part with text, for a model of text")
def test_an_unknown_key_is_refused_without_a_vision_tower_too():
    content = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    with pytest.raises(UserError, match="x:1: message 1: a part with text: unknown key 'cache_control'"):
        join_text_parts([{"role": "user", "content": content}], "x:1")


def test_no_message_prints_what_may_be_base64(tmp_path):
    for value in (TEXT[:-9] + "." * 9, "/" + TEXT * 20, TEXT[:300].replace("+", "-")):
        with pytest.raises(UserError) as caught:
            image_file(value, tmp_path, "x:1")
        assert len(str(caught.value)) < 400


# height, width, options, and the rows and columns of tokens, worked out by hand from the rule in qwen_vl_utils' source.
SIZES = [
    (40, 56, {"max_pixels": 1024}, (1, 2)),
    (128, 128, {"max_pixels": 1024}, (2, 2)),
    (40, 56, {"min_pixels": 6000}, (5, 6)),
    (40, 56, {"resized_height": 96, "resized_width": 33}, (6, 2)),
    (40, 56, {"resized_height": 8, "resized_width": 8, "max_pixels": 4096, "min_pixels": 4096}, (2, 2)),
    (40, 56, {"max_pixels": 9_999_999}, (2, 4)),
    (10, 10, {"max_pixels": 4096}, (2, 2)),
]


@pytest.mark.parametrize(("height", "width", "options", "tokens"), SIZES)
def test_sizes_follow_the_rule_of_qwens_own_library(height, width, options, tokens):
    assert resized(height, width, options, 16) == tuple(16 * side for side in tokens)


def test_an_image_has_the_size_that_its_row_asks_for(write, read, folder):
    Image.open(io.BytesIO(CONTENT)).resize((32, 96)).save(folder / "c.png")
    write(parts(image="c.png"), parts(image="a.png", resized_height=96, resized_width=33), parts(image="a.png"))
    by_hand, asked, plain = read(min_pixels=256, max_pixels=9000).train
    assert asked.pictures.grids == by_hand.pictures.grids != plain.pictures.grids
    assert asked.tokens.tolist() == by_hand.tokens.tolist()
    batches = [next(BatchOrder([example], 1, 2048)).images.patches for example in (by_hand, asked)]
    np.testing.assert_array_equal(*batches)


@pytest.mark.bad_input("a picture that gets another size while the run goes on")
@pytest.mark.parametrize("kind", ["image", "images"])
def test_a_picture_that_changes_its_size_is_named(kind, folder, write, read):
    write(chat("what?", **{kind: ["a.png"]}))
    examples = read().train
    Image.new("RGB", (96, 96)).save(folder / "a.png")
    with pytest.raises(UserError, match=r"^.*train.jsonl:1: image a.png: its size has changed since the run began: "):
        next(BatchOrder(examples, 1, 2048))
    (folder / "a.png").unlink()
    with pytest.raises(UserError, match=r"^.*train.jsonl:1: image a.png: no such file"):
        next(BatchOrder(examples, 1, 2048))


DRAWN = "<svg><image></svg>"


def said(*contents):
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def placed(messages, images=(), videos=()):
    messages, _ = place_media(messages, {"images": list(images), "videos": list(videos)}, "x:1")
    contents = [message["content"] for message in messages]
    return [
        content if isinstance(content, str) else "".join(part.get("text", f"[{part['type']}]") for part in content)
        for content in contents
    ]


PLACED = {
    "an answer": (said("draw", DRAWN), ["a"], [], ["[image]draw", DRAWN]),
    "an answer beside a mark": (said("<image>draw", DRAWN), ["a"], [], ["[image]draw", DRAWN]),
    "no image": (said("what is <image> in SVG?", DRAWN), [], [], ["what is <image> in SVG?", DRAWN]),
    "one mark too many": (said("<image> and the tag <image>", "a"), ["a"], [], ["[image] and the tag <image>", "a"]),
    "a later turn": (said("<image>", "a", "<image>", "b"), ["a"], [], ["[image]", "a", "<image>", "b"]),
    "a mark of another kind": (said("<video> <image>", "a"), ["a"], [], ["<video> [image]", "a"]),
    "both kinds": (said("<video> <image>", "a"), ["a"], ["v"], ["[video] [image]", "a"]),
    "a part and a mark": (
        said("<image>", "a", [{"type": "image"}, {"type": "text", "text": "<image>"}], "b"),
        ["a"], [], ["<image>", "a", "[image]<image>", "b"],
    ),
    "parts with files": (
        said([{"type": "image", "image": "a"}, {"type": "text", "text": "<image>"}], "b", "<image>", "c"),
        [], [], ["[image]<image>", "b", "<image>", "c"],
    ),
    "a part of text": (said([{"type": "text", "text": "a<image>"}], "b"), ["a"], [], ["a[image]", "b"]),
    "a system's": (
        [{"role": "system", "content": "<image> is a tag"}, *said("see <image>", "a")],
        ["a"], [], ["<image> is a tag", "see [image]", "a"],
    ),
    "a tool's": (
        [*said("<image>?", "a"), {"role": "tool", "content": "<image>"}], ["a"], [], ["[image]?", "a", "<image>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACED)
def test_a_mark_in_a_users_turn_is_a_place_for_the_next_picture(case):
    messages, images, videos, expected = PLACED[case]
    assert placed(messages, images, videos) == expected


def test_an_answer_is_learnt_letter_for_letter(write, read, loaded):
    write({"messages": said("<image>Draw a <image>.", DRAWN), "images": ["a.png"]})
    splits = read()
    (example,) = splits.train
    assert loaded.tokenizer.decode(example.tokens[example.targets].tolist()).startswith(DRAWN)
    assert int(np.diff(example.tokens == IMAGE, prepend=False).sum()) == 2
    assert "Draw a <image>." in loaded.tokenizer.decode(example.tokens.tolist())
    assert any("1 row has <image> or <video> in a text, and no image or video left" in one for one in splits.notes)


OBJECTS = {"ref": ["a dog"], "bbox": [[1, 2, 3, 4]]}


def test_the_same_words_without_their_columns_are_text():
    empty = {"objects": {"ref": [], "bbox": [], "bbox_type": None}, "audios": []}
    for more in ({}, empty):
        formats = RowFormats(Features())
        messages = formats.messages({"messages": said("<audio><bbox>", "<ref-object>"), **more}, "x:1")
        assert [message["content"] for message in messages] == ["<audio><bbox>", "<ref-object>"]
        assert not formats.unread


@pytest.mark.parametrize(
    "column", [{"objects": OBJECTS}, {"rejected_response": "no"}, {"documents": [{"title": "a"}]}, {"max_pixels": 9}]
)
def test_columns_of_other_formats_are_counted(column):
    formats = RowFormats(Features())
    formats.messages({"messages": said("a", "b"), **column}, "x:1")
    assert dict(formats.unread) == dict.fromkeys(column, 1)
