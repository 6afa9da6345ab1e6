"""The options of deltatune that a file of another trainer amounts to, and what of that file cannot be said here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from ..options.config import LoraConfig, TrainConfig
from ..options.values import checked, fields_of, short


@dataclass
class Rate:
    """What the other trainer says about its learning rate and its length; steps count optimizer updates.

    The defaults are those of transformers' TrainingArguments. `unsaid_warmup` is the share of the updates, and the most
    of them (None: any number), that warm up where the file names neither steps nor a share.
    """

    peak: float | None = None
    schedule: str = "linear"
    floor: float = 0.0
    warmup: int | None = None
    warmup_share: float | None = None
    unsaid_warmup: tuple[float, int | None] = (0.0, 0)
    updates: int | None = None
    epochs: float = 3.0

    def warmup_of(self, total: int | None) -> int | None:
        """Return the updates that warm up; None where that depends on a length that is not known."""
        if self.warmup is not None:
            return self.warmup
        share, most = self._share()
        if not share:
            return 0
        if total is None:
            return None
        return math.ceil(total * share) if most is None else min(int(total * share), most)

    def warmup_word(self) -> str:
        """Say what the updates that warm up are where the length is not known."""
        share, most = self._share()
        return f"WARMUP is {share:.3g} of UPDATES{'' if most is None else f', at most {most}'}"

    def _share(self) -> tuple[float, int | None]:
        return self.unsaid_warmup if self.warmup_share is None else (self.warmup_share, None)


@dataclass
class Draft:
    """Collects options while a file is read.

    Attributes:
        options: options of TrainConfig by name.
        adapters: options of LoraConfig by name.
        adam: settings of AdamW, as the libraries behind the other trainers have them by default.
        rate: the learning rate and the length of the run.
        per_update: options that count iterations, in updates.
        data: entries of hf_dataset.
        held_out: the share (below 1) or the number of rows that the other trainer validates on; 0 for none.
        unsaid: a line for each thing that could not be translated.
        unneeded: names that have no meaning here, and need none.
    """

    options: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Any] = field(default_factory=dict)
    adam: dict[str, Any] = field(default_factory=lambda: {"weight_decay": 0.0, "bias_correction": True})
    rate: Rate = field(default_factory=Rate)
    per_update: dict[str, int] = field(default_factory=dict)
    data: list[dict[str, Any]] = field(default_factory=list)
    held_out: float = 0
    unsaid: list[str] = field(default_factory=list)
    unneeded: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any) -> None:
        """Set an option of TrainConfig; UserError for a value that it may not have."""
        checked(value, *fields_of(TrainConfig)[name], name)
        self.options[name] = value

    def adapt(self, name: str, value: Any) -> None:
        """Set an option of LoraConfig; UserError for a value that it may not have."""
        checked(value, *fields_of(LoraConfig)[name], f"lora_parameters: {name}")
        self.adapters[name] = value

    def part(self, name: str, trained: bool) -> None:
        """Let a part of a vision model train, or not."""
        parts = [part for part in self.options.get("parts", "language").split(",") if part and part != name]
        self.options["parts"] = ",".join([*parts, name] if trained else parts)

    def leave(self, name: str, value: Any, why: str = "") -> None:
        """Note what could not be translated."""
        self.unsaid.append(f"{name}: {short(value)}{f' ({why})' if why else ''}")

    def finished(self) -> dict[str, Any]:
        """Return all options, for a YAML file; UserError if they contradict each other."""
        options = {"num_layers": -1} | self.options
        accumulated = options.get("grad_accumulation_steps", 1)
        if options.get("fine_tune_type") != "full" and self.adapters:
            options["lora_parameters"] = self.adapters
        options.setdefault("optimizer", "adamw")
        if options["optimizer"] in ("adamw", "adamw8bit"):
            options["optimizer_config"] = {options["optimizer"]: self.adam}
        for name, updates in self.per_update.items():
            options[name] = updates * accumulated
        if self.rate.updates:
            options["iters"] = self.rate.updates * accumulated
        else:
            options["epochs"] = self.rate.epochs
        options |= self._rate()
        options |= self._data()
        TrainConfig(**options | {"lora_parameters": LoraConfig(**options.get("lora_parameters", {}))})
        # The model and the data come first, as in the class; what the class inherits comes last.
        order = sorted(fields_of(TrainConfig), key=lambda name: name not in TrainConfig.__annotations__)
        return {name: options[name] for name in order if name in options}

    def _rate(self) -> dict[str, Any]:
        """The learning rate, or its schedule where the number of updates is known."""
        rate, peak = self.rate, self.rate.peak
        if peak is None:
            self.unsaid.append("no learning rate is named there, so that trainer's own default holds; here it is 1e-5")
            return {}
        total = rate.updates
        warmup = rate.warmup_of(total)
        if rate.schedule == "constant" or (rate.schedule == "constant_with_warmup" and warmup is not None):
            if rate.schedule == "constant" or not warmup:
                return {"learning_rate": peak}
            return {"lr_schedule": {"name": "linear_schedule", "arguments": [peak, peak, 1], "warmup": warmup}}
        names = {"linear": "linear_schedule", "cosine": "cosine_decay", "cosine_with_min_lr": "cosine_decay"}
        name = names.get(rate.schedule)
        if name is None:
            self.leave("the schedule", rate.schedule, f"the rate stays at {peak}")
            return {"learning_rate": peak}
        if total and warmup is not None and total > warmup:
            steps = total - warmup
            cosine = [peak, steps, rate.floor * peak] if rate.floor else [peak, steps]
            arguments = [peak, 0.0, steps] if name == "linear_schedule" else cosine
            return {"lr_schedule": {"name": name, "arguments": arguments} | ({"warmup": warmup} if warmup else {})}
        steps_word = "UPDATES - WARMUP" if warmup is None else f"UPDATES - {warmup}" if warmup else "UPDATES"
        written = f"[{peak}, 0.0, {steps_word}]" if name == "linear_schedule" else f"[{peak}, {steps_word}]"
        self.unsaid.append(
            f"the {rate.schedule} schedule: its length is epochs * rows / (batch_size * grad_accumulation_steps) "
            f"updates, and the rows are not known here. In place of learning_rate: lr_schedule: {{name: {name}, "
            f"arguments: {written}, warmup: {'WARMUP' if warmup is None else warmup}}}"
            f"{f'; {rate.warmup_word()}' if warmup is None else ''}"
        )
        return {"learning_rate": peak}

    def _data(self) -> dict[str, Any]:
        """The data sets with the rows that are trained and validated on, and whether there is validation."""
        if not self.data:
            self.unsaid.append("no data could be named: give --data, or data in the file")
            return {}
        for entry in self.data:
            split = entry.get("train_split", "train")
            entry["train_split"] = split
            if self.held_out and "[" in split:
                self.unsaid.append(f"what of {entry['path']} is validated on: give it as valid_split, beside {split}")
            elif self.held_out:
                count = f"{max(1, round(100 * self.held_out))}%" if self.held_out < 1 else f"{int(self.held_out)}"
                entry |= {"train_split": f"{split}[:-{count}]", "valid_split": f"{split}[-{count}:]"}
        validated = any("valid_split" in entry for entry in self.data)
        options: dict[str, Any] = {"hf_dataset": self.data[0] if len(self.data) == 1 else self.data}
        return options | ({} if validated else {"val_batches": 0})


def refuse_trainer(loss: str) -> UserError:
    """Return the error for a loss that deltatune has not."""
    return UserError(f"it trains by {short(loss)}, which deltatune has not; it has sft, dpo, orpo, kto, simpo and cpo.")
