"""The options of a training run, and the YAML files that set them. Each option has its one default here.

Names and defaults are those of `mlx_lm.lora` for every option that it has; docs/guides/from-mlx-lm.md lists the
differences.
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
_LOSS = "loss"
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
            _DATA, "folder that holds train.jsonl, valid.jsonl and test.jsonl, or the name of a Hugging Face data set"
        ),
    )
    hf_dataset: Any = field(
        default=None,
        metadata=_about(
            _DATA, "a Hugging Face data set, or a list of them, with the keys that mlx_lm.lora reads", flag=False
        ),
    )
    train: bool = field(
        default=True, metadata=_about(_RUN, "accepted because mlx_lm.lora has it; this command always trains")
    )
    test: bool = field(default=False, metadata=_about(_RUN, "evaluate the model on the test set after training"))
    fine_tune_type: str = field(
        default="lora",
        metadata=_about(
            _TUNE,
            "train LoRA adapters (lora), DoRA adapters (dora) or the layers' own weights (full)",
            choices=("lora", "dora", "full"),
        ),
    )
    from_scratch: bool = field(
        default=False,
        metadata=_about(
            _TUNE, "build the model of config.json with random weights, train all of them, and write a whole checkpoint"
        ),
    )
    loss: str = field(
        default="sft",
        metadata=_about(
            _LOSS,
            "what is learnt: sft imitates the data; the others learn which of two answers is better, kto whether one "
            "answer is good",
            choices=("sft", "dpo", "orpo", "kto", "simpo", "cpo"),
        ),
    )
    loss_variant: str = field(
        default="sigmoid",
        metadata=_about(
            _LOSS,
            "published form of dpo (sigmoid, robust, hinge or ipo) or cpo (sigmoid, hinge or ipo)",
            choices=("sigmoid", "robust", "hinge", "ipo"),
        ),
    )
    beta: float = field(
        default=0.1,
        metadata=_about(
            _LOSS,
            "factor of the rewards of a preference loss, and orpo's weight of the odds ratio; the authors of simpo "
            "use 2.0",
        ),
    )
    gamma: float = field(
        default=0.5, metadata=_about(_LOSS, "margin by which simpo wants the chosen answer's reward to be larger")
    )
    label_smoothing: float = field(
        default=0.0,
        metadata=_about(_LOSS, "share of pairs assumed to be labelled wrongly, from 0 to below 0.5 (dpo, simpo, cpo)"),
    )
    optimizer: str = field(
        default="adam",
        metadata=_about(_OPTIMIZER, "an optimizer of MLX, such as adam, adamw, muon, sgd, adafactor or lion"),
    )
    optimizer_config: dict[str, dict[str, Any]] = field(
        default_factory=dict,
        metadata=_about(
            _OPTIMIZER, "settings for each optimizer by name, such as {adamw: {weight_decay: 0.01}}", flag=False
        ),
    )
    learning_rate: float = field(
        default=1e-5, metadata=_about(_OPTIMIZER, "learning rate, used when no lr_schedule is given")
    )
    lr_schedule: dict[str, Any] | None = field(
        default=None,
        metadata=_about(
            _OPTIMIZER,
            "learning rate schedule, counted in optimizer steps, with the keys name, arguments, warmup and warmup_init",
            flag=False,
        ),
    )
    grad_clip: float | None = field(
        default=None,
        metadata=_about(_OPTIMIZER, "largest global gradient norm; a larger gradient is scaled down to this norm"),
    )
    grad_accumulation_steps: int = field(
        default=1,
        metadata=_about(
            _OPTIMIZER, "number of iterations whose gradients, weighted by their tokens, make one optimizer step"
        ),
    )
    expert_updates: str = field(
        default="dense",
        metadata=_about(
            _OPTIMIZER,
            "dense updates all experts; active leaves the adapters and optimizer moments of an expert that received no "
            "tokens as they are (lazy AdamW)",
            choices=("dense", "active"),
        ),
    )
    seed: int = field(
        default=0, metadata=_about(_RUN, "seed of the random weights, the dropout and the order of the data")
    )
    num_layers: int = field(
        default=16,
        metadata=_about(
            _TUNE, "number of layers to train, counted from the last; -1, or a number above the model's, trains all"
        ),
    )
    lora_parameters: LoraConfig = field(
        default_factory=LoraConfig,
        metadata=_about(
            _TUNE,
            "options of the adapters: rank, scale, dropout, keys, exclude, layer_kinds, layers and rslora",
            flag=False,
        ),
    )
    batch_size: int = field(default=4, metadata=_about(_RUN, "number of rows in a batch, summed over all ranks"))
    iters: int = field(default=1000, metadata=_about(_RUN, "number of iterations to train for"))
    grad_checkpoint: bool = field(
        default=False,
        metadata=_about(_RUN, "recompute each layer in the backward pass, which takes less memory and more time"),
    )
    max_seq_length: int = field(default=2048, metadata=_about(_DATA, "largest length of a row, in tokens"))
    overlong: str = field(
        default="truncate",
        metadata=_about(
            _DATA,
            "whether an example longer than max_seq_length is cut (truncate) or left out (skip)",
            choices=("truncate", "skip"),
        ),
    )
    mask_prompt: bool | None = field(
        default=None,
        metadata=_about(
            _DATA,
            "count only completions in the loss, which is the default for prompts and chats; --no-mask-prompt counts "
            "every token",
        ),
    )
    min_pixels: int | None = field(
        default=None,
        metadata=_about(_DATA, "area, in pixels, to which smaller images are scaled up; default: the model's own"),
    )
    max_pixels: int | None = field(
        default=None,
        metadata=_about(_DATA, "area, in pixels, to which larger images are scaled down; default: the model's own"),
    )
    fps: float | None = field(
        default=None,
        metadata=_about(
            _DATA,
            "frames per second to take from a video file, or at which a list of frames was recorded; default: "
            "the model's own",
        ),
    )
    video_max_frames: int | None = field(
        default=None, metadata=_about(_DATA, "largest number of frames to take from a video; default: the model's own")
    )
    pack: bool = field(
        default=False,
        metadata=_about(
            _DATA, "put several documents into a row; attention, recurrence and convolution do not cross between them"
        ),
    )
    val_batches: int = field(
        default=25,
        metadata=_about(
            _RUN, "number of batches in an evaluation; -1 takes the whole validation set, 0 turns evaluation off"
        ),
    )
    test_batches: int = field(
        default=500, metadata=_about(_RUN, "number of batches in the test; -1 takes the whole test set")
    )
    steps_per_report: int = field(
        default=10, metadata=_about(_SAVE, "number of iterations between reports of the training loss")
    )
    steps_per_eval: int = field(default=200, metadata=_about(_RUN, "number of iterations between evaluations"))
    save_every: int = field(default=100, metadata=_about(_SAVE, "number of iterations between saves"))
    early_stopping: int | None = field(
        default=None, metadata=_about(_RUN, "stop training after this many evaluations without a lower loss")
    )
    adapter_path: str = field(default="adapters", metadata=_about(_SAVE, "folder to which a run writes all its files"))
    resume: bool = field(
        default=False,
        metadata=_about(_SAVE, "continue the run that is saved in adapter_path, with the same results bit for bit"),
    )
    parts: str = field(
        default="language",
        metadata=_about(_TUNE, "parts of a vision model to train, separated by commas: language, vision, projector"),
    )
    resume_adapter_file: str | None = field(
        default=None, metadata=_about(_TUNE, "file of adapter weights to start from")
    )
    clear_cache_threshold: int | None = field(
        default=None,
        metadata=_about(
            _RUN,
            "size, such as 4GB, above which MLX's cache is cleared between iterations; default: 0, or a quarter of "
            "the GPU's memory on NVIDIA",
        ),
    )
    report_to: str | None = field(
        default=None, metadata=_about(_SAVE, "loggers to report to, separated by commas: tensorboard, wandb, swanlab")
    )
    project_name: str | None = field(
        default=None,
        metadata=_about(_SAVE, "project name for the loggers of report_to; default: the current folder's name"),
    )
    trust_remote_code: bool = field(
        default=False, metadata=_about(_MODEL, "allow code that comes with the model or its tokenizer to run")
    )
    prompt_feature: str | None = field(
        default=None, metadata=_about(_DATA, "key that holds the prompt of a row; default: prompt", flag=False)
    )
    text_feature: str | None = field(
        default=None, metadata=_about(_DATA, "key that holds the plain text of a row; default: text", flag=False)
    )
    completion_feature: str | None = field(
        default=None, metadata=_about(_DATA, "key that holds the completion of a row; default: completion", flag=False)
    )
    chat_feature: str | None = field(
        default=None, metadata=_about(_DATA, "key that holds the messages of a chat; default: messages", flag=False)
    )


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, extended to read 1e-5 as a number, as YAML 1.2 does; by default PyYAML reads a string."""


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
        raise UserError(f"config {path}: the file is not YAML: {error}") from error
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
    """Return the value, converted from int to float where the annotation asks for a float; refuse any other type."""
    names = [part.split("[")[0].strip() for part in re.sub(r"\[.*\]", "", annotation).split("|")]
    if "Any" in names or (value is None and "None" in names):
        return value
    allowed = tuple(t for name in names for t in _TYPES.get(name, ()))
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise UserError(f"{where}: expected {annotation}, got {value!r} ({type(value).__name__}).")
    return float(value) if "float" in names and isinstance(value, int) else value
