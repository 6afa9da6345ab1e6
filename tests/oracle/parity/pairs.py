"""Parity on preferences: the losses to compare with TRL's, and the pairs for both sides."""

from dataclasses import dataclass, replace

import numpy as np

from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.cases import STEPS, ParityCase
from deltatune.selftest.parity.families import FAMILIES, Weights

PAIRS = 3


def two_layers(**changes: float) -> ParityCase:
    """A model of a gated-delta and an attention layer, with LoRA."""
    family = FAMILIES["qwen3_5"]
    options = family.options | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return ParityCase(replace(family, options=options, **changes))


@dataclass(frozen=True)
class PairCase:
    """A preference loss and its options on both sides; `draw` is that of the checkpoint.

    TRL's run is recorded, or compared live.
    """

    loss: str
    variant: str = "sigmoid"
    beta: float = 0.3
    smoothing: float = 0.0
    learning_rate: float = 4e-3
    draw: int = 7
    recorded: bool = False

    @property
    def gamma(self) -> float:
        """SimPO's margin."""
        return 0.5

    @property
    def model(self) -> ParityCase:
        """The model that is trained."""
        return two_layers(draw=self.draw, learning_rate=self.learning_rate)


CASES: dict[str, PairCase] = {
    "dpo": PairCase("dpo", learning_rate=1e-3, recorded=True),
    "dpo-robust": PairCase("dpo", "robust", smoothing=0.1, learning_rate=1e-3),
    "dpo-hinge": PairCase("dpo", "hinge", learning_rate=1e-3),
    "dpo-ipo": PairCase("dpo", "ipo", learning_rate=1e-3),
    "orpo": PairCase("orpo", recorded=True),
    "kto": PairCase("kto", learning_rate=1e-3, recorded=True),
    "simpo": PairCase("simpo", beta=2.0, smoothing=0.1, recorded=True),
    "cpo": PairCase("cpo", beta=0.1, smoothing=0.1, recorded=True),
    "cpo-hinge": PairCase("cpo", "hinge"),
    "cpo-ipo": PairCase("cpo", "ipo"),
}


@dataclass(frozen=True)
class TokenPair:
    """The tokens of a prompt and of its two answers."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def pairs(step: int) -> list[TokenPair]:
    """The pairs of a step: a chosen answer continues the prompt's noisy cycle, and a rejected one is random."""
    draw = seeded.generator(f"pairs {step}")
    drawn = []
    for _ in range(PAIRS):
        lengths = [3 + int(draw.random() * 12), 4 + int(draw.random() * 20), 4 + int(draw.random() * 20)]
        current = int(draw.random() * seeded.ALPHABET)
        cycle = []
        for _ in range(lengths[0] + lengths[1]):
            cycle.append(7 + 3 * current)
            jump = draw.random() < 0.2
            current = int(draw.random() * seeded.ALPHABET) if jump else (3 * current + 1) % seeded.ALPHABET
        random = [7 + 3 * int(draw.random() * seeded.ALPHABET) for _ in range(lengths[2])]
        drawn.append(TokenPair(cycle[: lengths[0]], cycle[lengths[0] :], random))
    return drawn


def checksums(weights: Weights) -> dict[str, str]:
    """Checksums of the drawn checkpoint and of the pairs of every step."""
    tokens = {
        f"{step}.{number}.{name}": np.array(value, np.int32)
        for step in range(STEPS)
        for number, pair in enumerate(pairs(step))
        for name, value in vars(pair).items()
    }
    return {"checkpoint": seeded.checksum(weights), "pairs": seeded.checksum(tokens)}
