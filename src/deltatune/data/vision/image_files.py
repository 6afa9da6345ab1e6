"""Opens image files: upright, in RGB, and with white behind what is transparent."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UserError, first_line
from ...machine.environment import expanded

# Pillow converts these modes to 8-bit RGB without visible loss; it would clip 16-bit and floating ones to white.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
# What Pillow's readers raise for a file that is damaged.
_DAMAGED = (
    OSError, SyntaxError, ValueError, RuntimeError, LookupError, TypeError, ArithmeticError, EOFError, struct.error,
    zlib.error,
)  # fmt: skip
# Linux takes no longer paths, and macOS none of a quarter of this.
_LONGEST_PATH = 4096
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
    if len(value) > _LONGEST_PATH:
        raise UserError(
            f"{source}: {kind} {value[:60]}: expected a path, got a text of {len(value):,} characters; write what it "
            "holds into a file, and give its path."
        )
    path = folder / expanded(value)
    # Path.is_file raises for a name that the file system finds too long.
    if not os.path.isfile(path):
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
    """Read an image: of an animation the first picture, upright, with white behind what is transparent, in RGB.

    Args:
        file: what `image_file` returns.
        source: where the row came from, for messages to the user.

    Raises:
        UserError: the file is no image, damaged, too large or of an unfit kind.
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

    Source:
        Exif 2.32, section 4.5 (the block is a TIFF file, of which the first directory is read here), and TIFF 6.0.
    """
    block = block.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(f"{order}I", block, 4)
        (count,) = struct.unpack_from(f"{order}H", block, start)
        for place in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(f"{order}HH", block, place)
            if tag == _ORIENTATION:
                return struct.unpack_from(order + _INTEGERS[kind], block, place + 8)[0] if kind in _INTEGERS else None
    except struct.error:
        return None
    return None


def _opaque(image: Any) -> Any:
    """Return an image in RGB, with white where it is transparent.

    Source:
        qwen_vl_utils.vision_process.to_rgb.
    """
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white
