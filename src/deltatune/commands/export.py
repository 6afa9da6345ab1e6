"""`deltatune export` writes an adapter, or the model that it makes, for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote

from ..errors import UserError
from ..machine import startup
from ..machine.wrapping import say
from ..options.values import unknown_names
from .flags import add_ends, add_model

TARGETS = ("peft", "mlx", "merged", "gguf", "gguf-adapter")

# The flags that each target has no use for.
_UNUSED = {
    "peft": ("llama_cpp", "outtype", "data"),
    "mlx": ("llama_cpp", "outtype", "data"),
    "merged": ("llama_cpp", "outtype"),
    "gguf": ("push_to_hub", "base_model", "data"),
    "gguf-adapter": ("push_to_hub", "data"),
}
HELP = "write an adapter for PEFT, MLX, llama.cpp or the Hugging Face hub"


def add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--to",
        required=True,
        choices=TARGETS,
        help="peft: an adapter for transformers and vLLM; mlx: the adapter alone; merged: a full checkpoint; "
        "gguf: a file for llama.cpp; gguf-adapter: the adapter alone for llama.cpp",
    )
    add_model(parser)
    add("--adapter-path", default="adapters", metavar="DIR", help="folder of the adapter (default: adapters)")
    add("--save-path", required=True, metavar="PATH", help="new folder for the result; for GGUF, a new file")
    add(
        "--base-model",
        metavar="TEXT",
        help="the model that the adapter's users load, where --model is a conversion of it (default: --model)",
    )
    add("--llama-cpp", metavar="DIR", help="folder of llama.cpp, for GGUF (default: its converters on PATH)")
    add(
        "--outtype",
        metavar="TYPE",
        help="type of the tensors of a GGUF file: f32, f16, bf16, q8_0, auto (default: auto; of an adapter, f32); of a "
        "model also one that llama-quantize makes, such as q4_k_m",
    )
    add("--data", metavar="DIR", help="folder with test.jsonl, to compare the loss before and after a merge")
    add("--push-to-hub", metavar="OWNER/NAME", help="upload the result to this repository, private where it is new")
    add_ends(parser, "; for GGUF one token, which becomes the file's end token")


def run(arguments: argparse.Namespace) -> int:
    """Export as the arguments say and return exit code 0."""
    startup.leave_torch_out()
    for line in _exported(arguments):
        # A command is left whole, so that it can be copied.
        print(line) if line.startswith("  ") else say(line)
    return 0


def export_adapter(
    to: str, model: str, adapter_path: str | Path, save_path: str | Path, **options: str | list[str]
) -> list[str]:
    """Write an adapter, or the model that it makes, for other programs, as `deltatune export` does.

    Args:
        to: The kind of the result: peft, mlx, merged, gguf or gguf-adapter.
        model: The base model's folder, or its name on the Hugging Face hub.
        adapter_path: The folder of the adapter.
        save_path: The new folder or, for GGUF, the new file.
        options: base_model, llama_cpp, outtype, data, push_to_hub and extra_eos_token, as the flags have them.

    Returns:
        The lines that the command prints.

    Raises:
        UserError: The target does not exist, has no use for an option, or cannot express the adapter.

    Example:
        >>> export_adapter("peft", "path/to/model", "adapters", "adapters-peft")
    """
    flags = dict.fromkeys(("base_model", "llama_cpp", "outtype", "data", "push_to_hub", "extra_eos_token"))
    if unknown := unknown_names(options, [*flags], "export_adapter"):
        raise UserError("\n".join(unknown))
    if to not in TARGETS:
        raise UserError(f"export_adapter: expected one of {', '.join(TARGETS)}, got {to!r}.")
    paths = {"model": str(model), "adapter_path": str(adapter_path), "save_path": str(save_path)}
    return _exported(argparse.Namespace(to=to, **paths, **flags | options))


def _exported(arguments: argparse.Namespace) -> list[str]:
    from ..export.model_card import CARD, check_repository, push_to_hub, write_card

    _check(arguments)
    if arguments.push_to_hub:
        check_repository(arguments.push_to_hub)
    path = Path(arguments.save_path)
    base = arguments.base_model or arguments.model
    lines, notes = _EXPORTS[arguments.to](arguments)
    if not arguments.to.startswith("gguf"):
        card = write_card(path, arguments.to, base, Path(arguments.adapter_path), notes)
        lines.append(f"The model card is {card}: read it before you publish it.")
    lines += notes
    if arguments.push_to_hub:
        lines.append(f"Uploaded to {push_to_hub(path, arguments.push_to_hub)}, with {CARD}.")
    return lines


def _check(arguments: argparse.Namespace) -> None:
    for name in _UNUSED[arguments.to]:
        if getattr(arguments, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag}: --to {arguments.to} has no use for it; leave it out.")
    if arguments.extra_eos_token and arguments.to not in ("merged", "gguf"):
        raise UserError(
            f"--extra-eos-token: --to {arguments.to} writes an adapter alone, and generation stops where the config of "
            "its base model says; give it to --to merged or --to gguf, which write a whole model."
        )
    if arguments.to == "gguf" and len(arguments.extra_eos_token or ()) > 1:
        raise UserError("--extra-eos-token: a GGUF file names one end token; give one.")


def _peft(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    from ..export.peft_adapter import write_peft

    adapter = write_peft(arguments.model, arguments.adapter_path, arguments.save_path, arguments.base_model)
    kinds = {name: len(adapter.config.get(f"target_{name}", ())) for name in ("modules", "parameters")}
    counts = ", ".join(f"{count} target {name}" for name, count in kinds.items() if count)
    line = f"PEFT's adapter is in {arguments.save_path}: {counts}, for {adapter.config['base_model_name_or_path']}."
    return [line], adapter.notes


def _mlx(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    from ..lora.adapter_files import head_notes, template_options, write_mlx
    from ..options.values import written_options

    path = write_mlx(arguments.adapter_path, arguments.save_path)
    options = template_options(path)
    asked = f" {written_options(options)}" if options else ""
    command = f"  mlx_lm.generate --model {quote(arguments.model)} --adapter-path {quote(str(path))}{asked}"
    return [f"The adapter is in {path}. To ask it, add --prompt to", command], head_notes(
        arguments.adapter_path, "mlx-lm"
    )


def _merged(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    from ..models.checkpoint_writer import end_tokens, merge_checkpoint, write_ends

    ends = end_tokens(arguments.model, arguments.extra_eos_token) if arguments.extra_eos_token else []
    before = None if arguments.data is None else _loss(arguments, arguments.model, arguments.adapter_path)
    done = merge_checkpoint(arguments.model, arguments.adapter_path, arguments.save_path)
    if ends:
        write_ends(done.path, ends)
    notes = [] if done.pictures is None else [done.pictures]
    if done.rounding is not None:
        notes.append(str(done.rounding).replace("--dequantize writes", "deltatune merge --dequantize writes"))
    if before is not None:
        after = _loss(arguments, str(done.path), None)
        notes.append(f"Test loss: {before:.4f} with the adapter, {after:.4f} merged ({after - before:+.4f}).")
    return [f"Merged into {done.path}: {len(done.changed):,} tensors changed; all others were copied unchanged."], notes


def _loss(arguments: argparse.Namespace, model: str, adapter_path: str | None) -> float:
    """The loss of a model on the test set of --data, with the options of the run that trained the adapter."""
    from ..lora.adapter_files import options_of
    from ..options.config import TrainConfig
    from .eval import OPTIONS, evaluate

    trained = options_of(Path(arguments.adapter_path))
    options = {name: trained[name] for name in OPTIONS if trained.get(name) is not None}
    return evaluate(TrainConfig(**{**options, "model": model, "data": arguments.data}), adapter_path)


def _gguf(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    from ..export.gguf_file import converter_command, quantizer_command, write_gguf
    from ..export.modelfile import write_modelfile
    from ..lora.adapter_files import template_options
    from ..models.checkpoint_writer import end_tokens, tokenizer_of
    from ..models.load import locate

    outtype = arguments.outtype or "auto"
    extra_ends = arguments.extra_eos_token or []
    command = converter_command(arguments.llama_cpp)
    quantizer = quantizer_command(arguments.llama_cpp, outtype)
    ends = end_tokens(arguments.model, extra_ends) if extra_ends else []
    path = write_gguf(
        arguments.model, arguments.adapter_path, arguments.save_path, command, outtype, ends, quantizer=quantizer
    )
    tokenizer = tokenizer_of(locate(arguments.model))
    options = template_options(arguments.adapter_path)
    notes = write_modelfile(path.with_suffix(".Modelfile"), path, tokenizer, options, extra_ends)
    lines = [f"llama.cpp's programs wrote {path} ({path.stat().st_size / 1e9:.2f} GB)."]
    if ends:
        lines.append(
            f"The file's end token is {extra_ends[0]}: llama.cpp stops at another one where it knows "
            "its name, such as <|endoftext|>."
        )
    return lines, notes


def _gguf_adapter(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    from ..export.gguf_file import OUTTYPES, write_gguf_adapter
    from ..lora.adapter_files import head_notes

    outtype = arguments.outtype or "f32"
    if outtype not in OUTTYPES:
        raise UserError(f"--outtype {outtype}: expected {', '.join(OUTTYPES)}; llama-quantize makes the others.")
    path = write_gguf_adapter(
        arguments.model, arguments.adapter_path, arguments.save_path, arguments.llama_cpp, outtype, arguments.base_model
    )
    line = f"llama.cpp's converter wrote {path}: llama-cli -m BASE.gguf --lora {quote(str(path))}"
    return [line], head_notes(arguments.adapter_path, "llama.cpp")


_EXPORTS = {"peft": _peft, "mlx": _mlx, "merged": _merged, "gguf": _gguf, "gguf-adapter": _gguf_adapter}
