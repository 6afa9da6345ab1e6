"""Turns the images of rows into patches. A message names the file and line of one that cannot be trained on."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError, reason
from ...models.vision.inputs import Grid, Picture
from ...models.vision.load import needs_torch
from .image_files import file_content, image_file, name_of, open_image


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Turns an image of a row into patches. The row gives a path, or what `datasets` holds in an image column.

    Args:
        processor: the model's image processor.
        folder: the folder to which relative paths refer.
        limits: min_pixels and max_pixels, the areas between which images are scaled; the processor's own if missing.
    """

    processor: Any
    folder: Path
    limits: Mapping[str, int]

    @functools.cached_property
    def _limited(self) -> Any:
        """The processor with the limits set on it, since mlx-vlm before 0.6 ignores the limits of a call."""
        limited = copy.copy(self.processor)
        for name, value in self.limits.items():
            if hasattr(limited, name):
                setattr(limited, name, value)
        return limited

    def picture(self, value: Any, source: str) -> Picture:
        """Return the patches of an image; UserError, naming `source`, if it is missing, damaged or of an unfit kind."""
        image = open_image(image_file(value, self.folder, source), source)
        try:
            processed = self._limited([image], **self.limits)
        except ImportError as error:
            raise UserError(f"{source}: the model's image processor: {needs_torch(error) or reason(error)}") from error
        except (ValueError, TypeError) as error:
            raise UserError(f"{source}: {name_of(value)}: the model's image processor refuses it: {error}.") from error
        rows = np.asarray(processed["image_grid_thw"]).reshape(-1, 3)
        grid: Grid = (int(rows[0, 0]), int(rows[0, 1]), int(rows[0, 2]))
        return Picture(np.asarray(processed["pixel_values"], np.float32), grid)

    def digest(self, value: Any, source: str) -> bytes:
        """Return a digest of the image, by which a resumed run recognises its data."""
        return hashlib.blake2b(file_content(image_file(value, self.folder, source)), digest_size=16).digest()
