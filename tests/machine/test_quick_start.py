"""Quicker starts of programs (tests/quick_start) change nothing that they find or print."""

import importlib.util
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

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


def test_programs_that_tests_start_have_it():
    code = "import transformers.utils.import_utils as u; print(u.define_import_structure.__module__)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "sitecustomize\n"
