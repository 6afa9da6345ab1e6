"""Makes the virtual environment of a set of versions under .compat/, as scripts/make_env makes .venv."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from versions import Versions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".compat"


def make(versions: Versions) -> Path:
    """The set's Python; its environment is installed anew, from a package index, where the requirements changed."""
    linux = platform.system() == "Linux"
    wanted = [f"mlx[cpu]=={versions.mlx}", "-e", ".[cpu]"] if linux else [f"mlx=={versions.mlx}", "-e", "."]
    wanted += [f"mlx-lm=={versions.mlx_lm}", f"mlx-vlm=={versions.mlx_vlm}", "av", "pytest", "ziglang"]
    place = FOLDER / versions.name
    python, ready = place / "bin" / "python", place / ".ready"
    others = _others()
    if ready.is_file() and ready.read_text() == "\n".join([*wanted, others]):
        return python
    shutil.rmtree(place, ignore_errors=True)
    if shutil.which("uv"):
        subprocess.run(["uv", "venv", "-q", "--seed", "--python", sys.executable, str(place)], check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    constraints = place / "constraints.txt"
    constraints.write_text(others)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(constraints)]
    subprocess.run([*install, *wanted], check=True, cwd=ROOT)
    ready.write_text("\n".join([*wanted, others]))
    return python


def _others() -> str:
    """constraints.txt without the packages in which the sets differ."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("mlx"))
