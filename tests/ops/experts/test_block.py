"""expert_block against dense autodiff in float64, for every kind of routing; its refusals; its peak memory."""

import math
from dataclasses import replace

import mlx.core as mx
import pytest

from checkpointing import checkpoint
from deltatune.machine import backend
from deltatune.ops.experts import Projection, expert_block
from deltatune.ops.experts import block as block_module
from deltatune.ops.experts.trial_case import EXACT, EXACT_ELEMENT, ROUNDINGS_ON_GPU
from deltatune.ops.operator.measure import ROUNDING
from deltatune.ops.pointwise import scored_swiglu, unpacking
from dense_experts import LEAVES, NAMES, Case, block, expected, largest_errors, value_and_gradients
from poison import poison

CASES = {
    "some": Case(),
    "one of many": Case(k=1),
    "one row": Case(tokens=1, k=1),
    "one token": Case(tokens=1),
    "experts without tokens": Case(routing="few"),
    "all on one expert": Case(routing="one expert"),
    "ties": Case(routing="tied", k=3),
    "more experts than rows": Case(tokens=3, experts=64),
    "odd sizes": Case(tokens=301, k=3, experts=5, outer=33, inner=17, rank=1),
    "rank above the matrix": Case(rank=40),
    "many chunks": Case(tokens=700, k=4, experts=16, outer=256, inner=96, rank=8),
}


@pytest.fixture(params=["cpu", "metal", "cuda"])
def form(request, monkeypatch):
    """The layout of each machine: tiles on a CPU and sorted rows on GPUs, whose operations MLX has on a CPU too."""
    if backend.device() not in ("cpu", request.param):
        pytest.skip(f"for {request.param}")
    monkeypatch.setattr(backend, "device", lambda: request.param)
    monkeypatch.setattr(block_module, "GPU_CHUNK_BYTES", 2**19)
    monkeypatch.setattr(block_module, "ROWS_PER_EXPERT", {"metal": 4, "cuda": 4})


def assert_exact(found, reference) -> None:
    norm, element = largest_errors(found, reference)
    assert norm < EXACT
    assert element < EXACT_ELEMENT


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_and_gradients_against_float64(case):
    reference = expected(case)
    poison()
    found = value_and_gradients(block, case, case.arrays)
    assert all(found[name].dtype == array.dtype for name, array in case.arrays.items())
    assert_exact(found, reference)


@pytest.mark.parametrize(("device", "gigabytes", "chunks"), [("metal", 16, 3), ("metal", 48, 1), ("cuda", 48, 3)])
def test_a_mac_with_memory_reads_all_experts_once(device, gigabytes, chunks, monkeypatch):
    """As many experts and tokens as 35B-A3B has in a row of 2,048, in eighths of its sizes."""
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(backend, "gpu_memory", lambda: gigabytes * 2**27)
    monkeypatch.setattr(block_module, "GPU_CHUNK_BYTES", 2**25)
    monkeypatch.setattr(block_module, "ROWS_PER_EXPERT", {"metal": 4, "cuda": 4})
    up, down = (Projection(mx.zeros((256, *shape))) for shape in ((64, 256), (256, 64)))
    assert block_module._layout([up, down], 2048, 8).chunks == chunks


@pytest.mark.usefixtures("form")
def test_the_gradients_of_the_activation_in_one_pass(monkeypatch):
    """The pass is computed by MLX's operations here."""
    calls = []
    monkeypatch.setattr(scored_swiglu, "serves", lambda *_: True)

    def gradients(gate, x, d, score):
        calls.append(1)
        hidden, inner, dscore = scored_swiglu.with_mlx(lambda g, x: g * mx.sigmoid(g) * x, [gate, x], d, score[:, None])
        return hidden, *inner, dscore

    monkeypatch.setattr(scored_swiglu, "gradients", gradients)
    case = CASES["many chunks"]
    assert_exact(value_and_gradients(block, case, case.arrays), expected(case))
    assert bool(calls) == (backend.device() != "cpu")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_half_precision_costs_its_own_rounding(dtype):
    case = Case(dtype=dtype)
    found = value_and_gradients(block, case, case.arrays)
    assert found["y"].dtype == found["x"].dtype == dtype
    assert found["up.lora_a"].dtype == mx.float32
    norm, element = largest_errors(found, expected(case))
    roundings = 1 if backend.device() == "cpu" else ROUNDINGS_ON_GPU
    rounding = ROUNDING[str(dtype).removeprefix("mlx.core.")]
    assert norm < EXACT + roundings**0.5 * rounding
    assert element < EXACT_ELEMENT + roundings * rounding


def test_experts_without_tokens_get_exactly_zero():
    case = Case(routing="few")
    found = value_and_gradients(block, case, case.arrays)
    for name in NAMES:
        for leaf in LEAVES:
            gradient = found[f"{name}.{leaf}"]
            assert not mx.any(gradient[2:] != 0)
            assert mx.all(mx.any((gradient[:2] != 0).reshape(2, -1), axis=1))


@pytest.mark.parametrize("wrap", ["compile", "checkpoint", "compiled checkpoint", "checkpoint in a checkpoint"])
def test_the_same_bits_compiled_and_recomputed(wrap):
    if "compile" in wrap and backend.device() == "cuda":
        pytest.skip("kernels that mx.compile builds there contract sums; a step is compiled without (compiling.py)")
    case = Case(tokens=90)
    names = [name for name in case.arrays if name.split(".")[-1] != "weight"]
    frozen = {name: array for name, array in case.arrays.items() if name not in names}
    trains = tuple(leaf for leaf in LEAVES if leaf != "weight")

    def plain(arrays):
        return block(case, {**frozen, **arrays}, trains)

    run = plain
    if "checkpoint" in wrap:
        run = checkpoint(lambda arrays: plain(arrays))
    if wrap == "checkpoint in a checkpoint":
        inner = run
        run = checkpoint(lambda arrays: inner(arrays))
    given = {name: case.arrays[name] for name in names}
    one, two = (mx.grad(lambda arrays, f=f: (f(arrays) * case.dy).sum()) for f in (plain, run))
    two = mx.compile(two) if "compile" in wrap else two
    reference, found = one(given), two(given)
    assert all(mx.array_equal(reference[name], found[name]) for name in names)


@pytest.mark.skipif(backend.device() != "cpu", reason="counts a CPU's memory")
def test_all_unpacked_experts_wait_for_no_later_use(peak_bytes, monkeypatch):
    """On an NVIDIA GPU, the backward pass unpacks a projection's experts again, in a compiled step as well."""
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(unpacking, "serves", lambda *_, **__: False)
    shape = 4, 128, 256
    packed = [mx.quantize(mx.random.normal(shape, key=mx.random.key(i)), 32, 4) for i in range(12)]
    projections = [Projection(*arrays, group_size=32, bits=4) for arrays in packed]
    experts = mx.arange(4)
    mx.eval(packed, experts)

    def peak(count):
        @mx.compile
        def passes(experts):
            total = mx.zeros(shape)
            for projection in [*projections[:count], *projections[:count][::-1]]:
                tied = mx.depends([experts], [total])[0]
                total = mx.tanh(total + projection.unpacked_matrices(tied, mx.float32))
            return total

        mx.eval(passes(experts))
        return peak_bytes(lambda: passes(experts))

    assert peak(12) - peak(4) < 4 * 4 * math.prod(shape)


PACKINGS = [{"bits": bits, "group_size": 32} for bits in (2, 3, 4, 6, 8)]
PACKINGS += [
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    {"bits": 8, "group_size": 32, "mode": "mxfp8"},
]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: f"{p.get('mode', 'affine')}{p['bits']}")
def test_packed_weights_equal_their_unpacked_values(packing):
    case = Case(outer=64, inner=32)
    packed, arrays = {}, dict(case.arrays)
    for name in NAMES:
        weight, scales, *biases = mx.quantize(case.arrays[f"{name}.weight"], **packing)
        unpacked = mx.dequantize(weight, scales, *biases, **packing)
        arrays[f"{name}.weight"] = unpacked.astype(mx.float32)
        packed[name] = {"weight": weight, "scales": scales, "biases": biases[0] if biases else None, **packing}
    dequantized = replace(case)
    dequantized.arrays = arrays
    names = [name for name in arrays if "weight" not in name]

    def run(case, given):
        up, down, gate = (
            Projection(
                **packed[name],
                **{leaf: given[f"{name}.{leaf}"] for leaf in LEAVES[1:]},
                scale=1.5,
                trains=LEAVES[1:],
            )
            for name in NAMES
        )
        return expert_block(given["x"], case.indices, given["scores"], up, down, gate)

    reference = {name: value for name, value in expected(dequantized).items() if "weight" not in name}
    found = value_and_gradients(run, case, {name: arrays[name] for name in names})
    assert_exact(found, reference)


@pytest.mark.parametrize(("device", "gathered"), [("cuda", 0), ("metal", 3), ("cpu", 0)])
def test_only_metal_multiplies_packed_weights_without_unpacking(device, gathered, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    calls, gather_qmm = [], mx.gather_qmm
    monkeypatch.setattr(mx, "gather_qmm", lambda *given, **options: calls.append(1) or gather_qmm(*given, **options))
    packed = [mx.quantize(mx.random.normal((4, 64, 64), key=mx.random.key(i)), 32, 4) for i in range(3)]
    up, down, gate = (Projection(w, scales=s, biases=b, group_size=32) for w, s, b in packed)
    x, indices = mx.random.normal((5, 64), key=mx.random.key(4)), mx.array([[0, 1], [2, 3], [1, 0], [3, 3], [2, 2]])
    expert_block(x, indices, mx.ones((5, 2)), up, down, gate)
    assert len(calls) == gathered


def test_without_scores_the_experts_outputs_are_not_summed():
    case = Case(tokens=33)
    arrays = case.arrays
    up, down, gate = (Projection(**{leaf: arrays[f"{n}.{leaf}"] for leaf in LEAVES}, scale=1.5) for n in NAMES)

    def separate(x, scores):
        y = expert_block(x.reshape(3, 11, -1), case.indices.reshape(3, 11, -1), None, up, down, gate)
        assert y.shape == (3, 11, case.k, case.outer)
        return ((y.reshape(33, case.k, -1) * scores[..., None]).sum(axis=1) * case.dy).sum()

    def summed(x, scores):
        return (expert_block(x, case.indices, scores, up, down, gate) * case.dy).sum()

    found, reference = (mx.grad(f, argnums=(0, 1))(arrays["x"], arrays["scores"]) for f in (separate, summed))
    for a, b in zip(found, reference, strict=True):
        assert mx.abs(a - b).max() <= 2e-6 * mx.abs(b).max()


def test_without_a_gate_the_activation_has_one_argument():
    case = Case()
    a = case.arrays
    up, down = (Projection(**{leaf: a[f"{n}.{leaf}"] for leaf in LEAVES}, scale=1.5) for n in ("up", "down"))
    y = expert_block(a["x"], case.indices, a["scores"], up, down, activation=mx.tanh)
    token, experts = 7, [int(i) for i in case.indices[7]]
    expected_row = 0
    for rank, expert in enumerate(experts):
        full = {n: a[f"{n}.weight"][expert] + 1.5 * a[f"{n}.lora_b"][expert] @ a[f"{n}.lora_a"][expert] for n in NAMES}
        hidden = mx.tanh(full["up"] @ a["x"][token] + a["up.bias"][expert])
        output = full["down"] @ hidden + a["down.bias"][expert]
        expected_row = expected_row + a["scores"][token, rank] * output
    assert mx.abs(y[token] - expected_row).max() < 1e-5


def test_dropout_draws_the_same_mask_in_the_backward_pass():
    """Without an activation the block is linear in each factor, so that its difference must equal the derivative."""
    case = Case(tokens=40)
    a = case.arrays
    key = mx.random.key(5)

    def run(factors, x):
        up, down = (
            Projection(a[f"{n}.weight"], **factors[n], scale=1.5, dropout=0.5, key=key, trains=("lora_a", "lora_b"))
            for n in ("up", "down")
        )
        return (expert_block(x, case.indices, a["scores"], up, down, activation=lambda u: u) * case.dy).sum()

    factors = {n: {leaf: a[f"{n}.{leaf}"] for leaf in LEAVES[2:]} for n in ("up", "down")}
    gradient = mx.grad(run)(factors, a["x"])
    for name in ("up", "down"):
        for leaf in LEAVES[2:]:
            # The value must be the one without the factor, plus <factor, gradient>.
            without = {n: {**factors[n], **({leaf: 0 * factors[n][leaf]} if n == name else {})} for n in factors}
            rise = run(factors, a["x"]) - run(without, a["x"])
            inner = (gradient[name][leaf] * factors[name][leaf]).sum()
            assert abs(float(rise - inner)) < 1e-4 * (1 + abs(float(inner)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": mx.zeros((50, 2))}, "indices must be integers"),
        ({"indices": mx.zeros((49, 2), mx.int32)}, "indices must be"),
        ({"scores": mx.zeros((50, 3))}, "scores must be"),
        ({"x": mx.zeros((50, 31))}, "up must be"),
        ({"up.lora_a": mx.zeros((7, 4, 32))}, "adapter of up must be"),
        ({"gate.weight": mx.zeros((8, 23, 32))}, "gate must be"),
    ],
)
def test_refuses_shapes_that_disagree(change, message):
    case = Case()
    indices = change.pop("indices", None) if "indices" in change else None
    if indices is not None:
        case.indices = indices
    with pytest.raises(ValueError, match=message):
        block(case, case.arrays | change)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("index", [8, 9, 100_000, -1])
def test_an_index_out_of_range_gives_nan_for_its_token_alone(index):
    """The outputs of the other tokens, and memory outside the arrays, are not affected."""
    case = Case()
    in_range = block(case, case.arrays)
    case.indices = case.indices.astype(mx.int32)
    case.indices[7, 1] = index
    found = value_and_gradients(block, case, case.arrays)
    assert mx.all(mx.isnan(found["y"][7]))
    others = mx.array([token for token in range(case.tokens) if token != 7])
    assert mx.abs(found["y"][others] - in_range[others]).max() < 1e-5
    assert mx.any(mx.isnan(found["up.lora_a"]))


def test_refuses_a_second_derivative():
    case = Case(tokens=4)
    up, down, gate = (Projection(case.arrays[f"{n}.weight"]) for n in NAMES)

    def total(x):
        return expert_block(x, case.indices, case.arrays["scores"], up, down, gate).sum()

    with pytest.raises((NotImplementedError, ValueError), match="second derivative"):
        mx.eval(mx.grad(lambda x: mx.grad(total)(x).sum())(case.arrays["x"]))


def peak(case: Case, peak_bytes) -> int:
    """The bytes in use at the peak of a gradient, without inputs and results."""
    trains = ("lora_a", "lora_b")
    names = ["x", "scores", *(f"{n}.{leaf}" for n in NAMES for leaf in trains)]

    def loss(given):
        return (block(case, case.arrays | given, trains) * case.dy).sum()

    given = {name: case.arrays[name] for name in names}
    mx.eval(mx.grad(loss)(given))
    gradients = sum(array.nbytes for array in given.values())
    return peak_bytes(lambda: mx.grad(loss)(given)) - gradients


@pytest.mark.any_blas
@pytest.mark.skipif(backend.device() != "cpu", reason="a GPU's chunk is as large as the whole case")
def test_memory_grows_with_adapters_and_tokens_only(peak_bytes):
    """Memory holds a chunk and arrays of the size of the adapters and of x, but none of tokens x k rows.

    The slack is for memory that one operation has not freed yet when the next begins.
    """
    slack = 5 * 2**20
    sizes = {"tokens": 512, "outer": 256, "inner": 96, "k": 8, "rank": 4, "experts": 16}
    base = peak(Case(**sizes), peak_bytes)
    for change in ({"rank": 64}, {"experts": 256}):
        case, small = Case(**sizes | change), Case(**sizes)
        grown = sum(case.arrays[n].nbytes - small.arrays[n].nbytes for n in case.arrays if "lora" in n)
        assert peak(case, peak_bytes) < base + 2 * grown + slack, change
    rows = (4096 - 512) * 256 * 4
    assert peak(Case(**sizes | {"tokens": 4096}), peak_bytes) < base + 4 * rows + slack < base + 8 * rows
