"""The names that other trainers have for our options, so that a message can answer them with ours."""

from __future__ import annotations

#: By the option of deltatune: its names elsewhere, separated by blanks (docs/guides/from-unsloth-axolotl.md).
NAMES = {
    "model": "m model_name model_name_or_path pretrained_model_name_or_path base_model",
    "data": "d dataset datasets train_file dataset_dir dataset_name dataset_path",
    "val_split": "val_size val_set_size eval_split validation_split",
    "fine_tune_type": "adapter finetuning_type use_dora lora dora full peft",
    "max_seq_length": "max_length max_seq_len sequence_len cutoff_len context_length seq_len seq_length",
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "keys": "target_modules lora_target_modules lora_target lora_layers_keys lora_target_linear",
    "rslora": "use_rslora peft_use_rslora",
    "init": "init_lora_weights peft_init_lora_weights pissa_init lora_init",
    "num_layers": "lora_layers",
    "grad_checkpoint": "gradient_checkpointing use_gradient_checkpointing",
    "batch_size": "per_device_train_batch_size train_batch_size micro_batch_size bs",
    "grad_accumulation_steps": "gradient_accumulation_steps gradient_accumulation grad_accum",
    "epochs": "num_train_epochs num_epochs",
    "iters": "max_steps iterations train_iters steps num_steps max_iters",
    "learning_rate": "lr",
    "lr_schedule": "lr_scheduler_type lr_scheduler learning_rate_scheduler learning_rate_schedule",
    "warmup": "warmup_steps warmup_ratio",
    "optimizer": "optim",
    "optimizer_config": "weight_decay adam_beta1 adam_beta2 adam_epsilon",
    "grad_clip": "max_grad_norm gradient_clip",
    "overlong": "excess_length_strategy",
    "pack": "packing sample_packing neat_packing",
    "mask_prompt": "train_on_inputs train_on_prompt train_on_responses_only assistant_only_loss "
    "completion_only_loss no_mask",
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
    "adapter_path": "output_dir adapter_file output out o",
    "keep": "save_total_limit",
    "save_every": "save_steps steps_per_save checkpoint_every save_strategy saves_per_epoch",
    "steps_per_eval": "eval_steps eval_strategy evaluation_strategy evals_per_epoch",
    "steps_per_report": "logging_steps log_every",
    "early_stopping": "early_stopping_patience",
    "project_name": "wandb_project",
    "resume": "resume_from_checkpoint",
    "overwrite": "overwrite_output_dir",
    "seed": "random_state",
    "report_to": "wandb",
    "reward_funcs": "reward_model",
}
# How options and choices of other trainers that are none of ours are asked for here, by the answer.
_ANSWERS = {
    "load a model in 4 bits (mlx_lm.convert -q) and use lora":
        "qlora use_qlora load_in_4bit load_in_8bit quantization_bit quantize",
    "a model trains in the dtype of its weights": "bf16 fp16 dtype torch_dtype mixed_precision",
    "mlx.launch starts several processes, and --memory leaves layers on the disk":
        "deepspeed fsdp num_processes nproc_per_node tensor_parallel",
    "attention runs the fastest kernel that is right on this device": "attn_implementation flash_attention flash_attn",
    "the model's own chat template writes the rows; chat_template.jinja in its folder replaces it":
        "chat_template template",
    "the folder of --data holds train.jsonl, valid.jsonl and test.jsonl":
        "valid valid_data val_data eval_data test_data valid_file validation_file eval_dataset test_file",
    "a part of a data set is a split such as train[:1000] under hf_dataset in a file": "max_samples max_train_samples",
    "rows are read by several processes, and those of like lengths share a batch, without an option":
        "group_by_length dataloader_num_workers preprocessing_num_workers",
    "deltatune export --push-to-hub uploads an adapter": "push_to_hub hub_model_id",
    "`hf auth login` and the variable HF_TOKEN tell the hub who you are": "hf_token token",
    "it is a --loss-variant of --loss grpo": "rloo dapo dr_grpo gspo cispo",
    "the variable HF_HOME moves the cache of the hub": "cache_dir",
    "MLX runs on the GPU where there is one": "device cpu gpu gpus cuda",
    "`deltatune train` trains, and `deltatune eval` tests": "do_train do_eval do_predict no_train",
    "a message of the role system stands in the rows of data": "system_prompt system",
    "the model without its adapter is the reference": "ref_model",
}  # fmt: skip
#: Likewise the options that commands beside `train` have, which go before those above.
_OF_COMMANDS = {
    "save_path": "output output_dir out o",
    "report": "output out o html",
    "to": "format",
    "outtype": "quant quantization quantize q",
    "temp": "temperature",
    "max_tokens": "max_new_tokens max_length",
}
# By the command of deltatune: its names elsewhere.
_COMMANDS = {
    "train": "fit finetune fine-tune lora sft dpo grpo",
    "merge": "fuse",
    "export": "upload push convert save",
    "eval": "evaluate test",
    "generate": "infer inference predict",
    "runs": "list ls",
    "--help": "help",
    "--version": "version",
}
NO_OPTION = {name: answer for answer, names in _ANSWERS.items() for name in names.split()}
#: The options of a file that have no flag, and those of them that stand under lora_parameters.
_IN_FILES = ("hf_dataset", "lora_parameters", "optimizer_config", "text_feature", "keys", "exclude", "rslora", "init")
OF_ADAPTERS = ("rank", "alpha", "scale", "dropout", "keys", "exclude", "rslora", "init")


def option_meant(word: str, known: list[str]) -> str | None:
    """Return the one of the known keys or flags that `word`, an unknown key or flag, names elsewhere, or None."""
    if "selftest" in known:
        return next((command for command, names in _COMMANDS.items() if word in names.split()), None)
    name = plain(word)
    tables = (*_OF_COMMANDS.items(), *NAMES.items())
    for option in [*(option for option, names in tables if name in names.split()), name]:
        if option in OF_ADAPTERS and "lora_parameters" in known:
            return f"lora_parameters: {{{option}: ...}}"
        as_typed = "--" + option.replace("_", "-") if word.startswith("-") else option
        if as_typed in known:
            return as_typed
        if option in _IN_FILES and "--iters" in known:
            inside = f"lora_parameters: {{{option}: ...}}" if option in OF_ADAPTERS else f"{option}: ..."
            return f"{inside} in a file, -c FILE"
    return None


def plain(word: str) -> str:
    """Return the name of a flag or key without dashes and value."""
    return word.split("=")[0].lstrip("-").replace("-", "_")
