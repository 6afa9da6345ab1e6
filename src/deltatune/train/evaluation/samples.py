"""Samples of a run: the answers to `sample_prompts`, which the model gives before, during and after training.

An answer takes the likeliest token at every step and draws no random number. It changes nothing that training reads, so
a run with samples computes the same bits as one without.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...data.chats.rendering import Renderer
from ...data.prompts import PromptWriter, Question, messages_to_answer, prompt_tokens, text_tokens
from ...data.rows.row_formats import (
    Conversation,
    Features,
    Messages,
    RowFormats,
    join_text_parts,
    template_options_of,
    tools_of,
)
from ...data.rows.sources import jsonl
from ...data.vision.images import thumbnail
from ...data.vision.messages import media_kind, place_media, write_videos
from ...data.vision.videos import Video
from ...errors import UserError
from ...machine.environment import expanded
from ...models.load import Loaded
from ...models.vision.split import has_vision
from ...models.vocabulary import check_prompt
from ...options.config import TrainConfig
from ...options.generation import AnswerOptions
from ..by_layer.store import Store
from ..distributed import World
from ..ending.early_end import Ending
from ..progress import Progress
from .inference import Inference, Prompt

_REMEDY = "change this entry of sample_prompts"


class Samples:
    """Answers the prompts of `config.sample_prompts` with the model that is trained; an unfit prompt is a UserError.

    With `plain_text` data, a prompt is continued as it stands; otherwise it is the message of a user, if the tokenizer
    has a chat template. `weights` is the store of layers that stay on the disk.
    """

    def __init__(self, loaded: Loaded, config: TrainConfig, *, plain_text: bool = False, weights: Store | None = None):
        self._tokenizer = loaded.tokenizer
        self._config = config
        self._plain = plain_text
        # The largest number of tokens in an answer.
        self._most = config.max_completion_length if config.samples_answers else AnswerOptions.max_tokens
        chat = bool(config.sample_prompts) and not plain_text
        self._inference = Inference(loaded, chat=chat, weights=weights)
        if config.sample_prompts and has_vision(loaded.model) and loaded.processor is None:
            raise UserError(
                "sample_prompts: a model with a vision tower is asked through its processor; give the Trainer "
                "processor=loaded.processor."
            )
        self.notes: list[str] = []
        self.prompts = [prompt for number in range(len(config.sample_prompts)) for prompt in self._entry(number)]
        for number, prompt in enumerate(self.prompts, 1):
            source = f"sample_prompts: prompt {number}"
            if not prompt.tokens:
                raise UserError(f"{source}: no token is left of it; {_REMEDY}.")
            if len(prompt.tokens) > config.max_seq_length:
                raise UserError(
                    f"{source}: it has {len(prompt.tokens):,} tokens, and max_seq_length is "
                    f"{config.max_seq_length:,}; shorten it."
                )
            check_prompt(loaded.model, loaded.tokenizer, prompt.tokens, source)

    def are_due(self, progress: Progress, *, last: bool) -> bool:
        """Return whether the prompts are to be answered now; `last` says that the run ends here."""
        at = progress.iteration
        return bool(self.prompts) and progress.sampled != at and (last or at % self._config.steps_per_eval == 0)

    def answers(self, ended: Callable[[], bool]) -> list[dict[str, str]] | None:
        """Answer every prompt; None if `ended`, which is called after each token, ended it by True.

        An entry has the `prompt`, the `answer`, and the answer that is `expected` where the prompt's row has one.
        """
        answers = []
        for prompt in self.prompts:
            parts = []
            with contextlib.closing(self._inference.answer(prompt, self._most)) as pieces:
                for piece in pieces:
                    parts.append(piece.text)
                    if ended():
                        return None
            expected = {} if prompt.expected is None else {"expected": prompt.expected}
            answers.append({"prompt": prompt.text, **expected, "answer": "".join(parts)})
        return answers

    def on_main(self, world: World, ending: Ending) -> list[dict[str, str]] | None:
        """Return answers() on rank 0 and an empty list elsewhere; None if a lone process was asked to stop.

        Every rank must call it, and waits for rank 0.
        """
        of_main: list[list[dict[str, str]] | None] = []
        world.do_on_main(lambda: of_main.append(self.answers(ending.asks_to_stop)), "answer sample_prompts")
        return of_main[0] if of_main else []

    def _entry(self, number: int) -> list[Prompt]:
        entry = self._config.sample_prompts[number]
        options = self._config.chat_template_config
        if entry.endswith(".jsonl"):
            path = expanded(entry)
            writer = PromptWriter(self._tokenizer, options)
            rows = [self._row(row, source, path.parent, writer) for source, row in jsonl(path).rows()]
            if not rows:
                raise UserError(f"{entry}: no row in it; expected a prompt in each row.")
            self.notes += writer.notes(entry)
            return rows
        if self._plain:
            return [Prompt(text_tokens(self._tokenizer, entry), text=entry)]
        refused = f"{_REMEDY}: {entry!r}"
        tokens = prompt_tokens(self._tokenizer, Question(entry), template_options=options, refused=refused)
        return [Prompt(tokens, text=entry)]

    def _row(self, row: Any, source: str, folder: Path, writer: PromptWriter) -> Prompt:
        """Return the prompt of a row: its messages before the last answer, and that answer as the expected one.

        Its pictures are files below the folder.
        """
        features = Features.of(vars(self._config))
        parts = messages_to_answer(row, source, features)
        if parts is None:
            text = RowFormats(features).text(row, source).text
            return Prompt(text_tokens(self._tokenizer, text), text=text)
        asked = len(parts[0])
        messages = [*parts[0], *parts[1][:1]]
        pictures = None
        values: list[Any] = []
        if not (kind := media_kind(row, messages)):
            shown = messages = join_text_parts(messages, source)
        elif self._inference.loaded.processor is None:
            raise UserError(
                f"{source}: {kind}s in a prompt, and none in the training data, so the model has no vision tower here; "
                "leave them out."
            )
        else:
            shown, placed = place_media(messages, row, source)
            values = [value for _, value in placed]
            pictures = self._inference.pictures(values, source, folder, vars(self._config))
            messages = write_videos(shown, pictures.video_texts)
        tokens = writer.tokens(messages[:asked], row, source)
        return Prompt(
            tokens if pictures is None else pictures.placed(tokens, source),
            pictures,
            text=written(shown[:asked]),
            expected=self._expected(messages, row, source) if messages[asked:] else None,
            thumbnails=[thumbnail(value, folder, source) for value in values if not isinstance(value, Video)],
        )

    def _expected(self, messages: Messages, row: Any, source: str) -> str:
        """Return the last message as the chat template writes it behind its prompt, without the end of a turn."""
        options = template_options_of(row, source)
        conversation = Conversation(messages, tools_of(row, source), [len(messages) - 1], False, source, options)
        row = Renderer(self._tokenizer, self._config.chat_template_config).rows(conversation)[-1]
        ((start, *_), end) = row.turns[-1]
        text = row.text[start:end].rstrip()
        tokenizer = self._inference.tokenizer
        ends = map(tokenizer.decode, ([token] for token in tokenizer.eos_token_ids))
        return next((text.removesuffix(mark) for mark in ends if mark and text.endswith(mark)), text)


def written(messages: str | Messages) -> str:
    """Return a conversation as a reader of the report sees it: one message alone, or each behind its role."""
    if isinstance(messages, str):
        return messages
    texts = [_shown(message.get("content")) or _calls(message) for message in messages]
    if len(messages) == 1:
        return texts[0]
    return "\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def _calls(message: dict[str, Any]) -> str:
    """Each call of a message as its function and arguments, which a row may hold as text."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    pairs = ((function.get("name"), function.get("arguments", {})) for function in functions)
    return "\n".join(f"{name} {x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)}" for name, x in pairs)


def _shown(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)
