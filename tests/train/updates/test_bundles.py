"""Tests which parameters are joined into bundles, and that parting and updating them changes no bit."""

import mlx.core as mx
import mlx.optimizers
import pytest

from deltatune.ops.pointwise import joining
from deltatune.train.tree import leaves
from deltatune.train.updates import bundles
from deltatune.train.updates.bundles import TOGETHER, Bundles
from deltatune.train.updates.optimizer import OPTIMIZERS


@pytest.fixture
def tree():
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2, 2), "large": (10, 10), "d": (1,)}
    made = {name: mx.random.normal(shape) for name, shape in shapes.items()}
    return {"layers": [{"x": made["a"], "y": made["b"]}, {"x": made["c"]}], "w": made["large"], "z": made["d"]}


def same(one, other):
    found, expected = dict(leaves(one)), dict(leaves(other))
    return found.keys() == expected.keys() and all(mx.array_equal(found[path], expected[path]) for path in expected)


def paths(made):
    return [bundle.paths for bundle in made.all]


def test_small_leaves_go_together_and_come_apart_as_they_were(tree, monkeypatch):
    monkeypatch.setattr(bundles, "MOST_NUMBERS", dict.fromkeys(bundles.MOST_NUMBERS, 20))
    made = Bundles(tree, mlx.optimizers.AdamW(1e-3))
    assert paths(made) == [["layers.0.x", "layers.0.y"], ["layers.1.x", "z"]]
    joined = made.join(tree)
    assert {path: leaf.size for path, leaf in leaves(joined)} == {"w": 100, f"{TOGETHER}.0": 17, f"{TOGETHER}.1": 9}
    separate = made.part(joined)
    assert same(separate, tree)


def test_how_much_goes_together_depends_on_the_device(monkeypatch):
    many = {f"p{n:03}": mx.zeros(2**14) for n in range(joining.MOST + 6)}
    expected = {"cpu": [4] * 17 + [2], "metal": [16] * 4 + [6], "cuda": [joining.MOST, 6]}
    for device, sizes in expected.items():
        monkeypatch.setattr(bundles.backend, "device", lambda device=device: device)
        assert [len(bundle.paths) for bundle in Bundles(many, mlx.optimizers.AdamW(1e-3)).all] == sizes
    large = {"a": mx.zeros(2**20), "b": mx.zeros(2**20), "c": mx.zeros(1)}
    assert paths(Bundles(large, mlx.optimizers.AdamW(1e-3))) == [["a", "b"]]


def test_parameters_that_do_not_form_a_bundle(tree):
    halves = {"a": mx.zeros(2), "b": mx.zeros(2, mx.bfloat16), "c": mx.zeros(2, mx.bfloat16)}
    adam = mlx.optimizers.Adam(1e-3)
    assert paths(Bundles(halves, adam)) == [["b", "c"]]
    assert paths(Bundles(halves, adam, used_as={"b": mx.float16})) == [["b"]]
    assert paths(Bundles(tree, mlx.optimizers.Adafactor())) == paths(Bundles(tree, mlx.optimizers.Muon(1e-3))) == []
    whole = Bundles(tree, mlx.optimizers.Muon(1e-3))
    assert whole.join(tree).keys() == tree.keys()
    assert same(whole.part(whole.join(tree)), tree)


@pytest.mark.parametrize("name", bundles.ELEMENTWISE)
def test_the_update_is_that_of_the_leaves_to_the_bit(name, tree):
    """This must hold for every optimizer in ELEMENTWISE."""
    gradients = {"w": mx.random.normal((10, 10)), "z": mx.ones(1)}
    gradients["layers"] = [{"x": mx.random.normal((3, 4)), "y": mx.ones(5)}, {"x": mx.random.normal((2, 2, 2))}]
    kind = getattr(mlx.optimizers, name)
    reference, ours = kind(learning_rate=1e-2), kind(learning_rate=1e-2)
    together = Bundles(tree, ours)
    reference.init(tree), ours.init(together.join(tree))
    expected, found = tree, together.join(tree)
    for _ in range(3):
        expected = reference.apply_gradients(gradients, expected)
        found = ours.apply_gradients(together.join(gradients), found)
    assert same(together.part(found), expected)


def test_used_leaves_are_cast_and_their_gradients_are_those_of_the_leaves(tree):
    made = Bundles(tree, mlx.optimizers.AdamW(1e-3), used_as={"z": mx.bfloat16})

    def loss(used):
        return sum((leaf.astype(mx.float32) ** 3).sum() for _, leaf in leaves(used))

    used = made.part(made.join(tree), used=True)
    assert {path: leaf.dtype for path, leaf in leaves(used)} == {
        path: mx.bfloat16 if path == "z" else mx.float32 for path, _ in leaves(tree)
    }
    found = mx.grad(lambda joined: loss(made.part(joined, used=True)))(made.join(tree))
    assert all(leaf.dtype == mx.float32 for _, leaf in leaves(found))
    expected = mx.grad(loss)(tree)
    expected["z"] = mx.grad(loss)({"z": tree["z"].astype(mx.bfloat16)})["z"].astype(mx.float32)
    assert same(made.part(found), expected)


@pytest.mark.parametrize("name", bundles.ELEMENTWISE)
def test_state_is_kept_by_the_path_of_its_parameter(name, tree):
    """A run can then continue where the bundles are cut differently."""
    optimizer, plain = (getattr(mlx.optimizers, name)(learning_rate=1e-2) for _ in range(2))
    made = Bundles(tree, optimizer)
    optimizer.init(made.join(tree)), plain.init(tree)
    optimizer.apply_gradients(made.join(tree), made.join(tree)), plain.apply_gradients(tree, tree)
    parted = made.part_state(optimizer.state)
    assert same(parted, plain.state)
    assert same(made.join_state(parted, optimizer.state), optimizer.state)


@pytest.mark.parametrize("name", ["adam8bit", "adamw8bit"])
def test_moments_in_8_bits_are_joined_by_whole_blocks(name):
    """Sizes that are no whole blocks, and those with moments in fp32, stay alone; no bit changes."""
    shapes = {"a": (8, 1024), "b": (4096,), "broken": (4100,), "c": (64, 100), "small": (256,)}
    tree = {key: mx.random.normal(shape) for key, shape in shapes.items()}
    ours, plain = (OPTIMIZERS[name](learning_rate=1e-2) for _ in range(2))
    made = Bundles(tree, ours)
    assert paths(made) == [["a", "b", "c"]]
    ours.init(made.join(tree)), plain.init(tree)
    found, expected = made.join(tree), tree
    for step in range(3):
        gradients = {key: mx.random.normal(shape) * 10.0**-step for key, shape in shapes.items()}
        found, expected = ours.apply_gradients(made.join(gradients), found), plain.apply_gradients(gradients, expected)
    assert same(made.part(found), expected)
    parted = made.part_state(ours.state)
    assert same(parted, plain.state)
    assert {key: leaf.shape for key, leaf in leaves(parted["c"])} == {
        key: leaf.shape for key, leaf in leaves(plain.state["c"])
    }
    assert same(made.join_state(parted, ours.state), ours.state)
