"""Measures an optimizer step with `expert_updates` dense and active, by how many of 256 experts had tokens.

usage: DELTATUNE_THREADS=1 python benchmarks/expert_updates.py [--rounds 9] [--routed 8 32 128 256]

The model is one expert layer in the shape of Qwen3.5-35B-A3B (hidden 2048, inner 512, 256 experts, 8 a token), with
LoRA r=8 on gate, up and down, and AdamW with weight decay. Only the update is timed; its gradients exist already, and
are zero for experts without tokens. Rounds are interleaved in one process, and medians are printed. There is no figure
unless `active` leaves the adapters and moments of experts without tokens bitwise unchanged, and `dense` changes all.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import processes
from machine import heading

HIDDEN, INNER, EXPERTS, RANK = 2048, 512, 256, 8
MODES = ("dense", "active")


def make(mode: str) -> tuple[Any, Any, Any]:
    """Make layer, optimizer and step; the base's weights stay lazy, since an update does not read them."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.switch_layers import SwitchGLU

    from deltatune.lora.experts import LoRASwitchLinear
    from deltatune.options.config import TrainConfig
    from deltatune.train.distributed import World
    from deltatune.train.step import Step
    from deltatune.train.updates.optimizer import UpdateOptions, build_optimizer

    mx.random.seed(0)
    model = nn.Module()
    model.mlp = SwitchGLU(HIDDEN, INNER, EXPERTS)
    model.freeze()
    for name in ("gate_proj", "up_proj", "down_proj"):
        adapter = model.mlp[name] = LoRASwitchLinear.from_base(model.mlp[name], rank=RANK)
        adapter.lora_b = 0.1 * mx.random.normal(adapter.lora_b.shape)
        adapter.unfreeze_adapter()
    settings = {"adamw": {"weight_decay": 0.1, "bias_correction": True}}
    optimizer = build_optimizer(TrainConfig(optimizer="adamw", learning_rate=1e-3, optimizer_config=settings))
    step = Step(model, optimizer, lambda *_: None, World(), update=UpdateOptions(expert_updates=mode))  # type: ignore[arg-type, return-value]
    mx.eval(model.trainable_parameters(), optimizer.state)
    return model, optimizer, step


def gradients_for(made: tuple[Any, Any, Any], routed: int) -> Any:
    """Gradients as a micro-batch of the step gives them, which are zero except for the first `routed` experts."""
    import mlx.core as mx
    from mlx.utils import tree_map

    has_tokens = mx.arange(EXPERTS)[:, None, None] < routed
    model, _, step = made
    parameters = step.bundles.join(model.trainable_parameters())
    gradients = tree_map(lambda p: mx.where(has_tokens, mx.random.normal(p.shape), 0.0), parameters)
    mx.eval(gradients)
    return gradients


def update(made: tuple[Any, Any, Any], gradients: Any) -> tuple[float, float]:
    """Run one update; returns its seconds by the clock and of CPU time."""
    import mlx.core as mx

    model, optimizer, step = made
    one = mx.array(1.0)
    mx.eval(one)
    started, cpu = time.perf_counter(), time.process_time()
    norm = step.update(gradients, one, one)
    mx.eval(model.trainable_parameters(), optimizer.state, norm)
    return time.perf_counter() - started, time.process_time() - cpu


def verify(mode: str, made: tuple[Any, Any, Any], gradients: Any, routed: int) -> None:
    """Raise SystemExit unless an update changes exactly the experts that it should."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    model, optimizer, _ = made

    def values() -> dict[str, mx.array]:
        flat = tree_flatten({"model": model.trainable_parameters(), "moments": optimizer.state["mlp"]})
        copies = {path: mx.array(leaf) for path, leaf in flat if leaf.ndim == 3}
        mx.eval(copies)
        return copies

    before = values()
    update(made, gradients)
    after = values()
    expected = mx.arange(EXPERTS) < (EXPERTS if mode == "dense" else routed)
    for path, value in after.items():
        if not mx.array_equal((value != before[path]).reshape(EXPERTS, -1).any(axis=1), expected).item():
            raise SystemExit(f"{mode}, {routed} routed: {path}: the update changed other experts than it should")


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--routed", nargs="+", type=int, default=[8, 32, 128, 256])
    arguments = parser.parse_args()
    import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

    # isort: split
    from deltatune.machine.compiling import without_kernels

    print(f"{heading()}\n")
    print("| experts with tokens | dense, ms | active, ms | dense / active | CPU ms | CPU ms | dense / active |")
    print("|---" * 7 + "|")
    with without_kernels():
        made = {mode: make(mode) for mode in MODES}
        for each in made.values():  # Moments for all, and so a move of all by the dense update.
            update(each, gradients_for(each, EXPERTS))
        for routed in arguments.routed:
            gradients = gradients_for(made["dense"], routed)
            for mode in MODES:
                update(made[mode], gradients)
                verify(mode, made[mode], gradients, routed)
            taken = [{mode: update(made[mode], gradients) for mode in MODES} for _ in range(arguments.rounds)]
            cells = []
            for which in (0, 1):
                dense, active = (statistics.median(each[mode][which] for each in taken) * 1e3 for mode in MODES)
                cells += [f"{dense:.0f}", f"{active:.0f}", f"{dense / active:.1f}"]
            print(f"| {routed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
