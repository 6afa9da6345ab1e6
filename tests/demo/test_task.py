import random
from collections import Counter

from tokenizers import Tokenizer

import demo_corpus as corpus
from deltatune.demo import names, task
from deltatune.demo.assets import MODEL


def test_nobody_is_on_two_lists():
    lists = [names.BASE, names.TRAIN, names.HELD_OUT]
    everyone = [name for each in lists for name in each]
    assert len(everyone) == len(set(everyone))


def test_held_out_messages_share_no_name_and_no_combination_with_training(tmp_path):
    splits = task.write(tmp_path)
    seen = splits["train"] + splits["valid"]
    test = splits["test"]
    assert len(test) >= 200
    assert not {item.message for item in test} & {item.message for item in seen}
    assert not {item.name for item in test} & {item.name for item in seen}
    # Where a tool has combinations to hold out, an answer without its name was never seen either.
    without_name = {item.answer.replace(item.name, "") for item in seen}
    combined = [item for item in test if item.tool != "cancel"]
    assert len(combined) >= 100
    assert not [item for item in combined if item.answer.replace(item.name, "") in without_name]


def test_every_answer_follows_from_its_message(tmp_path):
    for item in task.write(tmp_path, train=400)["train"]:
        assert item.name in item.message
        assert f'"name":"{item.name}"' in item.answer


def test_the_same_seed_gives_the_same_files(tmp_path):
    for folder in ("a", "b"):
        task.write(tmp_path / folder, train=50, valid=5, test=10)
    for name in ("train", "valid", "test"):
        first, second = ((tmp_path / folder / f"{name}.jsonl").read_bytes() for folder in ("a", "b"))
        assert first == second
        assert first


def test_the_base_corpus_has_no_json_and_no_name_of_the_task():
    rng = random.Random(5)
    texts = [message["content"] for _ in range(3000) for message in corpus.conversation(rng)["messages"]]
    words = {word for text in texts for word in text.replace(".", " ").replace(",", " ").replace(":", " ").split()}
    assert "Hello" in words
    assert not words & {*names.TRAIN, *names.HELD_OUT}
    assert not [text for text in texts if '{"' in text and '":' in text]


def test_held_out_names_are_made_of_tokens_that_the_base_met_in_names():
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rng, count = random.Random(6), 20_000
    met = Counter(piece for _ in range(count) for piece in set(tokenizer.encode(corpus._name(rng)).ids))
    rarest = {name: min(met[piece] for piece in tokenizer.encode(name).ids) for name in names.HELD_OUT}
    assert not {name: times for name, times in rarest.items() if times < 2.5e-3 * count}
