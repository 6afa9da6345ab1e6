"""Answers to prompts with pictures: sampled with mlx-vlm's positions, scored by the same distribution, learnt from."""

import json

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from deltatune.data.datasets import load_datasets
from deltatune.models.generate import Chosen, SampledPolicy
from deltatune.models.load import load
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import patched
from deltatune.train import Trainer
from deltatune.train.evaluation.evaluate import inferring
from deltatune.train.rollouts.answer_sampler import PictureSampler
from deltatune.train.setup import ready, vision_processors
from token_rewards import LowTokens

pytest.importorskip("mlx_vlm")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Prompts with one image, two, and none."""
    folder = tmp_path_factory.mktemp("prompts")
    for number, colour in enumerate(((220, 20, 20), (20, 20, 220))):
        Image.new("RGB", (32 + 16 * number, 32), colour).save(folder / f"{number}.png")
    lines = [
        {"prompt": "<image>which colour?", "images": ["0.png"]},
        {"messages": [{"role": "user", "content": "<image> and <image>: which?"}], "images": ["1.png", "0.png"]},
        {"prompt": "no picture"},
        {"text": "as it stands"},
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_vl", marks=pytest.mark.weekly)])
def test_answers_have_the_log_probabilities_of_mlx_vlm(family, tiny_vision_checkpoint, rows):
    loaded = load(tiny_vision_checkpoint(family), image="a test")
    model = loaded.model
    config = TrainConfig(loss="grpo", data=str(rows), batch_size=1, max_completion_length=6, temperature=0.7)
    prompts = load_datasets(config, loaded.tokenizer, vision_processors(loaded)).train
    policy = SampledPolicy.of(config, model)
    with patched(), inferring(model):
        engine = PictureSampler(model, (9, 40), 6)
        answers = engine.answers(prompts, 3, policy.sampler(mx.random.key(1)), lambda: None)
        tokens = mx.array([9, 5, 5])
        ending_first = Chosen(tokens, mx.stack([tokens, tokens]).astype(mx.float32))
        forced = engine.answers(prompts[:1], 3, lambda _: ending_first, lambda: None)
    assert [len(answer.figures) for answer in forced] == [1, 6, 6]
    assert [len(prompt.pictures.values) for prompt in prompts] == [1, 2, 0, 0]
    assert len({str(answer.tokens) for answer in answers}) > 6
    for number, answer in enumerate(answers):
        held = prompts[number // 3].pictures
        tokens = [*answer.tokens, *([] if answer.end is None else [answer.end])]
        more = {}
        if held.values:
            patches = [held.reader.read(value, "a test")[0].patches for value in held.values]
            more = {"pixel_values": mx.array(np.concatenate(patches)), "image_grid_thw": mx.array(held.grids)}
        model.eval()
        model.language_model._position_ids = model.language_model._rope_deltas = None
        logits = model(mx.array([[*answer.prompt, *tokens]]), **more).logits[0, len(answer.prompt) - 1 : -1]
        log_p = mx.log(mx.softmax(policy.logits(logits), axis=-1))
        of_tokens = mx.take_along_axis(log_p, mx.array(tokens)[:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(np.stack(answer.figures)[:, 0], np.array(of_tokens), atol=2e-4)


def test_a_run_on_pictures_scores_what_was_sampled(tiny_vision_checkpoint, rows, tmp_path):
    """With several passes and a reference, both of which score the answers before the first update."""
    sizes = {"batch_size": 2, "num_generations": 4, "max_completion_length": 8, "max_seq_length": 96, "iters": 4}
    config = TrainConfig(
        model=str(tiny_vision_checkpoint("qwen3_5")),
        data=str(rows),
        loss="grpo",
        num_iterations=2,
        beta=0.1,
        learning_rate=1e-5,
        steps_per_report=1,
        lora_parameters=LoraConfig(rank=2),
        adapter_path=str(tmp_path / "out"),
        **sizes,
    )
    run = ready(config)
    run.prepare()
    Trainer.of(run, rewards=LowTokens()).run()
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    reports = [record for record in records if "train_loss" in record]
    assert len(reports) == 4
    for record in reports:
        assert record["sampling/sampling_logp_difference/max"] < 1e-3
        assert record["sampling/outside"] == 0
    assert reports[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert any("<image>" in sample["prompt"] for record in records for sample in record.get("samples", ()))
