"""The cases of parity (each family with LoRA, one with DoRA, one with a 4-bit base) and the recipe of both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from . import seeded
from .families import FAMILIES, Family

STEPS = 30
RANK = 3
SCALE = 2.0
BETAS = (0.9, 0.98)
EPS = 1e-8
WEIGHT_DECAY = 0.05

# The largest difference allowed in the loss of a step, in a first gradient relative to its norm, and in a final adapter
# relative to its change in training.
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-4
ADAPTER_TOLERANCE = 1e-3
# The loss must fall by this share, from the first cycle of batches to the last.
FALL = 0.3
# A recording is refused where weights changed by 1e-7 change transformers' final adapters by more than the first limit,
# or where the scores of the last chosen expert and of the next one differ by less than the second.
NUDGED_LIMIT = 1e-4
ROUTE_LIMIT = 1e-5

Adapters = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class ParityRun:
    """A training run: the loss of every step, the gradients of the first step and the adapters after the last."""

    losses: list[float]
    gradients: Adapters
    final: Adapters


@dataclass(frozen=True)
class ParityCase:
    """One family to train, with LoRA or DoRA; transformers trains a base of so many `bits` dequantised."""

    family: Family
    dora: bool = False
    bits: int | None = None


# Every size is a multiple of the quantisation group of 32 weights, so that every matrix is quantised.
_WIDE_KIMI = {
    **FAMILIES["kimi_linear"].options,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "linear_attn_config": {
        "head_dim": 32,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
    },
}
GROUP_SIZE = 32

CASES: dict[str, ParityCase] = {
    **{name: ParityCase(family) for name, family in FAMILIES.items()},
    "olmo_hybrid-dora": ParityCase(replace(FAMILIES["olmo_hybrid"], draw=7), dora=True),
    "kimi_linear-4bit": ParityCase(replace(FAMILIES["kimi_linear"], options=_WIDE_KIMI, draw=0), bits=4),
}


def initial_adapters(targets: dict[str, tuple[int, int]]) -> Adapters:
    """Draw lora_a and lora_b for the modules {path: (inputs, outputs)} from a seed.

    DoRA's magnitude is not drawn: each side computes it as the norms of the base.
    """
    return {
        path: dict(zip(("lora_a", "lora_b"), seeded.lora(path, inputs, outputs, RANK), strict=True))
        for path, (inputs, outputs) in targets.items()
    }
