"""Programs that train and kill themselves with SIGKILL, and the files of a run that must have the same bits."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

# It runs `deltatune train -c FILE ...` and kills itself at the count-th iteration, write of a state, file operation of
# os, or move of a file to the name that follows "to:".
KILLED_AT_A_POINT = """
import os, signal, sys
import deltatune
import mlx.core as mx
from deltatune.train.iterations import Iterations

where, count = sys.argv[1], int(sys.argv[2])
seen = 0

def killing(plain, after=False):
    def call(*arguments, **options):
        global seen
        seen += 1
        if seen == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain(*arguments, **options)
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

if where == "iteration":
    Iterations._next_batch = killing(Iterations._next_batch)
elif where == "write":
    # Half of the state's bytes are on the disk when the kill comes.
    plain = mx.save_safetensors
    def half(file, *arguments):
        global seen
        seen += 1
        plain(file, *arguments)
        if seen == count:
            file._file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    mx.save_safetensors = half
elif where.startswith("to:"):
    plain_replace = os.replace
    counted = killing(plain_replace, after=True)
    def replace(old, new):
        (counted if os.path.basename(new) == where[3:] else plain_replace)(old, new)
    os.replace = replace
else:
    setattr(os, where, killing(getattr(os, where), after=True))
from deltatune.cli import main
sys.exit(main(["train", "-c", *sys.argv[3:]]))
"""

# One rank kills itself after so many iterations and a part of a step, and writes the time of its death to a file.
KILLED_AT_A_MOMENT = """
import os, signal, sys, threading, time
import deltatune
from deltatune.train.iterations import Iterations

victim, (iterations, part), note = int(sys.argv[1]), divmod(float(sys.argv[2]), 1), sys.argv[3]
plain, starts = Iterations._iterate, []

def end(seconds):
    time.sleep(seconds)
    open(note, "w").write(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)

def iterate(self):
    starts.append(time.time())
    if self.parts.world.rank == victim and len(starts) == iterations + 1:
        step = starts[-1] - starts[-2] if iterations else 1.0
        threading.Thread(target=end, args=(part * step,), daemon=True).start()
    return plain(self)

Iterations._iterate = iterate
from deltatune.cli import main
sys.exit(main(["train", *sys.argv[4:]]))
"""

# Times and memory differ from run to run.
_TIMED = (
    *("val_time", "iterations_per_second", "tokens_per_second", "peak_memory"),
    *("seconds/sampling", "seconds/rewards", "val_seconds/sampling", "val_seconds/rewards"),
)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without times and memory."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in _TIMED} for record in records]


def adapters(folder: Path) -> bytes:
    """Return the file of a run's last adapters."""
    return (folder / "adapters.safetensors").read_bytes()


def result(folder: Path) -> dict[str, Any]:
    """Return all that a finished run leaves and that a continued one must leave too, by name."""
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    arrays: Any = mx.load(str(folder / "state" / "state.safetensors"))
    state = {name: np.array(array.reshape(-1).view(mx.uint8)).tobytes() for name, array in arrays.items()}
    return {**files, **state, "metrics": metrics(folder)}


def same(one: Path, other: Path) -> None:
    """Assert that two runs left the same files, states and metrics."""
    ours, theirs = result(one), result(other)
    names = {name for name in theirs if not name[0].isdigit()}
    assert "optimizer/step" in names
    different = {name for name in names if ours[name] != theirs[name]}
    assert different == set()
