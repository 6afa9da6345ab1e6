"""Plans checkpointed training steps of public models for Macs and NVIDIA GPUs, on any machine: which rows fit?

usage: python benchmarks/what_fits.py [--models Qwen3.5-9B] [--bits 0 4] [--devices metal cuda] [--tokens 8192 16384]
       python benchmarks/what_fits.py --auto --devices cuda --memories 24 --tokens 2048 8192 32768
       python benchmarks/what_fits.py --by-layers --bits 4 --devices metal --tokens 2048 4096 [--experts 2]

No weights are needed: the models are those of public_configs.py, and the 122B-A10B of trainers.py.
Each plan is that of `deltatune plan`, of the graph that the device would build (pretended.py), for one row, LoRA r=8 on
every linear and AdamW. Memory grows with the length in a straight line: the table has for each memory the length at
which the line through the plans of the two lengths meets what MLX may use of it, and in brackets that line, in GB and
KB a token. NVIDIA GPUs with more memory cut rows into larger pieces, so each memory has a line of its own, and --tokens
must be lengths of several pieces. A Mac lends its GPU two thirds of its memory up to 36 GB and three quarters above; of
an NVIDIA GPU, a plan leaves 1.5 GB to CUDA.

With --by-layers, the plans are those of `--memory`: all layers but two are on the disk, and so are layers' inputs.
--experts gives the rank of experts' adapters there, 0 for none; all others have rank 8, and moments have 8 bits.

With --auto, the plans are those that `--grad-checkpoint auto` makes for each memory and length, and the table says how
many layers are kept, and whether their cheap operators are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.nn as nn

import processes
from deltatune.layers import describe
from deltatune.machine import backend, environment
from deltatune.ops.recomputation import Checkpoints, operators_pay
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.checkpoints import choose, order_of
from deltatune.plan.device_limits import METAL_BUFFERS, MOST, Brake, DeviceLimits, for_arrays
from deltatune.plan.forecast import Forecast, forecast_step
from deltatune.plan.search import fits, held
from deltatune.plan.simulate import PACES, gpu_pace
from deltatune.plan.traced_step import BatchShape
from deltatune.train.setup import prepare
from deltatune.train.tree import leaves
from machine import heading
from pretended import pretended
from public_configs import CONFIGS
from trainers import SHAPES, lazy_model

GIB = 2**30
MEMORIES = {"metal": (8, 16, 24, 36, 64, 128), "cuda": (24, 80, 141)}
MODELS = CONFIGS | {"122B-A10B": SHAPES["122B-A10B"].config()}
# The modules of routed experts.
EXPERTS = "*.switch_mlp.*"
# Rows above this length are not planned for.
LONGEST = 1 << 18


def usable(device: str, memory: int) -> float:
    """The bytes that MLX may use of a memory in GB as it is sold."""
    if device == "cuda":
        return for_arrays(int(memory * 1e9))
    return memory * GIB * (2 / 3 if memory <= 36 else 3 / 4)


def prepared(name: str, bits: int, **options: Any) -> tuple[nn.Module, TrainConfig, ArrayLayout]:
    """A model with its adapters, the options of its run, and the layout of MLX's arrays."""
    model = lazy_model(MODELS[name], bits)
    lora = options.pop("lora_parameters", LoraConfig(rank=8))
    config = TrainConfig(lora_parameters=lora, **options)
    prepare(model, config)
    return model, config, ArrayLayout.measured()


def by_layers(name: str, bits: int, experts: int, length: int) -> int:
    """The bytes of a step whose layers are on the disk, but for two, and whose layers' inputs are there, too."""
    lora = LoraConfig(rank=8)
    if "num_experts_per_tok" in MODELS[name]:
        lora = LoraConfig(rank=8, rank_pattern={EXPERTS: experts}) if experts else LoraConfig(rank=8, exclude=[EXPERTS])
    # The plan does not depend on how much memory there is.
    options: dict[str, Any] = {"grad_checkpoint": True, "optimizer": "adamw8bit", "memory": GIB}
    model, config, layout = prepared(name, bits, lora_parameters=lora, **options)
    # A command with --memory has small pieces of work.
    with patch.dict(PACES, cuda=gpu_pace(environment.SMALL_PIECE)):
        peak = forecast_step(model, config, BatchShape(1, length), layout, layer_inputs="disk").bytes.amount
    frozen = [
        sum(array.nbytes for _, array in leaves(layer.module.parameters()))
        - sum(array.nbytes for _, array in leaves(layer.module.trainable_parameters()))
        for layer in describe(model)
    ]
    return held(peak, frozen, range(len(frozen)))


@cache
def line(
    name: str, bits: int, device: str, limit: int, lengths: tuple[int, int], experts: int | None
) -> tuple[float, float, bool]:
    """The bytes that a step always needs and those of each token, by the plans of one row of each length.

    Also whether the line goes on. It rises by less than the layers' inputs where the update of the adapters needs most,
    as in short rows of mixtures; longer rows then rise faster.
    """
    with pretended(device), patch.object(backend, "gpu_memory", lambda: limit):
        if experts is not None:
            first, second = (by_layers(name, bits, experts, length) for length in lengths)
        else:
            model, config, layout = prepared(name, bits, grad_checkpoint=True)
            # Where memory is short, an NVIDIA GPU has little work queued.
            waits = Brake(0, 0) if device == "cuda" else None
            first, second = (
                forecast_step(model, config, BatchShape(1, n), layout, brake=waits).bytes.amount for n in lengths
            )
    rise = (second - first) / (lengths[1] - lengths[0])
    inputs = 2 * MODELS[name]["num_hidden_layers"] * MODELS[name]["hidden_size"]
    return second - rise * lengths[1], rise, experts is not None or rise >= 0.98 * inputs


def cell(name: str, bits: int, device: str, memory: int, lengths: tuple[int, int], experts: int | None) -> str:
    """The longest row that fits the memory, and the line through the plans."""
    limit = int(usable(device, memory))
    # A Mac's step does not depend on its memory.
    seen = limit if device == "cuda" else int(usable(device, 64))
    start, rise, goes_on = line(name, bits, device, seen, lengths, experts)
    if device == "cuda" and experts is None:
        limit = int(MOST * limit)
    tokens = min(LONGEST, (limit - start) / rise) // 1024 * 1024
    if tokens > lengths[1] and not goes_on:
        return f"{lengths[1]:,} or more ({(start + rise * lengths[1]) / 1e9:.1f})"
    return f"{tokens:,.0f} ({start / 1e9:.1f} + {rise / 1e3:.0f})" if tokens > 0 else f"- ({start / 1e9:.1f})"


def print_choices(name: str, bits: int, device: str, memories: Sequence[int], lengths: list[int]) -> None:
    """Print what `--grad-checkpoint auto` chooses for one row of each length in each memory."""
    label = f"{name}, {bits or 16} bits"
    with pretended(device):
        model, config, layout = prepared(name, bits, grad_checkpoint="auto")
        order = order_of(model)
        for memory in memories:
            limits = DeviceLimits(METAL_BUFFERS if device == "metal" else None, int(usable(device, memory)), "", "")
            for length in lengths:
                made: list[Forecast] = []
                shape, waits = BatchShape(1, length), limits.brake

                def attempt(
                    again: Checkpoints,
                    shape: BatchShape = shape,
                    waits: Brake | None = waits,
                    made: list[Forecast] = made,
                ) -> Forecast:
                    made.append(forecast_step(model, config, shape, layout, again, brake=waits))
                    return made[-1]

                choice = choose(attempt, order, limits, operators=operators_pay())
                kept, peak = choice.of - choice.again, choice.forecast.bytes.amount / 1e9
                verdict = "" if fits(choice.forecast, limits) else ", does not fit"
                operators = "again" if choice.checkpoints.operators else "kept"
                of_all = f"{kept} of {choice.of}{verdict}"
                cells = f"{memory} GB | {length:,} | {of_all} | {operators} | {peak:.1f} | {len(made)}"
                print(f"| {device} | {label} | {cells} |", flush=True)


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(CONFIGS), choices=list(MODELS))
    parser.add_argument("--bits", nargs="+", type=int, default=[0, 4], help="0: weights of 16 bits")
    parser.add_argument("--devices", nargs="+", default=list(MEMORIES), choices=list(MEMORIES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384], help="two lengths without --auto")
    parser.add_argument("--memories", nargs="+", type=int, help="in GB, instead of those that are sold")
    parser.add_argument("--by-layers", action="store_true", help="with layers on the disk")
    parser.add_argument("--experts", type=int, default=0, help="rank of experts' adapters with --by-layers")
    parser.add_argument("--auto", action="store_true", help="what --grad-checkpoint auto chooses")
    arguments = parser.parse_args()
    print(f"{heading()}; plans of {arguments.tokens} tokens\n")
    if arguments.auto:
        print("| device | model | memory | tokens | layers kept | cheap operators | GB | plans |\n" + "|---" * 8 + "|")
    for device in arguments.devices:
        memories = arguments.memories or MEMORIES[device]
        if arguments.auto:
            for name, bits in product(arguments.models, arguments.bits):
                print_choices(name, bits, device, memories, arguments.tokens)
            continue
        heads = " | ".join(f"{memory} GB" for memory in memories)
        print(f"| {device} | {heads} |\n" + "|---" * (1 + len(memories)) + "|")
        for name, bits in product(arguments.models, arguments.bits):
            lengths = (arguments.tokens[0], arguments.tokens[-1])
            experts = arguments.experts if arguments.by_layers else None
            cells = [cell(name, bits, device, memory, lengths, experts) for memory in memories]
            print(f"| {name}, {bits or 16} bits | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
