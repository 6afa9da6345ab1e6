"""Rows of TRL's preference formats: their tokens, their target tokens, and refusals."""

import json

import numpy as np
import pytest
from PIL import Image

from added_ends import with_first_token
from console import called
from deltatune.data import BatchOrder
from deltatune.data.batches.batch import row_capacity
from deltatune.data.datasets import first_image, load_datasets
from deltatune.errors import UserError
from deltatune.models.load import load
from deltatune.options.config import TrainConfig

QUESTION, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "the dog"), ("assistant", "yes"), ("assistant", "no"))
)


@pytest.fixture
def read(folder, tokenizer):
    """read(rows, loss="dpo", **options) -> the preferences of these rows, and the notes."""

    def load(rows, loss="dpo", **options):
        splits = load_datasets(folder(train=rows, loss=loss, **options), tokenizer)
        return list(splits.train), splits.notes

    return load


def answers(tokenizer, preference):
    """The text of each document, with target tokens in brackets."""
    texts = []
    for document in preference.documents:
        start = int(np.argmax(document.targets))
        assert document.targets[start:].all()
        texts.append((tokenizer.decode(document.tokens[:start]), tokenizer.decode(document.tokens[start:])))
    return texts


def test_texts_have_their_prompt_and_the_end_token(read, tokenizer):
    (one,), _ = read([{"prompt": "the dog", "chosen": " jumps", "rejected": " sleeps"}])
    assert answers(tokenizer, one) == [("the dog", " jumps<|im_end|>"), ("the dog", " sleeps<|im_end|>")]
    assert one.source.endswith("train.jsonl:1")


def test_a_tokenizer_that_adds_an_end_gives_the_same_pairs(folder, tiny_checkpoint, tmp_path):
    rows = [{"prompt": "the dog", "chosen": " jumps", "rejected": " sleeps"}, {"chosen": "a b", "rejected": "a c"}]
    pairs = []
    for behind in (False, True):
        target = with_first_token(tiny_checkpoint("qwen3_5"), tmp_path / str(behind), before=True, behind=behind)
        loaded = load(target).tokenizer
        train = load_datasets(folder(train=rows, loss="dpo"), loaded).train
        pairs.append([[one.tokens.tolist() for one in pair.documents] for pair in train])
    assert pairs[0] == pairs[1]


def test_the_prompt_of_texts_is_their_longest_common_beginning_in_tokens(read, tokenizer):
    (one,), _ = read([{"chosen": "the dog jumps over", "rejected": "the dog sleeps"}])
    (shared, chosen), (other, rejected) = answers(tokenizer, one)
    assert shared == other
    assert shared.startswith("the dog")
    assert (shared + chosen, shared + rejected) == ("the dog jumps over<|im_end|>", "the dog sleeps<|im_end|>")
    start = int(np.argmax(one.documents[0].targets))
    assert len({int(document.tokens[start]) for document in one.documents}) == 2


def test_messages_with_and_without_a_prompt_of_their_own_are_the_same(read, tokenizer):
    explicit = {"prompt": [QUESTION], "chosen": [YES], "rejected": [NO]}
    implicit = {"chosen": [QUESTION, YES], "rejected": [QUESTION, NO]}
    both = {"prompt": "the dog", **implicit}
    examples, _ = read([explicit, implicit, both])
    prompt = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    for one in examples:
        assert answers(tokenizer, one) == [(prompt, "yes<|im_end|>\n"), (prompt, "no<|im_end|>\n")]


def test_messages_as_json_text_are_messages_and_other_texts_stay_texts(read, tokenizer):
    """A cell of a CSV file holds a list as JSON; a text that only begins like one is a text."""
    row = {"prompt": [QUESTION], "chosen": [YES], "rejected": [NO]}
    as_text = {name: json.dumps(value) for name, value in row.items()}
    (one, other), _ = read([row, as_text])
    assert answers(tokenizer, one) == answers(tokenizer, other)
    (plain, numbers), _ = read(
        [
            {"prompt": "[the dog", "chosen": " jumps", "rejected": " sleeps"},
            {"prompt": "[1, 2]", "chosen": " 3", "rejected": " 4"},
        ]
    )
    assert answers(tokenizer, plain)[0] == ("[the dog", " jumps<|im_end|>")
    assert answers(tokenizer, numbers)[0] == ("[1, 2]", " 3<|im_end|>")


def test_an_earlier_answer_belongs_to_the_prompt(read, tokenizer):
    (one,), _ = read([{"prompt": [QUESTION, YES, QUESTION], "chosen": [YES], "rejected": [NO]}])
    assert [counted for _, counted in answers(tokenizer, one)] == ["yes<|im_end|>\n", "no<|im_end|>\n"]


def test_kto_sets_each_answer_behind_its_own_prompt_and_behind_the_next(read, tokenizer):
    rows = [
        {"prompt": "the dog", "completion": " jumps", "label": True},
        {"prompt": "the fox", "completion": " sleeps", "label": False},
        {"prompt": "a cat", "chosen": " yes", "rejected": " no"},
    ]
    examples, _ = read(rows, loss="kto")
    end = "<|im_end|>"
    assert [(answers(tokenizer, one), one.desirable) for one in examples] == [
        ([("the dog", f" jumps{end}"), ("the dog", f" no{end}")], True),
        ([("the fox", f" sleeps{end}"), ("the fox", f" jumps{end}")], False),
        ([("a cat", f" yes{end}"), ("a cat", f" sleeps{end}")], True),
        ([("a cat", f" no{end}"), ("a cat", f" yes{end}")], False),
    ]


def test_pairs_made_equal_by_truncation_are_left_out(read, tokenizer):
    rows = [
        {"prompt": "the dog", "chosen": " jumps over the fox", "rejected": " jumps over the dog"},
        {"prompt": "a", "chosen": " b", "rejected": " c"},
    ]
    examples, notes = read(rows, max_seq_length=4)
    assert len(examples) == 1
    assert any("1 pair was left out" in note for note in notes)


def test_empty_fields_of_a_pair_are_absent(read, tokenizer):
    pair = {"prompt": [QUESTION], "chosen": [YES], "rejected": [NO]}
    empty = {"tool_calls": [], "name": None, "reasoning_content": ""}
    dumped = {name: [message | empty for message in messages] for name, messages in pair.items()}
    (one, other, third, fourth), _ = read(
        [
            pair,
            dumped | {"tools": [], "completion": None, "label": None},
            {"prompt": "", "chosen": [QUESTION | empty, YES], "rejected": [QUESTION, NO]},
            {"prompt": [], "chosen": [QUESTION | empty, YES], "rejected": [QUESTION, NO]},
        ]
    )
    assert (
        answers(tokenizer, one) == answers(tokenizer, other) == answers(tokenizer, third) == answers(tokenizer, fourth)
    )


@pytest.mark.bad_input("a single answer for KTO")
def test_kto_needs_two_answers(read):
    with pytest.raises(UserError, match=r"train\.jsonl:1: the only answer; KTO compares"):
        read([{"prompt": "a", "completion": " b", "label": True}], loss="kto")


@pytest.mark.parametrize("packed", [False, True])
def test_batches_hold_every_pair_once_with_its_own_numbers(packed, read):
    rows = [{"prompt": "the dog", "chosen": f" a{'b' * n}", "rejected": " c" * (n + 1)} for n in range(7)]
    config = TrainConfig(loss="dpo", pack=packed, max_seq_length=40)
    examples, _ = read(rows, max_seq_length=40)
    for number, one in enumerate(examples):
        one.reference[:] = number, -number
    order = BatchOrder(examples, 2, row_capacity(config), packed=packed)
    seen = []
    for batch in order.epoch():
        held = batch.preferences
        per_row = 2 * held.numbers.size // len(batch.inputs)
        for number, slot in zip(held.numbers, range(held.numbers.size), strict=True):
            if number < 0:
                assert (held.present[slot], held.tokens[slot].tolist()) == (0, [1, 1])
                continue
            seen.append(int(number))
            assert held.reference[slot].tolist() == [number, -number]
            for side, document in enumerate(examples[number].documents):
                row, place = divmod(2 * slot + side, per_row)
                here = held.documents[row] == place
                assert batch.inputs[row][here].tolist() == document.tokens[:-1].tolist()
                assert batch.weights[row][here].sum() == held.tokens[slot, side] == document.targets.sum()
                assert held.lengths[slot, side] == here.sum()
    assert sorted(seen) == list(range(7))


def part(name):
    return {"type": "image", "image": name}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


def answer(content):
    return {"role": "assistant", "content": content}


IMAGES = {"images": ["a.png"]}
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
def read_pictured(tmp_path, loaded, processors):
    """read_pictured(rows, **options) -> the source of the first image, and the preferences of these rows."""
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
def test_a_picture_in_a_part_is_that_picture_beside_the_messages(where, read_pictured):
    _, (beside,) = read_pictured([BESIDE])
    found, (one,) = read_pictured([SAME[where]])
    assert found.endswith("train.jsonl:1")
    for document, expected in zip(one.documents, beside.documents, strict=True):
        assert document.tokens.tolist() == expected.tokens.tolist()
        assert document.targets.tolist() == expected.targets.tolist()
        assert document.pictures.values == ("a.png",)
        assert document.pictures.digests == expected.pictures.digests
        assert document.pictures.positions.tolist() == expected.pictures.positions.tolist()


def test_the_command_trains_on_a_picture_in_a_part(read_pictured, tiny_vision_checkpoint, tmp_path):
    read_pictured([SAME["a part of the prompt"]])
    out = tmp_path / "out"
    done = called(
        "train", "--model", tiny_vision_checkpoint("qwen3_vl"), "--data", tmp_path, "--loss", "dpo", "--iters", 1,
        "--batch-size", 1, "--steps-per-report", 1, "--adapter-path", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert first["train_loss"] == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_picture_in_an_answer_is_found(side, read_pictured):
    row = {"prompt": [user("what?")], "chosen": [YES], "rejected": [NO]}
    found, (_, one) = read_pictured([row, row | {side: [answer([part("a.png"), text("this")])]}])
    assert found.endswith("train.jsonl:2")
    assert [len(document.pictures.values) for document in one.documents] == [side == "chosen", side == "rejected"]


def test_answers_may_differ_in_their_picture_alone(read_pictured):
    sides = {name: [user([part(f"{letter}.png")]), YES] for name, letter in (("chosen", "a"), ("rejected", "b"))}
    _, (one,) = read_pictured([{"prompt": [{"role": "system", "content": "look"}], **sides}])
    chosen, rejected = one.documents
    assert chosen.tokens.tolist() == rejected.tokens.tolist()
    assert chosen.pictures.digests != rejected.pictures.digests
    sides = {name: [user([part("a.png")]), YES] for name in ("chosen", "rejected")}
    with pytest.raises(UserError, match=r"train\.jsonl:1: chosen and rejected are equal"):
        read_pictured([{"prompt": [{"role": "system", "content": "look"}], **sides}])


def test_a_loss_that_takes_no_images_refuses_a_part(read_pictured):
    row = {"prompt": [PLACED], "completion": [YES], "label": True}
    with pytest.raises(UserError, match=r"train\.jsonl:1: --loss kto does not take images"):
        read_pictured([row, row], loss="kto")


def test_texts_in_parts_need_no_vision_tower(read_pictured):
    row = {"prompt": [user([text("what?")])], "chosen": [answer([text("yes")])], "rejected": [NO]}
    assert read_pictured([row | {"note": 'an "image"'}])[0] is None
