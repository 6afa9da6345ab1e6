"""`deltatune run` with other programs, each in a process of its own."""

import subprocess
import sys
import textwrap
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from deltatune import cli, patches
from deltatune.commands.run import run_program
from deltatune.errors import UserError
from deltatune.machine import backend, compiling
from deltatune.patches import PatchReport

START = "import deltatune, sys; from deltatune.commands.run import run_program; sys.exit(run_program(sys.argv[1:]))"

NOT_REACHED = "no recurrent layer was reached"
TRAINER = """
    import sys
    import mlx.core as mx
    import mlx.nn as nn
    from neighbour import NAME

    print(NAME, sys.argv, __name__, file=sys.stdout)
    if "patch" in sys.argv:
        from deltatune.patches import patched
        with patched():
            pass
    if "train" in sys.argv:
        from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs
        layer = GatedDeltaNet(TextModelArgs(hidden_size=16, linear_num_value_heads=2, linear_num_key_heads=2,
                                            linear_key_head_dim=8, linear_value_head_dim=8))
        loss, _ = nn.value_and_grad(layer, lambda layer, x: layer(x).sum())(layer, mx.ones((1, 5, 16)))
        mx.eval(loss)
    if "attend" in sys.argv:
        mx.grad(lambda x: mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0).sum())(mx.ones((1, 2, 5, 8)))
    if "fail" in sys.argv:
        def broken():
            return 1 / 0
        broken()
    if "words" in sys.argv:
        sys.exit("some words")
    sys.exit(int(sys.argv[-1]))
    """


@pytest.fixture
def program(tmp_path):
    (tmp_path / "neighbour.py").write_text("NAME = 'found beside it'")
    path = tmp_path / "trainer.py"
    path.write_text(textwrap.dedent(TRAINER))
    return path


def call(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", START, *command], capture_output=True, text=True, cwd=cwd)


def test_a_file_trains_with_our_gradients_and_keeps_its_exit_code(program):
    done = call("--", "python", str(program), "train", "7", cwd=program.parent.parent)
    assert done.returncode == 7
    assert done.stdout == f"found beside it ['{program}', 'train', '7'] __main__\n"
    said = done.stderr.splitlines()
    *patched, last = said
    assert all(line.startswith("deltatune: patched ") for line in patched)
    assert any(" of mlx_lm " in line for line in patched)
    assert last.startswith("deltatune: 1 traced calls of recurrences got deltatune's gradients")
    # Each patch is named on request alone.
    assert "patched gated_delta_update" not in done.stderr
    assert max(map(len, said)) < 200


@pytest.fixture
def ran(capsys, program):
    """ran(*words) runs the program in this process; returns its exit code and standard error."""

    def run(*words: str, **options: bool) -> tuple[int, str]:
        code = run_program(["--", "python", str(program), *words], **options)
        return code, capsys.readouterr().err

    return run


def test_attention_is_counted_too_and_the_program_may_patch_itself(ran):
    _, both = ran("patch", "train", "attend", "0")
    assert "1 traced calls of recurrences and 1 of attention got deltatune's gradients" in both


def test_a_program_without_patched_calls_gets_a_warning(ran):
    code, err = ran("0")
    assert code == 0
    assert f"WARNING: {NOT_REACHED}" in err
    assert NOT_REACHED not in ran("--help", "0")[1]


def test_its_traceback_is_its_own(program):
    done = call("--", str(program), "fail", cwd=program.parent)
    plain = subprocess.run([sys.executable, str(program), "fail"], capture_output=True, text=True, cwd=program.parent)
    assert done.returncode == plain.returncode == 1
    traceback = done.stderr[done.stderr.index("Traceback") :]
    assert traceback == plain.stderr
    assert "ZeroDivisionError" in traceback
    # Its own message says why it ended, and a second one would hide it.
    assert NOT_REACHED not in done.stderr


def test_every_patch_is_named_on_request(ran):
    _, said = ran("attend", "0", verbose=True)
    assert "\nfast.scaled_dot_product_attention (" in said
    assert "deltatune: 1 traced calls of attention got deltatune's gradients; the program has no recurrent" in said
    assert "WARNING" not in said


def test_verbose_before_the_program_is_ours_and_after_it_the_programs():
    parse = cli.parser().parse_args
    assert parse(["run", "--verbose", "--", "x", "1"]).command == ["--", "x", "1"]
    assert parse(["run", "--verbose", "x"]).verbose
    assert not parse(["run", "x", "--verbose"]).verbose
    assert parse(["run", "x", "--verbose"]).command == ["x", "--verbose"]


def test_words_as_exit_code(ran):
    code, err = ran("words")
    assert code == 1
    assert "some words" in err
    # A program that fails gets no warning.
    assert NOT_REACHED not in err


def test_a_module_and_a_console_script(program):
    done = call("--", "python", "-m", "trainer", "3", cwd=program.parent)
    assert (done.returncode, done.stdout.split(" ")[0]) == (3, "found")
    assert str(program) in done.stdout
    done = call("mlx_lm.lora", "--help", cwd=program.parent)
    assert done.returncode == 0
    assert "--adapter-path" in done.stdout


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "no command"),
        (["--"], "no command"),
        (["no_such_program"], "'no_such_program' is no Python file, module or console script"),
        (["ls"], "is no Python file"),
        (["python", "missing.py"], "no such file: missing.py"),
        (["python", "-m", "no_such_module"], "no module named 'no_such_module'"),
        (["python", "-c", "1"], "give FILE.py or -m MODULE"),
    ],
)
def test_program_that_is_no_python_is_refused(command, message):
    with pytest.raises(UserError, match=message):
        run_program(command)


@pytest.mark.parametrize(("device", "mode"), [("cuda", ["without kernels", "back"]), ("metal", []), ("cpu", [])])
def test_on_cuda_alone_programs_compile_without_kernels(program, monkeypatch, device, mode):
    noted = []

    @contextmanager
    def without_kernels():
        noted.append("without kernels")
        yield
        noted.append("back")

    monkeypatch.setattr(compiling, "without_kernels", without_kernels)
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(patches, "patched", lambda announce: nullcontext(PatchReport()))
    monkeypatch.syspath_prepend(program.parent)
    assert run_program(["--", "python", str(program), "3"]) == 3
    assert noted == mode
