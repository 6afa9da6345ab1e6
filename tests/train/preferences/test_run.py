"""Training on preferences: the reference, exact continuation, figures, packing, memory and the plan."""

import json
import random
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from deltatune.data.datasets import load_datasets
from deltatune.machine import backend
from deltatune.models.load import load
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape
from deltatune.train.batch_loss import arrays, mean_loss_and_gradients
from deltatune.train.distributed import World
from deltatune.train.evaluation import reference
from deltatune.train.setup import batch_order, prepare, training
from deltatune.train.tree import leaves
from killed_runs import adapters


def pair(draw, number):
    return {
        "prompt": f"question {number}" + " dog" * draw.randint(1, 9),
        "chosen": f" the answer is {number * 7} fox",
        "rejected": " no" + " cat" * draw.randint(1, 6),
    }


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A folder of 30 training, 5 validation and 5 test pairs of several lengths."""
    folder, draw = tmp_path_factory.mktemp("pairs"), random.Random(0)
    rows = [pair(draw, number) for number in range(40)]
    for name, part in (("train", rows[:30]), ("valid", rows[30:35]), ("test", rows[35:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.fixture
def preference_trainer(make_trainer, options, pairs, checkpoint):
    """preference_trainer("dpo", **changes) -> a Trainer on the pairs."""

    def make(loss, **changes):
        values = options | {"data": str(pairs), "loss": loss, "batch_size": 2} | changes
        config = TrainConfig(**values | {"lora_parameters": LoraConfig(**values["lora_parameters"])})
        splits = load_datasets(config, load(checkpoint).tokenizer)
        return make_trainer(splits=splits, data=str(pairs), loss=loss, batch_size=2, **changes)

    return make


def test_a_run_starts_at_its_reference_and_reports_what_it_learns(preference_trainer, tmp_path, read_metrics):
    trainer = preference_trainer("dpo", test=True)
    trainer.run()
    records = read_metrics(tmp_path / "out")
    assert records[0]["val_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert abs(records[0]["val_rewards/margins"]) < 1e-5
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert names <= records[-2].keys()
    assert records[-1]["val_rewards/margins"] > 0.1
    assert records[-1]["val_loss"] < 0.69
    report = (tmp_path / "out" / "report.html").read_text()
    assert all(title in report for title in ("Loss per preference", "Rewards", "Margin of the chosen"))
    # The test set's reference is that of the start, too.
    assert all(np.isfinite(one.reference).all() for one in trainer.splits.test)


def test_a_packed_run_names_its_preferences_an_update(preference_trainer, screen_text):
    trainer = preference_trainer("dpo", pack=True, grad_accumulation_steps=2, val_batches=0, max_seq_length=64)
    trainer.run()
    shown = " ".join(screen_text.text().split())
    (rows,) = re.findall(r"30 training, .*; (\d+) rows an epoch, 2 a batch", shown)
    expected = round(30 / int(rows) * 2 * 2)
    assert f"2 a batch, about {expected} preferences an update" in shown


def test_a_continued_run_has_the_bits_of_a_straight_one(
    preference_trainer, tmp_path, read_metrics, monkeypatch, screen_text
):
    """The break is inside an accumulation; the reference comes from its file, or is recomputed to the same bits."""
    changes = {"iters": 6, "grad_accumulation_steps": 2, "steps_per_report": 4}
    preference_trainer("dpo", adapter_path=str(tmp_path / "straight"), **changes).run()
    preference_trainer("dpo", **changes | {"iters": 3}).run()
    (file,) = (tmp_path / "out" / "reference").iterdir()
    kept = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(reference, "_log_probabilities", None)
        preference_trainer("dpo", resume=True, **changes | {"iters": 5}).run()
    assert "read from" in screen_text.text()
    file.write_bytes(kept[:100])
    preference_trainer("dpo", resume=True, **changes).run()
    assert file.read_bytes() == kept
    assert adapters(tmp_path / "out") == adapters(tmp_path / "straight")
    # The runs that ended earlier reported and evaluated there as well.
    straight, out = (read_metrics(tmp_path / folder) for folder in ("straight", "out"))
    assert straight[-1] == out[-1]
    assert straight[0] == out[0]


@pytest.fixture(scope="module")
def measured(pairs, checkpoint):
    """measured(loss, packed) -> the sums, the figures and the gradients of one batch of all training pairs."""

    def measure(loss, packed):
        config = TrainConfig(
            data=str(pairs), loss=loss, pack=packed, batch_size=1, max_seq_length=64,
            lora_parameters=LoraConfig(rank=2),
        )  # fmt: skip
        loaded = load(checkpoint)
        examples = load_datasets(config, loaded.tokenizer).train
        config = replace(config, batch_size=batch_order(examples, config).rows)
        prepare(loaded.model, config)
        mx.random.seed(1)
        trainable = leaves(loaded.model.trainable_parameters())
        changed = [(name, leaf + 0.05 * mx.random.normal(leaf.shape)) for name, leaf in trainable]
        loaded.model.load_weights(changed, strict=False)
        draw = np.random.default_rng(2)
        for one in examples:
            one.reference[:] = draw.normal(-60, 5, 2)
        loaded.model.train()
        with training(loaded.model, config, compare=False) as trained:
            (batch,) = batch_order(examples, config).epoch()
            assert (batch.segments is not None) == packed
            found = mean_loss_and_gradients(loaded.model, trained.loss, arrays(batch))
            mx.eval(found)
        return found

    return measure


@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto"])
def test_packed_pairs_have_the_loss_and_gradients_of_single_rows(loss, measured):
    (total, count, gradients, figures), (packed, same, others, reported) = measured(loss, False), measured(loss, True)
    assert count.item() == same.item() == (60 if loss == "kto" else 30)
    assert abs(total.item() - packed.item()) / count.item() <= 1e-6 * max(1, abs(total.item()) / count.item())
    np.testing.assert_allclose(np.array(figures), np.array(reported), rtol=2e-6)
    for (name, one), (_, other) in zip(leaves(gradients), leaves(others), strict=True):
        scale = mx.abs(one).max().item()
        assert mx.abs(one - other).max().item() <= 2e-5 * scale + 1e-9, name


def test_a_pair_counts_the_same_with_any_number_of_ranks(preference_trainer):
    """Each rank takes its own pairs, and blank pairs that fill the last batch change nothing."""
    trainer = preference_trainer("dpo")
    examples = trainer.splits.train[:3]
    for one in examples:
        one.reference[:] = -50, -51
    config = replace(trainer.config, batch_size=4, lora_parameters=LoraConfig(rank=2))
    with training(trainer.model, config, compare=False) as trained:
        sums = np.zeros(2)
        for rank in (None, 0, 1):
            world = World()
            if rank is not None:
                world.rank, world.size = rank, 2
            (batch,) = batch_order(examples, config, world).epoch()
            total, weight, *_ = trained.loss(*[each for each in arrays(batch) if each is not None])
            sums += np.array([total.item(), weight.item()]) * (1 if rank is None else -1)
    np.testing.assert_allclose(sums, 0, atol=1e-5)


@pytest.fixture
def step_of(tiny_model):
    """step_of(loss) -> the configuration, a prepared model with a large vocabulary, and the number of preferences."""

    def make(loss):
        model = tiny_model("qwen3_5", num_hidden_layers=2, full_attention_interval=2, vocab_size=4096)
        config = TrainConfig(loss=loss, lora_parameters=LoraConfig(rank=2))
        prepare(model, config)
        model.train()
        return config, model, 0 if loss == "sft" else 2

    return make


@pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
def test_the_plan_of_a_step_is_that_of_supervised_training(step_of):
    """For the same tokens, a preference loss may take 1.3 times as much; all logits at once would take far more."""
    layout, peaks = ArrayLayout.measured(), {}
    for loss in ("sft", "dpo", "orpo"):
        config, model, preferences = step_of(loss)
        peaks[loss] = forecast_step(model, config, BatchShape(4, 512, preferences=preferences), layout).bytes.amount
    assert max(peaks.values()) <= 1.3 * peaks["sft"], peaks
