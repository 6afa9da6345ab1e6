"""Pictures show their trays' parts, training has no held-out combination, and the base corpus has no parts list."""

import json
import random
from collections import Counter

import numpy as np
from PIL import Image

import vision_demo_corpus as corpus
from deltatune.demo.vision import task, trays
from deltatune.demo.vision.trays import COMPARTMENT, ROWS, Kind, Tray


def test_a_part_is_drawn_in_its_own_compartment_and_in_its_colour():
    for look, (colour, shape) in enumerate((c, s) for c in trays.COLOURS for s in trays.SHAPES):
        place = look % (ROWS * ROWS)
        parts = tuple((colour, shape) if index == place else None for index in range(ROWS * ROWS))
        pixels = np.asarray(trays.picture(Tray((Kind(colour, shape, 1),), parts, look)), np.int32)
        ground = np.median(pixels.reshape(-1, 3), axis=0)
        different = np.abs(pixels - ground).sum(axis=-1) > 60
        row, column = divmod(place, ROWS)
        inside = np.zeros_like(different)
        inside[row * COMPARTMENT : (row + 1) * COMPARTMENT, column * COMPARTMENT : (column + 1) * COMPARTMENT] = True
        assert different[inside].sum() > 25, (colour, shape)
        assert not different[~inside].any(), (colour, shape)
        middle = np.median(pixels[different], axis=0)
        nearest = min(trays.COLOURS, key=lambda name: np.abs(middle - trays.COLOURS[name]).sum())
        assert nearest == colour


def test_shapes_of_one_colour_are_different_pictures():
    pictures = []
    for shape in trays.SHAPES:
        parts = (("red", shape), *[None] * (ROWS * ROWS - 1))
        pictures.append(np.asarray(trays.picture(Tray((Kind("red", shape, 1),), parts, 7)), np.int32))
    for index, one in enumerate(pictures):
        for other in pictures[index + 1 :]:
            assert (np.abs(one - other).sum(axis=-1) > 100).sum() >= 12


def test_answers_count_what_lies_in_the_tray():
    for tray in task.draw(3, 50, held_out=False):
        counted = Counter(" ".join(part) for part in tray.parts if part)
        assert task.answer(tray) == ", ".join(f"{name} {task.WORDS[counted[name]]}" for name in sorted(counted))


def test_held_out_trays_share_no_picture_and_no_combination_with_training(tmp_path):
    splits = task.write(tmp_path, train=200, valid=8, test=60)
    seen = {kind for item in splits["train"] + splits["valid"] for kind in item.tray.kinds}
    assert all(any(kind not in seen for kind in item.tray.kinds) for item in splits["test"])
    assert not [kind for kind in seen if kind.held_out]
    every = [Kind(c, s, n) for c in trays.COLOURS for s in trays.SHAPES for n in range(1, task.MOST + 1)]
    held_out = [kind for kind in every if kind.held_out]
    assert len(every) / 10 < len(held_out) < len(every) / 7
    # No colour, shape or number is new; only three of them together are.
    for field in ("colour", "shape", "count"):
        assert {getattr(kind, field) for kind in seen} == {getattr(kind, field) for kind in every}
    files = {split: {item.file.read_bytes() for item in items} for split, items in splits.items()}
    assert not files["test"] & (files["train"] | files["valid"])


def test_the_same_seed_gives_the_same_files(tmp_path):
    for folder in ("a", "b"):
        task.write(tmp_path / folder, train=6, valid=2, test=3)
    for file in (tmp_path / "a").rglob("*.*"):
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()
    row = json.loads((tmp_path / "a" / "train.jsonl").read_text().splitlines()[0])
    with Image.open(tmp_path / "a" / row["image"]) as image:
        assert image.size == (trays.SIDE, trays.SIDE)


def test_the_base_corpus_has_no_parts_list():
    rng = random.Random(5)
    texts, lists = [], set()
    for _ in range(500):
        tray = trays.draw(rng, rng.randint(1, 2))
        messages = corpus.conversation(rng, tray) + corpus.seeing(tray)
        texts += [message["content"] for message in messages]
        lists.add(task.answer(tray))
        assert messages[0]["role"] == "user"
    assert any("three" in text for text in texts)
    assert not [text for text in texts if text in lists]


def test_words_of_a_tray():
    tray = Tray((Kind("black", "cross", 2), Kind("red", "circle", 1)), (("black", "cross"),) * 2 + (None,) * 14, 0)
    assert corpus.description(tray) == "two black crosses and one red circle"
    assert corpus.joined(["a"]) == "a"
    assert corpus.joined(["a", "b", "c"]) == "a, b and c"
