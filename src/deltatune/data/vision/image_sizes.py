"""Computes the size that a row asks for its image, by the options and the rule of qwen_vl_utils."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UserError

_LIMITS = ("min_pixels", "max_pixels")
_SIDES = ("resized_height", "resized_width")
SIZE_OPTIONS = (*_LIMITS, *_SIDES)
# The limits that hold where neither the row nor the run gives any, in tokens.
_FEWEST_TOKENS, _MOST_TOKENS = 4, 16384
# The longer side may be this many times the shorter one.
_LARGEST_RATIO = 200


@dataclass(frozen=True, eq=False)
class SizedImage:
    """An image as a row gives it, with those of SIZE_OPTIONS that the row gives beside it, in pixels."""

    value: Any
    options: Mapping[str, int]


def size_options(part: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return those of SIZE_OPTIONS that a part of a message gives.

    Raises:
        UserError: One of them is no whole number above 0, or contradicts or lacks another.
    """
    options = {name: part[name] for name in SIZE_OPTIONS if part.get(name) is not None}
    for name, value in options.items():
        if isinstance(value, float) and value.is_integer():
            options[name] = value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{where}: {name!r}: expected a whole number of pixels above 0, got {str(value)[:60]!r}.")
    sides = [name for name in _SIDES if name in options]
    if len(sides) == 1:
        raise UserError(f"{where}: {sides[0]!r} alone; give {' and '.join(_SIDES)} together.")
    return options


def resized(height: int, width: int, options: Mapping[str, int], unit: int) -> tuple[int, int]:
    """Return the height and the width, in pixels, to which an image is scaled.

    Args:
        height, width: The size of the image, in pixels.
        options: Those of SIZE_OPTIONS that are given; a size that is given wins over limits.
        unit: The side of the square that becomes one token, in pixels.

    Raises:
        ValueError: The image is too long and narrow, or the limits leave it no pixel.

    Source:
        qwen_vl_utils.vision_process: fetch_image and smart_resize.
    """
    least, most = options.get("min_pixels", _FEWEST_TOKENS * unit**2), options.get("max_pixels", _MOST_TOKENS * unit**2)
    if all(name in options for name in _SIDES):
        height, width = (options[name] for name in _SIDES)
        least, most = _FEWEST_TOKENS * unit**2, _MOST_TOKENS * unit**2
    if least > most:
        raise ValueError(f"min_pixels {least:,} is larger than max_pixels {most:,}")
    if max(height, width) > _LARGEST_RATIO * min(height, width):
        raise ValueError(f"its longer side is more than {_LARGEST_RATIO} times the shorter one")
    rows, columns = (max(unit, round(side / unit) * unit) for side in (height, width))
    if rows * columns > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (math.floor(side / scale / unit) * unit for side in (height, width))
    elif rows * columns < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * scale / unit) * unit for side in (height, width))
    if not rows * columns:
        raise ValueError(f"max_pixels {most:,} leaves it no token of {unit} x {unit} pixels")
    return rows, columns
