"""Turns the images of rows into patches, in the size that a row or the run asks, by the rule of qwen_vl_utils."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import os
import re
import struct
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import numpy as np

from ...errors import UserError, first_line, reason
from ...machine.environment import expanded
from ...models.load import needs_torch
from ...models.vision.inputs import Picture
from ..rows.unread_columns import refuse_unknown_keys

# Pillow converts these modes to 8-bit RGB without visible loss; it would clip 16-bit and floating ones to white.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
# The errors of Pillow's readers for a damaged file.
_DAMAGED = (
    OSError, SyntaxError, ValueError, RuntimeError, LookupError, TypeError, ArithmeticError, EOFError, struct.error,
    zlib.error,
)  # fmt: skip
# Linux takes no longer paths, and macOS none of a quarter of this.
_LONGEST_PATH = 4096
_LONGEST_SHOWN = 300
_FILE_URL = "file://"
# The keys of an object that describes an image: those of the datasets library, and OpenAI's.
_IMAGE_KEYS = ("bytes", "path", "url")
_BASE64 = re.compile(r"[A-Za-z0-9+/_\s-]{40,}={0,2}\s*")
# TIFF's types of whole numbers, as the struct module writes them.
_INTEGERS = {1: "B", 3: "H", 4: "I"}
# EXIF's tag of the orientation, and the name of Pillow's operation that undoes each of its values.
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


@dataclass(frozen=True, eq=False)
class SizedImage:
    """An image as a row gives it, with the options of its size that the row gives beside it, in pixels."""

    value: Any
    options: Mapping[str, int]


def image_file(value: Any, folder: Path, source: str) -> Any:
    """Return the path, the bytes or the PIL image that a row gives; UserError, naming `source`, for anything else.

    Bytes may be written as base64: behind "data:image/png;base64,", or alone.
    """
    value = value.value if isinstance(value, SizedImage) else value
    if isinstance(value, Mapping):
        refuse_unknown_keys(value, _IMAGE_KEYS, f"{source}: an image")
        content = value.get("bytes")
        if content is not None:
            return _decoded(content, source) if isinstance(content, str) else bytes(content)
        value = value.get("path") or value.get("url")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return _image_in_text(value, folder, source)
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return value
    raise UserError(f"{source}: expected the path of an image, got {type(value).__name__} {str(value)[:60]!r}.")


def _image_in_text(value: str, folder: Path, source: str) -> Path | bytes:
    if value.startswith("data:"):
        header, _, body = value.partition(",")
        return _decoded(body, source) if header.endswith(";base64") else unquote_to_bytes(body)
    if _BASE64.fullmatch(value) and not _is_file(folder, value):
        from PIL import Image

        # A path may be made of the same letters, so only bytes that decode to an image count as one.
        with contextlib.suppress(UserError, *_DAMAGED):
            content = _decoded(value, source)
            Image.open(io.BytesIO(content)).close()
            return content
    return media_path("image", value, folder, source)


def _decoded(text: str, source: str) -> bytes:
    digits = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(digits + "=" * (-len(digits) % 4), validate=True)
    except ValueError as error:
        raise UserError(
            f"{source}: image {shown(text)}: expected bytes in base64 ({first_line(error)}); write them anew."
        ) from error


def media_path(kind: str, value: str, folder: Path, source: str) -> Path:
    """Return the file of an image or video (`kind`); UserError, naming `source`, if there is no such file."""
    if value.startswith(("http://", "https://", "data:")):
        raise UserError(f"{source}: {kind} {value[:60]}: expected a path; download it, and give its path.")
    if len(value) > _LONGEST_PATH:
        raise UserError(
            f"{source}: {kind} {value[:60]}: expected a path, got a text of {len(value):,} characters; write what it "
            "holds into a file, and give its path."
        )
    name = _local(value)
    if not _is_file(folder, name):
        where = f" ({folder / expanded(name)})" if shown(value) == value else ""
        raise UserError(f"{source}: {kind} {shown(value)}: no such file{where}; paths begin at the data's folder.")
    return folder / expanded(name)


def _local(value: str) -> str:
    """Return the path in a file URL, with letters such as %20 decoded, or a path as it is."""
    if not value.startswith(_FILE_URL):
        return value
    path = re.sub("^localhost/", "/", value.removeprefix(_FILE_URL))
    return path if os.path.isfile(path) else unquote(path)


def _is_file(folder: Path, name: str) -> bool:
    # Path.is_file raises for a name that the file system finds too long.
    return len(name) <= _LONGEST_PATH and os.path.isfile(folder / expanded(name))


def shown(value: str) -> str:
    """Return a path as messages show it; of a text that may be base64, or is longer than a path, the beginning."""
    if len(value) <= _LONGEST_SHOWN and not value.startswith("data:") and not _BASE64.fullmatch(value):
        return value
    return f"{value[:60]}..."


def file_content(file: Any) -> bytes:
    """Return the bytes of an image from `image_file`."""
    content = file.read_bytes() if isinstance(file, Path) else file
    return content if isinstance(content, bytes) else content.tobytes()


def name_of(value: Any) -> str:
    """Return the name of an image in messages."""
    value = value.value if isinstance(value, SizedImage) else value
    if isinstance(value, Mapping):
        value = value.get("path") or value.get("url")
    return f"image {shown(value)}" if isinstance(value, str) else "image in the data set"


def open_image(file: Any, source: str) -> Any:
    """Read an image of image_file(): of an animation the first picture, upright, with white behind transparency, in
    RGB.

    A UserError, naming `source`, says that it is no image, damaged, too large or of an unfit kind.
    """
    from PIL import Image, UnidentifiedImageError

    named = f"{source}: image {file}" if isinstance(file, Path) else f"{source}: image in the data set"
    try:
        with warnings.catch_warnings():
            # Pillow warns of tags that it skips, of which only the orientation matters here.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # The file is read whole, so that none stays open when an image is refused.
            content = file.read_bytes() if isinstance(file, Path) else file
            image = Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
            image.load()
            if image.mode not in _MODES:
                raise UserError(
                    f"{named}: of mode {image.mode!r}; expected 8-bit colour or grey. Convert it to RGB first."
                )
            return _opaque(_upright(image))
    except UserError:
        raise
    except UnidentifiedImageError as error:
        raise UserError(
            f"{named}: not an image, or a format that Pillow cannot read; give a PNG or JPEG file."
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{named}: too large ({error}); scale it down first.") from error
    except _DAMAGED as error:
        raise UserError(f"{named}: truncated or damaged ({first_line(error)}); replace the file.") from error


def _upright(image: Any) -> Any:
    """Turn or mirror an image as its orientation says. A block that cannot be read says nothing, as in any viewer."""
    from PIL import Image

    block = image.info.get("exif")
    orientation = stated_orientation(block) if isinstance(block, bytes) else None
    if orientation is None:
        # Pillow knows the other places where a file may state it, such as XMP.
        with contextlib.suppress(*_DAMAGED):
            orientation = image.getexif().get(_ORIENTATION)
    operation = _UPRIGHT.get(orientation or 1)
    return image if operation is None else image.transpose(Image.Transpose[operation])


def stated_orientation(block: bytes) -> int | None:
    """Return the orientation that an EXIF block states, or None. Pillow would stop at a damaged tag before it.

    The block is a TIFF file, of which the first directory is read here (Exif 2.32, section 4.5, and TIFF 6.0).
    """
    block = block.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return None
    with contextlib.suppress(struct.error):
        (start,) = struct.unpack_from(f"{order}I", block, 4)
        (count,) = struct.unpack_from(f"{order}H", block, start)
        for place in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(f"{order}HH", block, place)
            if tag == _ORIENTATION and kind in _INTEGERS:
                return struct.unpack_from(order + _INTEGERS[kind], block, place + 8)[0]
    return None


def _opaque(image: Any) -> Any:
    """Return an image in RGB, with white where it is transparent, as qwen_vl_utils.vision_process.to_rgb does."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


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

    def picture(self, value: Any, source: str) -> Picture:
        """Return the patches of an image; UserError, naming `source`, if it is missing, damaged or of an unfit kind."""
        options = value.options if isinstance(value, SizedImage) else {}
        image = open_image(image_file(value, self.folder, source), source)
        limits = self.limits
        try:
            if options:
                unit = self.processor.patch_size * self.processor.merge_size
                height, width = resized(image.height, image.width, {**self.limits, **options}, unit)
                image = image.resize((width, height))
                limits = dict.fromkeys(_LIMITS, height * width)
            processed = self.processor([image], **limits)
        except ImportError as error:
            raise UserError(f"{source}: the model's image processor: {needs_torch(error) or reason(error)}") from error
        except (ValueError, TypeError) as error:
            raise UserError(f"{source}: {name_of(value)}: the model's image processor refuses it: {error}.") from error
        return processed_picture(processed["pixel_values"], processed["image_grid_thw"])

    def digest(self, value: Any, source: str) -> bytes:
        """Return a digest of the image, by which a resumed run recognises its data."""
        return hashlib.blake2b(file_content(image_file(value, self.folder, source)), digest_size=16).digest()
