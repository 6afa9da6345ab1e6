"""Training on preferences, and distillation, against recorded runs of TRL: same start, batches, optimizer; no torch."""

from __future__ import annotations

import mlx.core as mx
import pytest
from parity import distilled, pairs, pairs_ours
from parity.faults import falls, recorded

from deltatune.ops import divergence
from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import initial_adapters
from deltatune.train.preferences import objectives

CASES = {f"pairs/{name}": (case, pairs_ours.run) for name, case in pairs.CASES.items() if case.recorded}
CASES |= {f"distilled/{name}": (case, distilled.run) for name, case in distilled.CASES.items()}


def replay(name: str) -> recording.Difference:
    (case, run), reference = CASES[name], recorded(name)
    weights = case.model.family.weights(reference.shapes)
    drawn = pairs.checksums(weights) if name.startswith("pairs") else distilled.checksums(case, weights)
    assert drawn == reference.checksums
    return reference.compare(run(case, reference.config, weights, initial_adapters(reference.targets)))


@pytest.mark.parametrize("name", CASES)
def test_every_loss_and_the_final_adapters_are_those_of_trl(name):
    assert falls(recorded(name).losses)
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


def sides_exchanged(monkeypatch):
    plain = divergence.divergence
    monkeypatch.setattr(divergence, "divergence", lambda logits, known, *more: plain(mx.array(known), logits, *more))


FAULTS = {
    "no reference": (no_reference, "pairs/dpo"),
    "the likelihood of answers alone": (answers_alone_in_the_likelihood, "pairs/orpo"),
    "the sides of the divergence exchanged": (sides_exchanged, "distilled/forward"),
}


@pytest.mark.any_blas
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault, monkeypatch):
    plant, name = FAULTS[fault]
    plant(monkeypatch)
    found = replay(name)
    assert not found.small, found
