"""Runs a published recipe, scaled to a small machine, with every trainer.

usage: python benchmarks/recipe.py [--limit 512] [--layers 8] [--bits 4] [--only NAME ...]

The recipe is LoRA r=8, batch 2, checkpointing and 10 steps, with prompts in five length buckets up to the limit. Each
trainer runs by its own command line in a new process, on the same checkpoint (a random one of the Qwen3.5 shape in
fp32, quantised with --bits) and the same lines. Wall time and peak memory are those of the whole process; tok/s is what
the trainer reports.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import processes
from machine import heading
from trainers import Shape, save_model

STEPS = 10
BATCH = 2
VOCABULARY = 2048


def text_config(layers: int) -> dict:
    shape = Shape("recipe", 256, 768, layers, (4, 2, 64), (4, 4, 64), VOCABULARY, BATCH, 512, "float32")
    return shape.config() | {"max_position_embeddings": 8192, "eos_token_id": 2}


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'][0] + m['content'] }}<|im_end|>{% endfor %}"


def write_tokenizer(
    folder: Path, vocabulary: int = VOCABULARY, template: str = TEMPLATE, special: list[str] = SPECIAL
) -> None:
    """Write a tokenizer with one token a byte, so that every trainer sees n tokens in a line of n letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"<|unused_{index}|>" for index in range(vocabulary - len(words))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[2], "pad_token": special[0]}
    options["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


def write_model(folder: Path, layers: int, bits: int | None) -> dict[str, Path]:
    """Write the same weights twice: under mlx-lm's model type and under mlx-vlm's."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.qwen3_5 import Model, ModelArgs

    mx.random.seed(0)
    config = text_config(layers)
    model = Model(ModelArgs.from_dict(json.loads(json.dumps(config))))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    folders = {}
    for kind, model_type in (("mlx-lm", "qwen3_5"), ("mlx-vlm", "qwen3_5_text")):
        folders[kind] = folder / kind
        folders[kind].mkdir()
        save_model(folders[kind], model, config | {"model_type": model_type})
        write_tokenizer(folders[kind])
    return folders


def write_data(folder: Path, limit: int) -> int:
    """Write two lines of equal length for each step, of five lengths up to the limit; returns all steps' tokens."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines = []
    lengths = [limit * (step % 5 + 1) // 5 for step in range(STEPS)]
    for length in lengths:
        for _ in range(BATCH):
            letters = "".join(chr(i) for i in rng.integers(ord("a"), ord("z"), length - 8))
            content = [{"role": "user", "content": "?"}, {"role": "assistant", "content": letters}]
            lines.append(json.dumps({"messages": content}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return BATCH * sum(lengths)


def commands(models: dict[str, Path], data: Path, out: Path, limit: int, layers: int) -> dict[str, list[str]]:
    python = sys.executable
    shared = f"--data {data} --iters {STEPS} --batch-size {BATCH} --max-seq-length {limit} --grad-checkpoint".split()
    recipe = out / "recipe.yaml"
    lora = "lora_parameters: {rank: 8, scale: 2.0, dropout: 0.0}\n"
    recipe.write_text(lora + "seed: 0\noptimizer: adam\nlearning_rate: 1e-5\n")
    ours = ["--model", str(models["mlx-lm"]), *shared, "-c", str(recipe), "--no-mask-prompt"]
    lm = ["--model", str(models["mlx-lm"]), *shared, "--train", "--num-layers", str(layers), "-c", str(recipe)]
    lm += ["--adapter-path", str(out / "lm")]
    vlm = ["--model", str(models["mlx-vlm"]), *shared, "--output-path", str(out / "vlm"), "--lora-rank", "8"]
    only_blas = "import deltatune, runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__')"
    return {
        "mlx-lm as installed": [python, "-m", "mlx_lm", "lora", *lm],
        "mlx-lm, OpenBLAS only": [python, "-c", only_blas, "mlx_lm.lora", *lm],
        "mlx-lm under `deltatune run`": [python, "-m", "deltatune", "run", "--", "mlx_lm.lora", *lm],
        "mlx-vlm as installed": [python, "-m", "mlx_vlm.train", *vlm],
        "mlx-vlm, OpenBLAS only": [python, "-c", only_blas, "mlx_vlm.train", *vlm],
        "deltatune train": [python, "-m", "deltatune", "train", *ours, "--adapter-path", str(out / "ours")],
    }


ANSI = re.compile(r"\x1b\[[0-9;]*m")
# mlx-lm's table row, mlx-vlm's `tokens_per_second=`, ours `tok/s`.
RATE = re.compile(
    r"^\s*10\s+[\d.]+\s*\S?\s+([\d.,]+)\s+[\d.]+k|[^_]tokens_per_second=([\d.]+)|([\d.,]+) tok/s", re.MULTILINE
)


def measure(name: str, command: list[str]) -> dict:
    """Run a trainer; returns its wall seconds, peak resident MB and the last rate that it printed."""
    env = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        # wait4 returns this child's own peak, whereas getrusage returns the largest of all children so far.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        output.seek(0)
        text = ANSI.sub("", output.read())
    if status:
        sys.exit(f"{name} failed with exit code {os.waitstatus_to_exitcode(status)}:\n{text[-3000:]}")
    rates = [float("".join(found).replace(",", "")) for found in RATE.findall(text)]
    return {"seconds": seconds, "peak": usage.ru_maxrss / 1024, "rate": rates[-1] if rates else None, "text": text}


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bits", type=int, help="packed weights, in groups of 64: QLoRA")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        models = write_model(out, options.layers, options.bits)
        tokens = write_data(out / "data", options.limit)
        print(heading())
        kind = f"{options.bits} bits" if options.bits else "fp32"
        steps = f"{STEPS} steps of {BATCH} rows up to {options.limit} tokens, {tokens} in all"
        print(f"{options.layers} layers, {kind}, {steps}\n")
        print("| trainer | tok/s, its own report | wall, whole process | peak memory, whole process |")
        print("|---|---|---|---|", flush=True)
        for name, command in commands(models, out / "data", out, options.limit, options.layers).items():
            if options.only and name not in options.only:
                continue
            row = measure(name, command)
            rate = f"{row['rate']:,.0f}" if row["rate"] else "not printed"
            print(f"| {name} | {rate} | {row['seconds']:.1f} s | {row['peak']:,.0f} MB |", flush=True)
            if options.verbose:
                print(row["text"])


if __name__ == "__main__":
    main()
