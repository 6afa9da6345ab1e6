"""Turns a merged model, or an adapter alone, into a GGUF file through llama.cpp's own converters.

`deltatune export --to gguf` and `--to gguf-adapter` do it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import UserError
from ..machine.environment import expanded
from ..machine.json_files import read_json
from ..models.checkpoint_files import weight_headers
from ..models.checkpoint_writer import merge_checkpoint, write_ends, write_tokenizer_end
from ..models.load import locate
from .module_names import check_layout
from .new_token_rows import OPTION
from .peft_adapter import PeftAdapter, write_peft

CONVERTER = "convert_hf_to_gguf.py"
ADAPTER_CONVERTER = "convert_lora_to_gguf.py"
OUTTYPES = ("f32", "f16", "bf16", "q8_0", "auto")
QUANTIZER = "llama-quantize"
# The types that llama-quantize makes, such as q4_k_m, q6_k, iq4_xs and q4_0; it knows best which of them there are.
_QUANTIZED = re.compile(r"i?q[1-8]_\w+|tq[12]_0|mxfp4\w*", re.IGNORECASE)
# Where a build of llama.cpp leaves its programs.
_BUILT = ("", "build/bin", "bin")
_INSTALL = "install llama.cpp" + " (brew install llama.cpp)" * (sys.platform == "darwin")
# How much of the converter's output a message quotes.
_LAST_LINES = 5


def converter_command(folder: str | None, name: str = CONVERTER) -> list[str]:
    """Return the words that start one of llama.cpp's converters; a missing one is a UserError.

    `folder` is the path of a converter or of the folder with them, which this Python then runs; None takes the one on
    PATH, as an installed llama.cpp puts it there.
    """
    if folder is None:
        program = shutil.which(name)
        if program is None:
            raise UserError(f"--to gguf: no {name} on PATH; {_INSTALL}, or give the path of its folder as --llama-cpp.")
        return [program]
    path = expanded(folder)
    path = (path if path.is_dir() else path.parent) / name
    if not path.is_file():
        raise UserError(f"--llama-cpp {folder}: no {name} there; give llama.cpp's folder.")
    return [sys.executable, str(path)]


def quantizer_command(llama_cpp: str | None, outtype: str) -> list[str] | None:
    """Return the words that start llama-quantize where `outtype` needs it, or None if the converter writes that type.

    `llama_cpp` is the folder of llama.cpp, or a path in it; None looks on PATH. An unknown type and a missing program
    are a UserError.
    """
    if outtype in OUTTYPES:
        return None
    if not _QUANTIZED.fullmatch(outtype):
        raise UserError(
            f"--outtype {outtype}: expected {', '.join(OUTTYPES)}, or a type of {QUANTIZER}, such as q4_k_m."
        )
    if llama_cpp is not None:
        path = expanded(llama_cpp)
        folder = path if path.is_dir() else path.parent
        for program in (folder / part / QUANTIZER for part in _BUILT):
            if program.is_file():
                return [str(program)]
    on_path = shutil.which(QUANTIZER)
    if on_path is None:
        raise UserError(
            f"--outtype {outtype}: {QUANTIZER} makes this type, and there is none on PATH"
            f"{'' if llama_cpp is None else f' or built in {llama_cpp}'}; {_INSTALL}, "
            "or take q8_0, which needs none."
        )
    return [on_path]


def write_gguf(
    model_path: str | Path,
    adapter_path: str | Path,
    save_path: str | Path,
    command: list[str],
    outtype: str = "auto",
    ends: Sequence[int] = (),
    quantizer: list[str] | None = None,
) -> Path:
    """Merge an adapter into its base, a checkpoint in Hugging Face's layout, and convert the result to a GGUF file.

    `command` starts the converter (converter_command), and `quantizer` llama-quantize (quantizer_command) for types
    that the converter cannot write; the `outtype` auto keeps half precision. `ends` are the tokens at which generation
    stops, the one that the file is to name last; none leaves the base's.
    """
    path = locate(model_path)
    names = [name for header in weight_headers(path).values() for name in header.tensors]
    check_layout(names, path, "llama.cpp's converter reads checkpoints in Hugging Face's layout")
    check_known(command, path)

    def convert(folder: Path, partial: Path) -> list[str]:
        merged = merge_checkpoint(path, adapter_path, folder / "merged").path
        if ends:
            write_ends(merged, ends)
            write_tokenizer_end(merged, ends[-1])
        if quantizer is None:
            return [*command, str(merged), "--outfile", str(partial), "--outtype", outtype]
        whole = folder / "whole.gguf"
        run_converter([*command, str(merged), "--outfile", str(whole), "--outtype", "auto"], whole)
        return [*quantizer, str(whole), str(partial), outtype.upper()]

    return write_converted(Path(save_path), convert)


def write_gguf_adapter(
    model_path: str | Path,
    adapter_path: str | Path,
    save_path: str | Path,
    llama_cpp: str | None = None,
    outtype: str = "f32",
    base_model: str | None = None,
) -> Path:
    """Convert an adapter to a GGUF file, which llama.cpp loads beside a GGUF file of the base (`llama-cli --lora`).

    `llama_cpp` is the folder of llama.cpp; None looks on PATH. `base_model` is the original of a `model_path` that is a
    conversion of it. An adapter that llama.cpp cannot express is a UserError.
    """
    command = converter_command(llama_cpp, ADAPTER_CONVERTER)
    base = locate(base_model or model_path)
    # The second converter takes the families from the first.
    check_known(converter_command(llama_cpp), base)

    def convert(folder: Path, partial: Path) -> list[str]:
        _check_plain(write_peft(model_path, adapter_path, folder / "peft", one_alpha=True))
        words = ["--base", str(base), "--outfile", str(partial), "--outtype", outtype]
        return [*command, *words, str(folder / "peft")]

    return write_converted(Path(save_path), convert)


def _check_plain(adapter: PeftAdapter) -> None:
    """Check that the adapter is LoRA on linear layers of the language model: llama.cpp knows no other."""
    config = adapter.config
    parameters = adapter.config.get("target_parameters", [])
    odd = {
        "DoRA": config["use_dora"],
        "rows for new tokens": OPTION in config,
        "updates of an embedding": any("lora_embedding" in name for name in adapter.tensors),
        "updates of experts": any(".experts." in name for name in parameters),
        "updates of a vision tower": any(".visual." in name for name in adapter.tensors),
    }
    unexpressed = [name for name, present in odd.items() if present]
    if unexpressed:
        raise UserError(
            f"--to gguf-adapter: the adapter has {' and '.join(unexpressed)}, which an adapter of llama.cpp cannot "
            "express. Write the merged model with --to gguf."
        )


def write_converted(save_path: Path, convert: Callable[[Path, Path], list[str]]) -> Path:
    """Write a file through a converter, in one move once it is complete; one that exists is a UserError.

    `convert` takes an empty folder and the file to write for now, and returns the words that start the converter.
    """
    if save_path.exists():
        raise UserError(f"{save_path}: this file exists already; give another as --save-path.")
    try:
        save_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{save_path.name}.", dir=save_path.parent) as folder:
            partial = Path(folder) / save_path.name
            run_converter(convert(Path(folder), partial), partial)
            os.replace(partial, save_path)
    except OSError as error:
        raise UserError(f"{save_path}: the file cannot be written ({error.strerror}).") from error
    return save_path


def run_converter(command: list[str], made: Path) -> None:
    """Run one of llama.cpp's programs; UserError unless it ends well and the file `made` is there."""
    done = _run(command)
    if done.returncode != 0 or not made.is_file():
        program = next((word for word in command if word.endswith(".py")), command[0])
        raise UserError(f"{program} failed with exit code {done.returncode}: {_end(done)}")


def check_known(command: list[str], path: Path) -> None:
    """Refuse a model in `path` whose class convert_hf_to_gguf.py, started by `command`, does not list."""
    config = read_json(path / "config.json")
    wanted = (config.get("architectures") or [None])[0]
    done = _run([*command, "--print-supported-models"])
    known = set(re.findall(r"^(?:.*[\s:])?- (\w+)\s*$", done.stdout + done.stderr, re.MULTILINE))
    if not known:
        raise UserError(f"{command[-1]} does not list the models that it knows: {_end(done)}")
    if wanted not in known:
        raise UserError(
            f"model {path}: llama.cpp's converter does not know {wanted} (model_type {config.get('model_type')}); "
            "update llama.cpp, or export --to merged for another program."
        )


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, errors="replace")
    except OSError as error:
        raise UserError(f"{words[0]}: cannot be run ({error.strerror}).") from error


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """The last lines that a program printed."""
    return " / ".join((done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:]) or "it printed nothing"
