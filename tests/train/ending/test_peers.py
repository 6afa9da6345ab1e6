"""Tests that ranks end soon, with one message, after another is killed, and that the run resumes to the same bits."""

import random
import re
import socket
import time
from types import SimpleNamespace

import pytest

from deltatune.train.ending.peers import Peers
from killed_runs import KILLED_AT_A_MOMENT, adapters

# The most seconds that the others may take to end.
ALLOWED = 60.0


@pytest.fixture
def killed(launch, tmp_path):
    """killed(options, victim, moment, ...) launches a run, and returns it and whether the rank lived until its kill.

    The whole part of `moment` counts iterations of this process; the rest is a part of the next one.
    """

    def run(options, victim, moment, **how):
        note = tmp_path / "killed"
        note.unlink(missing_ok=True)
        done = launch(
            options, "--resume", program=KILLED_AT_A_MOMENT, before=(str(victim), str(moment), str(note)), **how
        )
        if not note.exists():
            return done, False
        assert time.time() - float(note.read_text()) < ALLOWED
        return done, True

    return run


@pytest.fixture
def two_ranks(options, tmp_path):
    """Options of a run of 16 iterations, with dropout, into the folder `out`."""
    return options | {"iters": 16, "val_batches": 0, "adapter_path": str(tmp_path / "out"), "save_every": 4}


def message(done):
    """Return the message of the surviving ranks, which must be a single one."""
    found = re.findall(r"deltatune: (.*)", done.stderr)
    assert len(found) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return found[0]


@pytest.mark.weekly
def test_one_of_two_others_speaks_for_both(killed, two_ranks):
    """Rank 0, which alone saves, is dead, so that the lower of the other two reports it."""
    done, was_killed = killed(two_ranks | {"iters": 10**5, "save_every": 10**5, "batch_size": 6}, 0, 5.5, ranks=3)
    assert was_killed
    assert "rank 0 of 3 ended before the run did" in message(done)
    assert re.search(r"no state was saved yet in .*, so the same command starts from the begin", message(done))
    for rank in (1, 2):
        assert f"Node with rank {rank} exited with code 2" in done.stdout + done.stderr


# Rank 1 kills itself where the others wait for it, or are busy. "stuck" stands for NCCL: the ring raises an error for a
# dead rank, and NCCL waits for it forever. A slow save is in the middle of a file when the kill comes, and goes on when
# the death is known.
KILLED_WHILE_OTHERS_WAIT = """
import os, pathlib, signal, sys, threading, time
import deltatune
import mlx.core as mx
from deltatune.train import distributed
from deltatune.train.ending.early_end import Ending
from deltatune.train.evaluation import evaluate
from deltatune.train.distributed import World
from deltatune.train.evaluation.samples import Samples
from deltatune.train.saved.outputs import Outputs
from deltatune.train.saving import Saving
from deltatune.train.step import Step

place, backend, busy = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])

class Stuck:
    def __getattr__(self, name):
        return getattr(mx, name)

    def eval(self, *arrays):
        try:
            mx.eval(*arrays)
        except RuntimeError:
            threading.Event().wait()

if backend == "stuck":
    distributed.mx = evaluate.mx = Stuck()

reached = []

def ending(plain, at):
    calls = []
    def call(self, *arguments, **options):
        # The plan has traced an update of a step of its own.
        of_object = vars(self)
        world = self if isinstance(self, World) else of_object.get("world", of_object.get("_world"))
        calls.append(self)
        count = sum(each is self for each in calls)
        reached.extend([self] * (count == at))
        if world.rank == 1 and count == at:
            # The others are in their waits by then.
            time.sleep(0 if place == "save, slow" else 1)
            while place == "save, slow" and not busy.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *arguments, **options)
    return call

def slow(plain):
    def call(*arguments, **options):
        time.sleep(2 if reached else 0)
        return plain(*arguments, **options)
    return call

dead = threading.Event()

def rank_ended(self, ranks, plain=Ending._rank_ended):
    dead.set()
    plain(self, ranks)

Ending._rank_ended = rank_ended

def save_weights(self, iteration, plain=Outputs.save_weights):
    busy.touch()
    dead.wait()
    plain(self, iteration)

# Evaluations and samples come before the first iteration and after the fourth.
if place == "evaluation":
    evaluate.Evaluation.__call__ = ending(evaluate.Evaluation.__call__, 2)
if place in ("samples", "save, slow"):
    plain_main, plain_answers = World.do_on_main, Samples.answers
    awaited, at = ("answer sample_prompts", 2) if place == "samples" else ("save", 1)
    def do_on_main(self, call, task):
        return (dying if task == awaited else plain_main)(self, call, task)
    def answers(self, ended):
        return plain_answers(self, slow(ended))
    dying, World.do_on_main, Samples.answers = ending(plain_main, at), do_on_main, answers
if place == "save, slow":
    Outputs.save_weights = save_weights
if place == "update":
    Step.update = ending(Step.update, 3)
if place == "save":
    Saving.save = ending(Saving.save, 3)
from deltatune.cli import main
sys.exit(main(["train", *sys.argv[4:]]))
"""
_SAMPLED = {"val_batches": 0, "sample_prompts": ["question"], "steps_per_eval": 4}


@pytest.mark.parametrize(
    ("place", "backend", "more", "saved"),
    [
        pytest.param("evaluation", "stuck", {"val_batches": -1, "steps_per_eval": 4}, 3, marks=pytest.mark.weekly),
        pytest.param("samples", "ring", _SAMPLED, 3, marks=pytest.mark.weekly),
        pytest.param("update", "ring", {"save_every": 4}, 4, marks=pytest.mark.weekly),
        # The third iteration is the first half of an update, whose sums are gathered.
        pytest.param("save", "stuck", {"save_every": 1}, 2, marks=pytest.mark.weekly),
        # Files that are being written when the rank dies are written to their end.
        ("save, slow", "stuck", {}, 3),
    ],
)
def test_a_rank_that_dies_costs_only_unsaved_iterations(launch, two_ranks, tmp_path, place, backend, more, saved):
    options = two_ranks | {"iters": 8, "save_every": 3} | more
    started = time.monotonic()
    done = launch(options, program=KILLED_WHILE_OTHERS_WAIT, before=(place, backend, str(tmp_path / "busy")))
    assert time.monotonic() - started < ALLOWED
    assert "rank 1 of 2 ended before the run did" in message(done)
    assert f"the state after iteration {saved} is saved in" in message(done)
    assert "Run the same command with --resume to continue" in message(done)
    # mlx.launch prints how each rank ended.
    assert "Node with rank 0 exited with code 2" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def straight():
    """The adapters of a run that nobody killed, once it was made: two ranks have one sum, whatever carries it."""
    return {}


# Ranks that die at chosen moments, above, and ranks that resume, in test_distributed.py, are tested daily. mpirun
# reports the dead rank itself, and mostly kills the others before they can.
@pytest.mark.weekly
@pytest.mark.parametrize("backend", ["ring", "mpi"])
def test_killed_at_random_moments_the_run_ends_with_the_same_bits(
    killed, launch, two_ranks, tmp_path, straight, backend, request
):
    wanted = request.config.getoption("--kills") or 1
    if not straight:
        done = launch(two_ranks | {"adapter_path": str(tmp_path / "straight")}, backend=backend)
        assert "Iter 16/16" in done.stdout, done.stderr
        straight["adapters"] = adapters(tmp_path / "straight")
    draw = random.Random(0)
    kills = 0
    # If a run finishes before enough kills, the next one starts in another folder.
    for folder in range(wanted):
        options = two_ranks | {"adapter_path": str(tmp_path / f"out{folder}")}
        finished = False
        while not finished:
            victim, moment = draw.randrange(2), draw.uniform(0.0, 8.0) if kills < wanted else 1e6
            done, was_killed = killed(options, victim, moment, backend=backend)
            finished = "Iter 16/16" in done.stdout
            if not finished and f"process rank {victim} with" not in done.stderr:
                assert f"rank {victim} of 2 ended before the run did" in message(done)
            kills += was_killed and not finished
        assert adapters(tmp_path / f"out{folder}") == straight["adapters"]
        if kills >= wanted:
            break
    assert kills >= wanted


def test_a_connection_that_nobody_answers_is_closed(monkeypatch):
    ends = [socket.socketpair() for _ in range(2)]
    waiting = [ours for ours, _ in ends]
    for link in waiting:
        link.settimeout(0.01)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: waiting.pop())
    Peers(SimpleNamespace(rank=1, size=2), print)._call(0, (1, 2, ["one", "another"]))
    for ours, theirs in ends:
        assert ours.fileno() == -1
        theirs.close()
