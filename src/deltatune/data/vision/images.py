"""Opens the images of a data set; a message with file and line for each that cannot be trained on."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError, reason
from ...models.vision.inputs import Grid, Picture
from ...models.vision.load import needs_torch

# Modes that become 8-bit RGB without losing what is seen; 16-bit and floating ones would be clipped to white.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Turns what a row gives for an image into patches: a path, or what `datasets` holds in an image column.

    processor: the model's image processor. folder: where relative paths begin. limits: min_pixels and max_pixels, the
    sizes between which images are scaled; without them the processor's own.
    """

    processor: Any
    folder: Path
    limits: Mapping[str, int]

    @functools.cached_property
    def _limited(self) -> Any:
        """The processor, with the limits as its own: mlx-vlm before 0.6 does not heed those of a call."""
        limited = copy.copy(self.processor)
        for name, value in self.limits.items():
            if hasattr(limited, name):
                setattr(limited, name, value)
        return limited

    def picture(self, value: Any, source: str) -> Picture:
        """The patches of an image. UserError, with `source`, where it is missing, damaged, of an odd mode or shape."""
        image = open_image(image_file(value, self.folder, source), source)
        try:
            found = self._limited([image], **self.limits)
        except ImportError as error:
            raise UserError(f"{source}: the model's image processor: {needs_torch(error) or reason(error)}") from error
        except (ValueError, TypeError) as error:
            raise UserError(f"{source}: {name_of(value)}: the model's image processor refuses it: {error}.") from error
        rows = np.asarray(found["image_grid_thw"]).reshape(-1, 3)
        grid: Grid = (int(rows[0, 0]), int(rows[0, 1]), int(rows[0, 2]))
        return Picture(np.asarray(found["pixel_values"], np.float32), grid)

    def digest(self, value: Any, source: str) -> bytes:
        """Tells this image from another, to resume on the same data."""
        file = image_file(value, self.folder, source)
        content = file.read_bytes() if isinstance(file, Path) else file
        return hashlib.blake2b(content if isinstance(content, bytes) else content.tobytes(), digest_size=16).digest()


def image_file(value: Any, folder: Path, source: str) -> Any:
    """What a row gives for an image: a path, bytes, or a PIL image. UserError, with `source`, for anything else."""
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return value["bytes"]
        value = value.get("path")
    if isinstance(value, str):
        if value.startswith(("http://", "https://", "data:")):
            raise UserError(f"{source}: image {value[:60]}: expected a path; download it, and give its path.")
        path = folder / Path(value).expanduser()
        if not path.is_file():
            raise UserError(f"{source}: image {value}: no such file ({path}); paths begin at the data's folder.")
        return path
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return value
    raise UserError(f"{source}: expected the path of an image, got {type(value).__name__} {str(value)[:60]!r}.")


def name_of(value: Any) -> str:
    """What an image is called in messages."""
    if isinstance(value, Mapping):
        value = value.get("path") or "in the data set"
    return f"image {value}" if isinstance(value, str) else "image in the data set"


def open_image(file: Any, source: str) -> Any:
    """The image of a path, of bytes or already open: whole, upright, in RGB. UserError, with `source`, where bad."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    named = f"{source}: image {file}" if isinstance(file, Path) else f"{source}: image in the data set"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Read whole, so that no file stays open behind an image that is refused.
            content = file.read_bytes() if isinstance(file, Path) else file
            image = Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
            image.load()
    except UnidentifiedImageError as error:
        raise UserError(f"{named}: not an image, or of a format that Pillow does not read.") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{named}: too large ({error}); scale it down first.") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{named}: truncated or damaged ({error}).") from error
    if image.mode not in _MODES:
        raise UserError(f"{named}: of mode {image.mode!r}; expected 8-bit colour or grey. Convert it to RGB first.")
    return ImageOps.exif_transpose(image).convert("RGB")
