"""Training on preferences against recorded runs of TRL: same checkpoint, pairs, optimizer; no torch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from parity import pairs_ours
from parity.pairs import CASES

from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import FALL, STEPS, initial_adapters
from deltatune.train.preferences import objectives

RECORDED = [name for name, case in CASES.items() if case.recorded]


@functools.cache
def recorded(name: str) -> recording.Recording:
    return recording.read(f"pairs/{name}")


def replay(name: str) -> recording.Difference:
    case, reference = CASES[name], recorded(name)
    weights = case.model.family.weights(reference.shapes)
    adapters = initial_adapters(reference.targets)
    return reference.compare(pairs_ours.run(case, reference.config, weights, adapters))


@pytest.mark.parametrize("name", RECORDED)
def test_every_loss_and_the_final_adapters_are_those_of_trl(name):
    losses = recorded(name).losses
    assert len(losses) == STEPS
    assert np.mean(losses[-3:]) <= np.mean(losses[:3]) - FALL * abs(np.mean(losses[:3]))
    found = replay(name)
    assert found.small, found


def no_reference(monkeypatch):
    def zero(_token_losses, steps):
        for one in (one for found in steps for one in found):
            one.reference[:] = 0

    monkeypatch.setattr(pairs_ours, "fill", zero)


def answers_alone_in_the_likelihood(monkeypatch):
    plain = objectives.answers_of

    def swapped(*arguments):
        found = plain(*arguments)
        return found._replace(chosen_nll_with_prompt=found.chosen_nll)

    monkeypatch.setattr("deltatune.train.preferences.loss.answers_of", swapped)


FAULTS = {
    "no reference": (no_reference, "dpo"),
    "the likelihood of answers alone": (answers_alone_in_the_likelihood, "orpo"),
}


@pytest.mark.any_blas
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault, monkeypatch):
    plant, name = FAULTS[fault]
    plant(monkeypatch)
    found = replay(name)
    assert not found.small, found
