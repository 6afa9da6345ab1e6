"""Where the vision demo's shipped files lie."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
