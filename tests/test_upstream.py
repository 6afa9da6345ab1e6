"""Private names of upstream stand in upstream.py alone, and each has a way to go on where it is gone."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest

import beside
import deltatune as package
from console import called, called_elsewhere
from deltatune import upstream
from deltatune.data.rows.row_formats import Features
from deltatune.data.text import TextEncoder
from deltatune.data.token_cache import encoding_digest
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.machine import compiling
from deltatune.models import load
from deltatune.options.config import LoraConfig

SOURCE = Path(package.__file__).parent
stand_in = beside.load(Path(__file__).parent / "patches/changed_upstream.py").stand_in

# Python's own names, and the public ones of named tuples.
_OF_PYTHON = {"_replace", "_fields", "_asdict", "_make", "_getframe", "_exit", "_actions"}
# Objects of deltatune whose private attributes another file reads, or that their own file sets by a string.
_OWN = {("lora/new_rows.py", "_module_and_read")}
# What is written so in files or in kernels, and the text that marks a class of deltatune's.
_TEXTS = {"_name_or_path", "_deltatune_checkpointed", "_make", "_module_and_read"}
_PRIVATE = re.compile(r"_(?!_)\w*[A-Za-z]\w*")


def private_names(path: str, text: str) -> list[str]:
    """The private names of others in the text of a file of deltatune, each with its line.

    An attribute is one's own where the file gives it to `self` or defines it, and is not read of a tokenizer.
    """
    nodes = list(ast.walk(ast.parse(text)))
    own = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_own(node)} | _OF_PYTHON | _TEXTS
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name)}
    own |= {name for file, name in _OWN if file == path}
    return [f"{path}:{node.lineno}: {name}" for node in nodes for name in _foreign(node, own)]


def _foreign(node: ast.AST, own: set[str]) -> list[str]:
    """The private names of others in one node of the syntax."""
    if isinstance(node, ast.Attribute):
        if node.attr == "__reduce__" or (node.attr == "state" and ast.unparse(node).endswith("mx.random.state")):
            return [ast.unparse(node)]
        # A file may have an attribute of that name itself.
        elsewhere = node.attr == "_tokenizer" and ast.unparse(node.value).endswith("tokenizer")
        return [ast.unparse(node)] if _PRIVATE.fullmatch(node.attr) and (elsewhere or node.attr not in own) else []
    if isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
        parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        return [part for part in parts if _PRIVATE.fullmatch(part)]
    if isinstance(node, ast.Call | ast.Subscript):
        asked = node.args[:2] if isinstance(node, ast.Call) and _asks(node.func) else []
        asked = [node.slice] if isinstance(node, ast.Subscript) else asked
        texts = [each.value for each in asked if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        return [text for text in texts if _PRIVATE.fullmatch(text) and text not in own]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if re.match(r"_Z[NK]?\d|[A-Z]\w+\._(?!_)\w+$", node.value) else []
    return []


def _asks(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("getattr", "setattr", "hasattr", "delattr", "get", "pop", "setdefault")


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def test_no_private_name_of_upstream_stands_in_another_file():
    files = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "upstream.py"]
    assert len(files) > 300
    assert not [each for path in files for each in private_names(str(path.relative_to(SOURCE)), path.read_text())]


@pytest.mark.parametrize(
    "line",
    [
        "from mlx_lm.utils import _get_classes",
        "from mlx_lm._version import __version__",
        "mlx_lm.utils._download(name)",
        "module._no_grad.clear()",
        "self._combine(x)",
        "getattr(module, '_p_1')",
        "vars(module).setdefault('_no_grad', set())",
        "vars(module)['_training'] = True",
        "self._tokenizer = tokenizer._tokenizer",
        "state = mx.random.state",
        "iter(state).__reduce__()",
        "SYMBOL = '_ZN3mlx4core16set_compile_modeENS0_11CompileModeE'",
        "Patch(name='Qwen3VLModel._deepstack_process')",
    ],
)
def test_a_private_name_of_upstream_is_found(line):
    assert private_names("ops/new.py", line)


@pytest.mark.parametrize("line", ["self._x = 1\nself._x", "moved._replace(x=1)", "sys._getframe()", "name + '_us'"])
def test_names_of_ones_own_are_not(line):
    assert not private_names("ops/new.py", line)


def test_every_name_is_there_in_the_installed_versions():
    found = upstream.probed()
    assert len(found) == len(upstream.NAMES)
    assert not [each for each in found if not each.present]


def test_without_the_compile_mode_a_step_is_compiled_as_mlx_does(monkeypatch):
    monkeypatch.setattr(upstream, "_SET_COMPILE_MODE", "_ZN3mlx4core7renamedEv")
    with compiling.without_kernels() as how, compiling.not_compiled():
        assert how == "compiled"
    with compiling.without_kernels():
        assert mx.compile(lambda x: x + 1)(mx.ones(2)).tolist() == [2, 2]
    assert not upstream.probed()[0].present


@pytest.mark.parametrize("name", ["libmlx.so", "libmlx.dylib", None])
def test_the_library_is_found_by_its_name_on_linux_and_on_macos(name, monkeypatch, tmp_path):
    real = upstream.libmlx()
    (tmp_path / "lib").mkdir()
    if name is not None:
        (tmp_path / "lib" / name).symlink_to(real)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})()
    monkeypatch.setattr(upstream.importlib.util, "find_spec", lambda _: spec)
    assert upstream.libmlx() == (name and tmp_path / "lib" / name)
    assert (upstream.set_no_fuse() is None) == (name is None)


class RenamedDropout(nn.Module):
    """nn.Dropout with another name for its rate."""

    def __init__(self, p: float = 0.5):
        super().__init__()
        self._keep = 1 - p

    def _extra_repr(self) -> str:
        return f"p={1 - self._keep}"

    def __call__(self, x):
        return nn.Dropout(1 - self._keep)(x) if self.training else x


def test_without_the_rate_in_dropout_it_is_read_from_what_is_printed(monkeypatch, tiny_model, tmp_path):
    monkeypatch.setattr(nn, "Dropout", RenamedDropout)
    model = tiny_model("qwen3_5_moe")
    convert_to_lora(model, LoraConfig(rank=2, dropout=0.1), num_layers=1)
    save_adapters(model, tmp_path, {})
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_parameters"]["dropout"] == 0.1


def test_a_dropout_that_says_nothing_of_its_rate_is_refused():
    with pytest.raises(UserError, match="does not say how much it drops"):
        upstream.dropout_rate(nn.Identity())


class RenamedWrapper:
    """mlx-lm's TokenizerWrapper with other names for its tokenizer and its template in code."""

    def __init__(self, wrapper):
        self._wrapped = wrapper

    def apply_chat_template(self, *arguments, **options):
        return self._wrapped.apply_chat_template(*arguments, **options)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._wrapped, name)


def test_without_the_tokenizer_in_its_wrapper_rows_have_the_same_tokens(checkpoint):
    wrapper = load.load_tokenizer(checkpoint, {})
    renamed = RenamedWrapper(wrapper)
    assert upstream.hugging_face_tokenizer(renamed) is upstream.hugging_face_tokenizer(wrapper)
    assert upstream.chat_template_code(wrapper) is None
    assert upstream.chat_template_code(renamed) is not None
    turns = [{"role": role, "content": f"the {role}"} for role in ("user", "assistant", "user", "assistant")]
    expected, found = (TextEncoder(each, Features(), True)({"messages": turns}, "a:1") for each in (wrapper, renamed))
    assert [e.tokens.tolist() for e in found] == [e.tokens.tolist() for e in expected]
    assert [e.targets.tolist() for e in found] == [e.targets.tolist() for e in expected]
    # Other code might write the same template's conversations, so what it wrote is not kept.
    assert encoding_digest(wrapper) is not None
    assert encoding_digest(renamed) is None


def test_training_goes_on_where_mlx_lm_renamed_all_of_them(checkpoint, tmp_path):
    names = {"_get_classes": "_classes", "_download": "_fetch", "_tokenizer": "_hf", "_chat_template": "_writer"}
    path = stand_in(tmp_path / "new", "0.99.0", {}, renamed=names)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}] * 4
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["train", "--model", checkpoint, "--data", tmp_path, "--iters", 1, "--batch-size", 2, "--seed", 1]
    as_it_is, renamed = ([*flags, "--adapter-path", tmp_path / name] for name in ("as it is", "renamed"))
    (trained,) = called_elsewhere(renamed, PYTHONPATH=path)
    for done in (called(*as_it_is), trained):
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    one, other = ((tmp_path / name / "adapters.safetensors").read_bytes() for name in ("as it is", "renamed"))
    assert one == other
    program = "import deltatune.upstream as u; print(*(each.name for each in u.probed() if not each.present))"
    environment = os.environ | {"PYTHONPATH": path}
    gone = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    names = [name.rpartition(".")[2] for name in gone.stdout.split()]
    assert names == ["_tokenizer", "_chat_template", "_get_classes", "_download"]


def test_without_get_classes_a_model_is_found_by_its_type(monkeypatch):
    class_of = upstream.model_classes({"model_type": "qwen3_5"})[0]
    monkeypatch.delattr(mlx_lm.utils, "_get_classes")
    assert upstream.model_classes({"model_type": "qwen3_5"})[0] is class_of
    monkeypatch.setattr(mlx_lm.utils, "load_model", lambda path: None)
    assert upstream.model_classes({"model_type": "qwen3_5"})[0] is class_of
    assert upstream.model_classes({"model_type": "mistral"})[0].__module__ == "mlx_lm.models.llama"
    with pytest.raises(UserError, match=r"a kind that mlx-lm .* does not know; the nearest that it knows is 'qwen3'"):
        load.new_model({"model_type": "qwen3x"})


def test_without_mlx_lms_download_the_hub_is_asked(monkeypatch, tmp_path):
    asked = []
    monkeypatch.delattr(mlx_lm.utils, "_download")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name: asked.append(name) or str(tmp_path))
    assert load.locate("owner/model") == tmp_path
    assert asked == ["owner/model"]
