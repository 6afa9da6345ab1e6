"""Publishes an export: writes its model card (README.md), and uploads its folder to the Hugging Face hub.

The card has the base, the data, the options and the figures of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from ..data.vision.media import PICTURE_OPTIONS
from ..errors import UserError, first_line, reason
from ..lora.adapter_files import options_of
from ..train.saved import state

CARD = "README.md"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The options that say how an adapter was trained, in the order of the card.
_OPTIONS = (
    "fine_tune_type", "num_layers", "iters", "batch_size", "grad_accumulation_steps", "learning_rate", "lr_schedule",
    "optimizer", "max_seq_length", "mask_prompt", "chat_template_config", "pack", "seed", *PICTURE_OPTIONS,
)  # fmt: skip
_LIBRARIES = {"peft": "peft", "mlx": "mlx", "merged": "transformers", "gguf": "gguf"}


def write_card(folder: Path, target: str, base_model: str, adapter_path: Path, notes: list[str]) -> Path:
    """Write the card of an export, of the kind that --to names, into its folder in the place of the base's own.

    `adapter_path` has the files of the run where these are still there; `notes` are sentences for the reader. Returns
    the path of the card.
    """
    path = folder / CARD
    try:
        licence = _licence(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}
        path.write_text(card(target, base_model, adapter_path, notes, licence), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: the model card cannot be written ({error.strerror}).") from error
    return path


def card(
    target: str, base_model: str, adapter_path: Path, notes: list[str], licence: Mapping[str, Any] | None = None
) -> str:
    """Return the text of the card; arguments as for write_card, and the base's licence in its card's words."""
    options = options_of(adapter_path)
    tags = ["deltatune"] if options.get("fine_tune_type") == "full" else ["deltatune", "lora"]
    head: dict[str, Any] = {"library_name": _LIBRARIES[target], "tags": tags, **(licence or {})}
    named = _HUB_NAME.fullmatch(base_model) is not None and not Path(base_model).exists()
    if named:
        head["base_model"] = base_model
        if target in ("peft", "mlx"):
            head["base_model_relation"] = "adapter"
    base = base_model if named else Path(base_model).name
    lines = ["---", yaml.safe_dump(head, sort_keys=True).strip(), "---", "", f"# {base}, fine-tuned", ""]
    lines += [f"Base model: `{base}`. Trained with deltatune on MLX; exported for {_LIBRARIES[target]}.", ""]
    lines += [note + "\n" for note in notes]
    if asked := options.get("chat_template_config"):
        variables = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        lines += [f"It was trained with these variables of the chat template; ask it so: `{variables}`.", ""]
    lines += _table("Training", _training(options))
    lines += _table("Data and figures", _figures(adapter_path))
    return "\n".join(lines).rstrip() + "\n"


def _licence(base_card: str) -> dict[str, Any]:
    """Return the fields on the licence in the base's own card, which a merge copies."""
    match = re.match(r"---\s*\n(.*?)\n---", base_card, re.DOTALL)
    try:
        head = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError):
        # PyYAML raises ValueError for a day that no month has.
        head = None
    fields = head if isinstance(head, dict) else {}
    return {key: value for key, value in fields.items() if isinstance(key, str) and key.startswith("license")}


def _training(options: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: options[key] for key in _OPTIONS if options.get(key) is not None}
    lora = options.get("lora_parameters")
    if isinstance(lora, dict):
        shown |= {key: lora[key] for key in ("rank", "scale", "dropout") if key in lora}
        if isinstance(lora.get("keys"), list):
            shown["adapted modules"] = len(lora["keys"])
    return shown


def _figures(adapter_path: Path) -> dict[str, Any]:
    """The last figures of the run, and the fingerprint of its training data, from the state that it saved."""
    progress = state.peek(state.state_path(adapter_path))
    if progress is None:
        return {}
    figures = {
        "iterations": progress.iteration,
        "trained tokens": progress.trained_tokens,
        "training loss": progress.train_loss,
        "validation loss": progress.val_loss,
        "examples": progress.order.get("examples"),
        "fingerprint of the training data": progress.order.get("training data"),
    }
    return {key: value for key, value in figures.items() if value is not None}


def _table(title: str, rows: Mapping[str, Any]) -> list[str]:
    if not rows:
        return []
    cells = [f"| {key} | {_cell(value)} |" for key, value in rows.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *cells, ""]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|")


def check_repository(name: str) -> None:
    """Refuse a name of a repository that the hub would not accept, before any work is done for it."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {name}: {first_line(error)}") from error
    if "/" not in name:
        raise UserError(f"--push-to-hub {name}: expected owner/name.")


def push_to_hub(folder: Path, name: str) -> str:
    """Upload all files of a folder to the repository owner/name, made as a private one if need be; return its address.

    A hub that refuses or cannot be reached is a UserError, and the folder stays as it is.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by deltatune export")
    except _errors() as error:
        # A file that does not get through is one error, and why is another.
        cause = f" {reason(error.__cause__)}" if isinstance(error, RuntimeError) and error.__cause__ else ""
        raise UserError(
            f"--push-to-hub {name}: {reason(error)}{cause} The export is complete in {folder}; log in with hf auth "
            f"login and upload it with hf upload {name} {quote(str(folder))}."
        ) from error
    return str(address)


def _errors() -> tuple[type[Exception], ...]:
    """The errors of huggingface_hub where the hub refuses, a file does not get through, or nobody answers.

    The last is an error of the HTTP library beneath, which differs by version: the base class `HTTPError` of that
    library is one of huggingface_hub's own error.
    """
    from huggingface_hub.errors import HfHubHTTPError

    library = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError" and issubclass(kind, Exception)]
    return (OSError, ValueError, RuntimeError, *library)
