"""Recognises that macOS ended a step because it kept the GPU for too long, and says what to change."""

from __future__ import annotations

from ..options.config import TrainConfig

# In the messages of Metal's errors, which MLX passes on: a command buffer ran for about five seconds, or a display that
# was in use had to wait for it (macOS 26).
_TIMEOUT = ("kIOGPUCommandBufferCallbackErrorTimeout", "GPU Timeout Error")
_DISPLAY = ("kIOGPUCommandBufferCallbackErrorImpactingInteractivity", "Impacting Interactivity")
# An environment variable of Apple's driver.
_RELAX = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1"


def explanation(error: BaseException, config: TrainConfig, saved: str) -> str | None:
    """Return a message for the user; None for any other error.

    Args:
        error: What ended the step.
        config: The options of the run.
        saved: Says where the state is.
    """
    text = str(error)
    if any(words in text for words in _TIMEOUT):
        why = "it kept the GPU for longer than about five seconds"
    elif any(words in text for words in _DISPLAY):
        why = "it kept the display waiting"
    else:
        return None
    half = max(1, config.max_seq_length // 2)
    pieces = "--resume continues it"
    if config.grad_checkpoint is False:
        pieces = "--resume --grad-checkpoint continues it, with long rows in pieces"
    return (
        f"macOS ended a step because {why} ({text.strip()}). {saved} {pieces}; {_RELAX} in the environment lets macOS "
        f"wait longer; --max-seq-length {half} (now {config.max_seq_length}) makes steps shorter, in a new run that "
        "may begin with --resume-adapter-file."
    )
