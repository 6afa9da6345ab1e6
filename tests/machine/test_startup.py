"""Faults before a command starts: unknown values of environment variables, and an MLX that cannot be loaded."""

import os
import subprocess
import sys

import pytest

from console import deltatune
from deltatune import cli
from deltatune.errors import UserError
from deltatune.machine import environment, startup
from deltatune.ops import IMPLEMENTATIONS

VALUES = [
    (environment.BLAS, "mkl", r"DELTATUNE_BLAS='mkl': expected one of openblas, system, or unset"),
    (environment.THREADS, "two", r"DELTATUNE_THREADS='two': expected a number of threads from 1 to 9999, or unset"),
    (environment.THREADS, "0", r"DELTATUNE_THREADS='0': expected a number of threads"),
    (environment.THREADS, "99999", r"DELTATUNE_THREADS='99999': expected a number of threads"),
    (environment.THREADS, "٣", r"DELTATUNE_THREADS='٣': expected a number of threads"),
    ("DELTATUNE_GATED_DELTA", "chunks", r"GATED_DELTA='chunks': expected .*, or unset \(did you mean 'chunk'\?\)"),
    ("DELTATUNE_ATTENTION", "flash", r"DELTATUNE_ATTENTION='flash': expected one of naive, blocked, fused, native"),
    (environment.CACHE, "/dev/null", r"DELTATUNE_CACHE=./dev/null.: expected a folder"),
    (environment.TF32, "true", r"MLX_ENABLE_TF32='true': expected a whole number of 0 or more, or unset"),
    (environment.ELEMENTS, "0", r"MLX_MAX_MB_PER_BUFFER='0': expected a whole number of 1 or more, or unset"),
    (environment.OPERATIONS, "0", r"MLX_MAX_OPS_PER_BUFFER='0': expected a whole number of 1 or more, or unset"),
    (environment.ELEMENTS, "many", r"MLX_MAX_MB_PER_BUFFER='many': expected a whole number"),
    ("MLX_CUDA_GRAPH_CACHE_SIZE", "0", r"MLX_CUDA_GRAPH_CACHE_SIZE='0': expected a whole number of 1 or more"),
]


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = environment.of_child() | variables
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


@pytest.mark.bad_input("the environment variable `{name}={value}`")
@pytest.mark.parametrize(("name", "value", "message"), VALUES, ids=range(len(VALUES)))
def test_unknown_values_are_refused_by_every_command(run, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    for command in (["doctor"], ["train"], ["run", "--", "x"], ["plan"], ["selftest"], ["demo"]):
        code, out, err = run(*command)
        assert (code, out, err.count("\n")) == (2, "", 1)
        with pytest.raises(UserError, match=message):
            startup.check(IMPLEMENTATIONS)
        assert name in err
    assert run("--version")[0] == 0


@pytest.mark.parametrize(("name", "value"), [(environment.THREADS, "two"), ("DELTATUNE_GATED_DELTA", "chunks")])
def test_a_process_ends_with_one_message_and_a_script_with_an_exception(name, value):
    """Both a variable that is read while deltatune is imported, and one that is read later."""
    done = python("-Xutf8", "-m", "deltatune", "eval", **{name: value})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"deltatune: {name}={value!r}: expected ")
    assert python("-m", "deltatune", "--help", **{name: value}).returncode == 0
    script = python("-c", "import deltatune", **{name: value})
    assert script.returncode == 1
    assert f"deltatune.errors.UserError: {name}={value!r}: expected " in script.stderr


@pytest.fixture
def without_mlx(tmp_path):
    """The search path of an environment where mlx lacks its library, as `pip install deltatune` leaves it on Linux."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / "core.py").write_text('raise ImportError("liblapack.so.3: cannot open shared object file")')
    return os.pathsep.join([str(tmp_path), *filter(None, sys.path)])


@pytest.mark.bad_input("an installation without one of the extras that bring MLX's library")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=[pytest.mark.weekly] * (name not in ("train", "run", "doctor")))
        for name in map(cli.name_of, cli.COMMANDS)
    ],
)
def test_without_mlx_every_command_names_the_extras(without_mlx, command):
    needed = {
        "chat": ["--model", "x"],
        "export": ["--to", "peft", "--model", "x", "--save-path", "y"],
        "generate": ["--model", "x", "--prompt", "x"],
        "import": ["--model", "x", "--peft", "y", "--save-path", "z"],
        "merge": ["--model", "x"],
        "run": ["--", "x"],
    }
    done = python("-m", "deltatune", command, *needed.get(command, []), PYTHONPATH=without_mlx)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("deltatune: MLX cannot be loaded (liblapack.so.3: cannot open shared object file).")
    assert done.stderr.endswith(" it there (Debian: libblas3, liblapack3).\n")
    assert "pip install 'deltatune[cpu]', or for NVIDIA GPUs 'deltatune[cuda13]'" in done.stderr


def test_without_mlx_help_and_version_work_and_an_import_fails(without_mlx):
    for words in (["--help"], ["--version"], ["train", "--help"]):
        done = python("-m", "deltatune", *words, PYTHONPATH=without_mlx)
        assert (done.returncode, done.stderr) == (0, "")
    script = python("-c", "try:\n import deltatune\nexcept ImportError as error: print(error)", PYTHONPATH=without_mlx)
    assert script.stdout.startswith("MLX cannot be loaded")
    # Before a traceback, if there is one.
    assert script.stderr.startswith("deltatune: MLX cannot be loaded")


@pytest.fixture
def torch_folder(tmp_path):
    """A folder with a package torch that cannot be imported, which transformers takes for PyTorch."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('torch was imported')")
    about = tmp_path / "torch-2.9.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    (about / "top_level.txt").write_text("torch\n")
    return tmp_path


def with_torch(folder, *arguments):
    return python(*arguments, PYTHONPATH=os.pathsep.join([str(folder), *filter(None, sys.path)]))


@pytest.fixture
def csv_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    for name in ("train", "valid", "test"):
        (folder / f"{name}.csv").write_text("prompt,completion\nthe quick brown fox,jumps over the lazy dog\n")
    return folder


def test_commands_do_not_import_pytorch(torch_folder, checkpoint, csv_folder):
    """The datasets library reads CSV, and imports whatever it finds in sys.modules."""
    flags = ("--model", checkpoint, "--data", csv_folder, "--batch-size", "1")
    done = deltatune("eval", *flags, PYTHONPATH=str(torch_folder))
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    assert "PyTorch" not in done.stderr


def test_another_program_may_import_pytorch(torch_folder):
    program = torch_folder / "program.py"
    program.write_text("import torch")
    done = deltatune("run", "--", program, PYTHONPATH=str(torch_folder))
    assert "torch was imported" in done.stderr


def test_hidden_pytorch_is_not_installed_for_anybody_who_asks(torch_folder):
    program = (
        "import importlib.metadata, importlib.util, sys\n"
        "from deltatune.machine import startup\n"
        "startup.hide_torch()\n"
        "startup.hide_torch()\n"
        "assert importlib.util.find_spec('torch') is None\n"
        "assert 'torch' not in sys.modules\n"
        "importlib.invalidate_caches()\n"
        "assert importlib.metadata.version('numpy')\n"
        "import wave\n"
        "try:\n    import torch\n"
        "except ModuleNotFoundError as error:\n    print(error.name)\n"
    )
    done = with_torch(torch_folder, "-c", program)
    assert (done.returncode, done.stdout) == (0, "torch\n"), done.stderr


def test_a_program_that_imports_deltatune_keeps_pytorch(torch_folder):
    program = "import deltatune, sys; deltatune.machine.startup.leave_torch_out(); assert 'torch' not in sys.modules"
    done = with_torch(torch_folder, "-c", program)
    assert done.returncode == 0, done.stderr
