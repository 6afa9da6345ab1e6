"""Lets a model answer: one prompt, or each question of a conversation, behind the messages before it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ..data.chats.answers import AnswerParser
from ..data.prompts import Question, conversation_text
from ..errors import UserError
from ..models.generate import Sampling
from ..models.load import Loaded
from ..models.vocabulary import check_prompt
from ..options.generation import AnswerOptions
from ..train.evaluation.inference import Inference, Prompt


def generate(
    loaded: Loaded,
    prompt: str | Sequence[str],
    *,
    system_prompt: str | None = None,
    max_tokens: int = 100,
    temp: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    template_options: Mapping[str, Any] | None = None,
) -> str | list[str]:
    """Return the model's answer to a prompt, or to each of several, through the chat template if the model has one.

    Several prompts are answered at once, which takes little longer than one.

    Args:
        loaded: The model and its tokenizer; adapters that it has count, trained a moment ago or loaded.
        prompt: The user's message, or a list of them.
        system_prompt: A system message before it.
        max_tokens: The largest number of tokens in an answer, 1 or more.
        temp: The temperature; 0 always takes the likeliest token.
        top_p: Only the likeliest tokens with this sum of probabilities are drawn from.
        min_p: Only tokens at least this likely, relative to the likeliest, are drawn from.
        top_k: Only this many of the likeliest tokens are drawn from; 0 means all.
        template_options: Variables of the chat template, such as {"enable_thinking": False}.

    Returns:
        The text of the answer, or a list of them in the prompts' order.

    Raises:
        UserError: A number is none that its option may have, the chat template refuses a prompt, the model has no row
            for a token of it, or its probabilities are not finite.

    Example:
        >>> loaded = deltatune.load("path/to/model")
        >>> deltatune.generate(loaded, "When do you open?", max_tokens=50)
        >>> deltatune.generate(loaded, ["When do you open?", "And on Sundays?"], temp=1.0)
    """
    checked = AnswerOptions(str(loaded.path), max_tokens=max_tokens, temp=temp, top_p=top_p, min_p=min_p, top_k=top_k)
    inference = Inference(loaded, Sampling(checked.temp, checked.top_p, checked.min_p, checked.top_k))
    empty = "generate: no token is left of the prompt; give one with text in it."
    refused = "change the prompt, system_prompt or template_options"
    prompts = [
        inference.prompt(
            Question(message, system_prompt), "generate", empty, template_options=template_options, refused=refused
        )
        for message in ([prompt] if isinstance(prompt, str) else prompt)
    ]
    if isinstance(prompt, str):
        return "".join(piece.text for piece in inference.answer(prompts[0], max_tokens))
    answers = inference.answer_all([row.tokens for row in prompts], max_tokens)
    return [loaded.tokenizer.decode(tokens) for tokens in answers]


@dataclass(eq=False)
class Dialogue:
    """A conversation with a model: each question is asked behind all messages before it.

    `messages` are the conversation without the system message. UserError where the tokenizer has no chat template.
    """

    inference: Inference
    _: KW_ONLY
    system_prompt: str | None = None
    max_tokens: int = 256
    template_options: Mapping[str, Any] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not self.inference.tokenizer.has_chat_template:
            raise UserError(
                "chat: the model's tokenizer has no chat template, without which a conversation has no form; "
                "deltatune generate continues a text."
            )
        self._parser = AnswerParser(self.inference.tokenizer, self.template_options)

    def ask(self, question: str) -> Generator[Any, None, None]:
        """Ask a question; the part of the answer when the iterator ends or is closed belongs to the history.

        Yield mlx-lm's responses, as models.generate.stream does. UserError where the chat template refuses the
        conversation, of which the question is then no part, or the model's probabilities are not finite.
        """
        tokens = self.prompt(question)
        parts: list[str] = []
        try:
            with contextlib.closing(self.inference.answer(Prompt(tokens), self.max_tokens)) as pieces:
                for piece in pieces:
                    parts.append(piece.text)
                    yield piece
        finally:
            self.messages = [*self.messages, _of_user(question), self._parser.message("".join(parts))]

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of a question behind all that was said; UserError where the chat template refuses them."""
        inference = self.inference
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        asked = [*system, *self.messages, _of_user(question)]
        remedy = "r starts anew, or change --system-prompt or --chat-template-config"
        text = conversation_text(inference.tokenizer, asked, remedy, self.template_options)
        tokens = inference.tokenizer.encode(text, add_special_tokens=False)
        check_prompt(inference.model, inference.tokenizer, tokens, "chat")
        return tokens

    def reset(self) -> None:
        """Forget all messages."""
        self.messages = []


def _of_user(question: str) -> dict[str, Any]:
    return {"role": "user", "content": question}
