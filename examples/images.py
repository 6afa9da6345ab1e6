"""Train a vision-language model on pictures, and ask it before and after.

The pictures are drawn on the spot: a coloured circle somewhere on a light ground. The model is made on the spot, too,
with random weights, so it can say nothing before and trains whole. Needs `pip install 'deltatune[vision]'`.

    python examples/images.py
"""

import json
import random
from pathlib import Path

import deltatune
import deltatune.cli
import mlx.core as mx
from mlx.utils import tree_flatten
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

from deltatune.demo.assets import MODEL as TEXT_MODEL

OUTPUT = Path("example-out/images")
MODEL = OUTPUT / "model"  # Put your own here, and leave out write_model() and --from-scratch: adapters train then.
QUESTION = "What is this?"
COLOURS = {"red": (214, 40, 40), "green": (38, 150, 60), "blue": (40, 80, 214), "yellow": (240, 196, 20)}
SIDE = 32

# A model of Qwen3.5's architecture with a vision tower, small enough to be trained from nothing.
TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
    },
}
TOWER = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": TEXT["hidden_size"],
    "patch_size": 8,
    "spatial_patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": (SIDE // 8) ** 2,
    "deepstack_visual_indexes": [],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] if message['content'] is not string %}"
    "{{ part['text'] if part['type'] == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% endfor %}{{ message['content'] if message['content'] is string }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def main() -> None:
    """Train by the command line's own entry point, which loads the vision tower since the data have images."""
    rng = random.Random(0)
    write_model(MODEL)
    write_data(OUTPUT / "data", rng)
    pictures = [draw(OUTPUT / f"{colour}.png", colour, rng) for colour in COLOURS]

    ask("before", MODEL, pictures[:1])
    run(
        *("train", "--model", MODEL, "--data", OUTPUT / "data", "--adapter-path", OUTPUT / "tuned", "--overwrite"),
        *("--from-scratch", "--parts", "language,vision,projector", "--mask-prompt"),
        *("--batch-size", 8, "--iters", 100, "--learning-rate", 3e-3, "--steps-per-report", 20, "--val-batches", 0),
    )
    ask("after", OUTPUT / "tuned", pictures)


def ask(when: str, model: Path, pictures: list[Path]) -> None:
    """Print what the model answers for each picture."""
    for picture in pictures:
        print(f"{when}, {picture.name}: ", end="", flush=True)
        run("generate", "--model", model, "--image", picture, "--prompt", QUESTION, "--max-tokens", 8)


def write_data(folder: Path, rng: random.Random) -> None:
    """Write train.jsonl and its pictures. A line names its picture, from the data's folder, and is a chat otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(400):
        colour = rng.choice([*COLOURS])
        name = draw(folder / f"{number:03d}.png", colour, rng).name
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": f"a {colour} circle"}]
        lines.append(json.dumps({"image": name, "messages": messages}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(file: Path, colour: str, rng: random.Random) -> Path:
    """Draw a circle of this colour at a random place."""
    image = Image.new("RGB", (SIDE, SIDE), (236, 236, 236))
    size = rng.randint(14, 20)
    left, top = rng.randint(1, SIDE - size - 1), rng.randint(1, SIDE - size - 1)
    ImageDraw.Draw(image).ellipse((left, top, left + size, top + size), fill=COLOURS[colour])
    image.save(file)
    return file


def write_model(folder: Path) -> None:
    """Write the small model's checkpoint, with random weights and the tokenizer of the text model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(TEXT_MODEL / "tokenizer.json"))
    pads = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
    tokenizer.add_special_tokens(pads)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = dict(zip(("vision_start", "vision_end", "image", "video"), map(tokenizer.token_to_id, pads), strict=True))
    config = {
        "model_type": "qwen3_5",
        "vocab_size": tokenizer.get_vocab_size(),
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "text_config": TEXT | {"vocab_size": tokenizer.get_vocab_size()},
        "vision_config": TOWER,
        **{f"{name}_token_id": value for name, value in ids.items()},
    }
    about = json.loads((TEXT_MODEL / "tokenizer_config.json").read_text()) | {"chat_template": CHAT_TEMPLATE}
    files = {"config": config, "preprocessor_config": PROCESSOR, "tokenizer_config": about}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    model = deltatune.load(folder, from_scratch=True, image="the example").model
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})


def run(*words: object) -> None:
    """Run a deltatune command in this process, as a notebook may do; stop where it fails."""
    if code := deltatune.cli.main([str(word) for word in words]):
        raise SystemExit(code)


if __name__ == "__main__":
    main()
