"""Steps that end badly: one that macOS ends because it took too long, and rows that overflow on one rank."""

import json
import shutil

import mlx.core as mx
import mlx_lm
import pytest

from checkpoint_copies import rewritten
from deltatune.errors import UserError
from deltatune.train.saved import state


def test_one_rank_overflows_and_rank_0_names_the_layer(launch, options, tiny_checkpoint, data_folder, tmp_path):
    """A token of the second row alone has an embedding from which the first layer overflows."""
    source = tiny_checkpoint("qwen3_5", dtype=mx.float16, num_hidden_layers=2, full_attention_interval=2)
    model = shutil.copytree(source, tmp_path / "model")
    data = shutil.copytree(data_folder, tmp_path / "data")
    rows = [{"text": "a dog"}, {"text": "a fox"}]
    (data / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "train.jsonl").write_text("".join(json.dumps({"text": "a dog"}) + "\n" for _ in range(4)))
    (data / "test.jsonl").unlink()
    tokenizer = mlx_lm.load(str(source))[1]
    tokens = sorted(set(tokenizer.encode("a fox")) - set(tokenizer.encode("a dog")))
    with rewritten(model / "model.safetensors") as tensors:
        # The largest number of float16, to which the first layer adds a little.
        tensors["language_model.model.embed_tokens.weight"][mx.array(tokens)] = 65504.0
        name = "language_model.model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name] * 3000
    changed = {"model": str(model), "data": str(data), "batch_size": 2, "adapter_path": str(tmp_path / "out")}
    done = launch(options | changed)
    assert (done.stdout + done.stderr).count("exited with code 2") == 2
    assert done.stderr.count("is the first that is not finite, in float16") == 1
    assert "language_model.model.layers.0 (delta)" in done.stderr


TIMEOUT = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
)
DISPLAY = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)
PIECES = r"--resume --grad-checkpoint continues it, with long rows in pieces"


@pytest.mark.parametrize(
    ("error", "again", "said"),
    [
        (TIMEOUT, False, rf"it kept the GPU for longer .*Timeout.* saved in .*state\. {PIECES}; AGX_RELAX.*=1 in"),
        (DISPLAY, True, r"it kept the display waiting .* saved in .*state\. --resume continues it; AGX"),
    ],
)
def test_it_is_recognised_and_the_state_is_saved(make_trainer, run_with, tmp_path, error, again, said):
    trainer = make_trainer(iters=3, val_batches=0, grad_accumulation_steps=1, grad_checkpoint=again)

    def ended(iterations, _):
        if iterations.progress.iteration == 1:
            raise RuntimeError(error)

    with pytest.raises(UserError, match=rf"{said}.*--max-seq-length 32 \(now 64\) makes steps shorter") as raised:
        run_with(trainer, ended)
    assert "The state after iteration 1 is saved" in str(raised.value)
    assert state.peek(state.state_path(tmp_path / "out")).iteration == 1
