"""Which values an option may have: ranges, types, and the messages that refuse a value."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from deltatune.errors import UserError
from deltatune.options.values import Range, build, checked, short
from deltatune.options.yaml_files import read_yaml


@pytest.mark.parametrize(
    ("limits", "text", "inside", "outside"),
    [
        (Range(least=1), "1 or more", [1, 2**31 - 1], [0, -1, 2**31]),
        (Range(above=0), "above 0", [1e-30, 3e38], [0, -1.0, 4e38]),
        (Range(least=0, below=1), "from 0 to below 1", [0, 0.999], [1, -0.001]),
        (Range(least=2, most=9), "from 2 to 9", [2, 9], [1, 10]),
        (Range(above=0, most=1), "above 0 and up to 1", [0.1, 1], [0, 1.1]),
        (Range(below=0), "below 0", [-1], [0, 1]),
        (Range(least=0, most=2**64 - 1), f"from 0 to {2**64 - 1}", [2**64 - 1], [2**64, -1]),
        (Range(least=1, also=(-1,)), "1 or more, or -1", [1, -1], [0, -2]),
        (Range(), "that is finite", [0, -(2**31) + 1], [-1e39]),
    ],
)
def test_a_range_says_what_is_in_it(limits, text, inside, outside):
    assert str(limits) == text
    assert all(number in limits for number in inside)
    assert not any(number in limits for number in [*outside, float("nan"), float("inf"), float("-inf")])


@dataclass
class Options:
    count: int = field(default=1, metadata={"range": Range(least=1)})
    rate: float | None = field(default=None, metadata={"range": Range(above=0)})
    name: str = "x"
    maybe: str = field(default="", metadata={"empty": True})
    kind: str = field(default="a", metadata={"choices": ("a", "b")})
    parts: str = field(default="a", metadata={"words": ("a", "b")})
    keys: list[str] = field(default_factory=list)
    pair: tuple[float, ...] = ()
    settings: dict[str, dict[str, int] | None] = field(default_factory=dict)
    switch: bool = False


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"rate": 2}, 2.0),
        ({"rate": None}, None),
        ({"count": np.int64(3)}, 3),
        ({"rate": np.float32(0.5)}, 0.5),
        ({"name": Path("a/b")}, "a/b"),
        ({"maybe": ""}, ""),
        ({"parts": " B, a ,"}, "b,a"),
        ({"keys": ("x", "y")}, ["x", "y"]),
        ({"pair": [1, 2]}, (1.0, 2.0)),
        ({"settings": {"a": {"b": 1}, "c": None}}, {"a": {"b": 1}, "c": None}),
    ],
)
def test_valid_values_are_taken(given, kept):
    ((name, value),) = given.items()
    hint, metadata = _field(name)
    found = checked(value, hint, metadata, name)
    assert (found, type(found)) == (kept, type(kept))
    build(Options, given, "")


def _field(name):
    from deltatune.options.values import fields_of

    return fields_of(Options)[name]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "here: count: expected a whole number of 1 or more, got 0."),
        ({"count": 1.0}, "here: count: expected a whole number of 1 or more, got 1.0."),
        ({"count": True}, "here: count: expected a whole number of 1 or more, got True."),
        ({"count": "1"}, "here: count: expected a whole number of 1 or more, got '1'."),
        ({"count": None}, "here: count: expected a whole number of 1 or more, got None."),
        ({"count": 2**31}, "here: count: expected a whole number from 1 to 2147483647, got 2147483648."),
        ({"count": 16**5000}, "here: count: expected .*, got a number of more than 300 digits."),
        ({"rate": float("nan")}, "here: rate: expected a number above 0, got nan."),
        ({"rate": 10**400}, "here: rate: expected a number above 0.*, got a number of more than 300 digits."),
        ({"rate": 1e39}, "here: rate: expected a number above 0 and up to 3.4e\\+38, got 1e\\+39."),
        ({"name": ""}, "here: name: expected text in UTF-8 that is not empty, got ''."),
        ({"name": " "}, "here: name: expected text in UTF-8 that is not empty, got ' '."),
        ({"name": "\udcff"}, "here: name: expected text in UTF-8 that is not empty, got '.udcff'."),
        ({"name": "a\0b"}, "here: name: expected text in UTF-8"),
        ({"name": 3}, "here: name: expected text in UTF-8 that is not empty, got 3."),
        ({"kind": "c"}, "here: kind: expected one of a, b, got 'c'."),
        ({"parts": "a,c"}, "here: parts: expected any of a, b, separated by commas, got 'a,c'."),
        ({"parts": ","}, "here: parts: expected any of a, b"),
        ({"keys": "x"}, "here: keys: expected a list, got 'x'."),
        ({"keys": ["x", 1]}, "here: keys: entry 2: expected text in UTF-8 that is not empty, got 1."),
        ({"settings": [1]}, "here: settings: expected a mapping, got .1.."),
        ({"settings": {1: {}}}, "here: settings: key: expected text"),
        ({"settings": {"a": {"b": "x"}}}, "here: settings: 'a': 'b': expected a number|here: settings: 'a': 'b': "),
        ({"switch": 1}, "here: switch: expected true or false, got 1."),
        ({"cuont": 1}, r"here: unknown key 'cuont' \(did you mean 'count'\?\)"),
    ],
)
def test_invalid_values_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        build(Options, given, "here")


def test_a_value_in_a_message_is_short():
    nested = "x"
    for _ in range(100):
        nested = [nested] * 100
    for value in (nested, "y" * 10**6, {"k": nested}, 16**100_000, [16**100_000]):
        assert len(short(value)) < 2000


@pytest.mark.parametrize("number", ["1e-5", "1E-5", "1.5e-5", "2e4", "-3e-2", ".5e1", "1.e-3"])
def test_exponents_are_numbers(tmp_path, number):
    file = tmp_path / "c.yaml"
    file.write_text(f"learning_rate: {number}\n")
    assert read_yaml(file)["learning_rate"] == float(number)


def test_words_with_an_e_stay_words(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: 1e5b\nadapter_path: e5\n")
    assert read_yaml(file) == {"model": "1e5b", "adapter_path": "e5"}


def test_byte_order_marks_and_merge_keys_are_read(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes("\ufeffmodel: a\r\n# ü\r\n".encode())
    assert read_yaml(file) == {"model": "a"}
    file.write_text("base: &base {rank: 4}\nlora: {<<: *base, scale: 2}\nother: {<<: *base, rank: 8}\n")
    assert read_yaml(file) == {
        "base": {"rank": 4}, "lora": {"rank": 4, "scale": 2}, "other": {"rank": 8}
    }  # fmt: skip
    file.write_text("")
    assert read_yaml(file) == {}


@pytest.mark.bad_input("a YAML file that {what}")
@pytest.mark.parametrize(
    ("what", "content", "message"),
    [
        ("is no YAML", b"a: [1,\n", r"the file is not YAML: .*, in line 2\."),
        ("is a list", b"- 1\n", r"expected `key: value` lines, got \[1\]\."),
        ("is a text", b"iters 5\n", r"expected `key: value` lines, got 'iters 5'\."),
        ("is not UTF-8", "modèle: x\n".encode("latin-1"), r"byte 3 is not UTF-8 .*save the file in UTF-8"),
        ("is in UTF-16", "model: x\n".encode("utf-16"), r"is not UTF-8"),
        ("is binary", b"\x00\x01\x02", r"the file is not YAML"),
        ("gives a key twice", b"iters: 5\nmodel: x\niters: 6\n", r"the key 'iters' stands there twice, in line 3\."),
        ("gives a nested key twice", b"lora_parameters: {rank: 1, rank: 2}\n", r"the key 'rank' stands there twice"),
        ("is nested too deeply", b"a: " + b"[" * 600, r"nested too deeply"),
        ("holds a date that is none", b"model: 2020-13-45\n", r"'2020-13-45' is not a timestamp, in line 1\."),
        ("holds a tag that does not fit", b"iters: !!bool maybe\n", r"'maybe' is not a bool, in line 1\."),
        (
            "one with a Python object",
            b"model: !!python/object/apply:os.getcwd []\n",
            r"could not determine a con",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_file_that_is_refused(run, tmp_path, what, content, message):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_yaml(file)
    code, out, err = run("train", "-c", file)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert str(file) in err


@pytest.mark.bad_input("a YAML file that is missing, or a folder")
def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_yaml(path)


@pytest.mark.bad_input("a YAML file that describes gigabytes in a few lines")
def test_a_file_that_grows_is_not_written_out(run, tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join([*lines, "iters: *a11"]))
    code, _, err = run("train", "-c", file)
    assert code == 2
    assert len(err) < 2500
    file.write_text("\n".join(f"optimizer_config: {line}" if n == 0 else f"  {line}" for n, line in enumerate(lines)))
    assert run("train", "-c", file)[0] == 2
