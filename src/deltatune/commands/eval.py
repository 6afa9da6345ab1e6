"""`deltatune eval` prints the loss and perplexity of a model on the test set, or its figures on tasks of lm-eval."""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import UserError, first_line
from ..machine import startup
from ..options.conditions import TASKS, TRAINING, refuse_unread
from ..options.config import TrainConfig
from ..options.generation import AnswerOptions, TaskOptions
from .flags import add_adapter, add_fields, add_options, config_from, flag_names, given_flags, require

if TYPE_CHECKING:
    from collections.abc import Mapping

# The options of a run on which its loss on the test set depends.
OPTIONS = (
    "model", "data", "batch_size", "test_batches", "max_seq_length", "overlong", "mask_prompt", "chat_turns",
    "chat_template_config", "pack", "seed", "min_pixels", "max_pixels", "fps", "video_max_frames",
    "prompt_feature", "completion_feature", "chat_feature", "text_feature",
    "memory", "trust_remote_code", "force",
)  # fmt: skip
# Where none is given, evaluate() takes the value with which the adapter was trained.
_OF_ADAPTER = ("chat_template_config", "min_pixels", "max_pixels", "fps", "video_max_frames")

# Of so many rows of the test set, answers of so many tokens show the speeds with drafts and without.
_DRAFTED_ANSWERS = 4
_DRAFTED_TOKENS = 64

HELP = "print loss and perplexity on test.jsonl, or figures on tasks of lm-eval"


def add(parser: argparse.ArgumentParser) -> None:
    add_adapter(parser)
    add_options(parser, OPTIONS, _OF_ADAPTER)
    parser.add_argument(
        "--draft",
        action="store_true",
        help="also print the loss of the multi-token-prediction head, the share of its tokens that are accepted, and "
        "the speeds of answers with its drafts and without",
    )
    add_fields(parser.add_argument_group("tasks of lm-eval, in place of data"), TaskOptions)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate the model that the arguments name and return exit code 0."""
    adapter = arguments.adapter_path
    arguments.adapter_path = None
    tasks = TaskOptions(**given_flags(TaskOptions, arguments))
    config = config_from(arguments, trains=False)
    flags = flag_names(TrainConfig, given_flags(TrainConfig, arguments))
    require(config, "eval", *(["model"] if tasks.tasks is not None else ["model", "data"]))
    if tasks.tasks is not None:
        refuse_unread(TASKS, flags | ({"draft": "--draft"} if arguments.draft else {}), tasks)
        evaluate_tasks(config, tasks, adapter)
        return 0
    if not config.trust_remote_code:
        startup.leave_torch_out()
    evaluate(config, adapter, flags, draft=arguments.draft)
    return 0


def evaluate_tasks(config: TrainConfig, options: TaskOptions, adapter_path: str | None) -> dict[str, Any]:
    """Print and return the figures of a model, alone or with an adapter, on tasks of lm-eval, by task.

    Of the options of a run, the model, batch_size and max_seq_length matter here. Without lm-eval, for a task that it
    does not know, or where a task's data cannot be loaded, a UserError says so.
    """
    try:
        from ..answering.harness import HarnessModel, named_tasks, put_tasks
    except ImportError as error:
        raise UserError(
            f"--tasks: lm-eval cannot be used ({first_line(error)}); pip install 'deltatune[lm-eval]'."
        ) from error
    from ..answering.session import Session
    from ..plan.forward_placement import placed_tasks

    names = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    tasks, manager = named_tasks(names, options.include_path)
    rows = config.batch_size
    length = config.max_seq_length
    with Session.open(_session_options(config, adapter_path), chat=options.apply_chat_template) as session:
        if options.apply_chat_template and not session.tokenizer.has_chat_template:
            raise UserError("--apply-chat-template: the model's tokenizer has no chat template; leave it out.")
        session.place(partial(placed_tasks, rows=rows, length=length), "pass")
        figures, table = put_tasks(
            HarnessModel(session, rows, length),
            tasks,
            manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=options.apply_chat_template,
        )
    print(table)
    return figures


def _session_options(config: TrainConfig, adapter_path: str | None) -> AnswerOptions:
    variables = config.chat_template_config
    return AnswerOptions(
        str(config.model),
        adapter_path=adapter_path,
        chat_template_config=None if variables is None else json.dumps(variables),
        memory=config.memory,
        trust_remote_code=config.trust_remote_code,
        force=config.force,
    )


def evaluate(
    config: TrainConfig, adapter_path: str | None, flags: Mapping[str, str] | None = None, *, draft: bool = False
) -> float:
    """Print and return a model's loss per token on the test set.

    `flags` are refused, as by refuse_unread(), where the test set does not read them; with `draft` the
    multi-token-prediction head is evaluated as well.
    """
    from ..answering.session import Session
    from ..data.vision.media import picture_options
    from ..lora.adapter_files import template_options
    from ..plan.forward_placement import placed_evaluation
    from ..train.reports.screen import Screen
    from ..train.setup import ready

    if draft and config.memory is not None:
        raise UserError("--draft: the head is evaluated with the whole model in memory; leave --memory out.")
    variables = template_options(adapter_path, config.chat_template_config) or None
    pictures = picture_options(vars(config), adapter_path)
    config = dataclasses.replace(
        config, train=False, test=True, from_scratch=False, mtp=draft, chat_template_config=variables, **pictures
    )
    run = ready(config, lazy=config.memory is not None, adapter_path=adapter_path)
    refuse_unread(TRAINING, flags or {}, config, run.splits.facts)
    screen = Screen(shown=run.world.main, plain=run.world.size > 1)
    for line in [run.splits.rule, *run.splits.notes, *run.notes]:
        screen.say(line)
    with Session(run.loaded, _session_options(config, adapter_path), chat=False) as session:
        loss = session.loss(run, screen, placed_evaluation)
        if draft:
            screen.say(session.draft_speeds(run.splits.test[:_DRAFTED_ANSWERS], _DRAFTED_TOKENS))
    return loss
