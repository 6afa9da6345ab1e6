"""Functions take few arguments, and variables say what they hold."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "deltatune"
MOST = 7
# What mathematics, MLX or mlx-lm gives its arguments: the public operators, each of their implementations, and a
# function that stands in the place of MLX's.
OPERATORS = {
    *("attention", "attention_blocked", "attention_fused", "attention_naive", "attention_native", "attention64"),
    *("gated_delta", "gated_delta_chunk", "gated_delta_fused", "gated_delta_naive", "gated_delta_native"),
    *("gated_delta_loop", "quantized_matmul", "ssm_update"),
}
# What programs call with names: the trainer and its answers.
PUBLIC = {"Trainer.__init__", "generate"}
# These may be said of anything.
VAGUE = {"each", "found", "given", "kept", "own", "rest"}


def functions(tree: ast.AST, prefix: str = ""):
    """Yield the name and the node of every function; that of a method begins with its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        yield from functions(node, f"{node.name}." if isinstance(node, ast.ClassDef) else "")


def with_many_arguments(text: str) -> dict[str, int]:
    """Return how many arguments the functions in `text` take that take more than MOST, without self and cls."""
    counts = {}
    for name, node in functions(ast.parse(text)):
        positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        counts[name] = len(positional) + len(node.args.kwonlyargs) - (positional[:1] in (["self"], ["cls"]))
    return {name: count for name, count in counts.items() if count > MOST}


def vague_names(text: str) -> list[str]:
    """Return the variables and arguments in `text` with names in VAGUE, and their lines."""
    nodes = ast.walk(ast.parse(text))
    named = [(getattr(node, "id", None) or getattr(node, "arg", None), node) for node in nodes]
    return [f"{node.lineno}: {name}" for name, node in named if name in VAGUE]


@pytest.fixture(scope="module")
def texts():
    return {str(path.relative_to(SOURCE)): path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}


def test_functions_take_few_arguments(texts):
    wide = {name: (file, count) for file, text in texts.items() for name, count in with_many_arguments(text).items()}
    assert {name: place for name, place in wide.items() if name not in OPERATORS | PUBLIC} == {}
    assert wide.keys() >= OPERATORS | PUBLIC, "these take few arguments now: take them off the list"


def test_variables_say_what_they_hold(texts):
    assert {file: names for file, text in texts.items() if (names := vague_names(text))} == {}


def test_planted_names_are_found():
    arguments = ", ".join("abcdefg")
    planted = f"class C:\n def few(self, {arguments}): ...\n def many(self, a0, *, {arguments}): ...\n"
    assert with_many_arguments(planted) == {"C.many": 8}
    assert with_many_arguments(f"def outer():\n async def inner({arguments}, h): ...\n") == {"inner": 8}
    planted = "def f(given, *rest):\n return [each for each in given.own]\n"
    assert vague_names(planted) == ["1: given", "1: rest", "2: each", "2: each", "2: given"]
