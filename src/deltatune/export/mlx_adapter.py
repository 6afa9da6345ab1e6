"""Copies an adapter without the files of its run, for mlx_lm.generate, mlx_lm.server and LM Studio."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import UserError
from ..lora.adapter_files import CONFIG, WEIGHTS, read_config, read_weights


def write_mlx(adapter_path: str | Path, save_path: str | Path) -> Path:
    """Copy the two files that make an adapter of MLX into a new folder.

    Raises:
        UserError: The adapter is damaged, or the folder holds one already or cannot be written.
    """
    adapter_path, save_path = Path(adapter_path), Path(save_path)
    read_config(adapter_path)
    read_weights(adapter_path / WEIGHTS)
    if (save_path / CONFIG).exists():
        raise UserError(f"{save_path}: it holds an adapter already; give a new folder as --save-path.")
    try:
        save_path.mkdir(parents=True, exist_ok=True)
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(adapter_path / name, save_path / name)
    except OSError as error:
        raise UserError(f"{save_path}: the adapter cannot be written ({error.strerror}).") from error
    return save_path
