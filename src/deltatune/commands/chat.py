"""`deltatune chat` talks to a model, with an adapter, without it, or with both."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import NoResultError, UserError
from ..machine import startup
from ..options.generation import ChatOptions
from ..wrapping import say
from .answering import (
    add_sampling,
    check_served,
    check_tokens,
    planned,
    reading,
    sampling_of,
    trained_template_options,
)
from .flags import add_adapter, add_model, given_flags

if TYPE_CHECKING:
    from ..models.load import Loaded
    from ..plan.placement import Placed
    from ..train.by_layer.layer_weights import LayerWeights
    from ..train.dialogue import Dialogue

_HELP = "q ends the conversation, r forgets it, h prints this"
_COMPARED = ", c asks the base too, or no more"
# Memory is planned for a conversation of so many tokens at first, and for twice as many where it is longer.
_TOKENS = 2048


def add(commands: Any) -> None:
    """Add the command and its flags to the command line."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model, with an adapter, without it, or with both",
        description="Talk to a model. Ctrl-C ends an answer, and the conversation where none is being given.",
    )
    add_model(parser, "folder of the model")
    add_adapter(parser)
    parser.add_argument("--compare", action="store_true", help="ask the base too, and print its answers first")
    parser.add_argument("--system-prompt", type=str, metavar="TEXT", help="system message at the beginning")
    add_sampling(parser.add_argument, ChatOptions.max_tokens)
    parser.set_defaults(call=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user ends it, and return exit code 0."""
    options = ChatOptions(**given_flags(ChatOptions, arguments))
    if not options.trust_remote_code:
        startup.leave_torch_out()
    Chat(options).talk()
    return 0


class Chat:
    """A conversation on the terminal.

    Args:
        options: What the user asked for.
    """

    def __init__(self, options: ChatOptions):
        import mlx.core as mx

        from ..lora.without import can_be_without

        if options.seed is not None:
            mx.random.seed(options.seed)
        self._options, self._compares = options, options.compare
        self._template = trained_template_options(options)
        check_served(options)
        self._stack = contextlib.ExitStack()
        self._loaded, bounded = self._load(), options.memory is not None
        check_tokens(options, self._loaded)
        # For how many tokens of a conversation memory is planned; 0 without a bound.
        self._room = _TOKENS if bounded else 0
        weights = self._placed(planned(options, self._loaded, [0] * _TOKENS)) if bounded else None
        self._can_compare = options.adapter_path is not None and (not bounded or can_be_without(self._loaded.model))
        if options.compare and not self._can_compare:
            self._stack.close()
            raise UserError(
                "--compare: what was trained here cannot be taken off the model, and --memory is the bound of one "
                "model; leave one of them out."
            )
        self._answering = self._conversation(self._loaded, weights)
        self._base: Dialogue | None = None

    def talk(self) -> None:
        """Read questions and print answers, until `q`, the end of the input, or Ctrl-C between answers."""
        adapter = f", {self._options.adapter_path}" if self._options.adapter_path else ""
        say(f"{self._options.model}{adapter}. {self._help()}.")
        with self._stack, contextlib.suppress(EOFError, KeyboardInterrupt):
            while (question := self._read()) != "q":
                self._obey(question)

    def _help(self) -> str:
        return _HELP + (_COMPARED if self._can_compare else "")

    def _read(self) -> str:
        """Return a question; a pipe, whose reader wants answers alone, gets no prompt."""
        if sys.stdin is None:
            raise EOFError
        try:
            if sys.stdin.isatty():
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401 (it lets input() edit a line and recall the last ones)
                return input(">> ").strip()
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UserError(
                f"chat: standard input is not {error.encoding} ({error.reason}); give text in that encoding."
            ) from error
        if not line:
            raise EOFError
        return line.strip()

    def _obey(self, question: str) -> None:
        """Do what one of the letters asks for, or answer."""
        if question == "h":
            say(f"{self._help()}.")
        elif question == "r":
            for conversation in (self._answering, self._base):
                if conversation is not None:
                    conversation.reset()
            print("What was said is forgotten.", flush=True)
        elif question == "c" and self._can_compare:
            self._compares = not self._compares
            print("The base answers, too." if self._compares else "The adapter answers alone.", flush=True)
        elif question:
            self._answer(question)

    def _load(self) -> Loaded:
        """Load the model with its adapter; lazily and without it, where memory is bounded."""
        from ..models.adapted_base import load_with_adapter

        options = self._options
        bounded, trusted = options.memory is not None, options.trust_remote_code
        return load_with_adapter(
            options.model, options.adapter_path, bare=bounded, lazy=bounded, trust_remote_code=trusted
        )

    def _placed(self, where: Placed) -> LayerWeights | None:
        """Let the layers of the model read their weights; return what from, or None where all stay in memory."""
        assert self._options.memory is not None
        read_layers = reading(where, self._loaded, "token", self._stack)
        return None if read_layers is None else read_layers.weights

    def _make_room(self, question: str) -> None:
        """Plan memory anew where a question ends a longer conversation than was planned for.

        Raises:
            UserError: Memory is too little for it, or the chat template refuses it.
        """
        if not self._room:
            return
        dialogues = [dialogue for dialogue in (self._answering, self._base) if dialogue is not None]
        tokens, room = max(len(dialogue.prompt(question)) for dialogue in dialogues), self._room
        while room < tokens:
            room *= 2
        if room == self._room:
            return
        say(f"The conversation has {tokens:,} tokens. Memory is planned anew, for {room:,}.", sys.stderr)
        loaded = self._load()
        where = planned(self._options, loaded, [0] * room)
        # What was read for shorter conversations goes before anything else is read.
        self._stack.close()
        self._loaded, self._room = dataclasses.replace(self._loaded, model=loaded.model), room
        for dialogue in dialogues:
            dialogue.go_on(loaded.model, None)
        gc.collect()
        weights = self._placed(where)
        for dialogue in dialogues:
            dialogue.go_on(loaded.model, weights)

    def _answer(self, question: str) -> None:
        try:
            self._make_room(question)
        except UserError as error:
            say(f"deltatune: {error}", sys.stderr)
            return
        if not self._compares:
            self._print(self._answering, question)
            return
        with self._bare() as base:
            print("base:")
            went_on = self._print(base, question)
        if went_on:
            print("adapter:")
            self._print(self._answering, question)

    def _print(self, conversation: Dialogue, question: str) -> bool:
        """Print an answer as it comes; return False where Ctrl-C ended it."""
        pieces = conversation.ask(question)
        try:
            for piece in pieces:
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            print(" ...", flush=True)
            return False
        except NoResultError:
            # The history of a conversation would hold it.
            raise
        except UserError as error:
            # What the template refuses costs the question, not the conversation.
            say(f"deltatune: {error}", sys.stderr)
            return False
        finally:
            pieces.close()
        print(flush=True)
        return True

    @contextlib.contextmanager
    def _bare(self) -> Iterator[Dialogue]:
        """Yield a conversation with the base, of which it has heard the questions that were put to both."""
        from ..lora.without import can_be_without, without_adapters
        from ..models.load import load

        shared = can_be_without(self._loaded.model)
        if self._base is None:
            options = self._options
            base = self._loaded if shared else load(options.model, trust_remote_code=options.trust_remote_code)
            self._base = self._conversation(base)
        with without_adapters(self._loaded.model) if shared else contextlib.nullcontext():
            yield self._base

    def _conversation(self, loaded: Loaded, weights: LayerWeights | None = None) -> Dialogue:
        from ..train.dialogue import Dialogue

        options = self._options
        for token in options.extra_eos_token:
            loaded.tokenizer.add_eos_token(token)
        return Dialogue(
            loaded,
            system_prompt=options.system_prompt,
            max_tokens=options.max_tokens,
            sampling=sampling_of(options),
            template_options=self._template,
            weights=weights,
        )
