"""How a value of another trainer's option is put into a draft of deltatune's options.

Each function takes the draft and the value. It raises UserError, with the reason, for what cannot be said here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from ..errors import UserError
from .draft import Draft, refuse_trainer

Put = Callable[[Draft, Any], None]


def option(name: str) -> Put:
    return lambda draft, value: draft.set(name, value)


def adapter(name: str) -> Put:
    return lambda draft, value: draft.adapt(name, value)


def per_update(name: str) -> Put:
    def put(draft: Draft, value: Any) -> None:
        draft.set(name, value)  # Checks the value; the draft multiplies it when the accumulation is known.
        draft.per_update[name] = value

    return put


def rate(name: str, *kinds: type) -> Put:
    def put(draft: Draft, value: Any) -> None:
        setattr(draft.rate, name, _of_kind(value, kinds))

    return put


def not_here(why: str) -> Put:
    def put(draft: Draft, value: Any) -> None:
        raise UserError(why)

    return put


def warmup(draft: Draft, value: Any) -> None:
    """Put a number of updates or, below 1, a share of them, as transformers 5 takes it."""
    if 0 < _number(value) < 1:
        draft.rate.warmup_share = value
    elif int(value) == value:
        draft.rate.warmup = int(value)
    else:
        raise UserError("expected a whole number, or a share below 1")


def overlong(draft: Draft, value: Any) -> None:
    draft.set("overlong", _one_of({"drop": "skip", "truncate": "truncate"}, value, "deltatune has skip and truncate"))


def model(draft: Draft, name: Any) -> None:
    if isinstance(name, str) and name.endswith("bnb-4bit"):
        raise UserError("MLX does not load weights of bitsandbytes; give the original, or one that mlx_lm.convert made")
    draft.set("model", name)


def updates(draft: Draft, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError("expected a whole number")
    # -1 means that epochs count.
    draft.rate.updates = value if value > 0 else None


def kind(draft: Draft, value: Any) -> None:
    kinds = {"lora": "lora", "qlora": "lora", "dora": "dora", "full": "full"}
    draft.set("fine_tune_type", _one_of(kinds, value, "deltatune has lora, dora and full"))
    if value == "qlora":
        raise UserError(QUANTISE)


QUANTISE = "quantise the model with mlx_lm.convert -q, or take one of mlx-community, and give that as model"


def full(draft: Draft, value: Any) -> None:
    draft.set("fine_tune_type", "full" if value else "lora")


def dora(draft: Draft, value: Any) -> None:
    draft.set("fine_tune_type", "dora" if value else "lora")


def modules(draft: Draft, value: Any) -> None:
    names = value.split(",") if isinstance(value, str) else value
    if value is True or (isinstance(names, list) and len(names) == 1 and names[0] in ("all", "all-linear")):
        return  # The default.
    if isinstance(names, list):
        names = [name.strip() if isinstance(name, str) else name for name in names]
    draft.adapt("keys", names)


def init(draft: Draft, value: Any) -> None:
    if value == "pissa" or (isinstance(value, str) and value.startswith("pissa_niter")):
        draft.adapt("init", "pissa")
    elif value is not True:
        raise UserError("deltatune has zero and pissa")


def pissa(draft: Draft, value: Any) -> None:
    draft.adapt("init", "pissa" if value else "zero")


def checkpoint(draft: Draft, value: Any) -> None:
    draft.set("grad_checkpoint", bool(value) if value in (True, False, "unsloth", "true", "True") else value)


def optimizer(draft: Draft, value: Any) -> None:
    name = str(value).lower()
    if name.startswith("paged_"):
        name = name.removeprefix("paged_")
    if name.startswith("adamw"):
        draft.set("optimizer", "adamw8bit" if "8bit" in name else "adamw")
    elif name in ("adafactor", "sgd", "muon") or name.startswith("lion"):
        draft.set("optimizer", name.partition("_")[0])
    else:
        raise UserError("MLX has none of this name; adamw is taken")


def clip(draft: Draft, value: Any) -> None:
    """Put the largest norm of the gradient; there, 0 switches it off."""
    draft.set("grad_clip", value or None)


def weight_decay(draft: Draft, value: Any) -> None:
    draft.adam["weight_decay"] = _number(value)


def beta(index: int) -> Put:
    def put(draft: Draft, value: Any) -> None:
        draft.adam.setdefault("betas", [0.9, 0.999])[index] = _number(value)

    return put


def epsilon(draft: Draft, value: Any) -> None:
    draft.adam["eps"] = _number(value)


def _number(value: Any) -> float:
    return float(_of_kind(value, (int, float)))


def _of_kind(value: Any, kinds: tuple[type, ...]) -> Any:
    """Return the value; UserError unless it is of one of these kinds, and finite where it is a number."""
    if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, float) and not isfinite(value)):
        raise UserError("expected a text" if str in kinds else "expected a number")
    return value


def _one_of(ours: Mapping[str, str], value: Any, known: str) -> str:
    """Return our word for theirs; UserError, which says what is `known`, where there is none."""
    if not isinstance(value, str) or value not in ours:
        raise UserError(known)
    return ours[value]


def prompts_count(draft: Draft, value: Any) -> None:
    if value is True:
        draft.set("mask_prompt", False)


def last_turn(draft: Draft, value: Any) -> None:
    draft.set("chat_turns", "last" if value else "each")


_LOSSES = {"sft": "sft", "pt": "sft", "ipo": "dpo"} | {name: name for name in ("dpo", "orpo", "kto", "simpo", "cpo")}


def loss(draft: Draft, value: Any) -> None:
    if not isinstance(value, str) or value not in _LOSSES:
        raise refuse_trainer(value)
    if _LOSSES[value] != "sft":
        draft.set("loss", _LOSSES[value])
    if value == "ipo":
        draft.set("loss_variant", "ipo")


def variant(draft: Draft, value: Any) -> None:
    if value in ("orpo", "simpo"):
        draft.set("loss", value)
    else:
        draft.set("loss_variant", value)


def report(draft: Draft, value: Any) -> None:
    names = [name for name in (value if isinstance(value, list) else [value]) if name not in ("none", "all")]
    if names:
        draft.set("report_to", ",".join(map(str, names)))


def wandb(draft: Draft, value: Any) -> None:
    draft.set("report_to", "wandb")
    draft.set("project_name", value)


def text(draft: Draft, value: Any) -> None:
    if value != "text":
        draft.set("text_feature", value)


def template(draft: Draft, value: Any) -> None:
    """Refuse every template but the tokenizer's own."""
    if value not in ("tokenizer_default", "default"):
        raise UserError("the template in the tokenizer's files serves")


def held_out(draft: Draft, value: Any) -> None:
    draft.held_out = _number(value)


def thinking(draft: Draft, value: Any) -> None:
    draft.set("chat_template_config", {"enable_thinking": value})


def part(name: str) -> Put:
    return lambda draft, value: draft.part(name, bool(value))


def frozen(name: str) -> Put:
    return lambda draft, value: draft.part(name, not value)


def hub_data(draft: Draft, value: Any) -> None:
    """A data set as load_dataset names it: its path, and further arguments."""
    split = value.pop("split", "train")
    path, config = value.pop("path", None), value
    if not isinstance(path, str) or not isinstance(split, str):
        raise UserError("the data set's name and split are not written there")
    entry: dict[str, Any] = {"path": path, "train_split": split}
    draft.data.append(entry | ({"config": config} if config else {}))


#: Types of axolotl whose rows deltatune knows by their keys.
_ROW_TYPES = ("alpaca", "sharegpt", "chat_template", "completion", "input_output", "orpo", "chatml", "llama3", "None")
_MESSAGE_KEYS = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
_FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def axolotl_data(draft: Draft, value: Any) -> None:
    for number, data_set in enumerate(value if isinstance(value, list) else [value], 1):
        where = f"datasets {number}"
        if not isinstance(data_set, dict) or not isinstance(data_set.get("path"), str):
            raise UserError("expected a list of mappings with path")
        more = {key: setting for key, setting in data_set.items() if setting not in (None, False, [], {})}
        path, files = more.pop("path"), more.pop("data_files", None)
        kind = more.pop("ds_type", None) or next((kind for end, kind in _FILES.items() if path.endswith(end)), None)
        entry = {"path": path, "train_split": str(more.pop("split", "train"))}
        if files or (kind and path.endswith(tuple(_FILES))):
            entry = {"path": kind or path, "config": {"data_files": files or path}} | {"train_split": "train"}
        elif "name" in more:
            entry["config"] = {"name": more.pop("name")}
        for theirs, ours, known in (
            ("field_messages", "chat_feature", ("messages", "conversations")),
            ("field", "text_feature", ("text",)),
        ):
            if (column := more.pop(theirs, known[0])) not in known:
                entry[ours] = column
        if str(more.get("type")).partition(".")[0] in _ROW_TYPES:
            more.pop("type", None)
        if more.get("message_property_mappings") in _MESSAGE_KEYS:
            del more["message_property_mappings"]
        draft.data.append(entry)
        for key, setting in more.items():
            draft.leave(f"{where}: {key}", setting, "rows are recognised by their keys")


def named_data(draft: Draft, value: Any) -> None:
    raise UserError("an entry of dataset_info.json; as data, give the file's folder or a name of the hub")


MLX_LM = "a folder of PEFT: deltatune import --peft turns it into an adapter for resume_adapter_file"
