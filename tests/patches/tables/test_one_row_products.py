"""Replaced products agree with upstream's on a right BLAS, and give no NaN on a faulty one."""

import contextlib
import json
import math
import platform
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest

import one_row as planted
from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.machine.blas_fault import FAULT, TWO_ROWS, ProbeResult
from deltatune.patches import PatchReport, PatchWarning, left_alone_for, patch, patched
from deltatune.patches.tables import one_row_products

NAMES = [record.name for record in one_row_products.PATCHES]
ON_A_CPU = pytest.mark.skipif(backend.device() != "cpu", reason="only a CPU uses a BLAS")
linux = pytest.mark.skipif(platform.system() != "Linux", reason="LD_PRELOAD")


def current(name):
    return vars(owner(name))[name.rpartition(".")[2]]


@pytest.fixture
def faulty(monkeypatch):
    """The probe reports a fault. The BLAS itself is right, so that numbers can be compared."""
    monkeypatch.setattr(one_row_products, "probe", lambda: ProbeResult("planted", (FAULT.name,)))
    monkeypatch.setattr(one_row_products, "_warned", set())
    yield
    patch.revert()


def owner(name):
    return getattr(mx, name.rpartition(".")[0]) if "." in name else mx


@contextlib.contextmanager
def replaced():
    """Put the replacements into mx alone. patched() would search every module, which takes longer."""
    before = {name: current(name) for name in NAMES}
    ours = {record.name: record.replacement(before[record.name]) for record in one_row_products.PATCHES}
    try:
        for name in NAMES:
            setattr(owner(name), name.rpartition(".")[2], ours[name])
        yield
    finally:
        for name in NAMES:
            setattr(owner(name), name.rpartition(".")[2], before[name])


def draw(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


SHAPES = [
    ((1, 5), (5, 4)),
    ((1, 5), (5, 1)),
    ((3, 1), (1, 4)),
    ((1, 1), (1, 1)),
    ((5,), (5, 4)),
    ((1, 5), (5,)),
    ((5,), (5,)),
    ((1,), (1,)),
    ((2, 1, 5), (5, 4)),
    ((1, 1, 5), (5, 4)),
    ((2, 1, 5), (5,)),
    ((2, 3, 1, 5), (3, 5, 4)),
    ((5,), (2, 5, 4)),
    ((2, 4, 5), (5,)),
    ((2, 1, 5), (2, 5, 1)),
    ((0, 5), (5, 4)),
    ((1, 0), (0, 4)),
]


def same(call, *arrays):
    """Assert that call(*arrays) and its gradients are the same with and without the replacements."""

    def everything():
        y = call(*arrays)
        outputs, gradients = mx.vjp(call, list(arrays), [draw(9, *y.shape)])
        mx.eval(outputs, gradients)
        return [*outputs, *gradients]

    expected = everything()
    with replaced():
        actual = everything()
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        assert a.size == 0 or mx.allclose(a.astype(mx.float32), e.astype(mx.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_products_are_upstreams(a, b):
    if 0 in a and backend.device() == "cuda":
        pytest.skip("MLX's own gradient of an empty product ends the process on CUDA")
    same(lambda x, y: mx.matmul(x, y), draw(0, *a), draw(1, *b))
    same(lambda x, y: x @ y, draw(0, *a), draw(1, *b))
    same(lambda x, y: mx.addmm(mx.array(0.5), x, y, 0.5, 2.0), draw(0, *a), draw(1, *b))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_types_stay(dtype):
    same(lambda x, y: mx.matmul(x, y), draw(0, 1, 5).astype(dtype), draw(1, 5, 4).astype(dtype))
    same(lambda c, x, y: mx.addmm(c, x, y), *(draw(0, *s).astype(dtype) for s in ((4,), (1, 5), (5, 4))))


@pytest.mark.parametrize(("a", "b"), [((5,), (4, 5)), ((2, 5), (3, 4, 5)), ((1, 5), (1, 5)), ((5,), (5,))], ids=str)
def test_inner_is_upstreams(a, b):
    same(lambda x, y: mx.inner(x, y), draw(0, *a), draw(1, *b))


@pytest.mark.parametrize("sizes", [(1, 5, 4), (1, 5, 1), (1, 1, 4), (2, 1, 4), (3, 5, 4)], ids=str)
@pytest.mark.parametrize("order", ["sorted", "unsorted", "both sides"])
def test_gathers_are_upstreams(sizes, order):
    rows, inner, columns = sizes
    left = mx.array([3, 0, 1, 2]) if order == "both sides" else None
    indices = mx.array([0, 0, 1, 2] if order == "sorted" else [2, 0, 1, 0])

    def call(a, b):
        return mx.gather_mm(a, b, left, indices, sorted_indices=order == "sorted")

    same(call, draw(0, 4, rows, inner), draw(1, 3, inner, columns))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(1, 6), (3, 1), (1, 1), (3, 6)], ids=str)
@pytest.mark.parametrize("mask", [None, "causal", "bool", "per head", "added", "sinks"])
def test_attention_is_upstreams(groups, sizes, mask):
    length, keys = sizes
    if mask == "causal" and length > keys:
        pytest.skip("some rows attend to nothing")
    options = {"mask": mask if mask == "causal" else None}
    if mask in ("bool", "per head"):
        options["mask"] = draw(5, 2, 4 if mask == "per head" else 1, length, keys) > -0.5
    if mask == "added":
        options["mask"] = draw(5, length, keys)
    if mask == "sinks":
        options["sinks"] = draw(5, 4)

    def call(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, **options)

    same(call, draw(0, 2, 4, length, 8), draw(1, 2, groups, keys, 8), draw(2, 2, groups, keys, 8))


def test_layers_are_upstreams():
    for layer, shape in ((nn.Linear(5, 4), (1, 5)), (nn.Conv1d(6, 6, 3, groups=6), (1, 3, 6))):
        same(lambda x, layer=layer: layer(x), draw(0, *shape))


def test_errors_stay_upstreams():
    with replaced(), pytest.raises(ValueError, match="Last dimension of first input"):
        mx.matmul(draw(0, 1, 3), draw(1, 4, 5))
    with replaced(), pytest.raises(ValueError, match="0 dimension"):
        mx.matmul(mx.array(1.0), draw(1, 4, 5))
    with replaced(), pytest.raises(TypeError):
        draw(0, 1, 3) @ "text"


def test_nothing_is_touched_where_the_blas_is_right():
    # Attention has another record, for training (tables/attention.py).
    names = [name for name in NAMES if name != "fast.scaled_dot_product_attention"]
    before = [current(name) for name in names]
    with patched() as report:
        assert [current(name) for name in names] == before
    assert not {each.patch.name for each in report.applied} & set(names)


@ON_A_CPU
def test_everything_is_replaced_where_it_is_not_and_given_back(faulty):
    before = [current(name) for name in NAMES]
    warned = pytest.warns(PatchWarning, match="products of one row wrong: planted computes these products wrongly")
    with warned, patched() as report:
        assert set(NAMES) <= {each.patch.name for each in report.applied}
        assert report.left_alone == []
        assert all(now is not then for now, then in zip(map(current, NAMES), before, strict=True))
    assert all(now is then for now, then in zip(map(current, NAMES), before, strict=True))


@ON_A_CPU
def test_the_user_is_warned_once(faulty, recwarn):
    with patched(), patched():
        pass
    with patched():
        pass
    assert [str(w.message).startswith("The BLAS of this machine") for w in recwarn].count(True) == 1


@ON_A_CPU
def test_a_blas_that_is_wrong_altogether_is_refused(monkeypatch):
    monkeypatch.setattr(one_row_products, "probe", lambda: ProbeResult("planted", (FAULT.name, TWO_ROWS.name)))
    with pytest.raises(UserError, match="Nothing trained on it would be right"), patched():
        raise AssertionError("not reached")


def test_a_replacement_that_differs_is_left_out(faulty, asked_anew):
    wrong = one_row_products._record("matmul", lambda upstream: lambda a, b: upstream(a, b) * 2, lambda f, x: f(x, x.T))
    report = patch.apply([wrong])
    assert ["computes something else" in left.why for left in report.left_alone] == [True]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blas")
    return planted.build(folder), planted.build(folder, healthy=True)


@pytest.mark.any_blas
@linux
def test_on_a_faulty_blas_upstream_returns_nan_and_ours_never(libraries):
    """benchmarks/one_row.py runs the same products in a hundred processes."""
    upstream, ours = (planted.products(libraries[0], who) for who in planted.WHO)
    control = "two rows (control)"
    assert upstream.pop(control) == 0
    assert [name for name, count in upstream.items() if count == 0] == []
    assert ours == dict.fromkeys([*upstream, control], 0)


@pytest.mark.weekly
@pytest.mark.any_blas
@linux
def test_without_the_fault_stale_memory_changes_nothing(libraries):
    assert set(planted.products(libraries[1], "upstream").values()) == {0}


@pytest.mark.any_blas
@linux
def test_training_experts_on_a_faulty_blas(libraries, tiny_checkpoint, tmp_path):
    for name in ("train", "valid"):
        line = json.dumps({"prompt": "the quick brown fox", "completion": "jumps over"})
        (tmp_path / f"{name}.jsonl").write_text(f"{line}\n" * 2)
    model = tiny_checkpoint("qwen3_5_moe", num_hidden_layers=2, full_attention_interval=2)
    command = [sys.executable, "-m", "deltatune", "train", "--model", str(model), "--data", str(tmp_path), "--train"]
    command += ["--iters", "1", "--batch-size", "1", "--steps-per-report", "1", "--adapter-path", str(tmp_path / "out")]
    env = planted.environment(libraries[0])
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("computes products of one row wrong") == 1
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [record[name] for record in records for name in ("train_loss", "val_loss") if name in record]
    assert len(losses) >= 2
    assert all(math.isfinite(loss) for loss in losses)


def test_other_patches_are_asked_with_right_products(monkeypatch):
    """Before anything is patched, too: on a faulty BLAS a run was refused at random for upstream's functions."""
    seen = []

    def preview(records):
        seen.append(one_row_products.in_force())
        return PatchReport()

    monkeypatch.setattr(one_row_products, "records", lambda: one_row_products.PATCHES)
    monkeypatch.setattr(patch, "preview", preview)
    left_alone_for(("training",))
    assert seen == [True]
    assert not one_row_products.in_force()
    with patched():
        left_alone_for(("training",))
        assert one_row_products.in_force()
