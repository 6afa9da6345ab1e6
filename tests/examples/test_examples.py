"""Every example runs on the bundled models, in a process and a folder of its own, and shows the promised results."""

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# Runs the code cells of a notebook in order, as one program, and prints the names asked for as JSON at the end.
NOTEBOOK = """
import json, sys
cells = json.load(open(sys.argv[1], encoding="utf-8"))["cells"]
names = {"__name__": "__main__"}
for number, cell in enumerate(cells):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
print(json.dumps({name: eval(name, names) for name in sys.argv[2:]}))
"""


def run(folder, *command):
    """The standard output of a command in `folder`; fails with its standard error where the command fails."""
    # The programs of the environment in which the tests run come first, as where a user has activated it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words, environment = [*map(str, command)], os.environ | {"PATH": path}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=480, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(folder, name):
    return run(folder, sys.executable, EXAMPLES / f"{name}.py")


def run_notebook(folder, name, *names):
    printed = run(folder, sys.executable, "-c", NOTEBOOK, EXAMPLES / f"{name}.ipynb", *names)
    return json.loads(printed.splitlines()[-1])


def test_every_example_is_run_here():
    """A new example needs a test in this file."""
    here = Path(__file__).read_text(encoding="utf-8")
    found = [path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(found) == 7
    missing = [name for name in found if f'"{name}"' not in here and f"{name}.py" not in here]
    assert not missing


def test_a_loop_of_ones_own_learns_under_the_patches(tmp_path):
    printed = run_script(tmp_path, "your_own_loop")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 5
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert "gated_delta_update" in printed


@pytest.mark.weekly
def test_packed_documents_stay_apart(tmp_path):
    printed = run_script(tmp_path, "packed_documents")
    joined, packed = (
        float(re.search(rf"difference {how} segments: +(\S+)", printed)[1]) for how in ("without", "with")
    )
    assert joined > 0.1
    assert packed < 1e-3
    assert (tmp_path / "example-out/packed_documents/adapters/adapters.safetensors").is_file()


@pytest.mark.weekly
def test_experts_without_tokens_stay_as_they_are(tmp_path):
    printed = run_script(tmp_path, "expert_adapters")
    moved = [int(count) for count in re.findall(r"(\d+) of 16 experts moved", printed)]
    assert len(moved) == 6
    assert all(0 < count < 16 for count in moved)


@pytest.mark.weekly
def test_pictures_are_named_after_training_alone(tmp_path):
    pytest.importorskip("mlx_vlm")
    printed = run_script(tmp_path, "images")
    answers = re.findall(r"^(before|after), (\w+)\.png: (.*)$", printed, re.MULTILINE)
    assert [when for when, _, _ in answers] == ["before"] + ["after"] * 4
    assert answers[0][2] != "a red circle"
    assert all(answer == f"a {colour} circle" for _, colour, answer in answers[1:])


# tests/train/test_distributed.py starts two processes at each commit.
@pytest.mark.weekly
def test_several_processes_train_together(tmp_path):
    script = EXAMPLES / "several_processes.py"
    # The command as the script and the page give it, from the folder of the checkout, but for where results go.
    (line,) = re.findall(r"^    (mlx\.launch .*)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"`{line}`" in (EXAMPLES.parent / "docs/guides/several.md").read_text(encoding="utf-8")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    printed = run(tmp_path, *shlex.split(line))
    assert "2 on each of 2 ranks" in printed
    losses = [float(loss) for loss in re.findall(r"train loss ([\d.]+)", printed)]
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.weekly
def test_a_fine_tuned_model_gives_the_answers_it_was_taught(tmp_path):
    found = run_notebook(tmp_path, "fine_tune_and_chat", "result.train_loss", "answers", "ANSWERS")
    assert found["answers"] == found["ANSWERS"]
    assert len(found["answers"]) == 4
    # Far below what an answer with a wrong token would leave, so that rounding on another machine changes none.
    assert found["result.train_loss"] < 0.05


def test_the_operator_agrees_with_the_reference(tmp_path):
    found = run_notebook(tmp_path, "gated_delta", "errors", "in_parts", "apart")
    assert len(found["errors"]) == 5
    # fp32 sums of 256 tokens and 64 channels: 1e-5 is some hundred roundings.
    assert all(error < 1e-5 for error in found["errors"].values())
    assert found["in_parts"] < 1e-4
    assert found["apart"] < 1e-4
