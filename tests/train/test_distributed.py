"""Tests that several ranks under mlx.launch train as one process does on the same global batches."""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from console import called
from deltatune.train.distributed import MESSAGE_BYTES, World, _messages
from killed_runs import adapters, metrics
from launched_ranks import launched_each


@pytest.fixture(scope="module")
def shared(options):
    """Options without dropout, as its draws differ between ranks, and with SGD: Adam makes a rounding a full step."""
    changes = {
        "lora_parameters": {"rank": 2, "scale": 10.0, "dropout": 0.0},
        "optimizer": "sgd",
        "optimizer_config": {},
        "iters": 5,
        "grad_clip": 0.5,
        "lr_schedule": {"name": "linear_schedule", "arguments": [0.05, 0.01, 10]},
        "steps_per_report": 1,
    }
    return options | changes


@pytest.fixture(scope="module")
def routed(shared, tiny_checkpoint):
    """Options of a run with a loss of routers."""
    folder = tiny_checkpoint("qwen3_next", num_hidden_layers=2, full_attention_interval=2)
    chosen = {"model": str(folder), "router_aux_loss_coef": 2.0, "val_batches": 0}
    return shared | chosen


@pytest.fixture(scope="module")
def pictured(shared, tiny_vision_checkpoint, tmp_path_factory):
    """Options of a run on three rows in batches of two: rank 1's share of the second batch is blank."""
    data = tmp_path_factory.mktemp("pictures")
    Image.new("RGB", (32, 32), "red").save(data / "a.png")
    row = {"image": "a.png", "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "red"}]}
    for split in ("train", "valid"):
        (data / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 3)
    model = tiny_vision_checkpoint("qwen3_5")
    return shared | {"model": str(model), "data": str(data), "batch_size": 2, "steps_per_eval": 5}


GRPO = {
    "loss": "grpo",
    "num_generations": 4,
    "num_iterations": 2,
    "scale_rewards": "batch",
    "reward_funcs": ["length:3", "regex:[a-m]$"],
}


def answering(options, **of_loss):
    """Options of a run that samples answers, each of one update."""
    values = {"batch_size": 2, "max_completion_length": 8, "grad_accumulation_steps": 1, "val_batches": 1, "iters": 4}
    return options | values | {"steps_per_report": 1, "steps_per_eval": 4, "save_every": 100} | of_loss


def continued(options, folder, begins=("--iters", "3")):
    """A run into the folder `straight`, and one into `stopped` that ends early and is continued."""
    straight, stopped = (["--adapter-path", str(folder / name)] for name in ("straight", "stopped"))
    return [(options, *straight), (options, *stopped, *begins), (options, *stopped, "--resume")]


@pytest.fixture(scope="module")
def ranks(options, shared, routed, tmp_path_factory, request):
    """The folder of the runs in two ranks, and what they printed; all of them in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = [(shared, "--adapter-path", str(folder / name), "--iters", "3") for name in ("two", "fewer")]
    runs += [(shared, "--adapter-path", str(folder / "two"), "--resume")]
    runs += [(routed, "--adapter-path", str(folder / "routed"))]
    runs += continued(answering(options, **GRPO), folder)
    if find_spec("mlx_vlm") is not None:
        runs += [(request.getfixturevalue("pictured"), "--adapter-path", str(folder / "pictured"))]
    return SimpleNamespace(folder=folder, said=launched_each(folder, *runs))


@pytest.fixture
def alone(tmp_path):
    """alone(options) -> the folder of a run in one rank."""

    def run(options):
        file = tmp_path / "one.yaml"
        file.write_text(json.dumps(options | {"adapter_path": str(tmp_path / "one")}))
        done = called("train", "-c", file)
        assert done.returncode == 0, done.stderr
        return tmp_path / "one"

    return run


def assert_same(one, two):
    """Both runs have the same adapters and losses, up to the rounding of sums."""
    left, right = (mx.load(str(folder / "adapters.safetensors")) for folder in (one, two))
    for name, expected in left.items():
        np.testing.assert_allclose(right[name], expected, rtol=0, atol=2e-6, err_msg=name)
    left, right = metrics(one), metrics(two)
    for name in ("train_loss", "val_loss"):
        first, second = ({r["iteration"]: r[name] for r in records if name in r} for records in (left, right))
        # A shorter run has one more evaluation, at its end.
        assert {iteration: second[iteration] for iteration in first} == pytest.approx(first, rel=1e-5)


def test_two_ranks_train_as_one_and_resume(ranks, make_trainer, shared, screen_text, tmp_path):
    """The first runs end inside an accumulation, so that the state holds each rank's own gradients.

    That ranks over MPI have the bits of ranks over the ring, test_peers.py tests.
    """
    assert ranks.said.count("4 a batch, 2 on each of 2 ranks") == 4
    assert ranks.said.count("Iter 3/3") == 3
    assert "Resuming after iteration 3 of 5" in ranks.said
    make_trainer(**shared | {"adapter_path": str(tmp_path / "one")}).run()
    assert_same(tmp_path / "one", ranks.folder / "two")
    # One rank takes the state of two, which knows nothing of how they spoke to one another.
    make_trainer(**shared | {"adapter_path": str(ranks.folder / "fewer"), "resume": True}).run()
    assert "The number of ranks is 1; it was 2 when the state was saved." in screen_text.text()
    assert_same(tmp_path / "one", ranks.folder / "fewer")


@pytest.mark.weekly
def test_a_run_resumes_on_more_ranks(make_trainer, launch, shared, tmp_path):
    """The first part of the run ends inside an accumulation of 2."""
    make_trainer(**shared | {"adapter_path": str(tmp_path / "one")}).run()
    make_trainer(**shared | {"iters": 3}).run()
    done = launch(shared | {"adapter_path": str(tmp_path / "out"), "resume": True})
    assert "The number of ranks is 2; it was 1 when the state was saved." in done.stdout, done.stderr
    assert_same(tmp_path / "one", tmp_path / "out")


def assert_same_routers(one, two):
    assert_same(one, two)
    left, right = ([each["aux_loss"] for each in metrics(run) if "aux_loss" in each] for run in (one, two))
    assert left == pytest.approx(right, rel=1e-5)


def test_the_loss_of_routers_is_that_of_the_whole_batch(ranks, alone, routed):
    """Choices and probabilities are summed over all ranks before their product is formed, in every micro-batch."""
    assert_same_routers(alone(routed), ranks.folder / "routed")


@pytest.mark.weekly
def test_the_losses_of_routers_by_layers(alone, launch, routed, tmp_path):
    bounded = routed | {"memory": "1GB"}
    assert launch(bounded | {"adapter_path": str(tmp_path / "two")}).returncode == 0
    assert_same_routers(alone(bounded), tmp_path / "two")


def test_a_rank_without_a_picture_in_a_batch_trains_along(pictured, ranks, alone):
    assert_same(alone(pictured), ranks.folder / "pictured")


def test_ranks_sample_their_own_answers_and_continue(ranks):
    """Stopped in a second pass, every rank takes up its own answers again."""
    assert_answers_continue(ranks.folder)


@pytest.mark.weekly
def test_ranks_distil_their_own_answers_and_continue(launch_each, options, checkpoint, tmp_path):
    launch_each(*continued(answering(options, loss="distill", lmbda=1.0, teacher=str(checkpoint)), tmp_path))
    assert_answers_continue(tmp_path)


def assert_answers_continue(folder):
    straight, stopped = metrics(folder / "straight"), metrics(folder / "stopped")
    assert any("val_loss" in record for record in straight)
    for name in ("reward", "completions/mean_length"):
        assert [r[name] for r in straight if name in r] == [r[name] for r in stopped if name in r]
    assert adapters(folder / "straight") == adapters(folder / "stopped")


SUMS = """
import deltatune
import mlx.core as mx
from deltatune.train.distributed import MESSAGE_BYTES, World
world = World()
own = mx.random.key(world.rank)
def tree(rank):
    return {
        "large": mx.full((MESSAGE_BYTES // 4,), rank + 0.5),
        "small": [mx.arange(6).reshape(2, 3) * (rank + 1.0), mx.array(2.0 * rank), mx.arange(4) * 1.5],
        "half": mx.full((3,), rank + 1.0, mx.bfloat16),
        "counts": mx.array([rank, 1], mx.uint32),
    }
summed = world.sum_tree(tree(world.rank))
mx.eval(summed)
from deltatune.train.tree import leaves
ranks = [dict(leaves(tree(rank))) for rank in range(world.size)]
for path, leaf in leaves(summed):
    expected = sum((one[path] for one in ranks[1:]), ranks[0][path])
    assert leaf.dtype == expected.dtype and mx.array_equal(leaf, expected), path
keys = world.gather(mx.array([world.rank, 2**32 - 1], mx.uint32))
assert keys.tolist() == [[rank, 2**32 - 1] for rank in range(world.size)]
assert world.sum_numbers(1.5, world.rank) == [1.5 * world.size, sum(range(world.size))]
assert world.largest(world.rank) == world.size - 1
from deltatune.ops.operator.rankings import Rankings
from deltatune.train.saving import agree_on_choices
of_main = {"attention, bf16": ["native", "fused"]}
chosen = Rankings(dict(of_main) if world.main else {"attention, bf16": ["fused"], "of one rank": ["chunk"]})
agree_on_choices(chosen, world)
assert chosen.names == of_main and not chosen.by_time, chosen
print(f"rank {world.rank} of {world.size} over {world.backend} is right", flush=True)
"""


# Runs over the ring train as one process does.
@pytest.mark.parametrize(("ranks", "backend"), [pytest.param(3, "ring", marks=pytest.mark.weekly), (2, "mpi")])
def test_sums_over_the_ranks(launch, ranks, backend):
    done = launch({}, ranks=ranks, backend=backend, program=SUMS)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} over {backend} is right" in done.stdout, done.stderr


def test_few_messages_of_one_dtype_last_leaves_first():
    quarter = mx.zeros(MESSAGE_BYTES // 16)
    flat = [(f"layer {number}", quarter) for number in range(6)]
    flat += [("half", mx.zeros(8, mx.bfloat16)), ("whole", mx.zeros(MESSAGE_BYTES // 4))]
    paths = [[path for path, _ in message] for message in _messages(reversed(flat))]
    assert paths == [
        ["whole"],
        ["layer 5", "layer 4", "layer 3", "layer 2"],
        ["half"],
        ["layer 1", "layer 0"],
    ]


def test_one_process_is_a_world_of_its_own():
    world = World()
    assert (world.rank, world.size, world.main, world.backend) == (0, 1, True, None)
    assert world.sum_numbers(1.5, 2.0) == [1.5, 2.0]
    tree = {"a": mx.ones(3)}
    assert world.sum_tree(tree) is tree
    assert world.gather(mx.ones(3)).shape == (1, 3)
