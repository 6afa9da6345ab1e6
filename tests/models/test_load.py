"""A right checkpoint loads as mlx-lm loads it; a wrong one gets one message that names the fault and its place."""

import copy
import json
import struct
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from checkpoint_copies import copied, rewrite, rewritten
from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.models.load import load, load_model, locate, new_model
from families import FAMILIES
from layouts import has_gaps

TOKENS = mx.array([[5, 6, 7, 8, 9]])


@pytest.fixture
def damaged(tiny_checkpoint, tmp_path):
    """A function that copies a tiny checkpoint, so that a test can damage it."""

    def copy(family: str = "qwen3", **options) -> Path:
        return copied(tiny_checkpoint(family, **options), tmp_path / "model")

    return copy


# A family says where its tensors are; packed ones are found alike in each.
@pytest.mark.parametrize(
    ("family", "quantize"), [(family, {"bits": 4} if at % 2 else None) for at, family in enumerate(FAMILIES)]
)
def test_loads_what_mlx_lm_loads(tiny_checkpoint, family, quantize):
    if quantize and backend.device() == "cuda":
        pytest.skip("MLX's CUDA products of packed rows of one group are wrong (docs/decisions/upstream.md)")
    path = tiny_checkpoint(family, quantize=quantize)
    model, config = load_model(path)
    reference, reference_config = mlx_lm.utils.load_model(path)
    assert type(model) is type(reference)
    assert config == reference_config
    assert mx.array_equal(model(TOKENS), reference(TOKENS))


def test_a_config_has_the_quantisation_that_mlx_lm_finds(damaged):
    path = damaged(quantize={"mode": "mxfp4"})
    rewrite(path / "config.json", quantization=None, quantization_config={"quant_method": "mxfp4"})
    config = load_model(path)[1]
    assert config == mlx_lm.utils.load_model(path)[1]
    assert config["quantization"]["mode"] == "mxfp4"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_slices_of_gate_and_up_are_copied_on_cuda(damaged, device, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    path = damaged("qwen3_5_moe")

    with rewritten(path / "model.safetensors") as tensors:
        for name in [name for name in tensors if name.endswith("switch_mlp.gate_proj.weight")]:
            layer = name.removesuffix("switch_mlp.gate_proj.weight")
            halves = [tensors.pop(f"{layer}switch_mlp.{half}_proj.weight") for half in ("gate", "up")]
            tensors[f"{layer}experts.gate_up_proj"] = mx.concatenate(halves, axis=1)
            tensors[f"{layer}experts.down_proj"] = tensors.pop(f"{layer}switch_mlp.down_proj.weight")

    model, _ = load_model(path)
    experts = [array for name, array in tree_flatten(model.parameters()) if "gate_proj" in name and array.ndim == 3]
    assert experts
    assert list(map(has_gaps, experts)) == [device == "cpu"] * len(experts)


def test_from_scratch_needs_no_weights_and_follows_the_seed(damaged):
    path = damaged("qwen3_5_moe")
    (path / "model.safetensors").unlink()
    before = mx.get_active_memory()
    again = load(path, from_scratch=True, seed=1, lazy=True).model
    assert mx.get_active_memory() - before < 1 << 16, "weights of a plan are not drawn"
    first, other = (load(path, from_scratch=True, seed=seed).model for seed in (1, 2))
    flat = [dict(tree_flatten(model.parameters())) for model in (first, again, other)]
    assert all(mx.array_equal(flat[0][name], flat[1][name]) for name in flat[0])
    name = "language_model.model.embed_tokens.weight"
    assert not mx.array_equal(flat[0][name], flat[2][name])
    assert first(TOKENS).shape == (1, 5, 320)


def refused(match: str, function, *arguments, **options) -> None:
    with pytest.raises(UserError, match=match) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_no_such_model(tmp_path):
    refused("no such directory, and not a hub name", load, tmp_path / "absent")
    refused("no such directory, and not a hub name", load, "./absent")
    refused("no such directory, and not a hub name", load, "absent")
    file = tmp_path / "file"
    file.write_text("")
    refused("a file; expected the folder", load, file)


def test_hub_name_that_cannot_be_downloaded(monkeypatch):
    def offline(name):
        raise OSError(f"{name} is not a valid model identifier\nmore text")

    monkeypatch.setattr(mlx_lm.utils, "_download", offline)
    message = "owner/model: no such directory, and it cannot be downloaded from the hub: owner/model is not"
    refused(message, locate, "owner/model")


def test_hub_name_is_downloaded_by_mlx_lm(monkeypatch, tiny_checkpoint):
    monkeypatch.setattr(mlx_lm.utils, "_download", lambda name: str(tiny_checkpoint("qwen3")))
    assert locate("owner/model") == tiny_checkpoint("qwen3")


def test_config_missing_or_not_json(damaged):
    path = damaged()
    (path / "config.json").write_text("{not json")
    refused("config.json: not JSON", load, path)
    (path / "config.json").write_text("[]")
    refused("expected a JSON object, got list", load, path)
    (path / "config.json").write_text("{}")
    refused("no model_type", load, path)
    (path / "config.json").unlink()
    refused("no config.json in it", load, path)


def test_unknown_model_type(damaged):
    path = damaged()
    rewrite(path / "config.json", model_type="qwen3_6")
    refused("'qwen3_6' is of a kind that mlx-lm .* does not know; the nearest that it knows is 'qwen3_5'", load, path)
    rewrite(path / "config.json", model_type="../../evil")
    refused("does not know", load, path)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_vision", "depth": 2}))
    refused("a vision encoder alone", load, path)


def test_config_without_a_needed_key(damaged):
    path = damaged()
    rewrite(path / "config.json", hidden_size=None)
    refused("hidden_size", load, path)
    refused("hidden_size", new_model, path)


@pytest.mark.parametrize(
    "value", [[], pytest.param("8", marks=pytest.mark.weekly), pytest.param({}, marks=pytest.mark.weekly)]
)
def test_each_value_of_another_type_is_refused_or_ignored(damaged, value):
    """A config of 2 x 16 values: no key ends in an error of Python's."""
    path = damaged("qwen3_5")
    config = json.loads((path / "config.json").read_text())
    refusals = 0
    for outer, key in [(None, key) for key in config] + [("text_config", key) for key in config["text_config"]]:
        changed = copy.deepcopy(config)
        (changed if outer is None else changed[outer])[key] = value
        (path / "config.json").write_text(json.dumps(changed))
        try:
            load_model(path, lazy=True)
        except UserError:
            refusals += 1
    assert refusals > 10


def test_missing_extra_and_misshapen_tensors_are_named_together(damaged):
    path = damaged()
    with rewritten(path / "model.safetensors") as tensors:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.9.extra"] = mx.zeros((2,))
        tensors["model.norm.weight"] = mx.zeros((3,))
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert "1 missing (model.layers.1.mlp.up_proj.weight)" in message
    assert "1 unknown to the model (model.layers.9.extra)" in message
    assert "1 misshapen (model.norm.weight has shape (3,), (64,) expected)" in message


def test_many_tensors_are_counted(damaged):
    path = damaged()
    rewrite(path / "config.json", num_hidden_layers=2)
    refused(r"22 unknown to the model \(.* and 18 more\)", load, path)


def test_tensor_that_sanitize_needs(damaged):
    path = damaged("qwen3_next")
    with rewritten(path / "model.safetensors") as tensors:
        prefix = "model.layers.0.mlp"
        stacked = {name: tensors.pop(f"{prefix}.switch_mlp.{name}.weight") for name in ("up_proj", "down_proj")}
        for name, weight in stacked.items():
            for expert in range(7):
                tensors[f"{prefix}.experts.{expert}.{name}.weight"] = weight[expert]
    refused("tensor 'model.layers.0.mlp.experts.7.up_proj.weight' is missing", load, path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_truncated_weights(damaged, keep):
    path = damaged()
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    refused("cut short|not a safetensors file", load, path)


@pytest.mark.bad_input("a checkpoint of pointers, as git clones it without Git LFS")
def test_pointers_in_the_place_of_weights(damaged):
    path = damaged()
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    refused("a pointer of Git LFS in the file's place; run `git lfs pull`", load, path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{broken", "corrupt safetensors header"),
        (b'{"a": ' + b"1" * 5000 + b"}", "corrupt safetensors header"),
        (b"[]", "corrupt safetensors header"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', "corrupt entry"),
        (b'{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}', "corrupt entry"),
        (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', "cannot fill the bytes 0 to 8"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}}', "cannot fill the bytes 0 to 8"),
        (b'{"__metadata__": ["pt"]}', "corrupt safetensors header"),
        (b"[" * 100_000, "corrupt safetensors header"),
        (b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}', "cannot fill"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "overlaps another or leaves a gap"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "bytes that belong to no tensor"),
    ],
)
def test_corrupt_headers(damaged, header, message):
    path = damaged()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    refused(message, load, path)


def test_pickled_weights_are_never_loaded(damaged):
    path = damaged()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused("are in pytorch_model.bin .* never loaded", load, path)
    (path / "pytorch_model.bin").unlink()
    refused("no weights in it", load, path)


def test_index(damaged):
    path = damaged()
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../../etc/model.safetensors"}}))
    refused("is not a plain file name", load, path)
    index.write_text("{}")
    refused("has no weight_map", load, path)
    shard = "model-00001-of-00002.safetensors"
    (path / "model.safetensors").rename(path / shard)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}))
    refused("1 weight files of the index are missing, such as model-00002-of-00002", load, path)
    index.write_text(json.dumps({"weight_map": {"model.absent.weight": shard}}))
    refused("missing, such as model.absent.weight", load, path)


def test_quantisation_that_config_does_not_know(damaged):
    path = damaged(quantize={})
    rewrite(path / "config.json", quantization=None, quantization_config=None)
    refused("weights are quantised, but config.json has no `quantization`", load, path)


def test_tokenizer_missing_or_broken(damaged):
    path = damaged()
    good = (path / "config.json").read_text()
    rewrite(path / "config.json", pad_token_id=[0])
    refused(r"config .*config\.json: transformers refuses it: .*pad_token_id", load, path)
    (path / "config.json").write_text(good)
    (path / "tokenizer.json").write_text("{")
    refused("tokenizer.json: not JSON", load, path)
    (path / "tokenizer.json").write_text('{"model": {"type": "Unheard"}}')
    refused("tokenizer .*: cannot be loaded", load, path)
    (path / "tokenizer.json").unlink()
    refused("no tokenizer in it", load, path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_file", "/etc/passwd"),
        ("tokenizer_file", "../tokenizer.json"),
        ("fast_tokenizer_files", ["tokenizer.json", "a/../../tokenizer.9.json"]),
        ("auto_map", {"AutoTokenizer": ["other/repository--code.Tokenizer", None]}),
        ("auto_map", {"AutoTokenizer": "../code.Tokenizer"}),
        ("chat_template_type", "..os"),
        ("tool_parser_type", "a.b"),
    ],
)
def test_names_in_the_tokenizer_config_stay_inside(damaged, key, value):
    path = damaged()
    rewrite(path / "tokenizer_config.json", **{key: value})
    refused(f"tokenizer_config.json: {key}", load, path)
    refused(f"tokenizer_config.json: {key}", load, path, trust_remote_code=True)


@pytest.mark.parametrize("template", [0, ["{{ messages }}"], {"default": 1}, [{"name": "default"}]])
def test_a_chat_template_that_is_no_text_is_refused(damaged, template):
    path = damaged()
    rewrite(path / "tokenizer_config.json", chat_template=template)
    refused("tokenizer_config.json: chat_template must be text", load, path)


@pytest.mark.parametrize("template", [{"default": "{{ 1 }}"}, [{"name": "default", "template": "{{ 1 }}"}]])
def test_chat_templates_with_names_are_read(damaged, template):
    path = damaged()
    rewrite(path / "tokenizer_config.json", chat_template=template)
    assert load(path).tokenizer.has_chat_template


@pytest.mark.parametrize("named", [False, True])
def test_a_chat_template_in_chat_template_json_alone_is_read(damaged, named):
    path, template = damaged(chat_template=None), "{% for message in messages %}{{ message.content }}{% endfor %}"
    content = [{"name": "default", "template": template}] if named else template
    (path / "chat_template.json").write_text(json.dumps({"chat_template": content}))
    tokenizer = load(path).tokenizer
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    # The tokenizer's own comes first.
    (path / "chat_template.jinja").write_text("own")
    assert load(path).tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "own"


@pytest.mark.bad_input("a chat_template.json whose template is no text")
def test_a_chat_template_json_that_holds_no_text_is_refused(damaged):
    path = damaged(chat_template=None)
    (path / "chat_template.json").write_text('{"chat_template": 5}')
    refused("chat_template.json: chat_template must be text", load, path)


CODE = "from pathlib import Path\nPath(__file__).with_name('ran').write_text('')\nclass Tokenizer: pass\n"


def test_code_in_a_checkpoint_is_not_run(damaged):
    path = damaged()
    (path / "code.py").write_text(CODE)
    rewrite(path / "config.json", model_file="code.py")
    refused("runs no code from a checkpoint unless you pass --trust-remote-code", load, path)
    rewrite(path / "config.json", model_file="../code.py")
    refused("is not a plain file name", load, path, trust_remote_code=True)
    rewrite(path / "config.json", model_file=None)
    rewrite(path / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Tokenizer", None]}, tokenizer_class="Own")
    assert load(path).tokenizer.encode("the dog")
    assert not list(path.rglob("ran"))


def test_code_in_a_checkpoint_runs_when_trusted(damaged):
    path = damaged()
    source = Path(mlx_lm.models.__path__[0]) / "qwen3.py"
    (path / "code.py").write_text(source.read_text().replace("from .", "from mlx_lm.models."))
    rewrite(path / "config.json", model_file="code.py")
    assert load(path, trust_remote_code=True).model(TOKENS).shape == (1, 5, 320)
