"""Translates a file of axolotl or LLaMA-Factory, or an Unsloth notebook, into a YAML file of deltatune."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from ..options.values import short
from ..options.yaml_files import read_yaml
from .dictionary import UNNEEDED, names
from .draft import Draft, Rate
from .notebook import PLAIN_CLASSES, Computed, read_calls

#: The trainers by the key that only their files have.
_MARKS = {
    "base_model": "axolotl",
    "model_name_or_path": "llama_factory",
    "finetuning_type": "llama_factory",
    "stage": "llama_factory",
}
_TITLES = {"unsloth": "Unsloth", "axolotl": "axolotl", "llama_factory": "LLaMA-Factory"}


@dataclass(frozen=True)
class Translation:
    """The text of a YAML file of deltatune, and what could not be translated, a line for each thing."""

    text: str
    unsaid: list[str]


def translate(path: Path) -> Translation:
    """Translate a file of another trainer.

    Args:
        path: a YAML file of axolotl or LLaMA-Factory, or an Unsloth notebook (.ipynb) or script (.py), which is read
            and not run.

    Returns:
        The YAML, whose options are those that the other trainer would have used, its defaults included where they
        differ from deltatune's, with what could not be translated in comments.

    Raises:
        UserError: the file cannot be read, is of none of these, or trains by a loss that deltatune has not.
    """
    if path.suffix in (".ipynb", ".py"):
        trainer, values = "unsloth", read_calls(path)
    else:
        values = read_yaml(path)
        trainer_of_keys = next((_MARKS[name] for name in _MARKS if name in values), None)
        if trainer_of_keys is None:
            raise UserError(
                f"{path}: expected a file of axolotl (with base_model) or LLaMA-Factory (with model_name_or_path), or "
                f"an Unsloth notebook (.ipynb, .py); its keys are {', '.join(map(short, list(values)[:5])) or 'none'}."
            )
        trainer = trainer_of_keys
    draft = _started(trainer, values)
    try:
        _fill(draft, trainer, values)
        options = draft.finished()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return Translation(_written(options, draft, trainer, path), draft.unsaid)


def _started(trainer: str, values: dict[str, Any]) -> Draft:
    """A draft with the defaults of a trainer, where they differ from those of deltatune.

    Source: axolotl's utils/schemas and core/builders/base.py (2026-07-24), LLaMA-Factory's hparams (2026-08-18),
    transformers' TrainingArguments (5.23); for Unsloth's functions and for what it puts in place of TRL's defaults, two
    public descriptions of its source, read on 2026-11-26: deepwiki.com/unslothai/unsloth (10-api-reference and
    6.2-reinforcement-learning-integration) and leeroopedia.com (Unslothai_Unsloth_FastLanguageModel_Get_Peft_Model).
    """
    draft = Draft(options={"batch_size": 8, "grad_clip": 1.0})
    if trainer == "axolotl":
        draft.options |= {"batch_size": 1, "max_seq_length": 512, "overlong": "skip"}
        draft.rate = Rate(schedule="cosine", epochs=1.0, unsaid_warmup=(0.03, 100))
        if not values.get("adapter"):
            draft.options["fine_tune_type"] = "full"
    elif trainer == "unsloth":
        draft.adapters |= {"rank": 16, "alpha": 16.0}
        if not values.pop(PLAIN_CLASSES[0], False):
            draft.options |= {"batch_size": 4, "grad_accumulation_steps": 2, "optimizer": "adamw8bit"}
            draft.adam["weight_decay"] = 0.01
            draft.rate.unsaid_warmup = (0.1, None)
        if not values.pop("responses only", False) and values.get("the class of the trainer", "sft") == "sft":
            draft.set("mask_prompt", False)
        for name in values.pop("further data sets", []):
            draft.leave("load_dataset", name, "a further data set")
        draft.unsaid.append(
            "what the program does to its rows: deltatune reads rows of the usual forms as they are, with the chat "
            "template of the model"
        )
    else:
        draft.rate.peak = 5e-5
        rank = values.get("lora_rank", 8)
        draft.adapters |= {"rank": 8} | ({"alpha": 2.0 * rank} if type(rank) is int else {})
    return draft


def _fill(draft: Draft, trainer: str, values: dict[str, Any]) -> None:
    """Put every option of a file into the draft."""
    known, unneeded = names(trainer), UNNEEDED[trainer].split()
    for name, value in values.items():
        if name in unneeded:
            draft.unneeded.append(name)
        elif isinstance(value, Computed):
            draft.leave(str(name), value, "computed by the program")
        elif name in known and value is not None and (value is not False or name in _MEANS_SOMETHING_WHEN_OFF):
            try:
                known[name](draft, value)
            except UserError as error:
                if name in _LOSSES:
                    raise
                draft.leave(str(name), value, str(error))
        # What is off, or empty, is off here too.
        elif name not in known and value not in (None, False, "", [], {}, 0, "none", "no"):
            draft.leave(_plain(name), value)


_MEANS_SOMETHING_WHEN_OFF = (
    "freeze_vision_tower",
    "freeze_multi_modal_projector",
    "finetune_vision_layers",
    "finetune_language_layers",
    "enable_thinking",
)
_LOSSES = ("the class of the trainer", "rl", "stage")


def _plain(name: Any) -> str:
    return name if isinstance(name, str) and re.fullmatch(r"[\w.*-]+", name) else short(name)


def _written(options: dict[str, Any], draft: Draft, trainer: str, path: Path) -> str:
    """The YAML file, with comments."""
    lines = [f"# From {_plain(path.name)} of {_TITLES[trainer]}, by deltatune recipes from. Look before you train:"]
    lines += ["# deltatune train -c THIS_FILE --show-batch", ""]
    lines += [yaml.safe_dump(options, sort_keys=False, default_flow_style=None, width=110).rstrip()]
    if draft.unsaid:
        lines += ["", "# Not translated:", *(f"#   {line}" for line in draft.unsaid)]
    if draft.unneeded:
        lines += ["", f"# Not needed here: {', '.join(map(_plain, draft.unneeded))}."]
    return "\n".join(lines) + "\n"
