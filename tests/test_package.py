"""The package root: its exports, and modules that importing it does not drag in."""

import subprocess
import sys

import pytest

import deltatune


@pytest.mark.parametrize("name", deltatune.__all__)
def test_everything_exported_is_there(name):
    assert getattr(deltatune, name).__name__ == name


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'train_faster'"):
        deltatune.train_faster  # noqa: B018


def test_importing_is_light():
    code = "import sys, deltatune; print([m for m in ('numpy', 'transformers', 'mlx_lm') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
