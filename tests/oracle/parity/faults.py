"""Replays of recordings, and faults to plant in deltatune: each must turn a replay red, or it proves nothing."""

import functools
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.optimizers
import mlx_lm.models.olmo_hybrid
import numpy as np
import pytest

from deltatune.lora.linear import LoRALinear
from deltatune.ops.linear_attention import linear_attention
from deltatune.options.config import TrainConfig
from deltatune.patches import recurrence
from deltatune.patches.tables import state_space
from deltatune.selftest.parity import ours, recording
from deltatune.selftest.parity.cases import FALL, GRADIENT_TOLERANCE, LOSS_TOLERANCE, STEPS, ParityRun, initial_adapters
from deltatune.train import batch_loss

Plant = Callable[[pytest.MonkeyPatch], None]
# Most faults show by this step.
FEW = 3
_gated_delta = recurrence.gated_delta
_cross_entropy = batch_loss.linear_cross_entropy


@functools.cache
def recorded(name: str) -> recording.Recording:
    return recording.read(name)


def falls(losses: list[float]) -> bool:
    """Whether the losses of a whole run fall enough for it to tell a fault from rounding."""
    first, last = np.mean(losses[:3]), np.mean(losses[-3:])
    return len(losses) == STEPS and last <= first - FALL * abs(first)


def replay(module: ModuleType, case: Any, name: str, plant: Callable[[], None] = lambda: None) -> ParityRun:
    """Train a recorded case again by a module's `run`; `plant` is called when the patches are in force."""
    reference = recorded(name)
    adapters = initial_adapters(reference.targets)
    return module.run(case, reference.config, reference.weights(case), adapters, plant)


def shows(module: ModuleType, reference: recording.Recording, run: Callable[[pytest.MonkeyPatch], ParityRun]) -> bool:
    """Whether a run differs from its recording in its first gradients, in a loss or, after all steps, in an adapter.

    `run` plants a fault, which ends with its argument, and trains by `module`: a few steps, and all if none shows it.
    """
    for steps in (FEW, STEPS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "train", partial(module.train, steps=steps))
            found = run(patch)
        gap = np.abs(np.subtract(found.losses, reference.losses[:steps])).max()
        gradient, _ = recording.worst(reference.gradients, found.gradients)
        if not (gap <= LOSS_TOLERANCE and gradient <= GRADIENT_TOLERANCE):
            return True
    return not reference.compare(found).small


def _scale_gradient(value: mx.array, factor: float) -> mx.array:
    return factor * value + mx.stop_gradient(value - factor * value)


def _changed(module: Any, operator: Callable[..., Any], change: Callable[..., tuple[Any, ...]]) -> Plant:
    """Replace the arrays of an operator that `module` calls, q, k, v, log_g and more, by `change` of them."""

    def faulty(*arrays: mx.array, **options: Any) -> tuple[mx.array, mx.array]:
        return operator(*change(*arrays), **options)

    return lambda monkeypatch: monkeypatch.setattr(module, operator.__name__, faulty)


_operator = partial(_changed, recurrence, _gated_delta)
_linear_attention = partial(_changed, state_space, linear_attention)


def _cut_after(limit: int) -> Plant:
    """A backward pass that forgets the state's gradient at one chunk boundary."""

    def faulty(*arrays: mx.array, initial_state: Any, mask: Any, segments: Any) -> tuple[mx.array, mx.array]:
        if arrays[0].shape[1] <= limit:
            return _gated_delta(*arrays, initial_state=initial_state, mask=mask, segments=segments)
        first, state = _gated_delta(*(a[:, :limit] for a in arrays), initial_state=initial_state)
        rest, state = _gated_delta(*(a[:, limit:] for a in arrays), initial_state=mx.stop_gradient(state))
        return mx.concatenate([first, rest], axis=1), state

    return lambda monkeypatch: monkeypatch.setattr(recurrence, "gated_delta", faulty)


def _norm_eps(module: Any, factor: float) -> Plant:
    """q and k normalised with an eps too large."""

    def faulty(q: mx.array, k: mx.array, *, inv_scale: float, eps: float) -> tuple[mx.array, mx.array]:
        eps *= factor * inv_scale**2
        return inv_scale**2 * mx.fast.rms_norm(q, None, eps), inv_scale * mx.fast.rms_norm(k, None, eps)

    return lambda monkeypatch: monkeypatch.setattr(module, "normalize_qk", faulty)


def _no_bias_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(config: TrainConfig) -> mlx.optimizers.Optimizer:
        return mlx.optimizers.AdamW(
            config.learning_rate, **{**config.optimizer_config["adamw"], "bias_correction": False}
        )

    monkeypatch.setattr(ours, "build_optimizer", faulty)


def _padding_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(head: Any, hidden: mx.array, targets: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        return _cross_entropy(head, hidden, targets, mx.ones_like(weights))

    monkeypatch.setattr(batch_loss, "linear_cross_entropy", faulty)


def _adapter_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    call = LoRALinear.__call__

    def faulty(self: LoRALinear, x: mx.array) -> mx.array:
        base = self.linear(x)
        return base + 1.01 * (call(self, x) - base)

    monkeypatch.setattr(LoRALinear, "__call__", faulty)


# name: (how to plant it, the case that must turn red)
FAULTS: dict[str, tuple[Plant, str]] = {
    "beta doubled": (_operator(lambda q, k, v, g, b: (q, k, v, g, 2 * b)), "qwen3_5_moe"),
    "beta not doubled, where the family says so": (_operator(lambda q, k, v, g, b: (q, k, v, g, b / 2)), "olmo_hybrid"),
    "log_g off by 0.1 %": (_operator(lambda q, k, v, g, b: (q, k, v, 1.001 * g, b)), "kimi_linear"),
    "log_g rounded to bf16": (
        _operator(lambda q, k, v, g, b: (q, k, v, g.astype(mx.bfloat16).astype(mx.float32), b)),
        "bailing_hybrid",
    ),
    "gradient of log_g missing": (_operator(lambda q, k, v, g, b: (q, k, v, mx.stop_gradient(g), b)), "qwen3_next"),
    "gradient of k off by 1 %": (_operator(lambda q, k, v, g, b: (q, _scale_gradient(k, 1.01), v, g, b)), "qwen3_5"),
    "gradient of beta off by 1 %": (
        _operator(lambda q, k, v, g, b: (q, k, v, g, _scale_gradient(b, 1.01))),
        "kimi_linear-4bit",
    ),
    "log_g of a state-space layer off by 0.1 %": (
        _linear_attention(lambda q, k, v, g: (q, k, v, 1.001 * g)),
        "nemotron_h",
    ),
    "gradient of a state-space layer's log_g missing": (
        _linear_attention(lambda q, k, v, g: (q, k, v, mx.stop_gradient(g))),
        "granitemoehybrid",
    ),
    "slopes of Lightning attention off by 1 %": (
        _linear_attention(lambda q, k, v, g: (q, k, v, 1.01 * g)),
        "bailing_moe_linear",
    ),
    "gradient of the state lost between two chunks": (_cut_after(64), "qwen3_next"),
    "eps of the q and k norm 1e-4": (_norm_eps(mlx_lm.models.olmo_hybrid, 100), "olmo_hybrid"),
    "padding and prompt count in the loss": (_padding_counts, "qwen3"),
    "adapter scale off by 1 %": (_adapter_scale, "gemma3"),
    "AdamW without bias correction": (_no_bias_correction, "qwen3"),
}
