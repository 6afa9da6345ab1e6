"""A field of a wrong type in a JSON file beside a model or an adapter is one message, wherever the file is read."""

import json
import shutil

import pytest

from console import called
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.machine.json_fields import FIELDS, FieldKind
from deltatune.machine.json_files import check_fields, read_json


def kinds(fields, path=()):
    """Yield the path and the kind of every field of a table."""
    for name, kind in fields.items():
        if isinstance(kind, FieldKind):
            yield (*path, name), kind
        else:
            yield from kinds(kind, (*path, name))


def held(path, value):
    """Return an object that holds a value under a path."""
    for name in reversed(path):
        value = {name: value}
    return value


@pytest.mark.bad_input("a field of a wrong type in {file}")
@pytest.mark.parametrize("file", FIELDS)
def test_no_field_takes_a_value_that_no_library_expects(file):
    for path, kind in kinds(FIELDS[file]):
        wrong = [value for value in ({"x": 1}, [[1]], True, -2.5, "x") if not kind.fits(value)]
        assert len(wrong) >= 2, path
        for value in wrong:
            with pytest.raises(UserError) as caught:
                check_fields(held(path, value), FIELDS[file], file)
            where = ": ".join([file, *path])
            assert str(caught.value).startswith(f"{where}: expected {kind.words}, got ")
        if kind.null:
            check_fields(held(path, None), FIELDS[file], file)


# What published models hold, in forms that look unusual.
PUBLISHED = {
    "tokenizer_config.json": {
        "model_max_length": 1000000000000000019884624838656,
        "bos_token": None,
        "unk_token": "",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False},
        "extra_special_tokens": {},
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
        "legacy": None,
        "chat_template": [{"name": "default", "template": "x"}, {"name": "rag", "template": "y"}],
    },
    "config.json": {
        "eos_token_id": [1, 2],
        "pad_token_id": -1,
        "sliding_window": None,
        "rope_theta": [10000.0, 5000.0],
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768},
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        "intermediate_size": [16, 32],
        "vision_config": {"patch_size": [2, 14, 14]},
    },
    "preprocessor_config.json": {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 1540}, "fps": 2},
    "PEFT's adapter_config.json": {"target_modules": "all-linear", "modules_to_save": None, "alpha_pattern": {}},
    "adapter_config.json": {"lora_parameters": None, "fine_tune_type": "full", "num_layers": -1},
}


@pytest.mark.parametrize("file", PUBLISHED)
def test_json_of_published_models_is_read(file, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(PUBLISHED[file]))
    assert read_json(tmp_path / "a.json", file) == PUBLISHED[file]


@pytest.mark.bad_input("a tokenizer_config.json whose model_max_length is an object")
def test_a_command_names_the_file_and_the_field(tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "model")
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": {"x": 1}}))
    done = called("generate", "--model", model, "--prompt", "hello")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{file}: model_max_length: expected a number, got {{'x': 1}}. Correct it, or take the file" in done.stderr


@pytest.mark.bad_input("a {file} of a wrong type, read by the libraries alone")
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", [1], "expected a JSON object, got list"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id: expected a whole number of 0 or more"),
        ("special_tokens_map.json", {"eos_token": 3}, "eos_token: expected a token: text, or an object"),
        ("tokenizer_config.json", {"chat_template": {}}, 'chat_template names no text "default"'),
        ("generation_config.json", f'{{"x": {"1" * 5000}}}', "not JSON (Exceeds the limit (4300 digits)"),
    ],
)
def test_files_that_only_libraries_read_are_checked(complaint, tmp_path, file, content, message):
    model = shutil.copytree(MODEL, tmp_path / "model")
    old = json.loads((model / file).read_text()) if (model / file).is_file() and isinstance(content, dict) else None
    written = content if isinstance(content, str) else json.dumps(content if old is None else old | content)
    (model / file).write_text(written)
    assert message in complaint("generate", "--model", model, "--prompt", "hello")
