"""Answers by mlx-vlm's speculative decoding: the multi-token-prediction head drafts tokens, the model checks them."""

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
from ..patches import patched
from .generate import finite, with_first_space
from .load import Loaded


@dataclass
class DraftedResponse(GenerationResponse):
    """A piece of an answer, as mlx-lm describes it, with the tokens that the head has drafted so far, and how many of
    those the model would have chosen itself.
    """

    drafted: int = 0
    accepted: int = 0


def stream_drafted(loaded: Loaded, prompt: Sequence[int], max_tokens: int) -> Generator[DraftedResponse, None, None]:
    """Generate the likeliest answer piece by piece; its tokens are those of generate.stream() in exact arithmetic.

    The model has its head (mtp.add_head). UserError where mlx-vlm has no model of the same parameters, and
    NotFiniteError for the probability of the first token.
    """
    with without_kernels(), patched(), undisturbed(loaded.model):
        responses = finite(_responses(loaded, prompt, max_tokens), prompt)
        yield from with_first_space(responses, loaded.tokenizer)


def _responses(loaded: Loaded, prompt: Sequence[int], max_tokens: int) -> Generator[DraftedResponse, None, None]:
    head: Any = loaded.model[MTP]
    ends, detokenizer = loaded.tokenizer.eos_token_ids, loaded.tokenizer.detokenizer
    start = time.perf_counter()
    speed = 0.0
    for count, (token, logprobs) in enumerate(_tokens(loaded.model, head, prompt, max_tokens), start=1):
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
        )
        if ended is not None:
            return


def _tokens(
    model: nn.Module, head: nn.Module, prompt: Sequence[int], max_tokens: int
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

    def likeliest(logits: mx.array) -> mx.array:
        return logits.argmax(axis=-1)

    yield from run_speculative_rounds(
        target,
        head,
        cache,
        rows,
        likeliest(logprobs),
        logprobs[0],
        output,
        draft_kind="mtp",
        max_tokens=max_tokens,
        sampler=likeliest,
        sampler_is_greedy=True,
    )


def _target(model: nn.Module, head: Any) -> Any:
    """Build mlx-vlm's language model, whose caches can take tokens back, of the modules of `model` themselves."""
    text = head.config.text_config
    family = "qwen3_5_moe" if getattr(text, "num_experts", 0) else "qwen3_5"
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
