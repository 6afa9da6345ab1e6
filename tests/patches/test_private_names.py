"""A patch that needs a private name of upstream is left alone where the name is gone, and the reason is said."""

import importlib

import pytest

from deltatune import upstream
from deltatune.patches import PATCHES, evidence, patch

pytestmark = [pytest.mark.any_blas, pytest.mark.usefixtures("asked_anew", "reverted")]


@pytest.fixture
def reverted():
    yield
    patch.revert()


def renamed_in(function, old):
    """The function with another name for an attribute that its code reads."""
    code = function.__code__
    names = tuple(f"{name}_renamed" if name == old else name for name in code.co_names)
    assert names != code.co_names
    return type(function)(
        code.replace(co_names=names),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


@pytest.mark.parametrize(
    ("module", "cls", "name", "why"),
    [
        ("mlx_vlm.models.qwen3_vl.language", "Qwen3VLModel", upstream.DEEPSTACK, "has no such function any more"),
        ("mlx_vlm.models.switch_layers", "SwitchGLU", upstream.COMBINE, "a small case of it ends in AttributeError"),
    ],
)
def test_a_patch_without_its_private_name_is_left_alone(module, cls, name, why, monkeypatch):
    pytest.importorskip("mlx_vlm")
    owner = getattr(importlib.import_module(module), cls)
    records = [record for record in PATCHES if record.module == module and record.name.startswith(f"{cls}.")]
    if name not in vars(owner):
        pytest.skip("this mlx-vlm does not have the name")
    assert patch.apply(records).complete
    patch.revert()
    evidence.forget()
    combine = vars(owner)[name]
    monkeypatch.delattr(owner, name)
    if name == upstream.COMBINE:
        monkeypatch.setattr(owner, "__call__", renamed_in(owner.__call__, name))
        monkeypatch.setattr(owner, f"{name}_renamed", combine, raising=False)
    (left,) = patch.apply(records).left_alone
    assert why in left.why


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        ("KimiK3DecoderLayer", upstream.RESIDUAL_WEIGHTS_OF_LAYER),
        ("KimiK3TextModel", upstream.RESIDUAL_WEIGHTS_OF_MODEL),
    ],
)
def test_residual_weights_that_are_cached_under_another_name_are_said(cls, names, monkeypatch):
    kimi = pytest.importorskip("mlx_lm.models.kimi_k3")
    owner = getattr(kimi, cls)
    for name in names:
        for method in ("__init__", "__call__"):
            monkeypatch.setattr(owner, method, renamed_in(vars(owner)[method], name))
    records = [r for r in PATCHES if r.module == "mlx_lm.models.kimi_k3" and r.name == f"{cls}.__call__"]
    (left,) = patch.apply(records).left_alone
    assert "differs from a training forward" in left.why
