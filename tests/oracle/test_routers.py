"""The losses of routers equal those of transformers on the same model and the same padded rows. Live."""

import mlx.core as mx
import numpy as np
import pytest
from test_peft import TOKENS, saved, theirs_loaded

from deltatune.data.batches.batch import Batch
from deltatune.models.load import load_model
from deltatune.patches import patched
from deltatune.train.batch_loss import arrays, full_loss, mean_loss_and_gradients
from deltatune.train.updates.routers import RouterLoss, real_lengths

pytestmark = pytest.mark.oracle

LENGTHS = (19, 11)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_the_load_balancing_loss_is_that_of_transformers(tmp_path, family):
    import torch

    folder = saved(tmp_path, family)
    mask = (np.arange(TOKENS.shape[1]) < np.array(LENGTHS)[:, None]).astype(np.int64)
    given = {"input_ids": torch.from_numpy(TOKENS), "attention_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        expected = theirs_loaded(folder)(**given, output_router_logits=True, use_cache=False).aux_loss.item()
    model, _ = load_model(folder)
    model.train()
    tokens, weights = TOKENS.astype(np.int32), mask.astype(np.float32)
    batch = Batch(tokens, tokens, weights, None, (("x",),) * 2, tuple((length,) for length in LENGTHS))
    with patched(model):
        *_, figures = mean_loss_and_gradients(
            model, full_loss(model), arrays(batch), routers=RouterLoss(0.0), lengths=real_lengths(batch)
        )
        mx.eval(figures)
    (value,), (count,) = figures.tolist()
    assert value / count == pytest.approx(expected, rel=1e-5)
