"""Answers by mlx-vlm's speculative decoding: the multi-token-prediction head drafts tokens, the model checks them.

Each token is the model's own choice, likeliest or sampled, and a draft only spares the pass that would compute it. At a
temperature, drafts draw their random numbers from a stream of their own.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.generate import GenerationResponse

from ..errors import UserError
from ..lora.select import MTP
from ..machine.compiling import without_kernels
from ..ops.functional import arrays_of, undisturbed
from ..ops.random_state import drawing_from
from ..patches import patched
from .generate import Sampling, finite, stream, with_first_space
from .load import Loaded


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
