"""A run samples its answers, learns from their rewards, and continues with the same bits wherever it is stopped."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train import Trainer
from deltatune.train.ending.early_end import Ending
from deltatune.train.ending.interrupt import StoppedError
from deltatune.train.freed_memory import FreedMemory
from deltatune.train.rollouts.rollout_order import RolloutOrder, Rollouts
from deltatune.train.setup import ready
from killed_runs import same
from token_rewards import LowTokens


class Letters:
    """Rewards the share of one letter in an answer, and an answer that is short."""

    names = ("letter", "short")
    weights = np.array([1.0, 0.5])

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], list[str], dict[str, list[Any]]]] = []

    def __call__(
        self, prompts: list[Any], completions: list[str], columns: dict[str, list[Any]], check: Any
    ) -> np.ndarray:
        check()
        self.calls.append((list(prompts), list(completions), columns))
        shares = [
            text.count(letter) / (len(text) or 1) for text, letter in zip(completions, columns["letter"], strict=True)
        ]
        return np.array([shares, [float(len(text) < 8) for text in completions]])

    def close(self) -> None:
        """Nothing is to be ended."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "train.jsonl"
    lines = [{"prompt": f"question {n} " + "dog " * (n % 4), "letter": "aeiou"[n % 5]} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trainer_of(checkpoint, rows, tmp_path):
    """trainer_of(folder, rewards, **options) returns the trainer of a short run."""

    def made(folder: str = "out", rewards: Any = None, **changes: Any) -> Trainer:
        options = {
            "model": str(checkpoint),
            "data": str(rows),
            "loss": "grpo",
            "iters": 6,
            "batch_size": 2,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_seq_length": 64,
            "lr_schedule": "constant",
            "warmup": 0.0,
            "learning_rate": 1e-2,
            "lora_parameters": LoraConfig(rank=2, scale=10.0),
            "adapter_path": str(tmp_path / folder),
            "steps_per_report": 1,
            "save_every": 3,
        }
        run = ready(TrainConfig(**options | changes))
        run.prepare()
        return Trainer.of(run, rewards=rewards or Letters())

    return made


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_reports_rewards_and_agrees_with_its_sampler(trainer_of, tmp_path):
    rewards = Letters()
    trainer_of(rewards=rewards, temperature=0.7).run()
    prompts, completions, columns = rewards.calls[0]
    assert len(rewards.calls) == 6
    assert len(completions) == len(columns["letter"]) == 8
    assert prompts[:4] == [prompts[0]] * 4
    assert prompts[0].startswith("question ")
    record = records(tmp_path / "out")[0]
    for name in ("reward", "reward_std", "rewards/letter/mean", "rewards/short/std", "entropy", "seconds/sampling"):
        assert record[name] is not None
    assert record["completions/mean_length"] <= 12
    # Of one pass, no ratio is clipped; the sampler's engine and training's forward pass round differently.
    assert record["clip_ratio/region_mean"] == 0
    assert record["sampling/sampling_logp_difference/max"] < 1e-3
    assert record["sampling/outside"] == 0


def test_answers_end_at_texts(trainer_of, tmp_path):
    """A text of two letters, which may stand in one token or in two; it remains in the answer."""
    rewards = Letters()
    stop_strings = ["e", "ab"]
    trainer_of(rewards=rewards, iters=2, stop_strings=stop_strings, max_completion_length=24).run()
    record = records(tmp_path / "out")[0]
    _, completions, _ = rewards.calls[0]
    stopped = [text for text in completions if any(stop in text for stop in stop_strings)]
    assert stopped
    for text in stopped:
        first = min(text.find(stop) + len(stop) for stop in stop_strings if stop in text)
        # The token that completes the text may go on behind it.
        assert len(text) - first < 8
    assert record["completions/clipped_ratio"] <= 1 - len(stopped) / len(completions)


def test_a_model_with_latent_attention_is_sampled_by_mlx_lm(trainer_of, tiny_checkpoint, tmp_path, capsys):
    model = tiny_checkpoint("kimi_linear", num_hidden_layers=4)
    trainer_of(model=str(model), temperature=0.7, top_k=50, iters=2).run()
    assert "Sampling: by mlx-lm's BatchGenerator" in " ".join(capsys.readouterr().out.split())
    reports = [record for record in records(tmp_path / "out") if "reward" in record]
    assert len(reports) == 2
    for record in reports:
        assert record["sampling/sampling_logp_difference/max"] < 1e-3
        assert record["sampling/outside"] == 0


def test_each_report_shows_the_best_the_middle_and_the_worst_answer(trainer_of, tmp_path, capsys):
    rewards = Letters()
    trainer_of(rewards=rewards, iters=3, grad_accumulation_steps=3).run()
    answers = records(tmp_path / "out")[1]["samples"]
    (prompts, texts, columns), weights = rewards.calls[0], rewards.weights
    totals = weights @ Letters()(prompts, texts, columns, lambda: None)
    ranked = sorted(totals, reverse=True)
    expected = [ranked[0], ranked[len(ranked) // 2], ranked[-1]]
    assert [float(answer["reward"]) for answer in answers] == pytest.approx(expected, abs=1e-3)
    for answer in answers:
        assert (answer["prompt"], answer["answer"]) in zip(prompts, texts, strict=True)
    shown = capsys.readouterr().out
    assert all(f"(reward {answer['reward']})" in shown for answer in answers)
    report = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "Sampled answers" in report
    assert "metrics.jsonl has all of them" in report


def test_an_evaluation_samples_with_the_same_rewards(trainer_of, tmp_path, capsys, rows, monkeypatch):
    """Its randomness is its own: it changes no bit of training, and it is the same in each evaluation."""
    phases: list[str] = []
    monkeypatch.setattr(FreedMemory, "begin", lambda _, phase: phases.append(phase))
    lines = rows.read_text().splitlines(keepends=True)
    for split, part in (("train", lines), ("valid", lines[:5]), ("test", lines[:3])):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(part))
    rewards = Letters()
    trainer_of("plain", data=str(tmp_path / "data"), val_batches=0, iters=2).run()
    options = {"val_batches": -1, "steps_per_eval": 1, "test": True, "early_stopping": 2, "iters": 2}
    trainer_of(rewards=rewards, data=str(tmp_path / "data"), **options).run()
    evaluations = [record for record in records(tmp_path / "out") if "val_loss" in record]
    assert [record["iteration"] for record in evaluations] == [0, 1, 2]
    assert phases == ["sampling", "training"] * 2 + ["evaluation", "sampling", "training"] * 2 + ["evaluation"]
    # Five prompts in batches of two, with four answers each.
    assert sorted(len(call[1]) for call in rewards.calls[:3]) == [4, 8, 8]
    totals = [rewards.weights @ Letters()(*call, lambda: None) for call in rewards.calls[:3]]
    mean = np.concatenate(totals).mean()
    assert evaluations[0]["val_reward"] == pytest.approx(mean, abs=1e-5)
    assert evaluations[0]["val_loss"] == pytest.approx(-mean, abs=1e-5)
    assert "Test loss " in capsys.readouterr().out
    plain, evaluated = (tmp_path / name / "adapters.safetensors" for name in ("plain", "out"))
    assert plain.read_bytes() == evaluated.read_bytes()


def test_a_run_ends_where_the_validation_reward_no_longer_rises(trainer_of, tmp_path, rows, capsys):
    (tmp_path / "data").mkdir()
    for split in ("train", "valid"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(rows.read_text())
    options = {"val_batches": 1, "steps_per_eval": 1, "early_stopping": 1, "learning_rate": 1e-9}
    result = trainer_of(data=str(tmp_path / "data"), **options).run()
    assert result.stopped_early
    assert result.iterations < 6
    assert "Stopping early after iteration" in capsys.readouterr().out


def test_a_run_learns(trainer_of, tmp_path):
    trainer_of(rewards=LowTokens(), iters=24, batch_size=4, num_generations=8, steps_per_report=4).run()
    rewards = [record["reward"] for record in records(tmp_path / "out") if "reward" in record]
    assert rewards[0] < 0.45
    assert rewards[-1] > rewards[0] + 0.2


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.weekly), {"num_iterations": 2, "beta": 0.1, "loss_variant": "grpo"}],
    ids=str,
)
def test_packed_answers_have_the_gradients_of_rows_of_their_own(options, trainer_of, tmp_path, run_with):
    """Some prompts are far longer than others, so that several short ones share a row with their answers."""
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"question {n} " + "dog " * (8 * (n % 2)), "letter": "aeiou"[n % 5]} for n in range(6)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batches: dict[bool, list[Any]] = {False: [], True: []}
    for pack in batches:
        more = {"data": str(rows), "iters": 2 * options.get("num_iterations", 1), "learning_rate": 1e-5}
        trainer = trainer_of(str(pack), LowTokens(), pack=pack, **more | options)
        run_with(trainer, lambda _, batch, seen=batches[pack]: seen.append(batch))
    assert min(len(batch.inputs) for batch in batches[True]) < min(len(batch.inputs) for batch in batches[False])
    apart, packed = (
        [record for record in records(tmp_path / str(pack)) if "train_loss" in record] for pack in (False, True)
    )
    for one, other in zip(apart, packed, strict=True):
        for name in ("train_loss", "grad_norm", "reward", "entropy", "sampling/sampling_logp_difference/mean"):
            # The second pass has no rewards. Sums near 0 are of log-probabilities near 5, in fp32.
            assert (name in other) == (name in one)
            assert other.get(name, 0) == pytest.approx(one.get(name, 0), rel=1e-3, abs=2e-6)


OTHERS = {
    "several passes over accumulated batches, with a reference": {
        "num_iterations": 2,
        "grad_accumulation_steps": 2,
        "beta": 0.1,
    },
    "rloo with a reference": {"beta": 0.1, "loss_variant": "rloo"},
    "truncated answers that do not count": {
        "mask_truncated_completions": True,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
    },
}


@pytest.mark.parametrize(
    "options", [pytest.param(one, marks=[pytest.mark.weekly] * bool(at)) for at, one in enumerate(OTHERS.values())]
)
def test_a_stopped_run_continues_with_the_same_bits(options, trainer_of, tmp_path, run_with):
    """It is stopped within an accumulation, with answers that are sampled and not yet used up."""
    straight = Letters()
    trainer_of("straight", straight, **options).run()
    stopped = Letters()

    def stop(iterations: Any, _batch: Any) -> None:
        if iterations.progress.iteration == 2:
            iterations.ending.stop.asked = True

    trainer = trainer_of("stopped", stopped, **options)
    with pytest.raises(StoppedError):
        run_with(trainer, stop)
    trainer_of("stopped", stopped, resume=True, **options).run()
    same(tmp_path / "straight", tmp_path / "stopped")
    # No answer was sampled or paid for twice.
    assert [call[1] for call in stopped.calls] == [call[1] for call in straight.calls]


class Interrupting(Letters):
    """Asks the run to stop while it awaits the rewards of a sampling, as Ctrl-C does."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.ending: Any = None

    def __call__(self, prompts: Any, completions: Any, columns: Any, check: Any) -> np.ndarray:
        if len(self.calls) == self.at:
            self.ending.stop.asked = True
        return super().__call__(prompts, completions, columns, check)


def test_a_run_that_is_interrupted_amid_a_sampling_continues_with_the_same_bits(trainer_of, tmp_path, monkeypatch):
    trainer_of("straight", iters=4).run()
    rewards = Interrupting(at=2)
    plain = Ending.__enter__

    def enter(ending: Ending) -> Ending:
        rewards.ending = ending
        return plain(ending)

    monkeypatch.setattr(Ending, "__enter__", enter)
    with pytest.raises(StoppedError, match="stopped after iteration 2 of 4"):
        trainer_of("stopped", rewards, iters=4).run()
    trainer_of("stopped", resume=True, iters=4).run()
    same(tmp_path / "straight", tmp_path / "stopped")


def test_advantages_are_scaled_over_all_ranks():
    config = TrainConfig(loss="grpo", scale_rewards="batch", num_generations=2)
    world = SimpleNamespace(size=2, gather=lambda own: mx.stack([own, own + 10]))
    sampler = SimpleNamespace(rewards=SimpleNamespace(names=("own",), weights=np.ones(1)))
    order = RolloutOrder(SimpleNamespace(state=dict), sampler, None, config, world)
    rewards = np.array([[0.0, 1, 2, 3]])
    order._take(Rollouts(0, [], [2], None, rewards))
    deviation = np.concatenate([rewards, rewards + 10]).std(ddof=1)
    np.testing.assert_allclose(order._advantages, np.array([-0.5, 0.5, -0.5, 0.5]) / deviation, rtol=1e-3)
