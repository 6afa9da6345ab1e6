"""`export --to merged --data` compares the loss before and after a merge, and its card says so."""

import json

import pytest

from deltatune.cli import main
from deltatune.commands.eval import evaluate
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.models.load import load_model
from deltatune.options.config import LoraConfig, TrainConfig
from saved_adapters import moved


@pytest.fixture
def words(tiny_checkpoint, tmp_path):
    """The words of an export of an adapter on a 4-bit model; its run masked prompts."""
    base = tiny_checkpoint("qwen3_5", quantize={})
    model, _ = load_model(base)
    convert_to_lora(model, LoraConfig(rank=2, keys=["*.q_proj", "*.down_proj"]))
    save_adapters(moved(model, 0.1), tmp_path / "adapter", {"mask_prompt": True, "batch_size": 1})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.jsonl").write_text(json.dumps({"prompt": "the quick", "completion": "brown fox"}) + "\n")
    found = ["export", "--to", "merged", "--model", str(base), "--adapter-path", str(tmp_path / "adapter")]
    return [*found, "--save-path", str(tmp_path / "merged"), "--data", str(tmp_path / "data")]


def test_losses_before_and_after(words, tmp_path, capsys):
    assert main(words) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.endswith(").") and "with the adapter" in line)
    before, after = (float(line.split()[place]) for place in (2, 6))
    options = TrainConfig(model=words[4], data=str(tmp_path / "data"), mask_prompt=True, batch_size=1)
    assert before == round(evaluate(options, str(tmp_path / "adapter")), 4)
    assert 0 < abs(after - before) < 0.2 * before
    assert "Quantising the" in said
    assert line in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.bad_input("export --data: no test.jsonl, or a target that is no merge")
def test_mistakes(words, tmp_path, capsys):
    (tmp_path / "data" / "test.jsonl").unlink()
    assert main(words) == 2
    assert not (tmp_path / "merged").exists()
    assert main([*words, "--to", "mlx"]) == 2
    assert "--data: --to mlx has no use for it" in capsys.readouterr().err
