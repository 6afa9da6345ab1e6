"""The options of a run: the values of each, and the one message for anything else."""

import dataclasses
import datetime
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from deltatune.errors import UserError
from deltatune.options import other_names
from deltatune.options.config import LoraConfig, TrainConfig, build, nearest, read_yaml
from deltatune.options.values import FINITE, fields_of


def _number(kind):
    return any(each in (int, float) for each in (kind, *typing.get_args(kind)))


def test_yaml_of_mlx_lm_lora_is_read(tmp_path):
    file = tmp_path / "lora.yaml"
    file.write_text("model: here\nlearning_rate: 1e-5\nlora_parameters: {rank: 4, scale: 2, dropout: 0.0}\n")
    config = build(TrainConfig, read_yaml(file), str(file))
    assert (config.model, config.learning_rate) == ("here", 1e-5)
    assert config.lora_parameters == LoraConfig(rank=4, scale=2.0, dropout=0.0)


def test_unknown_key_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown key 'learning_rat' \(did you mean 'learning_rate'\?\)"):
        build(TrainConfig, {"learning_rat": 1.0}, "c.yaml")
    with pytest.raises(UserError, match=r"lora_parameters: unknown key 'rnak' \(did you mean 'rank'\?\)"):
        build(TrainConfig, {"lora_parameters": {"rnak": 1}}, "c.yaml")


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


@pytest.mark.parametrize("name", ["memory", "clear_cache_threshold"])
def test_sizes_are_texts_in_files_and_python_too(name):
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
