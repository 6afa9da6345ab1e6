"""Puts scripts/ on the path, since clang's view of the kernels and their table are made there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
