"""Names and writes the files of a run: adapters or a checkpoint, the state, metrics and the report."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from shlex import quote
from typing import Any

import mlx.nn as nn

from ...lora import save_adapters
from ...lora.adapter_files import WEIGHTS
from ...models.adapted_base import LOADER, layers_for_mlx_vlm, loader_of
from ...models.checkpoint_files import WHOLE
from ...models.checkpoint_writer import TrainedCheckpoint
from ...models.load import locate
from ...options.config import TrainConfig
from . import state

# The name of a numbered copy.
_COPY = re.compile(r"(\d{7,})_adapters\.safetensors")


class Outputs:
    """The files of a run, all in the folder `config.adapter_path`.

    Training of adapters writes adapters.safetensors, adapter_config.json and a numbered copy at every save, as
    mlx_lm.lora does. Full fine-tuning writes a whole checkpoint (models.checkpoint_writer). The folder `best` has the
    same files but the numbered copies, from the evaluation with the lowest loss of all. A checkpoint needs the
    tokenizer, the content of the model's config.json, and the folder that `config.model` names. A refusal of the file
    system is a UserError.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, config: TrainConfig, model_config: dict[str, Any] | None = None
    ):
        self.directory = Path(config.adapter_path)
        self.state = state.state_path(self.directory)
        self.metrics = self.directory / "metrics.jsonl"
        self.report = self.directory / "report.html"
        self.best = self.directory / "best"
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._checkpoint: TrainedCheckpoint | None = None
        if config.fine_tune_type == "full":
            if model_config is None:
                raise ValueError(
                    "fine_tune_type full writes a checkpoint: give Trainer the model's config.json as model_config."
                )
            scratch_config = model_config if config.from_scratch else None
            self._checkpoint = TrainedCheckpoint(model, locate(config.model), scratch_config)
        # A sentence for the user about the checkpoint, or None.
        self.note = None if self._checkpoint is None else self._checkpoint.note

    def commands(self) -> list[str]:
        """Return the commands to type next, which talk to the trained model, ask it, and merge an adapter into it."""
        folder = quote(str(self.directory))
        asked = f"--model {folder}"
        if self._checkpoint is None:
            asked = f"--model {quote(str(self._config.model))} --adapter-path {folder}"
        # In Python, a Trainer may have any object for a tokenizer, or none.
        chat = [f"deltatune chat {asked}"] if getattr(self._tokenizer, "has_chat_template", False) else []
        merge = [] if self._checkpoint else [f"deltatune merge {asked} --save-path {quote(f'{self.directory}-merged')}"]
        return [*chat, f'deltatune generate {asked} --prompt "Hello"', *merge]

    def prepare(self) -> None:
        """Create the folders, check that they can be written, and remove incomplete files of a killed run."""
        with state.writing(self.directory):
            self.state.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.directory, self.best, self.state.parent):
                for pattern in (".*.partial", ".*.tmp"):
                    for leftover in folder.glob(pattern):
                        leftover.unlink()
            probe = self.state.parent / ".probe.partial"
            probe.touch()
            probe.unlink()

    def save_weights(self, iteration: int) -> None:
        """Write the trained weights, so that mlx_lm can load them."""
        if self._checkpoint is not None:
            self._save_checkpoint(self._checkpoint, self.directory)
            return
        if self._config.keep != 0:
            self._save_adapters(self.directory, weights=f"{iteration:07d}_adapters.safetensors")
        self._save_adapters(self.directory)
        self._delete_old_copies(iteration)

    def save_best(self, iteration: int, loss: float) -> None:
        """Write the trained weights to the folder `best`, with their validation loss per token after `iteration`."""
        if self._checkpoint is not None:
            self._save_checkpoint(self._checkpoint, self.best)
        else:
            self._save_adapters(self.best, more={"iteration": iteration, "val_loss": loss})

    def _save_adapters(self, folder: Path, *, weights: str = WEIGHTS, more: dict[str, Any] | None = None) -> None:
        options = dataclasses.asdict(self._config) | {LOADER: loader_of(self._model)} | (more or {})
        layers = layers_for_mlx_vlm(self._model)
        named = layers is None
        options |= {} if named else {"num_layers": layers}
        save_adapters(self._model, folder, options, weights=weights, named=named)

    def _delete_old_copies(self, newest: int) -> None:
        """Delete numbered copies but the last `keep` of them; that of the iteration `newest` always stays."""
        keep = self._config.keep
        if keep is None:
            return
        with state.writing(self.directory):
            matches = [(file, _COPY.fullmatch(file.name)) for file in self.directory.iterdir()]
            copies = [(int(match[1]), file) for file, match in matches if match]
            for number, file in sorted(copies)[: max(len(copies) - keep, 0)]:
                if number != newest or not keep:
                    file.unlink(missing_ok=True)

    def _save_checkpoint(self, checkpoint: TrainedCheckpoint, folder: Path) -> None:
        with state.writing(folder / WHOLE):
            checkpoint.write(folder, dataclasses.asdict(self._config))
            self._tokenizer.save_pretrained(str(folder))
