"""Files of axolotl and LLaMA-Factory, and Unsloth notebooks, become YAML of deltatune with the same meaning."""

import json
import textwrap
from pathlib import Path

import pytest
import yaml

from console import deltatune
from deltatune.errors import UserError
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.recipes import dictionary
from deltatune.recipes.translate import translate

AXOLOTL = Path(__file__).with_name("axolotl.yaml").read_text(encoding="utf-8")
OF_AXOLOTL = {
    "model": "Qwen/Qwen3.5-9B",
    "hf_dataset": [
        {
            "path": "mlabonne/FineTome-100k",
            "train_split": "train[:-5%]",
            "valid_split": "train[-5%:]",
            "chat_feature": "dialogue",
        },
        {
            "path": "json",
            "config": {"data_files": "./rows.jsonl"},
            "train_split": "train[:-5%]",
            "valid_split": "train[-5%:]",
        },
    ],
    "adapter_path": "out",
    "fine_tune_type": "lora",
    "num_layers": -1,
    "lora_parameters": {"rank": 32, "alpha": 64, "dropout": 0.05},
    "max_seq_length": 4096,
    "pack": True,
    "report_to": "wandb",
    "project_name": "cooks",
    "grad_accumulation_steps": 4,
    "batch_size": 2,
    "iters": 1200,
    "optimizer": "adamw8bit",
    "optimizer_config": {
        "adamw8bit": {"weight_decay": 0.01, "bias_correction": True, "betas": [0.9, 0.95]},
    },
    "lr_schedule": {"name": "cosine_decay", "arguments": [2e-4, 270, 2e-5], "warmup": 30},
    "grad_clip": 1.0,
    "save_every": 200,
    "grad_checkpoint": True,
    "overlong": "skip",
}
FACTORY = """
### model
model_name_or_path: Qwen/Qwen3.5-4B
trust_remote_code: true
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj, v_proj
pref_beta: 0.2
pref_loss: hinge
dataset: dpo_en_demo
template: qwen3_5
enable_thinking: false
cutoff_len: 1024
mask_history: true
output_dir: saves/dpo
logging_steps: 10
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: constant_with_warmup
warmup_steps: 7
bf16: true
report_to: none
freeze_vision_tower: false
quantization_bit: 4
"""
OF_FACTORY = {
    "model": "Qwen/Qwen3.5-4B",
    "trust_remote_code": True,
    "loss": "dpo",
    "loss_variant": "hinge",
    "beta": 0.2,
    "fine_tune_type": "lora",
    "num_layers": -1,
    # LLaMA-Factory's alpha is twice the rank where it is not given.
    "lora_parameters": {"rank": 8, "alpha": 16.0, "keys": ["q_proj", "v_proj"]},
    "chat_template_config": {"enable_thinking": False},
    "chat_turns": "last",
    "max_seq_length": 1024,
    "adapter_path": "saves/dpo",
    "steps_per_report": 80,
    "batch_size": 1,
    "grad_accumulation_steps": 8,
    "epochs": 3.0,
    "optimizer": "adamw",
    "optimizer_config": {"adamw": {"weight_decay": 0.0, "bias_correction": True}},
    "lr_schedule": {"name": "linear_schedule", "arguments": [5e-6, 5e-6, 1], "warmup": 7},
    "grad_clip": 1.0,
    "parts": "language,vision",
}
CELLS = [
    "%%capture\nimport os\n!pip install unsloth",
    """
    from unsloth import FastLanguageModel
    max_seq_length: int = 4096  # any
    rank = 32
    model, tokenizer = FastLanguageModel.from_pretrained(
        "unsloth/Qwen3.5-4B", max_seq_length = max_seq_length, load_in_4bit = True, dtype = None, token = "hf_...")
    """,
    """
    model = FastLanguageModel.get_peft_model(
        model, r = rank, target_modules = ["q_proj", "k_proj",], lora_alpha = rank * 2, lora_dropout = 0, bias = "none",
        use_gradient_checkpointing = "unsloth", random_state = 3407, use_rslora = False, loftq_config = None)
    """,
    "%%bash\nls -l",
    """
    from datasets import load_dataset
    dataset = load_dataset("mlabonne/FineTome-100k", "small", split = "train")
    dataset = dataset.map(lambda row: row)
    """,
    """
    from trl import SFTTrainer, SFTConfig
    trainer = SFTTrainer(
        model = model, tokenizer = tokenizer, train_dataset = dataset, eval_dataset = None,
        args = SFTConfig(
            dataset_text_field = "text", per_device_train_batch_size = 2, gradient_accumulation_steps = 4,
            warmup_steps = 5, max_steps = 60, learning_rate = 2e-4, logging_steps = 1, optim = "adamw_8bit",
            weight_decay = 0.001, lr_scheduler_type = "linear", seed = 3407, report_to = "none",
            output_dir = f"outputs/{rank}", bf16 = is_bfloat16_supported(), adam_epsilon = 1e-6, tau = 2))
    """,
    "from unsloth.chat_templates import train_on_responses_only\ntrainer = train_on_responses_only(trainer)",
    "if False:\n    model, _ = FastLanguageModel.from_pretrained(model_name = 'lora_model', load_in_8bit = True)",
]
OF_UNSLOTH = {
    "model": "unsloth/Qwen3.5-4B",
    "hf_dataset": {"path": "mlabonne/FineTome-100k", "train_split": "train", "config": {"name": "small"}},
    "val_batches": 0,
    "num_layers": -1,
    "lora_parameters": {"rank": 32, "alpha": 64, "dropout": 0, "keys": ["q_proj", "k_proj"]},
    "max_seq_length": 4096,
    "grad_checkpoint": True,
    "batch_size": 2,
    "grad_accumulation_steps": 4,
    "iters": 240,
    "seed": 3407,
    "optimizer": "adamw8bit",
    "optimizer_config": {"adamw8bit": {"weight_decay": 0.001, "bias_correction": True, "eps": 1e-6}},
    "lr_schedule": {"name": "linear_schedule", "arguments": [2e-4, 0.0, 55], "warmup": 5},
    "grad_clip": 1.0,
    "steps_per_report": 4,
}


def notebook(cells):
    code = [{"cell_type": "code", "source": textwrap.dedent(cell).strip().splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": ["# Title"]}, *code], "nbformat": 4})


SCRIPT = "\n".join(textwrap.dedent(cell) for cell in CELLS if not cell.startswith("%%"))
FILES = {
    "run.yaml": (AXOLOTL, OF_AXOLOTL, ["deepspeed: 'zero2.json'"]),
    "dpo.yml": (FACTORY, OF_FACTORY, ["quantization_bit: 4 (quantise", "dataset: 'dpo_en_demo' (an entry", "template"]),
    "run.ipynb": (
        notebook(CELLS),
        OF_UNSLOTH,
        ["load_in_4bit: True (quan", "output_dir: f'outputs/{rank}' (comp", "tau: 2"],
    ),
    "run.py": (SCRIPT, OF_UNSLOTH, ["load_in_4bit: True (quantise", "output_dir", "tau: 2"]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_options_of_one_meaning(name, file):
    text, options, unsaid = FILES[name]
    translation = translate(file(name, text))
    assert yaml.safe_load(translation.text) == options
    for line in unsaid:
        assert any(each.startswith(line) for each in translation.unsaid), (line, translation.unsaid)
        assert f"\n#   {line}" in translation.text
    # What has no meaning here is named, and no more is said of it.
    assert "bf16" in translation.text.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("adapter: lora\nlora_r: 8\nlora_alpha: 16\npeft_use_rslora: true", "lora_parameters", {"rslora": True}),
        ("adapter: lora\npeft_init_lora_weights: pissa_niter_16", "lora_parameters", {"init": "pissa"}),
        ("adapter: lora\npeft_use_dora: true", "fine_tune_type", "dora"),
        ("", "fine_tune_type", "full"),
        ("train_on_inputs: true", "mask_prompt", False),
        ("max_grad_norm: 0", "grad_clip", None),
        ("max_grad_norm: 0.3", "grad_clip", 0.3),
        ("rl: ipo", "loss_variant", "ipo"),
        ("optimizer: lion_8bit", "optimizer", "lion"),
        ("micro_batch_size: 3\nmax_steps: -1", "epochs", 1.0),
        ("learning_rate: 1e-5\nlr_scheduler: constant", "learning_rate", 1e-5),
        ("datasets: [{path: a/b}]\nval_set_size: 200", "hf_dataset", {"valid_split": "train[-200:]"}),
        ("early_stopping_patience: 3", "early_stopping", 3),
        ("", "max_seq_length", 512),
        ("excess_length_strategy: truncate", "overlong", "truncate"),
        ("rl: orpo\norpo_alpha: 0.2", "beta", 0.2),
        ("learning_rate: 1e-4\nmax_steps: 1000", "lr_schedule", {"warmup": 30}),
        ("learning_rate: 1e-4\nmax_steps: 5000", "lr_schedule", {"warmup": 100}),
        ("learning_rate: 1e-4\nmax_steps: 5000\nwarmup_steps: 0.1", "lr_schedule", {"warmup": 500}),
        ("learning_rate: 1e-4\nmax_steps: 9\nwarmup_steps: 0", "lr_schedule", {"arguments": [1e-4, 9]}),
    ],
)
def test_a_value_is_translated(text, option, value, file):
    options = yaml.safe_load(translate(file("a.yaml", f"base_model: x\n{text}")).text)
    if isinstance(value, dict):
        assert value.items() <= options[option].items()
    else:
        assert options[option] == value


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("max_steps: many", "max_steps: 'many' (expected a whole number)"),
        ("micro_batch_size: auto", "micro_batch_size: 'auto' (batch_size: expected a whole number of 1 or more"),
        ("optimizer: came_pytorch", "optimizer: 'came_pytorch' (MLX has none of this name; adamw is taken)"),
        ("adapter: llama-adapter", "adapter: 'llama-adapter' (deltatune has lora, dora and full)"),
        ("learning_rate: 1e-4\nlr_scheduler: rex", "the schedule: 'rex' (the rate stays at 0.0001)"),
        ("learning_rate: 1e-4", "the cosine schedule: its length is epochs * rows / (batch_size * grad_accumulation"),
        ("learning_rate: 1e-4\nwarmup_steps: 2", "the cosine schedule: its length is epochs * rows"),
        ("warmup_steps: 1.5", "warmup_steps: 1.5 (expected a whole number, or a share below 1)"),
        ("adapter: [lora]", "adapter: ['lora'] (deltatune has lora, dora and full)"),
        ("lr_scheduler: 5", "lr_scheduler: 5 (expected a text)"),
        ("warmup_steps: .nan", "warmup_steps: nan (expected a number)"),
        ("warmup_steps: .inf", "warmup_steps: inf (expected a number)"),
        ("lora_target_modules: 5", "lora_target_modules: 5 (lora_parameters: keys: expected a list, got 5.)"),
        ("excess_length_strategy: {a: 1}", "excess_length_strategy: {'a': 1} (deltatune has skip and truncate)"),
        ("excess_length_strategy: raise", "excess_length_strategy: 'raise' (deltatune has skip and truncate)"),
        ("", "no learning rate is named there, so that trainer's own default holds; here it is 1e-5"),
        ("", "no data could be named: give --data, or data in the file"),
        ("datasets: rows", "datasets: 'rows' (expected a list of mappings with path)"),
        ("datasets: [{path: a/b, type: my_own}]", "datasets 1: type: 'my_own' (rows are recognised by their keys)"),
        ("datasets: [{path: a/b, split: 'train[:9]'}]\nval_set_size: 0.1", "what of a/b is validated on"),
        ("lora_model_dir: old", "lora_model_dir: 'old' (a folder of PEFT: deltatune import --peft turns"),
        ('"x\\n- y": 3', "'x\\n- y': 3"),
        ("base_model: unsloth/x-bnb-4bit", "base_model: 'unsloth/x-bnb-4bit' (MLX does not load weights of bits"),
    ],
)
def test_what_cannot_be_said_is_listed(text, line, file):
    text = text if text.startswith("base_model") else f"base_model: x\n{text}"
    translation = translate(file("a.yaml", text))
    assert any(each.startswith(line) for each in translation.unsaid), translation.unsaid
    assert isinstance(yaml.safe_load(translation.text), dict)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", "[0.0001, UPDATES - WARMUP], warmup: WARMUP}; WARMUP is 0.03 of UPDATES, at most 100"),
        ("warmup_ratio: 0.1", "warmup: WARMUP}; WARMUP is 0.1 of UPDATES"),
        ("warmup_steps: 7", "[0.0001, UPDATES - 7], warmup: 7}"),
        ("warmup_steps: 0", "[0.0001, UPDATES], warmup: 0}"),
    ],
)
def test_a_schedule_whose_length_is_not_known_is_said_in_words(text, end, file):
    translation = translate(file("a.yaml", f"base_model: x\nlearning_rate: 1e-4\n{text}"))
    assert any(line.endswith(end) for line in translation.unsaid), translation.unsaid


def test_a_rate_that_llama_factory_does_not_name_is_transformers_own(file):
    translation = translate(file("a.yaml", "model_name_or_path: x\nmax_steps: 10"))
    assert yaml.safe_load(translation.text)["lr_schedule"]["arguments"] == [5e-5, 0.0, 10]
    assert not any("learning rate" in line for line in translation.unsaid)


def test_a_notebook_that_learns_every_token_does_so_here(file):
    cells = [cell for cell in CELLS if "train_on_responses_only" not in cell]
    assert yaml.safe_load(translate(file("a.ipynb", notebook(cells))).text)["mask_prompt"] is False


@pytest.mark.bad_input("as FILE of `recipes from`: {text}")
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "model: x\niters: 3", "expected a file of axolotl (with base_model) or LLaMA-Factory (with model"),
        ("a.yaml", "", "; its keys are none."),
        ("a.yaml", "- base_model: x", "a.yaml: expected `key: value` lines"),
        ("a.yaml", "base_model: [", "the file is not YAML"),
        ("a.yaml", "base_model: x\nrl: grpo", "a.yaml: it trains by 'grpo', which deltatune has not; it has sft, dpo,"),
        ("a.yaml", "model_name_or_path: x\nstage: ppo", "it trains by 'ppo'"),
        ("a.py", "trainer = GRPOTrainer(args=GRPOConfig(beta=0.1))", "it trains by 'grpo'"),
        ("a.py", "print(1)", "a.py: none of Unsloth's calls is in it; expected FastLanguageModel.from_pretrained(...)"),
        ("a.py", "def (", "a.py, line 1: not Python (invalid syntax"),
        ("a.ipynb", "{}", "a.ipynb: not a Jupyter notebook (missing key 'cells')"),
        ("a.ipynb", "[", "a.ipynb: not a Jupyter notebook (Expecting value"),
        ("a.ipynb", '{"cells": [{"cell_type": "code", "source": 3}]}', "not a Jupyter notebook ("),
    ],
)
def test_another_file_is_refused(name, text, message, file):
    with pytest.raises(UserError) as error:
        translate(file(name, text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_null_bytes_are_refused(file):
    with pytest.raises(UserError, match=r"a.py: not Python \(source code string cannot contain null bytes\)"):
        translate(file("a.py", "x = '\0'"))


def test_the_command_prints_the_yaml_and_says_the_rest(file, tmp_path):
    done = deltatune("recipes", "from", file("run.yaml", AXOLOTL))
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == OF_AXOLOTL
    assert done.stderr == "deltatune: not translated: deepspeed: 'zero2.json'\n"
    refused = deltatune("recipes", "from", file("other.yaml", "a: 1"))
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)


def test_a_translated_file_trains(file, tmp_path, tiny_checkpoint):
    """Through the installed script: what stands in the YAML is taken by train as it is."""
    rows = "".join(json.dumps({"prompt": f"the fox {n}", "completion": "jumps"}) + "\n" for n in range(40))
    file("rows.jsonl", rows)
    text = AXOLOTL.replace(
        "  - {path: mlabonne/FineTome-100k, type: chat_template, split: train, field_messages: dialogue}\n", ""
    )
    text = text.replace("max_steps: 300", "max_steps: 2").replace("wandb_project: cooks", "")
    text = text.replace("accumulation_steps: 4", "accumulation_steps: 1")
    text = text.replace("Qwen/Qwen3.5-9B", str(tiny_checkpoint("qwen3_5")))
    file("theirs.yaml", text)
    done = deltatune("recipes", "from", "theirs.yaml", cwd=tmp_path)
    file("ours.yaml", done.stdout)
    trained = deltatune("train", "-c", "ours.yaml", "--max-seq-length", "64", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "out" / "adapters.safetensors").is_file()


def test_each_name_stands_once_and_the_page_has_them_all():
    page = dictionary.page_table()
    for trainer, unneeded in dictionary.UNNEEDED.items():
        names = [name for row in dictionary.ROWS for name in getattr(row, trainer)]
        assert len(names) == len(set(names))
        assert not set(names) & set(unneeded.split())
        assert not [name for name in names if (name if " " in name else f"`{name}`") not in page]


def test_the_options_that_the_page_names_are_there():
    known = set(TrainConfig.__dataclass_fields__) | set(LoraConfig.__dataclass_fields__)
    simple = [row.ours.strip("`") for row in dictionary.ROWS if row.ours.strip("`").isidentifier()]
    assert len(simple) > 30
    assert set(simple) <= known
