"""Marks for media in a text: which of them are places, which are text, and which stand for something that is lost."""

import numpy as np
import pytest
from PIL import Image

from deltatune.data.rows.row_formats import Features, RowFormats
from deltatune.data.vision.messages import place_media
from deltatune.errors import UserError

pytest.importorskip("mlx_vlm")

IMAGE = 5
DRAWN = "<svg><image></svg>"


@pytest.fixture
def folder(tmp_path):
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    return tmp_path


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
LOST = {
    "a box": ({"messages": said("<image>find", "at <bbox>"), "images": ["a"], "objects": OBJECTS}, "2: <bbox> stands"),
    "a name": ({"messages": said("find <ref-object>", "x"), "objects": OBJECTS}, "message 1: <ref-object> stands"),
    "a sound": ({"messages": said("<audio>say", "x"), "audios": ["a.wav"]}, "message 1: <audio> stands for a value of"),
    "a box in a part": (
        {"messages": said([{"type": "text", "text": "<bbox>?"}], "x"), "objects": OBJECTS}, "1: <bbox> stands",
    ),
    "a box of a pair of texts": ({"prompt": "<bbox>", "completion": "x", "objects": OBJECTS}, "1: <bbox> stands"),
    "a box of ShareGPT": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "<bbox>"}], "objects": OBJECTS},
        "message 2: <bbox> stands",
    ),
}  # fmt: skip


@pytest.mark.bad_input("a mark in a text for a value that is not read: {case}")
@pytest.mark.parametrize("case", LOST)
def test_a_mark_for_an_unread_column_is_refused(case):
    row, message = LOST[case]
    with pytest.raises(UserError) as caught:
        RowFormats(Features()).messages(row, "x:1")
    assert message in str(caught.value)


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
