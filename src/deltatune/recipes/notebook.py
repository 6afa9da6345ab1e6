"""Reads the arguments of an Unsloth notebook or script from its text. Nothing of it is executed."""

from __future__ import annotations

import ast
import json
import operator
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError, reason
from ..options.values import short

_MODELS = ("FastLanguageModel", "FastVisionModel", "FastModel", "FastTextModel")
_METHODS = ("from_pretrained", "get_peft_model")
#: What Unsloth's functions take where a call is silent (translate.py names the source).
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SILENT: dict[str, dict[str, Any]] = {
    "FastLanguageModel.get_peft_model": {"target_modules": _TARGETS},
    "FastVisionModel.get_peft_model": {"finetune_vision_layers": True, "finetune_language_layers": True},
}
#: Classes of TRL and transformers whose arguments are options, and the loss that a class stands for.
_CLASSES = {"SFTConfig": "sft", "SFTTrainer": "sft", "UnslothTrainer": "sft"}
#: Those whose defaults are transformers' own; Unsloth gives TRL's classes others.
PLAIN_CLASSES = ("TrainingArguments", "UnslothTrainingArguments")
_CLASSES |= dict.fromkeys(PLAIN_CLASSES, "")
_CLASSES |= {
    f"{name}{part}": name.lower()
    for name in ("DPO", "ORPO", "KTO", "CPO", "GRPO", "PPO", "RLOO", "Reward")
    for part in ("Config", "Trainer")
}
_POSITIONAL = {"from_pretrained": ("model_name", "max_seq_length"), "load_dataset": ("path", "name")}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Computed:
    """A value that the program computes when it runs, as it is written there."""

    text: str

    def __repr__(self) -> str:
        return self.text


def read_calls(path: Path) -> dict[str, Any]:
    """Return the arguments by name, with `load_dataset`, `the class of the trainer` and what else the calls say.

    Args:
        path: a notebook (.ipynb) or a Python file.

    Raises:
        UserError: the file cannot be read, is not Python, or has none of the calls.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}).") from error
    program = _of_notebook(text, path) if path.suffix == ".ipynb" else text
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(_without_magic(program))
            return _arguments(tree, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{path}{where}: not Python ({reason(error) or type(error).__name__}).") from error


def _of_notebook(text: str, path: Path) -> str:
    """Return the code cells of a notebook as one program."""
    try:
        cells = json.loads(text)["cells"]
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        programs = ["".join(source) for source in sources]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not a Jupyter notebook ({reason(error)}).") from error
    # A cell in another language, such as %%bash, is no Python.
    python = [
        program for program in programs if not program.startswith("%%") or program.startswith(("%%capture", "%%time"))
    ]
    return "\n".join(python)


def _without_magic(program: str) -> str:
    """Return the program with IPython's own lines (!pip, %matplotlib) as blocks that do nothing."""
    lines = program.splitlines()
    for number, line in enumerate(lines):
        words = line.lstrip()
        if words.startswith(("!", "%")) or words.endswith("?"):
            lines[number] = line[: len(line) - len(words)] + "pass"
    return "\n".join(lines)


def _arguments(tree: ast.Module, path: Path) -> dict[str, Any]:
    constants = _constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls_options: dict[str, Any] = {}
    methods: set[str] = set()
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = _name(call)
        if name in methods:
            continue  # A notebook loads its result again at its end; the first call is the training's.
        methods |= {method for method in _METHODS if method == name}
        arguments = {} if name is None else _call_arguments(call, name, constants)
        if name == "train_on_responses_only":
            calls_options["responses only"] = True
        elif name == "load_dataset":
            if "load_dataset" in calls_options:
                calls_options.setdefault("further data sets", []).append(arguments.get("path"))
            else:
                calls_options["load_dataset"] = arguments
        elif name is not None:
            if _CLASSES.get(name):
                calls_options.setdefault("the class of the trainer", _CLASSES[name])
            if name in PLAIN_CLASSES:
                calls_options[PLAIN_CLASSES[0]] = True
            arguments = _SILENT.get(f"{_owner(call)}.{name}", {}) | arguments
            calls_options |= {key: value for key, value in arguments.items() if key not in calls_options}
    if not calls_options.keys() - {"load_dataset", "further data sets"}:
        raise UserError(
            f"{path}: none of Unsloth's calls is in it; expected {_MODELS[0]}.from_pretrained(...), "
            "get_peft_model(...) or SFTConfig(...)."
        )
    if methods:
        calls_options.setdefault("use_gradient_checkpointing", "unsloth")
        if not any(calls_options.get(name) for name in ("load_in_8bit", "load_in_16bit", "full_finetuning")):
            calls_options.setdefault("load_in_4bit", True)
    return calls_options


def _owner(call: ast.Call) -> str | None:
    function = call.func
    owned = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return function.value.id if owned else None  # type: ignore[attr-defined]


def _name(call: ast.Call) -> str | None:
    """The name of a call that is read, or None."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in _METHODS:
        return function.attr if _owner(call) in _MODELS else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name if name in _CLASSES or name in ("load_dataset", "train_on_responses_only") else None


def _call_arguments(call: ast.Call, name: str, constants: dict[str, Any]) -> dict[str, Any]:
    arguments = {
        key: _value(argument, constants)
        for key, argument in zip(_POSITIONAL.get(name, ()), call.args, strict=False)
        if not isinstance(argument, ast.Starred)
    }
    for keyword in call.keywords:
        value = _value(keyword.value, constants)
        if keyword.arg is not None:
            arguments[keyword.arg] = value
        elif isinstance(value, dict):
            arguments |= {str(key): entry for key, entry in value.items()}
        else:
            arguments[f"**{short(value)}"] = Computed("further arguments")
    return arguments


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names that are assigned once, to a value that is written out."""
    values: dict[str, Any] = {}
    assigned: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                value = _value(node.value, values)
                if target.id in assigned and values.get(target.id) != value:
                    values.pop(target.id, None)
                elif not isinstance(value, Computed):
                    values[target.id] = value
                assigned.add(target.id)
    return values


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    """The value that is written, also by a constant's name or as arithmetic with numbers; else Computed."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        members = [_value(member, constants) for member in node.elts]
        return members if not any(isinstance(member, Computed) for member in members) else Computed(_text(node))
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key, constants) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, (_value(entry, constants) for entry in node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand, constants)
        return -value if _is_number(value) else Computed(_text(node))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sides = _value(node.left, constants), _value(node.right, constants)
        if all(map(_is_number, sides)):
            try:
                return _OPERATORS[type(node.op)](*sides)
            except (ArithmeticError, ValueError):
                return Computed(_text(node))
    return Computed(_text(node))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:60]} ..."
