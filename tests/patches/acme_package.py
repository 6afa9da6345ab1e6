"""A small package that tests patch, and the record of its one function."""

import importlib
import sys
import textwrap

import pytest

from deltatune.patches import Patch, evidence, patch
from deltatune.patches.patch_record import TRIED

FILES = {
    "acme/__init__.py": "__version__ = '1.2.3'",
    "acme/ops.py": """
        def update(x, scale=1):
            return x * scale
        class Layer:
            def __call__(self, x):
                return x + 1
        """,
    "acme/one.py": "from .ops import update",
    "acme/two.py": "from .ops import update as renamed",
    "acme/own.py": "def update(x):\n    return 'its own'",
    "bystander.py": "from acme.ops import update",
    "foreign.py": "def update(x, scale=1):\n    return 'theirs'",
}


def replacement(upstream):
    def update(x, scale=1):
        return ("ours", upstream(x, scale))

    return update


RECORD = Patch(
    module="acme.ops",
    name="update",
    reason="to test",
    without="Training goes slowly.",
    replacement=replacement,
    check=lambda upstream, ours: None,
)


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """A function that imports a module of the package. The package and all patches are removed afterwards."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TRIED, "acme", ">=1.2,<1.3")
    monkeypatch.setattr(evidence, "_path", lambda key: tmp_path / "evidence" / key)
    evidence.forget()
    before = set(sys.modules)
    yield importlib.import_module
    patch.revert()
    for name in set(sys.modules) - before:
        del sys.modules[name]
