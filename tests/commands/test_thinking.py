"""A thinking model trained on answers without reasoning: commands ask it as the answers were learnt."""

import argparse
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from console import called
from deltatune.commands import export
from deltatune.commands.generate import GenerateOptions, generate
from deltatune.models.load import load

TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "qwen3_5.jinja"
ROW = {"prompt": "a question", "completion": "an answer"}


@pytest.fixture(scope="module")
def model(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking") / "model"
    base = tiny_checkpoint("qwen3", chat_template=TEMPLATE.read_text(encoding="utf-8"))
    shutil.copytree(base, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>", "\n\n"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_training_and_generation_ask_behind_the_same_prompt(model, tmp_path, capsys):
    data, adapter, exported = tmp_path / "data", tmp_path / "adapter", tmp_path / "exported"
    data.mkdir()
    (data / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    trained = called(
        "train", "--model", model, "--data", data, "--iters", 1, "--batch-size", 1, "--resize-embeddings",
        "--adapter-path", adapter, "--sample-prompts", ROW["prompt"], "--sample-max-tokens", 1,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert "The answers follow the prompt with enable_thinking false, so samples" in " ".join(trained.stdout.split())
    assert json.loads((adapter / "adapter_config.json").read_text())["chat_template_config"] == {
        "enable_thinking": False
    }
    tokenizer = load(model).tokenizer
    messages = [{"role": "user", "content": ROW["prompt"]}]
    opened, closed = (
        len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=thinks))
        for thinks in (True, False)
    )
    assert opened != closed
    asked = ["generate", "--model", model, "--adapter-path", adapter, "--prompt", ROW["prompt"], "-m", 1]
    assert f"[{closed} prompt tokens" in called(*asked).stdout
    options = GenerateOptions(str(model), ROW["prompt"], adapter_path=str(adapter), max_tokens=1)
    for given, tokens in (('{"enable_thinking": true}', opened), ('{"date": "x"}', closed)):
        capsys.readouterr()
        generate(options.__class__(**{**vars(options), "chat_template_config": given}))
        assert f"[{tokens} prompt tokens" in capsys.readouterr().out
    said = called("export", "--to", "mlx", "--model", model, "--adapter-path", adapter, "--save-path", exported)
    assert re.search(r"--adapter-path \S+ --chat-template-config '{\"enable_thinking\": false}'", said.stdout)
    assert "ask it so: `enable_thinking=False`" in (exported / "README.md").read_text()


def test_a_command_that_is_printed_can_be_pasted(tmp_path, monkeypatch):
    """A folder may have a space in its name, and a variable an apostrophe."""
    folder, variables = tmp_path / "my adapters", {"persona": "don't"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"chat_template_config": variables}))
    monkeypatch.setattr("deltatune.lora.adapter_files.write_mlx", lambda adapter, saved: folder)
    monkeypatch.setattr("deltatune.lora.adapter_files.head_notes", lambda *_: [])
    arguments = argparse.Namespace(adapter_path="adapters", save_path=str(folder), model="a model")
    words = shlex.split(export._mlx(arguments)[0][1])
    assert words[2:5] == ["a model", "--adapter-path", str(folder)]
    assert words[5:] == ["--chat-template-config", json.dumps(variables)]
