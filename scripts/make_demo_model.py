"""Train the demo's base model from scratch with deltatune, and put it in src/deltatune/demo/assets/model.

usage: python scripts/make_demo_model.py [--work DIR] [--iters N] [--resume]
About 20 minutes on 2 idle CPU cores. The tokenizer, the corpus and the weights follow from SEED alone.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import demo_corpus
from deltatune import finetune
from deltatune.demo.assets import MODEL
from deltatune.options.config import TrainConfig

SEED = 1
VOCABULARY = 512
CONVERSATIONS = 30_000
# A space is a separate piece, so that a word has the same tokens after a space, a quotation mark or nothing.
PIECES = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]|\s"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    },
}
CONFIG = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "text_config": TEXT_CONFIG,
}
GENERATION_CONFIG = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False}
SHIPPED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def write_corpus(folder: Path) -> list[str]:
    """Write train.jsonl and valid.jsonl; returns every text in them."""
    rng = random.Random(SEED)
    conversations = [demo_corpus.conversation(rng) for _ in range(CONVERSATIONS)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", conversations[:-200]), ("valid", conversations[-200:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part), encoding="utf-8")
    return [message["content"] for line in conversations for message in line["messages"]]


def train_tokenizer(texts: Iterable[str], vocabulary: int, special_tokens: list[str]) -> Tokenizer:
    """Train a tokenizer of at most `vocabulary` tokens, of which the `special_tokens` come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(chat_template: str) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }


def write_start(folder: Path, texts: list[str]) -> None:
    """Write a model folder without weights: config, tokenizer and chat template."""
    tokenizer = train_tokenizer(texts, VOCABULARY, SPECIAL_TOKENS)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, {VOCABULARY} expected")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config", CONFIG),
        ("generation_config", GENERATION_CONFIG),
        ("tokenizer_config", tokenizer_config(CHAT_TEMPLATE)),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Make corpus, tokenizer and weights, then copy the files of the wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo-model"), help="where everything is made")
    parser.add_argument("--iters", type=int, default=2000)
    parser.add_argument("--resume", action="store_true", help="go on with the run in the work folder")
    options = parser.parse_args()
    write_start(options.work / "start", write_corpus(options.work / "data"))
    finetune(
        TrainConfig(
            model=str(options.work / "start"),
            data=str(options.work / "data"),
            adapter_path=str(options.work / "trained"),
            from_scratch=True,
            pack=True,
            max_seq_length=256,
            overlong="skip",
            batch_size=8,
            iters=options.iters,
            optimizer="adamw",
            optimizer_config={"adamw": {"betas": [0.9, 0.98], "weight_decay": 0.05, "bias_correction": True}},
            lr_schedule={"name": "cosine_decay", "arguments": [3e-3, options.iters, 5e-5], "warmup": 100},
            grad_clip=1.0,
            seed=SEED,
            steps_per_report=25,
            steps_per_eval=500,
            val_batches=-1,
            save_every=250,
            resume=options.resume,
        )
    )
    MODEL.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        found = options.work / "trained" / name
        shutil.copyfile(found if name == "model.safetensors" else options.work / "start" / name, MODEL / name)


if __name__ == "__main__":
    main()
