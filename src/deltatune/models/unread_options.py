"""Refuses options of config.json that change logits in transformers, but are not read by mlx-lm's model."""

from __future__ import annotations

from ..errors import UserError
from .scaled_positions import text_part
from .transformers_configs import Config, fields_beside, transformers_defaults, transformers_values

# Options that change logits without changing the shape of a tensor, so that nothing else would show that they are lost.
_CHANGING = (
    "activation_function",
    "attn_logit_softcapping",
    "attention_multiplier",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "logit_scale",
    "logits_scaling",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "routed_scaling_factor",
    "swiglu_alpha",
    "swiglu_limit",
    "use_bidirectional_attention",
)
# Names of functions that are the same, or differ by 0.1 % (known_faults.py names the families where they do).
_ALIKE = {
    "swish": "silu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_accurate": "gelu",
}


def check_options(config: Config) -> None:
    """Check that mlx-lm's model reads each such option that differs from the default of transformers' class.

    Args:
        config: The content of config.json.

    Raises:
        UserError: No class of arguments in the module of mlx-lm's model has an option that differs.
    """
    part = text_part(config)
    differing = [name for name in _CHANGING if part.get(name) is not None]
    if not differing:
        return
    defaults = transformers_defaults(part)
    values = transformers_values(part)
    read = fields_beside(part)
    for name in differing:
        if name in read or name not in defaults:
            continue
        if _plain(values[name]) != _plain(defaults[name]):
            raise UserError(
                f"config.json: it sets {name} to {values[name]!r}, and mlx-lm's {part.get('model_type')} computes with "
                f"{defaults[name]!r} whatever it is: its logits would not be those of transformers. Train another "
                f"model, or remove {name} to train this one as mlx-lm computes it."
            )


def _plain(value: object) -> object:
    return _ALIKE.get(value, value) if isinstance(value, str) else value
