"""Puts scripts/ on the path, since the training texts of the demos' base models are made there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
