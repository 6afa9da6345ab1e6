"""Unsloth's own trainer for NVIDIA GPUs, set up for one shape as its guide does: its model and LoRA, TRL's SFTTrainer.

Unsloth reads a model from files, so one is written first: Qwen3.5 with its picture tower, which it keeps at rest here,
since its loss fused with the head serves that class alone. Unsloth takes FLA's gated delta rule where FLA is installed,
and its own copy of it elsewhere.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainers import RANK, RATE, SCALE, Shape, Trainer

# More steps than are measured: the last one is never reached.
STEPS = 100
# All linear layers of the text model. Unsloth's default leaves out those of gated-delta layers.
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS += ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
WAIT = 600.0  # seconds


@contextmanager
def unsloth(shape: Shape, checkpoint: bool) -> Iterator[Trainer]:
    """A training step of Unsloth, with adapters on all linear layers of the text model.

    With `checkpoint` it uses its own kind, "unsloth", which may keep the inputs of layers in the host's memory.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "FLA_FLASH_QLA": "0", "FLA_TILELANG": "0"}
    with tempfile.TemporaryDirectory() as folder:
        # Unsloth writes the code that it makes into the folder in which it runs.
        os.chdir(folder)
        # Unsloth asks to be imported before what it patches.
        from unsloth import FastLanguageModel

        # isort: split
        import torch

        _let_fla_run()
        _write(shape, folder)
        ready = time.perf_counter()
        model, tokenizer = FastLanguageModel.from_pretrained(
            folder, max_seq_length=shape.tokens, dtype=getattr(torch, shape.dtype), load_in_4bit=False
        )
        model = FastLanguageModel.get_peft_model(
            model,
            r=RANK,
            lora_alpha=int(SCALE * RANK),
            lora_dropout=0,
            bias="none",
            target_modules=LAYERS,
            finetune_vision_layers=False,
            use_gradient_checkpointing="unsloth" if checkpoint else False,
        )
        run = _Run(_sft_trainer(model, tokenizer, shape, folder))
        yield Trainer(ready, run.step, torch.cuda.reset_peak_memory_stats, run.peak)
        run.stop()


class _Run:
    """A run of transformers' Trainer in a thread of its own, which goes on by a step each time that it is told to."""

    def __init__(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        self._told: queue.Queue[bool] = queue.Queue()
        self._losses: queue.Queue[float | BaseException] = queue.Queue()
        run = self

        class Told(TrainerCallback):
            def on_step_begin(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop = not run._told.get()

            def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
                if "loss" in logs:
                    run._losses.put(float(logs["loss"]))

        trainer.add_callback(Told())
        self._trainer, self._thread = trainer, threading.Thread(target=self._train, daemon=True)

    def step(self) -> float:
        import torch

        if not self._thread.is_alive():
            self._thread.start()
        self._told.put(True)
        loss = self._losses.get(timeout=WAIT)
        if isinstance(loss, BaseException):
            raise loss
        torch.cuda.synchronize()
        return loss

    def stop(self) -> None:
        """End the run after one step more, which belongs to no figure."""
        self._told.put(False)
        self._thread.join(timeout=WAIT)

    @staticmethod
    def peak() -> float:
        import torch

        return float(torch.cuda.max_memory_allocated())

    def _train(self) -> None:
        try:
            self._trainer.train()
        except BaseException as error:  # noqa: BLE001  (it is raised again in the thread that asked for the step)
            self._losses.put(error)


def _sft_trainer(model: Any, tokenizer: Any, shape: Shape, folder: str) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = shape.rows()[:, :-1].tolist()
    options = SFTConfig(
        output_dir=str(Path(folder, "out")),
        per_device_train_batch_size=shape.batch,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_length=shape.tokens,
        packing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        dataset_num_proc=1,
        bf16=shape.dtype == "bfloat16",
    )
    data = Dataset.from_dict({"input_ids": rows * STEPS})
    return SFTTrainer(model=model, processing_class=tokenizer, train_dataset=data, args=options)


def _write(shape: Shape, folder: str) -> None:
    """Write random weights and a tokenizer of the shape's vocabulary, whose words are their own numbers."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    text = {key: value for key, value in shape.config().items() if key != "model_type"}
    config = configuration_qwen3_5.Qwen3_5Config(
        text_config=text | {"use_cache": False},
        vision_config={"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 16}
        | {"out_hidden_size": shape.hidden, "deepstack_visual_indexes": []},
        tie_word_embeddings=True,
        image_token_id=3,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    torch.manual_seed(0)
    model = modeling_qwen3_5.Qwen3_5ForConditionalGeneration(config).to(getattr(torch, shape.dtype))
    model.save_pretrained(folder)
    words = {str(number): number for number in range(shape.vocabulary)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), unk_token="0", eos_token="1", pad_token="2"
    )
    tokenizer.save_pretrained(folder)


def _let_fla_run() -> None:
    """Pass FLA's refusal of its backward pass on Hopper with Triton 3.4 to 3.7.0: here its time counts alone."""
    try:
        from fla.ops.common import chunk_o
    except ImportError:
        return
    chunk_o.TRITON_ABOVE_3_7_1 = True
