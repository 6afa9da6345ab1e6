"""Which values an option may have: ranges, types, and the messages that refuse a value."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from deltatune.errors import UserError
from deltatune.options.values import Range, build, checked, short


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
