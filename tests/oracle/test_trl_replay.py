"""Preferences, distillation and heads against recorded runs of TRL and torch: same start, batches, optimizer."""

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from parity import ahead, distilled, pairs, pairs_ours
from parity.faults import falls, recorded

from deltatune.data.example import Example
from deltatune.models.adapted_base import two_ahead
from deltatune.ops import divergence
from deltatune.options.conditions import changed_options
from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import GRADIENT_TOLERANCE, LOSS_TOLERANCE, initial_adapters
from deltatune.train import mtp_loss
from deltatune.train.preferences import objectives

CASES = {f"pairs/{name}": (case, pairs_ours.run) for name, case in pairs.CASES.items() if case.recorded}
CASES |= {f"distilled/{name}": (case, distilled.run) for name, case in distilled.CASES.items()}
CASES |= {f"ahead/{name}": (case, ahead.run) for name, case in ahead.CASES.items()}
# The model that learns has sampled the answers.
SAMPLED = "distilled/generalised"
CASES[f"{SAMPLED} sampled"] = (CASES[SAMPLED][0], partial(distilled.run, sampled=True))


def start(name: str) -> tuple[recording.Recording, Any, tuple[Any, ...]]:
    """The recording of a case, the function that runs it, and its arguments."""
    (case, run), reference = CASES[name], recorded(name.removesuffix(" sampled"))
    weights = case.model.family.weights(reference.shapes)
    checksums = {"pairs": pairs.checksums, "ahead": recording.checksums}.get(name.split("/")[0])
    drawn = distilled.checksums(case, weights) if checksums is None else checksums(weights)
    assert drawn == reference.checksums
    return reference, run, (case, reference.config, weights, initial_adapters(reference.targets))


def replay(name: str) -> recording.Difference:
    reference, run, arguments = start(name)
    return reference.compare(run(*arguments))


# Of other families than Qwen3.5.
HEADS = ("ahead/qwen3_next", "ahead/nemotron_h", "ahead/glm_moe_dsa")
# Kin of cases that are replayed at each commit: of dpo and orpo, of the other divergences, of the first step of heads.
WEEKLY = ("pairs/simpo", "pairs/cpo", "distilled/reverse", SAMPLED, *HEADS)
assert set(WEEKLY) <= CASES.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.weekly] * (name in WEEKLY)) for name in CASES])
def test_every_loss_and_the_final_adapters_are_those_of_the_reference(name):
    assert falls(recorded(name.removesuffix(" sampled")).losses)
    found = replay(name)
    assert found.small, found


@pytest.mark.parametrize("name", HEADS)
def test_the_first_loss_and_gradients_of_other_heads(name):
    reference, run, arguments = start(name)
    found = run(*arguments, steps=1)
    assert abs(found.losses[0] - reference.losses[0]) <= LOSS_TOLERANCE
    error, where = recording.worst(reference.gradients, found.gradients)
    assert error <= GRADIENT_TOLERANCE, where


def test_every_option_of_heads_is_in_a_case():
    tried = {name for case in ahead.CASES.values() for name in changed_options(case.config)}
    assert {"mtp", "mtp_weight", "mtp_trunk_gradient"} <= tried


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

    monkeypatch.setattr("deltatune.train.preferences.objectives.answers_of", swapped)


def sides_exchanged(monkeypatch):
    plain = divergence.divergence
    monkeypatch.setattr(divergence, "divergence", lambda logits, known, *more: plain(mx.array(known), logits, *more))


def prompts_that_count(monkeypatch):
    plain = Example.answered

    def counted(prompt, answer):
        document = plain(prompt, answer)
        return Example(document.tokens, np.arange(len(document.tokens)) > 0, document.source)

    monkeypatch.setattr(Example, "answered", counted)


def gradient_in_the_trunk(monkeypatch):
    case, run = CASES["ahead/beside"]
    monkeypatch.setitem(CASES, "ahead/beside", (replace(case, trunk_gradient=True), run))


def tokens_before(monkeypatch):
    def late(model):
        run = two_ahead(model)
        return lambda hidden, following: run(hidden, mx.roll(following, 1, axis=1))

    monkeypatch.setattr(mtp_loss, "two_ahead", late)


FAULTS = {
    "a gradient of the head in the trunk": (gradient_in_the_trunk, "ahead/beside"),
    "the token of the position in place of the next": (tokens_before, "ahead/only"),
    "prompts that count": (prompts_that_count, f"{SAMPLED} sampled"),
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
