"""No hidden state: all that steers a call is in the trace and the dispatch; other state of a process is listed here."""

import ast
from functools import cache
from pathlib import Path

import pytest

import deltatune

# Reads the source alone.
pytestmark = pytest.mark.any_blas
SOURCE = Path(deltatune.__file__).parent
# Names of modules that functions change, and what they hold: facts about the process, which steer no layer's forward.
OF_THE_PROCESS = {
    "data.chats.rendering._idle": "processes that render conversations, between two uses",
    "doctor.custom_kernels_trace._found": "the kernels that a process of its own has found",
    "machine.blas._status": "which BLAS was loaded",
    "machine.compiling._depth": "how many contexts are open in which mx.compile builds no kernels",
    "machine.file_lock._held": "the locks that this process holds",
    "machine.startup._problem": "what is wrong with the machine, until a command says so",
    "ops.kernels.builds._builds": "the code of the kernels that this process has built or builds",
    "ops.operator.candidates._announced": "the messages that were shown",
    "ops.operator.kernel_operator._right": "which kernels were right in this process",
    "ops.random_state._open": "how many contexts are open in which draws may come from a key of our own",
    "ops.random_state._originals": "MLX's functions that draw, meanwhile",
    "ops.operator.verdicts._timed": "which implementations this process has timed",
    "train.distillation._teachers": "the teachers that were loaded, for the plan and the run",
    "ops.operator.verdicts._known": "which implementations were right on this machine",
    "patches._open": "what asks for the patches to be in force",
    "patches.evidence._known": "the functions of upstream that were compared",
    "patches.patch._in_force": "the patches that are in force",
    "patches.patch._watches": "the patches that wait for an import",
    "patches.tables.one_row_products._warned": "the messages that were shown",
}
# Modules, of those that a layer's forward runs through, that take the identity of an object, and what for.
BY_IDENTITY = {
    "ops.checkpoint": "the layers of one model, in the context that checkpoints them",
    "ops.tracing.known": "arrays: the one table of them",
    "ops.watched_calls": "modules, in the context that changes their classes",
    "patches.evidence": "functions of upstream, which live as long as their modules",
    "patches.patch_report": "the objects above a call, compared with the layers of a model",
    "patches.whole_rows": "the objects above a call, while somebody asks who calls",
}
_CHANGING = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"),
    *("appendleft", "popleft", "subtract"),
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@cache
def modules() -> list[tuple[str, ast.Module]]:
    names = {path: ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in sorted(SOURCE.rglob("*.py"))}
    return [(name.removesuffix(".__init__"), ast.parse(path.read_text("utf-8"))) for path, name in names.items()]


def context_variables(tree: ast.AST) -> int:
    """How many context variables, or variables of a thread, a module makes."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sum(getattr(f, "id", getattr(f, "attr", None)) in ("ContextVar", "local") for f in called)


def globals_that_change(tree: ast.Module) -> set[str]:
    """The names of a module that its functions bind anew, or change in place."""
    assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    targets = [target for node in assigned for target in (node.targets if hasattr(node, "targets") else [node.target])]
    names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    changed: set[str | None] = set()
    for function in ast.walk(tree):
        if not isinstance(function, _FUNCTIONS):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                changed |= set(node.names)
            elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
                changed.add(getattr(node.value, "id", None))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
                changed.add(getattr(node.func.value, "id", None))
    return changed & names


def takes_identities(tree: ast.AST) -> bool:
    """Whether a module takes the identity of an object, as a table of objects needs it."""
    return any(isinstance(node, ast.Name) and node.id == "id" for node in ast.walk(tree))


def test_context_variables_are_made_in_one_place():
    assert {name: count for name, tree in modules() if (count := context_variables(tree))} == {"ops.tracing.context": 1}


def test_no_other_state_of_the_process():
    found = {f"{name}.{variable}" for name, tree in modules() for variable in globals_that_change(tree)}
    assert found == set(OF_THE_PROCESS)


def test_one_table_by_the_identity_of_arrays():
    rooms = [(name, tree) for name, tree in modules() if name.startswith(("ops.", "patches.", "lora."))]
    assert {name for name, tree in rooms if takes_identities(tree)} == set(BY_IDENTITY)


PLANTED = """
import threading
from contextvars import ContextVar

one: ContextVar[int] = ContextVar("one")
two = threading.local()
bound, table, counts, attribute, untouched = None, {}, {}, object(), {}
three: dict = {}

def change(key):
    global bound
    bound = 1
    table[id(key)] = 2
    counts.update(a=1)
    attribute.x = 3
    del three[key]
    local = {}
    local[key] = untouched.get(key)
"""


def test_planted_state_is_found():
    tree = ast.parse(PLANTED)
    assert context_variables(tree) == 2
    assert globals_that_change(tree) == {"bound", "table", "counts", "attribute", "three"}
    assert takes_identities(tree)
    assert not takes_identities(ast.parse("path_of(module)"))
