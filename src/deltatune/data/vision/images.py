"""Turns the images of rows into patches. A message names the file and line of one that cannot be trained on."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError, reason
from ...models.vision.inputs import Grid, Picture
from ...models.vision.load import needs_torch
from .image_files import file_content, image_file, name_of, open_image
from .image_sizes import SizedImage, resized

# The longer side of a thumbnail.
_THUMBNAIL_PIXELS = 160


def thumbnail(value: Any, folder: Path, source: str) -> str:
    """Return a small JPEG of a row's image as a data URI; UserError, naming `source`, where it cannot be read."""
    value = value.value if isinstance(value, SizedImage) else value
    image = open_image(image_file(value, folder, source), source)
    image.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Turns an image of a row into patches. The row gives a path, or a value of an image column of `datasets`.

    Args:
        processor: The model's image processor.
        folder: The folder to which relative paths refer.
        limits: min_pixels and max_pixels, the areas between which images are scaled; the processor's own if missing.
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
        value, options = (value.value, value.options) if isinstance(value, SizedImage) else (value, {})
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
        rows = np.asarray(processed["image_grid_thw"]).reshape(-1, 3)
        grid: Grid = (int(rows[0, 0]), int(rows[0, 1]), int(rows[0, 2]))
        return Picture(np.asarray(processed["pixel_values"], np.float32), grid)

    def digest(self, value: Any, source: str) -> bytes:
        """Return a digest of the image, by which a resumed run recognises its data."""
        value = value.value if isinstance(value, SizedImage) else value
        return hashlib.blake2b(file_content(image_file(value, self.folder, source)), digest_size=16).digest()
