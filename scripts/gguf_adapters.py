#!/usr/bin/env python3
"""Convert adapters of tiny models with llama.cpp's own converters, and compare the files with the merged models'.

usage: scripts/gguf_adapters.py LLAMA_CPP [FAMILY ...]      needs the `oracle` and `gguf` extras

LLAMA_CPP is a folder of llama.cpp. For every matrix, the update of the adapter's file must be what the file of the
merged model has more than the base's. The tiny models have no vocabulary that llama.cpp knows, so it is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "oracle"))

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import test_peft
from gguf import GGUFReader

from deltatune.export.gguf_file import CONVERTER, write_converted, write_gguf_adapter
from deltatune.models.checkpoint_writer import merge_checkpoint
from deltatune.selftest.parity import seeded

# Modules that the converter can take apart, by family.
KEYS = {
    "qwen3": ["*_proj"],
    "gemma3": ["*_proj"],
    "qwen3_5": ["*_proj", "*.in_proj_*"],
    "qwen3_next": ["*.q_proj", "*.k_proj", "*.o_proj"],
}
SCALE = 1.5
# fp32 rounds the sum of base and update, relative to the largest update.
TOLERANCE = 1e-6
# Starts the converter of models without its part that reads vocabularies.
WITHOUT_VOCABULARY = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import conversion
from conversion.base import ModelBase

def leave_out(kind):
    if "set_vocab" in vars(kind):
        kind.set_vocab = lambda self: None
    for child in kind.__subclasses__():
        leave_out(child)

conversion.load_all_models()
leave_out(ModelBase)
sys.argv = [sys.argv[2], *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def model_file(llama_cpp: Path, model: Path, target: Path) -> dict[str, np.ndarray]:
    """Convert a checkpoint, and read the tensors of the file."""
    program = str(llama_cpp / CONVERTER)

    def convert(_: Path, partial: Path) -> list[str]:
        words = [str(llama_cpp), program, str(model), "--outfile", str(partial), "--outtype", "f32"]
        return [sys.executable, "-c", WITHOUT_VOCABULARY, *words]

    write_converted(target, convert)
    return tensors(target)


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file by name."""
    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(str(path)).tensors}


def check(llama_cpp: Path, family: str, folder: Path) -> str:
    """Compare the files of one family; a line of the result. ValueError where a matrix changes but for its update."""
    checkpoint = test_peft.saved(folder, family)
    vocabulary = {str(number): number for number in range(seeded.VOCAB)}
    text = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []})
    (checkpoint / "tokenizer.json").write_text(text)
    described = json.loads((checkpoint / "config.json").read_text())
    if family in ("qwen3_5", "qwen3_next"):
        # The released models have such a layer, and the converter looks for it.
        described["mtp_num_hidden_layers"] = 1
        (checkpoint / "config.json").write_text(json.dumps(described))
    test_peft.adapted(checkpoint, folder / "adapter", keys=KEYS[family], scale=SCALE)
    path = write_gguf_adapter(checkpoint, folder / "adapter", folder / "adapter.gguf", str(llama_cpp))
    adapter = tensors(path)
    merge_checkpoint(checkpoint, folder / "adapter", folder / "merged")
    base = model_file(llama_cpp, checkpoint, folder / "base.gguf")
    merged = model_file(llama_cpp, folder / "merged", folder / "merged.gguf")
    worst = 0.0
    for name, value in base.items():
        change = merged[name] - value
        update = np.zeros_like(change)
        if f"{name}.lora_a" in adapter:
            update = SCALE * adapter[f"{name}.lora_b"] @ adapter[f"{name}.lora_a"]
        worst = max(worst, float(np.abs(change - update).max() / max(np.abs(update).max(), TOLERANCE)))
    if not worst < TOLERANCE:
        raise ValueError(f"{family}: a matrix differs by {worst:.1e} from its update")
    return f"{family}: {len(adapter) // 2} matrices, within {worst:.1e} of the merged file less the base's"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"default: {', '.join(KEYS)}")
    arguments = parser.parse_args()
    unknown = set(arguments.families) - set(KEYS)
    if unknown:
        parser.error(f"unknown family {', '.join(sorted(unknown))}; known: {', '.join(KEYS)}")
    for family in arguments.families or KEYS:
        with tempfile.TemporaryDirectory() as folder:
            print(check(arguments.llama_cpp, family, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
