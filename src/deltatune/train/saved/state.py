"""Reads and writes the state of a run: a file with a checksum, replaced atomically, and the one before it.

A kill leaves a loadable file. If the file is damaged later, the run continues from the one before it.

A continued run must share the options and the model of its run. The digests of the model depend on its content alone,
so that it may be moved or renamed between the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import mlx.nn as nn
import xxhash
from mlx.utils import tree_map_with_path

from ...errors import UserError, first_line
from ...machine import checksum
from ...machine.atomic_files import replace_durably
from ...machine.host_memory import bytes_of
from ...options.config import TrainConfig
from ..by_layer.store import Store
from ..distillation import teacher_of
from ..progress import Progress
from ..tree import leaves

FORMAT = 3
# The options that may differ between a run and its continuation: how long it runs, how often and where it reports, and
# options that only change memory. Model and data are compared by content (digests(), BatchOrder), so their paths may
# differ.
FREE_OPTIONS = {
    *("model", "data", "hf_dataset", "resume_adapter_file", "teacher", "trust_remote_code", "force"),
    *("train", "test", "iters", "epochs", "val_batches", "test_batches", "early_stopping", "save_every", "keep"),
    *("steps_per_report", "steps_per_eval", "sample_prompts"),
    *("report_to", "project_name", "adapter_path", "resume", "overwrite", "reward_timeout", "reward_errors"),
    *("grad_checkpoint", "memory"),
    # The shapes of the model's tensors, which are compared, tell whether it was used.
    "resize_embeddings",
}

# The digests of the model, in the words of messages.
_MODEL = {
    "model_config": "another config.json",
    "model_tensors": "other tensors, or others that train",
    "model_content": "other numbers in its weights",
}
# The digests of other weights, and the options that name them.
_BESIDE = {"adapter_weights": "resume_adapter_file", "teacher_content": "teacher"}


def state_path(directory: str | Path) -> Path:
    """Return the path of the state file of a run with the output folder `directory`."""
    return Path(directory) / "state" / "state.safetensors"


def previous_path(path: Path) -> Path:
    """Return the path of the state that was saved before the one at `path`."""
    return path.with_name("previous.safetensors")


def exists(path: Path) -> bool:
    """Return whether there is a state file, or one before it."""
    return path.is_file() or previous_path(path).is_file()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal of the file system within the context into a UserError that names `path` and the remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(refusal(path, error)) from error


def write_atomically(path: Path, write: Callable[[BinaryIO], object], keep: Path | None = None) -> None:
    """Replace `path` atomically (machine.atomic_files.replace_durably); UserError if the file system refuses."""
    with writing(path):
        replace_durably(path, write, keep)


def refusal(path: Path, error: OSError) -> str:
    """Return a message on why `path` could not be written, with the remedy."""
    remedies = {
        errno.ENOSPC: "make room on that disk, or choose another --adapter-path",
        errno.EDQUOT: "your quota is used up: make room, or choose another --adapter-path",
        errno.EROFS: "the file system is read-only: choose another --adapter-path",
        errno.EACCES: "you may not write there: choose another --adapter-path",
        errno.EPERM: "you may not write there: choose another --adapter-path",
        errno.ENOTDIR: "part of that path is a file: choose another --adapter-path",
        errno.EEXIST: "part of that path is a file: choose another --adapter-path",
    }
    remedy = remedies.get(error.errno or 0, "choose another --adapter-path")
    return f"{path} cannot be written ({error.strerror or error}); {remedy}. What was saved before is untouched."


def fingerprint(config: TrainConfig, **facts: Any) -> dict[str, Any]:
    """Return the identity that a continuation shares with its run: all options but FREE_OPTIONS, and `facts`.

    A fact `model`, the model's name, is for messages alone.
    """
    options = {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE_OPTIONS}
    return json.loads(json.dumps(options | facts, default=str))


def save(
    path: Path, arrays: dict[str, mx.array], progress: Progress, identity: dict[str, Any], *, sound: bool = True
) -> None:
    """Write a state file with a checksum; a refusal of the file system is a UserError.

    The file that it replaces is kept at previous_path(path) if it is `sound`; otherwise the one before it is.
    `identity` are the options and facts that a continuation must share (see fingerprint).
    """
    content = {"format": FORMAT, "progress": dataclasses.asdict(progress), "identity": identity}
    metadata = {checksum.KEY: checksum.BLANK, "deltatune": json.dumps(content)}

    def write(file: BinaryIO) -> None:
        summed: Any = checksum.SummedFile(file)
        mx.save_safetensors(summed, arrays, metadata)
        summed.seal()

    previous = previous_path(path)
    keep, spare = (previous, previous) if sound else (None, path)
    try:
        replace_durably(path, write, keep)
    except OSError as error:
        # If the disk is full, a single good state has to do while the new one is written.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not spare.exists():
            raise UserError(refusal(path, error)) from error
        spare.unlink()
        write_atomically(path, write, keep)


def damage(path: Path) -> str | None:
    """Return the damage of a state file, as a clause that names the file; None if it is undamaged.

    A file of another format, which need not hold a checksum, is not damaged; load() refuses it.
    """
    try:
        summed = checksum.check(path)
        content = _read(path)[1]
        if not summed and content["format"] == FORMAT:
            return f"{path} is damaged (its checksum is missing)"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        return f"{path} is damaged ({first_line(error)})"
    return None


def load(path: Path, identity: dict[str, Any]) -> tuple[dict[str, mx.array], Progress]:
    """Read the arrays and the progress of a state file, unless it is damaged or belongs to another run."""
    if problem := damage(path):
        raise UserError(f"{problem}: it is no state to resume from; start anew without --resume.")
    arrays, content = _read(path)
    if content["format"] != FORMAT:
        raise UserError(
            f"{path} has state format {content['format']}, and this deltatune reads format {FORMAT}: continue the run "
            "with the deltatune that saved it, or start anew without --resume."
        )
    compare(path, content["identity"], identity)
    mx.eval(arrays)
    return arrays, Progress(**content["progress"])


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    loaded: Any = mx.load(str(path), return_metadata=True)
    return loaded[0], json.loads(loaded[1]["deltatune"])


def peek(path: Path) -> Progress | None:
    """Read only the progress of a state file, or of the one before it; None if both are missing or unreadable."""
    for candidate in (path, previous_path(path)):
        with contextlib.suppress(RuntimeError, KeyError, ValueError, TypeError):
            return Progress(**_read(candidate)[1]["progress"])
    return None


def compare(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a UserError that names everything in which the run saved in `path` and this one differ."""
    # An option that did not exist yet when the run was saved had its present default.
    defaults = fingerprint(TrainConfig())
    models = saved.get("model"), now.get("model")
    saved = {key: value for key, value in defaults.items() if key in now} | saved
    if isinstance(saved.get("lora_parameters"), dict):
        saved["lora_parameters"] = defaults["lora_parameters"] | saved["lora_parameters"]
    keys = sorted((saved.keys() | now.keys()) - {"model"})
    changed = {key: (saved.get(key), now.get(key)) for key in keys if saved.get(key) != now.get(key)}
    if changed:
        lines = "".join(f"\n  {line}" for line in _differences(changed, *models))
        raise UserError(
            f"--resume: {path} belongs to another run. What differs from it:{lines}\n"
            "Give the same model and options to continue that run, or another --adapter-path to start anew."
        )


def _differences(changed: dict[str, tuple[Any, Any]], before: str | None, now: str | None) -> list[str]:
    """Return a line on each option that differs, and one on the model; `before` and `now` are the model's names."""
    options = {key: values for key, values in changed.items() if key not in _MODEL | _BESIDE}
    lines = []
    for key, (was, is_now) in options.items():
        if isinstance(was, dict) and isinstance(is_now, dict):
            inner = {f"{key}: {name}": (was.get(name), is_now.get(name)) for name in was | is_now}
        else:
            inner = {key: (was, is_now)}
        lines += [f"{name}: was {one!r}, now {other!r}" for name, (one, other) in inner.items() if one != other]
    named = [option for key, option in _BESIDE.items() if key in changed]
    lines += [f"{option}: other weights than those that the run began with" for option in named]
    model = [words for key, words in _MODEL.items() if key in changed]
    # Options decide which tensors train, so where options differ, that is no sign of another model.
    if model and not (lines and model == [_MODEL["model_tensors"]]):
        name = f"{now} as before, but" if before == now else f"was {before or 'not noted'}, now {now},"
        lines.append(f"model: {name} with {' and '.join(model)}")
    return lines


def flatten(prefix: str, tree: Any) -> dict[str, mx.array]:
    """Return the leaves of `tree` by `prefix/path`."""
    return {f"{prefix}/{path}": leaf for path, leaf in leaves(tree)}


def unflatten(prefix: str, like: Any, arrays: dict[str, mx.array], path: Path) -> Any:
    """Return a tree with the structure of `like` and the leaves that flatten() stored under `prefix`.

    Leaves keep their saved dtype, since an optimizer may change the dtype of its moments. Other paths or shapes than
    those of `like` are a UserError that names `path`.
    """
    expected = {f"{prefix}/{name}": leaf for name, leaf in leaves(like)}
    stored = {key: value for key, value in arrays.items() if key.startswith(f"{prefix}/")}
    odd = sorted(expected.keys() ^ stored.keys())
    odd += [key for key in expected.keys() & stored.keys() if expected[key].shape != stored[key].shape]
    if odd:
        raise UserError(
            f"--resume: {path} does not fit this model: {len(odd):,} tensors differ, the first is {odd[0]}."
        )
    return tree_map_with_path(lambda name, _: stored[f"{prefix}/{name}"], like)


# The keys of config.json that say who wrote it, and change nothing that is computed.
_INCIDENTAL = ("_name_or_path", "transformers_version")


def digests(
    model: nn.Module,
    config: TrainConfig,
    model_config: dict[str, Any] | None,
    weights: Store | None = None,
    of_teacher: Store | None = None,
) -> dict[str, str | None]:
    """Return the facts of fingerprint() beside the options: digests of the model and of adapters.

    `weights` reads those of the model's arrays that stay on the disk, and `of_teacher` those of its teacher's.
    """
    adapter = config.resume_adapter_file
    teacher = teacher_of(config) if config.loss == "distill" else None
    return {
        "model_tensors": structure(model),
        "model_config": None if model_config is None else config_digest(model_config),
        "model_content": weights_digest(model, config, weights),
        "adapter_weights": None if adapter is None else file_digest(adapter),
        "teacher_content": None if teacher is None else weights_digest(teacher, TrainConfig(), of_teacher),
    }


def structure(model: nn.Module) -> str:
    """Return a digest of every parameter's name, shape and dtype, and of which parameters are trainable."""
    trains = {name for name, _ in leaves(model.trainable_parameters())}
    digest = hashlib.sha256()
    for name, leaf in sorted(leaves(model.parameters())):
        digest.update(f"{name} {leaf.shape} {leaf.dtype} {name in trains}\n".encode())
    return digest.hexdigest()[:16]


def config_digest(model_config: dict[str, Any]) -> str:
    """Return a digest of the content of a config.json, such as the base of its rotary positions."""
    content = {key: value for key, value in model_config.items() if key not in _INCIDENTAL}
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, default=str).encode())


def weights_digest(model: nn.Module, config: TrainConfig, weights: Store | None = None) -> str:
    """Return a digest of all numbers of the checkpoint; it takes about the time of reading them from memory.

    Randomly initialised tensors are left out, since another device may round them differently: adapters, and all of a
    model that trains from scratch. The seed, one of the options that a continuation must share, determines those.
    """
    drawn = set() if config.fine_tune_type == "full" else {name for name, _ in leaves(model.trainable_parameters())}
    loaded = [(name, leaf) for name, leaf in sorted(leaves(model.parameters())) if name not in drawn]
    digest = xxhash.xxh3_128()
    for name, leaf in [] if config.from_scratch else loaded:
        digest.update(name.encode())
        array = leaf if weights is None else weights.numbers(name, leaf)
        for piece in bytes_of(array):
            digest.update(piece.data)
    return digest.hexdigest()


def file_digest(path: str | Path) -> str:
    """Return a digest of the file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:16]
