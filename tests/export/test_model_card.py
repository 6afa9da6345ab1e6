"""A merge's error: the loss before and after, the rounding of quantised matrices, and what the card says of it."""

import json

import mlx.core as mx
import pytest
import yaml

from deltatune.cli import main
from deltatune.commands.eval import evaluate
from deltatune.export.model_card import card, write_card
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.models.load import load_model
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train.saved import state
from saved_adapters import moved


@pytest.fixture
def adapter(tmp_path):
    """The folder of a run's adapter, with its state."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    lora = {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": ["a.q_proj", "a.v_proj"]}
    options = {"fine_tune_type": "lora", "iters": 50, "learning_rate": 1e-5, "lora_parameters": lora, "seed": 3}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"a.q_proj.lora_a": mx.zeros((2, 8))})
    progress = state.Progress(iteration=50, train_loss=1.23456789, val_loss=1.5)
    progress.order = {"examples": 12, "training data": "f00d"}
    path = state.state_path(folder)
    path.parent.mkdir(parents=True)
    state.save(path, {"x": mx.zeros(1)}, progress, {})
    return folder


def test_the_card_has_base_options_data_and_figures(adapter):
    text = card("peft", "Qwen/Qwen3-0.6B", adapter, ["A note."])
    head = yaml.safe_load(text.split("---")[1])
    assert head == {
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "tags": ["deltatune", "lora"],
    }
    for line in ("| iters | 50 |", "| rank | 8 |", "| adapted modules | 2 |", "| training loss | 1.23457 |"):
        assert line in text
    assert "| fingerprint of the training data | f00d |" in text
    assert "A note." in text


def test_the_card_of_a_folder_without_its_run_names_no_path_of_the_machine(adapter, tmp_path):
    state.state_path(adapter).unlink()
    text = card("mlx", str(tmp_path), adapter, [])
    assert str(tmp_path.parent) not in text
    assert "base_model" not in yaml.safe_load(text.split("---")[1])
    assert "fingerprint" not in text


def test_the_licence_of_a_merged_model_is_the_bases(adapter, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n")
    write_card(tmp_path, "merged", "Qwen/Qwen3-0.6B", adapter, [])
    head = yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])
    assert head["license"] == "apache-2.0"
    assert head["tags"] == ["deltatune", "lora"]


@pytest.mark.parametrize(
    "base_card",
    [
        b"---\nlicense: mit\ndate: 2024-02-31\n---\n",
        b"---\n1: one\nlicense: mit\n---\n",
        b"---\nlicense: mit\n---\n\xe9",
    ],
    ids=["no such day", "a number as a key", "not UTF-8"],
)
def test_a_base_card_of_any_kind_keeps_no_export_from_its_card(adapter, tmp_path, base_card):
    (tmp_path / "README.md").write_bytes(base_card)
    assert "fine-tuned" in write_card(tmp_path, "merged", "Qwen/Qwen3-0.6B", adapter, []).read_text()


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
