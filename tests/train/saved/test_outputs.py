"""The files beside the last weights: the best ones of a run, and its numbered copies."""

import json
import shutil

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from deltatune.errors import UserError
from deltatune.train.evaluation.evaluate import Evaluation


@pytest.fixture
def losses(monkeypatch):
    """losses(3.0, 2.0, ...): the evaluations of a run give these figures in turn."""

    def fix(*figures):
        left = list(figures)
        monkeypatch.setattr(Evaluation, "__call__", lambda *_: left.pop(0))

    return fix


def weights(folder, name="adapters.safetensors"):
    return mx.load(str(folder / name))


def equal(one, other):
    return one.keys() == other.keys() and all(mx.array_equal(value, other[name]) for name, value in one.items())


def copies(folder):
    return sorted(int(file.name[:7]) for file in folder.glob("*_adapters.safetensors"))


# Evaluations come before the first iteration and after every second one of eight.
@pytest.mark.parametrize(
    ("figures", "best"),
    [
        ([5.0, float("nan"), 4.5, float("nan"), 4.5], 4),
        ([1.0, 4.0, 3.0, 2.0, 2.0], 0),
    ],
)
def test_the_weights_with_the_lowest_loss_are_kept(make_trainer, tmp_path, losses, figures, best):
    losses(*figures)
    result = make_trainer(steps_per_eval=2, save_every=1, grad_accumulation_steps=1).run()
    assert result.best_iteration == best
    out = tmp_path / "out"
    if best == 0:
        assert not (out / "best").exists()
        return
    assert equal(weights(out / "best"), weights(out, f"{best:07d}_adapters.safetensors"))
    assert not equal(weights(out / "best"), weights(out))
    about = json.loads((out / "best" / "adapter_config.json").read_text())
    assert (about["iteration"], about["val_loss"]) == (best, min(f for f in figures if f == f))
    assert about["lora_parameters"] == json.loads((out / "adapter_config.json").read_text())["lora_parameters"]


def test_the_best_of_a_full_run_is_a_checkpoint(make_trainer, tmp_path, losses):
    losses(5.0, 2.0, 3.0)
    make_trainer(fine_tune_type="full", grad_accumulation_steps=1).run()
    out = tmp_path / "out"
    best, last = (mlx_lm.utils.load(str(folder))[0].parameters() for folder in (out / "best", out))
    best, last = dict(tree_flatten(best)), dict(tree_flatten(last))
    assert best.keys() == last.keys()
    assert not equal(best, last)


def test_a_resumed_run_keeps_its_best(make_trainer, tmp_path, losses):
    losses(5.0, 2.0, 3.0)
    make_trainer(iters=4, steps_per_eval=2, grad_accumulation_steps=1).run()
    best = weights(tmp_path / "out" / "best")
    losses(2.5, 2.5)
    result = make_trainer(iters=8, steps_per_eval=2, grad_accumulation_steps=1, resume=True).run()
    assert (result.best_iteration, result.best_val_loss) == (2, 2.0)
    assert equal(weights(tmp_path / "out" / "best"), best)


def test_a_kill_after_the_best_gives_the_same_best(make_trainer, tmp_path, monkeypatch):
    """The run dies between the best weights and the next state, and its continuation measures them once more."""
    options = {"steps_per_eval": 2, "save_every": 3, "grad_accumulation_steps": 1}
    make_trainer(**options, adapter_path=str(tmp_path / "straight")).run()
    trainer = make_trainer(**options)
    plain = trainer.outputs.save_best

    def killed(iteration, loss):
        plain(iteration, loss)
        if iteration == 4:
            shutil.copytree(tmp_path / "out", tmp_path / "found")

    trainer.outputs.save_best = killed
    trainer.run()
    shutil.rmtree(tmp_path / "out")
    shutil.copytree(tmp_path / "found", tmp_path / "out")
    make_trainer(**options, resume=True).run()
    for name in ("best", "."):
        assert equal(weights(tmp_path / "out" / name), weights(tmp_path / "straight" / name))


def test_the_run_says_where_the_best_is(run, options, tmp_path, losses):
    for figures, words in (
        ([5.0, 2.0, 3.0], f"best, with validation loss 2.0000 at 1: {tmp_path / 'out' / 'best'}; report:"),
        ([1.0, 2.0, 3.0], "the validation loss was lowest before training, 1.0000; report:"),
    ):
        losses(*figures)
        few = {"iters": 2, "steps_per_eval": 1, "grad_accumulation_steps": 1, "adapter_path": str(tmp_path / "out")}
        (tmp_path / "run.yaml").write_text(json.dumps(options | few))
        code, out, error = run("train", "-c", tmp_path / "run.yaml")
        assert code == 0, error
        assert words in " ".join(out.split()).replace("\n", "")


@pytest.mark.parametrize(("keep", "left"), [(3, [4, 6, 8]), (0, [])])
def test_the_newest_copies_are_kept(make_trainer, tmp_path, keep, left):
    out = tmp_path / "out"
    others = [out / name for name in ("my_adapters.safetensors", "0000001_adapters.safetensors.bak", "notes.txt")]
    trainer = make_trainer(save_every=2, keep=keep, val_batches=0)
    save = trainer.outputs.save_weights

    def save_beside_others(iteration):
        for other in others:
            other.write_text("mine")
        save(iteration)

    trainer.outputs.save_weights = save_beside_others
    # Without evaluations there is no best.
    assert trainer.run().best_iteration is None
    assert not (out / "best").exists()
    assert [path for path in others if path.exists()] == others
    (out / "my_adapters.safetensors").unlink()
    assert copies(out) == left
    assert weights(out)


def test_the_oldest_copy_goes_only_after_the_new_one_is_written(make_trainer, tmp_path, monkeypatch):
    from deltatune.train.saved import outputs

    trainer = make_trainer(save_every=2, keep=1, val_batches=0)
    plain, seen = outputs.save_adapters, []

    def failing(*arguments, **options):
        seen.append(options["weights"])
        if options["weights"].startswith("0000004"):
            raise UserError("no room")
        return plain(*arguments, **options)

    monkeypatch.setattr(outputs, "save_adapters", failing)
    with pytest.raises(UserError, match="no room"):
        trainer.run()
    assert copies(tmp_path / "out") == [2]
