"""Replays thirty training steps of each family that transformers and PEFT ran from the same start."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..errors import first_line
from ..machine import backend
from .outcome import Check, Outcome, compared_with_bounds, not_run
from .parity import cases, ours, recording, vision

_BOUNDS = {
    "loss": cases.LOSS_TOLERANCE,
    "first gradients": cases.GRADIENT_TOLERANCE,
    "final adapters": cases.ADAPTER_TOLERANCE,
}
# LoRA, QLoRA and DoRA, and both kinds of gate.
_QUICK = ("qwen3_5_moe", "kimi_linear-4bit", "olmo_hybrid-dora")


def compared(name: str, case: Any, run: Callable[..., cases.ParityRun]) -> Outcome:
    """Replay the recording `name` through `run`, and compare the result with the recorded run."""
    reference = recording.read(name)
    adapters = cases.initial_adapters(reference.targets)
    deviation = reference.compare(run(case, reference.config, reference.weights(case), adapters))
    errors = dict(zip(_BOUNDS, (deviation.loss, deviation.gradient, deviation.adapter), strict=True))
    facts = {"step": deviation.step, "gradient_of": deviation.gradient_of, "adapter_of": deviation.adapter_of}
    return compared_with_bounds(errors, _BOUNDS, **facts)


def _text(name: str, case: cases.ParityCase) -> Outcome:
    try:
        return compared(name, case, ours.run)
    except RuntimeError as error:
        if case.bits is None or not backend.builds_kernels():
            raise
        return not_run(f"MLX's CUDA has no packed product for the rows of this tiny model ({first_line(error)[:120]})")


def _vision(name: str, case: vision.VisionCase) -> Outcome:
    if importlib.util.find_spec("mlx_vlm") is None:
        return not_run("mlx-vlm is not installed: pip install 'deltatune[vision]'")
    from .parity import vision_ours

    return compared(f"vision/{name}", case, vision_ours.run)


def checks(quick: bool) -> Iterator[Check]:
    """One check for each recording; `quick` runs one for each kind of adapter."""
    for name, case in cases.CASES.items():
        if not quick or name in _QUICK:
            yield Check(f"parity: {name}", partial(_text, name, case))
    for name, vision_case in vision.CASES.items():
        if not quick:
            yield Check(f"parity with images: {name}", partial(_vision, name, vision_case))
