"""Checkpoints exactly as transformers writes them, trained and adapted here, are read by transformers again. Live.

test_peft.py has every kind of adapter; here stand the files and the classes that a user names.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from test_peft import TOKENS, TOLERANCE, moved, our_logits, their_logits

from deltatune.data.example import Example, Splits
from deltatune.export.peft_adapter import write_peft
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.models.load import load_model
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.selftest.parity import vision
from deltatune.selftest.parity.cases import CASES
from deltatune.train import Trainer
from deltatune.train.reports.screen import Screen
from deltatune.train.setup import prepare

pytestmark = pytest.mark.oracle

SAVED = ("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "olmo_hybrid", "bailing_hybrid")
TEXT = {f"text {name}": name for name in SAVED}
IMAGES = {"images qwen3_5": "qwen3_5", "images qwen3_5_moe": "qwen3_5_moe"}


def saved(folder: Path, kind: str) -> Path:
    """Let transformers save a tiny model of drawn weights, of a text class or of one with a vision tower."""
    import transformers
    from parity import record, vision_theirs

    case = CASES[TEXT[kind]] if kind in TEXT else vision.CASES[IMAGES[kind]]
    side = record.TEXT if kind in TEXT else vision_theirs.COMPARISON
    config, shapes = side.layout(case)
    model = side.load(config, side.family(case).weights(shapes))
    assert isinstance(model, transformers.PreTrainedModel)
    model.save_pretrained(folder)
    return folder


def their_model(folder: Path, kind: str) -> Any:
    import torch
    import transformers

    library = transformers.AutoModelForCausalLM if kind in TEXT else transformers.AutoModelForImageTextToText
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    model, notes = library.from_pretrained(folder, output_loading_info=True, **options)
    assert not {key: value for key, value in notes.items() if value}
    return model


def trained(base: Path, folder: Path, **options: Any) -> nn.Module:
    """Train the model in `base` as a whole for three steps, into `folder`."""
    fixed = {"fine_tune_type": "full", "batch_size": 2, "iters": 3, "val_batches": 0}
    config = TrainConfig(model=str(base), data="rows", adapter_path=str(folder), **fixed | options)
    model, model_config = load_model(base)
    prepare(model, config)
    rows = [Example(row.astype(np.int32), np.arange(len(row)) > 0, f"row {at}") for at, row in enumerate(TOKENS)]
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    Trainer(model, tokenizer, config, Splits(rows), model_config=model_config, screen=Screen(shown=False)).run()
    return model


@pytest.mark.parametrize("kind", ["text qwen3_5", "text qwen3_5_moe", "images qwen3_5", "images qwen3_5_moe"])
def test_an_export_in_the_class_that_its_card_names(kind, tmp_path):
    import peft

    base = saved(tmp_path / "base", kind)
    model, _ = load_model(base)
    plain = our_logits(model)
    convert_to_lora(model, LoraConfig(rank=3, scale=1.5))
    ours = our_logits(moved(model))
    save_adapters(model, tmp_path / "adapter", {"model": str(base)})
    write_peft(base, tmp_path / "adapter", tmp_path / "peft", str(base))
    adapted = peft.PeftModel.from_pretrained(their_model(base, kind), tmp_path / "peft")
    assert np.abs(plain - ours).max() > 0.05
    assert np.abs(their_logits(adapted) - ours).max() < TOLERANCE
    # Without a task in the file it takes the class that auto_mapping names.
    by_file = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft", attn_implementation="eager")
    assert np.abs(their_logits(by_file.float()) - ours).max() < TOLERANCE


@pytest.mark.parametrize("kind", [*TEXT, *IMAGES])
def test_a_model_that_was_trained_as_a_whole(kind, tmp_path):
    base = saved(tmp_path / "base", kind)
    plain = our_logits(load_model(base)[0])
    ours = our_logits(trained(base, tmp_path / "full", learning_rate=1e-3))
    assert np.abs(plain - ours).max() > 0.05
    assert np.abs(their_logits(their_model(tmp_path / "full", kind)) - ours).max() < TOLERANCE


# So large an eps that a gradient near 0 moves a number by no more than its own size.
DECAY = {"betas": (0.9, 0.99), "eps": 1e-2, "weight_decay": 0.3}


@pytest.mark.parametrize("kind", ["text qwen3_5", "text qwen3_next", "text olmo_hybrid", "text kimi_linear"])
def test_weight_decay_takes_the_parameters_of_transformers_trainer(kind, tmp_path):
    """And A_log is left out, which transformers' rule of names forgets."""
    import torch
    import transformers

    base = saved(tmp_path / "base", kind)
    settings = {**DECAY, "betas": list(DECAY["betas"])}
    options = {"optimizer_config": {"adamw": settings}, "lr_schedule": "constant", "warmup": 0.0}
    trained(base, tmp_path / "full", **options, learning_rate=1e-2)
    ours = dict(their_model(tmp_path / "full", kind).named_parameters())

    theirs = their_model(base, kind)
    before = {name: value.detach().clone() for name, value in theirs.named_parameters()}
    # The router's correction and what stands outside the layers do not train here.
    changed = {
        name: value for name, value in theirs.named_parameters() if not torch.equal(ours[name].detach(), before[name])
    }
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, theirs))
    groups = [
        [value for name, value in changed.items() if (name in decayed and not name.endswith("A_log")) == decays]
        for decays in (True, False)
    ]
    assert all(groups)
    both = [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(both, lr=1e-2, **DECAY)
    theirs.train()
    for _ in range(3):
        tokens = torch.from_numpy(TOKENS)
        optimizer.zero_grad()
        theirs(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    for name, value in changed.items():
        assert (value.detach() - ours[name].detach()).abs().max() < TOLERANCE, name
