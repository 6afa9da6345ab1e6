"""The reference run of thirty updates: TRL's trainer on a model of transformers and PEFT, on the CPU in fp32."""

from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer

from deltatune.selftest.parity.cases import ParityRun, initial_adapters
from deltatune.selftest.parity.recording import Difference

from . import theirs, updates
from .record import TEXT, Reference, difference, one_thread
from .rollouts import GENERATIONS, Case
from .rollouts_theirs import attributes
from .updates import MODEL


class _Recorded(GRPOTrainer):
    """TRL's trainer with recorded answers, and a model that scores them."""

    _tokenizer = SimpleNamespace(pad_token_id=0)

    def __init__(self, case: Case, model: torch.nn.Module):
        config = case.config
        own = {"model": model, "use_vllm": False, "temperature": config.temperature}
        vars(self).update(attributes(case) | own | {"reward_funcs": [None], "reward_func_names": ["share"]})
        self.reward_weights = torch.ones(1)
        self.number = -1

    def _generate(self, prompts: list[str]) -> Any:
        self.number += 1
        answers = updates.sampling(self.number)
        ids = [row[:length].tolist() for row, length in zip(answers.tokens, answers.lengths, strict=True)]
        asked = [answers.prompts[at // GENERATIONS].tolist() for at in range(len(ids))]
        return asked, ids, None, [""] * len(ids), None, {}, None, []

    def _get_per_token_logps_and_entropies(
        self, model: torch.nn.Module, tokens: torch.Tensor, present: torch.Tensor, count: int, *_: Any, **__: Any
    ) -> Any:
        """Score the last tokens; TRL's own has a forward pass of its own kernels for it."""
        logits = model(input_ids=tokens, attention_mask=present, use_cache=False).logits[:, -count - 1 : -1]
        of_all = torch.log_softmax(logits / self.temperature, dim=-1)
        scored = of_all.gather(-1, tokens[:, -count:, None])[..., 0]
        return scored, torch.zeros_like(scored), None

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        return torch.tensor(updates.sampling(self.number).rewards)[:, None]


def train(case: Case, model: torch.nn.Module, parameters: theirs.Parameters) -> ParityRun:
    """The recipe with TRL's loss; `parameters` are trained in place."""
    trainer = _Recorded(case, model)
    sampled: dict[str, Any] = {}

    def loss_of(step: int) -> torch.Tensor:
        if step % case.config.num_iterations == 0:
            with torch.no_grad():
                sampled.update(
                    trainer._generate_and_score_completions([{"prompt": ""} for _ in range(updates.ANSWERS)])
                )
        return trainer._compute_loss(model, sampled)

    return theirs.train(loss_of, model, parameters, MODEL.family.learning_rate)


def compare(case: Case) -> tuple[Difference, Reference]:
    """Run both sides from the same start and say how far they are apart."""
    config, shapes = TEXT.layout(MODEL)
    weights = MODEL.family.weights(shapes)
    with one_thread():
        model = TEXT.load(config, weights)
        targets = TEXT.targets(MODEL, model)
        adapters = initial_adapters(targets)
        parameters = theirs.adapt(model, adapters, dora=False)
        initial = theirs.copied(parameters)
        base = Reference(config, weights, targets, initial, train(case, model, parameters), float("inf"))
    return difference(base, updates.run(case.config, config, weights, adapters)), base
