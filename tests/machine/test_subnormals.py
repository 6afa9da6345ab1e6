"""MLX's CPU threads flush subnormal numbers; Python's own do not. In fresh processes: it is decided once in each."""

import json
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="only x86-64 Linux pays for them"
)

PROBE = """
import json, time
{imports}
import mlx.core as mx
x = mx.full((1 << 20,), 1e-30, stream=mx.cpu)
small = mx.full((1 << 20,), 1e-9, stream=mx.cpu)
mx.eval(x, small)
def seconds(a, b):
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        mx.eval(mx.multiply(a, b, stream=mx.cpu))
        best = min(best, time.perf_counter() - start)
    return best
product = mx.multiply(x, small, stream=mx.cpu)
print(json.dumps(dict(value=product[0].item(), ratio=seconds(x, small) / seconds(small, small),
                      python=1e-300 * 1e-10 > 0)))
"""


def probe(imports: str) -> dict:
    code = PROBE.format(imports=imports)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def test_mlx_flushes_them_and_python_does_not():
    result = probe("import deltatune")
    assert result["value"] == 0.0
    assert result["python"]


def test_mlx_alone_keeps_them_and_pays():
    """The reason for this module: where it ends to hold, the module can go."""
    alone, ours = probe(""), probe("import deltatune")
    assert alone["value"] > 0
    assert ours["ratio"] < alone["ratio"]
