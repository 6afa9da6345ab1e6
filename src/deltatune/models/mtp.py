"""Loads the multi-token-prediction head of a checkpoint, which predicts the token after the next one.

mlx-lm drops the head's tensors when it loads a checkpoint, and mlx-vlm has its modules, for speculative decoding. The
head becomes a child of the model, so that adapters, saves, plans and digests treat it as any other module.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.generate import GenerationResponse

from ..errors import UserError, reason
from ..lora.select import MTP
from ..machine import packages
from ..machine.compiling import without_kernels
from ..ops.functional import arrays_of, undisturbed
from ..ops.random_state import drawing_from
from ..patches import patched
from ..upstream import draft_forward
from .checkpoint_files import only_chosen, weight_headers
from .generate import Sampling, finite, stream, with_first_space
from .load import Loaded, plain_config
from .transformers_configs import completed, text_part, with_known_type
from .vision.split import has_vision
from .vocabulary import token_tables

# The model types with heads that tests train.
_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h")
# The first mlx-vlm that loads a head beside its model.
_SINCE = "0.7.10"


def add_head(model: nn.Module, path: Path) -> None:
    """Add the head of a checkpoint to its model in place, as the child `mtp`, in inference mode.

    UserError: the model was loaded for images, no head in it can be trained, its tensors do not fit, or mlx-vlm lacks
    it.
    """
    if has_vision(model):
        raise UserError("mtp: the head of a model trains on text, and the data have images; leave those rows out.")
    splitter, config, _ = _stored(path)
    try:
        with only_chosen(path) as folder:
            head = splitter.load(folder, source_config=config)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"mtp: the tensors of the multi-token-prediction head of {path} do not fit its config.json: "
            f"{reason(error)}. Take the files of the original model."
        ) from error
    model[MTP] = head.eval()


def head_sanitizer(path: Path) -> Callable[[Mapping[str, mx.array]], dict[str, mx.array]]:
    """Return the function from all tensors of a checkpoint's files to the parameters of a model that are its head's."""
    splitter, config, of_mlx = _stored(path)
    text = splitter.read_text_config(config)

    def sanitize(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        of_head = {name: tensor for name, tensor in tensors.items() if splitter.select_keys(name, text)}
        return {f"{MTP}.{name}": tensor for name, tensor in splitter.transform(of_head, text, of_mlx).items()}

    return sanitize


def two_ahead(model: nn.Module) -> Callable[[mx.array, mx.array], mx.array]:
    """Return the head as a function of a row's hidden states and of the tokens that follow.

    The function takes the hidden states [B, T, D] of the model behind its last norm and the token behind each position
    [B, T]. It returns [B, T, D], of which the model's own output head makes the logits of the tokens after those.
    Documents of packed rows are kept apart as in the model.

    Source: https://arxiv.org/abs/2412.19437, section 2.2; mlx_vlm.speculative.drafters.
    """
    head: Any = model[MTP]
    embedding = next(iter(token_tables(model).values()))
    forward = draft_forward(head)

    return lambda hidden, following: forward(embedding(following), hidden, following)


def _stored(path: Path) -> tuple[Any, dict[str, Any], bool]:
    """mlx-vlm's reader of a head's tensors, the config.json for it, and whether the tensors are in MLX's form."""
    splitter, config = reader_of(path)
    text = text_part(config)
    headers = () if splitter is None else weight_headers(path).values()
    holding = [header for header in headers if any(splitter.select_keys(name, text) for name in header.tensors)]
    if not holding:
        raise UserError(
            f"mtp: model {path} ({config['model_type']}) has no multi-token-prediction head that can be trained: "
            "tensors mtp.* of a Qwen3.5, Qwen3-Next or Nemotron-H model were expected. Converted checkpoints often "
            "lack them: take the original model, or leave mtp out."
        )
    of_mlx = splitter.supports_mlx_source and any(header.metadata.get("format") == "mlx" for header in holding)
    return splitter, config, of_mlx


def reader_of(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return mlx-vlm's reader of heads of a checkpoint's family, None for one without, and the config.json for it."""
    try:
        from mlx_vlm.speculative.drafters.mtp_split import MTPSplitter, get_mtp_splitter

        loads = hasattr(MTPSplitter, "load")
    except ImportError:
        loads = False
    if not loads:
        installed = packages.versions(["mlx-vlm"]).get("mlx-vlm", "none")
        raise UserError(
            f"mtp: the head's modules are those of mlx-vlm {_SINCE} or later, and {installed} is installed: "
            f"pip install 'mlx-vlm>={_SINCE}'."
        )
    config = with_known_type(completed(plain_config(path, trust_remote_code=False)))
    if config["model_type"] not in _FAMILIES:
        return None, config
    text = dict(text_part(config))
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" not in rope:
        # All three positions of a token of text are equal, so that any division of the frequencies serves.
        half = int(text["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        text["rope_parameters"] = {"type": "default", **rope, "mrope_section": [half, 0, 0]}
    config = {**config, "text_config": text}
    return get_mtp_splitter(source_config=config), config


@dataclass
class DraftedResponse(GenerationResponse):
    """A piece of an answer, as mlx-lm describes it, with counts so far: of the tokens that the head has drafted, of
    those that the model has chosen itself, and of the model's passes behind the prompt."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0


def stream_drafted(
    loaded: Loaded, prompt: Sequence[int], max_tokens: int, sampling: Sampling
) -> Generator[DraftedResponse, None, None]:
    """Generate an answer piece by piece; in exact arithmetic its tokens are those of generate.stream() by that seed.

    The model has its head (mtp.add_head). UserError where mlx-vlm has no model of the same parameters, and
    NotFiniteError for the probability of the first token.
    """
    with without_kernels(), patched(), undisturbed(loaded.model):
        responses = finite(_responses(loaded, prompt, max_tokens, sampling), prompt)
        yield from with_first_space(responses, loaded.tokenizer)


def draft_speeds(loaded: Loaded, prompts: Sequence[Sequence[int]], max_tokens: int) -> str:
    """Answer prompts with drafts and without; return the tokens accepted a step and both speeds, as a sentence."""
    plain: list[Any] = []
    drafted: list[Any] = []
    # The first answer is given twice: it makes the kernels that the others find.
    for prompt in [prompts[0], *prompts]:
        for answer, lasts in ((stream, plain), (stream_drafted, drafted)):
            *_, last = answer(loaded, prompt, max_tokens, Sampling())
            lasts.append(last)
    del plain[0], drafted[0]
    accepted = sum(last.accepted for last in drafted) / max(1, sum(last.steps for last in drafted))
    return (
        f"Drafts in answers to {len(prompts)} prompts of the test set: {accepted:.2f} tokens accepted a step, "
        f"{_speed(drafted):,.1f} tokens/s; without drafts {_speed(plain):,.1f} tokens/s."
    )


def _speed(lasts: Sequence[Any]) -> float:
    """Return the tokens a second of answers with these last responses."""
    tokens = [last.generation_tokens for last in lasts]
    return sum(tokens) / sum(last.generation_tokens / last.generation_tps for last in lasts)


def _responses(
    loaded: Loaded, prompt: Sequence[int], max_tokens: int, sampling: Sampling
) -> Generator[DraftedResponse, None, None]:
    head: Any = loaded.model[MTP]
    ends, detokenizer = loaded.tokenizer.eos_token_ids, loaded.tokenizer.detokenizer
    start = time.perf_counter()
    speed = 0.0
    for count, (token, logprobs) in enumerate(_tokens(loaded.model, head, prompt, max_tokens, sampling), start=1):
        if count == 1:
            speed = len(prompt) / (time.perf_counter() - start)
            start = time.perf_counter()
        ended = "length" if count == max_tokens else None
        if token in ends:
            ended = "stop"
        else:
            detokenizer.add_token(token)
        if ended is not None:
            detokenizer.finalize()
        yield DraftedResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,  # type: ignore[arg-type]
            from_draft=False,
            prompt_tokens=len(prompt),
            prompt_tps=speed,
            generation_tokens=count,
            generation_tps=count / (time.perf_counter() - start),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=ended,
            drafted=sum(head.draft_lens),
            accepted=sum(head.accept_lens),
            steps=len(head.accept_lens),
        )
        if ended is not None:
            return


def _tokens(
    model: nn.Module, head: nn.Module, prompt: Sequence[int], max_tokens: int, sampling: Sampling
) -> Generator[tuple[int, mx.array | None], None, None]:
    """Yield the tokens of an answer; the first with its log-probabilities [V]."""
    from mlx_vlm.speculative.utils import run_speculative_rounds

    target = _target(model, head)
    rows = mx.array([list(prompt)])
    cache = target.make_cache()
    text = {"position_ids": mx.arange(len(prompt))[None], "rope_deltas": mx.zeros((1, 1), mx.int32)}
    wanted = {"return_hidden": True, "return_shared_kv": True, "skip_logits": True}
    output = target(rows, cache=cache, **text, **wanted)
    logits = target.speculative_logits_from_hidden(output.hidden_states[-1][:, -1:])[:, 0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    sampler = sampling.sampler()

    def choose(logits: mx.array) -> mx.array:
        return logits.argmax(axis=-1) if sampler is None else sampler(logits)

    yield from run_speculative_rounds(
        target,
        head,
        cache,
        rows,
        choose(logprobs),
        logprobs[0],
        output,
        draft_kind="mtp",
        max_tokens=max_tokens,
        sampler=choose,
        sampler_is_greedy=sampler is None,
    )


def _target(model: nn.Module, head: Any) -> Any:
    """Build mlx-vlm's language model, whose caches can take tokens back, of the modules of `model` themselves."""
    text = head.config.text_config
    # The module of its config stands beside the module of the model.
    package = type(text).__module__.rpartition(".")[0]
    with drawing_from(mx.random.key(0)):
        target = importlib.import_module(f"{package}.language").LanguageModel(text)
    ours: Any = model.get("language_model", model)
    modules = dict(ours.named_modules())
    single = [path for path, module in target.named_modules() if path in modules and not module.children()]
    parts = _joint_parts(modules)
    target.update_modules(tree_unflatten([*((path, modules[path]) for path in single), *parts.items()]))
    elsewhere = (f"{MTP}.", *(f"{path.rpartition('.')[0]}.{name}." for path in parts for name in _JOINT))
    parameters = {name: array for name, array in arrays_of(ours.parameters()).items() if not name.startswith(elsewhere)}
    if arrays_of(target.parameters()).keys() != parameters.keys():
        raise UserError(
            f"--draft: {package} has other parameters than {type(ours).__module__}, so it cannot "
            "check drafts; leave --draft out."
        )
    target.load_weights(list(parameters.items()))
    target.eval()
    return target


# Qwen3-Next's layers project all of a key head's parts together, where Qwen3.5's have a module for each part.
_JOINT = ("in_proj_qkvz", "in_proj_ba")


class _Joint:
    """A projection that is computed once for the parts that read the same array one after another."""

    def __init__(self, projection: Callable[[mx.array], mx.array]):
        self._projection = projection
        self._last: list[mx.array] = []

    def __call__(self, x: mx.array) -> mx.array:
        if not self._last or self._last[0] is not x:
            self._last = [x, self._projection(x)]
        return self._last[1]


class _Part(nn.Module):
    """Some columns of the output of a joint projection, which is no child of this module."""

    def __init__(self, joint: _Joint, columns: Sequence[np.ndarray]):
        super().__init__()
        self._joint = joint
        self._columns = mx.array(np.concatenate([part.reshape(-1) for part in columns]))

    def __call__(self, x: mx.array) -> mx.array:
        return self._joint(x)[..., self._columns]


def _joint_parts(modules: Mapping[str, Any]) -> dict[str, _Part]:
    """Return the projections of Qwen3.5's gated-delta layers, by path, that Qwen3-Next's joint ones stand for."""
    parts: dict[str, _Part] = {}
    for path, layer in modules.items():
        if not all(f"{path}.{name}" in modules for name in _JOINT):
            continue
        heads, keys = layer.num_k_heads, layer.head_k_dim
        group = layer.num_v_heads // heads
        values = group * layer.head_v_dim
        qkvz = np.split(np.arange(heads * 2 * (keys + values)).reshape(heads, -1), np.cumsum([keys, keys, values]), 1)
        b, a = np.split(np.arange(heads * 2 * group).reshape(heads, -1), 2, 1)
        of_qkvz, of_ba = (_Joint(modules[f"{path}.{name}"]) for name in _JOINT)
        parts[f"{path}.in_proj_qkv"] = _Part(of_qkvz, qkvz[:3])
        parts[f"{path}.in_proj_z"] = _Part(of_qkvz, qkvz[3:])
        parts[f"{path}.in_proj_b"] = _Part(of_ba, [b])
        parts[f"{path}.in_proj_a"] = _Part(of_ba, [a])
    return parts
