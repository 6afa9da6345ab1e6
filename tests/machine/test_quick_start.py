"""Quicker starts of programs (tests/quick_start) change nothing that they find or print."""

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


def test_cached_import_structure_equals_transformers(reader, tmp_path):
    models = str(Path(reader.__file__).parents[1] / "models")
    plain, prefixed = reader.define_import_structure(models), reader.define_import_structure(models, "models")
    assert len(plain) > 1
    for _ in range(2):
        quick_start.keep(reader, str(tmp_path))
        assert reader.define_import_structure(models) == plain
        assert reader.define_import_structure(f"{models}/__init__.py") == plain
        assert reader.define_import_structure(Path(models), prefix="models") == prefixed
        # The second time, it comes from the file that the first has left.
        reader.define_import_structure = lambda *_: pytest.fail("read again")
    assert len(list(tmp_path.iterdir())) == 1


def test_one_model_is_read_anew_and_so_are_all_in_another_version(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "reader.py").touch()
    asked = []

    def plain(path, prefix=None):
        asked.append((path, prefix))
        return {frozenset(): {}}

    for version in (1, 2):
        os.utime(tmp_path / "models", ns=(version, version))
        found = SimpleNamespace(__file__=str(tmp_path / "reader.py"), define_import_structure=plain)
        quick_start.keep(found, str(tmp_path / "kept"))
        found.define_import_structure(str(tmp_path / "models"), "models")
        found.define_import_structure(str(tmp_path / "models" / "bert"), "bert")
    assert asked == [(str(tmp_path / "models"), None), (str(tmp_path / "models" / "bert"), "bert")] * 2


def test_a_launcher_waits_only_for_output():
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
    code = "import transformers.utils.import_utils as u; print(u.define_import_structure.__module__)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "sitecustomize\n"
