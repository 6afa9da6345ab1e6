"""deltatune against the recorded runs of transformers + PEFT: same checkpoint, batches, optimizer; no torch."""

import json

import pytest
from parity import faults
from parity.faults import falls, recorded

from deltatune.selftest.parity import ours, recording
from deltatune.selftest.parity.cases import CASES, ParityRun


def replay(name: str, plant=lambda: None) -> ParityRun:
    return faults.replay(ours, CASES[name], name, plant)


def test_every_case_is_recorded_and_small():
    files = [file for file in recording.FOLDER.iterdir() if file.is_file()]
    assert {file.name for file in files} == {f"{name}.json" for name in CASES}
    assert sum(file.stat().st_size for file in files) < 300_000


@pytest.mark.parametrize("name", CASES)
def test_recorded_loss_falls(name):
    assert falls(recorded(name).losses)


# In 4 bits and by DoRA these families have all of their layers too.
WEEKLY = ("kimi_linear", "olmo_hybrid")
assert {"kimi_linear-4bit", "olmo_hybrid-dora"} <= CASES.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.weekly] * (name in WEEKLY)) for name in CASES])
def test_every_loss_and_the_final_adapters_are_those_of_transformers(name):
    found = recorded(name).compare(replay(name))
    assert found.small, found


@pytest.mark.any_blas
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_planted_fault_shows(fault):
    plant, name = faults.FAULTS[fault]
    assert faults.shows(ours, recorded(name), lambda patch: replay(name, lambda: plant(patch)))


@pytest.mark.any_blas
def test_without_a_fault_none_shows():
    assert not faults.shows(ours, recorded("qwen3"), lambda _: replay("qwen3"))


def test_another_checkpoint_is_refused(tmp_path, monkeypatch):
    content = json.loads(recording.path_of("qwen3").read_text())
    content["checksums"]["checkpoint"] = "0" * 64
    monkeypatch.setattr(recording, "FOLDER", tmp_path)
    recording.write("qwen3", content)
    with pytest.raises(ValueError, match="another checkpoint"):
        recording.read("qwen3").weights(CASES["qwen3"])
