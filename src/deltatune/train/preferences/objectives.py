"""The preference losses by name, and the check of their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import UserError
from ...options.config import TrainConfig
from .answers import Answers, Scored
from .cpo import cpo
from .dpo import dpo
from .kto import kto
from .orpo import orpo
from .simpo import simpo

# The figures of every preference loss. The names are TRL's, which people's dashboards know.
_REPORTED = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected")
MARGINS = "rewards/margins"


@dataclass(frozen=True)
class Objective:
    """A preference loss.

    Attributes:
        score: The loss itself.
        variants: The published forms that it has.
        needs_reference: Whether it needs log-probabilities under a reference model.
        more: The names of the further scalars that it reports.
    """

    score: Callable[[Answers, TrainConfig], Scored]
    variants: tuple[str, ...] = ("sigmoid",)
    needs_reference: bool = False
    more: tuple[str, ...] = ()

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all that it reports."""
        return (*_REPORTED, *self.more)


OBJECTIVES: dict[str, Objective] = {
    "dpo": Objective(dpo, ("sigmoid", "robust", "hinge", "ipo"), needs_reference=True),
    "orpo": Objective(orpo, more=("nll_loss",)),
    "kto": Objective(kto, needs_reference=True, more=("kl",)),
    "simpo": Objective(simpo),
    "cpo": Objective(cpo, ("sigmoid", "hinge", "ipo"), more=("nll_loss",)),
}


def objective_of(config: TrainConfig) -> Objective | None:
    """Return the preference loss of a run, or None for supervised fine-tuning.

    Raises:
        UserError: An option does not fit the loss.
    """
    if config.loss == "sft":
        return None
    objective = OBJECTIVES[config.loss]
    if config.loss_variant not in objective.variants:
        known = ", ".join(objective.variants)
        raise UserError(f"loss_variant: {config.loss} has no form {config.loss_variant!r}; expected {known}.")
    if config.mask_prompt is not None:
        raise UserError("mask_prompt: a preference loss always counts answers only; leave --mask-prompt out.")
    return objective
