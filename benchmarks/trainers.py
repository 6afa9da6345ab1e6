"""Sets up training steps of one model shape with each trainer, in the way that the trainer's users get them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

RANK, SCALE, RATE = 8, 20.0, 1e-5


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    mlp: int
    layers: int
    attention: tuple[int, int, int]  # heads, key-value heads, head size
    delta: tuple[int, int, int]  # key heads, value heads, head size
    vocabulary: int
    batch: int
    tokens: int
    dtype: str
    experts: tuple[int, int] | None = None  # how many, how many a token; mlp is then the size of one, and of the shared
    interval: int = 4  # every layer with this distance from the last such one is attention

    def __str__(self) -> str:
        heads, groups, size = self.attention
        keys, values, delta = self.delta
        mlp = f"MLP {self.mlp}"
        if self.experts:
            mlp = f"{self.experts[0]} experts of {self.mlp}, {self.experts[1]} a token and one shared"
        return (
            f"{self.name}: hidden {self.hidden}, {mlp}, {self.layers} layers, attention {heads}/{groups} x "
            f"{size}, delta {keys}/{values} x {delta}, vocabulary {self.vocabulary:,}, tied; {self.dtype}; LoRA "
            f"r={RANK} on every linear, AdamW; batch {self.batch}, T={self.tokens}."
        )

    def config(self) -> dict[str, Any]:
        """A config.json that both mlx-lm and transformers read."""
        heads, groups, size = self.attention
        keys, values, delta = self.delta
        rope = {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [size // 24] * 3}
        rope["mrope_section"][0] += size // 8 - sum(rope["mrope_section"])
        experts = {}
        if self.experts:
            experts = {
                "num_experts": self.experts[0],
                "num_experts_per_tok": self.experts[1],
                "moe_intermediate_size": self.mlp,
                "shared_expert_intermediate_size": self.mlp,
            }
        return {
            "model_type": "qwen3_5_moe" if self.experts else "qwen3_5",
            **experts,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": size,
            "linear_num_key_heads": keys,
            "linear_num_value_heads": values,
            "linear_key_head_dim": delta,
            "linear_value_head_dim": delta,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": self.interval,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_parameters": {"type": "default", "rope_type": "default", **rope},
        }

    def rows(self, tokens: int | None = None) -> np.ndarray:
        """Random tokens, [B, T + 1]."""
        draw = np.random.default_rng(0)
        return draw.integers(0, self.vocabulary, size=(self.batch, (tokens or self.tokens) + 1)).astype(np.int32)


SHAPES = {
    "0.8B": Shape("0.8B", 1024, 3584, 24, (8, 2, 256), (16, 16, 128), 248320, 2, 2048, "bfloat16"),
    "35B-A3B": Shape("35B-A3B", 2048, 512, 40, (16, 2, 256), (16, 32, 128), 248320, 2, 2048, "bfloat16", (256, 8)),
    "122B-A10B": Shape("122B-A10B", 3072, 1024, 48, (32, 2, 256), (16, 64, 128), 248320, 1, 4096, "bfloat16", (256, 8)),
    "9B": Shape("9B", 4096, 12288, 32, (16, 4, 256), (16, 32, 128), 248320, 1, 16384, "bfloat16"),
    "tiny": Shape("tiny", 64, 128, 4, (2, 1, 32), (2, 2, 16), 512, 2, 64, "float32"),
    "tiny experts": Shape("tiny experts", 64, 32, 4, (2, 1, 32), (2, 2, 16), 512, 2, 64, "float32", (8, 2)),
}


@dataclass
class Trainer:
    """A trainer that is ready to run steps; its weights were finished at the time `ready`, by time.perf_counter."""

    ready: float
    # Runs one whole training step on the batch, waits for it, and returns its loss.
    step: Callable[[], float]
    reset_peak: Callable[[], None]
    # Returns the peak of memory in bytes since reset_peak, or None.
    peak: Callable[[], float | None]
    # Waits until all that was started early has been launched.
    settle: Callable[[], object] = lambda: None


def lazy_model(described: dict[str, Any], bits: int, dtype: str = "bfloat16") -> Any:
    """mlx-lm's model of a config.json with random weights from a fixed seed, none of them computed yet.

    They are packed to `bits` if these are given, and have the dtypes to which mlx-lm's loader casts a checkpoint.
    """
    import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

    # isort: split
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map_with_path

    from deltatune.models.load import new_model

    nested = {"text_config": described} if described["model_type"].startswith("qwen3_5") else {}
    # new_model evaluates all weights at once, in fp32.
    with patch.object(mx, "eval", lambda *_: None):
        model: Any = new_model(nested | described)
    keeps: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)
    kind = getattr(mx, dtype)
    model.update(tree_map_with_path(lambda path, x: x.astype(kind) if keeps(path) else x, model.parameters()))
    if bits:
        nn.quantize(model, 64, bits, class_predicate=_has_whole_groups)
    return model


def mlx_model(shape: Shape, dtype: str | None = None, bits: int = 0) -> Any:
    """lazy_model of a shape, its weights computed one after another, so that no more memory is used than they take."""
    model = lazy_model(shape.config(), bits, dtype or shape.dtype)
    import mlx.core as mx
    from mlx.utils import tree_flatten

    for _, weight in tree_flatten(model.parameters()):
        mx.eval(weight)
    mx.clear_cache()
    return model


def save_model(folder: Path, model: Any, config: dict[str, Any]) -> None:
    """Write a checkpoint of a model's weights, under the names of a model of text alone, and its config.json."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights = {name.removeprefix("language_model."): value for name, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def batch_of(rows: np.ndarray) -> Any:
    from deltatune.data import Batch

    width = rows.shape[1] - 1
    lengths = tuple((width,) for _ in rows)
    weights = np.ones((len(rows), width), np.float32)
    return Batch(rows[:, :-1], rows[:, 1:], weights, None, tuple(("random",) for _ in rows), lengths)


def _has_whole_groups(_path: str, module: Any) -> bool:
    """Whether a module's weight can be packed in groups of 64 inputs."""
    return hasattr(module, "to_quantized") and module["weight"].shape[-1] % 64 == 0


@contextmanager
def deltatune(
    shape: Shape, checkpoint: bool, waits: bool = False, bits: int = 0, again: int | None = None, **options: str
) -> Iterator[Trainer]:
    """deltatune's training step as train/engine.py makes it, without data, files and screen.

    The next step is started before the result of one is read, as in training, unless each step `waits`. Weights are
    packed to `bits` if these are given. If `again` is given, cheap operators and so many layers are recomputed in
    the backward pass. `options` are further ones of TrainConfig.
    """
    model = mlx_model(shape, bits=bits)
    import mlx.core as mx

    ready = time.perf_counter()
    from deltatune.lora import convert_to_lora
    from deltatune.options.config import LoraConfig, TrainConfig
    from deltatune.plan.checkpoints import order_of
    from deltatune.train.distributed import World
    from deltatune.train.engine import may_start_early
    from deltatune.train.freed_memory import FreedMemory
    from deltatune.train.launcher import Launcher
    from deltatune.train.setup import training
    from deltatune.train.step import Step, StepMachine
    from deltatune.train.updates.optimizer import build_optimizer

    mode = checkpoint if again is None else "auto"
    named: dict[str, Any] = {"learning_rate": RATE, "lr_schedule": "constant", "warmup": 0.0}
    config = TrainConfig(**named | {"grad_checkpoint": mode, "batch_size": shape.batch} | options)
    convert_to_lora(model, LoraConfig(rank=RANK, scale=SCALE), fine_tune_type=config.fine_tune_type, num_layers=-1)
    batch = batch_of(shape.rows())
    checkpoints = None if again is None else order_of(model).first(again, operators=True)
    limit = _memory_limit(model, config, shape, checkpoints)
    with (
        training(model, config, compare=False, checkpoints=checkpoints) as trained,
        FreedMemory(limit=limit) as freed_memory,
    ):
        model.train()
        stepped = build_optimizer(config)
        launcher = Launcher() if may_start_early(config, World()) and not waits else None
        whole = Step(model, stepped, trained.loss, World(), machine=StepMachine(launcher))
        mx.eval(model.parameters(), stepped.state)
        peak = mx.reset_peak_memory, lambda: float(mx.get_peak_memory())

        def step() -> float:
            total, weight, gradients, _ = whole.micro_batch(batch, whole.zeros())
            mx.eval(total, weight, gradients)
            norm = whole.update(gradients, total, weight)
            del gradients
            mx.eval(whole.parameters(), stepped.state, norm, whole.random)
            freed_memory.after_iteration()
            return total.item() / weight.item()

        if launcher is None:
            yield Trainer(ready, step, *peak)
            return
        with launcher:
            yield Trainer(ready, _early(whole, batch, launcher, freed_memory), *peak, launcher.settle)


def _memory_limit(model: Any, config: Any, shape: Shape, checkpoints: Any) -> int | None:
    """The bytes from which on MLX waits for queued work, as `deltatune train` plans them."""
    from deltatune.plan.array_layout import ArrayLayout
    from deltatune.plan.device_limits import device_limits
    from deltatune.plan.forecast import forecast_step
    from deltatune.plan.traced_step import BatchShape

    rows = BatchShape(shape.batch, shape.tokens)
    plan = forecast_step(model, config, rows, ArrayLayout.measured(), checkpoints, brake=device_limits().brake)
    return plan.memory_limit


def _early(whole: Any, batch: Any, launcher: Any, freed_memory: Any) -> Callable[[], float]:
    """Return a step that starts the next one before its own result is read."""
    import mlx.core as mx

    started: list[Any] = []

    def step() -> float:
        with mx.stream(launcher.stream):
            first = not started
            total, weight, gradients, _ = whole.micro_batch(batch, whole.zeros()) if first else started.pop()
            norm = whole.update(gradients, total, weight)
            del gradients
            started.append(whole.micro_batch(batch, whole.zeros()))
            loss = total / weight
            launch = mx.async_eval if first else launcher.launch
            launched = launch(loss, norm)
            launch(whole.parameters(), whole.optimizer.state, whole.random, started[0])
        if launched is not None:
            launched.result()
        freed_memory.after_iteration()
        return loss.item()

    return step


def torch_model(shape: Shape) -> Any:
    """transformers' model with random weights from a fixed seed."""
    import torch
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    if shape.experts:
        raise ValueError("PEFT's all-linear leaves transformers' experts without adapters: another task, not timed")
    torch.manual_seed(0)
    options = {key: value for key, value in shape.config().items() if key != "model_type"}
    config = configuration_qwen3_5.Qwen3_5TextConfig(**options, use_cache=False)
    model = modeling_qwen3_5.Qwen3_5ForCausalLM(config)
    return model.to(device="cuda" if torch.cuda.is_available() else "cpu", dtype=getattr(torch, shape.dtype))


@contextmanager
def peft_trainer(model: Any, shape: Shape, checkpoint: bool) -> Iterator[Trainer]:
    """A step of a model of transformers with PEFT's LoRA on every linear layer, and PyTorch's fused AdamW."""
    import peft
    import torch

    ready = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    lora = peft.LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, fused=True)
    rows = torch.tensor(shape.rows(), device=model.device).long()[:, :-1]

    def step() -> float:
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        return loss.item()

    def peak() -> float | None:
        return float(torch.cuda.max_memory_allocated()) if on_gpu else None

    def reset() -> None:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()

    yield Trainer(ready, step, reset, peak)
