"""A step that macOS ends because it took too long: the state is saved, and the message names the remedy."""

import pytest

from deltatune.errors import UserError
from deltatune.train.saved import state

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
