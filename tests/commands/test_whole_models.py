"""The commands use the result of a full fine-tuning on text as they use its base, pictures included."""

import json

import mlx.core as mx
from PIL import Image

from console import called
from transformers_saves import write_as_transformers


def test_a_model_trained_as_a_whole_goes_everywhere(tiny_vision_checkpoint, tmp_path):
    base = write_as_transformers(tiny_vision_checkpoint("qwen3_5_moe"), tmp_path / "base")
    row = json.dumps({"prompt": "the dog", "completion": "a fox"}) + "\n"
    (tmp_path / "data").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(row * 4)
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    given = ["--model", base, "--adapter-path", tmp_path / "out"]
    for command in (
        ["train", *given, "--data", tmp_path / "data", "--iters", 1, "--fine-tune-type", "full", "--num-layers", 1],
        ["export", "--to", "merged", *given, "--save-path", tmp_path / "merged"],
        ["generate", *given, "--prompt", "a", "--image", tmp_path / "red.png", "--max-tokens", 1],
    ):
        done = called(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    stored, merged, out = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("base", "merged", "out"))
    assert stored.keys() == merged.keys() == out.keys()
    assert all(mx.array_equal(merged[name], out[name]) for name in out)
