"""Writes how a run prepared its pictures into the processor's files of a checkpoint, which every program reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...json_files import read_json
from ...machine import atomic_files

#: The files with the settings of images, of videos, and of both.
IMAGES, VIDEOS, BOTH = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
# The options of a run, and their names in the files. A limit has an older name beside its place under "size".
_SIZES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_SAMPLING = {"fps": "fps", "video_max_frames": "max_frames"}


def write_picture_options(folder: Path, options: Mapping[str, Any]) -> str | None:
    """Write the limits of images and the sampling of videos with which a model was trained into its folder.

    The limits of a video stay the base's: they hold for all of its frames together in these files, and for each frame
    in a run.

    Args:
        folder: The checkpoint's folder, with the processor's files of its base.
        options: The options of the run; None stands for the base's own value.

    Returns:
        A sentence for the user, or None where nothing was written.

    Raises:
        OSError: The file system refuses.
    """
    trained_with = {name: options[name] for name in (*_SIZES, *_SAMPLING) if options.get(name) is not None}
    files = {name: read_json(folder / name) for name in (IMAGES, VIDEOS, BOTH) if (folder / name).is_file()}
    if not trained_with or not files.keys() & {IMAGES, BOTH}:
        return None
    both = files.get(BOTH, {})
    # Without settings of their own, videos are read by those of images.
    if VIDEOS not in files and "video_processor" not in both and "temporal_patch_size" in files.get(IMAGES, {}):
        files[VIDEOS] = copy.deepcopy(files[IMAGES])
    for content in (files.get(IMAGES), both.get("image_processor")):
        _set_limits(content, trained_with)
    for content in (files.get(VIDEOS), both.get("video_processor")):
        if content is not None:
            content.update({key: trained_with[name] for name, key in _SAMPLING.items() if name in trained_with})
    for name, content in files.items():
        atomic_files.write(folder / name, json.dumps(content, indent=2, ensure_ascii=False).encode())
    written = ", ".join(f"{name} {value}" for name, value in trained_with.items())
    return f"The processor's files say how pictures were prepared in training: {written}."


def _set_limits(content: dict[str, Any] | None, trained_with: Mapping[str, Any]) -> None:
    """Set the smallest and the largest area of an image in a processor's settings."""
    if content is None:
        return
    for name in _SIZES.keys() & trained_with.keys():
        if isinstance(content.get("size"), dict):
            content["size"][_SIZES[name]] = trained_with[name]
        if name in content or not isinstance(content.get("size"), dict):
            content[name] = trained_with[name]
