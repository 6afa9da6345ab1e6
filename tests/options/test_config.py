"""The options of a run: the values of each, and the one message for anything else."""

import dataclasses
import datetime
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltatune.errors import UserError
from deltatune.options import other_names
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.options.values import FINITE, Range, build, checked, fields_of, nearest, short
from deltatune.options.yaml_files import read_yaml


def _number(kind):
    return any(each in (int, float) for each in (kind, *typing.get_args(kind)))


def test_yaml_of_mlx_lm_lora_is_read(tmp_path):
    file = tmp_path / "lora.yaml"
    file.write_text("model: here\nlearning_rate: 1e-5\nlora_parameters: {rank: 4, scale: 2, dropout: 0.0}\n")
    config = build(TrainConfig, read_yaml(file), str(file))
    assert (config.model, config.learning_rate) == ("here", 1e-5)
    assert config.lora_parameters == LoraConfig(rank=4, scale=2.0, dropout=0.0)


@pytest.mark.parametrize("option", other_names.table("options"))
def test_names_of_other_trainers_are_answered_with_ours(option):
    fields = list(fields_of(TrainConfig))
    assert option in [*fields, *fields_of(LoraConfig)]
    for name in other_names.table("options")[option]:
        meant = option if option in fields else f"lora_parameters: {{{option}: ...}}"
        assert nearest(name, fields) == f" (did you mean {meant!r}?)"
        flag = f"--{option.replace('_', '-')}"
        assert nearest(f"--{name.replace('_', '-')}", [flag, "--other"]) == f" (did you mean {flag!r}?)"


@pytest.mark.bad_input("`fine_tune_type: qlora`, as a key and as a flag")
def test_qlora_is_answered_with_how_it_is_asked_for_here(run):
    meant = "load a model in 4 bits (mlx_lm.convert -q) and use lora"
    with pytest.raises(UserError, match=re.escape(meant)):
        build(TrainConfig, {"fine_tune_type": "qlora"}, "c.yaml")
    assert meant in run("train", "--fine-tune-type", "qlora")[2]


def test_an_option_of_adapters_at_the_top_of_a_file_is_sent_to_its_place():
    with pytest.raises(UserError, match=r"unknown key 'rank' \(did you mean 'lora_parameters: {rank: ...}'\?\)"):
        build(TrainConfig, {"rank": 8}, "c.yaml")


def test_sizes_are_texts_in_files_and_python_too():
    name = "memory"
    sizes = {"12GB": 12 * 10**9, "1.5 gb": 1_500_000_000, "500M": 500 * 10**6, "12GiB": 12 * 2**30, "7000": 7000}
    for text, count in sizes.items() | {(7000, 7000)}:
        assert getattr(build(TrainConfig, {name: text}, "c.yaml"), name) == count
        assert getattr(TrainConfig(**{name: text}), name) == count
    for wrong in ("4XB", "GB", "1.2.3GB", ""):
        with pytest.raises(UserError, match=f"c.yaml: {name}: expected a size such as .* or 500MB, got '{wrong}'"):
            build(TrainConfig, {name: wrong}, "c.yaml")
    with pytest.raises(UserError, match=r"c.yaml: .*: 12 counts bytes; write 12GB if gigabytes are meant"):
        build(TrainConfig, {name: 12}, "c.yaml")
    with pytest.raises(UserError, match="expected a size"):
        build(TrainConfig, {name: "99999999999GB"}, "c.yaml")


OPTIONS = {
    **fields_of(TrainConfig),
    **{f"lora_parameters.{name}": kind for name, kind in fields_of(LoraConfig).items()},
}
NUMBERS = {name: (kind, about["range"]) for name, (kind, about) in OPTIONS.items() if _number(kind)}
TEXTS = [name for name, (kind, _) in OPTIONS.items() if str in (kind, *typing.get_args(kind))]
CHOICES = [name for name, (_, about) in OPTIONS.items() if about["choices"] or about["words"]]


def refused(name, value):
    outer, _, inner = name.partition(".")
    with pytest.raises(UserError) as error:
        build(TrainConfig, {"model": "/none", outer: {inner: value} if inner else value}, "run.yaml")
    message = str(error.value)
    where = "run.yaml: "
    assert message.startswith(f"{where}{name.replace('.', ': ')}: "), (name, value, message)
    assert "\n" not in message
    return message.removeprefix(where)


def test_every_number_states_its_range():
    assert not [name for name, (_, limits) in NUMBERS.items() if limits is None]
    assert len(NUMBERS) > 20


@pytest.mark.parametrize(("kind", "rate"), [("lora", 2e-4), ("dora", 2e-4), ("full", 2e-5)])
def test_the_learning_rate_is_that_of_what_trains(kind, rate):
    assert TrainConfig(fine_tune_type=kind).learning_rate == pytest.approx(rate)
    assert TrainConfig(fine_tune_type=kind, loss="kto").learning_rate == pytest.approx(rate / 20)
    assert TrainConfig(from_scratch=True).learning_rate == 2e-4
    assert TrainConfig(fine_tune_type=kind, learning_rate=1e-3).learning_rate == 1e-3


@pytest.mark.bad_input("`{name}` outside its range")
@pytest.mark.parametrize("name", [name for name in NUMBERS if NUMBERS[name][1] != FINITE])
def test_numbers_outside_their_range(name):
    limits = NUMBERS[name][1]
    smallest = next(number for number in (limits.least, limits.above) if number is not None)
    wrong = [smallest - 1, -5, 2**64, float("nan"), float("inf"), float("-inf")]
    wrong += [0] if 0 not in limits else []
    wrong += [limits.below] if limits.below is not None else []
    for value in wrong:
        if value not in limits.also:
            err = refused(name, {"q_proj": value} if name.endswith("pattern") else value)
            assert f"got {value!r}." in err
            assert str(limits.least if limits.least is not None else limits.above) in err


# Options that are mappings, whose content other tests get wrong.
MAPPINGS = ("lr_schedule", "lora_parameters", "optimizer_config", "chat_template_config")


@pytest.mark.bad_input("`{name}` of a wrong type")
@pytest.mark.parametrize("name", [name for name, (kind, _) in OPTIONS.items() if kind is not Any])
def test_values_of_a_wrong_type(name):
    kind = OPTIONS[name][0]
    kinds = (kind, *typing.get_args(kind))
    wrong = [[["x"]], {"x": {"y": {"z": 1}}}, datetime.date(2020, 1, 1)]
    wrong += [True] if bool not in kinds else [1, "yes please"]
    wrong += ["many"] if _number(kind) else []
    wrong += [1.5] if int in kinds and float not in kinds else []
    wrong += [7] if name in TEXTS else []
    for value in wrong:
        if not (isinstance(value, dict) and name in MAPPINGS):
            refused(name, value)


@pytest.mark.bad_input("`{name}` as an empty text")
@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_empty(name):
    for value in ("", "  "):
        assert f"got {value!r}." in refused(name, value)


@pytest.mark.bad_input("`{name}` as a word that nobody knows")
@pytest.mark.parametrize("name", CHOICES)
def test_words_that_nobody_knows(name):
    is_list = str(OPTIONS[name][0]).startswith("list")
    assert "expected " in refused(name, ["loraa"] if is_list else "loraa")


@pytest.mark.bad_input("the flag `{flag} {value}`")
@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--learning-rate", "0", "a number above 0, got 0.0"),
        ("--learning-rate", "-1e-5", "a number above 0, got -1e-05"),
        ("--learning-rate", "nan", "a number above 0, got nan"),
        ("--iters", "0", "a whole number of 1 or more, got 0"),
        ("--num-layers", "0", "a whole number of 1 or more, or -1, got 0"),
        ("--grad-checkpoint", "some", "true, false or auto, got 'some'"),
        ("--seed", "-1", f"a whole number from 0 to {2**64 - 1}, got -1"),
        ("--model", "", "text in UTF-8 that is not empty, got ''"),
        ("--rank", "0", "a whole number of 1 or more, got 0"),
        ("--dropout", "1", "a number from 0 to below 1, got 1.0"),
        ("--epochs", "-1", "a number above 0, got -1.0"),
        ("--rank-pattern", "[4]", "a mapping, got [4]"),
        ("--parts", "language,ears", "any of language, vision, projector, separated by commas, got 'language,ears'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_flags_are_refused_by_their_own_name(run, tmp_path, command, flag, value, expected):
    """Also where a file is given: it has no part in it."""
    file = tmp_path / "run.yaml"
    file.write_text("iters: 5\n")
    assert run(command, "-c", file, f"{flag}={value}") == (2, "", f"deltatune: {flag}: expected {expected}.\n")


@pytest.mark.bad_input("`min_pixels` above `max_pixels`")
def test_limits_that_cross_are_refused():
    with pytest.raises(UserError, match="min_pixels: expected at most max_pixels, which is 3, got 9"):
        TrainConfig(min_pixels=9, max_pixels=3)


def test_python_is_checked_like_the_command_line():
    with pytest.raises(UserError, match="learning_rate: expected a number above 0, got 0"):
        TrainConfig(learning_rate=0)
    with pytest.raises(UserError, match="rank: expected a whole number of 1 or more, got 0"):
        LoraConfig(rank=0)
    with pytest.raises(UserError, match="iters: expected"):
        dataclasses.replace(TrainConfig(), iters=0)
    config = TrainConfig(model=Path("a") / "b", learning_rate=1, lora_parameters={"rank": 4})
    assert (config.model, config.learning_rate, config.lora_parameters) == ("a/b", 1.0, LoraConfig(rank=4))


@pytest.mark.parametrize(
    ("given", "scale"),
    [({"alpha": 32}, 2.0), ({"alpha": 16, "rank": 4}, 4.0), ({"alpha": 16, "rslora": True}, 16.0), ({"scale": 3}, 3.0)],
)
def test_alpha_sets_the_scale(given, scale):
    config = LoraConfig(**given)
    assert config.scale == scale
    follows_rank = "alpha" in given and "rslora" not in given
    assert dataclasses.replace(config, rank=2).scale == (given["alpha"] / 2 if follows_rank else scale)


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
