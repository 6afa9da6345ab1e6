"""The operator around the fused launches: optional arguments, layouts, dtypes, checkpoints, and its refusals.

The launches run on the host machine (host_machine.py).
"""

from functools import partial

import mlx.core as mx
import pytest

from checkpointing import checkpoint
from deltatune.machine import nvidia
from deltatune.ops.gated_delta import fused_op, gated_delta_chunk, trial_case
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_of, tiling_on
from deltatune.ops.gated_delta.fused_pieces import Cut, cut_of
from deltatune.ops.gated_delta.trial_case import ShapeClass
from deltatune.ops.kernels.launch import header, on
from deltatune.ops.operator.case import judged
from deltatune.ops.recomputation import cheap_recomputed, remembered
from deltatune.ops.tracing import dispatch

SHAPES = {"q": (2, 20, 2, 16), "k": (2, 20, 2, 16), "v": (2, 20, 4, 24), "log_g": (2, 20, 4), "beta": (2, 20, 4)}
NAMES = tuple(SHAPES)


def arguments(dtype=mx.float32) -> dict[str, mx.array]:
    arrays = {name: mx.random.normal(shape, key=mx.random.key(len(name))) for name, shape in SHAPES.items()}
    arrays["log_g"], arrays["beta"] = -mx.abs(arrays["log_g"]), mx.sigmoid(arrays["beta"])
    arrays["k"] = arrays["k"] / mx.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    return {name: array.astype(dtype) for name, array in arrays.items()}


fused = partial(gated_delta_fused, tiling_of_call=tiling_on("metal"))


@pytest.fixture
def on_machine(machine):
    """The fused operator as on a Mac, run by the host machine, and the list of the names of its launches."""
    launched = []

    def execute(launch):
        launched.append(launch.name)
        return machine.run(launch)

    # A launch asks the host machine to compile it together with those that come with it.
    execute.foresee = machine.foresee
    with on(execute):
        yield fused, launched


def gradients(function, arrays: dict, **constants) -> tuple[list, list]:
    """Return outputs and gradients, for cotangents that differ from element to element."""

    def call(*given):
        return function(**dict(zip(arrays, given, strict=True)), **constants)

    def ramp(x):
        return (mx.arange(x.size) % 7 - 3).reshape(x.shape).astype(x.dtype)

    shapes = (arrays["v"], mx.zeros((2, 4, 24, 16)))
    differentiated = partial(mx.vjp, call, list(arrays.values()), [ramp(x) for x in shapes])
    if function is fused:
        dispatch.current().device.foresee(differentiated)
    return differentiated()


def close(found, expected, tolerance=2e-6) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        one, other = one.astype(mx.float32), other.astype(mx.float32)
        assert (mx.abs(one - other).max() <= tolerance * mx.abs(other).max()).item()


def test_optional_arguments_left_out(on_machine):
    function, launched = on_machine
    arrays = arguments()
    for found, expected in zip(gradients(function, arrays), gradients(gated_delta_chunk, arrays), strict=True):
        close(found, expected)
    names = ["gated_delta_prepare", "gated_delta_scan", "gated_delta_reverse", "gated_delta_gradients"]
    assert launched == names


def test_saved_tensors_are_recomputed(on_machine):
    function, launched = on_machine
    arrays = arguments() | {"initial_state": mx.random.normal((2, 4, 24, 16), key=mx.random.key(9))}
    constants = {"mask": mx.arange(20)[None] >= mx.array([[0], [3]]), "segments": mx.array([[0] * 7 + [1] * 13] * 2)}
    heads = []

    def computed(q, k, v, **given):
        """The operator behind one that computes its queries, keys and values, as a convolution does."""

        def doubled(q, k, v):
            heads.append(1)
            return [2 * q, k * 1, 2 * v]

        return function(*remembered(doubled, q, k, v), **given)

    for call, runs in ((function, 0), (computed, 2)):
        wanted = gradients(call, arrays, **constants)
        launched.clear()
        heads.clear()
        with cheap_recomputed():
            found = gradients(call, arrays, **constants)
        for one, other in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
            assert mx.array_equal(one, other)
        passes = ["prepare", "scan", "prepare", "scan", "reverse", "gradients"]
        assert launched == [f"gated_delta_{name}" for name in passes]
        assert len(heads) == runs


@pytest.mark.parametrize(
    ("stateful", "border", "rows", "tokens"),
    [
        (False, None, (0, 1, 2), (0, 16, 20)),
        (True, None, (0, 2), (0, 16, 20)),
        (True, 16, (0, 1, 2), (0, 16, 20)),
        (False, 16, (0, 2), (0, 16, 20)),
        (True, 18, (0, 1, 2), (0, 16, 20)),
        (True, 18, (0, 1, 2), (0, 20)),
    ],
)
def test_pieces_of_a_batch_have_the_bits_of_the_whole(stateful, border, rows, tokens, on_machine, monkeypatch):
    """The second document of the first row begins at, or near, the border between two pieces."""
    function, launched = on_machine
    monkeypatch.setattr(fused_op, "cut_of", lambda tiling: Cut(rows, tokens))
    arrays, constants = arguments(), {}
    if stateful:
        arrays["initial_state"] = mx.random.normal((2, 4, 24, 16), key=mx.random.key(9))
    if border is not None:
        segments = mx.stack([mx.arange(20) >= border, mx.zeros(20, mx.bool_)]).astype(mx.int32)
        constants = {"mask": mx.arange(20)[None] >= mx.array([[0], [3]]), "segments": segments}
    wanted = gradients(function, arrays, **constants)
    launched.clear()
    with cheap_recomputed():
        found = gradients(function, arrays, **constants)
    for one, other in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        assert mx.array_equal(one, other)
    pieces = (len(rows) - 1) * (len(tokens) - 1)
    assert [launched.count(f"gated_delta_{name}") for name in ("scan", "reverse")] == [2 * pieces, pieces]


@pytest.mark.parametrize(
    ("batch", "length", "cut"),
    [
        (1, 16384, None),
        (1, 32768, Cut((0, 1), (0, 8192, 16384, 24576, 32768))),
        (1, 65000, Cut((0, 1), (*range(0, 65000, 9344), 65000))),
        (8, 8192, Cut((0, 2, 4, 6, 8), (0, 8192))),
        (9, 8192, Cut((0, 3, 6, 9), (0, 8192))),
        (2, 40000, Cut((0, 1, 2), (*range(0, 40000, 10048), 40000))),
    ],
)
def test_large_batches_are_cut(batch, length, cut, monkeypatch):
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.H200)
    options = {"masked": False, "segmented": False, "per_channel": False}
    shape = (batch, length, 16, 32, 128, 128)
    assert cut_of(tiling_on("cuda")(shape, mx.bfloat16, **options)) == cut
    assert cut_of(tiling_on("metal")(shape, mx.bfloat16, **options)) is None


def test_no_state_is_a_state_of_zeros(on_machine):
    function, _ = on_machine
    arrays = arguments()
    found = gradients(function, arrays)
    zeros = gradients(function, arrays | {"initial_state": mx.zeros((2, 4, 24, 16))})
    for one, other in zip([*found[0], *found[1]], [*zeros[0], *zeros[1][:5]], strict=True):
        assert mx.array_equal(one, other)


def test_mask_alone_and_segments_of_another_integer(on_machine):
    function, _ = on_machine
    arrays = arguments() | {"initial_state": mx.random.normal((2, 4, 24, 16))}
    mask = mx.random.uniform(shape=(2, 20)) < 0.7
    segments = (mx.arange(20) // 6)[None].astype(mx.int64) + mx.zeros((2, 1), mx.int64)
    for constants in ({"mask": mask}, {"segments": segments}, {"mask": mask, "segments": segments}):
        pairs = zip(
            gradients(function, arrays, **constants), gradients(gated_delta_chunk, arrays, **constants), strict=True
        )
        for found, expected in pairs:
            close(found, expected)


def test_views_and_broadcasts(on_machine):
    """The inputs are halves of wider arrays, transposed and reversed arrays, and a beta that all heads share."""
    function, _ = on_machine
    arrays = arguments()
    both = mx.concatenate([arrays["q"], arrays["k"]], axis=-1)
    arrays["q"], arrays["k"] = both[..., :16], both[..., 16:]
    arrays["v"] = mx.swapaxes(mx.contiguous(mx.swapaxes(arrays["v"], 1, 2)), 1, 2)[:, ::-1]
    arrays["beta"] = mx.broadcast_to(arrays["beta"][..., :1], SHAPES["beta"])
    for found, expected in zip(gradients(function, arrays), gradients(gated_delta_chunk, arrays), strict=True):
        close(found, expected)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_every_gradient_has_its_inputs_dtype(dtype, on_machine):
    function, _ = on_machine
    arrays = arguments(dtype) | {"initial_state": mx.zeros((2, 4, 24, 16), dtype)}
    outputs, found = gradients(function, arrays)
    assert [x.dtype for x in outputs] == [dtype, mx.float32]
    assert [x.dtype for x in found] == [dtype] * 6
    close(found, gradients(gated_delta_chunk, arrays)[1], tolerance=2e-2)


def test_checkpoint_runs_the_forward_launches_again(on_machine):
    function, launched = on_machine
    arrays = arguments()

    def loss(*given):
        return (function(*given)[0] ** 2).sum()

    plain = mx.grad(loss, argnums=range(5))(*arrays.values())
    assert len(launched) == 4
    again = mx.grad(checkpoint(loss), argnums=range(5))(*arrays.values())
    assert len(launched) == 10
    for one, other in zip(plain, again, strict=True):
        assert mx.array_equal(one, other)


def test_refuses_a_second_derivative(on_machine):
    function, _ = on_machine
    arrays = arguments()

    def slope(q):
        return (mx.grad(lambda q: function(**arrays | {"q": q})[0].sum())(q) ** 2).sum()

    with pytest.raises(NotImplementedError, match="no second derivative"):
        mx.grad(slope)(arrays["q"])


def lazily(launch):
    """Return a launch's outputs as lazy arrays that depend on its inputs, which is all that mx.vmap sees."""
    touched = sum(array.sum().astype(mx.float32) for array in launch.inputs.values())
    return [mx.zeros(shape, dtype) + touched.astype(dtype) for shape, dtype in launch.outputs.values()]


@pytest.mark.parametrize("mapped", [NAMES, ("q",), ("beta",), ("mask",)], ids=" ".join)
@pytest.mark.parametrize("around", [lambda f: f, mx.grad], ids=["forward", "gradient"])
def test_refuses_vmap_by_name(mapped, around):
    arrays = arguments() | {"mask": mx.ones((2, 20), mx.bool_)}
    arrays |= {name: mx.stack([arrays[name]] * 3) for name in mapped}

    def loss(*given):
        return fused(*given[:-1], mask=given[-1])[0].sum()

    axes = tuple(0 if name in mapped else None for name in arrays)
    refused = r"mx\.vmap cannot map the fused kernels.*fold the mapped axis into B"
    with on(lazily), pytest.raises(ValueError, match=refused):
        mx.vmap(around(loss), in_axes=axes)(*arrays.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"v": mx.zeros((2, 20, 4, 24), mx.bfloat16)}, "q, k and v are .*float32.*bfloat16"),
        ({"v": mx.zeros((2, 20, 4, 2))}, "heads of 16 x 2 are smaller than 4"),
        ({name: mx.zeros((2, 20, 2, 512)) for name in "qk"}, "heads of 512 x 24 .* do not fit in a block's memory"),
    ],
)
def test_uncovered_calls_are_refused_by_name(changes, said, on_machine):
    function, launched = on_machine
    with pytest.raises(ValueError, match=said):
        function(**arguments() | changes)
    assert not launched


def test_gates_near_1_pass_their_trial_with_exponentials_as_rough_as_metal_allows(host_folder, host_module):
    """The errors of a row's gates multiply."""
    text = host_module.with_rough_exponentials(header("metal", host_module.FILES), "exp", "exp2")
    case = trial_case.trial_case(ShapeClass(1, 2, 64, 64, "float32", segmented=True))
    fused = partial(gated_delta_fused, tiling_of_call=partial(tiling_of, "metal"))
    with on(host_module.HostMachine(host_folder, text).run):
        verdict = judged(case, fused, "fused")
    assert verdict.passed, verdict
