"""A new version of upstream is served wholly where its code is as it was, and refused by name where it has changed.

Each test runs commands in a process of their own, on a copy of mlx-lm that states a later version.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

import beside
from console import cache_of, called_elsewhere, deltatune

pytestmark = pytest.mark.any_blas

stand_in = beside.load(Path(__file__).with_name("changed_upstream.py")).stand_in

# One change of each kind, each of another function, so that one process shows all of them.
MOVED = """
import mlx.core as mx
from typing import Optional


def create_causal_mask(N, offset=0, window_size: Optional[int] = None, right_padding=None, left_padding=None):
    at = mx.arange(offset, offset + N)[:, None]
    seen = mx.arange(offset + N)[None]
    mask = at >= seen
    return mask if window_size is None else mask & (at < seen + window_size)
"""
NO_GRADIENT = """
@mx.custom_function
def _kernel(x):
    return x + 0


@_kernel.vjp
def _kernel_gradient(*given):
    raise RuntimeError("[Primitive::vjp] Not implemented for CustomKernel.")


class KimiMLAAttention("""
BODY = "\n        "
CHANGES = {
    "masks": [("", "", MOVED)],
    "base": [
        # A parameter is added.
        ("def create_attention_mask", "return_array: bool = False", "return_array: bool = False, chunk: int = 0"),
        # A function is moved.
        ("def create_causal_mask", "def create_causal_mask(", "from .masks import create_causal_mask\n\n\ndef _older("),
    ],
    # A parameter is renamed.
    "mixtral": [("class MixtralSparse", "self, x: mx.array) -> mx.array:", f"self, h: mx.array):{BODY}x = h")],
    # A default is changed.
    "bailing_moe_v3": [("class BailingMLA", "mask: mx.array | None = None", "mask: mx.array | None = False")],
    "switch_layers": [
        # A result is changed by a factor.
        ("class SwitchMLP", "return x.squeeze(-2)", "return 1.01 * x.squeeze(-2)"),
        # A gradient is dropped.
        ("class SwitchGLU", "x = mx.expand_dims(x, (-2, -3))", "x = mx.expand_dims(mx.stop_gradient(x), (-2, -3))"),
    ],
    # The gates come in another form.
    "gated_delta": [("def gated_delta_update", "beta = mx.sigmoid(b)", "beta = b")],
    # A class is split in two.
    "olmoe": [
        ("", "class OlmoeSparseMoeBlock(nn.Module):", "class OlmoeRouter(nn.Module):"),
        ("class TransformerBlock", "class T", f"class OlmoeSparseMoeBlock(OlmoeRouter):{BODY}pass\n\n\nclass T"),
    ],
    # A kernel without a gradient is added.
    "kimi_linear": [
        ("", "class KimiMLAAttention(", NO_GRADIENT),
        ("class KimiMLAAttention", "return self.o_proj(output)", "return _kernel(self.o_proj(output))"),
    ],
}  # fmt: skip
REFUSED = {
    "base.create_attention_mask": r"its signature is \(h, .* chunk=0\) in mlx_lm 0.99.0",
    "mixtral.MixtralSparseMoeBlock.__call__": r"its signature is \(self, h\)",
    "bailing_moe_v3.BailingMLA.__call__": r"its signature is \(self, x, mask=False",
    "switch_layers.SwitchMLP.__call__": "differs from what deltatune computes by 1.0e-02",
    "switch_layers.SwitchGLU.__call__": "differs from what deltatune computes",
    "gated_delta.gated_delta_update": "differs from deltatune's",
    "olmoe.OlmoeSparseMoeBlock.__call__": "has no such function any more",
    "kimi_linear.KimiMLAAttention.__call__": "a small case of it ends in RuntimeError",
}
APPLIED = [
    "create_causal_mask",
    "Qwen3MoeSparseMoeBlock.__call__",
    "KimiSparseMoE.__call__",
    "BailingSparseMoE.__call__",
]
FACTOR = {
    "gated_delta": [
        ("def gated_delta_update", "g = compute_g(A_log, a, dt_bias)", "g = 1.01 * compute_g(A_log, a, dt_bias)")
    ]
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The PYTHONPATH of an mlx-lm with a changed recurrence."""
    return stand_in(tmp_path_factory.mktemp("changed"), "0.99.0", FACTOR)


def words_of(command, checkpoint, folder):
    """Write a few rows into `folder`, and return a command on them."""
    row = json.dumps({"text": "the quick brown fox jumps over the lazy dog"})
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f"{row}\n" * 4)
    flags = ["--model", checkpoint, "--data", folder, "--batch-size", 2]
    return [command, *flags, *(["--iters", 1, "--adapter-path", folder / "out"] if command == "train" else [])]


def test_each_kind_of_change_is_applied_rightly_or_refused_by_name(tmp_path):
    path = stand_in(tmp_path / "new", "0.99.0", CHANGES)
    program = tmp_path / "program.py"
    modules = [*CHANGES, "qwen3_moe"]
    program.write_text("import " + ", ".join(f"mlx_lm.models.{module}" for module in modules))
    variables = {"PYTHONPATH": path, "DELTATUNE_CACHE": cache_of(tmp_path / "cache")}
    done = deltatune("run", "--force", "--verbose", "--", program, **variables)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("deltatune: warning: ")]
    for name, why in REFUSED.items():
        found = [line for line in warnings if f" mlx_lm.models.{name} stays as it is: " in line]
        assert len(found) == 1, (name, done.stderr)
        assert re.search(why, found[0]), found
    assert len(warnings) == len(REFUSED)
    said = done.stderr.replace("\n", " ")
    assert all(f"{name} " in said or f"{name};" in said for name in APPLIED), done.stderr
    assert "gated_delta_update kept upstream's code" in said


@pytest.fixture(scope="module")
def unread(checkpoint, tmp_path_factory):
    """A checkpoint with unreadable weights."""
    return without_weights(checkpoint, tmp_path_factory.mktemp("unread") / "model")


def without_weights(checkpoint, folder):
    shutil.copytree(checkpoint, folder)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    return folder


def test_a_run_that_needs_a_refused_function_ends_before_weights_are_read(checkpoint, unread, tmp_path, changed):
    commands = [words_of(command, unread, tmp_path) for command in ("train", "eval", "plan")]
    commands.append([*words_of("train", checkpoint, tmp_path), "--force"])
    cache = cache_of(tmp_path / "cache")
    *refused, forced = called_elsewhere(*commands, PYTHONPATH=changed, DELTATUNE_CACHE=cache)
    for done in refused:
        assert done.returncode == 2, done
        (message,) = [line for line in done.stderr.splitlines() if line]
        assert "mlx_lm.models.gated_delta.gated_delta_update (mlx_lm 0.99.0): " in message
        assert "differs from deltatune's by " in message
        assert "pip install 'mlx-lm==0.32.2'" in message
        assert "--force" in message
    assert forced.returncode == 0, forced.stderr
    assert "Gated delta: upstream's own code in 1 of 1 layers." in forced.stdout
    assert "gated_delta_update stays as it is" in forced.stderr
    report = (tmp_path / "out/report.html").read_text()
    assert "What computes each layer" in report
    assert re.search("<td[^>]*>upstream&#39;s own code in 1 of 1 layers</td>", report)
    # The runs before have left no folder, which would have been moved aside.
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


def test_another_program_is_not_run_without_deltatunes_gradients(tmp_path, changed):
    program = tmp_path / "program.py"
    program.write_text("print('before')\nimport mlx_lm.models.qwen3_5\nprint('it trains')")
    done = deltatune("run", "--", program, PYTHONPATH=changed, DELTATUNE_CACHE=cache_of(tmp_path / "cache"))
    assert done.returncode == 2
    assert done.stdout == "before\n"
    assert "gated_delta_update (mlx_lm 0.99.0): " in done.stderr
    assert "Traceback" not in done.stderr
    assert "no recurrent layer" not in done.stderr


GELU = [("class PatchMerger", "return x\n", "return 1.5 * x\n")]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of data with one picture in each row."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("mlx_vlm")
    folder = tmp_path_factory.mktemp("pictures")
    image.new("RGB", (64, 64), "red").save(folder / "red.png")
    user = {"role": "user", "content": [{"type": "image", "image": "red.png"}, {"type": "text", "text": "what"}]}
    row = json.dumps({"messages": [user, {"role": "assistant", "content": "a red one"}]})
    (folder / "train.jsonl").write_text(f"{row}\n" * 4)
    return folder


def test_unchanged_code_under_a_new_version_is_served_wholly(tiny_vision_checkpoint, pictures, tmp_path):
    stand_in(tmp_path / "new", "0.99.0", {}, name="mlx_vlm")
    path = stand_in(tmp_path / "new", "0.99.0", {}, mlx="0.99.1")
    model = tiny_vision_checkpoint("qwen3_5_moe", num_hidden_layers=2, full_attention_interval=2)
    flags = ("--model", model, "--data", pictures, "--adapter-path", tmp_path / "out")
    done = deltatune("train", *flags, "--iters", 1, "--batch-size", 2, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower()
    assert "stays as it is" not in done.stderr
    for package, known, least in (
        ("mlx-lm 0.99.0", "0.32.2", 5),
        ("mlx 0.99.1", "0.32.4", 5),
        ("mlx-vlm 0.99.0", "0.7.10", 3),
    ):
        line = rf"{package} has not been tried with this deltatune; (\d+) of (\d+) functions behave as in {known}"
        behave, new = re.search(line, done.stdout).groups()
        assert behave == new
        assert int(new) >= least
    assert re.search(r"Gated delta: chunk \(automatic on cpu\) in (\d+) of \1 layers\.", done.stdout)


def test_changed_upstream_is_refused_before_weights_are_read(tiny_vision_checkpoint, pictures, tmp_path):
    path = stand_in(tmp_path / "new", "0.99.0", {"qwen3_vl_moe/vision": GELU}, name="mlx_vlm")
    model = without_weights(tiny_vision_checkpoint("qwen3_vl_moe"), tmp_path / "model")
    flags = ("--model", model, "--prompt", "what", "--image", pictures / "red.png", "--max-tokens", 1)
    done = deltatune("generate", *flags, PYTHONPATH=path)
    assert done.returncode == 2
    assert "mlx_vlm.models.qwen3_vl_moe.vision.PatchMerger.__call__ (mlx_vlm 0.99.0): on a small case" in done.stderr
    assert "Traceback" not in done.stderr
