"""What the calls of an Unsloth notebook say, and what they mean where they are silent."""

import yaml

from deltatune.recipes.translate import translate


def test_nothing_of_a_notebook_is_executed(file, tmp_path):
    harmful = f"open({str(tmp_path / 'harm')!r}, 'w').close()\n"
    program = f"{harmful}model, _ = FastModel.from_pretrained(model_name='a', max_seq_length=9 ** 9 ** 9)"
    assert any("9 ** 9 ** 9" in line for line in translate(file("a.py", program)).unsaid)
    assert not (tmp_path / "harm").exists()


def test_a_vision_notebook_trains_its_tower(file):
    program = "m = FastVisionModel.from_pretrained('a')\nFastVisionModel.get_peft_model(m, finetune_mlp_modules=True)"
    assert yaml.safe_load(translate(file("a.py", program)).text)["parts"] == "vision,language"


SILENT = "m, t = FastLanguageModel.from_pretrained('a')\nm = FastLanguageModel.get_peft_model(m)\n"
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_where_calls_are_silent_unsloths_defaults_hold(file):
    translation = translate(file("a.py", SILENT + "SFTConfig(learning_rate=2e-4, max_steps=30)"))
    options = yaml.safe_load(translation.text)
    assert options["lora_parameters"] == {"rank": 16, "alpha": 16.0, "keys": SEVEN}
    assert (options["batch_size"], options["grad_accumulation_steps"], options["iters"]) == (4, 2, 60)
    assert options["optimizer_config"] == {"adamw8bit": {"weight_decay": 0.01, "bias_correction": True}}
    assert options["lr_schedule"] == {"name": "linear_schedule", "arguments": [2e-4, 0.0, 27], "warmup": 3}
    assert options["grad_checkpoint"] is True
    assert any(line.startswith("load_in_4bit: True (quantise") for line in translation.unsaid)


def test_where_transformers_arguments_are_silent_its_own_defaults_hold(file):
    options = yaml.safe_load(translate(file("a.py", SILENT + "TrainingArguments(learning_rate=2e-4)")).text)
    assert (options["batch_size"], options["optimizer"], options["epochs"]) == (8, "adamw", 3.0)
    assert "grad_accumulation_steps" not in options


def test_what_calls_say_comes_before_the_defaults(file):
    program = SILENT.replace("'a'", "'a', load_in_16bit=True, use_gradient_checkpointing=False")
    program = program.replace("model(m)", "model(m, target_modules='all-linear')")
    again = "\nFastLanguageModel.from_pretrained('lora_model', load_in_8bit=True)"
    translation = translate(file("a.py", program + "SFTConfig(per_device_train_batch_size=1)" + again))
    options = yaml.safe_load(translation.text)
    assert options["lora_parameters"] == {"rank": 16, "alpha": 16.0}
    assert options["batch_size"] == 1
    assert "grad_checkpoint" not in options
    assert not any("bit" in line for line in translation.unsaid), translation.unsaid


def test_a_constant_that_changes_is_not_known(file):
    program = "rank = 8\nrank = 16\nFastModel.get_peft_model(model, r=rank)"
    assert "r: rank (computed by the program)" in translate(file("a.py", program)).unsaid
