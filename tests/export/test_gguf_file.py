"""A merged model, or an adapter, goes through llama.cpp's converters, for which small programs stand in here.

scripts/gguf_adapters.py exports adapters with llama.cpp itself, and reads the files.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from checkpoint_copies import copied, rewrite
from console import called
from deltatune.cli import main
from deltatune.models.load import load_tokenizer, read_config
from saved_adapters import adapted

# It lists what it knows as the converter does, and writes what it was given in place of a GGUF file.
CONVERTER = """
import json, pathlib, sys
if "--print-supported-models" in sys.argv:
    sys.stderr.write("INFO:hf-to-gguf:TEXT models:\\nINFO:hf-to-gguf:  - Known\\n  - LlamaForCausalLM\\n")
    sys.exit()
folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1])
if "bf16" in sys.argv:
    sys.exit("no memory left")
seen = {"files": sorted(p.name for p in folder.iterdir()), "words": sys.argv[-2:]}
for name, key in (("tokenizer_config.json", "eos_token"), ("generation_config.json", "eos_token_id")):
    seen[key] = json.loads((folder / name).read_text())[key] if (folder / name).exists() else None
out.write_text(json.dumps(seen))
"""


@pytest.fixture
def words(tiny_checkpoint, tmp_path):
    """The words of an export of an adapter on a tiny model, without those that name its architecture."""
    base = copied(tiny_checkpoint("qwen3_next"), tmp_path / "base", architectures=["Known"])
    adapted(base, tmp_path / "adapter", keys=["*.o_proj"])
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    found = ["export", "--to", "gguf", "--model", str(base), "--adapter-path", str(tmp_path / "adapter")]
    return [*found, "--save-path", str(tmp_path / "out.gguf"), "--llama-cpp", str(tmp_path / "llama.cpp")]


@pytest.fixture
def plain_names(monkeypatch):
    """Takes the tiny checkpoints, which have MLX's names, for ones of Hugging Face."""
    monkeypatch.setattr("deltatune.export.gguf_file.check_layout", lambda *_: None)


def test_the_converter_gets_the_merged_model(words, plain_names, tmp_path, complaint):
    assert main([*words, "--outtype", "f16"]) == 0
    written = json.loads((tmp_path / "out.gguf").read_text())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(written["files"])
    assert written["words"] == ["--outtype", "f16"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert "exists already" in complaint(*words)


def test_the_file_names_an_end_token_that_is_given(words, plain_names, tmp_path, capsys):
    assert main([*words, "--extra-eos-token", "<|endoftext|>"]) == 0
    assert "The file's end token is <|endoftext|>: " in capsys.readouterr().out
    written = json.loads((tmp_path / "out.gguf").read_text())
    tokenizer = load_tokenizer(tmp_path / "base", read_config(tmp_path / "base"))
    assert written["eos_token"] == "<|endoftext|>"
    assert written["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


@pytest.mark.bad_input("export --extra-eos-token for an adapter alone, or two of them for a GGUF file")
@pytest.mark.parametrize(
    ("target", "tokens", "said"),
    [
        ("peft", ["a"], "--to peft writes an adapter alone, and generation stops where the config of its base"),
        ("mlx", ["a"], "give it to --to merged or --to gguf, which write a whole model"),
        ("gguf-adapter", ["a"], "--to gguf-adapter writes an adapter alone"),
        ("gguf", ["a", "b"], "--extra-eos-token: a GGUF file names one end token; give one."),
    ],
)
def test_end_tokens_belong_to_a_whole_model(tmp_path, target, tokens, said):
    asked = "export", "--to", target, "--model", "m", "--save-path", tmp_path / "out", "--extra-eos-token", *tokens
    done = called(*asked)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


# It writes what it was given, as llama-quantize would: the type, and what the converter wrote.
QUANTIZER = """#!{python}
import pathlib, sys
pathlib.Path(sys.argv[2]).write_text(sys.argv[3] + pathlib.Path(sys.argv[1]).read_text())
"""


@pytest.mark.parametrize("place", ["build/bin", "."])
def test_types_that_the_converter_does_not_write_go_through_llama_quantize(words, plain_names, tmp_path, capsys, place):
    folder = tmp_path / "llama.cpp" / place
    assert main([*words, "--outtype", "q4_k_m"]) == 2
    assert "llama-quantize makes this type, and there is none on PATH or built in" in capsys.readouterr().err
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "llama-quantize"
    program.write_text(QUANTIZER.format(python=sys.executable))
    program.chmod(0o755)
    assert main([*words, "--outtype", "q4_k_m"]) == 0
    written = (tmp_path / "out.gguf").read_text()
    assert written.startswith("Q4_K_M{")
    assert json.loads(written[6:])["words"] == ["--outtype", "auto"]
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "base", "llama.cpp", "out.gguf", "out.Modelfile"}


def test_a_modelfile_lies_beside_the_file(words, plain_names, tmp_path, capsys):
    assert main(words) == 0
    lines = (tmp_path / "out.Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./out.gguf"
    assert any(line.startswith("PARAMETER stop ") for line in lines) == any("TEMPLATE" in line for line in lines)
    assert f"ollama create NAME -f {tmp_path / 'out.Modelfile'}" in capsys.readouterr().out


@pytest.mark.bad_input("--to gguf: a family that llama.cpp does not know")
def test_a_family_that_llama_cpp_does_not_know_is_refused_by_name(words, plain_names, tmp_path, complaint):
    rewrite(tmp_path / "base" / "config.json", architectures=["Qwen9ForCausalLM"])
    assert "does not know Qwen9ForCausalLM (model_type qwen3_next)" in complaint(*words)


@pytest.mark.bad_input("--to gguf: a conversion to MLX, no converter, an unknown --outtype")
def test_mistakes(words, tmp_path, complaint, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for changed, said in (
        (words, "a name that MLX gave it"),
        (words[:-2], "no convert_hf_to_gguf.py on PATH"),
        ([*words[:-1], str(tmp_path)], "give llama.cpp's folder"),
        ([*words, "--outtype", "q4"], "--outtype q4"),
    ):
        assert said in complaint(*changed)


def test_output_of_a_failed_converter_is_quoted(words, plain_names, tmp_path, complaint):
    assert "failed with exit code 1: no memory left" in complaint(*words, "--outtype", "bf16")
    assert not (tmp_path / "out.gguf").exists()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text("print('what')")
    assert "does not list the models that it knows: what" in complaint(*words)


# The converter of adapters writes what it was given, too.
ADAPTER_CONVERTER = """
import json, pathlib, sys
folder, words = pathlib.Path(sys.argv[-1]), sys.argv[1:-1]
config = json.loads((folder / "adapter_config.json").read_text())
out = pathlib.Path(words[words.index("--outfile") + 1])
out.write_text(json.dumps({"words": words, "alpha": config["lora_alpha"]}))
(out.parent.parent / "seen.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
"""


@pytest.fixture
def export(tiny_checkpoint, tmp_path):
    """export(kind, *words, family, rows, **options) exports a new adapter alone; returns the exit code."""
    programs = tmp_path / "llama.cpp"
    programs.mkdir()
    (programs / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (programs / "convert_lora_to_gguf.py").write_text(ADAPTER_CONVERTER)

    def call(kind="lora", *words, family="qwen3_next", architecture="Known", **options):
        base = tmp_path / f"base{len(list(tmp_path.iterdir()))}"
        copied(tiny_checkpoint(family), base, architectures=[architecture])
        adapted(base, tmp_path / "adapter", kind, **({"rank": 2, "scale": 3.0, "keys": ["*.o_proj"]} | options))
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
