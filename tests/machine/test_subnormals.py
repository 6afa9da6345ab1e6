"""Tests that MLX's CPU thread flushes subnormal numbers and Python's does not.

Every case runs in a fresh process, since the setting is decided once in each.
"""

import json
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="only x86-64 Linux flushes them"
)

PROBE = """
import json
{imports}
import mlx.core as mx
x = mx.full((1 << 10,), 1e-30, stream=mx.cpu)
small = mx.full((1 << 10,), 1e-9, stream=mx.cpu)
product = mx.multiply(x, small, stream=mx.cpu)
normal = mx.multiply(small, small, stream=mx.cpu)
print(json.dumps(dict(product=product.tolist(), normal=normal[0].item(), python=1e-300 * 1e-10)))
"""


def probe(imports: str) -> dict:
    code = PROBE.format(imports=imports)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def test_mlx_flushes_them_and_python_does_not():
    result = probe("import deltatune")
    assert result["product"] == [0.0] * 1024
    assert result["normal"] == pytest.approx(1e-18)
    assert result["python"] > 0


def test_mlx_alone_keeps_them():
    """This is why machine/startup.py has _flushed(). If MLX itself flushes them one day, it can be deleted."""
    assert probe("")["product"][0] == pytest.approx(1e-39, rel=1e-5)
