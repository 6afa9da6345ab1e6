"""Every private name of mlx, mlx-lm, mlx-vlm and transformers that deltatune uses, with the fallback where it is gone.

A private name may be renamed by any release. So each stands here alone, with a probe for `deltatune doctor` and a
slower or plainer fallback. Names of replaced functions, or of attributes that a replacement reads, need no fallback of
their own: the patch's evidence leaves the function as it is, and says so.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .errors import UserError

# mlx/compile.h: void set_compile_mode(CompileMode), enum class CompileMode {disabled, no_simplify, no_fuse, enabled}.
_SET_COMPILE_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"
_NO_FUSE = 2

# mlx-vlm: a Qwen3-VL model's addition to its first layers, and a SwitchGLU's last sum.
DEEPSTACK = "_deepstack_process"
COMBINE = "_combine"
# mlx-vlm: the forward pass of a multi-token-prediction head.
DRAFT_FORWARD = "_forward_hidden"
# mlx-lm: the frequencies of a scaled rotary embedding.
ROPE_FREQUENCIES = "_freqs"
# Kimi K3's cached products of residual weights: those of a layer, and that of the model.
RESIDUAL_WEIGHTS_OF_LAYER = ("_attn_res_w_eff", "_mlp_res_w_eff")
RESIDUAL_WEIGHTS_OF_MODEL = ("_output_res_w_eff",)


def libmlx() -> Path | None:
    """The library that mlx.core is linked with; None where it lies elsewhere than in the wheels of Linux and macOS."""
    spec = importlib.util.find_spec("mlx")
    folders = [Path(folder, "lib") for folder in (spec.submodule_search_locations or [])] if spec else []
    libraries = [
        path for folder in folders for path in (folder / "libmlx.so", folder / "libmlx.dylib") if path.is_file()
    ]
    return libraries[0] if libraries else None


def set_no_fuse() -> Callable[[], None] | None:
    """The function that keeps mx.compile from fusing operations into kernels; None where libmlx does not export it."""
    path = libmlx()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    return partial(library[_SET_COMPILE_MODE], _NO_FUSE) if hasattr(library, _SET_COMPILE_MODE) else None


def random_key() -> mx.array:
    """MLX's random key, [2] uint32, which the next draw will split; a drawn one where MLX does not show it."""
    try:
        key = _random_state()[0]
    except (AttributeError, TypeError, LookupError):
        key = None
    if isinstance(key, mx.array) and key.shape == (2,) and key.dtype == mx.uint32:
        return key
    return mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)


def _random_state() -> Any:
    return mx.random.state


def dropout_rate(dropout: nn.Module) -> float:
    """The share of its inputs that an nn.Dropout sets to zero in training; else read from its printed form.

    UserError where neither says it.
    """
    keep = getattr(dropout, "_p_1", None)
    if isinstance(keep, float | int):
        return 1 - keep
    printed = re.search(r"\bp=([0-9.eE+-]+)", repr(dropout))
    if printed is None:
        raise UserError(f"{dropout!r}: this version of mlx does not say how much it drops; set dropout to 0.")
    return float(printed[1])


def hugging_face_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of transformers inside mlx-lm's TokenizerWrapper; else the owner of a method that it passes on."""
    inner = getattr(tokenizer, "_tokenizer", None)
    return getattr(tokenizer.convert_tokens_to_ids, "__self__", tokenizer) if inner is None else inner


def chat_template_code(tokenizer: Any) -> Any:
    """The function that writes conversations in the place of a Jinja template, or None.

    Where mlx-lm's TokenizerWrapper does not show it, its own method stands for it, which renders one text at a time.
    """
    return getattr(tokenizer, "_chat_template", tokenizer.apply_chat_template)


def model_classes(config: dict[str, Any]) -> tuple[type, Any]:
    """mlx-lm's classes of a model and of its arguments, by config.json; else those in the module of the model's type.

    ValueError for a type that mlx-lm does not know.
    """
    utils: Any = importlib.import_module("mlx_lm.utils")
    find = getattr(utils, "_get_classes", None)
    if find is None:
        find = getattr(inspect.signature(utils.load_model).parameters.get("get_model_classes"), "default", None)
    if callable(find):
        return find(config)
    kind = config["model_type"]
    name = f"mlx_lm.models.{getattr(utils, 'MODEL_REMAPPING', {}).get(kind, kind)}"
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"Model type {kind} not supported.")
    module = importlib.import_module(name)
    return module.Model, module.ModelArgs


def draft_forward(head: Any) -> Callable[..., mx.array]:
    """The forward pass of one of mlx-vlm's multi-token-prediction heads, on whole rows.

    It takes the embeddings [B, T, D] of the tokens [B, T] that follow, hidden states [B, T, D], and those tokens.
    UserError where mlx-vlm has it under another name, or with other arguments.
    """
    # GLM's head has a module of its own inside, and no such method.
    forward: Any = getattr(head, DRAFT_FORWARD, None) or getattr(head, "mtp", None)
    base: Any = importlib.import_module("mlx_vlm.models.base")
    caches = [None] * len(head.get("layers", ()))
    calls: dict[str, Callable[..., mx.array]] = {
        "token_embed hidden cache position_ids": lambda embedded, hidden, _: forward(
            embedded, hidden, caches, mx.arange(hidden.shape[1])[None]
        ),
        "token_embed hidden tokens cache kwargs": lambda *arrays: forward(*arrays, caches)[0],
        "hidden next_embed mask cache": lambda embedded, hidden, _: forward(
            hidden, embedded, base.create_attention_mask(hidden, return_array=True)
        ),
    }
    arguments = "" if forward is None else " ".join(inspect.signature(forward).parameters)
    if arguments not in calls:
        raise UserError(
            "mtp: this version of mlx-vlm computes multi-token-prediction heads in another way than 0.7.10 does, with "
            "which deltatune was tried: install mlx-vlm 0.7.10, or leave mtp out."
        )
    return calls[arguments]


def download(name: str) -> Path:
    """The folder of a model of the Hugging Face hub, with the files that mlx-lm would fetch; else with all files."""
    utils: Any = importlib.import_module("mlx_lm.utils")
    fetch = getattr(utils, "_download", None)
    if fetch is not None:
        return Path(fetch(name))
    return Path(importlib.import_module("huggingface_hub").snapshot_download(name))


class PrivateName(NamedTuple):
    """A private name of upstream, the fallback `without` it, in a sentence, and whether the package has it."""

    name: str
    without: str
    present: Callable[[], bool]


def _holds(module: str, *names: str) -> bool:
    """Whether the text of a module holds these names. The module is not imported, which would take seconds."""
    folder = Path(str(importlib.util.find_spec(module.partition(".")[0]).origin)).parent  # type: ignore[union-attr]
    path = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return path.is_file() and all(name in path.read_text(encoding="utf-8") for name in names)


def _written(module: str, name: str, without: str) -> PrivateName:
    """A function of a module, or a method or attribute of its class, that stands in the module's text."""
    last = name.rpartition(".")[2]
    return PrivateName(
        f"{module}.{name}", without, lambda: _holds(module, f"def {last}(") or _holds(module, f"self.{last} = ")
    )


_LEFT = "The patch that needs it is left alone, and the doctor's patches name it."

NAMES = (
    PrivateName(
        "mlx::core::set_compile_mode",
        "mx.compile builds kernels of its own, which takes a minute at the start of a run.",
        lambda: set_no_fuse() is not None,
    ),
    PrivateName(
        "mlx.core.random.state[0]",
        "Checkpointed layers in other programs' loops draw from a key of their own.",
        lambda: isinstance(_random_state()[0], mx.array),
    ),
    PrivateName(
        "mlx.nn.Dropout._p_1",
        "The rate of dropout is read from what the layer prints of itself.",
        lambda: hasattr(nn.Dropout(0.5), "_p_1"),
    ),
    _written(
        "mlx_lm.tokenizer_utils",
        "TokenizerWrapper._tokenizer",
        "The tokenizer is found as the owner of one of its methods.",
    ),
    _written(
        "mlx_lm.tokenizer_utils",
        "TokenizerWrapper._chat_template",
        "Conversations are rendered one at a time, without limits of time and memory, and tokens are not kept.",
    ),
    _written("mlx_lm.utils", "_get_classes", "The module of the model's type is imported by its name."),
    _written("mlx_lm.utils", "_download", "All files of a model are downloaded from the hub."),
    PrivateName(
        f"mlx_lm.models.kimi_k3: {', '.join((*RESIDUAL_WEIGHTS_OF_LAYER, *RESIDUAL_WEIGHTS_OF_MODEL))}",
        _LEFT,
        lambda: _holds("mlx_lm.models.kimi_k3", *RESIDUAL_WEIGHTS_OF_LAYER, *RESIDUAL_WEIGHTS_OF_MODEL),
    ),
    _written("mlx_lm.models.rope_utils", f"YarnRoPE.{ROPE_FREQUENCIES}", "Models with YaRN positions are refused."),
    _written("mlx_vlm.models.qwen3_vl.language", f"Qwen3VLModel.{DEEPSTACK}", _LEFT),
    _written(
        "mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp",
        f"Qwen3_5MTPDraftModel.{DRAFT_FORWARD}",
        "Multi-token-prediction heads are not trained: mtp is refused.",
    ),
    _written(
        "mlx_vlm.speculative.drafters.nemotron_h_mtp.nemotron_h_mtp",
        f"NemotronHMTPDraftModel.{DRAFT_FORWARD}",
        "Nemotron-H's multi-token-prediction heads are not trained: mtp is refused.",
    ),
    _written("mlx_vlm.models.switch_layers", f"SwitchGLU.{COMBINE}", _LEFT),
)


@dataclass(frozen=True)
class Probed:
    """The result of a probe: the private name, whether the installed package has it, and the fallback without it."""

    name: str
    present: bool
    without: str


def probed() -> list[Probed]:
    """Look for every private name of the packages that are installed."""
    results = []
    for name, without, present in NAMES:
        if importlib.util.find_spec(re.split(r"\W", name)[0]) is None:
            continue
        try:
            is_there = present()
        except (AttributeError, TypeError, LookupError, OSError):
            is_there = False
        results.append(Probed(name, is_there, without))
    return results
