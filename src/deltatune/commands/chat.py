"""`deltatune chat` talks to a model, with an adapter, without it, or with both."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from functools import partial
from typing import TYPE_CHECKING

from ..errors import NoResultError, UserError
from ..machine import startup
from ..machine.wrapping import say
from ..options.generation import ChatOptions
from .flags import add_adapter, add_fields, add_model, given_flags

if TYPE_CHECKING:
    from ..answering.dialogue import Dialogue
    from ..answering.session import Session

_HELP = "q ends the conversation, r forgets it, h prints this"
_COMPARED = ", c asks the base too, or no more"
# Memory is planned for a conversation of so many tokens at first, and for twice as many where it is longer.
_TOKENS = 2048


HELP = "talk to a model, with an adapter, without it, or with both"
DESCRIPTION = "Talk to a model. Ctrl-C ends an answer, and the conversation where none is being given."


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "folder of the model")
    add_adapter(parser)
    add_fields(parser, ChatOptions)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user ends it, and return exit code 0."""
    options = ChatOptions(**given_flags(ChatOptions, arguments))
    if not options.trust_remote_code:
        startup.leave_torch_out()
    chat(options)
    return 0


def chat(options: ChatOptions) -> None:
    """Talk to the model of the options until the user ends it."""
    from ..answering.session import Session

    with Session.open(options) as session:
        Chat(options, session).talk()


class Chat:
    """A conversation on the terminal with the model of a session."""

    def __init__(self, options: ChatOptions, session: Session):
        from ..lora.convert import can_be_without

        self._options = options
        self._compares = options.compare
        self._session = session
        bounded = options.memory is not None
        if bounded:
            self._plan(_TOKENS)
        self._shared = can_be_without(session.model)
        self._can_compare = options.adapter_path is not None and (not bounded or self._shared)
        if options.compare and not self._can_compare:
            raise UserError(
                "--compare: this adapter cannot be switched off, so a second model would be needed, and --memory "
                "allows one; leave one of them out."
            )
        # The base joins them when it is first asked.
        self._dialogues = [self._dialogue(session)]

    def talk(self) -> None:
        """Read questions and print answers, until `q`, the end of the input, or Ctrl-C between answers."""
        adapter = f", {self._options.adapter_path}" if self._options.adapter_path else ""
        say(f"{self._options.model}{adapter}. {self._help()}.")
        with contextlib.suppress(EOFError, KeyboardInterrupt):
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
        if question == "h":
            say(f"{self._help()}.")
        elif question == "r":
            for dialogue in self._dialogues:
                dialogue.reset()
            print("What was said is forgotten.", flush=True)
        elif question == "c" and self._can_compare:
            self._compares = not self._compares
            print("The base answers, too." if self._compares else "The adapter answers alone.", flush=True)
        elif question:
            self._answer(question)

    def _plan(self, tokens: int) -> None:
        from ..plan.forward_placement import placed_answer
        from ..train.evaluation.inference import Prompt

        plan = partial(placed_answer, prompt=Prompt([0] * tokens), max_tokens=self._options.max_tokens)
        self._session.place(plan, "token")
        self._room = tokens

    def _make_room(self, question: str) -> None:
        """Plan memory anew for a longer conversation; UserError where it is too little, or the template refuses it."""
        if self._options.memory is None:
            return
        tokens = max(len(dialogue.prompt(question)) for dialogue in self._dialogues)
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
        if self._compares:
            if not self._ask_base(question):
                return
            print("adapter:")
        self._print(self._dialogues[0], question)

    def _print(self, dialogue: Dialogue, question: str) -> bool:
        """Print an answer as it comes; return False where Ctrl-C ended it."""
        pieces = dialogue.ask(question)
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
            # A refusal of the template costs the question, not the conversation.
            say(f"deltatune: {error}", sys.stderr)
            return False
        finally:
            pieces.close()
        print(flush=True)
        return True

    def _ask_base(self, question: str) -> bool:
        """Print the answer of the base, which has heard the questions that were put to both."""
        from ..answering.session import Session
        from ..lora.convert import without_adapters

        if len(self._dialogues) == 1:
            alone = dataclasses.replace(self._options, adapter_path=None, compare=False, seed=None)
            self._dialogues.append(self._dialogue(self._session if self._shared else Session.open(alone)))
        print("base:")
        with without_adapters(self._session.model) if self._shared else contextlib.nullcontext():
            return self._print(self._dialogues[1], question)

    def _dialogue(self, session: Session) -> Dialogue:
        from ..answering.dialogue import Dialogue

        options = self._options
        variables = self._session.template_options
        return Dialogue(
            session, system_prompt=options.system_prompt, max_tokens=options.max_tokens, template_options=variables
        )
