"""Lets lm-eval, EleutherAI's evaluation harness, put its tasks to a model. It needs the package lm-eval."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import datasets
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from ..data.prompts import conversation_text, text_tokens
from ..errors import UserError, first_line
from ..models.batch_decoder import ROWS
from ..models.head import Likelihood
from ..options.values import nearest
from .session import Session

# The tokens of an answer, where a task does not say how many it may have: lm-eval's own number.
_ANSWER_TOKENS = 256
# The names under which a task may say it; the first that is there counts, as in lm-eval.
_LONGEST = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(TemplateLM):
    """A model as lm-eval asks it: log-likelihoods of continuations, and greedy answers.

    `batch_size` texts are scored at once, and as many prompts answered where layers read their weights. The model reads
    `max_length` tokens at most; earlier ones are cut off. A likelihood that is not finite ends with a UserError.
    """

    def __init__(self, session: Session, batch_size: int, max_length: int):
        super().__init__()
        self._session = session
        self.tokenizer = session.tokenizer
        self._batch_size = batch_size
        self.max_length = max_length

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token behind which a text without a context stands: the one that begins a text, if there is one."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            return text_tokens(self.tokenizer, string)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        remedy = "leave out --apply-chat-template"
        options = self._session.template_options
        return conversation_text(self.tokenizer, chat_history, remedy, options, prefilled=not add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[Likelihood]:
        """Return the log-likelihood of each continuation, and whether it is the likeliest token at every step."""
        counts = [len(continuation) for *_, continuation in requests]
        if max(counts, default=0) > self.max_length:
            raise UserError(
                f"--tasks: an answer to score has {max(counts):,} tokens, more than --max-seq-length "
                f"{self.max_length:,}; raise it."
            )
        rows = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        return self._session.score(rows, counts, self._batch_size)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text behind prefix_token_id, in windows of `max_length` tokens.

        Where a tokenizer begins a text with that token, it is no word of the text, and is not scored.
        """
        totals = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            prefix = self.prefix_token_id
            windows = get_rolling_token_windows(
                token_list=tokens[1:] if tokens[:1] == [prefix] else tokens,
                prefix_token=prefix,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, always of the likeliest tokens, up to the first of its stop texts."""
        groups: dict[int, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            options = request.args[1]
            temperature = float(options.get("temperature", 0.0 if options.get("do_sample") is None else 1.0))
            if options.get("do_sample") is not False and temperature != 0:
                raise UserError("--tasks: one of them draws its answers at random, and only likeliest ones are given.")
            most = int(next((options[name] for name in _LONGEST if options.get(name) is not None), _ANSWER_TOKENS))
            if most >= self.max_length:
                raise UserError(
                    f"--tasks: one of them asks for answers of {most:,} tokens, which leaves no room for a prompt in "
                    f"--max-seq-length {self.max_length:,}; raise it."
                )
            groups[most].append(number)
        answers = [""] * len(requests)
        for most, numbers in groups.items():
            prompts = [self.tok_encode(requests[number].args[0])[most - self.max_length :] for number in numbers]
            rows = ROWS if self._session.weights is None else self._batch_size
            continued = self._session.answer_all(prompts, most, rows)
            for number, tokens in zip(numbers, continued, strict=True):
                answers[number] = self._text(tokens, requests[number].args[1].get("until") or [])
        return answers

    def _text(self, tokens: list[int], until: str | list[str]) -> str:
        """Return the text of an answer before the first of the stop texts, without special tokens, as lm-eval's own."""
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]

        def stopped(end: int) -> bool:
            written = self.tokenizer.decode(tokens[:end])
            return any(stop in written for stop in stops)

        # A stop text may be a special token, which the text of the answer lacks.
        end = bisect_left(range(len(tokens)), True, key=stopped)
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return text


def named_tasks(names: Sequence[str], include_path: str | None = None) -> tuple[list[str], TaskManager]:
    """Return the tasks, groups and tags that the names or patterns stand for, and lm-eval's manager of them.

    UserError where a name stands for none.
    """
    manager = TaskManager(include_path=include_path)
    for name in names:
        if not manager.match_tasks([name]):
            raise UserError(
                f"--tasks: {name!r} is no task of lm-eval{nearest(name, list(manager.all_tasks))}; `lm-eval ls tasks` "
                "lists them, and --include-path names a folder with your own."
            )
    return manager.match_tasks(list(names)), manager


def put_tasks(model: HarnessModel, tasks: list[str], manager: TaskManager, **options: Any) -> tuple[dict, str]:
    """Put the tasks of named_tasks() to a model; return the figures of each, by its name, and lm-eval's table of them.

    Further arguments are those of `lm_eval.simple_evaluate`, such as num_fewshot. UserError where the data of a task
    cannot be loaded.
    """
    try:
        results = simple_evaluate(model=model, tasks=tasks, task_manager=manager, **options)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"--tasks: the data of a task cannot be loaded: {first_line(error)}") from error
    return results["results"], make_table(results)
