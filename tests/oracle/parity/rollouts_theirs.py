"""TRL's own advantages, losses and gradients on the recorded rollouts; `python rollouts_theirs.py` records them."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from parity.rollouts import ANSWERS, CASES, GENERATIONS, MOST, RECORDED, Case, content, of_rows

_DEFAULTS = GRPOConfig(output_dir="unused", report_to="none", use_cpu=True, bf16=False, num_generations=2)
_MODES = {"token": "token_truncate", "sequence": "sequence_truncate", "none": "token_truncate"}


class _Accelerator:
    device, process_index, num_processes = torch.device("cpu"), 0, 1

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor

    gather_for_metrics = gather


def attributes(case: Case) -> dict[str, Any]:
    """Return what TRL's constructor would set from these options."""
    config = case.config
    gspo = config.loss_variant == "gspo"
    options = vars(_DEFAULTS) | {"steps_per_generation": 1, "gradient_accumulation_steps": 1}
    return {
        "args": SimpleNamespace(**options),
        "accelerator": _Accelerator(),
        "model": SimpleNamespace(training=True, name="before", is_gradient_checkpointing=False),
        "ref_model": SimpleNamespace(name="reference"),
        "environment_factories": None, "environments": None, "tools": None, "_is_vlm": False,
        "mask_truncated_completions": config.mask_truncated_completions,
        "eos_token_ids": [1], "eos_token_id": 1, "pad_to_multiple_of": None,
        "num_generations": GENERATIONS, "reward_weights": torch.ones(2), "reward_func_names": ["one", "other"],
        "reward_funcs": [None, None], "scale_rewards": config.scale_rewards,
        "multi_objective_aggregation": "sum_then_normalize", "beta": config.beta or 0.0,
        "num_iterations": 2 if case.moved else 1, "use_vllm": True, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": _MODES[config.sampler_correction],
        "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 2.0,
        "epsilon_low": config.epsilon, "epsilon_high": config.epsilon_high or config.epsilon,
        "loss_type": "grpo" if gspo else config.loss_variant or "dapo",
        "importance_sampling_level": "sequence" if gspo else "token",
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "max_completion_length": MOST,
        "aux_loss_enabled": False, "_entropy_bonus_enabled": False, "current_gradient_accumulation_steps": 1,
        "log_multimodal": False, "reward_clip_range": None, "normalize_advantages": False,
        "_metrics": {"train": defaultdict(list)}, "_pending_metrics": {}, "_pending_extra_logs": {},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "state": SimpleNamespace(num_input_tokens_seen=0, global_step=0), "chat_template_kwargs": {},
    }  # fmt: skip


def theirs(case: Case) -> dict[str, Any]:
    """Return TRL's numbers: its trainer without a model, on these completions, rewards and log-probabilities."""
    config, given = case.config, content(case)
    rloo = config.loss_variant == "rloo"
    kind = RLOOTrainer if rloo else GRPOTrainer
    now = torch.tensor(given.now, requires_grad=True)
    of_model = {"before": torch.tensor(given.before), "reference": torch.tensor(given.reference), "now": now}
    mask = torch.tensor(given.mask)
    old = torch.tensor(given.log_probabilities(given.before, config.temperature))

    class Trainer(kind):  # type: ignore[misc, valid-type]
        _tokenizer = SimpleNamespace(pad_token_id=0)

        def __init__(self) -> None:
            """No model is made."""

        def _generate(self, prompts: list[str]) -> Any:
            ids = [row[:length].tolist() for row, length in zip(given.tokens, given.lengths, strict=True)]
            sampled = (old + torch.tensor(given.noise)).tolist()
            cut = [row[:length] for row, length in zip(sampled, given.lengths, strict=True)]
            prompt_ids = [[1, 2, 3]] * ANSWERS
            if rloo:
                return prompt_ids, ids, [""] * ANSWERS
            return prompt_ids, ids, None, [""] * ANSWERS, cut, {}, None, []

        def _calculate_rewards(self, *_: Any) -> torch.Tensor:
            return torch.tensor(given.rewards.T)

        def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> Any:
            scaled = of_model[model.name] / config.temperature
            chosen = torch.tensor(given.tokens, dtype=torch.long)[..., None]
            logps = torch.log_softmax(scaled, dim=-1).gather(-1, chosen)[..., 0]
            logps = torch.where(mask, logps, 0.0)
            return logps, torch.zeros_like(logps), None

    trainer = Trainer()
    vars(trainer).update(attributes(case))
    with torch.no_grad():
        inputs = trainer._generate_and_score_completions([{"prompt": ""} for _ in range(ANSWERS)])
    if config.sampler_correction == "none":
        trainer.use_vllm = False
    loss = trainer._compute_loss(SimpleNamespace(name="now"), inputs)
    loss.backward()
    advantages = inputs["advantages"]
    return {"loss": loss.item(), "advantages": advantages.tolist(), "gradients": of_rows(now.grad.numpy())}


if __name__ == "__main__":
    found = {name: theirs(case) for name, case in CASES.items()}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
