"""Every command does as its help states: a table of sentences, on a few shared runs.

The first run of each command, and those with standard input, go through the console script in processes of their own.
"""

import ast
import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from pages import ROOT

import docs_pages
from console import called, deltatune

ROW = {"prompt": "the quick brown fox", "completion": "jumps over"}
# Two reports and evaluations in four iterations, a test, samples, and more layers than the model has.
FULL = """--iters 4 --batch-size 2 --max-seq-length 64 --num-layers 17 --steps-per-report 2 --steps-per-eval 2
--save-every 2 --val-batches -1 --test --test-batches 1 --keep 1 --sample-prompts why prompts.jsonl --steps-per-sample 4
--sample-max-tokens 3 --grad-accumulation-steps 2"""

# All weights, columns of other names, a row that is too long, and no evaluation.
WHOLE = """--fine-tune-type full --optimizer sgd --batch-size 2 --epochs 1.2 --val-batches 0 --no-mask-prompt
--prompt-column question --completion-column answer --max-seq-length 24 --overlong skip"""
# One step of plain gradient descent, so that what changes the gradient or its rate shows in the B matrices' norm.
CLIPPED = """--iters 1 --optimizer sgd --learning-rate 1 --grad-clip 0.01 --loraplus-lr-ratio 4 --val-batches 0
--rank 4 --alpha 8"""
# A learning rate with which no evaluation is lower than the first.
CONTINUED = """--iters 6 --learning-rate 1e-30 --steps-per-eval 1 --early-stopping 2 --save-every 1 --rank 4 --alpha 8
--resume-adapter-file clipped/adapters.safetensors"""


@dataclasses.dataclass
class Shop:
    """The folder in which the commands ran, the output of each, and the records and files that they left."""

    folder: Path
    said: dict[str, subprocess.CompletedProcess[str]] = dataclasses.field(default_factory=dict)
    records: dict[str, list[dict]] = dataclasses.field(default_factory=dict)
    files: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def run(
        self, name: str, line: str, *more: object, code: int = 0, records: str = "full", input: str | None = None
    ) -> None:
        words = [*line.split(), *map(str, more)]
        if input is None:
            done = called(*words, cwd=self.folder)
        else:
            done = deltatune(*words, cwd=self.folder, input=input, HF_HUB_OFFLINE="1")
        assert done.returncode == code, f"{line}: {done.stdout[-500:]}{done.stderr}"
        self.said[name] = done
        metrics = self.folder / records / "metrics.jsonl"
        if metrics.exists():
            self.records[name] = [json.loads(each) for each in metrics.read_text().splitlines()]
        self.files[name] = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def out(self, name: str) -> str:
        return " ".join(self.said[name].stdout.split())


@pytest.fixture(scope="module")
def shop(tiny_checkpoint, tmp_path_factory):
    made = Shop(tmp_path_factory.mktemp("help"))
    (made.folder / "data").mkdir()
    for name in ("train", "valid", "test"):
        (made.folder / "data" / f"{name}.jsonl").write_text((json.dumps(ROW) + "\n") * 4)
    (made.folder / "prompts.jsonl").write_text(json.dumps(ROW) + "\n")
    (made.folder / "run.yaml").write_text("iters: 9\nbatch_size: 2\ndata: data\n")
    shutil.copytree(tiny_checkpoint("qwen3"), made.folder / "model")
    made.run("defaults", "train --model model --data data --iters 1")
    made.run("full", "train --model model --data data --adapter-path full", *FULL.split())
    flags = FULL.replace("--iters 4", "--iters 6").split()
    made.run("resumed", "train --model model --data data --adapter-path full --resume", *flags)
    made.run("moved", "train --model model -c run.yaml --adapter-path full --iters 1")
    made.run("overwritten", "train --model model -c run.yaml --adapter-path full --iters 1 --overwrite")
    made.run("merged", "merge --model model")
    made.run("shown", "train --model model --data data --show-batch --adapter-path none --batch-size 1")
    made.run("no data", "train --model model", code=2)
    (made.folder / "other").mkdir()
    other = [{"question": "the quick", "answer": "brown fox"}] * 4 + [{"question": "the " * 20, "answer": "dog " * 20}]
    (made.folder / "other" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    made.run("whole", "train --model model --data other --adapter-path whole", *WHOLE.split(), records="whole")
    made.run("clipped", "train --model model --data data --adapter-path clipped", *CLIPPED.split())
    made.run("continued", "train --model model --data data --adapter-path on", *CONTINUED.split(), records="on")
    made.run("evaluated", "eval --model model --data data --adapter-path clipped --test-batches 1 --batch-size 2")
    made.run("asked", "generate --model model --max-tokens 3 --prompt -", input="why\n")
    made.run("quiet", "generate --model model --max-tokens 3 --verbose false --temp 9 --top-k 1 --prompt why")
    made.run("plain", "generate --model model -m 3 --ignore-chat-template --prompt why")
    return made


def update(shop: Shop) -> float:
    """The norm of the B matrices after the one step of "clipped"."""
    weights = mx.load(str(shop.folder / "clipped" / "adapters.safetensors"))
    return sum(float(mx.square(value).sum()) for name, value in weights.items() if name.endswith("lora_b")) ** 0.5


def prompt_tokens(shop: Shop, name: str) -> int:
    return int(re.search(r"\[(\d+) prompt tokens", shop.out(name) + shop.said[name].stderr)[1])


def reports(shop: Shop, key: str, name: str = "full") -> list[int]:
    """The iterations with a key in their records."""
    return [record["iteration"] for record in shop.records[name] if key in record]


def adapters(shop: Shop, name: str) -> list[str]:
    """The numbered copies of the adapters after a command."""
    return [file for file in shop.files[name] if re.search(r"full/\d+_adapters", file)]


def layers(shop: Shop) -> set[str]:
    weights = mx.load(str(shop.folder / "full-1" / "adapters.safetensors"))
    return {name.partition(".layers.")[2].partition(".")[0] for name in weights}


def samples(shop: Shop) -> dict[int, list[str]]:
    asked = [record for record in shop.records["full"] if "samples" in record]
    return {record["iteration"]: [each["prompt"] for each in record["samples"]] for record in asked}


def options(shop: Shop, folder: str) -> dict:
    return json.loads((shop.folder / folder / "adapter_config.json").read_text())


# A sentence of a command's help, and what shows it. A sentence is found by its words, so it cannot be changed alone.
TABLE: list[tuple[str, str, Callable[[Shop], object]]] = [
    ("train", "number of iterations to train for", lambda shop: reports(shop, "train_loss")[-1] == 4),
    (
        "train",
        "number of iterations between reports of the training loss",
        lambda s: reports(s, "train_loss") == [2, 4],
    ),
    ("train", "number of iterations between evaluations", lambda shop: reports(shop, "val_loss") == [0, 2, 4]),
    ("train", "evaluate the model on the test set after training", lambda shop: "Test loss" in shop.out("full")),
    ("train", "-1, or a number above the model's, trains all", lambda shop: len(layers(shop)) == 4),
    (
        "train",
        "number of numbered copies of the adapters to keep, the newest",
        lambda shop: adapters(shop, "full") == ["full/0000004_adapters.safetensors"],
    ),
    (
        "train",
        "folder to which a run writes all its files (default: adapters)",
        lambda shop: "adapters/adapters.safetensors" in shop.files["defaults"],
    ),
    (
        "train",
        "prompts that the model answers before, during and after training",
        lambda shop: list(samples(shop)) == [0, 4],
    ),
    (
        "train",
        "a name that ends with .jsonl stands for the prompts, chats or texts in the rows of that file",
        lambda shop: samples(shop)[0] == ["why", ROW["prompt"]],
    ),
    (
        "train",
        "continue the run that is saved in adapter_path",
        lambda shop: reports(shop, "train_loss", "resumed") == [2, 4, 6],
    ),
    (
        "train",
        "by default it is moved to a numbered folder beside it",
        lambda shop: "full-1/adapters.safetensors" in shop.files["moved"],
    ),
    (
        "train",
        "delete an earlier run in adapter_path",
        lambda shop: not any(file.startswith("full-2") for file in shop.files["overwritten"]),
    ),
    (
        "train",
        "YAML file with options; flags override it",
        lambda shop: (options(shop, "full")["iters"], options(shop, "full")["batch_size"]) == (1, 2),
    ),
    (
        "train",
        "count only completions in the loss, which is the default for prompts and chats",
        lambda shop: "Loss on completions only" in shop.out("defaults"),
    ),
    (
        "train",
        "print the first batch, with the tokens that count in the loss marked, and stop",
        lambda shop: "jumps over" in shop.out("shown") and not (shop.folder / "none").exists(),
    ),
    ("train", "required without hf_dataset", lambda shop: "--data is missing" in shop.said["no data"].stderr),
    (
        "merge",
        "folder of the adapter (default: adapters)",
        lambda shop: "Merged into fused_model" in shop.out("merged"),
    ),
    (
        "merge",
        "new folder for the result (default: fused_model)",
        lambda shop: "fused_model/model.safetensors" in shop.files["merged"],
    ),
    ("train", "or the layers' own weights (full)", lambda shop: "whole/model.safetensors" in shop.files["whole"]),
    ("train", "an optimizer of MLX", lambda shop: "sgd" in (shop.folder / "whole" / "run_options.json").read_text()),
    # Four rows are left, so 1.2 passes are 2.4 batches.
    ("train", "a fraction of one is rounded up", lambda shop: reports(shop, "train_loss", "whole") == [3]),
    ("train", "longer than max_seq_length is cut (truncate) or left out (skip)", lambda s: "1 of 5" in s.out("whole")),
    ("train", "0 turns evaluation off", lambda shop: not reports(shop, "val_loss", "whole")),
    ("train", "--no-mask-prompt counts every token", lambda shop: "on completions only" not in shop.out("whole")),
    ("train", "key, or column, that holds the prompt of a row", lambda shop: reports(shop, "train_loss", "whole")),
    ("train", "key, or column, that holds the completion of a row", lambda s: reports(s, "train_loss", "whole")),
    ("train", "a larger gradient is scaled down to it", lambda s: update(s) == pytest.approx(0.04, rel=1e-4)),
    ("train", "factor of the learning rate of the B matrices", lambda s: update(s) == pytest.approx(0.04, rel=1e-4)),
    (
        "train",
        "inner size of each adapter's update",
        lambda shop: options(shop, "clipped")["lora_parameters"]["rank"] == 4,
    ),
    ("train", "scale is alpha / rank", lambda shop: options(shop, "clipped")["lora_parameters"]["scale"] == 2),
    ("train", "stop training after this many evaluations", lambda s: reports(s, "val_loss", "continued") == [0, 1, 2]),
    (
        "train",
        "file of adapter weights to start from",
        lambda s: s.records["continued"][0]["val_loss"] != s.records["full"][0]["val_loss"],
    ),
    ("eval", "number of batches in the test", lambda shop: "Test loss" in shop.out("evaluated")),
    ("generate", "- reads it from standard input", lambda shop: shop.out("asked").startswith(shop.out("quiet"))),
    ("generate", "largest number of tokens in the answer", lambda shop: "3 generated" in str(shop.said["asked"])),
    ("generate", "sample from this number of the likeliest", lambda s: s.out("asked").startswith(s.out("quiet"))),
    ("generate", "sampling temperature", lambda shop: shop.out("asked").startswith(shop.out("quiet"))),
    ("generate", "whether to print speeds", lambda shop: "prompt tokens" not in str(shop.said["quiet"])),
    ("generate", "without a chat template", lambda s: prompt_tokens(s, "plain") < prompt_tokens(s, "asked")),
]


@pytest.mark.parametrize(("command", "sentence", "holds"), TABLE, ids=[f"{each[0]}: {each[1]}" for each in TABLE])
def test_a_sentence_of_the_help_holds(shop, command, sentence, holds):
    assert sentence in " ".join(docs_pages.commands()[command].format_help().split())
    assert holds(shop), shop.records["full"]


def test_the_defaults_that_the_help_names_are_those_of_a_run_without_flags(shop):
    written = options(shop, "adapters")
    written |= written["lora_parameters"]
    stated = {}
    for action in docs_pages.commands()["train"]._actions:
        named = re.search(r"\(default: (\S+)\)$", action.help or "")
        stated |= {action.dest: named[1]} if named else {}
    assert len(stated) > 25
    differing = {name for name, value in stated.items() if str(written[name]) != value}
    # The run was given a number of iterations.
    assert differing == {"iters"}
    assert stated["iters"] == "1000"


# The test that executes what the help says of an option whose sentence does not stand in TABLE.
CLI, DATA, HARNESS, PREFERENCES = (
    "test_cli",
    "data/test_datasets",
    "commands/test_harness",
    "train/preferences/test_losses",
)
GGUF, COLUMNS, GENERATE = "export/test_gguf_file", "data/rows/test_column_hints", "commands/test_generate"
FORMULAS = f"{PREFERENCES}::test_losses_and_gradients_are_those_of_the_formula"
PICTURES = "train/reports/test_vision_samples::test_merged_and_whole_models_prepare_pictures_as_in_training"
HINTS = f"{COLUMNS}::test_columns_of_other_names_are_answered_with_the_flags_that_read_them"
SEVERAL = f"{CLI}::test_train_eval_generate_and_merge_work_together"
ROLLOUTS = "train/rollouts/test_sampled_run"
TRL = "oracle/test_rollouts_replay::test_every_option_of_the_loss_is_in_a_case"
SAMPLING = f"{GENERATE}::test_options_are_refused_before_the_model_is_looked_for"
ELSEWHERE = {
    "--adapter-path": SEVERAL,
    "--apply-chat-template": f"{HARNESS}::test_lm_eval_itself_asks",
    "--base-model": "export/test_peft::test_quantised_base_and_base_model",
    "--batch-size": f"{DATA}::test_too_little_for_a_batch",
    "--beta": FORMULAS,
    "--chat-column": HINTS,
    "--chat-template-config": "commands/test_thinking::test_training_and_generation_ask_behind_the_same_prompt",
    "--chat-turns": f"{DATA}::test_turns_that_count_are_an_option",
    "--clear-cache-threshold": f"{CLI}::test_sizes",
    "--compare": "commands/test_chat::test_base_and_adapter_answer_as_generate_does",
    "--data": f"{CLI}::test_a_data_flag_overrides_the_data_set_of_the_yaml_file",
    "--decay-norm-and-bias": "train/updates/test_weight_decay::test_the_option_lets_norms_decay_too",
    "--dequantize": "models/test_merged_checkpoint::test_quantising_again_is_measured",
    "--dropout": "lora/test_linear::test_dropout_drops_inputs_of_the_update_alone",
    "--extra-eos-token": "commands/test_answer_ends::test_training_names_both_tokens_and_generation_stops_at_either",
    "--force": "patches/test_changed_upstream::test_a_run_that_needs_a_refused_function_ends_before_weights_are_read",
    "--fps": "train/test_videos::test_a_run_learns_and_answers",
    "--from-scratch": f"{CLI}::test_from_scratch_writes_a_checkpoint_that_mlx_lm_loads",
    "--gamma": FORMULAS,
    "--grad-accumulation-steps": "train/updates/test_routers::test_micro_batches_weigh_by_their_targets",
    "--no-grad-checkpoint": f"{CLI}::test_checkpointing_is_a_switch_that_may_be_left_to_the_plan",
    "--grad-checkpoint": f"{CLI}::test_checkpointing_is_a_switch_that_may_be_left_to_the_plan",
    "--image": "train/test_vision::test_eval_and_generate_look_at_images",
    "--include-path": f"{HARNESS}::test_lm_eval_itself_asks",
    "--json": "doctor/test_doctor::test_json_has_everything",
    "--label-smoothing": FORMULAS,
    "--learning-rate": "train/updates/test_optimizer::test_an_update_is_that_of_mlx",
    "--val-split": "data/test_datasets::test_rows_are_held_out_where_nothing_else_validates",
    "--lr-schedule": "train/updates/test_optimizer::test_a_schedule_over_the_run_is_that_of_transformers",
    "--warmup": "train/updates/test_optimizer::test_a_schedule_over_the_run_is_that_of_transformers",
    "--limit": f"{HARNESS}::test_one_command_asks_the_model_with_its_adapter",
    "--llama-cpp": f"{GGUF}::words",
    "--loss": FORMULAS,
    "--loss-variant": FORMULAS,
    "--max-pixels": PICTURES,
    "--max-seq-length": f"{DATA}::test_long_examples_are_cut_and_counted",
    "--memory": "train/by_layer/test_bounded_runs::test_a_bound_that_everything_fits_within_changes_no_result",
    "--min-p": SAMPLING,
    "--min-pixels": PICTURES,
    "--model": SEVERAL,
    "--neftune-noise-alpha": "train/saved/test_resume::test_a_resumed_run_draws_the_same_noise",
    **dict.fromkeys(("--num-generations", "--max-completion-length"), f"{ROLLOUTS}::trainer_of"),
    **dict.fromkeys(("--epsilon", "--epsilon-high", "--num-iterations"), TRL),
    **dict.fromkeys(("--scale-rewards", "--mask-truncated-completions", "--sampler-correction"), TRL),
    **dict.fromkeys(
        ("--temperature", "--top-k"), "models/test_sampled_policy::test_the_policy_is_that_of_its_definition"
    ),
    **dict.fromkeys(("--mtp", "--no-mtp"), "train/test_mtp::test_the_command_line_trains_and_plans"),
    "--mtp-weight": "train/test_mtp::test_a_gradient_through_the_layers_is_an_option",
    "--mtp-trunk-gradient": "train/test_mtp::test_a_gradient_through_the_layers_is_an_option",
    "--draft": "train/test_mtp::test_the_command_line_drafts",
    "--teacher": "train/distillation/test_run::distilling",
    "--lmbda": "train/distillation/test_student_answers::test_a_draw_decides_who_answers_an_update",
    "--num-fewshot": f"{HARNESS}::test_one_command_asks_the_model_with_its_adapter",
    "--output": f"{CLI}::test_mistakes_are_one_message_and_exit_code_2",
    "--outtype": f"{GGUF}::test_types_that_the_converter_does_not_write_go_through_llama_quantize",
    "--pack": "train/test_streamed_runs::test_a_resumed_stream_ends_with_the_same_bits",
    "--parts": "models/vision/test_frozen_tower::test_a_tower_that_trains_stays_in_the_step",
    "--peft": "export/test_peft::imported",
    "--prefill-response": f"{CLI}::test_generation_follows_seed_template_and_prefill",
    "--project-name": "train/reports/test_report::page",
    "--push-to-hub": "export/test_hub::push",
    "--quick": "selftest/test_checks::test_the_quick_selftest_passes_here",
    "--rank-pattern": "lora/test_rank_pattern::test_the_first_pattern_that_matches_sets_the_rank",
    "--report": "train/reports/test_runs::test_several_runs_are_in_one_report",
    "--report-to": "train/saved/test_folder::test_loggers_are_checked_before_loading",
    "--resize-embeddings": "train/test_resized::train",
    "--reward-errors": "rewards/test_rewards::test_a_failure_is_named_with_its_row_and_stops_or_gives_none",
    "--reward-funcs": "rewards/test_rewards::opened",
    "--reward-timeout": "rewards/test_rewards::test_a_failure_is_named_with_its_row_and_stops_or_gives_none",
    "--reward-weights": "rewards/test_rewards::test_weights_are_as_many_as_functions",
    "--router-aux-loss-coef": "train/updates/test_routers::test_micro_batches_weigh_by_their_targets",
    "--router-z-loss-coef": "train/updates/test_routers::test_micro_batches_weigh_by_their_targets",
    "--sample-max-tokens": "train/reports/test_samples::test_a_run_with_samples_has_the_bits_of_one_without",
    "--save-every": "train/saved/test_outputs::test_the_weights_with_the_lowest_loss_are_kept",
    "--save-path": SEVERAL,
    "--scale": "options/test_config::test_alpha_sets_the_scale",
    "--seed": f"{CLI}::test_generation_follows_seed_template_and_prefill",
    "--shuffle-buffer": "data/batches/test_streaming::test_memory_does_not_grow_with_the_data",
    "--steps-per-sample": "train/reports/test_samples::test_samples_are_due_at_their_interval_and_at_the_end",
    "--streaming": "data/batches/test_streaming::test_memory_does_not_grow_with_the_data",
    "--system-prompt": f"{CLI}::test_generation_follows_seed_template_and_prefill",
    "--tasks": f"{HARNESS}::test_one_command_asks_the_model_with_its_adapter",
    "--text-column": HINTS,
    "--to": f"{GGUF}::words",
    "--tools": "commands/test_generate::test_tools_stand_in_the_prompt_of_generate_and_of_chat",
    "--top-p": f"{CLI}::test_generation_follows_seed_template_and_prefill",
    "--train": f"{CLI}::test_every_flag_of_mlx_lm_lora_is_taken_with_the_same_meaning",
    "--trust-remote-code": "models/test_load::test_code_in_a_checkpoint_runs_when_trusted",
    "--verbose": "commands/test_run::test_every_patch_is_named_on_request",
    "--video": "train/test_videos::test_a_run_learns_and_answers",
    "--video-max-frames": "train/test_videos::test_a_run_learns_and_answers",
}


def shown_by(name: str) -> str:
    """The text of a test or of the fixture through which a file's tests run a command."""
    file, _, function = name.partition("::")
    path = ROOT / "tests" / f"{file}.py"
    text = path.read_text()
    nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    node = nodes[function]
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def test_every_option_does_as_its_help_states():
    """An option whose help is a sentence of TABLE, or that is named with a test in ELSEWHERE; none is in neither."""
    left = []
    for command, parser in docs_pages.commands().items():
        for action in parser._actions:
            if not action.option_strings or action.dest == "help":
                continue
            said = any(sentence in (action.help or "") for _, sentence, _ in TABLE)
            if not said and not ELSEWHERE.keys() & set(action.option_strings):
                left.append(f"{command} {action.option_strings[0]}: {action.help}")
    assert not left


@pytest.mark.parametrize("option", ELSEWHERE)
def test_the_test_that_an_option_names_uses_it(option):
    name = option.removeprefix("--").replace("-", "_")
    assert re.search(rf"{option}(?![\w-])|\b{name}\b", shown_by(ELSEWHERE[option])), f"{option}: {ELSEWHERE[option]}"
