"""The trainer that a practised user of CUDA puts together of kernels that others publish, set up for one shape.

transformers' model and PEFT's LoRA, with flash-linear-attention's gated delta rule, convolution and gated norm, Liger's
norms, SwiGLU and loss fused with the head, PyTorch's attention and its fused AdamW. Where one of them is not in place,
there is no figure.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainers import Shape, Trainer, peft_trainer, torch_model

# FLA's kernels, by the names under which their calls are counted.
KERNELS = ("gated delta rule", "convolution", "gated norm")


@contextmanager
def strong_stack(shape: Shape, checkpoint: bool) -> Iterator[Trainer]:
    """A training step of that stack. Its first step checks that FLA's kernels run.

    Raises:
        RuntimeError: One of the kernels is not in place.
    """
    # Where FlashQLA or TileLang is installed, FLA hands calls to it unasked.
    os.environ |= {"FLA_FLASH_QLA": "0", "FLA_TILELANG": "0"}
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_5
    from liger_kernel.transformers.model.qwen3_5 import lce_forward

    calls: Counter[str] = Counter()
    _use_functions_of_fla(calls)
    model = torch_model(shape)
    apply_liger_kernel_to_qwen3_5(model=model, rms_norm=True, swiglu=True)
    _use_modules_of_fla(model, calls)
    names = Counter(module._get_name() for module in model.modules())
    swiglus = names["LigerQwen3MoeSwiGLUMLP"] + names["LigerSwiGLUMLP"]
    if not (names["LigerRMSNorm"] > 2 * shape.layers and swiglus):
        raise RuntimeError(f"strong_stack: Liger's norms and SwiGLU are not in place; the modules are {dict(names)}")
    if getattr(model.forward, "__func__", None) is not lce_forward:
        raise RuntimeError("strong_stack: Liger's loss is not in place")
    with peft_trainer(model, shape, checkpoint) as trainer:
        step = trainer.step

        def checked() -> float:
            loss = step()
            missing = [name for name in KERNELS if not calls[name]]
            if missing:
                raise RuntimeError(f"strong_stack: not called in a step: {', '.join(missing)}")
            trainer.step = step
            return loss

        trainer.step = checked
        yield trainer


def _counted(name: str, function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **options)

    return call


def _use_functions_of_fla(calls: Counter[str]) -> None:
    """Put FLA's gated delta rule and convolution in the place of transformers' array operations."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    # FLA refuses its backward pass on Hopper with Triton 3.4 to 3.7.0 for wrong results; here its time counts alone.
    chunk_o.TRITON_ABOVE_3_7_1 = True

    def recurrence(query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any) -> Any:
        times = value.shape[2] // key.shape[2]
        if times > 1:
            query, key = query.repeat_interleave(times, 2), key.repeat_interleave(times, 2)
        return chunk_gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=True)

    def convolution(x: Any, weight: Any, bias: Any = None, activation: Any = None, **_: Any) -> Any:
        return causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)[0].transpose(1, 2)

    modeling.torch_chunk_gated_delta_rule = _counted("gated delta rule", recurrence, calls)
    modeling.causal_conv1d_fn = _counted("convolution", convolution, calls)


def _use_modules_of_fla(model: Any, calls: Counter[str]) -> None:
    """Put FLA's gated norm into the layers, and its functions where versions of transformers keep them in a layer."""
    import torch
    from fla.modules import FusedRMSNormGated
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    for layer in model.modules():
        if type(layer).__name__ != "Qwen3_5GatedDeltaNet":
            continue
        old = layer.norm
        norm = FusedRMSNormGated(layer.head_v_dim, eps=old.variance_epsilon, activation="silu").to(old.weight)
        norm.weight = torch.nn.Parameter(old.weight.detach().clone())
        norm.forward = _counted("gated norm", norm.forward, calls)
        layer.norm = norm
        if hasattr(layer, "chunk_gated_delta_rule"):
            layer.chunk_gated_delta_rule = modeling.torch_chunk_gated_delta_rule
        if hasattr(layer, "causal_conv1d_fn"):
            layer.causal_conv1d_fn = modeling.causal_conv1d_fn
