"""Training that goes on in PEFT from an export, or here from an import, has the losses and adapters of the other side.

Every family live, under `make oracle`; two of them against recordings, always.
"""

import functools

import numpy as np
import pytest
from parity import continued

from deltatune.export.peft_import import import_peft
from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import ADAPTER_TOLERANCE, CASES, LOSS_TOLERANCE, ROUTE_LIMIT, STEPS, ParityRun

# PEFT refuses adapters of the output projections of Mamba's mixers, and wants a generation that torch's model of
# bailing_moe_linear has not.
LEFT_OUT = ("nemotron_h", "falcon_h1", "mamba2", "bailing_moe_linear")
FAMILIES = [name for name in CASES if "-" not in name and name not in LEFT_OUT]


@pytest.mark.oracle
@pytest.mark.parametrize("name", FAMILIES)
def test_thirty_steps_there_and_thirty_back(name, tmp_path):
    from parity import continued_theirs

    case = CASES[name]
    start, peft = continued_theirs.start(case, tmp_path)
    theirs = peft.train(tmp_path / "saved")
    check(continued.train(case, start, start.adapter), theirs, start.tensors)
    assert np.mean(theirs.losses[-3:]) < np.mean(theirs.losses[:3])
    import_peft(start.checkpoint, tmp_path / "saved", tmp_path / "imported")
    further = peft.train(tmp_path / "further", STEPS)
    check(continued.train(case, start, tmp_path / "imported", STEPS), further, theirs.final)
    assert peft.routes.nearest >= ROUTE_LIMIT


def check(ours: ParityRun, theirs: ParityRun, start: dict) -> None:
    gap = np.abs(np.subtract(ours.losses, theirs.losses)).max()
    error, name = recording.worst(recording.summary(theirs.final, start), ours.final)
    assert gap <= LOSS_TOLERANCE
    assert error <= ADAPTER_TOLERANCE, name


@functools.cache
def recorded(name: str) -> dict:
    return continued.read(name)


@pytest.mark.parametrize("name", continued.REPLAYED)
def test_the_recorded_steps_of_peft(name, tmp_path):
    """The export is the one that PEFT loaded; from there, and from its import, our steps are PEFT's."""
    case, expected = CASES[name], recorded(name)
    weights = case.family.weights({key: tuple(shape) for key, shape in expected["shapes"].items()})
    assert recording.checksums(weights) == expected["checksums"]
    start = continued.export(case, expected["config"], weights, tmp_path)
    assert continued.peft_config(start) == expected["exported config"]
    assert continued.worst(expected["exported"], start.tensors)[0] < 1e-6
    import_peft(start.checkpoint, start.exported, tmp_path / "imported")
    run = continued.train(case, start, tmp_path / "imported", steps=continued.REPLAYED_STEPS)
    assert np.abs(np.subtract(run.losses, expected["losses"])).max() <= LOSS_TOLERANCE
    assert continued.worst(expected["trained"], run.final)[0] <= ADAPTER_TOLERANCE
