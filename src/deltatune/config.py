"""Every option of a training run: one dataclass a concern, one default an option, and the YAML that fills them.

Names and defaults are those of `mlx_lm.lora` wherever it has the option; docs/options.md lists the differences.
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


@dataclass
class LoraConfig:
    """YAML key `lora_parameters`. `keys` are name patterns (fnmatch) of modules; None means every linear."""

    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    keys: list[str] | None = None
    exclude: list[str] = field(default_factory=list)
    layer_kinds: list[str] | None = None
    layers: list[int] | None = None
    rslora: bool = False


@dataclass
class TrainConfig:
    """One training run. Lengths in tokens, rates per optimizer step, counts in iterations (micro-batches)."""

    model: str = "Qwen/Qwen3-0.6b"
    data: str = "mlx-community/WikiSQL"
    hf_dataset: Any = None
    train: bool = True
    test: bool = False
    fine_tune_type: str = "lora"
    from_scratch: bool = False
    optimizer: str = "adam"
    optimizer_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    learning_rate: float = 1e-5
    lr_schedule: dict[str, Any] | None = None
    grad_clip: float | None = None
    seed: int = 0
    num_layers: int = 16
    lora_parameters: LoraConfig = field(default_factory=LoraConfig)
    batch_size: int = 4
    iters: int = 1000
    grad_accumulation_steps: int = 1
    grad_checkpoint: bool = False
    max_seq_length: int = 2048
    overlong: str = "truncate"
    mask_prompt: bool | None = None
    pack: bool = False
    val_batches: int = 25
    test_batches: int = 500
    steps_per_report: int = 10
    steps_per_eval: int = 200
    save_every: int = 100
    early_stopping: int | None = None
    adapter_path: str = "adapters"
    resume: bool = False
    resume_adapter_file: str | None = None
    clear_cache_threshold: int = 0
    report_to: str | None = None
    project_name: str | None = None
    trust_remote_code: bool = False
    prompt_feature: str | None = None
    text_feature: str | None = None
    completion_feature: str | None = None
    chat_feature: str | None = None


class _Loader(yaml.SafeLoader):
    """PyYAML reads 1e-5 as a string; YAML 1.2, and everybody who writes a learning rate, as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. UserError where the file is missing, not YAML, or not a mapping."""
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
    """` (did you mean 'x'?)` for the nearest known word, or an empty string."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def build(cls: type, values: dict[str, Any], where: str) -> Any:
    """A `cls` dataclass from a mapping, nested dataclasses included; unknown keys and wrong types are refused."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise UserError(f"{where}: unknown key {key!r}{nearest(str(key), list(fields))}.")
    known = dict(values)
    for name, value in values.items():
        if name == "lora_parameters" and isinstance(value, dict):
            known[name] = build(LoraConfig, value, f"{where}: lora_parameters")
        else:
            known[name] = _checked(value, str(fields[name].type), f"{where}: {name}")
    return cls(**known)


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
    names = [part.split("[")[0].strip() for part in re.sub(r"\[.*\]", "", annotation).split("|")]
    if "Any" in names or (value is None and "None" in names):
        return value
    allowed = tuple(t for name in names for t in _TYPES.get(name, ()))
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise UserError(f"{where}: expected {annotation}, got {value!r} ({type(value).__name__}).")
    return float(value) if "float" in names and isinstance(value, int) else value
