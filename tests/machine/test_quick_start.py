"""What makes started programs quicker (tests/quick_start) changes nothing that they find or print."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest

from beside import load

HERE = Path(__file__).parents[1] / "quick_start"
# Loading it puts another finder in front.
quick_start = load(HERE / "sitecustomize.py")
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, quick_start.Finder)]


@pytest.fixture
def reader():
    """transformers' module as it is installed, under another name."""
    import transformers

    (found,) = PathFinder.find_spec("transformers.utils", list(transformers.__path__)).submodule_search_locations
    spec = importlib.util.spec_from_file_location("transformers.utils.as_installed", f"{found}/import_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_transformers_finds_is_the_same(reader, tmp_path):
    models = str(Path(reader.__file__).parents[1] / "models")
    plain = reader.create_import_structure_from_path(models)
    for _ in range(2):
        quick_start.keep(reader, str(tmp_path))
        assert reader.create_import_structure_from_path(models) == plain
        assert reader.create_import_structure_from_path(f"{models}/__init__.py") == plain
        # The second time, it comes from the file that the first has left.
        reader.create_import_structure_from_path = lambda _: pytest.fail("read again")
    assert len(list(tmp_path.iterdir())) == 1


def test_one_model_is_read_anew_and_so_are_all_in_another_version(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "reader.py").touch()
    asked = []
    for version in (1, 2):
        os.utime(tmp_path / "models", ns=(version, version))
        plain = SimpleNamespace(__file__=str(tmp_path / "reader.py"), create_import_structure_from_path=asked.append)
        quick_start.keep(plain, str(tmp_path / "kept"))
        plain.create_import_structure_from_path(str(tmp_path / "models"))
        plain.create_import_structure_from_path(str(tmp_path / "models" / "bert"))
    assert asked == [str(tmp_path / "models"), str(tmp_path / "models" / "bert")] * 2


def test_a_launcher_waits_for_what_is_printed_alone():
    launcher = SimpleNamespace()
    quick_start.wait(launcher)
    reads, writes = os.pipe()
    try:
        # Standard input has ended, and a pipe can be written: neither is anything to wake up for.
        assert launcher.select([0, reads], [writes], [], 0) == ([], [], [])
        os.write(writes, b"a line")
        assert launcher.select([0, reads], [writes], [], 1.0) == ([reads], [], [])
    finally:
        os.close(reads)
        os.close(writes)


def test_programs_that_tests_start_have_it():
    code = "import transformers.utils.import_utils as u; print(u.create_import_structure_from_path.__module__)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "sitecustomize\n"
