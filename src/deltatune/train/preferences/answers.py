"""The inputs of a preference loss from a batch, and its results."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

# The arrays of data.preferences.PreferenceBatch that a step reads, by name.
PreferenceArrays = dict[str, mx.array]


class Answers(NamedTuple):
    """The answers of P preferences, some of which may be blank.

    Attributes:
        policy: [P, 2], the log-probabilities of both answers under the model.
        reference: [P, 2], the same under the reference model.
        tokens: [P, 2], how many tokens each answer has; 1 for a blank one.
        chosen_nll: The mean over the tokens of all chosen answers of -log p, a scalar.
        chosen_nll_with_prompt: The same mean over the tokens of prompts and chosen answers.
        desirable: [P], 1 where the first answer is good, else 0.
        present: [P], 1 for a preference and 0 for a blank one.
        number: The number of preferences, a scalar.
    """

    policy: mx.array
    reference: mx.array
    tokens: mx.array
    chosen_nll: mx.array
    chosen_nll_with_prompt: mx.array
    desirable: mx.array
    present: mx.array
    number: mx.array


class Scored(NamedTuple):
    """The results of a preference loss.

    Attributes:
        losses: [P], the loss of each preference.
        rewards: [P, 2], the implicit rewards of good and bad answers.
        log_probabilities: [P, 2], the log-probabilities of the same answers.
        counted: [P, 2], 1 where that reward belongs to a good answer (first column) or a bad one (second).
        more: Further scalars to report, in the order of the names in Objective.more.
    """

    losses: mx.array
    rewards: mx.array
    log_probabilities: mx.array
    counted: mx.array
    more: tuple[mx.array, ...] = ()


def scored_pairs(answers: Answers, losses: mx.array, rewards: mx.array, more: tuple[mx.array, ...] = ()) -> Scored:
    """Return the results of a loss of pairs, where both answers of every pair count."""
    return Scored(losses, rewards, answers.policy, mx.ones(rewards.shape), more)


def answers_of(losses: mx.array, weights: mx.array, preferences: PreferenceArrays) -> Answers:
    """Sum the tokens' cross-entropies of a batch by answer.

    Args:
        losses: [B, T], fp32.
        weights: [B, T], 1 where a target belongs to an answer.
        preferences: The arrays of the batch's PreferenceBatch.
    """
    present, documents = preferences["present"], preferences["documents"]
    tokens, lengths = preferences["tokens"], preferences["lengths"]
    policy = _by_document(-losses * weights, documents, present)
    whole = _by_document(losses, documents, present)
    chosen_tokens, chosen_length = ((numbers[:, 0] * present).sum() for numbers in (tokens, lengths))
    return Answers(
        policy,
        preferences["reference"],
        tokens,
        -(policy[:, 0] * present).sum() / mx.maximum(chosen_tokens, 1.0),
        (whole[:, 0] * present).sum() / mx.maximum(chosen_length, 1.0),
        preferences["desirable"],
        present,
        present.sum(),
    )


def _by_document(values: mx.array, documents: mx.array, present: mx.array) -> mx.array:
    """Sum values [B, T] over the positions of each document; [P, 2]."""
    per_row = 2 * present.size // documents.shape[0]
    here = documents[:, None] == mx.arange(per_row)[None, :, None]
    return mx.where(here, values[:, None], 0.0).sum(axis=-1).reshape(-1, 2)


def smoothed(margins: mx.array, smoothing: float) -> mx.array:
    """Return -(1 - e) log sigmoid(m) - e log sigmoid(-m), the loss where a share e of the pairs is labelled wrongly."""
    loss = -nn.log_sigmoid(margins)
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * nn.log_sigmoid(-margins)
