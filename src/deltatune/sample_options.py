"""The options of a run's samples: the prompts that the model answers while it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from .values import Range, about

_GROUP = "saving and reporting"


@dataclass
class SampleOptions:
    """The options of TrainConfig that say which prompts are answered during training, how often and how far."""

    sample_prompts: list[str] = field(
        default_factory=list,
        metadata=about(
            _GROUP,
            "prompts that the model answers before, during and after training; a name that ends with .jsonl stands for "
            "the prompts, chats or texts in the rows of that file",
        ),
    )
    steps_per_sample: int | None = field(
        default=None,
        metadata=about(
            _GROUP,
            "number of iterations between two answers to sample_prompts; default: steps_per_eval",
            range=Range(least=1),
        ),
    )
    sample_max_tokens: int = field(
        default=100,
        metadata=about(_GROUP, "largest number of tokens in an answer to sample_prompts", range=Range(least=1)),
    )
