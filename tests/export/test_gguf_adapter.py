"""An adapter alone goes through llama.cpp's converter, for which two small programs stand in here.

scripts/gguf_adapters.py does it with llama.cpp itself, and reads the files.
"""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from checkpoint_copies import copied
from deltatune.cli import main
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.lora.new_rows import add_rows
from deltatune.models.load import load_model
from deltatune.models.vocabulary import token_tables
from deltatune.options.config import LoraConfig
from saved_adapters import moved

MODELS = """
import sys
print("  - Known")
"""
# It writes what it was given in place of a GGUF file.
CONVERTER = """
import json, pathlib, sys
folder, words = pathlib.Path(sys.argv[-1]), sys.argv[1:-1]
config = json.loads((folder / "adapter_config.json").read_text())
out = pathlib.Path(words[words.index("--outfile") + 1])
out.write_text(json.dumps({"words": words, "alpha": config["lora_alpha"]}))
(out.parent.parent / "seen.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
"""


@pytest.fixture
def export(tiny_checkpoint, tmp_path):
    """export(kind, *words, family, rows, **options) exports a new adapter on a tiny model; returns the exit code."""
    programs = tmp_path / "llama.cpp"
    programs.mkdir()
    (programs / "convert_hf_to_gguf.py").write_text(MODELS)
    (programs / "convert_lora_to_gguf.py").write_text(CONVERTER)

    def call(kind="lora", *words, family="qwen3_next", rows=0, architecture="Known", **options):
        base = tmp_path / f"base{len(list(tmp_path.iterdir()))}"
        copied(tiny_checkpoint(family), base, architectures=[architecture])
        model, _ = load_model(base)
        add_rows(model, dict.fromkeys(token_tables(model), rows) if rows else {})
        convert_to_lora(
            model, LoraConfig(**({"rank": 2, "scale": 3.0, "keys": ["*.o_proj"]} | options)), fine_tune_type=kind
        )
        save_adapters(moved(model), tmp_path / "adapter", {})
        found = ["export", "--to", "gguf-adapter", "--model", str(base), "--adapter-path", str(tmp_path / "adapter")]
        return main([*found, "--save-path", str(tmp_path / "out.gguf"), "--llama-cpp", str(programs), *words])

    return call


def test_the_converter_gets_the_adapter_in_the_format_of_peft(export, tmp_path, capsys):
    assert export() == 0
    assert "llama-cli -m BASE.gguf --lora" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.gguf").read_text())
    words = written["words"]
    assert Path(words[words.index("--base") + 1]).name.startswith("base")
    assert words[-2:] == ["--outtype", "f32"]
    # llama.cpp divides alpha by the rank of each matrix.
    assert written["alpha"] == 3.0 * 2
    ours, theirs = mx.load(str(tmp_path / "adapter/adapters.safetensors")), mx.load(str(tmp_path / "seen.safetensors"))
    assert len(ours) == len(theirs)
    name = "model.layers.3.self_attn.o_proj"
    assert mx.array_equal(ours[f"{name}.lora_a"].T, theirs[f"base_model.model.{name}.lora_A.weight"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert export() == 2
    assert "exists already" in capsys.readouterr().err


def test_matrices_of_two_ranks_share_the_alpha_that_llama_cpp_divides(export, tmp_path):
    assert export(keys=["*.o_proj", "*.k_proj"], rank_pattern={"k_proj": 1}) == 0
    alpha = json.loads((tmp_path / "out.gguf").read_text())["alpha"]
    ours, theirs = mx.load(str(tmp_path / "adapter/adapters.safetensors")), mx.load(str(tmp_path / "seen.safetensors"))
    for name, rank in (("o_proj", 2), ("k_proj", 1)):
        path = f"model.layers.3.self_attn.{name}"
        a, b = (theirs[f"base_model.model.{path}.lora_{factor}.weight"] for factor in "AB")
        assert a.shape[0] == rank
        update = 3.0 * ours[f"{path}.lora_a"] @ ours[f"{path}.lora_b"]
        assert mx.allclose(alpha / rank * (b @ a).T, update, rtol=1e-5)


@pytest.mark.bad_input("--to gguf-adapter: DoRA, experts, an embedding, new tokens, an unknown family or --outtype")
def test_update_that_llama_cpp_cannot_express_is_refused_by_name(export, tmp_path, capsys):
    for kind, options, said in (
        ("dora", {}, "the adapter has DoRA, which"),
        ("lora", {"keys": ["mlp.switch_mlp.down_proj"]}, "the adapter has updates of experts, which"),
        ("lora", {"keys": ["*embed_tokens"], "family": "qwen3_5"}, "the adapter has updates of an embedding, which"),
        ("lora", {"rows": 2}, "the adapter has rows for new tokens, which"),
        ("lora", {"architecture": "Qwen9"}, "does not know Qwen9"),
    ):
        assert export(kind, **options) == 2
        assert said in capsys.readouterr().err
    assert export("lora", "--outtype", "q4") == 2
    assert "--outtype q4" in capsys.readouterr().err
    (tmp_path / "llama.cpp" / "convert_lora_to_gguf.py").unlink()
    assert export() == 2
    assert "no convert_lora_to_gguf.py there" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()
