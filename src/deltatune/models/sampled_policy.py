"""The distribution from which answers are sampled in reinforcement learning, which their loss scores, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..ops.decoding.sampled_token import sampled_token, sampled_token_naive, serves, twice
from ..options.config import TrainConfig
from .vision.split import has_vision, vision_spec

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

    @property
    def _restricts(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or bool(self.excluded)

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
            if self._restricts:
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
