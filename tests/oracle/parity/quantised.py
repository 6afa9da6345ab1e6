"""The dequantised twin of a quantised kimi_linear: the same numbers as a Hugging Face save in fp32."""

import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from deltatune.selftest.parity.families import Config, Weights

_EXPERT = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _dense(module: nn.Module) -> np.ndarray:
    return np.array(
        mx.dequantize(module.weight, module.scales, module.biases, group_size=module.group_size, bits=module.bits)
    )


def dequantised(model: nn.Module, weights: Weights, config: Config) -> Weights:
    """`weights`, a kimi_linear save, with the values that the quantised `model` really computes with."""
    modules = {name: module for name, module in model.named_modules() if "scales" in module}
    used = set()

    def value(path: str) -> np.ndarray:
        used.add(path)
        return _dense(modules[path])

    result = {}
    for name, original in weights.items():
        path = name.removesuffix(".weight").replace(".block_sparse_moe.", ".mlp.")
        expert = _EXPERT.fullmatch(name)
        if expert:
            result[name] = value(f"{expert[1]}.mlp.switch_mlp.{_EXPERT_NAMES[expert[3]]}")[int(expert[2])]
        elif path.endswith("kv_b_proj"):
            keys = value(path.replace("kv_b_proj", "embed_q")).swapaxes(1, 2)
            values = value(path.replace("kv_b_proj", "unembed_out"))
            result[name] = np.concatenate([keys, values], axis=1).reshape(original.shape)
        else:
            result[name] = value(path) if path in modules else original
    if used != set(modules):
        raise ValueError(f"quantised, but not in the save: {sorted(set(modules) - used)}")
    return {name: np.ascontiguousarray(array) for name, array in result.items()}
