"""The card says what was trained on what, and how well; the upload sends the folder as it is."""

import json

import mlx.core as mx
import pytest
import yaml

from deltatune.cli import main
from deltatune.export import hub
from deltatune.export.model_card import card, write_card
from deltatune.train import state


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


def test_the_folder_goes_to_a_private_repository(adapter, tmp_path, monkeypatch, capsys):
    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append((name, options))
            return "https://hub/me/it"

        def upload_folder(self, **options):
            calls.append(options)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    words = ["export", "--to", "mlx", "--model", "a/b", "--adapter-path", str(adapter)]
    assert main([*words, "--save-path", str(tmp_path / "out"), "--push-to-hub", "me/it"]) == 0
    assert calls[0] == ("me/it", {"private": True, "exist_ok": True})
    assert calls[1]["repo_id"] == "me/it"
    assert calls[1]["folder_path"] == tmp_path / "out"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapters.safetensors",
    }
    assert "Uploaded to https://hub/me/it" in capsys.readouterr().out


def test_a_refusal_of_the_hub_leaves_the_export(adapter, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError("401 Unauthorized.")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    words = ["export", "--to", "mlx", "--model", "a/b", "--adapter-path", str(adapter)]
    assert main([*words, "--save-path", str(tmp_path / "out"), "--push-to-hub", "me/it"]) == 2
    said = capsys.readouterr().err
    assert "401 Unauthorized." in said
    assert f"The export is complete in {tmp_path / 'out'}" in said
    assert (tmp_path / "out" / "adapters.safetensors").is_file()
    assert hub.check_name("me/it") is None
