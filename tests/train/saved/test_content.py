"""Tests that a resumed run may change paths and memory options, but not the weights that it started from."""

import json
import os
import re
import shutil

import mlx.core as mx
import pytest

from deltatune.errors import UserError
from deltatune.train.saved import state
from killed_runs import adapters


@pytest.fixture
def moved(checkpoint, tmp_path):
    """A copy of the checkpoint in another folder."""
    return shutil.copytree(checkpoint, tmp_path / "moved")


def test_a_finished_run_can_be_made_longer_and_model_and_data_may_move(
    make_trainer, moved, tmp_path, straight_run, read_metrics
):
    straight = straight_run()
    make_trainer(iters=3).run()
    make_trainer(resume=True, model=str(moved), data="elsewhere").run()
    assert adapters(tmp_path / "out") == adapters(straight)
    # The shorter run also evaluated and reported at its end, so that only the last reports can be equal.
    assert read_metrics(tmp_path / "out")[-1] == read_metrics(straight)[-1]


@pytest.mark.bad_input("--resume after one number of the base weights changed ({kind})")
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_one_other_number_in_the_weights_is_refused(make_trainer, moved, kind):
    """Size and time of the file stay as they were."""
    make_trainer(iters=3, fine_tune_type=kind).run()
    weights = moved / "model.safetensors"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    message = rf"another run.*:\n  model: was .*, now {re.escape(str(moved))}, with other numbers in its weights\nGive"
    with pytest.raises(UserError, match=message):
        make_trainer(resume=True, model=str(moved), fine_tune_type=kind).run()


@pytest.mark.bad_input("--resume after config.json changed")
def test_a_model_that_computes_otherwise_is_refused(make_trainer, moved):
    make_trainer(iters=3).run()
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}))
    make_trainer(resume=True, iters=4, model=str(moved)).run()
    config["text_config"]["rms_norm_eps"] = 1e-3
    (moved / "config.json").write_text(json.dumps(config))
    message = rf":\n  model: {re.escape(str(moved))} as before, but with another config.json\nGive the same model"
    with pytest.raises(UserError, match=message):
        make_trainer(resume=True, model=str(moved)).run()


@pytest.mark.bad_input("--resume with other options, which make other tensors train")
def test_other_options_are_not_called_another_model(make_trainer, options):
    make_trainer(iters=1).run()
    with pytest.raises(UserError, match=r"lora_parameters: was .*'rank': 2.*, now .*'rank': 3") as caught:
        make_trainer(resume=True, lora_parameters=options["lora_parameters"] | {"rank": 3}).run()
    with pytest.raises(UserError, match=r"lora_parameters: was .*, now .*'rank_pattern': {'q_proj': 1}"):
        make_trainer(resume=True, lora_parameters=options["lora_parameters"] | {"rank_pattern": {"q_proj": 1}}).run()
    assert "model:" not in str(caught.value)


def test_adapters_to_start_from_may_move_but_not_change(make_trainer, tmp_path):
    make_trainer(adapter_path=str(tmp_path / "first"), iters=4).run()
    names = [tmp_path / "first" / f"000000{number}_adapters.safetensors" for number in (3, 4)]
    copy = shutil.copy(names[0], tmp_path / "copy.safetensors")
    make_trainer(iters=1, resume_adapter_file=str(names[0])).run()
    make_trainer(iters=2, resume_adapter_file=str(copy), resume=True).run()
    with pytest.raises(UserError, match="resume_adapter_file: other weights than those"):
        make_trainer(iters=3, resume_adapter_file=str(names[1]), resume=True).run()


def test_checkpointing_may_be_added_after_memory_ran_out(make_trainer, tmp_path, read_metrics, run_with, straight_run):
    straight = straight_run()
    trainer = make_trainer(save_every=100)

    def out_of_memory(iterations, _):
        if iterations.progress.iteration == 4:
            raise RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")

    with pytest.raises(RuntimeError, match="Resource limit"):
        run_with(trainer, out_of_memory)
    make_trainer(resume=True, grad_checkpoint=True).run()
    for ours, theirs in zip(read_metrics(tmp_path / "out"), read_metrics(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.bad_input("--resume of a state in format {number}")
@pytest.mark.parametrize("number", [1, 4])
def test_a_state_of_another_format_is_refused(make_trainer, tmp_path, number):
    """Formats before 3 had no checksum."""
    make_trainer(iters=3).run()
    path = state.state_path(tmp_path / "out")
    arrays, metadata = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    content = json.loads(metadata["deltatune"]) | {"format": number}
    mx.save_safetensors(str(path), arrays, {"deltatune": json.dumps(content)})
    with pytest.raises(UserError, match=rf"state format {number}, and this deltatune reads format 3: continue the run"):
        make_trainer(resume=True).run()
