"""Imports go one way and in no circle, only patches/ and models/ name upstream, and each name has one meaning."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tree

MODULES = tree.modules()
# Files of one name in two folders, and what the name means in both; commands/ has files named by their command.
SHARED_NAMES = {
    "activations": "activations and gated norms, and the patches that put them in place",
    "attention": "softmax attention: its checks, and the patches that put it in place",
    "call": "the arguments of a call that decide which implementation of an operator serves it",
    "choice": "which implementation of an operator serves a call",
    "experts": "the routed experts of a layer: their adapters, and the patches of their modules",
    "float64": "an operator and its gradients in float64 NumPy",
    "fused": "launches of an operator's kernels",
    "fused_op": "the differentiable function around an operator's kernels",
    "generate": "text from a model, through mlx-lm or mlx-vlm",
    "implementations": "every implementation of every operator, as the doctor and the self-test try it",
    "load": "a model from its checkpoint, through mlx-lm or mlx-vlm",
    "merge": "an adapter folded into weights",
    "naive": "an operator by its definition, what its other implementations answer to",
    "native": "an operator by MLX's own function",
    "op": "an operator's checked entry point",
    "reload": "the demo's last part: the adapter loaded by upstream alone",
    "screen": "what a command prints for a person",
    "task": "what a demo teaches",
    "tolerances": "how much error the operators of a folder may show",
    "trial_case": "what an operator's implementations or kernels are tried on before their first use",
    "workloads": "calls of an operator with the sizes of released models, for doctor and self-test",
}


@cache
def imports() -> list[tree.Import]:
    """Every import of the package. Reading it takes seconds, which each process that collects tests would pay."""
    return tree.imports()


def test_every_file_is_in_a_group():
    assert {tree.group_of(name) for name in MODULES} - {""} <= set(tree.ORDER)


def test_imports_go_one_way():
    assert not [str(each) for each in tree.upward(imports())]


def test_imports_go_in_no_circle():
    assert not tree.circles(imports())


def test_rooms_of_a_group_import_in_no_circle():
    circle = [tree.Import("data.text", "data.vision.messages", 1), tree.Import("data.vision.messages", "data.text", 1)]
    rooms = [tree.circles(tree.between_rooms(found)) for found in (imports(), circle)]
    assert rooms == [[], [["data.text", "data.vision"]]]


def test_a_circle_and_an_import_upwards_are_found():
    """The check itself: with such imports among the real ones it says so."""
    circle = [tree.Import("plan.search", "plan.screen", 1), tree.Import("plan.screen", "plan.search", 1)]
    assert {"plan.screen", "plan.search"} <= {name for names in tree.circles([*imports(), *circle]) for name in names}
    assert tree.upward([*imports(), tree.Import("ops.checkpoint", "train.loop", 1)])
    assert tree.upward([*imports(), tree.Import("elsewhere", "errors", 1)])


def test_the_package_itself_imports_the_machine_alone():
    """`import deltatune` binds the BLAS before MLX is loaded: else it loads names of implementations alone."""
    body = ast.parse(MODULES[""].read_text()).body
    eager = [node for node in body if isinstance(node, ast.ImportFrom) and node.level]
    assert {node.module for node in eager} == {"machine", "ops"}
    assert not [
        node for node in ast.parse(MODULES["ops"].read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def test_only_patches_and_models_name_upstream():
    # These are programs of their own, to show what mlx-lm or mlx-vlm alone makes of the adapter.
    alone = ("demo.reload",)
    upstream = [each for each in imports() if each.imported.partition(".")[0] in ("mlx_lm", "mlx_vlm")]
    assert upstream
    wrong = [each for each in upstream if tree.group_of(each.importer) not in ("patches", "models")]
    assert not [str(each) for each in wrong if each.importer not in alone]


ROOT = Path(__file__).parents[1]
BESIDE = [path for folder in ("tests", "benchmarks", "scripts", "examples") for path in (ROOT / folder).rglob("*.py")]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement below `node`."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def too_long(name: str, text: str) -> list[str]:
    """Say which is too long: the text of the file `name`, or a function in it."""
    long = [f"{name} has {lines} lines: split it by concept"] if (lines := text.count("\n")) > 600 else []
    # A file that is shorter than a long function has none, and functions are not looked for within expressions.
    for node in statements(ast.parse(text)) if lines >= 59 else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            long += [f"{name}:{node.lineno}: {node.name} has {lines} lines"] if lines >= 60 else []
    return long


def test_files_and_functions_stay_short():
    files = [*MODULES.values(), *BESIDE]
    assert len(files) > 600
    assert not [line for path in files for line in too_long(str(path.relative_to(ROOT)), path.read_text("utf-8"))]


def test_long_files_and_functions_are_found():
    assert too_long("a.py", "\n" * 601) == ["a.py has 601 lines: split it by concept"]
    assert not too_long("a.py", "\n" * 600)
    assert too_long("a.py", "async def f():\n" + "    pass\n" * 59) == ["a.py:1: f has 60 lines"]
    nested = "class A:\n  if x:\n    def f():\n" + "      pass\n" * 59
    assert too_long("a.py", nested) == ["a.py:3: f has 60 lines"]
    assert not too_long("a.py", "def f():\n" + "    pass\n" * 58)


def long_bodies(name: str, text: str) -> list[str]:
    """Name the functions of a kernel's file that have 180 lines or more, from the first line of their declaration."""
    long, start = [], 0
    for number, line in enumerate(text.splitlines(), 1):
        # Functions end with a brace alone, structs and what else is declared with a semicolon.
        if start and line == "}" and number - start >= 179:
            long.append(f"{name}:{start}: {number - start + 1} lines: split it by phase")
        if line == "}" or (line[:1].strip() and line.endswith(";")):
            start = 0
        elif not start and re.match(r"[a-z_]", line):
            start = number
    return long


def test_kernel_bodies_stay_short():
    files = sorted((ROOT / "src" / "deltatune" / "ops" / "kernels").rglob("*.h"))
    assert len(files) > 40
    assert not [line for path in files for line in long_bodies(path.name, path.read_text("utf-8"))]


def test_a_long_kernel_body_is_found():
    body = "template <int C>\ninline void f(int x,\n              int y) {\n" + "  ++x;\n" * 176
    assert long_bodies("a.h", f"using A = int;\n\n{body}}}\n") == ["a.h:3: 180 lines: split it by phase"]
    assert not long_bodies("a.h", body.replace("++x;", "}", 1).removesuffix("  ++x;\n") + "}\n")
    assert not long_bodies(
        "a.h", "struct A {\n" + "  int x;\n" * 90 + "};\n" + "inline int f() {\n" + "\n" * 90 + "}\n"
    )


def test_no_two_public_classes_have_one_name():
    homes = defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert len(homes) > 80
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_no_two_files_of_one_name_mean_different_things():
    homes = defaultdict(list)
    for name, path in MODULES.items():
        if path.stem != "__init__" and tree.group_of(name) != "commands":
            homes[path.stem].append(name)
    shared = {name for name, modules in homes.items() if len(modules) > 1}
    assert shared <= SHARED_NAMES.keys(), "rename one, or say in SHARED_NAMES what both have in common"


@cache
def names_of(module: str) -> set[str]:
    """The names that a module of the package gives others: its own, those it imports, and the files of its folder."""
    names = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == module and name}
    inside: list[ast.AST] = [ast.parse(MODULES[module].read_text())] if module in MODULES else []
    while inside:
        for node in ast.iter_child_nodes(inside.pop()):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            else:
                inside.append(node)
    return names


def stale(text: str) -> list[str]:
    """Names of deltatune that a program uses and that are not there."""
    gone, modules, bound = [], {}, set()
    nodes = list(ast.walk(ast.parse(text))) if "deltatune" in text else []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "deltatune":
            module = node.module.partition(".")[2]
            if module not in MODULES and not any(name.startswith(f"{module}.") for name in MODULES):
                gone.append(node.module)
                continue
            for alias in node.names:
                inner = f"{module}.{alias.name}".strip(".")
                if inner in MODULES:
                    modules[alias.asname or alias.name] = inner
                elif "__getattr__" not in (names := names_of(module)) and alias.name not in names:
                    gone.append(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in bound:
            module = modules.get(node.value.id)
            if module and node.attr not in names_of(module) and not node.attr.startswith("__"):
                gone.append(f"deltatune.{module}.{node.attr}")
    return gone


def test_programs_beside_the_package_use_names_that_it_has():
    """Live tests, benchmarks and scripts do not run in CI, and a name that moved would break them unseen."""
    assert not {str(path.relative_to(ROOT)): names for path in BESIDE if (names := stale(path.read_text()))}


def test_a_name_that_moved_is_found():
    assert stale("from deltatune.train.reports.log import Screen") == ["deltatune.train.reports.log.Screen"]
    assert stale("from deltatune.machine import compiling\ncompiling._library()") == [
        "deltatune.machine.compiling._library"
    ]
    assert not stale("from deltatune.machine import compiling\ncompiling.compiles()")
