"""A model of each family with linear attention is trained by the command, and mlx-lm alone loads its adapter."""

import json
import subprocess
import sys

import mlx.core as mx
import mlx_lm.tuner.utils
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from conftest import write_tokenizer
from console import called, deltatune
from transformers_saves import recorded_save

FAMILIES = ("nemotron_h", "granitemoehybrid", "falcon_h1", "mamba2", "bailing_moe_linear")
TOKENS = [[5, 60, 7, 80, 9, 100, 11]]
ALONE = f"""
import sys
import mlx.core as mx, mlx_lm.tuner.utils, mlx_lm.utils
model, _ = mlx_lm.utils.load_model(__import__("pathlib").Path(sys.argv[1]))
mlx_lm.tuner.utils.load_adapters(model, sys.argv[2])
mx.save(sys.argv[3], model(mx.array({TOKENS})))
assert "deltatune" not in sys.modules
"""


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.weekly) for family in FAMILIES[1:])]
)
def test_mlx_lm_alone_loads_the_adapter(family, tmp_path):
    base, adapter, data = recorded_save(family, tmp_path / "base"), tmp_path / "adapter", tmp_path / "train.jsonl"
    write_tokenizer(base, 320)
    data.write_text("".join(json.dumps({"text": f"{count} and {count} are {2 * count}"}) + "\n" for count in range(20)))
    # One family runs as a user runs it, the others by function.
    run = deltatune if family == "nemotron_h" else called
    options = ["--iters", 3, "--batch-size", 1, "--max-seq-length", 96, "--pack", "--learning-rate", 0.02]
    done = run("train", "--model", base, "--data", data, "--adapter-path", adapter, *options)
    assert done.returncode == 0, done.stderr
    model, _ = mlx_lm.utils.load_model(base)
    before = model(mx.array(TOKENS))
    model = mlx_lm.tuner.utils.load_adapters(model, str(adapter))
    after = model(mx.array(TOKENS))
    # mlx-lm leaves out tensors that its model has no place for.
    assert mx.load(str(adapter / "adapters.safetensors")).keys() <= dict(tree_flatten(model.parameters())).keys()
    assert mx.abs(after - before).max() > 0.05
    if run is deltatune:
        subprocess.run([sys.executable, "-c", ALONE, base, adapter, tmp_path / "alone.npy"], check=True)
        assert mx.allclose(mx.load(str(tmp_path / "alone.npy")), after, rtol=0, atol=1e-5)
