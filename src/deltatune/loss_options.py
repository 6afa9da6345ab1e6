"""Options of TrainConfig: what is learnt, and what is added to the loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from .values import Range
from .values import about as _about

_LOSS = "loss"


@dataclass
class LossOptions:
    """The options of what is learnt. TrainConfig inherits them."""

    loss: str = field(
        default="sft",
        metadata=_about(
            _LOSS,
            "what is learnt: sft imitates the data; the others learn which of two answers is better, kto whether one "
            "answer is good",
            choices=("sft", "dpo", "orpo", "kto", "simpo", "cpo"),
        ),
    )
    loss_variant: str = field(
        default="sigmoid",
        metadata=_about(
            _LOSS,
            "published form of dpo (sigmoid, robust, hinge or ipo) or cpo (sigmoid, hinge or ipo)",
            choices=("sigmoid", "robust", "hinge", "ipo"),
        ),
    )
    beta: float = field(
        default=0.1,
        metadata=_about(
            _LOSS,
            "factor of the rewards of a preference loss, and orpo's weight of the odds ratio; the authors of simpo "
            "use 2.0",
            range=Range(above=0),
        ),
    )
    gamma: float = field(
        default=0.5,
        metadata=_about(
            _LOSS, "margin by which simpo wants the chosen answer's reward to be larger", range=Range(least=0)
        ),
    )
    label_smoothing: float = field(
        default=0.0,
        metadata=_about(
            _LOSS, "share of pairs assumed to be labelled wrongly (dpo, simpo, cpo)", range=Range(least=0, below=0.5)
        ),
    )
    router_aux_loss_coef: float = field(
        default=0.0,
        metadata=_about(_LOSS, "weight of the load-balancing loss of a mixture's routers", range=Range(least=0)),
    )
    router_z_loss_coef: float = field(
        default=0.0, metadata=_about(_LOSS, "weight of the z-loss of a mixture's routers", range=Range(least=0))
    )
    neftune_noise_alpha: float | None = field(
        default=None,
        metadata=_about(_LOSS, "size of NEFTune's noise on the embeddings, such as 5", range=Range(above=0)),
    )
