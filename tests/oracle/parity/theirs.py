"""The reference run: transformers and PEFT on the CPU, in fp32. Needs torch: for the live harness only."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.cases import BETAS, EPS, RANK, SCALE, STEPS, WEIGHT_DECAY, Adapters, ParityRun
from deltatune.selftest.parity.families import Config, Weights

from . import lightning  # noqa: F401  (makes a family known to transformers)

WORDS = {
    "lora_A.default.weight": "lora_a",
    "lora_B.default.weight": "lora_b",
    "lora_magnitude_vector.default.weight": "m",
}
Parameters = dict[tuple[str, str], torch.nn.Parameter]


def saved(
    model_type: str, options: dict[str, Any], kind: Any = transformers.AutoModelForCausalLM
) -> tuple[Config, dict[str, tuple[int, ...]]]:
    """The config.json, and name and shape of every tensor, of a model of `kind`, one of transformers' AutoModels."""
    config = transformers.AutoConfig.for_model(model_type, **options)
    model = kind.from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return json.loads((Path(folder) / "config.json").read_text()), shapes


def load(config: Config, weights: Weights, kind: Any = transformers.AutoModelForCausalLM) -> torch.nn.Module:
    """The model of a save with these weights, read by transformers itself; no tensor missing or left over."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model, notes = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    wrong = {key: value for key, value in notes.items() if value}
    if wrong:
        raise ValueError(f"transformers did not take the checkpoint whole: {wrong}")
    return model


def targets(model: torch.nn.Module, not_adapted: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Every linear that gets an adapter: its path, and (inputs, outputs)."""
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith(not_adapted)
    }


def adapt(model: torch.nn.Module, adapters: Adapters, *, dora: bool) -> Parameters:
    """Put PEFT adapters on exactly these paths and set their lora_a and lora_b; all that trains, by (path, key)."""
    config = peft.LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules=list(adapters), use_dora=dora)
    # Inside a module without a `config`: PEFT redirects gate_proj and up_proj of some MoE families, shared experts
    # and full paths included, to the fused experts.
    peft.inject_adapter_in_model(config, torch.nn.ModuleDict({"base": model}))
    found: Parameters = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            suffix = next(suffix for suffix in WORDS if name.endswith(suffix))
            found[name.removesuffix("." + suffix), WORDS[suffix]] = parameter
    keys = ("lora_a", "lora_b", "m") if dora else ("lora_a", "lora_b")
    expected = {(path, key) for path in adapters for key in keys}
    if set(found) != expected:
        raise ValueError(f"PEFT adapted other parameters than asked for: {sorted(set(found) ^ expected)}")
    with torch.no_grad():
        for path, values in adapters.items():
            for key, value in values.items():
                found[path, key].copy_(torch.from_numpy(np.ascontiguousarray(value.T)))
    return found


def copied(tensors: dict[tuple[str, str], Any]) -> Adapters:
    """Copies, in mlx-lm's layout."""
    found: Adapters = {}
    for (path, key), tensor in tensors.items():
        found.setdefault(path, {})[key] = tensor.detach().numpy().T.copy()
    return found


def train(
    loss_of: Callable[[int], torch.Tensor],
    model: torch.nn.Module,
    parameters: Parameters,
    learning_rate: float,
    start: int = 0,
    steps: int = STEPS,
) -> ParityRun:
    """The recipe; `parameters` are trained in place, with the losses of the steps from `start` on."""
    model.train()
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    losses = []
    gradients: Adapters = {}
    for step in range(start, start + steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        if step == start:
            gradients = copied({key: parameter.grad for key, parameter in parameters.items()})
        optimizer.step()
        losses.append(loss.item())
    return ParityRun(losses, gradients, copied(parameters))


def text_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    """The loss of the batch of a step."""
    rows = seeded.batch(step)
    tokens = torch.from_numpy(rows.tokens).long()
    labels = tokens.clone()
    labels[:, 1:][torch.from_numpy(rows.counts == 0)] = -100
    present = torch.arange(tokens.shape[1])[None] < torch.tensor(rows.lengths)[:, None]
    return model(input_ids=tokens, attention_mask=present.long(), labels=labels, use_cache=False).loss


class Routes:
    """The closest that any real token came to another choice of experts: last taken against first left out.

    In the score that decides: the sigmoid plus its correction, or the logit of a softmax router.
    """

    def __init__(self, model: torch.nn.Module):
        self.nearest = float("inf")
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._look)

    def _look(self, router: Any, _: Any, outputs: Any) -> None:
        scores = outputs[0].detach()
        if hasattr(router, "e_score_correction_bias"):
            scores = scores.sigmoid() + router.e_score_correction_bias
        if getattr(router, "num_group", 1) > 1:
            grouped = scores.unflatten(-1, (router.num_group, -1))
            best = grouped.topk(2).values.sum(-1)
            self._narrow(best, router.topk_group)
            left_out = best.sort(-1).indices[:, : router.num_group - router.topk_group]
            scores = grouped.scatter(1, left_out[..., None].expand(-1, -1, grouped.shape[-1]), -1.0).flatten(1)
        self._narrow(scores, outputs[2].shape[-1])

    def _narrow(self, scores: torch.Tensor, taken: int) -> None:
        ranked = scores.sort(-1, descending=True).values
        self.nearest = min(self.nearest, (ranked[:, taken - 1] - ranked[:, taken]).min().item())
