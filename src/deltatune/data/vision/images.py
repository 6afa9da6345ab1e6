"""Turns the images of rows into patches, in the size that a row or the run asks, by the rule of qwen_vl_utils."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError, reason
from ...models.load import needs_torch
from ...models.vision.inputs import Picture
from .image_files import SizedImage, file_content, image_file, name_of, open_image

# The longer side of a thumbnail.
_THUMBNAIL_PIXELS = 160
_LIMITS = ("min_pixels", "max_pixels")
_SIDES = ("resized_height", "resized_width")
SIZE_OPTIONS = (*_LIMITS, *_SIDES)
# The limits that hold where neither the row nor the run gives any, in tokens.
_FEWEST_TOKENS = 4
_MOST_TOKENS = 16384
# The longer side may be this many times the shorter one.
_LARGEST_RATIO = 200


def size_options(part: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return those of SIZE_OPTIONS that a part of a message gives.

    A UserError refuses one that is no whole number above 0, or contradicts or lacks another.
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
    """Return the height and the width, in pixels, to which an image is scaled, by
    qwen_vl_utils.vision_process.smart_resize.

    `options` are those of SIZE_OPTIONS that are given; a size that is given wins over limits. `unit` is the side, in
    pixels, of the square that becomes one token. A ValueError says that the image is too long and narrow, or that the
    limits leave it no pixel.
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


def thumbnail(value: Any, folder: Path, source: str) -> str:
    """Return a small JPEG of a row's image as a data URI; UserError, naming `source`, where it cannot be read."""
    image = open_image(image_file(value, folder, source), source)
    image.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def processed_picture(patches: Any, grid: Any) -> Picture:
    """Return the one picture of a processor's result: its patches, and the number of its frames, rows and columns."""
    frames, rows, columns = np.asarray(grid).reshape(-1, 3)[0].tolist()
    return Picture(np.asarray(patches, np.float32), (frames, rows, columns))


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Turns an image of a row into patches. The row gives a path, or a value of an image column of `datasets`.

    Relative paths begin at `folder`. `limits` are min_pixels and max_pixels, the areas between which images are scaled;
    the processor's own if missing.
    """

    processor: Any
    folder: Path
    limits: Mapping[str, int]

    def _scaled(self, image: Any, options: Mapping[str, int]) -> tuple[Any, dict[str, int]]:
        """Return an image in the size of its row's options, and limits that leave it so."""
        unit = self.processor.patch_size * self.processor.merge_size
        height, width = resized(image.height, image.width, {**self.limits, **options}, unit)
        return image.resize((width, height)), {"min_pixels": height * width, "max_pixels": height * width}

    def picture(self, value: Any, source: str) -> Picture:
        """Return the patches of an image; UserError, naming `source`, if it is missing, damaged or of an unfit kind."""
        options = value.options if isinstance(value, SizedImage) else {}
        image = open_image(image_file(value, self.folder, source), source)
        limits = self.limits
        try:
            if options:
                image, limits = self._scaled(image, options)
            processed = self.processor([image], **limits)
        except ImportError as error:
            raise UserError(f"{source}: the model's image processor: {needs_torch(error) or reason(error)}") from error
        except (ValueError, TypeError) as error:
            raise UserError(f"{source}: {name_of(value)}: the model's image processor refuses it: {error}.") from error
        return processed_picture(processed["pixel_values"], processed["image_grid_thw"])

    def digest(self, value: Any, source: str) -> bytes:
        """Return a digest of the image, by which a resumed run recognises its data."""
        return hashlib.blake2b(file_content(image_file(value, self.folder, source)), digest_size=16).digest()
