"""A run samples its answers, learns from their rewards, and continues with the same bits wherever it is stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train import Trainer
from deltatune.train.ending.early_end import Ending
from deltatune.train.ending.interrupt import StoppedError
from deltatune.train.setup import ready
from families import VOCABULARY
from killed_runs import same


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
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "train.jsonl"
    lines = [{"prompt": f"question {n} " + "dog " * (n % 4), "letter": "aeiou"[n % 5]} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trainer_of(checkpoint: Path, rows: Path, tmp_path: Path):
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


class LowTokens:
    """Rewards the share of tokens of an answer that are below a quarter of the vocabulary."""

    names = ("low",)
    weights = np.ones(1)

    def __call__(self, _prompts: Any, _completions: Any, columns: dict[str, Any], _check: Any) -> np.ndarray:
        return np.array([[np.mean(np.array(tokens) < VOCABULARY // 4) for tokens in columns["completion_ids"]]])

    def close(self) -> None:
        """Nothing is to be ended."""


def test_a_run_learns(trainer_of, tmp_path):
    trainer_of(rewards=LowTokens(), iters=24, batch_size=4, num_generations=8, steps_per_report=4).run()
    rewards = [record["reward"] for record in records(tmp_path / "out")]
    assert rewards[0] < 0.45
    assert rewards[-1] > rewards[0] + 0.2


OTHERS = {
    "several passes over accumulated batches": {"num_iterations": 2, "grad_accumulation_steps": 2, "iters": 8},
    "the model without its adapter": {"beta": 0.1, "grad_accumulation_steps": 2},
    "rloo with a reference": {"beta": 0.1, "loss_variant": "rloo"},
    "truncated answers that do not count": {
        "mask_truncated_completions": True,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
    },
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_a_stopped_run_continues_with_the_same_bits(options, trainer_of, tmp_path, run_with):
    """It is stopped within an accumulation, with answers that are sampled and not yet used up."""
    straight = Letters()
    trainer_of("straight", straight, **options).run()
    stopped = Letters()

    def stop(iterations: Any, _batch: Any) -> None:
        if iterations.progress.iteration == 2:
            iterations._ending.stop.asked = True

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
    trainer_of("straight").run()
    rewards = Interrupting(at=2)
    plain = Ending.__enter__

    def enter(ending: Ending) -> Ending:
        rewards.ending = ending
        return plain(ending)

    monkeypatch.setattr(Ending, "__enter__", enter)
    with pytest.raises(StoppedError, match="stopped after iteration 2 of 6"):
        trainer_of("stopped", rewards).run()
    trainer_of("stopped", resume=True).run()
    same(tmp_path / "straight", tmp_path / "stopped")


def test_ranks_sample_their_own_answers_and_continue(launch, options, tmp_path):
    """Stopped in a second pass, every rank takes up its own answers again; advantages are scaled over all ranks."""
    values = options | {
        "loss": "grpo",
        "batch_size": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "num_iterations": 2,
        "grad_accumulation_steps": 1,
        "scale_rewards": "batch",
        "reward_funcs": ["length:3", "regex:[a-m]$"],
        "steps_per_report": 1,
        "save_every": 100,
    }
    for folder, iterations in (("straight", 6), ("stopped", 3), ("stopped", 6)):
        resume = ["--resume"] if iterations == 6 and folder == "stopped" else []
        run = values | {"adapter_path": str(tmp_path / folder), "iters": iterations}
        done = launch(run, *resume)
        assert done.returncode == 0, done.stderr
    straight, stopped = records(tmp_path / "straight"), records(tmp_path / "stopped")
    assert [r.get("reward") for r in straight] == [r.get("reward") for r in stopped]
    assert (tmp_path / "straight/adapters.safetensors").read_bytes() == (
        tmp_path / "stopped/adapters.safetensors"
    ).read_bytes()
