"""Turns an adapter alone into a GGUF file through llama.cpp's own converter (`deltatune export --to gguf-adapter`)."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from ..models.load import locate
from .gguf_file import check_known, converter_command, write_converted
from .new_token_rows import OPTION
from .peft_adapter import PeftAdapter, write_peft

ADAPTER_CONVERTER = "convert_lora_to_gguf.py"


def write_gguf_adapter(
    model_path: str | Path,
    adapter_path: str | Path,
    save_path: str | Path,
    llama_cpp: str | None = None,
    outtype: str = "f32",
    base_model: str | None = None,
) -> Path:
    """Convert an adapter to a GGUF file, which llama.cpp loads beside a GGUF file of the base (`llama-cli --lora`).

    Args:
        model_path: The checkpoint that was trained.
        adapter_path: The folder of the adapter.
        save_path: The file to write, which must not exist.
        llama_cpp: The folder of llama.cpp; None looks on PATH.
        outtype: The converter's type of the tensors.
        base_model: The original of a `model_path` that is a conversion of it.

    Raises:
        UserError: There is no converter, llama.cpp does not know the model, it cannot express the adapter, or the
            converter fails.
    """
    save_path = Path(save_path)
    if save_path.exists():
        raise UserError(f"{save_path}: this file exists already; give another as --save-path.")
    command = converter_command(llama_cpp, ADAPTER_CONVERTER)
    base = locate(base_model or model_path)
    # The second converter takes the families from the first.
    check_known(converter_command(llama_cpp), base)

    def convert(folder: Path, partial: Path) -> list[str]:
        _check_plain(write_peft(model_path, adapter_path, folder / "peft", one_alpha=True))
        words = ["--base", str(base), "--outfile", str(partial), "--outtype", outtype]
        return [*command, *words, str(folder / "peft")]

    write_converted(save_path, convert)
    return save_path


def _check_plain(adapter: PeftAdapter) -> None:
    """Check that the adapter is LoRA on linear layers of the language model: llama.cpp knows no other.

    Raises:
        UserError: It has updates of other kinds; the message names them.
    """
    config = adapter.config
    parameters = config.get("target_parameters", [])
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
