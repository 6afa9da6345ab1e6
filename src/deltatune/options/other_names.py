"""The names that other trainers have for our options, so that a message can answer them with ours."""

from __future__ import annotations

#: By the option of deltatune: its names elsewhere, separated by blanks (docs/guides/from-unsloth-axolotl.md).
NAMES = {
    "model": "model_name model_name_or_path pretrained_model_name_or_path base_model",
    "data": "dataset datasets train_file",
    "val_split": "val_size val_set_size eval_split validation_split",
    "fine_tune_type": "adapter finetuning_type",
    "max_seq_length": "max_length max_seq_len sequence_len cutoff_len",
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "keys": "target_modules lora_target_modules lora_target lora_layers_keys",
    "rslora": "use_rslora peft_use_rslora",
    "init": "init_lora_weights peft_init_lora_weights pissa_init",
    "num_layers": "lora_layers",
    "grad_checkpoint": "gradient_checkpointing use_gradient_checkpointing",
    "batch_size": "per_device_train_batch_size train_batch_size micro_batch_size",
    "grad_accumulation_steps": "gradient_accumulation_steps gradient_accumulation",
    "epochs": "num_train_epochs num_epochs",
    "iters": "max_steps iterations train_iters",
    "learning_rate": "lr",
    "lr_schedule": "lr_scheduler_type lr_scheduler learning_rate_scheduler learning_rate_schedule",
    "warmup": "warmup_steps warmup_ratio",
    "optimizer": "optim",
    "optimizer_config": "weight_decay adam_beta1 adam_beta2 adam_epsilon",
    "grad_clip": "max_grad_norm gradient_clip",
    "overlong": "excess_length_strategy",
    "pack": "packing sample_packing neat_packing",
    "mask_prompt": "train_on_inputs train_on_prompt train_on_responses_only",
    "chat_turns": "mask_history",
    "loss": "stage rl",
    "loss_variant": "loss_type pref_loss",
    "beta": "rl_beta dpo_beta orpo_alpha pref_beta",
    "teacher": "teacher_model_name_or_path teacher_model",
    "gamma": "simpo_gamma",
    "label_smoothing": "dpo_label_smoothing",
    "router_aux_loss_coef": "moe_aux_loss_coef",
    "text_feature": "dataset_text_field",
    "chat_template_config": "chat_template_kwargs enable_thinking",
    "parts": "finetune_vision_layers finetune_language_layers freeze_vision_tower freeze_multi_modal_projector",
    "max_pixels": "image_max_pixels",
    "min_pixels": "image_min_pixels",
    "fps": "video_fps",
    "video_max_frames": "video_maxlen",
    "resize_embeddings": "resize_vocab",
    "adapter_path": "output_dir adapter_file output",
    "keep": "save_total_limit",
    "save_every": "save_steps",
    "steps_per_eval": "eval_steps",
    "steps_per_report": "logging_steps log_every",
    "early_stopping": "early_stopping_patience",
    "project_name": "wandb_project",
}
_IN_4_BITS = "load a model in 4 bits (mlx_lm.convert -q) and use lora"
_DTYPE = "a model trains in the dtype of its weights"
_SHARDED = "mlx.launch starts several processes, and --memory leaves layers on the disk"
#: By an option or choice of another trainer that is none of ours: how it is asked for here.
NO_OPTION = {
    "qlora": _IN_4_BITS,
    "load_in_4bit": _IN_4_BITS,
    "load_in_8bit": _IN_4_BITS,
    "quantization_bit": _IN_4_BITS,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "torch_dtype": _DTYPE,
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
}
OPTIONS = {name: option for option, names in NAMES.items() for name in names.split()}
#: The options of a file that stand under lora_parameters.
OF_ADAPTERS = ("rank", "alpha", "scale", "dropout", "keys", "rslora", "init")


def option_meant(word: str, known: list[str]) -> str | None:
    """Return the one of the known keys or flags that `word`, an unknown key or flag, names elsewhere, or None."""
    name = plain(word)
    option = OPTIONS.get(name, name)
    if option in OF_ADAPTERS and "lora_parameters" in known:
        return f"lora_parameters: {{{option}: ...}}"
    as_typed = "--" + option.replace("_", "-") if word.startswith("-") else option
    if as_typed not in known and name in OPTIONS and "--iters" in known:
        # Options without a flag stand in the file of a training run.
        inside = f"lora_parameters: {{{option}: ...}}" if option in OF_ADAPTERS else f"{option}: ..."
        return f"{inside} in a file, -c FILE"
    return as_typed if as_typed in known else None


def plain(word: str) -> str:
    """Return the name of a flag or key without dashes and value."""
    return word.split("=")[0].lstrip("-").replace("-", "_")
