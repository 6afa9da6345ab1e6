"""Times the start of a run on many chats: from the command to its first step, without cached tokens and with them.

usage: python benchmarks/chat_start.py [--rows 100000] [--template FILE] [--folder DIR]

The chats are drawn from a seed out of the documentation of Python's own modules; a byte-level BPE of 32,000 tokens is
trained on it. The model is a random Qwen3 of two layers. Each start is a process of its own, with an empty cache the
first time; its processor time counts all of its processes.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import processes
from machine import heading

TEMPLATE = Path(__file__).parents[1] / "tests" / "data" / "templates" / "qwen3.jinja"
# The pattern by which Qwen's tokenizers cut a text into words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 33_000


def sentences() -> list[str]:
    """Return the sentences in the documentation of Python's modules."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                found += [" ".join(part.split()) for part in re.split(r"(?<=\.)\s+|\n\n", text)]
    return [sentence for sentence in found if 30 < len(sentence) < 200]


def write_model(folder: Path, texts: list[str], template: str) -> None:
    """Write a random model with a tokenizer that is trained on `texts`."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
    )
    words.add_special_tokens(SPECIAL)
    words.add_tokens(ADDED)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    model = Model(ModelArgs.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def write_chats(folder: Path, texts: list[str], rows: int) -> None:
    """Write `rows` chats: a third with a system message, one question in three of five, else two or three."""
    draw = random.Random(0)

    def message(role: str, lengths: list[int]) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choices(texts, k=draw.choice(lengths)))}

    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(rows):
            messages = [message("system", [1])] if draw.random() < 1 / 3 else []
            for _ in range(draw.choice([1, 1, 1, 2, 3])):
                messages += [message("user", [1, 2, 3]), message("assistant", [1, 2, 4, 6])]
            file.write(json.dumps({"messages": messages}) + "\n")


def start(folder: Path, options: list[str]) -> tuple[float, float]:
    """Run `deltatune train` for one step; returns the wall seconds and the processor seconds of all its processes."""
    command = [sys.executable, "-m", "deltatune", "train", "--model", folder, "--data", folder]
    command += ["--adapter-path", folder / "adapters", "--iters", "1", "--batch-size", "1", *options]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"DELTATUNE_CACHE": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    for line in done.stdout.splitlines():
        if line.startswith("Data:") or "several rows" in line:
            print(line.replace(str(folder) + "/", ""))
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--template", type=Path, default=TEMPLATE)
    parser.add_argument("--folder", type=Path, help="where to keep the model and the data; default: a temporary folder")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        texts = sentences()
        write_model(folder, texts, options.template.read_text(encoding="utf-8"))
        write_chats(folder, texts, 8)
        print(f"{heading()}\n")
        # The first start prepares libraries and tries kernels, which does not depend on the data.
        start(folder, more)
        write_chats(folder, texts, options.rows)
        print("\n| start | s | processor s |\n|---|---|---|")
        for name in ("first", "second"):
            took, used = start(folder, more)
            print(f"| {name} | {took:.1f} | {used:.1f} |", flush=True)


if __name__ == "__main__":
    main()
