"""A session with a model: loaded with its adapter, checked, patched, and within a bound of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..data.chats.rendering import Renderer
from ..data.example import Example
from ..data.rows.row_formats import tools_of
from ..errors import UserError, reason
from ..lora.adapter_files import template_options
from ..machine.compiling import without_kernels
from ..models.adapted_base import folder_of, load, put_adapter
from ..models.checkpoint_files import is_trained_checkpoint
from ..models.generate import Sampling, draft_speeds
from ..models.head import Likelihood, Split, scored, split_head
from ..models.load import Loaded, refuse_unserved
from ..options.generation import AnswerOptions
from ..options.values import parsed_options, short
from ..patches import INFERENCE, patched
from ..patches.whole_rows import whole_rows
from ..train.by_layer.layer_calls import LayerCalls, passed_on
from ..train.by_layer.store import Store
from ..train.evaluation.evaluate import evaluating, inferring, say_loss
from ..train.evaluation.inference import Inference
from ..train.evaluation.nonfinite import explained
from ..train.reports.screen import Fact, Screen
from ..train.setup import Run


class PlannedWeights(Protocol):
    """The places of a model's weights within a bound of memory, as a plan chooses them (plan.placement.Placement)."""

    def said(self, unit: str) -> list[Fact | str]:
        """Return the lines on it, where every `unit` reads all layers once."""

    def of(self, model: nn.Module) -> Store | None:
        """Read the weights that stay in memory; return the store of the others, or None without any."""

    def limit(self) -> int:
        """Return the bytes from which on MLX waits for queued work."""


class Session(Inference):
    """A model that answers, scores texts and has a loss; files that a limit of memory opens are closed with it.

    With a bound of memory the model was loaded lazily and without its adapter. If `chat`, answers end where the chat
    template ends them, too.

    Example:
        with Session.open(AnswerOptions("path/to/model", adapter_path="adapters")) as session:
            pieces = session.answer(Prompt(tokens), max_tokens=100)
    """

    def __init__(
        self,
        loaded: Loaded,
        options: AnswerOptions | None = None,
        *,
        chat: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ):
        options = options or AnswerOptions(str(loaded.path))
        sampling = Sampling(options.temp, options.top_p, options.min_p, options.top_k)
        super().__init__(loaded, sampling, chat=chat, extra_ends=options.extra_eos_token, draft=options.draft)
        self.template_options = template_options
        self._options = options
        self._placed = False
        self._stack = contextlib.ExitStack()
        self._calls: LayerCalls | None = None
        self._split: Split | None = None

    @classmethod
    def open(cls, options: AnswerOptions, *, media: str | None = None, chat: bool = True) -> Session:
        """Load a model with its adapter, and refuse options that it cannot serve.

        `media` names the flag and the file of the first image or video, as messages do; None is for text. UserError
        where an option or a file is not valid, or results depend on a function that runs upstream's code.
        """
        if options.seed is not None:
            mx.random.seed(options.seed)
        variables = _template_options(options)
        if not options.force:
            folder = folder_of(options.model, options.adapter_path)
            refuse_unserved(folder, (INFERENCE,), image=media, trust_remote_code=options.trust_remote_code)
        loaded = _load(options, media)
        _check_tokens(options, loaded)
        _check_tools(options, loaded.tokenizer, variables)
        return cls(loaded, options, chat=chat, template_options=variables)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def place(self, plan: Callable[[nn.Module, Store, int], PlannedWeights], unit: str) -> None:
        """Let the layers that do not fit in memory read their weights, and say on standard error which these are.

        Without a bound of memory nothing is done. A later call plans anew, with the model loaded anew. `plan` gets the
        bound in bytes, and `unit` names the pass that reads all layers once. UserError where memory is too little; the
        session is then as it was before.
        """
        if self._options.memory is None:
            return
        media = None if self.loaded.processor is None else "--image"
        loaded = _load(self._options, media) if self._placed else self.loaded
        planned = plan(loaded.model, store_of(loaded, self._options), self._options.memory)
        if self._placed:
            # The arrays of the model before it go before anything else is read.
            self._stack.close()
            self.weights = None
            self._calls = None
            self._split = None
            self.loaded = dataclasses.replace(self.loaded, model=loaded.model)
            gc.collect()
        self._placed = True
        for fact in planned.said(unit):
            print(fact, file=sys.stderr)
        self._read(planned)
        self._limit(planned.limit() + (0 if self.weights is None else self.weights.on_host))
        if self.weights is not None:
            self._calls = self.weights.calls()
            self._stack.enter_context(self._calls.watched())

    def _read(self, planned: PlannedWeights) -> None:
        """Read the weights that stay in memory; the files of the others are closed with the session."""
        self.weights = planned.of(self.model)
        if self.weights is not None:
            self._stack.callback(self.weights.close)

    def _limit(self, memory: int) -> None:
        """Let MLX wait for queued work above so many bytes, until the session closes its files."""
        self._stack.callback(mx.set_memory_limit, mx.set_memory_limit(memory))

    def score(self, rows: Sequence[Sequence[int]], counts: Sequence[int], batch_size: int) -> list[Likelihood]:
        """Score so many tokens at the end of each row, by deltatune's operators; only they get logits.

        `batch_size` rows are read at once. NoResultError where a log-likelihood is not finite.
        """
        # Texts of like length share a batch, the longest first.
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        scores: dict[int, Likelihood] = {}
        with explained(self.loaded, self.weights), without_kernels(), patched(), evaluating(self.model):
            split = self._parts()
            with whole_rows():
                for start in range(0, len(order), batch_size):
                    batch = order[start : start + batch_size]
                    texts = [rows[number] for number in batch]
                    scores |= zip(batch, scored(self.model, split, texts, [counts[at] for at in batch]), strict=True)
        return [scores[number] for number in range(len(rows))]

    def _parts(self) -> Split:
        """Return the model's parts before and behind its head, which are compared with the whole once."""
        if self._split is None:
            with contextlib.nullcontext() if self._calls is None else self._calls.served_by(passed_on):
                self._split = split_head(self.model)
        return self._split

    def loss(self, run: Run, screen: Screen, plan: Callable[[Run, Store], PlannedWeights]) -> float:
        """Compute the loss per token on the test set of a run with the session's model, print and return it.

        `plan` places the weights where the run's option `memory` bounds it. NoResultError where the loss is not finite.
        """
        if run.config.memory is not None:
            planned = plan(run, store_of(run.loaded, self._options))
            for fact in planned.said("batch"):
                screen.say(fact)
            self._read(planned)
            if self.weights is None:
                self._limit(planned.limit())
        return say_loss("Test", run.model, run.config, run.splits.test, run.world, screen, self.weights)

    def draft_speeds(self, examples: Sequence[Example], max_tokens: int) -> str:
        """Return a sentence on drafts in answers to the prompts of examples, and to the first half of plain texts."""
        prompts = [
            example.prompt.tokens if example.prompt.positions else example.tokens[: len(example.tokens) // 2]
            for example in examples
        ]
        with inferring(self.model):
            return draft_speeds(self.loaded, [prompt.tolist() for prompt in prompts], max_tokens)


def _load(options: AnswerOptions, media: str | None) -> Loaded:
    """Load the model with its adapter; lazily and without it where memory is bounded."""
    bounded = options.memory is not None
    return load(
        options.model,
        options.adapter_path,
        bare=bounded,
        mtp=options.draft,
        lazy=bounded,
        trust_remote_code=options.trust_remote_code,
        image=media,
    )


def store_of(loaded: Loaded, options: AnswerOptions) -> Store:
    """Put the adapter on a model that was loaded lazily, of which nothing trains; return the store of its weights."""
    stored = Store(loaded.path, loaded.model, trust_remote_code=options.trust_remote_code)
    if options.adapter_path and not is_trained_checkpoint(Path(options.adapter_path)):
        put_adapter(loaded, options.adapter_path)
    loaded.model.freeze()
    loaded.model.eval()
    stored.find(loaded.model)
    return stored


def _template_options(options: AnswerOptions) -> dict[str, Any]:
    """Return the variables of the chat template: those that the adapter was trained with, then those of the option."""
    text = options.chat_template_config
    asked = {} if text is None else parsed_options(text, "--chat-template-config", prompt=True)
    if options.tools is not None:
        source = f"--tools {options.tools}"
        try:
            content = Path(options.tools).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source}: cannot be read ({reason(error)}); give a JSON file.") from error
        asked["tools"] = tools_of({"tools": content}, source)
    return template_options(options.adapter_path, asked)


def _check_tools(options: AnswerOptions, tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Refuse tools that the chat template would leave out."""
    if options.tools is None:
        return
    template = Renderer(tokenizer).template(variables["tools"]) if tokenizer.has_chat_template else ""
    if template is not None and "tools" not in template:
        raise UserError(
            "--tools: the model has no chat template that describes tools; write them into --system-prompt."
        )


def _check_tokens(options: AnswerOptions, loaded: Loaded) -> None:
    """Refuse tokens beyond the model's, more candidates than it has tokens, and unknown code."""
    with patched(loaded.model, strict=not options.force, uses=(INFERENCE,)):
        pass  # It is refused before anything is generated.
    known = loaded.tokenizer.get_vocab()
    if options.top_k >= len(known):
        raise UserError(
            f"--top-k: expected at most {len(known) - 1}, since the model has {len(known):,} tokens; "
            f"got {options.top_k}."
        )
    numbers = {str(number) for number in known.values()}
    for token in options.extra_eos_token:
        if token not in known and token not in numbers:
            raise UserError(f"--extra-eos-token: {short(token)} is no token of this model, and no token's number.")
