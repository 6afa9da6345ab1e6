"""Base models with other ends of an answer, and thinking models, are asked and merged as their data are written."""

import argparse
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import GenerationConfig

from console import called
from deltatune.commands import export
from deltatune.commands.generate import GenerateOptions, generate
from deltatune.data.chats.answers import ending_answers, missing_end, note_on_ends
from deltatune.models.checkpoint_writer import unwritten_ends
from deltatune.models.load import load

ROW = {"prompt": "the quick brown fox", "completion": "jumps over"}


@pytest.fixture(scope="module")
def base(checkpoint, tmp_path_factory):
    """A checkpoint that stops at <|endoftext|> alone, as Qwen3-Base does."""
    return changed(checkpoint, tmp_path_factory.mktemp("base") / "model", "<|endoftext|>")


def changed(checkpoint, folder, of_tokenizer):
    """Copy a checkpoint with configs that name <|endoftext|> and a tokenizer that names this end token."""
    shutil.copytree(checkpoint, folder)
    end = load(folder).tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for name, change in (
        ("config.json", {"eos_token_id": end}),
        ("generation_config.json", {"eos_token_id": end}),
        ("tokenizer_config.json", {"eos_token": of_tokenizer}),
    ):
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | change))
    return folder


def test_training_names_both_tokens_and_generation_stops_at_either(base, tmp_path, capsys):
    data, adapter, merged = tmp_path / "data", tmp_path / "adapter", tmp_path / "merged"
    data.mkdir()
    (data / "train.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    flags = ["--iters", 50, "--batch-size", 2, "--learning-rate", "4e-3"]
    flags += ["--adapter-path", adapter]
    sampled = ["--sample-prompts", ROW["prompt"]]
    trained = called("train", "--model", base, "--data", data, *flags, *sampled)
    assert trained.returncode == 0, trained.stderr
    said = " ".join(trained.stdout.split())
    assert "ends an answer with '<|im_end|>', and the model's config stops generation at '<|endoftext|>' alone" in said
    assert f"Iter 50, sample 1: {ROW['prompt']} -> {ROW['completion']}" in said, said[-600:]
    options = {"adapter_path": str(adapter), "max_tokens": 40}
    assert generate(GenerateOptions(str(base), ROW["prompt"], **options)) == ROW["completion"]
    asked = "merge", "--model", base, "--adapter-path", adapter, "--save-path", merged, "--extra-eos-token"
    refused = called(*asked, "<|nope|>")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--extra-eos-token: '<|nope|>' is no token of this model" in refused.stderr
    assert not merged.exists()
    assert called(*asked, "<|im_end|>").returncode == 0
    tokenizer = load(merged).tokenizer
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert json.loads((merged / "generation_config.json").read_text())["eos_token_id"] == ends
    assert missing_end(tokenizer) is None


def test_whole_models_name_the_end_token_of_the_tokenizer_and_those_of_the_config(checkpoint, tmp_path):
    model, adapter, whole = changed(checkpoint, tmp_path / "model", "<|im_end|>"), tmp_path / "lora", tmp_path / "full"
    (tmp_path / "train.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    flags = ["train", "--model", model, "--data", tmp_path, "--iters", 1, "--batch-size", 1, "--adapter-path"]
    assert called(*flags, whole, "--fine-tune-type", "full").returncode == 0
    assert called(*flags, adapter).returncode == 0
    for save_path, path in ((tmp_path / "a", adapter), (tmp_path / "b", whole)):
        done = called("merge", "--model", model, "--adapter-path", path, "--save-path", save_path)
        assert done.returncode == 0, done.stderr
    ends = sorted(load(model).tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    for folder in (whole, tmp_path / "a", tmp_path / "b"):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == ends
    # A config that names both, or a tokenizer that needs its own code, leaves the files as they are.
    assert unwritten_ends(model) == ends
    assert unwritten_ends(whole) == []
    (model / "tokenizer.json").unlink()
    assert unwritten_ends(model) == []


def test_end_of_an_answer_in_the_template(base, checkpoint):
    tokenizer = load(base).tokenizer
    assert missing_end(tokenizer) == "<|im_end|>"
    stopping = ending_answers(tokenizer)
    assert stopping.eos_token_ids - tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    usual = load(checkpoint).tokenizer
    assert missing_end(usual) is None
    assert ending_answers(usual) is usual
    assert note_on_ends(usual) == []
    # A template that raises, and one that ends an answer with nothing, say nothing of its end.
    for template in ("{{ raise_exception('no') }}", "{% for message in messages %}{{ message.content }}{% endfor %}"):
        tokenizer.chat_template = template
        assert missing_end(tokenizer) is None


TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "qwen3_5.jinja"
THINKING = {"prompt": "a question", "completion": "an answer"}


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
    (data / "train.jsonl").write_text(json.dumps(THINKING) + "\n")
    trained = called(
        "train", "--model", model, "--data", data, "--iters", 1, "--batch-size", 1, "--resize-embeddings",
        "--adapter-path", adapter, "--sample-prompts", THINKING["prompt"],
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert "The answers follow the prompt with enable_thinking false, so samples" in " ".join(trained.stdout.split())
    assert json.loads((adapter / "adapter_config.json").read_text())["chat_template_config"] == {
        "enable_thinking": False
    }
    tokenizer = load(model).tokenizer
    messages = [{"role": "user", "content": THINKING["prompt"]}]
    opened, closed = (
        len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=thinks))
        for thinks in (True, False)
    )
    assert opened != closed
    asked = ["generate", "--model", model, "--adapter-path", adapter, "--prompt", THINKING["prompt"], "-m", 1]
    assert f"[{closed} prompt tokens" in called(*asked).stdout
    options = GenerateOptions(str(model), THINKING["prompt"], adapter_path=str(adapter), max_tokens=1)
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
