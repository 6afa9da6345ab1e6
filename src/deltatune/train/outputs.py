"""Names and writes the files of a run: adapters or a checkpoint, the state, metrics and the report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..config import TrainConfig
from ..errors import UserError
from ..lora import save_adapters
from ..lora.new_rows import plain_parameters
from ..lora.tensor_files import write_tensors
from ..machine.atomic_files import replace_file
from ..models.vision.adapters import layers_for_mlx_vlm
from . import state


class Outputs:
    """The files of a run, all in the folder `config.adapter_path`.

    Training of adapters writes adapters.safetensors, adapter_config.json and a numbered copy at every save, as
    mlx_lm.lora does. Full fine-tuning writes model.safetensors, config.json and the tokenizer's files.

    Args:
        model: The model that is trained.
        tokenizer: Its tokenizer, for a checkpoint.
        config: The options of the run.
        model_config: The content of the model's config.json, for a checkpoint.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, config: TrainConfig, model_config: dict[str, Any] | None = None
    ):
        self.directory = Path(config.adapter_path)
        self.state = state.state_path(self.directory)
        self.metrics = self.directory / "metrics.jsonl"
        self.report = self.directory / "report.html"
        self._model, self._tokenizer, self._config, self._model_config = model, tokenizer, config, model_config
        if config.fine_tune_type == "full" and model_config is None:
            raise ValueError(
                "fine_tune_type full writes a checkpoint: give Trainer the model's config.json as model_config."
            )

    def prepare(self) -> None:
        """Create the folders, check that they can be written, and remove incomplete files of a killed run."""
        try:
            self.state.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.directory, self.state.parent):
                for pattern in (".*.partial", ".*.tmp"):
                    for leftover in folder.glob(pattern):
                        leftover.unlink()
            probe = self.state.parent / ".probe.partial"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(state.refusal(self.directory, error)) from error

    def save_weights(self, iteration: int) -> None:
        """Write the trained weights, so that mlx_lm can load them.

        Raises:
            UserError: If the file system refuses.
        """
        if self._config.fine_tune_type == "full":
            self._save_checkpoint()
            return
        options = dataclasses.asdict(self._config)
        layers = layers_for_mlx_vlm(self._model)
        named = layers is None
        options |= {} if named else {"num_layers": layers}
        copy = f"{iteration:07d}_adapters.safetensors"
        save_adapters(self._model, self.directory, options, weights=copy, named=named)
        save_adapters(self._model, self.directory, options, named=named)

    def _save_checkpoint(self) -> None:
        weights = self.directory / "model.safetensors"
        tensors = plain_parameters(self._model)
        try:
            replace_file(weights, lambda path: write_tensors(path, tensors, {"format": "mlx"}))
            self._tokenizer.save_pretrained(str(self.directory))
            text = json.dumps(self._model_config, indent=4, sort_keys=True)
            replace_file(self.directory / "config.json", lambda path: path.write_text(text, encoding="utf-8"))
        except OSError as error:
            raise UserError(state.refusal(weights, error)) from error
