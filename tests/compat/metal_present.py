"""pytest -p metal_present (metal.py)."""

import metal

metal.present()
