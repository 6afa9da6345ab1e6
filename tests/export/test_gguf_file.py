"""A merged model goes through llama.cpp's converter, for which a small program with its two uses stands in here."""

import json
import shutil
from pathlib import Path

import pytest
from mlx.utils import tree_map

from deltatune.cli import main
from deltatune.config import LoraConfig
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.models.load import load_model

# It lists what it knows as the converter does, and writes what it was given in place of a GGUF file.
CONVERTER = """
import json, pathlib, sys
if "--print-supported-models" in sys.argv:
    sys.stderr.write("INFO:hf-to-gguf:TEXT models:\\nINFO:hf-to-gguf:  - Known\\n  - LlamaForCausalLM\\n")
    sys.exit()
folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1])
if "bf16" in sys.argv:
    sys.exit("no memory left")
out.write_text(json.dumps({"files": sorted(p.name for p in folder.iterdir()), "words": sys.argv[-2:]}))
"""


@pytest.fixture
def words(tiny_checkpoint, tmp_path):
    """The words of an export of an adapter on a tiny model, without those that name its architecture."""
    base = Path(shutil.copytree(tiny_checkpoint("qwen3_next"), tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"architectures": ["Known"]}))
    model, _ = load_model(base)
    convert_to_lora(model, LoraConfig(rank=2, keys=["*.o_proj"]))
    model.update(tree_map(lambda array: array + 0.01, model.trainable_parameters()))
    save_adapters(model, tmp_path / "adapter", {})
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    found = ["export", "--to", "gguf", "--model", str(base), "--adapter-path", str(tmp_path / "adapter")]
    return [*found, "--save-path", str(tmp_path / "out.gguf"), "--llama-cpp", str(tmp_path / "llama.cpp")]


@pytest.fixture
def plain_names(monkeypatch):
    """Takes the tiny checkpoints, which have MLX's names, for ones of Hugging Face."""
    monkeypatch.setattr("deltatune.export.gguf_file.check_layout", lambda *_: None)


def test_the_converter_gets_the_merged_model(words, plain_names, tmp_path, capsys):
    assert main([*words, "--outtype", "f16"]) == 0
    written = json.loads((tmp_path / "out.gguf").read_text())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(written["files"])
    assert written["words"] == ["--outtype", "f16"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.bad_input("--to gguf: a family that llama.cpp does not know")
def test_a_family_that_llama_cpp_does_not_know_is_refused_by_name(words, plain_names, tmp_path, capsys):
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["Qwen9ForCausalLM"]}))
    assert main(words) == 2
    assert "does not know Qwen9ForCausalLM (model_type qwen3_next)" in capsys.readouterr().err


@pytest.mark.bad_input("--to gguf: a conversion to MLX, no converter, an unknown --outtype")
def test_mistakes(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for changed, said in (
        (words, "a name that MLX gave it"),
        (words[:-2], "no convert_hf_to_gguf.py on PATH"),
        ([*words[:-1], str(tmp_path)], "give llama.cpp's folder"),
        ([*words, "--outtype", "q4"], "--outtype q4"),
    ):
        assert main(changed) == 2
        assert said in capsys.readouterr().err


def test_what_the_converter_says_when_it_fails(words, plain_names, tmp_path, capsys):
    assert main([*words, "--outtype", "bf16"]) == 2
    assert "failed with exit code 1: no memory left" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text("print('what')")
    assert main(words) == 2
    assert "does not list the models that it knows: what" in capsys.readouterr().err
