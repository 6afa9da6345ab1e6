"""Times a training step on images and text beside mlx-vlm's own trainer, with the same checkpoint, lines and options.

usage: DELTATUNE_THREADS=2 python benchmarks/vision_step.py [--shape quarter] [--rounds 5] [--checkpoint] [--only ...]

The model is a random Qwen3.5 with its vision tower in fp32, with LoRA r=8 on the language model's linears and AdamW.
The batch has 2 rows of 1,024 tokens, half of them of images. Each trainer runs by its own command line
(`mlx_vlm.train`, `deltatune train`) in a new process, which waits for its turn before each iteration, so that rounds
are interleaved; medians are printed. An iteration is batch, forward, backward and update. A trainer whose first loss,
counted tokens or number of trained parameters differ from those of the first row of the table gets no time. Peaks are
MLX's own count over the timed iterations, and the resident memory of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import processes
from machine import heading
from recipe import write_tokenizer
from trainers import Shape

TOKENS, BATCH, IMAGES, SIDE, PATCH, MERGE = 1024, 2, 2, 512, 16, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>"]
IDS = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
AGREES = 1e-4


@dataclass(frozen=True)
class VisionShape:
    """A language model, and its tower as (layers, width, MLP, heads)."""

    text: Shape
    tower: tuple[int, int, int, int]

    def __str__(self) -> str:
        text = self.text
        attention, delta = ("{}/{} x {}".format(*heads) for heads in (text.attention, text.delta))
        return (
            f"hidden {text.hidden}, MLP {text.mlp}, {text.layers} layers, 3 of 4 gated delta, attention {attention}, "
            f"delta {delta}, vocabulary {text.vocabulary:,}, tied; tower of {self.tower[0]} layers, width "
            f"{self.tower[1]}"
        )

    def config(self) -> dict[str, Any]:
        text = self.text.config() | {"model_type": "qwen3_5_text", "max_position_embeddings": 8192}
        depth, width, inner, heads = self.tower
        tower = {
            "model_type": "qwen3_5", "depth": depth, "hidden_size": width, "intermediate_size": inner,
            "num_heads": heads, "out_hidden_size": self.text.hidden, "patch_size": PATCH, "spatial_patch_size": PATCH,
            "spatial_merge_size": MERGE, "temporal_patch_size": 2, "in_channels": 3, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [],
        }  # fmt: skip
        config = {"model_type": "qwen3_5", "text_config": text, "vision_config": tower, **IDS}
        return config | {"vocab_size": self.text.vocabulary, "tie_word_embeddings": True, "eos_token_id": 2}


def shape_of(layers: int, mlp: int, attention: tuple, delta: tuple, vocabulary: int, tower: tuple) -> VisionShape:
    return VisionShape(Shape("", 256, mlp, layers, attention, delta, vocabulary, BATCH, TOKENS, "float32"), tower)


SHAPES = {
    # Qwen3.5-0.8B at a quarter of its width and a third of its depth; head and tower have their share of the weights.
    "quarter": shape_of(8, 896, (4, 1, 128), (4, 4, 128), 20480, (4, 192, 768, 3)),
    # The model of recipe.py with a vision tower.
    "recipe": shape_of(8, 768, (4, 2, 64), (4, 4, 64), 2048, (4, 256, 1024, 4)),
}


def write_model(folder: Path, shape: VisionShape) -> None:
    """Write a checkpoint that both trainers read: weights, config, a tokenizer of bytes, and an image processor."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models import qwen3_5

    mx.random.seed(0)
    config = shape.config()
    model = qwen3_5.Model(qwen3_5.ModelConfig.from_dict(json.loads(json.dumps(config))))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    write_tokenizer(folder, shape.text.vocabulary, TEMPLATE, SPECIAL)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", "patch_size": PATCH,
        "temporal_patch_size": 2, "merge_size": MERGE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    }  # fmt: skip
    for name, content in (("config", config), ("preprocessor_config", processor)):
        (folder / f"{name}.json").write_text(json.dumps(content))


def write_data(folder: Path) -> None:
    """Write two rows, each with two images and as many letters as make TOKENS tokens."""
    from PIL import Image

    draw = np.random.default_rng(0)
    rows = []
    per_image = (SIDE // PATCH // MERGE) ** 2
    # Of the template: im_start, role, im_end of two turns; vision_start and vision_end of each image; the question.
    letters = TOKENS - IMAGES * (per_image + 2) - 6 - 1
    for row in range(BATCH):
        names = [f"{row}-{number}.png" for number in range(IMAGES)]
        for name in names:
            small = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(small).resize((SIDE, SIDE)).save(folder / name)
        answer = "".join(chr(i) for i in draw.integers(ord("a"), ord("z"), letters))
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages, "images": names}))
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")


def answer(**found: Any) -> None:
    sys.__stdout__.write("\n@" + json.dumps(found) + "\n")
    sys.__stdout__.flush()


class Turns:
    """Waits for its turn before each iteration, and reports the time of the last; the first report says what trains."""

    def __init__(self, trained: int) -> None:
        self.trained, self.started, self.said = trained, 0.0, {}

    def wait(self) -> None:
        import mlx.core as mx

        if self.started:
            seconds, used = time.perf_counter() - self.started, time.process_time() - self.used
            answer(seconds=seconds, cpu=used, peak=mx.get_peak_memory(), **self.said)
        else:
            answer(trained=self.trained)
        if not sys.stdin.readline():
            os._exit(0)
        mx.reset_peak_memory()
        self.started, self.used = time.perf_counter(), time.process_time()


def trained(model: Any) -> int:
    from mlx.utils import tree_flatten

    return sum(array.size for _, array in tree_flatten(model.trainable_parameters()))


def unseen(folder: Path, checkpoint: bool) -> None:
    """deltatune as in a first epoch, with the features of images forgotten before each iteration."""
    ours(folder, checkpoint, forget=True)


def ours(folder: Path, checkpoint: bool, forget: bool = False) -> None:
    from deltatune import cli
    from deltatune.train import loop
    from deltatune.train.iterations import Iterations

    class Paced(Iterations):
        def __init__(self, *parts: Any):
            super().__init__(*parts)
            self._turns = Turns(trained(self.parts.model))

        def _iterate(self) -> bool:
            tower, progress = self.state.step.tower, self.progress
            if forget:
                tower._cache.clear()
                tower._bytes = 0
            self._turns.wait()
            loss_before, counted_before = progress.window_loss, progress.window_weight
            asked = super()._iterate()
            counted = progress.window_weight - counted_before
            self._turns.said = {"loss": (progress.window_loss - loss_before) / counted, "counted": counted}
            return asked

    loop.Iterations = Paced  # type: ignore[misc]
    options = {"lora_parameters": {"rank": 8, "scale": 2.0, "dropout": 0.0}, "optimizer_config": {"adamw": {}}}
    options["optimizer_config"]["adamw"] = {"weight_decay": 0.0, "bias_correction": False}
    (folder / "ours.yaml").write_text(json.dumps(options))
    arguments = f"train --model {folder} --data {folder} -c {folder / 'ours.yaml'} --adapter-path {folder / 'ours'}"
    arguments += f" --batch-size {BATCH} --max-seq-length {TOKENS} --optimizer adamw --iters 1000000"
    arguments += " --save-every 1000000 --steps-per-report 1000000" + " --grad-checkpoint" * checkpoint
    sys.exit(cli.main(arguments.split()))


def theirs(folder: Path, checkpoint: bool) -> None:
    from mlx_vlm import train as command
    from mlx_vlm.trainer import api

    class Paced(api.Trainer):
        def train(self) -> dict:
            turns, batches = Turns(trained(self.model)), self.task.batches

            def paced(*given: Any, **options: Any) -> Iterator[Any]:
                source = iter(batches(*given, **options))
                while True:
                    if self.log_history:
                        last = self.log_history[-1]
                        turns.said = {"loss": last["train_loss"], "counted": last["total_tokens"]}
                        turns.said["counted"] /= last["iteration"]
                    turns.wait()
                    yield next(source)

            self.task.batches = paced
            return super().train()

    command.Trainer = Paced  # type: ignore[misc]
    arguments = f"--model {folder} --data {folder} --iters 1000000 --batch-size {BATCH} --max-seq-length {TOKENS}"
    arguments += " --lora-rank 8 --lora-alpha 16 --train-on-completions --steps-per-report 1 --steps-per-save 1000000"
    arguments += f" --output-path {folder / 'theirs'}" + " --grad-checkpoint" * checkpoint
    command.main(arguments.split())


TRAINERS: dict[str, tuple[Callable[[Path, bool], None], str]] = {
    "deltatune train": (ours, "openblas"),
    "deltatune train, every image new": (unseen, "openblas"),
    "mlx-vlm, OpenBLAS only": (theirs, "openblas"),
    "mlx-vlm as installed": (theirs, "installed"),
}
# One step: what it compiles and reads in its first is little beside the rest.
SLOW = ("mlx-vlm as installed",)


class Worker(processes.LineProcess):
    def __init__(self, name: str, folder: Path, checkpoint: bool) -> None:
        own = folder / name.replace(" ", "-")
        own.mkdir()
        command = [__file__, "--work", name, "--folder", str(folder), *["--checkpoint"] * checkpoint]
        super().__init__(name, command, mark="@", folder=own, HF_HUB_OFFLINE="1", COLUMNS="200")
        self.trained = self.first["trained"]
        self.answers: list[dict[str, Any]] = []

    def run(self) -> None:
        self.answers.append(self.ask("go"))

    def resident(self) -> float:
        """The peak resident memory of the whole process in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return float(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def measure(names: list[str], folder: Path, checkpoint: bool, rounds: int) -> list[Worker]:
    workers = [Worker(name, folder, checkpoint) for name in names]
    for number in range(rounds + 1):
        for worker in workers:
            if worker.name not in SLOW or number == 1:
                worker.run()
    return workers


def table(workers: list[Worker]) -> None:
    first = workers[0]
    print("| trainer | ms a step | over ours | CPU, ms | peak, MB | over ours | process, MB | first loss | counted |")
    print("|---" * 9 + "|")
    base: tuple[float, float] | None = None
    for worker in workers:
        start, later = worker.answers[0], worker.answers[1:] or worker.answers
        same = worker.trained == first.trained and start["counted"] == first.answers[0]["counted"]
        row = [worker.name]
        if not same or not abs(start["loss"] - first.answers[0]["loss"]) <= AGREES * start["loss"]:
            row += ["not timed: another loss", "", "", "", "", ""]
        else:
            seconds, used = (statistics.median(each[key] for each in later) for key in ("seconds", "cpu"))
            peak = max(each["peak"] for each in later)
            base = base or (seconds, peak)
            row += [f"{seconds * 1e3:,.0f}", f"{seconds / base[0]:.1f}x", f"{used * 1e3:,.0f}", f"{peak / 1e6:,.0f}"]
            row += [f"{peak / base[1]:.1f}x", f"{worker.resident() / 1e6:,.0f}"]
        row += [f"{start['loss']:.5f}", f"{start['counted']:.0f} of {worker.trained:,}"]
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="quarter")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoint", action="store_true", help="gradient checkpointing, in all of them")
    parser.add_argument("--only", nargs="+", choices=list(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        run, blas = TRAINERS[options.work]
        if blas == "openblas":
            import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx; nothing is patched)
        run(options.folder, options.checkpoint)
        return
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, shape)
        write_data(folder)
        workers = measure(options.only, folder, options.checkpoint, options.rounds)
        print(f"{heading()}.")
        how = ", checkpointing" * options.checkpoint
        print(f"{options.shape}: {shape}; fp32, batch {BATCH}, T={TOKENS} of which {IMAGES} images of {SIDE} x {SIDE}")
        print(f"pixels{how}; medians of {options.rounds} rounds; of the slow, the first step.\n")
        table(workers)
        for worker in workers:
            worker.process.kill()


if __name__ == "__main__":
    main()
