"""A reward of sampled answers that a tiny model learns within a few updates."""

from typing import Any

import numpy as np

from families import VOCABULARY


class LowTokens:
    """Rewards the share of tokens of an answer that are below a quarter of the vocabulary."""

    names = ("low",)
    weights = np.ones(1)

    def __call__(self, _prompts: Any, _completions: Any, columns: dict[str, Any], _check: Any) -> np.ndarray:
        return np.array([[np.mean(np.array(tokens) < VOCABULARY // 4) for tokens in columns["completion_ids"]]])

    def close(self) -> None:
        """Nothing is to be ended."""
