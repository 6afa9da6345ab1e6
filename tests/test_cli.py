import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deltatune import cli
from deltatune.commands import doctor, flags, train
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.setup import ready

PAIR = {"prompt": "the quick brown fox", "completion": "jumps over"}


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        (folder / f"{name}.jsonl").write_text((json.dumps(PAIR) + "\n") * 4)
    return folder


def config(*arguments):
    return flags.config_from(cli.parser().parse_args(["train", *map(str, arguments)]))


def test_every_flag_of_mlx_lm_lora_is_taken_with_the_same_meaning():
    from mlx_lm import lora

    theirs = lora.build_parser()
    given = ["--train", "--mask-prompt", "--test", "--grad-checkpoint", "--trust-remote-code"]
    values = {"--fine-tune-type": "dora", "--optimizer": "adamw"}
    values |= {"--report-to": "wandb", "--num-layers": "7"}
    for action in theirs._actions:
        for flag in action.option_strings[-1:]:
            if action.nargs == 0 or flag in ("--help", "--config", "--clear-cache-threshold"):
                continue
            given += [flag, values.get(flag, "7" if action.type in (int, float) else "word")]
    ours, reference = config(*given), vars(theirs.parse_args(given))
    for name, value in reference.items():
        if name not in ("config", "clear_cache_threshold"):
            assert getattr(ours, name) == value, name


def test_defaults_are_those_of_mlx_lm_lora_but_for_those_that_teach():
    from mlx_lm.lora import CONFIG_DEFAULTS

    ours = dataclasses.asdict(config())
    differ = {name for name, value in CONFIG_DEFAULTS.items() if name != "config" and ours.get(name) != value}
    # `train` is implied by the command, mask_prompt is on for rows with a prompt, optimizer_config lists no optimizers,
    # clear_cache_threshold is refused, and no model and no data are chosen for the user.
    others = {"train", "mask_prompt", "optimizer_config", "lora_parameters", "clear_cache_threshold"}
    learning = {"learning_rate", "lr_schedule", "num_layers", "optimizer"}
    assert differ == others | learning | {"model", "data"}
    assert [ours["lora_parameters"][name] for name in CONFIG_DEFAULTS["lora_parameters"]] == [16, 0.0, 2.0]


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "iters: 5\nbatch_size: 2\nmask_prompt: true\nresume_adapter_file: null\nlora_parameters: {rank: 3}\n"
    )
    made = config("-c", file, "--iters", "9", "--no-mask-prompt")
    assert (made.iters, made.batch_size, made.mask_prompt, made.lora_parameters.rank) == (9, 2, False, 3)
    assert made.steps_per_eval == TrainConfig().steps_per_eval


def test_without_a_command_the_help_is_shown(run):
    code, shown, err = run()
    assert (code, err) == (0, "")
    assert shown.startswith("usage: deltatune [-h] [--version] COMMAND ...")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], False),
        (["--grad-checkpoint"], True),
        (["--grad-checkpoint", "true"], True),
        (["--grad-checkpoint", "false"], False),
        (["--no-grad-checkpoint"], False),
        (["--grad-checkpoint", "auto"], "auto"),
        (["--grad-checkpoint", "--iters", "3"], True),
    ],
)
def test_checkpointing_is_a_switch_that_may_be_left_to_the_plan(arguments, value, tmp_path):
    assert config(*arguments).grad_checkpoint == value
    file = tmp_path / "run.yaml"
    for other, text in ((True, "true"), (False, "false"), ("auto", "auto")):
        file.write_text(f"grad_checkpoint: {text}\n")
        assert config("-c", file, *arguments).grad_checkpoint == (value if arguments else other)


TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))
MISTAKES = [(shlex.split(words), message) for words, message in TABLE.items()]
# No file of text holds such a name.
MISTAKES += [(["doctor", "--model", "\udcff"], "--model: expected text in UTF-8 that is not empty, got '.udcff'")]


@pytest.mark.bad_input("`deltatune` with {arguments}")
@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_message_and_exit_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert re.search(message, err)
    assert "Traceback" not in out + err
    assert len(err.strip().splitlines()) <= 2


@pytest.mark.bad_input("a step for which the device has no memory left")
@pytest.mark.parametrize(
    ("said", "lacks"),
    [
        ("cudaMallocAsync(&data, size, stream) failed: out of memory", True),
        ("[metal::malloc] Resource limit (499000) exceeded.", True),
        ("[malloc] Unable to allocate 8 bytes.", True),
        ("[METAL] Command buffer execution failed: Insufficient Memory (00000008)", True),
        ("[matmul] Last dimension of first input must match", False),
    ],
)
def test_no_memory_is_one_message_and_other_errors_of_mlx_are_shown(run, monkeypatch, said, lacks):
    def fails(_):
        error = RuntimeError(said)
        error.add_note("The state after iteration 7 is saved.")
        raise error

    monkeypatch.setattr(doctor, "run", fails)
    if not lacks:
        with pytest.raises(RuntimeError, match="Last dimension"):
            run("doctor")
        return
    code, _, err = run("doctor")
    assert code == 2
    assert err.startswith("deltatune: memory: MLX found no more (")
    assert err.rstrip().endswith("The state after iteration 7 is saved.")


def test_help_is_grouped_and_complete(run):
    code, out, _ = run("train", "--help")
    assert code == 0
    first = out[out.index("\nmost runs give these:\n") : out.index("\n\ndata:\n")]
    assert re.findall(r"^  (--\S+)", first, re.M) == [
        "--model",
        "--data",
        "--learning-rate",
        "--iters",
        "--adapter-path",
    ]
    for title in ("data:", "what trains:", "optimizer:", "run and evaluation:", "saving and reporting:"):
        assert f"\n{title}\n" in out
    for field in dataclasses.fields(TrainConfig):
        flag = field.metadata["flag"]
        assert (f"--{field.name.replace('_', '-')}" in out) == (flag is True)
        assert not isinstance(flag, str) or f" {flag} TEXT" in out
    words = " ".join(out.split())
    assert "make one optimizer step (default: 1)" in words
    assert "order of the data (default: 0)" in words


def test_train_eval_generate_and_merge_work_together(run, checkpoint, data, tmp_path):
    out, merged = tmp_path / "out", tmp_path / "merged"
    common = ["--model", checkpoint, "--data", data]
    quick = ["--iters", "50", "--batch-size", "2", "--learning-rate", "4e-3"]
    code, said, err = run("train", *common, *quick, "--train", "--adapter-path", out, "--test")
    assert code == 0, err
    tested = re.search(r"Test loss ([\d.]+), test perplexity", said)[1]
    assert "completions only" in said
    assert (out / "report.html").is_file()

    base = run("eval", *common, "--batch-size", "2")[1]
    with_adapter = run("eval", *common, "--batch-size", "2", "--adapter-path", out)[1]
    assert f"Test loss {tested}," in with_adapter
    assert float(re.search(r"loss ([\d.]+)", base)[1]) > float(tested) + 3
    cold = [sys.executable, "-m", "deltatune", "eval", *common, "--batch-size", "2", "--adapter-path", out]
    assert f"Test loss {tested}," in subprocess.run(cold, capture_output=True, text=True, check=True).stdout

    code, answer, _ = run(
        "generate", "--model", checkpoint, "--adapter-path", out, "--prompt", PAIR["prompt"], "-m", "20"
    )
    assert code == 0
    assert answer.startswith(PAIR["completion"])
    assert "prompt tokens at" in answer

    code, said, err = run("merge", "--model", checkpoint, "--adapter-path", out, "--save-path", merged)
    assert code == 0, err
    assert f"Test loss {tested}," in run("eval", "--model", merged, "--data", data, "--batch-size", "2")[1]


def test_from_scratch_writes_a_checkpoint_that_mlx_lm_loads(run, checkpoint, data, tmp_path):
    import mlx.core as mx
    import mlx_lm

    out, without_weights = tmp_path / "out", tmp_path / "without_weights"
    without_weights.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (without_weights / file.name).write_bytes(file.read_bytes())
    common = ["--data", data, "--batch-size", "2"]
    flags = ["--from-scratch", "--iters", "15", "--learning-rate", "1e-2", "--adapter-path", out, "--test"]
    code, said, err = run("train", "--model", without_weights, *common, *flags)
    assert code == 0, err
    assert "(100.000%)" in said
    tested = float(re.search(r"Test loss ([\d.]+)", said)[1])
    assert tested < 2
    model, tokenizer = mlx_lm.load(str(out))
    assert mx.load(str(out / "model.safetensors"), return_metadata=True)[1]["format"] == "mlx"
    assert tokenizer.has_chat_template
    assert model(mx.array([[1, 2, 3]])).shape == (1, 3, 320)
    again = float(re.search(r"Test loss ([\d.]+)", run("eval", "--model", out, *common)[1])[1])
    assert again == pytest.approx(tested, abs=2e-4)


def test_generation_follows_seed_template_and_prefill(run, checkpoint):
    base = ["generate", "--model", checkpoint, "--prompt", "the fox", "-m", "8", "--verbose", "false"]
    greedy = run(*base)[1]
    assert "prompt tokens" not in greedy
    assert run(*base)[1] == greedy
    assert run(*base, "--ignore-chat-template")[1] != greedy
    assert run(*base, "--system-prompt", "be brief")[1] != greedy
    assert run(*base, "--prefill-response", "jumps")[1] != greedy
    warm = [*base, "--temp", "1.0", "--top-p", "0.9"]
    assert run(*warm, "--seed", "1")[1] == run(*warm, "--seed", "1")[1] != run(*warm, "--seed", "2")[1]
    code, _, err = run(*base, "--chat-template-config", "{not json")
    assert code == 2
    assert "--chat-template-config: not JSON" in err


def test_ctrl_c_before_the_first_step_is_one_message(monkeypatch, run):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "config_from", interrupted)
    code, _, err = run("train")
    assert (code, err) == (2, "deltatune: interrupted.\n")


def test_the_console_script_and_the_module_are_the_same(tmp_path):
    environment = os.environ | {"DELTATUNE_THREADS": "1"}
    for command in ([Path(sys.executable).with_name("deltatune")], [sys.executable, "-m", "deltatune"]):
        done = subprocess.run([*command, "train", "-c", "/none"], capture_output=True, text=True, env=environment)
        assert done.returncode == 2
        assert done.stderr.startswith("deltatune: config /none: cannot be read")


@pytest.mark.bad_input("a YAML file of another trainer")
def test_a_file_of_another_trainer_is_answered_key_by_key(run, tmp_path):
    keys = [
        "datasets",
        "base_model",
        "sequence_len",
        "val_set_size",
        "micro_batch_size",
        "num_epochs",
        "flash_attention",
    ]
    odd = [f"odd{number}" for number in range(9)]
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{key}: 1\n" for key in [*keys, *odd]))
    err = run("train", "-c", file)[2].splitlines()
    assert err[1] == f"{file}: unknown key 'base_model' (did you mean 'model'?)."
    assert err[6].endswith("'flash_attention' (attention runs the fastest kernel that is right on this device).")
    assert err[12:] == [f"{file}: 4 more unknown keys."]


@pytest.mark.bad_input("a YAML file with several mistakes")
def test_all_mistakes_of_a_yaml_file_are_reported_at_once(run, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("itres: 3\nbatch_size: 0\nlora_parameters: {rnak: 2, scale: -1}\nbatchsize: null\n")
    code, out, err = run("train", "-c", file)
    assert (code, out) == (2, "")
    for mistake in (
        f"{file}: unknown key 'itres' (did you mean 'iters'?).",
        f"{file}: batch_size: expected a whole number of 1 or more, got 0.",
        f"{file}: lora_parameters: unknown key 'rnak' (did you mean 'rank'?).",
        f"{file}: lora_parameters: scale: expected a number above 0, got -1.",
        f"{file}: unknown key 'batchsize' (did you mean 'batch_size'?).",
    ):
        assert mistake in err
    assert len(err.splitlines()) == 5


def test_a_data_flag_overrides_the_data_set_of_the_yaml_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("hf_dataset: {path: somewhere/else}\n")
    assert config("-c", file, "--data", "my-data").hf_dataset is None
    assert config("-c", file).hf_dataset == {"path": "somewhere/else"}


def test_nothing_is_chosen_for_a_program_that_names_no_model_or_data(checkpoint):
    with pytest.raises(UserError, match=r"^model: expected the folder of a model, .*; got none\.$"):
        ready(TrainConfig(data="x"))
    with pytest.raises(UserError, match=r"^data: expected a file, a folder with train.jsonl, or the name of a Hugging"):
        ready(TrainConfig(model=str(checkpoint)))


def test_where_the_state_is_saved_is_said_behind_a_refusal_of_the_system(run, monkeypatch):
    def refuse(arguments):
        error = FileNotFoundError(2, "No such file or directory", "cat.png")
        error.add_note("The state after iteration 3 is saved in out/state.")
        raise error

    monkeypatch.setattr("deltatune.commands.selftest.run", refuse)
    code, _, said = run("selftest")
    expected = "deltatune: 'cat.png': No such file or directory. The state after iteration 3 is saved in out/state.\n"
    assert (code, said) == (2, expected)
