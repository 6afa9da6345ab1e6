"""The demo's bundled model, task and screen."""

import io
import json
import random
from collections import Counter

import mlx.core as mx
import mlx_lm
import pytest
from rich.ansi import AnsiDecoder
from rich.console import Console
from safetensors import safe_open
from tokenizers import Tokenizer

import demo_corpus as corpus
from deltatune.demo import names, task
from deltatune.demo.assets import MODEL
from deltatune.demo.screen import DemoScreen
from deltatune.layers import describe
from deltatune.models.load import load


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


def test_all_shipped_data_is_under_6_mb():
    sizes = {path.name: path.stat().st_size for path in MODEL.parent.rglob("*") if path.is_file()}
    shipped = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert shipped <= sizes.keys()
    assert sum(sizes.values()) < 6_000_000


def test_the_weights_say_their_format():
    with safe_open(MODEL / "model.safetensors", "numpy") as file:
        assert file.metadata()["format"] == "mlx"
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118


def test_mlx_lm_and_deltatune_load_the_same_hybrid_model_with_experts():
    loaded = load(MODEL)
    theirs, tokenizer = mlx_lm.load(str(MODEL))[:2]
    layers = describe(loaded.model)
    assert [layer.kind for layer in layers] == ["delta", "delta", "delta", "attention"]
    assert all(layer.experts for layer in layers)
    tokens = mx.array([tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}])])
    assert mx.array_equal(loaded.model(tokens), theirs(tokens))


def test_the_tokenizer_fills_the_vocabulary_and_gives_texts_back():
    tokenizer = load(MODEL).tokenizer
    config = json.loads((MODEL / "config.json").read_text())
    assert len(tokenizer) == config["text_config"]["vocab_size"]
    text = 'Zoë\'s order: {"a":[1,2]} — 你好\n\ttwo  spaces'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_screen(width):
    file = io.StringIO()
    screen = DemoScreen(Console(file=file, width=width, force_terminal=True, highlight=False))
    screen.title("deltatune demo", "word " * 40)
    screen.part(1, "A part")
    screen.line("word " * 40, ("12.0%", "bold red"))
    screen.answers([("a message " * 9, "no idea " * 12, '{"tool":"order"}' * 9, True), ("another", "", "{}", False)])
    screen.start(0, 100)
    screen.advance(1, 3.5, 1.0)
    screen.stop()
    lines = _without_escapes(file.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    text = "\n".join(lines)
    assert "✓" in text
    assert "✗" in text
    assert "(nothing)" in text


def test_a_command_can_be_pasted_from_a_narrow_terminal():
    file, model = io.StringIO(), "model/" * 15
    command = (
        f'python -m deltatune generate --model {model} --adapter-path demo-out --prompt "6 mochas for Zelda, please."'
    )
    DemoScreen(Console(file=file, width=80)).end("0.0%", "99.0%", "demo-out/" * 12 + "report.html", command, 99.4)
    lines = file.getvalue().splitlines()
    at = lines.index("python -m deltatune generate \\")
    assert lines[at + 1 : at + 3] == [
        f"  --model {model} \\", '  --adapter-path demo-out --prompt "6 mochas for Zelda, please."',
    ]  # fmt: skip
    assert f"report: {'demo-out/' * 12}report.html" in lines


def test_text_with_markup_is_shown_as_it_is():
    file = io.StringIO()
    screen = DemoScreen(Console(file=file, width=80))
    screen.answers([("[red]a[/red]", "[b]", "[/]", True)])
    assert "[red]a[/red]" in file.getvalue()
    assert "[/]" in file.getvalue()


def _without_escapes(text: str) -> str:
    return "\n".join(line.plain for line in AnsiDecoder().decode(text.replace("\r", "\n")))
