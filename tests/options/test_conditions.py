"""An option that is set and not read is refused, or named where mlx_lm.lora has it and leaves it unread, too."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import yaml

from console import called
from deltatune.commands.flags import flag_name
from deltatune.errors import UserError
from deltatune.options.conditions import ANSWERS, TASKS, TRAINING, Facts, changed_options, refuse_unread
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.options.generation import ChatOptions, GenerateOptions
from deltatune.options.values import fields_of

TABLE = yaml.safe_load(Path(__file__).with_name("conditions.yaml").read_text(encoding="utf-8"))
CASES, BY_FACTS, NOTED = TABLE["cases"], TABLE["by_facts"], TABLE["noted"]
FIELDS = fields_of(TrainConfig) | fields_of(LoraConfig)


def listed(conditions):
    return {name for names in conditions for name in names.split()}


def test_every_option_is_always_read_or_has_a_condition():
    options = listed(TRAINING) - {"lr_schedule.warmup_init"}
    assert options | set(TABLE["always"]) == FIELDS.keys()
    assert not options & set(TABLE["always"])
    assert listed(TRAINING) == CASES.keys() | BY_FACTS.keys()
    # The help lists options of rewards beside those of the answers that they reward.
    assert {FIELDS[name][1]["group"] for name in options if name.startswith("reward_")} == {"reinforcement learning"}


@pytest.fixture
def told(run, tmp_path):
    """told(name, value, others, flags) -> the output of `deltatune train` for a YAML file, with an option as a flag."""

    def tell(name, value, others, as_flag=False):
        content = {"model": "nowhere", "data": str(tmp_path / "nothing")} | others
        lora = dict(content.pop("lora_parameters", {}))
        words = []
        if as_flag:
            texts = map(str, value) if isinstance(value, list) else [str(value)]
            words = [flag_name(name, FIELDS[name][1]), *([] if value is True else texts)]
        elif name in fields_of(LoraConfig):
            lora[name] = value
        elif "." not in name:
            content[name] = value
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(content | ({"lora_parameters": lora} if lora else {})))
        code, out, err = run("train", "-c", tmp_path / "c.yaml", *words, "--adapter-path", tmp_path / "out")
        assert code == 2
        return out, err

    return tell


@pytest.mark.bad_input("`{name}` where a run does not read it")
@pytest.mark.parametrize("name", CASES)
def test_an_option_that_would_change_nothing_is_refused_or_named(told, name):
    for value, read, unread in CASES[name]:
        label = name.replace(".", ": ")
        out, err = told(name, value, unread)
        if name in NOTED:
            assert "Note: " in out
            assert f"{label}" in next(line for line in out.splitlines() if ": read only" in line)
            assert "leave it out" not in err
        else:
            assert f"{label}: read only" in err
            assert "Loading" not in out
        if read is not None:
            assert "read only" not in "".join(told(name, value, read))


@pytest.mark.bad_input("the flag of `{name}` where a run does not read it")
@pytest.mark.parametrize(
    "name", [name for name in CASES if name in FIELDS and FIELDS[name][1]["flag"] and name != "train"]
)
def test_a_flag_that_would_change_nothing_is_refused_or_named(told, name):
    value, _, unread = CASES[name][0]
    value = '{"q_proj": 2}' if name == "rank_pattern" else value
    out, err = told(name, value, unread, as_flag=True)
    line = f"{flag_name(name, FIELDS[name][1])}: read only"
    assert line in out if name in NOTED else err.startswith(f"deltatune: {line}")
    assert err.count("\n") == 1


def test_a_flag_of_zero_is_named_as_a_flag(told):
    assert told("lmbda", 0, {}, as_flag=True)[1].startswith("deltatune: --lmbda: read only")


@pytest.mark.bad_input("`{name}` where neither model nor data have use for it")
@pytest.mark.parametrize("name", BY_FACTS)
def test_model_and_data_decide_for_some(name):
    value, fact = BY_FACTS[name]
    config = TrainConfig(**{name: value})
    assert refuse_unread(TRAINING, changed_options(config), config, Facts()) == []
    with pytest.raises(UserError, match=f"{name}: read only for"):
        refuse_unread(TRAINING, changed_options(config), config, Facts(**{fact: False}))
    default = TrainConfig()
    assert refuse_unread(TRAINING, changed_options(default), default, Facts(*[False] * len(Facts()))) == []


@pytest.mark.bad_input("`{command}` with options that its model or data have no use for")
@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("train", ["fps", "chat_turns, chat_template_config"]), ("train", ["router_aux_loss_coef"]),
        ("eval", ["max_pixels", "chat_turns"]),
    ],
)  # fmt: skip
def test_model_and_data_are_asked(run, checkpoint, tmp_path, command, names):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "the quick brown fox"}\n' * 4)
    words = [command, "--model", checkpoint, "--data", tmp_path]
    for name in ", ".join(names).split(", "):
        value, _ = BY_FACTS[name]
        words += [
            flag_name(name, FIELDS[name][1]),
            value if isinstance(value, str | int | float) else json.dumps(value),
        ]
    code, out, err = run(*words, *(["--adapter-path", tmp_path / "out", "--iters", 1] if command == "train" else []))
    assert (code, "Iter 1" in out) == (2, False)
    for line, label in zip(err.removeprefix("deltatune: ").splitlines(), names, strict=True):
        label = label if command == "train" else flag_name(label, FIELDS[label][1])
        assert line.startswith(f"{label}: read only for")


EXAMPLE = """
model: nowhere
train: true
fine_tune_type: lora
optimizer: adamw
optimizer_config: {adam: {}, adamw: {weight_decay: 0.05}, muon: {}, sgd: {}, adafactor: {}}
data: nothing
seed: 0
num_layers: 16
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
steps_per_report: 10
steps_per_eval: 200
resume_adapter_file: null
adapter_path: adapters
save_every: 100
test: false
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
lora_parameters: {keys: [self_attn.q_proj, self_attn.v_proj], rank: 8, scale: 20.0, dropout: 0.0}
"""
SCHEDULED = "lr_schedule: {name: cosine_decay, warmup: 0, warmup_init: 1e-7, arguments: [1e-5, 1000, 1e-7]}\n"


def test_the_example_file_of_mlx_lm_trains(checkpoint, tmp_path):
    """As it stands, and for full fine-tuning with its schedule in place."""
    small = EXAMPLE.replace("nowhere", str(checkpoint)).replace("nothing", str(tmp_path))
    for split in ("train", "valid"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "The quick brown fox."}\n' * 2)
    small = small.replace("iters: 1000", "iters: 1").replace("batch_size: 4", "batch_size: 1")
    (tmp_path / "c.yaml").write_text(small)
    done = called("train", "-c", "c.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stdout.splitlines() if line.startswith("Note: ")]
    assert notes == ["Note: test_batches: read only with test; elsewhere, as here, this changes nothing."]
    (tmp_path / "c.yaml").write_text(EXAMPLE.replace("type: lora", "type: full") + SCHEDULED)
    done = called("train", "-c", "c.yaml", cwd=tmp_path)
    notes = [line.split(": read")[0] for line in done.stdout.splitlines() if line.startswith("Note: ")]
    assert notes == [
        "Note: test_batches",
        "Note: learning_rate",
        "Note: lr_schedule: warmup_init",
        "Note: rank, scale, keys",
    ]
    assert done.stderr.startswith("deltatune: model nowhere: no such directory")


@pytest.mark.bad_input("`{words}`")
@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("generate --prompt a --max-pixels 9 --min-pixels 4", "--max-pixels: read only with --image or --video"),
        ("generate --prompt a --image b.png --fps 2", "--fps: read only with --video"),
        ("generate --prompt a --video-max-frames 2", "--video-max-frames: read only with --video"),
        ("generate --prompt a --ignore-chat-template --chat-template-config {}", "--chat-template-config: read only"),
        ("chat --compare", "--compare: read only with --adapter-path"),
        ("eval --data a --limit 2", "--limit: read only with --tasks"),
        ("eval --tasks a --data b", "--data: read only without --tasks"),
        ("eval --tasks a --test-batches 2 --seed 3", "--seed: read only without --tasks"),
        (
            "eval --tasks a --chat-template-config '{\"b\": 1}'",
            "--chat-template-config: read only with --apply-chat",
        ),
    ],
)
def test_flags_of_other_commands_that_would_change_nothing_are_refused(run, words, flags):
    command, *rest = shlex.split(words)
    code, out, err = run(command, "--model", "nowhere", *rest)
    name, condition = flags.split(": ")
    line = next(line for line in err.splitlines() if name in line)
    assert (code, out) == (2, "")
    assert condition in line


def test_conditions_of_other_commands_name_options():
    of_eval = {"num_fewshot", "limit", "apply_chat_template", "include_path", "draft"}
    assert listed(TASKS) <= of_eval | fields_of(TrainConfig).keys()
    options = {field.name for kind in (GenerateOptions, ChatOptions) for field in dataclasses.fields(kind)}
    assert listed(ANSWERS) <= options
