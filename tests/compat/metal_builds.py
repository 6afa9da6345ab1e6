"""pytest -p metal_builds (metal.py)."""

import metal

metal.builds()
