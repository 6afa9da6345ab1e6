"""What Unsloth with TRL, axolotl and LLaMA-Factory call an option, and how its value becomes one of deltatune.

The table in docs/guides/from-unsloth-axolotl.md is made of ROWS. Each row names the options of the three trainers and
the function that puts a value into a Draft; the function raises UserError, with the reason, for a value that cannot be
said here.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import putting
from .putting import Put


@dataclass(frozen=True)
class Row:
    """An option of deltatune, as the page names it, with the names that each trainer has for it."""

    ours: str
    put: Put
    unsloth: tuple[str, ...] = ()
    axolotl: tuple[str, ...] = ()
    llama_factory: tuple[str, ...] = ()


def _all(name: str) -> tuple[tuple[str], ...]:
    """The names of an option that the three trainers call alike."""
    return ((name,),) * 3


ROWS: tuple[Row, ...] = (
    Row("`model`", putting.model, ("model_name",), ("base_model",), ("model_name_or_path",)),
    Row(
        "a model quantised by `mlx_lm.convert -q`",
        putting.not_here(putting.QUANTISE),
        ("load_in_4bit", "load_in_8bit"),
        ("load_in_4bit", "load_in_8bit"),
        ("quantization_bit",),
    ),
    Row("`fine_tune_type`", putting.kind, (), ("adapter",), ("finetuning_type",)),
    Row("`fine_tune_type: full`", putting.full, ("full_finetuning",)),
    Row("`fine_tune_type: dora`", putting.dora, ("use_dora",), ("peft_use_dora",), ("use_dora",)),
    Row(
        "`max_seq_length`",
        putting.option("max_seq_length"),
        ("max_seq_length", "max_length"),
        ("sequence_len",),
        ("cutoff_len",),
    ),
    Row("`--rank`; `lora_parameters: {rank: ...}`", putting.adapter("rank"), ("r",), ("lora_r",), ("lora_rank",)),
    Row("`--alpha`; `{alpha: ...}`", putting.adapter("alpha"), *_all("lora_alpha")),
    Row("`--dropout`; `{dropout: ...}`", putting.adapter("dropout"), *_all("lora_dropout")),
    Row(
        "`{keys: [...]}`; default: every linear layer",
        putting.modules,
        ("target_modules",),
        ("lora_target_modules", "lora_target_linear"),
        ("lora_target",),
    ),
    Row("`{rslora: true}`", putting.adapter("rslora"), ("use_rslora",), ("peft_use_rslora",), ("use_rslora",)),
    Row("`{init: pissa}`", putting.init, ("init_lora_weights",), ("peft_init_lora_weights",)),
    Row("`{init: pissa}`", putting.pissa, (), (), ("pissa_init",)),
    Row("`deltatune import`", putting.not_here(putting.MLX_LM), (), ("lora_model_dir",), ("adapter_name_or_path",)),
    Row("`grad_checkpoint`", putting.checkpoint, ("use_gradient_checkpointing", "gradient_checkpointing"),
        ("gradient_checkpointing",), ("gradient_checkpointing",)),
    Row("`batch_size`, over all processes together", putting.option("batch_size"), ("per_device_train_batch_size",),
        ("micro_batch_size",), ("per_device_train_batch_size",)),
    Row("`grad_accumulation_steps`", putting.option("grad_accumulation_steps"), *_all("gradient_accumulation_steps")),
    Row("`epochs`", putting.rate("epochs", int, float), ("num_train_epochs",), ("num_epochs",), ("num_train_epochs",)),
    Row("`iters`, which counts batches, not updates", putting.updates, *_all("max_steps")),
    Row("`learning_rate`", putting.rate("peak", int, float), *_all("learning_rate")),
    Row("`lr_schedule`", putting.rate("schedule", str), ("lr_scheduler_type",), ("lr_scheduler",),
        ("lr_scheduler_type",)),
    Row("`lr_schedule: {warmup: ...}`", putting.warmup, *_all("warmup_steps")),
    Row("`lr_schedule: {warmup: ...}`", putting.rate("warmup_share", int, float), *_all("warmup_ratio")),
    Row("the third argument of `cosine_decay`", putting.rate("floor", int, float), (), ("cosine_min_lr_ratio",)),
    Row("`optimizer`, such as `adamw8bit`", putting.optimizer, ("optim",), ("optimizer",), ("optim",)),
    Row("`optimizer_config: {adamw: {weight_decay: ...}}`", putting.weight_decay, *_all("weight_decay")),
    Row("`{betas: [..., ...]}`", putting.beta(0), *_all("adam_beta1")),
    Row("`{betas: [..., ...]}`", putting.beta(1), *_all("adam_beta2")),
    Row("`{eps: ...}`", putting.epsilon, *_all("adam_epsilon")),
    Row("`grad_clip`", putting.clip, *_all("max_grad_norm")),
    Row("`loraplus_lr_ratio`", putting.option("loraplus_lr_ratio"), (), ("loraplus_lr_ratio",), ("loraplus_lr_ratio",)),
    Row("`neftune_noise_alpha`", putting.option("neftune_noise_alpha"), *_all("neftune_noise_alpha")),
    Row("`overlong: skip`, or `truncate`", putting.overlong, (), ("excess_length_strategy",)),
    Row("`pack`", putting.option("pack"), ("packing",), ("sample_packing",), ("packing", "neat_packing")),
    Row("`mask_prompt: false` counts every token", putting.prompts_count, ("without train_on_responses_only",),
        ("train_on_inputs",),
        ("train_on_prompt",)),
    Row("`chat_turns: last`", putting.last_turn, (), (), ("mask_history",)),
    Row("`loss`", putting.loss, ("the class of the trainer",), ("rl",), ("stage",)),
    Row("`loss_variant`", putting.variant, ("loss_type",), (), ("pref_loss",)),
    Row("`beta`", putting.option("beta"), ("beta",), ("rl_beta", "dpo_beta", "orpo_alpha"), ("pref_beta",)),
    Row("`gamma`", putting.option("gamma"), *_all("simpo_gamma")),
    Row("`label_smoothing`", putting.option("label_smoothing"), ("label_smoothing",), ("dpo_label_smoothing",),
        ("dpo_label_smoothing",)),
    Row("`router_aux_loss_coef`", putting.option("router_aux_loss_coef"), (), ("router_aux_loss_coef",),
        ("moe_aux_loss_coef",)),
    Row("`hf_dataset`, or `data`", putting.hub_data, ("load_dataset",)),
    Row("`hf_dataset`, or `data`", putting.axolotl_data, (), ("datasets",)),
    Row("`data`", putting.named_data, (), (), ("dataset",)),
    Row("`hf_dataset: {valid_split: ...}`, or `valid.jsonl`", putting.held_out, (), ("val_set_size",), ("val_size",)),
    Row("`text_feature`", putting.text, ("dataset_text_field",)),
    Row("the template in the tokenizer's files", putting.template, (), ("chat_template",), ("template",)),
    Row("`chat_template_config`", putting.thinking, (), (), ("enable_thinking",)),
    Row("`parts`", putting.part("vision"), ("finetune_vision_layers",)),
    Row("`parts`", putting.part("language"), ("finetune_language_layers",)),
    Row("`parts`", putting.frozen("vision"), (), (), ("freeze_vision_tower",)),
    Row("`parts`", putting.frozen("projector"), (), (), ("freeze_multi_modal_projector",)),
    Row("`max_pixels`, `min_pixels`", putting.option("max_pixels"), (), (), ("image_max_pixels",)),
    Row("`max_pixels`, `min_pixels`", putting.option("min_pixels"), (), (), ("image_min_pixels",)),
    Row("`fps`", putting.option("fps"), (), (), ("video_fps",)),
    Row("`video_max_frames`", putting.option("video_max_frames"), (), (), ("video_maxlen",)),
    Row("`resize_embeddings`, with the tokens in the tokenizer's files", putting.option("resize_embeddings"), (), (),
        ("resize_vocab",)),
    Row("`resize_embeddings`, with the tokens in the tokenizer's files",
        putting.not_here("add them to the tokenizer's files, and give resize_embeddings: true"), (), ("tokens",)),
    Row("`seed`", putting.option("seed"), *_all("seed")),
    Row("`adapter_path`", putting.option("adapter_path"), *_all("output_dir")),
    Row("`keep`", putting.option("keep"), *_all("save_total_limit")),
    Row("`save_every`", putting.per_update("save_every"), *_all("save_steps")),
    Row("`steps_per_eval`", putting.per_update("steps_per_eval"), *_all("eval_steps")),
    Row("`steps_per_report`", putting.per_update("steps_per_report"), *_all("logging_steps")),
    Row("`early_stopping`", putting.option("early_stopping"), (), ("early_stopping_patience",)),
    Row("`report_to`", putting.report, ("report_to",), (), ("report_to",)),
    Row("`report_to: wandb`, `project_name`", putting.wandb, (), ("wandb_project",)),
    Row("`trust_remote_code`", putting.option("trust_remote_code"), *_all("trust_remote_code")),
    Row("`--resume`", putting.not_here("give --resume, for a run of deltatune"), *_all("resume_from_checkpoint")),
)  # fmt: skip

#: Names that choose what runs on a GPU, where files lie or what is printed, and what deltatune does by itself.
UNNEEDED = {
    "unsloth": """model tokenizer processing_class args train_dataset data_collator dtype token fp16 bf16 random_state
        instruction_part response_part dataset_num_proc fast_inference gpu_memory_utilization remove_unused_columns
        dataset_kwargs save_strategy load_best_model_at_end run_name lora_bias load_in_16bit local_files_only device_map
        attn_implementation dataloader_num_workers gradient_checkpointing_kwargs ref_model logging_dir""",
    "axolotl": """model_type tokenizer_type tokenizer_config processor_type strict bf16 fp16 tf32 bfloat16 float16
        flash_attention xformers_attention sdp_attention eager_attention attn_implementation dataset_prepared_path
        pad_to_sequence_len eval_sample_packing group_by_length debug local_rank wandb_entity wandb_watch wandb_name
        wandb_run_id wandb_log_model gradient_checkpointing_kwargs lora_fan_in_fan_out lora_mlp_kernel lora_qkv_kernel
        lora_o_kernel dataset_processes dataset_num_proc bnb_4bit_compute_dtype bnb_4bit_quant_type
        bnb_4bit_use_double_quant eval_table_size load_best_model_at_end shuffle_merged_datasets save_safetensors
        use_tensorboard""",
    "llama_factory": """do_train do_eval dataset_dir overwrite_cache preprocessing_num_workers dataloader_num_workers
        plot_loss overwrite_output_dir run_name bf16 fp16 pure_bf16 ddp_timeout per_device_eval_batch_size eval_strategy
        save_only_model flash_attn enable_liger_kernel save_strategy logging_dir eval_on_start load_best_model_at_end
        media_dir include_num_input_tokens_seen use_unsloth quantization_method cache_dir tokenized_path
        disable_gradient_checkpointing double_quantization compute_accuracy""",
}


def names(trainer: str) -> dict[str, Put]:
    """Return how each option of a trainer (unsloth, axolotl, llama_factory) is put into a Draft, by its name."""
    return {name: row.put for row in ROWS for name in getattr(row, trainer)}


def page_table() -> str:
    """Return the rows as a table for the documentation; rows of one meaning are one."""
    lines = ["| Unsloth, TRL | axolotl | LLaMA-Factory | deltatune |", "|---|---|---|---|"]
    merged: dict[str, list[list[str]]] = {}
    for row in ROWS:
        cells = merged.setdefault(row.ours, [[], [], []])
        for cell, words in zip(cells, (row.unsloth, row.axolotl, row.llama_factory), strict=True):
            cell += [word if " " in word else f"`{word}`" for word in words if f"`{word}`" not in cell]
    lines += [f"| {' | '.join(', '.join(cell) for cell in cells)} | {ours} |" for ours, cells in merged.items()]
    return "\n".join(lines)
