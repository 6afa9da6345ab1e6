"""A token of each row sampled from its logits, with its log-probability and the entropy, in one pass over the logits.

MLX's operations would pass some twenty-five times over numbers of the vocabulary's size, in fp32. The kernel draws the
random numbers that `mx.random.gumbel` draws, so that both sample the same tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ..kernels.launch import Device, Kernel, Plan
from ..operator.case import Case, by_kernels
from ..operator.kernel_operator import KernelOperator
from ..operator.measure import as_float64

# The blocks that share a row, up to 32, and the groups of 32 lanes in each.
PARTS = 8
GROUPS = 8
SHARES = Kernel(
    name="sampled_shares",
    files=("passes/exponentials.h", "decoding/sampled_token.h"),
    values=("GROUPS", "PARTS"),
    sizes=("logits_shape[0]", "logits_shape[1]"),
    arrays=("logits", "key", "temperature", "shares"),
    memory="SampledTokenMemory",
    memory_values=("GROUPS",),
)
JOINED = replace(
    SHARES,
    name="sampled_token",
    values=("GROUPS",),
    sizes=("shares_shape[0]", "shares_shape[1]"),
    arrays=("shares", "key", "tokens", "figures", "next"),
)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# The largest error that a trial allows over the largest element: sums of some hundred numbers a lane, in fp32.
BOUND = 2.0**-16


def sampled_token(logits: mx.array, key: mx.array, temperature: float) -> list[mx.array]:
    """Sample a token of each row from softmax(logits / temperature), computed in fp32; logits are [B, V] floats.

    `key` [2] uint32 is the random key, `twice`, on which this token and those after it depend. Returned are the tokens
    [B] int32; the tokens again, their log-probabilities, and the entropies of the rows in nats, [3, B] fp32, which are
    to be read; and the key of the next token, as `key`. A row with a NaN or without a finite logit has an entropy that
    is not finite.
    """
    of_shares, of_rows = _plans(logits.shape, logits.dtype, temperature)
    (shares,) = SHARES({"logits": logits, "key": key}, of_shares)
    return JOINED({"shares": shares, "key": key}, of_rows)


def twice(key: mx.array) -> mx.array:
    """Return a key two times, since MLX keeps arrays of up to 8 bytes in the host's memory, far from an NVIDIA GPU."""
    return mx.concatenate([key, key])


def sampled_token_naive(logits: mx.array, key: mx.array, temperature: float) -> list[mx.array]:
    """Compute the same by MLX's operations."""
    following, here = mx.random.split(key[:2])
    scaled = logits.astype(mx.float32) / temperature
    normalised = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    # mx.random.categorical samples a single row in another way.
    tokens = (scaled + mx.random.gumbel(scaled.shape, key=here)).argmax(axis=-1).astype(mx.int32)
    log_probabilities = mx.take_along_axis(normalised, tokens[:, None], axis=-1)[:, 0]
    # A logit of -infinity adds nothing.
    spread = mx.where(normalised == -mx.inf, 0.0, mx.exp(normalised) * normalised)
    return [tokens, mx.stack([tokens, log_probabilities, -spread.sum(axis=-1)]), twice(following)]


def serves(logits: mx.array) -> bool:
    """Whether the kernel is to be used: it covers the logits, is faster, and was found right on this machine."""
    return logits.dtype in DTYPES and logits.size < 2**31 and logits.shape[1] < 2**24 and OPERATOR.serves(logits.dtype)


@lru_cache(maxsize=256)
def _plans(shape: tuple[int, int], _dtype: mx.Dtype, temperature: float) -> tuple[Plan, Plan]:
    """Return the plans of the two kernels; a plan is for logits of one dtype."""
    rows = shape[:1]
    of_shares = Plan(
        outputs={"shares": ((*rows, PARTS, 6), mx.float32)},
        values={"GROUPS": GROUPS, "PARTS": PARTS},
        blocks=(PARTS, *rows, 1),
        groups=GROUPS,
        written={"temperature": f"{float(temperature)!r}f"},
    )
    of_rows = Plan(
        outputs={"tokens": (rows, mx.int32), "figures": ((3, *rows), mx.float32), "next": ((4,), mx.uint32)},
        values={"GROUPS": 1},
        blocks=(*rows, 1, 1),
        groups=1,
    )
    return of_shares, of_rows


def trial_case(dtype: mx.Dtype, shapes: tuple[tuple[int, int], ...] = ((9, 3001), (4, 1000))) -> Case[Device]:
    """Return the case of an odd number of logits, and of an even one; some are -infinity.

    The tokens are those of MLX's operations. Its sums are less exact, so that the other numbers are those of float64.
    """
    key = twice(mx.random.key(5))
    temperature = 0.7
    drawn = [mx.array(_wide_logits(shape)).astype(dtype) for shape in shapes]
    mx.eval(drawn)

    def call() -> list[mx.array]:
        results = [sampled_token(logits, key, temperature) for logits in drawn]
        # All bits of a key count.
        return [
            result
            for tokens, figures, following in results
            for result in (tokens, figures[0], figures[1:], following.view(mx.uint8))
        ]

    def truth() -> list[np.ndarray]:
        results: list[np.ndarray] = []
        for logits in drawn:
            one, _, following = sampled_token_naive(logits, key, temperature)
            tokens = np.array(one)
            exact = _exact(as_float64(logits) / temperature, tokens)
            results += [tokens, tokens, exact, np.array(following.view(mx.uint8))]
        return results

    results = ("tokens", "tokens to be read", "figures", "next key")
    names = [f"{name} of {logits.shape[1]}" for logits in drawn for name in results]
    return Case(f"a sampled token of each row, {dtype}", names, by_kernels(call), truth, BOUND, like=drawn)


def _wide_logits(shape: tuple[int, int]) -> np.ndarray:
    logits = 4 * np.random.default_rng(0).standard_normal(shape, np.float32)
    logits[:, 3::7] = -np.inf
    return logits


def _exact(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of tokens and the entropies of the rows, [2, B] float64."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    normalised = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    # A logit of -infinity adds nothing.
    spread = np.exp(normalised) * np.nan_to_num(normalised, neginf=0.0)
    return np.stack([normalised[np.arange(len(tokens)), tokens], -spread.sum(axis=-1)])


OPERATOR = KernelOperator("a sampled token", trial_case, devices=("cuda", "metal"))
