"""Two ranks under mlx.launch against one process with the same global batches."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from deltatune.train.distributed import World

LAUNCH = Path(sys.executable).with_name("mlx.launch")


def launch(tmp_path, options, *flags):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(options))
    program = tmp_path / "program.py"
    program.write_text("import sys\nfrom deltatune.cli import main\nsys.exit(main(['train', *sys.argv[1:]]))\n")
    command = [LAUNCH, "-n", "2", "--python", sys.executable, program, "-c", file, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture
def shared(options, tmp_path):
    """No dropout (its draws differ between ranks), and SGD: Adam turns a rounding of 0 into a whole step."""
    changes = {
        "lora_parameters": {"rank": 2, "scale": 10.0, "dropout": 0.0},
        "optimizer": "sgd",
        "optimizer_config": {},
        "adapter_path": str(tmp_path / "two"),
        "iters": 5,
        "grad_clip": 0.5,
        "lr_schedule": {"name": "linear_schedule", "arguments": [0.05, 0.01, 10]},
    }
    return options | changes


def test_two_ranks_train_as_one_and_resume(make_trainer, shared, tmp_path, read_metrics):
    """The first launch ends inside an accumulation: each rank's own gradients wait in the state for the second."""
    make_trainer(**shared | {"adapter_path": str(tmp_path / "one")}).run()
    first = launch(tmp_path, shared | {"iters": 3})
    assert first.returncode == 0, first.stderr
    assert "4 a batch, 2 on each of 2 ranks" in first.stdout
    assert first.stdout.count("Iter 3/3") == 1
    second = launch(tmp_path, shared, "--resume")
    assert second.returncode == 0, second.stderr
    one, two = (mx.load(str(tmp_path / name / "adapters.safetensors")) for name in ("one", "two"))
    for name, expected in one.items():
        np.testing.assert_allclose(two[name], expected, rtol=0, atol=2e-6, err_msg=name)
    last = [next(r for r in reversed(read_metrics(tmp_path / n)) if "train_loss" in r) for n in ("one", "two")]
    assert last[1] == pytest.approx(last[0], rel=1e-5)


def test_one_process_is_a_world_of_its_own():
    world = World()
    assert (world.rank, world.size, world.main) == (0, 1, True)
    assert world.sum_numbers(1.5, 2.0) == [1.5, 2.0]
    tree = {"a": mx.ones(3)}
    assert world.sum_tree(tree) is tree
    assert world.gather(mx.ones(3)).shape == (1, 3)
