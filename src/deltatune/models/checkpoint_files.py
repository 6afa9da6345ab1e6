"""Chooses the weight files of a checkpoint folder, and checks all its files before any loader opens them.

The checks make sure that no code in the folder runs unless the user allows it, and no file refers to a path outside.
Weights must be in safetensors files.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..lora.adapter_files import RUN_OPTIONS
from ..lora.tensor_files import Header, read_header
from ..machine.json_files import read_json
from ..options.values import short

# Which tensor stands in which file, for checkpoints of several files.
INDEX = "model.safetensors.index.json"
# The one file of a checkpoint that is not split, and the pattern of the names of all weight files.
WHOLE = "model.safetensors"
WEIGHTS = "model*.safetensors"

# The keys of config.json that say how weights are quantised, at its top level or in its text_config.
QUANTISATION_KEYS = ("quantization", "quantization_config")

# Weight formats that can run code when they are opened, or that nothing here checks.
UNCHECKED_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".h5", ".msgpack", ".gguf")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
# The key of a chat template, in tokenizer_config.json and in chat_template.json.
_TEMPLATE = "chat_template"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@ -]*")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def plain_name(name: Any, where: str) -> str:
    """Return `name` if it names a file inside the checkpoint folder; else UserError, which quotes the file and key
    `where`.
    """
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise UserError(
            f"{where}: {name!r} is not a plain file name; "
            "files of a checkpoint may not refer to paths outside its folder."
        )
    return name


def check_config(path: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse a config.json without a model type, with files outside `path`, or with code that `trust_remote_code`
    forbids.
    """
    where = str(path / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError(f"{where}: it has no model_type, so no model can be built from it.")
    if "model_file" in config and config["model_file"] is not None:
        plain_name(config["model_file"], f"{where}: model_file")
        if not trust_remote_code:
            raise UserError(
                f"{where}: the checkpoint asks to run its own code, {config['model_file']}; "
                "deltatune runs no code from a checkpoint unless you pass --trust-remote-code."
            )
    _check_code(config, where)


def check_dense(path: Path) -> None:
    """Refuse a config.json that describes quantised weights, which have no gradient, for training from scratch."""
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    for part in (config, config.get("text_config") or {}):
        for key in QUANTISATION_KEYS:
            if part.get(key):
                raise UserError(
                    f"--from-scratch: {path / 'config.json'} has {key!r}, and quantised weights cannot be trained; "
                    f"give the config of the model before it was quantised, or remove {key!r} from a copy of this one."
                )


def check_tokenizer(path: Path) -> None:
    """Refuse a folder without a tokenizer, or with one that is damaged or names files outside the folder."""
    if not any(next(path.glob(pattern), None) for pattern in _TOKENIZERS):
        raise UserError(
            f"{path}: no tokenizer in it (tokenizer.json or tokenizer.model expected); copy the original model's."
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
            raise UserError(f"{config_path}: {key} {config[key]!r} is not the name of a parser or template.")
    _check_chat_template(config.get(_TEMPLATE), config_path)
    _check_code(config, str(config_path))


def processor_template(path: Path) -> Any:
    """Return the chat template of chat_template.json where it stands there alone, as older processors save it.

    transformers' tokenizers read chat_template.jinja and tokenizer_config.json.
    """
    file, config = path / "chat_template.json", path / "tokenizer_config.json"
    elsewhere = (path / "chat_template.jinja").is_file() or (config.is_file() and read_json(config).get(_TEMPLATE))
    if elsewhere or not file.is_file():
        return None
    template = read_json(file).get(_TEMPLATE)
    _check_chat_template(template, file)
    return template


def _check_chat_template(template: Any, config_path: Path) -> None:
    """Check that a chat template is text, or several named texts: {name: text} or [{"name": ..., "template": ...}]."""
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    entries = template if isinstance(template, list) else [{"name": "default", "template": template}]
    for entry in entries if template is not None else []:
        named = entry if isinstance(entry, dict) else {}
        if not isinstance(named.get("name"), str) or not isinstance(named.get("template"), str):
            raise UserError(
                f"{config_path}: chat_template must be text, or several texts with names, got {short(entry)}. "
                "Take the file of the original model."
            )
    if template is not None and "default" not in [entry["name"] for entry in entries]:
        raise UserError(f'{config_path}: chat_template names no text "default"; take the file of the original model.')


def _check_code(config: dict[str, Any], where: str) -> None:
    """Check that auto_map names classes as module.Class, in the folder itself and not in another repository."""
    auto_map = config.get("auto_map") or {}
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    for value in values:
        for reference in value if isinstance(value, list) else [value]:
            if reference is not None and not (isinstance(reference, str) and _CLASS_PATH.fullmatch(reference)):
                raise UserError(
                    f"{where}: auto_map names {reference!r}; deltatune never uses code from outside the folder."
                )


def weight_files(path: Path) -> list[Path]:
    """Return the files that hold the weights of a checkpoint, by name, as transformers chooses them; none without
    weights.

    model.safetensors counts before an index, unless the index names it among others that are all there. An index counts
    before other files. Without either, all files that mlx-lm would read are taken.
    """
    candidates = sorted(path.glob(WEIGHTS))
    whole = path / WHOLE
    named = sorted(path / file for file in set(_weight_map(path).values()))
    if whole in candidates and not (whole in named and all(file.is_file() for file in named)):
        return [whole]
    return named or candidates


def index_counts(path: Path) -> bool:
    """Return whether a checkpoint has an index that is the index of its weight files, not of another build's."""
    weight_map = _weight_map(path)
    files = weight_files(path)
    if not weight_map or {path / file for file in weight_map.values()} != set(files):
        return False
    # transformers does not read the index beside model.safetensors, so another build's may be left over there.
    whole = path / WHOLE
    return files != [whole] or not whole.is_file() or set(weight_map) <= set(read_header(whole).tensors)


def weight_headers(path: Path) -> dict[str, Header]:
    """Return the headers of all weight files by file name, compared with the index, if there is one.

    UserError: no safetensors files, a damaged header, missing files or tensors, or two values of one tensor.
    """
    files = weight_files(path)
    if not files:
        others = sorted(file.name for file in path.iterdir() if file.suffix in UNCHECKED_FORMATS)
        if others:
            raise UserError(
                f"{path}: the weights are in {others[0]} and not in model*.safetensors; "
                "such files can run code when opened and are never loaded. Convert the model to safetensors first."
            )
        raise UserError(f"{path}: no weights in it (model*.safetensors expected).")
    indexed = index_counts(path)
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    named = config.get("transformers_weights")
    chosen = INDEX if indexed else WHOLE
    if named not in (None, chosen):
        raise UserError(
            f"{path / 'config.json'}: transformers_weights names {short(named)}, and the weights are read from "
            f"{chosen}. Keep one of the two: take the key out, or make a folder in which that file is {WHOLE}."
        )
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UserError(
            f"{path}: {len(absent)} weight files of the index are missing, such as {absent[0]}; download them again."
        )
    headers = {file.name: read_header(file) for file in files}
    weight_map = _weight_map(path) if indexed else {}
    missing = [tensor for tensor, file in weight_map.items() if tensor not in headers[file].tensors]
    if missing:
        raise UserError(
            f"{path / weight_map[missing[0]]}: {len(missing):,} tensors that the index places in it are missing, such "
            f"as {missing[0]}; download it again."
        )
    _check_repeated(path, headers)
    return headers


def is_trained_checkpoint(folder: Path) -> bool:
    """Whether a run that trained a whole model wrote into `folder`."""
    return (folder / RUN_OPTIONS).is_file() and any(True for _ in folder.glob(WEIGHTS))


@contextmanager
def only_chosen(path: Path) -> Iterator[Path]:
    """Yield a folder with only the weights of weight_files(), for readers that choose files themselves.

    It is the checkpoint's own where it holds no other weights. Otherwise it is a folder of links, which is gone
    afterwards.
    """
    files = set(weight_files(path))
    others = {file for file in path.glob("*.safetensors") if file not in files}
    if (path / INDEX).is_file() and not index_counts(path):
        others.add(path / INDEX)
    if not others:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="deltatune-") as folder:
        for file in path.iterdir():
            if file not in others:
                (Path(folder) / file.name).symlink_to(file.absolute())
        yield Path(folder)


def _weight_map(path: Path) -> dict[str, str]:
    """The index of a checkpoint, which says for each tensor in which file it is; empty if there is no index."""
    if not (path / INDEX).is_file():
        return {}
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{path / INDEX}: it has no weight_map, which says where each tensor is; download it again.")
    for tensor, file in weight_map.items():
        plain_name(file, f"{path / INDEX}: {tensor}")
    return weight_map


def _check_repeated(path: Path, headers: dict[str, Header]) -> None:
    """UserError where two files hold different values of a tensor, as shards of two builds do."""
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            other = holders.setdefault(name, file)
            if other != file and not tensor.equals(headers[other].tensors[name]):
                raise UserError(
                    f"{path}: {other} and {file} hold different values of {name}, so they are of two builds of the "
                    "model; leave one build in the folder."
                )
