"""Distillation against recorded runs of TRL: same checkpoints, batches, optimizer; no torch."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest
from parity import distilled
from parity.distilled import CASES

from deltatune.ops import divergence
from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import FALL, STEPS, initial_adapters


@functools.cache
def recorded(name: str) -> recording.Recording:
    return recording.read(f"distilled/{name}")


def replay(name: str) -> recording.Difference:
    case, reference = CASES[name], recorded(name)
    weights = case.model.family.weights(reference.shapes)
    assert distilled.checksums(case, weights) == reference.checksums
    adapters = initial_adapters(reference.targets)
    return reference.compare(distilled.run(case, reference.config, weights, adapters))


@pytest.mark.parametrize("name", CASES)
def test_every_loss_and_the_final_adapters_are_those_of_trl(name):
    losses = recorded(name).losses
    assert len(losses) == STEPS
    assert np.mean(losses[-3:]) <= (1 - FALL) * np.mean(losses[:3])
    found = replay(name)
    assert found.small, found


@pytest.mark.any_blas
def test_a_planted_fault_shows(monkeypatch):
    """The divergence with its sides exchanged."""
    plain = divergence.divergence
    monkeypatch.setattr(divergence, "divergence", lambda logits, known, *more: plain(mx.array(known), logits, *more))
    assert not replay("forward").small
