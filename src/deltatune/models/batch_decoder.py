"""Continues many prompts at once: one compiled step gives every row of a batch its next token.

Ended rows make room for waiting prompts (continuous batching). The caches of all rows have room beforehand, so that the
step is one graph of shapes that seldom change, and a step is started before the tokens of the one before it are read.
On an NVIDIA GPU such a step takes as long as its launches, of which mlx-lm has several times as many.
"""

from __future__ import annotations

import contextlib
import io
import operator
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from ..errors import NotFiniteError, UserError
from ..layers import gated_delta_layers, logits_of
from ..machine import backend, host_memory
from ..machine.compiling import without_kernels
from ..machine.host_memory import as_numpy
from ..ops.decoding.row_caches import AttentionRows, RecurrentRows
from ..ops.functional import arrays_of
from ..ops.operator.measure import relative_norm
from ..ops.tracing import trace
from ..ops.tracing.trace import Factors
from ..patches import patched
from .generate import Chosen

# How many tokens of prompts are read at a time, of one row or of several. mlx-lm reads 2,048 of one.
PROMPT_TOKENS = {"cuda": 8192, "metal": 2048, "cpu": 2048}
# How many tokens a row has room for at first. The room is doubled when a row needs more, and the step traced anew.
LEAST_ROOM = 256
# Prompts are read when one row in so many is free, since all other rows wait meanwhile.
SHARE_FREE = 8
# The tolerance between two ways of reading a prompt, over the norm of a state: far more than their rounding.
ROUNDED = 0.1

Sampler = Callable[[mx.array], mx.array]
# Chooses the next token of each row from its logits [B, V].
Chooser = Callable[[mx.array], Chosen]
# Whether an answer of these tokens ends with the last of them, which is no end token.
Stops = Callable[[Sequence[int]], bool]
Step = Callable[..., tuple[mx.array, list[list[mx.array]], mx.array]]


def is_covered(model: nn.Module) -> bool:
    """Whether BatchDecoder answers prompts in the place of mlx-lm: for hybrid gated-delta models, where it is fast."""
    return bool(gated_delta_layers(model)) and has_row_caches(model)


def has_row_caches(model: nn.Module) -> bool:
    """Whether BatchDecoder can keep the caches of a model's layers: states, or keys and values of whole rows.

    Models of mlx-vlm take positions besides. Windows have caches of other kinds, and latent attention reads the mask of
    a token in a way of its own.
    """
    if not type(model).__module__.startswith("mlx_lm."):
        return False
    kinds = {type(cache) for cache in make_prompt_cache(model)}
    latent = any(name.startswith("kv_a_proj") for module in model.modules() for name in module.children())
    return kinds <= {ArraysCache, KVCache} and not latent


@dataclass
class Answer:
    """The answer to a prompt: tokens without its end token, `end`, which is None for one that was cut or `stopped`.
    `figures` are the chooser's, [F] for each token, that of the end included.
    """

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    end: int | None = None
    stopped: bool = False
    figures: list[list[float]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the answer ended by itself."""
        return self.stopped or self.end is not None

    def take(self, token: int, figures: list[float], ends: Collection[int], stops: Stops | None) -> None:
        """Add a token with its figures; it ends the answer if it is one of `ends`, or if `stops` says so."""
        self.figures.append(figures)
        if token in ends:
            self.end = token
            return
        self.tokens.append(token)
        self.stopped = stops is not None and stops(self.tokens)


def chooser_of(sampler: Sampler | None) -> Chooser:
    """Return the chooser of a sampler, which takes log-probabilities [B, V]; of the likeliest tokens for None."""

    def choose(logits: mx.array) -> Chosen:
        if sampler is None:
            total = mx.logsumexp(logits, axis=-1)
            tokens = logits.argmax(axis=-1)
        else:
            logits = logits.astype(mx.float32)
            total = mx.logsumexp(logits, axis=-1)
            tokens = sampler(logits - total[:, None])
        # NaN as any token's logit leaves no token a probability.
        return Chosen(tokens.astype(mx.int32), mx.stack([tokens.astype(mx.float32), total.astype(mx.float32)]))

    return choose


class BatchDecoder:
    """Continues prompts, `rows` at a time, until each has ended or has `max_tokens`; within `patched()`, in inference
    mode.

    The model `has_row_caches`. A step is not `compiled` where layers read their weights. Rows have room for `room`
    tokens at first. If it `trains`, trainable weights change between two calls of run() or answers(): they are then
    arguments of the compiled step, which is not traced anew, and other weights are constants in it.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        ends: Collection[int],
        max_tokens: int,
        *,
        compiled: bool = True,
        room: int = LEAST_ROOM,
        trains: bool = False,
    ):
        self._model = model
        self._ends = frozenset(ends)
        self._max_tokens = max_tokens
        self._choose = chooser_of(None)
        self._stops: Stops | None = None
        self._first_room = room
        self._trains = trains
        self._kinds = [type(cache) for cache in make_prompt_cache(model)]
        self._clear(rows)
        # Whether prompts of different lengths can be read together; None until that was tried. Other recurrences than
        # gated-delta ones may take the padding for tokens.
        recurrent = ArraysCache in self._kinds and not gated_delta_layers(model)
        self._padding_is_right: bool | None = False if recurrent else None
        self._trained: Any = {}
        # The addresses of arrays that the host reads.
        self._left_on_host: set[int] = set()
        self._factors: list[mx.array] | None = None
        self._step, self._arguments_of = _step_of(model, self._kinds, trains)
        if compiled:
            self._step = mx.compile(self._step)
            self._arguments_of = mx.compile(self._arguments_of)

    def _clear(self, rows: int) -> None:
        """Begin anew with free rows, so that nothing depends on earlier answers."""
        self._rows: list[Answer | None] = [None] * rows
        # By layer: a recurrence's states, or the keys and values of an attention.
        self._arrays: list[list[mx.array]] = []
        self._tokens = mx.zeros(rows, mx.int32)
        self._offset = mx.zeros(rows, mx.int32)
        self._room = self._first_room
        # No row has more tokens with those that are under way.
        self._most = 0

    def run(self, prompts: Sequence[Sequence[int]], sampler: Sampler | None = None) -> list[list[int]]:
        """Return the tokens behind each prompt, without the one that ended it, as `sampler` chooses them of
        log-probabilities [B, V], by default the likeliest. NotFiniteError for a chosen token's logit that is not
        finite.
        """
        return [answer.tokens for answer in self.answers(prompts, chooser_of(sampler))]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        choose: Chooser,
        between: Callable[[], None] | None = None,
        stops: Stops | None = None,
    ) -> list[Answer]:
        """Return the answer to each prompt; a prompt that comes several times in a row is read once.

        `between` is called before each step, and may leave it by an error. `stops` ends answers beside their end
        tokens. NotFiniteError for a chosen token's logit that is not finite.
        """
        self._choose = choose
        self._stops = stops
        self._trained = self._model.trainable_parameters() if self._trains else {}
        self._factors = None if self._trains else []
        self._clear(len(self._rows))
        answers = [Answer(prompt) for prompt in prompts]
        waiting = deque(answers)
        while waiting or any(self._rows):
            self._admit(waiting)
            self._decode(max(1, len(self._rows) // SHARE_FREE) if waiting else len(self._rows), between)
        self._arrays = []
        self._trained = {}
        self._factors = None
        return answers

    def _decode(self, enough: int, between: Callable[[], None] | None) -> None:
        before: Chosen | None = None
        while True:
            if between is not None:
                between()
            self._most += 1
            if self._most > self._room:
                self._make_room()
            following = self._launch()
            if before is not None:
                self._take(before)
            before = following
            # A row that ended with the tokens just read has one more under way, which nobody takes.
            if self._rows.count(None) >= enough:
                break
        self._take(before)

    def _launch(self) -> Chosen:
        """Launch a step; return the chosen tokens."""
        if self._factors is None:
            arguments = self._arguments_of(self._trained, self._tokens, self._arrays, self._offset)
            self._trained, self._factors, _ = arguments
            mx.eval(self._factors)
        # No other name may hold the arrays: MLX then reuses their memory for those of the next step.
        logits, self._arrays, self._offset = self._step(
            self._trained, self._factors, self._tokens, self._arrays, self._offset
        )
        chosen = self._choose(logits)
        self._tokens = chosen.tokens
        mx.async_eval(chosen, self._arrays, self._offset)
        return chosen

    def _take(self, chosen: Chosen) -> None:
        """Read the tokens of a step, which ends the rows that are done."""
        read = as_numpy(chosen.figures)
        if backend.device() == "cuda" and read.ctypes.data not in self._left_on_host:
            # The GPU would wait for the page that the host has just read.
            self._left_on_host.add(read.ctypes.data)
            host_memory.stay([chosen.figures])
        # Copied, so that the same few arrays serve all tokens.
        numbers = read.T.tolist()
        healthy = np.isfinite(read).all(axis=0).tolist()
        for place, row in enumerate(self._rows):
            if row is None:
                continue
            if not healthy[place]:
                raise NotFiniteError([*row.prompt, *row.tokens])
            token, *figures = numbers[place]
            row.take(int(token), figures, self._ends, self._stops)
            if row.ended or len(row.tokens) >= self._max_tokens:
                self._rows[place] = None

    def _make_room(self) -> None:
        """Make room for the tokens that the next step and the one under way add."""
        self._most = max((len(row.prompt) + len(row.tokens) for row in self._rows if row), default=0) + 2
        if self._most <= self._room:
            return
        self._room = _doubled(self._room, self._most)
        # The step under way writes into the keys and values that are copied here, which MLX does not know.
        mx.eval(self._tokens)
        for kind, layer_arrays in zip(self._kinds, self._arrays, strict=True):
            if kind is KVCache:
                layer_arrays[:] = [_widened(array, self._room) for array in layer_arrays]

    def _admit(self, waiting: deque[Answer]) -> None:
        places = [place for place, row in enumerate(self._rows) if row is None]
        while places and waiting:
            group = [waiting.popleft()]
            while waiting and len(group) < len(places) and self._joins(group, waiting[0]):
                group.append(waiting.popleft())
            for part in [group] if self._may_be_padded(group) else [[row] for row in group]:
                self._place(part, places[: len(part)], self._read(part))
                del places[: len(part)]

    def _joins(self, group: list[Answer], row: Answer) -> bool:
        """Whether a prompt is read with others, behind which the shorter ones are padded."""
        longest = max(len(member.prompt) for member in (*group, row))
        alike = self._padding_is_right is not False or len(row.prompt) == longest == len(group[0].prompt)
        return alike and longest * len(_distinct([*group, row])) <= backend.here(PROMPT_TOKENS)

    def _may_be_padded(self, group: list[Answer]) -> bool:
        """Whether prompts can be read together, which is tried with the first ones of different lengths.

        The recurrent layers of some models keep the padding's inputs for their convolutions.
        """
        shortest = min(group, key=lambda row: len(row.prompt))
        if self._padding_is_right is None and len(shortest.prompt) < max(len(row.prompt) for row in group):
            together = self._read(group)
            alone = self._read([shortest])
            at = group.index(shortest)
            pairs = [
                (row_state[at], row_state_alone[0])
                for kind, *both in zip(self._kinds, together, alone, strict=True)
                if kind is ArraysCache
                for row_state, row_state_alone in zip(*both, strict=True)
            ]
            self._padding_is_right = all(relative_norm(one, other) < ROUNDED for one, other in pairs)
        return self._padding_is_right is not False or len({len(row.prompt) for row in group}) == 1

    def _read(self, group: list[Answer]) -> list[list[mx.array]]:
        """Read all but the last token of prompts, which the next step takes; return each layer's cache arrays."""
        distinct = _distinct(group)
        if len(distinct) < len(group):
            at = {id(row.prompt): place for place, row in enumerate(distinct)}
            rows = mx.array([at[id(row.prompt)] for row in group])
            return [[array[rows] for array in layer_arrays] for layer_arrays in self._read(distinct)]
        lengths = [len(row.prompt) - 1 for row in group]
        longest = max(lengths)
        if longest == 0:
            # There is nothing to read yet. Another token shows the shapes of the caches.
            return [
                [mx.zeros_like(array) for array in layer_arrays]
                for layer_arrays in self._read([Answer([0, 0]) for _ in group])
            ]
        padded = [[*row.prompt[:-1], *[0] * (longest - length)] for row, length in zip(group, lengths, strict=True)]
        tokens = mx.array(padded)
        caches = make_prompt_cache(self._model)
        if set(lengths) != {longest}:
            for cache in caches:
                if isinstance(cache, ArraysCache):
                    cache.prepare(lengths=lengths)
        piece = backend.here(PROMPT_TOKENS)
        for start in range(0, longest, piece):
            logits_of(self._model, tokens[:, start : start + piece], cache=caches)
            mx.eval([cache.state for cache in caches])
        return [list(cache.keys_and_values() if isinstance(cache, KVCache) else cache.cache) for cache in caches]

    def _place(self, group: list[Answer], places: list[int], states: list[list[mx.array]]) -> None:
        """Put prompts, and the arrays of each layer's cache, into free rows."""
        for place, row in zip(places, group, strict=True):
            self._rows[place] = row
        if not self._arrays:
            self._arrays = [
                [mx.zeros((len(self._rows), *_roomy(array, kind, self._room)), array.dtype) for array in layer_arrays]
                for kind, layer_arrays in zip(self._kinds, states, strict=True)
            ]
        self._make_room()
        at = mx.array(places)
        for kind, layer_arrays, new in zip(self._kinds, self._arrays, states, strict=True):
            for index, array in enumerate(new):
                if kind is ArraysCache:
                    layer_arrays[index][at] = array
                else:
                    layer_arrays[index][at, :, : array.shape[2]] = array
        self._tokens[at] = mx.array([row.prompt[-1] for row in group], mx.int32)
        self._offset[at] = mx.array([len(row.prompt) - 1 for row in group], mx.int32)
        mx.eval(self._arrays, self._tokens, self._offset)


def room_for(tokens: int) -> int:
    """Return for how many tokens a row has room that gets so many."""
    return _doubled(LEAST_ROOM, tokens + 2)


def _doubled(room: int, least: int) -> int:
    while room < least:
        room *= 2
    return room


def _distinct(group: Sequence[Answer]) -> list[Answer]:
    """The first answer to each prompt of a group; one prompt is the same object for all answers to it."""
    return list({id(row.prompt): row for row in reversed(group)}.values())[::-1]


def _step_of(model: nn.Module, kinds: Sequence[type], trains: bool) -> tuple[Step, Callable[..., Any]]:
    """The step: it returns the logits after one token of each row, the rows' caches, and the next offsets.

    Its first arguments are the trainable parameters and the factors that layers compute from them, where they change
    between steps; otherwise an empty dict and list. The second function returns those of them that the step reads: MLX
    would look at each of some hundred others at every token.
    """
    # The numbers of the factors that the step reads.
    read: list[int] = []

    def forward(
        trained: Any, factors: Factors, tokens: mx.array, arrays: list[list[mx.array]], offset: mx.array
    ) -> tuple[mx.array, list[RecurrentRows | AttentionRows]]:
        caches = [
            RecurrentRows(layer_arrays)
            if kind is ArraysCache
            else AttentionRows(layer_arrays[0], layer_arrays[1], offset)
            for kind, layer_arrays in zip(kinds, arrays, strict=True)
        ]
        before = model.trainable_parameters() if trains else {}
        model.update(trained)
        try:
            with trace.having(next_tokens=True, factors=factors if trains else None):
                return logits_of(model, tokens[:, None], cache=caches)[:, -1], caches
        finally:
            model.update(before)

    def arguments_of(
        trained: Any, tokens: mx.array, arrays: list[list[mx.array]], offset: mx.array
    ) -> tuple[Any, list[mx.array], mx.array]:
        factors = Factors()
        logits, caches = forward(trained, factors, tokens, arrays, offset)
        weights = list(arrays_of(trained).values())
        outputs = [logits, *(array for cache in caches for array in cache.handed)]
        are_read = _are_read(outputs, [*weights, *factors.handed])
        read[:] = [number for number, is_read in enumerate(are_read[len(weights) :]) if is_read]
        # A compiled function has to return something, where no layer has factors.
        return trained if any(are_read[: len(weights)]) else {}, [factors.noted[number] for number in read], offset

    def step(
        trained: Any, factors: list[mx.array], tokens: mx.array, arrays: list[list[mx.array]], offset: mx.array
    ) -> tuple[mx.array, list[list[mx.array]], mx.array]:
        logits, caches = forward(trained, Factors(dict(zip(read, factors, strict=True))), tokens, arrays, offset)
        for cache, layer_arrays in zip(caches, arrays, strict=True):
            # A kernel of attention writes into the keys and values that it gets.
            if isinstance(cache, RecurrentRows) and any(map(operator.is_, cache.handed, layer_arrays)):
                raise UserError(
                    f"{type(model).__module__}: a layer writes its state to caches of mlx-lm's own class alone, so "
                    "answers to many prompts cannot be sampled at once."
                )
        return logits, [cache.handed for cache in caches], offset + 1

    return step, arguments_of


def _are_read(outputs: Sequence[mx.array], arrays: Sequence[mx.array]) -> list[bool]:
    """Return for each of some arrays whether any other is computed from it on the way to the outputs."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs, **{f"array{number}": array for number, array in enumerate(arrays)})
    graph = text.getvalue()
    return [f'"array{number}" -> ' in graph for number in range(len(arrays))]


def _roomy(array: mx.array, kind: type, room: int) -> tuple[int, ...]:
    """The shape of a row, with room for so many tokens where it has tokens."""
    return (array.shape[1], room, array.shape[3]) if kind is KVCache else array.shape[1:]


def _widened(array: mx.array, room: int) -> mx.array:
    """The keys or values [B, H, T, D] with room for so many tokens."""
    more = mx.zeros((*array.shape[:2], room - array.shape[2], array.shape[3]), array.dtype)
    return mx.concatenate([array, more], axis=2)


# How many prompts are continued at a time.
ROWS = 128
# The same for mlx-lm's generation, by device; ROWS on other devices. On CUDA, MLX's rotary embedding of one token fails
# for larger batches of models with few rotated pairs, such as the demo's.
_ROWS_OF_MLX_LM = {"cuda": 32}


def answer_all(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampler: Sampler | None = None,
    rows: int = ROWS,
    compiled: bool = True,
) -> list[list[int]]:
    """Return the tokens that continue each prompt, of any lengths, without the one that ended the answer.

    `sampler` chooses a token for each row from log-probabilities [B, V]; by default the likeliest. The model is left in
    inference mode. Steps that read their weights cannot be `compiled`. NotFiniteError for a token's probability.
    """
    model.eval()
    # Building kernels would take longer than all the answers of an evaluation take without them.
    with without_kernels(), patched():
        if is_covered(model):
            rows = min(rows, len(prompts))
            decoder = BatchDecoder(model, rows, tokenizer.eos_token_ids, max_tokens, compiled=compiled)
            return decoder.run(prompts, sampler)
        rows = min(rows, backend.here(_ROWS_OF_MLX_LM, ROWS))
        generator = AnswerGenerator(model, rows, tokenizer.eos_token_ids, max_tokens, _log_probabilities)
        return [answer.tokens for answer in generator.answers(prompts, chooser_of(sampler))]


def _log_probabilities(every: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(every, tokens[:, None], axis=-1).T


def can_be_joined(model: nn.Module) -> bool:
    """Whether mlx-lm joins the caches of several rows of a model, which is one of its own."""
    of_mlx_lm = type(model).__module__.startswith("mlx_lm.")
    return of_mlx_lm and all(hasattr(cache, "merge") for cache in make_prompt_cache(model))


@dataclass
class AnswerGenerator:
    """Continues prompts by mlx-lm's BatchGenerator, so many at a time, until each has ended: for models with caches of
    kinds that BatchDecoder lacks.

    `figures` returns the figures [F, B] of tokens [B] by log-probabilities of the model [B, V], as a chooser returns
    them behind the tokens.
    """

    model: nn.Module
    rows: int
    ends: Collection[int]
    max_tokens: int
    figures: Callable[[mx.array, mx.array], mx.array]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        choose: Chooser,
        between: Callable[[], None] | None = None,
        stops: Stops | None = None,
    ) -> list[Answer]:
        """Return the answer to each prompt, as BatchDecoder.answers() does."""
        answers = [Answer(prompt) for prompt in prompts]
        longest = max(map(len, prompts), default=1)
        generator = BatchGenerator(
            self.model,
            max_tokens=self.max_tokens,
            stop_tokens=[[end] for end in self.ends],
            sampler=lambda log_probabilities: choose(log_probabilities).tokens,
            completion_batch_size=self.rows,
            prefill_batch_size=max(1, min(self.rows, backend.here(PROMPT_TOKENS) // longest)),
        )
        waiting = dict(zip(generator.insert([list(prompt) for prompt in prompts]), answers, strict=True))
        with contextlib.closing(generator):
            while waiting:
                if between is not None:
                    between()
                responses = generator.next_generated()
                rows = [waiting[response.uid] for response in responses]
                tokens = mx.array([response.token for response in responses])
                figures = as_numpy(self.figures(mx.stack([response.logprobs for response in responses]), tokens))
                if not np.isfinite(figures).all():
                    raise NotFiniteError(*([*row.prompt, *row.tokens] for row in rows))
                for row, response, of_token in zip(rows, responses, figures.T, strict=True):
                    row.take(response.token, of_token.tolist(), self.ends, stops)
                    if row.stopped and response.finish_reason is None:
                        generator.remove([response.uid])
                    if row.stopped or response.finish_reason is not None:
                        del waiting[response.uid]
        return answers
