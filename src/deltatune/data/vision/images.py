"""Opens the images of a data set. A message names the file and line of an image that cannot be trained on."""

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

# Pillow converts these modes to 8-bit RGB without visible loss; it would clip 16-bit and floating ones to white.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


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


def image_file(value: Any, folder: Path, source: str) -> Any:
    """Return the path, the bytes or the PIL image that a row gives; UserError, naming `source`, for anything else."""
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return value["bytes"]
        value = value.get("path")
    if isinstance(value, str):
        return media_path("image", value, folder, source)
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return value
    raise UserError(f"{source}: expected the path of an image, got {type(value).__name__} {str(value)[:60]!r}.")


def media_path(kind: str, value: str, folder: Path, source: str) -> Path:
    """Return the file of an image or video (`kind`); UserError, naming `source`, if there is no such file."""
    if value.startswith(("http://", "https://", "data:")):
        raise UserError(f"{source}: {kind} {value[:60]}: expected a path; download it, and give its path.")
    path = folder / Path(value).expanduser()
    if not path.is_file():
        raise UserError(f"{source}: {kind} {value}: no such file ({path}); paths begin at the data's folder.")
    return path


def file_content(file: Any) -> bytes:
    """Return the bytes of what `image_file` returns."""
    content = file.read_bytes() if isinstance(file, Path) else file
    return content if isinstance(content, bytes) else content.tobytes()


def name_of(value: Any) -> str:
    """Return what messages call an image."""
    if isinstance(value, Mapping):
        value = value.get("path") or "in the data set"
    return f"image {value}" if isinstance(value, str) else "image in the data set"


def open_image(file: Any, source: str) -> Any:
    """Read an image from a path, bytes or a PIL image, upright and in RGB; UserError, naming `source`, if it is bad."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    named = f"{source}: image {file}" if isinstance(file, Path) else f"{source}: image in the data set"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # The file is read whole, so that none stays open when an image is refused.
            content = file.read_bytes() if isinstance(file, Path) else file
            image = Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
            image.load()
    except UnidentifiedImageError as error:
        raise UserError(
            f"{named}: not an image, or a format that Pillow cannot read; give a PNG or JPEG file."
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{named}: too large ({error}); scale it down first.") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{named}: truncated or damaged ({error}); replace the file.") from error
    if image.mode not in _MODES:
        raise UserError(f"{named}: of mode {image.mode!r}; expected 8-bit colour or grey. Convert it to RGB first.")
    return ImageOps.exif_transpose(image).convert("RGB")
