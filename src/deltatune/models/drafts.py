"""Answers by mlx-vlm's speculative decoding: the multi-token-prediction head drafts tokens, the model checks them.

Each token is the model's own choice, likeliest or sampled, and a draft only spares the pass that would compute it. At a
temperature, drafts draw their random numbers from a stream of their own.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
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
    lasts: list[tuple[Any, DraftedResponse]] = []
    # The first answer is given twice: it makes the kernels that the others find.
    for prompt in [prompts[0], *prompts]:
        *_, plain = stream(loaded, prompt, max_tokens, Sampling())
        *_, drafted = stream_drafted(loaded, prompt, max_tokens, Sampling())
        lasts.append((plain, drafted))
    plain, drafted = zip(*lasts[1:], strict=True)
    accepted = sum(last.accepted for last in drafted) / max(1, sum(last.steps for last in drafted))
    return (
        f"Drafts in answers to {len(prompts)} prompts of the test set: {accepted:.2f} tokens accepted a step, "
        f"{_speed(drafted):,.1f} tokens/s; without drafts {_speed(plain):,.1f} tokens/s."
    )


def _speed(lasts: Sequence[GenerationResponse]) -> float:
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

    target, rows = _target(model, head), mx.array([list(prompt)])
    cache = target.make_cache()
    text = {"position_ids": mx.arange(len(prompt))[None], "rope_deltas": mx.zeros((1, 1), mx.int32)}
    wanted = {"return_hidden": True, "return_shared_kv": True, "skip_logits": True}
    output = target(rows, cache=cache, **text, **wanted)
    logits = target.speculative_logits_from_hidden(output.hidden_states[-1][:, -1]).astype(mx.float32)
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
    family = "qwen3_5_moe" if getattr(text, "num_experts", 0) else "qwen3_5"
    with drawing_from(mx.random.key(0)):
        target = importlib.import_module(f"mlx_vlm.models.{family}.language").LanguageModel(text)
    ours: Any = model.get("language_model", model)
    modules = dict(ours.named_modules())
    single = [path for path, module in target.named_modules() if path in modules and not module.children()]
    target.update_modules(tree_unflatten([(path, modules[path]) for path in single]))
    parameters = arrays_of(ours.parameters())
    if arrays_of(target.parameters()).keys() != parameters.keys():
        raise UserError(
            f"--draft: mlx-vlm's model of {family} has other parameters than {type(ours).__module__}, so it cannot "
            "check drafts; leave --draft out."
        )
    target.load_weights(list(parameters.items()))
    target.eval()
    return target
