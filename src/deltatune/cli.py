"""The command line: `deltatune train | plan | eval | generate | merge | run | doctor | selftest | demo`."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, NoReturn

from .commands import selftest
from .config import TrainConfig, build, nearest, read_yaml
from .errors import UserError

_EVAL_OPTIONS = (
    "model", "data", "batch_size", "test_batches", "max_seq_length", "overlong", "mask_prompt", "pack", "seed",
    "min_pixels", "max_pixels", "fps", "video_max_frames",
    "trust_remote_code",
)  # fmt: skip
_SIZES = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}


class _Parser(argparse.ArgumentParser):
    """argparse, with the nearest known flag or command in its errors, and no abbreviations."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown and unknown[1].startswith("-"):
            known = [string for action in self._actions for string in action.option_strings]
            message = f"unknown option {unknown[1]}{nearest(unknown[1].split('=')[0], known)}"
        command = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if command:
            known = [word.strip(" '") for word in command[2].split(",")]
            message = message.split(": ", 1)[0] + f": {command[1]!r} is not one of {', '.join(known)}"
            message += nearest(command[1], known)
        sys.stderr.write(f"{self.prog}: {message}\nSee {self.prog} --help.\n")
        raise SystemExit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Python's own sends leftovers of a subcommand to the outer parser, which knows none of its flags.
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            getattr(found, "parser", self).error(f"unrecognized arguments: {' '.join(rest)}")
        return found


def size(text: str) -> int:
    """Bytes from `4GB`, `500MB` or a plain number."""
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text.strip())
    try:
        if match:
            return int(Decimal(match[1]) * _SIZES[match[2].upper()])
    except (InvalidOperation, KeyError):
        pass
    raise argparse.ArgumentTypeError(f"expected a size such as 4GB or 500MB, got {text!r}")


def _add_option(group: Any, field: dataclasses.Field) -> None:
    """The flag of one option. Its own default is None, so that a YAML file can tell what was given."""
    name = "--" + field.name.replace("_", "-")
    default = field.default
    shown = "" if default in (None, False, True, dataclasses.MISSING) else f" (default: {default})"
    text = (field.metadata["help"] + shown).replace("%", "%%")
    kind = str(field.type)
    if field.name == "train":
        group.add_argument(name, action="store_true", default=None, help=text)
    elif kind.startswith("bool"):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        convert: Callable[[str], Any] = {"int": int, "float": float}.get(kind.split(" ")[0], str)
        if field.name == "clear_cache_threshold":
            convert = size
        choices = field.metadata["choices"] or None
        metavar = None if choices else {int: "N", float: "X", size: "SIZE"}.get(convert, "TEXT")
        group.add_argument(name, type=convert, default=None, choices=choices, metavar=metavar, help=text)


def _add_options(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        if not field.metadata["flag"] or (names is not None and field.name not in names):
            continue
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_option(groups[title], field)


def config_from(arguments: argparse.Namespace) -> TrainConfig:
    """The options of a run: flags first, then the YAML file's, then the defaults."""
    values: dict[str, Any] = {}
    file = getattr(arguments, "config", None)
    if file is not None:
        values = read_yaml(file)
        # mlx_lm.lora's own default file writes null where it means its default.
        values = {key: value for key, value in values.items() if value is not None}
    build(TrainConfig, values, str(file))
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    values |= {key: value for key, value in vars(arguments).items() if key in names and value is not None}
    return build(TrainConfig, values, str(file or "options"))


def _train(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    # Imported when the options are known to be sound: it takes seconds.
    from .diagnose.plan.command import check
    from .train import commands

    commands.train(config, show=arguments.show_batch, check=partial(check, force=arguments.force))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    from .diagnose.plan import command

    return command.run(config)


def _evaluate(arguments: argparse.Namespace) -> int:
    adapter = arguments.adapter_path
    arguments.adapter_path = None
    config = config_from(arguments)
    from .train import commands

    commands.evaluate(config, adapter)
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from .train import commands

    known = {field.name for field in dataclasses.fields(commands.GenerateOptions)}
    given = {key: value for key, value in vars(arguments).items() if key in known and value is not None}
    commands.generate(commands.GenerateOptions(**given))
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from .models.merge import merge_checkpoint

    done = merge_checkpoint(arguments.model, arguments.adapter_path, arguments.save_path, arguments.dequantize)
    print(f"Merged into {done.path}: {len(done.changed)} tensors changed, the others as they were.")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from .patches.run import run

    return run(arguments.command)


def _doctor(arguments: argparse.Namespace) -> int:
    from .diagnose import doctor

    return doctor.run(arguments.json, arguments.model)


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.kind == "vision":
        from .demo.vision import run_demo as run_vision_demo

        return run_vision_demo(arguments.output or "demo-vision-out")
    from .demo import run_demo

    return run_demo(arguments.output or "demo-out")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(prog="deltatune", description="Fine-tune hybrid gated-delta models with MLX.")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _train_parser(commands)
    _plan_parser(commands)
    _eval_parser(commands)
    _generate_parser(commands)
    _merge_parser(commands)
    run = commands.add_parser("run", help="run another MLX trainer with these gradients in it")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    run.set_defaults(call=_run, parser=run)
    doctor = commands.add_parser(
        "doctor", help="versions, device, BLAS, kernels, known faults, patches: is training right here?"
    )
    doctor.add_argument("--model", metavar="TEXT", help="a model to look at too: its layers, and what they train with")
    doctor.add_argument("--json", action="store_true", help="print all of it, with every error measured, as JSON")
    doctor.set_defaults(call=_doctor, parser=doctor)
    selftest.add(commands)
    demo = commands.add_parser("demo", help="train on the bundled model and data; shows accuracy before and after")
    demo.add_argument(
        "kind", nargs="?", choices=("text", "vision"), default="text", help="messages (default), or pictures"
    )
    demo.add_argument("--output", metavar="DIR", help="folder for its files (default: demo-out; demo-vision-out)")
    demo.set_defaults(call=_demo, parser=demo)
    return top


def _train_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="fine-tune a model: LoRA by default",
        usage="deltatune train --model MODEL --data DATA [-c FILE] [options]",
        description="Fine-tune a model. Options are those of mlx_lm.lora wherever it has one; a YAML file (-c) has "
        "lora_parameters, lr_schedule, optimizer_config and hf_dataset besides (docs/options.md).",
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file with options; flags win over it")
    parser.add_argument(
        "--show-batch", action="store_true", help="print the first batch, what counts in the loss marked, and stop"
    )
    parser.add_argument("--force", action="store_true", help="train even where the plan says that it cannot fit")
    _add_options(parser)
    parser.set_defaults(call=_train, parser=parser)


def _plan_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="peak memory and live buffers of a training step, and the largest that fits, before anything runs",
        usage="deltatune plan --model MODEL --data DATA [-c FILE] [train's options]",
        description="Plan a run without running a step: options are those of `deltatune train` (docs/plan.md). Exit "
        "code 1 where it does not fit.",
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file with options; flags win over it")
    _add_options(parser)
    parser.set_defaults(call=_plan, parser=parser)


def _eval_parser(commands: Any) -> None:
    parser = commands.add_parser("eval", help="loss and perplexity on test.jsonl, with or without an adapter")
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file with options; flags win over it")
    parser.add_argument("--adapter-path", metavar="DIR", help="adapter to put on the model (default: none)")
    _add_options(parser, _EVAL_OPTIONS)
    parser.set_defaults(call=_evaluate, parser=parser)


def _generate_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help="let a model, with or without an adapter, answer a prompt")
    add = parser.add_argument
    add("--model", required=True, metavar="TEXT", help="folder of the model, or its name on the Hugging Face hub")
    add("--adapter-path", metavar="DIR", help="adapter to put on the model (default: none)")
    add("--prompt", "-p", required=True, metavar="TEXT", help="the user's message; - reads it from the input")
    add("--system-prompt", metavar="TEXT", help="system message for the chat template")
    add("--prefill-response", metavar="TEXT", help="how the answer begins")
    add("--max-tokens", "-m", type=int, metavar="N", help="longest answer, in tokens (default: 100)")
    add("--temp", type=float, metavar="X", help="sampling temperature; 0 takes the likeliest token (default: 0)")
    add("--top-p", type=float, metavar="X", help="sample from the likeliest tokens of this total probability")
    add("--min-p", type=float, metavar="X", help="leave out tokens below this share of the likeliest one's probability")
    add("--top-k", type=int, metavar="N", help="sample from so many of the likeliest tokens")
    add("--seed", type=int, metavar="N", help="seed of the sampling")
    add("--ignore-chat-template", action="store_true", help="take the prompt as it is")
    add("--chat-template-config", metavar="JSON", help='options of the chat template, as {"enable_thinking": false}')
    add(
        "--image",
        nargs="+",
        metavar="FILE",
        help="images before the prompt, for a model with a vision tower",
    )
    add("--video", nargs="+", metavar="FILE", help="videos before the prompt, or the images that are the frames of one")
    add("--fps", type=float, metavar="X", help="frames a second to take from --video; default: the model's own")
    add("--video-max-frames", type=int, metavar="N", help="most frames to take of --video; default: the model's own")
    add("--extra-eos-token", nargs="+", metavar="TEXT", help="more tokens that end an answer")
    add("--verbose", type=lambda text: text.lower() not in ("false", "f"), metavar="BOOL", help="speeds after the text")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model or tokenizer")
    parser.set_defaults(call=_generate, parser=parser)


def _merge_parser(commands: Any) -> None:
    parser = commands.add_parser("merge", help="fold an adapter into a full checkpoint")
    add = parser.add_argument
    add("--model", required=True, metavar="TEXT", help="folder of the base model, or its name on the hub")
    add("--adapter-path", default="adapters", metavar="DIR", help="the adapter (default: adapters)")
    add("--save-path", default="fused_model", metavar="DIR", help="new folder for the result (default: fused_model)")
    add("--dequantize", action="store_true", help="write a quantised base as plain weights")
    parser.set_defaults(call=_merge, parser=parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. 2, with one message on standard error, for what the user can mend."""
    try:
        arguments = parser().parse_args(argv)
        return arguments.call(arguments)
    except UserError as error:
        sys.stderr.write(f"deltatune: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("deltatune: interrupted.\n")
        return 2
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
