"""Uploads an exported folder to the Hugging Face hub, through huggingface_hub."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from ..errors import UserError, first_line, reason


def check_name(name: str) -> None:
    """Refuse a name of a repository that the hub would not accept, before any work is done for it."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {name}: {first_line(error)}") from error
    if "/" not in name:
        raise UserError(f"--push-to-hub {name}: expected owner/name.")


def push(folder: Path, name: str) -> str:
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
