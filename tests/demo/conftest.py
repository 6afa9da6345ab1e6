"""The demos' texts lie beside the scripts that make their models."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
