"""All options of a training run, each with its only default, and the YAML files that set them.

Names and defaults are those of `mlx_lm.lora` wherever it has the option; docs/guides/from-mlx-lm.md lists what differs.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError


def _about(group: str, text: str, *, flag: bool = True, choices: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a field's metadata: its help text, the group it is listed in, and whether it is a command-line flag."""
    return {"group": group, "help": text, "flag": flag, "choices": choices}


@dataclass
class LoraConfig:
    """The adapters' options, under the YAML key `lora_parameters`.

    Args:
        rank: the inner size of each low-rank update.
        scale: the factor of the update.
        dropout: the share of the update's inputs that training sets to zero, from 0 to below 1.
        keys: patterns (fnmatch) for the paths of the modules to adapt; None means every linear, expert and embedding
            module of the chosen layers.
        exclude: patterns for the paths of modules that get no adapter.
        layer_kinds: kinds of layers to adapt, any of "delta", "attention", "mamba" and "other"; None means all.
        layers: indices of the layers to adapt, in place of `num_layers`; negative ones count from the last.
        rslora: whether the scale is divided by the square root of the rank.
    """

    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    keys: list[str] | None = None
    exclude: list[str] = field(default_factory=list)
    layer_kinds: list[str] | None = None
    layers: list[int] | None = None
    rslora: bool = False


_MODEL, _DATA, _TUNE = "model", "data", "what trains"
_OPTIMIZER, _RUN, _SAVE = "optimizer", "run and evaluation", "saving and reporting"


@dataclass
class TrainConfig:
    """The options of a training run.

    Lengths are in tokens. Schedules count optimizer steps; everything else counts iterations, of which
    `grad_accumulation_steps` make one optimizer step. Each field's metadata holds its help text.
    """

    model: str = field(
        default="Qwen/Qwen3-0.6b", metadata=_about(_MODEL, "folder of the model, or its name on the Hugging Face hub")
    )
    data: str = field(
        default="mlx-community/WikiSQL",
        metadata=_about(
            _DATA, "folder with train.jsonl, valid.jsonl and test.jsonl, or the name of a Hugging Face data set"
        ),
    )
    hf_dataset: Any = field(
        default=None, metadata=_about(_DATA, "a Hugging Face data set, or several: mlx_lm.lora's mapping", flag=False)
    )
    train: bool = field(
        default=True, metadata=_about(_RUN, "accepted for mlx_lm.lora's sake: this command always trains")
    )
    test: bool = field(default=False, metadata=_about(_RUN, "evaluate on the test set after training"))
    fine_tune_type: str = field(
        default="lora",
        metadata=_about(
            _TUNE, "lora, dora (adapters), or full (the layers themselves)", choices=("lora", "dora", "full")
        ),
    )
    from_scratch: bool = field(
        default=False,
        metadata=_about(
            _TUNE, "random weights drawn from the model's config.json; trains all of them and writes a checkpoint"
        ),
    )
    optimizer: str = field(
        default="adam", metadata=_about(_OPTIMIZER, "any optimizer of MLX: adam, adamw, muon, sgd, adafactor, lion ...")
    )
    optimizer_config: dict[str, dict[str, Any]] = field(
        default_factory=dict,
        metadata=_about(_OPTIMIZER, "settings by optimizer name, such as {adamw: {weight_decay: 0.01}}", flag=False),
    )
    learning_rate: float = field(default=1e-5, metadata=_about(_OPTIMIZER, "step size, where no lr_schedule is given"))
    lr_schedule: dict[str, Any] | None = field(
        default=None,
        metadata=_about(_OPTIMIZER, "name, arguments, warmup, warmup_init; in optimizer steps", flag=False),
    )
    grad_clip: float | None = field(
        default=None, metadata=_about(_OPTIMIZER, "largest global gradient norm; longer gradients are scaled")
    )
    grad_accumulation_steps: int = field(
        default=1, metadata=_about(_OPTIMIZER, "iterations whose gradients make one update, weighted by their tokens")
    )
    expert_updates: str = field(
        default="dense",
        metadata=_about(
            _OPTIMIZER,
            "active: experts without tokens keep adapters and moments as they are (lazy AdamW); dense: all move",
            choices=("dense", "active"),
        ),
    )
    seed: int = field(default=0, metadata=_about(_RUN, "seed of weights, dropout and data order"))
    num_layers: int = field(
        default=16, metadata=_about(_TUNE, "how many layers train, from the last; -1 for all, as when there are fewer")
    )
    lora_parameters: LoraConfig = field(
        default_factory=LoraConfig,
        metadata=_about(_TUNE, "rank, scale, dropout, keys, exclude, layer_kinds, layers, rslora", flag=False),
    )
    batch_size: int = field(default=4, metadata=_about(_RUN, "rows of a batch, over all ranks"))
    iters: int = field(default=1000, metadata=_about(_RUN, "iterations to train for"))
    grad_checkpoint: bool = field(
        default=False, metadata=_about(_RUN, "recompute each layer in the backward pass: less memory, more time")
    )
    max_seq_length: int = field(default=2048, metadata=_about(_DATA, "longest row, in tokens"))
    overlong: str = field(
        default="truncate",
        metadata=_about(_DATA, "what to do with an example longer than that", choices=("truncate", "skip")),
    )
    mask_prompt: bool | None = field(
        default=None,
        metadata=_about(
            _DATA, "loss on completions only: the default for prompts and chats; --no-mask-prompt: on every token"
        ),
    )
    min_pixels: int | None = field(
        default=None, metadata=_about(_DATA, "smaller images are scaled up to this area; default: the model's own")
    )
    max_pixels: int | None = field(
        default=None, metadata=_about(_DATA, "larger images are scaled down to this area; default: the model's own")
    )
    fps: float | None = field(
        default=None,
        metadata=_about(
            _DATA, "frames a second to take from a video, or of a video given as frames; default: the model's own"
        ),
    )
    video_max_frames: int | None = field(
        default=None, metadata=_about(_DATA, "most frames to take of a video; default: the model's own")
    )
    pack: bool = field(
        default=False,
        metadata=_about(_DATA, "several documents to a row, kept apart in attention, recurrence and convolution"),
    )
    val_batches: int = field(
        default=25, metadata=_about(_RUN, "batches of an evaluation; -1 for the whole validation set, 0 for none")
    )
    test_batches: int = field(default=500, metadata=_about(_RUN, "batches of the test; -1 for the whole test set"))
    steps_per_report: int = field(default=10, metadata=_about(_SAVE, "iterations between reports of the training loss"))
    steps_per_eval: int = field(default=200, metadata=_about(_RUN, "iterations between evaluations"))
    save_every: int = field(default=100, metadata=_about(_SAVE, "iterations between saves"))
    early_stopping: int | None = field(
        default=None, metadata=_about(_RUN, "stop after so many evaluations without a lower loss")
    )
    adapter_path: str = field(default="adapters", metadata=_about(_SAVE, "folder for everything that a run writes"))
    resume: bool = field(
        default=False, metadata=_about(_SAVE, "continue the run saved in the adapter path, bit for bit")
    )
    parts: str = field(
        default="language",
        metadata=_about(
            _TUNE, "which parts of a model with images train, separated by commas: language, vision, projector"
        ),
    )
    resume_adapter_file: str | None = field(default=None, metadata=_about(_TUNE, "start from these adapter weights"))
    clear_cache_threshold: int | None = field(
        default=None,
        metadata=_about(
            _RUN,
            "clear MLX's cache between iterations above this size (such as 4GB); default: 0, and on an NVIDIA GPU a "
            "quarter of its memory",
        ),
    )
    report_to: str | None = field(default=None, metadata=_about(_SAVE, "any of tensorboard,wandb,swanlab"))
    project_name: str | None = field(
        default=None, metadata=_about(_SAVE, "project for those; default: the current folder's name")
    )
    trust_remote_code: bool = field(
        default=False, metadata=_about(_MODEL, "run code that comes with the model or tokenizer")
    )
    prompt_feature: str | None = field(
        default=None, metadata=_about(_DATA, "key of the prompt; default prompt", flag=False)
    )
    text_feature: str | None = field(
        default=None, metadata=_about(_DATA, "key of a plain text; default text", flag=False)
    )
    completion_feature: str | None = field(
        default=None, metadata=_about(_DATA, "key of the completion; default completion", flag=False)
    )
    chat_feature: str | None = field(
        default=None, metadata=_about(_DATA, "key of a chat; default messages", flag=False)
    )


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which here reads 1e-5 as a number, as YAML 1.2 does; PyYAML by itself reads a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        UserError: the file cannot be read, is not YAML, or does not hold a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"config {path}: cannot be read ({error.strerror}); give the path of a YAML file.") from error
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"config {path}: not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"config {path}: expected `key: value` lines, got {type(content).__name__}.")
    return content


def nearest(word: str, known: list[str]) -> str:
    """Return " (did you mean 'x'?)" for the known word closest to `word`, or an empty string if none is close."""
    closest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {closest[0]!r}?)" if closest else ""


def build(cls: type, values: dict[str, Any], where: str) -> Any:
    """Make a configuration from a mapping, such as one read from YAML.

    Args:
        cls: TrainConfig or LoraConfig.
        values: option names to values; `lora_parameters` may be a mapping itself.
        where: what to name as the source in error messages, such as the file's path.

    Raises:
        UserError: a key is unknown, or a value has the wrong type.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise UserError(f"{where}: unknown key {key!r}{nearest(str(key), list(fields))}.")
    checked = {}
    for name, value in values.items():
        if name == "lora_parameters" and isinstance(value, dict):
            checked[name] = build(LoraConfig, value, f"{where}: lora_parameters")
        else:
            checked[name] = _checked(value, str(fields[name].type), f"{where}: {name}")
    return cls(**checked)


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
    "LoraConfig": (LoraConfig,),
}


def _checked(value: Any, annotation: str, where: str) -> Any:
    """Return the value, an integer as a float where the annotation asks for one, or refuse another type."""
    names = [part.split("[")[0].strip() for part in re.sub(r"\[.*\]", "", annotation).split("|")]
    if "Any" in names or (value is None and "None" in names):
        return value
    allowed = tuple(t for name in names for t in _TYPES.get(name, ()))
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise UserError(f"{where}: expected {annotation}, got {value!r} ({type(value).__name__}).")
    return float(value) if "float" in names and isinstance(value, int) else value
