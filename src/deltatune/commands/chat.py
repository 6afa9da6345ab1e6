"""`deltatune chat` talks to a model, with an adapter, without it, or with both."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..machine import startup
from ..options.generation import ChatOptions
from ..wrapping import say
from .flags import add_adapter, add_model, add_sampling, given_flags

if TYPE_CHECKING:
    from ..answering.dialogue import Dialogue
    from ..answering.session import Session

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
        options: The options of the command.
    """

    def __init__(self, options: ChatOptions):
        import mlx.core as mx

        from ..answering.session import Session
        from ..lora.without import can_be_without

        if options.seed is not None:
            mx.random.seed(options.seed)
        self._options = options
        self._compares = options.compare
        self._session = Session.open(options)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._session)
        bounded = options.memory is not None
        if bounded:
            self._plan(_TOKENS)
        self._can_compare = options.adapter_path is not None and (not bounded or can_be_without(self._session.model))
        if options.compare and not self._can_compare:
            self._stack.close()
            raise UserError(
                "--compare: this adapter cannot be switched off, so a second model would be needed, and --memory "
                "allows one; leave one of them out."
            )
        self._answering = self._conversation(self._session)
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
        """Return a question; a pipe gets no prompt, since its reader wants only answers."""
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
        """Obey one of the letters, or answer."""
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

    def _plan(self, tokens: int) -> None:
        """Plan memory for a conversation of so many tokens."""
        from ..plan.forward_placement import AskedPrompt, placed_answer

        asked = AskedPrompt([0] * tokens, self._options.max_tokens)
        self._session.place(partial(placed_answer, prompt=asked), "token")
        self._room = tokens

    def _make_room(self, question: str) -> None:
        """Plan memory anew where a question ends a longer conversation than was planned for.

        Raises:
            UserError: Memory is too little for it, or the chat template refuses it.
        """
        if self._options.memory is None:
            return
        dialogues = [dialogue for dialogue in (self._answering, self._base) if dialogue is not None]
        tokens = max(len(dialogue.prompt(question)) for dialogue in dialogues)
        room = self._room
        while room < tokens:
            room *= 2
        if room > self._room:
            say(f"The conversation has {tokens:,} tokens. Memory is planned anew, for {room:,}.", sys.stderr)
            self._plan(room)

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
        except UserError as error:
            # A refusal of the template costs the question, not the conversation.
            say(f"deltatune: {error}", sys.stderr)
            return False
        finally:
            pieces.close()
        print(flush=True)
        return True

    @contextlib.contextmanager
    def _bare(self) -> Iterator[Dialogue]:
        """Yield a conversation with the base, of which it has heard the questions that were put to both."""
        from ..answering.session import Session
        from ..lora.without import can_be_without, without_adapters

        shared = can_be_without(self._session.model)
        if self._base is None:
            alone = dataclasses.replace(self._options, adapter_path=None, compare=False)
            self._base = self._conversation(self._session if shared else Session.open(alone))
        with without_adapters(self._session.model) if shared else contextlib.nullcontext():
            yield self._base

    def _conversation(self, session: Session) -> Dialogue:
        from ..answering.dialogue import Dialogue

        return Dialogue(
            session,
            system_prompt=self._options.system_prompt,
            max_tokens=self._options.max_tokens,
            template_options=self._session.template_options,
        )
