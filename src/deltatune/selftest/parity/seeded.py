"""Draws weights, adapters and batches from names, so that every machine has the same numbers without storing them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

SEED = 20261121
VOCAB = 320
# How many tokens of the vocabulary occur: so few that 30 steps are enough to learn that the others never do.
ALPHABET = 20


def generator(name: str) -> np.random.Generator:
    """The random generator of `name`; different names have independent generators."""
    digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def spread(name: str, shape: tuple[int, ...], deviation: float, mean: float = 0.0) -> np.ndarray:
    """Uniform fp32 values with this mean and standard deviation.

    No transcendental function is involved, so that the bits are the same on every machine.
    """
    values = generator(name).random(shape) - 0.5
    return (values * (12**0.5 * deviation) + mean).astype(np.float32)


def between(name: str, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """Uniform fp32 values from `low` to `high`."""
    return (generator(name).random(shape) * (high - low) + low).astype(np.float32)


def weight(
    stream: str, name: str, shape: tuple[int, ...], embedding_deviation: float, centred_norms: bool
) -> np.ndarray:
    """A tensor of a Hugging Face save, scaled so that activations, gates and routing do not saturate in training."""
    key = f"{stream} {name}"
    if name.endswith("A_log"):
        return between(key, shape, -1.0, 1.5)
    if name.endswith("dt_bias"):
        return between(key, shape, -3.0, 0.5)
    if name.endswith(("expert_bias", "e_score_correction_bias")):
        return spread(key, shape, 0.3)
    if "embed" in name:
        return spread(key, shape, embedding_deviation)
    if "conv1d" in name:
        # Large weights make q and k nearly positive after SiLU; the norm of y is ill conditioned where q.k is zero.
        return spread(key, shape, 2.0)
    if len(shape) == 1:
        plain = not centred_norms or name.endswith("linear_attn.norm.weight")
        return spread(key, shape, 0.1, 1.0 if plain else 0.0)
    return spread(key, shape, shape[-1] ** -0.5)


def lora(module: str, rows_in: int, rows_out: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(a [in, rank], b [rank, out]) in mlx-lm's layout; b is not zero, so that a has a gradient from the first step."""
    return (
        spread(f"{module}.lora_a", (rows_in, rank), rows_in**-0.5),
        spread(f"{module}.lora_b", (rank, rows_out), 0.2 * rank**-0.5),
    )


@dataclass(frozen=True)
class Rows:
    """A batch of tokens [B, T + 1] int32, of which `counts` [B, T] fp32 has 1 where the loss counts the prediction."""

    tokens: np.ndarray
    counts: np.ndarray
    lengths: tuple[int, ...]


# (T, valid tokens of each row): odd lengths, longer and shorter than a chunk of 64, some of them right-padded.
SHAPES = ((77, (78, 61, 30)), (130, (131, 97)), (33, (34, 34, 12, 25)))
PAD = 0


def batch(step: int) -> Rows:
    """The batch of a step: a noisy cycle over ALPHABET tokens; the first tokens of each row are a prompt."""
    length, valid = SHAPES[step % len(SHAPES)]
    draw = generator(f"batch {step}")
    tokens = np.full((len(valid), length + 1), PAD, np.int32)
    counts = np.zeros((len(valid), length), np.float32)
    for row, size in enumerate(valid):
        current = int(draw.random() * ALPHABET)
        prompt = 1 + int(draw.random() * 5)
        for position in range(size):
            tokens[row, position] = 7 + 3 * current
            jump = draw.random() < 0.2
            current = int(draw.random() * ALPHABET) if jump else (3 * current + 1) % ALPHABET
        counts[row, prompt - 1 : size - 1] = 1.0
    return Rows(tokens, counts, valid)


def checksum(tensors: Mapping[str, np.ndarray]) -> str:
    """A hash of the tensors' names, shapes and bits."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name])
        total.update(f"{name}:{value.dtype}:{value.shape};".encode())
        total.update(value.tobytes())
    return total.hexdigest()


def signs(name: str, count: int, size: int) -> np.ndarray:
    """[count, size] of +1 and -1; the mean square of projections on them estimates a tensor's squared norm."""
    return np.where(generator(f"signs {name}").random((count, size)) < 0.5, -1.0, 1.0)
