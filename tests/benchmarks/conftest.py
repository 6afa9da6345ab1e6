"""Puts benchmarks/ on the path: its programs import one another by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
