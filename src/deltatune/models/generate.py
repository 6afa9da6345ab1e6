"""Generates text with mlx-lm, and with mlx-vlm from a prompt with images or videos, or by speculative decoding.

There the multi-token-prediction head drafts tokens, and the model checks them. Each token is the model's own choice,
likeliest or sampled, and a draft only spares the pass that would compute it. At a temperature, drafts draw their random
numbers from a stream of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import GenerationResponse, generation_stream, stream_generate
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ..errors import NotFiniteError, UserError
from ..layers import logits_of
from ..lora.select import MTP
from ..machine.compiling import without_kernels
from ..ops.decoding.sampled_token import sampled_token, sampled_token_naive, serves, twice
from ..ops.functional import arrays_of, undisturbed
from ..ops.random_state import drawing_from
from ..options.config import TrainConfig
from ..patches import patched
from .load import Loaded
from .vision.inputs import Picture
from .vision.split import has_vision, vision_spec

# stream_generate() gives a model so many tokens of a prompt at a time.
PIECE = 2048


@dataclass(frozen=True)
class Sampling:
    """How each next token is chosen: the options of `mlx_lm.generate`.

    At temperature 0 the likeliest token is taken; else one is drawn of the likeliest with the sum `top_p`, of those at
    least `min_p` as likely as the likeliest, and of the `top_k` likeliest, 0 for all.
    """

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0

    def sampler(self) -> Callable[[mx.array], mx.array] | None:
        """Return a function that chooses a token of each row of log-probabilities [B, V]; None for the likeliest."""
        if self.temp == 0:
            return None
        return make_sampler(temp=self.temp, top_p=self.top_p, min_p=self.min_p, top_k=self.top_k)


def stream(loaded: Loaded, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> Generator[Any, None, None]:
    """Yield mlx-lm's responses with the `text` of each piece; the last has speeds, counts and `finish_reason`, too."""
    # Building kernels would take longer than an answer takes without them; on CUDA every process builds them anew.
    with without_kernels(), patched():
        responses = stream_generate(
            loaded.model, loaded.tokenizer, list(prompt), max_tokens=max_tokens, sampler=sampling.sampler()
        )
        yield from with_first_space(finite(responses, prompt), loaded.tokenizer)


def finite(responses: Iterator[Any], prompt: Sequence[int]) -> Iterator[Any]:
    """Yield the responses of mlx-lm or mlx-vlm to a prompt; NotFiniteError for a log-probability that is not finite.

    The first token is looked at before it is handed on, and each later one when the next has come: nothing waits then.
    """
    read = list(prompt)
    healthy: list[mx.array] = []
    for response in responses:
        if response.logprobs is not None:
            healthy.append(mx.isfinite(mx.array(response.logprobs)[..., response.token]).all())
            mx.async_eval(healthy)
        later = len(read) > len(prompt)
        while len(healthy) > later:
            _refuse(healthy.pop(0), read)
        read.append(response.token)
        yield response
    for last in healthy:
        _refuse(last, read)


def _refuse(healthy: mx.array, read: Sequence[int]) -> None:
    if not healthy.item():
        raise NotFiniteError(read)


def with_first_space(responses: Iterator[Any], tokenizer: Any) -> Iterator[Any]:
    """Yield mlx-lm's responses with the space that begins an answer, where its detokenizer alone leaves it out."""
    tokens: list[int] = []
    for response in responses:
        if response.finish_reason != "stop":
            tokens.append(response.token)
        if response.text:
            written = tokenizer.decode(tokens)
            yield replace(response, text=written) if written == f" {response.text}" else response
            break
        yield response
    yield from responses


def on_stream_of_answers() -> mx.StreamContext:
    """Return the context of the stream that answers run on, for which mx.compile traces its functions anew."""
    return mx.stream(generation_stream)


def begun(model: nn.Module, tokens: int, rows: int = 1, piece: int = PIECE, most: int = 1) -> Iterator[list[mx.array]]:
    """Let a model read prompts and write the first and the last token of answers, without computing anything.

    Of a prompt of many pieces it reads the first one and the last two, which hold most, with blank keys and values of
    those between; a model with caches of other kinds than a hybrid one's reads them all. It yields the arrays of each
    evaluation: those of the caches, and behind a prompt's last token the logits, too. Each of `rows` prompts has
    `tokens` tokens, `piece` of which are read at once; an answer has `most` at most.
    """
    cache: Any = make_prompt_cache(model)
    steps = [range(start, min(start + piece, tokens - 1)) for start in range(0, tokens - 1, piece)]
    if all(type(layer_cache).__name__ in _MOVED for layer_cache in cache):
        steps = [step for at, step in enumerate(steps) if at == 0 or at >= len(steps) - 2]
    read = 0
    for step in [*steps, range(tokens - 1, tokens), *[range(tokens + most - 2, tokens + most - 1)] * (most > 1)]:
        if step.start > read:
            _move(cache, step.start)
            yield _held(cache)
        logits = logits_of(model, mx.zeros((rows, len(step)), mx.int32), cache=cache)[:, -1]
        read = step.stop
        yield _held(cache) if read < tokens else [*_held(cache), logits]


# Caches that can be moved behind tokens that nobody read: states have the same size wherever they are.
_MOVED = (KVCache.__name__, ArraysCache.__name__)


def _move(cache: Sequence[Any], tokens: int) -> None:
    """Let caches have room for so many tokens, and hold blank keys and values of them."""
    for layer_cache in cache:
        if type(layer_cache).__name__ == KVCache.__name__:
            for name in ("keys", "values"):
                rows, heads, _, size = getattr(layer_cache, name).shape
                blank = mx.zeros((rows, heads, _roomy(tokens), size), getattr(layer_cache, name).dtype)
                setattr(layer_cache, name, blank)
            layer_cache.offset = tokens


class CacheBytes(NamedTuple):
    """The memory of a model's caches: the bytes of a row of any length, and those that each token adds."""

    fixed: int
    token: int


def cache_bytes(model: nn.Module) -> CacheBytes:
    """Find the memory of caches, without computing anything."""

    def after(tokens: int) -> int:
        return sum(array.nbytes for array in next(begun(model, tokens + 1)))

    # mlx-lm's caches have room for whole steps of tokens.
    one = after(KVCache.step)
    two = after(2 * KVCache.step)
    return CacheBytes(2 * one - two, (two - one) // KVCache.step)


def _roomy(tokens: int) -> int:
    """Return for how many tokens keys and values have room where there are so many."""
    return -(-tokens // KVCache.step) * KVCache.step


def _held(cache: Sequence[Any]) -> list[mx.array]:
    held: Any = tree_flatten([layer_cache.state for layer_cache in cache])
    return [array for _, array in held if isinstance(array, mx.array)]


def stream_with_pictures(
    loaded: Loaded,
    prompt: Sequence[int],
    images: Sequence[Picture],
    videos: Sequence[Picture],
    max_tokens: int,
    sampling: Sampling,
) -> Generator[Any, None, None]:
    """Yield mlx-vlm's responses, each with the `text` of a piece, to a prompt with images or videos cut into patches.

    The prompt has one image or video token for each feature. The patches of deltatune are applied meanwhile; without
    them qwen3_vl_moe would compute other features than in training. Generation stops at the end tokens of
    `loaded.tokenizer`, too, and leaves nothing on the model, where mlx-vlm keeps the positions of the last prompt.
    """
    from mlx_vlm import stream_generate

    inputs = _inputs(prompt, images, videos)
    options: dict[str, Any] = {
        "temperature": sampling.temp,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
    }
    with without_kernels(), patched(), _stopping(loaded), undisturbed(loaded.model):
        responses = stream_generate(loaded.model, loaded.processor, "", max_tokens=max_tokens, **inputs, **options)
        yield from finite(responses, prompt)


def _inputs(prompt: Sequence[int], images: Sequence[Picture], videos: Sequence[Picture]) -> dict[str, Any]:
    """Return a prompt with images or videos as mlx-vlm takes it."""
    inputs: dict[str, Any] = {"input_ids": mx.array([list(prompt)])}
    if images:
        inputs["pixel_values"] = mx.array(np.concatenate([image.patches for image in images]))
        inputs["image_grid_thw"] = mx.array([image.grid for image in images])
    if videos:
        inputs["pixel_values_videos"] = mx.array(np.concatenate([video.patches for video in videos]))
        inputs["video_grid_thw"] = mx.array([video.grid for video in videos])
    return inputs


def embedded(model: Any, prompt: Sequence[int], images: Sequence[Picture], videos: Sequence[Picture]) -> list[mx.array]:
    """Return the lazy embeddings that mlx-vlm makes of a prompt with images or videos.

    They are held while all pieces of the prompt are read. The arguments are those of stream_with_pictures().
    """
    inputs = _inputs(prompt, images, videos)
    rows = inputs.pop("input_ids")
    pixels = inputs.pop("pixel_values", None)
    features = model.get_input_embeddings(rows, pixels, mask=None, **inputs)
    leaves: Any = tree_flatten(features.to_dict())
    return [array for _, array in leaves if isinstance(array, mx.array)]


@contextlib.contextmanager
def _stopping(loaded: Loaded) -> Iterator[None]:
    """Let mlx-vlm stop at the end tokens of mlx-lm's wrapper of the tokenizer, too."""
    criteria = getattr(loaded.processor, "tokenizer", loaded.processor).stopping_criteria
    before = criteria.eos_token_ids
    criteria.eos_token_ids = sorted({*before, *loaded.tokenizer.eos_token_ids})
    try:
        yield
    finally:
        criteria.eos_token_ids = before


# The logit of a token that is never sampled: its probability is 0, and its gradient finite.
EXCLUDED = -1e30


class Chosen(NamedTuple):
    """The tokens [B] int32 that a step of decoding chooses, and figures [1 + F, B] fp32: the tokens, and numbers to be
    kept beside each. A figure that is not finite ends the decoding. Figures alone are read: an NVIDIA GPU waits for
    memory that its host has read.
    """

    tokens: mx.array
    figures: mx.array


@dataclass(frozen=True)
class SampledPolicy:
    """A model's distribution of the next token at a temperature, restricted to its likelier tokens.

    The restrictions follow one another as in transformers and vLLM: top_k tokens (0 for all), the sum top_p of
    probabilities (1 for all), then min_p, the least probability relative to the likeliest, all of the distribution at
    this temperature. `excluded` tokens are never sampled, such as those that stand for the features of an image.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    excluded: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: TrainConfig, model: nn.Module | None = None) -> SampledPolicy:
        """Return the policy that the options of a run describe, with a model that may have a vision tower."""
        excluded: tuple[int, ...] = ()
        if model is not None and has_vision(model):
            spec = vision_spec(model)
            excluded = spec.image_token, spec.video_token
        return cls(config.temperature, config.top_p, config.top_k, config.min_p, excluded)

    @property
    def is_plain(self) -> bool:
        """Whether it is the model's own distribution."""
        return self == SampledPolicy()

    def logits(self, logits: mx.array) -> mx.array:
        """Return the logits [..., V] of the policy in fp32, from those of the model; excluded tokens have EXCLUDED."""
        logits = logits.astype(mx.float32) / self.temperature
        for token in self.excluded:
            logits = mx.where(mx.arange(logits.shape[-1]) == token, EXCLUDED, logits)
        if 0 < self.top_k < logits.shape[-1]:
            least = mx.topk(logits, self.top_k, axis=-1).min(axis=-1, keepdims=True)
            logits = mx.where(logits >= least, logits, EXCLUDED)
        if self.top_p < 1:
            descending = -mx.sort(-logits, axis=-1)
            probabilities = mx.softmax(descending, axis=-1)
            before = mx.cumsum(probabilities, axis=-1) - probabilities
            least = mx.where(before < self.top_p, descending, mx.inf).min(axis=-1, keepdims=True)
            logits = mx.where(logits >= least, logits, EXCLUDED)
        if self.min_p > 0:
            least = logits.max(axis=-1, keepdims=True) + mx.log(mx.array(self.min_p))
            logits = mx.where(logits >= least, logits, EXCLUDED)
        return logits

    def figures(self, logits: mx.array, tokens: mx.array) -> mx.array:
        """Return the log-probabilities of tokens [B] by the model's logits [B, V], and entropies as sampler()'s."""
        whole = replace(self, top_p=1.0, top_k=0, min_p=0.0).logits(logits)
        normalised = whole - mx.logsumexp(whole, axis=-1, keepdims=True)
        spread = mx.where(normalised == -mx.inf, 0.0, mx.exp(normalised) * normalised)
        restricted = self.logits(logits)
        of_tokens = mx.take_along_axis(restricted, tokens[:, None], axis=-1)[:, 0]
        return mx.stack([of_tokens - mx.logsumexp(restricted, axis=-1), -spread.sum(axis=-1)])

    def sampler(self, key: mx.array) -> Callable[[mx.array], Chosen]:
        """Return a function that samples a token of each row of the model's logits [B, V], by a key [2] uint32.

        Its figures beside the token are the token's log-probability, and the entropy of the model's distribution at the
        temperature.
        """
        keys = [twice(key)]

        def choose(logits: mx.array) -> Chosen:
            sample = sampled_token if serves(logits) else sampled_token_naive
            # TRL's entropy averages -log p of the logits without restrictions, too.
            tokens, figures, following = sample(logits, keys[0], self.temperature)
            if self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.excluded:
                restricted = self.logits(logits)
                tokens = mx.random.categorical(restricted, key=mx.random.split(keys[0][:2])[1]).astype(mx.int32)
                of_tokens = mx.take_along_axis(restricted, tokens[:, None], axis=-1)[:, 0]
                figures = mx.stack([tokens, of_tokens - mx.logsumexp(restricted, axis=-1), figures[2]])
            keys[0] = following
            return Chosen(tokens, figures)

        return choose


class PolicyHead(nn.Module):
    """A model's head, hidden states -> logits, with the logits of a policy; its child is the head's module itself."""

    def __init__(self, head: nn.Module | Callable[[mx.array], mx.array], policy: SampledPolicy):
        super().__init__()
        # MLX does not look for children in a tuple.
        self._head = (head,)
        self._policy = policy
        self.owner = head if isinstance(head, nn.Module) else head.__self__  # type: ignore[attr-defined]

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._policy.logits(self._head[0](hidden))


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
    """Generate an answer piece by piece; in exact arithmetic its tokens are those of stream() by that seed.

    The model has its head (adapted_base.add_head). UserError where mlx-vlm has no model of the same parameters, and
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
