"""How images and videos are prepared: the options that say it, and the readers that follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...lora.adapter_files import options_of
from ...models.vision.inputs import VisionSpec
from .images import ImageReader
from .media import MediaReader
from .videos import VideoReader

#: The options of a run that say how its images and videos are prepared.
PICTURE_OPTIONS = ("min_pixels", "max_pixels", "fps", "video_max_frames")


@dataclass(frozen=True)
class VisionProcessors:
    """The parts of a vision model that reading images and videos needs.

    Args:
        processor: The model's image processor.
        spec: The token ids and sizes of the vision tower.
        videos: The model's video processor, or None if it has none.
    """

    processor: Any
    spec: VisionSpec
    videos: Any = None


def media_reader(processors: VisionProcessors, folder: Path, options: Mapping[str, Any]) -> MediaReader:
    """Return the reader of images and videos for training, evaluation and generation alike.

    Args:
        processors: The processors of the model.
        folder: The folder to which relative paths refer.
        options: The options of a run; of these, PICTURE_OPTIONS matter.

    Raises:
        UserError: A processor cuts other patches than the vision tower takes.
    """
    _check_patches(processors)
    limits = {name: options[name] for name in ("min_pixels", "max_pixels") if options.get(name) is not None}
    images = ImageReader(processors.processor, folder, limits)
    videos = VideoReader(processors.videos, folder, limits, options.get("fps"), options.get("video_max_frames"))
    return MediaReader(images, videos)


def _check_patches(processors: VisionProcessors) -> None:
    spec = processors.spec
    for name, needed in (
        ("patch_size", spec.patch),
        ("temporal_patch_size", spec.temporal),
        ("merge_size", spec.merge),
    ):
        for processor in (processors.processor, processors.videos):
            actual = getattr(processor, name, needed)
            if actual != needed:
                raise UserError(
                    f"the model's processor has {name} {actual}, and its vision tower {needed}; take the "
                    "preprocessor_config.json of the original model."
                )


def picture_options(options: Mapping[str, Any], adapter_path: str | None) -> dict[str, Any]:
    """Return PICTURE_OPTIONS as they are given, and where they are not, as an adapter was trained with them.

    Args:
        options: The options that the user gave; None stands for one that was not given.
        adapter_path: The folder of the adapter, or None for a model alone.

    Raises:
        UserError: The adapter's config is missing or damaged.
    """
    trained = options_of(Path(adapter_path)) if adapter_path else {}
    return {name: trained.get(name) if options.get(name) is None else options[name] for name in PICTURE_OPTIONS}
