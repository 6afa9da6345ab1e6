"""Leaves the images and videos of a Hugging Face data set as the bytes or paths that it stores.

The datasets library would open each of them in its own way before the row is seen, and with it any damaged one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def leave_undecoded(features: Any) -> None:
    """Switch off, in place, the decoding of the images and videos among the columns of a data set.

    Args:
        features: the columns, `dataset.info.features`, or a part of them.
    """
    import datasets

    if isinstance(features, datasets.Image | datasets.Video):
        features.decode = False
    elif isinstance(features, Mapping):
        for feature in features.values():
            leave_undecoded(feature)
    elif isinstance(features, list | tuple):
        for feature in features:
            leave_undecoded(feature)
    elif hasattr(features, "feature"):
        leave_undecoded(features.feature)
