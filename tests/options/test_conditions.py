"""An option that is set and not read is refused, or named where mlx_lm.lora has it and leaves it unread, too."""

import dataclasses
import json
import shlex

import pytest
import yaml

from console import called
from deltatune.commands.flags import flag_name
from deltatune.errors import UserError
from deltatune.options.conditions import ANSWERS, TASKS, TRAINING, Facts, changed_options, refuse_unread
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.options.generation import ChatOptions, GenerateOptions
from deltatune.options.values import fields_of

# Options that every run reads, whatever the others are.
ALWAYS = [
    "model", "data", "hf_dataset", "fine_tune_type", "from_scratch", "loss", "neftune_noise_alpha",
    "optimizer", "grad_clip", "grad_accumulation_steps", "seed", "lora_parameters", "resize_embeddings", "batch_size",
    "epochs", "iters", "grad_checkpoint", "max_seq_length", "overlong", "streaming", "test", "val_batches", "pack",
    "steps_per_report", "save_every", "sample_prompts", "adapter_path", "resume", "overwrite",
    "clear_cache_threshold", "report_to", "trust_remote_code", "force", "text_feature",
    "prompt_feature", "completion_feature", "chat_feature",
]  # fmt: skip
FULL = {"fine_tune_type": "full"}
SCHEDULE = {"name": "cosine_decay", "arguments": [1e-4, 10]}
ADAFACTOR = {"optimizer": "adafactor"}
GRPO = {"loss": "grpo"}
DISTILL = {"loss": "distill", "teacher": "t"}
SAMPLED = {"val_batches": 0, "sample_prompts": ["a"]}
RATE = {"optimizer_config": {"adafactor": {"relative_step": False}}}
# For each option: its value, with which others it is read, and with which it is not.
CASES = {
    "train": [(False, None, {})],
    "loss_variant": [
        ("hinge", {"loss": "dpo"}, {}),
        ("sigmoid", {"loss": "cpo"}, {"loss": "simpo"}),
        ("rloo", GRPO, {}),
    ],
    "beta": [(0.1, {"loss": "kto"}, {}), (0.3, {"loss": "orpo"}, {})],
    "mtp": [(True, {}, {"loss": "dpo"}), ("only", {}, {"from_scratch": True}), (True, {}, {"memory": "4GB"})],
    "mtp_weight": [(0.1, {"mtp": True}, {"mtp": "only"})],
    "mtp_trunk_gradient": [(True, {"mtp": True}, {})],
    "parts": [("vision", {}, {"mtp": "only"})],
    "gamma": [(0.5, {"loss": "simpo"}, {}), (1.0, {"loss": "simpo"}, {"loss": "dpo"})],
    "label_smoothing": [
        (0.1, {"loss": "dpo", "loss_variant": "robust"}, {}),
        (0.1, {"loss": "cpo"}, {"loss": "cpo", "loss_variant": "hinge"}),
        (0.1, {"loss": "simpo"}, {"loss": "kto"}),
    ],
    "num_generations": [(8, GRPO, {})],
    "max_completion_length": [(100, GRPO, {}), (100, DISTILL, DISTILL | {"lmbda": 0.0})],
    "teacher": [("t", DISTILL, {})],
    "lmbda": [(0.3, DISTILL, {})],
    "temperature": [(0.7, GRPO, {"loss": "dpo"}), (0.7, DISTILL, {})],
    "top_p": [(0.9, GRPO, {})],
    "top_k": [(5, GRPO, {})],
    "min_p": [(0.1, GRPO, {})],
    "epsilon": [(0.1, GRPO, {})],
    "epsilon_high": [(0.3, GRPO, {})],
    "num_iterations": [(2, GRPO, {})],
    "mask_truncated_completions": [(True, GRPO, {})],
    "sampler_correction": [("none", GRPO, {})],
    "scale_rewards": [("batch", GRPO, {}), ("none", GRPO | {"loss_variant": "gspo"}, GRPO | {"loss_variant": "rloo"})],
    "memory": [("4GB", {}, GRPO)],
    "mask_prompt": [(True, {}, GRPO)],
    "shuffle_buffer": [(8, {"streaming": True}, {})],
    "project_name": [("p", {"report_to": "tensorboard"}, {})],
    "test_batches": [(500, {"test": True}, {})],
    "val_split": [(0.1, {}, {"val_batches": 0}), (0.2, {}, {"streaming": True})],
    "early_stopping": [(2, {}, {"val_batches": 0})],
    "steps_per_eval": [
        (200, {}, {"val_batches": 0}),
        (9, SAMPLED, SAMPLED | {"steps_per_sample": 1}),
    ],
    "steps_per_sample": [(3, {"sample_prompts": ["a"]}, {})],
    "reward_funcs": [(["exact"], None, {})],
    "reward_weights": [([0.5], None, {})],
    "reward_timeout": [(60.0, None, {})],
    "reward_errors": [("none", None, {})],
    "sample_max_tokens": [(100, {"sample_prompts": ["a"]}, {})],
    "optimizer_config": [({"adam": {"eps": 1e-6}, "adamw": {}}, {"optimizer": "Adam"}, {})],
    "learning_rate": [(1e-5, {}, {"lr_schedule": SCHEDULE}), (0.1, ADAFACTOR | RATE, ADAFACTOR)],
    "warmup": [(0.1, {"lr_schedule": "cosine"}, {"lr_schedule": SCHEDULE}), (5, ADAFACTOR | RATE, ADAFACTOR)],
    "lr_schedule": [("linear", ADAFACTOR | RATE, ADAFACTOR), (SCHEDULE, ADAFACTOR | RATE, ADAFACTOR)],
    "lr_schedule.warmup_init": [
        (1e-6, {"lr_schedule": SCHEDULE | {"warmup": 2, "warmup_init": 1e-6}},
         {"lr_schedule": SCHEDULE | {"warmup": 0, "warmup_init": 1e-6}})
    ],
    "loraplus_lr_ratio": [(4.0, ADAFACTOR | RATE, ADAFACTOR), (4.0, {"fine_tune_type": "dora"}, FULL)],
    "keep": [(2, {}, FULL), (0, {}, {"from_scratch": True})],
    "resume_adapter_file": [("a.safetensors", {}, FULL)],
    "decay_norm_and_bias": [(True, FULL, {}), (True, {"from_scratch": True}, {"fine_tune_type": "dora"})],
    "num_layers": [
        (16, {}, {"from_scratch": True}),
        (4, {}, {"lora_parameters": {"layers": [0]}}),
        (4, {"parts": "language,vision"}, {"parts": "vision"}),
    ],
    "layers": [([0], {}, {"parts": "vision"})],
    "layer_kinds": [(["delta"], FULL, {"parts": "projector"})],
    "chat_turns": [("each", {"mask_prompt": True}, {"mask_prompt": False})],
    "rank": [(8, {}, FULL)],
    "rank_pattern": [({"q_proj": 2}, {}, FULL)],
    "scale": [(20.0, {}, FULL)],
    "alpha": [(4.0, {}, FULL)],
    "dropout": [(0.1, {}, FULL)],
    "keys": [(["q_proj"], {}, {"from_scratch": True})],
    "exclude": [(["q_proj"], {}, FULL)],
    "rslora": [(True, {}, FULL)],
    "init": [("zero", {}, FULL)],
}  # fmt: skip
# Those for which the data or the model decide, the value, and the fact that they need.
BY_FACTS = {
    "min_pixels": (64, "pictures"), "max_pixels": (64, "pictures"), "fps": (1.0, "pictures"),
    "video_max_frames": (4, "pictures"), "router_aux_loss_coef": (0.1, "routers"),
    "router_z_loss_coef": (0.1, "routers"), "chat_turns": ("last", "turns"),
    "chat_template_config": ({"a": 1}, "turns"),
}  # fmt: skip
NOTED = [
    "learning_rate", "test_batches", "steps_per_eval", "optimizer_config", "lr_schedule", "lr_schedule.warmup_init",
    "num_layers", "rank", "scale", "dropout", "keys", "project_name",
]  # fmt: skip
FIELDS = fields_of(TrainConfig) | fields_of(LoraConfig)


def listed(conditions):
    return {name for names in conditions for name in names.split()}


def test_every_option_is_always_read_or_has_a_condition():
    options = listed(TRAINING) - {"lr_schedule.warmup_init"}
    assert options | set(ALWAYS) == FIELDS.keys()
    assert not options & set(ALWAYS)
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


@pytest.mark.bad_input("`{command}` with an option that its model or data have no use for")
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("train", "fps"), ("train", "router_z_loss_coef"), ("train", "chat_template_config"), ("train", "chat_turns"),
        ("eval", "max_pixels"), ("eval", "chat_turns"),
    ],
)  # fmt: skip
def test_model_and_data_are_asked(run, checkpoint, tmp_path, command, name):
    value, _ = BY_FACTS[name]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "the quick brown fox"}\n' * 4)
    words = [command, "--model", checkpoint, "--data", tmp_path, flag_name(name, FIELDS[name][1])]
    more = ["--adapter-path", tmp_path / "out", "--iters", 1] if command == "train" else []
    code, out, err = run(*words, value if isinstance(value, str | int | float) else json.dumps(value), *more)
    label = name if command == "train" else flag_name(name, FIELDS[name][1])
    assert (code, "Iter 1" in out) == (2, False)
    assert err.startswith(f"deltatune: {label}: read only for")


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
