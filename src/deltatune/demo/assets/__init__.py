"""The path of the demo's bundled model."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
