"""Pictures in rows of preferences: wherever a row holds them, they are found and read as in a row with "images"."""

import json

import numpy as np
import pytest
from PIL import Image

from console import called
from deltatune.data.datasets import first_image, load_datasets
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig

pytest.importorskip("mlx_vlm")


def part(name):
    return {"type": "image", "image": name}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


def answer(content):
    return {"role": "assistant", "content": content}


IMAGES = {"images": ["a.png"]}
YES, NO = answer("yes"), answer("no")
BESIDE = {"prompt": [user("what?")], "chosen": [YES], "rejected": [NO], **IMAGES}
PLACED = user([part("a.png"), text("what?")])
SAME = {
    "a part of the prompt": {"prompt": [PLACED], "chosen": [YES], "rejected": [NO]},
    "a part with a path": {
        "prompt": [user([{"type": "image", "path": "a.png"}, text("what?")])], "chosen": [YES], "rejected": [NO],
    },
    "parts everywhere": {"prompt": [PLACED], "chosen": [answer([text("yes")])], "rejected": [answer([text("no")])]},
    "no prompt": {"chosen": [PLACED, YES], "rejected": [PLACED, NO]},
    "a prompt that is a text": {"prompt": "what?", "chosen": [PLACED, YES], "rejected": [PLACED, NO]},
    "a place for the row's own": {
        "prompt": [user([{"type": "image"}, text("what?")])], "chosen": [YES], "rejected": [NO], **IMAGES,
    },
}  # fmt: skip


@pytest.fixture
def read(tmp_path, loaded, processors):
    """read(rows, **options) -> the result of the search for a first image, and the preferences of these rows."""
    draw = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        Image.fromarray(draw.integers(0, 255, (48, 32, 3), dtype=np.uint8)).save(tmp_path / name)

    def read_rows(rows, **options):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = TrainConfig(data=str(tmp_path), batch_size=1, **({"loss": "dpo"} | options))
        found = first_image(config)
        if found is None:
            return None, []
        return found, load_datasets(config, loaded.tokenizer, processors).train

    return read_rows


@pytest.mark.parametrize("where", SAME)
def test_a_picture_in_a_part_is_that_picture_beside_the_messages(where, read):
    _, (beside,) = read([BESIDE])
    found, (one,) = read([SAME[where]])
    assert found.endswith("train.jsonl:1")
    for document, expected in zip(one.documents, beside.documents, strict=True):
        assert document.tokens.tolist() == expected.tokens.tolist()
        assert document.targets.tolist() == expected.targets.tolist()
        assert document.pictures.values == ("a.png",)
        assert document.pictures.digests == expected.pictures.digests
        assert document.pictures.positions.tolist() == expected.pictures.positions.tolist()


def test_the_command_trains_on_a_picture_in_a_part(read, tiny_vision_checkpoint, tmp_path):
    read([SAME["a part of the prompt"]])
    out = tmp_path / "out"
    done = called(
        "train", "--model", tiny_vision_checkpoint("qwen3_vl"), "--data", tmp_path, "--loss", "dpo", "--iters", 1,
        "--batch-size", 1, "--steps-per-report", 1, "--adapter-path", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert first["train_loss"] == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_picture_in_an_answer_is_found(side, read):
    row = {"prompt": [user("what?")], "chosen": [YES], "rejected": [NO]}
    found, (_, one) = read([row, row | {side: [answer([part("a.png"), text("this")])]}])
    assert found.endswith("train.jsonl:2")
    assert [len(document.pictures.values) for document in one.documents] == [side == "chosen", side == "rejected"]


def test_answers_that_differ_in_their_picture_alone_differ(read):
    sides = {name: [user([part(f"{letter}.png")]), YES] for name, letter in (("chosen", "a"), ("rejected", "b"))}
    _, (one,) = read([{"prompt": [{"role": "system", "content": "look"}], **sides}])
    chosen, rejected = one.documents
    assert chosen.tokens.tolist() == rejected.tokens.tolist()
    assert chosen.pictures.digests != rejected.pictures.digests


def test_answers_with_the_same_picture_are_equal(read):
    sides = {name: [user([part("a.png")]), YES] for name in ("chosen", "rejected")}
    with pytest.raises(UserError, match=r"train\.jsonl:1: chosen and rejected are equal"):
        read([{"prompt": [{"role": "system", "content": "look"}], **sides}])


def test_a_loss_that_takes_no_images_refuses_a_part(read):
    row = {"prompt": [PLACED], "completion": [YES], "label": True}
    with pytest.raises(UserError, match=r"train\.jsonl:1: --loss kto does not take images"):
        read([row, row], loss="kto")


def test_texts_in_parts_need_no_vision_tower(read):
    row = {"prompt": [user([text("what?")])], "chosen": [answer([text("yes")])], "rejected": [NO]}
    assert read([row | {"note": 'an "image"'}])[0] is None
