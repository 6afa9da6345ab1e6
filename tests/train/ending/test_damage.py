"""Tests that a damaged state or adapter is recognised, and that the run continues from the state before it."""

import random
import re
import shutil

import mlx.core as mx
import pytest

from deltatune.errors import UserError
from deltatune.lora.adapter_files import read_weights
from deltatune.lora.tensor_files import write_tensors
from deltatune.machine import checksum
from deltatune.train.saved import state
from killed_runs import same

FLIPS = 200


@pytest.fixture
def finished(straight_run, tmp_path):
    """The folder of a run of 5 iterations, which saved after the iterations 3 and 5."""
    return shutil.copytree(straight_run(iters=5), tmp_path / "out")


def flip(path, place):
    """Flip the bit number `place` of a file."""
    content = bytearray(path.read_bytes())
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def recognised(path):
    """Return whether the reader of such a file refuses it, with a message that names it."""
    if path.parent.name == "state":
        return str(path) in (state.damage(path) or "")
    try:
        read_weights(path)
    except UserError as error:
        return str(path) in str(error)
    return False


@pytest.mark.bad_input("a state or adapter with one flipped bit, at 200 random places, or cut in half")
def test_a_flipped_bit_and_a_cut_are_recognised(finished):
    files = [*(finished / "state").glob("*.safetensors"), *finished.glob("*.safetensors")]
    assert len(files) == 5
    assert not any(recognised(path) for path in files)
    draw = random.Random()
    missed = []
    for number in range(FLIPS):
        path = files[number % len(files)]
        place = draw.randrange(8 * path.stat().st_size)
        flip(path, place)
        if not recognised(path):
            missed.append((path.name, place))
        flip(path, place)
    assert missed == []
    assert not any(recognised(path) for path in files)
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert all(recognised(path) for path in files)


@pytest.mark.parametrize("kind", ["state", "adapters"])
def test_damage_of_the_checksum_itself_does_not_read_as_a_file_without_one(tmp_path, kind):
    path = tmp_path / kind / f"{kind}.safetensors"
    if kind == "state":
        state.save(path, {}, state.Progress(), {})
    else:
        path.parent.mkdir()
        write_tensors(path, {"a": mx.zeros(3)}, {checksum.KEY: checksum.BLANK})
    start = path.read_bytes().index(b'"checksum":"xxh3-128:')
    end = start + len('"checksum":"xxh3-128:"') + 32
    for place in [*range(8 * 8), *range(8 * start, 8 * end)]:
        flip(path, place)
        assert recognised(path), place
        flip(path, place)
    assert not recognised(path)


# For a state that is missing, test_resume.py tests the same.
@pytest.mark.bad_input("--resume with a state that is flipped: the one before it is used")
def test_the_state_before_a_damaged_one_is_used_and_it_is_said(make_trainer, screen_text, finished, straight_run):
    straight = straight_run()
    path = state.state_path(finished)
    flip(path, 8 * path.stat().st_size - 100)
    make_trainer(resume=True).run()
    printed = screen_text.text()
    damaged = rf"{path} is damaged \(.+\): resuming from the state before it, {state.previous_path(path)}\."
    assert re.search(damaged, printed)
    assert "Resuming after iteration 3 of 8." in printed
    same(finished, straight)


def test_a_damaged_state_never_replaces_the_good_one_before_it(make_trainer, finished):
    path = state.state_path(finished)
    good = state.previous_path(path).read_bytes()
    flip(path, 8 * path.stat().st_size - 100)
    # This run saves once, at its end.
    make_trainer(resume=True, iters=4, save_every=100).run()
    assert state.peek(path).iteration == 4
    assert state.damage(path) is None
    assert state.previous_path(path).read_bytes() == good


@pytest.mark.bad_input("--resume with a damaged state, and a damaged one before it")
def test_two_damaged_states_are_refused_by_name(make_trainer, finished):
    path = state.state_path(finished)
    for file in (path, state.previous_path(path)):
        flip(file, 8 * file.stat().st_size - 100)
    with pytest.raises(UserError) as error:
        make_trainer(resume=True).run()
    for text in (f"{path} is damaged", f"{state.previous_path(path)} is damaged", "--resume-adapter-file"):
        assert text in str(error.value)
