"""Options that a run reads only under a condition; it reads all others always. One that is set in vain is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import UserError
from .config import TrainConfig

#: By the names of options, separated by blanks: the condition in words, behind "only", and as a function of all options
#: and, of those of a run, its Facts.
Conditions = dict[str, tuple[str, Callable[..., Any]]]


class Facts(NamedTuple):
    """The facts about the data and the model of a run; all are true as long as neither is read."""

    pictures: bool = True
    routers: bool = True
    turns: bool = True


def _makes_rate(c: TrainConfig) -> bool:
    return c.optimizer.lower() == "adafactor" and (c.optimizer_config.get("adafactor") or {}).get("relative_step", True)


def _other_entries(c: TrainConfig) -> bool:
    return any(entry for name, entry in c.optimizer_config.items() if name != c.optimizer.lower())


#: Of a run.
TRAINING: Conditions = {
    "train": ("as true: this command always trains, and deltatune eval tests a model", lambda c, f: c.train),
    "loss_variant": ("with loss: dpo, cpo or grpo", lambda c, f: c.loss in ("dpo", "cpo", "grpo")),
    "beta": ("with another loss than sft, such as loss: dpo", lambda c, f: c.loss != "sft"),
    "teacher lmbda": ("with loss: distill", lambda c, f: c.loss == "distill"),
    "temperature": ("with loss: grpo or distill", lambda c, f: c.loss in ("grpo", "distill")),
    "memory": (
        "without loss: grpo, since each sampled token would read the layers on the disk; take a model in 4 bits or "
        "less, a smaller batch_size or num_generations",
        lambda c, f: c.loss != "grpo"),
    "max_completion_length stop_strings top_p top_k min_p": (
        "where the model samples answers: with loss: grpo, or loss: distill and lmbda above 0, which takes those of "
        "the data at 0",
        lambda c, f: c.samples_answers),
    "num_generations epsilon epsilon_high num_iterations mask_truncated_completions sampler_correction": (
        "with loss: grpo", lambda c, f: c.loss == "grpo"),
    "scale_rewards": (
        "with loss: grpo, and not with loss_variant: rloo",
        lambda c, f: c.loss == "grpo" and c.loss_variant != "rloo"),
    "mask_prompt chat_turns": (
        "without loss: grpo, which samples its answers and measures them by their rewards",
        lambda c, f: c.loss != "grpo"),
    "mtp": (
        "with loss: sft, and without from_scratch and memory",
        lambda c, f: c.loss == "sft" and not c.from_scratch and c.memory is None),
    "mtp_weight mtp_trunk_gradient": ("with mtp: true", lambda c, f: c.mtp is True),
    "parts": ("without mtp: only, which trains the head alone", lambda c, f: c.mtp != "only"),
    "gamma": ("with loss: simpo", lambda c, f: c.loss == "simpo"),
    "label_smoothing": (
        "with loss: dpo, simpo or cpo, and loss_variant: sigmoid or robust",
        lambda c, f: c.loss in ("dpo", "simpo", "cpo") and c.loss_variant in (None, "sigmoid", "robust")),
    "project_name": ("with report_to", lambda c, f: c.report_to),
    "test_batches": ("with test", lambda c, f: c.test),
    "val_split": ("where val_batches is not 0, and without streaming", lambda c, f: c.val_batches and not c.streaming),
    "early_stopping": ("where val_batches is not 0", lambda c, f: c.val_batches),
    "steps_per_eval": (
        "where val_batches is not 0, or with sample_prompts", lambda c, f: c.val_batches or c.sample_prompts),
    "reward_funcs reward_weights reward_timeout reward_errors": ("with loss: grpo", lambda c, f: c.loss == "grpo"),
    "optimizer_config": ("in the entry of the chosen optimizer", lambda c, f: not _other_entries(c)),
    "learning_rate lr_schedule warmup": (
        "where adafactor has relative_step: false, and does not make its own rate", lambda c, f: not _makes_rate(c)),
    "learning_rate warmup": (
        "without a mapping of lr_schedule, which has its own rate and warmup",
        lambda c, f: not isinstance(c.lr_schedule, dict)),
    "lr_schedule.warmup_init": ("with a warmup above 0", lambda c, f: c.lr_schedule.get("warmup")),
    "rank rank_pattern scale alpha dropout keys exclude rslora resume_adapter_file keep": (
        "where adapters train, not with fine_tune_type: full or from_scratch",
        lambda c, f: c.fine_tune_type != "full" and not c.from_scratch),
    "num_layers": (
        "without from_scratch, which trains all layers, and without layers, which names them",
        lambda c, f: not c.from_scratch and c.lora_parameters.layers is None),
    "num_layers layers layer_kinds": ("where parts has language", lambda c, f: "language" in c.trained_parts),
    "chat_turns": ("without mask_prompt: false, which counts every token", lambda c, f: c.mask_prompt is not False),
    "min_pixels max_pixels fps video_max_frames": ("for rows with images or videos", lambda c, f: f.pictures),
    "router_aux_loss_coef": (
        "for a model with a router that deltatune knows", lambda c, f: f.routers),
    "chat_turns chat_template_config": ("for rows that are not plain text", lambda c, f: f.turns),
}  # fmt: skip
#: Of `eval` for tasks of lm-eval.
TASKS: Conditions = {
    "num_fewshot limit apply_chat_template include_path": ("with --tasks", lambda o: o.tasks),
    "draft data test_batches overlong mask_prompt chat_turns pack seed min_pixels max_pixels fps video_max_frames "
    "prompt_feature completion_feature chat_feature text_feature": ("without --tasks", lambda o: not o.tasks),
    "chat_template_config": ("with --apply-chat-template", lambda o: not o.tasks or o.apply_chat_template),
}
#: Of `generate` and `chat`.
ANSWERS: Conditions = {
    "draft": (
        "without --memory, --image and --video",
        lambda o: o.memory is None and not vars(o).get("image") and not vars(o).get("video")),
    "min_pixels max_pixels": ("with --image or --video", lambda o: o.image or o.video),
    "fps video_max_frames": ("with --video", lambda o: o.video),
    "chat_template_config tools": ("without --ignore-chat-template", lambda o: not vars(o).get("ignore_chat_template")),
    "compare": ("with --adapter-path, since it asks the base beside the adapter", lambda o: o.adapter_path),
}  # fmt: skip
# Those that mlx_lm.lora has, too, and leaves unread: files and command lines for it hold them.
_MLX_LM = (
    "learning_rate", "test_batches", "steps_per_eval", "optimizer_config", "lr_schedule", "lr_schedule.warmup_init",
    "num_layers", "rank", "scale", "dropout", "keys", "project_name",
)  # fmt: skip


def changed_options(options: Any) -> dict[str, str]:
    """Return the options of a dataclass that are not at their defaults, as refuse_unread() takes them.

    Those of adapters and of a schedule stand beside the others.
    """
    schedule = getattr(options, "lr_schedule", None)
    settings = schedule if isinstance(schedule, dict) else {}
    names = {f"lr_schedule.{key}": f"lr_schedule: {key}" for key, value in settings.items() if value}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        factory = field.default_factory
        if dataclasses.is_dataclass(value):
            names |= changed_options(value)
        elif value != (field.default if factory is dataclasses.MISSING else factory()):
            names[field.name] = field.name
    return names


def refuse_unread(conditions: Conditions, names: Mapping[str, str], *run: Any) -> list[str]:
    """Refuse, with a UserError, options that are set and not read.

    `names` holds the options that are set, each with its name in messages, and `run` the arguments of a condition. An
    option that mlx_lm.lora has, but does not read either, is returned in a note.
    """
    notes, refused = [], []
    for options, (words, holds) in conditions.items():
        unread = [name for name in options.split() if name in names and not holds(*run)]
        if noted := [names[name] for name in unread if name in _MLX_LM]:
            notes.append(f"Note: {', '.join(noted)}: read only {words}; elsewhere, as here, this changes nothing.")
        if wrong := [names[name] for name in unread if name not in _MLX_LM]:
            refused.append(f"{', '.join(wrong)}: read only {words}, so this would change nothing here; leave it out.")
    if refused:
        raise UserError("\n".join(refused))
    return notes


def refuse_unread_flags(conditions: Conditions, options: Any) -> None:
    """Refuse, as refuse_unread() does, options of a command that all are flags."""
    refuse_unread(conditions, {name: f"--{name.replace('_', '-')}" for name in changed_options(options)}, options)
