"""Train the vision demo's base model from scratch with deltatune, and put it in src/deltatune/demo/vision/assets/model.

usage: python scripts/make_vision_demo_model.py [--work DIR] [--iters N N] [--resume]
There are two runs. In the first the model learns to see, by describing trays with few kinds of parts; in the second it
learns to answer questions about them. Pictures, tokenizer and weights follow from SEED alone. Both take about half an
hour with one thread on a busy CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import vision_demo_corpus
from deltatune.commands import train as command
from deltatune.demo.vision import trays
from deltatune.demo.vision.assets import MODEL
from deltatune.options.config import TrainConfig
from demo_tokenizer import SPECIAL_TOKENS, tokenizer_config, train_tokenizer

SEED = 1
PICTURES = {"see": 5_000, "talk": 4_000}
KINDS = {"see": (1, 1, 1, 2, 2, 3), "talk": (1, 1, 2, 2, 2)}
VALID = 64
VOCABULARY = 512
PATCH, MERGE = 8, 2
HIDDEN = 96
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
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
VISION_CONFIG = {
    "model_type": "qwen3_5",
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": PATCH,
    "spatial_patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": (trays.SIDE // PATCH) ** 2,
    "deepstack_visual_indexes": [],
}
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "vocab_size": VOCABULARY,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": 5,
    "video_token_id": 6,
    "text_config": TEXT_CONFIG,
    "vision_config": VISION_CONFIG,
}
GENERATION_CONFIG = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False}
PROCESSOR_CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "size": {"shortest_edge": 256, "longest_edge": 16384},
    # The light background becomes about zero, so that parts stand out from the first step on.
    "image_mean": [0.85, 0.85, 0.85],
    "image_std": [0.25, 0.25, 0.25],
}
FILES: dict[str, dict[str, Any]] = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION_CONFIG,
    "preprocessor_config.json": PROCESSOR_CONFIG,
    "tokenizer_config.json": tokenizer_config(CHAT_TEMPLATE),
}


def write_corpus(folder: Path) -> list[str]:
    """Write pictures, train.jsonl and valid.jsonl of both runs; returns every text in them."""
    texts = []
    for run, count in PICTURES.items():
        rng = random.Random(f"{SEED} {run}")
        (folder / run / "pictures").mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        for index in range(count):
            tray = trays.draw(rng, rng.choice(KINDS[run]))
            messages = vision_demo_corpus.seeing(tray) if run == "see" else vision_demo_corpus.conversation(rng, tray)
            name = f"pictures/{index:05d}.png"
            trays.picture(tray).save(folder / run / name)
            rows.append({"image": name, "messages": messages})
            texts += [message["content"] for message in messages]
        for name, part in (("train", rows[:-VALID]), ("valid", rows[-VALID:])):
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (folder / run / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return texts


def write_start(folder: Path, texts: list[str]) -> None:
    """Write a model folder without weights: config, tokenizer, chat template and image processor."""
    tokenizer = train_tokenizer(texts, VOCABULARY, [*SPECIAL_TOKENS, *VISION_TOKENS])
    # The corpus has few words, but mlx-vlm needs a tokenizer with as many tokens as the vocabulary.
    missing = VOCABULARY - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|unused_{index}|>" for index in range(missing)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in FILES.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def train(work: Path, run: str, iterations: int, start: Path | None, learning_rate: list[float], resume: bool) -> Path:
    """Train one of the two runs from the weights `start`, or from new ones where None; returns the weights."""
    command.train(
        TrainConfig(
            model=str(work / "start"),
            data=str(work / "data" / run),
            adapter_path=str(work / run),
            from_scratch=True,
            resume_adapter_file=None if start is None else str(start),
            parts="language,vision,projector",
            mask_prompt=True,
            max_seq_length=256,
            batch_size=16,
            iters=iterations,
            optimizer="adamw",
            optimizer_config={"adamw": {"betas": [0.9, 0.98], "weight_decay": 0.05, "bias_correction": True}},
            lr_schedule={"name": "linear_schedule", "arguments": [*learning_rate, iterations], "warmup": 50},
            grad_clip=1.0,
            seed=SEED,
            steps_per_report=25,
            steps_per_eval=100,
            val_batches=-1,
            save_every=100,
            resume=resume,
        )
    )
    return work / run / "model.safetensors"


def main() -> None:
    """Make pictures, tokenizer and weights, then copy the files of the wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/vision-demo-model"), help="where everything is made")
    parser.add_argument("--iters", type=int, nargs=2, default=[1000, 600], help="of the first and of the second run")
    parser.add_argument("--resume", action="store_true", help="go on with the runs in the work folder")
    options = parser.parse_args()
    write_start(options.work / "start", write_corpus(options.work / "data"))
    seeing = train(options.work, "see", options.iters[0], None, [2e-3, 1e-3], options.resume)
    talking = train(options.work, "talk", options.iters[1], seeing, [1.5e-3, 5e-5], options.resume)
    MODEL.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, "tokenizer.json"):
        shutil.copyfile(options.work / "start" / name, MODEL / name)
    shutil.copyfile(talking, MODEL / "model.safetensors")


if __name__ == "__main__":
    main()
