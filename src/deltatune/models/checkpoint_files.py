"""What may lie in a checkpoint folder: checked before any loader opens it, so that nothing in it runs or leads out.

Weights are safetensors only. Every name that a file gives for another one is a plain name inside the folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..lora.tensor_files import Header, read_header

INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"

# Formats that run code when opened, or that no check here covers.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.npz", "*.h5", "*.msgpack", "*.gguf")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@ -]*")
_CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. UserError where it is unreadable, not JSON, or another kind of value."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(content).__name__}.")
    return content


def plain_name(name: Any, where: str) -> str:
    """`name`, if it is the name of a file and nothing more: no folder, no way up."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{where}: {name!r} is no plain file name; names in a checkpoint may not lead out of its folder."
        )
    return name


def check_config(path: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse a config without a model type, with code to run that was not asked for, or with names that lead out."""
    where = str(path / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError(f"{where}: no model_type, so no model can be built from it.")
    if "model_file" in config and config["model_file"] is not None:
        plain_name(config["model_file"], f"{where}: model_file")
        if not trust_remote_code:
            raise UserError(
                f"{where}: asks to run {config['model_file']} from the checkpoint; "
                "nothing in a checkpoint is run unless you pass --trust-remote-code."
            )
    _check_code(config, where)


def check_tokenizer(path: Path) -> None:
    """Refuse a folder without a tokenizer, or whose tokenizer files name others outside the folder."""
    if not any(next(path.glob(pattern), None) for pattern in _TOKENIZERS):
        raise UserError(
            f"{path}: no tokenizer in it (tokenizer.json or tokenizer.model expected); copy the model's own."
        )
    for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json"):
        if (path / name).is_file():
            read_json(path / name)
    config_path = path / "tokenizer_config.json"
    if not config_path.is_file():
        return
    config = read_json(config_path)
    for key, value in config.items():
        names = value if isinstance(value, list) else [value]
        if (key.endswith("_file") or key == "fast_tokenizer_files") and key != "special_tokens_map_file":
            for name in names:
                if name is not None:
                    plain_name(name, f"{config_path}: {key}")
    for key in ("chat_template_type", "tool_parser_type"):
        if config.get(key) is not None and not str(config[key]).isidentifier():
            raise UserError(f"{config_path}: {key} {config[key]!r} is no name of a parser or template.")
    _check_code(config, str(config_path))


def _check_code(config: dict[str, Any], where: str) -> None:
    """Class paths in auto_map are module.Class of the folder itself: no other repository, no folder above."""
    auto_map = config.get("auto_map") or {}
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    for value in values:
        for reference in value if isinstance(value, list) else [value]:
            if reference is not None and not (isinstance(reference, str) and _CODE.fullmatch(reference)):
                raise UserError(f"{where}: auto_map names {reference!r}; code of another folder is never used.")


def weight_headers(path: Path) -> dict[str, Header]:
    """{file name: checked header} of every weight file, the index compared with them where there is one."""
    files = sorted(path.glob(WEIGHTS))
    if not files:
        others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in path.glob(pattern))
        if others:
            raise UserError(
                f"{path}: only {others[0]} and the like, no model*.safetensors; "
                "such files can run code when opened and are never loaded. Convert the model to safetensors first."
            )
        raise UserError(f"{path}: no weights in it (model*.safetensors expected).")
    headers = {file.name: read_header(file) for file in files}
    if (path / INDEX).is_file():
        _check_index(path, headers)
    return headers


def _check_index(path: Path, headers: dict[str, Header]) -> None:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{path / INDEX}: no weight_map in it.")
    for tensor, file in weight_map.items():
        plain_name(file, f"{path / INDEX}: {tensor}")
    absent = sorted(set(weight_map.values()) - set(headers))
    if absent:
        raise UserError(
            f"{path}: {len(absent)} weight files of the index are missing, such as {absent[0]}; download again."
        )
    lost = [tensor for tensor, file in weight_map.items() if tensor not in headers[file].tensors]
    if lost:
        file = weight_map[lost[0]]
        raise UserError(
            f"{path / file}: {len(lost)} tensors that the index places in it are missing, such as {lost[0]}."
        )
