"""A run in Python trains what its options say, to the bit as the command does, or is refused: every option is tried."""

import dataclasses
import json

import mlx.core as mx
import pytest
from PIL import Image

from deltatune import LoraConfig, TrainConfig, Trainer, convert_to_lora, finetune, load, load_datasets
from deltatune.data.datasets import first_image
from deltatune.data.example import Splits
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.models.vocabulary import resize_embeddings
from deltatune.train.reports import log
from deltatune.train.reports.screen import Screen
from deltatune.train.setup import vision_processors
from new_tokens import TOKENS, with_new_tokens

ROWS = [
    {"prompt": f"Who has {n} cups?", "completion": f"Table {n}.", "chosen": f"Table {n}.", "rejected": "No one."}
    for n in range(12)
]
ROLES = ("user", "assistant")
CHATS = [
    {"messages": [{"role": role, "content": f"{role} {turn} of {n}"} for turn in "ab" for role in ROLES]}
    for n in range(12)
]
LORA = LoraConfig(
    rank=3, rank_pattern={"out_proj": 2}, scale=1.5, dropout=0.1, exclude=["shared_expert_gate"], layer_kinds=["delta"]
)
# Every option but those that a run needs stands in one of these runs, or in REFUSED.
RUNS = {
    "adapters": {
        "lora_parameters": LORA,
        "iters": 4,
        "num_layers": 2,
        "router_aux_loss_coef": 0.1,
        "optimizer": "adamw",
        "optimizer_config": {"adamw": {"weight_decay": 0.1}},
        "lr_schedule": "linear",
        "warmup": 0.25,
        "grad_clip": 0.01,
        "grad_accumulation_steps": 2,
        "seed": 3,
        "grad_checkpoint": True,
        "overlong": "skip",
        "chat_template_config": {"enable_thinking": False},
        "mask_prompt": False,
        "val_batches": 2,
        "test": True,
        "test_batches": 1,
        "steps_per_report": 2,
        "steps_per_eval": 2,
        "save_every": 2,
        "keep": 1,
        "early_stopping": 3,
        "sample_prompts": ["Who has 3 cups?"],
        "train": True,
        "trust_remote_code": True,
        "force": True,
    },
    "chats": {"rows": CHATS, "chat_turns": "last", "sample_prompts": ["Who?"]},
    "dora in packed rows": {
        "fine_tune_type": "dora",
        "num_layers": 1,
        "pack": True,
        "epochs": 2.0,
        "learning_rate": 1e-2,
    },
    "rows that are held out": {"val_split": 0.5, "batch_size": 1},
    "pairs": {"loss": "dpo", "loss_variant": "robust", "beta": 0.3, "label_smoothing": 0.1, "test": True},
    "a margin": {"loss": "simpo", "gamma": 1.0},
    "all weights": {
        "fine_tune_type": "full",
        "num_layers": 1,
        "optimizer": "adamw",
        "optimizer_config": {"adamw": {"weight_decay": 0.5}},
    },
    "from scratch": {"from_scratch": True, "seed": 5},
    "columns": {
        "rows": [{"q": row["prompt"], "a": row["completion"]} for row in ROWS],
        "prompt_feature": "q",
        "completion_feature": "a",
    },
    "texts": {"rows": [{"t": f"{n} cups of tea"} for n in range(8)], "text_feature": "t"},
    "messages": {"rows": [{"c": row["messages"]} for row in CHATS], "chat_feature": "c"},
    "new tokens in a stream": {
        "rows": [{"text": f"a {TOKENS[0]} {n}"} for n in range(8)],
        "resize_embeddings": True,
        "streaming": True,
    },
    "images": {
        "min_pixels": 32 * 32,
        "max_pixels": 48 * 48,
        "parts": "language,vision",
        "fps": 1.0,
        "video_max_frames": 4,
    },
}
GIVEN = {"model", "data", "hf_dataset", "adapter_path", "batch_size", "iters", "max_seq_length", "learning_rate"}
# The options of rollouts, rewards, teachers and heads of several tokens: tests/train/rollouts, tests/rewards,
# tests/train/distillation and tests/train/test_mtp.py.
JUDGED = {
    *("epsilon", "epsilon_high", "mask_truncated_completions", "max_completion_length", "min_p", "num_generations"),
    *("num_iterations", "reward_errors", "reward_funcs", "reward_timeout", "reward_weights", "sampler_correction"),
    *("scale_rewards", "teacher", "temperature", "top_k", "top_p", "lmbda", "mtp", "mtp_weight", "mtp_trunk_gradient"),
    "stop_strings",
}


@pytest.fixture
def base(tmp_path, tiny_vision_checkpoint):
    """base(name) -> the options of RUNS[name], with data that suit it."""

    def options(name, **more):
        changes = RUNS.get(name, {}) | more
        rows = changes.pop("rows", ROWS)
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        model = MODEL
        if name.startswith("new tokens"):
            model = tmp_path / "model"
            if not model.exists():
                with_new_tokens(MODEL, model)
        if name == "images":
            model = tiny_vision_checkpoint("qwen3_5")
            Image.new("RGB", (64, 64), (200, 20, 20)).save(data / "a.png")
            turns = [{"role": "user", "content": "<image>which?"}, {"role": "assistant", "content": "red"}]
            rows = [{"messages": turns, "images": ["a.png"]}] * 4
        for split in ("train", *(["valid"] if "val_split" not in changes else []), "test"):
            several = rows if split == "train" else rows[:4]
            (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in several))
        given = {"model": str(model), "data": str(data), "batch_size": 2, "iters": 2, "max_seq_length": 128}
        given |= {"learning_rate": 1e-2, "steps_per_report": 1}
        if "epochs" in changes:
            del given["iters"]
        return given | changes

    return options


def in_python(config):
    """A run as docs/reference/python.md describes it, with the options of every call."""
    loaded = load(
        config.model,
        trust_remote_code=config.trust_remote_code,
        from_scratch=config.from_scratch,
        seed=config.seed,
        image=first_image(config),
    )
    if config.resize_embeddings:
        resize_embeddings(loaded)
    mx.random.seed(config.seed)
    if not config.from_scratch:
        how = {"fine_tune_type": config.fine_tune_type, "num_layers": config.num_layers, "parts": config.trained_parts}
        convert_to_lora(loaded.model, config.lora_parameters, **how)
    splits = load_datasets(config, loaded.tokenizer, vision_processors(loaded))
    more = {"model_config": loaded.config, "processor": loaded.processor}
    return Trainer(loaded.model, loaded.tokenizer, config, splits, **more)


def prepared(config, **how):
    """A model with adapters, converted as `how` says, and the data of the options."""
    loaded = load(config.model)
    convert_to_lora(loaded.model, how.pop("lora", config.lora_parameters), **how)
    return loaded, load_datasets(config, loaded.tokenizer)


def untimed(record):
    return {
        key: value for key, value in record.items() if not any(word in key for word in ("second", "memory", "time"))
    }


def left(folder):
    """The results of a run: its weights, the files beside them, and its figures without times and memory."""
    arrays = {path.name: mx.load(str(path)) for path in folder.glob("*.safetensors")}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figures = list(map(untimed, records))
    described = {}
    for name in ("adapter_config.json", "run_options.json"):
        if (folder / name).exists():
            described = json.loads((folder / name).read_text())
    described.pop("adapter_path")
    return arrays, figures, described, sorted(path.name for path in folder.iterdir())


def test_every_option_is_tried():
    tried = {name for changes in RUNS.values() for name in changes} | {
        name for changes, *_ in REFUSED for name in changes
    }
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert names - tried - GIVEN - JUDGED == {"resume", "overwrite", "report_to", "project_name", "resume_adapter_file"}


# A run of each of these takes another way through Trainer; the others differ in how their data are read.
OFTEN = ("adapters", "dora in packed rows", "pairs", "all weights", "from scratch", "new tokens in a stream", "images")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.weekly] * (name not in OFTEN)) for name in RUNS]
)
def test_a_run_in_python_is_that_of_the_command(base, tmp_path, capsys, name):
    config = TrainConfig(**base(name))
    finetune(dataclasses.replace(config, adapter_path=str(tmp_path / "command")))
    of_command = capsys.readouterr().out
    in_python(dataclasses.replace(config, adapter_path=str(tmp_path / "python"))).run()
    of_python = capsys.readouterr().out
    (expected, *more), (found, *others) = left(tmp_path / "command"), left(tmp_path / "python")
    assert others == more
    assert found.keys() == expected.keys()
    for file, arrays in expected.items():
        assert found[file].keys() == arrays.keys()
        assert all(mx.array_equal(found[file][key], array) for key, array in arrays.items())
    for line in of_command.splitlines():
        if line.startswith(("Test loss", "training", "Training")):
            assert line in of_python
    assert ("Test loss" in of_python) == config.test


# The options, those with which the model was converted (None: it was not), and the message.
KIND = r"fine_tune_type: .* the model has no adapter: call convert_to_lora\(model"
REFUSED = [
    ({}, None, KIND),
    ({"fine_tune_type": "dora"}, None, KIND),
    ({"lora_parameters": LoraConfig(rank=2)}, None, KIND),
    ({"fine_tune_type": "dora"}, {}, "the options say dora, and the model trains lora adapters"),
    ({"fine_tune_type": "full"}, {}, "the options say full, and the model trains lora adapters"),
    ({}, {"fine_tune_type": "dora"}, "the options say lora, and the model trains dora adapters"),
    ({}, {"fine_tune_type": "full"}, KIND),
    ({"fine_tune_type": "full"}, None, "full does not train .*embed_tokens"),
    ({"fine_tune_type": "full", "num_layers": 2}, {"fine_tune_type": "full", "num_layers": 1}, "which does not train"),
    ({"fine_tune_type": "full", "num_layers": 1}, {"fine_tune_type": "full"}, "full does not train .*layers"),
    ({"lora_parameters": LoraConfig(rank=2)}, {}, "the options say rank 2, and the adapter of .* has 16"),
    ({"lora_parameters": LoraConfig(rank_pattern={"o_proj": 2})}, {}, "rank_pattern: the options say rank 2"),
    ({"lora_parameters": LoraConfig(scale=20.0)}, {}, "scale: the options say scale 20, and the adapter of .* has 2"),
    ({"lora_parameters": LoraConfig(alpha=16.0)}, {}, "alpha, scale: the options say scale 1"),
    ({"lora_parameters": LoraConfig(rslora=True)}, {}, "rslora: the options say scale 0.5"),
    ({"lora_parameters": LoraConfig(dropout=0.1)}, {}, "dropout: the options say dropout 0.1"),
    ({"lora_parameters": LoraConfig(keys=["o_proj"])}, {}, "keys: .* has an adapter"),
    ({"lora_parameters": LoraConfig(exclude=["o_proj"])}, {}, "exclude: .* has an adapter"),
    ({"lora_parameters": LoraConfig(layers=[0])}, {}, "layers: .* has an adapter"),
    ({"lora_parameters": LoraConfig(layer_kinds=["delta"])}, {}, "layer_kinds: .* has an adapter"),
    ({"num_layers": 1}, {}, "num_layers: .* has an adapter"),
    ({"num_layers": 3}, {"num_layers": 1}, "num_layers: .* has no adapter"),
    ({"grad_checkpoint": "auto"}, {}, "grad_checkpoint: auto"),
    ({"memory": 10**9}, {}, "memory: which weights stay on the disk is not chosen"),
]


@pytest.mark.bad_input("`Trainer` with options that its model does not follow")
@pytest.mark.parametrize(("changes", "converted", "message"), REFUSED)
def test_a_model_that_trains_something_else_is_refused(base, tmp_path, changes, converted, message):
    config = TrainConfig(**base("", adapter_path=str(tmp_path / "out"), **changes))
    loaded = load(config.model)
    if converted is not None:
        convert_to_lora(loaded.model, LoraConfig(), **converted)
    splits = load_datasets(config, loaded.tokenizer)
    with pytest.raises(UserError, match=message):
        Trainer(loaded.model, loaded.tokenizer, config, splits, model_config=loaded.config).run()
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.bad_input("`Trainer` with examples that its options do not ask for")
@pytest.mark.parametrize(
    ("loaded_with", "changes", "message"),
    [
        ({}, {"loss": "dpo"}, "loss: dpo does not learn from these examples"),
        ({"loss": "dpo"}, {}, "loss: sft does not learn from these examples"),
        ({}, {"test": True}, "test needs test data"),
        ({"val_batches": 0}, {"early_stopping": 1}, None),
    ],
)
def test_examples_of_other_options_are_refused(base, tmp_path, loaded_with, changes, message):
    config = TrainConfig(**base("", adapter_path=str(tmp_path / "out"), **changes))
    loaded, splits = prepared(TrainConfig(**base("", **loaded_with)))
    if message is None:
        splits = Splits(train=splits.train)
        message = "early_stopping needs validation data"
    with pytest.raises(UserError, match=message):
        Trainer(loaded.model, loaded.tokenizer, config, splits)


@pytest.mark.bad_input("`Trainer` with resize_embeddings and a model without rows for new tokens")
def test_rows_for_new_tokens_are_asked_for(base, tmp_path):
    config = TrainConfig(**base("new tokens in a stream", rows=ROWS, adapter_path=str(tmp_path / "out")))
    loaded, splits = prepared(config)
    with pytest.raises(UserError, match="resize_embeddings: tokens were added to the tokenizer"):
        Trainer(loaded.model, loaded.tokenizer, config, splits)


def test_options_at_their_defaults_leave_the_adapters_to_the_conversion(base, tmp_path):
    config = TrainConfig(**base("", adapter_path=str(tmp_path / "out")))
    loaded, splits = prepared(config, lora=LoraConfig(rank=2, scale=2.0, keys=["o_proj"]), num_layers=1)
    Trainer(loaded.model, loaded.tokenizer, config, splits, screen=Screen(shown=False)).run()
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_parameters"]
    assert (written["rank"], written["scale"], len(written["keys"])) == (2, 2.0, 1)


def test_a_file_of_adapter_weights_and_a_saved_run_are_continued(base, tmp_path, capsys):
    first = TrainConfig(**base("", adapter_path=str(tmp_path / "first"), iters=2))
    in_python(first).run()
    file = str(tmp_path / "first" / "adapters.safetensors")
    changes = {"resume_adapter_file": file, "iters": 2}
    for way, start in (("command", finetune), ("python", lambda config: in_python(config).run())):
        config = TrainConfig(**base("", adapter_path=str(tmp_path / way), **changes))
        start(config)
        start(dataclasses.replace(config, iters=4, resume=True))
    (found, *more), (expected, *others) = left(tmp_path / "python"), left(tmp_path / "command")
    assert more == others
    assert all(mx.array_equal(found[name][key], expected[name][key]) for name in expected for key in expected[name])
    assert left(tmp_path / "first")[1][0] != more[0][0]
    in_python(dataclasses.replace(first, iters=1, overwrite=True)).run()
    assert not (tmp_path / "first-1").exists()


class Logger:
    """A service that keeps what it gets, without times and memory."""

    sent: list[object] = []  # noqa: RUF012 (each test has its own)

    def __init__(self, folder, project, options):
        self.sent += [folder.name, project, options | {"adapter_path": None}]

    @classmethod
    def check(cls, folder):
        cls.sent += [folder.name]

    def log(self, record, iteration):
        self.sent += [iteration, untimed(record)]

    def log_samples(self, samples, iteration):
        self.sent += [iteration, samples]

    def close(self):
        self.sent += ["closed"]


def test_loggers_get_what_the_command_gives_them(base, tmp_path, monkeypatch):
    monkeypatch.setitem(log.SERVICES, "wandb", Logger)
    options = base("", report_to="wandb", project_name="tea", sample_prompts=["Who has 3 cups?"], steps_per_eval=1)
    sent = {}
    for way, start in (("command", finetune), ("python", lambda config: in_python(config).run())):
        sent[way] = []
        monkeypatch.setattr(Logger, "sent", sent[way])
        start(TrainConfig(**options, adapter_path=str(tmp_path / way / "out")))
    # The command asks before it loads the model, too, so that nobody waits for a missing login.
    assert sent["command"] == ["out", *sent["python"]]
    assert sent["python"][:2] == ["out", "tea"]
    assert sent["python"][2]["project_name"] == "tea"
    assert sent["python"][-1] == "closed"
    assert {"train_loss", "val_loss"} <= {key for one in sent["python"][4::2] if isinstance(one, dict) for key in one}


def test_the_variables_of_the_template_are_those_of_the_data(base, tmp_path):
    """Samples and the adapter's config have the variables with which the answers of the data were written."""
    config = TrainConfig(**base("", adapter_path=str(tmp_path / "out")))
    loaded, splits = prepared(config)
    options = {"enable_thinking": False}
    splits = dataclasses.replace(splits, template_options=options)
    assert Trainer(loaded.model, loaded.tokenizer, config, splits).config.chat_template_config == options


def test_from_scratch_trains_all_weights(base):
    config = TrainConfig(**base("from scratch"))
    assert config.fine_tune_type == in_python(config).config.fine_tune_type == "full"
