"""Provides tokenizers with chat templates of several kinds, small data folders and random examples."""

import json
import shutil
from typing import Any

import numpy as np
import pytest

from deltatune.data import Example
from deltatune.data.vision.media import VisionProcessors
from deltatune.models.load import load
from deltatune.models.vision.split import vision_spec
from deltatune.options.config import TrainConfig

PLAIN = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# This template marks what is generated: the answer and its end token, but not the line break.
GENERATION = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# This template writes the reasoning of answers after the last question, and drops it from earlier turns.
THINKING = (
    "{% set asked = namespace(last=-1) %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{% set asked.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.index0 > asked.last %}"
    "{{ '<think>\n' + message.get('reasoning_content', '') + '\n</think>\n\n' }}"
    "{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
# This template ends a conversation with a special token that no turn within it has.
CLOSING = PLAIN.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}")
TEMPLATES = {
    "plain": PLAIN,
    "generation": GENERATION,
    "thinking": THINKING,
    "closing": CLOSING,
    "empty": "{% if false %}{{ messages }}{% endif %}",
    "none": None,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The folder in which a test keeps its tokens, instead of the user's."""
    folder = tmp_path / "cache of the test"
    monkeypatch.setenv("DELTATUNE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def tokenizers(tiny_checkpoint, tmp_path_factory):
    """tokenizers(kind) -> mlx-lm's wrapper with the template of that kind (TEMPLATES); blank lines are one token."""
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from transformers import AutoTokenizer

    made: dict[str, Any] = {}

    def factory(kind: str) -> Any:
        if kind not in made:
            folder = tmp_path_factory.mktemp("tokenizer") / kind
            shutil.copytree(tiny_checkpoint("qwen3"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.add_tokens(["\n\n"])
            if kind == "thinking":
                tokenizer.add_tokens(["<think>", "</think>"])
            tokenizer.chat_template = TEMPLATES[kind]
            shutil.rmtree(folder)
            tokenizer.save_pretrained(folder)
            made[kind] = load_tokenizer(folder)
        return made[kind]

    return factory


@pytest.fixture(scope="session")
def tokenizer(tokenizers):
    return tokenizers("plain")


@pytest.fixture
def folder(tmp_path):
    """folder(train=[rows or raw lines], valid=..., **options) -> the TrainConfig that reads those files."""

    def write(*, train: Any = None, valid: Any = None, test: Any = None, **options: Any) -> TrainConfig:
        for name, rows in (("train", train), ("valid", valid), ("test", test)):
            if isinstance(rows, bytes):
                (tmp_path / f"{name}.jsonl").write_bytes(rows)
            elif rows is not None:
                lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
                (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return TrainConfig(**({"data": str(tmp_path), "batch_size": 1} | options))

    return write


@pytest.fixture(scope="session")
def examples_of():
    """examples_of([token counts], seed) -> examples with random tokens and about half of the targets counting."""

    def make(sizes: list[int], seed: int = 0) -> list[Example]:
        random = np.random.default_rng(seed)
        made = []
        for number, size in enumerate(sizes):
            targets = random.random(size) < 0.5
            targets[0], targets[-1] = False, True
            made.append(Example(random.integers(3, 300, size).astype(np.int32), targets, f"data:{number + 1}"))
        return made

    return make


@pytest.fixture(scope="session")
def loaded(tiny_vision_checkpoint):
    return load(tiny_vision_checkpoint("qwen3_vl"), image="a test")


@pytest.fixture(scope="session")
def processors(loaded):
    return VisionProcessors(loaded.processor.image_processor, vision_spec(loaded.model))
