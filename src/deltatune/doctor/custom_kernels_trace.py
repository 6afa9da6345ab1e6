"""The process in which doctor.custom_kernels traces a model: it replaces the kernels, then imports the model."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

_LENGTH = 8
_GRID = (1, 4, 4)

# (name, caller) -> [calls, whether the backward pass asked for a gradient]
_found: dict[tuple[str, str], list[Any]] = {}


def main() -> None:
    """Read a pickled request from the standard input, and write the kernels found as JSON to the standard output."""
    _install()
    module, name, arguments, dtype = pickle.loads(sys.stdin.buffer.read())
    from deltatune.machine import startup
    from deltatune.patches import patched

    startup.leave_torch_out(own_process=True)
    model = getattr(importlib.import_module(module), name)(arguments)
    model.set_dtype(getattr(mx, dtype))
    model.train()
    _found.clear()
    with patched():
        _trace(model, arguments)
    kernels = [
        {"name": name, "caller": caller, "calls": calls, "differentiable": not asked}
        for (name, caller), (calls, asked) in _found.items()
    ]
    print("\n" + json.dumps(kernels))


def _install() -> None:
    # mx.compile would build its functions for this machine, which takes many times as long as the trace.
    mx.disable_compile()
    for name in ("metal_kernel", "cuda_kernel", "precompiled_cuda_kernel"):
        if hasattr(mx.fast, name):
            setattr(mx.fast, name, _stand_in)
    mx.metal.is_available = lambda: True
    mx.default_device = lambda: mx.Device(mx.gpu, 0)
    about: dict[str, str | int] = {"architecture": "applegpu_g15s", "device_name": "Apple M3", "memory_size": 2**34}
    about |= {"max_recommended_working_set_size": 2**34, "max_buffer_length": 2**33, "resource_limit": 499_000}
    on_cpu: dict[str, str | int] = {"architecture": "arm64", "device_name": "Apple M3"}
    mx.metal.device_info = lambda: about
    mx.device_info = lambda d=mx.gpu: on_cpu if mx.Device(mx.cpu) == d else about


def _stand_in(*positional: Any, **options: Any) -> Callable[..., list[mx.array]]:
    """Replaces MLX's constructors of kernels: the kernel returns zeros, and its gradient records that it was asked."""
    name = str(options.get("name") or positional[0])

    def kernel(*arguments: Any, **keywords: Any) -> list[mx.array]:
        inputs = [array for array in keywords.get("inputs") or arguments[0] if isinstance(array, mx.array)]
        shapes, dtypes = keywords["output_shapes"], keywords["output_dtypes"]
        entry = _found.setdefault((name, _caller()), [0, False])
        entry[0] += 1

        def forward(*arrays: mx.array) -> list[mx.array]:
            return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

        def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            entry[1] = True
            return [mx.zeros_like(primal) for primal in primals]

        if not inputs:
            return forward()
        call: Any = mx.custom_function(forward)
        call.vjp(backward)
        return call(*inputs)

    return kernel


def _caller() -> str:
    """The module and the function of the innermost caller outside this file and MLX."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("mlx.", __name__)):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


def _trace(model: Any, config: Any) -> None:
    from deltatune.layers import logits_of

    tokens: list[int] = [0] * _LENGTH
    more: dict[str, Any] = {}
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        if hasattr(config, "media_placeholder_token_id"):
            tokens, more = _moonvit(config, vision)
        elif hasattr(vision, "in_channels") and hasattr(config, "image_token_id"):
            tokens, more = _patches(config, vision)
    rows = mx.array([tokens])

    def loss(parameters: Any) -> mx.array:
        model.update(parameters)
        return logits_of(model, rows, **more).astype(mx.float32).sum()

    mx.value_and_grad(loss)(model.parameters())


def _patches(config: Any, vision: Any) -> tuple[list[int], dict[str, Any]]:
    """Tokens and arguments for an image as flat patches of several frames (Qwen3-VL, Qwen3.5, GLM-5-Next)."""
    frames, height, width = _GRID
    image_tokens = frames * height * width // vision.spatial_merge_size**2
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    # The tokens around an image have one of two names in the models' configs.
    start, end = (
        getattr(config, f"vision_{which}_token_id", None) or getattr(config, f"image_{which}_token_id")
        for which in ("start", "end")
    )
    pixels = mx.zeros((frames * height * width, patch))
    tokens = [1, start, *([config.image_token_id] * image_tokens), end, 1]
    return tokens, {"pixel_values": pixels, "image_grid_thw": mx.array([_GRID])}


def _moonvit(config: Any, vision: Any) -> tuple[list[int], dict[str, Any]]:
    """Tokens and arguments for an image as square patches (the Kimi family)."""
    _, height, width = _GRID
    down, across = vision.merge_kernel_size
    image_tokens = height * width // (down * across)
    pixels = mx.zeros((height * width, 3, vision.patch_size, vision.patch_size))
    tokens = [1, *([config.media_placeholder_token_id] * image_tokens), 1]
    return tokens, {"pixel_values": pixels, "image_grid_hws": mx.array([[height, width]])}


if __name__ == "__main__":
    main()
